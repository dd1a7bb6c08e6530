"""obstore's exceptions in our words.

obstore reports most failures as one class whose text holds the server's answer, so the answer's
status and code are read from the text. Nothing else of the text is repeated: it can contain signed URLs.
"""

from __future__ import annotations

import re
from typing import Final

from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError

from remote_ckpt.errors import (
    AccessDeniedError,
    ObjectExistsError,
    RemoteCkptError,
    StoreError,
    StoreTimeoutError,
)
from remote_ckpt.store.credentials import HOW_TO_SIGN
from remote_ckpt.store.http_errors import describe, error_type, reach_advice
from remote_ckpt.url import redact_url

DRIVER_ERRORS: Final = (BaseError, OSError)
"""What obstore raises: its own tree, and the built-in ``FileNotFoundError`` for a 404."""

_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>\s*(\w+)\s*</Code>|\(code: (\w+)\)")
_MESSAGE: Final = re.compile(r"<Message>\s*([^<]{1,300})")
_REASON: Final = re.compile(r"\b(?:message|error): \"([^\"]{1,200})\"")
_IS_TIMEOUT: Final = re.compile(r"kind: Timeout\b|operation timed out")
_NO_CONNECTION: Final = re.compile(r"kind: Connect\b")
_METADATA_SERVICE: Final = re.compile(
    r"169\.254\.(?:169\.254|170\.\d+)|fd00:ec2::|metadata\.google\.internal"
)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that obstore's error reports, or None if there was no answer."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def code_of(error: BaseException) -> str | None:
    """Return the error code (such as ``NoSuchBucket``) in the answer that obstore reports."""
    match = _CODE.search(str(error))
    return (match[1] or match[2]) if match else None


def translate(error: Exception, *, operation: str, url: str, key: str | None = None) -> RemoteCkptError:
    """Return our error for obstore's; the caller raises it ``from`` :func:`redacted`."""
    text, status, code = str(error), status_of(error), code_of(error)
    kind = _kind(error, text, status, code, operation)
    detail = redact_url(_detail(kind, text, status))[:300]
    hint = _hint(kind, text, status, url)
    message = describe(kind, operation=operation, key=key, status=status, code=code, detail=detail, hint=hint)
    return kind(message, url=url, key=key, operation=operation)


def redacted(error: Exception) -> Exception:
    """Return the error itself, or a copy without signatures where its text holds a signed URL."""
    text = redact_url(str(error))
    return error if text == str(error) else type(error)(text)


def _kind(
    error: Exception, text: str, status: int | None, code: str | None, operation: str
) -> type[RemoteCkptError]:
    if isinstance(error, AlreadyExistsError):
        return ObjectExistsError
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or _is_without_credentials(text):
        return AccessDeniedError
    if status is None and code is None and _IS_TIMEOUT.search(text):
        return StoreTimeoutError
    if status is None and code is None and "HTTP error" not in text:
        return StoreError
    return error_type(status, code, operation=operation)


def _is_without_credentials(text: str) -> bool:
    # Away from a cloud machine, asking its metadata service for a role is how missing keys show.
    return bool(_METADATA_SERVICE.search(text.partition("Debug source")[0]))


def _hint(kind: type[RemoteCkptError], text: str, status: int | None, url: str) -> str:
    scheme = url.partition(":")[0]
    if kind is AccessDeniedError and scheme in ("gs", "az"):  # which send unsigned what they cannot sign
        return f"check the credentials and their rights here; where there are none: {HOW_TO_SIGN[scheme]}"
    if kind is AccessDeniedError and _is_without_credentials(text):
        return HOW_TO_SIGN.get(scheme, "")
    return reach_advice(text) if status is None and _NO_CONNECTION.search(text) else ""


def _detail(kind: type[RemoteCkptError], text: str, status: int | None) -> str:
    if match := _MESSAGE.search(text):
        return match[1].strip()
    if status is not None:
        return ""
    if _is_without_credentials(text):
        return "no credentials were given, and this machine has no role"
    if kind is StoreTimeoutError:
        return "timed out"
    reason = _REASON.search(text)
    return reason[1] if reason else text.partition("\n")[0]
