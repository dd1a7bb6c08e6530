"""Field cases of saves in the background, of forked processes and of cached plans."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from remote_ckpt import (
    CheckedSavePlanner,
    CheckpointNotFoundError,
    RemoteStorageReader,
    RemoteStorageWriter,
    SaveFailedError,
    find_latest_checkpoint,
)
from remote_ckpt.store import open_store
from remote_ckpt.testing.faults import FaultStore, StoreCall

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

State = dict[str, Any]
LONG_SECONDS = 60.0
"""How long a test waits for what should happen at once: a test that hangs is to end."""

_numbers = itertools.count()


@pytest.fixture
def url() -> str:
    return f"memory://async-{next(_numbers)}/run"


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """``dcp.async_save`` asks for a process group, even of a single process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def _no_cached_plans() -> Iterator[None]:
    """torch keeps save plans by the planner's class for as long as the process lives."""
    forget_plans()
    yield
    forget_plans()


def forget_plans() -> None:
    for cache in (name for name in vars(SavePlanner) if name.startswith("_cached_")):
        getattr(SavePlanner, cache).clear()


class Gate:
    """Holds the data of saves back until it is opened, and makes those fail that are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing = ""
        self._opened = threading.Event()
        self._reached = threading.Event()
        writer: Any = importlib.import_module("remote_ckpt.dcp.writer")
        monkeypatch.setattr(
            writer, "open_store", lambda *args, **kw: FaultStore(open_store(*args, **kw), before=self._before)
        )

    def wait_until_reached(self) -> None:
        assert self._reached.wait(LONG_SECONDS)

    def open(self) -> None:
        self._opened.set()

    def _before(self, call: StoreCall) -> None:
        if not (call.key or "").endswith(".distcp") or not call.operation.startswith("write"):
            return
        self._reached.set()
        assert self._opened.wait(LONG_SECONDS)
        if self.failing and call.url.endswith(self.failing):
            raise OSError("the upload broke off")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def save_in_background(state: State, url: str, writer: RemoteStorageWriter | None = None) -> Future[Any]:
    """With a group of its own: torch's collectives of two saves in one group would meet."""
    future = dcp.async_save(
        state,
        checkpoint_id=url,
        storage_writer=writer or RemoteStorageWriter(url),
        process_group=dist.new_group(timeout=timedelta(seconds=LONG_SECONDS)),
    )
    assert isinstance(future, Future)
    return future


def load(state: State, url: str) -> State:
    dcp.load(state, storage_reader=RemoteStorageReader(url), no_dist=True)
    return state


def cause(error: BaseException | None) -> BaseException:
    assert isinstance(error, CheckpointException)
    return error.failures[0][0]


# --- in the background --------------------------------------------------------------------------


@pytest.mark.usefixtures("_one_rank")
def test_br_108_what_is_changed_after_the_call_is_not_what_is_stored(gate: Gate, url: str) -> None:
    state: State = {"a": torch.ones(1000), "l": [1, 2], "d": {"deep": [{"x": 1}]}, "t": torch.ones(4)[::2]}
    state["tuple"] = ([1, 2], torch.ones(3))
    future = save_in_background(state, f"{url}/1")
    gate.wait_until_reached()
    state["a"].add_(1)
    state["t"].add_(1)
    state["tuple"][0].append(3)
    state["tuple"][1].add_(1)
    state["l"].append(3)
    state["l"][0] = 9
    state["d"]["deep"][0]["x"] = 9
    gate.open()
    future.result(LONG_SECONDS)
    template = {"a": torch.zeros(1000), "l": [0, 0], "d": {"deep": [{"x": 0}]}, "t": torch.zeros(2)}
    loaded = load({**template, "tuple": ()}, f"{url}/1")
    assert torch.equal(loaded["a"], torch.ones(1000))
    assert (loaded["tuple"][0], loaded["tuple"][1].tolist()) == ([1, 2], [1.0, 1.0, 1.0])
    assert torch.equal(loaded["t"], torch.ones(2))
    assert (loaded["l"], loaded["d"]) == ([1, 2], {"deep": [{"x": 1}]})


SCALARS: State = {
    "fp32": torch.tensor(-1.5),
    "bf16": torch.tensor(3.0, dtype=torch.bfloat16),
    "int64": torch.tensor(2**53 + 1),
    "bool": torch.tensor(True),
    "none": torch.empty(0),
    "no rows": torch.empty(0, 5),
}


def are_scalars_kept(url: str) -> bool:
    loaded = load({name: torch.zeros_like(value) for name, value in SCALARS.items()}, url)
    return all(
        (loaded[name].shape, loaded[name].dtype) == (value.shape, value.dtype)
        and torch.equal(loaded[name], value)
        for name, value in SCALARS.items()
    )


