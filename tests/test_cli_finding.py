"""``ls``, ``latest``, ``best``: what is printed of what a run's directory holds."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import protocol
import pytest
from cli_runs import run, run_json, run_script

from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.keys import manifest_key
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store

_numbers = itertools.count()


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://cli-{next(_numbers)}/run" if request.param == "memory" else str(tmp_path / "run")


@contextmanager
def opened(url: str) -> Iterator[Store]:
    with closing(open_store(url)) as root:
        yield root


def save(url: str, *names: str) -> None:
    with opened(url) as root:
        for name in names:
            protocol.save(root, b"x", name=name)


@pytest.fixture
def filled(url: str) -> str:
    """Two steps, one of them pinned and with metrics, and a named one."""
    save(url, "9", "10", "best")
    with opened(url) as root:
        set_pinned(root.scope("10"), True)
        annotate(root.scope("10"), metrics={"loss": 0.25, "acc": float("nan")})
    return url


class TestLs:
    def test_a_table_with_steps_by_number_and_named_ones_last(self, filled: str) -> None:
        listed = run("ls", filled)
        assert (listed.code, listed.stderr) == (0, "")
        heading = ["name", "committed", "age", "size", "ranks", "formats", "flags", "metrics"]
        assert listed.rows[0] == heading
        assert [row[0] for row in listed.rows[1:]] == ["9", "10", "best"]
        assert listed.rows[2][4:] == ["1", "remote_ckpt,dcp", "pinned", "acc=nan loss=0.25"]
        assert listed.rows[1][4:] == ["1", "remote_ckpt,dcp", "-", "-"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", listed.rows[1][1])

    def test_columns_are_aligned(self, filled: str) -> None:
        lines = run("ls", filled).lines
        assert len({line.index("remote_ckpt,dcp") for line in lines[1:]}) == 1
        ends = {re.search(r"\d+ B", line).end() for line in lines[1:]}  # type: ignore[union-attr]
        assert ends == {lines[0].index("size") + len("size")}

    def test_json_names_what_is_known_with_units_and_times_in_utc(self, filled: str) -> None:
        document = run_json("ls", filled)
        assert set(document) == {"root", "checkpoints"}
        assert document["root"] == filled
        pinned = document["checkpoints"][1]
        assert set(pinned) == {
            *("name", "step", "url", "kind", "formats", "committed_at", "total_bytes", "object_count"),
            *("world_size", "metrics", "metadata", "pinned", "generation", "save_id", "torch_version"),
            *("package_version", "left_out", "content_digest", "problem"),
        }
        assert (pinned["name"], pinned["step"], pinned["pinned"], pinned["generation"]) == ("10", 10, True, 3)
        assert pinned["metrics"] == {"acc": "nan", "loss": 0.25}
        assert pinned["url"] == f"{filled}/10"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", pinned["committed_at"])
        assert pinned["total_bytes"] > 0
        assert document["checkpoints"][2]["step"] is None

    def test_a_pattern_is_one_only_in_its_option(self, filled: str) -> None:
        names = [
            info["name"]
            for info in run_json("ls", filled, "--pattern", "1*", "--pattern", "b?st")["checkpoints"]
        ]
        assert names == ["10", "best"]
        none = run("ls", filled, "--pattern", "x*")
        assert (none.code, none.stdout) == (0, f"no checkpoint in {filled} has such a name\n")

    def test_an_empty_directory_is_said_plainly_and_is_no_error(self, url: str, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        listed = run("ls", url)
        assert (listed.code, listed.stdout, listed.stderr) == (0, f"no checkpoints in {url}\n", "")
        assert run_json("ls", url) == {"root": url, "checkpoints": []}

    def test_a_folder_that_is_not_there_is_told_from_an_empty_one(self, tmp_path: Path) -> None:
        missing = tmp_path / "typo"
        assert run("ls", missing).stdout == f"no checkpoints in {missing}, which does not exist\n"

    def test_a_checkpoint_that_is_given_for_a_directory_is_recognised(self, filled: str) -> None:
        listed = run("ls", f"{filled}/9")
        assert (listed.code, listed.stdout) == (
            0,
            f"no checkpoints in {filled}/9, which is a checkpoint itself: see remote-ckpt info\n",
        )

    def test_a_damaged_one_is_listed_and_its_problem_is_a_warning(self, filled: str) -> None:
        with opened(filled) as root:
            root.write(f"9/{manifest_key(1)}", b"{")
        listed = run("ls", filled, "--json")
        assert listed.code == 0
        assert listed.stderr.startswith("warning: 9 is damaged: ")
        damaged = listed.document["checkpoints"][0]
        assert damaged["problem"] in listed.stderr
        assert (damaged["name"], damaged["total_bytes"], damaged["committed_at"]) == ("9", 0, None)
        row = run("ls", filled).rows[1]
        assert row == ["9", "-", "-", "-", "-", "remote_ckpt", "damaged", "-"]

    def test_what_others_wrote_does_not_reach_the_terminal(self, url: str) -> None:
        save(url, "1")
        with opened(url) as root:
            annotate(root.scope("1"), metrics={"\x1b[2Jloss\n": 1.0})
        listed = run("ls", url)
        assert "\x1b" not in listed.stdout
        assert listed.rows[1][-1] == r"\x1b[2Jloss\n=1"
        assert run_json("ls", url)["checkpoints"][0]["metrics"] == {"\x1b[2Jloss\n": 1.0}

    def test_stock_checkpoints_are_listed_by_their_format(self, url: str) -> None:
        with opened(url) as root:
            root.write("5/.metadata", b"stock")
            root.write("5/__0_0.distcp", b"stock")
        assert run("ls", url).rows[1][3:] == ["10 B", "-", "dcp", "-", "-"]


class TestLatest:
    def test_it_prints_the_path_and_nothing_else(self, filled: str) -> None:
        found = run("latest", filled)
        assert (found.code, found.stdout, found.stderr) == (0, f"{filled}/10\n", "")
        assert run_json("latest", filled)["checkpoint"]["name"] == "10"

    def test_none_is_an_exit_code_of_its_own_and_nothing_on_stdout(self, url: str) -> None:
        found = run("latest", url)
        assert (found.code, found.stdout) == (3, "")
        assert found.stderr == f"error: no checkpoint with a step in {url}\n"

    def test_a_damaged_one_is_passed_over_with_a_warning_in_json_too(self, filled: str) -> None:
        with opened(filled) as root:
            root.write(f"10/{manifest_key(4)}", b"{")
        found = run("latest", filled, "--json")
        assert found.document["checkpoint"]["name"] == "9"
        assert found.stderr.startswith("warning: ")
        assert "passing over the damaged checkpoint 10" in found.stderr

    def test_with_verify_one_that_lacks_an_object_is_passed_over(self, filled: str) -> None:
        with opened(filled) as root:
            root.delete([next(info.key for info in root.list("10/") if info.key.endswith(".distcp"))])
        assert run("latest", filled).stdout == f"{filled}/10\n"
        found = run("latest", filled, "--verify")
        assert (found.code, found.stdout) == (0, f"{filled}/9\n")
        assert "passing over 10" in found.stderr

    def test_a_newer_format_is_an_error_and_not_passed_over(self, filled: str) -> None:
        with opened(filled) as root:
            root.write(f"11/{manifest_key(1)}", b'{"format": "remote_ckpt", "version": [9, 0]}')
        found = run("latest", filled)
        assert (found.code, found.stdout) == (6, "")
        assert "use a newer remote_ckpt" in found.stderr


class TestBest:
    @pytest.fixture
    def rated(self, url: str) -> str:
        save(url, "1", "2", "3")
        with opened(url) as root:
            for name, loss in (("1", 0.5), ("2", 0.1), ("3", 0.9)):
                annotate(root.scope(name), metrics={"loss": loss})
        return url

    def test_the_lowest_or_highest_value_of_a_metric(self, rated: str) -> None:
        assert run("best", rated, "--metric", "loss").stdout == f"{rated}/2\n"
        assert run("best", rated, "--metric", "loss", "--mode", "max").stdout == f"{rated}/3\n"
        assert run_json("best", rated, "--metric", "loss")["checkpoint"]["metrics"] == {"loss": 0.1}

    def test_no_value_anywhere_is_not_found(self, rated: str) -> None:
        found = run("best", rated, "--metric", "acc")
        assert (found.code, found.stdout) == (3, "")
        assert found.stderr == f"error: no checkpoint with the metric 'acc' in {rated}\n"

    def test_the_metric_must_be_given(self, rated: str) -> None:
        assert run("best", rated).code == 2


class TestNames:
    """Nothing in a path is a pattern or an escape."""

    @pytest.mark.parametrize(
        "name",
        [
            "a?b",
            "a*b",
            "[1]",
            "two words",
            "a+b",
            "a#b",
            "a%20b",
            "Läufe 模型",
            "-run",
            "{x}",
            "a\\b",
            "a'b\"c",
        ],
    )
    def test_a_local_root_is_taken_literally(self, tmp_path: Path, name: str) -> None:
        root = tmp_path / name
        save(str(root), "1")
        save(str(tmp_path / "axb"), "2")  # what a pattern would find
        assert run("ls", root).rows[1][0] == "1"
        assert run_json("latest", root)["checkpoint"]["url"] == str(root / "1")
        assert run("latest", root).stdout == f"{root}/1\n"

    @pytest.mark.parametrize("name", ["a?b", "a*b", "[1]", "two words", "a+b", "a#b", "a%20b", "Läufe 模型"])
    def test_so_is_a_url(self, name: str) -> None:
        url = f"memory://names-{next(_numbers)}/{name}"
        save(url, "1")
        assert run("latest", url).stdout == f"{url}/1\n"
        assert run("info", f"{url}/1", "--no-contents").code == 0

    def test_a_relative_root_works_from_within(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(str(tmp_path / "run"), "1")
        monkeypatch.chdir(tmp_path / "run")
        assert run("latest", ".").stdout == f"{tmp_path}/run/1\n"
        assert run("info", "1", "--no-contents").lines[0] == "1"

    def test_a_root_that_begins_with_a_dash_follows_two_dashes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(str(tmp_path / "-run"), "1")
        monkeypatch.chdir(tmp_path)
        assert run("latest", "--", "-run").stdout == f"{tmp_path}/-run/1\n"

    def test_a_path_that_is_no_utf_8_is_printed_as_it_is_for_scripts(self, tmp_path: Path) -> None:
        root = os.fsdecode(os.fsencode(str(tmp_path)) + b"/r\xff")
        save(root, "1")
        assert run_script("latest", root).stdout == f"{root}/1\n"
        assert "r\\udcff" in run("verify", f"{root}/1").stdout
        assert run_json("ls", root)["root"] == root

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("s3://bucket/a\x1bb", "control characters"),
            ("s3://bucket/../x", "'..' is not allowed"),
            ("s3://bu?cket/run", "not a valid name"),
            ("nosuch://x/y", "unknown scheme"),
            ("", "non-empty"),
        ],
    )
    def test_what_cannot_be_used_is_refused_with_the_reason(self, url: str, reason: str) -> None:
        refused = run("ls", url)
        assert (refused.code, refused.stdout) == (2, "")
        assert refused.stderr.startswith("error: ")
        assert reason in refused.stderr
        assert "\x1b" not in refused.stderr

    def test_a_checkpoint_needs_a_name_that_can_be_one(self, url: str) -> None:
        assert "cannot name a checkpoint" in run("info", f"{url}/two words").stderr
        assert run("info", f"{url}/two words").code == 2


def test_deleted_and_half_made_ones_are_not_listed(url: str) -> None:
    save(url, "1", "2")
    with opened(url) as root:
        delete_checkpoint(root.scope("2"))
        protocol.upload(root.scope("3", create=True), b"half", name="3")
    assert [row[0] for row in run("ls", url).rows] == ["name", "1"]
