"""A stock DCP checkpoint's metadata as an index: whole archives in files, and no checksums. Pure."""

from __future__ import annotations

from remote_ckpt.coverage import cover_problem
from remote_ckpt.entries import OPAQUE, BytesEntry, ChunkEntry, Index, TensorEntry
from remote_ckpt.inert_pickle import MalformedPickleError
from remote_ckpt.stock_contents import Point, StockChunk, StockMetadata, StockPlace, StockTensor, stock_errors


def index_of_stock(metadata: StockMetadata, *, url: str, key: str) -> Index:
    """Return the index; its ``save_id`` is empty, its checksums are too.

    Args:
        metadata: As :func:`~remote_ckpt.stock_contents.parse_stock_contents` returned it.
        url: Redacted URL of the checkpoint, for messages.
        key: The metadata's key, for messages.

    Raises:
        CheckpointDamagedError: A chunk lies nowhere, or outside the checkpoint, or the chunks of a tensor do
            not cover it once.
    """
    with stock_errors(url=url, key=key):
        return _Indexer(metadata).index()


class _Indexer:
    """Finds each chunk's place, and numbers the files."""

    def __init__(self, metadata: StockMetadata) -> None:
        self._metadata = metadata
        self._positions: dict[str, int] = {}

    def index(self) -> Index:
        entries = self._metadata.entries
        tensors = {name: entry for name, entry in entries.items() if entry is not None}
        # Before entries are made of lists that many tensors may share.
        if sum(len(tensor.chunks) for tensor in tensors.values()) > len(self._metadata.places):
            raise MalformedPickleError("more chunks than places for them")
        return Index(
            save_id="",
            block_bytes=1,
            tensors={name: self._tensor(name, tensor) for name, tensor in tensors.items()},
            blobs={name: self._blob(name) for name, entry in entries.items() if entry is None},
            objects=list(self._positions),
            dcp_version=self._metadata.version,
        )

    def _tensor(self, name: str, tensor: StockTensor) -> TensorEntry:
        _check_boxes(name, tensor)
        properties = tensor.properties
        return TensorEntry(
            dtype=properties.dtype,
            sizes=tensor.sizes,
            requires_grad=properties.requires_grad,
            layout=properties.layout,
            memory_format=properties.memory_format,
            pin_memory=properties.pin_memory,
            chunks=[self._chunk(name, chunk) for chunk in tensor.chunks],
        )

    def _chunk(self, name: str, chunk: StockChunk) -> ChunkEntry:
        position, place = self._place(name, chunk.offsets)
        length = place.length_bytes
        return ChunkEntry(*chunk, position, place.offset_bytes, length, OPAQUE, length, b"")

    def _blob(self, name: str) -> BytesEntry:
        position, place = self._place(name, None)
        return BytesEntry(position, place.offset_bytes, place.length_bytes, b"")

    def _place(self, name: str, offsets: Point | None) -> tuple[int, StockPlace]:
        place = self._metadata.places.get((name, offsets))
        if place is None:
            raise MalformedPickleError(f"no place for {name!r:.80} at {offsets}")
        if any(part in ("", ".", "..") for part in place.key.split("/")):
            raise MalformedPickleError(f"it names a file outside the checkpoint: {place.key!r:.80}")
        return self._positions.setdefault(place.key, len(self._positions)), place


def _check_boxes(name: str, tensor: StockTensor) -> None:
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.sizes):
            raise MalformedPickleError(f"a chunk of {name!r:.80} that is not of its dimensions")
        if any(begin + size > end for begin, size, end in zip(*chunk, tensor.sizes, strict=True)):
            raise MalformedPickleError(f"a chunk outside {name!r:.80}")
    offsets, sizes = [one.offsets for one in tensor.chunks], [one.sizes for one in tensor.chunks]
    if problem := cover_problem(tensor.sizes, offsets, sizes):
        raise MalformedPickleError(f"{name!r:.80}: {problem}")
