"""Locations: what people type, what is refused, what is shown and what is handed out."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from remote_ckpt.errors import MissingDependencyError, UrlError
from remote_ckpt.url import Location, check_name, parse_location, parse_step, redact_url, to_path

HOME = os.path.expanduser("~")


class OwnPath:
    """A path-like object of somebody else's."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return self._path


class TestParsing:
    @pytest.mark.parametrize(
        ("path", "scheme", "bucket", "rest"),
        [
            ("s3://bucket/run/ckpt", "s3", "bucket", "run/ckpt"),
            ("s3://bucket/run/ckpt/", "s3", "bucket", "run/ckpt"),
            ("s3://bucket//run/./ckpt//", "s3", "bucket", "run/ckpt"),
            ("s3://bucket", "s3", "bucket", ""),
            ("s3://bucket/", "s3", "bucket", ""),
            ("S3://bucket/Run", "s3", "bucket", "Run"),
            ("s3a://bucket/run", "s3", "bucket", "run"),
            ("gs://bucket/run", "gs", "bucket", "run"),
            ("gcs://bucket/run", "gs", "bucket", "run"),
            ("az://container/run", "az", "container", "run"),
            ("abfs://container/run", "az", "container", "run"),
            ("memory://name/run", "memory", "", "name/run"),
            ("memory://", "memory", "", ""),
            ("sftp://host:22/run", "sftp", "host:22", "run"),
            ("/data/run", "file", "", "/data/run"),
            ("//data//run/", "file", "", "/data/run"),
            ("file:///data/run", "file", "", "/data/run"),
            ("file://localhost/data/run", "file", "", "/data/run"),
            ("local:///data/run", "file", "", "/data/run"),
            ("/", "file", "", "/"),
            ("run/ckpt", "file", "", f"{os.getcwd()}/run/ckpt"),
            ("~/ckpt", "file", "", f"{HOME}/ckpt"),
            ("~", "file", "", HOME),
            ("file://~/ckpt", "file", "", f"{HOME}/ckpt"),
            ("file://./ckpt", "file", "", f"{os.getcwd()}/ckpt"),
        ],
    )
    def test_each_form_names_its_place(self, path: str, scheme: str, bucket: str, rest: str) -> None:
        expected = Location(scheme, bucket, rest)
        assert parse_location(path) == expected
        assert parse_location(OwnPath(path)) == expected

    @pytest.mark.parametrize(
        "url",
        [
            "s3://bucket/run",
            "gs://bucket/run",
            "az://c/run",
            "memory://name/run",
            "file:///data/run",
            "file://~/run",
        ],
    )
    def test_a_slash_that_pathlib_took_is_put_back(self, url: str) -> None:
        assert parse_location(Path(url)) == parse_location(str(Path(url))) == parse_location(url)

    def test_a_collapsed_scheme_never_becomes_a_local_folder(self) -> None:
        for path in (Path("s3://bucket/run").absolute(), "../s3:/bucket", "/data/gs:/bucket"):
            with pytest.raises(UrlError, match="pass it as str"):
                parse_location(path)

    def test_special_characters_in_a_key_stand_for_themselves(self) -> None:
        key = "a b+c#d%20e?f=(g),h@é:x"
        location = parse_location(f"s3://bucket/{key}")
        assert (location.path, location.url) == (key, f"s3://bucket/{key}")
        assert parse_location(f"/data/{key}").path == f"/data/{key}"

    def test_an_azure_account_in_the_url_becomes_an_option(self) -> None:
        location = parse_location("abfss://container@account.dfs.core.windows.net/run")
        assert (location.url, location.options) == ("az://container/run", {"account_name": "account"})

    def test_dots_in_a_local_path_are_resolved_as_the_system_does(self, tmp_path: Path) -> None:
        (tmp_path / "real" / "deep").mkdir(parents=True)
        (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
        assert parse_location(f"{tmp_path}/link/../ckpt").path == f"{tmp_path}/real/ckpt"
        assert parse_location(f"{tmp_path}/link/..").path == f"{tmp_path}/real"
        assert parse_location(f"{tmp_path}/link/ckpt").path == f"{tmp_path}/link/ckpt"

    def test_a_location_is_passed_through(self) -> None:
        location = parse_location("s3://bucket/run")
        assert parse_location(location) is location


class TestUPath:
    @pytest.mark.parametrize(
        "url", ["s3://bucket/run/ckpt", "gs://bucket/run", "az://c/run", "memory://name/run"]
    )
    def test_it_names_the_same_place_as_its_url(self, url: str) -> None:
        assert parse_location(UPath(url)) == parse_location(url)

    def test_it_carries_its_options_and_gives_them_back(self) -> None:
        options: dict[str, Any] = {"key": "id", "secret": "hush", "client_kwargs": {"region_name": "x"}}
        location = parse_location(UPath("s3://bucket/run", **options))
        assert location.options == options
        path = to_path(location.join("199"))
        assert isinstance(path, UPath)
        assert (str(path), path.name, path.storage_options) == ("s3://bucket/run/199", "199", options)
        assert parse_location(path) == location.join("199")

    def test_a_local_one_is_a_local_path(self, tmp_path: Path) -> None:
        for path in (UPath(tmp_path), UPath(f"file://{tmp_path}")):
            assert parse_location(path) == Location("file", "", str(tmp_path))

    def test_its_secrets_are_not_shown(self) -> None:
        location = parse_location(UPath("s3://bucket/run", secret="hush"))
        assert "hush" not in f"{location!r} {location} {location.url}"


class TestRefusals:
    @pytest.mark.parametrize(
        "url",
        [
            "s3://AKID:hush@bucket/run",
            "s3://AKID:hu/sh@bucket/run",
            "s3://hush@bucket/run",
            "s3:/AKID:hush@bucket/run",
            "gs://user:hush@bucket",
            "az://account:hush@container/run",
            "sftp://user:hush@host/run",
            "nonsense://user:hush@host/run",
        ],
    )
    def test_credentials_in_a_url_are_refused_and_not_repeated(self, url: str) -> None:
        with pytest.raises(UrlError) as caught:
            parse_location(url)
        assert "hush" not in str(caught.value)
        assert "AKID" not in str(caught.value)

    def test_an_unknown_scheme_is_refused_with_the_redacted_url_and_the_usual_ones(self) -> None:
        with pytest.raises(UrlError, match=r"'s4'.*s3://, gs://, az://.*any installed fsspec") as raised:
            parse_location("s4://user:pass-word@bucket/run")
        assert "'s4://***@bucket/run'" in str(raised.value)
        assert "pass-word" not in str(raised.value)
        assert "jupyter" not in str(raised.value)

    @pytest.mark.parametrize(
        ("path", "why"),
        [
            ("", "non-empty"),
            ("a\0b", "NUL"),
            (b"/data", "str"),
            ("s3://", "bucket is missing"),
            ("s3:///run", "bucket is missing"),
            ("s3://buc ket/run", "not a valid name"),
            ("s3://bucket/../run", r"'\.\.' is not allowed"),
            ("memory://name/..", r"'\.\.' is not allowed"),
            ("file://data/run", "file:///data/"),
            ("simplecache::s3://bucket/run", "chained"),
            ("~no-such-user-here/run", "unknown user"),
        ],
    )
    def test_what_cannot_work_is_refused_with_the_reason(self, path: Any, why: str) -> None:
        with pytest.raises(UrlError, match=why):
            parse_location(path)


class TestNavigation:
    @pytest.mark.parametrize("root", ["s3://bucket", "s3://bucket/run", "memory://name", "/", "/data/run"])
    def test_what_is_joined_is_split_again(self, root: str) -> None:
        location = parse_location(root)
        joined = location.join("199")
        assert joined.name == "199"
        assert joined.parent == location
        assert joined.split() == (location, "199")
        assert joined.url == root.rstrip("/") + "/199"

    def test_several_parts_are_joined_at_once(self) -> None:
        assert parse_location("s3://bucket/run").join("199/a.json").url == "s3://bucket/run/199/a.json"

    @pytest.mark.parametrize("name", ["", "..", "a/../b", "/a", "."])
    def test_joining_never_leaves_the_location(self, name: str) -> None:
        with pytest.raises(UrlError):
            parse_location("s3://bucket/run").join(name)

    @pytest.mark.parametrize("root", ["s3://bucket", "/", "memory://"])
    def test_a_root_names_no_checkpoint_and_has_no_parent(self, root: str) -> None:
        location = parse_location(root)
        with pytest.raises(UrlError, match="names no checkpoint"):
            location.split()
        with pytest.raises(UrlError, match="no parent"):
            _ = location.parent

    def test_options_survive_navigation_and_pickling(self) -> None:
        location = parse_location(UPath("s3://bucket/run", key="id"))
        for other in (location.join("1"), location.parent, pickle.loads(pickle.dumps(location))):
            assert other.options == {"key": "id"}
        assert hash(location) == hash(parse_location("s3://bucket/run"))


class TestOutput:
    def test_a_local_location_is_handed_out_as_a_path(self) -> None:
        path = to_path(parse_location("/data/run/199"))
        assert type(path) is type(Path())
        assert (path, int(path.name)) == (Path("/data/run/199"), 199)

    def test_a_remote_location_without_upath_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "upath", None)
        with pytest.raises(MissingDependencyError, match=r"remote-ckpt\[upath\]"):
            to_path(parse_location("s3://bucket/run"))
        assert to_path(parse_location("/data")) == Path("/data")

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("s3://bucket/run", "s3://bucket/run"),
            ("s3://bucket/a@b:c", "s3://bucket/a@b:c"),
            ("/data/run", "/data/run"),
            ("s3://id:hush@bucket/run", "s3://***@bucket/run"),
            ("s3://id:hu/sh@bucket/run", "s3://***@bucket/run"),
            ("sftp://user@host/run", "sftp://***@host/run"),
            (
                "https://h/k?X-Amz-Date=1&X-Amz-Signature=hush&versionId=2",
                "https://h/k?X-Amz-Date=***&X-Amz-Signature=***&versionId=2",
            ),
            ("https://h/k?sv=1&sig=hush", "https://h/k?sv=1&sig=***"),
        ],
    )
    def test_a_shown_url_has_no_secrets(self, url: str, shown: str) -> None:
        assert redact_url(url) == shown

    def test_a_signed_url_is_whole_for_the_driver_only(self) -> None:
        location = parse_location("https://host/model.pth?sig=hush")
        assert (location.address, location.url) == (
            "https://host/model.pth?sig=hush",
            "https://host/model.pth?sig=***",
        )


