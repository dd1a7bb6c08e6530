"""What can be checked of a checkpoint that is not ours: stock DCP's, or a plain ``checkpoint.pth``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from remote_ckpt.entries import Index
from remote_ckpt.errors import CheckpointDamagedError, UntrustedDataError
from remote_ckpt.keys import STOCK_METADATA_NAME
from remote_ckpt.newest import PLAIN_NAME
from remote_ckpt.options import TransferOptions
from remote_ckpt.problems import Checked, Problem, names_of
from remote_ckpt.progress import OnProgress, ProgressCounter
from remote_ckpt.snapshot import Snapshot
from remote_ckpt.spans import Span

_NO_CHECKSUMS = (
    "a stock DCP checkpoint has no checksums: that its files are there and long enough is all that "
)
_NOTHING_TO_COMPARE = "its data was not read, as there is nothing to compare it with"


def check_plain(snapshot: Snapshot) -> Checked:
    """Of a plain checkpoint only its file can be looked at."""
    sizes = {PLAIN_NAME: snapshot.listed_sizes().get(PLAIN_NAME, 0)}
    return Checked(
        sizes=sizes,
        problems=() if sizes[PLAIN_NAME] else [Problem(PLAIN_NAME, "is empty")],
        warnings=[f"a plain checkpoint has no checksums: that {PLAIN_NAME} is there is all that was checked"],
    )


def check_stock(
    snapshot: Snapshot, *, read_data: bool, options: TransferOptions, on_progress: OnProgress | None
) -> Checked:
    """Check that the files which ``.metadata`` names are there, and as long as it says at least.

    Raises:
        CheckpointChangedError: The checkpoint changed meanwhile.
        StoreError: The store failed.
    """
    warnings = [f"{_NO_CHECKSUMS}was checked", *([_NOTHING_TO_COMPARE] if read_data else [])]
    listed = snapshot.listed_sizes()
    metadata_sizes = {STOCK_METADATA_NAME: listed.get(STOCK_METADATA_NAME, 0)}
    index = _read_twice_if_damaged(snapshot)
    if isinstance(index, Problem):
        return Checked(sizes=metadata_sizes, problems=[index], warnings=warnings)
    spans = _spans(index)
    wanted = {key: max(span.end_bytes for span in spans[key]) for key in sorted(spans)}
    counter = ProgressCounter("verify", on_progress, total_objects=len(wanted) + 1)
    sizes = snapshot.find_sizes(wanted, concurrency=options.concurrency)
    counter.advance(done_objects=len(wanted) + 1)
    return Checked(
        sizes={**metadata_sizes, **{key: sizes.get(key, 0) for key in wanted}},
        problems=_problems(wanted, sizes, spans),
        warnings=warnings,
    )


def _problems(
    wanted: Mapping[str, int], sizes: Mapping[str, int], spans: Mapping[str, Sequence[Span]]
) -> list[Problem]:
    problems = []
    for key, wanted_bytes in wanted.items():
        found_bytes = sizes.get(key)
        if found_bytes is None:
            problems.append(Problem(key, "is missing", names_of(spans[key])))
        elif found_bytes < wanted_bytes:
            message = f"has {found_bytes} bytes, but .metadata names bytes up to {wanted_bytes}"
            problems.append(Problem(key, message, names_of(spans[key], beyond_bytes=found_bytes)))
    return problems


def _read_twice_if_damaged(snapshot: Snapshot) -> Index | Problem:
    """Nothing tells a flip in the file from one on the way, but that the second one is right."""
    try:
        return snapshot.read_index()
    except (CheckpointDamagedError, UntrustedDataError):
        pass
    try:
        return snapshot.read_index()
    except (CheckpointDamagedError, UntrustedDataError) as error:
        return Problem(STOCK_METADATA_NAME, error.message)


def _spans(index: Index) -> dict[str, list[Span]]:
    """The archives in each file; those of no bytes need nothing."""
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            key = index.objects[chunk.object]
            spans[key].append(Span(name, chunk.archive_offset, chunk.archive_bytes, b""))
    for name, blob in index.blobs.items():
        spans[index.objects[blob.object]].append(Span(name, blob.offset, blob.length_bytes, b""))
    return spans
