"""What a command shows: one JSON document or text on stdout; errors, warnings and progress on stderr."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from remote_ckpt.cli.exits import ExitCode, error_document, error_message, exit_code_of
from remote_ckpt.cli.streams import say, writing_output
from remote_ckpt.cli.table import Cell, Column, Painted, format_table, paint
from remote_ckpt.cli.terminal import has_colours, is_terminal
from remote_ckpt.cli.text import escape, redact_words
from remote_ckpt.errors import RemoteCkptError
from remote_ckpt.fields import format_time
from remote_ckpt.url import redact_url

if TYPE_CHECKING:
    from remote_ckpt.progress import OnProgress


@dataclass(frozen=True, slots=True)
class Output:
    """How one command answers.

    Args:
        is_json: One JSON document on stdout, and errors as JSON on stderr.
    """

    is_json: bool

    @property
    def has_colours(self) -> bool:
        """Whether stdout takes colours."""
        return has_colours(sys.stdout)

    def show(self, document: Callable[[], Mapping[str, Any]], text: Callable[[], str]) -> None:
        """Write the answer: one of the two is made."""
        lines = format_json(document()) if self.is_json else text()
        if lines:
            with writing_output():
                sys.stdout.write(f"{lines}\n")

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> str:
        """Return a table, in colours where stdout takes them."""
        return format_table(columns, rows, has_colours=self.has_colours)

    def paint(self, text: str, colour: str) -> str:
        """Return a text in a colour, where stdout takes it."""
        return paint(Painted(text, colour), has_colours=self.has_colours)

    def warn(self, message: str) -> None:
        """Write a warning to stderr."""
        say(f"warning: {escape(redact_words(message))}")

    def fail(self, error: BaseException) -> ExitCode:
        """Write an error to stderr; return its exit code, for a command that goes on with the rest."""
        print_error(error, is_json=self.is_json)
        return exit_code_of(error)

    @contextmanager
    def progress(self, label: str) -> Iterator[OnProgress | None]:
        """A progress bar on stderr while the block runs; None, and no bar, where it is no terminal."""
        if not is_terminal(sys.stderr):
            yield None
            return
        from remote_ckpt.cli.bars import Bar

        with Bar(escape(label)) as bar:
            yield bar.show


def takes_output(function: Callable[..., ExitCode | None]) -> Callable[..., ExitCode | None]:
    """Give a command the options ``--json``, ``-v`` and ``--traceback``, and the argument ``out``."""

    @click.option("--json", "is_json", is_flag=True, help="Print one JSON document.")
    @click.option("-v", "--verbose", "verbosity", count=True, help="Show what is done, on stderr; -vv: all.")
    @click.option("--traceback", "_traceback", is_flag=True, help="Show where an error came from.")
    @functools.wraps(function)
    def wrapper(*, is_json: bool, verbosity: int, _traceback: bool, **arguments: Any) -> ExitCode | None:
        from remote_ckpt.cli.logs import logging_to_stderr

        with logging_to_stderr(verbosity):
            return function(out=Output(is_json), **arguments)

    return wrapper


def print_error(error: BaseException, *, is_json: bool, message: str | None = None) -> None:
    """Write an error to stderr: one line of text, or of JSON. No secret of a URL is repeated."""
    plain = _redacted(error) if message is None else redact_words(message)
    if is_json:
        line = format_json({"error": error_document(error, message=plain)})
    else:
        line = f"{paint(Painted('error:', 'red'), has_colours=has_colours(sys.stderr))} {escape(plain)}"
    say(line)


def print_traceback(error: BaseException) -> None:
    """Write where an error came from to stderr; no secret of a URL is repeated."""
    import traceback

    for line in "".join(traceback.format_exception(error)).splitlines():
        say(redact_url(line))


def _redacted(error: BaseException) -> str:
    """Return what to tell of an error. Our own messages hold no secrets; a stranger's may hold any text."""
    redact = redact_words if isinstance(error, RemoteCkptError) else redact_url
    return redact(error_message(error))


# --- JSON ------------------------------------------------------------------------------------------------


def format_json(document: Mapping[str, Any]) -> str:
    """Return valid JSON in ASCII on one line: NaN and infinities as texts, times in UTC as ISO 8601."""
    # Indented JSON is written by Python, not by C: minutes for the tensors of a large checkpoint.
    return json.dumps(plain(document), allow_nan=False)


def plain(value: Any) -> Any:
    """Return a value as JSON has it; dataclasses become objects with the same names."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, BaseException):
        return error_document(value, message=_redacted(value))
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return [plain(item) for item in value]
