"""Verification finds every damage, names object and tensors exactly, and takes no failure for damage."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from handmade import Item, Part, Tensor, Value, columns, pattern, rows, whole, write_checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from remote_ckpt.changes import set_pinned
from remote_ckpt.checksum import block_crcs, crc32c
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointNotFoundError,
    FormatError,
    StoreUnavailableError,
)
from remote_ckpt.index import Index, format_index, parse_index
from remote_ckpt.manifest import Manifest, ObjectEntry, format_manifest
from remote_ckpt.newest import read_newest
from remote_ckpt.options import MiB, Options, TransferOptions
from remote_ckpt.progress import Progress
from remote_ckpt.spans import Span, check_part
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.testing.faults import FaultStore, StoreCall, corrupt_reads
from remote_ckpt.testing.servers import LocalServer
from remote_ckpt.verification import Problem, VerifyReport, verify_checkpoint

GOLDEN = Path(__file__).parent / "golden" / "1"
PART = 5 * MiB
SMALL_PARTS = Options(transfer=TransferOptions(part_bytes=PART, budget_bytes=2 * PART, concurrency=3))

ITEMS: dict[str, Item] = {
    "rows": rows((6, 500), pattern(12_000, 1), [4, 2], "float32"),
    "columns": columns((9, 8), pattern(144, 2), [5, 3], "int16"),
    "empty": whole((0, 3), b""),
    "scalar": whole((), pattern(8, 3), "float64", rank=1),
    "opaque": Tensor((3,), (Part((0,), (3,), pattern(300, 4), 1, is_opaque=True),), "qint8"),
    "value": Value(pattern(5000, 5), rank=1),
}


@pytest.fixture(params=["memory", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore.fresh() if request.param == "memory" else LocalStore(tmp_path / "run")


def index_of(root: Store, manifest: Manifest, name: str = "7") -> Index:
    assert manifest.index is not None
    return parse_index(root.read(f"{name}/{manifest.index.key}"), url="", key="")


def flip(root: Store, key: str, at: int) -> None:
    data = bytearray(root.read(key))
    data[at] ^= 0x10
    root.write(key, bytes(data))


def names_in(index: Index, key: str) -> tuple[str, ...]:
    """Whose bytes an object holds, told from the index alone."""
    return tuple(sorted({name for name, _, _ in places(index, key)}))


def places(index: Index, key: str) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and end of everything in an object that has bytes of its own."""
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            begin = chunk.archive_offset if chunk.is_opaque else chunk.payload_offset
            if index.objects[chunk.object] == key and chunk.payload_bytes:
                yield name, begin, begin + chunk.payload_bytes
    for name, blob in index.blobs.items():
        if index.objects[blob.object] == key:
            yield name, blob.offset, blob.offset + blob.length_bytes


def owners(index: Index, key: str, at: int) -> tuple[str, ...]:
    """Whose byte it is; nobody's in the framing."""
    return tuple(sorted({name for name, begin, end in places(index, key) if begin <= at < end}))


def problems(report: VerifyReport) -> dict[str, tuple[str, ...]]:
    assert report.is_sound == (not report.problems)
    found = {problem.key: problem.tensors for problem in report.problems}
    assert len(found) == len(report.problems), "one object in two problems"
    return found


# --- sound checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("read_data", [False, True])
def test_a_sound_checkpoint_has_no_problems(root: Store, read_data: bool) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    report = verify_checkpoint(root, "7", read_data=read_data)
    assert manifest.index is not None
    assert manifest.stock_metadata is not None
    entries = [*manifest.objects, manifest.index, manifest.stock_metadata]
    assert report == VerifyReport(
        name="7",
        url=root.scope("7").url,
        kind="remote_ckpt",
        is_data_read=read_data,
        object_count=4,
        total_bytes=sum(entry.size_bytes for entry in entries),
    )
    assert report.is_sound


def test_the_golden_checkpoint_is_sound() -> None:
    report = verify_checkpoint(LocalStore(GOLDEN), "checkpoint", read_data=True)
    assert (report.problems, report.warnings, report.object_count) == ((), (), 3)


def test_a_pinned_checkpoint_is_sound(root: Store) -> None:
    write_checkpoint(root, "7", ITEMS)
    set_pinned(root.scope("7"), True)
    assert verify_checkpoint(root, "7", read_data=True).is_sound


