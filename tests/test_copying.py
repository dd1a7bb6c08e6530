"""Copies between places: within a store by the store, across stores through this process; whole or absent."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from protocol import OPTIONS, Hook, Script, answers, expected_keys, keys_of, load, once, save, upload

from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.commit import commit_save, finish_replacement, open_for_save
from remote_ckpt.copying import copy_across
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    ConfigError,
    IntegrityError,
    SaveFailedError,
    StorageFullError,
    StoreUnavailableError,
    UnsupportedStoreError,
    UrlError,
)
from remote_ckpt.index import parse_index
from remote_ckpt.keys import parse_copy_record_key
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import named_keys, read_newest
from remote_ckpt.options import CommitOptions, GiB, MiB, Options, RetryOptions, TransferOptions
from remote_ckpt.place import Place, place_of
from remote_ckpt.progress import Progress
from remote_ckpt.store.base import Store
from remote_ckpt.store.meter import MeteredStore
from remote_ckpt.testing.faults import FaultStore, SimulatedCrash, StoreCall, corrupt_reads
from remote_ckpt.testing.proxy import FaultProxy, Reply, Rule
from remote_ckpt.testing.servers import LocalServer

STOCK = {".metadata": b"stock", "__0_0.distcp": b"a", "__1_0.distcp": b"b"}
ONE_BY_ONE = Options(transfer=TransferOptions(concurrency=1))
ONCE_ONLY = Options(retry=RetryOptions(max_attempts=1))
FreshRoot = Callable[[LocalServer], str]
_numbers = itertools.count(1)


# --- places ------------------------------------------------------------------------------------------


@dataclass
class Wire:
    """What goes over the stores of watched places: all their calls in one order, and a script."""

    before: Callable[[StoreCall], None] | None = None
    after: Callable[[StoreCall, Any], Any] | None = None
    calls: list[StoreCall] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, place: Place) -> Place:
        return Watched(place.location, place.storage_options, place.transport, place.options, wire=self)

    def wrap(self, store: Store) -> FaultStore:
        watched = FaultStore(store, before=self.before, after=self.after)
        watched.calls, watched._lock = self.calls, self.lock
        return watched

    def keys(self, operation: str) -> list[str]:
        return sorted(call.key or "" for call in self.calls if call.operation == operation)


@dataclass(frozen=True)
class Watched(Place):
    """A place whose stores are on a wire."""

    wire: Wire = field(default_factory=Wire)

    def open(self) -> Store:
        return self.wire.wrap(Place.open(self))


def crash_at(number: int, *, is_done: bool) -> Wire:
    """A wire on which the process dies at a call, before it or just after; the dead make no calls."""

    def before(call: StoreCall) -> None:
        if call.number > number or (call.number == number and not is_done):
            raise SimulatedCrash(f"before {call}")

    def after(call: StoreCall, result: Any) -> Any:
        if call.number == number:
            raise SimulatedCrash(f"after {call}")
        return result

    return Wire(before, after)


def acting(*, before: Hook | None = None, after: Hook | None = None) -> Wire:
    """A wire with hooks that get operation and key."""

    def run_after(call: StoreCall, result: Any) -> Any:
        if after is not None:
            after(call.operation, call.key or "")
        return result

    return Wire(before=lambda call: before and before(call.operation, call.key or ""), after=run_after)


Pair = tuple[Place, Place]
"""Two directories to copy between."""


def memory() -> Place:
    return place_of(f"memory://copying-{next(_numbers)}/run")


def one_bucket(tmp_path: Path) -> Pair:
    source = memory()
    return source, replace(source, location=source.location.parent.join("archive/deep"))


WAYS: dict[str, Callable[[Path], Pair]] = {
    "one bucket": one_bucket,
    "one disk": lambda tmp_path: (place_of(tmp_path / "run"), place_of(tmp_path / "archive" / "deep")),
    "two buckets": lambda tmp_path: (memory(), memory()),
    "disk to bucket": lambda tmp_path: (place_of(tmp_path / "run"), memory()),
    "bucket to disk": lambda tmp_path: (memory(), place_of(tmp_path / "archive")),
}
STREAMING = ["two buckets", "disk to bucket", "bucket to disk"]


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return WAYS[request.param](tmp_path)


@pytest.fixture(params=STREAMING)
def apart(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return WAYS[request.param](tmp_path)


def read_manifest(place: Place, name: str) -> Manifest:
    newest = read_newest(place.open().scope(name))
    assert newest is not None
    assert newest.is_live
    return newest.manifest


def is_committed(place: Place, name: str) -> bool:
    newest = read_newest(place.open().scope(name, create=True))
    return newest is not None and newest.is_live


def assert_is_copy(place: Place, name: str, source: Manifest, data: list[bytes]) -> Manifest:
    """The checkpoint consists of the source's bytes under keys of its own, and of nothing else."""
    root, copy = place.open(), read_manifest(place, name)
    assert [root.read(f"{name}/{entry.key}") for entry in copy.objects] == data
    assert named_keys(copy).isdisjoint(named_keys(source))
    assert keys_of(root, name) == expected_keys(copy)
    assert copy.index is not None
    index = parse_index(root.read(f"{name}/{copy.index.key}"), url=root.url, key=copy.index.key)
    keys = [entry.key for entry in copy.objects]
    assert (index.objects, index.save_id) == (keys, copy.save_id)
    assert root.read(f"{name}/.metadata") == f"stock {' '.join(keys)} of {copy.save_id}".encode()
    return copy


