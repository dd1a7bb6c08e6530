"""``prune``: retention by a policy; the plan first, with a reason for each checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import click

from remote_ckpt.cli.access import Access, takes_root, takes_store
from remote_ckpt.cli.command import Command
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output, takes_output
from remote_ckpt.cli.table import Cell, Column, Painted
from remote_ckpt.cli.text import escape, format_age_of, format_bytes, format_count
from remote_ckpt.cli.values import Best, parse_best, parse_duration, parsed

if TYPE_CHECKING:
    from remote_ckpt.info import CheckpointInfo
    from remote_ckpt.policies import RetentionPolicy
    from remote_ckpt.pruning import PruneReport

_COLUMNS = (
    Column("action"),
    Column("name"),
    Column("age", is_number=True),
    Column("size", is_number=True),
    Column("reason"),
)
_COLOURS = {"delete": "yellow", "deleted": "yellow", "failed": "red"}


def takes_policy(function: Callable[..., ExitCode | None]) -> Callable[..., ExitCode | None]:
    """Give a command the options ``--keep-...``."""
    for option in reversed(
        (
            click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="The N highest steps."),
            click.option(
                "--keep-every-steps",
                type=click.IntRange(min=1),
                metavar="N",
                help="The first of every N steps.",
            ),
            click.option(
                "--keep-every-hours",
                type=click.FloatRange(min=0, min_open=True),
                metavar="H",
                help="The first of every H hours.",
            ),
            click.option(
                "--keep-best",
                multiple=True,
                metavar="METRIC[:N[:min|max]]",
                callback=parsed(parse_best),
                help="The N best by a metric; one, the lowest, if not said otherwise. Repeatable.",
            ),
            click.option(
                "--keep-within",
                metavar="DURATION",
                callback=parsed(parse_duration),
                help="Those committed within this time.",
            ),
            click.option("--keep-named", multiple=True, metavar="NAME", help="This one. Repeatable."),
            click.option(
                "--keep-named-pattern", multiple=True, metavar="GLOB", help="Names that match. Repeatable."
            ),
        )
    ):
        function = option(function)
    return function


@click.command(cls=Command)
@takes_root
@takes_policy
@click.option("--yes", "is_sure", is_flag=True, help="Delete; without it the plan is shown and nothing done.")
@takes_store
@takes_output
def prune(
    root: str,
    keep_last: int | None,
    keep_every_steps: int | None,
    keep_every_hours: float | None,
    keep_best: Sequence[Best],
    keep_within: timedelta | None,
    keep_named: Sequence[str],
    keep_named_pattern: Sequence[str],
    is_sure: bool,
    access: Access,
    out: Output,
) -> ExitCode:
    """Delete the steps that no --keep option keeps; what any of them keeps stays.

    Whatever they say, the newest step, the one committed last, pinned and damaged ones, and every name that
    is not a step stay, too, and so does a save in progress.
    """
    policy = _policy(
        keep_last=keep_last,
        keep_every_steps=keep_every_steps,
        keep_every_hours=keep_every_hours,
        keep_best=keep_best,
        keep_within=keep_within,
        keep_named=keep_named,
        keep_named_pattern=keep_named_pattern,
    )
    with access.directory(root) as directory:
        infos = {info.name: info for info in directory.list()}
        with out.progress("prune") as on_progress:
            report = directory.prune(policy, dry_run=not is_sure, on_progress=on_progress)
    out.show(
        lambda: _document(directory.url, report, infos), lambda: _text(directory.url, report, infos, out)
    )
    return ExitCode.NO if report.failures else ExitCode.DONE


def _policy(
    *,
    keep_last: int | None,
    keep_every_steps: int | None,
    keep_every_hours: float | None,
    keep_best: Sequence[Best],
    keep_within: timedelta | None,
    keep_named: Sequence[str],
    keep_named_pattern: Sequence[str],
) -> RetentionPolicy:
    from remote_ckpt import policies

    parts: list[RetentionPolicy] = []
    if keep_last is not None:
        parts.append(policies.KeepLast(keep_last))
    if keep_every_steps is not None:
        parts.append(policies.KeepEvery(steps=keep_every_steps))
    if keep_every_hours is not None:
        parts.append(policies.KeepEvery(hours=keep_every_hours))
    parts += [policies.KeepBest(best.metric, n=best.count, mode=best.mode) for best in keep_best]
    if keep_within is not None:
        parts.append(policies.KeepWithin(keep_within))
    if keep_named or keep_named_pattern:
        parts.append(policies.KeepNamed(*keep_named, pattern=keep_named_pattern))
    if not parts:
        raise click.UsageError("say what stays, by a --keep option", click.get_current_context())
    return reduce(lambda joined, part: joined | part, parts)


def _actions(report: PruneReport) -> list[tuple[str, str, str]]:
    """Return action, name and reason of each checkpoint, in the order of the plan: kept ones first."""
    deleted = set(report.deleted)
    spared = {decision.name: decision.reason for decision in report.spared}
    failed = {failure.name: str(failure.error) for failure in report.failures}
    actions = [("keep", decision.name, decision.reason) for decision in report.plan.keep]
    for decision in report.plan.delete:
        if decision.name in failed:
            actions.append(("failed", decision.name, failed[decision.name]))
        elif decision.name in spared:
            actions.append(("keep", decision.name, spared[decision.name]))
        else:
            action = "deleted" if decision.name in deleted else "delete"
            actions.append((action, decision.name, decision.reason))
    return actions


def _document(root: str, report: PruneReport, infos: Mapping[str, CheckpointInfo]) -> dict[str, Any]:
    return {
        "root": root,
        "is_dry_run": report.is_dry_run,
        "checkpoints": [
            {
                "name": name,
                "action": action,
                "reason": reason,
                "total_bytes": infos[name].total_bytes if name in infos else None,
                "committed_at": infos[name].committed_at if name in infos else None,
            }
            for action, name, reason in _actions(report)
        ],
        "failures": [{"name": failure.name, "error": failure.error} for failure in report.failures],
    }


def _text(root: str, report: PruneReport, infos: Mapping[str, CheckpointInfo], out: Output) -> str:
    actions = _actions(report)
    if not actions:
        return f"no checkpoints in {escape(root)}"
    rows = [_row(action, name, reason, infos.get(name)) for action, name, reason in actions]
    gone = [name for action, name, _ in actions if action.startswith("delete")]
    total_bytes = sum(infos[name].total_bytes for name in gone if name in infos)
    amount = f"{format_count(len(gone), 'checkpoint')}, {format_bytes(total_bytes)}"
    end = f"deleted {amount}"
    if report.is_dry_run:
        end = f"would delete {amount}; nothing was done: give --yes" if gone else "nothing to delete"
    return f"{out.table(_COLUMNS, rows)}\n\n{end}"


def _row(action: str, name: str, reason: str, info: CheckpointInfo | None) -> list[Cell]:
    return [
        Painted(action, _COLOURS.get(action, "green")),
        name,
        format_age_of(info.committed_at if info else None),
        "-" if info is None or info.is_damaged else format_bytes(info.total_bytes),
        escape(reason),
    ]
