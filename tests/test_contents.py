"""What a checkpoint holds, told without loading it and without torch."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from golden_state import golden_state
from handmade import Item, Part, Tensor, Value, columns, pattern, rows, whole, write_checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from remote_ckpt.changes import set_pinned
from remote_ckpt.contents import ChunkInfo, Contents, TensorInfo, ValueInfo, read_contents
from remote_ckpt.dcp.pickles import parse_stock_metadata
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    FormatError,
    IntegrityError,
    StoreUnavailableError,
    UntrustedDataError,
    UrlError,
)
from remote_ckpt.stock_contents import parse_stock_contents
from remote_ckpt.stock_index import index_of_stock
from remote_ckpt.store.base import Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.testing.faults import FaultStore, StoreCall, corrupt_reads

GOLDEN = Path(__file__).parent / "golden" / "1"
QUIET = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.fixture(params=["memory", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore.fresh() if request.param == "memory" else LocalStore(tmp_path / "run")


def bytes_at(root: Store, name: str, place: ChunkInfo | ValueInfo) -> bytes:
    return bytes(root.read_range(f"{name}/{place.key}", place.offset_bytes, place.length_bytes))


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """A nested state under the names that DCP gives it."""
    parts = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if parts is None:
        return {path: value}
    return {
        name: leaf
        for key, part in parts
        for name, leaf in flattened(part, f"{path}.{key}" if path else str(key)).items()
    }


# --- checkpoints of ours -----------------------------------------------------------------------------


def test_tensors_and_values_are_listed_by_name_with_the_places_of_their_bytes(root: Store) -> None:
    data = pattern(24)
    items: dict[str, Item] = {
        "w": rows((6, 2), data, [4, 2], "int16"),
        "b": columns((3, 8), data, [5, 3]),
        "z": Value(b"pickled", rank=1),
        "a": Value(b"other"),
        "s": Tensor((3,), (Part((0,), (3,), b"archive", 1, is_opaque=True),), "qint8"),
    }
    write_checkpoint(root, "7", items)
    contents = read_contents(root, "7")
    assert (contents.name, contents.kind, contents.url) == ("7", "remote_ckpt", root.scope("7").url)
    assert [(one.name, one.shape, one.dtype, one.total_bytes) for one in contents.tensors] == [
        ("b", (3, 8), "uint8", 24),
        ("s", (3,), "qint8", 7),
        ("w", (6, 2), "int16", 24),
    ]
    b, s, w = contents.tensors
    assert [(chunk.offsets, chunk.sizes) for chunk in b.chunks] == [((0, 0), (3, 5)), ((0, 5), (3, 3))]
    assert b"".join(bytes_at(root, "7", chunk) for chunk in w.chunks) == data
    assert bytes_at(root, "7", b.chunks[1]) == data[5:8] + data[13:16] + data[21:24]
    assert [chunk.is_archive for chunk in (*s.chunks, *w.chunks)] == [True, False, False]
    assert bytes_at(root, "7", s.chunks[0]) == b"archive"
    assert [value.name for value in contents.values] == ["a", "z"]
    assert [bytes_at(root, "7", value) for value in contents.values] == [b"other", b"pickled"]
    assert contents.values[0].is_safe is True
    assert contents.total_bytes == 24 + 7 + 24 + len(b"other") + len(b"pickled")


def test_chunks_are_sorted_by_their_offsets(root: Store) -> None:
    low, high = Part((0,), (2,), b"ab"), Part((2,), (1,), b"c")
    write_checkpoint(root, "7", {"t": Tensor((3,), (high, low))})
    assert [chunk.offsets for chunk in read_contents(root, "7").tensors[0].chunks] == [(0,), (2,)]


def test_the_golden_checkpoint_lists_as_what_was_saved() -> None:
    contents = read_contents(LocalStore(GOLDEN), "checkpoint")
    expected = flattened(golden_state())
    tensors = {name: leaf for name, leaf in expected.items() if isinstance(leaf, torch.Tensor)}
    assert [(one.name, one.shape, f"torch.{one.dtype}", one.total_bytes) for one in contents.tensors] == [
        (name, tuple(leaf.shape), str(leaf.dtype), leaf.nbytes) for name, leaf in sorted(tensors.items())
    ]
    assert [value.name for value in contents.values] == sorted(set(expected) - set(tensors))


def test_a_pin_changes_nothing_of_the_contents(root: Store) -> None:
    write_checkpoint(root, "7", {"t": whole((2,), b"ab")})
    before = read_contents(root, "7")
    set_pinned(root.scope("7"), True)
    assert read_contents(root, "7") == before


# --- what cannot be listed ---------------------------------------------------------------------------


def test_a_checkpoint_that_is_not_there_or_deleted_is_not_found(root: Store) -> None:
    with pytest.raises(CheckpointNotFoundError):
        read_contents(root, "7")
    write_checkpoint(root, "7", {"t": whole((2,), b"ab")})
    delete_checkpoint(root.scope("7"))
    with pytest.raises(CheckpointNotFoundError):
        read_contents(root, "7")


def test_a_name_that_leaves_the_root_is_refused(root: Store) -> None:
    with pytest.raises(UrlError):
        read_contents(root, "../7")


def test_a_plain_checkpoint_says_that_it_would_have_to_be_loaded(root: Store) -> None:
    root.write("7/checkpoint.pth", b"plain")
    with pytest.raises(FormatError, match="cannot be listed without loading it"):
        read_contents(root, "7")


def test_a_damaged_manifest_or_index_is_told_apart_from_absence(root: Store) -> None:
    manifest = write_checkpoint(root, "7", {"t": whole((2,), b"ab")})
    assert manifest.index is not None
    key = f"7/{manifest.index.key}"
    index = root.read(key)
    root.write(key, index[:-1])
    with pytest.raises(IntegrityError, match="differs from what was saved"):
        read_contents(root, "7")
    root.write(key, index)
    root.write("7/manifest.000002.json", b"{}")
    with pytest.raises(CheckpointDamagedError, match="manifest is damaged"):
        read_contents(root, "7")


def test_a_missing_index_is_damage_that_names_it(root: Store) -> None:
    manifest = write_checkpoint(root, "7", {"t": whole((2,), b"ab")})
    assert manifest.index is not None
    root.delete([f"7/{manifest.index.key}"])
    with pytest.raises(CheckpointDamagedError, match="is missing") as caught:
        read_contents(root, "7")
    assert caught.value.key == manifest.index.key


def test_a_flipped_read_of_the_index_is_read_once_more(root: Store) -> None:
    write_checkpoint(root, "7", {"t": whole((2,), b"ab")})
    flips = iter([True])
    after = corrupt_reads(lambda call: (call.key or "").startswith("index.") and next(flips, False))
    assert read_contents(FaultStore(root, after=after), "7") == read_contents(root, "7")


def replaced(root: Store) -> None:
    write_checkpoint(root, "7", {"new": whole((1,), b"z")}, overwrite=True)


def deleted(root: Store) -> None:
    delete_checkpoint(root.scope("7"))


@pytest.mark.parametrize("act", [replaced, deleted])
def test_one_that_is_replaced_or_deleted_meanwhile_has_changed(
    root: Store, act: Callable[[Store], None]
) -> None:
    write_checkpoint(root, "7", {"t": whole((2,), b"ab")})
    acts = iter([act])

    def before(call: StoreCall) -> None:
        if (call.key or "").startswith("index.") and (now := next(acts, None)) is not None:
            now(root)

    with pytest.raises(CheckpointChangedError):
        read_contents(FaultStore(root, before=before), "7")


@pytest.mark.parametrize("error", [StoreUnavailableError("503"), AccessDeniedError("403")])
@pytest.mark.parametrize("operation", ["list_children", "read"])
def test_a_failing_store_is_neither_absence_nor_damage(root: Store, error: Exception, operation: str) -> None:
    write_checkpoint(root, "7", {"t": whole((2,), b"ab")})

    def before(call: StoreCall) -> None:
        if call.operation == operation:
            raise error

    with pytest.raises(type(error)):
        read_contents(FaultStore(root, before=before), "7")


def test_the_collector_works_again_afterwards(root: Store) -> None:
    write_checkpoint(root, "7", {"t": whole((2,), b"ab")})
    read_contents(root, "7")
    assert gc.isenabled()


# --- stock checkpoints -------------------------------------------------------------------------------


def saved_by_torch(folder: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(folder))


@QUIET
def test_a_stock_checkpoint_lists_with_the_places_of_its_archives(tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16), "n": {"x": 3}}
    saved_by_torch(tmp_path / "7", state)
    root = LocalStore(tmp_path)
    contents = read_contents(root, "7")
    assert contents.kind == "dcp"
    b, w = contents.tensors
    assert (w.name, w.shape, w.dtype, w.total_bytes) == ("w", (3, 4), "float32", 48)
    assert (b.name, b.shape, b.dtype, b.total_bytes) == ("b", (5,), "bfloat16", 10)
    (chunk,) = w.chunks
    assert (chunk.offsets, chunk.sizes, chunk.is_archive) == ((0, 0), (3, 4), True)
    assert torch.load(io.BytesIO(bytes_at(root, "7", chunk))).equal(state["w"])
    (value,) = contents.values
    assert (value.name, value.is_safe) == ("n.x", None)
    assert torch.load(io.BytesIO(bytes_at(root, "7", value))) == 3


def stock_metadata(**changes: Any) -> Metadata:
    size = torch.Size([4, 3])
    halves = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([2, 3])) for at in (0, 2)]
    fields: dict[str, Any] = {
        "state_dict_metadata": {
            "t": TensorStorageMetadata(TensorProperties(dtype=torch.int16), size, halves),
            "v": BytesStorageMetadata(),
        },
        "storage_data": {
            MetadataIndex("t", torch.Size([0, 0])): _StorageInfo("__0_0.distcp", 0, 400),
            MetadataIndex("t", torch.Size([2, 0])): _StorageInfo("__1_0.distcp", 64, 500),
            MetadataIndex("v"): _StorageInfo("__0_0.distcp", 400, 7),
        },
    }
    return Metadata(**{**fields, **changes})


def stock_contents(root: Store, metadata: Metadata) -> Contents:
    root.write("7/.metadata", pickle.dumps(metadata))
    return read_contents(root, "7")


def test_a_stock_checkpoint_of_several_ranks_lists_each_part(root: Store) -> None:
    contents = stock_contents(root, stock_metadata())
    box = {"sizes": (2, 3), "is_archive": True}
    first = ChunkInfo(offsets=(0, 0), key="__0_0.distcp", offset_bytes=0, length_bytes=400, **box)  # type: ignore[arg-type]
    second = ChunkInfo(offsets=(2, 0), key="__1_0.distcp", offset_bytes=64, length_bytes=500, **box)  # type: ignore[arg-type]
    assert contents.tensors == (
        TensorInfo(name="t", shape=(4, 3), dtype="int16", total_bytes=24, chunks=(first, second)),
    )
    assert contents.values == (ValueInfo(name="v", key="__0_0.distcp", offset_bytes=400, length_bytes=7),)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"storage_data": {}}, "more chunks than places"),
        ({"storage_data": None}, "more chunks than places"),
        (
            {"storage_data": {MetadataIndex(name): _StorageInfo("f", 0, 1) for name in "tuv"}},
            "no place for 't'",
        ),
    ],
    ids=["empty", "none", "others"],
)
def test_stock_metadata_that_says_not_where_its_data_lies_is_damage(
    root: Store, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointDamagedError, match=problem):
        stock_contents(root, stock_metadata(**changes))


@pytest.mark.parametrize("path", ["../other/f", "/etc/passwd", "a//b", "", "."])
def test_stock_metadata_that_names_files_elsewhere_is_damage(root: Store, path: str) -> None:
    metadata = stock_metadata()
    metadata.storage_data[MetadataIndex("v")] = _StorageInfo(path, 0, 1)
    with pytest.raises(CheckpointDamagedError, match="outside the checkpoint"):
        stock_contents(root, metadata)


@pytest.mark.parametrize(
    ("offsets", "sizes", "problem"),
    [
        ([0, 0], [4, 2], "do not cover it"),
        ([1, 0], [4, 3], "outside"),
        ([0], [4], "not of its dimensions"),
    ],
)
def test_stock_chunks_that_do_not_fit_their_tensor_are_damage(
    root: Store, offsets: list[int], sizes: list[int], problem: str
) -> None:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.int16), torch.Size([4, 3]), [chunk])
    places = {MetadataIndex("t", torch.Size(offsets)): _StorageInfo("f", 0, 1)}
    with pytest.raises(CheckpointDamagedError, match=problem):
        stock_contents(root, stock_metadata(state_dict_metadata={"t": tensor}, storage_data=places))


def test_many_tensors_that_share_one_list_of_chunks_do_not_multiply_it(root: Store) -> None:
    chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(1000)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.int8), torch.Size([1000]), chunks)
    many = {f"t{number}": tensor for number in range(100_000)}
    with pytest.raises(CheckpointDamagedError, match="more chunks than places"):
        stock_contents(root, stock_metadata(state_dict_metadata=many))


def test_nothing_that_a_stock_checkpoint_says_is_executed(root: Store) -> None:
    root.write("7/.metadata", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(UntrustedDataError, match=r"os\.system"):
        read_contents(root, "7")


def test_a_stock_file_that_is_no_pickle_is_damage(root: Store) -> None:
    root.write("7/.metadata", b"stock")
    with pytest.raises(CheckpointDamagedError, match="cannot read DCP metadata"):
        read_contents(root, "7")


def test_every_dtype_of_torch_is_known_without_torch() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len(dtypes) > 30
    for dtype in dtypes:
        properties = TensorProperties(dtype=dtype)
        tensor = TensorStorageMetadata(properties, torch.Size([0]), [])
        data = pickle.dumps(stock_metadata(state_dict_metadata={"t": tensor}))
        parsed = parse_stock_contents(data, url="mem", key=".metadata")
        assert index_of_stock(parsed, url="mem", key=".metadata").tensors["t"].dtype == str(dtype)[6:]


def test_a_dtype_that_this_torch_lacks_is_listed_but_not_loaded() -> None:
    data = pickle.dumps(stock_metadata()).replace(b"int16", b"int17")
    parsed = parse_stock_contents(data, url="mem", key=".metadata")
    assert index_of_stock(parsed, url="mem", key=".metadata").tensors["t"].dtype == "int17"
    with pytest.raises(CheckpointDamagedError, match="no dtype 'int17'"):
        parse_stock_metadata(data, url="mem", key=".metadata")


def test_properties_survive_the_way_without_torch() -> None:
    properties = TensorProperties(torch.float16, torch.sparse_coo, True, torch.channels_last, True)
    tensor = TensorStorageMetadata(properties, torch.Size([0]), [])
    data = pickle.dumps(stock_metadata(state_dict_metadata={"t": tensor}))
    parsed = parse_stock_metadata(data, url="mem", key=".metadata")
    assert replace(parsed.state_dict_metadata["t"]) == tensor
    entry = index_of_stock(parse_stock_contents(data, url="", key=""), url="", key="").tensors["t"]
    assert (entry.layout, entry.memory_format) == ("sparse_coo", "channels_last")
    assert entry.requires_grad
    assert entry.pin_memory
