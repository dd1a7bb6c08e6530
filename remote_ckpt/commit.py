"""Committing a save: check, create the next generation, and only then clean up what it replaced.

The order of writes and deletes is the promise (``docs/format.md``): data first, then the manifest by
create-only, then ``.metadata``, then the objects of the checkpoint that was replaced. A save that
failed for certain takes its own objects away; one whose outcome is unknown leaves everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from remote_ckpt.deletion import delete_superseded, is_closed, open_life
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointPinnedError,
    CommitUnknownError,
    ConfigError,
    ObjectNotFoundError,
    SaveFailedError,
    StoreError,
)
from remote_ckpt.generation import (
    DEFAULT_OPTIONS,
    REAL_TIME,
    Patience,
    Waiting,
    create_generation,
    highest_after,
)
from remote_ckpt.keys import STOCK_METADATA_NAME, new_save_id
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import Newest, Standing, look, look_at_top, named_keys, read_generation
from remote_ckpt.options import Options
from remote_ckpt.stock_metadata import publish_stock_metadata
from remote_ckpt.store.base import DeleteFailure, ObjectInfo, Store

_MAX_NAMED_KEYS = 5


@dataclass(frozen=True, slots=True)
class SaveAttempt:
    """One attempt to save: unique for ever, and void after its deadline.

    Args:
        save_id: Names the attempt in its objects and its manifest.
        began_at: When it began, by the store's clock (UTC).
        deadline: It never commits later than this, so that no sweep can have taken its objects.
    """

    save_id: str
    began_at: datetime
    deadline: datetime


def begin_save(checkpoint: Store, options: Options = DEFAULT_OPTIONS) -> SaveAttempt:
    """Begin an attempt by the store's clock; nothing is written yet."""
    began_at = checkpoint.clock()
    deadline = began_at + timedelta(seconds=options.commit.save_seconds)
    return SaveAttempt(new_save_id(), began_at, deadline)


def open_for_save(root: Store, name: str, *, overwrite: bool) -> Store:
    """Return the scope of a checkpoint that may be saved, its folder made where there are folders.

    A deletion that was interrupted on a local disk, and would take the folder away, is finished first.

    Raises:
        The errors of :func:`check_may_save` and :meth:`Store.scope`.
    """
    checkpoint, standing = open_life(root, name)
    try:
        check_may_replace(checkpoint, standing, overwrite=overwrite)
    except CheckpointError:
        checkpoint.close()
        raise
    return checkpoint


def check_may_save(checkpoint: Store, *, overwrite: bool) -> None:
    """Refuse early, before any data is written, what the commit would refuse in the end.

    Raises:
        CheckpointExistsError: A checkpoint stands here (stock and plain ones too), without ``overwrite``.
        CheckpointPinnedError: It is pinned.
        CheckpointChangedError: Local only: this folder is being deleted; open the name again.
        FormatError: What stands here is of a newer format.
        StoreError: The store failed.
    """
    check_may_replace(checkpoint, look(checkpoint), overwrite=overwrite)


def check_may_replace(checkpoint: Store, standing: Standing, *, overwrite: bool) -> None:
    """Refuse as :func:`check_may_save` does, by what was seen already."""
    if is_closed(checkpoint, standing) or not checkpoint.is_current():
        raise CheckpointChangedError(
            "the checkpoint's folder is being deleted", url=checkpoint.url, operation="save"
        )
    if not standing.is_live:
        return
    if standing.is_pinned:
        raise CheckpointPinnedError(
            "the checkpoint is pinned: unpin it before it is replaced", url=checkpoint.url, operation="save"
        )
    if not overwrite:
        what = "a damaged checkpoint" if standing.damage else f"a checkpoint (kind {standing.kind})"
        raise CheckpointExistsError(
            f"{what} exists already: save with overwrite=True to replace it, or under another name",
            url=checkpoint.url,
            operation="save",
        ) from standing.damage


