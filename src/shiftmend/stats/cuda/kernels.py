"""Soft histograms and their divergences on a GPU, as a few kernels in CUDA C (`kernels.cu`).

The mathematics is that of `histograms.py`. Here every value is described beside the cut next to it: let t be the
distance from this cut and s the width of a bin, both divided by the temperature. The bin i places above the one below
the cut then has exp(i t - i (i - 1) s / 2) times its weight, and float32 is exact enough at any temperature. Bins
outside of a window around the cut get nothing worth counting; the window widens with the temperature, not with the
number of bins. No tensor `[N, D, B]` is ever written to memory.

The kernels are CUDA C rather than Triton because they measured faster: a form in Triton, which has to ask of every bin
whether a value lies in it, took 0.276 ms for 65,536 x 512 values where these take 0.064 (`docs/speed.md`).
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiftmend.errors import ShiftmendError
from shiftmend.stats.cuda.nvrtc import CompilationError, Module, multiprocessors
from shiftmend.stats.divergences import DIVERGENCES, EPSILON, KLWeights

if TYPE_CHECKING:
    from shiftmend.stats.histograms import Bins

logger = logging.getLogger(__name__)


MAX_BINS = 128


MAX_COUNT = 1 << 30
"""Samples, and entries of a table of counts, are numbered in 32 bits."""


MAX_FUSED_SAMPLES = 2048
"""Largest batch size at which one block sees all values of a unit, and a single kernel computes histogram, divergence
and gradient."""


NEGLIGIBLE_LOGIT = 24.0
"""Bins whose logit is this far below the highest get less than 1e-10 of a value and are outside of the window. This is
small even compared with `EPSILON`: some bins hold nothing else, and their logarithm counts."""


WARP_SIZE = 32


MAX_WARPS, MAX_WARPS_FUSED = 32, 16
"""Warps in a block."""


MAX_UNITS_FUSED = 4
"""Units in a block of the fused kernel."""


WARPS_RESIDENT = 64
"""Warps that fill a multiprocessor."""


SHARED_BYTES = 48 << 10
"""Shared memory that a block has on every GPU."""


VALUES_AHEAD = 8
"""Values that a thread loads before it uses the first of them."""


_DTYPE_MACROS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16"}


def supports(values: Tensor, bins: Bins, kind: str | None = None) -> bool:
    """Tell whether the kernels support such values and the divergence `kind`; otherwise the generic path is used."""
    return (
        values.is_cuda
        and (kind is None or (kind in DIVERGENCES and DIVERGENCES[kind].kl_weights is not None))
        and values.dtype in (*_DTYPE_MACROS, torch.float16)
        and values.ndim == 2
        and values.numel() > 0
        and values.shape[0] < MAX_COUNT
        and values.shape[1] * bins.total < MAX_COUNT
        and bins.total <= MAX_BINS
        and _can_compile(values.device)
    )


@functools.cache
def _can_compile(device: torch.device) -> bool:
    """Try to compile a kernel for the device, and log the reason once if that fails."""
    try:
        _compile(3, 1, 1, 1, 1, torch.float32, device)
    except CompilationError as error:
        logger.warning("soft histograms run without CUDA kernels and take longer: %s", error)
        return False
    return True


def divergence(
    values: Tensor,
    low: Tensor,
    scale: Tensor,
    source: Tensor,
    bins: Bins,
    kind: str = "psi",
    factor: float = 1.0,
) -> Tensor:
    """Compute the divergence of each unit between a batch and the source, for inputs that `supports` accepts.

    Args:
        values: Activations `[N, D]` on the GPU.
        low: The lowest source value `[D]` of each unit.
        scale: One over the source range `[D]`; 0 for units that are not usable, whose divergence is zero.
        source: Probabilities `[D, B]` at the source.
        bins: The B bins.
        kind: A name in `DIVERGENCES` with KL weights.
        factor: A number that multiplies the result.

    Returns:
        The divergences `[D]`, with a gradient to the values.
    """
    _check_tables(values, bins, low=low, scale=scale, source=source)
    kl_weights = DIVERGENCES[kind].kl_weights
    assert kl_weights is not None
    forward, backward = kl_weights(bins.total)
    weights = (forward * factor, backward * factor)
    result: Tensor = _Divergence.apply(_as_kernel_dtype(values), low, scale, source, bins, weights)
    return result


def soft_histogram(values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
    """Compute the normalised soft counts `[D, B]`; the arguments are those of `divergence`."""
    _check_tables(values, bins, low=low, scale=scale)
    result: Tensor = _Histogram.apply(_as_kernel_dtype(values), low, scale, bins)
    return result


def _as_kernel_dtype(values: Tensor) -> Tensor:
    """Convert float16 values to float32, because float16 would lose small gradients."""
    return values.float() if values.dtype == torch.float16 else values


def _check_tables(values: Tensor, bins: Bins, **tables: Tensor) -> None:
    """Refuse tables of another shape, dtype or device, because a kernel reads any memory it is pointed at."""
    for name, table in tables.items():
        shape = (values.shape[1], bins.total) if name == "source" else (values.shape[1],)
        if table.shape != shape or table.dtype != torch.float32 or table.device != values.device:
            raise ShiftmendError(
                f"Expected {name} to be float32 {list(shape)} on {values.device}, as the values are, got {table.dtype} "
                f"{list(table.shape)} on {table.device}."
            )


class _Divergence(torch.autograd.Function):
    """Autograd function of the divergence `[D]` between the histograms of a batch and the source, unit by unit.

    Up to `MAX_FUSED_SAMPLES` samples, one kernel computes divergence and gradient in the forward pass. For larger
    batches, the backward pass computes the gradient from the derivative by the counts.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, low: Tensor, scale: Tensor, source: Tensor, bins: Bins, weights: KLWeights
    ) -> Tensor:
        values, low, scale, source = (given.contiguous() for given in (values, low, scale, source))
        if values.shape[0] <= MAX_FUSED_SAMPLES:
            result, by_value = _run_fused(values, low, scale, source, bins, weights)
            ctx.save_for_backward(by_value)
            ctx.bins = None
            return result
        result, by_count = _run_in_parts(values, low, scale, source, bins, weights)
        ctx.save_for_backward(values, low, scale, by_count)
        ctx.bins = bins
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = gradients
        if ctx.bins is None:
            (by_value,) = ctx.saved_tensors
            result = (by_value * upstream).to(by_value.dtype)
        else:
            values, low, scale, by_count = ctx.saved_tensors
            result = _gradients(values, low, scale, by_count, upstream.contiguous(), ctx.bins)
        return result, None, None, None, None, None


