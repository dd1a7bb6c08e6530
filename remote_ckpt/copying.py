"""Copying one checkpoint from one place to another: within a directory, within a store, between stores.

Where the store can, it copies by itself: two directories of one bucket are both below the bucket, two of one
disk below a common folder. That needs one set of credentials for both. Else the bytes stream through this
process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import takewhile
from typing import Any

from remote_ckpt.commit import check_may_replace
from remote_ckpt.copies import copy_along
from remote_ckpt.copy_attempt import check_names
from remote_ckpt.errors import CheckpointNotFoundError, ConfigError, RemoteCkptError
from remote_ckpt.log import logger
from remote_ckpt.newest import look, read_newest
from remote_ckpt.place import Place
from remote_ckpt.progress import OnProgress
from remote_ckpt.routes import Route, Shared, route_within
from remote_ckpt.stock_copies import check_can_be_seen, copy_stock_along
from remote_ckpt.store.base import Store
from remote_ckpt.store.folders import is_hidden, nearest_folder
from remote_ckpt.url import check_name


def copy_across(
    source: Place,
    name: str,
    target: Place,
    target_name: str,
    *,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> None:
    """Copy a checkpoint to another place, or to another name. Called by one process.

    Hard links on one disk, server-side copies in one bucket, else a stream through this process: several
    objects at once within ``target.options.transfer.budget_bytes``, each checked against its checksum on the
    way. Names and sizes of the copied objects are compared with a listing before the copy is committed. It
    has a save_id and keys of its own, carries metrics and user metadata, and is not pinned.

    A copy that failed or was interrupted is taken up again by the next call, which copies nothing again that
    is there already, until ``target.options.commit.save_seconds`` after it began: a longer copy needs a
    longer deadline.

    Stock DCP and plain checkpoints are copied file by file, without a manifest: see
    :mod:`remote_ckpt.stock_copies`.

    Args:
        source: The directory that holds the checkpoint.
        name: The checkpoint.
        target: The directory that gets the copy; made where it is missing.
        target_name: The copy's name.
        overwrite: Replace a checkpoint of that name, unless it is pinned.
        on_progress: Told of each advance, from worker threads.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CheckpointDamagedError, FormatError: It cannot be read, or lacks an object.
        IntegrityError: An object is not what was saved; names it.
        CheckpointChangedError: Source or target changed meanwhile; call again.
        CheckpointExistsError, CheckpointPinnedError: The target exists, and may not be replaced.
        UnsupportedStoreError: The target's store does not create objects only if absent.
        ConfigError: Source and target are the same checkpoint, or one lies inside the other.
        SaveFailedError: Objects are not there as copied, or the deadline passed; nothing was committed.
        CommitUnknownError: The store never said whether the copy is committed.
        StoreError: A store failed; nothing was committed.
    """
    check_name(name)
    check_name(target_name)
    with ExitStack() as stores:
        source_root = stores.enter_context(source.opened())
        target_root = stores.enter_context(target.opened())
        route = _plan_route(source, source_root, name, target, target_root, target_name, stores)
        how = "streaming" if route.shared is None else "inside the store"
        logger.info("copying %s/%s to %s/%s, %s", source_root.url, name, target_root.url, target_name, how)
        copy = copy_along if _has_manifest(source_root, name) else copy_stock_along
        copy(route, overwrite=overwrite, options=target.options, on_progress=on_progress)


def check_copy(source: Place, name: str, target: Place, target_name: str, *, overwrite: bool = False) -> None:
    """Refuse what :func:`copy_across` would refuse before it moves data; nothing is written.

    Raises:
        CheckpointExistsError, CheckpointPinnedError, ConfigError, StoreError: As :func:`copy_across`.
    """
    check_name(name)
    check_name(target_name)
    with ExitStack() as stores:
        source_root = stores.enter_context(source.opened())
        target_root = stores.enter_context(target.opened())
        check_names(Route(source_root, name, target_root, target_name))
        if _is_one_store(source, source_root, target, target_root):
            _check_apart(_path(source, name), _path(target, target_name), url=target_root.url)
        try:
            checkpoint = stores.enter_context(closing(target_root.scope(target_name)))
        except CheckpointNotFoundError:
            return  # a local disk, and no folder of that name
        standing = look(checkpoint)
        if standing.is_live:  # a deletion that was interrupted is finished by the copy
            check_may_replace(checkpoint, standing, overwrite=overwrite)
        if not _has_manifest(source_root, name):
            check_can_be_seen(checkpoint, standing)


_Path = Sequence[str]
"""The parts of a checkpoint's path in its store."""


def _has_manifest(root: Store, name: str) -> bool:
    with closing(root.scope(name)) as checkpoint:
        return read_newest(checkpoint) is not None


def _plan_route(
    source: Place,
    source_root: Store,
    name: str,
    target: Place,
    target_root: Store,
    target_name: str,
    stores: ExitStack,
) -> Route:
    """Return the way to take; a store that it needs beside the two is closed with ``stores``."""
    apart = Route(source_root, name, target_root, target_name)
    if not _is_one_store(source, source_root, target, target_root):
        return apart
    paths = _path(source, name), _path(target, target_name)
    _check_apart(*paths, url=target_root.url)
    if not _may_share(source, target, paths):
        return apart
    if paths[0][:-1] == paths[1][:-1]:
        return route_within(target_root, name, target_name)
    return replace(apart, shared=_find_shared(target, target_root, paths, stores))


def _is_one_store(source: Place, source_root: Store, target: Place, target_root: Store) -> bool:
    if source.location.is_local or target.location.is_local:
        return source.location.is_local and target.location.is_local
    return source_root.identity == target_root.identity


def _path(place: Place, name: str) -> _Path:
    path = place.location.join(name).path
    return (os.path.realpath(path) if place.location.is_local else path).strip("/").split("/")


def _check_apart(source: _Path, target: _Path, *, url: str) -> None:
    count = min(len(source), len(target))
    if source == target:
        raise ConfigError(f"cannot copy checkpoint {source[-1]!r} onto itself", url=url, operation="copy")
    if source[:count] == target[:count]:
        raise ConfigError(
            f"cannot copy {'/'.join(source)} to {'/'.join(target)}: one lies inside the other",
            url=url,
            operation="copy",
        )


def _may_share(source: Place, target: Place, paths: tuple[_Path, _Path]) -> bool:
    """Whether both are on one file system, or reached with the same options."""
    if target.location.is_local:
        devices = {_device(path) for path in paths}
        return len(devices) == 1 and None not in devices
    return _access(source) == _access(target)


def _access(place: Place) -> dict[str, Any]:
    return {**place.location.options, **(place.storage_options or {})}


def _device(path: _Path) -> int | None:
    """The file system of a local path that may not exist yet; None where that cannot be told."""
    try:
        return os.stat(nearest_folder("/" + "/".join(path))).st_dev
    except (OSError, RemoteCkptError):
        return None


def _find_shared(
    target: Place, target_root: Store, paths: tuple[_Path, _Path], stores: ExitStack
) -> Shared | None:
    """Open the store at the nearest place above both, if it can copy by itself."""
    is_local = target.location.is_local
    common = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(paths[0], paths[1], strict=False))]
    below = [path[len(common) :] for path in paths]
    if is_local and any(is_hidden(part) for path in below for part in path):
        return None  # names that a local store keeps for itself
    location = replace(target.location, path="/" * is_local + "/".join(common))
    store = stores.enter_context(replace(target, location=location).opened())
    if not store.capabilities.server_side_copy or not (is_local or store.identity == target_root.identity):
        return None
    return Shared(store, "/".join(below[0]), "/".join(below[1]))
