"""One HTTP request and its whole answer, for where a client library hides what the store said.

A connection serves one request: no pool to share between threads, nothing that a ``fork`` could break.
Redirects are not followed: a signature is for one host only.
"""

from __future__ import annotations

import functools
import http.client
import ssl
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final

from remote_ckpt.errors import StoreTimeoutError, StoreUnavailableError
from remote_ckpt.store.http_errors import reach_advice
from remote_ckpt.url import redact_url

MAX_BODY_BYTES: Final = 16 * 1024 * 1024
"""Longest body read: a thousand keys of a kibibyte, each byte escaped, are below 4 MiB."""

_PIECE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered, whatever its status."""

    status: int
    headers: Message
    body: bytes


class HttpClient:
    """Sends requests without a body.

    Args:
        timeout_seconds: Longest time for one request, its answer's body included.
        verify: File of the CA to trust, False to trust every certificate, None for the system's roots.
        client_options: obstore's; ``proxy_url``, ``root_certificate`` and ``allow_invalid_certificates``
            are honoured. Proxies of the environment are too.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        verify: str | bool | None = None,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._verify = verify
        self._options = client_options or {}

    def send(
        self, method: str, target: str, *, headers: Mapping[str, str] | None = None, url: str, operation: str
    ) -> Answer:
        """Send one request, once, and return its answer.

        Args:
            method: ``"GET"`` or ``"HEAD"``.
            target: The full URL; it may be signed, and is never shown.
            headers: Headers of the request.
            url: Redacted URL for messages.
            operation: The verb for messages.

        Raises:
            StoreUnavailableError, StoreTimeoutError: No answer, no HTTP, or more than MAX_BODY_BYTES.
        """
        where: dict[str, Any] = {"url": url, "operation": operation}
        try:
            return self._send(urllib.request.Request(target, headers=dict(headers or {}), method=method))
        except TimeoutError:
            raise StoreTimeoutError("the store did not answer in time", **where) from None
        except (OSError, http.client.HTTPException, UnicodeError, _BodyError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise StoreTimeoutError("the store did not answer in time", **where) from None
            # No cause is chained: its text or frames may hold the signed URL.
            message = f"the store did not answer: {_described(reason)}"
            if isinstance(reason, OSError):
                message += f"; {reach_advice(f'{target} {reason}')}"
            raise StoreUnavailableError(message, **where) from None

    def _send(self, request: urllib.request.Request) -> Answer:
        ends = time.monotonic() + self._timeout_seconds
        opener = self._tls_opener if request.type == "https" else self._opener
        with opener.open(request, timeout=self._timeout_seconds) as answer:
            return Answer(answer.status, answer.headers, _read_until(answer, ends))

    @functools.cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        return self._make_opener()

    @functools.cached_property
    def _tls_opener(self) -> urllib.request.OpenerDirector:
        # Not for http: to read the system's roots takes 0.1 s, more than all else before a load.
        return self._make_opener(urllib.request.HTTPSHandler(context=self._tls()))

    def _make_opener(self, *more: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
        handlers = [_EveryAnswer(), *more]
        if proxy := self._options.get("proxy_url"):
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        return urllib.request.build_opener(*handlers)

    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._verify if isinstance(self._verify, str) else None)
        if certificate := self._options.get("root_certificate"):
            context.load_verify_locations(
                cadata=certificate.decode("ascii") if isinstance(certificate, bytes) else certificate
            )
        if self._verify is False or self._options.get("allow_invalid_certificates"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


class _BodyError(Exception):
    pass


class _EveryAnswer(urllib.request.HTTPErrorProcessor):
    """Hands every answer on: errors and redirects are the caller's to judge."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def _read_until(answer: Any, ends: float) -> bytes:
    """Return the body; a server that drips it for ever, or sends far too much, is given up."""
    pieces, size_bytes = [], 0
    while piece := answer.read(_PIECE_BYTES):
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes > MAX_BODY_BYTES:
            raise _BodyError(f"its body is longer than {MAX_BODY_BYTES} bytes")
        if time.monotonic() > ends:
            raise TimeoutError
    _check_complete(answer)
    return b"".join(pieces)


def _check_complete(answer: Any) -> None:
    # Reading in pieces, http.client takes a connection that ends early for the end of the body.
    if answer.length:
        raise _BodyError(f"its body ended {answer.length} bytes early")


def _described(reason: object) -> str:
    return redact_url(str(reason).strip())[:200] or type(reason).__name__
