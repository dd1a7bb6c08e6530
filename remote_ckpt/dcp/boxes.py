"""Which bytes of a row-major chunk hold a wanted box, as few and as large runs as make sense. Pure.

A chunk has ``sizes``; a box inside it has ``offsets`` and ``lengths`` (DCP's ``storage_offsets`` and
``lengths``). All are in elements. The result is in bytes relative to the chunk's payload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a wanted box and the byte span of the chunk that contains it.

    Args:
        offsets: Where the part lies, relative to the wanted box.
        lengths: Its size. The product is what the span holds if the piece is solid.
        span_start_bytes: First byte of the span within the payload.
        span_bytes: Length of the span; covers gaps where the piece is not solid.
        is_solid: The span holds the part's elements and nothing else, in order.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    span_start_bytes: int
    span_bytes: int
    is_solid: bool


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


def is_solid(sizes: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether a box of ``lengths`` inside ``sizes`` is one run of memory."""
    dims = [dim for dim in range(len(sizes)) if lengths[dim] != 1]
    return not dims or all(lengths[dim] == sizes[dim] for dim in range(dims[0] + 1, len(sizes)))


def plan_pieces(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    element_bytes: int,
    gap_bytes: int,
    window_bytes: int,
) -> Iterator[Piece]:
    """Cut a wanted box into pieces to fetch.

    Args:
        sizes: The chunk's shape.
        offsets: The box's corner within the chunk.
        lengths: The box's shape; a box with a zero has no pieces.
        element_bytes: Bytes of one element.
        gap_bytes: Gaps up to this are read over rather than asked around.
        window_bytes: Pieces that are not solid are cut so that their span stays near this.

    Yields:
        Pieces that together cover the box exactly once.
    """
    if math.prod(lengths) == 0:
        return
    yield from _cut(
        tuple(sizes), tuple(offsets), tuple(lengths), 0, element_bytes, gap_bytes, window_bytes, ()
    )


def _cut(
    sizes: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    base: int,
    element_bytes: int,
    gap_bytes: int,
    window_bytes: int,
    outer: tuple[int, ...],
) -> Iterator[Piece]:
    """Cut what is left after the dimensions in ``outer`` were fixed; ``base`` is in elements."""
    strides = strides_of(sizes)
    start = base + sum(o * s for o, s in zip(offsets, strides, strict=True))
    prefix = (1,) * len(outer)
    if is_solid(sizes, lengths):
        yield Piece(
            outer + (0,) * len(sizes),
            prefix + lengths,
            start * element_bytes,
            math.prod(lengths) * element_bytes,
            True,
        )
        return
    row_span = _span(lengths[1:], strides[1:]) * element_bytes
    if row_span > window_bytes or strides[0] * element_bytes - row_span > gap_bytes:
        for row in range(lengths[0]):
            below = base + (offsets[0] + row) * strides[0]
            yield from _cut(
                sizes[1:],
                offsets[1:],
                lengths[1:],
                below,
                element_bytes,
                gap_bytes,
                window_bytes,
                (*outer, row),
            )
        return
    rows = max(1, window_bytes // (strides[0] * element_bytes))
    for first in range(0, lengths[0], rows):
        part = (min(rows, lengths[0] - first), *lengths[1:])
        yield Piece(
            (*outer, first) + (0,) * (len(sizes) - 1),
            prefix + part,
            (start + first * strides[0]) * element_bytes,
            _span(part, strides) * element_bytes,
            False,
        )


def _span(lengths: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a box, both included."""
    return 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
