"""Servers and ranks that tests share: each is started when first asked for, and ended with the session."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks

from remote_ckpt.testing.servers import (
    LocalServer,
    MiniStackServer,
    MotoServer,
    RcloneServer,
    RunningServer,
    SeaweedServer,
)

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def ministack() -> Iterator[LocalServer]:
    with MiniStackServer() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[LocalServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def seaweed() -> Iterator[LocalServer]:
    """SeaweedFS; or the server of ``TEST_S3_ENDPOINT_URL``, to run the same tests on another product."""
    endpoint_url = os.environ.get("TEST_S3_ENDPOINT_URL")
    with _running(endpoint_url) if endpoint_url else SeaweedServer() as server:
        yield server


def _running(endpoint_url: str) -> LocalServer:
    return RunningServer(
        endpoint_url,
        access_key=os.environ["TEST_S3_ACCESS_KEY"],
        secret_key=os.environ["TEST_S3_SECRET_KEY"],
    )


@pytest.fixture(scope="session")
def rclone() -> Iterator[LocalServer]:
    with RcloneServer() as server:
        yield server


@pytest.fixture(scope="session")
def fresh_bucket() -> Callable[[LocalServer], str]:
    """Return a function that makes an empty bucket on a server and returns its name."""
    return lambda server: server.create_bucket(f"bucket-{next(_numbers)}")


@pytest.fixture(scope="session")
def fresh_root() -> Callable[[LocalServer], str]:
    """Return a function that gives the URL of an empty prefix in a bucket that a server's tests share."""
    buckets: dict[str, str] = {}

    def fresh(server: LocalServer) -> str:
        if server.endpoint_url not in buckets:
            buckets[server.endpoint_url] = server.create_bucket("shared")
        return f"s3://{buckets[server.endpoint_url]}/{next(_numbers)}/ckpt"

    return fresh


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A pool of rank processes, started when the first test asks for them."""
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _no_aws_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own AWS settings, and the cloud's metadata service, out of every test."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
