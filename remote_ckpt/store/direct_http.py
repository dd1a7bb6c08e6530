"""HTTP/1.1 over one socket, for bodies that are received where they are wanted.

Client libraries allocate a body, then copy it: 1 to 2.4 s of CPU for a GiB. Received into the destination's
own memory it costs a fifth of that. Only what ranged GETs need is spoken, and whatever is not exactly as
it should be ends the connection: no answer may be taken for the rest of another.

Protocol: https://www.rfc-editor.org/rfc/rfc9112
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from remote_ckpt.options import KiB, MiB

_MAX_HEAD_BYTES: Final = 64 * KiB
_MAX_INTERIM_COUNT: Final = 5
_FIRST_BYTES: Final = 8 * KiB  # what comes of a body with its head is copied once
_PIECE_BYTES: Final = 64 * MiB  # some systems take no length above 2 GiB

_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?")
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?")
_LENGTH: Final = re.compile(r"\d{1,18}", re.ASCII)


class ProtocolError(Exception):
    """What came is no whole HTTP answer."""


class UnansweredError(Exception):
    """The connection ended before the first byte of an answer; of one that was kept that is usual."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long one request may take.

    Args:
        connect_seconds: Longest wait for a connection.
        pause_seconds: Longest wait for the next bytes.
        ends: When all has to be over, by :func:`time.monotonic`.
    """

    connect_seconds: float
    pause_seconds: float
    ends: float

    def left_seconds(self) -> float:
        """Return what is left of the whole time; raises TimeoutError where that is nothing."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for the whole request is over")
        return left


@dataclass(frozen=True, slots=True)
class Head:
    """The first part of an answer.

    Args:
        status: The status.
        headers: By name in lower case; what came twice is joined with a comma.
        is_last: The server closes the connection after it.
        length_bytes: Announced length of the body; None where it comes in chunks or ends with the connection.
        is_chunked: It comes in chunks.
    """

    status: int
    headers: Mapping[str, str]
    is_last: bool
    length_bytes: int | None
    is_chunked: bool


def parse_head(data: bytes) -> Head:
    """Return what an answer's status line and header fields say.

    Args:
        data: All lines, without the empty one.

    Raises:
        ProtocolError: They are no HTTP/1 answer, or contradict each other.
    """
    first, *lines = data.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise ProtocolError("it is no HTTP answer")
    headers: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise ProtocolError("it has a malformed header field")
        name, text = field[1].decode("ascii").lower(), field[2].decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None and (length is not None or coding.lower() != "chunked"):
        raise ProtocolError("it does not say clearly how long its body is")
    if length is not None and not _LENGTH.fullmatch(length):
        raise ProtocolError("its content-length is no number")
    tokens = {token.strip().lower() for token in headers.get("connection", "").split(",")}
    is_last = "close" in tokens or (status[1] == b"0" and "keep-alive" not in tokens)
    return Head(int(status[2]), headers, is_last, None if length is None else int(length), coding is not None)


