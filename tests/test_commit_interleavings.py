"""Savers, deleters, pinners, readers and sweeps at the same time, in every order that few switches allow.

Each actor runs the real code in a thread of its own, but only one moves at a time: it holds the turn
from one store call to the next. A schedule says who moves; the explorer runs one schedule after the
other, each in a fresh store, up to a number of *preemptions* (switches away from an actor that could
go on), as nearly all races need only few of them. After every step that changed something the promises
are checked on the bare store.

A setting runs at most ``REMOTE_CKPT_SCHEDULES`` schedules (100 unless set), drawn with a fixed seed; with
3000 nearly all settings are exhausted, in some minutes.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from protocol import keys_of, load, save
from sweeping import leave_half_deleted, leave_replaced, leave_uncommitted

from remote_ckpt.changes import set_pinned
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    RemoteCkptError,
)
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import list_generations, named_keys, read_generation, read_newest
from remote_ckpt.store.base import ObjectInfo, Store
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.sweep import SweepReport, sweep
from remote_ckpt.testing.faults import FaultStore, StoreCall

Act = Callable[[Store], object]
MAX_SCHEDULES = int(os.environ.get("REMOTE_CKPT_SCHEDULES", "100"))

# Writes of data under keys of one's own concern nobody else, so nobody needs to move in between.
_PRIVATE = ("clock", "info", "write_stream", "copy")


@dataclass
class Actor:
    """One process: what it does, and what came of it."""

    name: str
    act: Act
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_done: bool = False
    result: object = None
    error: BaseException | None = None


class Run:
    """One schedule, run in a fresh store.

    Args:
        prefix: Which actor (by position) makes the first moves; later on whoever moved last goes on.
    """

    def __init__(self, root: Store, actors: Sequence[Actor], prefix: Sequence[int]) -> None:
        self.root = root
        self.actors = actors
        self.prefix = prefix
        self.moves: list[int] = []
        self.choices: list[tuple[int, ...]] = []
        self._back = threading.Semaphore(0)
        self._seen: list[ObjectInfo] = []

    def run(self, check: Callable[[Run], None]) -> None:
        threads = [threading.Thread(target=self._live, args=(actor,)) for actor in self.actors]
        for thread in threads:
            thread.start()
        while waiting := [number for number, actor in enumerate(self.actors) if not actor.is_done]:
            number = self._choose(waiting)
            self.moves.append(number)
            self.choices.append(tuple(waiting))
            self.actors[number].turn.release()
            self._back.acquire()
            self._check_if_changed(check)
        for thread in threads:
            thread.join()

    def _check_if_changed(self, check: Callable[[Run], None]) -> None:
        infos = self.root.list()
        if infos != self._seen or any(actor.is_done for actor in self.actors):
            self._seen = infos
            check(self)

    def _choose(self, waiting: Sequence[int]) -> int:
        if len(self.moves) < len(self.prefix):
            return self.prefix[len(self.moves)]
        return self.moves[-1] if self.moves and self.moves[-1] in waiting else waiting[0]

    def _live(self, actor: Actor) -> None:
        def before(call: StoreCall) -> None:
            if _is_shared(call):
                self._back.release()
                actor.turn.acquire()

        actor.turn.acquire()
        try:
            actor.result = actor.act(FaultStore(self.root, before=before))
        except RemoteCkptError as error:
            actor.error = error
        except BaseException as error:
            actor.error = error
            raise
        finally:
            actor.is_done = True
            self._back.release()


def _is_shared(call: StoreCall) -> bool:
    if call.operation == "write":
        return call.key == ".metadata"
    if call.operation == "read":
        return call.key is not None and not call.key.startswith("metadata.")
    return call.operation not in _PRIVATE


def explore(
    acts: dict[str, Act],
    *,
    prepare: Act = lambda root: None,
    preemptions: int = 2,
    check: Callable[[Run], None],
    check_end: Callable[[Run], None],
) -> int:
    """Run every schedule with so many preemptions; returns how many there were."""
    template = MemoryStore.fresh()
    prepare(template)
    pending: list[list[int]] = [[]]
    draw = random.Random(0)
    count = 0
    while pending and count < MAX_SCHEDULES:
        prefix = pending.pop(draw.randrange(len(pending)))
        run = Run(_clone(template), [Actor(name, act) for name, act in acts.items()], prefix)
        try:
            run.run(check)
            check_end(run)
        except AssertionError as error:
            names = [run.actors[number].name for number in run.moves]
            raise AssertionError(f"{error} after {' '.join(names)}") from error
        pending.extend(_alternatives(run, prefix, preemptions))
        count += 1
    return count


def _clone(template: Store) -> Store:
    """Return a copy in which everything is two days old: more than a sweep's grace period."""
    root = MemoryStore.fresh()
    for info in template.list():
        root._bucket.objects[info.key] = template.read(info.key), info.modified_at - timedelta(days=2)
    return root


