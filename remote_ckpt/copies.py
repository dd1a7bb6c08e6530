"""Copying a checkpoint, within a run's directory or to another one.

A copy is an attempt like a save: it has its own save_id and its own keys, which no other attempt
ever uses, and is committed by its own manifest, last. Keys of the source would not do: when the same
checkpoint is copied to the same name twice, a slow deletion of the first copy would hit the second.
So the names of the data folders are exchanged for new ones of the same length, in the index and
(byte for byte, which keeps a pickle valid) in the metadata for stock readers.

The attempt is written down before it begins. A copy that was interrupted goes on under the same
keys, as long as nothing has happened to the target's name since and the attempt is not too old.

How the bytes get from one place to the other is :mod:`remote_ckpt.routes`'s matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from remote_ckpt._version import __version__
from remote_ckpt.checksum import crc32c
from remote_ckpt.commit import (
    check_may_replace,
    commit_save,
    finish_replacement,
    withdraw,
)
from remote_ckpt.copy_attempt import (
    CopyAttempt,
    begin_copy,
    check_apart,
    check_names,
    committed_copy,
    delete_record,
    resume_copy,
)
from remote_ckpt.deletion import open_life
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    ObjectNotFoundError,
)
from remote_ckpt.generation import DEFAULT_OPTIONS, REAL_TIME, Waiting
from remote_ckpt.index import check_ranges, format_index, parse_index
from remote_ckpt.integrity import read_verified
from remote_ckpt.keys import copy_record_key, index_key, stock_metadata_key
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest, ObjectEntry
from remote_ckpt.moves import Move, begin_progress
from remote_ckpt.newest import look, named_keys, read_newest
from remote_ckpt.options import Options
from remote_ckpt.probe import probe_create_only
from remote_ckpt.progress import OnProgress
from remote_ckpt.routes import Route, choose_mover, route_within
from remote_ckpt.store.base import ObjectInfo, Store
from remote_ckpt.streams import StreamMover, find_damaged
from remote_ckpt.url import parse_step


def copy_checkpoint(
    root: Store,
    source: str,
    target: str,
    *,
    overwrite: bool = False,
    options: Options = DEFAULT_OPTIONS,
    waiting: Waiting = REAL_TIME,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Copy checkpoint ``source`` to the name ``target`` beside it: hard links on a local disk, else
    server-side copies.

    Arguments, result and errors as :func:`copy_along`.
    """
    return copy_along(
        route_within(root, source, target),
        overwrite=overwrite,
        options=options,
        waiting=waiting,
        on_progress=on_progress,
    )


