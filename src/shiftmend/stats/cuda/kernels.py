"""Soft histograms and their divergences on a GPU as a few kernels of our own, in CUDA C (`kernels.cu`).

The mathematics is that of `histograms.py`, in the form of its equation (4) that is exact at any temperature. With t the
distance of a value from the cut next to it and s the width of a bin, both in temperatures, the bin i places above the
one below the cut has exp(i t - i (i - 1) s / 2) times its weight, so that float32 is enough. Beyond a window of bins on
either side of the cut, which widens with the temperature and not with the number of bins, nothing is left to give. No
tensor of N x D x B is ever written to memory.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiftmend.errors import ShiftmendError
from shiftmend.stats.cuda.nvrtc import CompilationError, Kernels, multiprocessors
from shiftmend.stats.histograms import EPSILON, Bins, Divergence

log = logging.getLogger(__name__)


MOST_BINS = 128


_MOST_SAMPLES = 1 << 30
"""They are counted in 32 bits."""


_ALONE = 2048
"""Up to so many samples one block looks at all of a unit's values, and histogram, divergence and gradient are one
kernel."""


_NEGLIGIBLE = 24.0
"""A bin whose logit is this far below the highest gets less than 1e-10 of a value, and lies outside the window. That is
small even against `EPSILON`: some bins hold nothing but what others leave them, and their logarithm counts."""


_LANES = 32


_WARPS, _WARPS_ALONE = 32, 16
"""In a block, at most."""


_COLUMNS_ALONE = 4


_WARPS_RESIDENT = 64
"""In a multiprocessor: so many fill it."""


_SHARED = 48 << 10
"""Bytes of shared memory that a block has on every GPU."""


_AHEAD = 8
"""Values that a thread loads at once."""


_TYPES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16"}


Weights = tuple[float, float]
"""Of KL(source || target) and of KL(target || source)."""


_KINDS: dict[str, Weights] = {
    "psi": (1.0, 1.0),
    "symmetric-kl": (0.5, 0.5),
    "kl-source-target": (1.0, 0.0),
    "kl-target-source": (0.0, 1.0),
}


def fit(values: Tensor, bins: Bins) -> bool:
    """Whether these kernels take such values; other ones go the way of `histograms.py`."""
    return (
        values.is_cuda
        and values.dtype in (*_TYPES, torch.float16)
        and values.ndim == 2
        and values.numel() > 0
        and values.shape[0] < _MOST_SAMPLES
        and values.shape[1] * bins.total < _MOST_SAMPLES
        and bins.total <= MOST_BINS
        and _usable(values.device)
    )


@functools.cache
def _usable(device: torch.device) -> bool:
    """Whether kernels can be compiled for the device; says why not, once."""
    try:
        _kernels(3, 1, 1, 1, 1, torch.float32, device)
    except CompilationError as error:
        log.warning("soft histograms go without kernels of their own and take longer: %s", error)
        return False
    return True


def divergence(
    values: Tensor,
    low: Tensor,
    scale: Tensor,
    source: Tensor,
    bins: Bins,
    kind: Divergence = "psi",
    factor: float = 1.0,
) -> Tensor:
    """`factor` times the divergence of each unit `[D]` between values `[N, D]` and normalised counts `source` `[D, B]`.

    `scale` is one over the range of a usable unit and 0 for the others, whose divergence is zero.
    """
    _check(values, bins, low=low, scale=scale, source=source)
    forward, backward = _KINDS[kind]
    factor *= 1 / math.log(bins.total) if kind == "psi" else 1.0
    weights = (forward * factor, backward * factor)
    result: Tensor = _Divergence.apply(_taken(values), low, scale, source, bins, weights)
    return result


def soft_histogram(values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
    """Normalised soft bin counts `[D, B]`."""
    _check(values, bins, low=low, scale=scale)
    result: Tensor = _Histogram.apply(_taken(values), low, scale, bins)
    return result


def _taken(values: Tensor) -> Tensor:
    """float16 is computed as float32: small slopes would be lost in it."""
    return values.float() if values.dtype == torch.float16 else values


def _check(values: Tensor, bins: Bins, **tables: Tensor) -> None:
    """A kernel reads whatever it is pointed at."""
    for name, table in tables.items():
        shape = (values.shape[1], bins.total) if name == "source" else (values.shape[1],)
        if table.shape != shape or table.dtype != torch.float32 or table.device != values.device:
            raise ShiftmendError(
                f"{name} is {table.dtype} {list(table.shape)} on {table.device}, expected float32 {list(shape)} on "
                f"{values.device}, where the values are"
            )


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, low: Tensor, scale: Tensor, source: Tensor, bins: Bins, weights: Weights
    ) -> Tensor:
        values, low, scale, source = (given.contiguous() for given in (values, low, scale, source))
        if values.shape[0] <= _ALONE:
            result, slopes = _alone(values, low, scale, source, bins, weights)
            ctx.save_for_backward(slopes)
            ctx.bins = None
            return result
        result, gradient = _per_unit(values, low, scale, source, bins, weights)
        ctx.save_for_backward(values, low, scale, gradient)
        ctx.bins = bins
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = gradients
        if ctx.bins is None:
            (slopes,) = ctx.saved_tensors
            result = (slopes * upstream).to(slopes.dtype)
        else:
            values, low, scale, gradient = ctx.saved_tensors
            result = _slopes(values, low, scale, gradient, upstream.contiguous(), ctx.bins)
        return result, None, None, None, None, None


class _Histogram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
        values, low, scale = (given.contiguous() for given in (values, low, scale))
        ctx.save_for_backward(values, low, scale)
        ctx.bins = bins
        return _counts(values, low, scale, bins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        values, low, scale = ctx.saved_tensors
        return _slopes(values, low, scale, gradient.contiguous(), None, ctx.bins), None, None, None


def window(bins: Bins) -> int:
    """Bins on either side of the cut next to a value that get a share worth counting.

    The worst place is the middle of a bin, where the first bin beyond has a logit s w^2 / 2 below the highest: w is the
    window, s a bin's width in temperatures.
    """
    reach = math.sqrt(2 * _NEGLIGIBLE * bins.inner * min(bins.temperature, 1e6))
    return max(1, min(math.ceil(reach), bins.total - 1))


def _sharp(bins: Bins) -> float:
    """The width of a bin in temperatures, for powers of two; sharper than sharp makes no difference."""
    return min(1 / (bins.inner * bins.temperature), 1e6) / math.log(2)


@functools.cache
def _kernels(
    total: int, reach: int, columns: int, warps: int, ahead: int, dtype: torch.dtype, device: torch.device
) -> Kernels:
    source = resources.files("shiftmend.stats.cuda").joinpath("kernels.cu").read_text(encoding="utf-8")
    given = {"TOTAL": total, "WINDOW": reach, "COLUMNS": columns, "WARPS": warps, "AHEAD": ahead}
    options = [f"-D{name}={value}" for name, value in given.items()]
    return Kernels(source, (*options, f"-D{_TYPES[dtype]}", "--use_fast_math"), device)


@dataclass(frozen=True)
class _Work:
    """How values `[N, D]` are shared out among the threads of a GPU."""

    values: Tensor
    bins: Bins
    columns: int
    """Units in a block: a power of two."""
    warps: int
    """In a block."""
    reach: int

    @staticmethod
    def of(values: Tensor, bins: Bins, columns: int = _LANES, warps: int = _WARPS) -> _Work:
        needed = 1 << (values.shape[1] - 1).bit_length()
        room = _SHARED // ((bins.total + 1) * _LANES * 4)  # a thread has its own bins, and one number more
        return _Work(values, bins, min(columns, needed), min(warps, room), window(bins))

    @property
    def across(self) -> int:
        """Blocks beside each other."""
        return math.ceil(self.values.shape[1] / self.columns)

    def parts(self, rounds: int) -> tuple[int, int]:
        """Into how many parts to cut the samples, so that a thread has some rounds to do, and the samples of each."""
        samples, threads = self.values.shape[0], self.warps * _LANES // self.columns
        fill = multiprocessors(self.values.device) * _WARPS_RESIDENT // self.warps
        count = max(1, min(math.ceil(samples / (rounds * threads)), fill // self.across))
        return count, math.ceil(samples / count)

    def launch(self, name: str, parts: int, *arguments: Tensor | float | None) -> None:
        total, dtype, device = self.bins.total, self.values.dtype, self.values.device
        kernels = _kernels(total, self.reach, self.columns, self.warps, _AHEAD, dtype, device)
        kernels.launch(name, (self.across, parts), (_LANES, self.warps), *arguments)


def _alone(
    values: Tensor, low: Tensor, scale: Tensor, source: Tensor, bins: Bins, weights: Weights
) -> tuple[Tensor, Tensor]:
    result = torch.empty(values.shape[1], dtype=torch.float32, device=values.device)
    slopes = torch.empty_like(values)
    _Work.of(values, bins, _COLUMNS_ALONE, _WARPS_ALONE).launch(
        "alone", 1, values, low, scale, source, result, slopes, *values.shape,
        _sharp(bins), 1 / bins.temperature, *weights, EPSILON,
    )  # fmt: skip
    return result, slopes


def _partial(values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
    """Sums of shares over each part of the samples `[parts, B, D]`."""
    work = _Work.of(values, bins)
    parts, each = work.parts(2 * _AHEAD)
    partial = torch.empty(parts, bins.total, values.shape[1], dtype=torch.float32, device=values.device)
    work.launch("counts", parts, values, low, scale, partial, *values.shape, each, _sharp(bins))
    return partial


def _counts(values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
    partial = _partial(values, low, scale, bins)
    result = torch.empty(values.shape[1], bins.total, dtype=torch.float32, device=values.device)
    _Work.of(values, bins).launch(
        "settle", 1, partial, scale, None, result, None, None, *values.shape, len(partial), 0.0, 0.0, EPSILON
    )
    return result


def _per_unit(
    values: Tensor, low: Tensor, scale: Tensor, source: Tensor, bins: Bins, weights: Weights
) -> tuple[Tensor, Tensor]:
    """The divergence of each unit and its derivative by the target's counts."""
    partial = _partial(values, low, scale, bins)
    result = torch.empty(values.shape[1], dtype=torch.float32, device=values.device)
    gradient = torch.empty_like(source)
    _Work.of(values, bins).launch(
        "settle", 1, partial, scale, source, None, result, gradient, *values.shape, len(partial),
        *weights, EPSILON,
    )  # fmt: skip
    return result, gradient


def _slopes(
    values: Tensor, low: Tensor, scale: Tensor, gradient: Tensor, upstream: Tensor | None, bins: Bins
) -> Tensor:
    result = torch.empty_like(values)
    work = _Work.of(values, bins)
    parts, each = work.parts(4)
    work.launch(
        "slopes", parts, values, low, scale, gradient, upstream, result, *values.shape, each,
        _sharp(bins), 1 / bins.temperature,
    )  # fmt: skip
    return result
