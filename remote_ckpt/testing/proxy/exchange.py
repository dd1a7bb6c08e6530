"""One request on its way through the proxy, and what a fault is: something that stands around it.

A fault gets the call and a way on to the store. It may change the call, the answer or the bytes of either,
wait, answer in the store's place, or end the connection by raising :class:`Disconnect`. Faults stand around
one another like middleware: the first rule is nearest to the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol
from urllib.parse import parse_qsl

Body = AsyncIterator[bytes]
"""The bytes of a message, read once, in pieces of any size."""

Side = Literal["request", "answer"]
"""Which message a fault changes: the one to the store, or the one from it."""


class Disconnect(Exception):
    """The client's connection ends here, without (the rest of) an answer.

    Args:
        is_reset: By a TCP reset, which may also destroy what was sent before; else it is closed.
    """

    def __init__(self, *, is_reset: bool = False) -> None:
        super().__init__("reset" if is_reset else "closed")
        self.is_reset = is_reset


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request as it arrived.

    Args:
        number: Counted from 1 over the life of a proxy.
        method: ``"GET"``, ...
        path: The path as it was sent, escaped, without the query.
        query: The query as it was sent, escaped, without ``?``.
        headers: Names in lower case.
        body: Its bytes.
        tasks: Where tasks that outlive the client are kept; see :meth:`start`.
    """

    number: int
    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def operation(self) -> str:
        """See :func:`operation_of`."""
        return operation_of(self.method, self.path, self.query, self.headers)

    @property
    def target(self) -> str:
        """What is asked for: the same each time that a request is repeated, however it is signed."""
        asked = [(name, text) for name, text in parse_qsl(self.query) if not _is_of_signature(name)]
        return f"{self.operation} {self.path} {sorted(asked)}"

    def with_content(self, data: bytes) -> Call:
        """Return the call with another body, and its length."""
        headers = {**self.headers, "content-length": str(len(data))}
        return replace(self, body=in_one_piece(data), headers=headers)

    def start(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        """Start work that goes on when the client gives up, as it does in a store or a load balancer."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self.tasks.discard)
        return task


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent to the client: status, headers with names in lower case, and bytes."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body

    def with_content(self, data: bytes) -> Answer:
        """Return the answer with another body, and its length."""
        headers = {**self.headers, "content-length": str(len(data))}
        return replace(self, body=in_one_piece(data), headers=headers)


Proceed = Callable[[Call], Awaitable[Answer]]
"""Goes on towards the store."""


class Fault(Protocol):
    """What a rule does to a request: a frozen value, so that one may be used by many rules."""

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """Answer a call, mostly by way of ``proceed``; may raise :class:`Disconnect`."""
        ...


async def in_one_piece(data: bytes) -> Body:
    """Yield ``data`` as a body."""
    if data:
        yield data


async def read_body(body: Body) -> bytes:
    """Return a body whole."""
    return b"".join([piece async for piece in body])


async def drain(body: Body) -> None:
    """Read a body to its end, and forget it."""
    async for _ in body:
        pass


def _is_of_signature(name: str) -> bool:
    return name.lower().startswith("x-amz-") or name in ("AWSAccessKeyId", "Signature", "Expires")


def operation_of(method: str, path: str, query: str, headers: Mapping[str, str]) -> str:
    """Return what S3 calls a request: ``"PutObject"``, ``"ListObjectsV2"``, ...

    Args:
        method: The HTTP method.
        path: ``/bucket/key`` (path style).
        query: Without ``?``.
        headers: Names in lower case.

    Returns:
        The name, or ``"Other"``. https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations.html
    """
    bucket, _, key = path.lstrip("/").partition("/")
    names = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
    if not bucket:
        return "ListBuckets" if method == "GET" else "Other"
    if not key:
        return _of_bucket(method, names)
    is_copy = "x-amz-copy-source" in headers
    return _of_object(method, names, is_copy)


def _of_bucket(method: str, names: set[str]) -> str:
    if method == "GET" and "uploads" in names:
        return "ListMultipartUploads"
    if method == "GET" and names & {"list-type", "prefix", "delimiter", "marker", "max-keys"}:
        return "ListObjectsV2" if "list-type" in names else "ListObjects"
    if method == "POST":
        return "DeleteObjects" if "delete" in names else "Other"
    if names:
        return "Other"
    plain = {"GET": "ListObjects", "HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}
    return plain.get(method, "Other")


def _of_object(method: str, names: set[str], is_copy: bool) -> str:
    if method == "POST":
        whole = "CompleteMultipartUpload" if "uploadId" in names else "Other"
        return "CreateMultipartUpload" if "uploads" in names else whole
    if method == "PUT" and "partNumber" in names:
        return "UploadPartCopy" if is_copy else "UploadPart"
    if "uploadId" in names:
        return {"GET": "ListParts", "DELETE": "AbortMultipartUpload"}.get(method, "Other")
    plain = {"GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
    plain["PUT"] = "CopyObject" if is_copy else "PutObject"
    return plain.get(method, "Other")
