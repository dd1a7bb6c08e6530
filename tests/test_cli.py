"""The command line's frame: help, exit codes, errors, streams, completion, and what a start costs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click
import protocol
import pytest
from cli_runs import SCRIPT, Run, run, run_in_shell, run_json, run_on_terminal, run_script

from remote_ckpt import errors
from remote_ckpt._version import __version__
from remote_ckpt.changes import set_pinned
from remote_ckpt.cli.app import COMMANDS, app
from remote_ckpt.cli.exits import MEANINGS, ExitCode, exit_code_of
from remote_ckpt.cli.output import format_json
from remote_ckpt.store import open_store
from remote_ckpt.testing.servers import LocalServer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"


def save(url: object, *names: str) -> None:
    with closing(open_store(str(url))) as root:
        for name in names:
            protocol.save(root, b"x", name=name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A local run with two steps, the first of them pinned."""
    save(tmp_path / "run", "1", "2")
    with closing(open_store(tmp_path / "run")) as store:
        set_pinned(store.scope("1"), True)
    return tmp_path / "run"


class TestHelp:
    def test_it_lists_every_command_and_every_exit_code(self) -> None:
        shown = run("--help")
        assert (shown.code, shown.stderr) == (0, "")
        assert [line.split()[0] for line in shown.lines if line[2:].split(" ")[0] in COMMANDS] == [*COMMANDS]
        for code, meaning in MEANINGS.items():
            assert f"  {code:<4} {meaning}" in shown.stdout

    @pytest.mark.parametrize("name", [*COMMANDS])
    def test_each_command_explains_itself(self, name: str) -> None:
        shown = run(name, "--help")
        assert (shown.code, shown.stderr) == (0, "")
        assert shown.stdout.startswith(f"Usage: remote-ckpt {name} ")
        assert "--json" in shown.stdout

    @pytest.mark.parametrize("name", [*COMMANDS])
    def test_each_option_has_a_help_text(self, name: str) -> None:
        command = app.get_command(click.Context(app), name)
        assert command is not None
        assert command.help
        bare = [each.name for each in command.params if isinstance(each, click.Option) and not each.help]
        assert bare == []

    def test_without_arguments_help_is_shown_and_the_call_was_wrong(self) -> None:
        shown = run()
        assert (shown.code, shown.stdout) == (2, "")
        assert "Commands:" in shown.stderr

    def test_the_version_is_told(self) -> None:
        assert run("--version").stdout == f"remote-ckpt {__version__}\n"

    def test_the_page_documents_commands_and_exit_codes(self) -> None:
        page = PAGE.read_text()
        assert [name for name in COMMANDS if f"`{name}`" not in page and f"`{name} " not in page] == []
        table = dict(re.findall(r"^\| (\d+) +\| (.+?) *\|$", page, re.MULTILINE))
        assert {int(code) for code in table} == {int(code) for code in ExitCode}


