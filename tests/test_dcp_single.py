"""The DCP backend in one process, through stock ``dcp.save`` and ``dcp.load``, without a process group."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlanner

from remote_ckpt.archive import SUPPORTED_DTYPES
from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    DtypeMismatchError,
    FormatError,
    IntegrityError,
    SaveFailedError,
    ShapeMismatchError,
    UntrustedDataError,
)
from remote_ckpt.options import MiB, Options, TransferOptions
from remote_ckpt.store.memory import MemoryStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

State = dict[str, Any]
DTYPES = [name for name in SUPPORTED_DTYPES if not name.startswith("bits")]
"""torch's own planner cannot size the opaque ``bits`` dtypes: ``torch._utils._element_size`` raises."""


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run" / "7") if request.param == "local" else f"{MemoryStore.fresh().url}/run/7"


@pytest.fixture(autouse=True)
def no_cached_plans() -> Iterator[None]:
    """torch's plan caches are process-wide: leave none behind."""
    caches: list[dict[str, Any]] = [
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ]
    yield
    for cache in caches:
        cache.clear()


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = SUPPORTED_DTYPES[dtype]
    for size in shape:
        count *= size
    high = 2 if dtype == "bool" else 256
    data = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return data.view(getattr(torch, dtype)).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save(state: State, url: str, **options: Any) -> RemoteStorageWriter:
    writer = RemoteStorageWriter(url, **options)
    dcp.save(state, storage_writer=writer)
    return writer


def load(state: State, url: str, **options: Any) -> State:
    dcp.load(state, storage_reader=RemoteStorageReader(url, **options))
    return state


def failure(error: CheckpointException) -> BaseException:
    """The error of rank 0 inside torch's wrapper."""
    return error.failures[0][0]


