"""Copies within a run: whole or absent, under new keys, resumed, and never mixed with another attempt."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
from protocol import (
    OPTIONS,
    Script,
    answers,
    expected_keys,
    keys_of,
    later,
    load,
    manifests_of,
    once,
    save,
    scripted,
)

from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.checksum import crc32c
from remote_ckpt.commit import begin_save
from remote_ckpt.copies import copy_along, copy_checkpoint
from remote_ckpt.copy_attempt import CopyAttempt
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    SaveFailedError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.index import BytesEntry, format_index, parse_index
from remote_ckpt.keys import is_token, own_key, parse_copy_record_key
from remote_ckpt.manifest import format_manifest
from remote_ckpt.newest import named_keys, read_newest
from remote_ckpt.options import TransferOptions
from remote_ckpt.progress import Progress
from remote_ckpt.routes import Route
from remote_ckpt.stock_copies import copy_stock_checkpoint
from remote_ckpt.store.base import Buffer, CreateOnly, Store, StoreCapabilities
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.testing.faults import FaultStore, SimulatedCrash

ONE_BY_ONE = replace(OPTIONS, transfer=TransferOptions(concurrency=1))


@pytest.fixture(params=["memory", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore.fresh() if request.param == "memory" else LocalStore(tmp_path / "run")


def payload_of(root: Store, name: str) -> str | None:
    """Read a copy: its objects hold the source's keys, so only sizes, checksums and names are looked at."""
    newest = read_newest(root.scope(name, create=True))
    if newest is None or not newest.is_live:
        return None
    sizes = {info.key: info.size_bytes for info in root.scope(name).list()}
    manifest = newest.manifest
    entries = [*manifest.objects, manifest.index, manifest.stock_metadata]
    assert all(entry is not None and sizes[entry.key] == entry.size_bytes for entry in entries)
    return str(manifest.user_metadata["payload"])


def test_a_copy_says_what_its_source_says_under_its_own_name_and_keys(root: Store) -> None:
    save(root, b"one")
    source = annotate(root.scope("10"), metrics={"loss": 0.5})
    copy = copy_checkpoint(root, "10", "10_keep")
    assert (copy.name, copy.step, copy.generation, copy.pinned) == ("10_keep", None, 1, False)
    assert (copy.content_digest, copy.metrics) == (source.content_digest, {"loss": 0.5})
    assert [(entry.size_bytes, entry.crc32c) for entry in copy.objects] == [
        (entry.size_bytes, entry.crc32c) for entry in source.objects
    ]
    assert named_keys(copy).isdisjoint(named_keys(source))
    assert keys_of(root, "10_keep") == expected_keys(copy)
    assert all(own_key(key) for key in keys_of(root, "10_keep"))


def test_its_data_is_that_of_the_source(root: Store) -> None:
    source = save(root, b"one")
    copy = copy_checkpoint(root, "10", "best")
    for theirs, ours in zip(source.objects, copy.objects, strict=True):
        assert root.read(f"10/{theirs.key}") == root.read(f"best/{ours.key}")


def test_index_and_stock_metadata_name_the_copys_own_objects(root: Store) -> None:
    source = save(root, b"one")
    copy = copy_checkpoint(root, "10", "best")
    assert copy.index is not None
    assert copy.stock_metadata is not None
    index = parse_index(root.read(f"best/{copy.index.key}"), url=root.url, key=copy.index.key)
    keys = [entry.key for entry in copy.objects]
    assert (index.objects, index.save_id) == (keys, copy.save_id)
    stock = root.read("best/.metadata")
    assert stock == f"stock {' '.join(keys)} of {copy.save_id}".encode()
    assert len(stock) == len(root.read(f"10/metadata.{source.save_id}.pickle"))
    assert all(is_token(key.partition("/")[0]) for key in keys)


