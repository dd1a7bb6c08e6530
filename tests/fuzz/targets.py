"""What is fuzzed: for each kind of file how it is read, what must hold then, its seeds and its mutations.

Nothing in here needs the fuzzer: an ordinary test replays seeds and corpus through the same functions.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from fuzz.seeds import (
    SAVE_ID,
    TENSORS,
    archives,
    bytes_of,
    counting,
    indexes,
    manifests,
    payloads,
    records,
    stock_files,
    with_digest,
)
from fuzz.structures import Scramble, gunzip, gzip, mutate_archive, mutate_json, mutate_pickle
from fuzz.traps import nothing_is_run
from remote_ckpt.archive import frame_tensor
from remote_ckpt.copy_attempt import read_records, stock_copy_sizes
from remote_ckpt.dcp.archives import ArchiveFile
from remote_ckpt.dcp.metadata import rebuild_metadata
from remote_ckpt.dcp.pickles import load_pickle, needs_trust
from remote_ckpt.dcp.sources import IndexedSource, StockSource, StoredRange
from remote_ckpt.dcp.stock_pickle import parse_stock_metadata
from remote_ckpt.errors import (
    CheckpointDamagedError,
    ConfigError,
    FormatError,
    RemoteCkptError,
    UntrustedDataError,
)
from remote_ckpt.index import check_ranges, format_index, parse_index
from remote_ckpt.keys import copy_record_key, manifest_key
from remote_ckpt.manifest import format_manifest, parse_manifest
from remote_ckpt.newest import look_at_top
from remote_ckpt.options import Options
from remote_ckpt.stock_contents import parse_stock_contents
from remote_ckpt.stock_index import index_of_stock
from remote_ckpt.stock_payload import find_payload
from remote_ckpt.store.memory import MemoryStore

T = TypeVar("T")

REFUSALS = (CheckpointDamagedError, FormatError, UntrustedDataError)
"""What readers say of a file that they do not read."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of file.

    Args:
        check: Reads one, raises AssertionError where a promise is broken, returns the error that refused it.
        seeds: Makes files to begin with, by name.
        mutate: Changes one, and repairs what would keep a parser from looking any further.
    """

    check: Callable[[bytes], None]
    seeds: Callable[[], Mapping[str, bytes]]
    mutate: Callable[[bytes, random.Random, Scramble], bytes]

    def run(self, data: bytes) -> RemoteCkptError | None:
        """Read a file; returns the error of ours that refused it.

        Raises:
            ExecutedError: Something in the file was run.
            BaseException: Whatever else escaped, which is a fault.
        """
        refusal: RemoteCkptError | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what it deprecates in old files
            try:
                with nothing_is_run():
                    self.check(data)
            except REFUSALS as error:
                refusal = error
        if refusal is not None:
            assert str(pickle.loads(pickle.dumps(refusal))) == str(refusal), "errors cross ranks"
        return refusal


# --- the manifest ------------------------------------------------------------------------------------


def _check_manifest(data: bytes) -> None:
    key = manifest_key(_generation_of(data))
    manifest = parse_manifest(data, url="memory://fuzz", key=key)
    written = _written(format_manifest, manifest)  # or no next generation could carry it on
    assert format_manifest(parse_manifest(written, url="memory://fuzz", key=key)) == written


def _written(write: Callable[[T], bytes], value: T) -> bytes:
    """Write what was read; that it cannot be written is a fault, not a refusal."""
    try:
        return write(value)
    except ConfigError as error:
        raise AssertionError(f"what was read cannot be written: {error}") from error


def _generation_of(data: bytes) -> int:
    """Return the generation that a manifest says it is, so that it is not refused for its name."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        generation = json.loads(data)["generation"]
        if isinstance(generation, int) and 0 < generation < 2**63:
            return generation
    return 1


def _mutate_manifest(data: bytes, chance: random.Random, scramble: Scramble) -> bytes:
    return with_digest(mutate_json(data, chance, scramble))


# --- the index ---------------------------------------------------------------------------------------


def _check_index(data: bytes) -> None:
    index = parse_index(data, url="memory://fuzz", key="index")
    written = _written(format_index, index)
    assert format_index(parse_index(written, url="memory://fuzz", key="index")) == written
    check_ranges(index, dict.fromkeys(index.objects, 2**40), url="memory://fuzz")
    metadata = rebuild_metadata(index, url="memory://fuzz")
    source = IndexedSource(index)
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks[:100]:
            if all(chunk.sizes):
                found = source.find(MetadataIndex(name, torch.Size(chunk.offsets)))
                assert (found.key, found.sizes) == (index.objects[chunk.object], chunk.sizes)
    assert metadata.state_dict_metadata.keys() == {*index.tensors, *index.blobs}


