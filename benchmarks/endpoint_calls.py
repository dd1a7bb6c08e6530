"""The S3 calls of the benchmark's endpoint: those that the clients use, as far as they use them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import formatdate
from typing import Final
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from benchmarks.endpoint_objects import Body, Bucket, Stored
from benchmarks.endpoint_wire import Refused, Request

XML_HEAD: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'


@dataclass(slots=True)
class Answer:
    """Status, headers and either a short body or a range of an object."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    stored: Stored | None = None
    start: int = 0
    length: int = 0


class Endpoint:
    """The S3 calls that the clients in a benchmark use."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def answer(self, request: Request) -> Answer:
        """Do what is asked.

        Raises:
            Refused: With S3's status and code.
        """
        if not request.key:
            return self._of_bucket(request)
        bucket = self._bucket(request)
        call = _OBJECT_CALLS[request.method, "uploadId" in request.query or "uploads" in request.query]
        return call(bucket, request)

    def _bucket(self, request: Request) -> Bucket:
        if request.bucket not in self._buckets:
            raise Refused(404, "NoSuchBucket")
        return self._buckets[request.bucket]

    def _of_bucket(self, request: Request) -> Answer:
        if request.method == "PUT":
            self._buckets.setdefault(request.bucket, Bucket())
            return Answer()
        bucket = self._bucket(request)
        if request.method == "DELETE":
            del self._buckets[request.bucket]
            return Answer(204)
        if request.method == "HEAD":
            return Answer()
        if request.method == "POST":
            return delete_objects(bucket, request)
        if "uploads" in request.query:
            return list_uploads(bucket, request)
        return list_objects(bucket, request)


def put_object(bucket: Bucket, request: Request) -> Answer:
    only_if_absent = request.headers.get("if-none-match") == "*"
    source = request.headers.get("x-amz-copy-source")
    stored = Stored(_copied(source, request, bucket) if source else (request.body,))
    if not bucket.put(request.key, stored, only_if_absent=only_if_absent):
        raise Refused(412, "PreconditionFailed")
    if source:
        inside = f"<LastModified>{_iso(stored.modified_at)}</LastModified><ETag>{stored.etag}</ETag>"
        return _xml("CopyObjectResult", inside)
    return Answer(headers={"ETag": stored.etag})


def _copied(source: str, request: Request, bucket: Bucket) -> tuple[Body, ...]:
    name, _, key = unquote(source).lstrip("/").partition("/")
    if name != request.bucket:
        raise Refused(501, "NotImplemented")
    return _found(bucket, key).pieces


def get_object(bucket: Bucket, request: Request) -> Answer:
    stored = _found(bucket, request.key)
    size_bytes = stored.size_bytes
    headers = {
        "ETag": stored.etag,
        "Last-Modified": formatdate(stored.modified_at, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if asked is None:
        return Answer(200, headers, stored=stored, length=size_bytes)
    if asked[1]:
        start, end = int(asked[1]), min(int(asked[2] or size_bytes), size_bytes - 1)
    else:
        start, end = max(0, size_bytes - int(asked[2])), size_bytes - 1
    if start >= size_bytes:
        raise Refused(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {start}-{end}/{size_bytes}"
    return Answer(206, headers, stored=stored, start=start, length=end + 1 - start)


def delete_object(bucket: Bucket, request: Request) -> Answer:
    bucket.delete(request.key)
    return Answer(204)


def begin_upload(bucket: Bucket, request: Request) -> Answer:
    upload = bucket.begin_upload(request.key)
    inside = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
    return _xml("InitiateMultipartUploadResult", f"{inside}<UploadId>{upload.upload_id}</UploadId>")


def put_part(bucket: Bucket, request: Request) -> Answer:
    upload = bucket.uploads.get(request.query["uploadId"])
    if upload is None:
        raise Refused(404, "NoSuchUpload")
    if "x-amz-copy-source" in request.headers:
        raise Refused(501, "NotImplemented")
    number = int(request.query["partNumber"])
    upload.parts[number] = request.body
    return Answer(headers={"ETag": f'"{number:032x}"'})


def end_upload(bucket: Bucket, request: Request) -> Answer:
    if "uploads" in request.query:
        return begin_upload(bucket, request)
    upload = bucket.end_upload(request.query["uploadId"])
    if upload is None:
        raise Refused(404, "NoSuchUpload")
    numbers = [int(number) for number in _texts(request, "PartNumber")]
    if not numbers or any(number not in upload.parts for number in numbers):
        raise Refused(400, "InvalidPart")
    etag = f'"{os.urandom(16).hex()}-{len(numbers)}"'
    stored = Stored(tuple(upload.parts[number] for number in numbers), etag=etag)
    only_if_absent = request.headers.get("if-none-match") == "*"
    if not bucket.put(request.key, stored, only_if_absent=only_if_absent):
        raise Refused(412, "PreconditionFailed")
    inside = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key><ETag>{etag}</ETag>"
    return _xml("CompleteMultipartUploadResult", inside)


def abort_upload(bucket: Bucket, request: Request) -> Answer:
    if bucket.end_upload(request.query["uploadId"]) is None:
        raise Refused(404, "NoSuchUpload")
    return Answer(204)


def delete_objects(bucket: Bucket, request: Request) -> Answer:
    keys = _texts(request, "Key")
    for key in keys:
        bucket.delete(key)
    return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))


def list_objects(bucket: Bucket, request: Request) -> Answer:
    query = request.query
    encode: Callable[[str], str] = quote if query.get("encoding-type") == "url" else escape
    after = unquote(query.get("continuation-token", "")) or query.get("start-after", "")
    count = min(1000, int(query.get("max-keys", 1000)))
    prefix = query.get("prefix", "")
    objects, prefixes, following = bucket.page(prefix, query.get("delimiter", ""), after, count)
    inside = [f"<Name>{request.bucket}</Name><Prefix>{encode(prefix)}</Prefix><MaxKeys>{count}</MaxKeys>"]
    if query.get("encoding-type") == "url":
        inside.append("<EncodingType>url</EncodingType>")
    inside += [f"<KeyCount>{len(objects) + len(prefixes)}</KeyCount>"]
    inside += [f"<IsTruncated>{'true' if following else 'false'}</IsTruncated>"]
    if following:
        inside.append(f"<NextContinuationToken>{quote(following, safe='')}</NextContinuationToken>")
    for key, stored in objects:
        facts = f"<LastModified>{_iso(stored.modified_at)}</LastModified><ETag>{stored.etag}</ETag>"
        facts += f"<Size>{stored.size_bytes}</Size><StorageClass>STANDARD</StorageClass>"
        inside.append(f"<Contents><Key>{encode(key)}</Key>{facts}</Contents>")
    inside += [f"<CommonPrefixes><Prefix>{encode(name)}</Prefix></CommonPrefixes>" for name in prefixes]
    return _xml("ListBucketResult", "".join(inside))


def list_uploads(bucket: Bucket, request: Request) -> Answer:
    encode: Callable[[str], str] = quote if request.query.get("encoding-type") == "url" else escape
    uploads = "".join(
        f"<Upload><Key>{encode(upload.key)}</Key><UploadId>{upload.upload_id}</UploadId>"
        f"<Initiated>{_iso(upload.started_at)}</Initiated></Upload>"
        for upload in bucket.open_uploads(request.query.get("prefix", ""))
    )
    head = f"<Bucket>{request.bucket}</Bucket><IsTruncated>false</IsTruncated>"
    if request.query.get("encoding-type") == "url":
        head += "<EncodingType>url</EncodingType>"
    return _xml("ListMultipartUploadsResult", head + uploads)


_OBJECT_CALLS: Final[Mapping[tuple[str, bool], Callable[[Bucket, Request], Answer]]] = {
    ("PUT", False): put_object,
    ("GET", False): get_object,
    ("HEAD", False): get_object,
    ("DELETE", False): delete_object,
    ("POST", True): end_upload,
    ("PUT", True): put_part,
    ("DELETE", True): abort_upload,
}


def refusal(error: Refused) -> Answer:
    """Return an error as S3 tells it."""
    text = f"{XML_HEAD}<Error><Code>{error.code}</Code><Message>{error.code}</Message></Error>"
    return Answer(error.status, {"Content-Type": "application/xml"}, text)


def _found(bucket: Bucket, key: str) -> Stored:
    stored = bucket.get(key)
    if stored is None:
        raise Refused(404, "NoSuchKey")
    return stored


def _texts(request: Request, name: str) -> list[str]:
    text = b"".join(span.view for span in request.body.spans(0, request.body.size_bytes))
    root = ElementTree.fromstring(text)
    return [element.text or "" for element in root.iter() if element.tag.rpartition("}")[2] == name]


def _xml(name: str, inside: str) -> Answer:
    namespace = "http://s3.amazonaws.com/doc/2006-03-01/"
    return Answer(
        headers={"Content-Type": "application/xml"},
        text=f'{XML_HEAD}<{name} xmlns="{namespace}">{inside}</{name}>',
    )


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(int(moment), timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
