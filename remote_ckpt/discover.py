"""Which checkpoints a run's directory holds. Absence is said only after listings that succeeded.

Half-made checkpoints, deleted ones, and everything with a name or content that we do not recognise
are passed over. A damaged checkpoint is shown as such; any failure of the store is raised, but for one:
a folder that may not be read and is not named by a step (``logs``) is passed over with a warning, since
nothing says that it is a checkpoint. Asking for it by name raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime

from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    RemoteCkptError,
)
from remote_ckpt.keys import STOCK_METADATA_NAME
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import CheckpointKind, Standing, look_at_top, stock_files
from remote_ckpt.store.base import Store
from remote_ckpt.url import check_name, is_name, listing_order, parse_step

_MAX_THREADS = 16
_MAX_LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One checkpoint of a run's directory.

    Args:
        name: Its name below the root.
        step: The number that the name spells; None for a named checkpoint.
        kind: ``"remote_ckpt"``, ``"dcp"`` (stock) or ``"plain"`` (``checkpoint.pth``).
        generation: The newest generation; 0 for stock and plain ones.
        manifest: The newest manifest; None for stock, plain and damaged ones.
        save_id: Which life of the name it is: :attr:`.newest.Standing.save_id`.
        committed_at: When the data was committed; of stock and plain ones, the store's time of the file that
            makes them a checkpoint. None for damaged ones.
        total_bytes: Size of the data objects, of stock and plain ones of all their files; 0 for damaged ones.
        formats: Who can read it: ``"remote_ckpt"``, ``"dcp"`` (stock readers, ours included where their
            ``.metadata`` is there), ``"plain"``.
        error: Why the newest manifest cannot be read.
    """

    name: str
    step: int | None
    kind: CheckpointKind
    generation: int = 0
    manifest: Manifest | None = None
    save_id: str | None = None
    committed_at: datetime | None = None
    total_bytes: int = 0
    formats: tuple[str, ...] = ()
    error: CheckpointError | None = None


def find_checkpoints(root: Store) -> list[CheckpointEntry]:
    """Return all checkpoints below ``root``: steps by number, then named ones by name.

    Takes one listing, and two requests for each child, up to 16 at once.

    Raises:
        StoreError: A request failed; but a name that is no step and may not be read is passed over.
    """
    names = _list_names(root)
    if not names:
        return []
    return [entry for entry in _find_all(root, names) if entry is not None]


def _find_all(root: Store, names: Sequence[str]) -> list[CheckpointEntry | None]:
    try:
        with ThreadPoolExecutor(min(_MAX_THREADS, len(names)), thread_name_prefix="discover") as pool:
            return list(pool.map(lambda name: _find_readable(root, name), names))
    except RuntimeError as error:
        if isinstance(error, RemoteCkptError):
            raise
        # A program that ends starts no more threads, but the retention after its last save is to be done.
        return [_find_readable(root, name) for name in names]


def find_latest(
    root: Store, *, is_sound: Callable[[CheckpointEntry], bool] | None = None
) -> CheckpointEntry | None:
    """Return the highest step that is committed and readable, or None where there is none.

    Looks from the highest step downward: three requests where that one is sound, plus one for each
    half-made or deleted step above it. A damaged one is passed over with a warning. One of a newer format is
    not: a run whose package was rolled back must not go on from old work unasked.

    Args:
        is_sound: A further test; what fails it is passed over.

    Raises:
        CheckpointDamagedError: There are steps, and all of them are damaged.
        FormatError: The highest step was written in a format that this version does not read.
        StoreError: Any request failed.
    """
    steps = [name for name in _list_names(root) if parse_step(name) is not None]
    damage: CheckpointError | None = None
    for name in reversed(steps):
        entry = _find(root, name)
        if entry is not None and entry.error is None:
            if is_sound is None or is_sound(entry):
                return entry
            continue
        if entry is not None and isinstance(entry.error, FormatError):
            raise entry.error
        if entry is not None:
            logger.warning("%s: passing over the damaged checkpoint %s: %s", root.url, name, entry.error)
            damage = damage or entry.error
    if damage is not None:
        raise damage  # to begin anew where checkpoints lie, if damaged ones, is for a person to decide
    return None


def resolve(root: Store, name: str) -> CheckpointEntry:
    """Return the checkpoint of that name.

    Raises:
        CheckpointNotFoundError: There is none, established by a listing that succeeded.
        CheckpointDamagedError, FormatError: It is there, and its newest manifest cannot be read.
        StoreError: The store failed.
    """
    entry = _find(root, check_name(name))
    if entry is None:
        raise CheckpointNotFoundError(
            f"no committed checkpoint {name!r} in {root.url}", url=root.url, step=name, operation="find"
        )
    if entry.error is not None:
        raise entry.error
    return entry


def _list_names(root: Store) -> list[str]:
    names = [name for name in root.list_children("").prefixes if is_name(name)]
    return sorted(names, key=listing_order)


def _find_readable(root: Store, name: str) -> CheckpointEntry | None:
    try:
        return _find(root, name)
    except AccessDeniedError as error:
        if parse_step(name) is not None:
            raise
        logger.warning("%s: passing over %s, which may not be read: %s", root.url, name, error)
        return None


def _find(root: Store, name: str) -> CheckpointEntry | None:
    try:
        standing = _look_at(root, name)
    except CheckpointNotFoundError:
        return None  # a folder that was removed after the listing
    except FormatError as error:
        return CheckpointEntry(name=name, step=parse_step(name), kind="remote_ckpt", error=error)
    return _entry(name, standing)


def _look_at(root: Store, name: str) -> Standing:
    """Look at one checkpoint and release its handle; again where its folder was replaced meanwhile."""
    for _ in range(_MAX_LOOKS):
        with closing(root.scope(name)) as checkpoint, suppress(CheckpointChangedError):
            standing = look_at_top(checkpoint)
            if checkpoint.is_current():
                return standing
    raise CheckpointChangedError(
        f"the checkpoint changed {_MAX_LOOKS} times while it was looked at", url=root.url, step=name
    )


def _entry(name: str, standing: Standing) -> CheckpointEntry | None:
    if standing.kind is None or not standing.is_live:
        return None
    damage: CheckpointDamagedError | None = standing.damage
    manifest = None if damage else standing.manifest
    files = {info.key: info for info in standing.infos}
    stock = [files[key] for key in stock_files(standing)]
    entry = CheckpointEntry(
        name=name,
        step=parse_step(name),
        kind=standing.kind,
        generation=standing.generation,
        manifest=manifest,
        save_id=standing.save_id,
        formats=(standing.kind, "dcp") if _is_readable_by_stock(standing) else (standing.kind,),
        error=damage,
    )
    if manifest is not None:
        return replace(entry, committed_at=manifest.committed_at, total_bytes=manifest.total_bytes)
    if stock:
        total_bytes = sum(info.size_bytes for info in stock)
        return replace(entry, committed_at=stock[-1].modified_at, total_bytes=total_bytes)
    return entry


def _is_readable_by_stock(standing: Standing) -> bool:
    has_metadata = any(info.key == STOCK_METADATA_NAME for info in standing.infos)
    return standing.generation > 0 and standing.damage is None and has_metadata
