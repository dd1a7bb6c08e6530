"""The seam between the protocol and the places where bytes live.

A :class:`Store` is a flat namespace of objects below one root. Its verbs are those of an object
store; a local directory offers the same ones. Every driver translates its own exceptions into
:mod:`remote_ckpt.errors`, chained with ``from``, and keeps these rules:

- absence is said only on a clean answer that the object is absent; any other failure raises
- a listing is complete or it raises; callers never rely on its order (drivers sort by key)
- nothing is cached: every call asks the store
- a failed or interrupted write leaves nothing at its key
- a range comes back with exactly the length asked for, or it raises
- all methods may be called from many threads at once; after ``fork`` they raise
  :class:`~remote_ckpt.errors.ForkedProcessError` where the driver would hang
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, Protocol, runtime_checkable

from remote_ckpt.errors import ConfigError

Buffer = bytes | bytearray | memoryview
"""Bytes in memory. A memoryview is one-dimensional, contiguous, of format ``B``."""

ChunkSource = Callable[[], Iterator[Buffer]]
"""Gives an object's bytes from the beginning, each time it is called, for as long as the write runs.

A chunk must stay as it was given until the write returns: drivers send it without a copy, after they have
asked for the next ones.
"""


class CreateOnly(enum.Enum):
    """How far the store's "create only if absent" can be trusted."""

    ATOMIC = "atomic"
    """Known to have exactly one winner, also in races (tested for this driver)."""
    PROBE = "probe"
    """Depends on the server: :func:`remote_ckpt.commit.probe_create_only` finds out."""
    NONE = "none"
    """Known to be missing or racy; refused unless the user accepts a single writer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCapabilities:
    """What a store can do, declared by its driver.

    Args:
        create_only: Trust in :meth:`Store.create`.
        server_side_copy: :meth:`Store.copy` moves no bytes through this process.
        survives_process: Objects outlive this process (false for the memory store).
        has_folders: A checkpoint is a folder that :meth:`Store.remove_folder` takes away (local disk).
    """

    create_only: CreateOnly
    server_side_copy: bool
    survives_process: bool = True
    has_folders: bool = False


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing: key relative to the store, size in bytes, time by the store's clock (UTC)."""

    key: str
    size_bytes: int
    modified_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What an interrupted write left that is no object: no reader and no listing of objects sees it.

    Args:
        key: Of an upload, the key of the object that it was to become; else that of the file or folder.
        kind: ``"upload"``: a multipart upload that was begun and neither completed nor aborted.
            ``"file"``: a temporary file. ``"folder"``: one that was moved aside and not emptied, or the empty
            one of a save.
        upload_id: Tells uploads of one key apart; empty for files and folders.
        size_bytes: Of a file, or of all files in a folder; 0 for uploads, of which no listing says it.
        modified_at: When the upload was begun, or the file or folder changed last, by the store's clock.
    """

    key: str
    kind: Literal["upload", "file", "folder"]
    upload_id: str = ""
    size_bytes: int
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class Listing:
    """One level of the namespace, sorted: objects right below a prefix and names of deeper prefixes.

    Args:
        objects: Objects whose key has no further ``/`` after the prefix. Zero-byte folder markers
            (keys that end in ``/``) are left out.
        prefixes: Names of the next level, without the prefix and without ``/``.
    """

    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """A key that could not be deleted, and why."""

    key: str
    error: Exception


@runtime_checkable
class Store(Protocol):
    """Objects below one root. Keys are relative, ``/``-separated, without leading or trailing ``/``."""

    @property
    def url(self) -> str:
        """Redacted URL (or local path) of this store's root, for messages and manifests."""
        ...

    @property
    def identity(self) -> str:
        """What tells stores apart that may share a URL: driver, endpoint and bucket, or the real path.

        The same for all prefixes of a bucket. Without secrets.
        """
        ...

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store can do."""
        ...

    def read(self, key: str) -> bytes:
        """Return a whole object.

        Raises:
            ObjectNotFoundError: The store answered that there is none.
        """
        ...

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> Buffer:
        """Return exactly ``length_bytes`` (at least 1) bytes from ``offset_bytes`` on.

        Raises:
            ObjectNotFoundError: The store answered that there is none.
            IntegrityError: The object is shorter than the range.
        """
        ...

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        """Fill the writable ``out`` (format ``B``) with the bytes from ``offset_bytes`` on.

        Errors as :meth:`read_range`.
        """
        ...

    def write(self, key: str, data: Buffer) -> None:
        """Write a whole small object (not empty), replacing what is there, in one step."""
        ...

    def write_stream(
        self,
        key: str,
        source: ChunkSource,
        *,
        size_bytes: int,
        part_bytes: int,
        concurrency: int,
    ) -> None:
        """Write an object of ``size_bytes`` from chunks; it appears whole or not at all.

        The store may hold up to ``concurrency`` parts of about ``part_bytes`` at once, grows
        ``part_bytes`` where its part limit demands that, and checks that the chunks sum up to
        ``size_bytes``. An exception from ``source`` aborts the upload and passes through unchanged.
        """
        ...

    def create(self, key: str, data: Buffer) -> None:
        """Write a small object (not empty) only if none is there, in one request, without retry.

        Raises:
            ObjectExistsError: One is there, or the store reported a conflict (412, 409, 304): it may
                be the caller's own earlier write, or nothing at all. Read back before deciding.
            StoreUnavailableError, StoreTimeoutError: The outcome is unknown.
        """
        ...

    def info(self, key: str) -> ObjectInfo:
        """Return size and time of one object; raises ObjectNotFoundError."""
        ...

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return every object whose key starts with ``prefix`` (empty, or ends with ``/``), sorted."""
        ...

    def list_children(self, prefix: str = "") -> Listing:
        """Return one level below ``prefix`` (empty, or ends with ``/``) with a single delimited listing."""
        ...

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """Delete objects; absent ones count as deleted. Returns the keys that could not be, with reasons."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copy within the store, whole or not at all, replacing ``target``."""
        ...

    def list_leftovers(self) -> Sequence[Leftover]:
        """Return what interrupted writes left below the root, sorted; nothing where the store tells none.

        It does not tell what is still being written from what never will be: only age does.

        Raises:
            MissingDependencyError: S3: boto3, which lists uploads, is not installed.
            AccessDeniedError: S3: it takes a right of its own (``s3:ListBucketMultipartUploads``).
        """
        ...

    def remove_leftover(self, leftover: Leftover) -> None:
        """Remove one of :meth:`list_leftovers`; one that is gone, or has become an object, is no error.

        A folder that is not empty any more stays, unless it was moved aside.

        Raises:
            ConfigError: It is none that this store could have listed.
        """
        ...

    def clock(self) -> datetime:
        """Return the store's own present time (UTC), from its answers, never from this host's clock."""
        ...

    def scope(self, name: str, *, create: bool = False) -> Store:
        """Return a store for the objects below ``name/``.

        On a local disk it holds the directory's handle, so that a late write lands in the directory
        that was opened even after it was moved away. With ``create`` a missing directory is made.

        Raises:
            CheckpointNotFoundError: Local only: there is no such directory and ``create`` is false.
            CheckpointExistsError: Local only: a file stands there.
        """
        ...

    def is_current(self) -> bool:
        """Whether a scoped store still is what its name leads to (always true on object stores)."""
        ...

    def remove_folder(self) -> bool:
        """Of a scoped store: move its folder aside in one step and empty it there.

        Only the local store has folders; elsewhere this does nothing. Returns whether everything is
        gone. It does nothing (false) where another life of the name has taken the folder's place.
        """
        ...

    def close(self) -> None:
        """Release handles and connections; further calls raise."""
        ...