def test_names_of_tensors_that_look_like_a_data_folder_stay_as_they_are() -> None:
    """The index keeps them, so the metadata for stock readers must as well."""
    source = save(MemoryStore.fresh(), b"one")
    folder = source.objects[0].key.partition("/")[0]
    copy = CopyAttempt("best", begin_save(MemoryStore.fresh(), OPTIONS), 0)
    found = copy.rename_in(f"d-0123456789abcdef/w in {folder}/0.distcp".encode(), source)
    assert found == f"d-0123456789abcdef/w in {copy.rename(f'{folder}/0.distcp')}".encode()
    assert copy.rename(f"{folder}/0.distcp") != f"{folder}/0.distcp"


def test_the_copy_outlives_its_source(root: Store) -> None:
    save(root, b"one")
    copy = copy_checkpoint(root, "10", "10_keep")
    delete_checkpoint(root.scope("10"))
    assert payload_of(root, "10_keep") == "one"
    assert root.read(f"10_keep/{copy.objects[0].key}").startswith(b"one")


def test_copying_again_after_a_deletion_uses_new_keys(root: Store) -> None:
    """A slow deletion of the first copy must not hit the second."""
    save(root, b"one")
    first = copy_checkpoint(root, "10", "10_keep")
    delete_checkpoint(root.scope("10_keep"))
    second = copy_checkpoint(root, "10", "10_keep")
    assert named_keys(first).isdisjoint(named_keys(second))


def test_an_existing_target_is_refused_unless_told(root: Store) -> None:
    save(root, b"one")
    save(root, b"two", name="best")
    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(root, "10", "best")
    assert load(root, "best") == b"two"
    copy = copy_checkpoint(root, "10", "best", overwrite=True)
    assert copy.generation == 2
    assert keys_of(root, "best") == expected_keys(copy)


def test_a_pinned_target_is_refused_and_a_pinned_source_gives_an_unpinned_copy(root: Store) -> None:
    for name in ("10", "best"):
        save(root, name.encode(), name=name)
        set_pinned(root.scope(name), True)
    with pytest.raises(CheckpointPinnedError):
        copy_checkpoint(root, "10", "best", overwrite=True)
    assert not copy_checkpoint(root, "10", "10_keep").pinned


def test_a_missing_source_and_one_without_manifest_are_refused(root: Store) -> None:
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(root, "10", "best")
    root.write("20/.metadata", b"stock")
    with pytest.raises(CheckpointNotFoundError, match="manifest"):
        copy_checkpoint(root, "20", "best")


def test_a_checkpoint_is_not_copied_onto_itself(root: Store) -> None:
    with pytest.raises(ConfigError, match="onto itself"):
        copy_checkpoint(root, "10", "10", overwrite=True)


def test_a_source_that_lacks_an_object_is_damaged_and_nothing_is_committed(root: Store) -> None:
    manifest = save(root, b"one")
    root.delete([f"10/{manifest.objects[0].key}"])
    with pytest.raises(CheckpointDamagedError, match=manifest.objects[0].key):
        copy_checkpoint(root, "10", "best")
    assert payload_of(root, "best") is None


def test_a_source_that_is_replaced_meanwhile_is_said_so() -> None:
    memory = MemoryStore.fresh()
    save(memory, b"one")
    store = scripted(memory, Script(before=once("copy", lambda: save(memory, b"two", overwrite=True))))
    with pytest.raises(CheckpointChangedError):
        copy_checkpoint(store, "10", "best")
    assert copy_checkpoint(memory, "10", "best").user_metadata == {"payload": "two"}


@pytest.mark.parametrize("is_done", [False, True])
def test_a_crash_at_any_call_leaves_no_copy_or_a_whole_one_and_the_next_call_ends_it(is_done: bool) -> None:
    outcomes = set()
    for number in range(1, 100):
        memory = MemoryStore.fresh()
        save(memory, b"one")
        with suppress(SimulatedCrash):
            copy_checkpoint(FaultStore.crashing(memory, number, is_done=is_done), "10", "best")
            break
        outcomes.add(payload_of(memory, "best"))
        is_finished = not any(parse_copy_record_key(key) for key in keys_of(memory, "best"))
        if payload_of(memory, "best") is not None and is_finished:
            continue
        copy = copy_checkpoint(memory, "10", "best")
        assert payload_of(memory, "best") == "one"
        # Only where the crash hid that the record was written at all may a second attempt have begun.
        assert expected_keys(copy) == keys_of(memory, "best")
    assert number > 10
    assert outcomes == {None, "one"}


