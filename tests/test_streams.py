"""Streaming between stores: within the budget, read ahead, stopped soon, and checked in time."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import pytest

from remote_ckpt.checksum import combine_crc32c, crc32c
from remote_ckpt.errors import IntegrityError, StoreUnavailableError
from remote_ckpt.moves import Move, begin_progress, run_all
from remote_ckpt.options import GiB, MiB, TransferOptions
from remote_ckpt.progress import Progress, ProgressCounter
from remote_ckpt.store.base import Buffer, ChunkSource
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.streams import StreamMover, plan_window
from remote_ckpt.transfer import Cancelled

SMALL_BUDGET = TransferOptions(budget_bytes=64 * MiB)


class Tracked(bytearray):
    """Bytes whose end is noticed."""


class Zeros(DelegatingStore):
    """A source whose objects are zeros without end; knows how many of the bytes it gave are still held."""

    def __init__(self, on_read: Callable[[str, int], None] = lambda key, offset: None) -> None:
        super().__init__(MemoryStore.fresh())
        self.held_bytes = self.peak_bytes = self.read_count = 0
        self._on_read = on_read
        self._lock = threading.Lock()

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> Buffer:
        self._on_read(key, offset_bytes)
        data = Tracked(length_bytes)
        weakref.finalize(data, self._hold, -length_bytes)
        self._hold(length_bytes)
        self.read_count += 1
        return memoryview(data)

    def _hold(self, length_bytes: int) -> None:
        with self._lock:
            self.held_bytes += length_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class Sink(DelegatingStore):
    """A target that forgets what it gets, and on the way holds parts as obstore does.

    That holds as many as may be sent at once while it asks for the next one.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore.fresh())
        self.complete: list[str] = []

    def write_stream(
        self, key: str, source: ChunkSource, *, size_bytes: int, part_bytes: int, concurrency: int
    ) -> None:
        sending: deque[Buffer] = deque()
        sum_bytes = 0
        for chunk in source():
            while len(sending) >= concurrency:
                sending.popleft()
            sending.append(chunk)
            sum_bytes += len(chunk)
            del chunk
        assert sum_bytes == size_bytes
        self.complete.append(key)


def copy(
    origin: DelegatingStore, target: DelegatingStore, moves: list[Move], options: TransferOptions
) -> None:
    StreamMover(origin, target, options).move(moves, ProgressCounter("copy", None))


def move(key: str, size_bytes: int, crc: int | None = None) -> Move:
    return Move(key, key, size_bytes, crc)


def meeting_of(count: int) -> Callable[[str, int], None]:
    """A read that goes on once so many run at the same time."""
    barrier = threading.Barrier(count, timeout=20)

    def meet(key: str, offset: int) -> None:
        barrier.wait()

    return meet


def crc_of_zeros(size_bytes: int) -> int:
    half = size_bytes // 2
    if size_bytes <= MiB:
        return crc32c(bytes(size_bytes))
    return combine_crc32c(crc_of_zeros(size_bytes - half), crc_of_zeros(half), half)


class TestBudget:
    def test_a_large_object_is_never_held_whole(self) -> None:
        origin, target = Zeros(), Sink()
        copy(origin, target, [move("k", 1 * GiB, crc_of_zeros(1 * GiB))], SMALL_BUDGET)
        assert target.complete == ["k"]
        assert origin.peak_bytes <= 64 * MiB
        assert origin.held_bytes == 0

    def test_many_objects_share_it(self) -> None:
        origin, target = Zeros(), Sink()
        sizes = [100 * MiB, 33 * MiB, 32 * MiB, MiB, 7] * 4
        copy(origin, target, [move(f"k{n}", size) for n, size in enumerate(sizes)], SMALL_BUDGET)
        assert len(target.complete) == len(sizes)
        assert 64 * MiB >= origin.peak_bytes > 32 * MiB

    @pytest.mark.parametrize(
        ("size_bytes", "large_count", "budget_bytes", "counts"),
        [
            (4 * GiB, 1, 512 * MiB, (8, 8)),  # reads and parts at once
            (4 * GiB, 4, 512 * MiB, (2, 2)),
            (4 * GiB, 100, 512 * MiB, (1, 1)),  # eight of them at once
            (4 * GiB, 1, 64 * MiB, (1, 1)),
            (4 * GiB, 1, 96 * MiB, (2, 1)),
            (4 * GiB, 1, 64 * GiB, (16, 16)),
            (4 * GiB, 8, 64 * GiB, (2, 2)),
        ],
    )
    def test_what_one_object_gets_of_it(
        self, size_bytes: int, large_count: int, budget_bytes: int, counts: tuple[int, int]
    ) -> None:
        options = TransferOptions(budget_bytes=budget_bytes)
        window = plan_window(size_bytes, large_count=large_count, options=options)
        assert (window.read_count, window.upload_count) == counts
        assert window.held_bytes == min(size_bytes, sum(counts) * options.part_bytes)

    def test_a_small_object_takes_no_more_than_its_size(self) -> None:
        assert plan_window(7, large_count=0, options=SMALL_BUDGET).held_bytes == 7

    def test_an_object_whose_parts_must_be_larger_gets_fewer(self) -> None:
        """No more than 10,000 parts: those of a TiB have 111 MiB."""
        window = plan_window(1024 * GiB, large_count=1, options=TransferOptions())
        assert (window.part_bytes, window.upload_count, window.read_count) == (111 * MiB, 2, 9)
        assert window.held_bytes <= 512 * MiB


