"""Finding, keeping and cleaning up: the seed's functions, its faults, and what retention never deletes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

from remote_ckpt import (
    AccessDeniedError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CheckpointRetentionPolicy,
    CommitOptions,
    ConfigError,
    Options,
    RemoteCkptError,
    cleanup_checkpoint,
    find_all_checkpoints,
    find_latest_checkpoint,
    keep_checkpoint_copy,
    keep_last_n_checkpoints,
    load_checkpoint,
    place,
    pruning,
    resumed,
    save_checkpoint,
)
from remote_ckpt.changes import set_pinned
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.discover import CheckpointEntry, find_checkpoints
from remote_ckpt.errors import StoreUnavailableError
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.testing.faults import FaultStore, StoreCall

_numbers = itertools.count()
HASTY = Options(commit=CommitOptions(commit_seconds=0.05))
"""Gives up on a generation that cannot be created almost at once."""


@pytest.fixture(params=["memory", "local"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A run's directory that no other test uses, in a process that has resumed from nothing."""
    resumed.forget_all()
    yield f"memory://upkeep-{next(_numbers)}/run" if request.param == "memory" else str(tmp_path / "run")
    resumed.forget_all()


def save(run: str, *names: int | str, value: float = 0.0) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    for name in names:
        save_checkpoint(f"{run}/{name}", iteration=name, model=model)


def value_of(path: object) -> float:
    model = nn.Linear(1, 1, bias=False)
    load_checkpoint(path, model=model)  # type: ignore[arg-type]
    return model.weight.item()


def names_in(run: str) -> list[str]:
    return [entry.name for entry in find_checkpoints(open_store(run))]


def pin(run: str, name: str) -> None:
    set_pinned(open_store(run).scope(name), True)


# --- finding ------------------------------------------------------------------------------------


def test_br_15_steps_are_sorted_by_number_not_as_text(run: str) -> None:
    save(run, 10000, 500, 9000, 2500)
    assert [int(path.name) for path in find_all_checkpoints(run)] == [500, 2500, 9000, 10000]
    latest = find_latest_checkpoint(run)
    assert latest is not None
    assert latest.name == "10000"
    assert (latest.parent / "500").name == "500"


def test_in_an_empty_or_missing_directory_there_is_none(run: str) -> None:
    assert find_all_checkpoints(run) == []
    assert find_latest_checkpoint(run) is None


def test_names_that_only_int_takes_for_numbers_are_no_steps(run: str) -> None:
    save(run, 5, "1_000", "007", "5_keep", "best")
    assert [path.name for path in find_all_checkpoints(run)] == ["5"]
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["5", "007", "1_000", "5_keep", "best"]


def test_local_paths_come_back_as_path_objects(tmp_path: Path) -> None:
    save(str(tmp_path), 3)
    assert find_all_checkpoints(tmp_path) == [tmp_path / "3"]
    assert type(find_latest_checkpoint(tmp_path)) is type(tmp_path)


def test_a_plain_folder_of_an_evaluation_counts_and_is_kept_or_deleted_like_the_others(
    tmp_path: Path,
) -> None:
    for name in ("1", "2", "best"):
        (tmp_path / name).mkdir()
        torch.save({"model": {}}, tmp_path / name / "checkpoint.pth")
    (tmp_path / "3").mkdir()  # without a checkpoint in it
    assert [path.name for path in find_all_checkpoints(tmp_path)] == ["1", "2"]
    keep_last_n_checkpoints(tmp_path, 1)
    assert names_in(str(tmp_path)) == ["2", "best"]


# --- keeping the last ---------------------------------------------------------------------------


def test_the_last_n_stay_and_named_ones_too(run: str) -> None:
    save(run, 1, 2, 3, "best")
    keep_last_n_checkpoints(run, 2)
    assert names_in(run) == ["2", "3", "best"]


@pytest.mark.parametrize("n", [-1, None, 10])
def test_br_22_minus_one_and_none_keep_all(run: str, n: int | None) -> None:
    save(run, 1, 2, 3)
    keep_last_n_checkpoints(run, n)
    assert names_in(run) == ["1", "2", "3"]


@pytest.mark.parametrize("n", [0, -2, 1.5, True])
def test_br_22_to_keep_the_last_none_is_an_error(run: str, n: Any) -> None:
    save(run, 1)
    with pytest.raises(ConfigError, match=f"cannot keep the last {n}"):
        keep_last_n_checkpoints(run, n)
    assert names_in(run) == ["1"]


def test_br_23_the_checkpoint_committed_last_survives_older_ones_with_higher_steps(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 500, 600, 700, 100)
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["100", "700"]
    assert "checkpoint 100 was committed last" in caplog.text


def test_what_the_run_resumed_from_stays_until_it_has_committed_a_newer_one(run: str) -> None:
    save(run, 1, 2, 3)
    value_of(f"{run}/1")
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["1", "3"]
    save(run, 4)
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["4"]


