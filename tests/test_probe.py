"""The create-only probe: honoured, ignored in sequence, racy, undecided, and accepted all the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from remote_ckpt import probe
from remote_ckpt.errors import ObjectExistsError, StoreUnavailableError, UnsupportedStoreError
from remote_ckpt.options import CommitOptions, Options
from remote_ckpt.probe import probe_create_only
from remote_ckpt.store.base import Buffer, CreateOnly, Store, StoreCapabilities
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.testing.faults import FaultStore

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
        (Refusing, "501 NotImplemented"),
        (Without, "its driver has none"),
    ],
)
def test_h14_a_store_without_it_is_refused_with_the_reason(kind: type[Declared], reason: str) -> None:
    memory = MemoryStore.fresh()
    with pytest.raises(UnsupportedStoreError, match=reason):
        probe_create_only(kind(memory))
    assert memory.list() == []


@pytest.mark.parametrize("kind", [Ignoring, Racy, Refusing, Without])
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
        probe_create_only(FaultStore(Declared(memory), before=fail))
    probe_create_only(Declared(memory))
    assert memory.list() == []