def _mutate_index(data: bytes, chance: random.Random, scramble: Scramble) -> bytes:
    text = gunzip(data)
    if text is None or chance.random() < 0.05:
        return scramble(data)
    return gzip(mutate_json(text, chance, scramble))


# --- the head and tail of an archive -----------------------------------------------------------------


def _check_archive(data: bytes) -> None:
    for dtype, sizes in TENSORS:
        offset = find_payload(io.BytesIO(data), dtype, sizes)
        if offset is None:
            continue
        size_bytes = frame_tensor(dtype, sizes, counting(dtype, sizes).nbytes).payload_bytes
        assert 0 <= offset <= offset + size_bytes <= len(data), "elements beyond the archive's end"
        found = None
        with suppress(Exception):  # torch raises whatever it comes upon; it then sees no other elements
            found = bytes_of(torch.load(io.BytesIO(data), weights_only=True))
        assert found in (None, data[offset : offset + size_bytes]), "other elements than torch finds"


# --- stock metadata ----------------------------------------------------------------------------------


def _check_stock(data: bytes) -> None:
    names: set[str] | None = None
    with suppress(RemoteCkptError):  # it asks for more than what follows: that chunks cover their tensors
        contents = parse_stock_contents(data, url="memory://fuzz", key=".metadata")
        index = index_of_stock(contents, url="memory://fuzz", key=".metadata")
        names = {*index.tensors, *index.blobs}
        store = MemoryStore("fuzz stock")
        for key in index.objects:
            with suppress(RemoteCkptError):
                store.info(key)
            key.encode()
    metadata = parse_stock_metadata(data, url="memory://fuzz", key=".metadata")
    assert names is None or names == set(metadata.state_dict_metadata)
    source = StockSource.from_metadata(metadata, url="memory://fuzz")
    for place in metadata.storage_data:
        with suppress(RemoteCkptError):
            source.find(place)


# --- pickled values ----------------------------------------------------------------------------------


def _check_payload(data: bytes) -> None:
    needs_trust(io.BytesIO(data))
    store = MemoryStore("fuzz payload")
    store.write("object", b"before" + data + b"after")
    stored = StoredRange("object", len(b"before"), len(data), b"", True)
    from_store: Any = None
    with suppress(RemoteCkptError):
        from_store = load_pickle(ArchiveFile(store, stored, Options()), is_trusted=False, what="it")  # type: ignore[arg-type]
    _touch(from_store)
    _touch(load_pickle(data, is_trusted=False, what="it"))


def _touch(value: Any) -> None:
    """Read all elements of tensors and arrays: what lies outside their memory ends the process."""
    seen: set[int] = set()
    waiting = [value]
    while waiting and len(seen) < 10_000:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, np.ndarray):
            value.tobytes()
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() < 1 << 20:
            with suppress(RuntimeError, NotImplementedError):  # not every dtype can be compared
                value.detach().clone().eq(value)


def _mutate_payload(data: bytes, chance: random.Random, scramble: Scramble) -> bytes:
    return (
        mutate_archive(data, chance, scramble) if data[:2] == b"PK" else mutate_pickle(data, chance, scramble)
    )


# --- the record of a copy ----------------------------------------------------------------------------


def _check_record(data: bytes) -> None:
    if not data:
        return  # no object is empty
    store = MemoryStore("fuzz record")
    store.write(copy_record_key(SAVE_ID), data)
    standing = look_at_top(store)
    for _, record in read_records(store, standing):
        assert isinstance(record, dict)
    for key, sizes in stock_copy_sizes(store, standing):
        assert key == copy_record_key(SAVE_ID)
        assert all(isinstance(size, int) for size in sizes.values())


TARGETS: Mapping[str, Target] = {
    "manifest": Target(_check_manifest, manifests, _mutate_manifest),
    "index": Target(_check_index, indexes, _mutate_index),
    "archive": Target(_check_archive, archives, mutate_archive),
    "stock": Target(_check_stock, stock_files, mutate_pickle),
    "payload": Target(_check_payload, payloads, _mutate_payload),
    "record": Target(_check_record, records, mutate_json),
}
