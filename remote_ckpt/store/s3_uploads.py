"""What obstore lacks and boto3 has: open multipart uploads, and copies of objects above 5 GiB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from remote_ckpt.errors import MissingDependencyError
from remote_ckpt.options import GiB
from remote_ckpt.store.boto_errors import boto_translated
from remote_ckpt.store.obstore_options import DriverSettings

MAX_COPY_BYTES = 5 * GiB
"""Largest object that one CopyObject request copies (S3's limit)."""


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    started_at: datetime


@dataclass(frozen=True, slots=True)
class S3Uploads:
    """The multipart uploads of one bucket.

    Args:
        client: A boto3 S3 client.
        bucket: The bucket.
        url: Redacted URL for messages.
    """

    client: Any
    bucket: str
    url: str

    def list_open(self, prefix: str) -> Sequence[OpenUpload]:
        """Return the open uploads whose key (in the bucket) starts with ``prefix``, sorted by key."""
        with boto_translated("list_uploads", url=self.url):
            found = list(self._pages(prefix))
        return sorted(found, key=lambda upload: (upload.key, upload.upload_id))

    def abort(self, upload: OpenUpload) -> None:
        """Abort an upload; one that is gone counts as aborted."""
        from botocore.exceptions import ClientError

        with boto_translated("abort_upload", url=self.url, key=upload.key):
            try:
                self.client.abort_multipart_upload(
                    Bucket=self.bucket, Key=upload.key, UploadId=upload.upload_id
                )
            except ClientError as error:
                if error.response["Error"].get("Code") != "NoSuchUpload":
                    raise

    def copy(self, source: str, target: str) -> None:
        """Copy an object of any size within the bucket, in parts where it is large."""
        with boto_translated("copy", url=self.url, key=source):
            self.client.copy({"Bucket": self.bucket, "Key": source}, self.bucket, target)

    def _pages(self, prefix: str) -> Iterator[OpenUpload]:
        pages = self.client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self.bucket, Prefix=prefix
        )
        for page in pages:
            for found in page.get("Uploads", ()):
                yield OpenUpload(found["Key"], found["UploadId"], found["Initiated"])


def s3_uploads(bucket: str, settings: DriverSettings, *, url: str) -> S3Uploads:
    """Return the uploads of a bucket, reached with the settings of its obstore client.

    Raises:
        MissingDependencyError: boto3 is not installed.
    """
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError as error:
        message = "open multipart uploads and copies above 5 GiB need boto3: pip install 'remote-ckpt[aws]'"
        raise MissingDependencyError(message, url=url) from error
    known = settings.provider() if settings.provider else {}
    # Compatible stores reject the checksums that boto3 adds unasked (boto3 issue 4392).
    checksums = {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    signature = {"signature_version": UNSIGNED} if settings.config.get("skip_signature") else {}
    client = boto3.client(
        "s3",
        endpoint_url=settings.endpoint_url,
        region_name=settings.config["region"],
        aws_access_key_id=known.get("access_key_id"),
        aws_secret_access_key=known.get("secret_access_key"),
        aws_session_token=known.get("token"),
        verify=settings.verify,
        config=Config(**checksums, **signature),
    )
    return S3Uploads(client, bucket, url)