class TestExitCodes:
    @pytest.mark.parametrize(
        ("kind", "code"),
        [
            (errors.ConfigError, 2),
            (errors.UrlError, 2),
            (errors.MissingDependencyError, 2),
            (errors.UnsupportedStoreError, 2),
            (errors.CheckpointNotFoundError, 3),
            (errors.StoreError, 4),
            (errors.AccessDeniedError, 4),
            (errors.BucketNotFoundError, 4),
            (errors.StoreTimeoutError, 4),
            (errors.StorageFullError, 4),
            (errors.SaveFailedError, 4),
            (errors.CheckpointPinnedError, 5),
            (errors.CheckpointExistsError, 5),
            (errors.CheckpointChangedError, 5),
            (errors.CommitUnknownError, 5),
            (errors.SweepRefusedError, 5),
            (errors.CheckpointDamagedError, 6),
            (errors.FormatError, 6),
            (errors.IntegrityError, 6),
            (errors.UntrustedDataError, 6),
            (ValueError, 70),
        ],
    )
    def test_each_kind_of_error_has_its_code(self, kind: type[Exception], code: int) -> None:
        assert exit_code_of(kind("x")) == code

    def test_an_unknown_command_or_option_is_a_wrong_call(self, root: Path) -> None:
        assert run("list", root).code == 2
        assert run("ls", root, "--recursive").code == 2
        assert run("ls", root, root).code == 2
        assert run("ls").stderr == "error: Missing argument 'ROOT'. (see remote-ckpt ls --help)\n"

    def test_an_error_of_the_program_is_no_answer(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise KeyError("bug")

        monkeypatch.setattr("remote_ckpt.discover.find_checkpoints", fail)
        failed = run("ls", root)
        assert (failed.code, failed.stdout) == (70, "")
        assert failed.stderr == "error: unexpected KeyError: 'bug' (--traceback shows where)\n"

    def test_an_interrupt_is_told_on_one_line(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("remote_ckpt.discover.find_checkpoints", interrupt)
        stopped = run("ls", root)
        assert (stopped.code, stopped.stdout) == (130, "")
        assert stopped.stderr == "error: interrupted\n"
        assert json.loads(run("ls", root, "--json").stderr)["error"]["message"] == "interrupted"


class TestErrors:
    def test_an_error_is_one_line_on_stderr(self, root: Path) -> None:
        failed = run("rm", f"{root}/1", "--yes")
        assert (failed.code, failed.stdout) == (5, "")
        assert re.fullmatch(r"error: the checkpoint is pinned: unpin it [^\n]*\n", failed.stderr)

    def test_with_json_it_is_one_object_on_stderr(self, root: Path) -> None:
        failed = run("rm", f"{root}/1", "--yes", "--json")
        error = json.loads(failed.stderr)["error"]
        assert (error["type"], error["step"]) == ("CheckpointPinnedError", "1")
        assert set(error) == {"type", "message", "url", "key", "step"}

    def test_a_wrong_call_too(self) -> None:
        failed = run("ls", "--json", "--nope")
        assert (failed.code, failed.stdout) == (2, "")
        assert json.loads(failed.stderr)["error"]["type"] == "NoSuchOption"

    def test_after_two_dashes_json_is_an_argument(self) -> None:
        assert run("info", "--", "--json").stderr.startswith("error: ")

    def test_a_traceback_is_shown_on_demand_only(self, root: Path) -> None:
        assert "Traceback" not in run("info", f"{root}/9").stderr
        shown = run("info", "nosuch://x/1", "--traceback")
        assert "Traceback (most recent call last)" in shown.stderr
        assert shown.stderr.splitlines()[-1].startswith("error: ")

    def test_a_message_with_several_lines_or_controls_stays_on_one(self) -> None:
        failed = run("ls", "s3://bucket/a\nb\x1b[2J")
        assert failed.stderr.count("\n") == 1
        assert "\x1b" not in failed.stderr

    @pytest.mark.parametrize(
        "arguments",
        [
            ("ls", "s3://AKIAID:hunter2@bucket/run"),
            ("ls", "x", "s3://AKIAID:hunter2@bucket/run"),
            ("ls", "s3://bucket/run", "--storage-option", "hunter2"),
            ("ls", "s3://bucket/run", "--storage-option", "nosuch=hunter2"),
            ("ls", "s3://bucket/run", "--storage-option", "key=AKIA", "secret=hunter2"),
            ("ls", "secret=hunter2"),
            ("cp", "/a/1", "aws_secret_access_key=hunter2"),
            ("rm", "s3://bucket/run/1", "--storage-option", "key=AKIA", "secret=hunter2", "--yes"),
            ("ls", "s3://bucket/run", "--secret=hunter2"),
            ("ls", "s3://bucket/run", "--storage-option", "key=AKIA", "token", "hunter2"),
            ("secret=hunter2", "ls"),
            ("ls", "s3://bucket/run", "--endpoint-url", "http://user:hunter2@127.0.0.1:1"),
            ("ls", "http://host/run?X-Amz-Signature=hunter2"),
            ("cp", "/a/1", "s3://b/1", "--target-endpoint-url", "http://user:hunter2@127.0.0.1:1"),
        ],
    )
    @pytest.mark.parametrize("more", [(), ("--json",), ("-vv", "--traceback")])
    def test_secrets_are_never_printed(self, arguments: tuple[str, ...], more: tuple[str, ...]) -> None:
        failed = run(*arguments, "--timeout", "1s", *more)
        assert failed.code != 0
        assert "hunter2" not in failed.stdout + failed.stderr

    def test_our_own_sentences_are_told_whole(self) -> None:
        refused = run("ls", "s3://AKIA:X@b/x")
        assert refused.stderr.startswith(
            "error: a s3:// URL must not contain credentials, nor '@' or ':' in its bucket: pass them as "
        )

    def test_an_option_that_lacks_its_name_is_named_without_its_value(self) -> None:
        refused = run("rm", "s3://bucket/run/1", "secret=hunter2")
        assert (refused.code, refused.stdout) == (2, "")
        assert "give --storage-option before secret=..., or ./secret=... if it is a path" in refused.stderr

    def test_an_endpoint_that_does_not_answer_is_a_failure_of_the_store(self) -> None:
        options = [
            "--endpoint-url",
            "http://127.0.0.1:1",
            "--storage-option",
            "key=a",
            "--storage-option",
            "secret=b",
        ]
        failed = run("ls", "s3://bucket/run", *options, "--timeout", "0.5s")
        assert (failed.code, failed.stdout) == (4, "")
        assert "127.0.0.1:1" in failed.stderr


class TestLog:
    def test_what_is_done_is_shown_with_v_on_stderr(self, root: Path) -> None:
        done = run("rm", f"{root}/2", "--yes", "-v", "--json")
        assert done.document["checkpoints"][0]["action"] == "deleted"
        assert f"info: {root}: deleted 2" in done.stderr

    def test_without_it_only_warnings_are(self, root: Path) -> None:
        assert run("rm", f"{root}/2", "--yes").stderr == ""

    def test_the_log_is_left_as_it_was(self, root: Path) -> None:
        import logging

        logger = logging.getLogger("remote_ckpt")
        before = (logger.level, list(logger.handlers))
        run("ls", root, "-vv")
        assert (logger.level, list(logger.handlers)) == before


class TestJson:
    def test_what_json_lacks_is_written_as_text(self) -> None:
        text = format_json({"a": float("nan"), "b": [float("inf"), -float("inf")], "c": {1: (2, 3)}})
        assert json.loads(text) == {"a": "nan", "b": ["inf", "-inf"], "c": {"1": [2, 3]}}

    def test_it_is_ascii_on_one_line_whatever_it_holds(self) -> None:
        text = format_json({"name": "模型\n\x1b"})
        assert text.isascii()
        assert text.isprintable()
        assert json.loads(text) == {"name": "模型\n\x1b"}


class TestCompletion:
    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_a_script_is_printed_for_each_shell(self, shell: str) -> None:
        shown = run("completion", shell)
        assert (shown.code, shown.stderr) == (0, "")
        assert f"_REMOTE_CKPT_COMPLETE={shell}_complete" in shown.stdout
        assert run_json("completion", shell)["script"] == shown.stdout.strip()

    def test_another_shell_is_a_wrong_call(self) -> None:
        assert run("completion", "tcsh").code == 2

    def test_bash_accepts_the_script(self) -> None:
        script = run_script("completion", "bash").stdout
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")

    def test_commands_options_and_folders_are_completed(self) -> None:
        def complete(*words: str) -> list[str]:
            environ = {
                "_REMOTE_CKPT_COMPLETE": "bash_complete",
                "COMP_WORDS": " ".join(["remote-ckpt", *words]),
                "COMP_CWORD": str(len(words)),
            }
            return run_script(environ=environ).lines

        assert complete("la") == ["plain,latest"]
        assert complete("un") == ["plain,unpin"]
        assert complete("prune", "--keep-ev") == ["plain,--keep-every-steps", "plain,--keep-every-hours"]
        assert complete("best", "--mode", "m") == ["plain,min", "plain,max"]
        assert complete("ls", "/tm") == ["dir,/tm"]


class TestScript:
    """The installed script, in its own process."""

    def test_output_to_a_pipe_is_plain_and_whole_in_any_locale(self, tmp_path: Path) -> None:
        deep = tmp_path / ("long" * 40) / "模型"
        save(deep, "1")
        for locale in ("C", "C.UTF-8", "POSIX"):
            environ = {"LC_ALL": locale, "COLUMNS": "20"}
            listed = run_script("rm", f"{deep}/1", environ=environ)
            assert (listed.code, listed.stderr) == (0, "")
            assert f"{deep}/1" in listed.lines[1]
            assert "\x1b" not in listed.stdout

    def test_what_the_encoding_lacks_is_escaped(self, tmp_path: Path) -> None:
        save(tmp_path / "模型", "1")
        listed = run_script("latest", tmp_path / "模型", environ={"PYTHONIOENCODING": "ascii"})
        assert (listed.code, listed.stdout) == (0, f"{tmp_path}/\\u6a21\\u578b/1\n")

    def test_exit_codes_and_streams_are_those_of_the_command(self, root: Path) -> None:
        missing = run_script("info", f"{root}/9")
        assert (missing.code, missing.stdout) == (3, "")
        assert missing.stderr.startswith("error: ")
        assert run_script("latest", root).stdout == f"{root}/2\n"

    def test_a_reader_that_goes_away_is_no_error_to_talk_about(self, tmp_path: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        for arguments in (["ls", str(tmp_path)], ["--help"]):
            ended = subprocess.run([SCRIPT, *arguments], stdout=writer, stderr=subprocess.PIPE, check=False)
            assert (ended.returncode, ended.stderr) == (141, b"")
        os.close(writer)

    @pytest.mark.parametrize("lost", ["2>&-", "2>/dev/full"])
    def test_an_error_that_cannot_be_written_changes_no_exit_code(self, root: Path, lost: str) -> None:
        sound = run_in_shell(f"verify {root}/2 --json {lost}")
        assert (sound.code, sound.document["checkpoints"][0]["is_sound"]) == (0, True)
        assert run_in_shell(f"info {root}/9 --no-contents {lost}") == Run(3, "", "")
        assert run_in_shell(f"rm {root}/1 --yes {lost}").code == 5
        assert run_in_shell(f"ls --nope --json {lost}") == Run(2, "", "")
        assert run_in_shell(lost) == Run(2, "", "")

    @pytest.mark.parametrize("lost", [">&-", ">/dev/full"])
    def test_an_answer_that_cannot_be_written_has_a_code_of_its_own(self, root: Path, lost: str) -> None:
        done = run_in_shell(f"rm {root}/2 --yes {lost}")
        assert (done.code, done.stdout) == (74, "")
        assert done.stderr.startswith("error: cannot write the output: ")
        assert not (root / "2").exists()
        assert run_in_shell(f"--help {lost}").code == 74
        assert run_in_shell(f"info {root}/9 {lost}").code == 3
        assert run_in_shell(f"ls {root} {lost} 2>&-").code == 74

    def test_a_file_never_takes_the_place_of_a_stream_that_is_closed(self, root: Path) -> None:
        copied = run_in_shell(f"cp {root}/2 {root}/copy -vv <&- >&- 2>&-")
        assert copied.code == 74
        assert run_script("verify", f"{root}/copy", "--read-data").code == 0

    @pytest.mark.parametrize("module", ["click", "remote_ckpt.cli.exits", "remote_ckpt.cli.commands.finding"])
    def test_an_interrupt_while_it_starts_is_no_traceback(self, module: str) -> None:
        program = (
            "import sys\n"
            "class Interrupting:\n"
            "    def find_spec(self, name, *rest):\n"
            f"        if name == {module!r}: raise KeyboardInterrupt\n"
            "sys.meta_path.insert(0, Interrupting())\n"
            "from remote_ckpt.cli import main\n"
            "sys.argv = ['remote-ckpt', 'ls', '.']\n"
            "main()"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (130, "")
        assert ended.stderr in ("", "error: interrupted\n")

    def test_the_module_can_be_run_too(self) -> None:
        command = [sys.executable, "-m", "remote_ckpt.cli", "--version"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        assert shown.stdout == f"remote-ckpt {__version__}\n"


class TestTerminal:
    def test_colours_are_for_a_terminal(self, root: Path) -> None:
        shown = run_on_terminal("ls", root)
        assert shown.code == 0
        assert "\x1b[33mpinned\x1b[0m" in shown.stdout

    @pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
    def test_and_not_for_who_does_not_want_them(self, root: Path, environ: dict[str, str]) -> None:
        shown = run_on_terminal("ls", root, environ=environ)
        assert "pinned" in shown.stdout
        assert "\x1b" not in shown.stdout

    def test_a_bar_shows_how_far_it_is(self, root: Path) -> None:
        shown = run_on_terminal("verify", f"{root}/2", "--read-data")
        assert shown.code == 0
        assert "verify 2" in shown.stdout
        assert "100%" not in shown.stdout.splitlines()[-1]
        assert f"{root}/2: " in shown.stdout
        assert "sound" in shown.stdout.splitlines()[-1]

    def test_there_is_no_bar_in_a_pipe(self, root: Path) -> None:
        shown = run_script("verify", f"{root}/2", "--read-data")
        assert (shown.code, shown.stderr) == (0, "")
        assert len(shown.lines) == 1


class TestStart:
    """What is loaded, since that is what a start costs."""

    @staticmethod
    def loaded(*arguments: object) -> set[str]:
        program = (
            "import sys; from remote_ckpt.cli.app import app\n"
            f"app.main({[*map(str, arguments)]!r}, standalone_mode=False)\n"
            "print(*sys.modules, file=sys.stderr)"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return {name.split(".")[0] for name in result.stderr.split()} | set(result.stderr.split())

    def test_help_loads_click_and_no_command(self) -> None:
        modules = self.loaded("--help")
        assert not modules & {"torch", "rich", "boto3", "botocore", "obstore", "fsspec", "crc32c", "numpy"}
        assert {name for name in modules if name.startswith("remote_ckpt.cli.commands")} == set()
        assert "remote_ckpt.store" not in modules

    @pytest.mark.parametrize("arguments", [("ls",), ("ls", "--json"), ("latest",)])
    def test_a_listing_of_a_local_run_loads_no_client_and_no_bar(
        self, root: Path, arguments: tuple[str, ...]
    ) -> None:
        modules = self.loaded(*arguments, root)
        assert not modules & {"torch", "rich", "boto3", "botocore", "obstore", "fsspec", "numpy", "upath"}


@pytest.mark.server
class TestServer:
    """A real S3 server, with credentials from the environment."""

    @pytest.fixture
    def bucket_url(self, ministack: LocalServer, fresh_root: Callable[[LocalServer], str]) -> str:
        url = fresh_root(ministack)
        with closing(open_store(url, storage_options=ministack.storage_options())) as root:
            for name in ("1", "2"):
                protocol.save(root, b"x", name=name)
        return url

    @staticmethod
    def call(server: LocalServer, *arguments: object) -> Run:
        environ = server.environment()
        endpoint_url = environ.pop("AWS_ENDPOINT_URL")
        return run_script(*arguments, "--endpoint-url", endpoint_url, environ=environ)

    def test_a_run_is_listed_pinned_pruned_and_copied(
        self, ministack: LocalServer, bucket_url: str, tmp_path: Path
    ) -> None:
        listed = self.call(ministack, "ls", bucket_url, "--json")
        assert [info["name"] for info in listed.document["checkpoints"]] == ["1", "2"]
        assert self.call(ministack, "pin", f"{bucket_url}/1").stdout == f"{bucket_url}/1: pinned\n"
        assert self.call(ministack, "rm", f"{bucket_url}/1", "--yes").code == 5
        assert self.call(ministack, "latest", bucket_url).stdout == f"{bucket_url}/2\n"
        copied = self.call(ministack, "cp", f"{bucket_url}/2", tmp_path / "2")
        assert (copied.code, copied.stderr) == (0, "")
        assert run("verify", tmp_path / "2", "--read-data").code == 0
        back = self.call(ministack, "cp", tmp_path / "2", f"{bucket_url}/back")
        assert (back.code, back.stderr) == (0, "")
        assert run_script("ls", bucket_url, environ=ministack.environment()).rows[3][0] == "back"

    def test_an_unknown_bucket_is_a_failure_of_the_store_and_no_absence(self, ministack: LocalServer) -> None:
        failed = self.call(ministack, "latest", "s3://no-such-bucket/run")
        assert (failed.code, failed.stdout) == (4, "")
        assert "no-such-bucket" in failed.stderr


def test_an_interrupt_ends_a_call_that_waits_for_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [SCRIPT, "ls", "s3://bucket/run", "--endpoint-url", endpoint_url],
            env={**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(4) == b"GET "
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told.strip().splitlines() == ["error: interrupted"]
