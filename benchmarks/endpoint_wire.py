"""HTTP/1.1 of the benchmark's endpoint: requests with their bodies, received into slabs; paced if wished."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from benchmarks.endpoint_objects import Body, Span, Stored

MIB: Final = 1 << 20
HEAD_BYTES: Final = 64 * 1024
PACED_BYTES: Final = MIB


@dataclass(frozen=True, slots=True)
class Link:
    """How the way to the client is: seconds to the first byte, bytes a second of one connection (0: any)."""

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0


class Pace:
    """Holds back one body."""

    def __init__(self, link: Link) -> None:
        self._rate = link.bytes_per_second
        self._began, self._moved_bytes = time.monotonic(), 0

    def step(self, wanted: int) -> int:
        """How much to move at once."""
        return min(wanted, PACED_BYTES) if self._rate else wanted

    def moved(self, count: int) -> None:
        """Wait until so much more may have been moved."""
        if self._rate:
            self._moved_bytes += count
            ahead = self._began + self._moved_bytes / self._rate - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)


@dataclass(slots=True)
class Request:
    """One request, its body received."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body


class Refused(Exception):
    """An S3 error."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Wire:
    """One connection: buffered for heads, past the buffer for bodies."""

    def __init__(self, connection: socket.socket, link: Link) -> None:
        self._connection = connection
        self._link = link
        self._is_plain = not isinstance(connection, ssl.SSLSocket)
        self._buffer = bytearray()

    def read_until(self, end: bytes) -> bytes | None:
        """Return what comes before ``end`` and drop both; None if the client has closed."""
        while (place := self._buffer.find(end)) < 0:
            more = self._connection.recv(HEAD_BYTES)
            if not more:
                return None
            self._buffer += more
        found = bytes(self._buffer[:place])
        del self._buffer[: place + len(end)]
        return found

    def pace(self) -> Pace:
        """Begin to count a body."""
        return Pace(self._link)

    def fill(self, view: memoryview, pace: Pace) -> None:
        """Receive just so many bytes."""
        held = min(len(view), len(self._buffer))
        view[:held] = self._buffer[:held]
        del self._buffer[:held]
        while held < len(view):
            step = pace.step(len(view) - held)
            if self._is_plain:
                count = self._connection.recv_into(view[held:], step, socket.MSG_WAITALL)
            else:
                count = self._connection.recv_into(view[held:], step)
            if not count:
                raise ConnectionResetError
            held += count
            pace.moved(count)

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def send_object(self, stored: Stored, start: int, length: int) -> None:
        """Send a range of an object."""
        pace = Pace(self._link)
        for span in stored.spans(start, length):
            done = 0
            while done < len(span.view):
                sent = self._send_piece(span, done, pace.step(len(span.view) - done))
                done += sent
                pace.moved(sent)

    def _send_piece(self, span: Span, start: int, count: int) -> int:
        if self._is_plain and span.slab is not None:
            return os.sendfile(self._connection.fileno(), span.slab.file, span.offset_bytes + start, count)
        self._connection.sendall(span.view[start : start + count])
        return count


class ChunkedWire:
    """The same below HTTP's own chunks (``Transfer-Encoding: chunked``)."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._left_bytes = 0
        self._is_first = True

    def read_until(self, end: bytes) -> bytes | None:
        """See :meth:`Wire.read_until`; for short lines."""
        found = bytearray()
        pace, one = self._wire.pace(), memoryview(bytearray(1))
        while not found.endswith(end):
            self.fill(one, pace)
            found += one
        return bytes(found[: -len(end)])

    def fill(self, view: memoryview, pace: Pace) -> None:
        """See :meth:`Wire.fill`."""
        done = 0
        while done < len(view):
            if not self._left_bytes:
                self._left_bytes = self._next_chunk()
            count = min(self._left_bytes, len(view) - done)
            self._wire.fill(view[done : done + count], pace)
            done += count
            self._left_bytes -= count

    def finish(self) -> None:
        """Receive the end of the body."""
        if self._left_bytes or self._next_chunk():
            raise Refused(400, "IncompleteBody")
        self._wire.read_until(b"\r\n")

    def _next_chunk(self) -> int:
        if not self._is_first:
            self._wire.read_until(b"\r\n")
        self._is_first = False
        return int(self._wire.read_until(b"\r\n") or b"0", 16)


def receive(wire: Wire) -> Request | None:
    """Return the next request of a connection, None at its end."""
    head = wire.read_until(b"\r\n\r\n")
    if head is None:
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if headers.get("expect", "").lower() == "100-continue":
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts = urlsplit(target)
    bucket, _, key = parts.path.lstrip("/").partition("/")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return Request(method, unquote(bucket), unquote(key), query, headers, _receive_body(wire, headers))


def _receive_body(wire: Wire, headers: Mapping[str, str]) -> Body:
    is_http_chunked = "transfer-encoding" in headers
    if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        body = Body(int(headers["x-amz-decoded-content-length"]))
        if not is_http_chunked:
            _receive_aws_chunks(wire, body, wire.pace())
            return body
        chunked = ChunkedWire(wire)
        _receive_aws_chunks(chunked, body, wire.pace())
        chunked.finish()
        return body
    if is_http_chunked:
        raise Refused(411, "MissingContentLength")
    body = Body(int(headers.get("content-length", 0)))
    _fill(wire, body, 0, body.size_bytes, wire.pace())
    return body


def _receive_aws_chunks(wire: Wire | ChunkedWire, body: Body, pace: Pace) -> None:
    """Receive a body in AWS's chunks; neither their signatures nor the trailer are looked at."""
    held = 0
    while length := int((wire.read_until(b"\r\n") or b"0").split(b";")[0], 16):
        _fill(wire, body, held, length, pace)
        held += length
        wire.read_until(b"\r\n")
    while wire.read_until(b"\r\n"):
        pass


def _fill(wire: Wire | ChunkedWire, body: Body, start: int, length: int, pace: Pace) -> None:
    for span in body.spans(start, length):
        wire.fill(span.view, pace)
