"""Full tensors that one rank holds, into a model that is sharded over many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from remote_ckpt.dcp.collective import Group
from remote_ckpt.dcp.matching import listed
from remote_ckpt.errors import MismatchError


def spread_tensors(
    group: Group, targets: Mapping[str, Any], sources: Mapping[str, torch.Tensor] | None
) -> None:
    """Fill each rank's part of every target from the coordinator's full tensors, one tensor at a time.

    No rank but the coordinator ever holds more than one full tensor. All ranks of the group.

    Args:
        group: The ranks; any of them may own nothing of a target.
        targets: The same names in the same order on all ranks: tensors, DTensors or ShardedTensors.
        sources: On the coordinator: a full tensor of the same shape for each name.

    Raises:
        MismatchError: A source is sparse or quantized; nothing was changed.
        RemoteCkptError: A rank was lost; targets hold a mixture.
    """
    dtypes = group.broadcast_from_coordinator(lambda: _dtypes(targets, sources or {}))
    with torch.no_grad(), group.translated():
        for name, target in targets.items():
            full = _received(group, target, dtypes[name], None if sources is None else sources[name])
            for part, offsets in _local_parts(target):
                part.copy_(_box(full, offsets, part.size()))


def _dtypes(names: Iterable[str], sources: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    unfit = [name for name in names if sources[name].layout != torch.strided or sources[name].is_quantized]
    if unfit:
        raise MismatchError(f"sparse or quantized in the file, which no model takes: {listed(unfit)}")
    return {name: sources[name].dtype for name in names}


def _received(group: Group, target: Any, dtype: torch.dtype, source: torch.Tensor | None) -> torch.Tensor:
    if group.process_group is None:
        assert source is not None, "a single process is its own coordinator"
        return source
    full = torch.empty(target.size(), dtype=dtype) if source is None else _resolved(source)
    flat = full.reshape(-1).view(torch.uint8)  # gloo knows few dtypes; bytes are bytes
    if flat.numel():
        dist.broadcast(flat, src=dist.get_global_rank(group.process_group, 0), group=group.process_group)
    return full


def _resolved(source: torch.Tensor) -> torch.Tensor:
    """Return the tensor as bytes that mean what they say: torch keeps conjugates as a note."""
    return source.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _local_parts(target: Any) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the memory that this rank owns of a tensor, and where in the whole it lies."""
    if isinstance(target, DTensor):
        if target.device_mesh.get_coordinate() is not None:
            _, offsets = compute_local_shape_and_global_offset(
                target.shape, target.device_mesh, target.placements
            )
            yield target.to_local(), tuple(offsets)
    elif isinstance(target, ShardedTensor):
        for shard in target.local_shards():
            yield shard.tensor, tuple(shard.metadata.shard_offsets)
    else:
        yield target, (0,) * target.dim()


def _box(full: torch.Tensor, offsets: tuple[int, ...], sizes: torch.Size) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        full = full.narrow(dim, offset, size) if size else full.narrow(dim, 0, 0)
    return full