def test_without_reading_data_no_data_is_asked_for(root: Store) -> None:
    write_checkpoint(root, "7", ITEMS)
    store = FaultStore(root)
    verify_checkpoint(store, "7")
    reads = [call.key for call in store.calls if call.operation.startswith(("read", "info"))]
    assert not [key for key in reads if key is None or key.endswith(".distcp")]


def test_every_byte_is_read_once_where_all_is_right(root: Store) -> None:
    manifest = write_checkpoint(root, "7", {"large": whole((11 * MiB,), pattern(11) * MiB)})
    lengths: list[int] = []

    def after(call: StoreCall, result: Any) -> Any:
        if call.operation == "read_range":
            lengths.append(len(result))
        return result

    verify_checkpoint(FaultStore(root, after=after), "7", read_data=True, options=SMALL_PARTS)
    assert sum(lengths) == manifest.total_bytes
    assert max(lengths) == PART


def test_no_more_is_held_at_once_than_the_budget() -> None:
    root = MemoryStore.fresh()
    write_checkpoint(root, "7", {"large": whole((31 * MiB,), pattern(31) * MiB)})
    options = Options(transfer=replace(SMALL_PARTS.transfer, concurrency=16))
    busy: set[int] = set()
    most = 0

    def before(call: StoreCall) -> None:
        nonlocal most
        if call.operation == "read_range":
            busy.add(threading.get_ident())
            most = max(most, len(busy))

    assert verify_checkpoint(FaultStore(root, before=before), "7", read_data=True, options=options).is_sound
    assert most <= options.transfer.budget_bytes // PART == 2


@pytest.mark.server
def test_damage_on_a_real_store_is_found(
    seaweed: LocalServer, fresh_root: Callable[[LocalServer], str]
) -> None:
    with closing(open_store(fresh_root(seaweed), storage_options=seaweed.storage_options())) as root:
        index = index_of(root, write_checkpoint(root, "7", ITEMS))
        assert verify_checkpoint(root, "7", read_data=True).is_sound
        first, second = index.objects
        at = next(begin for name, begin, _ in places(index, second) if name == "opaque")
        flip(root, f"7/{second}", at)
        root.delete([f"7/{first}"])
        report = verify_checkpoint(root, "7", read_data=True)
        assert problems(report) == {first: names_in(index, first), second: ("opaque",)}
        delete_checkpoint(root.scope("7"))
        with pytest.raises(CheckpointNotFoundError):
            verify_checkpoint(root, "7")


@pytest.mark.parametrize("read_data", [False, True])
def test_progress_ends_where_it_said(root: Store, read_data: bool) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    seen: list[Progress] = []
    verify_checkpoint(root, "7", read_data=read_data, on_progress=seen.append)
    assert {one.operation for one in seen} == {"verify"}
    assert seen[0].done_bytes == seen[0].done_objects == 0
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert seen[-1].done_objects == seen[-1].total_objects == 4
    assert manifest.index is not None
    assert manifest.stock_metadata is not None
    small = manifest.index.size_bytes + manifest.stock_metadata.size_bytes
    assert seen[-1].total_bytes == small + (manifest.total_bytes if read_data else 0)


# --- damaged data objects ----------------------------------------------------------------------------


def test_each_flipped_byte_of_a_data_object_is_found_with_exactly_its_tensors() -> None:
    root = MemoryStore.fresh()
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    chance = random.Random(0)
    for key in index.objects:
        data = root.read(f"7/{key}")
        edges = {0, len(data) - 1}
        for _, begin, end in places(index, key):
            edges |= {begin - 1, begin, end - 1, end, chance.randrange(begin, end)}
        for at in sorted(at for at in edges | set(range(0, len(data), 331)) if 0 <= at < len(data)):
            flip(root, f"7/{key}", at)
            report = verify_checkpoint(root, "7", read_data=True)
            assert problems(report) == {key: owners(index, key, at)}, (key, at)
            assert ("framing" in report.problems[0].message) == (not owners(index, key, at))
            root.write(f"7/{key}", data)
    assert verify_checkpoint(root, "7", read_data=True).is_sound


