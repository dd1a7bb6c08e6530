"""Which checkpoints exist: what is listed, what is passed over, what is an error and never absence."""

from __future__ import annotations

from pathlib import Path

import pytest
from protocol import Script, answers, load, save, scripted, upload

from remote_ckpt.changes import set_pinned
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.discover import find_checkpoints, find_latest, resolve
from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    FormatError,
    StoreError,
    StoreUnavailableError,
    UrlError,
)
from remote_ckpt.keys import manifest_key
from remote_ckpt.newest import read_newest
from remote_ckpt.store.base import Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.testing.faults import FaultStore, StoreCall


@pytest.fixture(params=["memory", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore.fresh() if request.param == "memory" else LocalStore(tmp_path / "run")


def names(root: Store) -> list[str]:
    return [entry.name for entry in find_checkpoints(root)]


def test_an_empty_or_missing_root_holds_nothing(root: Store) -> None:
    assert find_checkpoints(root) == []
    assert find_latest(root) is None


def test_br15_steps_come_first_in_the_order_of_their_numbers(root: Store) -> None:
    for name in ("500", "10000", "9000", "best", "10000_keep"):
        save(root, b"x", name=name)
    assert names(root) == ["500", "9000", "10000", "10000_keep", "best"]
    latest = find_latest(root)
    assert latest is not None
    assert (latest.name, latest.step, latest.kind, latest.generation) == ("10000", 10000, "remote_ckpt", 1)


def test_an_entry_carries_the_newest_manifest(root: Store) -> None:
    save(root, b"x")
    pinned = set_pinned(root.scope("10"), True)
    assert [entry.manifest for entry in find_checkpoints(root)] == [pinned]


def test_br01_a_save_without_its_manifest_is_ignored(root: Store) -> None:
    save(root, b"x")
    upload(root.scope("20", create=True), b"half", name="20")
    latest = find_latest(root)
    assert latest is not None
    assert latest.name == "10"
    assert names(root) == ["10"]


def test_a_deleted_checkpoint_is_ignored(root: Store) -> None:
    for name in ("10", "20"):
        save(root, b"x", name=name)
    delete_checkpoint(root.scope("20"))
    assert names(root) == ["10"]
    latest = find_latest(root)
    assert latest is not None
    assert latest.name == "10"


def test_stock_and_plain_checkpoints_are_listed_by_kind(root: Store) -> None:
    root.write("5/.metadata", b"stock")
    root.write("5/__0_0.distcp", b"stock")
    root.write("eval/checkpoint.pth", b"plain")
    found = [(entry.name, entry.kind, entry.generation) for entry in find_checkpoints(root)]
    assert found == [("5", "dcp", 0), ("eval", "plain", 0)]
    latest = find_latest(root)
    assert latest is not None
    assert latest.kind == "dcp"


def test_foreign_names_and_folders_are_ignored(root: Store) -> None:
    save(root, b"x")
    root.write("notes/todo.txt", b"x")
    root.write("with space/manifest.000001.json", b"x")
    root.write("loose.json", b"x")
    root.write("20/half/__0_0.distcp", b"x")
    assert names(root) == ["10"]


@pytest.mark.parametrize("name", ["007", "1_000", "-1", "+5"])
def test_names_that_only_look_like_numbers_are_no_steps(name: str) -> None:
    root = MemoryStore.fresh()
    root.write(f"{name}/.metadata", b"stock")
    assert find_latest(root) is None


def test_br61_zero_byte_folder_markers_are_harmless(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    (tmp_path / "30").mkdir()
    save(root, b"x")
    assert names(root) == ["10"]


class TestDamage:
    @pytest.fixture
    def damaged(self, root: Store) -> Store:
        for name in ("10", "20"):
            save(root, b"x", name=name)
        root.write(f"20/{manifest_key(1)}", b'{"format": "remote_ckpt"')
        return root

    def test_br09_latest_passes_over_it_with_a_warning(
        self, damaged: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        latest = find_latest(damaged)
        assert latest is not None
        assert latest.name == "10"
        assert "passing over the damaged checkpoint 20" in caplog.text

    def test_it_is_listed_with_its_error(self, damaged: Store) -> None:
        entry = find_checkpoints(damaged)[-1]
        assert (entry.name, entry.generation, entry.manifest) == ("20", 1, None)
        assert isinstance(entry.error, CheckpointDamagedError)

    def test_br09_asking_for_it_by_name_raises(self, damaged: Store) -> None:
        with pytest.raises(CheckpointDamagedError):
            resolve(damaged, "20")

    @pytest.mark.parametrize("content", [b"{}", b'{"format": "other"}', b'{"a":'])
    def test_latest_passes_over_a_manifest_that_is_none(self, root: Store, content: bytes) -> None:
        save(root, b"x")
        root.write(f"20/{manifest_key(1)}", content)
        latest = find_latest(root)
        assert latest is not None
        assert latest.name == "10"

    def test_a_newer_format_is_listed_with_its_error(self, root: Store) -> None:
        root.write(f"10/{manifest_key(1)}", b'{"format": "remote_ckpt", "version": [9, 0]}')
        entry = find_checkpoints(root)[0]
        assert isinstance(entry.error, FormatError)
        with pytest.raises(FormatError):
            resolve(root, "10")

    def test_latest_does_not_go_back_below_a_step_of_a_newer_format(self, root: Store) -> None:
        save(root, b"x")
        root.write(f"20/{manifest_key(1)}", b'{"format": "remote_ckpt", "version": [9, 0]}')
        with pytest.raises(FormatError):
            find_latest(root)

    def test_a_step_of_a_newer_format_below_the_latest_is_no_matter(self, root: Store) -> None:
        save(root, b"x")
        root.write(f"5/{manifest_key(1)}", b'{"format": "remote_ckpt", "version": [9, 0]}')
        latest = find_latest(root)
        assert latest is not None
        assert latest.name == "10"


class TestUnreadableNames:
    @staticmethod
    def denying(root: Store, name: str) -> Store:
        def deny(call: StoreCall) -> None:
            if call.url.endswith(f"/{name}"):
                raise AccessDeniedError("403")

        return FaultStore(root, before=deny)

    def test_a_name_that_is_no_step_is_passed_over_with_a_warning(
        self, root: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(root, b"x")
        root.write("logs/events", b"x")
        assert names(self.denying(root, "logs")) == ["10"]
        assert "passing over logs" in caplog.text

    def test_a_step_is_an_error(self, root: Store) -> None:
        for name in ("10", "20"):
            save(root, b"x", name=name)
        with pytest.raises(AccessDeniedError):
            find_checkpoints(self.denying(root, "10"))
        with pytest.raises(AccessDeniedError):
            find_latest(self.denying(root, "20"))

    def test_asking_for_it_by_name_is_an_error(self, root: Store) -> None:
        save(root, b"x", name="best")
        with pytest.raises(AccessDeniedError):
            resolve(self.denying(root, "best"), "best")


class TestWithoutTheRightToList:
    """BR-57: a role that may only read. Without the right to list, S3 answers 403 for missing objects."""

    @staticmethod
    def reading_only(root: Store) -> Store:
        def deny(call: StoreCall) -> None:
            if call.operation in ("list", "list_children"):
                raise AccessDeniedError("list: 403")
            if call.operation in ("read", "info") and not _exists(root, f"{call.url}/{call.key}"):
                raise AccessDeniedError("read: 403")

        return FaultStore(root, before=deny)

    def test_the_newest_generation_is_found_by_its_key(self, root: Store) -> None:
        save(root, b"x")
        pinned = set_pinned(root.scope("10"), True)
        newest = read_newest(self.reading_only(root).scope("10"))
        assert newest is not None
        assert newest.manifest == pinned
        assert load(self.reading_only(root)) == b"x"

    def test_absence_cannot_be_told_from_a_missing_right(self, root: Store) -> None:
        root.scope("10", create=True).write("other", b"x")
        with pytest.raises(AccessDeniedError, match="list: 403"):
            read_newest(self.reading_only(root).scope("10"))

    def test_which_checkpoints_there_are_needs_the_right(self, root: Store) -> None:
        save(root, b"x")
        for find in (find_latest, find_checkpoints):
            with pytest.raises(AccessDeniedError):
                find(self.reading_only(root))

    def test_a_manifest_that_is_listed_and_may_not_be_read_is_an_error(self, root: Store) -> None:
        save(root, b"x")
        store = scripted(root, answers("read", {0: AccessDeniedError("403")}, key="manifest."))
        with pytest.raises(AccessDeniedError):
            read_newest(store.scope("10"))


def _exists(root: Store, url: str) -> bool:
    return url.removeprefix(f"{root.url}/") in {info.key for info in root.list()}


class TestResolve:
    def test_it_returns_the_checkpoint(self, root: Store) -> None:
        manifest = save(root, b"x", name="best")
        assert resolve(root, "best").manifest == manifest

    def test_br17_absence_is_an_error_that_names_root_and_checkpoint(self, root: Store) -> None:
        with pytest.raises(CheckpointNotFoundError) as caught:
            resolve(root, "10")
        assert root.url in str(caught.value)
        assert "'10'" in str(caught.value)

    def test_a_name_that_cannot_be_one_is_refused(self, root: Store) -> None:
        with pytest.raises(UrlError):
            resolve(root, "../10")


class TestStoreErrors:
    """BR-18, promise 5: an error is never taken for absence."""

    @pytest.mark.parametrize("error", [StoreUnavailableError("503"), AccessDeniedError("403")])
    @pytest.mark.parametrize(
        ("operation", "number"), [("list_children", 0), ("list_children", 1), ("read", 0)]
    )
    def test_any_failing_request_is_raised(self, error: StoreError, operation: str, number: int) -> None:
        root = MemoryStore.fresh()
        save(root, b"x")
        with pytest.raises(type(error)):
            find_checkpoints(scripted(root, answers(operation, {number: error}, key="")))
        with pytest.raises(type(error)):
            find_latest(scripted(root, answers(operation, {number: error}, key="")))


class TestRequests:
    def test_latest_takes_three_requests_whatever_the_number_of_checkpoints(self) -> None:
        root = MemoryStore.fresh()
        for step in range(30):
            save(root, b"x", name=str(step))
        counted = FaultStore(root)
        find_latest(counted)
        assert [call.operation for call in counted.calls] == ["list_children", "list_children", "read"]

    def test_a_half_made_step_above_costs_one_more(self) -> None:
        root = MemoryStore.fresh()
        save(root, b"x")
        upload(root.scope("20"), b"half", name="20")
        counted = FaultStore(root)
        find_latest(counted)
        assert len(counted.calls) == 4

    def test_a_listing_takes_one_request_and_two_for_each_checkpoint(self) -> None:
        root = MemoryStore.fresh()
        for step in range(5):
            save(root, b"x", name=str(step))
        counted = FaultStore(root)
        find_checkpoints(counted)
        assert len(counted.calls) == 1 + 2 * 5


def test_a_local_folder_that_vanishes_after_the_listing_is_ignored(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    for name in ("10", "20"):
        save(root, b"x", name=name)

    def delete_it(operation: str, key: str) -> None:
        if operation == "list_children" and not deleted:
            deleted.append(True)
            delete_checkpoint(root.scope("20"))

    deleted: list[bool] = []
    assert names(scripted(root, Script(after=delete_it))) == ["10"]


def test_a_step_that_is_a_link_to_a_disk_that_is_not_mounted_is_an_error_and_no_absence(
    tmp_path: Path,
) -> None:
    root = LocalStore(tmp_path / "run")
    save(root, b"x", name="1")
    (tmp_path / "run" / "2").symlink_to(tmp_path / "not mounted" / "2")
    for look in (find_checkpoints, find_latest, lambda root: resolve(root, "2")):
        with pytest.raises(StoreUnavailableError, match="not mounted"):
            look(root)
    assert load(root, "1") == b"x"


def test_a_link_that_leads_nowhere_and_is_named_by_no_step_hides_nothing(tmp_path: Path) -> None:
    root = LocalStore(tmp_path / "run")
    save(root, b"x", name="1")
    (tmp_path / "run" / "newest").symlink_to("0")
    assert names(root) == ["1"]
    with pytest.raises(StoreUnavailableError, match="leads nowhere"):
        resolve(root, "newest")