def test_a_resumed_copy_does_not_copy_again_what_is_there() -> None:
    memory = MemoryStore.fresh()
    source = save(memory, b"one")
    store = scripted(memory, answers("create", {0: SimulatedCrash()}))
    with pytest.raises(SimulatedCrash):
        copy_checkpoint(store, "10", "best")
    assert [call.operation for call in store.calls].count("copy") == len(source.objects)
    again = FaultStore(memory)
    copy = copy_checkpoint(again, "10", "best")
    assert "copy" not in [call.operation for call in again.calls]
    assert keys_of(memory, "best") == expected_keys(copy)


def test_a_resumed_copy_between_stores_reads_back_what_is_there() -> None:
    source, target = MemoryStore.fresh(), MemoryStore.fresh()
    save(source, b"one")
    crashing = scripted(target, answers("write", {1: SimulatedCrash()}, key=""))
    with suppress(SimulatedCrash):
        copy_along(Route(source, "10", crashing, "best"))
    damaged, sound = (f"best/{key}" for key in sorted(keys_of(target, "best")) if key.endswith(".distcp"))
    target.write(damaged, b"X" * target.info(damaged).size_bytes)
    again = FaultStore(target)
    copy = copy_along(Route(source, "10", again, "best"))
    streamed = [call.key or "" for call in again.calls if call.operation == "write_stream"]
    assert [key for key in (damaged, sound) if any(key.endswith(each) for each in streamed)] == [damaged]
    assert {crc32c(target.read(f"best/{entry.key}")) == entry.crc32c for entry in copy.objects} == {True}


def test_a_failed_object_copy_is_raised_and_the_rest_is_kept_for_the_next_call() -> None:
    memory = MemoryStore.fresh()
    save(memory, b"one")
    with pytest.raises(StoreUnavailableError):
        copy_checkpoint(
            scripted(memory, answers("copy", {1: StoreUnavailableError("503")}, key="")), "10", "best"
        )
    again = FaultStore(memory)
    copy_checkpoint(again, "10", "best")
    assert [call.operation for call in again.calls].count("copy") == 1


def test_an_attempt_is_not_resumed_once_its_target_changed() -> None:
    """The keys of the interrupted attempt may be in somebody's tombstone by now."""
    memory = MemoryStore.fresh()
    save(memory, b"one")
    with pytest.raises(SimulatedCrash):
        copy_checkpoint(scripted(memory, answers("create", {0: SimulatedCrash()})), "10", "best")
    interrupted = keys_of(memory, "best")
    save(memory, b"other", name="best")
    copy = copy_checkpoint(memory, "10", "best", overwrite=True)
    assert named_keys(copy).isdisjoint(interrupted)


def test_an_attempt_of_another_source_is_not_resumed() -> None:
    memory = MemoryStore.fresh()
    save(memory, b"one")
    with pytest.raises(SimulatedCrash):
        copy_checkpoint(scripted(memory, answers("create", {0: SimulatedCrash()})), "10", "best")
    interrupted = keys_of(memory, "best")
    save(memory, b"two", overwrite=True)
    copy = copy_checkpoint(memory, "10", "best")
    assert copy.user_metadata == {"payload": "two"}
    assert named_keys(copy).isdisjoint(interrupted)


def test_an_attempt_whose_target_changed_while_it_ran_leaves_nothing(root: Store) -> None:
    save(root, b"one")
    other = Script(after=once("copy", lambda: save(root, b"other", name="best", overwrite=True)))
    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(scripted(root, other), "10", "best")
    newest = read_newest(root.scope("best"))
    assert newest is not None
    assert keys_of(root, "best") == expected_keys(newest.manifest)
    assert load(root, "best") == b"other"


