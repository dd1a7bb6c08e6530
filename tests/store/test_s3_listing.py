"""Promise 5 at the wire: what is no listing is never an empty one, through both transports."""

from __future__ import annotations

import itertools
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import pytest

from remote_ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from remote_ckpt.options import Options, RetryOptions
from remote_ckpt.store import open_store
from remote_ckpt.store.base import ObjectInfo, Store
from remote_ckpt.store.http_client import MAX_BODY_BYTES, HttpClient
from remote_ckpt.store.obstore_options import plan_s3
from remote_ckpt.store.s3_listing import bucket_url
from remote_ckpt.store.sigv4 import format_query, sign_headers
from remote_ckpt.testing.proxy import FaultProxy, Reply, Rule
from remote_ckpt.testing.s3_contract import FreshRoot
from remote_ckpt.testing.servers import LocalServer
from remote_ckpt.url import parse_location

ONCE = Options(retry=RetryOptions(max_attempts=1))
HEAD = '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
EMPTY = f"{HEAD}<Name>b</Name><IsTruncated>false</IsTruncated></ListBucketResult>"

NO_LISTINGS: dict[str, Reply] = {
    "an empty body": Reply(200),
    "no content": Reply(204),
    "partial content": Reply(206, EMPTY.encode()),
    "a login page": Reply(200, b"<html><body>log in</body></html>", headers={"content-type": "text/html"}),
    "text": Reply(200, b"please log in"),
    "an error sent as success": Reply(200, code="InternalError"),
    "a cut body": Reply(200, EMPTY[:-5].encode()),
    "no bucket": Reply(200, EMPTY.replace("<Name>b</Name>", "").encode()),
    "nothing about completeness": Reply(200, EMPTY.replace("<IsTruncated>false</IsTruncated>", "").encode()),
    "a page without token": Reply(200, EMPTY.replace("false", "true").encode()),
    "a page with an empty token": Reply(
        200,
        EMPTY.replace("false</IsTruncated>", "true</IsTruncated><NextContinuationToken/>").encode(),
    ),
    "an absent key": Reply(404, code="NoSuchKey"),
    "a proxy's 404": Reply(404, b"<html>"),
    "a redirect": Reply(302, headers={"location": "http://127.0.0.1:1/login"}),
}


@pytest.fixture(scope="module", params=[None, "fsspec"], ids=["obstore", "s3fs"])
def transport(request: pytest.FixtureRequest) -> str | None:
    found: str | None = request.param
    return found


@pytest.fixture(scope="module")
def running_proxy(ministack: LocalServer) -> Iterator[FaultProxy]:
    with FaultProxy(ministack.endpoint_url) as running:
        yield running


@pytest.fixture
def proxy(running_proxy: FaultProxy) -> Iterator[FaultProxy]:
    yield running_proxy
    running_proxy.clear()


@pytest.fixture(scope="module")
def bucket(
    ministack: LocalServer, running_proxy: FaultProxy, fresh_bucket: FreshRoot, transport: str | None
) -> Store:
    """One store for all tests of a transport: to make an s3fs costs more than a test. It never retries."""
    storage_options = {**ministack.storage_options(), "endpoint_url": running_proxy.endpoint_url}
    url = f"s3://{fresh_bucket(ministack)}"
    return open_store(url, storage_options=storage_options, transport=transport, options=ONCE)


@pytest.fixture
def store(bucket: Store) -> Store:
    """An empty store behind the proxy."""
    return bucket.scope(f"run-{next(_numbers)}")


def answer_listings(reply: Reply) -> Rule:
    return Rule(operation="ListObjectsV2", fault=reply)


_numbers = itertools.count(1)

LISTINGS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: store.list(),
    "list_children": lambda store: store.list_children(),
}


@pytest.mark.parametrize("verb", LISTINGS)
@pytest.mark.parametrize("what", NO_LISTINGS)
def test_what_is_no_listing_is_an_error_of_the_store(
    store: Store, proxy: FaultProxy, what: str, verb: str
) -> None:
    store.write("1/k", b"1")
    proxy.inject(answer_listings(NO_LISTINGS[what]))
    with pytest.raises(StoreError) as caught:
        LISTINGS[verb](store)
    assert not isinstance(caught.value, FileNotFoundError | BucketNotFoundError)


@pytest.mark.parametrize("what", NO_LISTINGS)
def test_a_head_answered_404_is_no_absence_without_a_listing(
    store: Store, proxy: FaultProxy, what: str
) -> None:
    proxy.inject(Rule(method="HEAD", fault=Reply(404)))
    proxy.inject(answer_listings(NO_LISTINGS[what]))
    with pytest.raises(StoreError) as caught:
        store.info("k")
    assert not isinstance(caught.value, ObjectNotFoundError)


