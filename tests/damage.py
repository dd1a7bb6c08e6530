"""What tests of damaged bytes share: a checkpoint of two ranks, older saves of it, ways to damage it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.index import Index, parse_index
from remote_ckpt.keys import STOCK_METADATA_NAME
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import read_newest
from remote_ckpt.options import KiB, Options, TransferOptions
from remote_ckpt.store.base import Store

BLOCK = 4 * KiB
OPTIONS = Options(transfer=TransferOptions(block_bytes=BLOCK))
Files = dict[str, bytes]
"""A checkpoint's objects by key."""


# --- what is saved -----------------------------------------------------------------------------------


def full_state(seed: int) -> dict[str, Any]:
    """The state as one process would hold it; two seeds differ in every tensor and value."""
    chance = torch.Generator().manual_seed(seed)

    def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(0, 120, (count,), dtype=torch.uint8, generator=chance).view(dtype).reshape(shape)

    return {
        "rows": bits(torch.float32, 64, 100),  # several blocks on each rank
        "uneven": bits(torch.bfloat16, 5, 7),
        "columns": bits(torch.int32, 6, 10),
        "scalar": torch.tensor(0.5 + seed, dtype=torch.float64),
        "large": bits(torch.uint8, 2 * BLOCK + 1),
        "half": bits(torch.float16, 3),
        "float8": bits(torch.float8_e4m3fn, 9),
        "mask": torch.arange(7) % (seed + 1) == 0,
        "complex": bits(torch.complex64, 2, 2),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(4).mul(seed).to_sparse(),
        "python": {"step": seed, "name": f"run {seed}", "pair": (seed, None)},
    }


SHARDED = {"rows": 0, "uneven": 0, "columns": 1}
"""Tensors that are cut among ranks, and in which dimension."""


def save_on_ranks(folder: str) -> None:
    """Save the state as checkpoint 7 of ``old``, and again in its place; then the same in ``new``, with other
    values; and of each side what its first save had written. Runs on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for side, seed in (("old", 1), ("new", 2)):
        state = full_state(seed)
        for name, dim in SHARDED.items():
            state[name] = distribute_tensor(state[name], mesh, [Shard(dim)])
        for number in (1, 2):
            path = f"{folder}/{side}/7"
            dcp.save(state, storage_writer=RemoteStorageWriter(path, options=OPTIONS, overwrite=True))
            dist.barrier()
            if number == 1 and dist.get_rank() == 0:
                shutil.copytree(path, f"{folder}/{side} first/7")
            dist.barrier()


def save_pair_on_ranks(folder: str) -> None:
    """Save one tensor in two halves, so that both data objects are of one size. Runs on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"rows": distribute_tensor(full_state(3)["rows"], mesh, [Shard(0)])}
    dcp.save(state, storage_writer=RemoteStorageWriter(f"{folder}/pair/7", options=OPTIONS))


# --- a checkpoint in a store -------------------------------------------------------------------------


