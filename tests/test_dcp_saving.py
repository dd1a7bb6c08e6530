"""What a save writes where planners, values or the process are unusual."""

from __future__ import annotations

import io
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from remote_ckpt.dcp.metadata import ItemKey, build_index
from remote_ckpt.dcp.objects import DataObject, StoredItem, plan_objects
from remote_ckpt.dcp.planner import CheckedSavePlanner
from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.dcp.values import KEPT_BYTES, PlanValues
from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.errors import SaveFailedError
from remote_ckpt.index import parse_index
from remote_ckpt.manifest import Manifest
from remote_ckpt.options import KiB, MiB, Options, TransferOptions
from remote_ckpt.store.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized", "ignore:TypedStorage is deprecated"
)

State = dict[str, Any]
SMALL_BUDGET = Options(transfer=TransferOptions(budget_bytes=16 * MiB, part_bytes=8 * MiB, concurrency=2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "7"


def save(state: State, url: object, planner: Any = None, options: Options | None = None) -> Manifest:
    writer = RemoteStorageWriter(str(url), options=options)
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    assert writer.manifest is not None
    return writer.manifest


def load(state: State, url: object, planner: Any = None) -> State:
    dcp.load(state, storage_reader=RemoteStorageReader(str(url)), planner=planner, no_dist=True)
    return state


def load_stock(state: State, folder: Path) -> State:
    dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


def failure(url: object, state: State, planner: Any = None, options: Options | None = None) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        save(state, url, planner, options)
    return caught.value.failures[0][0]


class Converting(DefaultSavePlanner):
    """Gives other dtypes or shapes than it planned."""

    def __init__(self, convert: Any) -> None:
        super().__init__()
        self.convert = convert

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return self.convert(value) if isinstance(value, torch.Tensor) else value


class Staging(DefaultSavePlanner):
    """Hands out one and the same memory for every tensor, as planners that copy from a device do."""

    def __init__(self, buffer_bytes: int) -> None:
        super().__init__()
        self.buffer = torch.zeros(buffer_bytes, dtype=torch.uint8)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = super().resolve_data(write_item)
        if isinstance(value, io.BytesIO):
            return value
        staged = self.buffer[: value.nbytes].view(value.dtype).view(value.shape)
        return staged.copy_(value)


class TestConvertingPlanners:
    @pytest.mark.parametrize("to", [torch.float16, torch.float32, torch.float64])
    def test_another_dtype_than_planned_is_read_as_what_it_is(self, folder: Path, to: torch.dtype) -> None:
        expected = torch.arange(8).to(torch.bfloat16)
        save({"x": expected.clone()}, folder, Converting(lambda value: value.to(to)))
        for loaded in (
            load({"x": torch.zeros(8, dtype=torch.bfloat16)}, folder),
            load_stock({"x": torch.zeros(8, dtype=torch.bfloat16)}, folder),
        ):
            assert loaded["x"].tolist() == expected.tolist()

    def test_another_shape_than_planned_never_passes_for_the_planned_one(self, folder: Path) -> None:
        manifest = save({"x": torch.arange(6.0).reshape(2, 3)}, folder, Converting(lambda value: value.t()))
        assert manifest.index is not None
        data = (folder / manifest.index.key).read_bytes()
        (chunk,) = parse_index(data, url="", key="").tensors["x"].chunks
        assert chunk.is_opaque
        with pytest.raises(CheckpointException):
            load({"x": torch.zeros(2, 3)}, folder)

    def test_a_planner_that_changes_its_mind_between_size_and_bytes_is_refused(self, folder: Path) -> None:
        dtypes = iter([torch.float32, torch.int32])
        error = failure(folder, {"x": torch.ones(4)}, Converting(lambda value: value.view(next(dtypes))))
        assert isinstance(error, SaveFailedError)
        assert "x changed while it was saved" in str(error)

    def test_a_planner_that_resolves_to_nothing_of_use_is_refused(self, folder: Path) -> None:
        error = failure(folder, {"x": torch.ones(4)}, Converting(lambda value: value.tolist()))
        assert "the planner resolved x to list, not Tensor" in str(error)


class TestStagingPlanners:
    """With parts of 5 MiB and tensors of 6 and of 100 KiB: several parts, and several tensors in one."""

    OPTIONS = Options(transfer=TransferOptions(budget_bytes=64 * MiB, part_bytes=5 * MiB))

    @pytest.mark.parametrize("size_bytes", [100 * KiB, 6 * MiB])
    @pytest.mark.parametrize("is_local", [True, False])
    def test_every_tensor_keeps_its_own_values(self, folder: Path, size_bytes: int, is_local: bool) -> None:
        url = str(folder) if is_local else f"{MemoryStore.fresh().url}/run/7"
        state = {f"x{n}": torch.full((size_bytes // 4,), float(n)) for n in range(12)}
        save(state, url, Staging(size_bytes), self.OPTIONS)
        loaded = load({name: torch.zeros_like(value) for name, value in state.items()}, url)
        assert all(loaded[name].equal(value) for name, value in state.items())

    def test_torchs_reader_finds_them_too(self, folder: Path) -> None:
        state = {f"x{n}": torch.full((100_000,), float(n)) for n in range(12)}
        save(state, folder, Staging(MiB), self.OPTIONS)
        loaded = load_stock({name: torch.zeros_like(value) for name, value in state.items()}, folder)
        assert all(loaded[name].equal(value) for name, value in state.items())

    def test_windows_of_a_staged_tensor_are_copies(self) -> None:
        planner, items = planned(Staging(MiB), {"x": torch.ones(100)})
        values = PlanValues(planner, window_bytes=5 * MiB)
        prepared = values.prepare(items[0])
        windows = list(values.windows(prepared))
        planner.buffer.zero_()
        assert b"".join(windows) == torch.ones(100).numpy().tobytes()
        assert prepared.is_staged

    @pytest.mark.parametrize("planner", [DefaultSavePlanner(), CheckedSavePlanner()])
    def test_what_torchs_own_planner_resolves_is_sent_without_a_copy(self, planner: Any) -> None:
        state = {"x": torch.ones(100)}
        planner, items = planned(planner, state)
        values = PlanValues(planner, window_bytes=5 * MiB)
        prepared = values.prepare(items[0])
        (window,) = values.windows(prepared)
        state["x"].zero_()
        assert bytes(window) == bytes(400)
        assert not prepared.is_staged

    def test_a_subclass_that_stages_its_shards_itself_is_not_taken_for_the_states_memory(self) -> None:
        class Sharded(torch.Tensor):
            def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
                return [write_item(fqn, torch.ones(100))]

            def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
                return torch.ones(100)

        planner, items = planned(DefaultSavePlanner(), {"x": torch.ones(100).as_subclass(Sharded)})
        assert PlanValues(planner, window_bytes=5 * MiB).prepare(items[0]).is_staged


def planned(planner: Any, state: State) -> tuple[Any, list[WriteItem]]:
    """A planner that has planned a save of ``state``, and its items."""
    planner.set_up_planner(state, is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    return planner, planner.finish_plan(plans[0]).items


def write_item(fqn: str, value: torch.Tensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
    return WriteItem(
        MetadataIndex(fqn, chunk.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=value.dtype), value.shape),
    )


class Subclass(torch.Tensor):
    """Written by ``torch.save``, as its content may be more than its bytes."""


class TestOpaqueValues:
    def test_a_slice_does_not_carry_the_storage_around_it(self, folder: Path) -> None:
        secret = torch.full((100_000,), 7.0)
        secret[10:20] = 1
        manifest = save({"x": secret[10:20].as_subclass(Subclass)}, folder)
        assert manifest.total_bytes < 10_000
        loaded = {"x": torch.zeros(10).as_subclass(Subclass)}
        dcp.load(loaded, storage_reader=RemoteStorageReader(str(folder), trusted=True), no_dist=True)
        assert loaded["x"].tolist() == [1.0] * 10

    def test_large_ones_are_held_one_at_a_time(self, folder: Path) -> None:
        state = {f"x{n}": bytes([n]) * (4 * MiB) for n in range(12)}
        tracemalloc.start()
        try:
            save(state, folder, options=SMALL_BUDGET)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 24 * MiB  # torch.save and the check of its archive hold one value several times

    def test_they_come_back_whether_they_were_kept_or_not(self, folder: Path) -> None:
        state = {"large": b"a" * (2 * KEPT_BYTES), "small": b"b" * 10, "tensor": torch.ones(3)}
        save(dict(state), folder)
        loaded = load({"large": b"", "small": b"", "tensor": torch.zeros(3)}, folder)
        assert (loaded["large"], loaded["small"]) == (state["large"], state["small"])
        assert (
            load_stock({"large": b"", "small": b"", "tensor": torch.zeros(3)}, folder)["large"]
            == state["large"]
        )

    def test_small_ones_are_kept_up_to_one_part_in_all(self) -> None:
        planner, items = planned(DefaultSavePlanner(), {f"x{n}": bytes(KEPT_BYTES // 2) for n in range(4)})
        values = PlanValues(planner, window_bytes=KEPT_BYTES + KEPT_BYTES // 4)
        kept = [values.prepare(item).archive is not None for item in items]
        assert kept == [True, True, False, False]

    def test_one_that_changes_its_length_is_refused(self, folder: Path) -> None:
        lengths = iter([2 * KEPT_BYTES, 3 * KEPT_BYTES])

        class Growing:
            def __reduce__(self) -> Any:
                return bytes, (bytes(next(lengths)),)

        assert "x changed while it was saved" in str(failure(folder, {"x": Growing()}))

    def test_the_warning_names_what_safe_loading_refuses(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        np = pytest.importorskip("numpy")
        save({"plain": [1, 2], "structured": np.zeros(2, dtype=[("a", "i4")])}, folder)
        (warning,) = [one.getMessage() for one in caplog.records if one.name.startswith("remote_ckpt")]
        assert warning.startswith(f"structured in {folder} holds ")


class RawBytes(DefaultSavePlanner):
    """Writes these bytes for every value that is no tensor."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = super().resolve_data(write_item)
        return io.BytesIO(self.data) if isinstance(value, io.BytesIO) else value


class Receiving(DefaultLoadPlanner):
    """Keeps the bytes of the last value."""

    received: bytes | None = None
    loads_safely = True

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type == LoadItemType.BYTE_IO
        self.received = value.getvalue()


class TestEmptyValues:
    @pytest.mark.parametrize("others", [{}, {"x": torch.ones(2)}])
    def test_a_value_of_no_bytes_is_saved(self, folder: Path, others: State) -> None:
        manifest = save({"b": 1, **others}, folder, RawBytes(b""))
        assert all(entry.size_bytes > 0 for entry in manifest.objects)
        planner = Receiving()
        load({"b": 2, **others}, folder, planner)
        assert planner.received == b""

    def test_torch_reads_it_too(self, folder: Path) -> None:
        save({"b": 1}, folder, RawBytes(b""))
        planner = Receiving()
        dcp.load({"b": 2}, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
        assert planner.received == b""


class Shrinking(DefaultSavePlanner):
    """Plans only a part of each tensor, as one rank alone holds of a sharded one."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[_part(item) for item in plan.items])


def _part(item: WriteItem) -> WriteItem:
    assert item.tensor_data is not None
    whole = torch.Size([2 * item.tensor_data.size[0]])
    return replace(item, type=WriteItemType.SHARD, tensor_data=replace(item.tensor_data, size=whole))


class TestWholeness:
    def test_a_tensor_of_which_nobody_holds_a_part_is_refused_by_name(self, folder: Path) -> None:
        error = failure(folder, {"some.weight": torch.ones(4)}, Shrinking())
        assert isinstance(error, SaveFailedError)
        assert "some.weight of shape [8] cannot be saved: its chunks do not cover it" in str(error)
        assert [path.name for path in folder.rglob("*.distcp")] == []

    def test_ranks_that_hold_another_dtype_than_planned_are_refused_by_name(self) -> None:
        chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([2])) for at in (0, 2)]
        entry = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([4]), chunks)
        stored: dict[ItemKey, StoredItem] = {
            ("x", (0,)): StoredItem("d/0.distcp", 0, 900, 512, 4, b"crc1", "bfloat16"),
            ("x", (2,)): StoredItem("d/0.distcp", 960, 900, 1472, 4, b"crc2", "float16"),
        }
        with pytest.raises(SaveFailedError, match="x is planned as bfloat16, but ranks hold float16"):
            build_index(
                Metadata({"x": entry}), stored, objects=["d/0.distcp"], save_id="", block_bytes=1, url=""
            )


class TestInterruption:
    def test_a_rank_that_is_interrupted_takes_its_objects_back(self, folder: Path) -> None:
        def interrupt(value: torch.Tensor) -> torch.Tensor:
            if is_written and value[0] == 2:
                raise KeyboardInterrupt
            return value

        is_written: list[bool] = []

        class Interrupted(Converting):
            def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
                if list(folder.rglob("*.distcp")):
                    is_written.append(True)
                return super().resolve_data(write_item)

        options = Options(transfer=TransferOptions(max_object_bytes=32 * MiB))
        state = {f"x{n}": torch.full((5 * MiB,), float(n)) for n in range(3)}
        assert isinstance(failure(folder, state, Interrupted(interrupt), options), KeyboardInterrupt)
        assert is_written
        assert [path.name for path in folder.rglob("*.distcp")] == []


def fail_on_a_subgroup(url: str) -> str:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return ""
    convert = Converting(lambda value: value if dist.get_rank() == 1 else value.tolist())
    shard = distribute_tensor(torch.ones(4), DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": shard}, storage_writer=RemoteStorageWriter(url), planner=convert, process_group=group)
    return str(next(iter(caught.value.failures.values()))[0])


@pytest.mark.ranks
def test_a_failing_rank_of_a_subgroup_is_also_named_as_the_job_names_it(ranks: Ranks, folder: Path) -> None:
    _, *messages = ranks.run(fail_on_a_subgroup, str(folder), size=3)
    assert all("save failed on rank 1 (global rank 2)" in message for message in messages)


class TestPlanOfObjects:
    def test_as_many_objects_as_items_take_no_longer_than_a_few(self) -> None:
        groups = plan_objects([10] * 100_000, max_object_bytes=10)
        assert len(groups) == 100_000
        assert sorted(position for group in groups for position in group) == list(range(100_000))

    def test_objects_are_similar_and_items_stay_in_order(self) -> None:
        sizes = [100 * MiB, 1, 50 * MiB, 50 * MiB, 2]
        groups = plan_objects(sizes, max_object_bytes=1000 * MiB, max_streams=2)
        assert groups == [[0, 4], [1, 2, 3]]

    def test_an_object_of_nothing_has_one_byte(self) -> None:
        planner, items = planned(RawBytes(b""), {"b": 1})
        transfer = TransferOptions()
        values = PlanValues(planner, window_bytes=transfer.part_bytes)
        one = DataObject("d/0.distcp", [values.prepare(items[0])], values, transfer)
        assert b"".join(one.chunks()) == b"\0"
        assert one.entry().size_bytes == 1
