from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import shiftmend
from shiftmend.errors import DataError, ProfileError
from shiftmend.research.figures import activations, style


def tiny(outputs: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, outputs))


def soft_counts(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Equation (4) written out: softmax over 8 + 2 bins at temperature 0.01, averaged over samples."""
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
    figure = activations.draw(model, target, profile, adapted, units=2, batch_size=64, device="cpu")

    axes = np.array(figure.axes).reshape(2, 2)
    unit = activations.first_units(profile.taps["features"], 2)[1]
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
    figure = activations.draw(model, inputs, profile, units=4, device="cpu")
    axes = figure.axes
    columns = len(activations.first_units(profile.taps["features"], 4))
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
    assert activations.first_units(profile.taps["features"], 2) == [1, 2]


def test_works_for_tokens_and_feature_maps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    tokens = torch.randn(20, 7, 3)
    profile = shiftmend.profile(model, tokens, device="cpu", progress=False)
    assert len(activations.draw(model, tokens, profile, units=2, device="cpu").axes) == 4


def test_wrong_input_is_one_sentence(inputs: Tensor) -> None:
    model = tiny()
    profile = shiftmend.profile(model, inputs, device="cpu", progress=False)
    with pytest.raises(ProfileError, match="other layers"):
        activations.draw(tiny(outputs=4), inputs, profile, device="cpu")
    with pytest.raises(ProfileError, match="no tap 'middle', only 'features', 'logits'"):
        activations.draw(model, inputs, profile, taps=("middle",), device="cpu")
    with pytest.raises(DataError, match="at least one unit"):
        activations.draw(model, inputs, profile, units=0, device="cpu")
    with pytest.raises(DataError, match="does not take inputs"):
        activations.draw(model, inputs[:, :2], profile, device="cpu")
    broken = tiny()
    with torch.no_grad():
        broken[0].bias.fill_(torch.nan)
    with pytest.raises(DataError, match="NaN at tap 'features'"):
        activations.draw(broken, inputs, profile, device="cpu")


def test_the_model_is_left_as_it_was(inputs: Tensor) -> None:
    model = tiny().train()
    profile = shiftmend.profile(model, inputs, device="cpu", progress=False)
    activations.draw(model, inputs, profile, units=1, device="cpu")
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _rgb(ink: str) -> list[float]:
    return [int(ink[at : at + 2], 16) / 255 for at in (1, 3, 5)]
