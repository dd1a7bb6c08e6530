"""Creating one generation of a manifest, and finding out for certain what became of it.

A create-only PUT has three outcomes. After a conflict, a time-out or a lost answer the store is
asked what stands there: our own bytes mean that we won, another's that we lost. Nothing there does
not mean that we lost: the request may still be on its way (through a proxy, say) and land later.
So the identical PUT is sent again until one of them is decided, or the deadline passes.

What was created is read back, too: a store that does not check what arrives keeps a bit that flipped on
the way, and a manifest that nobody can read would hide the checkpoint, and the one that it replaced.
The same is then said again by the next generation.

Absence in a listing proves nothing here: listings may lag behind, or be wrong. A generation that was
created and is not listed leaves the outcome open, so nothing is cleaned up.
"""

from __future__ import annotations

import enum
import operator
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest, format_manifest, parse_manifest
from remote_ckpt.newest import list_generations
from remote_ckpt.options import Options
from remote_ckpt.store.base import Store

_REFUSALS = (AccessDeniedError, BucketNotFoundError, StorageFullError, ConfigError)
_OPEN_OUTCOMES = (StoreUnavailableError, ObjectExistsError, ObjectNotFoundError)
_SHORTEST_WAIT_SECONDS = 0.02
_MAX_DAMAGED = 4
"""Manifests in a row that are stored damaged: with as many, it is no accident."""
_MAX_ALTERED_BYTES = 16
"""Bytes in which ours may differ from what is kept of it; anybody else's differs in its digest at least."""


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
) -> Manifest | None:
    """Create a generation and read it back; returns None where another has taken the number.

    Where the store keeps it damaged, the same contents are created as the next generation, and so on:
    the one that is returned is readable.

    Args:
        manifest: Written to the key of its generation.
        is_save: It commits an attempt, so the attempt's save_id tells whose it is. Pins and tombstones
            carry the save_id of what they change: there only equal bytes tell.
        not_after: A PUT is not repeated after this time of the store's clock.

    Raises:
        StoreError, ConfigError: A clean refusal (no right, no space, a request that the store does not
            take), with nothing in doubt from a try before; nothing was created.
        CheckpointChangedError: Local only: the folder was taken away; nothing was created in the newer one.
        CommitUnknownError: Not decided before the deadline; it may exist now or later. Or the store gave
            back other bytes than it was sent, several times.
    """
    for _ in range(_MAX_DAMAGED):
        creation = _Creation(checkpoint, manifest, is_save, not_after, options, waiting)
        if not creation.create():
            return None
        found = creation.read_back()
        if found not in (_Found.DAMAGED, _Found.OURS_DAMAGED):
            return manifest if found is _Found.OURS else None
        logger.warning("%s: %s was stored damaged: said again", checkpoint.url, creation.key)
        manifest = replace(manifest, generation=manifest.generation + 1)
    raise CommitUnknownError(
        f"of {_MAX_DAMAGED} manifests the store gave back other bytes than it was sent: "
        "they are altered on their way, or where they are kept; nothing was cleaned up",
        url=checkpoint.url,
        key=creation.key,
        operation="commit",
    )


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
            raise _unknown(checkpoint, manifest_key(generation), cause) from cause


class _Found(enum.Enum):
    OURS = enum.auto()
    ANOTHERS = enum.auto()
    DAMAGED = enum.auto()
    OURS_DAMAGED = enum.auto()
    NOTHING = enum.auto()
    UNKNOWN = enum.auto()


