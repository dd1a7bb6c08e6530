"""What an index holds, as values: tensors with their chunks, other values, and what DCP must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPAQUE = -1
"""``payload_offset`` of what ``torch.save`` wrote whole."""


# Chunks are made by the million: a frozen dataclass would take three times as long to make.
@dataclass(slots=True)
class ChunkEntry:
    """A box of a tensor and where it lies. Not to be changed.

    Args:
        offsets: Where the box begins in the whole tensor, one number per dimension.
        sizes: The box's shape.
        object: Position of its data object in :attr:`Index.objects`.
        archive_offset: First byte, in the object, of the archive that ``torch.load`` reads.
        archive_bytes: Length of that archive.
        payload_offset: First byte, in the object, of the raw row-major elements; -1 where the archive is
            opaque, as ``torch.save`` wrote it for anything but a plain dense tensor.
        payload_bytes: Length of the raw elements, or of the whole archive where that is opaque.
        crcs: CRC-32C, little-endian uint32, of each block of the payload (or of the opaque archive).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    object: int
    archive_offset: int
    archive_bytes: int
    payload_offset: int
    payload_bytes: int
    crcs: bytes

    @property
    def is_opaque(self) -> bool:
        """Whether only ``torch.load`` can say where in the archive the elements are."""
        return self.payload_offset == OPAQUE


@dataclass(slots=True)
class TensorEntry:
    """One tensor of the state: what DCP's ``TensorStorageMetadata`` says, and its chunks.

    ``dtype``, ``layout`` and ``memory_format`` are torch's names without ``torch.``.
    """

    dtype: str
    sizes: tuple[int, ...]
    requires_grad: bool = False
    layout: str = "strided"
    memory_format: str = "contiguous_format"
    pin_memory: bool = False
    chunks: list[ChunkEntry] = field(default_factory=list)


@dataclass(slots=True)
class BytesEntry:
    """One value of the state that is no tensor, as DCP serialised it.

    Args:
        object: Position of its data object in :attr:`Index.objects`.
        offset: First byte in the object.
        length_bytes: Length in bytes.
        crcs: CRC-32C, little-endian uint32, of each block.
        pickle_safe: Whether ``torch.load(weights_only=True)`` reads it; None where that was not tried.
    """

    object: int
    offset: int
    length_bytes: int
    crcs: bytes
    pickle_safe: bool | None = None


@dataclass(slots=True)
class Index:
    """All tensors and other values of one save.

    Args:
        save_id: The save whose manifest names this index.
        block_bytes: Bytes covered by one checksum.
        objects: Keys of the data objects, relative to the checkpoint.
        tensors: By fully qualified name.
        blobs: By fully qualified name.
        planner_data: DCP's, where :func:`~remote_ckpt.tagged.is_encodable` allows it.
        has_foreign_planner_data: There was planner data of other types, which was left out.
        dcp_version: Version string of DCP's metadata.
        storage_meta: Further facts as JSON.
    """

    save_id: str
    block_bytes: int
    objects: list[str]
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    blobs: dict[str, BytesEntry] = field(default_factory=dict)
    planner_data: Any = None
    has_foreign_planner_data: bool = False
    dcp_version: str | None = None
    storage_meta: Mapping[str, Any] = field(default_factory=dict)
