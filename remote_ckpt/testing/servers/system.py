"""What servers need of the system: free ports, programs, an environment of their own, no interruption."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from remote_ckpt.errors import MissingDependencyError

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Return ``count`` different loopback ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def find_program(name: str, install: str) -> str:
    """Return the path of a program beside this interpreter, or on ``PATH``.

    Args:
        name: Of the program.
        install: The command that installs it, for the error.

    Raises:
        MissingDependencyError: It is in neither place.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise MissingDependencyError(f"{name} is not installed: {install}")
    return found


def http_get(port: int, path: str) -> bytes | None:
    """Return the body of any answer to ``GET path`` on loopback, or None if there is none yet."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait: an exception inside ``Popen()`` would lose a child that runs already."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread only
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for missed in came:
            signal.raise_signal(missed)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without AWS settings, which are none of a test server's business."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
