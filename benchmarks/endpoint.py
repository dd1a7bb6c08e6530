"""An S3 endpoint for benchmarks that costs almost nothing, so that what is measured is the client.

    python -m benchmarks.endpoint [--port N] [--latency-ms 30] [--mib-per-second 80] [--tls FOLDER]

Bodies are received straight into shared memory and sent from there by the kernel (``sendfile``); nothing is
hashed, no signature is looked at, any access key will do. Over TLS the process encrypts, at its cost. A
latency delays the first byte of each answer and a rate holds back each connection, both ways: a link between
data centres, say. For loopback only: whoever reaches it may do everything.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import ssl
import subprocess
import threading
import time
from email.utils import formatdate
from pathlib import Path
from typing import Final

from benchmarks.endpoint_calls import Answer, Endpoint, refusal
from benchmarks.endpoint_objects import SLABS
from benchmarks.endpoint_wire import MIB, Link, Refused, Request, Wire, receive

PACED_SOCKET_BYTES: Final = 256 * 1024
REASONS: Final = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 409: "Conflict"}
_requests = itertools.count(1)


def serve(connection: socket.socket, endpoint: Endpoint, link: Link, tls: ssl.SSLContext | None) -> None:
    """Answer the requests of one connection until the client closes it."""
    wire = Wire(connection, link)
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
    except Refused as error:
        with contextlib.suppress(OSError):
            _send_answer(wire, refusal(error), is_head=False)
    except OSError:
        pass
    finally:
        connection.close()


def _respond(wire: Wire, request: Request, endpoint: Endpoint) -> None:
    try:
        answer = endpoint.answer(request)
    except Refused as error:
        answer = refusal(error)
    _send_answer(wire, answer, is_head=request.method == "HEAD")


def _send_answer(wire: Wire, answer: Answer, *, is_head: bool) -> None:
    body = answer.text.encode()
    headers = {
        **answer.headers,
        "Date": formatdate(usegmt=True),
        "x-amz-request-id": f"{next(_requests):016X}",
        "Content-Length": str(answer.length if answer.stored else len(body)),
    }
    lines = [f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Error')}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items())]) + "\r\n\r\n"
    wire.send(head.encode("latin-1") + (b"" if is_head else body))
    if answer.stored and not is_head:
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
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PACED_SOCKET_BYTES)
    print(f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    endpoint = Endpoint()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, endpoint, link, tls), daemon=True).start()


if __name__ == "__main__":
    main()
