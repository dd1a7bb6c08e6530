"""botocore's exceptions in our words, for boto3 and for s3fs, which wraps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from remote_ckpt.errors import (
    AccessDeniedError,
    RemoteCkptError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from remote_ckpt.store.credentials import HOW_TO_SIGN
from remote_ckpt.store.http_errors import describe, error_type, reach_advice
from remote_ckpt.url import redact_url


def translate_answer(
    response: Mapping[str, Any], *, operation: str, url: str, key: str | None = None
) -> RemoteCkptError:
    """Return our error for the ``response`` of a botocore ``ClientError``."""
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    said = response.get("Error", {})
    code = str(said.get("Code", ""))
    if code.isdigit():  # answers to HEAD have no body: botocore gives the status as the code
        status, code = status or int(code), ""
    kind = error_type(status, code or None, operation=operation)
    detail = redact_url(str(said.get("Message", "")))[:300]
    message = describe(kind, operation=operation, key=key, status=status, code=code or None, detail=detail)
    return kind(message, url=url, key=key, operation=operation)


def translate_client_side(
    error: Exception, *, operation: str, url: str, key: str | None = None
) -> StoreError:
    """Return our error for a botocore error that no answer caused: network, time-out, credentials."""
    kinds: dict[str, type[StoreError]] = {
        **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError"), AccessDeniedError),
        **dict.fromkeys(("TokenRetrievalError", "CredentialRetrievalError"), AccessDeniedError),
        **dict.fromkeys(("SSOTokenLoadError", "UnauthorizedSSOTokenError"), AccessDeniedError),
        **dict.fromkeys(("ReadTimeoutError", "ConnectTimeoutError"), StoreTimeoutError),
        "ParamValidationError": StoreError,
    }
    kind = kinds.get(type(error).__name__, StoreUnavailableError)
    detail = redact_url(str(error))[:300]
    hint = _hint(error, url)
    message = describe(kind, operation=operation, key=key, status=None, code=None, detail=detail, hint=hint)
    return kind(message, url=url, key=key, operation=operation)


def _hint(error: Exception, url: str) -> str:
    name = type(error).__name__
    if name == "NoCredentialsError":
        return HOW_TO_SIGN["s3"]
    # aiohttp's, of a web server, names no scheme: the URL does.
    is_unreached = name in ("EndpointConnectionError", "SSLError") or name.startswith("ClientConnector")
    return reach_advice(f"{error} {url}") if is_unreached else ""


@contextmanager
def boto_translated(operation: str, *, url: str, key: str | None = None) -> Iterator[None]:
    """Raise what boto3 raises inside as our errors."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise translate_answer(error.response, operation=operation, url=url, key=key) from error
    except (BotoCoreError, Boto3Error) as error:
        raise translate_client_side(error, operation=operation, url=url, key=key) from error
