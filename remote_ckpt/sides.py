"""One of two checkpoints that are compared: its index, and its bytes."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, cast

from remote_ckpt.archive import SUPPORTED_DTYPES
from remote_ckpt.checksum_comparison import has_checksums
from remote_ckpt.entries import ChunkEntry, Index
from remote_ckpt.errors import IntegrityError, ObjectNotFoundError
from remote_ckpt.moves import run_all
from remote_ckpt.options import KiB
from remote_ckpt.overlaps import with_elements
from remote_ckpt.snapshot import Snapshot
from remote_ckpt.stock_payload import find_payload

_EDGE_BYTES = 64 * KiB
"""Read at both ends of a stock archive: what describes it is there."""


@dataclass(frozen=True, slots=True)
class Side:
    """A checkpoint that is compared with another.

    Args:
        snapshot: Held open.
        index: Its index.
    """

    snapshot: Snapshot
    index: Index

    @property
    def names(self) -> set[str]:
        """Names of all tensors and values."""
        return {*self.index.tensors, *self.index.blobs}

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a tensor's elements, or else of what ``torch.load`` reads."""
        if (blob := self.index.blobs.get(name)) is not None:
            return blob.length_bytes
        tensor = self.index.tensors[name]
        if (item_bytes := SUPPORTED_DTYPES.get(tensor.dtype)) is not None:
            return math.prod(tensor.sizes) * item_bytes
        return sum(chunk.archive_bytes for chunk in tensor.chunks)

    def read(self, position: int, offset_bytes: int, length_bytes: int) -> memoryview:
        """Return a range (at least 1 byte) of an object that the index names by its position.

        Raises:
            CheckpointChangedError, CheckpointDamagedError: The object is missing.
            IntegrityError: It is too short.
        """
        key = self.index.objects[position]
        try:
            return memoryview(self.snapshot.store.read_range(key, offset_bytes, length_bytes))
        except ObjectNotFoundError as error:
            raise self.snapshot.explain_missing(key) from error
        except IntegrityError:
            self.snapshot.require_unchanged()
            raise

    def chunks_of(self, names: Sequence[str], *, concurrency: int) -> dict[str, list[ChunkEntry]]:
        """Return the chunks (with elements) of some tensors.

        Stock archives are looked into: a chunk stays opaque only where nobody knows where its elements lie.
        Raises as :meth:`read`.
        """
        found = {name: with_elements(self.index.tensors[name].chunks) for name in names}
        if has_checksums(self.index):
            return found
        lock = threading.Lock()

        def look_into(place: tuple[str, int]) -> None:
            name, number = place
            chunk = self._located(found[name][number], self.index.tensors[name].dtype)
            with lock:
                found[name][number] = chunk

        places = [(name, number) for name in names for number in range(len(found[name]))]
        run_all(look_into, places, concurrency=concurrency)
        return found

    def _located(self, chunk: ChunkEntry, dtype: str) -> ChunkEntry:
        payload = find_payload(self._edges(chunk), dtype, chunk.sizes)
        if payload is None:
            return chunk
        return replace(chunk, payload_offset=chunk.archive_offset + payload)

    def _edges(self, chunk: ChunkEntry) -> BinaryIO:
        """Return a stock archive as a file of which both ends are there."""
        begin, length = chunk.archive_offset, chunk.archive_bytes
        if length <= 2 * _EDGE_BYTES:
            return io.BytesIO(self.read(chunk.object, begin, length) if length else b"")
        head = self.read(chunk.object, begin, _EDGE_BYTES)
        tail = self.read(chunk.object, begin + length - _EDGE_BYTES, _EDGE_BYTES)
        return cast("BinaryIO", _EdgeFile(bytes(head), bytes(tail), length))


class _EdgeFile(io.RawIOBase):
    """A file that can be read near its begin and its end; elsewhere reading is a ValueError."""

    def __init__(self, head: bytes, tail: bytes, size_bytes: int) -> None:
        super().__init__()
        self._head, self._tail = head, tail
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: object) -> int:
        out = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        length = max(0, min(len(out), self._size_bytes - self._at))
        out[:length] = self._bytes(self._at, length)
        self._at += length
        return length

    def _bytes(self, begin: int, length: int) -> bytes:
        tail_begin = self._size_bytes - len(self._tail)
        if begin + length <= len(self._head):
            return self._head[begin : begin + length]
        if begin >= tail_begin:
            return self._tail[begin - tail_begin : begin - tail_begin + length]
        raise ValueError("not near the ends of the archive")


Sides = tuple[Side, Side]
