"""The whole story in one command: train, kill a rank inside a save, resume, compare bit for bit.

    python scripts/demo.py               # an S3 server of its own, on loopback
    python scripts/demo.py local         # a directory
    python scripts/demo.py s3://bucket/prefix   # your bucket, with the credentials of your environment

Exits with an error at the first thing that is not as the README promises.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from remote_ckpt import find_all_checkpoints, find_latest_checkpoint
from remote_ckpt.keys import parse_manifest_key
from remote_ckpt.store import open_store
from remote_ckpt.testing.servers import SeaweedServer, free_ports
from remote_ckpt.url import parse_location

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
KILL_AT, TWO_RANKS_UNTIL, ONE_RANK_UNTIL, FOUR_RANKS_UNTIL = 40, 60, 80, 100
LOSS = re.compile(r"step (\d+) loss (\S+)")


class Ranks:
    """The processes of one training run, started without torchrun so that their ids are known."""

    def __init__(self, url: str, count: int, *, stop_after: int) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="demo-")
        self._port = free_ports(1)[0]
        command = [sys.executable, str(EXAMPLES / "train_digits.py"), url, "--stop-after", str(stop_after)]
        command += ["--steps", str(FOUR_RANKS_UNTIL)]
        self.processes = [self._start(command, rank, count) for rank in range(count)]

    def _start(self, command: list[str], rank: int, count: int) -> subprocess.Popen[str]:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": self._port}
        world_env = {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
        with open(self._log(rank), "w") as log:
            env = os.environ | world_env
            return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.log"

    def lines(self) -> Iterator[str]:
        """Yield what rank 0 prints until it ends."""
        output = self.processes[0].stdout
        assert output is not None  # opened as a pipe
        yield from (line.rstrip("\n") for line in output)

    def wait(self) -> list[int]:
        """Return the exit codes of all ranks; a rank that hangs for two minutes fails the demo."""
        return [process.wait(120) for process in self.processes]

    def last_words(self, rank: int) -> str:
        """Return the last line that a rank wrote to its standard error."""
        return (self._log(rank).read_text().strip().splitlines() or ["nothing"])[-1]

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self._logs.cleanup()


@contextmanager
def run_ranks(url: str, count: int, *, stop_after: int) -> Iterator[Ranks]:
    ranks = Ranks(url, count, stop_after=stop_after)
    try:
        yield ranks
    finally:
        ranks.close()


def train(url: str, count: int, *, stop_after: int) -> dict[int, str]:
    """Run the example to a regular end and return the exact loss of each step."""
    losses: dict[int, str] = {}
    with run_ranks(url, count, stop_after=stop_after) as ranks:
        for line in ranks.lines():
            collect(line, losses)
        codes = ranks.wait()
        require(codes == [0] * count, f"a rank failed: {codes}, rank 0 said: {ranks.last_words(0)}")
    return losses


def train_and_kill(url: str) -> tuple[int, dict[int, str]]:
    """Run on two ranks and kill rank 1 inside a save; return that save's step and the losses so far."""
    losses: dict[int, str] = {}
    killed_at = 0
    with run_ranks(url, 2, stop_after=TWO_RANKS_UNTIL) as ranks:
        for line in ranks.lines():
            collect(line, losses)
            saving = re.match(r"saving (\d+)", line)
            if saving and int(saving[1]) >= KILL_AT and kill_inside_save(ranks, url, int(saving[1])):
                killed_at = int(saving[1])
                say(f"rank 1 got SIGKILL while step {killed_at} was being saved")
        codes = ranks.wait()
        require(killed_at > 0, "no save was slow enough to be hit")
        require(codes[1] == -signal.SIGKILL, f"rank 1 was to be killed, but ended with {codes[1]}")
        require(codes[0] != 0, "rank 0 ended as if nothing had happened")
        say(f"rank 0 ended too: {ranks.last_words(0)[:200]}")
    return killed_at, losses


def kill_inside_save(ranks: Ranks, url: str, step: int) -> bool:
    """Kill rank 1 when the data of one rank is there and the other's is not; false if it was too quick.

    Rank 1 is let run for a moment at a time and looked at while it stands still, because the whole
    save takes only some milliseconds here.
    """
    victim = ranks.processes[1]
    while ranks.processes[0].poll() is None:
        victim.send_signal(signal.SIGSTOP)
        time.sleep(0.03)  # rank 0 goes on meanwhile
        keys = list_keys(url, step)
        if len({key.split("/")[0] for key in keys if key.endswith(".distcp")}) == 1:
            victim.kill()
            return True
        victim.send_signal(signal.SIGCONT)
        if is_committed(keys):
            return False
        time.sleep(0.001)
    return False