class Connection:
    """A connection that serves one request after the other, each answer read whole before the next.

    Made by :func:`open_connection`.

    Attributes:
        is_kept: It has served a request before.
        is_reusable: The last answer was read whole, and the server keeps the connection open.
        idle_since: When it was last used, by :func:`time.monotonic`.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.is_kept = False
        self.is_reusable = False
        self.idle_since = 0.0
        self._socket = channel
        self._held = b""  # received and not used yet
        self._wait_seconds: float | None = None  # as the socket is set
        self._head: Head | None = None

    def ask(self, request: bytes, patience: Patience) -> Head:
        """Send a request without a body, and return its answer's head.

        Raises:
            UnansweredError: The connection had ended.
            ProtocolError: What came is no answer.
            OSError: The network failed; a TimeoutError where nothing came in time.
        """
        self.is_reusable = False
        try:
            self._set_wait(patience)
            self._socket.sendall(request)
            self._held = self._socket.recv(_FIRST_BYTES)
        except TimeoutError:
            raise
        except OSError as error:
            raise UnansweredError(error.strerror or str(error)) from error
        if not self._held:
            raise UnansweredError("the connection was closed")
        for _ in range(_MAX_INTERIM_COUNT):
            head = parse_head(self._read_until(b"\r\n\r\n", patience))
            if head.status >= 200:
                self._head = head
                return head
        raise ProtocolError("it is nothing but interim answers")

    def receive_into(self, out: memoryview, patience: Patience) -> None:
        """Fill ``out`` with the next bytes of the body; errors as :meth:`ask`."""
        filled = min(len(out), len(self._held))
        out[:filled] = self._held[:filled]
        self._held = self._held[filled:]
        while filled < len(out):
            self._set_wait(patience)
            count = self._socket.recv_into(out[filled : filled + _PIECE_BYTES])
            if not count:
                raise ProtocolError(f"its body ended {len(out) - filled} bytes early")
            filled += count

    def finish(self) -> None:
        """Say that the body was read whole: the next request may use the connection."""
        is_last = self._head is None or self._head.is_last
        self.is_reusable = not is_last and not self._held  # bytes that nobody asked for are a lie
        self.is_kept = True
        self.idle_since = time.monotonic()

    def read_body(self, limit_bytes: int, patience: Patience) -> bytes:
        """Return the body of the answer, or its beginning; errors as :meth:`ask`."""
        head = self._head
        if head is None or head.status in (204, 304):
            self.finish()
            return b""
        if head.is_chunked:
            return self._read_chunks(limit_bytes, patience)
        if head.length_bytes is None:
            return self._read_to_end(limit_bytes, patience)
        body = bytearray(min(head.length_bytes, limit_bytes))
        self.receive_into(memoryview(body), patience)
        if head.length_bytes <= limit_bytes:
            self.finish()
        return bytes(body)

    def is_stale(self) -> bool:
        """Whether the server has closed the connection, or sent what nobody asked for."""
        self._wait_seconds = None
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return True  # whatever comes now is the end, or none of our answers

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _set_wait(self, patience: Patience) -> None:
        wait_seconds = min(patience.pause_seconds, patience.left_seconds())
        if wait_seconds != self._wait_seconds:  # a system call
            self._socket.settimeout(wait_seconds)
            self._wait_seconds = wait_seconds

    def _read_more(self, patience: Patience) -> None:
        if len(self._held) > _MAX_HEAD_BYTES:
            raise ProtocolError("its head is too long")
        self._set_wait(patience)
        piece = self._socket.recv(_FIRST_BYTES)
        if not piece:
            raise ProtocolError("it ended early")
        self._held += piece

    def _read_until(self, mark: bytes, patience: Patience) -> bytes:
        while mark not in self._held:
            self._read_more(patience)
        found, _, self._held = self._held.partition(mark)
        return found

    def _read_chunks(self, limit_bytes: int, patience: Patience) -> bytes:
        body = b""
        while True:
            line = _CHUNK.fullmatch(self._read_until(b"\r\n", patience))
            if line is None:
                raise ProtocolError("its body has a malformed chunk")
            size_bytes = int(line[1], 16)
            piece = bytearray(min(size_bytes, limit_bytes - len(body)))
            self.receive_into(memoryview(piece), patience)
            body += piece
            if len(piece) < size_bytes:
                return body
            if not size_bytes:
                break
            if self._read_until(b"\r\n", patience):
                raise ProtocolError("its body has a malformed chunk")
        while self._read_until(b"\r\n", patience):  # trailers say nothing that is needed
            continue
        self.finish()
        return body

    def _read_to_end(self, limit_bytes: int, patience: Patience) -> bytes:
        body = self._held
        while len(body) < limit_bytes:
            self._set_wait(patience)
            piece = self._socket.recv(limit_bytes - len(body))
            if not piece:
                break
            body += piece
        return body[:limit_bytes]


def open_connection(host: str, port: int, patience: Patience) -> Connection:
    """Connect to a server.

    Args:
        host: Name or address, without brackets.
        port: TCP port.
        patience: How long to wait.

    Raises:
        OSError: No connection came about; a TimeoutError where that took too long.
    """
    wait_seconds = min(patience.connect_seconds, patience.left_seconds())
    return Connection(socket.create_connection((host, port), timeout=wait_seconds))
