"""Distances that weights were moved, against a loop by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from shiftmend.errors import DataError
from shiftmend.research.figures import style
from shiftmend.research.figures.weights import draw_moved, group_by_block, measure_distances, measure_unit_distances


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3, bias=False), nn.Flatten(), nn.Linear(20, 3)
    )


def shaken(model: nn.Module, seed: int = 1) -> nn.Module:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)
    return other


def by_hand(source: nn.Module, adapted: nn.Module) -> float:
    """Compute the mean distance unit by unit, in plain loops."""
    lengths = []
    for unit in range(len(source.weight)):
        change = list((adapted.weight[unit] - source.weight[unit]).detach().double().numpy().ravel())
        if source.bias is not None:
            change.append(float(adapted.bias[unit].detach().double() - source.bias[unit].detach().double()))
        lengths.append(np.sqrt(sum(part**2 for part in change)))
    return float(np.mean(lengths))


def test_distances_are_those_of_plain_loops() -> None:
    model = network()
    other = shaken(model)
    expected = {name: by_hand(model.get_submodule(name), other.get_submodule(name)) for name in ("0", "3", "5")}
    assert measure_distances(model, other) == pytest.approx(expected)
    assert measure_distances(model, other.state_dict()) == pytest.approx(expected)
    assert measure_distances(model, model) == {"0": 0, "3": 0, "5": 0}


@pytest.mark.slow
@given(scale=st.floats(0.01, 100), units=st.integers(1, 5))
def test_twice_the_way_is_twice_the_distance(scale: float, units: int) -> None:
    source = nn.Linear(3, units).double()
    near, far = copy.deepcopy(source), copy.deepcopy(source)
    with torch.no_grad():
        for one, two in zip(near.parameters(), far.parameters(), strict=True):
            one += scale
            two += 2 * scale
    assert measure_unit_distances(source, near) == pytest.approx([scale * 2.0] * units)  # three weights and a bias
    assert measure_unit_distances(source, far) == pytest.approx([scale * 4.0] * units)


def test_blocks_run_in_order_and_leave_normalisation_out() -> None:
    model = network()
    groups = group_by_block(model, torch.zeros(2, 1, 6, 6))
    assert groups == {"0": ("0",), "3": ("3",)}
    other = shaken(model)
    together = measure_distances(model, other, {"all": ("0", "3")})["all"]
    parts = measure_distances(model, other, groups)
    assert together == pytest.approx((4 * parts["0"] + 5 * parts["3"]) / 9)


def test_output_units_of_a_transposed_convolution() -> None:
    source = nn.ConvTranspose2d(4, 6, 2, groups=2)
    other = copy.deepcopy(source)
    with torch.no_grad():
        other.weight[2:, 1] += 1  # the second group's second output, unit 3 + 1: two inputs of 2 x 2
        other.bias[4] += 1
    assert measure_unit_distances(source, other) == pytest.approx([0, 0, 0, 0, 3, 0], abs=1e-6)


def test_a_parametrised_layer_counts_as_what_it_computes_with() -> None:
    source = nn.Sequential(nn.Linear(3, 2), parametrizations.weight_norm(nn.Linear(2, 2, bias=False)))
    other = copy.deepcopy(source)
    with torch.no_grad():
        other[1].parametrizations.weight.original0 *= 2  # twice as long: moved by its own length
    expected = float(source[1].weight.detach().norm(dim=1).mean())
    assert measure_distances(source, other.state_dict())["1"] == pytest.approx(expected, rel=1e-5)


def test_bars_are_the_distances() -> None:
    model = network()
    methods = {"fr": shaken(model), "bufr": shaken(model, seed=2)}
    axis = draw_moved(model, methods).axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0", "3", "5"]
    for container, (name, other) in zip(axis.containers, methods.items(), strict=True):
        assert [bar.get_height() for bar in container] == pytest.approx(list(measure_distances(model, other).values()))
        ink = style.colour_of(name)
        assert container[0].get_facecolor()[:3] == pytest.approx([int(ink[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        assert container.get_label() == name
    centres = [container[0].get_x() + container[0].get_width() / 2 for container in axis.containers]
    assert np.mean(centres) == pytest.approx(0)


def test_many_layers_lie_below_each_other() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    other = shaken(model)
    axis = draw_moved(model, {"fr": other}).axes[0]
    assert [tick.get_text() for tick in axis.get_yticklabels()] == [str(number) for number in range(9)]
    assert axis.yaxis_inverted()  # the first layer is on top
    lengths = [bar.get_width() for bar in axis.containers[0]]
    assert lengths == pytest.approx(list(measure_distances(model, other).values()))
    assert axis.get_xlabel() == "mean distance moved by a unit"


def test_wrong_input_is_one_sentence() -> None:
    model = network()
    with pytest.raises(DataError, match="adapted model"):
        draw_moved(model, {})
    with pytest.raises(DataError, match="is missing"):
        draw_moved(model, {"fr": {}})
    with pytest.raises(DataError, match="weight"):
        draw_moved(model, {"fr": nn.Sequential(nn.Conv2d(1, 2, 3))})
    with pytest.raises(DataError, match="nowhere"):
        draw_moved(model, {"fr": model}, groups={"a": ["nowhere"]})
    with pytest.raises(DataError, match="weight matrices"):
        draw_moved(nn.LayerNorm(3), {"fr": nn.LayerNorm(3)})
