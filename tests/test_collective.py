"""Agreement among real gloo ranks: the same value or the same error on all of them, and no endless wait."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from remote_ckpt.dcp.collective import Group, open_group
from remote_ckpt.dcp.failures import unwrap
from remote_ckpt.errors import (
    CheckpointChangedError,
    ConfigError,
    IntegrityError,
    LoadFailedError,
    RemoteCkptError,
    SaveFailedError,
    StorageFullError,
)

FAR_SECONDS = 30.0


def open_all(process_group: dist.ProcessGroup | None = None, seconds: float = FAR_SECONDS) -> Group:
    return open_group(process_group, timeout_seconds=seconds, failure=SaveFailedError)


def fail_on(*failing: int, error: Exception | None = None) -> str:
    """Return this rank's number as text unless it is to fail."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank in failing:
        raise error or OSError(f"disk of rank {rank}")
    return f"result {rank}"


class NotPicklableError(RemoteCkptError):
    """Holds what cannot cross ranks."""


# --- one process --------------------------------------------------------------------------------


def test_without_torch_distributed_the_group_is_this_process_alone() -> None:
    group = open_all()
    assert (group.rank, group.world_size, group.is_coordinator, group.process_group) == (0, 1, True, None)
    assert group.agree(lambda: 7) == 7
    assert group.broadcast_from_coordinator(lambda: "value") == "value"


def test_alone_an_error_of_ours_keeps_its_type_and_its_cause() -> None:
    original = IntegrityError("flipped bit", key="a/0.distcp")
    with pytest.raises(IntegrityError, match="flipped bit") as caught:
        open_all().agree(lambda: fail_on(0, error=original))
    assert (caught.value.key, caught.value.rank, caught.value.__cause__) == ("a/0.distcp", 0, original)


def test_alone_a_foreign_error_becomes_the_failure_that_the_group_was_opened_with() -> None:
    with pytest.raises(SaveFailedError, match="rank 0 of 1 failed: OSError: disk of rank 0"):
        open_all().agree(lambda: fail_on(0))


# --- several ranks ------------------------------------------------------------------------------


def agree_and_broadcast() -> tuple[str, str, int]:
    group = open_all()
    return (
        group.agree(lambda: fail_on()),
        group.broadcast_from_coordinator(lambda: fail_on()),
        group.world_size,
    )


def test_ranks_agree_on_success_and_share_what_the_coordinator_made(ranks: Ranks) -> None:
    assert ranks.run(agree_and_broadcast, size=3) == [(f"result {rank}", "result 0", 3) for rank in range(3)]


def agree_with_failures(failing: tuple[int, ...], error: Exception | None) -> None:
    open_all().agree(lambda: fail_on(*failing, error=error))


def test_a_failure_on_one_rank_is_the_same_error_on_every_rank(ranks: Ranks) -> None:
    errors = ranks.errors(agree_with_failures, (1,), StorageFullError("quota", key="x"), size=3)
    assert [type(error) for error in errors] == [StorageFullError] * 3
    assert [str(error) for error in errors] == ["quota [key=x, rank=1]"] * 3


def test_a_foreign_error_names_rank_type_and_message_on_every_rank(ranks: Ranks) -> None:
    errors = ranks.errors(agree_with_failures, (2,), None, size=3)
    assert [str(error) for error in errors] == ["rank 2 of 3 failed: OSError: disk of rank 2"] * 3


def test_of_several_failures_the_lowest_rank_is_named_and_the_others_are_counted(ranks: Ranks) -> None:
    errors = ranks.errors(agree_with_failures, (0, 2), None, size=3)
    assert {str(error) for error in errors} == {
        "rank 0 of 3 failed: OSError: disk of rank 0 (rank 2 failed too)"
    }


def fail_differently() -> None:
    causes = [RuntimeError("foreign"), SaveFailedError("consequence"), IntegrityError("cause")]
    open_all().agree(lambda: fail_on(0, 1, 2, error=causes[dist.get_rank()]))


def test_an_error_of_ours_is_preferred_to_a_consequence_and_to_a_foreign_one(ranks: Ranks) -> None:
    errors = ranks.errors(fail_differently, size=3)
    assert {str(error) for error in errors} == {"cause (rank 0, 1 failed too) [rank=2]"}


def fail_with_what_does_not_pickle() -> None:
    error = NotPicklableError("holds a lock")
    error.lock = open(os.devnull)  # type: ignore[attr-defined]  # noqa: SIM115
    open_all().agree(lambda: fail_on(1, error=error))


def test_an_error_that_does_not_pickle_still_reaches_all_ranks(ranks: Ranks) -> None:
    errors = ranks.errors(fail_with_what_does_not_pickle)
    assert {str(error) for error in errors} == {"rank 1 of 2 failed: NotPicklableError: holds a lock"}


def fail_while_broadcasting() -> None:
    open_all().broadcast_from_coordinator(lambda: fail_on(0))


def test_a_failure_of_the_coordinator_alone_reaches_all_ranks(ranks: Ranks) -> None:
    errors = ranks.errors(fail_while_broadcasting)
    assert {str(error) for error in errors} == {"rank 0 of 2 failed: OSError: disk of rank 0"}


def interrupt_the_coordinator() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    open_all().broadcast_from_coordinator(work)


def test_an_interrupt_of_the_coordinator_alone_is_an_error_on_the_others(ranks: Ranks) -> None:
    first, second = ranks.errors(interrupt_the_coordinator)
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, SaveFailedError)
    assert "KeyboardInterrupt" in str(second)


