"""What is wrong with a checkpoint: values that its verification is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from remote_ckpt.spans import Span


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with one object.

    Args:
        key: The object, relative to the checkpoint.
        message: What is wrong with it.
        tensors: Sorted names of the tensors (and other values) that cannot be loaded because of it. None
            where only the framing between payloads is wrong, and where no index says what the object holds.
    """

    key: str
    message: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What an examination looked at, and what it found.

    Args:
        sizes: Bytes of each object that was looked for; 0 where it is missing.
        problems: All that is wrong.
        warnings: What could not be checked, and what concerns other readers only.
        is_data_read: Every byte of the data was read.
    """

    sizes: Mapping[str, int]
    problems: Sequence[Problem] = ()
    warnings: Sequence[str] = ()
    is_data_read: bool = False


def names_of(spans: Iterable[Span], *, beyond_bytes: int = 0) -> tuple[str, ...]:
    """Return whose bytes lie in an object, or of whom some lie beyond its first bytes; sorted."""
    return tuple(sorted({span.name for span in spans if span.end_bytes > beyond_bytes}))
