"""Stores around a store: the base of all wrappers, a key prefix, and a refusal to write.

Retries are in :mod:`remote_ckpt.store.retry`, counters in :mod:`remote_ckpt.store.meter`.
:class:`DelegatingStore` passes everything on and sends every request through one method, so that a
wrapper states only what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, TypeVar

from remote_ckpt.errors import AccessDeniedError, ConfigError
from remote_ckpt.store.base import (
    Buffer,
    ChunkSource,
    DeleteFailure,
    Leftover,
    Listing,
    ObjectInfo,
    Store,
    StoreCapabilities,
    check_key,
    check_prefix,
)

T = TypeVar("T")
_CHANGES: Final = frozenset(
    {"write", "write_stream", "create", "delete", "copy", "remove_folder", "remove_leftover"}
)


class DelegatingStore:
    """Base of wrappers: does what the inner store does.

    Args:
        inner: The store that does the work; also reachable as ``inner``.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        """Do one request; ``key`` is the object's key, the prefix of a listing, or None."""
        return call()

    def _wrap(self, inner: Store) -> Store:
        """Return a scope of the inner store wrapped as this store is."""
        return type(self)(inner)

    @property
    def url(self) -> str:
        """See :attr:`Store.url`."""
        return self.inner.url

    @property
    def identity(self) -> str:
        """See :attr:`Store.identity`."""
        return self.inner.identity

    @property
    def capabilities(self) -> StoreCapabilities:
        """See :attr:`Store.capabilities`."""
        return self.inner.capabilities

    def read(self, key: str) -> bytes:
        """See :meth:`Store.read`."""
        return self._invoke("read", key, lambda: self.inner.read(key))

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> Buffer:
        """See :meth:`Store.read_range`."""
        return self._invoke("read_range", key, lambda: self.inner.read_range(key, offset_bytes, length_bytes))

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        """See :meth:`Store.read_range_into`."""
        self._invoke("read_range_into", key, lambda: self.inner.read_range_into(key, offset_bytes, out))

    def write(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.write`."""
        self._invoke("write", key, lambda: self.inner.write(key, data))

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
        self._invoke(
            "write_stream",
            key,
            lambda: self.inner.write_stream(
                key, source, size_bytes=size_bytes, part_bytes=part_bytes, concurrency=concurrency
            ),
        )

    def create(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.create`."""
        self._invoke("create", key, lambda: self.inner.create(key, data))

    def info(self, key: str) -> ObjectInfo:
        """See :meth:`Store.info`."""
        return self._invoke("info", key, lambda: self.inner.info(key))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        return self._invoke("list", prefix, lambda: self.inner.list(prefix))

    def list_children(self, prefix: str = "") -> Listing:
        """See :meth:`Store.list_children`."""
        return self._invoke("list_children", prefix, lambda: self.inner.list_children(prefix))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """See :meth:`Store.delete`."""
        return self._invoke("delete", None, lambda: self.inner.delete(keys))

    def copy(self, source: str, target: str) -> None:
        """See :meth:`Store.copy`."""
        self._invoke("copy", target, lambda: self.inner.copy(source, target))

    def list_leftovers(self) -> Sequence[Leftover]:
        """See :meth:`Store.list_leftovers`."""
        return self._invoke("list_leftovers", None, self.inner.list_leftovers)

    def remove_leftover(self, leftover: Leftover) -> None:
        """See :meth:`Store.remove_leftover`."""
        self._invoke("remove_leftover", leftover.key, lambda: self.inner.remove_leftover(leftover))

    def clock(self) -> datetime:
        """See :meth:`Store.clock`."""
        return self._invoke("clock", None, self.inner.clock)

    def scope(self, name: str, *, create: bool = False) -> Store:
        """See :meth:`Store.scope`; the scope is wrapped as this store is."""
        return self._wrap(self.inner.scope(name, create=create))

    def is_current(self) -> bool:
        """See :meth:`Store.is_current`."""
        return self.inner.is_current()

    def remove_folder(self) -> bool:
        """See :meth:`Store.remove_folder`."""
        return self._invoke("remove_folder", None, self.inner.remove_folder)

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()


class PrefixStore(DelegatingStore):
    """The objects below a prefix of another store; the scope of stores without folders.

    Args:
        inner: The store that holds the objects. :meth:`close` leaves it open.
        prefix: One or more key parts without outer slashes.
    """

    def __init__(self, inner: Store, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = check_key(prefix) + "/"
        self._is_closed = False

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return f"{self.inner.url.rstrip('/')}/{self._prefix[:-1]}"

    def _full(self, key: str) -> str:
        if self._is_closed:
            raise ConfigError("the store is closed", url=self.url)
        return self._prefix + check_key(key)

    def _full_prefix(self, prefix: str) -> str:
        return self._full(check_prefix(prefix)[:-1]) + "/" if prefix else self._full("x")[:-1]

    def _relative(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._prefix))

    def read(self, key: str) -> bytes:
        """See :meth:`Store.read`."""
        return self.inner.read(self._full(key))

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> Buffer:
        """See :meth:`Store.read_range`."""
        return self.inner.read_range(self._full(key), offset_bytes, length_bytes)

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        """See :meth:`Store.read_range_into`."""
        self.inner.read_range_into(self._full(key), offset_bytes, out)

    def write(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.write`."""
        self.inner.write(self._full(key), data)

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
        self.inner.write_stream(
            self._full(key),
            source,
            size_bytes=size_bytes,
            part_bytes=part_bytes,
            concurrency=concurrency,
        )

    def create(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.create`."""
        self.inner.create(self._full(key), data)

    def info(self, key: str) -> ObjectInfo:
        """See :meth:`Store.info`."""
        return self._relative(self.inner.info(self._full(key)))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        return [self._relative(info) for info in self.inner.list(self._full_prefix(prefix))]

    def list_children(self, prefix: str = "") -> Listing:
        """See :meth:`Store.list_children`."""
        listing = self.inner.list_children(self._full_prefix(prefix))
        return replace(listing, objects=tuple(self._relative(info) for info in listing.objects))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """See :meth:`Store.delete`."""
        failures = self.inner.delete([self._full(key) for key in keys])
        return [replace(failure, key=failure.key.removeprefix(self._prefix)) for failure in failures]

    def copy(self, source: str, target: str) -> None:
        """See :meth:`Store.copy`."""
        self.inner.copy(self._full(source), self._full(target))

    def list_leftovers(self) -> Sequence[Leftover]:
        """See :meth:`Store.list_leftovers`; the inner store lists all of its own."""
        start = self._full_prefix("")
        below = [found for found in self.inner.list_leftovers() if found.key.startswith(start)]
        return [replace(found, key=found.key.removeprefix(start)) for found in below]

    def remove_leftover(self, leftover: Leftover) -> None:
        """See :meth:`Store.remove_leftover`."""
        self.inner.remove_leftover(replace(leftover, key=self._full(leftover.key)))

    def scope(self, name: str, *, create: bool = False) -> Store:
        """Return the store of a longer prefix."""
        return PrefixStore(self.inner, self._full(name))

    def is_current(self) -> bool:
        """True: a prefix cannot be moved away."""
        return True

    def remove_folder(self) -> bool:
        """False: a prefix is no folder."""
        return False

    def close(self) -> None:
        """End this scope's use; the inner store stays open."""
        self._is_closed = True


class FolderlessStore:
    """What stores without folders have in common: a scope is a prefix, and nothing moves away.

    Without open uploads either, as long as nothing else is said.
    """

    def list_leftovers(self) -> Sequence[Leftover]:
        """Nothing: an interrupted write leaves nothing that this store could list."""
        return ()

    def remove_leftover(self: Store, leftover: Leftover) -> None:
        """Refuse: it was not listed here."""
        raise ConfigError(f"{leftover.key!r} is no leftover of this store", url=self.url)

    def scope(self: Store, name: str, *, create: bool = False) -> Store:
        """See :meth:`Store.scope`; there is nothing to make."""
        return PrefixStore(self, check_key(name))

    def is_current(self) -> bool:
        """True: a prefix cannot be moved away."""
        return True

    def remove_folder(self) -> bool:
        """False: there are no folders to remove."""
        return False


class ReadOnlyStore(DelegatingStore):
    """A store that refuses every change with AccessDeniedError."""

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        if operation in _CHANGES:
            raise AccessDeniedError("opened for reading only", url=self.url, key=key, operation=operation)
        return call()

    def scope(self, name: str, *, create: bool = False) -> Store:
        """See :meth:`Store.scope`; never makes a folder."""
        return self._wrap(self.inner.scope(name))
