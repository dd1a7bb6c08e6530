"""numpy arrays and scalars out of a ``torch.save`` archive, without handing numpy a stranger's pickle.

numpy's own ``dtype.__setstate__`` and ``ndarray.__setstate__`` believe what they are told: fields beyond the
end of an element, or an object's address, and reading the array reads any memory. Here the archive's
references to numpy are renamed to the stand-ins below, which check what they are given. torch's
``weights_only`` unpickler is told of these under their own names, once, so that nobody else's list of safe
classes changes, and nobody else's load meets them.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import reprlib
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO, Literal

import torch

from remote_ckpt.stock_payload import ZIP_ERRORS, check_entries, is_zip

_PLAIN = re.compile(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8|[SU][1-9][0-9]{0,8}")
"""Element types that are nothing but their bytes, as numpy writes them."""
_UNITS = re.compile(r"generic|Y|M|W|D|h|m|s|ms|us|μs|ns|ps|fs|as")


class RefusedValueError(pickle.UnpicklingError):
    """A numpy value that is not plain data."""

    def __init__(self, what: str) -> None:
        super().__init__(f"Unsupported numpy value: {what}")


class ElementType:
    """Stands in for ``numpy.dtype``."""

    def __init__(self, code: Any = "", is_aligned: Any = False, must_copy: Any = False) -> None:
        del is_aligned, must_copy  # they mean nothing for plain types
        if type(code) is not str or not _PLAIN.fullmatch(code):
            raise RefusedValueError(f"dtype {reprlib.repr(code)}")
        self._code = code
        self._order = "="

    def __setstate__(self, state: Any) -> None:
        """Take the byte order, and a date's unit, of numpy's state; what it says of sizes is not needed."""
        if type(state) is not tuple or len(state) < 5 or state[2:5] != (None, None, None):
            raise RefusedValueError(f"dtype {self._code} with parts")
        if state[1] not in ("<", ">", "=", "|"):
            raise RefusedValueError("a byte order that does not exist")
        self._order = state[1]
        if self._code[0] in "mM":
            self._code += _unit(state[-1])

    def restore(self) -> Any:
        """Return the numpy dtype."""
        import numpy as np

        order = "=" if self._order == "|" else self._order
        return np.dtype(self._code).newbyteorder(order)  # type: ignore[arg-type]  # one of four

    def __hash__(self) -> int:
        raise RefusedValueError("a dtype as a key")  # which would have to be replaced in place


def _unit(metadata: Any) -> str:
    try:
        _, (unit, count, *_) = metadata
        name = unit.decode() if isinstance(unit, bytes) else unit
    except (TypeError, ValueError, UnicodeDecodeError):
        raise RefusedValueError("a date without a unit") from None
    if type(name) is not str or not _UNITS.fullmatch(name) or type(count) is not int or count < 1:
        raise RefusedValueError("a date with an unknown unit")
    return "" if name == "generic" else f"[{count}{name}]"


class Array:
    """Stands in for ``numpy.ndarray``."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        """Make the array of numpy's state ``(version, shape, dtype, is_fortran, bytes)``."""
        if type(state) is not tuple or len(state) != 5:
            raise RefusedValueError("an array's state")
        _, shape, element_type, is_fortran, data = state
        self.value = _array(element_type, shape, bool(is_fortran), data)


def new_array(kind: Any, shape: Any, code: Any) -> Array:
    """Stand in for numpy's ``_reconstruct``, whose shape and type the state replaces."""
    del shape, code
    if kind is not Array:
        raise RefusedValueError("a subclass of ndarray")
    return Array()


def new_scalar(element_type: Any, data: Any = b"") -> Any:
    """Stand in for numpy's ``scalar``."""
    return _array(element_type, (), False, data)[()]


def no_bytes() -> bytes:
    """Stand in for ``bytes``, which a pickle of protocol 2 calls for an empty array's data."""
    return b""


def _array(element_type: Any, shape: Any, is_fortran: bool, data: Any) -> Any:
    import numpy as np

    if type(element_type) is not ElementType or type(data) is not bytes:
        raise RefusedValueError("an array of Python objects")
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
        raise RefusedValueError("an array's shape")
    dtype = element_type.restore()
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("a numpy array's shape does not fit its bytes")
    if dtype.kind == "b" and data.strip(b"\0\1"):
        raise ValueError("a numpy array of bool holds other bytes than 0 and 1")
    order: Literal["F", "C"] = "F" if is_fortran else "C"
    return np.ndarray(shape, dtype, bytearray(data) or bytearray(1), order=order).copy(order)


