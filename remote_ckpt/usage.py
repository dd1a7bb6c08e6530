"""How many bytes a run's directory takes: its checkpoints, what is left over, and what is not ours.

Sizes are apparent ones, as the store lists them. Copies within a local directory are hard links: each counts
in full, though its data takes space once. Old versions in a versioned bucket, open uploads and temporary
files are not objects and do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from remote_ckpt.discover import CheckpointEntry, find_checkpoints
from remote_ckpt.keys import STOCK_METADATA_NAME, is_scratch_key, manifest_key, own_key
from remote_ckpt.newest import CheckpointKind, named_keys, stock_keys
from remote_ckpt.store.base import ObjectInfo, Store
from remote_ckpt.url import is_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUsage:
    """What one checkpoint takes.

    Args:
        name: Its name.
        step: The number that the name spells; None for a named checkpoint.
        kind: ``"remote_ckpt"``, ``"dcp"`` or ``"plain"``.
        object_count: Objects that its newest generation needs: data, index, metadata, manifest. Of one whose
            manifest cannot be read: all that could be its own.
        total_bytes: Their bytes.
        leftover_bytes: Bytes below its name that it does not need: superseded manifests and data, saves that
            were not committed (or not yet).
    """

    name: str
    step: int | None
    kind: CheckpointKind
    object_count: int
    total_bytes: int
    leftover_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What lies below a name where no checkpoint stands: of a deleted one, or of a save not committed (yet).

    Args:
        name: The name.
        object_count: Objects of our own kinds, the mark of the deletion included.
        total_bytes: Their bytes.
    """

    name: str
    object_count: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a run's directory takes. All bytes add up to what a listing shows.

    Args:
        url: The directory's URL without secrets.
        checkpoints: Steps by number, then named ones by name.
        remains: Names without a checkpoint that hold objects of ours, sorted.
        leftover_bytes: Bytes of all leftovers: those of checkpoints, the remains, and scratch objects of ours
            in the root. The sweep takes them once they are old enough; but for the newest mark of a deletion,
            which is tiny.
        other_count: Objects of others.
        other_bytes: Their bytes.
    """

    url: str
    checkpoints: tuple[CheckpointUsage, ...]
    remains: tuple[Remains, ...]
    leftover_bytes: int
    other_count: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return sum(checkpoint.total_bytes for checkpoint in self.checkpoints)


def measure_usage(root: Store) -> Usage:
    """Measure a run's directory: one listing of everything, and two requests for each checkpoint.

    A save or deletion that happens meanwhile is counted as leftover, or only in part.

    Args:
        root: The run's directory; it may not exist yet.

    Raises:
        StoreError: A request failed.
    """
    entries = {entry.name: entry for entry in find_checkpoints(root)}
    by_name = _by_name(root.list(""))
    in_root = by_name.pop("", [])
    shares = {
        name: _share(infos, entries.get(name)) if is_name(name) else _Share(others=infos)
        for name, infos in by_name.items()
    }
    scratch = [info for info in in_root if is_scratch_key(info.key)]
    others = [info for share in shares.values() for info in share.others]
    others += [info for info in in_root if not is_scratch_key(info.key)]
    leftovers = [info for share in shares.values() for info in share.leftovers]
    return Usage(
        url=root.url,
        checkpoints=tuple(_checkpoint(entry, shares.get(name, _Share())) for name, entry in entries.items()),
        remains=_remains({name: share for name, share in sorted(shares.items()) if name not in entries}),
        leftover_bytes=_bytes(leftovers) + _bytes(scratch),
        other_count=len(others),
        other_bytes=_bytes(others),
    )


def _by_name(infos: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """Objects by the name that they lie below, with their keys below it; those in the root under no name."""
    found: defaultdict[str, list[ObjectInfo]] = defaultdict(list)
    for info in infos:
        name, slash, key = info.key.partition("/")
        found[name if slash else ""].append(replace(info, key=key) if slash else info)
    return dict(found)


@dataclass(frozen=True, slots=True)
class _Share:
    """The objects below one name: what its checkpoint needs, what is left over, what is not ours."""

    needed: Collection[ObjectInfo] = ()
    leftovers: Collection[ObjectInfo] = ()
    others: Collection[ObjectInfo] = ()


def _share(infos: Collection[ObjectInfo], entry: CheckpointEntry | None) -> _Share:
    needed, superseded = _needed_keys(infos, entry), _superseded(entry)
    unneeded = [info for info in infos if info.key not in needed]
    leftovers = [info for info in unneeded if own_key(info.key) or info.key in superseded]
    left_over = {info.key for info in leftovers}
    return _Share(
        needed=[info for info in infos if info.key in needed],
        leftovers=leftovers,
        others=[info for info in unneeded if info.key not in left_over],
    )


def _needed_keys(infos: Collection[ObjectInfo], entry: CheckpointEntry | None) -> Collection[str]:
    if entry is None:
        return frozenset()
    if entry.kind != "remote_ckpt":
        return {*stock_keys(infos, entry.kind), STOCK_METADATA_NAME}
    if entry.manifest is None:  # damaged, or of a newer format: nobody can tell what it does not need
        return {info.key for info in infos if own_key(info.key)}
    return {*named_keys(entry.manifest), manifest_key(entry.generation), STOCK_METADATA_NAME}


def _superseded(entry: CheckpointEntry | None) -> Collection[str]:
    return frozenset() if entry is None or entry.manifest is None else frozenset(entry.manifest.superseded)


def _checkpoint(entry: CheckpointEntry, share: _Share) -> CheckpointUsage:
    return CheckpointUsage(
        name=entry.name,
        step=entry.step,
        kind=entry.kind,
        object_count=len(share.needed),
        total_bytes=_bytes(share.needed),
        leftover_bytes=_bytes(share.leftovers),
    )


def _remains(shares: Mapping[str, _Share]) -> tuple[Remains, ...]:
    return tuple(
        Remains(name=name, object_count=len(share.leftovers), total_bytes=_bytes(share.leftovers))
        for name, share in shares.items()
        if share.leftovers
    )


def _bytes(infos: Iterable[ObjectInfo]) -> int:
    return sum(info.size_bytes for info in infos)
