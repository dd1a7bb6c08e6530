"""Where servers differ: what each must be able to do, and what holds on all of them all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from remote_ckpt import (
    CommitOptions,
    IntegrityError,
    Options,
    SaveFailedError,
    UnsupportedStoreError,
    find_all_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from remote_ckpt.errors import ObjectExistsError, StoreError
from remote_ckpt.store import open_store
from remote_ckpt.testing.proxy import FaultProxy, FlipByte, Rule
from remote_ckpt.testing.servers import LocalServer

FreshBucket = Callable[[LocalServer], str]
SINGLE_WRITER = Options(commit=CommitOptions(accept_single_writer=True))

both_transports = pytest.mark.parametrize("transport", ["obstore", "fsspec"])


@pytest.fixture(params=["ministack", "moto_server", pytest.param("real_server", marks=pytest.mark.server)])
def server(request: pytest.FixtureRequest) -> LocalServer:
    found: LocalServer = request.getfixturevalue(request.param)
    return found


def model_of(value: float) -> nn.Module:
    model = nn.Linear(64, 64)  # most of its object is the weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def objects_in(server: LocalServer, bucket: str) -> list[str]:
    return [each["Key"] for each in server.client().list_objects_v2(Bucket=bucket).get("Contents", ())]


def make_versioned(server: LocalServer, bucket: str) -> str:
    server.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    return bucket


def honours_create_only(server: LocalServer, bucket: str) -> bool:
    """Ask with a raw hand. Ceph 16 makes a second version in a versioned bucket."""
    client, target = server.client(), {"Bucket": bucket, "Key": "raw", "IfNoneMatch": "*"}
    client.put_object(**target, Body=b"first")
    try:
        client.put_object(**target, Body=b"second")
    except client.exceptions.ClientError as error:
        return bool(error.response["ResponseMetadata"]["HTTPStatusCode"] == 412)
    return False


@both_transports
def test_a_versioned_bucket_is_used_where_it_honours_create_only_and_refused_where_not(
    server: LocalServer, fresh_bucket: FreshBucket, transport: str
) -> None:
    bucket = make_versioned(server, fresh_bucket(server))
    access: dict[str, Any] = {"storage_options": server.storage_options(), "transport": transport}
    url = f"s3://{bucket}/run/1"
    if honours_create_only(server, bucket):
        save_checkpoint(url, iteration=1, model=model_of(1.0), **access)
        store = open_store(f"s3://{bucket}", **access)
        with pytest.raises(ObjectExistsError):
            store.create("raw", b"third")
    else:
        with pytest.raises(UnsupportedStoreError, match="a second write replaced the first"):
            save_checkpoint(url, iteration=1, model=model_of(1.0), **access)
        assert objects_in(server, bucket) == ["raw"]


@both_transports
def test_rclone_is_refused_before_anything_is_saved(
    rclone: LocalServer, fresh_bucket: FreshBucket, transport: str
) -> None:
    bucket = fresh_bucket(rclone)
    access: dict[str, Any] = {"storage_options": rclone.storage_options(), "transport": transport}
    with pytest.raises(UnsupportedStoreError, match="a second write replaced the first") as raised:
        save_checkpoint(f"s3://{bucket}/run/1", iteration=1, model=model_of(1.0), **access)
    assert "accept_single_writer=True if only one job ever saves here" in str(raised.value)
    assert objects_in(rclone, bucket) == []


@both_transports
def test_rclone_serves_a_single_writer_who_accepts_that_but_obstore_gets_no_ranges_from_it(
    rclone: LocalServer, fresh_bucket: FreshBucket, transport: str
) -> None:
    root = f"s3://{fresh_bucket(rclone)}/run"
    access: dict[str, Any] = {
        "storage_options": rclone.storage_options(),
        "transport": transport,
        "options": SINGLE_WRITER,
    }
    save_checkpoint(f"{root}/1", iteration=1, model=model_of(1.0), **access)
    assert [path.name for path in find_all_checkpoints(root, **access)] == ["1"]
    model = model_of(0.0)
    if transport == "obstore":
        with pytest.raises(StoreError, match="non-partial"):
            load_checkpoint(f"{root}/1", model=model, **access)
    else:
        load_checkpoint(f"{root}/1", model=model, **access)
        assert [parameter.unique().tolist() for parameter in model.parameters()] == [[1.0], [1.0]]


def save_with_a_flipped_bit(server: LocalServer, url: str, *, path: str = "*.distcp", **access: Any) -> None:
    """Save over a wire that changes one bit of the data, or of what ``path`` names, on its way up."""
    damaged = Rule(method="PUT", path=path, nth=1, fault=FlipByte("request"))
    with FaultProxy(server.endpoint_url) as proxy, proxy.inject(damaged) as damage:
        given = {**server.storage_options(), "endpoint_url": proxy.endpoint_url}
        given |= access.pop("storage_options", {})
        save_checkpoint(url, iteration=1, model=model_of(1.0), storage_options=given, **access)
        assert damage.fired == 1


def refusal_of(save: Callable[[], None]) -> str | None:
    """Return what a save failed with; None if it did not."""
    try:
        save()
    except SaveFailedError as error:
        return str(error)
    return None


@both_transports
def test_a_bit_flipped_on_the_way_up_is_refused_by_the_store_or_found_by_the_load(
    server: LocalServer, fresh_root: FreshBucket, transport: str
) -> None:
    root, options = fresh_root(server), server.storage_options()
    refusal = refusal_of(lambda: save_with_a_flipped_bit(server, f"{root}/1", transport=transport))
    if refusal is None:
        with pytest.raises(IntegrityError, match=r"model\.weight is corrupt"):
            load_checkpoint(f"{root}/1", model=model_of(0.0), storage_options=options)
    else:
        assert "nothing was committed: IntegrityError" in refusal
        assert find_all_checkpoints(root, storage_options=options) == []


@both_transports
def test_a_bit_of_the_manifest_flipped_on_the_way_up_is_refused_by_the_store_or_mended(
    server: LocalServer, fresh_root: FreshBucket, transport: str
) -> None:
    root, options = fresh_root(server), server.storage_options()
    manifest = {"path": "*/manifest.*", "transport": transport}
    refusal = refusal_of(lambda: save_with_a_flipped_bit(server, f"{root}/1", **manifest))
    if refusal is None:
        model = model_of(0.0)
        load_checkpoint(f"{root}/1", model=model, storage_options=options)
        assert [parameter.unique().tolist() for parameter in model.parameters()] == [[1.0], [1.0]]
    else:
        assert "IntegrityError" in refusal
        assert find_all_checkpoints(root, storage_options=options) == []


@pytest.mark.server
def test_with_a_checksum_in_the_request_a_real_server_refuses_it(
    real_server: LocalServer, fresh_root: FreshBucket
) -> None:
    url = f"{fresh_root(real_server)}/1"
    with pytest.raises(SaveFailedError, match="nothing was committed: IntegrityError"):
        save_with_a_flipped_bit(real_server, url, storage_options={"checksum_algorithm": "CRC64NVME"})
