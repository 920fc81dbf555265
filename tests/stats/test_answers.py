from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.stats.answers import Answers, AnswerTracker


def collect(*batches: Tensor) -> Answers | None:
    tracker = AnswerTracker()
    for batch in batches:
        tracker.update(batch)
    return tracker.answers()


def compute(logits: Tensor) -> tuple[np.ndarray, float]:
    """Shares of the classes, and mean confidence, by numpy."""
    rows = logits.double().numpy()
    exponentials = np.exp(rows - rows.max(1, keepdims=True))
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    return np.bincount(rows.argmax(1), minlength=rows.shape[1]) / len(rows), float(probabilities.max(1).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_answers_are_those_of_numpy(dtype: torch.dtype) -> None:
    logits = (torch.randn(103, 5, generator=torch.Generator().manual_seed(0)) * 3 + 40).to(dtype)
    found = collect(*logits.split(10))
    assert found is not None
    shares, confidence = compute(logits)
    assert found.samples == 103
    np.testing.assert_allclose(found.shares, shares, rtol=1e-6)
    assert float(found.confidence) == pytest.approx(confidence, rel=1e-6)
    assert found.problems() == []


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), share=st.floats(0.1, 5))
def test_parts_mix_exactly(seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(size, 4, generator=generator) for size in (30, 70))
    parts = [collect(one), collect(other)]
    mixed = Answers.mix(parts, [1, share])  # type: ignore[arg-type]
    (shares, confidence), (others, certain) = compute(one), compute(other)
    weight = 30 / (30 + 70 * share)
    np.testing.assert_allclose(mixed.shares, weight * shares + (1 - weight) * others, atol=1e-6)
    assert float(mixed.confidence) == pytest.approx(weight * confidence + (1 - weight) * certain, rel=1e-5)
    assert mixed.samples == round(30 + 70 * share)
    assert mixed.problems() == []


def test_the_divergence_is_the_total_variation_of_the_shares() -> None:
    home = Answers(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.9]), 100)
    assert float(home.divergence(torch.eye(3)[[0, 0, 1, 2]])) == 0
    assert float(home.divergence(torch.eye(3)[[2, 2]])) == 0.75


@pytest.mark.parametrize(
    "batches",
    [[], [torch.zeros(4, 1)], [torch.full((4, 3), torch.nan)], [torch.full((4, 3), torch.inf)]],
    ids=["nothing", "a single output", "nan", "inf"],
)
def test_some_outputs_have_no_answers(batches: list[Tensor]) -> None:
    assert collect(*batches) is None


@pytest.mark.parametrize(
    ("shares", "confidence", "words"),
    [
        ([0.5, torch.nan], 0.9, "not finite"),
        ([0.5, 0.5], torch.inf, "not finite"),
        ([1.5, -0.5], 0.9, "from 0 to 1"),
        ([0.5, 0.4], 0.9, "add up"),
        ([0.5, 0.5], 1.1, "from 0 to 1"),
    ],
)
def test_impossible_answers_are_named(shares: list[float], confidence: float, words: str) -> None:
    (problem,) = Answers(torch.tensor(shares), torch.tensor([confidence]), 10).problems()
    assert words in problem


def test_answers_of_a_forged_file_are_refused() -> None:
    good = {"shares": torch.tensor([0.5, 0.5]), "confidence": torch.tensor([0.9])}
    for bad in ({"shares": torch.ones(1)}, {"confidence": torch.ones(2)}, {"confidence": torch.ones(0)}):
        with pytest.raises(ProfileError, match="two classes or more"):
            Answers.from_file("answers", {"samples": 5}, good | bad, None)  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match="whole number"):
        Answers.from_file("answers", {"samples": 0}, good, None)  # type: ignore[arg-type]
