"""S3's documents, as a store sends them and as a lying one would. Pure.

Error codes: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

MESSAGES: Final = {
    "AccessDenied": "Access Denied",
    "BadDigest": "The Content-MD5 or checksum value that you specified did not match what the server "
    "received.",
    "ConditionalRequestConflict": "The conditional request cannot succeed due to a conflicting operation "
    "against this resource.",
    "ExpiredToken": "The provided token has expired.",
    "InternalError": "We encountered an internal error. Please try again.",
    "InvalidAccessKeyId": "The AWS Access Key Id you provided does not exist in our records.",
    "InvalidRange": "The requested range is not satisfiable",
    "NoSuchBucket": "The specified bucket does not exist",
    "NoSuchKey": "The specified key does not exist.",
    "NoSuchUpload": "The specified multipart upload does not exist. The upload ID might be invalid, or the "
    "multipart upload might have been aborted or completed.",
    "NotImplemented": "A header you provided implies functionality that is not implemented.",
    "OperationAborted": "A conflicting conditional operation is currently in progress against this resource. "
    "Try again.",
    "PreconditionFailed": "At least one of the pre-conditions you specified did not hold",
    "RequestTimeTooSkewed": "The difference between the request time and the current time is too large.",
    "RequestTimeout": "Your socket connection to the server was not read from or written to within the "
    "timeout period.",
    "ServiceUnavailable": "Reduce your request rate.",
    "SignatureDoesNotMatch": "The request signature we calculated does not match the signature you provided. "
    "Check your key and signing method.",
    "SlowDown": "Please reduce your request rate.",
    "TooManyRequests": "Please reduce your request rate.",
    "XMinioStorageFull": "Storage backend has reached its minimum free drive threshold. Please delete a few "
    "objects to proceed.",
}
"""What stores say with each code."""

_ENTRIES: Final = ("Contents", "CommonPrefixes")


def error_document(code: str, *, resource: str = "") -> bytes:
    """Return the body of an error."""
    fields = {
        "Code": code,
        "Message": MESSAGES.get(code, code),
        "Resource": resource,
        "RequestId": "4442587FB7D0A2F9",
        "HostId": "fault-proxy",
    }
    inner = "".join(f"<{name}>{escape(text)}</{name}>" for name, text in fields.items())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'.encode()


def shorten_listing(
    document: bytes, *, keep_count: int | None = None, drop: str = "", is_truncated: bool = False
) -> bytes:
    """Return a listing with entries left out.

    Args:
        document: A ``ListBucketResult``; anything else is returned unchanged.
        keep_count: How many entries stay; None leaves all.
        drop: Glob of keys and prefixes, whole and unescaped, that are left out.
        is_truncated: Say that there is more, without a token that leads there; else say that this is all.
    """
    root = _parse(document, "ListBucketResult")
    if root is None:
        return document
    is_escaped = _text(root, "EncodingType") == "url"
    kept = 0
    for entry in [child for child in root if _name(child) in _ENTRIES]:
        key = _text(entry, "Key") or _text(entry, "Prefix")
        is_dropped = drop and fnmatchcase(unquote_plus(key) if is_escaped else key, drop)
        if is_dropped or (keep_count is not None and kept >= keep_count):
            root.remove(entry)
        else:
            kept += 1
    for child in [child for child in root if _name(child) in ("NextContinuationToken", "NextMarker")]:
        root.remove(child)
    _set(root, "KeyCount", str(kept))
    _set(root, "IsTruncated", "true" if is_truncated else "false")
    return _format(root)


def split_deletion(document: bytes, pattern: str) -> tuple[bytes | None, Sequence[str]]:
    """Take keys out of a batch deletion.

    Args:
        document: The body of a DeleteObjects request.
        pattern: Glob of the keys that are taken out.

    Returns:
        The document without them, None where no key is left; and the keys taken out.
    """
    root = _parse(document, "Delete")
    if root is None:
        return document, ()
    refused = []
    for entry in [child for child in root if _name(child) == "Object"]:
        if fnmatchcase(_text(entry, "Key"), pattern):
            refused.append(_text(entry, "Key"))
            root.remove(entry)
    has_more = any(_name(child) == "Object" for child in root)
    return (_format(root) if has_more else None), refused


def add_delete_errors(document: bytes | None, keys: Sequence[str], code: str) -> bytes:
    """Return the answer to a batch deletion with errors of single keys added.

    Args:
        document: What the store answered; None: it was not asked.
        keys: The keys.
        code: Their error code.
    """
    root = _parse(document or b"<DeleteResult/>", "DeleteResult")
    if root is None:
        return document or b""
    space = root.tag.rpartition("}")[0] + "}" if root.tag.startswith("{") else ""
    for key in keys:
        error = ElementTree.SubElement(root, f"{space}Error")
        for name, text in (("Key", key), ("Code", code), ("Message", MESSAGES.get(code, code))):
            ElementTree.SubElement(error, space + name).text = text
    return _format(root)


def _parse(document: bytes, name: str) -> ElementTree.Element | None:
    try:
        root = ElementTree.fromstring(document)
    except ElementTree.ParseError:
        return None
    return root if _name(root) == name else None


def _format(root: ElementTree.Element) -> bytes:
    space = root.tag[1:].rpartition("}")[0] if root.tag.startswith("{") else None
    text: bytes = ElementTree.tostring(root, encoding="UTF-8", xml_declaration=True, default_namespace=space)
    return text


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(element: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in element if _name(child) == name), "")


def _set(root: ElementTree.Element, name: str, text: str) -> None:
    for child in root:
        if _name(child) == name:
            child.text = text
