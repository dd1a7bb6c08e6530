"""Uploads and planned reads over the memory store."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from remote_ckpt.errors import IntegrityError, ObjectNotFoundError
from remote_ckpt.options import MiB, TransferOptions
from remote_ckpt.store.base import Buffer
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.transfer import (
    ByteBudget,
    Direct,
    ObjectUpload,
    Wanted,
    coalesce,
    fetch_all,
    plan_segments,
    upload_objects,
)

OPTIONS = TransferOptions(budget_bytes=10 * MiB, part_bytes=5 * MiB, concurrency=4, merge_gap_bytes=10)


def ignore(_: memoryview) -> None:
    """A sink for plans that are not run."""


def want(key: str, offset: int, length: int) -> Wanted:
    return Wanted(key, offset, length, ignore)


class CountingStore(MemoryStore):
    """Counts requests, and can flip a byte of the first ``flips`` answers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reads: list[tuple[str, int, int]] = []
        self.flips = 0

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> bytes:
        self.reads.append((key, offset_bytes, length_bytes))
        data = bytearray(super().read_range(key, offset_bytes, length_bytes))
        if self.flips:
            self.flips -= 1
            data[0] ^= 1
        return bytes(data)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore(f"transfer-{random.random()}")


def test_small_chunks_are_joined_and_large_ones_pass_uncopied() -> None:
    large = bytes(20)
    joined = list(coalesce([b"a", b"b", large, b"c"], at_least_bytes=10))
    assert joined == [b"ab", large, b"c"]
    assert joined[1] is large


def test_near_ranges_of_one_object_are_one_request_and_far_ones_are_not() -> None:
    plan = plan_segments(
        [want("b", 0, 5), want("a", 100, 5), want("a", 0, 5), want("a", 10, 5), want("a", 3, 1)],
        merge_gap_bytes=5,
        max_bytes=1000,
    )
    assert [(one.key, one.offset_bytes, one.length_bytes, len(one.wanted)) for one in plan] == [
        ("a", 0, 15, 3),
        ("a", 100, 5, 1),
        ("b", 0, 5, 1),
    ]


def test_a_request_ends_before_it_grows_too_long_but_one_range_is_never_cut() -> None:
    plan = plan_segments(
        [want("a", 0, 6), want("a", 6, 6), want("a", 12, 50)], merge_gap_bytes=5, max_bytes=10
    )
    assert [(one.offset_bytes, one.length_bytes) for one in plan] == [(0, 6), (6, 6), (12, 50)]


def test_many_small_ranges_take_few_requests_and_reach_their_sinks(store: CountingStore) -> None:
    data = random.Random(0).randbytes(100_000)
    store.write("a", data)
    received: dict[int, bytes] = {}
    wanted = [
        Wanted("a", at, 7, lambda part, at=at: received.__setitem__(at, bytes(part)))  # type: ignore[misc]
        for at in range(0, 99_000, 10)
    ]
    fetch_all(store, wanted=wanted, direct=[], options=OPTIONS)
    assert received == {at: data[at : at + 7] for at in range(0, 99_000, 10)}
    assert len(store.reads) == 1


def test_a_direct_range_fills_its_destination(store: CountingStore) -> None:
    store.write("a", bytes(range(200)))
    out = bytearray(50)
    checked: list[bool] = []
    fetch_all(
        store,
        wanted=[],
        direct=[Direct("a", 100, memoryview(out), lambda: checked.append(True))],
        options=OPTIONS,
    )
    assert bytes(out) == bytes(range(100, 150))
    assert checked == [True]


@pytest.mark.parametrize(("flips", "is_fatal"), [(1, False), (2, True)])
def test_damage_on_the_way_is_fetched_again_once_and_damage_that_stays_raises(
    store: CountingStore, flips: int, is_fatal: bool
) -> None:
    store.write("a", b"good")
    store.flips = flips
    received = []

    def sink(data: memoryview) -> None:
        if bytes(data) != b"good":
            raise IntegrityError("flipped")
        received.append(bytes(data))

    wanted = [Wanted("a", 0, 4, sink)]
    if is_fatal:
        with pytest.raises(IntegrityError):
            fetch_all(store, wanted=wanted, direct=[], options=OPTIONS)
    else:
        fetch_all(store, wanted=wanted, direct=[], options=OPTIONS)
        assert received == [b"good"]


def test_a_missing_object_raises_and_is_not_asked_for_twice(store: CountingStore) -> None:
    with pytest.raises(ObjectNotFoundError):
        fetch_all(store, wanted=[want("absent", 0, 4)], direct=[], options=OPTIONS)
    assert len(store.reads) == 1


def test_objects_are_written_and_reported(store: CountingStore) -> None:
    uploads = [ObjectUpload(name, 2, lambda name=name: iter([name.encode() * 2])) for name in "abc"]  # type: ignore[misc]
    written, error = upload_objects(store, uploads, options=OPTIONS)
    assert error is None
    assert sorted(written) == ["a", "b", "c"]
    assert [store.read(name) for name in "abc"] == [b"aa", b"bb", b"cc"]


def test_a_failing_source_stops_the_others_and_is_the_error_returned(store: CountingStore) -> None:
    reached = threading.Event()

    def failing() -> Iterator[Buffer]:
        yield bytes(2 * MiB)
        reached.wait()
        raise OSError("broken source")

    def endless() -> Iterator[Buffer]:
        for _ in range(10_000):
            reached.set()
            yield bytes(2 * MiB)

    uploads = [ObjectUpload("bad", 4 * MiB, failing), ObjectUpload("long", 20_000 * MiB, endless)]
    _, error = upload_objects(store, uploads, options=OPTIONS)
    assert isinstance(error, OSError)
    assert str(error) == "broken source"
    assert store.list() == []


def test_the_budget_lets_a_range_above_it_through_alone() -> None:
    budget = ByteBudget(10)
    amount = budget.acquire(100)
    assert amount == 10
    waiting = threading.Thread(target=lambda: budget.release(budget.acquire(1)))
    waiting.start()
    assert waiting.is_alive()
    budget.release(amount)
    waiting.join(10)
    assert not waiting.is_alive()
