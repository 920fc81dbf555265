"""Samples in groups: frames of one patient, windows of one recording, photographs of one object.

Samples of one group resemble each other, so a thousand samples of ten patients say less about the next patients than a
thousand independent samples. The *design effect* is the factor by which the variance of a mean is larger than it would
be for independent samples (Kish 1965).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.utils.checks import brief, kind

MIN_GROUPS = 3
"""Smallest number of groups whose variance means anything."""
NORMAL_QUANTILE = 1.6449
"""Quantile of the normal distribution for a two-sided interval of 90 %."""
T_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""The same quantile of Student's t distribution for one to ten degrees of freedom."""
NEIGHBOURS = 5
"""Following samples that each sample is compared with."""
SUSPICIOUS_DEVIATIONS = 5.0
"""Standard deviations by which neighbouring samples have to resemble each other before a user is asked for groups."""


def as_groups(groups: Any, samples: int) -> Tensor:
    """Number the groups of samples from 0.

    Args:
        groups: Name or number of each sample's group, `[N]`: a tensor, an array, or a sequence of numbers or text.
        samples: Number of samples.

    Returns:
        The number of each sample's group, int64 `[N]`.

    Raises:
        DataError: If there is not one entry for each sample, or there are fewer than three groups.

    Example:
        >>> as_groups(["anna", "ben", "anna", "cleo"], 4)
        tensor([0, 1, 0, 2])
    """
    if isinstance(groups, str) or not (isinstance(groups, Tensor | Sequence) or hasattr(groups, "__array__")):
        raise DataError(f"Expected the group of each sample, e.g. a list of patients, got {kind(groups)}.")
    values = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else np.asarray(groups)
    if values.shape != (samples,):
        raise DataError(f"Expected one group for each of {samples} samples, got shape {list(values.shape)}.")
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise DataError("Expected a group for each sample, got missing values. Name their groups, or leave them out.")
    names, numbers = np.unique(values.astype(str) if values.dtype.kind == "O" else values, return_inverse=True)
    if len(names) < MIN_GROUPS:
        raise DataError(
            f"Expected at least {MIN_GROUPS} groups, got {len(names)} ({brief(names.tolist())}). Add others, or leave "
            "groups out if samples are independent."
        )
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64))


def design_effect(values: Tensor, groups: Tensor) -> float:
    """Estimate by which factor groups raise the variance of a mean.

    The variance between groups is estimated from the sums of each group (the cluster-robust variance). With few groups
    that variance is itself uncertain, so the factor grows by the ratio of Student's t to the normal distribution.

    Args:
        values: Values `[N]` or `[N, D]` whose mean matters.
        groups: Number of each sample's group, `[N]`.

    Returns:
        The factor, at least 1. It is 1 if all values are equal.

    Example:
        >>> patients = torch.arange(20).repeat_interleave(5)
        >>> round(design_effect((patients % 2).float(), patients), 2)  # all samples of a patient are equal
        5.82
        >>> design_effect(torch.arange(100) % 2, patients)
        1.0
    """
    values = values.double().cpu().reshape(len(values), -1)
    apart = values - values.mean(0)
    total = float(apart.square().sum())
    number = int(groups.max()) + 1
    if total <= 0 or number < 2:
        return 1.0
    sums = torch.zeros(number, apart.shape[1], dtype=torch.float64).index_add_(0, groups.cpu(), apart)
    between = float(sums.square().sum()) * number / (number - 1) / total
    degrees = number - 1
    # Beyond ten degrees of freedom, this expansion in 1 / degrees is exact to three digits.
    quantile = (
        T_QUANTILES[degrees - 1]
        if degrees <= len(T_QUANTILES)
        else NORMAL_QUANTILE + (NORMAL_QUANTILE**3 + NORMAL_QUANTILE) / (4 * degrees) + 1.42 / degrees**2
    )
    return max(1.0, between * (quantile / NORMAL_QUANTILE) ** 2)


def resemble_neighbours(values: Tensor, labels: Tensor) -> bool:
    """Return whether neighbouring samples resemble each other far more than by chance.

    Classes are compared within themselves, so that data sorted by class pass.

    Args:
        values: Values of each sample, in the order of the data, `[N]` or `[N, D]`.
        labels: Class of each sample, `[N]`; all zeros for quantities.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> patients = torch.randn(20).repeat_interleave(50)
        >>> resemble_neighbours(patients + torch.randn(1000), torch.zeros(1000).long())
        True
        >>> resemble_neighbours(torch.randn(1000), torch.arange(1000) // 500)
        False
    """
    values, labels = values.double().cpu().reshape(len(values), -1), labels.long().cpu().flatten()
    number = int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=number).clamp_min(1).unsqueeze(1)
    means = torch.zeros(number, values.shape[1], dtype=torch.float64).index_add_(0, labels, values) / counts
    apart = values - means[labels]
    total = float(apart.square().sum())
    if total <= 0 or len(values) <= NEIGHBOURS:
        return False
    # Of independent samples, the correlation at each distance has mean 0 and a variance of 1 / N at most.
    correlations = [float((apart[far:] * apart[:-far]).sum()) / total for far in range(1, NEIGHBOURS + 1)]
    return sum(correlations) * math.sqrt(len(values) / NEIGHBOURS) > SUSPICIOUS_DEVIATIONS
