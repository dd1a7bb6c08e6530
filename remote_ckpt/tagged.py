"""Plain Python values in JSON, told apart exactly: a tuple comes back as a tuple.

DCP's planner data (how flattened names lead back into nested dicts and lists) consists of such values.
Stock DCP pickles them; here nothing can come back but these types.

=================================== ==============================
value                               JSON
=================================== ==============================
None, bool, int, str, finite float  itself
other float                         ``{"float": "nan"}``, ``"inf"``, ``"-inf"``
list                                list
tuple                               ``{"tuple": [...]}``
dict with str keys                  ``{"dict": {...}}``
=================================== ==============================
"""

from __future__ import annotations

import math
from typing import Any

from remote_ckpt.fields import InvalidError

_SCALARS = (str, int, bool, type(None))


def is_encodable(value: Any) -> bool:
    """Whether :func:`encode` can write a value: these types exactly, no subclasses, at every depth."""
    try:
        encode(value)
    except (InvalidError, RecursionError):
        return False
    return True


def encode(value: Any) -> Any:
    """Return a value as JSON; raises InvalidError for other types, RecursionError for endless nesting."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple:
        return {"tuple": [encode(item) for item in value]}
    if kind is dict:
        return {"dict": {_exact_text(name): encode(item) for name, item in value.items()}}
    raise InvalidError(f"a value of type {kind.__name__} has no place in an index")


def decode(value: Any) -> Any:
    """Return the value that parsed JSON stands for; raises InvalidError where it stands for none."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise InvalidError(f"a tagged value with {len(value)} tags")
    ((tag, content),) = value.items()
    if tag == "tuple" and isinstance(content, list):
        return tuple(decode(item) for item in content)
    if tag == "dict" and isinstance(content, dict):
        return {name: decode(item) for name, item in content.items()}
    if tag == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    raise InvalidError(f"an unknown tagged value {tag[:40]!r}")


def _exact_text(name: Any) -> str:
    if type(name) is not str:
        raise InvalidError("a dict with keys that are not texts has no place in an index")
    return name
