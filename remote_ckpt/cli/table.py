"""Tables of text: aligned, and never wrapped or cut, so that a pipe gets each row whole. Pure.

rich's tables cut at 80 columns where there is no terminal, and cost a tenth of a second at the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remote_ckpt.cli.text import display_width

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


@dataclass(frozen=True, slots=True)
class Painted:
    """A text with a colour: ``bold``, ``dim``, ``red``, ``green`` or ``yellow``."""

    text: str
    colour: str

    def __str__(self) -> str:
        return self.text


Cell = str | Painted


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading; numbers stand to the right."""

    title: str
    is_number: bool = False


def paint(cell: Cell, *, has_colours: bool) -> str:
    """Return a text with its colour, where colours are wanted."""
    if isinstance(cell, Painted) and has_colours and cell.text:
        return f"\x1b[{_CODES[cell.colour]}m{cell.text}\x1b[0m"
    return str(cell)


def format_table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, has_colours: bool) -> str:
    """Return heading and rows as lines, two spaces between the columns, none at the end of a line."""
    lines: list[Sequence[Cell]] = [[Painted(column.title, "dim") for column in columns], *rows]
    widths = [max(display_width(str(line[number])) for line in lines) for number in range(len(columns))]
    return "\n".join(_format_line(columns, widths, line, has_colours) for line in lines)


def _format_line(
    columns: Sequence[Column], widths: Sequence[int], cells: Sequence[Cell], has_colours: bool
) -> str:
    parts = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        padding = " " * (width - display_width(str(cell)))
        painted = paint(cell, has_colours=has_colours)
        parts.append(padding + painted if column.is_number else painted + padding)
    return "  ".join(parts).rstrip()
