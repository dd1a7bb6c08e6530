"""What a user wants kept: small values that look at a listing and name checkpoints with reasons. Pure.

Policies are joined with ``|``: a checkpoint stays if any of them keeps it, and all their reasons are told.

>>> KeepLast(3) | KeepEvery(steps=1000) | KeepBest("val_loss")
KeepLast(3) | KeepEvery(steps=1000) | KeepBest('val_loss', n=1, mode='min')

They look at sound steps only: checkpoints whose name is a number and whose manifest can be read. Only
:class:`KeepAll` and :class:`KeepNamed` look at the others too. What no policy keeps is deleted by a plan of
:mod:`remote_ckpt.retention`, which adds the floors that no policy can take away.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from typing import Literal

from remote_ckpt.candidates import Candidate, dated_steps, sound_steps
from remote_ckpt.errors import ConfigError
from remote_ckpt.verdicts import Verdict, format_duration, format_time, join_reasons, kept_for_want_of

__all__ = [
    "Candidate",
    "JoinedPolicy",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepNamed",
    "KeepWithin",
    "RetentionPolicy",
    "Verdict",
]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class RetentionPolicy(ABC):
    """What to keep. Own policies derive from this; they should be values: frozen, comparable, printable."""

    __slots__ = ()

    @abstractmethod
    def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
        """Return what this policy keeps, from the candidates alone: no store is asked.

        Args:
            candidates: Every checkpoint of the run's directory, in any order.
            now: The time by the store's clock, with a time zone.
        """

    @property
    def reason_to_delete(self) -> str:
        """What a plan says of a checkpoint that nothing keeps."""
        return f"not kept by {self!r}"

    def __or__(self, other: RetentionPolicy) -> RetentionPolicy:
        """Return the policy that keeps what either keeps."""
        if not isinstance(other, RetentionPolicy):
            return NotImplemented
        parts: list[RetentionPolicy] = []
        for part in (*_parts(self), *_parts(other)):
            if part not in parts:
                parts.append(part)
        return parts[0] if len(parts) == 1 else JoinedPolicy(tuple(parts))


@dataclass(frozen=True, slots=True, repr=False)
class JoinedPolicy(RetentionPolicy):
    """Keeps what any of its policies keeps; made by ``|``, which flattens. Without policies: nothing."""

    policies: tuple[RetentionPolicy, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies)) or "JoinedPolicy(())"

    def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
        """See :meth:`RetentionPolicy.reasons_to_keep`."""
        verdicts = [policy.reasons_to_keep(candidates, now=now) for policy in self.policies]
        warnings = (warning for verdict in verdicts for warning in verdict.warnings)
        # Two policies may say the same of one lack, such as an unknown time: once is enough.
        return Verdict(join_reasons(verdict.reasons for verdict in verdicts), tuple(dict.fromkeys(warnings)))


@dataclass(frozen=True, slots=True)
class KeepAll(RetentionPolicy):
    """Keeps every checkpoint."""

    def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
        """See :meth:`RetentionPolicy.reasons_to_keep`."""
        return Verdict({candidate.name: "all are kept" for candidate in candidates})


@dataclass(frozen=True, slots=True, repr=False)
class KeepLast(RetentionPolicy):
    """Keeps the last steps: those with the highest numbers, whenever they were committed.

    Args:
        n: How many, at least 1.

    Raises:
        ConfigError: ``n`` is below 1 or no integer.
    """

    n: int

    def __post_init__(self) -> None:
        if not _is_count(self.n):
            raise ConfigError(
                f"cannot keep the last {self.n} checkpoints: give an integer, 1 or more; to keep all, give "
                "KeepAll(), or None to keep_last_n_checkpoints"
            )

    def __repr__(self) -> str:
        return f"KeepLast({self.n})"

    @property
    def reason_to_delete(self) -> str:
        """See :attr:`RetentionPolicy.reason_to_delete`."""
        return f"older than the last {self.n}"

    def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
        """See :meth:`RetentionPolicy.reasons_to_keep`."""
        last = sound_steps(candidates)[-self.n :]
        return Verdict({candidate.name: f"among the last {self.n}" for candidate in last})


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class KeepEvery(RetentionPolicy):
    """Keeps the first checkpoint of every so many steps, or hours. Give exactly one of the two.

    A window of steps is ``[k * steps, (k + 1) * steps)`` and keeps its lowest step: the exact multiple
    where there is one. A window of hours begins at a multiple of ``hours`` since 1970-01-01 00:00 UTC and
    keeps the checkpoint that was committed in it first. So a later save never displaces one that was kept
    before, however irregular the steps. Steps whose time of commit is unknown are kept by ``hours``, with
    one warning for all of them.

    Args:
        steps: Length of a window in steps, an integer of at least 1.
        hours: Length of a window in hours, above 0.

    Raises:
        ConfigError: Both or none are given, or the one given is out of bounds.
    """

    steps: int | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.hours is None):
            raise ConfigError("KeepEvery: give either steps, such as steps=1000, or hours, such as hours=6")
        if self.steps is not None and not _is_count(self.steps):
            raise ConfigError(f"KeepEvery: steps must be an integer, 1 or more, not {self.steps!r}")
        if self.hours is not None:
            _duration(self.hours)

    def __repr__(self) -> str:
        return f"KeepEvery(steps={self.steps})" if self.hours is None else f"KeepEvery(hours={self.hours})"

    def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
        """See :meth:`RetentionPolicy.reasons_to_keep`."""
        if self.steps is not None:
            return Verdict(_first_by_number(candidates, self.steps))
        assert self.hours is not None  # exactly one is given
        return _with_undated(_first_by_time(candidates, _duration(self.hours)), candidates)


@dataclass(frozen=True, slots=True, repr=False)
class KeepBest(RetentionPolicy):
    """Keeps the steps with the best values of a metric.

    Of equal values the higher step is the better one. Infinities rank as any number. NaN is never best,
    so fewer than ``n`` may be kept for it. A step that lacks the metric is kept, with one warning for all
    of them: an evaluation may add it later (:func:`~remote_ckpt.changes.annotate`).

    Args:
        metric: Name of the metric.
        n: How many to keep, at least 1.
        mode: ``"min"`` where low values are good, else ``"max"``.

    Raises:
        ConfigError: No name, another mode, or ``n`` below 1 or no integer.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"KeepBest: give the name of a metric, such as 'val_loss', not {self.metric!r}")
        if not _is_count(self.n):
            raise ConfigError(f"KeepBest: n must be an integer, 1 or more, not {self.n!r}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"KeepBest: mode must be 'min' or 'max', not {self.mode!r}")

    def __repr__(self) -> str:
        return f"KeepBest({self.metric!r}, n={self.n}, mode={self.mode!r})"

    def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
        """See :meth:`RetentionPolicy.reasons_to_keep`."""
        steps = sound_steps(candidates)
        lacking = [step for step in steps if self.metric not in step.metrics]
        reasons = {step.name: f"no {self.metric} yet" for step in lacking}
        words = "best" if self.n == 1 else f"among the {self.n} best"
        for step in self._ranked(steps)[: self.n]:
            reasons[step.name] = f"{words} {self.metric} ({step.metrics[self.metric]:.6g})"
        return Verdict(reasons, kept_for_want_of(f"{self.metric} yet", lacking))

    def _ranked(self, steps: Sequence[Candidate]) -> list[Candidate]:
        """Return the steps with a number, the best first; the higher of equals comes first and stays so."""
        values = {step.name: step.metrics.get(self.metric, math.nan) for step in steps}
        sign = 1 if self.mode == "min" else -1
        measured = [step for step in reversed(steps) if not math.isnan(values[step.name])]
        return sorted(measured, key=lambda step: sign * values[step.name])


@dataclass(frozen=True, slots=True)
class KeepWithin(RetentionPolicy):
    """Keeps the steps that were committed lately.

    One that is exactly of that age is kept, and so is one of a future time. Steps whose time of commit is
    unknown are kept, with one warning for all of them.

    Args:
        age: The greatest age to keep, above 0, by the clock that the plan is made with: the store's.

    Raises:
        ConfigError: ``age`` is no ``timedelta``, or not above 0.
    """

    age: timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.age, timedelta) or self.age <= timedelta(0):
            raise ConfigError(f"KeepWithin: give an age above 0, such as timedelta(days=2), not {self.age!r}")

    def __repr__(self) -> str:
        return f"KeepWithin({self.age!r})"

    def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
        """See :meth:`RetentionPolicy.reasons_to_keep`."""
        words = f"committed within {format_duration(self.age)}"
        recent = {step.name: words for at, step in dated_steps(candidates) if now - at <= self.age}
        return _with_undated(recent, candidates)


