"""Divergences between histograms: one table for the CPU path and the CUDA kernels.

Equation numbers are those of the paper: (2) is the alignment loss, (3) the KL divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shiftmend.errors import ShiftmendError
from shiftmend.utils.checks import check_known

if TYPE_CHECKING:
    from shiftmend.stats.histograms import Bins

EPSILON = 1e-8
"""Added to every probability inside a logarithm, as the public reference implementation does."""


KLWeights = tuple[float, float]
"""Weights of KL(source || target) and of KL(target || source)."""


@dataclass(frozen=True)
class Divergence:
    """A divergence between two tables of bin probabilities, source first.

    `function` takes two tables `[..., B]` and returns `[...]`. `kl_weights` expresses the same divergence as a weighted
    sum of the two KL divergences, given the number of bins B; the CUDA kernels compute only such sums. Omit it for any
    other divergence, which then uses the generic path on CUDA as well.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    kl_weights: Callable[[int], KLWeights] | None = None


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute D_KL(p || q) of equation (3) over the last axis, with `EPSILON` inside the logarithms."""
    return (p * (torch.log(p + EPSILON) - torch.log(q + EPSILON))).sum(-1)


def symmetric_kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute D_SKL of equation (2) over the last axis: half of the sum of both KL divergences."""
    return 0.5 * ((p - q) * (torch.log(p + EPSILON) - torch.log(q + EPSILON))).sum(-1)


def psi(p: Tensor, q: Tensor) -> Tensor:
    """Compute the population stability index: both KL divergences, with logarithms to the base B.

    The public reference implementation minimises this index instead of equation (2).
    """
    return symmetric_kl(p, q) * (2 / math.log(p.shape[-1]))


def scaled_kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute D_KL(p || q) with logarithms to the base B, which makes it one of the two terms of `psi`.

    The public reference implementation divides every entropy by ln B, and the published learning rates belong to that
    scale: in nats, a step with 10 bins would be ln 10 = 2.3 times as large.
    """
    return kl(p, q) / math.log(p.shape[-1])


DIVERGENCES: dict[str, Divergence] = {
    "psi": Divergence(psi, lambda bins: (1 / math.log(bins), 1 / math.log(bins))),
    "symmetric-kl": Divergence(symmetric_kl, lambda bins: (0.5, 0.5)),
    "kl-source-target": Divergence(scaled_kl, lambda bins: (1 / math.log(bins), 0.0)),
    "kl-target-source": Divergence(
        lambda source, target: scaled_kl(target, source), lambda bins: (0.0, 1 / math.log(bins))
    ),
}


def divergence(source: Tensor, target: Tensor, kind: str = "psi") -> Tensor:
    """Compute the divergence of each unit between two tables of bin probabilities.

    Args:
        source: Probabilities `[D, B]` at the source; each row sums to 1.
        target: Probabilities `[D, B]` at the target.
        kind: A name in `DIVERGENCES`.

    Returns:
        The divergences `[D]`.

    Raises:
        ShiftmendError: If the tables differ in shape, or the name is unknown.

    Example:
        >>> home, site = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.8, 0.2]])
        >>> round(float(divergence(home, site)), 3)
        0.6
    """
    if source.shape != target.shape:
        raise ShiftmendError(
            f"Expected two tables of counts of one shape, got {list(source.shape)} and {list(target.shape)}."
        )
    check_known(kind, DIVERGENCES, "divergence")
    return DIVERGENCES[kind].function(source, target)


def sampling_floor(bins: Bins, source_samples: float, target_samples: float) -> float:
    """Estimate the PSI of two samples of one distribution, due to sampling noise: (B - 1)(1/n + 1/m) / ln B.

    The sum of both KL divergences tends to Pearson's chi-square, whose expectation this is. The measured mean is 0.7 to
    1.0 times the floor, because soft and empty bins show less noise; so up to a third of a floor goes unnoticed. A
    single unit varies around the mean, from a tenth of it to three times as much.
    """
    return (bins.total - 1) * (1 / source_samples + 1 / target_samples) / math.log(bins.total)
