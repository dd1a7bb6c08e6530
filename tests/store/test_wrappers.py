"""Wrappers: each keeps the contract, and adds what it is there for. Also: which store a location opens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from remote_ckpt.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from remote_ckpt.options import RetryOptions
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Buffer, DeleteFailure, Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.meter import MeteredStore, StoreMeter
from remote_ckpt.store.retry import RetryStore
from remote_ckpt.store.wrappers import DelegatingStore, PrefixStore, ReadOnlyStore
from remote_ckpt.testing import FaultStore, SimulatedCrash, StoreCall, corrupt_reads, raise_at
from remote_ckpt.testing.contract import DATA, StoreContract

WRAPPERS: dict[str, Callable[[Store], DelegatingStore]] = {
    "delegating": DelegatingStore,
    "retry": lambda inner: RetryStore(inner, RetryOptions()),
    "metered": MeteredStore,
    "prefix": lambda inner: PrefixStore(inner, "run/ckpt"),
    "fault": FaultStore,
    "all": lambda inner: MeteredStore(RetryStore(PrefixStore(FaultStore(inner), "a"), RetryOptions())),
}


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore.fresh()


@pytest.mark.parametrize("wrapper", WRAPPERS)
class TestWrappedStores(StoreContract):
    race_rounds = 1

    @pytest.fixture
    def store(self, wrapper: str, memory: MemoryStore) -> Store:
        return WRAPPERS[wrapper](memory)

    def _find(self, store: Store, key: str) -> tuple[Store, str]:
        while isinstance(store, DelegatingStore):
            key = store._full(key) if isinstance(store, PrefixStore) else key
            store = store.inner
        return store, key

    def raw_read(self, store: Store, key: str) -> bytes | None:
        inner, full = self._find(store, key)
        assert isinstance(inner, MemoryStore)
        found = inner._bucket.objects.get(full)
        return None if found is None else found[0]

    def raw_write(self, store: Store, key: str, data: bytes) -> None:
        inner, full = self._find(store, key.rstrip("/"))
        assert isinstance(inner, MemoryStore)
        marker = "/" if key.endswith("/") else ""
        inner._bucket.objects[full + marker] = data, inner._bucket.now()


class TestRetries:
    """With a clock that only waiting moves."""

    OPTIONS = RetryOptions(max_attempts=4, initial_seconds=1.0, max_seconds=3.0, total_seconds=100.0)

    def open(self, inner: Store, options: RetryOptions = OPTIONS) -> tuple[RetryStore, list[float]]:
        waits: list[float] = []
        store = RetryStore(inner, options, sleep=waits.append, now=lambda: sum(waits))
        return store, waits

    @pytest.mark.parametrize("error", [StoreUnavailableError("busy"), StoreTimeoutError("late")])
    def test_a_transient_failure_is_tried_again_until_it_passes(
        self, memory: MemoryStore, error: StoreError, caplog: pytest.LogCaptureFixture
    ) -> None:
        memory.write("k", DATA)
        meter = StoreMeter()
        faults = FaultStore(memory, before=lambda call: _raise(error) if call.number < 4 else None)
        store = RetryStore(faults, self.OPTIONS, meter=meter, sleep=lambda _: None)
        with caplog.at_level(logging.WARNING, "remote_ckpt"):
            assert store.read("k") == DATA
        assert [call.operation for call in faults.calls] == ["read"] * 4
        assert meter.snapshot().retries == 3
        assert len(caplog.records) == 3
        assert "read of k: try 2 after" in caplog.text

    def test_the_last_failure_is_raised_when_the_tries_are_used_up(self, memory: MemoryStore) -> None:
        faults = FaultStore(memory, before=lambda call: _raise(StoreUnavailableError(str(call.number))))
        store, waits = self.open(faults)
        with pytest.raises(StoreUnavailableError, match="4"):
            store.list()
        assert (len(faults.calls), len(waits)) == (4, 3)

    def test_waits_grow_up_to_their_limit_and_vary(
        self, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits: list[tuple[float, float]] = []

        def longest(low: float, high: float) -> float:
            limits.append((low, high))
            return high

        monkeypatch.setattr("random.uniform", longest)
        store, waits = self.open(FaultStore(memory, before=lambda call: _raise(StoreUnavailableError())))
        with pytest.raises(StoreUnavailableError):
            store.read("k")
        assert limits == [(0, 1.0), (0, 2.0), (0, 3.0)]
        assert waits == [1.0, 2.0, 3.0]

    def test_the_deadline_ends_the_tries(self, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("random.uniform", lambda low, high: high)
        options = RetryOptions(max_attempts=99, initial_seconds=1.0, max_seconds=2.0, total_seconds=6.0)
        faults = FaultStore(memory, before=lambda call: _raise(StoreUnavailableError()))
        store, waits = self.open(faults, options)
        with pytest.raises(StoreUnavailableError):
            store.read("k")
        assert waits == [1.0, 2.0, 2.0]

    @pytest.mark.parametrize(
        "error", [AccessDeniedError("no"), ObjectNotFoundError("gone"), StoreError("odd"), ValueError("bug")]
    )
    def test_other_failures_are_raised_at_once(self, memory: MemoryStore, error: Exception) -> None:
        faults = FaultStore(memory, before=raise_at(1, error))
        store, waits = self.open(faults)
        with pytest.raises(type(error)):
            store.read("k")
        assert (len(faults.calls), waits) == (1, [])

    def test_a_create_is_never_repeated(self, memory: MemoryStore) -> None:
        faults = FaultStore(memory, after=raise_at(1, StoreTimeoutError("answer lost")))
        store, waits = self.open(faults)
        with pytest.raises(StoreTimeoutError):
            store.create("k", DATA)
        assert (len(faults.calls), waits, memory.read("k")) == (1, [], DATA)

    def test_every_try_of_a_stream_begins_at_its_beginning(self, memory: MemoryStore) -> None:
        starts: list[int] = []

        def source() -> Iterator[Buffer]:
            starts.append(len(starts))
            yield DATA[:500]
            yield DATA[500:]

        faults = FaultStore(memory, after=raise_at(1, StoreTimeoutError("answer lost")))
        store, waits = self.open(faults)
        store.write_stream("k", source, size_bytes=len(DATA), part_bytes=1, concurrency=1)
        assert (starts, len(waits), memory.read("k")) == ([0, 1], 1, DATA)

    def test_a_streams_own_failure_is_not_the_stores(self, memory: MemoryStore) -> None:
        cause = StoreUnavailableError("of the store that is copied from")

        def source() -> Iterator[Buffer]:
            yield DATA
            raise cause

        store, waits = self.open(memory)
        with pytest.raises(StoreUnavailableError) as caught:
            store.write_stream("k", source, size_bytes=5000, part_bytes=1, concurrency=1)
        assert caught.value is cause
        assert waits == []

    def test_only_keys_that_failed_transiently_are_deleted_again(self, memory: MemoryStore) -> None:
        asked: list[Sequence[str]] = []

        class Flaky(DelegatingStore):
            def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
                asked.append(list(keys))
                first = {"busy": StoreUnavailableError("busy"), "locked": AccessDeniedError("locked")}
                failing = first if len(asked) == 1 else {}
                super().delete([key for key in keys if key not in failing])
                return [DeleteFailure(key, error) for key, error in failing.items() if key in keys]

        for key in ("busy", "locked", "fine"):
            memory.write(key, DATA)
        store, waits = self.open(Flaky(memory))
        failures = store.delete(["busy", "locked", "fine"])
        assert asked == [["busy", "locked", "fine"], ["busy"]]
        assert [(one.key, type(one.error)) for one in failures] == [("locked", AccessDeniedError)]
        assert len(waits) == 1

    def test_keys_that_stay_busy_are_reported(self, memory: MemoryStore) -> None:
        class Busy(DelegatingStore):
            def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
                return [DeleteFailure(key, StoreUnavailableError("busy")) for key in keys]

        store, waits = self.open(Busy(memory))
        assert [one.key for one in store.delete(["a", "b"])] == ["a", "b"]
        assert len(waits) == 3

    def test_a_scope_retries_too(self, memory: MemoryStore) -> None:
        faults = FaultStore(memory, before=raise_at(1, StoreUnavailableError()))
        store, waits = self.open(faults)
        store.scope("1").write("k", DATA)
        assert (memory.read("1/k"), len(waits)) == (DATA, 1)


class TestMeter:
    def test_requests_and_bytes_of_a_store_and_its_scopes_are_counted(self, memory: MemoryStore) -> None:
        store = MeteredStore(memory)
        scope = store.scope("1")
        scope.write("w", DATA)
        scope.write_stream("s", lambda: iter([DATA]), size_bytes=len(DATA), part_bytes=1, concurrency=1)
        store.create("c", b"12345")
        store.read("c")
        scope.read_range("w", 0, 10)
        scope.read_range_into("w", 0, memoryview(bytearray(20)))
        store.list()
        counted = store.snapshot()
        assert counted.requests == {
            "write": 1, "write_stream": 1, "create": 1, "read": 1, "read_range": 1, "read_range_into": 1,
            "list": 1,
        }  # fmt: skip
        assert (counted.uploaded_bytes, counted.downloaded_bytes) == (2 * len(DATA) + 5, 35)

    def test_a_failed_request_is_counted_without_bytes(self, memory: MemoryStore) -> None:
        memory.write("k", DATA)
        store = MeteredStore(memory)
        with pytest.raises(ObjectExistsError):
            store.create("k", DATA)
        with pytest.raises(ObjectNotFoundError):
            store.read("absent")
        counted = store.snapshot()
        assert counted.requests == {"create": 1, "read": 1}
        assert (counted.uploaded_bytes, counted.downloaded_bytes) == (0, 0)

    def test_a_snapshot_does_not_change_afterwards(self, memory: MemoryStore) -> None:
        store = MeteredStore(memory)
        store.write("a", DATA)
        before = store.snapshot()
        store.write("b", DATA)
        assert before.requests == {"write": 1}


class TestReadOnly:
    CHANGES: dict[str, Callable[[Store], object]] = {  # noqa: RUF012
        "write": lambda store: store.write("k", b"new"),
        "write_stream": lambda store: store.write_stream(
            "k", lambda: iter([b"new"]), size_bytes=3, part_bytes=1, concurrency=1
        ),
        "create": lambda store: store.create("new", b"new"),
        "delete": lambda store: store.delete(["k"]),
        "copy": lambda store: store.copy("k", "new"),
        "remove_folder": lambda store: store.remove_folder(),
    }

    @pytest.mark.parametrize("verb", CHANGES)
    def test_every_change_is_refused(self, tmp_path: Path, verb: str) -> None:
        inner = LocalStore(tmp_path)
        inner.write("1/k", DATA)
        for store in (ReadOnlyStore(inner.scope("1")), ReadOnlyStore(inner).scope("1", create=True)):
            with pytest.raises(AccessDeniedError, match="reading only") as caught:
                self.CHANGES[verb](store)
            assert caught.value.operation == verb
        assert [info.key for info in inner.list()] == ["1/k"]
        assert inner.read("1/k") == DATA

    def test_reading_works_and_no_folder_is_made(self, tmp_path: Path) -> None:
        inner = LocalStore(tmp_path)
        inner.write("1/k", DATA)
        store = ReadOnlyStore(inner)
        assert (store.scope("1").read("k"), store.list()) == (DATA, inner.list())
        with pytest.raises(FileNotFoundError):
            store.scope("2", create=True)
        assert [path.name for path in tmp_path.iterdir()] == ["1"]


class TestFaults:
    def test_calls_are_numbered_over_scopes(self, memory: MemoryStore) -> None:
        store = FaultStore(memory)
        store.write("a", DATA)
        store.scope("1").create("b", DATA)
        store.list("1/")
        url = memory.url
        assert store.calls == [
            StoreCall(1, "write", "a", url),
            StoreCall(2, "create", "b", f"{url}/1"),
            StoreCall(3, "list", "1/", url),
        ]

    def test_a_failure_before_does_nothing_and_one_after_loses_the_answer(self, memory: MemoryStore) -> None:
        error = StoreTimeoutError("late")
        with pytest.raises(StoreTimeoutError):
            FaultStore(memory, before=raise_at(1, error)).write("before", DATA)
        with pytest.raises(StoreTimeoutError):
            FaultStore(memory, after=raise_at(1, error)).write("after", DATA)
        assert [info.key for info in memory.list()] == ["after"]

    @pytest.mark.parametrize(("is_done", "keys"), [(False, ["1"]), (True, ["1", "2"])])
    def test_after_a_crash_nothing_more_happens(
        self, memory: MemoryStore, is_done: bool, keys: list[str]
    ) -> None:
        store = FaultStore.crashing(memory, 2, is_done=is_done)
        store.write("1", DATA)
        for key in ("2", "3"):
            with pytest.raises(SimulatedCrash):
                store.write(key, DATA)
        with pytest.raises(SimulatedCrash):
            store.scope("s").list()
        assert [info.key for info in memory.list()] == keys

    def test_one_bit_of_a_wanted_read_is_flipped(self, memory: MemoryStore) -> None:
        memory.write("bad", DATA)
        memory.write("good", DATA)
        store = FaultStore(memory, after=corrupt_reads(lambda call: call.key == "bad"))
        out = bytearray(len(DATA))
        store.read_range_into("bad", 0, memoryview(out))
        for read in (store.read("bad"), bytes(store.read_range("bad", 0, len(DATA))), bytes(out)):
            assert [a ^ b for a, b in zip(read, DATA, strict=True) if a != b] == [1]
        assert store.read("good") == DATA


class TestOpenStore:
    def _driver(self, *args: Any, **kwargs: Any) -> Store:
        store = open_store(*args, **kwargs)
        assert isinstance(store.inner, RetryStore)
        return store.inner.inner

    def test_a_path_opens_a_local_store_and_makes_nothing_yet(self, tmp_path: Path) -> None:
        for path in (tmp_path / "a", str(tmp_path / "a"), f"file://{tmp_path}/a"):
            driver = self._driver(path)
            assert isinstance(driver, LocalStore)
            assert driver.url == str(tmp_path / "a")
        assert list(tmp_path.iterdir()) == []

    def test_a_memory_url_opens_a_memory_store(self) -> None:
        assert isinstance(self._driver("memory://opened"), MemoryStore)
        assert self._driver("memory://opened/run/ckpt").url == "memory://opened/run/ckpt"

    def test_retries_of_a_store_and_its_scopes_are_counted(self, memory: MemoryStore) -> None:
        store = open_store("memory://counted")
        assert isinstance(store.inner, RetryStore)
        store.inner.inner = FaultStore(memory, before=raise_at(1, StoreUnavailableError()))
        store.inner._sleep = lambda seconds: None
        store.scope("1").write("k", DATA)
        assert (store.snapshot().retries, store.snapshot().requests) == (1, {"write": 1})

    def test_an_operation_without_a_key_is_logged_without_one(
        self, memory: MemoryStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        failing = FaultStore(memory, before=raise_at(1, StoreUnavailableError("503")))
        RetryStore(failing, RetryOptions(), sleep=lambda _: None).delete(["k"])
        assert [record.message for record in caplog.records] == ["delete: try 2 after: 503"]

    @pytest.mark.parametrize("location", ["/data/run", "memory://name", "sftp://host/run"])
    def test_obstore_is_refused_where_it_does_not_serve(self, location: str) -> None:
        with pytest.raises(ConfigError, match="obstore serves s3, gs and az"):
            open_store(location, transport="obstore")

    def test_an_unknown_transport_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="unknown transport 'ftp'"):
            open_store("s3://bucket/run", transport="ftp")


def _raise(error: BaseException) -> None:
    raise error
