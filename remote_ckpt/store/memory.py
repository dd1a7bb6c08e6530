"""Objects in this process's memory, for tests, notebooks and dry runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Final

from remote_ckpt.errors import ConfigError, IntegrityError, ObjectExistsError, ObjectNotFoundError
from remote_ckpt.store.base import (
    Buffer,
    ChunkSource,
    CreateOnly,
    DeleteFailure,
    Listing,
    ObjectInfo,
    StoreCapabilities,
    check_key,
    check_prefix,
    check_size,
    children_of,
    sorted_infos,
)
from remote_ckpt.store.chunks import CheckedChunks
from remote_ckpt.store.wrappers import FolderlessStore

_LONG_AGO: Final = datetime.min.replace(tzinfo=timezone.utc)
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(slots=True)
class _Bucket:
    """The objects of one name, with a clock of its own that never stands still or goes back."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    objects: dict[str, tuple[bytes, datetime]] = field(default_factory=dict)
    last: datetime = _LONG_AGO

    def now(self) -> datetime:
        with self.lock:
            self.last = max(datetime.now(timezone.utc), self.last + _MICROSECOND)
            return self.last


_buckets: dict[str, _Bucket] = {}
_buckets_lock = threading.Lock()
_fresh_numbers = itertools.count(1)


class MemoryStore(FolderlessStore):
    """A bucket in memory. Every store of the same name in this process shares its objects.

    Args:
        name: The bucket: the first part of a ``memory://name/...`` URL.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._is_closed = False
        with _buckets_lock:
            self._bucket = _buckets.setdefault(name, _Bucket())

    @classmethod
    def fresh(cls) -> MemoryStore:
        """Return a store with a name that nobody else uses, empty."""
        return cls(f"fresh-{next(_fresh_numbers)}")

    @property
    def url(self) -> str:
        """``memory://name``."""
        return f"memory://{self._name}"

    @property
    def identity(self) -> str:
        """The store's name in this process."""
        return f"memory {self._name}"

    @property
    def capabilities(self) -> StoreCapabilities:
        """Create-only is atomic, copies are free, and nothing outlives the process."""
        return StoreCapabilities(create_only=CreateOnly.ATOMIC, server_side_copy=True, survives_process=False)

    def read(self, key: str) -> bytes:
        """See :meth:`Store.read`."""
        return self._find(key, "read")[0]

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> bytes:
        """See :meth:`Store.read_range`."""
        if offset_bytes < 0 or length_bytes < 1:
            raise ConfigError(f"no range: offset {offset_bytes}, length {length_bytes}", key=key)
        data = self.read(key)[offset_bytes : offset_bytes + length_bytes]
        if len(data) < length_bytes:
            raise IntegrityError(
                f"the object ends before byte {offset_bytes + length_bytes}",
                url=self.url,
                key=key,
                operation="read_range",
            )
        return data

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        """See :meth:`Store.read_range_into`."""
        out[:] = self.read_range(key, offset_bytes, len(out))

    def write(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.write`."""
        self._put(key, bytes(data), is_create=False)

    def write_stream(
        self,
        key: str,
        source: ChunkSource,
        *,
        size_bytes: int,
        part_bytes: int,
        concurrency: int,
    ) -> None:
        """See :meth:`Store.write_stream`; parts mean nothing here."""
        self.write(key, CheckedChunks(source, size_bytes, url=self.url, key=key).joined())

    def create(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.create`."""
        self._put(key, bytes(data), is_create=True)

    def info(self, key: str) -> ObjectInfo:
        """See :meth:`Store.info`."""
        data, modified_at = self._find(key, "info")
        return ObjectInfo(key, len(data), modified_at)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        return sorted_infos(self._infos(check_prefix(prefix)))

    def list_children(self, prefix: str = "") -> Listing:
        """See :meth:`Store.list_children`."""
        return children_of(self._infos(check_prefix(prefix)), prefix)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """See :meth:`Store.delete`; nothing can fail."""
        with self._open().lock:
            for key in keys:
                self._bucket.objects.pop(check_key(key), None)
        return ()

    def copy(self, source: str, target: str) -> None:
        """See :meth:`Store.copy`."""
        with self._open().lock:
            self._put(target, self._find(source, "copy")[0], is_create=False)

    def clock(self) -> datetime:
        """Return a time later than any that this bucket has given before."""
        return self._open().now()

    def close(self) -> None:
        """End this store's use; the objects stay for other stores of the same name."""
        self._is_closed = True

    def _open(self) -> _Bucket:
        if self._is_closed:
            raise ConfigError("the store is closed", url=self.url)
        return self._bucket

    def _find(self, key: str, operation: str) -> tuple[bytes, datetime]:
        with self._open().lock:
            found = self._bucket.objects.get(check_key(key))
        if found is None:
            raise ObjectNotFoundError("no such object", url=self.url, key=key, operation=operation)
        return found

    def _put(self, key: str, data: bytes, *, is_create: bool) -> None:
        check_size(len(data), url=self.url, key=key)
        bucket = self._open()
        with bucket.lock:
            if is_create and key in bucket.objects:
                raise ObjectExistsError("the object exists", url=self.url, key=key, operation="create")
            bucket.objects[check_key(key)] = data, bucket.now()

    def _infos(self, prefix: str) -> Iterable[ObjectInfo]:
        with self._open().lock:
            return [
                ObjectInfo(key, len(data), modified_at)
                for key, (data, modified_at) in self._bucket.objects.items()
                if key.startswith(prefix)
            ]
