"""obstore's clients for one bucket, and the guard that keeps them out of forked children."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
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


@dataclass(frozen=True, slots=True)
class Clients:
    """What asks one bucket. Each request is sent once: who retries is RetryStore, in :mod:`.retry`.

    Args:
        once: For small requests.
        bodies: Gives bodies more time.
        reads: As ``bodies``, for answers with a body: one that stalls is given up long before that time, so
            that another try comes before the deadline of all tries.
        single: As ``once``, but deletes each key by itself: not all that speak S3 know batches.
        parts: As ``bodies``, but repeats a part of a multipart upload a few times, since above it the
            whole object would be sent anew.
        lister: Lists the bucket.
        http: Sends what was signed here.
        direct: Receives ranges in place; None where only ``reads`` can get them.
    """

    once: Any
    bodies: Any
    reads: Any
    single: Any
    parts: Any
    lister: Lister
    http: HttpClient
    direct: DirectReads | None = None

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
        return make(
            location.bucket,
            config={**settings.config, **config},
            client_options=options,
            retry_config=_retry_config(retry, max_retries),
            credential_provider=settings.provider,
        )

    try:
        once, bodies = client(once_seconds), client(bodies_seconds)
        reads = client(bodies_seconds, pause_seconds=once_seconds)
        single = client(once_seconds, disable_bulk_delete=True) if location.scheme == "s3" else once
        parts = client(bodies_seconds, _PART_RETRIES)
    except (BaseError, ValueError, TypeError) as error:
        message = "obstore refused the settings of the store"
        if location.scheme in ("gs", "az"):  # mostly, what says who signs is missing or malformed
            message += f": {HOW_TO_SIGN[location.scheme]}"
        raise ConfigError(message, url=location.url) from redacted(error)
    lister = _open_lister(location, settings, http, once)
    direct = None
    if location.scheme == "s3":
        direct = open_direct_reads(
            location.bucket, settings, retry=retry, limit_count=transfer.concurrency, url=location.url
        )
    return Clients(once, bodies, reads, single, parts, lister, http, direct)


def _open_lister(location: Location, settings: DriverSettings, http: HttpClient, once: Any) -> Lister:
    # Requests to S3's directory buckets are signed with the keys of a session that only obstore holds.
    if location.scheme != "s3" or settings.config.get("s3_express"):
        return ObstoreLister(once)
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
