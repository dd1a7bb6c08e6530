"""``ls``, ``latest``, ``best``: which checkpoints there are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from remote_ckpt.cli.access import Access, takes_root, takes_store
from remote_ckpt.cli.command import Command
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output, takes_output
from remote_ckpt.cli.table import Cell, Column, Painted
from remote_ckpt.cli.terminal import is_terminal
from remote_ckpt.cli.text import escape, format_age_of, format_bytes, format_metrics, format_moment
from remote_ckpt.errors import CheckpointNotFoundError, RemoteCkptError

if TYPE_CHECKING:
    from remote_ckpt.info import CheckpointInfo
    from remote_ckpt.place import Place

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


@click.command(cls=Command)
@takes_root
@click.option(
    "--pattern", "patterns", multiple=True, metavar="GLOB", help="Only names that match. Repeatable."
)
@takes_store
@takes_output
def ls(root: str, patterns: Sequence[str], access: Access, out: Output) -> None:
    """List the checkpoints of a run: steps by number, then named ones."""
    from remote_ckpt.discover import find_checkpoints
    from remote_ckpt.info import describe

    place = access.place(root)
    with place.opened() as store:
        found = [describe(place, entry) for entry in find_checkpoints(store)]
    infos = [info for info in found if matches(info.name, patterns)]
    for info in infos:
        if info.problem is not None:
            out.warn(f"{info.name} is damaged: {info.problem}")
    out.show(
        lambda: {"root": place.location.url, "checkpoints": infos},
        lambda: out.table(_COLUMNS, map(_row, infos)) if infos else _say_empty(place, bool(found)),
    )


@click.command(cls=Command)
@takes_root
@click.option(
    "--verify", "is_verified", is_flag=True, help="Pass over those whose objects are not all there."
)
@takes_store
@takes_output
def latest(root: str, is_verified: bool, access: Access, out: Output) -> ExitCode | None:
    """Print the path or URL of the checkpoint with the highest step."""
    place = access.place(root)
    info = _latest_verified(access, root) if is_verified else _latest(place)
    return _show_one(place, info, "with a step", out)


@click.command(cls=Command)
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
        info = directory.best(metric, mode)
    return _show_one(access.place(root), info, f"with the metric {metric!r}", out)


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


def _say_empty(place: Place, has_others: bool) -> str:
    url = escape(place.location.url)
    if has_others:
        return f"no checkpoint in {url} has such a name"
    if place.location.is_local and not Path(place.location.path).exists():
        return f"no checkpoints in {url}, which does not exist"
    if _is_checkpoint(place):
        return f"no checkpoints in {url}, which is a checkpoint itself: see remote-ckpt info"
    return f"no checkpoints in {url}"


def _is_checkpoint(place: Place) -> bool:
    """Whether a checkpoint was given where a run's directory is asked for; False where nobody can tell."""
    from remote_ckpt.discover import resolve

    try:
        parent, name = place.location.split()
        with replace(place, location=parent).opened() as store:
            return resolve(store, name) is not None
    except RemoteCkptError:
        return False


def _latest(place: Place) -> CheckpointInfo | None:
    from remote_ckpt.discover import find_latest
    from remote_ckpt.info import describe

    with place.opened() as store:
        entry = find_latest(store)
    return None if entry is None else describe(place, entry)


def _latest_verified(access: Access, root: str) -> CheckpointInfo | None:
    with access.directory(root) as directory:
        return directory.latest(verify=True)


def _show_one(place: Place, info: CheckpointInfo | None, which: str, out: Output) -> ExitCode | None:
    if info is None:
        url = place.location.url
        return out.fail(CheckpointNotFoundError(f"no checkpoint {which} in {url}", url=url))
    # In a pipe as it is: a script takes it as an argument.
    out.show(lambda: {"checkpoint": info}, lambda: escape(info.url) if is_terminal(sys.stdout) else info.url)
    return None