class TestStreaming:
    def test_one_object_is_read_ahead_at_several_places_at_once(self) -> None:
        origin = Zeros(meeting_of(4))
        options = TransferOptions(budget_bytes=80 * MiB, part_bytes=10 * MiB)
        copy(origin, Sink(), [move("k", 80 * MiB)], options)
        assert origin.read_count == 8

    def test_several_objects_are_copied_at_once(self) -> None:
        origin, target = Zeros(meeting_of(4)), Sink()
        copy(origin, target, [move(f"k{n}", 10) for n in range(4)], TransferOptions())
        assert sorted(target.complete) == ["k0", "k1", "k2", "k3"]

    def test_a_failure_stops_an_object_that_is_under_way(self) -> None:
        is_under_way = threading.Event()

        def read(key: str, offset: int) -> None:
            if key == "good":
                is_under_way.set()
            elif is_under_way.wait(20):
                raise StoreUnavailableError("503")

        target = Sink()
        moves = [move("good", 40 * GiB), move("bad", 40 * GiB)]
        with pytest.raises(StoreUnavailableError, match="503"):
            copy(Zeros(read), target, moves, TransferOptions(budget_bytes=64 * MiB, part_bytes=5 * MiB))
        assert target.complete == []

    def test_what_is_read_again_is_told_once(self) -> None:
        """A store that fails is given the object from the beginning."""

        class Restarting(Sink):
            def write_stream(self, key: str, source: ChunkSource, **sizes: int) -> None:
                super().write_stream(key, source, **sizes)
                super().write_stream(key, source, **sizes)

        told: list[Progress] = []
        counter = ProgressCounter("copy", told.append)
        mover = StreamMover(Zeros(), Restarting(), TransferOptions(part_bytes=5 * MiB))
        mover.move([move("k", 15 * MiB)], counter)
        assert [each.done_bytes for each in told] == [0, 5 * MiB, 10 * MiB, 15 * MiB, 15 * MiB]
        assert told[-1].done_objects == 1

    def test_a_wrong_checksum_shows_before_the_object_is_complete(self) -> None:
        target = Sink()
        with pytest.raises(IntegrityError, match="k differs from what was saved"):
            copy(Zeros(), target, [move("k", 100, crc=1)], TransferOptions())
        assert target.complete == []

    def test_what_is_checked_in_the_end_comes_before_the_object_is_complete(self) -> None:
        target = Sink()

        def check() -> None:
            raise StoreUnavailableError("changed")

        mover = StreamMover(Zeros(), target, TransferOptions(), before_end=check)
        with pytest.raises(StoreUnavailableError, match="changed"):
            mover.move([move("k", 100)], ProgressCounter("copy", None))
        assert target.complete == []


class TestRunAll:
    def test_the_first_failure_is_raised_and_nothing_new_is_begun(self) -> None:
        done = []

        def call(number: int) -> None:
            if number == 2:
                raise StoreUnavailableError("two")
            done.append(number)

        with pytest.raises(StoreUnavailableError, match="two"):
            run_all(call, range(100), concurrency=1)
        assert done == [0, 1]

    def test_the_failure_is_told_and_not_that_others_were_stopped(self) -> None:
        is_over, both = threading.Event(), threading.Barrier(2, timeout=20)

        def call(number: int) -> None:
            both.wait()
            if number == 1:
                raise StoreUnavailableError("one")
            assert is_over.wait(20)
            raise Cancelled

        with pytest.raises(StoreUnavailableError, match="one"):
            run_all(call, range(2), concurrency=2, cancelled=is_over)

    def test_nothing_to_do_is_done(self) -> None:
        run_all(pytest.fail, [], concurrency=4)


def test_progress_begins_with_what_is_there() -> None:
    told: list[Progress] = []
    moves = [move("a", 3), move("b", 4)]
    begin_progress(moves, moves[1:], told.append).advance(done_bytes=4, done_objects=1)
    assert [(each.done_bytes, each.done_objects, each.total_bytes) for each in told] == [
        (0, 0, 7),
        (3, 1, 7),
        (7, 2, 7),
    ]
