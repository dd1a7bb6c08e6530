"""Files of a web server: ranges and none, absence, failures, and what it cannot do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from remote_ckpt.errors import (
    AccessDeniedError,
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.options import CommitOptions, Options, RetryOptions
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store

BODY = bytes(range(256)) * 40
ONCE = Options(retry=RetryOptions(max_attempts=1))


class WebServer(ThreadingHTTPServer):
    """Serves ``BODY`` as ``/w/f.bin``.

    Attributes:
        knows_ranges: Whether it honours a range.
        tells_size: Whether it sends the whole file's length.
        status: What it answers instead, if not 0.
    """

    knows_ranges = True
    tells_size = True
    status = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/w"


class _Handler(BaseHTTPRequestHandler):
    server: WebServer

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        span = self.headers["Range"]
        self.server.seen.append((self.path, span))
        if self.server.status or self.path.partition("?")[0] != "/w/f.bin":
            self.send_error(self.server.status or 404)
        elif span and self.server.knows_ranges:
            start, end = (int(part) for part in span.removeprefix("bytes=").split("-"))
            part = BODY[start : end + 1]
            self._send(206, part, {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(BODY)}"})
        else:
            self._send(200, BODY, {"Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status == 206 or self.server.tells_size:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def store(web: WebServer) -> Store:
    return open_store(web.url, options=ONCE)


@pytest.mark.parametrize("knows_ranges", [True, False])
@pytest.mark.parametrize("tells_size", [True, False])
def test_size_whole_and_ranges_are_those_of_the_file(
    web: WebServer, store: Store, knows_ranges: bool, tells_size: bool
) -> None:
    web.knows_ranges, web.tells_size = knows_ranges, tells_size
    assert store.info("f.bin").size_bytes == len(BODY)
    assert store.read("f.bin") == BODY
    assert bytes(open_store(web.url, options=ONCE).read_range("f.bin", 300, 7)) == BODY[300:307]
    with pytest.raises(IntegrityError, match="ends 3 bytes before"):
        store.read_range("f.bin", len(BODY) - 2, 5)


def test_a_server_without_ranges_sends_the_file_once(web: WebServer, store: Store) -> None:
    web.knows_ranges = False
    parts = [bytes(store.read_range("f.bin", start, 1024)) for start in range(0, len(BODY), 1024)]
    assert b"".join(parts) == BODY
    assert [span for _, span in web.seen] == ["bytes=0-1023", None]


def test_the_time_is_what_the_server_says_or_long_ago(web: WebServer, store: Store) -> None:
    assert store.info("f.bin").modified_at == datetime(1970, 1, 1, tzinfo=timezone.utc)
    web.knows_ranges = False
    assert store.info("f.bin").modified_at == datetime(2025, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    "ask", [lambda s: s.info("no"), lambda s: s.read("no"), lambda s: s.read_range("no", 0, 1)]
)
def test_a_missing_file_is_absent_at_once(web: WebServer, ask: Callable[[Store], object]) -> None:
    with pytest.raises(ObjectNotFoundError):
        ask(open_store(web.url))
    assert len(web.seen) == 1


@pytest.mark.parametrize(("status", "kind"), [(403, AccessDeniedError), (503, StoreUnavailableError)])
def test_a_failure_is_no_absence(web: WebServer, store: Store, status: int, kind: type[Exception]) -> None:
    web.status = status
    with pytest.raises(kind, match=f"answered {status}"):
        store.info("f.bin")


def test_a_signature_is_sent_and_never_shown(web: WebServer, store: Store) -> None:
    assert store.read("f.bin?Signature=s3cret") == BODY
    assert web.seen == [("/w/f.bin?Signature=s3cret", None)]
    with pytest.raises(ObjectNotFoundError) as raised:
        store.read("no?Signature=s3cret")
    assert "s3cret" not in f"{raised.value} {raised.value.key}"


@pytest.mark.parametrize("verb", ["list", "list_children"])
def test_a_listing_is_refused_without_a_request(web: WebServer, store: Store, verb: str) -> None:
    with pytest.raises(UnsupportedStoreError, match="give the URL of one file"):
        getattr(store, verb)()
    assert web.seen == []


def test_it_can_only_be_read_even_by_a_single_writer(web: WebServer) -> None:
    accepting = Options(retry=ONCE.retry, commit=CommitOptions(accept_single_writer=True))
    store = open_store(web.url, options=accepting)
    for call in (
        lambda: store.write("k", b"1"),
        lambda: store.create("k", b"1"),
        lambda: store.copy("f.bin", "k"),
        lambda: store.delete(["f.bin"]),
    ):
        with pytest.raises(UnsupportedStoreError, match="can only be read"):
            call()


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.delitem(_registry, "http", raising=False)
    with pytest.raises(MissingDependencyError, match="aiohttp"):
        open_store("http://127.0.0.1:1/w")
