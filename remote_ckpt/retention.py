"""Which checkpoints to keep: pure decisions over a listing, each with its reason.

A plan is data. Whoever carries it out deletes exactly what it names, one checkpoint at a time, and
each deletion looks again at the newest generation first, so a pin that was set in between wins.

Two kinds of plans:

- :func:`plan_keep_last` is automatic (it runs after every save), so it has floors that no setting
  overrides: the newest step, the checkpoint committed last, pinned ones, protected ones (in
  progress, resumed from, just committed), damaged ones and every name that is not a step.
- :func:`plan_cleanup` is an explicit order at the end of a run: only pins bind it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import NoReturn

from remote_ckpt.errors import ConfigError


class CheckpointRetentionPolicy(enum.Enum):
    """What stays at the end of a run, with the names and values of DINOv3's checkpointer."""

    ALL = "all"
    BEST = "best"
    LAST = "last"
    LAST_AND_BEST = "last_and_best"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = ", ".join(repr(policy.value) for policy in cls)
        raise ConfigError(f"{value!r} is no retention policy: use one of {known}")

    @property
    def keep_filters(self) -> set[str]:
        """Patterns (as in :mod:`fnmatch`) of checkpoint names that a cleanup keeps."""
        return set(_KEEP_FILTERS[self])

    @property
    def max_to_keep(self) -> int | None:
        """How many periodic checkpoints to keep while training; None keeps all."""
        return None if self is CheckpointRetentionPolicy.ALL else 1


_KEEP_FILTERS = {
    CheckpointRetentionPolicy.ALL: ("*",),
    CheckpointRetentionPolicy.BEST: ("best",),
    CheckpointRetentionPolicy.LAST: ("final",),
    CheckpointRetentionPolicy.LAST_AND_BEST: ("final", "best"),
    CheckpointRetentionPolicy.NONE: (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One checkpoint as a policy sees it.

    Args:
        name: Its name in the run's directory.
        step: The number that its name spells, None for a named checkpoint.
        is_pinned: Pinned checkpoints are kept by every plan.
        is_damaged: Its manifest could not be read.
        committed_at: When it was committed (UTC); None where that is unknown.
    """

    name: str
    step: int | None
    is_pinned: bool = False
    is_damaged: bool = False
    committed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one checkpoint, and why, in words for people."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What to keep and what to delete, in listing order; ``warnings`` are remarks for the user."""

    keep: tuple[Decision, ...]
    delete: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()


def plan_keep_last(
    candidates: Iterable[Candidate], count: int | None, *, protected: Collection[str] = frozenset()
) -> RetentionPlan:
    """Plan to keep the last ``count`` steps, the highest numbers being the last.

    Only checkpoints named by a number count or are deleted.

    Args:
        candidates: Every checkpoint of the run's directory.
        count: Steps to keep, at least 1; None and -1 keep all.
        protected: Names that stay whatever their number: just committed, in progress, resumed from.

    Raises:
        ConfigError: ``count`` is 0, below -1, or no integer.
    """
    _check_count(count)
    ordered = sorted(candidates, key=_listing_order)
    steps = [candidate for candidate in ordered if candidate.step is not None and not candidate.is_damaged]
    if count is None or count == -1:
        return _split(ordered, lambda _: "all are kept", deleted="")
    floors = _automatic_floors(steps, protected)
    last = {candidate.name for candidate in steps[-count:]}

    def reason_to_keep(candidate: Candidate) -> str | None:
        if candidate.step is None:
            return "not a step"
        if candidate.is_damaged:
            return "damaged: look at it first"
        if candidate.is_pinned:
            return "pinned"
        if candidate.name in last:
            return f"among the last {count}"
        return floors.get(candidate.name)

    plan = _split(ordered, reason_to_keep, deleted=f"older than the last {count}")
    return RetentionPlan(plan.keep, plan.delete, _warnings(steps))


def plan_cleanup(candidates: Iterable[Candidate], policy: CheckpointRetentionPolicy) -> RetentionPlan:
    """Plan the cleanup at the end of a run: keep what the policy names and what is pinned.

    A policy that keeps the last checkpoint means ``final``; where a run never wrote one, its newest
    step is the last, and is kept instead.
    """
    ordered = sorted(candidates, key=_listing_order)
    filters = policy.keep_filters
    stand_in = _last_step_name(ordered) if "final" in filters else None

    def reason_to_keep(candidate: Candidate) -> str | None:
        if candidate.is_pinned:
            return "pinned"
        if any(fnmatchcase(candidate.name, pattern) for pattern in filters):
            return f"policy {policy.value} keeps it"
        return "the last step, as there is no final" if candidate.name == stand_in else None

    return _split(ordered, reason_to_keep, deleted=f"policy {policy.value} does not keep it")


def format_plan(plan: RetentionPlan) -> str:
    """Return the plan as lines of text: verb, name, reason; then the warnings."""
    decisions = [("keep", decision) for decision in plan.keep]
    decisions += [("delete", decision) for decision in plan.delete]
    width = max((len(decision.name) for _, decision in decisions), default=0)
    lines = [f"{verb:<6}  {decision.name:<{width}}  {decision.reason}" for verb, decision in decisions]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def _check_count(count: object) -> None:
    is_count = isinstance(count, int) and not isinstance(count, bool) and (count >= 1 or count == -1)
    if count is not None and not is_count:
        raise ConfigError(f"cannot keep the last {count} checkpoints: give 1 or more, or None to keep all")


def _listing_order(candidate: Candidate) -> tuple[bool, int, str]:
    return candidate.step is None, candidate.step or 0, candidate.name


def _split(
    ordered: Sequence[Candidate], reason_to_keep: Callable[[Candidate], str | None], *, deleted: str
) -> RetentionPlan:
    reasons = [(candidate.name, reason_to_keep(candidate)) for candidate in ordered]
    return RetentionPlan(
        keep=tuple(Decision(name, reason) for name, reason in reasons if reason is not None),
        delete=tuple(Decision(name, deleted) for name, reason in reasons if reason is None),
    )


def _automatic_floors(steps: Sequence[Candidate], protected: Collection[str]) -> dict[str, str]:
    floors = dict.fromkeys(protected, "protected: in use by this run")
    if (latest := _committed_last(steps)) is not None:
        floors.setdefault(latest.name, "committed last")
    return floors


def _committed_last(steps: Sequence[Candidate]) -> Candidate | None:
    dated = [(step.committed_at, step.step, step) for step in steps if step.committed_at is not None]
    return max(dated, key=lambda item: item[:2])[2] if dated else None


def _warnings(steps: Sequence[Candidate]) -> tuple[str, ...]:
    latest = _committed_last(steps)
    if latest is None or latest.name == steps[-1].name:
        return ()
    # A run that went back, or a folder used again: numbers and times disagree, so say it aloud.
    return (
        f"checkpoint {latest.name} was committed last, but older ones with higher steps exist "
        f"(up to {steps[-1].name}); they count as the last ones",
    )


def _last_step_name(ordered: Sequence[Candidate]) -> str | None:
    if any(candidate.name == "final" and not candidate.is_damaged for candidate in ordered):
        return None
    steps = [candidate for candidate in ordered if candidate.step is not None and not candidate.is_damaged]
    return steps[-1].name if steps else None
