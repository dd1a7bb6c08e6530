"""Creating one generation of a manifest, and finding out for certain what became of it.

A create-only PUT has three outcomes. After a conflict, a time-out or a lost answer the store is
asked what stands there: our own bytes mean that we won, another's that we lost. Nothing there does
not mean that we lost: the request may still be on its way (through a proxy, say) and land later.
So the identical PUT is sent again until one of them is decided, or the deadline passes.

Absence in a listing proves nothing here: listings may lag behind, or be wrong. A generation that was
created and is not listed leaves the outcome open, so nothing is cleaned up.
"""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from remote_ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointChangedError,
    CheckpointError,
    CommitUnknownError,
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageFullError,
    StoreError,
    StoreUnavailableError,
)
from remote_ckpt.keys import manifest_key
from remote_ckpt.manifest import Manifest, format_manifest, parse_manifest
from remote_ckpt.newest import list_generations
from remote_ckpt.options import Options
from remote_ckpt.store.base import Store

_REFUSALS = (AccessDeniedError, BucketNotFoundError, StorageFullError, ConfigError)
_OPEN_OUTCOMES = (StoreUnavailableError, ObjectExistsError, ObjectNotFoundError)
_SHORTEST_WAIT_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Waiting:
    """How time passes while an outcome is undecided; tests put their own in.

    Args:
        monotonic: Seconds of a clock that never goes back.
        sleep: Waits for so many seconds.
        jitter: A random number in [0, 1), which keeps competitors apart.
    """

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random


DEFAULT_OPTIONS = Options()
REAL_TIME = Waiting()


class Patience:
    """Back-off with full jitter up to the commit deadline."""

    def __init__(self, options: Options, waiting: Waiting) -> None:
        self._options = options
        self._waiting = waiting
        self._ends_at = waiting.monotonic() + options.commit.commit_seconds
        self._tries = 0

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed: a request that is begun now would only make it later."""
        return self._waiting.monotonic() >= self._ends_at

    def wait(self) -> bool:
        """Wait before another try; returns false, at once, where the deadline would pass."""
        retry = self._options.retry
        longest = min(retry.max_seconds, retry.initial_seconds * 2.0 ** min(self._tries, 30))
        delay = max(_SHORTEST_WAIT_SECONDS, longest * self._waiting.jitter())
        self._tries += 1
        if self._waiting.monotonic() + delay > self._ends_at:
            return False
        self._waiting.sleep(delay)
        return True


def create_generation(
    checkpoint: Store,
    manifest: Manifest,
    *,
    is_save: bool = False,
    not_after: datetime | None = None,
    options: Options = DEFAULT_OPTIONS,
    waiting: Waiting = REAL_TIME,
) -> bool:
    """Create a generation; returns true where it is ours, false where another has taken the number.

    Args:
        manifest: Written to the key of its generation.
        is_save: It commits an attempt, so the attempt's save_id tells whose it is. Pins and tombstones
            carry the save_id of what they change: there only equal bytes tell.
        not_after: A PUT is not repeated after this time of the store's clock.

    Raises:
        StoreError, ConfigError: A clean refusal (no right, no space, a request that the store does not
            take), with nothing in doubt from a try before; nothing was created.
        CheckpointChangedError: Local only: the folder was taken away; nothing was created in the newer one.
        CommitUnknownError: Not decided before the deadline; it may exist now or later.
    """
    key, data = manifest_key(manifest.generation), format_manifest(manifest)
    save_id = manifest.save_id if is_save else None
    patience = Patience(options, waiting)
    is_in_doubt = False
    while True:
        try:
            checkpoint.create(key, data)
            return True
        except (StoreError, ConfigError) as error:
            cause = error
        found = _Found.UNKNOWN if patience.is_over else _read_back(checkpoint, key, data, save_id)
        if found in (_Found.OURS, _Found.ANOTHERS):
            return found is _Found.OURS
        if _is_refusal(cause, found) and not is_in_doubt:
            raise cause
        is_in_doubt = is_in_doubt or not _is_refusal(cause, found)
        if patience.is_over:
            raise _unknown(checkpoint, key) from cause
        if _is_gone(checkpoint):
            raise _changed(checkpoint) from cause
        if not patience.wait() or _is_past(checkpoint, not_after):
            raise _unknown(checkpoint, key) from cause


def highest_after(
    checkpoint: Store,
    generation: int,
    *,
    options: Options = DEFAULT_OPTIONS,
    waiting: Waiting = REAL_TIME,
) -> int:
    """List again after creating ``generation``, and return the highest one: a higher one came first.

    A listing without the generation that was just created is stale or wrong, so it is asked for again.

    Raises:
        CheckpointChangedError: Local only: the folder was taken away.
        CommitUnknownError: No listing showed the generation until the deadline; it may well be there.
    """
    patience = Patience(options, waiting)
    while True:
        cause: StoreError | None = None
        try:
            generations = list_generations(checkpoint.list_children("").objects)
            if not checkpoint.is_current():
                raise _changed(checkpoint)
        except StoreError as error:
            cause = error
        else:
            if generations and generations[-1] >= generation:
                return generations[-1]
        if not patience.wait():
            raise _unknown(checkpoint, manifest_key(generation)) from cause


class _Found(enum.Enum):
    OURS = enum.auto()
    ANOTHERS = enum.auto()
    NOTHING = enum.auto()
    UNKNOWN = enum.auto()


def _read_back(checkpoint: Store, key: str, data: bytes, save_id: str | None) -> _Found:
    """Find out what stands at ``key``: an object read by its key says more than any listing."""
    try:
        found = checkpoint.read(key)
    except ObjectNotFoundError:
        return _Found.NOTHING
    except (StoreError, ConfigError):
        return _Found.UNKNOWN
    is_ours = found == data or (save_id is not None and _save_id_of(found, checkpoint.url, key) == save_id)
    return _Found.OURS if is_ours else _Found.ANOTHERS


def _is_refusal(cause: StoreError | ConfigError, found: _Found) -> bool:
    """Whether the store said for certain that it did not, and will not, create the object.

    An error that we know no better than "failed" counts only with a clean answer that nothing is there.
    """
    if isinstance(cause, _REFUSALS):
        return True
    return found is _Found.NOTHING and not isinstance(cause, _OPEN_OUTCOMES)


def _save_id_of(data: bytes, url: str, key: str) -> str | None:
    try:
        return parse_manifest(data, url=url, key=key).save_id
    except CheckpointError:
        return None


def _is_gone(checkpoint: Store) -> bool:
    try:
        return not checkpoint.is_current()
    except StoreError:
        return False  # nothing is known, so go on finding out


def _is_past(checkpoint: Store, not_after: datetime | None) -> bool:
    if not_after is None:
        return False
    try:
        return checkpoint.clock() > not_after
    except StoreError:
        return False  # the store does not answer; the deadline of the tries still holds


def _changed(checkpoint: Store) -> CheckpointChangedError:
    return CheckpointChangedError(
        "the checkpoint was deleted while it was being changed", url=checkpoint.url, operation="commit"
    )


def _unknown(checkpoint: Store, key: str) -> CommitUnknownError:
    return CommitUnknownError(
        "the store did not say whether the manifest was created: nothing was cleaned up, look again later",
        url=checkpoint.url,
        key=key,
        operation="commit",
    )
