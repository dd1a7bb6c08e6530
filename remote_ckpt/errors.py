"""Every error this package raises, grouped by what the caller does next.

``except RemoteCkptError`` catches all of them; each is also the built-in error that fits, so
``except FileNotFoundError`` works as people expect. All of them pickle, because they cross ranks.

========================== =====================================================================
group                      what to do
========================== =====================================================================
:class:`ConfigError`       fix the call: URL, options, a missing package, an unsuitable store
:class:`StoreError`        look at the store: network, credentials, bucket, space
:class:`CheckpointError`   look at the checkpoint: absent, exists, pinned, damaged, another format
:class:`MismatchError`     the checkpoint is sound but does not fit the model
========================== =====================================================================
"""

from __future__ import annotations

from typing import Any

_FIELDS = ("url", "key", "step", "rank", "operation")


class RemoteCkptError(Exception):
    """Base of all errors of this package.

    Args:
        message: What failed and what to do about it, without secrets.
        url: The redacted URL of the store or checkpoint.
        key: The object's key, relative to ``url``.
        step: The checkpoint's name.
        rank: The rank (within the process group used) on which it happened.
        operation: The verb that failed: ``"put"``, ``"list"``, ``"commit"``, ...
    """

    def __init__(
        self,
        message: str = "",
        *,
        url: str | None = None,
        key: str | None = None,
        step: int | str | None = None,
        rank: int | None = None,
        operation: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.url = url
        self.key = key
        self.step = step
        self.rank = rank
        self.operation = operation

    def __str__(self) -> str:
        where = ", ".join(
            f"{name}={value}"
            for name in _FIELDS
            if (value := getattr(self, name)) is not None and str(value) not in self.message
        )
        return f"{self.message} [{where}]" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (type(self), self.message, dict(self.__dict__))


def _rebuild_error(kind: type[RemoteCkptError], message: str, state: dict[str, Any]) -> Any:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


# --- the call is wrong -----------------------------------------------------------------------


class ConfigError(RemoteCkptError, ValueError):
    """The call cannot work as given; nothing was attempted."""


class UrlError(ConfigError):
    """A URL or path that cannot be used, with the reason."""


class MissingDependencyError(ConfigError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class UnsupportedStoreError(ConfigError):
    """The store lacks something a promise needs, for example an honoured create-only write."""


class ForkedProcessError(RemoteCkptError, RuntimeError):
    """A client made before ``fork`` was used in the child, where it would hang or corrupt."""


# --- the store -------------------------------------------------------------------------------


class StoreError(RemoteCkptError):
    """The store refused or failed an operation for good (after the retries that make sense)."""


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """A clean answer that this object does not exist. Nothing else is ever mapped to it."""


class ObjectExistsError(StoreError, FileExistsError):
    """A create-only write found an object, or a conflict that may be the caller's own write.

    It is not a verdict: whoever creates must read the object back and compare identities.
    """


class BucketNotFoundError(StoreError, LookupError):
    """The bucket or container does not exist (which says nothing about objects)."""


class AccessDeniedError(StoreError, PermissionError):
    """Missing, refused or expired credentials, or a right that the credentials lack."""


class StoreUnavailableError(StoreError, ConnectionError):
    """Network failure, throttling or a server error; worth another try later."""


class StoreTimeoutError(StoreUnavailableError, TimeoutError):
    """No answer in time. The store may or may not have acted."""


class StorageFullError(StoreError, OSError):
    """No space or quota left."""


class IntegrityError(StoreError, ValueError):
    """Bytes are not those that were written: wrong length, checksum or digest."""


# --- the checkpoint --------------------------------------------------------------------------


class CheckpointError(RemoteCkptError):
    """Something is the matter with one checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No committed checkpoint of that name, established by a listing that succeeded."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint (or something that is not ours) stands in the way."""


class CheckpointPinnedError(CheckpointError, PermissionError):
    """The checkpoint is pinned: unpin it before it is replaced or deleted."""


class CheckpointChangedError(CheckpointError, RuntimeError):
    """The checkpoint was replaced or deleted while it was read; load again."""


class CheckpointDamagedError(CheckpointError, ValueError):
    """A manifest or index is unreadable, or an object that it names is missing or altered."""


class FormatError(CheckpointError, ValueError):
    """Written in a format this version does not read (newer major version, unknown kind)."""


class SweepRefusedError(CheckpointError, RuntimeError):
    """A sweep would have to rely on something doubtful (listing, manifest, clock), so it removed nothing."""


class CommitUnknownError(CheckpointError, TimeoutError):
    """The commit may or may not have happened; nothing was cleaned up. Look again later."""


class SaveFailedError(CheckpointError, RuntimeError):
    """A save failed and nothing was committed; names rank, object and cause."""


class LoadFailedError(CheckpointError, RuntimeError):
    """A load failed on some rank; names rank, object and cause."""


class UntrustedDataError(CheckpointError, ValueError):
    """Reading would have to run code from the checkpoint; say that it is trusted, or convert it."""


# --- checkpoint and model do not fit -----------------------------------------------------------


class MismatchError(RemoteCkptError, ValueError):
    """What is asked for does not fit what was saved; no destination tensor was changed."""


class KeyMismatchError(MismatchError, LookupError):
    """Keys are missing from the checkpoint, or it has keys nobody asked for.

    Attributes:
        missing: Sorted names asked for and not in the checkpoint.
        unexpected: Sorted names in the checkpoint and not asked for.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class ShapeMismatchError(MismatchError):
    """A tensor was saved with another shape; names the key and both shapes."""


class DtypeMismatchError(MismatchError, TypeError):
    """A tensor was saved with another dtype and no conversion was asked for."""
