"""DCP's ``Metadata`` to and from our index and manifest, without pickle on our side."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from remote_ckpt.coverage import cover_problem
from remote_ckpt.dcp.nesting import require_paths
from remote_ckpt.dcp.objects import StoredItem
from remote_ckpt.dcp.payload import dtype_name, dtype_of
from remote_ckpt.errors import CheckpointDamagedError, FormatError, SaveFailedError
from remote_ckpt.index import BytesEntry, ChunkEntry, Index, TensorEntry
from remote_ckpt.tagged import is_encodable

_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}

ItemKey = tuple[str, tuple[int, ...] | None]
"""A fully qualified name, and a chunk's offsets in the whole tensor (None for anything but a tensor)."""


def item_key(index: MetadataIndex) -> ItemKey:
    """Return what tells items apart: DCP's hint is left out."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


def build_index(
    metadata: Metadata,
    stored: Mapping[ItemKey, StoredItem],
    *,
    objects: Sequence[str],
    save_id: str,
    block_bytes: int,
    url: str,
) -> Index:
    """Make the index of a save from the planner's metadata and what the ranks wrote.

    Raises:
        SaveFailedError: A chunk of the plan was written by no rank, or as another dtype than the plan's;
            or the chunks of a tensor do not cover it once.
    """
    positions = {key: position for position, key in enumerate(objects)}
    tensors: dict[str, TensorEntry] = {}
    blobs: dict[str, BytesEntry] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            item = _stored(stored, (fqn, None), url)
            blobs[fqn] = BytesEntry(
                object=positions[item.key],
                offset=item.archive_offset,
                length_bytes=item.archive_bytes,
                crcs=item.crcs,
                pickle_safe=not item.needs_trust,
            )
        else:
            tensors[fqn] = _tensor_entry(fqn, entry, stored, positions, url)
    encodable = is_encodable(metadata.planner_data)
    return Index(
        save_id=save_id,
        block_bytes=block_bytes,
        objects=list(objects),
        tensors=tensors,
        blobs=blobs,
        planner_data=metadata.planner_data if encodable else None,
        has_foreign_planner_data=not encodable,
        dcp_version=CURRENT_DCP_VERSION,
        storage_meta={"save_id": save_id},
    )


def _tensor_entry(
    fqn: str,
    entry: TensorStorageMetadata,
    stored: Mapping[ItemKey, StoredItem],
    positions: Mapping[str, int],
    url: str,
) -> TensorEntry:
    properties = entry.properties
    dtype = dtype_name(properties.dtype)
    items = [_stored(stored, (fqn, tuple(chunk.offsets)), url) for chunk in entry.chunks]
    _check_tensor(fqn, entry, dtype, items, url)
    return TensorEntry(
        dtype=dtype,
        sizes=tuple(entry.size),
        requires_grad=properties.requires_grad,
        layout=str(properties.layout).removeprefix("torch."),
        memory_format=str(properties.memory_format).removeprefix("torch."),
        pin_memory=properties.pin_memory,
        chunks=[
            _chunk_entry(chunk, item, positions) for chunk, item in zip(entry.chunks, items, strict=True)
        ],
    )


def _check_tensor(
    fqn: str, entry: TensorStorageMetadata, dtype: str, items: Sequence[StoredItem], url: str
) -> None:
    others = {item.dtype for item in items} - {dtype, ""}
    if others:
        raise SaveFailedError(f"{fqn} is planned as {dtype}, but ranks hold {', '.join(others)}", url=url)
    offsets = [tuple(chunk.offsets) for chunk in entry.chunks]
    sizes = [tuple(chunk.sizes) for chunk in entry.chunks]
    if problem := cover_problem(tuple(entry.size), offsets, sizes):
        raise SaveFailedError(
            f"{fqn} of shape {list(entry.size)} cannot be saved: {problem}. All ranks that hold a part of it "
            "must take part in the save, each part under its own offsets",
            url=url,
        )


def _chunk_entry(chunk: ChunkStorageMetadata, item: StoredItem, positions: Mapping[str, int]) -> ChunkEntry:
    return ChunkEntry(
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        object=positions[item.key],
        archive_offset=item.archive_offset,
        archive_bytes=item.archive_bytes,
        payload_offset=item.payload_offset,
        payload_bytes=item.payload_bytes,
        crcs=item.crcs,
    )


def _stored(stored: Mapping[ItemKey, StoredItem], key: ItemKey, url: str) -> StoredItem:
    try:
        return stored[key]
    except KeyError:
        raise SaveFailedError(
            f"no rank wrote {key[0]} at offsets {key[1]}, which the plan says is part of it", url=url
        ) from None


def content_digest(index: Index) -> str:
    """Return a digest of what was saved: names, shapes, dtypes and checksums, not where it lies."""
    digest = hashlib.sha256()
    for fqn in sorted(index.tensors):
        tensor = index.tensors[fqn]
        digest.update(repr((fqn, tensor.dtype, tensor.sizes)).encode())
        for chunk in sorted(tensor.chunks, key=lambda one: one.offsets):
            digest.update(repr((chunk.offsets, chunk.sizes)).encode() + chunk.crcs)
    for fqn in sorted(index.blobs):
        digest.update(repr((fqn, index.blobs[fqn].length_bytes)).encode() + index.blobs[fqn].crcs)
    return f"sha256:{digest.hexdigest()}"


def stock_metadata(
    metadata: Metadata, stored: Mapping[ItemKey, StoredItem], *, url: str, save_id: str
) -> bytes:
    """Return the pickled ``.metadata`` for stock readers. The given metadata is left as it is.

    With plan caching torch hands the same object to later saves, so it must not be written to.
    """
    places = {
        MetadataIndex(fqn, offset): _StorageInfo(item.key, item.archive_offset, item.archive_bytes)
        for (fqn, offset), item in stored.items()
    }
    complete = dataclasses.replace(
        metadata,
        storage_data=places,
        storage_meta=StorageMeta(checkpoint_id=url, save_id=save_id),
        version=CURRENT_DCP_VERSION,
    )
    stream = io.BytesIO()
    pickle.dump(complete, stream, protocol=4)
    return stream.getvalue()


def rebuild_metadata(index: Index, *, url: str) -> Metadata:
    """Return DCP's metadata from an index; ``storage_data`` stays empty, the reader keeps the index.

    Raises:
        FormatError: The checkpoint has a dtype that this torch does not know.
        CheckpointDamagedError: Its planner data would make lists that nobody saved.
    """
    _check_paths(index, url)
    entries: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in index.blobs}
    for fqn, tensor in index.tensors.items():
        try:
            entries[fqn] = _storage_metadata(tensor)
        except ValueError as error:
            raise FormatError(f"cannot read {fqn}: {error}", url=url) from error
    return Metadata(
        state_dict_metadata=entries,
        planner_data=index.planner_data,
        storage_data={},
        storage_meta=StorageMeta(checkpoint_id=url, save_id=index.save_id),
        version=index.dcp_version,
    )


def _check_paths(index: Index, url: str) -> None:
    """Check what torch's own planner will make nested values from; other planners' data is theirs to read."""
    if not isinstance(index.planner_data, dict):
        return
    try:
        require_paths({name: path for name, path in index.planner_data.items() if isinstance(path, tuple)})
    except ValueError as error:
        raise CheckpointDamagedError(f"the index holds impossible paths: {error}", url=url) from error


def _storage_metadata(tensor: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(
            dtype=dtype_of(tensor.dtype),
            layout=getattr(torch, tensor.layout, torch.strided),
            requires_grad=tensor.requires_grad,
            memory_format=_MEMORY_FORMATS.get(tensor.memory_format, torch.contiguous_format),
            pin_memory=tensor.pin_memory,
        ),
        size=torch.Size(tensor.sizes),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in tensor.chunks
        ],
    )
