"""Two checkpoints are compared by checksums, whatever the ranks, and by reading where those do not say."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from handmade import Item, Part, Tensor, Value, columns, pattern, rows, whole, write_checkpoint
from ranks import Ranks
from test_dcp_ranks import save_sharded
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from remote_ckpt.archive import SUPPORTED_DTYPES
from remote_ckpt.changes import set_pinned
from remote_ckpt.comparison import Change, Comparison, compare_checkpoints
from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.entries import OPAQUE, ChunkEntry
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    FormatError,
    IntegrityError,
    StoreUnavailableError,
)
from remote_ckpt.options import KiB, MiB, Options, TransferOptions
from remote_ckpt.overlaps import Run, common_runs, cut_windows, find_overlaps
from remote_ckpt.progress import Progress
from remote_ckpt.stock_payload import find_payload
from remote_ckpt.store.base import Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.testing.faults import FaultStore, StoreCall, corrupt_reads

QUIET = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
GOLDEN = Path(__file__).parent / "golden" / "1"


@pytest.fixture
def root() -> Store:
    return MemoryStore.fresh()


def compare(root: Store, **arguments: Any) -> Comparison:
    return compare_checkpoints(root, "1", root, "2", **arguments)


def compare_items(
    root: Store,
    first: Mapping[str, Item],
    second: Mapping[str, Item],
    *,
    block_bytes: tuple[int, int] = (4096, 4096),
    **arguments: Any,
) -> Comparison:
    write_checkpoint(root, "1", first, block_bytes=block_bytes[0])
    write_checkpoint(root, "2", second, block_bytes=block_bytes[1])
    return compare(root, **arguments)


def same(count: int) -> Comparison:
    return Comparison(only_first=(), only_second=(), changes=(), equal_count=count, undecided=())


def altered(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


# --- names, kinds, shapes, dtypes --------------------------------------------------------------------


def test_a_checkpoint_equals_itself(root: Store) -> None:
    items: dict[str, Item] = {"t": whole((3,), b"abc"), "v": Value(b"pickle")}
    write_checkpoint(root, "1", items)
    comparison = compare_checkpoints(root, "1", root, "1")
    assert comparison == same(2)
    assert comparison.is_equal


def test_the_golden_checkpoint_equals_itself() -> None:
    golden = LocalStore(GOLDEN)
    comparison = compare_checkpoints(golden, "checkpoint", golden, "checkpoint")
    assert comparison.is_equal
    assert comparison.equal_count > 30


def test_names_that_only_one_has_are_told_sorted(root: Store) -> None:
    one: dict[str, Item] = {"b": whole((1,), b"x"), "a": Value(b"v"), "both": Value(b"w")}
    other: dict[str, Item] = {"d": whole((1,), b"x"), "c": Value(b"v"), "both": Value(b"w")}
    comparison = compare_items(root, one, other)
    assert (comparison.only_first, comparison.only_second) == (("a", "b"), ("c", "d"))
    assert (comparison.equal_count, comparison.is_equal) == (1, False)


def test_shape_dtype_and_kind_are_told_and_values_then_not_looked_at(root: Store) -> None:
    one: dict[str, Item] = {
        "dtype": whole((2,), b"abcd", "int16"),
        "kind": whole((2,), b"ab"),
        "shape": whole((2, 2), b"abcd"),
        "two": whole((4,), b"abcdefgh", "int16"),
    }
    other: dict[str, Item] = {
        "dtype": whole((2,), b"abcd", "float16"),
        "kind": Value(b"ab"),
        "shape": whole((4,), b"abcd"),
        "two": whole((2,), b"abcdefgh", "int32"),
    }
    comparison = compare_items(root, one, other, read_data=True)
    assert comparison.changes == (
        Change("dtype", "dtype", "int16", "float16"),
        Change("kind", "kind", "tensor", "value"),
        Change("shape", "shape", "[2, 2]", "[4]"),
        Change("two", "dtype", "int16", "int32"),
        Change("two", "shape", "[4]", "[2]"),
    )
    assert (comparison.equal_count, comparison.undecided) == (0, ())


def test_two_roots_are_compared(root: Store, tmp_path: Path) -> None:
    other = LocalStore(tmp_path)
    write_checkpoint(root, "best", {"t": whole((3,), b"abc")})
    write_checkpoint(other, "7", {"t": whole((3,), b"abd")})
    comparison = compare_checkpoints(root, "best", other, "7")
    assert [change.name for change in comparison.changes] == ["t"]


# --- by checksums ------------------------------------------------------------------------------------

DATA = pattern(24_000, 1)
"""60 rows of 100 float32."""
ROWS_OF = {
    "one": [60],
    "two": [30, 30],
    "uneven": [1, 0, 40, 19],
    "many": [2] * 30,
}


def cut_rows(data: bytes, counts: list[int]) -> dict[str, Item]:
    return {"t": rows((60, 100), data, counts, "float32")}


@pytest.mark.parametrize("block_bytes", [(4096, 4096), (4096, 1 << 20), (1 << 20, 4099)])
@pytest.mark.parametrize(("first", "second"), [*itertools.product(ROWS_OF, ROWS_OF)])
def test_rows_of_any_number_of_ranks_compare_by_checksums(
    root: Store, first: str, second: str, block_bytes: tuple[int, int]
) -> None:
    one = cut_rows(DATA, ROWS_OF[first])
    assert compare_items(root, one, cut_rows(DATA, ROWS_OF[second]), block_bytes=block_bytes) == same(1)
    for at in (0, 11_999, 12_000, len(DATA) - 1):
        write_checkpoint(root, "2", cut_rows(altered(DATA, at), ROWS_OF[second]), overwrite=True)
        (change,) = compare(root).changes
        assert (change.name, change.what) == ("t", "values")
        assert change.first != change.second
        assert change.first.startswith("CRC-32C ")


def test_a_change_of_one_chunk_says_where_it_is(root: Store) -> None:
    one, other = cut_rows(DATA, [30, 30]), cut_rows(altered(DATA, 12_001), [30, 30])
    (change,) = compare_items(root, one, other).changes
    assert change.first.endswith(" at [30, 0]")
    assert change.second.endswith(" at [30, 0]")


def test_dimensions_of_one_before_the_cut_one_do_not_matter(root: Store) -> None:
    data = pattern(60)
    halves = Part((0, 0, 0), (1, 2, 10), data[:20]), Part((0, 2, 0), (1, 4, 10), data[20:], 1)
    cut: dict[str, Item] = {"t": Tensor((1, 6, 10), halves)}
    assert compare_items(root, cut, {"t": whole((1, 6, 10), data)}) == same(1)


def test_empty_and_scalar_tensors_compare(root: Store) -> None:
    one: dict[str, Item] = {"e": whole((0, 3), b""), "s": whole((), b"abcdefgh", "float64")}
    other: dict[str, Item] = {
        "e": Tensor((0, 3), ()),
        "s": whole((), b"abcdefgi", "float64"),
        "x": Value(b""),
    }
    comparison = compare_items(root, one, other)
    assert [change.name for change in comparison.changes] == ["s"]
    assert comparison.equal_count == 1


def test_columns_cut_alike_compare_by_checksums_and_cut_otherwise_do_not(root: Store) -> None:
    data = pattern(30 * 40, 2)
    one: dict[str, Item] = {"t": columns((30, 40), data, [10, 30])}
    assert compare_items(root, one, {"t": columns((30, 40), data, [10, 30])}) == same(1)
    for counts in ([20, 20], [40]):
        write_checkpoint(root, "2", {"t": columns((30, 40), data, counts)}, overwrite=True)
        comparison = compare(root)
        assert (comparison.undecided, comparison.changes) == (("t",), ())
        assert not comparison.is_equal


def opaque(data: bytes, *counts: int) -> Tensor:
    parts, first = [], 0
    for rank, count in enumerate(counts):
        parts.append(Part((first,), (count,), data + bytes([rank]), rank, is_opaque=True))
        first += count
    return Tensor((first,), tuple(parts), "qint8")


def test_archives_that_only_torch_reads_compare_by_their_bytes(root: Store) -> None:
    one: dict[str, Item] = {"t": opaque(b"abc", 4, 2)}
    assert compare_items(root, one, {"t": opaque(b"abc", 4, 2)}) == same(1)
    write_checkpoint(root, "2", {"t": opaque(b"abd", 4, 2)}, overwrite=True)
    (change,) = compare(root).changes
    assert (change.what, change.first[:16]) == ("values", "4 pickled bytes,")
    write_checkpoint(root, "2", {"t": opaque(b"abc", 3, 3)}, overwrite=True)
    assert compare(root).undecided == ("t",)
    assert compare(root, read_data=True).undecided == ("t",)


def test_raw_elements_and_an_archive_of_the_same_box_stay_undecided(root: Store) -> None:
    raw: dict[str, Item] = {"t": whole((3,), b"abc")}
    archive: dict[str, Item] = {"t": Tensor((3,), (Part((0,), (3,), b"archive", is_opaque=True),))}
    assert compare_items(root, raw, archive).undecided == ("t",)
    assert compare(root, read_data=True).undecided == ("t",)


def test_a_chunk_that_differs_decides_beside_one_that_cannot(root: Store) -> None:
    one: dict[str, Item] = {"t": Tensor((4,), (Part((0,), (2,), b"ab"), Part((2,), (2,), b"cd")))}
    closed = Part((0,), (2,), b"archive", is_opaque=True)
    other: dict[str, Item] = {"t": Tensor((4,), (closed, Part((2,), (2,), b"ce")))}
    assert [change.what for change in compare_items(root, one, other).changes] == ["values"]


@pytest.mark.parametrize(
    ("data", "text"), [(b"pickles", "7 pickled bytes, CRC-32C "), (b"longer pickle", "13 pickled bytes")]
)
def test_other_pickled_bytes_are_a_change(root: Store, data: bytes, text: str) -> None:
    one, other = Value(b"pickled"), Value(data)
    (change,) = compare_items(root, {"v": one}, {"v": other}, block_bytes=(4096, 5000)).changes
    assert (change.name, change.what) == ("v", "values")
    assert change.first.startswith("7 pickled bytes")
    assert change.second.startswith(text)


def test_without_reading_data_no_data_is_asked_for(root: Store) -> None:
    data = pattern(1200)
    write_checkpoint(root, "1", {"t": columns((30, 40), data, [10, 30])})
    store = FaultStore(root)
    assert compare_checkpoints(store, "1", store, "1") == same(1)
    assert not [call for call in store.calls if (call.key or "").endswith(".distcp")]


@pytest.mark.ranks
def test_what_other_numbers_of_ranks_saved_is_equal(ranks: Ranks, tmp_path: Path) -> None:
    for size in (1, 4):
        ranks.run(save_sharded, (str(tmp_path / str(size)), {}), 1, size=size)
    root = LocalStore(tmp_path)
    comparison = compare_checkpoints(root, "1", root, "4")
    assert (comparison.changes, comparison.only_first, comparison.only_second) == ((), (), ())
    assert {name.rpartition("-")[2] for name in comparison.undecided} == {"1"}, "those that are Shard(1)"
    read = compare_checkpoints(root, "1", root, "4", read_data=True)
    assert read == same(comparison.equal_count + len(comparison.undecided))


# --- by reading --------------------------------------------------------------------------------------

PART = 5 * MiB
TIGHT = Options(
    transfer=TransferOptions(part_bytes=PART, budget_bytes=2 * PART, concurrency=3, merge_gap_bytes=0)
)
MERGING = Options(transfer=TransferOptions(part_bytes=PART, budget_bytes=4 * PART))


def grid(shape: tuple[int, ...], data: bytes, cuts: list[list[int]], dtype: str) -> Tensor:
    """A tensor cut in every dimension."""
    item = SUPPORTED_DTYPES[dtype]
    view = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(*shape, item)
    parts = []
    ranges = [list(itertools.pairwise([0, *itertools.accumulate(counts)])) for counts in cuts]
    for rank, box in enumerate(itertools.product(*ranges)):
        piece = view[tuple(slice(*ends) for ends in box)]
        offsets, sizes = tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box)
        parts.append(Part(offsets, sizes, piece.contiguous().numpy().tobytes(), rank % 3))
    return Tensor(shape, tuple(parts), dtype)


def random_cuts(chance: random.Random, shape: tuple[int, ...]) -> list[list[int]]:
    cuts = []
    for size in shape:
        inner = sorted(chance.sample(range(1, size), min(chance.randrange(3), size - 1)))
        cuts.append([end - begin for begin, end in itertools.pairwise([0, *inner, size])])
    return cuts


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("options", [TIGHT, MERGING], ids=["tight", "merging"])
def test_however_two_tensors_are_cut_reading_tells_whether_they_are_equal(
    root: Store, seed: int, options: Options
) -> None:
    chance = random.Random(seed)
    dtype = chance.choice(["uint8", "int16", "float64"])
    shape = tuple(chance.randint(1, 9) for _ in range(chance.randrange(5)))
    count = SUPPORTED_DTYPES[dtype] * int(torch.Size(shape).numel())
    data = chance.randbytes(count)
    one: dict[str, Item] = {"t": grid(shape, data, random_cuts(chance, shape), dtype)}
    other = random_cuts(chance, shape)
    assert compare_items(
        root, one, {"t": grid(shape, data, other, dtype)}, read_data=True, options=options
    ) == same(1)
    changed = altered(data, chance.randrange(count))
    write_checkpoint(root, "2", {"t": grid(shape, changed, other, dtype)}, overwrite=True)
    (change,) = compare(root, read_data=True, options=options).changes
    assert (change.name, change.what) == ("t", "values")
    assert change.first != change.second


def test_large_tensors_are_read_in_parts_within_the_budget(root: Store) -> None:
    shape = (3, 7 * MiB)
    data = pattern(21) * MiB
    one: dict[str, Item] = {"t": columns(shape, data, [MiB, 6 * MiB])}
    write_checkpoint(root, "1", one)
    write_checkpoint(root, "2", {"t": columns(shape, data, [4 * MiB, 3 * MiB])})
    lengths: list[int] = []

    def after(call: StoreCall, result: Any) -> Any:
        if call.operation == "read_range":
            lengths.append(len(result))
        return result

    store = FaultStore(root, after=after)
    assert compare_checkpoints(store, "1", store, "2", read_data=True, options=TIGHT) == same(1)
    assert sum(lengths) == 2 * len(data)
    assert max(lengths) <= PART
    write_checkpoint(
        root, "2", {"t": columns(shape, altered(data, len(data) - 1), [4 * MiB, 3 * MiB])}, overwrite=True
    )
    (change,) = compare(root, read_data=True, options=TIGHT).changes
    assert change.first.endswith(" in the box at [0, 4194304]")


def test_of_a_tensor_that_is_known_to_differ_the_rest_is_not_read(root: Store) -> None:
    data = pattern(1200)
    write_checkpoint(root, "1", {"t": columns((30, 40), data, [10, 30])})
    write_checkpoint(root, "2", {"t": columns((30, 40), altered(data, 0), [20, 20])})
    store = FaultStore(root)
    assert compare(store, read_data=True, options=TIGHT).changes[0].first.endswith(" in the box at [0, 0]")
    assert len([call for call in store.calls if call.operation == "read_range"]) == 2 * (4 + 1)


def test_near_runs_share_a_request_and_far_ones_do_not() -> None:
    runs = [Run(at, 10 * at, 4) for at in (0, 10, 20, 100)]
    assert list(cut_windows(runs, max_bytes=1000, gap_bytes=96)) == [runs[:3], runs[3:]]
    assert list(cut_windows(runs, max_bytes=1000, gap_bytes=95)) == [[run] for run in runs]
    assert list(cut_windows(runs, max_bytes=104, gap_bytes=1000)) == [runs[:2], runs[2:3], runs[3:]]
    long = [Run(5, 7, 10)]
    assert list(cut_windows(long, max_bytes=4, gap_bytes=0)) == [
        [Run(5, 7, 4)],
        [Run(9, 11, 4)],
        [Run(13, 15, 2)],
    ]


def test_a_window_holds_a_bounded_number_of_runs() -> None:
    runs = [Run(2 * at, 2 * at, 1) for at in range(40_000)]
    lengths = [len(window) for window in cut_windows(runs, max_bytes=MiB, gap_bytes=MiB)]
    assert (sum(lengths), max(lengths)) == (40_000, 16_384)


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkEntry:
    return ChunkEntry(offsets, sizes, 0, 0, 1, OPAQUE, 1, b"")


def test_whole_rows_are_one_run_and_parts_of_rows_one_each() -> None:
    (overlap,) = find_overlaps([box((0, 0), (4, 6))], [box((2, 0), (4, 6))])
    assert list(common_runs(overlap, 2)) == [Run(24, 0, 24)]
    (overlap,) = find_overlaps([box((0, 0), (4, 6))], [box((2, 3), (2, 6))])
    assert (overlap.offsets, overlap.sizes) == ((2, 3), (2, 3))
    assert list(common_runs(overlap, 1)) == [Run(15, 0, 3), Run(21, 6, 3)]


def test_overlaps_of_many_chunks_are_those_that_have_elements_in_common() -> None:
    chance = random.Random(5)
    for _ in range(50):
        chunks = [
            [
                box(
                    (chance.randrange(9), chance.randrange(9)),
                    (chance.randrange(1, 5), chance.randrange(1, 5)),
                )
                for _ in range(9)
            ]
            for _ in range(2)
        ]
        found = {(id(one.first), id(one.second)) for one in find_overlaps(*chunks)}
        expected = {
            (id(one), id(other))
            for one, other in itertools.product(*chunks)
            if all(
                range(
                    max(one.offsets[dim], other.offsets[dim]),
                    min(one.offsets[dim] + one.sizes[dim], other.offsets[dim] + other.sizes[dim]),
                )
                for dim in (0, 1)
            )
        }
        assert found == expected


def test_progress_ends_where_it_said(root: Store) -> None:
    data = pattern(1200)
    one: dict[str, Item] = {
        "a": Value(b"v"),
        "t": columns((30, 40), data, [10, 30]),
        "w": whole((3,), b"abc"),
    }
    other: dict[str, Item] = {**one, "t": columns((30, 40), data, [20, 20])}
    seen: list[Progress] = []
    compare_items(root, one, other, read_data=True, on_progress=seen.append)
    assert seen[0] == Progress(operation="compare", total_bytes=2400, total_objects=3)
    assert seen[-1] == Progress(
        operation="compare", total_bytes=2400, total_objects=3, done_bytes=2400, done_objects=3
    )


def test_a_flip_on_the_way_is_no_difference(root: Store) -> None:
    data = pattern(1200)
    write_checkpoint(root, "1", {"t": columns((30, 40), data, [10, 30])})
    write_checkpoint(root, "2", {"t": columns((30, 40), data, [20, 20])})
    flips = iter([True])
    after = corrupt_reads(lambda call: call.operation == "read_range" and next(flips, False))
    store = FaultStore(root, after=after)
    assert compare_checkpoints(store, "1", store, "2", read_data=True) == same(1)
    assert next(flips, None) is None


# --- stock checkpoints -------------------------------------------------------------------------------


def stock_state() -> dict[str, Any]:
    return {
        "w": torch.arange(60.0).reshape(6, 10),
        "h": torch.linspace(0, 1, 100_000, dtype=torch.bfloat16),
        "s": torch.tensor(2),
        "e": torch.zeros(0, 3),
        "n": {"lr": 0.5},
    }


def save_stock(root: LocalStore, name: str, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(f"{root.url}/{name}"))


def save_ours(root: LocalStore, name: str, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=RemoteStorageWriter(f"{root.url}/{name}"))


@QUIET
@pytest.mark.parametrize("save", [save_stock, save_ours])
def test_a_stock_checkpoint_is_undecided_by_checksums_and_equal_when_read(
    tmp_path: Path, save: Callable[[LocalStore, str, dict[str, Any]], None]
) -> None:
    root = LocalStore(tmp_path)
    save_stock(root, "1", stock_state())
    save(root, "2", stock_state())
    comparison = compare(root)
    assert comparison.undecided == ("h", "n.lr", "s", "w")
    assert (comparison.equal_count, comparison.changes) == (1, ())
    assert compare(root, read_data=True) == same(5)


@QUIET
def test_of_a_stock_archive_only_the_ends_are_read_to_find_its_elements(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    for name in ("1", "2"):
        save_stock(root, name, {"t": torch.arange(500_000.0)})
    lengths: list[int] = []

    def after(call: StoreCall, result: Any) -> Any:
        if call.operation == "read_range":
            lengths.append(len(result))
        return result

    assert compare(FaultStore(root, after=after), read_data=True) == same(1)
    assert sorted(lengths) == [64 * KiB] * 4 + [2_000_000] * 2


@QUIET
@pytest.mark.parametrize("save", [save_stock, save_ours])
def test_what_changed_since_a_stock_checkpoint_is_found_when_read(
    tmp_path: Path, save: Callable[[LocalStore, str, dict[str, Any]], None]
) -> None:
    root = LocalStore(tmp_path)
    save_stock(root, "1", stock_state())
    changed = stock_state()
    changed["w"][5, 9] = -1.0
    changed["h"][99_999] = 0.5
    changed["n"]["lr"] = 0.25
    save(root, "2", changed)
    comparison = compare(root, read_data=True)
    assert [(change.name, change.what) for change in comparison.changes] == [
        ("h", "values"),
        ("n.lr", "values"),
        ("w", "values"),
    ]
    assert (comparison.equal_count, comparison.undecided) == (2, ())


@QUIET
def test_stock_tensors_that_are_not_plain_rows_are_equal_if_their_archives_are(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    transposed = torch.arange(60.0).reshape(6, 10).t()
    for name, value in (
        ("1", transposed),
        ("2", transposed),
        ("3", transposed + 1),
        ("4", transposed.contiguous()),
    ):
        save_stock(root, name, {"t": value})
    assert compare_checkpoints(root, "1", root, "2", read_data=True) == same(1)
    assert compare_checkpoints(root, "1", root, "3", read_data=True).undecided == ("t",)
    assert compare_checkpoints(root, "1", root, "4", read_data=True).undecided == ("t",)


@QUIET
def test_a_stock_checkpoint_that_is_written_over_meanwhile_has_changed(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    for name in ("1", "2"):
        save_stock(root, name, stock_state())
    reads = itertools.count()

    def before(call: StoreCall) -> None:
        if call.operation == "read_range" and next(reads) == 3:
            root.write("2/.metadata", root.read("2/.metadata"))

    with pytest.raises(CheckpointChangedError):
        compare(FaultStore(root, before=before), read_data=True)


TENSORS = [
    torch.arange(12.0).reshape(3, 4),
    torch.tensor(1.5),
    torch.zeros(3, dtype=torch.bfloat16),
    torch.ones(2, 3, dtype=torch.float8_e4m3fn),
    torch.ones(70_000, dtype=torch.int64),
    torch.tensor([True, False]),
    torch.ones(1, 5),
]


def archive_of(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@pytest.mark.parametrize("tensor", TENSORS, ids=str)
def test_the_elements_in_a_stock_archive_are_found(tensor: torch.Tensor) -> None:
    archive = archive_of(tensor)
    at = find_payload(archive, dtype_of(tensor), tuple(tensor.shape))
    assert at is not None
    expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert archive.getvalue()[at : at + len(expected)] == expected


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(3, 2).t(),
        torch.arange(12.0)[6:].reshape(2, 3),
        torch.ones(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.ones(3, 2),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3).to_sparse(),
        [1, 2],
    ],
    ids=["transposed", "view", "gradient", "parameter", "shape", "dtype", "sparse", "list"],
)
def test_in_an_archive_of_anything_else_none_are_found(value: Any) -> None:
    assert find_payload(archive_of(value), "float32", (2, 3)) is None


def test_in_a_damaged_archive_elements_are_found_where_they_are_or_not_at_all() -> None:
    tensor = torch.arange(6.0)
    data = archive_of(tensor).getvalue()
    at = find_payload(io.BytesIO(data), "float32", (6,))
    outcomes = set()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x21
        outcomes.add(find_payload(io.BytesIO(flipped), "float32", (6,)))
    assert {at, None} <= outcomes
    for length in (0, 10, len(data) // 2, len(data) - 1):
        assert find_payload(io.BytesIO(data[:length]), "float32", (6,)) is None


def test_of_a_dtype_without_raw_elements_none_are_found() -> None:
    assert find_payload(archive_of(torch.ones(2)), "qint8", (2,)) is None


# --- errors ------------------------------------------------------------------------------------------


def test_one_that_is_not_there_is_not_found(root: Store) -> None:
    write_checkpoint(root, "1", {"t": whole((1,), b"x")})
    with pytest.raises(CheckpointNotFoundError):
        compare(root)
    with pytest.raises(CheckpointNotFoundError):
        compare_checkpoints(root, "2", root, "1")


def test_a_plain_checkpoint_cannot_be_compared(root: Store) -> None:
    write_checkpoint(root, "1", {"t": whole((1,), b"x")})
    root.write("2/checkpoint.pth", b"plain")
    with pytest.raises(FormatError, match="without loading it"):
        compare(root)


def undecided_pair(root: Store) -> str:
    """Two checkpoints that have to be read; returns the key of an object of the second."""
    data = pattern(1200)
    write_checkpoint(root, "1", {"t": columns((30, 40), data, [10, 30])})
    manifest = write_checkpoint(root, "2", {"t": columns((30, 40), data, [20, 20])})
    return f"2/{manifest.objects[0].key}"


def test_a_missing_or_short_object_is_damage_and_no_difference(root: Store) -> None:
    key = undecided_pair(root)
    data = root.read(key)
    root.write(key, data[: len(data) // 3])
    with pytest.raises(IntegrityError):
        compare(root, read_data=True)
    root.delete([key])
    with pytest.raises(CheckpointDamagedError, match="is missing") as caught:
        compare(root, read_data=True)
    assert caught.value.key == key[2:]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_one_that_is_deleted_or_pinned_while_an_object_is_missing_has_changed(
    root: Store, is_pinned: bool
) -> None:
    key = undecided_pair(root)
    acts = iter([True])

    def before(call: StoreCall) -> None:
        if call.operation == "read_range":
            for _ in acts:
                root.delete([key])
                if is_pinned:
                    set_pinned(root.scope("2"), True)
                else:
                    delete_checkpoint(root.scope("2"))

    with pytest.raises(CheckpointChangedError):
        compare(FaultStore(root, before=before), read_data=True)


def test_a_failing_store_is_no_difference(root: Store) -> None:
    undecided_pair(root)

    def before(call: StoreCall) -> None:
        if call.operation == "read_range":
            raise StoreUnavailableError("503")

    with pytest.raises(StoreUnavailableError):
        compare(FaultStore(root, before=before), read_data=True)
