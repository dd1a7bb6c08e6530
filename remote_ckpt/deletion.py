"""Deleting a checkpoint: hide it first, by a tombstone generation, and only then remove its objects.

The tombstone is created like any other generation, so a pin or a replacement that came first wins.
It names the exact keys that it makes superfluous; whoever comes next after a crash goes on with it.

A tombstone stays: it keeps the number taken, so nothing slow can hit a newer life of the name. On a
local disk the whole folder is moved aside and emptied instead. That would take along a generation
created in the last moment, so a tombstone there *closes* its folder: nobody builds on it, and the
next save first finishes the removal and then begins in a new folder. Where a save seems to be in
progress in the folder, or files that are not ours lie there, the tombstone does not close it.

Stock DCP checkpoints and plain ones have no manifest and get no tombstone: ``.metadata`` goes first
and then the files that belong to the checkpoint. Files that we do not recognise are never deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from remote_ckpt._version import __version__
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    ObjectNotFoundError,
    StorageFullError,
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
from remote_ckpt.keys import STOCK_METADATA_NAME, is_token, new_save_id, own_key
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import Newest, Standing, is_as_named, look, named_keys, read_newest, stock_keys
from remote_ckpt.options import Options
from remote_ckpt.stock_metadata import publish_stock_metadata
from remote_ckpt.store.base import DeleteFailure, Store
from remote_ckpt.url import parse_step

CLOSES_FOLDER = "closes_folder"
"""Field of a tombstone on a local disk: the deletion ends with the removal of the whole folder."""

_MAX_LIVES = 4


def delete_checkpoint(
    checkpoint: Store,
    *,
    if_generation: int | None = None,
    if_save_id: str | None = None,
    if_idle: bool = False,
    options: Options = DEFAULT_OPTIONS,
    waiting: Waiting = REAL_TIME,
) -> None:
    """Delete a checkpoint, or finish a deletion that was interrupted. Called by one process.

    Args:
        if_generation: Delete only if this still is the newest generation: what a plan was made from.
        if_save_id: Delete only if the name still has this life (:attr:`.newest.Standing.save_id`): on a local
            disk a name that was deleted and saved again begins with generation 1 again.
        if_idle: Delete only if no save seems to be in progress here: no object that a generation does not
            name came after the last commit, within ``options.commit.grace_seconds``. What was there before is
            of a save that was killed, as a rule, and this step saved again since: it stays for the sweep.

    Raises:
        CheckpointNotFoundError: Nothing that we recognise stands here.
        CheckpointPinnedError: It is pinned.
        CheckpointChangedError: It is not what was planned, was saved anew meanwhile, or is not idle.
        CommitUnknownError: Whether it is deleted could not be found out; nothing was removed.
        StoreError: The store failed. If it names keys, the checkpoint is gone for every reader, and
            another call removes what is left.
    """
    patience = Patience(options, waiting)
    while True:
        standing = look(checkpoint)
        if standing.manifest is not None and not standing.is_live:
            return finish_deletion(checkpoint, standing.manifest, options=options)
        _check_may_delete(checkpoint, standing, if_generation, if_save_id)
        if if_idle and _is_busy(checkpoint, standing, options, since=_last_commit(standing)):
            raise _changed(checkpoint, "a save of it seems to be in progress")
        if not standing.generation:
            return _delete_stock(checkpoint, standing, options)
        try:
            wanted = _tombstone(checkpoint, standing, options)
            tombstone = create_generation(checkpoint, wanted, options=options, waiting=waiting)
        except StorageFullError:
            if _remove_without_tombstone(checkpoint, standing, options):
                return
            raise
        if tombstone is not None:
            break
        if not patience.wait():
            raise _changed(checkpoint, "others kept changing the checkpoint")
    _check_not_late(checkpoint, tombstone, options, waiting)
    finish_deletion(checkpoint, tombstone, options=options)


def finish_deletion(checkpoint: Store, tombstone: Manifest, *, options: Options = DEFAULT_OPTIONS) -> None:
    """Remove what a tombstone names, and on a local disk the folder; errors as :func:`delete_checkpoint`."""
    try:
        _remove_objects(checkpoint, tombstone, options)
    except (StoreError, CheckpointChangedError):
        if checkpoint.is_current():
            raise
        # Somebody else finished the same deletion and took the folder away.


def open_life(root: Store, name: str) -> tuple[Store, Standing]:
    """Return the scope of a checkpoint to save into, made where missing, never a closed folder.

    With it comes what stands there.

    Raises:
        CheckpointChangedError: The folder was deleted again and again.
        CheckpointExistsError: Local only: a file stands there.
        StoreError: The store failed, or an interrupted deletion could not be finished.
    """
    for _ in range(_MAX_LIVES):
        checkpoint = root.scope(name, create=True)
        standing = look(checkpoint)
        if standing.manifest is None or not is_closed(checkpoint, standing):
            return checkpoint, standing
        finish_deletion(checkpoint, standing.manifest)
        if checkpoint.is_current():
            _reopen(checkpoint, standing.manifest)
        checkpoint.close()
    raise _changed(root, f"{name} was deleted {_MAX_LIVES} times while it was opened")


def is_closed(checkpoint: Store, standing: Standing) -> bool:
    """Whether a tombstone said that this folder is going to be taken away: nobody builds on it."""
    is_deleted = standing.manifest is not None and not standing.is_live
    return is_deleted and checkpoint.capabilities.has_folders and _closes(standing.manifest)


def delete_superseded(
    checkpoint: Store, keys: Sequence[str], newest: Newest | None
) -> Sequence[DeleteFailure]:
    """Delete ``keys`` except those that the newest generation needs; returns what could not be deleted.

    A stock file that others have written anew since that generation was committed stays, too.
    """
    needed = named_keys(newest.manifest) if newest is not None and newest.is_live else frozenset()
    unneeded = [key for key in keys if key not in needed]
    failures: tuple[DeleteFailure, ...] = ()
    if newest is not None and (doubtful := [key for key in unneeded if not own_key(key)]):
        unneeded = [key for key in unneeded if own_key(key)]
        try:
            unneeded += _as_named(checkpoint, doubtful, newest)
        except StoreError as error:
            failures = tuple(DeleteFailure(key, error) for key in doubtful)
    if not unneeded:
        return failures
    try:
        return (*failures, *checkpoint.delete(unneeded))
    except StoreError as error:
        return (*failures, *(DeleteFailure(key, error) for key in unneeded))


def _as_named(checkpoint: Store, keys: Sequence[str], newest: Newest) -> list[str]:
    """Return those of some stock files, right in the checkpoint's folder, that its lists mean."""
    infos = {info.key: info for info in checkpoint.list_children("").objects}
    return [key for key in keys if key in infos and is_as_named(infos[key], newest.manifest)]


