"""Restoration distance: how close adapted features come to those of the source model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.evaluation.accumulators import Sums, describe, refuse, to_device_of
from shiftmend.utils.devices import sum_dtype


class RestorationDistance(Sums):
    """Distance of adapted features from those of the source model on the clean images (paper, section 5.5).

    The mean, over images and units, of the absolute difference between the source model's features of a clean
    image and the adapted model's features of the shifted version of that same image. The paper's D is the
    mean of this over the shifts.
    """

    def update(self, source_features: Tensor, adapted_features: Tensor) -> None:
        """Add a batch of features `[N, D]` of the source images, and of the same images after shift and adaptation."""
        units = source_features.shape[1:].numel() if source_features.ndim > 1 else 0
        if source_features.shape != adapted_features.shape or units == 0:
            raise DataError(
                f"Expected features [N, D] of the same images, got {describe(source_features)} and "
                f"{describe(adapted_features)}."
            )
        sums = _distance_sums(source_features, to_device_of(source_features, adapted_features))
        self._add(sums, len(source_features), source_features.shape[1:])

    def compute(self) -> float:
        """Return the mean distance over all batches."""
        total, not_finite = self._read()
        refuse(not_finite, self._samples, "features that are not finite")
        units = math.prod(self._sample_shape or ())
        return total / (self._samples * units)


def restoration_distance(source_features: Tensor, adapted_features: Tensor) -> float:
    """Compute the `RestorationDistance` between two complete sets of features.

    Args:
        source_features: `[N, D]`, of the source model for clean images.
        adapted_features: `[N, D]`, of the adapted model for the shifted versions of the same images.

    Returns:
        The mean absolute difference over images and units.

    Raises:
        DataError: If the shapes differ, there are no samples, or a feature is not finite.

    Example:
        >>> restoration_distance(torch.zeros(2, 3), torch.ones(2, 3))
        1.0
    """
    distance = RestorationDistance()
    distance.update(source_features, adapted_features)
    return distance.compute()


@torch.no_grad()
def _distance_sums(source: Tensor, adapted: Tensor) -> Tensor:
    """Sum the absolute differences over all images and units, and count the images that are not finite."""
    dtype = sum_dtype(source.device)
    difference = (source.to(dtype) - adapted.to(dtype)).abs().flatten(1)
    return torch.stack([difference.sum(), (~difference.isfinite()).any(dim=1).sum().to(dtype)])
