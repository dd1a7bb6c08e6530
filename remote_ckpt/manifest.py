"""The manifest: the small JSON object whose creation commits a checkpoint, and the names of all objects.

A checkpoint's manifests are numbered generations; the highest one is the truth. Each is written once and
never changed. ``docs/format.md`` describes every field; this module is pure and does no I/O.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from remote_ckpt import fields
from remote_ckpt.errors import CheckpointDamagedError, ConfigError, FormatError
from remote_ckpt.fields import BROKEN, InvalidError, require
from remote_ckpt.keys import (
    STOCK_METADATA_NAME,
    data_key,
    index_key,
    is_safe_key,
    is_save_id,
    is_token,
    manifest_key,
    new_save_id,
    new_token,
    own_key,
    parse_index_key,
    parse_manifest_key,
    stock_metadata_key,
)

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "STOCK_METADATA_NAME",
    "Manifest",
    "ObjectEntry",
    "data_key",
    "format_manifest",
    "index_key",
    "is_safe_key",
    "is_save_id",
    "is_token",
    "manifest_key",
    "new_save_id",
    "new_token",
    "own_key",
    "parse_index_key",
    "parse_manifest",
    "parse_manifest_key",
    "stock_metadata_key",
]

FORMAT_NAME = "remote_ckpt"
FORMAT_VERSION = (1, 0)

_CRC_PATTERN = re.compile(r"[0-9a-f]{8}")
_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One object of a checkpoint: key relative to it, size in bytes, CRC-32C of the whole object."""

    key: str
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one generation says about a checkpoint.

    Args:
        generation: Number of this manifest, from 1 on; also in its key.
        save_id: The attempt that wrote the data. Pins and annotations keep it, a replacement has its own.
        state: ``"live"``, or ``"deleted"`` for a tombstone.
        name: The checkpoint's name; ``step`` is its number where the name is one.
        created_at: When this generation was made (aware, UTC).
        committed_at: When the data was first committed (aware, UTC); later generations carry it on.
        world_size: Ranks that saved.
        torch_version: Version of torch that saved, if it was there.
        package_version: Version of this package that wrote this generation.
        total_bytes: Size of all data objects.
        objects: The data objects.
        index: The tensor index; tombstones have none.
        stock_metadata: DCP's own pickled metadata of this save under its unique key.
        pinned: Neither replaced nor deleted until unpinned.
        metrics: Named numbers; NaN and infinities are stored as strings.
        user_metadata: Any JSON object.
        left_out: State keys that were left out on purpose.
        superseded: Exact keys that this and earlier generations still have to delete.
        content_digest: Digest of what was saved, the same for equal content; opaque here.
        extra: Top-level fields this version does not know; kept when a generation is carried on.
    """

    generation: int
    save_id: str
    state: Literal["live", "deleted"]
    name: str
    step: int | None = None
    created_at: datetime
    committed_at: datetime
    world_size: int
    torch_version: str | None = None
    package_version: str
    total_bytes: int
    objects: tuple[ObjectEntry, ...] = ()
    index: ObjectEntry | None = None
    stock_metadata: ObjectEntry | None = None
    pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    superseded: tuple[str, ...] = ()
    content_digest: str
    extra: Mapping[str, Any] = field(default_factory=dict)


# --- writing and reading ---------------------------------------------------------------------------


def format_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as UTF-8 JSON: one top-level field and one object per line, digest last.

    Raises:
        ConfigError: A value that the format cannot hold, named by its field: a time without zone, an
            unsafe key, metadata that is not JSON (NaN, keys that are not strings, other types).
    """
    if shadowed := set(manifest.extra) & _KNOWN_FIELDS:
        raise ConfigError(f"extra fields of a manifest must not be named {sorted(shadowed)}")
    try:
        document = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION), **_encode(manifest)}
        _decode(document)
        document["digest"] = _digest(document)
        return _layout(document).encode()
    except BROKEN as error:
        raise ConfigError(f"this manifest cannot be written: {error}") from error


def parse_manifest(data: bytes, *, url: str, key: str) -> Manifest:
    """Return the manifest that an object holds; nothing in it is trusted.

    Args:
        data: The object's bytes.
        url: Redacted URL of the checkpoint, for messages.
        key: The object's key; its generation must be the one inside.

    Raises:
        FormatError: Another kind of file, or a major version this package does not know.
        CheckpointDamagedError: Broken JSON, a wrong digest, a field that is missing or ill-typed, or a
            generation other than the key's.
    """
    try:
        document = fields.parse_json(data)
        _check_format(document, url=url, key=key)
        require(document.get("digest") == _digest(document), "its digest does not match")
        manifest = Manifest(**_decode(document))
        if b"\\u" in data:  # only an escape can stand for half a character, which nobody could carry on
            _json(document).encode()
        require(manifest_key(manifest.generation) == key.rpartition("/")[2], "it is of another generation")
    except FormatError:
        raise
    except BROKEN as error:
        message = f"the manifest is damaged: {error}"
        raise CheckpointDamagedError(message, url=url, key=key, operation="read manifest") from error
    return manifest


