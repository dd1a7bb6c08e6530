"""An S3 endpoint for benchmarks that costs almost nothing, so that what is measured is the client.

    python -m benchmarks.endpoint [--port N] [--latency-ms 30] [--mib-per-second 80] [--tls FOLDER]

Bodies are received straight into shared memory and sent from there by the kernel (``sendfile``); nothing is
hashed, no signature is looked at, any access key will do. Over TLS the process encrypts, at its cost. A
latency delays the first byte of each answer and a rate holds back each connection, both ways: a link between
data centres, say. For loopback only: whoever reaches it may do everything.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import formatdate
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from benchmarks.endpoint_objects import SLABS, Body, Bucket, Span, Stored

MIB: Final = 1 << 20
HEAD_BYTES: Final = 64 * 1024
PACED_BYTES: Final = 256 * 1024
XML_HEAD: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'
REASONS: Final = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 409: "Conflict"}
_requests = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Link:
    """How the way to the client is: seconds to the first byte, bytes a second of one connection (0: any)."""

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0


class Pace:
    """Holds back one body."""

    def __init__(self, link: Link) -> None:
        self._rate = link.bytes_per_second
        self._began, self._moved_bytes = time.monotonic(), 0

    def step(self, wanted: int) -> int:
        """How much to move at once."""
        return min(wanted, PACED_BYTES) if self._rate else wanted

    def moved(self, count: int) -> None:
        """Wait until so much more may have been moved."""
        if self._rate:
            self._moved_bytes += count
            ahead = self._began + self._moved_bytes / self._rate - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)


@dataclass(slots=True)
class Request:
    """One request, its body received."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body


@dataclass(slots=True)
class Answer:
    """Status, headers and either a short body or a range of an object."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    stored: Stored | None = None
    start: int = 0
    length: int = 0


class Refused(Exception):
    """An S3 error."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Wire:
    """One connection: buffered for heads, past the buffer for bodies."""

    def __init__(self, connection: socket.socket, link: Link) -> None:
        self._connection = connection
        self._link = link
        self._is_plain = not isinstance(connection, ssl.SSLSocket)
        self._buffer = bytearray()

    def read_until(self, end: bytes) -> bytes | None:
        """Return what comes before ``end`` and drop both; None if the client has closed."""
        while (place := self._buffer.find(end)) < 0:
            more = self._connection.recv(HEAD_BYTES)
            if not more:
                return None
            self._buffer += more
        found = bytes(self._buffer[:place])
        del self._buffer[: place + len(end)]
        return found

    def read_into(self, body: Body, start: int, length: int) -> None:
        """Receive a range of a body."""
        pace = Pace(self._link)
        for span in body.spans(start, length):
            self._fill(span.view, pace)

    def _fill(self, view: memoryview, pace: Pace) -> None:
        held = min(len(view), len(self._buffer))
        view[:held] = self._buffer[:held]
        del self._buffer[:held]
        while held < len(view):
            step = pace.step(len(view) - held)
            if self._is_plain:
                count = self._connection.recv_into(view[held:], step, socket.MSG_WAITALL)
            else:
                count = self._connection.recv_into(view[held:], step)
            if not count:
                raise ConnectionResetError
            held += count
            pace.moved(count)

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def send_object(self, stored: Stored, start: int, length: int) -> None:
        """Send a range of an object."""
        pace = Pace(self._link)
        for span in stored.spans(start, length):
            done = 0
            while done < len(span.view):
                sent = self._send_piece(span, done, pace.step(len(span.view) - done))
                done += sent
                pace.moved(sent)

    def _send_piece(self, span: Span, start: int, count: int) -> int:
        if self._is_plain and span.slab is not None:
            return os.sendfile(self._connection.fileno(), span.slab.file, span.offset_bytes + start, count)
        self._connection.sendall(span.view[start : start + count])
        return count


def receive(wire: Wire) -> Request | None:
    """Return the next request of a connection, None at its end."""
    head = wire.read_until(b"\r\n\r\n")
    if head is None:
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if headers.get("expect", "").lower() == "100-continue":
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts = urlsplit(target)
    bucket, _, key = parts.path.lstrip("/").partition("/")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return Request(method, unquote(bucket), unquote(key), query, headers, _receive_body(wire, headers))


