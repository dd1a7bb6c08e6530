"""How much memory a save and a load take beyond the state itself.

Prints resident memory above the state's own, sampled every 5 ms, for a save and a load in one process.

    python benchmarks/memory.py [URL] [--gib 4] [--tensors 64] [--budget-mib 512]

Without a URL it uses a temporary directory. For S3, give ``AWS_*`` variables and ``s3://bucket/prefix``.
Resident memory counts page-cache pages only where a file is mapped, which nothing here does.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed.checkpoint as dcp

from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.options import GiB, MiB, Options, TransferOptions

SAMPLE_SECONDS = 0.005


def resident_bytes() -> int:
    """Resident memory of this process (Linux: the second field of /proc/self/statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """Samples resident memory while the block runs."""

    def __enter__(self) -> Peak:
        self.before = self.peak = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._began = time.perf_counter()
        self._cpu = time.process_time()
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
        self.cpu_seconds = time.process_time() - self._cpu
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, resident_bytes())

    def report(self, verb: str) -> None:
        """Print one line."""
        extra = (self.peak - self.before) / MiB
        print(
            f"{verb}: {extra:8.0f} MiB extra at the peak, "
            f"{self.seconds:.2f} s wall, {self.cpu_seconds:.2f} s CPU"
        )


def main() -> None:
    """Save and load once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--budget-mib", type=int, default=512)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    options = Options(transfer=TransferOptions(budget_bytes=arguments.budget_mib * MiB))
    with tempfile.TemporaryDirectory() as folder:
        url = f"{(arguments.url or folder).rstrip('/')}/memory"
        rows = int(arguments.gib * GiB) // 2 // 1024 // arguments.tensors
        state = {f"t{n}": torch.full((rows, 1024), n, dtype=torch.bfloat16) for n in range(arguments.tensors)}
        save(state, f"{url}-warm-up", options, torch.ones(1))
        with Peak() as peak:
            save(state, url, options)
        peak.report("save")
        for tensor in state.values():
            tensor.zero_()
        with Peak() as peak:
            dcp.load(state, storage_reader=RemoteStorageReader(url, options=options))
        peak.report("load")
        assert all(bool((state[f"t{n}"] == n).all()) for n in range(arguments.tensors))
    print(f"budget {arguments.budget_mib} MiB, state {arguments.gib} GiB in {arguments.tensors} tensors")


def save(
    state: dict[str, torch.Tensor], url: str, options: Options, only: torch.Tensor | None = None
) -> None:
    """Save the state, or a single small tensor to import and connect everything beforehand."""
    chosen = state if only is None else {"only": only}
    dcp.save(chosen, storage_writer=RemoteStorageWriter(url, options=options, overwrite=True))


if __name__ == "__main__":
    main()
