"""The fault proxy: what passes, what goes wrong as told, which requests meet it, and how it ends."""

from __future__ import annotations

import gc
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from remote_ckpt.errors import ConfigError, MissingDependencyError
from remote_ckpt.testing.proxy import (
    Answer,
    Call,
    Cut,
    DelayAnswer,
    DelayRequest,
    FailKeys,
    Fault,
    FaultProxy,
    FlipByte,
    IgnoreRange,
    LoseAnswer,
    Proceed,
    Reply,
    Reset,
    Rule,
    Shorten,
    ShortListing,
    Stall,
    Surround,
    Throttle,
    WrongRange,
    ZeroBytes,
    load_rules,
    parse_rules,
)
from remote_ckpt.testing.proxy.exchange import in_one_piece, operation_of, read_body
from remote_ckpt.testing.s3_contract import FreshRoot
from remote_ckpt.testing.servers import LocalServer

CONTENT = bytes(range(256)) * 40
HALF = len(CONTENT) // 2


class Echo:
    """A fault of the tests' own: a store that answers with what it got."""

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        content = await read_body(call.body)
        return Answer(status=200, headers={"x-echo": call.path}, body=in_one_piece(content)).with_content(
            content
        )


@pytest.fixture(scope="module")
def running_store() -> Iterator[FaultProxy]:
    """A store that answers a request with its own body; as a proxy it tells what reached it."""
    with FaultProxy(rules=[Rule(fault=Echo())]) as store:
        yield store


