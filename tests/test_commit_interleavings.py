"""Savers, deleters, pinners, readers, sweeps and time, in every order, with a death at every request.

The real code runs over the memory store, and a search owns each of its store calls (``interleaving.py``).
It visits every state that any order of these calls leads to, and asks the promises of each
(``interleaving_promises.py``). Actors may die at any request, before it or after it took effect: one in
each schedule, in small settings two.

Where a whole space is too large for the suite, the search stops at ``REMOTE_CKPT_STATES`` states (8000
unless set), and ``REMOTE_CKPT_WALKS`` random schedules (100 unless set) follow, the same in each run. What
was seen is printed for each setting. A longer run takes about 600 bytes of memory for a state::

    REMOTE_CKPT_STATES=2000000 REMOTE_CKPT_WALKS=20000 python -m pytest tests/test_commit_interleavings.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import protocol
import pytest
from interleaving import Act, System, determined
from interleaving_promises import ProtocolPromises
from interleaving_search import Broken, Explored, Limits, Search
from protocol import OPTIONS, Script, load, once, save, scripted, upload
from sweeping import leave_half_deleted, leave_replaced, leave_uncommitted

from remote_ckpt import changes, commit, deletion, sweep_plan, sweep_scan
from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.keys import is_attempt_key, manifest_key
from remote_ckpt.manifest import Manifest, format_manifest
from remote_ckpt.newest import Newest, Standing, named_keys
from remote_ckpt.pruning import PruneReport, prune
from remote_ckpt.retention import plan_keep_last
from remote_ckpt.store.base import Store
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.sweep import SweepReport, sweep

MAX_STATES = int(os.environ.get("REMOTE_CKPT_STATES", "8000"))
WALKS = int(os.environ.get("REMOTE_CKPT_WALKS", "100"))
NO_LIMIT = 10**9

# Two of them are more than a sweep's grace period, one is more than a save may take.
LEAPS = (timedelta(hours=13), timedelta(hours=13))


def creates(payload: str) -> Act:
    return lambda root: save(root, payload.encode())


def overwrites(payload: str, name: str = "10") -> Act:
    return lambda root: save(root, payload.encode(), name=name, overwrite=True)


SAVER, OVERWRITER = {"saver a": creates("a")}, {"overwriter a": overwrites("a")}
TWO_SAVERS = SAVER | {"saver b": creates("b")}
TWO_OVERWRITERS = OVERWRITER | {"overwriter b": overwrites("b")}


def delete(root: Store) -> None:
    delete_checkpoint(root.scope("10"))


def delete_if_idle(root: Store) -> None:
    delete_checkpoint(root.scope("10"), if_generation=1, if_idle=True)


def pin(root: Store) -> object:
    return set_pinned(root.scope("10"), True)


def measure(root: Store) -> object:
    return annotate(root.scope("10"), metrics={"loss": 0.5})


def measure_twice(root: Store) -> object:
    measure(root)
    return annotate(root.scope("10"), metrics={"accuracy": 0.75})


def read(root: Store) -> bytes | None:
    return load(root)


def sweep_old(root: Store) -> SweepReport:
    return sweep(root, dry_run=False)


def sweep_with_tombstones(root: Store) -> SweepReport:
    return sweep(root, dry_run=False, tombstones=True)


def keep_last(root: Store) -> PruneReport:
    return prune(root, lambda candidates: plan_keep_last(candidates, 1), options=OPTIONS)


# --- what is there when they begin -------------------------------------------------------------------


def nothing(root: Store) -> None:
    """An empty directory."""


def saved(root: Store) -> None:
    save(root, b"old")


def two_saved(root: Store) -> None:
    save(root, b"old")
    save(root, b"new", name="20")


def with_garbage(root: Store) -> None:
    """A checkpoint with everything that can be left beside it."""
    leave_replaced(root, "10")
    leave_uncommitted(root, "10")
    set_pinned(root.scope("10"), True)
    set_pinned(root.scope("10"), False)


def deleted_with_garbage(root: Store) -> None:
    leave_half_deleted(root, "10")
    leave_uncommitted(root, "10")
    root.delete(["10/notes.txt"])


# --- settings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Who does what, where, and how much of it is looked at.

    Args:
        acts: By the actor's name, which begins with what it is.
        is_small: The suite exhausts it.
        ticks: Times tell which write came first; else all that is done without a leap happens at once.
    """

    acts: dict[str, Act]
    prepare: Act = saved
    limits: Limits = field(default_factory=Limits)
    names: tuple[str, ...] = ("10",)
    never_deleted: tuple[str, ...] = ()
    is_small: bool = True
    may_forget: bool = False
    ticks: bool = False

    def explore(self) -> Explored:
        is_swept = any(name.startswith("sweeper") for name in self.acts)
        promises = ProtocolPromises(
            names=self.names,
            never_deleted=self.never_deleted,
            is_swept=is_swept,
            may_forget=self.may_forget,
        )
        states = NO_LIMIT if self.is_small else MAX_STATES
        limits = replace(self.limits, keeps_manifests=not is_swept, states=states, walks=WALKS)
        return Search(System(self.acts, self.prepare, ticks=self.ticks), promises, limits).run()


