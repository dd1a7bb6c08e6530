"""Folders of the local file system by their handles: open, make, lock, list and remove.

Everything works relative to descriptors (``openat`` and friends), so that it follows a folder that is
moved. OSError passes untranslated; :class:`remote_ckpt.store.posix.Place` gives it its meaning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Final

from remote_ckpt.errors import StoreUnavailableError
from remote_ckpt.keys import is_token
from remote_ckpt.log import logger
from remote_ckpt.store.base import Leftover, ObjectInfo
from remote_ckpt.url import parse_step

TEMP_PREFIX: Final = ".tmp-"
TRASH_PREFIX: Final = ".trash-"
_HIDDEN: Final = re.compile(r"\.(?:tmp|trash)-[0-9a-f]{24}")

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_EMPTYING_ROUNDS: Final = 8
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)


def is_hidden(name: str) -> bool:
    """Whether a name is one of our own temporary ones, which no listing shows."""
    return name.startswith((TEMP_PREFIX, TRASH_PREFIX))


def is_leftover(name: str) -> bool:
    """Whether a file or folder of that name may be removed as left over: only what we name so exactly."""
    return _HIDDEN.fullmatch(name) is not None or is_token(name)


def open_folder(path: str, *, at: int | None = None) -> int:
    """Return a new handle of a folder; ``path`` is relative to the handle ``at`` where one is given.

    A new handle, never a duplicate: duplicates share the position of a directory's listing, so that two
    threads that list at once would each miss entries.
    """
    return os.open(path, _FLAGS, dir_fd=at)


@contextlib.contextmanager
def opened_folder(at: int, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Yield a handle of the folder ``parts`` below ``at``, made durably where ``create`` is set."""
    handle = open_folder(".", at=at)
    try:
        for part in parts:
            child = _open_or_make(part, at=handle) if create else open_folder(part, at=handle)
            # In this order: an interrupt in between must not let a number be closed twice.
            parent, handle = handle, child
            os.close(parent)
        yield handle
    finally:
        os.close(handle)


def _open_or_make(name: str, *, at: int) -> int:
    try:
        return open_folder(name, at=at)
    except FileNotFoundError:
        make_folder(name, at=at)
        return open_folder(name, at=at)


def make_folder(name: str, *, at: int) -> None:
    """Make a folder unless it exists, and make its name durable even if somebody else made it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=at)
    sync_folder(at)


def make_folders(path: str) -> None:
    """Make a folder and those above it, each made durable in its parent; nothing if it exists."""
    if os.path.lexists(path):
        return
    parent, name = os.path.split(path)
    make_folders(parent)
    handle = open_folder(parent)
    try:
        make_folder(name, at=handle)
    finally:
        os.close(handle)


def sync_folder(handle: int) -> None:
    """Make the names in a folder durable, where the file system knows such a thing."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def nearest_folder(path: str) -> str:
    """Return ``path``, or the nearest folder above it, if the absence of all below that is certain.

    Raises:
        OSError: It cannot be told, because something on the way cannot be read.
        StoreUnavailableError: A symbolic link on the way leads nowhere: a disk may not be mounted.
    """
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.exists(path):
        raise StoreUnavailableError("a symbolic link leads nowhere: is a disk not mounted?", url=path)
    os.close(open_folder(path))
    return path


