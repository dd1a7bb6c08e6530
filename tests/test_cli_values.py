"""The command line's pure parts: what arguments mean, and how values look."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

import click
import pytest

from remote_ckpt.cli.access import Access, fitting_access
from remote_ckpt.cli.table import Cell, Column, Painted, format_table
from remote_ckpt.cli.text import (
    escape,
    format_age,
    format_age_of,
    format_bytes,
    format_metrics,
    format_moment,
)
from remote_ckpt.cli.values import (
    Best,
    parse_best,
    parse_duration,
    parse_metadata,
    parse_metric,
    parse_storage_option,
)
from remote_ckpt.url import parse_location


class TestSizesAndAges:
    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (99 * 1024, "99.0 KiB"),
            (100 * 1024, "100 KiB"),
            (1024**2 - 1, "1.0 MiB"),
            (5 * 1024**3, "5.0 GiB"),
            (3 * 1024**6, "3.0 EiB"),
            (3000 * 1024**6, "3000 EiB"),
        ],
    )
    def test_sizes_have_three_digits_and_binary_units(self, count: int, text: str) -> None:
        assert format_bytes(count) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0.4, "0s"),
            (59.9, "59s"),
            (60, "1m"),
            (3599, "59m"),
            (3600, "1h"),
            (3660, "1h1m"),
            (86399, "23h59m"),
            (86400, "1d"),
            (90000, "1d1h"),
            (400 * 86400, "400d"),
            (-120, "-2m"),
        ],
    )
    def test_ages_have_their_two_largest_units(self, seconds: float, text: str) -> None:
        assert format_age(seconds) == text

    def test_times_are_in_utc_to_the_second(self) -> None:
        zone = timezone(timedelta(hours=2))
        moment = datetime(2026, 1, 31, 14, 0, 5, 999999, tzinfo=zone)
        assert format_moment(moment) == "2026-01-31T12:00:05Z"
        assert format_age_of(moment, now=moment + timedelta(minutes=3)) == "3m"

    def test_an_unknown_time_is_a_dash(self) -> None:
        assert (format_moment(None), format_age_of(None)) == ("-", "-")

    def test_metrics_are_sorted_and_short(self) -> None:
        metrics = {"loss": 0.123456789, "acc": math.nan, "big": 1e20}
        assert format_metrics(metrics) == "acc=nan big=1e+20 loss=0.123457"
        assert format_metrics({}) == "-"


class TestTextsOfStrangers:
    def test_control_characters_are_shown_not_obeyed(self) -> None:
        assert escape("a\x1b[2Jb\nc\r\x07") == r"a\x1b[2Jb\nc\r\x07"

    def test_direction_marks_and_lone_surrogates_too(self) -> None:
        assert escape("a\u202eb\udcffc\x9b") == r"a\u202eb\udcffc\x9b"

    def test_letters_of_all_scripts_stay(self) -> None:
        assert escape("Gewichte für 模型") == "Gewichte für 模型"


class TestTable:
    COLUMNS = (Column("name"), Column("size", is_number=True), Column("note"))

    def test_texts_stand_left_and_numbers_right_without_trailing_spaces(self) -> None:
        table = format_table(self.COLUMNS, [["a", "5 B", ""], ["long name", "10 B", "x"]], has_colours=False)
        assert table.split("\n") == [
            "name       size  note",
            "a           5 B",
            "long name  10 B  x",
        ]

    def test_nothing_is_cut_or_wrapped(self) -> None:
        table = format_table(self.COLUMNS, [["n" * 300, "1 B", "w" * 300]], has_colours=False)
        assert table.split("\n")[1] == f"{'n' * 300}   1 B  {'w' * 300}"

    def test_wide_letters_take_two_columns_and_accents_none(self) -> None:
        rows = [["模型", "1", "x"], ["e\u0301t\u00e9", "2", "x"], ["four", "3", "x"]]
        lines = format_table(self.COLUMNS, rows, has_colours=False).split("\n")
        assert lines[1:] == ["模型     1  x", "e\u0301t\u00e9      2  x", "four     3  x"]

    def test_colours_do_not_shift_columns(self) -> None:
        rows: list[list[Cell]] = [[Painted("a", "red"), "1", "x"], ["bb", "2", "x"]]
        plain = format_table(self.COLUMNS, rows, has_colours=False)
        painted = format_table(self.COLUMNS, rows, has_colours=True)
        assert "\x1b" not in plain
        assert painted.split("\n")[1] == "\x1b[31ma\x1b[0m        1  x"
        assert painted.replace("\x1b[31m", "").replace("\x1b[2m", "").replace("\x1b[0m", "") == plain


class TestDurations:
    @pytest.mark.parametrize(
        ("text", "seconds"), [("90s", 90), ("30m", 1800), ("24h", 86400), ("7d", 604800), ("1.5h", 5400)]
    )
    def test_a_number_and_a_unit(self, text: str, seconds: float) -> None:
        assert parse_duration(text) == timedelta(seconds=seconds)

    @pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1w", "1h30m", "1 h", "nan", "99999999999d", "٣h"])
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(click.BadParameter):
            parse_duration(text)


class TestBest:
    @pytest.mark.parametrize(
        ("text", "best"),
        [
            ("loss", Best("loss", 1, "min")),
            ("loss:3", Best("loss", 3, "min")),
            ("acc:2:max", Best("acc", 2, "max")),
            ("acc:max", Best("acc", 1, "max")),
            ("val:acc:max", Best("val:acc", 1, "max")),
            ("a:3:1", Best("a:3", 1, "min")),
        ],
    )
    def test_metric_count_and_mode(self, text: str, best: Best) -> None:
        assert parse_best(text) == best

    @pytest.mark.parametrize("text", ["", "loss:0"])
    def test_no_metric_or_no_count_is_refused(self, text: str) -> None:
        with pytest.raises(click.BadParameter):
            parse_best(text)


class TestPairs:
    @pytest.mark.parametrize(
        ("text", "pair"),
        [
            ("anon=true", ("anon", True)),
            ("retries=3", ("retries", 3)),
            ('client_kwargs={"region_name": "eu"}', ("client_kwargs", {"region_name": "eu"})),
            ("region=eu-west-1", ("region", "eu-west-1")),
            ("note=a=b", ("note", "a=b")),
            ("empty=", ("empty", "")),
            ("x=NaN", ("x", "NaN")),
        ],
    )
    def test_a_storage_option_is_json_or_else_text(self, text: str, pair: tuple[str, object]) -> None:
        assert parse_storage_option(text) == pair

    @pytest.mark.parametrize("key", ["key", "secret", "token", "account_key", "aws_access_key_id"])
    def test_a_secret_of_digits_stays_a_text(self, key: str) -> None:
        assert parse_storage_option(f"{key}=0123") == (key, "0123")
        assert parse_storage_option(f"{key}=12345") == (key, "12345")
        assert parse_storage_option(f"{key}=true") == (key, "true")

    def test_an_error_does_not_repeat_what_may_be_a_secret(self) -> None:
        with pytest.raises(click.BadParameter) as caught:
            parse_storage_option("hunter2")
        assert "hunter2" not in caught.value.format_message()

    def test_metrics_are_numbers_nan_and_infinity_included(self) -> None:
        assert parse_metric("loss=-1.5e3") == ("loss", -1500.0)
        assert parse_metric("loss=inf") == ("loss", math.inf)
        assert math.isnan(parse_metric("loss=nan")[1])
        with pytest.raises(click.BadParameter, match="'low' is no number"):
            parse_metric("loss=low")

    def test_metadata_is_json_or_else_text(self) -> None:
        assert parse_metadata('note={"a": [1, null]}') == ("note", {"a": [1, None]})
        assert parse_metadata("note=two words") == ("note", "two words")


class TestSecondStore:
    """With which options the target of a copy, or the other side of a comparison, is opened."""

    GIVEN = Access({"endpoint_url": "http://one"}, "obstore")

    def test_its_own_options_win(self) -> None:
        own = Access({"endpoint_url": "http://two"})
        s3 = parse_location("s3://bucket/run")
        assert fitting_access(self.GIVEN, s3, s3, own) is own

    @pytest.mark.parametrize("source", ["s3://bucket/run", "/run"])
    def test_without_them_it_is_opened_like_the_first(self, source: str) -> None:
        target = parse_location("s3://other/run")
        assert fitting_access(self.GIVEN, parse_location(source), target, None) is self.GIVEN

    def test_options_of_one_kind_of_store_are_not_given_to_another(self) -> None:
        source, target = parse_location("s3://bucket/run"), parse_location("gs://bucket/run")
        access = fitting_access(self.GIVEN, source, target, None)
        assert (access.storage_options, access.transport) == ({}, None)


def test_access_does_not_show_its_options() -> None:
    assert "hunter2" not in repr(Access({"secret": "hunter2"}))
