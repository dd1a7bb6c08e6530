"""The index of a save: where the bytes of every tensor lie, with checksums, and what DCP must know.

It holds what stock DCP keeps in its pickled ``.metadata``, so that the metadata can be rebuilt without
unpickling anything. ``docs/format.md`` describes the file: gzip around JSON in columns. One million
chunks of two dimensions, in a thousand tensors, take about 7 s of CPU to write, 8 s to read (one
Xeon core, Python 3.11) and 10 MB.

This module is pure and does no I/O.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

from remote_ckpt import fields, tagged
from remote_ckpt.archive import SUPPORTED_DTYPES
from remote_ckpt.checksum import CRC_BYTES, count_blocks
from remote_ckpt.columns import by_name, column, cut, cut_crcs, join_crcs, points
from remote_ckpt.errors import CheckpointDamagedError, ConfigError, FormatError
from remote_ckpt.fields import BROKEN, InvalidError, require
from remote_ckpt.keys import is_save_id
from remote_ckpt.options import GiB
from remote_ckpt.tagged import is_encodable

__all__ = ["BytesEntry", "ChunkEntry", "Index", "TensorEntry", "format_index", "is_encodable", "parse_index"]

FORMAT_NAME = "remote_ckpt.index"
FORMAT_VERSION = (1, 0)
MAX_EXPANDED_BYTES = 4 * GiB
"""Largest JSON that is unpacked (some 40 million chunks); anything beyond is taken for a bomb."""

OPAQUE = -1
"""``payload_offset`` of what ``torch.save`` wrote whole."""

_GZIP_LEVEL = 1  # level 6 takes four times as long for a tenth fewer bytes


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
        planner_data: DCP's, where :func:`is_encodable` allows it.
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


# --- the file ----------------------------------------------------------------------------------------


def format_index(index: Index) -> bytes:
    """Return an index as gzipped JSON; equal indexes give equal bytes.

    Raises:
        ConfigError: The index contradicts itself (see :func:`parse_index`) or holds planner data that is
            not encodable.
    """
    try:
        _check_index(index)
        document = _encode_index(index)
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    except BROKEN as error:
        raise ConfigError(f"this index cannot be written: {error}") from error
    # Through zlib: the gzip module would write the present time, and other headers by Python version.
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(text.encode("ascii")) + packer.flush()


def parse_index(data: bytes, *, url: str, key: str, max_expanded_bytes: int = MAX_EXPANDED_BYTES) -> Index:
    """Return the index that an object holds; nothing in it is trusted.

    Args:
        data: The object's bytes.
        url: Redacted URL of the checkpoint, for messages.
        key: The object's key, for messages.
        max_expanded_bytes: Most bytes that are unpacked.

    Raises:
        FormatError: Another kind of file, or a major version this package does not know.
        CheckpointDamagedError: Broken gzip or JSON, more than ``max_expanded_bytes``, a field that is
            missing or ill-typed, a chunk outside its tensor or archive, a payload whose size does not
            fit dtype and shape, or a wrong number of checksums.
    """
    try:
        document = fields.parse_json(_expand(data, max_expanded_bytes))
        _check_format(document, url=url, key=key)
        index = _decode_index(document)
        _check_index(index)
    except FormatError:
        raise
    except (*BROKEN, KeyError, zlib.error) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        message = f"the index is damaged: {problem}"
        raise CheckpointDamagedError(message, url=url, key=key, operation="read index") from error
    return index


def _expand(data: bytes, max_expanded_bytes: int) -> bytes:
    expander = zlib.decompressobj(16 + zlib.MAX_WBITS)
    expanded = expander.decompress(data, max_expanded_bytes)
    # The stream's end may need one more call after the last byte; a byte more is one too many.
    surplus = expander.decompress(expander.unconsumed_tail, 1) if not expander.eof else b""
    require(not surplus, f"it expands to more than {max_expanded_bytes} bytes")
    require(expander.eof and not expander.unused_data, "its gzip stream does not end where the object does")
    return expanded


def _check_format(document: Any, *, url: str, key: str) -> None:
    require(isinstance(document, dict), "it is not a JSON object")
    if document.get("format") != FORMAT_NAME:
        raise FormatError("not a remote_ckpt index", url=url, key=key)
    major, _ = fields.list_of(fields.count)(document["version"])
    if major != FORMAT_VERSION[0]:
        raise FormatError(f"index format {major}; use a newer remote_ckpt", url=url, key=key)


# --- columns -----------------------------------------------------------------------------------------

_CHUNK_COLUMNS = ("object", "archive_offset", "archive_bytes", "payload_offset", "payload_bytes")
_BLOB_COLUMNS = ("object", "offset", "length_bytes")
_KIND_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "dtype": fields.text,
    "layout": fields.text,
    "memory_format": fields.text,
    "requires_grad": fields.flag,
    "pin_memory": fields.flag,
}


def _encode_index(index: Index) -> dict[str, Any]:
    return {
        "format": FORMAT_NAME,
        "version": list(FORMAT_VERSION),
        "save_id": index.save_id,
        "block_bytes": index.block_bytes,
        "objects": index.objects,
        "dcp_version": index.dcp_version,
        "storage_meta": fields.json_object(dict(index.storage_meta)),
        "planner_data": tagged.encode(index.planner_data),
        "has_foreign_planner_data": index.has_foreign_planner_data,
        **_encode_tensors(index.tensors),
        "chunks": _encode_chunks([chunk for tensor in index.tensors.values() for chunk in tensor.chunks]),
        "blobs": _encode_blobs(index.blobs),
    }


def _decode_index(document: Mapping[str, Any]) -> Index:
    block_bytes = fields.positive(document["block_bytes"])
    return Index(
        save_id=fields.save_id(document["save_id"]),
        block_bytes=block_bytes,
        objects=list(fields.list_of(fields.safe_key)(document["objects"])),
        tensors=_decode_tensors(document, block_bytes),
        blobs=_decode_blobs(document["blobs"], block_bytes),
        planner_data=tagged.decode(document["planner_data"]),
        has_foreign_planner_data=fields.flag(document["has_foreign_planner_data"]),
        dcp_version=fields.optional(fields.text)(document["dcp_version"]),
        storage_meta=fields.json_object(document["storage_meta"]),
    )


def _encode_tensors(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Tensors as columns; the properties, which few differ in, as a table that they point into."""
    kinds: dict[tuple[Any, ...], int] = {}
    entries = tensors.values()
    columns = {
        "name": list(tensors),
        "kind": [kinds.setdefault(_kind(entry), len(kinds)) for entry in entries],
        "dims": [len(entry.sizes) for entry in entries],
        "sizes": list(chain.from_iterable(entry.sizes for entry in entries)),
        "chunk_count": [len(entry.chunks) for entry in entries],
    }
    return {"kinds": [dict(zip(_KIND_FIELDS, kind, strict=True)) for kind in kinds], "tensors": columns}


