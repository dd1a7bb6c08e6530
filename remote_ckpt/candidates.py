"""Checkpoints as retention sees them, and their two orders: by number and by time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One checkpoint as a policy sees it.

    Args:
        name: Its name in the run's directory.
        step: The number that its name spells, None for a named checkpoint.
        is_pinned: Pinned checkpoints are kept by every plan.
        is_damaged: Its manifest could not be read.
        committed_at: When it was committed (an aware time); None where that is unknown.
        metrics: Named numbers that the save or a later evaluation wrote to it.
    """

    name: str
    step: int | None
    is_pinned: bool = False
    is_damaged: bool = False
    committed_at: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


def in_listing_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the steps by number, then the named ones by name."""
    return sorted(candidates, key=lambda item: (item.step is None, item.step or 0, item.name))


def sound_steps(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return those named by a number that can be read, by number."""
    return in_listing_order(item for item in candidates if item.step is not None and not item.is_damaged)


def dated_steps(candidates: Iterable[Candidate]) -> list[tuple[datetime, Candidate]]:
    """Return the sound steps whose time of commit is known, by that time; of equal times by number."""
    dated = [(item.committed_at, item) for item in sound_steps(candidates) if item.committed_at is not None]
    return sorted(dated, key=lambda pair: pair[0])
