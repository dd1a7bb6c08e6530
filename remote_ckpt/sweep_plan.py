"""What is garbage, decided from what was seen: pure, and the same for a dry run and just before removal.

Only names of our own grammar are ever garbage, and what a manifest of ours lists as replaced. Everything
must be older than the grace period; what is kept back by an age alone is decided by several ages:

- data, index, metadata and records of copies that the newest generation does not name: by their own;
- what the newest generation lists as replaced or deleted: also by that generation's, for its readers and for
  whoever is just cleaning up;
- a superseded manifest: also by that of the one above, since it was the newest until then.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from remote_ckpt.keys import (
    STOCK_METADATA_NAME,
    copy_record_key,
    is_attempt_key,
    is_scratch_key,
    is_token,
    manifest_key,
    own_key,
    parse_manifest_key,
)
from remote_ckpt.newest import Standing, is_as_named, named_keys, stock_keys
from remote_ckpt.store.base import Leftover, ObjectInfo
from remote_ckpt.url import is_name

GarbageKind = Literal[
    "uncommitted",
    "replaced",
    "copied_file",
    "copy_record",
    "superseded",
    "stock_metadata",
    "folder",
    "tombstone",
    "scratch",
    "open_upload",
    "temporary_file",
    "left_folder",
]
"""What a piece of garbage is: it decides how it is removed."""

UNCOMMITTED: Final = "uncommitted"
REPLACED: Final = "replaced"
COPIED_FILE: Final = "copied_file"
COPY_RECORD: Final = "copy_record"
SUPERSEDED: Final = "superseded"
STOCK_METADATA: Final = "stock_metadata"
FOLDER: Final = "folder"
TOMBSTONE: Final = "tombstone"
SCRATCH: Final = "scratch"
LEFTOVER: Final[Mapping[str, GarbageKind]] = {
    "upload": "open_upload",
    "file": "temporary_file",
    "folder": "left_folder",
}

_WORDS: Final[Mapping[GarbageKind, str]] = {
    UNCOMMITTED: "of a save or copy that was never committed",
    REPLACED: "replaced or deleted, and left by a clean-up that was cut short",
    COPIED_FILE: "file of a copy of a stock checkpoint that was never finished",
    COPY_RECORD: "record of a copy that is finished",
    SUPERSEDED: "manifest that a newer one superseded",
    STOCK_METADATA: "metadata for stock readers of a deleted checkpoint",
    FOLDER: "folder of a deleted checkpoint",
    TOMBSTONE: "mark of a deleted checkpoint",
    SCRATCH: "left by a probe of the store or a look at its clock",
    "open_upload": "multipart upload that was never completed",
    "temporary_file": "temporary file of an interrupted write",
    "left_folder": "folder that an interrupted save or deletion left",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """One thing to remove.

    Args:
        checkpoint: The name that it lies below; empty for what lies right in the root.
        key: Its key, relative to the root.
        size_bytes: Its size; 0 for open uploads, of which the store does not say it.
        modified_at: When it changed last, by the store's clock (UTC).
        kind: What it is.
        reason: Why it is garbage, in words.
    """

    checkpoint: str
    key: str
    size_bytes: int
    modified_at: datetime
    kind: GarbageKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that was seen of one name.

    Args:
        name: The checkpoint's name.
        standing: Its complete listing and newest manifest, which is not damaged and lacks nothing it names.
        folder_names: Names of the next level, empty folders of a local disk included.
        is_closed: Whether its tombstone takes the whole folder away (local disk).
        stock_metadata: Content of ``.metadata`` where no manifest says what belongs to the checkpoint.
        copy_records: Of unfinished copies of stock checkpoints, where nothing else stands: the record's key,
            and the size of each file that it names.
        linked_folders: Folders (local disk) that a link leads to: what lies there is left alone.
    """

    name: str
    standing: Standing
    folder_names: tuple[str, ...] = ()
    is_closed: bool = False
    stock_metadata: bytes = b""
    copy_records: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    linked_folders: frozenset[str] = frozenset()

    @property
    def missing_keys(self) -> list[str]:
        """Sorted keys that the newest generation names and that were not listed."""
        manifest, listed = self.standing.manifest, {info.key for info in self.standing.infos}
        return sorted(named_keys(manifest) - listed) if manifest is not None else []

    @property
    def is_without_manifest(self) -> bool:
        """Whether this is a checkpoint of ours but for its manifest, which nobody but stock DCP can read.

        Other tools copied it like that; or the listing lacks the manifest.
        """
        data = {info.key.partition("/")[0] for info in self.standing.infos if is_attempt_key(info.key)}
        return any(name.encode() in self.stock_metadata for name in data)

    @property
    def is_deleted(self) -> bool:
        """Whether the newest generation is a tombstone."""
        return self.standing.generation > 0 and not self.standing.is_live

    @property
    def has_begun_folder(self) -> bool:
        """Whether a save may be writing its first object: its folder is there, and nothing in it."""
        filled = {info.key.partition("/")[0] for info in self.standing.infos}
        return any(is_token(name) and name not in filled for name in self.folder_names)