def test_a_head_answered_404_for_a_listed_object_is_no_absence(store: Store, proxy: FaultProxy) -> None:
    store.write("k", b"1")
    proxy.inject(Rule(method="HEAD", fault=Reply(404)))
    with pytest.raises(StoreUnavailableError):
        store.info("k")


@pytest.mark.parametrize("what", ["a login page", "an empty body", "an error sent as success"])
def test_a_second_page_that_is_none_fails_the_whole_listing(
    store: Store, proxy: FaultProxy, what: str
) -> None:
    first = page(store, "1/a", more="<NextContinuationToken>t</NextContinuationToken>")
    proxy.inject(Rule(query="*continuation-token=t*", fault=NO_LISTINGS[what]))
    proxy.inject(answer_listings(Reply(200, first.encode())))
    for verb in LISTINGS.values():
        with pytest.raises(StoreUnavailableError):
            verb(store)


def test_a_page_that_leads_to_itself_ends_the_listing_with_an_error(store: Store, proxy: FaultProxy) -> None:
    again = page(store, "a", more="<NextContinuationToken>t</NextContinuationToken>")
    proxy.inject(answer_listings(Reply(200, again.encode())))
    with pytest.raises(StoreUnavailableError, match="came twice"):
        store.list()


def page(store: Store, key: str, *, more: str = "", **fields: str) -> str:
    """Return a page with one object of a store; ``more`` is its token."""
    root = parse_location(store.url).path
    entry = {"Key": f"{root}/{key}", "Size": "1", "LastModified": "2026-01-02T03:04:05.678Z", **fields}
    inner = "".join(f"<{name}>{text}</{name}>" for name, text in entry.items() if text)
    truncated = "true" if more else "false"
    return (
        f"{HEAD}<Name>b</Name><IsTruncated>{truncated}</IsTruncated>{more}<Contents>{inner}</Contents>"
        "</ListBucketResult>"
    )


@pytest.mark.parametrize("fields", [{"Key": ""}, {"Size": ""}, {"Size": "-1"}, {"LastModified": "soon"}])
def test_an_entry_without_its_fields_fails_the_listing(
    store: Store, proxy: FaultProxy, fields: dict[str, str]
) -> None:
    proxy.inject(answer_listings(Reply(200, page(store, "k", **fields).encode())))
    with pytest.raises(StoreError):
        store.list()


def test_keys_outside_of_what_was_asked_for_fail_the_listing(store: Store, proxy: FaultProxy) -> None:
    proxy.inject(answer_listings(Reply(200, page(store, "k", Key="elsewhere/k").encode())))
    with pytest.raises(StoreUnavailableError, match="outside of the prefix"):
        store.list()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(404, code="NoSuchBucket"), BucketNotFoundError),
        (Reply(403, code="AccessDenied"), AccessDeniedError),
        (Reply(400, code="ExpiredToken"), AccessDeniedError),
        (Reply(200, code="AccessDenied"), AccessDeniedError),
        (Reply(503, code="SlowDown"), StoreUnavailableError),
        (Reply(301, code="PermanentRedirect"), StoreError),
    ],
)
def test_a_refusal_says_what_the_store_said(
    store: Store, proxy: FaultProxy, reply: Reply, expected: type[StoreError]
) -> None:
    proxy.inject(answer_listings(reply))
    for verb in LISTINGS.values():
        with pytest.raises(expected, match=str(reply.code)):
            verb(store)


@pytest.mark.parametrize("foreign", ["7//x", "7/a/../b", "./b", "7/a\x01b", "7/", "7/x/", "a+b c%2F/d"])
def test_keys_that_are_not_ours_disturb_no_listing(
    store: Store, ministack: LocalServer, foreign: str
) -> None:
    store.write("7/ours", b"1")
    root = parse_location(store.url)
    ministack.client().put_object(Bucket=root.bucket, Key=f"{root.path}/{foreign}", Body=b"x")
    found = [info.key for info in store.list()]
    assert "7/ours" in found
    assert set(found) <= {"7/ours", foreign}
    assert "7" in store.list_children().prefixes
    assert "7/ours" in [info.key for info in store.list_children("7/").objects]


