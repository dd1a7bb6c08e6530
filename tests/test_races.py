"""Independent jobs that race on real storage: one complete checkpoint stands, and the loser is told.

The racers meet right before each of them creates the manifest, so that every round is decided by the store.

``REMOTE_CKPT_ROUNDS`` says how often each race is run (a tenth of it on SeaweedFS, whose contended
conditional writes take seconds). Each test prints what it saw: ``pytest tests/test_races.py -rP``.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Barrier
from typing import Any

import protocol
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from remote_ckpt import (
    CheckpointChangedError,
    CheckpointDirectory,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitOptions,
    KeepLast,
    Options,
    find_all_checkpoints,
    find_latest_checkpoint,
    keep_checkpoint_copy,
    keep_last_n_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from remote_ckpt.errors import ObjectExistsError
from remote_ckpt.newest import named_keys, read_newest
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.testing.s3_contract import FreshRoot
from remote_ckpt.testing.servers import LocalServer, SeaweedServer

pytestmark = pytest.mark.ranks
OPTIONS = Options(commit=CommitOptions(collective_seconds=60, commit_seconds=60))
SECONDS_PER_ROUND = 10
MEETING_SECONDS = 20.0


@dataclass(frozen=True)
class Arena:
    """A run's directory on storage that several processes reach.

    Args:
        kind: For the report.
        root: Path or URL.
        meetings: A local folder in which racers tell one another that they are there.
        is_slow: Its contended creates take seconds.
    """

    kind: str
    root: str
    meetings: Path
    storage_options: dict[str, Any] = field(default_factory=dict)
    transport: str | None = None
    is_slow: bool = False

    def rounds(self, in_ci: int) -> int:
        asked = os.environ.get("REMOTE_CKPT_ROUNDS")
        if asked is None:
            return max(1, in_ci // 3) if self.is_slow else in_ci
        return max(1, int(asked) // (10 if self.is_slow else 1))

    @property
    def access(self) -> dict[str, Any]:
        return {"storage_options": self.storage_options, "transport": self.transport, "options": OPTIONS}

    def open(self) -> Store:
        return open_store(self.root, **self.access)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes of this module only: torch remembers meshes over some of the ranks by who is in them."""
    pool = Ranks(tmp_path_factory.mktemp("races"))
    yield pool
    pool.close()


@pytest.fixture(params=["local disk", "ministack", pytest.param("real_server", marks=pytest.mark.server)])
def arena(request: pytest.FixtureRequest, fresh_root: FreshRoot, tmp_path: Path) -> Arena:
    if request.param == "local disk":
        return Arena("local disk", str(tmp_path / "run"), tmp_path)
    server: LocalServer = request.getfixturevalue(request.param)
    return Arena(
        type(server).__name__,
        fresh_root(server),
        tmp_path,
        server.storage_options(),
        is_slow=isinstance(server, SeaweedServer),
    )


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def report(arena: Arena, began_at: float, counts: Iterable[object]) -> None:
    counted = collections.Counter(map(str, counts))
    seen = ", ".join(f"{count} x {what}" for what, count in sorted(counted.items()))
    print(f"{arena.kind} in {time.monotonic() - began_at:.0f} s: {seen}")


class Meeting:
    """Makes racers in several processes create their first manifest of a round at the same time.

    Args:
        racer: This process's number.
        count: How many race.
    """

    def __init__(self, arena: Arena, racer: int, count: int) -> None:
        self._arena, self._racer, self._count = arena, racer, count
        self._round: object = None
        self.has_met = False
        self._commit: Any = import_module("remote_ckpt.commit")
        self._create = self._commit.create_generation

    def __enter__(self) -> Meeting:
        self._commit.create_generation = self._meet_and_create
        return self

    def __exit__(self, *_: object) -> None:
        self._commit.create_generation = self._create

    def begin(self, number: int) -> None:
        """Meet in the next create, and say in :attr:`has_met` whether all came; one may be refused before."""
        self._round, self.has_met = number, False

    def _meet_and_create(self, *args: Any, **options: Any) -> Any:
        if self._round is not None:
            self._meet(f"round {self._round} racer ")
            self._round = None
        return self._create(*args, **options)

    def _meet(self, prefix: str) -> None:
        (self._arena.meetings / f"{prefix}{self._racer}").touch()
        wanted = [self._arena.meetings / f"{prefix}{racer}" for racer in range(self._count)]
        give_up_at = time.monotonic() + MEETING_SECONDS
        while not self.has_met and time.monotonic() < give_up_at:
            time.sleep(0.001)  # or it would take the processor from whom it waits for
            self.has_met = all(path.exists() for path in wanted)


