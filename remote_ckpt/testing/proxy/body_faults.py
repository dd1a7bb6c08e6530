"""Faults of the bytes on their way: cut, stalled, altered, slow. A ``side`` says in which of the messages."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final

from remote_ckpt.options import KiB
from remote_ckpt.testing.proxy.exchange import Answer, Body, Call, Disconnect, Proceed, Side, read_body

_PACED_BYTES: Final = 16 * KiB


@dataclass(frozen=True, slots=True)
class StreamFault(ABC):
    """Changes a body as it passes, without holding it. A message without one passes as it is.

    Args:
        side: The message that is changed.
    """

    side: Side = "answer"

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        if self.side == "request":
            return await proceed(replace(call, body=self._changed(call.body, call.headers)))
        answer = await proceed(call)
        return replace(answer, body=self._changed(answer.body, answer.headers))

    def _changed(self, body: Body, headers: Mapping[str, str]) -> Body:
        size_bytes = int(headers.get("content-length", 0))
        is_empty = "content-length" in headers and not size_bytes
        return body if is_empty else self.stream(body, size_bytes)

    @abstractmethod
    def stream(self, body: Body, size_bytes: int) -> Body:
        """Yield the body as it is passed on; ``size_bytes`` is its announced length, 0 if it has none."""


@dataclass(frozen=True, slots=True)
class Cut(StreamFault):
    """The connection ends in the middle of a body. Of a request, the store gets no more than that either.

    Args:
        keep_bytes: How many bytes pass; None: half of them.
        is_reset: By a TCP reset; else it is closed.
    """

    _: KW_ONLY
    keep_bytes: int | None = None
    is_reset: bool = False

    async def stream(self, body: Body, size_bytes: int) -> Body:
        """See :meth:`StreamFault.stream`."""
        async for piece in _first(body, _half(self.keep_bytes, size_bytes)):
            yield piece
        raise Disconnect(is_reset=self.is_reset)


@dataclass(frozen=True, slots=True)
class Stall(StreamFault):
    """A body stops in the middle, and the connection stays open until the client gives up.

    Args:
        keep_bytes: How many bytes pass; None: half of them.
    """

    _: KW_ONLY
    keep_bytes: int | None = None

    async def stream(self, body: Body, size_bytes: int) -> Body:
        """See :meth:`StreamFault.stream`."""
        async for piece in _first(body, _half(self.keep_bytes, size_bytes)):
            yield piece
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class FlipByte(StreamFault):
    """One bit of one byte changes.

    Args:
        offset_bytes: Which byte; a negative number counts from the end; None: the middle.
    """

    _: KW_ONLY
    offset_bytes: int | None = None

    async def stream(self, body: Body, size_bytes: int) -> Body:
        """See :meth:`StreamFault.stream`."""
        left = _half(self.offset_bytes, size_bytes)
        left += size_bytes if left < 0 else 0
        async for piece in body:
            if 0 <= left < len(piece):
                piece = piece[:left] + bytes([piece[left] ^ 1]) + piece[left + 1 :]
            left -= len(piece)
            yield piece


@dataclass(frozen=True, slots=True)
class Throttle:
    """A slow connection: each request waits, and bodies pass at a given speed in both directions.

    Args:
        latency_seconds: Wait before each request.
        bytes_per_second: Speed of each connection; None: full.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float | None = None

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        await asyncio.sleep(self.latency_seconds)
        if self.bytes_per_second is None:
            return await proceed(call)
        answer = await proceed(replace(call, body=_paced(call.body, self.bytes_per_second)))
        return replace(answer, body=_paced(answer.body, self.bytes_per_second))


@dataclass(frozen=True, slots=True)
class ContentFault(ABC):
    """Changes a body as a whole, and announces the new length: nothing in HTTP shows it.

    Args:
        side: The message that is changed.
    """

    side: Side = "answer"

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        if self.side == "request":
            return await proceed(call.with_content(self.alter(await read_body(call.body))))
        answer = await proceed(call)
        if call.method == "HEAD":
            return answer
        return answer.with_content(self.alter(await read_body(answer.body)))

    @abstractmethod
    def alter(self, content: bytes) -> bytes:
        """Return the content that is passed on."""


@dataclass(frozen=True, slots=True)
class Shorten(ContentFault):
    """The last bytes of a body are missing.

    Args:
        missing_bytes: How many.
    """

    _: KW_ONLY
    missing_bytes: int = 1

    def alter(self, content: bytes) -> bytes:
        """See :meth:`ContentFault.alter`."""
        return content[: max(0, len(content) - self.missing_bytes)]


@dataclass(frozen=True, slots=True)
class ZeroBytes(ContentFault):
    """A piece of a body comes as zeros.

    Args:
        offset_bytes: Where it begins.
        length_bytes: How long it is.
    """

    _: KW_ONLY
    offset_bytes: int = 0
    length_bytes: int = 1024 * KiB

    def alter(self, content: bytes) -> bytes:
        """See :meth:`ContentFault.alter`."""
        head, rest = content[: self.offset_bytes], content[self.offset_bytes :]
        return head + bytes(min(self.length_bytes, len(rest))) + rest[self.length_bytes :]


@dataclass(frozen=True, slots=True)
class Surround(ContentFault):
    """Bytes stand before and after a body: a store that keeps the framing of a chunked upload, say.

    Args:
        head: Before it.
        tail: After it.
    """

    _: KW_ONLY
    head: bytes = b""
    tail: bytes = b""

    def alter(self, content: bytes) -> bytes:
        """See :meth:`ContentFault.alter`."""
        return self.head + content + self.tail


def _half(given: int | None, size_bytes: int) -> int:
    return size_bytes // 2 if given is None else given


async def _first(body: Body, count_bytes: int) -> Body:
    left = count_bytes
    while left > 0 and (piece := await anext(body, None)) is not None:
        yield piece[:left]
        left -= len(piece)


async def _paced(body: Body, bytes_per_second: float) -> Body:
    async for piece in body:
        for start in range(0, len(piece), _PACED_BYTES):
            part = piece[start : start + _PACED_BYTES]
            await asyncio.sleep(len(part) / bytes_per_second)
            yield part