def copy_along(
    route: Route,
    *,
    overwrite: bool = False,
    options: Options = DEFAULT_OPTIONS,
    waiting: Waiting = REAL_TIME,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Copy a checkpoint with a manifest along a route. Called by one process.

    The copy carries metrics, user metadata and content digest; it is not pinned. Names and sizes of all its
    objects are compared with a listing before it is committed. An interrupted copy is taken up again by the
    next call, until ``options.commit.save_seconds`` after it began; what is there is not copied again.
    Of that, names and sizes are compared, and CRC-32C too (by reading it back) where the bytes stream through
    this process.

    Args:
        route: From where to where.
        overwrite: Replace a checkpoint of the target's name.
        options: Of the target: parallel transfers and their budget, deadlines.
        waiting: How time passes while the commit is undecided.
        on_progress: Told of each advance.

    Returns:
        The copy's manifest.

    Raises:
        CheckpointNotFoundError: There is no source with a manifest; stock ones have none:
            :func:`~remote_ckpt.stock_copies.copy_stock_along`.
        CheckpointDamagedError, FormatError: It cannot be read, or lacks an object.
        IntegrityError: An object that passed through this process is not what was saved.
        CheckpointChangedError: Source or target changed meanwhile; call again.
        UnsupportedStoreError: As :func:`~remote_ckpt.probe.probe_create_only`, of the target.
        ConfigError: Source and target are the same checkpoint.
        CheckpointExistsError, CheckpointPinnedError, SaveFailedError, CommitUnknownError: As
            :func:`~remote_ckpt.commit.commit_save`.
        StoreError: A store failed; nothing was committed.
    """
    check_names(route)
    with ExitStack() as scopes:
        origin = scopes.enter_context(closing(route.source_root.scope(route.source)))
        source = _read_source(origin)
        probe_create_only(route.target_root, options=options)
        checkpoint, standing = open_life(route.target_root, route.target)
        scopes.callback(checkpoint.close)
        copy = resume_copy(checkpoint, standing, source.save_id, target=route.target, options=options)
        if copy is not None and (done := committed_copy(standing, copy)) is not None:
            return _finish(checkpoint, done)
        check_may_replace(checkpoint, standing, overwrite=overwrite)
        if copy is None:
            copy = begin_copy(checkpoint, standing, source.save_id, target=route.target, options=options)
        check_apart(origin, checkpoint, copy.record_key)
        job = _Job(route, origin, checkpoint, source, copy)
        described = job.describe()  # a damaged index shows before the data is moved
        job.move(standing.infos, options, on_progress)
        draft = job.write_draft(*described)
        return _finish(checkpoint, _commit(checkpoint, draft, copy, overwrite, options, waiting))


@dataclass(frozen=True, slots=True)
class _Job:
    """One copy at work: its two ends, open, what is copied, and as which attempt."""

    route: Route
    origin: Store
    checkpoint: Store
    source: Manifest
    copy: CopyAttempt

    def move(
        self, infos: Sequence[ObjectInfo], options: Options, on_progress: OnProgress | None = None
    ) -> None:
        """Copy the data objects that are not there yet from an earlier try."""
        mover = choose_mover(self.route, self.origin, self.checkpoint, options.transfer)
        present = {info.key: info.size_bytes for info in infos}
        moves = [
            Move(entry.key, self.copy.rename(entry.key), entry.size_bytes, entry.crc32c)
            for entry in self.source.objects
        ]
        missing = [move for move in moves if present.get(move.target_key) != move.size_bytes]
        if isinstance(mover, StreamMover):
            left = [move for move in moves if present.get(move.target_key) == move.size_bytes]
            missing += find_damaged(self.checkpoint, left, options.transfer)
        counter = begin_progress(moves, missing, on_progress)
        try:
            mover.move(missing, counter)
        except ObjectNotFoundError as error:
            raise self._gone(error) from error
        if not self.checkpoint.is_current():
            raise CheckpointChangedError(
                "the target was deleted while the copy was made", url=self.checkpoint.url, operation="copy"
            )

    def describe(self) -> tuple[bytes | None, bytes | None]:
        """Return index and stock metadata with the copy's names, as far as the source has them."""
        return self._renamed_index(), self._renamed_stock_metadata()

    def write_draft(self, index: bytes | None, stock_metadata: bytes | None) -> Manifest:
        """Write index and stock metadata, and return the manifest to commit the copy with."""
        source, copy, save_id = self.source, self.copy, self.copy.attempt.save_id
        is_beside = self.route.source_root is self.route.target_root
        return replace(
            source,
            save_id=save_id,
            name=copy.target,
            step=parse_step(copy.target),
            package_version=__version__,
            objects=tuple(replace(entry, key=copy.rename(entry.key)) for entry in source.objects),
            index=_write(self.checkpoint, index_key(save_id), index),
            stock_metadata=_write(self.checkpoint, stock_metadata_key(save_id), stock_metadata),
            pinned=False,
            extra={
                **source.extra,
                "copied_from": f"{source.name if is_beside else self.origin.url} {source.save_id}",
            },
        )

    def _renamed_index(self) -> bytes | None:
        if (entry := self.source.index) is None:
            return None
        index = parse_index(self._read(entry), url=self.origin.url, key=entry.key)
        sizes = {each.key: each.size_bytes for each in self.source.objects}
        check_ranges(index, sizes, url=self.origin.url)
        objects = [self.copy.rename(key) for key in index.objects]
        return format_index(replace(index, save_id=self.copy.attempt.save_id, objects=objects))

    def _renamed_stock_metadata(self) -> bytes | None:
        if (entry := self.source.stock_metadata) is None:
            return None
        return self.copy.rename_in(self._read(entry), self.source)

    def _read(self, entry: ObjectEntry) -> bytes:
        try:
            return read_verified(self.origin, entry)
        except ObjectNotFoundError as error:
            raise self._gone(error) from error

    def _gone(self, error: ObjectNotFoundError) -> CheckpointError:
        """Say why an object of the source is missing: the source changed, or it is damaged."""
        newest = read_newest(self.origin)
        if newest is None or not newest.is_live or newest.manifest.save_id != self.source.save_id:
            return CheckpointChangedError(
                "the checkpoint was replaced or deleted while it was copied",
                url=self.origin.url,
                operation="copy",
            )
        return CheckpointDamagedError(
            f"an object that the checkpoint names is missing: {error.key}",
            url=self.origin.url,
            key=error.key,
            operation="copy",
        )


def _write(checkpoint: Store, key: str, data: bytes | None) -> ObjectEntry | None:
    if data is None:
        return None
    checkpoint.write(key, data)
    return ObjectEntry(key, len(data), crc32c(data))


# --- the end -----------------------------------------------------------------------------------------


def _commit(
    checkpoint: Store, draft: Manifest, copy: CopyAttempt, overwrite: bool, options: Options, waiting: Waiting
) -> Manifest:
    try:
        return commit_save(
            checkpoint,
            draft,
            attempt=copy.attempt,
            overwrite=overwrite,
            expected={},  # the draft names all that was written, and is compared with a listing
            # Never on top of anything newer: a tombstone there may name this attempt's keys.
            if_generation=copy.base_generation,
            options=options,
            waiting=waiting,
        )
    except (CheckpointChangedError, CheckpointExistsError, CheckpointPinnedError):
        # Another process may have taken up the same attempt and been faster.
        if (done := committed_copy(look(checkpoint), copy)) is None:
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
    delete_record(checkpoint, copy_record_key(manifest.save_id))
    return manifest


def _read_source(origin: Store) -> Manifest:
    newest = read_newest(origin)
    if newest is None or not newest.is_live:
        raise CheckpointNotFoundError(
            "there is no checkpoint with a manifest to copy", url=origin.url, operation="copy"
        )
    return newest.manifest