class _Histogram(torch.autograd.Function):
    """Autograd function of the normalised counts; the backward pass recomputes the shares."""

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
        return _gradients(values, low, scale, gradient.contiguous(), None, ctx.bins), None, None, None


def window(bins: Bins) -> int:
    """Return the number of bins on either side of the nearest cut that get a share of a value that is not negligible.

    In the worst case, a value in the middle of a bin, the first bin outside a window w has a logit s w^2 / 2 below the
    highest, where s is the width of a bin in temperatures.
    """
    reach = math.sqrt(2 * NEGLIGIBLE_LOGIT * bins.inner * min(bins.temperature, 1e6))
    return max(1, min(math.ceil(reach), bins.total - 1))


def width_log2(bins: Bins) -> float:
    """Compute the width of a bin in temperatures, as an exponent of two; above 1e6 the bins are as good as hard."""
    return min(1 / (bins.inner * bins.temperature), 1e6) / math.log(2)


@functools.cache
def _compile(
    total: int, window: int, columns: int, warps: int, ahead: int, dtype: torch.dtype, device: torch.device
) -> Module:
    source = resources.files("shiftmend.stats.cuda").joinpath("kernels.cu").read_text(encoding="utf-8")
    macros = {"TOTAL": total, "WINDOW": window, "COLUMNS": columns, "WARPS": warps, "AHEAD": ahead}
    options = [f"-D{name}={value}" for name, value in macros.items()]
    return Module(source, (*options, f"-D{_DTYPE_MACROS[dtype]}", "--use_fast_math"), device)