DELETER: dict[str, Act] = {"deleter": delete}
PINNER: dict[str, Act] = {"pinner": pin}
ANNOTATOR: dict[str, Act] = {"annotator": measure}
READER: dict[str, Act] = {"reader": read}
SWEEPER: dict[str, Act] = {"sweeper": sweep_old}
PRUNER: dict[str, Act] = {"pruner": keep_last}
TWO_CRASHES, REDUCED = Limits(crashes=2), Limits(is_reduced=True)

SETTINGS = {
    "two savers": Setting(TWO_SAVERS, nothing, TWO_CRASHES),
    "saver, overwriter": Setting(SAVER | {"overwriter b": overwrites("b")}, nothing),
    "two overwriters": Setting(TWO_OVERWRITERS),
    "overwriter, deleter": Setting(OVERWRITER | DELETER, saved, TWO_CRASHES),
    "overwriter, deleter if idle": Setting(OVERWRITER | {"deleter": delete_if_idle}, ticks=True),
    "overwriter, pinner": Setting(OVERWRITER | PINNER, saved, TWO_CRASHES),
    "overwriter, annotator": Setting(OVERWRITER | ANNOTATOR, saved, TWO_CRASHES),
    "overwriter, reader": Setting(OVERWRITER | READER, saved, TWO_CRASHES),
    "deleter, pinner": Setting(DELETER | PINNER, saved, TWO_CRASHES),
    "deleter, reader": Setting(DELETER | READER, saved, TWO_CRASHES),
    "two deleters": Setting(DELETER | {"deleter 2": delete}, saved, TWO_CRASHES),
    "annotator, pinner": Setting(ANNOTATOR | PINNER, saved, TWO_CRASHES),
    "deleter, pinner, annotator, reader": Setting(DELETER | PINNER | ANNOTATOR | READER),
    "saver, deleter, pinner": Setting(SAVER | DELETER | PINNER, nothing),
    "two savers, deleter": Setting(TWO_SAVERS | DELETER, nothing, REDUCED, is_small=False),
    "overwriter, deleter, pinner": Setting(OVERWRITER | DELETER | PINNER, saved, REDUCED, is_small=False),
    "overwriter, deleter, reader": Setting(OVERWRITER | DELETER | READER, saved, REDUCED),
    "overwriter, annotator, pinner": Setting(OVERWRITER | ANNOTATOR | PINNER, saved, REDUCED, is_small=False),
    "two overwriters, pinner": Setting(TWO_OVERWRITERS | PINNER, saved, REDUCED, is_small=False),
    "two overwriters, deleter": Setting(TWO_OVERWRITERS | DELETER, saved, REDUCED, is_small=False),
    "two overwriters, reader": Setting(TWO_OVERWRITERS | READER, saved, REDUCED, is_small=False),
    "retention, overwriter of an old one": Setting(
        PRUNER | OVERWRITER, two_saved, REDUCED, names=("10", "20"), never_deleted=("20",), ticks=True
    ),
    "retention, overwriter of the newest": Setting(
        PRUNER | {"overwriter a": overwrites("a", "20")},
        two_saved,
        REDUCED,
        names=("10", "20"),
        never_deleted=("20",),
        ticks=True,
    ),
    "retention, saver of a newer one": Setting(
        PRUNER | {"saver a": lambda root: save(root, b"a", name="30")},
        two_saved,
        REDUCED,
        names=("10", "20", "30"),
        ticks=True,
    ),
    "retention, pinner": Setting(
        PRUNER | PINNER, two_saved, TWO_CRASHES, names=("10", "20"), never_deleted=("20",)
    ),
    "retention, pinner, overwriter": Setting(
        PRUNER | PINNER | OVERWRITER,
        two_saved,
        REDUCED,
        names=("10", "20"),
        never_deleted=("20",),
        is_small=False,
        ticks=True,
    ),
}

