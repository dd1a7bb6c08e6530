"""S3 through s3fs, with requests named where s3fs's own verbs send or report them wrongly.

s3fs sends the parts of an open file one after the other, and publishes the file when an exception leaves
it; its batch delete drops the errors of single keys; its listings ask more than they need. Here parts go
up in parallel and are aborted on any failure, and answers are read whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime, timezone
from typing import Any, Final

from fsspec.asyn import sync

from remote_ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from remote_ckpt.options import RetryOptions, TransferOptions
from remote_ckpt.store.base import (
    ChunkSource,
    DeleteFailure,
    Leftover,
    Listing,
    ObjectInfo,
    check_key,
    check_prefix,
    is_key,
    sorted_infos,
)
from remote_ckpt.store.boto_errors import translate_answer
from remote_ckpt.store.chunks import SLOWEST_BYTES_PER_SECOND, CheckedChunks, cut_parts, plan_part_bytes
from remote_ckpt.store.credentials import current_keys
from remote_ckpt.store.fsspec import FsspecStore, open_file_system
from remote_ckpt.store.http_client import HttpClient
from remote_ckpt.store.http_clock import read_date
from remote_ckpt.store.http_errors import no_listing_message
from remote_ckpt.store.obstore_options import ENDPOINT_VARIABLES, plan_s3
from remote_ckpt.store.option_checks import check_endpoint, check_mappings
from remote_ckpt.store.s3_uploads import abort_upload, leftovers_of, list_uploads
from remote_ckpt.url import Location, redact_url

_log = logging.getLogger("remote_ckpt")

_DELETE_BATCH: Final = 1_000
_PART_TRIES: Final = 3


def plan_s3fs_options(given: Mapping[str, Any], retry: RetryOptions) -> dict[str, Any]:
    """Return s3fs's options: the user's, without caches, each request sent once, with our time-outs.

    Below all settings aiohttp repeats one request whose reused connection was closed without an answer; a
    create may then report its own success as a conflict, as the contract of :meth:`Store.create` allows.

    Raises:
        ConfigError: An endpoint that cannot be one, or an option of the wrong type.
    """
    check_mappings(given)
    _check_endpoints(given)
    config = {
        "connect_timeout": min(retry.connect_seconds, retry.total_seconds),
        "read_timeout": min(retry.request_seconds, retry.total_seconds),
        **_checksum_settings(given),
        **(given.get("config_kwargs") or {}),
        # Who retries is RetryStore; a create that botocore sends again reports its own success as a conflict.
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    return {"use_listings_cache": False, **given, "config_kwargs": config}


def open_s3fs_store(
    location: Location, *, storage_options: Mapping[str, Any], retry: RetryOptions, transfer: TransferOptions
) -> S3fsStore:
    """Return the store at an ``s3`` location as :func:`~remote_ckpt.store.fsspec.open_fsspec_store` does."""
    given = {**location.options, **storage_options}
    file_system = open_file_system(location, plan_s3fs_options(given, retry))
    return S3fsStore(location, file_system, transfer, retry, _find_keys(location, given))


def _find_keys(location: Location, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the keys that s3fs finds by the same options; None if we cannot tell."""
    with contextlib.suppress(Exception):  # what is wrong with them, s3fs says in its own time
        return current_keys(plan_s3(location.bucket, given, os.environ).provider)
    return None


def _check_endpoints(given: Mapping[str, Any]) -> None:
    """Check all endpoints that botocore may take: it repeats a malformed one in its errors."""
    sources = {"endpoint_url": given, **dict.fromkeys(ENDPOINT_VARIABLES, os.environ)}
    for name, source in (*sources.items(), ("endpoint_url", given.get("client_kwargs") or {})):
        if source.get(name):
            check_endpoint(source[name], option=name)


