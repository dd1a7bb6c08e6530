"""The store contract on a local S3 server, with boto3 as the raw hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

from remote_ckpt.options import MiB
from remote_ckpt.store.base import Store
from remote_ckpt.testing.contract import StoreContract
from remote_ckpt.testing.servers import LocalServer
from remote_ckpt.url import parse_location

FreshRoot: TypeAlias = Callable[[LocalServer], str]
"""Gives the URL of an empty prefix on a server."""


class S3Contract(StoreContract):
    """Subclass it with a ``store`` fixture that sets :attr:`server`.

    Attributes:
        server: The server behind the store.
    """

    stream_bytes: ClassVar[int] = 12 * MiB + 17
    part_bytes: ClassVar[int] = 5 * MiB
    secrets: ClassVar[tuple[str, ...]] = (LocalServer.secret_key, LocalServer.access_key)
    server: LocalServer

    def raw_read(self, store: Store, key: str) -> bytes | None:
        """See :meth:`StoreContract.raw_read`."""
        client = self.server.client()
        try:
            body: bytes = client.get_object(**raw_object(store, key))["Body"].read()
        except client.exceptions.NoSuchKey:
            return None
        return body

    def raw_write(self, store: Store, key: str, data: bytes) -> None:
        """See :meth:`StoreContract.raw_write`."""
        self.server.client().put_object(**raw_object(store, key), Body=data)

    def raw_leave(self, store: Store, key: str) -> bool:
        """See :meth:`StoreContract.raw_leave`: a multipart upload with one part."""
        begin_upload(self.server, store, key)
        return True


def raw_object(store: Store, key: str) -> dict[str, str]:
    """Return boto3's name for an object of a store."""
    root = parse_location(store.url)
    return {"Bucket": root.bucket, "Key": f"{root.path}/{key}"}


def begin_upload(server: LocalServer, store: Store, key: str) -> str:
    """Begin a multipart upload, send one part, leave it open and return its id."""
    client, target = server.client(), raw_object(store, key)
    upload_id: str = client.create_multipart_upload(**target)["UploadId"]
    client.upload_part(**target, UploadId=upload_id, PartNumber=1, Body=b"part")
    return upload_id


def make_locked_bucket(server: LocalServer, name: str, *, held_key: str) -> str:
    """Return a bucket with one object that a legal hold keeps from being deleted (MiniStack)."""
    client = server.client()
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    client.put_object(Bucket=name, Key=held_key, Body=b"held", ObjectLockLegalHoldStatus="ON")
    return name


def open_upload_keys(server: LocalServer, store: Store) -> Sequence[str]:
    """Return the keys (in the bucket) of the multipart uploads that are open below the store's root."""
    root = parse_location(store.url)
    prefix = f"{root.path}/" if root.path else ""
    answer: dict[str, Any] = server.client().list_multipart_uploads(Bucket=root.bucket, Prefix=prefix)
    return [upload["Key"] for upload in answer.get("Uploads", ())]
