"""Data objects read whole and compared with all their checksums, in bounded memory.

The manifest has one CRC for each object, the index one for each block of each payload. An object is read
in parts; a block that lies in several parts is put together from their CRCs. What is not right is read
once more before it counts, since the flip may have happened on the way: bytes that were right once are
right.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remote_ckpt.checksum import combine_crc32c
from remote_ckpt.errors import IntegrityError, ObjectNotFoundError
from remote_ckpt.manifest import ObjectEntry
from remote_ckpt.moves import run_all
from remote_ckpt.options import TransferOptions
from remote_ckpt.progress import ProgressCounter
from remote_ckpt.spans import PartResult, Span, check_part, expected_crc
from remote_ckpt.store.base import Store

_MAX_READINGS = 4


@dataclass(frozen=True, slots=True)
class ObjectTask:
    """One object to read.

    Args:
        entry: What the manifest says of it.
        readable_bytes: How much of it there is, at most its size.
        spans: What the index says of it, in any order.
    """

    entry: ObjectEntry
    readable_bytes: int
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What reading an object showed.

    Args:
        crc: Of all its bytes; None where they were not all read.
        is_right: All bytes were there, and their CRC was that of the manifest.
        wrong: Spans (by position) and blocks of them whose CRC was not that of the index.
        failure: Why it could not be read to the end.
    """

    crc: int | None
    is_right: bool
    wrong: frozenset[tuple[int, int]]
    failure: str | None = None

    @property
    def is_sound(self) -> bool:
        """Whether all checksums were right."""
        return self.is_right and not self.wrong

    def names(self, task: ObjectTask) -> tuple[str, ...]:
        """Return whose bytes were wrong, sorted."""
        return tuple(sorted({task.spans[span].name for span, _ in self.wrong}))


def check_objects(
    store: Store,
    tasks: Sequence[ObjectTask],
    *,
    block_bytes: int,
    options: TransferOptions,
    counter: ProgressCounter,
) -> list[Finding]:
    """Read objects, all parts in parallel, and return one finding for each.

    Args:
        store: The checkpoint.
        tasks: The objects.
        block_bytes: Bytes that one checksum of the index covers.
        options: ``part_bytes`` at once, as many requests as ``concurrency`` and ``budget_bytes`` allow.
        counter: Told of bytes and objects, at the first reading.

    Raises:
        StoreError: The store failed, which says nothing about the objects. (One that is missing or too
            short is a finding.)
    """
    reading = _Reading(store, tasks, block_bytes, options, counter)
    findings = last = reading.run(range(len(tasks)))
    for _ in range(_MAX_READINGS - 1):
        # Damage shows the same each time. What looks different comes from the way, and is read again.
        suspects = [position for position, finding in last.items() if not finding.is_sound]
        again = reading.run(suspects)
        findings = findings | {position: _common(findings[position], again[position]) for position in again}
        last = {position: finding for position, finding in again.items() if finding != last[position]}
    return [findings[position] for position in range(len(tasks))]


def _common(first: Finding, second: Finding) -> Finding:
    """Return what two readings agree on."""
    is_right = first.is_right or second.is_right
    return Finding(
        crc=second.crc,
        is_right=is_right,
        wrong=first.wrong & second.wrong,
        failure=None if is_right else second.failure,
    )


# --- reading -----------------------------------------------------------------------------------------


