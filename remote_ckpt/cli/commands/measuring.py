"""``du``: how much space checkpoints take, what was left over, and what is not ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from remote_ckpt.cli.access import Access, takes_root, takes_store
from remote_ckpt.cli.command import Command
from remote_ckpt.cli.output import Output, plain, takes_output
from remote_ckpt.cli.table import Cell, Column, Painted
from remote_ckpt.cli.text import escape, format_bytes, format_count

if TYPE_CHECKING:
    from remote_ckpt.usage import CheckpointUsage, Remains, Usage

_COLUMNS = (
    Column("name"),
    Column("kind"),
    Column("objects", is_number=True),
    Column("size", is_number=True),
    Column("left over", is_number=True),
)


@click.command(cls=Command)
@takes_root
@takes_store
@takes_output
def du(root: str, access: Access, out: Output) -> None:
    """Show how much space each checkpoint takes, and what no checkpoint needs (see sweep)."""
    with access.directory(root) as directory:
        usage = directory.usage()
    out.show(lambda: _document(usage), lambda: _text(usage, out))


def _document(usage: Usage) -> dict[str, Any]:
    document: dict[str, Any] = plain(usage)
    return {"root": document.pop("url"), **document, "total_bytes": usage.total_bytes}


def _text(usage: Usage, out: Output) -> str:
    totals = f"checkpoints {format_bytes(usage.total_bytes)}, left over {format_bytes(usage.leftover_bytes)}"
    if usage.other_count:
        others = format_count(usage.other_count, "object")
        totals += f", not ours {format_bytes(usage.other_bytes)} in {others}"
    rows = [*map(_row, usage.checkpoints), *map(_remains_row, usage.remains)]
    if not rows:
        return f"no checkpoints in {escape(usage.url)}: {totals}"
    return f"{out.table(_COLUMNS, rows)}\n\n{totals}"


def _row(each: CheckpointUsage) -> list[Cell]:
    return [
        Painted(each.name, "bold"),
        each.kind,
        str(each.object_count),
        format_bytes(each.total_bytes),
        format_bytes(each.leftover_bytes),
    ]


def _remains_row(each: Remains) -> list[Cell]:
    return [each.name, "none", "0", format_bytes(0), format_bytes(each.total_bytes)]