def test_a_flip_in_the_golden_checkpoint_is_found_wherever_it_is(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "golden")
    root = LocalStore(tmp_path / "golden")
    newest = read_newest(root.scope("checkpoint"))
    assert newest is not None
    index = index_of(root, newest.manifest, "checkpoint")
    (key,) = index.objects
    size = newest.manifest.objects[0].size_bytes
    named: set[str] = set()
    for at in [*range(0, size, 997), *(begin for _, begin, _ in places(index, key))]:
        flip(root, f"checkpoint/{key}", at)
        found = problems(verify_checkpoint(root, "checkpoint", read_data=True))
        assert found == {key: owners(index, key, at)}
        named.update(found[key])
        flip(root, f"checkpoint/{key}", at)
    assert named == {*names_in(index, key)}


def test_several_wrong_bytes_are_one_problem_that_names_all_their_tensors(root: Store) -> None:
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    second = index.objects[1]
    begins = {name: begin for name, begin, _ in places(index, second)}
    for name in ("opaque", "value", "columns"):
        flip(root, f"7/{second}", begins[name])
    found = problems(verify_checkpoint(root, "7", read_data=True))
    assert found == {second: ("columns", "opaque", "value")}


@pytest.mark.parametrize("read_data", [False, True])
def test_missing_objects_are_all_found_and_name_the_tensors_in_them(root: Store, read_data: bool) -> None:
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    root.delete([f"7/{key}" for key in index.objects])
    report = verify_checkpoint(root, "7", read_data=read_data)
    assert problems(report) == {key: names_in(index, key) for key in index.objects}
    assert {problem.message for problem in report.problems} == {"is missing"}


