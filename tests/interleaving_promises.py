"""Promises 1, 2, 3 and 7, asked of every state that a search reaches; and what must be possible at its ends.

The store is looked at bare, by code of its own where the package's would look away: all that the newest
generation names must be there, byte for byte, and of one save. What was the checkpoint until now is kept in
mind, so that nothing that was replaced or deleted comes back, a pin that took effect stays, and whoever was
told of success or failure was told the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from interleaving import Outcome, System
from interleaving_search import SAVERS, Broken
from protocol import keys_of, load, save

from remote_ckpt.checksum import crc32c
from remote_ckpt.commit import is_not_committed
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CommitUnknownError,
    SaveFailedError,
    StoreError,
    SweepRefusedError,
)
from remote_ckpt.manifest import parse_manifest
from remote_ckpt.newest import list_generations, named_keys, read_generation
from remote_ckpt.store.base import Store
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.sweep import sweep

_REFUSALS: Mapping[str, tuple[type[Exception], ...]] = {
    "saver": (CheckpointExistsError, CheckpointPinnedError),
    "overwriter": (CheckpointExistsError, CheckpointPinnedError),
    "deleter": (CheckpointPinnedError, CheckpointNotFoundError, CheckpointChangedError),
    "pinner": (CheckpointNotFoundError, CheckpointChangedError),
    "annotator": (CheckpointNotFoundError, CheckpointChangedError),
    "reader": (),
    "sweeper": (),
    "pruner": (),
}
"""What an actor (by the first word of its name) may be told, however others move."""

_ERA = timedelta(days=3)

_AFTER_LEAPS: Mapping[str, tuple[type[Exception], ...]] = {
    # Slept past its deadline; or what it created was superseded and swept before it looked again.
    "saver": (SaveFailedError, CommitUnknownError),
    "overwriter": (SaveFailedError, CommitUnknownError),
}


@dataclass(frozen=True, slots=True)
class Top:
    """The newest generation of one name, as the bare store shows it."""

    generation: int = 0
    data: bytes = b""
    is_live: bool = False
    is_pinned: bool = False
    save_id: str = ""
    payload: str = ""
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Past:
    """What was the checkpoint of one name until now.

    Args:
        top: What it is at present.
        reigned: Payloads of all saves that were it, the present one included.
        was_absent: At some time there was none.
    """

    top: Top
    reigned: frozenset[str]
    was_absent: bool


History = tuple[Past, ...]


@dataclass
class ProtocolPromises:
    """The promises of a setting, whose actors' names begin with what they are.

    Args:
        names: The checkpoints that matter.
        never_deleted: Names that nobody but the operator may delete: the newest.
        is_swept: A sweep is among the actors, so ends are compared after another one.
        may_forget: It removes tombstones.
    """

    names: tuple[str, ...] = ("10",)
    never_deleted: tuple[str, ...] = ()
    is_swept: bool = False
    may_forget: bool = False
    _tops: dict[tuple[int, str], Top] = field(default_factory=dict)
    _ends: set[tuple[int, bool]] = field(default_factory=set)

    # --- what is remembered --------------------------------------------------------------------------

    def begin(self, system: System) -> History:
        tops = [self._top(system, system.first_contents, name) for name in self.names]
        return tuple(
            Past(top, frozenset({top.payload} if top.is_live else ()), not top.is_live) for top in tops
        )

    def go_on(self, system: System, history: History, before: int, after: int) -> History:
        return tuple(
            self._past(past, self._top(system, after, name))
            for name, past in zip(self.names, history, strict=True)
        )

    def _past(self, past: Past, top: Top) -> Past:
        old = past.top
        if top == old:
            return past
        is_forgotten = self.may_forget and not old.is_live and not top.generation
        if top.generation <= old.generation and not is_forgotten:
            raise Broken(f"generation {old.generation} was followed by {top.generation}")
        if old.is_pinned and not (top.is_pinned and top.save_id == old.save_id):
            raise Broken("a pinned checkpoint was deleted, replaced or unpinned")
        is_same = old.is_live and top.save_id == old.save_id
        if top.is_live and not is_same and top.payload in past.reigned:
            raise Broken(f"{top.payload!r} is back, which was replaced or deleted")
        if top.is_live and is_same and not set(old.metrics) <= set(top.metrics):
            raise Broken("a later generation forgot an annotation")
        reigned = past.reigned | {top.payload} if top.is_live else past.reigned
        return Past(top, reigned, past.was_absent or not top.is_live)

    def _top(self, system: System, contents: int, name: str) -> Top:
        key = contents, name
        if key not in self._tops:
            self._tops[key] = look_bare(system.load(contents), name)
        return self._tops[key]

    # --- every state ---------------------------------------------------------------------------------

    def check(
        self, system: System, history: History, contents: int, outcomes: Sequence[Outcome | None]
    ) -> None:
        for name in self.names:
            self._top(system, contents, name)  # whole, or it raises
        for name, past in zip(self.names, history, strict=True):
            if name in self.never_deleted and past.was_absent:
                raise Broken(f"{name}, the newest, was deleted")
        creators = {_payload_of(name) for name in system.names if name.startswith("saver")}
        has_deleter = any(name.startswith("deleter") for name in system.names)
        if not has_deleter and len(history[0].reigned & creators) > 1:
            raise Broken("two savers won that were not told to overwrite")
        for actor, outcome in zip(system.names, outcomes, strict=True):
            if outcome is not None:
                self._check_outcome(actor, outcome, history)

    def _check_outcome(self, actor: str, outcome: Outcome, history: History) -> None:
        role, error = actor.split()[0], outcome.error
        if isinstance(error, SweepRefusedError) and "changing it all the time" in str(error):
            return  # in each of its looks, as three actors and time can
        if error is not None and not isinstance(error, (*_REFUSALS[role], *_AFTER_LEAPS.get(role, ()))):
            raise Broken(f"{actor} ended with {error!r}") from error
        if role in SAVERS:
            _check_saver(actor, error, history)
        elif error is None:
            _CHECKS[role](outcome.result, history[0])

    # --- ends ----------------------------------------------------------------------------------------

    def check_end(self, system: System, history: History, contents: int, *, is_calm: bool) -> None:
        if (contents, is_calm) in self._ends:
            return
        self._ends.add((contents, is_calm))
        try:
            if is_calm and not self.is_swept:
                self._check_rest(system.load(contents))
            root = system.load(contents, delay=_ERA)
            report = sweep(root, dry_run=False)
            if report.failures:
                raise Broken(f"the next sweep failed: {report.failures}")
            # A .metadata that nobody lived to publish comes with the next change, not with a sweep.
            self._check_rest(root, is_published=is_calm)
            self._check_next_save(root, history)
        except (AssertionError, StoreError) as error:
            raise Broken(f"at the end: {error!r}") from error

    def _check_rest(self, root: Store, *, is_published: bool = True) -> None:
        """Nothing is there but what the newest generation needs."""
        for name in self.names:
            checkpoint = root.scope(name)
            generations = list_generations(checkpoint.list())
            newest = read_generation(checkpoint, generations[-1]) if generations else None
            live = newest if newest is not None and newest.state == "live" else None
            needed = named_keys(live) | {".metadata"} if live else frozenset()
            found = keys_of(root, name)
            if found - needed or (is_published and needed - found):
                raise Broken(f"left behind: {sorted(found - needed)}, missing: {sorted(needed - found)}")
            if not is_published or live is None or live.stock_metadata is None:
                continue
            if checkpoint.read(".metadata") != checkpoint.read(live.stock_metadata.key):
                raise Broken(".metadata is stale")

    def _check_next_save(self, root: MemoryStore, history: History) -> None:
        """The next save works, and is refused where a pin stands."""
        for name, past in zip(self.names, history, strict=True):
            try:
                save(root, b"next", name=name, overwrite=True)
            except CheckpointPinnedError:
                if not past.top.is_pinned:
                    raise
            expected = past.top.payload if past.top.is_pinned else "next"
            if load(root, name) != expected.encode():
                raise Broken("the next save is not the checkpoint")


def _payload_of(actor: str) -> str:
    return actor.split()[-1]


# --- what actors were told ---------------------------------------------------------------------------


def _check_saver(actor: str, error: Exception | None, history: History) -> None:
    has_reigned = any(_payload_of(actor) in past.reigned for past in history)
    if error is None and not has_reigned:
        raise Broken(f"{actor} was told of a success and never was the checkpoint")
    if error is not None and is_not_committed(error) and has_reigned:
        raise Broken(f"{actor} was told {error!r} and is or was the checkpoint")


def _check_pinner(result: Any, past: Past) -> None:
    if not (past.top.is_live and past.top.is_pinned and past.top.save_id == result.save_id):
        raise Broken("a pin that was reported is not in force")


def _check_annotator(result: Any, past: Past) -> None:
    is_there = past.top.is_live and past.top.save_id == result.save_id
    if is_there and not set(result.metrics.items()) <= set(past.top.metrics):
        raise Broken("an annotation that was reported is not there")


def _check_deleter(result: Any, past: Past) -> None:
    if not past.was_absent:
        raise Broken("a deletion that was reported did not happen")


def _check_reader(result: Any, past: Past) -> None:
    if not past.was_absent if result is None else result.decode() not in past.reigned:
        raise Broken(f"the reader got {result!r}")


def _check_sweeper(result: Any, past: Past) -> None:
    if result.failures:
        raise Broken(f"the sweep failed: {result.failures}")


def _check_pruner(result: Any, past: Past) -> None:
    failures = [each for each in result.failures if not isinstance(each.error, CheckpointPinnedError)]
    if failures:
        raise Broken(f"the retention failed: {failures}")


_CHECKS: Mapping[str, Callable[[Any, Past], None]] = {
    "pinner": _check_pinner,
    "annotator": _check_annotator,
    "deleter": _check_deleter,
    "reader": _check_reader,
    "sweeper": _check_sweeper,
    "pruner": _check_pruner,
}


# --- the bare store ----------------------------------------------------------------------------------


def look_bare(root: MemoryStore, name: str) -> Top:
    """Return the newest generation of a name; all that it names must be there, unaltered and of one save."""
    start = f"{name}/"
    objects = {
        key.removeprefix(start): data
        for key, (data, _) in root._bucket.objects.items()
        if key.startswith(start)
    }
    keys = sorted(key for key in objects if key.startswith("manifest."))
    if not keys:
        return Top()
    manifest = parse_manifest(objects[keys[-1]], url=root.url, key=keys[-1])
    for entry in [*manifest.objects, manifest.index, manifest.stock_metadata]:
        if entry is None:
            continue
        if entry.key not in objects:
            raise Broken(f"generation {manifest.generation} lacks {entry.key}")
        data = objects[entry.key]
        if len(data) != entry.size_bytes or crc32c(data) != entry.crc32c:
            raise Broken(f"generation {manifest.generation} has another {entry.key} than it names")
    payload = str(manifest.user_metadata.get("payload", "")) if manifest.state == "live" else ""
    if any(objects[entry.key] != payload.encode() + entry.key.encode() for entry in manifest.objects):
        raise Broken(f"generation {manifest.generation} is a mixture of saves")
    return Top(
        generation=manifest.generation,
        data=objects[keys[-1]],
        is_live=manifest.state == "live",
        is_pinned=manifest.pinned,
        save_id=manifest.save_id,
        payload=payload,
        metrics=tuple(sorted(manifest.metrics.items())),
    )
