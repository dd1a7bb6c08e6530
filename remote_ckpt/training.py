"""Saving and loading in a training loop, with the names and signatures of DINOv3's checkpointer.

All ranks of the process group call :func:`save_checkpoint` and :func:`load_checkpoint` together, in the
same order; both block. Every rank gets the same result or the same error, within
``options.commit.collective_seconds`` even where another rank died.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from remote_ckpt.dcp.collective import Group, open_group
from remote_ckpt.dcp.failures import located
from remote_ckpt.dcp.left_out import left_out_names
from remote_ckpt.dcp.matching import listed
from remote_ckpt.dcp.paths import CheckpointPath
from remote_ckpt.dcp.planner import CheckedLoadPlanner, CheckedSavePlanner
from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.dcp.state import (
    apply_state,
    collect_state,
    names_with_other_keys,
    require_loadable,
)
from remote_ckpt.dcp.target import Target
from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.errors import (
    CheckpointChangedError,
    CommitUnknownError,
    ConfigError,
    LoadFailedError,
    RemoteCkptError,
    SaveFailedError,
)
from remote_ckpt.log import logger
from remote_ckpt.options import Options
from remote_ckpt.resumed import note_committed
from remote_ckpt.url import Location, parse_location

_MAX_LOADS = 3


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, beside changing the model.

    Args:
        iteration: As given to :func:`save_checkpoint`; None where the checkpoint holds none.
        missing: Sorted names that this rank asked for and the checkpoint lacks; they kept their values.
        unexpected: Sorted names in the checkpoint, within what was asked for, that no rank wanted.
    """

    iteration: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def save_checkpoint(
    ckpt_dir: CheckpointPath,
    *,
    iteration: int | str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    overwrite: bool = True,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
    **others: Any,
) -> None:
    """Save a plain, DDP, FSDP, FSDP2, HSDP or tensor-parallel model and what belongs to it.

    The checkpoint exists once this returns, and not before. One that it replaces stays readable until then.
    All ranks of the group call this together, and no other operation of this package on that group runs at
    the same time in another thread.

    Args:
        ckpt_dir: The checkpoint's own path or URL: ``"s3://bucket/run/ckpt/199"``.
        iteration: Any number or text; :func:`load_checkpoint` returns it.
        model: Its state dict is saved under names without wrappers.
        optimizer: Of this model.
        overwrite: Replace a checkpoint of that name; otherwise it is an error. A pinned one never is.
        process_group: The ranks that save; by default all. Not needed without ``torch.distributed``.
        storage_options: As in :class:`~remote_ckpt.dcp.writer.RemoteStorageWriter`.
        transport: As there.
        options: Byte budget, retries and deadlines.
        others: Objects with ``state_dict()``, dicts, lists, tensors or plain values. What differs between
            ranks needs a name for each, such as ``f"rank{rank}"`` inside a dict: of one name, one rank's
            copy is kept (with a warning where they differ). Keys of dicts that are not text come back as
            text where the dict that is loaded into is empty (a warning names them).

    Raises:
        CheckpointExistsError: Committed already without ``overwrite``, or a file stands there.
        CheckpointPinnedError: It is pinned.
        SaveFailedError: A rank failed; nothing was committed. Names rank, object and cause.
        CommitUnknownError: The store never said whether the commit took effect, or a rank was lost while
            data was written or committed; list the checkpoints to see.
        ConfigError, StoreError: Wrong URL or options; a store that refused.
    """
    save_state(
        ckpt_dir,
        iteration=iteration,
        model=model,
        optimizer=optimizer,
        others=others,
        process_group=process_group,
        overwrite=overwrite,
        storage_options=storage_options,
        transport=transport,
        options=options,
    )


def save_state(
    ckpt_dir: CheckpointPath,
    *,
    iteration: int | str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    others: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
    options: Options | None,
    **writer_options: Any,
) -> None:
    """Save as :func:`save_checkpoint` does, with any option of the writer, such as ``metrics``."""
    options = options or Options()
    group = _group(process_group, options, SaveFailedError)

    def prepare() -> tuple[RemoteStorageWriter, dict[str, Any]]:
        writer = RemoteStorageWriter(
            ckpt_dir, options=options, left_out=left_out_names(model), **writer_options
        )
        state = collect_state(model, optimizer, others, iteration=iteration)
        if other_keys := names_with_other_keys(others, state):
            logger.warning("keys that are not text load as text into an empty dict: %s", listed(other_keys))
        return writer, state

    with located(ckpt_dir):
        location, (writer, state) = _agree(group, ckpt_dir, prepare)
        with group.translated(lost=CommitUnknownError), _quiet_alone():
            save(state, storage_writer=writer, planner=CheckedSavePlanner(), **_on(group))
    note_committed(location)
    logger.info("saved %s", location.url)


