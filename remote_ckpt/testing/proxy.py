"""An HTTP server in front of an S3 server: counts requests, and answers some of them itself.

It stands for what lies between a job and its store (load balancers, login pages, other products)::

    with FaultProxy(server.endpoint_url) as proxy:
        proxy.rule = lambda request: Reply(200, b"<html>") if request.is_listing else None
        open_store(url, storage_options={**options, "endpoint_url": proxy.endpoint_url}).list()
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from typing_extensions import Self

_OF_THE_CONNECTION: Final = frozenset({"transfer-encoding", "connection", "expect", "content-length"})
_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """One request as it arrived: method, path with query, headers in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def is_listing(self) -> bool:
        """Whether it asks for ListObjectsV2."""
        return self.method == "GET" and "list-type=2" in self.path


@dataclass(frozen=True, slots=True)
class Reply:
    """What the proxy answers in the store's place; ``code`` makes the body S3's ``<Error>``."""

    status: int
    body: bytes = b""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        """The body that is sent."""
        return self.body if self.code is None else f"<Error><Code>{self.code}</Code></Error>".encode()


class FaultProxy:
    """Runs in threads of this process, on a free loopback port, until the ``with`` ends.

    Args:
        endpoint_url: The server behind it (plain HTTP). Empty: every request needs a reply of the rule.

    Attributes:
        rule: Returns the reply to a request, or None to let it through.
        requests: The requests that arrived, in order.
    """

    def __init__(self, endpoint_url: str = "") -> None:
        self.target = urlsplit(endpoint_url).netloc
        self.rule: Callable[[ProxiedRequest], Reply | None] = lambda request: None
        self.requests: list[ProxiedRequest] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._server.daemon_threads = True
        self._server.block_on_close = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def _answer(self) -> None:
        body = self._body()
        request = ProxiedRequest(
            self.command, self.path, {name.lower(): text for name, text in self.headers.items()}
        )
        self.proxy.requests.append(request)
        reply = self.proxy.rule(request)
        if reply is None:
            self._forward(request, body)
        else:
            self._send(reply.status, reply.headers, reply.content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size_bytes := int(self.rfile.readline().partition(b";")[0], 16):
            pieces.append(self.rfile.read(size_bytes))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _forward(self, request: ProxiedRequest, body: bytes) -> None:
        kept = {name: text for name, text in request.headers.items() if name not in _OF_THE_CONNECTION}
        connection = http.client.HTTPConnection(self.proxy.target, timeout=_SECONDS)
        try:
            connection.request(request.method, request.path, body, kept | {"content-length": str(len(body))})
            answer = connection.getresponse()
            self._send(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def _send(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        own = {name.lower(): text for name, text in headers.items()}
        is_head = self.command == "HEAD"
        own = {"content-length": str(len(content))} | own if is_head else own | _length(content)
        self.send_response_only(status)
        for name, text in {"date": self.date_time_string(), **own}.items():
            if name not in ("transfer-encoding", "connection"):
                self.send_header(name, text)
        self.end_headers()
        if not is_head:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _length(content: bytes) -> dict[str, str]:
    return {"content-length": str(len(content))}
