"""State that a checkpoint leaves out on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from remote_ckpt.dcp.matching import without_wrappers

_LEFT_OUT = "_remote_ckpt_left_out"
"""Attribute of a module: the names below it that its state dict leaves out."""


def register_dont_save_hooks(module: torch.nn.Module, dont_save: Sequence[str]) -> None:
    """Leave parameters and buffers of a module out of its state dict, and do without them when loading.

    For what is loaded from elsewhere, such as a frozen backbone below a trained head. The names are recorded
    in the manifests of checkpoints saved afterwards.

    Args:
        module: The model or a part of it, before or after it is wrapped.
        dont_save: Names relative to ``module``.
    """
    names = frozenset(without_wrappers(name) for name in dont_save)
    prefixes: list[str] = []

    def remove(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            if without_wrappers(key.removeprefix(prefix)) in names:
                del state[key]

    def note_prefix(_: Any, __: dict[str, Any], prefix: str, *___: Any) -> None:
        prefixes[:] = [prefix]  # the hook after loading is not told where in the model it is

    def forgive(_: Any, incompatible: Any) -> None:
        prefix = prefixes[0] if prefixes else ""
        incompatible.missing_keys[:] = [
            key
            for key in incompatible.missing_keys
            if not (key.startswith(prefix) and without_wrappers(key.removeprefix(prefix)) in names)
        ]

    hooked: Any = module  # torch leaves these three methods without types
    hooked.register_state_dict_post_hook(remove)
    hooked.register_load_state_dict_pre_hook(note_prefix)
    hooked.register_load_state_dict_post_hook(forgive)
    setattr(module, _LEFT_OUT, frozenset(getattr(module, _LEFT_OUT, ())) | names)


def left_out_names(model: torch.nn.Module) -> list[str]:
    """Return the names, as in a checkpoint, that hooks on the model or its submodules leave out."""
    names = set()
    for prefix, module in model.named_modules():
        for name in getattr(module, _LEFT_OUT, ()):
            names.add(without_wrappers(f"model.{prefix}.{name}" if prefix else f"model.{name}"))
    return sorted(names)