class TestNames:
    @pytest.mark.parametrize("name", ["199", "best", "199_keep", "a.b-c=d_E", "x" * 255, "-1", "=", "_"])
    def test_plain_names_are_accepted(self, name: str) -> None:
        assert check_name(name) == name

    @pytest.mark.parametrize(
        "name", ["", ".", "..", ".hidden", "a/b", "a b", "é", "a\n", "1\n", "x" * 256, "a:b", "٣"]
    )
    def test_other_names_are_refused(self, name: str) -> None:
        with pytest.raises(UrlError, match="cannot name a checkpoint"):
            check_name(name)

    @pytest.mark.parametrize(("name", "step"), [("0", 0), ("7", 7), ("199", 199), ("9" * 30, int("9" * 30))])
    def test_canonical_digits_are_steps(self, name: str, step: int) -> None:
        assert parse_step(name) == step

    @pytest.mark.parametrize(
        "name", ["007", "00", "1_000", "-1", "+1", " 1", "1\n", "٣", "1e3", "1.0", "best", "199_keep", ""]
    )
    def test_nothing_else_is_a_step(self, name: str) -> None:
        assert parse_step(name) is None


SIGNED = [
    "s3://bucket/run/199?X-Amz-Signature=s3cret",
    "s3://bucket?X-Amz-Signature=s3cret",
    "https://bucket.s3.amazonaws.com/run/199?X-Amz-Credential=s3cret&X-Amz-Signature=s3cret",
    "s3://key:s3cret@bucket/run/1",
    "s3://key:s3cret/slash@bucket/run/1",
    "s3:/key:s3cret@bucket/run/1",
    "az://c/run/1?sig=s3cret",
    "abfss://c@acc.dfs.core.windows.net/x/1?sv=1&sig=s3cret",
    "https://u:s3cret@host/x/1",
    "ftp://u:s3cret@host/x/1",
    "file://u:s3cret@host/x",
    "file://host?sig=s3cret/x",
    "s3://bucket/../run?sig=s3cret",
    "/tmp/s3:/key:s3cret@b/x",
    "simplecache::s3://k:s3cret@b/x",
    "foo://u:s3cret@h/x",
    "webhdfs://h/x/1?delegation=s3cret",
    "~nobody-of-that-name?token=s3cret",
]


@pytest.mark.parametrize("url", SIGNED)
def test_no_message_repeats_a_secret_of_a_url(url: str) -> None:
    def use() -> None:
        location = parse_location(url)
        assert "s3cret" not in repr(location)
        location.split()

    with pytest.raises(UrlError) as caught:
        use()
    assert "s3cret" not in "".join(traceback.format_exception(caught.value)) + repr(caught.value)


def test_the_repr_of_a_location_is_its_redacted_url() -> None:
    assert repr(parse_location("s3://bucket/run?sig=s3cret")) == "Location('s3://bucket/run?sig=***')"