@dataclass(frozen=True)
class _Grid:
    """A division of values `[N, D]` among the threads of a GPU.

    A block has `warps` warps and `columns` units (a power of two).
    """

    values: Tensor
    bins: Bins
    columns: int
    warps: int

    @staticmethod
    def of(values: Tensor, bins: Bins, columns: int = WARP_SIZE, warps: int = MAX_WARPS) -> _Grid:
        needed = 1 << (values.shape[1] - 1).bit_length()
        # Each thread has its own bins in shared memory, padded by one number.
        room = SHARED_BYTES // ((bins.total + 1) * WARP_SIZE * 4)
        return _Grid(values, bins, min(columns, needed), min(warps, room))

    @property
    def blocks(self) -> int:
        """Number of blocks that the units are divided among."""
        return math.ceil(self.values.shape[1] / self.columns)

    def split_samples(self, rounds: int) -> tuple[int, int]:
        """Choose the number of parts that the samples are split into.

        Args:
            rounds: Samples of a unit that a thread should process. A thread gets fewer if samples are few, and more
                once the blocks fill the GPU.

        Returns:
            The number of parts, and the number of samples in each. The last part may be smaller.
        """
        samples, threads = self.values.shape[0], self.warps * WARP_SIZE // self.columns
        resident = multiprocessors(self.values.device) * WARPS_RESIDENT // self.warps
        count = max(1, min(math.ceil(samples / (rounds * threads)), resident // self.blocks))
        return count, math.ceil(samples / count)

    def launch(self, name: str, parts: int, *arguments: Tensor | float | None) -> None:
        total, dtype, device = self.bins.total, self.values.dtype, self.values.device
        module = _compile(total, window(self.bins), self.columns, self.warps, VALUES_AHEAD, dtype, device)
        module.launch(name, (self.blocks, parts), (WARP_SIZE, self.warps), *arguments)


def _run_fused(
    values: Tensor, low: Tensor, scale: Tensor, source: Tensor, bins: Bins, weights: KLWeights
) -> tuple[Tensor, Tensor]:
    """Compute the divergence of each unit `[D]` and its derivative by each value `[N, D]` in one kernel."""
    result = torch.empty(values.shape[1], dtype=torch.float32, device=values.device)
    by_value = torch.empty_like(values)
    _Grid.of(values, bins, MAX_UNITS_FUSED, MAX_WARPS_FUSED).launch(
        "fused", 1, values, low, scale, source, result, by_value, *values.shape,
        width_log2(bins), 1 / bins.temperature, *weights, EPSILON,
    )  # fmt: skip
    return result, by_value


def _partial_counts(values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
    """Compute a soft histogram `[B, D]` of each part of the samples, stacked to `[parts, B, D]`."""
    grid = _Grid.of(values, bins)
    parts, size = grid.split_samples(2 * VALUES_AHEAD)
    partial = torch.empty(parts, bins.total, values.shape[1], dtype=torch.float32, device=values.device)
    grid.launch("partial_counts", parts, values, low, scale, partial, *values.shape, size, width_log2(bins))
    return partial


def _counts(values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
    """Compute the normalised counts `[D, B]`."""
    partial = _partial_counts(values, low, scale, bins)
    result = torch.empty(values.shape[1], bins.total, dtype=torch.float32, device=values.device)
    _Grid.of(values, bins).launch(
        "finish", 1, partial, scale, None, result, None, None, *values.shape, len(partial), 0.0, 0.0, EPSILON
    )
    return result


def _run_in_parts(
    values: Tensor, low: Tensor, scale: Tensor, source: Tensor, bins: Bins, weights: KLWeights
) -> tuple[Tensor, Tensor]:
    """Compute the divergence of each unit `[D]` and its derivative by the target's normalised counts `[D, B]`."""
    partial = _partial_counts(values, low, scale, bins)
    result = torch.empty(values.shape[1], dtype=torch.float32, device=values.device)
    by_count = torch.empty_like(source)
    _Grid.of(values, bins).launch(
        "finish", 1, partial, scale, source, None, result, by_count, *values.shape, len(partial), *weights, EPSILON
    )
    return result, by_count


def _gradients(
    values: Tensor, low: Tensor, scale: Tensor, by_count: Tensor, upstream: Tensor | None, bins: Bins
) -> Tensor:
    """Compute the derivative by each value `[N, D]` from the derivative by the normalised counts `[D, B]`."""
    result = torch.empty_like(values)
    grid = _Grid.of(values, bins)
    parts, size = grid.split_samples(4)
    grid.launch(
        "gradients", parts, values, low, scale, by_count, upstream, result, *values.shape, size,
        width_log2(bins), 1 / bins.temperature,
    )  # fmt: skip
    return result
