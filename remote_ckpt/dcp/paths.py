"""What names a checkpoint in calls of torch: paths, URLs, and ids relative to a writer's or reader's own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from remote_ckpt.url import Location, parse_location

if TYPE_CHECKING:
    from upath import UPath

CheckpointPath: TypeAlias = "str | os.PathLike[str] | UPath"
"""A local path, a URL, a ``Path`` or a ``UPath``."""


def resolve_checkpoint_id(base: Location | None, checkpoint_id: CheckpointPath) -> Location:
    """Return where ``checkpoint_id`` lies: a relative one below a remote ``base``.

    It must never turn silently into a folder of the working directory, where nobody would look for it.
    Below a local ``base``, or without one, it is an ordinary path.

    Args:
        base: What the writer or reader was made with; None if nothing.
        checkpoint_id: As ``dcp.save`` or ``dcp.load`` got it.

    Raises:
        UrlError: Malformed, or with ``..`` below a remote base.
    """
    text = _text(checkpoint_id)
    is_relative = ":/" not in text and not text.startswith(("/", "~"))
    if base is None or base.is_local or not is_relative:
        return parse_location(checkpoint_id)
    return base.join(text.rstrip("/"))


def _text(path: CheckpointPath) -> str:
    # A remote UPath is no os.PathLike; its text is its URL. Bytes are for parse_location to refuse.
    return os.fsdecode(path) if isinstance(path, str | os.PathLike) else str(path)
