"""What the crash tests work with: directories whose process dies at a store call, and what must hold then.

A :class:`Scene` is a run's directory, another one to copy to, and files of others. Real operations run on it
through stores on which the process dies at the k-th call. It is then looked at from outside, through fresh
objects, and forked, so that each way to go on from a crash begins with what that left.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeping import TWO_DAYS, AgedStore, all_keys

from remote_ckpt import CheckpointDirectory, load_checkpoint, place, save_checkpoint
from remote_ckpt.dcp import writer
from remote_ckpt.newest import read_newest
from remote_ckpt.options import CommitOptions, Options, TransferOptions
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.testing.faults import FaultStore, SimulatedCrash, StoreCall
from remote_ckpt.url import Location, parse_location

FOREIGN = (
    "config.yaml",
    "weights.pth",
    ".probe-mine",
    "logs/events",
    "logs/deep/manifest.000001.json",
    "a b/d-0123456789abcdef/0.distcp",
)
"""Files of others."""
CHANGES = {"write", "write_stream", "create", "copy", "delete", "remove_folder", "remove_leftover"}
_numbers = itertools.count(1)


def _one_object_per_tensor() -> TransferOptions:
    """Options that make of a tiny checkpoint as many objects as of a large one, moved one after the other."""
    options = TransferOptions(concurrency=1)
    object.__setattr__(options, "max_object_bytes", 1)  # below what is accepted: else it takes gigabytes
    return options


OPTIONS = Options(transfer=_one_object_per_tensor(), commit=CommitOptions(commit_seconds=60))


# --- dying -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Death:
    """Where the process dies: at a call, counted from 1 over all stores that an operation opens.

    Args:
        number: The call.
        is_done: Just after it took effect, not before it.
    """

    number: int
    is_done: bool

    def __str__(self) -> str:
        return f"{'after' if self.is_done else 'before'} call {self.number}"


class Stage:
    """Stands in for ``open_store`` where the product opens its stores."""

    def __init__(self) -> None:
        self.calls: list[StoreCall] = []
        self.read: dict[frozenset[tuple[str, bytes]], int] = {}  # whole checkpoints, by all their bytes
        self._lock = threading.Lock()
        self._death: Death | None = None
        self._ages: dict[str, dict[str, timedelta]] = {}

    def open(self, location: Location, **settings: Any) -> Store:
        """Open a store on which all calls are counted, and the process may die."""
        store: Store = open_store(location, **settings)
        death = self._death
        watched = (
            FaultStore(store)
            if death is None
            else FaultStore.crashing(store, death.number, is_done=death.is_done)
        )
        watched.calls, watched._lock = self.calls, self._lock
        ages = self._ages.get(location.address)
        return watched if ages is None else AgedStore(watched, ages)

    def age(self, url: str) -> None:
        """Let two days pass in a directory."""
        location = parse_location(url)
        self._ages[location.address] = dict.fromkeys(all_keys(open_store(location)), TWO_DAYS)

    def run(self, act: Callable[[], object]) -> list[StoreCall]:
        """Run an operation to its end and return the calls that it made."""
        assert not self.dies(act, None)
        return list(self.calls)

    def dies(self, act: Callable[[], object], death: Death | None) -> bool:
        """Run an operation until its death; whether it came to that before it came to its end."""
        self.calls, self._death = [], death
        try:
            act()
        except BaseException as error:
            if death is None or not _is_crash(error):
                raise
            assert len(self.calls) >= death.number
            return True
        finally:
            self._death = None
        return False


def _is_crash(error: BaseException | None) -> bool:
    """Whether an error is a simulated crash, or what torch or we made of one."""
    while error is not None:
        if isinstance(error, SimulatedCrash):
            return True
        error = error.__cause__ or error.__context__
    return False


def make_stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Return a stage that opens the stores of writers, directories and copies."""
    stage = Stage()
    monkeypatch.setattr(place, "open_store", stage.open)
    monkeypatch.setattr(writer, "open_store", stage.open)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the process dies here, the disk does not
    monkeypatch.setattr(logging.root.manager, "disable", logging.ERROR)  # torch logs each step of a save
    return stage


# --- scenes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Area:
    """Where the directories of a scene lie: both in one bucket, on one disk, or in a bucket each."""

    kind: str
    folder: Path

    def fresh(self) -> tuple[str, str]:
        """The URLs of two empty directories."""
        number = next(_numbers)
        if self.kind == "local":
            return str(self.folder / str(number) / "run"), str(self.folder / str(number) / "archive" / "run")
        other = "-other" if self.kind == "two buckets" else ""
        return f"memory://crash-{number}/run", f"memory://crash-{number}{other}/archive/run"


