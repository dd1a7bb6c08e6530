"""What tests of hostile networks share: a run behind the fault proxy, and what stands in it afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from protocol import FakeTime, load, save

from remote_ckpt.checksum import crc32c
from remote_ckpt.copies import copy_checkpoint
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.discover import find_checkpoints, find_latest
from remote_ckpt.newest import read_newest
from remote_ckpt.options import CommitOptions, Options, RetryOptions
from remote_ckpt.pruning import PruneReport, prune
from remote_ckpt.retention import plan_keep_last
from remote_ckpt.store.base import Store
from remote_ckpt.store.memory import MemoryStore

PATIENT = Options(
    retry=RetryOptions(max_attempts=4, initial_seconds=0.005, max_seconds=0.02),
    commit=CommitOptions(commit_seconds=30.0),
)
"""Tries again almost at once."""
BRIEF = Options(
    retry=RetryOptions(max_attempts=2, initial_seconds=0.0, max_seconds=0.0),
    commit=CommitOptions(commit_seconds=0.2),
)
"""Gives up soon. Where time is fake it passes in sleeps of 0.02 s only: a commit is tried ten times."""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Run:
    """A run's directory with the checkpoints 1 and 2, of which 2 is the newest.

    Args:
        hostile: The way to it through the proxy.
        clean: A way to it past the proxy.
    """

    hostile: Store
    clean: Store

    def payloads(self) -> dict[str, bytes]:
        """Return what stands in it, by name.

        Raises:
            AssertionError: One of them is not whole.
        """
        entries = find_checkpoints(self.clean)
        assert [entry.name for entry in entries if entry.error is not None] == []
        return {entry.name: payload_of(self.clean, entry.name) for entry in entries}


def start_run(hostile: Store, clean: Store) -> Run:
    """Return a run of its own in both stores, its checkpoints committed."""
    name = f"run-{next(_numbers)}"
    run = Run(hostile.scope(name), clean.scope(name))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda pair: run.clean.write(*pair), _template().items()))
    return run


def payload_of(root: Store, name: str) -> bytes:
    """Read a committed checkpoint whole, and return what was saved in it; copies have it too."""
    with closing(root.scope(name)) as checkpoint:
        newest = read_newest(checkpoint)
        assert newest is not None
        payload = str(newest.manifest.user_metadata["payload"]).encode()
        for entry in newest.manifest.objects:
            data = checkpoint.read(entry.key)
            assert (len(data), crc32c(data)) == (entry.size_bytes, entry.crc32c)
            assert data.startswith(payload)
    return payload


def _template() -> Mapping[str, bytes]:
    if not _objects:
        memory = MemoryStore.fresh()
        save(memory, b"one", name="1")
        save(memory, b"two", name="2")
        _objects.update({info.key: memory.read(info.key) for info in memory.list()})
    return _objects


_objects: dict[str, bytes] = {}

BEFORE: Mapping[str, bytes] = {"1": b"one", "2": b"two"}


@dataclass(frozen=True)
class Operation:
    """Something that users do, what it returns, and what stands in the run afterwards."""

    act: Callable[[Store, Options], object]
    expected: object = None
    changes: Mapping[str, bytes | None] | None = None

    @property
    def after(self) -> dict[str, bytes]:
        all_of_them = {**BEFORE, **(self.changes or {})}
        return {name: payload for name, payload in all_of_them.items() if payload is not None}


def keep_one(root: Store, options: Options = PATIENT) -> PruneReport:
    """Delete all steps but the newest."""
    return prune(root, lambda candidates: plan_keep_last(candidates, 1), options=options)


def _create(root: Store, options: Options) -> str:
    return save(root, b"new", name="3", options=options).name


def _replace(root: Store, options: Options) -> str:
    return save(root, b"new", name="2", overwrite=True, options=options).name


def _latest(root: Store, options: Options) -> str | None:
    entry = find_latest(root)
    return None if entry is None else entry.name


def _names(root: Store, options: Options) -> Sequence[str]:
    return [entry.name for entry in find_checkpoints(root) if entry.error is None]


def _delete(root: Store, options: Options) -> None:
    delete_checkpoint(root.scope("1"), options=options, waiting=FakeTime().waiting)


def _copy(root: Store, options: Options) -> str:
    return copy_checkpoint(root, "2", "2_keep", options=options, waiting=FakeTime().waiting).name


OPERATIONS: Mapping[str, Operation] = {
    "create": Operation(_create, "3", {"3": b"new"}),
    "replace": Operation(_replace, "2", {"2": b"new"}),
    "find latest": Operation(_latest, "2"),
    "list": Operation(_names, ["1", "2"]),
    "load": Operation(lambda root, options: load(root, "2"), b"two"),
    "delete": Operation(_delete, None, {"1": None}),
    "keep last": Operation(lambda root, options: keep_one(root, options).deleted, ("1",), {"1": None}),
    "copy": Operation(_copy, "2_keep", {"2_keep": b"two"}),
}
