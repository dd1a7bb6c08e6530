"""Where in a ``torch.save`` archive the elements of its tensor lie, found without loading it.

Stock metadata says where an archive is, not where in it the elements are. The archive is a stored zip; its
pickle, parsed as inert data, must describe exactly the dense, row-major tensor that is expected. Whatever
else it is (another layout, a view of something larger, a subclass), its elements are not looked for.

Source: ``torch/serialization.py`` (``_save``).
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from typing import Any, BinaryIO

from remote_ckpt.archive import SUPPORTED_DTYPES, tensor_pickle
from remote_ckpt.inert_pickle import MalformedPickleError, Named, Persistent, Record, parse_pickle

_MAX_PICKLE_BYTES = 1 << 16
_FOLDER = 0x10  # of the attributes that MS-DOS had; torch's reader goes by it
_LOCAL_HEADER = struct.Struct("<4s22xHH")
ZIP_ERRORS = (
    zipfile.BadZipFile,
    LookupError,
    ValueError,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zlib.error,
)
"""What ``zipfile`` raises for what it cannot read."""


class PackedArchiveError(MalformedPickleError):
    """An archive is compressed: sound perhaps, but a few bytes of it could become gigabytes."""


def is_zip(file: BinaryIO | str) -> bool:
    """Whether a file is a zip, or a damaged one."""
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # of some that look like one it says so by this
        return True


def check_entries(zipped: zipfile.ZipFile) -> None:
    """Refuse entries that ``torch.save`` does not write, and that are not what torch's reader makes of them.

    Raises:
        PackedArchiveError: One is packed with deflate, which torch's reader would unpack.
        MalformedPickleError: One is packed otherwise, or is only said to be, or is marked as a folder: torch
            reads nothing then, and takes what its memory held before for the content.
    """
    for info in zipped.infolist():
        if info.compress_type == zipfile.ZIP_DEFLATED and info.compress_size != info.file_size:
            raise PackedArchiveError(f"{info.filename!r:.80} is packed, which torch.save does not do")
        if info.compress_type != zipfile.ZIP_STORED:
            raise MalformedPickleError(f"{info.filename!r:.80} is packed, which torch.save does not do")
        if info.file_size and (info.external_attr & _FOLDER or info.filename.endswith("/")):
            raise MalformedPickleError(f"{info.filename!r:.80} is marked as a folder and has bytes")


def find_payload(archive: BinaryIO, dtype: str, sizes: tuple[int, ...]) -> int | None:
    """Return the offset in the archive of a tensor's row-major, little-endian elements.

    Args:
        archive: Seekable.
        dtype: The tensor's, without ``torch.``.
        sizes: Its shape.

    Returns:
        None where the archive does not hold just this tensor in this form.
    """
    if dtype not in SUPPORTED_DTYPES:
        return None
    try:
        with zipfile.ZipFile(archive) as zipped:
            return _find(archive, zipped, dtype, sizes)
    except ZIP_ERRORS:
        return None


def _find(archive: BinaryIO, zipped: zipfile.ZipFile, dtype: str, sizes: tuple[int, ...]) -> int | None:
    check_entries(zipped)
    names = zipped.namelist()
    if len(set(names)) < len(names):
        return None  # of two entries with one name torch may take the other one
    folder = names[0].partition("/")[0] if names else ""
    byte_order = f"{folder}/byteorder"  # early versions of torch did not write it
    if byte_order in names and _read_small(zipped, byte_order) != b"little":
        return None
    found = parse_pickle(_read_small(zipped, f"{folder}/data.pkl"), Named)
    payload = zipped.getinfo(f"{folder}/data/0")
    is_expected = payload.file_size == math.prod(sizes) * SUPPORTED_DTYPES[dtype]
    if not is_expected or not _is_same(found, parse_pickle(tensor_pickle(dtype, sizes), Named)):
        return None
    return _offset_of(archive, payload)


def _read_small(zipped: zipfile.ZipFile, name: str) -> bytes:
    info = zipped.getinfo(name)
    if info.file_size > _MAX_PICKLE_BYTES:
        raise MalformedPickleError(f"{name} is too large for the description of a tensor")
    return zipped.read(name)


def _offset_of(archive: BinaryIO, entry: zipfile.ZipInfo) -> int | None:
    archive.seek(entry.header_offset)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(archive.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        return None
    begin = entry.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)
    is_inside = begin + entry.file_size <= archive.seek(0, io.SEEK_END)
    return begin if is_inside and entry.compress_size == entry.file_size else None


def _is_same(first: Any, second: Any) -> bool:
    """Whether two pickles describe the same; what they refer to is compared by name."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Named):
        return (first.module, first.name) == (second.module, second.name)
    if isinstance(first, Persistent):
        return _is_same(first.name, second.name)
    if isinstance(first, Record):
        parts = (first.kind, first.arguments, first.state), (second.kind, second.arguments, second.state)
        return _is_same(*parts)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    return bool(first == second) and not isinstance(first, list | dict)
