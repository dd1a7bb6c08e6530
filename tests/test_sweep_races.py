"""The sweep dies at any of its requests, and others change the directory at any of them; and real servers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
from protocol import expected_keys, keys_of, load, manifests_of, save
from sweeping import (
    TWO_DAYS,
    AgedStore,
    aged,
    all_keys,
    leave_everything,
    leave_uncommitted,
    newest_of,
    reasons,
    recorded,
)

from remote_ckpt.changes import set_pinned
from remote_ckpt.copies import copy_checkpoint
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import AccessDeniedError
from remote_ckpt.keys import is_scratch_key, manifest_key
from remote_ckpt.newest import read_newest
from remote_ckpt.probe import probe_create_only
from remote_ckpt.store import open_store
from remote_ckpt.store.base import CreateOnly, Store, StoreCapabilities
from remote_ckpt.store.fsspec import open_fsspec_store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.obstore import ObstoreStore, open_obstore_store
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.sweep import sweep
from remote_ckpt.sweep_plan import LEFTOVER, TOMBSTONE
from remote_ckpt.testing.faults import FaultStore, SimulatedCrash, StoreCall
from remote_ckpt.testing.s3_contract import FreshRoot, begin_upload, open_upload_keys
from remote_ckpt.testing.servers import LocalServer
from remote_ckpt.url import parse_location

PAYLOADS = {"10": b"new", "20": None, "30": None, "40": b"sound", "40_keep": b"copied"}


@dataclass(frozen=True)
class World:
    """A directory with all kinds of garbage, of which each test gets copies.

    Args:
        fresh: Makes a copy.
        ages: How long ago what it holds was written.
        garbage: The keys that a sweep removes.
        kept: All others.
        step: Every how many requests something happens: a disk takes its time to sync.
    """

    fresh: Callable[[], Store]
    ages: dict[str, timedelta]
    garbage: set[str]
    kept: set[str]
    step: int

    def moments(self, recorder: FaultStore) -> Iterator[int]:
        """Numbers of requests, of those that were recorded, at which something happens."""
        return iter(range(1, len(recorder.calls) + 1, self.step))


@pytest.fixture(scope="module", params=["memory", "local"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    template: Store = MemoryStore.fresh() if request.param == "memory" else LocalStore(folder)
    garbage = leave_everything(template).keys()

    def fresh() -> Store:
        if not isinstance(template, LocalStore):
            return _clone(template)
        copy = tmp_path_factory.mktemp("copy") / "run"
        shutil.copytree(folder, copy)
        return LocalStore(copy)

    keys = all_keys(template)
    step = 5 if isinstance(template, LocalStore) else 1
    return World(fresh, dict.fromkeys(keys, TWO_DAYS), set(garbage), keys - garbage, step)


def _clone(template: Store) -> Store:
    root = MemoryStore.fresh()
    for info in template.list():
        root.write(info.key, template.read(info.key))
    return root


def read_by_keys(root: Store, name: str) -> int | None:
    """Return the generation that a reader finds who may not list; None where it is refused."""
    refusal = AccessDeniedError("no right to list")

    def before(call: StoreCall) -> None:
        if call.operation == "list_children":
            raise refusal

    with suppress(AccessDeniedError):
        found = read_newest(FaultStore(root.scope(name), before=before))
        return None if found is None else found.generation
    return None


def check_promises(root: Store, world: World) -> None:
    assert {name: load(root, name) for name in PAYLOADS} == PAYLOADS
    assert world.kept <= all_keys(root)
    for name in ("10", "40"):
        assert read_by_keys(root, name) in (None, newest_of(root, name).generation)


class TestCrashes:
    @pytest.mark.parametrize("is_done", [False, True])
    def test_a_sweep_that_dies_anywhere_breaks_nothing_and_the_next_one_finishes_it(
        self, world: World, is_done: bool
    ) -> None:
        recorder = recorded(world.fresh())
        sweep(AgedStore(recorder, world.ages), dry_run=False)
        assert len(recorder.calls) > 40
        for number in world.moments(recorder):
            root = world.fresh()
            dying = FaultStore.crashing(root, number, is_done=is_done)
            with pytest.raises(SimulatedCrash):
                sweep(AgedStore(dying, world.ages), dry_run=False)
            check_promises(root, world)
            report = sweep(AgedStore(root, world.ages), dry_run=False)
            assert report.failures == ()
            assert all_keys(root) == world.kept
            check_promises(root, world)

    def test_one_that_removes_marks_of_deleted_checkpoints_brings_none_back(self, world: World) -> None:
        tombstone = f"30/{manifest_key(2)}"
        recorder = recorded(world.fresh())
        sweep(AgedStore(recorder, world.ages), dry_run=False, tombstones=True)
        for number in world.moments(recorder):
            root = world.fresh()
            dying = FaultStore.crashing(root, number, is_done=bool(number % 2))
            with pytest.raises(SimulatedCrash):
                sweep(AgedStore(dying, world.ages), dry_run=False, tombstones=True)
            assert load(root, "30") is None
            assert tombstone in all_keys(root) or not manifests_of(root, "30")
            sweep(AgedStore(root, world.ages), dry_run=False, tombstones=True)
            assert all_keys(root) == world.kept - {tombstone}

    def test_readers_that_may_not_list_never_find_an_older_generation(self, world: World) -> None:
        root = world.fresh()
        seen = set()

        def look(call: StoreCall, result: object) -> object:
            seen.add(read_by_keys(root, "10"))
            return result

        sweep(AgedStore(FaultStore(root, after=look), world.ages), dry_run=False)
        assert seen == {3, None}


def visible_keys(root: Store) -> set[str]:
    """Keys of all objects: files that are being written at this moment have hidden names."""
    return {info.key for info in root.list()}


def at_call(number: int, act: Callable[[], None]) -> Callable[[StoreCall], None]:
    def before(call: StoreCall) -> None:
        if call.number == number:
            act()

    return before


Act = Callable[[Store], object]
ACTS: dict[str, tuple[str, Act, bytes | None]] = {
    "a replacement": ("10", lambda root: save(root, b"newer", name="10", overwrite=True), b"newer"),
    "a pin": ("10", lambda root: set_pinned(root.scope("10"), True), b"new"),
    "a deletion": ("10", lambda root: delete_checkpoint(root.scope("10")), None),
    "a first save": ("20", lambda root: save(root, b"first", name="20"), b"first"),
    "a save of a deleted name": ("30", lambda root: save(root, b"again", name="30"), b"again"),
    "a copy": ("20", lambda root: copy_checkpoint(root, "40", "20"), b"copied"),
    "the deletion of a copy": ("40_keep", lambda root: delete_checkpoint(root.scope("40_keep")), None),
    "a killed save": ("10", lambda root: leave_uncommitted(root, "10"), b"new"),
}


class TestOthers:
    @pytest.mark.parametrize("act", ACTS)
    def test_what_others_do_during_a_sweep_is_kept(self, world: World, act: str) -> None:
        name, call_act, payload = ACTS[act]
        recorder = recorded(world.fresh())
        sweep(AgedStore(recorder, world.ages), dry_run=False, tombstones=True)
        for number in world.moments(recorder):
            root, young = world.fresh(), set[str]()

            def act_once(root: Store = root, young: set[str] = young) -> None:
                there = visible_keys(root)
                call_act(root)
                young.update(visible_keys(root) - there)

            store = AgedStore(FaultStore(root, before=at_call(number, act_once)), world.ages)
            report = sweep(store, dry_run=False, tombstones=True)
            assert {failure.key for failure in report.failures} <= {name}
            self._check(root, name, payload, is_copy=act == "a copy")
            assert young <= visible_keys(root)
            assert sweep(aged(root), dry_run=False).failures == ()
            self._check(root, name, payload, is_copy=act == "a copy")
            # A new save of a deleted name uses these again.
            again = {"30/.metadata", f"30/{manifest_key(1)}"} if name == "30" else set[str]()
            assert world.garbage & visible_keys(root) <= again

    def _check(self, root: Store, name: str, payload: bytes | None, *, is_copy: bool) -> None:
        others = {each: said for each, said in PAYLOADS.items() if each != name}
        assert {each: load(root, each) for each in others} == others
        if is_copy:  # its objects hold the source's keys, so only their presence is looked at
            assert expected_keys(newest_of(root, name).manifest) <= keys_of(root, name)
        else:
            assert load(root, name) == payload

    def test_two_sweeps_at_once_do_what_one_does(self, world: World) -> None:
        recorder = recorded(world.fresh())
        sweep(AgedStore(recorder, world.ages), dry_run=False)
        for number in world.moments(recorder):
            root = world.fresh()
            removed: list[int] = []

            def sweep_once(root: Store = root, removed: list[int] = removed) -> None:
                other = sweep(AgedStore(root, world.ages), dry_run=False)
                assert other.failures == ()
                removed.append(other.removed_count)

            store = AgedStore(FaultStore(root, before=at_call(number, sweep_once)), world.ages)
            report = sweep(store, dry_run=False)
            assert report.failures == ()
            assert all_keys(root) == world.kept
            assert len(removed) == 1


class Probed(DelegatingStore):
    """A store of which nobody knows whether it creates only what is absent."""

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(self.inner.capabilities, create_only=CreateOnly.PROBE)


class TestScratch:
    def test_what_a_probe_leaves_when_its_process_dies_is_known_as_such(self) -> None:
        recorder = recorded(MemoryStore.fresh())
        probe_create_only(Probed(recorder))
        left = set[str]()
        for number in range(1, len(recorder.calls) + 1):
            root = MemoryStore.fresh()
            with suppress(SimulatedCrash):
                probe_create_only(Probed(FaultStore.crashing(root, number, is_done=True)))
            left |= all_keys(root)
        assert len(left) > 2
        assert all(map(is_scratch_key, left))

    def test_what_a_look_at_the_clock_leaves_when_its_process_dies_is_known_as_such(
        self, ministack: LocalServer, fresh_root: FreshRoot, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stores: list[Store] = [
            open_fsspec_store(parse_location("memory://dying-clock")),
            open_obstore_store(
                parse_location(fresh_root(ministack)), storage_options=ministack.storage_options()
            ),
        ]
        for store in stores:
            monkeypatch.setattr(store, "_delete_one", lambda key: None)
            store._marker_time() if isinstance(store, ObstoreStore) else store.clock()
            (info,) = store.list()
            assert is_scratch_key(info.key)


class TestServers:
    @pytest.fixture(params=["ministack", pytest.param("seaweed", marks=pytest.mark.server)])
    def server(self, request: pytest.FixtureRequest) -> LocalServer:
        found: LocalServer = request.getfixturevalue(request.param)
        return found

    @pytest.mark.parametrize("transport", ["obstore", "fsspec"])
    def test_all_that_nobody_needs_goes_from_a_bucket_and_nothing_else(
        self, server: LocalServer, fresh_root: FreshRoot, transport: str
    ) -> None:
        root = open_store(fresh_root(server), storage_options=server.storage_options(), transport=transport)
        garbage = leave_everything(root)
        for key in (
            "10/d-0123456789abcdef/5.distcp",
            "20/d-0123456789abcdef/0.distcp",
            "99/index.20200101T000000Z-0123456789ab.json.gz",
        ):
            begin_upload(server, root, key)
            garbage[key] = LEFTOVER["upload"]
        foreign = ("10/other.bin", "logs/x/d-0123456789abcdef/0.distcp", "50/__0_0.distcp", ".metadata")
        for key in foreign:
            begin_upload(server, root, key)
        kept = all_keys(root) - garbage.keys()
        said = sweep(aged(root))
        assert reasons(said) == garbage
        assert (said.warnings, said.is_dry_run) == ((), True)
        assert all_keys(root) == kept | garbage.keys()
        report = sweep(aged(root), dry_run=False)
        assert report.failures == ()
        assert report.removed_count == len(garbage)
        assert all_keys(root) == kept
        assert {name: load(root, name) for name in PAYLOADS} == PAYLOADS
        # SeaweedFS goes on listing the prefixes of what is gone: they are no saves in progress.
        tombstone = f"30/{manifest_key(2)}"
        assert reasons(sweep(aged(root), dry_run=False, tombstones=True)) == {tombstone: TOMBSTONE}
        assert all_keys(root) == kept - {tombstone}
        prefix = f"{parse_location(root.url).path}/"
        assert {key.removeprefix(prefix) for key in open_upload_keys(server, root)} == set(foreign)

    def test_a_young_upload_stays(self, ministack: LocalServer, fresh_root: FreshRoot) -> None:
        root = open_store(fresh_root(ministack), storage_options=ministack.storage_options())
        begin_upload(ministack, root, "10/d-0123456789abcdef/0.distcp")
        assert sweep(root, dry_run=False).garbage == ()
        assert len(root.list_leftovers()) == 1

    def test_uploads_of_a_checkpoint_that_is_passed_over_stay(
        self, ministack: LocalServer, fresh_root: FreshRoot
    ) -> None:
        root = open_store(fresh_root(ministack), storage_options=ministack.storage_options())
        lost = save(root, b"one").objects[0].key
        root.delete([f"10/{lost}"])
        begin_upload(ministack, root, f"10/{lost}")
        report = sweep(aged(root), dry_run=False)
        assert report.garbage == ()
        assert "passing over checkpoint 10" in report.warnings[0]
        assert len(root.list_leftovers()) == 1

    def test_a_bucket_s_whole_root_is_swept_by_the_same_rules(
        self, ministack: LocalServer, fresh_bucket: Callable[[LocalServer], str]
    ) -> None:
        root = open_store(f"s3://{fresh_bucket(ministack)}", storage_options=ministack.storage_options())
        garbage = leave_uncommitted(root, "20")
        root.write("somebody/else/d-0123456789abcdef/0.distcp", b"1")
        ministack.client().create_multipart_upload(Bucket=parse_location(root.url).bucket, Key="20/else.bin")
        report = sweep(aged(root), dry_run=False)
        assert reasons(report) == garbage
        assert all_keys(root) == {"somebody/else/d-0123456789abcdef/0.distcp", "20/else.bin"}

    def test_without_boto3_objects_are_swept_and_the_extra_is_named(
        self, ministack: LocalServer, fresh_root: FreshRoot, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = open_store(fresh_root(ministack), storage_options=ministack.storage_options())
        garbage = leave_uncommitted(root, "20")
        old = aged(root)
        monkeypatch.setitem(sys.modules, "boto3", None)
        report = sweep(old, dry_run=False)
        assert report.removed_count == len(garbage)
        (warning,) = report.warnings
        assert "were not looked at" in warning
        assert "pip install 'remote-ckpt[aws]'" in warning
