"""Checked planners: what does not fit is said before anything changes; what fits is loaded whole."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from remote_ckpt import (
    CheckedLoadPlanner,
    CheckedSavePlanner,
    CheckpointDamagedError,
    ConfigError,
    DtypeMismatchError,
    KeyMismatchError,
    LoadFailedError,
    MismatchError,
    RemoteStorageReader,
    RemoteStorageWriter,
    SaveFailedError,
    ShapeMismatchError,
    UntrustedDataError,
)
from remote_ckpt.dcp.collective import open_group
from remote_ckpt.dcp.matching import match_keys

_numbers = itertools.count()


class Custom:
    """A class that safe loading does not know."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.fixture
def place() -> str:
    """A checkpoint's URL that no other test uses."""
    return f"memory://planner-{next(_numbers)}/run/1"


def save_all(url: str, state: dict[str, Any], **settings: Any) -> None:
    group = open_group(None, timeout_seconds=30, failure=SaveFailedError)
    planner, writer = CheckedSavePlanner(**settings), RemoteStorageWriter(url)
    with group.translated(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            state,
            storage_writer=writer,
            planner=planner,
            process_group=group.process_group,
            no_dist=group.world_size == 1,
        )


def load_all(
    url: str, state: dict[str, Any], *, trusted: bool = False, convert_dtype: bool = False, **settings: Any
) -> CheckedLoadPlanner:
    group = open_group(None, timeout_seconds=30, failure=LoadFailedError)
    planner = CheckedLoadPlanner(trusted=trusted, convert_dtype=convert_dtype, **settings)
    reader = RemoteStorageReader(url, trusted=trusted, convert_dtype=convert_dtype)
    with group.translated(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            state,
            storage_reader=reader,
            planner=planner,
            process_group=group.process_group,
            no_dist=group.world_size == 1,
        )
    return planner


@pytest.fixture
def _no_cached_plans() -> Iterator[None]:
    """torch keeps save plans by the planner's class for as long as the process lives."""
    yield
    forget_plans()


def forget_plans() -> None:
    for cache in (name for name in vars(SavePlanner) if name.startswith("_cached_")):
        getattr(SavePlanner, cache).clear()


@pytest.mark.usefixtures("_no_cached_plans")
def test_br_113_saves_with_cached_plans_hold_what_was_saved_each_time(place: str) -> None:
    for value, extra in ((1.0, {}), (2.0, {}), (3.0, {"new": torch.ones(1)})):
        url = f"{place}{value:.0f}"
        save_all(url, {"w": torch.full((3,), value), "step": value, **extra}, enable_plan_caching=True)
        state: dict[str, Any] = {"w": torch.zeros(3), "step": 0.0, **{name: torch.zeros(1) for name in extra}}
        load_all(url, state)
        assert (state["w"].tolist(), state["step"]) == ([value] * 3, value)


@pytest.mark.usefixtures("_no_cached_plans")
def test_a_cached_plan_is_not_used_for_the_same_names_in_another_structure(place: str) -> None:
    structures: list[dict[str, Any]] = [{"a.b": torch.ones(2)}, {"a": {"b": torch.ones(2)}}]
    for number, state in enumerate(structures * 2):
        save_all(f"{place}{number}", state, enable_plan_caching=True)
    paths = [RemoteStorageReader(f"{place}{number}").read_metadata().planner_data for number in range(4)]
    assert paths == [{"a.b": ("a.b",)}, {"a.b": ("a", "b")}] * 2


# --- names --------------------------------------------------------------------------------------


