"""``.metadata`` for stock readers: a copy of what the newest generation says, repaired until it is.

It is a convenience with a weaker promise than the checkpoint itself: an object store cannot replace
it on a condition everywhere, so whoever wrote it lists again and repairs what a newer generation
made stale. Only a crash in between leaves it behind the truth, until the next change.
"""

from __future__ import annotations

from collections.abc import Mapping

from remote_ckpt.errors import CheckpointChangedError, ObjectNotFoundError, StoreError
from remote_ckpt.keys import STOCK_METADATA_NAME
from remote_ckpt.newest import Newest, list_generations, read_newest
from remote_ckpt.store.base import Store

_MAX_ROUNDS = 8


def publish_stock_metadata(
    checkpoint: Store, newest: Newest, *, known: Mapping[str, bytes] | None = None
) -> Newest:
    """Make ``.metadata`` what the newest generation says, and return that generation.

    Args:
        newest: The generation to begin with; where a newer one appears, that one is published.
        known: Stock metadata already in memory, by save_id; else it is read from its own key.

    Raises:
        StoreError: The store failed; ``.metadata`` may be stale.
        CheckpointDamagedError, FormatError: The newest generation cannot be read.
        CheckpointChangedError: Newer generations appeared faster than they could be published.
    """
    for _ in range(_MAX_ROUNDS):
        try:
            _publish(checkpoint, newest, known or {})
        except ObjectNotFoundError:
            # Its stock metadata went with it when a newer generation took its place.
            if (newer := read_newest(checkpoint)) is None or newer.generation <= newest.generation:
                raise
            newest = newer
            continue
        generations = list_generations(checkpoint.list_children("").objects)
        if not generations or generations[-1] <= newest.generation:
            return newest
        newest = read_newest(checkpoint) or newest
    raise CheckpointChangedError(
        "newer generations kept appearing while .metadata was published", url=checkpoint.url
    )


def _publish(checkpoint: Store, newest: Newest, known: Mapping[str, bytes]) -> None:
    content = _stock_metadata_of(checkpoint, newest, known)
    if content is None:
        _remove(checkpoint)
    else:
        checkpoint.write(STOCK_METADATA_NAME, content)


def _stock_metadata_of(checkpoint: Store, newest: Newest, known: Mapping[str, bytes]) -> bytes | None:
    entry = newest.manifest.stock_metadata
    if not newest.is_live or entry is None:
        return None
    return known.get(newest.manifest.save_id) or checkpoint.read(entry.key)


def _remove(checkpoint: Store) -> None:
    for failure in checkpoint.delete([STOCK_METADATA_NAME]):
        if isinstance(failure.error, StoreError):
            raise failure.error
        raise StoreError(f"cannot delete: {failure.error}", url=checkpoint.url, key=failure.key)
