"""The time by a store's own clock, from the ``Date`` header of its answer (RFC 9110, section 6.6.1)."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from datetime import datetime, timezone
from email.message import Message
from email.utils import parsedate_to_datetime

from remote_ckpt.errors import StoreTimeoutError, StoreUnavailableError


def read_date(signed_url: str, *, timeout_seconds: float, verify: str | bool | None, url: str) -> datetime:
    """Return the store's time (UTC, whole seconds) with one HEAD request.

    Args:
        signed_url: A URL of the store; whether there is an object does not matter.
        timeout_seconds: Longest wait.
        verify: File of the CA to trust, False to trust every certificate, None for the system's roots.
        url: Redacted URL for messages.

    Raises:
        StoreUnavailableError, StoreTimeoutError: No answer, a server error, or an answer without a date.
    """
    headers = _head(signed_url, timeout_seconds, verify, url)
    try:
        return parsedate_to_datetime(headers["Date"]).astimezone(timezone.utc)
    except (TypeError, ValueError) as error:
        raise StoreUnavailableError("the store's answer has no date", url=url, operation="clock") from error


def _head(signed_url: str, timeout_seconds: float, verify: str | bool | None, url: str) -> Message:
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_tls(verify)))
    request = urllib.request.Request(signed_url, method="HEAD")
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return answer.headers  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= 500:
            raise StoreUnavailableError(
                f"the store answered {error.code}", url=url, operation="clock"
            ) from None  # the error holds the signed URL
        return error.headers
    except TimeoutError:
        raise StoreTimeoutError("the store did not answer in time", url=url, operation="clock") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise StoreUnavailableError(
            f"the store did not answer: {reason}", url=url, operation="clock"
        ) from None


def _tls(verify: str | bool | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    if verify is False:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
