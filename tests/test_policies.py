"""Retention policies: what each keeps, its words, its bounds, and laws that hold for all of them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from datetime import datetime, timedelta, timezone
from functools import reduce
from operator import or_
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_ckpt.errors import ConfigError
from remote_ckpt.policies import (
    Candidate,
    JoinedPolicy,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepNamed,
    KeepWithin,
    RetentionPolicy,
    Verdict,
)
from remote_ckpt.retention import RetentionPlan, plan_retention

NOW = datetime(2026, 1, 10, 12, 30, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def step(
    number: int,
    *,
    age: timedelta | None = None,
    is_damaged: bool = False,
    is_pinned: bool = False,
    **metrics: float,
) -> Candidate:
    """A step that was committed so long before ``NOW``; metrics by name."""
    return Candidate(
        name=str(number),
        step=number,
        is_pinned=is_pinned,
        is_damaged=is_damaged,
        committed_at=None if age is None else NOW - age,
        metrics=metrics,
    )


def named(name: str, *, is_damaged: bool = False, **metrics: float) -> Candidate:
    return Candidate(name=name, step=None, is_damaged=is_damaged, committed_at=NOW, metrics=metrics)


def steps(*numbers: int) -> list[Candidate]:
    return [step(number) for number in numbers]


def judge(policy: RetentionPolicy, candidates: Sequence[Candidate]) -> Verdict:
    return policy.reasons_to_keep(candidates, now=NOW)


def reasons(policy: RetentionPolicy, candidates: Sequence[Candidate]) -> Mapping[str, str]:
    return judge(policy, candidates).reasons


class TestKeepAll:
    def test_it_keeps_every_checkpoint(self) -> None:
        found = reasons(KeepAll(), [step(1), step(2, is_damaged=True), named("best")])
        assert found == dict.fromkeys(["1", "2", "best"], "all are kept")


class TestKeepLast:
    def test_it_keeps_the_highest_numbers_in_whatever_order_they_come(self) -> None:
        found = reasons(KeepLast(2), steps(10000, 500, 9000))
        assert found == dict.fromkeys(["9000", "10000"], "among the last 2")

    def test_it_passes_over_damaged_and_named_ones(self) -> None:
        assert list(reasons(KeepLast(1), [step(1), step(2, is_damaged=True), named("z")])) == ["1"]

    def test_it_keeps_all_where_there_are_fewer(self) -> None:
        assert list(reasons(KeepLast(10**30), steps(1, 2))) == ["1", "2"]

    def test_a_plan_says_older_of_what_it_deletes(self) -> None:
        plan = plan_retention(steps(1, 2), KeepLast(1), now=NOW)
        assert [(decision.name, decision.reason) for decision in plan.delete] == [
            ("1", "older than the last 1")
        ]


class TestKeepEverySteps:
    @pytest.mark.parametrize(
        ("length", "numbers", "kept"),
        [
            (1000, [0, 500, 1000, 1500, 2000], [0, 1000, 2000]),
            (1000, [999, 1999, 2999], [999, 1999, 2999]),
            (1000, [1100, 1900, 1200], [1100]),
            (1, [3, 4, 5], [3, 4, 5]),
            (10**40, [1, 10**40 - 1, 10**40, 10**40 + 1], [1, 10**40]),
        ],
    )
    def test_each_window_keeps_its_lowest_step(
        self, length: int, numbers: list[int], kept: list[int]
    ) -> None:
        assert list(reasons(KeepEvery(steps=length), steps(*numbers))) == [str(number) for number in kept]

    def test_the_reason_names_the_window(self) -> None:
        assert reasons(KeepEvery(steps=1000), steps(1250)) == {"1250": "first of steps 1000 to 1999"}

    def test_a_damaged_or_named_one_takes_no_windows_place(self) -> None:
        found = reasons(KeepEvery(steps=10), [step(10, is_damaged=True), step(11), named("best")])
        assert list(found) == ["11"]


class TestKeepEveryHours:
    def test_each_window_keeps_the_one_committed_first_and_says_when(self) -> None:
        # Windows of 6 hours since the epoch begin at 0:00, 6:00, 12:00 and 18:00 UTC; it is 12:30.
        found = reasons(
            KeepEvery(hours=6), [step(4), step(3, age=HOUR / 6), step(1, age=HOUR), step(2, age=HOUR / 2)]
        )
        assert {name: reason for name, reason in found.items() if name != "4"} == {
            "1": "first in a window of 6 hours (2026-01-10 11:30 UTC)",
            "2": "first in a window of 6 hours (2026-01-10 12:00 UTC)",
        }

    def test_times_decide_where_numbers_went_back(self) -> None:
        assert list(reasons(KeepEvery(hours=24), [step(100, age=HOUR), step(700, age=2 * HOUR)])) == ["700"]

    def test_of_the_same_moment_the_lower_step_is_first(self) -> None:
        assert list(reasons(KeepEvery(hours=24), [step(2, age=HOUR), step(1, age=HOUR)])) == ["1"]

    def test_fractions_of_an_hour_and_other_time_zones_are_the_same_clock(self) -> None:
        there = timezone(timedelta(hours=5, minutes=45))
        twins = [step(1, age=HOUR / 2), step(2, age=HOUR / 4)]
        twins = [replace(twin, committed_at=(twin.committed_at or NOW).astimezone(there)) for twin in twins]
        assert reasons(KeepEvery(hours=0.5), twins) == {
            "1": "first in a window of 30 minutes (2026-01-10 12:00 UTC)"
        }

    def test_a_time_before_the_epoch_is_no_error(self) -> None:
        old = replace(step(1), committed_at=datetime(1, 1, 1, tzinfo=timezone.utc))
        assert list(reasons(KeepEvery(hours=8e7), [old])) == ["1"]


class TestKeepBest:
    @pytest.mark.parametrize(
        ("mode", "kept"),
        [("min", {"2": "best loss (0.123)"}), ("max", {"3": "best loss (7)"})],
    )
    def test_the_mode_says_which_end_is_good(self, mode: Any, kept: dict[str, str]) -> None:
        found = [step(1, loss=0.5), step(2, loss=0.123), step(3, loss=7.0)]
        assert reasons(KeepBest("loss", mode=mode), found) == kept

    def test_several_are_kept_by_rank_and_values_compare_as_numbers(self) -> None:
        found = reasons(KeepBest("loss", n=2), [step(1, loss=10.0), step(2, loss=9.5), step(3, loss=-1e-9)])
        assert found == {"3": "among the 2 best loss (-1e-09)", "2": "among the 2 best loss (9.5)"}

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_of_equal_values_the_higher_step_wins(self, mode: Any) -> None:
        found = [step(number, loss=0.25) for number in (9, 100, 10)]
        assert list(reasons(KeepBest("loss", n=2, mode=mode), found)) == ["100", "10"]

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_nan_is_never_kept_for_being_best(self, mode: Any) -> None:
        found = [step(1, loss=math.nan), step(2, loss=3.0), step(3, loss=math.nan)]
        assert judge(KeepBest("loss", n=2, mode=mode), found) == Verdict({"2": "among the 2 best loss (3)"})
        assert judge(KeepBest("loss", mode=mode), found[:1]) == Verdict({})

    @pytest.mark.parametrize(("mode", "kept"), [("min", "1"), ("max", "3")])
    def test_infinities_rank_as_numbers(self, mode: Any, kept: str) -> None:
        found = [step(1, loss=-math.inf), step(2, loss=0.0), step(3, loss=math.inf)]
        assert list(reasons(KeepBest("loss", mode=mode), found)) == [kept]

    def test_what_lacks_the_metric_is_kept_with_one_warning_and_takes_no_place(self) -> None:
        lacking = [step(number, other=0.0) for number in (12, 7, 30, 9, 8)]
        verdict = judge(KeepBest("val_loss"), [*lacking, step(1, val_loss=2.0), step(2, val_loss=1.0)])
        assert verdict.reasons == {
            **dict.fromkeys(["7", "8", "9", "12", "30"], "no val_loss yet"),
            "2": "best val_loss (1)",
        }
        assert verdict.warnings == ("5 checkpoints have no val_loss yet and are kept: 7, 8, 9 and 2 more",)

    def test_a_single_one_that_lacks_the_metric_is_spoken_of_as_one(self) -> None:
        warnings = judge(KeepBest("val_loss"), steps(7)).warnings
        assert warnings == ("1 checkpoint has no val_loss yet and is kept: 7",)

    def test_damaged_and_named_ones_neither_compete_nor_lack_anything(self) -> None:
        others = [step(2, is_damaged=True), named("best", loss=0.0), named("final")]
        assert judge(KeepBest("loss"), [step(1, loss=5.0), *others]) == Verdict({"1": "best loss (5)"})


class TestKeepWithin:
    @pytest.mark.parametrize(
        ("age", "is_kept"),
        [
            (2 * DAY - timedelta(microseconds=1), True),
            (2 * DAY, True),
            (2 * DAY + timedelta(microseconds=1), False),
            (timedelta(0), True),
            (-9 * DAY, True),
        ],
    )
    def test_what_is_not_older_is_kept_the_edge_and_the_future_too(
        self, age: timedelta, is_kept: bool
    ) -> None:
        expected = {"1": "committed within 2 days"} if is_kept else {}
        assert judge(KeepWithin(2 * DAY), [step(1, age=age)]) == Verdict(expected)

    @pytest.mark.parametrize(
        ("age", "words"),
        [
            (DAY, "1 day"),
            (36 * HOUR, "36 hours"),
            (HOUR * 1.5, "90 minutes"),
            (timedelta(seconds=61), "61 seconds"),
            (timedelta(milliseconds=1500), "1.5 seconds"),
        ],
    )
    def test_the_reason_counts_in_the_largest_unit_that_fits(self, age: timedelta, words: str) -> None:
        assert reasons(KeepWithin(age), [step(1, age=timedelta(0))]) == {"1": f"committed within {words}"}

    def test_damaged_and_named_ones_are_not_its_business(self) -> None:
        assert judge(KeepWithin(DAY), [named("best"), step(1, age=HOUR, is_damaged=True)]) == Verdict({})


@pytest.mark.parametrize(
    "policy", [KeepWithin(HOUR), KeepEvery(hours=1), KeepWithin(DAY) | KeepEvery(hours=2)]
)
def test_an_unknown_time_of_commit_keeps_a_step_and_is_warned_of_once(policy: RetentionPolicy) -> None:
    verdict = judge(policy, [*steps(1, 2), named("x")])
    assert verdict.reasons == dict.fromkeys(["1", "2"], "its time of commit is unknown")
    assert verdict.warnings == ("2 checkpoints have no known time of commit and are kept: 1, 2",)


class TestKeepNamed:
    FOUND = (named("best"), named("b*"), named("[1]"), step(1), step(12), named("7_keep", is_damaged=True))

    @pytest.mark.parametrize(
        ("policy", "kept"),
        [
            (KeepNamed("best"), {"best": "kept by name"}),
            (KeepNamed("12", "none such"), {"12": "kept by name"}),
            (KeepNamed("b*", "[1]"), {"b*": "kept by name", "[1]": "kept by name"}),
            (KeepNamed(pattern="[1]"), {"1": "its name matches [1]"}),
            (KeepNamed(pattern="B*"), {}),
            (
                KeepNamed("best", pattern=["b*", "*_keep"]),
                {
                    "best": "kept by name",
                    "b*": "its name matches b*",
                    "7_keep": "its name matches *_keep",
                },
            ),
        ],
    )
    def test_names_are_literal_and_only_patterns_match(self, policy: KeepNamed, kept: dict[str, str]) -> None:
        assert judge(policy, self.FOUND) == Verdict(kept)


class TestJoined:
    def test_reasons_of_the_same_checkpoint_are_joined_in_the_order_of_the_policies(self) -> None:
        policy = KeepLast(1) | KeepEvery(steps=10) | KeepBest("loss")
        assert reasons(policy, [step(1, loss=2.0), step(10, loss=1.0), step(11, loss=3.0)]) == {
            "11": "among the last 1",
            "1": "first of steps 0 to 9",
            "10": "first of steps 10 to 19; best loss (1)",
        }

    def test_warnings_of_all_are_told(self) -> None:
        warnings = judge(KeepBest("a") | KeepLast(1) | KeepBest("b"), [step(1)]).warnings
        assert [warning.split(" yet")[0] for warning in warnings] == [
            "1 checkpoint has no a",
            "1 checkpoint has no b",
        ]

    def test_nested_joins_are_flat_and_equal_parts_stand_once(self) -> None:
        a, b, c = KeepLast(1), KeepEvery(steps=2), KeepAll()
        assert (a | b) | (c | a) == JoinedPolicy((a, b, c)) == a | (b | c)
        assert KeepLast(1) | KeepLast(1) == KeepLast(1)

    def test_nothing_joined_keeps_nothing_and_adds_nothing(self) -> None:
        assert judge(JoinedPolicy(()), steps(1)) == Verdict({})
        assert JoinedPolicy(()) | KeepLast(1) == KeepLast(1)

    @pytest.mark.parametrize("other", [3, None, "all"])
    def test_only_policies_can_be_joined(self, other: Any) -> None:
        with pytest.raises(TypeError, match="unsupported operand"):
            _ = KeepLast(1) | other

    def test_a_policy_of_ones_own_joins_like_the_others(self) -> None:
        @dataclass(frozen=True)
        class KeepEven(RetentionPolicy):
            def reasons_to_keep(self, candidates: Sequence[Candidate], *, now: datetime) -> Verdict:
                return Verdict({item.name: "even" for item in candidates if (item.step or 1) % 2 == 0})

        plan = plan_retention(steps(1, 2, 3, 4), KeepLast(1) | KeepEven(), now=NOW)
        assert [(decision.name, decision.reason) for decision in plan.keep] == [
            ("2", "even"),
            ("4", "among the last 1; even"),
        ]


VALUES: Sequence[tuple[RetentionPolicy, str]] = [
    (KeepAll(), "KeepAll()"),
    (KeepLast(3), "KeepLast(3)"),
    (KeepEvery(steps=1000), "KeepEvery(steps=1000)"),
    (KeepEvery(hours=0.5), "KeepEvery(hours=0.5)"),
    (KeepBest("val/loss", n=2, mode="max"), "KeepBest('val/loss', n=2, mode='max')"),
    (KeepWithin(timedelta(days=2)), "KeepWithin(datetime.timedelta(days=2))"),
    (KeepNamed("best", "final"), "KeepNamed('best', 'final')"),
    (KeepNamed("best", pattern="*_keep"), "KeepNamed('best', pattern='*_keep')"),
    (KeepNamed(pattern=["a*", "b*"]), "KeepNamed(pattern=('a*', 'b*'))"),
    (JoinedPolicy(()), "JoinedPolicy(())"),
    (KeepLast(3) | KeepEvery(hours=6) | KeepAll(), "KeepLast(3) | KeepEvery(hours=6) | KeepAll()"),
]


@pytest.mark.parametrize(("policy", "text"), VALUES)
class TestValues:
    def test_the_repr_is_the_code_that_makes_it(self, policy: RetentionPolicy, text: str) -> None:
        import datetime  # the name that the repr of a timedelta uses

        assert repr(policy) == text
        assert eval(text, {**globals(), "datetime": datetime}) == policy

    def test_it_is_a_value_that_copies_pickles_and_hashes(self, policy: RetentionPolicy, text: str) -> None:
        twins = [copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))]
        assert twins == [policy, policy]
        assert {policy, *twins} == {policy}

    def test_it_is_frozen_and_has_no_dict(self, policy: RetentionPolicy, text: str) -> None:
        assert not hasattr(policy, "__dict__")
        for field in fields(policy):  # type: ignore[arg-type]
            with pytest.raises(FrozenInstanceError):
                setattr(policy, field.name, 1)

    def test_what_it_lets_go_is_told_with_the_policy(self, policy: RetentionPolicy, text: str) -> None:
        words = "older than the last 3" if text == "KeepLast(3)" else f"not kept by {text}"
        assert policy.reason_to_delete == words


BAD_COUNTS: Sequence[Any] = [0, -1, True, 1.0, math.nan, "3", None]


class TestWrongArguments:
    @pytest.mark.parametrize("count", BAD_COUNTS)
    def test_counts_are_integers_above_0(self, count: Any) -> None:
        with pytest.raises(ConfigError, match=r"give an integer, 1 or more"):
            KeepLast(count)
        with pytest.raises(ConfigError, match=r"n must be an integer, 1 or more"):
            KeepBest("loss", n=count)

    @pytest.mark.parametrize("length", [count for count in BAD_COUNTS if count is not None])
    def test_windows_of_steps_are_integers_above_0(self, length: Any) -> None:
        with pytest.raises(ConfigError, match="steps must be an integer, 1 or more"):
            KeepEvery(steps=length)

    @pytest.mark.parametrize("hours", [0, -1, 0.0, -0.5, True, math.nan, math.inf, 10**400, 1e-12, "6"])
    def test_windows_of_time_are_numbers_above_0(self, hours: Any) -> None:
        with pytest.raises(ConfigError, match=r"hours must be a number above 0, such as 6"):
            KeepEvery(hours=hours)

    @pytest.mark.parametrize("arguments", [{}, {"steps": 1, "hours": 1}, {"steps": None, "hours": None}])
    def test_exactly_one_of_steps_and_hours_is_given(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"give either steps, such as steps=1000, or hours"):
            KeepEvery(**arguments)

    @pytest.mark.parametrize("metric", ["", None, 3])
    def test_a_metric_has_a_name(self, metric: Any) -> None:
        with pytest.raises(ConfigError, match="give the name of a metric"):
            KeepBest(metric)

    @pytest.mark.parametrize("mode", ["MIN", "lowest", None, ["min"]])
    def test_a_mode_is_min_or_max(self, mode: Any) -> None:
        with pytest.raises(ConfigError, match="mode must be 'min' or 'max'"):
            KeepBest("loss", mode=mode)

    @pytest.mark.parametrize("age", [timedelta(0), -DAY, 3600, None])
    def test_an_age_is_a_timedelta_above_0(self, age: Any) -> None:
        with pytest.raises(ConfigError, match=r"give an age above 0, such as timedelta\(days=2\)"):
            KeepWithin(age)

    @pytest.mark.parametrize(
        ("names", "pattern"),
        [
            ([], None),
            ([], []),
            (["best", ""], None),
            (["best"], ""),
            (["best"], ["*", ""]),
            ([12], None),
            ([["best", "final"]], None),
            ([], 12),
        ],
    )
    def test_names_and_patterns_are_texts_that_are_not_empty(self, names: list[Any], pattern: Any) -> None:
        with pytest.raises(ConfigError, match=r"KeepNamed: give names"):
            KeepNamed(*names, pattern=pattern)


# --- laws, for any listing and any policy ----------------------------------------------------------

METRICS = st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats(), max_size=2)
TIMES = st.none() | st.integers(-500, 5).map(lambda hours: NOW + hours * HOUR)
STEPS = st.integers(0, 40) | st.integers(0, 10**30)
NAMES = STEPS.map(str) | st.sampled_from(["best", "final", "7_keep", "step-20-backup"])


@st.composite
def listings(draw: st.DrawFn) -> list[Candidate]:
    return [
        Candidate(
            name=name,
            step=int(name) if name.isdigit() else None,
            is_pinned=draw(st.booleans()),
            is_damaged=draw(st.booleans()),
            committed_at=draw(TIMES),
            metrics=draw(METRICS),
        )
        for name in draw(st.lists(NAMES, max_size=12, unique=True))
    ]


SINGLE_POLICIES: st.SearchStrategy[RetentionPolicy] = st.one_of(
    st.just(KeepAll()),
    st.builds(KeepLast, st.integers(1, 8)),
    st.builds(lambda length: KeepEvery(steps=length), st.integers(1, 50)),
    st.builds(lambda hours: KeepEvery(hours=hours), st.floats(0.1, 100)),
    st.builds(KeepBest, st.sampled_from(["loss", "acc"]), st.integers(1, 4), st.sampled_from(["min", "max"])),
    st.builds(lambda hours: KeepWithin(hours * HOUR), st.integers(1, 500)),
    st.builds(lambda names: KeepNamed(*names), st.lists(NAMES, min_size=1, max_size=3)),
    st.builds(lambda pattern: KeepNamed(pattern=pattern), st.sampled_from(["*", "*0", "b*", "?"])),
)
POLICIES = st.lists(SINGLE_POLICIES, min_size=1, max_size=4).map(lambda policies: reduce(or_, policies))
PROTECTED = st.frozensets(NAMES, max_size=3)

law = settings(deadline=None, max_examples=200)  # no deadline: a busy machine is not a broken law


def kept(plan: RetentionPlan) -> set[str]:
    return {decision.name for decision in plan.keep}


@law
@given(listings(), POLICIES, PROTECTED)
def test_no_policy_overrides_the_floors(
    found: list[Candidate], policy: RetentionPolicy, protected: frozenset[str]
) -> None:
    plan = plan_retention(found, policy, now=NOW, protected=protected)
    deleted = [item for item in found if item.name not in kept(plan)]
    assert not [item for item in deleted if item.step is None or item.is_damaged or item.is_pinned]
    assert not {item.name for item in deleted} & protected
    sound = [item for item in found if item.step is not None and not item.is_damaged]
    for item in deleted:
        assert any((other.step or 0) > (item.step or 0) for other in sound)
    dated = [item.committed_at for item in sound if item.committed_at is not None]
    # Whatever was committed at the last moment stays, at least one of them.
    assert not dated or max(dated) in [item.committed_at for item in sound if item.name in kept(plan)]


@law
@given(listings(), POLICIES, PROTECTED)
def test_a_plan_says_of_every_name_once_that_it_stays_or_goes_and_why(
    found: list[Candidate], policy: RetentionPolicy, protected: frozenset[str]
) -> None:
    plan = plan_retention(found, policy, now=NOW, protected=protected)
    decisions = [*plan.keep, *plan.delete]
    assert sorted(decision.name for decision in decisions) == sorted(item.name for item in found)
    assert all(decision.reason for decision in decisions)


@law
@given(listings(), POLICIES, POLICIES)
def test_joining_another_policy_only_keeps_more(
    found: list[Candidate], first: RetentionPolicy, second: RetentionPolicy
) -> None:
    joined = plan_retention(found, first | second, now=NOW)
    apart = [kept(plan_retention(found, policy, now=NOW)) for policy in (first, second)]
    assert kept(joined) == apart[0] | apart[1]


@law
@given(listings(), POLICIES, st.randoms(use_true_random=False))
def test_the_order_of_a_listing_does_not_matter(
    found: list[Candidate], policy: RetentionPolicy, random: Any
) -> None:
    shuffled = random.sample(found, len(found))
    assert judge(policy, shuffled) == judge(policy, found)
    assert plan_retention(shuffled, policy, now=NOW) == plan_retention(found, policy, now=NOW)


@law
@given(listings(), st.integers(1, 50), STEPS)
def test_a_higher_step_never_displaces_one_that_is_kept_every_so_many_steps(
    found: list[Candidate], length: int, above: int
) -> None:
    policy = KeepEvery(steps=length)
    newer = step(max((item.step or 0 for item in found), default=0) + above + 1)
    assert reasons(policy, found).items() <= reasons(policy, [*found, newer]).items()


@law
@given(listings(), st.floats(0.01, 100), st.integers(0, 50), STEPS)
def test_a_later_save_never_displaces_one_that_is_kept_every_so_many_hours(
    found: list[Candidate], hours: float, later: int, above: int
) -> None:
    policy = KeepEvery(hours=hours)
    latest = max((item.committed_at for item in found if item.committed_at is not None), default=NOW)
    newer = step(max((item.step or 0 for item in found), default=0) + above + 1)
    newer = replace(newer, committed_at=latest + later * HOUR / 10)
    assert reasons(policy, found).items() <= reasons(policy, [*found, newer]).items()


@law
@given(st.lists(STEPS, unique=True, min_size=1, max_size=30), st.integers(1, 50), st.integers(1, 5))
def test_pruning_after_every_save_keeps_what_one_pruning_at_the_end_would(
    numbers: list[int], length: int, count: int
) -> None:
    policy = KeepLast(count) | KeepEvery(steps=length)
    left: list[Candidate] = []
    for number in sorted(numbers):
        left.append(step(number))
        left = [item for item in left if item.name in kept(plan_retention(left, policy, now=NOW))]
    assert {item.name for item in left} == kept(plan_retention(steps(*numbers), policy, now=NOW))
