"""Clusters: compact, large enough that no centre is a single sample, and the same from the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from shiftmend.stats.clusters import MIN_MEMBERS, assign, find_centres


def test_separate_blobs_are_found_whatever_the_first_centres() -> None:
    corners = torch.tensor([[0.0, 0.0], [0.0, 50.0], [50.0, 0.0]])
    values = corners.repeat_interleave(40, 0) + torch.randn(120, 2, generator=torch.Generator().manual_seed(1))
    for seed in range(5):
        centres = find_centres(values, 12, seed)
        numbers = assign(values, centres)
        for blob in range(3):
            others = set(numbers[torch.arange(120) // 40 != blob].tolist())
            assert not others & set(numbers[torch.arange(120) // 40 == blob].tolist())


@given(st.integers(5, 80), st.integers(1, 20), st.integers(0, 5))
def test_each_cluster_has_enough_members(samples: int, count: int, seed: int) -> None:
    values = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed))
    centres = find_centres(values, count, seed)
    assert 1 <= len(centres) <= count
    nearest = cdist(values.numpy(), centres.numpy()).argmin(1)
    assert assign(values, centres).tolist() == nearest.tolist()
    assert len(centres) == 1 or np.bincount(nearest, minlength=len(centres)).min() >= MIN_MEMBERS


def test_an_outlier_is_no_cluster() -> None:
    values = torch.cat([torch.randn(60, 2), torch.tensor([[1e4, 1e4]])])
    assert float(find_centres(values, 61, 0).abs().max()) < 1e4


def test_the_same_seed_gives_the_same_centres() -> None:
    values = torch.randn(50, 4)
    assert torch.equal(find_centres(values, 6, 3), find_centres(values, 6, 3))


@pytest.mark.parametrize("same", [0.0, 2.5])
def test_equal_samples_make_one_cluster(same: float) -> None:
    assert find_centres(torch.full((30, 2), same), 4).tolist() == [[same, same]]
