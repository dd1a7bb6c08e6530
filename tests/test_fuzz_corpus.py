"""Files that once broke a parser, and those that fuzzing begins with, are read or refused as they should be.

``tests/fuzz`` finds more of them, guided by coverage; nothing in here needs the fuzzer. A file's name in the
corpus begins with what must become of it.
"""

from __future__ import annotations

import functools
import os
import pickle
import random
from collections import Counter
from pathlib import Path

import pytest
from fuzz.targets import TARGETS
from fuzz.traps import ExecutedError, Trap, nothing_is_run

from remote_ckpt.dcp.weights import read_weights
from remote_ckpt.errors import CheckpointDamagedError, FormatError, SweepRefusedError, UntrustedDataError
from remote_ckpt.options import Options
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.sweep import sweep
from remote_ckpt.url import parse_location

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
FILES = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/*"))
OUTCOMES = {
    "read": type(None),
    "damaged": CheckpointDamagedError,
    "format": FormatError,
    "untrusted": UntrustedDataError,
}
REFUSED_SEEDS = {
    ("index", "bomb"): "damaged",
    ("index", "nested"): "damaged",
    ("manifest", "half a character"): "damaged",
    ("manifest", "nested"): "damaged",
    ("payload", "bomb"): "untrusted",
    ("payload", "trap"): "untrusted",
    ("payload", "trap in the old format"): "untrusted",
    ("stock", "nested"): "damaged",
    ("stock", "trap"): "untrusted",
    ("stock", "trap of protocol 2"): "untrusted",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_corpus_becomes_what_its_name_says(file: str) -> None:
    target, name = file.split("/")
    refusal = TARGETS[target].run((CORPUS / file).read_bytes())
    assert type(refusal) is OUTCOMES[name.partition("-")[0]]


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("payload/")])
def test_a_file_of_weights_on_disk_is_refused_alike(file: str, tmp_path: Path) -> None:
    """It would be mapped, which nobody may do before it was looked into."""
    path = tmp_path / "weights.pth"
    path.write_bytes((CORPUS / file).read_bytes())
    expected = OUTCOMES[file.partition("/")[2].partition("-")[0]]
    read = functools.partial(
        read_weights,
        parse_location(path),
        storage_options=None,
        transport=None,
        options=Options(),
        trusted=False,
    )
    if expected is type(None):
        assert isinstance(read(), dict)
    else:
        with pytest.raises(expected):
            read()


def test_every_kind_of_file_has_a_corpus() -> None:
    assert {file.partition("/")[0] for file in FILES} == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_what_fuzzing_begins_with_is_read_unless_it_is_hostile(target: str) -> None:
    outcomes = {name: type(TARGETS[target].run(seed)) for name, seed in TARGETS[target].seeds().items()}
    assert outcomes == {name: OUTCOMES[REFUSED_SEEDS.get((target, name), "read")] for name in outcomes}


@pytest.mark.parametrize("target", TARGETS)
def test_files_that_are_changed_at_random_are_read_or_refused(target: str) -> None:
    """A few hundred of what the fuzzer makes by the million, without what it learns from coverage."""
    chance = random.Random(target)

    def scramble(data: bytes) -> bytes:
        changed = bytearray(data or b"\0")
        for _ in range(chance.choice((1, 1, 2, 8))):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        return bytes(changed)

    outcomes: Counter[type] = Counter()
    for seed in TARGETS[target].seeds().values():
        for _ in range(25):
            data = TARGETS[target].mutate(seed, chance, scramble)
            outcomes[type(TARGETS[target].run(data))] += 1
    assert outcomes.keys() <= set(OUTCOMES.values())
    assert target in ("archive", "record") or len(outcomes) > 1, "these two refuse without an error"


def test_what_runs_code_does_not_go_unnoticed() -> None:
    with pytest.raises(ExecutedError), nothing_is_run():
        pickle.loads(pickle.dumps(Trap()))
    with pytest.raises(ExecutedError), nothing_is_run():
        os.system("exit")
    assert pickle.loads(pickle.dumps(Counter)) is Counter, "afterwards nobody is watched"


def test_a_deeply_nested_manifest_stops_a_sweep_as_any_damaged_one_does() -> None:
    root = MemoryStore.fresh()
    root.write("1/manifest.000001.json", b"[" * 5000)
    with pytest.raises(SweepRefusedError, match="manifest of checkpoint 1 cannot be read"):
        sweep(root)
