"""What the tests of the command line share: running it in this process or as the installed script."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from remote_ckpt.cli.app import app

SCRIPT = str(Path(sys.executable).parent / "remote-ckpt")
"""The installed command."""


@dataclass(frozen=True)
class Run:
    """What a call printed, and how it ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.stdout, parse_constant=_refuse)

    @property
    def lines(self) -> list[str]:
        """stdout, line by line."""
        return self.stdout.splitlines()

    @property
    def rows(self) -> list[list[str]]:
        """The lines of stdout, split at two or more spaces: the cells of a table."""
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in self.lines]


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def run(*arguments: object) -> Run:
    """Call the command line in this process; nothing is a terminal."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Run(result.exit_code, result.stdout, result.stderr)


def run_json(*arguments: object) -> Any:
    """Call a command with ``--json`` that ends well, and return the document."""
    done = run(*arguments, "--json")
    assert (done.code, done.stderr) == (0, "")
    return done.document


def run_script(*arguments: object, environ: Mapping[str, str] | None = None) -> Run:
    """Call the installed script; its output goes to pipes."""
    result = subprocess.run(
        [SCRIPT, *map(str, arguments)],
        capture_output=True,
        env={**os.environ, **(environ or {})},
        timeout=120,
        check=False,
    )
    return Run(result.returncode, os.fsdecode(result.stdout), result.stderr.decode())


def run_in_shell(line: str) -> Run:
    """Call the installed script with the redirections of a shell's line."""
    result = subprocess.run(
        f"{shlex.quote(SCRIPT)} {line}", shell=True, capture_output=True, timeout=120, check=False
    )
    return Run(result.returncode, result.stdout.decode(), result.stderr.decode())


def run_on_terminal(*arguments: object, environ: Mapping[str, str] | None = None) -> Run:
    """Call the installed script on a terminal: ``stdout`` is all that it shows there."""
    person, terminal = pty.openpty()
    process = subprocess.Popen(
        [SCRIPT, *map(str, arguments)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color", **(environ or {})},
    )
    os.close(terminal)
    shown = bytearray()
    with os.fdopen(person, "rb", buffering=0) as screen:
        while part := _read(screen.fileno()):
            shown += part
    return Run(process.wait(timeout=120), shown.decode(), "")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux's way to say that the other end is closed
        return b""
