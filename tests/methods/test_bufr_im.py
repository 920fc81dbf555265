"""BUFR-IM: restoring as BUFR does, then refining, and when refining is undone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from worlds import World, sensors

from shiftmend.engine.method import Network, Stage
from shiftmend.errors import AdaptationError
from shiftmend.introspection.blocks import split_blocks
from shiftmend.introspection.trace import trace
from shiftmend.methods.bufr import BUFR
from shiftmend.methods.bufr_im import BUFRIM, REFINING
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


def test_published_rates_are_those_of_both_parts() -> None:
    world = sensors()
    network = network_of(world)
    network.model.shiftmend_rates = {"bufr": 0.7, "shot-im": 0.2, "bufr-im": 99.0}  # type: ignore[assignment]
    try:
        first, *_, last = BUFRIM(epochs_per_block=1).stages(network, world.profile())
    finally:
        del network.model.shiftmend_rates
    assert (first.learning_rate, last.learning_rate) == (0.7, 0.2)


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
        ({"refine_epochs": 0}, "refine_epochs must be a whole number of at least 1"),
        ({"refine_rate": -1.0}, "refine_rate must be a positive number"),
        ({"hold": -1.0}, "hold must be a number of at least 0"),
        ({"decay": 0.0}, "decay of the learning rate must be a positive number"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(AdaptationError, match=sentence):
        BUFRIM(**options)  # type: ignore[arg-type]
