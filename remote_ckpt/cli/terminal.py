"""What the other end of stdout and stderr is: a person's terminal, or a pipe or file."""

from __future__ import annotations

import os
from typing import TextIO


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody watches this stream on a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """Whether to write colours: on a terminal only, and not with ``NO_COLOR`` (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")
