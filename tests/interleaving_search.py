"""Searching all orders in which actors can move, die, and be overtaken by time: each state is visited once.

A state is what the store holds, what its clock says, where each actor stands, and what was the checkpoint
until now. Two orders that lead to the same state go on as one, so a search that ends has seen *every*
schedule, and the number of schedules is counted without running them one by one. Where the space is too
large the search stops at a limit, and random walks with a fixed seed go on from there.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, NamedTuple, Protocol, TypeVar

from interleaving import Outcome, System

from remote_ckpt.keys import is_attempt_key, parse_manifest_key

DEAD = -1
"""The node of an actor whose process died."""

SAVERS = ("saver", "overwriter")
"""What the names of actors that save begin with; they end with the payload."""

_MAX_SHORTENED = 20_000

H = TypeVar("H")


class State(NamedTuple):
    """What can make a difference to what comes.

    Args:
        contents: Number of what the store holds.
        history: Number of what was until now.
        leaps: How often time leapt.
        asleep: Savers (a bit for each) that have been overtaken by a leap just before they create.
        crashes: How many actors have died.
        lost: How many answers have got lost.
        flying: Nodes whose requests were given up by those who made them, and may be carried out yet.
        nodes: Where the actors stand.
    """

    contents: int
    history: int
    leaps: int
    asleep: int
    crashes: int
    lost: int
    flying: tuple[int, ...]
    nodes: tuple[int, ...]


class Broken(AssertionError):
    """A promise is broken."""


class Promises(Protocol[H]):
    """What must hold. All three raise :class:`Broken`."""

    def begin(self, system: System) -> H:
        """Return the history of the first state."""
        ...

    def go_on(self, system: System, history: H, before: int, after: int) -> H:
        """Return the history after a step that changed the store's contents."""
        ...

    def check(self, system: System, history: H, contents: int, outcomes: Sequence[Outcome | None]) -> None:
        """Look at a state; None stands for actors that have not ended."""
        ...

    def check_end(self, system: System, history: H, contents: int, *, is_calm: bool) -> None:
        """Look at a state in which nobody moves any more; ``is_calm``: nobody died and time stood still."""
        ...


@dataclass(frozen=True)
class Limits:
    """How far a search goes.

    Args:
        crashes: How many actors may die in one schedule, each at any of its requests, before or after it.
        leaps: How far time may leap, in this order, at any moment; but only one leap may come between a
            saver's look at its deadline and its creating: no process sleeps that long there.
        lost: How many times the answer to a create may get lost, and the request be carried out at once, or
            at any time later, or never.
        is_reduced: Steps that concern nobody else are done at once: looking at the clock (unless it leaps),
            writing data under names of one's own, and, where nothing removes manifests, reading one.
        keeps_manifests: Nothing removes manifests.
        states: The search stops at so many.
        walks: So many random ones follow where it stopped.
    """

    crashes: int = 1
    leaps: tuple[timedelta, ...] = ()
    lost: int = 0
    is_reduced: bool = False
    keeps_manifests: bool = True
    states: int = 100_000
    walks: int = 500


@dataclass(frozen=True)
class Explored:
    """What a search saw; ``schedules`` counts the whole ones, those that walks took if it stopped."""

    states: int
    schedules: int
    is_exhausted: bool

    def __str__(self) -> str:
        how = "exhausted" if self.is_exhausted else "not exhausted"
        many = f"{self.schedules:.3g}" if self.schedules > 10**6 else str(self.schedules)
        return f"{self.states} states, {many} schedules, {how}"


