"""A run's checkpoints in its training loop: save, load the latest or best, retention beside training."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from remote_ckpt import (
    CheckpointDirectory,
    CheckpointExistsError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    ConfigError,
    KeepBest,
    KeepLast,
    KeyMismatchError,
    LoadedCheckpoint,
    StoreUnavailableError,
    resumed,
)
from remote_ckpt.store import open_store
from remote_ckpt.testing.faults import FaultStore, StoreCall

_numbers = itertools.count()


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    resumed.forget_all()
    yield f"memory://manager-{next(_numbers)}/run" if request.param == "memory" else str(tmp_path / "run")
    resumed.forget_all()


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def value_of(model: nn.Linear) -> float:
    return model.weight[0, 0].item()


def names(directory: CheckpointDirectory) -> list[str]:
    return [info.name for info in directory.list()]


def test_what_was_saved_is_loaded_with_all_that_belongs_to_it(url: str) -> None:
    with CheckpointManager(url) as manager:
        model, sampler = model_of(1.5), {"position": torch.tensor(7)}
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        trained = value_of(model)
        path = manager.save(7, model=model, optimizer=optimizer, metrics={"loss": 0.5}, sampler=sampler)
        assert path.name == "7"
        other, place = model_of(0.0), {"position": torch.tensor(0)}
        fresh = torch.optim.AdamW(other.parameters())
        loaded = manager.load(model=other, optimizer=fresh, sampler=place)
    assert loaded is not None
    assert (loaded.step, loaded.iteration, loaded.info.metrics) == (7, 7, {"loss": 0.5})
    assert (value_of(other), place["position"].item()) == (trained, 7)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_a_run_without_checkpoints_begins_anew_and_anything_else_that_is_missing_is_an_error(
    url: str,
) -> None:
    manager = CheckpointManager(url, best_metric="loss")
    model = model_of(0.25)
    assert manager.load(model=model) is None
    assert value_of(model) == 0.25
    for missing in (3, "final", "best"):
        with pytest.raises(CheckpointNotFoundError):
            manager.load(missing, model=model)


def test_the_latest_is_the_highest_step_and_any_other_is_loaded_by_number_name_or_listing(url: str) -> None:
    manager = CheckpointManager(url)
    for step in (9, 10):
        manager.save(step, model=model_of(float(step)))
    manager.save("final", model=model_of(0.5), iteration=10)
    model = model_of(0.0)

    def load(step: Any = "latest") -> tuple[float, int | None]:
        loaded = manager.load(step, model=model)
        assert loaded is not None
        return value_of(model), loaded.step

    assert load() == (10.0, 10)
    assert load(9) == load("9") == load(manager.list()[0]) == (9.0, 9)
    assert load("final") == (0.5, 10)


def test_the_best_is_the_one_of_that_name_or_else_by_the_metric(url: str) -> None:
    manager = CheckpointManager(url, policy=KeepLast(9) | KeepBest("accuracy", mode="max"))
    for step, accuracy in [(1, 0.5), (2, 0.75), (3, 0.25)]:
        manager.save(step, model=model_of(float(step)), metrics={"accuracy": accuracy})
    model = model_of(0.0)
    manager.load("best", model=model)
    assert value_of(model) == 2.0
    best = manager.best()
    assert best is not None
    assert best.step == 2
    manager.save("best", model=model_of(0.125))
    manager.load("best", model=model)
    assert value_of(model) == 0.125


def test_without_a_metric_nobody_knows_the_best(url: str) -> None:
    manager = CheckpointManager(url)
    manager.save(1, model=model_of(1.0), metrics={"loss": 1.0})
    with pytest.raises(ConfigError, match="best_metric"):
        manager.load("best", model=model_of(0.0))
    found = manager.best("loss")
    assert found is not None
    assert found.step == 1


def test_br_09_a_damaged_latest_is_passed_over_and_an_error_when_asked_for(url: str) -> None:
    manager = CheckpointManager(url)
    for step in (1, 2):
        manager.save(step, model=model_of(float(step)))
    open_store(url).write("2/manifest.000001.json", b"{}")
    model = model_of(0.0)
    loaded = manager.load(model=model)
    assert loaded is not None
    assert (loaded.step, value_of(model)) == (1, 1.0)


def test_saving_again_replaces_unless_told_not_to_or_pinned(url: str) -> None:
    manager = CheckpointManager(url)
    manager.save(1, model=model_of(1.0))
    with pytest.raises(CheckpointExistsError):
        manager.save(1, model=model_of(2.0), overwrite=False)
    manager.save(1, model=model_of(3.0))
    manager.pin(1)
    with pytest.raises(CheckpointPinnedError):
        manager.save(1, model=model_of(4.0))
    model = model_of(0.0)
    manager.load(1, model=model)
    assert value_of(model) == 3.0


@pytest.mark.parametrize("wrong", ["latest", "a/b", "", -1, 1.5, None, True])
def test_what_cannot_name_a_checkpoint_is_refused_before_anything_is_written(url: str, wrong: Any) -> None:
    manager = CheckpointManager(url)
    with pytest.raises(ConfigError):
        manager.save(wrong, model=model_of(1.0))
    assert open_store(url).list("") == []


def test_metrics_are_numbers_of_any_kind_and_checked_before_anything_is_written(url: str) -> None:
    manager = CheckpointManager(url)
    manager.save(1, model=model_of(1.0), metrics={"tensor": torch.tensor(0.5), "int": 2, "nan": float("nan")})
    info = manager.info(1)
    assert (info.metrics["tensor"], info.metrics["int"]) == (0.5, 2.0)
    assert info.metrics["nan"] != info.metrics["nan"]
    for wrong in ("0.5", torch.ones(2), None, [1], 10**400):
        with pytest.raises(ConfigError, match="loss"):
            manager.save(2, model=model_of(1.0), metrics={"loss": wrong})  # type: ignore[dict-item]
    assert names(manager) == ["1"]


# --- retention beside training -----------------------------------------------------------------------


def test_retention_follows_each_save_and_the_same_manager_sees_it_done(url: str) -> None:
    with CheckpointManager(url, policy=KeepLast(2)) as manager:
        for step in range(5):
            manager.save(step, model=model_of(float(step)))
            assert names(manager) == [str(one) for one in range(max(0, step - 1), step + 1)]
        manager.save("best", model=model_of(9.0))
        manager.save(5, model=model_of(5.0))
    assert names(CheckpointDirectory(url)) == ["4", "5", "best"]


def hook(manager: CheckpointManager, before: Callable[[StoreCall], None]) -> None:
    connection = manager.directory._connection
    connection._store, connection._pid = FaultStore(open_store(manager.url), before=before), os.getpid()


def test_a_save_is_done_before_retention_begins_to_delete(tmp_path: Path) -> None:
    """The deletion waits for what happens only after the save has returned."""
    manager = CheckpointManager(tmp_path, policy=KeepLast(1))
    returned = threading.Event()

    def wait_for_the_save(call: StoreCall) -> None:
        if call.operation in ("create", "delete"):
            assert returned.wait(60)

    manager.save(1, model=model_of(1.0))
    manager.wait()
    hook(manager, wait_for_the_save)
    manager.save(2, model=model_of(2.0))
    returned.set()
    report = manager.wait()
    assert report is not None
    assert report.deleted == ("1",)


def test_retention_that_fails_never_fails_the_training_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, policy=KeepLast(1))

    def fail(call: StoreCall) -> None:
        raise StoreUnavailableError("503 SlowDown")

    hook(manager, fail)
    for step in (1, 2, 3):
        manager.save(step, model=model_of(float(step)))
    assert manager.wait() is None
    assert "retention failed, the next save tries again" in caplog.text
    hook(manager, lambda call: None)
    manager.save(4, model=model_of(4.0))
    report = manager.wait()
    assert report is not None
    assert report.deleted == ("1", "2", "3")


def test_a_program_that_ends_after_its_last_save_finishes_the_retention(tmp_path: Path) -> None:
    program = f"""
