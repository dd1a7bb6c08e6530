"""Copies end to end: real checkpoints, copied, their source gone, loaded by torch's reader and by ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader

from remote_ckpt import keep_checkpoint_copy, load_checkpoint, save_checkpoint
from remote_ckpt.copying import copy_across
from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.place import place_of
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


def test_a_copy_in_another_store_is_loaded_bit_for_bit_and_back_again(
    tmp_path: Path, ministack: LocalServer, fresh_root: Callable[[LocalServer], str]
) -> None:
    """Disk to server, by our functions and torch's reader of URLs; server to disk, by torch's of files."""
    run, options = fresh_root(ministack), ministack.storage_options()
    here, there, back = place_of(tmp_path / "run"), place_of(run, storage_options=options), tmp_path / "back"
    saved, loaded = trained(), trained(steps=0)
    save_checkpoint(tmp_path / "run" / "7", iteration=7, model=saved[0], optimizer=saved[1])
    copy_across(here, "7", there, "7")
    delete(str(tmp_path / "run"), "7")
    assert load_checkpoint(f"{run}/7", model=loaded[0], optimizer=loaded[1], storage_options=options) == 7
    assert bits_of(loaded) == bits_of(saved)
    wanted = {"model": {name: torch.zeros_like(value) for name, value in saved[0].state_dict().items()}}
    dcp.load(wanted, storage_reader=FsspecReader(f"{run}/7", **options), no_dist=True)
    assert bits_of_tensors(wanted["model"]) == bits_of_tensors(saved[0].state_dict())
    copy_across(there, "7", place_of(back), "best")
    wanted = {"model": {name: torch.zeros_like(value) for name, value in saved[0].state_dict().items()}}
    dcp.load(wanted, storage_reader=FileSystemReader(back / "best"), no_dist=True)
    assert bits_of_tensors(wanted["model"]) == bits_of_tensors(saved[0].state_dict())


@pytest.mark.parametrize("reader", READERS)
def test_a_stock_checkpoint_is_loaded_from_another_store(
    tmp_path: Path, ministack: LocalServer, fresh_root: Callable[[LocalServer], str], reader: str
) -> None:
    run, options = fresh_root(ministack), ministack.storage_options()
    dcp.save(state(3.0), storage_writer=FileSystemWriter(tmp_path / "7"), no_dist=True)
    copy_across(place_of(tmp_path), "7", place_of(run, storage_options=options), "7")
    delete(str(tmp_path), "7")
    remote: dict[str, StorageReader] = {
        "stock": FsspecReader(f"{run}/7", **options),
        "ours": RemoteStorageReader(f"{run}/7", storage_options=options),
    }
    assert is_equal(load(remote[reader]), state(3.0))


Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


def trained(*, steps: int = 3) -> Trained:
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 1)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 40, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    return model, optimizer


def bits_of(pair: Trained) -> tuple[dict[str, bytes], dict[str, bytes]]:
    model, optimizer = pair
    states = optimizer.state_dict()["state"]
    moments = {f"{n}.{name}": states[n][name] for n in states for name in states[n]}
    return bits_of_tensors(model.state_dict()), bits_of_tensors(moments)


def bits_of_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}
