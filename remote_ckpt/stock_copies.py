"""Copying a checkpoint that is not ours: stock DCP's, or a plain ``checkpoint.pth``.

There is no manifest to commit the copy with. The file that makes a folder a checkpoint comes last, so an
interrupted copy is none; and where an older copy is replaced, it is gone before the new one is there.

On a local disk the bytes are copied. Hard links would not do: stock writers truncate files in place, and
so would change the copy together with its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

from remote_ckpt.commit import check_may_replace
from remote_ckpt.copies import run_all
from remote_ckpt.deletion import open_life
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    StoreError,
)
from remote_ckpt.generation import DEFAULT_OPTIONS
from remote_ckpt.newest import Standing, look, stock_files
from remote_ckpt.options import MiB, Options
from remote_ckpt.store.base import Buffer, ObjectInfo, Store
from remote_ckpt.url import check_name

_CHUNK_BYTES = 8 * MiB


def copy_stock_checkpoint(
    root: Store, source: str, target: str, *, overwrite: bool = False, options: Options = DEFAULT_OPTIONS
) -> None:
    """Copy a stock DCP or plain checkpoint to the name ``target``, file by file. Called by one process.

    Only files that belong to such a checkpoint are copied.

    Args:
        overwrite: Replace a stock or plain checkpoint of that name.

    Raises:
        CheckpointNotFoundError: There is no such ``source``.
        CheckpointExistsError: ``target`` exists, and either ``overwrite`` is false or it has (or had) a
            manifest, above which a checkpoint without one cannot be seen.
        CheckpointChangedError: Source or target changed meanwhile; call again.
        StoreError: The store failed; the copy is not a checkpoint yet.
    """
    if check_name(source) == check_name(target):
        raise ConfigError(f"cannot copy checkpoint {source!r} onto itself", url=root.url)
    with ExitStack() as scopes:
        origin = scopes.enter_context(closing(root.scope(source)))
        planned = _look_at_source(origin)
        checkpoint, standing = open_life(root, target)
        scopes.callback(checkpoint.close)
        check_may_replace(checkpoint, standing, overwrite=overwrite)
        _check_can_be_seen(checkpoint, standing)
        *data, mark = _files(planned).values()
        _delete(checkpoint, [*reversed(_files(standing))])
        copy_one = partial(_copy, root, origin, checkpoint, (source, target))
        # No store of ours takes empty objects, and nothing can be read from one.
        run_all(
            copy_one, [info for info in data if info.size_bytes], concurrency=options.transfer.concurrency
        )
        _check_unchanged(origin, planned)
        copy_one(mark)
        if not checkpoint.is_current():
            raise CheckpointChangedError(
                "the copy was deleted while it was made", url=checkpoint.url, operation="copy"
            )


def _look_at_source(origin: Store) -> Standing:
    standing = look(origin)
    if standing.generation or standing.kind is None:
        raise CheckpointNotFoundError(
            "there is no stock or plain checkpoint to copy", url=origin.url, operation="copy"
        )
    return standing


def _check_can_be_seen(checkpoint: Store, standing: Standing) -> None:
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


def _delete(checkpoint: Store, keys: list[str]) -> None:
    for batch in (keys[:1], keys[1:]):
        for failure in checkpoint.delete(batch):
            raise StoreError(
                f"the older copy cannot be removed: {failure.error}", url=checkpoint.url, key=failure.key
            ) from failure.error


def _copy(root: Store, origin: Store, checkpoint: Store, names: tuple[str, str], info: ObjectInfo) -> None:
    if checkpoint.capabilities.has_folders:
        checkpoint.write_stream(
            info.key,
            lambda: _chunks(origin, info),
            size_bytes=info.size_bytes,
            part_bytes=_CHUNK_BYTES,
            concurrency=1,
        )
    else:
        root.copy(f"{names[0]}/{info.key}", f"{names[1]}/{info.key}")


def _chunks(origin: Store, info: ObjectInfo) -> Iterator[Buffer]:
    for offset in range(0, info.size_bytes, _CHUNK_BYTES):
        yield origin.read_range(info.key, offset, min(_CHUNK_BYTES, info.size_bytes - offset))


def _check_unchanged(origin: Store, planned: Standing) -> None:
    now = look(origin)
    if now.generation or _files(now) != _files(planned) or not origin.is_current():
        raise CheckpointChangedError(
            "the checkpoint was written anew while it was copied", url=origin.url, operation="copy"
        )
