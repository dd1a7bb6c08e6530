"""Cases from the field in one process, on a local disk and in memory.

``docs/field-cases.md`` says what each number stands for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from protocol import OPTIONS, FakeTime, load, save, upload
from torch import nn

from remote_ckpt import (
    CheckpointDamagedError,
    CheckpointDirectory,
    CheckpointNotFoundError,
    ObjectNotFoundError,
    RemoteStorageReader,
    RemoteStorageWriter,
    UrlError,
    cleanup_checkpoint,
    find_all_checkpoints,
    find_latest_checkpoint,
    keep_checkpoint_copy,
    keep_last_n_checkpoints,
    load_checkpoint,
    place,
    resumed,
    save_checkpoint,
)
from remote_ckpt.commit import commit_save
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.keys import manifest_key
from remote_ckpt.pruning import prune
from remote_ckpt.retention import plan_keep_last
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.testing.faults import FaultStore, StoreCall

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

_numbers = itertools.count(1)


@pytest.fixture(params=["memory", "local"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A run's directory that no other test uses, in a process that has resumed from nothing."""
    resumed.forget_all()
    yield f"memory://field-{next(_numbers)}/run" if request.param == "memory" else str(tmp_path / "run")
    resumed.forget_all()


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def save_steps(run: str, *names: int | str, value: float = 0.0) -> None:
    for name in names:
        save_checkpoint(f"{run}/{name}", iteration=name, model=model_of(value))


def value_of(path: Any) -> float:
    model = model_of(-1.0)
    load_checkpoint(path, model=model)
    return model.weight.item()


def names_in(run: str) -> list[str]:
    return [path.name for path in find_all_checkpoints(run)]


