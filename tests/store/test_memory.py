"""The memory store: the contract, and what is its own."""

from __future__ import annotations

from datetime import timedelta

import pytest

from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.testing.contract import DATA, StoreContract


class TestMemoryStore(StoreContract):
    clock_tolerance = timedelta(0)

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore.fresh()

    def raw_read(self, store: Store, key: str) -> bytes | None:
        assert isinstance(store, MemoryStore)
        found = store._bucket.objects.get(key)
        return None if found is None else found[0]

    def raw_write(self, store: Store, key: str, data: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store._bucket.objects[key] = data, store._bucket.now()


def test_stores_of_one_name_share_their_objects() -> None:
    MemoryStore("shared-name").write("run/k", DATA)
    assert MemoryStore("shared-name").read("run/k") == DATA
    assert open_store("memory://shared-name").read("run/k") == DATA
    assert open_store("memory://shared-name/run").read("k") == DATA
    assert MemoryStore("shared-name-2").list() == []


def test_fresh_stores_share_nothing() -> None:
    one, two = MemoryStore.fresh(), MemoryStore.fresh()
    one.write("k", DATA)
    assert two.list() == []


def test_times_never_repeat_nor_go_back() -> None:
    store = MemoryStore.fresh()
    times = []
    for number in range(50):
        store.write(str(number), DATA)
        times += [store.info(str(number)).modified_at, store.clock()]
    assert times == sorted(set(times))


def test_a_stored_object_does_not_follow_changes_of_the_callers_buffer() -> None:
    store = MemoryStore.fresh()
    buffer = bytearray(DATA)
    store.write("w", buffer)
    store.create("c", buffer)
    store.write_stream("s", lambda: iter([buffer]), size_bytes=len(buffer), part_bytes=1, concurrency=1)
    buffer[:] = bytes(len(buffer))
    assert {store.read("w"), store.read("c"), store.read("s")} == {DATA}
