"""Connections that are kept for the next request: bounded, shared by threads, never by processes."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from remote_ckpt.store.direct_http import Connection, Patience

_IDLE_SECONDS: Final = 20.0
"""Servers and what stands before them drop connections that idle for longer, some without a word."""


class ConnectionPool:
    """Lends each of its connections to one thread at a time.

    What is kept open is closed by :meth:`close`, or with the pool when nobody holds it any more. A forked
    child begins with none: it would read the parent's answers.

    Args:
        connect: Opens a connection.
        limit_count: Most connections at once; who asks for more waits.
    """

    def __init__(self, connect: Callable[[Patience], Connection], *, limit_count: int) -> None:
        self._connect = connect
        self._limit_count = limit_count
        self._kept: list[Connection] = []
        self._is_closed = False
        self._start()
        weakref.finalize(self, _close_all, self._kept)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Semaphore(self._limit_count)
        self._pid = os.getpid()

    @contextmanager
    def lend(self, patience: Patience, *, is_fresh: bool = False) -> Iterator[Connection]:
        """Give a connection; it is kept afterwards if it may serve another request.

        Args:
            patience: How long to wait for a free one, and for a new one.
            is_fresh: None that was kept.

        Raises:
            OSError: No connection came about; a TimeoutError where that took too long.
        """
        if self._pid != os.getpid():
            _close_all(self._kept)
            self._start()
        free = self._free
        if not free.acquire(timeout=patience.left_seconds()):
            raise TimeoutError(f"all {self._limit_count} connections are in use")
        try:
            connection = (None if is_fresh else self._take()) or self._connect(patience)
            try:
                yield connection
            finally:
                self._take_back(connection)
        finally:
            free.release()

    def close(self) -> None:
        """Close what is kept, and what is lent when it comes back."""
        with self._lock:
            self._is_closed = True
            _close_all(self._kept)

    def _take(self) -> Connection | None:
        oldest = time.monotonic() - _IDLE_SECONDS
        while True:
            with self._lock:
                if not self._kept:
                    return None
                connection = self._kept.pop()  # the one used last: the others may grow old
            if connection.idle_since >= oldest and not connection.is_stale():
                return connection
            connection.close()

    def _take_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.is_reusable and not self._is_closed:
                self._kept.append(connection)
                return
        connection.close()


def _close_all(connections: list[Connection]) -> None:
    while connections:
        connections.pop().close()