def sorted_infos(infos: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return the infos sorted by key, folder markers (keys that end in ``/``) left out."""
    return sorted((info for info in infos if not info.key.endswith("/")), key=lambda info: info.key)


_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def check_key(key: str) -> str:
    """Return ``key`` if it is relative, without empty, ``.`` or ``..`` parts and control characters.

    Raises:
        ConfigError: It is not; servers and clients disagree on what such keys mean.
    """
    if not key or _CONTROL.search(key) or any(part in ("", ".", "..") for part in key.split("/")):
        raise ConfigError(
            f"{key!r} is not a key: use names separated by single slashes, without '..' and "
            "control characters"
        )
    return key


def is_key(text: str) -> bool:
    """Whether :func:`check_key` accepts a key: in one bucket others may keep ``a//b`` and ``../c``."""
    try:
        return bool(check_key(text))
    except ConfigError:
        return False


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` if it is empty or a well-formed key followed by ``/``; else raise ConfigError."""
    if prefix and not (prefix.endswith("/") and check_key(prefix[:-1])):
        raise ConfigError(f"the prefix {prefix!r} must be empty or end with '/'")
    return prefix


def children_of(infos: Iterable[ObjectInfo], prefix: str) -> Listing:
    """Return the one level below ``prefix`` of a flat listing whose keys all start with it."""
    objects, names = [], set()
    for info in infos:
        name, slash, _ = info.key[len(prefix) :].partition("/")
        if slash:
            names.add(name)
        else:
            objects.append(info)
    return Listing(tuple(sorted_infos(objects)), tuple(sorted(names)))


def check_size(size_bytes: int, *, url: str, key: str) -> None:
    """Raise ConfigError for an empty object: some clients mistreat them, and no promise needs one."""
    if size_bytes < 1:
        raise ConfigError("objects must not be empty", url=url, key=key, operation="write")
