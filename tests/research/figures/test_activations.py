"""Figures of activations against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import shiftmend
from shiftmend.errors import DataError, ProfileError, TapError
from shiftmend.introspection.taps import Tap
from shiftmend.research.figures import style
from shiftmend.research.figures.activations import (
    choose_units,
    draw_activations,
    draw_affected,
    first_units,
    layer_taps,
    make_strips,
    measure_divergences,
    running_order,
)

# ---- activations


def tiny(outputs: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, outputs))


def soft_counts(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Compute equation (4): softmax over 8 + 2 bins at temperature 0.01, averaged over samples."""
    scaled = (values - low) / (high - low)
    cuts = np.linspace(0, 1, 9)
    logits = (scaled[:, None] * np.arange(1, 11) - np.concatenate([[0], np.cumsum(cuts)])) / 0.01
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return (weights / weights.sum(1, keepdims=True)).mean(0)


def psi(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    return float(((p - q) * (np.log(p + 1e-8) - np.log(q + 1e-8))).sum() / math.log(len(p)))


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(300, 4)


def test_curves_and_figures_are_those_of_a_reference(inputs: Tensor) -> None:
    model, target = tiny(), inputs + 2
    adapted = tiny()
    with torch.no_grad():
        adapted[0].bias -= 2 * adapted[0].weight.sum(1)
    profile = shiftmend.profile(model, inputs, bins=shiftmend.Bins(), device="cpu", progress=False)
    figure = draw_activations(model, target, profile, adapted, units=2, batch_size=64, device="cpu")

    axes = np.array(figure.axes).reshape(2, 2)
    unit = first_units(profile.taps["features"], 2)[1]
    axis = axes[0, 1]
    assert axis.get_title() == f"unit {unit}"
    with torch.no_grad():
        source, before, after = (
            m[:4](x)[:, unit].double().numpy() for m, x in ((model, inputs), (model, target), (adapted, target))
        )
    low, high = float(source.min()), float(source.max())
    expected = [soft_counts(values, low, high) for values in (source, source, before, after)]
    for stairs, counts in zip(axis.patches, expected, strict=False):
        assert np.allclose(stairs.get_data().values, counts, atol=2e-4)
        edges = stairs.get_data().edges
        assert np.allclose(edges[1:-1], np.linspace(low, high, 9), atol=1e-5)
        assert edges[0] == pytest.approx(low - (high - low) / 8, abs=1e-5)
    texts = [text.get_text() for text in axis.texts]
    assert texts == [f"{psi(expected[0], counts):.2f}" for counts in expected[2:]]
    assert float(texts[1]) < 0.01 < float(texts[0])


@pytest.mark.slow
def test_rows_are_taps_and_a_short_row_is_hidden(inputs: Tensor) -> None:
    model = tiny(outputs=1)
    profile = shiftmend.profile(model, inputs, device="cpu", progress=False)
    figure = draw_activations(model, inputs, profile, units=4, device="cpu")
    axes = figure.axes
    columns = len(first_units(profile.taps["features"], 4))
    assert len(axes) == 2 * columns
    assert [axis.get_visible() for axis in axes[columns:]] == [True] + [False] * (columns - 1)
    assert axes[0].get_ylabel().startswith("features")
    assert axes[columns].get_ylabel().startswith("logits")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["source", "target before adapting"]
    assert axes[columns].texts[0].get_text() == "0.00"  # the source itself
    assert axes[0].patches[2].get_edgecolor()[:3] == pytest.approx(_rgb(style.TARGET))


def test_units_that_were_constant_on_the_source_are_passed_over(inputs: Tensor) -> None:
    model = tiny()
    with torch.no_grad():
        model[2].weight[0] = 0
        model[2].bias[0] = -1
    profile = shiftmend.profile(model, inputs, device="cpu", progress=False)
    assert first_units(profile.taps["features"], 2) == [1, 2]


def test_works_for_tokens_and_feature_maps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    tokens = torch.randn(20, 7, 3)
    profile = shiftmend.profile(model, tokens, device="cpu", progress=False)
    assert len(draw_activations(model, tokens, profile, units=2, device="cpu").axes) == 4


def test_wrong_input_is_one_sentence(inputs: Tensor) -> None:
    model = tiny()
    profile = shiftmend.profile(model, inputs, device="cpu", progress=False)
    with pytest.raises(ProfileError, match="other layers"):
        draw_activations(tiny(outputs=4), inputs, profile, device="cpu")
    with pytest.raises(ProfileError, match="middle"):
        draw_activations(model, inputs, profile, taps=("middle",), device="cpu")
    with pytest.raises(DataError, match="that the model takes"):
        draw_activations(model, inputs[:, :2], profile, device="cpu")
    broken = tiny()
    with torch.no_grad():
        broken[0].bias.fill_(torch.nan)
    with pytest.raises(DataError, match="NaN"):
        draw_activations(broken, inputs, profile, device="cpu")


def test_the_model_is_left_as_it_was(inputs: Tensor) -> None:
    model = tiny().train()
    profile = shiftmend.profile(model, inputs, device="cpu", progress=False)
    draw_activations(model, inputs, profile, units=1, device="cpu")
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _rgb(ink: str) -> list[float]:
    return [int(ink[at : at + 2], 16) / 255 for at in (1, 3, 5)]


# ---- affected


class Small(nn.Module):
    """A network whose layers are defined in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.last = nn.Linear(8, 6)
        self.conv = nn.Conv2d(1, 8, 3, 2)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3)))))


@pytest.fixture
def setting() -> tuple[nn.Module, Tensor, shiftmend.Profile]:
    torch.manual_seed(1)
    model, images = Small().eval(), torch.rand(60, 1, 9, 9)
    taps = layer_taps(model, images[:2])
    return model, images, shiftmend.profile(model, images, taps=taps, device="cpu", progress=False)


def test_layer_taps_are_on_every_layer_below_the_head(setting: tuple[nn.Module, Tensor, shiftmend.Profile]) -> None:
    model, images, _ = setting
    assert {name: str(tap) for name, tap in layer_taps(model, images[:2]).items()} == {
        "conv": "conv",
        "last": "last@-1",
    }
    behind = layer_taps(model, images[:2], normalised=True)
    assert {name: str(tap) for name, tap in behind.items()} == {"conv": "norm", "last": "last@-1"}


def test_layer_taps_leave_out_what_runs_twice_and_the_features() -> None:
    class Twice(nn.Module):
        shiftmend_taps = {"features": "squeeze", "logits": "head"}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = nn.Linear(4, 5), nn.Linear(5, 5)
            self.squeeze, self.head = nn.Linear(5, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.squeeze(self.again(torch.relu(self.again(self.first(x)))))))

    assert list(layer_taps(Twice(), torch.zeros(2, 4))) == ["first"]
    with pytest.raises(TapError, match="linear layer"):
        layer_taps(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), torch.zeros(2, 4))


def test_running_order_is_that_of_a_forward_pass(setting: tuple[nn.Module, Tensor, shiftmend.Profile]) -> None:
    model, images, profile = setting
    assert running_order(model, images[:2], profile.specs) == ["conv", "last", "features", "logits"]
    sides = {"after": Tap("after", "conv"), "before": Tap("before", "conv", "input")}
    assert running_order(model, images[:2], sides) == ["before", "after"]


def test_cells_are_the_divergences_of_the_units(setting: tuple[nn.Module, Tensor, shiftmend.Profile]) -> None:
    model, images, profile = setting
    target = 2 * images + 0.5
    figure = draw_affected(model, target, profile, {"after nothing": model}, units=4, batch_size=16, device="cpu")
    before, after = figure.axes[:2]
    table = np.ma.filled(before.images[0].get_array(), np.nan)
    assert np.array_equal(table, np.ma.filled(after.images[0].get_array(), np.nan), equal_nan=True)
    assert before.images[0].get_clim() == (0, 2)
    assert [tick.get_text() for tick in before.get_yticklabels()] == ["conv", "last", "features", "logits"]

    # one unit of the convolution by hand, in float64
    unit = int(choose_units(np.ones(8), 4, "first")[2])
    with torch.no_grad():
        home, away = (model.conv(x)[:, unit].flatten().double().numpy() for x in (images, target))
    assert table[0, 2] == pytest.approx(psi_by_hand(home, away), rel=2e-3, abs=2e-3)
    every = measure_divergences(model, target, profile, device="cpu")
    means = [text.get_text() for text in before.texts]
    assert means == [f"{np.nanmean(values):.2f}" for values in every.values()]


def test_the_source_itself_is_not_affected(setting: tuple[nn.Module, Tensor, shiftmend.Profile]) -> None:
    model, images, profile = setting
    for values in measure_divergences(model, images, profile, device="cpu").values():
        assert np.nanmax(values) < 1e-4


def test_worst_units_first_in_all_panels() -> None:
    before = {"a": np.array([0.1, np.nan, 0.9, 0.5]), "b": np.array([0.2, 0.3])}
    shown = {name: choose_units(values, 3, "worst") for name, values in before.items()}
    assert [list(units) for units in shown.values()] == [[2, 3, 0], [1, 0]]
    assert list(choose_units(before["a"], 2, "first")) == [0, 2]
    after = {"a": np.array([1.0, 2.0, 3.0, 4.0]), "b": np.array([5.0, 6.0])}
    expected = np.array([[3.0, 4.0, 1.0], [6.0, 5.0, np.nan]])
    assert np.array_equal(make_strips(after, shown), expected, equal_nan=True)


def test_wrong_input_is_one_sentence_of_affected(setting: tuple[nn.Module, Tensor, shiftmend.Profile]) -> None:
    model, images, profile = setting
    plain = shiftmend.profile(model, images, device="cpu", progress=False)
    with pytest.raises(ProfileError, match="layer_taps"):
        draw_affected(model, images, plain, {}, device="cpu")
    with pytest.raises(ProfileError, match="other layers"):
        draw_affected(model, images, profile, {"other": nn.Linear(2, 2)}, device="cpu")
    with pytest.raises(ProfileError, match="conv7"):
        draw_affected(model, images, profile, {}, layers=["conv7"], device="cpu")
    with pytest.raises(DataError, match="order"):
        draw_affected(model, images, profile, {}, order="best", device="cpu")  # type: ignore[arg-type]


def psi_by_hand(home: np.ndarray, away: np.ndarray) -> float:
    """Compute the PSI over 8 + 2 soft bins at temperature 0.01."""
    cuts = np.linspace(0, 1, 9)

    def counts(values: np.ndarray) -> np.ndarray:
        scaled = (values - home.min()) / (home.max() - home.min())
        logits = (scaled[:, None] * np.arange(1, 11) - np.concatenate([[0], np.cumsum(cuts)])) / 0.01
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return (weights / weights.sum(1, keepdims=True)).mean(0)

    p, q = counts(home), counts(away)
    return float(((p - q) * (np.log(p + 1e-8) - np.log(q + 1e-8))).sum() / np.log(10))