@pytest.fixture(scope="module")
def running_proxy(running_store: FaultProxy) -> Iterator[FaultProxy]:
    with FaultProxy(running_store.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def store(running_store: FaultProxy) -> FaultProxy:
    running_store.forget()
    return running_store


@pytest.fixture
def proxy(running_proxy: FaultProxy) -> FaultProxy:
    running_proxy.clear()
    running_proxy.forget()
    return running_proxy


def connect(proxy: FaultProxy, *, seconds: float = 20.0) -> http.client.HTTPConnection:
    host = proxy.endpoint_url.removeprefix("http://")
    return http.client.HTTPConnection(host, timeout=seconds)


def ask(
    proxy: FaultProxy,
    method: str = "PUT",
    target: str = "/b/k",
    body: bytes | None = CONTENT,
    headers: Mapping[str, str] | None = None,
    *,
    seconds: float = 20.0,
) -> tuple[int, bytes]:
    """Send one request on a connection of its own; returns status and body."""
    with closing(connect(proxy, seconds=seconds)) as connection:
        connection.request(method, target, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()


# --- what passes ---------------------------------------------------------------------------------------


def test_a_request_reaches_the_store_as_it_was_sent(proxy: FaultProxy, store: FaultProxy) -> None:
    target = "/b/a%20b+c%2Fd/%C3%A9?list-type=2&prefix=x%2Fy+z&empty="
    assert ask(proxy, "POST", target, headers={"X-Amz-Meta-A": "1, 2", "Content-Type": "a/b"}) == (
        200,
        CONTENT,
    )
    (sent,), (got,) = proxy.requests, store.requests
    path, _, query = target.partition("?")
    assert (got.method, got.path, got.query) == ("POST", path, query)
    assert got.headers == {**sent.headers, "connection": "close"}
    assert got.headers["host"] == proxy.endpoint_url.removeprefix("http://")
    assert "accept" not in got.headers


def test_an_answer_reaches_the_client_as_it_was_sent() -> None:
    headers = {"etag": '"e"', "date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-meta-a": "b"}
    rule = Rule(fault=Reply(207, CONTENT, headers=headers))
    with (
        FaultProxy(rules=[rule]) as store,
        FaultProxy(store.endpoint_url) as proxy,
        closing(connect(proxy)) as connection,
    ):
        connection.request("GET", "/b/k")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (207, CONTENT)
        assert headers.items() <= {name.lower(): text for name, text in answer.getheaders()}.items()


def test_one_connection_serves_many_requests(proxy: FaultProxy) -> None:
    with closing(connect(proxy)) as connection:
        for size in (0, 1, len(CONTENT)):
            connection.request("PUT", "/b/k", CONTENT[:size])
            assert connection.getresponse().read() == CONTENT[:size]


def test_a_head_is_answered_by_its_headers(proxy: FaultProxy) -> None:
    proxy.inject(Rule(fault=Reply(200, CONTENT)))
    with closing(connect(proxy)) as connection:
        for _ in range(2):
            connection.request("HEAD", "/b/k")
            answer = connection.getresponse()
            assert (answer.getheader("content-length"), answer.read()) == (str(len(CONTENT)), b"")


def test_a_client_that_waits_for_100_continue_is_told_to_go_on(proxy: FaultProxy) -> None:
    headers = "PUT /b/k HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    with dial(proxy) as client:
        client.sendall(headers.encode())
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"abc")
        assert b"\r\n\r\nabc" in receive_until(client, b"abc")


def test_bodies_of_unknown_length_pass(proxy: FaultProxy) -> None:
    with closing(connect(proxy)) as connection:
        connection.request("PUT", "/b/k", iter([b"one", b"two"]), encode_chunked=True)
        assert connection.getresponse().read() == b"onetwo"


def test_a_body_is_passed_on_while_it_arrives(proxy: FaultProxy, store: FaultProxy) -> None:
    with dial(proxy) as client:
        client.sendall(f"PUT /b/k HTTP/1.1\r\nHost: h\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode())
        client.sendall(CONTENT[:HALF])
        wait_until(lambda: bool(store.requests) and store.requests[0].received_bytes == HALF)
        client.sendall(CONTENT[HALF:])
        assert receive_until(client, CONTENT).endswith(CONTENT)


@pytest.mark.server
def test_what_was_signed_for_the_proxy_satisfies_a_store_that_checks_signatures(
    seaweed: LocalServer, fresh_bucket: FreshRoot
) -> None:
    bucket = fresh_bucket(seaweed)
    with FaultProxy(seaweed.endpoint_url) as proxy:
        client = boto_client(proxy, seaweed)
        client.put_object(Bucket=bucket, Key="a b/é+%", Body=CONTENT)
        assert client.get_object(Bucket=bucket, Key="a b/é+%")["Body"].read() == CONTENT
        assert [request.operation for request in proxy.requests] == ["PutObject", "GetObject"]


def test_a_store_that_is_not_there_is_a_bad_gateway() -> None:
    with FaultProxy("http://127.0.0.1:1") as proxy:
        status, body = ask(proxy)
    assert status == 502
    assert b"cannot be reached" in body


def test_a_proxy_without_a_store_says_which_request_no_rule_answers() -> None:
    with FaultProxy() as proxy:
        assert ask(proxy)[0] == 502
        assert proxy.requests[0].store_status is None


def test_every_request_is_recorded_with_what_became_of_it(proxy: FaultProxy) -> None:
    proxy.inject(Rule(path="*/lost", fault=LoseAnswer()))
    ask(proxy, target="/b/k?partNumber=1&uploadId=u")
    with pytest.raises(http.client.RemoteDisconnected):
        ask(proxy, target="/b/lost")
    proxy.settle()
    part, lost = proxy.requests
    assert (part.operation, part.status, part.store_status, part.faults) == ("UploadPart", 200, 200, ())
    assert (part.received_bytes, part.sent_bytes) == (len(CONTENT), len(CONTENT))
    assert (lost.status, lost.store_status, lost.faults) == (None, 200, ("LoseAnswer",))
    assert lost.sent_bytes == 0


def test_requests_are_told_when_they_are_over_and_not_kept() -> None:
    told: list[tuple[str, int | None]] = []
    with FaultProxy(
        rules=[Rule(fault=Reply(200))], on_done=lambda request: told.append((request.path, request.status))
    ) as proxy:
        ask(proxy)
        proxy.settle()
        assert (told, proxy.requests) == ([("/b/k", 200)], ())


# --- what goes wrong -----------------------------------------------------------------------------------


def test_a_reply_stands_in_the_stores_place(proxy: FaultProxy, store: FaultProxy) -> None:
    proxy.inject(Rule(fault=Reply(503, code="SlowDown", headers={"Retry-After": "1"})))
    status, body = ask(proxy)
    assert (status, store.requests) == (503, ())
    assert body.startswith(b"<?xml")
    assert b"<Code>SlowDown</Code><Message>Please reduce your request rate.</Message>" in body
    assert b"<Resource>/b/k</Resource>" in body


def test_a_late_reply_comes_after_the_store_has_acted(proxy: FaultProxy, store: FaultProxy) -> None:
    proxy.inject(Rule(fault=Reply(500, code="InternalError", is_after=True)))
    assert ask(proxy)[0] == 500
    assert [request.received_bytes for request in store.requests] == [len(CONTENT)]
    assert (proxy.requests[0].status, proxy.requests[0].store_status) == (500, 200)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(LoseAnswer(), http.client.RemoteDisconnected), (LoseAnswer(is_reset=True), ConnectionResetError)],
)
def test_a_lost_answer_leaves_the_store_changed(
    proxy: FaultProxy, store: FaultProxy, fault: LoseAnswer, expected: type[Exception]
) -> None:
    proxy.inject(Rule(fault=fault))
    with pytest.raises(expected):
        ask(proxy)
    assert [request.received_bytes for request in store.requests] == [len(CONTENT)]


