"""Carrying out a sweep's plan: look again, then remove only what was planned and still is garbage, unchanged.

The order within a checkpoint is that of any deletion: ``.metadata`` is made right first, then data goes, then
superseded manifests from the lowest upward, and a tombstone last, so that a crash anywhere brings nothing
back. A failure of one key or checkpoint is noted, and the others go on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from remote_ckpt.deletion import delete_superseded, finish_deletion
from remote_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ObjectNotFoundError,
    RemoteCkptError,
    StoreError,
)
from remote_ckpt.keys import manifest_key, own_key, parse_manifest_key
from remote_ckpt.newest import Newest, look
from remote_ckpt.options import Options
from remote_ckpt.progress import ProgressCounter
from remote_ckpt.stock_metadata import publish_stock_metadata
from remote_ckpt.store.base import Leftover, Store
from remote_ckpt.sweep_links import is_link
from remote_ckpt.sweep_plan import COPIED_FILE, FOLDER, REPLACED, STOCK_METADATA, Garbage, plan_root
from remote_ckpt.sweep_scan import CheckpointPlan, Terms, in_threads, look_at, read_clock

_BATCH = 1000


@dataclass(frozen=True, slots=True)
class SweepFailure:
    """What could not be removed: a key relative to the root, or a checkpoint's name; and why."""

    key: str
    message: str


@dataclass(slots=True)
class Tally:
    """What was removed and what could not be, from many threads.

    Args:
        progress: Told of each piece that was removed.
    """

    progress: ProgressCounter
    removed_count: int = 0
    removed_bytes: int = 0
    failures: list[SweepFailure] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_removed(self, garbage: Iterable[Garbage]) -> None:
        """Count what is gone."""
        for each in garbage:
            with self._lock:
                self.removed_count += 1
                self.removed_bytes += each.size_bytes
            self.progress.advance(done_bytes=each.size_bytes, done_objects=1)

    def add_failure(self, key: str, reason: object) -> None:
        """Note what is still there."""
        with self._lock:
            self.failures.append(SweepFailure(key, str(reason)))


def remove_from(root: Store, planned: CheckpointPlan, terms: Terms, options: Options, tally: Tally) -> None:
    """Remove what was planned for one checkpoint, as far as another look agrees."""
    try:
        with closing(root.scope(planned.name)) as checkpoint:
            if is_link(root, checkpoint, planned.name):
                return
            if checkpoint.capabilities.has_folders:
                # Where the root may only be read, its time was this host's; here files can be stamped.
                read_clock(checkpoint)
            fresh = look_at(checkpoint, planned.name, terms)
            if not checkpoint.is_current():
                return
            if fresh.warning is not None:
                tally.add_failure(planned.name, fresh.warning)
                return
            _Removal(checkpoint, _agreed(planned, fresh), options, tally).run()
    except CheckpointNotFoundError:
        return  # a folder that was removed meanwhile
    except (StoreError, CheckpointError) as error:
        tally.add_failure(planned.name, error)


def remove_in_root(root: Store, planned: Sequence[Garbage], terms: Terms, tally: Tally) -> None:
    """Remove what was planned right in the root and is still there, unchanged."""
    if not planned:
        return
    try:
        fresh = plan_root(root.list_children("").objects, before=terms.before)
    except StoreError as error:
        for each in planned:
            tally.add_failure(each.key, error)
        return
    _delete(root, {each.key: each for each in fresh if each in planned}, None, tally)


def remove_leftovers(root: Store, planned: Sequence[tuple[Garbage, Leftover]], tally: Tally) -> None:
    """Remove planned leftovers that are still there, unchanged."""
    if not planned:
        return
    try:
        present = set(root.list_leftovers())
    except RemoteCkptError as error:
        for garbage, _ in planned:
            tally.add_failure(garbage.key, error)
        return
    in_threads(
        lambda pair: _remove_leftover(root, *pair, tally), [pair for pair in planned if pair[1] in present]
    )


def _remove_leftover(root: Store, garbage: Garbage, leftover: Leftover, tally: Tally) -> None:
    try:
        root.remove_leftover(leftover)
    except StoreError as error:
        tally.add_failure(garbage.key, error)
    else:
        tally.add_removed([garbage])


# --- one checkpoint ----------------------------------------------------------------------------------


def _generation(newest: Newest | None) -> int:
    return newest.generation if newest is not None else 0


