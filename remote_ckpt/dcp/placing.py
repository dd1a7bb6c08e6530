"""From a wanted box of a stored chunk to byte ranges, and from their bytes into a tensor.

A large solid range whose destination is contiguous CPU memory is received straight into it, cut at
checksum blocks. Everything else goes through a buffer, widened to whole blocks so that every byte is
checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from remote_ckpt.checksum import verify_blocks
from remote_ckpt.dcp.boxes import Piece, plan_pieces, strides_of
from remote_ckpt.dcp.payload import byte_view, from_bytes, is_byte_viewable
from remote_ckpt.dcp.sources import StoredRange
from remote_ckpt.errors import IntegrityError
from remote_ckpt.options import MiB, TransferOptions
from remote_ckpt.transfer import Direct, Wanted

DIRECT_BYTES = 1 * MiB
"""Solid ranges shorter than this are cheaper merged with their neighbours than received alone."""


@dataclass(frozen=True, slots=True)
class Box:
    """What is wanted of a stored item.

    Args:
        fqn: Its name, for messages.
        stored: Where it lies.
        offsets: The wanted box's corner within the stored chunk.
        lengths: Its shape.
    """

    fqn: str
    stored: StoredRange
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


@dataclass(slots=True)
class Ranges:
    """Collects the ranges of many boxes; then they are fetched together.

    Args:
        block_bytes: Bytes covered by one checksum.
        transfer: Sizes.
        url: The checkpoint's URL, for messages.
    """

    block_bytes: int
    transfer: TransferOptions
    url: str
    wanted: list[Wanted] = field(default_factory=list)
    direct: list[Direct] = field(default_factory=list)

    def add_whole(self, box: Box, use: Callable[[memoryview], None]) -> None:
        """Ask for a whole item (an archive); ``use`` gets its checked bytes on a worker thread."""
        self._want(box, 0, box.stored.length_bytes, use)

    def add_buffer(self, box: Box, out: memoryview) -> None:
        """Ask for a whole item into ``out``, in parallel parts that are checked where they land."""
        if len(out):
            self._receive(box, 0, out)

    def add_payload(self, box: Box, target: torch.Tensor) -> None:
        """Ask for the elements of a box of raw payload, and put them into ``target`` of its shape."""
        stored = box.stored
        assert stored.dtype is not None  # payloads are tensors'
        pieces = plan_pieces(
            stored.sizes,
            box.offsets,
            box.lengths,
            element_bytes=stored.dtype.itemsize,
            gap_bytes=self.transfer.merge_gap_bytes,
            window_bytes=self.transfer.part_bytes,
        )
        for piece in pieces:
            view = _narrow(target, piece)
            if not piece.is_solid:
                self._pick(box, piece, view)
            elif view.dtype == stored.dtype and is_byte_viewable(view):
                self._receive(box, piece.span_start_bytes, byte_view(view))
            else:
                self._copy_rows(box, piece.span_start_bytes, view)

    def verify(self, box: Box, data: memoryview, start: int) -> None:
        """Check bytes that begin at a block boundary ``start`` of the item; stock ones have no checksums."""
        crcs = box.stored.crcs
        if not crcs:
            return
        first, count = start // self.block_bytes, -(-len(data) // self.block_bytes)
        wrong = verify_blocks(data, crcs[4 * first : 4 * (first + count)], self.block_bytes)
        if wrong is not None:
            offset = box.stored.offset_bytes + (first + wrong) * self.block_bytes
            raise IntegrityError(
                f"{box.fqn} is corrupt: the bytes of {box.stored.key} from {offset} on "
                "differ from what was saved",
                url=self.url,
                key=box.stored.key,
                operation="read",
            )

    def _receive(self, box: Box, start: int, out: memoryview) -> None:
        """Whole blocks go straight into ``out``; short ranges and ragged ends through a buffer."""
        block, end = self.block_bytes, start + len(out)
        first = -(-start // block) * block
        last = end if end == box.stored.length_bytes else end // block * block
        if len(out) < DIRECT_BYTES or first >= last:
            self._want(box, start, len(out), lambda data: _assign(out, data))
            return
        cut = max(block, self.transfer.part_bytes // block * block)
        for offset in range(first, last, cut):
            self._land(box, offset, out[offset - start : min(offset + cut, last) - start])
        for edge_start, edge in ((start, out[: first - start]), (last, out[last - start :])):
            if len(edge):
                self._want(box, edge_start, len(edge), lambda data, edge=edge: _assign(edge, data))  # type: ignore[misc]

    def _land(self, box: Box, offset: int, out: memoryview) -> None:
        stored = box.stored
        check = lambda: self.verify(box, out, offset)  # noqa: E731
        self.direct.append(Direct(stored.key, stored.offset_bytes + offset, out, check))

    def _copy_rows(self, box: Box, start: int, view: torch.Tensor) -> None:
        """A solid run for a destination that is not plain memory of its dtype: some rows at a time."""
        dtype = box.stored.dtype
        assert dtype is not None
        limit = self.transfer.part_bytes
        length = view.numel() * dtype.itemsize
        if length <= limit or view.dim() == 0:
            shape = tuple(view.shape)
            self._want(box, start, length, lambda data: _copy(view, from_bytes(data, dtype, shape)))
            return
        row_bytes = length // view.shape[0]
        if row_bytes > limit:
            for number in range(view.shape[0]):
                self._copy_rows(box, start + number * row_bytes, view[number])
            return
        rows = limit // row_bytes
        for number in range(0, view.shape[0], rows):
            self._copy_rows(box, start + number * row_bytes, view[number : number + rows])

    def _pick(self, box: Box, piece: Piece, view: torch.Tensor) -> None:
        """A span with gaps: take the wanted elements out of it by the chunk's own strides."""
        dtype = box.stored.dtype
        assert dtype is not None
        shape, strides = tuple(view.shape), strides_of(box.stored.sizes)

        def pick(data: memoryview) -> None:
            flat = from_bytes(data, dtype, (len(data) // dtype.itemsize,))
            _copy(view, flat.as_strided(shape, strides))

        self._want(box, piece.span_start_bytes, piece.span_bytes, pick)

    def _want(self, box: Box, start: int, length: int, use: Callable[[memoryview], None]) -> None:
        """Ask for bytes of an item, widened to whole blocks so that they can be checked."""
        stored, block = box.stored, self.block_bytes
        first, last = start, start + length
        if stored.crcs:
            first = start // block * block
            last = min(-(-last // block) * block, stored.length_bytes)

        def sink(data: memoryview) -> None:
            self.verify(box, data, first)
            use(data[start - first : start - first + length])

        self.wanted.append(Wanted(stored.key, stored.offset_bytes + first, last - first, sink))


def _narrow(target: torch.Tensor, piece: Piece) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
        target = target.narrow(dim, offset, length)
    return target


def _assign(out: memoryview, data: memoryview) -> None:
    out[:] = data


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(value)