def test_a_reset_keeps_the_request_from_the_store(proxy: FaultProxy, store: FaultProxy) -> None:
    proxy.inject(Rule(fault=Reset()))
    with pytest.raises(ConnectionResetError):
        ask(proxy)
    assert store.requests == ()


def test_a_late_answer_comes_when_it_is_released(proxy: FaultProxy, store: FaultProxy) -> None:
    release = threading.Event()
    proxy.inject(Rule(fault=DelayAnswer(until=release)))
    with closing(connect(proxy)) as connection:
        connection.request("PUT", "/b/k", CONTENT)
        wait_until(lambda: bool(store.requests) and store.requests[0].status == 200)
        assert proxy.requests[0].status is None
        release.set()
        assert connection.getresponse().read() == CONTENT


def test_a_late_answer_outlasts_the_client(proxy: FaultProxy, store: FaultProxy) -> None:
    proxy.inject(Rule(fault=DelayAnswer()))
    with pytest.raises(TimeoutError):
        ask(proxy, seconds=0.2)
    proxy.settle()
    assert store.requests[0].status == 200
    assert proxy.requests[0].status is None


def test_a_late_request_lands_though_its_client_is_gone(proxy: FaultProxy, store: FaultProxy) -> None:
    release = threading.Event()
    proxy.inject(Rule(fault=DelayRequest(until=release)))
    with pytest.raises(TimeoutError):
        ask(proxy, seconds=0.2)
    assert list(store.requests) == []
    release.set()
    proxy.settle()
    assert [request.received_bytes for request in store.requests] == [len(CONTENT)]
    assert (proxy.requests[0].status, proxy.requests[0].store_status) == (None, 200)


@pytest.mark.parametrize(("keep_bytes", "expected"), [(None, HALF), (0, 0), (100, 100)])
def test_an_answer_is_cut(proxy: FaultProxy, keep_bytes: int | None, expected: int) -> None:
    proxy.inject(Rule(fault=Cut(keep_bytes=keep_bytes)))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy)
    assert caught.value.partial == CONTENT[:expected]
    assert caught.value.expected == len(CONTENT) - expected


def test_a_cut_may_end_in_a_reset(proxy: FaultProxy) -> None:
    proxy.inject(Rule(fault=Cut(is_reset=True, keep_bytes=0)))
    with pytest.raises(ConnectionResetError):
        ask(proxy)


def test_of_a_cut_request_the_store_gets_a_part(proxy: FaultProxy, store: FaultProxy) -> None:
    proxy.inject(Rule(fault=Cut("request")))
    for _ in range(
        50
    ):  # the end of a connection may overtake what was sent on it: then the store sees nothing
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            ask(proxy)
        store.settle()
        if store.requests:
            break
    request = store.requests[0]
    assert request.received_bytes <= HALF
    assert request.status is None


