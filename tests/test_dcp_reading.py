"""Loading into every kind of destination, through planners of every kind, within the byte budget."""

from __future__ import annotations

import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_dcp_single import failure, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from remote_ckpt.dcp.archives import ArchiveFile
from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.dcp.sources import StoredRange
from remote_ckpt.errors import FormatError, UntrustedDataError
from remote_ckpt.options import MiB, Options, TransferOptions
from remote_ckpt.store import open_store
from remote_ckpt.store.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
TIGHT = Options(transfer=TransferOptions(budget_bytes=10 * MiB, part_bytes=5 * MiB))


class ScratchPlanner(DefaultLoadPlanner):
    """Hands out one scratch buffer again and again, and copies out of it at the commit."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.empty(0)
        self.events: list[tuple[str, str]] = []

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        self.events.append(("resolve", read_item.dest_index.fqn))
        if self.scratch.numel() < tensor.numel():
            self.scratch = torch.empty(tensor.numel())
        return self.scratch[: tensor.numel()].view(tensor.shape)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.events.append(("commit", read_item.dest_index.fqn))
        self.lookup_tensor(read_item.dest_index).copy_(tensor)


@pytest.mark.parametrize("stock", [False, True])
def test_a_planner_with_one_scratch_buffer_gets_each_tensor_in_turn(tmp_path: Path, stock: bool) -> None:
    state = {f"t{n}": torch.full((n % 3 + 1, 500_000), float(n)) for n in range(8)}
    state["large"] = torch.full((3_000_000,), 9.0)
    if stock:
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "ck"))
    else:
        save(state, str(tmp_path / "ck"))
    planner = ScratchPlanner()
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(loaded, storage_reader=RemoteStorageReader(tmp_path / "ck", options=TIGHT), planner=planner)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    resolved = [fqn for event, fqn in planner.events if event == "resolve"]
    assert planner.events == [pair for fqn in resolved for pair in (("resolve", fqn), ("commit", fqn))]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(10.0)[::3][:1],
        lambda: torch.ones(5, 3)[:1, 0],
        lambda: torch.ones(()).expand(1),
    ],
)
def test_a_single_element_of_any_stride_is_saved_and_loaded_into(tmp_path: Path, make: Any) -> None:
    save({"x": make() + 4, "y": make()}, str(tmp_path / "ck"))
    template = {"x": torch.zeros(10)[::3][:1], "y": torch.zeros(1)}
    load(template, str(tmp_path / "ck"))
    assert torch.equal(template["x"], make() + 4)
    assert torch.equal(template["y"], make())


def test_a_reader_sees_each_new_generation(tmp_path: Path) -> None:
    reader = RemoteStorageReader(tmp_path / "ck")
    for value in (1.0, 2.0, 3.0):
        save({"a": torch.full((3,), value)}, str(tmp_path / "ck"), overwrite=True)
        state = {"a": torch.zeros(3)}
        dcp.load(state, storage_reader=reader)
        assert torch.equal(state["a"], torch.full((3,), value))
        assert reader.manifest is not None
        assert reader.manifest.generation == int(value)


def test_a_resolution_is_used_for_one_load(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, str(tmp_path / "ck"))
    reader = RemoteStorageReader(tmp_path / "ck")
    resolution = reader.resolve()
    other = RemoteStorageReader(tmp_path / "ck")
    other.adopt(resolution)
    for one in (reader, other):
        state = {"a": torch.zeros(3)}
        dcp.load(state, storage_reader=one)
        assert torch.equal(state["a"], torch.ones(3))


def test_a_reader_pickles_before_and_after_use(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, str(tmp_path / "ck"))
    reader = RemoteStorageReader(tmp_path / "ck")
    reader.resolve()
    state = {"a": torch.zeros(3)}
    dcp.load(state, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert torch.equal(state["a"], torch.ones(3))


def test_a_relative_checkpoint_id_means_the_same_to_writer_and_reader() -> None:
    root = MemoryStore.fresh()
    dcp.save({"a": torch.ones(2)}, checkpoint_id="199", storage_writer=writer_of(f"{root.url}/run"))
    state = {"a": torch.zeros(2)}
    dcp.load(state, checkpoint_id="199", storage_reader=RemoteStorageReader(f"{root.url}/run"))
    assert torch.equal(state["a"], torch.ones(2))


def writer_of(url: str) -> Any:
    from remote_ckpt.dcp.writer import RemoteStorageWriter

    return RemoteStorageWriter(url)


def test_of_tied_destinations_with_different_values_the_last_wins_and_nothing_is_called_corrupt(
    tmp_path: Path,
) -> None:
    size = 4 * MiB
    save({"a": torch.full((size,), 1.0), "b": torch.full((size,), 2.0)}, str(tmp_path / "ck"))
    for _ in range(3):
        tied = torch.zeros(size)
        load({"a": tied, "b": tied}, str(tmp_path / "ck"))
        assert torch.equal(tied, torch.full((size,), 2.0))


def test_views_of_one_base_are_filled_apart(tmp_path: Path) -> None:
    state = {"q": torch.randn(300, 10), "k": torch.randn(300, 10)}
    save(state, str(tmp_path / "ck"))
    base = torch.zeros(300, 20)
    load({"q": base[:, :10], "k": base[:, 10:]}, str(tmp_path / "ck"))
    assert torch.equal(base, torch.cat([state["q"], state["k"]], dim=1))


def test_sparse_tensors_come_back(tmp_path: Path) -> None:
    value = torch.eye(4).to_sparse()
    save({"s": value}, str(tmp_path / "ck"))
    template = {"s": torch.zeros(4, 4).to_sparse()}
    load(template, str(tmp_path / "ck"))
    assert torch.equal(template["s"].to_dense(), torch.eye(4))


def test_large_archives_of_stock_checkpoints_are_read_in_parts(tmp_path: Path) -> None:
    state = {"w": torch.randn(3000, 1000), "h": torch.randn(10)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "ck"))
    template = {"w": torch.zeros(3000, 1000), "h": torch.zeros(10)}
    load(template, str(tmp_path / "ck"), options=TIGHT)
    assert torch.equal(template["w"], state["w"])
    assert torch.equal(template["h"], state["h"])


def test_an_archive_file_reads_like_a_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * 2000
    (tmp_path / "object").write_bytes(b"before" + data + b"after")
    stored = StoredRange("object", 6, len(data), b"", True)
    file = ArchiveFile(open_store(tmp_path), stored, TIGHT)
    assert file.seek(-10, io.SEEK_END) == len(data) - 10
    assert file.read(100) == data[-10:]
    assert file.seek(3) == 3
    assert file.read(5) == data[3:8]
    file.seek(70_000)
    assert file.read(300_000) == data[70_000:370_000]
    file.seek(0)
    assert file.readall() == data


class OwnBytes(DefaultLoadPlanner):
    """Reads Python objects its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bytes] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.seen[read_item.dest_index.fqn] = value.getvalue()