def _check_format(document: Any, *, url: str, key: str) -> None:
    """Look at format and version first: what the rest means, digest included, follows from them."""
    require(isinstance(document, dict), "it is not a JSON object")
    # Only a newer format of ours says "upgrade"; anything else in this place is damage, passed over.
    require(document.get("format") == FORMAT_NAME, "not a remote_ckpt manifest")
    version = document.get("version")
    require(isinstance(version, list) and len(version) == 2, "version: not [major, minor]")
    for number in version:
        fields.count(number)
    if version[0] != FORMAT_VERSION[0]:
        message = f"written in format {version[0]}.{version[1]}; this version reads format 1 only"
        raise FormatError(f"{message}: use a newer remote_ckpt", url=url, key=key)


def _digest(document: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in document.items() if name != "digest"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(canonical.encode('ascii')).hexdigest()}"


def _layout(document: Mapping[str, Any]) -> str:
    # json's own indentation would spread every object over five lines, and takes ten times as long.
    lines = (f"  {_json(name)}: {_field_layout(value)}" for name, value in document.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _field_layout(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | str):
        return "[\n" + ",\n".join(f"    {_json(item)}" for item in value) + "\n  ]"
    return _json(value)


def _encode(manifest: Manifest) -> dict[str, Any]:
    values = {name: getattr(manifest, name) for name in _DECODERS}
    known = {name: _ENCODERS[name](value) if name in _ENCODERS else value for name, value in values.items()}
    return known | dict(manifest.extra)


def _decode(document: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, decode in _DECODERS.items():
        require(name in document, f"{name}: missing")
        try:
            values[name] = decode(document[name])
        except BROKEN as error:
            raise InvalidError(f"{name}: {error}") from error
    values["extra"] = {name: value for name, value in document.items() if name not in _KNOWN_FIELDS}
    fields.check_json(values["extra"])
    _check_superseded(values)
    return values


def _check_superseded(values: Mapping[str, Any]) -> None:
    """What a live manifest names as its own must not stand on the list of what to delete."""
    single = [entry for entry in (values["index"], values["stock_metadata"]) if entry is not None]
    keys = [entry.key for entry in (*values["objects"], *single)]
    own = set(keys)
    require(len(own) == len(keys), "objects: the same key twice")
    is_disjoint = values["state"] == "deleted" or own.isdisjoint(values["superseded"])
    require(is_disjoint, "superseded: names an object of this generation")
    generations = map(parse_manifest_key, values["superseded"])
    newest = max((generation or 0 for generation in generations), default=0)
    require(newest < values["generation"], "superseded: names a manifest that is not older")


# --- one field at a time ---------------------------------------------------------------------------


def _name(value: Any) -> str:
    require(fields.text(value) != "", "empty")
    return str(value)


def _state(value: Any) -> str:
    require(value in ("live", "deleted"), "neither live nor deleted")
    return str(value)


def _object(value: Any) -> ObjectEntry:
    if not isinstance(value, dict):
        raise InvalidError("an object entry that is not a JSON object")
    crc = value.get("crc32c")
    if not isinstance(crc, str) or not _CRC_PATTERN.fullmatch(crc):
        raise InvalidError("an object entry without CRC-32C in hexadecimal")
    return ObjectEntry(fields.safe_key(value.get("key")), fields.count(value.get("size_bytes")), int(crc, 16))


def _format_object(entry: ObjectEntry) -> dict[str, Any]:
    return {"key": entry.key, "size_bytes": entry.size_bytes, "crc32c": f"{entry.crc32c:08x}"}


def _metrics(value: Any) -> dict[str, float]:
    return {name: _number(number) for name, number in fields.json_object(value).items()}


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number or value in ("nan", "inf", "-inf"), "not a number")
    return float(value)


def _format_metrics(metrics: Mapping[str, float]) -> dict[str, Any]:
    """JSON has no NaN and no infinity, and a loss may well be one: those three go as texts."""
    numbers = {name: float(value) for name, value in sorted(metrics.items())}
    return {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}


_DECODERS: Mapping[str, Callable[[Any], Any]] = {  # in the order in which they stand in the file
    "generation": fields.positive,
    "save_id": fields.save_id,
    "state": _state,
    "name": _name,
    "step": fields.optional(fields.count),
    "created_at": fields.time,
    "committed_at": fields.time,
    "world_size": fields.positive,
    "torch_version": fields.optional(fields.text),
    "package_version": fields.text,
    "total_bytes": fields.count,
    "pinned": fields.flag,
    "metrics": _metrics,
    "user_metadata": fields.json_object,
    "left_out": fields.list_of(fields.text),
    "superseded": fields.list_of(fields.safe_key),
    "content_digest": fields.text,
    "index": fields.optional(_object),
    "stock_metadata": fields.optional(_object),
    "objects": fields.list_of(_object),
}
_KNOWN_FIELDS = {*_DECODERS, "format", "version", "digest"}
_ENCODERS: Mapping[str, Callable[[Any], Any]] = {
    "created_at": fields.format_time,
    "committed_at": fields.format_time,
    "metrics": _format_metrics,
    "user_metadata": dict,
    "left_out": list,
    "superseded": list,
    "index": fields.optional(_format_object),
    "stock_metadata": fields.optional(_format_object),
    "objects": lambda entries: [_format_object(entry) for entry in entries],
}
