"""S3's ListObjectsV2, taken for a listing only if it is one.

obstore and botocore read an HTML page, an ``<Error>`` sent with status 200 or a page without its
continuation token as an empty or a short listing: a training would start from scratch. Here an answer
must have the root element, the fields and the token of a listing, or the request fails.

Protocol: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Final
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from remote_ckpt.errors import StoreUnavailableError
from remote_ckpt.store.base import ObjectInfo, is_key
from remote_ckpt.store.credentials import CredentialProvider
from remote_ckpt.store.http_client import Answer, HttpClient
from remote_ckpt.store.http_errors import describe, error_type, no_listing_message
from remote_ckpt.store.obstore_options import DriverSettings
from remote_ckpt.store.sigv4 import format_query, sign_headers
from remote_ckpt.url import redact_url

_ROOT: Final = "ListBucketResult"
# HEAD gives whole seconds, listings of some servers more: one object has one time.
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing; keys and prefixes are whole, those that are not ours left out.

    Args:
        objects: Objects whose key is one of ours (:func:`~remote_ckpt.store.base.check_key`).
        prefixes: Common prefixes, each with its closing ``/``.
        token: Where the next page begins, None on the last page.
    """

    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[str, ...]
    token: str | None


@dataclass(frozen=True, slots=True)
class S3Lister:
    """Lists one bucket with signed requests of its own; safe for threads and after ``fork``.

    Args:
        bucket_url: URL of the bucket at its endpoint.
        region: The region to sign for.
        provider: Returns credentials; None sends unsigned requests.
        client: Sends the requests.
        url: Redacted URL for messages.
        headers: Further headers of every request, in lower case.
        now: The present time (UTC), for signatures.
    """

    bucket_url: str
    region: str
    provider: CredentialProvider | None = field(repr=False)
    client: HttpClient = field(repr=False)
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)

    def pages(self, prefix: str, *, operation: str, delimiter: str = "") -> Iterator[ListPage]:
        """Yield every page of a listing.

        Args:
            prefix: Whole prefix in the bucket.
            operation: The verb for messages.
            delimiter: ``"/"`` for one level only.

        Raises:
            StoreUnavailableError: The answer is no listing, or has no way on.
            BucketNotFoundError, AccessDeniedError, StoreError: The store said so.
        """
        asked = {"prefix": prefix} | ({"delimiter": delimiter} if delimiter else {})
        seen: set[str] = set()
        page = self._page(asked, operation)
        yield page
        while page.token is not None:
            if page.token in seen:
                raise self._no_listing("the same page came twice", operation)
            seen.add(page.token)
            page = self._page({**asked, "continuation-token": page.token}, operation)
            yield page

    def objects(self, prefix: str, *, operation: str) -> list[ObjectInfo]:
        """Return every object whose key starts with ``prefix``; errors as :meth:`pages`."""
        return [info for page in self.pages(prefix, operation=operation) for info in page.objects]

    def level(self, prefix: str, *, operation: str) -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects right below ``prefix``, and the prefixes below it; errors as :meth:`pages`."""
        pages = [*self.pages(prefix, operation=operation, delimiter="/")]
        return [info for page in pages for info in page.objects], [
            name for page in pages for name in page.prefixes
        ]

    def has(self, key: str, *, operation: str) -> bool:
        """Return whether an object of that very key is listed; errors as :meth:`pages`."""
        page = self._page({"prefix": key, "max-keys": "1"}, operation)
        return any(info.key == key for info in page.objects)

    def _page(self, asked: Mapping[str, str], operation: str) -> ListPage:
        answer = self._send({"list-type": "2", "encoding-type": "url", **asked}, operation)
        root = _parse_xml(answer.body)
        if answer.status != 200 or (root is not None and root.tag == "Error"):
            raise self._refused(answer.status, root, operation)
        try:
            return parse_page(root, prefix=asked["prefix"])
        except ValueError as error:
            raise self._no_listing(str(error), operation) from None

    def _send(self, asked: Mapping[str, str], operation: str) -> Answer:
        target = f"{self.bucket_url}?{format_query(asked)}"
        headers: Mapping[str, str] = self.headers
        if self.provider is not None:
            headers = sign_headers(
                "GET",
                target,
                credentials=self.provider(),
                region=self.region,
                now=self.now(),
                headers=self.headers,
            )
        return self.client.send("GET", target, headers=headers, url=self.url, operation=operation)

    def _refused(self, status: int, root: ElementTree.Element | None, operation: str) -> Exception:
        code, message = (_text(root, name) if root is not None else "" for name in ("Code", "Message"))
        # An error sent with status 200 is one of the server.
        kind = error_type(status if status != 200 else 500, code or None, operation="list")
        detail = redact_url(message)[:300]
        said = describe(kind, operation=operation, key=None, status=status, code=code or None, detail=detail)
        return kind(said, url=self.url, operation=operation)

    def _no_listing(self, reason: str, operation: str) -> StoreUnavailableError:
        return StoreUnavailableError(no_listing_message(reason), url=self.url, operation=operation)


def open_lister(bucket: str, settings: DriverSettings, *, client: HttpClient, url: str) -> S3Lister:
    """Return the lister of a bucket, reached with the settings of its obstore client."""
    payer = {"x-amz-request-payer": "requester"} if settings.config.get("request_payer") else {}
    return S3Lister(
        bucket_url(bucket, settings), settings.config["region"], settings.provider, client, url, payer
    )


def bucket_url(bucket: str, settings: DriverSettings) -> str:
    """Return where a bucket is: its own host, or below the endpoint's path."""
    aws = f"s3.{settings.config['region']}.amazonaws.com"
    endpoint = settings.config.get("aws_endpoint_url_s3")
    if settings.config.get("virtual_hosted_style_request"):
        return f"{endpoint or f'https://{bucket}.{aws}'}/"
    return f"{endpoint or f'https://{aws}'}/{bucket}"


