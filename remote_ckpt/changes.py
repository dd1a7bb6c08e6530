"""Changing what a checkpoint says about itself: pins, metrics, user metadata.

Each change is a new generation that carries on everything the last one said, the keys that are
still to be deleted included. Whoever was second looks again and decides again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from remote_ckpt._version import __version__
from remote_ckpt.errors import CheckpointChangedError, CheckpointNotFoundError
from remote_ckpt.generation import (
    DEFAULT_OPTIONS,
    REAL_TIME,
    Patience,
    Waiting,
    create_generation,
    highest_after,
)
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import Newest, look_at_top, read_newest
from remote_ckpt.options import Options
from remote_ckpt.store.base import Store


def set_pinned(
    checkpoint: Store,
    is_pinned: bool,
    *,
    if_save_id: str | None = None,
    options: Options = DEFAULT_OPTIONS,
    waiting: Waiting = REAL_TIME,
) -> Manifest:
    """Pin a checkpoint, so that it is neither replaced nor deleted, or unpin it.

    Where the newest generation is damaged and the one below says "pinned", unpinning goes on from that one,
    as replacing and deleting would: it brings its state back, and if data is missing then, loading says so.

    Args:
        is_pinned: Whether it is to be pinned.
        if_save_id: Change only this life of the name.

    Returns:
        The newest generation, which says so; no new one is made where it said so already.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of ours (stock ones have no manifest to pin).
        CheckpointDamagedError: Its newest generation cannot be read, and this is not an unpinning.
        FormatError: Its newest generation is of a newer format.
        CheckpointChangedError: It was deleted meanwhile, changed again and again, or is not ``if_save_id``.
        CommitUnknownError: Whether it is pinned could not be found out.
        StoreError: The store failed or refused; nothing changed.
    """
    read = _read_live if is_pinned else _read_pinned
    return _change(
        checkpoint, read, lambda manifest: replace(manifest, pinned=is_pinned), if_save_id, options, waiting
    )


def annotate(
    checkpoint: Store,
    *,
    metrics: Mapping[str, float] | None = None,
    user_metadata: Mapping[str, Any] | None = None,
    if_save_id: str | None = None,
    options: Options = DEFAULT_OPTIONS,
    waiting: Waiting = REAL_TIME,
) -> Manifest:
    """Add metrics or user metadata to a checkpoint, for example after an evaluation.

    Names that it has already get the new value, all others stay. Returns and raises as :func:`set_pinned`;
    ConfigError for values that a manifest cannot hold.
    """

    def edit(manifest: Manifest) -> Manifest:
        return replace(
            manifest,
            metrics={**manifest.metrics, **(metrics or {})},
            user_metadata={**manifest.user_metadata, **(user_metadata or {})},
        )

    return _change(checkpoint, _read_live, edit, if_save_id, options, waiting)


def _change(
    checkpoint: Store,
    read: Callable[[Store], Newest],
    edit: Callable[[Manifest], Manifest],
    if_save_id: str | None,
    options: Options,
    waiting: Waiting,
) -> Manifest:
    patience = Patience(options, waiting)
    while True:
        current = read(checkpoint)
        if if_save_id is not None and if_save_id != current.manifest.save_id:
            raise CheckpointChangedError(
                f"it was saved anew: {current.manifest.save_id} is here, not {if_save_id}",
                url=checkpoint.url,
                operation="change",
            )
        edited = edit(current.manifest)
        if edited == current.manifest:
            return edited
        edited = replace(
            edited,
            generation=current.generation + 1,
            created_at=checkpoint.clock(),
            package_version=__version__,
        )
        # A higher generation may have come first, without what this one says: look and decide again.
        created = create_generation(checkpoint, edited, options=options, waiting=waiting)
        if created is not None and (
            highest_after(checkpoint, created.generation, options=options, waiting=waiting)
            == created.generation
        ):
            return created
        if not patience.wait():
            raise CheckpointChangedError(
                "others kept changing the checkpoint", url=checkpoint.url, operation="change"
            )


def _read_live(checkpoint: Store) -> Newest:
    newest = read_newest(checkpoint)
    if newest is None or not newest.is_live:
        raise CheckpointNotFoundError(
            "there is no checkpoint with a manifest here", url=checkpoint.url, operation="change"
        )
    return newest


def _read_pinned(checkpoint: Store) -> Newest:
    """Like :func:`_read_live`; of a damaged checkpoint, what is left that says "pinned"."""
    standing = look_at_top(checkpoint)
    if standing.damage is None or standing.manifest is None or not standing.is_pinned:
        return _read_live(checkpoint)
    return Newest(standing.generation, standing.manifest)