@dataclass(frozen=True, slots=True, repr=False, init=False)
class KeepNamed(RetentionPolicy):
    """Keeps checkpoints by their names: steps too, and damaged ones, as a name says nothing of content.

    Args:
        names: Names as they are; ``*`` and ``[`` mean nothing in them.
        pattern: One pattern of names or several, as in :func:`fnmatch.fnmatchcase`: ``*`` for any
            characters, ``?`` for one, ``[12]`` for one of these.

    Raises:
        ConfigError: Neither is given, or one of them is empty or no text.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]

    def __init__(self, *names: str, pattern: str | Iterable[str] | None = None) -> None:
        patterns = _as_patterns(pattern)
        if not names and not patterns:
            raise ConfigError("KeepNamed: give names, such as 'best', or a pattern, such as pattern='*_keep'")
        for text in (*names, *patterns):
            if not isinstance(text, str) or not text:
                raise ConfigError(f"KeepNamed: give names and patterns as texts, none empty, not {text!r}")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "patterns", patterns)

    def __repr__(self) -> str:
        arguments = [repr(name) for name in self.names]
        if self.patterns:
            arguments.append(f"pattern={self.patterns if len(self.patterns) > 1 else self.patterns[0]!r}")
        return f"KeepNamed({', '.join(arguments)})"

    def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
        """See :meth:`RetentionPolicy.reasons_to_keep`."""
        reasons = ((candidate.name, self._reason(candidate.name)) for candidate in candidates)
        return Verdict({name: reason for name, reason in reasons if reason is not None})

    def _reason(self, name: str) -> str | None:
        if name in self.names:
            return "kept by name"
        pattern = next((pattern for pattern in self.patterns if fnmatchcase(name, pattern)), None)
        return None if pattern is None else f"its name matches {pattern}"


def _parts(policy: RetentionPolicy) -> tuple[RetentionPolicy, ...]:
    return policy.policies if isinstance(policy, JoinedPolicy) else (policy,)


def _as_patterns(pattern: str | Iterable[str] | None) -> tuple[str, ...]:
    if pattern is None:
        return ()
    return tuple(pattern) if isinstance(pattern, Iterable) and not isinstance(pattern, str) else (pattern,)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _duration(hours: float) -> timedelta:
    is_number = isinstance(hours, int | float) and not isinstance(hours, bool)
    try:
        duration = timedelta(hours=hours) if is_number else timedelta(0)
    except (OverflowError, ValueError):  # infinite or huge; NaN
        duration = timedelta(0)
    if duration <= timedelta(0):
        raise ConfigError(f"KeepEvery: hours must be a number above 0, such as 6, not {hours!r}")
    return duration


def _first_by_number(candidates: Sequence[Candidate], length: int) -> Mapping[str, str]:
    firsts: dict[int, str] = {}
    for step in sound_steps(candidates):
        firsts.setdefault((step.step or 0) // length, step.name)
    return {
        name: f"first of steps {window * length} to {(window + 1) * length - 1}"
        for window, name in firsts.items()
    }


def _first_by_time(candidates: Sequence[Candidate], length: timedelta) -> Mapping[str, str]:
    firsts: dict[int, tuple[datetime, Candidate]] = {}
    for at, step in dated_steps(candidates):
        firsts.setdefault((at - _EPOCH) // length, (at, step))
    words = f"first in a window of {format_duration(length)}"
    return {step.name: f"{words} ({format_time(at)})" for at, step in firsts.values()}


def _with_undated(reasons: Mapping[str, str], candidates: Sequence[Candidate]) -> Verdict:
    """Return the verdict of a policy that goes by time: what it cannot date is kept."""
    undated = [step for step in sound_steps(candidates) if step.committed_at is None]
    unknown = {step.name: "its time of commit is unknown" for step in undated}
    return Verdict({**reasons, **unknown}, kept_for_want_of("known time of commit", undated))
