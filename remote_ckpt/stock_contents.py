"""What stock DCP's pickled ``.metadata`` file says, as plain values: without torch, without unpickling it.

The pickle is parsed as inert data (:mod:`remote_ckpt.inert_pickle`) and then checked field by field. What
torch 2.3 to 2.13 write is read; unknown fields are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from remote_ckpt.collector import collector_paused
from remote_ckpt.errors import CheckpointDamagedError, CheckpointError, UntrustedDataError
from remote_ckpt.inert_pickle import MalformedPickleError, Named, Record, parse_pickle
from remote_ckpt.options import MiB

T = TypeVar("T")

_MAX_BYTES = 1024 * MiB
"""More than DCP needs for four million chunks."""
_MAX_DIMS = 64
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_NAMES: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
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
_DTYPE = re.compile(r"bool|(?:b?float|complex|q?u?int|bits)[0-9][0-9a-z_]*")
"""Names of torch's dtypes; those of a later torch are of the same kind."""
_IN_NO_NAME = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_MEMORY_FORMATS = ("contiguous_format", "channels_last", "preserve_format")
"""By the value of DCP's ``_MEM_FORMAT_ENCODING``."""

Point = tuple[int, ...]


class StockChunk(NamedTuple):
    """A box of a tensor: where it begins, and its shape."""

    offsets: Point
    sizes: Point


@dataclass(frozen=True, slots=True)
class StockProperties:
    """DCP's ``TensorProperties``; names are torch's without ``torch.``."""

    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool


# Made by the hundred thousand: frozen ones would take three times as long to make.
@dataclass(slots=True)
class StockTensor:
    """DCP's ``TensorStorageMetadata``. Tensors may share properties and lists of chunks."""

    properties: StockProperties
    sizes: Point
    chunks: list[StockChunk]


@dataclass(slots=True)
class StockPlace:
    """DCP's ``_StorageInfo``: the archive's file, first byte and length; None: no list of transforms."""

    key: str
    offset_bytes: int
    length_bytes: int
    transforms: list[str] | None


@dataclass(frozen=True, slots=True)
class StockMeta:
    """DCP's ``StorageMeta``; nothing depends on it."""

    checkpoint_id: str | None
    save_id: str | None
    load_id: str | None


@dataclass(frozen=True, slots=True)
class StockMetadata:
    """DCP's ``Metadata``.

    Args:
        entries: Tensors by name; None for what is no tensor.
        places: Where each chunk's archive lies, by name and offsets (None for what is no tensor).
        planner_data: As it was pickled: plain containers, texts and numbers, not checked any further.
        storage_meta: Facts about the save.
        version: Of DCP's format.
    """

    entries: Mapping[str, StockTensor | None]
    places: Mapping[tuple[str, Point | None], StockPlace]
    planner_data: Any
    storage_meta: StockMeta | None
    version: str | None


def parse_stock_contents(data: bytes, *, url: str, key: str) -> StockMetadata:
    """Read a stock DCP ``.metadata`` file without running anything that it says.

    Raises:
        UntrustedDataError: It refers to anything that such files do not hold.
        CheckpointDamagedError: It is no such file, is cut, or its values are not of the right kind.
    """
    with stock_errors(url=url, key=key), collector_paused():
        if len(data) > _MAX_BYTES:
            raise MalformedPickleError(f"it has {len(data)} bytes, at most {_MAX_BYTES} are read")
        return _Reader().metadata(parse_pickle(bytes(data), _named))


@contextmanager
def stock_errors(*, url: str, key: str) -> Iterator[None]:
    """Turn what the checks in here raise into errors of the public tree."""
    try:
        yield
    except UntrustedDataError as error:
        raise UntrustedDataError(error.message, url=url, key=key, operation="read metadata") from None
    except CheckpointError:
        raise
    except (ValueError, OverflowError) as error:
        raise CheckpointDamagedError(f"cannot read DCP metadata: {error}", url=url, key=key) from error


def _named(module: str, name: str) -> Named:
    is_dtype = module == "torch" and _DTYPE.fullmatch(name)
    if is_dtype or name in _NAMES.get(module, ()):
        return Named(module, name)
    raise UntrustedDataError(
        f"DCP metadata refers to {module}.{name}, which is not on the list of what such files hold; "
        "it was not executed"
    )


# --- the file's values -------------------------------------------------------------------------------


