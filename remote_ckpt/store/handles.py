"""How a local store reaches its folder: a root by its path, a scope by the handle that it holds.

OSError passes untranslated; :class:`remote_ckpt.store.posix.Place` gives it its meaning.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from remote_ckpt.errors import ConfigError
from remote_ckpt.store import folders, posix


class RootFolder:
    """A folder that is opened by its path every time, so that one made anew is seen.

    Args:
        path: Absolute path. It need not exist.
    """

    kept_levels = 1
    """Levels of folders below that stay when they get empty: others may hold them open to save."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_closed = False

    def close(self) -> None:
        """End its use; opening it then raises ConfigError."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raise ConfigError after :meth:`close`."""
        if self._is_closed:
            raise ConfigError("the store is closed", url=self.path)

    @contextlib.contextmanager
    def opened(self, *, create: bool = False) -> Iterator[int]:
        """Yield a new handle; with ``create`` a missing folder is made durably.

        Raises:
            FileNotFoundError: It surely is absent.
            OSError: Anything else, doubtful absence included.
        """
        self.check_open()
        handle = self._open(create=create)
        try:
            yield handle
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def opened_nearest(self) -> Iterator[int]:
        """Yield a new handle of the folder, or of the nearest one above it that exists."""
        try:
            handle = self._open(create=False)
        except FileNotFoundError:
            handle = folders.open_folder(folders.nearest_folder(self.path))
        try:
            yield handle
        finally:
            os.close(handle)

    def hold(self, name: str, *, create: bool) -> HeldFolder:
        """Open the folder ``name`` in this one, made durably with ``create``, and keep it open."""
        try:
            with self.opened(create=create) as here:
                if create:
                    # Even if it exists: whoever made it may have died before its name was synced.
                    folders.make_folder(name, at=here)
                return HeldFolder(self, name, folders.open_folder(name, at=here))
        except FileNotFoundError:
            folders.nearest_folder(os.path.join(self.path, name))  # raises where absence is doubtful
            raise

    def is_current(self) -> bool:
        """Whether the path leads to this folder: always, for a root."""
        return True

    def is_removed(self) -> bool:
        """Whether the folder was removed while it was held: never, for a root."""
        return False

    def remove(self) -> bool:
        """False: a root is not removed."""
        return False

    def _open(self, *, create: bool) -> int:
        if create:
            folders.make_folders(self.path)
        try:
            return folders.open_folder(self.path)
        except FileNotFoundError:
            folders.nearest_folder(self.path)  # raises where absence is doubtful
            raise


class HeldFolder(RootFolder):
    """A folder whose handle is held: what is done below it follows it when it is moved away.

    Args:
        parent: The folder that it was opened in.
        name: Its name there.
        handle: An open handle, which this object owns from now on.
    """

    kept_levels = 0

    def __init__(self, parent: RootFolder, name: str, handle: int) -> None:
        super().__init__(os.path.join(parent.path, name))
        self._parent = parent
        self._name = name
        self._handle = handle

    def close(self) -> None:
        """Close the handle."""
        if not self._is_closed:
            super().close()
            os.close(self._handle)

    def __del__(self) -> None:
        # A root with thousands of checkpoints must not run out of descriptors where scopes are just dropped.
        self.close()

    def is_current(self) -> bool:
        """Whether the path leads to this folder, and not to a newer life of the name, or nowhere."""
        self.check_open()
        try:
            with self._parent.opened() as parent:
                return self._is_in(parent, follow_symlinks=True)
        except FileNotFoundError:
            return False

    def is_removed(self) -> bool:
        """Whether the folder is gone; reading it then looks like reading an empty one."""
        return os.fstat(self._handle).st_nlink == 0

    def remove(self) -> bool:
        """Move the folder to a hidden name beside it in one step, empty it there and remove it.

        Returns:
            False if nothing was done, because the folder is gone from its path, another one or a
            symbolic link stands there, or the file system has no locks; also if late writers kept it
            from getting empty, which leaves the rest under the hidden name.
        """
        self.check_open()
        with self._parent.opened() as parent:
            trash = self._move_aside(parent)
            return trash is not None and folders.remove_tree(trash, at=parent)

    def _move_aside(self, parent: int) -> str | None:
        # Without the lock another process could put a new folder here between the look and the move.
        with folders.locked(parent) as is_locked:
            if not is_locked or not self._is_in(parent, follow_symlinks=False):
                return None
            trash = posix.new_hidden_name(folders.TRASH_PREFIX)
            os.rename(self._name, trash, src_dir_fd=parent, dst_dir_fd=parent)
            folders.sync_folder(parent)
            return trash

    def _is_in(self, parent: int, *, follow_symlinks: bool) -> bool:
        held = os.fstat(self._handle)
        return posix.is_same_file(self._name, held, at=parent, follow_symlinks=follow_symlinks)

    def _open(self, *, create: bool) -> int:
        return folders.open_folder(".", at=self._handle)
