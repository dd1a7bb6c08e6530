"""Checks of storage options that both transports make before a client sees them.

botocore repeats a malformed endpoint, secrets and all, in its errors; obstore panics on some. So the option
is named here, never its value. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from remote_ckpt.errors import ConfigError

_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", re.ASCII)
_MAPPINGS: Final = ("client_kwargs", "config_kwargs", "s3_additional_kwargs", "client_options")


def check_mappings(options: Mapping[str, Any]) -> None:
    """Raise ConfigError where options that hold others are no mappings."""
    boto_config = options.get("config_kwargs")
    nested = {"config_kwargs['s3']": boto_config.get("s3")} if isinstance(boto_config, Mapping) else {}
    for name, found in {**{name: options.get(name) for name in _MAPPINGS}, **nested}.items():
        if found is not None and not isinstance(found, Mapping):
            raise ConfigError(f"the option {name} must be a mapping, not {type(found).__name__}")


def check_endpoint(endpoint: object, *, option: str) -> str:
    """Return an endpoint without its last slash, or raise ConfigError that names the option.

    Args:
        endpoint: ``http://`` or ``https://``, a host, perhaps a port and a path; no credentials.
        option: The option or environment variable that holds it.
    """
    reason = _endpoint_fault(endpoint) if isinstance(endpoint, str) else "is no text"
    if reason:
        raise ConfigError(f"the endpoint given by {option} {reason}")
    return str(endpoint).rstrip("/")


def _endpoint_fault(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname or "", parts.port  # asking for the port checks it
    except ValueError:
        return "has a malformed host or port"
    if parts.scheme not in ("http", "https"):
        return "must start with http:// or https://"
    if "@" in parts.netloc:
        return "must not contain credentials: give key and secret as options of their own"
    if parts.query or parts.fragment or re.search(r"\s", endpoint):
        return "must end with its path"
    return "" if _HOST.fullmatch(host) else "has no valid host"
