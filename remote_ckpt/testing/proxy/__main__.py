"""``python -m remote_ckpt.testing.proxy --upstream URL --rules rules.toml``: try your own settings."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from remote_ckpt.errors import RemoteCkptError
from remote_ckpt.testing.proxy.log import ProxiedRequest
from remote_ckpt.testing.proxy.rule_files import load_rules
from remote_ckpt.testing.proxy.running import FaultProxy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a proxy until SIGINT or SIGTERM; print each request, and at the end how often each rule fired.

    Returns:
        The exit status: 2 where the rules or the port cannot be used.
    """
    parser = argparse.ArgumentParser(prog="python -m remote_ckpt.testing.proxy", description=__doc__)
    parser.add_argument("--upstream", required=True, metavar="URL", help="the S3 server behind the proxy")
    parser.add_argument("--rules", metavar="FILE", help="rules in JSON or TOML; none: everything passes")
    parser.add_argument("--port", type=int, default=0, help="where to listen on 127.0.0.1; 0: a free port")
    given = parser.parse_args(arguments)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        rules = load_rules(given.rules) if given.rules else []
        with FaultProxy(given.upstream, rules=rules, port=given.port, on_done=_print_request) as proxy:
            print(f"{proxy.endpoint_url} -> {given.upstream}", flush=True)
            stopping.wait()
    except (RemoteCkptError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for count, injection in enumerate(proxy.injections, 1):
        print(f"rule {count} fired {injection.fired} times for {injection.matched} requests that matched")
    return 0


def _print_request(request: ProxiedRequest) -> None:
    answered = "no answer" if request.status is None else str(request.status)
    met = f" ({', '.join(request.faults)})" if request.faults else ""
    print(f"{request.operation} {request.path}: {answered}{met}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
