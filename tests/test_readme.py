"""What the README shows a command to print is what it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cli_runs import run
from test_docs import ROOT, read_blocks

README = ROOT / "README.md"
CHANGES_WITH_EACH_RUN = {
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ": "TIME",
    r"\d{8}T\d{6}Z-[0-9a-f]{12}": "SAVE ID",
    r"sha256:[0-9a-f]{64}": "DIGEST",
    r"\b\d+[smh](?: ago)?\b": "AGE",
    r"\S*/run/1000\b": "URL",
    r"\b\d+\.\d+\.\d+\S*": "VERSION",
    r" +": " ",
}


def without_what_changes(text: str) -> str:
    for pattern, word in CHANGES_WITH_EACH_RUN.items():
        text = re.sub(pattern, word, text)
    return text.strip()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_commands_of_the_readme_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = list(read_blocks(README))
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        if block.language == "python":
            exec(compile(block.code, str(README), "exec"), names)
    shown = [block.code for block in blocks if block.code.startswith("$ remote-ckpt ")]
    commands = [shlex.split(code.splitlines()[0].removeprefix("$ remote-ckpt ")) for code in shown]
    assert [command[0] for command in commands] == ["ls", "info", "prune"]
    for command, code in zip(commands, shown, strict=True):
        printed = run(*command)
        assert (printed.code, printed.stderr) == (0, "")
        assert without_what_changes(printed.stdout) == without_what_changes(code.partition("\n")[2])
