"""A directory of the local file system (NFS and Lustre included) as a store.

- data: written to a hidden temporary name, synced, renamed, folder synced
- create-only: a temporary file is hard-linked to its name, which fails if that exists
- a scope holds its folder's handle; every operation below it is relative to that handle, so a late
  write lands in the folder that was opened, even if that was moved away meanwhile
- symbolic links are followed by reads and listings, never while a folder is emptied

The host's own clock is not asked, but where nothing may be written: an NFS server has another one, and that
one stamps the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Final, TypeVar

from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    RemoteCkptError,
    StoreError,
)
from remote_ckpt.store import folders, posix
from remote_ckpt.store.base import (
    Buffer,
    ChunkSource,
    CreateOnly,
    DeleteFailure,
    Leftover,
    Listing,
    ObjectInfo,
    StoreCapabilities,
    check_key,
    check_prefix,
    check_size,
    sorted_infos,
)
from remote_ckpt.store.chunks import CheckedChunks
from remote_ckpt.store.handles import RootFolder

T = TypeVar("T")
_COPY_BYTES: Final = 8 * 1024 * 1024


class LocalStore:
    """Objects as files below a directory.

    The root is opened anew by every call, so that a directory that was removed and made again is seen;
    the first write makes it. Safe after ``fork``: descriptors are all it holds.

    Args:
        path: The directory. It need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = RootFolder(os.path.abspath(path))

    @property
    def url(self) -> str:
        """The directory's path."""
        return self._folder.path

    @property
    def identity(self) -> str:
        """The directory's real path."""
        return f"local {os.path.realpath(self._folder.path)}"

    @property
    def capabilities(self) -> StoreCapabilities:
        """Create-only is atomic (``link``); a copy is a hard link."""
        return StoreCapabilities(create_only=CreateOnly.ATOMIC, server_side_copy=True, has_folders=True)

    def close(self) -> None:
        """Close a scope's handle; further calls raise ConfigError."""
        self._folder.close()

    # --- reading -------------------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        """See :meth:`Store.read`."""
        with self._opened_file("read", key) as (descriptor, _):
            return b"".join(posix.read_chunks(descriptor, _COPY_BYTES))

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> Buffer:
        """See :meth:`Store.read_range`."""
        if length_bytes < 1:
            raise ConfigError(f"a range has at least one byte, not {length_bytes}", url=self.url, key=key)
        if offset_bytes < 0:
            raise ConfigError(f"an offset is not negative: {offset_bytes}", url=self.url, key=key)
        with self._opened_file("read_range", key) as (descriptor, status):
            # Before its memory is taken: an index that lies may ask for anything.
            self._check_whole(key, offset_bytes + length_bytes - status.st_size)
            data = bytearray(length_bytes)
            count = posix.read_into(descriptor, offset_bytes, memoryview(data))
        self._check_whole(key, length_bytes - count)
        return data

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        """See :meth:`Store.read_range_into`."""
        if offset_bytes < 0:
            raise ConfigError(f"an offset is not negative: {offset_bytes}", url=self.url, key=key)
        with self._opened_file("read_range", key) as (descriptor, _):
            missing_bytes = len(out) - posix.read_into(descriptor, offset_bytes, out)
        self._check_whole(key, missing_bytes)

    def info(self, key: str) -> ObjectInfo:
        """See :meth:`Store.info`."""
        with self._opened_file("info", key) as (_, status):
            return folders.file_info(key, status)

    # --- writing -------------------------------------------------------------------------------

    def write(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.write`."""
        self.write_stream(key, lambda: iter([data]), size_bytes=len(data), part_bytes=1, concurrency=1)

    def write_stream(
        self,
        key: str,
        source: ChunkSource,
        *,
        size_bytes: int,
        part_bytes: int,
        concurrency: int,
    ) -> None:
        """See :meth:`Store.write_stream`; the chunks are written one after another."""
        place = self._place("write", key)
        with self._staged(place, key, size_bytes) as (folder, descriptor, temp):
            # The source runs outside of the translation: its own errors pass through unchanged.
            for chunk in CheckedChunks(source, size_bytes, url=self.url, key=key):
                with place.translating():
                    posix.write_fully(descriptor, chunk)
            with place.translating():
                os.fsync(descriptor)
                posix.publish_replacing(temp, _name(key), at=folder)

    def create(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.create`."""
        place = self._place("create", key)
        with self._staged(place, key, len(data)) as (folder, descriptor, temp), place.translating():
            posix.write_fully(descriptor, data)
            os.fsync(descriptor)
            posix.publish_once(temp, _name(key), at=folder, place=place)

    def copy(self, source: str, target: str) -> None:
        """See :meth:`Store.copy`: a hard link where the file system allows one, else a synced copy."""
        with self._opened_file("copy", source) as (descriptor, status):
            if not self._link(_check_visible(source), _check_visible(target)):
                self.write_stream(
                    target,
                    lambda: posix.read_chunks(descriptor, _COPY_BYTES),
                    size_bytes=status.st_size,
                    part_bytes=_COPY_BYTES,
                    concurrency=1,
                )

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """See :meth:`Store.delete`. Folders that get empty are removed, a checkpoint's own one is not.

        Not synced: an object that a power failure brings back is garbage for the sweep, never a lie.
        """
        self._folder.check_open()
        failures = []
        for key in [_check_visible(key) for key in keys]:
            try:
                self._delete(key)
            except RemoteCkptError as error:
                failures.append(DeleteFailure(key, error))
        return failures

    # --- listing -------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`; times are ctimes."""
        return sorted_infos(self._visit(prefix, lambda folder: [*folders.walk(folder, prefix)]) or ())

    def list_children(self, prefix: str = "") -> Listing:
        """See :meth:`Store.list_children`; an empty folder is shown too."""
        infos, names = self._visit(prefix, lambda folder: folders.scan(folder, prefix)) or ([], [])
        return Listing(tuple(sorted_infos(infos)), tuple(sorted(names)))

    def list_leftovers(self) -> Sequence[Leftover]:
        """See :meth:`Store.list_leftovers`: what crashes left under hidden names, and empty folders of saves.

        Times are ctimes.
        """
        found = self._visit("", lambda folder: [*folders.walk_leftovers(folder, "")]) or ()
        return sorted(found, key=lambda leftover: leftover.key)

    def remove_leftover(self, leftover: Leftover) -> None:
        """See :meth:`Store.remove_leftover`."""
        *parts, name = check_key(leftover.key).split("/")
        if not folders.is_leftover(name) or any(folders.is_hidden(part) for part in parts):
            raise ConfigError(f"{leftover.key!r} is no leftover", url=self.url)
        with (
            self._place("remove_leftover", leftover.key).translating(),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            self._folder.opened() as root,
        ):
            with folders.opened_folder(root, parts) as folder:
                _remove_leftover(name, at=folder)
            self._remove_empty(root, parts)

    def clock(self) -> datetime:
        """Return the file system's time: that of a file made for the purpose, here or just above.

        Where this process may not make one, it is this host's: good enough to look by, and nothing can be
        deleted right there.
        """
        with self._place("clock").translating(), self._folder.opened_nearest() as folder:
            try:
                with posix.staged_file(folder) as (descriptor, _):
                    return folders.file_time(os.fstat(descriptor))
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                return datetime.now(timezone.utc)

    # --- folders -------------------------------------------------------------------------------

    def scope(self, name: str, *, create: bool = False) -> LocalStore:
        """See :meth:`Store.scope`: opens the folder and keeps its handle until :meth:`close`."""
        if "/" in _check_visible(name):
            raise ConfigError(f"a scope is one level deep: {name!r}", url=self.url)
        place = self._place("scope", name)
        with place.translating():
            try:
                folder = self._folder.hold(name, create=create)
            except FileNotFoundError as error:
                if create:  # the system's answer where nothing can be made, as in /proc
                    raise place.error(StoreError, "cannot create the folder") from error
                raise place.error(CheckpointNotFoundError, "no checkpoint: no folder of that name") from error
            except NotADirectoryError as error:
                raise place.error(CheckpointExistsError, "a file stands where a folder is needed") from error
        scoped = LocalStore(folder.path)
        scoped._folder = folder
        return scoped

    def is_current(self) -> bool:
        """Whether the folder that a scope holds is the one that its path names now."""
        with self._place("is_current").translating():
            return self._folder.is_current()

    def remove_folder(self) -> bool:
        """See :meth:`Store.remove_folder`; when it is false: :meth:`.handles.HeldFolder.remove`."""
        with self._place("remove_folder").translating():
            return self._folder.remove()

    # --- inside --------------------------------------------------------------------------------

    def _place(self, operation: str, key: str | None = None) -> posix.Place:
        return posix.Place(operation, self.url, key)

    @contextlib.contextmanager
    def _opened_file(self, operation: str, key: str) -> Iterator[tuple[int, os.stat_result]]:
        path = _check_visible(key)
        with (
            self._place(operation, key).translating(),
            self._folder.opened() as root,
            posix.opened_file(path, at=root) as opened,
        ):
            yield opened

    @contextlib.contextmanager
    def _staged(self, place: posix.Place, key: str, size_bytes: int) -> Iterator[tuple[int, int, str]]:
        """Yield the key's folder, and descriptor and name of a new temporary file in it."""
        check_size(size_bytes, url=self.url, key=key)
        parts = _check_visible(key).split("/")[:-1]
        with contextlib.ExitStack() as stack:
            with place.translating():
                try:
                    root = stack.enter_context(self._folder.opened(create=True))
                    folder = stack.enter_context(folders.opened_folder(root, parts, create=True))
                    descriptor, temp = stack.enter_context(posix.staged_file(folder))
                except FileNotFoundError as error:
                    raise place.error(
                        CheckpointChangedError, "the folder was removed while it was written to"
                    ) from error
            yield folder, descriptor, temp

    def _check_whole(self, key: str, missing_bytes: int) -> None:
        if missing_bytes > 0:
            message = f"the file ends {missing_bytes} bytes before the wanted range does"
            raise self._place("read_range", key).error(IntegrityError, message)

    def _link(self, source: str, target: str) -> bool:
        *parts, name = target.split("/")
        temp = posix.new_hidden_name(folders.TEMP_PREFIX)
        with self._folder.opened() as root, folders.opened_folder(root, parts, create=True) as folder:
            if not posix.link_if_possible(source, temp, source_at=root, target_at=folder):
                return False
            try:
                posix.publish_replacing(temp, name, at=folder)
            finally:
                # rename(2) does nothing where both names already are the same file.
                posix.remove_file(temp, at=folder)
        return True

    def _delete(self, key: str) -> None:
        *parts, name = key.split("/")
        with (
            self._place("delete", key).translating(),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            self._folder.opened() as root,
        ):
            # A folder of that name is no object of that key.
            with folders.opened_folder(root, parts) as folder, contextlib.suppress(IsADirectoryError):
                posix.remove_file(name, at=folder)
            self._remove_empty(root, parts)

    def _remove_empty(self, root: int, parts: Sequence[str]) -> None:
        for depth in range(len(parts), self._folder.kept_levels, -1):
            if not folders.remove_if_empty("/".join(parts[:depth]), at=root):
                return

    def _visit(self, prefix: str, visit: Callable[[int], T]) -> T | None:
        """Return what ``visit`` finds in the folder of a prefix, or None where that surely is absent."""
        parts = check_prefix(prefix).split("/")[:-1]
        with self._place("list", prefix or None).translating():
            found = None
            with contextlib.suppress(FileNotFoundError), self._folder.opened() as root:
                found = _visit_below(root, parts, visit)
            if self._folder.is_removed():
                raise self._place("list").error(CheckpointChangedError, "the folder was removed")
            return found


def _visit_below(root: int, parts: Sequence[str], visit: Callable[[int], T]) -> T | None:
    # A file where the prefix's folder would be means that there is nothing below the prefix.
    with contextlib.suppress(NotADirectoryError), folders.opened_folder(root, parts) as folder:
        return visit(folder)
    return None


def _remove_leftover(name: str, *, at: int) -> None:
    if not folders.is_hidden(name):
        folders.remove_if_empty(name, at=at)  # a save's own folder, unless it has gone on meanwhile
        return
    try:
        posix.remove_file(name, at=at)
    except IsADirectoryError:
        folders.remove_tree(name, at=at)


def _check_visible(key: str) -> str:
    if any(folders.is_hidden(part) for part in check_key(key).split("/")):
        raise ConfigError(f"{key!r}: names that start with .tmp- or .trash- are reserved")
    return key


def _name(path: str) -> str:
    return path.rpartition("/")[2]