# --- deciding ----------------------------------------------------------------------------------------


def _check_may_delete(
    checkpoint: Store, standing: Standing, if_generation: int | None, if_save_id: str | None
) -> None:
    if standing.kind is None:
        raise CheckpointNotFoundError("no checkpoint here", url=checkpoint.url, operation="delete")
    if standing.is_pinned:
        raise CheckpointPinnedError(
            "the checkpoint is pinned: unpin it before it is deleted", url=checkpoint.url, operation="delete"
        )
    if if_generation is not None and if_generation != standing.generation:
        raise _changed(
            checkpoint, f"it has generation {standing.generation} now, {if_generation} was to be deleted"
        )
    if if_save_id is not None and if_save_id != standing.save_id:
        raise _changed(checkpoint, f"it was saved anew: {standing.save_id} is here, not {if_save_id}")


def _is_busy(
    checkpoint: Store, standing: Standing, options: Options, *, since: datetime | None = None
) -> bool:
    """Whether a save or copy seems to be in progress, judged by what came after ``since``."""
    times = [info.modified_at for info in standing.unnamed if since is None or info.modified_at > since]
    grace = timedelta(seconds=options.commit.grace_seconds)
    return bool(times) and checkpoint.clock() - max(times) < grace


def _last_commit(standing: Standing) -> datetime | None:
    return None if standing.manifest is None else standing.manifest.committed_at


def _is_ours_alone(checkpoint: Store, standing: Standing, options: Options) -> bool:
    """Whether a local folder may go as a whole."""
    own = standing.superseded_keys
    if any(not own_key(info.key) and info.key not in own for info in standing.infos):
        return False
    # A file that is being written has a hidden name, so its folder looks empty.
    filled = {info.key.partition("/")[0] for info in standing.infos}
    is_begun = any(is_token(name) and name not in filled for name in checkpoint.list_children("").prefixes)
    return not is_begun and not _is_busy(checkpoint, standing, options)


def _tombstone(checkpoint: Store, standing: Standing, options: Options) -> Manifest:
    below = standing.manifest or _nameless(checkpoint)
    closes = checkpoint.capabilities.has_folders and _is_ours_alone(checkpoint, standing, options)
    return replace(
        below,
        generation=standing.generation + 1,
        state="deleted",
        created_at=checkpoint.clock(),
        package_version=__version__,
        total_bytes=0,
        objects=(),
        index=None,
        stock_metadata=None,
        pinned=False,
        superseded=standing.superseded_keys,
        extra={**_without_mark(below), **({CLOSES_FOLDER: True} if closes else {})},
    )


