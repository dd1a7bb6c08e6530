"""Committing, replacing, deleting, pinning: outcomes, refusals, and a crash at every store call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar

import pytest
from protocol import (
    OPTIONS,
    FakeTime,
    Script,
    Upload,
    answers,
    expected_keys,
    keys_of,
    later,
    load,
    manifests_of,
    next_generation,
    once,
    save,
    scripted,
    stale_after_create,
    upload,
)

from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.commit import (
    begin_save,
    check_may_save,
    commit_save,
    finish_replacement,
    is_not_committed,
    open_for_save,
    withdraw,
)
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CommitUnknownError,
    FormatError,
    ObjectExistsError,
    ObjectNotFoundError,
    RemoteCkptError,
    SaveFailedError,
    StorageFullError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.generation import create_generation
from remote_ckpt.keys import copy_record_key, manifest_key, new_token
from remote_ckpt.manifest import format_manifest
from remote_ckpt.newest import look, named_keys, read_newest
from remote_ckpt.store.base import DeleteFailure, ObjectInfo, Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.testing.faults import FaultStore, SimulatedCrash

GRACE = timedelta(seconds=OPTIONS.commit.grace_seconds + 1)


@pytest.fixture(params=["memory", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore.fresh() if request.param == "memory" else LocalStore(tmp_path / "run")


@pytest.fixture
def memory() -> Store:
    return MemoryStore.fresh()


def scope(root: Store, name: str = "10") -> Store:
    return root.scope(name, create=True)


def first_keys(root: Store) -> set[str]:
    newest = read_newest(scope(root))
    assert newest is not None
    return expected_keys(newest.manifest)


class TestSave:
    def test_nothing_is_there_before_the_first_save(self, root: Store) -> None:
        assert read_newest(scope(root)) is None
        assert load(root) is None

    def test_a_save_is_read_back_whole_with_its_stock_metadata(self, root: Store) -> None:
        manifest = save(root, b"one")
        assert load(root) == b"one"
        assert manifest.generation == 1
        assert keys_of(root) == expected_keys(manifest)
        assert scope(root).read(".metadata") == scope(root).read(f"metadata.{manifest.save_id}.pickle")

    def test_a_second_save_is_refused_and_leaves_nothing(self, root: Store) -> None:
        manifest = save(root, b"one")
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            save(root, b"two")
        assert load(root) == b"one"
        assert keys_of(root) == expected_keys(manifest)

    def test_overwriting_replaces_everything(self, root: Store) -> None:
        save(root, b"one")
        manifest = save(root, b"two", overwrite=True)
        assert manifest.generation == 2
        assert load(root) == b"two"
        assert keys_of(root) == expected_keys(manifest)

    def test_the_replaced_checkpoint_is_readable_until_the_commit(self, root: Store) -> None:
        save(root, b"one")
        upload(scope(root), b"two")
        assert load(root) == b"one"

    def test_a_missing_or_short_object_fails_the_save_and_is_named(self, root: Store) -> None:
        checkpoint = scope(root)
        done = upload(checkpoint, b"one")
        missing, short = (entry.key for entry in done.draft.objects)
        checkpoint.delete([missing])
        checkpoint.write(short, b"x")
        with pytest.raises(SaveFailedError) as caught:
            commit_save(checkpoint, done.draft, attempt=done.attempt, overwrite=True, expected=done.expected)
        assert f"{missing} is missing" in str(caught.value)
        assert f"{short} has 1 bytes instead of" in str(caught.value)
        assert read_newest(checkpoint) is None
        assert is_not_committed(caught.value)

    def test_an_object_that_only_a_rank_reported_is_checked_too(self, root: Store) -> None:
        done = upload(scope(root), b"one")
        with pytest.raises(SaveFailedError, match="elsewhere is missing"):
            commit_save(
                scope(root), done.draft, attempt=done.attempt, overwrite=True, expected={"elsewhere": 1}
            )

    def test_h11_a_save_past_its_deadline_by_the_stores_clock_never_commits(self, root: Store) -> None:
        done = upload(scope(root), b"one")
        late = replace(done.attempt, deadline=done.attempt.began_at - timedelta(seconds=1))
        with pytest.raises(SaveFailedError, match="store's clock"):
            commit_save(scope(root), done.draft, attempt=late, overwrite=True, expected=done.expected)
        assert read_newest(scope(root)) is None

    def test_the_deadline_is_set_by_the_store_and_the_options(self, memory: Store) -> None:
        attempt = begin_save(scope(memory), OPTIONS)
        assert attempt.deadline - attempt.began_at == timedelta(seconds=OPTIONS.commit.save_seconds)
        assert attempt.began_at < memory.clock()

    def test_a_deleted_name_can_be_saved_again(self, root: Store) -> None:
        save(root, b"one")
        delete_checkpoint(scope(root))
        save(root, b"two")
        assert load(root) == b"two"

    def test_generations_of_a_deleted_name_never_come_back_on_an_object_store(self, memory: Store) -> None:
        save(memory, b"one")
        delete_checkpoint(scope(memory))
        assert save(memory, b"two").generation == 3

    def test_early_checks_refuse_what_the_commit_would_refuse(self, root: Store) -> None:
        check_may_save(scope(root), overwrite=False)
        save(root, b"one")
        with pytest.raises(CheckpointExistsError):
            check_may_save(scope(root), overwrite=False)
        check_may_save(scope(root), overwrite=True)
        set_pinned(scope(root), True)
        with pytest.raises(CheckpointPinnedError):
            check_may_save(scope(root), overwrite=True)

    def test_an_unlucky_listing_error_is_never_taken_for_absence(self, memory: Store) -> None:
        save(memory, b"one")
        store = scripted(memory, answers("list", {0: AccessDeniedError("no")}, key=""))
        with pytest.raises(AccessDeniedError):
            save(store, b"two")
        assert load(memory) == b"one"


class TestOutcomeOfTheCommit:
    """H-01 to H-07: what a conflict, a time-out or a lost answer means."""

    @pytest.mark.parametrize("error", [StoreTimeoutError("slow"), ObjectExistsError("412"), StoreError("?")])
    def test_a_lost_answer_of_our_own_success_is_a_success(self, root: Store, error: StoreError) -> None:
        store = scripted(root, answers("create", {0: error}, is_after=True))
        assert save(store, b"one").generation == 1
        assert load(root) == b"one"
        assert [call.key for call in store.calls if call.operation == "create"] == [manifest_key(1)]

    @pytest.mark.parametrize("error", [ObjectExistsError("409"), StoreUnavailableError("reset")])
    def test_a_conflict_with_nothing_there_is_sent_again(self, root: Store, error: StoreError) -> None:
        time = FakeTime()
        store = scripted(root, answers("create", {0: error, 1: error}))
        save(store, b"one", waiting=time.waiting)
        assert load(root) == b"one"
        assert [call.operation for call in store.calls].count("create") == 3
        assert len(time.sleeps) == 2

    def test_anothers_generation_is_a_conflict(self, memory: Store) -> None:
        other = _before_first_create(memory, lambda: save(memory, b"other"))
        with pytest.raises(CheckpointExistsError):
            save(other, b"mine")
        assert load(memory) == b"other"
        assert keys_of(memory) == first_keys(memory)

    def test_a_told_overwriter_replaces_the_other_wholly(self, memory: Store) -> None:
        other = _before_first_create(memory, lambda: save(memory, b"other"))
        manifest = save(other, b"mine", overwrite=True)
        assert manifest.generation == 2
        assert load(memory) == b"mine"
        assert keys_of(memory) == expected_keys(manifest)

    def test_an_overwriter_looks_at_the_pin_again_after_a_conflict(self, memory: Store) -> None:
        save(memory, b"one")
        other = _before_first_create(memory, lambda: set_pinned(scope(memory), True))
        with pytest.raises(CheckpointPinnedError):
            save(other, b"mine", overwrite=True)
        assert load(memory) == b"one"
        assert keys_of(memory) == first_keys(memory)

    def test_h06_a_put_that_lands_after_its_read_back_is_found_as_ours(self, memory: Store) -> None:
        """The first PUT times out, is not there, and lands while the second one is sent."""
        in_flight: list[tuple[str, bytes]] = []

        class SlowProxy(DelegatingStore):
            def _wrap(self, inner: Store) -> Store:
                return SlowProxy(inner)

            def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
                if not in_flight:
                    in_flight.append((key, bytes(data)))
                    raise StoreTimeoutError("no answer")
                self.inner.create(*in_flight[0])
                self.inner.create(key, data)

        assert save(SlowProxy(memory), b"one").generation == 1
        assert load(memory) == b"one"

    def test_an_outcome_that_stays_unknown_is_said_so_and_nothing_is_cleaned_up(self, root: Store) -> None:
        time = FakeTime()
        script = answers("create", dict.fromkeys(range(1000), StoreUnavailableError("down")))
        with pytest.raises(CommitUnknownError) as caught:
            save(scripted(root, script), b"one", waiting=time.waiting)
        assert not is_not_committed(caught.value)
        assert 30.0 < time.now <= OPTIONS.commit.commit_seconds
        assert len(keys_of(root)) == 4
        assert load(root) is None

    def test_h07_an_unknown_commit_that_lands_later_is_whole(self, memory: Store) -> None:
        sent: list[tuple[str, bytes]] = []

        class Hole(DelegatingStore):
            def _wrap(self, inner: Store) -> Store:
                return Hole(inner)

            def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
                sent.append((key, bytes(data)))
                raise StoreTimeoutError("no answer")

        with pytest.raises(CommitUnknownError):
            save(Hole(memory), b"one")
        scope(memory).create(*sent[0])
        assert load(memory) == b"one"
        assert len(set(sent)) == 1, "every try sends the identical PUT"

    def test_a_put_is_not_repeated_past_the_deadline_of_the_save(self, memory: Store) -> None:
        class Sleeper(DelegatingStore):
            creates = 0

            def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
                Sleeper.creates += 1
                raise StoreTimeoutError("no answer")

            def clock(self) -> datetime:
                return self.inner.clock() + timedelta(hours=7 * Sleeper.creates)

        checkpoint = Sleeper(scope(memory))
        done = upload(checkpoint, b"one")
        with pytest.raises(CommitUnknownError):
            commit_save(
                checkpoint,
                done.draft,
                attempt=done.attempt,
                overwrite=True,
                expected={},
                waiting=FakeTime().waiting,
            )
        assert Sleeper.creates == 1

    @pytest.mark.parametrize("error", [StorageFullError("507"), AccessDeniedError("403")])
    def test_br10_a_clean_refusal_is_not_committed_and_the_next_save_works(
        self, root: Store, error: StoreError
    ) -> None:
        with pytest.raises(SaveFailedError, match=str(error)):
            save(scripted(root, answers("create", {0: error})), b"one")
        assert keys_of(root) == set()
        save(root, b"two")
        assert load(root) == b"two"

    def test_a_refusal_after_a_lost_answer_is_read_back_first(self, root: Store) -> None:
        """The first PUT landed, its answer was lost, and the read-back failed; the second is refused."""
        lost = answers("create", {0: StoreTimeoutError("lost")}, is_after=True)
        refused = answers("create", {1: AccessDeniedError("expired")})
        unread = answers("read", {0: StoreUnavailableError("503")})
        store = scripted(scripted(scripted(root, lost), refused), unread)
        assert save(store, b"one").generation == 1
        assert load(root) == b"one"

    def test_a_refusal_after_a_lost_answer_with_nothing_there_stays_unknown(self, root: Store) -> None:
        errors: dict[int, BaseException] = dict.fromkeys(range(1, 1000), AccessDeniedError("expired"))
        script = answers("create", {0: StoreTimeoutError("lost"), **errors})
        with pytest.raises(CommitUnknownError):
            save(scripted(root, script), b"one")
        assert len(keys_of(root)) == 4

    def test_a_listing_that_fails_after_the_commit_is_tried_again(self, root: Store) -> None:
        failing = _after_create(answers("list_children", {0: StoreUnavailableError("503")}, key=""))
        save(scripted(root, failing), b"one")
        assert load(root) == b"one"

    def test_a_listing_that_keeps_failing_after_the_commit_leaves_it_unknown(self, root: Store) -> None:
        errors: dict[int, BaseException] = dict.fromkeys(range(1000), StoreUnavailableError("503"))
        with pytest.raises(CommitUnknownError):
            save(scripted(root, _after_create(answers("list_children", errors, key=""))), b"one")
        assert load(root) == b"one"

    @pytest.mark.parametrize("error", [StoreError("400"), UnsupportedStoreError("501")])
    def test_a_request_that_the_store_does_not_take_is_refused_at_once_and_leaves_nothing(
        self, root: Store, error: RemoteCkptError
    ) -> None:
        time = FakeTime()
        with pytest.raises((SaveFailedError, UnsupportedStoreError), match=str(error)):
            save(scripted(root, answers("create", {0: error})), b"one", waiting=time.waiting)
        assert time.sleeps == []
        assert keys_of(root) == set()

    @pytest.mark.parametrize("error", [StoreError("400"), UnsupportedStoreError("501")])
    def test_such_a_refusal_while_an_earlier_try_is_in_doubt_is_no_proof(
        self, root: Store, error: RemoteCkptError
    ) -> None:
        errors: dict[int, BaseException] = dict.fromkeys(range(1, 1000), error)
        with pytest.raises(CommitUnknownError):
            save(scripted(root, answers("create", {0: StoreTimeoutError("lost"), **errors})), b"one")
        assert len(keys_of(root)) == 4

    def test_an_unclear_failure_that_cannot_be_read_back_is_no_refusal(self, root: Store) -> None:
        """The PUT landed, its answer made no sense, and the object cannot be read just now."""
        unclear = answers("create", {0: StoreError("no status")}, is_after=True)
        unread = answers("read", {0: StoreUnavailableError("503")})
        assert save(scripted(scripted(root, unclear), unread), b"one").generation == 1
        assert load(root) == b"one"

    def test_h06_nothing_is_asked_any_more_once_the_deadline_has_passed(self, memory: Store) -> None:
        """A server that never answers: every request lasts until its own time-out."""
        time = FakeTime()
        checkpoint = scope(memory)
        done = upload(checkpoint, b"one")

        def hang(operation: str, key: str) -> None:
            time.now += 45.0
            raise StoreTimeoutError("no answer")

        silent = scripted(checkpoint, Script(before=hang))
        with pytest.raises(CommitUnknownError):
            create_generation(silent, done.draft, is_save=True, options=OPTIONS, waiting=time.waiting)
        assert [call.operation for call in silent.calls] == ["create", "read"]


class TestStaleListings:
    """A listing that lags behind or is wrong must not cost what was just committed."""

    LISTED: ClassVar[dict[str, Callable[[ObjectInfo], bool]]] = {
        "nothing": lambda info: False,
        "all but the new manifest": lambda info: info.key != manifest_key(2),
    }

    @pytest.mark.parametrize("listed", LISTED)
    def test_one_that_catches_up_is_waited_for(self, root: Store, listed: str) -> None:
        save(root, b"old")
        time = FakeTime()
        store = stale_after_create(root, self.LISTED[listed], times=3)
        manifest = save(store, b"new", overwrite=True, waiting=time.waiting)
        assert (manifest.generation, len(time.sleeps)) == (2, 3)
        assert load(root) == b"new"
        assert keys_of(root) == expected_keys(manifest)

    @pytest.mark.parametrize("listed", LISTED)
    def test_one_that_stays_wrong_leaves_the_outcome_unknown_and_everything_there(
        self, root: Store, listed: str
    ) -> None:
        old = save(root, b"old")
        with pytest.raises(CommitUnknownError) as caught:
            save(stale_after_create(root, self.LISTED[listed]), b"new", overwrite=True)
        assert not is_not_committed(caught.value)
        assert load(root) == b"new"
        assert named_keys(old) <= keys_of(root)

    @pytest.mark.parametrize("listed", LISTED)
    @pytest.mark.parametrize("knows_itself", [True, False])
    def test_withdraw_finds_by_key_what_is_not_listed(
        self, memory: Store, listed: str, knows_itself: bool
    ) -> None:
        first = save(memory, b"one")
        manifest = first if listed == "nothing" else save(memory, b"two", overwrite=True)
        stale = stale_after_create(memory, self.LISTED[listed])
        stale.create("other", b"x")
        keys = sorted(named_keys(manifest))
        failures = withdraw(stale.scope("10"), keys, manifest.save_id if knows_itself else None)
        assert [failure.key for failure in failures] == (keys if knows_itself else [])
        assert named_keys(manifest) <= keys_of(memory)

    def test_a_pin_that_is_not_listed_is_unknown(self, memory: Store) -> None:
        save(memory, b"one")
        stale = stale_after_create(memory, self.LISTED["all but the new manifest"])
        with pytest.raises(CommitUnknownError):
            set_pinned(stale.scope("10"), True, options=OPTIONS, waiting=FakeTime().waiting)

    def test_a_tombstone_that_is_not_listed_removes_nothing_yet(self, memory: Store) -> None:
        manifest = save(memory, b"one")
        stale = stale_after_create(memory, self.LISTED["all but the new manifest"])
        with pytest.raises(CommitUnknownError):
            delete_checkpoint(stale.scope("10"), options=OPTIONS, waiting=FakeTime().waiting)
        assert named_keys(manifest) <= keys_of(memory)

    def test_a_successor_that_is_listed_but_not_found_leaves_the_outcome_unknown(self, memory: Store) -> None:
        store = _after_first_create(memory, lambda: set_pinned(scope(memory), True))
        absent = answers("read", {0: ObjectNotFoundError("404")}, key=manifest_key(2))
        with pytest.raises(CommitUnknownError):
            save(scripted(store, absent), b"one")
        assert load(memory) == b"one"


class TestHigherGenerationAfterCreating:
    def test_a_pin_on_top_of_ours_is_fine(self, memory: Store) -> None:
        store = _after_first_create(memory, lambda: set_pinned(scope(memory), True))
        save(store, b"one")
        assert load(memory) == b"one"
        assert scope(memory).read(".metadata").startswith(b"stock d-")

    def test_a_replacement_of_ours_means_that_ours_was_committed(self, memory: Store) -> None:
        store = _after_first_create(memory, lambda: save(memory, b"two", overwrite=True))
        assert save(store, b"one").generation == 1
        assert load(memory) == b"two"
        assert keys_of(memory) == first_keys(memory)

    def test_a_deletion_of_ours_means_that_ours_was_committed(self, memory: Store) -> None:
        store = _after_first_create(memory, lambda: delete_checkpoint(scope(memory)))
        assert save(store, b"one").generation == 1
        assert load(memory) is None
        assert keys_of(memory) == set()

    def test_a_late_generation_below_the_newest_is_no_commit(self, memory: Store) -> None:
        """Others went on to generation 3 and the sweep removed 1 and 2 before our generation 1 lands."""

        def others() -> None:
            first = save(memory, b"old")
            for payload in (b"newer", b"newest"):
                save(memory, payload, overwrite=True)
            scope(memory).delete([manifest_key(first.generation), manifest_key(2)])

        with pytest.raises(CheckpointExistsError, match="too late"):
            save(_before_first_create(memory, others), b"late")
        assert load(memory) == b"newest"
        assert keys_of(memory) == first_keys(memory), "the late save has withdrawn its objects"

    def test_a_successor_that_cannot_be_read_leaves_the_outcome_unknown(self, memory: Store) -> None:
        def others() -> None:
            scope(memory).create(manifest_key(2), b"{}")

        with pytest.raises(CommitUnknownError):
            save(_after_first_create(memory, others), b"one")

    def test_a_folder_deleted_before_the_first_object_says_so(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        checkpoint = open_for_save(root, "10", overwrite=True)
        delete_checkpoint(scope(root))
        with pytest.raises(CheckpointChangedError):
            checkpoint.write("d-0123456789abcdef/0.distcp", b"two")
        assert load(root) is None

    def test_a_folder_moved_away_while_saving_says_so_and_keeps_what_stands_in_it(
        self, tmp_path: Path
    ) -> None:
        root = LocalStore(tmp_path)
        move = Script(after=once("create", lambda: (tmp_path / "10").rename(tmp_path / "11")))
        with pytest.raises(CheckpointChangedError):
            save(scripted(root, move), b"one")
        assert load(root, "10") is None
        assert load(root, "11") == b"one"


class TestFinishing:
    def test_a_stale_stock_metadata_is_repaired(self, memory: Store) -> None:
        """Ours is committed, replaced by another, and only then publishes its .metadata."""
        checkpoint = scope(memory)
        done = upload(checkpoint, b"one")
        manifest = commit_save(
            checkpoint, done.draft, attempt=done.attempt, overwrite=False, expected=done.expected
        )
        newer = save(memory, b"two", overwrite=True)
        assert finish_replacement(checkpoint, manifest, done.stock) == ()
        assert checkpoint.read(".metadata") == checkpoint.read(f"metadata.{newer.save_id}.pickle")

    def test_a_newer_generation_that_appears_while_publishing_wins(self, memory: Store) -> None:
        newer: list[str] = []

        def replace_it(operation: str, key: str) -> None:
            if (operation, key) == ("write", ".metadata") and not newer:
                newer.append(save(memory, b"two", overwrite=True).save_id)

        save(scripted(memory, Script(before=replace_it)), b"one")
        assert newer[0].encode() in scope(memory).read(".metadata")

    def test_a_save_without_stock_metadata_removes_the_replaced_ones(self, root: Store) -> None:
        save(root, b"one")
        checkpoint = scope(root)
        done = upload(checkpoint, b"two")
        draft = replace(done.draft, stock_metadata=None)
        manifest = commit_save(checkpoint, draft, attempt=done.attempt, overwrite=True, expected={})
        finish_replacement(checkpoint, manifest)
        assert ".metadata" not in keys_of(root)

    def test_a_key_that_cannot_be_deleted_is_logged_returned_and_left_to_the_next(
        self, memory: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = save(memory, b"one")
        stuck = first.objects[0].key
        with caplog.at_level(logging.WARNING, "remote_ckpt"):
            second = save(_Undeletable(memory, [stuck]), b"two", overwrite=True)
        assert stuck in caplog.text
        assert stuck in keys_of(memory)
        assert stuck in second.superseded
        third = save(memory, b"three", overwrite=True)
        assert stuck in third.superseded
        assert keys_of(memory) == expected_keys(third)

    def test_a_failing_stock_metadata_does_not_fail_the_save_and_keeps_the_data_it_names(
        self, memory: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = save(memory, b"one")
        script = answers("write", {0: AccessDeniedError("no")}, key=".metadata")
        second = save(scripted(memory, script), b"two", overwrite=True)
        assert ".metadata" in caplog.text
        assert load(memory) == b"two"
        assert named_keys(first) <= keys_of(memory)
        assert named_keys(first) == set(second.superseded)

    def test_superseded_keys_do_not_pile_up(self, memory: Store) -> None:
        for number in range(5):
            manifest = save(memory, b"%d" % number, overwrite=True)
        assert len(manifest.superseded) == 4

    def test_withdraw_never_takes_what_the_newest_generation_names(self, root: Store) -> None:
        manifest = save(root, b"one")
        assert withdraw(scope(root), sorted(named_keys(manifest))) == ()
        assert load(root) == b"one"

    def test_withdraw_takes_nothing_where_the_newest_generation_cannot_be_read(self, memory: Store) -> None:
        manifest = save(memory, b"one")
        scope(memory).write(manifest_key(2), b"{")
        failures = withdraw(scope(memory), [manifest.objects[0].key])
        assert [failure.key for failure in failures] == [manifest.objects[0].key]
        assert manifest.objects[0].key in keys_of(memory)


class TestGenerationZero:
    """Stock DCP checkpoints and plain ones."""

    @staticmethod
    def stock(root: Store, *extra: str) -> None:
        for key in (".metadata", "__0_0.distcp", "__1_0.distcp", *extra):
            scope(root).write(key, b"stock")

    def test_they_are_refused_without_overwrite(self, root: Store) -> None:
        self.stock(root)
        with pytest.raises(CheckpointExistsError, match="dcp"):
            save(root, b"one")
        scope(root, "11").write("checkpoint.pth", b"plain")
        with pytest.raises(CheckpointExistsError, match="plain"):
            save(root, b"one", name="11")

    def test_overwriting_replaces_a_stock_checkpoint_and_leaves_foreign_files(self, root: Store) -> None:
        self.stock(root, "notes.txt")
        manifest = save(root, b"one", overwrite=True)
        assert manifest.superseded == ("__0_0.distcp", "__1_0.distcp")
        assert keys_of(root) == {*expected_keys(manifest), "notes.txt"}
        assert load(root) == b"one"

    def test_overwriting_replaces_a_plain_checkpoint(self, root: Store) -> None:
        scope(root).write("checkpoint.pth", b"plain")
        manifest = save(root, b"one", overwrite=True)
        assert keys_of(root) == expected_keys(manifest)

    def test_a_stock_checkpoint_is_deleted_with_its_own_files_only(self, root: Store) -> None:
        self.stock(root, "notes.txt")
        delete_checkpoint(scope(root))
        assert keys_of(root) == {"notes.txt"}
        assert manifests_of(root) == []

    def test_its_metadata_goes_first(self, memory: Store) -> None:
        self.stock(memory)
        store = FaultStore.crashing(memory, 2, is_done=True)
        with pytest.raises(SimulatedCrash):
            delete_checkpoint(store.scope("10"))
        assert keys_of(memory) == {"__0_0.distcp", "__1_0.distcp"}

    def test_deleting_one_removes_its_local_folder(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        self.stock(root)
        delete_checkpoint(scope(root))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("then", ["replace", "delete"])
    def test_a_stock_file_that_others_write_anew_after_it_was_replaced_stays(
        self, root: Store, then: str
    ) -> None:
        self.stock(root)
        recorded = FaultStore(root)
        save(recorded, b"new", overwrite=True)
        last = recorded.calls[-1]
        assert last.operation == "delete"
        self.stock(root)
        with pytest.raises(SimulatedCrash):
            save(FaultStore.crashing(root, last.number), b"newer", overwrite=True)
        scope(root).write("__0_0.distcp", b"of another trainer")
        if then == "replace":
            save(root, b"newest", overwrite=True)
        else:
            delete_checkpoint(scope(root), options=OPTIONS)
        assert root.read("10/__0_0.distcp") == b"of another trainer"

    def test_a_save_that_replaced_it_meanwhile_keeps_its_stock_metadata(self, memory: Store) -> None:
        self.stock(memory)
        script = Script(before=once("delete", lambda: save(memory, b"one", overwrite=True)))
        delete_checkpoint(scripted(memory, script).scope("10"))
        assert load(memory) == b"one"
        assert keys_of(memory) == first_keys(memory)


class TestDelete:
    def test_a_deleted_checkpoint_is_gone_with_its_objects(self, root: Store) -> None:
        save(root, b"one")
        delete_checkpoint(scope(root))
        assert load(root) is None
        assert keys_of(root) == set()

    def test_a_tombstone_stays_on_an_object_store_and_deleting_again_is_quiet(self, memory: Store) -> None:
        save(memory, b"one")
        delete_checkpoint(scope(memory))
        delete_checkpoint(scope(memory))
        assert manifests_of(memory) == ["manifest.000001.json", "manifest.000002.json"]

    def test_a_local_folder_is_removed_whole_with_what_old_saves_left_behind(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        upload(scope(root), b"left behind")
        delete_checkpoint(later(root, GRACE).scope("10"))
        assert list(tmp_path.iterdir()) == []

    def test_a_save_in_progress_outlives_the_deletion_of_what_it_replaces(self, root: Store) -> None:
        save(root, b"one")
        checkpoint = open_for_save(root, "10", overwrite=True)
        done = upload(checkpoint, b"two")
        delete_checkpoint(scope(root))
        assert load(root) is None
        commit_save(checkpoint, done.draft, attempt=done.attempt, overwrite=True, expected=done.expected)
        assert load(root) == b"two"

    @pytest.mark.parametrize("path", [".tmp-0", "0.distcp"])
    def test_a_save_whose_first_object_has_no_name_yet_outlives_it_too(
        self, tmp_path: Path, path: str
    ) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        checkpoint = open_for_save(root, "10", overwrite=True)
        being_written = tmp_path / "10" / new_token() / path
        being_written.parent.mkdir()
        being_written.touch()
        delete_checkpoint(scope(root))
        assert being_written.exists()
        done = upload(checkpoint, b"two")
        commit_save(checkpoint, done.draft, attempt=done.attempt, overwrite=True, expected=done.expected)
        assert load(root) == b"two"

    def test_a_save_that_begins_in_a_folder_being_removed_fails_alone(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        checkpoint = open_for_save(root, "10", overwrite=True)
        done: list[Upload] = []
        store = _after_first_create(root, lambda: done.append(upload(checkpoint, b"two")))
        delete_checkpoint(store.scope("10"))
        with pytest.raises(CheckpointChangedError, match="being deleted"):
            commit_save(checkpoint, done[0].draft, attempt=done[0].attempt, overwrite=True, expected={})
        save(root, b"three")
        assert load(root) == b"three"

    @pytest.mark.parametrize("is_old", [False, True])
    def test_promise_7_a_save_in_progress_keeps_an_automatic_deletion_away(
        self, root: Store, is_old: bool
    ) -> None:
        save(root, b"one")
        upload(scope(root), b"two")
        store = later(root, GRACE if is_old else timedelta(0))
        if is_old:
            delete_checkpoint(store.scope("10"), if_idle=True)
        else:
            with pytest.raises(CheckpointChangedError, match="in progress"):
                delete_checkpoint(store.scope("10"), if_idle=True)
        assert load(root) == (None if is_old else b"one")

    def test_what_a_killed_save_left_before_the_last_commit_keeps_nothing_away(self, root: Store) -> None:
        orphan = upload(scope(root), b"killed")
        save(root, b"one")
        delete_checkpoint(scope(root), if_idle=True)
        assert load(root) is None
        assert set(orphan.expected) <= set(keys_of(root))

    def test_promise_7_so_does_one_that_is_about_to_replace_a_stock_checkpoint(self, root: Store) -> None:
        TestGenerationZero.stock(root)
        upload(scope(root), b"two")
        with pytest.raises(CheckpointChangedError, match="in progress"):
            delete_checkpoint(scope(root), if_idle=True)
        assert ".metadata" in keys_of(root)

    def test_the_record_of_a_finished_copy_is_no_save_in_progress(self, root: Store) -> None:
        manifest = save(root, b"one")
        scope(root).write(copy_record_key(manifest.save_id), b"{}")
        delete_checkpoint(scope(root), if_idle=True)
        assert load(root) is None

    def test_a_planned_life_that_was_replaced_by_another_is_kept(self, root: Store) -> None:
        """On a local disk both have generation 1."""
        planned = save(root, b"one")
        delete_checkpoint(scope(root))
        save(root, b"two")
        with pytest.raises(CheckpointChangedError, match="saved anew"):
            delete_checkpoint(scope(root), if_save_id=planned.save_id)
        assert load(root) == b"two"
        newest = read_newest(scope(root))
        assert newest is not None
        delete_checkpoint(scope(root), if_save_id=newest.manifest.save_id)
        assert load(root) is None

    @pytest.mark.parametrize("mark", [".metadata", "checkpoint.pth"])
    def test_a_planned_stock_checkpoint_that_was_written_anew_is_kept(self, root: Store, mark: str) -> None:
        scope(root).write(mark, b"old")
        planned = look(scope(root)).save_id
        scope(root).write(mark, b"newer")
        with pytest.raises(CheckpointChangedError, match="saved anew"):
            delete_checkpoint(scope(root), if_generation=0, if_save_id=planned)
        assert keys_of(root) == {mark}
        delete_checkpoint(scope(root), if_generation=0, if_save_id=look(scope(root)).save_id)
        assert keys_of(root) == set()

    def test_a_local_folder_with_foreign_files_stays_with_them_and_can_be_saved_again(
        self, tmp_path: Path
    ) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        scope(root).write("results.json", b"{}")
        delete_checkpoint(scope(root))
        assert keys_of(root) == {"results.json"}
        assert load(root) is None
        assert save(root, b"two").generation == 3
        assert load(root) == b"two"

    def test_absence_is_an_error(self, root: Store) -> None:
        with pytest.raises(CheckpointNotFoundError):
            delete_checkpoint(scope(root))

    def test_a_pin_refuses_deletion(self, root: Store) -> None:
        save(root, b"one")
        set_pinned(scope(root), True)
        with pytest.raises(CheckpointPinnedError):
            delete_checkpoint(scope(root))
        assert load(root) == b"one"

    def test_br33_a_pin_set_after_the_plan_wins(self, memory: Store) -> None:
        save(memory, b"one")
        store = _before_first_create(memory, lambda: set_pinned(scope(memory), True))
        with pytest.raises(CheckpointPinnedError):
            delete_checkpoint(store.scope("10"))
        assert load(memory) == b"one"

    def test_a_planned_generation_that_is_not_the_newest_any_more_is_kept(self, root: Store) -> None:
        save(root, b"one")
        save(root, b"two", overwrite=True)
        with pytest.raises(CheckpointChangedError, match="generation 2 now"):
            delete_checkpoint(scope(root), if_generation=1)
        assert load(root) == b"two"
        delete_checkpoint(scope(root), if_generation=2)
        assert load(root) is None

    def test_a_conflict_with_a_replacement_is_decided_again(self, memory: Store) -> None:
        save(memory, b"one")
        store = _before_first_create(memory, lambda: save(memory, b"two", overwrite=True))
        delete_checkpoint(store.scope("10"))
        assert load(memory) is None
        assert keys_of(memory) == set()

    def test_a_save_on_top_of_the_tombstone_stays_and_is_reported(self, memory: Store) -> None:
        save(memory, b"one")
        store = _after_first_create(memory, lambda: save(memory, b"two"))
        with pytest.raises(CheckpointChangedError, match="saved anew"):
            delete_checkpoint(store.scope("10"))
        assert load(memory) == b"two"
        assert keys_of(memory) == first_keys(memory)

    def test_br27_each_key_that_stays_is_named_and_the_checkpoint_is_not_listed(self, memory: Store) -> None:
        manifest = save(memory, b"one")
        stuck = [entry.key for entry in manifest.objects]
        with pytest.raises(StoreError) as caught:
            delete_checkpoint(_Undeletable(scope(memory), stuck))
        assert all(key in str(caught.value) for key in stuck)
        assert keys_of(memory) == set(stuck), "all others are gone"
        assert load(memory) is None

    def test_h63_the_next_call_finishes_an_interrupted_deletion(self, memory: Store) -> None:
        manifest = save(memory, b"one")
        with pytest.raises(StoreError):
            delete_checkpoint(_Undeletable(scope(memory), [manifest.objects[0].key]))
        delete_checkpoint(scope(memory))
        assert keys_of(memory) == set()

    def test_a_save_finishes_an_interrupted_local_deletion_and_begins_in_a_new_folder(
        self, tmp_path: Path
    ) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        script = Script(before=_raise_once("remove_folder", SimulatedCrash()))
        with pytest.raises(SimulatedCrash):
            delete_checkpoint(scripted(root, script).scope("10"))
        assert manifests_of(root) == ["manifest.000001.json", "manifest.000002.json"]
        assert save(root, b"two").generation == 1
        assert load(root) == b"two"

    def test_nobody_builds_on_a_folder_that_is_going_to_be_removed(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        checkpoint = open_for_save(root, "10", overwrite=True)
        script = Script(before=_raise_once("remove_folder", SimulatedCrash()))
        with pytest.raises(SimulatedCrash):
            delete_checkpoint(scripted(root, script).scope("10"))
        done = upload(checkpoint, b"two")
        with pytest.raises(CheckpointChangedError, match="being deleted"):
            commit_save(checkpoint, done.draft, attempt=done.attempt, overwrite=True, expected={})

    def test_a_folder_that_cannot_be_removed_can_be_saved_again(self, tmp_path: Path) -> None:
        """A symbolic link stands at the checkpoint's name."""
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "10").symlink_to(tmp_path / "elsewhere")
        root = LocalStore(tmp_path / "run")
        save(root, b"one")
        delete_checkpoint(scope(root))
        assert load(root) is None
        save(root, b"two")
        assert load(root) == b"two"

    def test_br24_several_deleters_at_once_all_succeed_or_find_nothing(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        scopes = [scope(root) for _ in range(3)]
        delete_checkpoint(scopes[0])
        for late in scopes[1:]:
            with pytest.raises((CheckpointNotFoundError, CheckpointChangedError)):
                delete_checkpoint(late)
        assert list(tmp_path.iterdir()) == []


class TestFullDisk:
    """No tombstone can be written, and nothing else would make space."""

    @staticmethod
    def full(root: Store) -> Store:
        return scripted(root, Script(before=_full))

    def test_a_folder_of_ours_goes_without_a_tombstone(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        delete_checkpoint(self.full(root).scope("10"))
        assert list(tmp_path.iterdir()) == []

    def test_so_does_a_stock_one(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        TestGenerationZero.stock(root)
        delete_checkpoint(self.full(root).scope("10"))
        assert list(tmp_path.iterdir()) == []

    def test_a_pin_that_came_first_wins(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")

        looks: list[str] = []

        def pin_before_the_second_look(operation: str, key: str) -> None:
            _full(operation, key)
            if operation == "list" and looks:
                set_pinned(scope(root), True)
            looks.extend(["list"] if operation == "list" else [])

        with pytest.raises((CheckpointPinnedError, CheckpointChangedError)):
            delete_checkpoint(scripted(root, Script(before=pin_before_the_second_look)).scope("10"))
        assert load(root) == b"one"

    def test_foreign_files_stay_and_the_error_says_why(self, tmp_path: Path) -> None:
        root = LocalStore(tmp_path)
        save(root, b"one")
        scope(root).write("results.json", b"{}")
        with pytest.raises(StorageFullError):
            delete_checkpoint(self.full(root).scope("10"))
        assert load(root) == b"one"

    def test_an_object_store_has_no_such_way(self, memory: Store) -> None:
        save(memory, b"one")
        with pytest.raises(StorageFullError):
            delete_checkpoint(self.full(memory).scope("10"))
        assert load(memory) == b"one"


class TestPinAndAnnotate:
    def test_a_pin_is_a_new_generation_of_the_same_save(self, root: Store) -> None:
        first = save(root, b"one")
        pinned = set_pinned(scope(root), True)
        assert (pinned.generation, pinned.pinned, pinned.save_id) == (2, True, first.save_id)
        assert load(root) == b"one"

    def test_pinning_twice_makes_one_generation(self, root: Store) -> None:
        save(root, b"one")
        assert set_pinned(scope(root), True) == set_pinned(scope(root), True)
        assert manifests_of(root) == ["manifest.000001.json", "manifest.000002.json"]

    def test_promise_7_a_pinned_checkpoint_refuses_replacement_until_unpinned(self, root: Store) -> None:
        save(root, b"one")
        set_pinned(scope(root), True)
        with pytest.raises(CheckpointPinnedError):
            save(root, b"two", overwrite=True)
        assert load(root) == b"one"
        set_pinned(scope(root), False)
        save(root, b"two", overwrite=True)
        assert load(root) == b"two"

    def test_annotations_are_merged_and_carried_on(self, root: Store) -> None:
        save(root, b"one")
        annotate(scope(root), metrics={"loss": 1.0, "top1": 0.5})
        set_pinned(scope(root), True)
        manifest = annotate(scope(root), metrics={"loss": 0.25}, user_metadata={"note": "good"})
        assert manifest.metrics == {"loss": 0.25, "top1": 0.5}
        assert manifest.user_metadata == {"payload": "one", "note": "good"}
        assert manifest.pinned

    def test_what_is_still_to_be_deleted_is_carried_on(self, memory: Store) -> None:
        first = save(memory, b"one")
        stuck = first.objects[0].key
        save(_Undeletable(memory, [stuck]), b"two", overwrite=True)
        assert stuck in set_pinned(scope(memory), True).superseded
        set_pinned(scope(memory), False)
        delete_checkpoint(scope(memory))
        assert keys_of(memory) == set()

    def test_a_lost_race_between_two_annotations_keeps_both(self, memory: Store) -> None:
        """Both generations carry the same save_id: only the bytes tell whose the number is."""
        save(memory, b"one")
        store = _before_first_create(memory, lambda: annotate(scope(memory), metrics={"theirs": 1.0}))
        manifest = annotate(store.scope("10"), metrics={"ours": 2.0})
        assert manifest.metrics == {"theirs": 1.0, "ours": 2.0}

    def test_a_pin_whose_answer_was_lost_is_found(self, memory: Store) -> None:
        save(memory, b"one")
        store = scripted(memory, answers("create", {0: StoreTimeoutError("lost")}, is_after=True))
        assert set_pinned(store.scope("10"), True, waiting=FakeTime().waiting).generation == 2

    def test_a_pin_that_a_replacement_outran_starts_again_from_the_newest(self, memory: Store) -> None:
        save(memory, b"one")
        store = _after_first_create(memory, lambda: set_pinned(scope(memory), False))
        manifest = set_pinned(store.scope("10"), True)
        newest = read_newest(scope(memory))
        assert newest is not None
        assert newest.manifest == manifest
        assert manifest.pinned

    @pytest.mark.parametrize("is_deleted", [True, False])
    def test_an_absent_or_deleted_checkpoint_cannot_be_pinned(self, memory: Store, is_deleted: bool) -> None:
        if is_deleted:
            save(memory, b"one")
            delete_checkpoint(scope(memory))
        with pytest.raises(CheckpointNotFoundError):
            set_pinned(scope(memory), True)

    def test_a_slow_pin_cannot_hit_a_newer_life_of_the_name(self, memory: Store) -> None:
        save(memory, b"one")

        def next_life() -> None:
            delete_checkpoint(scope(memory))
            save(memory, b"two")

        manifest = set_pinned(_before_first_create(memory, next_life).scope("10"), True)
        assert manifest.user_metadata == {"payload": "two"}
        assert manifest.generation == 4


class TestDamage:
    @staticmethod
    def damage(root: Store, generation: int) -> None:
        scope(root).write(manifest_key(generation), b'{"format": "remote_ckpt", "version": [1, 0]')

    def test_reading_a_damaged_newest_generation_is_an_error(self, root: Store) -> None:
        save(root, b"one")
        self.damage(root, 1)
        with pytest.raises(CheckpointDamagedError):
            read_newest(scope(root))

    def test_a_damaged_checkpoint_is_replaced_only_when_told(self, root: Store) -> None:
        save(root, b"one")
        self.damage(root, 1)
        with pytest.raises(CheckpointExistsError, match="damaged"):
            save(root, b"two")
        assert save(root, b"two", overwrite=True).generation == 2
        assert load(root) == b"two"

    def test_the_generation_below_says_what_a_damaged_one_cannot(self, root: Store) -> None:
        save(root, b"one")
        set_pinned(scope(root), True)
        self.damage(root, 3)
        with pytest.raises(CheckpointPinnedError):
            save(root, b"two", overwrite=True)
        with pytest.raises(CheckpointPinnedError):
            delete_checkpoint(scope(root))

    def test_unpinning_over_a_damaged_generation_goes_on_from_the_one_below(self, root: Store) -> None:
        save(root, b"one")
        set_pinned(scope(root), True)
        annotate(scope(root), metrics={"loss": 1.0})
        self.damage(root, 3)
        manifest = set_pinned(scope(root), False)
        assert (manifest.generation, manifest.pinned) == (4, False)
        assert load(root) == b"one"
        delete_checkpoint(scope(root))
        assert load(root) is None

    @pytest.mark.parametrize("is_pinned", [True, False])
    def test_anything_else_over_a_damaged_generation_is_an_error(self, root: Store, is_pinned: bool) -> None:
        save(root, b"one")
        set_pinned(scope(root), is_pinned)
        self.damage(root, 3)
        with pytest.raises(CheckpointDamagedError):
            annotate(scope(root), metrics={"loss": 1.0})
        with pytest.raises(CheckpointDamagedError):
            set_pinned(scope(root), True)
        if not is_pinned:
            with pytest.raises(CheckpointDamagedError):
                set_pinned(scope(root), False)

    def test_a_damaged_checkpoint_can_be_deleted(self, root: Store) -> None:
        save(root, b"one")
        self.damage(root, 1)
        delete_checkpoint(scope(root))
        assert load(root) is None

    def test_a_newer_format_is_neither_replaced_nor_deleted(self, root: Store) -> None:
        save(root, b"one")
        scope(root).write(manifest_key(1), b'{"format": "remote_ckpt", "version": [2, 0]}')
        with pytest.raises(FormatError):
            save(root, b"two", overwrite=True)
        with pytest.raises(FormatError):
            delete_checkpoint(scope(root))

    def test_a_manifest_that_vanishes_between_listing_and_reading_is_looked_for_again(
        self, memory: Store
    ) -> None:
        save(memory, b"one")
        script = Script(before=once("read", lambda: _supersede_and_sweep(memory)))
        newest = read_newest(scripted(scope(memory), script))
        assert newest is not None
        assert newest.generation == 2


class TestCrashes:
    """Promises 1, 2 and 7 after the process died before or after any one of its store calls."""

    Order = Callable[[Store], object]

    ORDERS: ClassVar[dict[str, tuple[Order, set[bytes | None]]]] = {
        "save": (lambda root: save(root, b"new"), {None, b"new"}),
        "replace": (lambda root: save(root, b"new", overwrite=True), {b"old", b"new"}),
        "delete": (lambda root: delete_checkpoint(root.scope("10")), {b"old", None}),
        "pin": (lambda root: set_pinned(root.scope("10"), True), {b"old"}),
        "replace stock": (lambda root: save(root, b"new", overwrite=True), {None, b"new"}),
    }

    @pytest.mark.parametrize("order", ORDERS)
    def test_a_crash_at_any_call_leaves_the_old_or_the_new_whole(
        self, order: str, root_of: Callable[[], Store]
    ) -> None:
        act, allowed = self.ORDERS[order]
        seen: set[bytes | None] = set()
        for root in self.crashes(act, order, root_of):
            found = load(root)
            assert found in allowed
            seen.add(found)
            self.check_next_steps(root, found)
        assert seen == allowed, "the crashes cover both sides of the commit"

    @pytest.mark.parametrize("order", ["replace", "delete"])
    def test_promise_7_holds_through_every_crash(self, order: str, root_of: Callable[[], Store]) -> None:
        act, _ = self.ORDERS[order]
        for root in self.crashes(act, order, root_of, is_pinned=True):
            newest = read_newest(root.scope("10"))
            assert newest is not None
            assert newest.manifest.pinned
            assert load(root) == b"old"

    def crashes(
        self, act: Order, order: str, root_of: Callable[[], Store], *, is_pinned: bool = False
    ) -> Iterator[Store]:
        for is_done in (False, True):
            for number in range(1, 100):
                root = root_of()
                self.prepare(root, order, is_pinned=is_pinned)
                try:
                    with suppress(CheckpointPinnedError):
                        act(FaultStore.crashing(root, number, is_done=is_done))
                    break
                except SimulatedCrash:
                    yield root
            assert number > 2, "the order makes several store calls"

    @staticmethod
    def prepare(root: Store, order: str, *, is_pinned: bool) -> None:
        if order == "replace stock":
            TestGenerationZero.stock(root)
        elif order != "save":
            save(root, b"old")
        if is_pinned:
            set_pinned(scope(root), True)

    @staticmethod
    def check_next_steps(root: Store, found: bytes | None) -> None:
        """Whatever the crash left, the next save and the next deletion work, and clean up after it."""
        if found is not None and (newest := read_newest(scope(root))) and newest.manifest.pinned:
            set_pinned(scope(root), False)
        manifest = save(root, b"next", overwrite=True)
        assert load(root) == b"next"
        replaced = set(manifest.superseded)
        assert replaced.isdisjoint(keys_of(root))
        delete_checkpoint(scope(root))
        assert load(root) is None


@pytest.fixture(params=["memory", "local"])
def root_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    numbers = iter(range(10_000))
    if request.param == "memory":
        return MemoryStore.fresh
    return lambda: LocalStore(tmp_path / str(next(numbers)))


# --- scripts -----------------------------------------------------------------------------------------


class _Undeletable(DelegatingStore):
    """A store that answers 'retained by policy' for some keys."""

    def __init__(self, inner: Store, stuck: Sequence[str]) -> None:
        super().__init__(inner)
        self.stuck = set(stuck)

    def _wrap(self, inner: Store) -> Store:
        return _Undeletable(inner, sorted(self.stuck))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        failures = [DeleteFailure(key, AccessDeniedError("retained")) for key in keys if key in self.stuck]
        return [*failures, *self.inner.delete([key for key in keys if key not in self.stuck])]


def _raise_once(operation: str, error: BaseException) -> Callable[[str, str], None]:
    def fail() -> None:
        raise error

    return once(operation, fail)


def _full(operation: str, key: str) -> None:
    if operation in ("create", "write", "write_stream", "clock"):
        raise StorageFullError("no space left")


def _before_first_create(root: Store, act: Callable[[], object]) -> Store:
    return scripted(root, Script(before=once("create", act)))


def _after_first_create(root: Store, act: Callable[[], object]) -> Store:
    return scripted(root, Script(after=once("create", act)))


def _after_create(script: Script) -> Script:
    """The script, in force only once the manifest was created."""
    created: list[bool] = []

    def before(operation: str, key: str) -> None:
        if created:
            script.before(operation, key)

    def after(operation: str, key: str) -> None:
        if operation == "create":
            created.append(True)

    return Script(before=before, after=after)


def _supersede_and_sweep(root: Store) -> None:
    newest = read_newest(scope(root))
    assert newest is not None
    following = next_generation(newest.manifest, pinned=True)
    scope(root).create(manifest_key(following.generation), format_manifest(following))
    scope(root).delete([manifest_key(newest.generation)])
