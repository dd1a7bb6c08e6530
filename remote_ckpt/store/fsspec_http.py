"""Files of a web server: read by their URL, never listed or written.

What fsspec's HTTP file system does that this adapter avoids, each found by trying (fsspec 2026.9):

- it tells no time of a file, and calls every failure of ``info`` "not found"
- it takes the whole file for the range it asked for, where a server knows no ranges
- it lists a page's links as files without a size
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Final, NoReturn, TypeVar

from fsspec.asyn import sync

from remote_ckpt.errors import UnsupportedStoreError
from remote_ckpt.options import RetryOptions, TransferOptions
from remote_ckpt.store.base import Buffer, DeleteFailure, Listing, ObjectInfo
from remote_ckpt.store.chunks import SLOWEST_BYTES_PER_SECOND
from remote_ckpt.store.fsspec import FsspecStore
from remote_ckpt.url import Location

T = TypeVar("T")
_TOTAL: Final = re.compile(r"bytes \d+-\d+/(\d+)", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)


class HttpStore(FsspecStore):
    """Files below one URL. Made by :func:`~remote_ckpt.store.fsspec.open_fsspec_store`.

    A server that knows no ranges sends the whole file: the last such file is kept, or each range would
    fetch it again.
    """

    def __init__(
        self, location: Location, file_system: Any, transfer: TransferOptions, retry: RetryOptions
    ) -> None:
        super().__init__(location, file_system, transfer)
        self._request_seconds = retry.request_seconds
        self._whole: tuple[str, bytes] | None = None
        self._whole_lock = threading.Lock()

    def info(self, key: str) -> ObjectInfo:
        """See :meth:`Store.info`; the time is 1970 where the server tells none."""
        with self._request("info", key) as (_, path):
            headers, size_bytes = self._look(path)
            if size_bytes is None:  # only reading it tells
                size_bytes = len(self._fetch_whole(path))
        return ObjectInfo(key, size_bytes, _time(headers.get("Last-Modified")))

    def list(self, prefix: str = "") -> NoReturn:
        """Raise UnsupportedStoreError."""
        raise self._unsupported(
            "list",
            "a web server has no listing to find checkpoints in: give the URL of one file of weights, or "
            "copy the checkpoint to a folder or a bucket",
        )

    def list_children(self, prefix: str = "") -> Listing:
        """Raise UnsupportedStoreError."""
        self.list(prefix)

    def write(self, key: str, data: Buffer) -> None:
        """Raise UnsupportedStoreError."""
        raise self._unsupported("write", "a web server can only be read: save to a folder or a bucket")

    def copy(self, source: str, target: str) -> None:
        """Raise UnsupportedStoreError."""
        self.write(target, b"")

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """Raise UnsupportedStoreError, unless there is nothing to delete."""
        if keys:
            raise self._unsupported("delete", "a web server can only be read")
        return ()

    def close(self) -> None:
        """See :meth:`FsspecStore.close`."""
        super().close()
        self._whole = None

    def _unsupported(self, operation: str, message: str) -> UnsupportedStoreError:
        return UnsupportedStoreError(message, url=self.url, operation=operation)

    def _fetch(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if start is None or end is None:
            return self._fetch_whole(path)
        if (whole := self._kept(path)) is not None:
            return whole[start:end]
        part = self._get(path, (start, end))
        return self._fetch_whole(path)[start:end] if part is None else part

    def _fetch_whole(self, path: str) -> bytes:
        with self._whole_lock:  # threads that ask for ranges wait for one transfer of it
            if (whole := self._kept(path)) is None:
                whole = self._get(path, None) or b""
                self._whole = (path, whole)
            return whole

    def _kept(self, path: str) -> bytes | None:
        kept = self._whole
        return kept[1] if kept is not None and kept[0] == path else None

    def _look(self, path: str) -> tuple[Mapping[str, str], int | None]:
        """Return a file's headers and its size, if they tell it.

        Asks for its first byte: URLs that are signed for GET refuse a HEAD.
        """

        async def ask() -> tuple[Mapping[str, str], int | None]:
            async with await self._asked(path, (0, 1)) as answer:
                if answer.status != 206:
                    return answer.headers, answer.content_length
                total = _TOTAL.fullmatch(answer.headers.get("Content-Range", ""))
                return answer.headers, int(total[1]) if total else None

        found: tuple[Mapping[str, str], int | None] = sync(self._fs.loop, self._in_time, ask, 0)
        return found

    def _get(self, path: str, span: tuple[int, int] | None) -> bytes | None:
        """Return a range or the whole; None where the server would send the whole for a range."""

        async def ask() -> bytes | None:
            async with await self._asked(path, span) as answer:
                return bytes(await answer.read()) if span is None or answer.status == 206 else None

        size_bytes = span[1] - span[0] if span else self._budget_bytes
        found: bytes | None = sync(self._fs.loop, self._in_time, ask, size_bytes)
        return found

    async def _in_time(self, ask: Callable[[], Coroutine[Any, Any, T]], size_bytes: int) -> T:
        return await asyncio.wait_for(ask(), self._request_seconds + size_bytes / SLOWEST_BYTES_PER_SECOND)

    async def _asked(self, path: str, span: tuple[int, int] | None) -> Any:
        """Send a GET; returns its answer, whose status is a success, with the body still to come."""
        options = dict(self._fs.kwargs)
        headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        session = await self._fs.set_session()
        answer = await session.get(self._fs.encode_url(path), headers=headers, **options)
        try:
            answer.raise_for_status()
        except Exception:
            answer.release()
            raise
        return answer


def _time(text: str | None) -> datetime:
    try:
        found = parsedate_to_datetime(text or "")
    except ValueError:
        return _EPOCH
    return found.astimezone(timezone.utc) if found.tzinfo else found.replace(tzinfo=timezone.utc)
