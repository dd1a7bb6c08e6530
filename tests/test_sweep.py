"""The sweep: what goes, what stays, when it refuses, and that it says beforehand what it does."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from protocol import Script, answers, expected_keys, keys_of, load, manifests_of, once, save, scripted, upload
from sweeping import (
    FOREIGN,
    PROBE,
    TWO_DAYS,
    AgedStore,
    Holding,
    aged,
    all_keys,
    leave_everything,
    leave_half_deleted,
    leave_replaced,
    leave_uncommitted,
    newest_of,
    reasons,
    recorded,
    swept,
)

from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import (
    AccessDeniedError,
    ConfigError,
    StoreError,
    StoreUnavailableError,
)
from remote_ckpt.keys import copy_record_key, manifest_key, new_token
from remote_ckpt.newest import named_keys
from remote_ckpt.options import CommitOptions, Options
from remote_ckpt.stock_copies import copy_stock_checkpoint
from remote_ckpt.store.base import Leftover, Listing, Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.sweep import SweepFailure, sweep
from remote_ckpt.sweep_plan import COPIED_FILE, FOLDER, LEFTOVER, REPLACED, SUPERSEDED, TOMBSTONE, UNCOMMITTED
from remote_ckpt.testing.faults import FaultStore, StoreCall

NOTHING = timedelta(0)


@pytest.fixture(params=["memory", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore.fresh() if request.param == "memory" else LocalStore(tmp_path / "run")


@pytest.fixture
def memory() -> Store:
    return MemoryStore.fresh()


class TestWhatGoes:
    def test_all_that_nobody_needs_is_found_each_with_its_reason(self, root: Store) -> None:
        garbage = leave_everything(root)
        report = sweep(aged(root))
        assert reasons(report) == garbage
        assert len(report.garbage) == len(garbage)
        assert {each.checkpoint for each in report.garbage} == {"", "10", "20", "30", "40_keep"}
        assert all(each.key.startswith(each.checkpoint) for each in report.garbage)
        assert {each.reason for each in report.garbage if each.kind == UNCOMMITTED} == {
            "of a save or copy that was never committed"
        }

    def test_a_dry_run_is_the_default_and_changes_nothing(self, root: Store) -> None:
        leave_everything(root)
        before = root.list()
        report = sweep(aged(root))
        assert report.is_dry_run
        assert (report.removed_count, report.removed_bytes, report.failures) == (0, 0, ())
        assert root.list() == before

    def test_a_run_removes_exactly_what_the_dry_run_says(self, root: Store) -> None:
        leave_everything(root)
        before = all_keys(root)
        said = sweep(aged(root))
        report = swept(root)
        assert reasons(report) == reasons(said)
        assert before - all_keys(root) == reasons(said).keys()
        assert report.removed_count == len(said.garbage)
        assert report.removed_bytes == sum(each.size_bytes for each in said.garbage) > 0
        assert not report.is_dry_run

    def test_checkpoints_and_what_is_not_ours_are_as_before(self, root: Store) -> None:
        leave_everything(root)
        swept(root)
        assert [load(root, name) for name in ("10", "20", "30", "40", "40_keep")] == [
            b"new", None, None, b"sound", b"copied",
        ]  # fmt: skip
        assert set(FOREIGN) <= all_keys(root)
        assert root.read("30/notes.txt") == b"mine"
        checkpoint = root.scope("10")
        entry = newest_of(root, "10").manifest.stock_metadata
        assert entry is not None
        assert checkpoint.read(".metadata") == checkpoint.read(entry.key)

    def test_a_second_sweep_finds_nothing(self, root: Store) -> None:
        leave_everything(root)
        swept(root)
        assert swept(root).garbage == ()

    def test_a_directory_that_does_not_exist_holds_nothing(self, root: Store) -> None:
        report = sweep(root, dry_run=False)
        assert (report.garbage, report.warnings) == ((), ())
        assert root.list() == []

    def test_sizes_and_times_are_those_of_the_listing(self, memory: Store) -> None:
        leave_uncommitted(memory, "20")
        report = sweep(memory, older_than=NOTHING)
        assert {(each.key, each.size_bytes, each.modified_at) for each in report.garbage} == {
            (info.key, info.size_bytes, info.modified_at) for info in memory.list()
        }

    def test_a_newest_generation_goes_on_from_its_number_after_a_sweep(self, root: Store) -> None:
        leave_replaced(root, "10")
        swept(root)
        assert manifests_of(root) == [manifest_key(2)]
        assert save(root, b"third", overwrite=True).generation == 3
        assert keys_of(root) == expected_keys(newest_of(root, "10").manifest)

    def test_a_pinned_checkpoint_is_cleaned_up_and_stays(self, root: Store) -> None:
        leave_replaced(root, "10")
        set_pinned(root.scope("10"), True)
        swept(root)
        manifest = newest_of(root, "10").manifest
        assert manifest.pinned
        assert keys_of(root) == expected_keys(manifest)
        assert load(root) == b"new"

    def test_stale_metadata_for_stock_readers_is_made_right_before_its_data_goes(self, memory: Store) -> None:
        """The replacing save died between its commit and ``.metadata``."""
        save(memory, b"old")
        stale = memory.read("10/.metadata")
        done = upload(memory.scope("10"), b"new")
        script = Script(before=lambda operation, key: _refuse(key == ".metadata"))
        with pytest.raises(RuntimeError):
            save(scripted(memory, script), b"new", overwrite=True)
        assert memory.read("10/.metadata") == stale
        seen: list[bytes] = []
        script = Script(before=once("delete", lambda: seen.append(memory.read("10/.metadata"))))
        sweep(aged(memory, scripted(memory, script)), dry_run=False)
        entry = newest_of(memory, "10").manifest.stock_metadata
        assert entry is not None
        assert seen[0] == memory.read(f"10/{entry.key}")
        assert keys_of(memory) == expected_keys(newest_of(memory, "10").manifest)
        assert done.attempt.save_id not in str(keys_of(memory))


def _refuse(is_wanted: bool) -> None:
    if is_wanted:
        raise RuntimeError("died here")


class TestAge:
    def test_by_default_the_grace_period_must_have_passed(self, root: Store) -> None:
        garbage = leave_everything(root)
        day = timedelta(days=1)
        assert sweep(aged(root, age=day - timedelta(minutes=1))).garbage == ()
        report = sweep(aged(root, age=day + timedelta(minutes=1)))
        assert reasons(report) == garbage
        assert report.older_than == day
        shorter = Options(commit=CommitOptions(save_seconds=1800, grace_seconds=2 * 3600.0))
        assert reasons(sweep(aged(root, age=timedelta(hours=3)), options=shorter)) == garbage

    def test_what_is_exactly_that_old_stays(self, memory: Store) -> None:
        memory.write(PROBE, b"x")
        keys = [PROBE, *leave_uncommitted(memory, "20")]
        now = memory.clock()
        store = FaultStore(memory, after=lambda call, result: now if call.operation == "clock" else result)
        for key in keys:
            age = now - memory.info(key).modified_at
            assert key not in reasons(sweep(store, older_than=age))
            assert key in reasons(sweep(store, older_than=age - timedelta(microseconds=1)))

    @pytest.mark.parametrize("name", ["10", "20", "30", "40_keep"])
    def test_of_young_things_nothing_goes(self, root: Store, name: str) -> None:
        garbage = leave_everything(root)
        report = sweep(aged(root, is_young=lambda key: key.startswith(f"{name}/")))
        assert reasons(report).keys() == {key for key in garbage if not key.startswith(f"{name}/")}

    def test_every_young_object_stays_alone(self, root: Store) -> None:
        garbage = leave_everything(root)
        singles = [key for key, reason in garbage.items() if reason != SUPERSEDED]
        for young in singles:
            found = reasons(sweep(aged(root, is_young=lambda key, young=young: key == young)))  # type: ignore[misc]
            assert found.keys() == garbage.keys() - {young}

    def test_what_was_replaced_a_moment_ago_stays_for_its_readers(self, root: Store) -> None:
        leave_replaced(root, "10")
        young = manifest_key(2)
        assert sweep(aged(root, is_young=lambda key: key.endswith(young))).garbage == ()

    def test_what_was_deleted_a_moment_ago_stays_for_its_readers(self, root: Store) -> None:
        leave_half_deleted(root, "30")
        young = manifest_key(2)
        assert sweep(aged(root, is_young=lambda key: key.endswith(young))).garbage == ()

    def test_a_manifest_that_was_the_newest_a_moment_ago_stays(self, root: Store) -> None:
        save(root, b"one")
        for loss in range(3):
            annotate(root.scope("10"), metrics={"loss": float(loss)})
        young = (manifest_key(3), manifest_key(4))
        report = sweep(aged(root, is_young=lambda key: key.endswith(young)))
        assert reasons(report) == {f"10/{manifest_key(1)}": SUPERSEDED}

    def test_a_name_that_is_replaced_all_the_time_is_still_cleaned_up(self, root: Store) -> None:
        save(root, b"one")
        for loss in range(3):
            annotate(root.scope("10"), metrics={"loss": float(loss)})
        garbage = leave_uncommitted(root, "10")
        young = manifest_key(4)
        report = sweep(aged(root, is_young=lambda key: key.endswith(young)))
        manifests = {f"10/{manifest_key(number)}": SUPERSEDED for number in (1, 2)}
        assert reasons(report) == garbage | manifests

    def test_superseded_manifests_go_from_the_lowest_upward_without_a_gap(self, root: Store) -> None:
        save(root, b"one")
        for loss in range(3):
            annotate(root.scope("10"), metrics={"loss": float(loss)})
        young = manifest_key(1)  # a copy of the folder, say, stamped anew
        assert sweep(aged(root, is_young=lambda key: key.endswith(young))).garbage == ()

    def test_less_than_twice_the_time_of_a_save_is_accepted_with_a_warning(
        self, memory: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        garbage = leave_uncommitted(memory, "20")
        report = sweep(memory, older_than=NOTHING)
        assert reasons(report) == garbage
        assert len(report.warnings) == 1
        assert "a save in progress would lose its objects" in report.warnings[0]
        assert report.warnings[0] in caplog.text
        assert len(sweep(memory, older_than=timedelta(hours=11, minutes=59)).warnings) == 1
        assert sweep(memory, older_than=timedelta(hours=12)).warnings == ()

    def test_a_negative_age_is_an_error_of_the_call(self, memory: Store) -> None:
        store = recorded(memory)
        with pytest.raises(ConfigError, match="negative"):
            sweep(store, older_than=timedelta(seconds=-1))
        assert store.calls == []

    def test_no_age_is_too_long(self, memory: Store) -> None:
        leave_uncommitted(memory, "20")
        assert sweep(memory, older_than=timedelta.max).garbage == ()


class TestStockCheckpoints:
    def test_what_a_killed_save_left_beside_one_goes_and_the_checkpoint_stays(self, root: Store) -> None:
        for key in ("50/.metadata", "50/__0_0.distcp", "60/checkpoint.pth"):
            root.write(key, b"stock")
        garbage = leave_uncommitted(root, "50") | leave_uncommitted(root, "60")
        assert reasons(swept(root)) == garbage
        assert all_keys(root) == {"50/.metadata", "50/__0_0.distcp", "60/checkpoint.pth"}

    def test_one_of_ours_that_was_copied_without_its_manifest_stays_whole(self, root: Store) -> None:
        saved = save(root, b"one")
        for key in (*named_keys(saved), ".metadata"):
            root.copy(f"10/{key}", f"export/{key}")
        leave_uncommitted(root, "export")
        before = root.list()
        report = swept(root)
        assert report.garbage == ()
        assert root.list() == before
        (warning,) = report.warnings
        assert "passing over checkpoint export: its .metadata leads to objects of ours" in warning

    def test_one_that_was_replaced_goes_as_the_replacing_manifest_says(self, root: Store) -> None:
        for key in ("10/.metadata", "10/__0_0.distcp", "10/__1_0.distcp", "10/notes.txt"):
            root.write(key, b"stock")
        script = answers("delete", dict.fromkeys(range(9), StoreUnavailableError("503")), key="")
        save(scripted(root, script), b"ours", overwrite=True)
        assert reasons(swept(root)) == {"10/__0_0.distcp": REPLACED, "10/__1_0.distcp": REPLACED}
        assert load(root) == b"ours"
        assert root.read("10/notes.txt") == b"stock"

    def test_a_file_that_got_the_name_of_a_replaced_one_since_stays(self, root: Store) -> None:
        root.write("10/checkpoint.pth", b"plain")
        saved = save(root, b"ours", overwrite=True)
        assert saved.superseded == ("checkpoint.pth",)
        root.write("10/checkpoint.pth", b"written by an evaluation")
        assert sweep(root, older_than=NOTHING).garbage == ()


class TestUnfinishedStockCopies:
    """The record of such a copy is all that proves whose the files are."""

    RECORD = copy_record_key("20200101T000000Z-0123456789ab")

    @pytest.fixture
    def left(self, memory: Store) -> Store:
        """A directory with what an interrupted copy left, and files of others beside it."""
        memory.write("best/__2_0.distcp", b"older")
        files = {
            "__0_0.distcp": [1, "t"],
            "__1_0.distcp": [2, "t"],
            "__2_0.distcp": [5, "t"],
            "notes": [5, "t"],
        }
        memory.write(f"best/{self.RECORD}", json.dumps({"source": "x", "source_files": files}).encode())
        for key, data in {"__0_0.distcp": b"1", "__1_0.distcp": b"cut", "notes": b"notes"}.items():
            memory.write(f"best/{key}", data)
        return memory

    def test_its_files_go_with_its_record_and_all_others_stay(self, left: Store) -> None:
        report = swept(left)
        assert reasons(report) == {"best/__0_0.distcp": COPIED_FILE, f"best/{self.RECORD}": UNCOMMITTED}
        assert keys_of(left, "best") == {"__1_0.distcp", "__2_0.distcp", "notes"}

    @pytest.mark.parametrize("young", ["__0_0.distcp", RECORD])
    def test_while_any_of_it_is_young_all_stays(self, left: Store, young: str) -> None:
        store = aged(left, is_young=lambda key: key == f"best/{young}")
        assert sweep(store).garbage == ()

    @pytest.mark.parametrize("mark", [".metadata", "checkpoint.pth"])
    def test_files_of_what_is_a_checkpoint_stay(self, left: Store, mark: str) -> None:
        left.write(f"best/{mark}", b"stock")
        assert reasons(swept(left)) == {f"best/{self.RECORD}": UNCOMMITTED}

    def test_files_of_what_becomes_a_checkpoint_after_the_plan_stay(self, left: Store) -> None:
        script = Script(after=once("list_leftovers", lambda: left.write("best/.metadata", b"stock")))
        sweep(aged(left, scripted(left, script)), dry_run=False)
        assert "__0_0.distcp" in keys_of(left, "best")

    def test_the_record_stays_as_long_as_a_file_that_cannot_be_removed(self, left: Store) -> None:
        report = sweep(aged(left, Holding(left, "best/__0_0.distcp")), dry_run=False)
        assert {failure.key for failure in report.failures} == reasons(report).keys()
        assert {"__0_0.distcp", self.RECORD} <= keys_of(left, "best")

    def test_what_a_real_copy_left_goes(self, memory: Store) -> None:
        for key in (".metadata", "__0_0.distcp", "__1_0.distcp"):
            memory.write(f"10/{key}", b"stock")
        broken = scripted(memory, answers("write_stream", {0: StoreUnavailableError("503")}, key=""))
        with pytest.raises(StoreUnavailableError):
            copy_stock_checkpoint(broken, "10", "best")
        assert len(keys_of(memory, "best")) == 3
        assert len(swept(memory).garbage) == 3
        assert keys_of(memory, "best") == set()


class TestTombstones:
    def test_the_mark_of_a_deleted_checkpoint_stays(self, root: Store) -> None:
        leave_half_deleted(root, "30")
        swept(root)
        assert all_keys(root) == {"30/notes.txt", f"30/{manifest_key(2)}"}
        assert save(root, b"again", name="30").generation == 3

    def test_it_goes_by_explicit_order_and_the_name_begins_anew(self, root: Store) -> None:
        garbage = leave_half_deleted(root, "30")
        save(root, b"stays", name="40")
        garbage[f"30/{manifest_key(2)}"] = TOMBSTONE
        assert reasons(sweep(aged(root), tombstones=True)) == garbage
        assert reasons(swept(root, tombstones=True)) == garbage
        assert {key for key in all_keys(root) if key.startswith("30/")} == {"30/notes.txt"}
        assert load(root, "40") == b"stays"
        assert save(root, b"again", name="30").generation == 1

    def test_it_stays_while_it_is_young(self, root: Store) -> None:
        leave_half_deleted(root, "30")
        report = sweep(aged(root, is_young=lambda key: key.endswith(manifest_key(2))), tombstones=True)
        assert report.garbage == ()

    def test_it_stays_while_it_is_young_though_nothing_else_is_left(self, memory: Store) -> None:
        save(memory, b"gone")
        delete_checkpoint(memory.scope("10"))
        swept(memory)
        young = manifest_key(2)
        assert all_keys(memory) == {f"10/{young}"}
        report = sweep(aged(memory, is_young=lambda key: key.endswith(young)), tombstones=True)
        assert report.garbage == ()
        assert f"10/{young}" in reasons(sweep(aged(memory), tombstones=True))

    def test_it_stays_beside_a_save_that_may_be_in_progress(self, root: Store) -> None:
        garbage = leave_half_deleted(root, "30")
        store = aged(root)
        young = leave_uncommitted(root, "30")
        report = sweep(store, dry_run=False, tombstones=True)
        assert reasons(report) == garbage
        assert young.keys() <= all_keys(root)
        assert not newest_of(root, "30").is_live

    def test_it_stays_where_a_save_began_after_the_plan(self, memory: Store) -> None:
        leave_half_deleted(memory, "30")
        begin = once("delete", lambda: leave_uncommitted(memory, "30"))
        store = aged(memory, scripted(memory, Script(after=begin)))
        report = sweep(store, dry_run=False, tombstones=True)
        assert report.failures == ()
        assert not newest_of(memory, "30").is_live

    def test_a_prefix_that_a_store_lists_without_objects_does_not_keep_it(self, memory: Store) -> None:
        garbage = leave_half_deleted(memory, "30")
        garbage[f"30/{manifest_key(2)}"] = TOMBSTONE

        def list_emptied(call: StoreCall, result: Any) -> Any:
            if call.operation != "list_children" or not call.url.endswith("/30"):
                return result
            return Listing(result.objects, (*result.prefixes, new_token()))

        store = FaultStore(memory, after=list_emptied)
        assert reasons(sweep(aged(memory, store), dry_run=False, tombstones=True)) == garbage
        assert all_keys(memory) == {"30/notes.txt"}

    def test_it_stays_while_what_it_names_cannot_be_removed(self, memory: Store) -> None:
        garbage = leave_half_deleted(memory, "30")
        kept = min(key for key, reason in garbage.items() if reason == REPLACED)
        report = sweep(aged(memory, Holding(memory, kept)), dry_run=False, tombstones=True)
        tombstone = f"30/{manifest_key(2)}"
        assert {failure.key for failure in report.failures} == {kept, tombstone}
        assert {kept, tombstone} <= all_keys(memory)

    def test_metadata_that_stock_dcp_saved_since_the_deletion_stays(self, root: Store) -> None:
        garbage = leave_half_deleted(root, "30")
        for key in ("30/__0_0.distcp", "30/.metadata"):
            root.write(key, b"stock")
        del garbage["30/.metadata"]
        assert reasons(swept(root, tombstones=True)) == garbage
        assert (root.read("30/.metadata"), root.read("30/__0_0.distcp")) == (b"stock", b"stock")

    def test_a_live_checkpoint_is_no_mark(self, root: Store) -> None:
        save(root, b"one")
        before = root.list()
        assert swept(root, tombstones=True).garbage == ()
        assert root.list() == before


class TestFolders:
    """On a local disk a deletion ends with the removal of the whole folder."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "run")

    def leave(self, root: Store, name: str = "30") -> None:
        save(root, b"gone", name=name)
        script = Script(before=lambda operation, key: _fail(operation == "delete"))
        with pytest.raises(StoreError):
            delete_checkpoint(scripted(root, script).scope(name))

    def test_a_deletion_that_was_cut_short_is_finished_with_its_folder(
        self, root: Store, tmp_path: Path
    ) -> None:
        self.leave(root)
        before = all_keys(root)
        said = sweep(aged(root))
        assert reasons(said).keys() == before
        assert reasons(said)[f"30/{manifest_key(2)}"] == FOLDER
        report = swept(root)
        assert report.removed_count == len(before)
        assert list((tmp_path / "run").iterdir()) == []

    def test_objects_of_a_killed_save_go_with_it(self, root: Store, tmp_path: Path) -> None:
        save(root, b"gone", name="30")
        leave_uncommitted(root, "30")
        with pytest.raises(StoreError):
            delete_checkpoint(
                scripted(
                    aged(root), Script(before=lambda operation, key: _fail(operation == "delete"))
                ).scope("30")
            )
        report = swept(root)
        assert reasons(report)[f"30/{manifest_key(2)}"] == FOLDER
        assert list((tmp_path / "run").iterdir()) == []

    def test_a_save_that_may_have_begun_keeps_the_folder(self, root: Store, tmp_path: Path) -> None:
        self.leave(root)
        store = aged(root)
        begun = tmp_path / "run" / "30" / "d-0123456789abcdef"
        begun.mkdir()
        report = sweep(store, dry_run=False)
        assert f"30/{manifest_key(2)}" not in reasons(report)
        assert report.failures == ()
        assert begun.is_dir()

    def test_young_objects_of_a_save_keep_the_folder(self, root: Store) -> None:
        self.leave(root)
        store = aged(root)
        young = leave_uncommitted(root, "30")
        report = sweep(store, dry_run=False)
        assert f"30/{manifest_key(2)}" not in reasons(report)
        assert report.failures == ()
        assert all_keys(root) == {*young, f"30/{manifest_key(2)}"}

    def test_what_a_link_leads_to_is_left_alone(self, root: Store, tmp_path: Path) -> None:
        outside = LocalStore(tmp_path / "elsewhere")
        leave_replaced(outside, "10")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "best").symlink_to(tmp_path / "elsewhere" / "10")
        before = outside.list()
        assert swept(root).garbage == ()
        assert outside.list() == before

    @pytest.mark.parametrize("is_live", [True, False])
    def test_what_a_linked_data_folder_leads_to_is_left_alone(
        self, root: Store, tmp_path: Path, is_live: bool
    ) -> None:
        """Beside a checkpoint, and where nothing but the link is: both look like a killed save's."""
        kept = save(root, b"other", name="2").objects[0].key.partition("/")[0]
        if is_live:
            save(root, b"one", name="1")
        (tmp_path / "run" / "1").mkdir(exist_ok=True)
        (tmp_path / "run" / "1" / kept).symlink_to(tmp_path / "run" / "2" / kept)
        garbage = leave_uncommitted(root, "1")
        assert f"1/{kept}/0.distcp" in {info.key for info in root.list()}
        assert reasons(swept(root)) == garbage
        assert load(root, "2") == b"other"
        assert (tmp_path / "run" / "1" / kept).is_symlink()

    def test_a_folder_that_becomes_a_link_after_the_plan_is_left_alone(
        self, root: Store, tmp_path: Path
    ) -> None:
        data = {key for key in leave_uncommitted(root, "1") if key.endswith(".distcp")}
        (folder,) = {tmp_path / "run" / key.rpartition("/")[0] for key in data}

        def replace_folder() -> None:
            folder.rename(tmp_path / "moved")
            folder.symlink_to(tmp_path / "moved")

        script = Script(after=once("list_leftovers", replace_folder))
        report = sweep(aged(root, scripted(root, script)), dry_run=False)
        assert report.failures == ()
        assert sorted(path.name for path in (tmp_path / "moved").iterdir()) == ["0.distcp", "1.distcp"]

    def test_the_mark_of_a_deleted_checkpoint_stays_beside_a_link(self, root: Store, tmp_path: Path) -> None:
        self.leave(root)
        outside = LocalStore(tmp_path / "elsewhere")
        outside.write("0.distcp", b"of others")
        (tmp_path / "run" / "30" / "d-0123456789abcdef").symlink_to(tmp_path / "elsewhere")
        assert f"30/{manifest_key(2)}" not in reasons(swept(root))
        assert outside.read("0.distcp") == b"of others"

    def test_a_linked_file_loses_the_link_only(self, root: Store, tmp_path: Path) -> None:
        outside = LocalStore(tmp_path / "elsewhere")
        outside.write("0.distcp", b"of others")
        temp = ".tmp-0123456789abcdef01234567"
        (tmp_path / "run" / "1" / "d-0123456789abcdef").mkdir(parents=True)
        links = [f"1/d-0123456789abcdef/{name}" for name in ("0.distcp", temp)]
        links += [f"1/{temp}", temp]
        for link in links:
            is_folder = link in (temp, f"1/{temp}")
            target = tmp_path / "elsewhere" if is_folder else tmp_path / "elsewhere" / "0.distcp"
            (tmp_path / "run" / link).symlink_to(target)
        assert reasons(swept(root)).keys() == set(links)
        assert not any((tmp_path / "run" / link).is_symlink() for link in links)
        assert outside.read("0.distcp") == b"of others"

    def test_leftovers_behind_links_are_left_alone(self, root: Store, tmp_path: Path) -> None:
        outside = tmp_path / "elsewhere"
        (outside / "d-0123456789abcdef").mkdir(parents=True)
        (outside / ".tmp-0123456789abcdef01234567").write_bytes(b"1")
        (tmp_path / "empty").mkdir()
        (tmp_path / "run" / "1").mkdir(parents=True)
        (tmp_path / "run" / "2").symlink_to(outside)
        (tmp_path / "run" / "1" / "d-0123456789abcdef").symlink_to(outside)
        (tmp_path / "run" / "1" / "d-1123456789abcdef").symlink_to(tmp_path / "empty")
        before = sorted(outside.iterdir())
        assert swept(root).garbage == ()
        assert sorted(outside.iterdir()) == before
        assert (tmp_path / "empty").is_dir()

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
    def test_a_dry_run_needs_no_right_to_write(
        self, root: Store, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        garbage = leave_replaced(root, "10")
        store = aged(root)
        monkeypatch.setattr(os, "open", _refusing_new_files(number))
        assert reasons(sweep(store)) == garbage

    def test_a_clock_that_fails_for_another_reason_stops_everything(
        self, root: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leave_replaced(root, "10")
        monkeypatch.setattr(os, "open", _refusing_new_files(errno.EIO))
        with pytest.raises(StoreUnavailableError):
            sweep(root)

    def test_a_folder_whose_clock_differs_from_the_one_that_ages_were_told_by_is_left_alone(
        self, root: Store
    ) -> None:
        """Where the root may only be read its time is this host's, and below it files may go all the same."""
        garbage = leave_replaced(root, "10")

        def after(call: StoreCall, result: Any) -> Any:
            is_below = call.operation == "clock" and call.url.endswith("/10")
            return result - timedelta(minutes=6) if is_below else result

        report = sweep(aged(root, FaultStore(root, after=after)), dry_run=False)
        (failure,) = report.failures
        assert failure.key == "10"
        assert "minutes apart" in failure.message
        assert garbage.keys() <= all_keys(root)

    def test_a_root_that_is_itself_a_link_is_swept(self, tmp_path: Path) -> None:
        garbage = leave_replaced(LocalStore(tmp_path / "real"), "10")
        (tmp_path / "link").symlink_to(tmp_path / "real")
        assert reasons(swept(LocalStore(tmp_path / "link"))) == garbage

    def test_temporary_files_go_and_names_of_others_stay(self, root: Store, tmp_path: Path) -> None:
        save(root, b"one")
        run = tmp_path / "run"
        ours = {
            ".tmp-0123456789abcdef01234567": b"12345",
            "10/.tmp-0123456789abcdef01234567": b"1234",
            "20/d-0123456789abcdef/.tmp-0123456789abcdef01234567": b"123",
            ".trash-0123456789abcdef01234567/10/d-0123456789abcdef/0.distcp": b"12",
        }
        others = {
            ".tmp-mine": b"1",
            "10/.tmp-0123456789abcdef01234567.swp": b"1",
            "logs/deep/.tmp-0123456789abcdef01234567": b"1",
            "a b/.tmp-0123456789abcdef01234567": b"1",
        }
        for name, data in (ours | others).items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_bytes(data)
        (run / "30" / "d-0123456789abcdef").mkdir(parents=True)
        said = sweep(aged(root))
        expected = {".trash-0123456789abcdef01234567", "30/d-0123456789abcdef", *list(ours)[:3]}
        assert reasons(said).keys() == expected
        assert sum(each.size_bytes for each in said.garbage) == 14
        report = swept(root)
        assert (report.removed_count, report.removed_bytes) == (5, 14)
        assert all((run / name).exists() for name in others)
        assert sorted(path.name for path in run.iterdir() if path.is_dir()) == [
            "10",
            "20",
            "30",
            "a b",
            "logs",
        ]
        assert load(root) == b"one"

    def test_a_file_that_is_being_written_stays(self, root: Store, tmp_path: Path) -> None:
        (tmp_path / "run" / "20").mkdir(parents=True)
        (tmp_path / "run" / "20" / ".tmp-0123456789abcdef01234567").write_bytes(b"1")
        assert sweep(root).garbage == ()
        assert len(sweep(root, older_than=NOTHING).garbage) == 1


def _refusing_new_files(number: int) -> Callable[..., int]:
    """``os.open``, but that it makes no file."""
    real_open = os.open

    def refusing(path: str, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return real_open(path, flags, *rest, **named)

    return refusing


def _fail(is_wanted: bool) -> None:
    if is_wanted:
        raise StoreError("refused")


class Leaving(DelegatingStore):
    """A store with leftovers: keys and kinds, each two days old. It cannot remove those in ``held``."""

    def __init__(self, inner: Store, found: Sequence[tuple[str, str]], held: Sequence[str] = ()) -> None:
        super().__init__(inner)
        old = datetime.now(timezone.utc) - TWO_DAYS
        self.left = [_leftover(key, kind, old) for key, kind in found]
        self.removed: list[str] = []
        self._held = held

    def _wrap(self, inner: Store) -> Store:
        return inner

    def list_leftovers(self) -> Sequence[Leftover]:
        return list(self.left)

    def remove_leftover(self, leftover: Leftover) -> None:
        if leftover.key in self._held:
            raise AccessDeniedError("held")
        self.left.remove(leftover)
        self.removed.append(leftover.key)


def _leftover(key: str, kind: Any, modified_at: datetime) -> Leftover:
    upload_id = "id" if kind == "upload" else ""
    return Leftover(key=key, kind=kind, upload_id=upload_id, size_bytes=7, modified_at=modified_at)


class TestLeftovers:
    TOKEN = "d-0123456789abcdef"
    TEMP = ".tmp-0123456789abcdef01234567"
    OURS = (
        (f"10/{TOKEN}/0.distcp", "upload"),
        ("10/index.20200101T000000Z-0123456789ab.json.gz", "upload"),
        (TEMP, "file"),
        (f"10/{TEMP}", "file"),
        (f"10/{TOKEN}/{TEMP}", "file"),
        (f"10/{TOKEN}", "folder"),
        (".trash-0123456789abcdef01234567", "folder"),
    )
    OTHERS = (
        ("10/other.bin", "upload"),
        ("10/.metadata", "upload"),
        ("10/__0_0.distcp", "upload"),
        (f"10/deep/{TOKEN}/0.distcp", "upload"),
        (f"{TOKEN}/0.distcp", "upload"),
        (f"a b/{TOKEN}/0.distcp", "upload"),
        ("weights.pth", "upload"),
        (f"a b/{TEMP}", "file"),
        (f"10/deep/{TEMP}", "file"),
        (f"10/{TOKEN}/deep/{TEMP}", "file"),
        (TOKEN, "folder"),
        (f"10/deep/{TOKEN}", "folder"),
        (f".hidden/{TOKEN}", "folder"),
    )

    def test_those_of_our_own_names_go_and_all_others_stay(self, memory: Store) -> None:
        store = Leaving(memory, (*self.OURS, *self.OTHERS))
        said = sweep(store)
        assert reasons(said) == {key: LEFTOVER[kind] for key, kind in self.OURS}
        report = sweep(store, dry_run=False)
        assert sorted(store.removed) == sorted(key for key, _ in self.OURS)
        assert [found.key for found in store.left] == [key for key, _ in self.OTHERS]
        assert (report.removed_count, report.removed_bytes) == (len(self.OURS), 7 * len(self.OURS))

    def test_young_ones_stay(self, memory: Store) -> None:
        store = Leaving(memory, self.OURS)
        assert sweep(store, older_than=timedelta(days=3)).garbage == ()

    def test_one_that_went_on_after_the_plan_stays(self, memory: Store) -> None:
        store = Leaving(memory, [(f"10/{self.TEMP}", "file"), (self.TEMP, "file")])
        memory.write(PROBE, b"x")
        going_on = once("delete", lambda: store.left.append(replace(store.left.pop(0), size_bytes=8)))
        around = scripted(store, Script(before=going_on))
        report = sweep(AgedStore(around, {PROBE: TWO_DAYS}), dry_run=False)
        assert (store.removed, report.failures) == ([self.TEMP], ())
        assert [found.size_bytes for found in store.left] == [8]

    def test_one_that_cannot_be_removed_is_reported_and_the_others_go(self, memory: Store) -> None:
        store = Leaving(memory, self.OURS, held=[self.TEMP])
        report = sweep(store, dry_run=False)
        assert report.failures == (SweepFailure(self.TEMP, "held"),)
        assert report.removed_count == len(self.OURS) - 1

    def test_those_of_a_checkpoint_that_is_passed_over_stay(self, memory: Store) -> None:
        lost = save(memory, b"one").objects[0].key
        memory.delete([f"10/{lost}"])
        store = Leaving(memory, self.OURS)
        assert reasons(sweep(store)).keys() == {key for key, _ in self.OURS if not key.startswith("10/")}
