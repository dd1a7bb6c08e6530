"""Moving many bytes: parallel uploads, planned ranged reads, one byte budget.

Nothing here knows tensors. An upload is a key with a source of chunks; a download is either a range
that is handed to a function (small and odd ranges, merged into few requests) or a range received
straight into its destination's memory. Threads only; each operation owns its pool and ends it, so
nothing is left to inherit over ``fork``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from remote_ckpt.errors import IntegrityError
from remote_ckpt.options import MiB, TransferOptions
from remote_ckpt.store.base import Buffer, ChunkSource, Store

COALESCE_BYTES = 1 * MiB
"""Chunks smaller than this are joined, so that a store is never fed thousands of tiny ones."""


class Cancelled(Exception):  # a signal between our own threads, never seen by callers
    """Another transfer of the same operation failed first."""


@dataclass(frozen=True, slots=True)
class ObjectUpload:
    """One object to write: key, exact size in bytes, and where its bytes come from."""

    key: str
    size_bytes: int
    source: ChunkSource


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range handed to ``sink`` as a read-only buffer of exactly ``length_bytes`` bytes.

    ``sink`` runs on a worker thread. Where it raises :class:`IntegrityError` the range is fetched
    once more, since the flip may have happened on the way, so it must bear being called twice.
    """

    key: str
    offset_bytes: int
    length_bytes: int
    sink: Callable[[memoryview], None]

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True, slots=True)
class Direct:
    """A range received into ``out`` (format ``B``); ``check`` then raises IntegrityError if it is wrong."""

    key: str
    offset_bytes: int
    out: memoryview
    check: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Segment:
    """One request that serves several wanted ranges of one object."""

    key: str
    offset_bytes: int
    length_bytes: int
    wanted: tuple[Wanted, ...]


@dataclass(slots=True)
class ByteBudget:
    """Hands out staging memory in the order of asking, so that small requests never starve a large one.

    Who asks for more than the whole gets it once all else is returned.
    """

    limit_bytes: int
    _used_bytes: int = 0
    _next_ticket: int = 0
    _served: int = 0
    _condition: threading.Condition = field(default_factory=threading.Condition)

    def acquire(self, wanted_bytes: int) -> int:
        """Wait until the bytes are free and take them; returns the amount to give back."""
        amount = min(wanted_bytes, self.limit_bytes)
        with self._condition:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._condition.wait_for(
                lambda: self._served == ticket and self._used_bytes + amount <= self.limit_bytes
            )
            self._served += 1
            self._used_bytes += amount
            self._condition.notify_all()
        return amount

    def release(self, amount: int) -> None:
        """Give back what :meth:`acquire` returned."""
        with self._condition:
            self._used_bytes -= amount
            self._condition.notify_all()


def coalesce(chunks: Iterable[Buffer], *, at_least_bytes: int = COALESCE_BYTES) -> Iterator[Buffer]:
    """Join small chunks; pass chunks of at least ``at_least_bytes`` through uncopied."""
    pending = bytearray()
    for chunk in chunks:
        if len(chunk) >= at_least_bytes:
            if pending:
                yield bytes(pending)
                pending = bytearray()
            yield chunk
            continue
        pending += chunk
        if len(pending) >= at_least_bytes:
            yield bytes(pending)
            pending = bytearray()
    if pending:
        yield bytes(pending)


