"""Several ranks save and load on a real server, through both transports: the seed's functions end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from test_training_ranks import FAR, Trouble, begin, step, whole
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from remote_ckpt import (
    CheckpointExistsError,
    CommitUnknownError,
    SaveFailedError,
    find_all_checkpoints,
    find_latest_checkpoint,
    keep_checkpoint_copy,
    keep_last_n_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from remote_ckpt.testing.s3_contract import FreshRoot
from remote_ckpt.testing.servers import LocalServer

pytestmark = [pytest.mark.ranks, pytest.mark.server]


@dataclass(frozen=True)
class Run:
    """A run's directory on the server."""

    root: str
    storage_options: dict[str, Any]
    transport: str

    @property
    def access(self) -> dict[str, Any]:
        return {"storage_options": self.storage_options, "transport": self.transport, "options": FAR}

    def path(self, name: int | str) -> str:
        return f"{self.root}/{name}"


@pytest.fixture(params=["obstore", "fsspec"])
def run(request: pytest.FixtureRequest, real_server: LocalServer, fresh_root: FreshRoot) -> Run:
    return Run(fresh_root(real_server), real_server.storage_options(), request.param)


def train_and_save(run: Run, number: int, kind: str, **others: Any) -> dict[str, bytes]:
    model, optimizer = begin(kind, seed=0)
    for one in range(number + 1):
        step(model, optimizer, one)
    save_checkpoint(
        run.path(number), iteration=number, model=model, optimizer=optimizer, **others, **run.access
    )
    return whole(model, optimizer)


def load_anew(run: Run, number: int, kind: str) -> tuple[int | None, dict[str, bytes]]:
    model, optimizer = begin(kind, seed=1)
    iteration = load_checkpoint(run.path(number), model=model, optimizer=optimizer, **run.access)
    return iteration, whole(model, optimizer)


@pytest.mark.parametrize(
    ("saved_as", "saved_on", "loaded_as", "loaded_on"),
    [("fsdp2", 4, "fsdp2", 3), ("hsdp", 4, "two ways", 4)],
)
def test_what_was_saved_comes_back_bit_for_bit_on_other_ranks(
    ranks: Ranks, run: Run, saved_as: str, saved_on: int, loaded_as: str, loaded_on: int
) -> None:
    saved = ranks.run(train_and_save, run, 2, saved_as, size=saved_on)[0]
    for iteration, loaded in ranks.run(load_anew, run, 2, loaded_as, size=loaded_on):
        assert (iteration, loaded) == (2, saved)


def live_with_it(run: Run) -> dict[int, dict[str, bytes]]:
    """Run on all ranks: save three steps, then the second one anew."""
    return {number: train_and_save(run, number, "fsdp2") for number in (0, 1, 2, 1)}


def test_a_run_replaces_keeps_finds_and_deletes_checkpoints(ranks: Ranks, run: Run) -> None:
    states = ranks.run(live_with_it, run)[0]
    latest = find_latest_checkpoint(run.root, **run.access)
    assert latest is not None
    assert latest.name == "2"
    assert keep_checkpoint_copy(run.path(1), **run.access).name == "1_keep"
    keep_last_n_checkpoints(run.root, 1, **run.access)
    # The one committed last stays, too, if the store's clock, which counts seconds, tells the two apart.
    found = [path.name for path in find_all_checkpoints(run.root, **run.access)]
    assert found in (["1", "2"], ["2"])
    assert ranks.run(load_anew, run, 2, "fsdp2", size=3)[0] == (2, states[2])
    assert ranks.run(load_copy, run, size=2) == [1, 1]


def load_copy(run: Run) -> int | None:
    model, optimizer = begin("fsdp2", seed=1)
    return load_checkpoint(run.path("1_keep"), model=model, optimizer=optimizer, **run.access)


def test_stock_torch_reads_it_through_its_own_reader(ranks: Ranks, run: Run) -> None:
    ranks.run(train_and_save, run, 1, "fsdp2")
    assert ranks.run(differs_from_stock, run, size=1) == [[]]


def differs_from_stock(run: Run) -> list[str]:
    """Return the names of the parameters that torch's reader and ours do not agree about."""
    model, _ = begin("plain", seed=1)
    load_checkpoint(run.path(1), model=model, **run.access)
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, storage_reader=FsspecReader(run.path(1), **run.storage_options), no_dist=True)
    return [
        name for name, value in model.state_dict().items() if not torch.equal(value, state["model"][name])
    ]


def save_with_trouble(run: Run, phase: str, overwrite: bool = True) -> None:
    model, optimizer = begin("fsdp2", seed=1)
    state = {f"rank{dist.get_rank()}": Trouble(phase, (1,)).state_dict()}
    save_checkpoint(
        run.path(2),
        iteration=9,
        model=model,
        optimizer=optimizer,
        overwrite=overwrite,
        trouble=state,
        **run.access,
    )


def test_a_rank_that_fails_is_one_error_on_all_and_what_was_there_stays(ranks: Ranks, run: Run) -> None:
    saved = ranks.run(train_and_save, run, 2, "fsdp2", size=3)[0]
    errors = ranks.errors(save_with_trouble, run, "write", size=3)
    assert [type(error) for error in errors] == [SaveFailedError] * 3
    assert len({str(error) for error in errors}) == 1
    assert ranks.run(load_anew, run, 2, "fsdp2", size=2)[0] == (2, saved)
    assert ranks.run(train_and_save, run, 2, "fsdp2", size=3)[0] == saved


def test_a_rank_killed_in_its_upload_leaves_the_others_in_doubt_and_the_old_checkpoint_whole(
    ranks: Ranks, run: Run
) -> None:
    saved = ranks.run(train_and_save, run, 2, "fsdp2", size=3)[0]
    first, killed, last = ranks.errors(save_with_trouble, run, "die", size=3)
    assert isinstance(killed, EOFError)
    for error in (first, last):
        assert isinstance(error, CommitUnknownError)
        assert "another rank died" in str(error)
    assert ranks.run(load_anew, run, 2, "fsdp2", size=2)[0] == (2, saved)


def test_a_second_save_of_a_name_is_refused_on_every_rank_without_overwrite(ranks: Ranks, run: Run) -> None:
    saved = ranks.run(train_and_save, run, 2, "fsdp2")[0]
    errors = ranks.errors(save_with_trouble, run, "none", False)
    assert [type(error) for error in errors] == [CheckpointExistsError] * 2
    assert ranks.run(load_anew, run, 2, "fsdp2")[0] == (2, saved)
