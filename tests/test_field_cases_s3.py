"""Cases from the field on S3, behind the fault proxy: rights, listings, keys, uploads, damage.

``docs/field-cases.md`` says what each number stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeping import swept
from torch import nn

from remote_ckpt import (
    AccessDeniedError,
    CheckpointDirectory,
    CheckpointError,
    IntegrityError,
    Options,
    RetryOptions,
    StoreError,
    TransferOptions,
    find_all_checkpoints,
    find_latest_checkpoint,
    keep_checkpoint_copy,
    keep_last_n_checkpoints,
    load_checkpoint,
    resumed,
    save_checkpoint,
)
from remote_ckpt.options import KiB, MiB
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.testing.proxy import (
    Answer,
    Call,
    FaultProxy,
    Proceed,
    Reply,
    Rule,
    Shorten,
    ZeroBytes,
)
from remote_ckpt.testing.servers import LocalServer

DENIED = Reply(403, code="AccessDenied")
HASTY = Options(
    retry=RetryOptions(max_attempts=3, initial_seconds=0.005, max_seconds=0.02),
    transfer=TransferOptions(part_bytes=5 * MiB),
)


@dataclass(frozen=True)
class Run:
    """A run's directory, reached through the proxy."""

    url: str
    access: dict[str, Any] = field(repr=False)

    def path(self, name: int | str) -> str:
        return f"{self.url}/{name}"

    def save(self, *names: int | str, value: float = 0.0) -> None:
        for name in names:
            save_checkpoint(self.path(name), iteration=name, model=model_of(value), **self.access)

    def value_of(self, name: int | str) -> float:
        model = model_of(-1.0)
        load_checkpoint(self.path(name), model=model, **self.access)
        return model.weight.item()

    def names(self) -> list[str]:
        return [path.name for path in find_all_checkpoints(self.url, **self.access)]

    def latest(self) -> str | None:
        found = find_latest_checkpoint(self.url, **self.access)
        return None if found is None else found.name

    def store(self) -> Store:
        return open_store(self.url, **self.access)

    def keys(self) -> set[str]:
        return {info.key for info in self.store().list()}


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


@pytest.fixture(scope="module")
def running_proxy(ministack: LocalServer) -> Iterator[FaultProxy]:
    with FaultProxy(ministack.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: FaultProxy) -> FaultProxy:
    running_proxy.clear()
    running_proxy.forget()
    return running_proxy


