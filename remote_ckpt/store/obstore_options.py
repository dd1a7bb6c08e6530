"""The options people already know, as settings of obstore's clients. Pure: opens nothing but a CA file.

Options are those of s3fs (``key``, ``secret``, ``endpoint_url``, ``client_kwargs``, ...), gcsfs and adlfs, or
obstore's own names (https://developmentseed.org/obstore/latest/api/store/aws/). An unknown one is refused by
name. What only tunes a client that is not used here (block sizes, caches, its own retries) is ignored.

How uploads are protected on the wire, unless ``unsigned_payload`` or ``checksum_algorithm`` say otherwise:

================= ================================== ===========================
endpoint          protection                         client CPU for 1 GiB (measured)
================= ================================== ===========================
AWS, https        TLS, and CRC64NVME kept by S3      0.3 s
other, https      TLS                                0.2 s
any, http         signed SHA-256 of each part        1.0 s
================= ================================== ===========================
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from remote_ckpt.errors import ConfigError
from remote_ckpt.store.credentials import AwsIdentity, CredentialProvider, find_aws_identity
from remote_ckpt.store.option_checks import check_endpoint, check_mappings


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """What a native client is built from.

    Args:
        config: Settings of the store's own kind.
        client_options: Settings of the HTTP client (TLS, proxies).
        provider: Callable that returns credentials, or None where obstore looks for them itself.
        endpoint_url: The endpoint, or None for the provider's own.
        verify: File of the CA to trust, False to trust every certificate, None for the system's roots.
    """

    config: Mapping[str, Any] = field(repr=False)
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    provider: CredentialProvider | None = field(default=None, repr=False)
    endpoint_url: str | None = None
    verify: str | bool | None = None


ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_IGNORED: Final = frozenset(
    {
        *("default_block_size", "default_fill_cache", "default_cache_type", "fixed_upload_size", "blocksize"),
        *("max_concurrency", "cache_regions", "use_listings_cache", "listings_expiry_time", "max_paths"),
        *("skip_instance_cache", "project", "consistency", "local_expiry_check"),
    }
)
_IGNORED_BOTO_CONFIG: Final = frozenset(
    {
        *("retries", "max_pool_connections", "connect_timeout", "read_timeout", "tcp_keepalive"),
        *("request_checksum_calculation", "response_checksum_validation", "s3"),
    }
)
_S3_ALIASES: Final = {
    "key": "access_key_id",
    "username": "access_key_id",
    "secret": "secret_access_key",
    "password": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
    "requester_pays": "request_payer",
    "endpoint": "endpoint_url",
    "region_name": "region",
    "default_region": "region",
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
_S3_OURS: Final = frozenset(
    {
        *("access_key_id", "secret_access_key", "session_token", "profile"),
        *("endpoint_url", "use_ssl", "verify", "addressing_style", "client_options"),
    }
)
_S3_NATIVE: Final = frozenset(
    {
        *("region", "skip_signature", "request_payer", "unsigned_payload", "checksum_algorithm"),
        *("virtual_hosted_style_request", "s3_express", "disable_bulk_delete", "disable_tagging"),
        *("conditional_put", "copy_if_not_exists", "imdsv1_fallback", "metadata_endpoint", "sts_endpoint"),
        *("role_arn", "role_session_name", "web_identity_token_file"),
        *("container_credentials_relative_uri", "container_credentials_full_uri"),
        "container_authorization_token_file",
        *("server_side_encryption", "sse_bucket_key_enabled", "sse_customer_key_base64", "sse_kms_key_id"),
    }
)
_GCS_NATIVE: Final = frozenset(
    {
        *("service_account", "service_account_key", "application_credentials", "base_url"),
        *("bearer_token", "skip_signature"),
    }
)
_AZURE_NATIVE: Final = frozenset(
    {
        *("account_name", "account_key", "client_id", "client_secret", "tenant_id", "authority_host"),
        *("sas_key", "token", "use_emulator", "endpoint", "msi_endpoint", "object_id", "msi_resource_id"),
        *("federated_token_file", "use_azure_cli", "skip_signature", "disable_tagging", "encryption_key"),
        *("use_fabric_endpoint", "credential_type"),
    }
)
_AZURE_ALIASES: Final = {"sas_token": "sas_key", "credential": "sas_key", "anon": "skip_signature"}
_AZURE_CONNECTION: Final = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}


def plan_s3(bucket: str, options: Mapping[str, Any], environ: Mapping[str, str]) -> DriverSettings:
    """Return the settings for S3 or a compatible store.

    Args:
        bucket: The bucket, needed where its name is part of the endpoint's host.
        options: s3fs-style ``storage_options``; they win over the environment.
        environ: The process's environment (``AWS_*``).

    Raises:
        ConfigError: An option that is not known, or contradictory ones.
        AccessDeniedError: No credentials anywhere, and ``anon`` was not given.
    """
    given = _flat_s3(options)
    _refuse_unknown(given, _S3_OURS | _S3_NATIVE)
    identity = AwsIdentity(None) if given.get("skip_signature") else find_aws_identity(given, environ)
    region = given.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    region = region or identity.region or "us-east-1"
    endpoint = _s3_endpoint(given, environ, region) or _profile_endpoint(identity)
    config = _payload_protection(endpoint, environ)
    config.update({name: value for name, value in given.items() if name in _S3_NATIVE})
    config.update(region=region, virtual_hosted_style_request=_is_virtual_hosted(given))
    if endpoint:
        # This name also wins over AWS_ENDPOINT_URL_S3, which obstore prefers to "endpoint".
        config["aws_endpoint_url_s3"] = (
            _bucket_host(endpoint, bucket) if _is_virtual_hosted(given) else endpoint
        )
    verify = given.get("verify", environ.get("AWS_CA_BUNDLE"))
    trust = {**_allow_http(endpoint), **_trust(verify), **given.get("client_options", {})}
    return DriverSettings(config, trust, identity.provider, endpoint, verify)


def plan_gcs(options: Mapping[str, Any]) -> DriverSettings:
    """Return the settings for Google Cloud Storage from gcsfs-style options (``token``, ``endpoint_url``)."""
    check_mappings(options)
    given = _without_ignored(options)
    given.update(_gcs_token(given.pop("token", None)))
    if endpoint := given.pop("endpoint_url", None):
        given["base_url"] = endpoint
    client_options = given.pop("client_options", {})
    _refuse_unknown(given, _GCS_NATIVE)
    endpoint = _given_endpoint(given, "base_url")
    return DriverSettings(given, {**_allow_http(endpoint), **client_options}, endpoint_url=endpoint)


def plan_azure(options: Mapping[str, Any]) -> DriverSettings:
    """Return the settings for Azure Blob Storage from adlfs-style options (``account_name``, ...)."""
    check_mappings(options)
    given = {_AZURE_ALIASES.get(name, name): value for name, value in _without_ignored(options).items()}
    given.update(_azure_connection(given.pop("connection_string", "")))
    client_options = given.pop("client_options", {})
    _refuse_unknown(given, _AZURE_NATIVE)
    endpoint = _given_endpoint(given, "endpoint")
    return DriverSettings(given, {**_allow_http(endpoint), **client_options}, endpoint_url=endpoint)


def _given_endpoint(given: Mapping[str, Any], name: str) -> str | None:
    return check_endpoint(given[name], option=name) if given.get(name) else None


def _without_ignored(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and name not in _IGNORED}


def _refuse_unknown(given: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"unknown storage option {', '.join(unknown)}; known are: {', '.join(sorted(known))}"
        )


def _flat_s3(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options, those in nested mappings too, under one name each; top-level ones win."""
    check_mappings(options)
    top = _without_ignored(options)
    boto_config = top.pop("config_kwargs", {})
    _refuse_unknown(boto_config, _IGNORED_BOTO_CONFIG)
    nested = {
        **(boto_config.get("s3") or {}),
        **_without_ignored(top.pop("s3_additional_kwargs", {})),
        **_without_ignored(top.pop("client_kwargs", {})),
    }
    return {_s3_name(name): value for name, value in {**nested, **top}.items()}


