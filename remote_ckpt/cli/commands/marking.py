"""``pin``, ``unpin``, ``annotate``: what people note on a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from remote_ckpt.cli.access import Access, parse_checkpoints, takes_checkpoints, takes_store
from remote_ckpt.cli.command import Command
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output, takes_output
from remote_ckpt.cli.several import Outcomes
from remote_ckpt.cli.text import escape, format_metrics
from remote_ckpt.cli.values import parse_metadata, parse_metric, parsed

if TYPE_CHECKING:
    from remote_ckpt.directory import CheckpointDirectory
    from remote_ckpt.info import CheckpointInfo

    Change = Callable[[CheckpointDirectory, str], CheckpointInfo]


@click.command(cls=Command)
@takes_checkpoints
@takes_store
@takes_output
def pin(paths: Sequence[str], access: Access, out: Output) -> ExitCode:
    """Keep checkpoints from being deleted or replaced by anybody, until they are unpinned."""
    return _change_each(
        paths, lambda directory, name: directory.pin(name), lambda _: "pinned", access=access, out=out
    )


@click.command(cls=Command)
@takes_checkpoints
@takes_store
@takes_output
def unpin(paths: Sequence[str], access: Access, out: Output) -> ExitCode:
    """Allow deleting and replacing checkpoints again."""
    return _change_each(
        paths, lambda directory, name: directory.unpin(name), lambda _: "unpinned", access=access, out=out
    )


@click.command(cls=Command)
@takes_checkpoints
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=parsed(parse_metric),
    help="A metric. Repeatable.",
)
@click.option(
    "--metadata",
    multiple=True,
    metavar="NAME=VALUE",
    callback=parsed(parse_metadata),
    help="Anything else, as JSON; what is no JSON is taken as text. Repeatable.",
)
@takes_store
@takes_output
def annotate(
    paths: Sequence[str],
    metrics: Sequence[tuple[str, float]],
    metadata: Sequence[tuple[str, Any]],
    access: Access,
    out: Output,
) -> ExitCode:
    """Add metrics or metadata to checkpoints; names that are there already get the new value."""
    if not metrics and not metadata:
        raise click.UsageError("give --metric or --metadata", click.get_current_context())
    return _change_each(
        paths,
        lambda directory, name: directory.annotate(name, metrics=dict(metrics), metadata=dict(metadata)),
        lambda info: f"metrics {format_metrics(info.metrics)}",
        access=access,
        out=out,
    )


def _change_each(
    paths: Sequence[str],
    change: Change,
    say: Callable[[CheckpointInfo], str],
    *,
    access: Access,
    out: Output,
) -> ExitCode:
    names = parse_checkpoints(paths)
    outcomes = Outcomes(out)
    changed: list[CheckpointInfo] = []
    with access.directories() as directory_of:
        for named in names:
            with outcomes.of(named):
                changed.append(change(directory_of(named.root), named.name))
    out.show(
        lambda: {"checkpoints": changed},
        lambda: "\n".join(f"{escape(info.url)}: {say(info)}" for info in changed),
    )
    return outcomes.exit_code
