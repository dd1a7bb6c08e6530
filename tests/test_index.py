"""The index survives writing and reading, and nothing that contradicts itself passes."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_ckpt.coverage import cover_problem
from remote_ckpt.errors import CheckpointDamagedError, ConfigError, FormatError
from remote_ckpt.index import (
    BytesEntry,
    ChunkEntry,
    Index,
    TensorEntry,
    check_ranges,
    format_index,
    is_encodable,
    parse_index,
)

SAVE_ID = "20260131T120000Z-0123456789ab"
URL = "s3://bucket/run/199"
KEY = f"index.{SAVE_ID}.json.gz"
OBJECTS = ["d-0123456789abcdef/0.distcp", "d-fedcba9876543210/0.distcp"]
BLOCK_BYTES = 64

Box = tuple[int, ...]


def crcs(covered_bytes: int) -> bytes:
    count = math.ceil(covered_bytes / BLOCK_BYTES)
    return struct.pack(f"<{count}I", *range(covered_bytes, covered_bytes + count))


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], *, item_bytes: int, start: int = 0) -> ChunkEntry:
    payload_bytes = math.prod(sizes) * item_bytes
    return ChunkEntry(
        offsets=offsets, sizes=sizes, object=start % 2, archive_offset=start,
        archive_bytes=payload_bytes + 1000, payload_offset=start + 512, payload_bytes=payload_bytes,
        crcs=crcs(payload_bytes),
    )  # fmt: skip


def opaque(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkEntry:
    return ChunkEntry(
        offsets=offsets, sizes=sizes, object=0, archive_offset=9000, archive_bytes=777, payload_offset=-1,
        payload_bytes=777, crcs=crcs(777),
    )  # fmt: skip


def index(**changes: Any) -> Index:
    values: dict[str, Any] = {
        "save_id": SAVE_ID,
        "block_bytes": BLOCK_BYTES,
        "objects": OBJECTS,
        "tensors": {
            "model.weight": TensorEntry(
                dtype="bfloat16",
                sizes=(5, 8),
                requires_grad=True,
                chunks=[
                    chunk((0, 0), (3, 8), item_bytes=2),
                    chunk((3, 0), (2, 8), item_bytes=2, start=2**40 + 1),
                ],
            ),
            "step": TensorEntry(dtype="float32", sizes=(), chunks=[chunk((), (), item_bytes=4, start=64)]),
            "nothing": TensorEntry(
                dtype="int64", sizes=(0, 3), pin_memory=True, chunks=[chunk((0, 0), (0, 3), item_bytes=8)]
            ),
            "sparse": TensorEntry(
                dtype="float64", sizes=(4, 4), layout="sparse_coo", memory_format="preserve_format",
                chunks=[opaque((0, 0), (4, 4))],
            ),
            "unsaved": TensorEntry(dtype="uint8", sizes=(2, 0)),
        },
        "blobs": {
            "schedule": BytesEntry(object=1, offset=5000, length_bytes=100, crcs=crcs(100), pickle_safe=True),
            "größe \ud800": BytesEntry(object=0, offset=1, length_bytes=0, crcs=b"", pickle_safe=False),
            "untried": BytesEntry(object=0, offset=1, length_bytes=64, crcs=crcs(64)),
        },
        "planner_data": {"model.weight": ("model", "weight"), "list.0": ("list", 0)},
        "has_foreign_planner_data": False,
        "dcp_version": "1.0",
        "storage_meta": {"save_id": SAVE_ID, "modules": []},
    }  # fmt: skip
    return Index(**(values | changes))


def parse(data: bytes) -> Index:
    return parse_index(data, url=URL, key=KEY)


def document() -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(format_index(index()))))


def packed(document: Any) -> bytes:
    return gzip.compress(json.dumps(document).encode())


class TestRoundTrip:
    def test_everything_survives(self) -> None:
        assert parse(format_index(index())) == index()

    def test_an_empty_index_survives(self) -> None:
        empty = Index(save_id=SAVE_ID, block_bytes=1, objects=[])
        assert parse(format_index(empty)) == empty

    def test_order_of_names_survives(self) -> None:
        read = parse(format_index(index()))
        assert list(read.tensors) == list(index().tensors)
        assert list(read.blobs) == list(index().blobs)

    def test_equal_indexes_are_equal_bytes_without_a_time(self) -> None:
        data = format_index(index())
        assert data == format_index(index())
        assert data[4:8] == bytes(4)

    def test_a_hundred_thousand_chunks_survive(self) -> None:
        chunks = [chunk((row, 0), (1, 8), item_bytes=2, start=row * 1024) for row in range(99_000)]
        tensors = {
            "large": TensorEntry(dtype="float16", sizes=(99_000, 8), chunks=chunks),
            **{
                f"small.{n}": TensorEntry(dtype="int8", sizes=(3,), chunks=[chunk((0,), (3,), item_bytes=1)])
                for n in range(1000)
            },
        }
        written = index(tensors=tensors)
        assert parse(format_index(written)) == written

    def test_what_packs_as_well_as_a_bomb_is_written_so_that_it_is_read(self) -> None:
        size = 64 * 2**22
        zeros = ChunkEntry((0,), (size,), 0, 0, size + 700, 64, size, bytes(4 * 2**22))
        written = index(tensors={"zeros": TensorEntry(dtype="uint8", sizes=(size,), chunks=[zeros])})
        assert parse(format_index(written)) == written

    def test_any_gzip_of_the_same_json_will_do(self) -> None:
        assert parse(gzip.compress(json.dumps(document(), indent=1).encode(), 9)) == index()

    def test_unknown_fields_of_a_newer_minor_version_are_ignored(self) -> None:
        assert parse(packed(document() | {"version": [1, 9], "later": {"x": 1}})) == index()


class Named(NamedTuple):
    value: int


class Text(str):
    __slots__ = ()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple),
    max_leaves=10,
)


class TestPlannerData:
    @given(PLAIN)
    def test_plain_values_come_back_with_their_types(self, value: Any) -> None:
        assert is_encodable(value)
        read = parse(format_index(index(planner_data=value))).planner_data
        assert repr(read) == repr(value)

    def test_not_a_number_comes_back(self) -> None:
        assert math.isnan(parse(format_index(index(planner_data=math.nan))).planner_data)

    @pytest.mark.parametrize(
        "value",
        [
            {1: "a"}, {Text("a"): 1}, OrderedDict(a=1), Named(1), Text("a"), {"a": [({"b": object()},)]},
            b"bytes", {1, 2}, 1j,
        ],
    )  # fmt: skip
    def test_other_types_are_not_encodable(self, value: Any) -> None:
        assert not is_encodable(value)
        with pytest.raises(ConfigError, match="no place in an index"):
            format_index(index(planner_data=value))

    def test_a_value_inside_itself_is_not_encodable(self) -> None:
        endless: list[Any] = []
        endless.append(endless)
        assert not is_encodable(endless)

    @pytest.mark.parametrize(
        "value",
        [
            {}, {"tuple": [], "dict": {}}, {"tuple": 5}, {"dict": []}, {"float": "one"}, {"set": []},
            [{"tuple": [{"object": "os.system"}]}],
        ],
    )  # fmt: skip
    def test_an_unknown_tag_is_damage(self, value: Any) -> None:
        with pytest.raises(CheckpointDamagedError, match="tag"):
            parse(packed(document() | {"planner_data": value}))


Change = Callable[[dict[str, Any]], Any]


def setting(*path: Any, to: Any) -> Change:
    """A change of one value inside a document."""

    def change(document: dict[str, Any]) -> None:
        target: Any = document
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = to

    return change


class TestDamage:
    def refuse(self, data: bytes, match: str = "damaged") -> None:
        with pytest.raises(CheckpointDamagedError, match=match) as caught:
            parse(data)
        assert (caught.value.url, caught.value.key) == (URL, KEY)

    @pytest.mark.parametrize("data", [b"", b"{}", b"\x1f\x8b", gzip.compress(b""), packed([]), packed(None)])
    def test_what_is_not_a_gzipped_json_object_is_damage(self, data: bytes) -> None:
        self.refuse(data)

    def test_an_object_cut_anywhere_is_damage(self) -> None:
        data = format_index(index())
        for length in range(len(data)):
            self.refuse(data[:length])

    def test_bytes_after_the_end_are_damage(self) -> None:
        self.refuse(format_index(index()) + b"\0", "does not end where")

    def test_a_flipped_bit_never_passes_with_another_meaning(self) -> None:
        data = format_index(index())
        harmless = 0
        for bit in range(8 * len(data)):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            try:
                assert parse(bytes(changed)) == index()
                harmless += 1
            except CheckpointDamagedError:
                continue
        assert harmless < 64  # the gzip header's time and unused bits, nothing else

    def test_a_bomb_is_refused_before_it_is_unpacked(self) -> None:
        bomb = gzip.compress(bytes(10_000_000))
        with pytest.raises(CheckpointDamagedError, match="more than 1000000 bytes"):
            parse_index(bomb, url=URL, key=KEY, max_expanded_bytes=1_000_000)

    def test_more_than_64_bytes_out_of_one_are_a_bomb(self) -> None:
        text = json.dumps(document())[:-1] + ',"x":[' + ",".join(["[]"] * 1_000_000) + "]}"
        self.refuse(gzip.compress(text.encode()), "more than 1048576 bytes")

    def test_the_bound_itself_is_allowed(self) -> None:
        data = format_index(index())
        expanded = len(gzip.decompress(data))
        assert parse_index(data, url=URL, key=KEY, max_expanded_bytes=expanded) == index()
        with pytest.raises(CheckpointDamagedError, match="more than"):
            parse_index(data, url=URL, key=KEY, max_expanded_bytes=expanded - 1)

    @pytest.mark.parametrize("name", sorted(set(document()) - {"format"}))
    def test_a_missing_field_is_named(self, name: str) -> None:
        rest = document()
        del rest[name]
        self.refuse(packed(rest), f"'{name}' is missing")

    @pytest.mark.parametrize("part", ["tensors", "chunks", "blobs"])
    def test_a_missing_or_ill_typed_column_is_damage(self, part: str) -> None:
        for name in document()[part]:
            rest = document()
            del rest[part][name]
            self.refuse(packed(rest), f"'{name}' is missing")
            values: tuple[Any, ...] = (
                None,
                7,
                "x",
                {},
                [None],
                [0.5],
                [True],
                ["\u00e9"],
                [[]],
                [-2],
                [2**63],
            )
            for value in values:
                broken = document()
                broken[part][name] = value
                self.refuse(packed(broken))

    @pytest.mark.parametrize("part", ["tensors", "chunks", "blobs"])
    def test_a_column_of_another_length_is_damage(self, part: str) -> None:
        for name, column in document()[part].items():
            shorter, longer = document(), document()
            shorter[part][name] = column[:-1]
            longer[part][name] = column + column[-1:]
            self.refuse(packed(shorter))
            self.refuse(packed(longer))

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (setting("save_id", to="../x"), "save_id"),
            (setting("block_bytes", to=0), "positive"),
            (setting("block_bytes", to=1), "counts add up"),
            (setting("objects", 0, to="../../etc/passwd"), "not a key inside"),
            (setting("objects", 0, to=OBJECTS[1]), "same key twice"),
            (setting("dcp_version", to=1), "not a text"),
            (setting("storage_meta", to=[]), "not a JSON object"),
            (setting("has_foreign_planner_data", to=0), "neither true nor false"),
            (setting("kinds", 0, "dtype", to=None), "not a text"),
            (setting("kinds", 0, "pin_memory", to=1), "neither true nor false"),
            (setting("kinds", 0, to={}), "is missing"),
            (setting("kinds", to=None), "damaged"),
            (setting("tensors", "kind", 0, to=99), "unknown kind"),
            (setting("tensors", "name", 1, to="model.weight"), "same name twice"),
            (setting("tensors", "sizes", 0, to=4), "model.weight.*outside the tensor"),
            (setting("tensors", "dims", to=[1, 1, 2, 2, 2]), "damaged"),
            (setting("tensors", "dims", 0, to=513), "more than 512 dimensions"),
            (setting("tensors", "chunk_count", to=[2, 1, 2, 0, 0]), "outside the tensor"),
            (setting("tensors", "sizes", 0, to=6), "model.weight.*do not cover it"),
            (setting("tensors", "sizes", 0, to=2**60), "model.weight.*too many elements"),
            (setting("kinds", 0, "dtype", to="double"), "dtype that has none"),
            (setting("kinds", 0, "dtype", to="quint8"), "dtype that has none"),
            (setting("tensors", "chunk_count", 1, to=2**62), "not as many as the tensors count"),
            (setting("chunks", "offsets", 2, to=4), "model.weight.*outside the tensor"),
            (setting("chunks", "offsets", 2, to=2**62), "model.weight.*outside the tensor"),
            (setting("chunks", "offsets", 2, to=2), "model.weight.*overlap"),
            (setting("chunks", "sizes", 0, to=2), "does not fit dtype and shape"),
            (setting("chunks", "object", 0, to=2), "in no object"),
            (setting("chunks", "object", 0, to=-1), "in no object"),
            (setting("chunks", "archive_offset", 0, to=513), "not inside its archive"),
            (setting("chunks", "archive_offset", 0, to=-1), "an archive of no bytes"),
            (setting("chunks", "archive_bytes", 0, to=0), "an archive of no bytes"),
            (setting("chunks", "archive_bytes", 0, to=559), "not inside its archive"),
            (setting("chunks", "payload_offset", 0, to=-1), "checksums do not cover"),
            (setting("chunks", "payload_offset", -1, to=9000), "does not fit dtype and shape"),
            (setting("chunks", "crcs", to="====="), "damaged"),
            (setting("blobs", "object", 0, to=2), "schedule.*in no object"),
            (setting("blobs", "pickle_safe", 0, to=1), "neither true nor false"),
            (setting("blobs", "name", 0, to="untried"), "same name twice"),
        ],
    )  # fmt: skip
    def test_a_contradiction_is_damage(self, change: Change, match: str) -> None:
        broken = document()
        change(broken)
        self.refuse(packed(broken), match)

    def test_counts_of_chunks_without_dimensions_ask_for_no_memory(self) -> None:
        broken = document()
        names = [f"t{number}" for number in range(400)]
        broken["tensors"] = {"name": names, "sizes": []}
        broken["tensors"] |= {"kind": [0] * 400, "dims": [0] * 400, "chunk_count": [2**40] * 400}
        self.refuse(packed(broken), "not as many as the tensors count")

    def test_a_missing_checksum_is_damage(self) -> None:
        broken = document()
        whole = base64.b64decode(broken["chunks"]["crcs"])
        broken["chunks"]["crcs"] = base64.b64encode(whole[:-4]).decode()
        self.refuse(packed(broken), "counts add up")


class TestRanges:
    SIZES: ClassVar[dict[str, int]] = {OBJECTS[0]: 9777, OBJECTS[1]: 2**40 + 1033}

    def test_what_ends_where_its_object_ends_is_inside(self) -> None:
        check_ranges(index(), self.SIZES, url=URL)

    @pytest.mark.parametrize(("key", "name"), [(OBJECTS[0], "sparse"), (OBJECTS[1], "model.weight")])
    def test_a_byte_beyond_its_object_is_damage(self, key: str, name: str) -> None:
        with pytest.raises(CheckpointDamagedError, match=f"'{name}' lies outside") as caught:
            check_ranges(index(), self.SIZES | {key: self.SIZES[key] - 1}, url=URL)
        assert (caught.value.url, caught.value.key) == (URL, key)

    def test_a_value_beyond_its_object_is_damage(self) -> None:
        blobs = {"some": BytesEntry(object=0, offset=9000, length_bytes=778, crcs=crcs(778))}
        with pytest.raises(CheckpointDamagedError, match="'some' lies outside"):
            check_ranges(index(blobs=blobs), self.SIZES, url=URL)

    def test_an_object_that_the_manifest_lacks_is_damage(self) -> None:
        with pytest.raises(CheckpointDamagedError, match="lies outside"):
            check_ranges(index(), {OBJECTS[1]: 2**50}, url=URL)


def count_of_each_element(shape: Box, boxes: list[tuple[Box, Box]]) -> set[int]:
    """How often each element is covered, one by one."""
    return {
        sum(
            all(at <= point < at + size for at, size, point in zip(*box, element, strict=True))
            for box in boxes
        )
        for element in itertools.product(*map(range, shape))
    }


SPANS = st.integers(0, 3).flatmap(lambda start: st.integers(0, 3 - start).map(lambda size: (start, size)))
BOXES = st.lists(SPANS, min_size=2, max_size=2).map(lambda spans: tuple(zip(*spans, strict=True)))


class TestCoverage:
    @given(st.lists(BOXES, max_size=5))
    def test_it_is_what_counting_every_element_says(self, boxes: list[tuple[Box, Box]]) -> None:
        problem = cover_problem((3, 3), [at for at, _ in boxes], [size for _, size in boxes])
        assert (problem is None) == (count_of_each_element((3, 3), boxes) == {1})

    @given(st.permutations([(0, 1), (1, 3), (4, 2)]), st.permutations([(0, 2), (2, 5)]), st.integers(0, 5))
    def test_a_grid_covers_unless_one_box_is_moved(
        self, rows: list[tuple[int, int]], columns: list[tuple[int, int]], moved: int
    ) -> None:
        grid = list(itertools.product(rows, columns))
        offsets = [(row[0], column[0]) for row, column in grid]
        sizes = [(row[1], column[1]) for row, column in grid]
        assert cover_problem((6, 7), offsets, sizes) is None
        offsets[moved] = (offsets[moved][0] + 1, offsets[moved][1])
        assert cover_problem((6, 7), offsets, sizes) == "its chunks overlap"

    def test_one_chunk_of_a_0_dim_tensor_is_one_and_two_are_too_many(self) -> None:
        assert cover_problem((), [()], [()]) is None
        assert cover_problem((), [(), ()], [(), ()]) == "its chunks overlap"
        assert cover_problem((), [], []) == "its chunks do not cover it"

    def test_a_tensor_without_elements_needs_no_chunk_and_bears_empty_ones(self) -> None:
        assert cover_problem((0, 3), [], []) is None
        assert cover_problem((0, 3), [(0, 0), (0, 1)], [(0, 1), (0, 2)]) is None


class TestOtherFormats:
    def test_a_foreign_file_is_another_format(self) -> None:
        with pytest.raises(FormatError, match="not a remote_ckpt index"):
            parse(packed({"weight_map": {}}))

    def test_an_unknown_major_version_is_refused(self) -> None:
        with pytest.raises(FormatError, match="index format 2"):
            parse(packed({"format": "remote_ckpt.index", "version": [2, 0]}))

    @pytest.mark.parametrize("version", [None, 1, [1], [1, 0, 0], ["1", 0]])
    def test_a_version_that_is_none_is_damage(self, version: Any) -> None:
        with pytest.raises(CheckpointDamagedError):
            parse(packed(document() | {"version": version}))


class TestWhatCannotBeWritten:
    @pytest.mark.parametrize(
        ("entry", "match"),
        [
            (ChunkEntry((0,), (3,), 0, 0, 100, 8, 3, b""), "number of checksums"),
            (ChunkEntry((0,), (3,), 2, 0, 100, 8, 3, b"1234"), "in no object"),
            (ChunkEntry((1,), (3,), 0, 0, 100, 8, 3, b"1234"), "outside the tensor"),
            (ChunkEntry((0, 0), (3, 1), 0, 0, 100, 8, 3, b"1234"), "dimensions"),
            (ChunkEntry((0,), (3,), 0, 0, 100, 8, 4, b"1234"), "dtype and shape"),
            (ChunkEntry((0,), (3,), 0, 0, 100, 98, 3, b"1234"), "not inside"),
        ],
    )
    def test_a_chunk_that_contradicts_itself_is_named(self, entry: ChunkEntry, match: str) -> None:
        tensors = {"some.name": TensorEntry(dtype="uint8", sizes=(3,), chunks=[entry])}
        with pytest.raises(ConfigError, match=rf"some\.name.*{match}"):
            format_index(index(tensors=tensors))

    def test_a_value_without_its_checksums_is_named(self) -> None:
        blobs = {"some.name": BytesEntry(object=0, offset=0, length_bytes=1, crcs=b"")}
        with pytest.raises(ConfigError, match=r"some\.name.*number of checksums"):
            format_index(index(blobs=blobs))

    def test_a_save_id_of_another_make_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="save_id"):
            format_index(index(save_id="mine"))

    def test_opaque_chunks_say_so(self) -> None:
        assert opaque((0,), (1,)).is_opaque
        assert not chunk((0,), (1,), item_bytes=1).is_opaque