class Search(Generic[H]):
    """A search of all that a system can do."""

    def __init__(self, system: System, promises: Promises[H], limits: Limits) -> None:
        self._system = system
        self._promises = promises
        self._limits = limits
        self._histories: list[H] = []
        self._numbers: dict[H, int] = {}
        self._successors: dict[tuple[int, int, int], int] = {}
        self._checked: set[object] = set()
        self._trail: list[State] = []

    def run(self) -> Explored:
        """Search; raises :class:`Broken` with a schedule that breaks a promise, a short one if there is."""
        first = State(
            self._system.first_contents,
            self._intern(self._promises.begin(self._system)),
            0,
            0,
            0,
            0,
            (),
            self._system.first_nodes,
        )
        try:
            self._check(first)
            counts, is_exhausted = self._search_all(first)
            if is_exhausted:
                return Explored(len(counts), counts[first], True)
            return self._walk(first, set(counts))
        except Broken as broken:
            raise Broken(self._shortest(first) or self._told(broken, self._trail)) from broken

    def _search_all(self, first: State) -> tuple[dict[State, int], bool]:
        """Visit all states, depth first; returns how many schedules lead from each to an end."""
        counts: dict[State, int] = {first: 0}
        stack: list[tuple[State, Iterator[State]]] = [(first, iter(self._moves(first)))]
        while stack:
            state, rest = stack[-1]
            for after in rest:
                if (known := counts.get(after)) is not None:
                    counts[state] += known
                    continue
                if len(counts) >= self._limits.states:
                    return counts, False
                self._trail = [*(each for each, _ in stack), after]
                self._check(after)
                moves = self._moves(after)
                counts[after] = 0 if moves else 1
                stack.append((after, iter(moves)))
                break
            else:
                stack.pop()
                if stack:
                    counts[stack[-1][0]] += counts[state]
        return counts, True

    def _walk(self, first: State, seen: set[State]) -> Explored:
        draw = random.Random(0)
        for _ in range(self._limits.walks):
            state, last, steadiness = first, None, draw.choice((0.0, 0.5, 0.9))
            self._trail = [first]
            while moves := self._moves(state):
                state, last = self._draw(draw, state, moves, last, steadiness)
                self._trail.append(state)
                if state not in seen:
                    seen.add(state)
                    self._check(state)
        return Explored(len(seen), self._limits.walks, False)

    def _draw(
        self, draw: random.Random, state: State, moves: Sequence[State], last: int | None, steadiness: float
    ) -> tuple[State, int | None]:
        """Mostly let somebody move, and often who moved last; death and leaps of time come now and then."""
        faults = state.crashes, state.leaps, state.lost
        living = [after for after in moves if (after.crashes, after.leaps, after.lost) == faults]
        others = [after for after in moves if (after.crashes, after.leaps, after.lost) != faults]
        if others and (not living or draw.random() < 0.04):
            return draw.choice(others), last
        steady = [after for after in living if _mover(state, after) == last]
        after = draw.choice(steady if steady and draw.random() < steadiness else living)
        return after, _mover(state, after)

    def _shortest(self, first: State) -> str | None:
        """Search again, breadth first, for the shortest schedule that breaks a promise."""
        self._checked.clear()
        before: dict[State, State | None] = {first: None}
        pending = deque([first])
        while pending and len(before) < min(self._limits.states, _MAX_SHORTENED):
            state = pending.popleft()
            try:
                self._check(state)
                moves = self._moves(state)
            except Broken as broken:
                return self._told(broken, _way(before, state))
            for after in moves:
                if after not in before:
                    before[after] = state
                    pending.append(after)
        return None

    def _told(self, broken: Broken, trail: Sequence[State]) -> str:
        return "\n".join([str(broken), *(self._label(*pair) for pair in itertools.pairwise(trail))])

    def _label(self, before: State, after: State) -> str:
        if after.leaps != before.leaps:
            return f"time leaps by {self._limits.leaps[before.leaps]}"
        mover = _mover(before, after)
        if mover is None:
            landed = [node for node in before.flying if node not in after.flying]
            return f"arrives late: {self._request(landed[0])}"
        name, request = self._system.names[mover], self._request(before.nodes[mover])
        if after.nodes[mover] == DEAD:
            return f"{name} dies"
        if after.lost != before.lost:
            fate = "is done" if after.flying == before.flying else "is on its way"
            return f"{name}: {request} -> the answer is lost, and it {fate}"
        ended = self._system.nodes[after.nodes[mover]].outcome
        return f"{name}: {request}" + (f" -> {ended.identity}" if ended else "")

    def _request(self, node: int) -> str:
        request = self._system.nodes[node].request
        return request.label if request is not None else ""

    # --- moves ---------------------------------------------------------------------------------------

    def _moves(self, state: State) -> list[State]:
        nodes = self._system.nodes
        able = [
            number for number, node in enumerate(state.nodes) if node != DEAD and nodes[node].outcome is None
        ]
        if self._limits.is_reduced:
            able = next(([number] for number in able if self._concerns_nobody(state, number)), able)
        found = [self._step(state, number) for number in able]
        if state.crashes < self._limits.crashes:
            found.extend(self._die(state, number) for number in able)
        if state.lost < self._limits.lost:
            for number in able:
                if self._is_create(state.nodes[number]):
                    found.extend(self._lose(state, number))
        found.extend(self._land(state, number) for number in range(len(state.flying)))
        if able and state.leaps < len(self._limits.leaps) and not state.asleep:
            found.append(self._leap(state, able))
        return found

    def _step(self, state: State, number: int) -> State:
        contents, node = self._system.step(number, state.contents, state.nodes[number])
        return self._changed(_moved(state, number, node), contents)

    def _die(self, state: State, number: int) -> State:
        return _moved(state, number, DEAD)._replace(crashes=state.crashes + 1)

    def _lose(self, state: State, number: int) -> Iterator[State]:
        at = state.nodes[number]
        after = _moved(state, number, self._system.lose(number, at))._replace(lost=state.lost + 1)
        yield self._changed(after, self._system.land(state.contents, at))
        yield after._replace(flying=(*state.flying, at))

    def _land(self, state: State, number: int) -> State:
        flying = (*state.flying[:number], *state.flying[number + 1 :])
        contents = self._system.land(state.contents, state.flying[number])
        return self._changed(state._replace(flying=flying), contents)

    def _changed(self, state: State, contents: int) -> State:
        if contents == state.contents:
            return state
        history = self._go_on(state.history, state.contents, contents)
        return state._replace(contents=contents, history=history)

    def _leap(self, state: State, able: Sequence[int]) -> State:
        asleep = 0
        for number in able:
            is_saver = self._system.names[number].startswith(SAVERS)
            if is_saver and self._is_create(state.nodes[number]):
                asleep |= 1 << number
        contents = self._system.later(state.contents, self._limits.leaps[state.leaps])
        return state._replace(contents=contents, leaps=state.leaps + 1, asleep=asleep)

    def _is_create(self, node: int) -> bool:
        request = self._system.nodes[node].request
        return request is not None and request.operation == "create"

    def _concerns_nobody(self, state: State, number: int) -> bool:
        request = self._system.nodes[state.nodes[number]].request
        assert request is not None
        if request.operation == "clock":
            return not self._limits.leaps
        if request.key is None:
            return False
        if request.operation == "write":
            return is_attempt_key(request.key)
        is_manifest = request.operation == "read" and parse_manifest_key(request.key) is not None
        return is_manifest and self._limits.keeps_manifests

    def _go_on(self, history: int, before: int, after: int) -> int:
        key = history, before, after
        if (known := self._successors.get(key)) is None:
            found = self._promises.go_on(self._system, self._histories[history], before, after)
            known = self._successors[key] = self._intern(found)
        return known

    def _intern(self, history: H) -> int:
        number = self._numbers.setdefault(history, len(self._histories))
        if number == len(self._histories):
            self._histories.append(history)
        return number

    # --- checks --------------------------------------------------------------------------------------

    def _check(self, state: State) -> None:
        nodes = self._system.nodes
        ended = tuple(
            node if node != DEAD and nodes[node].outcome is not None else None for node in state.nodes
        )
        is_over = all(node == DEAD or ended[number] is not None for number, node in enumerate(state.nodes))
        is_calm = not state.crashes and not state.leaps and not state.lost
        key = state.contents, state.history, ended, is_over, is_calm
        if key in self._checked:
            return
        self._checked.add(key)
        history = self._histories[state.history]
        outcomes = [None if node is None else nodes[node].outcome for node in ended]
        self._promises.check(self._system, history, state.contents, outcomes)
        if is_over:
            self._promises.check_end(self._system, history, state.contents, is_calm=is_calm)


def _way(before: dict[State, State | None], last: State) -> list[State]:
    way, state = [], last
    while (earlier := before[state]) is not None:
        way.append(state)
        state = earlier
    return [state, *reversed(way)]


def _moved(state: State, number: int, node: int) -> State:
    nodes = (*state.nodes[:number], node, *state.nodes[number + 1 :])
    return state._replace(nodes=nodes, asleep=state.asleep & ~(1 << number))


def _mover(before: State, after: State) -> int | None:
    """Who moved: None where it was time, or a request that nobody waits for."""
    changed = [number for number, node in enumerate(after.nodes) if node != before.nodes[number]]
    return changed[0] if changed else None
