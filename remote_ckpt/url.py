"""Where checkpoints are: parsing, joining, showing and handing out of paths and URLs.

Nothing here touches a file system or a network, except that a local path with ``..`` is resolved.

Object keys are taken literally: ``%20``, ``+``, ``#``, ``?`` and letters outside ASCII stand for
themselves, as they do in fsspec and in the stores' own tools. Windows paths are not supported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from remote_ckpt.errors import MissingDependencyError, UrlError

if TYPE_CHECKING:
    from upath import UPath

_SCHEMES: Final = {
    "file": "file",
    "local": "file",
    "memory": "memory",
    "s3": "s3",
    "s3a": "s3",
    "s3n": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
}
_BUCKET_SCHEMES: Final = frozenset({"s3", "gs", "az"})

# One slash is enough: pathlib turns "s3://bucket" into "s3:/bucket".
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):/(?P<rest>.*)", re.DOTALL)
_CHAINED: Final = re.compile(r"[A-Za-z0-9+.-]+::[A-Za-z0-9+.:-]*:/")
_BUCKET: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")
_NAME: Final = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,254}")
_STEP: Final = re.compile(r"0|[1-9][0-9]*", re.ASCII)
# Greedy up to the last "@": the secret keys of AWS contain slashes.
_USER_INFO: Final = re.compile(r"(:/{1,2})(?!/)(?:[^/]*:.*@|[^/@]*@)", re.DOTALL)
_SECRET_PARAMETER: Final = re.compile(
    r"(?i)([?&;](?:x-amz-[a-z-]+|x-goog-[a-z-]+|awsaccesskeyid|googleaccessid|[a-z_-]*"
    r"(?:sig|signature|token|secret|passw(?:or)?d|pwd|key|credentials?|delegation|auth|authorization))=)"
    r"[^&#]*"
)


@dataclass(frozen=True, slots=True, repr=False)
class Location:
    """A place that can hold a checkpoint, or a run's checkpoints.

    Args:
        scheme: ``"file"``, ``"memory"``, ``"s3"``, ``"gs"``, ``"az"`` or another fsspec protocol.
        bucket: Bucket, container or host; empty for local and memory.
        path: Local: an absolute path. Else the key prefix without outer slashes, possibly empty.
        options: Storage options that a ``UPath`` or the URL carried. They may be secret: never shown.
    """

    scheme: str
    bucket: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def __repr__(self) -> str:
        return f"Location({self.url!r})"

    @property
    def is_local(self) -> bool:
        """Whether this is a path of the local file system."""
        return self.scheme == "file"

    @property
    def url(self) -> str:
        """The redacted URL, or the plain path of a local location."""
        return self.path if self.is_local else redact_url(self.address)

    @property
    def address(self) -> str:
        """The URL with nothing left out, for the driver only: it may contain a signature."""
        return f"{self.scheme}://" + "/".join(part for part in (self.bucket, self.path) if part)

    @property
    def name(self) -> str:
        """The last part of the path; empty at a bucket's (or the file system's) root."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The location one level up; raises UrlError at the root."""
        if not self.name:
            raise UrlError(f"{self.url!r} has no parent", url=self.url)
        parent = self.path.rpartition("/")[0]
        return replace(self, path=parent or "/" if self.is_local else parent)

    def join(self, name: str) -> Location:
        """Return the location of ``name`` (one or more parts) below this one; raises UrlError for ``..``."""
        parts = _split_key(name, url=self.url)
        if not parts or name.startswith("/"):
            raise UrlError(f"{redact_url(name)!r} cannot be joined to {self.url!r}", url=self.url)
        return replace(self, path="/".join([self.path.rstrip("/"), *parts] if self.path else parts))

    def split(self) -> tuple[Location, str]:
        """Return the run's root and the checkpoint's name.

        Raises:
            UrlError: This is a bucket's root, or its last part is no name for a checkpoint.
        """
        if not self.name:
            raise UrlError(f"{self.url!r} names no checkpoint: add a name below it", url=self.url)
        return self.parent, check_name(self.name)


