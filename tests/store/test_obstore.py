"""S3 through obstore, against servers that differ in what they get wrong."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import obstore
import pytest

from remote_ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ConfigError,
    ForkedProcessError,
    IntegrityError,
    ObjectNotFoundError,
    StorageFullError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from remote_ckpt.options import MiB, RetryOptions
from remote_ckpt.store.base import CreateOnly, Store
from remote_ckpt.store.obstore import ObstoreStore, open_obstore_store
from remote_ckpt.store.obstore_errors import translate
from remote_ckpt.store.retry import RetryStore
from remote_ckpt.testing.s3_contract import (
    FreshRoot,
    S3Contract,
    make_locked_bucket,
    open_upload_keys,
    raw_object,
)
from remote_ckpt.testing.servers import LocalServer, free_ports
from remote_ckpt.url import parse_location


def open_on(server: LocalServer, url: str, **options: Any) -> ObstoreStore:
    storage_options = {**server.storage_options(), **options}
    return open_obstore_store(parse_location(url), storage_options=storage_options)


class TestObstoreOnMiniStack(S3Contract):
    keys_listed: ClassVar[int] = 1_050  # more than one page

    @pytest.fixture
    def store(self, ministack: LocalServer, fresh_root: FreshRoot) -> Store:
        self.server = ministack
        return open_on(ministack, fresh_root(ministack))


class TestObstoreOnMoto(S3Contract):
    @pytest.fixture
    def store(self, moto_server: LocalServer, fresh_root: FreshRoot) -> Store:
        self.server = moto_server
        # moto answers some reads with 500 while an object is replaced: as in use, these are tried again.
        return RetryStore(open_on(moto_server, fresh_root(moto_server)), RetryOptions())


@pytest.mark.server
class TestObstoreOnRealServer(S3Contract):
    race_rounds: ClassVar[int] = 2
    racers: ClassVar[int] = 3  # SeaweedFS tries for its lock once a second: more would take long

    @pytest.fixture
    def store(self, real_server: LocalServer, fresh_root: FreshRoot) -> Store:
        self.server = real_server
        return open_on(real_server, fresh_root(real_server))


class SourceError(Exception):
    """What a failing source of chunks raises."""


def failing_source() -> Iterator[bytes]:
    yield from [bytes(3 * MiB)] * 4
    raise SourceError


def stream(store: Store, source: Callable[[], Iterator[bytes]], size_bytes: int) -> None:
    store.write_stream("k", source, size_bytes=size_bytes, part_bytes=5 * MiB, concurrency=3)


VERBS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("k"),
    "read_range": lambda store: store.read_range("k", 0, 1),
    "read_range_into": lambda store: store.read_range_into("k", 0, memoryview(bytearray(1))),
    "write": lambda store: store.write("k", b"1"),
    "create": lambda store: store.create("k", b"1"),
    "write_stream": lambda store: stream(store, lambda: iter([bytes(6 * MiB)]), 6 * MiB),
    "info": lambda store: store.info("k"),
    "list": lambda store: store.list(),
    "list_children": lambda store: store.list_children(),
    "copy": lambda store: store.copy("k", "l"),
    "list_leftovers": lambda store: store.list_leftovers(),
}


class TestUploads:
    @pytest.fixture(params=["ministack", pytest.param("real_server", marks=pytest.mark.server)])
    def server(self, request: pytest.FixtureRequest) -> LocalServer:
        found: LocalServer = request.getfixturevalue(request.param)
        return found

    def test_a_source_that_fails_leaves_no_open_multipart_upload(
        self, server: LocalServer, fresh_root: FreshRoot
    ) -> None:
        store = open_on(server, fresh_root(server))
        with pytest.raises(SourceError):
            stream(store, failing_source, 20 * MiB)
        assert open_upload_keys(server, store) == []
        assert store.list() == []

    def test_a_large_stream_goes_up_in_equal_parts_of_the_planned_size(
        self, server: LocalServer, fresh_root: FreshRoot
    ) -> None:
        store = open_on(server, fresh_root(server))
        stream(store, lambda: iter([bytes(7 * MiB)] * 3), 21 * MiB)
        etag = server.client().head_object(**raw_object(store, "k"))["ETag"]
        assert etag.strip('"').endswith("-5")  # 4 parts of 5 MiB, one of 1 MiB

    def test_a_stream_no_larger_than_a_part_is_one_request(
        self, server: LocalServer, fresh_root: FreshRoot
    ) -> None:
        store = open_on(server, fresh_root(server))
        stream(store, lambda: iter([bytes(MiB)] * 5), 5 * MiB)
        assert "-" not in server.client().head_object(**raw_object(store, "k"))["ETag"]

    def test_uploads_that_others_left_open_are_found_and_aborted(
        self, server: LocalServer, fresh_root: FreshRoot
    ) -> None:
        store = open_on(server, fresh_root(server))
        target = raw_object(store, "1/t/0.distcp")
        upload_id = server.client().create_multipart_upload(**target)["UploadId"]
        uploads = store.open_uploads()
        (found,) = uploads.list_open(target["Key"])
        assert (found.key, found.upload_id) == (target["Key"], upload_id)
        assert found.started_at.tzinfo is not None
        uploads.abort(found)
        assert uploads.list_open(target["Key"]) == []

    def test_an_object_too_large_for_one_copy_request_is_copied_in_another_way(
        self, server: LocalServer, fresh_root: FreshRoot, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("remote_ckpt.store.obstore.MAX_COPY_BYTES", 5)
        monkeypatch.setattr(obstore, "copy", None)
        store = open_on(server, fresh_root(server))
        store.write("k", b"0123456789")
        store.copy("k", "l")
        assert store.read("l") == b"0123456789"


class TestMissingBucket:
    @pytest.mark.parametrize("verb", VERBS)
    def test_every_verb_names_the_bucket_not_the_object(self, ministack: LocalServer, verb: str) -> None:
        store = open_on(ministack, "s3://no-such-bucket/run")
        with pytest.raises(BucketNotFoundError, match="NoSuchBucket") as caught:
            VERBS[verb](store)
        assert caught.value.url == "s3://no-such-bucket/run"

    def test_deleting_from_a_missing_bucket_does_not_succeed(self, ministack: LocalServer) -> None:
        with pytest.raises(BucketNotFoundError):
            open_on(ministack, "s3://no-such-bucket/run").delete(["k"])


@pytest.mark.server
class TestRefusedCredentials:
    @pytest.mark.parametrize("verb", VERBS)
    @pytest.mark.parametrize("wrong", [{"secret": "s3cretwrong"}, {"key": "nobody", "secret": "s3cretwrong"}])
    def test_every_verb_says_access_denied_and_shows_no_secret(
        self, real_server: LocalServer, fresh_root: FreshRoot, verb: str, wrong: dict[str, str]
    ) -> None:
        store = open_on(real_server, fresh_root(real_server), **wrong)
        with pytest.raises(AccessDeniedError) as caught:
            VERBS[verb](store)
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(store)
        assert "s3cretwrong" not in shown

    def test_a_refused_delete_is_reported_for_each_key(
        self, real_server: LocalServer, fresh_root: FreshRoot
    ) -> None:
        failures = open_on(real_server, fresh_root(real_server), secret="wrong").delete(["a", "b"])
        assert [(failure.key, type(failure.error)) for failure in failures] == [
            ("a", AccessDeniedError),
            ("b", AccessDeniedError),
        ]


class TestHeldObject:
    def test_one_refused_key_of_a_batch_is_reported_and_the_others_are_deleted(
        self, ministack: LocalServer
    ) -> None:
        bucket = make_locked_bucket(ministack, "locked-obstore", held_key="run/held")
        store = open_on(ministack, f"s3://{bucket}/run")
        store.write("free", b"1")
        store.write("last", b"1")
        failures = store.delete(["free", "held", "last", "absent"])
        assert [(failure.key, type(failure.error)) for failure in failures] == [("held", AccessDeniedError)]
        assert [info.key for info in store.list()] == ["held"]


class TestServerThatIgnoresConditions:
    def test_a_second_create_succeeds_so_that_a_probe_can_tell(
        self, rclone: LocalServer, fresh_bucket: Callable[[LocalServer], str]
    ) -> None:
        store = open_on(rclone, f"s3://{fresh_bucket(rclone)}")
        assert store.capabilities.create_only is CreateOnly.PROBE
        store.create("k", b"first")
        store.create("k", b"second")
        assert store.read("k") == b"second"

    def test_a_range_answered_with_the_whole_object_is_refused(
        self, rclone: LocalServer, fresh_bucket: Callable[[LocalServer], str]
    ) -> None:
        store = open_on(rclone, f"s3://{fresh_bucket(rclone)}")
        store.write("k", b"0123456789")
        with pytest.raises(StoreError, match="non-partial"):
            store.read_range("k", 2, 3)


class TestNetwork:
    def test_a_refused_connection_is_unavailable(self) -> None:
        (port,) = free_ports(1)
        store = open_at(f"http://127.0.0.1:{port}")
        for verb in ("read", "create", "list", "info"):
            with pytest.raises(StoreUnavailableError, match="refused"):
                VERBS[verb](store)
        with pytest.raises(StoreUnavailableError, match="refused"):
            store.clock()

    def test_a_silent_server_is_a_timeout(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            store = open_at(
                f"http://127.0.0.1:{silent.getsockname()[1]}", retry=RetryOptions(request_seconds=0.2)
            )
            for verb in ("create", "list", "info"):
                with pytest.raises(StoreTimeoutError):
                    VERBS[verb](store)


def open_at(endpoint: str, retry: RetryOptions | None = None) -> ObstoreStore:
    options = {"key": "k", "secret": "s", "endpoint_url": endpoint}
    return open_obstore_store(parse_location("s3://bucket/run"), storage_options=options, retry=retry)


class TestFork:
    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 says it too
    def test_a_forked_child_is_told_instead_of_hanging(
        self, ministack: LocalServer, fresh_root: FreshRoot
    ) -> None:
        url = fresh_root(ministack)
        store = open_on(ministack, url)
        store.write("k", b"1")
        uses: list[Callable[[], object]] = [lambda: store.read("k"), lambda: open_on(ministack, url)]
        for use in uses:
            assert status_in_child(use) == 7
        assert store.read("k") == b"1"


def status_in_child(use: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            use()
        except ForkedProcessError:
            status = 7
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class TestClosing:
    def test_a_closed_store_raises(self, ministack: LocalServer, fresh_root: FreshRoot) -> None:
        store = open_on(ministack, fresh_root(ministack))
        store.close()
        for verb in VERBS.values():
            with pytest.raises(ConfigError, match="closed"):
                verb(store)


def answered(status: int, code: str = "") -> Exception:
    body = f"<Error><Code>{code}</Code><Message>said</Message></Error>" if code else ""
    return obstore.exceptions.GenericError(f"Server returned non-2xx status code: {status} Reason: {body}")


class TestTranslation:
    @pytest.mark.parametrize(
        ("status", "code", "expected"),
        [
            (404, "NoSuchKey", ObjectNotFoundError),
            (404, "BlobNotFound", ObjectNotFoundError),
            (404, "NoSuchBucket", BucketNotFoundError),
            (404, "ContainerNotFound", BucketNotFoundError),
            (404, "", StoreUnavailableError),  # a proxy's page, say: no absence
            (404, "NoSuchUpload", StoreUnavailableError),
            (400, "ExpiredToken", AccessDeniedError),
            (403, "SignatureDoesNotMatch", AccessDeniedError),
            (403, "RequestTimeTooSkewed", AccessDeniedError),
            (401, "", AccessDeniedError),
            (400, "RequestTimeout", StoreTimeoutError),
            (409, "OperationAborted", StoreUnavailableError),
            (429, "", StoreUnavailableError),
            (500, "InternalError", StoreUnavailableError),
            (503, "SlowDown", StoreUnavailableError),
            (507, "", StorageFullError),
            (403, "QuotaExceeded", StorageFullError),
            (400, "BadDigest", IntegrityError),
            (400, "XAmzContentSHA256Mismatch", IntegrityError),
            (400, "EntityTooLarge", StoreError),
        ],
    )
    def test_an_answer_becomes_the_error_of_what_to_do(
        self, status: int, code: str, expected: type[StoreError]
    ) -> None:
        error = translate(answered(status, code), operation="read", url="s3://b", key="k")
        assert type(error) is expected
        assert (error.url, error.key, error.operation) == ("s3://b", "k", "read")
        assert str(status) in str(error)

    @pytest.mark.parametrize("status", [304, 409, 412])
    def test_a_conflict_of_a_create_is_existence_to_be_checked(self, status: int) -> None:
        error = translate(answered(status, "ConditionalRequestConflict"), operation="create", url="s3://b")
        assert isinstance(error, FileExistsError)

    def test_an_expired_token_says_what_to_do(self) -> None:
        error = translate(answered(400, "ExpiredToken"), operation="list", url="s3://b")
        assert "log in again" in str(error)