class RawBytes(DefaultSavePlanner):
    """Stores Python objects as raw bytes."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(b"raw bytes")
        return super().resolve_data(write_item)


def test_a_planner_that_reads_bytes_itself_gets_them_as_they_were_once_vetted(tmp_path: Path) -> None:
    from remote_ckpt.dcp.writer import RemoteStorageWriter

    save({"n": 5}, str(tmp_path / "archive"))
    planner = OwnBytes()
    dcp.load({"n": 0}, storage_reader=RemoteStorageReader(tmp_path / "archive"), planner=planner)
    assert torch.load(io.BytesIO(planner.seen["n"]), weights_only=True) == 5

    dcp.save({"n": 5}, storage_writer=RemoteStorageWriter(tmp_path / "raw"), planner=RawBytes())
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"n": 0}, storage_reader=RemoteStorageReader(tmp_path / "raw"), planner=OwnBytes())
    assert isinstance(failure(caught.value), UntrustedDataError)
    planner = OwnBytes()
    dcp.load({"n": 0}, storage_reader=RemoteStorageReader(tmp_path / "raw", trusted=True), planner=planner)
    assert planner.seen == {"n": b"raw bytes"}


def test_a_refused_object_leaves_the_tensors_as_they_were(tmp_path: Path) -> None:
    import fractions

    save({"a": torch.ones(3), "x": fractions.Fraction(1, 3)}, str(tmp_path / "ck"))
    template: dict[str, Any] = {"a": torch.zeros(3), "x": None}
    with pytest.raises(CheckpointException) as caught:
        load(template, str(tmp_path / "ck"))
    assert isinstance(failure(caught.value), UntrustedDataError)
    assert torch.equal(template["a"], torch.zeros(3))


def test_a_plain_folder_is_named_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    torch.save({"model": {}}, tmp_path / "7" / "checkpoint.pth")
    with pytest.raises(FormatError, match=r"plain checkpoint"):
        RemoteStorageReader(tmp_path / "7").read_metadata()


def test_two_loads_in_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    save({"a": torch.arange(1000.0), "n": {"lr": 0.5}}, str(tmp_path / "ck"))
    results: list[bool] = []

    def one_load() -> None:
        state: dict[str, Any] = {"a": torch.zeros(1000), "n": {"lr": 0.0}}
        dcp.load(state, storage_reader=RemoteStorageReader(tmp_path / "ck"), no_dist=True)
        results.append(torch.equal(state["a"], torch.arange(1000.0)) and state["n"] == {"lr": 0.5})

    threads = [threading.Thread(target=one_load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_what_stock_dcp_resumed_from_is_not_deleted_by_retention(tmp_path: Path) -> None:
    from remote_ckpt import find_all_checkpoints, keep_last_n_checkpoints

    for step in (1, 2, 3):
        save({"a": torch.full((2,), float(step))}, str(tmp_path / str(step)))
    load({"a": torch.zeros(2)}, str(tmp_path / "1"))
    keep_last_n_checkpoints(tmp_path, 1)
    assert [path.name for path in find_all_checkpoints(tmp_path)] == ["1", "3"]


def test_paths_that_would_make_endless_lists_are_damage() -> None:
    from remote_ckpt.dcp.metadata import rebuild_metadata
    from remote_ckpt.errors import CheckpointDamagedError
    from remote_ckpt.index import Index
    from remote_ckpt.manifest import new_save_id

    index = Index(
        save_id=new_save_id(), block_bytes=4096, objects=[], planner_data={"m.a": ("m", "a", 200_000_000)}
    )
    with pytest.raises(CheckpointDamagedError, match=r"200000000"):
        rebuild_metadata(index, url="memory://x")
