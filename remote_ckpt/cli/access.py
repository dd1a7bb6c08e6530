"""How commands reach a store: the options that all of them share, and what their arguments name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from remote_ckpt.cli.command import check_path
from remote_ckpt.cli.values import parse_duration, parse_storage_option, parsed
from remote_ckpt.options import CommitOptions, Options, RetryOptions
from remote_ckpt.url import Location, parse_location

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from remote_ckpt.directory import CheckpointDirectory
    from remote_ckpt.place import Place

Function = Callable[..., Any]

_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class Access:
    """What it takes to open a store.

    Args:
        storage_options: As the package takes them; they may hold secrets and are never shown.
        transport: ``"obstore"``, ``"fsspec"`` or None for the one that fits.
        options: Deadlines.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    transport: str | None = None
    options: Options = field(default_factory=Options)

    def place(self, root: str | Location) -> Place:
        """Return a run's directory as the operations below :class:`CheckpointDirectory` take it.

        It loads less: ``ls`` and ``latest`` are what scripts and people call most.
        """
        from remote_ckpt.place import place_of

        return place_of(
            parse_location(root),
            storage_options=self.storage_options or None,
            transport=self.transport,
            options=self.options,
        )

    def directory(self, root: str | Location) -> CheckpointDirectory:
        """Return a run's directory, which the caller closes."""
        from remote_ckpt.directory import CheckpointDirectory

        return CheckpointDirectory(
            parse_location(root),
            storage_options=self.storage_options or None,
            transport=self.transport,
            options=self.options,
        )

    @contextmanager
    def directories(self) -> Iterator[Callable[[Location], CheckpointDirectory]]:
        """A function that opens a run's directory once, however many of its checkpoints are asked for."""
        with ExitStack() as stack:
            opened: dict[Location, CheckpointDirectory] = {}

            def directory(root: Location) -> CheckpointDirectory:
                if root not in opened:
                    opened[root] = stack.enter_context(self.directory(root))
                return opened[root]

            yield directory


@dataclass(frozen=True, slots=True)
class Named:
    """A checkpoint that an argument names: its run's directory and its name there."""

    root: Location
    name: str

    @property
    def url(self) -> str:
        """The redacted URL, or the local path."""
        return self.root.join(self.name).url


def parse_checkpoint(path: str) -> Named:
    """Return what a checkpoint's own path or URL names, taken literally; raises UrlError."""
    root, name = parse_location(path).split()
    return Named(root, name)


def parse_checkpoints(paths: Sequence[str]) -> list[Named]:
    """Return what paths or URLs name, each checkpoint once, however often and in whatever spelling."""
    found: dict[tuple[Location, str], Named] = {}
    for named in map(parse_checkpoint, paths):
        root = named.root
        real = replace(root, path=os.path.realpath(root.path)) if root.is_local else root
        found.setdefault((real, named.name), named)
    return list(found.values())


# --- arguments ---------------------------------------------------------------------------------------------


def complete_folder(_context: object, _parameter: object, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete folders; URLs are not asked for."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


def takes_path(name: str, *, metavar: str, **more: Any) -> Callable[[Function], Function]:
    """Give a command an argument that is a path or URL."""
    return click.argument(
        name, metavar=metavar, shell_complete=complete_folder, callback=parsed(check_path), **more
    )


takes_root = takes_path("root", metavar="ROOT")
takes_checkpoints = takes_path("paths", metavar="CHECKPOINT...", nargs=-1, required=True)


# --- options -------------------------------------------------------------------------------------------


def takes_store(function: Function) -> Function:
    """Give a command the options of its store, and the argument ``access``."""

    @_store_options("")
    @click.option(
        "--timeout",
        metavar="DURATION",
        callback=parsed(parse_duration),
        help="Give up on a request, its repetitions included, and on a change whose outcome is not known. "
        "Default: after 8 tries or 3m.",
    )
    @click.option(
        "--accept-single-writer",
        is_flag=True,
        help="Accept a store without conditional writes; nobody else may write meanwhile.",
    )
    @functools.wraps(function)
    def wrapper(
        *,
        endpoint_url: str | None,
        storage_option: Sequence[tuple[str, Any]],
        transport: str | None,
        timeout: timedelta | None,
        accept_single_writer: bool,
        **arguments: Any,
    ) -> Any:
        options = _options(timeout, accept_single_writer)
        storage_options = _storage_options(endpoint_url, storage_option)
        return function(access=Access(storage_options, transport, options), **arguments)

    return wrapper


def takes_target_store(function: Function) -> Function:
    """Give a command the options of a second store, and the argument ``target_access``.

    It is applied below :func:`takes_store`. Where none of its options is given, the second store is opened
    like the first; :func:`fitting_access` says when that makes sense.
    """

    @_store_options("target-")
    @functools.wraps(function)
    def wrapper(
        *,
        access: Access,
        target_endpoint_url: str | None,
        target_storage_option: Sequence[tuple[str, Any]],
        target_transport: str | None,
        **arguments: Any,
    ) -> Any:
        given = _storage_options(target_endpoint_url, target_storage_option)
        is_given = bool(given or target_transport)
        target = replace(access, storage_options=given, transport=target_transport) if is_given else None
        return function(access=access, target_access=target, **arguments)

    return wrapper


def fitting_access(access: Access, source: Location, target: Location, given: Access | None) -> Access:
    """Return how to open the second store.

    Without options of its own it is opened like the first, unless that is a store of another kind, whose
    endpoint and keys mean nothing here. A local source takes no options, so those given are the target's.
    """
    if given is not None:
        return given
    is_like = source.is_local or source.scheme == target.scheme
    return access if is_like else Access(options=access.options)


def _store_options(prefix: str) -> Callable[[Function], Function]:
    which = "the target's store" if prefix else "the store"
    options = (
        click.option(f"--{prefix}endpoint-url", metavar="URL", help=f"Endpoint of {which}."),
        click.option(
            f"--{prefix}storage-option",
            multiple=True,
            metavar="KEY=VALUE",
            callback=parsed(parse_storage_option),
            help=f"Option of {which}, as s3fs, gcsfs and adlfs name them. Repeatable.",
        ),
        click.option(
            f"--{prefix}transport",
            type=click.Choice(["obstore", "fsspec"]),
            help=f"Client for {which}; by default the one that fits.",
        ),
    )

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _storage_options(endpoint_url: str | None, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    options = dict(pairs)
    if endpoint_url is not None:
        if "endpoint_url" in options:
            raise click.UsageError("the endpoint is given twice")
        options["endpoint_url"] = endpoint_url
    return options


def _options(timeout: timedelta | None, accepts_single_writer: bool) -> Options:
    commit = CommitOptions(accept_single_writer=accepts_single_writer)
    if timeout is None:
        # A person waits: where no connection comes about, eight tries are over in seconds.
        return Options(retry=RetryOptions(max_attempts=_TRIES), commit=commit)
    seconds = timeout.total_seconds()
    retry = RetryOptions(total_seconds=seconds, request_seconds=min(RetryOptions().request_seconds, seconds))
    return Options(retry=retry, commit=replace(commit, commit_seconds=min(commit.commit_seconds, seconds)))
