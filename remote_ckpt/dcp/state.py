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
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from remote_ckpt.dcp.matching import is_below
from remote_ckpt.errors import ConfigError, KeyMismatchError


def collect_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    others: Mapping[str, Any],
    *,
    iteration: int | str | None,
    saved_names: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return what is to be saved, or a template of what is to be loaded. All ranks of the model.

    Tensors are the model's own memory, not copies.

    Args:
        model: Of which the state dict is taken.
        optimizer: Of this model.
        others: By name.
        iteration: As given to the save.
        saved_names: For a template: the checkpoint's names. Optimizers without state then have one in it, as
            torch makes it by a step without gradients: a template needs room. A save must not: the step
            counts, and would change the training that follows.

    Raises:
        ConfigError: The state of one of the other optimizers cannot be made by such a step.
    """
    state: dict[str, Any] = {"iteration": iteration, "model": get_model_state_dict(model)}
    is_template = saved_names is not None
    if optimizer is not None:
        prepared = _as_if_stepped("optimizer", optimizer) if is_template else _without_steps(optimizer)
        with nullcontext() if optimizer.state else prepared:
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    for name, value in others.items():
        if _is_fresh_optimizer(value) and is_below(f"{name}.state", saved_names or ()):
            state[name] = _template_of(name, value)
        else:
            state[name] = value.state_dict() if isinstance(value, Stateful) else value
    return state


def _is_fresh_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) and not value.state


def _template_of(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what the optimizer's state dict would be after a step."""
    with _as_if_stepped(name, optimizer):
        _init_optim_state(optimizer)
        return optimizer.state_dict()


@contextmanager
def _as_if_stepped(name: str, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch make the state of a step, and leave the optimizer as it was: the load may yet fail."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        with _without_gradients(optimizer):
            yield
    except Exception as error:  # a step of any class, which may need a closure or real gradients
        raise ConfigError(
            f"{name}: {type(optimizer).__name__} cannot take the step that makes room for its saved state "
            f"({type(error).__name__}: {error}). Let it take a step of training before it is loaded"
        ) from error
    finally:
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set gradients aside: where there is one, torch's ``_init_optim_state`` makes no state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    optimizer.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


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


def drop_unsaved_optimizer_state(
    state: dict[str, Any], section: str, saved_names: Collection[str]
) -> list[str]:
    """Take parameters out of the template that had no optimizer state when the checkpoint was written.

    A parameter that was frozen, or never got a gradient, has none; a fresh optimizer's template has one
    for every parameter. Loading then leaves it without, which is how the saved run had it (BR-99). Before the
    first step no parameter has any.

    Args:
        state: From :func:`collect_state`.
        section: The optimizer's name in it.
        saved_names: The checkpoint's names.

    Returns:
        The parameters' names (numbers where the optimizer is one of the others), sorted.
    """
    states = state.get(section, {}).get("state", {})
    saved = {name.removeprefix(f"{section}.state.") for name in saved_names}
    unsaved = sorted(
        parameter
        for parameter, values in states.items()
        if values and not any(f"{parameter}.{name}" in saved for name in values)
    )
    if len(unsaved) == len(states) and not _is_before_first_step(section, saved_names):
        return []  # no optimizer, or that of another model: a mismatch to report, not a habit of optimizers
    for parameter in unsaved:
        del states[parameter]
    return [str(parameter) for parameter in unsaved]


def _is_before_first_step(section: str, saved_names: Collection[str]) -> bool:
    has_settings = is_below(f"{section}.param_groups", saved_names)
    return has_settings and not is_below(f"{section}.state", saved_names)


def names_with_other_keys(others: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Return the names of dicts with keys that are not text, which come back as text in an empty dict.

    Those of optimizers and learning rate schedules are left out: fresh ones have the same keys.
    """
    return sorted(
        place
        for name, value in others.items()
        if not isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)
        for place in _dicts_with_other_keys(name, state[name])
    )


def _dicts_with_other_keys(place: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            yield place
        for key, inner in value.items():
            yield from _dicts_with_other_keys(f"{place}.{key}", inner)
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _dicts_with_other_keys(f"{place}.{position}", inner)


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
