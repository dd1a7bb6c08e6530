"""What a run's directory takes: checkpoints, what is left over, and what is not ours add up to all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade import whole, write_checkpoint
from protocol import save, upload

from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.copies import copy_checkpoint
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.errors import StoreUnavailableError
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import named_keys
from remote_ckpt.store.base import Store
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.memory import MemoryStore
from remote_ckpt.testing.faults import FaultStore, StoreCall
from remote_ckpt.usage import CheckpointUsage, Remains, Usage, measure_usage


@pytest.fixture(params=["memory", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore.fresh() if request.param == "memory" else LocalStore(tmp_path / "run")


def measure(root: Store) -> Usage:
    """Measure, and check that nothing is counted twice or not at all."""
    usage = measure_usage(root)
    everything = sum(info.size_bytes for info in root.list(""))
    assert usage.total_bytes + usage.leftover_bytes + usage.other_bytes == everything
    return usage


def bytes_of(root: Store, *keys: str) -> int:
    return sum(root.info(key).size_bytes for key in keys)


def needed_keys(manifest: Manifest, name: str = "10") -> list[str]:
    keys = [*named_keys(manifest), f"manifest.{manifest.generation:06d}.json", ".metadata"]
    return [f"{name}/{key}" for key in keys]


def test_an_empty_or_missing_directory_takes_nothing(root: Store) -> None:
    assert measure(root) == Usage(
        url=root.url, checkpoints=(), remains=(), leftover_bytes=0, other_count=0, other_bytes=0
    )


def test_a_checkpoint_takes_data_index_metadata_and_manifest(root: Store) -> None:
    keys = needed_keys(save(root, b"x" * 1000))
    assert measure(root).checkpoints == (
        CheckpointUsage(
            name="10",
            step=10,
            kind="remote_ckpt",
            object_count=len(keys),
            total_bytes=bytes_of(root, *keys),
            leftover_bytes=0,
        ),
    )


def test_checkpoints_are_told_in_the_order_of_their_steps_and_add_up(root: Store) -> None:
    for name in ("100", "20", "best"):
        save(root, name.encode() * 100, name=name)
    usage = measure(root)
    assert [each.name for each in usage.checkpoints] == ["20", "100", "best"]
    assert [each.step for each in usage.checkpoints] == [20, 100, None]
    assert usage.total_bytes == sum(info.size_bytes for info in root.list(""))


def test_superseded_manifests_are_left_over(root: Store) -> None:
    manifest = save(root, b"x")
    set_pinned(root.scope("10"), True)
    newest = annotate(root.scope("10"), metrics={"loss": 1.0})
    usage = measure(root)
    superseded = bytes_of(root, "10/manifest.000001.json", "10/manifest.000002.json")
    assert usage.leftover_bytes == usage.checkpoints[0].leftover_bytes == superseded
    assert usage.total_bytes == bytes_of(root, *needed_keys(newest))
    assert named_keys(newest) == named_keys(manifest)


def test_what_a_replacement_or_a_killed_save_left_is_left_over(root: Store) -> None:
    replaced = save(root, b"first")
    data = {key: root.read(f"10/{key}") for key in named_keys(replaced)}
    save(root, b"second", overwrite=True)
    before = measure(root)
    for key, content in data.items():  # as if its clean-up had been cut short
        root.write(f"10/{key}", content)
    upload(root.scope("10"), b"never committed")
    after = measure(root)
    left = after.leftover_bytes - before.leftover_bytes
    assert left == sum(info.size_bytes for info in root.list("")) - before.total_bytes - before.leftover_bytes
    assert after.total_bytes == before.total_bytes
    assert after.checkpoints[0].leftover_bytes == after.leftover_bytes


def test_a_save_in_progress_and_a_deleted_checkpoint_are_remains(root: Store) -> None:
    upload(root.scope("20", create=True), b"half", name="20")
    keys = [info.key for info in root.list("20/")]
    assert measure(root).remains == (
        Remains(name="20", object_count=len(keys), total_bytes=bytes_of(root, *keys)),
    )
    assert measure(root).checkpoints == ()


def test_the_mark_of_a_deleted_checkpoint_is_left_over() -> None:
    root = MemoryStore.fresh()
    save(root, b"x")
    delete_checkpoint(root.scope("10"))
    keys = [info.key for info in root.list("")]
    assert [key.startswith("10/manifest.") for key in keys] == [True] * len(keys)
    usage = measure(root)
    assert usage.remains == (Remains(name="10", object_count=len(keys), total_bytes=bytes_of(root, *keys)),)
    assert usage.leftover_bytes == bytes_of(root, *keys)


def test_what_is_not_ours_is_counted_apart(root: Store) -> None:
    save(root, b"x")
    before = measure(root)
    strangers = [
        "notes.txt",
        "logs/events",
        "10/notes.txt",
        "10/sub/__0_0.distcp",
        ".hidden/manifest.000001.json",
    ]
    for key in strangers:
        root.write(key, b"precious")
    usage = measure(root)
    assert (usage.other_count, usage.other_bytes) == (5, 40)
    assert (usage.checkpoints, usage.leftover_bytes, usage.remains) == (before.checkpoints, 0, ())


def test_what_a_probe_left_in_the_root_is_left_over(root: Store) -> None:
    root.write(".probe-d-0123456789abcdef", b"probe")
    usage = measure(root)
    assert (usage.leftover_bytes, usage.other_count, usage.remains) == (5, 0, ())


def test_stock_and_plain_checkpoints_take_their_own_files_only(root: Store) -> None:
    for key in ("1/.metadata", "1/__0_0.distcp", "2/checkpoint.pth"):
        root.write(key, b"12345")
    for key in ("1/notes", "2/.notes"):
        root.write(key, b"other")
    root.write("1/d-0123456789abcdef/0.distcp", b"half a save of ours over it")
    usage = measure(root)
    assert [(each.kind, each.object_count, each.total_bytes) for each in usage.checkpoints] == [
        ("dcp", 2, 10),
        ("plain", 1, 5),
    ]
    assert [each.leftover_bytes for each in usage.checkpoints] == [27, 0]
    assert (usage.other_count, usage.leftover_bytes) == (2, 27)


def test_stock_files_that_a_replacement_still_has_to_delete_are_left_over() -> None:
    root = MemoryStore.fresh()
    root.write("10/.metadata", b"stock")
    root.write("10/__0_0.distcp", b"stock data")
    save(root, b"ours", overwrite=True)
    root.write("10/__0_0.distcp", b"stock data")  # as if it could not be deleted
    usage = measure(root)
    assert (usage.leftover_bytes, usage.other_count) == (10, 0)


@pytest.mark.parametrize("newest", [b"damaged", None])
def test_of_a_checkpoint_whose_manifest_cannot_be_read_nothing_is_left_over(
    root: Store, newest: bytes | None
) -> None:
    save(root, b"x")
    manifest = root.read("10/manifest.000001.json")
    root.write("10/manifest.000002.json", newest or manifest.replace(b"[1, 0]", b"[2, 0]"))
    root.write("10/notes", b"other")
    (usage,) = measure(root).checkpoints
    assert usage.leftover_bytes == 0
    assert usage.total_bytes == sum(info.size_bytes for info in root.list("10/")) - 5


def test_a_copy_counts_in_full_though_a_local_disk_holds_its_data_once(root: Store) -> None:
    write_checkpoint(root, "10", {"t": whole((100_000,), bytes(100_000))})
    copy_checkpoint(root, "10", "10_keep")
    first, copy = measure(root).checkpoints
    assert first.total_bytes > 100_000
    assert copy.total_bytes > 100_000


def test_takes_one_listing_of_everything(root: Store) -> None:
    for name in ("10", "20"):
        save(root, b"x", name=name)
    store = FaultStore(root)
    measure_usage(store)
    assert [call.operation for call in store.calls].count("list") == 1
    assert len(store.calls) == 2 + 2 * 2


@pytest.mark.parametrize("operation", ["list", "list_children", "read"])
def test_a_failing_store_is_no_empty_directory(root: Store, operation: str) -> None:
    save(root, b"x")

    def before(call: StoreCall) -> None:
        if call.operation == operation:
            raise StoreUnavailableError("503")

    with pytest.raises(StoreUnavailableError):
        measure_usage(FaultStore(root, before=before))
