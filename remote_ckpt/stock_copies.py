"""Copying a checkpoint that is not ours: stock DCP's, or a plain ``checkpoint.pth``.

There is no manifest to commit the copy with. The file that makes a folder a checkpoint comes last, so an
interrupted copy is none; and where an older copy is replaced, it is gone before the new one is there.

On a local disk the bytes are copied. Hard links would not do: stock writers truncate files in place, and
so would change the copy together with its source.

The copy is written down in the target before it begins, with names, sizes and times of the source's files.
A copy that was interrupted goes on while the source is still the same. Its keys are those of the source, not
its own as in :mod:`remote_ckpt.copies`: nobody else may write to the target's name until it is done. What
an interrupted copy left is removed by the next one to that name, or by the sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from remote_ckpt.commit import check_may_replace
from remote_ckpt.copy_attempt import (
    STOCK_FILES,
    check_apart,
    check_names,
    delete_record,
    read_records,
    write_record,
)
from remote_ckpt.deletion import open_life
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    IntegrityError,
    ObjectNotFoundError,
    SaveFailedError,
    StoreError,
)
from remote_ckpt.generation import DEFAULT_OPTIONS
from remote_ckpt.keys import copy_record_key, new_save_id
from remote_ckpt.moves import Move, Mover, begin_progress
from remote_ckpt.newest import Standing, look, stock_files, stock_keys
from remote_ckpt.options import Options
from remote_ckpt.progress import OnProgress, ProgressCounter
from remote_ckpt.routes import Route, choose_mover, route_within
from remote_ckpt.store.base import ObjectInfo, Store
from remote_ckpt.streams import StreamMover


def copy_stock_checkpoint(
    root: Store,
    source: str,
    target: str,
    *,
    overwrite: bool = False,
    options: Options = DEFAULT_OPTIONS,
    on_progress: OnProgress | None = None,
) -> None:
    """Copy a stock DCP or plain checkpoint to the name ``target`` beside it, file by file.

    Arguments and errors as :func:`copy_stock_along`.
    """
    route = route_within(root, source, target)
    copy_stock_along(route, overwrite=overwrite, options=options, on_progress=on_progress)


def copy_stock_along(
    route: Route,
    *,
    overwrite: bool = False,
    options: Options = DEFAULT_OPTIONS,
    on_progress: OnProgress | None = None,
) -> None:
    """Copy a stock DCP or plain checkpoint along a route, file by file. Called by one process.

    Only files that belong to such a checkpoint are copied, empty ones left out: no store of ours takes them.

    Args:
        route: From where to where.
        overwrite: Replace a stock or plain checkpoint of the target's name.
        options: Of the target: parallel transfers and their budget. An interrupted copy is taken up again
            until ``options.commit.save_seconds`` after it began. Of what is there, only names, sizes and
            times are compared: nothing tells the checksums of such files.
        on_progress: Told of each advance.

    Raises:
        CheckpointNotFoundError: There is no such source.
        CheckpointExistsError: The target exists, and either ``overwrite`` is false or it has (or had) a
            manifest, above which a checkpoint without one cannot be seen.
        CheckpointChangedError: Source or target changed meanwhile; call again.
        ConfigError: Source and target are the same checkpoint.
        SaveFailedError: A file is not there as it was copied; the copy is not a checkpoint.
        StoreError: A store failed; the copy is not a checkpoint yet.
    """
    check_names(route)
    with ExitStack() as scopes:
        origin = scopes.enter_context(closing(route.source_root.scope(route.source)))
        planned = _look_at_source(origin)
        checkpoint, standing = open_life(route.target_root, route.target)
        scopes.callback(checkpoint.close)
        check_may_replace(checkpoint, standing, overwrite=overwrite)
        check_can_be_seen(checkpoint, standing)
        record = {"source": origin.url, STOCK_FILES: _describe(planned)}
        attempt = _resume(checkpoint, standing, record, options) or _begin(checkpoint, record)
        check_apart(origin, checkpoint, attempt.record_key)
        if attempt.began_at is None:
            _clear(checkpoint, standing)
        _Job(route, origin, checkpoint, planned, attempt, options).run(standing, on_progress)
        delete_record(checkpoint, attempt.record_key)


# --- the attempt -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Where a copy is written down, and when it began if it is taken up again."""

    record_key: str
    began_at: datetime | None = None

    def has_copied(self, info: ObjectInfo) -> bool:
        """Whether a file of the target came after the beginning; what was there before is an older copy's."""
        return self.began_at is not None and info.modified_at > self.began_at


def _describe(planned: Standing) -> dict[str, list[Any]]:
    return {
        key: [info.size_bytes, info.modified_at.isoformat()] for key, info in sorted(_files(planned).items())
    }


def _begin(checkpoint: Store, record: dict[str, Any]) -> _Attempt:
    save_id = new_save_id()
    write_record(checkpoint, save_id, record)
    return _Attempt(copy_record_key(save_id))