def has_own_names(keys: Iterable[str], folder_names: Iterable[str]) -> bool:
    """Whether one level below a name holds anything of ours, so that a closer look is worth it."""
    is_any = any(parse_manifest_key(key) is not None or is_attempt_key(key) for key in keys)
    return is_any or any(map(is_token, folder_names))


def plan_checkpoint(scene: Scene, *, before: datetime, tombstones: bool = False) -> tuple[Garbage, ...]:
    """Return the garbage of one name, in the order of its removal.

    Args:
        before: Only what changed last before this is old enough (the store's clock).
        tombstones: The mark of a deleted checkpoint goes too, if it is all that would be left.
    """
    facts = _facts_of(scene, before)
    found = [*_copied_files(facts), *_data(facts), *_stock_metadata(facts), *_superseded_manifests(facts)]
    last = _last(facts, {info.key for info, _ in found}, tombstones)
    return tuple(
        Garbage(
            checkpoint=scene.name,
            key=f"{scene.name}/{info.key}",
            size_bytes=info.size_bytes,
            modified_at=info.modified_at,
            kind=kind,
            reason=_WORDS[kind],
        )
        for info, kind in (*found, *last)
    )


def plan_root(infos: Iterable[ObjectInfo], *, before: datetime) -> tuple[Garbage, ...]:
    """Return the garbage among the objects right in the root."""
    return tuple(
        Garbage(
            checkpoint="",
            key=info.key,
            size_bytes=info.size_bytes,
            modified_at=info.modified_at,
            kind=SCRATCH,
            reason=_WORDS[SCRATCH],
        )
        for info in infos
        if is_scratch_key(info.key) and info.modified_at < before
    )


def plan_leftovers(
    leftovers: Iterable[Leftover], *, before: datetime, except_in: Collection[str] = ()
) -> tuple[tuple[Garbage, Leftover], ...]:
    """Return the old leftovers of our own names, each with the garbage that it is.

    Args:
        except_in: Checkpoints to leave alone.
    """
    return tuple(
        (_leftover_garbage(leftover, name), leftover)
        for leftover in leftovers
        if leftover.modified_at < before and (name := _owner(leftover)) is not None and name not in except_in
    )


def parse_owner(key: str) -> str | None:
    """Return the checkpoint that a key of the root would belong to, or None where it is none of our keys."""
    name, _, rest = key.partition("/")
    is_own = parse_manifest_key(rest) is not None or is_attempt_key(rest)
    return name if is_own and is_name(name) else None


# --- one name ----------------------------------------------------------------------------------------

_Found = Iterator[tuple[ObjectInfo, GarbageKind]]


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is asked of every object of a scene, found out once."""

    scene: Scene
    before: datetime
    named: frozenset[str]
    superseded: frozenset[str]
    newest: ObjectInfo | None

    @property
    def infos(self) -> tuple[ObjectInfo, ...]:
        return self.scene.standing.infos

    @property
    def is_settled(self) -> bool:
        """Whether the newest generation is old enough itself."""
        return self.newest is not None and self.is_old(self.newest)

    def is_old(self, info: ObjectInfo) -> bool:
        return info.modified_at < self.before


def _facts_of(scene: Scene, before: datetime) -> _Facts:
    manifest = scene.standing.manifest
    key = manifest_key(scene.standing.generation) if scene.standing.generation else None
    return _Facts(
        scene,
        before,
        named=named_keys(manifest) if manifest is not None else frozenset(),
        superseded=frozenset(manifest.superseded if manifest is not None else ()),
        newest=next((info for info in scene.standing.infos if info.key == key), None),
    )


def _data(facts: _Facts) -> _Found:
    for info in facts.infos:
        kind = _kind(facts, info) if facts.is_old(info) else None
        if kind is not None:
            yield info, kind


def _kind(facts: _Facts, info: ObjectInfo) -> GarbageKind | None:
    """What garbage an old object is that is neither a manifest nor ``.metadata``; None where it is none."""
    if info.key.rpartition("/")[0] in facts.scene.linked_folders:
        return None
    manifest = facts.scene.standing.manifest
    if manifest is None:
        is_kept = info.key in facts.scene.copy_records and _has_young_copy(facts)
        return UNCOMMITTED if is_attempt_key(info.key) and not is_kept else None
    if info.key in facts.named or info.key == STOCK_METADATA_NAME or parse_manifest_key(info.key) is not None:
        return None
    if info.key in facts.superseded:
        return REPLACED if is_as_named(info, manifest) and facts.is_settled else None
    if info.key == copy_record_key(manifest.save_id):
        return COPY_RECORD
    return UNCOMMITTED if is_attempt_key(info.key) else None


def _copied_files(facts: _Facts) -> _Found:
    """Yield what the records of unfinished copies of stock checkpoints prove to be those copies'."""
    if facts.scene.standing.kind is None and not _has_young_copy(facts):
        for info in _named_by_records(facts):
            yield info, COPIED_FILE


