"""Atomic, checksummed PyTorch distributed checkpoints on S3, GCS, Azure or a local disk.

Everything public is listed here and can be imported from here. Modules are loaded at first use, so that
listing, keeping and deleting checkpoints never waits for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from remote_ckpt._version import __version__
from remote_ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CommitUnknownError,
    ConfigError,
    DtypeMismatchError,
    ForkedProcessError,
    FormatError,
    IntegrityError,
    KeyMismatchError,
    LoadFailedError,
    MismatchError,
    MissingDependencyError,
    ObjectExistsError,
    ObjectNotFoundError,
    RemoteCkptError,
    SaveFailedError,
    ShapeMismatchError,
    StorageFullError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    SweepRefusedError,
    UnsupportedStoreError,
    UntrustedDataError,
    UrlError,
)
from remote_ckpt.options import CommitOptions, Options, RetryOptions, TransferOptions

if TYPE_CHECKING:
    from remote_ckpt.dcp.left_out import register_dont_save_hooks
    from remote_ckpt.dcp.planner import CheckedLoadPlanner, CheckedSavePlanner
    from remote_ckpt.dcp.reader import RemoteStorageReader
    from remote_ckpt.dcp.writer import RemoteStorageWriter
    from remote_ckpt.pretrained import init_fsdp_model_from_checkpoint, init_model_from_checkpoint_for_evals
    from remote_ckpt.retention import CheckpointRetentionPolicy
    from remote_ckpt.training import LoadReport, load_checkpoint, save_checkpoint
    from remote_ckpt.upkeep import (
        cleanup_checkpoint,
        find_all_checkpoints,
        find_latest_checkpoint,
        keep_checkpoint_copy,
        keep_last_n_checkpoints,
    )

__all__ = [
    "AccessDeniedError",
    "BucketNotFoundError",
    "CheckedLoadPlanner",
    "CheckedSavePlanner",
    "CheckpointChangedError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointPinnedError",
    "CheckpointRetentionPolicy",
    "CommitOptions",
    "CommitUnknownError",
    "ConfigError",
    "DtypeMismatchError",
    "ForkedProcessError",
    "FormatError",
    "IntegrityError",
    "KeyMismatchError",
    "LoadFailedError",
    "LoadReport",
    "MismatchError",
    "MissingDependencyError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "Options",
    "RemoteCkptError",
    "RemoteStorageReader",
    "RemoteStorageWriter",
    "RetryOptions",
    "SaveFailedError",
    "ShapeMismatchError",
    "StorageFullError",
    "StoreError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "SweepRefusedError",
    "TransferOptions",
    "UnsupportedStoreError",
    "UntrustedDataError",
    "UrlError",
    "__version__",
    "cleanup_checkpoint",
    "find_all_checkpoints",
    "find_latest_checkpoint",
    "init_fsdp_model_from_checkpoint",
    "init_model_from_checkpoint_for_evals",
    "keep_checkpoint_copy",
    "keep_last_n_checkpoints",
    "load_checkpoint",
    "register_dont_save_hooks",
    "save_checkpoint",
]

_LAZY = {
    "CheckedLoadPlanner": "dcp.planner",
    "CheckedSavePlanner": "dcp.planner",
    "CheckpointRetentionPolicy": "retention",
    "LoadReport": "training",
    "RemoteStorageReader": "dcp.reader",
    "RemoteStorageWriter": "dcp.writer",
    "cleanup_checkpoint": "upkeep",
    "find_all_checkpoints": "upkeep",
    "find_latest_checkpoint": "upkeep",
    "init_fsdp_model_from_checkpoint": "pretrained",
    "init_model_from_checkpoint_for_evals": "pretrained",
    "keep_checkpoint_copy": "upkeep",
    "keep_last_n_checkpoints": "upkeep",
    "load_checkpoint": "training",
    "register_dont_save_hooks": "dcp.left_out",
    "save_checkpoint": "training",
}
"""Public names and the modules that define them; most of those import torch."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
