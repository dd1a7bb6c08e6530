"""What a store's HTTP answer means: status and error code to one of our errors.

Shared by the adapters, so that obstore's and botocore's views of one answer agree. Codes are those of
S3 (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html), which GCS's XML interface
shares, and of Azure Blob Storage.
"""

from __future__ import annotations

import re
from typing import Final

from remote_ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    RemoteCkptError,
    StorageFullError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedStoreError,
)

_BY_CODE: Final[dict[str, type[StoreError]]] = {
    **dict.fromkeys(("NoSuchKey", "BlobNotFound"), ObjectNotFoundError),
    **dict.fromkeys(("NoSuchBucket", "ContainerNotFound"), BucketNotFoundError),
    **dict.fromkeys(
        (
            *("AccessDenied", "AllAccessDisabled", "AccountProblem", "InvalidSecurity", "NotSignedUp"),
            *("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"),
            *("SignatureDoesNotMatch", "RequestTimeTooSkewed", "RequestExpired"),
            *("AuthenticationFailed", "AuthorizationFailure", "AuthorizationPermissionMismatch"),
        ),
        AccessDeniedError,
    ),
    **dict.fromkeys(("RequestTimeout", "OperationTimedOut"), StoreTimeoutError),
    **dict.fromkeys(
        (
            *("InternalError", "ServiceUnavailable", "SlowDown", "ServerBusy", "RequestLimitExceeded"),
            *("Throttling", "ThrottlingException", "TooManyRequests", "BandwidthLimitExceeded"),
            *("OperationAborted", "ConditionalRequestConflict", "NoSuchUpload"),
        ),
        StoreUnavailableError,
    ),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"), StorageFullError),
    **dict.fromkeys(
        ("InvalidRange", "BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
        IntegrityError,
    ),
    "IncompleteBody": StoreUnavailableError,
    "NotImplemented": StoreError,
}

_BY_STATUS: Final[dict[int, type[StoreError]]] = {
    401: AccessDeniedError,
    403: AccessDeniedError,
    # A 404 that does not say "no such key" may come from a proxy in front of the store: no absence.
    404: StoreUnavailableError,
    408: StoreTimeoutError,
    409: StoreUnavailableError,
    416: IntegrityError,
    429: StoreUnavailableError,
    499: StoreUnavailableError,
    501: StoreError,
    507: StorageFullError,
}

_ADVICE: Final[dict[type[RemoteCkptError], str]] = {
    AccessDeniedError: "check the credentials and their rights on this bucket and prefix",
    BucketNotFoundError: "create the bucket, or correct its name or endpoint",
    StorageFullError: "free space or raise the quota",
}

_ADVICE_BY_CODE: Final[dict[str, str]] = {
    "ExpiredToken": "the session token has expired: use credentials that refresh, or log in again",
    "RequestTimeTooSkewed": "the clock of this host is wrong",
    "PermanentRedirect": "set the bucket's own region (client_kwargs={'region_name': ...} or AWS_REGION)",
    "AuthorizationHeaderMalformed": "set the bucket's own region (AWS_REGION)",
}


# User info before the host is passed over, and never shown.
_ENDPOINT: Final = re.compile(
    r"(https?)://(?:[^/\s@]*@)?([A-Za-z0-9._-]+(?::\d+)?|\[[0-9A-Fa-f:.]+\](?::\d+)?)"
)
_NO_TLS: Final = re.compile(r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|InvalidContentType", re.IGNORECASE)
_UNTRUSTED: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED|UnknownIssuer|InvalidCertificate", re.IGNORECASE)
_LISTINGS: Final = frozenset({"list", "list_children", "list_uploads"})


def error_type(status: int | None, code: str | None, *, operation: str) -> type[RemoteCkptError]:
    """Return the kind of error that an answer means; a known code says more than the status.

    Args:
        status: HTTP status, or None where no answer arrived.
        code: The error code of the answer's body.
        operation: The verb. Of a create 304, 409 and 412 are conflicts, and 501 means that the store knows
            no condition. No listing is answered by the absence of an object: it is an error.
    """
    if operation == "create" and status in (304, 409, 412):
        return ObjectExistsError
    if operation == "create" and (status == 501 or code == "NotImplemented"):
        return UnsupportedStoreError
    kind = _kind_of(status, code)
    return StoreUnavailableError if kind is ObjectNotFoundError and operation in _LISTINGS else kind


def _kind_of(status: int | None, code: str | None) -> type[StoreError]:
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status is None or status >= 500:
        return _BY_STATUS.get(status or 0, StoreUnavailableError)
    return _BY_STATUS.get(status, StoreError)


def advice(kind: type[RemoteCkptError], code: str | None) -> str:
    """Return what to do about an error, or ``""``."""
    return _ADVICE_BY_CODE.get(code or "", _ADVICE.get(kind, ""))


def reach_advice(text: str) -> str:
    """Return what to look at where no connection came about.

    Args:
        text: What the client said, with the URL that it asked; only its scheme, host and port are shown.
    """
    found = _ENDPOINT.search(text)
    endpoint = f"{found[1]}://{found[2]}" if found else "the endpoint"
    if endpoint.startswith("https:") and _NO_TLS.search(text):
        return f"{endpoint} does not speak TLS: is http:// meant in endpoint_url?"
    if endpoint.startswith("https:") and _UNTRUSTED.search(text):
        return f"the certificate of {endpoint} is not trusted: give its CA (verify, or AWS_CA_BUNDLE)"
    return f"is the server at {endpoint} running and reachable, and is that address (endpoint_url) right?"


def describe(
    kind: type[RemoteCkptError],
    *,
    operation: str,
    key: str | None,
    status: int | None,
    code: str | None,
    detail: str,
    hint: str = "",
) -> str:
    """Return a message: what failed, what the store said, what to do (``hint``, or what is usual)."""
    said = " ".join(str(part) for part in (status, code) if part)
    answer = f"the store answered {said}" if said else "no answer from the store"
    what = f"{operation} of {key!r}" if key else operation
    parts = [f"{what} failed: {answer}" + (f" ({detail})" if detail else ""), hint or advice(kind, code)]
    return "; ".join(part for part in parts if part)


def no_listing_message(reason: str) -> str:
    """Return what to say of a listing's answer that is none."""
    return f"the answer is no listing of the bucket ({reason}): is something between here and the store?"