def read_files(folder: Path) -> Files:
    """Return a checkpoint on disk."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@dataclass(frozen=True)
class Specimen:
    """A sound checkpoint that is damaged and mended again and again.

    Args:
        root: Its directory.
        files: What is right.
        manifest: What its newest generation says.
        index: What it holds.
    """

    root: Store
    files: Files
    manifest: Manifest
    index: Index

    @classmethod
    def of(cls, root: Store, files: Files) -> Specimen:
        for key, data in files.items():
            root.write(f"7/{key}", data)
        newest = read_newest(root.scope("7"))
        assert newest is not None
        assert newest.manifest.index is not None
        index = parse_index(files[newest.manifest.index.key], url="", key="")
        return cls(root, files, newest.manifest, index)

    @property
    def url(self) -> str:
        return f"{self.root.url}/7"

    @property
    def index_key(self) -> str:
        assert self.manifest.index is not None
        return self.manifest.index.key

    @property
    def stock_key(self) -> str:
        assert self.manifest.stock_metadata is not None
        return self.manifest.stock_metadata.key

    @property
    def manifest_key(self) -> str:
        return f"manifest.{self.manifest.generation:06d}.json"

    @property
    def small_keys(self) -> tuple[str, ...]:
        return self.manifest_key, self.index_key, self.stock_key, STOCK_METADATA_NAME

    def put(self, changes: Mapping[str, bytes | None]) -> None:
        """Put objects in place of those that are there; None: away with it."""
        for key, data in changes.items():
            if data is None:
                self.root.delete([f"7/{key}"])
            else:
                self.root.write(f"7/{key}", data)

    def mend(self, changes: Mapping[str, bytes | None]) -> None:
        """Undo it."""
        self.put({key: self.files[key] for key in changes})

    def spans(self, key: str) -> Iterator[tuple[str, int, int]]:
        """Yield name, first byte and end of everything in an object that has bytes of its own."""
        for name, tensor in self.index.tensors.items():
            for chunk in tensor.chunks:
                begin = chunk.archive_offset if chunk.is_opaque else chunk.payload_offset
                if self.index.objects[chunk.object] == key and chunk.payload_bytes:
                    yield name, begin, begin + chunk.payload_bytes
        for name, blob in self.index.blobs.items():
            if self.index.objects[blob.object] == key and blob.length_bytes:
                yield name, blob.offset, blob.offset + blob.length_bytes

    def owners(self, key: str, begin: int, end: int) -> frozenset[str]:
        """Return whose bytes lie in a range of an object; nobody's in the framing."""
        return frozenset(name for name, first, last in self.spans(key) if first < end and begin < last)

    def changed(self, key: str, data: bytes) -> frozenset[str]:
        """Return whose bytes are others (or missing) in what takes an object's place."""
        right = self.files[key]
        return frozenset(
            name for name, first, last in self.spans(key) if right[first:last] != data[first:last]
        )

    def edges(self, key: str) -> list[int]:
        """Return the offset of each byte at which something in a data object begins or ends."""
        data = self.files[key]
        found = {0, len(data) - 1}
        for _, begin, end in self.spans(key):
            found |= {begin - 1, begin, end - 1, end}
            found |= {edge - way for edge in range(begin + BLOCK, end, BLOCK) for way in (0, 1)}
        for mark in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"):  # headers, directory, end record
            at = data.find(mark)
            while at >= 0:
                found |= {at - 1, at, at + 3, at + 28}  # 28: within lengths of names, or beyond the record
                at = data.find(mark, at + 1)
        return sorted(at for at in found if 0 <= at < len(data))


def flipped(data: bytes, at: int, chance: random.Random) -> bytes:
    """Return bytes of which one has one other bit."""
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


WHOLE: Mapping[str, Callable[[bytes, random.Random], bytes | None]] = {
    "deleted": lambda data, chance: None,
    "cut to its first byte": lambda data, chance: data[:1],
    "cut by its last byte": lambda data, chance: data[:-1],
    "cut anywhere": lambda data, chance: data[: chance.randrange(1, len(data))],
    "cut at its begin": lambda data, chance: data[1:],
    "grown by a zero": lambda data, chance: data + b"\0",
    "grown by a line feed": lambda data, chance: data + b"\n",
    "grown by anything": lambda data, chance: data + chance.randbytes(chance.randrange(1, 5000)),
    "twice": lambda data, chance: data + data,
    "zeros": lambda data, chance: bytes(len(data)),
    "anything of its size": lambda data, chance: chance.randbytes(len(data)),
    "its blocks the other way round": lambda data, chance: data[len(data) // 2 :] + data[: len(data) // 2],
    "zeros from some byte on": lambda data, chance: (
        data[: (at := chance.randrange(len(data)))] + bytes(len(data) - at)
    ),
}
"""What can become of a whole object."""
