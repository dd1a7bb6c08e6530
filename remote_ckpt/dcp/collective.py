"""Agreement among ranks: all get the same value or the same error, and none waits for ever.

Everything here runs on a gloo group of our own, over the same ranks as the caller's group but with a
time limit of ours: the caller's group may have no CPU backend, a limit of seconds that an upload
exceeds, or collectives of the training loop in flight. It is made by
`new_group(use_local_synchronization=True) <https://pytorch.org/docs/stable/distributed.html>`_, so that
ranks outside a sub-group never take part, and lives as long as the group it was made for.
"""

from __future__ import annotations

import contextlib
import datetime
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from remote_ckpt.dcp.failures import (
    Failure,
    as_exception,
    cause_of,
    chosen,
    describe,
    interrupt_of,
    unwrap,
)
from remote_ckpt.errors import ConfigError, RemoteCkptError

T = TypeVar("T")

_own_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, weakref.WeakValueDictionary[float, dist.ProcessGroup]
] = weakref.WeakKeyDictionary()
"""Our groups by parent and limit. torch itself keeps groups alive until they are destroyed; we do not."""


class Group:
    """The ranks that take part in one operation.

    Every method except the properties is called by all of the ranks, in the same order, and blocks
    until all have come or the time limit is over.

    Args:
        process_group: Our own gloo group, or ``None`` for a single process.
        timeout_seconds: Longest wait for another rank.
        failure: Class of the error for what is not one of ours, and for a lost rank.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        timeout_seconds: float,
        failure: type[RemoteCkptError] = RemoteCkptError,
    ) -> None:
        self.process_group = process_group
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.timeout_seconds = timeout_seconds
        self.failure = failure

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the group's rank 0, which decides and commits."""
        return self.rank == 0

    def agree(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank and return this rank's result if all ranks succeeded.

        Raises:
            RemoteCkptError: On every rank, if it failed on any: the same error, of the type that the
                failing rank met, naming the rank.
        """
        try:
            result = work()
        except Exception as error:
            self.gather_status(error)
            raise  # only reached if the group took the failure for none, which gather_status rules out
        except BaseException as error:
            with contextlib.suppress(RemoteCkptError):
                self.gather_status(as_exception(error))
            raise  # an interrupt stays an interrupt here; the other ranks got an error
        self.gather_status(None)
        return result

    def gather_status(self, error: Exception | None) -> None:
        """Tell all ranks whether this one failed.

        Raises:
            RemoteCkptError: On every rank, if any rank reported an error.
        """
        mine = None if error is None else describe(error, self.rank)
        failures = [failure for failure in self._all_gather(mine) if failure is not None]
        if failures:
            raise chosen(failures, self.failure, self.world_size) from cause_of(failures, error, self.rank)

    def broadcast_from_coordinator(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 only and return its (picklable) result on every rank.

        Raises:
            RemoteCkptError: On every rank, if it failed; its ``rank`` is 0.
        """
        outcome: tuple[T | None, Failure | None] = (None, None)
        error: Exception | None = None
        if self.is_coordinator:
            try:
                outcome = work(), None
            except Exception as caught:
                error = caught
                outcome = None, describe(caught, self.rank)
            except BaseException as caught:
                with contextlib.suppress(RemoteCkptError):
                    self._broadcast((None, describe(as_exception(caught), self.rank)))
                raise  # as in agree
        value, failure = self._broadcast(outcome)
        if failure is not None:
            raise chosen([failure], self.failure, self.world_size) from cause_of([failure], error, self.rank)
        return value  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._all_gather(None)

    @contextlib.contextmanager
    def translated(self, *, lost: type[RemoteCkptError] | None = None) -> Iterator[None]:
        """Turn errors of torch's own collective calls on this group into ours.

        Args:
            lost: Class of the error for a lost rank, by default :attr:`failure`.

        Raises:
            RemoteCkptError: For a ``CheckpointException``, as :func:`~remote_ckpt.dcp.failures.unwrap`
                says, and for a lost rank.
            KeyboardInterrupt, SystemExit: Where that is what this rank itself met, rather than the error
                that the other ranks get.
        """
        try:
            yield
        except CheckpointException as error:
            if (interrupt := interrupt_of(error, self.rank)) is not None:
                raise interrupt from error
            raise unwrap(error, self.failure, world_size=self.world_size) from error
        except RuntimeError as error:
            if isinstance(error, RemoteCkptError) or self.process_group is None:
                raise
            raise self._lost(error, lost or self.failure) from error

    def _all_gather(self, value: T) -> list[T]:
        if self.process_group is None:
            return [value]
        values: list[T] = [value] * self.world_size
        with self.translated():
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def _broadcast(self, value: T) -> T:
        if self.process_group is None:
            return value
        box = [value]
        with self.translated():
            source = dist.get_global_rank(self.process_group, 0)
            dist.broadcast_object_list(box, src=source, group=self.process_group)
        return box[0]

    def _lost(self, error: RuntimeError, kind: type[RemoteCkptError]) -> RemoteCkptError:
        """Describe a broken collective and close our connections, so that the others learn of it at once.

        A rank waits for its neighbours only. Without the closing, those that are not neighbours of the
        rank that died would wait for the whole time limit.
        """
        traceback.clear_frames(error.__traceback__)  # they hold the group, and with it the connections
        own, self.process_group = self.process_group, None
        with contextlib.suppress(Exception):  # the group is broken; there is nobody left to tell
            dist.destroy_process_group(own)
        did_time_out = "timed out" in str(error).lower()
        happened = f"did not answer within {self.timeout_seconds:g} s" if did_time_out else "died"
        return kind(
            f"rank {self.rank} of {self.world_size} lost contact: another rank {happened}. "
            "What was already committed is untouched; list the checkpoints to see whether this one is"
        )


def open_group(
    process_group: dist.ProcessGroup | None,
    *,
    timeout_seconds: float,
    failure: type[RemoteCkptError] = RemoteCkptError,
) -> Group:
    """Return the group to agree on; all ranks of ``process_group`` call this together.

    Operations with the same limit share a group, so they must not overlap: two threads of a process (an
    asynchronous save beside a load, say) need process groups of their own, or limits that differ.

    Args:
        process_group: The caller's group; ``None`` means the default one. Without initialised
            ``torch.distributed``, or with a single rank, the result is a group of one that never waits.
        timeout_seconds: Longest wait for another rank.
        failure: See :class:`Group`.

    Raises:
        ConfigError: This rank is not in the group, or torch was built without gloo.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Group(None, timeout_seconds=timeout_seconds, failure=failure)
    parent = dist.group.WORLD if process_group is None else process_group
    if not isinstance(parent, dist.ProcessGroup) or dist.get_rank(parent) < 0:
        raise ConfigError("this rank is not part of the process group: only its members take part")
    own = None if dist.get_world_size(parent) == 1 else _own_group(parent, timeout_seconds)
    return Group(own, timeout_seconds=timeout_seconds, failure=failure)


def _own_group(parent: dist.ProcessGroup, timeout_seconds: float) -> dist.ProcessGroup:
    siblings = _own_groups.setdefault(parent, weakref.WeakValueDictionary())
    known = siblings.get(timeout_seconds)
    if known is not None and _is_alive(known):
        return known
    if not dist.is_gloo_available():
        raise ConfigError("torch was built without gloo, which carries the agreement between ranks")
    own: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(parent),
        backend="gloo",
        timeout=datetime.timedelta(seconds=timeout_seconds),
        use_local_synchronization=True,
    )
    siblings[timeout_seconds] = own
    return own


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group: destroyed ones can outlive that as Python objects."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False
