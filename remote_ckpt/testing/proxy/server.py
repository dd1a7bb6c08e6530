"""The proxy's HTTP: a server for clients, and a client of the store. Everything here runs in one event loop.

Bodies are passed on as they come. A request is sent on once, on a connection of its own, with the headers as
they were: with ``Host`` too, which is part of what was signed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import aiohttp
from aiohttp import web
from yarl import URL

from remote_ckpt.testing.proxy.exchange import Answer, Body, Call, Disconnect, Proceed, drain, in_one_piece
from remote_ckpt.testing.proxy.log import RequestLog

_OF_THE_CONNECTION: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        "expect",  # answered here
    }
)
_TICK_SECONDS: Final = 0.005
_logger = logging.getLogger("remote_ckpt.proxy")

Around = Callable[[Call, Proceed], Awaitable[Answer]]
"""Answers a call, with a way on to the store."""


class ProxyServer:
    """Listens on loopback and passes on what it gets.

    Args:
        endpoint_url: The store, plain HTTP or TLS. Empty: whatever reaches it is answered 502.
        port: Where to listen; 0: a free one.
        around: Stands between the client and the store.
        log: Where requests are noted.
    """

    def __init__(self, endpoint_url: str, *, port: int, around: Around, log: RequestLog) -> None:
        self._target = endpoint_url.rstrip("/")
        self._port = port
        self._around = around
        self._log = log
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open_count = 0

    async def start(self) -> int:
        """Begin to listen; returns the port.

        Raises:
            OSError: The port is taken.
        """
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        self._server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            logger=_logger,
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=1.0)
        try:
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        except BaseException:
            await self._session.close()
            raise
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Stop listening, end all connections, and cancel what is still to come."""
        for task in self._tasks:
            task.cancel()
        for connection in self._server.connections:
            connection.force_close()
        await self._runner.cleanup()
        await self._session.close()

    async def settle(self) -> None:
        """Return once every request that has arrived is over, those included whose client is gone."""
        while self._open_count or self._tasks:
            await asyncio.sleep(_TICK_SECONDS)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = self._call(request)
        self._log.begin(call)
        self._open_count += 1
        try:
            answer = await self._around(call, self._forward)
            return await self._send(request, call, answer)
        except Disconnect as end:
            _hang_up(request.transport, is_reset=end.is_reset)
            return web.StreamResponse()  # goes nowhere
        finally:
            self._open_count -= 1
            self._log.finish(call.number)

    def _call(self, request: web.BaseRequest) -> Call:
        path, _, query = request.raw_path.partition("?")
        headers = {name.lower(): ",".join(request.headers.getall(name)) for name in request.headers}
        number = next(self._numbers)
        return Call(
            number=number,
            method=request.method,
            path=path,
            query=query,
            headers=headers,
            body=self._counted(_body_of(request), number, "received_bytes"),
            tasks=self._tasks,
        )

    async def _forward(self, call: Call) -> Answer:
        if not self._target:
            await drain(call.body)
            return Answer(status=502, body=in_one_piece(b"no rule answers this request, and no store does"))
        url = URL(self._target + call.path + (f"?{call.query}" if call.query else ""), encoded=True)
        has_body = "content-length" in call.headers or "transfer-encoding" in call.headers
        try:
            response = await self._session.request(
                call.method,
                url,
                headers=_passed_on(call.headers),
                data=call.body if has_body else None,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            return Answer(status=502, body=in_one_piece(f"the store cannot be reached: {error}".encode()))
        except (aiohttp.ClientError, OSError) as error:
            raise _end_of(error) from error
        self._log.update(call.number, store_status=response.status)
        headers = {name.lower(): ",".join(response.headers.getall(name)) for name in response.headers}
        return Answer(status=response.status, headers=_passed_on(headers), body=_answer_of(response))

    async def _send(self, request: web.BaseRequest, call: Call, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        await response.prepare(request)
        self._log.update(call.number, status=answer.status)
        if call.method != "HEAD" and answer.status not in (204, 304):
            async for piece in self._counted(answer.body, call.number, "sent_bytes"):
                await response.write(piece)
        await response.write_eof()
        return response

    async def _counted(self, body: Body, number: int, name: str) -> Body:
        count = 0
        async for piece in body:
            count += len(piece)
            self._log.update(number, **{name: count})
            yield piece


async def _body_of(request: web.BaseRequest) -> Body:
    if request.headers.get("expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
    async for piece in request.content.iter_any():
        yield piece


async def _answer_of(response: aiohttp.ClientResponse) -> Body:
    try:
        async for piece in response.content.iter_any():
            yield piece
    except (aiohttp.ClientError, OSError) as error:
        raise _end_of(error) from error
    finally:
        response.close()


def _end_of(error: BaseException) -> Disconnect:
    """Return why a connection to the store ended: a fault that cut the request, or the store itself."""
    cause = error.__cause__
    return cause if isinstance(cause, Disconnect) else Disconnect()


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in headers.items() if name not in _OF_THE_CONNECTION}


def _hang_up(transport: asyncio.Transport | None, *, is_reset: bool) -> None:
    if transport is None:
        return
    if not is_reset:
        transport.close()  # after what was written
        return
    # To close a socket that lingers for no time is to reset it.
    no_time = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_time)
    transport.abort()