def _resume(
    checkpoint: Store, standing: Standing, record: dict[str, Any], options: Options
) -> _Attempt | None:
    if standing.kind is not None:
        return None
    oldest = checkpoint.clock() - timedelta(seconds=options.commit.save_seconds)
    for info, found in read_records(checkpoint, standing):
        if found == record and info.modified_at > oldest:
            return _Attempt(info.key, info.modified_at)
    return None


def _clear(checkpoint: Store, standing: Standing) -> None:
    """Remove an older copy, the file that makes it one first, and what interrupted ones left."""
    older = [*reversed(_files(standing))]
    records = {info.key: found.get(STOCK_FILES) for info, found in read_records(checkpoint, standing)}
    named = {key for found in records.values() if isinstance(found, dict) for key in found}
    left = named.intersection(stock_keys(standing.infos, "dcp")).difference(older)
    stale = [key for key, found in records.items() if found is not None]
    for batch in (older[:1], [*older[1:], *sorted(left)], stale):
        for failure in checkpoint.delete(batch) if batch else ():
            raise StoreError(
                f"the older copy cannot be removed: {failure.error}", url=checkpoint.url, key=failure.key
            ) from failure.error


# --- files -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """One copy at work: its two ends, open, and what is copied, as which attempt."""

    route: Route
    origin: Store
    checkpoint: Store
    planned: Standing
    attempt: _Attempt
    options: Options

    def run(self, standing: Standing, on_progress: OnProgress | None) -> None:
        """Copy the data, look whether it is there, and only then copy what makes it a checkpoint."""
        *data, mark = [_move(info) for info in _files(self.planned).values()]
        data = [move for move in data if move.size_bytes]
        there = {info.key: info.size_bytes for info in standing.infos if self.attempt.has_copied(info)}
        missing = [move for move in data if there.get(move.target_key) != move.size_bytes]
        counter = begin_progress([*data, mark], [*missing, mark], on_progress)
        try:
            self._data_mover().move(missing, counter)
            self._check_target(data)
            self._move_mark(mark, counter)
        except (IntegrityError, ObjectNotFoundError):
            self._check_source()
            raise
        if not self.checkpoint.is_current():
            raise self._changed("the copy was deleted while it was made")

    def _data_mover(self) -> Mover:
        # Never a hard link: see above.
        is_local = self.checkpoint.capabilities.has_folders
        route = replace(self.route, shared=None) if is_local else self.route
        return choose_mover(route, self.origin, self.checkpoint, self.options.transfer)

    def _move_mark(self, mark: Move, counter: ProgressCounter) -> None:
        """Copy the last file. Of DCP's, nothing that was read after the source changed ever gets its name."""
        mover = self._data_mover()
        self._check_source()
        if self.planned.kind == "dcp" or isinstance(mover, StreamMover):
            mover = StreamMover(
                self.origin, self.checkpoint, self.options.transfer, before_end=self._check_source
            )
        mover.move([mark], counter)
        if self.checkpoint.info(mark.target_key).size_bytes != mark.size_bytes:
            raise self._changed("the last file is not the one that was copied")

    def _check_source(self) -> None:
        now = look(self.origin)
        if now.generation or _files(now) != _files(self.planned) or not self.origin.is_current():
            raise CheckpointChangedError(
                "the checkpoint was written anew while it was copied", url=self.origin.url, operation="copy"
            )

    def _check_target(self, data: Sequence[Move]) -> None:
        sizes = {info.key: info.size_bytes for info in self.checkpoint.list()}
        if self.attempt.record_key not in sizes:
            raise self._changed("another copy to this name began")
        wrong = [move.target_key for move in data if sizes.get(move.target_key) != move.size_bytes]
        if wrong:
            raise SaveFailedError(
                f"{len(wrong)} files are not there as they were copied, such as {wrong[0]}",
                url=self.checkpoint.url,
                key=wrong[0],
                operation="copy",
            )

    def _changed(self, message: str) -> CheckpointChangedError:
        return CheckpointChangedError(message, url=self.checkpoint.url, operation="copy")


def _move(info: ObjectInfo) -> Move:
    return Move(info.key, info.key, info.size_bytes)


def _look_at_source(origin: Store) -> Standing:
    standing = look(origin)
    if standing.generation or standing.kind is None:
        raise CheckpointNotFoundError(
            "there is no stock or plain checkpoint to copy", url=origin.url, operation="copy"
        )
    return standing


def check_can_be_seen(checkpoint: Store, standing: Standing) -> None:
    if standing.generation:
        raise CheckpointExistsError(
            "a checkpoint with a manifest stands here, or did: a stock one cannot take its place",
            url=checkpoint.url,
            operation="copy",
        )


def _files(standing: Standing) -> dict[str, ObjectInfo]:
    """The files of a stock or plain checkpoint by key, the one that makes it a checkpoint last."""
    infos = {info.key: info for info in standing.infos}
    return {key: infos[key] for key in stock_files(standing)}