def _has_young_copy(facts: _Facts) -> bool:
    """Whether a copy may go on: its record must stay as long as the files, which nothing else names."""
    records = [info for info in facts.infos if info.key in facts.scene.copy_records]
    return not all(map(facts.is_old, (*records, *_named_by_records(facts))))


def _named_by_records(facts: _Facts) -> list[ObjectInfo]:
    """Return the stock files that a record names, of its size, and not older than it."""
    began = {info.key: info.modified_at for info in facts.infos if info.key in facts.scene.copy_records}
    files = {info.key: info for info in facts.infos}
    return [
        files[key]
        for key in stock_keys(facts.infos, "dcp")
        if any(
            sizes.get(key) == files[key].size_bytes and files[key].modified_at >= began[record]
            for record, sizes in facts.scene.copy_records.items()
        )
    ]


def _stock_metadata(facts: _Facts) -> _Found:
    if facts.newest is None or not facts.scene.is_deleted or not facts.is_settled:
        return
    has_stock_data = not facts.superseded.issuperset(stock_keys(facts.infos, "dcp"))
    for info in facts.infos:
        # Beside data of stock DCP it may be that one's own, saved since the deletion.
        is_ours = not has_stock_data or info.modified_at < facts.newest.modified_at
        if info.key == STOCK_METADATA_NAME and is_ours and facts.is_old(info):
            yield info, STOCK_METADATA


def _superseded_manifests(facts: _Facts) -> _Found:
    """Yield the lowest ones, without a gap: a reader that may not list climbs from the first one upward."""
    numbered = [(parse_manifest_key(info.key), info) for info in facts.infos]
    manifests = sorted((number, info) for number, info in numbered if number is not None)
    for (_, info), (_, above) in itertools.pairwise(manifests):
        if not (facts.is_old(info) and facts.is_old(above)):
            return
        yield info, SUPERSEDED


def _last(
    facts: _Facts, removed: Collection[str], tombstones: bool
) -> Sequence[tuple[ObjectInfo, GarbageKind]]:
    """Return the tombstone where it goes: with its folder, or by the operator's order."""
    scene, newest = facts.scene, facts.newest
    if newest is None or not scene.is_deleted or not facts.is_settled or scene.has_begun_folder:
        return ()
    rest = [info.key for info in facts.infos if info.key not in removed and info is not newest]
    if scene.is_closed and not rest:
        return ((newest, FOLDER),)
    return ((newest, TOMBSTONE),) if tombstones and not any(map(own_key, rest)) else ()


# --- leftovers ---------------------------------------------------------------------------------------


def _leftover_garbage(leftover: Leftover, name: str) -> Garbage:
    return Garbage(
        checkpoint=name,
        key=leftover.key,
        size_bytes=leftover.size_bytes,
        modified_at=leftover.modified_at,
        kind=LEFTOVER[leftover.kind],
        reason=_WORDS[LEFTOVER[leftover.kind]],
    )


def _owner(leftover: Leftover) -> str | None:
    """Return the checkpoint of a leftover, empty for the root's own; None where it is not ours."""
    if leftover.kind == "upload":
        name, _, rest = leftover.key.partition("/")
        return name if is_name(name) and is_attempt_key(rest) else None
    *parents, last = leftover.key.split("/")
    if is_token(last):
        return parents[0] if len(parents) == 1 and is_name(parents[0]) else None
    if not parents:
        return ""
    is_ours = is_name(parents[0]) and (len(parents) == 1 or (len(parents) == 2 and is_token(parents[1])))
    return parents[0] if is_ours else None