def data_of(place: Place, name: str, manifest: Manifest) -> list[bytes]:
    return [place.open().read(f"{name}/{entry.key}") for entry in manifest.objects]


def stock(place: Place, name: str, files: dict[str, bytes] = STOCK) -> None:
    for key, data in files.items():
        place.open().scope(name, create=True).write(key, data)


def contents(place: Place, name: str) -> dict[str, bytes]:
    root = place.open()
    return {key: root.read(f"{name}/{key}") for key in keys_of(root, name)}


# --- what a copy is ----------------------------------------------------------------------------------


class TestCopies:
    def test_a_copy_says_what_its_source_says_and_has_its_bytes(self, pair: Pair) -> None:
        source, target = pair
        save(source.open(), b"one")
        manifest = annotate(source.open().scope("10"), metrics={"loss": 0.5})
        set_pinned(source.open().scope("10"), True)
        copy_across(source, "10", target, "best")
        copy = assert_is_copy(target, "best", manifest, data_of(source, "10", manifest))
        assert (copy.name, copy.step, copy.generation, copy.pinned) == ("best", None, 1, False)
        assert (copy.content_digest, copy.metrics) == (manifest.content_digest, {"loss": 0.5})
        assert copy.user_metadata == {"payload": "one"}
        assert copy.committed_at > manifest.committed_at
        assert copy.extra["copied_from"] == f"{source.open().url}/10 {manifest.save_id}"

    def test_another_name_of_the_same_directory_is_copied_to(self, pair: Pair) -> None:
        source, _ = pair
        manifest = save(source.open(), b"one")
        copy_across(source, "10", source, "20")
        copy = assert_is_copy(source, "20", manifest, data_of(source, "10", manifest))
        assert (copy.step, copy.extra["copied_from"]) == (20, f"10 {manifest.save_id}")

    def test_the_copy_outlives_its_source(self, pair: Pair) -> None:
        source, target = pair
        manifest = save(source.open(), b"one")
        data = data_of(source, "10", manifest)
        copy_across(source, "10", target, "10")
        delete_checkpoint(source.open().scope("10"))
        assert_is_copy(target, "10", manifest, data)

    def test_an_existing_target_is_refused_unless_told_and_a_pinned_one_always(self, pair: Pair) -> None:
        source, target = pair
        manifest = save(source.open(), b"one")
        save(target.open(), b"two", name="10")
        with pytest.raises(CheckpointExistsError):
            copy_across(source, "10", target, "10")
        assert load(target.open(), "10") == b"two"
        copy_across(source, "10", target, "10", overwrite=True)
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))
        set_pinned(target.open().scope("10"), True)
        with pytest.raises(CheckpointPinnedError):
            copy_across(source, "10", target, "10", overwrite=True)

    def test_what_is_not_there_is_not_copied(self, pair: Pair) -> None:
        source, target = pair
        with pytest.raises(CheckpointNotFoundError):
            copy_across(source, "10", target, "10")
        save(source.open(), b"one")
        delete_checkpoint(source.open().scope("10"))
        with pytest.raises(CheckpointNotFoundError):
            copy_across(source, "10", target, "10")
        assert target.open().list() == []

    def test_names_that_cannot_be_are_refused(self, pair: Pair) -> None:
        for names in ((".hidden", "10"), ("10", "a/b")):
            with pytest.raises(UrlError):
                copy_across(pair[0], names[0], pair[1], names[1])

    def test_a_stock_checkpoint_is_copied_as_it_is(self, pair: Pair) -> None:
        source, target = pair
        stock(source, "10", {**STOCK, "notes": b"foreign"})
        copy_across(source, "10", target, "best")
        assert contents(target, "best") == STOCK

    def test_a_plain_checkpoint_is_copied_as_it_is(self, pair: Pair) -> None:
        source, target = pair
        stock(source, "10", {"checkpoint.pth": b"plain"})
        copy_across(source, "10", target, "best")
        assert contents(target, "best") == {"checkpoint.pth": b"plain"}

    def test_progress_ends_at_all_bytes_and_objects(self, pair: Pair) -> None:
        source, target = pair
        manifest = save(source.open(), b"one")
        told: list[Progress] = []
        copy_across(source, "10", target, "10", on_progress=told.append)
        assert told[0] == Progress(operation="copy", total_bytes=manifest.total_bytes, total_objects=2)
        assert (told[-1].done_bytes, told[-1].done_objects) == (manifest.total_bytes, 2)
        assert [each.done_bytes for each in told] == sorted(each.done_bytes for each in told)


