"""``completion``: what a shell needs to complete the command line."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from remote_ckpt.cli.command import Command
from remote_ckpt.cli.output import Output, takes_output


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@takes_output
def completion(shell: str, out: Output) -> None:
    """Print the script that completes commands, options and folders in a shell.

    \b
    bash: eval "$(remote-ckpt completion bash)"                       in ~/.bashrc
    zsh:  eval "$(remote-ckpt completion zsh)"                        in ~/.zshrc
    fish: remote-ckpt completion fish > ~/.config/fish/completions/remote-ckpt.fish
    """
    script = _script(shell)
    out.show(lambda: {"shell": shell, "script": script}, lambda: script)


def _script(shell: str) -> str:
    root = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None  # click knows all three
    maker = kind(root, {}, "remote-ckpt", "_REMOTE_CKPT_COMPLETE")
    # Not maker.source(): for bash it runs the bash that it finds, which need not be the user's.
    return (maker.source_template % maker.source_vars()).strip()
