"""From a load plan to byte ranges, and from bytes to the planner's tensors.

Rows that a rank wants from a chunk become byte ranges. A large solid range whose destination is
contiguous CPU memory is received straight into it, cut at checksum blocks; everything else goes
through a buffer, widened to whole blocks so that every byte is checked, merged with its neighbours.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from remote_ckpt.checksum import verify_blocks
from remote_ckpt.dcp.boxes import Piece, plan_pieces, strides_of
from remote_ckpt.dcp.metadata import ItemKey, item_key
from remote_ckpt.dcp.payload import byte_view, dtype_name, dtype_of, from_bytes, is_byte_viewable
from remote_ckpt.dcp.pickles import load_pickle
from remote_ckpt.errors import (
    CheckpointDamagedError,
    DtypeMismatchError,
    FormatError,
    IntegrityError,
    ShapeMismatchError,
)
from remote_ckpt.index import Index
from remote_ckpt.options import Options
from remote_ckpt.store.base import Store
from remote_ckpt.transfer import Direct, Wanted, fetch_all

CHECKED_DIRECT_BYTES = 1 << 20
"""Solid ranges shorter than this are cheaper merged with their neighbours than received alone."""


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Where an item's bytes lie.

    Args:
        key: The object.
        offset_bytes: First byte of the payload, or of the whole archive when ``is_archive``.
        length_bytes: Length of that.
        crcs: CRC-32C per block of it; empty for stock checkpoints, which have none.
        is_archive: A ``torch.save`` archive rather than raw elements.
        sizes: Shape of the chunk; empty for non-tensors.
        dtype: Its dtype; None for non-tensors.
    """

    key: str
    offset_bytes: int
    length_bytes: int
    crcs: bytes
    is_archive: bool
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


class Source(Protocol):
    """Finds items of a checkpoint."""

    block_bytes: int

    def find(self, index: MetadataIndex) -> StoredRange:
        """Return where an item lies; raises CheckpointDamagedError if it lies nowhere."""
        ...


