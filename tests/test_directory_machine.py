"""Random lives of a run's directory against a plain model: saves, crashes, pins, copies, pruning, sweeps.

Each rule does one thing to a real :class:`CheckpointDirectory`, mostly with a fault: the process dies, or the
store stops answering, at one of the operation's requests, before or after that took effect. What was
interrupted must have happened or not; the model takes over which of the two is seen. After every step the
directory shows exactly the model.

No rule looks at the directory before it draws, so that an example is the same each time it is run. The
examples are the same in every run, too, unless ``REMOTE_CKPT_EXAMPLES`` says how many random ones to try.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

import protocol
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from machine import (
    OURS,
    STOCK,
    STOCK_FILES,
    Fault,
    Outcome,
    Pending,
    Saved,
    Site,
    World,
    manifest_path,
    tops_of,
)

from remote_ckpt import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointInfo,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CommitUnknownError,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepNamed,
    SaveFailedError,
    StoreError,
    place,
    resumed,
)
from remote_ckpt.commit import commit_save, finish_replacement, is_not_committed, open_for_save, withdraw
from remote_ckpt.policies import RetentionPolicy
from remote_ckpt.pruning import PruneReport
from remote_ckpt.sweep import SweepReport
from remote_ckpt.testing.faults import SimulatedCrash
from remote_ckpt.testing.servers import LocalServer
from remote_ckpt.url import parse_step

A_MOMENT = timedelta(minutes=4)
"""Enough for all clocks to go on: some stores tell whole seconds, and a slow disk takes its time. Below the
five minutes at which a sweep distrusts a clock."""
EXAMPLES = int(os.environ.get("REMOTE_CKPT_EXAMPLES", "0"))
Errors = tuple[type[BaseException], ...]
Change = tuple[Site, str, Saved | None]
Which = int | str

# --- what is drawn ---------------------------------------------------------------------------------------

STEPS = ("1", "2", "3", "10")
NAMES = (*STEPS, "best", "1_keep")
FOREIGN_KEYS = (
    "readme.txt",
    "manifest.000001.json",
    "d-0123456789abcdef/0.distcp",
    ".git/manifest.000001.json",
    "what? [1]* é+#%/d-0123456789abcdef/0.distcp",
    "{name}/notes.txt",
    "{name}/manifest.json",
    "{name}/manifest.1.json",
    "{name}/eval/results.json",
    "{name}/d-0123456789abcdef/notes.txt",
    "{name}/sub/manifest.000001.json",
    "{name}/sub/d-0123456789abcdef/0.distcp",
)
sites = st.sampled_from((0, 0, 0, 1))
names = st.sampled_from(NAMES)
positions = st.integers(0, 7)
whiches = positions | positions | names  # that of the live ones, or of that name
metrics = st.sampled_from((0.25, 0.5, 1.0))
begun = st.tuples(names, st.booleans(), st.none() | metrics)
crashes = st.builds(Fault, kind=st.just("crash"), call=st.integers(1, 10), is_done=st.booleans())
failures = st.builds(
    Fault, kind=st.sampled_from(("down", "blip")), call=st.integers(1, 25), is_done=st.booleans()
)
faults = st.none() | crashes | failures


@dataclass(frozen=True)
class Policy:
    """A policy, and in plain words which steps it keeps."""

    policy: RetentionPolicy
    keeps: Callable[[dict[int, Saved]], set[int]]


def keep_last(n: int) -> Policy:
    return Policy(KeepLast(n), lambda steps: set(sorted(steps)[-n:]))


def keep_every(length: int) -> Policy:
    def keeps(steps: dict[int, Saved]) -> set[int]:
        return {min(step for step in steps if step // length == each // length) for each in steps}

    return Policy(KeepEvery(steps=length), keeps)


def keep_best(n: int) -> Policy:
    def keeps(steps: dict[int, Saved]) -> set[int]:
        rated = sorted((saved.metrics["loss"], -step) for step, saved in steps.items() if saved.metrics)
        return {-step for _, step in rated[:n]} | {step for step in steps if not steps[step].metrics}

    return Policy(KeepBest("loss", n), keeps)


def keep_named(name: str) -> Policy:
    return Policy(KeepNamed(name), lambda steps: {step for step in steps if str(step) == name})


def joined(parts: Sequence[Policy]) -> Policy:
    policy = reduce(or_, (part.policy for part in parts))
    return Policy(policy, lambda steps: set().union(*(part.keeps(steps) for part in parts)))


policies = st.lists(
    st.builds(keep_last, st.integers(1, 2))
    | st.builds(keep_every, st.sampled_from((2, 10)))
    | st.builds(keep_best, st.integers(1, 2))
    | st.builds(keep_named, st.sampled_from(STEPS)),
    min_size=1,
    max_size=2,
).map(joined)


def to_delete(site: Site, policy: Policy) -> set[str]:
    """What a retention must delete, floors regarded."""
    steps = site.steps
    floors = {step for step, saved in steps.items() if saved.pinned or str(step) in site.resumed}
    if steps:
        floors |= {max(steps), max(steps, key=lambda step: (_committed_at(steps[step]), step))}
    return {str(step) for step in steps.keys() - floors - policy.keeps(steps)}


def _committed_at(saved: Saved) -> datetime:
    assert saved.committed_at is not None
    return saved.committed_at


# --- the machine -----------------------------------------------------------------------------------------


class DirectoryMachine(RuleBasedStateMachine):
    """Two run's directories and what happens to them.

    Args:
        world: Opens their stores.
        fresh: Returns two empty ones.
    """

    def __init__(self, world: World, fresh: Callable[[], Sequence[Site]]) -> None:
        super().__init__()
        resumed.forget_all()
        self.world = world
        self.sites = fresh()
        self.numbers = itertools.count()
        self.touched: set[int] = set()
        world.count("examples")

    @initialize(saved=st.lists(begun, min_size=1, max_size=len(NAMES), unique_by=lambda each: each[0]))
    def begin_with_some_checkpoints(self, saved: Sequence[tuple[str, bool, float | None]]) -> None:
        for name, pinned, loss in saved:
            self.save(0, name, False, None)
            if loss is not None:
                self.annotate(0, name, loss, None)
            if pinned:
                self.pin_or_unpin(0, name, pinned, None)

    # --- saving ------------------------------------------------------------------------------------------

    @rule(at=sites, name=names, overwrite=st.booleans(), fault=faults)
    def save(self, at: int, name: str, overwrite: bool, fault: Fault | None) -> None:
        site, payload = self._site(at), self._payload()
        refusals = _refusals_to_replace(site, name, overwrite)
        done = self._perform(
            lambda: protocol.save(site.root, payload, name=name, overwrite=overwrite),
            changes=[] if refusals else [(site, name, Saved(payload))],
            refusals=refusals,
            fault=fault,
        )
        if done is not None:
            self._note_committed(site, name)

    @rule(at=sites, name=names, overwrite=st.booleans())
    def begin_save(self, at: int, name: str, overwrite: bool) -> None:
        site, payload = self._site(at), self._payload()
        checkpoint = self._perform(
            lambda: open_for_save(site.root, name, overwrite=overwrite),
            refusals=_refusals_to_replace(site, name, overwrite),
        )
        if checkpoint is not None:
            written: list[str] = []
            upload = protocol.upload(checkpoint, payload, name=name, written=written)
            site.pending.append(Pending(name, overwrite, payload, checkpoint, upload, written))

    @rule(at=sites, position=positions, fault=faults)
    def commit_what_was_begun(self, at: int, position: int, fault: Fault | None) -> None:
        site = self._site(at)
        if not site.pending:
            return
        save = site.pending.pop(position % len(site.pending))
        refusals = _refusals_to_replace(site, save.name, save.overwrite)
        if save.is_swept:
            refusals = (SaveFailedError, CheckpointChangedError)
        done = self._perform(
            lambda: _commit(save),
            changes=[] if refusals else [(site, save.name, Saved(save.payload))],
            refusals=refusals,
            fault=fault,
        )
        if done is not None:
            self._note_committed(site, save.name)

    @rule(at=sites, position=positions)
    def die_before_the_commit(self, at: int, position: int) -> None:
        site = self._site(at)
        if site.pending:
            site.pending.pop(position % len(site.pending))

    # --- marking -----------------------------------------------------------------------------------------

    @rule(at=sites, which=whiches, pinned=st.booleans(), fault=faults)
    def pin_or_unpin(self, at: int, which: Which, pinned: bool, fault: Fault | None) -> None:
        name, directory = self._name(at, which), self._site(at).directory()
        act = directory.pin if pinned else directory.unpin
        self._change(at, name, lambda: act(name), fault, pinned=pinned)

    @rule(at=sites, which=whiches, loss=metrics, fault=faults)
    def annotate(self, at: int, which: Which, loss: float, fault: Fault | None) -> None:
        name, directory = self._name(at, which), self._site(at).directory()
        values = {"loss": loss}
        self._change(at, name, lambda: directory.annotate(name, metrics=values), fault, metrics=values)

    # --- deleting ----------------------------------------------------------------------------------------

    @rule(at=sites, which=whiches, fault=faults)
    def delete(self, at: int, which: Which, fault: Fault | None) -> None:
        name, site = self._name(at, which), self._site(at)
        refusals: Errors = (CheckpointPinnedError,) if _is_pinned(site, name) else ()
        self._perform(
            lambda: site.directory().delete(name),
            changes=[] if refusals else [(site, name, None)],
            refusals=refusals,
            # Where a tombstone is left, deleting again finishes what it says, and says nothing.
            tolerated=() if name in site.live else (CheckpointNotFoundError,),
            fault=fault,
        )

    @rule(at=sites, position=positions, fault=faults)
    def delete_what_was_seen(self, at: int, position: int, fault: Fault | None) -> None:
        site = self._site(at)
        if not site.seen:
            return
        seen = site.seen[-1 - position % len(site.seen)]
        now = site.live.get(seen.name)
        refusals: Errors = (CheckpointPinnedError,) if _is_pinned(site, seen.name) else ()
        if now is not None and now.save_id != seen.save_id:
            refusals += (CheckpointChangedError,)
        self._perform(
            lambda: site.directory().delete(seen),
            changes=[] if refusals else [(site, seen.name, None)],
            refusals=refusals,
            tolerated=() if now is not None else (CheckpointNotFoundError,),
            fault=fault,
        )

    @rule(at=sites, policy=policies, fault=faults, is_dry=st.booleans())
    def prune(self, at: int, policy: Policy, fault: Fault | None, is_dry: bool) -> None:
        site = self._site(at)
        expected, busy = to_delete(site, policy), {name for name in site.live if site.is_busy(name)}
        outcome = self.world.run(lambda: site.directory().prune(policy.policy, dry_run=is_dry), fault)
        self._count("prune", outcome.error)
        if outcome.error is not None:
            assert outcome.has_struck, outcome.error
            assert isinstance(outcome.error, (StoreError, SimulatedCrash)), repr(outcome.error)
        else:
            _check_report(outcome.result, expected, is_dry=is_dry, may_fail=outcome.has_struck)
        for name in set() if is_dry else expected - busy:
            is_done = outcome.result is not None and name in outcome.result.deleted
            self._settle(site, name, [None], replace(outcome, is_interrupted=not is_done))

    @rule(at=sites, which=whiches)
    def resume_from(self, at: int, which: Which) -> None:
        name, site = self._name(at, which), self._site(at)
        if name in site.live:
            resumed.note_resumed(site.location.join(name))
            site.resumed.add(name)

    # --- copying -----------------------------------------------------------------------------------------

    @rule(at=sites, which=whiches, fault=faults)
    def keep_copy(self, at: int, which: Which, fault: Fault | None) -> None:
        name, site = self._name(at, which), self._site(at)
        act = lambda: site.directory().keep_copy(name)  # noqa: E731
        self._copy(act, site, name, site, f"{name}_keep", overwrite=True, fault=fault)

    @rule(at=sites, which=whiches, new_name=names, overwrite=st.booleans(), fault=faults)
    def copy_to_the_other(
        self, at: int, which: Which, new_name: str, overwrite: bool, fault: Fault | None
    ) -> None:
        name, site, other = self._name(at, which), self._site(at), self._site(1 - at)
        there = other.directory()

        def act() -> list[CheckpointInfo]:
            return site.directory().copy_to(there, name, name=new_name, overwrite=overwrite)

        self._copy(act, site, name, other, new_name, overwrite=overwrite, fault=fault)

    @rule(at=sites, overwrite=st.booleans(), fault=faults)
    def copy_all_to_the_other(self, at: int, overwrite: bool, fault: Fault | None) -> None:
        site, other = self._site(at), self._site(1 - at)
        missing: list[str] = []
        refusals: Errors = ()
        for name in _in_listing_order(site.live):
            if name in other.live and _is_equal(site.live[name], other.live[name]):
                continue
            refusals = _refusals_to_copy(site, name, other, name, overwrite)
            if refusals:
                break
            missing.append(name)
        self._perform(
            lambda: site.directory().copy_to(other.directory(), overwrite=overwrite),
            changes=[(other, name, _copy_of(site.live[name])) for name in missing],
            refusals=refusals,
            fault=fault,
        )

    # --- sweeping ----------------------------------------------------------------------------------------

    @rule(at=sites, age=st.sampled_from(("grace", "mark", "none")), fault=faults)
    def sweep(self, at: int, age: str, fault: Fault | None) -> None:
        site = self._site(at)
        self._sweep(site, age, fault)
        site.mark = site.root.clock()

    @rule(at=sites, fault=faults)
    def sweep_the_finished_run(self, at: int, fault: Fault | None) -> None:
        site = self._site(at)
        site.pending.clear()
        self._sweep(site, "none", fault, tombstones=True)

    # --- others ------------------------------------------------------------------------------------------

    @rule(at=sites, name=names, key=st.sampled_from(FOREIGN_KEYS))
    def others_write_something(self, at: int, name: str, key: str) -> None:
        site = self._site(at)
        data = self._payload()
        site.root.write(key.format(name=name), data)
        site.foreign[key.format(name=name)] = data

    @rule(at=sites, name=st.sampled_from((*NAMES, "4", "5")))
    def others_save_a_stock_checkpoint(self, at: int, name: str) -> None:
        site = self._site(at)
        if site.tops.get(name):
            return  # below a manifest nobody sees it
        parts = [self._payload() for _ in STOCK_FILES]
        for key, part in zip(STOCK_FILES, parts, strict=True):
            site.root.write(f"{name}/{key}", part)
            site.loose.discard(f"{name}/{key}")
        site.settle(name, Saved(b" ".join(parts), kind=STOCK))

    @rule(at=sites, name=names)
    def a_write_is_cut_short(self, at: int, name: str) -> None:
        site = self._site(at)
        if site.cut_a_write is not None:
            site.cut_a_write(name, next(self.numbers))

    # --- looking -----------------------------------------------------------------------------------------

    @invariant()
    def no_promise_is_broken(self) -> None:
        self.world.count("steps")
        while self.touched:
            self.sites[self.touched.pop()].check()

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            for site in self.sites:
                site.check(is_thorough=True)
                self._end(site)
            self.world.close()
        resumed.forget_all()

    def _end(self, site: Site) -> None:
        """Sweep twice, the second time as for a finished run: all that is left is needed or foreign."""
        site.pending.clear()
        self._sweep(site, "none")
        self._sweep(site, "none", tombstones=True)
        site.check(is_thorough=True)
        usage = site.directory().usage()
        assert usage.leftover_bytes == sum(remains.total_bytes for remains in usage.remains) == 0
        for name, saved in site.live.items():
            report = site.directory().verify(name, read_data=True)
            assert saved.kind == STOCK or report.is_sound, report.problems

    # --- inside ------------------------------------------------------------------------------------------

    def _site(self, at: int) -> Site:
        self.touched.add(at)
        return self.sites[at]

    def _name(self, at: int, which: Which) -> str:
        if isinstance(which, str):
            return which
        live = sorted(self.sites[at].live)
        return live[which % len(live)] if live else NAMES[which % len(NAMES)]

    def _payload(self) -> bytes:
        number = next(self.numbers)
        return b"payload %d" % number + b"." * number  # of different lengths, as sizes are compared

    def _note_committed(self, site: Site, name: str) -> None:
        resumed.note_committed(site.location.join(name))
        if parse_step(name) is not None:
            site.resumed.clear()

    def _sweep(self, site: Site, age: str, fault: Fault | None = None, *, tombstones: bool = False) -> None:
        """Sweep, and see that nothing went that is needed, foreign or too young, and the rest did."""
        before, garbage = site.objects(), site.garbage(tombstones=tombstones)
        older_than = site.age(age)
        with self.world.later(A_MOMENT if age == "none" else timedelta()):
            dry = site.directory().sweep(older_than=older_than, tombstones=tombstones)
            assert site.objects() == before, "a dry run changed something"
            told = {each.key for each in dry.garbage} - {each.key for each in site.root.list_leftovers()}
            assert told <= garbage.keys() | site.loose, f"{sorted(told - garbage.keys())} is no garbage"
            outcome = self.world.run(
                lambda: site.directory().sweep(older_than=older_than, dry_run=False, tombstones=tombstones),
                fault,
            )
            youngest = site.root.clock() - dry.older_than
        self._count(f"sweep {age}", outcome.error)
        objects = site.objects()
        gone = before.keys() - objects.keys()
        assert gone <= garbage.keys(), f"{sorted(gone - garbage.keys())} is gone"
        assert all(before[key].modified_at <= youngest for key in gone), f"{sorted(gone)}: some are too young"
        assert objects.keys() - before.keys() <= {f"{name}/.metadata" for name in site.live}
        if not outcome.has_struck:
            # A closed folder goes with its mark, unless foreign files lie in it.
            marks = set() if tombstones else {manifest_path(*top) for top in tops_of(before).items()}
            due = garbage.keys() - marks if age == "none" else set()
            if outcome.error is None and site.root.capabilities.has_folders and not due <= gone:
                # The removal of one name of a file changes the time of its other names: where another thread
                # looks again just then, it takes them for changed and leaves them to the next sweep.
                with self.world.later(A_MOMENT):
                    site.directory().sweep(older_than=older_than, dry_run=False, tombstones=tombstones)
                objects = site.objects()
                gone = before.keys() - objects.keys()
            _check_sweep(outcome, dry, gone, due)
            assert age != "none" or not site.root.list_leftovers()
        elif outcome.error is not None:
            assert isinstance(outcome.error, (StoreError, SimulatedCrash)), repr(outcome.error)
        if tombstones:
            site.tops = tops_of(objects)
        for save in site.pending:
            save.is_swept = any(f"{save.name}/{key}" not in objects for key in save.written)

    def _change(
        self, at: int, name: str, act: Callable[[], object], fault: Fault | None, **facts: Any
    ) -> None:
        site = self._site(at)
        saved = site.live.get(name)
        if saved is None or saved.kind == STOCK:
            self._perform(act, refusals=(CheckpointNotFoundError,), fault=fault)
            return
        wanted = replace(saved, **facts)
        info = self._perform(act, changes=[(site, name, wanted)], fault=fault)
        if info is not None:
            assert (info.pinned, info.metrics) == (wanted.pinned, wanted.metrics)

    def _copy(
        self,
        act: Callable[[], object],
        site: Site,
        name: str,
        other: Site,
        target: str,
        *,
        overwrite: bool,
        fault: Fault | None,
    ) -> None:
        refusals = _refusals_to_copy(site, name, other, target, overwrite)
        attempt = site.save_id_of(name), target
        # Committed by an earlier call that died before its end: this one may just bring it to its end.
        is_taken_up = attempt in other.cut_short and other.cut_short[attempt] == other.save_id_of(target)
        # A tombstone stands in a stock copy's way, but where its whole folder is taken away first.
        is_in_the_way = target not in other.live and target in other.tops
        done = self._perform(
            act,
            changes=[(other, target, _copy_of(site.live[name]))] if is_taken_up or not refusals else [],
            refusals=() if is_taken_up else refusals,
            tolerated=refusals if is_taken_up else (CheckpointExistsError,) if is_in_the_way else (),
            may_be_done=is_taken_up,
            fault=fault,
        )
        if done is None and name in site.live and target in other.live:
            other.cut_short[attempt] = other.save_id_of(target)

    def _perform(
        self,
        act: Callable[[], Any],
        *,
        changes: Sequence[Change] = (),
        refusals: Errors = (),
        tolerated: Errors = (),
        may_be_done: bool = False,
        fault: Fault | None = None,
    ) -> Any:
        """Do something, and see that it was done, was refused as it must be, or was interrupted.

        Args:
            changes: What becomes of which checkpoints.
            refusals: One of these errors must be raised.
            tolerated: One of these may be raised; then no checkpoint changes.
            may_be_done: The checkpoints may stay as they are.
            fault: What happens meanwhile; then each checkpoint may also be as it was before.

        Returns:
            What it returned; None where it raised.
        """
        outcome = self.world.run(act, fault)
        error = outcome.error
        self._count(sys._getframe(1).f_code.co_name, error)
        is_answer = isinstance(error, (*refusals, *tolerated))
        if error is None:
            assert not refusals, f"this must be refused with {refusals}"
        elif not is_answer:
            if not outcome.has_struck:
                raise error
            may_be_raised = (StoreError, CommitUnknownError, SaveFailedError, SimulatedCrash)
            assert isinstance(error, may_be_raised), repr(error)
        for site, name, after in changes:
            before = site.live.get(name)
            is_undone = isinstance(error, (*tolerated, SaveFailedError))
            wanted = [before] if is_undone else [after, before] if may_be_done else [after]
            self._settle(site, name, wanted, outcome)
        return outcome.result

    def _settle(self, site: Site, name: str, wanted: Sequence[Saved | None], outcome: Outcome) -> None:
        """See what became of a checkpoint; if the operation was interrupted, it may be as it was before."""
        before = site.live.get(name)
        allowed = list(wanted)
        if outcome.is_interrupted:
            # There is no manifest with which a copy without one could replace another in one step.
            allowed += [before, *(None for saved in wanted if saved is not None and saved.kind == STOCK)]
        found = site.settle(name, *allowed)
        if outcome.has_struck:
            site.unpublished.add(name)
        elif found is None or before is None or found.save_id != before.save_id:
            site.unpublished.discard(name)
        files = {f"{name}/{key}" for key in STOCK_FILES}
        if any(saved is not None and saved.kind == STOCK for saved in (before, *wanted)):
            site.loose = site.loose | files if outcome.has_struck else site.loose - files
        if found is not None and found.kind == STOCK:
            site.loose -= files

    def _count(self, what: str, error: BaseException | None) -> None:
        self.world.count(f"{what}: {'done' if error is None else type(error).__name__}")


def _commit(save: Pending) -> object:
    """The end of a save, as the DCP writer does it."""
    done = save.upload
    try:
        manifest = commit_save(
            save.checkpoint,
            done.draft,
            attempt=done.attempt,
            overwrite=save.overwrite,
            expected=done.expected,
            options=protocol.OPTIONS,
            waiting=protocol.FakeTime().waiting,
        )
    except Exception as error:
        if is_not_committed(error):
            withdraw(save.checkpoint, save.written, done.attempt.save_id)
        raise
    finish_replacement(save.checkpoint, manifest, done.stock)
    return manifest


def _is_pinned(site: Site, name: str) -> bool:
    return name in site.live and site.live[name].pinned


def _refusals_to_replace(site: Site, name: str, overwrite: bool) -> Errors:
    if _is_pinned(site, name):
        return (CheckpointPinnedError,)
    return (CheckpointExistsError,) if name in site.live and not overwrite else ()


def _refusals_to_copy(site: Site, name: str, other: Site, target: str, overwrite: bool) -> Errors:
    if name not in site.live:
        return (CheckpointNotFoundError,)
    if site.live[name].kind == STOCK and target in other.live and other.live[target].kind == OURS:
        return (CheckpointExistsError, CheckpointPinnedError)
    return _refusals_to_replace(other, target, overwrite)


def _copy_of(saved: Saved) -> Saved:
    return Saved(saved.payload, kind=saved.kind, metrics=saved.metrics)


def _is_equal(saved: Saved, other: Saved) -> bool:
    return (saved.kind, saved.payload) == (other.kind, other.payload)


def _in_listing_order(live: dict[str, Saved]) -> list[str]:
    return sorted(live, key=lambda name: (parse_step(name) is None, parse_step(name) or 0, name))


def _check_report(report: PruneReport, expected: set[str], *, is_dry: bool, may_fail: bool) -> None:
    assert {decision.name for decision in report.plan.delete} == expected
    spared = {decision.name for decision in report.spared}
    failed = {failure.name for failure in report.failures}
    assert may_fail or not failed
    assert {*report.deleted, *spared, *failed} == (set() if is_dry else expected)


def _check_sweep(outcome: Outcome, dry: SweepReport, gone: set[str], due: set[str]) -> None:
    """A sweep that nothing disturbed did what its dry run said, and left none of the garbage."""
    if outcome.error is not None:
        raise outcome.error
    report = outcome.result
    assert not report.failures
    assert due <= gone, f"{sorted(due - gone)} should be gone"
    assert {each.key for each in dry.garbage} <= {each.key for each in report.garbage}
    assert gone <= {each.key for each in report.garbage}


# --- runs ------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.timeout(2400)  # a disk on which each sync takes 50 ms makes minutes of it


def run(world: World, fresh: Callable[[], Sequence[Site]], *, examples: int, steps: int) -> None:
    class Machine(DirectoryMachine):
        def __init__(self) -> None:
            super().__init__(world, fresh)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES or examples,
            stateful_step_count=steps,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(place, "open_store", world.open)
    yield world
    world.close()
    with capsys.disabled():
        print(f"\n{world.counts.pop('examples')} examples, {world.counts.pop('steps')} steps", end=" ")
        if EXAMPLES:
            print("", *(f"{count:6} {what}" for what, count in sorted(world.counts.items())), sep="\n")


def cut_a_local_write(root: Path, name: str, number: int) -> None:
    """Leave what a process leaves that is killed within a write or a deletion."""
    (root / name).mkdir(parents=True, exist_ok=True)
    if number % 3 == 0:
        (root / name / f".tmp-{number:024x}").write_bytes(b"half")
    elif number % 3 == 1:
        (root / name / f"d-{number:016x}").mkdir()
    else:
        (root / f".trash-{number:024x}").mkdir()
        (root / f".trash-{number:024x}" / "manifest.000001.json").write_bytes(b"half gone")


def cut_an_upload(server: LocalServer, url: str, name: str, number: int) -> None:
    """Leave an upload of several parts open."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    server.client().create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{name}/d-{number:016x}/0.distcp")


def test_no_life_of_a_directory_in_memory_breaks_a_promise(world: World) -> None:
    def fresh() -> Sequence[Site]:
        number = world.counts.get("examples", 0)
        return [Site(world, f"memory://machine-{number}-{each}/run") for each in "ab"]

    run(world, fresh, examples=20, steps=40)


def test_no_life_of_a_local_directory_breaks_a_promise(world: World, tmp_path: Path) -> None:
    def fresh() -> Sequence[Site]:
        folders = [tmp_path / str(world.counts.get("examples", 0)) / each for each in "ab"]
        return [Site(world, str(each), cut_a_write=partial(cut_a_local_write, each)) for each in folders]

    run(world, fresh, examples=20, steps=40)


@pytest.mark.server
def test_no_life_of_a_directory_on_seaweedfs_breaks_a_promise(
    world: World, seaweed: LocalServer, fresh_root: Callable[[LocalServer], str]
) -> None:
    def fresh() -> Sequence[Site]:
        urls = [fresh_root(seaweed) for _ in "ab"]
        return [
            Site(world, url, seaweed.storage_options(), cut_a_write=partial(cut_an_upload, seaweed, url))
            for url in urls
        ]

    run(world, fresh, examples=5, steps=20)
