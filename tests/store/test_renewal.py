"""Keys that change while a job runs: when they are looked for, and when a refusal stands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from remote_ckpt.errors import AccessDeniedError, ConfigError, StoreUnavailableError
from remote_ckpt.store.base import DeleteFailure, Store
from remote_ckpt.store.credentials import BotocoreCredentials, StaticCredentials, current_keys
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.renewal import RenewingStore
from remote_ckpt.store.wrappers import DelegatingStore

T = TypeVar("T")


class Cloud:
    """A store that takes one key, and the place where a job finds its own."""

    def __init__(self) -> None:
        self.memory = MemoryStore.fresh()
        self.memory.write("a/k", b"data")
        self.taken, self.found = "new", "old"
        self.opened = 0
        self.closed = 0
        self.now = 0.0
        self.meanwhile: Callable[[], None] = lambda: None

    def open(self) -> Driver:
        self.opened += 1
        return Driver(self, self.memory, self.found)

    def store(self) -> RenewingStore:
        return RenewingStore(self.open, now=lambda: self.now)


class Driver(DelegatingStore):
    """Signs with the key that was found when it was opened."""

    def __init__(self, cloud: Cloud, inner: Store, key: str) -> None:
        super().__init__(inner)
        self.cloud, self.key, self.is_closed = cloud, key, False

    def credentials(self) -> Mapping[str, Any] | None:
        return {"key": self.key}

    def close(self) -> None:
        self.cloud.closed += 1

    def scope(self, name: str, *, create: bool = False) -> Store:
        return Scope(self.cloud, self.inner.scope(name), self.key)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        is_taken = self.key == self.cloud.taken
        self.cloud.meanwhile()
        if not is_taken:
            return [DeleteFailure(key, AccessDeniedError(f"{self.key} is refused")) for key in keys]
        return self.inner.delete(keys)

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        if self.is_closed:
            raise ConfigError("closed")
        if self.key != self.cloud.taken:
            raise AccessDeniedError(f"{self.key} is refused")
        return call()


class Scope(Driver):
    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


def test_new_keys_are_used_by_the_store_and_all_its_scopes(cloud: Cloud) -> None:
    store = cloud.store()
    scope = store.scope("a")
    cloud.found = "new"
    assert scope.read("k") == b"data"
    assert store.read("a/k") == b"data"
    assert store.scope("a").read("k") == b"data"
    assert cloud.opened == 2
    store.close()
    assert cloud.closed == 2


def test_a_refusal_stands_where_the_keys_are_the_same_and_is_not_looked_at_at_once(
    cloud: Cloud,
) -> None:
    store = cloud.store()
    for seconds, opened in ((0.0, 2), (0.5, 2), (1.5, 3)):
        cloud.now = seconds
        with pytest.raises(AccessDeniedError, match="old is refused"):
            store.read("a/k")
        assert cloud.opened == opened
    assert cloud.closed == 2  # those that were opened in vain


def test_a_refusal_of_the_new_keys_stands_too(cloud: Cloud) -> None:
    store = cloud.store()
    cloud.found = "other"
    with pytest.raises(AccessDeniedError, match="other is refused"):
        store.create("b", b"x")
    cloud.found = "new"
    cloud.now = 2.0
    store.create("b", b"x")
    assert cloud.memory.read("b") == b"x"


def test_keys_of_a_role_are_botocores_to_renew() -> None:
    class Refreshable:
        def refresh_needed(self) -> bool:
            return False

        def get_frozen_credentials(self) -> Any:
            raise AssertionError("nobody asks for them")

    assert current_keys(BotocoreCredentials(Refreshable())) is None
    assert current_keys(StaticCredentials("a", "b")) == {
        "access_key_id": "a",
        "secret_access_key": "b",
        "token": None,
    }


def test_an_error_while_keys_are_looked_for_leaves_the_refusal_as_it_is(cloud: Cloud) -> None:
    def fail() -> Driver:
        if cloud.opened:
            raise OSError("no such file")
        return cloud.open()

    with pytest.raises(AccessDeniedError, match="old is refused"):
        RenewingStore(fail).read("a/k")


def test_a_deletion_that_another_thread_overtook_with_new_keys_is_sent_again(cloud: Cloud) -> None:
    store = cloud.store()

    def overtake() -> None:
        cloud.meanwhile = lambda: None
        cloud.found = "new"
        other = threading.Thread(target=lambda: store.read("a/k"))
        other.start()
        other.join()

    cloud.meanwhile = overtake
    assert store.delete(["a/k"]) == ()
    assert cloud.memory.list() == []


def test_a_closed_scope_stays_closed_when_the_keys_change(cloud: Cloud) -> None:
    store = cloud.store()
    scope = store.scope("a")
    scope.close()
    cloud.found = "new"
    assert store.read("a/k") == b"data"
    with pytest.raises(ConfigError):
        scope.read("k")


def test_other_errors_pass(cloud: Cloud) -> None:
    cloud.taken = "old"
    store = cloud.store()

    def fail(key: str) -> bytes:
        raise StoreUnavailableError("503")

    cloud.memory.read = fail  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError):
        store.read("a/k")
    assert cloud.opened == 1
