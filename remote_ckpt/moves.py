"""Objects to copy from one checkpoint to another, and what all ways to copy them have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

from remote_ckpt.progress import OnProgress, ProgressCounter
from remote_ckpt.transfer import Cancelled

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Move:
    """One object to copy: keys relative to the two checkpoints, size in bytes, CRC-32C where it is known."""

    source_key: str
    target_key: str
    size_bytes: int
    crc32c: int | None = None


class Mover(Protocol):
    """One way to copy."""

    def move(self, moves: Sequence[Move], counter: ProgressCounter) -> None:
        """Copy all objects; each appears whole or not at all. The first failure stops the others.

        Raises:
            ObjectNotFoundError: The source lacks one.
            IntegrityError: One is not what its CRC-32C says, where bytes pass through here.
            StoreError: A store failed.
        """
        ...


def begin_progress(
    moves: Sequence[Move], missing: Sequence[Move], on_progress: OnProgress | None
) -> ProgressCounter:
    """Return the counter of a copy of which all but the missing objects are there already."""
    total_bytes = sum(move.size_bytes for move in moves)
    counter = ProgressCounter("copy", on_progress, total_bytes=total_bytes, total_objects=len(moves))
    if len(missing) < len(moves):
        counter.advance(
            done_bytes=total_bytes - sum(move.size_bytes for move in missing),
            done_objects=len(moves) - len(missing),
        )
    return counter


def run_all(
    call: Callable[[T], None],
    items: Sequence[T],
    *,
    concurrency: int,
    cancelled: threading.Event | None = None,
) -> None:
    """Call for all items; the first failure stops the others, and is raised when all have ended.

    Args:
        cancelled: Set at the first failure and in the end, so that what has begun can stop early, by
            raising ``Cancelled``.
    """
    if not items:
        return
    is_over = cancelled or threading.Event()

    def attempt(item: T) -> None:
        if is_over.is_set():
            raise Cancelled
        try:
            call(item)
        except BaseException:
            is_over.set()
            raise

    with ThreadPoolExecutor(min(concurrency, len(items)), thread_name_prefix="copy") as pool:
        futures = [pool.submit(attempt, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # Ctrl-C, too, must not wait for gigabytes
            is_over.set()
    errors = [error for future in futures if (error := future.exception()) is not None]
    real = [error for error in errors if not isinstance(error, Cancelled)]
    for error in real or errors:
        raise error