@pytest.mark.parametrize("read_data", [False, True])
def test_a_cut_object_names_the_tensors_that_lost_bytes(root: Store, read_data: bool) -> None:
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    key = index.objects[1]
    data = root.read(f"7/{key}")
    for cut in (1, len(data) // 2, len(data) - 1):
        root.write(f"7/{key}", data[:cut])
        report = verify_checkpoint(root, "7", read_data=read_data)
        lost = {name for name, _, end in places(index, key) if end > cut}
        assert problems(report) == {key: tuple(sorted(lost))}
        assert report.problems[0].message == f"has {cut} bytes, {len(data)} were saved"


def test_an_emptied_file_has_lost_all(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    (tmp_path / "7" / index.objects[0]).write_bytes(b"")
    seen: list[Progress] = []
    report = verify_checkpoint(root, "7", read_data=True, on_progress=seen.append)
    assert problems(report) == {index.objects[0]: names_in(index, index.objects[0])}
    assert seen[-1].done_objects == 4


def test_what_is_left_of_a_cut_object_is_read_too(root: Store) -> None:
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    key = index.objects[1]
    cut = next(begin for name, begin, _ in places(index, key) if name == "value")
    root.write(f"7/{key}", root.read(f"7/{key}")[:cut])
    flip(root, f"7/{key}", next(begin for name, begin, _ in places(index, key) if name == "opaque"))
    assert problems(verify_checkpoint(root, "7", read_data=True)) == {key: ("opaque", "value")}
    assert problems(verify_checkpoint(root, "7")) == {key: ("value",)}


def test_an_object_that_grew_is_a_problem_of_no_tensor(root: Store) -> None:
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    root.write(f"7/{index.objects[0]}", root.read(f"7/{index.objects[0]}") + b"x")
    assert problems(verify_checkpoint(root, "7")) == {index.objects[0]: ()}
    assert problems(verify_checkpoint(root, "7", read_data=True)) == {index.objects[0]: ()}


def test_two_swapped_objects_are_both_found(root: Store) -> None:
    items = {"a": whole((64,), pattern(64, 1)), "b": whole((64,), pattern(64, 2), rank=1)}
    first, second = (f"7/{key}" for key in index_of(root, write_checkpoint(root, "7", items)).objects)
    one, other = root.read(first), root.read(second)
    root.write(first, other)
    root.write(second, one)
    assert verify_checkpoint(root, "7").is_sound, "they are of one size"
    report = verify_checkpoint(root, "7", read_data=True)
    assert problems(report) == {first[2:]: ("a",), second[2:]: ("b",)}


@pytest.mark.parametrize("block_bytes", [4096, 1 * MiB, 7 * MiB, 64 * MiB])
def test_blocks_that_lie_in_several_parts_are_put_together(block_bytes: int) -> None:
    """Parts of 5 MiB, blocks up to several times as large, none at a multiple of the other."""
    root = MemoryStore.fresh()
    data = pattern(5_300_001) * 2
    items: dict[str, Item] = {"large": whole((len(data),), data), "small": whole((10,), pattern(10, 3))}
    index = index_of(root, write_checkpoint(root, "7", items, block_bytes=block_bytes))
    assert verify_checkpoint(root, "7", read_data=True, options=SMALL_PARTS).is_sound
    (key,) = index.objects
    for at in (PART - 1, PART, 2 * PART - 1, 2 * PART, len(data) - 1):
        flip(root, f"7/{key}", at)
        report = verify_checkpoint(root, "7", read_data=True, options=SMALL_PARTS)
        assert problems(report) == {key: ("large",)}
        flip(root, f"7/{key}", at)


def test_the_crc_of_a_part_is_right_however_its_spans_lie() -> None:
    chance = random.Random(1)
    data = chance.randbytes(400_000)
    for _ in range(50):
        spans = []
        for _ in range(chance.randrange(6)):
            begin = chance.randrange(len(data))
            length = chance.choice([1, 100, 70_000, 200_000])
            covered = data[begin : begin + length]
            spans.append(Span("t", begin, len(covered), block_crcs(covered, 66_000)))
        in_order = sorted(enumerate(spans), key=lambda pair: pair[1].offset_bytes)
        result = check_part(memoryview(data), 0, in_order, 66_000)
        assert (result.crc, result.wrong, result.edges) == (crc32c(data), (), ())


# --- damaged descriptions ----------------------------------------------------------------------------


@pytest.mark.parametrize("read_data", [False, True])
@pytest.mark.parametrize("at", [0, 10, -1])
def test_a_flip_in_index_or_stock_metadata_is_found(root: Store, at: int, read_data: bool) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    for entry in (manifest.index, manifest.stock_metadata):
        assert entry is not None
        flip(root, f"7/{entry.key}", at)
        report = verify_checkpoint(root, "7", read_data=read_data)
        assert problems(report) == {entry.key: ()}
        assert "differs from what was saved" in report.problems[0].message
        flip(root, f"7/{entry.key}", at)


def test_cut_and_missing_descriptions_are_found_together(root: Store) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    assert manifest.index is not None
    assert manifest.stock_metadata is not None
    root.write(f"7/{manifest.index.key}", root.read(f"7/{manifest.index.key}")[:-3])
    root.delete([f"7/{manifest.stock_metadata.key}"])
    report = verify_checkpoint(root, "7")
    assert problems(report) == {manifest.index.key: (), manifest.stock_metadata.key: ()}
    assert report.problems[1].message == "is missing"


def test_data_is_checked_against_the_manifest_where_the_index_is_gone(root: Store) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    assert manifest.index is not None
    root.delete([f"7/{manifest.index.key}"])
    flip(root, f"7/{manifest.objects[1].key}", 100)
    found = problems(verify_checkpoint(root, "7", read_data=True))
    assert found == {manifest.index.key: (), manifest.objects[1].key: ()}


def test_a_damaged_manifest_is_a_problem_that_names_it(root: Store) -> None:
    write_checkpoint(root, "7", ITEMS)
    flip(root, "7/manifest.000001.json", 300)
    report = verify_checkpoint(root, "7", read_data=True)
    assert problems(report) == {"manifest.000001.json": ()}
    assert "the manifest is damaged" in report.problems[0].message
    assert (report.kind, report.is_data_read) == ("remote_ckpt", False)


def test_a_damaged_newest_generation_is_not_made_up_for_by_the_one_below(root: Store) -> None:
    write_checkpoint(root, "7", ITEMS)
    set_pinned(root.scope("7"), True)
    root.write("7/manifest.000002.json", b"{}")
    assert problems(verify_checkpoint(root, "7")) == {"manifest.000002.json": ()}


def test_a_checkpoint_of_a_newer_format_is_an_error(root: Store) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    newer = format_manifest(manifest).replace(b'"version": [1, 0]', b'"version": [2, 0]')
    root.write("7/manifest.000001.json", newer)
    with pytest.raises(FormatError):
        verify_checkpoint(root, "7")


def rewritten(root: Store, manifest: Manifest, data: bytes) -> str:
    """Replace the index by one that the manifest takes for right, as a faulty writer would."""
    assert manifest.index is not None
    root.write(f"7/{manifest.index.key}", data)
    entry = ObjectEntry(manifest.index.key, len(data), crc32c(data))
    root.write("7/manifest.000001.json", format_manifest(replace(manifest, index=entry)))
    return manifest.index.key


def test_an_index_of_another_save_is_found(root: Store) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    other = replace(index_of(root, manifest), save_id="20260101T000000Z-0123456789ab")
    key = rewritten(root, manifest, format_index(other))
    report = verify_checkpoint(root, "7")
    assert problems(report) == {key: ()}
    assert "is of save 20260101T000000Z-0123456789ab" in report.problems[0].message


def test_an_index_that_points_outside_its_objects_names_the_tensors(root: Store) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    index = index_of(root, manifest)
    index.tensors["scalar"].chunks[0].archive_bytes += MiB
    index.blobs["value"].offset += MiB
    key = rewritten(root, manifest, format_index(index))
    assert problems(verify_checkpoint(root, "7", read_data=True)) == {key: ("scalar", "value")}


def test_an_index_with_other_checksums_than_the_objects_is_found(root: Store) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    index = index_of(root, manifest)
    index.tensors["scalar"].chunks[0].crcs = b"\0\0\0\0"
    rewritten(root, manifest, format_index(index))
    report = verify_checkpoint(root, "7", read_data=True)
    assert problems(report) == {index.objects[1]: ("scalar",)}
    assert "the index has other checksums" in report.problems[0].message


def test_a_manifest_without_an_index_is_a_problem(root: Store) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    root.write("7/manifest.000001.json", format_manifest(replace(manifest, index=None)))
    assert problems(verify_checkpoint(root, "7")) == {"manifest.000001.json": ()}


def test_an_index_that_its_checksum_vouches_for_and_that_is_none_is_a_problem(root: Store) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    key = rewritten(root, manifest, b"no index")
    report = verify_checkpoint(root, "7")
    assert problems(report) == {key: ()}
    assert "the index is damaged" in report.problems[0].message


# --- what concerns stock readers only ----------------------------------------------------------------


def test_a_published_copy_that_is_missing_or_another_is_a_warning(root: Store) -> None:
    write_checkpoint(root, "7", ITEMS)
    published = root.read("7/.metadata")
    root.write("7/.metadata", published + b"x")
    report = verify_checkpoint(root, "7", read_data=True)
    assert report.is_sound
    assert [".metadata is not what was saved" in one for one in report.warnings] == [True]
    root.delete(["7/.metadata"])
    report = verify_checkpoint(root, "7")
    assert report.is_sound
    assert [".metadata is missing" in one for one in report.warnings] == [True]


def test_a_published_copy_of_a_save_that_has_none_is_a_warning(root: Store) -> None:
    manifest = write_checkpoint(root, "7", ITEMS)
    root.write("7/manifest.000001.json", format_manifest(replace(manifest, stock_metadata=None)))
    report = verify_checkpoint(root, "7")
    assert report.is_sound
    assert [".metadata is of another save" in one for one in report.warnings] == [True]
    root.delete(["7/.metadata"])
    assert verify_checkpoint(root, "7").warnings == ()


# --- flips on the way --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["manifest.", "index.", "metadata.", ".metadata", "d-"])
def test_a_flip_on_the_way_is_no_damage(root: Store, key: str) -> None:
    write_checkpoint(root, "7", ITEMS)
    flips = iter([True])

    def is_wanted(call: StoreCall) -> bool:
        is_it = call.operation.startswith("read") and (call.key or "").startswith(key)
        return is_it and next(flips, False)

    report = verify_checkpoint(FaultStore(root, after=corrupt_reads(is_wanted)), "7", read_data=True)
    assert next(flips, None) is None, "nothing was flipped"
    assert (report.problems, report.warnings) == ((), ())


def test_flips_on_the_way_at_different_places_are_no_damage() -> None:
    root = MemoryStore.fresh()
    write_checkpoint(root, "7", {"t": whole((11 * MiB,), pattern(11) * MiB)})
    reads = iter(range(1000))

    def after(call: StoreCall, result: Any) -> Any:
        number = next(reads) if call.operation == "read_range" else None
        if number not in (0, 5):  # the first part, and when all three are read again, the last one
            return result
        return corrupt_reads(lambda _: True)(call, result)

    options = Options(transfer=replace(SMALL_PARTS.transfer, concurrency=1))
    report = verify_checkpoint(FaultStore(root, after=after), "7", read_data=True, options=options)
    assert report.is_sound
    assert next(reads) == 9, "three readings of three parts"


# --- other failures ----------------------------------------------------------------------------------


def test_a_checkpoint_that_is_not_there_or_deleted_is_not_found(root: Store) -> None:
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(root, "7")
    write_checkpoint(root, "7", ITEMS)
    delete_checkpoint(root.scope("7"))
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(root, "7")


@pytest.mark.parametrize("error", [StoreUnavailableError("503"), AccessDeniedError("403")])
@pytest.mark.parametrize("operation", ["list", "read", "read_range", "info"])
def test_a_failing_store_is_neither_damage_nor_soundness(
    root: Store, error: Exception, operation: str
) -> None:
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    root.delete([f"7/{index.objects[0]}"])  # so that its size is asked for

    def before(call: StoreCall) -> None:
        if call.operation == operation:
            raise error

    with pytest.raises(type(error)):
        verify_checkpoint(FaultStore(root, before=before), "7", read_data=True)


def test_an_object_that_a_listing_lacks_and_a_read_finds_is_not_missing() -> None:
    root = MemoryStore.fresh()
    write_checkpoint(root, "7", ITEMS)

    def after(call: StoreCall, result: Any) -> Any:
        if call.operation == "list":
            return [info for info in result if not info.key.endswith(".distcp")]
        return result

    report = verify_checkpoint(FaultStore(root, after=after), "7", read_data=True)
    assert report == verify_checkpoint(root, "7", read_data=True)


def test_an_object_that_goes_while_it_is_read_is_missing(root: Store) -> None:
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    key = index.objects[0]

    def before(call: StoreCall) -> None:
        if call.operation == "read_range" and call.key == key:
            root.delete([f"7/{key}"])

    report = verify_checkpoint(FaultStore(root, before=before), "7", read_data=True)
    assert problems(report) == {key: names_in(index, key)}
    assert report.problems[0].message == "is missing"


def test_an_object_that_is_cut_while_it_is_read_cannot_be_read_whole() -> None:
    root = MemoryStore.fresh()
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    key = index.objects[0]

    def before(call: StoreCall) -> None:
        if call.operation == "read_range" and call.key == key:
            root.write(f"7/{key}", b"short")

    report = verify_checkpoint(FaultStore(root, before=before), "7", read_data=True)
    assert problems(report) == {key: names_in(index, key)}
    assert "cannot be read whole" in report.problems[0].message


def replaced(root: Store) -> None:
    write_checkpoint(root, "7", {"new": whole((1,), b"z")}, overwrite=True)


def deleted(root: Store) -> None:
    delete_checkpoint(root.scope("7"))


def lived_again(root: Store) -> None:
    deleted(root)
    write_checkpoint(root, "7", ITEMS)


@pytest.mark.parametrize("act", [replaced, deleted, lived_again])
@pytest.mark.parametrize("moment", ["index.", "metadata.", "d-"])
def test_one_that_is_replaced_or_deleted_meanwhile_has_changed(
    root: Store, act: Callable[[Store], None], moment: str
) -> None:
    write_checkpoint(root, "7", ITEMS)
    acts = iter([act])

    def before(call: StoreCall) -> None:
        if call.operation.startswith("read") and (call.key or "").startswith(moment):
            for now in acts:
                now(root)

    with pytest.raises(CheckpointChangedError):
        verify_checkpoint(FaultStore(root, before=before), "7", read_data=True)


def test_whoever_pins_a_damaged_checkpoint_meanwhile_makes_it_be_looked_at_again(root: Store) -> None:
    index = index_of(root, write_checkpoint(root, "7", ITEMS))
    root.delete([f"7/{index.objects[0]}"])
    pins = iter([True])

    def before(call: StoreCall) -> None:
        if call.operation == "info":
            for is_pinned in pins:
                set_pinned(root.scope("7"), is_pinned)

    with pytest.raises(CheckpointChangedError):
        verify_checkpoint(FaultStore(root, before=before), "7")
    assert not verify_checkpoint(root, "7").is_sound


# --- checkpoints that are not ours -------------------------------------------------------------------


@dataclass(frozen=True)
class Stock:
    """A checkpoint that stock torch saved."""

    root: LocalStore
    folder: Path

    def verify(self, **arguments: Any) -> VerifyReport:
        return verify_checkpoint(self.root, "7", **arguments)


@pytest.fixture
def stock(tmp_path: Path) -> Stock:
    state = {"a": torch.arange(1000.0), "b": torch.ones(3), "n": 3}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "7"))
    return Stock(LocalStore(tmp_path), tmp_path / "7")


