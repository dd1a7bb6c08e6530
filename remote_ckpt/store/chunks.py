"""An object's bytes on their way into an upload: counted, checked, cut into few enough parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from remote_ckpt.errors import IntegrityError
from remote_ckpt.options import KiB, MiB
from remote_ckpt.store.base import Buffer, ChunkSource

MAX_PARTS: Final = 9_500
"""Most parts of one upload that we plan: S3 refuses the 10,001st, after all others were sent."""

SLOWEST_BYTES_PER_SECOND: Final = 256 * KiB
"""The slowest transfer of a body that is waited for."""


def plan_part_bytes(size_bytes: int, part_bytes: int) -> int:
    """Return a part size, at least ``part_bytes``, that needs at most :data:`MAX_PARTS` parts."""
    needed = -(-size_bytes // MAX_PARTS)
    return max(part_bytes, -(-needed // MiB) * MiB)


def cut_parts(chunks: Iterable[Buffer], part_bytes: int) -> Iterator[bytes]:
    """Join and cut chunks into parts of exactly ``part_bytes``, the last one shorter."""
    held = bytearray()
    for chunk in chunks:
        rest = memoryview(chunk)
        while len(rest):
            taken = rest[: part_bytes - len(held)]
            held += taken
            rest = rest[len(taken) :]
            if len(held) == part_bytes:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


class CheckedChunks:
    """Iterates over a source once and fails where its bytes do not sum up to the size.

    A driver may wrap or lose an exception that passes through it, so the original is kept.

    Attributes:
        failure: What went wrong in the source, or the IntegrityError of a wrong sum; else None.
    """

    def __init__(self, source: ChunkSource, size_bytes: int, *, url: str, key: str) -> None:
        self.failure: BaseException | None = None
        self._source = source
        self._size_bytes = size_bytes
        self._url, self._key = url, key

    def __iter__(self) -> Iterator[Buffer]:
        try:
            yield from self._checked()
        except GeneratorExit:  # the driver stopped reading: its own error says why
            raise
        except BaseException as error:
            self.failure = error
            raise

    def feed(self, send: Callable[[], None]) -> None:
        """Call ``send``; what the source raises in it passes as it was, whatever the driver makes of it."""
        try:
            send()
        except BaseException:
            if self.failure is None:
                raise
        if self.failure is not None:  # out here, so that its own context stays as it was
            raise self.failure

    def joined(self) -> Buffer:
        """Return all bytes; a single chunk is not copied."""
        chunks = list(self)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _checked(self) -> Iterator[Buffer]:
        sum_bytes = 0
        for chunk in self._source():
            sum_bytes += len(chunk)
            if sum_bytes > self._size_bytes:
                break
            if len(chunk):
                yield chunk
        if sum_bytes != self._size_bytes:
            given = f"{sum_bytes} bytes" if sum_bytes < self._size_bytes else "more"
            message = f"the source gave {given} instead of {self._size_bytes} bytes"
            raise IntegrityError(message, url=self._url, key=self._key, operation="write_stream")
