"""Progress bars; only loaded where stderr is a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.progress import Task as RichTask
from rich.text import Text

from remote_ckpt.cli.text import format_bytes
from remote_ckpt.progress import Progress


class Bar:
    """One bar, in bytes where an operation counts bytes, else in objects; gone when it is done."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._task: TaskID | None = None
        self._rich = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _AmountColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> Bar:
        self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rich.stop()

    def show(self, progress: Progress) -> None:
        """Move the bar."""
        is_bytes = progress.total_bytes > 0
        total = progress.total_bytes if is_bytes else progress.total_objects
        done = progress.done_bytes if is_bytes else progress.done_objects
        if self._task is None:
            self._task = self._rich.add_task(self._label, total=total or None, is_bytes=is_bytes)
        self._rich.update(self._task, total=total or None, completed=done, is_bytes=is_bytes)


class _AmountColumn(ProgressColumn):
    """How much of how much, and how fast."""

    def render(self, task: RichTask) -> Text:
        done, total = int(task.completed), int(task.total or 0)
        if not task.fields["is_bytes"]:
            return Text(f"{done} of {total or '?'}")
        speed = f" {format_bytes(int(task.speed))}/s" if task.speed else ""
        return Text(f"{format_bytes(done)} of {format_bytes(total)}{speed}")
