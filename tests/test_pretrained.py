"""Initialising models from checkpoints and files, in one process and sharded over several ranks."""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from ranks import Ranks
from safetensors.torch import save_file
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from remote_ckpt import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    DtypeMismatchError,
    KeyMismatchError,
    MismatchError,
    ShapeMismatchError,
    UnsupportedStoreError,
    UntrustedDataError,
    find_latest_checkpoint,
    init_fsdp_model_from_checkpoint,
    init_model_from_checkpoint_for_evals,
    save_checkpoint,
)
from remote_ckpt.store import open_store

_numbers = itertools.count()
Initialiser = Callable[..., None]
BOTH = [init_model_from_checkpoint_for_evals, init_fsdp_model_from_checkpoint]


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)))


def prefixed(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in state.items()}


def are_equal(first: nn.Module, second: nn.Module) -> bool:
    left, right = first.state_dict(), second.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def write_ours(folder: Path, model: nn.Module) -> str:
    save_checkpoint(folder / "9", iteration=9, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    return str(folder / "9")


def write_training_model(folder: Path, model: nn.Module) -> str:
    """As DINOv3 trains: student and teacher, each with a backbone."""
    student = nn.ModuleDict({"backbone": make_model(50)})
    parts = nn.ModuleDict({"student": student, "teacher": nn.ModuleDict({"backbone": model})})
    return write_ours(folder, parts)


def write_stock(folder: Path, model: nn.Module) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({"model": model.state_dict()}, storage_writer=FileSystemWriter(folder / "stock"))
    return str(folder / "stock")


def write_plain_folder(folder: Path, model: nn.Module) -> str:
    (folder / "99").mkdir()
    torch.save({"model": model.state_dict(), "iteration": 99}, folder / "99" / "checkpoint.pth")
    return str(folder / "99")


def write_teacher_file(folder: Path, model: nn.Module) -> str:
    torch.save({"teacher": prefixed(model.state_dict(), "backbone."), "epoch": 3}, folder / "teacher.pth")
    return str(folder / "teacher.pth")


def write_bare_file(folder: Path, model: nn.Module) -> str:
    torch.save(prefixed(model.state_dict(), "module._orig_mod."), folder / "weights.bin")
    return str(folder / "weights.bin")


def write_safetensors(folder: Path, model: nn.Module) -> str:
    save_file(model.state_dict(), folder / "model.safetensors")
    return str(folder / "model.safetensors")


def write_memory_file(folder: Path, model: nn.Module) -> str:
    return upload(write_teacher_file(folder, model))


def write_memory_safetensors(folder: Path, model: nn.Module) -> str:
    return upload(write_safetensors(folder, model))


def upload(file: str) -> str:
    """Put a file into a memory store; returns its URL."""
    root = f"memory://pretrained-{next(_numbers)}/weights"
    open_store(root).write(Path(file).name, Path(file).read_bytes())
    return f"{root}/{Path(file).name}"


WRITERS = [
    write_ours,
    write_training_model,
    write_stock,
    write_plain_folder,
    write_teacher_file,
    write_bare_file,
    write_safetensors,
    write_memory_file,
    write_memory_safetensors,
]


@pytest.mark.parametrize("initialise", BOTH)
@pytest.mark.parametrize("write", WRITERS)
def test_a_model_takes_weights_from_every_kind_of_source(
    tmp_path: Path, write: Callable[[Path, nn.Module], str], initialise: Initialiser
) -> None:
    saved, model = make_model(0), make_model(1)
    initialise(model, write(tmp_path, saved))
    assert are_equal(model, saved)


@pytest.mark.parametrize("initialise", BOTH)
def test_a_legacy_torch_file_is_read(tmp_path: Path, initialise: Initialiser) -> None:
    saved, model = make_model(0), make_model(1)
    torch.save(saved.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    initialise(model, tmp_path / "old.pt")
    assert are_equal(model, saved)


def test_numpy_values_in_a_file_are_no_reason_to_refuse_it(tmp_path: Path) -> None:
    saved, model = make_model(0), make_model(1)
    torch.save(
        {"model": saved.state_dict(), "loss": np.float64(0.5), "rng": np.arange(3)}, tmp_path / "a.pth"
    )
    init_model_from_checkpoint_for_evals(model, tmp_path / "a.pth")
    assert are_equal(model, saved)


def write_two_parts(folder: Path, model: nn.Module) -> str:
    parts = {"student": make_model(50).state_dict(), "teacher": model.state_dict()}
    torch.save(parts, folder / "two.pth")
    return str(folder / "two.pth")


@pytest.mark.parametrize("write", [write_training_model, write_two_parts])
def test_a_key_chooses_the_part(tmp_path: Path, write: Callable[[Path, nn.Module], str]) -> None:
    model = make_model(1)
    init_model_from_checkpoint_for_evals(model, write(tmp_path, make_model(0)), "student")
    assert are_equal(model, make_model(50))


def test_prefixes_are_removed_at_the_beginning_of_a_name_only(tmp_path: Path) -> None:
    inner = nn.ModuleDict({"my_backbone": nn.Linear(2, 2), "submodule": nn.Linear(2, 2)})
    torch.save(prefixed(inner.state_dict(), "backbone."), tmp_path / "a.pth")
    torch.manual_seed(1)
    model = nn.ModuleDict({"my_backbone": nn.Linear(2, 2), "submodule": nn.Linear(2, 2)})
    init_model_from_checkpoint_for_evals(model, tmp_path / "a.pth")
    assert are_equal(model, inner)


# --- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize("initialise", BOTH)
@pytest.mark.parametrize("write", [write_ours, write_teacher_file])
def test_that_nothing_fits_is_an_error(
    tmp_path: Path, write: Callable[[Path, nn.Module], str], initialise: Initialiser
) -> None:
    with pytest.raises(KeyMismatchError, match=r"nothing in .* fits the model, which asks for other"):
        initialise(nn.ModuleDict({"other": nn.Linear(1, 1)}), write(tmp_path, make_model(0)))


def test_missing_and_unexpected_weights_of_an_evaluation_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_model(0).state_dict()
    state["extra"] = state.pop("0.bias")
    torch.save(state, tmp_path / "a.pth")
    model = make_model(1)
    init_model_from_checkpoint_for_evals(model, tmp_path / "a.pth")
    assert "left as they were: 0.bias" in caplog.text
    assert "not used: extra" in caplog.text
    assert torch.equal(model.state_dict()["0.bias"], make_model(1).state_dict()["0.bias"])
    assert torch.equal(model.state_dict()["0.weight"], state["0.weight"])


def test_a_checkpoint_that_lacks_parameters_is_refused_unless_they_are_skipped(tmp_path: Path) -> None:
    url = write_ours(tmp_path, make_model(0))
    model = nn.Sequential(*make_model(1), nn.Linear(5, 2))
    with pytest.raises(KeyMismatchError, match=r"missing from .*: 2\.bias, 2\.weight"):
        init_fsdp_model_from_checkpoint(model, url)
    head = model.state_dict()["2.weight"].clone()
    init_fsdp_model_from_checkpoint(model, url, skip_load_keys=["2."])
    assert torch.equal(model.state_dict()["2.weight"], head)
    assert torch.equal(model.state_dict()["0.weight"], make_model(0).state_dict()["0.weight"])


@pytest.mark.parametrize("write", [write_ours, write_teacher_file])
def test_skipped_parameters_keep_their_values(
    tmp_path: Path, write: Callable[[Path, nn.Module], str]
) -> None:
    model = make_model(1)
    init_fsdp_model_from_checkpoint(model, write(tmp_path, make_model(0)), skip_load_keys=["0.weight"])
    state, before, saved = (one.state_dict() for one in (model, make_model(1), make_model(0)))
    assert torch.equal(state["0.weight"], before["0.weight"])
    assert torch.equal(state["0.bias"], saved["0.bias"])


@pytest.mark.parametrize("initialise", BOTH)
@pytest.mark.parametrize("write", [write_ours, write_teacher_file])
def test_another_shape_is_refused_before_anything_changes(
    tmp_path: Path, write: Callable[[Path, nn.Module], str], initialise: Initialiser
) -> None:
    def make_wider(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7)))

    model = make_wider(1)
    with pytest.raises(ShapeMismatchError, match=r"1\.0\.weight .*\[5, 6\].*\[7, 6\]"):
        initialise(model, write(tmp_path, make_model(0)))
    assert are_equal(model, make_wider(1))


