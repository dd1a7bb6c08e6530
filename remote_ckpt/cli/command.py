"""What commands refuse before they run. No message repeats what may be a secret in a wrong place."""

from __future__ import annotations

from typing import Any

import click

from remote_ckpt.cli.streams import writing_output
from remote_ckpt.cli.values import names_secret


class Command(click.Command):
    """A command that does not repeat arguments which it did not expect, as click's own would."""

    # click then leaves it to us to refuse them.
    allow_extra_args = True

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Like click's, which writes ``--help`` here."""
        with writing_output():
            return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and refuse what is left over."""
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            arguments = "argument" if len(rest) == 1 else "arguments"
            ctx.fail(
                f"got {len(rest)} unexpected {arguments}, not repeated here; "
                "options are repeated for each value: --storage-option A=1 --storage-option B=2"
            )
        return rest


def check_path(path: str) -> str:
    """Return a path or URL; refuse ``secret=...``, which lacks its ``--storage-option``.

    It would be taken for a path, shown in errors, and handed to ``rm`` as a checkpoint.
    """
    key, equals, _ = path.partition("=")
    if equals and names_secret(key):
        raise click.BadParameter(f"give --storage-option before {key}=..., or ./{key}=... if it is a path")
    return path
