"""The page of reliability: each of its commands runs tests that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"


@dataclass(frozen=True)
class Command:
    """A call of pytest in the last column of a table."""

    text: str
    paths: tuple[str, ...]
    words: tuple[str, ...]
    marker: str | None


def read_commands() -> list[Command]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    cells = [row.rstrip(" |").rpartition(" | ")[2] for row in rows]
    texts = [text for cell in cells for text in re.findall(r"`([^`]*)`", cell) if "pytest" in text.split()]
    return [parse(text) for text in dict.fromkeys(texts)]


def parse(text: str) -> Command:
    arguments = shlex.split(text)[shlex.split(text).index("pytest") + 1 :]
    options = {name: arguments[arguments.index(name) + 1] for name in ("-k", "-m") if name in arguments}
    return Command(
        text=text,
        paths=tuple(word for word in arguments if word.startswith("tests/")),
        words=tuple(options["-k"].split(" or ")) if "-k" in options else (),
        marker=options.get("-m"),
    )


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """All tests of the files that the page names, as pytest finds them."""
    files = sorted({path for command in read_commands() for path in command.paths})
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in found.stdout.splitlines() if "::" in line]


def test_the_page_has_commands() -> None:
    assert len(read_commands()) >= 15


@pytest.mark.parametrize("command", read_commands(), ids=lambda command: command.text)
def test_a_command_of_the_page_runs_tests(command: Command, collected: list[str]) -> None:
    assert command.paths or command.marker == "server"
    for path in command.paths:
        names = [name for name in collected if name.startswith(f"{path}::")]
        assert names, f"no tests in {path}"
        for word in command.words:
            assert any(word in name for name in names), f"{word} selects nothing"
