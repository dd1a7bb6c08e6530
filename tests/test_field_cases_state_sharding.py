"""Field cases of sharded and per-rank state, on real ranks: nothing is mixed or silently dropped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from remote_ckpt import (
    CheckedLoadPlanner,
    CheckedSavePlanner,
    KeyMismatchError,
    LoadReport,
    RemoteStorageReader,
    RemoteStorageWriter,
    load_checkpoint,
    save_checkpoint,
)

pytestmark = pytest.mark.ranks


def numbers(*shape: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + start


def row_sharded(values: torch.Tensor) -> DTensor:
    return distribute_tensor(values, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("remote_ckpt")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


# --- shapes and numbers of ranks ----------------------------------------------------------------


def load_and_save_again(source: str | None, target: str) -> list[bool]:
    """Load lengths 1 to 9 as these ranks shard them, and save what was loaded for the next ranks."""
    state: dict[str, DTensor] = {
        str(length): row_sharded(numbers(length, start=1.0) if source is None else torch.zeros(length))
        for length in range(1, 10)
    }
    if source is not None:
        dcp.load(state, storage_reader=RemoteStorageReader(source))
    dcp.save(state, storage_writer=RemoteStorageWriter(target))
    return [torch.equal(state[name].full_tensor(), numbers(int(name), start=1.0)) for name in state]


def test_br_68_uneven_lengths_wander_over_all_numbers_of_ranks_and_back(ranks: Ranks, tmp_path: Path) -> None:
    source = None
    for number, size in enumerate((4, 4, 3, 2, 1, 4)):
        target = str(tmp_path / str(number))
        assert ranks.run(load_and_save_again, source, target, size=size) == [[True] * 9] * size
        source = target


def load_single_rows(url: str, with_checks: bool) -> list[bool]:
    shapes = [(1, 3, 2), (1, 2)]
    dcp.save(
        {str(shape): row_sharded(numbers(*shape)) for shape in shapes},
        storage_writer=RemoteStorageWriter(url),
    )
    state: dict[str, DTensor] = {str(shape): row_sharded(torch.full(shape, -1.0)) for shape in shapes}
    planner = CheckedLoadPlanner() if with_checks else None
    dcp.load(state, storage_reader=RemoteStorageReader(url), planner=planner)
    return [torch.equal(state[str(shape)].full_tensor(), numbers(*shape)) for shape in shapes]


@pytest.mark.parametrize("with_checks", [False, True])
def test_br_70_ranks_without_a_shard_miss_no_name(ranks: Ranks, tmp_path: Path, with_checks: bool) -> None:
    loaded = ranks.run(load_single_rows, str(tmp_path / "1"), with_checks, size=4)
    assert loaded == [[True, True]] * 4


def train_one_element(url: str, kind: str) -> tuple[list[float], list[float]]:
    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(1, 1))
        if kind == "fsdp1":
            model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        else:
            fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 1)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    model, optimizer = begin(0)
    train(model, optimizer)
    save_checkpoint(url, iteration=3, model=model, optimizer=optimizer)
    other, other_optimizer = begin(1)
    load_checkpoint(url, model=other, optimizer=other_optimizer)
    return train(model, optimizer), train(other, other_optimizer)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_br_80_parameters_of_one_element_are_saved_sharded_and_train_on(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    for went_on, resumed in ranks.run(train_one_element, str(tmp_path / "3"), kind):
        assert went_on == resumed
        assert len(set(went_on)) == 3


class Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb, self.lm_head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.emb(tokens))  # type: ignore[no-any-return]


def train_tied(url: str) -> tuple[bool, list[float], list[float], bool]:
    def begin(seed: int) -> tuple[Tied, torch.optim.Optimizer]:
        model = Tied(seed)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: Tied, optimizer: torch.optim.Optimizer) -> float:
        loss = model(torch.arange(6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    model, optimizer = begin(0)
    step(model, optimizer)
    save_checkpoint(url, iteration=1, model=model, optimizer=optimizer)
    other, other_optimizer = begin(1)
    load_checkpoint(url, model=other, optimizer=other_optimizer)
    stored = {"model": {name: torch.zeros(6, 4) for name in get_model_state_dict(model)}}
    dcp.load(stored, storage_reader=RemoteStorageReader(url))
    first, *others = stored["model"].values()
    return (
        other.lm_head.weight is other.emb.weight,
        [step(model, optimizer) for _ in range(2)],
        [step(other, other_optimizer) for _ in range(2)],
        bool(first.any()) and all(torch.equal(first, one) for one in others),
    )


def test_br_89_tied_weights_that_are_sharded_stay_tied_and_are_stored_equal(
    ranks: Ranks, tmp_path: Path
) -> None:
    for is_tied, went_on, resumed, is_equal in ranks.run(train_tied, str(tmp_path / "1")):
        assert is_tied
        assert is_equal
        assert went_on == resumed


# --- what differs between ranks -----------------------------------------------------------------


def save_stages(url: str, names: int, numel: int) -> tuple[list[str], set[float]]:
    """Save layers that each rank numbers from zero; return what was said, and whose values are stored."""
    rank = dist.get_rank()
    stage = {f"layers.{n}.weight": torch.full((numel // 4, 4), float(rank + 1)) for n in range(names)}
    if rank == 1:
        stage["layers.0.weight"] = stage["layers.0.weight"].t().contiguous().t()
    with recorded_warnings() as records:
        dcp.save(stage, storage_writer=RemoteStorageWriter(url), planner=CheckedSavePlanner())
    loaded = {name: torch.zeros_like(value) for name, value in stage.items()}
    dcp.load(loaded, storage_reader=RemoteStorageReader(url))
    return records, {float(value) for one in loaded.values() for value in one.unique()}


@pytest.mark.parametrize("numel", [16, 64 * 1024])
def test_br_74_stages_under_the_same_names_are_told_and_never_mixed(
    ranks: Ranks, tmp_path: Path, numel: int
) -> None:
    (said, values), (_, same_values) = ranks.run(save_stages, str(tmp_path / "1"), 5, numel)
    assert values == same_values == {1.0}
    assert any(
        "different values of layers.0.weight, layers.1.weight, layers.2.weight, layers.3.weight" in line
        for line in said
    )


def save_pairs(url: str, with_own_names: bool) -> tuple[list[str], list[int]]:
    rank = dist.get_rank()
    name = f"weight.rank{rank}" if with_own_names else "weight"
    with recorded_warnings() as records:
        model = nn.Linear(1, 1)
        save_checkpoint(url, iteration=1, model=model, extra={name: torch.arange(2) + 2 * rank})
    extra = {name: torch.full((2,), -1)}
    load_checkpoint(url, model=model, extra=extra, strict_loading=False)
    return records, extra[name].tolist()


def test_br_72_two_values_of_one_name_are_told_and_two_names_come_back_to_their_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    (said, first), (_, second) = ranks.run(save_pairs, str(tmp_path / "1"), False)
    assert first == second == [0, 1]
    assert any("ranks hold different values of extra.weight" in line for line in said)
    (said, first), (_, second) = ranks.run(save_pairs, str(tmp_path / "2"), True)
    assert (first, second) == ([0, 1], [2, 3])
    assert said == []


def save_random_states(url: str, with_own_names: bool) -> tuple[list[str], bool]:
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = nn.Linear(1, 1)
    torch.manual_seed(100 + rank)
    state = torch.get_rng_state()
    name = f"rank{rank}" if with_own_names else "all"
    with recorded_warnings() as records:
        save_checkpoint(url, iteration=1, model=model, rng={name: state.numpy().tobytes(), f"t{name}": state})
    rng: dict[str, Any] = {name: b"", f"t{name}": torch.zeros_like(state)}
    load_checkpoint(url, model=model, rng=rng, strict_loading=False)
    return records, rng[name] == state.numpy().tobytes() and torch.equal(rng[f"t{name}"], state)


def test_br_97_random_states_under_one_name_are_told_and_under_own_names_come_back(
    ranks: Ranks, tmp_path: Path
) -> None:
    outcomes = ranks.run(save_random_states, str(tmp_path / "1"), False, size=4)
    assert any("different values of rng.all, rng.tall; only one rank's" in line for line in outcomes[0][0])
    assert [is_own for _, is_own in outcomes] == [True, False, False, False]
    outcomes = ranks.run(save_random_states, str(tmp_path / "2"), True, size=4)
    assert outcomes == [([], True)] * 4


def save_by_rank(url: str) -> None:
    torch.manual_seed(3)
    position = {"position": 10 + dist.get_rank()}
    save_checkpoint(url, iteration=1, model=nn.Linear(2, 2), dl={f"rank_{dist.get_rank()}": position})


def load_by_rank(url: str, strict: bool) -> tuple[int, bool, LoadReport]:
    torch.manual_seed(4)
    model = nn.Linear(2, 2)
    dl = {f"rank_{dist.get_rank()}": {"position": -1}}
    reports: list[LoadReport] = []
    load_checkpoint(url, model=model, dl=dl, strict_loading=strict, on_report=reports.append)
    torch.manual_seed(3)
    is_loaded = torch.equal(model.weight, nn.Linear(2, 2).weight)
    return dl[f"rank_{dist.get_rank()}"]["position"], is_loaded, reports[0]


def test_br_75_a_growing_job_is_told_what_it_lacks_and_still_gets_its_weights(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = str(tmp_path / "1")
    ranks.run(save_by_rank, url)
    for error in ranks.errors(load_by_rank, url, True, size=4):
        assert isinstance(error, KeyMismatchError)
        assert "dl.rank_2.position (rank 2)" in str(error)
        assert "dl.rank_3.position (rank 3)" in str(error)
    for rank, (position, is_loaded, report) in enumerate(ranks.run(load_by_rank, url, False, size=4)):
        assert position == (10 + rank if rank < 2 else -1)
        assert is_loaded
        assert report.missing == (() if rank < 2 else (f"dl.rank_{rank}.position",))


def test_br_75_a_shrinking_job_is_told_what_nobody_takes(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "1")
    ranks.run(save_by_rank, url)
    (error,) = ranks.errors(load_by_rank, url, True, size=1)
    assert isinstance(error, KeyMismatchError)
    assert error.unexpected == ("dl.rank_1.position",)
    ((position, is_loaded, report),) = ranks.run(load_by_rank, url, False, size=1)
    assert (position, is_loaded, report.unexpected) == (10, True, ("dl.rank_1.position",))


# --- resuming -----------------------------------------------------------------------------------


def resume_midway(url: str) -> list[tuple[list[float], list[bytes]]]:
    """Return losses and weights of an uninterrupted run and of one that stopped and resumed after 5 steps."""

    def begin(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 1))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    def take(run: dict[str, Any], steps: range) -> list[float]:
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            loss = run["model"](torch.randn(3, 4, generator=generator)).square().mean()
            loss.backward()
            run["optimizer"].step()
            run["optimizer"].zero_grad()
            run["schedule"].step()
            losses.append(loss.item())
        return losses

    whole = begin(0)
    take(whole, range(5))
    save_checkpoint(url, iteration=5, **whole)
    resumed = begin(1)
    load_checkpoint(url, **resumed)
    results = []
    for run in (whole, resumed):
        losses = take(run, range(5, 10))
        state: dict[str, Any] = get_model_state_dict(run["model"])
        results.append((losses, [value.full_tensor().numpy().tobytes() for value in state.values()]))
    return results


def test_br_101_losses_and_weights_after_a_resume_are_those_without_it(ranks: Ranks, tmp_path: Path) -> None:
    for uninterrupted, resumed in ranks.run(resume_midway, str(tmp_path / "5")):
        assert resumed == uninterrupted
        assert len(set(resumed[0])) == 5
