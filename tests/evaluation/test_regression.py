"""Errors of predicted quantities, against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.evaluation.regression import RegressionMetrics, RegressionScores, match_shapes
from shiftmend.utils.devices import VALUES_PER_PART


def check(scores: RegressionScores, targets: NDArray[np.float64], predictions: NDArray[np.float64]) -> None:
    assert scores.samples == len(targets)
    assert scores.mean_absolute_error == pytest.approx(mean_absolute_error(targets, predictions), rel=1e-9)
    assert scores.root_mean_square_error == pytest.approx(mean_squared_error(targets, predictions) ** 0.5, rel=1e-9)
    assert scores.r2 == pytest.approx(r2_score(targets, predictions), rel=1e-6, abs=1e-6)


def scored(predictions: Tensor, targets: Tensor) -> RegressionScores:
    metrics = RegressionMetrics()
    metrics.update(predictions, targets)
    return metrics.compute()


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.integers(2, 80), st.integers(1, 3), st.floats(-1e6, 1e6), st.integers(0, 2**31), st.data())
def test_errors_equal_sklearn(samples: int, quantities: int, offset: float, seed: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    targets = random.normal(offset, 1, (samples, quantities)) * np.arange(1, quantities + 1)
    predictions = targets + random.normal(0, 0.5, targets.shape)
    cut = data.draw(st.integers(0, samples))
    left, right = RegressionMetrics(), RegressionMetrics()
    for start in range(0, cut, 17):  # the mean of the first two batches counts from the third on
        part = slice(start, min(cut, start + 17))
        left.update(torch.from_numpy(predictions[part]), torch.from_numpy(targets[part]))
    right.update(torch.from_numpy(predictions[cut:]), torch.from_numpy(targets[cut:]))
    left.merge(right)
    scores = left.compute()
    check(scores, targets, predictions)
    assert len(scores.quantities) == (quantities if quantities > 1 else 0)
    for number, one in enumerate(scores.quantities):
        check(one, targets[:, number], predictions[:, number])


def test_each_position_of_a_map_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    targets, predictions = random.normal(size=(2, 5, 2, 3, 4))
    tensors = torch.from_numpy(predictions), torch.from_numpy(targets)
    whole = scored(*tensors)
    rows = [values.transpose(0, 2, 3, 1).reshape(-1, 2) for values in (targets, predictions)]
    check(whole, rows[0], rows[1])
    monkeypatch.setitem(VALUES_PER_PART, "cpu", 7)
    check(scored(*tensors), rows[0], rows[1])


def test_one_number_a_sample_may_have_an_axis_of_its_own_or_not() -> None:
    for ours, theirs, shape in (
        ((4,), (4, 1), (4, 1)),
        ((4, 1, 1), (4,), (4, 1, 1)),
        ((4, 1, 2, 3), (4, 2, 3), (4, 1, 2, 3)),
        ((1, 3), (1, 3, 1), (1, 3, 1)),
        ((), (1,), (1,)),  # of a lone sample, from a model that squeezes
        ((3,), (1, 3), (1, 3)),
    ):
        assert [values.shape for values in match_shapes(torch.zeros(ours), torch.zeros(theirs))] == [shape, shape]
    for ours, theirs in (((4, 2), (2, 4)), ((4, 3), (4,)), ((1, 4), (4,)), ((), (4,))):
        assert [values.shape for values in match_shapes(torch.zeros(ours), torch.zeros(theirs))] == [ours, theirs]


def test_targets_that_are_equal_have_no_r2() -> None:
    for value in (0.1, 1e9 / 7):
        constant = RegressionMetrics()
        for _ in range(3):
            constant.update(torch.arange(7.0), torch.full((7,), value, dtype=torch.float64))
        assert constant.compute().r2 is None
    targets = 1e3 + 1e-7 * torch.arange(7.0, dtype=torch.float64)  # that differ little beside their mean, but do
    assert scored(targets.flip(0), targets).r2 == pytest.approx(-3, abs=0.01)
    some = torch.stack([torch.full((7,), 0.3), torch.arange(7.0)], 1)
    assert [one.r2 for one in scored(some, some).quantities] == [None, 1.0]
    assert scored(some, some).r2 == 1.0
    assert scored(some[:, :1].expand(7, 2), some[:, :1].expand(7, 2)).r2 is None


def test_what_cannot_be_scored_is_refused() -> None:
    for shapes, said in (
        (((4, 1), (4,)), r"float32 \[4, 1\]"),
        (((), ()), r"float32 \[\]"),
        (((4, 0), (4, 0)), r"float32 \[4, 0\]"),
    ):
        with pytest.raises(DataError, match=said):
            RegressionMetrics().update(torch.zeros(shapes[0]), torch.zeros(shapes[1]))
    with pytest.raises(DataError, match="complex64"):
        RegressionMetrics().update(torch.zeros(4, dtype=torch.complex64), torch.zeros(4))
    with pytest.raises(DataError, match="no samples"):
        RegressionMetrics().compute()
    metrics = RegressionMetrics()
    metrics.update(torch.rand(4, 2), torch.rand(4, 2))
    with pytest.raises(DataError, match=r"\[3\] after \[2\]"):
        metrics.update(torch.rand(4, 3), torch.rand(4, 3))
    broken = torch.tensor([[1.0, torch.nan], [torch.inf, torch.nan], [0.0, 0.5]])
    with pytest.raises(DataError, match=r"2 of 3.*targets"):
        scored(broken, torch.rand(3, 2))
    with pytest.raises(DataError, match=r"argmax.*one-hot.*several classes"):
        scored(torch.randn(6, 3), torch.eye(3).repeat(2, 1))
