"""Real code taken apart at its store calls, so that a scheduler owns every one of them.

An actor is ordinary code that is given a store. Names, times and waits that it would draw itself are fixed
(:func:`determined`), so what it does next follows from the answers that the store gave it until now. It is
run from its beginning with those answers, and stopped at the first request that has none yet: that request
is its *node*, and is kept. So each step of each actor is found out once, by the real code, however many
schedules lead there, and no thread has to wait for its turn.

A request is carried out by a real memory store that holds the objects of the state that is explored. Its
clock stands still, but where a setting moves it: real stores tell times by the second, too, and two states
that differ in nothing but their history are one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone, tzinfo
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch

from remote_ckpt import discover, keys, sweep_scan
from remote_ckpt.errors import RemoteCkptError, StoreUnavailableError
from remote_ckpt.generation import REAL_TIME
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest
from remote_ckpt.pruning import PruneReport
from remote_ckpt.store.base import Store
from remote_ckpt.store.memory import MemoryStore, _Bucket
from remote_ckpt.store.wrappers import DelegatingStore
from remote_ckpt.sweep import SweepReport

T = TypeVar("T")
Act = Callable[[Store], object]

T0 = datetime(2030, 1, 1, tzinfo=timezone.utc)
CHANGES = frozenset({"write", "write_stream", "create", "delete", "copy"})
_ERA = timedelta(days=2)


class Paused(BaseException):
    """The actor asked for what nobody has answered yet."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.label)
        self.request = request


@dataclass(frozen=True, slots=True)
class Request:
    """One store call that waits for its turn.

    Args:
        key: Relative to the scope that was asked; None for deletions and the clock.
        label: For traces.
        call: Carries it out on the memory store.
    """

    operation: str
    key: str | None
    label: str
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to: a value, or an error that the code gets."""

    value: object = None
    error: Exception | None = None

    @property
    def identity(self) -> object:
        """Equal for answers that the code cannot tell apart."""
        if self.error is not None:
            return type(self.error), str(self.error)
        return tuple(self.value) if isinstance(self.value, list) else self.value


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an actor ended."""

    result: object = None
    error: Exception | None = None

    @property
    def identity(self) -> object:
        """Equal for outcomes between which no promise makes a difference."""
        if self.error is not None:
            return type(self.error), str(self.error)
        if isinstance(self.result, Manifest):
            return self.result.save_id, tuple(sorted(self.result.metrics.items()))
        if isinstance(self.result, SweepReport):
            return self.result.failures
        if isinstance(self.result, PruneReport):
            failures = [(failure.name, str(failure.error)) for failure in self.result.failures]
            return self.result.deleted, tuple(failures)
        return self.result


@dataclass(slots=True, eq=False)
class Node:
    """Where an actor stands: the answers that it got until now, and what it asks for next or came to."""

    number: int
    parent: Node | None = None
    answer: Answer | None = None
    request: Request | None = None
    outcome: Outcome | None = None
    children: dict[object, Node] = field(default_factory=dict)

    @property
    def answers(self) -> list[Answer]:
        found: list[Answer] = []
        node: Node | None = self
        while node is not None and node.answer is not None:
            found.append(node.answer)
            node = node.parent
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Contents:
    """What the store holds (never changed in place), and what its clock says."""

    objects: dict[str, tuple[bytes, datetime]]
    now: datetime


# --- making code follow from its answers -------------------------------------------------------------


class _Fate:
    """What an actor would draw by itself: names of its own, time that passes only while it waits."""

    def __init__(self) -> None:
        self.begin("00")

    def begin(self, actor: str, now: datetime = T0) -> None:
        self.actor = actor
        self.drawn = 0
        self.seconds = 0.0
        self.now = now

    def token_hex(self, count: int) -> str:
        self.drawn += 1
        return f"{self.actor}{self.drawn:02x}".rjust(2 * count, "a")

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


_fate = _Fate()


class _HostTime(datetime):
    """The host's clock: what the store said last."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return _fate.now


class _InlinePool:
    """A pool that does one thing after the other: an actor's own threads are no actors."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _InlinePool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, call: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
        return map(call, items)


@contextmanager
def determined() -> Iterator[None]:
    """Make all code in this process follow from its stores' answers, while the context lasts."""
    real = REAL_TIME.monotonic, REAL_TIME.sleep, REAL_TIME.jitter
    fake = (lambda: _fate.seconds), _fate.sleep, (lambda: 0.5)
    with ExitStack() as stack:
        stack.enter_context(patch.object(keys, "secrets", SimpleNamespace(token_hex=_fate.token_hex)))
        stack.enter_context(patch.object(keys, "datetime", _HostTime))
        stack.enter_context(patch.object(sweep_scan, "datetime", _HostTime))
        for module in (sweep_scan, discover):
            stack.enter_context(patch.object(module, "ThreadPoolExecutor", _InlinePool))
        stack.enter_context(patch.object(logger, "disabled", True))
        _set_time(*fake)
        stack.callback(_set_time, *real)
        yield


def _set_time(monotonic: Callable[[], float], sleep: Callable[[float], None], jitter: Any) -> None:
    # The default of many functions, bound when they were defined: it cannot be replaced, only changed.
    for name, value in (("monotonic", monotonic), ("sleep", sleep), ("jitter", jitter)):
        object.__setattr__(REAL_TIME, name, value)


class _StandingBucket(_Bucket):
    """A bucket whose clock moves only when it is told to, or by a tick with each write."""

    tick = timedelta(0)

    def now(self) -> datetime:
        return self.last


