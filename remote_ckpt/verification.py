"""Whether a checkpoint is whole: all there that its manifest names, and, if asked for, every byte right.

All problems are collected. A store that fails raises: what it could not show is neither damaged nor sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from remote_ckpt.generation import DEFAULT_OPTIONS
from remote_ckpt.keys import manifest_key
from remote_ckpt.newest import CheckpointKind
from remote_ckpt.options import Options, TransferOptions
from remote_ckpt.own_check import check_own
from remote_ckpt.problems import Checked, Problem
from remote_ckpt.progress import OnProgress
from remote_ckpt.snapshot import Snapshot, open_snapshot
from remote_ckpt.stock_check import check_plain, check_stock
from remote_ckpt.store.base import Store

__all__ = ["Problem", "VerifyReport", "verify_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found.

    Args:
        name: The checkpoint's name.
        url: Its URL without secrets.
        kind: ``"remote_ckpt"``, ``"dcp"`` or ``"plain"``.
        is_data_read: Every byte of its data was read and compared with its checksums.
        object_count: Objects that it needs and that were looked for.
        total_bytes: Bytes of those that are there.
        problems: All that is wrong.
        warnings: What could not be checked, and what concerns other readers only.
    """

    name: str
    url: str
    kind: CheckpointKind
    is_data_read: bool
    object_count: int
    total_bytes: int
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, as far as it was looked at."""
        return not self.problems


def verify_checkpoint(
    root: Store,
    name: str,
    *,
    read_data: bool = False,
    options: Options = DEFAULT_OPTIONS,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check a checkpoint, and report all that is wrong with it. Called by one process; changes nothing.

    The manifest and the index are read and checked, and every object that they name must be there with its
    size. Stock DCP checkpoints have no checksums: their files must be there and long enough. Of a plain one
    nothing can be told but that its file is there.

    Args:
        root: The run's directory.
        name: The checkpoint's name.
        read_data: Read every byte and compare it with both checksums that cover it, so that a problem names
            the tensors whose bytes are wrong. Bodies of at most ``budget_bytes`` are held at once.
        options: Of ``transfer``, ``budget_bytes``, ``part_bytes`` and ``concurrency`` are used.
        on_progress: Told of bytes read and objects looked at; the operation is ``"verify"``.

    Raises:
        CheckpointNotFoundError: There is none, established by a listing that succeeded.
        CheckpointChangedError: It was replaced or deleted while something seemed wrong; verify again.
        FormatError: Manifest or index is of a newer format.
        StoreError: The store failed, so nothing is known.
    """
    with _open_twice_if_damaged(root, name) as snapshot:
        checked = _check(snapshot, read_data, options.transfer, on_progress)
        if checked.problems:
            snapshot.require_unchanged()
        return VerifyReport(
            name=name,
            url=snapshot.url,
            kind=snapshot.kind,
            is_data_read=checked.is_data_read,
            object_count=len(checked.sizes),
            total_bytes=sum(checked.sizes.values()),
            problems=tuple(checked.problems),
            warnings=tuple(checked.warnings),
        )


def _check(
    snapshot: Snapshot, read_data: bool, options: TransferOptions, on_progress: OnProgress | None
) -> Checked:
    if snapshot.kind == "plain":
        return check_plain(snapshot)
    if snapshot.kind == "dcp":
        return check_stock(snapshot, read_data=read_data, options=options, on_progress=on_progress)
    if snapshot.standing.damage is not None:
        key = manifest_key(snapshot.standing.generation)
        return Checked(
            sizes={key: snapshot.listed_sizes().get(key, 0)},
            problems=[Problem(key, snapshot.standing.damage.message)],
        )
    return check_own(snapshot, read_data=read_data, options=options, on_progress=on_progress)


@contextmanager
def _open_twice_if_damaged(root: Store, name: str) -> Iterator[Snapshot]:
    """A manifest that was damaged on the way is read once more."""
    with open_snapshot(root, name, lists_all=True) as snapshot:
        if snapshot.standing.damage is None:
            yield snapshot
            return
    with open_snapshot(root, name, lists_all=True) as snapshot:
        yield snapshot