def test_a_stalled_answer_begins_and_does_not_go_on(proxy: FaultProxy) -> None:
    proxy.inject(Rule(fault=Stall()))
    with closing(connect(proxy, seconds=0.2)) as connection:
        connection.request("PUT", "/b/k", CONTENT)
        answer = connection.getresponse()
        assert answer.read(HALF) == CONTENT[:HALF]
        with pytest.raises(TimeoutError):
            answer.read(1)


def test_a_stalled_request_is_never_whole(proxy: FaultProxy, store: FaultProxy) -> None:
    proxy.inject(Rule(fault=Stall("request")))
    with pytest.raises(TimeoutError):
        ask(proxy, seconds=0.2)
    proxy.settle()
    store.settle()
    (request,) = store.requests
    assert (request.received_bytes, request.status) == (HALF, None)


@pytest.mark.parametrize("side", ["answer", "request"])
@pytest.mark.parametrize(
    ("offset", "expected"), [(None, HALF), (0, 0), (-1, len(CONTENT) - 1), (len(CONTENT), None)]
)
def test_one_bit_flips(proxy: FaultProxy, side: Any, offset: int | None, expected: int | None) -> None:
    proxy.inject(Rule(fault=FlipByte(side, offset_bytes=offset)))
    _, found = ask(proxy)
    differing = [at for at, (a, b) in enumerate(zip(CONTENT, found, strict=True)) if a != b]
    assert differing == ([] if expected is None else [expected])
    assert all(CONTENT[at] ^ found[at] == 1 for at in differing)


@pytest.mark.parametrize("side", ["answer", "request"])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda side: Shorten(side, missing_bytes=3), CONTENT[:-3]),
        (
            lambda side: ZeroBytes(side, offset_bytes=7, length_bytes=100),
            CONTENT[:7] + bytes(100) + CONTENT[107:],
        ),
        (lambda side: ZeroBytes(side, offset_bytes=len(CONTENT) - 2), CONTENT[:-2] + bytes(2)),
        (lambda side: Surround(side, head=b"5\r\n", tail=b"\r\n0\r\n"), b"5\r\n" + CONTENT + b"\r\n0\r\n"),
    ],
)
def test_content_is_altered_without_a_trace_in_http(
    proxy: FaultProxy, side: Any, fault: Callable[[Any], Fault], expected: bytes
) -> None:
    proxy.inject(Rule(fault=fault(side)))
    assert ask(proxy) == (200, expected)


def test_a_slow_connection_takes_its_time(proxy: FaultProxy) -> None:
    proxy.inject(Rule(fault=Throttle(latency_seconds=0.05, bytes_per_second=len(CONTENT) / 0.1)))
    began = time.monotonic()
    assert ask(proxy) == (200, CONTENT)
    assert time.monotonic() - began >= 0.05 + 2 * 0.1


@pytest.mark.parametrize("is_labelled", [False, True])
def test_a_range_comes_from_another_place(proxy: FaultProxy, is_labelled: bool) -> None:
    asked, wrong = (f"bytes {first}-{first + len(CONTENT) - 1}/99999" for first in (0, 10))
    proxy.inject(Rule(fault=WrongRange(shift_bytes=10, is_labelled=is_labelled)))
    proxy.inject(Rule(fault=Reply(206, CONTENT, headers={"content-range": asked})))
    with closing(connect(proxy)) as connection:
        connection.request("GET", "/b/k")
        answer = connection.getresponse()
        assert answer.getheader("content-range") == (wrong if is_labelled else asked)
        assert answer.read() == CONTENT[10:] + CONTENT[:10]


# --- what only S3 has ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(ministack: LocalServer) -> Iterator[FaultProxy]:
    with FaultProxy(ministack.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def client(s3: FaultProxy, ministack: LocalServer) -> Any:
    """boto3 behind the proxy; it asks once."""
    s3.clear()
    s3.forget()
    return boto_client(s3, ministack)


@pytest.fixture
def bucket(ministack: LocalServer, fresh_bucket: FreshRoot) -> str:
    name = fresh_bucket(ministack)
    for key in ("a/1", "a/2", "b/1", "c"):
        ministack.client().put_object(Bucket=name, Key=key, Body=CONTENT)
    return name


def boto_client(proxy: FaultProxy, server: LocalServer) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=proxy.endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )


