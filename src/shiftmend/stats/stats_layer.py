"""`StatsLayer`: the paper's layer (appendix G), which a user places in a network."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from shiftmend.errors import ShiftmendError
from shiftmend.stats.histograms import Bins, CountTracker, Histogram, RangeTracker, as_samples, check_bins
from shiftmend.utils.checks import brief, check_axis, check_known, counted, is_whole

Mode = Literal["off", "range", "counts", "align"]


class StatsLayer(nn.Module):
    """A layer that returns its input unchanged and tracks its distribution.

    At home, call `layer.track("range")` and pass the data through the network, then `layer.track("counts")` and pass
    it again. The statistics are persistent buffers: they are saved and loaded with the state dict. At the new site,
    call `layer.track("align")`; after each forward pass `layer.loss()` is the divergence of that batch from home.
    Profiles do the same for any model without a change to it.

    Args:
        units: D, the number of units of the input.
        bins: The bins of the histograms; `Bins()` by default.
        channel_axis: Axis of the units; 1, or -1 for the last.

    Raises:
        ShiftmendError: If an argument is invalid.

    Example:
        >>> layer = StatsLayer(3)
        >>> home = torch.randn(512, 3)
        >>> for mode in ("range", "counts"):
        ...     _ = layer.track(mode)(home)
        >>> _ = layer.track("align")(home + 2.0)
        >>> bool(layer.loss() > 0.1)
        True
    """

    low: Tensor
    high: Tensor
    counts: Tensor
    samples: Tensor
    cut: Tensor

    def __init__(self, units: int, bins: Bins | None = None, *, channel_axis: int = 1) -> None:
        super().__init__()
        if not is_whole(units) or units < 1:
            raise ShiftmendError(f"Expected the number of units of a StatsLayer to be at least 1, got {brief(units)}.")
        check_axis(channel_axis, "a StatsLayer")
        self.bins = check_bins(bins, Bins())
        self.channel_axis = channel_axis
        self.mode: Mode = "off"
        self._last: Tensor | None = None
        self.register_buffer("low", torch.full((units,), torch.inf))
        self.register_buffer("high", torch.full((units,), -torch.inf))
        self.register_buffer("counts", torch.zeros(units, self.bins.total))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        # Counts are meaningful only with the bins that they were made with.
        self.register_buffer("cut", _describe_bins(self.bins))

    def track(self, mode: Mode) -> StatsLayer:
        """Set the purpose of the next forward passes.

        Args:
            mode: `"range"` tracks the range of each unit, and `"counts"` counts within these ranges; both reset earlier
                values. `"align"` keeps each batch for `loss`. `"off"` does nothing.

        Returns:
            The layer itself.

        Raises:
            ShiftmendError: If the mode is unknown, or the statistics that it needs are missing or not finite.

        Example:
            >>> StatsLayer(3).track("range").mode
            'range'
        """
        check_known(mode, get_args(Mode), "mode")
        if mode != "off" and self.counts.dtype not in (torch.float32, torch.float64):
            raise ShiftmendError(
                f"Expected statistics in float32 or float64, got {self.counts.dtype}. Call .float() on the StatsLayer "
                "after converting the network."
            )
        if mode in ("counts", "align"):
            self._check_range(mode)
        if mode == "align" and int(self.samples) == 0:
            raise ShiftmendError(
                "Expected counts before mode 'align', got none. Call track('counts') and run one pass over the source "
                "first."
            )
        if mode == "align" and bool(broken := (~torch.isfinite(self.counts)).any(1).sum()):
            raise ShiftmendError(
                f"Expected counts without NaN, got {counted(int(broken), 'unit')} with it. Track range and counts "
                "again, without such samples."
            )
        if mode == "range":
            self.low.fill_(torch.inf)
            self.high.fill_(-torch.inf)
        if mode in ("range", "counts"):
            self.counts.zero_()
            self.samples.zero_()
        self.mode, self._last = mode, None
        return self

    def _check_range(self, mode: Mode) -> None:
        # Initially, the ranges are infinity to minus infinity.
        if bool((self.low > self.high).any()):
            raise ShiftmendError(
                f"Expected ranges before mode {mode!r}, got none. Call track('range') and run one pass over the source "
                "first."
            )
        finite = torch.isfinite(self.low) & torch.isfinite(self.high)
        if not bool(finite.all()):
            raise ShiftmendError(
                f"Expected finite values in mode 'range', got NaN or infinity in "
                f"{counted(int((~finite).sum()), 'unit')}. Check the source data and the layers before."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Track a batch according to the mode, and return it unchanged.

        Args:
            x: Activations `[N, ...]` with D units on `channel_axis`, or `[N]` for a single unit.

        Returns:
            `x` itself.

        Raises:
            ShiftmendError: If the input does not have D units.

        Example:
            >>> x = torch.ones(4, 3, 8, 8)
            >>> StatsLayer(3)(x) is x
            True
        """
        if self.mode == "off":
            return x
        units, axis = self.low.shape[0], self.channel_axis
        if x.ndim == 0 or x.numel() == 0 or (x.ndim > 1 and not -x.ndim < axis < x.ndim):
            raise ShiftmendError(
                f"Expected the input of a StatsLayer to have samples with {units} units on axis {axis}, got "
                f"{list(x.shape)}."
            )
        values = as_samples(x, axis)
        if values.shape[1] != units:
            raise ShiftmendError(
                f"Expected {units} units on axis {axis} of the input of this StatsLayer, got {values.shape[1]} in "
                f"{list(x.shape)}."
            )
        if self.mode == "range":
            tracker = RangeTracker()
            tracker.update(values)
            self.low.copy_(torch.minimum(self.low, tracker.low))
            self.high.copy_(torch.maximum(self.high, tracker.high))
        elif self.mode == "counts":
            counter = CountTracker(self.low, self.high, self.bins)
            counter.update(values)
            self.counts += counter.counts.to(self.counts.dtype)
            self.samples += values.shape[0]
        else:
            # A later layer may work in place.
            self._last = values.clone()
        return x

    def histogram(self) -> Histogram:
        """Return a copy of the tracked statistics as a histogram, the class that profiles store.

        Returns:
            A histogram with counts `[D, B]` and ranges `[D]`.

        Example:
            >>> layer = StatsLayer(1)
            >>> for mode in ("range", "counts"):
            ...     _ = layer.track(mode)(torch.arange(100.0))
            >>> layer.histogram().samples
            100
        """
        return Histogram(self.counts.clone(), self.low.clone(), self.high.clone(), int(self.samples), self.bins)

    def loss(self, kind: str = "psi") -> Tensor:
        """Compute the mean divergence over units between the last batch and the stored statistics.

        Args:
            kind: The divergence: `"psi"`, `"symmetric-kl"`, `"kl-source-target"` or `"kl-target-source"`.

        Returns:
            One number, with a gradient to the input of the layer.

        Raises:
            ShiftmendError: If no batch has passed in mode `"align"`, or the divergence is unknown.

        Example:
            >>> layer = StatsLayer(1)
            >>> for mode in ("range", "counts", "align"):
            ...     _ = layer.track(mode)(torch.arange(100.0))
            >>> round(float(layer.loss()), 4)
            0.0
        """
        if self._last is None:
            raise ShiftmendError("Expected a batch to compare, got none. Call track('align'), then run a forward pass.")
        return self.histogram().divergence(self._last, kind)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        stored = state_dict.get(f"{prefix}cut")
        # The layer's own bins are rounded like the stored ones, because bfloat16 has few digits.
        if stored is not None and not torch.equal(
            stored.cpu().float(), _describe_bins(self.bins).to(stored.dtype).float()
        ):
            errors: list[str] = arguments[-1]
            theirs, ours = ([float(f"{value:.6g}") for value in cut.tolist()] for cut in (stored, self.cut))
            errors.append(
                f"{prefix.rstrip('.') or 'this StatsLayer'} was tracked with {theirs} inner bins and temperature, but "
                f"this layer has {ours}; make it with the same Bins"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def __getstate__(self) -> dict[str, Any]:
        # The last batch may be part of an autograd graph, which can neither be copied nor saved.
        return {**super().__getstate__(), "_last": None}

    def extra_repr(self) -> str:
        """Return the units, bins and mode of the layer, as shown in its `repr`."""
        return f"units={self.low.shape[0]}, bins={self.bins.count}, layout={self.bins.layout}, mode={self.mode}"


def _describe_bins(bins: Bins) -> Tensor:
    """Describe bins in a float32 tensor, because a float64 buffer cannot move to a device without float64."""
    return torch.tensor([bins.inner, bins.temperature], dtype=torch.float32)