def _agreed(planned: CheckpointPlan, fresh: CheckpointPlan) -> CheckpointPlan:
    known = {(each.key, each.size_bytes, each.modified_at) for each in planned.garbage}
    same = [each for each in fresh.garbage if (each.key, each.size_bytes, each.modified_at) in known]
    return replace(fresh, garbage=tuple(same))


@dataclass(frozen=True, slots=True)
class _Removal:
    """The removal of what two looks at one checkpoint found."""

    checkpoint: Store
    plan: CheckpointPlan
    options: Options
    tally: Tally

    def run(self) -> None:
        newest = _generation(self.plan.newest)
        numbered = [(parse_manifest_key(self._key(each)), each) for each in self.plan.garbage]
        is_clean = self._remove_objects([each for number, each in numbered if number is None])
        lower = [each for number, each in numbered if number is not None and number < newest]
        is_clean = self._remove_manifests(lower) and is_clean
        for tombstone in [each for number, each in numbered if number == newest]:
            if is_clean:
                self._remove_tombstone(tombstone)
            else:
                self.tally.add_failure(tombstone.key, "it stays as long as what could not be removed")

    def _remove_objects(self, objects: Sequence[Garbage]) -> bool:
        replaced = [each for each in objects if each.kind in (REPLACED, STOCK_METADATA)]
        copied = [each for each in objects if each.kind == COPIED_FILE]
        others = [each for each in objects if each.kind not in (REPLACED, STOCK_METADATA, COPIED_FILE)]
        if not self._delete(copied, None):
            # Only the records of those copies prove that what is left of them is ours.
            for each in others:
                self.tally.add_failure(each.key, "it stays as long as the files of an unfinished copy")
            return False
        return all([self._remove_replaced(replaced), self._delete(others, self.plan.newest)])

    def _remove_replaced(self, replaced: Sequence[Garbage]) -> bool:
        """Make ``.metadata`` what it should be, then delete what it led to before."""
        newest = self.plan.newest
        if newest is None or not replaced:
            return True
        metadata = [each for each in replaced if each.kind == STOCK_METADATA]
        if metadata or newest.manifest.stock_metadata is not None:
            try:
                newest = publish_stock_metadata(self.checkpoint, newest)
            except (StoreError, CheckpointError) as error:
                for each in replaced:
                    self.tally.add_failure(each.key, error)
                return False
        if not newest.is_live:
            self.tally.add_removed(metadata)
        return self._delete([each for each in replaced if each.kind == REPLACED], newest)

    def _remove_manifests(self, manifests: Sequence[Garbage]) -> bool:
        """Remove the lowest first: with it gone, nobody who climbs from the first one stops half-way."""
        if self._delete(manifests[:1], None):
            return self._delete(manifests[1:], None)
        for each in manifests[1:]:
            self.tally.add_failure(each.key, "it stays as long as the manifest below it")
        return False

    def _remove_tombstone(self, tombstone: Garbage) -> None:
        newest = self.plan.newest
        if newest is None:
            return
        if tombstone.kind == FOLDER:
            finish_deletion(self.checkpoint, newest.manifest, options=self.options)
            if self.checkpoint.is_current():
                self.tally.add_failure(
                    tombstone.key, "its folder could not be taken away, or is in use again"
                )
            else:
                self.tally.add_removed([tombstone])
        elif self._is_all_there_is(newest):
            self._delete([tombstone], None)

    def _is_all_there_is(self, newest: Newest) -> bool:
        """Whether a tombstone still is the newest generation, with nothing of ours beside it."""
        standing = look(self.checkpoint)
        own = [info.key for info in standing.infos if own_key(info.key)]
        return not standing.is_live and own == [manifest_key(newest.generation)]

    def _delete(self, garbage: Sequence[Garbage], newest: Newest | None) -> bool:
        return _delete(self.checkpoint, {self._key(each): each for each in garbage}, newest, self.tally)

    def _key(self, garbage: Garbage) -> str:
        return garbage.key.removeprefix(f"{self.plan.name}/")


def _delete(store: Store, garbage: Mapping[str, Garbage], newest: Newest | None, tally: Tally) -> bool:
    """Delete by keys of the store, but what the newest generation needs; returns whether nothing failed."""
    keys, is_clean = list(garbage), True
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        found = delete_superseded(store, batch, newest)
        failed = {one.key: one.error for one in found if not isinstance(one.error, ObjectNotFoundError)}
        tally.add_removed(garbage[key] for key in batch if key not in failed)
        for key, error in failed.items():
            tally.add_failure(garbage[key].key, error)
        is_clean = is_clean and not failed
    return is_clean
