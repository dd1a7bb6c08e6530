"""``verify`` and ``diff``: whether checkpoints are whole, and whether two hold the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from remote_ckpt.cli.access import (
    Access,
    Named,
    fitting_access,
    parse_checkpoint,
    parse_checkpoints,
    takes_checkpoints,
    takes_path,
    takes_store,
    takes_target_store,
)
from remote_ckpt.cli.command import Command
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output, plain, takes_output
from remote_ckpt.cli.several import Outcomes
from remote_ckpt.cli.table import Cell, Column
from remote_ckpt.cli.text import escape, format_bytes, format_count

if TYPE_CHECKING:
    from remote_ckpt.comparison import Comparison
    from remote_ckpt.verification import Problem, VerifyReport

_NAMED_TENSORS = 3
_DIFF_COLUMNS = (Column("name"), Column("what"), Column("first"), Column("second"))


@dataclass(frozen=True, slots=True)
class _Verified:
    """A report, and how long it took."""

    report: VerifyReport
    seconds: float


@click.command(cls=Command)
@takes_checkpoints
@click.option("--read-data", "is_data_read", is_flag=True, help="Read every byte and compare all checksums.")
@takes_store
@takes_output
def verify(paths: Sequence[str], is_data_read: bool, access: Access, out: Output) -> ExitCode:
    """Check that checkpoints are whole: every object there with its size, manifest and index sound."""
    names = parse_checkpoints(paths)
    outcomes = Outcomes(out)
    verified: list[_Verified] = []
    with access.directories() as directory_of:
        for named in names:
            with outcomes.of(named), out.progress(f"verify {named.name}") as on_progress:
                began = time.monotonic()
                report = directory_of(named.root).verify(
                    named.name, read_data=is_data_read, on_progress=on_progress
                )
                verified.append(_Verified(report, time.monotonic() - began))
                _tell(report, outcomes, out)
    out.show(
        lambda: {"checkpoints": [_report_document(each) for each in verified]},
        lambda: "\n".join(_report_text(each, out) for each in verified),
    )
    return outcomes.exit_code


@click.command(cls=Command)
@takes_path("first", metavar="CHECKPOINT")
@takes_path("second", metavar="CHECKPOINT")
@click.option(
    "--read-data", "is_data_read", is_flag=True, help="Read the values that checksums do not decide."
)
@takes_store
@takes_target_store
@takes_output
def diff(
    first: str, second: str, is_data_read: bool, access: Access, target_access: Access | None, out: Output
) -> ExitCode:
    """Compare two checkpoints: names, shapes, dtypes, and values by their checksums.

    The options --target-... are for the second one, where its store is another.
    """
    one, other = parse_checkpoint(first), parse_checkpoint(second)
    there = fitting_access(access, one.root, other.root, target_access)
    with (
        access.directory(one.root) as directory,
        there.directory(other.root) as other_directory,
        out.progress("diff") as on_progress,
    ):
        comparison = directory.compare(
            one.name, other.name, other=other_directory, read_data=is_data_read, on_progress=on_progress
        )
    out.show(
        lambda: _comparison_document(one, other, comparison),
        lambda: _comparison_text(comparison, is_data_read, out),
    )
    return ExitCode.DONE if comparison.is_equal else ExitCode.NO


# --- verify ----------------------------------------------------------------------------------------------


def _tell(report: VerifyReport, outcomes: Outcomes, out: Output) -> None:
    for warning in report.warnings:
        out.warn(f"{report.url}: {warning}")
    if not report.is_sound:
        outcomes.say_no()


def _report_document(verified: _Verified) -> dict[str, Any]:
    document: dict[str, Any] = plain(verified.report)
    return {**document, "is_sound": verified.report.is_sound, "seconds": round(verified.seconds, 3)}


def _report_text(verified: _Verified, out: Output) -> str:
    report = verified.report
    scope = f"{format_count(report.object_count, 'object')}, {format_bytes(report.total_bytes)}"
    if report.is_data_read:
        speed = format_bytes(int(report.total_bytes / max(verified.seconds, 1e-3)))
        scope += f", every byte read in {verified.seconds:.1f}s ({speed}/s)"
    verdict = out.paint("sound", "green")
    if not report.is_sound:
        verdict = out.paint(format_count(len(report.problems), "problem"), "red")
    lines = [f"{escape(report.url)}: {verdict} ({scope})"]
    return "\n".join([*lines, *map(_problem_text, report.problems)])


def _problem_text(problem: Problem) -> str:
    named = ", ".join(map(escape, problem.tensors[:_NAMED_TENSORS]))
    more = len(problem.tensors) - _NAMED_TENSORS
    tensors = f" (holds {named}{f' and {more} more' if more > 0 else ''})" if named else ""
    return f"  {escape(problem.key)}: {escape(problem.message)}{tensors}"


# --- diff ------------------------------------------------------------------------------------------------


def _comparison_document(first: Named, second: Named, comparison: Comparison) -> dict[str, Any]:
    document: dict[str, Any] = plain(comparison)
    return {"first": first.url, "second": second.url, "is_equal": comparison.is_equal, **document}


def _comparison_text(comparison: Comparison, is_data_read: bool, out: Output) -> str:
    rows: list[list[Cell]] = [[escape(name), "only in first", "", ""] for name in comparison.only_first]
    rows += [[escape(name), "only in second", "", ""] for name in comparison.only_second]
    rows += [
        [escape(change.name), change.what, escape(change.first), escape(change.second)]
        for change in comparison.changes
    ]
    difference_count, undecided_count = len(rows), len(comparison.undecided)
    rows += [[escape(name), "undecided", "", ""] for name in comparison.undecided]
    if comparison.is_equal:
        noun = "entry" if comparison.equal_count == 1 else "entries"
        return f"equal: {comparison.equal_count} {noun}"
    hint = "; --read-data decides the undecided ones" if undecided_count and not is_data_read else ""
    counts = f"{format_count(difference_count, 'difference')}, {undecided_count} undecided"
    return f"{out.table(_DIFF_COLUMNS, rows)}\n\n{counts}, {comparison.equal_count} equal{hint}"
