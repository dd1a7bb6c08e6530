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
from typing import Any, TypeVar

import pytest
import torch
from sweeping import TWO_DAYS, AgedStore, all_keys

from remote_ckpt import (
    CheckpointDirectory,
    discover,
    load_checkpoint,
    place,
    save_checkpoint,
    sweep_scan,
)
from remote_ckpt.dcp import writer
from remote_ckpt.newest import read_newest
from remote_ckpt.options import CommitOptions, Options, TransferOptions
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.testing.faults import SimulatedCrash, StoreCall
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
T = TypeVar("T")


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


class _Life:
    """One operation's calls, over all stores that it opens, and where it dies."""

    def __init__(self, is_last: Callable[[StoreCall], bool], *, is_done: bool) -> None:
        self.calls: list[StoreCall] = []
        self.is_over = False
        self._is_last = is_last
        self._is_done = is_done
        self._lock = threading.Lock()

    def begin(self, operation: str, key: str | None, url: str) -> StoreCall:
        with self._lock:
            call = StoreCall(len(self.calls) + 1, operation, key, url)
            self.calls.append(call)
            if not self._is_done and self._is_last(call):
                self.is_over = True
            if self.is_over:
                raise SimulatedCrash(f"before {call}")
        return call

    def end(self, call: StoreCall) -> None:
        if self._is_done and self._is_last(call):
            self.is_over = True
            raise SimulatedCrash(f"after {call}")


class _Mortal(DelegatingStore):
    """A store whose calls belong to a life. Unlike a FaultStore it dies after a refused call, too, and lets
    the calls that another one is made of (a stream's reads) come first."""

    def __init__(self, inner: Store, life: _Life) -> None:
        super().__init__(inner)
        self._life = life

    def _wrap(self, inner: Store) -> Store:
        return _Mortal(inner, self._life)

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        request = self._life.begin(operation, key, self.url)
        try:
            return call()
        finally:
            self._life.end(request)


class Stage:
    """Stands in for ``open_store`` where the product opens its stores."""

    def __init__(self) -> None:
        self.read: dict[frozenset[tuple[str, bytes]], int] = {}  # whole checkpoints, by all their bytes
        self._life = _Life(lambda call: False, is_done=False)
        self._ages: dict[str, dict[str, timedelta]] = {}

    def open(self, location: Location, **settings: Any) -> Store:
        """Open a store on which all calls are counted, and the process may die."""
        watched = _Mortal(open_store(location, **settings), self._life)
        ages = self._ages.get(location.address)
        return watched if ages is None else AgedStore(watched, ages)

    def age(self, url: str) -> None:
        """Let two days pass in a directory."""
        location = parse_location(url)
        self._ages[location.address] = dict.fromkeys(all_keys(open_store(location)), TWO_DAYS)

    def run(self, act: Callable[[], object]) -> list[StoreCall]:
        """Run an operation to its end and return the calls that it made."""
        life = _Life(lambda call: False, is_done=False)
        assert not self._dies(act, life)
        return life.calls

    def dies(self, act: Callable[[], object], death: Death) -> bool:
        """Run an operation until its death; whether it came to that before it came to its end."""
        life = _Life(lambda call: call.number == death.number, is_done=death.is_done)
        is_dead = self._dies(act, life)
        assert is_dead == (len(life.calls) >= death.number)
        return is_dead

    def dies_at(self, act: Callable[[], object], operation: str, *, is_done: bool) -> None:
        """Run an operation until its first call of a kind."""
        life = _Life(lambda call: call.operation == operation, is_done=is_done)
        assert self._dies(act, life), f"it never comes to a {operation}"

    def _dies(self, act: Callable[[], object], life: _Life) -> bool:
        self._life = life
        try:
            act()
        except BaseException as error:
            if not (life.is_over and _is_crash(error)):
                raise
            return True
        finally:
            self._life = _Life(lambda call: False, is_done=False)
        assert not life.is_over, "it outlived its death"
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
    for module in (discover, sweep_scan):  # else calls have other numbers in each run
        monkeypatch.setattr(module, "_MAX_THREADS", 1)
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

    def die(self, act: Act, operation: str, *, is_done: bool = True) -> None:
        """Let an operation die at its first call of a kind."""
        self.stage.dies_at(lambda: act(self), operation, is_done=is_done)

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

    def content(self) -> frozenset[tuple[str, bytes | None]]:
        """All that there is, folders included, but for its times."""
        found: set[tuple[str, bytes | None]] = set()
        for at, url in enumerate(self.urls):
            if self.area.kind == "local":
                for path in Path(url).rglob("*"):
                    found.add((f"{at} {path.relative_to(url)}", None if path.is_dir() else path.read_bytes()))
            else:
                found.update((f"{at} {key}", data) for key, (data, _) in _bucket(url).objects.items())
        return frozenset(found)

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
