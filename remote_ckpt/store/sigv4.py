"""AWS Signature Version 4 in the headers of one S3 request without a body. Pure.

Protocol: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, urlsplit

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()


def format_query(parameters: Mapping[str, str]) -> str:
    """Return a query in the form that is signed: sorted, all but ``A-Za-z0-9-_.~`` escaped."""
    pairs = sorted((quote(name, safe="-_.~"), quote(text, safe="-_.~")) for name, text in parameters.items())
    return "&".join(f"{name}={text}" for name, text in pairs)


def sign_headers(
    method: str,
    target: str,
    *,
    credentials: Mapping[str, Any],
    region: str,
    now: datetime,
    headers: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the headers of a signed request.

    Args:
        method: The HTTP method.
        target: The URL, its path escaped as it is sent, its query from :func:`format_query`.
        credentials: ``access_key_id``, ``secret_access_key`` and ``token`` (or None).
        region: The region to sign for.
        now: The present time (UTC).
        headers: Further headers, in lower case; they are signed too.
    """
    where = urlsplit(target)
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    signed = {**(headers or {}), "host": where.netloc}
    signed |= {"x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": stamp}
    if token := credentials.get("token"):
        signed["x-amz-security-token"] = token
    names = ";".join(sorted(signed))
    lines = [f"{name}:{signed[name].strip()}\n" for name in sorted(signed)]
    request = "\n".join([method, where.path or "/", where.query, "".join(lines), names, _EMPTY_SHA256])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"{_ALGORITHM}\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signature = _sign(_key(credentials["secret_access_key"], scope), text).hex()
    claim = f"Credential={credentials['access_key_id']}/{scope},SignedHeaders={names},Signature={signature}"
    return {**signed, "authorization": f"{_ALGORITHM} {claim}"}


def _key(secret: str, scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = _sign(key, part)
    return key


def _sign(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