def parse_location(path: Location | str | os.PathLike[str] | UPath) -> Location:
    """Return the location that a path, a URL or a ``UPath`` names.

    Args:
        path: A local path (``~`` is expanded), ``file://``, ``s3://`` (``s3a``), ``gs://`` (``gcs``),
            ``az://`` (``abfs``), ``memory://`` or any URL that fsspec knows. A ``pathlib`` object made
            from a URL works: the slash that it loses is put back.

    Raises:
        UrlError: Empty, unknown scheme, missing or malformed bucket, ``..`` in a URL, credentials in
            a URL (which the message does not repeat), a chain of file systems.
    """
    if isinstance(path, Location):
        return path
    if _is_upath(path):
        return _parse_upath(path)
    text = os.fspath(cast("str | os.PathLike[str]", path))
    if not isinstance(text, str) or not text or "\0" in text:
        raise UrlError("a path or URL must be a non-empty str without NUL characters")
    if _CHAINED.match(text):
        raise UrlError("chained file systems (like simplecache::s3://) are not supported: give the plain URL")
    match = _URL.match(text)
    return _parse_url(match["scheme"].lower(), match["rest"]) if match else _local(text)


def to_path(location: Location) -> Path | UPath:
    """Return what callers get: ``Path`` for local locations, else a ``UPath`` that carries the options.

    Raises:
        MissingDependencyError: The location is remote and the extra ``upath`` is not installed.
    """
    if location.is_local:
        return Path(location.path)
    try:
        from upath import UPath
    except ImportError as error:
        raise MissingDependencyError(
            "remote paths are handed out as UPath: pip install 'remote-ckpt[upath]'", url=location.url
        ) from error
    remote: UPath = UPath(location.address, **location.options)
    return remote


def redact_url(url: str) -> str:
    """Return the URL with user info and signature parameters replaced by ``***``."""
    return _SECRET_PARAMETER.sub(r"\1***", _USER_INFO.sub(r"\1***@", url))


def check_name(name: str) -> str:
    """Return ``name`` if it can name a checkpoint, else raise UrlError.

    Allowed are 1 to 255 of ``A-Z a-z 0-9 . _ = -``, not starting with a dot.
    """
    if not is_name(name):
        raise UrlError(
            f"{redact_url(name)!r} cannot name a checkpoint: "
            "use 1 to 255 of A-Z a-z 0-9 . _ = - and no leading dot"
        )
    return name


def parse_step(name: str) -> int | None:
    """Return the step that a checkpoint's name stands for, or None unless it is canonical decimal digits."""
    return int(name) if len(name) <= 255 and _STEP.fullmatch(name) else None


def is_name(text: str) -> bool:
    """Whether a text can name a checkpoint."""
    return _NAME.fullmatch(text) is not None


def listing_order(name: str) -> tuple[bool, int, str]:
    """Return what to sort names by: steps by number, then the named ones by name."""
    step = parse_step(name)
    return step is None, step or 0, name


def _is_upath(path: object) -> bool:
    return all(hasattr(path, name) for name in ("protocol", "path", "storage_options"))


def _parse_upath(path: Any) -> Location:
    if path.protocol in ("", "file", "local"):
        return _local(path.path)
    url = path.path if "://" in path.path else f"{path.protocol}://{path.path.lstrip('/')}"
    location = parse_location(url)
    return replace(location, options={**location.options, **path.storage_options})


