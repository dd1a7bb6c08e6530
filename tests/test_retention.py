"""Retention plans: what is kept, what is deleted, and the floors that no setting overrides."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from remote_ckpt.errors import ConfigError
from remote_ckpt.retention import (
    Candidate,
    CheckpointRetentionPolicy,
    RetentionPlan,
    format_plan,
    plan_cleanup,
    plan_keep_last,
)

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def candidate(
    name: str, *, is_pinned: bool = False, is_damaged: bool = False, at: int | None = None
) -> Candidate:
    return Candidate(
        name=name,
        step=int(name) if name.isdigit() else None,
        is_pinned=is_pinned,
        is_damaged=is_damaged,
        committed_at=None if at is None else START + timedelta(seconds=at),
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


@pytest.mark.parametrize("value", ["foo", None, 3])
def test_an_unknown_policy_is_refused_with_those_that_there_are(value: object) -> None:
    known = "'all', 'best', 'last', 'last_and_best', 'none'"
    with pytest.raises(ConfigError, match=f"{value!r} is no retention policy: use one of {known}"):
        CheckpointRetentionPolicy(value)
