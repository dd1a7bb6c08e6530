"""The create-only probe: honoured, ignored in sequence, racy, undecided, and accepted all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remote_ckpt import probe
from remote_ckpt.errors import (
    AccessDeniedError,
    ObjectExistsError,
    StoreError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.options import CommitOptions, Options, RetryOptions
from remote_ckpt.probe import probe_create_only
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Buffer, CreateOnly, Store, StoreCapabilities
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.single_writer import SingleWriterStore
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.testing.faults import FaultStore, StoreCall
from remote_ckpt.testing.proxy import FaultProxy, Reply, Rule
from remote_ckpt.testing.servers import LocalServer

HASTY = Options(retry=RetryOptions(initial_seconds=0.0, max_seconds=0.0))
ACCEPTING = Options(commit=CommitOptions(accept_single_writer=True))


class Declared(DelegatingStore):
    """A store of which nobody knows beforehand whether it honours create-only."""

    create_only = CreateOnly.PROBE

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(create_only=self.create_only, server_side_copy=True)


class Ignoring(Declared):
    """Overwrites silently, as rclone's server does."""

    def create(self, key: str, data: Buffer) -> None:
        self.inner.write(key, data)


class Racy(Declared):
    """Looks first and then writes: everybody who looked before the first write wins."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.looked = threading.Barrier(8)

    def create(self, key: str, data: Buffer) -> None:
        is_race = bytes(data).startswith(b"racer")
        if not is_race and any(info.key == key for info in self.inner.list()):
            raise ObjectExistsError("412", key=key)
        if is_race:
            self.looked.wait()
        self.inner.write(key, data)


class LosingAnswers(Declared):
    """Honours create-only, and reports each win as a conflict (H-01)."""

    def create(self, key: str, data: Buffer) -> None:
        self.inner.create(key, data)
        raise ObjectExistsError("412", key=key)


class AlwaysConflict(Declared):
    """Answers a conflict in every race, though nothing is there."""

    def create(self, key: str, data: Buffer) -> None:
        if bytes(data).startswith(b"racer"):
            raise ObjectExistsError("409", key=key)
        self.inner.create(key, data)


class Refusing(Declared):
    """Does not know the condition."""

    def create(self, key: str, data: Buffer) -> None:
        raise UnsupportedStoreError("501 NotImplemented")


class RefusingAll(Declared):
    """Refuses the condition as it refuses any other mistake (400 InvalidArgument)."""

    def create(self, key: str, data: Buffer) -> None:
        raise StoreError("400 InvalidArgument")


class Without(Declared):
    create_only = CreateOnly.NONE


@pytest.fixture(autouse=True)
def fresh_answers() -> Iterator[None]:
    probe._proven.clear()
    yield
    probe._proven.clear()


def test_a_store_that_honours_it_passes_and_is_left_clean() -> None:
    memory = MemoryStore.fresh()
    probe_create_only(Declared(memory))
    assert memory.list() == []


def test_the_answer_is_kept_for_the_process() -> None:
    counted = FaultStore(Declared(MemoryStore.fresh()))
    probe_create_only(counted)
    count = len(counted.calls)
    probe_create_only(counted)
    assert count >= 2 + 8
    assert len(counted.calls) == count


def test_a_driver_known_to_be_atomic_is_not_tried() -> None:
    counted = FaultStore(MemoryStore.fresh())
    probe_create_only(counted)
    assert counted.calls == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Ignoring, "a second write replaced the first"),
        (Racy, "8 of 8 writes at the same time were accepted"),
        (Refusing, "refuses the condition: 501 NotImplemented"),
        (RefusingAll, "refuses the condition: 400 InvalidArgument"),
        (Without, "its driver has none"),
    ],
)
def test_h14_a_store_without_it_is_refused_with_the_reason(kind: type[Declared], reason: str) -> None:
    memory = MemoryStore.fresh()
    with pytest.raises(UnsupportedStoreError, match=reason):
        probe_create_only(kind(memory))
    assert memory.list() == []


@pytest.mark.parametrize("kind", [Ignoring, Racy, Refusing, RefusingAll, Without])
def test_a_single_writer_may_accept_it_and_is_warned_each_time(
    kind: type[Declared], caplog: pytest.LogCaptureFixture
) -> None:
    memory = MemoryStore.fresh()
    for count in (1, 2):
        probe_create_only(kind(memory), options=ACCEPTING)
        assert caplog.text.count("are not kept apart") == count


def test_h01_wins_that_are_reported_as_conflicts_are_wins() -> None:
    memory = MemoryStore.fresh()
    probe_create_only(LosingAnswers(memory))
    assert memory.list() == []


def test_a_store_that_lets_nobody_win_is_undecided() -> None:
    with pytest.raises(StoreUnavailableError, match="no write was accepted"):
        probe_create_only(AlwaysConflict(MemoryStore.fresh()))


def test_a_failing_store_finds_nothing_out_and_is_asked_again() -> None:
    def fail(call: object) -> None:
        raise StoreUnavailableError("503")

    memory = MemoryStore.fresh()
    with pytest.raises(StoreUnavailableError):
        probe_create_only(FaultStore(Declared(memory), before=fail), options=HASTY)
    probe_create_only(Declared(memory))
    assert memory.list() == []


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("first", [1, 2, 3, 5, 12])
def test_a_store_that_gives_no_answer_for_a_while_is_asked_again(first: int, is_done: bool) -> None:
    def fail(call: StoreCall, result: object = None) -> object:
        if call.operation == "create" and first <= call.number < first + 3:
            raise StoreUnavailableError("503")
        return result

    memory = MemoryStore.fresh()
    hook: dict[str, Any] = {"after" if is_done else "before": fail}
    probe_create_only(FaultStore(Declared(memory), **hook), options=HASTY)
    assert memory.list() == []


def test_a_store_that_is_busy_for_all_racers_is_asked_again() -> None:
    def fail(call: StoreCall) -> None:
        if call.operation == "create" and 3 < call.number <= 3 + 3 * 9:
            raise StoreUnavailableError("503")

    memory = MemoryStore.fresh()
    probe_create_only(FaultStore(Declared(memory), before=fail), options=HASTY)
    assert memory.list() == []


@pytest.mark.parametrize(
    ("error", "tries"), [(AccessDeniedError("403"), 1), (StoreUnavailableError("refused"), 30)]
)
def test_a_create_that_fails_is_told_alone_and_nothing_is_removed(
    error: StoreError, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: StoreCall) -> None:
        raise error

    store = FaultStore(Declared(MemoryStore.fresh()), before=fail)
    with pytest.raises(type(error)) as raised:
        probe_create_only(store, options=HASTY)
    assert raised.value is error
    assert [call.operation for call in store.calls] == ["create"] * tries
    assert len({call.key for call in store.calls}) == tries
    assert caplog.text == ""


def test_the_first_failure_is_raised_though_the_cleanup_fails_too(caplog: pytest.LogCaptureFixture) -> None:
    def fail(call: StoreCall) -> None:
        if call.operation in ("read", "delete"):
            raise StoreUnavailableError(f"{call.operation} refused")

    with pytest.raises(StoreUnavailableError, match="read refused"):
        probe_create_only(FaultStore(Declared(MemoryStore.fresh()), before=fail), options=HASTY)
    assert caplog.text == ""


def test_a_probe_that_cannot_be_removed_is_warned_of_and_the_answer_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(call: StoreCall) -> None:
        if call.operation == "delete":
            raise AccessDeniedError("403")

    probe_create_only(FaultStore(Declared(MemoryStore.fresh()), before=fail))
    assert caplog.text.count("cannot remove the probes: 403") == 1


@pytest.mark.parametrize("kind", [Refusing, RefusingAll])
def test_a_single_writer_creates_where_the_condition_is_refused_and_is_warned(
    kind: type[Declared], caplog: pytest.LogCaptureFixture
) -> None:
    store = SingleWriterStore(kind(MemoryStore.fresh()))
    probe_create_only(store, options=ACCEPTING)
    assert "it refuses the condition" in caplog.text
    assert probe._proven == set()
    store.scope("1").create("k", b"1")
    with pytest.raises(ObjectExistsError):
        store.scope("1").create("k", b"2")
    assert store.read("1/k") == b"1"


def test_where_a_plain_write_fails_too_it_was_not_the_condition() -> None:
    def fail(call: StoreCall) -> None:
        if call.operation == "write":
            raise StoreError("400 KeyTooLongError")

    with pytest.raises(StoreError, match="KeyTooLong"):
        probe_create_only(FaultStore(RefusingAll(MemoryStore.fresh()), before=fail))


class Renamed(Declared):
    """Another store behind the same URL: an endpoint is no part of it."""

    @property
    def identity(self) -> str:
        return "another endpoint"


def test_what_one_endpoint_proved_says_nothing_of_another_with_the_same_url() -> None:
    memory = MemoryStore.fresh()
    probe_create_only(Declared(memory))
    counted = FaultStore(Renamed(memory))
    probe_create_only(counted)
    assert len(counted.calls) >= 2 + 8


def test_what_a_bucket_proved_holds_for_all_of_its_prefixes() -> None:
    counted = FaultStore(Declared(MemoryStore.fresh()))
    probe_create_only(counted.scope("a"))
    count = len(counted.calls)
    probe_create_only(counted.scope("b"))
    assert len(counted.calls) == count


@pytest.mark.parametrize("transport", [None, "fsspec"])
@pytest.mark.parametrize("reply", [Reply(501, code="NotImplemented"), Reply(400, code="InvalidArgument")])
def test_a_server_that_refuses_the_condition_serves_a_single_writer_only(
    ministack: LocalServer, fresh_root: Callable[[LocalServer], str], transport: str | None, reply: Reply
) -> None:
    with FaultProxy(ministack.endpoint_url) as proxy:
        proxy.inject(Rule(header="if-none-match", fault=reply))
        given = {**ministack.storage_options(), "endpoint_url": proxy.endpoint_url}
        url = fresh_root(ministack)
        with pytest.raises(UnsupportedStoreError, match="it refuses the condition"):
            probe_create_only(open_store(url, storage_options=given, transport=transport))
        store = open_store(url, storage_options=given, transport=transport, options=ACCEPTING)
        probe_create_only(store, options=ACCEPTING)
        store.scope("1").create("manifest", b"1")
        assert [info.key for info in store.list()] == ["1/manifest"]


@pytest.mark.parametrize("transport", [None, "fsspec"])
def test_a_store_that_ignores_the_condition_is_found_after_one_of_the_same_url_passed(
    ministack: LocalServer, rclone: LocalServer, transport: str | None
) -> None:
    bucket = f"same-{transport}".lower()
    for server in (ministack, rclone):
        server.create_bucket(bucket)
    url = f"s3://{bucket}/run"
    probe_create_only(open_store(url, storage_options=ministack.storage_options(), transport=transport))
    with pytest.raises(UnsupportedStoreError):
        probe_create_only(open_store(url, storage_options=rclone.storage_options(), transport=transport))


@pytest.mark.parametrize("transport", [None, "fsspec"])
def test_the_identity_of_a_store_names_its_endpoint_and_no_secret(transport: str | None) -> None:
    given = {"key": "k", "secret": "s3cret", "endpoint_url": "http://localhost:1"}
    root = open_store("s3://bucket/run", storage_options=given, transport=transport)
    assert "http://localhost:1" in root.identity
    assert "bucket" in root.identity
    assert "s3cret" not in root.identity
    other = {**given, "endpoint_url": "http://localhost:2"}
    assert open_store("s3://bucket/run", storage_options=other, transport=transport).identity != root.identity
    assert root.scope("1").identity == root.identity
