"""Planners that check: nothing is loaded by half, dropped in silence, or executed.

Both extend torch's default planners and can be given to stock ``dcp.save`` and ``dcp.load``. What each
rank finds travels in its plan, so that the checks need no collective of their own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torch.distributed.tensor import DTensor

from remote_ckpt.checksum import crc32c
from remote_ckpt.dcp.matching import (
    KeyReport,
    check_values,
    is_below,
    listed,
    match_keys,
    raise_key_mismatch,
    saved_shapes,
)
from remote_ckpt.dcp.nesting import put_element
from remote_ckpt.dcp.payload import is_plain, payload_windows
from remote_ckpt.dcp.pickles import load_pickle
from remote_ckpt.errors import ConfigError
from remote_ckpt.log import logger
from remote_ckpt.options import KiB

# --- saving -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RankData:
    """What a rank's save plan carries beside torch's own mapping: checksums of its unsharded values."""

    mappings: Any
    checksums: Mapping[str, int]


class CheckedSavePlanner(DefaultSavePlanner):
    """torch's save planner, which also notices where ranks disagree about a value that they all hold.

    Of a plain tensor or Python value under one name just one rank's copy is kept. Different shapes or
    dtypes are an error. Different values give a warning, and of all of these the copy of the lowest rank
    that holds them is kept, so that it is never a mixture; to keep each rank's, give each its own name,
    such as ``f"rng.rank{rank}"``.

    Args:
        compare_bytes: So much of the beginning of each plain CPU tensor is compared across ranks, and every
            plain Python value. ``2**63`` compares everything, which costs a checksum of every byte.
        enable_plan_caching: As in torch; values are then compared only when the plan changes.
        dedup_save_to_lowest_rank: As in torch.
    """

    def __init__(
        self,
        *,
        compare_bytes: int = 64 * KiB,
        enable_plan_caching: bool = False,
        dedup_save_to_lowest_rank: bool = False,
    ) -> None:
        super().__init__(
            enable_plan_caching=enable_plan_caching, dedup_save_to_lowest_rank=dedup_save_to_lowest_rank
        )
        self.compare_bytes = compare_bytes

    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan with checksums of the values that may be held by several ranks."""
        self._forget_plan_of_another_structure()
        plan = super().create_local_plan()
        checksums = {}
        for item in plan.items:
            checksum = _checksum(self.state_dict[item.index.fqn], self.compare_bytes)
            if checksum is not None:
                checksums[item.index.fqn] = checksum
        return replace(plan, planner_data=_RankData(plan.planner_data, checksums))

    def _forget_plan_of_another_structure(self) -> None:
        """torch's cache compares names only: ``{"a.b": x}`` would be saved as ``{"a": {"b": x}}`` was."""
        plans = SavePlanner._cached_save_plan
        known = plans.get(self._cached_plans_key)
        if known is not None and known.planner_data != getattr(self, "mappings", None):
            del plans[self._cached_plans_key]

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that ranks agree, then plan as torch does. Coordinator only.

        Raises:
            ConfigError: Ranks hold tensors of different shape or dtype, or a tensor and another
                value, under one name.
        """
        known = SavePlanner._cached_all_plans.get(self._cached_plans_key)
        try:
            planned = super().create_global_plan(all_plans)
        except Exception:
            self._keep_plans(known)
            raise
        differing = _names_of_different_values([plan.planner_data for plan in all_plans])
        if differing:
            logger.warning(
                "ranks hold different values of %s; only one rank's copy is saved. "
                "To keep each, save it under a name of its own, such as name.rank0",
                listed(sorted(differing)),
            )
        return planned

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan with whole plans, some of them as ranks sent them for an earlier save.

        torch caches what it hands over here: what is left to other ranks must still be in it, for a save in
        which those ranks have it no more.
        """
        _refuse_disagreement(all_plans)
        differing = _names_of_different_values([plan.planner_data for plan in all_plans])
        plans = _of_lowest_ranks([_without_checksums(plan) for plan in all_plans], differing)
        return super()._create_global_plan(plans)

    def _keep_plans(self, plans: list[SavePlan] | None) -> None:
        """torch caches plans before it has judged them, while ranks go on from those of the last success."""
        if plans is None:
            SavePlanner._cached_all_plans.pop(self._cached_plans_key, None)
        else:
            SavePlanner._cached_all_plans[self._cached_plans_key] = plans


