"""``rm``, ``prune``, ``sweep``: the plan is shown, and only ``--yes`` carries it out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import protocol
import pytest
from cli_runs import run, run_json

from remote_ckpt import resumed
from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.keys import manifest_key
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store

_numbers = itertools.count()


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    resumed.forget_all()
    return f"memory://cli-rm-{next(_numbers)}/run" if request.param == "memory" else str(tmp_path / "run")


@contextmanager
def opened(url: str) -> Iterator[Store]:
    with closing(open_store(url)) as root:
        yield root


def save(url: str, *names: str) -> None:
    with opened(url) as root:
        for name in names:
            protocol.save(root, b"x", name=name)


def names(url: str) -> list[str]:
    return [info["name"] for info in run_json("ls", url)["checkpoints"]]


def keys(url: str) -> set[str]:
    with opened(url) as root:
        return {info.key for info in root.list("")}


@pytest.fixture
def run_of_four(url: str) -> str:
    save(url, "1", "2", "3", "4")
    return url


class TestRm:
    def test_without_yes_the_plan_is_shown_and_nothing_done(self, run_of_four: str) -> None:
        before = keys(run_of_four)
        planned = run("rm", f"{run_of_four}/1", f"{run_of_four}/3")
        assert (planned.code, planned.stderr) == (0, "")
        assert planned.rows[0] == ["action", "checkpoint", "age", "size"]
        assert [row[:2] for row in planned.rows[1:3]] == [
            ["delete", f"{run_of_four}/1"],
            ["delete", f"{run_of_four}/3"],
        ]
        assert planned.lines[-1].startswith("would delete 2 checkpoints, ")
        assert planned.lines[-1].endswith("; nothing was done: give --yes")
        assert keys(run_of_four) == before

    def test_with_yes_exactly_these_are_deleted(self, run_of_four: str) -> None:
        done = run("rm", f"{run_of_four}/1", f"{run_of_four}/3", "--yes")
        assert (done.code, done.stderr) == (0, "")
        assert [row[0] for row in done.rows[1:3]] == ["deleted", "deleted"]
        assert done.lines[-1].startswith("deleted 2 checkpoints, ")
        assert names(run_of_four) == ["2", "4"]

    def test_a_checkpoint_that_is_named_twice_is_deleted_once(self, url: str, tmp_path: Path) -> None:
        save(url, "1", "2")
        twice = [f"{url}/1", f"{url}/1/", f"{url}//1"]
        if not url.startswith("memory"):
            (tmp_path / "link").symlink_to(url)
            twice.append(f"{tmp_path}/link/1")
        assert run("rm", *twice).lines[-1].startswith("would delete 1 checkpoint, ")
        assert len(run_json("info", *twice)["checkpoints"]) == 1
        assert len(run_json("verify", *twice)["checkpoints"]) == 1
        assert len(run_json("pin", *twice)["checkpoints"]) == 1
        assert len(run_json("unpin", *twice)["checkpoints"]) == 1
        done = run("rm", *twice, "--yes")
        assert (done.code, done.stderr) == (0, "")
        assert names(url) == ["2"]

    def test_where_none_could_be_deleted_the_document_says_so(self, run_of_four: str) -> None:
        missing = run("rm", f"{run_of_four}/7", "--yes", "--json")
        assert (missing.code, missing.document) == (3, {"is_dry_run": False, "checkpoints": []})

    def test_json_says_what_goes(self, run_of_four: str) -> None:
        document = run_json("rm", f"{run_of_four}/1")
        assert document["is_dry_run"] is True
        assert set(document["checkpoints"][0]) == {
            *("url", "action", "total_bytes", "committed_at", "pinned", "save_id"),
        }
        assert document["checkpoints"][0]["action"] == "delete"
        done = run_json("rm", f"{run_of_four}/1", "--yes")
        assert (done["is_dry_run"], done["checkpoints"][0]["action"]) == (False, "deleted")

    def test_a_pinned_one_stays_and_the_others_go(self, run_of_four: str) -> None:
        with opened(run_of_four) as root:
            set_pinned(root.scope("1"), True)
        assert run("rm", f"{run_of_four}/1").rows[1][0] == "refuse: pinned"
        done = run("rm", f"{run_of_four}/1", f"{run_of_four}/2", "--yes")
        assert done.code == 5
        assert "is pinned: unpin it" in done.stderr
        assert names(run_of_four) == ["1", "3", "4"]

    def test_a_star_is_no_pattern(self, run_of_four: str) -> None:
        refused = run("rm", f"{run_of_four}/*", "--yes")
        assert (refused.code, refused.stdout) == (2, "")
        assert "cannot name a checkpoint" in refused.stderr
        assert names(run_of_four) == ["1", "2", "3", "4"]

    def test_a_wrong_name_among_others_stops_before_anything_is_deleted(self, run_of_four: str) -> None:
        assert run("rm", f"{run_of_four}/1", f"{run_of_four}/", "nosuch://x/1", "--yes").code == 2
        assert names(run_of_four) == ["1", "2", "3", "4"]

    def test_one_that_is_missing_is_an_error_with_and_without_yes(self, run_of_four: str) -> None:
        for more in ((), ("--yes",)):
            missing = run("rm", f"{run_of_four}/9", *more)
            assert (missing.code, missing.stdout) == (3, "")
            assert missing.stderr.startswith("error: ")

    def test_a_damaged_one_can_be_deleted(self, run_of_four: str) -> None:
        with opened(run_of_four) as root:
            root.write(f"2/{manifest_key(1)}", b"{")
        assert run("rm", f"{run_of_four}/2").rows[1][:2] == ["delete", f"{run_of_four}/2"]
        assert run("rm", f"{run_of_four}/2", "--yes").code == 0
        assert names(run_of_four) == ["1", "3", "4"]

    def test_the_rest_of_an_interrupted_deletion_goes(self, tmp_path: Path) -> None:
        url = f"memory://cli-rm-{next(_numbers)}/run"
        save(url, "1")
        with opened(url) as root:
            data = {info.key: root.read(info.key) for info in root.list("1/") if info.key.endswith(".distcp")}
        run("rm", f"{url}/1", "--yes")
        with opened(url) as root:
            for key, content in data.items():
                root.write(key, content)
        assert run("rm", f"{url}/1").code == 3
        finished = run("rm", f"{url}/1", "--yes")
        assert (finished.code, finished.rows[1][:2]) == (0, ["finished", f"{url}/1"])
        assert not keys(url) & set(data)


class TestPrune:
    def test_without_yes_each_checkpoint_has_an_action_and_a_reason(self, run_of_four: str) -> None:
        save(run_of_four, "best")
        before = keys(run_of_four)
        planned = run("prune", run_of_four, "--keep-last", "2")
        assert (planned.code, planned.stderr) == (0, "")
        assert planned.rows[0] == ["action", "name", "age", "size", "reason"]
        actions = {row[1]: (row[0], row[-1]) for row in planned.rows[1:6]}
        assert actions["1"] == ("delete", "older than the last 2")
        assert actions["2"][0] == "delete"
        assert actions["3"] == ("keep", "among the last 2")
        assert actions["best"][0] == "keep"
        assert planned.lines[-1].startswith("would delete 2 checkpoints, ")
        assert keys(run_of_four) == before

    def test_with_yes_what_was_planned_is_deleted(self, run_of_four: str) -> None:
        done = run("prune", run_of_four, "--keep-last", "2", "--yes")
        assert (done.code, done.stderr) == (0, "")
        assert [row[:2] for row in done.rows[1:5] if row[0] != "keep"] == [["deleted", "1"], ["deleted", "2"]]
        assert done.lines[-1].startswith("deleted 2 checkpoints, ")
        assert names(run_of_four) == ["3", "4"]

    def test_json_names_action_reason_and_size(self, run_of_four: str) -> None:
        document = run_json("prune", run_of_four, "--keep-last", "3")
        assert (document["root"], document["is_dry_run"], document["failures"]) == (run_of_four, True, [])
        first = next(each for each in document["checkpoints"] if each["name"] == "1")
        assert set(first) == {"name", "action", "reason", "total_bytes", "committed_at"}
        assert (first["action"], first["reason"]) == ("delete", "older than the last 3")
        done = run_json("prune", run_of_four, "--keep-last", "3", "--yes")
        assert [each["name"] for each in done["checkpoints"] if each["action"] == "deleted"] == ["1"]

    def test_without_a_keep_option_it_is_a_wrong_call(self, run_of_four: str) -> None:
        refused = run("prune", run_of_four, "--yes")
        assert (refused.code, refused.stdout) == (2, "")
        assert "by a --keep option" in refused.stderr
        assert names(run_of_four) == ["1", "2", "3", "4"]

    def test_what_any_option_keeps_stays(self, url: str) -> None:
        save(url, *map(str, range(1, 10)))
        with opened(url) as root:
            for step in range(1, 10):
                annotate(root.scope(str(step)), metrics={"loss": abs(step - 2.0), "acc": float(step == 5)})
        options = [
            *("--keep-last", "1", "--keep-every-steps", "7", "--keep-best", "loss"),
            *("--keep-best", "acc:1:max", "--keep-named", "3", "--keep-named-pattern", "[8]"),
        ]
        assert run("prune", url, *options, "--yes").code == 0
        assert names(url) == ["1", "2", "3", "5", "7", "8", "9"]

    def test_ages_and_hours_are_options_too(self, run_of_four: str) -> None:
        assert run("prune", run_of_four, "--keep-within", "1h", "--yes").code == 0
        assert names(run_of_four) == ["1", "2", "3", "4"]
        assert run("prune", run_of_four, "--keep-every-hours", "10000", "--yes").code == 0
        assert names(run_of_four) == ["1", "4"]

    def test_a_name_is_no_pattern(self, run_of_four: str) -> None:
        assert run("prune", run_of_four, "--keep-named", "*", "--yes").code == 0
        assert names(run_of_four) == ["4"]

    def test_the_newest_and_pinned_ones_stay_whatever_is_said(self, run_of_four: str) -> None:
        with opened(run_of_four) as root:
            set_pinned(root.scope("1"), True)
        assert run("prune", run_of_four, "--keep-named", "none", "--yes").code == 0
        assert names(run_of_four) == ["1", "4"]

    @pytest.mark.parametrize(
        "options",
        [
            ("--keep-last", "0"),
            ("--keep-last", "-1"),
            ("--keep-every-steps", "0"),
            ("--keep-every-hours", "0"),
            ("--keep-every-hours", "nan"),
            ("--keep-within", "2"),
            ("--keep-within", "0s"),
            ("--keep-best", "loss:0"),
            ("--keep-named", ""),
        ],
    )
    def test_a_value_that_keeps_nothing_is_a_wrong_call(
        self, run_of_four: str, options: tuple[str, ...]
    ) -> None:
        refused = run("prune", run_of_four, *options, "--yes")
        assert (refused.code, refused.stdout) == (2, "")
        assert names(run_of_four) == ["1", "2", "3", "4"]

    def test_nothing_to_delete_is_said(self, run_of_four: str) -> None:
        assert run("prune", run_of_four, "--keep-last", "9").lines[-1] == "nothing to delete"
        assert run("prune", f"{run_of_four}-none", "--keep-last", "9").stdout == (
            f"no checkpoints in {run_of_four}-none\n"
        )


class TestSweep:
    @pytest.fixture
    def littered(self, url: str) -> str:
        """A run with a checkpoint, a save that never committed, and a superseded manifest."""
        save(url, "1")
        with opened(url) as root:
            set_pinned(root.scope("1"), True)
            protocol.upload(root.scope("2", create=True), b"half", name="2")
            newest = max(info.modified_at for info in root.list(""))
            while root.clock() <= newest:
                pass  # a disk's clock goes in ticks of some milliseconds, and the sweep wants all to be older
        return url

    def test_without_yes_garbage_is_shown_with_age_size_and_reason(self, littered: str) -> None:
        before = keys(littered)
        planned = run("sweep", littered, "--older-than", "0s")
        assert planned.code == 0
        assert planned.rows[0] == ["object", "age", "size", "reason"]
        swept = {row[0] for row in planned.rows[1:] if len(row) == 4}
        assert {key for key in before if key.startswith("2/")} <= swept
        assert f"1/{manifest_key(1)}" in swept
        assert planned.lines[-1].startswith("would remove ")
        assert planned.lines[-1].endswith("; nothing was done: give --yes")
        assert planned.stderr.startswith("warning: ")
        assert planned.stderr.count("\n") == 1
        assert keys(littered) == before

    def test_with_yes_it_is_removed_and_checkpoints_stay(self, littered: str) -> None:
        done = run("sweep", littered, "--older-than", "0s", "--yes")
        assert done.code == 0
        assert done.lines[-1].startswith("removed ")
        assert [key for key in keys(littered) if key.startswith("2/")] == []
        assert names(littered) == ["1"]
        assert run("info", f"{littered}/1", "--no-contents").code == 0

    def test_nothing_is_touched_that_is_younger_than_a_day(self, littered: str) -> None:
        swept = run("sweep", littered, "--yes")
        assert (swept.code, swept.stdout, swept.stderr) == (0, f"nothing to sweep in {littered}\n", "")

    def test_json_names_ages_and_sizes_with_units(self, littered: str) -> None:
        swept = run("sweep", littered, "--older-than", "0s", "--json")
        document = swept.document
        assert set(document) == {
            *("root", "now", "older_than_seconds", "is_dry_run", "garbage", "garbage_bytes"),
            *("removed_count", "removed_bytes", "failures", "warnings"),
        }
        assert set(document["garbage"][0]) == {
            "checkpoint",
            "key",
            "size_bytes",
            "modified_at",
            "kind",
            "reason",
        }
        assert (document["older_than_seconds"], document["is_dry_run"]) == (0.0, True)
        assert document["garbage_bytes"] == sum(each["size_bytes"] for each in document["garbage"])

    def test_marks_of_deleted_checkpoints_go_only_by_order(self) -> None:
        url = f"memory://cli-sweep-{next(_numbers)}/run"
        save(url, "1", "2")
        run("rm", f"{url}/1", "--yes")
        run("sweep", url, "--older-than", "0s", "--yes")
        assert [key for key in keys(url) if key.startswith("1/")] == [f"1/{manifest_key(2)}"]
        run("sweep", url, "--older-than", "0s", "--tombstones", "--yes")
        assert [key for key in keys(url) if key.startswith("1/")] == []
        assert names(url) == ["2"]

    def test_a_damaged_manifest_refuses_the_sweep(self, littered: str) -> None:
        with opened(littered) as root:
            root.write(f"1/{manifest_key(3)}", b"{")
        before = keys(littered)
        refused = run("sweep", littered, "--older-than", "0s", "--yes", "--json")
        assert (refused.code, refused.stdout) == (5, "")
        error = json.loads(refused.stderr.splitlines()[-1])["error"]
        assert error["type"] == "SweepRefusedError"
        assert keys(littered) == before
