"""Bytes on their way into an upload."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from remote_ckpt.errors import IntegrityError
from remote_ckpt.options import GiB, KiB, MiB
from remote_ckpt.store.chunks import MAX_PARTS, CheckedChunks, cut_parts, plan_part_bytes


@pytest.mark.parametrize("size_bytes", [1, 5 * MiB, 48 * GiB, 300 * GiB, 5 * 1024 * GiB])
def test_any_object_fits_into_the_parts_that_s3_allows(size_bytes: int) -> None:
    part_bytes = plan_part_bytes(size_bytes, 8 * MiB)
    assert part_bytes >= 8 * MiB
    assert -(-size_bytes // part_bytes) <= MAX_PARTS < 10_000


def test_parts_grow_only_where_they_must() -> None:
    assert plan_part_bytes(MAX_PARTS * 8 * MiB, 8 * MiB) == 8 * MiB
    assert plan_part_bytes(MAX_PARTS * 8 * MiB + 1, 8 * MiB) == 9 * MiB


@pytest.mark.parametrize("chunk_bytes", [1, 3, 10, 11, 64])
def test_parts_are_equal_but_for_the_last(chunk_bytes: int) -> None:
    data = bytes(range(64))
    chunks = [data[start : start + chunk_bytes] for start in range(0, 64, chunk_bytes)]
    parts = list(cut_parts(chunks, 10))
    assert [len(part) for part in parts] == [10] * 6 + [4]
    assert b"".join(parts) == data


def test_a_source_that_never_ends_is_stopped_at_the_announced_size() -> None:
    given: list[int] = []

    def endless() -> Iterator[bytes]:
        while True:
            given.append(1)
            yield bytes(KiB)

    chunks = CheckedChunks(endless, 4 * KiB, url="s3://b", key="k")
    with pytest.raises(IntegrityError, match="gave more instead of 4096 bytes"):
        list(chunks)
    assert len(given) == 5


def test_the_sources_error_wins_over_what_a_driver_makes_of_it() -> None:
    cause = KeyError("shard")

    def source() -> Iterator[bytes]:
        yield b"1"
        raise cause

    chunks = CheckedChunks(source, 2, url="s3://b", key="k")

    def send() -> None:
        try:
            list(chunks)
        except KeyError as error:
            raise OSError("the driver's own words") from error

    with pytest.raises(KeyError) as caught:
        chunks.feed(send)
    assert caught.value is cause
    assert caught.value.__context__ is None