class _Reader:
    """Makes values out of records. What several places refer to is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Any] = {}

    def metadata(self, root: Any) -> StockMetadata:
        fields = _fields(root, "Metadata")
        entries = _of_kind(fields.get("state_dict_metadata"), dict)
        places = _of_kind(fields.get("storage_data") or {}, dict)
        return StockMetadata(
            entries={_text(name): self._entry(entry) for name, entry in entries.items()},
            places={_item(index): self._place(info) for index, info in places.items()},
            planner_data=fields.get("planner_data"),
            storage_meta=_storage_meta(fields.get("storage_meta")),
            version=_optional_text(fields.get("version")),
        )

    def _entry(self, record: Any) -> StockTensor | None:
        if type(record) is Record and record.kind.name == "BytesStorageMetadata":
            return None
        fields = _fields(record, "TensorStorageMetadata")
        return StockTensor(
            properties=self._once("properties", fields.get("properties"), _properties),
            sizes=_size(fields.get("size")),
            chunks=self._once("chunks", fields.get("chunks"), _chunks),
        )

    def _place(self, record: Any) -> StockPlace:
        fields = _fields(record, "_StorageInfo")
        return StockPlace(
            key=_file(fields.get("relative_path")),
            offset_bytes=_count(fields.get("offset")),
            length_bytes=_count(fields.get("length")),
            transforms=self._once("transforms", fields.get("transform_descriptors"), _transforms),
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
        # Anything but a number is not shown: nested tuples may be far larger than the pickle.
        shown = f"{value!r:.40}" if type(value) is int else f"a {type(value).__name__}"
        raise MalformedPickleError(f"{shown} where a number of bytes or elements belongs")
    return value


def _called(record: Any, name: str) -> Any:
    """Return the only argument of a call."""
    if type(record) is not Record or record.kind.name != name or len(record.arguments) != 1:
        raise MalformedPickleError(f"a {type(record).__name__} where a {name} belongs")
    return record.arguments[0]


def _size(record: Any) -> Point:
    sizes = _of_kind(_called(record, "Size"), tuple)
    if len(sizes) > _MAX_DIMS:
        raise MalformedPickleError(f"a shape of {len(sizes)} dimensions")
    for size in sizes:
        _count(size)
    return sizes


def _properties(record: Any) -> StockProperties:
    if type(record) is not Record or record.kind.name != "TensorProperties":
        raise MalformedPickleError("no tensor properties where they belong")
    dtype, layout, requires_grad, memory_format, pin_memory = _of_kind(record.state, tuple)
    return StockProperties(
        dtype=_dtype(dtype),
        layout=_text(_called(layout, "_get_layout")).removeprefix("torch."),
        requires_grad=_of_kind(requires_grad, bool),
        memory_format=_memory_format(_called(memory_format, "_MEM_FORMAT_ENCODING")),
        pin_memory=_of_kind(pin_memory, bool),
    )


def _memory_format(value: Any) -> str:
    if type(value) is not int or not 0 <= value < len(_MEMORY_FORMATS):
        raise MalformedPickleError("a memory format that does not exist")
    return _MEMORY_FORMATS[value]


def _dtype(value: Any) -> str:
    if type(value) is not Named or not _DTYPE.fullmatch(value.name):
        raise MalformedPickleError("no dtype where one belongs")
    return value.name


def _chunks(value: Any) -> list[StockChunk]:
    return [_chunk(_fields(record, "ChunkStorageMetadata")) for record in _of_kind(value, list)]


def _chunk(fields: Mapping[str, Any]) -> StockChunk:
    return StockChunk(_size(fields.get("offsets")), _size(fields.get("sizes")))


def _item(record: Any) -> tuple[str, Point | None]:
    """Return what tells items apart: DCP's hint is left out."""
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    return _text(fields.get("fqn")), None if offset is None else _size(offset)


def _file(value: Any) -> str:
    """Return a file's name; one that no store can have is damage, not a mistake of whoever calls."""
    name = _text(value)
    if _IN_NO_NAME.search(name):
        raise MalformedPickleError(f"a file named {name!r:.80}")
    return name


def _transforms(value: Any) -> list[str] | None:
    return None if value is None else [_text(one) for one in _sequence(value)]


def _sequence(value: Any) -> list[Any] | tuple[Any, ...]:
    return value if type(value) is tuple else _of_kind(value, list)


def _storage_meta(record: Any) -> StockMeta | None:
    if record is None:
        return None
    fields = _fields(record, "StorageMeta")
    return StockMeta(
        checkpoint_id=_path(fields.get("checkpoint_id")),
        save_id=_optional_text(fields.get("save_id")),
        load_id=_optional_text(fields.get("load_id")),
    )


def _path(value: Any) -> str | None:
    """Return where the checkpoint was saved, as a text; nothing depends on it."""
    if type(value) is Record and value.kind.name in _PATHS:
        return "/".join(_text(part) for part in value.arguments).replace("//", "/", 1)
    return _optional_text(value)
