"""Whether two stored tensors or values are the same, told by their checksums alone. Pure.

Checksums of blocks combine to that of a chunk, whatever the blocks' size. Chunks that are consecutive runs of
a row-major tensor, as FSDP cuts it along the first dimension, combine to the whole tensor's, whatever the
number of ranks. Chunks cut along another dimension interleave: they decide only where both are cut alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remote_ckpt.checksum import combine_blocks, combine_crc32c
from remote_ckpt.entries import ChunkEntry, Index
from remote_ckpt.overlaps import strides_of, with_elements


@dataclass(frozen=True, slots=True)
class Difference:
    """What each of the two is, as texts for people."""

    first: str
    second: str


class Undecided:
    """Checksums do not say."""


Verdict = Difference | Undecided | None
"""None: the two are the same."""


def has_checksums(index: Index) -> bool:
    """Whether an index says more than where things lie; that of a stock checkpoint does not."""
    return bool(index.save_id)


def compare_values(name: str, first: Index, second: Index) -> Verdict:
    """Compare the pickled bytes of two values that are no tensors.

    Equal bytes are equal values. Equal values may have other bytes (a dict that was filled in another order).
    """
    one, other = first.blobs[name], second.blobs[name]
    sizes = [f"{entry.length_bytes} pickled bytes" for entry in (one, other)]
    if sizes[0] != sizes[1] or not one.length_bytes:
        return _verdict(*sizes)
    if not (has_checksums(first) and has_checksums(second)):
        return Undecided()
    crcs = [
        combine_blocks(entry.crcs, index.block_bytes, entry.length_bytes)
        for entry, index in ((one, first), (other, second))
    ]
    return _verdict(*(f"{size}, {_crc_text(crc)}" for size, crc in zip(sizes, crcs, strict=True)))


def compare_tensors(name: str, first: Index, second: Index) -> Verdict:
    """Compare two tensors of the same shape and dtype."""
    if not math.prod(first.tensors[name].sizes):
        return None
    if not (has_checksums(first) and has_checksums(second)):
        return Undecided()
    one, other = _Chunks(name, first), _Chunks(name, second)
    if one.boxes == other.boxes:
        return _compare_alike(one, other)
    whole, other_whole = one.whole_crc(), other.whole_crc()
    if whole is None or other_whole is None:
        return Undecided()
    return _verdict(_crc_text(whole), _crc_text(other_whole))


class _Chunks:
    """A tensor's chunks that have elements, by their offsets."""

    def __init__(self, name: str, index: Index) -> None:
        self.chunks = with_elements(index.tensors[name].chunks)
        self.boxes = [(chunk.offsets, chunk.sizes) for chunk in self.chunks]
        self._sizes = index.tensors[name].sizes
        self._block_bytes = index.block_bytes

    def crc(self, chunk: ChunkEntry) -> int:
        return combine_blocks(chunk.crcs, self._block_bytes, chunk.payload_bytes)

    def whole_crc(self) -> int | None:
        """Return the CRC of all elements in row-major order; None where the chunks' do not tell."""
        runs = [(run_begin(self._sizes, chunk), chunk) for chunk in self.chunks]
        if any(begin is None or chunk.is_opaque for begin, chunk in runs):
            return None
        crc = 0
        for _, chunk in sorted(runs, key=lambda run: run[0] or 0):
            crc = combine_crc32c(crc, self.crc(chunk), chunk.payload_bytes)
        return crc

    def text(self, chunk: ChunkEntry) -> str:
        archive = f"{chunk.payload_bytes} pickled bytes, " if chunk.is_opaque else ""
        return f"{archive}{_crc_text(self.crc(chunk))} at {list(chunk.offsets)}"


def run_begin(whole: Sequence[int], chunk: ChunkEntry) -> int | None:
    """Return at which row-major element of the whole a chunk begins; None if it is not one run of them."""
    dims = len(whole)
    cut = next((dim for dim in range(dims) if chunk.sizes[dim] != 1), dims)
    if any(chunk.sizes[dim] != whole[dim] for dim in range(cut + 1, dims)):
        return None
    return sum(offset * stride for offset, stride in zip(chunk.offsets, strides_of(whole), strict=True))


def _compare_alike(one: _Chunks, other: _Chunks) -> Verdict:
    """Compare two tensors that are cut into the same boxes."""
    verdict: Verdict = None
    for first, second in zip(one.chunks, other.chunks, strict=True):
        if first.is_opaque != second.is_opaque:
            verdict = Undecided()
        elif (difference := _verdict(one.text(first), other.text(second))) is not None:
            return difference
    return verdict


def _verdict(first: str, second: str) -> Difference | None:
    return None if first == second else Difference(first, second)


def _crc_text(crc: int) -> str:
    return f"CRC-32C {crc:08x}"
