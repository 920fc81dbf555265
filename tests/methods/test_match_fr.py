"""Match-FR: a map of the inputs first, then FR from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from worlds import sensors

import shiftmend
from shiftmend.adaptation.auto import CANDIDATES, choose_usual
from shiftmend.errors import AdaptationError
from shiftmend.introspection.input_map import OFFSET, SCALE


@pytest.mark.slow
def test_inputs_are_matched_before_features_are_restored(tmp_path: Path) -> None:
    world, profile = sensors(), sensors().profile()
    options = {"checkpoint": tmp_path / "run", "progress": False}
    result = shiftmend.adapt(world.model, world.target, profile, "match-fr", **options)
    matched = shiftmend.adapt(world.model, world.target, profile, "match-moments", progress=False)
    for name in (SCALE, OFFSET):
        assert torch.equal(getattr(result.model, name), getattr(matched.model, name))
    assert [row.block for row in result.history[:3]] == ["", "inputs", "all blocks"]
    assert result.history[1].losses == {}
    assert result.history[2].losses.keys() == {"features", "logits"}
    trained = result.model.state_dict()
    assert any(not torch.equal(trained[name], one) for name, one in world.model.named_parameters())
    # The rate is searched behind the map: in front of it, the loss is that of inputs nobody will see.
    assert result.manifest["learning_rate_search"]["start"] < 2 * result.history[2].loss
    again = shiftmend.adapt(world.model, world.target, profile, "match-fr", **options)
    assert again.history[-1].epoch == result.history[-1].epoch
    assert all(torch.equal(one, trained[name]) for name, one in again.model.state_dict().items())


def test_an_error_names_the_method() -> None:
    world, profile = sensors(), sensors().profile()
    wide = replace(profile.statistics["inputs"], mean=torch.zeros(9), variance=torch.ones(9))
    others = {name: one for name, one in profile.statistics.items() if name != "inputs.quantiles"}
    profile = replace(profile, statistics=others | {"inputs": wide})
    with pytest.raises(AdaptationError, match=r"9 channels.*match-fr"):
        shiftmend.adapt(world.model, world.target, profile, "match-fr", progress=False)


def test_only_tables_have_it_as_a_candidate() -> None:
    assert "match-fr" in choose_usual(CANDIDATES, sensors().profile())
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)).eval()
    images = shiftmend.profile(model, torch.rand(20, 3, 8, 8), progress=False)
    assert "match-fr" not in choose_usual(CANDIDATES, images)
