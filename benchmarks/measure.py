"""Measures one save and one load in a process that does nothing else; :mod:`benchmarks.bench` starts it.

    python -m benchmarks.measure '{"way": "ours", "root": "s3://...", "endpoint_url": "...", ...}'

Prints one line of JSON. Before anything is measured the state is made, everything is imported and one small
tensor is saved and loaded, so that connections, and our probe of the store, are there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ways import MIB, Place, State, make_way, remove

PATTERN_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class Task:
    """What a process is to do.

    Args:
        way: Name of the way.
        place: Root, endpoint and certificate, see :class:`.ways.Place`.
        name: Under which it saves.
        mib: Size of this rank's part of the state.
        tensors: Number of equal tensors in it.
        ranks: Number of processes.
    """

    way: str
    place: Place
    name: str
    mib: int
    tensors: int
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """What a save or load took: seconds of wall, CPU of all threads in user and system mode, peak memory."""

    wall_seconds: float
    user_seconds: float
    system_seconds: float
    extra_mib: float

    @property
    def cpu_seconds(self) -> float:
        return self.user_seconds + self.system_seconds


def measure(run: Callable[[], None]) -> Cost:
    """Run once. Peak memory is the kernel's own mark, so that nothing samples meanwhile (Linux)."""
    synchronize()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to the present
    before_kib = _high_water_kib()
    usage, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    run()
    synchronize()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return Cost(
        wall,
        after.ru_utime - usage.ru_utime,
        after.ru_stime - usage.ru_stime,
        (_high_water_kib() - before_kib) / 1024,
    )


def _high_water_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def synchronize() -> None:
    """Wait for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def pattern(number: int) -> torch.Tensor:
    """Return the bytes of which tensor ``number`` is made, as int16."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-(2**15), 2**15, (PATTERN_BYTES // 2,), dtype=torch.int16, generator=generator)


def make_state(task: Task) -> State:
    """Return bf16 tensors of one size, each with a pattern of its own repeated over it."""
    repeats, rest = divmod(task.mib * MIB, task.tensors * PATTERN_BYTES)
    if rest:
        raise ValueError(f"{task.mib} MiB are no {task.tensors} tensors of whole MiB")
    first = task.place.rank * task.tensors
    numbers = range(first, first + task.tensors)
    return {f"t{number}": pattern(number).repeat(repeats).view(torch.bfloat16) for number in numbers}


def check(state: State) -> None:
    """Raise if a tensor is not what :func:`make_state` made."""
    for name, tensor in state.items():
        found = tensor.view(torch.int16).view(-1, PATTERN_BYTES // 2)
        if not bool((found == pattern(int(name[1:]))).all()):
            raise ValueError(f"{name} was not loaded as it was saved")


@contextlib.contextmanager
def group(task: Task) -> Iterator[None]:
    """Join the process group, if there are several ranks."""
    if task.ranks == 1:
        yield
        return
    dist.init_process_group("gloo", rank=task.place.rank, world_size=task.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(task: Task) -> dict[str, Cost]:
    """Save and load once, with a small tensor first; raises if the loaded state is not the saved one."""
    with group(task):
        way, state = make_way(task.way, task.place), make_state(task)
        warm_up = {f"w{task.place.rank}": torch.ones(MIB)}
        way.save(warm_up, f"{task.name}-warm-up")
        way.load(warm_up, f"{task.name}-warm-up")
        save = measure(lambda: way.save(state, task.name))
        for tensor in state.values():
            tensor.zero_()
        load = measure(lambda: way.load(state, task.name))
        check(state)
        synchronize()
        if not task.place.rank:
            remove(task.place, task.name)
            remove(task.place, f"{task.name}-warm-up")
    return {"save": save, "load": load}


def main() -> None:
    """Do what the argument says."""
    given = json.loads(sys.argv[1])
    given["place"] = Place(**given["place"])
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    costs = run(Task(**given))
    print(json.dumps({verb: asdict(cost) for verb, cost in costs.items()}), flush=True)


if __name__ == "__main__":
    main()
