"""What to keep and what to delete: pure decisions over a listing, each with its reason.

A plan is data. Whoever carries it out deletes exactly what it names, one checkpoint at a time, and
each deletion looks again at the newest generation first, so a pin that was set in between wins.

Two kinds of plans:

- :func:`plan_retention` is automatic (it runs after every save), so it has floors that no policy
  overrides: the newest step, the checkpoint committed last, pinned ones, protected ones (in
  progress, resumed from, just committed), damaged ones and every name that is not a step.
  :func:`plan_keep_last` is the same for the last so many steps.
- :func:`plan_cleanup` is an explicit order at the end of a run: only pins bind it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NoReturn

from remote_ckpt.candidates import Candidate, dated_steps, in_listing_order, sound_steps
from remote_ckpt.errors import ConfigError
from remote_ckpt.policies import (
    JoinedPolicy,
    KeepAll,
    KeepLast,
    KeepNamed,
    RetentionPolicy,
)
from remote_ckpt.verdicts import Verdict, join_reasons

__all__ = [
    "Candidate",
    "CheckpointRetentionPolicy",
    "Decision",
    "RetentionPlan",
    "format_plan",
    "plan_cleanup",
    "plan_keep_last",
    "plan_retention",
]

_NO_CLOCK = datetime(1970, 1, 1, tzinfo=timezone.utc)
"""For policies that go by numbers and names, and ask for no time."""


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


def plan_retention(
    candidates: Iterable[Candidate],
    policy: RetentionPolicy,
    *,
    now: datetime,
    protected: Collection[str] = frozenset(),
) -> RetentionPlan:
    """Plan what stays by a policy and by the floors; the rest of the steps is deleted.

    The reasons of floors and policy are both told, but for "the newest step": that is said only where the
    policy alone would have let it go.

    Args:
        candidates: Every checkpoint of the run's directory, in any order.
        policy: What the user wants kept.
        now: The time by the store's clock, with a time zone.
        protected: Names that stay whatever the policy: just committed, in progress, resumed from.

    Raises:
        ConfigError: ``policy`` is no :class:`~remote_ckpt.policies.RetentionPolicy`, or ``now`` has no time
            zone.
    """
    if not isinstance(policy, RetentionPolicy):
        raise ConfigError(f"{policy!r} is no retention policy: give one such as KeepLast(3)")
    if now.tzinfo is None:
        raise ConfigError(f"now must have a time zone, such as datetime.now(timezone.utc), not {now!r}")
    ordered = in_listing_order(candidates)
    verdict = policy.reasons_to_keep(ordered, now=now)
    reasons = join_reasons((*_floors(ordered, protected), verdict.reasons))
    steps = sound_steps(ordered)
    if steps:
        reasons.setdefault(steps[-1].name, "the newest step")
    warnings = (*_warnings(steps), *verdict.warnings)
    return _split(ordered, reasons, deleted=policy.reason_to_delete, warnings=warnings)


def plan_keep_last(
    candidates: Iterable[Candidate], count: int | None, *, protected: Collection[str] = frozenset()
) -> RetentionPlan:
    """Plan to keep the last ``count`` steps, the highest numbers being the last.

    Only checkpoints named by a number count or are deleted. The floors of :func:`plan_retention` hold.

    Args:
        candidates: Every checkpoint of the run's directory.
        count: Steps to keep, at least 1; None and -1 keep all.
        protected: Names that stay whatever their number: just committed, in progress, resumed from.

    Raises:
        ConfigError: ``count`` is 0, below -1, or no integer.
    """
    if isinstance(count, int) and count == -1:
        count = None
    policy = KeepAll() if count is None else KeepLast(count)
    return plan_retention(candidates, policy, now=_NO_CLOCK, protected=protected)


def plan_cleanup(candidates: Iterable[Candidate], policy: CheckpointRetentionPolicy) -> RetentionPlan:
    """Plan the cleanup at the end of a run: keep what the policy names and what is pinned.

    A policy that keeps the last checkpoint means ``final``; where a run never wrote one, its newest
    step is the last, and is kept instead.
    """
    ordered = in_listing_order(candidates)
    kept = _CLEANUP[policy].reasons_to_keep(ordered, now=_NO_CLOCK).reasons
    reasons = join_reasons((_pinned(ordered), kept))
    return _split(ordered, reasons, deleted=f"policy {policy.value} does not keep it")


def format_plan(plan: RetentionPlan) -> str:
    """Return the plan as lines of text: verb, name, reason; then the warnings."""
    decisions = [("keep", decision) for decision in plan.keep]
    decisions += [("delete", decision) for decision in plan.delete]
    width = max((len(decision.name) for _, decision in decisions), default=0)
    lines = [f"{verb:<6}  {decision.name:<{width}}  {decision.reason}" for verb, decision in decisions]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _KeepFinal(RetentionPolicy):
    """Keeps ``final``; where there is none that can be read, the newest step stands in for it."""

    def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
        verdict = KeepNamed("final").reasons_to_keep(candidates, now=now)
        has_final = any(item.name == "final" and not item.is_damaged for item in candidates)
        stand_in = [] if has_final else sound_steps(candidates)[-1:]
        return Verdict(
            {**verdict.reasons, **{step.name: "the last step, as there is no final" for step in stand_in}}
        )


_CLEANUP: Mapping[CheckpointRetentionPolicy, RetentionPolicy] = {
    CheckpointRetentionPolicy.ALL: KeepAll(),
    CheckpointRetentionPolicy.BEST: KeepNamed("best"),
    CheckpointRetentionPolicy.LAST: _KeepFinal(),
    CheckpointRetentionPolicy.LAST_AND_BEST: _KeepFinal() | KeepNamed("best"),
    CheckpointRetentionPolicy.NONE: JoinedPolicy(()),
}


def _split(
    ordered: Sequence[Candidate], reasons: Mapping[str, str], *, deleted: str, warnings: tuple[str, ...] = ()
) -> RetentionPlan:
    names = [candidate.name for candidate in ordered]
    return RetentionPlan(
        keep=tuple(Decision(name, reasons[name]) for name in names if name in reasons),
        delete=tuple(Decision(name, deleted) for name in names if name not in reasons),
        warnings=warnings,
    )


def _floors(ordered: Sequence[Candidate], protected: Collection[str]) -> Iterable[Mapping[str, str]]:
    yield _pinned(ordered)
    yield dict.fromkeys(protected, "protected: in use by this run")
    yield {item.name: "damaged: look at it first" for item in ordered if item.is_damaged}
    yield {item.name: "not a step" for item in ordered if item.step is None}
    if (latest := _committed_below_the_newest(sound_steps(ordered))) is not None:
        yield {latest.name: "committed last"}


def _pinned(ordered: Iterable[Candidate]) -> Mapping[str, str]:
    return {item.name: "pinned" for item in ordered if item.is_pinned}


def _committed_below_the_newest(steps: Sequence[Candidate]) -> Candidate | None:
    """Return the step committed last, where that is not the newest, the highest: a run went back."""
    dated = dated_steps(steps)
    return dated[-1][1] if dated and dated[-1][1].name != steps[-1].name else None


def _warnings(steps: Sequence[Candidate]) -> tuple[str, ...]:
    latest = _committed_below_the_newest(steps)
    if latest is None:
        return ()
    # A run that went back, or a folder used again: numbers and times disagree, so say it aloud.
    return (
        f"checkpoint {latest.name} was committed last, but older ones with higher steps exist "
        f"(up to {steps[-1].name}); they count as the last ones",
    )