def _alternatives(run: Run, prefix: Sequence[int], preemptions: int) -> Iterator[list[int]]:
    for step in range(len(prefix), len(run.moves)):
        for other in run.choices[step]:
            schedule = [*run.moves[:step], other]
            if other != run.moves[step] and _count_preemptions(run, schedule) <= preemptions:
                yield schedule


def _count_preemptions(run: Run, schedule: Sequence[int]) -> int:
    return sum(
        before != after and before in run.choices[step + 1]
        for step, (before, after) in enumerate(itertools.pairwise(schedule))
    )


# --- promises ----------------------------------------------------------------------------------------


def check_promises(run: Run) -> None:
    """The newest generation has all its objects; a pin that was reported is in force."""
    checkpoint = run.root.scope("10")
    newest = read_newest(checkpoint)
    present = {info.key for info in checkpoint.list()}
    if newest is not None and newest.is_live:
        missing = named_keys(newest.manifest) - present
        assert not missing, f"generation {newest.generation} lacks {missing}"
    pinned = [actor for actor in run.actors if actor.name == "pinner" and actor.is_done and not actor.error]
    if pinned:
        assert newest is not None, "a pinned checkpoint is gone"
        assert newest.is_live, "a pinned checkpoint was deleted"
        assert newest.manifest.pinned, "a pinned checkpoint was replaced"
        assert getattr(pinned[0].result, "save_id", None) == newest.manifest.save_id


def check_end(run: Run) -> None:
    """Errors are those that the protocol promises; who succeeded did commit; no loser's object is left."""
    check_results(run)
    check_rest(run)


def check_end_of_sweep(run: Run) -> None:
    """As :func:`check_end`; what a sweep left alone because others changed it goes with the next one."""
    check_results(run)
    (report,) = [actor.result for actor in run.actors if actor.name == "sweeper"]
    assert isinstance(report, SweepReport)
    assert report.failures == ()
    again = sweep(run.root, older_than=timedelta(0), dry_run=False)
    assert again.failures == ()
    check_rest(run)


def check_results(run: Run) -> None:
    allowed: tuple[Any, ...] = (
        CheckpointExistsError,
        CheckpointPinnedError,
        CheckpointNotFoundError,
        CheckpointChangedError,
    )
    for actor in run.actors:
        assert actor.error is None or isinstance(actor.error, allowed), f"{actor.name}: {actor.error!r}"
    committed = {manifest.save_id for manifest in _manifests(run)}
    for actor in run.actors:
        if actor.name.startswith("saver") and actor.error is None:
            assert getattr(actor.result, "save_id", None) in committed, f"{actor.name} did not commit"


def check_rest(run: Run) -> None:
    checkpoint, manifests = run.root.scope("10"), _manifests(run)
    live = manifests[-1] if manifests and manifests[-1].state == "live" else None
    load(run.root)
    needed = {*named_keys(live), ".metadata"} if live else set()
    assert keys_of(run.root) == needed, "something was left behind or is missing"
    if live and live.stock_metadata:
        assert checkpoint.read(".metadata") == checkpoint.read(live.stock_metadata.key), ".metadata is stale"


def _manifests(run: Run) -> list[Manifest]:
    checkpoint = run.root.scope("10")
    generations = list_generations(checkpoint.list())
    return [read_generation(checkpoint, generation) for generation in generations]


def create(payload: bytes) -> Act:
    return lambda root: save(root, payload)


def overwrite(payload: bytes) -> Act:
    return lambda root: save(root, payload, overwrite=True)


def delete(root: Store) -> None:
    delete_checkpoint(root.scope("10"))


def delete_if_idle(root: Store) -> None:
    delete_checkpoint(root.scope("10"), if_generation=1, if_idle=True)


def pin(root: Store) -> object:
    return set_pinned(root.scope("10"), True)


def read(root: Store) -> bytes | None:
    return load(root)


def before(root: Store) -> None:
    save(root, b"old")


def sweep_old(root: Store) -> SweepReport:
    return sweep(root, dry_run=False)


def sweep_with_tombstones(root: Store) -> SweepReport:
    return sweep(root, dry_run=False, tombstones=True)


