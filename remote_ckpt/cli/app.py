"""The command ``remote-ckpt``: which commands there are, and how any of them ends.

``--help`` imports nothing but click and this: what a command needs is loaded when it is called.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import click

from remote_ckpt._version import __version__
from remote_ckpt.cli.exits import MEANINGS, ExitCode, exit_code_of
from remote_ckpt.cli.streams import OutputLostError, drop, say, write_all_names, writing_output

PROGRAM: Final = "remote-ckpt"
_WORD: Final = re.compile(r"-.*|[a-z]{1,15}", re.DOTALL)


class Entry(NamedTuple):
    """A command's module below ``commands``, and what the list of commands says of it."""

    module: str
    summary: str


COMMANDS: Final = {
    "ls": Entry("finding", "List the checkpoints of a run."),
    "latest": Entry("finding", "Print the path or URL of the highest step."),
    "best": Entry("finding", "Print the path or URL of the best by a metric."),
    "info": Entry("inspecting", "Show facts and tensors of checkpoints."),
    "verify": Entry("checking", "Check that checkpoints are whole."),
    "diff": Entry("checking", "Compare two checkpoints."),
    "pin": Entry("marking", "Keep checkpoints from being deleted or replaced."),
    "unpin": Entry("marking", "Allow deleting and replacing again."),
    "annotate": Entry("marking", "Add metrics or metadata to checkpoints."),
    "cp": Entry("copying", "Copy a checkpoint, or all that are missing."),
    "rm": Entry("deleting", "Delete checkpoints by name."),
    "prune": Entry("pruning", "Delete the steps that no --keep option keeps."),
    "sweep": Entry("sweeping", "Remove what killed saves and deletions left."),
    "du": Entry("measuring", "Show how much space checkpoints and leftovers take."),
    "completion": Entry("completion", "Print a script that completes in a shell."),
}

EPILOG: Final = "\b\nExit codes:\n" + "\n".join(f"  {code:<4} {MEANINGS[code]}" for code in ExitCode)


class App(click.Group):
    """The group of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which people need them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"remote_ckpt.cli.commands.{COMMANDS[cmd_name].module}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; what cannot be one is not repeated, since it may be a secret in a wrong place."""
        if not ctx.resilient_parsing and not _WORD.fullmatch(args[0]):
            ctx.fail("the first argument is no command, and is not repeated here")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Like click's, which writes ``--help`` and ``--version`` here; an interrupt is told by us alone."""
        with _interrupts_told_once(), writing_output():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Like click's; an interrupt is told by us alone."""
        with _interrupts_told_once():
            return super().invoke(ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and exit with its code (or return it, where not in standalone mode)."""
        arguments = sys.argv[1:] if args is None else list(args)
        write_all_names()
        run = super().main
        code = _ended(
            lambda: run(arguments, PROGRAM, complete_var, standalone_mode=False, **extra), arguments
        )
        if standalone_mode:
            sys.exit(code)
        return code


@click.group(
    cls=App, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """List, check, keep, copy and delete the checkpoints of training runs, on a local disk or in a store.

    ROOT is a run's directory, CHECKPOINT one checkpoint in it (ROOT/199): a path or a URL such as
    s3://bucket/run/ckpt. Both are taken literally; only options that are called a pattern are patterns.
    """


@contextmanager
def _interrupts_told_once() -> Iterator[None]:
    """click would write an empty line first, where a program expects JSON."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise click.Abort from error


def _ended(run: Callable[[], Any], arguments: Sequence[str]) -> int:
    """Run, and return the exit code; whatever went wrong is told on stderr."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    stdout = sys.stdout
    try:
        code = int(run() or ExitCode.DONE)
        return code
    except OutputLostError as error:
        return _end_unheard(error, options)
    except SystemExit:
        if sys.stdout is stdout:
            raise  # a completion is done
        return ExitCode.PIPE_CLOSED  # click found the pipe closed, and wrapped it; its 1 would mean "no"
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return ExitCode.WRONG_CALL
    except click.ClickException as error:
        _tell(error, options, message=_usage_message(error))
        return ExitCode.WRONG_CALL
    except click.Abort as error:
        _tell(error, options, message="interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:
        _tell(error, options)
        return exit_code_of(error)


def _end_unheard(error: OutputLostError, options: Sequence[str]) -> ExitCode:
    drop(sys.stdout)
    if isinstance(error.__cause__, BrokenPipeError):
        return ExitCode.PIPE_CLOSED
    _tell(error, options, message=str(error))
    return ExitCode.OUTPUT_LOST


def _tell(error: Exception, options: Sequence[str], *, message: str | None = None) -> None:
    from remote_ckpt.cli.output import print_error, print_traceback

    if "--traceback" in options:
        print_traceback(error)
    print_error(error, is_json="--json" in options, message=message)


def _usage_message(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    where = f" (see {context.command_path} --help)" if context is not None else ""
    return f"{error.format_message()}{where}"
