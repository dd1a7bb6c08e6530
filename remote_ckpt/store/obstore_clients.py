"""obstore's clients for one bucket, and the guard that keeps them out of forked children."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Final

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from remote_ckpt.errors import ConfigError, ForkedProcessError, MissingDependencyError, RemoteCkptError
from remote_ckpt.options import RetryOptions, TransferOptions
from remote_ckpt.store.chunks import SLOWEST_BYTES_PER_SECOND
from remote_ckpt.store.credentials import HOW_TO_SIGN
from remote_ckpt.store.direct_reads import DirectReads, open_direct_reads
from remote_ckpt.store.http_client import HttpClient
from remote_ckpt.store.obstore_errors import redacted
from remote_ckpt.store.obstore_listing import Lister, ObstoreLister
from remote_ckpt.store.obstore_options import DriverSettings, plan_azure, plan_gcs, plan_s3
from remote_ckpt.store.s3_listing import open_lister
from remote_ckpt.url import Location

_PART_RETRIES: Final = 3
_MOST_RETRY_SECONDS: Final = 180.0  # obstore repeats without signing anew: stay below S3's 5 minutes
_DRIVERS: Final[dict[str, Callable[..., Any]]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}

_runtime_pid: int | None = None
"""The process in which obstore's threads were first used; they do not exist in its children."""


class Clients:
    """What asks one bucket. Each request is sent once: who retries is RetryStore, in :mod:`.retry`.

    Made by :func:`open_clients`. Each of obstore's clients is made when it is first used: that takes 10 ms.

    Args:
        make: Makes a client of obstore, given its time-out in seconds.
        once_seconds: Time for a small request, and the longest pause in an answer.
        bodies_seconds: Time for one with a body.
        can_batch: There are deletes of many keys, and so a client for single ones.
        open_lister: Makes what lists the bucket, given :attr:`once`.
        http: Sends what was signed here.
        direct: Receives ranges in place; None where only :attr:`reads` can get them.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *,
        once_seconds: float,
        bodies_seconds: float,
        can_batch: bool,
        open_lister: Callable[[Callable[[], Any]], Lister],
        http: HttpClient,
        direct: DirectReads | None,
    ) -> None:
        self._make, self._can_batch = make, can_batch
        self._once_seconds, self._bodies_seconds = once_seconds, bodies_seconds
        self.http, self.direct = http, direct
        self.reads = make(bodies_seconds, pause_seconds=once_seconds)
        """As :attr:`bodies`, for answers with a body: one that stalls is given up long before that time, so
        that another try comes before the deadline of all tries. Made first: it shows wrong settings."""
        self.lister = open_lister(lambda: self.once)

    @cached_property
    def once(self) -> Any:
        """For small requests."""
        return self._make(self._once_seconds)

    @cached_property
    def bodies(self) -> Any:
        """Gives bodies more time."""
        return self._make(self._bodies_seconds)

    @cached_property
    def single(self) -> Any:
        """As :attr:`once`, but deletes each key by itself: not all that speak S3 know batches."""
        return self._make(self._once_seconds, disable_bulk_delete=True) if self._can_batch else self.once

    @cached_property
    def parts(self) -> Any:
        """As :attr:`bodies`, but repeats a part of a multipart upload a few times.

        Above it the whole object would be sent anew.
        """
        return self._make(self._bodies_seconds, _PART_RETRIES)

    def close(self) -> None:
        """Close the connections that are not obstore's."""
        if self.direct is not None:
            self.direct.close()


def check_process(url: str) -> None:
    """Raise ForkedProcessError in a child forked after obstore was used: there it would hang for ever.

    That holds for clients made in the child too. The first call of a process is remembered.
    """
    global _runtime_pid
    if _runtime_pid is None:
        _runtime_pid = os.getpid()
    if _runtime_pid != os.getpid():
        raise ForkedProcessError(
            "the object store was used before this process was forked: start processes by 'spawn' or "
            "'forkserver', or read and write in the parent",
            url=url,
        )