def _checksum_settings(given: Mapping[str, Any]) -> dict[str, str]:
    """Return settings that keep botocore from adding checksums that compatible stores reject (since 1.36)."""
    from botocore.config import Config

    names = ("request_checksum_calculation", "response_checksum_validation")
    is_custom = given.get("endpoint_url") or (given.get("client_kwargs") or {}).get("endpoint_url")
    return {name: "when_required" for name in names if is_custom and name in Config.OPTION_DEFAULTS}


class S3fsStore(FsspecStore):
    """One prefix of a bucket, through s3fs. Made by :func:`~remote_ckpt.store.fsspec.open_fsspec_store`."""

    def __init__(
        self,
        location: Location,
        file_system: Any,
        transfer: TransferOptions,
        retry: RetryOptions,
        keys: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(location, file_system, transfer)
        self._keys = keys
        file_system.retries = 1  # s3fs repeats what botocore gave up
        self._request_seconds = retry.request_seconds
        self._total_seconds = retry.total_seconds
        self._http = HttpClient(
            timeout_seconds=min(retry.request_seconds, retry.total_seconds),
            verify=file_system.client_kwargs.get("verify"),
        )

    def credentials(self) -> Mapping[str, Any] | None:
        """See :meth:`.renewal.CredentialedStore.credentials`: those that were found when it was opened."""
        return self._keys

    @property
    def identity(self) -> str:
        """See :attr:`Store.identity`."""
        with self._request("identity") as (fs, _):
            return f"s3fs {redact_url(str(fs.s3.meta.endpoint_url))} {self._location.bucket}"

    def write_stream(
        self,
        key: str,
        source: ChunkSource,
        *,
        size_bytes: int,
        part_bytes: int,
        concurrency: int,
    ) -> None:
        """See :meth:`Store.write_stream`; up to ``concurrency`` parts are held in memory."""
        chunks = CheckedChunks(source, size_bytes, url=self.url, key=key)
        part_bytes = plan_part_bytes(size_bytes, part_bytes)
        if size_bytes <= part_bytes:
            self.write(key, chunks.joined())
        else:
            chunks.feed(lambda: self._upload(key, cut_parts(chunks, part_bytes), concurrency))

    def info(self, key: str) -> ObjectInfo:
        """See :meth:`Store.info`."""
        with self._request("info", key):
            try:
                found = self._call("head_object", Key=self._path_in_bucket(key))
            except OSError as error:
                if _status_of(error) not in (400, 404):
                    raise
                # An answer to HEAD has no body: a listing tells a missing bucket, an expired token, and the
                # 404 of something between here and the store.
                if self._is_listed(key) or _status_of(error) == 400:
                    raise
                message = "no such object"
                raise ObjectNotFoundError(message, url=self.url, key=key, operation="info") from error
        return _info(key, found["ContentLength"], found["LastModified"])

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        start = self._path_in_bucket("") + check_prefix(prefix)
        with self._request("list"):
            return sorted_infos(info for page in self._pages(start) for info in self._contents(page, start))

    def list_children(self, prefix: str = "") -> Listing:
        """See :meth:`Store.list_children`."""
        start = self._path_in_bucket("") + check_prefix(prefix)
        with self._request("list_children"):
            pages = [*self._pages(start, Delimiter="/")]
            infos = sorted_infos(info for page in pages for info in self._contents(page, start))
            found = [each["Prefix"] for page in pages for each in page.get("CommonPrefixes", ())]
            names = [_below(name, start)[:-1] for name in found]
        return Listing(tuple(infos), tuple(sorted(name for name in names if is_key(name))))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """See :meth:`Store.delete`; one request for each thousand keys, if the store takes batches."""
        wanted = [check_key(key) for key in dict.fromkeys(keys)]
        batches = [wanted[i : i + _DELETE_BATCH] for i in range(0, len(wanted), _DELETE_BATCH)]
        return [failure for batch in batches for failure in self._delete_batch(batch)]

    def list_leftovers(self) -> Sequence[Leftover]:
        """See :meth:`Store.list_leftovers`: open multipart uploads."""
        root = self._path_in_bucket("")
        with self._request("list_uploads"):
            return leftovers_of(list_uploads(self._call, root), root)

    def remove_leftover(self, leftover: Leftover) -> None:
        """See :meth:`Store.remove_leftover`: aborts the upload."""
        if leftover.kind != "upload":
            return super().remove_leftover(leftover)
        with self._request("abort_upload", leftover.key):
            abort_upload(self._call, self._path_in_bucket(check_key(leftover.key)), leftover.upload_id)

    def clock(self) -> datetime:
        """See :meth:`Store.clock`; one request, to whole seconds."""
        if self._fs is not None and self._fs.anon:
            return super().clock()
        with self._request("clock", ".clock") as (fs, path):
            signed_url = fs.url(path, expires=300, client_method="head_object")
            return read_date(signed_url, client=self._http, url=self.url)

    def _fetch(self, path: str, start: int | None = None, end: int | None = None) -> object:
        # s3fs would ask for the size first, with a HEAD whose refusal has no body to say why.
        span = {} if start is None or end is None else {"Range": f"bytes={start}-{end - 1}"}
        return sync(self._fs.loop, self._get, Key=self._in_bucket(path), **span)

    async def _get(self, **arguments: Any) -> object:
        answer = await self._send("get_object", arguments)
        async with answer["Body"] as body:
            return await body.read()

    def _put(self, path: str, data: bytes, *, is_create: bool) -> None:
        condition = {"IfNoneMatch": "*"} if is_create else {}
        self._call("put_object", Key=self._in_bucket(path), Body=data, **condition)

    def _call(self, method: str, **arguments: Any) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = sync(self._fs.loop, self._send, method, arguments)
        return answer

    async def _send(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Send one request; returns once its answer's head is there."""
        # aiohttp's time-outs do not cover its wait for "100 Continue", which a silent server never sends.
        body_seconds = len(arguments.get("Body", b"")) / SLOWEST_BYTES_PER_SECOND
        seconds = min(self._request_seconds + body_seconds, self._total_seconds)
        sent = self._fs._call_s3(method, Bucket=self._location.bucket, **arguments)
        return await asyncio.wait_for(sent, seconds)

    def _path_in_bucket(self, key: str) -> str:
        return self._root[len(self._location.bucket) + 1 :] + key

    def _in_bucket(self, path: str) -> str:
        return path[len(self._location.bucket) + 1 :]

    def _check_bucket(self, operation: str) -> None:
        # As a listing: none is answered by the absence of an object, which would lead here again.
        with self._request("list"):
            self._page(Prefix=self._path_in_bucket(""), MaxKeys=1)

    def _is_listed(self, key: str) -> bool:
        path = self._path_in_bucket(key)
        with self._request("list"):
            page = self._page(Prefix=path, MaxKeys=1)
        return any(found.get("Key") == path for found in page.get("Contents", ()))

    def _pages(self, prefix: str, **arguments: Any) -> Iterator[Mapping[str, Any]]:
        page = self._page(Prefix=prefix, **arguments)
        yield page
        seen = set()
        while page["IsTruncated"]:
            token = page["NextContinuationToken"]
            if token in seen:
                raise self._no_listing("the same page came twice")
            seen.add(token)
            page = self._page(Prefix=prefix, ContinuationToken=token, **arguments)
            yield page

    def _page(self, **arguments: Any) -> Mapping[str, Any]:
        """Return a page that is one: botocore takes any XML, HTML or nothing for an empty listing."""
        page = self._call("list_objects_v2", **arguments)
        status = page["ResponseMetadata"]["HTTPStatusCode"]
        if status != 200 or not page.get("Name") or "IsTruncated" not in page:
            raise self._no_listing("it lacks a listing's fields")
        if page["IsTruncated"] and not page.get("NextContinuationToken"):
            raise self._no_listing("it is incomplete and has no token to go on")
        return page

    def _no_listing(self, reason: str) -> StoreUnavailableError:
        return StoreUnavailableError(no_listing_message(reason), url=self.url, operation="list")

    def _contents(self, page: Mapping[str, Any], prefix: str) -> Iterator[ObjectInfo]:
        root = self._path_in_bucket("")
        for found in page.get("Contents", ()):
            key = _below(found["Key"], prefix)
            if found["Size"] < 0:
                raise ValueError(f"an object of {found['Size']} bytes")
            if is_key(key):
                yield _info(found["Key"][len(root) :], found["Size"], found["LastModified"])

    def _delete_batch(self, keys: Sequence[str]) -> Iterator[DeleteFailure]:
        objects = [{"Key": self._path_in_bucket(key)} for key in keys]
        try:
            with self._request("delete"):
                answer = self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
        except (BucketNotFoundError, StoreUnavailableError, AccessDeniedError):
            raise
        except StoreError:  # not all that speak S3 know batches
            yield from super().delete(keys)
            return
        root = self._path_in_bucket("")
        for refused in answer.get("Errors", ()):
            key = refused["Key"][len(root) :]
            error = translate_answer({"Error": refused}, operation="delete", url=self.url, key=key)
            if not isinstance(error, ObjectNotFoundError):
                yield DeleteFailure(key, error)

    def _upload(self, key: str, parts: Iterator[bytes], concurrency: int) -> None:
        target = {"Key": self._path_in_bucket(check_key(key))}
        with self._request("write_stream", key):
            self._upload_to(target, parts, concurrency)

    def _upload_to(self, target: dict[str, str], parts: Iterator[bytes], concurrency: int) -> None:
        target["UploadId"] = self._call("create_multipart_upload", **target)["UploadId"]
        try:
            sent = self._send_parts(target, parts, concurrency)
            self._call("complete_multipart_upload", MultipartUpload={"Parts": sent}, **target)
        except BaseException:
            self._abort(target)
            raise

    def _send_parts(
        self, target: Mapping[str, Any], parts: Iterator[bytes], concurrency: int
    ) -> Sequence[Mapping[str, Any]]:
        running: set[Future[Mapping[str, Any]]] = set()
        sent = []
        with ThreadPoolExecutor(concurrency, thread_name_prefix="s3fs-part") as pool:
            for number, body in enumerate(parts, 1):
                running.add(pool.submit(self._send_part, target, number, body))
                if len(running) >= concurrency:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    sent += [each.result() for each in done]
            sent += [each.result() for each in running]
        return sorted(sent, key=lambda part: part["PartNumber"])

    def _send_part(self, target: Mapping[str, Any], number: int, body: bytes) -> Mapping[str, Any]:
        # The one retry below RetryStore: above, the whole object would be sent anew.
        for _ in range(_PART_TRIES - 1):
            with contextlib.suppress(StoreUnavailableError):
                return self._send_part_once(target, number, body)
        return self._send_part_once(target, number, body)

    def _send_part_once(self, target: Mapping[str, Any], number: int, body: bytes) -> Mapping[str, Any]:
        with self._request("write_stream", target["Key"][len(self._path_in_bucket("")) :]):
            answer = self._call("upload_part", PartNumber=number, Body=body, **target)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def _abort(self, target: Mapping[str, Any]) -> None:
        try:
            self._call("abort_multipart_upload", **target)
        except Exception as error:  # the failure that led here is raised; the sweep finds what is left
            _log.warning("the upload of %s could not be aborted: %s", target["Key"], type(error).__name__)


def _status_of(error: OSError) -> int | None:
    answer: Mapping[str, Any] = getattr(error.__cause__, "response", None) or {}
    status: int | None = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _below(found: str, prefix: str) -> str:
    if not found.startswith(prefix):
        raise StoreUnavailableError(no_listing_message("it has keys outside of the prefix"), operation="list")
    return found[len(prefix) :]


def _info(key: str, size_bytes: int, modified_at: datetime) -> ObjectInfo:
    # HEAD gives whole seconds, listings of some servers more: one object has one time.
    return ObjectInfo(key, size_bytes, modified_at.astimezone(timezone.utc).replace(microsecond=0))