_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_STAND_INS: dict[str, Any] = {
    "numpy dtype": ElementType,
    "numpy ndarray": Array,
    **{f"{module} _reconstruct": new_array for module in _MULTIARRAY},
    **{f"{module} scalar": new_scalar for module in _MULTIARRAY},
    "__builtin__ bytes": no_bytes,
}
"""By module and name as pickletools gives them."""


def with_stand_ins(archive: BinaryIO) -> io.BytesIO | None:
    """Return a copy of a ``torch.save`` archive that refers to the stand-ins; None if nothing is to rename.

    Raises:
        zipfile.BadZipFile, ValueError: It is damaged.
    """
    archive.seek(0)
    if not is_zip(archive):
        return None  # torch's format until 1.5: numpy values there need trust
    with zipfile.ZipFile(archive) as source:
        found = _program_to_check(source)
        if found is None:
            return None
        _register()
        name, program = found
        return _replaced(source, name, _renamed(program))


def has_values_to_check(path: str) -> bool:
    """Whether an archive on disk holds numpy values, so that it cannot be mapped as it is."""
    try:
        with zipfile.ZipFile(path) as source:
            return _program_to_check(source) is not None
    except ZIP_ERRORS:
        return True  # damaged: whoever reads it says so


def _program_to_check(source: zipfile.ZipFile) -> tuple[str, bytes] | None:
    check_entries(source)
    name = next((name for name in source.namelist() if name.endswith("/data.pkl")), None)
    if name is None:
        return None
    program = source.read(name)
    has_numpy = b"numpy" in program or b"__builtin__\nbytes\n" in program
    return (name, program) if has_numpy else None


def _replaced(source: zipfile.ZipFile, name: str, content: bytes) -> io.BytesIO:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as target:
        for other in source.namelist():
            target.writestr(other, content if other == name else source.read(other))
    made.seek(0)
    return made


def _renamed(program: bytes) -> bytes:
    parts, done = [], 0
    for opcode, argument, position in pickletools.genops(program):
        stand_in = _STAND_INS.get(str(argument)) if opcode.name == "GLOBAL" else None
        if stand_in is not None and position is not None:
            parts += [program[done:position], f"c{__name__}\n{stand_in.__qualname__}\n".encode()]
            done = position + len(f"c{argument}\n")
    return b"".join([*parts, program[done:]])


def _register() -> None:
    """Tell torch of the stand-ins, again where somebody has cleared its list."""
    stand_ins = set(_STAND_INS.values())
    if not stand_ins <= set(torch.serialization.get_safe_globals()):
        torch.serialization.add_safe_globals(list(stand_ins))


def restore_numpy(value: Any) -> Any:
    """Return a loaded value with numpy's own arrays and dtypes in place of the stand-ins."""
    return _Restorer().restore(value)


class _Restorer:
    """Goes through containers, each once, and changes those in place that can be."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._kept: list[Any] = []  # what was replaced stays alive, so that ids stay unique

    def restore(self, value: Any) -> Any:
        if isinstance(value, Array):
            if value.value is None:
                raise ValueError("a numpy array without its state")
            return value.value
        if isinstance(value, ElementType):
            return value.restore()
        if id(value) in self._seen:
            return self._seen[id(value)]
        if isinstance(value, dict | list):
            self._seen[id(value)] = value
            self._fill(value)
        elif type(value) is tuple:
            restored = self._all(value)
            self._kept.append(value)
            self._seen[id(value)] = value = tuple(restored) if restored is not value else value
        elif isinstance(getattr(value, "__dict__", None), dict):  # of a class that the user allows
            self._seen[id(value)] = value
            self._fill(vars(value))
        return value

    def _fill(self, value: dict[Any, Any] | list[Any]) -> None:
        if isinstance(value, list):
            value[:] = self._all(value)
            return
        for key, inner in value.items():
            value[key] = self.restore(inner)

    def _all(self, values: Any) -> Iterable[Any]:
        restored = [self.restore(inner) for inner in values]
        is_same = all(old is new for old, new in zip(values, restored, strict=True))
        return values if is_same else restored


__all__ = ["RefusedValueError", "restore_numpy", "with_stand_ins"]
