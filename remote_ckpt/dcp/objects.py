"""Data objects of a save: what goes into which object, and its bytes with their checksums.

A data object is a row of ``torch.save`` archives, which is what stock DCP readers expect at the
offsets that ``.metadata`` names. Archives of plain tensors are framed around the tensor's own memory
(:mod:`remote_ckpt.archive`); everything else goes through ``torch.save`` whole.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.planner import WriteItem

from remote_ckpt.checksum import combine_crc32c, crc32c
from remote_ckpt.dcp.values import PlanValues, PreparedItem
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
        dtype: Name of the raw elements' dtype; empty where ``torch.save`` wrote them.
        needs_trust: Why safe loading refuses it (names of classes); empty if it does not.
    """

    key: str
    archive_offset: int
    archive_bytes: int
    payload_offset: int
    payload_bytes: int
    crcs: bytes
    dtype: str = ""
    needs_trust: tuple[str, ...] = ()


class BlockCrc:
    """CRC-32C per fixed block of a stream that comes in chunks of any size."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._filled = 0
        self._crc = 0
        self.crcs: list[int] = []
        self.lengths: list[int] = []

    def update(self, data: Buffer) -> None:
        """Take the next bytes."""
        data = memoryview(data)
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


def plan_objects(
    sizes: Sequence[int], *, max_object_bytes: int, max_streams: int = MAX_STREAMS
) -> list[list[int]]:
    """Spread items over objects: few, of similar size, none above ``max_object_bytes`` unless one item is.

    Args:
        sizes: Bytes of each item.
        max_object_bytes: Size from which another object is begun.
        max_streams: Most objects, where size does not demand more.

    Returns:
        For each object the positions of its items, in the order of the plan.
    """
    total_bytes = sum(sizes)
    count = max(1, min(max_streams, total_bytes // STREAM_BYTES), math.ceil(total_bytes / max_object_bytes))
    groups: list[list[int]] = [[] for _ in range(count)]
    by_filling = [(0, number) for number in range(count)]  # a heap: there may be as many objects as items
    for position in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        filled_bytes, lightest = by_filling[0]
        if filled_bytes and filled_bytes + sizes[position] > max_object_bytes:
            groups.append([position])
            heapq.heappush(by_filling, (sizes[position], len(groups) - 1))
        else:
            groups[lightest].append(position)
            heapq.heapreplace(by_filling, (filled_bytes + sizes[position], lightest))
    return [sorted(group) for group in groups if group]


def group_items(items: Sequence[PreparedItem], *, max_object_bytes: int) -> Iterator[list[PreparedItem]]:
    """Spread items over objects; what is staged is kept apart, in as few objects as size allows."""
    for is_staged, max_streams in ((False, MAX_STREAMS), (True, 1)):
        chosen = [item for item in items if item.is_staged == is_staged]
        sizes = [item.size_bytes for item in chosen]
        for group in plan_objects(sizes, max_object_bytes=max_object_bytes, max_streams=max_streams):
            yield [chosen[one] for one in group]


@dataclass(slots=True)
class DataObject:
    """One data object to be: its items laid out, its bytes on demand, its checksums once they were read.

    Args:
        key: Relative to the checkpoint.
        items: What it holds, in order.
        values: Gives their bytes when they are due.
        transfer: ``block_bytes`` and ``part_bytes`` are used.
    """

    key: str
    items: Sequence[PreparedItem]
    values: PlanValues
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
        self.size_bytes = max(end, 1)  # no object is empty: some stores cannot hold one

    @property
    def is_staged(self) -> bool:
        """Whether it must be written while no other object of this rank is."""
        return any(item.is_staged for item in self.items)

    def chunks(self) -> Iterator[Buffer]:
        """Yield the object's bytes from the beginning, computing the checksums anew."""
        self._crc = 0
        self._block_crcs = []
        end = 0
        for item, start in zip(self.items, self.offsets, strict=True):
            yield from self._plain(bytes(start - end))
            frame = item.frame
            yield from self._plain(b"" if frame is None else frame.head)
            yield from self._checked(self.values.windows(item), _checked_bytes(item))
            yield from self._plain(b"" if frame is None else frame.tail)
            end = start + item.size_bytes
        yield from self._plain(bytes(self.size_bytes - end))

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
                    payload_bytes=_checked_bytes(item),
                    crcs=crcs,
                    dtype=item.dtype,
                    needs_trust=item.needs_trust,
                ),
            )

    def _plain(self, data: bytes) -> Iterator[bytes]:
        if data:
            self._crc = crc32c(data, self._crc)
            yield data

    def _checked(self, windows: Iterator[Buffer], total_bytes: int) -> Iterator[Buffer]:
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


def _checked_bytes(item: PreparedItem) -> int:
    return item.size_bytes if item.frame is None else item.frame.payload_bytes
