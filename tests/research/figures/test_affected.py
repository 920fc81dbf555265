from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.errors import DataError, ProfileError, TapError
from shiftmend.introspection.taps import Tap
from shiftmend.research.figures import affected
from shiftmend.research.figures.measuring import layer_taps, running_order


class Small(nn.Module):
    """Defined in another order than it runs."""

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
    with pytest.raises(TapError, match="nothing further to tap"):
        layer_taps(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), torch.zeros(2, 4))


def test_running_order_is_that_of_a_forward_pass(setting: tuple[nn.Module, Tensor, shiftmend.Profile]) -> None:
    model, images, profile = setting
    assert running_order(model, images[:2], profile.specs) == ["conv", "last", "features", "logits"]
    sides = {"after": Tap("after", "conv"), "before": Tap("before", "conv", "input")}
    assert running_order(model, images[:2], sides) == ["before", "after"]


def test_cells_are_the_divergences_of_the_units(setting: tuple[nn.Module, Tensor, shiftmend.Profile]) -> None:
    model, images, profile = setting
    target = 2 * images + 0.5
    figure = affected.draw(model, target, profile, {"after nothing": model}, units=4, batch_size=16, device="cpu")
    before, after = figure.axes[:2]
    table = np.ma.filled(before.images[0].get_array(), np.nan)
    assert np.array_equal(table, np.ma.filled(after.images[0].get_array(), np.nan), equal_nan=True)
    assert before.images[0].get_clim() == (0, 2)
    assert [tick.get_text() for tick in before.get_yticklabels()] == ["conv", "last", "features", "logits"]

    # one unit of the convolution by hand, in float64
    unit = int(affected.chosen_units(np.ones(8), 4, "first")[2])
    with torch.no_grad():
        home, away = (model.conv(x)[:, unit].flatten().double().numpy() for x in (images, target))
    assert table[0, 2] == pytest.approx(_psi(home, away), rel=2e-3, abs=2e-3)
    every = affected.divergences(model, target, profile, device="cpu")
    means = [text.get_text() for text in before.texts]
    assert means == [f"{np.nanmean(values):.2f}" for values in every.values()]


def test_the_source_itself_is_not_affected(setting: tuple[nn.Module, Tensor, shiftmend.Profile]) -> None:
    model, images, profile = setting
    for values in affected.divergences(model, images, profile, device="cpu").values():
        assert np.nanmax(values) < 1e-4


def test_worst_units_first_in_all_panels() -> None:
    before = {"a": np.array([0.1, np.nan, 0.9, 0.5]), "b": np.array([0.2, 0.3])}
    shown = {name: affected.chosen_units(values, 3, "worst") for name, values in before.items()}
    assert [list(units) for units in shown.values()] == [[2, 3, 0], [1, 0]]
    assert list(affected.chosen_units(before["a"], 2, "first")) == [0, 2]
    after = {"a": np.array([1.0, 2.0, 3.0, 4.0]), "b": np.array([5.0, 6.0])}
    expected = np.array([[3.0, 4.0, 1.0], [6.0, 5.0, np.nan]])
    assert np.array_equal(affected.strips(after, shown), expected, equal_nan=True)


def test_wrong_input_is_one_sentence(setting: tuple[nn.Module, Tensor, shiftmend.Profile]) -> None:
    model, images, profile = setting
    plain = shiftmend.profile(model, images, device="cpu", progress=False)
    with pytest.raises(ProfileError, match="a tap on every layer"):
        affected.draw(model, images, plain, {}, device="cpu")
    with pytest.raises(ProfileError, match="other layers"):
        affected.draw(model, images, profile, {"other": nn.Linear(2, 2)}, device="cpu")
    with pytest.raises(ProfileError, match="no tap 'conv7'"):
        affected.draw(model, images, profile, {}, layers=["conv7"], device="cpu")
    with pytest.raises(DataError, match="unknown order"):
        affected.draw(model, images, profile, {}, order="best", device="cpu")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="at least one unit"):
        affected.draw(model, images, profile, {}, units=0, device="cpu")


def _psi(home: np.ndarray, away: np.ndarray) -> float:
    """PSI over 8 + 2 soft bins at temperature 0.01, written out."""
    cuts = np.linspace(0, 1, 9)

    def counts(values: np.ndarray) -> np.ndarray:
        scaled = (values - home.min()) / (home.max() - home.min())
        logits = (scaled[:, None] * np.arange(1, 11) - np.concatenate([[0], np.cumsum(cuts)])) / 0.01
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return (weights / weights.sum(1, keepdims=True)).mean(0)

    p, q = counts(home), counts(away)
    return float(((p - q) * (np.log(p + 1e-8) - np.log(q + 1e-8))).sum() / np.log(10))