SWEEPS = {
    "first saver, sweeper": Setting(SAVER | SWEEPER, nothing),
    "overwriter, sweeper": Setting(OVERWRITER | SWEEPER, with_garbage),
    "pinner, sweeper": Setting(PINNER | SWEEPER, with_garbage, TWO_CRASHES),
    "annotator, sweeper": Setting(ANNOTATOR | SWEEPER, with_garbage, TWO_CRASHES),
    "deleter, sweeper": Setting(DELETER | SWEEPER, with_garbage, TWO_CRASHES),
    "reader, sweeper": Setting(READER | SWEEPER, with_garbage, TWO_CRASHES),
    "two sweepers": Setting(SWEEPER | {"sweeper 2": sweep_old}, with_garbage, TWO_CRASHES),
    "saver of a deleted name, sweeper": Setting(SAVER | SWEEPER, deleted_with_garbage),
    "deleter of a deleted name, sweeper": Setting(DELETER | SWEEPER, deleted_with_garbage, TWO_CRASHES),
    "saver of a deleted name, sweeper of tombstones": Setting(
        SAVER | {"sweeper": sweep_with_tombstones}, deleted_with_garbage, may_forget=True
    ),
    "deleter, pinner, sweeper": Setting(DELETER | PINNER | SWEEPER, with_garbage),
    "two overwriters, sweeper": Setting(TWO_OVERWRITERS | SWEEPER, with_garbage, REDUCED, is_small=False),
    "overwriter, pinner, sweeper": Setting(
        OVERWRITER | PINNER | SWEEPER, with_garbage, REDUCED, is_small=False
    ),
    "overwriter, deleter, sweeper": Setting(
        OVERWRITER | DELETER | SWEEPER, with_garbage, REDUCED, is_small=False
    ),
    "overwriter, reader, sweeper": Setting(
        OVERWRITER | READER | SWEEPER, with_garbage, REDUCED, is_small=False
    ),
    "two overwriters, reader, sweeper": Setting(
        TWO_OVERWRITERS | READER | SWEEPER, with_garbage, REDUCED, is_small=False
    ),
}

LEAPING, LEAPING_CALMLY = Limits(leaps=LEAPS), Limits(leaps=LEAPS, crashes=0)

