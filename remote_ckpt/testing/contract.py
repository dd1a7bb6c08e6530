"""What every store keeps, as a pytest class: one test for each sentence of :mod:`remote_ckpt.store.base`.

Subclass it, give a ``store`` fixture and two raw hooks that bypass the code under test::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self): ...

        def raw_read(self, store, key): ...

        def raw_write(self, store, key, data): ...

In your ``conftest.py``, before the first import of this module, say
``pytest.register_assert_rewrite("remote_ckpt.testing.contract")`` to see values in failures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta, timezone
from typing import ClassVar

import pytest

from remote_ckpt.errors import ConfigError, IntegrityError, ObjectExistsError, ObjectNotFoundError
from remote_ckpt.store.base import Buffer, CreateOnly, Leftover, Store

DATA = bytes(range(256)) * 4
ALLOWED = "ABCXYZabcxyz0189._=-"


READS: dict[str, Callable[[Store, str], object]] = {
    "read": lambda store, key: store.read(key),
    "read_range": lambda store, key: store.read_range(key, 0, 1),
    "read_range_into": lambda store, key: store.read_range_into(key, 0, memoryview(bytearray(1))),
    "info": lambda store, key: store.info(key),
    "copy": lambda store, key: store.copy(key, "target"),
}
CHANGES: dict[str, Callable[[Store, str], object]] = {
    "write": lambda store, key: store.write(key, DATA),
    "create": lambda store, key: store.create(key, DATA),
    "copy": lambda store, key: store.copy("a", key),
    "delete": lambda store, key: store.delete([key]),
}


class SourceError(Exception):
    """What a failing source of chunks raises in these tests."""


class StoreContract:
    """The contract. Class attributes say how much to try.

    Attributes:
        stream_bytes: Size of streamed objects; more than two parts for a store with multipart uploads.
        part_bytes: Part size that goes with it.
        keys_listed: Objects in the large listing; more than a page where the store has pages.
        race_rounds: Rounds of creates that race.
        racers: Threads in each.
        clock_tolerance: How far the store's clock may differ from its stamps.
        secrets: Strings that must not be seen in ``url`` and ``repr``.
    """

    stream_bytes: ClassVar[int] = 300_000
    part_bytes: ClassVar[int] = 100_000
    keys_listed: ClassVar[int] = 60
    race_rounds: ClassVar[int] = 6
    racers: ClassVar[int] = 16
    clock_tolerance: ClassVar[timedelta] = timedelta(seconds=2)
    secrets: ClassVar[tuple[str, ...]] = ()

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Yield an empty store."""
        raise NotImplementedError("a subclass gives this fixture")

    def raw_read(self, store: Store, key: str) -> bytes | None:
        """Return an object's bytes without the code under test; None if there is none."""
        raise NotImplementedError

    def raw_write(self, store: Store, key: str, data: bytes) -> None:
        """Write an object without the code under test."""
        raise NotImplementedError

    def raw_mark_folder(self, store: Store, key: str) -> None:
        """Leave what consoles and other tools leave for an empty folder: a zero-byte ``key/``."""
        self.raw_write(store, key + "/", b"")

    def raw_leave(self, store: Store, key: str) -> bool:
        """Leave what a writer of ``key`` leaves that is killed half-way; false where that is nothing."""
        return False

    # --- whole objects -------------------------------------------------------------------------

    def test_a_written_object_is_stored_under_its_key(self, store: Store) -> None:
        store.write("a/b.bin", DATA)
        assert self.raw_read(store, "a/b.bin") == DATA

    def test_an_object_written_by_others_is_read(self, store: Store) -> None:
        self.raw_write(store, "a/b.bin", DATA)
        assert store.read("a/b.bin") == DATA

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_every_kind_of_buffer_is_written(self, store: Store, kind: Callable[[bytes], Buffer]) -> None:
        store.write("w", kind(DATA))
        store.create("c", kind(DATA))
        assert self.raw_read(store, "w") == self.raw_read(store, "c") == DATA

    def test_a_write_replaces_what_is_there(self, store: Store) -> None:
        self.raw_write(store, "k", b"old and longer")
        store.write("k", b"new")
        assert store.read("k") == self.raw_read(store, "k") == b"new"

    def test_every_call_asks_the_store(self, store: Store) -> None:
        store.write("k", b"1")
        assert (store.read("k"), [info.size_bytes for info in store.list()]) == (b"1", [1])
        self.raw_write(store, "k", b"22")
        self.raw_write(store, "l", b"333")
        assert (store.read("k"), [info.size_bytes for info in store.list()]) == (b"22", [2, 3])
        assert store.info("k").size_bytes == 2

    def test_a_reader_sees_one_of_two_values_while_they_replace_each_other(self, store: Store) -> None:
        values = [bytes([number]) * 5000 for number in range(2)]
        store.write("k", values[0])
        with ThreadPoolExecutor(3) as pool:
            writes = [pool.submit(store.write, "k", values[number % 2]) for number in range(20)]
            seen = {store.read("k") for _ in range(40)}
            for write in writes:
                write.result()
        assert seen <= set(values)

    @pytest.mark.parametrize(
        "key",
        [ALLOWED, ".metadata", "x" * 255, "manifest.000001.json", "__0_0.distcp", "a/b/c/d/e", "k=1/v=2"],
    )
    def test_every_allowed_key_works_with_every_verb(self, store: Store, key: str) -> None:
        store.create(key, b"1")
        store.write(key, DATA)
        assert [info.key for info in store.list()] == [key]
        assert bytes(store.read_range(key, 1, 2)) == DATA[1:3]
        store.copy(key, f"copied/{key}")
        assert self.raw_read(store, key) == store.read(f"copied/{key}") == DATA
        assert not store.delete([key, f"copied/{key}"])
        assert store.list() == []

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a/."])
    def test_a_malformed_key_is_refused_before_anything_happens(self, store: Store, key: str) -> None:
        store.write("a", DATA)
        for call in (*READS.values(), *CHANGES.values()):
            with pytest.raises(ConfigError):
                call(store, key)
        assert [info.key for info in store.list()] == ["a"]

    def test_an_empty_object_is_refused(self, store: Store) -> None:
        for write in (store.write, store.create):
            with pytest.raises(ConfigError):
                write("k", b"")
        assert self.raw_read(store, "k") is None

    # --- absence -------------------------------------------------------------------------------

    @pytest.mark.parametrize("verb", READS)
    @pytest.mark.parametrize("key", ["absent", "a", "a/c", "a/b/c"])
    def test_an_absent_object_is_reported_with_its_key(self, store: Store, verb: str, key: str) -> None:
        self.raw_write(store, "a/b", DATA)
        with pytest.raises(ObjectNotFoundError) as caught:
            READS[verb](store, key)
        assert str(caught.value.key).endswith(key)
        assert self.raw_read(store, "target") is None

    # --- ranges --------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("offset", "length"), [(0, 1), (0, len(DATA)), (5, 100), (len(DATA) - 1, 1), (1, len(DATA) - 1)]
    )
    def test_a_range_is_exact(self, store: Store, offset: int, length: int) -> None:
        self.raw_write(store, "k", DATA)
        out = bytearray(b"\xaa" * (length + 2))
        store.read_range_into("k", offset, memoryview(out)[1:-1])
        expected = DATA[offset : offset + length]
        assert bytes(store.read_range("k", offset, length)) == expected
        assert bytes(out) == b"\xaa" + expected + b"\xaa"

    @pytest.mark.parametrize(
        ("offset", "length"), [(len(DATA) - 1, 2), (0, len(DATA) + 1), (len(DATA), 1), (len(DATA) + 9, 3)]
    )
    def test_a_range_past_the_end_is_an_integrity_error(self, store: Store, offset: int, length: int) -> None:
        self.raw_write(store, "k", DATA)
        with pytest.raises(IntegrityError):
            store.read_range("k", offset, length)
        with pytest.raises(IntegrityError):
            store.read_range_into("k", offset, memoryview(bytearray(length)))

    # --- streams -------------------------------------------------------------------------------

    def _chunks(self, chunk_bytes: int = 77_777) -> Iterator[bytes]:
        pattern = bytes(range(251)) * (chunk_bytes // 251 + 2)
        for start in range(0, self.stream_bytes, chunk_bytes):
            length = min(chunk_bytes, self.stream_bytes - start)
            yield pattern[start % 251 : start % 251 + length]

    def _stream(self, store: Store, source: Callable[[], Iterator[Buffer]], size_bytes: int) -> None:
        store.write_stream("s/k", source, size_bytes=size_bytes, part_bytes=self.part_bytes, concurrency=4)

    def test_a_stream_is_stored_whole(self, store: Store) -> None:
        self._stream(store, self._chunks, self.stream_bytes)
        expected = b"".join(self._chunks())
        assert len(expected) == self.stream_bytes
        assert self.raw_read(store, "s/k") == expected
        assert store.info("s/k").size_bytes == self.stream_bytes

    def test_a_stream_of_one_small_chunk_is_stored(self, store: Store) -> None:
        self._stream(store, lambda: iter([memoryview(DATA)]), len(DATA))
        assert self.raw_read(store, "s/k") == DATA

    @pytest.mark.parametrize("has_old_value", [False, True])
    @pytest.mark.parametrize("fails_at", ["first byte", "middle", "after the last byte"])
    def test_a_failing_source_leaves_what_was_there(
        self, store: Store, fails_at: str, has_old_value: bool
    ) -> None:
        cause = SourceError(fails_at)
        chunks = list(self._chunks())
        count = {"first byte": 0, "middle": len(chunks) // 2, "after the last byte": len(chunks)}[fails_at]

        def source() -> Iterator[Buffer]:
            yield from chunks[:count]
            raise cause

        if has_old_value:
            self.raw_write(store, "s/k", b"old")
        with pytest.raises(SourceError) as caught:
            self._stream(store, source, self.stream_bytes)
        assert caught.value is cause
        assert self.raw_read(store, "s/k") == (b"old" if has_old_value else None)
        assert [info.key for info in store.list()] == (["s/k"] if has_old_value else [])

    def test_a_source_error_of_the_operating_system_passes_unchanged(self, store: Store) -> None:
        cause = FileNotFoundError(2, "the shard's own file")

        def source() -> Iterator[Buffer]:
            yield DATA
            raise cause

        with pytest.raises(FileNotFoundError) as caught:
            self._stream(store, source, self.stream_bytes)
        assert caught.value is cause

    @pytest.mark.parametrize("difference", [-1, 1])
    def test_a_stream_of_another_size_is_refused(self, store: Store, difference: int) -> None:
        with pytest.raises(IntegrityError):
            self._stream(store, self._chunks, self.stream_bytes + difference)
        assert self.raw_read(store, "s/k") is None

    # --- create --------------------------------------------------------------------------------

    def test_a_create_writes_a_new_object(self, store: Store) -> None:
        store.create("1/manifest.000001.json", DATA)
        assert self.raw_read(store, "1/manifest.000001.json") == DATA

    def test_a_create_leaves_an_existing_object_alone(self, store: Store) -> None:
        self.raw_write(store, "k", b"first")
        with pytest.raises(ObjectExistsError):
            store.create("k", b"second")
        assert self.raw_read(store, "k") == b"first"
        assert [info.key for info in store.list()] == ["k"]

    def test_a_key_can_be_created_again_after_its_deletion(self, store: Store) -> None:
        store.create("k", b"first")
        store.delete(["k"])
        store.create("k", b"second")
        assert self.raw_read(store, "k") == b"second"

    def test_of_racing_creates_exactly_one_wins_and_its_bytes_are_stored(self, store: Store) -> None:
        if store.capabilities.create_only is CreateOnly.NONE:
            return
        with ThreadPoolExecutor(self.racers) as pool:
            for number in range(self.race_rounds):
                key = f"race/{number}"
                start = threading.Barrier(self.racers)

                def create(racer: int, key: str = key, start: threading.Barrier = start) -> bytes | None:
                    data = f"racer {racer}".encode() * 200
                    start.wait()
                    try:
                        store.create(key, data)
                    except ObjectExistsError:
                        return None
                    return data

                winners = [data for data in pool.map(create, range(self.racers)) if data is not None]
                assert winners == [self.raw_read(store, key)]

    # --- info and listing ----------------------------------------------------------------------

    def test_info_agrees_with_the_listing(self, store: Store) -> None:
        self.raw_write(store, "a/b", DATA)
        info = store.info("a/b")
        assert (info.key, info.size_bytes) == ("a/b", len(DATA))
        assert info.modified_at.tzinfo == timezone.utc
        assert store.list() == [info]

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        listing = store.list_children()
        assert store.list() == []
        assert (listing.objects, listing.prefixes) == ((), ())

    def test_a_listing_is_complete_and_sorted(self, store: Store) -> None:
        keys = sorted(f"{number % 7}/{number}" for number in range(self.keys_listed))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.write(key, key.encode()), reversed(keys)))
        infos = store.list()
        assert [info.key for info in infos] == keys
        assert [info.size_bytes for info in infos] == [len(key) for key in keys]
        assert [info.key for info in store.list("3/")] == [key for key in keys if key.startswith("3/")]

    def test_a_prefix_does_not_match_longer_names(self, store: Store) -> None:
        for key in ("1/a", "10/a", "1.json", "1/sub/b"):
            self.raw_write(store, key, DATA)
        assert [info.key for info in store.list("1/")] == ["1/a", "1/sub/b"]
        children = store.list_children("1/")
        assert [info.key for info in children.objects] == ["1/a"]
        assert children.prefixes == ("sub",)

    def test_children_are_objects_and_names_of_one_level(self, store: Store) -> None:
        for key in ("b", "a", "10/x", "9/x", "9/y/z"):
            self.raw_write(store, key, key.encode())
        children = store.list_children()
        assert [(info.key, info.size_bytes) for info in children.objects] == [("a", 1), ("b", 1)]
        assert children.prefixes == ("10", "9")

    def test_nothing_is_below_an_object_or_an_absent_prefix(self, store: Store) -> None:
        self.raw_write(store, "k", DATA)
        for prefix in ("k/", "absent/", "absent/deeper/"):
            assert store.list(prefix) == []
            assert (store.list_children(prefix).objects, store.list_children(prefix).prefixes) == ((), ())

    def test_a_prefix_without_slash_is_refused(self, store: Store) -> None:
        for listing in (store.list, store.list_children):
            with pytest.raises(ConfigError):
                listing("1")

    def test_folder_markers_are_no_objects(self, store: Store) -> None:
        self.raw_write(store, "9/x", DATA)
        self.raw_mark_folder(store, "9")
        self.raw_mark_folder(store, "empty")
        assert [info.key for info in store.list()] == ["9/x"]
        assert [info.key for info in store.list_children("9/").objects] == ["9/x"]
        assert store.list_children("empty/").objects == ()

    def test_the_clock_is_that_of_the_listing(self, store: Store) -> None:
        store.write("before", DATA)
        now = store.clock()
        store.write("after", DATA)
        assert now.tzinfo == timezone.utc
        assert store.info("before").modified_at - self.clock_tolerance <= now
        assert now <= store.info("after").modified_at + self.clock_tolerance
        assert [info.key for info in store.list()] == ["after", "before"]

    # --- delete and copy -----------------------------------------------------------------------

    def test_deleted_objects_are_gone_and_others_stay(self, store: Store) -> None:
        for key in ("1/a", "1/b", "10/a"):
            self.raw_write(store, key, DATA)
        assert not store.delete(["1/a", "1/b"])
        assert (self.raw_read(store, "1/a"), self.raw_read(store, "1/b")) == (None, None)
        assert [info.key for info in store.list()] == ["10/a"]

    def test_deleting_what_is_absent_succeeds(self, store: Store) -> None:
        self.raw_write(store, "a/b", DATA)
        assert not store.delete(["absent", "a/absent", "absent/deeper"])
        assert not store.delete(["a"])
        assert not store.delete([])
        assert self.raw_read(store, "a/b") == DATA

    def test_many_objects_are_deleted_at_once(self, store: Store) -> None:
        keys = [f"d/{number}" for number in range(self.keys_listed)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.write(key, DATA), keys))
        assert not store.delete(keys)
        assert store.list() == []

    def test_a_copy_has_the_bytes_and_outlives_its_source(self, store: Store) -> None:
        self.raw_write(store, "a/source", DATA)
        store.copy("a/source", "b/c/target")
        store.write("a/source", b"changed")
        store.delete(["a/source"])
        assert self.raw_read(store, "b/c/target") == DATA

    def test_a_copy_replaces_its_target_and_can_be_repeated(self, store: Store) -> None:
        self.raw_write(store, "source", DATA)
        self.raw_write(store, "target", b"old")
        store.copy("source", "target")
        store.copy("source", "target")
        assert self.raw_read(store, "target") == self.raw_read(store, "source") == DATA
        assert [info.key for info in store.list()] == ["source", "target"]

    # --- leftovers -----------------------------------------------------------------------------

    def test_objects_are_no_leftovers(self, store: Store) -> None:
        self.raw_write(store, "1/k", DATA)
        self._stream(store, self._chunks, self.stream_bytes)
        store.create("1/manifest.000001.json", DATA)
        store.copy("1/k", "2/k")
        assert list(store.list_leftovers()) == []

    def test_what_a_killed_writer_left_is_listed_as_no_object_and_can_be_removed(self, store: Store) -> None:
        self.raw_write(store, "1/k", DATA)
        count = sum(self.raw_leave(store, key) for key in ("1/d-0123456789abcdef/0.distcp", "10/l"))
        found = store.list_leftovers()
        assert len(found) == count
        assert [leftover.key.split("/")[0] for leftover in found] == ["1", "10"][:count]
        assert all(leftover.modified_at.tzinfo is not None for leftover in found)
        assert [info.key for info in store.list()] == ["1/k"]
        for leftover in (*found, *found):
            store.remove_leftover(leftover)
        assert list(store.list_leftovers()) == []
        assert [info.key for info in store.list()] == ["1/k"]

    def test_a_scope_sees_its_own_leftovers_only(self, store: Store) -> None:
        self.raw_write(store, "1/k", DATA)
        self.raw_write(store, "10/k", DATA)
        has_any = self.raw_leave(store, "1/l")
        others = int(self.raw_leave(store, "10/l"))
        scope = store.scope("1")
        found = scope.list_leftovers()
        assert len(found) == has_any
        assert not [leftover for leftover in found if "/" in leftover.key]
        for leftover in found:
            scope.remove_leftover(leftover)
        assert list(scope.list_leftovers()) == []
        assert [leftover.key[:3] for leftover in store.list_leftovers()] == ["10/"] * others

    def test_what_is_no_leftover_is_not_removed_as_one(self, store: Store) -> None:
        self.raw_write(store, "1/k", DATA)
        info = store.info("1/k")
        leftover = Leftover(key="1/k", kind="file", size_bytes=info.size_bytes, modified_at=info.modified_at)
        with pytest.raises(ConfigError, match="no leftover"):
            store.remove_leftover(leftover)
        assert self.raw_read(store, "1/k") == DATA

    # --- scopes and life -----------------------------------------------------------------------

    def test_a_scope_holds_the_objects_below_its_name(self, store: Store) -> None:
        self.raw_write(store, "1/seen", DATA)
        self.raw_write(store, "10/other", DATA)
        scope = store.scope("1")
        scope.write("t/0.distcp", b"shard")
        assert self.raw_read(store, "1/t/0.distcp") == scope.read("t/0.distcp") == b"shard"
        assert [info.key for info in scope.list()] == ["seen", "t/0.distcp"]
        assert scope.list_children().prefixes == ("t",)
        assert scope.info("seen").key == "seen"
        assert scope.url == f"{store.url.rstrip('/')}/1"

    def test_every_verb_works_within_a_scope(self, store: Store) -> None:
        self.raw_write(store, "other", DATA)
        scope = store.scope("9", create=True)
        scope.create("c", DATA)
        scope.copy("c", "d")
        scope.write_stream(
            "e", lambda: iter([DATA]), size_bytes=len(DATA), part_bytes=self.part_bytes, concurrency=1
        )
        out = bytearray(3)
        scope.read_range_into("d", 1, memoryview(out))
        assert bytes(out) == bytes(scope.read_range("e", 1, 3)) == DATA[1:4]
        assert not scope.delete(["c", "absent"])
        assert [info.key for info in store.list()] == ["9/d", "9/e", "other"]
        with pytest.raises(ObjectExistsError):
            scope.create("d", b"second")
        with pytest.raises(ObjectNotFoundError):
            scope.read("other")
        assert scope.clock().tzinfo == timezone.utc

    def test_scopes_nest(self, store: Store) -> None:
        store.scope("a", create=True).scope("b", create=True).write("k", DATA)
        assert self.raw_read(store, "a/b/k") == DATA
        assert [info.key for info in store.scope("a").scope("b").list()] == ["k"]

    def test_a_scope_is_current_and_its_removed_folder_is_empty(self, store: Store) -> None:
        self.raw_write(store, "10/stays", DATA)
        scope = store.scope("1", create=True)
        scope.write("t/k", DATA)
        assert scope.is_current()
        if scope.remove_folder():
            assert [info.key for info in store.list()] == ["10/stays"]
        else:
            assert [info.key for info in store.list()] == ["1/t/k", "10/stays"]

    def test_a_closed_scope_raises_and_its_root_works_on(self, store: Store) -> None:
        scope = store.scope("1", create=True)
        scope.write("k", DATA)
        scope.close()
        for call in (lambda: scope.read("k"), lambda: scope.list(), lambda: scope.write("k", b"2")):
            with pytest.raises(ConfigError):
                call()
        assert store.read("1/k") == DATA

    def test_threads_share_a_store(self, store: Store) -> None:
        scope = store.scope("1", create=True)

        def work(number: int) -> list[str]:
            scope.write(f"{number}/k", str(number).encode())
            assert scope.read(f"{number}/k") == str(number).encode()
            return [info.key for info in scope.list(f"{number}/")]

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(24))) == [[f"{number}/k"] for number in range(24)]
        assert len(scope.list()) == 24

    def test_secrets_are_not_shown(self, store: Store) -> None:
        for text in (store.url, repr(store), store.scope("1", create=True).url):
            assert not [secret for secret in self.secrets if secret in text]

    def test_a_store_satisfies_the_protocol(self, store: Store) -> None:
        assert isinstance(store, Store)
