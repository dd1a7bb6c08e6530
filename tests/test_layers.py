"""The folder list is the architecture: imports point down only, and torch starts at ``dcp``."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "remote_ckpt"

LAYERS: tuple[tuple[str, ...], ...] = (
    # Pure: errors, options, names.
    ("_version", "errors", "options", "log", "url", "resumed", "keys", "fields", "progress", "collector"),
    # Pure: codecs and decisions.
    (
        "checksum",
        "archive",
        "columns",
        "tagged",
        "coverage",
        "entries",
        "manifest",
        "index",
        "index_rules",
        "inert_pickle",
        "stock_contents",
        "stock_index",
        "spans",
        "overlaps",
        "checksum_comparison",
        "stock_payload",
        "candidates",
        "verdicts",
    ),
    ("policies",),
    ("retention",),
    # Where bytes live.
    ("store",),
    # How they are moved and checked.
    ("transfer", "integrity", "moves", "streams", "routes", "object_check", "problems"),
    # Which checkpoints exist, and how one comes to exist.
    ("newest", "generation", "changes", "probe", "stock_metadata"),
    ("commit", "deletion", "discover", "copy_attempt", "copies", "stock_copies", "snapshot"),
    # A run's directory: operations over an open store, then what users call.
    ("place", "contents", "own_check", "stock_check", "sides", "element_comparison"),
    ("sweep_links", "sweep_plan", "sweep_scan", "sweep_removal"),
    ("info", "pruning", "verification", "comparison", "usage", "sweep", "copying"),
    ("upkeep", "directory"),
    # torch starts here.
    ("dcp",),
    ("training", "pretrained"),
    ("manager",),
    # The command line.
    ("cli",),
    # For tests, ours and others'.
    ("testing",),
)
TORCH_STARTS_AT = next(layer for layer, names in enumerate(LAYERS) if "dcp" in names)
OPTIONAL = ("torch", "boto3", "s3fs", "upath", "safetensors")


def layer_of(module: str) -> int:
    """Return the layer of ``remote_ckpt.<module>``; modules in a folder have the folder's."""
    noun = module.split(".")[0]
    return next((layer for layer, names in enumerate(LAYERS) if noun in names), len(LAYERS))


def module_names() -> list[str]:
    """Return all modules without the package's own name and without its ``__init__``."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    names = (".".join(path.parts).removesuffix(".__init__") for path in paths)
    return sorted(name for name in names if name != "__init__")


def parse_module(name: str) -> ast.Module:
    path = PACKAGE.joinpath(*name.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that only a type checker sees; imports inside functions count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child):
            for other in child.orelse:
                yield from running_nodes(other)
        else:
            yield child
            yield from running_nodes(child)


def imported_names(name: str) -> Iterator[str]:
    """Yield the absolute name of everything that a module imports, at whatever depth."""
    for node in running_nodes(parse_module(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import, line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name: str) -> set[str]:
    """Return the modules of this package that a module imports, without the package's name."""
    prefix = "remote_ckpt."
    return {found.removeprefix(prefix) for found in imported_names(name) if found.startswith(prefix)}


@pytest.mark.parametrize("module", module_names())
def test_every_module_stands_in_a_layer(module: str) -> None:
    assert layer_of(module) < len(LAYERS), "give it a layer in this table"


@pytest.mark.parametrize("module", module_names())
def test_imports_point_down_only(module: str) -> None:
    up = {found for found in own_imports(module) if layer_of(found) > layer_of(module)}
    assert up == set()


@pytest.mark.parametrize("module", [name for name in module_names() if layer_of(name) < TORCH_STARTS_AT])
def test_nothing_below_the_dcp_layer_imports_torch(module: str) -> None:
    assert {found for found in imported_names(module) if found.split(".")[0] == "torch"} == set()


def test_importing_everything_below_the_dcp_layer_loads_no_optional_package() -> None:
    modules = [f"remote_ckpt.{name}" for name in module_names() if layer_of(name) < TORCH_STARTS_AT]
    program = (
        f"import sys, remote_ckpt, {', '.join(modules)}; print([m for m in {OPTIONAL} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
