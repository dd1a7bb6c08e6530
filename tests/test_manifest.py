"""Manifests survive writing and reading, and nothing that is wrong with one passes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_ckpt.errors import CheckpointDamagedError, ConfigError, FormatError
from remote_ckpt.manifest import (
    Manifest,
    ObjectEntry,
    data_key,
    format_manifest,
    index_key,
    is_safe_key,
    is_save_id,
    is_token,
    manifest_key,
    new_save_id,
    new_token,
    own_key,
    parse_index_key,
    parse_manifest,
    parse_manifest_key,
    stock_metadata_key,
)

SAVE_ID = "20260131T120000Z-0123456789ab"
TOKEN = "d-0123456789abcdef"
OTHER_TOKEN = "d-fedcba9876543210"
KEY = "manifest.000003.json"
URL = "s3://bucket/run/199"


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "generation": 3,
        "save_id": SAVE_ID,
        "state": "live",
        "name": "199",
        "step": 199,
        "created_at": datetime(2026, 1, 31, 12, 0, 5, 250, tzinfo=timezone.utc),
        "committed_at": datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc),
        "world_size": 4,
        "torch_version": "2.13.0",
        "package_version": "0.1.0",
        "total_bytes": 300,
        "objects": (
            ObjectEntry(f"{TOKEN}/0.distcp", 100, 0x00C0FFEE),
            ObjectEntry(f"{TOKEN}/1.distcp", 200, 2**32 - 1),
        ),
        "index": ObjectEntry(index_key(SAVE_ID), 77, 1),
        "stock_metadata": ObjectEntry(stock_metadata_key(SAVE_ID), 88, 2),
        "pinned": True,
        "metrics": {"accuracy": 0.1 + 0.2, "loss": -1.5e-300},
        "user_metadata": {"größe": [1, None, True, {"nested": "\u2713"}], "rate": 1e-5},
        "left_out": ("model.teacher.weight", "any key / at all"),
        "superseded": (f"{OTHER_TOKEN}/0.distcp", "manifest.000002.json"),
        "content_digest": "abc",
    }
    return Manifest(**(values | changes))


def parse(data: bytes, *, key: str = KEY) -> Manifest:
    return parse_manifest(data, url=URL, key=key)


def document() -> dict[str, Any]:
    return dict(json.loads(format_manifest(manifest())))


def sealed(document: dict[str, Any]) -> bytes:
    """A document with the digest that belongs to it, as docs/format.md describes it."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**rest, "digest": "sha256:" + hashlib.sha256(canonical).hexdigest()}).encode()


class TestRoundTrip:
    def test_every_field_survives(self) -> None:
        assert parse(format_manifest(manifest())) == manifest()

    def test_a_tombstone_survives(self) -> None:
        tombstone = manifest(state="deleted", objects=(), index=None, stock_metadata=None, metrics={})
        assert parse(format_manifest(tombstone)) == tombstone

    def test_a_tombstone_may_still_name_what_it_deletes(self) -> None:
        tombstone = manifest(state="deleted", superseded=(f"{TOKEN}/0.distcp", f"{TOKEN}/1.distcp"))
        assert parse(format_manifest(tombstone)).superseded == tombstone.superseded

    def test_nothing_optional_is_needed(self) -> None:
        bare = Manifest(
            generation=1, save_id=SAVE_ID, state="live", name="best", world_size=1, package_version="",
            created_at=manifest().created_at, committed_at=manifest().created_at, total_bytes=0,
            content_digest="",
        )  # fmt: skip
        assert parse(format_manifest(bare), key="manifest.000001.json") == bare

    def test_equal_manifests_are_equal_bytes(self) -> None:
        swapped = manifest(metrics={"loss": -1.5e-300, "accuracy": 0.1 + 0.2})
        assert format_manifest(swapped) == format_manifest(manifest())

    @given(
        st.dictionaries(st.text(st.characters(codec="utf-8")), st.floats(allow_nan=False)),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(codec="utf-8")),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
            max_leaves=8,
        ),
    )  # fmt: skip
    def test_any_metrics_and_json_survive(self, metrics: dict[str, float], value: Any) -> None:
        written = manifest(metrics=metrics, user_metadata={"value": value})
        assert parse(format_manifest(written)) == written

    def test_metrics_that_are_no_numbers_in_json_survive_as_texts(self) -> None:
        data = format_manifest(manifest(metrics={"a": math.nan, "b": math.inf, "c": -math.inf}))
        assert json.loads(data)["metrics"] == {"a": "nan", "b": "inf", "c": "-inf"}
        metrics = parse(data).metrics
        assert math.isnan(metrics["a"])
        assert (metrics["b"], metrics["c"]) == (math.inf, -math.inf)

    def test_times_of_another_zone_become_utc(self) -> None:
        zone = timezone(timedelta(hours=2))
        written = manifest(created_at=datetime(2026, 1, 31, 14, 0, tzinfo=zone))
        read = parse(format_manifest(written)).created_at
        assert read == written.created_at
        assert read.utcoffset() == timedelta(0)

    def test_unknown_fields_are_kept_when_a_generation_is_carried_on(self) -> None:
        newer = document() | {"parent": {"step": 100}, "version": [1, 7]}
        read = parse(sealed(newer))
        assert read.extra == {"parent": {"step": 100}}
        carried = format_manifest(dataclasses.replace(read, pinned=False))
        assert json.loads(carried)["parent"] == {"step": 100}
        assert parse(carried).extra == read.extra

    def test_a_hundred_thousand_objects_survive(self) -> None:
        objects = tuple(ObjectEntry(data_key(TOKEN, n), n, n) for n in range(100_000))
        assert parse(format_manifest(manifest(objects=objects))).objects == objects


