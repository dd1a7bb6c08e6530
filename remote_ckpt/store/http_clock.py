"""The time by a store's own clock, from the ``Date`` header of its answer (RFC 9110, section 6.6.1)."""

from __future__ import annotations

from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from remote_ckpt.errors import StoreUnavailableError
from remote_ckpt.store.http_client import HttpClient


def read_date(signed_url: str, *, client: HttpClient, url: str) -> datetime:
    """Return the store's time (UTC, whole seconds) with one HEAD request.

    Args:
        signed_url: A URL of the store; whether there is an object does not matter.
        client: Sends the request.
        url: Redacted URL for messages.

    Raises:
        StoreUnavailableError, StoreTimeoutError: No answer, a server error, or an answer without a date.
    """
    answer = client.send("HEAD", signed_url, url=url, operation="clock")
    if answer.status >= 500:
        raise StoreUnavailableError(f"the store answered {answer.status}", url=url, operation="clock")
    try:
        return parsedate_to_datetime(answer.headers["Date"]).astimezone(timezone.utc)
    except (TypeError, ValueError) as error:
        raise StoreUnavailableError("the store's answer has no date", url=url, operation="clock") from error