# --- the latest one -----------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in half": lambda data: data[: len(data) // 2],
    "a wrong checksum": lambda data: data.replace(b'"total_bytes": ', b'"total_bytes": 1'),
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "empty"])
def test_br_09_a_damaged_newest_one_is_passed_over_and_an_error_by_name(
    run: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(run, 10, value=1.5)
    save_steps(run, 20, value=2.5)
    with closing(open_store(run)) as root:
        key = f"20/{manifest_key(1)}"
        if damage != "empty":
            altered = DAMAGE[damage](root.read(key))
            assert altered != root.read(key)
            root.write(key, altered)
        elif run.startswith("memory"):
            return  # no store of ours, and no S3 upload of ours, writes an object of no bytes
        else:
            Path(run, key).write_bytes(b"")
    latest = find_latest_checkpoint(run)
    assert latest is not None
    assert (latest.name, value_of(latest)) == ("10", 1.5)
    assert "passing over the damaged checkpoint 20" in caplog.text
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.000001"):
        value_of(f"{run}/20")


def test_br_09_one_that_lacks_an_object_is_passed_over_by_whoever_looks_closely(run: str) -> None:
    save_steps(run, 10, value=1.5)
    save_steps(run, 20, value=2.5)
    with closing(open_store(run)) as root:
        (gone,) = [info.key for info in root.list("20/") if info.key.endswith(".distcp")]
        root.delete([gone])
    with CheckpointDirectory(run) as directory:
        sound = directory.latest(verify=True)
    assert sound is not None
    assert sound.name == "10"
    with pytest.raises(CheckpointDamagedError, match=gone.partition("/")[2]):
        value_of(f"{run}/20")
    assert value_of(f"{run}/10") == 1.5


def test_br_15_the_last_one_by_number_is_found_and_kept(run: str) -> None:
    save_steps(run, 500, 2500, 9000, 10000)
    latest = find_latest_checkpoint(run)
    assert latest is not None
    assert latest.name == "10000"
    keep_last_n_checkpoints(run, 1)
    assert names_in(run) == ["10000"]


def test_br_17_an_absent_checkpoint_and_an_empty_run_are_told_apart(run: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=re.escape(f"{run}/300")):
        value_of(f"{run}/300")
    assert find_latest_checkpoint(run) is None
    save_steps(run, 200)
    with pytest.raises(CheckpointNotFoundError, match=re.escape(f"{run}/300")):
        value_of(f"{run}/300")


def hook_into(monkeypatch: pytest.MonkeyPatch, before: Callable[[StoreCall], None]) -> None:
    """Let a hook see every request of the functions of a run's directory."""

    def hooked(*args: Any, **options: Any) -> Store:
        return FaultStore(open_store(*args, **options), before=before)

    monkeypatch.setattr(place, "open_store", hooked)


# --- cleaning up --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_br_23_the_one_just_committed_survives_beside_older_higher_steps(
    run: str, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(run, 500, 600, 700, 100, value=3.5)
    keep_last_n_checkpoints(run, n)
    assert names_in(run) == (["100", "700"] if n == 1 else ["100", "500", "600", "700"])
    assert value_of(f"{run}/100") == 3.5
    assert "older ones with higher steps exist (up to 700)" in caplog.text


@pytest.mark.parametrize("is_gone_first", [True, False])
def test_br_24_a_deletion_that_another_made_first_is_no_error(
    run: str, is_gone_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other takes the second victim away before our tombstone, or after it."""
    save_steps(run, 1, 2, 3, 4, 5)
    pending = ["2"]

    def interfere(call: StoreCall) -> None:
        wanted = "create" if is_gone_first else "delete"
        if call.operation == wanted and call.url.endswith("/2") and pending:
            with closing(open_store(run)) as other, closing(other.scope(pending.pop())) as checkpoint:
                delete_checkpoint(checkpoint)

    monkeypatch.setattr(
        place,
        "open_store",
        lambda *args, **options: FaultStore(open_store(*args, **options), before=interfere),
    )
    keep_last_n_checkpoints(run, 2)
    assert pending == []
    assert names_in(run) == ["4", "5"]
    assert "cannot delete" not in caplog.text


def test_br_24_keys_that_are_not_found_while_they_are_deleted_are_no_error(
    run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(run, 1, 2, 3, 4, 5)
    seen = itertools.count(1)

    def not_found(call: StoreCall) -> None:
        if call.operation == "delete" and next(seen) == 2:
            raise ObjectNotFoundError("404", url=call.url)

    monkeypatch.setattr(
        place,
        "open_store",
        lambda *args, **options: FaultStore(open_store(*args, **options), before=not_found),
    )
    keep_last_n_checkpoints(run, 2)
    assert next(seen) > 2
    assert names_in(run) == ["4", "5"]
    assert "cannot delete" not in caplog.text


def test_br_26_a_save_in_progress_and_what_is_no_checkpoint_are_not_touched(run: str) -> None:
    foreign = ["15/d-0123456789abcdef/0.distcp", "step-20-backup/x", "mystep-5/x", "notes/x"]
    with closing(open_store(run)) as root:
        for name in ("10", "20"):
            save(root, b"x", name=name)
        for key in foreign:
            root.write(key, b"precious")
        running = root.scope("30", create=True)
        begun = upload(running, b"thirty", name="30")
        report = prune(root, lambda candidates: plan_keep_last(candidates, 1), options=OPTIONS)
        assert report.deleted == ("10",)
        assert {info.key for info in root.list()} >= set(foreign)
        commit_save(
            running,
            begun.draft,
            attempt=begun.attempt,
            overwrite=False,
            expected=begun.expected,
            options=OPTIONS,
            waiting=FakeTime().waiting,
        )
        assert (load(root, "20"), load(root, "30")) == (b"x", b"thirty")


# --- paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part", ["two words", "a+b#c%d?e=f,g(h)", "L\u00e4ufe \u6a21\u578b", "a%20b", "[1]*"]
)
def test_br_62_a_local_or_memory_path_of_any_characters_is_itself(run: str, part: str) -> None:
    odd = f"{run}/{part}/run"
    save_steps(odd, 1, value=1.5)
    latest = find_latest_checkpoint(odd)
    assert latest is not None
    assert value_of(latest) == value_of(f"{odd}/1") == 1.5
    assert value_of(keep_checkpoint_copy(latest)) == 1.5
    save_steps(odd, 2)
    keep_last_n_checkpoints(odd, 1)
    assert names_in(odd) == ["2"]
    with CheckpointDirectory(odd) as directory:
        for name in ("1_keep", "2"):
            directory.delete(name)
    with closing(open_store(run)) as root:
        assert {info.key.rpartition("/run/")[0] for info in root.list()} <= {part}


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "save": lambda url: save_checkpoint(url, iteration=1, model=model_of(1.0)),
    "load": value_of,
    "copy": keep_checkpoint_copy,
    "find": find_latest_checkpoint,
    "keep": lambda url: keep_last_n_checkpoints(url, 1),
    "clean": lambda url: cleanup_checkpoint(url, "none"),  # type: ignore[arg-type]
    "write": RemoteStorageWriter,
    "read": RemoteStorageReader,
    "open": CheckpointDirectory,
}


@pytest.mark.parametrize("url", ["s3://bucket/run/1", "gs://bucket/run/1", "memory://run/1"])
@pytest.mark.parametrize("what", OPERATIONS)
def test_br_63_a_url_that_pathlib_made_a_local_path_of_is_refused_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UrlError, match="pass it as str"):
        OPERATIONS[what](Path(url).absolute())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_br_63_a_path_object_of_a_url_is_that_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    place_of_runs = tmp_path / "runs"
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    url = f"file://{place_of_runs}" if scheme == "file" else f"memory://field-{next(_numbers)}/runs"
    save_steps(str(Path(url)), 1, value=2.5)
    latest = find_latest_checkpoint(Path(url))
    assert latest is not None
    assert value_of(latest) == value_of(f"{url}/1") == value_of(Path(url) / "1") == 2.5
    assert list(working.iterdir()) == []
    assert place_of_runs.exists() == (scheme == "file")


@pytest.mark.parametrize("url", ["~/ck", "file://~/ck"])
@pytest.mark.parametrize("transport", [None, "fsspec"])
def test_br_67_a_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, transport: str | None
) -> None:
    home, working = tmp_path / "home", tmp_path / "working"
    for folder in (home, working):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(working)
    save_checkpoint(f"{url}/1", iteration=1, model=model_of(1.5), transport=transport)
    assert find_latest_checkpoint(url, transport=transport) == home / "ck" / "1"
    assert value_of(Path(url) / "1") == 1.5
    assert [path.name for path in home.iterdir()] == ["ck"]
    assert list(working.iterdir()) == []


def test_br_67_the_home_of_nobody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UrlError, match="unknown user"):
        save_steps("~no-such-user-here/ck", 1)
    assert list(tmp_path.iterdir()) == []
