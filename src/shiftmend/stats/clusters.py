"""Clusters of samples, with which a selection of home's samples is told from another device."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_MEMBERS = 5
"""Smallest number of samples in a cluster. The centre of a smaller one would nearly be a single sample."""
ROUNDS = 25
"""Rounds of k-means. Clusters only have to be compact, not optimal."""


def find_centres(values: Tensor, count: int, seed: int = 0) -> Tensor:
    """Find the centres of clusters by k-means. There are fewer than `count` if some would be small.

    Args:
        values: Samples `[N, D]`.
        count: Number of clusters at most.
        seed: Seed of the initial centres, which are samples.

    Returns:
        Centres `[clusters, D]`.

    Example:
        >>> values = torch.cat([torch.zeros(10, 2), torch.ones(10, 2)])
        >>> find_centres(values, 2).sort(0).values.tolist()
        [[0.0, 0.0], [1.0, 1.0]]
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    distinct: Tensor = torch.unique(values, dim=0)
    centres = distinct[torch.randperm(len(distinct), generator=generator)[: max(1, count)].to(values.device)]
    for _ in range(ROUNDS):
        centres = _dissolve_small(values, centres)
        found = assign(values, centres)
        sums = torch.zeros_like(centres).index_add_(0, found, values)
        centres = sums / torch.bincount(found, minlength=len(centres)).unsqueeze(1)
    return _dissolve_small(values, centres)


def _dissolve_small(values: Tensor, centres: Tensor) -> Tensor:
    """Leave out the smallest cluster, whose samples then join others, until all clusters are large enough."""
    while len(centres) > 1:
        members = torch.bincount(assign(values, centres), minlength=len(centres))
        least, smallest = members.min(0)
        if int(least) >= MIN_MEMBERS:
            break
        centres = centres[torch.arange(len(centres), device=centres.device) != smallest]
    return centres


def assign(values: Tensor, centres: Tensor) -> Tensor:
    """Return the index of the nearest centre `[clusters, D]` for each sample `[N, D]`.

    Example:
        >>> assign(torch.tensor([[0.1], [0.8]]), torch.tensor([[0.0], [1.0]])).tolist()
        [0, 1]
    """
    _, nearest = torch.cdist(values, centres).min(1)
    return nearest
