"""Pickles from checkpoints: nothing runs, plain values come back, damage is not distrust."""

from __future__ import annotations

import io
import pathlib
import pickle
import random
import sys
import threading
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from remote_ckpt.dcp.pickles import load_pickle, needs_trust, parse_stock_metadata
from remote_ckpt.errors import CheckpointDamagedError, MissingDependencyError, UntrustedDataError

PLAIN = [*"?bBhHiIlLqQefdgFDG", "m8[s]", "M8[D]", "M8[25us]", "m8", "S3", "U4", ">i4"]
MULTIARRAY: Any = np._core.multiarray  # type: ignore[attr-defined]


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def loaded(value: Any) -> Any:
    return load_pickle(saved(value), is_trusted=False, what="it")


class Calling:
    """Pickles as a call of anything, with a state: what a hostile file can say."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], *state: Any) -> None:
        self.reduced = (function, arguments, *state)

    def __reduce__(self) -> Any:
        return self.reduced


class Foreign:
    """A class that nobody has allowed."""


def hostile_array(element_type: Any, data: Any, shape: Any = (1,)) -> Calling:
    return Calling(MULTIARRAY._reconstruct, (np.ndarray, (0,), b"b"), (1, shape, element_type, False, data))


def hostile_type(code: str, *state: Any) -> Calling:
    return Calling(np.dtype, (code, False, True), *([state] if state else []))


class TestNumpy:
    @pytest.mark.parametrize("code", PLAIN)
    def test_arrays_of_plain_types_come_back_equal(self, code: str) -> None:
        array = np.arange(6).astype(np.dtype(code)).reshape(2, 3)
        back = loaded({"a": [(array, 1)]})["a"][0][0]
        assert type(back) is np.ndarray
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)
        assert back.flags.writeable

    @pytest.mark.parametrize(
        "array",
        [
            np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            np.array(1.5),
            np.empty((0, 3)),
            np.array(["ä", "bc"]),
        ],
        ids=["fortran", "0-d", "empty", "texts"],
    )
    def test_arrays_of_every_layout_come_back_equal(self, array: Any) -> None:
        back = loaded(array)
        assert back.shape == array.shape
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)
        assert back.flags.f_contiguous == array.flags.f_contiguous

    @pytest.mark.parametrize(
        "scalar",
        [np.float32(1.5), np.int64(3), np.bool_(True), np.complex64(1j), np.datetime64("2020-01-01")],
    )
    def test_scalars_come_back_with_their_type(self, scalar: Any) -> None:
        back = loaded({"s": scalar})["s"]
        assert type(back) is type(scalar)
        assert back == scalar

    def test_a_dtype_comes_back(self) -> None:
        assert loaded([np.dtype("float32")]) == [np.dtype("float32")]

    def test_random_states_come_back_and_work(self) -> None:
        generator = np.random.default_rng(7)
        state = {"legacy": np.random.RandomState(3).get_state(), "new": generator.bit_generator.state}
        back = loaded(state)
        legacy = np.random.RandomState()
        legacy.set_state(back["legacy"])
        assert legacy.random_sample() == np.random.RandomState(3).random_sample()
        again = np.random.default_rng()
        again.bit_generator.state = back["new"]
        assert again.random() == generator.random()

    def test_one_array_in_two_places_stays_one(self) -> None:
        array = np.arange(3)
        back = loaded({"a": array, "b": [array]})
        assert back["a"] is back["b"][0]

    @pytest.mark.parametrize(
        "value",
        [
            hostile_array(
                hostile_type("f8", 3, "<", (np.dtype("f8"), (100000,)), None, None, -1, -1, 0), b"A" * 8
            ),
            hostile_array(
                hostile_type("f8", 4, "<", None, ("x",), {"x": (np.dtype("f8"), 1 << 20)}, 8, 1, 0), b"A" * 8
            ),
            hostile_array(hostile_type("f8", 3, "<", None, None, None, -1, -1, 63), [1.0]),
            hostile_array(hostile_type("O"), b"A" * 8),
            Calling(MULTIARRAY.scalar, (hostile_type("O"), b"A" * 8)),
            np.array([{"a": 1}], dtype=object),
            np.zeros(2, dtype=[("a", "f4")]),
        ],
        ids=["subarray", "fields", "list", "object bytes", "object scalar", "objects", "structured"],
    )
    def test_what_is_no_plain_data_is_refused(self, value: Any) -> None:
        with pytest.raises(UntrustedDataError, match="numpy"):
            loaded(value)

    def test_flags_that_call_numbers_objects_have_no_effect(self) -> None:
        back = loaded(hostile_array(hostile_type("f8", 3, "<", None, None, None, -1, -1, 63), b"A" * 8))
        assert back.dtype == np.dtype("f8")
        assert back.dtype.flags == np.dtype("f8").flags

    def test_an_array_without_its_state_is_damage(self) -> None:
        with pytest.raises(CheckpointDamagedError, match="without its state"):
            loaded(Calling(MULTIARRAY._reconstruct, (np.ndarray, (1 << 33,), b"b")))

    @pytest.mark.parametrize("shape", [(2,), (1 << 60, 1 << 60), (1 << 33,)])
    def test_a_shape_beyond_the_bytes_is_damage(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(CheckpointDamagedError, match="shape"):
            loaded(hostile_array(np.dtype("f8"), b"A" * 8, shape))


class TestOtherLoads:
    def test_the_users_own_safe_classes_stay_what_they_were(self) -> None:
        torch.serialization.add_safe_globals([np.ndarray, Foreign])
        try:
            before = set(torch.serialization.get_safe_globals())
            assert isinstance(loaded([Foreign(), np.arange(2)])[0], Foreign)
            after = set(torch.serialization.get_safe_globals())
            assert before <= after
            assert all(item.__module__ == "remote_ckpt.dcp.numpy_values" for item in after - before)
        finally:
            torch.serialization.clear_safe_globals()

    def test_arrays_in_objects_of_classes_that_the_user_allows_come_back(self) -> None:
        value = Foreign()
        value.array = np.arange(3)  # type: ignore[attr-defined]
        with torch.serialization.safe_globals([Foreign]):
            assert loaded(value).array.tolist() == [0, 1, 2]

    def test_loads_in_many_threads_do_not_disturb_one_another(self) -> None:
        data = saved({f"k{number}": np.arange(3) for number in range(20)})
        results: list[Any] = []

        def load_often() -> None:
            for _ in range(10):
                results.append(load_pickle(data, is_trusted=False, what="it")["k19"].tolist())

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=load_often) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        assert results == [[0, 1, 2]] * 60


class TestDamageAndDistrust:
    def test_a_class_that_is_not_allowed_is_named(self) -> None:
        with pytest.raises(UntrustedDataError, match=r"it holds .*Foreign\): pass trusted=True"):
            loaded({"x": Foreign()})

    def test_a_pickle_of_another_protocol_needs_trust(self) -> None:
        stream = io.BytesIO()
        torch.save({"a": {1, 2}}, stream, pickle_protocol=4)
        with pytest.warns(UserWarning, match="protocol"), pytest.raises(UntrustedDataError):
            load_pickle(stream, is_trusted=False, what="it")
        assert load_pickle(stream, is_trusted=True, what="it") == {"a": {1, 2}}

    @pytest.mark.parametrize("length", [0, 1, 10, 100, -1])
    def test_a_cut_archive_is_damaged(self, length: int) -> None:
        with pytest.raises(CheckpointDamagedError, match="it cannot be read"):
            load_pickle(saved({"a": torch.arange(4.0)})[:length], is_trusted=False, what="it")

    def test_a_flipped_bit_is_damage_or_unseen_but_never_distrust(self) -> None:
        data = saved({"a": torch.arange(4.0), "b": [1, 2, "x"], "n": np.arange(3)})
        chance = random.Random(0)
        damaged = 0
        for _ in range(300):
            flipped = bytearray(data)
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            try:
                load_pickle(bytes(flipped), is_trusted=False, what="it")
            except CheckpointDamagedError:
                damaged += 1
        assert damaged > 100

    def test_a_trusted_archive_that_needs_an_absent_module_says_which(self) -> None:
        with zipfile.ZipFile(io.BytesIO(saved(1))) as source:
            made = io.BytesIO()
            with zipfile.ZipFile(made, "w") as target:
                for name in source.namelist():
                    is_program = name.endswith("data.pkl")
                    target.writestr(
                        name, b"\x80\x02cno_such_module\nX\n." if is_program else source.read(name)
                    )
        with pytest.raises(MissingDependencyError, match="no_such_module"):
            load_pickle(made, is_trusted=True, what="it")


class TestNeedsTrust:
    @pytest.mark.parametrize("value", [1, {"a": torch.ones(2)}, np.array(["a"]), np.datetime64("2020-01-01")])
    def test_plain_values_do_not(self, value: Any) -> None:
        assert needs_trust(io.BytesIO(saved(value))) == ()

    def test_foreign_classes_do_and_are_named(self) -> None:
        assert needs_trust(io.BytesIO(saved(Foreign()))) == (f"{__name__}.Foreign",)

    def test_structured_arrays_do(self) -> None:
        (reason,) = needs_trust(io.BytesIO(saved(np.zeros(2, dtype=[("a", "f4")]))))
        assert reason == "numpy value: dtype 'V4'"

    def test_large_archives_are_judged_by_what_they_refer_to(self) -> None:
        large = torch.zeros(5_000_000)
        assert needs_trust(io.BytesIO(saved([large, np.arange(3)]))) == ()
        assert needs_trust(io.BytesIO(saved([large, Foreign()]))) == (f"{__name__}.Foreign",)

    @pytest.mark.parametrize("data", [b"", b"rawbytes"])
    def test_what_is_no_archive_does(self, data: bytes) -> None:
        stream = io.BytesIO(data)
        assert needs_trust(stream) == ("bytes that are no torch.save archive",)
        assert stream.tell() == 0


def metadata_of(**changes: Any) -> Metadata:
    size = torch.Size([2, 3])
    properties = TensorProperties(dtype=torch.bfloat16, requires_grad=True, memory_format=torch.channels_last)
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), size)]
    fields: dict[str, Any] = {
        "state_dict_metadata": {
            "a.w": TensorStorageMetadata(properties, size, chunks),
            "b": BytesStorageMetadata(),
        },
        "planner_data": {"a.w": ("a", "w"), "b": ("b",)},
        "storage_data": {
            MetadataIndex("a.w", torch.Size([0, 0]), 0): _StorageInfo("__0_0.distcp", 0, 400),
            MetadataIndex("b"): _StorageInfo("__0_0.distcp", 400, 1 << 40, ["zstd"]),
        },
        "storage_meta": StorageMeta("run/1", save_id="s"),
        "version": "1.0.0",
    }
    return Metadata(**{**fields, **changes})


def parse(data: bytes) -> Metadata:
    return parse_stock_metadata(data, url="mem", key=".metadata")


def refer(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


class TestStockMetadata:
    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_it_is_read_as_unpickling_would(self, protocol: int) -> None:
        metadata = metadata_of()
        assert parse(pickle.dumps(metadata, protocol=protocol)) == metadata

    def test_a_path_becomes_a_text(self) -> None:
        metadata = metadata_of(storage_meta=StorageMeta(pathlib.Path("/run/1")))
        parsed = parse(pickle.dumps(metadata)).storage_meta
        assert parsed is not None
        assert parsed.checkpoint_id == "/run/1"

    def test_fields_that_are_not_known_are_ignored(self) -> None:
        metadata = metadata_of()
        metadata.mcore_data = {"a.w": {"shape": (2, 3)}}  # type: ignore[attr-defined]
        assert parse(pickle.dumps(metadata)) == metadata_of()

    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("pathlib", "Path"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.serialization", "_get_layout"),
        ],
    )
    def test_state_for_a_class_or_function_is_refused_and_set_nowhere(self, module: str, name: str) -> None:
        target = getattr(sys.modules[module], name)
        before = dict(vars(target)), getattr(target, "__defaults__", None)
        text = b"X\x0c\x00\x00\x00__defaults__"
        with pytest.raises(CheckpointDamagedError):
            parse(b"\x80\x02" + refer(module, name) + b"N}" + text + text + b"\x85s\x86b.")
        assert (dict(vars(target)), getattr(target, "__defaults__", None)) == before

    @pytest.mark.parametrize("module", ["os", "builtins", "remote_ckpt.errors"])
    def test_other_references_are_refused(self, module: str) -> None:
        with pytest.raises(UntrustedDataError, match=f"{module}.system"):
            parse(b"\x80\x02" + refer(module, "system") + b".")

    @pytest.mark.parametrize("name", ["Metadata.__init__", "nn", "load"])
    def test_names_with_dots_and_other_parts_of_torch_are_refused(self, name: str) -> None:
        with pytest.raises(UntrustedDataError):
            parse(b"\x80\x02" + refer("torch", name) + b".")

    def test_a_large_memo_index_costs_nothing(self) -> None:
        with pytest.raises(CheckpointDamagedError):
            parse(b"\x80\x02Nr\xff\xff\xff\xff.")

    def test_deeply_nested_keys_do_not_overrun_the_stack(self) -> None:
        with pytest.raises(CheckpointDamagedError, match="key"):
            parse(b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.")

    @pytest.mark.parametrize(
        "changes",
        [
            {"state_dict_metadata": {1: BytesStorageMetadata()}},
            {"state_dict_metadata": {"a": 1}},
            {"state_dict_metadata": []},
            {"state_dict_metadata": {"a": TensorStorageMetadata(TensorProperties(), (2,), [])}},  # type: ignore[arg-type]
            {"storage_data": {"a": _StorageInfo("x", 0, 1)}},
            {"storage_data": {MetadataIndex("b"): _StorageInfo("x", -1, 1)}},
            {"storage_data": {MetadataIndex("b"): _StorageInfo("x", 0, "9")}},  # type: ignore[arg-type]
            {"storage_data": {MetadataIndex("b"): _StorageInfo(1, 0, 9)}},  # type: ignore[arg-type]
            {"planner_data": [1]},
            {"planner_data": {"b": ["b"]}},
            {"planner_data": {"b": ("b", 200_000_000)}},
            {"planner_data": {"b": ("b", -1)}},
            {"version": 3},
            {"storage_meta": 3},
        ],
    )
    def test_values_of_the_wrong_kind_are_damage(self, changes: dict[str, Any]) -> None:
        with pytest.raises(CheckpointDamagedError, match="cannot read DCP metadata"):
            parse(pickle.dumps(metadata_of(**changes)))

    def test_every_cut_is_damage(self) -> None:
        data = pickle.dumps(metadata_of())
        for length in range(len(data) - 1):
            with pytest.raises(CheckpointDamagedError):
                parse(data[:length])

    def test_a_flipped_bit_is_an_error_of_ours_or_unseen(self) -> None:
        data = pickle.dumps(metadata_of())
        outcomes: set[type] = set()
        for position in range(len(data) * 8):
            flipped = bytearray(data)
            flipped[position // 8] ^= 1 << position % 8
            try:
                outcomes.add(type(parse(bytes(flipped))))
            except (CheckpointDamagedError, UntrustedDataError) as error:
                outcomes.add(type(error))
        assert outcomes == {Metadata, CheckpointDamagedError, UntrustedDataError}
