"""Sweeping: removing what no manifest names and nobody can be writing any more.

Saves that were killed, deletions and replacements that were cut short, and every change of a checkpoint
leave objects that no reader sees. The sweep looks at everything first and plans; then it looks at each
checkpoint with garbage again, and removes what both looks found, unchanged. Whatever is doubtful stops it
before anything is removed: listings that contradict each other, an unreadable manifest, a wrong clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

from remote_ckpt.errors import ConfigError
from remote_ckpt.generation import DEFAULT_OPTIONS
from remote_ckpt.log import logger
from remote_ckpt.options import Options
from remote_ckpt.progress import OnProgress, ProgressCounter
from remote_ckpt.store.base import Store
from remote_ckpt.sweep_plan import Garbage
from remote_ckpt.sweep_removal import SweepFailure, Tally, remove_from, remove_in_root, remove_leftovers
from remote_ckpt.sweep_scan import Findings, Terms, in_threads, read_clock, scan

__all__ = ["Garbage", "SweepFailure", "SweepReport", "sweep"]

_LONG_AGO = datetime.min.replace(tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep found and did.

    Args:
        now: The store's time when it began (UTC).
        older_than: Age that had to be exceeded.
        is_dry_run: Whether nothing was to be removed.
        garbage: All that was found.
        removed_count: How many of those were removed.
        removed_bytes: Their size.
        failures: What could not be removed. What others removed first, or changed since, is no failure.
        warnings: What was passed over, and what the operator should know.
    """

    now: datetime
    older_than: timedelta
    is_dry_run: bool
    garbage: tuple[Garbage, ...]
    removed_count: int = 0
    removed_bytes: int = 0
    failures: tuple[SweepFailure, ...] = ()
    warnings: tuple[str, ...] = ()


def sweep(
    root: Store,
    *,
    older_than: timedelta | None = None,
    dry_run: bool = True,
    tombstones: bool = False,
    options: Options = DEFAULT_OPTIONS,
    on_progress: OnProgress | None = None,
) -> SweepReport:
    """Find, and unless this is a dry run remove, what no checkpoint of a run's directory needs.

    Removed are, each older than ``older_than`` by the store's clock: objects of saves and copies that were
    never committed; what was replaced or deleted and is still there; superseded manifests; open multipart
    uploads and temporary files of such writes; records of finished copies; probes. Never the newest manifest
    of a name, anything of a stock or plain checkpoint, anything with a name that is not ours (but for files
    that the record of an unfinished copy names), or what a link in a local directory leads to. Called by one
    process; several at once do no harm.

    Args:
        older_than: By default ``options.commit.grace_seconds``. It must be more than twice the
            ``save_seconds`` of every job that saves here; less is the operator's word that none is saving.
        dry_run: Only tell what would be removed.
        tombstones: Also remove the marks of deleted checkpoints: for a run that is finished. A change of
            such a checkpoint that hung for longer than ``older_than`` could then hit a newer one of its name.
        options: Grace period, deadlines.
        on_progress: Told while garbage is removed.

    Raises:
        SweepRefusedError: Something is doubtful: a manifest that is damaged or of a newer format, listings
            that contradict each other, clocks more than five minutes apart. Nothing was removed.
        StoreError: A request failed while everything was looked at. Nothing was removed.
        ConfigError: ``older_than`` is negative.
    """
    age = timedelta(seconds=options.commit.grace_seconds) if older_than is None else older_than
    warnings = _warnings(age, options)
    now = read_clock(root)
    terms = Terms(before=now - min(age, now - _LONG_AGO), tombstones=tombstones)
    findings = scan(root, terms)
    report = SweepReport(
        now=now,
        older_than=age,
        is_dry_run=dry_run,
        garbage=findings.garbage,
        warnings=(*warnings, *findings.warnings),
    )
    for warning in report.warnings:
        logger.warning("%s: %s", root.url, warning)
    if dry_run or not report.garbage:
        return report
    tally = Tally(_progress(report.garbage, on_progress))
    _carry_out(root, findings, terms, options, tally)
    return replace(
        report,
        removed_count=tally.removed_count,
        removed_bytes=tally.removed_bytes,
        failures=tuple(sorted(tally.failures, key=lambda failure: failure.key)),
    )


def _warnings(age: timedelta, options: Options) -> Sequence[str]:
    if age < timedelta(0):
        raise ConfigError(f"older_than must not be negative: {age}")
    if age >= timedelta(seconds=2 * options.commit.save_seconds):
        return ()
    return (
        f"older_than={age} is below twice the time that a save may take "
        f"({timedelta(seconds=options.commit.save_seconds)}): a save in progress would lose its objects",
    )


def _progress(garbage: Sequence[Garbage], on_progress: OnProgress | None) -> ProgressCounter:
    return ProgressCounter(
        "sweep",
        on_progress,
        total_bytes=sum(each.size_bytes for each in garbage),
        total_objects=len(garbage),
    )


def _carry_out(root: Store, findings: Findings, terms: Terms, options: Options, tally: Tally) -> None:
    in_threads(lambda plan: remove_from(root, plan, terms, options, tally), findings.checkpoints)
    remove_in_root(root, findings.in_root, terms, tally)
    # Last: what is planned for a checkpoint was planned with the folders that its leftovers lie in.
    remove_leftovers(root, findings.leftovers, tally)
