"""What a policy says of a listing, in words for people: reasons to keep, and remarks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from remote_ckpt.candidates import Candidate

_MAX_NAMED = 3
"""So many checkpoints are named in a warning, the rest are counted."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a policy keeps.

    Args:
        reasons: Names of the checkpoints to keep, each with its reason.
        warnings: Remarks for the user, about all checkpoints together.
    """

    reasons: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def join_reasons(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return one mapping; reasons that several give for one name are joined by ``; ``, equal ones once."""
    joined: dict[str, list[str]] = {}
    for name, reason in (item for mapping in mappings for item in mapping.items()):
        reasons = joined.setdefault(name, [])
        if reason not in reasons:
            reasons.append(reason)
    return {name: "; ".join(reasons) for name, reasons in joined.items()}


def kept_for_want_of(what: str, lacking: Sequence[Candidate]) -> tuple[str, ...]:
    """Return one warning about all that are kept because something is not known of them, or none."""
    if not lacking:
        return ()
    have, are = ("checkpoint has", "is") if len(lacking) == 1 else ("checkpoints have", "are")
    names = ", ".join(candidate.name for candidate in lacking[:_MAX_NAMED])
    more = f" and {len(lacking) - _MAX_NAMED} more" if len(lacking) > _MAX_NAMED else ""
    return (f"{len(lacking)} {have} no {what} and {are} kept: {names}{more}",)


def format_duration(duration: timedelta) -> str:
    """Return it in the largest unit that leaves no rest: ``2 days``, ``36 hours``, ``90 minutes``."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count, rest = divmod(duration, timedelta(seconds=length))
        if not rest:
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{duration.total_seconds():g} seconds"


def format_time(at: datetime) -> str:
    """Return a time to the minute: ``2026-01-01 06:12 UTC``."""
    return f"{at.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
