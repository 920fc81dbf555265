"""What predictions tell of accuracy, against independent references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

from shiftmend.verification import predictions


def draw_logits(samples: int = 60, classes: int = 4, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(samples, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(logits: Tensor) -> Any:
    values = logits.double().numpy()
    exponents = np.exp(values - values.max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True)


def test_confidence_and_certainty_are_those_of_numpy() -> None:
    logits = draw_logits()
    probabilities = softmax(logits)
    np.testing.assert_allclose(predictions.confidence(logits), probabilities.max(1), rtol=1e-12)
    entropy = -(probabilities * np.log(probabilities)).sum(1)
    np.testing.assert_allclose(predictions.negative_entropy(logits), -entropy, rtol=1e-12)


def test_a_certain_prediction_has_no_entropy() -> None:
    found = predictions.negative_entropy(torch.tensor([[0.0, -1e4], [1000.0, 0.0]]))
    assert found.tolist() == [0, 0]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40, unique=True), st.integers(0, 40))
def test_the_share_above_the_threshold_is_the_accuracy(values: list[float], right: int) -> None:
    right = min(right, len(values))
    home = torch.tensor(values, dtype=torch.float64)
    threshold = predictions.find_threshold(home, right / len(values))
    # At an accuracy of zero the largest value itself stays above.
    assert abs(predictions.share_above(home, threshold) * len(values) - right) < 1 + 1e-9 * len(values)
    ordered = sorted(values)
    apart = 0 < right < len(values) and ordered[len(values) - right] - ordered[len(values) - right - 1] > 1e-9
    if apart:
        assert predictions.share_above(home, threshold) == right / len(values)


@pytest.mark.parametrize(("samples", "classes"), [(50, 4), (3, 7)])
def test_the_nuclear_norm_is_the_sum_of_the_singular_values(samples: int, classes: int) -> None:
    logits = draw_logits(samples, classes)
    expected = np.linalg.svd(softmax(logits), compute_uv=False).sum() / np.sqrt(samples * min(samples, classes))
    assert predictions.nuclear_norm(logits) == pytest.approx(expected, rel=1e-6)


def test_the_nuclear_norm_is_one_where_predictions_are_certain_and_even() -> None:
    certain = 200 * torch.eye(3).repeat(5, 1)
    assert predictions.nuclear_norm(certain) == pytest.approx(1)
    assert predictions.nuclear_norm(certain[::3]) < 0.7


def transport(probabilities: Any, shares: Any) -> float:
    """Assign samples to classes so that the mean probability is the largest: a linear program."""
    samples, classes = probabilities.shape
    rows = np.kron(np.eye(samples), np.ones(classes))
    columns = np.kron(np.ones(samples), np.eye(classes))
    found = optimize.linprog(
        -probabilities.ravel(),
        A_eq=np.vstack([rows, columns]),
        b_eq=np.concatenate([np.full(samples, 1 / samples), shares]),
        bounds=(0, None),
    )
    assert found.success
    return float(-found.fun)


@pytest.mark.parametrize("shares", [(0.25, 0.25, 0.25, 0.25), (0.1, 0.2, 0.3, 0.4), (0.7, 0.1, 0.1, 0.1)])
def test_the_transport_is_nearly_that_of_a_linear_program(
    shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = draw_logits(40, 4, scale=3)
    logits[:, 1] += 2
    expected = transport(softmax(logits), np.array(shares))
    assert predictions.transported_confidence(logits, torch.tensor(shares)) == pytest.approx(expected, abs=0.03)
    monkeypatch.setattr(predictions, "TRANSPORT_ROUNDS", 300)
    assert predictions.transported_confidence(logits, torch.tensor(shares)) == pytest.approx(expected, abs=0.003)


def test_the_transport_knows_which_class_is_which() -> None:
    logits = 20.0 * torch.eye(3)[torch.tensor([0] * 7 + [1] * 2 + [2])]
    assert predictions.transported_confidence(logits, torch.tensor([0.7, 0.2, 0.1])) == pytest.approx(1, abs=1e-3)
    assert predictions.transported_confidence(logits, torch.tensor([0.1, 0.2, 0.7])) == pytest.approx(0.4, abs=1e-2)


def test_many_samples_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, shares = draw_logits(400, 4), torch.full((4,), 0.25)
    everything = predictions.transported_confidence(logits, shares)
    monkeypatch.setattr(predictions, "MAX_TRANSPORTED_VALUES", 400)
    assert predictions.transported_confidence(logits, shares) == predictions.transported_confidence(logits[::4], shares)
    assert predictions.transported_confidence(logits, shares) == pytest.approx(everything, abs=0.06)


def test_shares_and_skew_follow_the_order_of_the_classes() -> None:
    shares = predictions.class_shares(torch.tensor([2, 0, 2, 2]), 4)
    assert shares.tolist() == [0.25, 0, 0.75, 0]
    assert predictions.skew(shares, torch.tensor([0.25, 0, 0.75, 0])) == 0
    assert predictions.skew(shares, torch.tensor([0.75, 0, 0.25, 0])) == pytest.approx(0.5)
    assert predictions.skew(shares, torch.tensor([0, 0.5, 0, 0.5])) == pytest.approx(1)


@pytest.mark.parametrize(("samples", "home_samples"), [(300, None), (300, 1000), (2000, 500)])
@pytest.mark.parametrize("shares", [(0.1,) * 10, (0.5, 0.2, 0.2, 0.1)])
def test_skew_by_chance_is_that_of_drawn_samples(
    shares: tuple[float, ...], samples: int, home_samples: int | None
) -> None:
    rng, home = np.random.default_rng(0), torch.tensor(shares, dtype=torch.float64)
    drawn = rng.multinomial(samples, shares, 4000) / samples
    other = np.array(shares) if home_samples is None else rng.multinomial(home_samples, shares, 4000) / home_samples
    apart = np.abs(drawn - other).sum(1) / 2
    mean, deviation = predictions.skew_by_chance(home, samples, home_samples)
    assert mean == pytest.approx(apart.mean(), rel=0.03)
    # Shares add up to 1, so they do not vary independently.
    assert deviation == pytest.approx(apart.std(), rel=0.35)
    found = [predictions.skew(torch.from_numpy(one), home, samples, home_samples) for one in drawn[:400]]
    expected = np.abs(drawn[:400] - np.array(shares)).sum(1) / 2 - mean
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_without_samples_nothing_is_chance() -> None:
    assert predictions.skew_by_chance(torch.tensor([0.3, 0.7]), None) == (0.0, 0.0)


@pytest.mark.parametrize("scale", [0.5, 1.0, 6.0])
def test_the_temperature_is_that_of_scipy(scale: float) -> None:
    logits = draw_logits(300, 5, scale=scale)
    generator = torch.Generator().manual_seed(1)
    labels = torch.multinomial((draw_logits(300, 5, scale=1.0)).softmax(1), 1, generator=generator).flatten()

    def loss(log_temperature: float) -> float:
        probabilities = softmax(logits / np.exp(log_temperature))
        return float(-np.log(probabilities[np.arange(300), labels.numpy()]).mean())

    expected = optimize.minimize_scalar(loss, bounds=(np.log(0.05), np.log(20)), method="bounded")
    assert predictions.fit_temperature(logits, labels) == pytest.approx(np.exp(expected.x), rel=1e-3)


def test_labels_that_are_always_right_give_the_lowest_temperature() -> None:
    logits = draw_logits(50, 3)
    assert predictions.fit_temperature(logits, logits.argmax(1)) == pytest.approx(0.05, rel=1e-2)