def test_br_88_a_strict_load_lists_missing_and_unexpected_names_and_changes_nothing(place: str) -> None:
    save_all(place, {"a": torch.ones(2), "b": torch.ones(2)})
    state = {"b": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(
        KeyMismatchError, match=r"missing from the checkpoint: c; .* not asked for: a"
    ) as caught:
        load_all(place, state)
    assert (caught.value.missing, caught.value.unexpected) == (("c",), ("a",))
    assert torch.equal(state["b"], torch.zeros(2))


def test_br_88_a_loose_load_reports_both_kinds_and_leaves_the_missing_as_it_was(place: str) -> None:
    save_all(place, {"a": torch.ones(2), "b": torch.ones(2)})
    state = {"b": torch.zeros(2), "c": torch.full((2,), 7.0)}
    planner = load_all(place, state, strict=False)
    assert (planner.missing, planner.unexpected) == (("c",), ("a",))
    assert torch.equal(state["b"], torch.ones(2))
    assert torch.equal(state["c"], torch.full((2,), 7.0))


def test_long_lists_of_names_are_cut_and_counted(place: str) -> None:
    save_all(place, {f"n{number:02}": number for number in range(30)})
    with pytest.raises(KeyMismatchError, match="n09 and 20 more") as caught:
        load_all(place, {})
    assert len(caught.value.unexpected) == 30


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.module.", "module._orig_mod.", "module.", "_fsdp_wrapped_module."]
)
def test_br_93_names_that_differ_by_wrappers_match(place: str, prefix: str) -> None:
    save_all(place, {"model": {f"{prefix}x": torch.ones(3)}})
    state = {"model": {"x": torch.zeros(3)}}
    load_all(place, state)
    assert torch.equal(state["model"]["x"], torch.ones(3))


def test_an_exact_name_wins_over_one_with_wrappers(place: str) -> None:
    save_all(place, {"x": torch.ones(1), "module.x": torch.full((1,), 2.0)})
    state = {"x": torch.zeros(1)}
    planner = load_all(place, state, strict=False)
    assert (state["x"].item(), planner.unexpected) == (1.0, ("module.x",))


def test_wrappers_do_not_make_an_ambiguous_name_match(place: str) -> None:
    save_all(place, {"module.x": torch.ones(1), "_orig_mod.x": torch.ones(1)})
    assert load_all(place, {"x": torch.zeros(1)}, strict=False).missing == ("x",)


def test_br_93_a_section_of_which_nothing_is_there_is_an_error_even_when_loose(place: str) -> None:
    save_all(place, {"model": {"x": torch.ones(1)}, "iteration": 3})
    with pytest.raises(KeyMismatchError, match="nothing of 'model' is in the checkpoint"):
        load_all(place, {"model": {"y": torch.ones(1)}, "iteration": 0}, strict=False, sections=["model"])


def test_br_94_flat_wrapped_parameters_are_unexpected_and_refused(place: str) -> None:
    save_all(place, {"model": {"_fsdp_wrapped_module._flat_param": torch.ones(4)}})
    with pytest.raises(KeyMismatchError, match=r"not asked for: model\._fsdp_wrapped_module\._flat_param"):
        load_all(place, {"model": {"weight": torch.zeros(2, 2)}})


def test_br_94_a_key_filter_loads_one_part_alone(place: str) -> None:
    save_all(place, {"teacher": {"w": torch.ones(2)}, "student": {"w": torch.ones(2)}})
    state: dict[str, Any] = {"teacher": {"w": torch.zeros(2)}, "head": torch.zeros(1)}
    planner = load_all(place, state, key_filter=lambda name: name.startswith("teacher."))
    assert (planner.missing, planner.unexpected) == ((), ())
    assert torch.equal(state["teacher"]["w"], torch.ones(2))


# --- shapes, dtypes, kinds ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (16,), (8, 4)])
def test_br_84_another_shape_is_named_with_both_before_anything_changes(
    place: str, shape: tuple[int, ...]
) -> None:
    save_all(place, {"a": torch.ones(3), "w": torch.ones(4, 4)})
    state = {"a": torch.zeros(3), "w": torch.zeros(shape)}
    with pytest.raises(ShapeMismatchError, match=r"w was saved with shape \[4, 4\], asked for ") as caught:
        load_all(place, state)
    assert str(list(shape)) in str(caught.value)
    assert torch.equal(state["a"], torch.zeros(3))


@pytest.mark.parametrize(
    ("saved", "template"),
    [(torch.rand(4) * 100, torch.zeros(4, dtype=torch.bfloat16)), (torch.tensor(16777217), torch.zeros(()))],
)
def test_br_83_another_dtype_is_refused_unless_conversion_is_asked_for(
    place: str, saved: torch.Tensor, template: torch.Tensor
) -> None:
    save_all(place, {"x": saved})
    state = {"x": template.clone()}
    with pytest.raises(
        DtypeMismatchError, match=f"x was saved as {saved.dtype}, asked for as {template.dtype}"
    ):
        load_all(place, state)
    assert torch.equal(state["x"], template)
    load_all(place, state, convert_dtype=True)
    assert torch.equal(state["x"], saved.to(template.dtype))


