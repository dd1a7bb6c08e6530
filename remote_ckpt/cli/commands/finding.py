"""``ls``, ``latest``, ``best``: which checkpoints there are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from remote_ckpt.cli.access import Access, takes_root, takes_store
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output, takes_output
from remote_ckpt.cli.table import Cell, Column, Painted
from remote_ckpt.cli.terminal import is_terminal
from remote_ckpt.cli.text import escape, format_age_of, format_bytes, format_metrics, format_moment
from remote_ckpt.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from remote_ckpt.directory import CheckpointDirectory
    from remote_ckpt.info import CheckpointInfo

_COLUMNS = (
    Column("name"),
    Column("committed"),
    Column("age", is_number=True),
    Column("size", is_number=True),
    Column("ranks", is_number=True),
    Column("formats"),
    Column("flags"),
    Column("metrics"),
)


@click.command()
@takes_root
@click.option(
    "--pattern", "patterns", multiple=True, metavar="GLOB", help="Only names that match. Repeatable."
)
@takes_store
@takes_output
def ls(root: str, patterns: Sequence[str], access: Access, out: Output) -> None:
    """List the checkpoints of a run: steps by number, then named ones."""
    with access.directory(root) as directory:
        found = directory.list()
    infos = [info for info in found if matches(info.name, patterns)]
    for info in infos:
        if info.problem is not None:
            out.warn(f"{info.name} is damaged: {info.problem}")
    out.show(
        lambda: {"root": directory.url, "checkpoints": infos},
        lambda: out.table(_COLUMNS, map(_row, infos)) if infos else _say_empty(directory, bool(found)),
    )


@click.command()
@takes_root
@click.option(
    "--verify", "is_verified", is_flag=True, help="Pass over those whose objects are not all there."
)
@takes_store
@takes_output
def latest(root: str, is_verified: bool, access: Access, out: Output) -> ExitCode | None:
    """Print the path or URL of the checkpoint with the highest step."""
    with access.directory(root) as directory:
        return _show_one(directory, directory.latest(verify=is_verified), "with a step", out)


@click.command()
@takes_root
@click.option("--metric", required=True, help="Name of the metric.")
@click.option(
    "--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help="Which value is best."
)
@takes_store
@takes_output
def best(root: str, metric: str, mode: Literal["min", "max"], access: Access, out: Output) -> ExitCode | None:
    """Print the path or URL of the checkpoint with the best value of a metric."""
    with access.directory(root) as directory:
        return _show_one(directory, directory.best(metric, mode), f"with the metric {metric!r}", out)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns, as in :func:`fnmatch.fnmatchcase`, or there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def format_flags(info: CheckpointInfo) -> Cell:
    """Return what is special about a checkpoint: pinned, damaged."""
    if info.is_damaged:
        return Painted("damaged", "red")
    return Painted("pinned", "yellow") if info.pinned else "-"


def _row(info: CheckpointInfo) -> list[Cell]:
    return [
        Painted(info.name, "bold"),
        format_moment(info.committed_at),
        format_age_of(info.committed_at),
        "-" if info.is_damaged else format_bytes(info.total_bytes),
        "-" if info.world_size is None else str(info.world_size),
        ",".join(info.formats) or "-",
        format_flags(info),
        format_metrics(info.metrics),
    ]


def _say_empty(directory: CheckpointDirectory, has_others: bool) -> str:
    if has_others:
        return f"no checkpoint in {escape(directory.url)} has such a name"
    is_missing = directory.url.startswith("/") and not Path(directory.url).exists()
    return f"no checkpoints in {escape(directory.url)}" + (", which does not exist" if is_missing else "")


def _show_one(
    directory: CheckpointDirectory, info: CheckpointInfo | None, which: str, out: Output
) -> ExitCode | None:
    if info is None:
        return out.fail(
            CheckpointNotFoundError(f"no checkpoint {which} in {directory.url}", url=directory.url)
        )
    # In a pipe as it is: a script takes it as an argument.
    out.show(lambda: {"checkpoint": info}, lambda: escape(info.url) if is_terminal(sys.stdout) else info.url)
    return None
