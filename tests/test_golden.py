"""Checkpoints written by earlier versions of this package stay readable, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from golden_state import golden_state
from test_dcp_single import assert_same, blank
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader

from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.manifest import format_manifest, parse_manifest

GOLDEN = Path(__file__).parent / "golden"

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def template() -> dict[str, Any]:
    state: dict[str, Any] = blank(golden_state())
    state["layers"] = [torch.zeros(2), {"lr": 0.0}]
    return state


@pytest.mark.parametrize("version", ["1"])
@pytest.mark.parametrize("reader", [RemoteStorageReader, FileSystemReader])
def test_every_format_is_read_by_us_and_by_stock_torch(version: str, reader: type[StorageReader]) -> None:
    state = template()
    dcp.load(state, storage_reader=reader(GOLDEN / version / "checkpoint"))  # type: ignore[call-arg]
    assert_same(state, golden_state())


def test_what_the_golden_manifest_says() -> None:
    path = GOLDEN / "1" / "checkpoint" / "manifest.000001.json"
    manifest = parse_manifest(path.read_bytes(), url="golden", key=path.name)
    assert manifest.metrics == {"accuracy": 0.75}
    assert manifest.user_metadata == {"note": "golden"}
    assert manifest.left_out == ("model.frozen",)
    assert format_manifest(manifest) == path.read_bytes()
