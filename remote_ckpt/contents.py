"""What one checkpoint holds, without reading it and without torch: tensors, other values, and their places.

From the index of a checkpoint of ours, or the ``.metadata`` of a stock DCP one. A plain ``checkpoint.pth``
has neither. An index of 100,000 tensors takes about 3 s of CPU, a stock ``.metadata`` some 15 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from remote_ckpt.archive import SUPPORTED_DTYPES
from remote_ckpt.collector import collector_paused
from remote_ckpt.entries import BytesEntry, ChunkEntry, Index, TensorEntry
from remote_ckpt.newest import CheckpointKind
from remote_ckpt.snapshot import open_snapshot
from remote_ckpt.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInfo:
    """A box of a tensor, and where its bytes lie.

    Args:
        offsets: Where the box begins in the whole tensor, one number per dimension.
        sizes: Its shape.
        key: The object, relative to the checkpoint.
        offset_bytes: First byte in the object.
        length_bytes: Length in bytes.
        is_archive: These bytes are what ``torch.load`` reads, rather than the row-major elements: in stock
            checkpoints, and where only ``torch.save`` can write a tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    key: str
    offset_bytes: int
    length_bytes: int
    is_archive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor.

    Args:
        name: Its fully qualified name.
        shape: Of the whole tensor, whatever the number of ranks.
        dtype: torch's name without ``torch.``, such as ``"bfloat16"``.
        total_bytes: Bytes of all elements; of a dtype of unknown size the bytes that are stored.
        chunks: The boxes that cover it, sorted by their offsets; a tensor without elements may have none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    total_bytes: int
    chunks: tuple[ChunkInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInfo:
    """One value that is no tensor; its bytes are what ``torch.load`` reads.

    Args:
        name: Its fully qualified name.
        key: The object, relative to the checkpoint.
        offset_bytes: First byte in the object.
        length_bytes: Length in bytes.
        is_safe: Whether it loads without trust (``weights_only``); None where that was not tried.
    """

    name: str
    key: str
    offset_bytes: int
    length_bytes: int
    is_safe: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All tensors and values of one checkpoint.

    Args:
        name: The checkpoint's name.
        url: Its URL without secrets.
        kind: ``"remote_ckpt"`` or ``"dcp"``.
        tensors: Sorted by name.
        values: Sorted by name.
    """

    name: str
    url: str
    kind: CheckpointKind
    tensors: tuple[TensorInfo, ...]
    values: tuple[ValueInfo, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors and values, without what is stored around them."""
        tensors = sum(tensor.total_bytes for tensor in self.tensors)
        return tensors + sum(value.length_bytes for value in self.values)


def read_contents(root: Store, name: str) -> Contents:
    """Return what a checkpoint holds. Reads its index only; nothing that it says is executed.

    Args:
        root: The run's directory.
        name: The checkpoint's name.

    Raises:
        CheckpointNotFoundError: There is none, established by a listing that succeeded.
        CheckpointDamagedError, UntrustedDataError: Its manifest, index or ``.metadata`` cannot be read.
        IntegrityError: Its index differs from what was saved.
        FormatError: It is of a newer format, or a plain ``checkpoint.pth``, which would have to be loaded.
        CheckpointChangedError: It was replaced or deleted meanwhile; read again.
        StoreError: The store failed.
    """
    with open_snapshot(root, name) as snapshot, collector_paused():
        index = snapshot.read_index()
        return Contents(
            name=name,
            url=snapshot.url,
            kind=snapshot.kind,
            tensors=tuple(_tensor(fqn, index.tensors[fqn], index) for fqn in sorted(index.tensors)),
            values=tuple(_value(fqn, index.blobs[fqn], index) for fqn in sorted(index.blobs)),
        )


def _tensor(name: str, entry: TensorEntry, index: Index) -> TensorInfo:
    chunks = sorted(entry.chunks, key=lambda chunk: chunk.offsets)
    item_bytes = SUPPORTED_DTYPES.get(entry.dtype)
    stored_bytes = sum(chunk.archive_bytes for chunk in chunks)
    return TensorInfo(
        name=name,
        shape=entry.sizes,
        dtype=entry.dtype,
        total_bytes=stored_bytes if item_bytes is None else math.prod(entry.sizes) * item_bytes,
        chunks=tuple(_chunk(chunk, index) for chunk in chunks),
    )


def _chunk(entry: ChunkEntry, index: Index) -> ChunkInfo:
    return ChunkInfo(
        offsets=entry.offsets,
        sizes=entry.sizes,
        key=index.objects[entry.object],
        offset_bytes=entry.archive_offset if entry.is_opaque else entry.payload_offset,
        length_bytes=entry.payload_bytes,
        is_archive=entry.is_opaque,
    )


def _value(name: str, entry: BytesEntry, index: Index) -> ValueInfo:
    return ValueInfo(
        name=name,
        key=index.objects[entry.object],
        offset_bytes=entry.offset,
        length_bytes=entry.length_bytes,
        is_safe=entry.pickle_safe,
    )