def _receive_body(wire: Wire, headers: Mapping[str, str]) -> Body:
    if "transfer-encoding" in headers:
        raise Refused(501, "NotImplemented")
    if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        return _receive_chunks(wire, int(headers.get("x-amz-decoded-content-length", -1)))
    body = Body(int(headers.get("content-length", 0)))
    wire.read_into(body, 0, body.size_bytes)
    return body


def _receive_chunks(wire: Wire, size_bytes: int) -> Body:
    """Receive a body in AWS's chunks; neither their signatures nor the trailer are looked at."""
    if size_bytes < 0:
        raise Refused(411, "MissingContentLength")
    body, held = Body(size_bytes), 0
    while length := int((wire.read_until(b"\r\n") or b"0").split(b";")[0], 16):
        wire.read_into(body, held, length)
        held += length
        wire.read_until(b"\r\n")
    while wire.read_until(b"\r\n"):
        pass
    return body


class Endpoint:
    """The S3 calls that the clients in a benchmark use."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def answer(self, request: Request) -> Answer:
        """Do what is asked.

        Raises:
            Refused: With S3's status and code.
        """
        if not request.key:
            return self._of_bucket(request)
        bucket = self._bucket(request)
        call = _OBJECT_CALLS[request.method, "uploadId" in request.query or "uploads" in request.query]
        return call(bucket, request)

    def _bucket(self, request: Request) -> Bucket:
        if request.bucket not in self._buckets:
            raise Refused(404, "NoSuchBucket")
        return self._buckets[request.bucket]

    def _of_bucket(self, request: Request) -> Answer:
        if request.method == "PUT":
            self._buckets.setdefault(request.bucket, Bucket())
            return Answer()
        bucket = self._bucket(request)
        if request.method == "DELETE":
            del self._buckets[request.bucket]
            return Answer(204)
        if request.method == "HEAD":
            return Answer()
        if request.method == "POST":
            return delete_objects(bucket, request)
        if "uploads" in request.query:
            return list_uploads(bucket, request)
        return list_objects(bucket, request)


def put_object(bucket: Bucket, request: Request) -> Answer:
    only_if_absent = request.headers.get("if-none-match") == "*"
    source = request.headers.get("x-amz-copy-source")
    stored = Stored(_copied(source, request, bucket) if source else (request.body,))
    if not bucket.put(request.key, stored, only_if_absent=only_if_absent):
        raise Refused(412, "PreconditionFailed")
    if source:
        inside = f"<LastModified>{_iso(stored.modified_at)}</LastModified><ETag>{stored.etag}</ETag>"
        return _xml("CopyObjectResult", inside)
    return Answer(headers={"ETag": stored.etag})


def _copied(source: str, request: Request, bucket: Bucket) -> tuple[Body, ...]:
    name, _, key = unquote(source).lstrip("/").partition("/")
    if name != request.bucket:
        raise Refused(501, "NotImplemented")
    return _found(bucket, key).pieces


def get_object(bucket: Bucket, request: Request) -> Answer:
    stored = _found(bucket, request.key)
    size_bytes = stored.size_bytes
    headers = {
        "ETag": stored.etag,
        "Last-Modified": formatdate(stored.modified_at, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if asked is None:
        return Answer(200, headers, stored=stored, length=size_bytes)
    if asked[1]:
        start, end = int(asked[1]), min(int(asked[2] or size_bytes), size_bytes - 1)
    else:
        start, end = max(0, size_bytes - int(asked[2])), size_bytes - 1
    if start >= size_bytes:
        raise Refused(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {start}-{end}/{size_bytes}"
    return Answer(206, headers, stored=stored, start=start, length=end + 1 - start)


def delete_object(bucket: Bucket, request: Request) -> Answer:
    bucket.delete(request.key)
    return Answer(204)


def begin_upload(bucket: Bucket, request: Request) -> Answer:
    upload = bucket.begin_upload(request.key)
    inside = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
    return _xml("InitiateMultipartUploadResult", f"{inside}<UploadId>{upload.upload_id}</UploadId>")


def put_part(bucket: Bucket, request: Request) -> Answer:
    upload = bucket.uploads.get(request.query["uploadId"])
    if upload is None:
        raise Refused(404, "NoSuchUpload")
    if "x-amz-copy-source" in request.headers:
        raise Refused(501, "NotImplemented")
    number = int(request.query["partNumber"])
    upload.parts[number] = request.body
    return Answer(headers={"ETag": f'"{number:032x}"'})


def end_upload(bucket: Bucket, request: Request) -> Answer:
    if "uploads" in request.query:
        return begin_upload(bucket, request)
    upload = bucket.end_upload(request.query["uploadId"])
    if upload is None:
        raise Refused(404, "NoSuchUpload")
    numbers = [int(number) for number in _texts(request, "PartNumber")]
    if not numbers or any(number not in upload.parts for number in numbers):
        raise Refused(400, "InvalidPart")
    etag = f'"{os.urandom(16).hex()}-{len(numbers)}"'
    stored = Stored(tuple(upload.parts[number] for number in numbers), etag=etag)
    only_if_absent = request.headers.get("if-none-match") == "*"
    if not bucket.put(request.key, stored, only_if_absent=only_if_absent):
        raise Refused(412, "PreconditionFailed")
    inside = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key><ETag>{etag}</ETag>"
    return _xml("CompleteMultipartUploadResult", inside)


def abort_upload(bucket: Bucket, request: Request) -> Answer:
    if bucket.end_upload(request.query["uploadId"]) is None:
        raise Refused(404, "NoSuchUpload")
    return Answer(204)


def delete_objects(bucket: Bucket, request: Request) -> Answer:
    keys = _texts(request, "Key")
    for key in keys:
        bucket.delete(key)
    return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))


def list_objects(bucket: Bucket, request: Request) -> Answer:
    query = request.query
    encode: Callable[[str], str] = quote if query.get("encoding-type") == "url" else escape
    after = unquote(query.get("continuation-token", "")) or query.get("start-after", "")
    count = min(1000, int(query.get("max-keys", 1000)))
    prefix = query.get("prefix", "")
    objects, prefixes, following = bucket.page(prefix, query.get("delimiter", ""), after, count)
    inside = [f"<Name>{request.bucket}</Name><Prefix>{encode(prefix)}</Prefix><MaxKeys>{count}</MaxKeys>"]
    if query.get("encoding-type") == "url":
        inside.append("<EncodingType>url</EncodingType>")
    inside += [f"<KeyCount>{len(objects) + len(prefixes)}</KeyCount>"]
    inside += [f"<IsTruncated>{'true' if following else 'false'}</IsTruncated>"]
    if following:
        inside.append(f"<NextContinuationToken>{quote(following, safe='')}</NextContinuationToken>")
    for key, stored in objects:
        facts = f"<LastModified>{_iso(stored.modified_at)}</LastModified><ETag>{stored.etag}</ETag>"
        facts += f"<Size>{stored.size_bytes}</Size><StorageClass>STANDARD</StorageClass>"
        inside.append(f"<Contents><Key>{encode(key)}</Key>{facts}</Contents>")
    inside += [f"<CommonPrefixes><Prefix>{encode(name)}</Prefix></CommonPrefixes>" for name in prefixes]
    return _xml("ListBucketResult", "".join(inside))


def list_uploads(bucket: Bucket, request: Request) -> Answer:
    encode: Callable[[str], str] = quote if request.query.get("encoding-type") == "url" else escape
    uploads = "".join(
        f"<Upload><Key>{encode(upload.key)}</Key><UploadId>{upload.upload_id}</UploadId>"
        f"<Initiated>{_iso(upload.started_at)}</Initiated></Upload>"
        for upload in bucket.open_uploads(request.query.get("prefix", ""))
    )
    head = f"<Bucket>{request.bucket}</Bucket><IsTruncated>false</IsTruncated>"
    if request.query.get("encoding-type") == "url":
        head += "<EncodingType>url</EncodingType>"
    return _xml("ListMultipartUploadsResult", head + uploads)


_OBJECT_CALLS: Final[Mapping[tuple[str, bool], Callable[[Bucket, Request], Answer]]] = {
    ("PUT", False): put_object,
    ("GET", False): get_object,
    ("HEAD", False): get_object,
    ("DELETE", False): delete_object,
    ("POST", True): end_upload,
    ("PUT", True): put_part,
    ("DELETE", True): abort_upload,
}


def _found(bucket: Bucket, key: str) -> Stored:
    stored = bucket.get(key)
    if stored is None:
        raise Refused(404, "NoSuchKey")
    return stored


def _texts(request: Request, name: str) -> list[str]:
    text = b"".join(span.view for span in request.body.spans(0, request.body.size_bytes))
    root = ElementTree.fromstring(text)
    return [element.text or "" for element in root.iter() if element.tag.rpartition("}")[2] == name]


def _xml(name: str, inside: str) -> Answer:
    namespace = "http://s3.amazonaws.com/doc/2006-03-01/"
    return Answer(
        headers={"Content-Type": "application/xml"},
        text=f'{XML_HEAD}<{name} xmlns="{namespace}">{inside}</{name}>',
    )


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(int(moment), timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def serve(connection: socket.socket, endpoint: Endpoint, link: Link, tls: ssl.SSLContext | None) -> None:
    """Answer the requests of one connection until the client closes it."""
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connection = tls.wrap_socket(connection, server_side=True)
        wire = Wire(connection, link)
        while (request := receive(wire)) is not None:
            if link.latency_seconds:
                time.sleep(link.latency_seconds)
            _respond(wire, request, endpoint)
            del request  # what it holds may be deleted while this connection waits for the next
    except (OSError, Refused):
        pass
    finally:
        connection.close()


def _respond(wire: Wire, request: Request, endpoint: Endpoint) -> None:
    try:
        answer = endpoint.answer(request)
    except Refused as error:
        text = f"{XML_HEAD}<Error><Code>{error.code}</Code><Message>{error.code}</Message></Error>"
        answer = Answer(error.status, {"Content-Type": "application/xml"}, text)
    body = answer.text.encode()
    headers = {
        **answer.headers,
        "Date": formatdate(usegmt=True),
        "x-amz-request-id": f"{next(_requests):016X}",
        "Content-Length": str(answer.length if answer.stored else len(body)),
    }
    lines = [f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Error')}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items())]) + "\r\n\r\n"
    wire.send(head.encode("latin-1") + (b"" if request.method == "HEAD" else body))
    if answer.stored and request.method != "HEAD":
        wire.send_object(answer.stored, answer.start, answer.length)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 and its key with ``openssl``, valid for a day."""
    certificate, key = folder / "endpoint.pem", folder / "endpoint.key"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subject += ["-addext", "basicConstraints=critical,CA:FALSE"]
    what = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *what, *files, "-days", "1", *subject], check=True, capture_output=True)
    return certificate, key


def main() -> None:
    """Print where it listens, and serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency-ms", type=float, default=0.0, help="to the first byte of each answer")
    parser.add_argument("--mib-per-second", type=float, default=0.0, help="of each connection; 0: no limit")
    parser.add_argument("--warm-mib", type=int, default=0, help="memory to touch before it serves")
    parser.add_argument("--tls", type=Path, metavar="FOLDER", help="where the certificate is to be made")
    arguments = parser.parse_args()
    link = Link(arguments.latency_ms / 1000, arguments.mib_per_second * MIB)
    tls = None
    if arguments.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*make_certificate(arguments.tls))
    SLABS.warm(arguments.warm_mib * MIB)
    listener = socket.create_server(("127.0.0.1", arguments.port), backlog=256)
    if link.bytes_per_second:  # accepted connections inherit it: little is taken before it is paced
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PACED_BYTES)
    print(f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    endpoint = Endpoint()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, endpoint, link, tls), daemon=True).start()


if __name__ == "__main__":
    main()
