"""Field cases of other versions, of hostile files, and of values that were saved on another device."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from golden_state import golden_state
from test_dcp_single import assert_same, blank
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from remote_ckpt import (
    CheckedLoadPlanner,
    CheckpointDamagedError,
    CheckpointDirectory,
    FormatError,
    IntegrityError,
    RemoteCkptError,
    RemoteStorageReader,
    RemoteStorageWriter,
    UntrustedDataError,
    find_latest_checkpoint,
    init_model_from_checkpoint_for_evals,
    load_checkpoint,
    save_checkpoint,
)
from remote_ckpt.dcp.devices import moved_to_cpu
from remote_ckpt.dcp.pickles import load_pickle
from remote_ckpt.manifest import FORMAT_VERSION
from remote_ckpt.store import open_store

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

GOLDEN = Path(__file__).parent / "golden"
State = dict[str, Any]


# --- versions -----------------------------------------------------------------------------------


def rewrite_manifest(checkpoint: Path, **changes: Any) -> None:
    """Change fields of a manifest, with the digest that belongs to them."""
    (path,) = checkpoint.glob("manifest.*.json")
    document = json.loads(path.read_bytes()) | changes
    del document["digest"]
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    digest = "sha256:" + hashlib.sha256(canonical).hexdigest()
    path.write_text(json.dumps({**document, "digest": digest}))


def saved_model(checkpoint: Path) -> nn.Linear:
    model = nn.Linear(3, 2)
    save_checkpoint(checkpoint, iteration=7, model=model)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"version": [1, 7], "a_field_of_1_7": {"any": "thing"}},
        {"torch_version": "1.9.0"},
        {"torch_version": "99.0.0+cu990"},
        {"torch_version": None},
        {"package_version": "99.0"},
    ],
    ids=["equal", "newer minor format", "older torch", "newer torch", "no torch", "newer package"],
)
def test_br_115_a_readable_format_loads_whatever_versions_wrote_it(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = saved_model(tmp_path / "1")
    rewrite_manifest(tmp_path / "1", **changes)
    other = nn.Linear(3, 2)
    latest = find_latest_checkpoint(tmp_path)
    assert latest is not None
    assert load_checkpoint(latest, model=other) == 7
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("version", [[2, 0], [3, 1]])
def test_br_115_a_newer_format_is_refused_with_its_number_and_what_to_do(
    tmp_path: Path, version: list[int]
) -> None:
    saved_model(tmp_path / "1")
    rewrite_manifest(tmp_path / "1", version=version)
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(FormatError, match=rf"format {version[0]}\.{version[1]}.*use a newer remote_ckpt"):
        load_checkpoint(tmp_path / "1", model=model)
    assert torch.equal(model.weight, before)


def test_br_115_the_first_format_is_kept_as_a_fixture_and_loads() -> None:
    assert FORMAT_VERSION == (1, 0), "keep a checkpoint of the format before, and load it here"
    state: State = blank(golden_state())
    state["layers"] = [torch.zeros(2), {"lr": 0.0}]
    dcp.load(state, storage_reader=RemoteStorageReader(GOLDEN / "1" / "checkpoint"))
    assert_same(state, golden_state())


# --- hostile files ------------------------------------------------------------------------------


class Exploit:
    """Pickles to a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def stock_state(folder: Path) -> None:
    dcp.save({"model": nn.Linear(3, 2).state_dict()}, storage_writer=FileSystemWriter(folder))


def replace_file(checkpoint: Path, pattern: str, data: bytes) -> None:
    (path,) = checkpoint.glob(pattern)
    path.write_bytes(data)


WAYS_TO_READ: dict[str, Callable[[Path], Any]] = {
    "load_checkpoint": lambda path: load_checkpoint(path, model=nn.Linear(3, 2)),
    "read_metadata": lambda path: RemoteStorageReader(path).read_metadata(),
    "weights": lambda path: init_model_from_checkpoint_for_evals(nn.Linear(3, 2), path),
    "verify": lambda path: CheckpointDirectory(path.parent).verify(path.name),
    "latest": lambda path: find_latest_checkpoint(path.parent),
    "list": lambda path: CheckpointDirectory(path.parent).list(),
}


