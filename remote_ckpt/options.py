"""Frozen option values with their units and defaults; nothing here does work."""

from __future__ import annotations

from dataclasses import dataclass, field

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB


def _require(is_ok: bool, message: str) -> None:
    if not is_ok:
        from remote_ckpt.errors import ConfigError

        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """When a failed request is tried again. Only transient failures are.

    Args:
        max_attempts: Tries of one request, the first included (at least 1). As a rule ``total_seconds``
            ends them before the default is reached, so that a store may be away for a minute and more.
        initial_seconds: Wait before the second try; doubled each time, with full jitter.
        max_seconds: Longest single wait.
        total_seconds: Deadline for one operation with all its tries.
        request_seconds: Longest wait for one request, body included.
        connect_seconds: Longest wait for a connection.
    """

    max_attempts: int = 30
    initial_seconds: float = 0.1
    max_seconds: float = 15.0
    total_seconds: float = 180.0
    request_seconds: float = 60.0
    connect_seconds: float = 5.0

    def __post_init__(self) -> None:
        _require(self.max_attempts >= 1, "max_attempts must be at least 1")
        _require(self.initial_seconds >= 0, "initial_seconds must not be negative")
        _require(self.total_seconds > 0, "total_seconds must be positive")
        _require(self.request_seconds > 0, "request_seconds must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """How bytes are moved.

    Args:
        budget_bytes: Most bytes of staging memory in flight at once, per process.
        part_bytes: Size of one part of a multipart upload, and of one ranged read.
        concurrency: Requests at once, per process.
        max_object_bytes: A new data object is begun before this size, unless one tensor is larger.
        merge_gap_bytes: Two wanted ranges nearer than this are fetched as one.
        block_bytes: Bytes covered by one checksum of a payload.
    """

    budget_bytes: int = 512 * MiB
    part_bytes: int = 32 * MiB
    concurrency: int = 16
    max_object_bytes: int = 4 * GiB
    merge_gap_bytes: int = 256 * KiB
    block_bytes: int = 1 * MiB

    def __post_init__(self) -> None:
        _require(self.part_bytes >= 5 * MiB, "part_bytes must be at least 5 MiB (S3's limit)")
        _require(self.budget_bytes >= 2 * self.part_bytes, "budget_bytes must hold two parts")
        _require(self.concurrency >= 1, "concurrency must be at least 1")
        _require(self.block_bytes >= 4 * KiB, "block_bytes must be at least 4 KiB")
        _require(self.block_bytes <= self.part_bytes, "block_bytes must not exceed part_bytes")
        _require(self.max_object_bytes >= self.part_bytes, "max_object_bytes must hold a part")
        _require(self.merge_gap_bytes >= 0, "merge_gap_bytes must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOptions:
    """Deadlines of a save.

    Args:
        save_seconds: A save that is not committed this long after it began, by the store's clock,
            never commits. Must stay below half of ``grace_seconds``.
        commit_seconds: How long an undecided commit is tried again before ``CommitUnknownError``.
        collective_seconds: How long a rank waits for the others in our own functions.
        grace_seconds: Age below which a sweep touches nothing.
        accept_single_writer: Accept a store without a real create-only write; two jobs that save the
            same checkpoint at the same time are then not kept apart.
    """

    save_seconds: float = 6 * 3600.0
    commit_seconds: float = 300.0
    collective_seconds: float = 1800.0
    grace_seconds: float = 24 * 3600.0
    accept_single_writer: bool = False

    def __post_init__(self) -> None:
        _require(
            0 < self.save_seconds < self.grace_seconds / 2,
            "save_seconds must be positive and below half of grace_seconds",
        )
        _require(self.commit_seconds > 0, "commit_seconds must be positive")
        _require(self.collective_seconds > 0, "collective_seconds must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a writer, reader or directory."""

    retry: RetryOptions = field(default_factory=RetryOptions)
    transfer: TransferOptions = field(default_factory=TransferOptions)
    commit: CommitOptions = field(default_factory=CommitOptions)
