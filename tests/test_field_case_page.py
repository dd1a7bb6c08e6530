"""The page of field cases names every case, and only tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "field-cases.md"
IDS = (
    *("01", "03", "04", "05", "09", "10", "12", "15", "17", "18", "21", "22", "23", "24", "26", "27", "33"),
    *("35", "36", "37", "39", "41", "42", "44", "46", "47", "48", "49", "50", "55", "56", "57", "59", "61"),
    *("62", "63", "67", "68", "69", "70", "72", "74", "75", "79", "80", "81", "82", "83", "84", "87", "88"),
    *("89", "91", "93", "94", "95", "96", "97", "99", "101", "102", "103", "104", "106", "108", "110", "113"),
    *("114", "115", "116", "119"),
)
ROW = re.compile(
    r"^\| BR-(?P<id>\d+) \|(?P<case>[^|]+)\|(?P<outcome>[^|]+)\|(?P<tests>[^|]+)\|$", re.MULTILINE
)
NAMED = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>\w+(?:::\w+)?)`")
CANNOT_ARISE = "cannot arise"


def rows() -> dict[str, re.Match[str]]:
    return {row["id"]: row for row in ROW.finditer(PAGE.read_text())}


@cache
def names_of(file: str) -> frozenset[str]:
    """The tests of a file, those of a class with its name before theirs."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + one.name for one in inner if isinstance(one, ast.FunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_every_case_has_one_row() -> None:
    assert len(IDS) == len(set(IDS)) == 71
    assert [row["id"] for row in ROW.finditer(PAGE.read_text())] == list(IDS)


def test_every_line_of_the_tables_is_a_row() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| BR")]
    assert [line for line in lines if not ROW.fullmatch(line)] == []


@pytest.mark.parametrize("number", IDS)
def test_the_tests_of_a_row_exist_and_one_of_them_has_its_number(number: str) -> None:
    row = rows()[number]
    named = [(match["file"], match["name"]) for match in NAMED.finditer(row["tests"])]
    assert [name for file, name in named if name not in names_of(file)] == []
    numbered = re.compile(rf"br_?0*{int(number)}(?!\d)")
    has_its_number = any(numbered.search(name) for _, name in named)
    assert has_its_number or (CANNOT_ARISE in row["outcome"] and named)