REFUSING = {
    "manifest.*.json": ("load_checkpoint", "read_metadata", "weights", "latest"),
    "index.*": ("load_checkpoint", "read_metadata", "weights"),
    ".metadata": (),
    "metadata.*.pickle": (),
}
"""Which ways need the file. Others go without it: a listing names what is damaged, and goes on."""


@pytest.mark.parametrize("way", WAYS_TO_READ)
@pytest.mark.parametrize("packed", [False, True], ids=["bare", "gzipped"])
@pytest.mark.parametrize("pattern", REFUSING)
def test_br_116_a_pickle_in_the_place_of_any_of_our_files_is_not_executed(
    tmp_path: Path, pattern: str, packed: bool, way: str
) -> None:
    saved_model(tmp_path / "1")
    data = pickle.dumps(Exploit(tmp_path / "executed"))
    replace_file(tmp_path / "1", pattern, gzip.compress(data) if packed else data)
    is_refused = False
    try:
        WAYS_TO_READ[way](tmp_path / "1")
    except RemoteCkptError:
        is_refused = True
    assert is_refused == (way in REFUSING[pattern])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("pattern", "expected"), [("manifest.*.json", CheckpointDamagedError), ("index.*", IntegrityError)]
)
def test_br_116_a_pickle_for_a_manifest_or_index_is_damage(
    tmp_path: Path, pattern: str, expected: type[Exception]
) -> None:
    saved_model(tmp_path / "1")
    replace_file(tmp_path / "1", pattern, pickle.dumps(Exploit(tmp_path / "executed")))
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(expected):
        load_checkpoint(tmp_path / "1", model=model)
    assert torch.equal(model.weight, before)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_br_116_a_hostile_metadata_file_of_a_stock_checkpoint_is_not_executed(
    tmp_path: Path, way: str
) -> None:
    stock_state(tmp_path / "1")
    replace_file(tmp_path / "1", ".metadata", pickle.dumps(Exploit(tmp_path / "executed")))
    if way in ("verify", "latest", "list"):
        WAYS_TO_READ[way](tmp_path / "1")
    else:
        with pytest.raises(UntrustedDataError):
            WAYS_TO_READ[way](tmp_path / "1")
    assert not (tmp_path / "executed").exists()


# --- other devices ------------------------------------------------------------------------------


