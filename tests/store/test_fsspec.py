"""File systems of fsspec: S3 through s3fs, memory, and one of which nothing is known."""

from __future__ import annotations

import errno
import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from remote_ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ConfigError,
    ForkedProcessError,
    MissingDependencyError,
    ObjectExistsError,
    ObjectNotFoundError,
    RemoteCkptError,
    StorageFullError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from remote_ckpt.options import MiB, RetryOptions, TransferOptions
from remote_ckpt.store.base import CreateOnly, Store
from remote_ckpt.store.fsspec import FsspecStore, open_fsspec_store
from remote_ckpt.store.fsspec_errors import translate
from remote_ckpt.store.fsspec_s3 import S3fsStore, plan_s3fs_options
from remote_ckpt.store.local import LocalStore
from remote_ckpt.store.obstore import open_obstore_store
from remote_ckpt.store.retry import RetryStore
from remote_ckpt.store.single_writer import SingleWriterStore
from remote_ckpt.testing.contract import StoreContract
from remote_ckpt.testing.s3_contract import FreshRoot, S3Contract, make_locked_bucket, open_upload_keys
from remote_ckpt.testing.servers import LocalServer, free_ports
from remote_ckpt.url import Location, parse_location

_numbers = itertools.count(1)


def open_s3fs(server: LocalServer, url: str, **options: Any) -> Store:
    storage_options = {**server.storage_options(), **options}
    return open_fsspec_store(parse_location(url), storage_options=storage_options)


OpenShared = Callable[[LocalServer], S3fsStore]


@pytest.fixture(scope="module")
def open_shared(fresh_root: FreshRoot) -> OpenShared:
    """Return a function that opens an empty root on a server; one s3fs instance serves a server's tests.

    To make one costs more than most tests.
    """
    made: dict[str, Any] = {}

    def open_root(server: LocalServer) -> S3fsStore:
        if server.endpoint_url not in made:
            options = plan_s3fs_options(server.storage_options(), RetryOptions())
            made[server.endpoint_url] = fsspec.filesystem("s3", skip_instance_cache=True, **options)
        location = parse_location(fresh_root(server))
        return S3fsStore(location, made[server.endpoint_url], TransferOptions(), RetryOptions())

    return open_root


class TestS3fsOnMiniStack(S3Contract):
    @pytest.fixture
    def store(self, ministack: LocalServer, open_shared: OpenShared) -> Store:
        self.server = ministack
        return open_shared(ministack)


class TestS3fsOnMoto(S3Contract):
    @pytest.fixture
    def store(self, moto_server: LocalServer, open_shared: OpenShared) -> Store:
        self.server = moto_server
        # moto answers some reads with 500 while an object is replaced: as in use, these are tried again.
        return RetryStore(open_shared(moto_server), RetryOptions())


@pytest.mark.server
class TestS3fsOnRealServer(S3Contract):
    race_rounds: ClassVar[int] = 2
    racers: ClassVar[int] = 3  # SeaweedFS tries for its lock once a second: more would take long

    @pytest.fixture
    def store(self, real_server: LocalServer, open_shared: OpenShared) -> Store:
        self.server = real_server
        return RetryStore(open_shared(real_server), RetryOptions())


class MemoryContract(StoreContract):
    """Memory has no raw hand but its own file system's dictionary."""

    def raw_read(self, store: Store, key: str) -> bytes | None:
        found = MemoryFileSystem.store.get(self._path(store, key))
        return None if found is None else found.getvalue()

    def raw_write(self, store: Store, key: str, data: bytes) -> None:
        MemoryFileSystem().pipe_file(self._path(store, key), data)

    def raw_mark_folder(self, store: Store, key: str) -> None:
        MemoryFileSystem().makedirs(self._path(store, key), exist_ok=True)

    def _path(self, store: Store, key: str) -> str:
        return f"/{parse_location(store.url).path}/{key}"


class TestFsspecMemory(MemoryContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_fsspec_store(parse_location(f"memory://fsspec-{next(_numbers)}"))


class TestFsspecOfUnknownKind(MemoryContract):
    """A file system that is in no table of ours: it works for who accepts that it keeps no writers apart."""

    @pytest.fixture
    def store(self) -> Store:
        root = f"unknown-{next(_numbers)}"
        fsspec.register_implementation("unknown", _UnknownFileSystem, clobber=True)
        return SingleWriterStore(open_fsspec_store(Location("unknown", "", root)))

    def _path(self, store: Store, key: str) -> str:
        return "/" + store.url.partition("://")[2] + f"/{key}"

    def test_its_create_only_is_declared_missing_and_refused_to_who_did_not_accept_that(
        self, store: Store
    ) -> None:
        assert store.capabilities.create_only is CreateOnly.NONE
        assert isinstance(store, SingleWriterStore)
        with pytest.raises(UnsupportedStoreError, match="only if it is absent"):
            store.inner.create("k", b"1")
        assert store.list() == []


class _UnknownFileSystem(MemoryFileSystem):  # type: ignore[misc]
    protocol = "unknown"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("unknown://", "memory://")))