def blank(value: Any) -> Any:
    """A template of the same structure with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: blank(part) for key, part in value.items()}
    if isinstance(value, list):
        return [blank(part) for part in value]
    return None


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert bits(left) == bits(right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def test_every_kind_of_value_comes_back_bit_for_bit(url: str) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state: State = {
        "dtypes": {name: random_bits(name, (3, 5)) for name in DTYPES},
        "shapes": {
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0),
            "empty_rows": torch.empty(0, 5, dtype=torch.bfloat16),
            "one": torch.ones(1, 1, 1),
        },
        "views": {
            "transposed": base.t(),
            "expanded": torch.ones(3, 1).expand(3, 4),
            "strided": base[::2, 1:],
            "slice": base.view(-1)[3:5],
            "same_again": base,
            "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        },
        "nested": [{"k": 1}, {"k": torch.ones(2)}, [1.5, "x", None, True, (1, 2)]],
        "python": {"lr": 1e-3, "name": "run", "big": 2**80, "bytes": b"\x00\xff"},
    }
    save(copy.deepcopy(state), url)
    template = blank(state)
    template["nested"] = [{"k": 0}, {"k": torch.zeros(2)}, [0.0, "", None, False, ()]]
    assert_same(load(template, url), state)


def test_a_small_view_does_not_drag_its_storage_along(url: str) -> None:
    base = torch.zeros(10 * MiB)
    writer = save({"view": base[:10]}, url)
    assert writer.manifest is not None
    assert writer.manifest.total_bytes < 4096


@pytest.mark.parametrize("part", [5 * MiB])
def test_tensors_larger_than_parts_blocks_and_objects_come_back(url: str, part: int) -> None:
    transfer = TransferOptions(
        part_bytes=part, budget_bytes=2 * part, max_object_bytes=part, block_bytes=64 * 1024, concurrency=3
    )
    options = Options(transfer=transfer)
    state = {
        "large": random_bits("float32", (1301, 3001)),
        "columns": random_bits("bfloat16", (3001, 1301)).t(),
        **{f"small{n}": random_bits("int16", (n,), n) for n in range(200)},
    }
    writer = save(state, url, options=options)
    assert writer.manifest is not None
    assert len(writer.manifest.objects) >= 3
    template = blank(state)
    template["columns"] = torch.zeros(3001, 1301, dtype=torch.bfloat16).t()
    loaded = load(template, url, options=options)
    assert_same(
        {**loaded, "columns": loaded["columns"].contiguous()},
        {**state, "columns": state["columns"].contiguous()},
    )


def test_a_destination_keeps_its_own_strides(url: str) -> None:
    value = torch.randn(64, 32)
    save({"w": value}, url)
    template = torch.zeros(32, 64).t()
    load({"w": template}, url)
    assert template.stride() == (1, 64)
    assert torch.equal(template, value)


def test_an_expanded_destination_is_refused(url: str) -> None:
    save({"w": torch.randn(3, 4)}, url)
    with pytest.raises(CheckpointException) as caught:
        load({"w": torch.zeros(3, 1).expand(3, 4)}, url)
    assert isinstance(failure(caught.value), ShapeMismatchError)


def test_reset_keeps_the_options_and_a_writer_serves_many_saves(tmp_path: Path) -> None:
    options = Options(transfer=TransferOptions(block_bytes=4096))
    writer = RemoteStorageWriter(options=options, metrics={"loss": 0.5})
    for step in (1, 2):
        dcp.save(
            {"a": torch.full((3000,), float(step))}, checkpoint_id=tmp_path / str(step), storage_writer=writer
        )
        assert writer.manifest is not None
        assert writer.manifest.metrics == {"loss": 0.5}
        assert writer.manifest.step == step
    reader = RemoteStorageReader()
    for step in (1, 2):
        state = {"a": torch.zeros(3000)}
        dcp.load(state, checkpoint_id=str(tmp_path / str(step)), storage_reader=reader)
        assert torch.equal(state["a"], torch.full((3000,), float(step)))


def test_a_relative_checkpoint_id_goes_below_a_remote_writers_url() -> None:
    root = MemoryStore.fresh()
    writer = RemoteStorageWriter(f"{root.url}/run")
    for step in ("step-1", "step-2"):
        dcp.save({"a": torch.ones(2)}, checkpoint_id=step, storage_writer=writer)
    assert sorted(root.list_children("run/").prefixes) == ["step-1", "step-2"]


def test_plan_caching_never_writes_over_an_earlier_save(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        dcp.save(
            {"a": torch.full((5,), float(step)), "n": step},
            storage_writer=RemoteStorageWriter(tmp_path / str(step)),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
    for step in (1, 2, 3):
        state = load({"a": torch.zeros(5), "n": 0}, str(tmp_path / str(step)))
        assert torch.equal(state["a"], torch.full((5,), float(step)))
        assert state["n"] == step


@pytest.mark.parametrize("stock_first", [True, False])
def test_plan_caching_works_beside_the_stock_writer_in_one_process(tmp_path: Path, stock_first: bool) -> None:
    writers: dict[str, Any] = {
        "stock": FileSystemWriter(tmp_path / "stock"),
        "ours": RemoteStorageWriter(tmp_path / "ours"),
    }
    for name in sorted(writers, reverse=stock_first):
        dcp.save(
            {"a": torch.arange(5.0)},
            storage_writer=writers[name],
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
    assert torch.equal(load({"a": torch.zeros(5)}, str(tmp_path / "ours"))["a"], torch.arange(5.0))


def test_a_committed_checkpoint_is_not_replaced_without_overwrite(url: str) -> None:
    save({"a": torch.ones(2)}, url)
    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.zeros(2)}, url)
    assert isinstance(failure(caught.value), CheckpointExistsError)
    assert torch.equal(load({"a": torch.zeros(2)}, url)["a"], torch.ones(2))


def test_overwrite_replaces_and_removes_the_old_data(url: str) -> None:
    old = save({"a": torch.ones(2)}, url)
    new = save({"a": torch.full((2,), 2.0)}, url, overwrite=True)
    assert torch.equal(load({"a": torch.zeros(2)}, url)["a"], torch.full((2,), 2.0))
    assert old.manifest is not None
    assert new.manifest is not None
    assert new.manifest.generation == 2
    from remote_ckpt.store import open_store
    from remote_ckpt.url import parse_location

    parent, name = parse_location(url).split()
    keys = {info.key for info in open_store(parent).scope(name).list()}
    assert not keys & {entry.key for entry in old.manifest.objects}
    assert {entry.key for entry in new.manifest.objects} <= keys


def test_stock_torch_reads_our_checkpoint_from_its_own_path(tmp_path: Path) -> None:
    state = {
        "w": {"a": torch.randn(40, 3), "h": random_bits("float8_e4m3fn", (9,))},
        "n": 5,
        "l": [torch.ones(2)],
    }
    save(state, str(tmp_path / "ck"))
    loaded = blank(state)
    loaded["n"] = 0
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path / "ck"))
    assert_same(loaded, state)
    dcp_to_torch_save(str(tmp_path / "ck"), str(tmp_path / "out.pt"))
    assert_same(torch.load(tmp_path / "out.pt", weights_only=True), state)


def test_stock_torch_sees_the_new_checkpoint_after_a_replacement(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, str(tmp_path / "ck"))
    save({"a": torch.zeros(2)}, str(tmp_path / "ck"), overwrite=True)
    state = {"a": torch.ones(2)}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "ck"))
    assert torch.equal(state["a"], torch.zeros(2))


def test_we_read_stock_checkpoints(tmp_path: Path) -> None:
    state = {
        "w": {"a": torch.randn(40, 3), "h": random_bits("bfloat16", (9,))},
        "n": 5,
        "l": [torch.ones(2), "x"],
    }
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "ck"))
    assert_same(load({**blank(state), "n": 0, "l": [torch.zeros(2), ""]}, str(tmp_path / "ck")), state)


def test_overwriting_a_stock_checkpoint_replaces_it_and_its_files(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "ck"))
    (tmp_path / "ck" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.zeros(2)}, str(tmp_path / "ck"))
    assert isinstance(failure(caught.value), CheckpointExistsError)
    save({"a": torch.zeros(2)}, str(tmp_path / "ck"), overwrite=True)
    assert torch.equal(load({"a": torch.ones(2)}, str(tmp_path / "ck"))["a"], torch.zeros(2))
    assert not list((tmp_path / "ck").glob("*.distcp"))
    assert (tmp_path / "ck" / "notes.txt").read_text() == "mine"


class Exploit:
    """Pickles to a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_hostile_stock_metadata_is_refused_and_not_executed(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "ck"))
    (tmp_path / "ck" / ".metadata").write_bytes(pickle.dumps(Exploit(tmp_path / "executed")))
    with pytest.raises(UntrustedDataError, match=r"open"):
        RemoteStorageReader(tmp_path / "ck").read_metadata()
    assert not (tmp_path / "executed").exists()