def commit_save(
    checkpoint: Store,
    draft: Manifest,
    *,
    attempt: SaveAttempt,
    overwrite: bool,
    expected: Mapping[str, int],
    if_generation: int | None = None,
    options: Options = DEFAULT_OPTIONS,
    waiting: Waiting = REAL_TIME,
) -> Manifest:
    """Commit a save whose objects are all written. Called by one process.

    Args:
        draft: The manifest; its generation, save_id, times and ``superseded`` are filled in here.
        expected: Every key that the attempt wrote, with its size in bytes, as its ranks reported them.
        if_generation: Commit only on top of this generation (0: none), else CheckpointChangedError.

    Returns:
        The manifest as committed.

    Raises:
        SaveFailedError: An object is missing or has another size, the deadline passed, or the store
            refused the manifest. Nothing was committed.
        ConfigError: The manifest holds what the format cannot, or the store cannot create-only.
        CheckpointExistsError, CheckpointPinnedError, CheckpointChangedError: Another change of the
            checkpoint came first (see :func:`check_may_save`). This attempt is not the checkpoint.
        CommitUnknownError: It may be committed now or later. Nothing may be cleaned up.
        StoreError: The store failed before the manifest was sent. Nothing was committed.
    """
    patience = Patience(options, waiting)
    while True:
        standing = look(checkpoint)
        _check_objects(checkpoint, standing.infos, {**_sizes_in(draft), **expected})
        check_may_replace(checkpoint, standing, overwrite=overwrite)
        if if_generation is not None and standing.generation != if_generation:
            raise CheckpointChangedError(
                f"it has generation {standing.generation} now, {if_generation} was to be replaced",
                url=checkpoint.url,
                operation="commit",
            )
        wanted = _next_generation(checkpoint, draft, attempt, standing)
        manifest = _create(checkpoint, wanted, attempt, options, waiting)
        if manifest is not None:
            break
        if not patience.wait():
            raise SaveFailedError(
                "others kept changing the checkpoint", url=checkpoint.url, operation="commit"
            )
    _check_not_late(checkpoint, manifest, options, waiting)
    return manifest


def is_not_committed(error: BaseException) -> bool:
    """Whether an error of :func:`commit_save` proves that the attempt's objects are not needed.

    Anything else (unknown outcomes, an interrupt, a bug) must leave them to the sweep.
    """
    refusals = (CheckpointExistsError, CheckpointPinnedError, CheckpointChangedError, ConfigError)
    return isinstance(error, (SaveFailedError, *refusals))


def finish_replacement(
    checkpoint: Store, manifest: Manifest, stock_metadata: bytes | None = None
) -> Sequence[DeleteFailure]:
    """Publish ``.metadata`` and delete what a committed save replaced; never raises for the store's sake.

    Args:
        manifest: As :func:`commit_save` returned it.
        stock_metadata: The save's own DCP metadata, if it is at hand; else it is read.

    Returns:
        What could not be done, ``.metadata`` included; it was also logged. Keys that are left over
        stay on the list of what is to be deleted, so the next change or the sweep takes them.
    """
    known = {} if stock_metadata is None else {manifest.save_id: stock_metadata}
    try:
        newest = publish_stock_metadata(checkpoint, Newest(manifest.generation, manifest), known=known)
    except (StoreError, CheckpointError) as error:
        # Stock readers still see the replaced checkpoint through .metadata: leave them its data.
        failures: Sequence[DeleteFailure] = [DeleteFailure(STOCK_METADATA_NAME, error)]
    else:
        failures = delete_superseded(checkpoint, manifest.superseded, newest)
    for failure in failures:
        logger.warning("%s: cannot clean up %s: %s", checkpoint.url, failure.key, failure.error)
    return failures


def withdraw(checkpoint: Store, keys: Sequence[str], save_id: str | None = None) -> Sequence[DeleteFailure]:
    """Delete an attempt's own objects after a failure that :func:`is_not_committed` vouches for.

    Whatever the caller believes, nothing is deleted that the newest generation names, nor anything where
    that generation is the attempt's own. It is looked for by listing and, as a listing may be stale, by
    key above that.

    Args:
        keys: What the attempt may have written.
        save_id: The attempt.

    Returns:
        What could not be deleted, or was not because nobody knows whether it is needed.
    """
    try:
        newest = _newest_by_key(checkpoint)
    except (StoreError, CheckpointError) as error:
        return [DeleteFailure(key, error) for key in keys]
    if newest is not None and newest.is_live and newest.manifest.save_id == save_id:
        return [DeleteFailure(key, _stands(checkpoint)) for key in keys]
    return delete_superseded(checkpoint, keys, newest)