def test_a_whole_stock_checkpoint_has_no_problems_but_warns_that_nothing_vouches_for_it(stock: Stock) -> None:
    report = stock.verify()
    assert report.is_sound
    assert (report.kind, report.object_count, report.is_data_read) == ("dcp", 2, False)
    assert report.total_bytes == sum(path.stat().st_size for path in stock.folder.iterdir())
    assert ["has no checksums" in one for one in report.warnings] == [True]


def test_to_read_a_stock_checkpoints_data_would_tell_nothing_and_the_report_says_so(stock: Stock) -> None:
    store = FaultStore(stock.root)
    report = verify_checkpoint(store, "7", read_data=True)
    assert not report.is_data_read
    assert "its data was not read, as there is nothing to compare it with" in report.warnings
    assert not [call for call in store.calls if call.operation == "read_range"]


def test_a_stock_file_that_is_missing_names_its_tensors(stock: Stock) -> None:
    (stock.folder / "__0_0.distcp").unlink()
    assert stock.verify().problems == (Problem("__0_0.distcp", "is missing", ("a", "b", "n")),)


def test_a_stock_file_that_is_cut_names_what_lost_bytes(stock: Stock) -> None:
    path = stock.folder / "__0_0.distcp"
    whole_bytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = stock.verify().problems
    assert problem.message == f"has {whole_bytes - 1} bytes, but .metadata names bytes up to {whole_bytes}"
    assert len(problem.tensors) == 1, "the last one in the file"
    path.write_bytes(b"")
    assert stock.verify().problems[0].tensors == ("a", "b", "n")


