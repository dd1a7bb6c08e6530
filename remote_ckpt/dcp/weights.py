"""Weights from anywhere: a checkpoint's folder or a single file, and whose names fit a model best."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch

from remote_ckpt.dcp.matching import by_plain_name, listed, without_wrappers
from remote_ckpt.dcp.numpy_values import has_values_to_check
from remote_ckpt.dcp.pickles import load_pickle
from remote_ckpt.discover import resolve
from remote_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    KeyMismatchError,
    MissingDependencyError,
    ObjectNotFoundError,
)
from remote_ckpt.newest import PLAIN_NAME
from remote_ckpt.options import Options
from remote_ckpt.stock_payload import is_zip
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.transfer import Direct, fetch_all
from remote_ckpt.url import Location, parse_location

_FILE_ENDINGS = (".pth", ".pt", ".bin", ".ckpt", ".safetensors")
_SECTIONS = ("", "model.", "teacher.", "model.teacher.", "state_dict.")
"""Where a model's weights are in a checkpoint: DINOv3 saves ``model.teacher``, its files hold ``teacher``."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where weights are.

    Args:
        location: A checkpoint's folder (``"dcp"``) or a file.
        kind: ``"dcp"`` for our checkpoints and stock DCP ones.
    """

    location: Location
    kind: Literal["dcp", "file"]


@dataclass(frozen=True, slots=True)
class NameMatch:
    """Which saved name goes to which name of the model.

    Args:
        saved_names: The saved name for each name of the model that has one.
        missing: Sorted names of the model without a saved one.
        unexpected: Sorted saved names of the chosen section that nothing takes.
        section: Beginning of the saved names that was chosen.
    """

    saved_names: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    section: str


def find_weights(
    path: Any, *, storage_options: Mapping[str, Any] | None, transport: str | None, options: Options
) -> WeightsSource:
    """Find out what a path or URL names: a checkpoint of any kind, or a file of weights.

    Raises:
        CheckpointNotFoundError: Neither, established by answers that succeeded.
        StoreError: The store failed.
    """
    location = parse_location(path)
    is_local_folder = location.is_local and os.path.isdir(location.path)
    is_local_file = location.is_local and os.path.isfile(location.path)
    if is_local_file or (_file_name(location).endswith(_FILE_ENDINGS) and not is_local_folder):
        return WeightsSource(location, "file")
    parent, name = location.split()
    with closing(
        open_store(parent, storage_options=storage_options, transport=transport, options=options)
    ) as root:
        entry = resolve(root, name)
    if entry.kind == "plain":
        return WeightsSource(location.join(PLAIN_NAME), "file")
    return WeightsSource(location, "dcp")


def _file_name(location: Location) -> str:
    """Return a file's name, without the query (mostly a signature) that may follow it on the web."""
    return location.name.partition("?")[0] if location.scheme in ("http", "https") else location.name


def read_weights(
    file: Location,
    *,
    storage_options: Mapping[str, Any] | None,
    transport: str | None,
    options: Options,
    trusted: bool,
) -> dict[str, torch.Tensor]:
    """Read a file of weights to CPU, nested dicts flattened to dotted names. A local file is mapped.

    Raises:
        CheckpointNotFoundError: There is no such file.
        UntrustedDataError: It holds Python objects that need ``trusted=True``.
        CheckpointDamagedError: It cannot be read.
        MissingDependencyError: It is a safetensors file and the package is not installed.
    """
    try:
        if file.is_local:
            content = _read_local(file.path, trusted)
        else:
            with closing(
                open_store(file.parent, storage_options=storage_options, transport=transport, options=options)
            ) as store:
                content = _parse(_download(store, file.name, options), file, trusted)
    except (FileNotFoundError, ObjectNotFoundError) as error:
        raise CheckpointNotFoundError(f"no checkpoint or file at {file.url}", url=file.url) from error
    return dict(_tensors_in(content, ""))


