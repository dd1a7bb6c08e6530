"""The values of a save's plan: how each is stored, and its bytes when they are due.

A planner need not be thread-safe, and may hand out the same staging memory again for the next item: torch
promises it no more than that one item is written before the next is resolved. Only torch's own way of
resolving is known to hand out the state's memory itself, which is sent as it is, several objects at a time.
What any other planner resolves is *staged*: one item at a time, each window copied before it leaves.

Values that only ``torch.save`` can write are serialised to learn their size. Small ones are kept, the others
are let go and serialised again when they are due, so that one is held at a time.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from remote_ckpt.archive import SUPPORTED_DTYPES, TensorFrame, frame_tensor
from remote_ckpt.dcp.compact import save_compactly
from remote_ckpt.dcp.payload import dtype_name, is_plain, payload_windows
from remote_ckpt.dcp.pickles import needs_trust
from remote_ckpt.errors import SaveFailedError
from remote_ckpt.options import MiB
from remote_ckpt.store.base import Buffer

KEPT_BYTES = 1 * MiB
"""A serialised value up to this size is kept until it is sent, as long as all fit into one part."""

_RESOLVING = ("resolve_data", "lookup_object", "transform_object")


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """A write item with its exact size.

    Args:
        item: Of the plan.
        size_bytes: Length of its archive.
        frame: What stands around the raw elements of a plain tensor; None where the archive is opaque.
        dtype: Name of the raw elements' dtype; empty where the archive is opaque.
        archive: The opaque archive, if it was kept.
        is_staged: It must be sent alone: its bytes are resolved when they are due.
        needs_trust: Why safe loading refuses it (names of classes); empty if it does not.
    """

    item: WriteItem
    size_bytes: int
    frame: TensorFrame | None = None
    dtype: str = ""
    archive: bytes | None = None
    is_staged: bool = False
    needs_trust: tuple[str, ...] = ()


class PlanValues:
    """Resolves the items of one save's plan, one call of the planner at a time.

    Args:
        planner: Whose ``resolve_data`` is called twice for all but small serialised values: for the
            size, which the layout of the objects depends on, and for the bytes.
        window_bytes: Most bytes copied at once, and most bytes of serialised values kept in all.
    """

    def __init__(self, planner: SavePlanner, *, window_bytes: int) -> None:
        self._planner = planner
        self._window_bytes = window_bytes
        self._is_torchs_own = all(_is_torchs_own(planner, name) for name in _RESOLVING)
        self._lock = threading.Lock()
        self._kept_bytes = 0

    def prepare(self, item: WriteItem) -> PreparedItem:
        """Find out how an item is stored and how long its archive is.

        Raises:
            SaveFailedError: It has no values.
        """
        value = self._resolve(item)
        if isinstance(value, torch.Tensor) and _is_as_planned(value, item):
            dtype = dtype_name(value.dtype)
            frame = frame_tensor(dtype, tuple(value.shape), math.prod(value.shape) * SUPPORTED_DTYPES[dtype])
            is_staged = not self._is_state_itself(item)
            return PreparedItem(item, frame.total_bytes, frame, dtype, is_staged=is_staged)
        archive = _serialise(value)
        reasons = needs_trust(io.BytesIO(archive))
        if len(archive) > KEPT_BYTES or self._kept_bytes + len(archive) > self._window_bytes:
            return PreparedItem(item, len(archive), is_staged=True, needs_trust=reasons)
        self._kept_bytes += len(archive)
        return PreparedItem(item, len(archive), archive=archive, needs_trust=reasons)

    def windows(self, prepared: PreparedItem) -> Iterator[Buffer]:
        """Yield an item's raw elements, or its opaque archive.

        A staged item's windows are copies. Nothing else may be resolved before the last one was taken.

        Raises:
            SaveFailedError: It is not what it was when it was prepared.
        """
        if prepared.archive is not None:
            yield prepared.archive
        elif prepared.frame is None:
            archive = _serialise(self._resolve(prepared.item))
            _require_unchanged(len(archive) == prepared.size_bytes, prepared)
            yield archive
        else:
            windows = payload_windows(self._resolve_again(prepared), window_bytes=self._window_bytes)
            yield from map(bytes, windows) if prepared.is_staged else windows

    def _resolve_again(self, prepared: PreparedItem) -> torch.Tensor:
        value = self._resolve(prepared.item)
        is_same = isinstance(value, torch.Tensor) and _is_as_planned(value, prepared.item)
        _require_unchanged(is_same, prepared)
        assert isinstance(value, torch.Tensor)  # just checked
        return value

    def _resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        with self._lock:
            value = self._resolved_by_planner(item)
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            raise SaveFailedError(f"{item.index.fqn} is on the meta device: it has no values to save")
        expected = io.BytesIO if item.type == WriteItemType.BYTE_IO else torch.Tensor
        if not isinstance(value, expected):
            raise SaveFailedError(
                f"the planner resolved {item.index.fqn} to {type(value).__name__}, not {expected.__name__}"
            )
        return value

    def _resolved_by_planner(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO and self._is_torchs_own:
            assert isinstance(self._planner, DefaultSavePlanner)  # it has that class's methods
            return io.BytesIO(save_compactly(self._planner.lookup_object(item.index)))
        return self._planner.resolve_data(item)

    def _is_state_itself(self, item: WriteItem) -> bool:
        """Whether what is resolved is the state's own memory, which stays as it is until all is sent."""
        if not self._is_torchs_own:
            return False
        assert isinstance(self._planner, DefaultSavePlanner)  # it has that class's methods
        value = self._planner.state_dict[item.index.fqn]
        # Other types give their shards through methods of their own, which may stage them too.
        return type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, DTensor | ShardedTensor)


def _is_torchs_own(planner: SavePlanner, name: str) -> bool:
    return getattr(getattr(planner, name, None), "__func__", None) is getattr(DefaultSavePlanner, name)


def _is_as_planned(value: torch.Tensor, item: WriteItem) -> bool:
    """Whether raw elements say all: the index describes them by the plan's dtype and shape."""
    plan = item.tensor_data
    return (
        plan is not None
        and is_plain(value)
        and value.dtype == plan.properties.dtype
        and value.shape == plan.chunk.sizes
        and dtype_name(value.dtype) in SUPPORTED_DTYPES
    )


def _serialise(value: torch.Tensor | io.BytesIO) -> bytes:
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    return save_compactly(_without_surroundings(value.detach().cpu()))


def _without_surroundings(value: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage holds nothing else; of subclasses too, which saving compactly leaves alone."""
    if value.layout is not torch.strided:
        return value
    is_alone = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return value if is_alone else value.clone()


def _require_unchanged(is_unchanged: bool, prepared: PreparedItem) -> None:
    if not is_unchanged:
        raise SaveFailedError(f"{prepared.item.index.fqn} changed while it was saved: its size or its type")