def leftovers_of(root: Store, name: str) -> set[str]:
    """Return keys of a checkpoint that its newest generation does not need; its ``.metadata`` is checked."""
    checkpoint = root.scope(name)
    newest = read_newest(checkpoint)
    assert newest is not None
    assert newest.manifest.stock_metadata is not None
    assert checkpoint.read(".metadata") == checkpoint.read(newest.manifest.stock_metadata.key)
    return protocol.keys_of(root, name) - {".metadata", *named_keys(newest.manifest)}


# --- two jobs of two ranks each -----------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What one race came to, as all ranks saw it.

    Args:
        told: What each of the four ranks was told; ranks 0 and 1 are one job, 2 and 3 the other.
        seen: Every value that each rank found in what stands there now.
        expected: The values that the jobs saved.
        has_met: Both created the manifest at the same time.
    """

    told: tuple[str, ...]
    seen: tuple[frozenset[float], ...]
    expected: tuple[float, float]
    generation: int
    leftovers: frozenset[str]
    has_met: bool

    @property
    def outcomes(self) -> tuple[str, str]:
        first, second = self.told[:2], self.told[2:]
        assert len(set(first)) == len(set(second)) == 1, "the ranks of one job disagree"
        return first[0], second[0]

    @property
    def winner(self) -> int:
        """Which job's checkpoint stands there, whole."""
        values = set().union(*self.seen)
        assert len(values) == 1, f"a mixture: {self.seen}"
        return self.expected.index(values.pop())


class Job:
    """This rank's half of one of two jobs, with a sharded model and a tensor of each rank's own."""

    def __init__(self, arena: Arena) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.number = dist.get_rank() // 2
        self.arena, self.group = arena, groups[self.number]
        self.model = nn.Linear(6, 5)
        fully_shard(self.model, mesh=DeviceMesh.from_group(self.group, "cpu"))
        self.own = {f"rank{rank}": torch.zeros(3) for rank in range(2)}

    def save(self, name: str, value: float, *, overwrite: bool) -> str:
        self._fill(value)
        own = f"rank{dist.get_rank() % 2}"
        try:
            save_checkpoint(
                f"{self.arena.root}/{name}",
                iteration=0,
                model=self.model,
                overwrite=overwrite,
                process_group=self.group,
                own={own: self.own[own]},
                **self.arena.access,
            )
        except CheckpointExistsError as error:
            return type(error).__name__
        return "saved"

    def load(self, name: str) -> frozenset[float]:
        self._fill(-1.0)
        load_checkpoint(
            f"{self.arena.root}/{name}",
            model=self.model,
            process_group=self.group,
            own=self.own,
            **self.arena.access,
        )
        tensors: list[Any] = [*self.model.parameters(), *self.own.values()]
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        return frozenset(value for tensor in local for value in tensor.detach().reshape(-1).tolist())

    def _fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.own.values()):
                tensor.fill_(value)


def race(arena: Arena, count: int, overwrite: bool) -> list[Round]:
    """Run on four ranks: both jobs save under one name at once, then both load what stands there."""
    job, root = Job(arena), arena.open()
    with Meeting(arena, job.number, 2) as meeting:
        return [race_once(job, root, meeting, number, overwrite) for number in range(count)]


def race_once(job: Job, root: Store, meeting: Meeting, number: int, overwrite: bool) -> Round:
    name = "7" if overwrite else str(number)
    expected = (2.0 * number, 2.0 * number + 1)
    meeting.begin(number)
    dist.barrier()
    told = job.save(name, expected[job.number], overwrite=overwrite)
    dist.barrier()
    seen = job.load(name)
    newest = read_newest(root.scope(name))
    assert newest is not None
    told_all, seen_all, met_all = gathered(told), gathered(seen), gathered(meeting.has_met)
    leftovers = frozenset(leftovers_of(root, name) if dist.get_rank() == 0 else ())
    return Round(tuple(told_all), tuple(seen_all), expected, newest.generation, leftovers, any(met_all))


def run_races(ranks: Ranks, arena: Arena, *, overwrite: bool) -> list[Round]:
    count, began_at = arena.rounds(in_ci=3), time.monotonic()
    timeout_seconds = 60 + SECONDS_PER_ROUND * count
    rounds: list[Round] = ranks.run(race, arena, count, overwrite, size=4, timeout_seconds=timeout_seconds)[0]
    report(arena, began_at, (describe(each) for each in rounds))
    return rounds