class TestText:
    def test_a_person_can_read_it(self) -> None:
        lines = format_manifest(manifest()).decode().splitlines()
        assert lines[:5] == [
            "{",
            '  "format": "remote_ckpt",',
            '  "version": [1, 0],',
            '  "generation": 3,',
            f'  "save_id": "{SAVE_ID}",',
        ]
        assert f'    {{"key": "{TOKEN}/0.distcp", "size_bytes": 100, "crc32c": "00c0ffee"}},' in lines
        assert '  "created_at": "2026-01-31T12:00:05.000250Z",' in lines
        assert lines[-2].startswith('  "digest": "sha256:')

    def test_the_digest_is_that_of_the_canonical_json_without_it(self) -> None:
        assert json.loads(sealed(document()))["digest"] == document()["digest"]


class TestDamage:
    def refuse(self, data: bytes, match: str) -> None:
        with pytest.raises(CheckpointDamagedError, match=match) as caught:
            parse(data)
        assert caught.value.url == URL
        assert caught.value.key == KEY

    @pytest.mark.parametrize(
        "data",
        [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b"{}" * 2, b"9" * 5000],
    )
    def test_what_is_not_a_json_object_is_damage(self, data: bytes) -> None:
        self.refuse(data, "damaged")

    def test_a_cut_file_is_damage_wherever_it_was_cut(self) -> None:
        data = format_manifest(manifest())
        for length in range(0, len(data) - 3, 7):
            self.refuse(data[:length], "damaged")

    @given(st.data())
    def test_a_changed_byte_never_passes_with_another_meaning(self, data: st.DataObject) -> None:
        original = format_manifest(manifest())
        position = data.draw(st.integers(0, len(original) - 1))
        changed = bytearray(original)
        changed[position] ^= 1 << data.draw(st.integers(0, 7))
        try:
            read = parse(bytes(changed))
        except (CheckpointDamagedError, FormatError):
            return
        assert read == manifest()

    def test_a_wrong_digest_is_damage(self) -> None:
        self.refuse(json.dumps(document() | {"pinned": False}).encode(), "digest does not match")
        self.refuse(json.dumps(document() | {"digest": None}).encode(), "digest does not match")

    @pytest.mark.parametrize("name", sorted(set(document()) - {"format", "digest", "version"}))
    def test_a_missing_field_is_named(self, name: str) -> None:
        rest = document()
        del rest[name]
        self.refuse(sealed(rest), f"{name}: missing")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("generation", 0), ("generation", "3"), ("generation", True), ("save_id", "../x"),
            ("save_id", None), ("state", "half"), ("state", []), ("name", ""), ("name", 199),
            ("step", -1), ("step", 1.0), ("created_at", "2026-01-31"), ("created_at", None),
            ("committed_at", "2026-13-31T12:00:00.000000Z"), ("world_size", 0), ("world_size", 2**63),
            ("torch_version", 2), ("package_version", None), ("total_bytes", -1), ("total_bytes", 1.5),
            ("pinned", 1), ("metrics", []), ("metrics", {"a": "big"}), ("metrics", {"a": None}),
            ("metrics", {"a": True}), ("metrics", {"a": 10**400}), ("user_metadata", []),
            ("left_out", "abc"), ("left_out", [1]), ("superseded", None), ("content_digest", 5),
            ("index", "index.json"), ("stock_metadata", []), ("objects", {}), ("objects", [None]),
        ],
    )  # fmt: skip
    def test_an_ill_typed_field_is_named(self, name: str, value: Any) -> None:
        self.refuse(sealed(document() | {name: value}), f"damaged: {name}: ")

    @pytest.mark.parametrize(
        "entry",
        [
            {"key": f"{TOKEN}/0.distcp", "size_bytes": 1},
            {"key": f"{TOKEN}/0.distcp", "size_bytes": 1, "crc32c": 7},
            {"key": f"{TOKEN}/0.distcp", "size_bytes": 1, "crc32c": "0000000G"},
            {"key": f"{TOKEN}/0.distcp", "size_bytes": -1, "crc32c": "00000000"},
            {"key": f"{TOKEN}/0.distcp", "crc32c": "00000000"},
            {"size_bytes": 1, "crc32c": "00000000"},
        ],
    )
    def test_an_ill_formed_object_entry_is_damage(self, entry: dict[str, Any]) -> None:
        self.refuse(sealed(document() | {"objects": [entry]}), "damaged: objects: ")
        self.refuse(sealed(document() | {"index": entry}), "damaged: index: ")

    @pytest.mark.parametrize(
        "key",
        [
            "", "/etc/passwd", "..", ".", "a/../b", "../a", "a/..", "./a", "a//b", "a/", "a b", "a\n",
            "a\\b", "å", "s3://b/k", "a" * 256, "a\0",
        ],
    )  # fmt: skip
    def test_a_key_that_may_lead_outside_is_damage(self, key: str) -> None:
        assert not is_safe_key(key)
        entry = {"key": key, "size_bytes": 1, "crc32c": "00000000"}
        self.refuse(sealed(document() | {"objects": [entry]}), "not a key inside")
        self.refuse(sealed(document() | {"superseded": [key]}), "not a key inside")

    def test_the_same_key_twice_is_damage(self) -> None:
        twice = document()["objects"][:1] * 2
        self.refuse(sealed(document() | {"objects": twice}), "same key twice")

    def test_a_live_manifest_that_would_delete_its_own_data_is_damage(self) -> None:
        for key in (f"{TOKEN}/0.distcp", index_key(SAVE_ID), stock_metadata_key(SAVE_ID)):
            self.refuse(sealed(document() | {"superseded": [key]}), "names an object of this generation")

    @pytest.mark.parametrize("generation", [3, 4, 1_000_000])
    def test_a_manifest_that_would_delete_itself_or_a_newer_one_is_damage(self, generation: int) -> None:
        self.refuse(sealed(document() | {"superseded": [manifest_key(generation)]}), "not older")

    def test_a_generation_other_than_the_keys_is_damage(self) -> None:
        with pytest.raises(CheckpointDamagedError, match="another generation"):
            parse(format_manifest(manifest()), key="manifest.000004.json")