@pytest.mark.parametrize("data", [b"", b"stock", b"\x80\x02cos\nsystem\n."])
def test_stock_metadata_that_cannot_be_read_is_a_problem(stock: Stock, data: bytes) -> None:
    (stock.folder / ".metadata").write_bytes(data)
    assert [problem.key for problem in stock.verify().problems] == [".metadata"]


def test_a_flip_of_stock_metadata_on_the_way_is_no_damage(stock: Stock) -> None:
    broken = iter([stock.root.read("7/.metadata")[:50]])

    def after(call: StoreCall, result: Any) -> Any:
        return next(broken, result) if call.key == ".metadata" else result

    assert verify_checkpoint(FaultStore(stock.root, after=after), "7").is_sound
    assert next(broken, None) is None


def test_a_stock_checkpoint_that_is_deleted_meanwhile_has_changed(stock: Stock) -> None:
    def before(call: StoreCall) -> None:
        if call.operation == "read" and call.key == ".metadata" and (stock.folder / ".metadata").exists():
            (stock.folder / ".metadata").unlink()

    with pytest.raises(CheckpointChangedError):
        verify_checkpoint(FaultStore(stock.root, before=before), "7")


def test_of_a_plain_checkpoint_only_its_file_is_looked_at(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    root.write("7/checkpoint.pth", b"plain")
    report = verify_checkpoint(root, "7", read_data=True)
    assert (report.kind, report.is_sound, report.is_data_read) == ("plain", True, False)
    assert (report.object_count, report.total_bytes) == (1, 5)
    assert ["has no checksums" in one for one in report.warnings] == [True]
    (tmp_path / "7" / "checkpoint.pth").write_bytes(b"")
    assert verify_checkpoint(root, "7").problems == (Problem("checkpoint.pth", "is empty"),)
