"""``cp``: one checkpoint, or all that another directory lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from remote_ckpt.cli.access import (
    Access,
    complete_folder,
    fitting_access,
    parse_checkpoint,
    takes_store,
    takes_target_store,
)
from remote_ckpt.cli.output import Output, takes_output
from remote_ckpt.cli.text import escape, format_bytes
from remote_ckpt.url import parse_location

if TYPE_CHECKING:
    from remote_ckpt.info import CheckpointInfo


@click.command()
@click.argument("source", metavar="SOURCE", shell_complete=complete_folder)
@click.argument("target", metavar="TARGET", shell_complete=complete_folder)
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="SOURCE and TARGET are run's directories: copy all that TARGET lacks.",
)
@click.option("--overwrite", is_flag=True, help="Replace what is there and differs, unless it is pinned.")
@takes_store
@takes_target_store
@takes_output
def cp(
    source: str,
    target: str,
    is_all: bool,
    overwrite: bool,
    access: Access,
    target_access: Access | None,
    out: Output,
) -> None:
    """Copy the checkpoint SOURCE to TARGET, the copy's own path. It exists there once it is whole.

    Within one store by hard links or by the store itself, else through this process, with every checksum
    checked. A copy that was interrupted is taken up again by the same call.
    """
    copy = _copy_all if is_all else _copy_one
    copies = copy(source, target, overwrite=overwrite, access=access, target_access=target_access, out=out)
    out.show(lambda: {"checkpoints": copies}, lambda: _text(copies, target))


def _copy_one(
    source: str, target: str, *, overwrite: bool, access: Access, target_access: Access | None, out: Output
) -> list[CheckpointInfo]:
    if target.endswith("/"):
        raise click.UsageError(
            "TARGET is the copy's own path: add its name after the last slash", click.get_current_context()
        )
    one, copy = parse_checkpoint(source), parse_checkpoint(target)
    there = fitting_access(access, one.root, copy.root, target_access)
    with (
        access.directory(one.root) as directory,
        there.directory(copy.root) as other,
        out.progress(f"copy {one.name}") as on_progress,
    ):
        return directory.copy_to(
            other, one.name, name=copy.name, overwrite=overwrite, on_progress=on_progress
        )


def _copy_all(
    source: str, target: str, *, overwrite: bool, access: Access, target_access: Access | None, out: Output
) -> list[CheckpointInfo]:
    here = parse_location(source)
    there = fitting_access(access, here, parse_location(target), target_access)
    with (
        access.directory(here) as directory,
        there.directory(target) as other,
        out.progress("copy") as on_progress,
    ):
        return directory.copy_to(other, overwrite=overwrite, on_progress=on_progress)


def _text(copies: list[CheckpointInfo], target: str) -> str:
    lines = [f"copied to {escape(copy.url)}: {format_bytes(copy.total_bytes)}" for copy in copies]
    return "\n".join(lines) or f"nothing to copy: {escape(target)} holds all"
