"""A run's directory: which checkpoints it holds, which stay, and copies to keep. Without torch.

None of these functions talks to other ranks: call them on one rank (or on several: deleting what another
rank has just deleted is no error). They do what DINOv3's checkpointer does under the same names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_ckpt.copies import copy_checkpoint
from remote_ckpt.discover import find_checkpoints, find_latest, resolve
from remote_ckpt.log import logger
from remote_ckpt.options import Options
from remote_ckpt.place import place_of
from remote_ckpt.pruning import prune
from remote_ckpt.resumed import names_in_use
from remote_ckpt.retention import (
    Candidate,
    CheckpointRetentionPolicy,
    RetentionPlan,
    plan_cleanup,
    plan_keep_last,
)
from remote_ckpt.stock_copies import copy_stock_checkpoint
from remote_ckpt.url import parse_location

if TYPE_CHECKING:
    from upath import UPath

    CheckpointPath = str | os.PathLike[str] | UPath

__all__ = [
    "cleanup_checkpoint",
    "find_all_checkpoints",
    "find_latest_checkpoint",
    "keep_checkpoint_copy",
    "keep_last_n_checkpoints",
]


def find_all_checkpoints(
    ckpt_dir: CheckpointPath,
    *,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
) -> list[Path | UPath]:
    """Return the committed checkpoints whose name is a step, by number.

    Ours, stock DCP ones and plain ones (a folder with ``checkpoint.pth``) count; half-made, deleted and
    damaged ones do not, the last with a warning. Asks the store each time. Calls no collective.

    Args:
        ckpt_dir: The run's directory, such as ``"s3://bucket/run/ckpt"``; it may not exist yet.
        storage_options: As in :class:`~remote_ckpt.dcp.writer.RemoteStorageWriter`.
        transport: As there.
        options: Retries and deadlines.

    Returns:
        ``Path`` objects for a local directory, else ``UPath`` objects that carry the options.

    Raises:
        ConfigError: A URL or an option that cannot be used.
        StoreError: The store failed, which never counts as "no checkpoint".
    """
    place = place_of(ckpt_dir, storage_options=storage_options, transport=transport, options=options)
    with place.opened() as root:
        entries = [entry for entry in find_checkpoints(root) if entry.step is not None]
    for entry in entries:
        if entry.error is not None:
            logger.warning("%s: passing over the damaged checkpoint %s", place.location.url, entry.name)
    return [place.path_of(entry.name) for entry in entries if entry.error is None]


def find_latest_checkpoint(
    ckpt_dir: CheckpointPath,
    *,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
) -> Path | UPath | None:
    """Return the committed checkpoint with the highest step, or None where a listing shows none.

    Takes a few requests, however many checkpoints there are. Arguments and errors as
    :func:`find_all_checkpoints`. Calls no collective.
    """
    place = place_of(ckpt_dir, storage_options=storage_options, transport=transport, options=options)
    with place.opened() as root:
        latest = find_latest(root)
    return None if latest is None else place.path_of(latest.name)


def keep_last_n_checkpoints(
    ckpt_dir: CheckpointPath,
    n: int | None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
) -> None:
    """Delete all steps but the ``n`` highest.

    Never deleted are: the newest and the last committed checkpoint, pinned ones, the one that this process
    resumed from until it has committed another step here, anything not named by a number (``best``,
    ``199_keep``), saves in progress, and what is not recognised. A checkpoint that cannot be deleted is
    logged, and training goes on; so does one of which the store does not say within seconds whether it is
    deleted. Calls no collective.

    Args:
        ckpt_dir: The run's directory.
        n: How many to keep, at least 1; None and -1 keep all.
        storage_options: As in :func:`find_all_checkpoints`.
        transport: As there.
        options: As there.

    Raises:
        ConfigError: ``n`` is 0, below -1, or no integer.
        StoreError: The listing failed; nothing was deleted.
    """
    place = place_of(ckpt_dir, storage_options=storage_options, transport=transport, options=options)
    protected = names_in_use(place.location)

    def plan(candidates: list[Candidate]) -> RetentionPlan:
        return plan_keep_last(candidates, n, protected=protected)

    plan([])  # a wrong n is an error before anything is asked of the store
    if n is None or n == -1:
        return
    with place.opened() as root:
        prune(root, plan, options=place.options, is_hasty=True)


def cleanup_checkpoint(
    ckpt_dir: CheckpointPath,
    checkpoint_retention_policy: CheckpointRetentionPolicy,
    *,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
) -> None:
    """Delete what a policy does not keep, at the end of a run; only pins bind this order.

    ``LAST`` keeps ``final`` (or the newest step, where no ``final`` was written), ``BEST`` keeps ``best``,
    ``ALL`` everything, ``NONE`` nothing. Folders that hold no checkpoint are left alone. Calls no collective.

    Args:
        ckpt_dir: The run's directory; it may not exist.
        checkpoint_retention_policy: What stays.
        storage_options: As in :func:`find_all_checkpoints`.
        transport: As there.
        options: As there.

    Raises:
        StoreError, CheckpointError: Some could not be deleted, the others were.
    """
    place = place_of(ckpt_dir, storage_options=storage_options, transport=transport, options=options)
    policy = CheckpointRetentionPolicy(checkpoint_retention_policy)
    with place.opened() as root:
        report = prune(
            root,
            lambda candidates: plan_cleanup(candidates, policy),
            options=place.options,
            is_automatic=False,
        )
    for failure in report.failures:
        raise failure.error


def keep_checkpoint_copy(
    src: CheckpointPath,
    *,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
) -> Path | UPath:
    """Copy a checkpoint to ``<name>_keep`` beside it, which no automatic retention deletes.

    Hard links on a local disk, server-side copies on a store: no bytes come through this process. An older
    copy of that name is replaced. A copy that was interrupted is taken up again. Calls no collective.

    Stock DCP and plain checkpoints are copied as they are, on a local disk byte by byte, and without a
    manifest: an older copy of one is gone before the new one is whole.

    Args:
        src: The checkpoint.
        storage_options: As in :func:`find_all_checkpoints`.
        transport: As there.
        options: As there.

    Returns:
        The copy's path.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CheckpointDamagedError, FormatError: It cannot be read.
        CheckpointPinnedError: The older copy is pinned.
        CheckpointExistsError: A stock checkpoint cannot take the place of one with a manifest.
        StoreError: The store failed; nothing was committed.
    """
    parent, name = parse_location(src).split()
    place = place_of(parent, storage_options=storage_options, transport=transport, options=options)
    target = f"{name}_keep"
    with place.opened() as root:
        copy = copy_checkpoint if resolve(root, name).generation else copy_stock_checkpoint
        copy(root, name, target, overwrite=True, options=place.options)
    logger.info("copied %s to %s", parent.join(name).url, target)
    return place.path_of(target)