class TestOneStore:
    """No byte of the data comes through this process."""

    def test_a_bucket_copies_by_itself(self) -> None:
        source, target = one_bucket(Path())
        manifest = save(source.open(), b"one")
        wire = Wire()
        copy_across(wire.watch(source), "10", wire.watch(target), "10")
        assert wire.keys("copy") == [
            f"archive/deep/10/{entry.key}" for entry in sorted_by_key(read_manifest(target, "10"))
        ]
        assert {call.operation for call in wire.calls}.isdisjoint({"read_range", "write_stream"})
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))

    def test_two_directories_of_a_disk_share_the_bytes(self, tmp_path: Path) -> None:
        source, target = WAYS["one disk"](tmp_path)
        manifest = save(source.open(), b"one")
        copy_across(source, "10", target, "10")
        for theirs, ours in zip(manifest.objects, read_manifest(target, "10").objects, strict=True):
            assert (tmp_path / "run" / "10" / theirs.key).samefile(
                tmp_path / "archive" / "deep" / "10" / ours.key
            )

    def test_a_directory_that_hides_its_name_is_streamed_to(self, tmp_path: Path) -> None:
        """Names that a local store keeps for itself may well be somebody's folder for jobs."""
        source, target = place_of(tmp_path / "run"), place_of(tmp_path / ".tmp-job" / "run")
        manifest = save(source.open(), b"one")
        copy_across(source, "10", target, "10")
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))

    def test_without_hard_links_between_the_two_the_bytes_are_copied(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As between two mounts of one disk."""
        source, target = WAYS["one disk"](tmp_path)
        manifest = save(source.open(), b"one")
        link = os.link

        def link_within(theirs: str, ours: str, **at: int) -> None:
            if theirs.startswith("run/"):
                raise OSError(errno.EXDEV, "another mount")
            link(theirs, ours, **at)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "link", link_within)
        copy_across(source, "10", target, "10")
        copy = assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))
        ours = tmp_path / "archive" / "deep" / "10" / copy.objects[0].key
        assert not ours.samefile(tmp_path / "run" / "10" / manifest.objects[0].key)

    def test_two_disks_are_streamed_between(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source, target = WAYS["one disk"](tmp_path)
        manifest = save(source.open(), b"one")
        monkeypatch.setattr("remote_ckpt.copying._device", lambda path: "/".join(path))
        wire = Wire()
        copy_across(wire.watch(source), "10", wire.watch(target), "10")
        assert wire.keys("copy") == []
        assert len(wire.keys("read_range")) == 2
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))

    def test_what_cannot_be_linked_from_above_is_streamed(self, tmp_path: Path) -> None:
        """A folder above both, such as /home, may let pass without being readable."""
        source, target = WAYS["one disk"](tmp_path)
        manifest = save(source.open(), b"one")
        refuse = answers("copy", {0: AccessDeniedError("permission denied")}, key="")
        wire = acting(before=refuse.before)
        told: list[Progress] = []
        copy_across(wire.watch(source), "10", wire.watch(target), "10", on_progress=told.append)
        assert len(wire.keys("read_range")) == 1
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))
        assert (told[-1].done_bytes, told[-1].done_objects) == (manifest.total_bytes, 2)

    def test_other_credentials_are_not_used_for_both(self) -> None:
        source, target = one_bucket(Path())
        manifest = save(source.open(), b"one")
        wire = Wire()
        other = replace(target, storage_options={"key": "another"})
        copy_across(wire.watch(source), "10", wire.watch(other), "10")
        assert wire.keys("copy") == []
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))

    def test_a_stock_checkpoint_on_a_disk_does_not_share_its_bytes(self, tmp_path: Path) -> None:
        """Stock writers truncate files in place."""
        source, target = WAYS["one disk"](tmp_path)
        stock(source, "10")
        copy_across(source, "10", target, "10")
        (tmp_path / "run" / "10" / "__0_0.distcp").write_bytes(b"changed")
        assert contents(target, "10") == STOCK

    def test_a_folder_that_was_moved_away_leaves_nothing_in_the_next_one(self, tmp_path: Path) -> None:
        source, target = WAYS["one disk"](tmp_path)
        save(source.open(), b"one")
        folder = tmp_path / "archive" / "deep" / "10"

        def another_life() -> None:
            folder.rename(tmp_path / "moved")
            save(target.open(), b"two")

        wire = acting(before=once("copy", another_life))
        with pytest.raises(CheckpointChangedError):
            copy_across(wire.watch(source), "10", wire.watch(target), "10")
        assert keys_of(target.open(), "10") == expected_keys(read_manifest(target, "10"))
        assert load(target.open(), "10") == b"two"


def sorted_by_key(manifest: Manifest) -> list[Any]:
    return sorted(manifest.objects, key=lambda entry: entry.key)


class TestOntoItself:
    def test_the_same_name_of_the_same_directory_is_refused(self, pair: Pair) -> None:
        source, _ = pair
        manifest = save(source.open(), b"one")
        with pytest.raises(ConfigError, match="onto itself"):
            copy_across(source, "10", source, "10", overwrite=True)
        assert keys_of(source.open(), "10") == expected_keys(manifest)

    def test_so_is_another_spelling_of_it(self, tmp_path: Path) -> None:
        source = place_of(tmp_path / "run")
        save(source.open(), b"one")
        (tmp_path / "link").symlink_to(tmp_path / "run")
        (tmp_path / "run" / "best").symlink_to("10")
        for target, name in (
            (place_of(tmp_path / "link"), "10"),
            (place_of(f"file://{tmp_path}/other/../run/"), "10"),
            (source, "best"),
        ):
            with pytest.raises(ConfigError, match="onto itself"):
                copy_across(source, "10", target, name, overwrite=True)
        assert load(source.open(), "10") == b"one"

    @pytest.mark.parametrize("kind", ["ours", "stock"])
    def test_so_is_a_way_there_that_only_what_is_written_shows(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two endpoints of one server, or a mount of a bucket, look like two stores."""
        source = memory()
        if kind == "ours":
            save(source.open(), b"one")
        else:
            stock(source, "10")
        before = contents(source, "10")
        identities = itertools.count()
        monkeypatch.setattr(FaultStore, "identity", property(lambda store: f"store {next(identities)}"))
        wire = Wire()
        with pytest.raises(ConfigError, match="onto itself"):
            copy_across(wire.watch(source), "10", wire.watch(source), "10", overwrite=True)
        assert contents(source, "10") == before

    @pytest.mark.parametrize("way", ["one bucket", "one disk"])
    def test_neither_lies_inside_the_other(self, tmp_path: Path, way: str) -> None:
        source, _ = WAYS[way](tmp_path)
        save(source.open(), b"one")
        inside = replace(source, location=source.location.join("10"))
        around = replace(source, location=source.location.parent)
        for target, name in ((inside, "copy"), (around, source.location.name)):
            with pytest.raises(ConfigError, match="inside the other"):
                copy_across(source, "10", target, name, overwrite=True)
        assert [info.key for info in source.open().list() if "copy" in info.key] == []

    @pytest.mark.parametrize("way", ["one bucket", "one disk"])
    def test_a_directory_beside_the_checkpoint_is_no_part_of_it(self, tmp_path: Path, way: str) -> None:
        source, _ = WAYS[way](tmp_path)
        manifest = save(source.open(), b"one")
        target = replace(source, location=source.location.join("archive"))
        copy_across(source, "10", target, "10")
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))


