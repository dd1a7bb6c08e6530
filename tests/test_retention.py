"""Retention plans: what is kept, what is deleted, and the floors that no setting overrides."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from typing import Any

import pytest

from remote_ckpt.errors import ConfigError
from remote_ckpt.policies import (
    JoinedPolicy,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepNamed,
    KeepWithin,
    RetentionPolicy,
)
from remote_ckpt.retention import (
    Candidate,
    CheckpointRetentionPolicy,
    RetentionPlan,
    format_plan,
    plan_cleanup,
    plan_keep_last,
    plan_retention,
)

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
NOW = START + timedelta(days=1)
NOTHING = JoinedPolicy(())
"""A policy that keeps nothing: what stays under it, stays by the floors."""


def candidate(
    name: str,
    *,
    is_pinned: bool = False,
    is_damaged: bool = False,
    at: int | None = None,
    **metrics: float,
) -> Candidate:
    return Candidate(
        name=name,
        step=int(name) if name.isdigit() else None,
        is_pinned=is_pinned,
        is_damaged=is_damaged,
        committed_at=None if at is None else START + timedelta(seconds=at),
        metrics=metrics,
    )


def steps(*numbers: int) -> list[Candidate]:
    return [candidate(str(number), at=number) for number in numbers]


def deleted(plan: RetentionPlan) -> list[str]:
    return [decision.name for decision in plan.delete]


def kept(plan: RetentionPlan) -> dict[str, str]:
    return {decision.name: decision.reason for decision in plan.keep}


class TestKeepLast:
    def test_br15_steps_are_compared_as_numbers(self) -> None:
        assert deleted(plan_keep_last(steps(500, 2500, 9000, 10000), 1)) == ["500", "2500", "9000"]

    @pytest.mark.parametrize("count", [None, -1])
    def test_br22_none_and_minus_one_keep_all(self, count: int | None) -> None:
        plan = plan_keep_last(steps(1, 2, 3), count)
        assert deleted(plan) == []
        assert list(kept(plan)) == ["1", "2", "3"]

    @pytest.mark.parametrize("count", [0, -2])
    def test_br22_zero_and_other_negative_counts_are_refused(self, count: int) -> None:
        with pytest.raises(ConfigError, match=f"last {count} "):
            plan_keep_last(steps(1), count)

    @pytest.mark.parametrize("count", [1.5, 2.0, True, False, "3"])
    def test_a_count_that_is_no_integer_is_refused(self, count: Any) -> None:
        with pytest.raises(ConfigError, match=f"last {count} "):
            plan_keep_last(steps(1), count)

    @pytest.mark.parametrize(("count", "expected"), [(1, ["1", "2"]), (2, ["1"]), (10, [])])
    def test_br22_the_newest_is_never_deleted(self, count: int, expected: list[str]) -> None:
        assert deleted(plan_keep_last(steps(1, 2, 3), count)) == expected

    @pytest.mark.parametrize(("count", "expected"), [(1, ["500", "600"]), (3, [])])
    def test_br23_the_one_committed_last_survives_below_higher_steps(
        self, count: int, expected: list[str]
    ) -> None:
        again = [*steps(500, 600, 700), candidate("100", at=9999)]
        plan = plan_keep_last(again, count)
        assert deleted(plan) == expected
        assert kept(plan)["100"] == "committed last"
        assert "higher steps exist (up to 700)" in plan.warnings[0]

    def test_br26_names_that_are_no_steps_are_kept(self) -> None:
        names = [*steps(10, 20), candidate("best"), candidate("step-20-backup"), candidate("10_keep")]
        plan = plan_keep_last(names, 1)
        assert deleted(plan) == ["10"]
        assert kept(plan)["10_keep"] == "not a step"

    def test_a_pinned_step_is_kept(self) -> None:
        plan = plan_keep_last([candidate("1", is_pinned=True), *steps(2, 3)], 1)
        assert deleted(plan) == ["2"]
        assert kept(plan)["1"] == "pinned"

    def test_a_protected_step_is_kept(self) -> None:
        plan = plan_keep_last(steps(1, 2, 3), 1, protected={"1"})
        assert deleted(plan) == ["2"]
        assert kept(plan)["1"].startswith("protected")

    def test_a_damaged_step_is_kept_and_does_not_take_a_sound_ones_place(self) -> None:
        plan = plan_keep_last([*steps(1, 2), candidate("3", is_damaged=True)], 1)
        assert deleted(plan) == ["1"]
        assert kept(plan)["2"] == "among the last 1"
        assert kept(plan)["3"].startswith("damaged")

    def test_without_times_the_numbers_decide(self) -> None:
        plan = plan_keep_last([candidate("1"), candidate("2")], 1)
        assert deleted(plan) == ["1"]
        assert plan.warnings == ()

    def test_nothing_gives_an_empty_plan(self) -> None:
        assert plan_keep_last([], 1) == RetentionPlan((), ())

    @pytest.mark.parametrize("count", [None, -1])
    def test_br22_keeping_all_names_that_as_the_reason(self, count: int | None) -> None:
        plan = plan_keep_last([*steps(1, 2), candidate("best")], count)
        assert kept(plan) == {"1": "all are kept", "2": "all are kept", "best": "not a step; all are kept"}

    @pytest.mark.parametrize(("count", "policy"), [(None, KeepAll()), (-1, KeepAll()), (2, KeepLast(2))])
    def test_it_is_the_plan_of_the_policy(self, count: int | None, policy: RetentionPolicy) -> None:
        found = [*steps(5, 10, 11), candidate("7", at=99), candidate("best"), candidate("6", is_pinned=True)]
        expected = plan_retention(found, policy, now=NOW, protected={"5"})
        assert plan_keep_last(found, count, protected={"5"}) == expected


class TestFloors:
    def test_the_newest_step_stays_and_says_so_only_where_no_policy_keeps_it(self) -> None:
        assert kept(plan_retention(steps(1, 2), NOTHING, now=NOW)) == {"2": "the newest step"}
        assert kept(plan_retention(steps(1, 2), KeepLast(1), now=NOW)) == {"2": "among the last 1"}

    def test_the_newest_is_the_highest_that_can_be_read(self) -> None:
        found = [*steps(1, 2), candidate("3", is_damaged=True)]
        assert kept(plan_retention(found, NOTHING, now=NOW)) == {
            "2": "the newest step",
            "3": "damaged: look at it first",
        }

    def test_the_one_committed_last_stays_and_of_equal_times_it_is_the_newest(self) -> None:
        again = [*steps(500, 600), candidate("100", at=600)]
        assert kept(plan_retention(again, NOTHING, now=NOW)) == {"600": "the newest step"}
        again[-1] = candidate("100", at=601)
        assert kept(plan_retention(again, NOTHING, now=NOW)) == {
            "100": "committed last",
            "600": "the newest step",
        }

    def test_a_damaged_one_is_not_the_one_committed_last(self) -> None:
        found = [*steps(500, 600), candidate("100", at=9999, is_damaged=True)]
        assert plan_retention(found, NOTHING, now=NOW).warnings == ()

    def test_all_reasons_of_floors_and_policies_are_told(self) -> None:
        found = [
            candidate("1", is_pinned=True, at=99, loss=0.25),
            candidate("2", loss=0.5),
            candidate("3", loss=1.0),
            candidate("best", is_pinned=True, is_damaged=True),
        ]
        plan = plan_retention(
            found, KeepBest("loss") | KeepNamed("best"), now=NOW, protected={"1", "no such checkpoint"}
        )
        assert kept(plan) == {
            "1": "pinned; protected: in use by this run; committed last; best loss (0.25)",
            "3": "the newest step",
            "best": "pinned; damaged: look at it first; not a step; kept by name",
        }

    def test_what_goes_is_told_with_the_whole_policy(self) -> None:
        plan = plan_retention(steps(1, 2), KeepNamed("best") | KeepEvery(steps=10), now=NOW)
        assert kept(plan) == {"1": "first of steps 0 to 9", "2": "the newest step"}
        plan = plan_retention(steps(11, 12, 13), KeepNamed("best") | KeepEvery(steps=10), now=NOW)
        words = "not kept by KeepNamed('best') | KeepEvery(steps=10)"
        assert [(decision.name, decision.reason) for decision in plan.delete] == [("12", words)]

    @pytest.mark.parametrize("policy", [NOTHING, KeepAll(), KeepEvery(steps=100), KeepBest("loss")])
    def test_br23_every_automatic_plan_warns_of_older_higher_steps_before_all_else(
        self, policy: RetentionPolicy
    ) -> None:
        again = [*steps(500, 600, 700), candidate("100", at=9999)]
        warnings = plan_retention(again, policy, now=NOW).warnings
        assert warnings[0] == (
            "checkpoint 100 was committed last, but older ones with higher steps exist (up to 700); "
            "they count as the last ones"
        )
        assert len(warnings) == (2 if policy == KeepBest("loss") else 1)

    def test_time_is_counted_from_now(self) -> None:
        found = [candidate("1", at=0), candidate("2", at=10), candidate("3", at=20)]
        plan = plan_retention(found, KeepWithin(timedelta(seconds=90)), now=START + timedelta(seconds=100))
        assert deleted(plan) == ["1"]

    @pytest.mark.parametrize("policy", [3, None, CheckpointRetentionPolicy.LAST])
    def test_only_a_policy_is_a_policy(self, policy: Any) -> None:
        with pytest.raises(ConfigError, match=r"is no retention policy: give one such as KeepLast\(3\)"):
            plan_retention([], policy, now=NOW)

    def test_a_now_without_time_zone_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="now must have a time zone"):
            plan_retention([], KeepAll(), now=datetime(2026, 1, 1))


BR_15 = steps(500, 2500, 9000, 10000)
BR_22 = steps(1, 2, 3)
BR_23 = [*steps(500, 600, 700), candidate("100", at=9999)]
BR_26 = [*steps(10, 20), candidate("step-20-backup"), candidate("mystep-5"), candidate("notes")]
"""A save in progress (30) and leftovers (15) are no candidates: no listing of checkpoints shows them."""


@pytest.mark.parametrize(
    ("found", "policy", "expected"),
    [
        pytest.param(BR_15, KeepLast(1), ["500", "2500", "9000"], id="br15-last"),
        pytest.param(BR_15, KeepEvery(steps=5000), ["2500"], id="br15-every"),
        pytest.param(BR_15, NOTHING, ["500", "2500", "9000"], id="br15-floor"),
        pytest.param(BR_22, KeepAll(), [], id="br22-all"),
        pytest.param(BR_22, KeepLast(10), [], id="br22-more-than-there-are"),
        pytest.param(BR_22, NOTHING, ["1", "2"], id="br22-none"),
        pytest.param(BR_23, KeepLast(3), [], id="br23-three"),
        pytest.param(BR_23, KeepLast(1), ["500", "600"], id="br23-one"),
        pytest.param(BR_23, NOTHING, ["500", "600"], id="br23-floor"),
        pytest.param(BR_26, KeepLast(1), ["10"], id="br26-last"),
        pytest.param(BR_26, KeepNamed(pattern="step-*"), ["10"], id="br26-pattern"),
    ],
)
def test_field_cases_delete_exactly_these(
    found: list[Candidate], policy: RetentionPolicy, expected: list[str]
) -> None:
    assert deleted(plan_retention(found, policy, now=NOW)) == expected


class TestCleanup:
    CHILDREN = (*steps(1, 2), candidate("best"), candidate("final"), candidate("2_keep"))

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            ("all", []),
            ("best", ["1", "2", "2_keep", "final"]),
            ("last", ["1", "2", "2_keep", "best"]),
            ("last_and_best", ["1", "2", "2_keep"]),
            ("none", ["1", "2", "2_keep", "best", "final"]),
        ],
    )
    def test_each_policy_keeps_what_it_names(self, policy: str, expected: list[str]) -> None:
        assert deleted(plan_cleanup(self.CHILDREN, CheckpointRetentionPolicy(policy))) == expected

    def test_it_tells_why_each_stays_or_goes(self) -> None:
        found = [*steps(1), candidate("best", is_pinned=True), candidate("final")]
        plan = plan_cleanup(found, CheckpointRetentionPolicy.LAST_AND_BEST)
        assert kept(plan) == {"best": "pinned; kept by name", "final": "kept by name"}
        assert [decision.reason for decision in plan.delete] == ["policy last_and_best does not keep it"]

    def test_a_damaged_final_stays_and_the_newest_step_that_can_be_read_stands_in_for_it(self) -> None:
        found = [*steps(1, 2), candidate("3", is_damaged=True), candidate("final", is_damaged=True)]
        plan = plan_cleanup(found, CheckpointRetentionPolicy.LAST)
        assert deleted(plan) == ["1", "3"]
        assert kept(plan) == {"2": "the last step, as there is no final", "final": "kept by name"}

    @pytest.mark.parametrize("policy", CheckpointRetentionPolicy)
    def test_it_keeps_what_the_filters_of_the_seed_name(self, policy: CheckpointRetentionPolicy) -> None:
        found = [candidate(name) for name in ("1", "best", "final", "final_keep", "x")]
        patterns = sorted(policy.keep_filters)
        by_filters = [item.name for item in found if any(fnmatchcase(item.name, p) for p in patterns)]
        assert list(kept(plan_cleanup(found, policy))) == by_filters

    def test_only_pins_bind_an_explicit_cleanup(self) -> None:
        plan = plan_cleanup([candidate("1", is_pinned=True), *steps(2)], CheckpointRetentionPolicy.NONE)
        assert deleted(plan) == ["2"]
        assert kept(plan) == {"1": "pinned"}

    @pytest.mark.parametrize("policy", ["last", "last_and_best"])
    def test_the_newest_step_stands_in_for_a_missing_final(self, policy: str) -> None:
        plan = plan_cleanup(steps(9, 10), CheckpointRetentionPolicy(policy))
        assert deleted(plan) == ["9"]
        assert kept(plan)["10"] == "the last step, as there is no final"

    def test_best_alone_does_not_keep_a_step(self) -> None:
        assert deleted(plan_cleanup(steps(9), CheckpointRetentionPolicy.BEST)) == ["9"]


def test_the_policies_have_the_values_and_filters_of_the_seed() -> None:
    filters = {
        policy.value: (policy.keep_filters, policy.max_to_keep) for policy in CheckpointRetentionPolicy
    }
    assert filters == {
        "all": ({"*"}, None),
        "best": ({"best"}, 1),
        "last": ({"final"}, 1),
        "last_and_best": ({"final", "best"}, 1),
        "none": (set(), 1),
    }


def test_a_plan_prints_verb_name_and_reason_and_then_the_warnings() -> None:
    plan = plan_keep_last([*steps(5, 10), candidate("7", at=99)], 1)
    assert format_plan(plan).splitlines() == [
        "keep    7   committed last",
        "keep    10  among the last 1",
        "delete  5   older than the last 1",
        "warning: checkpoint 7 was committed last, but older ones with higher steps exist "
        "(up to 10); they count as the last ones",
    ]


def test_a_plan_by_policies_prints_like_any_other() -> None:
    found = [*steps(1000, 1500, 2000), candidate("best")]
    plan = plan_retention(found, KeepEvery(steps=1000) | KeepBest("loss"), now=NOW)
    assert format_plan(plan).splitlines() == [
        "keep    1000  first of steps 1000 to 1999; no loss yet",
        "keep    1500  no loss yet",
        "keep    2000  first of steps 2000 to 2999; no loss yet",
        "keep    best  not a step",
        "warning: 3 checkpoints have no loss yet and are kept: 1000, 1500, 2000",
    ]


def test_a_candidate_without_metrics_has_none_and_can_be_in_a_set() -> None:
    plain = Candidate(name="1", step=1)
    assert plain.metrics == {}
    assert {plain, candidate("1"), candidate("1", loss=1.0)} == {plain, candidate("1", loss=1.0)}


@pytest.mark.parametrize("value", ["foo", None, 3])
def test_an_unknown_policy_is_refused_with_those_that_there_are(value: object) -> None:
    known = "'all', 'best', 'last', 'last_and_best', 'none'"
    with pytest.raises(ConfigError, match=f"{value!r} is no retention policy: use one of {known}"):
        CheckpointRetentionPolicy(value)