def load_checkpoint(
    ckpt_dir: CheckpointPath,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict_loading: bool = True,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
    trusted: bool = False,
    convert_dtype: bool = False,
    on_report: Callable[[LoadReport], None] | None = None,
    **others: Any,
) -> int | None:
    """Load what :func:`save_checkpoint` saved, on any number of ranks, or a stock DCP checkpoint alike.

    Names, shapes and dtypes are checked on all ranks before anything is changed. Then tensors are received
    in place: after any later failure (a flipped bit, a store that fails) the model holds a mixture and has
    to be loaded again. A checkpoint that is replaced meanwhile is loaded again from the start.

    A parameter whose optimizer state was never saved (frozen, or never used) is left without.

    Args:
        ckpt_dir: The checkpoint's own path or URL.
        model: Receives the state, whatever wrappers it has now.
        optimizer: Left out, the checkpoint's optimizer state is not looked at.
        strict_loading: Raise where names are missing or unexpected, rather than warn and go on.
        process_group: The ranks that load; by default all.
        storage_options: As in :class:`~remote_ckpt.dcp.reader.RemoteStorageReader`.
        transport: As there.
        options: Byte budget, retries and deadlines.
        trusted: Unpickle Python objects of any class, which can run code from the checkpoint.
        convert_dtype: Convert tensors that were saved with another dtype.
        on_report: Called on each rank after the load with what was missing and unexpected.
        others: Objects with ``state_dict()`` and ``load_state_dict()``, which stay the same objects; dicts,
            lists and tensors, which are changed in place. Plain values cannot be and are refused.

    Returns:
        The saved ``iteration``; None where a loose load found none.

    Raises:
        CheckpointNotFoundError: A listing succeeded and there is no such checkpoint, or just a folder with a
            ``checkpoint.pth``, which :func:`~remote_ckpt.pretrained.init_fsdp_model_from_checkpoint` reads.
        KeyMismatchError: Names are missing or unexpected, or nothing of the model is there (always an error).
        ShapeMismatchError, DtypeMismatchError, MismatchError: Values do not fit. Nothing was changed.
        UntrustedDataError: A Python object needs ``trusted=True``.
        IntegrityError, CheckpointDamagedError: Bytes are not those that were saved.
        CheckpointChangedError: It kept being replaced.
        LoadFailedError: A rank failed otherwise; names rank and cause.
        ConfigError, StoreError: Wrong URL or options; a store that refused.
    """
    options = options or Options()
    group = _group(process_group, options, LoadFailedError)

    def prepare() -> tuple[RemoteStorageReader, Target]:
        require_loadable(others)
        reader = RemoteStorageReader(
            ckpt_dir,
            storage_options=storage_options,
            transport=transport,
            options=options,
            trusted=trusted,
            convert_dtype=convert_dtype,
        )
        return reader, Target(model, optimizer, others)

    with located(ckpt_dir):
        location, (reader, target) = _agree(group, ckpt_dir, prepare)
        planner = CheckedLoadPlanner(
            strict=strict_loading,
            trusted=trusted,
            convert_dtype=convert_dtype,
            key_filter=target.wants,
            sections=("model",),
            fixed=("model", *target.optimizers),
        )
        iteration: int | None = _load_settled(group, reader, planner, target)
    report = LoadReport(iteration, planner.missing, planner.unexpected)
    _tell(report, location)
    if on_report is not None:
        on_report(report)
    return iteration


def _load_settled(
    group: Group, reader: RemoteStorageReader, planner: CheckedLoadPlanner, target: Target
) -> Any:
    """Load, and again from the newest generation where the checkpoint changed meanwhile."""
    for attempt in range(_MAX_LOADS):
        try:
            return _load_once(group, reader, planner, target)
        except CheckpointChangedError as error:
            if attempt == _MAX_LOADS - 1:
                raise
            logger.warning("loading %s again: %s", reader.url, error)
            reader.refresh()
    raise AssertionError("unreachable")


def _load_once(group: Group, reader: RemoteStorageReader, planner: CheckedLoadPlanner, target: Target) -> Any:
    resolution = group.broadcast_from_coordinator(reader.resolve)
    state = group.agree(lambda: target.template(reader, resolution))
    with group.translated(), _quiet_alone():
        load(state, storage_reader=reader, planner=planner, **_on(group))
    group.agree(lambda: apply_state(state, target.model, target.optimizer, target.others))
    return state["iteration"]


def _group(
    process_group: dist.ProcessGroup | None, options: Options, failure: type[RemoteCkptError]
) -> Group:
    return open_group(process_group, timeout_seconds=options.commit.collective_seconds, failure=failure)


def _agree(group: Group, ckpt_dir: CheckpointPath, work: Callable[[], Any]) -> tuple[Location, Any]:
    """Check on all ranks that they mean the same checkpoint, and do ``work`` on each."""
    agreed = group.broadcast_from_coordinator(lambda: _checkpoint_at(ckpt_dir).url)

    def check_and_work() -> tuple[Location, Any]:
        location = _checkpoint_at(ckpt_dir)
        if location.url != agreed:
            raise ConfigError(f"ranks mean different checkpoints: {agreed} and {location.url}")
        return location, work()

    return group.agree(check_and_work)


def _checkpoint_at(ckpt_dir: CheckpointPath) -> Location:
    if ckpt_dir is None:
        raise ConfigError("ckpt_dir is None: find_latest_checkpoint found no checkpoint")
    location = parse_location(ckpt_dir)
    location.split()
    return location


def _on(group: Group) -> dict[str, Any]:
    return {"process_group": group.process_group, "no_dist": group.process_group is None}


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Keep torch from warning that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _tell(report: LoadReport, location: Location) -> None:
    logger.info("loaded %s", location.url)
    if report.missing:
        logger.warning("not in %s, left as it was: %s", location.url, listed(report.missing))
    if report.unexpected:
        logger.warning("in %s and not used: %s", location.url, listed(report.unexpected))