def describe(each: Round) -> str:
    how = "decided by the store" if each.has_met else "one was there before"
    return f"job {each.winner} of {each.outcomes} stands, {how}"


@pytest.mark.timeout(3600)
def test_of_two_jobs_that_save_one_name_at_once_one_wins_whole_and_the_other_is_told(
    ranks: Ranks, arena: Arena
) -> None:
    for each in run_races(ranks, arena, overwrite=False):
        assert each.outcomes[each.winner] == "saved"
        assert each.outcomes[1 - each.winner] == "CheckpointExistsError"
        assert (each.generation, each.leftovers) == (1, frozenset())


@pytest.mark.timeout(3600)
def test_of_two_jobs_told_to_overwrite_one_replaces_the_other_wholly(ranks: Ranks, arena: Arena) -> None:
    for number, each in enumerate(run_races(ranks, arena, overwrite=True)):
        assert each.outcomes == ("saved", "saved")
        assert each.winner in (0, 1)
        assert (each.generation, each.leftovers) == (2 * number + 2, frozenset())


# --- four savers that do nothing else -----------------------------------------------------------------


def save_at_once(arena: Arena, count: int) -> list[tuple[list[str], bytes | None, set[str]]]:
    """Run on four ranks, which are four jobs of one process each."""
    with Meeting(arena, dist.get_rank(), 4) as meeting:
        return [save_once(arena.open(), meeting, number) for number in range(count)]


def save_once(root: Store, meeting: Meeting, number: int) -> tuple[list[str], bytes | None, set[str]]:
    payload = f"of {dist.get_rank()} in {number}"
    meeting.begin(number)
    dist.barrier()
    try:
        protocol.save(root, payload.encode(), name=str(number))
    except CheckpointExistsError:
        payload = "told at once" if meeting.has_met else "told before"
    told = gathered(payload)
    return told, protocol.load(root, str(number)), leftovers_of(root, str(number))


def describe_told(told: list[str]) -> str:
    by_store = told.count("told at once")
    return f"{by_store} of 3 losers told by the store"


@pytest.mark.timeout(3600)
def test_of_four_savers_at_once_exactly_one_commits(ranks: Ranks, arena: Arena) -> None:
    count, began_at = arena.rounds(in_ci=6), time.monotonic()
    timeout_seconds = 60 + SECONDS_PER_ROUND * count
    by_rank = ranks.run(save_at_once, arena, count, size=4, timeout_seconds=timeout_seconds)
    report(arena, began_at, (describe_told(told) for told, _, _ in by_rank[0]))
    for rounds in by_rank:
        assert len(rounds) == count
        for told, payload, leftovers in rounds:
            (winner,) = [each for each in told if not each.startswith("told")]
            assert (payload, leftovers) == (winner.encode(), set())


# --- one object, many connections ---------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_of_many_connections_that_create_one_object_exactly_one_wins(arena: Arena, transport: str) -> None:
    racers = 4 if arena.is_slow else 32
    rounds, began_at = arena.rounds(in_ci=6), time.monotonic()
    place = {**arena.access, "transport": None if arena.kind == "local disk" else transport}
    store = open_store(arena.root, **place)
    start = Barrier(racers)

    def create(key: str, number: int) -> bytes | None:
        data = b"racer %d " % number * 100
        start.wait()
        try:
            store.create(key, data)
        except ObjectExistsError:
            return None
        return data

    winners = collections.Counter[int]()
    with ThreadPoolExecutor(racers) as pool:
        for key in (f"race/{number}" for number in range(rounds)):
            created = list(pool.map(create, [key] * racers, range(racers)))
            won = [data for data in created if data is not None]
            assert won == [store.read(key)]
            winners[created.index(won[0])] += 1
    print(f"{len(winners)} of {racers} connections won at least once")
    report(arena, began_at, ["one winner"] * rounds)


# --- retention beside saves, loads and copies ---------------------------------------------------------

GONE = (CheckpointNotFoundError, CheckpointChangedError)
"""What a reader may meet where retention was faster."""
PIN = 2
"""The last of three ways to keep a checkpoint."""


def work_beside_retention(arena: Arena, last: int) -> collections.Counter[str]:
    """Run on four ranks, each alone: one saves, one prunes, one loads, one keeps; until the last step."""
    groups = [dist.new_group([rank]) for rank in range(4)]
    work = [save_steps, prune_steps, load_steps, keep_steps][dist.get_rank()]
    return work(arena, last, groups[dist.get_rank()])


