"""Files that fuzzing begins with: what the code writes, and what somebody might write to harm it."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import pickle
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fuzz.structures import gunzip, gzip, write_archive
from fuzz.traps import Trap
from remote_ckpt.archive import frame_tensor
from remote_ckpt.keys import manifest_key

GOLDEN = Path(__file__).parents[1] / "golden" / "1" / "checkpoint"
SAVE_ID = "20260131T120000Z-0123456789ab"
TENSORS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("float32", (2, 3)),
    ("bfloat16", (4,)),
    ("int64", ()),
    ("float8_e4m3fn", (3, 1)),
)
"""Tensors whose elements are looked for in archives."""


def with_digest(data: bytes) -> bytes:
    """Return a manifest whose digest is right, if it can have one."""
    try:
        document = json.loads(data)
        document.pop("digest", None)
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
        document["digest"] = f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"
        return json.dumps(document).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data


def manifests() -> Mapping[str, bytes]:
    """Manifests, with their digests."""
    golden = (GOLDEN / "manifest.000001.json").read_bytes()
    document = json.loads(golden)
    tombstone = {**document, "state": "deleted", "index": None, "stock_metadata": None, "objects": []}
    keys = {"superseded": ["d-0123456789abcdef/0.distcp", manifest_key(1)], "generation": 2}
    more = {
        "copied_from": "1 x",
        "metrics": {"loss": "nan", "big": 10**30},
        "user_metadata": {"a": [1, {"b": "ä"}]},
    }
    return {
        "golden": golden,
        "tombstone": with_digest(json.dumps({**tombstone, **keys}).encode()),
        "more": with_digest(json.dumps({**document, **more}).encode()),
        "half a character": with_digest(json.dumps({**document, "user_metadata": {"a": "\ud800"}}).encode()),
        "nested": with_digest(golden.replace(b'"golden"', b"[" * 5000)),
    }


def indexes() -> Mapping[str, bytes]:
    """Indexes."""
    (path,) = GOLDEN.glob("index.*")
    golden = path.read_bytes()
    document = json.loads(gunzip(golden) or b"")
    small = {**document, "planner_data": {"dict": {"a": {"tuple": ["a", 0]}}}}
    for table in ("tensors", "chunks", "blobs"):
        small[table] = {name: "" if name == "crcs" else [] for name in document[table]}
    values = {"list": [1, "x", None, {"float": "inf"}, {"tuple": [0.5, {"dict": {"k": True}}]}]}
    bomb = b'{"format": "remote_ckpt.index", "version": [1, 0], "objects": ["' + b"a" * (1 << 22)
    return {
        "golden": golden,
        "empty": gzip(json.dumps(small).encode()),
        "values": gzip(json.dumps({**small, "planner_data": {"dict": values}}).encode()),
        "two parts": gzip(json.dumps(_two_parts(document)).encode()),
        "bomb": gzip(bomb, 9),
        "nested": gzip(
            json.dumps({**small, "planner_data": 0}).encode().replace(b": 0,", b": " + b"[" * 5000)
        ),
    }


def _two_parts(document: Mapping[str, Any]) -> dict[str, Any]:
    """An index of one tensor in two chunks, one of them opaque, and of one value."""
    kind = {"dtype": "int16", "layout": "strided", "memory_format": "contiguous_format"}
    return {
        **document,
        "block_bytes": 64,
        "objects": ["d-0123456789abcdef/0.distcp", "d-0123456789abcdef/1.distcp"],
        "planner_data": None,
        "kinds": [{**kind, "requires_grad": False, "pin_memory": False}],
        "tensors": {"name": ["w"], "kind": [0], "dims": [2], "sizes": [4, 10], "chunk_count": [2]},
        "chunks": {
            "offsets": [0, 0, 3, 0],
            "sizes": [3, 10, 1, 10],
            "object": [0, 1],
            "archive_offset": [0, 64],
            "archive_bytes": [512, 128],
            "payload_offset": [256, -1],
            "payload_bytes": [60, 128],
            "crcs": "AAAAAAAAAAAAAAAA",
        },
        "blobs": {
            "name": ["v"],
            "object": [0],
            "offset": [640],
            "length_bytes": [3],
            "pickle_safe": [None],
            "crcs": "AAAAAA==",
        },
    }


def counting(dtype: str, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of 1, 2, 3, ..."""
    count = torch.Size(sizes).numel()
    return torch.arange(1, count + 1).to(getattr(torch, dtype)).reshape(sizes)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements, row-major."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def archives() -> Mapping[str, bytes]:
    """Archives of one tensor each."""
    made: dict[str, bytes] = {}
    for dtype, sizes in TENSORS:
        tensor = counting(dtype, sizes)
        frame = frame_tensor(dtype, sizes, tensor.nbytes)
        made[f"ours {dtype}"] = frame.head + bytes_of(tensor) + frame.tail
        made[f"torch {dtype}"] = saved(tensor)
    made["a view"] = saved(torch.arange(12.0).reshape(2, 6)[:, ::2])
    return made


def stock_files() -> Mapping[str, bytes]:
    """Stock DCP's ``.metadata``."""
    hostile = b"\x80\x02cfuzz.traps\nspring\n(tR."
    nested = b"\x80\x02N" + b"\x85" * 5000 + b"."
    return {
        "golden": (GOLDEN / ".metadata").read_bytes(),
        "stock": _stock_folder()[".metadata"],
        "trap": pickle.dumps(Trap()),
        "trap of protocol 2": hostile,
        "nested": nested,
    }


@functools.cache
def _stock_folder() -> Mapping[str, bytes]:
    """Files of a small checkpoint that torch's own writer made."""
    state = {"m": {"w": torch.ones(2, 3), "b": [torch.zeros(2, dtype=torch.int8), {"lr": 0.1}]}, "n": 7}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def saved(value: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def payloads() -> Mapping[str, bytes]:
    """What ``torch.save`` writes, and pickles that would run code."""
    legacy = io.BytesIO()
    torch.save({"a": torch.ones(2)}, legacy, _use_new_zipfile_serialization=False)
    generator = np.random.default_rng(7).bit_generator.state
    bomb = write_archive(
        [("archive/data.pkl", b"\x80\x02X\0\0\0\x08" + b"a" * (8 << 20)), ("archive/version", b"3\n")], 8
    )
    return {
        "plain": saved({"step": 7, "name": "x", "pair": (1, None, [2.5, True])}),
        "tensors": saved(
            {"w": torch.ones(2, 3), "p": torch.nn.Parameter(torch.zeros(2)), "h": torch.ones(2).half()}
        ),
        "sparse": saved(torch.eye(2).to_sparse()),
        "quantized": saved(torch.quantize_per_tensor(torch.ones(2), 0.1, 2, torch.qint8)),
        "numpy": saved(
            [np.arange(3), np.float32(1.5), np.array(["a"]), np.datetime64("2020-01-01"), np.dtype("i4")]
        ),
        "random state": saved({"legacy": np.random.RandomState(3).get_state(), "new": generator}),
        "legacy": legacy.getvalue(),
        "trap": saved({"a": Trap()}),
        "trap in the old format": pickle.dumps(Trap(), protocol=2),
        "bomb": bomb,
    }


def records() -> Mapping[str, bytes]:
    """Records of copies."""
    time = "2026-01-31T12:00:00+00:00"
    return {
        "own": json.dumps({"source_save_id": SAVE_ID, "base_generation": 0}).encode(),
        "stock": json.dumps({"source": "memory://x/1", "source_files": {".metadata": [3, time]}}).encode(),
        "nested": b"[" * 5000,
    }
