"""Whether two checkpoints hold the same: names, shapes, dtypes, and values by their checksums.

The values of most tensors are compared without reading them, also where other numbers of ranks saved them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from remote_ckpt.checksum_comparison import (
    Difference,
    Verdict,
    compare_tensors,
    compare_values,
    has_checksums,
)
from remote_ckpt.element_comparison import compare_elements
from remote_ckpt.generation import DEFAULT_OPTIONS
from remote_ckpt.options import Options
from remote_ckpt.progress import OnProgress, ProgressCounter
from remote_ckpt.sides import Side, Sides
from remote_ckpt.snapshot import open_snapshot
from remote_ckpt.store.base import Store


@dataclass(frozen=True, slots=True)
class Change:
    """Something that both checkpoints have, and not the same.

    Args:
        name: Name of the tensor or value.
        what: ``"kind"`` (one is a tensor, the other is not), ``"shape"``, ``"dtype"``, or ``"values"``.
        first: What it is in the first checkpoint, as a text; of values a checksum.
        second: What it is in the second.
    """

    name: str
    what: Literal["kind", "shape", "dtype", "values"]
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two checkpoints have in common, and what not.

    Args:
        only_first: Names that only the first has, sorted.
        only_second: Names that only the second has, sorted.
        changes: What both have and differs, sorted by name. A tensor whose shape or dtype changed is not
            compared by values.
        equal_count: Names that are the same in both.
        undecided: Names of equal shape and dtype whose values could not be compared, sorted.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changes: tuple[Change, ...]
    equal_count: int
    undecided: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the two are known to hold the same."""
        return not (self.only_first or self.only_second or self.changes or self.undecided)


def compare_checkpoints(
    first_root: Store,
    first: str,
    second_root: Store,
    second: str,
    *,
    read_data: bool = False,
    options: Options = DEFAULT_OPTIONS,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Compare two checkpoints of any number of ranks. Called by one process; changes nothing.

    Tensors are compared bit by bit: -0.0 is not 0.0, and a NaN equals the same NaN. By checksums alone the
    following stay undecided: tensors that the two cut differently, and one of them not along the first
    dimension; and everything where one of the two is a stock checkpoint, which has no checksums. With
    ``read_data`` these are read; what then stays undecided are tensors that only ``torch.load`` can read
    (subclasses, say, or what stock torch did not save as plain rows) and whose bytes differ.

    Values that are no tensors are compared by their pickled bytes. Different ones count as changed, though
    pickles of equal values may differ (a dict that was filled in another order).

    Args:
        first_root: The run's directory of the first.
        first: Its name.
        second_root: The run's directory of the second; it may be the same.
        second: Its name.
        read_data: Read what checksums do not decide. Bodies of at most ``budget_bytes`` are held at once.
        options: Of ``transfer``, sizes and ``concurrency`` are used.
        on_progress: Told of names, and of bytes read from both sides; the operation is ``"compare"``.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint, established by a listing that succeeded.
        CheckpointDamagedError, IntegrityError, UntrustedDataError: An index cannot be read, or bytes that
            have to be compared are missing.
        FormatError: One is of a newer format, or a plain ``checkpoint.pth``.
        CheckpointChangedError: One was replaced or deleted meanwhile; compare again.
        StoreError: A store failed.
    """
    with open_snapshot(first_root, first) as one, open_snapshot(second_root, second) as other:
        sides = Side(one, one.read_index()), Side(other, other.read_index())
        names = sides[0].names & sides[1].names
        changes, undecided = _compare_indexes(sides, sorted(names))
        total_bytes = 2 * sum(map(sides[0].bytes_of, undecided)) if read_data else 0
        counter = ProgressCounter("compare", on_progress, total_bytes=total_bytes, total_objects=len(names))
        counter.advance(done_objects=len(names) - len(undecided))
        if read_data:
            findings = compare_elements(sides, undecided, options=options.transfer, counter=counter)
            _require_unchanged(sides)
            changes += [_values(name, difference) for name, difference in findings.differences.items()]
            undecided = sorted(findings.undecided)
    return Comparison(
        only_first=tuple(sorted(sides[0].names - names)),
        only_second=tuple(sorted(sides[1].names - names)),
        changes=tuple(sorted(changes, key=lambda change: (change.name, change.what))),
        equal_count=len(names) - len({change.name for change in changes}) - len(undecided),
        undecided=tuple(undecided),
    )


def _require_unchanged(sides: Sides) -> None:
    """Stock checkpoints are overwritten in place, which no read notices."""
    for side in sides:
        if not has_checksums(side.index):
            side.snapshot.require_unchanged()


def _compare_indexes(sides: Sides, names: Sequence[str]) -> tuple[list[Change], list[str]]:
    """Return what differs as far as two indexes tell, and the names of which they do not."""
    changes: list[Change] = []
    undecided: list[str] = []
    for name in names:
        if found := _describe(name, sides):
            changes += found
            continue
        verdict = _compare_checksums(name, sides)
        if isinstance(verdict, Difference):
            changes.append(_values(name, verdict))
        elif verdict is not None:
            undecided.append(name)
    return changes, undecided


def _describe(name: str, sides: Sides) -> list[Change]:
    """Return what differs before any values are looked at."""
    first, second = (side.index.tensors.get(name) for side in sides)
    if first is None or second is None:
        kinds = ["value" if tensor is None else "tensor" for tensor in (first, second)]
        return [] if kinds[0] == kinds[1] else [Change(name, "kind", *kinds)]
    changes = []
    if first.sizes != second.sizes:
        changes.append(Change(name, "shape", str(list(first.sizes)), str(list(second.sizes))))
    if first.dtype != second.dtype:
        changes.append(Change(name, "dtype", first.dtype, second.dtype))
    return changes


def _compare_checksums(name: str, sides: Sides) -> Verdict:
    first, second = (side.index for side in sides)
    compare = compare_tensors if name in first.tensors else compare_values
    return compare(name, first, second)


def _values(name: str, difference: Difference) -> Change:
    return Change(name, "values", difference.first, difference.second)
