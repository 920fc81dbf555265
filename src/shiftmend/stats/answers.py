"""Predictions of a classifier at home: the share of each class, and the mean confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from shiftmend.distributed.collectives import all_sum, is_distributed
from shiftmend.errors import ProfileError
from shiftmend.stats.statistics import Frame, read_whole_number, register
from shiftmend.utils.devices import sum_dtype


@register
@dataclass(frozen=True, eq=False)
class Answers:
    """Shares `[classes]` of the predicted classes, and the mean confidence `[1]`."""

    kind: ClassVar[str] = "answers"
    tensor_dims: ClassVar[Mapping[str, int]] = {"shares": 1, "confidence": 1}
    shares: Tensor
    confidence: Tensor
    samples: int

    def to(self, device: torch.device) -> Answers:
        """Return the same predictions on a device."""
        return Answers(self.shares.to(device), self.confidence.to(device), self.samples)

    @classmethod
    def mix(cls, parts: Sequence[Answers], times: Sequence[float]) -> Answers:
        """Combine predictions on several sets of samples, weighting each sample of `parts[i]` by `times[i]`."""
        sizes = [part.samples * number for part, number in zip(parts, times, strict=True)]
        # Plain numbers are used, because a tensor would lie on torch's default device.
        weights = [size / sum(sizes) for size in sizes]
        shares = sum(weight * part.shares for weight, part in zip(weights, parts, strict=True))
        confidence = sum(weight * part.confidence for weight, part in zip(weights, parts, strict=True))
        assert isinstance(shares, Tensor)
        assert isinstance(confidence, Tensor)
        return cls(shares, confidence, max(1, round(sum(sizes))))

    def divergence(self, values: Tensor) -> Tensor:
        """Compute the total variation between the shares and those of logits `[N, classes]`; not differentiable."""
        own = functional.one_hot(values.argmax(1), len(self.shares)).to(self.shares.dtype).mean(0)
        return (own - self.shares.to(own.device)).abs().sum() / 2

    def tensors(self) -> dict[str, Tensor]:
        """Return shares and confidence."""
        return {"shares": self.shares, "confidence": self.confidence}

    def facts(self) -> dict[str, Any]:
        """Return the number of samples."""
        return {"samples": self.samples}

    @classmethod
    def from_file(cls, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], frame: Frame) -> Answers:
        """Build the predictions from the content of a file."""
        if len(tensors["confidence"]) != 1 or len(tensors["shares"]) < 2:
            raise ProfileError(f"the {name} should have shares of two classes or more, and one confidence")
        samples = read_whole_number(facts["samples"], f"the number of samples of the {name}")
        return Answers(tensors["shares"], tensors["confidence"], samples)

    def problems(self) -> list[str]:
        """List the problems of the numbers, one sentence each."""
        both = torch.cat([self.shares, self.confidence])
        if not bool(both.isfinite().all()):
            return ["shares or confidence are not finite"]
        if not bool(((both >= 0) & (both <= 1)).all()) or abs(float(self.shares.sum()) - 1) > 1e-3:
            return ["shares and confidence are not from 0 to 1, or shares do not add up to 1"]
        return []


class AnswerTracker:
    """Accumulator of predictions over batches of logits.

    Models with a single output are ignored: without a rehearsal, it is unknown whether the output is a quantity, as
    `verification/reading.py` then assumes, or a binary logit.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        """Counts of the predicted classes, and the sum of their probabilities."""

    def update(self, logits: Tensor) -> None:
        """Add a batch of logits `[N, classes]`. Logits `[N, 1]`, of a model with one output, are ignored."""
        if logits.shape[1] < 2:
            return
        dtype = sum_dtype(logits.device)
        counts = functional.one_hot(logits.argmax(1), logits.shape[1]).to(dtype).sum(0)
        certain = logits.detach().to(dtype).softmax(1).amax(1).sum()
        sums = torch.cat([counts, certain.view(1)])
        self._sums = sums if self._sums is None else self._sums + sums

    def answers(self) -> Answers | None:
        """Combine the predictions of all processes, as a profile stores them.

        Returns:
            The predictions, on the CPU. None if no logits were added, or some were not finite.
        """
        if self._sums is None:
            return None
        sums = (all_sum(self._sums) if is_distributed() else self._sums).cpu().double()
        samples = float(sums[:-1].sum())
        if not bool(sums.isfinite().all()):
            return None
        return Answers((sums[:-1] / samples).float(), (sums[-1:] / samples).float(), round(samples))