@pytest.mark.parametrize(
    ("fault", "keys", "is_truncated"),
    [
        (ShortListing(keep_count=0), [], False),
        (ShortListing(keep_count=2), ["a/1", "a/2"], False),
        (ShortListing(keep_count=1, is_truncated=True), ["a/1"], True),
        (ShortListing(drop="a/*"), ["b/1", "c"], False),
    ],
)
def test_a_listing_is_short(
    s3: FaultProxy, client: Any, bucket: str, fault: ShortListing, keys: list[str], is_truncated: bool
) -> None:
    s3.inject(Rule(operation="ListObjectsV2", fault=fault))
    page = client.list_objects_v2(Bucket=bucket)
    assert [entry["Key"] for entry in page.get("Contents", ())] == keys
    assert (page["IsTruncated"], page["KeyCount"]) == (is_truncated, len(keys))
    assert "NextContinuationToken" not in page


def test_prefixes_of_a_listing_are_left_out_too(s3: FaultProxy, client: Any, bucket: str) -> None:
    s3.inject(Rule(operation="ListObjectsV2", fault=ShortListing(drop="a/")))
    page = client.list_objects_v2(Bucket=bucket, Delimiter="/")
    assert [entry["Prefix"] for entry in page["CommonPrefixes"]] == ["b/"]


def test_the_last_page_is_dropped_with_its_token(s3: FaultProxy, client: Any, bucket: str) -> None:
    s3.inject(Rule(operation="ListObjectsV2", fault=ShortListing()))
    page = client.list_objects_v2(Bucket=bucket, MaxKeys=2)
    assert ([entry["Key"] for entry in page["Contents"]], page["IsTruncated"]) == (["a/1", "a/2"], False)


def test_what_is_no_listing_is_left_as_it_is(s3: FaultProxy, client: Any, bucket: str) -> None:
    s3.inject(Rule(fault=ShortListing(keep_count=0)))
    assert client.get_object(Bucket=bucket, Key="c")["Body"].read() == CONTENT


@pytest.mark.parametrize(("pattern", "kept"), [("a/1", ["a/1"]), ("a/*", ["a/1", "a/2"]), ("z", [])])
def test_keys_of_a_batch_deletion_are_refused_and_stay(
    s3: FaultProxy, client: Any, ministack: LocalServer, bucket: str, pattern: str, kept: list[str]
) -> None:
    s3.inject(Rule(operation="DeleteObjects", fault=FailKeys(pattern, "InternalError")))
    wanted = {"Objects": [{"Key": "a/1"}, {"Key": "a/2"}, {"Key": "c"}], "Quiet": True}
    answer = client.delete_objects(Bucket=bucket, Delete=wanted)
    assert [(one["Key"], one["Code"]) for one in answer.get("Errors", ())] == [
        (key, "InternalError") for key in kept
    ]
    left = [entry["Key"] for entry in ministack.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert left == [*kept, "b/1"]


def test_a_batch_deletion_of_refused_keys_only_never_reaches_the_store(
    s3: FaultProxy, client: Any, bucket: str
) -> None:
    s3.inject(Rule(operation="DeleteObjects", fault=FailKeys()))
    answer = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "c"}]})
    assert [(one["Key"], one["Code"]) for one in answer["Errors"]] == [("c", "AccessDenied")]
    assert s3.requests[-1].store_status is None


def test_a_store_that_ignores_ranges_answers_with_the_whole_object(
    s3: FaultProxy, client: Any, bucket: str
) -> None:
    s3.inject(Rule(header="range", fault=IgnoreRange()))
    answer = client.get_object(Bucket=bucket, Key="c", Range="bytes=5-9")
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert answer["Body"].read() == CONTENT


# --- which requests meet a rule ------------------------------------------------------------------------


def fired(rule: Rule, requests: list[tuple[str, str]]) -> list[int]:
    """Return the positions of the requests (method, target) that meet a rule."""
    found = []
    with FaultProxy(rules=[rule, Rule(fault=Reply(200))]) as proxy:
        for position, (method, target) in enumerate(requests):
            if ask(proxy, method, target, b"")[0] == 599:
                found.append(position)
        assert (proxy.injections[0].fired, len(proxy.requests)) == (len(found), len(requests))
    return found


