"""Which bytes of two differently cut tensors hold the same elements. Pure.

Chunks are row-major. Where two of them overlap, their common box is a row of runs, each of them consecutive
bytes in both. Runs that lie near each other in both make a window, which is read at once.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remote_ckpt.entries import ChunkEntry

_MAX_RUNS = 1 << 14
"""Most runs of one window, so that their list stays small beside the bytes."""

Point = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two chunks of the same tensor, and the box that both have: where it begins in the tensor, its shape."""

    first: ChunkEntry
    second: ChunkEntry
    offsets: Point
    sizes: Point


class Run(NamedTuple):
    """Elements that are consecutive in both chunks: where they begin in either payload, how many bytes."""

    first_begin: int
    second_begin: int
    length_bytes: int


def strides_of(sizes: Sequence[int]) -> Point:
    """Return row-major strides in elements."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


def with_elements(chunks: Iterable[ChunkEntry]) -> list[ChunkEntry]:
    """Return the chunks that are not empty, by their offsets."""
    return sorted((chunk for chunk in chunks if all(chunk.sizes)), key=lambda chunk: chunk.offsets)


def find_overlaps(first: Iterable[ChunkEntry], second: Iterable[ChunkEntry]) -> Iterator[Overlap]:
    """Yield the pairs of chunks that have elements in common."""
    candidates = sorted(second, key=lambda chunk: _rows(chunk)[0])
    begins = [_rows(chunk)[0] for chunk in candidates]
    longest = max((len(_rows(chunk)) for chunk in candidates), default=0)
    for one in first:
        rows = _rows(one)
        low, high = bisect_right(begins, rows.start - longest), bisect_left(begins, rows.stop)
        for other in candidates[low:high]:
            if (overlap := _overlap(one, other)) is not None:
                yield overlap


def _rows(chunk: ChunkEntry) -> range:
    """The chunk's part of the first dimension."""
    return range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) if chunk.sizes else range(1)


def _overlap(first: ChunkEntry, second: ChunkEntry) -> Overlap | None:
    begins = tuple(map(max, first.offsets, second.offsets))
    ends = map(min, _ends(first), _ends(second))
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else Overlap(first, second, begins, sizes)


def _ends(chunk: ChunkEntry) -> Iterator[int]:
    return (offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))


def common_runs(overlap: Overlap, item_bytes: int) -> Iterator[Run]:
    """Yield the runs of an overlap in the order of its elements, and so of the bytes in both chunks."""
    sizes = overlap.sizes
    inner = _first_dim_of_runs(overlap)
    length_bytes = math.prod(sizes[inner:]) * item_bytes
    walks = [_Walk(chunk, overlap, inner, item_bytes) for chunk in (overlap.first, overlap.second)]
    for place in itertools.product(*(range(size) for size in sizes[:inner])):
        yield Run(walks[0].begin(place), walks[1].begin(place), length_bytes)


def _first_dim_of_runs(overlap: Overlap) -> int:
    """Dimensions that are whole in both chunks are consecutive; so is the one before them, whole or not."""
    dim = len(overlap.sizes)
    while dim and overlap.sizes[dim - 1] == overlap.first.sizes[dim - 1] == overlap.second.sizes[dim - 1]:
        dim -= 1
    return max(0, dim - 1)


class _Walk:
    """Where in a chunk's payload the runs of an overlap begin."""

    def __init__(self, chunk: ChunkEntry, overlap: Overlap, inner: int, item_bytes: int) -> None:
        strides = [stride * item_bytes for stride in strides_of(chunk.sizes)]
        moved = zip(overlap.offsets, chunk.offsets, strides, strict=True)
        self._origin = sum((here - begin) * stride for here, begin, stride in moved)
        self._strides = strides[:inner]

    def begin(self, place: Point) -> int:
        return self._origin + sum(map(int.__mul__, place, self._strides))


def cut_windows(runs: Iterable[Run], *, max_bytes: int, gap_bytes: int) -> Iterator[list[Run]]:
    """Group runs into windows, each read at once.

    Args:
        runs: In ascending order in both chunks.
        max_bytes: Longest window, in either chunk; longer runs are cut.
        gap_bytes: Gaps up to this, in either chunk, are read over.
    """
    window: list[Run] = []
    for run in _cut(runs, max_bytes):
        if window and not (len(window) < _MAX_RUNS and _fits(window, run, max_bytes, gap_bytes)):
            yield window
            window = []
        window.append(run)
    if window:
        yield window


def _cut(runs: Iterable[Run], max_bytes: int) -> Iterator[Run]:
    for first, second, length in runs:
        for at in range(0, length, max_bytes):
            yield Run(first + at, second + at, min(max_bytes, length - at))


def _fits(window: Sequence[Run], run: Run, max_bytes: int, gap_bytes: int) -> bool:
    begin, last = window[0], window[-1]
    spans = run.first_begin - begin.first_begin, run.second_begin - begin.second_begin
    gaps = run.first_begin - last.first_begin, run.second_begin - last.second_begin
    return max(spans) + run.length_bytes <= max_bytes and max(gaps) - last.length_bytes <= gap_bytes