# --- failures ----------------------------------------------------------------------------------------


class TestInterruptions:
    @pytest.mark.parametrize("is_done", [False, True])
    @pytest.mark.parametrize("way", ["one bucket", "two buckets"])
    def test_a_crash_at_any_call_leaves_no_copy_or_a_whole_one_and_the_next_call_ends_it(
        self, tmp_path: Path, way: str, is_done: bool
    ) -> None:
        outcomes, resumed = set(), 0
        for number in range(1, 200):
            source, target = WAYS[way](tmp_path)
            manifest = save(source.open(), b"one")
            data = data_of(source, "10", manifest)
            wire = crash_at(number, is_done=is_done)
            with suppress(SimulatedCrash):
                copy_across(wire.watch(source), "10", wire.watch(target), "10")
                break
            outcomes.add(is_committed(target, "10"))
            there = data_keys(target, "10")
            is_finished = not any(parse_copy_record_key(key) for key in keys_of(target.open(), "10"))
            if is_committed(target, "10") and is_finished:
                continue
            again = Wire()
            copy_across(again.watch(source), "10", again.watch(target), "10")
            copy = assert_is_copy(target, "10", manifest, data)
            made = {"/".join(key.split("/")[-2:]) for key in copied_keys(again)}
            assert made == {entry.key for entry in copy.objects} - there
            resumed += bool(there)
        assert outcomes == {False, True}
        assert resumed > 5

    @pytest.mark.parametrize("way", ["one bucket", "two buckets"])
    def test_a_crash_at_any_call_of_a_stock_copy_is_made_good_by_the_next(
        self, tmp_path: Path, way: str
    ) -> None:
        outcomes = set()
        for number in range(1, 200):
            source, target = WAYS[way](tmp_path)
            stock(source, "10")
            wire = crash_at(number, is_done=False)
            with suppress(SimulatedCrash):
                copy_across(wire.watch(source), "10", wire.watch(target), "10")
                break
            there = {key for key in contents(target, "10") if key.endswith(".distcp")}
            outcomes.add(".metadata" in contents(target, "10"))
            if ".metadata" in contents(target, "10"):
                continue
            again = Wire()
            copy_across(again.watch(source), "10", again.watch(target), "10")
            assert contents(target, "10") == STOCK
            made = {key.rpartition("/")[2] for key in copied_keys(again)}
            assert made - {".metadata"} == {"__0_0.distcp", "__1_0.distcp"} - there
        assert outcomes == {False, True}

    def test_a_failure_stops_the_rest_and_the_next_call_goes_on(self, apart: Pair) -> None:
        source, target = apart[0], replace(apart[1], options=ONE_BY_ONE)
        manifest = save(source.open(), b"one")
        wire = acting(before=answers("write_stream", {0: StorageFullError("full")}, key="").before)
        with pytest.raises(StorageFullError):
            copy_across(source, "10", wire.watch(target), "10")
        assert len(wire.keys("write_stream")) == 1
        assert not is_committed(target, "10")
        copy_across(source, "10", target, "10")
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))

    def test_a_disk_that_fills_up_is_left_without_a_torn_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, target = memory(), place_of(tmp_path)
        manifest = save(source.open(), b"one" * 1000)
        write = os.write

        def write_little(descriptor: int, data: memoryview) -> int:
            if len(data) > 2000:
                write(descriptor, data[:100])
                raise OSError(errno.ENOSPC, "no space left")
            return write(descriptor, data)

        with monkeypatch.context() as full:
            full.setattr(os, "write", write_little)
            with pytest.raises(StorageFullError):
                copy_across(source, "10", target, "10")
        assert data_keys(target, "10") == set()
        assert not is_committed(target, "10")
        copy_across(source, "10", target, "10")
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))

    def test_a_store_that_is_down_for_a_moment_is_asked_again(self, apart: Pair) -> None:
        source, target = apart
        manifest = save(source.open(), b"one")
        down = answers("read_range", {0: StoreUnavailableError("503")}, key="")
        wire = acting(before=down.before)
        with pytest.raises(StoreUnavailableError):
            copy_across(wire.watch(source), "10", target, "10")
        copy_across(wire.watch(source), "10", target, "10")
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))

    def test_a_caller_that_raises_ends_the_copy(self, apart: Pair) -> None:
        source, target = apart
        save(source.open(), b"one")

        def stop(now: Progress) -> None:
            if now.done_bytes:
                raise KeyError("enough")

        with pytest.raises(KeyError, match="enough"):
            copy_across(source, "10", target, "10", on_progress=stop)
        assert not is_committed(target, "10")


