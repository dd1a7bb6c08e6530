"""What the benchmark's endpoint holds: buckets of objects in shared memory, and open multipart uploads.

Memory is reused. Fresh pages cost the kernel more than receiving into them does, and a benchmark that saves
the same state again and again would measure that.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SMALL_BYTES = 1 << 20
"""Bodies below this are plain bytes."""
REST_SECONDS = 2.0
"""A freed slab is used again after this: the kernel may still be sending its pages to a slow reader."""

_etags = itertools.count(1)


class Slab:
    """Memory that is a file, so that the kernel can send it by itself."""

    def __init__(self, capacity_bytes: int) -> None:
        self.file = os.memfd_create("slab")
        os.ftruncate(self.file, capacity_bytes)
        self.view = memoryview(mmap.mmap(self.file, capacity_bytes))
        self.capacity_bytes = capacity_bytes
        self.freed_at = 0.0


class Slabs:
    """Hands out slabs, used ones first."""

    def __init__(self) -> None:
        self._free: list[Slab] = []  # sorted by capacity
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Slab:
        """Return a slab of at least ``size_bytes``, and of not more than twice that."""
        latest = time.monotonic() - REST_SECONDS
        with self._lock:
            start = bisect.bisect_left(self._free, size_bytes, key=lambda slab: slab.capacity_bytes)
            for place in range(start, len(self._free)):
                if self._free[place].capacity_bytes > 2 * size_bytes:
                    break
                if self._free[place].freed_at <= latest:
                    return self._free.pop(place)
        return Slab(size_bytes)

    def give(self, slab: Slab) -> None:
        """Take a slab back."""
        slab.freed_at = time.monotonic()
        with self._lock:
            bisect.insort(self._free, slab, key=lambda each: each.capacity_bytes)


SLABS = Slabs()


class Body:
    """Received bytes, in a slab unless they are few; the slab is free again when nobody holds the body."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.slab = SLABS.take(size_bytes) if size_bytes >= SMALL_BYTES else None
        self.view = self.slab.view[:size_bytes] if self.slab else memoryview(bytearray(size_bytes))

    def __del__(self) -> None:
        if self.slab is not None:
            SLABS.give(self.slab)


@dataclass(frozen=True, slots=True)
class Stored:
    """One object: its pieces in order, and what a HEAD says."""

    pieces: tuple[Body, ...]
    modified_at: float = field(default_factory=time.time)
    etag: str = field(default_factory=lambda: f'"{next(_etags):032x}"')

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    def parts(self, start: int, length: int) -> Iterator[tuple[Body, int, int]]:
        """Yield piece, offset and length that make up a range."""
        for piece in self.pieces:
            taken = min(length, piece.size_bytes - start)
            if taken > 0:
                yield piece, start, taken
                length -= taken
            start = max(0, start - piece.size_bytes)


@dataclass(slots=True)
class Upload:
    """An open multipart upload."""

    key: str
    upload_id: str
    started_at: float = field(default_factory=time.time)
    parts: dict[int, Body] = field(default_factory=dict)


class Bucket:
    """Objects by key, and the open uploads."""

    def __init__(self) -> None:
        self.uploads: dict[str, Upload] = {}
        self._objects: dict[str, Stored] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> Stored | None:
        return self._objects.get(key)

    def put(self, key: str, stored: Stored, *, only_if_absent: bool) -> bool:
        """Store an object; false if there is one already and it must be new."""
        with self._lock:
            if only_if_absent and key in self._objects:
                return False
            self._objects[key] = stored
        return True

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def begin_upload(self, key: str) -> Upload:
        upload = Upload(key, os.urandom(16).hex())
        with self._lock:
            self.uploads[upload.upload_id] = upload
        return upload

    def end_upload(self, upload_id: str) -> Upload | None:
        """Close an upload, completed or aborted; None if it is not open."""
        with self._lock:
            return self.uploads.pop(upload_id, None)

    def open_uploads(self, prefix: str) -> Sequence[Upload]:
        with self._lock:
            found = [upload for upload in self.uploads.values() if upload.key.startswith(prefix)]
        return sorted(found, key=lambda upload: (upload.key, upload.upload_id))

    def page(
        self, prefix: str, delimiter: str, after: str, count: int
    ) -> tuple[Sequence[tuple[str, Stored]], Sequence[str], str]:
        """Return objects and common prefixes of one page, and after what the next begins (empty: no more)."""
        with self._lock:
            known = dict(self._objects)
        objects: list[tuple[str, Stored]] = []
        prefixes: list[str] = []
        last = ""
        for key in sorted(key for key in known if key.startswith(prefix)):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = prefix + head + found if found else key
            if name <= after or name == last:
                continue
            if len(objects) + len(prefixes) == count:
                return objects, prefixes, last
            last = name
            if found:
                prefixes.append(name)
            else:
                objects.append((key, known[key]))
        return objects, prefixes, ""
