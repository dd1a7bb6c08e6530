"""Which saved value goes to which name of the state to be loaded, and what does not fit. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from remote_ckpt.dcp.nesting import ObjectPath, empty_dicts, require_paths
from remote_ckpt.errors import (
    CheckpointDamagedError,
    DtypeMismatchError,
    KeyMismatchError,
    MismatchError,
    ShapeMismatchError,
)

SHOWN_COUNT = 10
"""Names that a message lists; the rest is only counted."""

SavedShape = tuple[tuple[int, ...], torch.dtype] | None
"""Shape and dtype of a saved tensor; None for a Python value."""

_WRAPPERS = re.compile(
    r"(?:(?<=\.)|^)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.(?=.)"
)


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What one rank's names and the checkpoint's do not have in common; travels in its load plan.

    Args:
        missing: Asked for and not in the checkpoint.
        unexpected: In the checkpoint and not asked for.
        unmatched_sections: Beginnings of names of which this rank asked for some and got none.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unmatched_sections: tuple[str, ...]


@dataclass(slots=True)
class Match:
    """The result of :func:`match_keys`.

    Args:
        saved_names: The saved name for each name that is loaded.
        paths: Paths of the names that the state did not have: they are taken over as a whole.
        missing: Names asked for and not in the checkpoint.
        unexpected: Names in the checkpoint and not asked for.
    """

    saved_names: dict[str, str]
    paths: dict[str, ObjectPath] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)

    def report(self, sections: Iterable[str]) -> KeyReport:
        """Return what the coordinator has to know."""
        unmatched = tuple(
            section
            for section in sections
            if is_below(section, self.missing) and not is_below(section, self.saved_names)
        )
        return KeyReport(tuple(sorted(self.missing)), tuple(sorted(self.unexpected)), unmatched)


def is_below(section: str, names: Iterable[str]) -> bool:
    """Whether any of the names is ``section`` or lies below it (``"a"`` covers ``"a.b"``, not ``"ab"``)."""
    return any(name == section or name.startswith(f"{section}.") for name in names)


def without_wrappers(name: str) -> str:
    """Return a name without what DDP, ``torch.compile``, FSDP and activation checkpointing put into it."""
    return _WRAPPERS.sub("", name)


def match_keys(
    values: Mapping[str, Any],
    paths: Mapping[str, ObjectPath],
    nested: Mapping[str, Any],
    metadata: Metadata,
    *,
    key_filter: Callable[[str], bool],
    fixed: Sequence[str] = (),
) -> Match:
    """Match the names of a state with those of a checkpoint.

    Args:
        values: The flattened state.
        paths: Where each name's value is in ``nested``.
        nested: The state as the caller gave it.
        metadata: Of the checkpoint.
        key_filter: Other names do not exist, on both sides.
        fixed: Beginnings of names whose containers keep their structure.

    Raises:
        CheckpointDamagedError: The checkpoint's paths into nested dicts and lists cannot be right.
    """
    saved = {name for name in metadata.state_dict_metadata if key_filter(name)}
    wanted = {name for name in values if key_filter(name)}
    match = Match({name: name for name in values if name in wanted & saved})
    match.missing, match.unexpected = wanted - saved, saved - wanted
    if match.missing and match.unexpected:
        _match_wrapped(match)
    if match.unexpected and metadata.planner_data:
        saved_paths = _saved_paths(metadata)
        _take_whole_containers(match, values, paths, nested, saved_paths, fixed)
        _take_whole_leaves(match, values, paths, metadata, saved_paths, fixed)
    return match


def _saved_paths(metadata: Metadata) -> Mapping[str, ObjectPath]:
    paths: Any = metadata.planner_data
    try:
        if not isinstance(paths, Mapping):
            raise ValueError(f"a {type(paths).__name__} where paths belong")
        require_paths(paths)
    except ValueError as error:
        raise CheckpointDamagedError(f"the checkpoint's structure cannot be used: {error}") from error
    return paths


def _match_wrapped(match: Match) -> None:
    """Match names that differ by wrappers only, where that is unique on both sides (BR-93)."""
    saved, wanted = by_plain_name(match.unexpected), by_plain_name(match.missing)
    for plain, names in wanted.items():
        if len(names) == 1 and len(saved.get(plain, ())) == 1:
            _found(match, names[0], saved[plain][0])


def by_plain_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names by what they are without wrappers."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for name in names:
        grouped[without_wrappers(name)].append(name)
    return grouped


def _found(match: Match, name: str, saved_name: str) -> None:
    match.saved_names[name] = saved_name
    match.missing.discard(name)
    match.unexpected.discard(saved_name)


def _take_whole_containers(
    match: Match,
    values: Mapping[str, Any],
    paths: Mapping[str, ObjectPath],
    nested: Mapping[str, Any],
    saved_paths: Mapping[str, ObjectPath],
    fixed: Sequence[str],
) -> None:
    """Give an empty container, a list or ``None`` everything that was saved below it (BR-91)."""
    takers: dict[ObjectPath, str | None] = dict.fromkeys(empty_dicts(nested))
    takers |= {paths[name]: name for name in match.missing if isinstance(values[name], list | None)}
    for saved_name in sorted(match.unexpected):
        path = saved_paths.get(saved_name, ())
        taker = next((path[:end] for end in range(1, len(path)) if path[:end] in takers), None)
        if taker is None or _is_fixed(saved_name, fixed):
            continue
        match.missing.discard(takers[taker] or "")
        match.paths[saved_name] = path
        _found(match, saved_name, saved_name)


def _take_whole_leaves(
    match: Match,
    values: Mapping[str, Any],
    paths: Mapping[str, ObjectPath],
    metadata: Metadata,
    saved_paths: Mapping[str, ObjectPath],
    fixed: Sequence[str],
) -> None:
    """Replace a container without tensors by the one Python value that was saved in its place."""
    leaves = {
        saved_paths[name]: name
        for name in match.unexpected
        if name in saved_paths
        and not isinstance(metadata.state_dict_metadata[name], TensorStorageMetadata)
        and not _is_fixed(name, fixed)
    }
    covered: dict[str, list[str]] = defaultdict(list)
    for name in match.missing:
        path = paths[name]
        for end in range(1, len(path)):
            if (leaf := leaves.get(path[:end])) is not None:
                covered[leaf].append(name)
    for leaf, names in covered.items():
        if not any(isinstance(values[name], torch.Tensor) for name in names):
            match.missing.difference_update(names)
            match.paths[leaf] = saved_paths[leaf]
            _found(match, leaf, leaf)


def _is_fixed(name: str, fixed: Sequence[str]) -> bool:
    return any(is_below(section, [name]) for section in fixed)


def raise_key_mismatch(
    reports: Sequence[KeyReport],
    unexpected: Collection[str],
    *,
    strict: bool,
    absent_sections: Iterable[str] = (),
) -> None:
    """Judge what all ranks reported, in the order of ranks.

    Args:
        reports: One of each rank.
        unexpected: Names that no rank asked for.
        strict: Missing and unexpected names are errors.
        absent_sections: Beginnings of names of which the checkpoint holds none, to be said where they miss.

    Raises:
        KeyMismatchError: ``strict`` and something is missing or unexpected, or a section found nothing.
    """
    missing_ranks: dict[str, list[int]] = defaultdict(list)
    for rank, report in enumerate(reports):
        for name in report.missing:
            missing_ranks[name].append(rank)
    unmatched = sorted({section for report in reports for section in report.unmatched_sections})
    if not unmatched and not (strict and (missing_ranks or unexpected)):
        return
    parts = [f"nothing of {section!r} is in the checkpoint" for section in unmatched]
    parts += [
        f"the checkpoint holds no {section} state"
        for section in absent_sections
        if is_below(section, missing_ranks) and section not in unmatched
    ]
    if missing_ranks:
        names = [_with_ranks(name, ranks, len(reports)) for name, ranks in sorted(missing_ranks.items())]
        parts.append(f"missing from the checkpoint: {listed(names)}")
    if unexpected:
        parts.append(f"in the checkpoint and not asked for: {listed(sorted(unexpected))}")
    if not unmatched:
        parts.append("to go on without them, load with strict_loading=False (a planner: strict=False)")
    error = KeyMismatchError("names do not match: " + "; ".join(parts), operation="load")
    error.missing, error.unexpected = tuple(sorted(missing_ranks)), tuple(sorted(unexpected))
    raise error


def _with_ranks(name: str, ranks: Sequence[int], world_size: int) -> str:
    return name if len(ranks) == world_size else f"{name} (rank {', '.join(map(str, ranks))})"


def listed(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(list(names)[:SHOWN_COUNT])
    more = len(names) - SHOWN_COUNT
    return f"{shown} and {more} more" if more > 0 else shown


def saved_shapes(metadata: Metadata) -> dict[str, SavedShape]:
    """Return what a checkpoint's metadata says of each name, for :func:`check_values`."""
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def check_values(
    saved_names: Mapping[str, str],
    values: Mapping[str, Any],
    saved: Mapping[str, SavedShape],
    *,
    convert_dtype: bool,
) -> None:
    """Check kind, shape and dtype of all values that will be loaded.

    Raises:
        ShapeMismatchError, DtypeMismatchError, MismatchError: They differ; all such names are listed.
    """
    problems: dict[type[MismatchError], list[str]] = defaultdict(list)
    for name, saved_name in saved_names.items():
        found = _problem(values.get(name), saved[saved_name], convert_dtype)
        if found is not None:
            kind, words = found
            problems[kind].append(f"{name} {words}")
    for kind in (MismatchError, ShapeMismatchError, DtypeMismatchError):
        if problems[kind]:
            hint = "; pass convert_dtype=True to convert" if kind is DtypeMismatchError else ""
            raise kind(f"does not fit what was saved: {listed(problems[kind])}{hint}", operation="load")


def _problem(value: Any, saved: SavedShape, convert_dtype: bool) -> tuple[type[MismatchError], str] | None:
    is_tensor = isinstance(value, torch.Tensor)
    if saved is None:
        return (MismatchError, "was saved as a Python value, asked for as a tensor") if is_tensor else None
    if value is None:
        return None
    if not is_tensor:
        return MismatchError, f"was saved as a tensor, asked for as {type(value).__name__}"
    sizes, dtype = saved
    if sizes != tuple(value.size()):
        return ShapeMismatchError, f"was saved with shape {list(sizes)}, asked for {list(value.size())}"
    if dtype != value.dtype and not convert_dtype:
        return DtypeMismatchError, f"was saved as {dtype}, asked for as {value.dtype}"
    return None
