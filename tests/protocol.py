"""What the tests of the commit protocol share: small saves, honest readers, faults at chosen calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from remote_ckpt.checksum import crc32c
from remote_ckpt.commit import (
    SaveAttempt,
    begin_save,
    commit_save,
    finish_replacement,
    is_not_committed,
    open_for_save,
    withdraw,
)
from remote_ckpt.errors import CheckpointNotFoundError, ObjectNotFoundError
from remote_ckpt.generation import Waiting
from remote_ckpt.index import Index, format_index
from remote_ckpt.keys import data_key, index_key, new_token, stock_metadata_key
from remote_ckpt.manifest import Manifest, ObjectEntry
from remote_ckpt.newest import named_keys, read_newest
from remote_ckpt.options import CommitOptions, Options
from remote_ckpt.store.base import Listing, ObjectInfo, Store
from remote_ckpt.testing.faults import FaultStore, StoreCall
from remote_ckpt.url import parse_step

OPTIONS = Options(commit=CommitOptions(commit_seconds=60.0))


class FakeTime:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    @property
    def waiting(self) -> Waiting:
        return Waiting(monotonic=lambda: self.now, sleep=self.sleep, jitter=lambda: 0.5)


# --- saving and loading ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Upload:
    """Objects that an attempt has written, not yet committed."""

    attempt: SaveAttempt
    draft: Manifest
    stock: bytes

    @property
    def expected(self) -> dict[str, int]:
        entries = [*self.draft.objects, self.draft.index, self.draft.stock_metadata]
        return {entry.key: entry.size_bytes for entry in entries if entry is not None}


def upload(
    checkpoint: Store, payload: bytes, *, name: str = "10", written: list[str] | None = None
) -> Upload:
    """Write data, index and stock metadata as a save does; keys go to ``written`` before they are written."""
    attempt = begin_save(checkpoint, OPTIONS)
    token = new_token()
    keys = [data_key(token, number) for number in range(2)]
    stock = f"stock {' '.join(keys)} of {attempt.save_id}".encode()
    index = format_index(Index(save_id=attempt.save_id, block_bytes=4096, objects=keys))
    contents = {key: payload + key.encode() for key in keys}
    contents |= {index_key(attempt.save_id): index, stock_metadata_key(attempt.save_id): stock}
    (written if written is not None else []).extend(contents)
    for key, data in contents.items():
        checkpoint.write(key, data)
    entries = [ObjectEntry(key, len(data), crc32c(data)) for key, data in contents.items()]
    draft = Manifest(
        generation=1,
        save_id=attempt.save_id,
        state="live",
        name=name,
        step=parse_step(name),
        created_at=attempt.began_at,
        committed_at=attempt.began_at,
        world_size=1,
        package_version="0",
        total_bytes=sum(entry.size_bytes for entry in entries[:2]),
        objects=tuple(entries[:2]),
        index=entries[2],
        stock_metadata=entries[3],
        user_metadata={"payload": payload.decode()},
        content_digest=f"digest of {payload.decode()}",
    )
    return Upload(attempt, draft, stock)


def save(
    root: Store,
    payload: bytes,
    *,
    name: str = "10",
    overwrite: bool = False,
    options: Options = OPTIONS,
    waiting: Waiting | None = None,
) -> Manifest:
    """Save like the DCP writer: open, upload, commit, finish; withdraw after a definite failure."""
    checkpoint = open_for_save(root, name, overwrite=overwrite)
    written: list[str] = []
    done: Upload | None = None
    try:
        done = upload(checkpoint, payload, name=name, written=written)
        manifest = commit_save(
            checkpoint,
            done.draft,
            attempt=done.attempt,
            overwrite=overwrite,
            expected=done.expected,
            options=options,
            waiting=waiting or FakeTime().waiting,
        )
    except Exception as error:
        if is_not_committed(error):
            withdraw(checkpoint, written, None if done is None else done.attempt.save_id)
        raise
    finish_replacement(checkpoint, manifest, done.stock)
    checkpoint.close()
    return manifest


def load(root: Store, name: str = "10") -> bytes | None:
    """Read a checkpoint whole like an honest reader, or return None where there is none.

    Raises:
        AssertionError: What was read is a part of a checkpoint, or a mixture.
    """
    for _ in range(20):
        try:
            checkpoint = root.scope(name)
        except CheckpointNotFoundError:
            return None
        newest = read_newest(checkpoint)
        if newest is None or not newest.is_live:
            return None
        try:
            return _read_payload(checkpoint, newest.manifest)
        except ObjectNotFoundError as error:
            again = read_newest(checkpoint) if checkpoint.is_current() else None
            if again == newest:
                raise AssertionError(f"the newest generation lacks an object: {error}") from error
    raise AssertionError("the checkpoint changed again and again")


def _read_payload(checkpoint: Store, manifest: Manifest) -> bytes:
    payloads = set()
    for entry in manifest.objects:
        data = checkpoint.read(entry.key)
        assert len(data) == entry.size_bytes, f"{entry.key} is cut"
        assert crc32c(data) == entry.crc32c, f"{entry.key} is altered"
        payloads.add(data.removesuffix(entry.key.encode()))
    assert payloads == {str(manifest.user_metadata["payload"]).encode()}, "a mixture of saves"
    for key in named_keys(manifest) - {entry.key for entry in manifest.objects}:
        checkpoint.read(key)
    return payloads.pop()


def keys_of(root: Store, name: str = "10") -> set[str]:
    """Every key of a checkpoint that is not a manifest."""
    infos = root.list(f"{name}/")
    return {info.key.removeprefix(f"{name}/") for info in infos if "manifest." not in info.key}


def manifests_of(root: Store, name: str = "10") -> list[str]:
    return [info.key.removeprefix(f"{name}/") for info in root.list(f"{name}/") if "manifest." in info.key]


def expected_keys(manifest: Manifest) -> set[str]:
    """The keys of a checkpoint after which nothing was left to clean up."""
    return {*named_keys(manifest), ".metadata"}


def next_generation(manifest: Manifest, **changes: object) -> Manifest:
    return replace(manifest, generation=manifest.generation + 1, **changes)  # type: ignore[arg-type]


# --- faults ------------------------------------------------------------------------------------------

Hook = Callable[[str, str], None]


def ignore(operation: str, key: str) -> None:
    """A hook that does nothing."""


@dataclass(frozen=True)
class Script:
    """What happens at a store's calls: hooks get the operation and key, and may raise."""

    before: Hook = ignore
    after: Hook = ignore


