"""The endpoint that benchmarks use is an S3 server: the store contract holds on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from remote_ckpt.store.base import Store
from remote_ckpt.store.obstore import open_obstore_store
from remote_ckpt.testing.s3_contract import FreshRoot, S3Contract
from remote_ckpt.testing.servers import LocalServer
from remote_ckpt.url import parse_location

ROOT = Path(__file__).parents[1]


class BenchEndpoint(LocalServer):
    """``benchmarks/endpoint.py`` as a child process."""

    def _launch(self, folder: Path, ports: Sequence[int]) -> None:
        self._spawn([sys.executable, "-m", "benchmarks.endpoint", "--port", str(ports[0])])

    def _environment(self, folder: Path, ports: Sequence[int]) -> Mapping[str, str]:
        return {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[LocalServer]:
    with BenchEndpoint() as server:
        yield server


class TestObstoreOnBenchEndpoint(S3Contract):
    keys_listed: ClassVar[int] = 1_050  # more than one page

    @pytest.fixture
    def store(self, endpoint: LocalServer, fresh_root: FreshRoot) -> Store:
        self.server = endpoint
        where = parse_location(fresh_root(endpoint))
        return open_obstore_store(where, storage_options=endpoint.storage_options())
