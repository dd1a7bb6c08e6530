"""AWS credentials in the order in which boto3 looks for them, refreshed for as long as a job runs.

1. ``key`` and ``secret`` of the storage options; 2. an explicit ``profile``; 3. ``AWS_ACCESS_KEY_ID`` and
its companions; 4. botocore's chain: ``AWS_PROFILE``, shared files, SSO, web identity (IRSA), container
and instance roles. Without botocore only S3's directory buckets can do: obstore looks for roles itself.

Static keys are handed over as a provider too: obstore would mix a key from the options with a session
token from the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Final, TypeAlias

from remote_ckpt.errors import AccessDeniedError, ConfigError, MissingDependencyError

CredentialProvider: TypeAlias = Callable[[], dict[str, Any]]

# botocore renews credentials 10 minutes before they end (mandatory refresh), so those it hands out
# live at least that long; asking it again sooner never uses an expired token.
_REUSE: Final = timedelta(minutes=8)


HOW_TO_SIGN: Final = {
    "s3": "give key and secret, set AWS_ACCESS_KEY_ID or a profile, or pass anon=True for a public bucket",
    "gs": "give token (a key file, or 'anon' for a public bucket) or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "give account_name, and account_key or sas_token (or anon=True for a public container), or a "
    "connection_string, or set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""What to do where a store of this scheme has no credentials to sign with."""


@dataclass(frozen=True, slots=True)
class StaticCredentials:
    """One key pair, with a session token or without."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)

    def __call__(self) -> dict[str, Any]:
        return {
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "token": self.token,
            "expires_at": None,
        }


@dataclass(frozen=True, slots=True)
class BotocoreCredentials:
    """Whatever botocore's chain found; botocore renews it."""

    credentials: Any = field(repr=False)

    @property
    def is_role(self) -> bool:
        """Whether they end by themselves, and botocore asks for others before."""
        return hasattr(self.credentials, "refresh_needed")

    def __call__(self) -> dict[str, Any]:
        frozen = self.credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + _REUSE,
        }


@dataclass(frozen=True, slots=True)
class AwsIdentity:
    """Credentials, and what the profile that holds them says about the store."""

    provider: CredentialProvider | None
    region: str | None = None
    endpoint_url: str | None = None


def find_aws_identity(given: Mapping[str, Any], environ: Mapping[str, str]) -> AwsIdentity:
    """Return the credentials to use.

    Args:
        given: Options ``access_key_id``, ``secret_access_key``, ``session_token``, ``profile``.
        environ: The process's environment.

    Raises:
        ConfigError: Half a key pair, or a profile that does not exist.
        MissingDependencyError: A profile is asked for and botocore is not installed.
        AccessDeniedError: botocore's chain found nothing.
    """
    profile = given.get("profile")
    static = _static(given, "storage_options") or (
        None if profile else _static(_from(environ), "the environment")
    )
    if static is not None:
        return AwsIdentity(static)
    return _from_botocore(profile or environ.get("AWS_PROFILE"))


def current_keys(provider: CredentialProvider | None) -> Mapping[str, Any] | None:
    """Return the keys that a provider hands out now; None for those of a role, which botocore renews itself.

    A new session of a role has new keys each time: that they differ says nothing there.
    """
    if provider is None or (isinstance(provider, BotocoreCredentials) and provider.is_role):
        return None
    return {name: value for name, value in provider().items() if name != "expires_at"}


def _from(environ: Mapping[str, str]) -> Mapping[str, str | None]:
    return {
        "access_key_id": environ.get("AWS_ACCESS_KEY_ID"),
        "secret_access_key": environ.get("AWS_SECRET_ACCESS_KEY"),
        "session_token": environ.get("AWS_SESSION_TOKEN") or environ.get("AWS_TOKEN"),
    }


def _static(given: Mapping[str, Any], where: str) -> StaticCredentials | None:
    key, secret = given.get("access_key_id"), given.get("secret_access_key")
    if not key and not secret:
        return None
    if not key or not secret:
        raise ConfigError(f"{where} has only one of access key and secret key: give both")
    if not all(isinstance(text, str) for text in (key, secret, given.get("session_token") or "")):
        raise ConfigError(f"access key, secret key and token in {where} must be text")
    return StaticCredentials(key, secret, given.get("session_token"))


def _from_botocore(profile: str | None) -> AwsIdentity:
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError as error:
        if profile is None:
            return AwsIdentity(None)
        raise MissingDependencyError("AWS profiles need boto3: pip install 'remote-ckpt[aws]'") from error
    session = botocore.session.Session(profile=profile)
    try:
        settings, credentials = session.get_scoped_config(), session.get_credentials()
    except botocore.exceptions.ProfileNotFound as error:
        raise ConfigError(f"the AWS profile {profile!r} does not exist") from error
    if credentials is None:
        raise AccessDeniedError(f"no AWS credentials were found: {HOW_TO_SIGN['s3']}")
    return AwsIdentity(BotocoreCredentials(credentials), settings.get("region"), settings.get("endpoint_url"))
