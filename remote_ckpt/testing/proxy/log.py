"""What passed through a proxy, in order, readable while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from remote_ckpt.testing.proxy.exchange import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxiedRequest:
    """One request, and what became of it until now.

    Args:
        method: ``"GET"``, ...
        operation: What S3 calls it: ``"PutObject"``, ...
        path: Its path, escaped, without the query.
        query: Its query, escaped, without ``?``.
        headers: Its headers, names in lower case.
        status: What the client was answered; None where it was not (yet).
        store_status: What the store answered; None where it was not asked, or has not answered.
        received_bytes: Bytes of the request's body that were read.
        sent_bytes: Bytes of the answer's body that were sent.
        faults: The faults that it met, by their names.
    """

    method: str
    operation: str
    path: str
    query: str
    headers: Mapping[str, str] = field(repr=False)
    status: int | None = None
    store_status: int | None = None
    received_bytes: int = 0
    sent_bytes: int = 0
    faults: tuple[str, ...] = ()

    @property
    def is_listing(self) -> bool:
        """Whether it asks for ListObjectsV2."""
        return self.operation == "ListObjectsV2"


class RequestLog:
    """The requests of a proxy; safe for threads.

    Args:
        on_done: Is told of each request when it is over; the request is then forgotten.
    """

    def __init__(self, on_done: Callable[[ProxiedRequest], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._on_done = on_done
        self._requests: dict[int, ProxiedRequest] = {}

    @property
    def requests(self) -> tuple[ProxiedRequest, ...]:
        """The requests since the last :meth:`clear`, in the order of their arrival."""
        with self._lock:
            return tuple(self._requests.values())

    def clear(self) -> None:
        """Forget what passed until now."""
        with self._lock:
            self._requests.clear()

    def begin(self, call: Call) -> None:
        """Note a request that has just arrived."""
        request = ProxiedRequest(
            method=call.method,
            operation=call.operation,
            path=call.path,
            query=call.query,
            headers=call.headers,
        )
        with self._lock:
            self._requests[call.number] = request

    def update(self, number: int, **changes: Any) -> None:
        """Note what became of a request, in its fields; one that was forgotten stays so."""
        with self._lock:
            if number in self._requests:
                self._requests[number] = replace(self._requests[number], **changes)

    def add_fault(self, number: int, name: str) -> None:
        """Note that a request has met a fault."""
        with self._lock:
            if number in self._requests:
                request = self._requests[number]
                self._requests[number] = replace(request, faults=(*request.faults, name))

    def finish(self, number: int) -> None:
        """Note that the client has got all that it will get."""
        if self._on_done is None:
            return
        with self._lock:
            request = self._requests.pop(number, None)
        if request is not None:
            self._on_done(request)
