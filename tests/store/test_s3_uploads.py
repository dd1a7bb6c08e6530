"""Open multipart uploads: found page by page, whatever a server says of its pages, and aborted once."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import pytest

from remote_ckpt.errors import ConfigError, MissingDependencyError, StoreUnavailableError
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Leftover, Store
from remote_ckpt.store.s3_uploads import Call, OpenUpload, leftovers_of, list_uploads
from remote_ckpt.testing.s3_contract import FreshRoot, begin_upload, open_upload_keys
from remote_ckpt.testing.servers import LocalServer
from remote_ckpt.url import parse_location

NOW = datetime.now(timezone.utc)


@pytest.fixture(params=["ministack", pytest.param("real_server", marks=pytest.mark.server)])
def server(request: pytest.FixtureRequest) -> LocalServer:
    found: LocalServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["obstore", "fsspec"])
def store(request: pytest.FixtureRequest, server: LocalServer, fresh_root: FreshRoot) -> Store:
    return open_store(fresh_root(server), storage_options=server.storage_options(), transport=request.param)


def in_pages(server: LocalServer, bucket: str, size: int, asked: list[Mapping[str, Any]]) -> Call:
    def call(method: str, **arguments: Any) -> Mapping[str, Any]:
        asked.append(arguments)
        page: Mapping[str, Any] = getattr(server.client(), method)(
            Bucket=bucket, MaxUploads=size, **arguments
        )
        return page

    return call


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
def test_all_pages_are_read(server: LocalServer, fresh_root: FreshRoot, size: int) -> None:
    root = parse_location(fresh_root(server))
    client, begun = server.client(), set()
    for number in range(8):  # two of each key: one page may end between them
        key = f"{root.path}/{number // 2}/0.distcp"
        begun.add((key, client.create_multipart_upload(Bucket=root.bucket, Key=key)["UploadId"]))
    client.create_multipart_upload(Bucket=root.bucket, Key=f"{root.path}-other/0.distcp")
    asked: list[Mapping[str, Any]] = []
    found = list_uploads(in_pages(server, root.bucket, size, asked), f"{root.path}/")
    assert {(upload.key, upload.upload_id) for upload in found} == begun
    assert len(found) == 8
    assert [upload.key for upload in found] == sorted(upload.key for upload in found)
    assert len(asked) in {-(-8 // size), 8 // size + 1}


def test_a_store_lists_uploads_below_its_root_only(server: LocalServer, store: Store) -> None:
    upload_id = begin_upload(server, store, "1/d-0123456789abcdef/0.distcp")
    root = parse_location(store.url)
    server.client().create_multipart_upload(Bucket=root.bucket, Key=f"{root.path}-other/1/k")
    before = store.clock()
    (found,) = store.list_leftovers()
    assert (found.key, found.kind) == ("1/d-0123456789abcdef/0.distcp", "upload")
    assert (found.upload_id, found.size_bytes) == (upload_id, 0)
    assert abs((found.modified_at - before).total_seconds()) < 60


def test_of_two_uploads_of_one_key_only_the_named_one_is_aborted(server: LocalServer, store: Store) -> None:
    ids = {begin_upload(server, store, "1/k") for _ in range(2)}
    first, second = store.list_leftovers()
    assert {first.upload_id, second.upload_id} == ids
    store.remove_leftover(first)
    assert store.list_leftovers() == [second]
    store.remove_leftover(first)
    assert store.list_leftovers() == [second]


def test_an_upload_that_was_completed_meanwhile_is_an_object_and_stays(
    server: LocalServer, store: Store
) -> None:
    begin_upload(server, store, "1/k")
    (found,) = store.list_leftovers()
    root = parse_location(store.url)
    target = {"Bucket": root.bucket, "Key": f"{root.path}/1/k", "UploadId": found.upload_id}
    parts = server.client().list_parts(**target)["Parts"]
    done = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in parts]
    server.client().complete_multipart_upload(**target, MultipartUpload={"Parts": done})
    store.remove_leftover(found)
    assert store.read("1/k") == b"part"
    assert open_upload_keys(server, store) == []


@pytest.mark.parametrize(
    "page",
    [
        {"IsTruncated": True},
        {"IsTruncated": True, "NextKeyMarker": "", "NextUploadIdMarker": ""},
        {"IsTruncated": True, "NextKeyMarker": "k"},
    ],
)
def test_pages_that_lead_nowhere_raise_instead_of_looping(page: Mapping[str, Any]) -> None:
    with pytest.raises(StoreUnavailableError, match="how to go on"):
        list_uploads(lambda method, **arguments: page, "run/")


def test_uploads_elsewhere_that_a_server_lists_too_are_left_out() -> None:
    uploads = [{"Key": key, "UploadId": "u", "Initiated": NOW} for key in ("run/1/k", "runs/1/k", "other")]
    found = list_uploads(lambda method, **arguments: {"IsTruncated": False, "Uploads": uploads}, "run/")
    assert [upload.key for upload in found] == ["run/1/k"]


def test_uploads_of_what_is_no_key_are_left_out() -> None:
    uploads = [OpenUpload(key, "u", NOW) for key in ("run/1//k", "run/../k", "run/", "run/1/k")]
    assert [found.key for found in leftovers_of(uploads, "run/")] == ["1/k"]


def test_without_boto3_the_extra_is_named(ministack: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("s3://bucket/run", storage_options=ministack.storage_options())
    real = builtins.__import__

    def no_boto(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "boto3":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_boto)
    with pytest.raises(MissingDependencyError, match=r"remote-ckpt\[aws\]"):
        store.list_leftovers()


@pytest.mark.parametrize("url", ["gs://bucket/run", "az://container/run"])
def test_stores_that_list_no_uploads_say_none_and_ask_nothing(url: str) -> None:
    given = {"account_name": "a", "account_key": "a2V5"} if url.startswith("az") else {"token": "anon"}
    store = open_store(url, storage_options=given)
    assert list(store.list_leftovers()) == []
    upload = Leftover(key="k", kind="upload", upload_id="u", size_bytes=0, modified_at=NOW)
    with pytest.raises(ConfigError, match="no leftover"):
        store.remove_leftover(upload)
