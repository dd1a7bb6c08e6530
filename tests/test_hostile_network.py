"""The promises behind a network that fails, lies and alters: each fault, each operation, both ways to S3.

The faults are those of the fault proxy (``docs/fault-proxy.md``), in front of a real S3 server.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import BEFORE, BRIEF, OPERATIONS, PATIENT, Operation, Run, keep_one, payload_of, start_run
from protocol import expected_keys, keys_of, load, manifests_of, save
from torch import nn

from remote_ckpt import load_checkpoint, save_checkpoint
from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.discover import find_latest
from remote_ckpt.errors import (
    AccessDeniedError,
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CommitUnknownError,
    IntegrityError,
    RemoteCkptError,
    SaveFailedError,
    StorageFullError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from remote_ckpt.newest import read_newest
from remote_ckpt.options import MiB, Options, RetryOptions
from remote_ckpt.probe import probe_create_only
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.testing.proxy import (
    Cut,
    DelayAnswer,
    DelayRequest,
    FailKeys,
    Fault,
    FaultProxy,
    FlipByte,
    IgnoreRange,
    LoseAnswer,
    Reply,
    Reset,
    Rule,
    Shorten,
    ShortListing,
    Stall,
    Surround,
    WrongRange,
    ZeroBytes,
)
from remote_ckpt.testing.s3_contract import FreshRoot
from remote_ckpt.testing.servers import LocalServer

SLOW_DOWN = Reply(503, code="SlowDown")
COMMIT = "if-none-match"
"""Only a manifest is created on a condition: this header marks the commit."""


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[str]]:
    """What the tests of this module met, printed in the end."""
    counts: Counter[str] = Counter()
    yield counts
    requests = counts.pop("requests")
    print(f"\n{counts.total()} faults in {requests} requests:", dict(counts.most_common()))


@pytest.fixture(scope="module")
def running_proxy(ministack: LocalServer) -> Iterator[FaultProxy]:
    with FaultProxy(ministack.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: FaultProxy, tally: Counter[str]) -> Iterator[FaultProxy]:
    running_proxy.clear()
    running_proxy.forget()
    yield running_proxy
    tally["requests"] += len(running_proxy.requests)
    tally.update(fault for request in running_proxy.requests for fault in request.faults)


@pytest.fixture(scope="module")
def url(ministack: LocalServer, fresh_bucket: FreshRoot) -> str:
    return f"s3://{fresh_bucket(ministack)}/runs"


Opener = Callable[..., Store]


@pytest.fixture(scope="module")
def opened(ministack: LocalServer, running_proxy: FaultProxy, url: str) -> Opener:
    """Opens the way through the proxy; once for each kind, as an s3fs costs more than a test."""
    known: dict[tuple[str | None, Options], Store] = {}

    def open_hostile(transport: str | None, options: Options = PATIENT) -> Store:
        if (transport, options) not in known:
            given = {**ministack.storage_options(), "endpoint_url": running_proxy.endpoint_url}
            store = open_store(url, storage_options=given, transport=transport, options=options)
            probe_create_only(store)  # once for a bucket: no part of what is tested here
            known[transport, options] = store
        return known[transport, options]

    return open_hostile


@pytest.fixture(scope="module")
def clean(ministack: LocalServer, url: str) -> Store:
    return open_store(url, storage_options=ministack.storage_options())


@pytest.fixture(params=[None, "fsspec"], ids=["obstore", "s3fs"])
def transport(request: pytest.FixtureRequest) -> str | None:
    found: str | None = request.param
    return found


@pytest.fixture
def run(opened: Opener, clean: Store, transport: str | None) -> Run:
    """A run with two checkpoints, through each transport."""
    return start_run(opened(transport), clean)


@pytest.fixture
def native(opened: Opener, clean: Store) -> Run:
    """A run through obstore only, where the transport makes no difference or would take too long."""
    return start_run(opened(None), clean)


def saves_again(run: Run) -> bool:
    """Whether the next save works."""
    save(run.hostile, b"next", name="9", options=PATIENT)
    return payload_of(run.clean, "9") == b"next"


# --- every fault at every request ---------------------------------------------------------------------------

PASSING: dict[str, Fault] = {
    "SlowDown": SLOW_DOWN,
    "lost": LoseAnswer(),
    "cut": Cut(),
    "reset": Reset(),
    "500 after it was done": Reply(500, code="InternalError", is_after=True),
    "429": Reply(429, code="TooManyRequests"),
}
TRIED_WITH_S3FS = ("SlowDown", "lost", "cut")


@pytest.mark.parametrize("what", OPERATIONS)
@pytest.mark.parametrize(
    ("kind", "transport"),
    [(kind, None) for kind in PASSING] + [(kind, "fsspec") for kind in TRIED_WITH_S3FS],
    ids=str,
    indirect=["transport"],
)
def test_every_request_may_fail_once(run: Run, proxy: FaultProxy, what: str, kind: str) -> None:
    operation = OPERATIONS[what]
    with proxy.inject(Rule(first=1, per_target=True, fault=PASSING[kind])) as fault:
        assert operation.act(run.hostile, PATIENT) == operation.expected
    assert fault.fired >= 3
    assert run.payloads() == operation.after
    if operation.changes:
        assert saves_again(run)


LASTING: dict[str, Fault] = {
    "AccessDenied": Reply(403, code="AccessDenied"),
    "InternalError": Reply(500, code="InternalError"),
}


@pytest.mark.parametrize("what", OPERATIONS)
@pytest.mark.parametrize("kind", LASTING)
def test_what_fails_for_good_is_told_and_tears_nothing(
    opened: Opener, clean: Store, proxy: FaultProxy, what: str, kind: str
) -> None:
    operation, hostile = OPERATIONS[what], opened(None, BRIEF)
    for asked in _requests_of(operation, proxy, start_run(hostile, clean)):
        run = start_run(hostile, clean)
        proxy.forget()
        with proxy.inject(Rule(operation=asked, fault=LASTING[kind])) as fault:
            outcome = _outcome(operation, run)
        assert fault.fired >= 1
        assert len(proxy.requests) < 100
        assert isinstance(outcome, RemoteCkptError) or outcome in (operation.expected, ())
        assert not isinstance(outcome, CheckpointNotFoundError)  # an error is no absence
        for name, payload in run.payloads().items():
            assert payload in (BEFORE.get(name), operation.after.get(name))
        if not operation.changes:
            continue
        assert run.payloads().keys() >= BEFORE.keys() & operation.after.keys()
        # Whoever comes after the fault is repaired finishes it.
        with suppress(CheckpointExistsError, CheckpointNotFoundError):
            operation.act(run.hostile, PATIENT)
        assert run.payloads() == operation.after


def _requests_of(operation: Operation, proxy: FaultProxy, run: Run) -> list[str]:
    proxy.forget()
    operation.act(run.hostile, PATIENT)
    return sorted({request.operation for request in proxy.requests})


def _outcome(operation: Operation, run: Run) -> object:
    try:
        return operation.act(run.hostile, BRIEF)
    except RemoteCkptError as error:
        return error


# --- the commit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        LoseAnswer(),
        Reply(412, code="PreconditionFailed", is_after=True),
        Reply(409, code="ConditionalRequestConflict", is_after=True),
        Reply(304, is_after=True),
        Reply(404, code="NoSuchKey", is_after=True),
        Reply(503, code="SlowDown", is_after=True),
    ],
    ids=lambda fault: f"{getattr(fault, 'status', 'lost')}",
)
@pytest.mark.parametrize("what", ["create", "replace", "delete", "copy"])
def test_h01_a_commit_whose_answer_is_lost_or_wrong_is_known_as_our_own(
    native: Run, proxy: FaultProxy, fault: Fault, what: str
) -> None:
    operation = OPERATIONS[what]
    with proxy.inject(Rule(header=COMMIT, path="*/manifest.*", nth=1, fault=fault)) as lost:
        assert operation.act(native.hostile, PATIENT) == operation.expected
    assert lost.fired == 1
    assert native.payloads() == operation.after
    names = {"create": ("3", 1), "replace": ("2", 2), "delete": ("1", 2), "copy": ("2_keep", 1)}
    name, generation = names[what]
    assert manifests_of(native.clean, name)[-1] == f"manifest.{generation:06}.json"


@pytest.mark.parametrize("status", [409, 412, 304])
def test_h03_a_conflict_with_nothing_is_tried_again(run: Run, proxy: FaultProxy, status: int) -> None:
    code = None if status == 304 else "ConditionalRequestConflict"
    with proxy.inject(Rule(header=COMMIT, first=2, fault=Reply(status, code=code))) as conflict:
        manifest = save(run.hostile, b"new", name="3", options=PATIENT)
    assert conflict.fired == 2
    assert run.payloads() == {**BEFORE, "3": b"new"}
    assert keys_of(run.clean, "3") == expected_keys(manifest)


def test_h06_a_commit_that_never_arrives_is_unknown_and_nothing_is_cleaned_up(
    run: Run, proxy: FaultProxy
) -> None:
    with proxy.inject(Rule(header=COMMIT, fault=Reset())), pytest.raises(CommitUnknownError):
        save(run.hostile, b"new", name="3", options=BRIEF)
    assert run.payloads() == BEFORE
    uploaded = [request.path for request in proxy.requests if request.operation == "PutObject"]
    data = {path.partition("/3/")[2] for path in uploaded if "manifest" not in path}
    assert keys_of(run.clean, "3") == data
    assert len(data) == 4
    assert saves_again(run)


def test_h07_a_commit_that_lands_after_we_gave_up_is_a_whole_checkpoint(
    opened: Opener, clean: Store, proxy: FaultProxy
) -> None:
    hurried = _hurried(BRIEF)
    run = start_run(opened(None, hurried), clean)
    release = threading.Event()
    with proxy.inject(Rule(header=COMMIT, fault=DelayRequest(until=release))):
        with pytest.raises(CommitUnknownError):
            save(run.hostile, b"new", name="3", options=_one_try(hurried))
        assert run.payloads() == BEFORE
        release.set()
        proxy.settle()
    assert run.payloads() == {**BEFORE, "3": b"new"}
    assert manifests_of(run.clean, "3") == ["manifest.000001.json"]


def test_a_commit_that_the_store_refuses_for_good_is_taken_back(run: Run, proxy: FaultProxy) -> None:
    with (
        proxy.inject(Rule(header=COMMIT, fault=Reply(507, code="XMinioStorageFull"))),
        pytest.raises(SaveFailedError, match="507 XMinioStorageFull") as caught,
    ):
        save(run.hostile, b"new", name="2", overwrite=True, options=PATIENT)
    assert isinstance(caught.value.__cause__, StorageFullError)
    assert run.payloads() == BEFORE
    assert manifests_of(run.clean, "2") == ["manifest.000001.json"]
    assert len(keys_of(run.clean, "2")) == 5
    assert saves_again(run)


def _hurried(options: Options) -> Options:
    """The same with a short time for each request."""
    return replace(options, retry=replace(options.retry, request_seconds=1.0))


def _one_try(options: Options) -> Options:
    """The same, but a commit that is undecided stays so."""
    return replace(options, commit=replace(options.commit, commit_seconds=0.01))


# --- listings and absence -----------------------------------------------------------------------------------

FAILING: dict[str, tuple[Fault, type[StoreError]]] = {
    "SlowDown": (SLOW_DOWN, StoreUnavailableError),
    "AccessDenied": (Reply(403, code="AccessDenied"), AccessDeniedError),
    "closed socket": (Reset(), StoreUnavailableError),
}


@pytest.mark.parametrize("kind", FAILING)
def test_br18_a_failing_store_is_an_error_and_never_no_checkpoint(
    run: Run, proxy: FaultProxy, kind: str
) -> None:
    fault, expected = FAILING[kind]
    is_passing = expected is StoreUnavailableError
    for ask in (find_latest, lambda root: load(root, "2")):
        with proxy.inject(Rule(fault=fault)), pytest.raises(expected):
            ask(run.hostile)
        if is_passing:
            with proxy.inject(Rule(first=3, fault=fault)) as few:
                assert ask(run.hostile) is not None
            assert few.fired == 3


@pytest.mark.parametrize("what", OPERATIONS)
@pytest.mark.parametrize("count", [0, 1])
def test_a_page_that_ends_in_nothing_fails_whatever_needed_it(
    native: Run, proxy: FaultProxy, what: str, count: int
) -> None:
    with (
        proxy.inject(Rule(operation="ListObjectsV2", fault=ShortListing(count, is_truncated=True))),
        pytest.raises(StoreUnavailableError, match="no listing"),
    ):
        OPERATIONS[what].act(native.hostile, BRIEF)
    assert native.payloads() == BEFORE
    assert not [request for request in proxy.requests if request.operation == "DeleteObjects"]


HIDING: dict[str, ShortListing] = {
    "everything": ShortListing(keep_count=0),
    "all but one": ShortListing(keep_count=1),
    "the newest step": ShortListing(drop="*/2/*"),
    "all manifests": ShortListing(drop="*/manifest.*"),
    "all data": ShortListing(drop="*.distcp"),
}


@pytest.mark.parametrize("hidden", HIDING)
@pytest.mark.parametrize("what", ["create", "replace", "keep last", "copy"])
def test_a_listing_that_hides_something_deletes_nothing_that_is_needed(
    native: Run, proxy: FaultProxy, hidden: str, what: str
) -> None:
    with proxy.inject(Rule(operation="ListObjectsV2", fault=HIDING[hidden])):
        _outcome(OPERATIONS[what], native)
    found = native.payloads()
    assert found["2"] in (b"two", OPERATIONS[what].after["2"])
    if what != "keep last":
        assert found["1"] == b"one"
    assert saves_again(native)


@pytest.mark.parametrize("hidden", ["everything", "the newest step", "all manifests"])
def test_a_listing_that_hides_a_checkpoint_lets_nobody_overwrite_it(
    run: Run, proxy: FaultProxy, hidden: str
) -> None:
    with (
        proxy.inject(Rule(operation="ListObjectsV2", fault=HIDING[hidden])),
        pytest.raises((CheckpointExistsError, SaveFailedError, CommitUnknownError)),
    ):
        save(run.hostile, b"new", name="2", options=BRIEF)
    assert run.payloads() == BEFORE
    assert manifests_of(run.clean, "2") == ["manifest.000001.json"]


def test_a_short_listing_that_calls_itself_whole_cannot_be_told_from_a_short_run(
    native: Run, proxy: FaultProxy
) -> None:
    """What no client can find out: S3 promises complete listings, and nothing in this answer is wrong."""
    with proxy.inject(Rule(operation="ListObjectsV2", fault=HIDING["everything"])):
        assert find_latest(native.hostile) is None
    with proxy.inject(Rule(operation="ListObjectsV2", fault=ShortListing(drop="*/2/"))):
        found = find_latest(native.hostile)
    assert found is not None
    assert found.name == "1"


# --- deleting and copying -----------------------------------------------------------------------------------


def test_br27_a_key_that_is_not_deleted_is_reported_and_the_next_deletion_takes_it(
    run: Run, proxy: FaultProxy
) -> None:
    with (
        proxy.inject(Rule(operation="DeleteObjects", fault=FailKeys("*/1.distcp"))) as refusing,
        pytest.raises(StoreError, match=r"1 of its objects could not be removed.*1\.distcp.*AccessDenied"),
    ):
        delete_checkpoint(run.hostile.scope("1"), options=PATIENT)
    assert refusing.fired >= 1
    assert run.payloads() == {"2": b"two"}
    left = keys_of(run.clean, "1")
    assert [key.rpartition("/")[2] for key in left] == ["1.distcp"]
    delete_checkpoint(run.hostile.scope("1"), options=PATIENT)
    assert keys_of(run.clean, "1") == set()


def test_br27_retention_reports_the_keys_that_stay(run: Run, proxy: FaultProxy) -> None:
    with proxy.inject(Rule(operation="DeleteObjects", fault=FailKeys("*/index.*"))):
        report = keep_one(run.hostile)
    (failure,) = report.failures
    assert failure.name == "1"
    assert "index." in str(failure.error)
    assert "AccessDenied" in str(failure.error)
    assert (report.deleted, run.payloads()) == ((), {"2": b"two"})


def test_br27_a_transient_error_of_a_single_key_is_tried_again(run: Run, proxy: FaultProxy) -> None:
    with proxy.inject(
        Rule(operation="DeleteObjects", first=2, fault=FailKeys("*.distcp", "InternalError"))
    ) as failing:
        assert keep_one(run.hostile).deleted == ("1",)
    assert failing.fired == 2
    assert keys_of(run.clean, "1") == set()


@pytest.mark.parametrize("code", ["InternalError", "SlowDown", "AccessDenied"])
def test_br55_a_copy_that_is_answered_200_with_an_error_has_failed(
    run: Run, proxy: FaultProxy, code: str
) -> None:
    with (
        proxy.inject(Rule(operation="CopyObject", fault=Reply(200, code=code))) as failing,
        pytest.raises(StoreError, match=f"{code}|reported a copy that it did not make"),
    ):
        OPERATIONS["copy"].act(run.hostile, BRIEF)
    assert failing.fired >= 1
    assert run.payloads() == BEFORE
    assert OPERATIONS["copy"].act(run.hostile, PATIENT) == "2_keep"
    assert run.payloads() == {**BEFORE, "2_keep": b"two"}


# --- large objects ------------------------------------------------------------------------------------------

LARGE = bytes(range(256)) * (12 * MiB // 256)


def stream(store: Store, key: str = "large") -> None:
    parts = [LARGE[start : start + MiB] for start in range(0, len(LARGE), MiB)]
    store.write_stream(key, lambda: iter(parts), size_bytes=len(LARGE), part_bytes=5 * MiB, concurrency=3)


@pytest.mark.parametrize(
    "fault",
    [
        Reply(200, code="InternalError"),
        Reply(200, code="InternalError", is_after=True),
        LoseAnswer(),
        Reply(404, code="NoSuchUpload", is_after=True),
    ],
    ids=["200 error", "200 error after", "lost", "NoSuchUpload after"],
)
def test_h08_an_upload_whose_completion_failed_or_was_lost_is_made_whole(
    run: Run, proxy: FaultProxy, fault: Fault
) -> None:
    with proxy.inject(Rule(operation="CompleteMultipartUpload", nth=1, fault=fault)) as failing:
        stream(run.hostile)
    assert failing.fired == 1
    assert run.clean.read("large") == LARGE


def test_an_upload_that_is_never_completed_leaves_no_object(run: Run, proxy: FaultProxy) -> None:
    with (
        proxy.inject(Rule(operation="CompleteMultipartUpload", fault=Reply(200, code="AccessDenied"))),
        pytest.raises(StoreError, match=r"AccessDenied|invalid multipart response"),
    ):
        stream(run.hostile)
    assert [info.key for info in run.clean.list() if info.key == "large"] == []
    proxy.settle()
    assert proxy.requests[-1].operation == "AbortMultipartUpload"


def test_br42_a_part_that_the_store_never_got_fails_the_upload(run: Run, proxy: FaultProxy) -> None:
    answered = Reply(200, headers={"etag": '"d41d8cd98f00b204e9800998ecf8427e"'})
    with (
        proxy.inject(Rule(operation="UploadPart", query="*partNumber=2*", fault=answered)),
        pytest.raises(StoreError, match="large"),
    ):
        stream(run.hostile)
    assert [info.key for info in run.clean.list() if info.key == "large"] == []


def test_br41_a_body_that_breaks_off_is_read_again(run: Run, proxy: FaultProxy) -> None:
    run.clean.write("large", LARGE)
    for fault in (Cut(keep_bytes=3 * MiB), Cut(keep_bytes=MiB, is_reset=True)):
        with proxy.inject(Rule(operation="GetObject", first=2, per_target=True, fault=fault)) as cut:
            assert run.hostile.read("large") == LARGE
            found = bytes(run.hostile.read_range("large", MiB, 4 * MiB))
        assert found == LARGE[MiB : 5 * MiB]
        assert cut.fired == 2


def test_br36_a_stalled_read_is_tried_again_before_the_deadline(
    opened: Opener, clean: Store, proxy: FaultProxy, transport: str | None
) -> None:
    run = start_run(opened(transport, _hurried(PATIENT)), clean)
    run.clean.write("large", LARGE)
    with proxy.inject(Rule(operation="GetObject", nth=1, fault=Stall())):
        assert run.hostile.read("large") == LARGE
    with proxy.inject(Rule(operation="GetObject", nth=1, fault=DelayAnswer())):
        assert bytes(run.hostile.read_range("large", 5, 7)) == LARGE[5:12]


def test_br36_an_upload_that_never_ends_is_an_error_that_names_the_object(
    opened: Opener, clean: Store, proxy: FaultProxy, transport: str | None
) -> None:
    short = Options(retry=RetryOptions(max_attempts=2, initial_seconds=0.0, total_seconds=0.6))
    run = start_run(opened(transport, short), clean)
    for fault in (Stall("request", keep_bytes=100_000), DelayAnswer()):
        with proxy.inject(Rule(method="PUT", fault=fault)), pytest.raises(StoreTimeoutError, match="large"):
            run.hostile.write("large", LARGE[:MiB])


# --- bytes that are not what they were ----------------------------------------------------------------------

WEIGHT = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)


@dataclass(frozen=True)
class Training:
    """Where a model is saved, through the proxy."""

    url: str
    given: dict[str, Any] = field(repr=False)

    def save(self, name: str) -> None:
        model = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            model.weight.copy_(WEIGHT)
        save_checkpoint(f"{self.url}/{name}", iteration=5, model=model, **self.given)

    def load(self, name: str) -> torch.Tensor:
        model = nn.Linear(64, 64, bias=False)
        assert load_checkpoint(f"{self.url}/{name}", model=model, **self.given) == 5
        return model.weight.detach()


@pytest.fixture
def training(
    running_proxy: FaultProxy, ministack: LocalServer, url: str, transport: str | None, trained: set[str]
) -> Training:
    """A run with the sound checkpoint 5, which is saved once."""
    options = {**ministack.storage_options(), "endpoint_url": running_proxy.endpoint_url}
    given = {"storage_options": options, "transport": transport, "options": PATIENT}
    training = Training(f"{url}/trained-by-{transport}", given)
    if training.url not in trained:
        training.save("5")
        trained.add(training.url)
    return training


@pytest.fixture(scope="module")
def trained() -> set[str]:
    """The URLs of the runs that were saved."""
    return set()


ALTERING: dict[str, Fault] = {
    "a flipped bit": FlipByte(),
    "the last bit": FlipByte(offset_bytes=-1),
    "zeros": ZeroBytes(offset_bytes=100, length_bytes=1000),
    "another place": WrongRange(shift_bytes=64),
    "another place, told": WrongRange(shift_bytes=64, is_labelled=True),
    "the whole object": IgnoreRange(),
    "a byte less": Shorten(),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("kind", "transport"),
    [(kind, None) for kind in ALTERING] + [("a flipped bit", "fsspec"), ("another place", "fsspec")],
    ids=str,
    indirect=["transport"],
)
def test_br42_data_that_is_altered_on_its_way_is_never_loaded(
    training: Training, proxy: FaultProxy, kind: str
) -> None:
    with (
        proxy.inject(Rule(operation="GetObject", path="*.distcp", fault=ALTERING[kind])) as altering,
        pytest.raises(RemoteCkptError, match=r"\.distcp"),
    ):
        training.load("5")
    assert altering.fired >= 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("fault", [FlipByte(), Shorten(missing_bytes=9)], ids=["flipped", "cut"])
@pytest.mark.parametrize("name", ["index.", "manifest."])
def test_an_index_or_manifest_that_is_altered_on_its_way_is_named(
    training: Training, proxy: FaultProxy, name: str, fault: Fault
) -> None:
    with (
        proxy.inject(Rule(operation="GetObject", path=f"*/{name}*", fault=fault)),
        pytest.raises((IntegrityError, CheckpointDamagedError), match=name),
    ):
        training.load("5")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_was_altered_on_its_way_only_is_loaded_the_next_time(
    training: Training, proxy: FaultProxy
) -> None:
    with proxy.inject(Rule(fault=FlipByte())), pytest.raises(RemoteCkptError):
        training.load("5")
    assert torch.equal(training.load("5"), WEIGHT)


@pytest.mark.parametrize(
    "fault",
    [
        Shorten("request"),
        Surround("request", head=b"1d\r\n", tail=b"\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"),
    ],
    ids=["br42 cut", "br50 framed"],
)
@pytest.mark.parametrize("path", ["*.distcp", "*/index.*"])
def test_an_upload_of_another_size_is_caught_at_the_commit(
    run: Run, proxy: FaultProxy, fault: Fault, path: str
) -> None:
    with (
        proxy.inject(Rule(operation="PutObject", path=path, nth=1, fault=fault)),
        pytest.raises(SaveFailedError, match=r"(distcp|index\S+) has \d+ bytes instead of"),
    ):
        save(run.hostile, b"new", name="2", overwrite=True, options=PATIENT)
    assert run.payloads() == BEFORE
    assert saves_again(run)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_br42_a_bit_that_flips_on_its_way_up_is_found_by_the_load(
    training: Training, proxy: FaultProxy
) -> None:
    with proxy.inject(Rule(operation="PutObject", path="*.distcp", fault=FlipByte("request"))) as flip:
        training.save("6")
    assert flip.fired == 1
    with pytest.raises(IntegrityError, match=r"\.distcp"):
        training.load("6")


def test_a_bit_that_flips_while_a_manifest_is_read_loses_neither_pin_nor_checkpoint(
    run: Run, proxy: FaultProxy
) -> None:
    set_pinned(run.hostile.scope("1"), True)
    flips = Rule(operation="GetObject", path="*/manifest.*", first=1, per_target=True, fault=FlipByte())
    with proxy.inject(flips) as fault:
        with pytest.raises(CheckpointPinnedError):
            delete_checkpoint(run.hostile.scope("1"), options=PATIENT)
        latest = find_latest(run.hostile)
    assert latest is not None
    assert (latest.name, fault.fired) == ("2", 2)
    assert run.payloads() == BEFORE


@pytest.mark.parametrize("what", ["create", "replace", "delete", "keep last", "copy"])
@pytest.mark.parametrize("offset_bytes", [None, 12, -1])
def test_a_bit_that_flips_in_what_commits_is_found_before_anything_is_deleted(
    run: Run, proxy: FaultProxy, what: str, offset_bytes: int | None
) -> None:
    operation = OPERATIONS[what]
    flip = FlipByte("request") if offset_bytes is None else FlipByte("request", offset_bytes=offset_bytes)
    with proxy.inject(Rule(header="if-none-match", nth=1, fault=flip)) as fault:
        assert operation.act(run.hostile, PATIENT) == operation.expected
    assert fault.fired == 1
    assert run.payloads() == operation.after
    assert saves_again(run)


@pytest.mark.parametrize("what", ["create", "replace", "delete", "keep last", "copy"])
@pytest.mark.parametrize(
    "lost", [LoseAnswer(), Reply(503, code="SlowDown", is_after=True), Reply(412, is_after=True)], ids=str
)
@pytest.mark.parametrize("altered", [FlipByte("request"), Shorten("request")], ids=["flipped", "cut"])
def test_what_commits_is_stored_damaged_and_its_answer_is_lost(
    run: Run, proxy: FaultProxy, what: str, lost: Fault, altered: Fault
) -> None:
    operation = OPERATIONS[what]
    rules = [
        Rule(header="if-none-match", path="*/manifest.*", nth=1, fault=fault) for fault in (lost, altered)
    ]
    with proxy.inject(rules[0]) as first, proxy.inject(rules[1]) as second:
        assert operation.act(run.hostile, PATIENT) == operation.expected
    assert (first.fired, second.fired) == (1, 1)
    assert run.payloads() == operation.after
    assert saves_again(run)


@pytest.mark.parametrize(
    "act", [lambda one: set_pinned(one, True), lambda one: annotate(one, metrics={"a": 1.0})]
)
def test_a_pin_or_note_is_stored_damaged_and_its_answer_is_lost(
    run: Run, proxy: FaultProxy, act: Callable[[Store], object]
) -> None:
    lost = Rule(header="if-none-match", nth=1, fault=LoseAnswer())
    flipped = Rule(header="if-none-match", nth=1, fault=FlipByte("request"))
    with proxy.inject(lost), proxy.inject(flipped) as fault:
        act(run.hostile.scope("1"))
    assert fault.fired == 1
    assert run.payloads() == BEFORE


def test_a_manifest_that_may_not_be_read_back_is_told_with_the_reason(run: Run, proxy: FaultProxy) -> None:
    refused = Rule(operation="GetObject", path="*/3/manifest.*", fault=Reply(403, code="AccessDenied"))
    with proxy.inject(refused), pytest.raises(CommitUnknownError, match=r"took the manifest.*AccessDenied"):
        save(run.hostile, b"new", name="3", options=PATIENT)
    assert run.payloads() == {**BEFORE, "3": b"new"}


def test_a_bit_that_flips_in_a_pin_or_a_note_leaves_the_checkpoint_whole(run: Run, proxy: FaultProxy) -> None:
    flips = Rule(header="if-none-match", nth=1, fault=FlipByte("request"))
    with proxy.inject(flips) as fault:
        assert set_pinned(run.hostile.scope("1"), True).pinned
    with proxy.inject(flips) as second:
        assert annotate(run.hostile.scope("1"), metrics={"loss": 0.5}).metrics == {"loss": 0.5}
    assert (fault.fired, second.fired) == (1, 1)
    assert run.payloads() == BEFORE
    newest = read_newest(run.clean.scope("1"))
    assert newest is not None
    assert (newest.generation, newest.manifest.pinned, newest.manifest.metrics) == (5, True, {"loss": 0.5})


@pytest.mark.parametrize("what", ["create", "replace", "delete", "copy"])
def test_where_all_that_commits_is_stored_damaged_nothing_is_deleted_and_few_are_tried(
    run: Run, proxy: FaultProxy, what: str
) -> None:
    before = {info.key for info in run.clean.list()}
    rule = Rule(header="if-none-match", path="*/manifest.*", fault=FlipByte("request"))
    with proxy.inject(rule) as fault, pytest.raises(CommitUnknownError, match="other bytes than it was sent"):
        OPERATIONS[what].act(run.hostile, BRIEF)
    assert fault.fired == 4
    assert before <= {info.key for info in run.clean.list()}
    # What stood there is hidden now, but whole: the operator's order brings it back.
    assert save(run.hostile, b"new", name="2", overwrite=True, options=PATIENT).name == "2"


def test_br50_a_store_that_refuses_checksum_headers_is_served_without(run: Run, proxy: FaultProxy) -> None:
    refusing = Reply(400, code="InvalidRequest")
    headers = [f"x-amz-checksum-{name}" for name in ("crc32", "crc32c", "crc64nvme", "sha256")]
    for name in (*headers, "x-amz-trailer"):
        proxy.inject(Rule(header=name, fault=refusing))
    stream(run.hostile)
    assert OPERATIONS["replace"].act(run.hostile, PATIENT) == "2"
    assert OPERATIONS["copy"].act(run.hostile, PATIENT) == "2_keep"
    assert keep_one(run.hostile).deleted == ("1",)
    refused = {request.operation for request in proxy.requests if request.status == 400}
    assert refused == {"DeleteObjects"}  # where a checksum is a must: the keys go one by one
    assert keys_of(run.clean, "1") == set()


# --- throttling and credentials -----------------------------------------------------------------------------


def test_br48_throttled_savers_all_succeed_with_a_bounded_number_of_requests(
    opened: Opener, clean: Store, proxy: FaultProxy
) -> None:
    options = replace(PATIENT, retry=replace(PATIENT.retry, max_attempts=8))
    run = start_run(opened(None, options), clean)
    names = [str(number) for number in range(10, 18)]
    with (
        proxy.inject(Rule(first=5, per_target=True, fault=SLOW_DOWN)) as throttled,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(lambda name: save(run.hostile, b"new", name=name, options=options), names))
    assert run.payloads() == {**BEFORE, **dict.fromkeys(names, b"new")}
    passed = len(proxy.requests) - throttled.fired
    assert throttled.fired <= 5 * passed


@pytest.mark.parametrize("what", OPERATIONS)
def test_br49_an_expired_token_is_told_at_once_and_not_asked_for_again_and_again(
    native: Run, proxy: FaultProxy, what: str
) -> None:
    with (
        proxy.inject(Rule(fault=Reply(400, code="ExpiredToken"))),
        pytest.raises(AccessDeniedError) as caught,
    ):
        OPERATIONS[what].act(native.hostile, PATIENT)
    assert "log in again" in str(caught.value)
    assert len(proxy.requests) <= 3
    assert native.payloads() == BEFORE


@pytest.mark.parametrize("what", ["create", "replace", "delete", "keep last", "copy"])
def test_br49_a_token_that_expires_on_the_way_loses_nothing(run: Run, proxy: FaultProxy, what: str) -> None:
    operation = OPERATIONS[what]
    with proxy.inject(Rule(after=4, fault=Reply(400, code="ExpiredToken"))) as expired:
        outcome = _outcome(operation, run)
    assert expired.fired < 50
    assert isinstance(outcome, RemoteCkptError) or outcome == ()
    assert run.payloads() in (BEFORE, operation.after)
    with suppress(CheckpointExistsError, CheckpointNotFoundError):
        operation.act(run.hostile, PATIENT)
    assert run.payloads() == operation.after


OLD = "ASIAOLDOLDOLDOLDOLD1"
NEW = "ASIANEWNEWNEWNEWNEW1"


def write_profile(path: Path, key: str) -> None:
    """Write keys as a login does that runs beside a job."""
    path.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=t\n")


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a session finds its keys: at first the old ones."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    write_profile(tmp_path / "credentials", OLD)
    return tmp_path / "credentials"


@pytest.fixture
def signed_by_profile(
    profile: Path, running_proxy: FaultProxy, url: str, clean: Store, transport: str | None
) -> Iterator[Run]:
    given = {"endpoint_url": running_proxy.endpoint_url, "client_kwargs": {"region_name": "us-east-1"}}
    with closing(open_store(url, storage_options=given, transport=transport, options=PATIENT)) as store:
        probe_create_only(store)
        yield start_run(store, clean)


@pytest.mark.parametrize("after", [1, 4, 7])
@pytest.mark.parametrize("what", OPERATIONS)
def test_br49_keys_that_rotate_in_the_middle_are_looked_for_again(
    signed_by_profile: Run, proxy: FaultProxy, profile: Path, what: str, after: int
) -> None:
    run, operation = signed_by_profile, OPERATIONS[what]
    expired = Rule(
        header="authorization", value=f"*{OLD}*", after=after, fault=Reply(400, code="ExpiredToken")
    )
    write_profile(profile, NEW)
    with proxy.inject(expired) as fault:
        assert operation.act(run.hostile, PATIENT) == operation.expected
    assert fault.fired <= 8
    assert run.payloads() == operation.after


def test_br49_keys_that_stay_the_same_are_refused_once(
    signed_by_profile: Run, proxy: FaultProxy, profile: Path
) -> None:
    with (
        proxy.inject(Rule(fault=Reply(400, code="ExpiredToken"))),
        pytest.raises(AccessDeniedError, match="expired"),
    ):
        load(signed_by_profile.hostile, "2")
    assert len(proxy.requests) <= 4  # a refused listing is followed by a look at one key
