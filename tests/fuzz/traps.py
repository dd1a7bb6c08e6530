"""What must never happen while bytes from a store are parsed, and how it is noticed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FORBIDDEN = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.system",
        "pickle.find_class",
        "shutil.rmtree",
        "socket.connect",
        "subprocess.Popen",
    }
)
"""Audit events (https://docs.python.org/3/library/audit_events.html) of code that a pickle could call."""

_armed: list[bool] = []


class ExecutedError(BaseException):
    """Something from the parsed bytes was run. No ``except Exception`` on the way swallows it."""


def spring(*args: Any) -> None:
    """Be called by a pickle."""
    raise ExecutedError(f"a pickle called this, with {args!r:.80}")


class Trap:
    """Pickles as a call of :func:`spring`."""

    def __reduce__(self) -> Any:
        return spring, ("now",)


@contextmanager
def nothing_is_run() -> Iterator[None]:
    """Raise ExecutedError where anything in here does what only running code could."""
    _install()
    _armed.append(True)
    try:
        yield
    finally:
        _armed.pop()


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _armed and event in _FORBIDDEN:
        raise ExecutedError(f"{event} {args!r:.80}")


def _install(installed: list[bool] = []) -> None:  # noqa: B006  # once in a process: it cannot be removed
    if not installed:
        installed.append(True)
        sys.addaudithook(_watch)
