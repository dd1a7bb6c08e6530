"""What obstore lacks and botocore has: open multipart uploads, and copies of objects above 5 GiB."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from remote_ckpt.errors import MissingDependencyError, StoreUnavailableError
from remote_ckpt.options import GiB, RetryOptions
from remote_ckpt.store.base import Leftover, is_key
from remote_ckpt.store.boto_errors import boto_translated
from remote_ckpt.store.http_errors import no_listing_message
from remote_ckpt.store.obstore_options import DriverSettings

MAX_COPY_BYTES = 5 * GiB
"""Largest object that one CopyObject request copies (S3's limit)."""

Call = Callable[..., Mapping[str, Any]]
"""Sends one request about a bucket: botocore's method by name, its arguments without the bucket."""

_MARKERS: Final = ("KeyMarker", "UploadIdMarker")


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    started_at: datetime


def list_uploads(call: Call, prefix: str) -> Sequence[OpenUpload]:
    """Return the open uploads whose key (in the bucket) starts with ``prefix``, sorted by key.

    MinIO lists none for a prefix that is no whole key; it aborts those of a day itself.

    Raises:
        StoreUnavailableError: An answer says that there are more, and not how to get them.
    """
    found = [upload for page in _pages(call, prefix) for upload in _uploads_in(page)]
    below = [upload for upload in found if upload.key.startswith(prefix)]
    return sorted(below, key=lambda upload: (upload.key, upload.upload_id))


def abort_upload(call: Call, key: str, upload_id: str) -> None:
    """Abort an upload; one that is gone (aborted, or completed) counts as aborted."""
    try:
        call("abort_multipart_upload", Key=key, UploadId=upload_id)
    except Exception as error:
        if not _says_gone(error):
            raise


def leftovers_of(uploads: Sequence[OpenUpload], root: str) -> Sequence[Leftover]:
    """Return uploads as leftovers of a store whose keys in the bucket begin with ``root``."""
    return [
        Leftover(
            key=upload.key.removeprefix(root),
            kind="upload",
            upload_id=upload.upload_id,
            size_bytes=0,
            modified_at=upload.started_at,
        )
        for upload in uploads
        if is_key(upload.key.removeprefix(root))
    ]


def _pages(call: Call, prefix: str) -> Iterator[Mapping[str, Any]]:
    # Not botocore's paginator: s3fs has none, and SeaweedFS gives no marker of the key.
    marks: dict[str, str] = {}
    seen = set()
    while True:
        page = call("list_multipart_uploads", Prefix=prefix, **marks)
        yield page
        if not page.get("IsTruncated"):
            return
        marks = {name: page[f"Next{name}"] for name in _MARKERS if page.get(f"Next{name}")}
        place = tuple(marks.items())
        if not place or place in seen:
            raise StoreUnavailableError(no_listing_message("it does not say how to go on"))
        seen.add(place)


def _uploads_in(page: Mapping[str, Any]) -> Iterator[OpenUpload]:
    for found in page.get("Uploads", ()):
        yield OpenUpload(found["Key"], found["UploadId"], found["Initiated"])


def _says_gone(error: Exception) -> bool:
    # s3fs raises an OSError of its own, caused by botocore's.
    answers = (getattr(each, "response", None) for each in (error, error.__cause__))
    return any(answer and answer["Error"].get("Code") == "NoSuchUpload" for answer in answers)


@dataclass(frozen=True, slots=True)
class S3Uploads:
    """The multipart uploads of one bucket, through boto3.

    Args:
        client: A boto3 S3 client.
        bucket: The bucket.
        url: Redacted URL for messages.
        copy_arguments: What a copy asks for: encryption, and who pays.
    """

    client: Any
    bucket: str
    url: str
    copy_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def list_open(self, prefix: str) -> Sequence[OpenUpload]:
        """Return the open uploads whose key (in the bucket) starts with ``prefix``, sorted by key."""
        with boto_translated("list_uploads", url=self.url):
            return list_uploads(self._call, prefix)

    def abort(self, upload: OpenUpload) -> None:
        """Abort an upload; one that is gone counts as aborted."""
        self.abort_by_id(upload.key, upload.upload_id)

    def abort_by_id(self, key: str, upload_id: str) -> None:
        """As :meth:`abort`, of the upload to ``key`` (in the bucket) that has this id."""
        with boto_translated("abort_upload", url=self.url, key=key):
            abort_upload(self._call, key, upload_id)

    def copy(self, source: str, target: str) -> None:
        """Copy an object of any size within the bucket, in parts where it is large."""
        with boto_translated("copy", url=self.url, key=source):
            self.client.copy(
                {"Bucket": self.bucket, "Key": source},
                self.bucket,
                target,
                ExtraArgs=dict(self.copy_arguments),
            )

    def _call(self, method: str, **arguments: Any) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = getattr(self.client, method)(Bucket=self.bucket, **arguments)
        return answer


def s3_uploads(
    bucket: str, settings: DriverSettings, *, url: str, retry: RetryOptions | None = None
) -> S3Uploads:
    """Return the uploads of a bucket, reached with the settings of its obstore client.

    Args:
        retry: Its time-outs, and each request is sent once. None leaves both to boto3, for copies in parts.

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
        config=Config(**checksums, **signature, **_patience(retry)),
    )
    return S3Uploads(client, bucket, url, _copy_arguments(settings.config))


def _copy_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what obstore's own requests say of encryption and of who pays: bucket policies may demand it."""
    method, key = config.get("server_side_encryption"), config.get("sse_customer_key_base64")
    wanted = {
        "ServerSideEncryption": None if method == "sse-c" else method,
        "SSEKMSKeyId": config.get("sse_kms_key_id"),
        "RequestPayer": "requester" if config.get("request_payer") else None,
    }
    if key:
        own = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": b64decode(key)}
        wanted |= own | {f"CopySource{name}": value for name, value in own.items()}
    return {name: value for name, value in wanted.items() if value}


def _patience(retry: RetryOptions | None) -> dict[str, Any]:
    if retry is None:
        return {}
    return {
        "connect_timeout": min(retry.connect_seconds, retry.total_seconds),
        "read_timeout": min(retry.request_seconds, retry.total_seconds),
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
