"""The standard streams where they are closed, full or no longer read: none of that may pass for an answer."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, TextIO

_NAMES_HANDLER: Final = "remote-ckpt-names"


def open_missing_streams() -> None:
    """Give the process the standard streams that it was started without.

    Otherwise the next file that it opens gets their number, and what is written for people goes into it.
    A stdout that is missing cannot be written: only a command that has something to say fails by it.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != number:  # a lower one is missing too, and could not be opened
                os.dup2(opened, number)
                os.close(opened)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115


def say(line: str) -> None:
    """Write a line to stderr; where nobody can be told, the exit code still tells."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        drop(sys.stderr)


class OutputLostError(Exception):
    """What was to be shown could not be written to stdout; its cause says why."""


@contextmanager
def writing_output() -> Iterator[None]:
    """Tell a failure to write to stdout from any other: what comes before the answer is done by then."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        raise OutputLostError(f"cannot write the output: {error.strerror or error}") from error


def drop(stream: TextIO) -> None:
    """Let go of a stream that takes nothing, so that the interpreter's last flush does not fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def write_all_names() -> None:
    """Let stdout take any text: bytes of a path that are no text as they are, what it lacks as an escape."""
    codecs.register_error(_NAMES_HANDLER, _encode)
    with suppress(AttributeError):  # a stream that a test or notebook has put there
        sys.stdout.reconfigure(errors=_NAMES_HANDLER)  # type: ignore[union-attr]


def _encode(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    char = error.object[error.start]
    # Python's way to hold a byte of a path that is no UTF-8 (PEP 383).
    is_byte = 0xDC80 <= ord(char) <= 0xDCFF
    handler = codecs.lookup_error("surrogateescape" if is_byte else "backslashreplace")
    return handler(
        UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
    )
