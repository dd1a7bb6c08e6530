"""``CheckpointDirectory``: one run's checkpoints, without torch.

Every method asks the store anew and calls no collective: call it on one rank. A directory may be used from
several threads, pickled (it travels without connections), and used after ``fork`` (it connects anew).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from remote_ckpt.changes import annotate, set_pinned
from remote_ckpt.comparison import Comparison, compare_checkpoints
from remote_ckpt.contents import Contents, read_contents
from remote_ckpt.copying import copy_across
from remote_ckpt.deletion import delete_checkpoint
from remote_ckpt.discover import CheckpointEntry, find_checkpoints, find_latest, resolve
from remote_ckpt.errors import CheckpointError, ConfigError
from remote_ckpt.info import CheckpointInfo, describe
from remote_ckpt.log import logger
from remote_ckpt.options import Options
from remote_ckpt.place import Place, place_of
from remote_ckpt.policies import RetentionPolicy
from remote_ckpt.progress import OnProgress
from remote_ckpt.pruning import PruneReport, prune
from remote_ckpt.resumed import names_in_use
from remote_ckpt.retention import Candidate, RetentionPlan, plan_retention
from remote_ckpt.store.base import Store
from remote_ckpt.sweep import SweepReport, sweep
from remote_ckpt.url import Location, check_name
from remote_ckpt.usage import Usage, measure_usage
from remote_ckpt.verification import VerifyReport, verify_checkpoint

if TYPE_CHECKING:
    from upath import UPath

    CheckpointPath = str | os.PathLike[str] | UPath

Step = int | str | CheckpointInfo
"""Which checkpoint: a step, a name, or what a listing returned."""

Mode = Literal["min", "max"]
Checkpoints = list[CheckpointInfo]
Candidates = list[Candidate]


class CheckpointDirectory:
    """The checkpoints below one path or URL: find, inspect, check, mark, copy, delete, clean up.

    Checkpoints of this package, stock torch DCP ones and plain ones (a folder with ``checkpoint.pth``) are
    all listed, and told apart by :attr:`CheckpointInfo.kind`. Half-made and deleted ones, and whatever is not
    recognised, are passed over.

    Args:
        root: The run's directory, such as ``"s3://bucket/run/ckpt"``; it need not exist yet.
        policy: What :meth:`prune` keeps, such as ``KeepLast(3) | KeepEvery(steps=1000)``.
        storage_options: Options of the store, in the style of s3fs (``key``, ``secret``, ``endpoint_url``,
            ...); ``AWS_*`` variables work too.
        transport: ``"obstore"`` or ``"fsspec"``; by default obstore for S3, GCS and Azure.
        options: Retries, deadlines, byte budget.

    Raises:
        ConfigError: A path, URL or option that cannot be used. Nothing is asked of the store yet.
    """

    def __init__(
        self,
        root: CheckpointPath | Location,
        *,
        policy: RetentionPolicy | None = None,
        storage_options: Mapping[str, Any] | None = None,
        transport: str | None = None,
        options: Options | None = None,
    ) -> None:
        if policy is not None and not isinstance(policy, RetentionPolicy):
            raise ConfigError(
                f"policy must be a retention policy such as KeepLast(3), not {type(policy).__name__}"
            )
        self.policy = policy
        self._place = place_of(root, storage_options=storage_options, transport=transport, options=options)
        self._connection = _Connection(self._place)

    @property
    def url(self) -> str:
        """The redacted URL, or the local path."""
        return self._place.location.url

    def path(self, step: Step) -> Path | UPath:
        """The path of a checkpoint, which the functions and ``dcp`` take; it need not exist."""
        return self._place.path_of(_name_of(step))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __enter__(self) -> CheckpointDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release connections; the next call opens them again."""
        self._connection.close()

    # --- finding -------------------------------------------------------------------------------------

    def list(self) -> Checkpoints:
        """Return all checkpoints: steps by number, then named ones by name.

        Damaged ones are listed too, with :attr:`CheckpointInfo.problem`. Takes one listing and two requests
        for each checkpoint, up to 16 at once.

        Raises:
            StoreError: A request failed, which never counts as "no checkpoint".
        """
        with self._opened() as root:
            return [self._describe(entry) for entry in find_checkpoints(root)]

    def latest(self, *, verify: bool = False) -> CheckpointInfo | None:
        """Return the highest step that is committed, or None where a listing that succeeded shows none.

        A damaged manifest is passed over with a warning. Few requests, however many checkpoints there are.

        Args:
            verify: Pass over those, too, whose objects are not all there with the right sizes.

        Raises:
            CheckpointDamagedError: There are steps, and the manifests of all are damaged.
            FormatError: The highest step was written in a newer format.
            StoreError: A request failed.
        """
        with self._opened() as root:
            is_sound = self._test_of_soundness(root) if verify else None
            entry = find_latest(root, is_sound=is_sound)
        return None if entry is None else self._describe(entry)

    def best(self, metric: str, mode: Mode = "min") -> CheckpointInfo | None:
        """Return the checkpoint with the lowest (or highest) value of a metric; None where none has it.

        Of equal ones the highest step; NaN counts as no value.

        Args:
            metric: Name of the metric, as given to the save or to :meth:`annotate`.
            mode: ``"min"`` or ``"max"``.

        Raises:
            StoreError: A request failed.
        """
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max', not {mode!r}")
        sign = 1.0 if mode == "max" else -1.0
        rated = [info for info in self.list() if not math.isnan(info.metrics.get(metric, math.nan))]
        return max(
            rated,
            key=lambda info: (sign * info.metrics[metric], info.step is not None, info.step or 0),
            default=None,
        )

    def info(self, step: Step) -> CheckpointInfo:
        """Return one checkpoint.

        Raises:
            CheckpointNotFoundError: There is none, established by a listing that succeeded.
            CheckpointDamagedError, FormatError: It is there, and its newest manifest cannot be read.
            StoreError: The store failed.
        """
        with self._opened() as root:
            return self._describe(resolve(root, _name_of(step)))

    def contents(self, step: Step) -> Contents:
        """Return the names, shapes, dtypes and places of all tensors and values, without reading them.

        Raises:
            CheckpointNotFoundError, CheckpointDamagedError, FormatError, StoreError: As :meth:`info`.
        """
        with self._opened() as root:
            return read_contents(root, _name_of(step))

    def usage(self) -> Usage:
        """Return how many bytes each checkpoint takes, and what is left over, from one full listing."""
        with self._opened() as root:
            return measure_usage(root)

    # --- checking ------------------------------------------------------------------------------------

    def verify(
        self, step: Step, *, read_data: bool = False, on_progress: OnProgress | None = None
    ) -> VerifyReport:
        """Check that a checkpoint is whole: every object there with its size, and index and metadata sound.

        Args:
            step: Which one.
            read_data: Read every byte and compare all checksums.
            on_progress: Told of each advance.

        Returns:
            All problems that were found, each with its object and tensors; none means sound.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointChangedError: It was replaced or deleted meanwhile.
            StoreError: The store failed, so nothing is known.
        """
        options = self._place.options
        with self._opened() as root:
            return verify_checkpoint(
                root, _name_of(step), read_data=read_data, options=options, on_progress=on_progress
            )

    def compare(
        self,
        first: Step,
        second: Step,
        *,
        other: CheckpointDirectory | None = None,
        read_data: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Comparison:
        """Compare two checkpoints by names, shapes, dtypes and the checksums of their values.

        Args:
            first: One of this directory.
            second: One of ``other``.
            other: Another directory; by default this one.
            read_data: Read the values that checksums cannot decide.
            on_progress: Told of each advance.

        Raises:
            CheckpointNotFoundError, CheckpointDamagedError, FormatError, StoreError: As :meth:`info`.
        """
        options = self._place.options
        with self._opened() as root, (other or self)._opened() as other_root:
            return compare_checkpoints(
                root,
                _name_of(first),
                other_root,
                _name_of(second),
                read_data=read_data,
                options=options,
                on_progress=on_progress,
            )

    # --- marking -------------------------------------------------------------------------------------

    def pin(self, step: Step) -> CheckpointInfo:
        """Keep a checkpoint from being replaced or deleted by anybody, until it is unpinned.

        Raises:
            CheckpointNotFoundError: There is none with a manifest (stock ones cannot be pinned).
            CheckpointDamagedError, FormatError, StoreError: As :meth:`info`.
            CheckpointChangedError: It was deleted meanwhile.
            CommitUnknownError: The store never said whether it is pinned.
        """
        return self._set_pinned(step, True)

    def unpin(self, step: Step) -> CheckpointInfo:
        """Allow replacing and deleting again, of a damaged checkpoint too. Errors as :meth:`pin`."""
        return self._set_pinned(step, False)

    def annotate(
        self,
        step: Step,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> CheckpointInfo:
        """Add metrics or metadata, for example from an evaluation that finished later. Errors as :meth:`pin`.

        Args:
            step: Which one; given as a :class:`CheckpointInfo`, only if it still is that life of the name: so
                an evaluation that took long never rates weights that it did not see.
            metrics: Numbers by name; names that are there already get the new value.
            metadata: JSON values by name, likewise.
        """
        numbers = plain_numbers(metrics)
        return self._change(
            step,
            lambda checkpoint: annotate(
                checkpoint,
                metrics=numbers,
                user_metadata=metadata,
                if_save_id=_save_id_of(step),
                options=self._place.options,
            ),
        )

    # --- copying -------------------------------------------------------------------------------------

    def keep_copy(
        self, step: Step, *, name: str | None = None, on_progress: OnProgress | None = None
    ) -> CheckpointInfo:
        """Copy a checkpoint within the directory, by hard links or by the store; an older copy is replaced.

        Args:
            step: Which one.
            name: The copy's name; by default ``<name>_keep``. Automatic retention leaves named ones alone.
            on_progress: Told of each advance.

        Raises:
            CheckpointNotFoundError, CheckpointDamagedError, FormatError, StoreError: As :meth:`info`.
            CheckpointPinnedError: The older copy is pinned.
            CheckpointChangedError: Source or target changed meanwhile; call again.
        """
        source = _name_of(step)
        target = f"{source}_keep" if name is None else check_name(name)
        copy_across(self._place, source, self._place, target, overwrite=True, on_progress=on_progress)
        return self.info(target)

    def copy_to(
        self,
        other: CheckpointPath | CheckpointDirectory,
        step: Step | None = None,
        *,
        name: str | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        transport: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Checkpoints:
        """Copy one checkpoint, or all, to another directory; each exists there only once it is whole.

        Within one store by hard links or server-side copies, else in parallel through this process, within
        the byte budget, with every checksum checked. Interrupted, the next call goes on where it stopped.

        Args:
            other: Path or URL of the other run's directory, or a directory object.
            step: Which one; by default all that the other directory does not hold already. Damaged ones are
                left out with a warning.
            name: Its name there; by default the same. Only with ``step``.
            overwrite: Replace what has that name there.
            storage_options: Of the other store; by default the same as of this one, if ``other`` is a path.
            transport: Likewise.
            on_progress: Told of each advance.

        Returns:
            The copies that were made, as the other directory sees them.

        Raises:
            CheckpointNotFoundError, CheckpointDamagedError, FormatError, StoreError: As :meth:`info`.
            CheckpointExistsError: Something else has that name there, and ``overwrite`` is false.
            CheckpointPinnedError: What has that name there is pinned.
            CheckpointChangedError: Source or target changed meanwhile; call again.
            IntegrityError: Bytes of the source are not those that were saved; nothing was committed.
        """
        there = self._other(other, storage_options, transport)
        if step is not None:
            source = _name_of(step)
            target = source if name is None else check_name(name)
            pairs = [(source, target)]
        elif name is not None:
            raise ConfigError("name= is for one checkpoint: give step= too")
        else:
            pairs = [(info.name, info.name) for info in self.missing_from(there)]
        for source, target in pairs:
            copy_across(
                self._place, source, there._place, target, overwrite=overwrite, on_progress=on_progress
            )
        return [there.info(target) for _, target in pairs]

    def missing_from(self, other: CheckpointDirectory) -> Checkpoints:
        """Return what :meth:`copy_to` would copy: the sound ones of which ``other`` does not hold the same.

        Raises:
            StoreError: A request failed.
        """
        present = {info.name: info for info in other.list()}
        found = self.list()
        for info in found:
            if info.is_damaged:
                logger.warning("%s: leaving out the damaged checkpoint %s", self.url, info.name)
        sound = [info for info in found if not info.is_damaged]
        return [info for info in sound if not _is_copy(info, present.get(info.name))]

    # --- deleting ------------------------------------------------------------------------------------

    def delete(self, step: Step) -> None:
        """Delete a checkpoint. Only a pin binds this order; an interrupted deletion is finished.

        Args:
            step: Which one; given as a :class:`CheckpointInfo`, only if it still is that life of the name.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointPinnedError: It is pinned.
            CheckpointChangedError: It was saved anew meanwhile; the new one stays.
            CommitUnknownError: The store never said whether it is deleted; nothing was removed.
            StoreError: The store failed. If it names keys, the checkpoint is gone for every reader, and
                another call removes the rest.
        """
        save_id = _save_id_of(step)
        # Of a damaged one the generation is all that tells one life from the next.
        is_seen_damaged = isinstance(step, CheckpointInfo) and save_id is None
        generation = step.generation if isinstance(step, CheckpointInfo) and is_seen_damaged else None
        with self._opened() as root, closing(root.scope(_name_of(step))) as checkpoint:
            delete_checkpoint(
                checkpoint, if_save_id=save_id, if_generation=generation, options=self._place.options
            )
        logger.info("%s: deleted %s", self.url, _name_of(step))

    def prune(
        self,
        policy: RetentionPolicy | None = None,
        *,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> PruneReport:
        """Delete what the policy does not keep.

        Whatever the policy says, these stay: the newest step, the one committed last, pinned and damaged
        ones, the one that this process resumed from until it has committed a newer one, every name that is
        not a step, saves in progress, and what is not recognised.

        Args:
            policy: By default the directory's own.
            dry_run: Only plan.
            on_progress: Told of each checkpoint that is dealt with.

        Returns:
            The plan, with a reason for each checkpoint, and what came of it. A deletion that failed is in
            the report, and is tried again next time.

        Raises:
            ConfigError: There is no policy.
            StoreError: The listing failed; nothing was deleted.
        """
        return self._prune(policy, dry_run=dry_run, on_progress=on_progress, is_hasty=False)

    def sweep(
        self,
        *,
        older_than: timedelta | None = None,
        dry_run: bool = True,
        tombstones: bool = False,
        on_progress: OnProgress | None = None,
    ) -> SweepReport:
        """Remove what killed saves and interrupted deletions left: what no manifest names.

        Args:
            older_than: Age, by the store's clock, below which nothing is touched; by default
                ``options.commit.grace_seconds`` (a day). Less than twice ``save_seconds`` is your word that
                no save is in progress.
            dry_run: Only say what would go.
            tombstones: Remove the marks of deleted checkpoints, too: for a finished run only.
            on_progress: Told of each object that is removed.

        Raises:
            SweepRefusedError: A manifest cannot be read, a listing is doubtful, or the clocks of store and
                host are more than five minutes apart; nothing was removed.
            StoreError: The store failed before anything was removed.
        """
        with self._opened() as root:
            return sweep(
                root,
                older_than=older_than,
                dry_run=dry_run,
                tombstones=tombstones,
                options=self._place.options,
                on_progress=on_progress,
            )

    # --- inside --------------------------------------------------------------------------------------

    def _prune(
        self,
        policy: RetentionPolicy | None,
        *,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
        is_hasty: bool,
    ) -> PruneReport:
        policy = self.policy if policy is None else policy
        if policy is None:
            raise ConfigError("there is no retention policy: give one, such as KeepLast(3)", url=self.url)
        with self._opened() as root:
            return prune(
                root,
                self._plan_by(policy, root),
                options=self._place.options,
                is_hasty=is_hasty,
                dry_run=dry_run,
                on_progress=on_progress,
            )

    def _plan_by(self, policy: RetentionPolicy, root: Store) -> Callable[[Candidates], RetentionPlan]:
        protected = names_in_use(self._place.location)
        now = root.clock()
        return lambda candidates: plan_retention(candidates, policy, now=now, protected=protected)

    def _describe(self, entry: CheckpointEntry) -> CheckpointInfo:
        return describe(self._place, entry)

    def _set_pinned(self, step: Step, is_pinned: bool) -> CheckpointInfo:
        options = self._place.options
        return self._change(
            step,
            lambda checkpoint: set_pinned(
                checkpoint, is_pinned, if_save_id=_save_id_of(step), options=options
            ),
        )

    def _change(self, step: Step, change: Callable[[Store], object]) -> CheckpointInfo:
        with self._opened() as root:
            with closing(root.scope(_name_of(step))) as checkpoint:
                change(checkpoint)
            return self._describe(resolve(root, _name_of(step)))

    def _test_of_soundness(self, root: Store) -> Callable[[CheckpointEntry], bool]:
        def is_sound(entry: CheckpointEntry) -> bool:
            try:
                report = verify_checkpoint(root, entry.name, options=self._place.options)
            except CheckpointError as error:
                logger.warning("%s: passing over %s: %s", self.url, entry.name, error)
                return False
            if not report.is_sound:
                first = report.problems[0]
                logger.warning("%s: passing over %s: %s: %s", self.url, entry.name, first.key, first.message)
            return report.is_sound

        return is_sound

    def _other(
        self,
        other: CheckpointPath | CheckpointDirectory,
        storage_options: Mapping[str, Any] | None,
        transport: str | None,
    ) -> CheckpointDirectory:
        if isinstance(other, CheckpointDirectory):
            if storage_options is not None or transport is not None:
                raise ConfigError("the other directory has options of its own: give none here")
            return other
        place = self._place
        return CheckpointDirectory(
            other,
            storage_options=_own_options(place) if storage_options is None else storage_options,
            transport=place.transport if transport is None else transport,
            options=place.options,
        )

    @contextmanager
    def _opened(self) -> Iterator[Store]:
        yield self._connection.store()


def _own_options(place: Place) -> dict[str, Any]:
    """The options that a place is opened with, those that its ``UPath`` carries included."""
    return {**place.location.options, **(place.storage_options or {})}


class _Connection:
    """The open store of a place, opened at first use, and again in a forked child."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._place,)

    def store(self) -> Store:
        if self._pid != os.getpid():
            # In a forked child the parent's client is left alone, as closing it there could hang; and the
            # lock may have been held by a thread that does not exist here.
            self._lock, self._store, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._store is None:
                self._store = self._place.open()
            return self._store

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._store is not None:
                self._store.close()
            self._store = None


def plain_numbers(metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float]:
    """Return metrics, which may be tensors or NumPy values of one element, as plain numbers.

    Raises:
        ConfigError: One is no number; names it.
    """
    return {name: _number(name, value) for name, value in (metrics or {}).items()}


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes) or not (isinstance(value, Real) or hasattr(value, "item")):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"the metric {name!r} must be one number, not a {type(value).__name__}") from error


def _save_id_of(step: Step) -> str | None:
    return step.save_id if isinstance(step, CheckpointInfo) else None


def _name_of(step: Step) -> str:
    if isinstance(step, CheckpointInfo):
        return step.name
    if isinstance(step, bool) or not isinstance(step, int | str):
        raise ConfigError(f"a checkpoint is named by a step or a name, not by {step!r}")
    if isinstance(step, int) and step < 0:
        raise ConfigError(f"steps begin at 0, not at {step}")
    return check_name(str(step))


def _is_copy(info: CheckpointInfo, there: CheckpointInfo | None) -> bool:
    """Whether what has the same name in the other directory holds the same."""
    if there is None or there.is_damaged:
        return False
    if info.content_digest or there.content_digest:
        return info.content_digest == there.content_digest
    return (info.kind, info.total_bytes) == (there.kind, there.total_bytes)
