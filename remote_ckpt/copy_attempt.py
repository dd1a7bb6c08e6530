"""An attempt to copy: written down in the target before it begins, so that it can be taken up again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from remote_ckpt.commit import SaveAttempt, begin_save
from remote_ckpt.errors import AccessDeniedError, ConfigError, ObjectNotFoundError, StoreError
from remote_ckpt.keys import copy_record_key, parse_copy_record_key
from remote_ckpt.log import logger
from remote_ckpt.manifest import Manifest
from remote_ckpt.newest import Standing
from remote_ckpt.options import Options
from remote_ckpt.routes import Route
from remote_ckpt.store.base import DeleteFailure, ObjectInfo, Store
from remote_ckpt.url import check_name

STOCK_FILES = "source_files"
"""Field of a record that tells the copy of a stock checkpoint: key, size and time of each file."""

_DATA_FOLDER = re.compile(r"d-[0-9a-f]{16}(?=/)")
_DATA_FOLDER_BYTES = re.compile(rb"d-[0-9a-f]{16}(?=/)")


@dataclass(frozen=True, slots=True)
class CopyAttempt:
    """One attempt: to which name, under which id, on top of which generation."""

    target: str
    attempt: SaveAttempt
    base_generation: int

    @property
    def record_key(self) -> str:
        """Where it is written down."""
        return copy_record_key(self.attempt.save_id)

    def rename(self, key: str) -> str:
        """Return the target's key of one of the source's data objects."""
        return _DATA_FOLDER.sub(lambda match: self._folder(match[0]), key)

    def rename_in(self, data: bytes, source: Manifest) -> bytes:
        """Return bytes with the source's folders and save_id exchanged for ours, of the same lengths.

        Only its own folders: the names of people's tensors may look like one.
        """
        folders = {entry.key.partition("/")[0].encode() for entry in source.objects}

        def rename(match: re.Match[bytes]) -> bytes:
            found = match[0]
            return self._folder(found.decode()).encode() if found in folders else found

        renamed = _DATA_FOLDER_BYTES.sub(rename, data)
        return renamed.replace(source.save_id.encode(), self.attempt.save_id.encode())

    def _folder(self, source: str) -> str:
        # Derived, not drawn, so that a resumed copy finds the same names by the id alone.
        return f"d-{hashlib.sha256(f'{self.attempt.save_id} {source}'.encode()).hexdigest()[:16]}"


def check_names(route: Route) -> None:
    """Refuse names that cannot be, and a name of a directory for its own target; asks no store."""
    check_name(route.source)
    check_name(route.target)
    if route.source_root is route.target_root and route.source == route.target:
        raise _onto_itself(route.source_root.url, route.source)


def begin_copy(
    checkpoint: Store, standing: Standing, source_save_id: str, *, target: str, options: Options
) -> CopyAttempt:
    """Write down a new attempt on top of what stands in ``checkpoint``."""
    attempt = begin_save(checkpoint, options)
    record = {"source_save_id": source_save_id, "base_generation": standing.generation}
    write_record(checkpoint, attempt.save_id, record)
    return CopyAttempt(target, attempt, standing.generation)


def resume_copy(
    checkpoint: Store, standing: Standing, source_save_id: str, *, target: str, options: Options
) -> CopyAttempt | None:
    """Return an attempt that was begun for the same source and can still be committed, or just was."""
    for info, record in read_records(checkpoint, standing):
        base_generation = record.get("base_generation")
        if record.get("source_save_id") != source_save_id or not isinstance(base_generation, int):
            continue
        copy = CopyAttempt(target, _attempt(info, options), base_generation)
        is_open = base_generation == standing.generation and checkpoint.clock() < copy.attempt.deadline
        if is_open or committed_copy(standing, copy) is not None:
            return copy
    return None


def committed_copy(standing: Standing, copy: CopyAttempt) -> Manifest | None:
    """Return the manifest of a copy if it is what stands in its target."""
    manifest = standing.manifest
    if manifest is None or standing.damage is not None or not standing.is_live:
        return None
    return manifest if manifest.save_id == copy.attempt.save_id else None


def check_apart(origin: Store, checkpoint: Store, record_key: str) -> None:
    """Refuse to go on where what was written down in the target shows in the source: they are the same.

    One checkpoint may be reached in several ways: through symbolic links, endpoints, drivers.
    """
    try:
        infos = origin.list_children("").objects
    except AccessDeniedError:
        return  # a role that may only read objects is not the one that has just written
    if all(info.key != record_key for info in infos):
        return
    delete_record(checkpoint, record_key)
    raise _onto_itself(origin.url, checkpoint.url)


def write_record(checkpoint: Store, save_id: str, record: dict[str, Any]) -> None:
    """Write an attempt down."""
    checkpoint.write(copy_record_key(save_id), json.dumps(record).encode())


def delete_record(checkpoint: Store, key: str) -> None:
    """Remove a record; never raises for the store's sake: one that stays is the sweep's."""
    try:
        failures = checkpoint.delete([key])
    except StoreError as error:
        failures = [DeleteFailure(key, error)]
    for failure in failures:
        logger.warning("%s: cannot remove %s: %s", checkpoint.url, failure.key, failure.error)


def read_records(checkpoint: Store, standing: Standing) -> Iterator[tuple[ObjectInfo, dict[str, Any]]]:
    """Yield the attempts that are written down among what was listed, with their records."""
    for info in standing.infos:
        if parse_copy_record_key(info.key) is None:
            continue
        try:
            record = json.loads(checkpoint.read(info.key))
        except (ObjectNotFoundError, ValueError, RecursionError):
            continue  # finished by somebody else, or not readable: the sweep takes it
        if isinstance(record, dict):
            yield info, record


def stock_copy_sizes(checkpoint: Store, standing: Standing) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the records of copies of stock checkpoints: key, and the size in bytes of each file named.

    A record that cannot be read, or says something else, is left out.
    """
    for info, record in read_records(checkpoint, standing):
        files = record.get(STOCK_FILES)
        if isinstance(files, dict):
            yield info.key, {key: said[0] for key, said in files.items() if _is_size_first(said)}


def _is_size_first(said: object) -> bool:
    return isinstance(said, list) and bool(said) and isinstance(said[0], int)


def _attempt(record: ObjectInfo, options: Options) -> SaveAttempt:
    save_id = parse_copy_record_key(record.key)
    assert save_id is not None  # so read_records() picked it
    began_at = record.modified_at
    return SaveAttempt(save_id, began_at, began_at + timedelta(seconds=options.commit.save_seconds))


def _onto_itself(source: str, target: str) -> ConfigError:
    return ConfigError(f"cannot copy checkpoint {target} onto itself", url=source, operation="copy")