def before_sweep(root: Store) -> None:
    """A checkpoint with everything that can be left beside it."""
    leave_replaced(root, "10")
    leave_uncommitted(root, "10")
    set_pinned(root.scope("10"), True)
    set_pinned(root.scope("10"), False)


def deleted_before_sweep(root: Store) -> None:
    leave_half_deleted(root, "10")
    leave_uncommitted(root, "10")
    root.delete(["10/notes.txt"])


SETTINGS: dict[str, tuple[dict[str, Act], Act | None, int]] = {
    "two savers": ({"saver a": create(b"a"), "saver b": create(b"b")}, None, 3),
    "two overwriters": ({"saver a": overwrite(b"a"), "saver b": overwrite(b"b")}, before, 3),
    "overwriter and reader": ({"saver a": overwrite(b"a"), "reader": read}, before, 3),
    "deleter and reader": ({"deleter": delete, "reader": read}, before, 4),
    "deleter and pinner": ({"deleter": delete, "pinner": pin}, before, 4),
    "overwriter and pinner": ({"saver a": overwrite(b"a"), "pinner": pin}, before, 3),
    "overwriter and deleter": ({"saver a": overwrite(b"a"), "deleter": delete}, before, 3),
    "overwriter and retention": ({"saver a": overwrite(b"a"), "deleter": delete_if_idle}, before, 3),
    "two deleters": ({"deleter": delete, "deleter 2": delete}, before, 4),
    "saver, deleter, pinner": ({"saver a": create(b"a"), "deleter": delete, "pinner": pin}, before, 2),
    "two overwriters, reader": (
        {"saver a": overwrite(b"a"), "saver b": overwrite(b"b"), "reader": read},
        before,
        2,
    ),
    "overwriter, deleter, pinner": (
        {"saver a": overwrite(b"a"), "deleter": delete, "pinner": pin},
        before,
        2,
    ),
}


SWEEPS: dict[str, tuple[dict[str, Act], Act, int]] = {
    "overwriter and sweeper": ({"saver a": overwrite(b"a"), "sweeper": sweep_old}, before_sweep, 3),
    "pinner and sweeper": ({"pinner": pin, "sweeper": sweep_old}, before_sweep, 3),
    "deleter and sweeper": ({"deleter": delete, "sweeper": sweep_old}, before_sweep, 3),
    "reader and sweeper": ({"reader": read, "sweeper": sweep_old}, before_sweep, 3),
    "saver of a deleted name and sweeper": (
        {"saver a": create(b"a"), "sweeper": sweep_old},
        deleted_before_sweep,
        3,
    ),
    "deleter of a deleted name and sweeper": (
        {"deleter": delete, "sweeper": sweep_old},
        deleted_before_sweep,
        3,
    ),
    "saver of a deleted name and sweeper of tombstones": (
        {"saver a": create(b"a"), "sweeper": sweep_with_tombstones},
        deleted_before_sweep,
        3,
    ),
    "two overwriters, sweeper": (
        {"saver a": overwrite(b"a"), "saver b": overwrite(b"b"), "sweeper": sweep_old},
        before_sweep,
        2,
    ),
    "overwriter, pinner, sweeper": (
        {"saver a": overwrite(b"a"), "pinner": pin, "sweeper": sweep_old},
        before_sweep,
        2,
    ),
    "overwriter, deleter, sweeper": (
        {"saver a": overwrite(b"a"), "deleter": delete, "sweeper": sweep_old},
        before_sweep,
        2,
    ),
    "two overwriters, reader, sweeper": (
        {"saver a": overwrite(b"a"), "saver b": overwrite(b"b"), "reader": read, "sweeper": sweep_old},
        before_sweep,
        2,
    ),
}


@pytest.mark.parametrize("setting", SWEEPS)
def test_no_interleaving_with_a_sweep_breaks_a_promise(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    acts, prepare, preemptions = SWEEPS[setting]
    count = explore(
        acts, prepare=prepare, preemptions=preemptions, check=check_promises, check_end=check_end_of_sweep
    )
    with capsys.disabled():
        print(f"\n{setting}: {count} schedules with up to {preemptions} preemptions", end=" ")
    assert count >= min(MAX_SCHEDULES, 50)


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_interleaving_breaks_a_promise(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    acts, prepare, preemptions = SETTINGS[setting]
    count = explore(
        acts,
        prepare=prepare or (lambda root: None),
        preemptions=preemptions,
        check=check_promises,
        check_end=check_end,
    )
    with capsys.disabled():
        print(f"\n{setting}: {count} schedules with up to {preemptions} preemptions", end=" ")
    assert count >= min(MAX_SCHEDULES, 50)