def test_a_tensor_and_a_python_value_do_not_take_each_others_place(place: str) -> None:
    save_all(place, {"t": torch.ones(1), "v": 3})
    with pytest.raises(
        MismatchError, match=r"t was saved as a tensor, asked for as float, v was saved as a Python"
    ):
        load_all(place, {"t": 1.0, "v": torch.zeros(1)})


# --- containers and Python values ---------------------------------------------------------------


def test_br_95_plain_values_arrive_in_the_same_dict_object(place: str) -> None:
    saved = {"epoch": 20, "lr": 1e-3, "name": "x", "none": None, "pair": (1, 2)}
    save_all(place, {"extra": saved})
    extra = {"epoch": 0, "lr": 0.0, "name": "", "none": 1, "pair": ()}
    state = {"extra": extra}
    load_all(place, state)
    assert state["extra"] is extra
    assert extra == saved


@pytest.mark.parametrize("template", [[], None, {}])
def test_br_91_an_empty_container_takes_a_list_of_dicts_as_a_whole(place: str, template: Any) -> None:
    saved = [{"k1": 1, "t": torch.ones(2)}, {"k2": 2}]
    save_all(place, {"my_key": saved, "other": 1})
    state = {"my_key": template, "other": 0}
    load_all(place, state)
    assert torch.equal(state["my_key"][0].pop("t"), torch.ones(2))
    assert state == {"my_key": [{"k1": 1}, {"k2": 2}], "other": 1}


@pytest.mark.parametrize("path", [("m", "a", 200_000_000), ("m", -1), ("m", 1.5), [1], ()])
def test_a_path_that_cannot_be_right_is_damage_and_makes_no_list(path: Any) -> None:
    metadata = Metadata({"m.a": BytesStorageMetadata()}, planner_data={"m.a": path})
    with pytest.raises(CheckpointDamagedError, match="structure cannot be used"):
        match_keys({"m": None}, {"m": ("m",)}, {"m": None}, metadata, key_filter=lambda _: True)


def test_br_91_none_takes_a_dict_and_a_dict_takes_none(place: str) -> None:
    save_all(place, {"a": {"x": 1, "y": {"z": 2}}, "b": None})
    state = {"a": None, "b": {"x": 0, "y": {"z": 0}}}
    load_all(place, state)
    assert state == {"a": {"x": 1, "y": {"z": 2}}, "b": None}


def test_br_91_a_dict_with_other_keys_is_an_error_that_names_them(place: str) -> None:
    save_all(place, {"my_key": {"k1": 1}})
    with pytest.raises(KeyMismatchError, match=r"my_key\.k2; .*my_key\.k1"):
        load_all(place, {"my_key": {"k2": 0}})


def test_a_dict_with_tensors_is_not_replaced_by_a_plain_value(place: str) -> None:
    save_all(place, {"my_key": 5})
    state = {"my_key": {"w": torch.zeros(2)}}
    with pytest.raises(KeyMismatchError, match=r"my_key\.w"):
        load_all(place, state)


def test_a_fixed_section_takes_nothing_as_a_whole(place: str) -> None:
    save_all(place, {"optimizer": {"state": {"w": 1}}})
    with pytest.raises(KeyMismatchError, match=r"optimizer\.state\.w"):
        load_all(place, {"optimizer": {"state": {}}}, fixed=["optimizer"])


def test_none_takes_a_tensor(place: str) -> None:
    save_all(place, {"rng": torch.arange(5)})
    state: dict[str, Any] = {"rng": None}
    load_all(place, state)
    assert torch.equal(state["rng"], torch.arange(5))


def test_a_dict_with_numbers_as_keys_gets_its_values_under_the_same_keys(place: str) -> None:
    save_all(place, {"state": {0: {"count": 5}, 1: {"count": 6}}})
    state = {"state": {0: {"count": 0}, 1: {"count": 0}}}
    load_all(place, state)
    assert state == {"state": {0: {"count": 5}, 1: {"count": 6}}}


def test_a_python_object_of_a_foreign_class_needs_trust(place: str) -> None:
    save_all(place, {"thing": Custom(3)})
    state = {"thing": Custom(0)}
    with pytest.raises(UntrustedDataError, match=r"thing.*test_planner\.Custom.*trusted=True"):
        load_all(place, state)
    load_all(place, state, trusted=True)
    assert state["thing"].value == 3


