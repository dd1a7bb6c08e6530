"""Checkpoints of ours made without torch: real framing, real index, committed by the real protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol import OPTIONS, FakeTime

from remote_ckpt.archive import SUPPORTED_DTYPES, frame_tensor
from remote_ckpt.checksum import block_crcs, crc32c
from remote_ckpt.commit import begin_save, commit_save, finish_replacement, open_for_save
from remote_ckpt.index import BytesEntry, ChunkEntry, Index, TensorEntry, format_index
from remote_ckpt.keys import data_key, index_key, new_token, stock_metadata_key
from remote_ckpt.manifest import Manifest, ObjectEntry
from remote_ckpt.store.base import Store
from remote_ckpt.url import parse_step

ALIGN_BYTES = 64


@dataclass(frozen=True)
class Part:
    """A box of a tensor; ``rank`` says in which data object it lies, ``is_opaque`` hides the elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: bytes
    rank: int = 0
    is_opaque: bool = False


@dataclass(frozen=True)
class Value:
    """A value that is no tensor, by the bytes of its pickle."""

    data: bytes
    rank: int = 0


@dataclass(frozen=True)
class Tensor:
    """A tensor, by its parts."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: str = "uint8"


Item = Tensor | Value


def pattern(count: int, seed: int = 0) -> bytes:
    """Bytes in which no two blocks are alike."""
    return bytes((7 * seed + position * 31 + (position >> 8) * 13) & 0xFF for position in range(count))


def whole(shape: Sequence[int], data: bytes, dtype: str = "uint8", rank: int = 0) -> Tensor:
    """A tensor in one chunk."""
    return Tensor(tuple(shape), (Part((0,) * len(shape), tuple(shape), data, rank),), dtype)


def rows(shape: Sequence[int], data: bytes, counts: Sequence[int], dtype: str = "uint8") -> Tensor:
    """A tensor whose first dimension is cut among ranks, as FSDP does."""
    row_bytes = math.prod(shape[1:]) * SUPPORTED_DTYPES[dtype]
    parts, first = [], 0
    for rank, count in enumerate(counts):
        box = (first, *(0 for _ in shape[1:])), (count, *shape[1:])
        parts.append(Part(*box, data[first * row_bytes : (first + count) * row_bytes], rank))
        first += count
    return Tensor(tuple(shape), tuple(parts), dtype)


def columns(shape: tuple[int, int], data: bytes, counts: Sequence[int], dtype: str = "uint8") -> Tensor:
    """A matrix whose columns are cut among ranks, as tensor parallelism does."""
    item_bytes = SUPPORTED_DTYPES[dtype]
    row_bytes = shape[1] * item_bytes
    parts, first = [], 0
    for rank, count in enumerate(counts):
        begin, end = first * item_bytes, (first + count) * item_bytes
        cut = b"".join(data[row * row_bytes + begin : row * row_bytes + end] for row in range(shape[0]))
        parts.append(Part((0, first), (shape[0], count), cut, rank))
        first += count
    return Tensor(shape, tuple(parts), dtype)


@dataclass
class _Object:
    """A data object that grows, and where each part of it lies."""

    key: str
    data: bytearray = field(default_factory=bytearray)

    def add(self, archive: bytes) -> int:
        self.data += bytes(-len(self.data) % ALIGN_BYTES)
        self.data += archive
        return len(self.data) - len(archive)


def write_checkpoint(
    root: Store, name: str, items: Mapping[str, Item], *, block_bytes: int = 4096, overwrite: bool = False
) -> Manifest:
    """Save a checkpoint as the DCP writer lays it out: one data object per rank, one archive per part."""
    checkpoint = open_for_save(root, name, overwrite=overwrite)
    attempt = begin_save(checkpoint, OPTIONS)
    objects = [_Object(data_key(new_token(), rank)) for rank in range(_rank_count(items))]
    index = Index(attempt.save_id, block_bytes, [one.key for one in objects])
    for fqn, item in items.items():
        if isinstance(item, Value):
            offset = objects[item.rank].add(item.data)
            crcs = block_crcs(item.data, block_bytes)
            index.blobs[fqn] = BytesEntry(item.rank, offset, len(item.data), crcs, True)
        else:
            chunks = [_chunk(part, item.dtype, objects, block_bytes) for part in item.parts]
            index.tensors[fqn] = TensorEntry(item.dtype, item.shape, chunks=chunks)
    entries = [_write(checkpoint, one.key, bytes(one.data)) for one in objects]
    stock = f"stock {' '.join(one.key for one in objects)} of {attempt.save_id}".encode()
    manifest = commit_save(
        checkpoint,
        Manifest(
            generation=1,
            save_id=attempt.save_id,
            state="live",
            name=name,
            step=parse_step(name),
            created_at=attempt.began_at,
            committed_at=attempt.began_at,
            world_size=len(objects),
            package_version="0",
            total_bytes=sum(entry.size_bytes for entry in entries),
            objects=tuple(entries),
            index=_write(checkpoint, index_key(attempt.save_id), format_index(index)),
            stock_metadata=_write(checkpoint, stock_metadata_key(attempt.save_id), stock),
            content_digest="",
        ),
        attempt=attempt,
        overwrite=overwrite,
        expected={entry.key: entry.size_bytes for entry in entries},
        waiting=FakeTime().waiting,
    )
    finish_replacement(checkpoint, manifest, stock)
    checkpoint.close()
    return manifest


def _rank_count(items: Mapping[str, Item]) -> int:
    ranks = [item.rank for item in items.values() if isinstance(item, Value)]
    ranks += [part.rank for item in items.values() if isinstance(item, Tensor) for part in item.parts]
    return max(ranks) + 1


def _chunk(part: Part, dtype: str, objects: Sequence[_Object], block_bytes: int) -> ChunkEntry:
    target = objects[part.rank]
    if part.is_opaque:
        start, head, archive = target.add(part.data), None, part.data
    else:
        frame = frame_tensor(dtype, part.sizes, len(part.data))
        archive = frame.head + part.data + frame.tail
        start, head = target.add(archive), len(frame.head)
    return ChunkEntry(
        offsets=part.offsets,
        sizes=part.sizes,
        object=part.rank,
        archive_offset=start,
        archive_bytes=len(archive),
        payload_offset=-1 if head is None else start + head,
        payload_bytes=len(part.data),
        crcs=block_crcs(part.data, block_bytes),
    )


def _write(checkpoint: Store, key: str, data: bytes) -> ObjectEntry:
    checkpoint.write(key, data)
    return ObjectEntry(key, len(data), crc32c(data))
