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
    from remote_ckpt.comparison import Comparison
    from remote_ckpt.contents import Contents
    from remote_ckpt.dcp.left_out import register_dont_save_hooks
    from remote_ckpt.dcp.planner import CheckedLoadPlanner, CheckedSavePlanner
    from remote_ckpt.dcp.reader import RemoteStorageReader
    from remote_ckpt.dcp.writer import RemoteStorageWriter
    from remote_ckpt.directory import CheckpointDirectory
    from remote_ckpt.info import CheckpointInfo
    from remote_ckpt.manager import CheckpointManager, LoadedCheckpoint
    from remote_ckpt.policies import (
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepLast,
        KeepNamed,
        KeepWithin,
        RetentionPolicy,
    )
    from remote_ckpt.pretrained import init_fsdp_model_from_checkpoint, init_model_from_checkpoint_for_evals
    from remote_ckpt.progress import Progress
    from remote_ckpt.pruning import PruneReport
    from remote_ckpt.retention import CheckpointRetentionPolicy, RetentionPlan, format_plan
    from remote_ckpt.sweep import SweepReport
    from remote_ckpt.training import LoadReport, load_checkpoint, save_checkpoint
    from remote_ckpt.upkeep import (
        cleanup_checkpoint,
        find_all_checkpoints,
        find_latest_checkpoint,
        keep_checkpoint_copy,
        keep_last_n_checkpoints,
    )
    from remote_ckpt.usage import Usage
    from remote_ckpt.verification import VerifyReport

__all__ = [
    "AccessDeniedError",
    "BucketNotFoundError",
    "CheckedLoadPlanner",
    "CheckedSavePlanner",
    "CheckpointChangedError",
    "CheckpointDamagedError",
    "CheckpointDirectory",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointPinnedError",
    "CheckpointRetentionPolicy",
    "CommitOptions",
    "CommitUnknownError",
    "Comparison",
    "ConfigError",
    "Contents",
    "DtypeMismatchError",
    "ForkedProcessError",
    "FormatError",
    "IntegrityError",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepNamed",
    "KeepWithin",
    "KeyMismatchError",
    "LoadFailedError",
    "LoadReport",
    "LoadedCheckpoint",
    "MismatchError",
    "MissingDependencyError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "Options",
    "Progress",
    "PruneReport",
    "RemoteCkptError",
    "RemoteStorageReader",
    "RemoteStorageWriter",
    "RetentionPlan",
    "RetentionPolicy",
    "RetryOptions",
    "SaveFailedError",
    "ShapeMismatchError",
    "StorageFullError",
    "StoreError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "SweepRefusedError",
    "SweepReport",
    "TransferOptions",
    "UnsupportedStoreError",
    "UntrustedDataError",
    "UrlError",
    "Usage",
    "VerifyReport",
    "__version__",
    "cleanup_checkpoint",
    "find_all_checkpoints",
    "find_latest_checkpoint",
    "format_plan",
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
    "CheckpointDirectory": "directory",
    "CheckpointInfo": "info",
    "CheckpointManager": "manager",
    "CheckpointRetentionPolicy": "retention",
    "Comparison": "comparison",
    "Contents": "contents",
    "KeepAll": "policies",
    "KeepBest": "policies",
    "KeepEvery": "policies",
    "KeepLast": "policies",
    "KeepNamed": "policies",
    "KeepWithin": "policies",
    "LoadReport": "training",
    "LoadedCheckpoint": "manager",
    "Progress": "progress",
    "PruneReport": "pruning",
    "RemoteStorageReader": "dcp.reader",
    "RemoteStorageWriter": "dcp.writer",
    "RetentionPlan": "retention",
    "RetentionPolicy": "policies",
    "SweepReport": "sweep",
    "Usage": "usage",
    "VerifyReport": "verification",
    "cleanup_checkpoint": "upkeep",
    "find_all_checkpoints": "upkeep",
    "find_latest_checkpoint": "upkeep",
    "format_plan": "retention",
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