def save_steps(arena: Arena, last: int, group: Any) -> collections.Counter[str]:
    seen = collections.Counter[str]()
    for number in range(last + 1):
        model = model_of(number)
        url = f"{arena.root}/{number}"
        save_checkpoint(url, iteration=number, model=model, process_group=group, **arena.access)
        seen["saved"] += 1
    return seen


def prune_steps(arena: Arena, last: int, group: Any) -> collections.Counter[str]:
    """Keep two, by the function and by a directory's policy in turn."""
    seen = collections.Counter[str]()
    directory = CheckpointDirectory(arena.root, policy=KeepLast(2), **arena.access)
    for turn, _ in enumerate(until_committed(arena, last)):
        before = set(steps_in(arena))
        if turn % 2:
            keep_last_n_checkpoints(arena.root, 2, **arena.access)
        else:
            assert directory.prune().failures == ()
        after = steps_in(arena)
        deleted = before - set(after)
        assert not [step for step in deleted if step > after[-2]]
        seen["pruned"] += len(deleted)
    return seen


def load_steps(arena: Arena, last: int, group: Any) -> collections.Counter[str]:
    """Load the newest again and again: it is there until two newer ones are."""
    seen = collections.Counter[str]()
    for step in until_committed(arena, last):
        try:
            values = load_values(arena, step, group)
        except GONE:
            assert steps_in(arena)[-2] > step, f"{step} was among the last two"
            seen["gone before it was loaded"] += 1
        else:
            assert values == {float(step)}
            seen["loaded"] += 1
    return seen


def keep_steps(arena: Arena, last: int, group: Any) -> collections.Counter[str]:
    """Keep the newest again and again, by copies and by pins; what was kept stays, whatever goes."""
    directory = CheckpointDirectory(arena.root, **arena.access)
    ways: list[Callable[[int], object]] = [
        lambda step: keep_checkpoint_copy(f"{arena.root}/{step}", **arena.access),
        directory.keep_copy,
        directory.pin,
    ]
    seen, kept = collections.Counter[str](), dict[str, int]()
    for turn, step in enumerate(until_committed(arena, last)):
        way = turn % len(ways)
        try:
            ways[way](step)
        except GONE:
            assert steps_in(arena)[-2] > step, f"{step} was among the last two"
            seen["gone before it was kept"] += 1
        else:
            kept[str(step) if way == PIN else f"{step}_keep"] = step
            seen["pinned" if way == PIN else "copied"] += 1
    for name, step in kept.items():
        assert load_values(arena, name, group) == {float(step)}
    return seen


def until_committed(arena: Arena, last: int) -> Iterable[int]:
    """Yield the newest step, as soon as there is one, until the last step is there."""
    give_up_at = time.monotonic() + 60 + SECONDS_PER_ROUND * last
    while time.monotonic() < give_up_at:
        path = find_latest_checkpoint(arena.root, **arena.access)
        if path is not None:
            yield int(path.name)
            if int(path.name) == last:
                return
    raise TimeoutError(f"step {last} was not committed in time")


def steps_in(arena: Arena) -> list[int]:
    return [int(path.name) for path in find_all_checkpoints(arena.root, **arena.access)]


def model_of(step: int) -> nn.Module:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(step))
    return model


def load_values(arena: Arena, name: int | str, group: Any) -> set[float]:
    """Return every value of the model that is loaded."""
    model = model_of(-1)
    load_checkpoint(f"{arena.root}/{name}", model=model, process_group=group, **arena.access)
    return {value for parameter in model.parameters() for value in parameter.detach().reshape(-1).tolist()}


@pytest.mark.timeout(3600)
def test_retention_beside_saves_loads_and_copies_takes_nothing_that_anybody_may_need(
    ranks: Ranks, arena: Arena
) -> None:
    count, began_at = 2 * arena.rounds(in_ci=3), time.monotonic()
    timeout_seconds = 90 + SECONDS_PER_ROUND * count
    seen = ranks.run(work_beside_retention, arena, count, size=4, timeout_seconds=timeout_seconds)
    report(arena, began_at, sum(seen, collections.Counter[str]()).elements())
    saved, _, loaded, kept = seen
    assert saved["saved"] == count + 1
    assert loaded["loaded"] > 0
    assert kept["copied"] > 0
    with CheckpointDirectory(arena.root, policy=KeepLast(2), **arena.access) as directory:
        directory.prune()
        steps = [info for info in directory.list() if info.step is not None]
        assert [info.step for info in steps[-2:]] == [count - 1, count]
        assert [info.name for info in steps[:-2] if not info.pinned] == []
        for info in directory.list():
            assert directory.verify(info, read_data=True).is_sound, info.name
