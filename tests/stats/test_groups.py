"""Groups of samples: their numbers, the design effect, and neighbours that resemble each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm, t

from shiftmend.errors import DataError
from shiftmend.stats.groups import as_groups, design_effect, resemble_neighbours


@pytest.mark.parametrize(
    "groups",
    [
        ["b", "a", "b", "c"],
        ("b", "a", "b", "c"),
        np.array(["b", "a", "b", "c"]),
        np.array(["b", "a", "b", "c"], dtype=object),
        torch.tensor([7, -1, 7, 9]),
        [7.5, 1.0, 7.5, 9.0],
    ],
)
def test_groups_of_every_kind_are_numbered(groups: Any) -> None:
    numbers = as_groups(groups, 4).tolist()
    assert numbers[0] == numbers[2]
    assert sorted(set(numbers)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("groups", "keyword"),
    [
        ("abcd", "group of each"),
        (3, "group of each"),
        (["a", "b", "c"], "4 samples"),
        ([["a"], ["b"], ["c"], ["d"]], "shape"),
        (["a", "a", "b", "b"], "at least 3 groups"),
        ([1.0, float("nan"), 2.0, 3.0], "missing"),
    ],
)
def test_what_is_no_group_of_each_sample_is_refused(groups: Any, keyword: str) -> None:
    with pytest.raises(DataError, match=keyword):
        as_groups(groups, 4)


@pytest.mark.parametrize(("number", "size"), [(3, 40), (8, 25), (30, 10), (200, 5)])
def test_the_design_effect_is_that_of_whole_groups(number: int, size: int) -> None:
    # All samples of a group are equal, so that the mean is that of as many samples as there are groups.
    values = torch.from_numpy(np.random.default_rng(0).normal(size=number)).repeat_interleave(size)
    small = number / (number - 1) * size  # the cluster-robust variance has number - 1 degrees of freedom
    few = (t.ppf(0.95, number - 1) / norm.ppf(0.95)) ** 2
    found = design_effect(values, torch.arange(number).repeat_interleave(size))
    assert found == pytest.approx(small * few, rel=3e-3)


def test_the_design_effect_foretells_the_variance_of_a_mean() -> None:
    rng = np.random.default_rng(0)
    number, size, correlation = 60, 20, 0.3
    groups = torch.arange(number).repeat_interleave(size)

    def draw() -> np.ndarray:
        shared = rng.normal(size=(number, 1)) * np.sqrt(correlation)
        return (shared + rng.normal(size=(number, size)) * np.sqrt(1 - correlation)).ravel()

    means = np.var([draw().mean() for _ in range(2000)]) * number * size
    found = np.mean([design_effect(torch.from_numpy(draw()), groups) for _ in range(50)])
    assert means == pytest.approx(1 + (size - 1) * correlation, rel=0.1)
    assert found == pytest.approx(means, rel=0.15)


@given(st.integers(3, 20), st.integers(1, 10), st.integers(0, 1000))
def test_the_design_effect_is_at_least_one_and_blind_to_order(number: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.normal(size=(number * size, 3)))
    groups = torch.arange(number).repeat_interleave(size)
    order = torch.from_numpy(rng.permutation(number * size))
    assert design_effect(values, groups) >= 1
    assert design_effect(values[order], groups[order]) == pytest.approx(design_effect(values, groups))
    assert design_effect(torch.ones(number * size), groups) == 1.0


def test_only_correlated_neighbours_are_noticed() -> None:
    rng = np.random.default_rng(0)
    labels = torch.arange(10).repeat_interleave(100)
    by_class = labels / 4 + torch.from_numpy(rng.normal(size=1000))
    assert not resemble_neighbours(by_class, labels)
    assert resemble_neighbours(by_class, torch.zeros(1000))
    patients = torch.from_numpy(rng.normal(size=20)).repeat_interleave(50)
    noise = torch.from_numpy(rng.normal(size=1000))
    assert resemble_neighbours(patients + noise, labels[torch.from_numpy(rng.permutation(1000))])
    alarms = sum(resemble_neighbours(torch.from_numpy(rng.random(500)), torch.zeros(500)) for _ in range(200))
    assert alarms == 0
