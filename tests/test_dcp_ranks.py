"""The DCP backend on several gloo ranks, through stock ``dcp.save``, ``dcp.load`` and ``dcp.async_save``."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, SaveFailedError
from remote_ckpt.testing.servers import LocalServer

pytestmark = pytest.mark.ranks

Url = str
Where = tuple[Url, dict[str, Any]]
PLACEMENTS: dict[int, list[tuple[Any, ...]]] = {
    1: [(Shard(0),), (Shard(1),), (Replicate(),)],
    2: [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate())],
}
SHAPES = [(length,) for length in range(1, 10)] + [(2,), (5, 3), (1, 7, 3), (0, 4), (64, 33)]


@pytest.fixture(params=["local", pytest.param("real_server", marks=pytest.mark.server)])
def where(
    request: pytest.FixtureRequest, tmp_path: Path, fresh_bucket: Callable[[LocalServer], str]
) -> Where:
    if request.param == "local":
        return str(tmp_path / "ck"), {}
    server: LocalServer = request.getfixturevalue(request.param)
    return f"s3://{fresh_bucket(server)}/run/ck", dict(server.storage_options())


def full(shape: tuple[int, ...]) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return torch.arange(count, dtype=torch.float32).reshape(shape) + 1


def sharded(mesh_dims: int) -> dict[str, Any]:
    """A state of DTensors of all shapes and placements, plain tensors, and values, over all ranks."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,) if mesh_dims == 1 else (size // 2, 2))
    state: dict[str, Any] = {"plain": full((3, 3)), "step": 7, "nested": [{"lr": 0.5}]}
    for shape in SHAPES:
        for number, placements in enumerate(PLACEMENTS[mesh_dims]):
            if any(isinstance(one, Shard) and one.dim >= len(shape) for one in placements):
                continue
            state[f"{shape}-{number}"] = distribute_tensor(full(shape), mesh, list(placements))
    return state


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    blank = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
    return {**blank, "step": 0, "nested": [{"lr": 0.0}]}


def save_sharded(where: Where, mesh_dims: int) -> None:
    dcp.save(sharded(mesh_dims), storage_writer=RemoteStorageWriter(where[0], storage_options=where[1]))


def load_sharded(where: Where, mesh_dims: int, with_group: bool = False) -> None:
    state = emptied(sharded(mesh_dims))
    group = dist.group.WORLD if with_group else None
    reader = RemoteStorageReader(where[0], storage_options=where[1], process_group=group)
    dcp.load(state, storage_reader=reader)
    assert state["step"] == 7
    assert state["nested"] == [{"lr": 0.5}]
    assert torch.equal(state["plain"], full((3, 3)))
    for key, value in state.items():
        if isinstance(value, DTensor):
            assert torch.equal(value.full_tensor(), full(tuple(value.shape))), key


@pytest.mark.parametrize(
    ("saving", "saving_dims", "loading", "loading_dims"),
    [(4, 1, 4, 1), (4, 1, 3, 1), (4, 2, 2, 1), (2, 1, 4, 2), (3, 1, 1, 1), (1, 1, 4, 1)],
)
def test_uneven_and_empty_shards_come_back_on_another_number_of_ranks_and_another_mesh(
    ranks: Ranks, where: Where, saving: int, saving_dims: int, loading: int, loading_dims: int
) -> None:
    # The 2-D saves hold other keys than the 1-D ones, so a 2-D state is loaded as plain tensors below.
    ranks.run(save_sharded, where, saving_dims, size=saving)
    if saving_dims == loading_dims:
        ranks.run(load_sharded, where, loading_dims, True, size=loading)
    ranks.run(load_plainly, where, size=loading)


