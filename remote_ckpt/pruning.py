"""Carrying out a retention plan: list, plan, delete one by one, and say what became of each.

Each deletion names the generation and the life of the name that the plan saw, so a pin, a save or a
replacement that came since wins. A checkpoint that cannot be deleted is reported and stays for the next
time; it stops neither the others nor the training run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.discover import CheckpointEntry, find_checkpoints
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CommitUnknownError,
    RemoteCkptError,
)
from remote_ckpt.log import logger
from remote_ckpt.options import Options
from remote_ckpt.progress import OnProgress, ProgressCounter
from remote_ckpt.retention import Candidate, Decision, RetentionPlan
from remote_ckpt.store.base import Store

_UNDECIDED_SECONDS = 1.5
"""How long retention beside training waits for one deletion that the store leaves undecided."""
_MAX_UNDECIDED = 3
"""After so many of those it leaves the rest to the next time."""


@dataclass(frozen=True, slots=True)
class PruneFailure:
    """A checkpoint that could not be deleted (or not wholly), and why."""

    name: str
    error: RemoteCkptError


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a retention decided, and what came of it.

    Args:
        plan: What was to be kept and deleted, each with its reason.
        is_dry_run: Nothing was deleted.
        deleted: Names that are gone.
        spared: Names that were to be deleted and stay, since they changed after the plan was made, a save
            of them seems to be in progress, or the store was too slow to say.
        failures: Names whose deletion failed; the next retention tries again.
    """

    plan: RetentionPlan
    is_dry_run: bool = False
    deleted: tuple[str, ...] = ()
    spared: tuple[Decision, ...] = ()
    failures: tuple[PruneFailure, ...] = ()


def prune(
    root: Store,
    plan_for: Callable[[list[Candidate]], RetentionPlan],
    *,
    options: Options,
    is_automatic: bool = True,
    is_hasty: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> PruneReport:
    """Plan over what a run's directory holds now, and delete what the plan says. Called by one process.

    Args:
        root: The run's directory.
        plan_for: Makes the plan from all checkpoints, damaged and named ones included.
        options: Deadlines of each deletion.
        is_automatic: Saves in progress bind it; otherwise it is an explicit order.
        is_hasty: It runs beside training, and does not wait for a store that leaves deletions undecided.
        dry_run: Only plan.
        on_progress: Told of each checkpoint that is dealt with.

    Raises:
        StoreError: The listing failed; nothing was deleted.
    """
    entries = {entry.name: entry for entry in find_checkpoints(root)}
    plan = plan_for([candidate_of(entry) for entry in entries.values()])
    if root.capabilities.has_folders:
        plan = _without_links(plan, root)
    for warning in plan.warnings:
        logger.warning("%s: %s", root.url, warning)
    if dry_run:
        return PruneReport(plan=plan, is_dry_run=True)
    work = _Pruning(root, _hasty(options) if is_hasty else options, is_automatic, is_hasty)
    counter = ProgressCounter("delete", on_progress, total_objects=len(plan.delete))
    for decision in plan.delete:
        work.delete(entries[decision.name], decision.reason)
        counter.advance(done_objects=1)
    return PruneReport(
        plan=plan,
        deleted=tuple(work.deleted),
        spared=tuple(work.spared),
        failures=tuple(work.failures),
    )


def _without_links(plan: RetentionPlan, root: Store) -> RetentionPlan:
    """Keep, on a disk, what a kept name leads to, and what is only linked to here and lies elsewhere."""
    if not plan.delete:
        return plan
    kept = {_folder_of(root, decision.name): decision.name for decision in plan.keep}
    spared = []
    for decision in plan.delete:
        folder = _folder_of(root, decision.name)
        if folder in kept:
            spared.append(Decision(decision.name, f"{kept[folder]} leads to it"))
        elif folder not in (f"{root.identity}/{decision.name}", _gone(decision.name)):
            spared.append(Decision(decision.name, "it is a link: what it leads to is not this run's alone"))
    names = {decision.name for decision in spared}
    return replace(
        plan,
        keep=(*plan.keep, *spared),
        delete=tuple(decision for decision in plan.delete if decision.name not in names),
    )


def _folder_of(root: Store, name: str) -> str:
    """The real path of a checkpoint's folder; where it is gone, what no other has."""
    try:
        with closing(root.scope(name)) as checkpoint:
            return checkpoint.identity
    except CheckpointNotFoundError:
        return _gone(name)


def _gone(name: str) -> str:
    return f"gone: {name}"


def candidate_of(entry: CheckpointEntry) -> Candidate:
    """Return a checkpoint as a policy sees it."""
    manifest = entry.manifest
    return Candidate(
        name=entry.name,
        step=entry.step,
        is_pinned=manifest is not None and manifest.pinned,
        is_damaged=entry.error is not None,
        committed_at=entry.committed_at,
        metrics={} if manifest is None else manifest.metrics,
    )


class _Pruning:
    """Deletes one checkpoint after the other and remembers what became of each."""

    def __init__(self, root: Store, options: Options, if_idle: bool, is_hasty: bool) -> None:
        self._root = root
        self._options = options
        self._if_idle = if_idle
        self._is_hasty = is_hasty
        self.deleted: list[str] = []
        self.spared: list[Decision] = []
        self.failures: list[PruneFailure] = []

    def delete(self, entry: CheckpointEntry, reason: str) -> None:
        if self._is_store_too_slow():
            self._spare(entry, "the store leaves deletions undecided: left to the next time")
            return
        try:
            self._delete(entry)
        except CheckpointNotFoundError:
            self.deleted.append(entry.name)  # another process was faster
        except CheckpointChangedError as error:
            self._spare(entry, f"changed since the plan: {error}")
        except RemoteCkptError as error:
            logger.error("%s: cannot delete %s: %s", self._root.url, entry.name, error)
            self.failures.append(PruneFailure(entry.name, error))
        else:
            logger.info("%s: deleted %s: %s", self._root.url, entry.name, reason)
            self.deleted.append(entry.name)

    def _delete(self, entry: CheckpointEntry) -> None:
        with closing(self._root.scope(entry.name)) as checkpoint:
            delete_checkpoint(
                checkpoint,
                if_generation=entry.generation,
                if_save_id=entry.save_id,
                if_idle=self._if_idle,
                options=self._options,
            )

    def _spare(self, entry: CheckpointEntry, reason: str) -> None:
        logger.warning("%s: %s stays: %s", self._root.url, entry.name, reason)
        self.spared.append(Decision(entry.name, reason))

    def _is_store_too_slow(self) -> bool:
        undecided = [failure for failure in self.failures if isinstance(failure.error, CommitUnknownError)]
        return self._is_hasty and len(undecided) >= _MAX_UNDECIDED


def _hasty(options: Options) -> Options:
    seconds = min(_UNDECIDED_SECONDS, options.commit.commit_seconds)
    return replace(options, commit=replace(options.commit, commit_seconds=seconds))
