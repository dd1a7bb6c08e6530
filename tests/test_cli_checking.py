"""``verify``, ``diff`` and ``du``: whether checkpoints are whole, whether two are equal, what takes space."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import protocol
import pytest
from cli_runs import run, run_json
from handmade import Item, Value, columns, pattern, rows, whole, write_checkpoint

from remote_ckpt.keys import manifest_key
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store

_numbers = itertools.count()

ITEMS: dict[str, Item] = {
    "model.weight": rows((6, 4), pattern(24), [2, 4]),
    "model.bias": whole((4,), pattern(4)),
    "extra": Value(b"\x80pickle"),
}


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://cli-check-{next(_numbers)}/run" if request.param == "memory" else str(tmp_path / "run")


@contextmanager
def opened(url: str) -> Iterator[Store]:
    with closing(open_store(url)) as root:
        yield root


def save(url: str, name: str, items: dict[str, Item] | None = None) -> str:
    with opened(url) as root:
        write_checkpoint(root, name, items or ITEMS)
    return f"{url}/{name}"


def data_keys(url: str, name: str) -> list[str]:
    with opened(url) as root:
        return [info.key for info in root.list(f"{name}/") if info.key.endswith(".distcp")]


def flip(url: str, name: str, *, number: int = 0) -> str:
    """Change one payload byte of a data object; return its key relative to the checkpoint."""
    chunk = run_json("info", f"{url}/{name}", "--chunks", "--pattern", "model.weight")["checkpoints"][0]
    place = chunk["tensors"][0]["chunks"][number]
    with opened(url) as root:
        data = bytearray(root.read(f"{name}/{place['key']}"))
        data[place["offset_bytes"]] ^= 1
        root.write(f"{name}/{place['key']}", bytes(data))
    return str(place["key"])


class TestVerify:
    def test_a_sound_one_is_one_line_and_code_0(self, url: str) -> None:
        checkpoint = save(url, "1")
        verified = run("verify", checkpoint)
        assert (verified.code, verified.stderr) == (0, "")
        assert re.fullmatch(
            rf"{re.escape(checkpoint)}: sound \(\d+ objects, [\d.]+ K?i?B\)\n", verified.stdout
        )

    def test_reading_all_data_tells_time_and_throughput(self, url: str) -> None:
        verified = run("verify", save(url, "1"), "--read-data")
        assert (verified.code, verified.stderr) == (0, "")
        assert re.search(r", every byte read in \d+\.\ds \([\d.]+ [KMG]?i?B/s\)\)$", verified.stdout.strip())

    def test_a_missing_object_is_a_problem_that_is_named_and_code_1(self, url: str) -> None:
        checkpoint = save(url, "1")
        gone = data_keys(url, "1")[0]
        with opened(url) as root:
            root.delete([gone])
        verified = run("verify", checkpoint)
        assert (verified.code, verified.stderr) == (1, "")
        assert verified.lines[0].startswith(f"{checkpoint}: 1 problem (")
        assert verified.lines[1].startswith(f"  {gone.removeprefix('1/')}: ")

    def test_a_flipped_byte_is_found_by_reading_and_names_the_tensor(self, url: str) -> None:
        checkpoint = save(url, "1")
        key = flip(url, "1")
        assert run("verify", checkpoint).code == 0
        verified = run("verify", checkpoint, "--read-data")
        assert verified.code == 1
        assert verified.lines[1].startswith(f"  {key}: ")
        assert "model.weight" in verified.lines[1]
        failed = run("verify", checkpoint, "--read-data", "--json")
        problem = failed.document["checkpoints"][0]["problems"][0]
        assert (failed.code, problem["key"], problem["tensors"]) == (1, key, ["model.weight"])

    def test_json_says_what_was_looked_at(self, url: str) -> None:
        document = run_json("verify", save(url, "1"), "--read-data")["checkpoints"][0]
        assert set(document) == {
            *("name", "url", "kind", "is_data_read", "is_sound", "object_count", "total_bytes", "problems"),
            *("warnings", "seconds"),
        }
        assert (document["is_sound"], document["is_data_read"], document["problems"]) == (True, True, [])

    def test_several_are_checked_and_errors_outweigh_problems(self, url: str) -> None:
        good, bad = save(url, "1"), save(url, "2")
        flip(url, "2")
        verified = run("verify", bad, good, "--read-data", "--json")
        assert verified.code == 1
        assert [each["is_sound"] for each in verified.document["checkpoints"]] == [False, True]
        assert run("verify", bad, f"{url}/9", good, "--read-data").code == 3

    def test_a_damaged_manifest_is_a_problem(self, url: str) -> None:
        checkpoint = save(url, "1")
        with opened(url) as root:
            root.write(f"1/{manifest_key(1)}", b"{")
        verified = run("verify", checkpoint)
        assert verified.code == 1
        assert verified.lines[1].startswith(f"  {manifest_key(1)}: ")

    def test_many_tensors_of_one_object_do_not_fill_the_screen(self, url: str) -> None:
        items: dict[str, Item] = {f"layer.{number}": whole((4,), pattern(4)) for number in range(50)}
        checkpoint = save(url, "1", items)
        with opened(url) as root:
            root.delete(data_keys(url, "1"))
        lines = run("verify", checkpoint).lines
        assert len(lines) == 2
        assert lines[1].endswith("and 47 more)")
        document = run("verify", checkpoint, "--json").document["checkpoints"][0]
        assert len(document["problems"][0]["tensors"]) == 50


class TestDiff:
    def test_equal_ones_are_said_to_be_equal(self, url: str) -> None:
        same = run("diff", save(url, "1"), save(url, "2"))
        assert (same.code, same.stdout, same.stderr) == (0, "equal: 3 entries\n", "")
        document = run_json("diff", f"{url}/1", f"{url}/2")
        assert (document["is_equal"], document["equal_count"], document["changes"]) == (True, 3, [])

    def test_each_difference_is_a_line_and_the_code_is_1(self, url: str) -> None:
        first = save(url, "1")
        second = save(
            url,
            "2",
            {
                "model.weight": rows((4, 6), pattern(24), [2, 2]),
                "model.bias": whole((4,), pattern(4, seed=1)),
                "more": whole((1,), b"x"),
            },
        )
        different = run("diff", first, second)
        assert (different.code, different.stderr) == (1, "")
        found = {row[0]: row[1:] for row in different.rows if row}
        assert found["name"] == ["what", "first", "second"]
        assert found["extra"] == ["only in first"]
        assert found["more"] == ["only in second"]
        assert found["model.bias"][0] == "values"
        assert found["model.weight"][0] == "shape"
        assert different.lines[-1] == "4 differences, 0 undecided, 0 equal"

    def test_json_lists_the_same(self, url: str) -> None:
        first, second = (
            save(url, "1"),
            save(url, "2", {**ITEMS, "model.bias": whole((4,), pattern(4, seed=1))}),
        )
        different = run("diff", first, second, "--json")
        assert different.code == 1
        document = different.document
        assert set(document) == {
            *(
                "first",
                "second",
                "is_equal",
                "only_first",
                "only_second",
                "changes",
                "equal_count",
                "undecided",
            ),
        }
        assert (document["first"], document["second"], document["is_equal"]) == (first, second, False)
        assert [(change["name"], change["what"]) for change in document["changes"]] == [
            ("model.bias", "values")
        ]

    def test_what_checksums_leave_open_counts_as_a_difference_until_it_is_read(self, url: str) -> None:
        first = save(url, "1", {"w": rows((4, 4), pattern(16), [2, 2])})
        second = save(url, "2", {"w": columns((4, 4), pattern(16), [2, 2])})
        different = run("diff", first, second)
        assert different.code == 1
        assert ["w", "undecided"] in different.rows
        assert different.lines[-1] == (
            "0 differences, 1 undecided, 0 equal; --read-data decides the undecided ones"
        )
        decided = run("diff", first, second, "--read-data")
        assert (decided.code, decided.stdout) == (0, "equal: 1 entry\n")

    def test_across_stores(self, url: str, tmp_path: Path) -> None:
        assert run("diff", save(url, "1"), save(str(tmp_path / "other"), "x")).code == 0

    def test_one_that_is_missing_is_not_found(self, url: str) -> None:
        missing = run("diff", save(url, "1"), f"{url}/9")
        assert (missing.code, missing.stdout) == (3, "")


def test_verify_warns_on_stderr_of_what_it_could_not_check(url: str) -> None:
    with opened(url) as root:
        protocol.save(root, b"x", name="1")
        root.write("eval/checkpoint.pth", b"plain")
    verified = run("verify", f"{url}/eval", "--read-data", "--json")
    assert verified.code == 0
    assert verified.document["checkpoints"][0]["is_data_read"] is False
    warnings = verified.document["checkpoints"][0]["warnings"]
    assert len(warnings) == 1
    assert verified.stderr == f"warning: {url}/eval: {warnings[0]}\n"


class TestDu:
    @pytest.fixture
    def used(self, url: str) -> str:
        """Two checkpoints, a save that was killed, and a file of somebody else."""
        save(url, "1")
        save(url, "2")
        with opened(url) as root:
            protocol.upload(root.scope("3", create=True), b"half", name="3")
            root.write("notes/todo.txt", b"12345")
        return url

    def test_each_checkpoint_its_leftovers_and_what_is_not_ours(self, used: str) -> None:
        measured = run("du", used)
        assert (measured.code, measured.stderr) == (0, "")
        assert measured.rows[0] == ["name", "kind", "objects", "size", "left over"]
        kinds = [row[:2] for row in measured.rows[1:4]]
        assert kinds == [["1", "remote_ckpt"], ["2", "remote_ckpt"], ["3", "none"]]
        assert measured.rows[1][4] == "0 B"
        assert measured.rows[3][2:4] == ["0", "0 B"]
        assert measured.lines[-1].endswith(", not ours 5 B in 1 object")

    def test_json_counts_in_bytes(self, used: str) -> None:
        document = run_json("du", used)
        assert set(document) == {
            *(
                "root",
                "checkpoints",
                "remains",
                "total_bytes",
                "leftover_bytes",
                "other_count",
                "other_bytes",
            ),
        }
        assert set(document["checkpoints"][0]) == {
            *("name", "step", "kind", "object_count", "total_bytes", "leftover_bytes"),
        }
        with opened(used) as root:
            sizes = {info.key: info.size_bytes for info in root.list("")}
        half_made = sum(size for key, size in sizes.items() if key.startswith("3/"))
        assert (document["root"], document["other_count"], document["other_bytes"]) == (used, 1, 5)
        assert [(each["name"], each["total_bytes"]) for each in document["remains"]] == [("3", half_made)]
        assert document["leftover_bytes"] == half_made
        counted = document["total_bytes"] + document["leftover_bytes"] + document["other_bytes"]
        assert counted == sum(sizes.values())

    def test_what_a_deleted_one_leaves_is_shown_as_left_over(self) -> None:
        url = f"memory://cli-du-{next(_numbers)}/run"
        assert run("rm", save(url, "1"), "--yes").code == 0
        assert run("du", url).rows[1][:4] == ["1", "none", "0", "0 B"]

    def test_an_empty_directory_is_said_plainly(self, url: str) -> None:
        measured = run("du", url)
        assert (measured.code, measured.stdout) == (
            0,
            f"no checkpoints in {url}: checkpoints 0 B, left over 0 B\n",
        )
