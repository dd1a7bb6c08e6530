"""Initialising a model from weights that are somewhere: a checkpoint of ours, a stock DCP one, or a file.

The names and signatures are those of DINOv3's checkpointer. Local paths and URLs work alike, for files
(``.pth``, ``.pt``, ``.bin``, ``.safetensors``) too. Nothing in a file is executed unless it is trusted.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from remote_ckpt.dcp.collective import Group, open_group
from remote_ckpt.dcp.matching import check_values, listed, saved_shapes
from remote_ckpt.dcp.planner import CheckedLoadPlanner
from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.dcp.spread import spread_tensors
from remote_ckpt.dcp.weights import NameMatch, WeightsSource, find_weights, match_weights, read_weights
from remote_ckpt.errors import KeyMismatchError, LoadFailedError
from remote_ckpt.log import logger
from remote_ckpt.options import Options

if TYPE_CHECKING:
    from upath import UPath

    CheckpointPath = str | os.PathLike[str] | UPath


@dataclass(frozen=True, slots=True)
class _Access:
    """How weights are read."""

    storage_options: Mapping[str, Any] | None = field(repr=False)  # it may hold secrets
    transport: str | None
    options: Options
    trusted: bool
    convert_dtype: bool

    def find(self, path: CheckpointPath) -> WeightsSource:
        return find_weights(
            path, storage_options=self.storage_options, transport=self.transport, options=self.options
        )

    def read(self, source: WeightsSource) -> dict[str, torch.Tensor]:
        return read_weights(
            source.location,
            storage_options=self.storage_options,
            transport=self.transport,
            options=self.options,
            trusted=self.trusted,
        )

    def reader(self, path: CheckpointPath) -> RemoteStorageReader:
        return RemoteStorageReader(
            path,
            storage_options=self.storage_options,
            transport=self.transport,
            options=self.options,
            trusted=self.trusted,
            convert_dtype=self.convert_dtype,
        )


def init_fsdp_model_from_checkpoint(
    model: torch.nn.Module,
    checkpoint_path: CheckpointPath,
    skip_load_keys: Sequence[str] | None = None,
    keys_not_sharded: Sequence[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
    trusted: bool = False,
    convert_dtype: bool = False,
) -> None:
    """Fill a model, sharded or not, with pretrained weights. All ranks of the group call this together.

    From a checkpoint each rank reads its own part. A file is read by one rank, which sends the others one
    tensor at a time, so that no other rank ever holds a full copy. Weights are looked for at the top, in
    ``model``, ``teacher`` and ``model.teacher``, wherever most of the model's names are.

    Args:
        model: On its final device. What is sharded, and how, is read off the model.
        checkpoint_path: A checkpoint's folder or a file; path, URL or ``UPath``.
        skip_load_keys: Parameters whose name contains any of these keep their values.
        keys_not_sharded: Not needed; accepted since DINOv3's function has it.
        process_group: The ranks that load; by default all. Not needed without ``torch.distributed``.
        storage_options: As in :class:`~remote_ckpt.dcp.reader.RemoteStorageReader`.
        transport: As there.
        options: Byte budget, retries and deadlines.
        trusted: Unpickle Python objects of any class.
        convert_dtype: Convert weights of another dtype.

    Raises:
        CheckpointNotFoundError: Neither a checkpoint nor a file is there.
        KeyMismatchError: Nothing fits; or a checkpoint (not a file, for which it is a warning) lacks
            parameters that are not skipped.
        ShapeMismatchError, DtypeMismatchError: Weights do not fit; nothing was changed.
        LoadFailedError, StoreError, UntrustedDataError, IntegrityError: As
            :func:`~remote_ckpt.training.load_checkpoint`.
    """
    del keys_not_sharded
    access = _Access(storage_options, transport, options or Options(), trusted, convert_dtype)
    group = open_group(
        process_group,
        timeout_seconds=access.options.commit.collective_seconds,
        failure=LoadFailedError,
    )
    source = group.broadcast_from_coordinator(lambda: access.find(checkpoint_path))
    state = group.agree(lambda: _without_skipped(get_model_state_dict(model), skip_load_keys))
    if source.kind == "dcp":
        match = _load_parts(group, access, checkpoint_path, state)
    else:
        match = _load_file(group, access, source, state)
    group.agree(lambda: set_model_state_dict(model, state, options=StateDictOptions(strict=False)))
    _tell(match, source)


def init_model_from_checkpoint_for_evals(
    model: torch.nn.Module,
    pretrained_weights: CheckpointPath,
    checkpoint_key: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
    trusted: bool = False,
    convert_dtype: bool = False,
) -> None:
    """Fill a plain model of one process with pretrained weights, for evaluation. Calls no collective.

    Names may carry wrappers (``module.``, ``_orig_mod.``) and a leading ``backbone.``. What is missing or
    unexpected is a warning, as in DINOv3's function; that nothing fits is an error.

    Args:
        model: Neither sharded nor wrapped.
        pretrained_weights: A checkpoint's folder or a file; path, URL or ``UPath``.
        checkpoint_key: Part of the checkpoint to use, such as ``"teacher"``; that it has none of that name is
            a :class:`~remote_ckpt.errors.KeyMismatchError` (DINOv3's function takes what is at the top). By
            default wherever most of the model's names are: at the top, in ``model`` or in ``teacher``.
        storage_options: As in :func:`init_fsdp_model_from_checkpoint`, like the rest and the errors.
        transport: As there.
        options: As there.
        trusted: As there.
        convert_dtype: As there.
    """
    access = _Access(storage_options, transport, options or Options(), trusted, convert_dtype)
    alone = Group(None, timeout_seconds=0, failure=LoadFailedError)
    state = dict(model.state_dict())
    source = access.find(pretrained_weights)
    if source.kind == "dcp":
        match = _load_parts(alone, access, pretrained_weights, state, checkpoint_key, must_be_whole=False)
    else:
        match = _load_file(alone, access, source, state, checkpoint_key)
    model.load_state_dict(state)
    _tell(match, source)


def _without_skipped(state: dict[str, Any], skipped: Sequence[str] | None) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not any(part in name for part in skipped or ())}


def _load_parts(
    group: Group,
    access: _Access,
    path: CheckpointPath,
    state: dict[str, Any],
    key: str | None = None,
    *,
    must_be_whole: bool = True,
) -> NameMatch:
    """Read each rank's part of a DCP checkpoint into the state's tensors, which are the model's memory."""
    reader = group.agree(lambda: access.reader(path))
    resolution = group.broadcast_from_coordinator(reader.resolve)

    def match() -> NameMatch:
        reader.adopt(resolution)
        shapes = saved_shapes(reader.read_metadata())
        saved = [name for name, shape in shapes.items() if shape is not None]
        matched = _require_some(match_weights(state, saved, key=key), reader.url)
        if matched.missing and must_be_whole:
            raise _mismatch(f"missing from {reader.url}: {listed(matched.missing)}", matched)
        return matched

    matched = group.agree(match)
    template = {saved: state[name] for name, saved in matched.saved_names.items()}
    planner = CheckedLoadPlanner(convert_dtype=access.convert_dtype, key_filter=template.__contains__)
    with group.translated(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            template,
            storage_reader=reader,
            planner=planner,
            process_group=group.process_group,
            no_dist=group.process_group is None,
        )
    return matched


def _load_file(
    group: Group,
    access: _Access,
    source: WeightsSource,
    state: dict[str, Any],
    key: str | None = None,
) -> NameMatch:
    """Read a file on the coordinator and give each rank its part."""
    weights: dict[str, torch.Tensor] = {}

    def read() -> tuple[NameMatch, dict[str, Any]]:
        weights.update(access.read(source))
        matched = _require_some(match_weights(state, weights, key=key), source.location.url)
        saved = matched.saved_names.values()
        return matched, {name: (tuple(weights[name].size()), weights[name].dtype) for name in saved}

    matched, shapes = group.broadcast_from_coordinator(read)
    group.agree(lambda: check_values(matched.saved_names, state, shapes, convert_dtype=access.convert_dtype))
    targets = {name: state[name] for name in sorted(matched.saved_names)}
    sources = {name: weights[matched.saved_names[name]] for name in targets} if group.is_coordinator else None
    spread_tensors(group, targets, sources)
    return matched


def _require_some(match: NameMatch, url: str) -> NameMatch:
    if match.missing and not match.saved_names:
        raise _mismatch(
            f"nothing in {url} fits the model, which asks for {listed(match.missing)} "
            f"where there is {listed(match.unexpected) or 'no tensor'}",
            match,
        )
    return match


def _mismatch(message: str, match: NameMatch) -> KeyMismatchError:
    error = KeyMismatchError(message, operation="load")
    error.missing, error.unexpected = match.missing, match.unexpected
    return error


def _tell(match: NameMatch, source: WeightsSource) -> None:
    where = f"{source.location.url} (section {match.section!r})" if match.section else source.location.url
    logger.info("initialised %d tensors from %s", len(match.saved_names), where)
    if match.missing:
        logger.warning("not in %s, left as they were: %s", where, listed(match.missing))
    if match.unexpected:
        logger.warning("in %s and not used: %s", where, listed(match.unexpected))
