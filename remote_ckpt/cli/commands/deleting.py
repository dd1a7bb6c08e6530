"""``rm``: checkpoints that are named, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from remote_ckpt.cli.access import Access, Named, parse_checkpoints, takes_checkpoints, takes_store
from remote_ckpt.cli.command import Command
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output, takes_output
from remote_ckpt.cli.several import Outcomes
from remote_ckpt.cli.table import Cell, Column, Painted
from remote_ckpt.cli.text import escape, format_age_of, format_bytes, format_count
from remote_ckpt.errors import CheckpointDamagedError, CheckpointNotFoundError
from remote_ckpt.progress import ProgressCounter

if TYPE_CHECKING:
    from remote_ckpt.directory import CheckpointDirectory
    from remote_ckpt.info import CheckpointInfo

_COLUMNS = (
    Column("action"),
    Column("checkpoint"),
    Column("age", is_number=True),
    Column("size", is_number=True),
)


@dataclass(frozen=True, slots=True)
class _Removal:
    """What becomes of one checkpoint; ``info`` is None where only the rest of a deletion was left."""

    action: Literal["delete", "refuse", "deleted", "finished"]
    url: str
    info: CheckpointInfo | None


@click.command(cls=Command)
@takes_checkpoints
@click.option("--yes", "is_sure", is_flag=True, help="Delete; without it the plan is shown and nothing done.")
@takes_store
@takes_output
def rm(paths: Sequence[str], is_sure: bool, access: Access, out: Output) -> ExitCode:
    """Delete checkpoints. Only a pin is in the way."""
    names = parse_checkpoints(paths)
    outcomes = Outcomes(out)
    removals: list[_Removal] = []
    with access.directories() as directory_of, out.progress("rm") as on_progress:
        counter = ProgressCounter("delete", on_progress, total_objects=len(names))
        for named in names:
            with outcomes.of(named):
                directory = directory_of(named.root)
                removals.append(_remove(directory, named) if is_sure else _plan(directory, named))
            counter.advance(done_objects=1)
    out.show(
        lambda: {"is_dry_run": not is_sure, "checkpoints": [_document(each) for each in removals]},
        lambda: _text(removals, is_sure, out) if removals else "",
    )
    return outcomes.exit_code


def _plan(directory: CheckpointDirectory, named: Named) -> _Removal:
    info = _find(directory, named.name)
    return _Removal("refuse" if info.pinned else "delete", named.url, info)


def _remove(directory: CheckpointDirectory, named: Named) -> _Removal:
    try:
        info = _find(directory, named.name)
    except CheckpointNotFoundError:
        # What an interrupted deletion left goes now; where there was none, this says so.
        directory.delete(named.name)
        return _Removal("finished", named.url, None)
    directory.delete(info)  # by what was found: a newer life of the name stays
    return _Removal("deleted", named.url, info)


def _find(directory: CheckpointDirectory, name: str) -> CheckpointInfo:
    try:
        return directory.info(name)
    except CheckpointDamagedError:
        for info in directory.list():
            if info.name == name:
                return info
        raise


def _document(removal: _Removal) -> dict[str, Any]:
    info = removal.info
    return {
        "url": removal.url,
        "action": removal.action,
        "total_bytes": None if info is None else info.total_bytes,
        "committed_at": None if info is None else info.committed_at,
        "pinned": False if info is None else info.pinned,
        "save_id": None if info is None else info.save_id,
    }


def _text(removals: Sequence[_Removal], is_sure: bool, out: Output) -> str:
    gone = [removal for removal in removals if removal.action in ("delete", "deleted")]
    total_bytes = sum(removal.info.total_bytes for removal in gone if removal.info)
    amount = f"{format_count(len(gone), 'checkpoint')}, {format_bytes(total_bytes)}"
    end = f"deleted {amount}" if is_sure else f"would delete {amount}; nothing was done: give --yes"
    return f"{out.table(_COLUMNS, map(_row, removals))}\n\n{end}"


def _row(removal: _Removal) -> list[Cell]:
    info = removal.info
    return [
        Painted("refuse: pinned", "red") if removal.action == "refuse" else Painted(removal.action, "yellow"),
        escape(removal.url),
        format_age_of(None if info is None else info.committed_at),
        "-" if info is None or info.is_damaged else format_bytes(info.total_bytes),
    ]
