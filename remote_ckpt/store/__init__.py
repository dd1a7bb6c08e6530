"""Where bytes live: :func:`open_store` picks the driver that fits a location."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from remote_ckpt.errors import ConfigError
from remote_ckpt.options import Options
from remote_ckpt.store.base import CreateOnly, Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.store.meter import MeteredStore, StoreMeter
from remote_ckpt.store.renewal import RenewingStore
from remote_ckpt.store.retry import RetryStore
from remote_ckpt.store.single_writer import SingleWriterStore
from remote_ckpt.store.wrappers import PrefixStore
from remote_ckpt.url import Location, parse_location

if TYPE_CHECKING:
    from upath import UPath

__all__ = ["open_store"]

_NATIVE: Final = frozenset({"s3", "gs", "az"})
_DEFAULT_OPTIONS: Final = Options()


def open_store(
    location: Location | str | os.PathLike[str] | UPath,
    *,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options = _DEFAULT_OPTIONS,
) -> MeteredStore:
    """Return the store of a location, with retries and metering around it. Asks the store nothing yet.

    Args:
        location: What :func:`~remote_ckpt.url.parse_location` takes, or gives.
        storage_options: fsspec-style options (``key``, ``secret``, ``endpoint_url``, ``anon``, ...);
            they win over those that a ``UPath`` carries. Without meaning for local paths.
        transport: ``"obstore"`` or ``"fsspec"``. None: obstore for S3, GCS and Azure, our own drivers
            for local paths and memory, fsspec for all else.
        options: Retries, transfer sizes, and whether a store without create-only is accepted.

    Raises:
        UrlError: The location cannot be used.
        ConfigError: This transport does not serve this location.
        MissingDependencyError: The driver is not installed.
    """
    if not isinstance(storage_options, Mapping | None):
        raise ConfigError(f"storage_options must be a mapping, not {type(storage_options).__name__}")
    where = location if isinstance(location, Location) else parse_location(location)
    meter = StoreMeter()
    driver = _open_driver(where, {**where.options, **(storage_options or {})}, transport, options)
    if options.commit.accept_single_writer and driver.capabilities.create_only is not CreateOnly.ATOMIC:
        driver = SingleWriterStore(driver)
    return MeteredStore(RetryStore(driver, options.retry, meter=meter), meter)


def _open_driver(
    location: Location, storage_options: dict[str, Any], transport: str | None, options: Options
) -> Store:
    if transport not in (None, "obstore", "fsspec"):
        raise ConfigError(f"unknown transport {transport!r}: use 'obstore' or 'fsspec'")
    if transport == "obstore" and location.scheme not in _NATIVE:
        raise ConfigError(f"obstore serves s3, gs and az here, not {location.scheme}: leave transport out")
    if transport is None and location.is_local:
        return LocalStore(location.path)
    if transport is None and location.scheme == "memory":
        return _open_memory(location)
    settings: dict[str, Any] = {
        "storage_options": storage_options,
        "retry": options.retry,
        "transfer": options.transfer,
    }
    if transport != "fsspec" and location.scheme in _NATIVE:
        from remote_ckpt.store.obstore import open_obstore_store

        open_native = partial(open_obstore_store, location, **settings)
        return RenewingStore(open_native) if location.scheme == "s3" else open_native()
    if location.scheme == "s3":
        from remote_ckpt.store.fsspec_s3 import open_s3fs_store

        return RenewingStore(partial(open_s3fs_store, location, **settings))
    from remote_ckpt.store.fsspec import open_fsspec_store

    return open_fsspec_store(location, **settings)


def _open_memory(location: Location) -> Store:
    name, _, prefix = location.path.partition("/")
    return PrefixStore(MemoryStore(name), prefix) if prefix else MemoryStore(name)