@pytest.mark.parametrize("initialise", BOTH)
@pytest.mark.parametrize("write", [write_ours, write_teacher_file])
def test_another_dtype_is_converted_only_when_asked_for(
    tmp_path: Path, write: Callable[[Path, nn.Module], str], initialise: Initialiser
) -> None:
    source, model = write(tmp_path, make_model(0)), make_model(1).bfloat16()
    with pytest.raises(DtypeMismatchError, match=r"0\.weight"):
        initialise(model, source)
    initialise(model, source, convert_dtype=True)
    assert are_equal(model, make_model(0).bfloat16())


# --- bad sources --------------------------------------------------------------------------------


@pytest.mark.parametrize("initialise", BOTH)
@pytest.mark.parametrize("name", ["404", "404.pth", "404.safetensors"])
@pytest.mark.parametrize("scheme", ["local", "memory"])
def test_what_is_not_there_is_an_error_that_names_it(
    tmp_path: Path, initialise: Initialiser, name: str, scheme: str
) -> None:
    root = str(tmp_path) if scheme == "local" else f"memory://pretrained-{next(_numbers)}/weights"
    with pytest.raises(CheckpointNotFoundError, match=rf"{name}"):
        initialise(make_model(0), f"{root}/{name}")


@pytest.mark.parametrize("initialise", BOTH)
def test_a_file_with_objects_of_foreign_classes_needs_trust(tmp_path: Path, initialise: Initialiser) -> None:
    saved, model = make_model(0), make_model(1)
    torch.save({"model": saved.state_dict(), "args": argparse.Namespace(lr=1)}, tmp_path / "a.pth")
    with pytest.raises(UntrustedDataError, match=r"a\.pth.*argparse\.Namespace.*trusted=True"):
        initialise(model, tmp_path / "a.pth")
    initialise(model, tmp_path / "a.pth", trusted=True)
    assert are_equal(model, saved)


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
@pytest.mark.parametrize("scheme", ["local", "memory"])
def test_a_damaged_file_is_said_to_be_damaged(tmp_path: Path, name: str, scheme: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02 not what it seems" * 10)
    file = str(tmp_path / name)
    with pytest.raises(CheckpointDamagedError, match=name):
        init_model_from_checkpoint_for_evals(make_model(0), file if scheme == "local" else upload(file))


def test_a_file_system_of_fsspec_serves_files_too(tmp_path: Path) -> None:
    saved, model = make_model(0), make_model(1)
    file = Path(write_bare_file(tmp_path, saved))
    MemoryFileSystem().pipe_file("/fsspec-weights/w.bin", file.read_bytes())
    init_model_from_checkpoint_for_evals(model, "memory://fsspec-weights/w.bin", transport="fsspec")
    assert are_equal(model, saved)


# --- several ranks ------------------------------------------------------------------------------


def shard(model: nn.Module) -> nn.Module:
    return fully_shard(model)  # type: ignore[return-value]


def shard_flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def make_linear(seed: int) -> nn.Sequential:
    """Without buffers, whose integers a flat FSDP module would not shard."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1))


SHARDINGS: dict[str, Callable[[nn.Module], nn.Module]] = {"fsdp2": shard, "fsdp1": shard_flat}


def initialise_sharded(source: str, kind: str, members: list[int] | None) -> bool | None:
    group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return None
    if members is None:
        model: nn.Module = SHARDINGS[kind](make_linear(1))
    else:
        model = make_linear(1)
    init_fsdp_model_from_checkpoint(model, source, process_group=group)
    saved = make_linear(0).state_dict()
    return all(holds_its_part(value, saved[name]) for name, value in get_model_state_dict(model).items())


def holds_its_part(value: Any, full: torch.Tensor) -> bool:
    if isinstance(value, DTensor):
        return torch.equal(value.full_tensor(), full)
    if not isinstance(value, ShardedTensor):
        return torch.equal(value, full)
    return all(
        torch.equal(one.tensor, full[tuple(map(slice, one.metadata.shard_offsets, ends_of(one.metadata)))])
        for one in value.local_shards()
    )


def ends_of(metadata: Any) -> list[int]:
    return [start + size for start, size in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)]


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("write", [write_ours, write_stock, write_teacher_file, write_safetensors])
def test_each_rank_gets_its_part_of_a_sharded_model(
    ranks: Ranks, tmp_path: Path, write: Callable[[Path, nn.Module], str], kind: str
) -> None:
    source = write(tmp_path, make_linear(0))
    assert ranks.run(initialise_sharded, source, kind, None, size=3) == [True] * 3


@pytest.mark.parametrize("write", [write_ours, write_teacher_file])
def test_a_subgroup_initialises_while_other_ranks_are_elsewhere(
    ranks: Ranks, tmp_path: Path, write: Callable[[Path, nn.Module], str]
) -> None:
    source = write(tmp_path, make_linear(0))
    assert ranks.run(initialise_sharded, source, "plain", [1, 2], size=3) == [None, True, True]


def read_on_which_ranks(source: str) -> list[str]:
    """Initialise, and return this rank's log lines about files that it opened for reading weights."""
    opened: list[str] = []
    original = torch.load

    def noted(file: Any, *args: Any, **settings: Any) -> Any:
        opened.append(str(file))
        return original(file, *args, **settings)

    torch.load = noted  # type: ignore[assignment]
    try:
        init_fsdp_model_from_checkpoint(shard(make_linear(1)), source)
    finally:
        torch.load = original
    return opened


def test_a_file_is_read_by_one_rank_only(ranks: Ranks, tmp_path: Path) -> None:
    source = write_teacher_file(tmp_path, make_linear(0))
    assert ranks.run(read_on_which_ranks, source, size=3) == [[source], [], []]


@pytest.mark.parametrize("name", ["404", "404.pth"])
def test_a_source_that_is_not_there_is_the_same_error_on_every_rank(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    errors = ranks.errors(initialise_sharded, str(tmp_path / name), "fsdp2", None, size=3)
    assert [type(error) for error in errors] == [CheckpointNotFoundError] * 3
    assert len({str(error) for error in errors}) == 1


def test_what_was_initialised_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="remote_ckpt")
    init_model_from_checkpoint_for_evals(make_model(1), write_teacher_file(tmp_path, make_model(0)))
    assert "initialised 9 tensors from" in caplog.text
    assert "(section 'teacher.backbone.')" in caplog.text


class Nested(nn.Module):
    """A part that really has a submodule named ``module``."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), first))
        self.module = nn.Module()
        self.module.weight = nn.Parameter(torch.full((2,), second))


@pytest.mark.parametrize("write", [write_safetensors, write_ours, write_stock, write_teacher_file])
@pytest.mark.parametrize("initialise", BOTH)
def test_a_submodule_that_is_named_like_a_wrapper_gets_its_own_weights(
    tmp_path: Path, write: Callable[[Path, nn.Module], str], initialise: Initialiser
) -> None:
    model = nn.ModuleDict({"enc": Nested(0.0, 0.0)})
    initialise(model, write(tmp_path, nn.ModuleDict({"enc": Nested(1.0, 2.0)})))
    assert are_equal(model, nn.ModuleDict({"enc": Nested(1.0, 2.0)}))


def test_names_that_wrappers_make_ambiguous_are_not_guessed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {
        "module.enc.weight": torch.ones(2),
        "module.enc.module.weight": torch.ones(2),
        "x": torch.ones(1),
    }
    torch.save(state, tmp_path / "a.pth")
    model = nn.ModuleDict({"enc": Nested(0.0, 0.0)})
    model.register_parameter("x", nn.Parameter(torch.zeros(1)))
    init_model_from_checkpoint_for_evals(model, tmp_path / "a.pth")
    assert model.state_dict()["enc.weight"].tolist() == [0, 0]
    assert "left as they were: enc.module.weight, enc.weight" in caplog.text


def test_a_checkpoint_key_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    model = make_model(1)
    torch.save({"teacher": make_model(2).state_dict(), "model": {"a": torch.ones(1)}}, tmp_path / "a.pth")
    with pytest.raises(KeyMismatchError, match=r"no part 'ema'.*which has model, model\.a, teacher"):
        init_model_from_checkpoint_for_evals(model, tmp_path / "a.pth", checkpoint_key="ema")
    assert are_equal(model, make_model(1))


@pytest.mark.parametrize("initialise", BOTH)
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_damaged_safetensors_file_is_damaged(
    tmp_path: Path, initialise: Initialiser, is_remote: bool
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}......garb")
    path = str(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointDamagedError, match=r"a\.safetensors cannot be read"):
        initialise(make_model(1), upload(path) if is_remote else path)


def test_a_file_with_numpy_values_beside_the_weights_is_read(tmp_path: Path) -> None:
    torch.save({"model": make_model(2).state_dict(), "rng": np.random.get_state()}, tmp_path / "a.pth")
    model = make_model(1)
    init_model_from_checkpoint_for_evals(model, tmp_path / "a.pth")
    assert are_equal(model, make_model(2))


def write_conjugates(folder: Path) -> str:
    values = torch.tensor([1 + 2j, 3 - 4j])
    torch.save({"conjugate": values.conj(), "negative": values.clone().conj().imag}, folder / "a.pth")
    return str(folder / "a.pth")


def complex_model() -> nn.Module:
    model = nn.Module()
    model.register_parameter("conjugate", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    model.register_parameter("negative", nn.Parameter(torch.zeros(2)))
    return model


def initialise_complex(source: str) -> tuple[list[complex], list[float]]:
    model = complex_model()
    init_fsdp_model_from_checkpoint(model, source)
    state = model.state_dict()
    return state["conjugate"].tolist(), state["negative"].tolist()


def test_conjugated_tensors_arrive_as_what_they_mean_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    expected = ([1 - 2j, 3 + 4j], [-2.0, 4.0])
    assert initialise_complex(write_conjugates(tmp_path)) == expected
    assert ranks.run(initialise_complex, str(tmp_path / "a.pth")) == [expected] * 2


def test_sparse_tensors_in_a_file_are_refused_by_name_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    torch.save(
        {"conjugate": torch.ones(2, dtype=torch.complex64).to_sparse(), "negative": torch.ones(2)},
        tmp_path / "a.pth",
    )
    for error in ranks.errors(initialise_complex, str(tmp_path / "a.pth")):
        assert isinstance(error, MismatchError)
        assert "sparse or quantized in the file, which no model takes: conjugate" in str(error)


@pytest.fixture
def web_url(tmp_path: Path) -> Iterator[str]:
    """URL of a web server that serves ``tmp_path``."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("initialise", BOTH)
@pytest.mark.parametrize(
    "name", ["g.pth", "g.safetensors", "g.pth?Signature=abc", "g.safetensors?Signature=abc"]
)
def test_weights_come_from_a_web_server(
    tmp_path: Path, web_url: str, initialise: Initialiser, name: str
) -> None:
    wanted, model = make_model(1), make_model(2)
    torch.save(wanted.state_dict(), tmp_path / "g.pth")
    save_file(wanted.state_dict(), tmp_path / "g.safetensors")
    initialise(model, f"{web_url}/{name}")
    assert are_equal(model, wanted)


@pytest.mark.parametrize("initialise", BOTH)
def test_a_file_that_the_web_server_lacks_is_no_checkpoint(web_url: str, initialise: Initialiser) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint or file at .*/no.pth"):
        initialise(make_model(1), f"{web_url}/no.pth")


def test_checkpoints_of_a_web_server_cannot_be_found(web_url: str) -> None:
    with pytest.raises(UnsupportedStoreError, match="give the URL of one file of weights"):
        find_latest_checkpoint(web_url)
    with pytest.raises(UnsupportedStoreError, match="give the URL of one file of weights"):
        init_model_from_checkpoint_for_evals(make_model(1), f"{web_url}/run/1")
