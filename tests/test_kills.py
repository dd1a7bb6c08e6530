"""Real ranks get a real SIGKILL at named points of a save and of a deletion: what is there then.

Each test fills a directory, kills ranks of the next save (or of its retention) at one point, and looks at
what is left from outside: every checkpoint is whole, and the one that was saved is the old one or, where its
manifest was created, the new one. Then fresh ranks save again, and a sweep leaves only what is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from killing import ALL, Kill, Run, keep_last, load, save
from ranks import Ranks
from sweeping import swept

from remote_ckpt import CommitUnknownError
from remote_ckpt.testing.servers import LocalServer

pytestmark = pytest.mark.ranks
OLD, NEW, NEXT = 10, 11, 12

KILLS: dict[str, tuple[Kill, int]] = {
    "the coordinator after some data objects": (Kill("write_stream", "d-", is_done=True), OLD),
    "another after some data objects": (Kill("write_stream", "d-", is_done=True, by=1, victim=1), OLD),
    "all after some data objects": (Kill("write_stream", "d-", is_done=True, victim=ALL), OLD),
    "the coordinator after all data objects": (Kill("write", "index."), OLD),
    "another after all data objects": (Kill("write", "index.", victim=1), NEW),
    "all after all data objects": (Kill("write", "index.", victim=ALL), OLD),
    "the coordinator before the manifest": (Kill("create", "manifest."), OLD),
    "another before the manifest": (Kill("create", "manifest.", victim=1), NEW),
    "all before the manifest": (Kill("create", "manifest.", victim=ALL), OLD),
    "the coordinator after the manifest": (Kill("create", "manifest.", is_done=True), NEW),
    "all after the manifest": (Kill("create", "manifest.", is_done=True, victim=ALL), NEW),
    "the coordinator within the deletions": (Kill("delete"), NEW),
    "all within the deletions": (Kill("delete", victim=ALL), NEW),
}
"""Who is killed where, and which save is the checkpoint then: the coordinator commits without the others."""
SOME = [
    "another after some data objects",
    "all before the manifest",
    "the coordinator after the manifest",
    "the coordinator within the deletions",
]


@pytest.fixture
def local(tmp_path: Path) -> Run:
    return Run(str(tmp_path / "run"))


@pytest.fixture
def bucket(real_server: LocalServer, fresh_root: Callable[[LocalServer], str]) -> Run:
    return Run(fresh_root(real_server), real_server.storage_options())


# --- saves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "who"), [*((4, who) for who in KILLS), *((2, who) for who in SOME)])
def test_a_save_on_a_disk_in_which_ranks_are_killed(ranks: Ranks, local: Run, size: int, who: str) -> None:
    check_killed_save(ranks, local, size, *KILLS[who])


@pytest.mark.server
@pytest.mark.parametrize(("size", "who"), [*((2, who) for who in KILLS), *((4, who) for who in SOME)])
def test_a_save_to_a_bucket_in_which_ranks_are_killed(ranks: Ranks, bucket: Run, size: int, who: str) -> None:
    check_killed_save(ranks, bucket, size, *KILLS[who])


def check_killed_save(ranks: Ranks, run: Run, size: int, kill: Kill, number: int) -> None:
    """Replace a checkpoint, beside an older one, with ranks that are killed; look, and go on."""
    ranks.run(save, run, ["5", "10"], [5, OLD], size=size)
    errors = ranks.errors(save, run, ["10"], [NEW], kill, size=size)
    check_errors(errors, kill, is_committed=number == NEW)
    check_is_there(run, {"5": 5, "10": number})
    if kill.victim == ALL:  # else the next save comes first
        check_swept(run, {"5": 5, "10": number})
    ranks.run(save, run, ["10"], [NEXT], size=size)
    check_is_there(run, {"5": 5, "10": NEXT})
    check_swept(run, {"5": 5, "10": NEXT})


def test_the_first_save_of_a_run_in_which_all_ranks_are_killed_leaves_no_checkpoint(
    ranks: Ranks, local: Run
) -> None:
    kill = Kill("create", "manifest.", victim=ALL)
    check_errors(ranks.errors(save, local, ["10"], [NEW], kill), kill)
    check_is_there(local, {})
    ranks.run(save, local, ["10"], [NEXT])
    check_is_there(local, {"10": NEXT})
    check_swept(local, {"10": NEXT})


# --- retention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_a_retention_on_a_disk_in_which_ranks_are_killed(ranks: Ranks, local: Run, size: int) -> None:
    check_killed_retention(ranks, local, size)


@pytest.mark.server
@pytest.mark.parametrize("size", [2, 4])
def test_a_retention_in_a_bucket_in_which_ranks_are_killed(ranks: Ranks, bucket: Run, size: int) -> None:
    check_killed_retention(ranks, bucket, size)


def check_killed_retention(ranks: Ranks, run: Run, size: int) -> None:
    """Keep the last one of four, with ranks that are killed in the middle of the first deletion."""
    steps = {"3": 3, "4": 4, "5": 5, "10": OLD}
    ranks.run(save, run, list(steps), list(steps.values()), size=size)
    kill = Kill("delete", victim=ALL)
    check_errors(ranks.errors(keep_last, run, 1, kill, size=size), kill)
    left = dict(list(steps.items())[1:])
    check_is_there(run, left)
    ranks.run(keep_last, run, 1, size=size)
    # The one committed last stays, too: a store that counts whole seconds may not tell which that is.
    left = {name: steps[name] for name in listed(run) if name in ("5", "10")}
    check_is_there(run, left)
    ranks.run(save, run, ["3"], [NEXT], size=size)
    check_is_there(run, {**left, "3": NEXT})
    check_swept(run, {**left, "3": NEXT})


# --- looking -----------------------------------------------------------------------------------------


def check_errors(errors: Sequence[BaseException | None], kill: Kill, *, is_committed: bool = False) -> None:
    """The victims died of it, and the others are told that the outcome is unknown.

    Where it is committed, a rank that the coordinator's word reached before the death did may be told so.
    """
    for rank, error in enumerate(errors):
        if is_committed and error is None and rank != kill.by:
            continue
        is_victim = kill.victim in (rank, ALL)
        assert isinstance(error, EOFError if is_victim else CommitUnknownError), f"rank {rank}: {error!r}"


def listed(run: Run) -> set[str]:
    with run.directory() as directory:
        return {info.name for info in directory.list()}


def check_is_there(run: Run, numbers: Mapping[str, int]) -> None:
    """There are just these checkpoints, each one whole save; the latest is the highest."""
    assert listed(run) == numbers.keys()
    assert run.latest() == max(numbers, key=int, default=None)
    with run.directory() as directory:
        for name, number in numbers.items():
            report = directory.verify(name, read_data=True)
            assert report.is_sound, f"{name}: {report.problems}"
            assert load(run, name) == number


def check_swept(run: Run, numbers: Mapping[str, int]) -> None:
    """A sweep two days later leaves nothing but these checkpoints."""
    with closing(run.open()) as root:
        swept(root, tombstones=True)
        assert not list(root.list_leftovers())
    usage = run.directory().usage()
    assert (usage.leftover_bytes, usage.remains, usage.other_count) == (0, (), 0)
    check_is_there(run, numbers)