def test_two_processes_that_resume_one_attempt_agree() -> None:
    memory = MemoryStore.fresh()
    save(memory, b"one")
    with pytest.raises(SimulatedCrash):
        copy_checkpoint(scripted(memory, answers("create", {0: SimulatedCrash()})), "10", "best")
    twin = scripted(memory, Script(before=once("create", lambda: copy_checkpoint(memory, "10", "best"))))
    copy = copy_checkpoint(twin, "10", "best")
    newest = read_newest(memory.scope("best"))
    assert newest is not None
    assert newest.manifest.save_id == copy.save_id
    assert manifests_of(memory, "best") == ["manifest.000001.json"]


def test_a_twin_does_not_commit_on_top_of_the_deletion_of_its_attempt() -> None:
    memory = MemoryStore.fresh()
    save(memory, b"one")
    with pytest.raises(SimulatedCrash):
        copy_checkpoint(scripted(memory, answers("create", {0: SimulatedCrash()})), "10", "best")

    def finish_and_delete() -> None:
        copy_checkpoint(memory, "10", "best")
        delete_checkpoint(memory.scope("best"))

    store = scripted(memory, Script(before=once("create", finish_and_delete)))
    copy = copy_checkpoint(store, "10", "best")
    assert copy.generation == 1, "it was committed by the twin, and then deleted"
    assert payload_of(memory, "best") is None
    assert manifests_of(memory, "best") == ["manifest.000001.json", "manifest.000002.json"]


def test_a_twin_does_not_commit_on_top_of_a_deletion_that_has_not_removed_its_objects_yet() -> None:
    """The tombstone names the attempt's keys: whoever finishes the deletion would take them away."""
    memory = MemoryStore.fresh()
    save(memory, b"one")
    with pytest.raises(SimulatedCrash):
        copy_checkpoint(scripted(memory, answers("create", {0: SimulatedCrash()})), "10", "best")

    def finish_and_begin_to_delete() -> None:
        copy_checkpoint(memory, "10", "best")
        dying = scripted(memory, answers("delete", {0: SimulatedCrash()}, key=""))
        with pytest.raises(SimulatedCrash):
            delete_checkpoint(dying.scope("best"))

    store = scripted(memory, Script(before=once("write", finish_and_begin_to_delete)))
    with pytest.raises(CheckpointChangedError, match="generation 2"):
        copy_checkpoint(store, "10", "best")
    assert manifests_of(memory, "best") == ["manifest.000001.json", "manifest.000002.json"]


