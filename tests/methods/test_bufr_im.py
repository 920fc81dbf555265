"""BUFR-IM: restoring as BUFR does, then refining, and when refining is undone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from worlds import World, sensors

import shiftmend
from shiftmend.engine.history import MAX_REFINED_RATIO, Epoch
from shiftmend.engine.method import Network, Stage
from shiftmend.errors import AdaptationError
from shiftmend.introspection.blocks import split_blocks
from shiftmend.introspection.model_state import snapshot
from shiftmend.introspection.trace import trace
from shiftmend.methods.bufr import BUFR
from shiftmend.methods.bufr_im import BUFRIM, MAX_REFINE_RATE, REFINING
from shiftmend.methods.shot_im import SHOTIM

CPU = torch.device("cpu")


def network_of(world: World) -> Network:
    found = trace(world.model, world.target[:2])
    return Network(world.model, split_blocks(world.model, found), found.taps, found.head)


def activations_of(world: World) -> dict[str, Tensor]:
    with torch.no_grad():
        features = world.model[:6](world.target)
        return {"features": features, "logits": world.model[6](features)}


def test_the_stages_are_those_of_bufr_and_one_that_refines() -> None:
    world = sensors()
    network, profile = network_of(world), world.profile()
    options = {"epochs_per_block": 3, "learning_rate": 0.05, "decay": 2.0, "align": ("features",)}
    *restoring, refined = BUFRIM(**options, refine_epochs=4).stages(network, profile)
    assert restoring == BUFR(**options).stages(network, profile)
    assert refined == Stage(REFINING, 4, SHOTIM().rate(network), network.below_features)
    assert BUFRIM(refine_rate=0.3).stages(network, profile)[-1].learning_rate == 0.3
    assert BUFRIM(align="features").taps(profile) == ("features", "logits")


@pytest.mark.parametrize(("published", "expected"), [(0.002, 0.002), (0.2, MAX_REFINE_RATE)])
def test_published_rates_are_those_of_both_parts(published: float, expected: float) -> None:
    world = sensors()
    network = network_of(world)
    network.model.shiftmend_rates = {"bufr": 0.7, "shot-im": published, "bufr-im": 99.0}  # type: ignore[assignment]
    try:
        first, *_, last = BUFRIM(epochs_per_block=1).stages(network, world.profile())
    finally:
        del network.model.shiftmend_rates
    assert (first.learning_rate, last.learning_rate) == (0.7, expected)


@pytest.mark.parametrize("hold", [0.0, 2.5])
def test_each_stage_has_its_loss(hold: float) -> None:
    world = sensors()
    network, profile, seen = network_of(world), world.profile(), activations_of(world)
    made = BUFRIM(hold=hold)
    *restoring, refined = made.stages(network, profile)
    aligned = BUFR().objective(profile, CPU)(seen)
    for stage in restoring:
        assert made.objective_of(stage, profile, CPU)(seen) == aligned
    expected = {"certainty": SHOTIM().objective(profile, CPU)(seen)["logits"]}
    expected |= {name: hold * term for name, term in aligned.items() if hold}
    assert made.objective_of(refined, profile, CPU)(seen) == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"refine_epochs": 0}, r"refine_epochs.*whole number"),
        ({"refine_rate": -1.0}, r"refine_rate.*positive"),
        ({"hold": -1.0}, r"hold.*at least 0"),
        ({"decay": 0.0}, r"decay.*positive"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(AdaptationError, match=sentence):
        BUFRIM(**options)  # type: ignore[arg-type]


def test_a_model_without_classes_is_refused() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(60, 3)
    profile = shiftmend.profile(model, inputs, progress=False)
    with pytest.raises(AdaptationError, match="Expected a classifier"):
        shiftmend.adapt(model, inputs, profile, "bufr-im", epochs_per_block=1, refine_epochs=1, progress=False)


FEW = {"epochs_per_block": 4, "learning_rate": 0.05, "refine_epochs": 3, "refine_rate": 0.01}


def test_it_restores_as_bufr_does_and_then_makes_predictions_certain() -> None:
    world = sensors()
    profile = world.profile()
    restored = shiftmend.adapt(
        world.model, world.target, profile, "bufr", epochs_per_block=4, learning_rate=0.05, progress=False
    )
    refined = shiftmend.adapt(world.model, world.target, profile, "bufr-im", progress=False, **FEW)
    count = len(restored.history)
    assert [row.signals for row in refined.history[:count]] == [row.signals for row in restored.history]
    assert [row.block for row in refined.history[count:]] == [REFINING] * 3
    assert set(refined.history[-1].losses) == {"certainty", "features", "logits"}
    assert refined.history[-1].signals["entropy"] < restored.history[-1].signals["entropy"]
    assert world.accuracy(refined.model) >= world.accuracy(restored.model) > world.accuracy(world.model)


def test_a_refined_state_is_kept_although_its_slices_are_a_little_worse() -> None:
    world = sensors()
    options = {"epochs_per_block": 30, "refine_epochs": 5, "refine_rate": 0.03, "hold": 0.0, "batch_size": 100}
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "bufr-im", keep="selected", progress=False, **FEW | options
    )
    best = min(row.verification or 0.0 for row in result.history if row.block != REFINING)
    assert result.kept is result.history[-1]
    assert best < (result.kept.verification or 0.0) <= MAX_REFINED_RATIO * best


def test_refining_that_harms_ends_and_is_undone() -> None:
    world = sensors()
    options = FEW | {"refine_rate": 3.0, "hold": 0.0, "refine_epochs": 20}
    states: dict[int, dict[str, Tensor]] = {}

    def look(model: nn.Module, row: Epoch) -> None:
        states[row.epoch] = snapshot(model)

    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "bufr-im", keep="selected", on_epoch=look, progress=False, **options
    )
    refined = [row for row in result.history if row.block == REFINING]
    assert len(refined) < 20
    assert result.kept.epoch == result.history[-1].epoch - 1
    kept = states[result.kept.epoch]
    assert all(torch.equal(value, kept[name]) for name, value in snapshot(result.model).items())


def test_refining_begins_from_the_state_that_is_kept() -> None:
    world = sensors(norm=False)  # BatchNorm would move even where nothing is learnt.
    options = {"epochs_per_block": 6, "learning_rate": 0.5, "refine_epochs": 1, "refine_rate": 1e-12}
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "bufr-im", keep="selected", progress=False, **options
    )
    *restoring, refined = result.history
    slices = [row.verification or 0.0 for row in restoring]
    assert min(slices) < 0.9 * slices[-1], "the last restored state must be worse for this test to mean anything"
    assert refined.verification == pytest.approx(min(slices), rel=1e-3)


class Killed(Exception):
    pass


@pytest.mark.parametrize("keep", ["last", "selected"])
@pytest.mark.parametrize("last", [8, 9, 10])
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, keep: str, last: int) -> None:
    world = sensors()
    profile = world.profile()

    def run(checkpoint: Path | None, on_epoch: object = None) -> shiftmend.Adaptation:
        return shiftmend.adapt(
            world.model,
            world.target,
            profile,
            "bufr-im",
            keep=keep,  # type: ignore[arg-type]
            checkpoint=checkpoint,
            on_epoch=on_epoch,  # type: ignore[arg-type]
            progress=False,
            **FEW,
        )

    def kill(model: nn.Module, row: Epoch) -> None:
        if row.epoch == last:
            raise Killed

    whole = run(None)
    assert whole.history[8].block != REFINING == whole.history[9].block
    with pytest.raises(Killed):
        run(tmp_path / "run", kill)
    resumed = run(tmp_path / "run")
    assert [row.signals for row in resumed.history] == [row.signals for row in whole.history]
    assert resumed.manifest["adapted_weights"] == whole.manifest["adapted_weights"]
