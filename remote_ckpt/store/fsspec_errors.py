"""What fsspec's file systems raise, in our words.

Each wraps its client's exceptions in its own way, mostly as a bare ``OSError``; the answer of the store,
where there was one, is found along the chain of causes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from typing import Any, Final

from remote_ckpt.errors import (
    AccessDeniedError,
    ForkedProcessError,
    ObjectExistsError,
    ObjectNotFoundError,
    RemoteCkptError,
    StorageFullError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.store.boto_errors import translate_answer, translate_client_side
from remote_ckpt.store.http_errors import describe, error_type
from remote_ckpt.url import redact_url

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_BUILT_IN: Final[tuple[tuple[type[Exception], type[StoreError]], ...]] = (
    (FileNotFoundError, ObjectNotFoundError),
    (FileExistsError, ObjectExistsError),
    (PermissionError, AccessDeniedError),
    (TimeoutError, StoreTimeoutError),
    (asyncio.TimeoutError, StoreTimeoutError),  # another class before Python 3.11
    (OSError, StoreUnavailableError),
)


def translate(error: Exception, *, operation: str, url: str, key: str | None = None) -> RemoteCkptError:
    """Return our error for one that a file system raised."""
    where: dict[str, Any] = {"operation": operation, "url": url, "key": key and redact_url(key)}
    chain = list(_chain(error))
    for each in chain:
        if isinstance(response := getattr(each, "response", None), dict):
            return translate_answer(response, **where)
    for each in chain:
        is_client = type(each).__module__.startswith(("botocore.", "aiobotocore.", "aiohttp."))
        if is_client and _status(each) is None:
            return translate_client_side(each, **where)
    for each in chain:
        if (status := _status(each)) is not None:
            return _from_status(each, status, **where)
    return _from_built_in(error, **where)


def shows_no_secret(error: Exception) -> bool:
    """Whether an error can be chained: clients put signed URLs into their texts."""
    return all(redact_url(str(each)) == str(each) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[Exception]:
    while isinstance(error, Exception):
        yield error
        error = error.__cause__ or error.__context__


def _status(error: Exception) -> int | None:
    """Return the HTTP status that gcsfs, Azure's SDK and aiohttp keep under different names."""
    for name in ("status_code", "status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int | str) and str(value).isdigit() and 300 <= int(value) < 600:
            return int(value)
    return None


def _from_status(
    error: Exception, status: int, *, operation: str, url: str, key: str | None
) -> RemoteCkptError:
    code = getattr(error, "error_code", None)
    kind = error_type(status, str(code) if code else None, operation=operation)
    if status in (404, 410) and url.startswith(("http://", "https://")):
        kind = ObjectNotFoundError  # all that a web server can say; a store would name the missing key
    detail = redact_url(str(error))[:300]
    message = describe(kind, operation=operation, key=key, status=status, code=code, detail=detail)
    return kind(message, url=url, key=key, operation=operation)


def _from_built_in(error: Exception, *, operation: str, url: str, key: str | None) -> RemoteCkptError:
    where: dict[str, Any] = {"operation": operation, "url": url, "key": key}
    what = f"{operation} of {key!r}" if key else operation
    reason = redact_url(f"{type(error).__name__}: {error}")[:300]
    if isinstance(error, RuntimeError) and "fork-safe" in str(error):
        return ForkedProcessError("the file system was opened before this process was forked", **where)
    if isinstance(error, NotImplementedError):
        return UnsupportedStoreError(f"{what} is not supported by this file system ({reason})", **where)
    if isinstance(error, OSError) and error.errno in _FULL:
        return StorageFullError(f"{what} failed: no space or quota left", **where)
    kind = next((ours for theirs, ours in _BUILT_IN if isinstance(error, theirs)), StoreError)
    if kind is StoreTimeoutError:
        reason = "the store did not answer in time"
    return kind(f"{what} failed ({reason})", **where)
