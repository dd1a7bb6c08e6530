"""DCP's pickled ``.metadata`` file, read without unpickling it.

The pickle is parsed as inert data (:mod:`remote_ckpt.inert_pickle`), checked field by field, and only
then made into DCP's classes by their own constructors. What torch 2.3 to 2.13 write is read; unknown fields
are ignored.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

from remote_ckpt.inert_pickle import MalformedPickleError, Named, Record, parse_pickle
from remote_ckpt.dcp.nesting import ObjectPath, require_paths
from remote_ckpt.errors import CheckpointDamagedError, UntrustedDataError
from remote_ckpt.options import MiB

T = TypeVar("T")

_MAX_BYTES = 1024 * MiB
"""More than DCP needs for four million chunks."""
_MAX_DIMS = 64
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_DCP = "torch.distributed.checkpoint.metadata"
_NAMES: Mapping[str, tuple[str, ...]] = {
    _DCP: (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
"""Every class and function that a DCP ``.metadata`` file refers to, beside dtypes."""

_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
"""By the value of DCP's ``_MEM_FORMAT_ENCODING``."""


def parse_stock_metadata(data: bytes, *, url: str, key: str) -> Metadata:
    """Read a stock DCP ``.metadata`` file without running anything that it says.

    Raises:
        UntrustedDataError: It refers to anything that such files do not hold.
        CheckpointDamagedError: It is no such file, is cut, or its values are not of the right kind.
    """
    try:
        if len(data) > _MAX_BYTES:
            raise MalformedPickleError(f"it has {len(data)} bytes, at most {_MAX_BYTES} are read")
        with _collector_paused():
            return _Builder().metadata(parse_pickle(bytes(data), _named))
    except UntrustedDataError as error:
        raise UntrustedDataError(error.message, url=url, key=key, operation="read metadata") from None
    except (ValueError, OverflowError) as error:
        raise CheckpointDamagedError(f"cannot read DCP metadata: {error}", url=url, key=key) from error


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the cyclic collector from walking millions of new objects again and again: half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _named(module: str, name: str) -> Named:
    is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
    if is_dtype or name in _NAMES.get(module, ()):
        return Named(module, name)
    raise UntrustedDataError(
        f"DCP metadata refers to {module}.{name}, which is not on the list of what such files hold; "
        "it was not executed"
    )


