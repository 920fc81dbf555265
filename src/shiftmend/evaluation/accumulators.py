"""Base class of streaming metrics: sums on the device, which are read once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.utils.devices import send, sum_dtype

BY_PART = ("reliability", "iou", "quantities")
"""Fields of scores with several values: one per bin, class or quantity."""


def describe_scores(scores: Any) -> str:
    """Format scores as one line; `repr` has all digits and the bins."""
    shown = {field.name: getattr(scores, field.name) for field in fields(scores) if field.name not in BY_PART}
    return ", ".join(f"{name} {format_score(name, value)}" for name, value in shown.items() if value is not None)


def format_score(name: str, value: float) -> str:
    """Format a score: shares in percent, other numbers with four digits."""
    if name in ("accuracy", "ece", "mce", "mean_iou"):
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


class Sums:
    """One small vector of sums, and the shape that all samples must have."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._sums: Tensor | None = None
        self._samples = 0
        self._sample_shape: torch.Size | None = None

    def merge(self, other: Self) -> None:
        """Add everything that `other` has seen; `other` stays as it is."""
        if other._sums is not None and other._sample_shape is not None:
            self._add(other._sums, other._samples, other._sample_shape)

    def _add(self, sums: Tensor, samples: int, sample_shape: torch.Size) -> None:
        if self._sample_shape is not None and self._sample_shape != sample_shape:
            raise DataError(
                f"Expected samples of one shape, got {list(sample_shape)} after {list(self._sample_shape)}."
            )
        device = self._device or sums.device
        sums = sums.to(device, sum_dtype(device))
        # Not in place, because a sum created in inference mode cannot be changed outside of it.
        self._sums = sums if self._sums is None else self._combine(self._sums, sums)
        self._device = device
        self._samples += samples
        self._sample_shape = sample_shape

    @staticmethod
    def _combine(ours: Tensor, theirs: Tensor) -> Tensor:
        return ours + theirs

    def _read(self) -> list[float]:
        """Return the sums on the host. Only this method synchronises with the device."""
        if self._sums is None or self._samples == 0:
            raise DataError("Expected at least one batch, got no samples to score.")
        values: list[float] = self._sums.tolist()
        return values


def to_device_of(anchor: Tensor, other: Tensor) -> Tensor:
    """Return `other` on the device of `anchor`."""
    return send(other, anchor.device)


def refuse(faults: float, samples: int, what: str, advice: str = "Try to find them in the data") -> None:
    """Raise if any samples have a fault; `what` names the fault."""
    if faults:
        raise DataError(f"{round(faults)} of {samples} samples have {what}. {advice}.")


def describe(tensor: Tensor) -> str:
    """Describe dtype and shape of a tensor as part of a sentence: "float32 [4, 8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