SLEEPS = {
    "saver": Setting(SAVER, nothing, LEAPING),
    "saver, sweeper": Setting(SAVER | SWEEPER, nothing, LEAPING_CALMLY),
    "two savers": Setting(TWO_SAVERS, nothing, LEAPING, is_small=False),
    "overwriter, pinner": Setting(OVERWRITER | PINNER, saved, LEAPING, is_small=False),
    "overwriter, deleter": Setting(OVERWRITER | DELETER, saved, LEAPING, is_small=False),
    "overwriter, sweeper": Setting(OVERWRITER | SWEEPER, saved, LEAPING, is_small=False),
    "overwriter, sweeper of garbage": Setting(OVERWRITER | SWEEPER, with_garbage, LEAPING, is_small=False),
    "two overwriters, sweeper": Setting(TWO_OVERWRITERS | SWEEPER, saved, LEAPING, is_small=False),
    "pinner, sweeper": Setting(PINNER | SWEEPER, with_garbage, LEAPING),
    "deleter, sweeper": Setting(DELETER | SWEEPER, with_garbage, LEAPING, is_small=False),
    "reader, sweeper": Setting(READER | SWEEPER, with_garbage, LEAPING),
    # Numbers that were taken and swept are free again for whoever slept.
    "pinner, annotator of two, sweeper": Setting(
        PINNER | {"annotator": measure_twice} | SWEEPER, saved, LEAPING_CALMLY, is_small=False
    ),
    "deleter, annotator of two, sweeper": Setting(
        DELETER | {"annotator": measure_twice} | SWEEPER, saved, LEAPING_CALMLY, is_small=False
    ),
    "overwriter, annotator of two, sweeper": Setting(
        OVERWRITER | {"annotator": measure_twice} | SWEEPER, saved, LEAPING_CALMLY, is_small=False
    ),
    "pinner, annotator, sweeper": Setting(PINNER | ANNOTATOR | SWEEPER, saved, LEAPING, is_small=False),
    "pinner, deleter, sweeper": Setting(PINNER | DELETER | SWEEPER, saved, LEAPING, is_small=False),
    "overwriter, pinner, sweeper": Setting(OVERWRITER | PINNER | SWEEPER, saved, LEAPING, is_small=False),
    "overwriter, reader, sweeper": Setting(OVERWRITER | READER | SWEEPER, saved, LEAPING, is_small=False),
}

LOSING = Limits(crashes=0, lost=1)

LOSSES = {
    "two savers": Setting(TWO_SAVERS, nothing, LOSING),
    "two overwriters": Setting(TWO_OVERWRITERS, saved, LOSING, is_small=False),
    "overwriter, deleter": Setting(OVERWRITER | DELETER, saved, replace(LOSING, is_reduced=True)),
    "overwriter, pinner": Setting(OVERWRITER | PINNER, saved, LOSING),
    "overwriter, annotator": Setting(OVERWRITER | ANNOTATOR, saved, LOSING),
    "overwriter, reader": Setting(OVERWRITER | READER, saved, LOSING),
    "overwriter, sweeper": Setting(OVERWRITER | SWEEPER, saved, LOSING, is_small=False),
    "deleter, pinner": Setting(DELETER | PINNER, saved, Limits(crashes=1, lost=2)),
    "annotator, pinner": Setting(ANNOTATOR | PINNER, saved, Limits(crashes=1, lost=2)),
    "deleter, pinner, annotator": Setting(DELETER | PINNER | ANNOTATOR, saved, Limits(crashes=1, lost=1)),
}


@pytest.fixture
def fixed_fate() -> Iterator[None]:
    with determined():
        yield


@pytest.fixture
def explore(capsys: pytest.CaptureFixture[str], fixed_fate: None) -> Callable[[str, Setting], None]:
    """Return a function that explores a setting and prints what was seen."""

    def explore(name: str, setting: Setting) -> None:
        found = setting.explore()
        with capsys.disabled():
            print(f"\n  {name}: {found}", end=" ")
        assert found.is_exhausted or found.states >= MAX_STATES

    return explore


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_interleaving_breaks_a_promise(setting: str, explore: Callable[[str, Setting], None]) -> None:
    explore(setting, SETTINGS[setting])


@pytest.mark.parametrize("setting", SWEEPS)
def test_no_interleaving_with_a_sweep_breaks_a_promise(
    setting: str, explore: Callable[[str, Setting], None]
) -> None:
    explore(setting, SWEEPS[setting])


@pytest.mark.parametrize("setting", SLEEPS)
def test_no_leap_of_time_breaks_a_promise(setting: str, explore: Callable[[str, Setting], None]) -> None:
    explore(f"{setting}, clock", SLEEPS[setting])


@pytest.mark.parametrize("setting", LOSSES)
def test_no_lost_answer_and_no_late_commit_breaks_a_promise(
    setting: str, explore: Callable[[str, Setting], None]
) -> None:
    explore(f"{setting}, lost answers", LOSSES[setting])


