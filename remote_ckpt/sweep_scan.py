"""Looking for garbage, and refusing to believe what is doubtful.

A listing that lacks a manifest makes the newest checkpoint look like garbage. So each name is listed twice,
flat and by level; both must show the same manifests. Where there is garbage, what the listings may lack is
asked for by its key, as an answer by key says more than any listing: the manifest that would follow; where
none is listed, ``.metadata`` and the first 32, since earlier sweeps removed the lowest ones. Beyond that,
only ``.metadata`` tells. Nothing is removed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import TypeVar

from remote_ckpt.copy_attempt import stock_copy_sizes
from remote_ckpt.deletion import is_closed
from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    FormatError,
    MissingDependencyError,
    ObjectNotFoundError,
    StoreError,
    SweepRefusedError,
    UnsupportedStoreError,
)
from remote_ckpt.keys import STOCK_METADATA_NAME, is_token, manifest_key, own_key
from remote_ckpt.manifest import FORMAT_NAME
from remote_ckpt.newest import Newest, Standing, list_generations, look
from remote_ckpt.store.base import Leftover, Listing, Store
from remote_ckpt.sweep_links import is_link, linked_folders
from remote_ckpt.sweep_plan import (
    Garbage,
    Scene,
    has_own_names,
    parse_owner,
    plan_checkpoint,
    plan_leftovers,
    plan_root,
)
from remote_ckpt.url import is_name, listing_order, parse_step

T = TypeVar("T")
R = TypeVar("R")

_MAX_THREADS = 16
_MAX_LOOKS = 3
_MAX_NAMED_KEYS = 3
_MAX_ASKED = 32
_MAX_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a sweep was told.

    Args:
        before: Only what changed last before this is old enough (the store's clock).
        tombstones: Marks of deleted checkpoints go too.
    """

    before: datetime
    tombstones: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """What there is to remove of one name.

    Args:
        name: The checkpoint's name.
        newest: Its newest generation; None where it has no manifest.
        garbage: In the order of removal.
        warning: Why it is left alone, if it is.
    """

    name: str
    newest: Newest | None = None
    garbage: tuple[Garbage, ...] = ()
    warning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a scan of a run's directory found.

    Args:
        checkpoints: Names with garbage.
        in_root: Garbage right in the root.
        leftovers: What is no object, each with the garbage that it is.
        warnings: What was passed over, and why.
    """

    checkpoints: tuple[CheckpointPlan, ...]
    in_root: tuple[Garbage, ...]
    leftovers: tuple[tuple[Garbage, Leftover], ...]
    warnings: tuple[str, ...]

    @property
    def garbage(self) -> tuple[Garbage, ...]:
        """All of it: by checkpoint, then what lies in the root and what is no object."""
        below = [each for plan in self.checkpoints for each in plan.garbage]
        return (*below, *self.in_root, *(each for each, _ in self.leftovers))


def read_clock(root: Store) -> datetime:
    """Return the store's time, if it is within five minutes of this host's; else raise SweepRefusedError."""
    before = datetime.now(timezone.utc)
    now = root.clock()
    after = datetime.now(timezone.utc)
    skew = max(before - now, now - after)
    if skew > _MAX_SKEW:
        raise SweepRefusedError(
            f"the clocks of this host ({after:%F %T} UTC) and of the store ({now:%F %T} UTC) are "
            f"{skew.total_seconds() / 60:.0f} minutes apart, so ages mean nothing: set the wrong one right",
            url=root.url,
            operation="sweep",
        )
    return now


def scan(root: Store, terms: Terms) -> Findings:
    """Look at all names below ``root``, up to 16 at once; removes nothing.

    Takes one request for a folder that holds nothing of ours, three for a checkpoint, one more for one with
    garbage, 33 more if that has no manifest. Errors as :func:`.sweep.sweep`.
    """
    listing = _list_root(root)
    names = sorted(filter(is_name, listing.prefixes), key=listing_order)
    plans = in_threads(lambda name: _scan_name(root, name, terms), names)
    skipped = [plan.name for plan in plans if plan.warning]
    found, warning = _list_leftovers(root)
    return Findings(
        checkpoints=tuple(plan for plan in plans if plan.garbage),
        in_root=plan_root(listing.objects, before=terms.before),
        leftovers=plan_leftovers(found, before=terms.before, except_in=skipped),
        warnings=tuple(text for text in (*(plan.warning for plan in plans), warning) if text),
    )


def look_at(checkpoint: Store, name: str, terms: Terms) -> CheckpointPlan:
    """Look at one name until two listings agree; one that lacks what it needs is left alone.

    Raises:
        SweepRefusedError: They do not, or the newest manifest cannot be read.
        CheckpointChangedError: Local only: the folder was removed.
        StoreError: The store failed.
    """
    for _ in range(_MAX_LOOKS):
        plan, doubt = _look_once(checkpoint, name, terms)
        if doubt is None:
            return plan
    if plan.warning is not None:
        return plan
    raise SweepRefusedError(
        f"checkpoint {name}: {doubt}; is somebody changing it all the time, or is the store's listing wrong?",
        url=checkpoint.url,
        step=name,
        operation="sweep",
    )


def in_threads(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call for all items, up to 16 at once; the first failure is raised when those that had begun ended."""
    if not items:
        return []
    with ThreadPoolExecutor(min(_MAX_THREADS, len(items)), thread_name_prefix="sweep") as pool:
        return list(pool.map(call, items))