def test_local_paths_get_our_own_driver(tmp_path: os.PathLike[str]) -> None:
    assert isinstance(open_fsspec_store(parse_location(tmp_path)), LocalStore)


class SourceError(Exception):
    """What a failing source of chunks raises."""


def stream(store: Store, source: Callable[[], Iterator[bytes]], size_bytes: int) -> None:
    store.write_stream("k", source, size_bytes=size_bytes, part_bytes=5 * MiB, concurrency=3)


VERBS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("k"),
    "read_range": lambda store: store.read_range("k", 0, 1),
    "write": lambda store: store.write("k", b"1"),
    "create": lambda store: store.create("k", b"1"),
    "write_stream": lambda store: stream(store, lambda: iter([bytes(6 * MiB)]), 6 * MiB),
    "info": lambda store: store.info("k"),
    "list": lambda store: store.list(),
    "list_children": lambda store: store.list_children(),
    "copy": lambda store: store.copy("k", "l"),
    "delete": lambda store: store.delete(["k"]),
    "list_leftovers": lambda store: store.list_leftovers(),
}


class TestS3fsTraps:
    def test_a_source_that_fails_leaves_no_open_multipart_upload(
        self, ministack: LocalServer, fresh_root: FreshRoot
    ) -> None:
        def source() -> Iterator[bytes]:
            yield from [bytes(3 * MiB)] * 4
            raise SourceError

        store = open_s3fs(ministack, fresh_root(ministack))
        with pytest.raises(SourceError):
            stream(store, source, 20 * MiB)
        assert open_upload_keys(ministack, store) == []
        assert store.list() == []

    @pytest.mark.parametrize("verb", VERBS)
    def test_every_verb_names_a_missing_bucket_not_the_object(
        self, ministack: LocalServer, verb: str
    ) -> None:
        with pytest.raises(BucketNotFoundError):
            VERBS[verb](open_s3fs(ministack, "s3://no-such-bucket/run"))

    @pytest.mark.server
    @pytest.mark.parametrize("verb", VERBS)
    def test_every_verb_says_that_access_is_denied_and_shows_no_secret(
        self, real_server: LocalServer, fresh_root: FreshRoot, verb: str
    ) -> None:
        store = open_s3fs(real_server, fresh_root(real_server), secret="s3cretwrong")
        with pytest.raises(AccessDeniedError) as caught:
            VERBS[verb](store)
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(store)
        assert "s3cretwrong" not in shown

    def test_errors_of_single_keys_in_a_batch_delete_are_reported(self, ministack: LocalServer) -> None:
        bucket = make_locked_bucket(ministack, "locked-s3fs", held_key="run/held")
        store = open_s3fs(ministack, f"s3://{bucket}/run")
        store.write("free", b"1")
        failures = store.delete(["free", "held", "absent"])
        assert [(failure.key, type(failure.error)) for failure in failures] == [("held", AccessDeniedError)]
        assert [info.key for info in store.list()] == ["held"]

    def test_more_objects_than_a_page_holds_are_listed_and_deleted(
        self, ministack: LocalServer, fresh_root: FreshRoot
    ) -> None:
        store = open_s3fs(ministack, fresh_root(ministack))
        writer = open_obstore_store(parse_location(store.url), storage_options=ministack.storage_options())
        keys = [f"{number % 3}/{number:04}" for number in range(2_010)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: writer.write(key, b"1"), keys))
        assert [info.key for info in store.list()] == sorted(keys)
        assert len(store.list_children("1/").objects) == 670
        assert store.delete(keys) == []
        assert store.list() == []

    def test_a_listing_is_never_cached(self, ministack: LocalServer, fresh_root: FreshRoot) -> None:
        url = fresh_root(ministack)
        first, second = open_s3fs(ministack, url), open_s3fs(ministack, url)
        assert first.list() == []
        second.write("1/k", b"1")
        assert [info.key for info in first.list()] == ["1/k"]
        assert first.list_children().prefixes == ("1",)

    def test_a_refused_connection_is_unavailable(self) -> None:
        (port,) = free_ports(1)
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
        store = open_fsspec_store(parse_location("s3://bucket/run"), storage_options=options)
        for verb in ("create", "list", "info"):
            with pytest.raises(StoreUnavailableError):
                VERBS[verb](store)

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 says it too
    def test_a_forked_child_is_told(self, ministack: LocalServer, fresh_root: FreshRoot) -> None:
        store = open_s3fs(ministack, fresh_root(ministack))
        store.write("k", b"1")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                store.read("k")
            except ForkedProcessError:
                status = 7
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    def test_the_users_options_win_but_caches_and_retries_are_off(self) -> None:
        given = {"endpoint_url": "http://localhost", "config_kwargs": {"read_timeout": 7, "retries": {}}}
        planned = plan_s3fs_options(given, RetryOptions(connect_seconds=2.0))
        assert planned["use_listings_cache"] is False
        assert planned["config_kwargs"]["read_timeout"] == 7
        assert planned["config_kwargs"]["retries"]["total_max_attempts"] == 1
        assert planned["config_kwargs"]["connect_timeout"] == 2.0
        assert planned["config_kwargs"]["request_checksum_calculation"] == "when_required"


