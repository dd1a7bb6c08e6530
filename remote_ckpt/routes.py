"""From which checkpoint to which a copy goes, and which way its bytes take.

Inside one store they are copied by the store itself (hard links on a local disk), else they stream through
this process. What a copy is, and when it counts, is said elsewhere: :mod:`remote_ckpt.copies` and
:mod:`remote_ckpt.stock_copies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remote_ckpt.errors import AccessDeniedError
from remote_ckpt.log import logger
from remote_ckpt.moves import Move, Mover, run_all
from remote_ckpt.options import TransferOptions
from remote_ckpt.progress import ProgressCounter
from remote_ckpt.store.base import Store
from remote_ckpt.streams import StreamMover


@dataclass(frozen=True, slots=True)
class Shared:
    """A store above both checkpoints, which can copy from one to the other, and their paths in it."""

    store: Store
    source_path: str
    target_path: str


@dataclass(frozen=True, slots=True)
class Route:
    """From which checkpoint to which.

    Args:
        source_root: The run's directory that holds the source.
        source: Its name there.
        target_root: The run's directory that gets the copy.
        target: Its name there.
        shared: How the store itself can copy; None: the bytes stream through this process.
    """

    source_root: Store
    source: str
    target_root: Store
    target: str
    shared: Shared | None = None


def route_within(root: Store, source: str, target: str) -> Route:
    """Return the route from one name to another of the same directory."""
    return Route(root, source, root, target, Shared(root, source, target))


def choose_mover(route: Route, origin: Store, checkpoint: Store, options: TransferOptions) -> Mover:
    """Return the way to copy from ``origin`` to ``checkpoint``, the two ends of the route."""
    streams = StreamMover(origin, checkpoint, options)
    if route.shared is None:
        return streams
    # Below a common ancestor of two local roots there may be folders that may be passed, but not read.
    is_across = route.shared.store.capabilities.has_folders and route.source_root is not route.target_root
    return StoreMover(route, route.shared, checkpoint, options.concurrency, streams if is_across else None)


@dataclass(frozen=True, slots=True)
class StoreMover:
    """Copies inside one store, of which no byte passes through here.

    It works by the checkpoints' names. Where the target's name got another folder meanwhile, what was
    copied there is taken back.

    Args:
        route: What to copy.
        shared: What copies it.
        checkpoint: The target as it was opened.
        concurrency: Copies at once.
        otherwise: Copies what the shared store may not reach; None: that is an error.
    """

    route: Route
    shared: Shared
    checkpoint: Store
    concurrency: int
    otherwise: Mover | None = None

    def move(self, moves: Sequence[Move], counter: ProgressCounter) -> None:
        """See :meth:`Mover.move`."""
        refused: list[Move] = []

        def copy(move: Move) -> None:
            try:
                self._copy(move)
            except AccessDeniedError:
                if self.otherwise is None:
                    raise
                refused.append(move)
            else:
                counter.advance(done_bytes=move.size_bytes, done_objects=1)

        try:
            run_all(copy, moves, concurrency=self.concurrency)
        finally:
            if not self.checkpoint.is_current():
                self._take_back(moves)
        if refused and self.otherwise is not None:
            self.otherwise.move(refused, counter)

    def _copy(self, move: Move) -> None:
        shared = self.shared
        shared.store.copy(
            f"{shared.source_path}/{move.source_key}", f"{shared.target_path}/{move.target_key}"
        )

    def _take_back(self, moves: Sequence[Move]) -> None:
        # The keys are this attempt's own, so nothing else can be hit.
        root = self.route.target_root
        for failure in root.delete([f"{self.route.target}/{move.target_key}" for move in moves]):
            logger.warning("%s: cannot remove %s: %s", root.url, failure.key, failure.error)