def test_hostile_objects_are_refused_before_the_stock_planner_unpickles_them(tmp_path: Path) -> None:
    save({"x": Exploit(tmp_path / "executed")}, str(tmp_path / "ck"))
    with pytest.raises(CheckpointException) as caught:
        load({"x": None}, str(tmp_path / "ck"))
    assert isinstance(failure(caught.value), UntrustedDataError)
    assert "trusted=True" in str(failure(caught.value))
    assert not (tmp_path / "executed").exists()


def test_saving_a_type_that_needs_trust_warns_and_trusting_loads_it(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    import fractions

    save({"x": fractions.Fraction(1, 3)}, url)
    assert "fractions.Fraction" in caplog.text
    assert load({"x": None}, url, trusted=True)["x"] == fractions.Fraction(1, 3)


def test_another_dtype_is_refused_before_anything_changes_unless_conversion_is_asked_for(url: str) -> None:
    save({"a": torch.ones(4), "b": torch.full((4,), 7, dtype=torch.int32)}, url)
    template = {"a": torch.zeros(4), "b": torch.zeros(4)}
    with pytest.raises(CheckpointException) as caught:
        load(template, url)
    error = failure(caught.value)
    assert isinstance(error, DtypeMismatchError)
    assert all(word in str(error) for word in ("b", "int32", "float32", "convert_dtype"))
    assert torch.equal(template["a"], torch.zeros(4))
    assert torch.equal(load(template, url, convert_dtype=True)["b"], torch.full((4,), 7.0))


def test_an_absent_checkpoint_is_said_to_be_absent_with_its_url(url: str) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        RemoteStorageReader(url).read_metadata()
    assert caught.value.url is not None
    assert "run/7" in str(caught.value)


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.distcp"))


def test_a_flipped_bit_is_an_error_that_names_object_and_tensor(tmp_path: Path) -> None:
    save({"model": {"w": torch.randn(1000), "v": torch.randn(1000)}}, str(tmp_path / "ck"))
    (path,) = data_files(tmp_path / "ck")
    data = bytearray(path.read_bytes())
    data[2500] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointException) as caught:
        load({"model": {"w": torch.zeros(1000), "v": torch.zeros(1000)}}, str(tmp_path / "ck"))
    error = failure(caught.value)
    assert isinstance(error, IntegrityError)
    assert "model.w" in str(error)
    assert path.name in str(error)


