"""Mutations that keep files readable enough to get deep into a parser: of JSON, pickles and archives."""

from __future__ import annotations

import io
import json
import pickletools
import random
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

Scramble = Callable[[bytes], bytes]
"""Changes some bytes: libFuzzer's own mutation, or a few random flips."""

_MAX_COPIES = 40
_MAX_BYTES = 1 << 18
_MAX_UNPACKED_BYTES = 1 << 22
_JSON_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 255, 2**31, 2**32, 2**63 - 1, 2**63, 10**40, 0.5, -0.0, 1e300,
    1e-320, float("nan"), float("inf"), "", "nan", "inf", "\ud800", "\0", "../x",
    "d-0123456789abcdef/0.distcp", "AAAA", [], {}, [0], [[]], [-1], ["a"], {"tuple": []}, {"dict": {}},
    {"float": "nan"}, {"": None},
)  # fmt: skip
_OPCODES: tuple[bytes, ...] = (
    b"N", b"\x88", b"\x89", b"K\x01", b"M\xff\xff", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\x00",
    b"G\x7f\xf8\0\0\0\0\0\0", b"X\x01\0\0\0a", b"\x8c\x03\xed\xa0\x80", b"(", b")", b"}", b"]", b"a", b"e",
    b"s", b"u", b"t", b"\x85", b"\x86", b"\x87", b"\x94", b"h\x00", b"h\x01", b"j\0\0\0\0", b"q\x00",
    b"r\xff\xff\xff\xff", b"R", b"\x81", b"b", b"Q", b"0", b"1", b"2", b"o", b"i", b"\x92", b"P0\n", b".",
    b"\x95" + b"\xff" * 8, b"\x80\x05", b"ctorch\nSize\n", b"ctorch\nfloat32\n",
    b"ccollections\nOrderedDict\n", b"cfuzz.traps\nspring\n(tR", b"cos\nsystem\n(X\x01\0\0\0:tR",
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"cbuiltins\ngetattr\n",
)  # fmt: skip


# --- JSON --------------------------------------------------------------------------------------------


def mutate_json(text: bytes, chance: random.Random, scramble: Scramble) -> bytes:
    """Change a few places of a JSON document; what is none is scrambled."""
    if chance.random() < 0.25:
        return scramble(text)
    try:
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            if len(text) > _MAX_BYTES:  # copies of copies would grow without end
                break
            holder = [json.loads(text)]
            _change(holder, chance, scramble)
            text = json.dumps(holder[0]).encode()
    except (ValueError, RecursionError):
        return scramble(text)
    return text


def _change(holder: list[Any], chance: random.Random, scramble: Scramble) -> None:
    places = list(_places(holder))
    container, key = chance.choice(places)
    kind = chance.randrange(8)
    if kind == 0 and container is not holder:
        del container[key]
    elif kind == 1 and isinstance(container, list):
        container[key:key] = [container[key]] * chance.choice((1, 1, 2, _MAX_COPIES))
    elif kind == 2:
        other, place = chance.choice(places)
        container[key] = _copied(other[place])
    elif kind == 3 and isinstance(container[key], int):
        container[key] += chance.choice((-64, -8, -1, 1, 8, 64))
    elif kind == 4 and isinstance(container[key], str):
        container[key] = scramble(container[key].encode("utf-8", "replace")).decode("utf-8", "replace")
    elif kind == 5 and isinstance(container, dict):
        container[str(chance.choice(_JSON_VALUES))] = container[key]
    elif kind == 6:
        for _ in range(chance.choice((1, 3, 40, 2000))):
            container[key] = chance.choice(([container[key]], {"tuple": [container[key]]}))
    else:
        container[key] = _copied(chance.choice(_JSON_VALUES))


def _places(holder: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a document, as its container and the key in that."""
    waiting: list[Any] = [holder]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list):
                waiting.append(container[key])


def _copied(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except RecursionError:
        return None


# --- gzip --------------------------------------------------------------------------------------------


def gunzip(data: bytes) -> bytes | None:
    """Return what a gzip member holds, if it is not too much."""
    expander = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        return expander.decompress(data, _MAX_UNPACKED_BYTES)
    except zlib.error:
        return None


def gzip(data: bytes, level: int = 1) -> bytes:
    """Return a gzip member."""
    packer = zlib.compressobj(level, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


# --- pickles -----------------------------------------------------------------------------------------


def mutate_pickle(program: bytes, chance: random.Random, scramble: Scramble) -> bytes:
    """Leave out, repeat, exchange or put in a few opcodes with their arguments."""
    if chance.random() < 0.25:
        return scramble(program)
    parts = _opcodes_of(program)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        if sum(map(len, parts)) > _MAX_BYTES:
            break
        at = chance.randrange(len(parts))
        kind = chance.randrange(6)
        if kind == 0 and len(parts) > 1:
            del parts[at]
        elif kind == 1:
            parts[at:at] = [parts[at]] * chance.choice((1, 1, 2, _MAX_COPIES, 3000))
        elif kind == 2:
            parts[at] = chance.choice(parts)
        elif kind == 3:
            begin = chance.randrange(len(parts))
            parts[at:at] = parts[begin : begin + chance.randrange(1, 30)]
        elif kind == 4:
            parts[at] = scramble(parts[at])
        else:
            parts.insert(at, chance.choice(_OPCODES))
    return b"".join(parts)


def _opcodes_of(program: bytes) -> list[bytes]:
    begins: list[int] = []
    try:
        begins += [position for _, _, position in pickletools.genops(program) if position is not None]
    except (ValueError, IndexError, UnicodeError, OverflowError):
        begins += [begins[-1] + 1] if begins else []
    begins = [begin for begin in begins if begin < len(program)] or [0]
    return [program[begin:end] for begin, end in zip(begins, [*begins[1:], len(program)], strict=True)]


# --- archives ----------------------------------------------------------------------------------------


def mutate_archive(data: bytes, chance: random.Random, scramble: Scramble) -> bytes:
    """Change an entry of a zip, or how it is packed; the checksums of the zip are right again."""
    if chance.random() < 0.35:
        return scramble(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as source:
            if any(info.compress_type != zipfile.ZIP_STORED for info in source.infolist()):
                return scramble(data)  # Python's zipfile would unpack without a bound
            entries = [(name, source.read(name)) for name in source.namelist()]
    except Exception:  # zipfile raises whatever it comes upon
        return scramble(data)
    if not entries:
        return scramble(data)
    at = chance.randrange(len(entries))
    programs = [number for number, (name, _) in enumerate(entries) if name.endswith("data.pkl")]
    if programs and chance.random() < 0.7:
        at = programs[0]
    name, content = entries[at]
    kind = chance.randrange(12)
    if kind == 0 and len(entries) > 1:
        del entries[at]
    elif kind == 1:
        entries.append((name, content))
    elif kind == 2:
        entries[at] = (chance.choice(entries)[0], content)
    elif kind == 3:
        entries.append(("archive/.data/x", scramble(content)))
    elif name.endswith("data.pkl"):
        entries[at] = (name, mutate_pickle(content, chance, scramble))
    else:
        entries[at] = (name, scramble(content))
    method = chance.choice(
        (*[zipfile.ZIP_STORED] * 12, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    )
    return write_archive(entries, method)


def write_archive(entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip of these entries, of which some may have the same name."""
    made = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same name twice
        with zipfile.ZipFile(made, "w", method) as target:
            for name, content in entries:
                info = zipfile.ZipInfo(name)
                info.compress_type = method
                target.writestr(info, content)
    return made.getvalue()