HIT = Reply(599)
REQUESTS = [
    ("PUT", "/b/10/manifest.000001.json"),
    ("GET", "/b/10/manifest.000001.json"),
    ("GET", "/b?list-type=2&prefix=10%2F&delimiter=%2F"),
    ("POST", "/b?delete"),
    ("PUT", "/b/10/d%2D1/0.distcp?partNumber=1&uploadId=u"),
]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(fault=HIT), [0, 1, 2, 3, 4]),
        (Rule(method="GET", fault=HIT), [1, 2]),
        (Rule(path="*/manifest.*", fault=HIT), [0, 1]),
        (Rule(path="*/manifest.*", method="PUT", fault=HIT), [0]),
        (Rule(path="*/d-1/*", fault=HIT), [4]),
        (Rule(path=r"re:manifest\.\d{6}", fault=HIT), [0, 1]),
        (Rule(query="*prefix=10/*", fault=HIT), [2]),
        (Rule(query=r"re:partNumber=\d+&", fault=HIT), [4]),
        (Rule(operation="DeleteObjects", fault=HIT), [3]),
        (Rule(header="X-None", fault=HIT), []),
        (Rule(header="Host", nth=2, fault=HIT), [1]),
        (Rule(first=2, fault=HIT), [0, 1]),
        (Rule(every=2, fault=HIT), [1, 3]),
        (Rule(after=3, fault=HIT), [3, 4]),
        (Rule(method="PUT", nth=2, fault=HIT), [4]),
    ],
)
def test_a_rule_fires_for_what_it_names(rule: Rule, expected: list[int]) -> None:
    assert fired(rule, REQUESTS) == expected


def test_rules_stand_around_one_another_and_count_what_reaches_them(proxy: FaultProxy) -> None:
    slow = proxy.inject(Rule(first=2, fault=Reply(503)))
    longer = proxy.inject(Rule(nth=1, fault=Surround(head=b"a")))
    longest = proxy.inject(Rule(fault=Surround(head=b"b")))
    assert [ask(proxy, body=b"x") for _ in range(4)] == [(503, b""), (503, b""), (200, b"abx"), (200, b"bx")]
    assert [(one.matched, one.fired) for one in (slow, longer, longest)] == [(4, 2), (2, 1), (2, 2)]
    assert proxy.requests[2].faults == ("Surround", "Surround")


def test_a_rule_works_until_it_is_removed(proxy: FaultProxy) -> None:
    with proxy.inject(Rule(fault=Reply(503))) as first:
        second = proxy.inject(Rule(fault=Reply(500)))
        assert ask(proxy)[0] == 503
    assert ask(proxy)[0] == 500
    second.remove()
    assert ask(proxy)[0] == 200
    assert (first.fired, second.fired) == (1, 1)