class IndexedSource:
    """Items of a checkpoint of ours."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._chunks: dict[str, dict[tuple[int, ...], Any]] = {}
        self.block_bytes = index.block_bytes

    def find(self, index: MetadataIndex) -> StoredRange:
        """Return where an item lies, by name and offsets."""
        fqn, offsets = item_key(index)
        blob = self._index.blobs.get(fqn)
        if blob is not None:
            key = self._index.objects[blob.object]
            return StoredRange(key, blob.offset, blob.length_bytes, blob.crcs, True)
        tensor = self._index.tensors.get(fqn)
        if tensor is None:
            raise CheckpointDamagedError(f"the index has no entry for {fqn}")
        chunks = self._chunks.get(fqn)
        if chunks is None:
            chunks = self._chunks[fqn] = {chunk.offsets: chunk for chunk in tensor.chunks}
        chunk = chunks.get(offsets or (0,) * len(tensor.sizes))
        if chunk is None:
            raise CheckpointDamagedError(f"the index has no chunk of {fqn} at offsets {offsets}")
        is_archive = chunk.payload_offset < 0
        return StoredRange(
            key=self._index.objects[chunk.object],
            offset_bytes=chunk.archive_offset if is_archive else chunk.payload_offset,
            length_bytes=chunk.payload_bytes,
            crcs=chunk.crcs,
            is_archive=is_archive,
            sizes=chunk.sizes,
            dtype=dtype_of(tensor.dtype),
        )


class StockSource:
    """Items of a stock DCP checkpoint: whole archives, without checksums."""

    block_bytes = 1 << 20

    def __init__(self, places: dict[ItemKey, Any], dtypes: dict[str, torch.dtype], url: str) -> None:
        self._places = places
        self._dtypes = dtypes
        self._url = url

    @classmethod
    def from_metadata(cls, metadata: Metadata, *, url: str) -> StockSource:
        """Take the places that stock DCP's file system writers record."""
        places = metadata.storage_data
        if not isinstance(places, dict):
            raise FormatError("this DCP metadata says not where its data lies", url=url)
        dtypes = {
            fqn: entry.properties.dtype
            for fqn, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        return cls({item_key(index): place for index, place in places.items()}, dtypes, url)

    def find(self, index: MetadataIndex) -> StoredRange:
        """Return where an item's archive lies."""
        fqn, offsets = item_key(index)
        place = self._places.get((fqn, offsets))
        if place is None:
            raise CheckpointDamagedError(f"the metadata has no place for {fqn} at {offsets}", url=self._url)
        if getattr(place, "transform_descriptors", None):
            raise FormatError(f"{fqn} was written through stream transforms, which are not supported")
        key = _safe_key(str(place.relative_path), self._url)
        return StoredRange(key, int(place.offset), int(place.length), b"", True, (), self._dtypes.get(fqn))


def _safe_key(key: str, url: str) -> str:
    if key.startswith("/") or any(part in ("", ".", "..") for part in key.split("/")):
        raise CheckpointDamagedError(f"the metadata names an object outside the checkpoint: {key!r}", url=url)
    return key


@dataclass(slots=True)
class ReadJob:
    """Executes one rank's load plan.

    Args:
        source: Where items lie.
        planner: Whose tensors are filled.
        options: Sizes and concurrency.
        is_trusted: Pickles are loaded without limits.
        converts_dtype: Other dtypes are converted rather than refused.
        url: The checkpoint's URL, for messages.
    """

    source: Source
    planner: LoadPlanner
    options: Options
    is_trusted: bool
    converts_dtype: bool
    url: str
    _wanted: list[Wanted] = field(default_factory=list)
    _direct: list[Direct] = field(default_factory=list)
    _finish: list[Callable[[], None]] = field(default_factory=list)

    def run(self, checkpoint: Store, items: Sequence[ReadItem]) -> None:
        """Check everything that can be known beforehand, fetch in parallel, then tell the planner."""
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                self._plan_blob(item)
            else:
                self._plan_tensor(item)
        fetch_all(checkpoint, wanted=self._wanted, direct=self._direct, options=self.options.transfer)
        for finish in self._finish:
            finish()

    # --- Python objects --------------------------------------------------------------------------

    def _plan_blob(self, item: ReadItem) -> None:
        stored = self.source.find(item.storage_index)
        received: list[bytes] = []

        def keep(data: memoryview) -> None:
            self._verify(data, stored, 0, item)
            received[:] = [bytes(data)]

        self._wanted.append(Wanted(stored.key, stored.offset_bytes, stored.length_bytes, keep))
        self._finish.append(lambda: self._load_blob(item, received[0]))

    def _load_blob(self, item: ReadItem, data: bytes) -> None:
        """Hand the planner an archive that is safe to unpickle: torch's own does so without limits."""
        if not self.is_trusted and not getattr(self.planner, "loads_safely", False):
            value = load_pickle(data, is_trusted=False, what=item.storage_index.fqn)
            rewritten = io.BytesIO()
            torch.save(value, rewritten)
            data = rewritten.getvalue()
        self.planner.load_bytes(item, io.BytesIO(data))

    # --- tensors ---------------------------------------------------------------------------------

    def _plan_tensor(self, item: ReadItem) -> None:
        stored = self.source.find(item.storage_index)
        target = self.planner.resolve_tensor(item).detach()
        self._check_fit(item, stored, target)
        if stored.is_archive:
            self._plan_archive(item, stored, target)
        else:
            self._plan_payload(item, stored, target)
        self._finish.append(lambda: self.planner.commit_tensor(item, target))

    def _check_fit(self, item: ReadItem, stored: StoredRange, target: torch.Tensor) -> None:
        fqn = item.storage_index.fqn
        if tuple(target.shape) != tuple(item.lengths):
            raise ShapeMismatchError(
                f"{fqn}: the checkpoint has {tuple(item.lengths)} here, "
                f"the destination {tuple(target.shape)}",
                url=self.url,
            )
        if stored.dtype is not None and target.dtype != stored.dtype and not self.converts_dtype:
            raise DtypeMismatchError(
                f"{fqn} was saved as {dtype_name(stored.dtype)}, the destination is "
                f"{dtype_name(target.dtype)}: pass convert_dtype=True if it is to be converted",
                url=self.url,
            )
        if target.numel() > 1 and any(
            stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)
        ):
            raise ShapeMismatchError(
                f"{fqn}: the destination is an expanded view (stride 0), which cannot hold different "
                "values: pass a tensor with memory of its own",
                url=self.url,
            )

    def _plan_archive(self, item: ReadItem, stored: StoredRange, target: torch.Tensor) -> None:
        def unpack(data: memoryview) -> None:
            self._verify(data, stored, 0, item)
            value = load_pickle(data, is_trusted=self.is_trusted, what=item.storage_index.fqn)
            _copy(target, narrow_tensor_by_index(value, item.storage_offsets, item.lengths))

        self._wanted.append(Wanted(stored.key, stored.offset_bytes, stored.length_bytes, unpack))

    def _plan_payload(self, item: ReadItem, stored: StoredRange, target: torch.Tensor) -> None:
        assert stored.dtype is not None
        transfer = self.options.transfer
        pieces = plan_pieces(
            stored.sizes,
            tuple(item.storage_offsets),
            tuple(item.lengths),
            element_bytes=stored.dtype.itemsize,
            gap_bytes=transfer.merge_gap_bytes,
            window_bytes=transfer.part_bytes,
        )
        for piece in pieces:
            view = _narrow(target, piece)
            is_in_place = piece.is_solid and view.dtype == stored.dtype and is_byte_viewable(view)
            if is_in_place and piece.span_bytes >= CHECKED_DIRECT_BYTES:
                self._plan_in_place(item, stored, piece, byte_view(view))
            elif piece.is_solid and not is_in_place:
                self._plan_windows(item, stored, piece, view)
            elif is_in_place:
                self._plan_bytes(item, stored, piece.span_start_bytes, byte_view(view))
            else:
                self._plan_gaps(item, stored, piece, view)

    def _plan_in_place(self, item: ReadItem, stored: StoredRange, piece: Piece, out: memoryview) -> None:
        """Whole blocks go straight into ``out``; the ragged ends through a buffer."""
        block = self.source.block_bytes
        start, end = piece.span_start_bytes, piece.span_start_bytes + piece.span_bytes
        first = -(-start // block) * block
        last = end if end == stored.length_bytes else end // block * block
        if first >= last:
            self._plan_bytes(item, stored, start, out)
            return
        self._plan_bytes(item, stored, start, out[: first - start])
        cut = max(block, self.options.transfer.part_bytes // block * block)
        for offset in range(first, last, cut):
            self._plan_direct(item, stored, offset, out[offset - start : min(offset + cut, last) - start])
        self._plan_bytes(item, stored, last, out[last - start :])

    def _plan_direct(self, item: ReadItem, stored: StoredRange, offset: int, out: memoryview) -> None:
        def check() -> None:
            self._verify(out, stored, offset, item)

        self._direct.append(Direct(stored.key, stored.offset_bytes + offset, out, check))

    def _plan_bytes(self, item: ReadItem, stored: StoredRange, start: int, out: memoryview) -> None:
        if len(out):
            self._want(item, stored, start, len(out), lambda data: _assign(out, data))

    def _plan_windows(self, item: ReadItem, stored: StoredRange, piece: Piece, view: torch.Tensor) -> None:
        """A solid run for a destination that is not plain memory: a window of rows at a time."""
        dtype = stored.dtype
        assert dtype is not None
        limit = self.options.transfer.part_bytes
        if piece.span_bytes <= limit or view.dim() == 0:
            shape = tuple(view.shape)
            self._want(
                item,
                stored,
                piece.span_start_bytes,
                piece.span_bytes,
                lambda data: _copy(view, from_bytes(data, dtype, shape)),
            )
            return
        row_bytes = piece.span_bytes // view.shape[0]
        rows = max(1, limit // row_bytes)
        for first in range(0, view.shape[0], rows):
            part = view[first : first + rows]
            start = piece.span_start_bytes + first * row_bytes
            length = part.shape[0] * row_bytes
            sub = Piece(piece.offsets, tuple(part.shape), start, length, True)
            self._plan_windows(item, stored, sub, part if length <= limit or part.shape[0] > 1 else part[0])

    def _plan_gaps(self, item: ReadItem, stored: StoredRange, piece: Piece, view: torch.Tensor) -> None:
        """A span with gaps: pick the wanted elements out of it by the chunk's own strides."""
        dtype = stored.dtype
        assert dtype is not None
        strides = strides_of(stored.sizes)
        shape = tuple(view.shape)

        def pick(data: memoryview) -> None:
            flat = from_bytes(data, dtype, (len(data) // dtype.itemsize,))
            _copy(view, flat.as_strided(shape, strides))

        self._want(item, stored, piece.span_start_bytes, piece.span_bytes, pick)

    def _want(
        self,
        item: ReadItem,
        stored: StoredRange,
        start: int,
        length: int,
        use: Callable[[memoryview], None],
    ) -> None:
        """Ask for payload bytes, widened to whole blocks so that they can be checked."""
        block = self.source.block_bytes
        first = start // block * block
        last = min(-(-(start + length) // block) * block, stored.length_bytes)

        def sink(data: memoryview) -> None:
            self._verify(data, stored, first, item)
            use(data[start - first : start - first + length])

        self._wanted.append(Wanted(stored.key, stored.offset_bytes + first, last - first, sink))

    def _verify(self, data: memoryview, stored: StoredRange, start: int, item: ReadItem) -> None:
        """Check bytes that begin at a block boundary ``start`` of the payload."""
        if not stored.crcs:
            return
        block = self.source.block_bytes
        blocks = -(-len(data) // block)
        first = start // block
        wrong = verify_blocks(data, stored.crcs[4 * first : 4 * (first + blocks)], block)
        if wrong is not None:
            offset = stored.offset_bytes + (first + wrong) * block
            raise IntegrityError(
                f"{item.storage_index.fqn} is corrupt: the bytes of {stored.key} from {offset} on "
                "differ from what was saved",
                url=self.url,
                key=stored.key,
                operation="read",
            )


def _narrow(target: torch.Tensor, piece: Piece) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
        target = target.narrow(dim, offset, length)
    return target


def _assign(out: memoryview, data: memoryview) -> None:
    out[:] = data


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(value)
