"""What long operations tell their caller while they run: values, and a counter that threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an operation is.

    Args:
        operation: The verb: ``"verify"``, ``"copy"``, ``"delete"``, ``"compare"``.
        done_bytes: Bytes that are done.
        total_bytes: Bytes in all, as far as known.
        done_objects: Objects that are done.
        total_objects: Objects in all, as far as known.
    """

    operation: str
    done_bytes: int = 0
    total_bytes: int = 0
    done_objects: int = 0
    total_objects: int = 0


OnProgress = Callable[[Progress], None]
"""Called after each advance, from worker threads, but by one at a time. It should return soon."""


class ProgressCounter:
    """Counts what is done, from any thread, and tells the caller each time.

    Args:
        operation: As in :class:`Progress`.
        on_progress: Told of each advance, and once at the beginning; None tells nobody.
        total_bytes: As in :class:`Progress`.
        total_objects: As in :class:`Progress`.
    """

    def __init__(
        self,
        operation: str,
        on_progress: OnProgress | None,
        *,
        total_bytes: int = 0,
        total_objects: int = 0,
    ) -> None:
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._now = Progress(operation=operation, total_bytes=total_bytes, total_objects=total_objects)
        self.advance()

    def advance(self, *, done_bytes: int = 0, done_objects: int = 0) -> None:
        """Add to what is done, and tell."""
        with self._lock:
            self._now = replace(
                self._now,
                done_bytes=self._now.done_bytes + done_bytes,
                done_objects=self._now.done_objects + done_objects,
            )
            if self._on_progress is not None:
                self._on_progress(self._now)
