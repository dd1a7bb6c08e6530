"""What the other end of stdout and stderr is: a person's terminal, or a pipe or file."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody watches this stream on a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """Whether to write colours: on a terminal only, and not with ``NO_COLOR`` (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def write_all_names() -> None:
    """Let stdout take any text: what its encoding lacks is written as an escape."""
    with suppress(AttributeError):  # a stream that a test or notebook has put there
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def drop_stdout() -> None:
    """Let go of a stdout that nobody reads any more, so that the interpreter's last flush does not fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
