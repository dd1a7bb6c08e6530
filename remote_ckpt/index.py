"""The index of a save: where the bytes of every tensor lie, with checksums, and what DCP must know.

It holds what stock DCP keeps in its pickled ``.metadata``, so that the metadata can be rebuilt without
unpickling anything. ``docs/format.md`` describes the file: gzip around JSON in columns. One million
chunks of two dimensions, in a thousand tensors, take about 7 s of CPU to write, 8 s to read (one
Xeon core, Python 3.11) and 10 MB.

This module is pure and does no I/O.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from remote_ckpt import fields, tagged
from remote_ckpt.columns import by_name, column, cut, cut_crcs, join_crcs, points
from remote_ckpt.entries import OPAQUE, BytesEntry, ChunkEntry, Index, TensorEntry
from remote_ckpt.errors import CheckpointDamagedError, ConfigError, FormatError
from remote_ckpt.fields import BROKEN, require
from remote_ckpt.index_rules import MAX_DIMS, check_index
from remote_ckpt.options import GiB, MiB
from remote_ckpt.tagged import is_encodable

__all__ = [
    "BytesEntry",
    "ChunkEntry",
    "Index",
    "TensorEntry",
    "check_ranges",
    "format_index",
    "is_encodable",
    "parse_index",
]

FORMAT_NAME = "remote_ckpt.index"
FORMAT_VERSION = (1, 0)
MAX_EXPANDED_BYTES = 1 * GiB
"""Largest JSON that is unpacked (some 20 million chunks); anything beyond is taken for a bomb."""
MAX_EXPANSION = 64
"""Most bytes of JSON for each packed byte. Names and offsets give 4 to 12; gzip could give 1000."""
ANY_EXPANSION_BYTES = 1 * MiB
"""JSON up to this size may be packed to any size."""

_GZIP_LEVEL = 1  # level 6 takes four times as long for a tenth fewer bytes


# --- the file ----------------------------------------------------------------------------------------


def format_index(index: Index) -> bytes:
    """Return an index as gzipped JSON; equal indexes give equal bytes.

    Raises:
        ConfigError: The index contradicts itself (see :func:`parse_index`) or holds planner data that is
            not encodable.
    """
    try:
        check_index(index)
        document = _encode_index(index)
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    except BROKEN as error:
        raise ConfigError(f"this index cannot be written: {error}") from error
    expanded = text.encode("ascii")
    packed = _pack(expanded, _GZIP_LEVEL)
    # Checksums of zeros repeat without end. What readers would take for a bomb is stored as it is.
    return packed if len(expanded) <= _most_expanded(len(packed)) else _pack(expanded, 0)


def _pack(expanded: bytes, level: int) -> bytes:
    # Through zlib: the gzip module would write the present time, and other headers by Python version.
    packer = zlib.compressobj(level, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(expanded) + packer.flush()


def _most_expanded(packed_bytes: int) -> int:
    return max(ANY_EXPANSION_BYTES, MAX_EXPANSION * packed_bytes)


def parse_index(data: bytes, *, url: str, key: str, max_expanded_bytes: int = MAX_EXPANDED_BYTES) -> Index:
    """Return the index that an object holds; nothing in it is trusted.

    Args:
        data: The object's bytes.
        url: Redacted URL of the checkpoint, for messages.
        key: The object's key, for messages.
        max_expanded_bytes: Most bytes that are unpacked, beside :data:`MAX_EXPANSION`.

    Raises:
        FormatError: Another kind of file, or a major version this package does not know.
        CheckpointDamagedError: Broken gzip or JSON, more than ``max_expanded_bytes``, a field that is
            missing or ill-typed, chunks that do not cover their tensor once, a payload outside its archive
            or of a size that does not fit dtype and shape, or a wrong number of checksums.
    """
    try:
        document = fields.parse_json(_expand(data, max_expanded_bytes))
        _check_format(document, url=url, key=key)
        index = _decode_index(document)
        check_index(index)
    except FormatError:
        raise
    except (*BROKEN, KeyError, zlib.error) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        message = f"the index is damaged: {problem}"
        raise CheckpointDamagedError(message, url=url, key=key, operation="read index") from error
    return index


def check_ranges(index: Index, sizes: Mapping[str, int], *, url: str) -> None:
    """Check that everything an index points to lies inside its data object. A million take 0.1 s.

    Args:
        index: As :func:`parse_index` returned it.
        sizes: Bytes of each data object by key, from the manifest.
        url: Redacted URL of the checkpoint, for messages.

    Raises:
        CheckpointDamagedError: It names another object, or bytes beyond an object's end.
    """
    limits = [sizes.get(key, -1) for key in index.objects]
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            if chunk.archive_offset + chunk.archive_bytes > limits[chunk.object]:
                raise _outside(name, index.objects[chunk.object], url)
    for name, blob in index.blobs.items():
        if blob.offset + blob.length_bytes > limits[blob.object]:
            raise _outside(name, index.objects[blob.object], url)


def _outside(name: str, key: str, url: str) -> CheckpointDamagedError:
    message = f"the index is damaged: {name!r} lies outside its object, as the manifest describes it"
    return CheckpointDamagedError(message, url=url, key=key, operation="read index")


def _expand(data: bytes, max_expanded_bytes: int) -> bytes:
    max_expanded_bytes = min(max_expanded_bytes, _most_expanded(len(data)))
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
    require(max(dims, default=0) <= MAX_DIMS, f"tensors: more than {MAX_DIMS} dimensions")
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
    # Before anything is made of the counts: those of 0-dim tensors need no other column.
    require(sum(counts) == len(where[0]), "chunks: not as many as the tensors count")
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