class _Creation:
    """The creation of one manifest; arguments as of :func:`create_generation`."""

    def __init__(
        self,
        checkpoint: Store,
        manifest: Manifest,
        is_save: bool,
        not_after: datetime | None,
        options: Options,
        waiting: Waiting,
    ) -> None:
        self.key = manifest_key(manifest.generation)
        self._checkpoint = checkpoint
        self._generation = manifest.generation
        self._data = format_manifest(manifest)
        self._save_id = manifest.save_id if is_save else None
        self._not_after = not_after
        self._options = options
        self._waiting = waiting
        self._cause: Exception | None = None

    def create(self) -> bool:
        """Send it until it is decided; whether it is ours."""
        patience = Patience(self._options, self._waiting)
        is_in_doubt = False
        while True:
            try:
                self._checkpoint.create(self.key, self._data)
                return True
            except (StoreError, ConfigError) as error:
                cause = error
            found = _Found.UNKNOWN if patience.is_over else self._look()
            if found in (_Found.OURS, _Found.ANOTHERS, _Found.DAMAGED, _Found.OURS_DAMAGED):
                return found in (_Found.OURS, _Found.OURS_DAMAGED)
            if _is_refusal(cause, found) and not is_in_doubt:
                raise cause
            is_in_doubt = is_in_doubt or not _is_refusal(cause, found)
            if patience.is_over:
                raise _unknown(self._checkpoint, self.key, cause) from cause
            if _is_gone(self._checkpoint):
                raise _changed(self._checkpoint) from cause
            if not patience.wait() or _is_past(self._checkpoint, self._not_after):
                raise _unknown(self._checkpoint, self.key, cause) from cause

    def read_back(self) -> _Found:
        """Look at what was created until the store says what stands there.

        A newer generation may have made this one garbage that was swept: then it stood.
        """
        patience = Patience(self._options, self._waiting)
        while True:
            found = self._look()
            if found not in (_Found.NOTHING, _Found.UNKNOWN):
                return found
            if found is _Found.NOTHING and self._is_built_upon():
                return _Found.OURS
            if _is_gone(self._checkpoint):
                raise _changed(self._checkpoint)
            if isinstance(self._cause, _REFUSALS) or not patience.wait():
                raise CommitUnknownError(
                    f"the store took the manifest, but it could not be read back: nothing was cleaned up, "
                    f"look again later ({self._cause})",
                    url=self._checkpoint.url,
                    key=self.key,
                    operation="commit",
                ) from self._cause

    def _look(self) -> _Found:
        """Find out what stands at the key: an object read by its key says more than any listing.

        Damage is believed the second time only: what was altered on its way here comes right then.
        """
        found = self._look_once()
        return self._look_once() if found in (_Found.DAMAGED, _Found.OURS_DAMAGED) else found

    def _look_once(self) -> _Found:
        try:
            found = self._checkpoint.read(self.key)
        except ObjectNotFoundError as error:
            self._cause = error
            return _Found.NOTHING
        except (StoreError, ConfigError) as error:
            self._cause = error
            return _Found.UNKNOWN
        if found == self._data:
            return _Found.OURS
        try:
            manifest = parse_manifest(found, url=self._checkpoint.url, key=self.key)
        except CheckpointError:  # one of a newer format that is not damaged is another's, which is as well
            return _Found.OURS_DAMAGED if _resembles(found, self._data) else _Found.DAMAGED
        return _Found.OURS if self._save_id == manifest.save_id else _Found.ANOTHERS

    def _is_built_upon(self) -> bool:
        try:
            generations = list_generations(self._checkpoint.list_children("").objects)
        except StoreError:
            return False
        return bool(generations) and generations[-1] > self._generation


def _resembles(found: bytes, sent: bytes) -> bool:
    """Whether bytes that are no manifest are what became of ours: cut short, or altered in a few places."""
    if len(found) != len(sent):
        return len(found) > len(sent) // 2 and sent.startswith(found)
    altered: int = sum(map(operator.ne, found, sent))
    return altered <= _MAX_ALTERED_BYTES


def _is_refusal(cause: StoreError | ConfigError, found: _Found) -> bool:
    """Whether the store said for certain that it did not, and will not, create the object.

    An error that we know no better than "failed" counts only with a clean answer that nothing is there.
    """
    if isinstance(cause, _REFUSALS):
        return True
    return found is _Found.NOTHING and not isinstance(cause, _OPEN_OUTCOMES)


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


def _unknown(checkpoint: Store, key: str, cause: Exception | None) -> CommitUnknownError:
    reason = "" if cause is None else f" ({cause})"
    return CommitUnknownError(
        "the store did not say whether the manifest was created: nothing was cleaned up, look again later"
        + reason,
        url=checkpoint.url,
        key=key,
        operation="commit",
    )
