"""What stands at a checkpoint's place: the newest generation, or a checkpoint that is not ours.

A checkpoint's truth is the highest generation of its manifest. Where there is no manifest at all, a
stock DCP checkpoint (``.metadata``) or a plain one (``checkpoint.pth``) counts as generation 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointDamagedError,
    FormatError,
    ObjectNotFoundError,
)
from remote_ckpt.keys import (
    STOCK_METADATA_NAME,
    copy_record_key,
    is_attempt_key,
    is_safe_key,
    manifest_key,
    parse_manifest_key,
)
from remote_ckpt.manifest import Manifest, parse_manifest
from remote_ckpt.store.base import ObjectInfo, Store

PLAIN_NAME = "checkpoint.pth"
CheckpointKind = Literal["remote_ckpt", "dcp", "plain"]

_MAX_LOOKS = 8


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest generation of a checkpoint, read and verified."""

    generation: int
    manifest: Manifest

    @property
    def is_live(self) -> bool:
        """Whether there is a checkpoint, rather than the mark of a deleted one."""
        return self.manifest.state == "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one complete listing (and the newest readable manifest) says of a checkpoint.

    Args:
        infos: Every object of the checkpoint that was listed.
        generation: The highest generation; 0 where there is no manifest.
        manifest: The newest generation that can be read. Below ``generation`` only with ``damage``.
        damage: Why the highest generation cannot be read.
    """

    infos: tuple[ObjectInfo, ...]
    generation: int
    manifest: Manifest | None = None
    damage: CheckpointDamagedError | None = None

    @property
    def kind(self) -> CheckpointKind | None:
        """Who wrote what stands here; None where nothing that we recognise does."""
        if self.generation:
            return "remote_ckpt"
        keys = {info.key for info in self.infos}
        if STOCK_METADATA_NAME in keys:
            return "dcp"
        return "plain" if PLAIN_NAME in keys else None

    @property
    def is_live(self) -> bool:
        """Whether a checkpoint stands here, a damaged one included."""
        if self.damage or not self.generation:
            return self.kind is not None
        return self.manifest is not None and self.manifest.state == "live"

    @property
    def is_pinned(self) -> bool:
        """Whether the checkpoint refuses replacement and deletion."""
        return self.manifest is not None and self.manifest.state == "live" and self.manifest.pinned

    @property
    def save_id(self) -> str | None:
        """Which life of the name stands here; None where nobody can tell.

        The save that the newest readable generation names; of a checkpoint that is not ours, size and time of
        the file that makes it one.
        """
        if self.manifest is not None:
            return self.manifest.save_id
        found = [info for info in self.infos if info.key in stock_files(self)[-1:]]
        return f"{found[0].size_bytes} bytes, {found[0].modified_at.isoformat()}" if found else None

    @property
    def unnamed(self) -> tuple[ObjectInfo, ...]:
        """Objects of a save's own kinds that the newest generation neither names nor has still to delete.

        They are garbage, or belong to a save or copy that is in progress. Complete in a deep look only.
        """
        named = set[str]()
        if self.manifest is not None:
            named = {*named_keys(self.manifest), *self.manifest.superseded}
            named.add(copy_record_key(self.manifest.save_id))
        return tuple(info for info in self.infos if is_attempt_key(info.key) and info.key not in named)

    @property
    def superseded_keys(self) -> tuple[str, ...]:
        """Sorted keys that nobody needs once the next generation replaces or deletes this one.

        They include what this generation itself still had to delete. Keys that are gone are left
        out, or the list would grow with every replacement; they never come back.
        """
        if not self.generation:
            return stock_keys(self.infos, self.kind)
        if self.manifest is None:
            return ()
        wanted = named_keys(self.manifest) | set(self.manifest.superseded)
        return tuple(
            sorted(info.key for info in self.infos if info.key in wanted and is_as_named(info, self.manifest))
        )


def read_newest(checkpoint: Store) -> Newest | None:
    """Return the newest generation, or None where a listing that succeeded held no manifest.

    Where listing is not allowed, generations are looked for by their keys, from the first one upward: a role
    that may only read objects can load a checkpoint that it was told of.

    Raises:
        AccessDeniedError: Listing is not allowed, and no first generation can be read.
        CheckpointDamagedError: The newest generation cannot be read.
        FormatError: It is of a newer format.
        CheckpointChangedError: Every generation that was listed was gone when it was read.
        StoreError: The store failed, which says nothing about absence.
    """
    standing = _look(checkpoint, _list_or_climb)
    if standing.damage is not None:
        raise standing.damage
    return None if standing.manifest is None else Newest(standing.generation, standing.manifest)


def look(checkpoint: Store) -> Standing:
    """List the whole checkpoint and read its newest generation; errors as :func:`read_newest`."""
    return _look(checkpoint, lambda store: tuple(store.list("")))


def look_at_top(checkpoint: Store) -> Standing:
    """Like :func:`look` with one delimited listing: the data objects in deeper levels are not listed."""
    return _look(checkpoint, _list_top)


def list_generations(infos: Iterable[ObjectInfo]) -> list[int]:
    """Return the generations of a listing, ascending, whatever order the store listed them in."""
    numbers = (parse_manifest_key(info.key) for info in infos)
    return sorted(number for number in numbers if number is not None)


def read_generation(checkpoint: Store, generation: int) -> Manifest:
    """Read one generation; raises ObjectNotFoundError, CheckpointDamagedError or FormatError.

    Damage is believed the second time only: what was altered on its way here comes right then, and a pin
    that could not be read would not hold.
    """
    key = manifest_key(generation)
    with suppress(CheckpointDamagedError):
        return parse_manifest(checkpoint.read(key), url=checkpoint.url, key=key)
    return parse_manifest(checkpoint.read(key), url=checkpoint.url, key=key)


def named_keys(manifest: Manifest) -> frozenset[str]:
    """Return the keys of the objects that a live generation needs: data, index, stock metadata."""
    entries = [*manifest.objects, manifest.index, manifest.stock_metadata]
    return frozenset(entry.key for entry in entries if entry is not None)


def is_as_named(info: ObjectInfo, manifest: Manifest) -> bool:
    """Whether an object is still the one that a generation's list means.

    Keys of ours never come back, but others may have used the name of a stock file again.
    """
    return is_attempt_key(info.key) or info.modified_at <= manifest.committed_at


def stock_keys(infos: Iterable[ObjectInfo], kind: CheckpointKind | None) -> tuple[str, ...]:
    """Return the files that a stock DCP or plain checkpoint consists of, ``.metadata`` not included.

    Nothing else in such a folder is recognised, so nothing else is ever deleted with it.
    """
    if kind == "dcp":
        return tuple(info.key for info in infos if _is_stock_data(info.key))
    return (PLAIN_NAME,) if kind == "plain" else ()


def stock_files(standing: Standing) -> tuple[str, ...]:
    """Return all files of a stock DCP or plain checkpoint, the one that makes it a checkpoint last."""
    keys = stock_keys(standing.infos, standing.kind)
    return (*keys, STOCK_METADATA_NAME) if standing.kind == "dcp" else keys


def _is_stock_data(key: str) -> bool:
    return "/" not in key and key.endswith(".distcp") and is_safe_key(key)


def _list_top(checkpoint: Store) -> tuple[ObjectInfo, ...]:
    return checkpoint.list_children("").objects


def _list_or_climb(checkpoint: Store) -> tuple[ObjectInfo, ...]:
    try:
        return _list_top(checkpoint)
    except AccessDeniedError as refusal:
        if infos := tuple(_climb(checkpoint)):
            return infos
        raise refusal


def _climb(checkpoint: Store) -> Iterator[ObjectInfo]:
    # Without the right to list, S3 answers 403 where an object is missing: both end the climb.
    with suppress(ObjectNotFoundError, AccessDeniedError):
        for generation in itertools.count(1):
            yield checkpoint.info(manifest_key(generation))


def _look(checkpoint: Store, list_infos: Callable[[Store], tuple[ObjectInfo, ...]]) -> Standing:
    for _ in range(_MAX_LOOKS):
        infos = list_infos(checkpoint)
        generations = list_generations(infos)
        if not generations:
            return Standing(infos=infos, generation=0)
        try:
            return _read_top(checkpoint, infos, generations)
        except ObjectNotFoundError:
            continue  # superseded and swept, or deleted with its folder, after the listing: look again
    raise CheckpointChangedError(
        f"the manifest changed {_MAX_LOOKS} times while it was read", url=checkpoint.url, operation="read"
    )


def _read_top(checkpoint: Store, infos: tuple[ObjectInfo, ...], generations: list[int]) -> Standing:
    top = generations[-1]
    try:
        manifest = read_generation(checkpoint, top)
    except CheckpointDamagedError as damage:
        below = _newest_readable(checkpoint, generations[:-1])
        return Standing(infos=infos, generation=top, manifest=below, damage=damage)
    return Standing(infos=infos, generation=top, manifest=manifest)


def _newest_readable(checkpoint: Store, generations: list[int]) -> Manifest | None:
    for generation in reversed(generations):
        try:
            return read_generation(checkpoint, generation)
        except (CheckpointDamagedError, FormatError, ObjectNotFoundError):
            continue  # the sweep may have taken it, or it is damaged as well
    return None