class _Reading:
    """Reads parts of objects on a pool."""

    def __init__(
        self,
        store: Store,
        tasks: Sequence[ObjectTask],
        block_bytes: int,
        options: TransferOptions,
        counter: ProgressCounter,
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._block_bytes = block_bytes
        self._part_bytes = options.part_bytes
        self._workers = max(1, min(options.concurrency, options.budget_bytes // options.part_bytes))
        self._counter = counter
        self._is_counted = False
        self._lock = threading.Lock()

    def run(self, positions: Sequence[int]) -> dict[int, Finding]:
        """Read the objects at these positions; they count as progress the first time only."""
        objects = {position: _Parts(self._tasks[position], self._part_bytes) for position in positions}
        jobs = [(parts, number) for parts in objects.values() for number in range(len(parts.results))]
        run_all(self._read, jobs, concurrency=self._workers)
        if not self._is_counted:
            self._count_empty(objects.values())
        self._is_counted = True
        return {position: parts.conclude(self._block_bytes) for position, parts in objects.items()}

    def _count_empty(self, objects: Iterable[_Parts]) -> None:
        if count := sum(not parts.results for parts in objects):
            self._counter.advance(done_objects=count)

    def _read(self, job: tuple[_Parts, int]) -> None:
        parts, number = job
        begin, length = parts.range_of(number)
        try:
            data = self._store.read_range(parts.task.entry.key, begin, length)
        except ObjectNotFoundError:
            result = PartResult(failure="is missing")
        except IntegrityError as error:
            result = PartResult(failure=f"cannot be read whole: {error.message}")
        else:
            result = check_part(memoryview(data), begin, parts.spans_of(number), self._block_bytes)
        with self._lock:
            parts.results[number] = result
            parts.left_count -= 1
            is_last = not parts.left_count
        if not self._is_counted:
            self._counter.advance(done_bytes=length, done_objects=int(is_last))


class _Parts:
    """One object on its way through the pool: its parts, and what each of them showed."""

    def __init__(self, task: ObjectTask, part_bytes: int) -> None:
        self.task = task
        self._part_bytes = part_bytes
        count = -(-task.readable_bytes // part_bytes)
        self.left_count = count
        self.results: list[PartResult | None] = [None] * count
        self._spans: list[list[tuple[int, Span]]] = [[] for _ in range(count)]
        for position, span in sorted(enumerate(task.spans), key=lambda pair: pair[1].offset_bytes):
            last = min(count, -(-span.end_bytes // part_bytes))
            for number in range(span.offset_bytes // part_bytes, last):
                self._spans[number].append((position, span))

    def range_of(self, number: int) -> tuple[int, int]:
        """Return first byte and length of a part."""
        begin = number * self._part_bytes
        return begin, min(self._part_bytes, self.task.readable_bytes - begin)

    def spans_of(self, number: int) -> Sequence[tuple[int, Span]]:
        """Return the spans, with their positions, that a part has bytes of."""
        return self._spans[number]

    def conclude(self, block_bytes: int) -> Finding:
        """Put the parts together."""
        failures = [result.failure for result in self.results if result is not None and result.failure]
        wrong = {found for result in self._read_parts() for found in result.wrong}
        wrong |= self._wrong_edges()
        wrong |= self._lost(block_bytes)
        crc = self._crc()
        return Finding(
            crc=crc,
            is_right=crc == self.task.entry.crc32c,
            wrong=frozenset(wrong),
            failure=failures[0] if failures else None,
        )

    def _read_parts(self) -> Iterable[PartResult]:
        return (result for result in self.results if result is not None and result.failure is None)

    def _crc(self) -> int | None:
        """The CRC of the whole object; None where a part of it was not read."""
        if self.task.readable_bytes != self.task.entry.size_bytes:
            return None
        crc = 0
        for number, result in enumerate(self.results):
            if result is None or result.failure is not None:
                return None
            crc = combine_crc32c(crc, result.crc, self.range_of(number)[1])
        return crc

    def _wrong_edges(self) -> set[tuple[int, int]]:
        """Blocks that lie in several parts, from the CRCs of their pieces."""
        crcs: defaultdict[tuple[int, int], int] = defaultdict(int)
        for result in self._read_parts():  # in the order of the object's bytes
            for edge in result.edges:
                block = edge.span, edge.block
                crcs[block] = combine_crc32c(crcs[block], edge.crc, edge.length_bytes)
        return {
            (span, block)
            for (span, block), crc in crcs.items()
            if crc != expected_crc(self.task.spans[span], block)
        }

    def _lost(self, block_bytes: int) -> set[tuple[int, int]]:
        """The last block of each span that reaches into what was not read."""
        unread = [
            self.range_of(number)
            for number, result in enumerate(self.results)
            if result is None or result.failure is not None
        ]
        unread.append((self.task.readable_bytes, self.task.entry.size_bytes - self.task.readable_bytes))
        return {
            (position, (span.length_bytes - 1) // block_bytes)
            for position, span in enumerate(self.task.spans)
            if any(begin < span.end_bytes and span.offset_bytes < begin + length for begin, length in unread)
        }
