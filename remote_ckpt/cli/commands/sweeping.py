"""``sweep``: what killed saves and interrupted deletions left."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from remote_ckpt.cli.access import Access, takes_root, takes_store
from remote_ckpt.cli.command import Command
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output, plain, takes_output
from remote_ckpt.cli.table import Cell, Column
from remote_ckpt.cli.text import escape, format_age_of, format_bytes, format_count
from remote_ckpt.cli.values import parse_duration, parsed

if TYPE_CHECKING:
    from remote_ckpt.sweep import Garbage, SweepReport

_COLUMNS = (
    Column("object"),
    Column("age", is_number=True),
    Column("size", is_number=True),
    Column("reason"),
)


@click.command(cls=Command)
@takes_root
@click.option(
    "--older-than",
    metavar="DURATION",
    callback=parsed(parse_duration),
    help="Touch nothing younger. Default: 24h. Much less is your word that no save is in progress.",
)
@click.option(
    "--tombstones",
    "has_tombstones",
    is_flag=True,
    help="Remove the marks of deleted checkpoints: run finished.",
)
@click.option("--yes", "is_sure", is_flag=True, help="Remove; without it the plan is shown and nothing done.")
@takes_store
@takes_output
def sweep(
    root: str,
    older_than: timedelta | None,
    has_tombstones: bool,
    is_sure: bool,
    access: Access,
    out: Output,
) -> ExitCode:
    """Remove what no checkpoint needs: left by saves that were killed and deletions that were interrupted."""
    with access.directory(root) as directory, out.progress("sweep") as on_progress:
        report = directory.sweep(
            older_than=older_than,
            dry_run=not is_sure,
            tombstones=has_tombstones,
            on_progress=on_progress,
        )
    out.show(lambda: _document(directory.url, report), lambda: _text(directory.url, report, out))
    return ExitCode.NO if report.failures else ExitCode.DONE


def _document(root: str, report: SweepReport) -> dict[str, Any]:
    document: dict[str, Any] = plain(report)
    document["older_than_seconds"] = document.pop("older_than")
    return {"root": root, **document, "garbage_bytes": _total(report)}


def _text(root: str, report: SweepReport, out: Output) -> str:
    if not report.garbage:
        return f"nothing to sweep in {escape(root)}"
    table = out.table(_COLUMNS, [_row(garbage, report) for garbage in report.garbage])
    found = f"{format_count(len(report.garbage), 'object')}, {format_bytes(_total(report))}"
    if report.is_dry_run:
        return f"{table}\n\nwould remove {found}; nothing was done: give --yes"
    removed = f"{format_count(report.removed_count, 'object')}, {format_bytes(report.removed_bytes)}"
    failures = [f"cannot remove {escape(each.key)}: {escape(each.message)}" for each in report.failures]
    return "\n".join([table, "", f"removed {removed}", *failures])


def _total(report: SweepReport) -> int:
    return sum(garbage.size_bytes for garbage in report.garbage)


def _row(garbage: Garbage, report: SweepReport) -> list[Cell]:
    return [
        escape(garbage.key),
        format_age_of(garbage.modified_at, now=report.now),
        format_bytes(garbage.size_bytes),
        escape(garbage.reason),
    ]
