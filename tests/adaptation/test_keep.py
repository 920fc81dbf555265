"""Which state a run gives back: the last, or the one chosen without labels; and which of several runs."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from worlds import sensors

import shiftmend
from shiftmend.adaptation.result import Adaptation
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine import trainer as loop
from shiftmend.engine.history import Epoch, choose
from shiftmend.errors import AdaptationError, DataError, DivergedError, ShiftmendError
from shiftmend.methods.fr import FR
from shiftmend.profiles.profile import Profile
from shiftmend.verification.signals import SignalReader, Signals, observe

TARGET = sensors().target[:200]
WILD: dict[str, Any] = {"learning_rate": 1.5, "epochs": 6, "progress": False}
"""Steps so large that the slices are best after two epochs and much worse at the end."""


@functools.cache
def profiled() -> Profile:
    return sensors().profile()


def adapt(method: str | FR = "fr", **options: Any) -> Adaptation:
    world = sensors()
    given = WILD if isinstance(method, str) else {"progress": False}
    return shiftmend.adapt(world.model, TARGET, profiled(), method, **(given | options))


@functools.cache
def known(epochs: int = 6, keep: str = "last", rate: float = 1.5) -> Adaptation:
    """A run to compare with, which several tests share."""
    return adapt(epochs=epochs, keep=keep, learning_rate=rate)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


# --- keep ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_selected_is_the_state_of_that_epoch() -> None:
    result, last = known(keep="selected"), known()
    chosen = result.selected
    assert 0 < chosen < 6
    assert same(result.model, known(chosen).model)  # a run that ends there
    assert not same(result.model, last.model)
    assert [row.losses for row in result.history] == [row.losses for row in last.history]  # the run itself is the same
    assert result.kept == result.history[chosen]
    assert result.kept.epoch == chosen
    assert result.manifest["kept"] == "selected"
    assert result.manifest["selected_epoch"] == chosen
    assert result.manifest["epochs"] == 6
    assert result.after.divergence == pytest.approx(result.kept.verification, rel=1e-4)
    assert f"kept is epoch {chosen}, chosen without labels" in repr(result)


class Partial(nn.Sequential):
    """Says that its state is the first layer alone, as models with adapters do."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **options).items() if name.startswith("0.")}


def test_selected_is_the_whole_state_also_where_the_state_dict_is_a_part_of_it(tmp_path: Path) -> None:
    model = Partial(*copy.deepcopy(sensors().model))
    result = shiftmend.adapt(model, TARGET, profiled(), "fr", keep="selected", **WILD)
    expected = known(keep="selected").model
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), expected.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(result.model.buffers(), expected.buffers(), strict=True))
    result.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == expected.state_dict().keys()
    assert all(torch.equal(stored[name], value) for name, value in expected.state_dict().items())


def test_the_last_is_kept_unless_asked_and_the_choice_is_told_anyway() -> None:
    result = known()
    assert result.manifest["kept"] == "last"
    assert result.kept is result.history[-1]
    assert result.selected == known(keep="selected").selected
    assert result.selected == choose(result.history, entropy_may_decide=True)
    assert result.after.divergence == pytest.approx(result.history[-1].verification, rel=1e-4)


def test_what_only_gets_worse_comes_back_untouched() -> None:
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.source, profiled(), "fr", learning_rate=20.0, epochs=3, keep="selected", progress=False
    )
    assert result.selected == 0
    assert "kept is epoch 0 (the model as it came), chosen without labels" in repr(result)
    assert same(result.model, world.model)
    assert result.after == result.before


def test_without_a_profile_there_is_nothing_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    world = sensors()
    looks: list[object] = []

    def counted(*arguments: Any) -> Any:
        looks.append(arguments)
        return observe(*arguments)

    monkeypatch.setattr("shiftmend.adaptation.run.observe", counted)
    for method in ("source-only", "adabn"):
        looks.clear()
        result = shiftmend.adapt(world.model, world.target, method=method, progress=False)
        assert result.before is None
        assert result.after is None
        assert not looks


