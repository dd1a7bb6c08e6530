"""S3 and its compatibles, Google Cloud Storage and Azure through obstore, a native parallel client.

What obstore does that this adapter guards against, each found by trying (obstore 0.12):

- it hangs for ever in a process forked after its first use: refused at once
- it calls a missing bucket, or a proxy's 404, "not found": only a clean answer is absence
- it cuts a range that ends past the object's end: the length is checked
- it counts no parts (10,000 is S3's limit), and its default part of 5 MiB caps an object at 48.8 GiB
- its time-out of 30 s includes the body: here it grows with the size of a part, and a read may not pause
- a batch delete stops at the first error: then each key is deleted on its own, and by requests of its own
  where the store refuses batches
- it takes most errors that come with 200 for a copy that was made: the copy is looked at
- it takes any XML or HTML for a listing, and fails all of it for one key such as ``a//b``: S3 is listed
  by :mod:`remote_ckpt.store.s3_listing`
- it allocates and copies each range: S3's are received in place by :mod:`remote_ckpt.store.direct_reads`
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

import obstore

from remote_ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    RemoteCkptError,
    StoreError,
    StoreUnavailableError,
)
from remote_ckpt.options import KiB, MiB, RetryOptions, TransferOptions
from remote_ckpt.store.base import (
    Buffer,
    ChunkSource,
    CreateOnly,
    DeleteFailure,
    Leftover,
    Listing,
    ObjectInfo,
    StoreCapabilities,
    check_key,
    check_prefix,
    sorted_infos,
)
from remote_ckpt.store.chunks import CheckedChunks, plan_part_bytes
from remote_ckpt.store.credentials import current_keys
from remote_ckpt.store.direct_memory import allocate
from remote_ckpt.store.http_clock import read_date
from remote_ckpt.store.obstore_clients import Clients, check_process, open_clients, plan_settings
from remote_ckpt.store.obstore_errors import DRIVER_ERRORS, redacted, status_of, translate
from remote_ckpt.store.obstore_listing import info_of
from remote_ckpt.store.obstore_options import DriverSettings
from remote_ckpt.store.s3_uploads import MAX_COPY_BYTES, S3Uploads, leftovers_of, s3_uploads
from remote_ckpt.store.wrappers import FolderlessStore
from remote_ckpt.url import Location, redact_url

_LARGE_BYTES: Final = 1 * MiB
"""Ranges of at least this are received piece by piece, where obstore would hold them whole, twice."""
_PIECE_BYTES: Final = 256 * KiB


def open_obstore_store(
    location: Location,
    *,
    storage_options: Mapping[str, Any] | None = None,
    retry: RetryOptions | None = None,
    transfer: TransferOptions | None = None,
) -> ObstoreStore:
    """Return the store at an ``s3``, ``gs`` or ``az`` location; nothing is sent to it yet.

    Args:
        location: The bucket, and the prefix that becomes the store's root.
        storage_options: As for s3fs, gcsfs or adlfs (see :mod:`remote_ckpt.store.obstore_options`); they
            win over what the location carries.
        retry: Time-outs of requests.
        transfer: Part size, from which the time allowed for a body follows.

    Raises:
        ConfigError: The scheme, or an option, is not known.
        AccessDeniedError: S3: there are no credentials, and ``anon`` was not given.
        ForkedProcessError: obstore was used before this process was forked.
    """
    check_process(location.url)
    settings = plan_settings(location, {**location.options, **(storage_options or {})})
    retry = retry or RetryOptions()
    clients = open_clients(location, settings, retry=retry, transfer=transfer or TransferOptions())
    return ObstoreStore(location, clients, settings, retry)


class ObstoreStore(FolderlessStore):
    """One prefix of a bucket. Made by :func:`open_obstore_store`."""

    def __init__(
        self, location: Location, clients: Clients, settings: DriverSettings, retry: RetryOptions
    ) -> None:
        self._location = location
        self._clients: Clients | None = clients
        self._settings = settings
        self._retry = retry
        self._uploads: S3Uploads | None = None
        self._root = f"{location.path}/" if location.path else ""

    def __repr__(self) -> str:
        return f"ObstoreStore({self.url!r})"

    @property
    def url(self) -> str:
        """See :attr:`Store.url`."""
        return self._location.url

    @property
    def identity(self) -> str:
        """See :attr:`Store.identity`."""
        endpoint = redact_url(self._settings.endpoint_url or "the provider's own endpoint")
        names = [str(self._settings.config.get(name, "")) for name in ("region", "account_name")]
        return " ".join(["obstore", self._location.scheme, endpoint, *names, self._location.bucket])

    @property
    def capabilities(self) -> StoreCapabilities:
        """Copies run in the store; whether it honours create-only depends on the server."""
        return StoreCapabilities(create_only=CreateOnly.PROBE, server_side_copy=True)

    def credentials(self) -> Mapping[str, Any] | None:
        """See :meth:`.renewal.CredentialedStore.credentials`."""
        return current_keys(self._settings.provider)

    def read(self, key: str) -> bytes:
        """See :meth:`Store.read`."""
        with self._request("read", key) as (clients, path):
            return bytes(obstore.get(clients.reads, path).bytes())

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> Buffer:
        """See :meth:`Store.read_range`."""
        self._check_range(key, offset_bytes, length_bytes)
        with self._request("read_range", key) as (clients, path):
            if clients.direct is not None and clients.direct.takes(length_bytes):
                received = memoryview(allocate(length_bytes))
                if clients.direct.read_into(path, offset_bytes, received, key=key):
                    return received.toreadonly()
            found = memoryview(
                obstore.get_range(clients.reads, path, start=offset_bytes, length=length_bytes)
            )
        self._check_length(key, len(found), offset_bytes, length_bytes)
        return found

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        """See :meth:`Store.read_range_into`; after an error ``out`` may hold a part of the range.

        Over https, and elsewhere than on S3, the bytes are copied once, a little at a time.
        """
        self._check_range(key, offset_bytes, len(out))
        if out.readonly:
            raise ConfigError("the memory to read into is read-only", url=self.url, key=key)
        with self._request("read_range", key) as (clients, path):
            if clients.direct is not None and clients.direct.read_into(path, offset_bytes, out, key=key):
                return
            if len(out) >= _LARGE_BYTES:
                asked: Any = {"range": (offset_bytes, offset_bytes + len(out))}
                answer = obstore.get(clients.reads, path, options=asked)
                filled = _fill(out, answer.stream(min_chunk_size=_PIECE_BYTES))
                self._check_length(key, filled, offset_bytes, len(out))
                return
        out[:] = self.read_range(key, offset_bytes, len(out))

    def _check_length(self, key: str, found_bytes: int, offset_bytes: int, length_bytes: int) -> None:
        if found_bytes != length_bytes:
            end = offset_bytes + length_bytes
            message = f"the object ends {length_bytes - found_bytes} bytes before byte {end}"
            if found_bytes > length_bytes:
                message = f"the store sent more than the {length_bytes} bytes that were asked for"
            raise IntegrityError(message, url=self.url, key=key, operation="read_range")

    def _check_range(self, key: str, offset_bytes: int, length_bytes: int) -> None:
        if offset_bytes < 0 or length_bytes < 1:
            message = f"no range: offset {offset_bytes}, length {length_bytes}"
            raise ConfigError(message, url=self.url, key=key)

    def write(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.write`."""
        with self._request("write", key) as (clients, path):
            obstore.put(clients.once, path, _not_empty(data), use_multipart=False)

    def create(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.create`."""
        with self._request("create", key) as (clients, path):
            obstore.put(clients.once, path, _not_empty(data), use_multipart=False, mode="create")

    def write_stream(
        self,
        key: str,
        source: ChunkSource,
        *,
        size_bytes: int,
        part_bytes: int,
        concurrency: int,
    ) -> None:
        """See :meth:`Store.write_stream`.

        Chunks are sent without a copy, after the next ones were asked for: none may change before this
        returns.
        """
        chunks = CheckedChunks(source, size_bytes, url=self.url, key=key)
        part_bytes = plan_part_bytes(size_bytes, part_bytes)
        chunks.feed(lambda: self._send(key, chunks, size_bytes, part_bytes, concurrency))

    def info(self, key: str) -> ObjectInfo:
        """See :meth:`Store.info`."""
        with self._request("info", key) as (clients, path):
            try:
                return replace(info_of(obstore.head(clients.once, path)), key=key)
            except DRIVER_ERRORS as error:
                if status_of(error) not in (400, 404):
                    raise
                # An answer to HEAD has no body: a listing tells a missing bucket, an expired token, and the
                # 404 of something between here and the store.
                if clients.lister.has(path, operation="info") or status_of(error) == 400:
                    raise
                raise ObjectNotFoundError(
                    "no such object", url=self.url, key=key, operation="info"
                ) from error

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        start = self._root + check_prefix(prefix)
        with self._request("list") as (clients, _):
            return sorted_infos(self._relative(clients.lister.objects(start, operation="list")))

    def list_children(self, prefix: str = "") -> Listing:
        """See :meth:`Store.list_children`."""
        start = self._root + check_prefix(prefix)
        with self._request("list_children") as (clients, _):
            objects, names = clients.lister.level(start, operation="list_children")
            infos = sorted_infos(self._relative(objects))
        return Listing(tuple(infos), tuple(sorted(name[len(start) : -1] for name in names)))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """See :meth:`Store.delete`; a missing bucket, or a store that is down, raises instead."""
        paths = {check_key(key): self._root + key for key in keys}
        if not paths:
            return ()
        try:
            with self._request("delete") as (clients, _):
                obstore.delete(clients.once, [*paths.values()])
        except (BucketNotFoundError, StoreUnavailableError):
            raise
        except StoreError as error:
            is_of_batch = self._is_of_the_batch(error)
            if is_of_batch and isinstance(error, AccessDeniedError):
                return [DeleteFailure(key, error) for key in paths]
            failures = (self._delete_one(key, is_single=is_of_batch) for key in paths)
            return [failure for failure in failures if failure is not None]
        return ()

    def _is_of_the_batch(self, error: StoreError) -> bool:
        """Whether a refusal is one of S3's for all keys: those of single keys come in a successful answer."""
        is_batch = self._location.scheme == "s3" and not self._settings.config.get("disable_bulk_delete")
        return is_batch and error.__cause__ is not None and status_of(error.__cause__) is not None

    def copy(self, source: str, target: str) -> None:
        """See :meth:`Store.copy`; two more requests. Above 5 GiB S3 needs boto3."""
        size_bytes = self.info(source).size_bytes
        path = self._root + check_key(target)
        if size_bytes > MAX_COPY_BYTES and self._location.scheme == "s3":
            self.open_uploads().copy(self._root + source, path)
            return
        with self._request("copy", source) as (clients, source_path):
            obstore.copy(clients.bodies, source_path, path)
        self._check_copied(target, size_bytes)

    def _check_copied(self, target: str, size_bytes: int) -> None:
        """Raise StoreUnavailableError where a copy that was reported is not there."""
        with contextlib.suppress(ObjectNotFoundError):
            if self.info(target).size_bytes == size_bytes:
                return
        raise StoreUnavailableError(
            "the store reported a copy that it did not make", url=self.url, key=target, operation="copy"
        )

    def list_leftovers(self) -> Sequence[Leftover]:
        """See :meth:`Store.list_leftovers`: the open multipart uploads of S3.

        Elsewhere none can be listed. Azure drops blocks that were never committed after a week; on GCS a
        lifecycle rule of the bucket (``AbortIncompleteMultipartUpload``) has to.
        """
        with self._request("list_leftovers"):
            if self._location.scheme != "s3":
                return ()
            # Anew for each listing: the credentials of a role are those of this moment.
            self._uploads = self._open_uploads(self._retry)
            return leftovers_of(self._uploads.list_open(self._root), self._root)

    def remove_leftover(self, leftover: Leftover) -> None:
        """See :meth:`Store.remove_leftover`: aborts the upload."""
        with self._request("remove_leftover", leftover.key) as (_, path):
            if self._location.scheme != "s3" or leftover.kind != "upload":
                return super().remove_leftover(leftover)
            uploads = self._uploads or self._open_uploads(self._retry)
            uploads.abort_by_id(path, leftover.upload_id)

    def clock(self) -> datetime:
        """See :meth:`Store.clock`.

        S3: one request, to whole seconds. Elsewhere a small object is written, looked at and removed.
        """
        if self._location.scheme != "s3" or self._settings.config.get("skip_signature"):
            return self._marker_time()
        with self._request("clock", ".clock") as (clients, path):
            signed_url = obstore.sign(clients.once, "HEAD", path, timedelta(minutes=5))
            return read_date(signed_url, client=clients.http, url=self.url)

    def open_uploads(self) -> S3Uploads:
        """Return the bucket's multipart uploads (S3 only); their keys start with the store's own prefix.

        Raises:
            MissingDependencyError: boto3 is not installed.
            ConfigError: The store is not S3.
        """
        if self._location.scheme != "s3":
            raise ConfigError("open uploads can be listed on S3 only", url=self.url)
        return self._open_uploads()

    def close(self) -> None:
        """Drop the clients; further calls raise ConfigError."""
        if self._clients is not None:
            self._clients.close()
        self._clients = None

    def _open_uploads(self, retry: RetryOptions | None = None) -> S3Uploads:
        return s3_uploads(self._location.bucket, self._settings, url=self.url, retry=retry)

    @contextmanager
    def _request(self, operation: str, key: str | None = None) -> Iterator[tuple[Clients, str]]:
        """Give the clients and the key's path in the bucket; raise obstore's errors as ours."""
        check_process(self.url)
        if self._clients is None:
            raise ConfigError("the store is closed", url=self.url)
        try:
            yield self._clients, self._root + ("" if key is None else check_key(key))
        except RemoteCkptError:
            raise
        except DRIVER_ERRORS as error:
            raise translate(error, operation=operation, url=self.url, key=key) from redacted(error)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of pyo3: it cannot be imported
                raise
            message = f"{operation} failed inside of obstore"
            raise StoreError(message, url=self.url, key=key, operation=operation) from None

    def _send(
        self, key: str, chunks: CheckedChunks, size_bytes: int, part_bytes: int, concurrency: int
    ) -> None:
        with self._request("write_stream", key) as (clients, path):
            if size_bytes <= part_bytes:
                obstore.put(clients.bodies, path, _not_empty(chunks.joined()), use_multipart=False)
                return
            obstore.put(
                clients.parts,
                path,
                iter(chunks),
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=concurrency,
            )

    def _relative(self, infos: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
        return (replace(info, key=info.key[len(self._root) :]) for info in infos)

    def _delete_one(self, key: str, *, is_single: bool = False) -> DeleteFailure | None:
        try:
            with self._request("delete", key) as (clients, path):
                obstore.delete(clients.single if is_single else clients.once, path)
        except ObjectNotFoundError:
            return None
        except StoreError as error:
            return DeleteFailure(key, error)
        return None

    def _marker_time(self) -> datetime:
        marker = f".clock-{secrets.token_hex(8)}"
        self.write(marker, b"time")
        try:
            return self.info(marker).modified_at
        finally:
            self._delete_one(marker)


def _fill(out: memoryview, pieces: Iterable[Any]) -> int:
    """Put pieces into ``out``; returns how many bytes came, which are more than ``out`` holds at times."""
    filled = 0
    for piece in pieces:
        data = memoryview(piece)
        end = filled + len(data)
        if end > len(out):
            return end
        out[filled:end] = data
        filled = end
    return filled


def _not_empty(data: Buffer) -> Buffer:
    if not len(data):
        raise ConfigError("objects must not be empty")
    return data
