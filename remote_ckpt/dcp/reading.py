"""Executing one rank's load plan.

The state's own tensors, as torch's planner hands them out, are filled in place and all in parallel. A
planner that makes its own destinations (a scratch buffer, a conversion) gets them one at a time, in the
order of the plan, as torch's own reader does: resolve, fill, commit. Python objects come first, so that
one that is refused leaves the tensors as they were.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from remote_ckpt.dcp.archives import ArchiveFile
from remote_ckpt.dcp.devices import moved_to_cpu
from remote_ckpt.dcp.payload import dtype_name
from remote_ckpt.dcp.pickles import load_pickle
from remote_ckpt.dcp.placing import Box, Ranges
from remote_ckpt.dcp.sources import Source
from remote_ckpt.errors import (
    CheckpointDamagedError,
    DtypeMismatchError,
    ShapeMismatchError,
    UntrustedDataError,
)
from remote_ckpt.options import MiB, Options
from remote_ckpt.store.base import Store
from remote_ckpt.transfer import fetch_all

LARGE_ARCHIVE_BYTES = 8 * MiB
"""Archives up to this are fetched whole, many at once; larger ones one by one, into their tensor."""


@dataclass(frozen=True, slots=True)
class _Filling:
    """A destination and what is to be put there."""

    item: ReadItem
    box: Box
    target: torch.Tensor


@dataclass(slots=True)
class ReadJob:
    """Reads the items of one rank's plan.

    Args:
        source: Where items lie.
        planner: Whose tensors are filled.
        options: Sizes, concurrency and byte budget.
        is_trusted: Pickles are loaded without limits.
        converts_dtype: Other dtypes are converted rather than refused.
        url: The checkpoint's URL, for messages.
    """

    source: Source
    planner: LoadPlanner
    options: Options
    is_trusted: bool
    converts_dtype: bool
    url: str

    def run(self, checkpoint: Store, items: Sequence[ReadItem]) -> None:
        """Check what can be known beforehand, then read.

        Raises:
            ShapeMismatchError, DtypeMismatchError, UntrustedDataError: No tensor was changed (with a
                planner that makes its own destinations: none from this item on).
            ObjectNotFoundError, IntegrityError, StoreError: A read failed.
        """
        tensors = [item for item in items if item.type != LoadItemType.BYTE_IO]
        blobs = [item for item in items if item.type == LoadItemType.BYTE_IO]
        if not _hands_out_the_state(self.planner):
            self._read_blobs(checkpoint, blobs)
            self._read_in_turn(checkpoint, tensors)
            return
        fillings = [self._resolve(item, self._box(item)) for item in tensors]
        self._read_blobs(checkpoint, blobs)
        shared = _names_that_share_memory(fillings)
        self._fill(checkpoint, [one for one in fillings if one.item.dest_index.fqn not in shared])
        for one in fillings:  # of tied tensors with different values the last one wins, as with torch
            if one.item.dest_index.fqn in shared:
                self._fill(checkpoint, [one])
        for one in fillings:
            self.planner.commit_tensor(one.item, one.target)

    # --- Python objects --------------------------------------------------------------------------

    def _read_blobs(self, checkpoint: Store, items: Sequence[ReadItem]) -> None:
        boxes = [self._box(item) for item in items]
        for group in _waves([box.stored.length_bytes for box in boxes], self._wave_bytes):
            received = self._fetch_blobs(checkpoint, [boxes[position] for position in group])
            for position in group:
                self._load_blob(items[position], received.pop(0))

    def _fetch_blobs(self, checkpoint: Store, boxes: Sequence[Box]) -> list[bytes]:
        received = [b""] * len(boxes)  # what an empty one stays: it has no bytes to ask for
        ranges = self._ranges()
        for position, box in enumerate(boxes):
            if box.stored.length_bytes:
                ranges.add_whole(box, lambda data, at=position: received.__setitem__(at, bytes(data)))  # type: ignore[misc]
        self._fetch(checkpoint, ranges)
        return received

    def _load_blob(self, item: ReadItem, data: bytes) -> None:
        """Hand the planner an archive that is safe to unpickle: torch's own does so without limits."""
        if not self.is_trusted and not getattr(self.planner, "loads_safely", False):
            data = self._vetted(item, data)
        elif self._unpickles_as_torch():
            data = moved_to_cpu(data)
        self.planner.load_bytes(item, io.BytesIO(data))

    def _unpickles_as_torch(self) -> bool:
        return type(self.planner).load_bytes is DefaultLoadPlanner.load_bytes

    def _vetted(self, item: ReadItem, data: bytes) -> bytes:
        fqn = item.storage_index.fqn
        is_own = not self._unpickles_as_torch()
        try:
            value = load_pickle(data, is_trusted=False, what=fqn)
        except CheckpointDamagedError as error:
            if not is_own:
                raise
            raise UntrustedDataError(
                f"{fqn} is no torch.save archive that can be vetted for {type(self.planner).__name__}."
                "load_bytes: pass trusted=True if that may see the bytes as they are",
                url=self.url,
            ) from error
        if is_own:
            return data
        rewritten = io.BytesIO()
        torch.save(value, rewritten)
        return rewritten.getvalue()

    # --- tensors ---------------------------------------------------------------------------------

    def _read_in_turn(self, checkpoint: Store, items: Sequence[ReadItem]) -> None:
        """For planners with destinations of their own: fetch ahead within the budget, fill one by one."""
        boxes = [self._box(item) for item in items]
        sizes = [_wanted_bytes(box) for box in boxes]
        for group in _waves(sizes, self._wave_bytes):
            if sizes[group[0]] > self._wave_bytes:  # alone in its wave
                (position,) = group
                filling = self._resolve(items[position], boxes[position])
                self._fill(checkpoint, [filling])
                self.planner.commit_tensor(filling.item, filling.target)
                continue
            ahead = [_Filling(items[one], boxes[one], _scratch(boxes[one])) for one in group]
            self._fill(checkpoint, ahead)
            for one in ahead:
                target = self._resolve(one.item, one.box).target
                target.copy_(one.target)
                self.planner.commit_tensor(one.item, target)

    def _fill(self, checkpoint: Store, fillings: Sequence[_Filling]) -> None:
        ranges, large = self._ranges(), []
        for one in fillings:
            if not one.box.stored.is_archive:
                ranges.add_payload(one.box, one.target)
            elif one.box.stored.length_bytes > LARGE_ARCHIVE_BYTES:
                large.append(one)
            else:
                ranges.add_whole(one.box, lambda data, one=one: self._unpack(one, io.BytesIO(data)))  # type: ignore[misc]
        self._fetch(checkpoint, ranges)
        for one in large:
            self._unpack(one, self._open_archive(checkpoint, one.box))

    def _open_archive(self, checkpoint: Store, box: Box) -> BinaryIO:
        """A large archive: in memory once checked, or, where there is nothing to check by, as a file."""
        if not box.stored.crcs:
            return cast("BinaryIO", ArchiveFile(checkpoint, box.stored, self.options))
        buffer = io.BytesIO()
        buffer.seek(box.stored.length_bytes - 1)
        buffer.write(b"\0")  # makes room once, where initial bytes would be copied
        buffer.seek(0)
        ranges = self._ranges()
        with buffer.getbuffer() as view:
            ranges.add_buffer(box, view)
            self._fetch(checkpoint, ranges)
            ranges.wanted.clear()
            ranges.direct.clear()
        return buffer

    def _unpack(self, filling: _Filling, stream: BinaryIO) -> None:
        box, target = filling.box, filling.target
        value = load_pickle(stream, is_trusted=self.is_trusted, what=box.fqn)
        if not isinstance(value, torch.Tensor):
            raise CheckpointDamagedError(f"{box.fqn} should be a tensor and is none", url=self.url)
        part = (
            narrow_tensor_by_index(value, box.offsets, box.lengths) if value.dim() == target.dim() else value
        )
        if part.shape != target.shape:
            raise CheckpointDamagedError(
                f"the archive of {box.fqn} holds shape {tuple(value.shape)} where {box.lengths} at "
                f"{box.offsets} is expected",
                url=self.url,
            )
        with torch.no_grad():
            target.copy_(part)

    def _resolve(self, item: ReadItem, box: Box) -> _Filling:
        target = self.planner.resolve_tensor(item)
        if target.layout is torch.strided:
            target = target.detach()  # a detached sparse tensor is another one: values would not arrive
        if tuple(target.shape) != box.lengths:
            raise ShapeMismatchError(
                f"{box.fqn}: the checkpoint has {box.lengths} here, the destination {tuple(target.shape)}",
                url=self.url,
            )
        saved = box.stored.dtype
        if saved is not None and target.dtype != saved and not self.converts_dtype:
            raise DtypeMismatchError(
                f"{box.fqn} was saved as {dtype_name(saved)}, the destination is "
                f"{dtype_name(target.dtype)}: pass convert_dtype=True if it is to be converted",
                url=self.url,
            )
        if _is_expanded(target):
            raise ShapeMismatchError(
                f"{box.fqn}: the destination is an expanded view (stride 0), which cannot hold different "
                "values: pass a tensor with memory of its own",
                url=self.url,
            )
        return _Filling(item, box, target)

    # --- shared ----------------------------------------------------------------------------------

    @property
    def _wave_bytes(self) -> int:
        """Fetched ahead at once where results are held back: half the budget, the requests take the rest."""
        return self.options.transfer.budget_bytes // 2

    def _box(self, item: ReadItem) -> Box:
        stored = self.source.find(item.storage_index)
        return Box(item.storage_index.fqn, stored, tuple(item.storage_offsets), tuple(item.lengths))

    def _ranges(self) -> Ranges:
        return Ranges(self.source.block_bytes, self.options.transfer, self.url)

    def _fetch(self, checkpoint: Store, ranges: Ranges) -> None:
        fetch_all(checkpoint, wanted=ranges.wanted, direct=ranges.direct, options=self.options.transfer)


