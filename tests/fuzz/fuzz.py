"""Fuzz one kind of file: ``python tests/fuzz/fuzz.py TARGET --seconds 600``.

It needs atheris (``pip install -r tests/fuzz/requirements.txt``); ``make fuzz`` brings it. New inputs go into
a folder of their own; one that breaks a promise ends the run and is written to ``crash-...`` there. It then
belongs into ``tests/fuzz/corpus/TARGET``, under a name that begins with what should become of it (``read``,
``damaged``, ``untrusted`` or ``format``): an ordinary test replays it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import random
import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]
import torch
import torch.distributed.checkpoint

sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of this folder: `fuzz` is the package

WATCHED = ("json.decoder", "json", "pickletools", "zipfile", "torch._weights_only_unpickler")
"""Parsers of others that ours stand on: imported anew, so that the fuzzer sees their branches."""

allowed = torch.serialization.get_safe_globals()
for name in WATCHED:
    sys.modules.pop(name, None)
with atheris.instrument_imports(include=["remote_ckpt", *WATCHED], enable_loader_override=False):
    for name in WATCHED:
        importlib.import_module(name)
    torch.serialization._weights_only_unpickler = sys.modules["torch._weights_only_unpickler"]
    torch.serialization.add_safe_globals(allowed)
    from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MAX_INPUT_BYTES = 1 << 14
MAX_MIB = 1024
MAX_SECONDS_PER_INPUT = 10


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=600, help="how long (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=-1, help="stop after so many inputs")
    parser.add_argument(
        "--folder", type=Path, default=Path(".fuzz"), help="for new inputs (default: %(default)s)"
    )
    arguments = parser.parse_args()
    target = TARGETS[arguments.target]
    found = arguments.folder / arguments.target
    found.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds().values():
        (found / hashlib.sha1(seed).hexdigest()).write_bytes(seed)

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        mutated = target.mutate(
            data, random.Random(seed), lambda part: bytes(atheris.Mutate(part, len(part) + 64))
        )
        return mutated if len(mutated) <= max_bytes else bytes(atheris.Mutate(data, max_bytes))

    options = [
        f"-max_total_time={arguments.seconds}",
        f"-runs={arguments.runs}",
        f"-timeout={MAX_SECONDS_PER_INPUT}",
        f"-rss_limit_mb={MAX_MIB}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
    ]
    folders = [str(folder) for folder in (found, CORPUS / arguments.target) if folder.is_dir()]
    atheris.Setup(
        [sys.argv[0], *options, *folders], lambda data: target.run(data) and None, custom_mutator=mutate
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
