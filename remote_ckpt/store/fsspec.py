"""Every other file system that fsspec knows, and S3 through s3fs where the user asks for it.

What fsspec does that this adapter avoids, each found by trying (fsspec and s3fs 2026.9):

- leaving ``with fs.open(..., "wb")`` by an exception publishes a short object: it is never used
- ``isfile``, ``walk``, ``exists`` and ``glob`` call a refused or failed request "absent": never used
- listings are cached for ever and instances are shared: instances are private, caches off or cleared
- ``rm`` hides the errors of single keys: keys are deleted so that each error is seen
- ``pipe_file(mode="create")`` is checked, then written, on most: only those known to be better are trusted
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, Final

from remote_ckpt.errors import (
    BucketNotFoundError,
    ConfigError,
    ForkedProcessError,
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
    RemoteCkptError,
    StoreError,
    UnsupportedStoreError,
)
from remote_ckpt.options import RetryOptions, TransferOptions
from remote_ckpt.store.base import (
    Buffer,
    ChunkSource,
    CreateOnly,
    DeleteFailure,
    Leftover,
    Listing,
    ObjectInfo,
    Store,
    StoreCapabilities,
    check_key,
    check_prefix,
    children_of,
    sorted_infos,
)
from remote_ckpt.store.chunks import CheckedChunks
from remote_ckpt.store.fsspec_errors import shows_no_secret, translate
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.option_checks import check_endpoint
from remote_ckpt.store.wrappers import FolderlessStore
from remote_ckpt.url import Location

_CREATE_ONLY: Final = {
    "memory": CreateOnly.ATOMIC,
    "s3": CreateOnly.PROBE,
    "gs": CreateOnly.PROBE,
    "az": CreateOnly.PROBE,
}
_BUCKETS: Final = frozenset({"s3", "gs", "az"})
_TIMES: Final = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
_memory_lock = threading.Lock()


def open_fsspec_store(
    location: Location,
    *,
    storage_options: Mapping[str, Any] | None = None,
    retry: RetryOptions | None = None,
    transfer: TransferOptions | None = None,
) -> Store:
    """Return the store at a location of any file system that fsspec knows.

    Local paths get our own driver: fsspec's can neither publish a whole file in one step nor create only
    if absent.

    Args:
        location: The place that becomes the store's root.
        storage_options: The file system's own options; they win over what the location carries.
        retry: Time-outs of requests (s3fs).
        transfer: ``budget_bytes`` bounds an object that has to be held in memory (all but s3fs).

    Raises:
        MissingDependencyError: The package that serves this scheme is not installed.
        ConfigError: The file system refuses the options.
    """
    if location.is_local:
        return LocalStore(location.path)
    given = {**location.options, **(storage_options or {})}
    retry, transfer = retry or RetryOptions(), transfer or TransferOptions()
    if location.scheme == "s3":
        from remote_ckpt.store.fsspec_s3 import open_s3fs_store

        return open_s3fs_store(location, storage_options=given, retry=retry, transfer=transfer)
    if location.scheme in _BUCKETS:
        given.setdefault("use_listings_cache", False)
        if given.get("endpoint_url"):
            check_endpoint(given["endpoint_url"], option="endpoint_url")
    file_system = open_file_system(location, given)
    if location.scheme in ("http", "https"):
        from remote_ckpt.store.fsspec_http import HttpStore

        return HttpStore(location, file_system, transfer, retry)
    return FsspecStore(location, file_system, transfer)


def open_file_system(location: Location, options: Mapping[str, Any]) -> Any:
    """Return fsspec's file system for a location; errors as :func:`open_fsspec_store`."""
    import fsspec

    try:
        return fsspec.filesystem(location.scheme, skip_instance_cache=True, **options)
    except ImportError as error:
        raise MissingDependencyError(
            f"{location.scheme}:// through fsspec needs another package: {error}", url=location.url
        ) from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        # The text may hold an option's value: only its kind is told.
        message = f"the file system for {location.scheme}:// refused its options ({type(error).__name__})"
        raise ConfigError(message, url=location.url) from None


