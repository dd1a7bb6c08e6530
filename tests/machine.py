"""What the state machine of a run's directory works with: stores that fail when told to, and a plain model.

A :class:`Site` is one run's directory together with what must be in it: a dict of checkpoints, a dict of
foreign objects. It looks at the real directory only from outside, through a fresh ``CheckpointDirectory``
and the bare store.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from protocol import Upload

from remote_ckpt import (
    CheckpointDirectory,
    CheckpointInfo,
    CheckpointNotFoundError,
    CommitOptions,
    Options,
    StoreUnavailableError,
)
from remote_ckpt.checksum import crc32c
from remote_ckpt.deletion import CLOSES_FOLDER
from remote_ckpt.index import parse_index
from remote_ckpt.keys import own_key, parse_manifest_key
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import named_keys, read_generation, read_newest
from remote_ckpt.store import open_store
from remote_ckpt.store.base import ObjectInfo, Store
from remote_ckpt.testing.faults import FaultStore, SimulatedCrash, StoreCall
from remote_ckpt.url import Location, check_name, parse_location, parse_step

HASTY = Options(commit=CommitOptions(commit_seconds=0.05))
"""Gives up almost at once on a store that leaves a change undecided."""

OURS, STOCK = "remote_ckpt", "dcp"
STOCK_FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata")
_CHANGES = {"write", "write_stream", "create", "copy", "delete", "remove_folder", "remove_leftover"}
_DATA_KEY = re.compile(rb"d-[0-9a-f]{16}/[0-9]+\.distcp\Z")


# --- stores that fail ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one operation.

    Args:
        kind: ``"crash"``: the process dies. ``"down"``: from then on no request gets an answer.
            ``"blip"``: only this one gets none.
        call: At which request, from 1; of a crash only those count that change something.
        is_done: The request took effect before.
    """

    kind: Literal["crash", "down", "blip"]
    call: int
    is_done: bool


class Failing:
    """One operation's fault, at whichever of the stores that it opens the request comes."""

    def __init__(self, fault: Fault | None) -> None:
        self.has_struck = False
        self._fault = fault
        self._lock = threading.Lock()
        self._count = 0
        self._last: StoreCall | None = None

    def before(self, call: StoreCall) -> None:
        fault = self._fault
        if fault is None:
            return
        with self._lock:
            if not (self.has_struck and fault.kind != "blip"):
                if fault.kind == "crash" and call.operation not in _CHANGES:
                    return
                self._count += 1
                if self._count != fault.call:
                    return
                if fault.is_done:
                    self._last = call
                    return
                self.has_struck = True
        raise _error(fault, call)

    def after(self, call: StoreCall) -> None:
        if self._fault is not None and call is self._last:
            self.has_struck = True
            raise _error(self._fault, call)


def _error(fault: Fault, call: StoreCall) -> BaseException:
    if fault.kind == "crash":
        return SimulatedCrash(f"at {call}")
    return StoreUnavailableError("no answer", url=call.url, key=call.key, operation=call.operation)


class _SharedStore(FaultStore):
    """Stays open: the next operation opens the same store."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Outcome:
    """What came of an operation.

    Args:
        result: What it returned, or None.
        error: What it raised, or None.
        has_struck: Its fault came about.
        is_interrupted: It may have been done or not.
    """

    result: Any
    error: BaseException | None
    has_struck: bool
    is_interrupted: bool


class World:
    """Opens all stores of a run of the machine, makes them fail, and counts what happened."""

    def __init__(self) -> None:
        self.delay = timedelta()
        self.counts: dict[str, int] = {}
        self._failing = Failing(None)
        self._stores: dict[str, Store] = {}

    def open(self, location: Location, **settings: Any) -> Store:
        """Stands in for ``open_store``."""
        if location.address not in self._stores:
            self._stores[location.address] = open_store(location, **settings)
        return _SharedStore(self._stores[location.address], before=self._before, after=self._after)

    def run(self, act: Callable[[], object], fault: Fault | None) -> Outcome:
        """Do something while the stores fail."""
        failing = self._failing = Failing(fault)
        try:
            return Outcome(act(), None, failing.has_struck, is_interrupted=False)
        except (Exception, SimulatedCrash) as error:
            return Outcome(None, error, failing.has_struck, is_interrupted=failing.has_struck)
        finally:
            self._failing = Failing(None)

    @contextmanager
    def later(self, delay: timedelta) -> Iterator[None]:
        """Let the stores' clocks be ahead."""
        self.delay = delay
        try:
            yield
        finally:
            self.delay = timedelta()

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _before(self, call: StoreCall) -> None:
        self._failing.before(call)

    def _after(self, call: StoreCall, result: Any) -> Any:
        self._failing.after(call)
        return result + self.delay if call.operation == "clock" else result


# --- what must be ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """One checkpoint: what it must hold and say, and (from ``generation`` on) what was seen of it."""

    payload: bytes
    kind: str = OURS
    pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    generation: int = 0
    save_id: str | None = None
    committed_at: datetime | None = None

    def is_like(self, other: Saved | None) -> bool:
        """Whether two are the same for users."""
        return other is not None and _facts(self) == _facts(other)


