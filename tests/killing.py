"""What the tests of killed ranks work with: saves and deletions in which ranks get a SIGKILL at some point.

The functions here run on ranks. One rank carries the kill: when its own store comes to the point, it kills
the victims, itself last, so that nobody gets to do anything after that point.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from remote_ckpt import (
    CheckpointDirectory,
    CommitOptions,
    Options,
    TransferOptions,
    find_latest_checkpoint,
    keep_last_n_checkpoints,
    load_checkpoint,
    place,
    save_checkpoint,
)
from remote_ckpt.dcp import writer
from remote_ckpt.place import place_of
from remote_ckpt.store import open_store
from remote_ckpt.store.base import DeleteFailure, Store
from remote_ckpt.store.wrappers import DelegatingStore

T = TypeVar("T")
ALL = -1
"""Every rank is a victim."""


def _options() -> Options:
    """One data object for each tensor, one after the other: as many as a large checkpoint has."""
    transfer = TransferOptions(concurrency=1)
    object.__setattr__(transfer, "max_object_bytes", 1)  # below what is accepted: else it takes gigabytes
    return Options(transfer=transfer, commit=CommitOptions(collective_seconds=40))


OPTIONS = _options()


@dataclass(frozen=True)
class Run:
    """A run's directory."""

    root: str
    storage_options: dict[str, Any] = field(default_factory=dict)

    @property
    def access(self) -> dict[str, Any]:
        return {"storage_options": self.storage_options, "options": OPTIONS}

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def directory(self) -> CheckpointDirectory:
        """A fresh object, as another process would have it."""
        return CheckpointDirectory(self.root, **self.access)

    def open(self) -> Store:
        """The bare store."""
        return place_of(self.root, **self.access).open()

    def latest(self) -> str | None:
        """The name of the latest checkpoint."""
        latest = find_latest_checkpoint(self.root, **self.access)
        return None if latest is None else latest.name


# --- points ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """Which ranks are killed, and when.

    Args:
        operation: At which call of its store.
        key: How the call's key begins.
        is_done: Just after the call, not before it. A deletion is cut in its middle instead.
        by: The rank that comes to that point and kills.
        victim: The rank that is killed, or ALL.
    """

    operation: str
    key: str = ""
    is_done: bool = False
    by: int = 0
    victim: int = 0

    def strike(self, pids: Sequence[int]) -> None:
        """Kill, on the rank that is to do it."""
        victims = range(len(pids)) if self.victim == ALL else [self.victim]
        for rank in sorted(victims, key=lambda rank: rank == self.by):
            os.kill(pids[rank], signal.SIGKILL)


class _Killing(DelegatingStore):
    """A store at whose calls ranks are killed."""

    def __init__(self, inner: Store, kill: Kill, strike: Callable[[], None]) -> None:
        super().__init__(inner)
        self._kill = kill
        self._strike = strike

    def _wrap(self, inner: Store) -> Store:
        return _Killing(inner, self._kill, self._strike)

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        is_here = operation == self._kill.operation and (key or "").startswith(self._kill.key)
        if is_here and not self._kill.is_done:
            self._strike()
        result = call()
        if is_here and self._kill.is_done:
            self._strike()
        return result

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        if self._kill.operation != "delete" or len(keys) < 2:
            return self.inner.delete(keys)
        failures = self.inner.delete(keys[: len(keys) // 2])
        self._strike()
        return [*failures, *self.inner.delete(keys[len(keys) // 2 :])]

    def remove_folder(self) -> bool:
        if self._kill.operation != "delete":
            return self.inner.remove_folder()
        count, unlink = itertools.count(1), os.unlink

        def unlink_and_strike(*args: Any, **named: Any) -> None:
            unlink(*args, **named)
            if next(count) == 2:
                self._strike()

        with mock.patch.object(os, "unlink", unlink_and_strike):
            return self.inner.remove_folder()


@contextmanager
def killing(kill: Kill | None) -> Iterator[None]:
    """Let ranks be killed at a point of what this rank does. All ranks call this."""
    if kill is None:
        yield
        return
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() != kill.by:
        yield
        return
    struck: list[bool] = []

    def strike() -> None:
        if not struck:
            struck.append(True)
            kill.strike(pids)

    def open_killing(*args: Any, **named: Any) -> Store:
        return _Killing(open_store(*args, **named), kill, strike)

    with (
        mock.patch.object(writer, "open_store", open_killing),
        mock.patch.object(place, "open_store", open_killing),
    ):
        yield
    assert struck, f"nothing came to {kill}"


# --- what ranks do -----------------------------------------------------------------------------------


def model_of(number: int) -> nn.Module:
    """A model whose values follow from a number."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def save(run: Run, names: Sequence[str], numbers: Sequence[int], kill: Kill | None = None) -> None:
    """Save checkpoints one after the other, with all ranks; the kill is in the last of them."""
    for name, number in zip(names, numbers, strict=True):
        model = model_of(number)
        fully_shard(model)
        with killing(kill if name == names[-1] else None):
            save_checkpoint(run.path(name), iteration=number, model=model, **run.access)


def keep_last(run: Run, count: int, kill: Kill | None = None) -> None:
    """Delete old steps, as a training script does on its first rank, with the others waiting."""
    with killing(kill):
        if dist.get_rank() == 0:
            keep_last_n_checkpoints(run.root, count, **run.access)
        dist.barrier()


def load(run: Run, name: str) -> int:
    """Load a checkpoint, make sure that it is one save bit for bit, and return that save's number."""
    model = model_of(0)
    number = load_checkpoint(run.path(name), model=model, **run.access)
    assert number is not None
    loaded, expected = model.state_dict(), model_of(number).state_dict()
    for key, tensor in expected.items():
        assert loaded[key].numpy().tobytes() == tensor.numpy().tobytes(), f"{key} of {name} is altered"
    return number
