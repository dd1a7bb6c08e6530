"""Bytes of an object that have checksums, and what a part of the object shows of them. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from remote_ckpt.checksum import CRC_BYTES, combine_crc32c, crc32c

_LARGE_BYTES = 64 * 1024
"""From this size on, to combine two CRCs takes less than to sum up the bytes again."""


# Made by the million, for each chunk of a checkpoint.
@dataclass(slots=True)
class Span:
    """Bytes of an object that the index has checksums for. Not to be changed.

    Args:
        name: Whose they are: a tensor or another value.
        offset_bytes: First byte in the object.
        length_bytes: How many, at least 1.
        crcs: CRC-32C of each block, as in the index.
    """

    name: str
    offset_bytes: int
    length_bytes: int
    crcs: bytes

    @property
    def end_bytes(self) -> int:
        """The first byte behind it."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True, slots=True)
class Edge:
    """The CRC of those bytes of a block that lie in one part."""

    span: int
    block: int
    crc: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """What one part of an object showed: its CRC, wrong blocks inside it, and blocks that reach beyond it."""

    crc: int = 0
    wrong: tuple[tuple[int, int], ...] = ()
    edges: tuple[Edge, ...] = ()
    failure: str | None = None


def check_part(
    data: memoryview, begin_bytes: int, spans: Iterable[tuple[int, Span]], block_bytes: int
) -> PartResult:
    """Return what a part's bytes show.

    Args:
        data: The bytes.
        begin_bytes: Where in the object they begin.
        spans: Those that overlap with them, with their positions, by offset.
        block_bytes: Bytes that one checksum covers.
    """
    wrong: list[tuple[int, int]] = []
    edges: list[Edge] = []
    whole = _WholeCrc(data)
    end_bytes = begin_bytes + len(data)
    for position, span in spans:
        first = max(0, begin_bytes - span.offset_bytes) // block_bytes
        last = (min(end_bytes, span.end_bytes) - span.offset_bytes - 1) // block_bytes
        for block in range(first, last + 1):
            block_begin = span.offset_bytes + block * block_bytes
            block_end = min(block_begin + block_bytes, span.end_bytes)
            begin, end = max(block_begin, begin_bytes), min(block_end, end_bytes)
            crc = whole.add_piece(begin - begin_bytes, end - begin_bytes)
            if (begin, end) != (block_begin, block_end):
                edges.append(Edge(position, block, crc, end - begin))
            elif crc != expected_crc(span, block):
                wrong.append((position, block))
    return PartResult(crc=whole.finish(), wrong=tuple(wrong), edges=tuple(edges))


class _WholeCrc:
    """The CRC of a part, from those of its pieces where they are large: each byte is summed up once."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._crc = 0
        self._at = 0

    def add_piece(self, begin: int, end: int) -> int:
        """Return the CRC of a piece; pieces come in the order of their bytes."""
        crc = crc32c(self._data[begin:end])
        if begin >= self._at and end - begin >= _LARGE_BYTES:
            self._crc = combine_crc32c(self._advance(begin), crc, end - begin)
            self._at = end
        return crc  # what is small, or overlaps with another piece, is summed up again by the next advance

    def finish(self) -> int:
        """Return the CRC of all."""
        return self._advance(len(self._data))

    def _advance(self, end: int) -> int:
        self._crc = crc32c(self._data[self._at : end], self._crc)
        self._at = end
        return self._crc


def expected_crc(span: Span, block: int) -> int:
    """Return the CRC that the index has for a block of a span."""
    (crc,) = struct.unpack_from("<I", span.crcs, CRC_BYTES * block)
    return int(crc)