class TestOtherFormats:
    @pytest.mark.parametrize("format_name", ["something else", None, ["remote_ckpt"]])
    def test_a_foreign_file_is_another_format(self, format_name: Any) -> None:
        with pytest.raises(CheckpointDamagedError, match="not a remote_ckpt manifest"):
            parse(sealed(document() | {"format": format_name}))

    @pytest.mark.parametrize("major", [0, 2, 99])
    def test_an_unknown_major_version_is_refused_before_anything_else_is_read(self, major: int) -> None:
        data = json.dumps({"format": "remote_ckpt", "version": [major, 3], "digest": "new:rules"}).encode()
        with pytest.raises(FormatError, match=rf"format {major}\.3.*newer remote_ckpt") as caught:
            parse(data)
        assert caught.value.key == KEY

    @pytest.mark.parametrize("version", [None, 1, [1], [1, 0, 0], ["1", "0"], [True, 0], [-1, 0]])
    def test_a_version_that_is_none_is_damage(self, version: Any) -> None:
        with pytest.raises(CheckpointDamagedError):
            parse(sealed(document() | {"version": version}))


class TestWhatCannotBeWritten:
    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"generation": 0}, "generation"),
            ({"save_id": "mine"}, "save_id"),
            ({"created_at": datetime(2026, 1, 31)}, "without zone"),
            ({"objects": (ObjectEntry("../x", 1, 1),)}, "objects: not a key"),
            ({"objects": (ObjectEntry("x", 1, 2**32),)}, "objects"),
            ({"user_metadata": {"a": math.nan}}, "user_metadata: nan"),
            ({"user_metadata": {1: "a"}}, "user_metadata: not a text"),
            ({"user_metadata": {"a": (1, 2)}}, "user_metadata: tuple"),
            ({"user_metadata": {"a": object()}}, "user_metadata: object"),
            ({"user_metadata": {"a": "\ud800"}}, "surrogates"),
            ({"metrics": {"a": "big"}}, "big"),
            ({"extra": {"generation": 9}}, r"\['generation'\]"),
            ({"extra": {"digest": "x"}}, r"\['digest'\]"),
            ({"superseded": (f"{TOKEN}/0.distcp",)}, "superseded"),
        ],
    )
    def test_it_is_refused_by_name(self, changes: dict[str, Any], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            format_manifest(manifest(**changes))


class TestNames:
    @pytest.mark.parametrize(
        ("generation", "key"),
        [(1, "manifest.000001.json"), (7, "manifest.000007.json"), (1_234_567, "manifest.1234567.json")],
    )
    def test_a_generation_has_one_key(self, generation: int, key: str) -> None:
        assert manifest_key(generation) == key
        assert parse_manifest_key(key) == generation

    @pytest.mark.parametrize(
        "key",
        [
            "manifest.7.json", "manifest.0000007.json", "manifest.000000.json", "manifest.-00001.json",
            "manifest.00001٣.json", "manifest.000001.json\n", "manifest.000001.json.tmp",
            "a/manifest.000001.json", "manifest.0_0001.json", "manifest.json", "",
        ],
    )  # fmt: skip
    def test_other_spellings_are_not_manifests(self, key: str) -> None:
        assert parse_manifest_key(key) is None
        assert not own_key(key)

    def test_generations_begin_at_one(self) -> None:
        with pytest.raises(ConfigError, match="begin at 1"):
            manifest_key(0)

    def test_ids_are_new_each_time_and_recognisable(self) -> None:
        save_ids = {new_save_id() for _ in range(100)}
        tokens = {new_token() for _ in range(100)}
        assert (len(save_ids), len(tokens)) == (100, 100)
        assert all(map(is_save_id, save_ids))
        assert all(map(is_token, tokens))
        assert not any(map(is_token, save_ids))

    def test_an_index_key_gives_back_its_save_id(self) -> None:
        assert index_key(SAVE_ID) == f"index.{SAVE_ID}.json.gz"
        assert parse_index_key(index_key(SAVE_ID)) == SAVE_ID
        assert parse_index_key("index.v2.json.gz") is None
        assert parse_index_key(stock_metadata_key(SAVE_ID)) is None

    @pytest.mark.parametrize("make_key", [index_key, stock_metadata_key, lambda text: data_key(text, 0)])
    def test_keys_are_made_of_ids_only(self, make_key: Callable[[str], str]) -> None:
        with pytest.raises(ConfigError, match=r"\.\./x"):
            make_key("../x")

    def test_every_key_that_we_make_is_ours_and_safe(self) -> None:
        save_id, token = new_save_id(), new_token()
        keys = [
            manifest_key(1), manifest_key(10**7), index_key(save_id), stock_metadata_key(save_id),
            data_key(token, 0), data_key(token, 12), ".metadata",
        ]  # fmt: skip
        assert all(map(own_key, keys))
        assert all(map(is_safe_key, keys))

    @pytest.mark.parametrize(
        "key",
        [
            "__0_0.distcp", "checkpoint.pth", "index.v2.json.gz", "metadata.pickle", "data/0.distcp",
            f"{TOKEN}/00.distcp", f"{TOKEN}/-1.distcp", f"{TOKEN}/0.distcp.tmp", f"{TOKEN}/x/0.distcp",
            f"x/{TOKEN}/0.distcp", TOKEN, "d-0123456789ABCDEF/0.distcp", "x.metadata", ".metadata.tmp",
            f"{TOKEN}/0.distcp\n",
        ],
    )  # fmt: skip
    def test_what_others_write_is_not_ours(self, key: str) -> None:
        assert not own_key(key)