def copied_keys(wire: Wire) -> list[str]:
    return wire.keys("copy") + wire.keys("write_stream")


def data_keys(place: Place, name: str) -> set[str]:
    return {key for key in keys_of(place.open(), name) if key.endswith(".distcp")}


class TestChanges:
    def test_a_source_that_is_replaced_meanwhile_is_said_so(self, pair: Pair) -> None:
        source, target = pair
        save(source.open(), b"one")
        replaced = Script(before=first_of(("copy", "read_range"), lambda: replace_source(source)))
        wire = acting(before=replaced.before)
        with pytest.raises(CheckpointChangedError):
            copy_across(wire.watch(source), "10", wire.watch(target), "10")
        assert not is_committed(target, "10")
        manifest = read_manifest(source, "10")
        copy_across(source, "10", target, "10")
        copy = read_manifest(target, "10")
        assert copy.user_metadata == {"payload": "two"}
        assert data_of(target, "10", copy) == data_of(source, "10", manifest)

    def test_a_source_that_is_deleted_meanwhile_is_said_so(self, pair: Pair) -> None:
        source, target = pair
        save(source.open(), b"one")
        delete = first_of(("copy", "read_range"), lambda: delete_checkpoint(source.open().scope("10")))
        wire = acting(before=delete)
        with pytest.raises(CheckpointChangedError):
            copy_across(wire.watch(source), "10", wire.watch(target), "10")
        assert not is_committed(target, "10")

    def test_a_source_that_lacks_an_object_is_damaged(self, pair: Pair) -> None:
        source, target = pair
        manifest = save(source.open(), b"one")
        source.open().delete([f"10/{manifest.objects[0].key}"])
        with pytest.raises(CheckpointDamagedError, match=manifest.objects[0].key):
            copy_across(source, "10", target, "10")
        assert not is_committed(target, "10")

    def test_a_target_that_is_deleted_meanwhile_is_said_so(self, tmp_path: Path) -> None:
        source, target = WAYS["bucket to disk"](tmp_path)
        save(source.open(), b"one")
        wire = acting(
            after=once("write_stream", lambda: (tmp_path / "archive" / "10").rename(tmp_path / "x"))
        )
        with pytest.raises(CheckpointChangedError):
            copy_across(source, "10", wire.watch(target), "10")
        assert not (tmp_path / "archive" / "10").exists()

    def test_a_target_that_is_saved_meanwhile_wins(self, pair: Pair) -> None:
        source, target = pair
        save(source.open(), b"one")
        other = first_of(("copy", "read_range"), lambda: save(target.open(), b"other"))
        wire = acting(before=other)
        with pytest.raises(CheckpointExistsError):
            copy_across(wire.watch(source), "10", wire.watch(target), "10")
        assert load(target.open(), "10") == b"other"
        assert keys_of(target.open(), "10") == expected_keys(read_manifest(target, "10"))

    @pytest.mark.parametrize("way", STREAMING)
    def test_a_stock_source_that_is_written_anew_meanwhile_is_no_copy(self, tmp_path: Path, way: str) -> None:
        source, target = WAYS[way](tmp_path)
        stock(source, "10")
        wire = acting(after=once("read_range", lambda: stock(source, "10", {**STOCK, "__0_0.distcp": b"A"})))
        with pytest.raises(CheckpointChangedError, match="written anew"):
            copy_across(wire.watch(source), "10", target, "10")
        assert ".metadata" not in contents(target, "10")

    @pytest.mark.parametrize("way", STREAMING)
    def test_a_stock_source_that_is_cut_meanwhile_is_said_so(self, tmp_path: Path, way: str) -> None:
        source, target = WAYS[way](tmp_path)
        stock(source, "10", {**STOCK, "__0_0.distcp": b"long"})
        cut = once("read_range", lambda: stock(source, "10"))
        with pytest.raises(CheckpointChangedError, match="written anew"):
            copy_across(acting(before=cut).watch(source), "10", replace(target, options=ONE_BY_ONE), "10")