@pytest.fixture(params=["obstore", "fsspec"])
def transport(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def bucket(ministack: LocalServer, fresh_bucket: Callable[[LocalServer], str]) -> str:
    return fresh_bucket(ministack)


@pytest.fixture
def access(ministack: LocalServer, proxy: FaultProxy, transport: str) -> dict[str, Any]:
    options = {**ministack.storage_options(), "endpoint_url": proxy.endpoint_url}
    return {"storage_options": options, "transport": transport, "options": HASTY}


@pytest.fixture
def run(bucket: str, access: dict[str, Any]) -> Iterator[Run]:
    resumed.forget_all()
    yield Run(f"s3://{bucket}/team/run", access)
    resumed.forget_all()


# --- retention ----------------------------------------------------------------------------------------------


def test_br_21_on_s3_the_run_that_was_resumed_from_is_not_touched(run: Run, proxy: FaultProxy) -> None:
    before, after = Run(f"{run.url}A", run.access), Run(f"{run.url}B", run.access)
    before.save(10, value=1.5)
    kept = before.keys()
    assert before.value_of(10) == 1.5
    for step in (11, 12, 13):
        after.save(step)
        keep_last_n_checkpoints(after.url, 1, **run.access)
    assert (before.names(), after.names()) == (["10"], ["13"])
    assert before.keys() == kept
    assert before.value_of(10) == 1.5
    deleted = [request.path for request in proxy.requests if request.operation == "DeleteObject"]
    assert [path for path in deleted if "/runB/" not in path] == []


# --- uploads and damage -------------------------------------------------------------------------------------

DATA_KEY = "10/d-0123456789abcdef/0.distcp"


def send(store: Store, size_bytes: int, part_bytes: int) -> bytes:
    """Write a large object in parts, and return what it should be."""
    data = bytes(range(256)) * (size_bytes // 256)
    pieces = [data[start : start + MiB] for start in range(0, len(data), MiB)]
    store.write_stream(
        DATA_KEY, lambda: iter(pieces), size_bytes=len(data), part_bytes=part_bytes, concurrency=3
    )
    return data


ZEROS = ZeroBytes(offset_bytes=2 * MiB, side="request")


def large_model(value: float) -> nn.Linear:
    model = nn.Linear(1536, 1536, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def test_br_42_zeros_in_a_part_of_an_upload_are_found_by_the_load(run: Run, proxy: FaultProxy) -> None:
    zeros = Rule(operation="UploadPart", query="*partNumber=1*", nth=1, fault=ZEROS)
    with proxy.inject(zeros) as fault:
        save_checkpoint(run.path(1), iteration=1, model=large_model(1.0), **run.access)
    assert fault.fired == 1
    with pytest.raises(IntegrityError, match=r"model\.weight") as caught:
        load_checkpoint(run.path(1), model=large_model(0.0), **run.access)
    assert ".distcp" in str(caught.value)


@pytest.mark.parametrize("missing_bytes", [2, 200])
def test_br_42_a_manifest_that_is_cut_on_its_way_up_is_no_checkpoint(
    run: Run, proxy: FaultProxy, missing_bytes: int
) -> None:
    run.save(1, value=1.0)
    rule = Rule(
        path="*/2/manifest.*", method="PUT", fault=Shorten(missing_bytes=missing_bytes, side="request")
    )
    with proxy.inject(rule) as cut, suppress(CheckpointError):
        run.save(2, value=2.0)
    assert cut.fired >= 1
    assert run.latest() == "1"
    with pytest.raises(CheckpointError, match=r"/2"):
        run.value_of(2)
    assert run.value_of(1) == 1.0


def test_br_42_a_manifest_that_lost_its_last_byte_is_refused_or_says_the_same(
    run: Run, proxy: FaultProxy
) -> None:
    """The last byte ends the line: all else is under the digest."""
    with (
        proxy.inject(Rule(path="*/2/manifest.*", method="PUT", fault=Shorten(side="request"))) as fault,
        suppress(CheckpointError),
    ):
        run.save(2, value=2.0)
    assert fault.fired >= 1
    loaded: list[float] = []
    with suppress(CheckpointError):
        loaded.append(run.value_of(2))
    assert loaded in ([], [2.0])


def test_br_46_parts_grow_where_the_store_takes_only_a_hundred(
    run: Run, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remote_ckpt.store.chunks.MAX_PARTS", 95)
    too_many = r"re:partNumber=(10[1-9]|1[1-9]\d|[2-9]\d\d)(&|$)"
    refusing = proxy.inject(
        Rule(operation="UploadPart", query=too_many, fault=Reply(400, code="InvalidArgument"))
    )
    store = run.store()
    data = send(store, 15 * MiB, 100 * KiB)
    assert bytes(store.read(DATA_KEY)) == data
    sent = [request for request in proxy.requests if request.operation == "UploadPart"]
    assert 1 < len(sent) <= 100
    assert refusing.fired == 0


def test_br_47_a_failed_upload_is_aborted(run: Run, proxy: FaultProxy) -> None:
    failing = Rule(operation="UploadPart", query="*partNumber=2*", fault=DENIED)
    with proxy.inject(failing), pytest.raises(AccessDeniedError, match="distcp"):
        send(run.store(), 12 * MiB, 5 * MiB)
    proxy.settle()
    assert list(run.store().list_leftovers()) == []
    assert run.keys() == set()


def test_br_47_an_upload_whose_abort_fails_too_is_found_and_removed_by_the_sweep(
    run: Run, proxy: FaultProxy
) -> None:
    failing = Rule(operation="UploadPart", query="*partNumber=2*", fault=DENIED)
    unaborted = Rule(operation="AbortMultipartUpload", fault=Reply(500, code="InternalError"))
    with proxy.inject(failing), proxy.inject(unaborted), pytest.raises(StoreError, match="distcp"):
        send(run.store(), 12 * MiB, 5 * MiB)
    proxy.settle()
    left = {(found.key, found.kind) for found in run.store().list_leftovers()}
    assert left == {(DATA_KEY, "upload")}
    swept(run.store())
    assert list(run.store().list_leftovers()) == []


# --- rights -------------------------------------------------------------------------------------------------


def allow_only(proxy: FaultProxy, bucket: str, prefix: str) -> None:
    """Deny whatever a policy denies that allows put, get, delete and list below ``prefix/`` alone."""
    for rule in (
        Rule(path="/", fault=DENIED),
        Rule(path=f"re:^/{bucket}/(?!{prefix}/)..*", fault=DENIED),
        Rule(path=f"re:^/{bucket}/?$", query=f"re:^(?!.*(prefix={prefix}/|^delete))", fault=DENIED),
    ):
        proxy.inject(rule)


def test_br_56_rights_below_the_prefix_are_enough(run: Run, proxy: FaultProxy, bucket: str) -> None:
    allow_only(proxy, bucket, "team/run")
    with pytest.raises(AccessDeniedError):  # so the policy is at work
        find_latest_checkpoint(f"s3://{bucket}/team", **run.access)
    proxy.forget()
    assert run.latest() is None
    run.save(1, 2, 3, value=2.5)
    assert run.latest() == "3"
    assert run.value_of(3) == 2.5
    keep_last_n_checkpoints(run.url, 1, **run.access)
    assert run.names() == ["3"]
    assert {request.status for request in proxy.requests} & {401, 403} == set()
    asked = {request.operation for request in proxy.requests}
    assert asked.isdisjoint({"CreateBucket", "ListBuckets", "HeadBucket", "ListObjects", "Other"})


@dataclass(frozen=True, slots=True)
class HideAbsence:
    """Answer as S3 does to a role without the right to list: an absent object is 403."""

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        answer = await proceed(call)
        return await DENIED.apply(call, proceed) if answer.status == 404 else answer


def test_br_57_a_role_that_may_only_get_loads_by_path_and_is_told_what_it_lacks(
    run: Run, proxy: FaultProxy
) -> None:
    run.save(1, 2, value=1.0)
    run.save(2, value=3.5)
    proxy.inject(Rule(method="GET", path="re:^/[^/]+/?$", fault=DENIED))
    proxy.inject(Rule(method="PUT", fault=DENIED))
    proxy.inject(Rule(method="POST", fault=DENIED))
    proxy.inject(Rule(method="DELETE", fault=DENIED))
    proxy.inject(Rule(path="re:^/[^/]+/.", fault=HideAbsence()))
    assert run.value_of(2) == 3.5
    with pytest.raises(AccessDeniedError, match=r"(?i)list"):
        run.latest()
    with pytest.raises(AccessDeniedError):  # and never "not found": the store does not say so
        run.value_of(7)


def test_br_57_every_listing_ends_its_prefix_with_a_slash(run: Run, proxy: FaultProxy) -> None:
    run.save(1, 2)
    run.value_of(run.latest() or "")
    keep_last_n_checkpoints(run.url, 1, **run.access)
    keep_checkpoint_copy(run.path(2), **run.access)
    listings = [request.query for request in proxy.requests if request.is_listing]
    assert len(listings) >= 5
    marks = ("%2F&", "/&")
    assert [query for query in listings if not any(mark in _prefix_in(query) for mark in marks)] == []


def _prefix_in(query: str) -> str:
    return next(part for part in query.split("&") if part.startswith("prefix=")) + "&"


# --- listings -----------------------------------------------------------------------------------------------


def test_br_59_on_s3_what_another_process_committed_is_seen_by_the_same_instance(run: Run) -> None:
    watcher = CheckpointDirectory(run.url, **run.access)
    store = run.store()
    assert watcher.latest() is None
    assert store.list() == []
    run.save(7)
    latest = watcher.latest()
    assert latest is not None
    assert latest.step == 7
    assert len(store.list()) == len(run.keys()) > 0


def test_br_61_folder_markers_in_a_bucket_are_ignored(run: Run, bucket: str, ministack: LocalServer) -> None:
    client = ministack.client()
    markers = ["team/", "team/run/", "team/run/10/", "team/run/20/", "team/run//", "/"]
    for marker in markers:
        client.put_object(Bucket=bucket, Key=marker, Body=b"")
    assert run.latest() is None
    run.save(10, value=4.5)
    assert (run.latest(), run.names()) == ("10", ["10"])
    assert run.value_of(10) == 4.5
    with CheckpointDirectory(run.url, **run.access) as directory:
        directory.delete(10)
    assert (run.latest(), run.names()) == (None, [])
    run.save(10, value=5.5)
    assert run.value_of(10) == 5.5


# --- keys and paths -----------------------------------------------------------------------------------------

ODD = ["two words", "a+b#c%d?e=f,g(h)", "L\u00e4ufe \u6a21\u578b", "a%20b", "100%", "&<'\">"]


@pytest.mark.parametrize("part", ODD)
def test_br_62_all_operations_touch_the_same_keys_whatever_characters_a_prefix_has(
    bucket: str, access: dict[str, Any], ministack: LocalServer, part: str
) -> None:
    run = Run(f"s3://{bucket}/{part}/run", access)
    run.save(1, value=1.5)
    assert (run.latest(), run.value_of(1)) == ("1", 1.5)
    assert keep_checkpoint_copy(run.path(1), **access).name == "1_keep"
    run.save(2)
    keep_last_n_checkpoints(run.url, 1, **access)
    assert run.value_of("1_keep") == 1.5
    with CheckpointDirectory(run.url, **access) as directory:
        assert [info.name for info in directory.list()] == ["2", "1_keep"]
        for name in ("1_keep", "2"):
            directory.delete(name)
    keys = [found["Key"] for found in ministack.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert all(key.startswith(f"{part}/run/") and "/manifest." in key for key in keys), keys


@pytest.mark.parametrize("wrap", [str, Path, lambda url: _OwnPath(url)], ids=["str", "Path", "PathLike"])
def test_br_63_a_url_that_went_through_pathlib_reaches_the_bucket_and_no_local_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Callable[[str], Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(wrap(run.path(1)), iteration=1, model=model_of(2.5), **run.access)
    found = find_latest_checkpoint(wrap(run.url), **run.access)
    assert found is not None
    model = model_of(0.0)
    assert load_checkpoint(wrap(str(found)), model=model, **run.access) == 1
    assert torch.equal(model.weight, model_of(2.5).weight)
    assert run.names() == ["1"]
    assert list(tmp_path.iterdir()) == []


class _OwnPath:
    """A path-like object of somebody else's."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return self._path