def scripted(inner: Store, script: Script) -> FaultStore:
    """A store whose calls, and those of its scopes, follow a script."""

    def after(call: StoreCall, result: Any) -> Any:
        script.after(call.operation, call.key or "")
        return result

    return FaultStore(inner, before=lambda call: script.before(call.operation, call.key or ""), after=after)


def once(operation: str, act: Callable[[], object]) -> Hook:
    """A hook that acts at the first such call."""
    pending = [act]

    def at_call(called: str, key: str) -> None:
        if called == operation and pending:
            pending.pop()()

    return at_call


def stale_after_create(
    inner: Store, listed: Callable[[ObjectInfo], bool], *, times: int = 1000
) -> FaultStore:
    """A store whose listings, once a manifest was created, show only some objects, for so many times."""
    left: list[int] = []

    def after(call: StoreCall, result: Any) -> Any:
        if call.operation == "create":
            left.extend(range(times))
        if not left or call.operation not in ("list", "list_children"):
            return result
        left.pop()
        if isinstance(result, Listing):
            return Listing(tuple(filter(listed, result.objects)), ())
        return list(filter(listed, result))

    return FaultStore(inner, after=after)


def later(inner: Store, delay: timedelta) -> FaultStore:
    """The same store at a later time of its own clock."""

    def after(call: StoreCall, result: Any) -> Any:
        return result + delay if call.operation == "clock" else result

    return FaultStore(inner, after=after)


def answers(
    operation: str, errors: Mapping[int, BaseException], *, is_after: bool = False, key: str = "manifest."
) -> Script:
    """A script in which the n-th (from 0) such call on such a key fails, before or after it took effect."""
    seen = iter(range(1000))

    def fail(called: str, at: str) -> None:
        if called == operation and at.startswith(key) and (error := errors.get(next(seen))) is not None:
            raise error

    return Script(after=fail) if is_after else Script(before=fail)