# --- the root ----------------------------------------------------------------------------------------


def _list_root(root: Store) -> Listing:
    """List the directory, and again where another listing shows more: the first save may just have begun."""
    for _ in range(_MAX_LOOKS):
        listing = root.list_children("")
        if listing.prefixes:
            return listing
        owners = (parse_owner(info.key) for info in root.list(""))
        if (name := next((owner for owner in owners if owner is not None), None)) is None:
            return listing
    raise SweepRefusedError(
        f"one listing of the directory shows nothing below it, another shows checkpoint {name}",
        url=root.url,
        step=name,
        operation="sweep",
    )


def _list_leftovers(root: Store) -> tuple[list[Leftover], str | None]:
    """Return leftovers, or why they were not looked at: objects can be swept all the same."""
    try:
        return list(root.list_leftovers()), None
    except (MissingDependencyError, UnsupportedStoreError, AccessDeniedError) as error:
        reason = str(error)
    except StoreError as error:
        if type(error) is not StoreError:  # else it was refused for no reason that we know: not implemented
            raise
        reason = str(error)
    return [], f"open uploads and temporary files were not looked at: {reason}"


def _scan_name(root: Store, name: str, terms: Terms) -> CheckpointPlan:
    try:
        return _scan_folder(root, name, terms)
    except CheckpointNotFoundError:
        return CheckpointPlan(name=name)  # a folder that was removed after the listing
    except AccessDeniedError as error:
        if parse_step(name) is not None:
            raise
        return CheckpointPlan(name=name, warning=f"passing over {name}, which may not be read: {error}")


def _scan_folder(root: Store, name: str, terms: Terms) -> CheckpointPlan:
    """Look at one name, again where its folder was replaced meanwhile."""
    for _ in range(_MAX_LOOKS):
        with closing(root.scope(name)) as checkpoint:
            if is_link(root, checkpoint, name):
                return CheckpointPlan(name=name)
            try:
                plan = look_at(checkpoint, name, terms)
            except CheckpointChangedError:
                continue
            if checkpoint.is_current():
                return plan
    return CheckpointPlan(name=name, warning=f"passing over {name}, which others keep changing")


# --- one name ----------------------------------------------------------------------------------------


def _look_once(checkpoint: Store, name: str, terms: Terms) -> tuple[CheckpointPlan, str | None]:
    """Return the plan, and what is doubtful about what it was made from."""
    level = checkpoint.list_children("")
    if not has_own_names((info.key for info in level.objects), level.prefixes):
        return CheckpointPlan(name=name), None
    standing = _read(checkpoint, name)
    if standing.damage is not None and not _is_foreign(checkpoint, level, standing):
        raise _damaged(checkpoint, name, standing.damage) from standing.damage
    if list_generations(level.objects) != list_generations(standing.infos):
        return CheckpointPlan(name=name), "two listings of it show different manifests"
    if standing.damage is not None:
        text = f"passing over {name}, whose {manifest_key(standing.generation)} is not ours"
        return CheckpointPlan(name=name, warning=text), None
    scene = _scene(checkpoint, name, level, standing)
    # Mostly damage; but a save may have been committed, or a copy finished, while it was listed.
    reason = _reason_to_pass(scene)
    garbage = () if reason else _plan(checkpoint, scene, terms)
    if (reason or garbage) and (key := _find_unlisted(checkpoint, standing)) is not None:
        return CheckpointPlan(name=name), f"its listing lacks {key}, which can be read"
    plan = CheckpointPlan(
        name=name,
        newest=None if standing.manifest is None else Newest(standing.generation, standing.manifest),
        garbage=garbage,
        warning=f"passing over checkpoint {name}: {reason}" if reason else None,
    )
    return plan, reason