def test_without_a_profile_the_last_is_selected() -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, None, "tent", epochs=3, keep="selected", progress=False)
    assert result.selected == 3
    assert same(result.model, shiftmend.adapt(world.model, world.target, None, "tent", epochs=3, progress=False).model)


def test_entropy_minimisers_are_judged_by_slices_alone() -> None:
    result = adapt("shot-im", learning_rate=0.05, epochs=6)
    lowest = min(result.history, key=lambda row: row.verification)
    assert result.selected == lowest.epoch


def test_other_words_are_refused() -> None:
    with pytest.raises(AdaptationError, match=r"keep.*'best'"):
        adapt(keep="best")


def test_the_selected_state_is_saved(tmp_path: Path) -> None:
    result = known(keep="selected")
    result.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in known(result.selected).model.state_dict().items())


@dataclass(frozen=True, kw_only=True)
class Interrupted(FR):
    """FR whose user presses Ctrl-C after some batches."""

    after: int

    def objective(self, profile, device):  # type: ignore[no-untyped-def]
        losses, calls = super().objective(profile, device), itertools.count(1)

        def counted(activations):  # type: ignore[no-untyped-def]
            if next(calls) > self.after:
                raise KeyboardInterrupt
            return losses(activations)

        return counted


def test_an_interrupt_returns_the_selected_state() -> None:
    cut = adapt(Interrupted(after=4, epochs=6, learning_rate=1.5), keep="selected")
    assert cut.interrupted
    assert cut.manifest["epochs"] == 4
    whole = known(keep="selected")
    assert 0 < cut.selected < 4
    assert cut.selected == choose(whole.history[:5], entropy_may_decide=True)
    assert same(cut.model, known(cut.selected).model)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_an_interrupt_while_a_state_is_remembered_leaves_history_and_model_of_one_epoch(
    epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, calls = loop.snapshot, itertools.count(1)

    def press(model: nn.Module) -> dict[str, torch.Tensor]:
        if next(calls) == epochs + 2:  # the first are of the model as it came and of row 0
            raise KeyboardInterrupt
        return copied(model)

    monkeypatch.setattr(loop, "snapshot", press)
    cut = adapt()
    assert cut.interrupted
    assert cut.manifest["epochs"] == epochs
    assert same(cut.model, known(epochs).model)


def test_divergence_hands_the_selected_state_over() -> None:
    world = sensors(norm=False)
    with pytest.raises(DivergedError) as caught:
        shiftmend.adapt(
            world.model, world.target, world.profile(), "fr", learning_rate=1e38, epochs=3, keep="selected",
            progress=False,
        )  # fmt: skip
    kept = caught.value.adaptation
    assert kept.selected == 0
    assert same(kept.model, world.model)


# --- checkpoints -----------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def killed_after(epochs: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Run until so many epochs are on disk."""
    original, saved = checkpoints.save, itertools.count(1)

    def counted(*arguments: Any) -> None:
        original(*arguments)
        if next(saved) == epochs:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save", counted)
        with pytest.raises(Killed):
            run()


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 4, 5])
def test_a_run_that_was_killed_still_gives_the_selected_state(
    epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before, after and long after the epoch that is kept in the end."""
    options = {"keep": "selected", "checkpoint": tmp_path / "c"}
    killed_after(epochs, monkeypatch, lambda: adapt(**options))
    resumed, whole = adapt(**options), known(keep="selected")
    assert resumed.selected == whole.selected
    assert 0 < whole.selected < 4
    assert same(resumed.model, whole.model)
    assert resumed.manifest["adapted_weights"] == whole.manifest["adapted_weights"]
    again = adapt(**options)  # finished long ago: nothing but the file to go by
    assert same(again.model, whole.model)
    assert again.kept.verification == whole.kept.verification


@pytest.mark.slow
def test_a_checkpoint_holds_a_second_state_only_where_it_is_wanted(tmp_path: Path) -> None:
    for keep in ("last", "selected"):
        adapt(keep=keep, checkpoint=tmp_path / keep)
    names = {keep: set(load_file(tmp_path / keep)) for keep in ("last", "selected")}
    state = set(sensors().model.state_dict())
    assert names["selected"] - names["last"] == {f"selected.{name}" for name in state}
    with pytest.raises(AdaptationError, match="belongs to another run"):
        adapt(keep="selected", checkpoint=tmp_path / "last")


def test_resuming_tells_of_new_epochs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    options = {"checkpoint": tmp_path / "c", "on_epoch": lambda model, row: seen.append(row.epoch)}
    killed_after(3, monkeypatch, lambda: adapt(**options))
    assert seen == [0, 1, 2, 3]
    adapt(**options)
    assert seen == [0, 1, 2, 3, 4, 5, 6]


# --- on_epoch --------------------------------------------------------------------------------------------------------


def test_on_epoch_sees_every_row_with_its_model_in_eval_mode() -> None:
    world = sensors()
    profile = profiled()
    rows: list[Epoch] = []
    states: list[nn.Module] = []

    def look(model: nn.Module, row: Epoch) -> None:
        assert not any(module.training for module in model.modules())
        rows.append(row)
        states.append(copy.deepcopy(model))
        model.train()  # a careless caller

    result = adapt(on_epoch=look, keep="selected")
    assert rows == result.history
    assert same(states[0], world.model)
    assert same(states[result.selected], result.model)
    assert same(states[-1], known().model)  # watching changes nothing
    for state, row in zip(states, rows, strict=True):
        assert shiftmend.verify(state.eval(), TARGET, profile).divergence == pytest.approx(row.verification)


def test_on_epoch_sees_eval_mode_also_if_the_callers_model_trains() -> None:
    world = sensors()
    model = copy.deepcopy(world.model).train()
    seen: list[bool] = []
    shiftmend.adapt(
        model,
        world.target,
        world.profile(),
        "fr",
        epochs=1,
        progress=False,
        on_epoch=lambda m, _: seen.append(m.training),
    )
    assert seen == [False, False]


def test_an_error_in_on_epoch_is_the_callers_own() -> None:
    def fail(model: nn.Module, row: Epoch) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        adapt(on_epoch=fail)


def test_an_interrupt_in_on_epoch_keeps_that_epoch() -> None:
    def press(model: nn.Module, row: Epoch) -> None:
        if row.epoch == 2:
            raise KeyboardInterrupt

    cut = adapt(on_epoch=press)
    assert cut.interrupted
    assert cut.manifest["epochs"] == 2
    assert same(cut.model, known(2).model)


def test_rows_hold_what_is_seen_without_labels() -> None:
    rows: list[Epoch] = []
    feed = shiftmend.inputs.feed.Feed(TARGET)

    def look(model: nn.Module, row: Epoch) -> None:
        seen = observe(model, feed, profiled())
        assert row.signals == seen.values
        rows.append(row)

    adapt(epochs=2, on_epoch=look)
    assert len(rows) == 3


# --- several learning rates ------------------------------------------------------------------------------------------

RATES = [0.1, 1e-4, 2.0]


@pytest.mark.slow
def test_of_several_rates_the_preferred_run_is_the_result() -> None:
    result = adapt(learning_rate=RATES, epochs=5)
    alone = {rate: known(5, rate=rate) for rate in RATES}
    best = min(RATES, key=lambda rate: alone[rate].history[-1].verification)
    assert best == RATES[1]
    assert same(result.model, alone[best].model)
    assert result.manifest["learning_rate_chosen"] == "by the verification slices"
    assert alone[best].manifest["learning_rate_chosen"] == "given"
    assert result.manifest["method"]["learning_rate"] == best
    assert result.manifest["learning_rates_tried"] == [
        {"learning_rate": rate, "epoch": 5, "verification": last.verification, "entropy": last.signals["entropy"]}
        for rate in RATES
        for last in [alone[rate].history[-1]]
    ]


@pytest.mark.slow
def test_the_order_of_rates_does_not_matter_and_each_is_judged_by_what_it_keeps() -> None:
    forth, back = (adapt(learning_rate=rates, keep="selected", epochs=4) for rates in (RATES, tuple(RATES[::-1])))
    assert same(forth.model, back.model)
    tried = {entry["learning_rate"]: entry for entry in forth.manifest["learning_rates_tried"]}
    for rate in RATES:
        alone = known(4, "selected", rate)
        assert (tried[rate]["epoch"], tried[rate]["verification"]) == (alone.selected, alone.kept.verification)


@pytest.mark.slow
def test_a_rate_that_diverges_is_survived_and_told_of() -> None:
    world = sensors(norm=False)
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "fr", learning_rate=[1e38, 0.01], epochs=3, progress=False
    )
    bad, good = result.manifest["learning_rates_tried"]
    assert "Lower the learning rate" in bad["failed"]
    assert bad["learning_rate"] == 1e38
    assert good["verification"] == result.history[-1].verification
    assert result.manifest["method"]["learning_rate"] == 0.01
    with pytest.raises(DivergedError, match="became NaN or infinite"):
        shiftmend.adapt(
            world.model, world.target, world.profile(), "fr", learning_rate=[1e38, 2e38], epochs=3, progress=False
        )


@pytest.mark.slow
def test_each_rate_has_its_own_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"learning_rate": [0.1, 1.0], "epochs": 4, "keep": "selected", "checkpoint": tmp_path / "c"}
    killed_after(6, monkeypatch, lambda: adapt(**options))  # in the second run
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.rate-0.1", "c.rate-1.0"]
    trained: list[int] = []
    resumed = adapt(**options, on_epoch=lambda model, row: trained.append(row.epoch))
    assert trained == [3, 4]
    whole = adapt(**(options | {"checkpoint": None}))
    assert same(resumed.model, whole.model)
    assert resumed.manifest["learning_rates_tried"] == whole.manifest["learning_rates_tried"]


def test_a_list_that_cannot_be_judged_is_one_sentence() -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match="got an empty list"):
        adapt(learning_rate=[])
    with pytest.raises(AdaptationError, match=r"profile.*several learning rates"):
        shiftmend.adapt(world.model, world.target, None, "tent", learning_rate=[0.1, 0.2])
    with pytest.raises(AdaptationError, match=r"positive.*-1"):
        adapt(learning_rate=[0.1, -1], epochs=1)
    with pytest.raises(AdaptationError, match="make the method with"):
        adapt(FR(epochs=1), learning_rate=[0.1, 0.2])
    with pytest.raises(AdaptationError, match="got 'learning_rate'"):
        shiftmend.adapt(world.model, world.target, world.profile(), "adabn", learning_rate=[0.1])


def test_an_interrupt_ends_the_search_with_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    runs = itertools.count(1)

    def press(model: nn.Module, row: Epoch) -> None:
        if row.epoch == 2 and next(runs) == 2:
            raise KeyboardInterrupt

    with caplog.at_level(logging.WARNING):
        result = adapt(learning_rate=[0.1, 0.05, 0.2], epochs=4, on_epoch=press)
    tried = result.manifest["learning_rates_tried"]
    assert [(entry["learning_rate"], entry["epoch"]) for entry in tried] == [(0.1, 4), (0.05, 2)]
    assert result.manifest["method"]["learning_rate"] == 0.1
    assert "interrupted after 2 epochs" in caplog.text


def test_an_interrupt_before_the_first_row_ends_the_search_too(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, measure = itertools.count(1), SignalReader._measure

    def pressed(reader: SignalReader) -> Signals:
        if next(looks) == 1:
            raise KeyboardInterrupt
        return measure(reader)

    monkeypatch.setattr(SignalReader, "_measure", pressed)
    assert adapt(learning_rate=[0.1, 0.2], epochs=1).interrupted


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bufr", "shot", "target-supervised"])
def test_streams_refuse_what_needs_all_of_the_data(name: str) -> None:
    world = sensors()
    options = {"labels": world.labels} if name == "target-supervised" else {}
    with pytest.raises(AdaptationError) as caught:
        shiftmend.stream(world.model, world.profile(), name, **options)
    message = str(caught.value)
    assert f"stream, got {name}" in message
    able = message.partition("Use one of ")[2].rstrip(".").split(", ")
    assert not {"bufr", "shot", "target-supervised"} & set(able)
    assert "fr" in able


def test_numbers_of_numpy_are_taken_and_can_be_saved(tmp_path: Path) -> None:
    world = sensors()
    options: dict[str, Any] = {"learning_rate": np.float32(0.1), "epochs": np.int64(2)}
    result = shiftmend.adapt(
        world.model,
        world.target,
        world.profile(),
        "fr",
        batch_size=np.int32(100),
        seed=np.int64(3),
        checkpoint=tmp_path / "c.safetensors",
        progress=False,
        **options,
    )
    result.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["seed"] == 3


def test_what_cannot_be_written_is_not_half_written(tmp_path: Path) -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, None, "adabn", progress=False)
    result.manifest["mine"] = object()
    with pytest.raises(DataError, match=r"manifest\.mine.*JSON"):
        result.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ShiftmendError, match="Expected a folder"):
        result.save(tmp_path / "file")


@pytest.mark.slow
def test_adapting_works_inside_inference_mode(tmp_path: Path) -> None:
    world = sensors()
    options: dict[str, Any] = {"epochs": 2, "learning_rate": [0.01, 0.1], "progress": False}
    outside = shiftmend.adapt(world.model, world.target, world.profile(), "fr", **options)
    with torch.inference_mode():
        world.profile().save(tmp_path / "p.safetensors")
        made_inside = world.target * 1.0
        assert made_inside.is_inference()
        for profile in (world.profile(), tmp_path / "p.safetensors"):
            inside = shiftmend.adapt(world.model, made_inside, profile, "fr", **options)
            for name, value in inside.model.state_dict().items():
                assert torch.equal(value, outside.model.state_dict()[name])


@pytest.mark.slow
def test_the_learning_rate_that_was_chosen_is_said() -> None:
    world = sensors()
    given: dict[str, Any] = {"epochs": 1, "progress": False}
    said = repr(shiftmend.adapt(world.model, world.target, world.profile(), "fr", learning_rate=[0.01, 0.1], **given))
    assert re.search(r"; learning rate 0\.(01|1), chosen without labels of 0\.01, 0\.1\n", said)
    assert "learning rate" not in repr(
        shiftmend.adapt(world.model, world.target, world.profile(), "fr", learning_rate=0.1, **given)
    )


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
def test_one_copy_of_the_state_is_remembered_and_an_interrupt_meanwhile_loses_nothing(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    take = loop.snapshot

    def watched(model: nn.Module) -> dict[str, torch.Tensor]:
        alive.append(sum(copy() is not None for copy in copies))
        if interrupted and len(alive) == 4:
            raise KeyboardInterrupt
        state = take(model)
        copies.append(weakref.ref(next(iter(state.values()))))
        return state

    world = sensors()
    whole = shiftmend.adapt(world.model, world.target, world.profile(), "fr", epochs=2)
    monkeypatch.setattr(loop, "snapshot", watched)
    result = shiftmend.adapt(world.model, world.target, world.profile(), "fr", epochs=2)
    assert alive == [0, 0, 0, 0]
    assert result.interrupted == interrupted
    for kept, wanted in zip(result.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(kept, wanted)
