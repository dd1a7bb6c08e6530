"""Counts what goes through a store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from remote_ckpt.store.base import Buffer, ChunkSource, Store
from remote_ckpt.store.wrappers import DelegatingStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What went through a store, summed over its scopes.

    Args:
        requests: How often each verb was called, retries not counted.
        uploaded_bytes: Bytes of writes that succeeded.
        downloaded_bytes: Bytes of reads that succeeded.
        retries: Requests that were sent again after a transient failure.
    """

    requests: Mapping[str, int]
    uploaded_bytes: int
    downloaded_bytes: int
    retries: int


@dataclass(slots=True)
class StoreMeter:
    """Thread-safe counters that wrappers and their scopes share."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _requests: Counter[str] = field(default_factory=Counter)
    _uploaded_bytes: int = 0
    _downloaded_bytes: int = 0
    _retries: int = 0

    def count(
        self,
        operation: str | None = None,
        *,
        uploaded_bytes: int = 0,
        downloaded_bytes: int = 0,
        retries: int = 0,
    ) -> None:
        """Add to the counters."""
        with self._lock:
            if operation is not None:
                self._requests[operation] += 1
            self._uploaded_bytes += uploaded_bytes
            self._downloaded_bytes += downloaded_bytes
            self._retries += retries

    def snapshot(self) -> StoreStatistics:
        """Return the counters as they are now."""
        with self._lock:
            return StoreStatistics(
                dict(self._requests), self._uploaded_bytes, self._downloaded_bytes, self._retries
            )


class MeteredStore(DelegatingStore):
    """Counts requests and bytes.

    Args:
        inner: The store that does the work.
        meter: Counters to add to; new ones if None.
    """

    def __init__(self, inner: Store, meter: StoreMeter | None = None) -> None:
        super().__init__(inner)
        self.meter = meter or StoreMeter()

    def snapshot(self) -> StoreStatistics:
        """Return what went through this store and its scopes until now."""
        return self.meter.snapshot()

    def _wrap(self, inner: Store) -> MeteredStore:
        return MeteredStore(inner, self.meter)

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        self.meter.count(operation)
        result = call()
        if isinstance(result, (bytes, bytearray, memoryview)):
            self.meter.count(downloaded_bytes=len(result))
        return result

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        """See :meth:`Store.read_range_into`."""
        super().read_range_into(key, offset_bytes, out)
        self.meter.count(downloaded_bytes=len(out))

    def write(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.write`."""
        super().write(key, data)
        self.meter.count(uploaded_bytes=len(data))

    def write_stream(
        self,
        key: str,
        source: ChunkSource,
        *,
        size_bytes: int,
        part_bytes: int,
        concurrency: int,
    ) -> None:
        """See :meth:`Store.write_stream`."""
        super().write_stream(
            key, source, size_bytes=size_bytes, part_bytes=part_bytes, concurrency=concurrency
        )
        self.meter.count(uploaded_bytes=size_bytes)

    def create(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.create`."""
        super().create(key, data)
        self.meter.count(uploaded_bytes=len(data))
