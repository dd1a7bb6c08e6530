"""What the tests of the sweep share: stores in which time has passed, and all that can be left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from protocol import Script, answers, save, scripted, upload

from remote_ckpt.changes import annotate
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import AccessDeniedError, StoreError, StoreUnavailableError
from remote_ckpt.keys import copy_record_key
from remote_ckpt.newest import Newest, named_keys, read_newest
from remote_ckpt.store.base import DeleteFailure, Leftover, Listing, ObjectInfo, Store
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.sweep import SweepReport, sweep
from remote_ckpt.sweep_plan import (
    COPY_RECORD,
    REPLACED,
    SCRATCH,
    STOCK_METADATA,
    SUPERSEDED,
    UNCOMMITTED,
)
from remote_ckpt.testing.faults import FaultStore

TWO_DAYS = timedelta(days=2)
PROBE = ".probe-d-0123456789abcdef"
MARKER = ".clock-0123456789abcdef"

Thing = TypeVar("Thing", ObjectInfo, Leftover)


class AgedStore(DelegatingStore):
    """The same store, in which some keys (relative to the root) changed earlier than they did.

    Args:
        ages: By how much.
        prefix: Where a scope lies below the root.
    """

    def __init__(self, inner: Store, ages: dict[str, timedelta], prefix: str = "") -> None:
        super().__init__(inner)
        self._ages = ages
        self._prefix = prefix

    def scope(self, name: str, *, create: bool = False) -> Store:
        return AgedStore(self.inner.scope(name, create=create), self._ages, f"{self._prefix}{name}/")

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return [self._older(info) for info in self.inner.list(prefix)]

    def list_children(self, prefix: str = "") -> Listing:
        listing = self.inner.list_children(prefix)
        return replace(listing, objects=tuple(self._older(info) for info in listing.objects))

    def info(self, key: str) -> ObjectInfo:
        return self._older(self.inner.info(key))

    def list_leftovers(self) -> Sequence[Leftover]:
        return [self._older(found) for found in self.inner.list_leftovers()]

    def _older(self, thing: Thing) -> Thing:
        age = self._ages.get(self._prefix + thing.key, timedelta(0))
        return replace(thing, modified_at=thing.modified_at - age)


class Holding(DelegatingStore):
    """A store that refuses to delete one key (relative to the root)."""

    def __init__(self, inner: Store, held: str, prefix: str = "") -> None:
        super().__init__(inner)
        self._held = held
        self._prefix = prefix

    def scope(self, name: str, *, create: bool = False) -> Store:
        return Holding(self.inner.scope(name, create=create), self._held, f"{self._prefix}{name}/")

    def delete(self, keys: Any) -> Any:
        held = [key for key in keys if self._prefix + key == self._held]
        failures = self.inner.delete([key for key in keys if key not in held])
        return [*failures, *(DeleteFailure(key, AccessDeniedError("retained by policy")) for key in held)]


def all_keys(root: Store) -> set[str]:
    """Keys of all objects and leftovers."""
    return {info.key for info in root.list()} | {found.key for found in root.list_leftovers()}


def aged(
    root: Store,
    around: Store | None = None,
    *,
    age: timedelta = TWO_DAYS,
    is_young: Callable[[str], bool] = lambda key: False,
) -> AgedStore:
    """Return a store (``around`` it, if given) in which all that is there now is old, but what is young."""
    ages = {key: age for key in all_keys(root) if not is_young(key)}
    return AgedStore(around or root, ages)


def swept(root: Store, **arguments: object) -> SweepReport:
    """Sweep as if all that there is were two days old, and expect no failure."""
    report = sweep(aged(root), dry_run=False, **arguments)  # type: ignore[arg-type]
    assert report.failures == ()
    return report


def reasons(report: SweepReport) -> dict[str, str]:
    """What each piece of garbage is, by its key."""
    return {each.key: each.kind for each in report.garbage}


def newest_of(root: Store, name: str) -> Newest:
    newest = read_newest(root.scope(name))
    assert newest is not None
    return newest


# --- what can be left over ---------------------------------------------------------------------------


def leave_uncommitted(root: Store, name: str) -> dict[str, str]:
    """Leave the objects of a save that was killed before its commit; returns their keys and reasons."""
    written: list[str] = []
    upload(root.scope(name, create=True), b"killed", name=name, written=written)
    return {f"{name}/{key}": UNCOMMITTED for key in written}


def leave_replaced(root: Store, name: str) -> dict[str, str]:
    """Replace a checkpoint and fail to remove what it was; returns that and the superseded manifest."""
    old = save(root, b"old", name=name)
    script = answers("delete", dict.fromkeys(range(9), StoreUnavailableError("503")), key="")
    new = save(scripted(root, script), b"new", name=name, overwrite=True)
    assert set(new.superseded) == named_keys(old)
    found = {f"{name}/{key}": REPLACED for key in named_keys(old)}
    return found | {f"{name}/manifest.{old.generation:06}.json": SUPERSEDED}


def leave_half_deleted(root: Store, name: str) -> dict[str, str]:
    """Begin to delete a checkpoint and fail after its tombstone; returns what is left below that."""
    saved = save(root, b"gone", name=name)
    # A file of others keeps a local folder from being taken away as a whole.
    root.scope(name).write("notes.txt", b"mine")
    script = Script(before=lambda operation, key: _fail_at(operation, "delete"))
    with suppress(StoreError):
        delete_checkpoint(scripted(root, script).scope(name))
    assert not newest_of(root, name).is_live
    found = {f"{name}/{key}": REPLACED for key in named_keys(saved)}
    found[f"{name}/.metadata"] = STOCK_METADATA
    return found | {f"{name}/manifest.{saved.generation:06}.json": SUPERSEDED}


def _fail_at(operation: str, wanted: str) -> None:
    if operation == wanted:
        raise StoreError("refused")


def leave_everything(root: Store) -> dict[str, str]:
    """Fill a directory with checkpoints, files of others, and all kinds of garbage; returns the latter."""
    garbage = leave_replaced(root, "10")
    annotate(root.scope("10"), metrics={"loss": 0.5})
    garbage["10/manifest.000002.json"] = SUPERSEDED
    garbage |= leave_uncommitted(root, "10")
    garbage |= leave_uncommitted(root, "20")
    garbage |= leave_half_deleted(root, "30")
    save(root, b"sound", name="40")
    copied = save(root, b"copied", name="40_keep")
    for save_id in (copied.save_id, "20200101T000000Z-0123456789ab"):
        root.scope("40_keep").write(copy_record_key(save_id), b"not even JSON")
    garbage[f"40_keep/{copy_record_key(copied.save_id)}"] = COPY_RECORD
    garbage[f"40_keep/{copy_record_key('20200101T000000Z-0123456789ab')}"] = UNCOMMITTED
    for key in (PROBE, MARKER):
        root.write(key, b"x")
        garbage[key] = SCRATCH
    for key in FOREIGN:
        root.write(key, b"not ours")
    return garbage


FOREIGN = (
    "config.yaml",
    "weights.pth",
    ".probe-mine",
    f"{PROBE}.old",
    ".clock-1",
    "50/.metadata",
    "50/__0_0.distcp",
    "60/checkpoint.pth",
    "10/d-0123/0.distcp",
    "10/d-0123456789abcdef/00.distcp",
    "10/d-0123456789abcdef/0.distcp.part",
    "10/d-0123456789ABCDEF/0.distcp",
    "10/manifest.1.json",
    "10/manifest.0000009.json",
    "10/manifest.000009.json.bak",
    "10/index.json.gz",
    "10/metadata.pickle",
    "10/copy.json",
    "10/checkpoint.pth",
    "10/__0_0.distcp",
    "logs/events",
    "logs/deep/er/d-0123456789abcdef/0.distcp",
    "logs/deep/manifest.000001.json",
    ".hidden/d-0123456789abcdef/0.distcp",
    "a b/d-0123456789abcdef/0.distcp",
    "a b/manifest.000001.json",
)


def recorded(root: Store) -> FaultStore:
    """A store that writes down its calls."""
    return FaultStore(root)
