"""A run's directory without torch: what it lists, finds, marks, deletes and prunes, and what it costs."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import protocol
import pytest
from upath import UPath

from remote_ckpt import (
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointDirectory,
    CheckpointExistsError,
    CheckpointInfo,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CheckpointRetentionPolicy,
    ConfigError,
    KeepBest,
    KeepEvery,
    KeepLast,
    StoreUnavailableError,
    cleanup_checkpoint,
    keep_last_n_checkpoints,
    resumed,
)
from remote_ckpt.checksum import crc32c
from remote_ckpt.keys import data_key, manifest_key, new_token
from remote_ckpt.manifest import Manifest, ObjectEntry, format_manifest
from remote_ckpt.newest import read_newest
from remote_ckpt.resumed import note_resumed
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.testing.faults import FaultStore, StoreCall
from remote_ckpt.testing.servers import LocalServer
from remote_ckpt.url import parse_location

_numbers = itertools.count()


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    resumed.forget_all()
    yield f"memory://directory-{next(_numbers)}/run" if request.param == "memory" else str(tmp_path / "run")
    resumed.forget_all()


@pytest.fixture
def directory(url: str) -> Iterator[CheckpointDirectory]:
    with CheckpointDirectory(url) as opened:
        yield opened


def save(directory: CheckpointDirectory, *steps: int | str, payload: bytes = b"x") -> None:
    with closing(open_store(directory.url)) as root:
        for step in steps:
            protocol.save(root, payload, name=str(step), overwrite=True)


def payload_of(directory: CheckpointDirectory, name: str) -> bytes:
    """What a checkpoint holds, copies included: their objects have other names, as their bytes still say."""
    with closing(open_store(directory.url)) as root:
        found = read_newest(root.scope(name))
        assert found is not None
        payload = str(found.manifest.user_metadata["payload"]).encode()
        for entry in found.manifest.objects:
            data = root.read(f"{name}/{entry.key}")
            assert (data.startswith(payload), crc32c(data)) == (True, entry.crc32c)
        return payload


def names(directory: CheckpointDirectory) -> list[str]:
    return [info.name for info in directory.list()]


def write(directory: CheckpointDirectory, key: str, data: bytes = b"x") -> None:
    with closing(open_store(directory.url)) as root:
        root.write(key, data)


def newest(directory: CheckpointDirectory, name: str) -> Manifest:
    with closing(open_store(directory.url)) as root:
        found = read_newest(root.scope(name))
        assert found is not None
        return found.manifest


def hooked(url: str, before: Callable[[StoreCall], None]) -> CheckpointDirectory:
    """A directory whose store calls ``before`` ahead of every request."""
    directory = CheckpointDirectory(url)
    directory._connection._store = FaultStore(open_store(url), before=before)
    directory._connection._pid = os.getpid()
    return directory


# --- finding -----------------------------------------------------------------------------------------


def test_an_empty_or_missing_directory_holds_nothing(directory: CheckpointDirectory) -> None:
    assert directory.list() == []
    assert directory.latest() is None
    assert directory.best("loss") is None
    with pytest.raises(CheckpointNotFoundError):
        directory.info(7)


def test_a_checkpoint_is_described_by_its_manifest(directory: CheckpointDirectory) -> None:
    save(directory, 7)
    manifest = newest(directory, "7")
    [info] = directory.list()
    assert (info.name, info.step, info.kind) == ("7", 7, "remote_ckpt")
    assert info.formats == ("remote_ckpt", "dcp")
    assert info.url == f"{directory.url}/7"
    assert info.committed_at == manifest.committed_at
    assert info.total_bytes == manifest.total_bytes > 0
    assert (info.world_size, info.object_count, info.generation) == (1, 2, 1)
    assert (info.pinned, info.is_damaged, info.metrics) == (False, False, {})
    assert info.save_id == manifest.save_id
    assert directory.info(7) == directory.info("7") == directory.info(info) == info


def test_stock_and_plain_checkpoints_are_listed_and_told_apart(directory: CheckpointDirectory) -> None:
    save(directory, 5)
    write(directory, "6/.metadata", b"1234")
    write(directory, "6/__0_0.distcp", b"12345678")
    write(directory, "eval/checkpoint.pth", b"123")
    five, six, evaluation = directory.list()
    assert five.kind == "remote_ckpt"
    assert (six.name, six.kind, six.formats, six.total_bytes) == ("6", "dcp", ("dcp",), 12)
    assert (evaluation.kind, evaluation.formats, evaluation.total_bytes) == ("plain", ("plain",), 3)
    assert six.committed_at is not None
    assert datetime.now(timezone.utc) - six.committed_at < timedelta(minutes=1)


def test_half_made_deleted_and_foreign_things_are_passed_over(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2)
    directory.delete(1)
    write(directory, "3/d-0123456789abcdef/0.distcp")
    write(directory, "notes/readme.txt")
    write(directory, "readme.txt")
    assert names(directory) == ["2"]
    latest = directory.latest()
    assert latest is not None
    assert latest.name == "2"


def test_br_09_a_damaged_manifest_is_listed_as_such_passed_over_and_an_error_when_asked_for(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    save(directory, 1, 2)
    write(directory, "2/manifest.000001.json", b"{")
    one, two = directory.list()
    assert (one.is_damaged, two.is_damaged) == (False, True)
    assert "damaged" in str(two.problem)
    latest = directory.latest()
    assert latest is not None
    assert latest.name == "1"
    assert "passing over the damaged checkpoint 2" in caplog.text
    with pytest.raises(CheckpointDamagedError):
        directory.info(2)


def test_where_all_steps_are_damaged_there_is_no_latest_and_not_none(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2, "best")
    for step in (1, 2):
        write(directory, f"{step}/manifest.000001.json", b"{")
    with pytest.raises(CheckpointDamagedError, match="damaged") as raised:
        directory.latest()
    assert str(raised.value.url).endswith("/2")


def test_br_09_looking_closely_passes_over_a_checkpoint_that_lacks_an_object(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    save(directory, 1, 2)
    key = newest(directory, "2").objects[0].key
    with closing(open_store(directory.url)) as root:
        root.delete([f"2/{key}"])
    latest, sound = directory.latest(), directory.latest(verify=True)
    assert latest is not None
    assert sound is not None
    assert (latest.name, sound.name) == ("2", "1")
    assert key in caplog.text


def test_br_18_an_error_is_never_none(directory: CheckpointDirectory) -> None:
    save(directory, 1)

    def fail(call: StoreCall) -> None:
        raise StoreUnavailableError("503 SlowDown")

    broken = hooked(directory.url, fail)
    for ask in (broken.list, broken.latest, broken.usage, lambda: broken.best("loss")):
        with pytest.raises(StoreUnavailableError):
            ask()
    for ask_for in (broken.info, broken.verify, broken.contents):
        with pytest.raises(StoreUnavailableError):
            ask_for(1)


def test_br_59_what_another_process_committed_is_seen_at_once(directory: CheckpointDirectory) -> None:
    other = CheckpointDirectory(directory.url)
    assert other.latest() is None
    save(directory, 3)
    latest = other.latest()
    assert latest is not None
    assert latest.step == 3


@pytest.mark.parametrize("wrong", [-1, True, 1.5, None, "../1", "a/b", "", "*", "1*", " 1", "1 ", ".hidden"])
def test_what_names_no_checkpoint_is_refused(directory: CheckpointDirectory, wrong: object) -> None:
    save(directory, 1)
    for call in (directory.info, directory.delete, directory.pin, directory.verify, directory.path):
        with pytest.raises(ConfigError):
            call(wrong)  # type: ignore[arg-type]
    assert names(directory) == ["1"]


# --- best, marks -------------------------------------------------------------------------------------


def test_the_best_is_by_value_and_of_equals_the_later(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2, 3, 4, "extra")
    losses: dict[int | str, float] = {1: 0.5, 2: 0.25, 3: 0.25, 4: float("nan"), "extra": 0.25}
    for step, loss in losses.items():
        directory.annotate(step, metrics={"loss": loss})
    lowest, highest = directory.best("loss"), directory.best("loss", "max")
    assert lowest is not None
    assert highest is not None
    assert (lowest.name, highest.name) == ("3", "1")
    assert directory.best("accuracy") is None
    with pytest.raises(ConfigError, match="mode"):
        directory.best("loss", "lowest")  # type: ignore[arg-type]


def test_notes_are_added_to_what_is_there_and_survive_a_pin(directory: CheckpointDirectory) -> None:
    save(directory, 1)
    directory.annotate(1, metrics={"loss": 1.0, "accuracy": 0.5}, metadata={"by": "evaluation"})
    assert directory.pin(1).pinned
    info = directory.annotate(1, metrics={"loss": 0.75})
    assert info.metrics == {"loss": 0.75, "accuracy": 0.5}
    assert info.metadata["by"] == "evaluation"
    assert info.pinned
    assert directory.info(1) == info
    assert payload_of(directory, "1") == b"x"


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2)
    directory.pin(1)
    with pytest.raises(CheckpointPinnedError):
        directory.delete(1)
    assert directory.prune(KeepLast(1)).deleted == ()
    assert not directory.unpin(1).pinned
    assert directory.prune(KeepLast(1)).deleted == ("1",)
    assert names(directory) == ["2"]


def test_a_checkpoint_that_was_seen_is_not_deleted_in_a_newer_life(directory: CheckpointDirectory) -> None:
    save(directory, 1)
    seen = directory.info(1)
    save(directory, 1, payload=b"newer")
    with pytest.raises(CheckpointChangedError):
        directory.delete(seen)
    assert payload_of(directory, "1") == b"newer"
    directory.delete(1)
    assert names(directory) == []


def test_a_note_about_weights_that_were_replaced_since_is_refused(directory: CheckpointDirectory) -> None:
    save(directory, 1)
    seen = directory.info(1)
    save(directory, 1, payload=b"newer")
    for change in (
        directory.pin,
        directory.unpin,
        lambda info: directory.annotate(info, metrics={"loss": 0.5}),
    ):
        with pytest.raises(CheckpointChangedError):
            change(seen)
    assert (directory.info(1).metrics, directory.info(1).pinned) == ({}, False)
    assert directory.annotate(directory.info(1), metrics={"loss": 0.5}).metrics == {"loss": 0.5}


def test_a_damaged_checkpoint_that_was_seen_is_not_deleted_in_a_newer_life(
    directory: CheckpointDirectory,
) -> None:
    save(directory, 1)
    write(directory, "1/manifest.000001.json", b"{")
    [seen] = directory.list()
    save(directory, 1, payload=b"newer")
    with pytest.raises(CheckpointChangedError):
        directory.delete(seen)
    assert payload_of(directory, "1") == b"newer"


@pytest.mark.parametrize("wrong", ["0.5", 10**400, None, [1.0]])
def test_what_is_no_number_is_no_metric(directory: CheckpointDirectory, wrong: Any) -> None:
    save(directory, 1)
    with pytest.raises(ConfigError, match="loss"):
        directory.annotate(1, metrics={"loss": wrong})
    assert directory.info(1).generation == 1


# --- pruning -----------------------------------------------------------------------------------------


def test_a_dry_run_says_what_the_run_then_does(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2, 3, 1000, 1001)
    directory.annotate(2, metrics={"loss": 0.1})
    for step in (1, 3, 1000, 1001):
        directory.annotate(step, metrics={"loss": 1.0})
    policy = KeepLast(1) | KeepEvery(steps=1000) | KeepBest("loss")
    planned = directory.prune(policy, dry_run=True)
    assert planned.is_dry_run
    assert planned.deleted == ()
    assert names(directory) == ["1", "2", "3", "1000", "1001"]
    done = directory.prune(policy)
    assert done.plan == planned.plan
    assert done.deleted == ("3",)
    assert names(directory) == ["1", "2", "1000", "1001"]
    assert directory.prune(policy).deleted == ()


def test_the_directorys_own_policy_is_the_default(url: str) -> None:
    directory = CheckpointDirectory(url, policy=KeepLast(2))
    save(directory, 1, 2, 3)
    assert directory.prune().deleted == ("1",)
    with pytest.raises(ConfigError, match="policy"):
        CheckpointDirectory(url).prune()
    with pytest.raises(ConfigError, match="policy"):
        CheckpointDirectory(url, policy=3)  # type: ignore[arg-type]


def test_br_21_what_this_process_resumed_from_stays(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2, 3)
    note_resumed(parse_location(f"{directory.url}/1"))
    assert directory.prune(KeepLast(1)).deleted == ("2",)


def test_br_33_a_pin_that_comes_after_the_plan_wins(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2)
    pins: list[CheckpointInfo] = []

    def pin_just_before_the_tombstone(call: StoreCall) -> None:
        if call.operation == "create" and not pins:
            pins.append(directory.pin(1))

    report = hooked(directory.url, pin_just_before_the_tombstone).prune(KeepLast(1))
    assert [info.pinned for info in pins] == [True]
    assert report.deleted == ()
    assert [failure.name for failure in report.failures] + [one.name for one in report.spared] == ["1"]
    assert names(directory) == ["1", "2"]


def test_br_27_a_deletion_that_fails_is_reported_and_tried_again_next_time(
    directory: CheckpointDirectory,
) -> None:
    save(directory, 1, 2, 3)

    def deny(call: StoreCall) -> None:
        if call.operation == "delete" and call.url.endswith("/1"):
            raise StoreUnavailableError("no answer")

    report = hooked(directory.url, deny).prune(KeepLast(1))
    assert report.deleted == ("2",)
    assert [failure.name for failure in report.failures] == ["1"]
    assert names(directory) == ["3"]  # hidden first, so it is gone for readers
    save(directory, 4)
    assert directory.prune(KeepLast(1)).failures == ()


def test_br_26_foreign_names_and_leftovers_are_untouched_by_retention(directory: CheckpointDirectory) -> None:
    save(directory, 10, 20, "20-backup", "mystep-5")
    write(directory, "15/d-0123456789abcdef/0.distcp")
    write(directory, "notes/readme.txt")
    assert directory.prune(KeepLast(1)).deleted == ("10",)
    with closing(open_store(directory.url)) as root:
        kept = {info.key.partition("/")[0] for info in root.list("")}
    assert kept - {"10"} == {"15", "20", "20-backup", "mystep-5", "notes"}


def test_what_a_kept_link_leads_to_is_kept(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 1, 2, 3)
    (tmp_path / "best").symlink_to("1")
    (tmp_path / "1000").symlink_to("3")
    assert directory.prune(KeepLast(1)).deleted == ("2",)
    assert names(directory) == ["1", "3", "1000", "best"]
    assert [payload_of(directory, name) for name in names(directory)] == [b"x"] * 4
    (tmp_path / "1000").unlink()
    cleanup_checkpoint(tmp_path, CheckpointRetentionPolicy.BEST)
    assert names(directory) == ["1", "best"]


def test_a_step_that_is_a_link_to_another_run_is_left_alone(tmp_path: Path) -> None:
    shared, directory = CheckpointDirectory(tmp_path / "shared"), CheckpointDirectory(tmp_path / "run")
    save(shared, 3)
    save(directory, 4, 5)
    (tmp_path / "run" / "3").symlink_to(tmp_path / "shared" / "3")
    report = directory.prune(KeepLast(1))
    assert report.deleted == ("4",)
    assert [one.reason for one in report.plan.keep if one.name == "3"] == [
        "it is a link: what it leads to is not this run's alone"
    ]
    keep_last_n_checkpoints(tmp_path / "run", 1)
    assert names(shared) == ["3"]
    assert payload_of(shared, "3") == b"x"


# --- copies ------------------------------------------------------------------------------------------


def test_a_kept_copy_outlives_its_source(directory: CheckpointDirectory) -> None:
    save(directory, 1, payload=b"one")
    copy = directory.keep_copy(1)
    assert (copy.name, copy.step, copy.pinned) == ("1_keep", None, False)
    assert directory.keep_copy(1, name="best").name == "best"
    save(directory, 2)
    directory.prune(KeepLast(1))
    assert names(directory) == ["2", "1_keep", "best"]
    assert payload_of(directory, "1_keep") == payload_of(directory, "best") == b"one"


def test_a_directory_is_copied_by_what_the_other_lacks(
    directory: CheckpointDirectory, tmp_path: Path
) -> None:
    other = CheckpointDirectory(tmp_path / "other")
    save(directory, 1, 2, payload=b"both")
    assert [info.name for info in directory.copy_to(other)] == ["1", "2"]
    save(directory, 3, payload=b"three")
    assert [info.url for info in directory.copy_to(tmp_path / "other")] == [str(tmp_path / "other" / "3")]
    assert [payload_of(other, name) for name in names(other)] == [b"both", b"both", b"three"]
    assert directory.copy_to(other) == []


def test_one_checkpoint_is_copied_under_another_name_and_never_over_another_unasked(
    directory: CheckpointDirectory, tmp_path: Path
) -> None:
    other = CheckpointDirectory(tmp_path / "other")
    save(directory, 1, payload=b"new")
    save(other, 1, payload=b"old")
    with pytest.raises(CheckpointExistsError):
        directory.copy_to(other, 1)
    with pytest.raises(CheckpointExistsError):
        directory.copy_to(other)
    assert payload_of(other, "1") == b"old"
    assert [info.name for info in directory.copy_to(other, 1, name="base")] == ["base"]
    directory.copy_to(other, 1, overwrite=True)
    assert [payload_of(other, name) for name in ("1", "base")] == [b"new", b"new"]
    with pytest.raises(ConfigError):
        directory.copy_to(other, name="base")


# --- the object --------------------------------------------------------------------------------------


def test_a_directory_travels_without_its_connections(directory: CheckpointDirectory) -> None:
    save(directory, 1)
    assert names(directory) == ["1"]
    assert names(pickle.loads(pickle.dumps(directory))) == ["1"]


def test_a_directory_can_be_used_after_it_was_closed(directory: CheckpointDirectory) -> None:
    save(directory, 1)
    directory.close()
    assert names(directory) == ["1"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_connects_anew(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 1, 2)
    assert names(directory) == ["1", "2"]
    child = os.fork()
    if child == 0:
        os._exit(len(directory.list()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_a_child_that_is_forked_while_a_thread_connects_does_not_wait_for_it(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 1, 2)
    directory._connection._lock.acquire()  # as the thread holds it, which the child does not have
    child = os.fork()
    if child == 0:
        os._exit(len(directory.list()))
    directory._connection._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


@pytest.mark.server
def test_a_copy_to_a_url_takes_the_options_that_the_path_carries(
    ministack: LocalServer, fresh_root: Callable[[LocalServer], str]
) -> None:
    root = UPath(fresh_root(ministack), **ministack.storage_options())
    directory = CheckpointDirectory(root)
    with closing(open_store(root)) as store:
        protocol.save(store, b"x", name="1")
    mirror = f"{directory.url}-mirror"
    assert [info.url for info in directory.copy_to(mirror)] == [f"{mirror}/1"]


@pytest.mark.server
@pytest.mark.parametrize(
    "part", ["a?b", "a*b", "[1]", "two words", "a+b", "a#b", "a%20b", "Läufe 模型", "-dash"]
)
def test_an_odd_prefix_in_a_bucket_is_itself_and_no_pattern(
    ministack: LocalServer, fresh_root: Callable[[LocalServer], str], part: str
) -> None:
    above = fresh_root(ministack)
    access = ministack.storage_options()
    for name, payload in ((part, b"odd"), ("axb", b"plain"), ("1", b"plain")):
        with closing(open_store(f"{above}/{name}", storage_options=access)) as root:
            for step in ("1", "2"):
                protocol.save(root, payload, name=step)
    with CheckpointDirectory(f"{above}/{part}", storage_options=access) as directory:
        assert names(directory) == ["1", "2"]
        assert directory.keep_copy(2).url == f"{above}/{part}/2_keep"
        assert directory.verify("2_keep", read_data=True).is_sound
        assert directory.prune(KeepLast(1)).deleted == ("1",)
        directory.delete("2_keep")
        directory.sweep(older_than=timedelta(0), dry_run=False)
        assert names(directory) == ["2"]
    for other in ("axb", "1"):
        assert names(CheckpointDirectory(f"{above}/{other}", storage_options=access)) == ["1", "2"]


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    directory = CheckpointDirectory("s3://bucket/run", storage_options={"key": "K-1", "secret": "S-1"})
    assert repr(directory) == "CheckpointDirectory('s3://bucket/run')"
    assert "S-1" not in repr(vars(directory))


# --- what it costs -----------------------------------------------------------------------------------


def fill(root: Store, count: int, *, object_count: int) -> None:
    """Write manifests of so many data objects, but only the first of those: a listing looks at none."""
    example = protocol.save(root, b"x", name="0")
    for step in range(1, count):
        entries = tuple(ObjectEntry(data_key(new_token(), 0), 1, 0) for _ in range(object_count))
        manifest = replace(example, name=str(step), step=step, objects=entries, total_bytes=object_count)
        root.write(f"{step}/{entries[0].key}", b"x")
        root.write(f"{step}/{manifest_key(1)}", format_manifest(manifest))


def test_a_thousand_checkpoints_of_64_objects_take_two_requests_each_and_the_latest_three() -> None:
    url = f"memory://directory-{next(_numbers)}/run"
    with closing(open_store(url)) as root:
        fill(root, 1000, object_count=64)
    operations: list[str] = []
    directory = hooked(url, lambda call: operations.append(call.operation))
    infos = directory.list()
    assert [info.step for info in infos] == list(range(1000))
    assert {info.object_count for info in infos[1:]} == {64}
    assert len(operations) == 1 + 2 * 1000
    operations.clear()
    latest = directory.latest()
    assert latest is not None
    assert latest.step == 999
    assert len(operations) == 3
