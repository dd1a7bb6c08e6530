"""The endpoint that benchmarks use is an S3 server: the store contract holds on it."""

from __future__ import annotations

import http.client
import random
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from remote_ckpt.options import MiB
from remote_ckpt.store.base import Store
from remote_ckpt.store.obstore import open_obstore_store
from remote_ckpt.testing.s3_contract import FreshRoot, S3Contract
from remote_ckpt.testing.servers import LocalServer
from remote_ckpt.url import parse_location

ROOT = Path(__file__).parents[1]
MODULE = [sys.executable, "-m", "benchmarks.endpoint"]
AWS_CHUNKS = b"3\r\nabc\r\n4\r\ndefg\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"


class BenchEndpoint(LocalServer):
    """``benchmarks/endpoint.py`` as a child process."""

    def _launch(self, folder: Path, ports: Sequence[int]) -> None:
        self._spawn([*MODULE, "--port", str(ports[0]), "--warm-mib", "64"])

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


class TestBodies:
    @pytest.fixture
    def bucket(self, endpoint: LocalServer, fresh_root: FreshRoot) -> str:
        return urlsplit(fresh_root(endpoint)).netloc

    @pytest.mark.parametrize("cut", [len(AWS_CHUNKS), 1, 5], ids=["not cut", "bytes", "fives"])
    def test_a_body_in_awss_chunks_is_stored_without_them_however_http_cuts_it(
        self, endpoint: LocalServer, bucket: str, cut: int
    ) -> None:
        headers = {
            "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
            "x-amz-decoded-content-length": "7",
        }
        if cut == len(AWS_CHUNKS):
            headers["Content-Length"] = str(len(AWS_CHUNKS))
            pieces = [AWS_CHUNKS]
        else:
            headers["Transfer-Encoding"] = "chunked"
            cuts = [AWS_CHUNKS[start : start + cut] for start in range(0, len(AWS_CHUNKS), cut)]
            pieces = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*cuts, b""]]
        with_body = http.client.HTTPConnection(urlsplit(endpoint.endpoint_url).netloc, timeout=60)
        with_body.request("PUT", f"/{bucket}/chunks", body=b"".join(pieces), headers=headers)
        assert with_body.getresponse().read() == b""
        with_body.request("GET", f"/{bucket}/chunks")  # on the same connection: nothing of the body is left
        assert with_body.getresponse().read() == b"abcdefg"
        with_body.close()

    def test_a_range_across_slabs_and_parts_has_their_bytes(self, endpoint: LocalServer, bucket: str) -> None:
        client, target = endpoint.client(), {"Bucket": bucket, "Key": "parts"}
        parts = [random.Random(number).randbytes(9 * MiB) for number in (1, 2)]  # two slabs and a piece each
        upload = {**target, "UploadId": client.create_multipart_upload(**target)["UploadId"]}
        sent = [
            {"PartNumber": number, "ETag": client.upload_part(**upload, PartNumber=number, Body=part)["ETag"]}
            for number, part in enumerate(parts, 1)
        ]
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": sent})
        start, end = 3 * MiB + 1, 17 * MiB + 5
        answer = client.get_object(**target, Range=f"bytes={start}-{end - 1}")
        assert answer["ContentRange"] == f"bytes {start}-{end - 1}/{18 * MiB}"
        assert answer["Body"].read() == b"".join(parts)[start:end]

    def test_each_body_has_memory_of_its_own_beside_those_it_replaces(
        self, endpoint: LocalServer, bucket: str
    ) -> None:
        client = endpoint.client()
        bodies = {f"k{number}": bytes([number]) * (5 * MiB) for number in range(1, 5)}
        for _ in range(2):
            for key, body in bodies.items():
                client.put_object(Bucket=bucket, Key=key, Body=body)
            for key, body in bodies.items():
                assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == body


class TestTls:
    def test_objects_go_through_tls_to_who_trusts_its_certificate(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            subprocess.Popen(
                [*MODULE, "--tls", folder], cwd=ROOT, stdout=subprocess.PIPE, text=True
            ) as process,
        ):
            assert process.stdout is not None  # it is a pipe
            try:
                endpoint_url = process.stdout.readline().strip()
                certificate = f"{folder}/endpoint.pem"
                trust = ssl.create_default_context(cafile=certificate)
                address = urlsplit(endpoint_url).netloc
                connection = http.client.HTTPSConnection(address, timeout=60, context=trust)
                connection.request("PUT", "/tls")
                connection.getresponse().read()
                options = {"key": "k", "secret": "s", "endpoint_url": endpoint_url, "verify": certificate}
                store = open_obstore_store(parse_location("s3://tls/run"), storage_options=options)
                body = bytes(range(256)) * (5 * MiB // 256)
                store.write("k", body)
                assert store.read("k") == body
                connection.request("GET", "/tls/run/k")
                assert connection.getresponse().read() == body
                connection.close()
            finally:
                process.terminate()
