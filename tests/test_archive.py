"""An archive framed without torch is, to torch, what torch.save would have written."""

from __future__ import annotations

import io
import math
import pickletools
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_ckpt.archive import SUPPORTED_DTYPES, TensorFrame, frame_tensor
from remote_ckpt.errors import ConfigError

SHAPES = [(), (0,), (0, 5), (5, 0), (3,), (2, 3, 4), (1, 1), (300, 2), (2, 2, 2, 2, 2)]


def archive_of(dtype: str, sizes: tuple[int, ...], payload: bytes) -> bytes:
    frame = frame_tensor(dtype, sizes, len(payload))
    return frame.head + payload + frame.tail


def random_payload(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """Random bits, so that NaN payloads, infinities and subnormals occur (booleans are 0 or 1)."""
    source = random.Random(f"{dtype}{sizes}")
    size_bytes = math.prod(sizes) * SUPPORTED_DTYPES[dtype]
    if dtype == "bool":
        return bytes(source.getrandbits(1) for _ in range(size_bytes))
    return source.randbytes(size_bytes)


def load(archive: bytes) -> Any:
    return torch.load(io.BytesIO(archive), weights_only=True, map_location="cpu", mmap=False)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def savable_dtypes() -> set[str]:
    """Names of the dtypes that this torch saves densely, from torch's own two tables."""
    dtypes = set(torch.storage._dtype_to_storage_type_map()) | torch.storage._new_dtypes()
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    return {name for name in names if not name.startswith(("qint", "quint"))}


class TestLoadingWithStockTorch:
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
    @pytest.mark.parametrize("dtype", sorted(SUPPORTED_DTYPES))
    @pytest.mark.parametrize("sizes", SHAPES)
    def test_every_dtype_and_shape_loads_bit_for_bit(self, dtype: str, sizes: tuple[int, ...]) -> None:
        payload = random_payload(dtype, sizes)
        tensor = load(archive_of(dtype, sizes, payload))
        assert tensor.dtype == getattr(torch, dtype)
        assert tuple(tensor.shape) == sizes
        assert raw_bytes(tensor) == payload
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0
        assert not tensor.requires_grad

    def test_every_dtype_that_torch_saves_densely_is_supported(self) -> None:
        assert set(SUPPORTED_DTYPES) == savable_dtypes()

    @pytest.mark.parametrize("dtype", sorted(SUPPORTED_DTYPES))
    def test_element_sizes_are_those_of_torch(self, dtype: str) -> None:
        assert SUPPORTED_DTYPES[dtype] == getattr(torch, dtype).itemsize

    def test_the_default_mode_of_torch_load_reads_it(self) -> None:
        archive = archive_of("float32", (2,), b"\x00\x00\x80\x3f\x00\x00\x00\x40")
        assert torch.load(io.BytesIO(archive)).tolist() == [1.0, 2.0]

    def test_one_of_several_archives_in_an_object_loads_through_a_slice(self) -> None:
        payloads = [bytes([n]) * 12 for n in range(3)]
        archives = [archive_of("int32", (3,), payload) for payload in payloads]
        joined = b"".join(archives)
        start = len(archives[0])
        tensor = load(joined[start : start + len(archives[1])])
        assert tensor.tolist() == [0x01010101] * 3

    def test_a_mapped_file_gives_the_same_values(self, tmp_path: Path) -> None:
        payload = random_payload("int64", (4, 2))
        path = tmp_path / "t.distcp"
        path.write_bytes(archive_of("int64", (4, 2), payload))
        tensor = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        assert tensor.numpy().tobytes() == payload

    def test_strides_of_empty_and_unit_dimensions_are_those_of_torch(self) -> None:
        for sizes in SHAPES:
            archive = archive_of("uint8", sizes, bytes(math.prod(sizes)))
            assert load(archive).stride() == torch.empty(sizes, dtype=torch.uint8).stride()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
    def test_the_pickle_names_what_torch_save_names(self, dtype: str) -> None:
        buffer = io.BytesIO()
        torch.save(torch.zeros((2, 3), dtype=getattr(torch, dtype)), buffer)
        ours = archive_of(dtype, (2, 3), bytes(6 * SUPPORTED_DTYPES[dtype]))
        assert pickled_names(ours) == pickled_names(buffer.getvalue())


def pickled_names(archive: bytes) -> list[Any]:
    """Arguments of the pickle's opcodes, memo bookkeeping and framing of tuples left out."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        data = file.read("archive/data.pkl")
    operations = pickletools.genops(data)
    return [value for code, value, _ in operations if value is not None and code.name != "BINPUT"]


class TestLayout:
    @pytest.mark.parametrize("sizes", [*SHAPES, (1 << 40,)])
    def test_the_payload_begins_at_a_multiple_of_64_bytes(self, sizes: tuple[int, ...]) -> None:
        frame = frame_tensor("uint8", sizes, math.prod(sizes))
        assert len(frame.head) % 64 == 0
        assert frame.total_bytes == len(frame.head) + math.prod(sizes) + len(frame.tail)

    def test_torch_finds_the_payload_where_the_head_ends(self) -> None:
        frame = frame_tensor("float64", (3, 7), 168)
        archive = io.BytesIO(frame.head + bytes(168) + frame.tail)
        reader: Any = torch._C.PyTorchFileReader(archive)
        assert reader.get_record_offset("data/0") == len(frame.head)

    def test_small_entries_pass_a_zip_tools_checksum(self) -> None:
        archive = archive_of("float32", (5,), bytes(20))
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            names = ["archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"]
            assert file.namelist() == names
            assert file.read("archive/byteorder") == b"little"
            assert file.read("archive/version") == b"3\n"

    def test_equal_tensors_have_equal_frames(self) -> None:
        assert frame_tensor("int8", [2, 2], 4) == frame_tensor("int8", (2, 2), 4)


class TestBeyondFourGibibytes:
    """The payloads are holes in sparse files: nothing of that size is written or allocated."""

    def write_sparse(self, path: Path, frame: TensorFrame, *, last_byte: int) -> None:
        with path.open("wb") as file:
            file.write(frame.head)
            file.seek(frame.payload_bytes - 1, io.SEEK_CUR)
            file.write(bytes([last_byte]))
            file.write(frame.tail)

    @pytest.mark.parametrize("payload_bytes", [2**32 - 2000, 2**32 - 2, 2**32 - 1, 2**32, 5 * 2**30 + 3])
    def test_zip_tools_and_torch_read_the_sizes(self, payload_bytes: int, tmp_path: Path) -> None:
        frame = frame_tensor("uint8", (payload_bytes,), payload_bytes)
        path = tmp_path / "large.distcp"
        self.write_sparse(path, frame, last_byte=7)
        with zipfile.ZipFile(path) as file:
            entry = file.getinfo("archive/data/0")
            assert entry.file_size == payload_bytes
            assert entry.compress_size == payload_bytes
        tensor = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        assert tensor.shape == (payload_bytes,)
        assert tensor[0].item() == 0
        assert tensor[-1].item() == 7

    def test_a_shape_beyond_32_bits_loads(self, tmp_path: Path) -> None:
        sizes = (3, 2**31, 1)
        frame = frame_tensor("bfloat16", sizes, 12 * 2**30)
        self.write_sparse(tmp_path / "t", frame, last_byte=0x40)
        tensor = torch.load(tmp_path / "t", weights_only=True, map_location="cpu", mmap=True)
        assert tensor.shape == sizes
        assert tensor.stride() == (2**31, 1, 1)
        assert tensor[2, -1, 0].item() == 2.0


class TestRefusals:
    @pytest.mark.parametrize("dtype", ["qint8", "int4", "torch.float32", "float", ""])
    def test_other_dtypes_are_refused(self, dtype: str) -> None:
        with pytest.raises(ConfigError, match=r"torch\.save"):
            frame_tensor(dtype, (1,), 1)

    def test_a_payload_of_another_size_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="has 24 bytes, not 23"):
            frame_tensor("float32", (2, 3), 23)

    def test_a_negative_size_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="negative"):
            frame_tensor("float32", (-2, -3), 24)
