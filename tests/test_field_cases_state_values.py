"""Field cases of tensor kinds, containers and objects: values, types and identities are kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner

from remote_ckpt import (
    CheckedLoadPlanner,
    DtypeMismatchError,
    RemoteStorageReader,
    RemoteStorageWriter,
    ShapeMismatchError,
    load_checkpoint,
    save_checkpoint,
)
from remote_ckpt.dcp.compact import save_compactly

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

State = dict[str, Any]
MakePlanner = Callable[..., LoadPlanner | None]
_numbers = itertools.count()

with_every_planner = pytest.mark.parametrize(
    "make_planner", [CheckedLoadPlanner, lambda **_: None], ids=["checked planner", "torch's planner"]
)


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://values-{next(_numbers)}/1" if request.param == "memory" else str(tmp_path / "1")


def save(state: State, url: str) -> RemoteStorageWriter:
    writer = RemoteStorageWriter(url)
    dcp.save(state, storage_writer=writer)
    return writer


def load(
    state: State, url: str, make_planner: MakePlanner, *, trusted: bool = False, convert_dtype: bool = False
) -> State:
    options = {"trusted": trusted, "convert_dtype": convert_dtype}
    reader = RemoteStorageReader(url, trusted=trusted, convert_dtype=convert_dtype)
    dcp.load(state, storage_reader=reader, planner=make_planner(**options))
    return state


def cause(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    return caught.value.failures[0][0]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def saved_bytes(writer: RemoteStorageWriter) -> int:
    assert writer.manifest is not None
    return writer.manifest.total_bytes


# --- shapes, views, strides ---------------------------------------------------------------------


SCALARS: State = {
    "fp32": torch.tensor(-1.5),
    "bf16": torch.tensor(3.0, dtype=torch.bfloat16),
    "int64": torch.tensor(2**53 + 1),
    "bool": torch.tensor(True),
    "none": torch.empty(0),
    "no rows": torch.empty(0, 5),
}


@with_every_planner
def test_br_79_scalars_and_empty_tensors_keep_shape_dtype_and_value(
    url: str, make_planner: MakePlanner
) -> None:
    save(dict(SCALARS), url)
    loaded = load({name: torch.zeros_like(value) for name, value in SCALARS.items()}, url, make_planner)
    for name, value in SCALARS.items():
        assert (loaded[name].shape, loaded[name].dtype) == (value.shape, value.dtype)
        assert torch.equal(loaded[name], value)


class Subclass(torch.Tensor):
    """Written by ``torch.save``."""


def views(base: torch.Tensor) -> dict[str, Callable[[], Any]]:
    indices = torch.arange(10).reshape(1, 10)
    return {
        "a slice": lambda: base[:10],
        "two elements": lambda: base.view(-1)[3:5],
        "every second": lambda: base[::2][:5],
        "in a tuple": lambda: (base[:10], 1),
        "deep inside": lambda: ({"a": ({1: base[3:5]},)},),
        "a subclass": lambda: base[:10].as_subclass(Subclass),
        "sparse": lambda: torch.sparse_coo_tensor(indices, base[:10], (10,), check_invariants=True),
        "a parameter": lambda: nn.Parameter(base[:10]),
    }


@pytest.mark.parametrize("name", views(torch.zeros(100)))
def test_br_81_a_small_view_of_a_large_base_takes_the_space_of_a_small_tensor(url: str, name: str) -> None:
    base = torch.arange(10_000_000, dtype=torch.float32)
    assert saved_bytes(save({"x": views(base)[name]()}, url)) < 4096


@pytest.mark.parametrize("name", ["in a tuple", "deep inside", "sparse"])
def test_br_81_what_is_saved_without_its_surroundings_is_read_as_it_was(url: str, name: str) -> None:
    base = torch.arange(1000, dtype=torch.float32)
    value = views(base)[name]()
    save({"x": value}, url)
    template = torch.zeros(10).to_sparse() if name == "sparse" else None
    loaded = load({"x": template}, url, CheckedLoadPlanner)["x"]
    if name == "sparse":
        assert torch.equal(loaded.to_dense(), value.to_dense())
    elif name == "in a tuple":
        assert torch.equal(loaded[0], base[:10])
    else:
        assert torch.equal(loaded[0]["a"][0][1], base[3:5])


def test_tensors_inside_an_object_that_share_memory_still_do_after_a_load(url: str) -> None:
    base = torch.zeros(1000)
    save({"x": (base[:10], base[5:15], base[990:], {"again": base[:10]})}, url)
    first, overlapping, _, again = load({"x": None}, url, CheckedLoadPlanner)["x"]
    first.fill_(7)
    assert overlapping.tolist() == [7.0] * 5 + [0.0] * 5
    assert again["again"].tolist() == [7.0] * 10


def test_equal_views_inside_an_object_are_saved_once_and_still_share_memory() -> None:
    import io

    base = torch.zeros(1_000_000)
    archive = save_compactly((base[:10], base[:10], torch.ones(3)))
    assert len(archive) < 4096
    first, second, other = torch.load(io.BytesIO(archive), weights_only=True)
    first.fill_(7)
    assert (second.tolist(), other.tolist()) == ([7.0] * 10, [1.0] * 3)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("is_needed", [False, True])
def test_a_view_inside_an_object_needs_a_gradient_as_before_whatever_the_grad_mode(
    with_gradients: bool, is_needed: bool
) -> None:
    import io

    view = torch.zeros(1000)[:3].requires_grad_(is_needed)
    with torch.set_grad_enabled(with_gradients):
        archive = save_compactly([view])
    (loaded,) = torch.load(io.BytesIO(archive), weights_only=True)
    assert (loaded.requires_grad, loaded.is_leaf) == (is_needed, True)
    assert loaded.untyped_storage().nbytes() == 12


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # as such torch loads it
@pytest.mark.parametrize("order", [("storage", "view"), ("view", "storage")])
def test_a_storage_inside_an_object_is_shared_with_the_view_of_it(order: tuple[str, str]) -> None:
    import io

    base = torch.zeros(1000, dtype=torch.uint8)
    value = {"storage": base.untyped_storage(), "view": base[:3]}
    archive = save_compactly(({name: value[name] for name in order}, torch.ones(1000)[:3]))
    loaded, other = torch.load(io.BytesIO(archive), weights_only=False)
    loaded["view"].fill_(7)
    assert (loaded["storage"].tolist()[:4], len(loaded["storage"])) == ([7, 7, 7, 0], 1000)
    assert other.untyped_storage().nbytes() == 12


def test_an_object_without_views_is_saved_to_the_byte_as_torch_does() -> None:
    import io

    value = ({"a": torch.arange(5.0), "b": nn.Parameter(torch.ones(2))}, "text", 3)
    expected = io.BytesIO()
    torch.save(value, expected)
    assert save_compactly(value) == expected.getvalue()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda value: value.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every second": lambda value: torch.stack([value, value], 1).flatten(0, 1)[::2],
    "channels last": lambda value: value.contiguous(memory_format=torch.channels_last),
    "unsqueezed": lambda value: value[None].transpose(0, 1).squeeze(1),
    "contiguous": lambda value: value.contiguous(),
}


@with_every_planner
@pytest.mark.parametrize("saved_as", LAYOUTS)
def test_br_82_values_arrive_whatever_the_strides_and_the_template_keeps_its_own(
    url: str, saved_as: str, make_planner: MakePlanner
) -> None:
    value = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(1))
    save({name: LAYOUTS[saved_as](value) for name in LAYOUTS}, url)
    state = {name: layout(torch.zeros(4, 3, 5, 6)) for name, layout in LAYOUTS.items()}
    strides = {name: template.stride() for name, template in state.items()}
    templates = dict(state)
    load(state, url, make_planner)
    for name, template in templates.items():
        assert state[name] is template
        assert template.stride() == strides[name]
        assert torch.equal(template, value)


@with_every_planner
def test_br_82_expanded_values_are_saved_whole_and_expanded_templates_are_refused_untouched(
    url: str, make_planner: MakePlanner
) -> None:
    value = torch.arange(3.0).reshape(3, 1).expand(3, 4)
    save({"before": torch.ones(2), "x": value}, url)
    template = {"before": torch.zeros(2), "x": torch.full((3, 1), -1.0).expand(3, 4)}
    with pytest.raises(CheckpointException) as caught:
        load(template, url, make_planner)
    assert isinstance(cause(caught), ShapeMismatchError)
    assert "x: the destination is an expanded view" in str(cause(caught))
    assert template["before"].tolist() == [0.0, 0.0]
    assert torch.equal(template["x"], torch.full((3, 4), -1.0))
    assert torch.equal(
        load({"before": torch.zeros(2), "x": torch.zeros(3, 4)}, url, make_planner)["x"], value
    )


# --- dtypes -------------------------------------------------------------------------------------


@with_every_planner
@pytest.mark.parametrize(
    ("saved", "to"),
    [(torch.rand(64) * 100, torch.bfloat16), (torch.tensor([16777217], dtype=torch.int32), torch.float32)],
    ids=["loses precision", "a counter"],
)
def test_br_83_nothing_is_cast_unless_that_is_asked_for(
    url: str, make_planner: MakePlanner, saved: torch.Tensor, to: torch.dtype
) -> None:
    save({"the.name": saved}, url)
    state = {"the.name": torch.full(saved.shape, 7, dtype=to)}
    with pytest.raises(CheckpointException) as caught:
        load(state, url, make_planner)
    assert isinstance(cause(caught), DtypeMismatchError)
    for part in ("the.name", str(saved.dtype).removeprefix("torch."), str(to).removeprefix("torch.")):
        assert part in str(cause(caught))
    assert torch.equal(state["the.name"], torch.full(saved.shape, 7, dtype=to))
    load(state, url, make_planner, convert_dtype=True)
    assert torch.equal(state["the.name"], saved.to(to))


PATTERNS = {  # quiet and signalling NaN, infinity, -0.0 and the smallest number, each by its bytes
    torch.bfloat16: ["c07f", "817f", "807f", "0080", "0100"],
    torch.float16: ["007e", "017c", "007c", "0080", "0100"],
    torch.float8_e4m3fn: ["7f", "ff", "80", "01"],
    torch.float8_e5m2: ["7e", "7d", "7c", "80", "01"],
    torch.complex64: ["0000c07f00000080", "0100807f0000807f", "0000008000000080"],
    torch.bool: ["00", "01"],
    torch.int8: ["80", "ff", "7f"],
    torch.uint16: ["0000", "0080", "ffff"],
}


@with_every_planner
def test_br_87_every_bit_of_every_dtype_comes_back(url: str, make_planner: MakePlanner) -> None:
    generator = torch.Generator().manual_seed(87)
    state: State = {}
    for dtype, patterns in PATTERNS.items():
        high = 2 if dtype is torch.bool else 256
        noise = torch.randint(0, high, (1000 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        chosen = torch.frombuffer(bytearray.fromhex("".join(patterns)), dtype=torch.uint8)
        state[str(dtype)] = torch.cat([chosen, noise]).view(dtype)
    save(dict(state), url)
    template = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
    loaded = load(dict(template), url, make_planner)
    for name, value in state.items():
        assert loaded[name].dtype == value.dtype
        assert bits(loaded[name]) == bits(value)


# --- containers and objects ---------------------------------------------------------------------


@pytest.mark.parametrize("template", [[], None, {"k2": 0}], ids=["list", "none", "other keys"])
def test_br_91_another_structure_is_an_error_that_names_it_with_torchs_planner(
    url: str, template: Any
) -> None:
    save({"my_key": [{"k1": 1}, {"k2": 2}], "w": torch.ones(2)}, url)
    state = {"my_key": template, "w": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="my_key"):
        load(state, url, lambda **_: None)
    assert state["w"].tolist() == [0.0, 0.0]


@with_every_planner
def test_br_95_plain_values_arrive_in_the_very_dict_that_was_passed(
    url: str, make_planner: MakePlanner
) -> None:
    saved = {"epoch": 20, "lr": 1e-3, "name": "x", "none": None, "pair": (1, 2), "deep": {"list": [1, 2]}}
    save({"extra": saved, "epoch": 20}, url)
    deep = {"list": [0, 0]}
    extra = {"epoch": 0, "lr": 0.0, "name": "", "none": 1, "pair": (), "deep": deep}
    state = {"extra": extra, "epoch": 0}
    load(state, url, make_planner)
    assert state["epoch"] == 20
    assert state["extra"] is extra
    assert extra["deep"] is deep
    assert extra == saved


class Counter:
    """Holds state as samplers and schedules do."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> State:
        return {"count": self.count}

    def load_state_dict(self, state: State) -> None:
        self.count = state["count"]


