"""Faults of a whole answer: another one, none, a late one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from remote_ckpt.testing.proxy.exchange import (
    Answer,
    Call,
    Disconnect,
    Proceed,
    drain,
    in_one_piece,
    read_body,
)
from remote_ckpt.testing.proxy.s3 import error_document

_TICK_SECONDS: Final = 0.005


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer in the store's place.

    Args:
        status: The HTTP status. 200 with a ``code`` is the error that looks like a success, as
            CompleteMultipartUpload and CopyObject may send it.
        body: The body, where there is no ``code``.
        code: An error code of S3, such as ``"SlowDown"``: the body is the error that stores send with it.
        headers: Headers of the answer.
        is_after: The store gets the request, and acts, before it is answered like this.
    """

    status: int
    body: bytes = b""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_after: bool = False

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        await drain((await proceed(call)).body if self.is_after else call.body)
        kind = {} if self.code is None else {"content-type": "application/xml"}
        headers = {**kind, **{name.lower(): text for name, text in self.headers.items()}}
        content = self.body if self.code is None else error_document(self.code, resource=call.path)
        return Answer(status=self.status, headers=headers, body=in_one_piece(b"")).with_content(content)


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """The store acts; then the connection ends without an answer.

    Args:
        is_reset: By a TCP reset; else it is closed.
    """

    is_reset: bool = False

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        await drain((await proceed(call)).body)
        raise Disconnect(is_reset=self.is_reset)


@dataclass(frozen=True, slots=True)
class Reset:
    """The connection ends by a TCP reset; the store never sees the request."""

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        raise Disconnect(is_reset=True)


@dataclass(frozen=True, slots=True)
class DelayAnswer:
    """The store acts at once; its answer comes late.

    Args:
        seconds: How late, unless ``until`` ends it.
        until: Ends the wait when it is set, by any thread.
    """

    seconds: float = 3600.0
    until: threading.Event | None = None

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        answer = await proceed(call)
        await _wait(self.seconds, self.until)
        return answer


@dataclass(frozen=True, slots=True)
class DelayRequest:
    """The request reaches the store late, even when the client has long given up: a write that lands later.

    Args:
        seconds: How late, unless ``until`` ends it.
        until: Ends the wait when it is set, by any thread.
    """

    seconds: float = 3600.0
    until: threading.Event | None = None

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        whole = call.with_content(await read_body(call.body))
        return await asyncio.shield(call.start(self._send_late(whole, proceed)))

    async def _send_late(self, call: Call, proceed: Proceed) -> Answer:
        await _wait(self.seconds, self.until)
        answer = await proceed(call)
        # Read here: when the client is gone, nobody else does.
        return answer.with_content(await read_body(answer.body))


async def _wait(seconds: float, until: threading.Event | None) -> None:
    if until is None:
        await asyncio.sleep(seconds)
        return
    ends_at = asyncio.get_running_loop().time() + seconds
    while not until.is_set() and asyncio.get_running_loop().time() < ends_at:
        await asyncio.sleep(_TICK_SECONDS)
