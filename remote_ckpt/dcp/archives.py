"""``torch.save`` archives in a store, read without holding more than the tensor that comes out.

torch's zip reader asks for the table at the archive's end, a few small records, and then for the whole
storage in one call with the destination's memory. A large archive is therefore offered as a file whose
reads are ranged requests: small ones from a cached head and tail, a large one in parallel parts received
straight into that memory.
"""

from __future__ import annotations

import io

from remote_ckpt.dcp.sources import StoredRange
from remote_ckpt.options import KiB, Options
from remote_ckpt.store.base import Store
from remote_ckpt.transfer import Direct, fetch_all

EDGE_BYTES = 64 * KiB
"""Read at both ends of an archive at once; torch keeps its small records there."""


class ArchiveFile(io.RawIOBase):
    """A read-only, seekable file over one archive of an object.

    Args:
        store: The checkpoint.
        stored: The archive; it carries no checksums (our own opaque archives are read whole and checked).
        options: Part size, concurrency and budget of large reads.
    """

    def __init__(self, store: Store, stored: StoredRange, options: Options) -> None:
        super().__init__()
        self._store = store
        self._stored = stored
        self._options = options
        self._at = 0
        self._edges: dict[int, bytes] = {}

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, and return the new position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.length_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: object) -> int:
        """Fill ``buffer`` as far as the archive goes; returns the number of bytes."""
        out = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        length = max(0, min(len(out), self._stored.length_bytes - self._at))
        if length:
            self._fill(out[:length])
            self._at += length
        return length

    def _fill(self, out: memoryview) -> None:
        if len(out) > EDGE_BYTES:
            self._fetch(self._at, out)
            return
        last = max(0, self._stored.length_bytes - EDGE_BYTES)
        for start in (0, last):
            if start <= self._at and self._at + len(out) <= start + EDGE_BYTES:
                edge = self._edge(start)
                out[:] = edge[self._at - start : self._at - start + len(out)]
                return
        self._fetch(self._at, out)

    def _edge(self, start: int) -> bytes:
        if start not in self._edges:
            length = min(EDGE_BYTES, self._stored.length_bytes - start)
            data = self._store.read_range(self._stored.key, self._stored.offset_bytes + start, length)
            self._edges[start] = bytes(data)
        return self._edges[start]

    def _fetch(self, start: int, out: memoryview) -> None:
        cut = self._options.transfer.part_bytes
        parts = [
            Direct(
                self._stored.key,
                self._stored.offset_bytes + start + first,
                out[first : first + cut],
                _unchecked,
            )
            for first in range(0, len(out), cut)
        ]
        fetch_all(self._store, wanted=[], direct=parts, options=self._options.transfer)


def _unchecked() -> None:
    """A stock checkpoint has no checksums."""


__all__ = ["EDGE_BYTES", "ArchiveFile"]
