"""Listings through obstore itself: Google Cloud Storage, Azure, and S3's directory buckets.

For all other S3 see :mod:`remote_ckpt.store.s3_listing`: there obstore takes what is no listing for an empty
one. It lists a folder marker ``name/`` as the object ``name``: objects without bytes are looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import obstore

from remote_ckpt.store.base import ObjectInfo

_LIST_PAGE: Final = 1_000


class Lister(Protocol):
    """Lists a bucket; keys and prefixes are whole. Its own client's errors are the caller's to translate."""

    def objects(self, prefix: str, *, operation: str) -> Iterable[ObjectInfo]:
        """Return every object whose key starts with ``prefix``, in any order."""
        ...

    def level(self, prefix: str, *, operation: str) -> tuple[Sequence[ObjectInfo], Sequence[str]]:
        """Return the objects right below ``prefix``, and the prefixes (each with its ``/``) below it."""
        ...

    def has(self, key: str, *, operation: str) -> bool:
        """Ask with a request whose answer has a body; returns whether the object is known to be there."""
        ...


@dataclass(frozen=True, slots=True)
class ObstoreLister:
    """Lists with a client of obstore."""

    client: Any = field(repr=False)

    def objects(self, prefix: str, *, operation: str) -> Iterable[ObjectInfo]:
        """See :meth:`Lister.objects`."""
        pages = obstore.list(self.client, prefix, chunk_size=_LIST_PAGE)
        return self._without_markers((meta for page in pages for meta in page), prefix)

    def level(self, prefix: str, *, operation: str) -> tuple[Sequence[ObjectInfo], Sequence[str]]:
        """See :meth:`Lister.level`."""
        found = obstore.list_with_delimiter(self.client, prefix)
        names = [f"{name.rstrip('/')}/" for name in found["common_prefixes"]]
        return [*self._without_markers(found["objects"], prefix)], names

    def has(self, key: str, *, operation: str) -> bool:
        """See :meth:`Lister.has`; false: obstore lists what is below a key, not the key."""
        next(iter(obstore.list(self.client, key)), None)
        return False

    def _without_markers(self, found: Iterable[Mapping[str, Any]], prefix: str) -> Iterator[ObjectInfo]:
        for meta in found:
            # The marker of the prefix itself has lost the slash that the prefix ends with.
            if meta["path"].startswith(prefix) and (meta["size"] or self._is_object(meta["path"])):
                yield info_of(meta)

    def _is_object(self, key: str) -> bool:
        try:
            obstore.head(self.client, key)
        except FileNotFoundError:
            return False
        return True


def info_of(meta: Mapping[str, Any]) -> ObjectInfo:
    """Return obstore's description of an object as ours, its key whole."""
    # HEAD gives whole seconds, listings of some servers more: one object has one time.
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"].replace(microsecond=0))
