"""Values as people read them: sizes, ages, times, and texts of strangers. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from datetime import datetime, timezone

from remote_ckpt.url import redact_url

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def escape(text: object) -> str:
    r"""Return a text on one line, without what could steer a terminal: ``\n``, ``\x1b`` and the like.

    Names, messages and metadata come from a store that others can write to.
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in plain
    )


def redact_words(sentence: str) -> str:
    """Return a sentence with the secrets of its URLs replaced, and all else as it is.

    A user info that :func:`~remote_ckpt.url.redact_url` looks for in the whole would reach from one URL to
    any later ``@``.
    """
    return re.sub(r"\S+", lambda match: redact_url(match[0]), sentence)


def format_bytes(count: int) -> str:
    """Return a size in bytes or in binary units: ``512 B``, ``1.5 KiB``, ``12 GiB``."""
    if abs(count) < 1024:
        return f"{count} B"
    size = float(count)
    for unit in _UNITS:
        size /= 1024
        if abs(size) < 1023.95 or unit == _UNITS[-1]:
            break
    # Three digits tell sizes apart at a glance; exact ones are what --json is for.
    return f"{size:.0f} {unit}" if abs(size) >= 99.95 else f"{size:.1f} {unit}"


def format_age(seconds: float) -> str:
    """Return a length of time in its two largest units: ``42s``, ``12m``, ``3h20m``, ``5d4h``."""
    if seconds < 0:
        return f"-{format_age(-seconds)}"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return _pair(days, "d", hours % 24, "h")
    if hours:
        return _pair(hours, "h", minutes % 60, "m")
    return f"{minutes}m" if minutes else f"{int(seconds)}s"


def _pair(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}{small}{small_unit}" if small else f"{large}{large_unit}"


def format_age_of(moment: datetime | None, *, now: datetime | None = None) -> str:
    """Return how long ago a time was, by this host's clock unless ``now`` is given; ``-`` for None."""
    if moment is None:
        return "-"
    return format_age(((now or datetime.now(timezone.utc)) - moment).total_seconds())


def format_moment(moment: datetime | None) -> str:
    """Return a time in UTC to the second, ``2026-01-31T12:00:00Z``; ``-`` for None."""
    if moment is None:
        return "-"
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_number(value: float) -> str:
    """Return a metric with at most six digits."""
    return f"{value:.6g}"


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as ``loss=0.5 accuracy=0.9``, by name; ``-`` where there are none."""
    pairs = (f"{escape(name)}={format_number(value)}" for name, value in sorted(metrics.items()))
    return " ".join(pairs) or "-"


def format_count(count: int, noun: str) -> str:
    """Return ``1 object``, ``2 objects``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def display_width(text: str) -> int:
    """Return how many columns of a terminal a text takes; East Asian letters take two, accents none."""
    if text.isascii():
        return len(text)
    return sum(_char_width(char) for char in text)


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
