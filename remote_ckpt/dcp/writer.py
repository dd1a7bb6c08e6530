"""``RemoteStorageWriter``: the writing half of the DCP backend.

What torch calls, and where (``torch/distributed/checkpoint/state_dict_saver.py``): every rank
``reset``, ``set_up_storage_writer``, ``prepare_local_plan``; the coordinator ``prepare_global_plan``;
every rank ``write_data``; the coordinator ``finish``. All collectives are torch's own.

Two things torch does shape this module. It drops ``finish`` when any rank's ``write_data`` raises, so
nobody would clean up: a rank that fails says so in its results instead, and ``finish`` deletes what
all ranks wrote and raises for all. And with plan caching it hands ranks the plan of an earlier save:
data keys therefore come from a token that each rank draws for each attempt, never from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import remote_ckpt.commit as protocol
from remote_ckpt._version import __version__
from remote_ckpt.checksum import crc32c
from remote_ckpt.dcp.metadata import build_index, content_digest, stock_metadata
from remote_ckpt.dcp.objects import DataObject, group_items
from remote_ckpt.dcp.paths import CheckpointPath, resolve_checkpoint_id
from remote_ckpt.dcp.reports import (
    RankReport,
    as_result,
    item_results,
    raise_failures,
    rank_reports,
    stored_items,
)
from remote_ckpt.dcp.turns import Turns
from remote_ckpt.dcp.values import PlanValues, PreparedItem
from remote_ckpt.errors import (
    ConfigError,
    RemoteCkptError,
    SaveFailedError,
    UrlError,
)
from remote_ckpt.index import format_index
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest, ObjectEntry, index_key, new_token, stock_metadata_key
from remote_ckpt.options import Options
from remote_ckpt.probe import probe_create_only
from remote_ckpt.resumed import note_committed
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.transfer import ObjectUpload, upload_objects
from remote_ckpt.url import Location, parse_location, parse_step

_IN_USE = "another save with this RemoteStorageWriter has begun and not ended: wait, or use a writer for each"


class RemoteStorageWriter(StorageWriter):
    """Writes a checkpoint that exists wholly or not at all; give it to ``dcp.save`` or ``dcp.async_save``.

    Use one writer on each rank, made with the same arguments. It may be used for many saves, one after
    another: with ``checkpoint_id=`` in ``dcp.save`` each goes where that says, with all options of this
    writer. Saves at the same time need a writer each: of two with this writer one is refused, the second
    one while data or commit of the first are being written, and otherwise the first.

    Args:
        url: The checkpoint's own path or URL, its last part being its name: ``"s3://bucket/run/199"``,
            ``"/data/run/199"``, a ``Path`` or a ``UPath``. May be left out where ``dcp.save`` gets
            ``checkpoint_id``.
        storage_options: Options of the store, in the style of s3fs (``key``, ``secret``,
            ``endpoint_url``, ``client_kwargs``, ...); ``AWS_*`` variables work too.
        transport: ``"obstore"`` or ``"fsspec"``; by default obstore for S3, GCS and Azure.
        overwrite: Replace a committed checkpoint of that name, which stays readable until the new one
            is committed. By default (``False``) that is an error. A pinned one is never replaced.
        options: Byte budget, retries and deadlines.
        metrics: Numbers to record in the manifest, such as ``{"loss": 0.1}``.
        user_metadata: Any JSON value by name, kept in the manifest.
        left_out: Names of state left out on purpose, recorded in the manifest.

    Raises:
        ConfigError: Wrong URL or options.
    """

    def __init__(
        self,
        url: CheckpointPath | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        transport: str | None = None,
        overwrite: bool = False,
        options: Options | None = None,
        metrics: Mapping[str, float] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self._base = None if url is None else parse_location(url)
        self._location = self._base
        self._storage_options = dict(storage_options or {})
        self._transport = transport
        self._overwrite = overwrite
        self._options = options or Options()
        self._metrics = dict(metrics or {})
        self._user_metadata = dict(user_metadata or {})
        self._left_out = tuple(left_out)
        self._rank = 0
        self._root: Store | None = None
        self._checkpoint: Store | None = None
        self._attempt: protocol.SaveAttempt | None = None
        self._turns = Turns()
        self.manifest: Manifest | None = None
        """The manifest of the last committed save; on the coordinator only."""

    def __getstate__(self) -> dict[str, Any]:
        # torch's process-based async save pickles the writer: configuration travels, clients do not.
        return {**self.__dict__, "_root": None, "_checkpoint": None, "_attempt": None}

    # --- what torch calls ------------------------------------------------------------------------

    def reset(self, checkpoint_id: CheckpointPath | None = None) -> None:
        """Begin another save, at ``checkpoint_id`` if given; all options stay. All ranks."""
        if not self._turns.ask():
            return  # said in set_up_storage_writer, where torch tells all ranks
        if checkpoint_id:
            self._location = resolve_checkpoint_id(self._base, checkpoint_id)
        self._close()
        self.manifest = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the store; on the coordinator also check that this save may be committed. All ranks.

        Raises:
            ConfigError: No URL was given, or ``use_collectives=False``, or this writer is saving already.
            UnsupportedStoreError: The store's create-only write is missing or not honoured.
            CheckpointExistsError: Committed already, and ``overwrite`` is false.
            CheckpointPinnedError: Pinned.
        """
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False cannot be atomic: without a coordinator there is no one commit. "
                "Leave it at True"
            )
        if not self._turns.take():
            raise ConfigError(_IN_USE)
        self._rank = int(kwargs.get("rank") or 0)
        self._close()
        parent, name = self._require_location().split()
        self._root = open_store(
            parent, storage_options=self._storage_options, transport=self._transport, options=self._options
        )
        if is_coordinator:
            probe_create_only(self._root, options=self._options)
            self._checkpoint = protocol.open_for_save(self._root, name, overwrite=self._overwrite)
            self._attempt = protocol.begin_save(self._checkpoint, options=self._options)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is: nothing of ours travels in it. All ranks."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave torch's own writers what they look for in a cached plan. Coordinator only.

        With plan caching a stock writer in this process may be handed these plans; ours reads none of it.
        """
        return [
            replace(plan, storage_data=_StoragePrefix(f"__{rank}_")) if plan.storage_data is None else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's items. All ranks; blocks until done.

        A failure is not raised here: it travels in the results, and :meth:`finish` raises it for all.
        """
        future: Future[list[WriteResult]] = Future()
        try:
            future.set_result(self._write(plan, planner))
        finally:
            self._turns.end()
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, or clean up and raise. Coordinator only.

        Raises:
            ConfigError: Another thread's save has begun with this writer since; nothing is committed.
            SaveFailedError: A rank failed, or an object is not there as reported; nothing is committed.
            CheckpointExistsError, CheckpointPinnedError: Somebody else was first.
            CommitUnknownError: The store never said whether the commit took effect; nothing was deleted.
        """
        if not self._turns.begin_writing():
            raise ConfigError(_IN_USE)
        try:
            self._finish(metadata, results)
        finally:
            self._turns.end()

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        reports = [report for rank in results for report in rank_reports(rank)]
        keys = [key for report in reports for key in report.attempted]
        try:
            raise_failures(reports, self.url)
            draft, stock = self._draft(metadata, results, reports, keys)
        except (Exception, KeyboardInterrupt, SystemExit):  # nothing was sent that could commit
            self._withdraw(keys)
            raise
        try:
            committed = self._commit(draft)
        except Exception as error:
            if protocol.is_not_committed(error):
                self._withdraw(keys)
            raise
        self.manifest = committed
        note_committed(self._require_location())
        protocol.finish_replacement(self._open(), committed, stock)
        self._close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointPath) -> bool:
        """Whether ``checkpoint_id`` is a path or URL that this package can write."""
        try:
            parse_location(checkpoint_id).split()
        except ConfigError:
            return False
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Return torch's description of this save."""
        return StorageMeta(checkpoint_id=self.url)

    @property
    def url(self) -> str:
        """The checkpoint's URL without secrets; empty while none was given."""
        return "" if self._location is None else self._location.url

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's URL, as torch names it."""
        return self.url

    # --- writing ---------------------------------------------------------------------------------

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        keys: list[str] = []
        if not self._turns.begin_writing():
            return [as_result(RankReport((), (), ConfigError(_IN_USE, rank=self._rank), self._rank_name))]
        try:
            objects = self._data_objects(plan, planner)
            keys = [one.key for one in objects]
            self._upload(objects)
        except Exception as error:
            self._withdraw(keys)
            return [as_result(RankReport((), tuple(keys), self._as_ours(error), self._rank_name))]
        except (KeyboardInterrupt, SystemExit):  # torch skips finish then: nobody else would clean up
            self._withdraw(keys)
            raise
        return [
            *item_results(objects),
            as_result(RankReport(tuple(one.entry() for one in objects), tuple(keys))),
        ]

    def _data_objects(self, plan: SavePlan, planner: SavePlanner) -> list[DataObject]:
        transfer = self._options.transfer
        values = PlanValues(planner, window_bytes=transfer.part_bytes)
        items = [values.prepare(item) for item in plan.items]
        _warn_of_trust(items, self.url)
        groups = group_items(items, max_object_bytes=transfer.max_object_bytes)
        token = new_token()
        return [
            DataObject(f"{token}/{number}.distcp", group, values, transfer)
            for number, group in enumerate(groups)
        ]

    def _upload(self, objects: Sequence[DataObject]) -> None:
        """Write what needs no staging side by side, then the rest one object at a time."""
        batches = [[one for one in objects if not one.is_staged]]
        batches += [[one] for one in objects if one.is_staged]
        for batch in batches:
            uploads = [ObjectUpload(one.key, one.size_bytes, one.chunks) for one in batch]
            _, error = upload_objects(self._open(), uploads, options=self._options.transfer)
            if error is not None:
                raise error

    def _as_ours(self, error: Exception) -> RemoteCkptError:
        """The error as one of ours that names this rank; others may not even pickle."""
        if isinstance(error, RemoteCkptError):
            error.rank = self._rank
            return error
        return SaveFailedError(
            f"{self._rank_name} failed: {type(error).__name__}: {error}", url=self.url, rank=self._rank
        )

    @property
    def _rank_name(self) -> str:
        """Torch counts ranks within the save's group; logs of a job count them all."""
        is_distributed = dist.is_available() and dist.is_initialized()
        all_over = dist.get_rank() if is_distributed else self._rank
        return f"rank {self._rank}" + (f" (global rank {all_over})" if all_over != self._rank else "")

    # --- committing ------------------------------------------------------------------------------

    def _draft(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
        reports: Sequence[RankReport],
        keys: list[str],
    ) -> tuple[Manifest, bytes]:
        """Write index and stock metadata under this save's own keys, added to ``keys``; describe it all."""
        attempt = self._require_attempt()
        stored = stored_items(results)
        objects = sorted((entry for report in reports for entry in report.objects), key=lambda one: one.key)
        index = build_index(
            metadata,
            stored,
            objects=[entry.key for entry in objects],
            save_id=attempt.save_id,
            block_bytes=self._options.transfer.block_bytes,
            url=self.url,
        )
        stock = stock_metadata(metadata, stored, url=self.url, save_id=attempt.save_id)
        name = self._require_location().name
        draft = Manifest(
            generation=1,  # this and the times are what the commit decides
            save_id=attempt.save_id,
            state="live",
            name=name,
            step=parse_step(name),
            created_at=attempt.began_at,
            committed_at=attempt.began_at,
            world_size=len(results),
            torch_version=torch.__version__,
            package_version=__version__,
            total_bytes=sum(entry.size_bytes for entry in objects),
            objects=tuple(objects),
            index=self._put(index_key(attempt.save_id), format_index(index), keys),
            stock_metadata=self._put(stock_metadata_key(attempt.save_id), stock, keys),
            metrics=self._metrics,
            user_metadata=self._user_metadata,
            left_out=self._left_out,
            content_digest=content_digest(index),
        )
        return draft, stock

    def _put(self, key: str, data: bytes, keys: list[str]) -> ObjectEntry:
        keys.append(key)
        self._open().write(key, data)
        return ObjectEntry(key=key, size_bytes=len(data), crc32c=crc32c(data))

    def _commit(self, draft: Manifest) -> Manifest:
        entries = [*draft.objects, draft.index, draft.stock_metadata]
        return protocol.commit_save(
            self._open(),
            draft,
            attempt=self._require_attempt(),
            expected={entry.key: entry.size_bytes for entry in entries if entry is not None},
            overwrite=self._overwrite,
            options=self._options,
        )

    def _withdraw(self, keys: Sequence[str]) -> None:
        """Delete this attempt's keys after a definite failure; what cannot be deleted is the sweep's."""
        try:
            save_id = None if self._attempt is None else self._attempt.save_id
            failures = protocol.withdraw(self._open(), keys, save_id)
        except Exception as error:
            logger.warning("could not clean up after a failed save of %s: %s", self.url, error)
            return
        for failure in failures:
            logger.warning("left for the sweep: %s in %s: %s", failure.key, self.url, failure.error)

    # --- state -----------------------------------------------------------------------------------

    def _require_location(self) -> Location:
        if self._location is None:
            raise UrlError("give RemoteStorageWriter a url, or dcp.save a checkpoint_id")
        return self._location

    def _require_attempt(self) -> protocol.SaveAttempt:
        if self._attempt is None:
            raise ConfigError("finish was called before set_up_storage_writer")
        return self._attempt

    def _open(self) -> Store:
        """The checkpoint's store. Other ranks open it only now, after the coordinator made room for it."""
        if self._root is None:
            raise ConfigError("the writer is not set up: torch calls set_up_storage_writer first")
        if self._checkpoint is None:
            self._checkpoint = self._root.scope(self._require_location().name, create=True)
        return self._checkpoint

    def _close(self) -> None:
        for store in (self._checkpoint, self._root):
            if store is not None:
                store.close()
        self._checkpoint = self._root = None


def _warn_of_trust(items: Sequence[PreparedItem], url: str) -> None:
    for item in items:
        if item.needs_trust:
            logger.warning(
                "%s in %s holds %s: loading it will ask for trusted=True",
                item.item.index.fqn,
                url,
                ", ".join(item.needs_trust),
            )
