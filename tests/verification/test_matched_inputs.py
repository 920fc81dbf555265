"""Inputs of a stream are matched to home over a window, as `match-moments` does over all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rehearsed_world import trained

from shiftmend.profiles.profile import Profile
from shiftmend.stats.moments import MomentTracker
from shiftmend.utils.tensor_tree import TensorTree
from shiftmend.verification.matched_inputs import InputMatcher


def profile_of(inputs: torch.Tensor) -> Profile:
    tracker = MomentTracker()
    tracker.update(inputs)
    moments = tracker.moments()
    assert moments is not None
    return replace(trained()[1], statistics={"inputs": moments})


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(20, 3, 6, 5), (20, 4), (20, 2, 9), (20, 40, 3)])
def test_the_window_gets_mean_and_deviation_of_home(shape: tuple[int, ...]) -> None:
    home, site = 2 * draw(shape, 0) + 1, [0.3 * draw(shape, seed) - seed for seed in range(1, 5)]
    matcher = InputMatcher(profile_of(home), window=2)
    for batch in site:
        moments = matcher.read(batch)
        assert moments is not None
        matched = matcher.match(batch, moments)
        matcher.add(moments)
    axes = (0,) if len(shape) == 2 else (0, *range(2, len(shape))) if shape[1] < 40 else tuple(range(len(shape)))
    latest, target = torch.cat(site[-2:]).double().numpy(), home.double().numpy()
    scale = np.std(target, axes, ddof=1, keepdims=True) / np.std(latest, axes, ddof=1, keepdims=True)
    expected = scale * (site[-1].double().numpy() - latest.mean(axes, keepdims=True))
    expected = expected + target.mean(axes, keepdims=True)
    np.testing.assert_allclose(matched.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_reading_a_batch_leaves_the_window_as_it_is() -> None:
    home, other = draw((50, 3, 4, 4), 0), 5 * draw((50, 3, 4, 4), 1)
    matcher = InputMatcher(profile_of(home), window=4)
    moments = matcher.read(home)
    assert moments is not None
    before = matcher.match(home, moments)
    matcher.read(other)
    torch.testing.assert_close(matcher.match(home, moments), before)
    torch.testing.assert_close(before, home, atol=1e-5, rtol=1e-5)


def test_inputs_that_are_not_numbers_as_at_home_are_not_matched() -> None:
    matcher = InputMatcher(profile_of(draw((50, 3, 4, 4), 0)), window=4)
    assert matcher.read(torch.zeros(5, 1, 4, 4)) is None
    assert matcher.read(torch.zeros(5, 3, 4, 4, dtype=torch.int64)) is None
    assert matcher.read(torch.full((5, 3, 4, 4), torch.nan)) is None
    assert matcher.read(TensorTree((torch.zeros(5, 3), torch.zeros(5, 3)))) is None
    assert InputMatcher(replace(trained()[1], statistics={}), window=4).read(torch.zeros(5, 3, 4, 4)) is None
