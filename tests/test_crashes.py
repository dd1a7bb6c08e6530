"""The process dies before or after every single store call of every operation; then we look at the promises.

Each operation is run once to its end, which tells its calls and the state before and after. Then it is run
again from the same beginning for each call k, and the process dies before call k, or just after it was done.
What is left is read whole from outside. From each content that was left (calls that change nothing leave the
same) three ways go on: the same operation again, a save, and a sweep two days later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from crashing import (
    CHANGES,
    FOREIGN,
    Act,
    Area,
    Death,
    Scene,
    Seen,
    Stage,
    States,
    check_foreign,
    check_is_swept,
    check_published,
    load,
    look,
    make_stage,
)
from sweeping import MARKER, PROBE

from remote_ckpt import CheckpointNotFoundError, CheckpointPinnedError, KeepLast
from remote_ckpt.testing.faults import StoreCall


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return make_stage(monkeypatch)


# --- operations --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """An operation, and where it works.

    Args:
        act: The operation.
        prepare: What makes what there is before, beside what there always is.
        after: What becomes of which checkpoints; None: they are gone.
        name: The checkpoint that it changes.
        at: The directory that it is in: 0 for the run's, 1 for the other.
        refusal: What it says once it was done already.
    """

    act: Act
    prepare: Sequence[Act] = ()
    after: Mapping[str, Seen | None] = field(default_factory=dict)
    name: str = "10"
    at: int = 0
    refusal: type[Exception] | None = None

    def begin(self, stage: Stage, area: Area) -> Scene:
        """Set the scene: a pinned checkpoint, another one, files of others, and what this needs."""
        scene = Scene(stage, area, 1 + self.at)
        scene.save("1", 1)
        scene.save("2", 2)
        scene.directory().annotate("1", metrics={"loss": 0.5})
        scene.directory().pin("1")
        scene.write_foreign(*FOREIGN)
        for act in self.prepare:
            act(scene)
        return scene

    def run(self, scene: Scene) -> None:
        """Do it, or have it refused because it was done before."""
        with suppress(*() if self.refusal is None else (self.refusal,)):
            self.act(scene)

    def states(self, scene: Scene) -> tuple[States, States]:
        """What there is before, and what there must be after."""
        before = look(scene)
        changed = {**before[self.at], **self.after}
        after = {name: seen for name, seen in changed.items() if seen is not None}
        return before, (*before[: self.at], after)


def saved(name: str, number: int, *, at: int = 0) -> Act:
    return lambda scene: scene.save(name, number, at=at)


def pinned(scene: Scene) -> object:
    return scene.directory().pin("10")


def deleted(name: str) -> Act:
    return lambda scene: scene.directory().delete(name)


def rated(scene: Scene) -> object:
    return scene.directory().annotate("10", metrics={"loss": 0.25})


def beside_a_file_of_others(scene: Scene) -> None:
    scene.write_foreign("10/notes.txt")


def pruned(scene: Scene) -> None:
    report = scene.directory().prune(KeepLast(1))
    assert (report.failures, report.spared) == ((), ())


def kept(name: str) -> Act:
    return lambda scene: scene.directory().keep_copy(name)


def copied(scene: Scene) -> object:
    return scene.directory().copy_to(scene.directory(1), "10", overwrite=True)


def copied_in_part(scene: Scene) -> None:
    how = "write_stream" if scene.area.kind == "two buckets" else "copy"
    scene.die(copied, how)
    assert any(".distcp" in info.key for info in scene.store(1).list("10/"))


def replaced_in_part(scene: Scene) -> None:
    scene.save("10", 9)
    scene.die(saved("10", 10), "create")


def deleted_in_part(scene: Scene) -> None:
    scene.save("30", 30)
    scene.write_foreign("30/notes.txt")
    scene.die(deleted("30"), "create")


def everything_left(scene: Scene) -> None:
    """Leave all that killed operations leave: uncommitted, replaced, half deleted, half copied, scratch."""
    replaced_in_part(scene)
    scene.die(saved("20", 20), "create", is_done=False)
    deleted_in_part(scene)
    scene.save("40", 40)
    scene.die(kept("40"), "create")
    scene.save("40", 41)
    scene.die(kept("40"), "create", is_done=False)
    for key in (PROBE, MARKER):
        scene.store().write(key, b"x")


def swept(*, tombstones: bool) -> Act:
    return lambda scene: scene.sweep(tombstones=tombstones)


TEN = saved("10", 10)
OPERATIONS: dict[str, Operation] = {
    "first save": Operation(saved("10", 11), after={"10": Seen(11)}),
    "replacing save": Operation(saved("10", 11), [TEN], {"10": Seen(11)}),
    "save of a pinned one": Operation(saved("10", 11), [TEN, pinned], refusal=CheckpointPinnedError),
    "delete": Operation(deleted("10"), [TEN], {"10": None}, refusal=CheckpointNotFoundError),
    "delete beside a file of others": Operation(
        deleted("10"), [TEN, beside_a_file_of_others], {"10": None}, refusal=CheckpointNotFoundError
    ),
    "delete of a pinned one": Operation(deleted("10"), [TEN, pinned], refusal=CheckpointPinnedError),
    "prune": Operation(pruned, [saved("3", 3), TEN], {"2": None, "3": None}, name="3"),
    "keep copy": Operation(kept("10"), [TEN], {"10_keep": Seen(10)}, name="10_keep"),
    "replacing keep copy": Operation(
        kept("10"), [saved("10", 9), kept("10"), TEN], {"10_keep": Seen(10)}, name="10_keep"
    ),
    "copy": Operation(copied, [TEN], {"10": Seen(10)}, at=1),
    "replacing copy": Operation(copied, [TEN, saved("10", 9, at=1)], {"10": Seen(10)}, at=1),
    "resumed copy": Operation(copied, [TEN, copied_in_part], {"10": Seen(10)}, at=1),
    "pin": Operation(pinned, [TEN], {"10": Seen(10, is_pinned=True)}),
    "annotate": Operation(rated, [TEN], {"10": Seen(10, metrics={"loss": 0.25})}),
    "sweep": Operation(swept(tombstones=False), [everything_left]),
    "sweep after a replacement": Operation(swept(tombstones=False), [replaced_in_part]),
    "sweep of tombstones": Operation(swept(tombstones=True), [deleted_in_part]),
}
CASES = [
    *((name, kind) for name in OPERATIONS for kind in ("memory", "local")),
    *((name, "two buckets") for name, operation in OPERATIONS.items() if operation.at == 1),
]


# --- dying -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_crash_at_any_call_breaks_no_promise_and_is_overcome(
    stage: Stage, tmp_path: Path, name: str, kind: str, record_property: Callable[[str, object], None]
) -> None:
    operation, area = OPERATIONS[name], Area(kind, tmp_path)
    scene = operation.begin(stage, area)
    before, after = operation.states(scene)
    calls = undisturbed(operation, scene, after)
    seen, count, went_on = [], 0, set()
    for death in deaths(len(calls)):
        dead = scene.fork()
        assert stage.dies(partial(operation.run, dead), death), f"it did not die {death}"
        count += 1
        state = check_dead(dead, before, after)
        seen.append(state)
        if (content := dead.content()) not in went_on:  # a call that changes nothing leaves the same
            went_on.add(content)
            check_ways_on(dead, state, after, operation)
        dead.remove()
    assert not stage.dies(lambda: operation.run(scene), Death(len(calls) + 1, is_done=False))
    assert before in seen
    assert after in seen
    assert count == 2 * len(calls)
    tell(record_property, f"{name}, {kind}", calls=len(calls), crashes=count, contents=len(went_on))


@pytest.mark.parametrize(
    "name", ["delete", "replacing save", "sweep after a replacement", "sweep of tombstones"]
)
def test_a_crash_of_the_recovery_from_any_crash_is_overcome_too(
    stage: Stage, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    """The first death is before each call that changes anything, or after the last; others leave the same."""
    operation = OPERATIONS[name]
    scene = operation.begin(stage, Area("memory", tmp_path))
    before, after = operation.states(scene)
    changes = [call.number for call in undisturbed(operation, scene, after) if call.operation in CHANGES]
    firsts = [Death(number, is_done=False) for number in changes] + [Death(changes[-1], is_done=True)]
    count, went_on = 0, set()
    for first in firsts:
        dead = scene.fork()
        assert stage.dies(partial(operation.run, dead), first)
        recovery = undisturbed(operation, dead, after)
        for second in deaths(len(recovery)):
            twice = dead.fork()
            assert stage.dies(partial(operation.run, twice), second), f"it did not die {second}"
            count += 1
            state = check_dead(twice, before, after)
            if (content := twice.content()) not in went_on:
                went_on.add(content)
                check_ways_on(twice, state, after, operation)
            twice.remove()
    tell(record_property, f"{name}, twice", first_crashes=len(firsts), crashes=count, contents=len(went_on))


def undisturbed(operation: Operation, scene: Scene, after: States) -> list[StoreCall]:
    """The calls of an operation that nothing disturbs, done on a fork."""
    twin = scene.fork()
    calls = scene.stage.run(lambda: operation.run(twin))
    assert look(twin) == after
    return calls


def deaths(count: int) -> Iterator[Death]:
    """All deaths in an operation of so many calls."""
    for number in range(1, count + 1):
        yield Death(number, is_done=False)
        yield Death(number, is_done=True)


# --- looking, and going on ---------------------------------------------------------------------------


def check_dead(dead: Scene, before: States, after: States) -> States:
    """Each checkpoint is as it was before or as it must be after, and nothing else was touched."""
    state = look(dead)
    for at, found in enumerate(state):
        for name in {*found, *before[at], *after[at]}:
            assert found.get(name) in (before[at].get(name), after[at].get(name)), name
    check_foreign(dead)
    return state


def check_ways_on(dead: Scene, state: States, after: States, operation: Operation) -> None:
    """From what a crash left, the operation, a save and a sweep come to their ends, each by itself."""
    again = dead.fork()
    operation.run(again)
    assert look(again) == after
    save_anew(again, operation)
    check_swept(again)
    again.remove()

    anew = dead.fork()
    save_anew(anew, operation)
    anew.remove()

    check_swept(dead)


def save_anew(scene: Scene, operation: Operation) -> None:
    """The next save of what was changed works, unless it is pinned."""
    name, at = operation.name, operation.at
    seen = look(scene)[at].get(name)
    if seen is not None and seen.is_pinned:
        with pytest.raises(CheckpointPinnedError):
            scene.save(name, 98, at=at)
        with pytest.raises(CheckpointPinnedError):
            scene.directory(at).delete(name)
        assert load(scene, name, at=at) == seen.number
        scene.directory(at).unpin(name)
    scene.save(name, 99, at=at)
    assert load(scene, name, at=at) == 99
    check_published(scene, name, at=at)
    check_foreign(scene)


def check_swept(scene: Scene) -> None:
    """A sweep two days later takes all that is left over, and nothing else."""
    state = look(scene)
    for tombstones in (False, True):
        for at in range(len(scene.urls)):
            scene.sweep(at=at, tombstones=tombstones)
        check_is_swept(scene, tombstones=tombstones)
    assert look(scene) == state
    check_foreign(scene)


def tell(record_property: Callable[[str, object], None], what: str, **counts: int) -> None:
    """Show how much was enumerated, with ``-rP``."""
    print(f"{what}: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    for name, count in counts.items():
        record_property(name, count)
