"""One checkpoint, chosen once and read to the end.

What a missing object means depends on what stands there now: the same generation of the same save still
newest means damage, anything else that the checkpoint was replaced or deleted under the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

from remote_ckpt.collector import collector_paused
from remote_ckpt.errors import (
    CheckpointChangedError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    FormatError,
    ObjectNotFoundError,
)
from remote_ckpt.index import Index, check_ranges, parse_index
from remote_ckpt.integrity import read_verified
from remote_ckpt.keys import STOCK_METADATA_NAME
from remote_ckpt.manifest import Manifest
from remote_ckpt.moves import run_all
from remote_ckpt.newest import PLAIN_NAME, CheckpointKind, Standing, look, look_at_top
from remote_ckpt.stock_contents import parse_stock_contents
from remote_ckpt.stock_index import index_of_stock
from remote_ckpt.store.base import Store
from remote_ckpt.url import check_name


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What stood at a checkpoint's place when it was opened; nothing of it is cached but the manifest.

    Args:
        name: The checkpoint's name.
        kind: Who wrote it.
        store: The checkpoint's own store, open.
        standing: What the first look showed.
    """

    name: str
    kind: CheckpointKind
    store: Store
    standing: Standing

    @property
    def url(self) -> str:
        """The checkpoint's URL without secrets."""
        return self.store.url

    def listed_sizes(self) -> dict[str, int]:
        """Return the bytes of each object that was listed."""
        return {info.key: info.size_bytes for info in self.standing.infos}

    def find_sizes(self, expected: Mapping[str, int], *, concurrency: int) -> dict[str, int]:
        """Return the bytes of those of the expected objects that are there.

        An object that the listing lacks, or shows with another size, is asked for by its key: a listing may
        lag, and must not make a sound checkpoint look damaged.

        Args:
            expected: Keys and the sizes that they should have.
            concurrency: Most requests at once.

        Raises:
            StoreError: The store failed.
        """
        listed = self.listed_sizes()
        sizes = {key: listed[key] for key in expected if key in listed}

        def ask(key: str) -> None:
            try:
                sizes[key] = self.store.info(key).size_bytes
            except ObjectNotFoundError:
                sizes.pop(key, None)

        run_all(ask, [key for key in expected if sizes.get(key) != expected[key]], concurrency=concurrency)
        return sizes

    def require_unchanged(self) -> None:
        """Look again.

        Raises:
            CheckpointChangedError: The checkpoint is another one now, or none.
            StoreError: The store failed, so nobody knows.
        """
        now = look_at_top(self.store)
        is_same = (now.generation, now.save_id) == (self.standing.generation, self.standing.save_id)
        if not is_same or not self.store.is_current():
            raise _changed(self.url)

    def explain_missing(self, key: str) -> CheckpointDamagedError:
        """Return what a missing object means where the checkpoint did not change.

        Raises:
            CheckpointChangedError: It did.
        """
        self.require_unchanged()
        return CheckpointDamagedError(
            f"{self.url} is committed, but {key} of it is missing", url=self.url, key=key, operation="read"
        )

    def read_index(self) -> Index:
        """Return the index; that of a stock checkpoint has whole archives and no checksums.

        Raises:
            CheckpointDamagedError, UntrustedDataError: Manifest, index or ``.metadata`` cannot be read.
            IntegrityError: The index differs from what was saved.
            FormatError: It is of a newer format, or the checkpoint is a plain one, which has no index.
            CheckpointChangedError: The checkpoint was replaced or deleted meanwhile.
            StoreError: The store failed.
        """
        if self.kind == "plain":
            raise FormatError(
                f"{self.url} is a plain checkpoint ({PLAIN_NAME}): what it holds cannot be listed without "
                "loading it",
                url=self.url,
                key=PLAIN_NAME,
            )
        with collector_paused():
            return self._read_stock_index() if self.kind == "dcp" else self._read_own_index()

    def _read_own_index(self) -> Index:
        manifest = self.require_manifest()
        entry = manifest.index
        if entry is None:
            raise CheckpointDamagedError("the manifest names no index", url=self.url, operation="read index")
        data = self._read(entry.key, lambda: read_verified(self.store, entry))
        index = parse_index(data, url=self.url, key=entry.key)
        check_ranges(index, {one.key: one.size_bytes for one in manifest.objects}, url=self.url)
        return index

    def _read_stock_index(self) -> Index:
        data = self._read(STOCK_METADATA_NAME, lambda: self.store.read(STOCK_METADATA_NAME))
        metadata = parse_stock_contents(data, url=self.url, key=STOCK_METADATA_NAME)
        return index_of_stock(metadata, url=self.url, key=STOCK_METADATA_NAME)

    def _read(self, key: str, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except ObjectNotFoundError as error:
            raise self.explain_missing(key) from error

    def require_manifest(self) -> Manifest:
        """Return the manifest of a checkpoint of ours; raises CheckpointDamagedError if it is unreadable."""
        if self.standing.damage is not None or self.standing.manifest is None:
            raise self.standing.damage or CheckpointDamagedError("it has no manifest", url=self.url)
        return self.standing.manifest


@contextmanager
def open_snapshot(root: Store, name: str, *, lists_all: bool = False) -> Iterator[Snapshot]:
    """Choose the newest generation of a checkpoint, and hold its store open.

    Args:
        root: The run's directory.
        name: The checkpoint's name.
        lists_all: List every object; otherwise those of the top level only.

    Raises:
        CheckpointNotFoundError: There is none, established by a listing that succeeded.
        CheckpointChangedError: It was replaced or deleted while it was looked at.
        FormatError: It is of a newer format.
        StoreError: The store failed.
    """
    with closing(root.scope(check_name(name))) as checkpoint:
        standing = look(checkpoint) if lists_all else look_at_top(checkpoint)
        if not checkpoint.is_current():
            raise _changed(checkpoint.url)
        if standing.kind is None or not standing.is_live:
            raise CheckpointNotFoundError(
                f"no committed checkpoint {name!r} in {root.url}", url=root.url, step=name, operation="find"
            )
        yield Snapshot(name, standing.kind, checkpoint, standing)


def _changed(url: str) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"{url} was replaced or deleted while it was read: try again", url=url, operation="read"
    )
