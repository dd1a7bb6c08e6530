"""Framing that makes raw tensor bytes an archive that stock ``torch.load`` reads.

``torch.save`` writes a stored (uncompressed) zip: a pickle that describes the tensor, the raw bytes as
one entry, some small entries. Its layout is known, so head and tail are built here around a payload
that is never touched: bytes go from the tensor to the store without ``torch.save``, and a reader that
knows the payload's offset fetches ranges of it without ``torch.load``.

::

    head:    archive/data.pkl   archive/byteorder   archive/version   header of archive/data/0, padded
    payload: the tensor's bytes, row-major, little-endian, 64-byte aligned within the archive
    tail:    central directory, end records (zip64 ones from 4 GiB on)

Three entries of ``torch.save`` are left out on purpose. ``.format_version`` and ``.storage_alignment``
permit a reader to compute where a storage lies; without them it looks the offset up, which is right for
any layout. ``.data/serialization_id`` only tells archives apart in telemetry.

Sources: ``torch/serialization.py`` (``_save``, ``_load``), ``caffe2/serialize/inline_container.cc``, and
PKWARE's APPNOTE.TXT 6.3.10 (sections 4.3 to 4.5) for the zip records.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from remote_ckpt.errors import ConfigError

PAYLOAD_ALIGNMENT_BYTES = 64

# dtypes that torch.save writes as a legacy typed storage: _dtype_to_storage_type_map in torch/storage.py
_TYPED_STORAGES = {
    "bfloat16": ("BFloat16Storage", 2),
    "bool": ("BoolStorage", 1),
    "complex128": ("ComplexDoubleStorage", 16),
    "complex64": ("ComplexFloatStorage", 8),
    "float16": ("HalfStorage", 2),
    "float32": ("FloatStorage", 4),
    "float64": ("DoubleStorage", 8),
    "int16": ("ShortStorage", 2),
    "int32": ("IntStorage", 4),
    "int64": ("LongStorage", 8),
    "int8": ("CharStorage", 1),
    "uint8": ("ByteStorage", 1),
}

# dtypes that it writes as an untyped storage beside the dtype: _new_dtypes in torch/storage.py
_UNTYPED_ITEM_BYTES = {
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "complex32": 4,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}

SUPPORTED_DTYPES: Mapping[str, int] = MappingProxyType(
    {name: item_bytes for name, (_, item_bytes) in _TYPED_STORAGES.items()} | _UNTYPED_ITEM_BYTES
)
"""Dtype name without ``torch.`` -> bytes of one element. Anything else goes through ``torch.save`` whole."""

_ZIP32_LIMIT = 0xFFFFFFFF
_DOS_DATE = 0x0021  # 1980-01-01, the earliest that zip can say: archives do not depend on the clock
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_END64_LOCATOR = struct.Struct("<4sIQI")
_VERSION = 20
_VERSION_ZIP64 = 45

# CRC-32 of the payload's entry. torch.load never checks it (its zip reader is compiled without the check,
# and torch.serialization.set_crc32_options lets torch.save leave it out too), and it would cost 0.28 s of
# CPU per GiB beside the CRC-32C that does protect the payload. Other zip tools complain about this entry.
_UNKNOWN_CRC32 = 0


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """What stands before and after a tensor's bytes.

    Args:
        head: Bytes before the payload; their count, a multiple of 64, is the payload's offset.
        payload_bytes: Size of the payload between them.
        tail: Bytes after the payload.
    """

    head: bytes
    payload_bytes: int
    tail: bytes

    @property
    def total_bytes(self) -> int:
        """Size of the whole archive."""
        return len(self.head) + self.payload_bytes + len(self.tail)


def frame_tensor(dtype: str, sizes: Sequence[int], payload_bytes: int) -> TensorFrame:
    """Return the frame of a dense row-major tensor.

    ``head + payload + tail`` loads with ``torch.load(..., weights_only=True)`` as a contiguous CPU tensor
    that does not require a gradient. The payload must be little-endian, as torch's memory is on every
    host that this package supports. Costs about 1 microsecond for a dtype and shape seen lately, 40 for
    a new one.

    Args:
        dtype: Name without ``torch.``, one of :data:`SUPPORTED_DTYPES`.
        sizes: The tensor's shape; empty for a 0-dim tensor.
        payload_bytes: Size of the payload; only checked.

    Raises:
        ConfigError: Unsupported dtype, negative size, or a payload that does not fit dtype and shape.
    """
    frame = _frame(dtype, tuple(sizes))
    if frame.payload_bytes != payload_bytes:
        raise ConfigError(
            f"a {dtype} tensor of shape {list(sizes)} has {frame.payload_bytes} bytes, not {payload_bytes}"
        )
    return frame


def tensor_pickle(dtype: str, sizes: Sequence[int]) -> bytes:
    """Return the pickle in the archive of a dense row-major tensor; arguments and errors as above."""
    if dtype not in SUPPORTED_DTYPES:
        raise ConfigError(f"no archive framing for dtype {dtype!r}")
    return _tensor_pickle(dtype, tuple(sizes), math.prod(sizes) * SUPPORTED_DTYPES[dtype])


@lru_cache(maxsize=4096)
def _frame(dtype: str, sizes: tuple[int, ...]) -> TensorFrame:
    item_bytes = SUPPORTED_DTYPES.get(dtype)
    if item_bytes is None:
        raise ConfigError(f"no archive framing for dtype {dtype!r}; save such a tensor with torch.save")
    if any(size < 0 for size in sizes):
        raise ConfigError(f"a shape has no negative sizes: {list(sizes)}")
    payload_bytes = math.prod(sizes) * item_bytes
    return _zip_around(_tensor_pickle(dtype, sizes, payload_bytes), payload_bytes)


# --- the zip around the payload ------------------------------------------------------------------


def _zip_around(data_pkl: bytes, payload_bytes: int) -> TensorFrame:
    head = bytearray()
    directory = bytearray()
    for name, content in _small_entries(data_pkl):
        crc32 = zlib.crc32(content)
        directory += _central_header(name, crc32, len(content), len(head))
        head += _local_header(name, crc32, len(content)) + content
    directory += _central_header(b"archive/data/0", _UNKNOWN_CRC32, payload_bytes, len(head))
    head += _payload_header(b"archive/data/0", payload_bytes, len(head))
    tail = bytes(directory) + _end_records(4, len(directory), len(head) + payload_bytes)
    return TensorFrame(bytes(head), payload_bytes, tail)


def _small_entries(data_pkl: bytes) -> tuple[tuple[bytes, bytes], ...]:
    # torch takes the archive's inner folder from the first entry and wants these names under it.
    return (
        (b"archive/data.pkl", data_pkl),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    )


def _local_header(name: bytes, crc32: int, size_bytes: int, extra: bytes = b"") -> bytes:
    is_zip64 = size_bytes >= _ZIP32_LIMIT
    version = _VERSION_ZIP64 if is_zip64 else _VERSION
    size32 = min(size_bytes, _ZIP32_LIMIT)
    fixed = _LOCAL.pack(
        b"PK\x03\x04", version, 0, 0, 0, _DOS_DATE, crc32, size32, size32, len(name), len(extra)
    )
    return fixed + name + extra


def _payload_header(name: bytes, size_bytes: int, offset_bytes: int) -> bytes:
    """Local header of the payload, padded with torch's own filler field so that the payload is aligned."""
    zip64 = _zip64_sizes(size_bytes)
    unpadded = offset_bytes + _LOCAL.size + len(name) + len(zip64) + 4
    padding_bytes = -unpadded % PAYLOAD_ALIGNMENT_BYTES
    filler = b"FB" + struct.pack("<H", padding_bytes) + b"Z" * padding_bytes
    return _local_header(name, _UNKNOWN_CRC32, size_bytes, zip64 + filler)