class Scene:
    """A run's directory, and maybe another one to copy to, and what is to be done in them.

    Args:
        stage: Opens their stores.
        area: Where they lie.
        count: How many directories there are.
    """

    def __init__(self, stage: Stage, area: Area, count: int) -> None:
        self.stage = stage
        self.area = area
        self.urls = area.fresh()[:count]
        self.foreign: set[str] = set()

    def write_foreign(self, *keys: str) -> None:
        """Let others write files in the run's directory."""
        for key in keys:
            self.store().write(key, key.encode())
        self.foreign.update(keys)

    def store(self, at: int = 0) -> Store:
        """The bare store of a directory."""
        return open_store(parse_location(self.urls[at]))

    def directory(self, at: int = 0) -> CheckpointDirectory:
        """A fresh object, as another process would have it."""
        return CheckpointDirectory(self.urls[at], options=OPTIONS)

    def save(self, name: str, number: int, *, at: int = 0) -> None:
        """Save a checkpoint whose values all follow from a number."""
        save_checkpoint(f"{self.urls[at]}/{name}", iteration=number, model=model_of(number), options=OPTIONS)

    def sweep(self, *, at: int = 0, tombstones: bool = False) -> None:
        """Sweep two days later."""
        self.stage.age(self.urls[at])
        report = self.directory(at).sweep(dry_run=False, tombstones=tombstones)
        assert report.failures == ()

    def die(self, act: Act, operation: str, *, nth: int = 0, is_done: bool = True) -> None:
        """Let an operation die at the n-th call (from 0) of a kind; which that is, a fork tells."""
        twin = self.fork()
        numbers = [call.number for call in self.stage.run(lambda: act(twin)) if call.operation == operation]
        assert self.stage.dies(lambda: act(self), Death(numbers[nth], is_done))

    def fork(self) -> Scene:
        """A copy of all that there is, times included."""
        twin = Scene(self.stage, self.area, len(self.urls))
        twin.foreign |= self.foreign
        for url, copy in zip(self.urls, twin.urls, strict=True):
            if self.area.kind != "local":
                _bucket(copy).objects.update(_bucket(url).objects)
            elif Path(url).exists():
                shutil.copytree(url, copy, symlinks=True)
        return twin

    def remove(self) -> None:
        """Give the space back."""
        for url in self.urls:
            if self.area.kind != "local":
                _bucket(url).objects.clear()
            elif Path(url).exists():
                shutil.rmtree(url)


Act = Callable[[Scene], object]
"""An operation on a scene."""


def _bucket(url: str) -> Any:
    """What a memory store keeps: objects with their times."""
    return MemoryStore(parse_location(url).path.partition("/")[0])._bucket


def model_of(number: int) -> torch.nn.Module:
    """A model whose values follow from a number."""
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(number))
    return model


# --- looking -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What users see of a checkpoint that was read whole."""

    number: int
    is_pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


State = Mapping[str, Seen]
"""The checkpoints of a directory."""
States = tuple[State, ...]
"""Those of all directories of a scene."""


def look(scene: Scene) -> States:
    """Read all directories whole.

    Raises:
        AssertionError: A checkpoint that is listed is damaged or no whole save, or the latest is another.
    """
    return tuple(_look_at(scene, at) for at in range(len(scene.urls)))


def _look_at(scene: Scene, at: int) -> State:
    with scene.directory(at) as directory:
        infos = {info.name: info for info in directory.list()}
        latest = directory.latest()
        numbers = {name: _read(scene, directory, name, at) for name in infos}
    steps = [info.step for info in infos.values() if info.step is not None]
    assert (None if latest is None else latest.step) == max(steps, default=None)
    return {name: Seen(numbers[name], info.pinned, dict(info.metrics)) for name, info in infos.items()}


def _read(scene: Scene, directory: CheckpointDirectory, name: str, at: int) -> int:
    """Verify and load a checkpoint, unless it has been with all the same bytes."""
    store = scene.store(at)
    infos = store.list(f"{name}/")
    content = frozenset((info.key, store.read(info.key)) for info in infos)
    if content not in scene.stage.read:
        report = directory.verify(name, read_data=True)
        assert report.is_sound, f"{name}: {report.problems}"
        scene.stage.read[content] = load(scene, name, at=at)
    return scene.stage.read[content]


def load(scene: Scene, name: str, *, at: int = 0) -> int:
    """Load a checkpoint, make sure that it is one save bit for bit, and return that save's number."""
    model = model_of(0)
    number = load_checkpoint(f"{scene.urls[at]}/{name}", model=model)
    assert number is not None
    assert _bytes_of(model) == _bytes_of(model_of(number)), "altered, or a mixture"
    return number


def _bytes_of(model: torch.nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def check_foreign(scene: Scene) -> None:
    """What others wrote is there as they wrote it."""
    store = scene.store()
    for key in scene.foreign:
        assert store.read(key) == key.encode()


def check_published(scene: Scene, name: str, *, at: int = 0) -> None:
    """Stock readers see the same checkpoint as ours."""
    store = scene.store(at)
    newest = read_newest(store.scope(name))
    assert newest is not None
    assert newest.manifest.stock_metadata is not None
    assert store.read(f"{name}/.metadata") == store.read(f"{name}/{newest.manifest.stock_metadata.key}")


def check_is_swept(scene: Scene, *, tombstones: bool) -> None:
    """Nothing is left over but what a sweep leaves: the newest mark of each deletion."""
    for at in range(len(scene.urls)):
        usage, store = scene.directory(at).usage(), scene.store(at)
        assert not list(store.list_leftovers())
        assert sum(one.leftover_bytes for one in usage.checkpoints) == 0
        if tombstones:
            assert (usage.remains, usage.leftover_bytes) == ((), 0)
            continue
        assert usage.leftover_bytes == sum(one.total_bytes for one in usage.remains)
        for remains in usage.remains:
            newest = read_newest(store.scope(remains.name))
            assert newest is not None
            assert not newest.is_live
            assert remains.object_count == 1
