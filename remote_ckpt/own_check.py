"""What is checked of a checkpoint of ours: objects against the manifest, payloads against the index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remote_ckpt.checksum import crc32c
from remote_ckpt.collector import collector_paused
from remote_ckpt.entries import ChunkEntry, Index
from remote_ckpt.errors import CheckpointDamagedError, IntegrityError, ObjectNotFoundError
from remote_ckpt.index import parse_index
from remote_ckpt.integrity import read_verified
from remote_ckpt.keys import STOCK_METADATA_NAME, manifest_key
from remote_ckpt.manifest import Manifest, ObjectEntry
from remote_ckpt.object_check import Finding, ObjectTask, check_objects
from remote_ckpt.options import TransferOptions
from remote_ckpt.problems import Checked, Problem, names_of
from remote_ckpt.progress import OnProgress, ProgressCounter
from remote_ckpt.snapshot import Snapshot
from remote_ckpt.spans import Span


def check_own(
    snapshot: Snapshot, *, read_data: bool, options: TransferOptions, on_progress: OnProgress | None
) -> Checked:
    """Check all objects that a live manifest names.

    Raises:
        FormatError: The index is of a newer format.
        StoreError: The store failed.
    """
    manifest = snapshot.require_manifest()
    small = [entry for entry in (manifest.index, manifest.stock_metadata) if entry is not None]
    read_bytes = sum(entry.size_bytes for entry in [*small, *(manifest.objects if read_data else ())])
    counter = ProgressCounter(
        "verify", on_progress, total_bytes=read_bytes, total_objects=len(small) + len(manifest.objects)
    )
    check = _Check(snapshot, manifest, options, counter)
    check.index()
    check.stock_metadata()
    check.data(read_data=read_data)
    return Checked(
        sizes=check.sizes, problems=check.problems, warnings=check.warnings, is_data_read=read_data
    )


@dataclass(slots=True)
class _Check:
    """One checkpoint under examination, and what was found until now."""

    snapshot: Snapshot
    manifest: Manifest
    options: TransferOptions
    counter: ProgressCounter
    sizes: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    block_bytes: int = 1
    spans: defaultdict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))

    # --- what describes the data -----------------------------------------------------------------

    def index(self) -> None:
        """Read the index, and note what it says lies where."""
        entry = self.manifest.index
        if entry is None:
            self._add(manifest_key(self.manifest.generation), "names no index")
            return
        data = self._read(entry)
        if data is None:
            return
        try:
            with collector_paused():
                index = parse_index(data, url=self.snapshot.url, key=entry.key)
                outside = self._note_spans(index)
        except CheckpointDamagedError as error:
            self._add(entry.key, error.message)
            return
        if index.save_id != self.manifest.save_id:
            self._add(entry.key, f"is of save {index.save_id}, the manifest of {self.manifest.save_id}")
        self.block_bytes = index.block_bytes
        if outside:
            self._add(entry.key, "names bytes outside the objects that the manifest describes", outside)

    def stock_metadata(self) -> None:
        """Read what stock readers need; that they find it where they look for it concerns them only."""
        entry = self.manifest.stock_metadata
        if entry is not None:
            self._read(entry)
        published = self._published()
        if entry is None and published is not None:
            self.warnings.append(".metadata is of another save: stock DCP readers may see another state")
        if entry is not None and published is None:
            self.warnings.append(".metadata is missing: stock DCP readers do not see this checkpoint")
        if entry is not None and published is not None and not _is_as_saved(published, entry):
            # Once more: what was flipped on the way is no difference.
            again = self._published()
            if again is None or not _is_as_saved(again, entry):
                self.warnings.append(
                    ".metadata is not what was saved with this checkpoint: stock DCP readers may see another "
                    "state, or none"
                )

    def _published(self) -> bytes | None:
        try:
            return self.snapshot.store.read(STOCK_METADATA_NAME)
        except ObjectNotFoundError:
            return None

    def _read(self, entry: ObjectEntry) -> bytes | None:
        """Return an object as it was saved; otherwise note what is wrong with it."""
        data: bytes | None = None
        try:
            data = read_verified(self.snapshot.store, entry)
        except ObjectNotFoundError:
            self.sizes[entry.key] = 0
            self._add(entry.key, "is missing")
        except IntegrityError as error:
            self._add(entry.key, error.message)
        self.sizes.setdefault(entry.key, entry.size_bytes)
        self.counter.advance(done_bytes=entry.size_bytes, done_objects=1)
        return data

    # --- the data --------------------------------------------------------------------------------

    def data(self, *, read_data: bool) -> None:
        """Look for every data object; read them if asked for."""
        entries = self.manifest.objects
        wanted = {entry.key: entry.size_bytes for entry in entries}
        found = self.snapshot.find_sizes(wanted, concurrency=self.options.concurrency)
        self.sizes |= {key: found.get(key, 0) for key in wanted}
        findings = self._read_data(found) if read_data else {}
        if len(findings) < len(entries):
            self.counter.advance(done_objects=len(entries) - len(findings))
        for entry in entries:
            problem = _problem(
                entry, found.get(entry.key), findings.get(entry.key), self.spans.get(entry.key, ())
            )
            if problem is not None:
                self.problems.append(problem)

    def _read_data(self, found: Mapping[str, int]) -> dict[str, tuple[ObjectTask, Finding]]:
        tasks = [
            ObjectTask(entry, min(found[entry.key], entry.size_bytes), self.spans.get(entry.key, ()))
            for entry in self.manifest.objects
            if entry.key in found
        ]
        findings = check_objects(
            self.snapshot.store,
            tasks,
            block_bytes=self.block_bytes,
            options=self.options,
            counter=self.counter,
        )
        return {task.entry.key: (task, finding) for task, finding in zip(tasks, findings, strict=True)}

    def _note_spans(self, index: Index) -> tuple[str, ...]:
        """Note which bytes belong to whom; returns whose lie outside the objects."""
        limits = {entry.key: entry.size_bytes for entry in self.manifest.objects}
        outside: set[str] = set()

        def note(name: str, position: int, end_bytes: int, span: Span) -> None:
            key = index.objects[position]
            if end_bytes > limits.get(key, -1):
                outside.add(name)
            elif span.length_bytes:
                self.spans[key].append(span)

        for name, tensor in index.tensors.items():
            for chunk in tensor.chunks:
                note(name, chunk.object, chunk.archive_offset + chunk.archive_bytes, _span(name, chunk))
        for name, blob in index.blobs.items():
            span = Span(name, blob.offset, blob.length_bytes, blob.crcs)
            note(name, blob.object, span.end_bytes, span)
        return tuple(sorted(outside))

    def _add(self, key: str, message: str, tensors: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(key, message, tensors))


def _span(name: str, chunk: ChunkEntry) -> Span:
    begin = chunk.archive_offset if chunk.is_opaque else chunk.payload_offset
    return Span(name, begin, chunk.payload_bytes, chunk.crcs)


def _is_as_saved(data: bytes, entry: ObjectEntry) -> bool:
    return len(data) == entry.size_bytes and crc32c(data) == entry.crc32c


def _problem(
    entry: ObjectEntry,
    found_bytes: int | None,
    reading: tuple[ObjectTask, Finding] | None,
    spans: Sequence[Span],
) -> Problem | None:
    """Say what is wrong with a data object, in one problem; None if nothing is."""
    if found_bytes is None:
        return Problem(entry.key, "is missing", names_of(spans))
    names = () if reading is None else reading[1].names(reading[0])
    if found_bytes != entry.size_bytes:
        lost = names_of(spans, beyond_bytes=found_bytes)
        message = f"has {found_bytes} bytes, {entry.size_bytes} were saved"
        return Problem(entry.key, message, tuple(sorted({*names, *lost})))
    if reading is None or reading[1].is_sound:
        return None
    return Problem(entry.key, _message(reading[1]), names)


def _message(finding: Finding) -> str:
    if finding.failure is not None:
        return finding.failure
    if finding.is_right:
        return "is what was saved, but the index has other checksums: the two do not belong together"
    if finding.wrong:
        return "differs from what was saved"
    return (
        "differs from what was saved, but only in the framing between payloads: all tensors still load with "
        "this package, perhaps not with stock readers"
    )
