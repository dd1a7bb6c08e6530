"""Values on the command line: durations, ``KEY=VALUE`` pairs, what "best" means. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

import click

_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# A metric's name may hold colons: what follows the last ones is taken for count and mode if it fits.
_BEST: Final = re.compile(r"(?P<metric>.+?)(?::(?P<count>[0-9]+))?(?::(?P<mode>min|max))?", re.DOTALL)
_SECRET: Final = re.compile(r"(?i)(^|_)(key|key_id|secret|token|password|username|credential)$")


@dataclass(frozen=True, slots=True)
class Best:
    """Which checkpoints are the best: those with the ``count`` lowest (or highest) values of a metric."""

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


def parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a callback that parses an option's value, or each of a repeatable option's values."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if value is None:
            return None
        return tuple(map(parse, value)) if isinstance(value, tuple) else parse(value)

    return callback


def parse_duration(text: str) -> timedelta:
    """Return a length of time: ``90s``, ``30m``, ``24h``, ``7d``."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no duration such as 90s, 30m, 24h or 7d")
    try:
        return timedelta(seconds=float(match[1]) * _SECONDS[match[2]])
    except OverflowError:
        raise click.BadParameter(f"{text!r} is too long") from None


def parse_pair(text: str) -> tuple[str, str]:
    """Return key and value of ``KEY=VALUE``; an error does not repeat them, as they may be a secret."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.BadParameter("give KEY=VALUE")
    return key, value


def parse_best(text: str) -> Best:
    """Return what ``METRIC[:N[:min|max]]`` says; without a count the best one, by default the lowest."""
    match = _BEST.fullmatch(text)
    if match is None or int(match["count"] or 1) < 1:
        raise click.BadParameter(f"{text!r} is not METRIC, METRIC:N or METRIC:N:max with N from 1 on")
    return Best(match["metric"], int(match["count"] or 1), "max" if match["mode"] == "max" else "min")


def parse_metric(text: str) -> tuple[str, float]:
    """Return name and value of ``NAME=NUMBER``; ``nan`` and ``inf`` are numbers too."""
    name, number = parse_pair(text)
    try:
        return name, float(number)
    except ValueError:
        raise click.BadParameter(f"{name}: {number!r} is no number") from None


def parse_metadata(text: str) -> tuple[str, Any]:
    """Return name and value of ``NAME=VALUE``: JSON, or text where it is none."""
    name, value = parse_pair(text)
    return name, parse_json_or_text(value)


def parse_storage_option(text: str) -> tuple[str, Any]:
    """Return name and value of a storage option: JSON, or text where it is none.

    A secret that happens to look like a number stays a text.
    """
    key, plain = parse_pair(text)
    value = parse_json_or_text(plain)
    return key, plain if names_secret(key) and not isinstance(value, dict | str) else value


def names_secret(key: str) -> bool:
    """Whether the value of a storage option of this name is a secret: ``key``, ``aws_secret``, ``token``."""
    return _SECRET.search(key) is not None


def parse_json_or_text(text: str) -> Any:
    """Return what a text means as JSON, or the text where it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are no JSON
