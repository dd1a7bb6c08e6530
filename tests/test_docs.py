"""What README and docs show is run: python blocks as they stand, commands against what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from remote_ckpt.testing.servers import LocalServer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
SHOWN_ONLY = ("json", "text", "yaml", "")
"""Languages of blocks that show data or a drawing: there is nothing in them to run."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    code: str
    line: int


def read_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        yield Block(match["language"].strip(), match["code"], text.count("\n", 0, match.start()) + 1)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in read_blocks(page))]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def server(ministack: LocalServer) -> LocalServer:
    """The S3 server behind the ``s3://bucket/`` of the pages."""
    ministack.create_bucket("bucket")
    return ministack


@pytest.mark.server
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_the_python_blocks_of_a_page_run_one_after_the_other(
    page: Path, server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in read_blocks(page):
        if block.language == "python":
            source = "\n" * block.line + block.code  # so that a traceback shows the page's own line
            exec(compile(source, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    known = {"python", "sh", *SHOWN_ONLY}
    assert [block for block in read_blocks(page) if block.language not in known] == []


@pytest.mark.parametrize("page", pages_with("sh"), ids=name_of)
def test_commands_name_targets_and_files_that_exist(page: Path) -> None:
    commands = "\n".join(block.code for block in read_blocks(page) if block.language == "sh")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", commands)) <= targets
    files = re.findall(r"\b(?:examples|scripts|benchmarks|tests)/[\w./-]+", commands)
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    for match in LINK.finditer(page.read_text()):
        target = (page.parent / match["path"]).resolve() if match["path"] else page
        assert target.exists(), match[0]
        assert not match["anchor"] or match["anchor"] in anchors(target), match[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert {name for name in named if f"def {name}(" not in tests} == set()


def test_the_makefile_has_ten_targets_at_most() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(targets) <= 10
