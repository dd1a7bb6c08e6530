"""Where a run's checkpoints are, and how to get there: what every operation on a directory begins with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_ckpt.options import Options
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store
from remote_ckpt.url import Location, parse_location, to_path

if TYPE_CHECKING:
    from upath import UPath

    CheckpointPath = str | os.PathLike[str] | UPath


@dataclass(frozen=True, slots=True)
class Place:
    """A run's directory and what it takes to open it. Pickles, unlike an open store.

    Args:
        location: The run's directory.
        storage_options: Options of the store; they may hold secrets and are never shown.
        transport: As in :func:`~remote_ckpt.store.open_store`.
        options: Retries and deadlines.
    """

    location: Location
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    transport: str | None = None
    options: Options = field(default_factory=Options)

    def open(self) -> Store:
        """Return the store of the directory; the caller closes it. Asks the store nothing yet."""
        return open_store(
            self.location,
            storage_options=self.storage_options,
            transport=self.transport,
            options=self.options,
        )

    @contextmanager
    def opened(self) -> Iterator[Store]:
        """The store of the directory, closed at the end."""
        with closing(self.open()) as store:
            yield store

    def path_of(self, name: str) -> Path | UPath:
        """The path that callers get; a remote one carries the options it takes to open it."""
        options = {**self.location.options, **(self.storage_options or {})}
        return to_path(replace(self.location, options=options).join(name))


def place_of(
    path: CheckpointPath | Location,
    *,
    storage_options: Mapping[str, Any] | None = None,
    transport: str | None = None,
    options: Options | None = None,
) -> Place:
    """Return the place that a path, a URL or a ``UPath`` names; errors as ``parse_location``."""
    location = path if isinstance(path, Location) else parse_location(path)
    return Place(location, storage_options, transport, options or Options())