def interrupt() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt

    open_all().agree(work)


def test_an_interrupt_stays_one_where_it_came_and_is_an_error_elsewhere(ranks: Ranks) -> None:
    first, second = ranks.errors(interrupt)
    assert isinstance(first, SaveFailedError)
    assert "KeyboardInterrupt" in str(first)
    assert isinstance(second, KeyboardInterrupt)


def agree_after_a_failure() -> str:
    group = open_all()
    try:
        group.agree(lambda: fail_on(1))
    except SaveFailedError:
        return group.agree(lambda: fail_on())
    return "no error"


def test_the_group_works_after_a_failure(ranks: Ranks) -> None:
    assert ranks.run(agree_after_a_failure) == ["result 0", "result 1"]


def agree_in_a_subgroup(members: list[int]) -> Any:
    part = dist.new_group(members)
    if dist.get_rank() not in members:
        try:
            open_all(part)
        except ConfigError as error:
            return str(error)
    group = open_all(part)
    return group.rank, group.broadcast_from_coordinator(dist.get_rank), group.world_size


def test_a_subgroup_agrees_without_the_other_ranks(ranks: Ranks) -> None:
    outside, *inside = ranks.run(agree_in_a_subgroup, [1, 2], size=3)
    assert "not part of the process group" in outside
    assert inside == [(0, 1, 2), (1, 1, 2)]


def count_groups() -> tuple[bool, bool, bool]:
    first, again, other = open_all(), open_all(), open_all(seconds=17)
    return (
        first.process_group is again.process_group,
        first.process_group is other.process_group,
        first.process_group is dist.group.WORLD,
    )


def test_our_group_is_made_once_for_each_limit_and_is_not_the_callers(ranks: Ranks) -> None:
    assert ranks.run(count_groups) == [(True, False, False)] * 2


def agree_in_two_lives(folder: str) -> list[str]:
    results = [open_all().agree(lambda: fail_on())]
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=size)
    return [*results, open_all().agree(lambda: fail_on())]


def test_a_new_default_group_in_the_same_process_gets_a_new_group_of_ours(
    ranks: Ranks, tmp_path: Any
) -> None:
    assert ranks.run(agree_in_two_lives, str(tmp_path)) == [["result 0"] * 2, ["result 1"] * 2]


# --- lost ranks ---------------------------------------------------------------------------------


def lose_the_last_rank() -> float:
    group = open_all()
    group.barrier()
    if group.rank == group.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(SaveFailedError, match="lost contact: another rank died"):
        group.barrier()
    return time.monotonic() - began


def test_a_killed_rank_is_noticed_by_all_others_long_before_the_time_limit(ranks: Ranks) -> None:
    *living, killed = ranks.outcomes(lose_the_last_rank, size=4)
    assert isinstance(killed.error, EOFError)
    assert [outcome.error for outcome in living] == [None] * 3
    assert max(outcome.value for outcome in living) < FAR_SECONDS / 2


def stay_away() -> str:
    group = open_all(seconds=0.5)
    if group.rank == 1:
        dist.barrier()  # the caller's group: where this rank is instead
        return "elsewhere"
    try:
        group.barrier()
    except SaveFailedError as error:
        dist.barrier()
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_an_error_after_the_time_limit(ranks: Ranks) -> None:
    waited, elsewhere = ranks.run(stay_away)
    assert "did not answer within 0.5 s" in waited
    assert elsewhere == "elsewhere"


# --- torch's own errors -------------------------------------------------------------------------


def dcp_failure(**failures: Exception) -> CheckpointException:
    wrapped = {int(rank.removeprefix("rank")): _wrap_exception(error) for rank, error in failures.items()}
    return CheckpointException("read", wrapped)


def test_a_dcp_failure_unwraps_to_the_error_of_ours_that_a_rank_met() -> None:
    failure = dcp_failure(rank1=ValueError("foreign"), rank3=IntegrityError("flipped", key="k"))
    error = unwrap(failure, LoadFailedError)
    assert (type(error), error.rank, error.key) == (IntegrityError, 3, "k")
    assert "rank 1 failed too" in str(error)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_in_a_dcp_call_is_the_same_interrupt_where_it_came(interrupt: BaseException) -> None:
    with pytest.raises(type(interrupt)) as caught, open_all().translated():
        raise CheckpointException("write", {0: _wrap_exception(interrupt)})
    assert caught.value is interrupt


def test_an_interrupt_of_another_rank_in_a_dcp_call_is_an_error_here() -> None:
    with pytest.raises(SaveFailedError, match="interrupted by KeyboardInterrupt"), open_all().translated():
        raise CheckpointException("write", {3: _wrap_exception(KeyboardInterrupt())})


def test_a_dcp_failure_keeps_the_rank_that_an_error_names_already() -> None:
    error = unwrap(dcp_failure(rank0=SaveFailedError("upload", rank=2)), SaveFailedError)
    assert error.rank == 2


def test_that_the_checkpoint_changed_is_preferred_since_a_new_load_cures_it() -> None:
    failure = dcp_failure(rank0=IntegrityError("cut"), rank1=CheckpointChangedError("replaced"))
    assert type(unwrap(failure, LoadFailedError)) is CheckpointChangedError


def test_a_dcp_failure_without_an_error_of_ours_names_rank_and_cause() -> None:
    error = unwrap(dcp_failure(rank2=ValueError("odd")), LoadFailedError, world_size=4)
    assert (type(error), str(error)) == (LoadFailedError, "rank 2 of 4 failed: ValueError: odd")