def first_of(operations: tuple[str, ...], act: Callable[[], object]) -> Hook:
    """A hook that acts at the first call of one of these operations."""
    pending = [act]

    def at_call(called: str, key: str) -> None:
        if called in operations and pending:
            pending.pop()()

    return at_call


def replace_source(source: Place) -> None:
    save(source.open(), b"two", overwrite=True)


class TestDamage:
    def test_a_flipped_bit_names_the_object_and_nothing_is_committed(self, apart: Pair) -> None:
        source, target = apart
        manifest = save(source.open(), b"one")
        entry = manifest.objects[1]
        data = bytearray(source.open().read(f"10/{entry.key}"))
        data[3] ^= 1
        source.open().write(f"10/{entry.key}", data)
        with pytest.raises(IntegrityError, match=entry.key) as caught:
            copy_across(source, "10", target, "10")
        assert caught.value.url == f"{source.open().url}/10"
        assert not is_committed(target, "10")
        token = {key.rpartition("/")[2] for key in data_keys(target, "10")}
        assert token <= {"0.distcp"}, "the damaged object is not there"

    def test_a_bit_that_flipped_on_the_way_is_read_once_more(self, apart: Pair) -> None:
        source, target = apart
        manifest = save(source.open(), b"one")
        reads = itertools.count()
        flip = corrupt_reads(lambda call: call.operation == "read_range" and next(reads) == 0)
        wire = Wire(after=flip)
        told: list[Progress] = []
        copy_across(wire.watch(source), "10", target, "10", on_progress=told.append)
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))
        assert len(wire.keys("read_range")) == 3
        assert told[-1].done_bytes == manifest.total_bytes, "what was read twice counts once"

    def test_a_damaged_index_is_not_copied(self, pair: Pair) -> None:
        source, target = pair
        manifest = save(source.open(), b"one")
        assert manifest.index is not None
        source.open().write(f"10/{manifest.index.key}", bytes(manifest.index.size_bytes))
        with pytest.raises(IntegrityError, match="index"):
            copy_across(source, "10", target, "10")
        assert data_keys(target, "10") == set()


