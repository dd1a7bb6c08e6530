"""The one layer of retries: bounded tries and waits, a deadline for all of them, counted and logged."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from remote_ckpt.errors import StoreUnavailableError
from remote_ckpt.log import logger
from remote_ckpt.options import RetryOptions
from remote_ckpt.store.base import Buffer, ChunkSource, DeleteFailure, Store
from remote_ckpt.store.meter import StoreMeter
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.url import redact_url

T = TypeVar("T")


class Backoff:
    """The waits of one operation: exponential with full jitter, up to a number of tries and a deadline."""

    def __init__(
        self,
        options: RetryOptions,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._sleep = sleep
        self._now = now
        self._started = now()
        self.tries = 1

    def wait(self) -> bool:
        """Wait before the next try; false if there is none."""
        options = self._options
        if self.tries >= options.max_attempts:
            return False
        longest = min(options.max_seconds, options.initial_seconds * 2 ** (self.tries - 1))
        pause = random.uniform(0, longest)
        if self._now() - self._started + pause > options.total_seconds:
            return False
        self.tries += 1
        self._sleep(pause)
        return True


class RetryStore(DelegatingStore):
    """Tries again after transient failures (StoreUnavailableError and StoreTimeoutError), and no others.

    A create is never repeated here: after an unknown outcome only :mod:`remote_ckpt.commit` can tell.
    Exceptions that come from a stream's source are not the store's: they pass at once.

    Args:
        inner: The driver, whose own retries are off or few.
        options: Numbers of tries, waits and the deadline of an operation.
        meter: Where retries are counted.
        sleep: Waits for so many seconds.
        now: A clock in seconds that never goes back.
    """

    def __init__(
        self,
        inner: Store,
        options: RetryOptions,
        *,
        meter: StoreMeter | None = None,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._options = options
        self._meter = meter or StoreMeter()
        self._sleep = sleep
        self._now = now

    def _wrap(self, inner: Store) -> RetryStore:
        return RetryStore(inner, self._options, meter=self._meter, sleep=self._sleep, now=self._now)

    def _backoff(self) -> Backoff:
        return Backoff(self._options, self._sleep, self._now)

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        return call() if operation == "create" else self._repeat(operation, key, call, self._backoff())

    def _repeat(
        self,
        operation: str,
        key: str | None,
        call: Callable[[], T],
        backoff: Backoff,
        foreign: Sequence[BaseException] = (),
    ) -> T:
        while True:
            try:
                return call()
            except StoreUnavailableError as error:
                if any(error is other for other in foreign) or not self._wait(operation, key, error, backoff):
                    raise

    def _wait(self, operation: str, key: str | None, error: Exception, backoff: Backoff) -> bool:
        what = f"{operation} of {redact_url(key)}" if key else operation
        if not backoff.wait():
            logger.warning("%s failed for good at try %d: %s", what, backoff.tries, error)
            return False
        self._meter.count(retries=1)
        logger.warning("%s: try %d after: %s", what, backoff.tries, error)
        return True

    def write_stream(
        self,
        key: str,
        source: ChunkSource,
        *,
        size_bytes: int,
        part_bytes: int,
        concurrency: int,
    ) -> None:
        """See :meth:`Store.write_stream`; every try calls ``source`` anew."""
        raised: list[BaseException] = []

        def watched() -> Iterator[Buffer]:
            try:
                yield from source()
            except Exception as error:
                raised.append(error)
                raise

        def call() -> None:
            self.inner.write_stream(
                key, watched, size_bytes=size_bytes, part_bytes=part_bytes, concurrency=concurrency
            )

        self._repeat("write_stream", key, call, self._backoff(), raised)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """See :meth:`Store.delete`; only keys whose failure was transient are tried again."""
        backoff = self._backoff()
        final: list[DeleteFailure] = []
        pending = list(keys)
        while True:
            failures = self._repeat("delete", None, partial(self.inner.delete, pending), backoff)
            transient = [one for one in failures if isinstance(one.error, StoreUnavailableError)]
            final += [one for one in failures if one not in transient]
            if not transient or not self._wait("delete", transient[0].key, transient[0].error, backoff):
                return final + transient
            pending = [one.key for one in transient]
