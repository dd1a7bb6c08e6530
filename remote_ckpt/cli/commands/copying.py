"""``cp``: one checkpoint, or all that another directory lacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from remote_ckpt.errors import CheckpointDamagedError, ConfigError
from remote_ckpt.url import Location, parse_location

if TYPE_CHECKING:
    from remote_ckpt.directory import CheckpointDirectory
    from remote_ckpt.info import CheckpointInfo
    from remote_ckpt.place import Place


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
            places = _places(access, target_access, here, there)
            _check_runs(*places)
            directories = _open(stack, places)
            order = _Order(*directories, _missing(*directories, outcomes), overwrite)
        else:
            one, copy = parse_checkpoint(source), _parse_target(target)
            places = _places(access, target_access, one.root, copy.root)
            directories = _open(stack, places)
            order = _Order(*directories, [(directories[0].info(one.name), copy.name)], overwrite)
        if is_dry_run:
            order = replace(order, pairs=_possible(order, places, outcomes))
        copies = [] if is_dry_run else _carry_out(order, outcomes, out)
        out.show(
            lambda: _document(order, copies, is_dry_run),
            lambda: _plan_text(order, outcomes) if is_dry_run else _text(order, copies),
        )
    return outcomes.exit_code


def _parse_target(target: str) -> Named:
    if target.endswith("/"):
        raise click.UsageError(
            "TARGET is the copy's own path: add its name after the last slash", click.get_current_context()
        )
    return parse_checkpoint(target)


def _places(
    access: Access, target_access: Access | None, here: Location, there: Location
) -> tuple[Place, Place]:
    other = fitting_access(access, here, there, target_access)
    return access.place(here), other.place(there)


def _open(stack: ExitStack, places: tuple[Place, Place]) -> tuple[CheckpointDirectory, CheckpointDirectory]:
    from remote_ckpt.directory import CheckpointDirectory

    here, there = (
        stack.enter_context(
            CheckpointDirectory(
                place.location,
                storage_options=place.storage_options,
                transport=place.transport,
                options=place.options,
            )
        )
        for place in places
    )
    return here, there


def _check_runs(source: Place, target: Place) -> None:
    """Refuse to copy a run into itself: its copy would be one of its folders, and grow with it."""
    if not _is_one_store(source, target):
        return
    one, other = _parts(source.location), _parts(target.location)
    count = min(len(one), len(other))
    if one == other:
        raise ConfigError(f"cannot copy {source.location.url} onto itself", url=target.location.url)
    if one[:count] == other[:count]:
        raise ConfigError(
            f"cannot copy {source.location.url} to {target.location.url}: one lies inside the other",
            url=target.location.url,
        )


def _is_one_store(source: Place, target: Place) -> bool:
    one, other = source.location, target.location
    endpoints = [(place.storage_options or {}).get("endpoint_url") for place in (source, target)]
    return (one.scheme, one.bucket, endpoints[0]) == (other.scheme, other.bucket, endpoints[1])


def _parts(location: Location) -> list[str]:
    path = os.path.realpath(location.path) if location.is_local else location.path
    return [part for part in path.split("/") if part]


def _possible(
    order: _Order, places: tuple[Place, Place], outcomes: Outcomes
) -> list[tuple[CheckpointInfo, str]]:
    """What the copy would not refuse; of the rest it is said why."""
    from remote_ckpt.copying import check_copy

    possible: list[tuple[CheckpointInfo, str]] = []
    for info, name in order.pairs:
        with outcomes.of_url(info.url, info.name, others={f"{order.target.url}/{name}": name}):
            check_copy(places[0], info.name, places[1], name, overwrite=order.overwrite)
            possible.append((info, name))
    return possible


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
        with (
            outcomes.of_url(info.url, info.name, others={f"{order.target.url}/{name}": name}),
            out.progress(f"copy {info.name}") as on_progress,
        ):
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


def _plan_text(order: _Order, outcomes: Outcomes) -> str:
    if not order.pairs and outcomes.exit_code:
        return ""  # all of it is refused, and that is told already
    if not order.pairs:
        return _text(order, ())
    there = escape(order.target.url)
    lines = [
        f"would copy {escape(info.url)} to {there}/{name}: {format_bytes(info.total_bytes)}"
        for info, name in order.pairs
    ]
    total_bytes = sum(info.total_bytes for info, _ in order.pairs)
    return "\n".join([*lines, f"{format_count(len(lines), 'checkpoint')}, {format_bytes(total_bytes)}"])
