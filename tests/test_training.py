"""Saving and loading in one process, without ``torch.distributed``: the seed's functions and their faults."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from upath import UPath

from remote_ckpt import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    DtypeMismatchError,
    KeyMismatchError,
    LoadReport,
    SaveFailedError,
    ShapeMismatchError,
    UntrustedDataError,
    find_latest_checkpoint,
    load_checkpoint,
    register_dont_save_hooks,
    save_checkpoint,
)
from remote_ckpt.dcp.reader import RemoteStorageReader
from remote_ckpt.manifest import Manifest

_numbers = itertools.count()


class Counter:
    """A stateful object, as a sampler or a schedule is one."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.fixture(params=["memory", "local"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run's directory that no other test uses."""
    if request.param == "memory":
        return f"memory://training-{next(_numbers)}/run"
    return str(tmp_path / "run")


def make_model(seed: int = 0, width: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict(body=nn.Linear(4, width), norm=nn.BatchNorm1d(width)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """Take steps on inputs that only depend on the step's number; returns the losses."""
    losses = []
    for step in range(steps):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def are_equal(first: nn.Module, second: nn.Module) -> bool:
    left, right = first.state_dict(), second.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def read_manifest(url: str) -> Manifest:
    manifest = RemoteStorageReader(url).resolve().manifest
    assert manifest is not None
    return manifest


# --- round trips --------------------------------------------------------------------------------


def test_model_and_optimizer_come_back_bit_for_bit_and_the_iteration_is_returned(run: str) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    save_checkpoint(f"{run}/199", iteration=199, model=model, optimizer=optimizer)
    other = make_model(seed=1)
    other_optimizer = torch.optim.AdamW(other.parameters())
    assert load_checkpoint(f"{run}/199", model=other, optimizer=other_optimizer) == 199
    assert are_equal(model, other)
    assert train(model, optimizer) == train(other, other_optimizer)


def test_the_model_alone_can_be_loaded_from_a_checkpoint_with_an_optimizer(run: str) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    save_checkpoint(f"{run}/1", iteration=1, model=model, optimizer=optimizer, counter=Counter(3))
    other = make_model(seed=1)
    load_checkpoint(f"{run}/1", model=other)
    assert are_equal(model, other)


def test_br_101_an_interrupted_run_has_the_losses_of_an_uninterrupted_one(run: str) -> None:
    def begin(seed: int) -> dict[str, Any]:
        model = make_model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    def take(state: dict[str, Any], steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses += train(state["model"], state["optimizer"], steps=1)
            state["schedule"].step()
        return losses

    whole = begin(0)
    first = take(whole, 5)
    save_checkpoint(f"{run}/5", iteration=5, **whole)
    resumed = begin(1)
    load_checkpoint(f"{run}/5", **resumed)
    assert len(first) == 5
    assert take(resumed, 5) == take(whole, 5)
    assert are_equal(whole["model"], resumed["model"])
    assert resumed["schedule"].get_last_lr() == whole["schedule"].get_last_lr()


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_save_before_the_first_step_changes_nothing_and_loads_as_what_it_was(run: str, kind: str) -> None:
    untouched, saved, loaded = make_model(0), make_model(0), make_model(1)
    expected = train(untouched, OPTIMIZERS[kind](untouched), 4)
    optimizer = OPTIMIZERS[kind](saved)
    schedule_steps = torch.optim.lr_scheduler.ConstantLR  # it puts a method of its own in place of ``step``
    schedule_steps(optimizer, factor=1.0)
    step = optimizer.step
    save_checkpoint(f"{run}/0", iteration=0, model=saved, optimizer=optimizer)
    assert optimizer.step is step
    assert not optimizer.state
    other = OPTIMIZERS[kind](loaded)
    schedule_steps(other, factor=1.0)
    assert load_checkpoint(f"{run}/0", model=loaded, optimizer=other) == 0
    assert not other.state
    assert train(saved, optimizer, 4) == expected
    assert train(loaded, other, 4) == expected


def test_an_optimizer_that_took_steps_can_go_back_to_before_the_first(run: str) -> None:
    untouched, model = make_model(0), make_model(0)
    expected = train(untouched, OPTIMIZERS["adamw"](untouched), 4)
    optimizer = OPTIMIZERS["adamw"](model)
    save_checkpoint(f"{run}/0", iteration=0, model=model, optimizer=optimizer)
    train(model, optimizer, 3)
    load_checkpoint(f"{run}/0", model=model, optimizer=optimizer)
    assert train(model, optimizer, 4) == expected


def begin_two(kind: str, seed: int) -> dict[str, Any]:
    """A generator and a discriminator with an optimizer each, as save and load take them."""
    torch.manual_seed(seed)
    model, critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    critic.register_parameter("unused", nn.Parameter(torch.rand(2)))
    return {
        "model": model,
        "optimizer": OPTIMIZERS[kind](model),
        "critic": critic,
        "critic_optimizer": OPTIMIZERS[kind](critic),
    }


def train_two(state: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        loss = state["critic"](state["model"](inputs)).square().sum()
        loss.backward()
        for optimizer in (state["optimizer"], state["critic_optimizer"]):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_second_optimizer_among_the_others_comes_back_bit_for_bit(run: str, kind: str, steps: int) -> None:
    saved, loaded = begin_two(kind, 0), begin_two(kind, 1)
    train_two(saved, steps)
    save_checkpoint(f"{run}/1", iteration=1, **saved)
    load_checkpoint(f"{run}/1", **loaded)
    unused = loaded["critic"].unused
    assert unused not in loaded["critic_optimizer"].state
    assert not any(isinstance(key, str) for key in loaded["critic_optimizer"].state)
    assert train_two(loaded, 3) == train_two(saved, 3)


def test_a_second_optimizer_is_untouched_by_a_load_that_finds_or_takes_nothing_for_it(run: str) -> None:
    saved = begin_two("adamw", 0)
    train_two(saved, 2)
    save_checkpoint(f"{run}/1", iteration=1, model=saved["model"])
    save_checkpoint(f"{run}/2", iteration=2, **saved)
    critic = nn.Linear(7, 7)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=0.5)
    load_checkpoint(f"{run}/1", model=saved["model"], strict_loading=False, critic_optimizer=optimizer)
    assert not optimizer.state
    with pytest.raises(ShapeMismatchError, match=r"critic_optimizer\.state"):
        load_checkpoint(f"{run}/2", model=saved["model"], critic_optimizer=optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert critic.weight.grad is None


def test_a_second_optimizer_of_another_class_is_refused(run: str) -> None:
    saved, loaded = begin_two("momentum", 0), begin_two("adamw", 1)
    train_two(saved, 2)
    save_checkpoint(f"{run}/1", iteration=1, **saved)
    del loaded["optimizer"]
    with pytest.raises(KeyMismatchError, match=r"critic_optimizer\.state\.0\.exp_avg"):
        load_checkpoint(f"{run}/1", **loaded)


def test_a_second_optimizer_that_cannot_make_room_for_its_state_is_named_and_left_alone(run: str) -> None:
    model = nn.Linear(2, 1)

    def close() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    saved, fresh = (torch.optim.LBFGS(model.parameters(), lr=0.5) for _ in range(2))
    saved.step(close)
    save_checkpoint(f"{run}/1", iteration=1, model=model, second=saved)
    with pytest.raises(ConfigError, match="second: LBFGS cannot take the step that makes room"):
        load_checkpoint(f"{run}/1", model=model, second=fresh)
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.5


def test_gradients_that_are_left_from_a_step_neither_hinder_a_load_nor_are_lost(run: str) -> None:
    saved, loaded = begin_two("adamw", 0), begin_two("adamw", 1)
    train_two(saved, 2)
    save_checkpoint(f"{run}/1", iteration=1, **saved)
    loaded["critic"](loaded["model"](torch.ones(1, 4))).sum().backward()
    layers = (loaded["model"], loaded["critic"][0])
    before = [layer.weight.grad for layer in layers]
    values = [gradient.clone() for gradient in before]
    load_checkpoint(f"{run}/1", **loaded)
    assert all(layer.weight.grad is gradient for layer, gradient in zip(layers, before, strict=True))
    assert all(map(torch.equal, before, values))
    for name in ("optimizer", "critic_optimizer"):
        loaded[name].zero_grad()
    assert train_two(loaded, 3) == train_two(saved, 3)


def test_a_save_names_the_dicts_whose_keys_may_come_back_as_text(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"scores": [{3: 0.5}], "names": {"a": 1}}
    optimizer = OPTIMIZERS["adamw"](make_model())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])  # has a dict by number, as optimizers do
    save_checkpoint(
        f"{run}/1", iteration=1, model=make_model(), extra=extra, second=optimizer, schedule=schedule
    )
    assert "keys that are not text load as text into an empty dict: extra.scores.0" in caplog.messages
    loaded: dict[str, Any] = {}
    load_checkpoint(f"{run}/1", model=make_model(), extra=loaded)
    assert loaded == {"scores": [{"3": 0.5}], "names": {"a": 1}}


def test_br_96_a_stateful_object_stays_the_same_object_and_its_next_save_is_not_stale(run: str) -> None:
    model, counter = make_model(), Counter(5)
    save_checkpoint(f"{run}/1", iteration=1, model=model, counter=counter)
    resumed = Counter()
    load_checkpoint(f"{run}/1", model=model, counter=resumed)
    resumed.count += 1
    save_checkpoint(f"{run}/2", iteration=2, model=model, counter=resumed)
    last = Counter()
    load_checkpoint(f"{run}/2", model=model, counter=last)
    assert (resumed.count, last.count) == (6, 6)


def test_br_95_dicts_lists_and_tensors_are_changed_in_place(run: str) -> None:
    model = make_model()
    saved: dict[str, Any] = {"epoch": 20, "history": [1.5, 2.5], "deep": {"name": "x", "none": None}}
    save_checkpoint(
        f"{run}/1", iteration=1, model=model, extra=saved, names=["a", "b"], counts=torch.arange(3)
    )
    extra: dict[str, Any] = {"epoch": 0, "history": [], "deep": {"name": "", "none": 0}}
    deep, names, counts = extra["deep"], ["old"], torch.zeros(3, dtype=torch.int64)
    load_checkpoint(f"{run}/1", model=model, extra=extra, names=names, counts=counts)
    assert extra == saved
    assert extra["deep"] is deep
    assert names == ["a", "b"]
    assert counts.tolist() == [0, 1, 2]


def test_a_plain_value_is_saved_but_refused_on_loading_since_it_cannot_be_changed(run: str) -> None:
    model = make_model()
    save_checkpoint(f"{run}/1", iteration=1, model=model, epoch=3)
    with pytest.raises(ConfigError, match="epoch=0 cannot be loaded in place: pass a dict"):
        load_checkpoint(f"{run}/1", model=model, epoch=0)
    load_checkpoint(f"{run}/1", model=model)


def test_br_99_frozen_and_never_used_parameters_keep_their_defaults(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    def begin(seed: int) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        parts = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("used", "frozen", "unused")})
        parts["frozen"].requires_grad_(False)
        return parts, torch.optim.AdamW(parts.parameters())

    def step(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
        model["frozen"](model["used"](torch.ones(1, 2))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = begin(0)
    step(model, optimizer)
    step(model, optimizer)
    save_checkpoint(f"{run}/2", iteration=2, model=model, optimizer=optimizer)
    other, other_optimizer = begin(1)
    load_checkpoint(f"{run}/2", model=other, optimizer=other_optimizer)
    assert "holds no optimizer state for unused.weight" in caplog.text
    assert list(other_optimizer.state) == [other["used"].weight]
    step(model, optimizer)
    step(other, other_optimizer)
    assert are_equal(model, other)


def test_br_89_tied_weights_are_still_tied_and_their_optimizer_state_is_loaded(run: str) -> None:
    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.emb, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.emb(tokens))  # type: ignore[no-any-return]

    def begin(seed: int) -> tuple[Tied, torch.optim.Optimizer]:
        model = Tied(seed)
        return model, torch.optim.AdamW(model.parameters())

    def step(model: Tied, optimizer: torch.optim.Optimizer) -> None:
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = begin(0)
    step(model, optimizer)
    save_checkpoint(f"{run}/1", iteration=1, model=model, optimizer=optimizer)
    other, other_optimizer = begin(1)
    load_checkpoint(f"{run}/1", model=other, optimizer=other_optimizer)
    assert other.head.weight is other.emb.weight
    step(model, optimizer)
    step(other, other_optimizer)
    assert are_equal(model, other)


def test_a_upath_works_and_what_is_found_has_a_number_for_a_name() -> None:
    root = UPath(f"memory://training-{next(_numbers)}/run")
    model, other = make_model(), make_model(seed=1)
    save_checkpoint(root / "7", iteration=7, model=model)
    latest = find_latest_checkpoint(root)
    assert latest is not None
    assert int(latest.name) == 7
    assert load_checkpoint(latest, model=other) == 7
    assert are_equal(model, other)


# --- what does not fit --------------------------------------------------------------------------


def test_br_17_a_checkpoint_that_is_not_there_is_an_error_that_names_its_url(run: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"{run}/300"):
        load_checkpoint(f"{run}/300", model=make_model())


def test_br_88_a_loose_load_warns_and_reports(run: str, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(
        f"{run}/1", iteration=1, model=nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    )
    model = nn.ModuleDict({"b": nn.Linear(1, 1), "c": nn.Linear(1, 1)})
    with pytest.raises(KeyMismatchError, match=r"model\.c\.weight.*model\.a\.weight"):
        load_checkpoint(f"{run}/1", model=model)
    kept = model.state_dict()["c.weight"].clone()
    reports: list[LoadReport] = []
    assert load_checkpoint(f"{run}/1", model=model, strict_loading=False, on_report=reports.append) == 1
    assert reports == [
        LoadReport(1, ("model.c.bias", "model.c.weight"), ("model.a.bias", "model.a.weight")),
    ]
    assert "left as it was: model.c.bias, model.c.weight" in caplog.text
    assert torch.equal(model.state_dict()["c.weight"], kept)


def test_br_93_that_nothing_of_the_model_is_there_is_an_error_even_when_loose(run: str) -> None:
    save_checkpoint(f"{run}/1", iteration=1, model=nn.ModuleDict({"a": nn.Linear(1, 1)}))
    with pytest.raises(KeyMismatchError, match="nothing of 'model'"):
        load_checkpoint(f"{run}/1", model=nn.ModuleDict({"b": nn.Linear(1, 1)}), strict_loading=False)


def test_errors_about_a_checkpoint_hold_its_url_and_say_how_to_go_on(run: str) -> None:
    model = make_model()
    save_checkpoint(f"{run}/1", iteration=1, model=model)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(KeyMismatchError, match="strict_loading=False") as caught:
        load_checkpoint(f"{run}/1", model=model, optimizer=optimizer)
    assert "the checkpoint holds no optimizer state; missing" in str(caught.value)
    assert str(caught.value.url).endswith(f"{run}/1")
    for other, error in (
        (make_model(width=5), ShapeMismatchError),
        (make_model().half(), DtypeMismatchError),
    ):
        with pytest.raises(error) as refused:
            load_checkpoint(f"{run}/1", model=other)
        assert refused.value.url == caught.value.url
        assert f"{run}/1" in str(refused.value)


def test_none_in_place_of_a_checkpoint_is_said_to_be_what_a_search_without_result_returns(run: str) -> None:
    latest: Any = find_latest_checkpoint(run)
    with pytest.raises(ConfigError, match="ckpt_dir is None: find_latest_checkpoint found no checkpoint"):
        load_checkpoint(latest, model=make_model())


def test_another_shape_is_an_error_and_leaves_the_model_alone(run: str) -> None:
    save_checkpoint(f"{run}/1", iteration=1, model=make_model(width=3))
    model, same = make_model(1, width=5), make_model(1, width=5)
    with pytest.raises(ShapeMismatchError, match=r"model\.body\.weight .*\[3, 4\].*\[5, 4\]"):
        load_checkpoint(f"{run}/1", model=model, strict_loading=False)
    assert are_equal(model, same)


def test_another_dtype_is_converted_only_when_asked_for(run: str) -> None:
    model = make_model()
    save_checkpoint(f"{run}/1", iteration=1, model=model)
    half = make_model(1).bfloat16()
    with pytest.raises(DtypeMismatchError, match=r"model\.body\.weight"):
        load_checkpoint(f"{run}/1", model=half)
    load_checkpoint(f"{run}/1", model=half, convert_dtype=True)
    assert are_equal(half, model.bfloat16())


def test_an_object_of_a_foreign_class_needs_trust(run: str) -> None:
    model = make_model()
    save_checkpoint(f"{run}/1", iteration=1, model=model, extra={"path": Counter(4)})
    extra: dict[str, Any] = {"path": None}
    with pytest.raises(UntrustedDataError, match=r"extra\.path.*Counter"):
        load_checkpoint(f"{run}/1", model=model, extra=extra)
    load_checkpoint(f"{run}/1", model=model, extra=extra, trusted=True)
    assert extra["path"].count == 4


# --- interrupts ---------------------------------------------------------------------------------


class Interrupts(Counter):
    """A stateful object in which somebody presses Ctrl-C or a signal handler calls ``sys.exit``."""

    def __init__(self, interrupt: BaseException, is_in_upload: bool = False) -> None:
        super().__init__()
        self.interrupt, self.is_in_upload = interrupt, is_in_upload

    def state_dict(self) -> dict[str, Any]:
        if self.is_in_upload:
            return {"value": self}
        raise self.interrupt

    def __reduce__(self) -> Any:
        raise self.interrupt


@pytest.mark.parametrize("is_in_upload", [False, True])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_of_a_save_stays_one_and_nothing_is_committed(
    run: str, interrupt: BaseException, is_in_upload: bool
) -> None:
    with pytest.raises(type(interrupt)) as caught:
        save_checkpoint(
            f"{run}/1", iteration=1, model=make_model(), other=Interrupts(interrupt, is_in_upload)
        )
    assert caught.value is interrupt
    assert find_latest_checkpoint(run) is None


@pytest.mark.parametrize("method", ["resolve", "read_data"])
def test_an_interrupt_of_a_load_stays_one(run: str, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def press_ctrl_c(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    save_checkpoint(f"{run}/1", iteration=1, model=make_model())
    monkeypatch.setattr(RemoteStorageReader, method, press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(f"{run}/1", model=make_model())


# --- replacing ----------------------------------------------------------------------------------


def test_without_overwrite_a_checkpoint_is_not_replaced(run: str) -> None:
    first, second, loaded = make_model(0), make_model(1), make_model(2)
    save_checkpoint(f"{run}/1", iteration=1, model=first)
    with pytest.raises(CheckpointExistsError):
        save_checkpoint(f"{run}/1", iteration=1, model=second, overwrite=False)
    load_checkpoint(f"{run}/1", model=loaded)
    assert are_equal(loaded, first)


def test_a_checkpoint_is_replaced_by_default(run: str) -> None:
    second, loaded = make_model(1), make_model(2)
    save_checkpoint(f"{run}/1", iteration=1, model=make_model(0))
    save_checkpoint(f"{run}/1", iteration=2, model=second)
    assert load_checkpoint(f"{run}/1", model=loaded) == 2
    assert are_equal(loaded, second)


def test_a_failed_replacement_leaves_the_old_checkpoint_and_the_next_one_works(run: str) -> None:
    first, second, loaded = make_model(0), make_model(1), make_model(2)
    save_checkpoint(f"{run}/1", iteration=1, model=first)
    with pytest.raises(SaveFailedError, match="rank 0"):
        save_checkpoint(f"{run}/1", iteration=1, model=second, broken={"lambda": lambda: None})
    load_checkpoint(f"{run}/1", model=loaded)
    assert are_equal(loaded, first)
    save_checkpoint(f"{run}/1", iteration=1, model=second)
    load_checkpoint(f"{run}/1", model=loaded)
    assert are_equal(loaded, second)


def test_a_failed_first_save_leaves_nothing_that_counts_as_a_checkpoint(run: str) -> None:
    with pytest.raises(SaveFailedError):
        save_checkpoint(f"{run}/1", iteration=1, model=make_model(), broken={"lambda": lambda: None})
    assert find_latest_checkpoint(run) is None


def test_a_file_where_a_checkpoint_should_go_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("precious")
    with pytest.raises(CheckpointExistsError):
        save_checkpoint(tmp_path / "1", iteration=1, model=make_model())
    assert (tmp_path / "1").read_text() == "precious"


def test_a_load_starts_again_when_the_checkpoint_is_replaced_meanwhile(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    newer, loaded = make_model(1), make_model(2)

    class ReplacesOnce(Counter):
        def state_dict(self) -> dict[str, Any]:  # called after the load has chosen what to read
            if not self.count:
                self.count = 1
                save_checkpoint(f"{run}/1", iteration=2, model=newer, counter=Counter(8))
            return {"count": 0}

    save_checkpoint(f"{run}/1", iteration=1, model=make_model(0), counter=Counter(7))
    counter = ReplacesOnce()
    assert load_checkpoint(f"{run}/1", model=loaded, counter=counter) == 2
    assert are_equal(loaded, newer)
    assert counter.count == 8
    assert "again" in caplog.text


# --- state left out on purpose ------------------------------------------------------------------


def frozen_and_head(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"backbone": make_model(seed), "head": nn.Linear(3, 2)})


BACKBONE = list(make_model().state_dict())


def test_what_is_registered_is_neither_saved_nor_needed_and_the_manifest_says_so(run: str) -> None:
    model, other = frozen_and_head(0), frozen_and_head(1)
    for one in (model, other):
        register_dont_save_hooks(one["backbone"], BACKBONE)
    kept = make_model(1)
    save_checkpoint(f"{run}/1", iteration=1, model=model)
    load_checkpoint(f"{run}/1", model=other)
    assert are_equal(other["head"], model["head"])
    own = zip(other["backbone"].parameters(), kept.parameters(), strict=True)
    assert all(torch.equal(mine, before) for mine, before in own)
    left_out = read_manifest(f"{run}/1").left_out
    assert left_out == tuple(sorted(f"model.backbone.{name}" for name in BACKBONE))


def test_what_is_registered_is_not_taken_from_a_checkpoint_that_has_it(run: str) -> None:
    save_checkpoint(f"{run}/1", iteration=1, model=frozen_and_head(0))
    other = frozen_and_head(1)
    register_dont_save_hooks(other, [f"backbone.{name}" for name in BACKBONE])
    load_checkpoint(f"{run}/1", model=other)
    assert are_equal(other["head"], frozen_and_head(0)["head"])
    assert are_equal(other["backbone"], frozen_and_head(1)["backbone"])


def test_a_strict_load_of_a_plain_state_dict_forgives_only_what_is_registered() -> None:
    model = frozen_and_head(0)
    register_dont_save_hooks(model["backbone"], BACKBONE)
    state = model.state_dict()
    assert sorted(state) == ["head.bias", "head.weight"]
    model.load_state_dict(state)
    del state["head.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "head.bias"'):
        model.load_state_dict(state)
    model.load_state_dict(model.state_dict())


def test_nothing_is_logged_as_missing_when_all_is_there(run: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    save_checkpoint(f"{run}/1", iteration=1, model=model)
    load_checkpoint(f"{run}/1", model=model, strict_loading=False)
    ours = [record for record in caplog.records if record.name == "remote_ckpt"]
    assert [record.levelno for record in ours if record.levelno >= logging.WARNING] == []


def test_a_failed_load_leaves_a_fresh_optimizer_fresh(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "1", iteration=1, model=model, optimizer=optimizer)
    other = torch.nn.Linear(2, 2, bias=False)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.25)
    with pytest.raises(KeyMismatchError):
        load_checkpoint(tmp_path / "1", model=other, optimizer=fresh)
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.25
