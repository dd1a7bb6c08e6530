"""How fast we save and load, beside every alternative, on an endpoint that costs almost nothing.

    python -m benchmarks.bench                     # plain HTTP, and a slow link with a quarter of the state
    python -m benchmarks.bench --scenario plain tls shaped local --mib 4096 --ranks 2 --rounds 5
    python -m benchmarks.bench --scenario plain --way ours "raw obstore" --mib 256

Every way runs in a process of its own (see :mod:`benchmarks.measure`), one after the other, in another order
in each round. Prints a table for each scenario; ``--json FILE`` keeps what was measured, ``--chart FILE``
draws it. Linux only: peak memory is the kernel's own mark.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Cost
from benchmarks.report import Measured, format_ratios, format_table, to_json
from benchmarks.ways import LOCAL_WAYS, S3_WAYS

ROOT: Final = Path(__file__).parents[1]
LATENCY_MS: Final = 30
LINK_MIB_PER_SECOND: Final = 80
TIMEOUT_SECONDS: Final = 1800
BUCKET: Final = "bench"
WARM_MIB: Final = 512  # touched by the endpoint beforehand, beside what the state takes
MAIN_WAYS: Final = (
    "ours",
    "ours, unsigned_payload",
    "ours, fsspec",
    "raw obstore",
    "s3torchconnector",
    "s3torchconnector, 4 threads",
    "torch fsspec",
    "torch fsspec, 4 threads",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One table.

    Args:
        name: Of the scenario.
        title: What it is, for people.
        mib: Size of the state, over all ranks.
        ways: What is compared.
        baseline: What ratios refer to.
        server: Arguments of the endpoint; None for a local folder.
        is_tls: Whether the endpoint speaks TLS.
    """

    name: str
    title: str
    mib: int
    ways: Sequence[str]
    baseline: str = "raw obstore"
    server: Sequence[str] | None = ()
    is_tls: bool = False


