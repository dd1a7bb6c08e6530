"""The ways to save and load that are compared: ours, what torch and others ship, and a client without DCP.

Each takes a name below one root, saves a state there or loads it into tensors that are there already. What is
imported here is imported by the process that measures, before it measures.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed.checkpoint as dcp

if TYPE_CHECKING:
    from obstore.store import ClientConfig

State = dict[str, torch.Tensor]
MIB: Final = 1 << 20
RAW_PART_BYTES: Final = 32 * MIB
RAW_CONCURRENCY: Final = 16
ACCESS: Final = {"key": "benchmark", "secret": "benchmark"}
REGION: Final = "us-east-1"


class Way(Protocol):
    """One way to keep a state."""

    def save(self, state: State, name: str) -> None:
        """Save under a name."""

    def load(self, state: State, name: str) -> None:
        """Load into the state's tensors."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where to.

    Args:
        root: ``s3://bucket/prefix``, or a local folder.
        endpoint_url: Of the S3 server, empty for a folder.
        certificate: File of the certificate to trust, empty without TLS.
        rank: Of this process.
    """

    root: str
    endpoint_url: str = ""
    certificate: str = ""
    rank: int = 0

    def options(self) -> dict[str, Any]:
        """Options as s3fs and our package take them; none for a folder."""
        if not self.endpoint_url:
            return {}
        client: dict[str, Any] = {"region_name": REGION}
        if self.certificate:
            client["verify"] = self.certificate
        return {**ACCESS, "endpoint_url": self.endpoint_url, "client_kwargs": client}


class Ours:
    """This package, with settings as they are unless others are given."""

    def __init__(self, place: Place, *, transport: str | None = None, **options: Any) -> None:
        from remote_ckpt import RemoteStorageReader, RemoteStorageWriter

        self._writer, self._reader = RemoteStorageWriter, RemoteStorageReader
        self._root = place.root
        self._more: dict[str, Any] = {
            "storage_options": {**place.options(), **options},
            "transport": transport,
        }

    def save(self, state: State, name: str) -> None:
        """See :meth:`Way.save`."""
        dcp.save(state, storage_writer=self._writer(f"{self._root}/{name}", **self._more))

    def load(self, state: State, name: str) -> None:
        """See :meth:`Way.load`."""
        dcp.load(state, storage_reader=self._reader(f"{self._root}/{name}", **self._more))


class TorchFsspec:
    """torch's FsspecWriter and FsspecReader over s3fs."""

    def __init__(self, place: Place, *, threads: int) -> None:
        import s3fs  # noqa: F401
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        self._writer, self._reader = FsspecWriter, FsspecReader
        self._root, self._options, self._threads = place.root, place.options(), threads

    def save(self, state: State, name: str) -> None:
        """See :meth:`Way.save`."""
        writer = self._writer(f"{self._root}/{name}", thread_count=self._threads, **self._options)
        dcp.save(state, storage_writer=writer)

    def load(self, state: State, name: str) -> None:
        """See :meth:`Way.load`."""
        dcp.load(state, storage_reader=self._reader(f"{self._root}/{name}", **self._options))


class S3Connector:
    """s3torchconnector's S3StorageWriter and S3StorageReader, with their default reader and part size."""

    def __init__(self, place: Place, *, threads: int) -> None:
        os.environ |= {
            "AWS_ENDPOINT_URL": place.endpoint_url,
            "AWS_ACCESS_KEY_ID": ACCESS["key"],
            "AWS_SECRET_ACCESS_KEY": ACCESS["secret"],
        }
        from s3torchconnector import S3ClientConfig  # type: ignore[import-not-found, unused-ignore]
        from s3torchconnector.dcp import (  # type: ignore[import-not-found, unused-ignore]
            S3StorageReader,
            S3StorageWriter,
        )

        self._writer, self._reader = S3StorageWriter, S3StorageReader
        self._root, self._threads = place.root, threads
        self._config = S3ClientConfig(force_path_style=True)

    def save(self, state: State, name: str) -> None:
        """See :meth:`Way.save`."""
        path = f"{self._root}/{name}"
        writer = self._writer(REGION, path, s3client_config=self._config, thread_count=self._threads)
        dcp.save(state, storage_writer=writer)

    def load(self, state: State, name: str) -> None:
        """See :meth:`Way.load`."""
        reader = self._reader(REGION, f"{self._root}/{name}/", s3client_config=self._config)
        dcp.load(state, storage_reader=reader)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one tensor's bytes, and where they are in the one object of :class:`RawObstore`."""

    view: memoryview
    offset_bytes: int


