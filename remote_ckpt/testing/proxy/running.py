"""The proxy itself: a thread of this process, rules that come and go, and what they did."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from remote_ckpt.errors import MissingDependencyError
from remote_ckpt.testing.proxy.exchange import Answer, Call, Proceed
from remote_ckpt.testing.proxy.log import ProxiedRequest, RequestLog
from remote_ckpt.testing.proxy.rules import Rule

if TYPE_CHECKING:
    from typing_extensions import Self

    from remote_ckpt.testing.proxy.server import ProxyServer


class Injection:
    """A rule at work, and how often it was. As a context manager it takes the rule away at the end.

    Attributes:
        rule: The rule.
        matched: How many requests matched it and got this far.
        fired: How many of them met its fault.
    """

    def __init__(self, rule: Rule, proxy: FaultProxy) -> None:
        self.rule = rule
        self.matched = 0
        self.fired = 0
        self._proxy = proxy
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the rule away; requests that have met it already go on as it says."""
        self._proxy.remove(self)

    async def apply(self, call: Call, log: RequestLog, proceed: Proceed) -> Answer:
        """Answer a call: by the fault, or straight by what comes after it."""
        if not self.rule.matches(call):
            return await proceed(call)
        self.matched += 1
        counted = call.target if self.rule.per_target else ""
        self._counts[counted] += 1
        if not self.rule.fires_at(self._counts[counted]):
            return await proceed(call)
        self.fired += 1
        log.add_fault(call.number, type(self.rule.fault).__name__)
        return await self.rule.fault.apply(call, proceed)


class FaultProxy:
    """An HTTP proxy in front of an S3 server, on a loopback port, until the ``with`` ends.

    Needs aiohttp: ``pip install 'remote-ckpt[testing]'``.

    Args:
        endpoint_url: The server behind it. Empty: every request needs a fault that answers it.
        rules: Rules from the start on; those given first are nearest to the client.
        port: Where to listen; 0: a free one.
        on_done: Is told of each request when it is over, by the proxy's thread; :attr:`requests` then holds
            only those that are not.
    """

    def __init__(
        self,
        endpoint_url: str = "",
        *,
        rules: Iterable[Rule] = (),
        port: int = 0,
        on_done: Callable[[ProxiedRequest], None] | None = None,
    ) -> None:
        self._target = endpoint_url
        self._port = port
        self._log = RequestLog(on_done)
        self._injections: tuple[Injection, ...] = ()
        self._thread: threading.Thread | None = None
        for rule in rules:
            self.inject(rule)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Return once it listens.

        Raises:
            MissingDependencyError: aiohttp is not installed.
            OSError: The port is taken.
        """
        try:
            from remote_ckpt.testing.proxy.server import ProxyServer
        except ImportError as error:
            message = "the fault proxy needs aiohttp: pip install 'remote-ckpt[testing]'"
            raise MissingDependencyError(message) from error
        self._server = ProxyServer(self._target, port=self._port, around=self._around, log=self._log)
        started: concurrent.futures.Future[int] = concurrent.futures.Future()
        work = partial(asyncio.run, self._serve(self._server, started))
        self._thread = threading.Thread(target=work, name="fault-proxy", daemon=True)
        self._thread.start()
        self._port = started.result()

    def stop(self) -> None:
        """End all connections, and return once its thread has ended."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            thread.join()

    @property
    def endpoint_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def requests(self) -> tuple[ProxiedRequest, ...]:
        """What has arrived since the start, or since :meth:`forget`, in order."""
        return self._log.requests

    @property
    def injections(self) -> tuple[Injection, ...]:
        """The rules at work."""
        return self._injections

    def forget(self) -> None:
        """Forget the requests that have arrived."""
        self._log.clear()

    def inject(self, rule: Rule) -> Injection:
        """Add a rule, behind those that are there; it works until it is removed."""
        injection = Injection(rule, self)
        self._injections += (injection,)
        return injection

    def remove(self, injection: Injection) -> None:
        """Take a rule away."""
        self._injections = tuple(one for one in self._injections if one is not injection)

    def clear(self) -> None:
        """Take all rules away."""
        self._injections = ()

    def settle(self, *, seconds: float = 10.0) -> None:
        """Return once every request that has arrived is over: late ones have reached the store.

        Raises:
            TimeoutError: That took longer than ``seconds``.
        """
        waiting = asyncio.run_coroutine_threadsafe(self._server.settle(), self._loop)
        try:
            waiting.result(seconds)
        except concurrent.futures.TimeoutError:  # another class before Python 3.11
            waiting.cancel()
            raise TimeoutError(f"requests were still under way after {seconds} s") from None

    async def _around(self, call: Call, proceed: Proceed) -> Answer:
        for injection in reversed(self._injections):
            proceed = partial(injection.apply, log=self._log, proceed=proceed)
        return await proceed(call)

    async def _serve(self, server: ProxyServer, started: concurrent.futures.Future[int]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            port = await server.start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(port)
        await self._stopping.wait()
        await server.stop()
