"""Soft histograms and their divergences on a GPU as single kernels, in Triton.

The mathematics is that of `histograms.py`, in the form of its equation (4) that is exact at any temperature. With k the
bin a value lies in, the logit of bin j exceeds that of k by (j - k) (x - (j + k - 1) / (2 inner)) / temperature, which
stays small where it matters, so that float32 is enough. No tensor of N x D x B is ever written to memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from shiftmend.histograms import EPSILON, Bins, Divergence

MOST_BINS = 128
_ALONE = 2048
"""Up to so many samples one program looks at all of a unit's values, and histogram, divergence and gradient are one
kernel."""
_SHARP = 12.0
"""From so many temperatures in a bin on, the next but one neighbour gets less than 1e-5 of a value."""
_KINDS: dict[str, tuple[float, float]] = {
    # weights of KL(source || target) and of KL(target || source)
    "psi": (1.0, 1.0),
    "symmetric-kl": (0.5, 0.5),
    "kl-source-target": (1.0, 0.0),
    "kl-target-source": (0.0, 1.0),
}


@functools.cache
def available() -> bool:
    """Whether there is a Triton to compile with; torch brings it along with its CUDA builds."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def fit(values: Tensor, bins: Bins) -> bool:
    """Whether these kernels take such values; other ones go the way of `histograms.py`."""
    return (
        values.is_cuda
        and values.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and values.ndim == 2
        and values.shape[0] > 0
        and bins.total <= MOST_BINS
        and available()
    )


def divergence(
    values: Tensor, low: Tensor, scale: Tensor, source: Tensor, bins: Bins, kind: Divergence = "psi"
) -> Tensor:
    """Divergence of each unit `[D]` between values `[N, D]` and the normalised counts `source` `[D, B]`.

    `scale` is one over the range of a usable unit and 0 for the others, whose divergence is zero.
    """
    result: Tensor = _Divergence.apply(values, low, scale, source, bins, kind)
    return result


def soft_histogram(values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
    """Normalised soft bin counts `[D, B]`."""
    result: Tensor = _Histogram.apply(values, low, scale, bins)
    return result


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, low: Tensor, scale: Tensor, source: Tensor, bins: Bins, kind: Divergence
    ) -> Tensor:
        values = values.contiguous()
        if values.shape[0] <= _ALONE:
            result, slopes = _alone(values, low, scale, source, bins, kind)
            ctx.save_for_backward(slopes)
            ctx.bins = None
            return result
        target = _counts(values, low, scale, bins)
        result, gradient = _per_unit(source, target, scale, bins, kind)
        ctx.save_for_backward(values, low, scale, gradient)
        ctx.bins = bins
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if ctx.bins is None:
            (slopes,) = ctx.saved_tensors
            result = (slopes * gradient).to(slopes.dtype)
        else:
            values, low, scale, per_bin = ctx.saved_tensors
            result = _slopes(values, low, scale, per_bin * gradient.unsqueeze(1), ctx.bins)
        return result, None, None, None, None, None


class _Histogram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
        values = values.contiguous()
        ctx.save_for_backward(values, low, scale)
        ctx.bins = bins
        return _counts(values, low, scale, bins)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, low, scale = ctx.saved_tensors
        (gradient,) = gradients
        return _slopes(values, low, scale, gradient.contiguous(), ctx.bins), None, None, None


def _per_unit(source: Tensor, target: Tensor, scale: Tensor, bins: Bins, kind: Divergence) -> tuple[Tensor, Tensor]:
    """The divergence of each unit and its derivative by the target's counts."""
    forward, backward = _weights(kind, bins)
    distance = torch.log(source + EPSILON) - torch.log(target + EPSILON)
    usable = (scale > 0).unsqueeze(1)
    weight = torch.where(usable, forward * source - backward * target, 0.0)
    gradient = torch.where(
        usable, -(forward * source - backward * target) / (target + EPSILON) - backward * distance, 0.0
    )
    return (weight * distance).sum(1), gradient


def _weights(kind: Divergence, bins: Bins) -> tuple[float, float]:
    forward, backward = _KINDS[kind]
    unit = 1 / math.log(bins.total) if kind == "psi" else 1.0
    return forward * unit, backward * unit


def _width(bins: Bins) -> int:
    """Bins in a program: a power of two."""
    return max(2, 1 << (bins.total - 1).bit_length())


def _sharp(bins: Bins) -> bool:
    return 1 / (bins.inner * bins.temperature) >= _SHARP


def _alone(
    values: Tensor, low: Tensor, scale: Tensor, source: Tensor, bins: Bins, kind: Divergence
) -> tuple[Tensor, Tensor]:
    samples, units = values.shape
    result = torch.empty(units, device=values.device)
    slopes = torch.empty_like(values)
    forward, backward = _weights(kind, bins)
    columns = 4
    rows = max(16, 2048 // (columns * _width(bins)))
    with torch.cuda.device(values.device):
        _compiled()["alone"][(math.ceil(units / columns),)](
            values, low, scale, source, result, slopes, samples, units,
            bins.inner, 1 / bins.temperature, forward, backward, EPSILON,
            bins.total, _width(bins), rows, columns,
        )  # fmt: skip
    return result, slopes


def _counts(values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
    samples, units = values.shape
    sharp = _sharp(bins)
    columns, rows = (32, 64) if sharp else (8, max(8, 512 // _width(bins)))
    across = math.ceil(units / columns)
    # enough programs to fill a GPU, each with several rounds to do; summed in a fixed order, so the result is one too
    splits = max(1, min(math.ceil(samples / (4 * rows)), math.ceil(2048 / across)))
    each = math.ceil(samples / splits)
    partial = torch.empty(splits, units, bins.total, device=values.device)
    with torch.cuda.device(values.device):
        _compiled()["sharp_counts" if sharp else "counts"][(across, splits)](
            values, low, scale, partial, samples, units, each,
            bins.inner, 1 / bins.temperature,
            bins.total, _width(bins), rows, columns,
        )  # fmt: skip
    return partial.sum(0).div_(samples)


def _slopes(values: Tensor, low: Tensor, scale: Tensor, gradient: Tensor, bins: Bins) -> Tensor:
    samples, units = values.shape
    result = torch.empty_like(values)
    sharp = _sharp(bins)
    columns, rows = (64, 32) if sharp else (8, max(8, 512 // _width(bins)))
    with torch.cuda.device(values.device):
        _compiled()["sharp_slopes" if sharp else "slopes"][(math.ceil(units / columns), math.ceil(samples / rows))](
            values, low, scale, gradient, result, samples, units,
            bins.inner, 1 / bins.temperature, 1 / samples,
            bins.total, _width(bins), rows, columns,
        )  # fmt: skip
    return result


@functools.cache
def _compiled() -> dict[str, Any]:
    """Triton is imported when it is first needed: it is not there without CUDA."""
    from shiftmend import triton_kernels

    names = ("alone", "counts", "slopes", "sharp_counts", "sharp_slopes")
    return {name: getattr(triton_kernels, name) for name in names}
