"""Cases from the field on several real ranks: killed, failing, stalled, slow, saving in the background.

``docs/field-cases.md`` says what each number stands for.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import remote_ckpt.commit
import remote_ckpt.dcp.writer
from remote_ckpt import (
    CommitOptions,
    Options,
    RemoteStorageWriter,
    RetryOptions,
    find_latest_checkpoint,
    keep_last_n_checkpoints,
    load_checkpoint,
    resumed,
    save_checkpoint,
)
from remote_ckpt.newest import read_newest
from remote_ckpt.options import MiB
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.testing.faults import FaultStore, StoreCall
from remote_ckpt.testing.proxy import (
    Answer,
    Call,
    DelayAnswer,
    DelayRequest,
    Fault,
    FaultProxy,
    Proceed,
    Reply,
    Rule,
    Stall,
)
from remote_ckpt.testing.servers import LocalServer

pytestmark = pytest.mark.ranks
WRITER: Any = remote_ckpt.dcp.writer

FAR = Options(
    retry=RetryOptions(max_attempts=3, initial_seconds=0.005, max_seconds=0.02),
    commit=CommitOptions(collective_seconds=60),
)


@dataclass(frozen=True)
class Run:
    """A run's directory, and how each rank reaches it."""

    url: str
    access: dict[str, Any] = field(default_factory=dict, repr=False)

    def path(self, name: int | str) -> str:
        return f"{self.url}/{name}"

    def save(self, name: int, value: float, **others: Any) -> None:
        model = model_of(value)
        save_checkpoint(self.path(name), iteration=name, model=model, **others, **self.access)

    def value_of(self, name: int | str) -> float:
        model = model_of(-1.0)
        load_checkpoint(self.path(name), model=model, **self.access)
        values = model.weight.detach().unique()
        assert len(values) == 1, "a mixture"
        return float(values)

    def latest(self) -> str | None:
        found = find_latest_checkpoint(self.url, **self.access)
        return None if found is None else found.name


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(8, 8, bias=False)
    nn.init.constant_(model.weight, value)
    return model


@pytest.fixture(scope="module")
def running_proxy(ministack: LocalServer) -> Iterator[FaultProxy]:
    with FaultProxy(ministack.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: FaultProxy) -> Iterator[FaultProxy]:
    running_proxy.clear()
    running_proxy.forget()
    yield running_proxy
    running_proxy.clear()


@pytest.fixture
def remote(ministack: LocalServer, proxy: FaultProxy, fresh_root: Callable[[LocalServer], str]) -> Run:
    """A run on S3, through the proxy."""
    options = {**ministack.storage_options(), "endpoint_url": proxy.endpoint_url}
    return Run(fresh_root(ministack), {"storage_options": options, "options": FAR})


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    if request.param == "local":
        return Run(str(tmp_path / "run"), {"options": FAR})
    found: Run = request.getfixturevalue("remote")
    return found


@pytest.fixture(autouse=True)
def _resumed_from_nothing() -> Iterator[None]:
    resumed.forget_all()
    yield
    resumed.forget_all()


# --- killed -------------------------------------------------------------------------------------------------


def save_and_die_before_the_commit(run: Run) -> None:
    """Save 10; then upload all of 20 and kill both ranks in the place of the commit."""
    run.save(10, 1.5)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())

    def die(*args: Any, **options: Any) -> Any:
        for pid in (pids[1], pids[0]):
            os.kill(pid, signal.SIGKILL)
        threading.Event().wait()

    remote_ckpt.commit.commit_save = die
    run.save(20, 2.5)


def test_br_01_a_save_whose_ranks_are_killed_before_the_commit_is_passed_over(ranks: Ranks, run: Run) -> None:
    errors = ranks.errors(save_and_die_before_the_commit, run)
    assert [type(error) for error in errors] == [EOFError, EOFError]
    with closing(open_store(run.url, **run.access)) as root:
        left = [info.key for info in root.list("20/")]
    assert sum(key.endswith(".distcp") for key in left) >= 1
    assert any("/index." in key for key in left)
    assert not [key for key in left if "/manifest." in key]
    assert run.latest() == "10"
    assert run.value_of("10") == 1.5
    run.save(20, 3.5)
    assert (run.latest(), run.value_of("20")) == ("20", 3.5)


def save_in_the_background_and_die(run: Run, steps: list[int]) -> None:
    first, second = steps
    run.save(first, 1.5)
    writer = RemoteStorageWriter(run.path(second), **run.access)
    dcp.async_save({"model": model_of(2.5).state_dict()}, storage_writer=writer)
    keep_last_n_checkpoints(run.url, 1, **run.access)
    os.kill(os.getpid(), signal.SIGKILL)


