"""Copying a checkpoint within a run's directory, without moving its data through this process.

A copy is an attempt like a save: it has its own save_id and its own keys, which no other attempt
ever uses, and is committed by its own manifest, last. Keys of the source would not do: when the same
checkpoint is copied to the same name twice, a slow deletion of the first copy would hit the second.
So the names of the data folders are exchanged for new ones of the same length, in the index and
(byte for byte, which keeps a pickle valid) in the metadata for stock readers.

The attempt is written down before it begins. A copy that was interrupted goes on under the same
keys, as long as nothing has happened to the target's name since and the attempt is not too old.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from remote_ckpt._version import __version__
from remote_ckpt.checksum import crc32c
from remote_ckpt.commit import (
    SaveAttempt,
    begin_save,
    check_may_replace,
    commit_save,
    finish_replacement,
    withdraw,
)
from remote_ckpt.deletion import open_life
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
)
from remote_ckpt.generation import DEFAULT_OPTIONS, REAL_TIME, Waiting
from remote_ckpt.index import format_index, parse_index
from remote_ckpt.keys import copy_record_key, index_key, parse_copy_record_key, stock_metadata_key
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest, ObjectEntry
from remote_ckpt.newest import Standing, look, named_keys, read_newest
from remote_ckpt.options import Options
from remote_ckpt.store.base import ObjectInfo, Store
from remote_ckpt.url import check_name, parse_step

T = TypeVar("T")
_DATA_FOLDER = re.compile(r"d-[0-9a-f]{16}(?=/)")
_DATA_FOLDER_BYTES = re.compile(rb"d-[0-9a-f]{16}(?=/)")


@dataclass(frozen=True, slots=True)
class _Copy:
    """One attempt: from where to where, under which id, on top of which generation."""

    source: str
    target: str
    attempt: SaveAttempt
    base_generation: int

    def rename(self, key: str) -> str:
        """Return the target's key of one of the source's data objects."""
        return _DATA_FOLDER.sub(lambda match: self._folder(match[0]), key)

    def rename_in(self, data: bytes, source_id: str) -> bytes:
        """Return bytes with the source's folders and save_id exchanged for ours, of the same lengths."""
        renamed = _DATA_FOLDER_BYTES.sub(lambda match: self._folder(match[0].decode()).encode(), data)
        return renamed.replace(source_id.encode(), self.attempt.save_id.encode())

    def _folder(self, source: str) -> str:
        # Derived, not drawn, so that a resumed copy finds the same names by the id alone.
        return f"d-{hashlib.sha256(f'{self.attempt.save_id} {source}'.encode()).hexdigest()[:16]}"


def copy_checkpoint(
    root: Store,
    source: str,
    target: str,
    *,
    overwrite: bool = False,
    options: Options = DEFAULT_OPTIONS,
    waiting: Waiting = REAL_TIME,
) -> Manifest:
    """Copy checkpoint ``source`` to the name ``target``: hard links on a local disk, else server-side copies.

    The copy carries metrics, user metadata and content digest; it is not pinned. Called by one process.
    An interrupted copy is taken up again by the next call.

    Returns:
        The copy's manifest.

    Raises:
        CheckpointNotFoundError: There is no ``source`` with a manifest; stock ones have none:
            :func:`~remote_ckpt.stock_copies.copy_stock_checkpoint`.
        CheckpointDamagedError, FormatError: It cannot be read, or lacks an object.
        CheckpointChangedError: Source or target changed meanwhile; call again.
        CheckpointExistsError, CheckpointPinnedError, SaveFailedError, CommitUnknownError: As
            :func:`~remote_ckpt.commit.commit_save`.
        StoreError: The store failed; nothing was committed.
    """
    if check_name(source) == check_name(target):
        raise ConfigError(f"cannot copy checkpoint {source!r} onto itself", url=root.url)
    with ExitStack() as scopes:
        origin = scopes.enter_context(closing(root.scope(source)))
        manifest = _read_source(origin)
        checkpoint, standing = open_life(root, target)
        scopes.callback(checkpoint.close)
        names = (source, target)
        copy = _resume(checkpoint, standing, manifest, names, options)
        if copy is not None and (done := _committed(standing, copy)) is not None:
            return _finish(checkpoint, done)
        check_may_replace(checkpoint, standing, overwrite=overwrite)
        if copy is None:
            copy = _begin(checkpoint, standing, manifest, names, options)
        _copy_into(checkpoint, root, origin, copy, manifest, standing.infos, options)
        draft = _draft(origin, checkpoint, copy, manifest)
        return _finish(checkpoint, _commit(checkpoint, draft, copy, overwrite, options, waiting))