def _newest_by_key(checkpoint: Store) -> Newest | None:
    standing = look_at_top(checkpoint)
    if standing.damage is not None:
        raise standing.damage
    newest = None if standing.manifest is None else Newest(standing.generation, standing.manifest)
    generation = standing.generation + 1
    with suppress(ObjectNotFoundError):
        while True:
            newest = Newest(generation, read_generation(checkpoint, generation))
            generation += 1
    return newest


def _stands(checkpoint: Store) -> CheckpointError:
    return CheckpointExistsError(
        "this save is committed: its objects stay", url=checkpoint.url, operation="withdraw"
    )


def _sizes_in(draft: Manifest) -> dict[str, int]:
    entries = [*draft.objects, draft.index, draft.stock_metadata]
    return {entry.key: entry.size_bytes for entry in entries if entry is not None}


def _check_objects(checkpoint: Store, infos: Sequence[ObjectInfo], expected: Mapping[str, int]) -> None:
    sizes = {info.key: info.size_bytes for info in infos}
    problems = [
        f"{key} is missing" if key not in sizes else f"{key} has {sizes[key]} bytes instead of {size_bytes}"
        for key, size_bytes in sorted(expected.items())
        if sizes.get(key) != size_bytes
    ]
    if problems:
        more = f" and {len(problems) - _MAX_NAMED_KEYS} more" if len(problems) > _MAX_NAMED_KEYS else ""
        raise SaveFailedError(
            f"objects of this save are not as written: {'; '.join(problems[:_MAX_NAMED_KEYS])}{more}",
            url=checkpoint.url,
            operation="commit",
        )


def _next_generation(
    checkpoint: Store, draft: Manifest, attempt: SaveAttempt, standing: Standing
) -> Manifest:
    now = checkpoint.clock()
    if now > attempt.deadline:
        raise SaveFailedError(
            f"the save began at {attempt.began_at:%F %T} and had to commit until {attempt.deadline:%F %T} "
            f"(the store's clock): a sweep may have taken its objects since",
            url=checkpoint.url,
            operation="commit",
        )
    own = named_keys(draft)
    return replace(
        draft,
        generation=standing.generation + 1,
        save_id=attempt.save_id,
        state="live",
        created_at=now,
        committed_at=now,
        superseded=tuple(key for key in standing.superseded_keys if key not in own),
    )


def _create(
    checkpoint: Store, manifest: Manifest, attempt: SaveAttempt, options: Options, waiting: Waiting
) -> Manifest | None:
    try:
        return create_generation(
            checkpoint,
            manifest,
            is_save=True,
            not_after=attempt.deadline,
            options=options,
            waiting=waiting,
        )
    except StoreError as error:
        raise SaveFailedError(
            f"the store refused the manifest: {error}", url=checkpoint.url, operation="commit"
        ) from error


def _check_not_late(checkpoint: Store, manifest: Manifest, options: Options, waiting: Waiting) -> None:
    top = highest_after(checkpoint, manifest.generation, options=options, waiting=waiting)
    if top > manifest.generation and not _is_built_upon(checkpoint, manifest, top):
        raise CheckpointExistsError(
            f"this save created generation {manifest.generation} of the checkpoint too late to count: "
            f"generation {top} was there before",
            url=checkpoint.url,
            operation="commit",
        )


def _is_built_upon(checkpoint: Store, manifest: Manifest, top: int) -> bool:
    """Whether the next generation knew this one, so that this one was the checkpoint for a while."""
    try:
        successor = read_generation(checkpoint, manifest.generation + 1)
    except (StoreError, CheckpointError) as error:
        if isinstance(error, ObjectNotFoundError) and top > manifest.generation + 1:
            return False  # swept, as only generations are that were superseded long ago
        raise CommitUnknownError(
            "the manifest was created, but a later one that may have come first cannot be read",
            url=checkpoint.url,
            operation="commit",
        ) from error
    if successor.save_id == manifest.save_id:
        return True
    return not named_keys(manifest).isdisjoint(successor.superseded)
