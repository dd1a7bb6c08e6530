"""Saving and loading on several real ranks: every kind of sharding, other numbers of ranks, failures."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from remote_ckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitOptions,
    CommitUnknownError,
    ConfigError,
    KeyMismatchError,
    LoadFailedError,
    Options,
    SaveFailedError,
    find_latest_checkpoint,
    init_fsdp_model_from_checkpoint,
    load_checkpoint,
    register_dont_save_hooks,
    save_checkpoint,
)

pytestmark = pytest.mark.ranks
FAR = Options(commit=CommitOptions(collective_seconds=40))


class Block(nn.Module):
    """Two layers that tensor parallelism splits by columns and by rows, and one parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 12), nn.Linear(12, 8), nn.Parameter(torch.rand(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(inputs)))
        return inputs + self.scale * hidden


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 5))


def shard_fully(model: nn.Sequential, **settings: Any) -> nn.Module:
    for block in (model[0], model[1], model):
        fully_shard(block, **settings)
    return model


def split_by_columns_and_rows(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for block in (model[0], model[1]):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def shard_hybrid(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard_fully(model, mesh=mesh)


def shard_two_ways(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return shard_fully(split_by_columns_and_rows(model, mesh["tensor"]), mesh=mesh["data"])


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu")
    ),
    "fsdp2": shard_fully,
    "hsdp": shard_hybrid,
    "tensor": lambda model: split_by_columns_and_rows(
        model, init_device_mesh("cpu", (dist.get_world_size(),))
    ),
    "two ways": shard_two_ways,
}


def begin(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = WRAPPERS[kind](build(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Take one step on the same inputs on every rank."""
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """Return the bytes of every full tensor of model and optimizer, gathered without torch's full state dict.

    (That one crashes the interpreter for FSDP1 on CPU.)
    """
    tensors: dict[str, Any] = dict(get_model_state_dict(model))
    states: Any = get_optimizer_state_dict(model, optimizer)["state"]
    for parameter, values in states.items():
        tensors |= {f"optimizer {parameter} {name}": value for name, value in values.items()}
    return {name: full_tensor(tensors[name]).numpy().tobytes() for name in sorted(tensors)}


def full_tensor(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if not isinstance(tensor, ShardedTensor):
        return tensor.detach()  # type: ignore[no-any-return]
    own = [(list(shard.metadata.shard_offsets), shard.tensor.numpy()) for shard in tensor.local_shards()]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    full = torch.full(tensor.size(), float("nan"))
    for offsets, part in itertools.chain.from_iterable(parts):
        box = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        full[box] = torch.from_numpy(part)
    return full


def train_and_save(url: str, kind: str) -> dict[str, bytes]:
    model, optimizer = begin(kind, seed=0)
    step(model, optimizer, 0)
    save_checkpoint(url, iteration=7, model=model, optimizer=optimizer, options=FAR)
    return whole(model, optimizer)


def load_anew(url: str, kind: str) -> tuple[int | None, dict[str, bytes]]:
    model, optimizer = begin(kind, seed=1)
    iteration = load_checkpoint(url, model=model, optimizer=optimizer, options=FAR)
    return iteration, whole(model, optimizer)


@pytest.mark.parametrize(
    ("saved_as", "saved_on", "loaded_as", "loaded_on"),
    [
        ("fsdp2", 2, "fsdp2", 4),
        ("fsdp2", 4, "fsdp2", 3),
        ("fsdp2", 3, "plain", 1),
        ("plain", 1, "fsdp2", 2),
        ("ddp", 2, "fsdp2", 2),
        ("fsdp2", 2, "ddp", 3),
        ("hsdp", 4, "fsdp2", 2),
        ("fsdp2", 2, "hsdp", 4),
        ("tensor", 2, "fsdp2", 3),
        ("fsdp2", 3, "tensor", 4),
        ("two ways", 4, "plain", 1),
        ("fsdp2", 2, "two ways", 4),
        ("fsdp1", 2, "fsdp2", 2),
        ("fsdp2", 2, "fsdp1", 3),
    ],
)
def test_what_was_saved_comes_back_bit_for_bit_on_other_ranks_and_otherwise_sharded(
    ranks: Ranks, tmp_path: Path, saved_as: str, saved_on: int, loaded_as: str, loaded_on: int
) -> None:
    url = str(tmp_path / "7")
    saved = ranks.run(train_and_save, url, saved_as, size=saved_on)[0]
    loaded = ranks.run(load_anew, url, loaded_as, size=loaded_on)
    assert [iteration for iteration, _ in loaded] == [7] * loaded_on
    assert loaded[0][1] == saved
    assert len(saved) > 30


def resume_midway(url: str) -> tuple[list[float], list[float]]:
    """Return the losses of steps 5 to 9, of a run that went on and of one that resumed."""

    def begin_with_schedule(seed: int) -> dict[str, Any]:
        model, optimizer = begin("fsdp2", seed)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    def take(state: dict[str, Any], numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            losses.append(step(state["model"], state["optimizer"], number))
            state["schedule"].step()
        return losses

    first = begin_with_schedule(0)
    take(first, range(5))
    save_checkpoint(url, iteration=5, **first)
    resumed = begin_with_schedule(1)
    load_checkpoint(url, **resumed)
    return take(first, range(5, 10)), take(resumed, range(5, 10))


def test_br_101_losses_after_a_resume_equal_those_without_an_interruption(
    ranks: Ranks, tmp_path: Path
) -> None:
    for uninterrupted, resumed in ranks.run(resume_midway, str(tmp_path / "5")):
        assert resumed == uninterrupted
        assert len(set(resumed)) == 5


# --- groups -------------------------------------------------------------------------------------


def save_in_a_subgroup(url: str, members: list[int]) -> int | None:
    part = dist.new_group(members)
    if dist.get_rank() not in members:
        return None  # and never comes near a collective again
    model, loaded = build(0), build(1)
    save_checkpoint(url, iteration=3, model=model, process_group=part, options=FAR)
    return load_checkpoint(url, model=loaded, process_group=part, options=FAR)


def test_a_subgroup_saves_and_loads_while_other_ranks_are_elsewhere(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(save_in_a_subgroup, str(tmp_path / "3"), [1, 2], size=3) == [None, 3, 3]


def save_with_an_impatient_group(url: str) -> int | None:
    impatient = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(milliseconds=1), impatient)
    save_checkpoint(url, iteration=3, model=build(0), process_group=impatient)
    return load_checkpoint(url, model=build(1), process_group=impatient)


def test_br_39_the_time_limit_of_the_callers_group_does_not_count(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(save_with_an_impatient_group, str(tmp_path / "3"), size=3) == [3, 3, 3]


def save_at_different_places(folder: str) -> None:
    save_checkpoint(f"{folder}/{dist.get_rank()}", iteration=0, model=build(0))


def test_ranks_that_mean_different_checkpoints_all_get_an_error(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.errors(save_at_different_places, str(tmp_path)):
        assert isinstance(error, ConfigError)
        assert f"ranks mean different checkpoints: {tmp_path}/0 and {tmp_path}/1" in str(error)
    assert find_latest_checkpoint(tmp_path) is None


def step_with_second_optimizer(url: str, is_resumed: bool) -> list[float]:
    """Return losses after a save, or after a load of it, with the model's own optimizer among the others."""
    model, optimizer = begin("fsdp2", seed=int(is_resumed))
    if is_resumed:
        step_without_update(model)
        load_checkpoint(url, model=model, second=optimizer, options=FAR)
        optimizer.zero_grad()
    else:
        step(model, optimizer, 0)
        save_checkpoint(url, iteration=1, model=model, second=optimizer, options=FAR)
    return [step(model, optimizer, number) for number in (1, 2)]


def step_without_update(model: nn.Module) -> None:
    model(torch.ones(4, 8)).sum().backward()


def test_a_sharded_second_optimizer_loads_into_a_fresh_one_despite_gradients(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = str(tmp_path / "1")
    expected = ranks.run(step_with_second_optimizer, url, False)
    assert ranks.run(step_with_second_optimizer, url, True) == expected


# --- failures -----------------------------------------------------------------------------------


class Trouble:
    """State that causes trouble on some ranks, in one phase of a save or load."""

    def __init__(self, phase: str, failing: tuple[int, ...]) -> None:
        self.phase, self.is_failing = phase, dist.get_rank() in failing
        self.pickled_count = 0

    def state_dict(self) -> dict[str, Any]:
        if self.is_failing and self.phase == "collect":
            raise OSError("no state")
        return {"value": self} if self.is_failing and self.phase in ("write", "die") else {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_failing and self.phase == "apply":
            raise OSError("cannot take it")

    def __reduce__(self) -> Any:
        if self.phase == "write":
            raise OSError("cannot be written")
        self.pickled_count += 1
        if self.pickled_count == 2:  # the first time is for the plan, the second for the upload
            os.kill(os.getpid(), signal.SIGKILL)
        return str, ("x",)


def save_with_trouble(url: str, phase: str, failing: tuple[int, ...]) -> None:
    model, optimizer = begin("fsdp2", seed=1)
    state = {f"rank{dist.get_rank()}": Trouble(phase, failing).state_dict()} if phase != "collect" else None
    save_checkpoint(
        url,
        iteration=2,
        model=model,
        optimizer=optimizer,
        trouble=state or Trouble(phase, failing),
        options=FAR,
    )


@pytest.mark.parametrize(
    ("phase", "failing", "says"),
    [
        ("collect", (2,), "no state"),
        ("collect", (0,), "no state"),
        ("write", (2,), "cannot be written"),
        ("write", (0,), "cannot be written"),
        ("write", (1, 3), "cannot be written"),
    ],
)
def test_br_35_a_failure_on_some_ranks_is_one_error_on_all_and_the_next_save_works(
    ranks: Ranks, tmp_path: Path, phase: str, failing: tuple[int, ...], says: str
) -> None:
    url = str(tmp_path / "1")
    saved = ranks.run(train_and_save, url, "fsdp2", size=4)[0]
    errors = ranks.errors(save_with_trouble, url, phase, failing, size=4)
    assert [type(error) for error in errors] == [SaveFailedError] * 4
    assert len({str(error) for error in errors}) == 1
    assert says in str(errors[0])
    assert [getattr(error, "rank", None) for error in errors] == [failing[0]] * 4
    assert ranks.run(load_anew, url, "fsdp2", size=2)[0] == (7, saved)
    assert ranks.run(train_and_save, url, "fsdp2", size=4)[0] == saved


def test_a_rank_killed_in_its_upload_leaves_the_others_in_doubt_and_the_old_checkpoint_whole(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = str(tmp_path / "1")
    saved = ranks.run(train_and_save, url, "fsdp2", size=3)[0]
    first, killed, last = ranks.errors(save_with_trouble, url, "die", (1,), size=3)
    assert isinstance(killed, EOFError)
    for error in (first, last):
        assert isinstance(error, CommitUnknownError)
        assert "lost contact: another rank died" in str(error)
        assert "list the checkpoints to see" in str(error)
        assert str(error.url).endswith(url)
    assert ranks.run(load_anew, url, "fsdp2", size=2)[0] == (7, saved)


def save_hastily(url: str) -> None:
    hasty = Options(commit=CommitOptions(commit_seconds=0.05, collective_seconds=40))
    save_checkpoint(url, iteration=2, model=build(1), options=hasty)


def test_br_35_a_commit_that_stays_undecided_is_the_same_error_on_every_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = str(tmp_path / "1")
    saved = ranks.run(train_and_save, url, "plain")[0]
    in_the_way = tmp_path / "1" / "manifest.000002.json"
    in_the_way.mkdir()
    errors = ranks.errors(save_hastily, url, size=3)
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, CheckpointError) for error in errors)
    in_the_way.rmdir()
    assert ranks.run(load_anew, url, "plain", size=1)[0] == (7, saved)


def save_and_step(url: str, kind: str) -> list[float]:
    model, optimizer = begin(kind, seed=0)
    save_checkpoint(url, iteration=0, model=model, optimizer=optimizer, options=FAR)
    return [step(model, optimizer, number) for number in range(3)]


def load_and_step(url: str, kind: str) -> list[float]:
    model, optimizer = begin(kind, seed=1)
    load_checkpoint(url, model=model, optimizer=optimizer, options=FAR)
    return [step(model, optimizer, number) for number in range(3)]


def just_step(kind: str) -> list[float]:
    model, optimizer = begin(kind, seed=0)
    return [step(model, optimizer, number) for number in range(3)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_save_before_the_first_step_changes_no_later_step(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "0")
    expected = ranks.run(just_step, kind)
    assert ranks.run(save_and_step, url, kind) == expected
    assert ranks.run(load_and_step, url, kind) == expected


def save_with_wrong_options(url: str) -> None:
    wrong: Any = 5 if dist.get_rank() == 1 else None
    save_checkpoint(url, iteration=2, model=build(1), storage_options=wrong, options=FAR)


def load_with_wrong_options(url: str) -> None:
    wrong: Any = 5 if dist.get_rank() == 1 else None
    load_checkpoint(url, model=build(1), storage_options=wrong, options=FAR)


def initialise_with_wrong_options(url: str) -> None:
    wrong: Any = 5 if dist.get_rank() == 1 else None
    init_fsdp_model_from_checkpoint(build(1), url, storage_options=wrong, options=FAR)


@pytest.mark.parametrize(
    "operation", [save_with_wrong_options, load_with_wrong_options, initialise_with_wrong_options]
)
def test_options_that_are_wrong_on_one_rank_are_an_error_on_all_at_once(
    ranks: Ranks, tmp_path: Path, operation: Any
) -> None:
    url = str(tmp_path / "1")
    saved = ranks.run(train_and_save, url, "plain")[0]
    errors = ranks.errors(operation, url)
    assert len({(type(error), str(error)) for error in errors}) == 1
    assert getattr(errors[0], "rank", None) == 1
    assert ranks.run(load_anew, url, "plain", size=1)[0] == (7, saved)


class DiesWhenAsked:
    """Kills the last rank when its state is asked for."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("not all ranks could load")


def load_with_a_death(url: str) -> None:
    load_checkpoint(url, model=build(1), trouble=DiesWhenAsked(), options=FAR)


def test_a_rank_killed_while_loading_is_an_error_on_the_others(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "1")
    ranks.run(save_stateful, url)
    first, second, killed = ranks.errors(load_with_a_death, url, size=3)
    assert isinstance(killed, EOFError)
    for error in (first, second):
        assert isinstance(error, LoadFailedError)
        assert "lost contact: another rank died" in str(error)


def save_without_overwrite(url: str) -> None:
    save_checkpoint(url, iteration=2, model=build(0), overwrite=False)


def test_that_a_file_is_in_the_way_is_the_same_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "1").write_text("precious")
    errors = ranks.errors(save_without_overwrite, str(tmp_path / "1"), size=3)
    assert len({str(error) for error in errors}) == 1
    assert {type(error).__name__ for error in errors} == {"CheckpointExistsError"}
    assert (tmp_path / "1").read_text() == "precious"


def load_with_trouble(url: str, failing: tuple[int, ...]) -> None:
    load_checkpoint(url, model=build(1), trouble=Trouble("apply", failing), options=FAR)


def test_a_failure_to_take_what_was_loaded_reaches_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "1")
    ranks.run(save_stateful, url)
    errors = ranks.errors(load_with_trouble, url, (1,))
    assert {str(error) for error in errors} == {f"rank 1 of 2 failed: OSError: cannot take it [url={url}]"}


def save_stateful(url: str) -> None:
    save_checkpoint(url, iteration=1, model=build(0), trouble=Trouble("none", ()))


def load_other_model(url: str) -> None:
    load_checkpoint(url, model=nn.ModuleDict({"other": build(0)}), options=FAR)


def test_errors_of_a_load_are_the_same_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    missing = ranks.errors(load_other_model, str(tmp_path / "404"), size=3)
    assert [type(error) for error in missing] == [CheckpointNotFoundError] * 3
    assert str(tmp_path / "404") in str(missing[0])
    ranks.run(save_stateful, str(tmp_path / "1"))
    mismatched = ranks.errors(load_other_model, str(tmp_path / "1"), size=3)
    assert [type(error) for error in mismatched] == [KeyMismatchError] * 3
    assert len({str(error) for error in mismatched}) == 1


# --- state left out on purpose ------------------------------------------------------------------


def leave_out(url: str, kind: str, before: bool) -> tuple[list[str], int | None, bool]:
    """Save and load with the first block left out; returns what the model's state then holds."""
    names = list(build(0)[0].state_dict())

    def begin_without_first(seed: int) -> nn.Module:
        model = build(seed)
        first = model[0]
        if before:
            register_dont_save_hooks(first, names)
        wrapped = WRAPPERS[kind](model)
        if not before:
            register_dont_save_hooks(wrapped, [f"0.{name}" for name in names])
        return wrapped

    save_checkpoint(url, iteration=1, model=begin_without_first(0))
    model = begin_without_first(1)
    iteration = load_checkpoint(url, model=model)
    state = get_model_state_dict(model)
    last = full_tensor(state["2.weight"])
    return sorted(state), iteration, torch.equal(last, build(0).state_dict()["2.weight"])


@pytest.mark.parametrize(
    ("kind", "before"), [("ddp", True), ("fsdp2", True), ("fsdp2", False), ("plain", False)]
)
def test_hooks_leave_state_out_under_wrappers_and_sharding(
    ranks: Ranks, tmp_path: Path, kind: str, before: bool
) -> None:
    expected = sorted(name for name in build(0).state_dict() if not name.startswith("0."))
    assert ranks.run(leave_out, str(tmp_path / "1"), kind, before) == [(expected, 1, True)] * 2
