"""The command line: ``remote-ckpt``. ``docs/command-line.md`` describes it.

Commands only ask :class:`~remote_ckpt.directory.CheckpointDirectory` and show what it answers. Each is loaded
when it is called, and so is everything that it needs: the start takes a tenth of a second.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line with the process's arguments, and exit with its code."""
    try:
        from remote_ckpt.cli.streams import open_missing_streams

        open_missing_streams()
        from remote_ckpt.cli.app import app

        app()
    except KeyboardInterrupt:
        # While it starts or ends; what comes between is app's matter.
        raise SystemExit(130) from None
