"""When the sweep does not act: doubtful listings, unreadable manifests, wrong clocks, refusing stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from protocol import Script, load, manifests_of, once, save, scripted
from sweeping import (
    PROBE,
    Holding,
    aged,
    all_keys,
    leave_everything,
    leave_replaced,
    leave_uncommitted,
    newest_of,
    reasons,
    recorded,
    swept,
)

from remote_ckpt.changes import annotate
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import (
    AccessDeniedError,
    MissingDependencyError,
    StoreError,
    StoreUnavailableError,
    SweepRefusedError,
    UnsupportedStoreError,
)
from remote_ckpt.keys import manifest_key, parse_manifest_key
from remote_ckpt.manifest import format_manifest
from remote_ckpt.progress import Progress
from remote_ckpt.store.base import Listing, ObjectInfo, Store
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.wrappers import ReadOnlyStore
from remote_ckpt.sweep import sweep
from remote_ckpt.sweep_plan import COPY_RECORD, REPLACED, SUPERSEDED, UNCOMMITTED
from remote_ckpt.testing.faults import FaultStore, StoreCall

AFTER_SCAN = "list_leftovers"
"""The last request before anything is removed."""


@pytest.fixture
def memory() -> Store:
    """A directory with garbage under several names."""
    root = MemoryStore.fresh()
    leave_everything(root)
    return root


def refused(root: Store, around: Store | None = None, *, match: str) -> SweepRefusedError:
    """Expect that both a dry run and a run refuse, and that nothing changed; returns the error."""
    before = root.list()
    for dry_run in (True, False):
        with pytest.raises(SweepRefusedError, match=match) as caught:
            sweep(aged(root, around), dry_run=dry_run)
        assert root.list() == before
    return caught.value


def showing(
    inner: Store,
    is_shown: Callable[[str, str], bool],
    *,
    operations: tuple[str, ...] = ("list", "list_children"),
) -> FaultStore:
    """A store whose listings show only some objects: those for which ``is_shown(url, key)``."""

    def after(call: StoreCall, result: Any) -> Any:
        def is_listed(info: ObjectInfo) -> bool:
            return is_shown(call.url, info.key)

        if call.operation not in operations:
            return result
        if isinstance(result, Listing):
            return replace(result, objects=tuple(filter(is_listed, result.objects)))
        return list(filter(is_listed, result)) if isinstance(result, list) else result

    return FaultStore(inner, after=after)


class TestUnreadableManifests:
    def test_a_damaged_newest_manifest_stops_everything_and_is_named(self, memory: Store) -> None:
        memory.write(f"40/{manifest_key(2)}", b"{ not JSON")
        error = refused(memory, match="delete the checkpoint or bring the manifest back")
        assert error.step == "40"

    def test_a_newer_format_stops_everything_and_says_what_to_use(self, memory: Store) -> None:
        document = json.loads(format_manifest(newest_of(memory, "40").manifest))
        document["version"] = [2, 0]
        memory.write(f"40/{manifest_key(2)}", json.dumps(document).encode())
        assert refused(memory, match="the version that wrote it").step == "40"

    def test_a_file_of_others_that_has_a_manifests_name_is_passed_over(self, memory: Store) -> None:
        memory.write("other/manifest.000001.json", b'{"a": 1}')
        garbage = reasons(sweep(aged(memory)))
        assert garbage
        report = swept(memory)
        assert report.warnings == ("passing over other, whose manifest.000001.json is not ours",)
        assert reasons(report) == garbage
        assert memory.read("other/manifest.000001.json") == b'{"a": 1}'

    @pytest.mark.parametrize(
        ("data", "beside"),
        [
            (b'{"format": "remote_ckpt"}', "notes"),
            (b'{"format": "remote_ckpt", "ver', "notes"),
            (b"{", "notes"),
            (b'{"a": 1}', "d-0123456789abcdef/0.distcp"),
            (b'{"a": 1}', "d-0123456789abcdef/notes"),
            (b'{"a": 1}', "index.20200101T000000Z-0123456789ab.json.gz"),
            (b'{"a": 1}', "manifest.000002.json"),
            (b'{"a": 1}', ".metadata"),
        ],
    )
    def test_one_that_may_have_been_ours_stops_everything(
        self, memory: Store, data: bytes, beside: str
    ) -> None:
        memory.write("other/manifest.000001.json", data)
        memory.write(f"other/{beside}", b'{"a": 1}')
        assert refused(memory, match="cannot be read").step == "other"

    def test_a_damaged_manifest_below_the_newest_is_garbage_like_any(self, memory: Store) -> None:
        annotate(memory.scope("40"), metrics={"loss": 1.0})
        memory.write(f"40/{manifest_key(1)}", b"{ not JSON")
        assert reasons(swept(memory))[f"40/{manifest_key(1)}"] == SUPERSEDED
        assert load(memory, "40") == b"sound"

    def test_after_an_explicit_deletion_the_sweep_goes_on(self, memory: Store) -> None:
        memory.write(f"40/{manifest_key(2)}", b"{ not JSON")
        refused(memory, match="cannot be read")
        delete_checkpoint(memory.scope("40"))
        assert swept(memory).removed_count > 0

    def test_a_manifest_that_is_damaged_after_the_plan_keeps_its_checkpoint_only(self, memory: Store) -> None:
        garbage = reasons(sweep(aged(memory)))
        spoil = once(AFTER_SCAN, lambda: memory.write(f"40_keep/{manifest_key(1)}", b"{ not JSON"))
        report = sweep(aged(memory, scripted(memory, Script(after=spoil))), dry_run=False)
        assert [failure.key for failure in report.failures] == ["40_keep"]
        assert garbage.keys() & all_keys(memory) == {key for key in garbage if key.startswith("40_keep/")}


class TestDoubtfulListings:
    def test_listings_that_disagree_on_manifests(self, memory: Store) -> None:
        for operation in ("list", "list_children"):
            lying = showing(
                memory,
                lambda url, key: not (url.endswith("/10") and key == manifest_key(3)),
                operations=(operation,),
            )
            assert refused(memory, lying, match="show different manifests").step == "10"

    def test_a_manifest_that_no_listing_shows_is_found_by_its_key(self, memory: Store) -> None:
        lying = showing(memory, lambda url, key: not (url.endswith("/10") and key == manifest_key(3)))
        assert refused(memory, lying, match=r"lacks manifest.000003.json").step == "10"

    def test_a_first_manifest_that_no_listing_shows_is_found_by_its_key(self, memory: Store) -> None:
        lying = showing(memory, lambda url, key: not (url.endswith("/40") and key.startswith("manifest.")))
        # Its index and metadata still are there: without the manifest they look like a killed save's.
        assert refused(memory, lying, match=r"lacks manifest.000001.json").step == "40"

    @pytest.mark.parametrize("has_metadata", [True, False])
    def test_a_newest_manifest_that_no_listing_shows_above_those_that_were_swept(
        self, memory: Store, has_metadata: bool
    ) -> None:
        """The key of the first generation tells nothing any more, and ``.metadata`` may be missing."""
        swept(memory)
        if not has_metadata:
            memory.delete(["10/.metadata"])
        assert [key for key in manifests_of(memory) if parse_manifest_key(key)] == [manifest_key(3)]
        lying = showing(memory, lambda url, key: not (url.endswith("/10") and key == manifest_key(3)))
        assert refused(memory, lying, match=r"lacks manifest.000003.json").step == "10"

    def test_metadata_for_stock_readers_that_no_listing_shows_is_found_by_its_key(self) -> None:
        """Above the first 32 generations only that tells."""
        root = MemoryStore.fresh()
        save(root, b"one")
        root.copy(f"10/{manifest_key(1)}", f"10/{manifest_key(40)}")
        root.delete([f"10/{manifest_key(1)}"])
        lying = showing(root, lambda url, key: not key.startswith(("manifest.", ".metadata")))
        assert refused(root, lying, match=r"lacks .metadata, which can be read").step == "10"

    def test_metadata_for_stock_readers_without_any_manifest_keeps_its_data(self) -> None:
        """Other tools may copy it without its manifest; above the first 32 a listing may lack that."""
        root = MemoryStore.fresh()
        save(root, b"one")
        root.delete([f"10/{manifest_key(1)}"])
        before = root.list()
        report = sweep(aged(root), dry_run=False)
        assert report.garbage == ()
        (warning,) = report.warnings
        assert "passing over checkpoint 10: its .metadata leads to objects of ours" in warning
        assert root.list() == before

    def test_a_root_that_seems_empty_while_checkpoints_are_below(self, memory: Store) -> None:
        def after(call: StoreCall, result: Any) -> Any:
            is_root = call.url == memory.url and call.operation == "list_children"
            return Listing((), ()) if is_root else result

        refused(
            memory, FaultStore(memory, after=after), match="shows nothing below it, another shows checkpoint"
        )

    def test_a_root_with_files_of_others_only_is_not_doubtful(self) -> None:
        root = MemoryStore.fresh()
        root.write("config.yaml", b"1")
        assert sweep(root, dry_run=False).garbage == ()

    def test_a_commit_between_two_listings_is_not_doubtful(self, memory: Store) -> None:
        def commit(operation: str, key: str) -> None:
            if operation == "list" and not done:
                done.append(save(memory, b"newest", overwrite=True))

        done: list[object] = []
        report = sweep(aged(memory, scripted(memory, Script(before=commit))))
        assert done
        assert report.warnings == ()
        assert not [each for each in report.garbage if each.key.endswith(manifest_key(4))]

    def test_a_checkpoint_that_lacks_an_object_is_left_alone_with_a_warning(self, memory: Store) -> None:
        garbage = reasons(sweep(aged(memory)))
        lost = newest_of(memory, "10").manifest.objects[0].key
        memory.delete([f"10/{lost}"])
        before = {info for info in memory.list() if info.key.startswith("10/")}
        report = swept(memory)
        assert len(report.warnings) == 1
        assert "passing over checkpoint 10" in report.warnings[0]
        assert f"it needs {lost}, which are not listed" in report.warnings[0]
        assert reasons(report).keys() == {key for key in garbage if not key.startswith("10/")}
        assert before == {info for info in memory.list() if info.key.startswith("10/")}

    def test_a_newest_manifest_that_vanishes_from_the_listings_after_the_plan_keeps_its_data(
        self, memory: Store
    ) -> None:
        """As if an old listing came back: what it does not show would look like garbage."""
        is_planned: list[bool] = []

        def is_shown(url: str, key: str) -> bool:
            return not (is_planned and url.endswith("/40_keep") and key.startswith("manifest."))

        script = Script(after=once(AFTER_SCAN, lambda: is_planned.append(True)))
        store = showing(scripted(memory, script), is_shown)
        garbage = reasons(sweep(aged(memory)))
        report = sweep(aged(memory, store), dry_run=False)
        assert [failure.key for failure in report.failures] == ["40_keep"]
        assert load(memory, "40_keep") == b"copied"
        kept = {key for key in garbage if key.startswith("40_keep/")}
        assert garbage.keys() & all_keys(memory) == kept


class TestChangesAfterThePlan:
    def test_what_was_written_anew_stays(self, memory: Store) -> None:
        garbage = reasons(sweep(aged(memory)))
        again = {PROBE, min(key for key, why in garbage.items() if why == UNCOMMITTED and key < "3")}

        def write_again() -> None:
            for key in again:
                memory.write(key, b"anew")

        script = Script(after=once(AFTER_SCAN, write_again))
        report = sweep(aged(memory, scripted(memory, script)), dry_run=False)
        assert report.failures == ()
        assert report.removed_count == len(garbage) - len(again)
        assert garbage.keys() & all_keys(memory) == again

    def test_a_checkpoint_that_lost_an_object_is_reported_and_left_alone(self, memory: Store) -> None:
        garbage = reasons(sweep(aged(memory)))
        lost = f"10/{newest_of(memory, '10').manifest.objects[0].key}"
        script = Script(after=once(AFTER_SCAN, lambda: memory.delete([lost])))
        report = sweep(aged(memory, scripted(memory, script)), dry_run=False)
        (failure,) = report.failures
        assert failure.key == "10"
        assert "passing over checkpoint 10: it needs" in failure.message
        assert garbage.keys() & all_keys(memory) == {key for key in garbage if key.startswith("10/")}


class TestClock:
    @pytest.mark.parametrize("minutes", [-6.0, -5.1, 5.1, 6.0, 1e6])
    def test_clocks_too_far_apart_stop_everything(self, memory: Store, minutes: float) -> None:
        refused(memory, off_by(memory, timedelta(minutes=minutes)), match="minutes apart")

    @pytest.mark.parametrize("minutes", [-4.9, 4.9])
    def test_clocks_a_little_apart_do_not(self, memory: Store, minutes: float) -> None:
        assert sweep(aged(memory, off_by(memory, timedelta(minutes=minutes)))).garbage

    def test_the_time_that_the_request_took_is_no_difference(
        self, memory: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = datetime.now(timezone.utc)
        times = iter([real - timedelta(minutes=30), real + timedelta(minutes=4)])

        class SlowHost(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return next(times)

        monkeypatch.setattr("remote_ckpt.sweep_scan.datetime", SlowHost)
        assert sweep(aged(memory)).garbage

    def test_the_clock_is_asked_before_anything_is_looked_at(self, memory: Store) -> None:
        store = recorded(memory)
        report = sweep(aged(memory, store))
        assert [call.operation for call in store.calls].index("clock") == 0
        assert [call.operation for call in store.calls].count("clock") == 1
        assert abs(report.now - datetime.now(timezone.utc)) < timedelta(minutes=1)


def off_by(inner: Store, difference: timedelta) -> Store:
    def after(call: StoreCall, result: Any) -> Any:
        return result + difference if call.operation == "clock" else result

    return FaultStore(inner, after=after)


class TestFailingStores:
    def test_any_failure_of_the_scan_is_raised_and_nothing_is_removed(self, memory: Store) -> None:
        store = recorded(memory)
        sweep(aged(memory, store))
        before = memory.list()
        for call in store.calls:
            failing = FaultStore(memory, before=failing_at(call))
            with pytest.raises(StoreUnavailableError, match="503"):
                sweep(aged(memory, failing), dry_run=False)
            assert memory.list() == before

    def test_a_folder_without_a_step_for_a_name_that_may_not_be_read_is_passed_over(
        self, memory: Store
    ) -> None:
        garbage = reasons(sweep(aged(memory)))
        denied = AccessDeniedError("no right to list this prefix")
        store = FaultStore(memory, before=lambda call: _raise_if(call.url.endswith("/logs"), denied))
        report = sweep(aged(memory, store), dry_run=False)
        assert [text for text in report.warnings if "passing over logs, which may not be read" in text]
        assert reasons(report) == garbage
        assert not garbage.keys() & all_keys(memory)

    def test_a_step_that_may_not_be_read_stops_everything(self, memory: Store) -> None:
        denied = AccessDeniedError("no right to list this prefix")
        store = FaultStore(memory, before=lambda call: _raise_if(call.url.endswith("/40"), denied))
        before = memory.list()
        with pytest.raises(AccessDeniedError):
            sweep(aged(memory, store), dry_run=False)
        assert memory.list() == before

    @pytest.mark.parametrize("held", ["20", "30", "40_keep"])
    def test_one_key_that_cannot_be_removed_is_reported_and_the_others_go(
        self, memory: Store, held: str
    ) -> None:
        garbage = reasons(sweep(aged(memory)))
        kinds = (UNCOMMITTED, REPLACED, COPY_RECORD)
        mine = [key for key, why in garbage.items() if key.startswith(f"{held}/") and why in kinds]
        key = min(mine)
        report = sweep(aged(memory, Holding(memory, key)), dry_run=False)
        assert [(failure.key, failure.message) for failure in report.failures] == [
            (key, "retained by policy")
        ]
        assert report.removed_count == len(garbage) - 1
        assert garbage.keys() & all_keys(memory) == {key}
        assert reasons(swept(memory)) == {key: garbage[key]}

    def test_above_a_manifest_that_cannot_be_removed_the_others_stay(self, memory: Store) -> None:
        """Who may not list climbs from the first generation, and would take the first one for the newest."""
        held = f"10/{manifest_key(1)}"
        report = sweep(aged(memory, Holding(memory, held)), dry_run=False)
        assert [failure.key for failure in report.failures] == [held, f"10/{manifest_key(2)}"]
        assert {manifest_key(1), manifest_key(2), manifest_key(3)} <= set(manifests_of(memory))

    def test_where_metadata_for_stock_readers_cannot_be_made_right_its_data_stays(
        self, memory: Store
    ) -> None:
        garbage = reasons(sweep(aged(memory)))
        busy = StoreUnavailableError("503")
        store = FaultStore(memory, before=lambda call: _raise_if(call.operation == "write", busy))
        report = sweep(aged(memory, store), dry_run=False)
        kept = {key for key, reason in garbage.items() if key.startswith("10/") and reason == REPLACED}
        assert {failure.key for failure in report.failures} == kept
        assert garbage.keys() & all_keys(memory) == kept

    def test_a_checkpoint_that_fails_when_it_is_looked_at_again_does_not_stop_the_others(
        self, memory: Store
    ) -> None:
        garbage = reasons(sweep(aged(memory)))
        looks: list[str] = []

        def before(call: StoreCall) -> None:
            if call.operation == "list" and call.url.endswith("/20"):
                looks.append(call.url)
                _raise_if(len(looks) > 1, StoreUnavailableError("503"))

        report = sweep(aged(memory, FaultStore(memory, before=before)), dry_run=False)
        assert [failure.key for failure in report.failures] == ["20"]
        assert garbage.keys() & all_keys(memory) == {key for key in garbage if key.startswith("20/")}

    def test_what_may_only_be_read_is_looked_at_and_kept(self, memory: Store) -> None:
        before = memory.list()
        report = sweep(ReadOnlyStore(aged(memory)), dry_run=False)
        assert report.removed_count == 0
        assert {failure.key for failure in report.failures} == reasons(report).keys()
        assert memory.list() == before


def failing_at(wanted: StoreCall) -> Callable[[StoreCall], None]:
    """A hook that fails the same request, whenever the threads come to it."""

    def before(call: StoreCall) -> None:
        is_it = (call.operation, call.key, call.url) == (wanted.operation, wanted.key, wanted.url)
        _raise_if(is_it, StoreUnavailableError("503"))

    return before


def _raise_if(is_wanted: bool, error: Exception) -> None:
    if is_wanted:
        raise error


class TestLeftoversThatCannotBeListed:
    @pytest.mark.parametrize(
        "error",
        [
            MissingDependencyError("open multipart uploads need boto3: pip install 'remote-ckpt[aws]'"),
            AccessDeniedError("s3:ListBucketMultipartUploads"),
            UnsupportedStoreError("no uploads"),
            StoreError("the store answered 501 NotImplemented"),
        ],
    )
    def test_objects_are_swept_all_the_same_with_a_warning(self, memory: Store, error: Exception) -> None:
        garbage = reasons(sweep(aged(memory)))
        store = FaultStore(memory, before=lambda call: _raise_if(call.operation == "list_leftovers", error))
        report = sweep(aged(memory, store), dry_run=False)
        assert report.warnings == (f"open uploads and temporary files were not looked at: {error}",)
        assert not garbage.keys() & all_keys(memory)


class TestRequests:
    def test_a_folder_of_others_takes_one_request_a_checkpoint_three_and_garbage_one_more(self) -> None:
        root = MemoryStore.fresh()
        for number in range(5):
            save(root, b"sound", name=f"{number}")
        for number in range(7):
            root.write(f"logs-{number}/deep/er/events", b"1")
        store = recorded(root)
        sweep(aged(root, store))
        assert len(store.calls) == 3 + 7 + 5 * 3  # clock, the root, leftovers
        leave_uncommitted(root, "4")
        store = recorded(root)
        sweep(aged(root, store))
        assert len(store.calls) == 3 + 7 + 5 * 3 + 1

    def test_many_keys_go_in_few_requests(self) -> None:
        root = MemoryStore.fresh()
        leave_replaced(root, "10")
        for number in range(2500):
            root.write(f"10/d-0123456789abcdef/{number}.distcp", b"1")
        store = recorded(root)
        report = sweep(aged(root, store), dry_run=False)
        assert report.removed_count == 2505
        assert [call.operation for call in store.calls].count("delete") == 1 + 3 + 1
        assert len(store.calls) < 30


class TestProgress:
    def test_each_piece_that_is_removed_is_told(self, memory: Store) -> None:
        seen: list[Progress] = []
        report = sweep(aged(memory), dry_run=False, on_progress=seen.append)
        assert {each.operation for each in seen} == {"sweep"}
        assert {each.total_objects for each in seen} == {len(report.garbage)}
        assert [each.done_objects for each in seen] == list(range(len(report.garbage) + 1))
        assert seen[-1].done_bytes == seen[-1].total_bytes == report.removed_bytes