@contextmanager
def saving_as_on_a_gpu() -> Iterator[None]:
    """Let torch note, in what it saves, that storages were on the second GPU, as where there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
        yield


def objects() -> State:
    return {
        "model": {"weight": torch.ones(2, 3), "bias": torch.ones(2)},
        "pair": (torch.arange(3.0), {"deep": torch.ones(2)}),
        "slice": (torch.arange(1000.0)[3:5],),
    }


@pytest.mark.parametrize("make_planner", [DefaultLoadPlanner, CheckedLoadPlanner])
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("make_writer", [RemoteStorageWriter, FileSystemWriter])
def test_br_119_what_was_saved_on_a_gpu_lands_on_the_cpu_inside_objects_too(
    tmp_path: Path, make_writer: Any, trusted: bool, make_planner: Any
) -> None:
    with saving_as_on_a_gpu():
        dcp.save(objects(), storage_writer=make_writer(tmp_path / "1"))
    written = b"".join(path.read_bytes() for path in (tmp_path / "1").rglob("*.distcp"))
    assert b"cuda:1" in written
    state: State = {"model": blank(objects()["model"]), "pair": (), "slice": ()}
    reader = RemoteStorageReader(tmp_path / "1", trusted=trusted)
    dcp.load(state, storage_reader=reader, planner=make_planner())
    tensors = [*state["model"].values(), state["pair"][0], state["pair"][1]["deep"], state["slice"][0]]
    assert [tensor.device.type for tensor in tensors] == ["cpu"] * 5
    assert_same(state["model"], objects()["model"])
    assert (state["pair"][0].tolist(), state["slice"][0].tolist()) == ([0.0, 1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize("trusted", [False, True])
def test_br_119_a_checkpoint_from_a_gpu_loads_into_a_model_on_the_cpu(tmp_path: Path, trusted: bool) -> None:
    model = nn.Linear(3, 2)
    with saving_as_on_a_gpu():
        save_checkpoint(tmp_path / "1", iteration=7, model=model, extra={"pair": (torch.ones(2), 1)})
    other, extra = nn.Linear(3, 2), {"pair": None}
    assert load_checkpoint(tmp_path / "1", model=other, extra=extra, trusted=trusted) == 7
    assert torch.equal(other.weight, model.weight)
    pair: Any = extra["pair"]
    assert (pair[0].device.type, pair[0].tolist()) == ("cpu", [1.0, 1.0])


_numbers = itertools.count()


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("trusted", [False, True])
def test_br_119_a_file_of_weights_from_a_gpu_loads_on_the_cpu(
    tmp_path: Path, is_remote: bool, legacy: bool, trusted: bool
) -> None:
    weights = nn.Linear(3, 2).state_dict()
    file = tmp_path / "weights.pth"
    with saving_as_on_a_gpu():
        torch.save({"model": weights}, file, _use_new_zipfile_serialization=not legacy)
    assert b"cuda:1" in file.read_bytes()
    place = str(file)
    if is_remote:
        place = f"memory://gpu-{next(_numbers)}/weights.pth"
        open_store(place.rpartition("/")[0]).write("weights.pth", file.read_bytes())
    model = nn.Linear(3, 2)
    init_model_from_checkpoint_for_evals(model, place, trusted=trusted)
    assert torch.equal(model.weight, weights["weight"])
    assert model.weight.device.type == "cpu"


# --- archives that were packed again ------------------------------------------------------------


def packed_again(archive: bytes, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(made, "w", compression) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info), compression)
    return made.getvalue()


def archive_of(model: nn.Linear) -> bytes:
    made = io.BytesIO()
    torch.save({"model": model.state_dict()}, made)
    return made.getvalue()


def test_a_compressed_archive_is_not_called_damaged_and_what_is_advised_works(tmp_path: Path) -> None:
    saved, file = nn.Linear(3, 2), tmp_path / "weights.pth"
    packed = packed_again(archive_of(saved))
    file.write_bytes(packed)
    model = nn.Linear(3, 2)
    with pytest.raises(UntrustedDataError, match=r"compressed .*zip it again without .*trusted=True"):
        init_model_from_checkpoint_for_evals(model, str(file))
    init_model_from_checkpoint_for_evals(model, str(file), trusted=True)
    assert torch.equal(model.weight, saved.weight)
    file.write_bytes(packed_again(packed, zipfile.ZIP_STORED))
    other = nn.Linear(3, 2)
    init_model_from_checkpoint_for_evals(other, str(file))
    assert torch.equal(other.weight, saved.weight)


def test_an_archive_that_is_only_marked_as_compressed_is_damaged() -> None:
    archive = bytearray(archive_of(nn.Linear(3, 2)))
    archive[archive.index(b"PK\x01\x02") + 10] = zipfile.ZIP_DEFLATED
    with pytest.raises(CheckpointDamagedError, match="it cannot be read"):
        load_pickle(bytes(archive), is_trusted=False, what="it")


@pytest.mark.parametrize("at", [8, 10], ids=["flags", "compression"])
def test_a_trusted_archive_whose_entries_zipfile_cannot_read_is_left_to_torch(at: int) -> None:
    archive = bytearray(archive_of(nn.Linear(3, 2)))
    entry = archive.index(b"PK\x01\x02")
    archive[entry + at] = {8: 1, 10: 99}[at]  # encrypted; a compression that nobody knows
    assert moved_to_cpu(bytes(archive)) == bytes(archive)
