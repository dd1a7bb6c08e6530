"""The package's log on the command line: warnings always, more with ``-v``; on stderr, never on stdout."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from remote_ckpt.cli.streams import say
from remote_ckpt.cli.text import escape, redact_words
from remote_ckpt.log import logger


@contextmanager
def logging_to_stderr(verbosity: int) -> Iterator[None]:
    """Show the package's log while a command runs: 0 shows warnings, 1 what is done, 2 all."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    handler = _StderrHandler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _StderrHandler(logging.Handler):
    """Writes to what stderr is at that moment: a progress bar takes it over, and makes room for lines."""

    def emit(self, record: logging.LogRecord) -> None:
        line = escape(redact_words(record.getMessage()))
        say(f"{record.levelname.lower()}: {line}")