def match_weights(
    model_names: Iterable[str], saved_names: Iterable[str], *, key: str | None = None
) -> NameMatch:
    """Match a model's names with saved ones, in whichever section of the checkpoint fits most of them.

    Wrappers (``module.``, ``_orig_mod.``, ...) count for nothing, nor does a leading ``backbone.``, which
    DINO's multi-crop wrapper puts before every name.

    Args:
        model_names: As in the model's state dict.
        saved_names: As in the checkpoint, with the names of what contains them, joined by dots.
        key: Look in this part only: ``"teacher"``, at the top or in ``model``.

    Raises:
        KeyMismatchError: There is no part named ``key``; names those that there are.
    """
    wanted = list(model_names)
    saved = list(saved_names)
    sections = _sections_named(key, saved) if key else _SECTIONS
    candidates = [
        _match_section(wanted, saved, section + inner) for section in sections for inner in ("", "backbone.")
    ]
    return max(candidates, key=lambda match: len(match.saved_names))  # the first one of the best


def _sections_named(key: str, saved: Collection[str]) -> tuple[str, ...]:
    plain = [without_wrappers(name) for name in saved]
    sections = tuple(
        section for section in (f"{key}.", f"model.{key}.") if any(name.startswith(section) for name in plain)
    )
    if not sections:
        parts = {name.partition(".")[0] for name in plain}
        parts |= {".".join(name.split(".")[:2]) for name in plain if name.startswith("model.")}
        raise KeyMismatchError(f"no part {key!r} in the checkpoint, which has {listed(sorted(parts))}")
    return sections


def _match_section(wanted: Collection[str], saved: Collection[str], section: str) -> NameMatch:
    """Match exact names first, then those that differ by wrappers where that is unique on both sides."""
    inside = [name for name in saved if without_wrappers(name).startswith(section)]
    known = set(inside)
    saved_names = {name: section + name for name in wanted if section + name in known}
    taken = set(saved_names.values())
    free = by_plain_name(name for name in inside if name not in taken)
    for plain, names in by_plain_name(name for name in wanted if name not in saved_names).items():
        candidates = free.get(section + plain, [])
        if len(names) == len(candidates) == 1:
            saved_names[names[0]] = candidates[0]
    missing = sorted(set(wanted) - set(saved_names))
    unexpected = sorted(set(inside) - set(saved_names.values()))
    return NameMatch(saved_names, tuple(missing), tuple(unexpected), section)


def _read_local(path: str, trusted: bool) -> Any:
    if path.endswith(".safetensors"):
        return _load_safetensors(path, path)
    if is_zip(path) and not has_values_to_check(path):
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=not trusted)
        except Exception:  # read again below, where refusals and damage are told apart
            pass
    with open(path, "rb") as file:
        return load_pickle(io.BytesIO(file.read()), is_trusted=trusted, what=path)


def _parse(data: bytearray, file: Location, trusted: bool) -> Any:
    if _file_name(file).endswith(".safetensors"):
        return _load_safetensors(bytes(data), file.url)
    return load_pickle(memoryview(data), is_trusted=trusted, what=file.url)


def _load_safetensors(source: str | bytes, url: str) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load, load_file
    except ImportError as error:
        raise MissingDependencyError(
            "reading a .safetensors file needs the package: pip install 'remote-ckpt[safetensors]'"
        ) from error
    try:
        return load_file(source) if isinstance(source, str) else load(source)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointDamagedError(f"{url} cannot be read: {error}", url=url) from error


def _download(store: Store, key: str, options: Options) -> bytearray:
    """Read a large object in parallel ranges: one request for all of it could outlast any time limit."""
    size_bytes, part_bytes = store.info(key).size_bytes, options.transfer.part_bytes
    data = bytearray(size_bytes)
    view = memoryview(data)
    ranges = [
        Direct(key, start, view[start : start + part_bytes], lambda: None)
        for start in range(0, size_bytes, part_bytes)
    ]
    fetch_all(store, wanted=[], direct=ranges, options=options.transfer)
    return data


def _tensors_in(value: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(inner, f"{prefix}.{key}" if prefix else str(key))