def test_a_first_save_that_begins_during_a_sweep_is_no_contradiction() -> None:
    """The listing by level came before its first object, the flat one after it."""
    bare = MemoryStore.fresh()
    begin = once("list", lambda: upload(bare.scope("10"), b"a"))
    report = sweep(scripted(bare, Script(before=begin)), dry_run=False)
    assert report.garbage == ()
    assert len(bare.list()) == 4


# --- the search itself -------------------------------------------------------------------------------


def read_twice(root: Store) -> bytes:
    for _ in range(2):
        root.read("10/manifest.000001.json")
    return b"old"


def test_every_order_is_counted(fixed_fate: None) -> None:
    """Two actors with two requests each: (2 + 2)! / (2! 2!) schedules through 3 * 3 states."""
    setting = Setting({"reader": read_twice, "reader 2": read_twice}, saved, Limits(crashes=0))
    assert setting.explore() == Explored(states=9, schedules=6, is_exhausted=True)


# Faults of the kind that the protocol exists to prevent, each sown into the real code.


def never_mind_deadline(patch: pytest.MonkeyPatch) -> None:
    begin = commit.begin_save
    late = timedelta(days=9)
    patch.setattr(
        protocol, "begin_save", lambda *args: replace(it := begin(*args), deadline=it.deadline + late)
    )


def delete_before_creating(patch: pytest.MonkeyPatch) -> None:
    create = commit._create

    def create_late(checkpoint: Store, manifest: Manifest, *rest: Any) -> Any:
        checkpoint.delete(list(manifest.superseded))
        return create(checkpoint, manifest, *rest)

    patch.setattr(commit, "_create", create_late)


def do_not_list_again(patch: pytest.MonkeyPatch) -> None:
    for module in (commit, changes, deletion):
        patch.setattr(module, "highest_after", lambda checkpoint, generation, **_: generation)


def write_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "create", MemoryStore.write)


def ignore_pins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Standing, "is_pinned", False)


def delete_all_others(patch: pytest.MonkeyPatch) -> None:
    def delete_unnamed(checkpoint: Store, keys: Any, newest: Newest | None) -> Any:
        named = named_keys(newest.manifest) if newest is not None and newest.is_live else frozenset()
        return checkpoint.delete(
            [each.key for each in checkpoint.list() if is_attempt_key(each.key) and each.key not in named]
        )

    patch.setattr(commit, "delete_superseded", delete_unnamed)


def sweep_the_young(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sweep_plan._Facts, "is_old", lambda facts, info: True)


def sweep_the_newest_tombstone(patch: pytest.MonkeyPatch) -> None:
    plan = sweep_plan.plan_checkpoint
    patch.setattr(
        sweep_scan, "plan_checkpoint", lambda scene, **terms: plan(scene, **{**terms, "tombstones": True})
    )


def change_what_was_read_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        changes,
        "create_generation",
        lambda checkpoint, manifest, **_: (
            checkpoint.write(manifest_key(manifest.generation), format_manifest(manifest)) or manifest
        ),
    )


FAULTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Setting], str, str], ...] = (
    (never_mind_deadline, SLEEPS, "saver, sweeper", "lacks"),
    (delete_before_creating, SETTINGS, "overwriter, reader", "lacks"),
    (write_over, SETTINGS, "two savers", "was followed by"),
    (ignore_pins, SETTINGS, "deleter, pinner", "pinned|next save"),
    (do_not_list_again, SLEEPS, "pinner, annotator of two, sweeper", "not in force"),
    (delete_all_others, SETTINGS, "two overwriters", "lacks"),
    (sweep_the_newest_tombstone, SWEEPS, "deleter of a deleted name, sweeper", "was followed by 0"),
    (sweep_the_young, SWEEPS, "first saver, sweeper", "lacks"),
    (change_what_was_read_before, SETTINGS, "annotator, pinner", "was followed by"),
)


@pytest.mark.parametrize(("sow", "settings", "name", "message"), FAULTS)
def test_a_fault_of_the_protocol_is_found(
    sow: Callable[[pytest.MonkeyPatch], None],
    settings: dict[str, Setting],
    name: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    fixed_fate: None,
) -> None:
    sow(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "MAX_STATES", 150_000)
    with pytest.raises(Broken, match=message):
        settings[name].explore()
