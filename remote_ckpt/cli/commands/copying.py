"""``cp``: one checkpoint, or all that another directory lacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from remote_ckpt.cli.access import (
    Access,
    Named,
    fitting_access,
    parse_checkpoint,
    takes_path,
    takes_store,
    takes_target_store,
)
from remote_ckpt.cli.command import Command
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output, takes_output
from remote_ckpt.cli.several import Outcomes
from remote_ckpt.cli.text import escape, format_bytes, format_count
from remote_ckpt.errors import CheckpointDamagedError
from remote_ckpt.url import Location, parse_location

if TYPE_CHECKING:
    from remote_ckpt.directory import CheckpointDirectory
    from remote_ckpt.info import CheckpointInfo


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be copied where: pairs of a checkpoint and the copy's name."""

    source: CheckpointDirectory
    target: CheckpointDirectory
    pairs: Sequence[tuple[CheckpointInfo, str]]
    overwrite: bool


@click.command(cls=Command)
@takes_path("source", metavar="SOURCE")
@takes_path("target", metavar="TARGET")
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="SOURCE and TARGET are run's directories: copy all that TARGET lacks.",
)
@click.option("--overwrite", is_flag=True, help="Replace what is there and differs, unless it is pinned.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Only show what would be copied.")
@takes_store
@takes_target_store
@takes_output
def cp(
    source: str,
    target: str,
    is_all: bool,
    overwrite: bool,
    is_dry_run: bool,
    access: Access,
    target_access: Access | None,
    out: Output,
) -> ExitCode:
    """Copy the checkpoint SOURCE to TARGET, the copy's own path. It exists there once it is whole.

    Within one store by hard links or by the store itself, else through this process, with every checksum
    checked. A copy that was interrupted is taken up again by the same call.
    """
    outcomes = Outcomes(out)
    with ExitStack() as stack:
        if is_all:
            here, there = parse_location(source), parse_location(target)
            directories = _open(stack, access, target_access, here, there)
            order = _Order(*directories, _missing(*directories, outcomes), overwrite)
        else:
            one, copy = parse_checkpoint(source), _parse_target(target)
            directories = _open(stack, access, target_access, one.root, copy.root)
            order = _Order(*directories, [(directories[0].info(one.name), copy.name)], overwrite)
        copies = [] if is_dry_run else _carry_out(order, outcomes, out)
        out.show(
            lambda: _document(order, copies, is_dry_run),
            lambda: _plan_text(order) if is_dry_run else _text(order, copies),
        )
    return outcomes.exit_code


def _parse_target(target: str) -> Named:
    if target.endswith("/"):
        raise click.UsageError(
            "TARGET is the copy's own path: add its name after the last slash", click.get_current_context()
        )
    return parse_checkpoint(target)


def _open(
    stack: ExitStack, access: Access, target_access: Access | None, here: Location, there: Location
) -> tuple[CheckpointDirectory, CheckpointDirectory]:
    other = fitting_access(access, here, there, target_access)
    return stack.enter_context(access.directory(here)), stack.enter_context(other.directory(there))


def _missing(
    source: CheckpointDirectory, target: CheckpointDirectory, outcomes: Outcomes
) -> list[tuple[CheckpointInfo, str]]:
    """What the target lacks; of damaged ones, which cannot be copied, it is said."""
    for info in source.list():
        if info.problem is not None:
            with outcomes.of_url(info.url, info.name):
                raise CheckpointDamagedError(f"{info.name} is not copied: {info.problem}")
    return [(info, info.name) for info in source.missing_from(target)]


def _carry_out(order: _Order, outcomes: Outcomes, out: Output) -> list[CheckpointInfo]:
    copies: list[CheckpointInfo] = []
    for info, name in order.pairs:
        with outcomes.of_url(info.url, info.name), out.progress(f"copy {info.name}") as on_progress:
            copies += order.source.copy_to(
                order.target, info.name, name=name, overwrite=order.overwrite, on_progress=on_progress
            )
    return copies


def _document(order: _Order, copies: Sequence[CheckpointInfo], is_dry_run: bool) -> dict[str, Any]:
    planned = [
        {"source": info.url, "name": name, "total_bytes": info.total_bytes} for info, name in order.pairs
    ]
    return {"root": order.target.url, "is_dry_run": is_dry_run, "planned": planned, "checkpoints": copies}


def _text(order: _Order, copies: Sequence[CheckpointInfo]) -> str:
    if not order.pairs:
        return f"nothing to copy: {escape(order.target.url)} has it all"
    return "\n".join(f"copied to {escape(copy.url)}: {format_bytes(copy.total_bytes)}" for copy in copies)


def _plan_text(order: _Order) -> str:
    if not order.pairs:
        return _text(order, ())
    there = escape(order.target.url)
    lines = [
        f"would copy {escape(info.url)} to {there}/{name}: {format_bytes(info.total_bytes)}"
        for info, name in order.pairs
    ]
    total_bytes = sum(info.total_bytes for info, _ in order.pairs)
    return "\n".join([*lines, f"{format_count(len(lines), 'checkpoint')}, {format_bytes(total_bytes)}"])
