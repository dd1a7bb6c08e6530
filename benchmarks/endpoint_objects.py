"""What the benchmark's endpoint holds: buckets of objects in shared memory, and open multipart uploads.

Memory is reused. Fresh pages cost the kernel more than receiving into them does, and a benchmark that saves
the same state again and again would measure that.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

SMALL_BYTES = 1 << 20
"""Bodies below this are plain bytes."""
SLAB_BYTES = 4 << 20
"""Larger ones take slabs of this size, whatever the size of a client's parts."""
REST_SECONDS = 2.0
"""A freed slab is used again after this: the kernel may still be sending its pages to a slow reader."""

_etags = itertools.count(1)


class Slab:
    """Memory that is a file, so that the kernel can send it by itself."""

    def __init__(self) -> None:
        self.file = os.memfd_create("slab")
        os.ftruncate(self.file, SLAB_BYTES)
        self.view = memoryview(mmap.mmap(self.file, SLAB_BYTES))
        self.freed_at = 0.0


class Slabs:
    """Hands out slabs, used ones first."""

    def __init__(self) -> None:
        self._free: deque[Slab] = deque()
        self._lock = threading.Lock()

    def warm(self, size_bytes: int) -> None:
        """Make slabs and touch all of their pages, before somebody measures."""
        for _ in range(0, size_bytes, SLAB_BYTES):
            slab = Slab()
            slab.view[:] = bytes(SLAB_BYTES)
            self._free.append(slab)

    def take(self) -> Slab:
        """Return the slab that has been free for the longest time, or a new one."""
        latest = time.monotonic() - REST_SECONDS
        with self._lock:
            if self._free and self._free[0].freed_at <= latest:
                return self._free.popleft()
        return Slab()

    def give(self, slabs: Iterable[Slab]) -> None:
        """Take slabs back."""
        now = time.monotonic()
        with self._lock:
            for slab in slabs:
                slab.freed_at = now
                self._free.append(slab)


SLABS = Slabs()


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring bytes of a body; those of a slab can be sent from its file."""

    view: memoryview
    slab: Slab | None
    offset_bytes: int


class Body:
    """Received bytes, in slabs unless they are few; the slabs are free again when nobody holds the body."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        count = 0 if size_bytes < SMALL_BYTES else -(-size_bytes // SLAB_BYTES)
        self._slabs = [SLABS.take() for _ in range(count)]
        self._bytes = memoryview(bytearray(0 if count else size_bytes))

    def __del__(self) -> None:
        SLABS.give(self._slabs)

    def spans(self, start: int, length: int) -> Iterator[Span]:
        """Yield the pieces of a range in order."""
        if not self._slabs:
            yield Span(self._bytes[start : start + length], None, start)
            return
        end = start + length
        while start < end:
            slab, offset = self._slabs[start // SLAB_BYTES], start % SLAB_BYTES
            count = min(end - start, SLAB_BYTES - offset)
            yield Span(slab.view[offset : offset + count], slab, offset)
            start += count


@dataclass(frozen=True, slots=True)
class Stored:
    """One object: its pieces in order, and what a HEAD says."""

    pieces: tuple[Body, ...]
    modified_at: float = field(default_factory=time.time)
    etag: str = field(default_factory=lambda: f'"{next(_etags):032x}"')

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    def spans(self, start: int, length: int) -> Iterator[Span]:
        """Yield the pieces of a range in order."""
        for piece in self.pieces:
            taken = min(length, piece.size_bytes - start)
            if taken > 0:
                yield from piece.spans(start, taken)
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
