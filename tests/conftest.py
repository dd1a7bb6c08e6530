"""Servers and ranks that tests share: each is started when first asked for, and ended with the session.

Tests marked ``server`` ask for ``real_server``: SeaweedFS, or what ``--s3`` names, or the server that
``TEST_S3_ENDPOINT_URL`` points at. So one suite tells what holds on which product.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks

from remote_ckpt.testing.servers import (
    CephServer,
    LocalServer,
    MiniStackServer,
    MotoServer,
    RcloneServer,
    RunningServer,
    SeaweedServer,
)

REAL_SERVERS: dict[str, type[LocalServer]] = {"seaweedfs": SeaweedServer, "ceph": CephServer}

_numbers = itertools.count(1)
_session = uuid.uuid4().hex[:8]  # a running server still has the buckets of earlier sessions


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--s3",
        choices=tuple(REAL_SERVERS),
        default="seaweedfs",
        help="what the tests marked 'server' run on, unless TEST_S3_ENDPOINT_URL names a running server "
        "(with TEST_S3_ACCESS_KEY and TEST_S3_SECRET_KEY)",
    )


@pytest.fixture(scope="session")
def ministack() -> Iterator[LocalServer]:
    with MiniStackServer() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[LocalServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def real_server(request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    """A server that checks signatures and keeps its data as it does in production."""
    endpoint_url = os.environ.get("TEST_S3_ENDPOINT_URL")
    chosen = REAL_SERVERS[request.config.getoption("--s3")]
    with _running(endpoint_url) if endpoint_url else chosen() as server:
        yield server


@pytest.fixture(scope="session")
def seaweed(real_server: LocalServer) -> LocalServer:
    """The same: SeaweedFS, unless another was asked for."""
    return real_server


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
    return lambda server: server.create_bucket(f"bucket-{_session}-{next(_numbers)}")


@pytest.fixture(scope="session")
def fresh_root() -> Callable[[LocalServer], str]:
    """Return a function that gives the URL of an empty prefix in a bucket that a server's tests share."""
    buckets: dict[str, str] = {}

    def fresh(server: LocalServer) -> str:
        if server.endpoint_url not in buckets:
            buckets[server.endpoint_url] = server.create_bucket(f"shared-{_session}")
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
