"""Symbolic links in a directory of a local disk: what lies behind one is swept where it lies, or not at all.

Listings follow links, and so does a deletion of what they show. What a sweep plans therefore never lies
behind a link: neither a checkpoint's name nor a folder inside it that leads elsewhere is entered. A link to a
file is different: deleting it removes the link only.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

from remote_ckpt.store.base import Store


def is_link(above: Store, folder: Store, name: str) -> bool:
    """Whether a folder's name leads elsewhere; never where the store has no folders."""
    if not folder.capabilities.has_folders:
        return False
    return folder.identity != f"{above.identity.rstrip('/')}/{name}"


def linked_folders(checkpoint: Store, keys: Iterable[str]) -> frozenset[str]:
    """Return the folders of ``keys``, as far as a link leads to them: ``d-0123456789abcdef``.

    Opens each folder once, on stores with folders only.

    Raises:
        CheckpointNotFoundError: One was removed meanwhile.
    """
    if not checkpoint.capabilities.has_folders:
        return frozenset()
    folders = {folder for key in keys if (folder := key.rpartition("/")[0])}
    return frozenset(folder for folder in folders if _is_behind_link(checkpoint, folder))


def _is_behind_link(above: Store, path: str) -> bool:
    name, _, rest = path.partition("/")
    with closing(above.scope(name)) as folder:
        return is_link(above, folder, name) or (bool(rest) and _is_behind_link(folder, rest))
