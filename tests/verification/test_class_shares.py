"""Class shares without labels: against known truth, against independent references, and when they must be doubted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsed_world import draw, make_record, rehearsed, trained
from scipy import optimize
from torch import Tensor

import shiftmend
from shiftmend.errors import DataError
from shiftmend.profiles.rehearsal import Rehearsal
from shiftmend.verification.class_shares import (
    estimate_shares,
    expect_accuracy,
    expect_answers,
    fit_shares,
    invert_confusion,
    maximise_likelihood,
)

MEANS = np.array([[0.0, 0.0], [2.5, 0.0], [0.0, 2.5]])
HOME = np.array([0.5, 0.3, 0.2])


def draw_logits(shares: np.ndarray[Any, Any], samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw samples of three Gaussian classes; return the exact logits for the shares of home, and the labels."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(3, samples, p=shares)
    points = MEANS[labels] + rng.normal(size=(samples, 2))
    logits = -0.5 * ((points[:, None] - MEANS) ** 2).sum(2) + np.log(HOME)
    return torch.from_numpy(logits), torch.from_numpy(labels)


def make_home(samples: int = 4000) -> Rehearsal:
    logits, labels = draw_logits(HOME, samples, 1)
    confusion = torch.zeros(3, 3)
    confusion.index_put_((labels, logits.argmax(1)), torch.ones(samples), accumulate=True)
    answers = confusion.sum(0) / samples
    score = float(confusion.diagonal().sum() / samples)
    return make_record(
        samples=samples, temperature=1.0, shares=answers, confusion=confusion, score=score, cross_fitted=False
    )


def test_likelihood_finds_its_maximum() -> None:
    logits, _ = draw_logits(np.array([0.1, 0.2, 0.7]), 300, 2)
    probabilities, home = logits.softmax(1), torch.from_numpy(HOME)
    found = maximise_likelihood(probabilities, home, rounds=5000).numpy()

    def loss(scores: Any) -> float:
        shares = np.exp(scores) / np.exp(scores).sum()
        return -float(np.log((probabilities.numpy() / HOME) @ shares).sum())

    best = optimize.minimize(loss, np.zeros(3), tol=1e-10).x
    np.testing.assert_allclose(found, np.exp(best) / np.exp(best).sum(), atol=1e-4)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_confusion_is_inverted_exactly_where_that_is_possible(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(4))
    confusion = 1000 * (0.7 * np.eye(4) + 0.3 * rng.dirichlet(np.ones(4), 4))
    answers = shares @ (confusion / confusion.sum(1, keepdims=True))
    found = invert_confusion(torch.from_numpy(answers), torch.from_numpy(confusion), rounds=20_000)
    np.testing.assert_allclose(found, shares, atol=0.01)


@pytest.mark.parametrize("shares", [(0.1, 0.2, 0.7), (0.5, 0.3, 0.2), (0.0, 0.5, 0.5), (1.0, 0.0, 0.0)])
def test_shares_are_found_whatever_they_are(shares: tuple[float, ...]) -> None:
    logits, labels = draw_logits(np.array(shares), 4000, 3)
    found = fit_shares(logits, make_home())
    truth = labels.bincount(minlength=3).double() / len(labels)
    assert float((found - truth).abs().sum()) / 2 < 0.03
    assert float(found.sum()) == pytest.approx(1)
    assert float(found.min()) >= 0


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    home, truth, held = make_home(), np.array([0.2, 0.5, 0.3]), 0
    for seed in range(40):
        found = estimate_shares(draw_logits(truth, 400, 100 + seed)[0], home)
        assert found.reliable
        assert found.samples == 400
        held += sum(low <= share <= high for low, share, high in zip(found.low, truth, found.high, strict=True))
    assert 0.82 <= held / 120 <= 0.98


def test_mistakes_that_home_did_not_have_widen_intervals() -> None:
    logits = draw_logits(np.array([0.2, 0.5, 0.3]), 400, 9)[0]
    plain, poor, unknown = (estimate_shares(logits, make_home(), lost=lost) for lost in (0.0, 0.05, None))
    assert poor.values == unknown.values == plain.values
    assert poor.high[1] == pytest.approx(plain.high[1] + 0.05)
    assert poor.low[1] == pytest.approx(plain.low[1] - 0.05)
    assert plain.reliable
    assert any("accuracy" in reason for reason in unknown.reasons)


def test_groups_at_home_widen_intervals() -> None:
    logits = draw_logits(np.array([0.2, 0.5, 0.3]), 400, 9)[0]
    plain, grouped = (
        estimate_shares(logits, replace(make_home(), answer_design_effect=effect)) for effect in (1.0, 4.0)
    )
    assert grouped.values == plain.values
    assert grouped.high[1] - grouped.values[1] == pytest.approx(2 * (plain.high[1] - plain.values[1]))


def test_a_class_that_is_not_seen_may_still_be_there() -> None:
    found = estimate_shares(draw_logits(np.array([0.5, 0.5, 0.0]), 400, 9)[0], make_home())
    assert found.high[2] >= 2.3 / 400


def test_shares_that_contradict_the_answers_are_doubted() -> None:
    logits, _ = draw_logits(HOME, 1000, 4)
    # Another device: answers crowd into one class, hesitantly, and probabilities say something else than answers.
    away = 0.01 * logits + torch.tensor([0.05, 0.0, 0.0])
    found = estimate_shares(away, make_home())
    assert not found.reliable
    assert any("device" in reason for reason in found.reasons)


def test_classes_that_are_confused_beyond_repair_are_named() -> None:
    home = make_home()
    blind = torch.zeros(40, 3, dtype=torch.float64)
    blind[:, 0], blind[:20, 1] = 0.0, 0.1
    found = estimate_shares(blind, replace(home, confusion=torch.full((3, 3), 100.0)))
    assert not found.reliable


def test_without_labels_the_answers_are_counted() -> None:
    home = replace(make_home(), labelled=False, confusion=torch.diag(torch.tensor([50.0, 30.0, 20.0])))
    logits, _ = draw_logits(np.array([0.1, 0.2, 0.7]), 500, 5)
    found = estimate_shares(logits, home)
    assert found.source == "confusion"
    np.testing.assert_allclose(found.values, logits.argmax(1).bincount(minlength=3) / 500, atol=1e-3)


def test_expectations_follow_from_the_mistakes_at_home() -> None:
    home = replace(make_home(), confusion=torch.tensor([[90.0, 10.0, 0.0], [0.0, 50.0, 50.0], [0.0, 0.0, 10.0]]))
    shares = torch.tensor([0.5, 0.5, 0.0])
    np.testing.assert_allclose(expect_answers(shares, home), [0.45, 0.3, 0.25])
    assert expect_accuracy(shares, home) == pytest.approx(0.7)


def test_the_function_tells_shares_of_a_site() -> None:
    model, _ = trained()
    site = draw(800, 7, (0.6, 0.2, 0.2, 0.0))
    found = shiftmend.shares(model, site.inputs, rehearsed(), progress=False)
    truth = site.labels.bincount(minlength=4).double() / 800
    assert float((torch.tensor(found.values) - truth).abs().sum()) / 2 < 0.05
    assert found.distance == pytest.approx(float((truth - torch.tensor(found.home)).abs().sum()) / 2, abs=0.05)
    assert "at home" in str(found)
    assert found.to_json()["samples"] == 800


def test_a_profile_without_a_rehearsal_is_refused() -> None:
    model, profile = trained()
    with pytest.raises(DataError, match="rehearse"):
        shiftmend.shares(model, draw(50, 7).inputs, profile, progress=False)


def test_shares_behind_another_device_are_doubted() -> None:
    model, _ = trained()
    site = draw(800, 7)
    found = shiftmend.shares(model, 1.5 * site.inputs + torch.linspace(-6, 6, 8), rehearsed(), progress=False)
    assert found.distance > 0.1
    assert any("device" in reason for reason in found.reasons)
