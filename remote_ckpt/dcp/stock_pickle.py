"""DCP's pickled ``.metadata`` file as DCP's own classes, without unpickling it.

:mod:`remote_ckpt.stock_contents` parses the pickle as inert data and checks it field by field; only then
are DCP's classes made, by their own constructors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from remote_ckpt.collector import collector_paused
from remote_ckpt.dcp.nesting import ObjectPath, require_paths
from remote_ckpt.dcp.payload import dtype_of
from remote_ckpt.stock_contents import (
    StockChunk,
    StockMeta,
    StockMetadata,
    StockPlace,
    StockProperties,
    StockTensor,
    parse_stock_contents,
    stock_errors,
)

T = TypeVar("T")

_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}


def parse_stock_metadata(data: bytes, *, url: str, key: str) -> Metadata:
    """Read a stock DCP ``.metadata`` file without running anything that it says.

    Raises:
        UntrustedDataError: It refers to anything that such files do not hold.
        CheckpointDamagedError: It is no such file, is cut, or its values are not of the right kind; or a
            tensor has a dtype that this torch does not know.
    """
    contents = parse_stock_contents(data, url=url, key=key)
    with stock_errors(url=url, key=key), collector_paused():
        return _Builder().metadata(contents)


class _Builder:
    """Makes DCP's values. What several tensors share is made once, and shared again."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def metadata(self, contents: StockMetadata) -> Metadata:
        return Metadata(
            state_dict_metadata={name: self._entry(entry) for name, entry in contents.entries.items()},
            planner_data=_paths(contents.planner_data),
            storage_data={
                _index(name, offset): _storage_info(place)
                for (name, offset), place in contents.places.items()
            },
            storage_meta=_storage_meta(contents.storage_meta),
            version=contents.version,
        )

    def _entry(self, entry: StockTensor | None) -> BytesStorageMetadata | TensorStorageMetadata:
        if entry is None:
            return BytesStorageMetadata()
        return TensorStorageMetadata(
            properties=self._once(entry.properties, _properties),
            size=torch.Size(entry.sizes),
            chunks=self._once(entry.chunks, _chunks),
        )

    def _once(self, source: Any, make: Callable[[Any], T]) -> T:
        if id(source) not in self._made:
            self._made[id(source)] = make(source)
        made: T = self._made[id(source)]
        return made


def _properties(properties: StockProperties) -> TensorProperties:
    return TensorProperties(
        dtype=dtype_of(properties.dtype),
        layout=_LAYOUTS.get(f"torch.{properties.layout}", torch.strided),
        requires_grad=properties.requires_grad,
        memory_format=getattr(torch, properties.memory_format),
        pin_memory=properties.pin_memory,
    )


def _paths(value: Any) -> dict[str, ObjectPath] | None:
    if value is None:
        return None
    if type(value) is not dict:
        raise ValueError(f"planner data of type {type(value).__name__}")
    require_paths(value)
    return value


def _chunks(chunks: list[StockChunk]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks]


def _index(name: str, offset: tuple[int, ...] | None) -> MetadataIndex:
    return MetadataIndex(name, None if offset is None else torch.Size(offset))


def _storage_info(place: StockPlace) -> _StorageInfo:
    info = _StorageInfo(place.key, place.offset_bytes, place.length_bytes)
    if place.transforms is not None:
        info.transform_descriptors = place.transforms
    return info


def _storage_meta(meta: StockMeta | None) -> StorageMeta | None:
    return None if meta is None else StorageMeta(meta.checkpoint_id, meta.save_id, meta.load_id)


__all__ = ["parse_stock_metadata"]
