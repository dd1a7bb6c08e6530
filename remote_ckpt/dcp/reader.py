"""``RemoteStorageReader``: the reading half of the DCP backend.

What torch calls, and where (``torch/distributed/checkpoint/state_dict_loader.py``): every rank
``reset``, ``read_metadata``, ``set_up_storage_reader``, ``prepare_local_plan``; the coordinator
``prepare_global_plan``; every rank ``read_data``.

One generation is chosen at the start and read to the end. Every rank says in its plan which one it
sees, and the coordinator refuses a mixture. Where data is gone the reader looks again: the same
generation and save still newest means damage, anything else that the checkpoint changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from remote_ckpt.dcp.metadata import rebuild_metadata
from remote_ckpt.dcp.pickles import parse_stock_metadata
from remote_ckpt.dcp.reading import IndexedSource, ReadJob, Source, StockSource
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    ConfigError,
    ObjectNotFoundError,
    RemoteCkptError,
    UrlError,
)
from remote_ckpt.index import parse_index
from remote_ckpt.integrity import read_verified
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import Newest, read_newest
from remote_ckpt.options import Options
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.url import parse_location

PathLike = str | os.PathLike[str]
STOCK_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Resolution:
    """Which checkpoint a load reads: chosen once, the same on all ranks.

    Args:
        url: The checkpoint's URL, without secrets.
        manifest: Of the chosen generation; None for a stock DCP checkpoint.
        index_bytes: The verified index object, or the stock ``.metadata`` file.
    """

    url: str
    manifest: Manifest | None
    index_bytes: bytes

    @property
    def identity(self) -> tuple[int, str]:
        """Generation and save; what must be equal on all ranks."""
        return (0, "") if self.manifest is None else (self.manifest.generation, self.manifest.save_id)


class RemoteStorageReader(StorageReader):
    """Reads a checkpoint of ours or a stock DCP one; give it to ``dcp.load``.

    Tensors are received into the destination's own memory where its layout allows, checked against
    their checksums, and never unpickled. They are written in place: after a failed load the
    destination tensors hold a mixture and must be loaded again.

    Args:
        url: The checkpoint's own path or URL; may be left out where ``dcp.load`` gets ``checkpoint_id``.
        storage_options: Options of the store, in the style of s3fs; ``AWS_*`` variables work too.
        transport: ``"obstore"`` or ``"fsspec"``; by default obstore for S3, GCS and Azure.
        process_group: With it the coordinator (its rank 0) alone looks the checkpoint up and sends
            what it found to the others. It needs a CPU backend. Without, every rank looks for itself.
        options: Byte budget, retries and deadlines.
        trusted: Unpickle Python objects without limits. By default (``False``) only tensors, plain
            containers and numpy arrays are.
        convert_dtype: Convert where the destination has another dtype. By default that is an error.

    Raises:
        ConfigError: Wrong URL or options.
    """

    def __init__(
        self,
        url: PathLike | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        transport: str | None = None,
        process_group: Any = None,
        options: Options | None = None,
        trusted: bool = False,
        convert_dtype: bool = False,
    ) -> None:
        self._location = None if url is None else parse_location(url)
        self._storage_options = dict(storage_options or {})
        self._transport = transport
        self._process_group = process_group
        self._options = options or Options()
        self._trusted = trusted
        self._convert_dtype = convert_dtype
        self._resolution: Resolution | None = None
        self._source: Source | None = None
        self._metadata: Metadata | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process_group": None, "_source": None, "_metadata": None}

    # --- what torch calls ------------------------------------------------------------------------

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        """Begin another load, of ``checkpoint_id`` if given; all options stay. All ranks.

        A resolution made with :meth:`resolve` survives where the checkpoint stays the same.
        """
        if checkpoint_id:
            location = parse_location(checkpoint_id)
            if self._location is None or location.url != self._location.url:
                self._forget()
                self._location = location

    def read_metadata(self) -> Metadata:
        """Return the checkpoint's metadata. All ranks (together, where a process group was given).

        Raises:
            CheckpointNotFoundError: A listing succeeded and there is none.
            CheckpointDamagedError, FormatError, UntrustedDataError: There is one that cannot be read.
            StoreError: The store failed, which says nothing about the checkpoint.
        """
        if self._metadata is None:
            self.resolve()
        assert self._metadata is not None
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to do: the index was read with the metadata. All ranks."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say in the plan which generation this rank sees. All ranks."""
        plan.storage_data = self._require_resolution().identity
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse to mix generations. Coordinator only.

        Raises:
            CheckpointChangedError: Ranks see different generations; load again.
        """
        seen = {plan.storage_data for plan in plans}
        if len(seen) > 1:
            raise CheckpointChangedError(
                f"ranks see different generations of the checkpoint ({sorted(map(str, seen))}): load again",
                url=self.url,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors. All ranks; blocks until done.

        Raises:
            DtypeMismatchError, UntrustedDataError: Before any tensor is changed.
            IntegrityError: Bytes differ from what was saved; names object and tensor.
            CheckpointDamagedError: An object that the manifest names is missing.
            CheckpointChangedError: The checkpoint was replaced or deleted meanwhile; load again.
        """
        resolution = self._require_resolution()
        assert self._source is not None
        checkpoint = self._open()
        job = ReadJob(
            source=self._source,
            planner=planner,
            options=self._options,
            is_trusted=self._trusted,
            converts_dtype=self._convert_dtype,
            url=self.url,
        )
        try:
            job.run(checkpoint, plan.items)
        except ObjectNotFoundError as error:
            raise self._explain_missing(checkpoint, resolution, error) from error
        finally:
            checkpoint.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether ``checkpoint_id`` is a path or URL that this package can read."""
        try:
            parse_location(checkpoint_id).split()
        except ConfigError:
            return False
        return True

    @property
    def url(self) -> str:
        """The checkpoint's URL without secrets; empty while none was given."""
        return "" if self._location is None else self._location.url

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's URL, as torch names it."""
        return self.url

    # --- choosing what to read -------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest | None:
        """The manifest that is being read; None before, and for a stock checkpoint."""
        return None if self._resolution is None else self._resolution.manifest

    def resolve(self) -> Resolution:
        """Look the newest generation up and read its index; kept until :meth:`refresh`.

        All ranks together where a process group was given, else this rank alone; errors as
        :meth:`read_metadata`.
        """
        if self._resolution is None:
            self.adopt(self._look_up_together())
        return self._require_resolution()

    def adopt(self, resolution: Resolution) -> None:
        """Read what another rank resolved, without asking the store."""
        self._resolution = resolution
        if resolution.manifest is None:
            metadata = parse_stock_metadata(resolution.index_bytes, url=self.url, key=STOCK_METADATA)
            self._source = StockSource.from_metadata(metadata, url=self.url)
        else:
            key = _index_of(resolution.manifest, self.url).key
            index = parse_index(resolution.index_bytes, url=self.url, key=key)
            metadata = rebuild_metadata(index, url=self.url)
            self._source = IndexedSource(index)
        self._metadata = metadata

    def refresh(self) -> None:
        """Forget what was resolved; the next load looks again."""
        self._forget()

    def _look_up_together(self) -> Resolution:
        if self._process_group is None:
            return self._look_up()
        from remote_ckpt.dcp.collective import open_group

        group = open_group(self._process_group, timeout_seconds=self._options.commit.collective_seconds)
        return group.broadcast_from_coordinator(self._look_up)

    def _look_up(self) -> Resolution:
        try:
            checkpoint = self._open()
        except CheckpointNotFoundError as error:  # on a local disk a folder is missing
            raise self._absent() from error
        try:
            newest = read_newest(checkpoint)
            if newest is None:
                return self._look_up_stock(checkpoint)
            if not newest.is_live:
                raise CheckpointNotFoundError(f"{self.url} was deleted", url=self.url)
            return self._read_index(checkpoint, newest)
        finally:
            checkpoint.close()

    def _read_index(self, checkpoint: Store, newest: Newest) -> Resolution:
        entry = _index_of(newest.manifest, self.url)
        try:
            data = read_verified(checkpoint, entry)
        except ObjectNotFoundError as error:
            found = Resolution(self.url, newest.manifest, b"")
            raise self._explain_missing(checkpoint, found, error) from error
        return Resolution(self.url, newest.manifest, data)

    def _look_up_stock(self, checkpoint: Store) -> Resolution:
        try:
            data = checkpoint.read(STOCK_METADATA)
        except ObjectNotFoundError as error:
            raise self._absent() from error
        logger.info("%s is a stock DCP checkpoint: it has no checksums to verify", self.url)
        return Resolution(self.url, None, data)

    def _absent(self) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"no checkpoint at {self.url}: neither a manifest of ours nor DCP's .metadata", url=self.url
        )

    def _explain_missing(
        self, checkpoint: Store, resolution: Resolution, error: ObjectNotFoundError
    ) -> RemoteCkptError:
        """Tell damage from change: look again, comparing generation and save."""
        newest = read_newest(checkpoint)
        now = (0, "") if newest is None else (newest.generation, newest.manifest.save_id)
        if now == resolution.identity:
            return CheckpointDamagedError(
                f"{self.url} is committed, but {error.key or 'an object'} of it is missing",
                url=self.url,
                key=error.key,
            )
        return CheckpointChangedError(
            f"{self.url} was replaced or deleted while it was read: load again", url=self.url, key=error.key
        )

    # --- state -----------------------------------------------------------------------------------

    def _open(self) -> Store:
        if self._location is None:
            raise UrlError("give RemoteStorageReader a url, or dcp.load a checkpoint_id")
        parent, name = self._location.split()
        self._root = open_store(
            parent, storage_options=self._storage_options, transport=self._transport, options=self._options
        )
        return self._root.scope(name)

    def _require_resolution(self) -> Resolution:
        if self._resolution is None:
            raise ConfigError("the reader has read no metadata: torch calls read_metadata first")
        return self._resolution

    def _forget(self) -> None:
        self._resolution = None
        self._source = None
        self._metadata = None

    def storage_meta(self) -> StorageMeta:
        """Return torch's description of this load."""
        return StorageMeta(checkpoint_id=self.url)


def _index_of(manifest: Manifest, url: str) -> Any:
    if manifest.index is None:
        raise CheckpointDamagedError("the manifest names no index", url=url)
    return manifest.index
