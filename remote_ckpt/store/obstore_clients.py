"""obstore's clients for one bucket, and the guard that keeps them out of forked children."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from remote_ckpt.errors import ConfigError, ForkedProcessError
from remote_ckpt.options import KiB, RetryOptions, TransferOptions
from remote_ckpt.store.obstore_errors import redacted
from remote_ckpt.store.obstore_options import DriverSettings, plan_azure, plan_gcs, plan_s3
from remote_ckpt.url import Location

_SLOWEST_BYTES_PER_SECOND: Final = 256 * KiB
_BULK_RETRIES: Final = 3
_MOST_RETRY_SECONDS: Final = 180.0  # obstore repeats without signing anew: stay below S3's 5 minutes
_DRIVERS: Final[dict[str, Callable[..., Any]]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}

_runtime_pid: int | None = None
"""The process in which obstore's threads were first used; they do not exist in its children."""


@dataclass(frozen=True, slots=True)
class Clients:
    """Two clients of one bucket.

    Args:
        once: Sends each request once: who retries is :class:`~remote_ckpt.store.wrappers.RetryStore`.
        bulk: Repeats a part of an upload a few times, since above it the whole object would be sent
            anew, and gives bodies more time.
    """

    once: Any
    bulk: Any


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


def plan_settings(location: Location, storage_options: Mapping[str, Any]) -> DriverSettings:
    """Return the settings for a location; errors as :func:`~remote_ckpt.store.obstore_options.plan_s3`."""
    if location.scheme == "s3":
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
    """Return the clients of a bucket; nothing is sent yet.

    Raises:
        ConfigError: obstore refuses the settings.
    """
    body_seconds = transfer.part_bytes / _SLOWEST_BYTES_PER_SECOND
    make = _DRIVERS[location.scheme]

    def client(timeout_seconds: float, max_retries: int) -> Any:
        http = {
            "timeout": timedelta(seconds=timeout_seconds),
            "connect_timeout": timedelta(seconds=retry.connect_seconds),
            **settings.client_options,
        }
        return make(
            location.bucket,
            config=dict(settings.config),
            client_options=http,
            retry_config=_retry_config(retry, max_retries),
            credential_provider=settings.provider,
        )

    try:
        return Clients(
            client(retry.request_seconds, 0), client(retry.request_seconds + body_seconds, _BULK_RETRIES)
        )
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError("obstore refused the settings of the store", url=location.url) from redacted(error)


def _retry_config(retry: RetryOptions, max_retries: int) -> dict[str, Any]:
    return {
        "max_retries": max_retries,
        "retry_timeout": timedelta(seconds=min(retry.total_seconds, _MOST_RETRY_SECONDS)),
        "backoff": {
            "init_backoff": timedelta(seconds=retry.initial_seconds),
            "max_backoff": timedelta(seconds=retry.max_seconds),
        },
    }
