"""The options people know, as settings of obstore's clients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from remote_ckpt.errors import AccessDeniedError, ConfigError
from remote_ckpt.store.obstore import open_obstore_store
from remote_ckpt.store.obstore_options import DriverSettings, plan_azure, plan_gcs, plan_s3
from remote_ckpt.url import parse_location

KEYS = {"key": "AK", "secret": "s3cret"}
MINIO = "http://localhost:9000"


def plan(options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> DriverSettings:
    return plan_s3("bucket", options, environ or {})


def identity(settings: DriverSettings) -> tuple[str, str, str | None]:
    assert settings.provider is not None
    found = settings.provider()
    return found["access_key_id"], found["secret_access_key"], found["token"]


class TestCredentials:
    @pytest.mark.parametrize(
        "options",
        [
            KEYS,
            {"username": "AK", "password": "s3cret"},
            {"access_key_id": "AK", "secret_access_key": "s3cret"},
            {"client_kwargs": {"aws_access_key_id": "AK", "aws_secret_access_key": "s3cret"}},
        ],
    )
    def test_every_known_way_to_give_keys_works(self, options: Mapping[str, Any]) -> None:
        assert identity(plan(options)) == ("AK", "s3cret", None)

    def test_given_keys_are_never_mixed_with_a_token_from_the_environment(self) -> None:
        environ = {"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "x", "AWS_SESSION_TOKEN": "stale"}
        assert identity(plan(KEYS, environ)) == ("AK", "s3cret", None)
        assert identity(plan({}, environ)) == ("other", "x", "stale")

    def test_half_a_key_pair_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="only one of access key and secret key"):
            plan({"key": "AK"})
        with pytest.raises(ConfigError, match="the environment"):
            plan({}, {"AWS_SECRET_ACCESS_KEY": "s3cret"})

    def test_a_profile_of_the_shared_file_gives_keys_region_and_endpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "config").write_text(f"[profile lab]\nregion = eu-west-3\nendpoint_url = {MINIO}\n")
        (tmp_path / "credentials").write_text(
            "[lab]\naws_access_key_id = LAB\naws_secret_access_key = shared\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        for settings in (plan({"profile": "lab"}), plan({}, {"AWS_PROFILE": "lab"})):
            assert identity(settings) == ("LAB", "shared", None)
            assert (settings.config["region"], settings.endpoint_url) == ("eu-west-3", MINIO)

    def test_an_absent_profile_is_named(self) -> None:
        with pytest.raises(ConfigError, match="'nobody' does not exist"):
            plan({"profile": "nobody"})

    def test_no_credentials_at_all_says_what_to_do(self) -> None:
        with pytest.raises(AccessDeniedError, match="anon=True"):
            plan({})

    def test_anonymous_access_needs_no_credentials(self) -> None:
        settings = plan({"anon": True})
        assert (settings.provider, settings.config["skip_signature"]) == (None, True)

    def test_secrets_are_not_in_the_repr(self) -> None:
        text = repr(plan({**KEYS, "token": "t0ken"}))
        assert "s3cret" not in text
        assert "t0ken" not in text


class TestEndpointAndRegion:
    @pytest.mark.parametrize(
        ("options", "environ", "expected"),
        [
            ({}, {}, None),
            ({"endpoint_url": MINIO}, {"AWS_ENDPOINT_URL_S3": "http://other"}, MINIO),
            ({"client_kwargs": {"endpoint_url": MINIO}}, {}, MINIO),
            ({}, {"AWS_ENDPOINT_URL": MINIO}, MINIO),
            ({}, {"AWS_ENDPOINT_URL": "http://other", "AWS_ENDPOINT_URL_S3": MINIO + "/"}, MINIO),
            ({"use_ssl": False}, {"AWS_REGION": "eu-west-1"}, "http://s3.eu-west-1.amazonaws.com"),
        ],
    )
    def test_the_endpoint_is_the_nearest_one(
        self, options: Mapping[str, Any], environ: Mapping[str, str], expected: str | None
    ) -> None:
        settings = plan({**KEYS, **options}, environ)
        assert settings.endpoint_url == settings.config.get("aws_endpoint_url_s3") == expected
        assert settings.client_options.get("allow_http", False) is (expected is not None)

    @pytest.mark.parametrize(
        ("options", "environ", "expected"),
        [
            ({}, {}, "us-east-1"),
            ({}, {"AWS_DEFAULT_REGION": "a-1"}, "a-1"),
            ({}, {"AWS_DEFAULT_REGION": "a-1", "AWS_REGION": "b-2"}, "b-2"),
            ({"client_kwargs": {"region_name": "c-3"}}, {"AWS_REGION": "b-2"}, "c-3"),
        ],
    )
    def test_the_region_is_the_nearest_one(
        self, options: Mapping[str, Any], environ: Mapping[str, str], expected: str
    ) -> None:
        assert plan({**KEYS, **options}, environ).config["region"] == expected

    def test_a_host_that_begins_with_the_buckets_name_is_no_bucket_host(self) -> None:
        given = {**KEYS, "endpoint_url": "https://bucket.example.net", "virtual_hosted_style_request": True}
        assert plan(given).config["aws_endpoint_url_s3"] == "https://bucket.bucket.example.net"

    def test_the_bucket_is_in_the_path_unless_virtual_addressing_is_asked_for(self) -> None:
        assert plan({**KEYS, "endpoint_url": MINIO}).config["virtual_hosted_style_request"] is False
        options = {"endpoint_url": MINIO, "config_kwargs": {"s3": {"addressing_style": "virtual"}}}
        settings = plan({**KEYS, **options})
        assert settings.config["virtual_hosted_style_request"] is True
        assert settings.config["aws_endpoint_url_s3"] == "http://bucket.localhost:9000"

    def test_an_endpoint_without_scheme_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="http://"):
            plan({**KEYS, "endpoint_url": "localhost:9000"})

    def test_a_ca_file_is_read_and_a_missing_one_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "ca.pem").write_bytes(b"PEM")
        settings = plan({**KEYS, "client_kwargs": {"verify": str(tmp_path / "ca.pem")}})
        assert settings.client_options["root_certificate"] == b"PEM"
        assert plan({**KEYS, "client_kwargs": {"verify": False}}).client_options == {
            "allow_invalid_certificates": True
        }
        with pytest.raises(ConfigError, match=r"absent\.pem"):
            plan(KEYS, {"AWS_CA_BUNDLE": str(tmp_path / "absent.pem")})


class TestPayloadProtection:
    @pytest.mark.parametrize(
        ("endpoint", "unsigned", "checksum"),
        [
            (None, True, "CRC64NVME"),
            ("https://s3.eu-west-1.amazonaws.com", True, "CRC64NVME"),
            ("https://minio.lab", True, None),
            ("https://amazonaws.com.evil.lab", True, None),
            (MINIO, None, None),
        ],
    )
    def test_it_depends_on_the_endpoint(
        self, endpoint: str | None, unsigned: bool | None, checksum: str | None
    ) -> None:
        config = plan({**KEYS, "endpoint_url": endpoint}).config
        assert (config.get("unsigned_payload"), config.get("checksum_algorithm")) == (unsigned, checksum)

    def test_the_user_decides_where_he_says_something(self) -> None:
        assert plan({**KEYS, "endpoint_url": MINIO, "unsigned_payload": True}).config["unsigned_payload"]
        assert "unsigned_payload" not in plan(KEYS, {"AWS_UNSIGNED_PAYLOAD": "false"}).config


class TestUnknownOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"secrt": "s3cret"},
            {"client_kwargs": {"secrt": "s3cret"}},
            {"config_kwargs": {"secrt": "s3cret"}},
            {"s3_additional_kwargs": {"secrt": "s3cret"}},
        ],
    )
    def test_one_is_named_without_its_value(self, options: Mapping[str, Any]) -> None:
        with pytest.raises(ConfigError, match="unknown storage option secrt") as caught:
            plan({**KEYS, **options})
        assert "s3cret" not in str(caught.value)

    def test_what_tunes_another_client_is_ignored(self) -> None:
        tuned = {"default_block_size": 1, "config_kwargs": {"retries": {"max_attempts": 9}}, "token": None}
        assert plan({**KEYS, **tuned}).config == plan(KEYS).config

    def test_encryption_settings_are_passed_on(self) -> None:
        given = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-1"}
        config = plan({**KEYS, "s3_additional_kwargs": given}).config
        assert (config["server_side_encryption"], config["sse_kms_key_id"]) == ("aws:kms", "key-1")

    def test_gcs_and_azure_name_theirs_too(self) -> None:
        for planned in (plan_gcs, plan_azure):
            with pytest.raises(ConfigError, match="unknown storage option nonsense"):
                planned({"nonsense": 1})


class TestOtherProviders:
    def test_gcs_tokens_of_every_kind_are_understood(self) -> None:
        assert plan_gcs({"token": "anon"}).config == {"skip_signature": True}
        assert plan_gcs({"token": "/key.json"}).config == {"application_credentials": "/key.json"}
        assert plan_gcs({"token": {"type": "x"}}).config == {"service_account_key": '{"type": "x"}'}
        assert plan_gcs({"token": "google_default", "project": "p"}).config == {}
        with pytest.raises(ConfigError, match="token"):
            plan_gcs({"token": 3})

    def test_azure_connection_strings_are_taken_apart(self) -> None:
        text = (
            "DefaultEndpointsProtocol=https;AccountName=lab;AccountKey=a2V5=;BlobEndpoint=http://localhost:1"
        )
        settings = plan_azure({"connection_string": text})
        assert settings.config == {
            "account_name": "lab",
            "account_key": "a2V5=",
            "endpoint": "http://localhost:1",
        }
        assert settings.client_options == {"allow_http": True}

    @pytest.mark.parametrize(
        ("url", "options"),
        [
            ("gs://bucket/run", {"token": "anon", "endpoint_url": "http://localhost:1"}),
            ("az://container/run", {"account_name": "lab", "account_key": "a2V5"}),
        ],
    )
    def test_gcs_and_azure_open_through_the_same_adapter(self, url: str, options: dict[str, Any]) -> None:
        store = open_obstore_store(parse_location(url), storage_options=options)
        assert store.url == url
        with pytest.raises(ConfigError, match="S3 only"):
            store.open_uploads()

    def test_another_scheme_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="transport='fsspec'"):
            open_obstore_store(parse_location("sftp://host/run"))