class _Builder:
    """Makes DCP's values out of records. What several places refer to is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Any] = {}

    def metadata(self, root: Any) -> Metadata:
        fields = _fields(root, "Metadata")
        entries = _of_kind(fields.get("state_dict_metadata"), dict)
        places = _of_kind(fields.get("storage_data") or {}, dict)
        return Metadata(
            state_dict_metadata={_text(name): self._entry(entry) for name, entry in entries.items()},
            planner_data=_paths(fields.get("planner_data")),
            storage_data={_index(index): _storage_info(info) for index, info in places.items()},
            storage_meta=_storage_meta(fields.get("storage_meta")),
            version=_optional_text(fields.get("version")),
        )

    def _entry(self, record: Any) -> BytesStorageMetadata | TensorStorageMetadata:
        if type(record) is Record and record.kind.name == "BytesStorageMetadata":
            return BytesStorageMetadata()
        fields = _fields(record, "TensorStorageMetadata")
        return TensorStorageMetadata(
            properties=self._once("properties", fields.get("properties"), _properties),
            size=_size(fields.get("size")),
            chunks=self._once("chunks", fields.get("chunks"), _chunks),
        )

    def _once(self, what: str, source: Any, make: Callable[[Any], T]) -> T:
        """Make a value once, however many entries refer to it: or a small file makes a large result."""
        key = (what, id(source))
        if key not in self._made:
            self._made[key] = make(source)
        made: T = self._made[key]
        return made


def _fields(record: Any, name: str) -> dict[str, Any]:
    """Return the fields of an object of the class of that name."""
    if type(record) is not Record or record.kind.name != name:
        found = record.kind.name if type(record) is Record else type(record).__name__
        raise MalformedPickleError(f"a {found} where a {name} belongs")
    return _of_kind(record.state or {}, dict)


def _paths(value: Any) -> dict[str, ObjectPath] | None:
    if value is None:
        return None
    require_paths(_of_kind(value, dict))
    paths: dict[str, ObjectPath] = value
    return paths


def _of_kind(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise MalformedPickleError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _text(value: Any) -> str:
    return _of_kind(value, str)


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise MalformedPickleError(f"{value!r:.40} where a number of bytes or elements belongs")
    return value


def _called(record: Any, name: str) -> Any:
    """Return the only argument of a call."""
    if type(record) is not Record or record.kind.name != name or len(record.arguments) != 1:
        raise MalformedPickleError(f"a {type(record).__name__} where a {name} belongs")
    return record.arguments[0]


def _size(record: Any) -> torch.Size:
    sizes = _of_kind(_called(record, "Size"), tuple)
    if len(sizes) > _MAX_DIMS:
        raise MalformedPickleError(f"a shape of {len(sizes)} dimensions")
    return torch.Size([_count(size) for size in sizes])


def _properties(record: Any) -> TensorProperties:
    if type(record) is not Record or record.kind.name != "TensorProperties":
        raise MalformedPickleError("no tensor properties where they belong")
    dtype, layout, requires_grad, memory_format, pin_memory = _of_kind(record.state, tuple)
    return TensorProperties(
        dtype=_dtype(dtype),
        layout=_LAYOUTS.get(_text(_called(layout, "_get_layout")), torch.strided),
        requires_grad=_of_kind(requires_grad, bool),
        memory_format=_memory_format(_called(memory_format, "_MEM_FORMAT_ENCODING")),
        pin_memory=_of_kind(pin_memory, bool),
    )


def _memory_format(value: Any) -> torch.memory_format:
    if type(value) is not int or not 0 <= value < len(_MEMORY_FORMATS):
        raise MalformedPickleError("a memory format that does not exist")
    return _MEMORY_FORMATS[value]


def _dtype(value: Any) -> torch.dtype:
    dtype = vars(torch).get(value.name) if type(value) is Named else None
    if not isinstance(dtype, torch.dtype):
        raise MalformedPickleError("no dtype where one belongs")
    return dtype


def _chunks(value: Any) -> list[ChunkStorageMetadata]:
    return [_chunk(_fields(record, "ChunkStorageMetadata")) for record in _of_kind(value, list)]


def _chunk(fields: Mapping[str, Any]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=_size(fields.get("offsets")), sizes=_size(fields.get("sizes")))


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, hint = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields.get("fqn")),
        None if offset is None else _size(offset),
        None if hint is None else _count(hint),
    )


def _storage_info(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    info = _StorageInfo(
        _text(fields.get("relative_path")), _count(fields.get("offset")), _count(fields.get("length"))
    )
    if (transforms := fields.get("transform_descriptors")) is not None:
        info.transform_descriptors = [_text(one) for one in _sequence(transforms)]
    return info


def _sequence(value: Any) -> list[Any] | tuple[Any, ...]:
    return value if type(value) is tuple else _of_kind(value, list)


def _storage_meta(record: Any) -> StorageMeta | None:
    if record is None:
        return None
    fields = _fields(record, "StorageMeta")
    return StorageMeta(
        checkpoint_id=_path(fields.get("checkpoint_id")),
        save_id=_optional_text(fields.get("save_id")),
        load_id=_optional_text(fields.get("load_id")),
    )


def _path(value: Any) -> str | None:
    """Return where the checkpoint was saved, as a text; nothing depends on it."""
    if type(value) is Record and value.kind.name in _PATHS:
        return "/".join(_text(part) for part in value.arguments).replace("//", "/", 1)
    return _optional_text(value)


__all__ = ["parse_stock_metadata"]