import torch
from remote_ckpt import CheckpointManager, KeepLast
manager = CheckpointManager({str(tmp_path / "run")!r}, policy=KeepLast(1))
for step in range(4):
    manager.save(step, model=torch.nn.Linear(1, 1))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert names(CheckpointDirectory(tmp_path / "run")) == ["3"]


def test_what_was_resumed_from_stays_until_a_newer_one_is_committed(url: str) -> None:
    for step in (1, 2, 3):
        CheckpointManager(url).save(step, model=model_of(float(step)))
    manager = CheckpointManager(url, policy=KeepLast(1))
    manager.load(1, model=model_of(0.0))
    assert manager.prune().deleted == ("2",)
    manager.save(4, model=model_of(4.0))
    assert names(manager) == ["4"]


def test_a_manager_travels_to_another_process(url: str) -> None:
    manager = CheckpointManager(url, policy=KeepLast(1), best_metric="loss")
    manager.save(1, model=model_of(1.0), metrics={"loss": 1.0})
    assert manager.latest() == manager.info(1)
    again = pickle.loads(pickle.dumps(manager))
    assert names(again) == ["1"]
    assert again.best() == again.info(1)


# --- several ranks -----------------------------------------------------------------------------------


def train(url: str, steps: int) -> list[str]:
    manager = CheckpointManager(url, policy=KeepLast(2) | KeepBest("loss"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = manager.load(model=model, optimizer=optimizer)
    begin = 0 if loaded is None else (loaded.step or 0) + 1
    for step in range(begin, begin + steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        manager.save(step, model=model, optimizer=optimizer, metrics={"loss": float((step - 1) ** 2)})
    latest = manager.latest()
    best = manager.best()
    manager.close()
    return [str(latest and latest.name), str(best and best.name)]


@pytest.mark.ranks
def test_all_ranks_save_load_and_get_the_same_answers(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(train, str(tmp_path), 4, size=2) == [["3", "1"]] * 2
    assert ranks.run(train, str(tmp_path), 2, size=4) == [["5", "1"]] * 4
    assert names(CheckpointDirectory(tmp_path)) == ["1", "4", "5"]


def look_where_rank_0_cannot(url: str) -> list[str]:
    manager = CheckpointManager(url if dist.get_rank() else f"{url}/a-file")
    errors = []
    for call in (
        manager.latest,
        lambda: manager.load(model=model_of(0.0)),
        lambda: manager.load(1, model=model_of(0.0)),
    ):
        try:
            call()
        except Exception as error:
            errors.append(type(error).__name__)
    return errors


@pytest.mark.ranks
def test_all_ranks_get_the_error_of_the_rank_that_looked(ranks: Ranks, tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, model=model_of(1.0))
    (tmp_path / "a-file").write_text("no directory")
    first, second = ranks.run(look_where_rank_0_cannot, str(tmp_path), size=2)
    assert first == second
    assert len(first) == 3


def save_wrongly_on_rank_1(url: str) -> list[str]:
    manager = CheckpointManager(url)
    errors = []
    calls: list[tuple[Any, dict[str, Any]]] = [(1, {"loss": "low"}), ("a/b", {}), (-1, {})]
    for step, metrics in calls:
        try:
            wrong = dist.get_rank() == 1
            manager.save(step if wrong else 1, model=model_of(1.0), metrics=metrics if wrong else None)
        except ConfigError as error:
            errors.append(f"rank {error.rank}")
    return errors


@pytest.mark.ranks
def test_a_call_that_is_wrong_on_one_rank_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(save_wrongly_on_rank_1, str(tmp_path), size=2) == [["rank 1"] * 3] * 2
    assert names(CheckpointDirectory(tmp_path)) == []


def load_with_another_model(url: str) -> str:
    try:
        CheckpointManager(url).load(model=nn.Linear(2, 2))
    except KeyMismatchError as error:
        return ", ".join(error.missing)
    return "loaded"


@pytest.mark.ranks
def test_a_checkpoint_that_does_not_fit_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, model=model_of(1.0))
    assert ranks.run(load_with_another_model, str(tmp_path), size=2) == ["model.bias"] * 2


def test_the_report_of_a_load_names_what_was_missing(url: str) -> None:
    manager = CheckpointManager(url)
    manager.save(1, model=model_of(1.0))
    loaded = manager.load(model=nn.Linear(2, 2), strict_loading=False)
    assert isinstance(loaded, LoadedCheckpoint)
    assert loaded.missing == ("model.bias",)
