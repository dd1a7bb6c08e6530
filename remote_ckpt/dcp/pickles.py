"""Pickles from a checkpoint, read without running code from it.

torch's own ``weights_only`` unpickler allows tensors, plain containers and what the user added to its list.
On top of it come plain numpy values (:mod:`remote_ckpt.dcp.numpy_values`): random states hold them. Stock
``.metadata`` files are not unpickled at all (:mod:`remote_ckpt.dcp.stock_pickle`).
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from typing import Any, BinaryIO

import torch

from remote_ckpt.dcp.numpy_values import RefusedValueError, restore_numpy, with_stand_ins
from remote_ckpt.dcp.stock_pickle import parse_stock_metadata
from remote_ckpt.errors import CheckpointDamagedError, MissingDependencyError, UntrustedDataError
from remote_ckpt.options import MiB
from remote_ckpt.stock_payload import ZIP_ERRORS, PackedArchiveError, is_zip

_TRIED_BYTES = 16 * MiB
"""What is at most this large is loaded once more while it is saved, to see whether that needs trust."""

_REFUSALS = re.compile(
    r"was not an allowed global|whose module \S+ is blocked|must be imported to load|Unsupported numpy value"
    r"|Can only (create new object|build Tensor)|reduce for unrecognized function|persistent_load"
)
"""What torch says where a pickle is sound and asks for more than is allowed. All else is damage."""
_NAMED = re.compile(r"GLOBAL (\S+) was not|module (\S+) is blocked|Unsupported (numpy value: .+)")
_SAFE_PROTOCOL = 2
"""torch's safe unpickler reads this one only, which is the one that ``torch.save`` writes."""


def load_pickle(data: BinaryIO | memoryview | bytes, *, is_trusted: bool, what: str) -> Any:
    """Load a ``torch.save`` archive without running code from it, unless it is trusted. Any thread.

    Args:
        data: The archive's bytes, or a seekable file of them.
        is_trusted: Unpickle without limits.
        what: Names the item in errors.

    Raises:
        UntrustedDataError: It needs a class that is not allowed; the message names it. Or it is compressed.
        CheckpointDamagedError: It is no such archive, or is damaged.
        MissingDependencyError: It is trusted, and a module that it needs is not installed.
    """
    stream = io.BytesIO(data) if isinstance(data, (bytes, memoryview)) else data
    stream.seek(0)
    try:
        return _load_trusted(stream, what) if is_trusted else _load_safely(stream)
    except (MemoryError, MissingDependencyError):
        raise
    except PackedArchiveError as error:
        raise UntrustedDataError(
            f"{what} is compressed ({error}), and a few bytes could become gigabytes: unpack it and zip it "
            "again without compression (zip -0 -r), or pass trusted=True if you trust whoever wrote it"
        ) from error
    except RecursionError as error:
        raise CheckpointDamagedError(f"{what} cannot be read: it is nested too deeply") from error
    except Exception as error:  # torch raises whatever its parsing of damaged bytes comes upon
        if not is_trusted and _is_refusal(error, stream):
            raise UntrustedDataError(
                f"{what} holds Python objects that are not loaded from an untrusted checkpoint"
                f"{_named(error)}: pass trusted=True if you trust whoever wrote it"
            ) from error
        raise CheckpointDamagedError(f"{what} cannot be read: {_first_line(error)}") from error


def _load_trusted(stream: BinaryIO, what: str) -> Any:
    try:
        return torch.load(stream, map_location="cpu", weights_only=False)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{what} needs a module that is not installed: {error.name}") from error


def _load_safely(stream: BinaryIO) -> Any:
    renamed = with_stand_ins(stream)
    stream.seek(0)
    value = torch.load(renamed or stream, map_location="cpu", weights_only=True)
    return value if renamed is None else restore_numpy(value)


def _is_refusal(error: Exception, stream: BinaryIO) -> bool:
    """Whether a sound archive asks for more than is allowed, rather than being damaged."""
    if not isinstance(error, pickle.UnpicklingError):
        return False
    program = _program(stream)
    if program is None:
        return False
    return bool(_REFUSALS.search(_text_of(error))) or program[1:2] > bytes([_SAFE_PROTOCOL])


def _program(stream: BinaryIO) -> bytes | None:
    """Return the archive's pickle; None if a checksum says that it is damaged."""
    stream.seek(0)
    if not is_zip(stream):
        stream.seek(0)
        return stream.read(2)
    try:
        with zipfile.ZipFile(stream) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            is_stored = archive.getinfo(name).compress_type == zipfile.ZIP_STORED
            return archive.read(name) if is_stored else None
    except (StopIteration, *ZIP_ERRORS):
        return None


def needs_trust(stream: io.BytesIO) -> tuple[str, ...]:
    """Return why safe loading will refuse a ``torch.save`` archive: names of classes; empty if it will not.

    Args:
        stream: The archive. Above 16 MiB only the classes that it refers to are looked at.
    """
    try:
        if stream.getbuffer().nbytes > _TRIED_BYTES:
            return _foreign_globals(stream)
        load_pickle(stream, is_trusted=False, what="it")
    except UntrustedDataError as error:
        return (_reason(error.__cause__) or "an unknown kind of object",)
    except CheckpointDamagedError:
        return ("bytes that are no torch.save archive",)
    finally:
        stream.seek(0)
    return ()


def _foreign_globals(stream: io.BytesIO) -> tuple[str, ...]:
    stream.seek(0)
    try:
        archive = with_stand_ins(stream) or stream
        archive.seek(0)
        return tuple(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(archive)))
    except (pickle.UnpicklingError, *ZIP_ERRORS):
        return ("bytes that are no torch.save archive",)


def _named(error: Exception) -> str:
    reason = _reason(error)
    return f" ({reason})" if reason else ""


def _reason(error: BaseException | None) -> str | None:
    """Return the class, or the kind of value, that torch's message names."""
    found = None if error is None else _NAMED.search(_text_of(error))
    return None if found is None else next(group for group in found.groups() if group)


def _first_line(error: Exception) -> str:
    text = _text_of(error)
    text = text.partition("WeightsUnpickler error: ")[2] or text
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0]}".removesuffix(": ")


def _text_of(error: BaseException) -> str:
    """Return an error's message. One that would show a value of the pickle has none: nested tuples of a few
    bytes may overrun the stack when they are shown, or fill the memory."""
    is_plain = all(isinstance(part, str | bytes) or _is_small(part) for part in error.args)
    return str(error) if is_plain else ""


def _is_small(value: Any) -> bool:
    return value is None or (isinstance(value, int) and abs(value) < 1 << 64)


__all__ = ["RefusedValueError", "load_pickle", "needs_trust", "parse_stock_metadata"]