# --- servers -----------------------------------------------------------------------------------------


def on_server(server: LocalServer, url: str) -> Place:
    return place_of(url, storage_options=server.storage_options())


def through(proxy: FaultProxy, place: Place) -> Place:
    return replace(
        place, storage_options={**(place.storage_options or {}), "endpoint_url": proxy.endpoint_url}
    )


def save_large(place: Place, size_bytes: int) -> Manifest:
    """Save two objects of a size, under a manifest that stays small."""
    payload = (b"0123456789abcde" * (size_bytes // 15 + 1))[:size_bytes]
    checkpoint = open_for_save(place.open(), "10", overwrite=False)
    done = upload(checkpoint, payload)
    draft = replace(done.draft, user_metadata={}, content_digest="large")
    manifest = commit_save(
        checkpoint, draft, attempt=done.attempt, overwrite=False, expected=done.expected, options=OPTIONS
    )
    finish_replacement(checkpoint, manifest, done.stock)
    return manifest


@pytest.mark.server
class TestServers:
    def test_two_prefixes_of_a_bucket_are_copied_by_the_server(
        self, ministack: LocalServer, fresh_root: FreshRoot, metered: list[MeteredStore]
    ) -> None:
        source, target = (on_server(ministack, fresh_root(ministack)) for _ in range(2))
        manifest = save(source.open(), b"one")
        data = data_of(source, "10", manifest)
        metered.clear()
        with FaultProxy(ministack.endpoint_url) as proxy:
            copy_across(through(proxy, source), "10", through(proxy, target), "10")
            moved = [each.operation for each in proxy.requests if each.path.endswith(".distcp")]
        assert moved.count("CopyObject") == 2
        assert set(moved) <= {"CopyObject", "HeadObject"}
        total = [store.snapshot() for store in metered]
        assert sum(each.requests.get("read_range", 0) for each in total) == 0
        small_bytes = 4 * max(entry.size_bytes for entry in manifest.objects) + 20_000
        assert sum(each.downloaded_bytes for each in total) < small_bytes
        assert_is_copy(target, "10", manifest, data)

    def test_two_servers_are_streamed_between(
        self, ministack: LocalServer, seaweed: LocalServer, fresh_root: FreshRoot
    ) -> None:
        options = Options(transfer=TransferOptions(part_bytes=5 * MiB, budget_bytes=20 * MiB))
        source = on_server(ministack, fresh_root(ministack))
        target = replace(on_server(seaweed, fresh_root(seaweed)), options=options)
        manifest = save_large(source, 12 * MiB)
        copy_across(source, "10", target, "10")
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))
        assert multipart_count(seaweed, target, "10") == 2

    def test_a_store_that_ignores_create_only_is_refused_as_for_a_save(
        self, rclone: LocalServer, fresh_bucket: Callable[[LocalServer], str]
    ) -> None:
        source = memory()
        manifest = save(source.open(), b"one")
        target = on_server(rclone, f"s3://{fresh_bucket(rclone)}/run")
        with pytest.raises(UnsupportedStoreError, match="accept_single_writer"):
            copy_across(source, "10", target, "10")
        assert target.open().list() == []
        accepting = replace(target, options=Options(commit=CommitOptions(accept_single_writer=True)))
        copy_across(source, "10", accepting, "10")
        assert_is_copy(accepting, "10", manifest, data_of(source, "10", manifest))

    def test_a_stock_checkpoint_is_copied_to_a_server_and_back(
        self, ministack: LocalServer, fresh_root: FreshRoot, tmp_path: Path
    ) -> None:
        first, second = place_of(tmp_path / "first"), place_of(tmp_path / "second")
        remote = on_server(ministack, fresh_root(ministack))
        stock(first, "10")
        copy_across(first, "10", remote, "10")
        copy_across(remote, "10", remote, "20")
        copy_across(remote, "20", second, "10")
        assert contents(second, "10") == STOCK

    @pytest.mark.parametrize("transport", [None, "fsspec"])
    def test_an_error_inside_of_a_successful_answer_is_an_error(
        self, ministack: LocalServer, fresh_root: FreshRoot, transport: str | None
    ) -> None:
        """S3 may answer a copy with 200 and say InternalError in the body."""
        source, target = (on_server(ministack, fresh_root(ministack)) for _ in range(2))
        manifest = save(source.open(), b"one")
        with FaultProxy(ministack.endpoint_url) as proxy:
            first, second = (
                replace(through(proxy, place), transport=transport, options=ONCE_ONLY)
                for place in (source, target)
            )
            rule = Rule(operation="CopyObject", fault=Reply(200, code="InternalError"))
            with proxy.inject(rule), pytest.raises(StoreUnavailableError, match="InternalError"):
                copy_across(first, "10", second, "10")
        assert not is_committed(target, "10")
        copy_across(source, "10", target, "10")
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))

    def test_a_copy_that_did_not_happen_although_it_was_answered_is_noticed(
        self, ministack: LocalServer, fresh_root: FreshRoot
    ) -> None:
        """By the store, which looks at each copy, or by the listing before the commit."""
        source, target = (on_server(ministack, fresh_root(ministack)) for _ in range(2))
        save(source.open(), b"one")
        with FaultProxy(ministack.endpoint_url) as proxy:
            first, second = (replace(through(proxy, place), options=ONCE_ONLY) for place in (source, target))
            rule = Rule(operation="CopyObject", fault=Reply(200))
            with proxy.inject(rule), pytest.raises((SaveFailedError, StoreUnavailableError)):
                copy_across(first, "10", second, "10")
        assert not is_committed(target, "10")

    @pytest.mark.parametrize("product", ["ministack", "seaweed"])
    def test_an_object_too_large_for_one_request_is_copied_in_parts(
        self,
        request: pytest.FixtureRequest,
        fresh_root: FreshRoot,
        monkeypatch: pytest.MonkeyPatch,
        product: str,
    ) -> None:
        """S3 copies up to 5 GiB at once. Here everything above 1 MiB counts as larger."""
        server: LocalServer = request.getfixturevalue(product)
        source, target = (on_server(server, fresh_root(server)) for _ in range(2))
        manifest = save_large(source, 12 * MiB)
        monkeypatch.setattr("remote_ckpt.store.obstore.MAX_COPY_BYTES", 1 * MiB)
        with FaultProxy(server.endpoint_url) as proxy:
            copy_across(through(proxy, source), "10", through(proxy, target), "10")
            moved = [each.operation for each in proxy.requests if each.path.endswith(".distcp")]
        assert moved.count("UploadPartCopy") >= 4, "two objects, of two parts at least"
        assert "CopyObject" not in moved, "nothing was tried in one request before"
        assert_is_copy(target, "10", manifest, data_of(source, "10", manifest))
        assert multipart_count(server, target, "10") == 2

    @pytest.mark.parametrize(
        "asked",
        [
            {"ServerSideEncryption": "AES256"},
            {"server_side_encryption": "sse-c", "sse_customer_key_base64": b64encode(bytes(32)).decode()},
            {"requester_pays": True},
        ],
        ids=lambda asked: next(iter(asked)),
    )
    def test_a_copy_in_parts_asks_for_what_one_in_one_request_asks_for(
        self,
        ministack: LocalServer,
        fresh_root: FreshRoot,
        monkeypatch: pytest.MonkeyPatch,
        asked: dict[str, Any],
    ) -> None:
        """A bucket's policy may refuse every write that does not ask for encryption."""
        place = on_server(ministack, fresh_root(ministack))
        place = replace(place, storage_options={**(place.storage_options or {}), **asked})
        save_large(place, 9 * MiB)  # boto3 cuts what is larger than 8 MiB
        found: dict[str, dict[str, str]] = {}
        with FaultProxy(ministack.endpoint_url) as proxy:
            for name, largest_bytes in (("20", 5 * GiB), ("30", 1 * MiB)):
                monkeypatch.setattr("remote_ckpt.store.obstore.MAX_COPY_BYTES", largest_bytes)
                copy_across(through(proxy, place), "10", through(proxy, place), name)
            for each in proxy.requests:
                found[each.operation] = {name: text for name, text in each.headers.items() if is_asked(name)}
        assert found["CopyObject"] != {}
        assert found["CreateMultipartUpload"] | found.get("UploadPartCopy", {}) == found["CopyObject"]


def is_asked(header: str) -> bool:
    return "-encryption" in header or header == "x-amz-request-payer"


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> list[MeteredStore]:
    """Every store that a place opens from now on."""
    stores: list[MeteredStore] = []
    open_place = Place.open

    def watched(place: Place) -> Store:
        store = open_place(place)
        assert isinstance(store, MeteredStore)
        stores.append(store)
        return store

    monkeypatch.setattr(Place, "open", watched)
    return stores


def multipart_count(server: LocalServer, place: Place, name: str) -> int:
    """How many of a copy's data objects were written in parts, as their tags tell."""
    location = place.location
    keys = [f"{location.path}/{name}/{entry.key}" for entry in read_manifest(place, name).objects]
    heads = [server.client().head_object(Bucket=location.bucket, Key=key) for key in keys]
    return sum("-" in head["ETag"] for head in heads)
