"""What a load fills, and which of the checkpoint's names belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from remote_ckpt.dcp.left_out import left_out_names
from remote_ckpt.dcp.matching import is_below, listed, without_wrappers
from remote_ckpt.dcp.reader import RemoteStorageReader, Resolution
from remote_ckpt.dcp.state import collect_state, drop_unsaved_optimizer_state
from remote_ckpt.log import logger


class Target:
    """What a load fills.

    Args:
        model: Receives the state.
        optimizer: Of this model.
        others: By name.

    Attributes:
        optimizers: Names of the parts that are optimizers.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any]
    ) -> None:
        self.model, self.optimizer, self.others = model, optimizer, others
        self._sections = ["iteration", "model", *(["optimizer"] if optimizer else []), *others]
        self.optimizers = [
            *(["optimizer"] if optimizer else []),
            *(name for name, value in others.items() if isinstance(value, torch.optim.Optimizer)),
        ]
        self._left_out = frozenset(left_out_names(model))

    def wants(self, name: str) -> bool:
        """Whether a name of the checkpoint belongs to what is loaded and is not left out on purpose."""
        is_asked_for = any(is_below(section, [name]) for section in self._sections)
        return is_asked_for and without_wrappers(name) not in self._left_out

    def template(self, reader: RemoteStorageReader, resolution: Resolution) -> dict[str, Any]:
        """Return the state to load into, with room for what the checkpoint holds. All ranks of the model."""
        reader.adopt(resolution)
        saved = reader.read_metadata().state_dict_metadata
        state = collect_state(self.model, self.optimizer, self.others, iteration=None, saved_names=saved)
        for section in self.optimizers:
            if unsaved := drop_unsaved_optimizer_state(state, section, saved):
                logger.warning("%s holds no %s state for %s", reader.url, section, listed(unsaved))
        return state