@pytest.mark.usefixtures("_one_rank")
def test_br_79_scalars_and_empty_tensors_are_saved_in_the_background(url: str) -> None:
    save_in_background(dict(SCALARS), f"{url}/1").result(LONG_SECONDS)
    assert are_scalars_kept(f"{url}/1")


def save_from_another_process(url: str) -> tuple[bool, list[int], bool]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    state: State = {"a": torch.ones(1000), "l": [1, 2], **SCALARS}
    future = dcp.async_save(
        state,
        storage_writer=RemoteStorageWriter(url),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    state["a"].add_(1)
    state["l"][0] = 9
    assert isinstance(future, Future)
    future.result()
    dist.barrier()
    loaded = load({"a": torch.zeros(1000), "l": [0, 0]}, url)
    return torch.equal(loaded["a"], torch.ones(1000)), loaded["l"], are_scalars_kept(url)


@pytest.mark.ranks
def test_br_108_br_79_a_save_from_another_process_stores_the_values_of_the_call(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved = ranks.run(save_from_another_process, str(tmp_path / "1"), timeout_seconds=240)
    assert saved == [(True, [1, 2], True)] * 2


def values(step: int) -> State:
    return {"a": torch.full((1000,), float(step)), "side": {"step": step}}


def blank() -> State:
    return {"a": torch.zeros(1000), "side": {"step": 0}}


def assert_whole(url: str, step: int) -> None:
    loaded = load(blank(), url)
    assert (loaded["a"].unique().tolist(), loaded["side"]) == ([float(step)], {"step": step})


@pytest.mark.usefixtures("_one_rank")
def test_br_114_of_two_saves_at_once_each_is_whole_or_absent(gate: Gate, url: str) -> None:
    gate.failing = "/10"
    first = save_in_background(values(10), f"{url}/10")
    gate.wait_until_reached()
    second = save_in_background(values(20), f"{url}/20")
    gate.open()
    second.result(LONG_SECONDS)
    error = cause(first.exception(LONG_SECONDS))
    assert isinstance(error, SaveFailedError)
    assert "the upload broke off" in str(error)
    assert_whole(f"{url}/20", 20)
    with pytest.raises(CheckpointNotFoundError):
        RemoteStorageReader(f"{url}/10").read_metadata()
    assert str(find_latest_checkpoint(url)).endswith("/20")


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("is_failing", [False, True])
def test_br_114_a_second_save_with_a_writer_that_is_saving_is_refused(
    gate: Gate, url: str, is_failing: bool
) -> None:
    gate.failing = "/10" if is_failing else ""
    writer = RemoteStorageWriter(url, overwrite=True)
    first = save_in_background(values(10), f"{url}/10", writer)
    gate.wait_until_reached()
    second = save_in_background(values(20), f"{url}/20", writer)
    assert "another save with this RemoteStorageWriter" in str(cause(second.exception(LONG_SECONDS)))
    gate.open()
    if is_failing:
        assert "the upload broke off" in str(cause(first.exception(LONG_SECONDS)))
    else:
        first.result(LONG_SECONDS)
        assert_whole(f"{url}/10", 10)
    with pytest.raises(CheckpointNotFoundError):
        RemoteStorageReader(f"{url}/20").read_metadata()
    save_in_background(values(30), f"{url}/30", writer).result(LONG_SECONDS)
    assert_whole(f"{url}/30", 30)


class WaitingPlanner(DefaultSavePlanner):
    """Holds a save back between its set-up and its data."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.opened = threading.Event(), threading.Event()

    def finish_plan(self, new_plan: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(LONG_SECONDS)
        return super().finish_plan(new_plan)


@pytest.mark.usefixtures("_one_rank")
def test_br_114_a_save_whose_writer_was_taken_while_it_planned_commits_nothing(url: str) -> None:
    writer, planner = RemoteStorageWriter(url), WaitingPlanner()
    first = dcp.async_save(
        values(10),
        checkpoint_id=f"{url}/10",
        storage_writer=writer,
        planner=planner,
        process_group=dist.new_group(),
    )
    assert isinstance(first, Future)
    assert planner.reached.wait(LONG_SECONDS)
    save_in_background(values(20), f"{url}/20", writer).result(LONG_SECONDS)
    planner.opened.set()
    assert "another save with this RemoteStorageWriter" in str(cause(first.exception(LONG_SECONDS)))
    assert_whole(f"{url}/20", 20)
    with pytest.raises(CheckpointNotFoundError):
        RemoteStorageReader(f"{url}/10").read_metadata()


class WaitingWriter(RemoteStorageWriter):
    """Holds its first save back between its data and its commit, as ranks do that are slower."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reached, self.opened = threading.Event(), threading.Event()

    def finish(self, metadata: Any, results: Any) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(LONG_SECONDS)
        super().finish(metadata, results)


@pytest.mark.usefixtures("_one_rank")
def test_br_114_a_save_whose_writer_was_taken_before_its_commit_commits_nothing(url: str) -> None:
    writer = WaitingWriter(url)
    first = save_in_background(values(10), f"{url}/10", writer)
    assert writer.reached.wait(LONG_SECONDS)
    save_in_background(values(20), f"{url}/20", writer).result(LONG_SECONDS)
    writer.opened.set()
    assert "another save with this RemoteStorageWriter" in str(cause(first.exception(LONG_SECONDS)))
    assert_whole(f"{url}/20", 20)
    with pytest.raises(CheckpointNotFoundError):
        RemoteStorageReader(f"{url}/10").read_metadata()


class BrokenOff(DefaultSavePlanner):
    """Ends the data of rank 1 as a signal does; torch never finishes such a save."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise SystemExit(3)
        return super().resolve_data(write_item)


def save_in_background_after_one_broke_off(url: str) -> str:
    writer = RemoteStorageWriter(url)
    state = {f"a{rank}": torch.ones(3) for rank in range(dist.get_world_size())}  # one for each rank
    try:
        dcp.save(state, checkpoint_id=f"{url}/10", storage_writer=writer, planner=BrokenOff())
    except CheckpointException as error:
        outcome = repr(error.failures[1][0])
    save_in_background(state, f"{url}/20", writer).result(LONG_SECONDS)
    return outcome


def test_br_114_a_save_that_another_rank_broke_off_does_not_keep_the_writer(
    ranks: Ranks, tmp_path: Path
) -> None:
    outcomes = ranks.run(save_in_background_after_one_broke_off, str(tmp_path), timeout_seconds=240)
    assert outcomes == ["SystemExit(3)"] * 2
    loaded = load({"a0": torch.zeros(3), "a1": torch.zeros(3)}, f"{tmp_path}/20")
    assert (loaded["a0"].tolist(), loaded["a1"].tolist()) == ([1.0] * 3, [1.0] * 3)
    with pytest.raises(CheckpointNotFoundError):
        RemoteStorageReader(f"{tmp_path}/10").read_metadata()


# --- cached plans -------------------------------------------------------------------------------


class FailingOnce(CheckedSavePlanner):
    """Fails in its first save, once planning is over."""

    failures = 0

    def resolve_data(self, write_item: Any) -> Any:
        if FailingOnce.failures == 0:
            FailingOnce.failures += 1
            raise OSError("no data this time")
        return super().resolve_data(write_item)


Planner = Callable[..., DefaultSavePlanner]


def save_cached(value: float, writer: Any, make_planner: Planner) -> None:
    state = {"a": torch.full((5,), value), "n": value}
    dcp.save(state, storage_writer=writer, planner=make_planner(enable_plan_caching=True))


def read_cached(reader: Any) -> tuple[list[float], float]:
    state: State = {"a": torch.zeros(5), "n": 0.0}
    dcp.load(state, storage_reader=reader)
    return state["a"].tolist(), state["n"]


@pytest.mark.usefixtures("_no_cached_plans")
@pytest.mark.parametrize("make_planner", [DefaultSavePlanner, CheckedSavePlanner])
@pytest.mark.parametrize("order", ["stock ours ours stock", "ours stock stock ours"])
def test_br_113_plans_cached_by_either_writer_lead_the_other_to_its_own_objects(
    tmp_path: Path, make_planner: Planner, order: str
) -> None:
    for number, kind in enumerate(order.split()):
        place = tmp_path / str(number)
        writer = FileSystemWriter(place) if kind == "stock" else RemoteStorageWriter(place)
        save_cached(float(number + 1), writer, make_planner)
    for number in range(4):
        expected = ([float(number + 1)] * 5, float(number + 1))
        assert read_cached(RemoteStorageReader(tmp_path / str(number))) == expected
        assert read_cached(FileSystemReader(tmp_path / str(number))) == expected


@pytest.mark.usefixtures("_no_cached_plans")
def test_br_113_a_failed_save_leaves_no_plan_that_breaks_the_next(tmp_path: Path) -> None:
    FailingOnce.failures = 0
    with pytest.raises(CheckpointException, match="no data this time"):
        save_cached(1.0, RemoteStorageWriter(tmp_path / "1"), FailingOnce)
    assert find_latest_checkpoint(tmp_path) is None
    for number, place in ((2, "1"), (3, "3")):
        save_cached(float(number), RemoteStorageWriter(tmp_path / place), FailingOnce)
        assert read_cached(RemoteStorageReader(tmp_path / place)) == ([float(number)] * 5, float(number))
