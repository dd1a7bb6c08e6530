"""One checkpoint of a run's directory, as users see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from remote_ckpt.discover import CheckpointEntry
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import CheckpointKind
from remote_ckpt.place import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What is known of a checkpoint without reading its data.

    Args:
        name: Its name below the run's directory.
        step: The number that the name spells; None for a named checkpoint (``best``, ``199_keep``).
        url: Its redacted URL, or its local path.
        kind: ``"remote_ckpt"`` (ours), ``"dcp"`` (stock torch) or ``"plain"`` (``checkpoint.pth``).
        formats: Who can read it: ``"remote_ckpt"``, ``"dcp"`` (any DCP reader), ``"plain"``.
        committed_at: When it was committed (aware, UTC); None where it is damaged.
        total_bytes: Size of its data.
        object_count: Data objects; 0 where no manifest counts them.
        world_size: Ranks that saved it; None where that is not known.
        metrics: Named numbers, given with the save or later.
        metadata: What else users have noted.
        pinned: Neither replaced nor deleted until it is unpinned.
        generation: Number of its newest manifest; 0 for stock and plain ones.
        save_id: Which life of the name this is.
        torch_version: Of the save, where known.
        package_version: Of this package when the newest manifest was written.
        left_out: State that was left out on purpose.
        content_digest: The same for equal values that are cut into chunks in the same way; None where
            not known.
        problem: Why it cannot be read; None where its manifest is sound.
    """

    name: str
    step: int | None
    url: str
    kind: CheckpointKind
    formats: tuple[str, ...]
    committed_at: datetime | None = None
    total_bytes: int = 0
    object_count: int = 0
    world_size: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    pinned: bool = False
    generation: int = 0
    save_id: str | None = None
    torch_version: str | None = None
    package_version: str | None = None
    left_out: tuple[str, ...] = ()
    content_digest: str | None = None
    problem: str | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether its newest manifest cannot be read."""
        return self.problem is not None


def describe(place: Place, entry: CheckpointEntry) -> CheckpointInfo:
    """Return what users see of an entry that ``discover`` found at a place."""
    info = CheckpointInfo(
        name=entry.name,
        step=entry.step,
        url=place.location.join(entry.name).url,
        kind=entry.kind,
        formats=entry.formats,
        committed_at=entry.committed_at,
        total_bytes=entry.total_bytes,
        generation=entry.generation,
        save_id=entry.save_id,
        problem=None if entry.error is None else str(entry.error),
    )
    return info if entry.manifest is None else _with_manifest(info, entry.manifest)


def _with_manifest(info: CheckpointInfo, manifest: Manifest) -> CheckpointInfo:
    return replace(
        info,
        object_count=len(manifest.objects),
        world_size=manifest.world_size,
        metrics=dict(manifest.metrics),
        metadata=dict(manifest.user_metadata),
        pinned=manifest.pinned,
        torch_version=manifest.torch_version,
        package_version=manifest.package_version,
        left_out=manifest.left_out,
        content_digest=manifest.content_digest or None,
    )
