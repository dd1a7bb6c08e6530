"""Finding out whether a store honours "create only if absent", on which every commit rests.

Some servers ignore the condition without a word, and some honour it in sequence but not in a race.
So it is tried both ways, the winner is verified by content, and the answer is kept for the process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from remote_ckpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    RemoteCkptError,
    StoreError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.generation import DEFAULT_OPTIONS
from remote_ckpt.keys import new_token
from remote_ckpt.log import logger
from remote_ckpt.options import Options
from remote_ckpt.store.base import CreateOnly, Store
from remote_ckpt.store.retry import Backoff
from remote_ckpt.store.single_writer import may_refuse_condition

_RACERS = 8
_MAX_ROUNDS = 5
_proven: set[tuple[int, str]] = set()
"""Processes and :attr:`Store.identity` of what passed. URLs would not do: endpoints share bucket names."""


def probe_create_only(store: Store, *, options: Options = DEFAULT_OPTIONS) -> None:
    """Make sure that the store honours create-only; tried once per process and store.

    Writes and removes two small objects ``.probe-...`` right below the store's root, unless the driver
    is known to be atomic.

    Raises:
        UnsupportedStoreError: It is not honoured, and ``options.commit.accept_single_writer`` is false.
        StoreError: The store failed, so that nothing was found out.
    """
    create_only = store.capabilities.create_only
    if create_only is CreateOnly.ATOMIC or (os.getpid(), store.identity) in _proven:
        return
    reason = "its driver has none" if create_only is CreateOnly.NONE else _find_fault(store, options)
    if reason is None:
        _proven.add((os.getpid(), store.identity))
    elif options.commit.accept_single_writer:
        logger.warning(
            "%s does not create objects only if absent (%s): two jobs that save the same checkpoint at the "
            "same time are not kept apart, as accepted by accept_single_writer",
            store.url,
            reason,
        )
    else:
        raise UnsupportedStoreError(
            f"this store does not create objects only if absent ({reason}), so two jobs could mix their "
            f"checkpoints; use another store, or accept_single_writer=True if only one job ever saves here",
            url=store.url,
            operation="probe",
        )


def _find_fault(store: Store, options: Options) -> str | None:
    made: list[str] = []
    try:
        fault = _try_all(store, made, Backoff(options.retry))
    except Exception:
        _remove(store, made, level=logging.DEBUG)  # what failed is told: what its cleanup meets is no news
        raise
    _remove(store, made, level=logging.WARNING)
    return fault


def _try_all(store: Store, made: list[str], backoff: Backoff) -> str | None:
    """Return what is wrong; ``made`` gets the keys of all objects that may be there now."""
    try:
        fault = _try_twice_patiently(store, made, backoff) or _refused(store)
        for _ in range(_MAX_ROUNDS):
            if fault is not None:
                return fault
            made.append(_new_key())
            if (done := _try_race(store, made[-1])) is not None:
                return done or None
            backoff.wait()
        return fault or _undecided(store)
    except (UnsupportedStoreError, StoreError) as error:
        if not may_refuse_condition(error):
            raise
        made.append(_new_key())
        store.write(made[-1], b"plain")  # where this fails too, it was not the condition
        return f"it refuses the condition: {error}"


def _new_key() -> str:
    return f".probe-{new_token()}"


def _remove(store: Store, keys: Sequence[str], *, level: int) -> None:
    """Remove probes; one that stays is harmless, so a failure is told at this level and not raised."""
    try:
        failures = store.delete(keys) if keys else ()
    except RemoteCkptError as error:
        logger.log(level, "%s: cannot remove the probes: %s", store.url, error)
        return
    for failure in failures:
        logger.log(level, "%s: cannot remove the probe %s: %s", store.url, failure.key, failure.error)


def _try_twice_patiently(store: Store, made: list[str], backoff: Backoff) -> str | None:
    """Try until the store answers, each time with another key: what got no answer may still land."""
    unanswered: list[str] = []
    while True:
        key = _new_key()
        try:
            fault = _try_twice(store, key, made)
        except StoreUnavailableError:
            unanswered.append(key)
            if not backoff.wait():
                raise
        else:
            made.extend(key for key in unanswered if key not in made)
            return fault


def _try_twice(store: Store, key: str, made: list[str]) -> str | None:
    """Create one object twice; returns what is wrong."""
    for content in (b"first", b"second"):
        try:
            store.create(key, content)
        except ObjectExistsError:
            is_taken = True  # for the first one too, if its answer got lost and the driver sent it again
        else:
            is_taken = False
        if key not in made:
            made.append(key)
        if content == b"second" and not is_taken:
            return "a second write replaced the first"
    return None if store.read(key) == b"first" else "a refused write took effect"


def _refused(store: Store) -> str | None:
    """Return what is wrong if the first creates went without the condition, as a single writer accepts."""
    is_missing = store.capabilities.create_only is CreateOnly.NONE
    return "it refuses the condition" if is_missing else None


def _try_race(store: Store, key: str) -> str | None:
    """Create one object from several threads at once.

    Returns:
        What is wrong, empty if nothing is, None if nobody won (a conflict answered to all).
    """
    start = threading.Barrier(_RACERS)

    def race(number: int) -> bool:
        start.wait()
        try:
            store.create(key, b"racer %d" % number)
        except (ObjectExistsError, StoreUnavailableError):
            return False  # which may be a win whose answer got lost: the content tells
        return True

    with ThreadPoolExecutor(_RACERS, thread_name_prefix="probe") as pool:
        winners = [number for number, has_won in enumerate(pool.map(race, range(_RACERS))) if has_won]
    try:
        content = store.read(key)
    except ObjectNotFoundError:
        return "an accepted write is missing" if winners else None
    if len(winners) > 1:
        return f"{len(winners)} of {_RACERS} writes at the same time were accepted"
    if winners and content != b"racer %d" % winners[0]:
        return "a refused write took effect"
    return ""


def _undecided(store: Store) -> str:
    raise StoreUnavailableError(
        f"no write was accepted in {_MAX_ROUNDS} rounds: try again", url=store.url, operation="probe"
    )