class _Scripted(DelegatingStore):
    """The store as an actor sees it: known answers again, then a pause."""

    def __init__(self, inner: Store, answers: Iterator[Answer]) -> None:
        super().__init__(inner)
        self._answers = answers

    def _wrap(self, inner: Store) -> _Scripted:
        return _Scripted(inner, self._answers)

    def _invoke(self, operation: str, key: str | None, call: Callable[[], T]) -> T:
        answer: Answer | None = next(self._answers, None)
        if answer is None:
            place = self.url.partition("//")[2].partition("/")[2]
            label = " ".join(part for part in (operation, place, key) if part)
            raise Paused(Request(operation, key, label, call))
        if operation == "clock" and isinstance(answer.value, datetime):
            _fate.now = answer.value
        if answer.error is not None:
            raise copy.copy(answer.error)
        return cast(T, list(answer.value) if isinstance(answer.value, list) else answer.value)

    def close(self) -> None:
        """Leave the scope open: a request that was kept is carried out later."""


# --- all actors over one store -----------------------------------------------------------------------


class System:
    """Actors over one store: what each step of each actor comes to, found out once.

    Args:
        acts: What the actors do, by name.
        prepare: Fills the store; what it wrote is two days old when the actors begin.
        ticks: The clock moves on by a second with each write, so that times tell what came first.
    """

    def __init__(self, acts: dict[str, Act], prepare: Act, *, ticks: bool = False) -> None:
        self.names = list(acts)
        self.store = MemoryStore.fresh()
        self._bucket = _StandingBucket(last=T0 - _ERA)
        self.store._bucket = self._bucket
        self._tick = timedelta(seconds=1) if ticks else timedelta(0)
        self.contents: list[Contents] = []
        self.nodes: list[Node] = []
        self._numbers: dict[object, int] = {}
        self._ended: dict[object, Node] = {}
        self._steps: dict[tuple[int, int], tuple[int, int]] = {}
        self._landed: dict[tuple[int, int], int] = {}
        _fate.begin("ee", T0 - _ERA)
        prepare(self.store)
        self.first_contents = self.intern(Contents(dict(self._bucket.objects), T0))
        self._acts = list(acts.values())
        self.first_nodes = tuple(self._grow(number, None, None).number for number in range(len(acts)))

    def intern(self, contents: Contents) -> int:
        """Return the number of what a store holds; equal contents have the same one."""
        key = frozenset(contents.objects.items()), contents.now
        number = self._numbers.setdefault(key, len(self.contents))
        if number == len(self.contents):
            self.contents.append(contents)
        return number

    def load(self, number: int, *, delay: timedelta = timedelta(0)) -> MemoryStore:
        """Return the bare store with contents of that number, and so much later for whoever goes on there."""
        contents = self.contents[number]
        self._bucket.objects = dict(contents.objects)
        self._bucket.last = contents.now + delay
        _fate.begin("ff", self._bucket.last)
        return self.store

    def later(self, number: int, delay: timedelta) -> int:
        """Return the number of the same objects at a later time."""
        contents = self.contents[number]
        return self.intern(Contents(contents.objects, contents.now + delay))

    def step(self, actor: int, contents: int, node: int) -> tuple[int, int]:
        """Carry out an actor's next request; returns the contents and the actor's node after it."""
        key = contents, node
        if (known := self._steps.get(key)) is None:
            after, answer = self._carry_out(contents, node)
            known = self._steps[key] = after, self._child(actor, node, answer)
        return known

    def land(self, contents: int, node: int) -> int:
        """Carry out a request whose answer nobody hears; returns the contents after it."""
        key = contents, node
        if (known := self._landed.get(key)) is None:
            known = self._landed[key] = self._carry_out(contents, node)[0]
        return known

    def lose(self, actor: int, node: int) -> int:
        """Return the actor's node where it never hears what became of its request."""
        return self._child(actor, node, Answer(error=StoreUnavailableError("the answer was lost")))

    def _carry_out(self, contents: int, node: int) -> tuple[int, Answer]:
        request = self.nodes[node].request
        assert request is not None
        self.load(contents)
        try:
            answer = Answer(request.call())
        except RemoteCkptError as error:
            answer = Answer(error=error.with_traceback(None))
        if request.operation not in CHANGES:
            return contents, answer
        return self.intern(Contents(self._bucket.objects, self.contents[contents].now + self._tick)), answer

    def _child(self, actor: int, node: int, answer: Answer) -> int:
        at = self.nodes[node]
        if (child := at.children.get(answer.identity)) is None:
            child = at.children[answer.identity] = self._grow(actor, at, answer)
        return child.number

    def _grow(self, actor: int, parent: Node | None, answer: Answer | None) -> Node:
        node = Node(len(self.nodes), parent, answer)
        _fate.begin(f"{actor:02x}")
        request, outcome = self._run(actor, node.answers)
        node.request, node.outcome = request, outcome
        if outcome is not None:
            # Ended is ended: the way there makes no difference any more.
            known = self._ended.setdefault((actor, outcome.identity), node)
            if known is not node:
                return known
        self.nodes.append(node)
        return node

    def _run(self, actor: int, answers: Sequence[Answer]) -> tuple[Request | None, Outcome | None]:
        script = iter(answers)
        try:
            result = self._acts[actor](_Scripted(self.store, script))
        except Paused as pause:
            return pause.request, None
        except Exception as error:
            return None, Outcome(error=error.with_traceback(None))
        assert next(script, None) is None, "the actor did not repeat itself"
        return None, Outcome(result)
