"""The commands of ``docs/command-line.md`` are run as they stand, one after the other."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from cli_runs import SCRIPT
from handmade import pattern, rows, whole, write_checkpoint
from test_docs import ROOT, read_blocks

from remote_ckpt.changes import annotate
from remote_ckpt.store import open_store
from remote_ckpt.testing.servers import LocalServer

PAGE = ROOT / "docs" / "command-line.md"
URL_OF_THE_PAGE = "s3://bucket/run/ckpt"


@pytest.fixture
def filled(ministack: LocalServer, fresh_root: Callable[[LocalServer], str]) -> str:
    """The run that the page speaks of: two steps and a copy of the second as ``best``."""
    url = fresh_root(ministack)
    items = {
        "model.weight": rows((6, 4), pattern(24), [2, 4]),
        "optim.step": whole((), pattern(4), "float32"),
    }
    with closing(open_store(url, storage_options=ministack.storage_options())) as root:
        for name, loss in (("100", 2.31), ("200", 2.17), ("best", 2.17)):
            write_checkpoint(root, name, items)
            annotate(root.scope(name), metrics={"loss": loss})
    return url


@pytest.mark.server
def test_the_commands_of_the_page_run(ministack: LocalServer, filled: str, tmp_path: Path) -> None:
    blocks = [block.code for block in read_blocks(PAGE) if block.language == "sh"]
    assert sum(block.count("remote-ckpt ") for block in blocks) >= 15
    script = "set -e -u -o pipefail\n" + "\n".join(blocks).replace(URL_OF_THE_PAGE, filled)
    environ = {
        **os.environ,
        **ministack.environment(),
        "PATH": f"{Path(SCRIPT).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{filled}/best" in done.stdout
    assert "sound" in done.stdout
    assert "equal: 2 entries" in done.stdout
    assert sorted(path.name for path in (tmp_path / "backup").iterdir()) == ["100", "best"]