def test_the_planner_itself_unpickles_safely_with_a_stock_reader(tmp_path: Path) -> None:
    state = {"thing": Custom(3)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, storage_writer=FileSystemWriter(tmp_path / "1"))
        group = open_group(None, timeout_seconds=1, failure=LoadFailedError)
        with pytest.raises(UntrustedDataError, match="Custom"), group.translated():
            load(state, storage_reader=FileSystemReader(tmp_path / "1"), planner=CheckedLoadPlanner())


# --- several ranks ------------------------------------------------------------------------------


def save_by_rank(url: str, make: Callable[[int], dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("remote_ckpt")
    logger.addHandler(handler)
    try:
        save_all(url, make(dist.get_rank()), **settings)
    finally:
        logger.removeHandler(handler)
    return records


def tensors_of_other_values(rank: int) -> dict[str, Any]:
    return {"weight": torch.arange(2) + 2 * rank, "same": torch.ones(3), "name": f"rank {rank}"}


def test_br_72_a_save_says_that_ranks_hold_different_values_of_one_name(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks.run(save_by_rank, str(tmp_path / "1"), tensors_of_other_values, {})
    assert any("different values of name, weight; only one rank's copy is saved" in line for line in first)


def tensors_of_other_ends(rank: int) -> dict[str, Any]:
    return {"late": torch.tensor([5, rank]), "early": torch.tensor([rank, 5]), "name": f"rank {rank}"}


@pytest.mark.parametrize(("compare_bytes", "names"), [(8, "early, name"), (2**63, "early, late, name")])
def test_br_72_of_large_tensors_the_beginning_is_compared_and_all_only_when_asked_for(
    ranks: Ranks, tmp_path: Path, compare_bytes: int, names: str
) -> None:
    settings = {"compare_bytes": compare_bytes}
    first, _ = ranks.run(save_by_rank, str(tmp_path / "1"), tensors_of_other_ends, settings)
    assert any(f"different values of {names}; only" in line for line in first)


def saves_with_cached_plans(folder: str, states: list[list[dict[str, Any]]]) -> list[Any]:
    """Save each of the states, given by rank, and return what of each is an error or is in the checkpoint."""
    outcomes: list[Any] = []
    try:
        for number, by_rank in enumerate(states):
            url = f"{folder}/{number}"
            try:
                save_all(url, by_rank[dist.get_rank()], enable_plan_caching=True)
            except ConfigError as error:
                outcomes.append(str(error))
                continue
            names = sorted({name for state in by_rank for name in state})
            loaded: dict[str, Any] = dict.fromkeys(names)
            load_all(url, loaded)
            outcomes.append({name: value.tolist() for name, value in loaded.items()})
    finally:
        forget_plans()  # the rank's process serves other tests too
    return outcomes


def test_br_113_a_name_that_one_rank_drops_is_saved_from_the_plan_that_another_did_not_send_again(
    ranks: Ranks, tmp_path: Path
) -> None:
    own = [{"a": torch.ones(2)}, {"b": torch.ones(2)}]
    differing = [{**state, "x": torch.full((2,), float(rank))} for rank, state in enumerate(own)]
    states = [differing, [own[0], differing[1]], differing]
    for outcome in ranks.run(saves_with_cached_plans, str(tmp_path), states):
        assert [sorted(loaded) for loaded in outcome] == [["a", "b", "x"]] * 3
        assert [loaded["x"] for loaded in outcome] == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


def test_br_113_what_a_refused_save_planned_is_not_in_the_plans_of_the_next(
    ranks: Ranks, tmp_path: Path
) -> None:
    first = [{"a": torch.ones(2), "x": torch.ones(2)}, {"b": torch.ones(2)}]
    refused = [{"b": torch.ones(3)}, {"b": torch.ones(2)}]
    grown = [first[0], {"b": torch.ones(2), "c": torch.ones(2)}]
    for saved, error, last in ranks.run(saves_with_cached_plans, str(tmp_path), [first, refused, grown]):
        assert "ranks disagree about b" in error
        assert (sorted(saved), sorted(last)) == (["a", "b", "x"], ["a", "b", "c", "x"])


def tensors_of_other_shapes(rank: int) -> dict[str, Any]:
    return {"layers.0.weight": torch.ones(4 + 4 * rank, 4)}


def tensor_or_value(rank: int) -> dict[str, Any]:
    return {"layers.0.weight": torch.ones(2) if rank else 1}


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (tensors_of_other_shapes, r"a tensor \[4, 4\]", r"a tensor \[8, 4\]"),
        (tensor_or_value, "a Python value", r"a tensor \[2\]"),
    ],
)
def test_br_74_ranks_with_tensors_of_other_shapes_under_one_name_are_refused(
    ranks: Ranks, tmp_path: Path, make: Any, first: str, second: str
) -> None:
    for error in ranks.errors(save_by_rank, str(tmp_path / "1"), make, {}):
        assert isinstance(error, ConfigError)
        with pytest.raises(
            ConfigError, match=rf"about layers\.0\.weight: rank 0 holds {first}.*rank 1 {second}"
        ):
            raise error
    assert not list(tmp_path.glob("1/manifest*"))


def value_of_own(rank: int) -> dict[str, Any]:
    return {"w": torch.ones(2), f"dl.rank_{rank}": {"position": 10 + rank}}


def load_own_value(url: str, strict: bool) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    mine = {"position": -1}
    state = {"w": torch.zeros(2), f"dl.rank_{dist.get_rank()}": mine}
    planner = load_all(url, state, strict=strict)
    return mine["position"], planner.missing, planner.unexpected


def test_br_97_a_name_for_each_rank_gives_each_its_own_back(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_by_rank, str(tmp_path / "1"), value_of_own, {}, size=3)
    loaded = ranks.run(load_own_value, str(tmp_path / "1"), True, size=3)
    assert loaded == [(10 + rank, (), ()) for rank in range(3)]


def test_br_75_on_more_ranks_those_without_a_value_are_named_or_keep_theirs(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_by_rank, str(tmp_path / "1"), value_of_own, {})
    for error in ranks.errors(load_own_value, str(tmp_path / "1"), True, size=3):
        assert isinstance(error, KeyMismatchError)
        assert "dl.rank_2.position (rank 2)" in str(error)
    loaded = ranks.run(load_own_value, str(tmp_path / "1"), False, size=3)
    assert loaded[2] == (-1, ("dl.rank_2.position",), ())
    assert loaded[1] == (11, (), ())


def test_br_75_on_fewer_ranks_the_values_that_nobody_uses_are_reported(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_by_rank, str(tmp_path / "1"), value_of_own, {}, size=3)
    assert ranks.run(load_own_value, str(tmp_path / "1"), False, size=1) == [
        (10, (), ("dl.rank_1.position", "dl.rank_2.position"))
    ]


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


SHAPES = [*((length,) for length in range(1, 10)), (1, 3, 2), (1, 2), (5, 3), (2,), (0, 5), (3, 0)]
"""BR-68, BR-70, BR-69: fewer rows than ranks, one row, empty ones."""


def save_sharded(url: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    save_all(url, {str(shape): distribute_tensor(numbers(*shape), mesh, [Shard(0)]) for shape in SHAPES})


def load_sharded(url: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, DTensor] = {
        str(shape): distribute_tensor(torch.full(shape, -1.0), mesh, [Shard(0)]) for shape in SHAPES
    }
    load_all(url, state)
    return [torch.equal(state[str(shape)].full_tensor(), numbers(*shape)) for shape in SHAPES]


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(4, 4), (4, 3), (3, 4), (2, 1), (1, 4)])
def test_br_68_uneven_and_empty_shards_load_on_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    ranks.run(save_sharded, str(tmp_path / "1"), size=saved_on)
    for equal in ranks.run(load_sharded, str(tmp_path / "1"), size=loaded_on):
        assert equal == [True] * len(SHAPES)


def save_twice_sharded(url: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2))
    shapes = [(2,), (5, 3)]
    placements = [Shard(0), Shard(0)]
    save_all(url, {str(shape): distribute_tensor(numbers(*shape), mesh, placements) for shape in shapes})
    state = {str(shape): torch.zeros(shape) for shape in shapes}
    load_all(url, state)
    return [torch.equal(state[str(shape)], numbers(*shape)) for shape in shapes]


def test_br_69_a_dimension_sharded_over_two_mesh_dimensions_round_trips(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(save_twice_sharded, str(tmp_path / "1"), size=4) == [[True, True]] * 4
