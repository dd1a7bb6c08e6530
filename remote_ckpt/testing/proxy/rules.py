"""Which requests meet which fault, as a value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import unquote, unquote_plus

from remote_ckpt.errors import ConfigError
from remote_ckpt.testing.proxy.exchange import Call, Fault

_COUNTS: Final = ("nth", "first", "every", "after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which requests meet a fault. What is left out matches every request, and the fault fires for ever.

    Args:
        fault: What happens.
        method: The HTTP method.
        operation: What S3 calls the request, such as ``"CompleteMultipartUpload"``.
        path: Glob of ``/bucket/key``, unescaped (``*`` spans slashes); with ``re:`` before it, a regular
            expression that is searched for.
        query: The same of the query, unescaped, without ``?``.
        header: Name of a header that must be there, such as ``"if-none-match"`` or ``"range"``.
        value: The same as ``path`` for what that header says.
        nth: Fire for the n-th request only that matches and gets this far (counted from 1).
        first: Fire for so many.
        every: Fire for every n-th.
        after: Fire for all but the first so many.
        per_target: Count the requests of each target for themselves: ``first=1`` lets every one fail once.

    Raises:
        ConfigError: More than one of ``nth``, ``first``, ``every`` and ``after``, a number below 1, or a
            malformed regular expression.
    """

    fault: Fault
    method: str | None = None
    operation: str | None = None
    path: str = "*"
    query: str = "*"
    header: str | None = None
    value: str = "*"
    nth: int | None = None
    first: int | None = None
    every: int | None = None
    after: int | None = None
    per_target: bool = False

    def __post_init__(self) -> None:
        counts = [count for name in _COUNTS if (count := getattr(self, name)) is not None]
        if len(counts) > 1:
            raise ConfigError(f"a rule takes only one of {', '.join(_COUNTS)}")
        if counts and counts[0] < 1:
            raise ConfigError(f"{', '.join(_COUNTS)} of a rule are 1 or more, not {counts[0]}")
        if self.header is None and self.value != "*":
            raise ConfigError("a rule with a value names the header that must have it")
        for pattern in (self.path, self.query, self.value):
            _check_pattern(pattern)

    def matches(self, call: Call) -> bool:
        """Whether a request is of the kind that is meant."""
        return (
            self.method in (None, call.method)
            and self.operation in (None, call.operation)
            and self._has_header(call)
            and _fits(self.path, unquote(call.path))
            and _fits(self.query, unquote_plus(call.query))
        )

    def _has_header(self, call: Call) -> bool:
        if self.header is None:
            return True
        found = call.headers.get(self.header.lower())
        return found is not None and _fits(self.value, found)

    def fires_at(self, number: int) -> bool:
        """Whether the fault fires for the request of that number (from 1) among those that match."""
        if self.nth is not None:
            return number == self.nth
        if self.first is not None:
            return number <= self.first
        if self.every is not None:
            return number % self.every == 0
        return self.after is None or number > self.after


def _check_pattern(pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(f"{pattern!r} is no regular expression: {error}") from error


def _fits(pattern: str, text: str) -> bool:
    if pattern.startswith("re:"):
        return re.search(pattern[3:], text) is not None
    return fnmatchcase(text, pattern)