class RawObstore:
    """obstore without DCP: one object a rank, parts of 32 MiB, 16 at once, nothing hashed or checked."""

    def __init__(self, place: Place) -> None:
        import obstore
        from obstore.store import S3Store

        bucket, _, prefix = place.root.removeprefix("s3://").partition("/")
        trust: ClientConfig = {"allow_http": True, "timeout": "600s"}
        if place.certificate:
            with open(place.certificate, "rb") as file:
                trust["root_certificate"] = file.read()
        self._obstore, self._rank = obstore, place.rank
        self._store = S3Store(
            bucket,
            prefix=prefix,
            endpoint=place.endpoint_url,
            access_key_id=ACCESS["key"],
            secret_access_key=ACCESS["secret"],
            region=REGION,
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options=trust,
        )

    def save(self, state: State, name: str) -> None:
        """See :meth:`Way.save`."""
        self._obstore.put(
            self._store,
            f"{name}/{self._rank}",
            iter([bytes_of(tensor) for tensor in state.values()]),
            use_multipart=True,
            chunk_size=RAW_PART_BYTES,
            max_concurrency=RAW_CONCURRENCY,
        )

    def load(self, state: State, name: str) -> None:
        """See :meth:`Way.load`."""

        def fetch(pieces: Sequence[Piece]) -> None:
            start, length = pieces[0].offset_bytes, sum(len(piece.view) for piece in pieces)
            path = f"{name}/{self._rank}"
            found = memoryview(self._obstore.get_range(self._store, path, start=start, length=length))
            for piece in pieces:
                at = piece.offset_bytes - start
                piece.view[:] = found[at : at + len(piece.view)]

        with ThreadPoolExecutor(RAW_CONCURRENCY) as pool:
            for _ in pool.map(fetch, raw_parts(state)):
                pass


def raw_parts(state: State) -> list[list[Piece]]:
    """Return the state's bytes in order, in parts of RAW_PART_BYTES."""

    def pieces() -> Iterator[Piece]:
        offset = 0
        for view in map(bytes_of, state.values()):
            start = 0
            while start < len(view):
                length = min(len(view) - start, RAW_PART_BYTES - offset % RAW_PART_BYTES)
                yield Piece(view[start : start + length], offset)
                start, offset = start + length, offset + length

    grouped = itertools.groupby(pieces(), key=lambda piece: piece.offset_bytes // RAW_PART_BYTES)
    return [list(group) for _, group in grouped]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


class TorchFiles:
    """torch's FileSystemWriter (which syncs its files, as ours does) and FileSystemReader."""

    def __init__(self, place: Place, *, threads: int) -> None:
        self._root, self._threads = place.root, threads

    def save(self, state: State, name: str) -> None:
        """See :meth:`Way.save`."""
        writer = dcp.FileSystemWriter(f"{self._root}/{name}", thread_count=self._threads)
        dcp.save(state, storage_writer=writer)

    def load(self, state: State, name: str) -> None:
        """See :meth:`Way.load`."""
        dcp.load(state, storage_reader=dcp.FileSystemReader(f"{self._root}/{name}"))


S3_WAYS: Final[Mapping[str, Callable[[Place], Way]]] = {
    "ours": Ours,
    "ours, unsigned_payload": lambda place: Ours(place, unsigned_payload=True),
    "ours, fsspec": lambda place: Ours(place, transport="fsspec"),
    "raw obstore": RawObstore,
    "s3torchconnector": lambda place: S3Connector(place, threads=1),
    "s3torchconnector, 4 threads": lambda place: S3Connector(place, threads=4),
    "torch fsspec": lambda place: TorchFsspec(place, threads=1),
    "torch fsspec, 2 threads": lambda place: TorchFsspec(place, threads=2),
    "torch fsspec, 4 threads": lambda place: TorchFsspec(place, threads=4),
    "torch fsspec, 8 threads": lambda place: TorchFsspec(place, threads=8),
}
"""By the name in the tables. What no number of threads is said of has the default of one."""

LOCAL_WAYS: Final[Mapping[str, Callable[[Place], Way]]] = {
    "ours, local": Ours,
    "torch files": lambda place: TorchFiles(place, threads=1),
    "torch files, 4 threads": lambda place: TorchFiles(place, threads=4),
}


def make_way(name: str, place: Place) -> Way:
    """Return a way by its name, its modules imported."""
    return {**S3_WAYS, **LOCAL_WAYS}[name](place)


def remove(place: Place, name: str) -> None:
    """Delete what was saved under a name, however it was."""
    if not place.endpoint_url:
        shutil.rmtree(f"{place.root}/{name}", ignore_errors=True)
        return
    import boto3

    bucket, _, prefix = place.root.removeprefix("s3://").partition("/")
    client = boto3.client(
        "s3",
        endpoint_url=place.endpoint_url,
        aws_access_key_id=ACCESS["key"],
        aws_secret_access_key=ACCESS["secret"],
        region_name=REGION,
        verify=place.certificate or None,
    )
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/{name}/").get("Contents", ())
    for entry in found:
        client.delete_object(Bucket=bucket, Key=entry["Key"])