@with_every_planner
def test_br_96_the_object_in_the_state_stays_itself_and_is_what_is_saved_next(
    url: str, make_planner: MakePlanner
) -> None:
    save({"counter": Counter(5)}, f"{url}/1")
    counter = Counter()
    state: State = {"counter": counter}
    load(state, f"{url}/1", make_planner)
    assert state["counter"] is counter
    counter.count += 1
    save(state, f"{url}/2")
    assert load({"counter": Counter()}, f"{url}/2", make_planner)["counter"].count == 6


@pytest.mark.parametrize("wrapped", ["_orig_mod.module.", "module._orig_mod."])
def test_br_93_a_loose_load_into_a_plain_model_takes_wrapped_names(url: str, wrapped: str) -> None:
    weight = torch.randn(2, 3)
    save({"iteration": 4, "model": {f"{wrapped}weight": weight}}, url)
    model = nn.Linear(3, 2, bias=False)
    assert load_checkpoint(url, model=model, strict_loading=False) == 4
    assert torch.equal(model.weight, weight)


def test_br_94_the_teacher_alone_is_loaded_from_a_checkpoint_with_both_parts(url: str) -> None:
    parts = nn.ModuleDict({"teacher": nn.Linear(3, 2), "student": nn.Linear(3, 2)})
    save_checkpoint(url, iteration=1, model=parts)
    student = nn.Linear(3, 2).state_dict()
    state: State = {"model": {"teacher": nn.Linear(3, 2).state_dict(), "student": dict(student)}}
    before = {name: value.clone() for name, value in student.items()}
    planner = CheckedLoadPlanner(key_filter=lambda name: name.startswith("model.teacher."))
    dcp.load(state, storage_reader=RemoteStorageReader(url), planner=planner)
    assert (planner.missing, planner.unexpected) == ((), ())
    for name, value in parts["teacher"].state_dict().items():
        assert torch.equal(state["model"]["teacher"][name], value)
        assert torch.equal(state["model"]["student"][name], before[name])