def test_every_byte_of_index_and_manifest_is_checked(tmp_path: Path) -> None:
    save({"a": torch.randn(10)}, str(tmp_path / "ck"))
    for pattern, kinds in (
        ("index.*", (IntegrityError,)),
        ("manifest.*", (CheckpointDamagedError, FormatError)),
    ):
        (path,) = (tmp_path / "ck").glob(pattern)
        good = path.read_bytes()
        for position in range(0, len(good), max(1, len(good) // 40)):
            path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
            with pytest.raises(kinds):
                RemoteStorageReader(tmp_path / "ck").read_metadata()
        path.write_bytes(good)
    assert torch.equal(
        load({"a": torch.zeros(10)}, str(tmp_path / "ck"))["a"].shape and torch.ones(1), torch.ones(1)
    )


def test_a_missing_object_of_a_committed_checkpoint_is_damage(tmp_path: Path) -> None:
    save({"a": torch.randn(10)}, str(tmp_path / "ck"))
    (path,) = data_files(tmp_path / "ck")
    path.unlink()
    with pytest.raises(CheckpointException) as caught:
        load({"a": torch.zeros(10)}, str(tmp_path / "ck"))
    error = failure(caught.value)
    assert isinstance(error, CheckpointDamagedError)
    assert path.name in str(error)


def test_a_checkpoint_without_collectives_is_refused_clearly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use_collectives"):
        dcp.save(
            {"a": torch.ones(1)}, storage_writer=RemoteStorageWriter(tmp_path / "x"), use_collectives=False
        )


def test_a_failed_save_leaves_nothing_and_the_next_one_works(url: str) -> None:
    class Broken:
        def __reduce__(self) -> tuple[Any, ...]:
            raise RuntimeError("cannot pickle this")

    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.ones(2), "b": Broken()}, url)
    error = failure(caught.value)
    assert isinstance(error, SaveFailedError)
    assert "cannot pickle this" in str(error)
    with pytest.raises(CheckpointNotFoundError):
        RemoteStorageReader(url).read_metadata()
    save({"a": torch.ones(2)}, url)
    assert torch.equal(load({"a": torch.zeros(2)}, url)["a"], torch.ones(2))


def test_a_file_in_the_checkpoints_place_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "7").write_text("precious")
    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.ones(2)}, str(tmp_path / "7"), overwrite=True)
    assert isinstance(failure(caught.value), CheckpointExistsError)
    assert (tmp_path / "7").read_text() == "precious"


def test_async_save_by_thread_stores_the_values_of_the_call(url: str) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        state: State = {"a": torch.ones(1000), "l": [1, 2]}
        future = dcp.async_save(state, storage_writer=RemoteStorageWriter(url))
        state["a"].add_(1)
        future.result()  # type: ignore[union-attr]
        loaded = load({"a": torch.zeros(1000), "l": [0, 0]}, url)
    finally:
        dist.destroy_process_group()
    assert torch.equal(loaded["a"], torch.ones(1000))
    assert loaded["l"] == [1, 2]
