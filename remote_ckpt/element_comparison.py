"""Elements of two checkpoints read and compared, in bounded memory: for what checksums cannot decide.

Elements are compared as bits, so that -0.0 differs from 0.0 and a NaN equals the same NaN. What differs is
read once more before it counts, since the flip may have happened on the way. Whether what is stored is what
was saved is another question, and the verification's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from remote_ckpt.archive import SUPPORTED_DTYPES
from remote_ckpt.checksum import crc32c
from remote_ckpt.checksum_comparison import Difference
from remote_ckpt.entries import ChunkEntry
from remote_ckpt.moves import run_all
from remote_ckpt.options import TransferOptions
from remote_ckpt.overlaps import Run, common_runs, cut_windows, find_overlaps
from remote_ckpt.progress import ProgressCounter
from remote_ckpt.sides import Sides

_GROUP_COUNT = 256
"""Names that are planned at once."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What reading showed: names that differ, and those of which it could not tell."""

    differences: Mapping[str, Difference]
    undecided: frozenset[str]


def compare_elements(
    sides: Sides, names: Sequence[str], *, options: TransferOptions, counter: ProgressCounter
) -> Findings:
    """Read and compare tensors of equal shape and dtype, and values, that both checkpoints have.

    Args:
        sides: The two checkpoints.
        names: Of tensors and values.
        options: Windows of at most ``part_bytes`` on either side, as many at once as ``concurrency`` and
            ``budget_bytes`` allow; ``merge_gap_bytes`` are read over.
        counter: Told of the bytes that were compared, of both sides, and of names.

    Raises:
        CheckpointChangedError: One of the two was replaced or deleted meanwhile.
        CheckpointDamagedError, IntegrityError: It lacks an object, or a part of one.
        StoreError: A store failed.
    """
    workers = max(1, min(options.concurrency, options.budget_bytes // (2 * options.part_bytes)))
    findings = _Collected(sides, counter)
    for at in range(0, len(names), _GROUP_COUNT):
        group = names[at : at + _GROUP_COUNT]
        windows = iter(findings.unsettled(_plan(sides, group, options, workers)))
        while batch := list(islice(windows, 4 * workers)):
            run_all(findings.compare, batch, concurrency=workers)
        counter.advance(done_objects=len(group))
    return findings.result()


# --- what to read ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in an object runs are counted from: the object's position in the index, and a byte in it."""

    position: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class _Window:
    """Runs that are read at once, one request for each side.

    Args:
        name: Whose.
        places: Where, on either side.
        runs: At least one.
        where: Says which part of the tensor it is.
        is_decisive: Different bytes mean different values; in archives that stay closed they need not.
    """

    name: str
    places: tuple[_Place, _Place]
    runs: Sequence[Run]
    where: str = ""
    is_decisive: bool = True


def _plan(
    sides: Sides, names: Sequence[str], options: TransferOptions, workers: int
) -> Iterator[_Window | str]:
    """Yield what to read for some names; a name alone where nothing can be read for it."""
    tensors = [name for name in names if name in sides[0].index.tensors]
    first, second = (side.chunks_of(tensors, concurrency=workers) for side in sides)
    for name in names:
        if name not in first:
            yield from _plan_value(sides, name, options)
        elif not any(chunk.is_opaque for chunk in (*first[name], *second[name])):
            item_bytes = SUPPORTED_DTYPES[sides[0].index.tensors[name].dtype]
            yield from _plan_elements(name, item_bytes, first[name], second[name], options)
        else:
            yield from _plan_archives(name, first[name], second[name], options)


def _plan_elements(
    name: str,
    item_bytes: int,
    first: Sequence[ChunkEntry],
    second: Sequence[ChunkEntry],
    options: TransferOptions,
) -> Iterator[_Window]:
    for overlap in find_overlaps(first, second):
        places = (
            _Place(overlap.first.object, overlap.first.payload_offset),
            _Place(overlap.second.object, overlap.second.payload_offset),
        )
        runs = common_runs(overlap, item_bytes)
        for window in _cut(runs, options):
            yield _Window(name, places, window, f" in the box at {list(overlap.offsets)}")


def _plan_value(sides: Sides, name: str, options: TransferOptions) -> Iterator[_Window]:
    first, second = (side.index.blobs[name] for side in sides)
    places = _Place(first.object, first.offset), _Place(second.object, second.offset)
    for window in _cut([Run(0, 0, first.length_bytes)], options):  # as long as the second, or they differ
        yield _Window(name, places, window)


def _plan_archives(
    name: str, first: Sequence[ChunkEntry], second: Sequence[ChunkEntry], options: TransferOptions
) -> Iterator[_Window | str]:
    """Archives that nobody can look into are the same tensor if they are the same bytes."""
    shapes = [
        [(chunk.offsets, chunk.sizes, chunk.archive_bytes) for chunk in side] for side in (first, second)
    ]
    if shapes[0] != shapes[1]:
        yield name
        return
    for one, other in zip(first, second, strict=True):
        places = _Place(one.object, one.archive_offset), _Place(other.object, other.archive_offset)
        for window in _cut([Run(0, 0, one.archive_bytes)], options):
            yield _Window(name, places, window, is_decisive=False)


def _cut(runs: Iterable[Run], options: TransferOptions) -> Iterator[list[Run]]:
    return cut_windows(runs, max_bytes=options.part_bytes, gap_bytes=options.merge_gap_bytes)


# --- reading -----------------------------------------------------------------------------------------


class _Collected:
    """Reads windows, on any thread, and collects what they show."""

    def __init__(self, sides: Sides, counter: ProgressCounter) -> None:
        self._sides = sides
        self._counter = counter
        self._lock = threading.Lock()
        self._differences: dict[str, Difference] = {}
        self._undecided: set[str] = set()

    def unsettled(self, planned: Iterable[_Window | str]) -> Iterator[_Window]:
        """Yield the windows of names that are not known to differ yet."""
        for window in planned:
            if isinstance(window, str):
                self._undecided.add(window)
            elif window.name not in self._differences:
                yield window

    def compare(self, window: _Window) -> None:
        """Read a window from both sides, once more if it differs."""
        if self._find_difference(window) is not None and (found := self._find_difference(window)) is not None:
            with self._lock:
                if window.is_decisive:
                    self._differences.setdefault(window.name, found)
                else:
                    self._undecided.add(window.name)
        self._counter.advance(done_bytes=2 * sum(run.length_bytes for run in window.runs))

    def _find_difference(self, window: _Window) -> Difference | None:
        begins = window.runs[0].first_begin, window.runs[0].second_begin
        last = window.runs[-1]
        ends = last.first_begin + last.length_bytes, last.second_begin + last.length_bytes
        first, second = (
            side.read(place.position, place.offset_bytes + begin, end - begin)
            for side, place, begin, end in zip(self._sides, window.places, begins, ends, strict=True)
        )
        for run in window.runs:
            at, other_at = run.first_begin - begins[0], run.second_begin - begins[1]
            one, other = first[at : at + run.length_bytes], second[other_at : other_at + run.length_bytes]
            if bytes(one) != bytes(other):
                return Difference(*(f"CRC-32C {crc32c(data):08x}{window.where}" for data in (one, other)))
        return None

    def result(self) -> Findings:
        """Return what all windows showed."""
        return Findings(self._differences, frozenset(self._undecided - self._differences.keys()))