def _parse_url(scheme: str, rest: str) -> Location:
    kind = _SCHEMES.get(scheme, scheme)
    if kind == "file":
        return _parse_file_url(rest)
    if kind not in _SCHEMES:
        _check_fsspec_scheme(scheme, rest)
    rest = rest.removeprefix("/")
    if kind == "memory":
        return Location(kind, "", "/".join(_split_key(rest, url=f"memory://{rest}")))
    head, _, tail = rest.partition("/")
    if kind in _BUCKET_SCHEMES:
        return _parse_bucket_url(kind, head, tail)
    if re.search(r":.*@", head):
        raise _credentials_error(kind)
    return Location(kind, head, "/".join(_split_key(tail, url=f"{kind}://{head}/{tail}")))


def _parse_bucket_url(scheme: str, bucket: str, key: str) -> Location:
    options = {}
    if scheme == "az" and (match := re.fullmatch(r"([^@:]+)@([a-z0-9]+)\.(?:dfs|blob)\.[a-z0-9.]+", bucket)):
        bucket, options["account_name"] = match.groups()  # abfss://container@account.dfs.core.windows.net
    if "@" in bucket or ":" in bucket:
        raise _credentials_error(scheme)
    if not _BUCKET.fullmatch(bucket):
        what = f"the bucket {redact_url(bucket)!r} is not a valid name" if bucket else "the bucket is missing"
        raise UrlError(f"{what}: expected {scheme}://bucket/prefix")
    return Location(scheme, bucket, "/".join(_split_key(key, url=f"{scheme}://{bucket}/{key}")), options)


def _credentials_error(scheme: str) -> UrlError:
    return UrlError(
        f"a {scheme}:// URL must not contain credentials, nor '@' or ':' in its bucket: "
        "pass them as storage_options or in the environment"
    )


def _check_fsspec_scheme(scheme: str, rest: str) -> None:
    from fsspec.registry import known_implementations, registry

    if scheme not in {*_SCHEMES, *known_implementations, *registry}:
        url = redact_url(f"{scheme}:/{rest}")
        raise UrlError(
            f"unknown scheme {scheme!r} in {url!r}: use a local path, s3://, gs://, az://, memory:// or any "
            "installed fsspec protocol. A local path with a colon can be written as ./name:/...",
            url=url,
        )


def _parse_file_url(rest: str) -> Location:
    # "rest" follows "file:/". A host can be there only when a second slash follows.
    host, slash, tail = rest[1:].partition("/") if rest.startswith("/") else ("", "/", rest)
    if tail.startswith("~") and host in ("", "localhost"):
        return _local(tail)
    if host.startswith("~") or host == ".":
        return _local(f"{host}{slash}{tail}")
    if "@" in host:
        raise _credentials_error("file")
    if host not in ("", "localhost"):
        host = redact_url(host)
        raise UrlError(f"file://{host}/ names a host: write file:///{host}/... for an absolute path")
    return _local(f"/{tail}")


def _local(path: str) -> Location:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UrlError(f"{redact_url(path)!r} names the home of an unknown user: write ./~name for a folder")
    parts = expanded.split("/")
    for part in parts:
        if part.endswith(":") and part[:-1].lower() in _SCHEMES:
            raise UrlError(
                f"{redact_url(path)!r} looks like a URL that pathlib made a local path of: pass it as str"
            )
    if ".." in parts:
        head, name = os.path.split(expanded.rstrip("/"))
        expanded = (
            os.path.realpath(expanded) if name == ".." else os.path.join(os.path.realpath(head or "."), name)
        )
    # POSIX lets two leading slashes mean something else; they never do on the systems we run on.
    return Location("file", "", "/" + os.path.abspath(expanded).lstrip("/"))


_UNSAFE_IN_KEYS = re.compile(r"[\x00-\x1f\x7f\\]")
"""Servers and clients disagree on these: SeaweedFS stores ``a\\b`` as ``a/b``, others refuse deletes."""


def _split_key(key: str, *, url: str) -> list[str]:
    parts = [part for part in key.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UrlError(f"'..' is not allowed in {redact_url(url)!r}")
    if _UNSAFE_IN_KEYS.search(key):
        raise UrlError(f"control characters and backslashes are not allowed in {redact_url(url)!r}")
    return parts
