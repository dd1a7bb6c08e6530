"""Copies end to end: real checkpoints, copied, their source gone, loaded by torch's reader and by ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader

from remote_ckpt import keep_checkpoint_copy
from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.store import open_store
from remote_ckpt.testing.servers import LocalServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

State = dict[str, Any]
READERS: dict[str, Callable[[str], StorageReader]] = {"stock": FileSystemReader, "ours": RemoteStorageReader}


def state(offset: float) -> State:
    return {
        "weights": torch.arange(5000, dtype=torch.float32).reshape(50, 100) + offset,
        "half": torch.full((3,), offset, dtype=torch.bfloat16),
        "step": int(offset),
    }


def load(reader: StorageReader) -> State:
    loaded = {"weights": torch.zeros(50, 100), "half": torch.zeros(3, dtype=torch.bfloat16), "step": -1}
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    return loaded


def is_equal(found: State, wanted: State) -> bool:
    tensors = all(torch.equal(found[name], wanted[name]) for name in ("weights", "half"))
    return tensors and found["step"] == wanted["step"]


def delete(run: str, name: str, **options: Any) -> None:
    with closing(open_store(run, **options)) as root, closing(root.scope(name)) as checkpoint:
        delete_checkpoint(checkpoint)


@pytest.mark.parametrize("reader", READERS)
def test_a_copy_is_loaded_after_its_source_is_gone(tmp_path: Path, reader: str) -> None:
    dcp.save(state(1.0), storage_writer=RemoteStorageWriter(tmp_path / "7"), no_dist=True)
    copy = keep_checkpoint_copy(tmp_path / "7")
    delete(str(tmp_path), "7")
    assert [path.name for path in tmp_path.iterdir()] == ["7_keep"]
    assert is_equal(load(READERS[reader](str(copy))), state(1.0))


@pytest.mark.parametrize("reader", READERS)
def test_a_copy_made_again_is_that_of_the_newer_source(tmp_path: Path, reader: str) -> None:
    for offset in (1.0, 2.0, 3.0):
        writer = RemoteStorageWriter(tmp_path / "7", overwrite=True)
        dcp.save(state(offset), storage_writer=writer, no_dist=True)
        if offset < 3.0:
            copy = keep_checkpoint_copy(tmp_path / "7")
    assert is_equal(load(READERS[reader](str(copy))), state(2.0))
    assert is_equal(load(READERS[reader](str(tmp_path / "7"))), state(3.0))


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("reader", READERS)
def test_a_copy_of_a_stock_checkpoint_does_not_change_with_its_source(tmp_path: Path, reader: str) -> None:
    """Stock DCP overwrites its files in place, which a hard link would share."""
    for offset in (1.0, 2.0):
        writer = FileSystemWriter(tmp_path / "7", overwrite=True)
        dcp.save(state(offset), storage_writer=writer, no_dist=True)
        if offset < 2.0:
            copy = keep_checkpoint_copy(tmp_path / "7")
    assert is_equal(load(READERS[reader](str(copy))), state(1.0))


def test_a_copy_on_a_server_is_loaded_after_its_source_is_gone(
    ministack: LocalServer, fresh_root: Callable[[LocalServer], str]
) -> None:
    run, options = fresh_root(ministack), ministack.storage_options()
    writer = RemoteStorageWriter(f"{run}/7", storage_options=options)
    dcp.save(state(1.0), storage_writer=writer, no_dist=True)
    keep_checkpoint_copy(f"{run}/7", storage_options=options)
    delete(run, "7", storage_options=options)
    assert is_equal(load(RemoteStorageReader(f"{run}/7_keep", storage_options=options)), state(1.0))
