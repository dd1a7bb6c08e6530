"""Whatever becomes of the bytes of a checkpoint: what is loaded is what was saved, or an error says where.

A checkpoint that two ranks saved is damaged in one place after the other, in every object, and each time it
is loaded whole, in part and one tensor alone, and verified. An error names the object, and the tensor whose
bytes differ (not of an object that is cut or gone, which is said as such). Where nothing that is read
differs, the values come back to the bit.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import (
    BLOCK,
    SHARDED,
    WHOLE,
    Files,
    Specimen,
    flipped,
    full_state,
    read_files,
    save_on_ranks,
    save_pair_on_ranks,
)
from ranks import Ranks
from test_dcp_single import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.errors import CheckpointDamagedError, FormatError, IntegrityError, RemoteCkptError
from remote_ckpt.keys import STOCK_METADATA_NAME
from remote_ckpt.manifest import parse_manifest
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.verification import VerifyReport, verify_checkpoint

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

DAMAGE = (IntegrityError, CheckpointDamagedError, FormatError)
"""What a damaged checkpoint may be called."""
STATE = full_state(2)
ROWS = (20, 45)
"""The slice of ``rows`` that is loaded alone: the end of one rank's part, the beginning of the next."""
counts: Counter[str] = Counter()
"""How often something was damaged, by what."""


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    ranks.run(save_on_ranks, str(folder))
    ranks.run(save_pair_on_ranks, str(folder))
    return folder


