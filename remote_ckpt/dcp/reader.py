"""``RemoteStorageReader``: the reading half of the DCP backend.

What torch calls, and where (``torch/distributed/checkpoint/state_dict_loader.py``): every rank
``reset``, ``read_metadata``, ``set_up_storage_reader``, ``prepare_local_plan``; the coordinator
``prepare_global_plan``; every rank ``read_data``.

One generation is chosen at the start and read to the end. Every rank says in its plan which one it
sees, and the coordinator refuses a mixture. Where data is gone the reader looks again: the same
generation and save still newest means damage, anything else that the checkpoint changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from remote_ckpt.dcp.metadata import rebuild_metadata
from remote_ckpt.dcp.paths import CheckpointPath, resolve_checkpoint_id
from remote_ckpt.dcp.pickles import parse_stock_metadata
from remote_ckpt.dcp.reading import ReadJob
from remote_ckpt.dcp.sources import IndexedSource, Source, StockSource
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    RemoteCkptError,
    UrlError,
)
from remote_ckpt.index import check_ranges, parse_index
from remote_ckpt.integrity import read_verified
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import PLAIN_NAME, Newest, read_newest
from remote_ckpt.options import Options
from remote_ckpt.resumed import note_resumed
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.url import Location, parse_location

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
        url: CheckpointPath | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        transport: str | None = None,
        process_group: Any = None,
        options: Options | None = None,
        trusted: bool = False,
        convert_dtype: bool = False,
    ) -> None:
        self._base = None if url is None else parse_location(url)
        self._location = self._base
        self._storage_options = dict(storage_options or {})
        self._transport = transport
        self._process_group = process_group
        self._options = options or Options()
        self._trusted = trusted
        self._convert_dtype = convert_dtype
        self._resolution: Resolution | None = None
        self._source: Source | None = None
        self._metadata: Metadata | None = None
        self._manifest: Manifest | None = None
        self._is_chosen = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process_group": None, "_source": None, "_metadata": None}

    # --- what torch calls ------------------------------------------------------------------------

    def reset(self, checkpoint_id: CheckpointPath | None = None) -> None:
        """Begin another load, of ``checkpoint_id`` if given; all options stay. All ranks.

        What :meth:`resolve` or :meth:`adopt` chose just before is what this load reads, once.
        """
        if checkpoint_id:
            location = resolve_checkpoint_id(self._base, checkpoint_id)
            if self._location is None or location.url != self._location.url:
                self._forget()
            self._location = location
        if not self._is_chosen:
            self._forget()
        self._is_chosen = False

    def read_metadata(self) -> Metadata:
        """Return the checkpoint's metadata. All ranks (together, where a process group was given).

        Raises:
            CheckpointNotFoundError: A listing succeeded and there is none.
            CheckpointDamagedError, FormatError, UntrustedDataError: There is one that cannot be read.
            StoreError: The store failed, which says nothing about the checkpoint.
        """
        if self._metadata is None:
            self._adopt(self._look_up_together())
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
        assert self._source is not None  # it comes with the resolution
        job = ReadJob(
            source=self._source,
            planner=planner,
            options=self._options,
            is_trusted=self._trusted,
            converts_dtype=self._convert_dtype,
            url=self.url,
        )
        try:
            with self._opened() as checkpoint:
                self._run(job, checkpoint, plan, resolution)
            note_resumed(self._require_location())
        except CheckpointNotFoundError as error:  # on a local disk the folder is gone
            raise self._changed() from error
        finally:
            self._forget()  # the next load looks again: the checkpoint may be another by then
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointPath) -> bool:
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
        """The manifest that is, or was last, read; None before, and for a stock checkpoint."""
        return self._manifest

    def resolve(self) -> Resolution:
        """Look the newest generation up and read its index; the next load reads that.

        All ranks together where a process group was given, else this rank alone; errors as
        :meth:`read_metadata`.
        """
        if self._resolution is None:
            self._adopt(self._look_up_together())
        self._is_chosen = True
        return self._require_resolution()

    def adopt(self, resolution: Resolution) -> None:
        """Let the next load read what another rank resolved, without asking the store."""
        self._adopt(resolution)
        self._is_chosen = True

    def _adopt(self, resolution: Resolution) -> None:
        self._resolution = resolution
        self._manifest = resolution.manifest
        if resolution.manifest is None:
            metadata = parse_stock_metadata(resolution.index_bytes, url=self.url, key=STOCK_METADATA)
            self._source = StockSource.from_metadata(metadata, url=self.url)
        else:
            key = _index_of(resolution.manifest, self.url).key
            index = parse_index(resolution.index_bytes, url=self.url, key=key)
            sizes = {entry.key: entry.size_bytes for entry in resolution.manifest.objects}
            check_ranges(index, sizes, url=self.url)
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
            with self._opened() as checkpoint:
                newest = read_newest(checkpoint)
                if newest is None:
                    return self._look_up_stock(checkpoint)
                if newest.is_live:
                    return self._read_index(checkpoint, newest)
        except CheckpointNotFoundError as error:  # on a local disk a folder is missing
            raise self._absent() from error
        raise CheckpointNotFoundError(f"{self.url} was deleted", url=self.url)

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
            if any(info.key == PLAIN_NAME for info in checkpoint.list_children("").objects):
                raise FormatError(
                    f"{self.url} is a plain checkpoint (a {PLAIN_NAME}), not one of DCP: "
                    "init_fsdp_model_from_checkpoint and init_model_from_checkpoint_for_evals read its "
                    "weights",
                    url=self.url,
                ) from error
            raise self._absent() from error
        logger.info("%s is a stock DCP checkpoint: it has no checksums to verify", self.url)
        return Resolution(self.url, None, data)

    def _run(self, job: ReadJob, checkpoint: Store, plan: LoadPlan, resolution: Resolution) -> None:
        try:
            job.run(checkpoint, plan.items)
        except ObjectNotFoundError as error:
            raise self._explain_missing(checkpoint, resolution, error) from error

    def _explain_missing(
        self, checkpoint: Store, resolution: Resolution, error: ObjectNotFoundError
    ) -> RemoteCkptError:
        """Tell damage from change: look again, comparing generation and save."""
        newest = read_newest(checkpoint)
        now = (0, "") if newest is None else (newest.generation, newest.manifest.save_id)
        if now != resolution.identity or not checkpoint.is_current():
            return self._changed(error.key)
        return CheckpointDamagedError(
            f"{self.url} is committed, but {error.key or 'an object'} of it is missing",
            url=self.url,
            key=error.key,
        )

    def _absent(self) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"no checkpoint at {self.url}: neither a manifest of ours nor DCP's .metadata", url=self.url
        )

    def _changed(self, key: str | None = None) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"{self.url} was replaced or deleted while it was read: load again", url=self.url, key=key
        )

    # --- state -----------------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[Store]:
        parent, name = self._require_location().split()
        root = open_store(
            parent, storage_options=self._storage_options, transport=self._transport, options=self._options
        )
        with closing(root), closing(root.scope(name)) as checkpoint:
            yield checkpoint

    def _require_location(self) -> Location:
        if self._location is None:
            raise UrlError("give RemoteStorageReader a url, or dcp.load a checkpoint_id")
        return self._location

    def _require_resolution(self) -> Resolution:
        if self._resolution is None:
            raise ConfigError("the reader has read no metadata: torch calls read_metadata first")
        return self._resolution

    def _forget(self) -> None:
        self._resolution = self._source = self._metadata = None
        self._is_chosen = False

    def storage_meta(self) -> StorageMeta:
        """Return torch's description of this load."""
        return StorageMeta(checkpoint_id=self.url)


def _index_of(manifest: Manifest, url: str) -> Any:
    if manifest.index is None:
        raise CheckpointDamagedError("the manifest names no index", url=url)
    return manifest.index