@contextlib.contextmanager
def locked(handle: int) -> Iterator[bool]:
    """Hold an exclusive lock on a folder; yields false where the file system has no such locks.

    The handle must be the caller's own: two users of one handle do not exclude each other (flock(2)).
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        logger.warning("this file system cannot lock a folder: %s", error.strerror)
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)


# --- listing -----------------------------------------------------------------------------------


def file_time(status: os.stat_result) -> datetime:
    """Return when the file's status changed last (ctime); hard links and copies keep an old mtime."""
    return _EPOCH + timedelta(microseconds=status.st_ctime_ns // 1000)


def file_info(key: str, status: os.stat_result) -> ObjectInfo:
    """Return a file's status as that of an object."""
    return ObjectInfo(key, status.st_size, file_time(status))


def scan(handle: int, prefix: str) -> tuple[list[ObjectInfo], list[str]]:
    """Return the files and the names of the folders right in a folder, hidden ones left out.

    Links are followed; one that leads nowhere, and what vanishes meanwhile, is no object. But where a link is
    named like a step, the disk that holds it may not be mounted: it counts as a folder, so that whoever
    opens it is told.
    """
    infos, names = [], []
    with os.scandir(handle) as entries:
        for entry in entries:
            status = None if is_hidden(entry.name) else _status_of(entry)
            if stat.S_ISDIR(status.st_mode) if status is not None else _is_lost_step(entry):
                names.append(entry.name)
            elif status is not None and stat.S_ISREG(status.st_mode):
                infos.append(file_info(prefix + entry.name, status))
    return infos, names


def _is_lost_step(entry: os.DirEntry[str]) -> bool:
    return parse_step(entry.name) is not None and entry.is_symlink()


def _status_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


def walk(handle: int, prefix: str, above: tuple[os.stat_result, ...] = ()) -> Iterator[ObjectInfo]:
    """Yield the files in and below a folder; a link that leads back up is not entered again."""
    infos, names = scan(handle, prefix)
    yield from infos
    here = os.fstat(handle)
    for name in names:
        with contextlib.suppress(FileNotFoundError), opened_folder(handle, [name]) as child:
            if not any(os.path.samestat(os.fstat(child), folder) for folder in (*above, here)):
                yield from walk(child, f"{prefix}{name}/", (*above, here))


def walk_leftovers(handle: int, prefix: str) -> Iterator[Leftover]:
    """Yield the hidden files and folders in and below a folder, and the empty folders of saves.

    Links are not followed, and folders that may not be read are passed over.
    """
    with os.scandir(handle) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if _HIDDEN.fullmatch(name):
                yield _leftover(handle, prefix + name, is_folder=is_folder)
            elif is_folder and not is_hidden(name):
                with opened_folder(handle, [name]) as child:
                    if is_token(name) and not os.listdir(child):
                        yield _leftover(handle, prefix + name, is_folder=True)
                    else:
                        yield from walk_leftovers(child, f"{prefix}{name}/")


def _leftover(handle: int, key: str, *, is_folder: bool) -> Leftover:
    name = key.rpartition("/")[2]
    status = os.stat(name, dir_fd=handle, follow_symlinks=False)
    size_bytes = _tree_bytes(name, at=handle) if is_folder else status.st_size
    return Leftover(
        key=key,
        kind="folder" if is_folder else "file",
        size_bytes=size_bytes,
        modified_at=file_time(status),
    )


def _tree_bytes(name: str, *, at: int) -> int:
    """Return the bytes of all files in and below a folder, without following links."""
    handle = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=at)
    try:
        with os.scandir(handle) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        return sum(
            _tree_bytes(each, at=handle)
            if is_folder
            else os.stat(each, dir_fd=handle, follow_symlinks=False).st_size
            for each, is_folder in found
        )
    finally:
        os.close(handle)


# --- removing ----------------------------------------------------------------------------------


def remove_tree(name: str, *, at: int) -> bool:
    """Empty and remove a folder without following links; returns whether it is gone.

    Entries that appear meanwhile (late writers hold a handle) are removed too, for a few rounds.
    """
    handle = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=at)
    try:
        for _ in range(_EMPTYING_ROUNDS):
            _empty(handle)
            if remove_if_empty(name, at=at):
                return True
    finally:
        os.close(handle)
    return False


def _empty(handle: int) -> None:
    with os.scandir(handle) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        with contextlib.suppress(FileNotFoundError):
            if is_folder:
                remove_tree(name, at=handle)
            else:
                os.unlink(name, dir_fd=handle)


def remove_if_empty(name: str, *, at: int) -> bool:
    """Remove a folder that holds nothing; returns whether it is gone."""
    try:
        os.rmdir(name, dir_fd=at)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
