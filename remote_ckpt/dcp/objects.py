"""Data objects of a save: what goes into which object, and its bytes with their checksums.

A data object is a row of ``torch.save`` archives, which is what stock DCP readers expect at the
offsets that ``.metadata`` names. Archives of plain tensors are framed around the tensor's own memory
(:mod:`remote_ckpt.archive`); everything else goes through ``torch.save`` whole.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from remote_ckpt.archive import SUPPORTED_DTYPES, TensorFrame, frame_tensor
from remote_ckpt.checksum import combine_crc32c, crc32c
from remote_ckpt.dcp.payload import dtype_name, is_plain, payload_windows
from remote_ckpt.errors import SaveFailedError
from remote_ckpt.manifest import ObjectEntry
from remote_ckpt.options import MiB, TransferOptions
from remote_ckpt.store.base import Buffer

ALIGN_BYTES = 64
"""Archives begin at multiples of this, so that payloads are aligned in the object too."""
STREAM_BYTES = 64 * MiB
"""An object is worth a parallel stream of its own from this size on."""
MAX_STREAMS = 4
"""Objects written side by side by one rank, where size does not demand more."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Where one item of the plan was written, and its checksums; travels to the coordinator.

    Args:
        key: The data object, relative to the checkpoint.
        archive_offset: First byte of the item's archive in the object.
        archive_bytes: Length of the archive.
        payload_offset: First byte of the raw elements in the object; -1 where ``torch.save`` wrote them.
        payload_bytes: Length of what ``crcs`` cover: the payload, or the whole archive.
        crcs: CRC-32C of each block, little-endian uint32.
        unsafe_globals: Classes that loading this item will ask trust for.
    """

    key: str
    archive_offset: int
    archive_bytes: int
    payload_offset: int
    payload_bytes: int
    crcs: bytes
    unsafe_globals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """A write item with its exact size: framed around a tensor's memory, or serialised already."""

    item: WriteItem
    frame: TensorFrame | None
    archive: memoryview | None
    unsafe_globals: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        if self.frame is not None:
            return self.frame.total_bytes
        assert self.archive is not None  # one of the two, by construction
        return len(self.archive)


class BlockCrc:
    """CRC-32C per fixed block of a stream that comes in chunks of any size."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._filled = 0
        self._crc = 0
        self.crcs: list[int] = []
        self.lengths: list[int] = []

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        start = 0
        while start < len(data):
            end = min(len(data), start + self._block_bytes - self._filled)
            self._crc = crc32c(data[start:end], self._crc)
            self._filled += end - start
            start = end
            if self._filled == self._block_bytes:
                self.finish()

    def finish(self) -> None:
        """Close the last, shorter block."""
        if self._filled:
            self.crcs.append(self._crc)
            self.lengths.append(self._filled)
            self._filled = self._crc = 0

    def packed(self) -> bytes:
        """All blocks' checksums, little-endian uint32."""
        return struct.pack(f"<{len(self.crcs)}I", *self.crcs)


def prepare_item(item: WriteItem, planner: SavePlanner) -> PreparedItem:
    """Find out how an item is stored and how long its archive is.

    A plain tensor is looked at and let go again: its bytes are resolved when they are sent, so that
    a planner which converts holds one tensor at a time.
    """
    from remote_ckpt.dcp.pickles import unsafe_globals

    value = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(value, io.BytesIO)  # SavePlanner's contract for BYTE_IO
        return PreparedItem(item, None, value.getbuffer(), tuple(unsafe_globals(value)))
    assert isinstance(value, torch.Tensor)  # SavePlanner's contract for tensors
    if value.device.type == "meta":
        raise SaveFailedError(f"{item.index.fqn} is on the meta device: it has no values to save")
    name = dtype_name(value.dtype)
    if is_plain(value) and name in SUPPORTED_DTYPES:
        payload_bytes = math.prod(value.shape) * SUPPORTED_DTYPES[name]
        return PreparedItem(item, frame_tensor(name, tuple(value.shape), payload_bytes), None)
    stream = io.BytesIO()
    torch.save(value.detach().cpu(), stream)
    return PreparedItem(item, None, stream.getbuffer(), tuple(unsafe_globals(stream)))