# --- the attempt -------------------------------------------------------------------------------------


def _begin(
    checkpoint: Store, standing: Standing, manifest: Manifest, names: tuple[str, str], options: Options
) -> _Copy:
    attempt = begin_save(checkpoint, options)
    record = {"source_save_id": manifest.save_id, "base_generation": standing.generation}
    checkpoint.write(copy_record_key(attempt.save_id), json.dumps(record).encode())
    return _Copy(*names, attempt, standing.generation)


def _resume(
    checkpoint: Store, standing: Standing, manifest: Manifest, names: tuple[str, str], options: Options
) -> _Copy | None:
    """Return an attempt that was begun for the same source and can still be committed, or just was."""
    for info in standing.infos:
        save_id = parse_copy_record_key(info.key)
        if save_id is None or (record := _read_record(checkpoint, info.key)) is None:
            continue
        copy = _Copy(*names, _attempt(save_id, info, options), record["base_generation"])
        is_same_source = record.get("source_save_id") == manifest.save_id
        is_open = copy.base_generation == standing.generation and checkpoint.clock() < copy.attempt.deadline
        if is_same_source and (is_open or _committed(standing, copy) is not None):
            return copy
    return None


def _attempt(save_id: str, record: ObjectInfo, options: Options) -> SaveAttempt:
    began_at = record.modified_at
    return SaveAttempt(save_id, began_at, began_at + timedelta(seconds=options.commit.save_seconds))


def _read_record(checkpoint: Store, key: str) -> dict[str, Any] | None:
    try:
        record = json.loads(checkpoint.read(key))
    except (ObjectNotFoundError, ValueError):
        return None  # finished by somebody else, or not readable: begin anew, the sweep takes it
    is_record = isinstance(record, dict) and isinstance(record.get("base_generation"), int)
    return record if is_record else None


def _committed(standing: Standing, copy: _Copy) -> Manifest | None:
    manifest = standing.manifest
    if manifest is None or standing.damage is not None or not standing.is_live:
        return None
    return manifest if manifest.save_id == copy.attempt.save_id else None


# --- data --------------------------------------------------------------------------------------------


def _copy_into(
    checkpoint: Store,
    root: Store,
    origin: Store,
    copy: _Copy,
    manifest: Manifest,
    infos: Sequence[ObjectInfo],
    options: Options,
) -> None:
    """Copy the data by the checkpoints' names; take it back where the target's name got another folder."""
    try:
        _copy_data(root, origin, copy, manifest, infos, options)
    finally:
        is_stray = not checkpoint.is_current()
        if is_stray:
            # The keys are this attempt's own, so nothing else can be hit.
            strays = [f"{copy.target}/{copy.rename(entry.key)}" for entry in manifest.objects]
            for failure in root.delete(strays):
                logger.warning("%s: cannot remove %s: %s", root.url, failure.key, failure.error)
    if is_stray:
        raise CheckpointChangedError(
            "the target was deleted while the copy was made", url=checkpoint.url, operation="copy"
        )


def _copy_data(
    root: Store,
    origin: Store,
    copy: _Copy,
    manifest: Manifest,
    infos: Sequence[ObjectInfo],
    options: Options,
) -> None:
    """Copy the data objects that are not there yet from an earlier try."""
    present = {info.key: info.size_bytes for info in infos}
    pairs = [(entry, copy.rename(entry.key)) for entry in manifest.objects]
    missing = [(entry.key, key) for entry, key in pairs if present.get(key) != entry.size_bytes]
    try:
        run_all(
            lambda keys: root.copy(f"{copy.source}/{keys[0]}", f"{copy.target}/{keys[1]}"),
            missing,
            concurrency=options.transfer.concurrency,
        )
    except ObjectNotFoundError as error:
        raise _gone(origin, manifest, error) from error