def plan_scenario(name: str, mib: int) -> Scenario:
    """Return a scenario by its name; over the slow link a quarter of the state goes."""
    if name == "local":
        title = "a local folder, files synced by both, read back from the page cache"
        return Scenario(name, title, mib, tuple(LOCAL_WAYS), "torch files", None)
    if name == "tls":
        ways = tuple(way for way in MAIN_WAYS if way != "ours, unsigned_payload")  # there it is the default
        return Scenario(name, "TLS 1.3 on loopback", mib, ways, is_tls=True)
    if name == "shaped":
        link = ("--latency-ms", str(LATENCY_MS), "--mib-per-second", str(LINK_MIB_PER_SECOND))
        title = f"{LATENCY_MS} ms to the first byte, {LINK_MIB_PER_SECOND} MiB/s a connection"
        return Scenario(name, title, mib // 4, MAIN_WAYS, server=link)
    return Scenario(name, "plain HTTP on loopback", mib, MAIN_WAYS)


@dataclass(slots=True)
class Server:
    """The endpoint of a scenario, its certificate and its process."""

    endpoint_url: str
    certificate: str
    pid: int

    def cpu_seconds(self) -> float:
        """CPU that it has used by now."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(scenario: Scenario, folder: str) -> Iterator[Server]:
    """Start the endpoint, with an empty bucket, and end it."""
    command = [sys.executable, "-m", "benchmarks.endpoint", *(scenario.server or ())]
    command += ["--warm-mib", str(scenario.mib + WARM_MIB)]
    if scenario.is_tls:
        command += ["--tls", folder]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # it is a pipe
            endpoint_url = process.stdout.readline().strip()
            certificate = f"{folder}/endpoint.pem" if scenario.is_tls else ""
            server = Server(endpoint_url, certificate, process.pid)
            _make_bucket(server)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)


def _make_bucket(server: Server) -> None:
    request = urllib.request.Request(f"{server.endpoint_url}/{BUCKET}", method="PUT")
    trust = ssl.create_default_context(cafile=server.certificate) if server.certificate else None
    urllib.request.urlopen(request, context=trust).close()


def run_once(
    way: str, scenario: Scenario, server: Server | None, *, root: str, ranks: int, tensors: int, label: str
) -> dict[str, Cost] | str:
    """Measure one way once; returns the cost over all ranks, or the last line of what went wrong."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if ranks > 1:
        environment["OMP_NUM_THREADS"] = "1"  # as torchrun does
    if server and server.certificate:  # how s3torchconnector is told whom to trust
        environment |= {"SSL_CERT_FILE": server.certificate, "SSL_CERT_DIR": "/nonexistent"}
    processes = []
    for rank in range(ranks):
        place = {"root": root, "rank": rank}
        if server:
            place |= {"endpoint_url": server.endpoint_url, "certificate": server.certificate}
        task = {"way": way, "place": place, "name": label, "mib": scenario.mib // ranks}
        task |= {"tensors": tensors // ranks, "ranks": ranks}
        command = [sys.executable, "-m", "benchmarks.measure", json.dumps(task)]
        processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        ends = [process.communicate(timeout=TIMEOUT_SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        return f"not done after {TIMEOUT_SECONDS} s"
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        return next((error.strip().splitlines() or ["?"])[-1] for _, error in ends if error.strip())
    return join_ranks([json.loads(output.strip().splitlines()[-1]) for output, _ in ends])


def join_ranks(costs: Sequence[dict[str, Any]]) -> dict[str, Cost]:
    """Return the slowest rank's wall time, the CPU of all, and the memory of the one that took most."""
    joined = {}
    for verb in ("save", "load"):
        each = [Cost(**cost[verb]) for cost in costs]
        joined[verb] = Cost(
            max(cost.wall_seconds for cost in each),
            sum(cost.user_seconds for cost in each),
            sum(cost.system_seconds for cost in each),
            max(cost.extra_mib for cost in each),
        )
    return joined


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


def run_scenario(
    scenario: Scenario,
    *,
    ways: Sequence[str],
    rounds: int,
    ranks: int,
    tensors: int,
    folder: Path | None,
) -> Measured:
    """Measure every way in every round; one that fails is left out from then on, with its reason."""
    measured = Measured(scenario.name, scenario.title, scenario.mib, ranks, tensors, scenario.baseline)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as inside:
        is_remote = scenario.server is not None
        with serving(scenario, inside) if is_remote else contextlib.nullcontext() as server:
            root = f"s3://{BUCKET}/run" if is_remote else inside
            for number in range(rounds):
                turn = number % len(ways)
                for way in (*ways[turn:], *ways[:turn]):
                    if way in measured.failures:
                        continue
                    before = server.cpu_seconds() if server else 0.0
                    label = f"{number}-{ways.index(way)}"
                    result = run_once(
                        way, scenario, server, root=root, ranks=ranks, tensors=tensors, label=label
                    )
                    if isinstance(result, str):
                        measured.failures[way] = result
                        continue
                    measured.add(way, result, server.cpu_seconds() - before if server else 0.0)
                    print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return measured


def describe_machine() -> dict[str, Any]:
    """Return what a reader must know to judge the numbers."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    names = ("torch", "obstore", "s3fs", "s3torchconnector", "remote_ckpt")
    git = shutil.which("git")
    commit = ""
    if git:
        answer = subprocess.run(
            [git, "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        )
        commit = answer.stdout.strip()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = ("plain", "tls", "shaped", "local")
    parser.add_argument("--scenario", nargs="+", choices=names, default=["plain", "shaped"])
    parser.add_argument(
        "--way", nargs="+", metavar="NAME", help=f"some of: {', '.join({**S3_WAYS, **LOCAL_WAYS})}"
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the state, a quarter on the slow link")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure, not that of temporary files")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--chart", type=Path, help="draw it there, with matplotlib")
    return parser.parse_args()


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments()
    machine = describe_machine()
    tables = []
    for name in arguments.scenario:
        scenario = plan_scenario(name, arguments.mib)
        ways = [way for way in arguments.way or scenario.ways if (way in LOCAL_WAYS) == (name == "local")]
        for ranks in arguments.ranks:
            measured = run_scenario(
                scenario,
                ways=ways,
                rounds=arguments.rounds,
                ranks=ranks,
                tensors=arguments.tensors,
                folder=arguments.folder,
            )
            tables.append(measured)
            print(format_table(measured), format_ratios(measured), sep="\n\n", flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(to_json(machine, tables))
    if arguments.chart:
        from benchmarks.chart import draw

        draw(tables, arguments.chart)


if __name__ == "__main__":
    main()
