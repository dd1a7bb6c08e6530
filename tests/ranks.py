"""Real ranks for tests: a pool of processes that run functions as the ranks of a fresh gloo group.

The processes are started once and used again, since importing torch takes seconds. Every run has a
default process group of its own, over as many ranks as it asks for, so that one test's broken group
never meets the next. A rank that hangs prints its stack and is killed, and so are its peers.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "remote_ckpt.training",
    "remote_ckpt.pretrained",
]
"""Imported once, before the ranks are forked off: four times on two cores takes half a minute."""

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """What a rank came to: its result, or the error with its traceback as text."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass
class _Rank:
    process: BaseProcess
    connection: Connection


class Ranks:
    """A pool of rank processes.

    Args:
        folder: Where the rendezvous files go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[int, _Rank] = {}
        self._runs = itertools.count()
        _context.set_forkserver_preload(_PRELOADED)

    def run(
        self, function: Callable[..., Any], *args: Any, size: int = 2, timeout_seconds: float = 60
    ) -> list[Any]:
        """Run ``function(*args)`` on ``size`` ranks and return their results; it must be importable.

        A rank's error is raised here, with its traceback from there.
        """
        outcomes = self.outcomes(function, *args, size=size, timeout_seconds=timeout_seconds)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                raise AssertionError(f"rank {rank} of {size}:\n{outcome.trace}") from outcome.error
        return [outcome.value for outcome in outcomes]

    def errors(
        self, function: Callable[..., Any], *args: Any, size: int = 2, timeout_seconds: float = 60
    ) -> list[BaseException | None]:
        """Run as :meth:`run` does and return each rank's error."""
        outcomes = self.outcomes(function, *args, size=size, timeout_seconds=timeout_seconds)
        return [outcome.error for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, size: int, timeout_seconds: float = 60
    ) -> list[Outcome]:
        """Run on ``size`` ranks and return what each came to; a rank that died has an ``EOFError``."""
        rendezvous = str(self._folder / f"run{next(self._runs)}")
        ranks = [self._rank(number) for number in range(size)]
        for number, rank in enumerate(ranks):
            rank.connection.send((function, args, number, size, rendezvous))
        deadline = time.monotonic() + timeout_seconds
        outcomes = [self._outcome(number, deadline) for number in range(size)]
        for number in set(self._ranks) & set(range(size)):
            self._ranks[number].connection.send("all ranks are done")
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for number in list(self._ranks):
            self._end(number)

    def _rank(self, number: int) -> _Rank:
        if number not in self._ranks:
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks[number] = _Rank(process, ours)
        return self._ranks[number]

    def _outcome(self, number: int, deadline: float) -> Outcome:
        rank = self._ranks[number]
        try:
            if rank.connection.poll(max(0.0, deadline - time.monotonic())):
                outcome: Outcome = rank.connection.recv()
                return outcome
            self._dump_stack(rank)
            error: Exception = TimeoutError(f"rank {number} hangs")
        except (EOFError, ConnectionResetError):
            error = EOFError(f"rank {number} died")
        self._end(number)
        return Outcome(error=error, trace=str(error))

    def _dump_stack(self, rank: _Rank) -> None:
        if rank.process.pid is not None:
            os.kill(rank.process.pid, signal.SIGUSR1)
            rank.process.join(1)

    def _end(self, number: int) -> None:
        rank = self._ranks.pop(number)
        rank.process.kill()
        rank.process.join()
        rank.connection.close()


def _serve(connection: Connection) -> None:
    """Run what the pool sends until it goes away. Runs in a rank's process."""
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, size, rendezvous = connection.recv()
        except EOFError:
            return
        connection.send(_outcome_of(function, args, rank, size, rendezvous))
        connection.recv()  # a rank that tears its group down early would disturb the others
        _end_background_saver()
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_background_saver() -> None:
    """End torch's process for background saves: it has a group with those of the ranks of this run only."""
    saver = sys.modules.get("torch.distributed.checkpoint._async_process_executor")
    if saver is not None:
        saver._CHECKPOINT_PROCESS = None  # type: ignore[attr-defined]


def _outcome_of(
    function: Callable[..., Any], args: Sequence[Any], rank: int, size: int, rendezvous: str
) -> Outcome:
    import torch
    import torch.distributed as dist

    try:
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=30),
        )
        return Outcome(value=function(*args))
    except BaseException as error:
        return Outcome(error=_portable(error), trace=traceback.format_exc())


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