class FsspecStore(FolderlessStore):
    """One folder of a file system. Made by :func:`open_fsspec_store`."""

    def __init__(self, location: Location, file_system: Any, transfer: TransferOptions) -> None:
        self._location = location
        self._fs: Any = file_system
        self._budget_bytes = transfer.budget_bytes
        self._pid = os.getpid()
        root = "/".join(part for part in (location.bucket, location.path) if part)
        self._root = str(file_system._strip_protocol(f"{location.scheme}://{root}")).rstrip("/") + "/"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        """See :attr:`Store.url`."""
        return self._location.url

    @property
    def identity(self) -> str:
        """See :attr:`Store.identity`; of the options only a digest tells them apart."""
        token = getattr(self._fs, "_fs_token", "")
        digest = hashlib.sha256(str(token).encode()).hexdigest()
        return f"fsspec {self._location.scheme}://{self._location.bucket} {digest}"

    @property
    def capabilities(self) -> StoreCapabilities:
        """Create-only is trusted where it is known to be more than a check before a write."""
        return StoreCapabilities(
            create_only=_CREATE_ONLY.get(self._location.scheme, CreateOnly.NONE),
            server_side_copy=self._location.scheme in _BUCKETS,
            survives_process=self._location.scheme != "memory",
        )

    def read(self, key: str) -> bytes:
        """See :meth:`Store.read`."""
        with self._request("read", key) as (_, path):
            return _bytes(self._fetch(path))

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> Buffer:
        """See :meth:`Store.read_range`."""
        if offset_bytes < 0 or length_bytes < 1:
            raise ConfigError(f"no range: offset {offset_bytes}, length {length_bytes}", key=key)
        end_bytes = offset_bytes + length_bytes
        with self._request("read_range", key) as (_, path):
            found = _bytes(self._fetch(path, offset_bytes, end_bytes))
        if len(found) != length_bytes:
            message = f"the object ends {length_bytes - len(found)} bytes before byte {end_bytes}"
            raise IntegrityError(message, url=self.url, key=key, operation="read_range")
        return found

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        """See :meth:`Store.read_range_into`; the bytes are copied once."""
        out[:] = self.read_range(key, offset_bytes, len(out))

    def write(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.write`."""
        with self._request("write", key) as (_, path):
            self._make_parent(path)
            self._put(path, _not_empty(data), is_create=False)

    def create(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.create`.

        Raises:
            UnsupportedStoreError: Create-only is ``NONE``: this file system would look, then write.
        """
        if self.capabilities.create_only is CreateOnly.NONE:
            raise UnsupportedStoreError(
                f"{self._location.scheme}:// cannot create an object only if it is absent",
                url=self.url,
                key=key,
                operation="create",
            )
        with self._request("create", key) as (_, path), self._exclusively():
            self._make_parent(path)
            self._put(path, _not_empty(data), is_create=True)

    def write_stream(
        self,
        key: str,
        source: ChunkSource,
        *,
        size_bytes: int,
        part_bytes: int,
        concurrency: int,
    ) -> None:
        """See :meth:`Store.write_stream`; the object is held in memory as a whole.

        Raises:
            UnsupportedStoreError: It is larger than the byte budget.
        """
        if size_bytes > self._budget_bytes:
            raise UnsupportedStoreError(
                f"an object of {size_bytes} bytes must be held in memory for {self._location.scheme}://: "
                f"lower max_object_bytes to {self._budget_bytes} or raise budget_bytes",
                url=self.url,
                key=key,
            )
        self.write(key, CheckedChunks(source, size_bytes, url=self.url, key=key).joined())

    def info(self, key: str) -> ObjectInfo:
        """See :meth:`Store.info`."""
        with self._request("info", key) as (fs, path):
            fs.invalidate_cache()
            found = fs.info(path)
        if found["type"] != "file":
            raise ObjectNotFoundError("no such object", url=self.url, key=key, operation="info")
        return self._info(found)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`; one request for each folder."""
        found, folders = [], [check_prefix(prefix)]
        while folders:
            level = self._entries(folders.pop(), "list")
            found += [self._info(entry) for entry in level if entry["type"] == "file"]
            folders += [self._key(entry) + "/" for entry in level if entry["type"] == "directory"]
        return sorted_infos(found)

    def list_children(self, prefix: str = "") -> Listing:
        """See :meth:`Store.list_children`."""
        level = self._entries(check_prefix(prefix), "list_children")
        names = sorted(self._key(entry)[len(prefix) :] for entry in level if entry["type"] == "directory")
        files = children_of((self._info(entry) for entry in level if entry["type"] == "file"), prefix)
        return Listing(files.objects, tuple(names))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """See :meth:`Store.delete`; one request for each key."""
        wanted = [check_key(key) for key in dict.fromkeys(keys)]
        return [failure for key in wanted if (failure := self._delete_one(key)) is not None]

    def copy(self, source: str, target: str) -> None:
        """See :meth:`Store.copy`."""
        target_path = self._root + check_key(target)
        self.info(source)  # some copy a folder of that name
        with self._request("copy", source) as (fs, path):
            self._make_parent(target_path)
            fs.cp_file(path, target_path)

    def list_leftovers(self) -> Sequence[Leftover]:
        """Nothing: gcsfs's uploads end by themselves after a week, and so do adlfs's uncommitted blocks."""
        with self._request("list_leftovers"):
            return ()

    def clock(self) -> datetime:
        """See :meth:`Store.clock`: a small object is written, looked at and removed."""
        marker = f".clock-{secrets.token_hex(8)}"
        self.write(marker, b"time")
        try:
            return self.info(marker).modified_at
        finally:
            self._delete_one(marker)

    def close(self) -> None:
        """Drop the file system; further calls raise ConfigError."""
        self._fs = None

    @contextmanager
    def _request(self, operation: str, key: str | None = None) -> Iterator[tuple[Any, str]]:
        """Give the file system and the key's path; raise its errors as ours."""
        if self._fs is None:
            raise ConfigError("the store is closed", url=self.url)
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "the store was opened before this process was forked: open it in the child", url=self.url
            )
        try:
            yield self._fs, self._root + ("" if key is None else check_key(key))
        except RemoteCkptError:
            raise
        except Exception as error:
            found = translate(error, operation=operation, url=self.url, key=key)
            if isinstance(found, ObjectNotFoundError):
                self._check_bucket(operation)
            raise found from (error if shows_no_secret(error) else None)

    def _check_bucket(self, operation: str) -> None:
        """Raise BucketNotFoundError where "not found" may mean the bucket: gcsfs and adlfs don't tell."""
        if self._location.scheme not in _BUCKETS:
            return
        try:
            self._fs.ls(self._location.bucket, detail=False)
        except FileNotFoundError as error:
            message = f"the bucket {self._location.bucket!r} does not exist"
            raise BucketNotFoundError(message, url=self.url, operation=operation) from error

    def _entries(self, prefix: str, operation: str) -> Sequence[Mapping[str, Any]]:
        """Return files and folders right below a prefix; none where the folder does not exist."""
        with contextlib.suppress(ObjectNotFoundError), self._request(operation) as (fs, root):
            fs.invalidate_cache()
            start = root + prefix
            found = fs.ls(start.rstrip("/"), detail=True)
            return [entry for entry in found if entry["name"].startswith(start) and entry["name"] != start]
        return ()

    def _key(self, entry: Mapping[str, Any]) -> str:
        return str(entry["name"])[len(self._root) :].rstrip("/")

    def _info(self, entry: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(str(entry["name"])[len(self._root) :], int(entry["size"]), self._time(entry))

    def _time(self, entry: Mapping[str, Any]) -> datetime:
        value = next((entry[name] for name in _TIMES if entry.get(name)), None)
        if value is None:
            value = self._modified(entry["name"])
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, timezone.utc)
        if isinstance(value, str):
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        moment: datetime = value
        return (
            moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment.astimezone(timezone.utc)
        )

    def _modified(self, path: str) -> datetime:
        try:
            moment: datetime = self._fs.modified(path)
        except NotImplementedError:
            message = f"{self._location.scheme}:// tells no times of objects, which checkpoints need"
            raise UnsupportedStoreError(message, url=self.url) from None
        return moment

    def _fetch(self, path: str, start: int | None = None, end: int | None = None) -> object:
        return self._fs.cat_file(path, start=start, end=end)

    def _put(self, path: str, data: bytes, *, is_create: bool) -> None:
        self._fs.pipe_file(path, data, **({"mode": "create"} if is_create else {}))

    def _make_parent(self, path: str) -> None:
        if self._location.scheme not in _BUCKETS:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _exclusively(self) -> contextlib.AbstractContextManager[object]:
        # The memory file system looks, then stores: one lock makes the two one step in this process.
        return _memory_lock if self._location.scheme == "memory" else contextlib.nullcontext()

    def _delete_one(self, key: str) -> DeleteFailure | None:
        try:
            with self._request("delete", key) as (fs, path):
                fs.rm_file(path)
        except ObjectNotFoundError:
            return None
        except StoreError as error:
            return DeleteFailure(key, error)
        return None


def _bytes(found: object) -> bytes:
    # Some file systems hand back an exception in place of bytes.
    if isinstance(found, Exception):
        raise found
    if not isinstance(found, bytes | bytearray | memoryview):
        raise TypeError(f"the file system returned {type(found).__name__} instead of bytes")
    return bytes(found)


def _not_empty(data: Buffer) -> bytes:
    if not len(data):
        raise ConfigError("objects must not be empty")
    return bytes(data)
