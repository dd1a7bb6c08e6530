"""What an error says to do: where the server is, whether it speaks TLS, which credentials to give."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from remote_ckpt.errors import AccessDeniedError, ConfigError, StoreUnavailableError
from remote_ckpt.options import Options, RetryOptions
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.store.http_errors import reach_advice
from remote_ckpt.store.obstore_errors import translate
from remote_ckpt.testing.proxy import FaultProxy

ONCE = Options(retry=RetryOptions(max_attempts=1))
KEYS = {"key": "k", "secret": "s3cret"}
VERBS: list[Callable[[Store], object]] = [lambda store: store.list(), lambda store: store.create("k", b"1")]


@pytest.fixture
def plain_server() -> Iterator[FaultProxy]:
    with FaultProxy("http://127.0.0.1:1") as server:
        yield server


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("transport", [None, "fsspec"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_is_not_there_is_named(transport: str | None, verb: Callable[[Store], object]) -> None:
    given = {**KEYS, "endpoint_url": "http://127.0.0.1:1"}
    store = open_store("s3://bucket/run", storage_options=given, transport=transport, options=ONCE)
    with pytest.raises(StoreUnavailableError, match=r"server at http://127\.0\.0\.1:1 running.*endpoint_url"):
        verb(store)


def test_a_web_server_that_is_not_there_is_named() -> None:
    with pytest.raises(StoreUnavailableError, match=r"server at http://127\.0\.0\.1:1 running"):
        open_store("http://127.0.0.1:1/w", options=ONCE).read("f")


@pytest.mark.parametrize("transport", [None, "fsspec"])
@pytest.mark.parametrize("verb", VERBS)
def test_https_to_a_server_without_tls_is_told(
    plain_server: FaultProxy, transport: str | None, verb: Callable[[Store], object]
) -> None:
    endpoint = plain_server.endpoint_url.replace("http:", "https:")
    given = {**KEYS, "endpoint_url": endpoint}
    store = open_store("s3://bucket/run", storage_options=given, transport=transport, options=ONCE)
    with pytest.raises(StoreUnavailableError, match=f"{endpoint} does not speak TLS: is http:// meant"):
        verb(store)


def test_advice_shows_host_and_port_only() -> None:
    shown = reach_advice("no way to https://user:pass-word@host:9/b?X-Amz-Signature=abc [UnknownIssuer]")
    assert shown.startswith("the certificate of https://host:9 is not trusted")
    assert "pass-word" not in shown
    assert "abc" not in shown


@pytest.mark.parametrize("transport", [None, "fsspec"])
def test_missing_aws_credentials_are_told_with_the_url(transport: str | None) -> None:
    with pytest.raises(AccessDeniedError, match="give key and secret, set AWS_ACCESS_KEY_ID") as raised:
        open_store("s3://bucket/run", transport=transport, options=ONCE).list()
    assert raised.value.url == "s3://bucket/run"


@pytest.mark.parametrize(
    ("url", "option"), [("gs://bucket/run", "GOOGLE_APPLICATION_CREDENTIALS"), ("az://c/run", "account_name")]
)
def test_a_refusal_by_google_or_azure_says_how_to_sign(url: str, option: str) -> None:
    refused = Exception("HTTP error: Server returned non-2xx status code: 403 Forbidden")
    found = translate(refused, operation="list", url=url)
    assert isinstance(found, AccessDeniedError)
    assert option in str(found)


def test_azure_without_an_account_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="give account_name, and account_key or sas_token") as raised:
        open_store("az://container/run")
    assert raised.value.url == "az://container/run"