def _facts(saved: Saved) -> tuple[object, ...]:
    return saved.payload, saved.kind, saved.pinned, saved.metrics


@dataclass
class Pending:
    """A save whose objects are written and whose manifest is not."""

    name: str
    overwrite: bool
    payload: bytes
    checkpoint: Store
    upload: Upload
    written: list[str]
    is_swept: bool = False


class Site:
    """One run's directory, and what must be in it.

    Args:
        world: Opens its store.
        url: Where it is.
        storage_options: What it takes to open it.
        cut_a_write: Leaves what a killed write leaves below a checkpoint's name, told by a number; None
            where that is nothing.
    """

    def __init__(
        self,
        world: World,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        cut_a_write: Callable[[str, int], None] | None = None,
    ) -> None:
        self.url = url
        self.location = parse_location(url)
        self.cut_a_write = cut_a_write
        self._storage_options = storage_options
        self.root = world.open(self.location, storage_options=storage_options)
        self.live: dict[str, Saved] = {}
        self.foreign: dict[str, bytes] = {}
        self.loose: set[str] = set()  # files of stock checkpoints that may be there still, or not
        self.pending: list[Pending] = []
        self.resumed: set[str] = set()
        self.seen: list[CheckpointInfo] = []
        self.tops: dict[str, int] = {}
        self.unpublished: set[str] = set()  # whose .metadata may be behind, after a fault
        self.cut_short: dict[tuple[str | None, str], str | None] = {}  # copies, by source and target
        self.mark = self.root.clock()
        self._read: dict[str, set[ObjectInfo]] = {}  # what was listed when it was read last, by name or key

    def directory(self) -> CheckpointDirectory:
        """A fresh object, as another process would have it."""
        return CheckpointDirectory(self.url, storage_options=self._storage_options, options=HASTY)

    @property
    def steps(self) -> dict[int, Saved]:
        steps = ((parse_step(name), saved) for name, saved in self.live.items())
        return {step: saved for step, saved in sorted(steps, key=str) if step is not None}

    def save_id_of(self, name: str) -> str | None:
        return self.live[name].save_id if name in self.live else None

    # --- looking -----------------------------------------------------------------------------------------

    def observe(self, name: str) -> Saved | None:
        """What stands under a name."""
        try:
            info = self.directory().info(name)
        except CheckpointNotFoundError:
            return None
        self.seen.append(info)
        return _seen(info, read_payload(self.root, info))

    def settle(self, name: str, *allowed: Saved | None) -> Saved | None:
        """Look at what became of a checkpoint, make sure that it may be, and take it over."""
        found = self.observe(name)
        assert any(found is saved is None or (saved and saved.is_like(found)) for saved in allowed), (
            f"{name} is {found}, allowed are {allowed}"
        )
        if found is None:
            self.live.pop(name, None)
        else:
            self.live[name] = found
        return found

    def check(self, *, is_thorough: bool = False) -> None:
        """The directory shows exactly the model, and every checkpoint loads; nothing foreign was touched.

        Args:
            is_thorough: Read again what by its listing did not change since it was read last.
        """
        directory, objects = self.directory(), {info.key: info for info in self.root.list()}
        infos = {info.name: info for info in directory.list()}
        assert infos.keys() == self.live.keys(), f"listed {sorted(infos)}, live are {sorted(self.live)}"
        latest = directory.latest()
        assert (latest and latest.step) == max(self.steps, default=None)
        if is_thorough:
            self._read.clear()
            rated = [saved.metrics["loss"] for saved in self.live.values() if saved.metrics]
            best = directory.best("loss")
            assert (best and best.metrics["loss"]) == min(rated, default=None)
        for name, saved in self.live.items():
            self._check_content(infos[name], saved, objects)
        self._check_foreign(objects)
        self._check_tops(objects)

    def _check_content(self, info: CheckpointInfo, saved: Saved, objects: Mapping[str, ObjectInfo]) -> None:
        seen = {each for key, each in objects.items() if key.startswith(f"{info.name}/")}
        if self._read.get(info.name) == seen:
            assert _seen(info, saved.payload) == saved
            return
        assert _seen(info, read_payload(self.root, info)) == saved
        if info.kind == OURS and info.name not in self.unpublished:
            assert self.root.read(f"{info.name}/.metadata") == read_stock_metadata(self.root, info.name)
        self._read[info.name] = seen

    def _check_foreign(self, objects: Mapping[str, ObjectInfo]) -> None:
        for key, data in self.foreign.items():
            assert key in objects, f"the foreign {key} is gone"
            if self._read.get(key) != {objects[key]}:
                assert self.root.read(key) == data, f"the foreign {key} is altered"
                self._read[key] = {objects[key]}

    def _check_tops(self, objects: Mapping[str, ObjectInfo]) -> None:
        """No number of a generation is used twice, but where the whole folder went."""
        tops = tops_of(objects)
        if not self.root.capabilities.has_folders:
            for name, top in self.tops.items():
                assert tops.get(name, 0) >= top, f"generation {top} of {name} is gone"
        self.tops = tops

    # --- garbage -----------------------------------------------------------------------------------------

    def objects(self) -> dict[str, ObjectInfo]:
        """All objects, but those that may come and go."""
        return {info.key: info for info in self.root.list() if info.key not in self.loose}

    def age(self, name: str) -> timedelta | None:
        """How old garbage must be: a day (None), as old as what is older than the mark, or nothing."""
        ages = {"grace": None, "mark": self.root.clock() - self.mark, "none": timedelta()}
        return ages[name]

    def garbage(self, *, tombstones: bool = False) -> dict[str, ObjectInfo]:
        """What a sweep may remove, if it is old enough: of our own names, and needed by no manifest."""
        objects = self.objects()
        needed = {
            key for name, top in tops_of(objects).items() for key in self._needed(name, top, tombstones)
        }
        return {key: info for key, info in objects.items() if key not in needed and self._is_ours(key)}

    def _needed(self, name: str, top: int, tombstones: bool) -> Iterator[str]:
        manifest = read_generation(self.root.scope(name), top)
        is_closed = manifest.extra.get(CLOSES_FOLDER) is True
        if manifest.state == "live" or not (tombstones or is_closed):
            yield manifest_path(name, top)
        if manifest.state == "live":
            yield from (f"{name}/{key}" for key in (*named_keys(manifest), ".metadata"))

    def _is_ours(self, key: str) -> bool:
        name, _, rest = key.partition("/")
        if key in self.foreign or not _is_name(name):
            return False
        is_stock = self.live.get(name, Saved(b"")).kind == STOCK
        return own_key(rest) and not (is_stock and rest == ".metadata")

    def is_busy(self, name: str) -> bool:
        """Whether objects of a save in progress came after the checkpoint was committed."""
        written = {f"{each.name}/{key}" for each in self.pending if not each.is_swept for key in each.written}
        committed_at = self.live[name].committed_at
        assert committed_at is not None
        return any(
            info.modified_at > committed_at
            for key, info in self.objects().items()
            if key in written and key.startswith(f"{name}/")
        )


