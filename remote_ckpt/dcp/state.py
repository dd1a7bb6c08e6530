"""A training run's state as the dict that DCP saves and loads, and back.

The layout is that of DINOv3's checkpointer: ``{"iteration": ..., "model": ..., "optimizer": ..., **others}``
with the model's and the optimizer's state as `torch.distributed.checkpoint.state_dict
<https://pytorch.org/docs/stable/distributed.checkpoint.html>`_ gives them: names without wrappers, so that
a checkpoint does not depend on DDP, FSDP, ``torch.compile`` or activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from remote_ckpt.errors import ConfigError, KeyMismatchError


def collect_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    others: Mapping[str, Any],
    *,
    iteration: int | str | None,
    fills_optimizer: bool = False,
) -> dict[str, Any]:
    """Return what is to be saved, or a template of what is to be loaded. All ranks of the model.

    Tensors are the model's own memory, not copies.

    Args:
        model: Of which the state dict is taken.
        optimizer: Of this model.
        others: By name.
        iteration: As given to the save.
        fills_optimizer: Give an optimizer without state one, as torch does by a step without gradients: a
            template needs room. A save must not: the step counts, and would change the training that follows.
    """
    state: dict[str, Any] = {"iteration": iteration, "model": get_model_state_dict(model)}
    if optimizer is not None:
        with nullcontext() if fills_optimizer or optimizer.state else _without_steps(optimizer):
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    for name, value in others.items():
        state[name] = value.state_dict() if isinstance(value, Stateful) else value
    return state


@contextmanager
def _without_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch's ``_init_optim_state`` from taking a step."""
    own = vars(optimizer).get("step")  # set by learning rate schedules
    vars(optimizer)["step"] = lambda closure=None: None
    try:
        yield
    finally:
        del vars(optimizer)["step"]
        if own is not None:
            vars(optimizer)["step"] = own


def require_loadable(others: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that cannot take what is loaded."""
    for name, value in others.items():
        if not isinstance(value, Stateful | MutableMapping | list | torch.Tensor):
            raise ConfigError(
                f"{name}={value!r} cannot be loaded in place: pass a dict, a list, a tensor or an object "
                "with state_dict() and load_state_dict()"
            )


def drop_unsaved_optimizer_state(state: dict[str, Any], saved_names: Collection[str]) -> list[str]:
    """Take parameters out of the template that had no optimizer state when the checkpoint was written.

    A parameter that was frozen, or never got a gradient, has none; a fresh optimizer's template has one
    for every parameter. Loading then leaves it without, which is how the saved run had it (BR-99). Before the
    first step no parameter has any.

    Returns:
        The parameters' names, sorted.
    """
    states = state.get("optimizer", {}).get("state", {})
    saved = {name.removeprefix("optimizer.state.") for name in saved_names}
    unsaved = sorted(
        parameter
        for parameter, values in states.items()
        if values and not any(f"{parameter}.{name}" in saved for name in values)
    )
    if len(unsaved) == len(states) and not _is_before_first_step(saved_names):
        return []  # no optimizer, or that of another model: a mismatch to report, not a habit of optimizers
    for parameter in unsaved:
        del states[parameter]
    return unsaved


def _is_before_first_step(saved_names: Collection[str]) -> bool:
    has_settings = any(name.startswith("optimizer.param_groups") for name in saved_names)
    return has_settings and not any(name.startswith("optimizer.state.") for name in saved_names)


def apply_state(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    others: Mapping[str, Any],
) -> None:
    """Give the loaded state to the model, the optimizer and the other objects. All ranks of the model.

    Names were checked before the load; what is left out on purpose or missing keeps its value.
    """
    lenient = StateDictOptions(strict=False)
    refused = set_model_state_dict(model, state["model"], options=lenient).unexpected_keys
    if refused:
        raise KeyMismatchError(f"the model did not take {', '.join(refused)}", operation="load")
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=lenient)
        if not state["optimizer"].get("state"):
            optimizer.state.clear()  # as it was saved: before the first step
    for name, value in others.items():
        if isinstance(value, Stateful):
            value.load_state_dict(state[name])
        elif isinstance(value, list):
            value[:] = state[name]