def _kind(entry: TensorEntry) -> tuple[Any, ...]:
    return tuple(getattr(entry, name) for name in _KIND_FIELDS)


def _decode_tensors(document: Mapping[str, Any], block_bytes: int) -> dict[str, TensorEntry]:
    kinds = [{name: check(kind[name]) for name, check in _KIND_FIELDS.items()} for kind in document["kinds"]]
    columns = document["tensors"]
    dims, counts, positions = (column(columns[name]) for name in ("dims", "chunk_count", "kind"))
    require(max(positions, default=-1) < len(kinds), "tensors: an unknown kind")
    shapes = cut(column(columns["sizes"]), dims)
    chunk_lists = cut(_decode_chunks(document["chunks"], dims, counts, block_bytes), counts)
    entries = [
        TensorEntry(sizes=tuple(sizes), chunks=list(chunks), **kinds[position])
        for sizes, chunks, position in zip(shapes, chunk_lists, positions, strict=True)
    ]
    return by_name(columns["name"], entries)


def _encode_chunks(chunks: Sequence[ChunkEntry]) -> dict[str, Any]:
    columns = {name: list(map(attrgetter(name), chunks)) for name in _CHUNK_COLUMNS}
    return {
        "offsets": list(chain.from_iterable(map(attrgetter("offsets"), chunks))),
        "sizes": list(chain.from_iterable(map(attrgetter("sizes"), chunks))),
        **columns,
        "crcs": join_crcs(map(attrgetter("crcs"), chunks)),
    }


def _decode_chunks(
    columns: Mapping[str, Any], dims: Sequence[int], counts: Sequence[int], block_bytes: int
) -> list[ChunkEntry]:
    where = [column(columns[name], lowest=OPAQUE) for name in _CHUNK_COLUMNS]
    boxes = [points(columns[name], dims, counts) for name in ("offsets", "sizes")]
    crcs = cut_crcs(columns["crcs"], where[-1], block_bytes)
    require(len({*map(len, boxes), *map(len, where), len(crcs)}) == 1, "chunks: columns of unequal length")
    return list(map(ChunkEntry, *boxes, *where, crcs))


def _encode_blobs(blobs: Mapping[str, BytesEntry]) -> dict[str, Any]:
    entries = list(blobs.values())
    columns = {name: list(map(attrgetter(name), entries)) for name in _BLOB_COLUMNS}
    safe = [entry.pickle_safe for entry in entries]
    return {
        "name": list(blobs),
        **columns,
        "pickle_safe": safe,
        "crcs": join_crcs(map(attrgetter("crcs"), entries)),
    }


def _decode_blobs(columns: Mapping[str, Any], block_bytes: int) -> dict[str, BytesEntry]:
    where = [column(columns[name]) for name in _BLOB_COLUMNS]
    crcs = cut_crcs(columns["crcs"], where[-1], block_bytes)
    safe = fields.list_of(fields.optional(fields.flag))(columns["pickle_safe"])
    return by_name(columns["name"], [BytesEntry(*row) for row in zip(*where, crcs, safe, strict=True)])


# --- what must hold -----------------------------------------------------------------------------------


def _check_index(index: Index) -> None:
    require(is_save_id(index.save_id), "save_id: not one")
    require(len(index.objects) == len(set(index.objects)), "objects: the same key twice")
    for name, tensor in index.tensors.items():
        item_bytes = SUPPORTED_DTYPES.get(tensor.dtype)
        for chunk in tensor.chunks:
            if problem := _box_problem(chunk, tensor) or _place_problem(chunk, index, item_bytes):
                raise InvalidError(f"tensor {name!r}, chunk at {list(chunk.offsets)}: {problem}")
    for name, blob in index.blobs.items():
        if problem := _blob_problem(blob, index):
            raise InvalidError(f"value {name!r}: {problem}")


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
    elif item_bytes is not None and chunk.payload_bytes != math.prod(chunk.sizes) * item_bytes:
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