def plan_objects(sizes: Sequence[int], *, max_object_bytes: int) -> list[list[int]]:
    """Spread items over objects: few, of similar size, none above ``max_object_bytes`` unless one item is.

    Returns:
        For each object the positions of its items, in the order of the plan.
    """
    total_bytes = sum(sizes)
    count = max(1, min(MAX_STREAMS, total_bytes // STREAM_BYTES), math.ceil(total_bytes / max_object_bytes))
    groups: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for position in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        lightest = min(range(len(groups)), key=filled.__getitem__)
        if filled[lightest] and filled[lightest] + sizes[position] > max_object_bytes:
            groups.append([])
            filled.append(0)
            lightest = len(groups) - 1
        groups[lightest].append(position)
        filled[lightest] += sizes[position]
    return [sorted(group) for group in groups if group]


@dataclass(slots=True)
class DataObject:
    """One data object to be: its items laid out, its bytes on demand, its checksums once they were read.

    Args:
        key: Relative to the checkpoint.
        items: What it holds, in order.
        planner: Resolves tensors when their bytes are due.
        transfer: ``block_bytes`` and ``part_bytes`` are used.
    """

    key: str
    items: Sequence[PreparedItem]
    planner: SavePlanner
    transfer: TransferOptions
    offsets: list[int] = field(init=False)
    size_bytes: int = field(init=False)
    _crc: int = field(init=False, default=0)
    _block_crcs: list[bytes] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.offsets = []
        end = 0
        for item in self.items:
            start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            self.offsets.append(start)
            end = start + item.size_bytes
        self.size_bytes = end

    def chunks(self) -> Iterator[Buffer]:
        """Yield the object's bytes from the beginning, computing the checksums anew."""
        self._crc = 0
        self._block_crcs = []
        end = 0
        for item, start in zip(self.items, self.offsets, strict=True):
            yield from self._plain(bytes(start - end))
            if item.frame is None:
                assert item.archive is not None
                yield from self._checked(iter((item.archive,)), len(item.archive))
            else:
                yield from self._plain(item.frame.head)
                yield from self._checked(self._payload(item), item.frame.payload_bytes)
                yield from self._plain(item.frame.tail)
            end = start + item.size_bytes

    def entry(self) -> ObjectEntry:
        """The object's line in the manifest; valid after the bytes were read."""
        return ObjectEntry(key=self.key, size_bytes=self.size_bytes, crc32c=self._crc)

    def stored_items(self) -> Iterator[tuple[WriteItem, StoredItem]]:
        """Each item with where it lies; valid after the bytes were read."""
        for item, start, crcs in zip(self.items, self.offsets, self._block_crcs, strict=True):
            frame = item.frame
            yield (
                item.item,
                StoredItem(
                    key=self.key,
                    archive_offset=start,
                    archive_bytes=item.size_bytes,
                    payload_offset=-1 if frame is None else start + len(frame.head),
                    payload_bytes=item.size_bytes if frame is None else frame.payload_bytes,
                    crcs=crcs,
                    unsafe_globals=item.unsafe_globals,
                ),
            )

    def _plain(self, data: bytes) -> Iterator[bytes]:
        if data:
            self._crc = crc32c(data, self._crc)
            yield data

    def _payload(self, item: PreparedItem) -> Iterator[memoryview]:
        value = self.planner.resolve_data(item.item)
        assert isinstance(value, torch.Tensor)  # SavePlanner's contract for tensors
        assert item.frame is not None
        if value.numel() * value.element_size() != item.frame.payload_bytes:
            raise SaveFailedError(f"{item.item.index.fqn} changed its size while it was saved")
        return payload_windows(value, window_bytes=self.transfer.part_bytes)

    def _checked(self, windows: Iterator[memoryview], total_bytes: int) -> Iterator[memoryview]:
        """Pass bytes on, keeping their block checksums and the object's own."""
        blocks = BlockCrc(self.transfer.block_bytes)
        is_small = total_bytes < self.transfer.block_bytes
        for window in windows:
            blocks.update(window)
            if is_small:
                self._crc = crc32c(window, self._crc)
            yield window
        blocks.finish()
        if not is_small:
            for crc, length in zip(blocks.crcs, blocks.lengths, strict=True):
                self._crc = combine_crc32c(self._crc, crc, length)
        self._block_crcs.append(blocks.packed())
