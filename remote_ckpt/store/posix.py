"""Durable file operations below a folder's handle, and what the operating system's errors mean.

A file is durable when its bytes, its name and the names of all new folders above it have been synced:
https://man7.org/linux/man-pages/man2/fsync.2.html
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from remote_ckpt.errors import (
    AccessDeniedError,
    ObjectExistsError,
    ObjectNotFoundError,
    RemoteCkptError,
    StorageFullError,
    StoreError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.store.base import Buffer
from remote_ckpt.store.folders import TEMP_PREFIX, sync_folder

# O_NONBLOCK: opening a named pipe that stands where a file should be must not hang.
_READ_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_STAGE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_MEANINGS: Final[dict[int, tuple[type[StoreError], str]]] = {
    errno.ENOENT: (ObjectNotFoundError, "no such object"),
    errno.EEXIST: (ObjectExistsError, "the object exists"),
    errno.ENOSPC: (StorageFullError, "no space left: free some, or keep fewer checkpoints"),
    errno.EDQUOT: (StorageFullError, "the disk quota is used up: free some, or keep fewer checkpoints"),
    errno.EFBIG: (StorageFullError, "larger than this file system or the process's limit allows"),
    errno.EACCES: (AccessDeniedError, "permission denied: check owner and mode of the folder"),
    errno.EPERM: (AccessDeniedError, "not permitted: check owner, mode and mount of the folder"),
    errno.EROFS: (AccessDeniedError, "the file system is mounted read-only"),
    errno.ENOTDIR: (StoreError, "a file stands where a folder is needed"),
    errno.EISDIR: (StoreError, "a folder stands where an object is needed"),
}
# What may pass when it is tried again: a flaky mount, a stale handle, too many open files.
_TRANSIENT: Final = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EMFILE, errno.ENFILE}
)
_NO_HARD_LINK: Final = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
)


@dataclass(frozen=True, slots=True)
class Place:
    """What an operation works on, for messages."""

    operation: str
    url: str
    key: str | None = None

    def error(self, kind: type[RemoteCkptError], message: str) -> RemoteCkptError:
        """Return an error that says where it happened."""
        return kind(message, url=self.url, key=self.key, operation=self.operation)

    @contextlib.contextmanager
    def translating(self) -> Iterator[None]:
        """Turn OSError into the error of this package that it means; those of this package pass."""
        try:
            yield
        except OSError as error:
            if isinstance(error, RemoteCkptError):
                raise
            raise self._translate(error) from error

    def _translate(self, error: OSError) -> RemoteCkptError:
        meaning = error.strerror or str(error)
        if error.errno in _TRANSIENT:
            return self.error(StoreUnavailableError, meaning)
        return self.error(*_MEANINGS.get(error.errno or 0, (StoreError, meaning)))


# --- reading -----------------------------------------------------------------------------------


@contextlib.contextmanager
def opened_file(path: str, *, at: int) -> Iterator[tuple[int, os.stat_result]]:
    """Yield descriptor and status of a regular file; anything else there means: no such object."""
    try:
        descriptor = os.open(path, _READ_FLAGS, dir_fd=at)
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, "a file stands where its folder would be") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file")
        yield descriptor, status
    finally:
        os.close(descriptor)


def read_into(descriptor: int, offset_bytes: int, out: memoryview) -> int:
    """Fill ``out`` from an offset on; returns how many bytes there were."""
    done_bytes = 0
    while done_bytes < len(out):
        count = os.preadv(descriptor, [out[done_bytes:]], offset_bytes + done_bytes)
        if not count:
            break
        done_bytes += count
    return done_bytes


def read_chunks(descriptor: int, chunk_bytes: int) -> Iterator[bytes]:
    """Yield a file's bytes from the beginning."""
    offset_bytes = 0
    while chunk := os.pread(descriptor, chunk_bytes, offset_bytes):
        yield chunk
        offset_bytes += len(chunk)


# --- writing -----------------------------------------------------------------------------------


def new_hidden_name(prefix: str) -> str:
    """Return a name that no listing shows and nobody else uses."""
    return prefix + secrets.token_hex(12)


@contextlib.contextmanager
def staged_file(at: int) -> Iterator[tuple[int, str]]:
    """Yield descriptor and hidden name of a new file in a folder; the hidden name is gone in the end."""
    name = new_hidden_name(TEMP_PREFIX)
    descriptor = os.open(name, _STAGE_FLAGS, 0o666, dir_fd=at)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)
        remove_file(name, at=at)


def remove_file(name: str, *, at: int) -> None:
    """Remove a file unless it is absent."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def write_fully(descriptor: int, data: Buffer) -> None:
    """Write all bytes, however many calls that takes."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def publish_replacing(temp: str, name: str, *, at: int) -> None:
    """Give a synced file its name, replacing what is there, durably."""
    status = os.stat(temp, dir_fd=at, follow_symlinks=False)
    try:
        os.rename(temp, name, src_dir_fd=at, dst_dir_fd=at)
    except FileNotFoundError:
        # NFS repeats a rename whose answer got lost; the repetition finds nothing left to rename.
        if not is_same_file(name, status, at=at):
            raise
    sync_folder(at)


def publish_once(temp: str, name: str, *, at: int, place: Place) -> None:
    """Give a synced file a second name unless that exists, durably.

    Raises:
        FileExistsError: The name exists.
        StoreError: Something else than a file stands there, which no reader would take for one.
        UnsupportedStoreError: The file system has no hard links.
    """
    try:
        os.link(temp, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except OSError as error:
        # NFS may answer its own repetition with EEXIST; the link count tells (open(2), on O_EXCL).
        if os.stat(temp, dir_fd=at, follow_symlinks=False).st_nlink != 2:
            if error.errno in _NO_HARD_LINK:
                raise place.error(
                    UnsupportedStoreError, "an atomic create needs hard links, which are missing here"
                ) from error
            _check_is_file(name, at=at, place=place)
            raise
    sync_folder(at)


def _check_is_file(name: str, *, at: int, place: Place) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(name, dir_fd=at).st_mode):
            raise place.error(StoreError, "something that is no file stands where an object is needed")


def link_if_possible(source: str, target: str, *, source_at: int, target_at: int) -> bool:
    """Give a file another name; false where this file or file system does not allow that."""
    try:
        os.link(source, target, src_dir_fd=source_at, dst_dir_fd=target_at)
    except OSError as error:
        if error.errno in _NO_HARD_LINK:
            return False
        raise
    return True


def is_same_file(name: str, status: os.stat_result, *, at: int, follow_symlinks: bool = False) -> bool:
    """Whether a name in a folder leads to the very file or folder of that status."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=at, follow_symlinks=follow_symlinks), status)
    except FileNotFoundError:
        return False
