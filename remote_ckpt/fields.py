"""Checks of single JSON values that nobody vouches for, for the manifest and the index.

Each returns the value, typed, or raises :class:`InvalidError`, which the module that knows what is being
read turns into an error of the public tree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, NoReturn, TypeVar

from remote_ckpt.keys import is_safe_key, is_save_id

_T = TypeVar("_T")

MAX_COUNT = 2**63 - 1
"""Largest size or offset: what fits a signed 64-bit integer, as in torch and in every store."""

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"


class InvalidError(Exception):
    """Says what is wrong with a document; it never leaves this package."""


BROKEN = (InvalidError, ValueError, TypeError, OverflowError, RecursionError)
"""What reading or writing a document that is broken in whatever way can raise."""


def require(is_ok: bool, problem: str) -> None:
    """Raise InvalidError with ``problem`` unless ``is_ok``."""
    if not is_ok:
        raise InvalidError(problem)


def parse_json(data: bytes) -> Any:
    """Return strict JSON in UTF-8, without the NaN and Infinity that Python would let pass.

    Raises one of :data:`BROKEN`.
    """
    return json.loads(bytes(data).decode("utf-8"), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidError(f"{name} is not JSON")


def count(value: Any) -> int:
    """An integer from 0 to :data:`MAX_COUNT`; true and false are none."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise InvalidError(f"not a count: {_shown(value)}")
    return value


def positive(value: Any) -> int:
    """A count of at least 1."""
    require(count(value) > 0, "not positive")
    return int(value)


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise InvalidError(f"not a text: {_shown(value)}")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InvalidError(f"neither true nor false: {_shown(value)}")
    return value


def safe_key(value: Any) -> str:
    """A key that stays inside its checkpoint."""
    if not isinstance(value, str) or not is_safe_key(value):
        raise InvalidError(f"not a key inside the checkpoint: {_shown(value)}")
    return value


def save_id(value: Any) -> str:
    """An id of an attempt to save."""
    require(is_save_id(text(value)), f"not a save_id: {_shown(value)}")
    return str(value)


def json_object(value: Any) -> dict[str, Any]:
    """A JSON object whose content survives being written and read."""
    if not isinstance(value, dict):
        raise InvalidError(f"not a JSON object: {_shown(value)}")
    check_json(value)
    return value


def check_json(value: Any) -> None:
    """Refuse what ``json.dumps`` would change on the way or reject: keys other than texts, NaN, tuples."""
    if isinstance(value, dict):
        for name, item in value.items():
            text(name)
            check_json(item)
    elif isinstance(value, list):
        for item in value:
            check_json(item)
    elif isinstance(value, float):
        require(math.isfinite(value), f"{value} is not JSON")
    else:
        require(value is None or isinstance(value, str | int), f"{type(value).__name__} is not JSON")


def time(value: Any) -> datetime:
    """A time as :func:`format_time` writes it."""
    try:
        return datetime.strptime(text(value), _TIME_FORMAT).replace(tzinfo=timezone.utc)
    except ValueError as error:
        raise InvalidError(f"not a time like 2026-01-31T12:00:00.000000Z: {_shown(value)}") from error


def format_time(value: datetime) -> str:
    """An aware time in UTC with microseconds: ``2026-01-31T12:00:00.000000Z``."""
    require(value.tzinfo is not None, "a time without zone")
    utc = value.astimezone(timezone.utc).replace(tzinfo=None)
    # Not strftime: it leaves out leading zeros of the year on some platforms.
    return f"{utc.isoformat(timespec='microseconds')}Z"


def optional(decode: Callable[[Any], _T]) -> Callable[[Any], _T | None]:
    """The same check, for a value that may be null."""
    return lambda value: None if value is None else decode(value)


def list_of(decode: Callable[[Any], _T]) -> Callable[[Any], tuple[_T, ...]]:
    """The same check, for each item of a list."""

    def decode_list(value: Any) -> tuple[_T, ...]:
        if not isinstance(value, list):
            raise InvalidError(f"not a list: {_shown(value)}")
        return tuple(map(decode, value))

    return decode_list


def _shown(value: Any) -> str:
    return f"{value!r:.80}" if isinstance(value, str | float | bool | None) else type(value).__name__
