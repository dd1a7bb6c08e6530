"""Paths into nested state: dicts and lists of the kind that DCP flattens into names."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

ObjectPath = tuple[str | int, ...]
"""Keys of dicts (as str) and positions in lists, from the outside in; DCP's ``OBJ_PATH``."""

_MAX_DEPTH = 256
_MAX_GAPS = 4096
"""Elements of a list that may have no path: empty dicts have none."""


def empty_dicts(value: Any, path: ObjectPath = ()) -> Iterator[ObjectPath]:
    """Yield where empty dicts are below ``value``: DCP's flattening gives them no name."""
    if isinstance(value, Mapping):
        if not value and path:
            yield path
        for key, inner in value.items():
            yield from empty_dicts(inner, (*path, str(key)))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from empty_dicts(inner, (*path, position))


def require_paths(paths: Mapping[Any, Any]) -> None:
    """Check paths that somebody else wrote, before anything is put at them.

    A position in a list is at most as large as the number of the paths that lead into that list allows:
    otherwise one path of a few bytes could make a list of any length.

    Raises:
        ValueError: A name, path or part of a path is of the wrong type, or a position out of range.
    """
    positions: dict[ObjectPath, set[int]] = {}
    for name, path in paths.items():
        _require_path(name, path)
        for depth, part in enumerate(path):
            if type(part) is int:
                positions.setdefault(path[:depth], set()).add(part)
    for place, found in positions.items():
        if min(found) < 0 or max(found) >= _MAX_GAPS + len(found):
            raise ValueError(f"position {max(found)} in a list of {len(found)} elements: {place!r:.80}")


def _require_path(name: Any, path: Any) -> None:
    is_path = type(path) is tuple and 0 < len(path) <= _MAX_DEPTH
    if type(name) is not str or not is_path or not all(type(part) in (str, int) for part in path):
        # Shown in part: a pickle of a few bytes may nest tuples so that all of them would fill the memory.
        shown = reprlib.repr(path), reprlib.repr(name)
        raise ValueError(f"no path of keys and positions: {shown[0]} for {shown[1]}")


def put_element(root: MutableMapping[str, Any], path: ObjectPath, value: Any) -> None:
    """Set the value at ``path``, making the containers on the way where there are none.

    DCP's own ``set_element`` writes ``"3"`` beside a dict's key ``3``; here the key that is there is meant.
    """
    container: Any = root
    for part, following in itertools.pairwise(path):
        container = _container_at(container, part, dict if isinstance(following, str) else list)
    _put(container, path[-1], value)


def _container_at(parent: Any, part: str | int, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    key = _actual_key(parent, part)
    is_there = key in parent if isinstance(parent, Mapping) else key < len(parent)
    known = parent[key] if is_there else None
    if isinstance(known, Mapping if kind is dict else list):
        return known
    made = kind()
    _put(parent, key, made)
    return made


def _put(container: Any, part: str | int, value: Any) -> None:
    key = _actual_key(container, part)
    if isinstance(container, list) and isinstance(key, int):
        container.extend([None] * (key + 1 - len(container)))
    container[key] = value


def _actual_key(container: Any, part: str | int) -> Any:
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)