def run_all(call: Callable[[T], None], items: Sequence[T], *, concurrency: int) -> None:
    """Call for all items; the first failure cancels what has not begun, and is raised when the rest ended."""
    if not items:
        return
    with ThreadPoolExecutor(min(concurrency, len(items)), thread_name_prefix="copy") as pool:
        futures = [pool.submit(call, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
    for future in futures:
        if not future.cancelled():
            future.result()


# --- index, metadata, manifest -----------------------------------------------------------------------


def _draft(origin: Store, checkpoint: Store, copy: _Copy, manifest: Manifest) -> Manifest:
    """Write index and stock metadata with the new names, and describe the copy."""
    save_id = copy.attempt.save_id
    index = _renamed_index(origin, copy, manifest)
    stock_metadata = _renamed_stock_metadata(origin, copy, manifest)
    return replace(
        manifest,
        save_id=save_id,
        name=copy.target,
        step=parse_step(copy.target),
        package_version=__version__,
        objects=tuple(replace(entry, key=copy.rename(entry.key)) for entry in manifest.objects),
        index=_write(checkpoint, index_key(save_id), index),
        stock_metadata=_write(checkpoint, stock_metadata_key(save_id), stock_metadata),
        pinned=False,
        extra={**manifest.extra, "copied_from": f"{manifest.name} {manifest.save_id}"},
    )


def _renamed_index(origin: Store, copy: _Copy, manifest: Manifest) -> bytes | None:
    if (entry := manifest.index) is None:
        return None
    index = parse_index(_read(origin, entry, manifest), url=origin.url, key=entry.key)
    objects = [copy.rename(key) for key in index.objects]
    return format_index(replace(index, save_id=copy.attempt.save_id, objects=objects))


def _renamed_stock_metadata(origin: Store, copy: _Copy, manifest: Manifest) -> bytes | None:
    if (entry := manifest.stock_metadata) is None:
        return None
    return copy.rename_in(_read(origin, entry, manifest), manifest.save_id)


def _read(origin: Store, entry: ObjectEntry, manifest: Manifest) -> bytes:
    try:
        data = origin.read(entry.key)
    except ObjectNotFoundError as error:
        raise _gone(origin, manifest, error) from error
    if len(data) != entry.size_bytes or crc32c(data) != entry.crc32c:
        raise IntegrityError("its bytes are not those that were saved", url=origin.url, key=entry.key)
    return data


def _write(checkpoint: Store, key: str, data: bytes | None) -> ObjectEntry | None:
    if data is None:
        return None
    checkpoint.write(key, data)
    return ObjectEntry(key, len(data), crc32c(data))


# --- the end -----------------------------------------------------------------------------------------


def _commit(
    checkpoint: Store, draft: Manifest, copy: _Copy, overwrite: bool, options: Options, waiting: Waiting
) -> Manifest:
    try:
        return commit_save(
            checkpoint,
            draft,
            attempt=copy.attempt,
            overwrite=overwrite,
            expected={},
            # Never on top of anything newer: a tombstone there may name this attempt's keys.
            if_generation=copy.base_generation,
            options=options,
            waiting=waiting,
        )
    except (CheckpointChangedError, CheckpointExistsError):
        # Another process may have taken up the same attempt and been faster.
        if (done := _committed(look(checkpoint), copy)) is None:
            _withdraw(checkpoint, draft)
            raise
        return done


def _withdraw(checkpoint: Store, draft: Manifest) -> None:
    """Take back an attempt that nobody can take up again: its target went on from where it began."""
    keys = [*sorted(named_keys(draft)), copy_record_key(draft.save_id)]
    for failure in withdraw(checkpoint, keys, draft.save_id):
        logger.warning("%s: cannot remove %s: %s", checkpoint.url, failure.key, failure.error)


def _finish(checkpoint: Store, manifest: Manifest) -> Manifest:
    finish_replacement(checkpoint, manifest)
    for failure in checkpoint.delete([copy_record_key(manifest.save_id)]):
        logger.warning("%s: cannot remove %s: %s", checkpoint.url, failure.key, failure.error)
    return manifest


def _read_source(origin: Store) -> Manifest:
    newest = read_newest(origin)
    if newest is None or not newest.is_live:
        raise CheckpointNotFoundError(
            "there is no checkpoint with a manifest to copy", url=origin.url, operation="copy"
        )
    return newest.manifest


def _gone(origin: Store, manifest: Manifest, error: ObjectNotFoundError) -> CheckpointError:
    """Say why an object of the source is missing: the source changed, or it is damaged."""
    newest = read_newest(origin)
    if newest is None or not newest.is_live or newest.manifest.save_id != manifest.save_id:
        return CheckpointChangedError(
            "the checkpoint was replaced or deleted while it was copied", url=origin.url, operation="copy"
        )
    return CheckpointDamagedError(
        f"an object that the checkpoint names is missing: {error.key}",
        url=origin.url,
        key=error.key,
        operation="copy",
    )