def _nameless(checkpoint: Store) -> Manifest:
    """A manifest to start a tombstone from, where none can be read."""
    now = checkpoint.clock()
    name = checkpoint.url.rstrip("/").rpartition("/")[2]
    return Manifest(
        generation=1,
        save_id=new_save_id(),
        state="deleted",
        name=name,
        step=parse_step(name),
        created_at=now,
        committed_at=now,
        world_size=1,
        package_version=__version__,
        total_bytes=0,
        content_digest="",
    )


def _check_not_late(checkpoint: Store, tombstone: Manifest, options: Options, waiting: Waiting) -> None:
    top = highest_after(checkpoint, tombstone.generation, options=options, waiting=waiting)
    if top == tombstone.generation:
        return
    newest = read_newest(checkpoint)
    if newest is not None and newest.is_live:
        raise _changed(checkpoint, "it was saved anew while it was deleted; the new one stays")


# --- removing ----------------------------------------------------------------------------------------


def _remove_objects(checkpoint: Store, tombstone: Manifest, options: Options) -> None:
    newest = publish_stock_metadata(checkpoint, Newest(tombstone.generation, tombstone))
    _raise_failures(checkpoint, delete_superseded(checkpoint, tombstone.superseded, newest))
    if _closes(tombstone):
        _remove_folder(checkpoint, tombstone, options)


def _remove_folder(checkpoint: Store, tombstone: Manifest, options: Options) -> None:
    """Take the folder away, unless it holds what is not ours, a save in progress or a later generation."""
    standing = look(checkpoint)
    if standing.generation == tombstone.generation and _is_ours_alone(checkpoint, standing, options):
        checkpoint.remove_folder()


def _remove_without_tombstone(checkpoint: Store, planned: Standing, options: Options) -> bool:
    """On a full disk: move the folder aside, which takes no space, and empty it there.

    What was planned is checked again just before. A pin or save that comes in between needs the space
    that a tombstone did not get.
    """
    if not checkpoint.capabilities.has_folders:
        return False
    standing = look(checkpoint)
    _check_may_delete(checkpoint, standing, planned.generation, planned.save_id)
    if not _is_ours_alone(checkpoint, standing, options):
        return False
    return checkpoint.is_current() and checkpoint.remove_folder()


def _reopen(checkpoint: Store, tombstone: Manifest) -> None:
    """Say that a folder which cannot be taken away (a link, no locks, other people's files) stays in use."""
    again = replace(
        tombstone,
        generation=tombstone.generation + 1,
        created_at=checkpoint.clock(),
        superseded=(),
        extra=_without_mark(tombstone),
    )
    create_generation(checkpoint, again)  # where another was first, it said the same or saved


def _delete_stock(checkpoint: Store, standing: Standing, options: Options) -> None:
    keys = stock_keys(standing.infos, standing.kind)
    if standing.kind == "dcp":
        _raise_failures(checkpoint, checkpoint.delete([STOCK_METADATA_NAME]))
    _raise_failures(checkpoint, delete_superseded(checkpoint, keys, None))
    if (newest := read_newest(checkpoint)) is not None:
        publish_stock_metadata(checkpoint, newest)  # a save came in between: give it its .metadata back
    elif checkpoint.capabilities.has_folders:
        _remove_empty_folder(checkpoint, options)


def _remove_empty_folder(checkpoint: Store, options: Options) -> None:
    standing = look(checkpoint)
    if standing.infos or not _is_ours_alone(checkpoint, standing, options):
        return
    try:
        wanted = replace(_nameless(checkpoint), extra={CLOSES_FOLDER: True})
        tombstone = create_generation(checkpoint, wanted, options=options)
    except StorageFullError:
        checkpoint.remove_folder()
        return
    if tombstone is not None:
        finish_deletion(checkpoint, tombstone, options=options)


def _raise_failures(checkpoint: Store, failures: Sequence[DeleteFailure]) -> None:
    failures = [failure for failure in failures if not isinstance(failure.error, ObjectNotFoundError)]
    if failures:
        details = "; ".join(f"{failure.key}: {failure.error}" for failure in failures)
        raise StoreError(
            f"the checkpoint is deleted for readers, but {len(failures)} of its objects could not be removed "
            f"(delete it again to finish): {details}",
            url=checkpoint.url,
            key=failures[0].key,
            operation="delete",
        ) from failures[0].error


def _closes(manifest: Manifest | None) -> bool:
    return manifest is not None and manifest.extra.get(CLOSES_FOLDER) is True


def _without_mark(manifest: Manifest) -> dict[str, object]:
    return {name: value for name, value in manifest.extra.items() if name != CLOSES_FOLDER}


def _changed(store: Store, message: str) -> CheckpointChangedError:
    return CheckpointChangedError(message, url=store.url, operation="delete")