def _checksum(value: Any, limit_bytes: int) -> int | None:
    """Checksum of an unsharded value, of a tensor's beginning; None where it is not compared."""
    if isinstance(value, torch.Tensor):
        if not is_plain(value) or value.device.type != "cpu" or limit_bytes <= 0:
            return None
        return crc32c(next(payload_windows(value, window_bytes=limit_bytes), b""))
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.fast = True  # no memo: equal values give equal bytes, whichever objects they share
    try:
        pickler.dump(value)
    except Exception:  # cyclic or not picklable: torch.save will say so if it matters
        return None
    return crc32c(stream.getvalue())


def _without_checksums(plan: SavePlan) -> SavePlan:
    data = plan.planner_data
    return replace(plan, planner_data=data.mappings) if isinstance(data, _RankData) else plan


def _shape_of(item: WriteItem) -> tuple[str, tuple[int, ...], str]:
    if item.tensor_data is None:
        return "a Python value", (), ""
    kind = "a sharded tensor" if item.type is WriteItemType.SHARD else "a tensor"
    return kind, tuple(item.tensor_data.size), str(item.tensor_data.properties.dtype)


def _refuse_disagreement(plans: Sequence[SavePlan]) -> None:
    first: dict[str, tuple[int, tuple[str, tuple[int, ...], str]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, shape = item.index.fqn, _shape_of(item)
            known_rank, known = first.setdefault(name, (rank, shape))
            if known != shape:
                raise ConfigError(
                    f"ranks disagree about {name}: rank {known_rank} holds {_words(known)}, rank {rank} "
                    f"{_words(shape)}. Only one can be kept under a name: give each its own",
                    rank=rank,
                    operation="save",
                )


def _words(shape: tuple[str, tuple[int, ...], str]) -> str:
    kind, sizes, dtype = shape
    return f"{kind} {list(sizes)} {dtype}" if dtype else kind


def _names_of_different_values(data: Sequence[Any]) -> set[str]:
    first: dict[str, int] = {}
    differing = set()
    for rank_data in data:
        if isinstance(rank_data, _RankData):
            for name, checksum in rank_data.checksums.items():
                if first.setdefault(name, checksum) != checksum:
                    differing.add(name)
    return differing


def _of_lowest_ranks(plans: Sequence[SavePlan], names: Collection[str]) -> list[SavePlan]:
    """Leave each of these names to the first rank that holds it: torch would share them out among ranks."""
    taken: set[str] = set()
    remaining = []
    for plan in plans:
        items = [item for item in plan.items if item.index.fqn not in taken]
        taken.update(item.index.fqn for item in items if item.index.fqn in names)
        remaining.append(plan if len(items) == len(plan.items) else replace(plan, items=items))
    return remaining


# --- loading ------------------------------------------------------------------------------------


class CheckedLoadPlanner(DefaultLoadPlanner):
    """torch's load planner, which checks names, kinds, shapes and dtypes before any tensor is changed.

    Names that differ only by wrappers (``module.``, ``_orig_mod.``, ``_fsdp_wrapped_module.``,
    ``_checkpoint_wrapped_module.``) match if they do so uniquely. An empty dict, a list or ``None``
    takes whatever was saved in its place, as a whole.

    Args:
        strict: Raise where a name that is asked for is not in the checkpoint, and where one in the
            checkpoint was asked for by no rank. Otherwise both are reported (:attr:`missing`,
            :attr:`unexpected`) and what is missing keeps its value.
        trusted: Allow Python objects of any class, which can run code from the checkpoint.
        convert_dtype: Allow tensors that were saved with another dtype; give it to the reader too.
        key_filter: Only names for which it is true are loaded, and count as missing or unexpected.
        sections: Beginnings of names (``"model"`` covers ``"model.x"``) of which something must be in
            the checkpoint, strict or not, where the state holds any.
        fixed: Beginnings of names whose dicts and lists take nothing as a whole.

    Attributes:
        missing: After planning: sorted names asked for by this rank and not in the checkpoint.
        unexpected: After planning: sorted names in the checkpoint that no rank asked for.

    Raises:
        KeyMismatchError, ShapeMismatchError, DtypeMismatchError, MismatchError: See above; through
            ``dcp.load`` they arrive inside a ``CheckpointException`` on every rank.
        UntrustedDataError: A Python object needs ``trusted=True``.
    """

    loads_safely = True
    """Tells our reader that it may hand over pickles as they are."""

    def __init__(
        self,
        *,
        strict: bool = True,
        trusted: bool = False,
        convert_dtype: bool = False,
        key_filter: Callable[[str], bool] | None = None,
        sections: Sequence[str] = (),
        fixed: Sequence[str] = (),
    ) -> None:
        super().__init__(allow_partial_load=True)
        self.strict = strict
        self.trusted = trusted
        self.convert_dtype = convert_dtype
        self.key_filter = key_filter or (lambda _: True)
        self.sections = tuple(sections)
        self.fixed = tuple(fixed)
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self._new_tensors: dict[str, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """Match this rank's names with the checkpoint's and plan the reads.

        Raises:
            MismatchError: Kind, shape or dtype of a value differ; all such names are listed.
        """
        metadata = self._saved()
        match = match_keys(
            self.state_dict,
            self.mappings,
            self.original_state_dict,
            metadata,
            key_filter=self.key_filter,
            fixed=self.fixed,
        )
        check_values(
            match.saved_names, self.state_dict, saved_shapes(metadata), convert_dtype=self.convert_dtype
        )
        self.mappings.update(match.paths)
        self._new_tensors = self._room_for_new_tensors(match.saved_names)
        self.state_dict.update(self._new_tensors)
        reads = [
            item
            for name, saved_name in match.saved_names.items()
            for item in _read_items(name, saved_name, self.state_dict.get(name), metadata)
        ]
        return LoadPlan(reads, planner_data=match.report(self.sections))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Judge what ranks miss, and what no rank asked for. Coordinator only.

        Raises:
            KeyMismatchError: See ``strict`` and ``sections``.
        """
        reports: list[KeyReport] = [plan.planner_data for plan in global_plan]
        unexpected = set.intersection(*(set(report.unexpected) for report in reports))
        saved = self._saved().state_dict_metadata
        absent = [section for section in self.fixed if not is_below(section, saved)]
        raise_key_mismatch(reports, unexpected, strict=self.strict, absent_sections=absent)
        agreed = tuple(sorted(unexpected))
        return [
            replace(plan, planner_data=replace(report, unexpected=agreed))
            for plan, report in zip(global_plan, reports, strict=True)
        ]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Take note of what is missing. From here on the state is changed."""
        report: KeyReport = new_plan.planner_data
        self.missing, self.unexpected = report.missing, report.unexpected
        for name, tensor in self._new_tensors.items():
            put_element(self.original_state_dict, self.mappings[name], tensor)
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a Python value, without running code from it unless it is trusted.

        Raises:
            UntrustedDataError: It needs a class that is not allowed; names the value and the class.
        """
        name = read_item.dest_index.fqn
        loaded = load_pickle(value, is_trusted=self.trusted, what=name)
        put_element(self.original_state_dict, self.mappings[name], loaded)

    def _saved(self) -> Metadata:
        if self.metadata is None:
            raise ConfigError("the planner is not set up: torch calls set_up_planner first")
        return self.metadata

    def _room_for_new_tensors(self, saved_names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Make CPU tensors for what the state does not hold, or holds as ``None``."""
        made = {}
        for name, saved_name in saved_names.items():
            saved = self._saved().state_dict_metadata[saved_name]
            if isinstance(saved, TensorStorageMetadata) and self.state_dict.get(name) is None:
                made[name] = torch.empty(saved.size, dtype=saved.properties.dtype)
        return made


def _read_items(name: str, saved_name: str, value: Any, metadata: Metadata) -> Iterable[ReadItem]:
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return  # this rank is outside the tensor's mesh and holds no part of it
    for item in _create_read_items(name, metadata.state_dict_metadata[saved_name], value):
        yield replace(item, storage_index=replace(item.storage_index, fqn=saved_name))
