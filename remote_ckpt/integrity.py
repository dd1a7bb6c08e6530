"""Reading small objects whole, and checking them against what the manifest says of them."""

from __future__ import annotations

from remote_ckpt.checksum import crc32c
from remote_ckpt.errors import IntegrityError
from remote_ckpt.manifest import ObjectEntry
from remote_ckpt.store.base import Store


def read_verified(checkpoint: Store, entry: ObjectEntry) -> bytes:
    """Return an object whose size and CRC-32C are those of its entry; a flipped read is read once more.

    Raises:
        ObjectNotFoundError: It is not there.
        IntegrityError: It is not what was written; names the object.
    """
    data = checkpoint.read(entry.key)
    if not _matches(data, entry):
        data = checkpoint.read(entry.key)
    if not _matches(data, entry):
        raise IntegrityError(
            f"{entry.key} differs from what was saved: {len(data)} bytes, expected {entry.size_bytes} "
            f"with CRC-32C {entry.crc32c:08x}",
            url=checkpoint.url,
            key=entry.key,
            operation="read",
        )
    return data


def _matches(data: bytes, entry: ObjectEntry) -> bool:
    return len(data) == entry.size_bytes and crc32c(data) == entry.crc32c
