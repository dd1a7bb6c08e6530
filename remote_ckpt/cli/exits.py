"""Exit codes, and how an error becomes one."""

from __future__ import annotations

import enum
from typing import Any, Final

from remote_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    IntegrityError,
    RemoteCkptError,
    SaveFailedError,
    StoreError,
    UntrustedDataError,
)


class ExitCode(enum.IntEnum):
    """What the process's exit code says. ``docs/command-line.md`` lists them."""

    DONE = 0
    NO = 1
    WRONG_CALL = 2
    NOT_FOUND = 3
    STORE_FAILED = 4
    REFUSED = 5
    UNREADABLE = 6
    INTERNAL = 70
    OUTPUT_LOST = 74
    INTERRUPTED = 130
    PIPE_CLOSED = 141


MEANINGS: Final = {
    ExitCode.DONE: "done, or the plan was shown",
    ExitCode.NO: "the answer is no: damaged, different, or something could not be deleted",
    ExitCode.WRONG_CALL: "the call cannot work as given",
    ExitCode.NOT_FOUND: "there is no such checkpoint",
    ExitCode.STORE_FAILED: "the store failed, so nothing is known",
    ExitCode.REFUSED: "refused: pinned, in the way, changed meanwhile, or undecided",
    ExitCode.UNREADABLE: "the checkpoint is damaged, or of a format that is not read",
    ExitCode.INTERNAL: "an error of the program itself",
    ExitCode.OUTPUT_LOST: "the output could not be written; what was asked for is done",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.PIPE_CLOSED: "whoever read the output went away",
}

_CODES: Final[tuple[tuple[type[RemoteCkptError], ExitCode], ...]] = (
    # An IntegrityError is a StoreError, but it is the checkpoint that is damaged.
    (IntegrityError, ExitCode.UNREADABLE),
    (CheckpointDamagedError, ExitCode.UNREADABLE),
    (FormatError, ExitCode.UNREADABLE),
    (UntrustedDataError, ExitCode.UNREADABLE),
    (CheckpointNotFoundError, ExitCode.NOT_FOUND),
    (ConfigError, ExitCode.WRONG_CALL),
    (StoreError, ExitCode.STORE_FAILED),
    (SaveFailedError, ExitCode.STORE_FAILED),  # of a copy
    (CheckpointError, ExitCode.REFUSED),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of an error of this package; of any other, that of a programming error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.INTERNAL)


def error_document(error: BaseException, *, message: str | None = None) -> dict[str, Any]:
    """Return an error as JSON shows it."""
    return {
        "type": type(error).__name__,
        "message": error_message(error) if message is None else message,
        **{name: getattr(error, name, None) for name in ("url", "key", "step")},
    }


def error_message(error: BaseException) -> str:
    """Return what to tell of an error, on one line."""
    if isinstance(error, RemoteCkptError):
        return str(error)
    import traceback

    last = traceback.format_exception_only(error)[-1].strip()
    return f"unexpected {last} (--traceback shows where)"
