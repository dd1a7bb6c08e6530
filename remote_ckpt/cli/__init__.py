"""The command line: ``remote-ckpt``. ``docs/command-line.md`` describes it.

Commands only ask :class:`~remote_ckpt.directory.CheckpointDirectory` and show what it answers. Each is loaded
when it is called, and so is everything that it needs: the start takes a tenth of a second.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line with the process's arguments, and exit with its code."""
    from remote_ckpt.cli.app import app

    app()
