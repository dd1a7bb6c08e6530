"""``info``: what a checkpoint says about itself, and which tensors it holds, without reading them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from remote_ckpt.cli.access import Access, parse_checkpoints, takes_checkpoints, takes_store
from remote_ckpt.cli.command import Command
from remote_ckpt.cli.commands.finding import matches
from remote_ckpt.cli.exits import ExitCode
from remote_ckpt.cli.output import Output, plain, takes_output
from remote_ckpt.cli.several import Outcomes
from remote_ckpt.cli.table import Cell, Column
from remote_ckpt.cli.text import (
    escape,
    format_age_of,
    format_bytes,
    format_count,
    format_metrics,
    format_moment,
)

if TYPE_CHECKING:
    from remote_ckpt.contents import Contents, TensorInfo, ValueInfo
    from remote_ckpt.info import CheckpointInfo

_TENSOR_COLUMNS = (
    Column("tensor"),
    Column("shape"),
    Column("dtype"),
    Column("size", is_number=True),
    Column("chunks", is_number=True),
    Column("objects", is_number=True),
)
_CHUNK_COLUMNS = (
    Column("tensor"),
    Column("offsets"),
    Column("sizes"),
    Column("object"),
    Column("first byte", is_number=True),
    Column("bytes", is_number=True),
)
_VALUE_COLUMNS = (
    Column("value"),
    Column("size", is_number=True),
    Column("object"),
    Column("first byte", is_number=True),
)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What is shown of one checkpoint; no tensors or values where nobody wants them."""

    info: CheckpointInfo
    has_contents: bool = False
    tensors: Sequence[TensorInfo] = ()
    values: Sequence[ValueInfo] = ()

    @property
    def total_bytes(self) -> int:
        tensors = sum(tensor.total_bytes for tensor in self.tensors)
        return tensors + sum(value.length_bytes for value in self.values)


@click.command(cls=Command)
@takes_checkpoints
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    metavar="GLOB",
    help="Only tensors and values whose name matches; totals are of these. Repeatable.",
)
@click.option("--chunks", "has_chunks", is_flag=True, help="One line for each chunk: where its bytes lie.")
@click.option("--no-contents", "is_short", is_flag=True, help="Leave tensors and values out.")
@takes_store
@takes_output
def info(
    paths: Sequence[str],
    patterns: Sequence[str],
    has_chunks: bool,
    is_short: bool,
    access: Access,
    out: Output,
) -> ExitCode:
    """Show what checkpoints say about themselves, and their tensors: shape, dtype, size, placement."""
    names = parse_checkpoints(paths)
    outcomes = Outcomes(out)
    shown: list[_Shown] = []
    with access.directories() as directory_of:
        for named in names:
            with outcomes.of(named):
                directory = directory_of(named.root)
                found = directory.info(named.name)
                is_listed = not is_short and found.kind != "plain"
                contents = directory.contents(named.name) if is_listed else None
                shown.append(_select(found, contents, patterns))
    out.show(
        lambda: {"checkpoints": [_document(each, has_chunks) for each in shown]},
        lambda: "\n\n".join(_text(each, has_chunks, out) for each in shown),
    )
    return outcomes.exit_code


def _select(found: CheckpointInfo, contents: Contents | None, patterns: Sequence[str]) -> _Shown:
    if contents is None:
        return _Shown(found)
    return _Shown(
        found,
        has_contents=True,
        tensors=[tensor for tensor in contents.tensors if matches(tensor.name, patterns)],
        values=[value for value in contents.values if matches(value.name, patterns)],
    )


# --- JSON ------------------------------------------------------------------------------------------------


def _document(shown: _Shown, has_chunks: bool) -> dict[str, Any]:
    document: dict[str, Any] = plain(shown.info)
    if shown.has_contents:
        document |= {
            "tensors": [_tensor_document(tensor, has_chunks) for tensor in shown.tensors],
            "values": shown.values,
            "contents_bytes": shown.total_bytes,
        }
    return document


def _tensor_document(tensor: TensorInfo, has_chunks: bool) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "total_bytes": tensor.total_bytes,
        "chunk_count": len(tensor.chunks),
        "object_count": _count_objects(tensor),
        **({"chunks": tensor.chunks} if has_chunks else {}),
    }


def _count_objects(tensor: TensorInfo) -> int:
    return len({chunk.key for chunk in tensor.chunks})


# --- text ------------------------------------------------------------------------------------------------


def _text(shown: _Shown, has_chunks: bool, out: Output) -> str:
    parts = [_facts(shown.info, out)]
    if shown.tensors and has_chunks:
        rows = (row for tensor in shown.tensors for row in _chunk_rows(tensor))
        parts.append(out.table(_CHUNK_COLUMNS, rows))
    elif shown.tensors:
        parts.append(out.table(_TENSOR_COLUMNS, map(_tensor_row, shown.tensors)))
    if shown.values:
        parts.append(out.table(_VALUE_COLUMNS, map(_value_row, shown.values)))
    if shown.has_contents:
        parts.append(_totals(shown))
    return "\n\n".join(parts)


def _facts(found: CheckpointInfo, out: Output) -> str:
    committed = format_moment(found.committed_at)
    facts = {
        "url": found.url,
        "kind": found.kind,
        "formats": ", ".join(found.formats),
        "committed": f"{committed} ({format_age_of(found.committed_at)} ago)" if found.committed_at else "-",
        "size": f"{format_bytes(found.total_bytes)} in {format_count(found.object_count, 'object')}"
        if found.object_count
        else format_bytes(found.total_bytes),
        "ranks": found.world_size,
        "pinned": "yes" if found.pinned else "no",
        "generation": found.generation,
        "save id": found.save_id,
        "torch": found.torch_version,
        "package": found.package_version,
        "metrics": format_metrics(found.metrics) if found.metrics else None,
        "metadata": json.dumps(found.metadata, ensure_ascii=False) if found.metadata else None,
        "left out": ", ".join(found.left_out) or None,
        "digest": found.content_digest,
    }
    known = {name: escape(value) for name, value in facts.items() if value is not None}
    return "\n".join(
        [out.paint(found.name, "bold"), *(f"  {name:<10}  {value}" for name, value in known.items())]
    )


def _tensor_row(tensor: TensorInfo) -> list[Cell]:
    return [
        escape(tensor.name),
        _box(tensor.shape),
        escape(tensor.dtype),
        format_bytes(tensor.total_bytes),
        str(len(tensor.chunks)),
        str(_count_objects(tensor)),
    ]


def _chunk_rows(tensor: TensorInfo) -> Iterable[list[Cell]]:
    for chunk in tensor.chunks:
        yield [
            escape(tensor.name),
            _box(chunk.offsets),
            _box(chunk.sizes),
            escape(chunk.key),
            str(chunk.offset_bytes),
            str(chunk.length_bytes),
        ]


def _value_row(value: ValueInfo) -> list[Cell]:
    return [escape(value.name), format_bytes(value.length_bytes), escape(value.key), str(value.offset_bytes)]


def _box(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def _totals(shown: _Shown) -> str:
    tensors = format_count(len(shown.tensors), "tensor")
    return f"{tensors}, {format_count(len(shown.values), 'value')}, {format_bytes(shown.total_bytes)}"
