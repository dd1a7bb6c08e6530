"""Field cases of memory and of many small items: what is counted are bytes in memory, requests and steps."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from remote_ckpt import (
    Options,
    RemoteStorageReader,
    RemoteStorageWriter,
    TransferOptions,
    init_fsdp_model_from_checkpoint,
)
from remote_ckpt.dcp.metadata import ItemKey, build_index, content_digest, rebuild_metadata
from remote_ckpt.dcp.objects import StoredItem
from remote_ckpt.index import check_ranges, format_index, parse_index
from remote_ckpt.manifest import ObjectEntry
from remote_ckpt.options import KiB, MiB
from remote_ckpt.store.meter import MeteredStore
from remote_ckpt.testing.servers import LocalServer

Where = tuple[str, dict[str, Any]]

# --- memory -------------------------------------------------------------------------------------

STATE_BYTES = 256 * MiB
SMALL = Options(transfer=TransferOptions(budget_bytes=32 * MiB, part_bytes=5 * MiB))
BOUND_BYTES = 160 * MiB
"""The budget, what the clients and the allocator hold beside it, and room; far less than the state."""


class Peak:
    """The most memory that this process has held since the block began, beyond what it held then (Linux)."""

    extra_bytes = 0

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
        self._before = _status_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra_bytes = _status_bytes("VmHWM") - self._before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KiB
    raise AssertionError(f"no {name} in /proc/self/status")


def state_of_rank(count: int, value: float) -> dict[str, torch.Tensor]:
    numel = STATE_BYTES // 4 // count
    return {f"rank{dist.get_rank()}.{n}": torch.full((numel,), value) for n in range(count)}


def measure_save_and_load(where: Where, count: int) -> tuple[int, int, bool]:
    """Return the extra peaks of a save and of a load, and whether values came back."""
    url, access = where
    warm = {"warm": torch.ones(2)}
    dcp.save(warm, storage_writer=RemoteStorageWriter(f"{url}-warm", storage_options=access, options=SMALL))
    state = state_of_rank(count, 3.0)
    with Peak() as saving:
        dcp.save(state, storage_writer=RemoteStorageWriter(url, storage_options=access, options=SMALL))
    for tensor in state.values():
        tensor.zero_()
    with Peak() as loading:
        dcp.load(state, storage_reader=RemoteStorageReader(url, storage_options=access, options=SMALL))
    is_back = all(bool((tensor == 3.0).all()) for tensor in state.values())
    return saving.extra_bytes, loading.extra_bytes, is_back


@pytest.mark.ranks
@pytest.mark.parametrize("count", [1, 64], ids=["one large tensor", "many tensors"])
def test_br_102_br_103_a_save_and_a_load_hold_no_second_copy_of_the_state(
    ranks: Ranks, tmp_path: Path, count: int
) -> None:
    assert_bounded(ranks, (str(tmp_path / "ck"), {}), count)


@pytest.mark.ranks
@pytest.mark.server
def test_br_102_br_103_nor_do_they_with_a_server(
    ranks: Ranks, real_server: LocalServer, fresh_root: Callable[[LocalServer], str]
) -> None:
    assert_bounded(ranks, (f"{fresh_root(real_server)}/ck", dict(real_server.storage_options())), 7)


def assert_bounded(ranks: Ranks, where: Where, count: int) -> None:
    outcomes = ranks.run(measure_save_and_load, where, count, size=2, timeout_seconds=240)
    for saving_bytes, loading_bytes, is_back in outcomes:
        assert is_back
        assert saving_bytes < BOUND_BYTES
        assert loading_bytes < BOUND_BYTES


def make_layers() -> nn.Sequential:
    """Sixteen layers of 16 MiB."""
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))


def measure_pretrained(url: str) -> tuple[int, bool]:
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        whole = make_layers()
        for number, layer in enumerate(whole):
            nn.init.constant_(layer.weight, float(number + 1))  # type: ignore[arg-type]
        torch_state = {"model": whole.state_dict()}
        dcp.save(torch_state, storage_writer=RemoteStorageWriter(url), no_dist=True)
        del whole, torch_state
    dist.barrier()
    model = make_layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with Peak() as peak:
        init_fsdp_model_from_checkpoint(model, url, options=SMALL)
    weights: Any = [layer.weight for layer in model]
    return peak.extra_bytes, all(
        bool((weight.to_local() == float(number + 1)).all()) for number, weight in enumerate(weights)
    )


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_br_103_a_sharded_model_takes_a_full_checkpoint_without_holding_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    for extra_bytes, is_right in ranks.run(measure_pretrained, str(tmp_path / "1"), timeout_seconds=240):
        assert is_right
        assert extra_bytes < BOUND_BYTES


# --- many chunks --------------------------------------------------------------------------------


SAVE_ID = "20260131T120000Z-0123456789ab"
TOKEN = "d-0123456789abcdef"


def described(tensors: int, chunks: int) -> tuple[Metadata, dict[ItemKey, StoredItem]]:
    """Tensors of so many rows, each row a chunk that another rank wrote into an object of its own."""
    properties, size = TensorProperties(dtype=torch.float32), torch.Size([chunks, 8])
    corners = [torch.Size([row, 0]) for row in range(chunks)]
    entries = {
        f"t{n}": TensorStorageMetadata(
            properties, size, [ChunkStorageMetadata(corner, torch.Size([1, 8])) for corner in corners]
        )
        for n in range(tensors)
    }
    stored: dict[ItemKey, StoredItem] = {
        (f"t{n}", tuple(corner)): StoredItem(
            f"{TOKEN}/{corner[0]}.distcp", 100 * n, 96, 100 * n + 64, 32, b"crc1", "float32"
        )
        for n in range(tensors)
        for corner in corners
    }
    return Metadata(dict(entries)), stored


def go_through(metadata: Metadata, stored: dict[ItemKey, StoredItem], *, chunks: int, tensors: int) -> int:
    """Build, write, read and verify an index; return the number of chunks that came back."""
    objects = [f"{TOKEN}/{row}.distcp" for row in range(chunks)]
    index = build_index(metadata, stored, objects=objects, save_id=SAVE_ID, block_bytes=4096, url="")
    content_digest(index)
    parsed = parse_index(format_index(index), url="", key="")
    entries = [ObjectEntry(key, 100 * tensors, 0) for key in objects]
    check_ranges(parsed, {entry.key: entry.size_bytes for entry in entries}, url="")
    rebuilt = rebuild_metadata(parsed, url="")
    return sum(
        len(entry.chunks)
        for entry in rebuilt.state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata)
    )


@contextmanager
def counted_steps() -> Iterator[Counter[str]]:
    """Count the interpreter's instructions, and calls of functions in C."""
    steps: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            steps["all"] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield steps
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(("tensors", "chunks"), [(1, 64), (16, 4), (64, 1)])
def test_br_104_the_work_on_an_index_grows_in_line_with_the_chunks(tensors: int, chunks: int) -> None:
    steps = []
    for factor in (1, 8):
        rows = chunks * (factor if chunks > 1 else 1)
        names = tensors * (1 if chunks > 1 else factor)
        metadata, stored = described(names, rows)
        go_through(metadata, stored, chunks=rows, tensors=names)  # what is done once is done now
        with counted_steps() as counted:
            assert go_through(metadata, stored, chunks=rows, tensors=names) == rows * names
        steps.append(counted["all"])
    assert steps[1] < 12 * steps[0]  # in proportion: 8; with the square: 64