def list_keys(url: str, name: int | str) -> list[str]:
    """Return the keys of all objects of one checkpoint, committed or not."""
    root = open_store(parse_location(url))
    prefix = f"{name}/"
    return [info.key.removeprefix(prefix) for info in root.list(prefix)]


def is_committed(keys: list[str]) -> bool:
    return any(parse_manifest_key(key) is not None for key in keys)


def collect(line: str, losses: dict[int, str]) -> None:
    """Keep the loss of a line, and print the lines that tell of checkpoints."""
    if match := LOSS.match(line):
        losses[int(match[1])] = match[2]
    else:
        print(f"      {line}", flush=True)


def say(text: str) -> None:
    print(f"   -> {text}", flush=True)


def headline(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def require(is_ok: bool, message: str) -> None:
    if not is_ok:
        sys.exit(f"\nThe demonstration failed: {message}")


def require_equal(reference: dict[int, str], losses: dict[int, str]) -> None:
    """Stop unless every loss is that of the uninterrupted run, bit for bit."""
    wrong = [step for step, loss in losses.items() if reference[step] != loss]
    require(not wrong, f"losses differ from the uninterrupted run at steps {wrong[:5]}")
    say(f"steps {min(losses)} to {max(losses)}: every loss equals the uninterrupted run's, bit for bit")


def crash_inside_a_save(url: str, reference: dict[int, str]) -> None:
    headline(f"Two ranks again; rank 1 is killed inside a save (step {KILL_AT} or later)")
    killed_at, losses = train_and_kill(url)
    require_equal(reference, losses)
    require(not is_committed(list_keys(url, killed_at)), f"step {killed_at} was committed after all")
    latest = find_latest_checkpoint(url)
    require(latest is not None and int(latest.name) < killed_at, f"the newest checkpoint is {latest}")
    say(f"step {killed_at} was left uncommitted: the newest checkpoint is {latest}")


def show_listing(url: str) -> None:
    names = [path.name for path in find_all_checkpoints(url)] + ["best"]
    print(f"{'checkpoint':>14} {'objects':>8} {'bytes':>10}  state")
    root = open_store(parse_location(url))
    for name in names:
        infos = root.list(f"{name}/")
        size = sum(info.size_bytes for info in infos)
        state = (
            "committed" if is_committed([i.key.removeprefix(f"{name}/") for i in infos]) else "NOT committed"
        )
        print(f"{name:>14} {len(infos):>8} {size:>10}  {state}")
        require(state == "committed", f"{name} is listed without a commit")


def demonstrate(base: str) -> None:
    url = f"{base}/run"
    headline(f"The reference: two ranks, {TWO_RANKS_UNTIL} steps without interruption, to {base}/reference")
    reference = train(f"{base}/reference", 2, stop_after=TWO_RANKS_UNTIL)
    crash_inside_a_save(url, reference)

    headline("Resumed on two ranks")
    require_equal(reference, train(url, 2, stop_after=TWO_RANKS_UNTIL))
    for count, until in ((1, ONE_RANK_UNTIL), (4, FOUR_RANKS_UNTIL)):
        headline(f"Resumed on {count} rank{'s' if count > 1 else ''}, until step {until}")
        losses = train(url, count, stop_after=until)
        require(max(losses) == until, f"training ended at step {max(losses)}")
        say(f"step {until}: loss {float.fromhex(losses[until]):.4f}")

    headline(f"What is in {url} now")
    show_listing(url)
    headline("The best checkpoint, loaded by stock torch alone")
    evaluate = [sys.executable, str(EXAMPLES / "evaluate_digits.py"), f"{url}/best", "--at-least", "0.9"]
    require(subprocess.run(evaluate, check=False).returncode == 0, "stock torch did not reach 90 %")


def open_base(store: str, stack: ExitStack) -> str:
    """Return the URL or path under which this demonstration writes, with a server behind it if need be."""
    run = time.strftime("demo-%Y%m%dT%H%M%S")
    if store == "local":
        return str(Path(".demo").resolve() / run)
    if store != "seaweed":
        return f"{store.rstrip('/')}/{run}"
    server = stack.enter_context(SeaweedServer())
    os.environ.update(server.environment())
    bucket = server.create_bucket("demo")
    say(f"an S3 server (SeaweedFS, telemetry off) runs at {server.endpoint_url}")
    return f"s3://{bucket}/{run}"


def main() -> None:
    started_at = time.monotonic()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # torch's own; the errors are what matters here
    store = sys.argv[1] if len(sys.argv) > 1 else "seaweed"
    with ExitStack() as stack:
        base = open_base(store, stack)
        demonstrate(base)
    if store != "seaweed":
        print(f"\nWhat it wrote stays under {base}")
    print(f"\nAll of it as promised, in {time.monotonic() - started_at:.0f} s.")


if __name__ == "__main__":
    main()