def load_plainly(where: Where) -> None:
    reader = RemoteStorageReader(where[0], storage_options=where[1])
    metadata = reader.read_metadata()
    state = {
        key: torch.zeros(entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith("(")
    }
    assert len(state) > len(SHAPES)
    dcp.load(state, storage_reader=reader)
    for key, value in state.items():
        assert torch.equal(value, full(tuple(value.shape))), key


def train_fsdp2(where: Where, steps: int, mesh_shape: tuple[int, ...] | None = None) -> list[str]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1))
    names = ("replicate", "shard")[-len(mesh_shape or (0,)) :]
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),), mesh_dim_names=names)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(torch.full((4, 7), float(step + 1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    if steps:
        dcp.save(state, storage_writer=RemoteStorageWriter(where[0], storage_options=where[1]))
    else:
        dcp.load(state, storage_reader=RemoteStorageReader(where[0], storage_options=where[1]))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    flat = {**flattened(get_model_state_dict(model)), **flattened(get_optimizer_state_dict(model, optimizer))}
    return [f"{key}={value}" for key, value in sorted(flat.items())]


def flattened(state: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(state, dict):
        parts = [flattened(value, f"{prefix}.{key}") for key, value in state.items()]
        return {key: value for part in parts for key, value in part.items()}
    if isinstance(state, DTensor):
        state = state.full_tensor()
    if isinstance(state, torch.Tensor):
        return {prefix: str([float(one).hex() for one in state.reshape(-1)])}
    return {prefix: repr(state)}


@pytest.mark.parametrize("mesh_shape", [None, (2, 2)])
def test_fsdp2_and_hsdp_with_their_optimizer_are_equal_bit_for_bit_after_resharding(
    ranks: Ranks, where: Where, mesh_shape: tuple[int, ...] | None
) -> None:
    saved = ranks.run(train_fsdp2, where, 2, mesh_shape, size=4)[0]
    for size in (1, 2, 3, 4):
        assert ranks.run(train_fsdp2, where, 0, size=size) == [saved] * size


def save_with_cached_plans(root: str) -> None:
    for step in range(3):
        dcp.save(
            {"a": distribute_tensor(full((9,)) * step, init_device_mesh("cpu", (2,)), [Shard(0)]), "n": step},
            storage_writer=RemoteStorageWriter(f"{root}/{step}"),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
    for cache in (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ):
        cache.clear()
    for step in range(3):
        state: dict[str, Any] = {"a": torch.zeros(9), "n": -1}
        dcp.load(state, storage_reader=RemoteStorageReader(f"{root}/{step}"))
        assert torch.equal(state["a"], full((9,)) * step)
        assert state["n"] == step
        stock: dict[str, Any] = {"a": torch.zeros(9), "n": -1}
        dcp.load(stock, storage_reader=FileSystemReader(f"{root}/{step}"))
        assert torch.equal(stock["a"], state["a"])


def test_cached_plans_lead_every_save_to_its_own_objects(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_with_cached_plans, str(tmp_path))


class FailingPlanner(DefaultSavePlanner):
    """Fails on some ranks while their data is being sent."""

    def __init__(self, failing: tuple[int, ...]) -> None:
        super().__init__()
        self.failing = failing
        self.looks = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.looks += 1
        if dist.get_rank() in self.failing and self.looks > 1:
            raise OSError("the GPU fell off the bus")
        return super().resolve_data(write_item)


class BadlyPlanning(DefaultSavePlanner):
    """Fails while rank 2 makes its plan."""

    def create_local_plan(self) -> SavePlan:
        if dist.get_rank() == 2:
            raise OSError("no plan today")
        return super().create_local_plan()


def fail_to_save(where: Where, failing: tuple[int, ...]) -> tuple[str, str, int | None]:
    state = {"a": distribute_tensor(full((64, 33)), init_device_mesh("cpu", (4,)), [Shard(0)])}
    try:
        dcp.save(
            state,
            storage_writer=RemoteStorageWriter(where[0], storage_options=where[1]),
            planner=FailingPlanner(failing) if failing else BadlyPlanning(),
        )
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        kind, text, rank = type(first).__name__, str(first), getattr(first, "rank", None)
    dist.barrier()
    with pytest.raises(CheckpointNotFoundError):
        RemoteStorageReader(where[0], storage_options=where[1]).read_metadata()
    dist.barrier()
    dcp.save(state, storage_writer=RemoteStorageWriter(where[0], storage_options=where[1]))
    state = {"a": torch.zeros(64, 33)}  # type: ignore[dict-item]
    dcp.load(state, storage_reader=RemoteStorageReader(where[0], storage_options=where[1]))
    assert torch.equal(state["a"], full((64, 33)))
    return kind, text, rank


@pytest.mark.parametrize("failing", [(2,), (0,), (1, 3)])
def test_a_failing_rank_fails_all_with_one_error_leaves_nothing_and_the_next_save_works(
    ranks: Ranks, where: Where, failing: tuple[int, ...]
) -> None:
    outcomes = ranks.run(fail_to_save, where, failing, size=4)
    assert len(set(outcomes)) == 1
    kind, text, rank = outcomes[0]
    assert (kind, rank) == (SaveFailedError.__name__, failing[0])
    assert "the GPU fell off the bus" in text
    assert f"rank {failing[0]}" in text
    if not where[1]:
        assert len(set(Path(where[0]).rglob("*.distcp"))) == 4


def test_a_rank_that_fails_in_planning_fails_all_and_the_next_save_works(ranks: Ranks, where: Where) -> None:
    outcomes = ranks.run(fail_to_save, where, (), size=4)
    assert {text for _, text, _ in outcomes} == {"no plan today"}


def save_twice(where: Where) -> str:
    state = {"a": full((3,))}
    dcp.save(state, storage_writer=RemoteStorageWriter(where[0], storage_options=where[1]))
    try:
        dcp.save(state, storage_writer=RemoteStorageWriter(where[0], storage_options=where[1]))
    except CheckpointException as error:
        return type(error.failures[0][0]).__name__
    return "saved"


def test_a_conflict_is_told_to_every_rank(ranks: Ranks, where: Where) -> None:
    assert ranks.run(save_twice, where, size=2) == [CheckpointExistsError.__name__] * 2


def save_on_a_subgroup(where: Where) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        state = {"a": full((4,)) * 3}
        dcp.save(
            state,
            storage_writer=RemoteStorageWriter(where[0], storage_options=where[1]),
            process_group=group,
        )
        state["a"].zero_()
        reader = RemoteStorageReader(where[0], storage_options=where[1], process_group=group)
        dcp.load(state, storage_reader=reader, process_group=group)
        assert torch.equal(state["a"], full((4,)) * 3)


def test_a_subgroup_saves_and_loads_alone(ranks: Ranks, where: Where) -> None:
    ranks.run(save_on_a_subgroup, where, size=3)


def save_in_the_background(where: Where, in_process: bool) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {"a": distribute_tensor(full((9, 2)), mesh, [Shard(0)]), "l": [1]}
    kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
    future = dcp.async_save(
        state,
        storage_writer=RemoteStorageWriter(where[0], storage_options=where[1]),
        async_checkpointer_type=kind,
    )
    state["a"].to_local().zero_()
    future.result()  # type: ignore[union-attr]
    loaded: dict[str, Any] = {"a": torch.zeros(9, 2), "l": [0]}
    dist.barrier()
    dcp.load(loaded, storage_reader=RemoteStorageReader(where[0], storage_options=where[1]))
    assert torch.equal(loaded["a"], full((9, 2)))
    assert loaded["l"] == [1]


def test_an_async_save_in_a_thread_stores_the_values_of_the_call(ranks: Ranks, where: Where) -> None:
    ranks.run(save_in_the_background, where, False, size=2)


def test_an_async_save_in_a_process_stores_the_values_of_the_call(ranks: Ranks, where: Where) -> None:
    ranks.run(save_in_the_background, where, True, size=2, timeout_seconds=120)


def count_lookups(root: str) -> int:
    """How often this rank reads the manifest in a load with a process group."""
    from importlib import import_module

    module: Any = import_module("remote_ckpt.dcp.reader")

    lookups = []
    original = module.read_newest

    def counting(*args: Any) -> Any:
        lookups.append(os.getpid())
        return original(*args)

    module.read_newest = counting
    try:
        dcp.load(
            {"a": torch.zeros(3)},
            storage_reader=RemoteStorageReader(f"{root}/ck", process_group=dist.group.WORLD),
        )
    finally:
        module.read_newest = original
    return len(lookups)


def save_small(root: str) -> None:
    dcp.save({"a": full((3,))}, storage_writer=RemoteStorageWriter(f"{root}/ck"))


def test_with_a_process_group_only_the_coordinator_looks_the_checkpoint_up(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_small, str(tmp_path), size=2)
    assert ranks.run(count_lookups, str(tmp_path), size=2) == [1, 0]
