"""Where the items of a checkpoint lie: looked up in our index, or in a stock checkpoint's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from remote_ckpt.dcp.metadata import ItemKey, item_key
from remote_ckpt.dcp.payload import dtype_of
from remote_ckpt.errors import CheckpointDamagedError, FormatError
from remote_ckpt.index import Index


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