def test_br_03_a_job_that_is_killed_while_it_saves_in_the_background_keeps_its_last_checkpoint(
    ranks: Ranks, remote: Run, proxy: FaultProxy
) -> None:
    """The uploads reach the store after the death, and still make no checkpoint."""
    release = threading.Event()
    proxy.inject(Rule(path="*/20/*", method="PUT", fault=DelayRequest(until=release)))
    (error,) = ranks.errors(save_in_the_background_and_die, remote, [10, 20], size=1)
    assert isinstance(error, EOFError)
    for _ in range(2):
        assert remote.latest() == "10"
        assert remote.value_of("10") == 1.5
        release.set()
        proxy.settle()


def save_killed_at(run: Run, number: int) -> int:
    """Replace a checkpoint and die at that request (from 1); returns how many there were."""
    calls: list[StoreCall] = []

    def count(call: StoreCall) -> None:
        calls.append(call)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def opened(*args: Any, **options: Any) -> Store:
        return FaultStore(open_store(*args, **options), before=count)

    WRITER.open_store = opened
    try:
        run.save(10, 2.5)
    finally:
        WRITER.open_store = open_store
    return len(calls)


def test_br_12_a_replacement_that_is_killed_anywhere_leaves_all_of_the_old_or_of_the_new(
    ranks: Ranks, tmp_path: Path
) -> None:
    run = Run(str(tmp_path / "run"), {"options": FAR})
    run.save(10, 1.5)
    (count,) = ranks.run(save_killed_at, run, 0, size=1)
    assert count >= 10
    points = sorted({1 + round(number * (count - 1) / 9) for number in range(10)})
    assert len(points) == 10
    seen = []
    for point in points:
        run.save(10, 1.5)
        (error,) = ranks.errors(save_killed_at, run, point, size=1)
        assert isinstance(error, EOFError)
        seen.append(run.value_of("10"))
        assert run.latest() == "10"
    assert seen == sorted(seen)
    assert set(seen) == {1.5, 2.5}


# --- failing ------------------------------------------------------------------------------------------------


def save_all(run: Run, name: int, value: float) -> None:
    run.save(name, value, **{f"rank{dist.get_rank()}": {"value": value}})