def _hands_out_the_state(planner: LoadPlanner) -> bool:
    """Whether destinations are the state's own tensors, so that all may be resolved before any is filled."""
    names = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
    return all(getattr(type(planner), name, None) is getattr(DefaultLoadPlanner, name) for name in names)


def _waves(sizes: Sequence[int], limit_bytes: int) -> Iterator[list[int]]:
    """Positions in groups of at most ``limit_bytes``; what is larger stands alone."""
    group: list[int] = []
    filled = 0
    for position, size_bytes in enumerate(sizes):
        if group and filled + size_bytes > limit_bytes:
            yield group
            group, filled = [], 0
        group.append(position)
        filled += size_bytes
    if group:
        yield group


def _wanted_bytes(box: Box) -> int:
    if box.stored.dtype is None:
        return box.stored.length_bytes
    count = 1
    for length in box.lengths:
        count *= length
    return count * box.stored.dtype.itemsize


def _scratch(box: Box) -> torch.Tensor:
    return torch.empty(box.lengths, dtype=box.stored.dtype)


def _is_expanded(target: torch.Tensor) -> bool:
    return target.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)
    )


def _names_that_share_memory(fillings: Sequence[_Filling]) -> frozenset[str]:
    """Names whose destinations may overlap another name's: filling both at once would mix them.

    Chunks of one name never overlap, that is DCP's own rule.
    """
    extents: dict[str, tuple[int, int]] = {}
    for one in fillings:
        if type(one.target) is torch.Tensor and one.target.layout is torch.strided and one.target.numel():
            start, end = _extent(one.target)
            known = extents.get(one.item.dest_index.fqn, (start, end))
            extents[one.item.dest_index.fqn] = (min(start, known[0]), max(end, known[1]))
    shared: set[str] = set()
    reach, holder = -1, ""
    for name, (start, end) in sorted(extents.items(), key=lambda pair: pair[1]):
        if start < reach:
            shared.update((name, holder))
        if end > reach:
            reach, holder = end, name
    return frozenset(shared)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