def _plan(checkpoint: Store, scene: Scene, terms: Terms) -> tuple[Garbage, ...]:
    """Plan, and again without what lies behind links: it belongs to others."""
    garbage = plan_checkpoint(scene, before=terms.before, tombstones=terms.tombstones)
    linked = linked_folders(checkpoint, (each.key.removeprefix(f"{scene.name}/") for each in garbage))
    if not linked:
        return garbage
    return plan_checkpoint(
        replace(scene, linked_folders=linked), before=terms.before, tombstones=terms.tombstones
    )


def _read(checkpoint: Store, name: str) -> Standing:
    try:
        standing = look(checkpoint)
    except FormatError as error:
        raise SweepRefusedError(
            f"checkpoint {name} is of a newer format, so nobody here knows what it needs: sweep with the "
            f"version that wrote it ({error})",
            url=checkpoint.url,
            step=name,
            operation="sweep",
        ) from error
    return standing


def _is_foreign(checkpoint: Store, level: Listing, standing: Standing) -> bool:
    """Whether an unreadable manifest is a file of others: it does not claim to be ours, and is alone."""
    keys = {info.key for info in (*level.objects, *standing.infos)}
    if [key for key in keys if own_key(key)] != [manifest_key(standing.generation)]:
        return False
    return not any(map(is_token, level.prefixes)) and not _claims_our_format(checkpoint, standing.generation)


def _claims_our_format(checkpoint: Store, generation: int) -> bool:
    try:
        # Anywhere: of a damaged one nobody knows where it says so. A cut one may not say it at all.
        data = checkpoint.read(manifest_key(generation))
        return FORMAT_NAME.encode() in data or not isinstance(json.loads(data), dict)
    except (ObjectNotFoundError, ValueError, RecursionError):
        return True


def _damaged(checkpoint: Store, name: str, damage: CheckpointDamagedError) -> SweepRefusedError:
    return SweepRefusedError(
        f"the newest manifest of checkpoint {name} cannot be read, so nobody knows what it needs: look at "
        f"it, delete the checkpoint or bring the manifest back, then sweep again ({damage})",
        url=checkpoint.url,
        step=name,
        operation="sweep",
    )


def _scene(checkpoint: Store, name: str, level: Listing, standing: Standing) -> Scene:
    return Scene(
        name=name,
        standing=standing,
        # Elsewhere an empty one says nothing: SeaweedFS goes on listing it when its last object is gone.
        folder_names=level.prefixes if checkpoint.capabilities.has_folders else (),
        is_closed=is_closed(checkpoint, standing),
        copy_records=dict(stock_copy_sizes(checkpoint, standing)) if standing.kind is None else {},
        stock_metadata=_stock_metadata(checkpoint) if standing.kind == "dcp" else b"",
    )


def _stock_metadata(checkpoint: Store) -> bytes:
    try:
        return checkpoint.read(STOCK_METADATA_NAME)
    except ObjectNotFoundError as error:
        raise CheckpointChangedError(
            "the checkpoint was deleted while it was looked at", url=checkpoint.url
        ) from error


def _find_unlisted(checkpoint: Store, standing: Standing) -> str | None:
    """Return a key that makes this a checkpoint, which the listing lacks and which can be read."""
    listed = {info.key for info in standing.infos}
    keys = (key for key in _keys_to_ask(standing.generation) if key not in listed)
    return next((key for key in keys if _is_there(checkpoint, key)), None)


def _keys_to_ask(generation: int) -> Sequence[str]:
    if generation:
        return (manifest_key(generation + 1),)
    return (*(manifest_key(number) for number in range(1, _MAX_ASKED + 1)), STOCK_METADATA_NAME)


def _is_there(checkpoint: Store, key: str) -> bool:
    try:
        checkpoint.read(key)
    except ObjectNotFoundError:
        return False
    return True


def _reason_to_pass(scene: Scene) -> str | None:
    if scene.is_without_manifest:
        return "its .metadata leads to objects of ours, and no manifest says which ones it needs"
    if missing := scene.missing_keys:
        more = f" and {len(missing) - _MAX_NAMED_KEYS} more" if len(missing) > _MAX_NAMED_KEYS else ""
        return f"it needs {', '.join(missing[:_MAX_NAMED_KEYS])}{more}, which are not listed: verify it"
    return None
