"""What ranks tell the coordinator about their part of a save, as torch's write results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from remote_ckpt.dcp.metadata import ItemKey, item_key
from remote_ckpt.dcp.objects import DataObject, StoredItem
from remote_ckpt.errors import RemoteCkptError, SaveFailedError
from remote_ckpt.manifest import ObjectEntry


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did, sent to the coordinator beside its write results.

    Args:
        objects: Data objects that are complete.
        attempted: Keys that may exist, complete ones included; deleted if the save fails.
        error: Why this rank failed; None if it did not.
        rank_name: Names the rank that failed.
    """

    objects: tuple[ObjectEntry, ...]
    attempted: tuple[str, ...]
    error: RemoteCkptError | None = None
    rank_name: str = ""


def as_result(report: RankReport) -> WriteResult:
    """A report in the only form that torch passes on."""
    return WriteResult(index=MetadataIndex(""), size_in_bytes=0, storage_data=report)


def item_results(objects: Sequence[DataObject]) -> Iterator[WriteResult]:
    """What torch wants to know of each item; valid after the objects were written."""
    for one in objects:
        for item, stored in one.stored_items():
            yield WriteResult(index=item.index, size_in_bytes=stored.archive_bytes, storage_data=stored)


def rank_reports(results: Sequence[WriteResult]) -> list[RankReport]:
    """All ranks' reports among their results."""
    return [one.storage_data for one in results if isinstance(one.storage_data, RankReport)]


def stored_items(results: Sequence[Sequence[WriteResult]]) -> dict[ItemKey, StoredItem]:
    """Where each item was written, by any rank."""
    return {
        item_key(one.index): one.storage_data
        for rank in results
        for one in rank
        if isinstance(one.storage_data, StoredItem)
    }


def raise_failures(reports: Sequence[RankReport], url: str) -> None:
    """Raise SaveFailedError from the first failure of a rank, if there is one."""
    failed = [report for report in reports if report.error is not None]
    if not failed:
        return
    first = failed[0].error
    assert first is not None  # that is what makes it one of them
    others = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
    raise SaveFailedError(
        f"save failed on {failed[0].rank_name}, nothing was committed: "
        f"{type(first).__name__}: {first}{others}",
        url=url,
        key=first.key,
        rank=first.rank,
        operation=first.operation,
    ) from first
