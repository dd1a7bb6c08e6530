"""Planning of byte ranges, against numpy slicing as the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_ckpt.dcp.boxes import is_solid, plan_pieces, strides_of


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    sizes = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    lengths = tuple(draw(st.integers(0, size - o)) for size, o in zip(sizes, offsets, strict=True))
    return sizes, offsets, lengths


@given(
    boxes(), st.sampled_from([0, 1, 5, 100]), st.sampled_from([1, 4, 20, 1000]), st.sampled_from([1, 2, 8])
)
def test_the_pieces_cover_a_box_exactly_once_with_the_right_elements(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], gap: int, window: int, itemsize: int
) -> None:
    sizes, offsets, lengths = box
    chunk = np.arange(int(np.prod(sizes)), dtype=np.int64).reshape(sizes)
    flat = chunk.reshape(-1)
    wanted = chunk[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    out = np.full(lengths, -1, dtype=np.int64)
    pieces = plan_pieces(sizes, offsets, lengths, element_bytes=itemsize, gap_bytes=gap, window_bytes=window)
    for piece in pieces:
        assert piece.span_start_bytes % itemsize == piece.span_bytes % itemsize == 0
        start, count = piece.span_start_bytes // itemsize, piece.span_bytes // itemsize
        span = flat[start : start + count]
        assert len(span) == count > 0
        corner = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
        corner_and_rest: Any = (*corner, ...)  # a view also where there is no dimension
        target = out[corner_and_rest]
        assert (target == -1).all()
        if piece.is_solid:
            target[...] = span.reshape(piece.lengths)
        else:
            strides = [stride * 8 for stride in strides_of(sizes)]
            target[...] = np.lib.stride_tricks.as_strided(span, piece.lengths, strides)
    assert (out == wanted).all()


def test_whole_rows_are_one_solid_piece() -> None:
    (piece,) = plan_pieces((100, 8), (10, 0), (20, 8), element_bytes=2, gap_bytes=0, window_bytes=1)
    assert (piece.is_solid, piece.span_start_bytes, piece.span_bytes) == (True, 160, 320)


def test_narrow_columns_are_read_over_their_gaps_in_windows() -> None:
    pieces = list(plan_pieces((100, 8), (0, 2), (100, 3), element_bytes=1, gap_bytes=16, window_bytes=80))
    assert [piece.lengths for piece in pieces] == [(10, 3)] * 10
    assert not any(piece.is_solid for piece in pieces)


def test_wide_gaps_are_asked_around_row_by_row() -> None:
    pieces = list(plan_pieces((3, 1000), (0, 0), (3, 10), element_bytes=1, gap_bytes=16, window_bytes=10**6))
    assert [(piece.span_start_bytes, piece.span_bytes) for piece in pieces] == [
        (0, 10),
        (1000, 10),
        (2000, 10),
    ]


@pytest.mark.parametrize(
    ("sizes", "lengths", "expected"),
    [
        ((), (), True),
        ((4, 5), (1, 3), True),
        ((4, 5), (2, 5), True),
        ((4, 5), (2, 3), False),
        ((2, 1, 5), (2, 1, 5), True),
    ],
)
def test_a_box_is_solid_when_it_is_one_run_of_memory(
    sizes: tuple[int, ...], lengths: tuple[int, ...], expected: bool
) -> None:
    assert is_solid(sizes, lengths) is expected
