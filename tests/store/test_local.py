"""The local store: the contract, durability, handles that follow moved folders, errors of the system."""

from __future__ import annotations

import errno
import multiprocessing
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    RemoteCkptError,
    StorageFullError,
    StoreError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.store.base import Leftover, Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.testing.contract import DATA, StoreContract


class TestLocalStore(StoreContract):
    # Files are stamped by the kernel's tick, which the clock reads in the same way.
    clock_tolerance = timedelta(0)

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "not" / "yet" / "there")

    def raw_read(self, store: Store, key: str) -> bytes | None:
        path = Path(store.url, key)
        return path.read_bytes() if path.is_file() else None

    def raw_write(self, store: Store, key: str, data: bytes) -> None:
        path = Path(store.url, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_mark_folder(self, store: Store, key: str) -> None:
        Path(store.url, key).mkdir(parents=True, exist_ok=True)

    def raw_leave(self, store: Store, key: str) -> bool:
        temp = Path(store.url, key).with_name(f".tmp-{secrets.token_hex(12)}")
        temp.parent.mkdir(parents=True, exist_ok=True)
        temp.write_bytes(DATA)
        return True


def _failing(number: int) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def _names_below(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


class TestDurability:
    """What is synced, in which order; a power failure cannot be had in a test."""

    @pytest.fixture
    def steps(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Every sync (with what is synced) and every publishing step, in order."""
        steps: list[str] = []
        sync, link, rename, mkdir = os.fsync, os.link, os.rename, os.mkdir

        def watched_sync(descriptor: int) -> None:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
            steps.append(f"sync {'temporary file' if name.startswith('.tmp-') else name}")
            sync(descriptor)

        def watched(step: str, call: Callable[..., None]) -> Callable[..., None]:
            def run(*args: object, **kwargs: object) -> None:
                call(*args, **kwargs)
                steps.append(step + (f" {args[0]}" if step == "mkdir" else ""))

            return run

        monkeypatch.setattr(os, "fsync", watched_sync)
        monkeypatch.setattr(os, "link", watched("link", link))
        monkeypatch.setattr(os, "rename", watched("rename", rename))
        monkeypatch.setattr(os, "mkdir", watched("mkdir", mkdir))
        return steps

    def test_a_write_syncs_new_folders_then_the_file_then_its_name(
        self, tmp_path: Path, steps: list[str]
    ) -> None:
        root = tmp_path / "run"
        LocalStore(root).scope("1", create=True).write("token/0.distcp", DATA)
        assert steps == [
            f"mkdir {root.name}",
            f"sync {tmp_path.name}",
            "mkdir 1",
            "sync run",
            "mkdir token",
            "sync 1",
            "sync temporary file",
            "rename",
            "sync token",
        ]

    def test_a_create_syncs_the_file_then_links_it_then_syncs_the_name(
        self, tmp_path: Path, steps: list[str]
    ) -> None:
        LocalStore(tmp_path).create("manifest.000001.json", DATA)
        assert steps == ["sync temporary file", "link", f"sync {tmp_path.name}"]

    def test_a_folder_that_somebody_else_made_is_synced_too(self, tmp_path: Path, steps: list[str]) -> None:
        (tmp_path / "1").mkdir()
        steps.clear()
        LocalStore(tmp_path).scope("1", create=True)
        assert steps == [f"sync {tmp_path.name}"]

    def test_removing_a_folder_syncs_the_move(self, tmp_path: Path, steps: list[str]) -> None:
        scope = LocalStore(tmp_path).scope("1", create=True)
        steps.clear()
        assert scope.remove_folder()
        assert steps == ["rename", f"sync {tmp_path.name}"]


class TestScopes:
    @pytest.fixture
    def root(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path)

    def test_writes_into_a_moved_folder_never_reach_a_newer_one_of_its_name(
        self, root: LocalStore, tmp_path: Path
    ) -> None:
        old = root.scope("1", create=True)
        old.write("token/0", DATA)
        (tmp_path / "1").rename(tmp_path / "aside")
        new = root.scope("1", create=True)
        new.create("manifest.000001.json", b"new life")
        old.write("late", b"late")
        old.write("token/late", b"late")
        old.create("manifest.000002.json", b"late")
        old.copy("token/0", "copied")
        assert old.delete(["manifest.000001.json"]) == []
        assert [info.key for info in new.list()] == ["manifest.000001.json"]
        assert _names_below(tmp_path / "aside") == [
            "copied", "late", "manifest.000002.json", "token", "token/0", "token/late"
        ]  # fmt: skip
        assert (old.is_current(), new.is_current()) == (False, True)

    def test_a_removed_folder_is_gone_with_all_that_was_in_it(self, root: LocalStore, tmp_path: Path) -> None:
        scope = root.scope("1", create=True)
        for key in ("manifest.000001.json", "a/b/c", ".metadata"):
            scope.write(key, DATA)
        assert scope.remove_folder()
        assert _names_below(tmp_path) == []
        assert not scope.is_current()
        assert not scope.remove_folder()

    def test_removal_spares_the_newer_folder_of_the_name(self, root: LocalStore, tmp_path: Path) -> None:
        old, same = root.scope("1", create=True), root.scope("1")
        assert old.remove_folder()
        root.scope("1", create=True).write("k", DATA)
        assert not same.remove_folder()
        assert root.read("1/k") == DATA

    def test_a_folder_that_was_removed_is_never_taken_for_an_empty_one(self, root: LocalStore) -> None:
        scope, remover = root.scope("1", create=True), root.scope("1")
        scope.write("manifest.000001.json", DATA)
        assert remover.remove_folder()
        calls: list[Callable[[], object]] = [
            scope.list,
            scope.list_children,
            lambda: scope.write("k", DATA),
            lambda: scope.create("k", DATA),
        ]
        for call in calls:
            with pytest.raises(CheckpointChangedError, match="removed"):
                call()
        with pytest.raises(ObjectNotFoundError):
            scope.read("manifest.000001.json")

    def test_emptying_does_not_follow_links(self, root: LocalStore, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").write_bytes(DATA)
        scope = root.scope("1", create=True)
        (tmp_path / "1" / "folder").symlink_to(outside)
        (tmp_path / "1" / "file").symlink_to(outside / "precious")
        assert scope.remove_folder()
        assert _names_below(tmp_path) == ["outside", "outside/precious"]

    def test_a_checkpoint_reached_through_a_link_is_read_but_not_removed(
        self, root: LocalStore, tmp_path: Path
    ) -> None:
        root.scope("1", create=True).write("k", DATA)
        (tmp_path / "best").symlink_to("1")
        linked = root.scope("best")
        assert (linked.read("k"), linked.is_current()) == (DATA, True)
        assert not linked.remove_folder()
        assert root.read("1/k") == DATA

    def test_a_folder_is_not_moved_where_it_cannot_be_locked(
        self, root: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scope = root.scope("1", create=True)
        scope.write("k", DATA)
        monkeypatch.setattr("fcntl.flock", _failing(errno.EBADF))
        assert not scope.remove_folder()
        assert root.read("1/k") == DATA

    def test_an_absent_folder_is_not_found_unless_it_is_made(self, root: LocalStore, tmp_path: Path) -> None:
        with pytest.raises(CheckpointNotFoundError):
            root.scope("1")
        with pytest.raises(CheckpointNotFoundError):
            LocalStore(tmp_path / "no" / "run").scope("1")
        assert _names_below(tmp_path) == []
        assert root.scope("1", create=True).list() == []

    def test_a_file_in_the_place_of_a_scope_is_left_alone(self, root: LocalStore, tmp_path: Path) -> None:
        (tmp_path / "1").write_bytes(DATA)
        for create in (False, True):
            with pytest.raises(CheckpointExistsError, match="a file stands"):
                root.scope("1", create=create)
        assert (tmp_path / "1").read_bytes() == DATA

    @pytest.mark.parametrize("name", ["1/2", "..", ".tmp-1", ".trash-1", ""])
    def test_a_scope_has_a_plain_name(self, root: LocalStore, name: str) -> None:
        with pytest.raises(ConfigError):
            root.scope(name, create=True)

    def test_a_dropped_scope_gives_its_handle_back(self, root: LocalStore) -> None:
        root.write("1/k", DATA)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            assert root.scope("1").read("k") == DATA
        assert len(os.listdir("/proc/self/fd")) == before

    def test_threads_that_list_one_scope_at_once_all_see_everything(self, root: LocalStore) -> None:
        scope = root.scope("1", create=True)
        keys = sorted(f"k{number}" for number in range(200))
        for key in keys:
            Path(scope.url, key).write_bytes(DATA)
        start = threading.Barrier(8)

        def list_often(_: int) -> list[list[str]]:
            start.wait()
            return [[info.key for info in scope.list()] for _ in range(10)]

        with ThreadPoolExecutor(8) as pool:
            for listings in pool.map(list_often, range(8)):
                assert listings == [keys] * 10

    def test_deleting_removes_emptied_folders_but_not_the_checkpoints_own(
        self, root: LocalStore, tmp_path: Path
    ) -> None:
        scope = root.scope("1", create=True)
        scope.write("token/deep/0", DATA)
        scope.delete(["token/deep/0"])
        assert _names_below(tmp_path) == ["1"]
        scope.write("token/0", DATA)
        root.delete(["1/token/0"])
        assert _names_below(tmp_path) == ["1"]
        scope.write("k", DATA)
        assert root.read("1/k") == DATA


TEMP = ".tmp-0123456789abcdef01234567"
TRASH = ".trash-0123456789abcdef01234567"


def _leftover(key: str) -> Leftover:
    return Leftover(key=key, kind="file", size_bytes=1, modified_at=datetime.now(timezone.utc))


class TestHiddenNames:
    def test_what_a_crash_leaves_is_hidden_reported_and_removable(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.write("1/k", DATA)
        (tmp_path / "1" / TEMP).write_bytes(b"half")
        (tmp_path / TRASH / "deep").mkdir(parents=True)
        (tmp_path / TRASH / "deep" / "k").write_bytes(DATA)
        (tmp_path / TRASH / "l").write_bytes(b"123")
        assert [info.key for info in store.list()] == ["1/k"]
        assert store.list_children().prefixes == ("1",)
        leftovers = store.list_leftovers()
        assert [(found.key, found.kind, found.size_bytes) for found in leftovers] == [
            (TRASH, "folder", len(DATA) + 3),
            (f"1/{TEMP}", "file", 4),
        ]
        assert all(found.modified_at <= store.clock() for found in leftovers)
        for found in leftovers:
            store.remove_leftover(found)
        store.remove_leftover(leftovers[1])
        assert _names_below(tmp_path) == ["1", "1/k"]

    def test_the_folder_of_a_save_is_left_over_while_it_is_empty(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        for name in ("1/d-0123456789abcdef", "1/other", "2/d-0123456789abcdef", "3"):
            (tmp_path / name).mkdir(parents=True)
        store.write("2/d-0123456789abcdef/0.distcp", DATA)
        (found,) = store.list_leftovers()
        assert (found.key, found.kind, found.size_bytes) == ("1/d-0123456789abcdef", "folder", 0)
        store.write(f"{found.key}/0.distcp", DATA)
        store.remove_leftover(found)
        assert store.read(f"{found.key}/0.distcp") == DATA
        store.scope("1").delete(["d-0123456789abcdef/0.distcp"])
        (tmp_path / "1" / "d-0123456789abcdef").mkdir()
        store.remove_leftover(found)
        assert _names_below(tmp_path / "1") == ["other"]

    def test_a_save_s_folder_goes_with_the_temporary_file_in_it(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.write("1/k", DATA)
        (tmp_path / "1" / "d-0123456789abcdef").mkdir()
        (tmp_path / "1" / "d-0123456789abcdef" / TEMP).write_bytes(b"half")
        (found,) = store.list_leftovers()
        assert found.key == f"1/d-0123456789abcdef/{TEMP}"
        store.remove_leftover(found)
        assert _names_below(tmp_path) == ["1", "1/k"]

    @pytest.mark.parametrize("name", [".tmp-0a", ".trash-", ".tmp-" + "g" * 24, TEMP + ".old", "." + TEMP])
    def test_names_that_are_not_exactly_ours_are_no_leftovers(self, tmp_path: Path, name: str) -> None:
        store = LocalStore(tmp_path)
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / name).write_bytes(DATA)
        assert list(store.list_leftovers()) == []
        with pytest.raises(ConfigError, match="no leftover"):
            store.remove_leftover(_leftover(f"1/{name}"))
        assert _names_below(tmp_path) == ["1", f"1/{name}"]

    def test_nothing_is_found_or_removed_through_a_link(self, tmp_path: Path) -> None:
        store, outside = LocalStore(tmp_path / "run"), tmp_path / "outside"
        (tmp_path / "run" / TRASH).mkdir(parents=True)
        outside.mkdir()
        (outside / TEMP).write_bytes(DATA)
        (tmp_path / "run" / "1").symlink_to(outside)
        (tmp_path / "run" / TRASH / "link").symlink_to(outside)
        (found,) = store.list_leftovers()
        assert found.key == TRASH
        store.remove_leftover(found)
        assert _names_below(outside) == [TEMP]
        assert not (tmp_path / "run" / TRASH).exists()

    def test_what_lies_in_a_folder_that_was_moved_aside_goes_with_it_only(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        (tmp_path / TRASH).mkdir()
        (tmp_path / TRASH / TEMP).write_bytes(DATA)
        assert [found.key for found in store.list_leftovers()] == [TRASH]
        with pytest.raises(ConfigError, match="no leftover"):
            store.remove_leftover(_leftover(f"{TRASH}/{TEMP}"))

    @pytest.mark.parametrize("key", [".tmp-1", "1/.trash-1/k"])
    def test_hidden_names_are_no_keys(self, tmp_path: Path, key: str) -> None:
        with pytest.raises(ConfigError, match="reserved"):
            LocalStore(tmp_path).write(key, DATA)

    def test_a_failed_write_leaves_no_temporary_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        monkeypatch.setattr(os, "write", _failing(errno.ENOSPC))
        for write in (store.write, store.create):
            with pytest.raises(StorageFullError):
                write("k", DATA)
        assert _names_below(tmp_path) == []


class TestListing:
    def test_times_are_those_of_the_last_change_of_status(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.write("old", DATA)
        os.utime(tmp_path / "old", (0, 0))
        before = store.clock()
        store.copy("old", "linked")
        for key in ("old", "linked"):
            assert store.info(key).modified_at >= before
            assert store.info(key).modified_at.tzinfo is timezone.utc

    def test_links_are_followed_and_circles_and_dead_ends_do_no_harm(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "run")
        store.write("1/k", DATA)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "k").write_bytes(DATA)
        (tmp_path / "run" / "2").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "run" / "1" / "up").symlink_to("..")
        (tmp_path / "run" / "1" / "dead").symlink_to("nowhere")
        (tmp_path / "run" / "1" / "self").symlink_to("self")
        assert [info.key for info in store.list()] == ["1/k", "2/k"]
        assert store.list_children().prefixes == ("1", "2")

    def test_only_regular_files_are_objects(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        store = LocalStore(tmp_path)
        assert store.list() == []
        with pytest.raises(ObjectNotFoundError):
            store.read("pipe")

    def test_an_absent_root_is_empty_and_stays_absent(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "run" / "ckpt")
        assert store.list() == []
        assert store.list_children().prefixes == ()
        assert not store.delete(["k"])
        assert store.clock() > store.clock() - timedelta(days=1)
        assert _names_below(tmp_path) == []

    def test_a_root_behind_a_dead_link_is_not_taken_for_an_empty_one(self, tmp_path: Path) -> None:
        (tmp_path / "disk").symlink_to(tmp_path / "not-mounted")
        calls: list[Callable[[LocalStore], object]] = [
            lambda store: store.list(),
            lambda store: store.list_children(),
            lambda store: store.read("k"),
            lambda store: store.scope("1"),
            lambda store: store.clock(),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailableError, match="leads nowhere"):
                call(LocalStore(tmp_path / "disk" / "run"))

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
    def test_a_root_that_cannot_be_read_is_not_taken_for_an_empty_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        store = LocalStore(tmp_path)
        monkeypatch.setattr(os, "open", _failing(number))
        for call in (store.list, store.list_children):
            with pytest.raises(StoreError) as caught:
                call()
            assert isinstance(caught.value, AccessDeniedError if number == errno.EACCES else ConnectionError)

    def test_a_root_that_is_a_file_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(DATA)
        store = LocalStore(tmp_path / "file")
        for call in (store.list, store.list_children, lambda: store.write("k", DATA)):
            with pytest.raises(StoreError, match="a file stands where a folder is needed"):
                call()

    def test_a_root_that_is_made_anew_is_seen(self, tmp_path: Path) -> None:
        root = tmp_path / "run"
        store = LocalStore(root)
        store.write("k", DATA)
        root.rename(tmp_path / "aside")
        assert store.list() == []
        store.write("l", DATA)
        assert _names_below(root) == ["l"]


class TestErrorsOfTheSystem:
    def test_a_range_far_past_the_end_takes_no_memory(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.write("k", b"0123456789")
        with pytest.raises(IntegrityError, match="ends"):
            store.read_range("k", 5, 1 << 60)

    @pytest.mark.parametrize(
        ("number", "kind"),
        [
            (errno.ENOSPC, StorageFullError),
            (errno.EDQUOT, StorageFullError),
            (errno.EACCES, AccessDeniedError),
            (errno.EPERM, AccessDeniedError),
            (errno.EROFS, AccessDeniedError),
            (errno.EIO, StoreUnavailableError),
            (errno.ESTALE, StoreUnavailableError),
            (errno.EINVAL, StoreError),
        ],
    )
    def test_each_has_its_meaning_and_its_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[RemoteCkptError]
    ) -> None:
        store = LocalStore(tmp_path)
        monkeypatch.setattr(os, "write", _failing(number))
        with pytest.raises(kind) as caught:
            store.write("1/k", DATA)
        assert (caught.value.url, caught.value.key) == (str(tmp_path), "1/k")
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == number

    def test_an_error_that_shows_only_when_the_file_is_synced_publishes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        store.write("k", b"old")
        monkeypatch.setattr(os, "fsync", _failing(errno.EDQUOT))
        with pytest.raises(StorageFullError):
            store.write("k", DATA)
        with pytest.raises(StorageFullError):
            store.create("new", DATA)
        assert _names_below(tmp_path) == ["k"]
        assert store.read("k") == b"old"

    def test_a_folder_that_cannot_be_synced_as_such_is_accepted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sync = os.fsync

        def sync_files_only(descriptor: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.EINVAL, "folders cannot be synced here")
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", sync_files_only)
        store = LocalStore(tmp_path)
        store.write("1/k", DATA)
        assert store.read("1/k") == DATA

    def test_an_object_is_not_written_over_a_folder_nor_below_a_file(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.write("folder/k", DATA)
        with pytest.raises(StoreError, match="a folder stands"):
            store.write("folder", DATA)
        with pytest.raises(StoreError, match="a file stands"):
            store.write("folder/k/deeper", DATA)
        with pytest.raises(StoreError, match="no file stands where an object is needed"):
            store.create("folder", DATA)
        assert _names_below(tmp_path) == ["folder", "folder/k"]

    def test_a_failed_deletion_is_reported_for_its_key_and_others_go_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        for key in ("a", "b", "c"):
            store.write(key, DATA)
        unlink = os.unlink

        def unlink_all_but_b(name: str, *, dir_fd: int) -> None:
            if name == "b":
                raise PermissionError(errno.EACCES, "denied")
            unlink(name, dir_fd=dir_fd)

        monkeypatch.setattr(os, "unlink", unlink_all_but_b)
        failures = store.delete(["a", "b", "c"])
        assert [(one.key, type(one.error)) for one in failures] == [("b", AccessDeniedError)]
        assert [info.key for info in store.list()] == ["b"]


class TestLinks:
    """Hard links: how create and copy work, and what they do without."""

    def test_a_copy_shares_the_bytes_on_disk(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.write("a", DATA)
        store.copy("a", "1/b")
        assert (tmp_path / "a").samefile(tmp_path / "1" / "b")

    def test_a_copy_without_hard_links_moves_the_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        store.write("a", DATA)
        monkeypatch.setattr(os, "link", _failing(errno.EPERM))
        store.copy("a", "1/b")
        assert not (tmp_path / "a").samefile(tmp_path / "1" / "b")
        assert (tmp_path / "1" / "b").read_bytes() == DATA
        assert _names_below(tmp_path) == ["1", "1/b", "a"]

    def test_a_create_without_hard_links_is_refused_instead_of_racing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        monkeypatch.setattr(os, "link", _failing(errno.EOPNOTSUPP))
        with pytest.raises(UnsupportedStoreError, match="hard links"):
            store.create("k", DATA)
        assert _names_below(tmp_path) == []

    def test_a_link_that_was_made_although_nfs_says_it_exists_is_a_success(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link = os.link

        def link_and_answer_twice(*args: str, **kwargs: int) -> None:
            link(*args, **kwargs)  # type: ignore[arg-type]
            raise FileExistsError(errno.EEXIST, "the answer to the repeated request")

        monkeypatch.setattr(os, "link", link_and_answer_twice)
        store = LocalStore(tmp_path)
        store.create("k", DATA)
        assert store.read("k") == DATA
        with pytest.raises(ObjectExistsError):
            store.create("k", b"second")
        assert _names_below(tmp_path) == ["k"]

    def test_a_rename_that_was_done_although_nfs_finds_nothing_is_a_success(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename = os.rename

        def rename_and_answer_twice(*args: str, **kwargs: int) -> None:
            rename(*args, **kwargs)  # type: ignore[arg-type]
            raise FileNotFoundError(errno.ENOENT, "the answer to the repeated request")

        monkeypatch.setattr(os, "rename", rename_and_answer_twice)
        store = LocalStore(tmp_path)
        store.write("k", DATA)
        assert store.read("k") == DATA


def test_short_reads_and_writes_of_the_system_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    monkeypatch.setattr(
        os, "preadv", lambda descriptor, parts, offset: preadv(descriptor, [parts[0][:70]], offset)
    )
    store = LocalStore(tmp_path)
    store.write("k", DATA)
    assert bytes(store.read_range("k", 3, 1000)) == DATA[3:1003]
    assert (tmp_path / "k").read_bytes() == DATA


def _write_in_child(scope: LocalStore) -> None:
    scope.write("child", DATA)
    assert scope.read("parent") == DATA


def test_a_store_and_its_scopes_work_after_fork(tmp_path: Path) -> None:
    scope = LocalStore(tmp_path).scope("1", create=True)
    scope.write("parent", DATA)
    child = multiprocessing.get_context("fork").Process(target=_write_in_child, args=(scope,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert scope.read("child") == DATA


def test_a_folder_that_cannot_be_made_is_no_missing_checkpoint() -> None:
    with pytest.raises(StoreError, match="cannot create the folder"):
        LocalStore("/proc/x").scope("1", create=True)
