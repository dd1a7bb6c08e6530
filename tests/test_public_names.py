"""Public is what ``remote_ckpt.__all__`` lists: it can be imported, and it says what it is."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import remote_ckpt
from remote_ckpt import errors

SEED_NAMES = (
    "CheckpointRetentionPolicy",
    "cleanup_checkpoint",
    "find_all_checkpoints",
    "find_latest_checkpoint",
    "init_fsdp_model_from_checkpoint",
    "init_model_from_checkpoint_for_evals",
    "keep_checkpoint_copy",
    "keep_last_n_checkpoints",
    "load_checkpoint",
    "register_dont_save_hooks",
    "save_checkpoint",
)
"""What a script written for DINOv3's checkpointer imports."""


def public_names() -> list[str]:
    return sorted(name for name in remote_ckpt.__all__ if name != "__version__")


def test_all_is_sorted_and_without_duplicates() -> None:
    names = list(remote_ckpt.__all__)
    assert len(set(names)) == len(names)


def test_all_is_what_dir_shows() -> None:
    shown = {name for name in dir(remote_ckpt) if not name.startswith("_")}
    modules = {name for name in shown if inspect.ismodule(getattr(remote_ckpt, name))}
    assert shown - modules - {"annotations", "TYPE_CHECKING", "Any"} == set(public_names())


def test_every_error_is_public() -> None:
    kinds = {
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)
    }
    assert kinds <= set(remote_ckpt.__all__)


def test_every_name_of_the_seed_is_public() -> None:
    assert set(SEED_NAMES) <= set(remote_ckpt.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = remote_ckpt.no_such_name


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_can_be_imported_and_has_a_docstring_of_its_own(name: str) -> None:
    public = getattr(remote_ckpt, name)
    assert public.__module__.startswith("remote_ckpt.")
    assert (vars(public).get("__doc__") if inspect.isclass(public) else public.__doc__) not in (None, "")


@pytest.mark.parametrize("name", public_names())
def test_the_public_methods_of_a_public_class_have_docstrings(name: str) -> None:
    public = getattr(remote_ckpt, name)
    own = vars(public).items() if inspect.isclass(public) else ()
    bare = [
        key
        for key, value in own
        if inspect.isfunction(value) and not key.startswith("_") and not inspect.getdoc(getattr(public, key))
    ]
    assert bare == []


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, remote_ckpt; remote_ckpt.find_latest_checkpoint; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
