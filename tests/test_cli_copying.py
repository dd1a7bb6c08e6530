"""``cp``: one checkpoint or all that are missing, and what stands in the way."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from pathlib import Path

import protocol
import pytest
from cli_runs import run, run_json

from remote_ckpt.changes import set_pinned
from remote_ckpt.keys import manifest_key
from remote_ckpt.store import open_store

_numbers = itertools.count()


def save(url: object, *names: str, payload: bytes = b"x") -> None:
    with closing(open_store(str(url))) as root:
        for name in names:
            protocol.save(root, payload, name=name, overwrite=True)


def load(url: object, name: str) -> bytes:
    """What the save of this checkpoint, or of the one that it is a copy of, noted as its payload."""
    found = run_json("info", f"{url}/{name}", "--no-contents")["checkpoints"][0]
    return str(found["metadata"]["payload"]).encode()


def names(url: object) -> list[str]:
    return [info["name"] for info in run_json("ls", url)["checkpoints"]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(tmp_path / "run", "1", "2", payload=b"source")
    return tmp_path / "run"


@pytest.fixture(params=["memory", "local"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://cli-cp-{next(_numbers)}/run" if request.param == "memory" else str(tmp_path / "other")


class TestOne:
    def test_a_checkpoint_is_copied_to_the_path_that_is_given(self, source: Path, target: str) -> None:
        copied = run("cp", source / "1", f"{target}/copy")
        assert (copied.code, copied.stderr) == (0, "")
        assert copied.stdout.startswith(f"copied to {target}/copy: ")
        assert load(target, "copy") == b"source"
        assert names(target) == ["copy"]

    def test_json_describes_the_copy(self, source: Path, target: str) -> None:
        document = run_json("cp", source / "1", f"{target}/1")
        assert set(document) == {"root", "is_dry_run", "planned", "checkpoints"}
        assert (document["root"], document["is_dry_run"]) == (target, False)
        assert [info["url"] for info in document["checkpoints"]] == [f"{target}/1"]

    def test_a_dry_run_copies_nothing(self, source: Path, target: str) -> None:
        planned = run("cp", source / "1", f"{target}/copy", "--dry-run")
        assert (planned.code, planned.stderr) == (0, "")
        assert planned.lines[0].startswith(f"would copy {source}/1 to {target}/copy: ")
        assert planned.lines[1].startswith("1 checkpoint, ")
        assert names(target) == []

    def test_within_one_directory_too(self, source: Path) -> None:
        assert run("cp", source / "1", source / "1_keep").code == 0
        assert names(source) == ["1", "2", "1_keep"]

    def test_what_has_that_name_is_not_replaced_unasked(self, source: Path, target: str) -> None:
        save(target, "1", payload=b"old")
        refused = run("cp", source / "1", f"{target}/1")
        assert (refused.code, refused.stdout) == (5, "")
        assert load(target, "1") == b"old"
        assert run("cp", source / "1", f"{target}/1", "--overwrite").code == 0
        assert load(target, "1") == b"source"

    def test_a_pinned_one_is_not_replaced_at_all(self, source: Path, target: str) -> None:
        save(target, "1", payload=b"old")
        with closing(open_store(target)) as root:
            set_pinned(root.scope("1"), True)
        refused = run("cp", source / "1", f"{target}/1", "--overwrite")
        assert refused.code == 5
        assert "pinned" in refused.stderr
        assert load(target, "1") == b"old"

    def test_a_target_that_ends_with_a_slash_is_no_name(self, source: Path, target: str) -> None:
        refused = run("cp", source / "1", f"{target}/")
        assert refused.code == 2
        assert "add its name after the last slash" in refused.stderr

    def test_a_source_that_is_not_there_is_not_found(self, source: Path, target: str) -> None:
        missing = run("cp", source / "9", f"{target}/9")
        assert (missing.code, missing.stdout) == (3, "")

    def test_onto_itself_is_a_wrong_call(self, source: Path) -> None:
        assert run("cp", source / "1", source / "1", "--overwrite").code == 2

    def test_a_dry_run_refuses_what_the_copy_would_refuse(self, source: Path, target: str) -> None:
        save(target, "1", payload=b"old")
        for more in ([], ["--overwrite"]):
            for arguments in ((source / "1", f"{target}/1"), (source / "1", source / "1")):
                said = run("cp", *arguments, *more, "--dry-run")
                done = run("cp", *arguments, *more)
                assert (said.code, said.stderr) == (done.code, done.stderr)
            save(target, "1", payload=b"old")
        with closing(open_store(target)) as root:
            set_pinned(root.scope("1"), True)
        said = run("cp", source / "1", f"{target}/1", "--overwrite", "--dry-run")
        assert (said.code, said.stdout) == (5, "")
        assert "pinned" in said.stderr

    def test_an_error_of_the_target_names_the_target(self, source: Path) -> None:
        with closing(open_store(str(source))) as root:
            set_pinned(root.scope("2"), True)
        refused = run("cp", source / "1", source / "2", "--overwrite", "--json")
        error = json.loads(refused.stderr)["error"]
        assert (error["url"], error["step"]) == (f"{source}/2", "2")

    @pytest.mark.parametrize("name", ["a?b", "a*", "[1]", "two words", "a#b", "a%20b", "模型"])
    def test_names_of_folders_are_literal(self, source: Path, tmp_path: Path, name: str) -> None:
        assert run("cp", source / "1", tmp_path / name / "1").code == 0
        assert run("cp", tmp_path / name / "1", tmp_path / f"{name} again" / "1").code == 0
        assert load(tmp_path / f"{name} again", "1") == b"source"


class TestAll:
    def test_all_that_are_missing_are_copied(self, source: Path, target: str) -> None:
        save(source, "best")
        first = run("cp", "--all", source, target)
        assert (first.code, first.stderr) == (0, "")
        assert [line.partition(": ")[0] for line in first.lines] == [
            f"copied to {target}/{name}" for name in ("1", "2", "best")
        ]
        assert names(target) == ["1", "2", "best"]
        again = run("cp", "--all", source, target)
        assert (again.code, again.stdout) == (0, f"nothing to copy: {target} has it all\n")
        save(source, "3")
        assert [info["name"] for info in run_json("cp", "--all", source, target)["checkpoints"]] == ["3"]

    def test_one_that_differs_there_is_not_replaced_unasked(self, source: Path, target: str) -> None:
        save(target, "2", payload=b"old")
        refused = run("cp", "--all", source, target)
        assert refused.code == 5
        assert load(target, "2") == b"old"
        assert run("cp", "--all", source, target, "--overwrite").code == 0
        assert load(target, "2") == b"source"

    @pytest.mark.parametrize("more", [(), ("--dry-run",)])
    def test_a_run_is_not_copied_into_itself(self, source: Path, more: tuple[str, ...]) -> None:
        inside = run("cp", "--all", source, source / "sub", *more)
        assert (inside.code, inside.stdout) == (2, "")
        assert "one lies inside the other" in inside.stderr
        assert run("cp", "--all", source, f"{source}/", *more).code == 2
        assert not (source / "sub").exists()
        assert run("cp", "--all", source, f"{source}-2", *more).code == 0

    def test_a_dry_run_of_all_says_what_would_be_refused(self, source: Path, target: str) -> None:
        save(target, "2", payload=b"old")
        said = run("cp", "--all", source, target, "--dry-run", "--json")
        assert said.code == 5
        assert [each["name"] for each in said.document["planned"]] == ["1"]
        assert json.loads(said.stderr)["error"]["type"] == "CheckpointExistsError"

    def test_a_dry_run_shows_what_is_missing(self, source: Path, target: str) -> None:
        run("cp", source / "1", f"{target}/1")
        document = run_json("cp", "--all", source, target, "--dry-run")
        assert [(each["source"], each["name"]) for each in document["planned"]] == [(f"{source}/2", "2")]
        assert document["checkpoints"] == []
        assert names(target) == ["1"]

    def test_one_that_cannot_be_copied_does_not_keep_the_others(self, source: Path, target: str) -> None:
        save(target, "1", payload=b"old")
        save(source, "3", payload=b"source")
        copied = run("cp", "--all", source, target)
        assert (copied.code, len(copied.lines)) == (5, 2)
        assert "exists" in copied.stderr
        assert load(target, "1") == b"old"
        assert names(target) == ["1", "2", "3"]

    def test_a_damaged_one_is_told_of_and_the_sound_ones_are_copied(self, source: Path, target: str) -> None:
        with closing(open_store(str(source))) as root:
            root.write(f"1/{manifest_key(1)}", b"{")
        copied = run("cp", "--all", source, target)
        assert copied.code == 6
        assert copied.stderr.startswith("error: 1 is not copied: ")
        assert names(target) == ["2"]
