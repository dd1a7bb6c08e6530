"""Commands that take several checkpoints: each is dealt with, whatever became of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType

from remote_ckpt.cli.access import Named
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output
from remote_ckpt.errors import ConfigError, RemoteCkptError

_NONE: Mapping[str, str] = MappingProxyType({})


class Outcomes:
    """Remembers what became of each checkpoint; the first error decides the exit code.

    An answer "no" counts only where there was no error: with one, the answer is not known.
    """

    def __init__(self, out: Output) -> None:
        self._out = out
        self._codes: list[ExitCode] = []

    def of(self, named: Named) -> AbstractContextManager[None]:
        """Deal with one checkpoint: an error of it is told, and the next one has its turn.

        A wrong call ends the command: it is as wrong for the others.
        """
        return self.of_url(named.url, named.name)

    @contextmanager
    def of_url(self, url: str, name: str, *, others: Mapping[str, str] = _NONE) -> Iterator[None]:
        """Like :meth:`of`; an error may also be one of ``others``, which are names by URL."""
        try:
            yield
        except ConfigError:
            raise
        except RemoteCkptError as error:
            error.url = error.url or url
            if error.step is None:
                error.step = {**others, url: name}.get(error.url)
            self._codes.append(self._out.fail(error))

    def say_no(self) -> None:
        """One of the answers is "no"."""
        self._codes.append(ExitCode.NO)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command."""
        errors = [code for code in self._codes if code is not ExitCode.NO]
        return next(iter(errors or self._codes), ExitCode.DONE)