@pytest.fixture(params=["memory", "local"])
def specimen(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> Specimen:
    root = MemoryStore.fresh() if request.param == "memory" else LocalStore(tmp_path)
    return Specimen.of(root, read_files(saved / "new" / "7"))


@pytest.fixture(scope="module", autouse=True)
def said_how_often() -> Iterator[None]:
    yield
    print(f"\ndamaged {counts.total()} times: {dict(counts)}")


# --- loading and verifying ---------------------------------------------------------------------------


class SliceOfRows(DefaultLoadPlanner):
    """Asks for some rows only, as a rank does that holds a part."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        chunk = ChunkStorageMetadata(torch.Size([ROWS[0], 0]), torch.Size([ROWS[1] - ROWS[0], 100]))
        entry: Any = self.metadata.state_dict_metadata["rows"]
        return LoadPlan(create_read_items_for_chunk_list("rows", entry, [chunk]))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self.state_dict["rows"]
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, begin, length)
        return target


def load(
    specimen: Specimen, state: dict[str, Any], planner: DefaultLoadPlanner | None = None
) -> RemoteCkptError | None:
    """Load into ``state``; returns the error that it ended in. Any but those of damage is raised."""
    reader = RemoteStorageReader(specimen.url)
    try:
        reader.resolve()  # as our own functions do; out of torch's load its error comes as an AssertionError
        dcp.load(state, storage_reader=reader, planner=planner)
    except DAMAGE as error:
        return error
    except CheckpointException as error:
        cause = error.failures[0][0]
        if not isinstance(cause, DAMAGE):
            raise
        return cause
    return None


def load_whole(specimen: Specimen) -> RemoteCkptError | None:
    return load_some(specimen, *STATE)


def load_some(specimen: Specimen, *names: str) -> RemoteCkptError | None:
    state = {name: other(STATE[name]) for name in names}
    if (error := load(specimen, state)) is None:
        assert_same(dense(state), dense({name: STATE[name] for name in names}))
    return error


def other(value: Any) -> Any:
    """Return a destination that holds other values."""
    return (
        torch.zeros_like(value) if isinstance(value, torch.Tensor) else {"step": 0, "name": "", "pair": (0,)}
    )


def dense(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value
        for name, value in state.items()
    }


def load_rows(specimen: Specimen) -> RemoteCkptError | None:
    state = {"rows": torch.zeros(ROWS[1] - ROWS[0], 100)}
    if (error := load(specimen, state, SliceOfRows())) is None:
        assert_same(state["rows"], STATE["rows"][slice(*ROWS)])
    return error


def verify(specimen: Specimen) -> VerifyReport:
    return verify_checkpoint(specimen.root, "7", read_data=True)


def problems(report: VerifyReport) -> dict[str, frozenset[str]]:
    return {problem.key: frozenset(problem.tensors) for problem in report.problems}


# --- what must be said -------------------------------------------------------------------------------


def check_data(specimen: Specimen, changes: Mapping[str, bytes | None], what: str) -> None:
    """Damage data objects, and mend them."""
    lost = {key: names_of(specimen, key, data) for key, data in changes.items()}
    hurt = frozenset(itertools.chain.from_iterable(lost.values()))
    others = sorted(
        name for name in STATE if isinstance(STATE[name], torch.Tensor) and name not in whole_names(hurt)
    )
    specimen.put(changes)
    try:
        check_error(load_whole(specimen), lost)
        check_error(
            load_rows(specimen), {key: names & {"rows"} for key, names in lost.items()}, may_pass=True
        )
        for name in sorted(hurt & STATE.keys())[:1]:
            check_error(load_some(specimen, name), {key: names & {name} for key, names in lost.items()})
        if others and (sound := others[sum(map(len, what.split())) % len(others)]) != "sparse":
            assert load_some(specimen, sound) is None
        assert problems(verify(specimen)) == lost
    finally:
        specimen.mend(changes)
    counts[what] += 1


def names_of(specimen: Specimen, key: str, data: bytes | None) -> frozenset[str]:
    return specimen.changed(key, b"" if data is None else data)


def whole_names(names: frozenset[str]) -> frozenset[str]:
    """Return names at the top of the state."""
    return frozenset(name.partition(".")[0] for name in names)


def check_error(
    error: RemoteCkptError | None, lost: Mapping[str, frozenset[str]], *, may_pass: bool = False
) -> None:
    """An error names a damaged object and one of its tensors; without one, nobody's bytes are concerned."""
    concerned = {key: names for key, names in lost.items() if names}
    if error is None:
        assert may_pass or not concerned
        return
    text = str(error)
    named = [key for key in concerned if key in text]
    assert named, text
    is_gone = any(
        words in text for words in ("missing", "ends before", "the file ends")
    )  # for whoever it held
    assert is_gone or any(name in text for key in named for name in concerned[key]), text


def check_small(specimen: Specimen, key: str, data: bytes | None, what: str) -> None:
    """Damage what describes the data, and mend it."""
    specimen.put({key: data})
    try:
        errors = [load_whole(specimen), load_rows(specimen), load_some(specimen, "scalar")]
        report = verify(specimen)
    finally:
        specimen.mend({key: data})
    found = problems(report)
    counts[what] += 1
    if key == STOCK_METADATA_NAME:
        assert (errors, report.is_sound) == ([None] * 3, True), "our own reader does not need it"
        assert any(key in warning for warning in report.warnings)
    elif key == specimen.stock_key:
        assert (errors, found) == ([None] * 3, {key: frozenset()})
    elif any(errors):
        assert all(error is not None and any(one in str(error) for one in found) for error in errors), errors
        # Without it, or with one that is sound, another generation counts: what that one names is not there.
        assert key in found or (key == specimen.manifest_key and is_absent_or_sound(data, key))
    else:
        assert key == specimen.manifest_key
        assert report.is_sound


def is_absent_or_sound(data: bytes | None, key: str) -> bool:
    with suppress(CheckpointDamagedError):
        return data is None or bool(parse_manifest(data, url="", key=key))
    return False


# --- the tests ---------------------------------------------------------------------------------------


def test_the_specimen_is_rich(specimen: Specimen) -> None:
    assert len(specimen.manifest.objects) >= 2
    assert specimen.index.block_bytes == BLOCK
    assert {name: len(specimen.index.tensors[name].chunks) for name in SHARDED} == dict.fromkeys(SHARDED, 2)
    assert all(len(chunk.crcs) > 8 for chunk in specimen.index.tensors["rows"].chunks)
    assert any(chunk.is_opaque for chunk in specimen.index.tensors["sparse"].chunks)
    assert set(specimen.index.blobs) == {"python.name", "python.pair", "python.step"}
    assert (load_whole(specimen), load_rows(specimen), load_some(specimen, "rows")) == (None, None, None)
    report = verify(specimen)
    assert (report.problems, report.warnings) == ((), ())


def test_a_flipped_bit_at_each_edge_of_a_data_object_is_found_or_not_read(specimen: Specimen) -> None:
    chance = random.Random(1)
    for entry in specimen.manifest.objects:
        data = specimen.files[entry.key]
        edges = specimen.edges(entry.key)
        if isinstance(specimen.root, LocalStore):
            edges = edges[::8]
        for at in edges:
            check_data(specimen, {entry.key: flipped(data, at, chance)}, "bit at an edge")


def test_a_flipped_bit_anywhere_in_a_data_object_is_found_or_not_read(specimen: Specimen) -> None:
    chance = random.Random(repr(type(specimen.root)))
    for entry in specimen.manifest.objects:
        data = specimen.files[entry.key]
        for _ in range(40):
            check_data(
                specimen, {entry.key: flipped(data, chance.randrange(len(data)), chance)}, "bit anywhere"
            )


def test_a_data_object_that_is_another_is_found_or_not_read(specimen: Specimen) -> None:
    chance = random.Random(3)
    for entry in specimen.manifest.objects:
        data = specimen.files[entry.key]
        for what, change in WHOLE.items():
            check_data(specimen, {entry.key: change(data, chance)}, what)
        for at in specimen.edges(entry.key)[:: 4 if isinstance(specimen.root, MemoryStore) else 16]:
            check_data(specimen, {entry.key: data[: max(at, 1)]}, "cut at an edge")


def test_exchanged_data_objects_are_found(specimen: Specimen) -> None:
    keys = [entry.key for entry in specimen.manifest.objects]
    for one, other in itertools.combinations(keys, 2):
        check_data(specimen, {one: specimen.files[other], other: specimen.files[one]}, "exchanged")
        check_data(specimen, {one: specimen.files[other]}, "in place of another")


def test_exchanged_data_objects_of_one_size_are_found(saved: Path) -> None:
    pair = Specimen.of(MemoryStore.fresh(), read_files(saved / "pair" / "7"))
    one, other = (entry.key for entry in pair.manifest.objects)
    assert len(pair.files[one]) == len(pair.files[other])
    for changes in ({one: pair.files[other], other: pair.files[one]}, {one: pair.files[other]}):
        pair.put(changes)
        error = load(pair, {"rows": torch.zeros(64, 100)})
        assert isinstance(error, IntegrityError)
        assert "rows" in str(error)
        assert any(key in str(error) for key in changes)
        assert problems(verify(pair)) == {key: frozenset({"rows"}) for key in changes}
        pair.mend(changes)
        counts["exchanged, of one size"] += 1
    assert verify(pair).is_sound


def test_data_of_an_older_save_is_found(specimen: Specimen, saved: Path) -> None:
    for older in (read_files(saved / "old" / "7"), read_files(saved / "new first" / "7")):
        for entry, data in zip(specimen.manifest.objects, data_of(older), strict=True):
            if data == specimen.files[entry.key]:
                counts["of an older save, and the same"] += 1
            else:
                check_data(specimen, {entry.key: data}, "of an older save")


def data_of(files: Files) -> list[bytes]:
    """Return a save's data objects in the order of its manifest."""
    older = Specimen.of(MemoryStore.fresh(), files)
    return [files[entry.key] for entry in older.manifest.objects]


def test_a_flipped_bit_in_what_describes_the_data_is_found(specimen: Specimen) -> None:
    chance = random.Random(5)
    is_local = isinstance(specimen.root, LocalStore)
    for key in specimen.small_keys:
        data = specimen.files[key]
        places = {0, 1, 2, 3, len(data) - 9, len(data) - 8, len(data) - 2, len(data) - 1}
        places |= {chance.randrange(len(data)) for _ in range(15 if is_local else 60)}
        for at in sorted(places):
            check_small(specimen, key, flipped(data, at, chance), f"bit in {kind_of(key)}")


def test_what_describes_the_data_is_another(specimen: Specimen, saved: Path) -> None:
    chance = random.Random(6)
    older = [read_files(saved / name / "7") for name in ("old", "old first", "new first")]
    for key in specimen.small_keys:
        data = specimen.files[key]
        for change in WHOLE.values():
            check_small(specimen, key, change(data, chance), f"another {kind_of(key)}")
        for length in sorted(chance.randrange(1, len(data)) for _ in range(8)):
            check_small(specimen, key, data[:length], f"another {kind_of(key)}")
        for files in older:
            other = max((name, content) for name, content in files.items() if kind_of(name) == kind_of(key))[
                1
            ]
            check_small(specimen, key, other, f"{kind_of(key)} of an older save")
        for other_key in (*specimen.small_keys, specimen.manifest.objects[0].key):
            if specimen.files[other_key] != data:
                check_small(specimen, key, specimen.files[other_key], "in place of another")


def kind_of(key: str) -> str:
    """Return what kind of object a small one is."""
    return key.split(".")[0] or key


def test_all_but_the_manifest_of_an_older_save_is_found(specimen: Specimen, saved: Path) -> None:
    """What a store brings back that has lost its newest writes, but for the newest manifest."""
    older = Specimen.of(MemoryStore.fresh(), read_files(saved / "old" / "7"))
    keys = [entry.key for entry in specimen.manifest.objects]
    olds = [older.files[entry.key] for entry in older.manifest.objects]
    changes = dict(zip(keys, olds, strict=True)) | {
        specimen.index_key: older.files[older.index_key],
        specimen.stock_key: older.files[older.stock_key],
    }
    specimen.put(changes)
    for error in (load_whole(specimen), load_rows(specimen), load_some(specimen, "scalar")):
        assert isinstance(error, IntegrityError)
        assert specimen.index_key in str(error)
    assert problems(verify(specimen)).keys() == changes.keys()
    counts["all of an older save"] += 1
