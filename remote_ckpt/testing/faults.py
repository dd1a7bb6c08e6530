"""A store that fails where a test wants it to: before a request, after it (a lost answer), or in its bytes.

A crash test dies at every request of some code in turn, then looks whether the promises hold::

    recorder = FaultStore(MemoryStore.fresh())
    save(recorder)
    for call in recorder.calls:
        memory = MemoryStore.fresh()
        with pytest.raises(SimulatedCrash):
            save(FaultStore.crashing(memory, call.number))
        look_at(memory)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from remote_ckpt.store.base import Store
from remote_ckpt.store.wrappers import DelegatingStore

T = TypeVar("T")


class SimulatedCrash(BaseException):
    """The process died here. Not an ``Exception``, so that no clean-up for failures runs."""


@dataclass(frozen=True, slots=True)
class StoreCall:
    """One request.

    Args:
        number: Counted from 1 over a store and all its scopes.
        operation: The verb: ``"read"``, ``"write"``, ``"create"``, ``"list"``, ...
        key: The object's key relative to the scope, a listing's prefix, or None.
        url: The scope that was asked.
    """

    number: int
    operation: str
    key: str | None
    url: str


Before = Callable[[StoreCall], None]
"""Called before a request; what it raises, the request raises without being made."""

After = Callable[[StoreCall, Any], Any]
"""Called with a request's result, and returns the result to give. What it raises replaces the answer.

For ``read_range_into`` the result is the filled buffer, which may be changed in place.
"""


class FaultStore(DelegatingStore):
    """Records every request and runs hooks before and after it; scopes share both.

    Args:
        inner: The store that does the work.
        before: See :data:`Before`.
        after: See :data:`After`.

    Attributes:
        calls: The requests made until now, in order.
    """

    def __init__(self, inner: Store, *, before: Before | None = None, after: After | None = None) -> None:
        super().__init__(inner)
        self.calls: list[StoreCall] = []
        self._lock = threading.Lock()
        self._before = before
        self._after = after

    @classmethod
    def crashing(cls, inner: Store, number: int, *, is_done: bool = False) -> FaultStore:
        """Return a store on which the process dies at a request, before it or (``is_done``) just after.

        Every later request raises SimulatedCrash too: the dead make none.
        """

        def before(call: StoreCall) -> None:
            if call.number > number or (call.number == number and not is_done):
                raise SimulatedCrash(f"before {call}")

        return cls(inner, before=before, after=raise_at(number, SimulatedCrash(f"after {number}")))

    def _wrap(self, inner: Store) -> FaultStore:
        scope = FaultStore(inner, before=self._before, after=self._after)
        scope.calls = self.calls
        scope._lock = self._lock
        return scope

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        with self._lock:
            request = StoreCall(len(self.calls) + 1, operation, key, self.url)
            self.calls.append(request)
        if self._before is not None:
            self._before(request)
        result = call()
        if self._after is None:
            return result
        changed: T = self._after(request, result)
        return changed

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        """See :meth:`Store.read_range_into`; hooks see the filled buffer."""

        def call() -> memoryview:
            self.inner.read_range_into(key, offset_bytes, out)
            return out

        self._invoke("read_range_into", key, call)


def raise_at(number: int, error: BaseException) -> Callable[..., Any]:
    """Return a hook, for before or after, that raises at one request and otherwise changes nothing."""

    def hook(call: StoreCall, result: Any = None) -> Any:
        if call.number == number:
            raise error
        return result

    return hook


def corrupt_reads(is_wanted: Callable[[StoreCall], bool]) -> After:
    """Return an after-hook that flips one bit in the middle of what the wanted reads return."""

    def hook(call: StoreCall, result: Any) -> Any:
        if not isinstance(result, (bytes, bytearray, memoryview)) or not is_wanted(call):
            return result
        changed = result if isinstance(result, memoryview) else bytearray(result)
        changed[len(changed) // 2] ^= 1
        return bytes(changed) if isinstance(result, bytes) else changed

    return hook