def test_a_named_checkpoint_saved_since_does_not_free_what_the_run_resumed_from(run: str) -> None:
    save(run, 1, 2, 3)
    value_of(f"{run}/1")
    save(run, "best")
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["1", "3", "best"]


def test_everything_that_the_run_has_read_stays(run: str) -> None:
    save(run, 1, 2, 3, 4)
    for name in (1, 2):
        value_of(f"{run}/{name}")
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["1", "2", "4"]


@pytest.mark.parametrize(("read_in", "kept_in"), [("link", "real"), ("real", "link")])
def test_what_the_run_resumed_from_is_the_same_by_every_path(
    tmp_path: Path, read_in: str, kept_in: str
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(f"{tmp_path}/real", 1, 2, 3)
    resumed.forget_all()
    value_of(tmp_path / read_in / "1")
    keep_last_n_checkpoints(tmp_path / kept_in, 1)
    assert names_in(f"{tmp_path}/real") == ["1", "3"]
    save(f"{tmp_path}/{read_in}", 4)
    keep_last_n_checkpoints(tmp_path / kept_in, 1)
    assert names_in(f"{tmp_path}/real") == ["4"]


def test_so_it_is_by_a_link_to_the_checkpoint_itself(tmp_path: Path) -> None:
    save(str(tmp_path), 1, 2, 3)
    (tmp_path / "latest").symlink_to(tmp_path / "1")
    value_of(tmp_path / "latest")
    keep_last_n_checkpoints(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3", "latest"]
    resumed.forget_all()


def test_br_21_the_run_that_was_resumed_from_is_not_touched(run: str) -> None:
    save(f"{run}A", 10)
    value_of(f"{run}A/10")
    for step in (11, 12, 13):
        save(f"{run}B", step)
        keep_last_n_checkpoints(f"{run}B", 1)
    assert (names_in(f"{run}A"), names_in(f"{run}B")) == (["10"], ["13"])


def test_a_pinned_checkpoint_stays(run: str) -> None:
    save(run, 1, 2, 3)
    pin(run, "1")
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["1", "3"]


def test_br_26_what_is_not_a_checkpoint_is_not_touched(tmp_path: Path) -> None:
    save(str(tmp_path), 10, 20)
    for stranger in ("15", "20-backup", "mystep-5", "notes"):
        (tmp_path / stranger).mkdir()
        (tmp_path / stranger / "data").write_text("precious")
    keep_last_n_checkpoints(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["15", "20", "20-backup", "mystep-5", "notes"]


def test_a_checkpoint_that_cannot_be_deleted_is_logged_and_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(str(tmp_path), 1, 2, 3)
    (tmp_path / "1" / "manifest.000002.json").mkdir()  # no tombstone can be created where a folder is
    keep_last_n_checkpoints(tmp_path, 1, options=HASTY)
    assert names_in(str(tmp_path)) == ["1", "3"]
    assert "cannot delete 1" in caplog.text


def test_those_whose_fate_stays_unknown_do_not_hold_up_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options allow 300 s for each."""
    monkeypatch.setattr(pruning, "_UNDECIDED_SECONDS", 0.01)
    save(str(tmp_path), 1, 2, 3, 4, 5)

    def no_answer(store: LocalStore, key: str, data: bytes) -> None:
        raise StoreUnavailableError("no answer", url=store.url, key=key)

    monkeypatch.setattr(LocalStore, "create", no_answer)
    keep_last_n_checkpoints(tmp_path, 1)
    assert names_in(str(tmp_path)) == ["1", "2", "3", "4", "5"]
    assert "cannot delete 3" in caplog.text
    assert "4 stays: the store leaves deletions undecided: left to the next time" in caplog.text


def test_a_save_that_is_about_to_replace_a_step_is_not_disturbed(run: str) -> None:
    save(run, 1, 2, 3)
    with closing(open_store(run)) as root, closing(root.scope("1")) as checkpoint:
        checkpoint.write("d-0123456789abcdef/0.distcp", b"a save in progress")
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["1", "3"]


@pytest.mark.parametrize("policy", [None, CheckpointRetentionPolicy.NONE])
def test_a_newer_life_of_a_name_is_not_what_was_planned(
    run: str, policy: CheckpointRetentionPolicy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between plan and deletion another job deletes the step and saves it anew."""
    save(run, 1, 2, value=1.0)

    def plan_and_then_another_life(root: Store) -> list[CheckpointEntry]:
        entries = find_checkpoints(root)
        with closing(root.scope("1")) as checkpoint:
            delete_checkpoint(checkpoint)
        save(run, 1, value=7.0)
        return entries

    monkeypatch.setattr(pruning, "find_checkpoints", plan_and_then_another_life)
    if policy is None:
        keep_last_n_checkpoints(run, 1)
    else:
        cleanup_checkpoint(run, policy)
    assert value_of(f"{run}/1") == 7.0


def test_a_folder_that_may_not_be_read_and_is_no_step_disturbs_nothing(
    run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 1, 2)
    with closing(open_store(run)) as root:
        root.write("logs/events", b"x")

    def deny(call: StoreCall) -> None:
        if call.url.endswith("/logs"):
            raise AccessDeniedError("403")

    monkeypatch.setattr(
        place, "open_store", lambda *args, **options: FaultStore(open_store(*args, **options), before=deny)
    )
    assert [path.name for path in find_all_checkpoints(run)] == ["1", "2"]
    keep_last_n_checkpoints(run, 1)
    cleanup_checkpoint(run, CheckpointRetentionPolicy.NONE)
    assert names_in(run) == []
    assert "passing over logs" in caplog.text


def test_br_24_all_ranks_may_keep_the_last_at_once(ranks: Ranks, tmp_path: Path) -> None:
    save(str(tmp_path), 1, 2, 3, 4, 5)
    ranks.run(keep_last_n_checkpoints, str(tmp_path), 2, size=4)
    assert names_in(str(tmp_path)) == ["4", "5"]


# --- copies -------------------------------------------------------------------------------------


def test_a_kept_copy_is_a_checkpoint_that_outlives_its_source(run: str) -> None:
    save(run, 1, value=1.5)
    copy = keep_checkpoint_copy(f"{run}/1")
    assert copy.name == "1_keep"
    save(run, 2, 3)
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["3", "1_keep"]
    assert value_of(copy) == 1.5


def test_a_kept_copy_is_replaced_by_a_later_one(run: str) -> None:
    save(run, 1, value=1.5)
    keep_checkpoint_copy(f"{run}/1")
    save(run, 1, value=2.5)
    assert value_of(keep_checkpoint_copy(f"{run}/1")) == 2.5
    assert names_in(run) == ["1", "1_keep"]


def test_a_kept_copy_on_a_local_disk_shares_the_bytes(tmp_path: Path) -> None:
    save(str(tmp_path), 1)
    keep_checkpoint_copy(tmp_path / "1")
    inodes = {
        folder: {os.stat(path).st_ino for path in (tmp_path / folder).rglob("*.distcp")}
        for folder in ("1", "1_keep")
    }
    assert inodes["1"] == inodes["1_keep"] != set()


def test_a_checkpoint_without_a_manifest_is_kept_as_it_is(run: str) -> None:
    with closing(open_store(run)) as root:
        root.write("1/checkpoint.pth", b"plain")
        assert keep_checkpoint_copy(f"{run}/1").name == "1_keep"
        root.write("1/checkpoint.pth", b"newer")
        assert root.read("1_keep/checkpoint.pth") == b"plain"
        keep_checkpoint_copy(f"{run}/1")
        assert root.read("1_keep/checkpoint.pth") == b"newer"


def test_a_copy_of_what_is_not_there_is_an_error(run: str) -> None:
    with pytest.raises(CheckpointNotFoundError):
        keep_checkpoint_copy(f"{run}/404")


def test_a_pinned_copy_is_not_replaced(run: str) -> None:
    save(run, 1)
    keep_checkpoint_copy(f"{run}/1")
    pin(run, "1_keep")
    save(run, 1)
    with pytest.raises(CheckpointPinnedError):
        keep_checkpoint_copy(f"{run}/1")


# --- the end of a run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (CheckpointRetentionPolicy.ALL, ["1", "2", "best", "final"]),
        (CheckpointRetentionPolicy.BEST, ["best"]),
        (CheckpointRetentionPolicy.LAST, ["final"]),
        (CheckpointRetentionPolicy.LAST_AND_BEST, ["best", "final"]),
        (CheckpointRetentionPolicy.NONE, []),
    ],
)
def test_a_cleanup_keeps_what_its_policy_names(
    run: str, policy: CheckpointRetentionPolicy, kept: list[str]
) -> None:
    save(run, 1, 2, "best", "final")
    cleanup_checkpoint(run, policy)
    assert names_in(run) == kept


def test_a_cleanup_of_a_missing_directory_does_nothing(run: str) -> None:
    cleanup_checkpoint(run, CheckpointRetentionPolicy.NONE)
    assert names_in(run) == []


def test_a_cleanup_binds_itself_to_pins_alone(run: str) -> None:
    save(run, 1, 2)
    value_of(f"{run}/1")
    pin(run, "2")
    cleanup_checkpoint(run, CheckpointRetentionPolicy.NONE)
    assert names_in(run) == ["2"]


def test_a_cleanup_that_could_not_delete_says_so_after_deleting_the_rest(tmp_path: Path) -> None:
    save(str(tmp_path), 1, 2)
    (tmp_path / "1" / "manifest.000002.json").mkdir()
    with pytest.raises(RemoteCkptError, match="manifest"):
        cleanup_checkpoint(tmp_path, CheckpointRetentionPolicy.NONE, options=HASTY)
    assert names_in(str(tmp_path)) == ["1"]
