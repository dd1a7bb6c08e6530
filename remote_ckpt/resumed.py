"""What this process resumed from: its own retention keeps that until something newer is committed beside it.

A checkpoint counts under every path that leads to it, so a run that loads through a symbolic link and
cleans up in the real folder (or the other way round) protects the same one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from remote_ckpt.url import Location, parse_step

_resumed: dict[str, set[str]] = {}
"""Names of checkpoints by the identity of the run's directory that holds them."""


def note_resumed(checkpoint: Location) -> None:
    """Remember that this process read a checkpoint to go on from it."""
    for root, name in _names_of(checkpoint):
        _resumed.setdefault(root, set()).add(name)


def note_committed(checkpoint: Location) -> None:
    """Forget what was resumed from in a run's directory, once a step has been committed there.

    A named checkpoint (``best``) does not count: a run cannot be taken up again from it in its place.
    """
    if parse_step(checkpoint.name) is None:
        return
    for root, _ in _names_of(checkpoint):
        _resumed.pop(root, None)


def names_in_use(root: Location) -> frozenset[str]:
    """Return the names of the checkpoints in a run's directory that this process resumed from."""
    return frozenset(_resumed.get(_identity(root), ()))


def forget_all() -> None:
    """Forget everything, as a new process would."""
    _resumed.clear()


def _names_of(checkpoint: Location) -> Iterator[tuple[str, str]]:
    yield _identity(checkpoint.parent), checkpoint.name
    if checkpoint.is_local:
        yield os.path.split(os.path.realpath(checkpoint.path))


def _identity(root: Location) -> str:
    return os.path.realpath(root.path) if root.is_local else root.url
