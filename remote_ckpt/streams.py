"""Copying objects between two stores through this process.

Several at once, each read ahead and sent in parts, with no more in memory than the byte budget, and checked
on the way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from remote_ckpt.checksum import crc32c
from remote_ckpt.errors import IntegrityError
from remote_ckpt.moves import Move, run_all
from remote_ckpt.options import TransferOptions
from remote_ckpt.progress import ProgressCounter
from remote_ckpt.store.base import Buffer, Store
from remote_ckpt.store.chunks import plan_part_bytes
from remote_ckpt.transfer import ByteBudget, Cancelled


def _nothing() -> None:
    """What is to be checked before an object is complete, where there is nothing more."""


@dataclass(frozen=True, slots=True)
class StreamMover:
    """Copies through this process.

    Args:
        origin: The source.
        checkpoint: The target.
        options: ``budget_bytes`` bounds the bytes held at once, as far as the target's driver sends its
            parts without a copy; a driver that holds objects whole (fsspec's, but for s3fs) holds more.
            ``part_bytes`` is the size of one read. Up to ``concurrency`` reads and as many writes run
            at once.
        before_end: Called when an object's bytes are all read, before it is complete: what this raises
            leaves no object.
    """

    origin: Store
    checkpoint: Store
    options: TransferOptions
    before_end: Callable[[], None] = _nothing

    def move(self, moves: Sequence[Move], counter: ProgressCounter) -> None:
        """See :meth:`Mover.move`."""
        if not moves:
            return
        large_count = sum(move.size_bytes > self.options.part_bytes for move in moves)
        budget, cancelled = ByteBudget(self.options.budget_bytes), threading.Event()

        def stream(move: Move) -> None:
            window = plan_window(move.size_bytes, large_count=large_count, options=self.options)
            amount = budget.acquire(window.held_bytes)
            try:
                _Stream(self, move, window, readers, cancelled, counter).send()
            finally:
                budget.release(amount)
            counter.advance(done_objects=1)

        largest_first = sorted(moves, key=lambda move: -move.size_bytes)
        with ThreadPoolExecutor(self.options.concurrency, thread_name_prefix="copy-read") as readers:
            run_all(stream, largest_first, concurrency=self.options.concurrency, cancelled=cancelled)


def find_damaged(checkpoint: Store, moves: Sequence[Move], options: TransferOptions) -> list[Move]:
    """Read back what an earlier try left, all there with its size; returns what is not as it should be.

    What has no CRC-32C is believed. Holds up to ``concurrency`` times ``part_bytes``, within the budget.

    Raises:
        ObjectNotFoundError: One is gone.
        StoreError: The store failed.
    """
    damaged: list[Move] = []

    def check(move: Move) -> None:
        if move.crc32c is not None and _read_crc(checkpoint, move, options.part_bytes) != move.crc32c:
            damaged.append(move)

    at_once = _between(1, options.budget_bytes // options.part_bytes, options.concurrency)
    run_all(check, moves, concurrency=at_once)
    return damaged


def _read_crc(checkpoint: Store, move: Move, part_bytes: int) -> int:
    crc = 0
    for offset in range(0, move.size_bytes, part_bytes):
        length = min(part_bytes, move.size_bytes - offset)
        crc = crc32c(checkpoint.read_range(move.target_key, offset, length), crc)
    return crc


@dataclass(frozen=True, slots=True)
class Window:
    """How much of one object is under way at once.

    Args:
        chunk_bytes: Size of one read.
        read_count: Reads that run, or whose bytes wait to be sent.
        part_bytes: Size of one part as the target's driver sends it.
        upload_count: Parts that are sent at once.
        size_bytes: The object's size.
    """

    chunk_bytes: int
    read_count: int
    part_bytes: int
    upload_count: int
    size_bytes: int

    @property
    def held_bytes(self) -> int:
        """Most bytes of the object that are in memory at once."""
        most_bytes = self.read_count * self.chunk_bytes + self.upload_count * self.part_bytes
        return min(self.size_bytes, most_bytes)


def plan_window(size_bytes: int, *, large_count: int, options: TransferOptions) -> Window:
    """Share the budget among the large objects (of more than one part) that are copied at once.

    Each gets at least one read and one part; then fewer run at once, as the budget says.
    """
    part_bytes = plan_part_bytes(size_bytes, options.part_bytes)
    at_once = max(1, min(large_count, options.concurrency))
    share_bytes = options.budget_bytes // at_once
    most_count = max(1, options.concurrency // at_once)
    upload_count = _between(1, share_bytes // 2 // part_bytes, most_count)
    read_bytes = share_bytes - upload_count * part_bytes
    read_count = _between(1, read_bytes // options.part_bytes, most_count)
    return Window(options.part_bytes, read_count, part_bytes, upload_count, size_bytes)


def _between(least: int, wanted: int, most: int) -> int:
    return max(least, min(wanted, most))


class _Stream:
    """One object on its way."""

    def __init__(
        self,
        mover: StreamMover,
        move: Move,
        window: Window,
        readers: ThreadPoolExecutor,
        cancelled: threading.Event,
        counter: ProgressCounter,
    ) -> None:
        self._mover = mover
        self._move = move
        self._window = window
        self._readers = readers
        self._cancelled = cancelled
        self._counter = counter
        self._told_bytes = 0

    def send(self) -> None:
        """Copy the object; once more where its checksum is wrong: it may have been flipped on the way."""
        try:
            self._send_once()
        except IntegrityError:
            self._send_once()

    def _send_once(self) -> None:
        self._mover.checkpoint.write_stream(
            self._move.target_key,
            self._chunks,
            size_bytes=self._move.size_bytes,
            part_bytes=self._mover.options.part_bytes,
            concurrency=self._window.upload_count,
        )

    def _chunks(self) -> Iterator[Buffer]:
        """Yield the bytes from the beginning, the next ones being read meanwhile; then check them."""
        crc, done_bytes = 0, 0
        for data in self._read_ahead():
            crc = crc32c(data, crc)
            done_bytes += len(data)
            self._tell(done_bytes)
            yield data
            del data  # the driver holds it as long as it needs it
        if self._move.crc32c is not None and crc != self._move.crc32c:
            raise IntegrityError(
                f"{self._move.source_key} differs from what was saved: CRC-32C {crc:08x}, expected "
                f"{self._move.crc32c:08x}",
                url=self._mover.origin.url,
                key=self._move.source_key,
                operation="copy",
            )
        self._mover.before_end()

    def _read_ahead(self) -> Iterator[Buffer]:
        offsets = iter(range(0, self._move.size_bytes, self._window.chunk_bytes))
        reads: deque[Future[Buffer]] = deque()
        try:
            while True:
                for offset in islice(offsets, self._window.read_count - len(reads)):
                    reads.append(self._readers.submit(self._read, offset))
                if not reads:
                    return
                yield reads.popleft().result()
        finally:
            for read in reads:
                read.cancel()

    def _read(self, offset: int) -> Buffer:
        if self._cancelled.is_set():
            raise Cancelled
        length = min(self._window.chunk_bytes, self._move.size_bytes - offset)
        return self._mover.origin.read_range(self._move.source_key, offset, length)

    def _tell(self, done_bytes: int) -> None:
        # A stream may begin again from the start; what was told once stays told.
        if done_bytes > self._told_bytes:
            self._counter.advance(done_bytes=done_bytes - self._told_bytes)
            self._told_bytes = done_bytes
