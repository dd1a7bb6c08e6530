"""Errors that cross ranks, and the one error that a failed operation comes down to."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed.checkpoint.api import CheckpointException

from remote_ckpt.dcp.paths import CheckpointPath
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    LoadFailedError,
    MismatchError,
    RemoteCkptError,
    SaveFailedError,
)
from remote_ckpt.url import parse_location


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong on one rank, in a form that crosses ranks.

    Args:
        rank: The rank within the group.
        error: The error, if it is one of ours and pickles.
        text: Type and message of the error.
        trace: Its formatted traceback.
    """

    rank: int
    error: RemoteCkptError | None
    text: str
    trace: str

    @property
    def precedence(self) -> tuple[int, int]:
        """Sort key: causes before their consequences, then the lowest rank."""
        if isinstance(self.error, CheckpointChangedError):
            return 0, self.rank  # the cure (load again) mends what other ranks ran into as well
        if self.error is None:
            return 3, self.rank
        return (2 if isinstance(self.error, SaveFailedError | LoadFailedError) else 1), self.rank


class RemoteTracebackError(Exception):
    """Cause of an error that happened on another rank; its text is the traceback from there."""


def unwrap(
    exc: CheckpointException, failure: type[RemoteCkptError], *, world_size: int | None = None
) -> RemoteCkptError:
    """Return the one error of ours that a DCP failure comes down to; raise it ``from exc``.

    Args:
        exc: What ``dcp.save`` or ``dcp.load`` raised; the same on every rank.
        failure: Class of the result where no rank met an error of ours.
        world_size: For the message.
    """
    failures = [describe(_told(error), rank) for rank, (error, _) in sorted(exc.failures.items())]
    return chosen(failures, failure, world_size)


def _told(error: BaseException) -> BaseException:
    return error if isinstance(error, Exception) else as_exception(error)


def interrupt_of(exc: CheckpointException, rank: int) -> BaseException | None:
    """Return the ``KeyboardInterrupt`` or ``SystemExit`` that ended the operation on this rank, if one did.

    torch puts it into the ``CheckpointException`` with the failures. Turned into an error of ours it would
    be caught by those who go on after an error.
    """
    error, _ = exc.failures.get(rank, (None, None))
    return None if isinstance(error, Exception) else error


def describe(error: BaseException, rank: int) -> Failure:
    """Return an error in a form that every rank can read, whether or not it pickles."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    portable = error if isinstance(error, RemoteCkptError) and _pickles(error) else None
    return Failure(rank, portable, _text(error), trace)


def _pickles(error: RemoteCkptError) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a field's own reduction raises
        return False
    return True


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def as_exception(error: BaseException) -> Exception:
    """Return what other ranks are told of an interrupt, which must not interrupt them as well."""
    return RuntimeError(f"interrupted by {_text(error)}")


def chosen(
    failures: Sequence[Failure], failure: type[RemoteCkptError], world_size: int | None
) -> RemoteCkptError:
    """Return the error to raise on every rank: of the first cause, saying which other ranks failed."""
    first = min(failures, key=lambda candidate: candidate.precedence)
    others = sorted(candidate.rank for candidate in failures if candidate is not first)
    too = f" (rank {', '.join(map(str, others))} failed too)" if others else ""
    if first.error is None:
        of = f" of {world_size}" if world_size else ""
        return failure(f"rank {first.rank}{of} failed: {first.text}{too}", rank=first.rank)
    error = copy.copy(first.error)
    error.message += too
    error.args = (error.message,)
    if error.rank is None:
        error.rank = first.rank
    return error


@contextmanager
def located(ckpt_dir: CheckpointPath) -> Iterator[None]:
    """Put the checkpoint's URL into errors about it that leave the block without one."""
    try:
        yield
    except (CheckpointError, MismatchError) as error:
        if error.url is None:
            error.url = parse_location(ckpt_dir).url
        raise


def cause_of(failures: Sequence[Failure], own: Exception | None, rank: int) -> Exception:
    """Return what the chosen error is raised from: the original where it happened, else its traceback."""
    first = min(failures, key=lambda candidate: candidate.precedence)
    if own is not None and first.rank == rank:
        return own
    return RemoteTracebackError(f"on rank {first.rank}:\n{first.trace}")
