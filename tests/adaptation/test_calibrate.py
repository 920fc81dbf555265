from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shiftmend.adaptation.calibrate import find_temperature, fold_temperature
from shiftmend.errors import AdaptationError
from shiftmend.introspection.taps import Tap


def draw(shape: tuple[int, ...], seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def confidence(logits: Tensor, temperature: float) -> float:
    """Mean confidence by numpy; classes on axis 1."""
    values = logits.double().numpy() / temperature
    shares = np.exp(values - values.max(1, keepdims=True))
    return float((shares / shares.sum(1, keepdims=True)).max(1).mean())


@settings(max_examples=50)
@given(seed=st.integers(0, 1000), classes=st.integers(2, 12), wanted=st.floats(0, 1.2), scale=st.floats(0.1, 30))
def test_the_mean_confidence_is_what_was_wanted(seed: int, classes: int, wanted: float, scale: float) -> None:
    logits = draw((40, classes), seed, scale)
    temperature = find_temperature(logits, wanted)
    assert 0.05 <= temperature <= 50
    found = confidence(logits, temperature)
    if 0.05 < temperature < 50:
        assert found == pytest.approx(wanted, abs=1e-9)
    elif temperature == 50:
        assert found >= min(wanted, 1) - 1e-9
    else:
        assert found <= max(wanted, 1 / classes) + 1e-9
    assert torch.equal((logits / temperature).argmax(1), logits.argmax(1))


@given(seed=st.integers(0, 100), one=st.floats(0.2, 1), other=st.floats(0.2, 1))
def test_a_higher_confidence_needs_a_lower_temperature(seed: int, one: float, other: float) -> None:
    logits = draw((30, 5), seed)
    low, high = sorted((one, other))
    assert find_temperature(logits, low) >= find_temperature(logits, high)


def test_confidence_as_it_is_needs_no_temperature() -> None:
    logits = draw((50, 4), 0)
    assert find_temperature(logits, confidence(logits, 1.0)) == pytest.approx(1.0, rel=1e-9)


def test_binary_outputs_and_positions() -> None:
    logits = draw((60,), 1)
    both = torch.stack([torch.zeros_like(logits), logits], 1)
    expected = find_temperature(both, 0.8)
    assert find_temperature(logits, 0.8) == pytest.approx(expected)
    assert find_temperature(logits[:, None], 0.8) == pytest.approx(expected)
    mean = torch.maximum((logits / expected).sigmoid(), (-logits / expected).sigmoid()).mean()
    assert mean.item() == pytest.approx(0.8, abs=1e-6)
    maps = draw((5, 3, 4, 4), 2)
    flat = maps.movedim(1, -1).reshape(-1, 3)
    assert find_temperature(maps, 0.6) == pytest.approx(find_temperature(flat, 0.6))


def test_large_logits_do_not_overflow() -> None:
    assert math.isfinite(find_temperature(torch.tensor([[1e30, -1e30], [5e4, 0.0]]), 0.9))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


class Cosine(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, nn.functional.normalize(self.weight), self.bias)


def mlp(*top: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), *(top or (nn.Linear(8, 3),))).eval()


@pytest.mark.parametrize("temperature", [0.05, 0.7, 3.0, 50.0])
@pytest.mark.parametrize("bias", [True, False])
def test_logits_are_divided_and_answers_stay(temperature: float, bias: bool) -> None:
    model = mlp(nn.Linear(8, 3, bias=bias))
    inputs = torch.randn(20, 4)
    before = model(inputs)
    assert fold_temperature(model, Tap("logits", "2"), temperature, inputs[:2]) is None
    torch.testing.assert_close(model(inputs), before / temperature)
    assert torch.equal(model(inputs).argmax(1), before.argmax(1))
    assert not model.training
    assert model[2].weight.requires_grad


def test_heads_of_other_kinds_are_divided() -> None:
    maps = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1)).train()
    inputs = torch.randn(2, 3, 6, 6)
    before = maps(inputs)
    assert fold_temperature(maps, "2", 4.0, inputs) is None
    torch.testing.assert_close(maps(inputs), before / 4)
    assert maps.training
    half = mlp().to(torch.bfloat16)
    assert fold_temperature(half, "2", 3.0, torch.randn(2, 4, dtype=torch.bfloat16)) is None
    without_bias = mlp()
    assert fold_temperature(without_bias, "2", 2.0) is None, "nothing to run it on"


REFUSED = [
    (Tied(), "head", "shared with 'embedding.weight'"),
    (mlp(nn.Linear(8, 3), nn.Softmax(1)), "2", "computed behind"),
    (mlp(Cosine(8, 3)), "2", "computed behind"),
    (mlp(parametrizations.weight_norm(nn.Linear(8, 3))), "2", "computed from other"),
    (mlp(nn.Sequential(nn.Linear(8, 3))), "2", "other parameters"),
    (mlp(nn.Bilinear(8, 8, 3)), "2:input", "reads"),
    (mlp(nn.PReLU(8)), "1", "other parameters"),
]


@pytest.mark.parametrize(("model", "head", "reason"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_other_heads_are_left_as_they_are(model: nn.Module, head: str, reason: str) -> None:
    before = copy.deepcopy(model.state_dict())
    inputs = torch.randint(7, (2, 5)) if isinstance(model, Tied) else torch.randn(2, 4)
    found = fold_temperature(model, head, 2.0, inputs)
    assert found is not None
    assert reason in found
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_is_a_positive_number(temperature: float) -> None:
    with pytest.raises(AdaptationError, match="positive"):
        fold_temperature(mlp(), "2", temperature)
