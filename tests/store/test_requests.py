"""How many requests an operation sends, how long one may take, and what a refusal of all of them means."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import obstore
import pytest

from remote_ckpt.errors import (
    AccessDeniedError,
    ConfigError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.options import MiB, Options, RetryOptions
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Leftover, Store
from remote_ckpt.testing.proxy import FaultProxy, Reply, Rule

ONCE = Options(retry=RetryOptions(max_attempts=1))
URL = "s3://bucket/run"

OPEN_UPLOAD = Leftover(
    key="k", kind="upload", upload_id="id", size_bytes=0, modified_at=datetime.now(timezone.utc)
)
VERBS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("k"),
    "read_range": lambda store: store.read_range("k", 0, 1),
    "write": lambda store: store.write("k", b"1"),
    "create": lambda store: store.create("k", b"1"),
    "write_stream": lambda store: stream(store, 6 * MiB),
    "info": lambda store: store.info("k"),
    "list": lambda store: store.list(),
    "list_children": lambda store: store.list_children(),
    "copy": lambda store: store.copy("k", "l"),
    "delete": lambda store: store.delete(["k"]),
    "clock": lambda store: store.clock(),
    "list_leftovers": lambda store: store.list_leftovers(),
    "remove_leftover": lambda store: store.remove_leftover(OPEN_UPLOAD),
}


def stream(store: Store, size_bytes: int) -> None:
    source = [bytes(MiB)] * (size_bytes // MiB)
    store.write_stream("k", lambda: iter(source), size_bytes=size_bytes, part_bytes=8 * MiB, concurrency=2)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultProxy]:
    """A server whose every answer a test decides."""
    with FaultProxy() as running:
        yield running


@pytest.fixture(scope="module", params=[None, "fsspec"], ids=["obstore", "s3fs"])
def store(request: pytest.FixtureRequest, server: FaultProxy) -> Store:
    """A store that never retries."""
    given = {"key": "k", "secret": "s", "endpoint_url": server.endpoint_url}
    return open_store(URL, storage_options=given, transport=request.param, options=ONCE)


def answer(server: FaultProxy, *rules: Rule | Reply) -> None:
    """Forget what was; from now on these answer."""
    server.clear()
    server.forget()
    for rule in rules:
        server.inject(Rule(fault=rule) if isinstance(rule, Reply) else rule)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
def test_one_attempt_is_one_request(
    store: Store, server: FaultProxy, verb: str, status: int, code: str
) -> None:
    answer(server, Reply(status, code=code))
    with pytest.raises(StoreUnavailableError):
        VERBS[verb](store)
    assert len(server.requests) == 1


@pytest.mark.parametrize("transport", [None, "fsspec"])
def test_the_number_of_attempts_is_the_number_of_requests(server: FaultProxy, transport: str | None) -> None:
    given = {"key": "k", "secret": "s", "endpoint_url": server.endpoint_url}
    thrice = Options(retry=RetryOptions(max_attempts=3, initial_seconds=0.0))
    store = open_store(URL, storage_options=given, transport=transport, options=thrice)
    answer(server, Reply(503, code="SlowDown"))
    for verb, count in (("read", 3), ("list", 3), ("write", 3), ("create", 1)):
        server.forget()
        with pytest.raises(StoreUnavailableError):
            VERBS[verb](store)
        assert (verb, len(server.requests)) == (verb, count)


@pytest.mark.parametrize("verb", ["read", "read_range", "list", "list_children", "info"])
def test_an_expired_token_is_named_by_every_read(store: Store, server: FaultProxy, verb: str) -> None:
    answer(server, Reply(400, code="ExpiredToken"))
    with pytest.raises(AccessDeniedError, match="log in again"):
        VERBS[verb](store)


@pytest.mark.timeout(30)  # far above the deadline, far below the default of one request
@pytest.mark.parametrize("transport", [None, "fsspec"])
def test_no_request_outlasts_the_deadline_of_its_operation(transport: str | None) -> None:
    hurried = Options(retry=RetryOptions(max_attempts=2, initial_seconds=0.0, total_seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        store = open_store(URL, storage_options=given, transport=transport, options=hurried)
        for verb in VERBS.values():
            with pytest.raises(StoreTimeoutError):
                verb(store)


def test_a_refused_batch_of_deletions_is_not_tried_key_by_key(store: Store, server: FaultProxy) -> None:
    answer(server, Reply(400, code="ExpiredToken"))
    keys = [f"{number}" for number in range(50)]
    try:
        failures = store.delete(keys)
    except AccessDeniedError:
        failures = []
    else:
        assert [failure.key for failure in failures] == keys
        assert {type(failure.error) for failure in failures} == {AccessDeniedError}
    assert len(server.requests) == 1


def test_a_store_that_knows_no_condition_is_unsupported(store: Store, server: FaultProxy) -> None:
    answer(server, Reply(501, code="NotImplemented"))
    with pytest.raises(UnsupportedStoreError, match="501 NotImplemented"):
        store.create("k", b"1")
    with pytest.raises(StoreError, match="501 NotImplemented") as caught:
        store.write("k", b"1")
    assert not isinstance(caught.value, StoreUnavailableError)


def test_a_part_of_a_large_upload_is_sent_again(store: Store, server: FaultProxy) -> None:
    answer(
        server,
        Rule(operation="CreateMultipartUpload", fault=Reply(200, UPLOAD.encode())),
        Rule(query="*partNumber=1*", nth=1, fault=Reply(503, code="SlowDown")),
        Reply(200, COMPLETED.encode(), headers={"etag": '"e"'}),
    )
    stream(store, 12 * MiB)
    parts = [request.query.count("partNumber=1") for request in server.requests]
    assert sum(parts) == 2


UPLOAD = """<?xml version="1.0"?><InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>run/k</Key>
<UploadId>u</UploadId></InitiateMultipartUploadResult>"""
COMPLETED = """<?xml version="1.0"?><CompleteMultipartUploadResult><Location>l</Location>
<Bucket>bucket</Bucket><Key>run/k</Key><ETag>"e"</ETag></CompleteMultipartUploadResult>"""


BAD_ENDPOINTS = [
    "user:s3cret@minio:9000",
    "http://user:s3cret@127.0.0.1:1",
    "http://127.0.0.1:99999999",
    "http://127.0.0.1:port",
    "http://",
    "http://[::1",
    "http://ho st",
    "https://minio.lab/?X-Amz-Signature=s3cret",
    "s3cret",
    7,
]


class TestMalformedOptions:
    @pytest.fixture(params=[None, "fsspec"], ids=["obstore", "s3fs"])
    def transport(self, request: pytest.FixtureRequest) -> str | None:
        found: str | None = request.param
        return found

    @pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
    @pytest.mark.parametrize("place", ["endpoint_url", "client_kwargs", "AWS_ENDPOINT_URL"])
    def test_a_malformed_endpoint_is_named_by_its_option_and_not_repeated(
        self, transport: str | None, endpoint: Any, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[str, Any] = {"key": "k", "secret": "s"}
        if place == "client_kwargs":
            given["client_kwargs"] = {"endpoint_url": endpoint}
        elif place == "endpoint_url":
            given["endpoint_url"] = endpoint
        else:
            monkeypatch.setenv(place, str(endpoint))
        with pytest.raises(
            ConfigError, match="AWS_ENDPOINT_URL" if "AWS" in place else "endpoint_url"
        ) as caught:
            open_store(URL, storage_options=given, transport=transport)
        assert "s3cret" not in "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize("endpoint", ["http://", "http://user:s3cret@host"])
    @pytest.mark.parametrize(
        ("url", "option"), [("gs://bucket/run", "endpoint_url"), ("az://container/run", "endpoint")]
    )
    def test_those_of_other_providers_are_checked_too(self, url: str, option: str, endpoint: str) -> None:
        with pytest.raises(ConfigError, match="the endpoint") as caught:
            open_store(url, storage_options={option: endpoint})
        assert "s3cret" not in str(caught.value)

    @pytest.mark.parametrize("endpoint", ["http://[::1]:9000", "https://minio.lab/s3/", "http://localhost:1"])
    def test_sound_endpoints_pass(self, transport: str | None, endpoint: str) -> None:
        given = {"key": "k", "secret": "s", "endpoint_url": endpoint}
        assert open_store(URL, storage_options=given, transport=transport).url == URL

    @pytest.mark.parametrize("option", ["client_kwargs", "config_kwargs", "s3_additional_kwargs"])
    def test_text_in_place_of_a_mapping_is_a_wrong_call(self, transport: str | None, option: str) -> None:
        with pytest.raises(ConfigError, match=f"{option} must be a mapping, not str"):
            open_store(
                URL, storage_options={"key": "k", "secret": "s", option: "s3cret"}, transport=transport
            )

    def test_storage_options_of_another_type_are_a_wrong_call(self, transport: str | None) -> None:
        with pytest.raises(ConfigError, match="storage_options must be a mapping, not str"):
            open_store(URL, storage_options="s3cret", transport=transport)  # type: ignore[arg-type]

    def test_keys_that_are_no_text_are_a_wrong_call(self) -> None:
        with pytest.raises(ConfigError, match="must be text"):
            open_store(URL, storage_options={"key": "k", "secret": 7})


class PanicException(BaseException):
    """What pyo3 raises where Rust panics: no Exception, and no class that can be imported."""


def test_a_panic_of_the_native_client_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object, **__: object) -> None:
        raise PanicException("s3cret")

    given = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"}
    store = open_store(URL, storage_options=given, options=ONCE)
    monkeypatch.setattr(obstore, "get", panic)
    with pytest.raises(StoreError, match="inside of obstore") as caught:
        store.read("k")
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))