def test_a_local_copy_shares_the_bytes_on_disk(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    source = save(root, b"one")
    copy = copy_checkpoint(root, "10", "10_keep")
    ours, theirs = tmp_path / "10_keep" / copy.objects[0].key, tmp_path / "10" / source.objects[0].key
    assert ours.stat().st_ino == theirs.stat().st_ino


def test_a_copy_whose_folder_was_moved_away_leaves_nothing_in_the_next_one(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    save(root, b"one")

    def another_life() -> None:
        (tmp_path / "best").rename(tmp_path / "moved")
        save(root, b"two", name="best")

    store = scripted(root, Script(before=once("copy", another_life)))
    with pytest.raises(CheckpointChangedError):
        copy_checkpoint(store, "10", "best")
    newest = read_newest(root.scope("best"))
    assert newest is not None
    assert keys_of(root, "best") == expected_keys(newest.manifest)
    assert load(root, "best") == b"two"


def test_an_object_that_the_store_cut_is_noticed_before_the_commit() -> None:
    memory = MemoryStore.fresh()
    source = save(memory, b"one")

    def cut() -> None:
        (key,) = [info.key for info in memory.list("best/") if info.key.endswith("/0.distcp")]
        memory.write(key, b"cut")

    store = scripted(memory, Script(after=once("copy", cut)))
    with pytest.raises(SaveFailedError, match="has 3 bytes instead of"):
        copy_checkpoint(store, "10", "best", options=ONE_BY_ONE)
    assert payload_of(memory, "best") is None
    again = FaultStore(memory)
    copy = copy_checkpoint(again, "10", "best")
    assert copied_keys(again) == [f"best/{copy.objects[0].key}"], "the one that is wrong, and no other"
    assert len(source.objects) == 2


def test_a_damaged_index_shows_before_the_data_is_moved(root: Store) -> None:
    source = save(root, b"one")
    assert source.index is not None
    root.write(f"10/{source.index.key}", bytes(source.index.size_bytes))
    store = FaultStore(root)
    with pytest.raises(IntegrityError, match="index"):
        copy_checkpoint(store, "10", "best")
    assert copied_keys(store) == []


def test_an_index_that_points_beyond_an_object_is_damage_and_not_copied() -> None:
    memory = MemoryStore.fresh()
    source = save(memory, b"one")
    assert source.index is not None
    index = parse_index(memory.read(f"10/{source.index.key}"), url=memory.url, key=source.index.key)
    data = format_index(replace(index, blobs={"extra": BytesEntry(0, 0, 4000, bytes(4))}))
    memory.write(f"10/{source.index.key}", data)
    entry = replace(source.index, size_bytes=len(data), crc32c=crc32c(data))
    memory.write("10/manifest.000001.json", format_manifest(replace(source, index=entry)))
    with pytest.raises(CheckpointDamagedError, match="outside its object"):
        copy_checkpoint(memory, "10", "best")


def test_an_attempt_on_a_target_that_was_pinned_meanwhile_leaves_nothing(root: Store) -> None:
    save(root, b"one")
    save(root, b"best", name="best")
    pin = Script(before=once("copy", lambda: set_pinned(root.scope("best"), True)))
    with pytest.raises(CheckpointPinnedError):
        copy_checkpoint(scripted(root, pin), "10", "best", overwrite=True)
    newest = read_newest(root.scope("best"))
    assert newest is not None
    assert keys_of(root, "best") == expected_keys(newest.manifest)


def test_a_record_that_cannot_be_removed_does_not_unmake_the_copy() -> None:
    memory = MemoryStore.fresh()
    save(memory, b"one")
    failing = answers("delete", {0: StoreUnavailableError("503")}, key="")
    copy = copy_checkpoint(scripted(memory, failing), "10", "best")
    assert payload_of(memory, "best") == "one"
    assert copy_checkpoint(memory, "10", "best").save_id == copy.save_id


def test_a_link_to_the_source_is_no_target(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    source = save(root, b"one")
    (tmp_path / "best").symlink_to(tmp_path / "10")
    with pytest.raises(ConfigError, match="onto itself"):
        copy_checkpoint(root, "10", "best", overwrite=True)
    assert keys_of(root, "10") == expected_keys(source)
    assert load(root, "10") == b"one"


def test_progress_counts_what_was_there_and_what_is_copied() -> None:
    memory = MemoryStore.fresh()
    source = save(memory, b"one")
    with pytest.raises(StoreUnavailableError):
        copy_checkpoint(
            scripted(memory, answers("copy", {1: StoreUnavailableError("503")}, key="")), "10", "best"
        )
    told: list[Progress] = []
    copy_checkpoint(memory, "10", "best", on_progress=told.append)
    sizes = [entry.size_bytes for entry in source.objects]
    assert [(each.done_bytes, each.done_objects) for each in told] == [(0, 0), (sizes[0], 1), (sum(sizes), 2)]
    assert {(each.operation, each.total_bytes, each.total_objects) for each in told} == {
        ("copy", sum(sizes), 2)
    }


def test_a_store_that_ignores_create_only_is_refused_as_for_a_save() -> None:
    memory = MemoryStore.fresh()
    save(memory, b"one")
    with pytest.raises(UnsupportedStoreError, match="accept_single_writer"):
        copy_checkpoint(Doubtful(memory), "10", "best")
    assert keys_of(memory, "best") == set()
    accepting = replace(OPTIONS, commit=replace(OPTIONS.commit, accept_single_writer=True))
    copy = copy_checkpoint(Doubtful(memory), "10", "best", options=accepting)
    assert keys_of(memory, "best") == expected_keys(copy)


class Doubtful(DelegatingStore):
    """Overwrites what should be created only if absent."""

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(self.inner.capabilities, create_only=CreateOnly.PROBE)

    def create(self, key: str, data: Buffer) -> None:
        self.inner.write(key, data)


def copied_keys(store: FaultStore) -> list[str]:
    """The targets of server-side copies, in order of their names."""
    return sorted(call.key or "" for call in store.calls if call.operation == "copy")


def test_a_copy_without_index_or_stock_metadata_has_none_either() -> None:
    memory = MemoryStore.fresh()
    source = save(memory, b"one")
    bare = replace(source, index=None, stock_metadata=None)
    memory.write("10/manifest.000001.json", format_manifest(bare))
    copy = copy_checkpoint(memory, "10", "best")
    assert (copy.index, copy.stock_metadata) == (None, None)


class TestStockCopies:
    """Checkpoints that are not ours are copied as they are."""

    FILES: ClassVar[dict[str, bytes]] = {".metadata": b"stock", "__0_0.distcp": b"a", "__1_0.distcp": b"b"}

    @classmethod
    def stock(cls, root: Store, name: str = "10", /, **more: bytes) -> None:
        for key, data in {**cls.FILES, **more}.items():
            root.scope(name, create=True).write(key, data)

    @staticmethod
    def contents(root: Store, name: str) -> dict[str, bytes]:
        return {key: root.read(f"{name}/{key}") for key in keys_of(root, name)}

    def test_only_the_files_of_the_checkpoint_are_copied(self, root: Store) -> None:
        self.stock(root, notes=b"foreign")
        copy_stock_checkpoint(root, "10", "best")
        assert self.contents(root, "best") == self.FILES

    def test_a_plain_one_is_copied(self, root: Store) -> None:
        root.write("10/checkpoint.pth", b"plain")
        copy_stock_checkpoint(root, "10", "best")
        assert self.contents(root, "best") == {"checkpoint.pth": b"plain"}

    def test_a_large_file_is_copied_whole(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        data = bytes(range(256)) * 40_000  # more than one chunk
        root.write("10/checkpoint.pth", data)
        copy_stock_checkpoint(root, "10", "best")
        assert root.read("best/checkpoint.pth") == data

    def test_a_local_copy_shares_no_bytes_since_stock_writers_change_files_in_place(
        self, tmp_path: Path
    ) -> None:
        root = LocalStore(tmp_path)
        self.stock(root)
        copy_stock_checkpoint(root, "10", "best")
        (tmp_path / "10" / "__0_0.distcp").write_bytes(b"changed")
        assert self.contents(root, "best") == self.FILES

    @pytest.mark.parametrize("is_done", [False, True])
    def test_a_crash_at_any_call_leaves_no_copy_or_a_whole_one(self, is_done: bool) -> None:
        seen = set()
        for number in range(1, 100):
            memory = MemoryStore.fresh()
            self.stock(memory)
            self.stock(memory, "best", **{"__0_0.distcp": b"older"})
            store = FaultStore.crashing(memory, number, is_done=is_done)
            with suppress(SimulatedCrash):
                copy_stock_checkpoint(store, "10", "best", overwrite=True)
                break
            found = self.contents(memory, "best")
            if ".metadata" in found:
                assert found["__0_0.distcp"] in (b"older", b"a")
                assert {key for key in found if not parse_copy_record_key(key)} == self.FILES.keys()
            seen.add(".metadata" in found)
            copy_stock_checkpoint(memory, "10", "best", overwrite=True)
            assert self.contents(memory, "best") == self.FILES
        assert number > 8
        assert seen == {True, False}

    def test_a_resumed_copy_does_not_copy_again_what_is_there(self) -> None:
        memory = MemoryStore.fresh()
        self.stock(memory, **{"__2_0.distcp": b"c"})
        broken = scripted(memory, answers("copy", {1: StoreUnavailableError("503")}, key=""))
        with pytest.raises(StoreUnavailableError):
            copy_stock_checkpoint(broken, "10", "best", options=ONE_BY_ONE)
        again = FaultStore(memory)
        copy_stock_checkpoint(again, "10", "best", options=ONE_BY_ONE)
        assert copied_keys(again) == ["best/__1_0.distcp", "best/__2_0.distcp"]
        assert self.contents(memory, "best") == {**self.FILES, "__2_0.distcp": b"c"}

    def test_what_an_interrupted_copy_of_another_source_left_is_removed(self) -> None:
        memory = MemoryStore.fresh()
        self.stock(memory, "20", **{"__2_0.distcp": b"of 20", "__0_0.distcp": b"A"})
        broken = scripted(memory, answers("write_stream", {0: StoreUnavailableError("503")}, key=""))
        with pytest.raises(StoreUnavailableError):
            copy_stock_checkpoint(broken, "20", "best")
        assert memory.read("best/__0_0.distcp") == b"A"
        self.stock(memory)
        copy_stock_checkpoint(memory, "10", "best")
        assert self.contents(memory, "best") == self.FILES

    def test_files_that_were_there_before_the_attempt_are_not_taken_for_its_own(self) -> None:
        """An older copy has files of the same sizes: one that was not removed must not be kept."""
        memory = MemoryStore.fresh()
        self.stock(memory)
        self.stock(memory, "best", **{"__1_0.distcp": b"B"})
        store = scripted(memory, answers("delete", {1: SimulatedCrash()}, key=""))
        with pytest.raises(SimulatedCrash):
            copy_stock_checkpoint(store, "10", "best", overwrite=True)
        assert memory.read("best/__1_0.distcp") == b"B"
        copy_stock_checkpoint(memory, "10", "best")
        assert self.contents(memory, "best") == self.FILES

    def test_what_others_wrote_over_a_copy_is_not_taken_for_a_part_of_it(self) -> None:
        """The copy was complete; only its record was not removed yet."""
        memory = MemoryStore.fresh()
        self.stock(memory)
        with pytest.raises(SimulatedCrash):
            copy_stock_checkpoint(
                scripted(memory, answers("delete", {0: SimulatedCrash()}, key="")), "10", "best"
            )
        self.stock(memory, "best", **{"__0_0.distcp": b"X"})
        copy_stock_checkpoint(memory, "10", "best", overwrite=True)
        assert self.contents(memory, "best") == self.FILES

    def test_an_attempt_that_is_too_old_is_begun_anew(self) -> None:
        memory = MemoryStore.fresh()
        self.stock(memory)
        broken = scripted(memory, answers("write_stream", {0: StoreUnavailableError("503")}, key=""))
        with pytest.raises(StoreUnavailableError):
            copy_stock_checkpoint(broken, "10", "best")
        again = FaultStore(later(memory, timedelta(seconds=OPTIONS.commit.save_seconds + 1)))
        copy_stock_checkpoint(again, "10", "best")
        assert copied_keys(again) == ["best/__0_0.distcp", "best/__1_0.distcp"]

    def test_a_file_that_the_store_did_not_copy_although_it_said_so_is_missed(self) -> None:
        memory = MemoryStore.fresh()
        self.stock(memory)
        lost = Script(after=once("copy", lambda: memory.delete(["best/__0_0.distcp"])))
        with pytest.raises(SaveFailedError, match="__0_0"):
            copy_stock_checkpoint(scripted(memory, lost), "10", "best", options=ONE_BY_ONE)
        assert ".metadata" not in keys_of(memory, "best")

    def test_a_plain_file_that_the_store_did_not_copy_although_it_said_so_is_missed(self) -> None:
        memory = MemoryStore.fresh()
        memory.write("10/checkpoint.pth", b"plain")
        lost = Script(after=once("copy", lambda: memory.delete(["best/checkpoint.pth"])))
        with pytest.raises(ObjectNotFoundError):
            copy_stock_checkpoint(scripted(memory, lost), "10", "best")

    def test_another_copy_to_the_same_name_is_noticed(self) -> None:
        memory = MemoryStore.fresh()
        self.stock(memory)
        self.stock(memory, "20")
        other = once("copy", lambda: copy_stock_checkpoint(memory, "20", "best"))
        with pytest.raises(CheckpointChangedError, match="another copy"):
            copy_stock_checkpoint(scripted(memory, Script(after=other)), "10", "best", options=ONE_BY_ONE)

    @pytest.mark.parametrize("kind", ["dcp", "plain"])
    def test_a_source_replaced_while_its_last_file_is_read_is_no_copy(self, root: Store, kind: str) -> None:
        """The new last file with the old data would be a mixture."""
        mark = ".metadata" if kind == "dcp" else "checkpoint.pth"
        root.write(f"10/{mark}", b"stock")
        if kind == "dcp":
            root.write("10/__0_0.distcp", b"a")
        replaced: list[str] = []

        def replace_source(operation: str, key: str) -> None:
            if operation == "read_range" and key == mark and not replaced:
                replaced.append(key)
                root.write(f"10/{mark}", b"other")

        store = scripted(root, Script(after=replace_source))
        if kind == "plain" and isinstance(root, MemoryStore):
            copy_stock_checkpoint(store, "10", "best")  # one object, which the store copies in one step
            assert (root.read("best/checkpoint.pth"), replaced) == (b"stock", [])
        else:
            with pytest.raises(CheckpointChangedError, match="written anew"):
                copy_stock_checkpoint(store, "10", "best")
            assert mark not in keys_of(root, "best")

    def test_a_link_to_the_source_is_no_target(self, tmp_path: Path) -> None:
        """Replacing what the link leads to would delete the source before it is copied."""
        root = LocalStore(tmp_path)
        self.stock(root)
        (tmp_path / "best").symlink_to(tmp_path / "10")
        with pytest.raises(ConfigError, match="onto itself"):
            copy_stock_checkpoint(root, "10", "best", overwrite=True)
        assert self.contents(root, "10") == self.FILES

    def test_progress_is_told(self, root: Store) -> None:
        self.stock(root)
        told: list[Progress] = []
        copy_stock_checkpoint(root, "10", "best", on_progress=told.append)
        assert (told[0].done_bytes, told[0].total_bytes, told[0].total_objects) == (0, 7, 3)
        assert (told[-1].done_bytes, told[-1].done_objects) == (7, 3)

    def test_an_existing_target_is_refused_unless_told(self, root: Store) -> None:
        self.stock(root)
        root.write("best/checkpoint.pth", b"older")
        with pytest.raises(CheckpointExistsError):
            copy_stock_checkpoint(root, "10", "best")
        copy_stock_checkpoint(root, "10", "best", overwrite=True)
        assert self.contents(root, "best") == self.FILES

    def test_it_does_not_hide_behind_a_manifest(self, root: Store) -> None:
        self.stock(root)
        save(root, b"ours", name="best")
        with pytest.raises(CheckpointExistsError, match="manifest"):
            copy_stock_checkpoint(root, "10", "best", overwrite=True)
        assert load(root, "best") == b"ours"

    def test_a_source_written_anew_meanwhile_is_said_so_and_is_no_copy(self, root: Store) -> None:
        self.stock(root)
        again = once("write_stream", lambda: self.stock(root)) if isinstance(root, LocalStore) else None
        hook = again or once("copy", lambda: self.stock(root))
        with pytest.raises(CheckpointChangedError, match="written anew"):
            copy_stock_checkpoint(scripted(root, Script(after=hook)), "10", "best")
        assert ".metadata" not in keys_of(root, "best")

    def test_a_target_folder_that_was_moved_away_is_said_so(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        self.stock(root)
        move = once("write_stream", lambda: (tmp_path / "best").rename(tmp_path / "moved"))
        with pytest.raises(CheckpointChangedError):
            copy_stock_checkpoint(scripted(root, Script(after=move)), "10", "best")
        assert not (tmp_path / "best").exists()

    def test_ours_and_absent_ones_are_not_its_matter(self, root: Store) -> None:
        save(root, b"one")
        root.write("20/notes", b"x")
        for name in ("10", "20"):
            with pytest.raises(CheckpointNotFoundError):
                copy_stock_checkpoint(root, name, "best")
        with pytest.raises(ConfigError, match="onto itself"):
            copy_stock_checkpoint(root, "10", "10")