def _s3_name(name: str) -> str:
    plain = name.removeprefix("aws_")
    return _S3_ALIASES.get(plain, plain)


def _s3_endpoint(given: Mapping[str, Any], environ: Mapping[str, str], region: str) -> str | None:
    sources = {"endpoint_url": given, **dict.fromkeys(ENDPOINT_VARIABLES, environ)}
    for name, source in sources.items():
        if source.get(name):
            return check_endpoint(source[name], option=name)
    return f"http://s3.{region}.amazonaws.com" if given.get("use_ssl") is False else None


def _profile_endpoint(identity: AwsIdentity) -> str | None:
    found = identity.endpoint_url
    return check_endpoint(found, option="the profile's endpoint_url") if found else None


def _is_aws(endpoint: str | None) -> bool:
    host = urlsplit(endpoint).hostname or "" if endpoint else "amazonaws.com"
    return bool(re.search(r"(^|\.)amazonaws\.com(\.cn)?$", host))


def _payload_protection(endpoint: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    if "AWS_UNSIGNED_PAYLOAD" in environ or "AWS_CHECKSUM_ALGORITHM" in environ:
        return {}
    if endpoint is not None and endpoint.startswith("http://"):
        return {}
    checksum = {"checksum_algorithm": "CRC64NVME"} if _is_aws(endpoint) else {}
    return {"unsigned_payload": True, **checksum}


def _is_virtual_hosted(given: Mapping[str, Any]) -> bool:
    return bool(given.get("virtual_hosted_style_request")) or given.get("addressing_style") == "virtual"


def _bucket_host(endpoint: str, bucket: str) -> str:
    # Always, as botocore does: a host whose first label happens to be the bucket's name is no bucket host,
    # and requests to it would reach another bucket.
    parts = urlsplit(endpoint)
    return parts._replace(netloc=f"{bucket}.{parts.netloc}").geturl()


def _allow_http(endpoint: str | None) -> dict[str, Any]:
    return {"allow_http": True} if endpoint and endpoint.startswith("http://") else {}


def _trust(verify: str | bool | None) -> dict[str, Any]:
    if verify is False:
        return {"allow_invalid_certificates": True}
    return {"root_certificate": _read_certificate(verify)} if isinstance(verify, str) else {}


def _read_certificate(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the CA file {path!r} cannot be read: {error.strerror}") from error


def _gcs_token(token: Any) -> dict[str, Any]:
    if token in (None, "google_default", "cloud"):
        return {}
    if token == "anon":
        return {"skip_signature": True}
    if isinstance(token, Mapping):
        return {"service_account_key": json.dumps(dict(token))}
    if isinstance(token, str | Path):
        return {"application_credentials": str(token)}
    raise ConfigError("token must be a file name, a mapping, 'anon', 'cloud' or 'google_default'")


def _azure_connection(text: str) -> dict[str, Any]:
    pairs = (part.split("=", 1) for part in text.split(";") if "=" in part)
    return {_AZURE_CONNECTION[name]: value for name, value in pairs if name in _AZURE_CONNECTION}