def manifest_path(name: str, generation: int) -> str:
    return f"{name}/manifest.{generation:06d}.json"


def tops_of(objects: Mapping[str, ObjectInfo]) -> dict[str, int]:
    """The highest generation of each name."""
    tops: dict[str, int] = {}
    for key in objects:
        name, _, rest = key.partition("/")
        if _is_name(name) and (generation := parse_manifest_key(rest)) is not None:
            tops[name] = max(generation, tops.get(name, 0))
    return tops


def _is_name(name: str) -> bool:
    with suppress(ValueError):
        return bool(check_name(name))
    return False


def _seen(info: CheckpointInfo, payload: bytes) -> Saved:
    return Saved(
        payload=payload,
        kind=info.kind,
        pinned=info.pinned,
        metrics=info.metrics,
        generation=info.generation,
        save_id=info.save_id,
        committed_at=info.committed_at,
    )


# --- reading ---------------------------------------------------------------------------------------------


def read_payload(root: Store, info: CheckpointInfo) -> bytes:
    """Read a checkpoint whole, as ours or as stock torch would.

    Raises:
        AssertionError: It is a part of a checkpoint, or a mixture.
        ObjectNotFoundError: A part is missing.
    """
    checkpoint = root.scope(info.name)
    if info.kind == STOCK:
        return b" ".join(checkpoint.read(key) for key in STOCK_FILES)
    assert info.kind == OURS
    newest = read_newest(checkpoint)
    assert newest is not None
    assert newest.manifest.save_id == info.save_id
    return _read_ours(checkpoint, newest.manifest)


def read_stock_metadata(root: Store, name: str) -> bytes:
    """Read what ``.metadata`` of a checkpoint of ours must hold."""
    newest = read_newest(root.scope(name))
    assert newest is not None
    assert newest.manifest.stock_metadata is not None
    return root.read(f"{name}/{newest.manifest.stock_metadata.key}")


def _read_ours(checkpoint: Store, manifest: Manifest) -> bytes:
    contents = {}
    for entry in (*manifest.objects, manifest.index, manifest.stock_metadata):
        assert entry is not None
        data = contents[entry.key] = checkpoint.read(entry.key)
        assert (len(data), crc32c(data)) == (entry.size_bytes, entry.crc32c), f"{entry.key} is altered"
    keys = [entry.key for entry in manifest.objects]
    payloads = {_DATA_KEY.sub(b"", contents[key]) for key in keys}
    assert payloads == {str(manifest.user_metadata["payload"]).encode()}, "a mixture of saves"
    assert manifest.index is not None
    assert manifest.stock_metadata is not None
    index = parse_index(contents[manifest.index.key], url=checkpoint.url, key=manifest.index.key)
    assert (index.save_id, index.objects) == (manifest.save_id, keys)
    stock = f"stock {' '.join(keys)} of {manifest.save_id}"
    assert contents[manifest.stock_metadata.key] == stock.encode()
    return payloads.pop()