def _zip64_sizes(size_bytes: int) -> bytes:
    if size_bytes < _ZIP32_LIMIT:
        return b""
    return struct.pack("<HHQQ", 1, 16, size_bytes, size_bytes)


def _central_header(name: bytes, crc32: int, size_bytes: int, offset_bytes: int) -> bytes:
    extra = _zip64_sizes(size_bytes)
    version = _VERSION_ZIP64 if extra else _VERSION
    size32 = min(size_bytes, _ZIP32_LIMIT)
    fixed = _CENTRAL.pack(
        b"PK\x01\x02", version, version, 0, 0, 0, _DOS_DATE, crc32, size32, size32,
        len(name), len(extra), 0, 0, 0, 0, offset_bytes,
    )  # fmt: skip
    return fixed + name + extra


def _end_records(entry_count: int, directory_bytes: int, directory_offset: int) -> bytes:
    offset32 = min(directory_offset, _ZIP32_LIMIT)
    end = _END.pack(b"PK\x05\x06", 0, 0, entry_count, entry_count, directory_bytes, offset32, 0)
    if directory_offset < _ZIP32_LIMIT:
        return end
    end64 = _END64.pack(
        b"PK\x06\x06", _END64.size - 12, _VERSION_ZIP64, _VERSION_ZIP64, 0, 0,
        entry_count, entry_count, directory_bytes, directory_offset,
    )  # fmt: skip
    locator = _END64_LOCATOR.pack(b"PK\x06\x07", 0, directory_offset + directory_bytes, 1)
    return end64 + locator + end


# --- the pickle that describes the tensor ----------------------------------------------------------


def _tensor_pickle(dtype: str, sizes: tuple[int, ...], payload_bytes: int) -> bytes:
    """``data.pkl``: the protocol-2 pickle that ``torch.save`` would write, without its memo entries.

    Written by hand because a pickler needs torch's own functions and classes to name them.
    """
    if dtype in _TYPED_STORAGES:
        storage_name, item_bytes = _TYPED_STORAGES[dtype]
        rebuild = _global("torch._utils", "_rebuild_tensor_v2")
        storage = _persistent_id(_global("torch", storage_name), payload_bytes // item_bytes)
        dtype_argument = b""
    else:
        rebuild = _global("torch._utils", "_rebuild_tensor_v3")
        storage = _persistent_id(_global("torch.storage", "UntypedStorage"), payload_bytes)
        dtype_argument = _global("torch", dtype)
    return b"".join(
        (
            b"\x80\x02",
            rebuild,
            b"(",
            storage,
            _integer(0),  # storage offset
            _integers(sizes),
            _integers(_row_major_strides(sizes)),
            b"\x89",  # requires_grad=False
            _global("collections", "OrderedDict") + b")R",  # no hooks
            dtype_argument,
            b"tR.",
        )
    )


def _persistent_id(storage_class: bytes, element_count: int) -> bytes:
    return (
        b"(" + _text("storage") + storage_class + _text("0") + _text("cpu") + _integer(element_count) + b"tQ"
    )


def _row_major_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements as torch computes them: an empty dimension counts as one."""
    strides = []
    stride = 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _integer(value: int) -> bytes:
    if value < 0x100:
        return b"K" + bytes((value,))
    if value < 0x8000_0000:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _integers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