def test_br_104_an_index_of_a_thousand_chunks_of_each_tensor_is_read_as_it_was_written() -> None:
    metadata, stored = described(16, 1024)
    assert go_through(metadata, stored, chunks=1024, tensors=16) == 16 * 1024


# --- many small tensors -------------------------------------------------------------------------


@contextmanager
def counted_requests(module_name: str) -> Iterator[Counter[str]]:
    """Count the requests of the stores that a module opens."""
    module: Any = importlib.import_module(module_name)
    opened: list[MeteredStore] = []
    original, counts = module.open_store, Counter[str]()

    def opening(*args: Any, **kwargs: Any) -> MeteredStore:
        opened.append(original(*args, **kwargs))
        return opened[-1]

    module.open_store = opening
    try:
        yield counts
    finally:
        module.open_store = original
        for store in opened:
            counts.update(store.snapshot().requests)


def small_tensors(count: int, value: float) -> dict[str, Any]:
    """Tensors of 1 KiB: some sharded by rows, some whole on each rank, some of this rank alone."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    state: dict[str, Any] = {}
    for n in range(count):
        if n % 3 == 0:
            local = torch.full((16 // size, 16), value + n)
            state[f"sharded{n}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        elif n % 3 == 1:
            state[f"whole{n}"] = torch.full((256,), value + n)
        else:
            state[f"rank{rank}.{n}"] = torch.full((256,), value + n)
    return state


def count_requests(url: str, count: int) -> tuple[dict[str, int], dict[str, int], bool]:
    with counted_requests("remote_ckpt.dcp.writer") as saving:
        dcp.save(small_tensors(count, 1.0), storage_writer=RemoteStorageWriter(url))
    state = small_tensors(count, 0.0)
    with counted_requests("remote_ckpt.dcp.reader") as loading:
        dcp.load(state, storage_reader=RemoteStorageReader(url, process_group=dist.group.WORLD))
    expected = small_tensors(count, 1.0)
    is_back = all(
        torch.equal(*(one.to_local() if isinstance(one, DTensor) else one for one in (state[name], value)))
        for name, value in expected.items()
    )
    return dict(saving), dict(loading), is_back


@pytest.mark.ranks
def test_br_106_requests_do_not_grow_with_the_number_of_small_tensors(ranks: Ranks, tmp_path: Path) -> None:
    few = ranks.run(count_requests, str(tmp_path / "few"), 60, size=4)
    many = ranks.run(count_requests, str(tmp_path / "many"), 900, size=4, timeout_seconds=240)
    assert [saving for saving, _, _ in many] == [saving for saving, _, _ in few]
    assert all(is_back for _, _, is_back in many)
    for saving, loading, _ in many:
        assert 0 < sum(saving.values()) < 40
        assert 0 < sum(loading.values()) < 20
    for (_, loading, _), (_, loading_few, _) in zip(many, few, strict=True):
        assert sum(loading.values()) <= sum(loading_few.values()) + 4