@contextmanager
def _located(location: Location) -> Iterator[None]:
    """Say of which URL an error is that was raised without one."""
    try:
        yield
    except RemoteCkptError as error:
        error.url = error.url or location.url
        raise


def plan_settings(location: Location, storage_options: Mapping[str, Any]) -> DriverSettings:
    """Return the settings for a location; errors as :func:`~remote_ckpt.store.obstore_options.plan_s3`."""
    if location.scheme == "s3":
        with _located(location):
            return plan_s3(location.bucket, storage_options, os.environ)
    if location.scheme == "gs":
        return plan_gcs(storage_options)
    if location.scheme == "az":
        return plan_azure(storage_options)
    raise ConfigError(
        f"obstore has no driver for {location.scheme}://: use transport='fsspec'", url=location.url
    )


def open_clients(
    location: Location, settings: DriverSettings, *, retry: RetryOptions, transfer: TransferOptions
) -> Clients:
    """Return the clients of a bucket; nothing is sent yet. No request outlasts ``retry.total_seconds``.

    Raises:
        ConfigError: obstore refuses the settings.
        MissingDependencyError: S3: the credentials of a role are needed, and boto3 is not installed.
    """
    once_seconds = min(retry.request_seconds, retry.total_seconds)
    body_seconds = transfer.part_bytes / SLOWEST_BYTES_PER_SECOND
    bodies_seconds = min(retry.request_seconds + body_seconds, retry.total_seconds)
    http = HttpClient(
        timeout_seconds=once_seconds, verify=settings.verify, client_options=settings.client_options
    )
    make = _DRIVERS[location.scheme]

    def client(
        timeout_seconds: float, max_retries: int = 0, *, pause_seconds: float | None = None, **config: Any
    ) -> Any:
        options = {
            "timeout": timedelta(seconds=timeout_seconds),
            "connect_timeout": timedelta(seconds=retry.connect_seconds),
            **({} if pause_seconds is None else {"read_timeout": timedelta(seconds=pause_seconds)}),
            **settings.client_options,
        }
        try:
            return make(
                location.bucket,
                config={**settings.config, **config},
                client_options=options,
                retry_config=_retry_config(retry, max_retries),
                credential_provider=settings.provider,
            )
        except (BaseError, ValueError, TypeError) as error:
            message = "obstore refused the settings of the store"
            if location.scheme in ("gs", "az"):  # mostly, what says who signs is missing or malformed
                message += f": {HOW_TO_SIGN[location.scheme]}"
            raise ConfigError(message, url=location.url) from redacted(error)

    direct = None
    if location.scheme == "s3":
        direct = open_direct_reads(
            location.bucket, settings, retry=retry, limit_count=transfer.concurrency, url=location.url
        )
    return Clients(
        client,
        once_seconds=once_seconds,
        bodies_seconds=bodies_seconds,
        can_batch=location.scheme == "s3",
        open_lister=partial(_open_lister, location, settings, http),
        http=http,
        direct=direct,
    )


def _open_lister(
    location: Location, settings: DriverSettings, http: HttpClient, once: Callable[[], Any]
) -> Lister:
    # Requests to S3's directory buckets are signed with the keys of a session that only obstore holds.
    if location.scheme != "s3" or settings.config.get("s3_express"):
        return ObstoreLister(once())
    if settings.provider is None and not settings.config.get("skip_signature"):
        raise MissingDependencyError(
            "finding the credentials of a role needs boto3: pip install 'remote-ckpt[aws]'",
            url=location.url,
        )
    return open_lister(location.bucket, settings, client=http, url=location.url)


def _retry_config(retry: RetryOptions, max_retries: int) -> dict[str, Any]:
    return {
        "max_retries": max_retries,
        "retry_timeout": timedelta(seconds=min(retry.total_seconds, _MOST_RETRY_SECONDS)),
        "backoff": {
            "init_backoff": timedelta(seconds=retry.initial_seconds),
            "max_backoff": timedelta(seconds=retry.max_seconds),
        },
    }
