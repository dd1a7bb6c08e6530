"""Ranges received in place: only what was asked for, in time, from connections that nobody else uses."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import obstore
import pytest

from remote_ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from remote_ckpt.options import MiB, Options, RetryOptions, TransferOptions
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.store.direct_http import Connection, Patience, ProtocolError, open_connection, parse_head
from remote_ckpt.store.direct_memory import allocate
from remote_ckpt.store.direct_pool import ConnectionPool
from remote_ckpt.store.direct_reads import DirectReads, open_direct_reads
from remote_ckpt.store.obstore import ObstoreStore, open_obstore_store
from remote_ckpt.store.obstore_options import plan_s3
from remote_ckpt.testing.proxy import (
    Cut,
    DelayAnswer,
    FaultProxy,
    FlipByte,
    IgnoreRange,
    LoseAnswer,
    Reply,
    Reset,
    Rule,
    Shorten,
    Stall,
    Throttle,
    WrongRange,
)
from remote_ckpt.testing.s3_contract import FreshRoot, S3Contract
from remote_ckpt.testing.servers import LocalServer, free_ports
from remote_ckpt.url import parse_location

DATA = bytes(range(256)) * (3 * MiB // 256)
SECRET = "s3cretkey"


def open_on(endpoint: str, url: str = "s3://bucket/run", **given: Any) -> ObstoreStore:
    """A store that reads every range, however short, in place."""
    retry, transfer = given.pop("retry", None), given.pop("transfer", None)
    options = {"key": "k", "secret": SECRET, "endpoint_url": endpoint, **given}
    store = open_obstore_store(parse_location(url), storage_options=options, retry=retry, transfer=transfer)
    direct_of(store).least_bytes = 1
    return store


def direct_of(store: ObstoreStore) -> DirectReads:
    clients = store._clients
    assert clients is not None
    assert clients.direct is not None
    return clients.direct


def read_into(store: Store, offset: int, length: int, key: str = "k") -> bytes:
    out = bytearray(length)
    store.read_range_into(key, offset, memoryview(out))
    return bytes(out)


READS: dict[str, Callable[[Store, int, int], bytes]] = {
    "read_range": lambda store, offset, length: bytes(store.read_range("k", offset, length)),
    "read_range_into": read_into,
}


@pytest.fixture(params=READS)
def read(request: pytest.FixtureRequest) -> Callable[[Store, int, int], bytes]:
    return READS[request.param]


class TestContract(S3Contract):
    """All promises of a store, with every range received in place."""

    keys_listed: ClassVar[int] = 3

    @pytest.fixture
    def store(
        self, ministack: LocalServer, fresh_root: FreshRoot, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Store]:
        self.server = ministack
        monkeypatch.setattr(obstore, "get_range", None)
        with closing(
            open_on(ministack.endpoint_url, fresh_root(ministack), **credentials(ministack))
        ) as store:
            yield store


def credentials(server: LocalServer) -> dict[str, Any]:
    return {
        name: text for name, text in server.storage_options().items() if name in ("key", "secret", "token")
    }


@pytest.mark.server
class TestSignatures:
    """Against a server that checks them."""

    @pytest.mark.parametrize("key", ["plain", "a b/c+d=e&f%20g", "ünï/~_-.!*'();:@,[]{}"])
    def test_any_key_is_signed_as_the_server_expects(
        self, real_server: LocalServer, fresh_root: FreshRoot, key: str
    ) -> None:
        url = fresh_root(real_server)
        with closing(open_on(real_server.endpoint_url, url, **credentials(real_server))) as store:
            store.write(key, b"0123456789")
            assert read_into(store, 2, 5, key) == b"23456"

    def test_a_wrong_secret_is_denied_and_not_shown(
        self, real_server: LocalServer, fresh_root: FreshRoot
    ) -> None:
        given = {**credentials(real_server), "secret": SECRET}
        with (
            closing(open_on(real_server.endpoint_url, fresh_root(real_server), **given)) as store,
            pytest.raises(AccessDeniedError) as caught,
        ):
            read_into(store, 0, 1)
        shown = "".join(traceback.format_exception(caught.value))
        assert SECRET not in shown
        assert "Signature=" not in shown


# --- a real server, and what stands before it -----------------------------------------------------------


@pytest.fixture(scope="module")
def proxy(ministack: LocalServer) -> Iterator[FaultProxy]:
    with FaultProxy(ministack.endpoint_url) as running:
        yield running


@pytest.fixture(scope="module")
def url(ministack: LocalServer, fresh_bucket: FreshRoot) -> str:
    url = f"s3://{fresh_bucket(ministack)}/run"
    with closing(open_on(ministack.endpoint_url, url, **credentials(ministack))) as store:
        store.write("k", DATA)
    return url


@pytest.fixture
def store(proxy: FaultProxy, url: str) -> Iterator[ObstoreStore]:
    """Three mebibytes at ``k``, through the proxy."""
    proxy.clear()
    proxy.forget()
    with closing(open_on(proxy.endpoint_url, url)) as opened:
        yield opened
    proxy.clear()


FAULTS: dict[str, tuple[Any, type[StoreError], str]] = {
    "a cut body": (Cut(), StoreUnavailableError, "bytes early"),
    "a reset body": (Cut(is_reset=True), StoreUnavailableError, "reset"),
    "no answer": (LoseAnswer(), StoreUnavailableError, "closed"),
    "a reset": (Reset(), StoreUnavailableError, "no answer"),
    "a shorter body": (Shorten(), IntegrityError, "for a range of"),
    "another place, told": (WrongRange(shift_bytes=64, is_labelled=True), IntegrityError, "were asked for"),
    "the whole object": (IgnoreRange(), StoreError, "non-partial"),
    "SlowDown": (Reply(503, code="SlowDown"), StoreUnavailableError, "503 SlowDown"),
    "AccessDenied": (Reply(403, code="AccessDenied"), AccessDeniedError, "403 AccessDenied"),
    "ExpiredToken": (Reply(400, code="ExpiredToken"), AccessDeniedError, "log in again"),
    "NoSuchKey": (Reply(404, code="NoSuchKey"), ObjectNotFoundError, "404 NoSuchKey"),
    "NoSuchBucket": (Reply(404, code="NoSuchBucket"), BucketNotFoundError, "404 NoSuchBucket"),
    "a proxy's 404": (Reply(404, b"<html>"), StoreUnavailableError, "404"),
    "a redirect": (Reply(301, code="PermanentRedirect"), StoreError, "own region"),
    "a login page": (Reply(302, headers={"location": "http://127.0.0.1:1/"}), StoreError, "302"),
    "no content": (Reply(204), StoreError, "204"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_not_the_range_is_an_error_of_the_right_kind(
    store: ObstoreStore, proxy: FaultProxy, what: str, read: Callable[[Store, int, int], bytes]
) -> None:
    fault, kind, message = FAULTS[what]
    with proxy.inject(Rule(operation="GetObject", fault=fault)), pytest.raises(kind, match=message) as caught:
        read(store, MiB, 64 * 1024)
    assert type(caught.value) is kind
    assert (caught.value.url, caught.value.key, caught.value.operation) == (store.url, "k", "read_range")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert read(store, MiB, 64 * 1024) == DATA[MiB : MiB + 64 * 1024]


def test_bytes_that_are_altered_on_their_way_come_as_they_are(store: ObstoreStore, proxy: FaultProxy) -> None:
    """Nothing in HTTP shows it: checksums are for those above."""
    with proxy.inject(Rule(operation="GetObject", fault=FlipByte(offset_bytes=3))):
        found = read_into(store, 0, 8)
    assert found == bytes([0, 1, 2, 3 ^ 1, 4, 5, 6, 7])


@pytest.mark.parametrize("fault", [Stall(), Stall(keep_bytes=0), DelayAnswer()], ids=str)
def test_a_pause_that_is_too_long_is_a_timeout(proxy: FaultProxy, url: str, fault: Any) -> None:
    hasty = RetryOptions(request_seconds=0.3)
    with (
        closing(open_on(proxy.endpoint_url, url, retry=hasty)) as store,
        proxy.inject(Rule(operation="GetObject", fault=fault)),
        pytest.raises(StoreTimeoutError, match="timed out"),
    ):
        read_into(store, 0, MiB)


def test_a_slow_body_without_a_pause_ends_with_the_whole_time(proxy: FaultProxy, url: str) -> None:
    hasty = RetryOptions(request_seconds=60.0, total_seconds=1.0)
    slow = Throttle(bytes_per_second=100_000.0)
    with (
        closing(open_on(proxy.endpoint_url, url, retry=hasty)) as store,
        proxy.inject(Rule(operation="GetObject", fault=slow)),
        pytest.raises(StoreTimeoutError),
    ):
        read_into(store, 0, 3 * MiB)


def test_a_body_that_comes_slower_than_the_pause_allows_for_all_of_it_arrives(
    proxy: FaultProxy, url: str
) -> None:
    """The pause is one between bytes: a body has more time the longer it is."""
    steady = RetryOptions(request_seconds=1.0)
    with (
        closing(open_on(proxy.endpoint_url, url, retry=steady)) as store,
        proxy.inject(Rule(operation="GetObject", fault=Throttle(bytes_per_second=1.2 * MiB))),
    ):
        assert read_into(store, 0, 3 * MiB) == DATA


def test_retries_above_heal_a_read_and_fill_the_same_memory(proxy: FaultProxy, url: str) -> None:
    proxy.clear()
    given = {"key": "k", "secret": SECRET, "endpoint_url": proxy.endpoint_url}
    patient = Options(retry=RetryOptions(max_attempts=5, initial_seconds=0.0, request_seconds=0.5))
    with closing(open_store(url, storage_options=given, options=patient)) as opened:
        for fault in (Cut(keep_bytes=MiB), Cut(is_reset=True), Stall(), Reply(503, code="SlowDown"), Reset()):
            with proxy.inject(Rule(operation="GetObject", nth=1, fault=fault)) as once:
                assert read_into(opened, 0, len(DATA)) == DATA
            assert once.fired == 1


def test_many_threads_share_the_connections_and_each_gets_its_own_bytes(store: ObstoreStore) -> None:
    whole = memoryview(bytearray(len(DATA)))
    cuts = [(start, min(start + 50_000, len(DATA))) for start in range(0, len(DATA), 50_000)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda cut: store.read_range_into("k", cut[0], whole[cut[0] : cut[1]]), cuts))
    assert bytes(whole) == DATA


@pytest.mark.parametrize(
    ("offset", "length", "out"),
    [(-1, 1, None), (0, 0, None), (0, 4, b"1234")],
    ids=["offset", "empty", "bytes"],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(
    store: ObstoreStore, proxy: FaultProxy, offset: int, length: int, out: bytes | None
) -> None:
    with pytest.raises(ConfigError):
        store.read_range_into("k", offset, memoryview(bytearray(length) if out is None else out))
    assert proxy.requests == ()


def test_a_closed_store_raises_and_leaves_nothing_open(ministack: LocalServer, url: str) -> None:
    store = open_on(ministack.endpoint_url, url)
    direct = direct_of(store)
    read_into(store, 0, 1)
    (kept,) = direct.pool._kept
    store.close()
    assert kept._socket.fileno() == -1
    with pytest.raises(ConfigError, match="closed"):
        read_into(store, 0, 1)


def test_a_store_that_nobody_closed_closes_its_connections_when_it_is_collected(
    ministack: LocalServer, url: str
) -> None:
    store = open_on(ministack.endpoint_url, url)
    read_into(store, 0, 1)
    (kept,) = direct_of(store).pool._kept
    del store
    gc.collect()
    assert kept._socket.fileno() == -1


# --- a server whose every byte a test decides -----------------------------------------------------------


@dataclass
class Script:
    """What a hand-made server does: for each connection the answers to its requests, then it closes it."""

    connections: Sequence[Sequence[bytes]]
    requests: list[bytes] = field(default_factory=list)
    endpoint_url: str = ""


@contextmanager
def scripted(*connections: Sequence[bytes]) -> Iterator[Script]:
    script = Script(connections)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        script.endpoint_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving = threading.Thread(target=_play, args=(script, listening))
        serving.start()
        try:
            yield script
        finally:
            serving.join()


def _play(script: Script, listening: socket.socket) -> None:
    for answers in script.connections:
        connection, _ = listening.accept()
        with connection:
            for answer in answers:
                request = b""
                with suppress(ConnectionError):  # of a client that went away and left bytes unread
                    while b"\r\n\r\n" not in request and (piece := connection.recv(65536)):
                        request += piece
                script.requests.append(request)
                with suppress(ConnectionError):
                    connection.sendall(answer)


def partial(
    body: bytes = b"abcd", *lines: str, span: str = "bytes 2-5/10", length: int | None = None
) -> bytes:
    announced = [] if length == -1 else [f"Content-Length: {len(body) if length is None else length}"]
    head = ["HTTP/1.1 206 Partial Content", f"Content-Range: {span}", *announced, *lines, "", ""]
    return "\r\n".join(head).encode() + body


def test_the_request_says_what_is_wanted_and_is_signed() -> None:
    with scripted([partial()]) as script, closing(open_on(script.endpoint_url, token="tok")) as store:
        assert read_into(store, 2, 4) == b"abcd"
    lines = script.requests[0].decode().split("\r\n")
    assert lines[0] == "GET /bucket/run/k HTTP/1.1"
    assert "range: bytes=2-5" in lines
    assert "x-amz-security-token: tok" in lines
    assert any(line.startswith("authorization: AWS4-HMAC-SHA256 Credential=k/") for line in lines)


def test_options_shape_the_request() -> None:
    with scripted([partial()]) as script:
        given: dict[str, Any] = {"anon": True, "key": None, "secret": None, "requester_pays": True}
        with closing(open_on(script.endpoint_url, **given)) as store:
            assert read_into(store, 2, 4) == b"abcd"
    request = script.requests[0].lower()
    assert b"x-amz-request-payer: requester" in request
    assert b"authorization" not in request


def test_a_bucket_that_is_a_host_is_asked_for_by_its_name() -> None:
    with scripted([partial()]) as script:
        endpoint = script.endpoint_url.replace("127.0.0.1", "localhost")
        store = open_on(endpoint, addressing_style="virtual")
        with closing(store):
            assert direct_of(store).bucket_url == endpoint.replace("localhost", "bucket.localhost") + "/"
            request = direct_of(store)._request("run/k", 2, 4, "k")
        assert request.startswith(b"GET /run/k HTTP/1.1\r\nhost: bucket.localhost:")
        with closing(open_on(script.endpoint_url)) as plain:
            read_into(plain, 2, 4)


def test_each_request_is_signed_with_the_credentials_of_its_moment() -> None:
    names = iter(["first", "second"])
    with scripted([partial(), partial()]) as script, closing(open_on(script.endpoint_url)) as store:
        direct_of(store).provider = lambda: {
            "access_key_id": next(names),
            "secret_access_key": "s",
            "token": None,
        }
        for _ in range(2):
            read_into(store, 2, 4)
    assert b"Credential=first/" in script.requests[0]
    assert b"Credential=second/" in script.requests[1]


def test_credentials_that_cannot_be_had_are_told_as_obstore_tells_them() -> None:
    def fail() -> dict[str, Any]:
        raise LookupError("no role")

    (port,) = free_ports(1)
    with closing(open_on(f"http://127.0.0.1:{port}")) as store:
        direct_of(store).provider = fail
        with pytest.raises(AccessDeniedError, match="LookupError: no role"):
            read_into(store, 0, 1)


def test_a_line_break_in_a_credential_never_becomes_a_header() -> None:
    (port,) = free_ports(1)
    with (
        closing(open_on(f"http://127.0.0.1:{port}", token="t\r\nx-injected: 1")) as store,
        pytest.raises(ConfigError, match="line break"),
    ):
        read_into(store, 0, 1)


WRONG_ANSWERS: dict[str, tuple[bytes, type[StoreError], str]] = {
    "no content-range": (partial().replace(b"Content-Range", b"X-Range"), IntegrityError, "which range"),
    "a malformed content-range": (partial(span="bytes 2-5"), IntegrityError, "which range"),
    "two content-ranges": (partial(b"abcd", "Content-Range: bytes 2-5/10"), IntegrityError, "which range"),
    "another start": (partial(span="bytes 1-4/10"), IntegrityError, "were asked for"),
    "a later end": (partial(b"abcde", span="bytes 2-6/10"), IntegrityError, "were asked for"),
    "an earlier end": (partial(b"abc", span="bytes 2-4/5"), IntegrityError, "ends 1 bytes before byte 6"),
    "a total that cannot be": (partial(span="bytes 2-5/5"), IntegrityError, "were asked for"),
    "a range that ends before it starts": (partial(span="bytes 2-1/10"), IntegrityError, "were asked for"),
    "a shorter body": (partial(b"abc"), IntegrityError, "sent 3 bytes for a range of 4"),
    "a longer body": (partial(b"abcde"), IntegrityError, "sent 5 bytes for a range of 4"),
    "a body that ends early": (partial(b"abc", length=4), StoreUnavailableError, "ended 1 bytes early"),
    "the whole object": (partial().replace(b"206 Partial Content", b"200 OK"), StoreError, "non-partial"),
    "garbage": (b"GARBAGE\r\n\r\n", StoreUnavailableError, "no HTTP answer"),
    "HTTP/2": (partial().replace(b"HTTP/1.1", b"HTTP/2"), StoreUnavailableError, "no HTTP answer"),
    "a folded header": (partial(b"abcd", "X-A: 1", " folded"), StoreUnavailableError, "malformed header"),
    "a header without a name": (partial(b"abcd", ": 1"), StoreUnavailableError, "malformed header"),
    "a space before the colon": (partial(b"abcd", "X-A : 1"), StoreUnavailableError, "malformed header"),
    "two lengths": (partial(b"abcd", "Content-Length: 3"), StoreUnavailableError, "no number"),
    "a negative length": (partial(length=-4), StoreUnavailableError, "no number"),
    "a length and chunks": (partial(b"abcd", "Transfer-Encoding: chunked"), StoreUnavailableError, "clearly"),
    "an unknown coding": (
        partial(b"abcd", "Transfer-Encoding: gzip", length=-1),
        StoreUnavailableError,
        "clearly",
    ),
    "a head that never ends": (b"HTTP/1.1 206 OK\r\nX: " + b"x" * 200_000, StoreUnavailableError, "too long"),
    "half a head": (b"HTTP/1.1 206 OK\r\nX: ", StoreUnavailableError, "ended early"),
    "interim answers for ever": (b"HTTP/1.1 103 Hints\r\n\r\n" * 9, StoreUnavailableError, "interim"),
    "a cut error": (
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 99\r\n\r\n<Error><Code>NoSuch",
        StoreUnavailableError,
        "404",
    ),
    "an error in chunks": (
        b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"10;a=b\r\n<Code>NoSuchKey<\r\n6\r\n/Code>\r\n0\r\nX-Trailer: 1\r\n\r\n",
        ObjectNotFoundError,
        "404 NoSuchKey",
    ),
    "an error in malformed chunks": (
        b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n<Code>NoSuchKey</Code>",
        StoreUnavailableError,
        "404",
    ),
    "an error until the end": (
        b"HTTP/1.1 404 Not Found\r\n\r\n<Code>NoSuchKey</Code>",
        ObjectNotFoundError,
        "404 NoSuchKey",
    ),
    "a signed URL in an error": (
        b"HTTP/1.1 403 Forbidden\r\n\r\n<Message>http://h/?X-Amz-Signature=s3cretkey</Message>",
        AccessDeniedError,
        "403",
    ),
}


@pytest.mark.parametrize("what", WRONG_ANSWERS)
def test_an_answer_that_is_not_exactly_the_range_is_refused(what: str) -> None:
    answer, kind, message = WRONG_ANSWERS[what]
    with scripted([answer]) as script, closing(open_on(script.endpoint_url)) as store:
        with pytest.raises(kind, match=message) as caught:
            read_into(store, 2, 4)
        assert type(caught.value) is kind
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        # Only what was read whole, error or not, leaves a connection that can be trusted.
        assert len(direct_of(store).pool._kept) == (what == "an error in chunks")


SOUND_ANSWERS: dict[str, bytes] = {
    "an unknown total": partial(span="bytes 2-5/*"),
    "an interim answer first": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + partial(),
    "another case": partial().replace(b"Content-Range", b"CONTENT-RANGE").replace(b"Content-L", b"content-l"),
    "no reason": partial().replace(b"206 Partial Content", b"206"),
    "an older version": partial().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "the end of the connection": partial(b"abcd", "Connection: close"),
}


@pytest.mark.parametrize("what", SOUND_ANSWERS)
def test_what_differs_in_form_only_is_taken(what: str) -> None:
    with scripted([SOUND_ANSWERS[what]]) as script, closing(open_on(script.endpoint_url)) as store:
        assert read_into(store, 2, 4) == b"abcd"


@pytest.mark.parametrize(
    "form", [["Transfer-Encoding: chunked"], ["Connection: close"]], ids=["chunks", "no length"]
)
def test_a_body_of_unannounced_length_is_left_to_obstore(form: list[str]) -> None:
    body = b"4\r\nabcd\r\n0\r\n\r\n" if "chunked" in form[0] else b"abcd"
    odd = partial(body, *form, length=-1)
    # obstore's own request comes on its own connection; from then on it is the only one that asks.
    whole = partial(b"abcd", "Last-Modified: Tue, 01 Dec 2026 00:00:00 GMT", 'ETag: "e"', "Connection: close")
    with scripted([odd], [whole], [whole]) as script, closing(open_on(script.endpoint_url)) as store:
        assert read_into(store, 2, 4) == b"abcd"
        assert read_into(store, 2, 4) == b"abcd"
    assert [b"remote-ckpt/" in sent for sent in script.requests] == [True, False, False]


# --- connections ----------------------------------------------------------------------------------------


def test_a_connection_serves_one_request_after_the_other() -> None:
    answers = [partial(), partial(b"efgh"), partial(b"ijkl")]
    with scripted(answers) as script, closing(open_on(script.endpoint_url)) as store:
        assert [read_into(store, 2, 4) for _ in range(3)] == [b"abcd", b"efgh", b"ijkl"]
    assert len(script.requests) == 3


def test_a_kept_connection_that_the_server_has_closed_is_opened_anew() -> None:
    with scripted([partial()], [partial(b"efgh")]) as script, closing(open_on(script.endpoint_url)) as store:
        assert read_into(store, 2, 4) == b"abcd"
        assert read_into(store, 2, 4) == b"efgh"


def test_a_kept_connection_that_is_closed_at_the_next_request_is_opened_anew_once() -> None:
    """The server takes the request and closes: here, where it was kept, that is its idle time being over."""
    connections = [[partial(), b""], [partial(b"efgh"), b""], [b""]]
    with scripted(*connections) as script, closing(open_on(script.endpoint_url)) as store:
        assert read_into(store, 2, 4) == b"abcd"
        assert read_into(store, 2, 4) == b"efgh"
        with pytest.raises(StoreUnavailableError, match="connection was closed"):
            read_into(store, 2, 4)
    assert len(script.requests) == 5


@pytest.mark.parametrize("length", [4, 20_000], ids=["with the head", "later"])
def test_bytes_that_nobody_asked_for_are_no_answer_to_the_next_request(length: int) -> None:
    body, span = bytes(length), f"bytes 2-{length + 1}/*"
    first, lie = partial(body, span=span), partial(b"x" * length, span=span)
    with (
        scripted([first + lie, b""], [first]) as script,
        closing(open_on(script.endpoint_url)) as store,
    ):
        assert read_into(store, 2, length) == body
        assert read_into(store, 2, length) == body
    assert script.requests[1] == b""  # nothing more was asked on the first connection


def test_an_error_that_was_read_whole_keeps_its_connection() -> None:
    missing = b"HTTP/1.1 404 Not Found\r\nContent-Length: 22\r\n\r\n<Code>NoSuchKey</Code>"
    with scripted([missing, partial()]) as script, closing(open_on(script.endpoint_url)) as store:
        with pytest.raises(ObjectNotFoundError):
            read_into(store, 2, 4)
        assert read_into(store, 2, 4) == b"abcd"


def test_no_more_connections_are_open_than_requests_may_run_at_once(ministack: LocalServer, url: str) -> None:
    most, open_now, lock = [0], [0], threading.Lock()
    with closing(open_on(ministack.endpoint_url, url, transfer=TransferOptions(concurrency=3))) as store:
        pool = direct_of(store).pool
        connect = pool._connect

        def counted(patience: Patience) -> Connection:
            with lock:
                open_now[0] += 1
                most[0] = max(most[0], open_now[0])
            return connect(patience)

        pool._connect = counted
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(lambda start: read_into(store, start, 1000), range(100)))
        assert 1 <= most[0] <= 3
        assert 1 <= len(pool._kept) <= 3


def test_who_waits_for_a_connection_in_vain_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        pool = ConnectionPool(lambda wait: open_connection("127.0.0.1", port, wait), limit_count=1)
        with (
            pool.lend(patience(5.0)),
            pytest.raises(TimeoutError, match="all 1 connections"),
            pool.lend(patience(0.1)),
        ):
            pass
        with pool.lend(patience(5.0)) as connection:
            assert not connection.is_stale()
        pool.close()


def patience(seconds: float) -> Patience:
    return Patience(connect_seconds=5.0, pause_seconds=seconds, ends=time.monotonic() + seconds)


def test_a_connection_that_idled_for_long_is_not_used(
    ministack: LocalServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_on(ministack.endpoint_url, url)) as store:
        read_into(store, 0, 4)
        (kept,) = direct_of(store).pool._kept
        kept.idle_since -= 60.0
        assert read_into(store, 0, 4) == DATA[:4]
        assert kept._socket.fileno() == -1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_uses_none_of_the_parents_connections(ministack: LocalServer, url: str) -> None:
    with closing(open_on(ministack.endpoint_url, url)) as store:
        direct = direct_of(store)
        read_into(store, 0, 4)
        (kept,) = direct.pool._kept
        child = os.fork()
        if child == 0:
            status = 1
            try:
                out = bytearray(8)
                direct.read_into("run/k", 4, memoryview(out), key="k")
                is_own = kept not in direct.pool._kept and kept._socket.fileno() == -1
                status = 0 if is_own and bytes(out) == DATA[4:12] else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert read_into(store, 0, 4) == DATA[:4]
        assert direct.pool._kept == [kept]


def test_a_refused_connection_names_the_endpoint() -> None:
    (port,) = free_ports(1)
    with (
        closing(open_on(f"http://127.0.0.1:{port}")) as store,
        pytest.raises(StoreUnavailableError, match=rf"refused.*http://127.0.0.1:{port}"),
    ):
        read_into(store, 0, 1)


# --- who reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environ", "is_direct"),
    [
        ({}, {}, True),
        ({"endpoint_url": "https://127.0.0.1:1"}, {}, False),
        ({"endpoint_url": None}, {}, False),
        ({"client_options": {"proxy_url": "http://127.0.0.1:1"}}, {}, False),
        ({"client_options": {"default_headers": {"x": "y"}}}, {}, False),
        ({"sse_customer_key_base64": "a2V5a2V5a2V5a2V5a2V5a2V5a2V5a2V5a2V5a2V5a2U="}, {}, False),
        ({"s3_express": True}, {}, False),
        ({}, {"HTTP_PROXY": "http://127.0.0.1:1"}, False),
        ({}, {"http_proxy": "http://127.0.0.1:1", "no_proxy": "127.0.0.1"}, True),
        ({}, {"https_proxy": "http://127.0.0.1:1"}, True),
    ],
    ids=str,
)
def test_what_is_not_spoken_here_is_left_to_obstore(
    given: dict[str, Any], environ: dict[str, str], is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1", **given}
    settings = plan_s3("bucket", options, {})
    direct = open_direct_reads("bucket", settings, retry=RetryOptions(), limit_count=1, url="s3://bucket")
    assert (direct is not None) == is_direct


def test_only_large_ranges_are_received_in_place(proxy: FaultProxy, url: str) -> None:
    proxy.clear()
    given = {"key": "k", "secret": SECRET, "endpoint_url": proxy.endpoint_url}
    with closing(open_obstore_store(parse_location(url), storage_options=given)) as store:
        for length, is_direct in ((MiB - 1, False), (MiB, True)):
            for read in READS.values():
                proxy.forget()
                assert read(store, 5, length) == DATA[5 : 5 + length]
                (request,) = proxy.requests
                assert request.headers["user-agent"].startswith("remote-ckpt/") == is_direct


def test_without_it_large_ranges_come_in_pieces_and_are_as_exact(
    store: ObstoreStore, proxy: FaultProxy
) -> None:
    direct_of(store).is_understood = False
    assert read_into(store, 7, 2 * MiB) == DATA[7 : 7 + 2 * MiB]
    with pytest.raises(IntegrityError, match="ends 5 bytes before"):
        read_into(store, 2 * MiB, MiB + 5)
    with proxy.inject(Rule(operation="GetObject", fault=Cut())), pytest.raises(StoreUnavailableError):
        read_into(store, 0, 2 * MiB)
    with proxy.inject(Rule(operation="GetObject", fault=IgnoreRange())), pytest.raises(StoreError):
        read_into(store, MiB, MiB)


def test_memory_for_bodies_is_writable_and_of_exactly_the_length() -> None:
    for length in (MiB, 3 * MiB + 5):
        memory = memoryview(allocate(length))
        assert (len(memory), memory.readonly, bytes(memory[-3:])) == (length, False, bytes(3))
        memory[-3:] = b"end"
        assert bytes(memory[-4:]) == b"\0end"


@pytest.mark.parametrize("line", [b"", b"HTTP/1.1", b"HTTP/1.1 20", b"HTTP/1.1 2066 x", b"ICY 200 OK"])
def test_a_first_line_that_is_none_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="no HTTP answer"):
        parse_head(line + b"\r\nContent-Length: 1")