def upload_objects(
    store: Store, uploads: Sequence[ObjectUpload], *, options: TransferOptions
) -> tuple[list[str], BaseException | None]:
    """Write all objects, several at once, within the byte budget.

    Args:
        store: Where to; keys are relative to it.
        uploads: The objects. Each appears whole or not at all.
        options: ``budget_bytes``, ``part_bytes`` and ``concurrency`` are used.

    Returns:
        Keys that may now exist (completed, or with an unknown outcome), and the first error, which
        also stopped the others; None if all were written.
    """
    if not uploads:
        return [], None
    cancelled = threading.Event()
    written: list[str] = []
    workers = min(len(uploads), options.concurrency)
    parts_in_flight = max(workers, min(options.concurrency, options.budget_bytes // options.part_bytes - 1))

    def write(upload: ObjectUpload) -> None:
        if cancelled.is_set():
            raise Cancelled
        written.append(upload.key)
        store.write_stream(
            upload.key,
            lambda: _until_cancelled(coalesce(upload.source()), cancelled),
            size_bytes=upload.size_bytes,
            part_bytes=options.part_bytes,
            concurrency=max(1, parts_in_flight // workers),
        )

    return written, _run_all([(write, upload) for upload in uploads], workers, cancelled)


def _until_cancelled(chunks: Iterator[Buffer], cancelled: threading.Event) -> Iterator[Buffer]:
    for chunk in chunks:
        if cancelled.is_set():
            raise Cancelled
        yield chunk


def plan_segments(wanted: Iterable[Wanted], *, merge_gap_bytes: int, max_bytes: int) -> list[Segment]:
    """Merge ranges of one object that lie near each other into requests of at most ``max_bytes``.

    A single range longer than ``max_bytes`` stays one request: whoever wants it whole gets it whole.
    Ranges may overlap. The order of the result is by key and offset.
    """
    segments: list[Segment] = []
    group: list[Wanted] = []
    end = 0
    for item in sorted(wanted, key=lambda one: (one.key, one.offset_bytes, one.length_bytes)):
        is_near = (
            bool(group)
            and item.key == group[0].key
            and item.offset_bytes <= end + merge_gap_bytes
            and max(end, item.end_bytes) - group[0].offset_bytes <= max_bytes
        )
        if group and not is_near:
            segments.append(_segment(group, end))
            group = []
        end = max(end, item.end_bytes) if group else item.end_bytes
        group.append(item)
    if group:
        segments.append(_segment(group, end))
    return segments


def _segment(group: list[Wanted], end: int) -> Segment:
    start = group[0].offset_bytes
    return Segment(group[0].key, start, end - start, tuple(group))


def fetch_all(
    store: Store,
    *,
    wanted: Sequence[Wanted],
    direct: Sequence[Direct],
    options: TransferOptions,
) -> None:
    """Fetch all ranges in parallel; returns when every sink and check has run.

    Args:
        store: Where from.
        wanted: Ranges for sinks; merged into few requests.
        direct: Ranges received in place.
        options: ``budget_bytes`` bounds the bodies held at once; ``part_bytes``, ``merge_gap_bytes`` and
            ``concurrency`` are used too.

    Raises:
        ObjectNotFoundError, IntegrityError, StoreError: The first failure; the rest is abandoned.
    """
    cancelled = threading.Event()
    budget = ByteBudget(options.budget_bytes)
    segments = plan_segments(wanted, merge_gap_bytes=options.merge_gap_bytes, max_bytes=options.part_bytes)

    def fetch_segment(segment: Segment) -> None:
        amount = budget.acquire(segment.length_bytes)
        try:
            if cancelled.is_set():
                raise Cancelled
            _twice_if_damaged(lambda: _serve(store, segment))
        finally:
            budget.release(amount)

    def fetch_direct(item: Direct) -> None:
        amount = budget.acquire(len(item.out))  # most drivers hold the body before they copy it
        try:
            if cancelled.is_set():
                raise Cancelled
            _twice_if_damaged(lambda: _receive(store, item))
        finally:
            budget.release(amount)

    jobs: list[_Job] = [(fetch_direct, item) for item in direct]
    jobs += [(fetch_segment, segment) for segment in segments]
    error = _run_all(jobs, options.concurrency, cancelled)
    if error is not None:
        raise error


def _serve(store: Store, segment: Segment) -> None:
    data = memoryview(store.read_range(segment.key, segment.offset_bytes, segment.length_bytes))
    for item in segment.wanted:
        start = item.offset_bytes - segment.offset_bytes
        item.sink(data[start : start + item.length_bytes])


def _receive(store: Store, item: Direct) -> None:
    store.read_range_into(item.key, item.offset_bytes, item.out)
    item.check()


def _twice_if_damaged(fetch: Callable[[], None]) -> None:
    try:
        fetch()
    except IntegrityError:
        fetch()


_Job = tuple[Callable[..., None], object]


def _run_all(jobs: Sequence[_Job], workers: int, cancelled: threading.Event) -> BaseException | None:
    """Run the jobs on a pool of their own; the first real error stops the others and is returned."""
    if not jobs:
        return None
    with ThreadPoolExecutor(min(workers, len(jobs)), thread_name_prefix="remote-ckpt") as pool:
        futures = [pool.submit(function, argument) for function, argument in jobs]
        try:
            pending = wait(futures, return_when=FIRST_EXCEPTION).not_done
            if pending:
                _cancel(futures, cancelled)
                wait(futures)
        except BaseException:  # Ctrl-C must not wait for gigabytes
            _cancel(futures, cancelled)
            raise
    return _first_error(futures)


def _cancel(futures: Iterable[Future[None]], cancelled: threading.Event) -> None:
    cancelled.set()
    for future in futures:
        future.cancel()


def _first_error(futures: Iterable[Future[None]]) -> BaseException | None:
    errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
    real = [error for error in errors if not isinstance(error, Cancelled)]
    return next(iter(real or errors), None)
