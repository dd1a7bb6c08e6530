"""The test servers themselves: they say how to reach them, serve, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from remote_ckpt.errors import MissingDependencyError, StoreUnavailableError
from remote_ckpt.testing.servers import MiniStackServer, RunningServer, find_program, http_get

SCRIPTS = Path(__file__).with_name("servers")
REAL = pytest.param("real", marks=pytest.mark.server)


@pytest.fixture
def script(request: pytest.FixtureRequest) -> Path:
    name = request.config.getoption("--s3") if request.param == "real" else request.param
    return SCRIPTS / f"{name}_s3.py"


@contextmanager
def running(script: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a script as a person does, its temporary files in a folder of their own."""
    with subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def children_of(process: subprocess.Popen[str]) -> Sequence[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def read_server(process: subprocess.Popen[str]) -> RunningServer:
    """Return what a script says that it started, once it says so."""
    assert process.stdout is not None
    variables = {}
    while (line := process.stdout.readline()).startswith("export "):
        name, _, value = line.removeprefix("export ").strip().partition("=")
        variables[name] = value
    assert "s3://demo" in line
    return RunningServer(
        variables["AWS_ENDPOINT_URL"],
        access_key=variables["AWS_ACCESS_KEY_ID"],
        secret_key=variables["AWS_SECRET_ACCESS_KEY"],
        region=variables["AWS_REGION"],
    )


@pytest.mark.parametrize("script", ["ministack", "moto", "rclone", REAL], indirect=True)
def test_a_script_prints_endpoint_and_credentials_serves_on_loopback_and_leaves_nothing(
    script: Path, tmp_path: Path
) -> None:
    with running(script, tmp_path) as process:
        server = read_server(process)
        client = server.client()
        client.put_object(Bucket="demo", Key="k", Body=b"value")
        assert client.get_object(Bucket="demo", Key="k")["Body"].read() == b"value"
        client.close()
        children = children_of(process)
        process.terminate()
        assert process.wait(30) == 0
    host, _, port = server.endpoint_url.removeprefix("http://").partition(":")
    assert host == "127.0.0.1"
    assert http_get(int(port), "/") is None
    assert children
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["ministack", REAL], indirect=True)
def test_a_script_that_is_interrupted_while_it_starts_leaves_nothing(script: Path, tmp_path: Path) -> None:
    with running(script, tmp_path) as process:
        while not (children := children_of(process)):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []


class Stumbling(MiniStackServer):
    """Ends at once, the first times that it is started."""

    def __init__(self, falls: int) -> None:
        super().__init__()
        self.falls, self.starts = falls, 0

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        self.starts += 1
        if self.starts <= self.falls:
            return [sys.executable, "-c", "raise SystemExit('the address is in use')"]
        return super()._command(program, folder, ports)


def test_a_server_whose_port_was_taken_meanwhile_is_started_on_another() -> None:
    with Stumbling(falls=1) as server:
        assert server.starts == 2
        assert server.create_bucket("demo") == "demo"


def test_a_server_that_does_not_start_says_why() -> None:
    server = Stumbling(falls=9)
    with pytest.raises(StoreUnavailableError, match="the address is in use"):
        server.start()
    with pytest.raises(RuntimeError, match="not running"):
        print(server.pid)


def test_a_missing_program_is_an_error_that_names_the_command_which_installs_it() -> None:
    with pytest.raises(MissingDependencyError, match="no-such-program is not installed: apt-get install it"):
        find_program("no-such-program", "apt-get install it")
