"""``CheckpointManager``: a run's directory for its training loop, with saving, loading and retention."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
import torch.distributed as dist

from remote_ckpt.dcp.collective import Group, open_group
from remote_ckpt.dcp.paths import CheckpointPath
from remote_ckpt.directory import CheckpointDirectory, Mode, Step, plain_numbers
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    LoadFailedError,
    SaveFailedError,
)
from remote_ckpt.info import CheckpointInfo
from remote_ckpt.log import logger
from remote_ckpt.options import Options
from remote_ckpt.policies import JoinedPolicy, KeepBest, RetentionPolicy
from remote_ckpt.pruning import PruneReport
from remote_ckpt.store.base import Store
from remote_ckpt.training import LoadReport, load_checkpoint, save_state
from remote_ckpt.url import check_name

if TYPE_CHECKING:
    from upath import UPath

_MAX_LOOKS = 3


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What :meth:`CheckpointManager.load` loaded.

    Args:
        info: The checkpoint.
        iteration: As given to the save; None where the checkpoint holds none.
        missing: Sorted names that this rank asked for and the checkpoint lacks; they kept their values.
        unexpected: Sorted names in the checkpoint, within what was asked for, that no rank wanted.
    """

    info: CheckpointInfo
    iteration: Any
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def step(self) -> int | None:
        """The step to go on from: what was given to the save, else what the name spells; else None."""
        is_number = isinstance(self.iteration, int) and not isinstance(self.iteration, bool)
        return self.iteration if is_number else self.info.step


