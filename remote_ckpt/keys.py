"""Names of the objects of a checkpoint: unique, recognisable as ours, safe on every store.

Keys are relative to the checkpoint. Whatever is written under a fresh random part is never reused, so
that a late write or delete can only ever hit the attempt that it was meant for.
"""

from __future__ import annotations

import re
import secrets
from datetime import datetime, timezone

from remote_ckpt.errors import ConfigError

STOCK_METADATA_NAME = ".metadata"
"""Where stock DCP readers look for the metadata."""

_SAVE_ID = r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{12}"
_TOKEN = r"d-[0-9a-f]{16}"
_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._=-]{1,255}"
_KEY_PATTERN = re.compile(rf"{_PART}(?:/{_PART})*")
_SAVE_ID_PATTERN = re.compile(_SAVE_ID)
_TOKEN_PATTERN = re.compile(_TOKEN)
_MANIFEST_PATTERN = re.compile(r"manifest\.([0-9]{6,18})\.json")
_INDEX_PATTERN = re.compile(rf"index\.({_SAVE_ID})\.json\.gz")
_STOCK_METADATA_PATTERN = re.compile(rf"metadata\.({_SAVE_ID})\.pickle")
_COPY_RECORD_PATTERN = re.compile(rf"copy\.({_SAVE_ID})\.json")
_SCRATCH_PATTERN = re.compile(rf"\.probe-{_TOKEN}|\.clock-[0-9a-f]{{16}}")
_DATA_PATTERN = re.compile(rf"{_TOKEN}/(?:0|[1-9][0-9]*)\.distcp")


def manifest_key(generation: int) -> str:
    """Return the key of a generation (at least 1): ``manifest.000007.json``."""
    if generation < 1:
        raise ConfigError(f"manifest generations begin at 1, not {generation}")
    return f"manifest.{generation:06d}.json"


def parse_manifest_key(key: str) -> int | None:
    """Return the generation that a key names, or None where the key is not exactly a manifest's."""
    match = _MANIFEST_PATTERN.fullmatch(key)
    generation = int(match[1]) if match else 0
    return generation if generation > 0 and manifest_key(generation) == key else None


def new_save_id() -> str:
    """Return an id for one attempt to save: UTC time of this host (a hint for people) and 48 random bits."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(6)}"


def is_save_id(text: str) -> bool:
    """Whether a text is one that :func:`new_save_id` could return."""
    return _SAVE_ID_PATTERN.fullmatch(text) is not None


def new_token() -> str:
    """Return a name for one rank's folder of data objects in one attempt: ``d-`` and 64 random bits."""
    return f"d-{secrets.token_hex(8)}"


def is_token(text: str) -> bool:
    """Whether a text is one that :func:`new_token` could return."""
    return _TOKEN_PATTERN.fullmatch(text) is not None


def data_key(token: str, number: int) -> str:
    """Return the key of a rank's data object, numbered from 0: ``d-0123456789abcdef/0.distcp``."""
    if not is_token(token) or number < 0:
        raise ConfigError(f"no data object is named after token {token!r} and number {number}")
    return f"{token}/{number}.distcp"


def index_key(save_id: str) -> str:
    """Return the key of a save's index."""
    return f"index.{_checked_save_id(save_id)}.json.gz"


def parse_index_key(key: str) -> str | None:
    """Return the save_id that an index's key names, or None where the key is not an index's."""
    match = _INDEX_PATTERN.fullmatch(key)
    return match[1] if match else None


def stock_metadata_key(save_id: str) -> str:
    """Return the unique key of a save's pickled DCP metadata, of which ``.metadata`` is a copy."""
    return f"metadata.{_checked_save_id(save_id)}.pickle"


def copy_record_key(save_id: str) -> str:
    """Return the key under which an attempt to copy writes itself down before it begins."""
    return f"copy.{_checked_save_id(save_id)}.json"


def parse_copy_record_key(key: str) -> str | None:
    """Return the save_id that the record of a copy names, or None where the key is not such a record's."""
    match = _COPY_RECORD_PATTERN.fullmatch(key)
    return match[1] if match else None


def own_key(key: str) -> bool:
    """Whether a key (relative to the checkpoint) is of a kind that this package writes.

    ``.metadata`` counts, though stock DCP writes it too: who sweeps must know whose it is.
    """
    return key == STOCK_METADATA_NAME or parse_manifest_key(key) is not None or is_attempt_key(key)


def is_attempt_key(key: str) -> bool:
    """Whether a key belongs to one attempt to save or copy: data, index, stock metadata, a copy's record."""
    patterns = (_DATA_PATTERN, _INDEX_PATTERN, _STOCK_METADATA_PATTERN, _COPY_RECORD_PATTERN)
    return any(pattern.fullmatch(key) for pattern in patterns)


def is_scratch_key(key: str) -> bool:
    """Whether a key right below a store's root is one that a probe or a look at the clock makes."""
    return _SCRATCH_PATTERN.fullmatch(key) is not None


def is_safe_key(key: str) -> bool:
    """Whether a key stays inside its checkpoint and uses only ``A-Z a-z 0-9 . _ = -`` in its parts."""
    return _KEY_PATTERN.fullmatch(key) is not None


def _checked_save_id(save_id: str) -> str:
    if not is_save_id(save_id):
        raise ConfigError(f"not a save_id as new_save_id() makes them: {save_id!r}")
    return save_id