def s3fs_error(status: int, code: str) -> Exception:
    """Return what s3fs raises: a bare OSError whose cause holds the store's answer."""
    from botocore.exceptions import ClientError

    answer = {"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(errno.EIO, "said")
    error.__cause__ = ClientError(answer, "PutObject")
    return error


class HttpFailure(Exception):
    """What gcsfs and Azure's SDK raise: the status in an attribute."""

    def __init__(self, status_code: int, error_code: str | None = None) -> None:
        super().__init__(f"failed with {status_code}")
        self.status_code = status_code
        self.error_code = error_code


class TestTranslation:
    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (s3fs_error(404, "NoSuchKey"), ObjectNotFoundError),
            (s3fs_error(404, "NoSuchBucket"), BucketNotFoundError),
            (s3fs_error(400, "ExpiredToken"), AccessDeniedError),
            (s3fs_error(503, "SlowDown"), StoreUnavailableError),
            (s3fs_error(404, "404"), StoreUnavailableError),
            (HttpFailure(403), AccessDeniedError),
            (HttpFailure(404, "ContainerNotFound"), BucketNotFoundError),
            (HttpFailure(502), StoreUnavailableError),
            (FileNotFoundError("k"), ObjectNotFoundError),
            (PermissionError("k"), AccessDeniedError),
            (TimeoutError(), StoreTimeoutError),
            (ConnectionResetError(), StoreUnavailableError),
            (OSError(errno.ENOSPC, "full"), StorageFullError),
            (OSError(errno.EDQUOT, "full"), StorageFullError),
            (NotImplementedError(), UnsupportedStoreError),
            (RuntimeError("This class is not fork-safe"), ForkedProcessError),
        ],
    )
    def test_an_error_becomes_that_of_what_to_do(
        self, error: Exception, expected: type[RemoteCkptError]
    ) -> None:
        found = translate(error, operation="read", url="s3://b", key="k")
        assert type(found) is expected
        assert (found.url, found.key, found.operation) == ("s3://b", "k", "read")

    @pytest.mark.parametrize("status", [304, 409, 412])
    def test_a_conflict_of_a_create_is_existence_to_be_checked(self, status: int) -> None:
        for error in (s3fs_error(status, "ConditionalRequestConflict"), HttpFailure(status)):
            assert isinstance(translate(error, operation="create", url="s3://b"), ObjectExistsError)


class _LyingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Hands back an error in place of bytes, as some do, and cannot be reached by a listing."""

    protocol = "lying"
    cachable = False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> Any:
        return FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Mapping[str, Any]]:
        raise OSError(errno.EIO, "the listing broke")


class TestOtherFileSystems:
    @pytest.fixture
    def lying(self) -> FsspecStore:
        return FsspecStore(Location("memory", "", "lying"), _LyingFileSystem(), TransferOptions())

    def test_an_error_handed_back_as_a_value_is_raised(self, lying: FsspecStore) -> None:
        with pytest.raises(ObjectNotFoundError):
            lying.read("k")

    def test_a_listing_that_fails_is_no_empty_listing(self, lying: FsspecStore) -> None:
        for listing in (lying.list, lying.list_children):
            with pytest.raises(StoreUnavailableError):
                listing()

    def test_an_object_above_the_byte_budget_is_refused_before_it_is_read(self) -> None:
        transfer = TransferOptions(budget_bytes=10 * MiB, part_bytes=5 * MiB)
        store = open_fsspec_store(parse_location("memory://budget"), transfer=transfer)
        with pytest.raises(UnsupportedStoreError, match="max_object_bytes"):
            stream(store, lambda: pytest.fail("the source was read"), 10 * MiB + 1)

    def test_a_closed_store_raises(self) -> None:
        store = open_fsspec_store(parse_location("memory://closed"))
        store.close()
        for verb in VERBS.values():
            with pytest.raises(ConfigError, match="closed"):
                verb(store)

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(*_: object, **__: object) -> None:
            raise ImportError("Install gcsfs to access Google Storage")

        monkeypatch.setattr(fsspec, "filesystem", missing)
        with pytest.raises(MissingDependencyError, match="gcsfs"):
            open_fsspec_store(parse_location("gs://bucket/run"))

    def test_refused_options_are_not_repeated(self) -> None:
        both = {"key": "a", "username": "b", "secret": "s3cret"}
        with pytest.raises(ConfigError) as caught:
            open_fsspec_store(parse_location("s3://bucket/run"), storage_options=both)
        assert "s3cret" not in "".join(traceback.format_exception(caught.value))
