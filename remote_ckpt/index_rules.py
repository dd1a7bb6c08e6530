"""What must hold in an index, whoever made it. Pure; every violation is an InvalidError."""

from __future__ import annotations

import math

from remote_ckpt.archive import SUPPORTED_DTYPES
from remote_ckpt.checksum import CRC_BYTES, count_blocks
from remote_ckpt.coverage import cover_problem
from remote_ckpt.entries import OPAQUE, BytesEntry, ChunkEntry, Index, TensorEntry
from remote_ckpt.fields import MAX_COUNT, InvalidError, require
from remote_ckpt.keys import is_save_id

MAX_DIMS = 512
"""Most dimensions of a tensor; most functions of torch allow 64."""


def check_index(index: Index) -> None:
    """Check all entries of an index; linear in its size."""
    require(is_save_id(index.save_id), "save_id: not one")
    require(len(index.objects) == len(set(index.objects)), "objects: the same key twice")
    for name, tensor in index.tensors.items():
        _check_tensor(name, tensor, index)
    for name, blob in index.blobs.items():
        if problem := _blob_problem(blob, index):
            raise InvalidError(f"value {name!r}: {problem}")


def _check_tensor(name: str, tensor: TensorEntry, index: Index) -> None:
    require(math.prod(tensor.sizes) <= MAX_COUNT, f"tensor {name!r}: too many elements")
    item_bytes = SUPPORTED_DTYPES.get(tensor.dtype)
    for chunk in tensor.chunks:
        if problem := _box_problem(chunk, tensor) or _place_problem(chunk, index, item_bytes):
            raise InvalidError(f"tensor {name!r}, chunk at {list(chunk.offsets)}: {problem}")
    boxes = [chunk.offsets for chunk in tensor.chunks], [chunk.sizes for chunk in tensor.chunks]
    if problem := cover_problem(tensor.sizes, *boxes):
        raise InvalidError(f"tensor {name!r}: {problem}")


def _box_problem(chunk: ChunkEntry, tensor: TensorEntry) -> str | None:
    if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.sizes):
        return "not of the tensor's dimensions"
    for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.sizes, strict=True):
        if not (offset >= 0 and size >= 0 and offset + size <= whole):
            return "outside the tensor"
    return None


def _place_problem(chunk: ChunkEntry, index: Index, item_bytes: int | None) -> str | None:
    archive_end = chunk.archive_offset + chunk.archive_bytes
    if not 0 <= chunk.object < len(index.objects):
        return "in no object"
    if chunk.archive_offset < 0 or chunk.archive_bytes < 1:
        return "an archive of no bytes"
    if chunk.payload_offset == OPAQUE:
        if chunk.payload_bytes != chunk.archive_bytes:
            return "an opaque archive whose checksums do not cover it"
    elif (
        chunk.payload_offset < chunk.archive_offset
        or chunk.payload_offset + chunk.payload_bytes > archive_end
    ):
        return "its payload is not inside its archive"
    elif item_bytes is None:
        return "raw elements of a dtype that has none"
    elif chunk.payload_bytes != math.prod(chunk.sizes) * item_bytes:
        return "its payload does not fit dtype and shape"
    return _crc_problem(chunk.crcs, chunk.payload_bytes, index.block_bytes)


def _blob_problem(blob: BytesEntry, index: Index) -> str | None:
    if not 0 <= blob.object < len(index.objects):
        return "in no object"
    if blob.offset < 0 or blob.length_bytes < 0:
        return "at no place"
    return _crc_problem(blob.crcs, blob.length_bytes, index.block_bytes)


def _crc_problem(crcs: bytes, covered_bytes: int, block_bytes: int) -> str | None:
    if len(crcs) != count_blocks(covered_bytes, block_bytes) * CRC_BYTES:
        return "a wrong number of checksums"
    return None