REFUSED = {
    "commit": Rule(path="*/manifest.*", method="PUT", nth=1, fault=Reply(507, code="XMinioStorageFull")),
    "metadata": Rule(path="*/index.*", method="PUT", nth=1, fault=Reply(403, code="AccessDenied")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_br_10_and_br_35_a_coordinator_that_is_refused_is_one_error_on_all_and_saving_again_works(
    ranks: Ranks, remote: Run, proxy: FaultProxy, what: str
) -> None:
    with proxy.inject(REFUSED[what]) as refused:
        errors = ranks.errors(save_all, remote, 20, 2.5, size=4)
    assert refused.fired == 1
    assert [type(error) for error in errors] == [type(errors[0])] * 4
    assert len({str(error) for error in errors}) == 1
    assert {"commit": "507 XMinioStorageFull", "metadata": "403 AccessDenied"}[what] in str(errors[0])
    assert remote.latest() is None
    ranks.run(save_all, remote, 20, 3.5, size=4)
    assert (remote.latest(), remote.value_of("20")) == ("20", 3.5)
    with closing(open_store(remote.url, **remote.access)) as root, closing(root.scope("20")) as checkpoint:
        newest = read_newest(checkpoint)
        assert newest is not None
        assert sum("/0.distcp" in info.key for info in checkpoint.list()) == len(newest.manifest.objects)


IMPATIENT = Options(
    retry=RetryOptions(max_attempts=2, initial_seconds=0.0, request_seconds=1.0, total_seconds=2.0),
    commit=CommitOptions(collective_seconds=60),
)
STALLS: dict[str, Fault] = {
    "never answers": DelayAnswer(),
    "stops reading": Stall("request", keep_bytes=500_000),
}


def save_with_rank_1_behind(stalling: Run, direct: Run) -> None:
    """Rank 1 reaches the store through the proxy, rank 0 past it."""
    run = stalling if dist.get_rank() == 1 else direct
    state = {f"rank{dist.get_rank()}": torch.ones(MiB)}
    with closing(open_store(run.url, **run.access)):
        dcp.save(state, storage_writer=RemoteStorageWriter(run.path(20), **run.access))


@pytest.mark.parametrize("kind", STALLS)
def test_br_36_a_store_that_stalls_one_rank_is_an_error_that_names_rank_and_object(
    ranks: Ranks, remote: Run, proxy: FaultProxy, ministack: LocalServer, kind: str
) -> None:
    stalling = Run(remote.url, {**remote.access, "options": IMPATIENT})
    direct = Run(remote.url, {"storage_options": ministack.storage_options(), "options": IMPATIENT})
    with proxy.inject(Rule(method="PUT", path="*.distcp", fault=STALLS[kind])) as stalled:
        errors = ranks.errors(save_with_rank_1_behind, stalling, direct)
    assert stalled.fired >= 1
    for error in errors:
        assert ".distcp" in str(error)
        assert "rank 1" in str(error)
    assert direct.latest() is None


# --- in the background --------------------------------------------------------------------------------------


class Ending(DefaultSavePlanner):
    """Ends the upload of rank 1: by an exception, or with its process."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 1 and self.way == "exit":
            os._exit(17)
        if dist.get_rank() == 1:
            raise OSError("the disk fell off")
        return super().resolve_data(write_item)


def save_in_the_background_and_fail(run: Run, way: str) -> tuple[str, float]:
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    state = {f"rank{dist.get_rank()}": torch.ones(9)}
    kind = AsyncCheckpointerType.PROCESS if way == "exit" else AsyncCheckpointerType.THREAD
    writer = RemoteStorageWriter(run.path(20), **run.access)
    future: Any = dcp.async_save(
        state, storage_writer=writer, planner=Ending(way), async_checkpointer_type=kind
    )
    with pytest.raises(BaseException) as caught:
        future.result()
    dist.barrier()
    run.save(30, 3.5)
    return str(caught.value), run.value_of("30")


@pytest.mark.parametrize("way", ["raise", "exit"])
def test_br_37_a_background_save_that_dies_is_an_error_on_every_rank_and_the_next_save_works(
    ranks: Ranks, tmp_path: Path, way: str
) -> None:
    run = Run(str(tmp_path / "run"), {"options": FAR})
    outcomes = ranks.run(save_in_the_background_and_fail, run, way, timeout_seconds=150)
    assert [value for _, value in outcomes] == [3.5, 3.5]
    texts = [text for text, _ in outcomes]
    if way == "raise":
        assert all("the disk fell off" in text for text in texts)
    else:
        assert all(texts)
        assert "is dead" in texts[1]
    assert run.latest() == "30"


# --- slow ---------------------------------------------------------------------------------------------------


def save_slowly(run: Run, seconds: float) -> float:
    """Save while the default group's limit is shorter than rank 0's upload."""
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds / 2), dist.group.WORLD)

    def wait(call: StoreCall) -> None:
        if call.operation == "write_stream" and dist.get_rank() == 0:
            threading.Event().wait(seconds)

    def opened(*args: Any, **options: Any) -> Store:
        return FaultStore(open_store(*args, **options), before=wait)

    WRITER.open_store = opened
    try:
        run.save(10, 1.5, **{f"rank{dist.get_rank()}": {"value": torch.ones(3)}})
    finally:
        WRITER.open_store = open_store
    return run.value_of(10)


def test_br_39_an_upload_may_take_longer_than_the_groups_time_limit(ranks: Ranks, tmp_path: Path) -> None:
    run = Run(str(tmp_path / "run"), {"options": FAR})
    assert ranks.run(save_slowly, run, 6.0) == [1.5, 1.5]
    assert run.latest() == "10"


@dataclass(frozen=True, slots=True)
class SlowWhereLarge:
    """Large bodies reach the store late. Writes down which requests were done, in order."""

    done: list[str]
    seconds: float = 1.0

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        late = DelayRequest(self.seconds if int(call.headers.get("content-length", "0")) > MiB else 0.0)
        answer = await late.apply(call, proceed)
        self.done.append(call.path)
        return answer


def save_large(run: Run, name: int) -> None:
    state = {f"rank{dist.get_rank()}": torch.full((MiB,), float(name))}
    dcp.save(state, storage_writer=RemoteStorageWriter(run.path(name), **run.access))


def test_br_04_the_commit_comes_after_the_last_write_and_no_reader_ever_misses_an_object(
    ranks: Ranks, remote: Run, proxy: FaultProxy, ministack: LocalServer
) -> None:
    done: list[str] = []
    proxy.inject(Rule(method="PUT", fault=SlowWhereLarge(done)))
    proxy.inject(Rule(method="POST", fault=SlowWhereLarge(done)))
    is_over = threading.Event()

    def poll() -> tuple[int, list[str]]:
        looks, missing = 0, []
        with closing(open_store(remote.url, storage_options=ministack.storage_options())) as root:
            while not is_over.is_set():
                looks += 1
                with closing(root.scope("20")) as checkpoint:
                    newest = read_newest(checkpoint)
                    if newest is not None:
                        there = {info.key for info in checkpoint.list()}
                        missing += [one.key for one in newest.manifest.objects if one.key not in there]
        return looks, missing

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(poll)
        try:
            ranks.run(save_large, remote, 20, size=4)
        finally:
            is_over.set()
        looks, missing = reader.result()
    assert (looks > 0, missing) == (True, [])
    commits = [number for number, path in enumerate(done) if "/20/manifest." in path]
    data = [number for number, path in enumerate(done) if path.endswith(".distcp")]
    assert len(commits) == 1
    assert len(data) >= 4
    assert max(data) < commits[0]
