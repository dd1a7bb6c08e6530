"""Cases from the field about bytes: file systems that lose the tail of an object, tensors above 2 GiB.

``docs/field-cases.md`` says what each number stands for.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from remote_ckpt import (
    CheckpointNotFoundError,
    CommitOptions,
    Options,
    RemoteCkptError,
    RemoteStorageReader,
    RemoteStorageWriter,
    RetryOptions,
    TransferOptions,
)
from remote_ckpt.dcp.payload import payload_windows
from remote_ckpt.options import GiB, MiB
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.testing.faults import FaultStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

_numbers = itertools.count(1)


# --- what a file system does with bytes ---------------------------------------------------------------------


class _BufferedFile(io.BytesIO):
    """Keeps what is written until it is closed, and then does what its file system says."""

    def __init__(self, file_system: BufferedFileSystem, path: str) -> None:
        super().__init__()
        self._file_system, self._path = file_system, path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._file_system.land(self._path, data)


class BufferedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Writes through Python's file objects, as fsspec's own default does, and may lose their tail."""

    protocol = "buffered"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fate: ClassVar[str] = "kept"
    pipe_file = AbstractFileSystem.pipe_file

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        bare: str = super()._strip_protocol(str(path).replace("buffered://", "memory://"))
        return bare

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _BufferedFile(self, path) if mode == "wb" else super()._open(path, mode, **options)

    def land(self, path: str, data: bytes) -> None:
        is_large = len(data) > MiB
        if is_large and self.fate == "close raises":
            raise OSError("the disk is full")
        kept = data[:-1000] if is_large and self.fate == "tail dropped" else data
        self.store[self._strip_protocol(path)] = MemoryFile(self, path, kept)


fsspec.register_implementation("buffered", BufferedFileSystem, clobber=True)

ALONE = Options(
    commit=CommitOptions(accept_single_writer=True),
    retry=RetryOptions(max_attempts=2, initial_seconds=0.0, max_seconds=0.0),
)


@pytest.mark.parametrize("fate", ["kept", "close raises", "tail dropped"])
def test_br_05_an_object_is_whole_or_nothing_is_committed(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BufferedFileSystem, "fate", fate)
    url = f"buffered://run-{next(_numbers)}/1"
    state = {"a": torch.arange(10 * MiB // 4, dtype=torch.int32)}
    if fate == "kept":
        dcp.save(state, storage_writer=RemoteStorageWriter(url, options=ALONE))
        loaded = {"a": torch.zeros_like(state["a"])}
        dcp.load(loaded, storage_reader=RemoteStorageReader(url, options=ALONE))
        assert torch.equal(loaded["a"], state["a"])
        return
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=RemoteStorageWriter(url, options=ALONE))
    assert isinstance(caught.value.failures[0][0], RemoteCkptError)
    assert ".distcp" in str(caught.value)
    with pytest.raises(CheckpointNotFoundError):
        RemoteStorageReader(url, options=ALONE).read_metadata()


# --- large tensors ------------------------------------------------------------------------------------------

AROUND_2_GIB = [2 * GiB - 1, 2 * GiB, 2 * GiB + 1]


@pytest.mark.parametrize("size_bytes", AROUND_2_GIB)
def test_br_44_a_tensor_around_2_gib_is_cut_into_small_buffers(tmp_path: Path, size_bytes: int) -> None:
    tensor = _sparse(tmp_path / "sparse", size_bytes)
    window_bytes = TransferOptions().part_bytes
    sizes = [len(window) for window in payload_windows(tensor, window_bytes=window_bytes)]
    assert sum(sizes) == size_bytes
    assert max(sizes) <= window_bytes <= GiB


def test_br_44_a_tensor_above_2_gib_is_saved_and_loaded_in_small_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page of the sparse file takes memory before it is written, so most of it is read as zeros."""
    seen: list[int] = []

    def opened(*args: Any, **options: Any) -> Store:
        return _Measuring(open_store(*args, **options), seen)

    monkeypatch.setattr("remote_ckpt.dcp.writer.open_store", opened)
    monkeypatch.setattr("remote_ckpt.dcp.reader.open_store", opened)
    size_bytes = AROUND_2_GIB[-1]
    saved = _sparse(tmp_path / "saved", size_bytes)
    marks = {0: 1, 2**31 - 2: 2, 2**31 - 1: 3, 2**31: 4}
    for place_of_mark, value in marks.items():
        saved[place_of_mark] = value
    dcp.save({"a": saved}, storage_writer=RemoteStorageWriter(tmp_path / "run" / "1"))
    loaded = _sparse(tmp_path / "loaded", size_bytes)
    dcp.load({"a": loaded}, storage_reader=RemoteStorageReader(tmp_path / "run" / "1"))
    assert {at: int(loaded[at]) for at in marks} == marks
    assert torch.equal(loaded[-MiB:], saved[-MiB:])  # the load itself checks every byte
    assert sum(seen) >= 2 * size_bytes
    assert max(seen) <= GiB


def _sparse(path: Path, size_bytes: int) -> torch.Tensor:
    with path.open("wb") as file:
        file.truncate(size_bytes)
    return torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)


class _Measuring(FaultStore):
    """Writes down the size of every buffer that the store is given or fills."""

    def __init__(self, inner: Store, seen: list[int]) -> None:
        super().__init__(inner)
        self._seen = seen

    def _wrap(self, inner: Store) -> FaultStore:
        return _Measuring(inner, self._seen)

    def write_stream(self, key: str, source: Any, **options: Any) -> None:
        def measured() -> Iterator[Any]:
            for chunk in source():
                self._seen.append(len(chunk))
                yield chunk

        super().write_stream(key, measured, **options)

    def read_range(self, key: str, offset_bytes: int, length_bytes: int) -> Any:
        self._seen.append(length_bytes)
        return super().read_range(key, offset_bytes, length_bytes)

    def read_range_into(self, key: str, offset_bytes: int, out: memoryview) -> None:
        self._seen.append(len(out))
        super().read_range_into(key, offset_bytes, out)