class CheckpointManager(CheckpointDirectory):
    """Saves, finds, loads and cleans up the checkpoints of one run.

    All ranks make one with the same arguments. :meth:`save`, :meth:`load`, :meth:`latest` and :meth:`best`
    are called by all ranks of the process group together, in the same order, by no two threads at once; they
    block. All other methods are those of :class:`CheckpointDirectory` and are called by one rank.

    Args:
        root: The run's directory, such as ``"s3://bucket/run/ckpt"``.
        policy: What stays, such as ``KeepLast(3) | KeepBest("val_loss")``. After each save rank 0 deletes
            the rest in a thread of its own; None deletes nothing.
        best_metric: Which metric ``load("best")`` means; by default that of the policy's ``KeepBest``.
        best_mode: ``"min"`` or ``"max"``: which values of it are better.
        process_group: The ranks that save and load; by default all. Not needed without ``torch.distributed``.
        storage_options: As in :class:`CheckpointDirectory`.
        transport: As there.
        options: As there.

    Raises:
        ConfigError: As there.
    """

    def __init__(
        self,
        root: CheckpointPath,
        *,
        policy: RetentionPolicy | None = None,
        best_metric: str | None = None,
        best_mode: Mode = "min",
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        transport: str | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(
            root, policy=policy, storage_options=storage_options, transport=transport, options=options
        )
        if best_mode not in ("min", "max"):
            raise ConfigError(f"best_mode must be 'min' or 'max', not {best_mode!r}")
        self.directory = CheckpointDirectory(
            root, policy=policy, storage_options=storage_options, transport=transport, options=options
        )
        """The same directory for one rank alone: none of its methods talks to other ranks."""
        self._best = (best_metric, best_mode) if best_metric is not None else _best_of(policy)
        self._process_group = process_group
        self._pruning = _Background()

    # --- what all ranks call -------------------------------------------------------------------------

    def save(
        self,
        step: int | str,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        metadata: Mapping[str, Any] | None = None,
        iteration: int | str | None = None,
        overwrite: bool = True,
        **stateful: Any,
    ) -> Path | UPath:
        """Save a checkpoint, which exists once this returns, and not before. All ranks call it.

        Retention follows on rank 0 in a thread; it neither delays this call nor fails it.

        Args:
            step: Its number (a periodic checkpoint) or name (``"best"``: retention leaves it alone).
            model: Plain, DDP, FSDP, FSDP2, HSDP or tensor parallel.
            optimizer: Of this model.
            metrics: Numbers by name (tensors and NumPy values of one element too), kept with the checkpoint.
                Rank 0's count.
            metadata: JSON values by name, likewise.
            iteration: What :meth:`load` returns as such; by default ``step``.
            overwrite: Replace a checkpoint of that name, which stays readable until then. A pinned one never
                is replaced.
            stateful: Objects with ``state_dict()``, dicts, lists, tensors or plain values, as in
                :func:`~remote_ckpt.save_checkpoint`.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointExistsError, CheckpointPinnedError, SaveFailedError, CommitUnknownError, ConfigError,
            StoreError: As :func:`~remote_ckpt.save_checkpoint`.
        """
        group = self._group(SaveFailedError)
        # A call that is wrong on one rank is an error on all of them, rather than a wait for the one.
        path, numbers = group.agree(lambda: (self.path(_name_to_save(step)), plain_numbers(metrics)))
        save_state(
            path,
            iteration=step if iteration is None else iteration,
            model=model,
            optimizer=optimizer,
            others=stateful,
            process_group=self._process_group,
            overwrite=overwrite,
            storage_options=self._place.storage_options,
            transport=self._place.transport,
            options=self._place.options,
            metrics=numbers,
            user_metadata=metadata,
        )
        if self.policy is not None and group.is_coordinator:
            self._pruning.begin(self._prune_quietly)
        return path

    def load(
        self,
        step: Step = "latest",
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        strict_loading: bool = True,
        trusted: bool = False,
        convert_dtype: bool = False,
        **stateful: Any,
    ) -> LoadedCheckpoint | None:
        """Load a checkpoint on any number of ranks: the one that rank 0 finds. All ranks call it.

        Args:
            step: ``"latest"``: the newest step, where damaged manifests are passed over with a warning.
                ``"best"``: the checkpoint of that name, if there is one, else the best by ``best_metric``.
                Or a number, a name, or a :class:`CheckpointInfo`.
            model: Receives the state, whatever wrappers it has now.
            optimizer: Left out, the checkpoint's optimizer state is not looked at.
            strict_loading: Raise where names are missing or unexpected, rather than warn and go on.
            trusted: Unpickle Python objects of any class, which can run code from the checkpoint.
            convert_dtype: Convert tensors that were saved with another dtype.
            stateful: As in :func:`~remote_ckpt.load_checkpoint`.

        Returns:
            What was loaded. None only for ``"latest"``, where a listing that succeeded shows no step.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint (for ``"best"``: none with the metric).
            KeyMismatchError, ShapeMismatchError, DtypeMismatchError, UntrustedDataError, IntegrityError,
            CheckpointDamagedError, CheckpointChangedError, LoadFailedError, ConfigError, StoreError: As
                :func:`~remote_ckpt.load_checkpoint`.
        """
        reports: list[LoadReport] = []
        for attempt in range(_MAX_LOOKS):
            info = self._agreed(lambda: self._find(step))
            if info is None:
                return None
            try:
                load_checkpoint(
                    self.path(info),
                    model=model,
                    optimizer=optimizer,
                    strict_loading=strict_loading,
                    process_group=self._process_group,
                    storage_options=self._place.storage_options,
                    transport=self._place.transport,
                    options=self._place.options,
                    trusted=trusted,
                    convert_dtype=convert_dtype,
                    on_report=reports.append,
                    **stateful,
                )
            except (CheckpointNotFoundError, CheckpointChangedError):
                # Deleted after it was found; all ranks got the same error, so all look again.
                if step not in ("latest", "best") or attempt == _MAX_LOOKS - 1:
                    raise
            else:
                report = reports[-1]
                return LoadedCheckpoint(info, report.iteration, report.missing, report.unexpected)
        raise AssertionError("unreachable")

    def latest(self, *, verify: bool = False) -> CheckpointInfo | None:
        """As :meth:`CheckpointDirectory.latest`.

        Rank 0 looks; all ranks call it and get its answer or error.
        """
        return self._agreed(lambda: self._directory_settled().latest(verify=verify))

    def best(self, metric: str | None = None, mode: Mode | None = None) -> CheckpointInfo | None:
        """As :meth:`CheckpointDirectory.best`, by default with the manager's own metric.

        Rank 0 looks; all ranks call it and get its answer or error.
        """
        return self._agreed(lambda: self._find_best(metric, mode))

    # --- retention in the background -----------------------------------------------------------------

    def wait(self) -> PruneReport | None:
        """Wait until the retention that saves have begun is done. Called by any rank, no collective.

        Returns:
            What the last one did; None where there was none, or where it failed (which was logged).
        """
        return self._pruning.wait()

    def close(self) -> None:
        """Wait for the retention in the background, and release connections."""
        self._pruning.close()
        self.directory.close()
        super().close()

    def __enter__(self) -> CheckpointManager:
        return self

    @contextmanager
    def _opened(self) -> Iterator[Store]:
        # Who looks at the directory through this manager sees its own retention done.
        self._pruning.wait()
        with super()._opened() as root:
            yield root

    def _prune_quietly(self) -> PruneReport | None:
        try:
            return self.directory._prune(None, is_hasty=True)
        except Exception as error:  # whatever it is, it must not reach the training loop
            logger.warning("%s: retention failed, the next save tries again: %s", self.url, error)
            return None

    # --- inside --------------------------------------------------------------------------------------

    def _group(self, failure: type[CheckpointError]) -> Group:
        seconds = self._place.options.commit.collective_seconds
        return open_group(self._process_group, timeout_seconds=seconds, failure=failure)

    def _agreed(self, look: Callable[[], CheckpointInfo | None]) -> CheckpointInfo | None:
        return self._group(LoadFailedError).broadcast_from_coordinator(look)

    def _directory_settled(self) -> CheckpointDirectory:
        self._pruning.wait()
        return self.directory

    def _find(self, step: Step) -> CheckpointInfo | None:
        directory = self._directory_settled()
        if step == "latest":
            return directory.latest()
        if step != "best":
            return directory.info(step)
        try:
            return directory.info("best")
        except CheckpointNotFoundError:
            return self._require_best()

    def _require_best(self) -> CheckpointInfo:
        if (found := self._find_best(None, None)) is None:
            raise CheckpointNotFoundError(
                f"no checkpoint in {self.url} has the metric {self._best[0]!r}",
                url=self.url,
                operation="find",
            )
        return found

    def _find_best(self, metric: str | None, mode: Mode | None) -> CheckpointInfo | None:
        own_metric, own_mode = self._best
        if (metric := own_metric if metric is None else metric) is None:
            raise ConfigError("best by which metric? Give best_metric to the manager", url=self.url)
        return self._directory_settled().best(metric, own_mode if mode is None else mode)


class _Background:
    """One thread that does one job after the other; a job that waits already stands for all that come."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[Future[PruneReport | None]] = []
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def begin(self, job: Callable[[], PruneReport | None]) -> None:
        self._jobs = [one for one in self._jobs if not one.done()] if self._is_ours() else []
        if len(self._jobs) > 1:
            return  # one is running, one waits: it will see what this one would have seen
        if self._pool is None or not self._is_ours():
            self._pool, self._pid = ThreadPoolExecutor(1, thread_name_prefix="prune"), os.getpid()
        self._jobs.append(self._pool.submit(job))

    def wait(self) -> PruneReport | None:
        # A forked child has inherited the jobs, but not the thread that would end them.
        jobs = self._jobs if self._is_ours() else []  # a save in another thread may put another list there
        return [job.result() for job in jobs][-1] if jobs else None

    def close(self) -> None:
        if self._pool is not None and self._is_ours():
            self._pool.shutdown()
        self._pool = None

    def _is_ours(self) -> bool:
        return self._pid == os.getpid()


def _best_of(policy: RetentionPolicy | None) -> tuple[str | None, Mode]:
    """The metric and mode of the first ``KeepBest`` in a policy."""
    parts = policy.policies if isinstance(policy, JoinedPolicy) else (policy,)
    found = [part for part in parts if isinstance(part, KeepBest)]
    return (found[0].metric, found[0].mode) if found else (None, "min")


def _name_to_save(step: int | str) -> int | str:
    if step == "latest":
        raise ConfigError("'latest' always means the newest step: give the checkpoint another name")
    return check_name(step) if isinstance(step, str) else step
