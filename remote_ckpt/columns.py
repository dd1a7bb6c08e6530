"""Columns of integers and checksums in untrusted JSON, checked and cut whole: there are millions of them.

All functions raise InvalidError (or another of ``fields.BROKEN``) for what does not add up.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from remote_ckpt import fields
from remote_ckpt.checksum import CRC_BYTES, count_blocks
from remote_ckpt.fields import InvalidError, require

_T = TypeVar("_T")


def column(value: Any, *, lowest: int = 0) -> list[int]:
    """Return a list of integers from ``lowest`` to 2**63 - 1."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise InvalidError("a column that is not a list of integers")
    is_in_range = lowest <= min(value, default=0) and max(value, default=0) <= fields.MAX_COUNT
    require(is_in_range, "a column with a number out of range")
    return value


def cut(items: Sequence[_T], lengths: Sequence[int]) -> list[Sequence[_T]]:
    """Cut a sequence into consecutive runs of these lengths, which must use it up."""
    ends = list(accumulate(lengths))
    require((ends[-1] if ends else 0) == len(items), "a column of another length than its counts add up to")
    return [items[start:end] for start, end in pairwise((0, *ends))]


def points(value: Any, dims: Sequence[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut a column into points: for each tensor as many as it has chunks, each of its dimensions.

    Nothing in the column bounds how many points of no dimensions there are: check the counts before.
    """
    runs = cut(column(value), [dim * count for dim, count in zip(dims, counts, strict=True)])
    all_points: list[tuple[int, ...]] = []
    for run, dim, count in zip(runs, dims, counts, strict=True):
        all_points += zip(*[iter(run)] * dim, strict=True) if dim else [()] * count
    return all_points


def by_name(names: Any, entries: Sequence[_T]) -> dict[str, _T]:
    """Return entries under their names, of which none may come twice."""
    named = dict(zip(fields.list_of(fields.text)(names), entries, strict=True))
    require(len(named) == len(entries), "the same name twice")
    return named


def join_crcs(crcs: Iterable[bytes]) -> str:
    """Return packed checksums as one base64 text."""
    return base64.b64encode(b"".join(crcs)).decode("ascii")


def cut_crcs(encoded: Any, covered_bytes: Sequence[int], block_bytes: int) -> list[bytes]:
    """Cut the checksums of all payloads; how many each has follows from the bytes that it covers."""
    packed = base64.b64decode(fields.text(encoded), validate=True)
    lengths = [count_blocks(size, block_bytes) * CRC_BYTES for size in covered_bytes]
    return list(map(bytes, cut(packed, lengths)))