class TestRequests:
    """What goes over the wire when S3 is listed for obstore."""

    def test_the_signature_is_that_of_the_published_example(self) -> None:
        # https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html, the last example
        query = format_query({"prefix": "J", "max-keys": "2"})
        headers = sign_headers(
            "GET",
            f"https://examplebucket.s3.amazonaws.com/?{query}",
            credentials={
                "access_key_id": "AKIAIOSFODNN7EXAMPLE",
                "secret_access_key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            },
            region="us-east-1",
            now=datetime(2013, 5, 24, tzinfo=timezone.utc),
        )
        assert headers["authorization"] == (
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
            "SignedHeaders=host;x-amz-content-sha256;x-amz-date,"
            "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
        )

    def test_a_session_token_and_the_payer_are_signed_too(self) -> None:
        with FaultProxy() as proxy:
            proxy.inject(answer_listings(Reply(200, EMPTY.encode())))
            given = {"key": "k", "secret": "s", "token": "session", "request_payer": True}
            assert open_at(proxy, given).list() == []
        (request,) = proxy.requests
        assert request.headers["x-amz-security-token"] == "session"
        assert request.headers["x-amz-request-payer"] == "requester"
        names = "host;x-amz-content-sha256;x-amz-date;x-amz-request-payer;x-amz-security-token"
        assert f"SignedHeaders={names}," in request.headers["authorization"]

    def test_anonymous_listings_are_not_signed(self) -> None:
        with FaultProxy() as proxy:
            proxy.inject(answer_listings(Reply(200, EMPTY.encode())))
            assert open_at(proxy, {"anon": True}).list_children().prefixes == ()
        (request,) = proxy.requests
        assert "authorization" not in request.headers

    def test_escaped_keys_come_back_as_they_are(self) -> None:
        body = EMPTY.replace(
            "</IsTruncated>",
            "</IsTruncated><EncodingType>url</EncodingType><Contents><Key>run/a+b%25%2B%C3%A9</Key><Size>7</Size>"
            "<LastModified>2026-01-02T03:04:05.678Z</LastModified></Contents>",
        )
        with FaultProxy() as proxy:
            proxy.inject(answer_listings(Reply(200, body.encode())))
            found = open_at(proxy, {"anon": True}).list()
        assert found == [ObjectInfo("a b%+é", 7, datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc))]

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, "https://s3.eu-west-1.amazonaws.com/bucket"),
            ({"virtual_hosted_style_request": True}, "https://bucket.s3.eu-west-1.amazonaws.com/"),
            ({"endpoint_url": "https://minio.lab/s3/"}, "https://minio.lab/s3/bucket"),
            (
                {"endpoint_url": "https://minio.lab", "virtual_hosted_style_request": True},
                "https://bucket.minio.lab/",
            ),
        ],
    )
    def test_the_bucket_is_where_obstore_looks_for_it(self, options: dict[str, Any], expected: str) -> None:
        settings = plan_s3("bucket", {"anon": True, "region": "eu-west-1", **options}, {})
        assert bucket_url("bucket", settings) == expected

    def test_a_declared_document_type_is_no_listing(self) -> None:
        bomb = '<!DOCTYPE l [<!ENTITY a "aaaa">]>' + EMPTY.partition("?>")[2]
        with FaultProxy() as proxy:
            proxy.inject(answer_listings(Reply(200, bomb.encode())))
            with pytest.raises(StoreUnavailableError, match="not XML"):
                open_at(proxy, {"anon": True}).list()

    def test_a_body_that_is_far_too_long_is_not_read_on(self) -> None:
        with FaultProxy() as proxy:
            proxy.inject(answer_listings(Reply(200, bytes(MAX_BODY_BYTES + 1))))
            with pytest.raises(StoreUnavailableError, match="longer than"):
                open_at(proxy, {"anon": True}).list()

    def test_a_body_shorter_than_announced_is_no_answer(self) -> None:
        with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + EMPTY.encode()) as endpoint_url:
            client = HttpClient(timeout_seconds=5)
            with pytest.raises(StoreUnavailableError, match="bytes early"):
                client.send("GET", endpoint_url, url="s3://b", operation="list")

    def test_what_is_not_http_is_unavailable_and_shows_no_signature(self) -> None:
        with raw_server(b"GARBAGE\r\n\r\n") as endpoint_url:
            client = HttpClient(timeout_seconds=5)
            with pytest.raises(StoreUnavailableError) as caught:
                client.send(
                    "HEAD", f"{endpoint_url}/?X-Amz-Signature=s3cret", url="s3://b", operation="clock"
                )
        assert "s3cret" not in "".join(traceback.format_exception(caught.value))

    def test_an_untrusted_certificate_is_refused(self) -> None:
        with pytest.raises(StoreUnavailableError), raw_server(b"not TLS") as endpoint_url:
            HttpClient(timeout_seconds=5).send(
                "GET", endpoint_url.replace("http:", "https:"), url="s3://b", operation="list"
            )


def open_at(proxy: FaultProxy, options: dict[str, Any]) -> Store:
    storage_options = {"endpoint_url": proxy.endpoint_url, **options}
    return open_store("s3://bucket/run", storage_options=storage_options, options=ONCE)


@contextmanager
def raw_server(content: bytes) -> Iterator[str]:
    """Answer one connection with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(content)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)