def parse_page(root: ElementTree.Element | None, *, prefix: str) -> ListPage:
    """Return the page that an answer's body holds.

    Args:
        root: The body's root element, namespaces removed; None if it is no XML.
        prefix: What was asked for: everything must start with it.

    Raises:
        ValueError: It is no listing, with the reason.
    """
    if root is None or root.tag != _ROOT:
        raise ValueError("its body is not XML" if root is None else f"its body is <{root.tag[:40]}>")
    if not _text(root, "Name"):
        raise ValueError("it names no bucket")
    decode = unquote_plus if _text(root, "EncodingType").lower() == "url" else str
    objects = [_object(found, decode) for found in root.iter("Contents")]
    prefixes = [decode(_required(found, "Prefix")) for found in root.iter("CommonPrefixes")]
    if not all(found.startswith(prefix) for found in (*(info.key for info in objects), *prefixes)):
        raise ValueError("it has keys outside of the prefix")
    root_length = prefix.rfind("/") + 1
    return ListPage(
        tuple(info for info in objects if is_key(info.key[root_length:])),
        tuple(found for found in prefixes if is_key(found[root_length:-1])),
        _token(root),
    )


def _parse_xml(body: bytes) -> ElementTree.Element | None:
    # A listing declares no document type; entities that blow up need one.
    if b"<!DOCTYPE" in body:
        return None
    with contextlib.suppress(ElementTree.ParseError, ValueError, LookupError):
        root = ElementTree.fromstring(body)
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root
    return None


def _text(element: ElementTree.Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


def _required(element: ElementTree.Element, name: str) -> str:
    # Not stripped: a key may begin or end with a space.
    text = element.findtext(name)
    if not text:
        raise ValueError(f"an entry has no {name}")
    return text


def _object(found: ElementTree.Element, decode: Callable[[str], str]) -> ObjectInfo:
    size, moment = _required(found, "Size").strip(), _TIME.fullmatch(_required(found, "LastModified").strip())
    if not size.isdecimal() or moment is None:
        raise ValueError("an entry has no size or no time")
    modified_at = datetime.fromisoformat(f"{moment[1]}+00:00")
    return ObjectInfo(decode(_required(found, "Key")), int(size), modified_at)


def _token(root: ElementTree.Element) -> str | None:
    is_truncated, token = _text(root, "IsTruncated"), _text(root, "NextContinuationToken")
    if is_truncated not in ("true", "false"):
        raise ValueError("it does not say whether it is complete")
    if is_truncated == "true" and not token:
        raise ValueError("it is incomplete and has no token to go on")
    return token if is_truncated == "true" else None