@pytest.mark.parametrize(
    "given",
    [
        {"nth": 1, "first": 1},
        {"nth": 0},
        {"every": 0},
        {"after": -1},
        {"path": "re:("},
        {"query": "re:*"},
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Rule(fault=Reset(), **given)


@pytest.mark.parametrize(
    ("method", "target", "headers", "expected"),
    [
        ("GET", "/", {}, "ListBuckets"),
        ("GET", "/b?list-type=2", {}, "ListObjectsV2"),
        ("GET", "/b/?list-type=2&prefix=", {}, "ListObjectsV2"),
        ("GET", "/b?prefix=x", {}, "ListObjects"),
        ("GET", "/b", {}, "ListObjects"),
        ("GET", "/b?uploads", {}, "ListMultipartUploads"),
        ("GET", "/b?versioning", {}, "Other"),
        ("HEAD", "/b", {}, "HeadBucket"),
        ("PUT", "/b", {}, "CreateBucket"),
        ("DELETE", "/b", {}, "DeleteBucket"),
        ("POST", "/b?delete", {}, "DeleteObjects"),
        ("GET", "/b/k", {}, "GetObject"),
        ("GET", "/b/a/k?versionId=1", {}, "GetObject"),
        ("GET", "/b/k?uploadId=u", {}, "ListParts"),
        ("HEAD", "/b/k", {}, "HeadObject"),
        ("PUT", "/b/k", {}, "PutObject"),
        ("PUT", "/b/k", {"x-amz-copy-source": "b/l"}, "CopyObject"),
        ("PUT", "/b/k?partNumber=1&uploadId=u", {}, "UploadPart"),
        ("PUT", "/b/k?partNumber=1&uploadId=u", {"x-amz-copy-source": "b/l"}, "UploadPartCopy"),
        ("POST", "/b/k?uploads", {}, "CreateMultipartUpload"),
        ("POST", "/b/k?uploadId=u", {}, "CompleteMultipartUpload"),
        ("DELETE", "/b/k?uploadId=u", {}, "AbortMultipartUpload"),
        ("DELETE", "/b/k", {}, "DeleteObject"),
    ],
)
def test_requests_are_called_what_s3_calls_them(
    method: str, target: str, headers: dict[str, str], expected: str
) -> None:
    path, _, query = target.partition("?")
    assert operation_of(method, path, query, headers) == expected


# --- rules in files, and the command line ----------------------------------------------------------------

DOCUMENT = {
    "rules": [
        {"method": "PUT", "path": "*/manifest.*", "nth": 1, "fault": {"kind": "lose_answer"}},
        {"query": "re:uploads", "fault": {"kind": "reply", "status": 503, "code": "SlowDown"}},
        {"header": "range", "every": 3, "fault": {"kind": "flip_byte", "side": "answer", "offset_bytes": -1}},
        {
            "fault": {
                "kind": "reply",
                "status": 200,
                "body": "<html>",
                "headers": {"content-type": "text/html"},
            }
        },
        {"after": 2, "fault": {"kind": "throttle", "latency_seconds": 1, "bytes_per_second": 1e6}},
        {"fault": {"kind": "short_listing", "drop": "*/manifest.*", "is_truncated": True}},
    ]
}
RULES = [
    Rule(method="PUT", path="*/manifest.*", nth=1, fault=LoseAnswer()),
    Rule(query="re:uploads", fault=Reply(503, code="SlowDown")),
    Rule(header="range", every=3, fault=FlipByte("answer", offset_bytes=-1)),
    Rule(fault=Reply(200, b"<html>", headers={"content-type": "text/html"})),
    Rule(after=2, fault=Throttle(latency_seconds=1, bytes_per_second=1e6)),
    Rule(fault=ShortListing(drop="*/manifest.*", is_truncated=True)),
]


def test_rules_are_read_from_json(tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text(json.dumps(DOCUMENT))
    assert load_rules(tmp_path / "rules.json") == RULES


def test_rules_are_read_from_toml_where_python_can(tmp_path: Path) -> None:
    text = '[[rules]]\nmethod = "PUT"\npath = "*/manifest.*"\nnth = 1\nfault = { kind = "lose_answer" }\n'
    (tmp_path / "rules.toml").write_text(text)
    if sys.version_info >= (3, 11):
        assert load_rules(tmp_path / "rules.toml") == RULES[:1]
    else:
        with pytest.raises(MissingDependencyError, match=r"Python 3\.11"):
            load_rules(tmp_path / "rules.toml")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "one list named 'rules'"),
        ({"rules": {}}, "one list named 'rules'"),
        ({"rules": [{"fault": {"kind": "reset"}}, {"path": "*"}]}, "rule 2 needs a fault"),
        (
            {"rules": [{"fault": {"kind": "explode"}}]},
            "rule 1: unknown kind of fault 'explode'; known are cut,",
        ),
        ({"rules": [{"fault": {"kind": "reset", "seconds": 1}}]}, "rule 1: unknown field 'seconds'"),
        ({"rules": [{"fault": {"kind": "reply"}}]}, "rule 1 needs the field 'status'"),
        ({"rules": [{"fault": {"kind": "reply", "status": "503"}}]}, "rule 1: status must be int, not '503'"),
        ({"rules": [{"fault": {"kind": "cut", "side": "up"}}]}, "rule 1: side must be"),
        ({"rules": [{"fault": {"kind": "delay_answer", "until": 1}}]}, "rule 1: unknown field 'until'"),
        ({"rules": [{"fault": {"kind": "reset"}, "nth": True}]}, "rule 1: nth must be"),
        ({"rules": [{"fault": {"kind": "reset"}, "nth": 0}]}, "rule 1: .* 1 or more"),
        ({"rules": [{"fault": {"kind": "reset"}, "paths": "*"}]}, "rule 1: unknown field 'paths'"),
    ],
)
def test_a_document_that_holds_no_rules_is_refused_with_the_place(document: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_rules(document)


@pytest.mark.parametrize(("name", "text"), [("a.json", "{"), ("b.json", None)])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        load_rules(tmp_path / name)


def test_the_command_serves_until_it_is_ended_and_counts_its_rules(tmp_path: Path, store: FaultProxy) -> None:
    rules = {"rules": [{"path": "*/bad", "fault": {"kind": "reply", "status": 503, "code": "SlowDown"}}]}
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    command = [sys.executable, "-m", "remote_ckpt.testing.proxy", "--upstream", store.endpoint_url]
    process = subprocess.Popen(
        [*command, "--rules", str(tmp_path / "rules.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        assert process.stdout is not None
        found = re.fullmatch(
            rf"http://127\.0\.0\.1:(\d+) -> {store.endpoint_url}\n", process.stdout.readline()
        )
        assert found is not None
        for target, status in (("/b/good", 200), ("/b/bad", 503)):
            with closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)) as connection:
                connection.request("GET", target)
                assert connection.getresponse().status == status
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert out.splitlines() == [
        "GetObject /b/good: 200",
        "GetObject /b/bad: 503 (Reply)",
        "rule 1 fired 1 times for 1 requests that matched",
    ]
    assert (process.returncode, err) == (0, "")


def test_the_command_says_what_is_wrong_with_its_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text('{"rules": [{}]}')
    result = subprocess.run(
        [
            *(sys.executable, "-m", "remote_ckpt.testing.proxy", "--upstream", "http://127.0.0.1:1"),
            *("--rules", str(tmp_path / "rules.json")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("rule 1 needs a fault")


# --- how it begins and ends ------------------------------------------------------------------------------


def test_without_aiohttp_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "remote_ckpt.testing.proxy.server", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'remote-ckpt\[testing\]'"):
        FaultProxy().start()


def test_a_port_that_is_taken_is_an_error(proxy: FaultProxy) -> None:
    port = int(proxy.endpoint_url.rpartition(":")[2])
    with pytest.raises(OSError, match="address already in use"):
        FaultProxy(port=port).start()


@pytest.mark.parametrize("fault", [Stall(), Stall("request"), DelayAnswer(), DelayRequest(), Throttle(3600)])
def test_it_ends_at_once_whatever_is_under_way(store: FaultProxy, fault: Fault) -> None:
    before = set(threading.enumerate())
    with FaultProxy(store.endpoint_url, rules=[Rule(fault=fault)]) as proxy, dial(proxy) as client:
        client.sendall(f"PUT /b/k HTTP/1.1\r\nHost: h\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode())
        client.sendall(CONTENT)
        wait_until(lambda: bool(proxy.injections[0].fired))
        began = time.monotonic()
        proxy.stop()
        assert time.monotonic() - began < 20
        assert CONTENT not in receive_until(client, CONTENT)
    assert set(threading.enumerate()) - before == set()
    with pytest.raises(ConnectionRefusedError):
        ask(proxy)
    gc.collect()  # what was left open would warn here


def test_waiting_for_what_does_not_end_is_a_timeout(proxy: FaultProxy) -> None:
    release = threading.Event()
    proxy.inject(Rule(fault=DelayRequest(until=release)))
    with pytest.raises(TimeoutError):
        ask(proxy, seconds=0.1)
    with pytest.raises(TimeoutError, match="under way"):
        proxy.settle(seconds=0.1)
    release.set()
    proxy.settle()


def dial(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(proxy.endpoint_url.rpartition(":")[2])), timeout=20)


def receive_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        try:
            piece = client.recv(65536)
        except ConnectionResetError:
            break
        if not piece:
            break
        received += piece
    return received


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once something has happened in the proxy's thread."""
    give_up_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)
