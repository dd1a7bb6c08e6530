"""Credentials that changed while a job runs: another file, another environment.

A refusal is looked at once: the driver is opened anew, and where that finds other keys than the one in use
has, it takes over and the request is sent once more. Where nothing changed, or the new keys are refused as
well, the refusal stands.

Roles need none of this: botocore asks for other keys before theirs end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from remote_ckpt.errors import AccessDeniedError
from remote_ckpt.log import logger
from remote_ckpt.store.base import DeleteFailure, Store
from remote_ckpt.store.wrappers import DelegatingStore

T = TypeVar("T")
_SECONDS_BETWEEN_LOOKS: Final = 1.0
_MAX_RETIRED: Final = 4


class CredentialedStore(Store, Protocol):
    """A driver that can say with what it signs."""

    def credentials(self) -> Mapping[str, Any] | None:
        """Return the keys in use, without the time at which they end; None where requests go unsigned."""
        ...


class _Driver:
    """The driver in use, shared by all scopes; ``number`` counts how often it was replaced."""

    def __init__(self, open_driver: Callable[[], CredentialedStore], now: Callable[[], float]) -> None:
        self.store = open_driver()
        self.number = 0
        self._open = open_driver
        self._now = now
        self._retired: list[Store] = []
        self._lock = threading.Lock()
        self._looked_at: float | None = None

    def is_renewed_since(self, number: int) -> bool:
        """Whether another driver is in use now than the one of that number, which was refused."""
        with self._lock:
            if self.number == number and self._may_look() and (fresh := self._with_other_keys()) is not None:
                self._retired.append(self.store)  # others may be in the middle of a request
                if len(self._retired) > _MAX_RETIRED:
                    self._retired.pop(0).close()
                self.store = fresh
                self.number += 1
                logger.warning("%s: the credentials have changed: the new ones are used now", fresh.url)
            return self.number != number

    def close(self) -> None:
        for store in (*self._retired, self.store):
            store.close()

    def _may_look(self) -> bool:
        now = self._now()
        if self._looked_at is not None and now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return False
        self._looked_at = now
        return True

    def _with_other_keys(self) -> CredentialedStore | None:
        fresh: CredentialedStore | None = None
        try:
            fresh = self._open()
            if fresh.credentials() not in (None, self.store.credentials()):
                return fresh
        except Exception as error:  # of botocore, too: the refusal is what the caller is told
            logger.warning("%s: no other credentials: %s", self.store.url, error)
        if fresh is not None:
            fresh.close()
        return None


class RenewingStore(DelegatingStore):
    """A store whose credentials are looked for again when they are refused.

    Args:
        open_driver: Opens the driver with the credentials of that moment; asks the store nothing.
        now: A clock in seconds that never goes back.
    """

    def __init__(
        self, open_driver: Callable[[], CredentialedStore], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._driver = _Driver(open_driver, now)
        self._names: tuple[str, ...] = ()
        self._number = 0
        self._is_closed = False
        super().__init__(self._driver.store)

    def scope(self, name: str, *, create: bool = False) -> RenewingStore:
        """See :meth:`Store.scope`."""
        scope = RenewingStore.__new__(RenewingStore)
        scope._driver = self._driver
        scope._names = (*self._names, name)
        scope._number = self._follow()
        scope._is_closed = False
        scope.inner = self.inner.scope(name, create=create)
        return scope

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """See :meth:`Store.delete`."""
        number = self._follow()
        failures = super().delete(keys)
        if any(isinstance(each.error, AccessDeniedError) for each in failures) and (
            self._driver.is_renewed_since(number)
        ):
            return super().delete(keys)
        return failures

    def close(self) -> None:
        """Close the driver, or end this scope's use."""
        self._is_closed = True
        if self._names:
            self.inner.close()
        else:
            self._driver.close()

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        number = self._follow()
        try:
            return call()
        except AccessDeniedError:
            if not self._driver.is_renewed_since(number):
                raise
        self._follow()
        return call()  # nothing was done before: a refusal is a clean answer

    def _follow(self) -> int:
        """Go over to the driver in use now; returns its number."""
        number, store = self._driver.number, self._driver.store
        if number != self._number and not self._is_closed:
            inner: Store = store
            for name in self._names:
                inner = inner.scope(name)
            self.inner, self._number = inner, number
        return self._number
