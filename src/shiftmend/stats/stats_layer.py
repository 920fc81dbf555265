"""`StatsLayer`: the paper's layer (appendix G) that a user places in a network by hand."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from shiftmend.errors import ShiftmendError
from shiftmend.stats.histograms import Bins, Divergence, as_bins, as_samples
from shiftmend.stats.statistics import CountTracker, Histogram, RangeTracker
from shiftmend.utils.checks import brief, check_axis, check_known, is_whole, kind

Mode = Literal["off", "range", "counts", "align"]


class StatsLayer(nn.Module):
    """Passes its input through and tracks how it is distributed.

    At home: `layer.track("range")`, one pass over the data, `layer.track("counts")`, a second pass. The statistics are
    persistent buffers, so they are saved and loaded with the state dict. At the new site: `layer.track("align")`, and
    after each forward pass `layer.loss()` is the divergence of that batch from home. A layer whose buffers were never
    filled says so. Profiles do the same for any model without placing anything in it.

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
            raise ShiftmendError(f"a StatsLayer needs the number of its units, at least 1, got {brief(units)}")
        check_axis(channel_axis, "a StatsLayer")
        self.bins = as_bins(bins, Bins())
        self.channel_axis = channel_axis
        self.mode: Mode = "off"
        self._last: Tensor | None = None
        self.register_buffer("low", torch.full((units,), torch.inf))
        self.register_buffer("high", torch.full((units,), -torch.inf))
        self.register_buffer("counts", torch.zeros(units, self.bins.total))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cut", _cut(self.bins))  # counts mean something only with the bins they were made with

    def track(self, mode: Mode) -> StatsLayer:
        """Say what the next forward passes are for; `range` and `counts` start anew."""
        check_known(mode, get_args(Mode), "mode")
        if mode != "off" and self.counts.dtype not in (torch.float32, torch.float64):
            raise ShiftmendError(
                f"the statistics are {self.counts.dtype}, too coarse to count in; call .float() on the StatsLayer "
                "after converting the network (its input may be of any precision)"
            )
        if mode in ("counts", "align"):
            self._check_range(mode)
        if mode == "align" and int(self.samples) == 0:
            raise ShiftmendError("mode 'align' needs the counts first: track('counts') and one pass over the source")
        if mode == "align" and bool(broken := (~torch.isfinite(self.counts)).any(1).sum()):
            raise ShiftmendError(
                f"{int(broken)} units were NaN in mode 'counts'; track both again, without such samples"
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
        if bool((self.low > self.high).any()):  # as they were at the start
            raise ShiftmendError(f"mode {mode!r} needs the range first: track('range') and one pass over the source")
        finite = torch.isfinite(self.low) & torch.isfinite(self.high)
        if not bool(finite.all()):
            raise ShiftmendError(
                f"{int((~finite).sum())} units were NaN or infinite in mode 'range'; look at the source data and at "
                "the layers before this one"
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "off":
            return x
        units, axis = self.low.shape[0], self.channel_axis
        if not isinstance(x, Tensor):
            raise ShiftmendError(f"the input of this StatsLayer is {kind(x)}, expected a tensor")
        if x.ndim == 0 or x.numel() == 0 or (x.ndim > 1 and not -x.ndim < axis < x.ndim):
            raise ShiftmendError(
                f"the input of this StatsLayer is {list(x.shape)}, expected samples with {units} units on axis {axis}"
            )
        values = as_samples(x, axis)
        if values.shape[1] != units:
            raise ShiftmendError(
                f"this StatsLayer was made for {units} units, its input {list(x.shape)} has {values.shape[1]} on axis "
                f"{axis}"
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
            self._last = values.clone()  # a following in-place layer must not change it
        return x

    def histogram(self) -> Histogram:
        """What has been tracked up to now, in the form a profile stores."""
        return Histogram(self.counts.clone(), self.low.clone(), self.high.clone(), int(self.samples), self.bins)

    def loss(self, kind: Divergence = "psi") -> Tensor:
        """Mean divergence over units between the last batch and the stored statistics."""
        if self._last is None:
            raise ShiftmendError("there is no batch to compare: track('align'), then run a forward pass")
        return self.histogram().divergence(self._last, kind)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        stored = state_dict.get(f"{prefix}cut")
        # rounded as the stored one is: a model in bfloat16 has few digits
        if stored is not None and not torch.equal(stored.cpu().float(), _cut(self.bins).to(stored.dtype).float()):
            errors: list[str] = arguments[-1]
            theirs, ours = ([float(f"{value:.6g}") for value in cut.tolist()] for cut in (stored, self.cut))
            errors.append(
                f"{prefix.rstrip('.') or 'this StatsLayer'} was tracked with {theirs} inner bins and temperature, but "
                f"this layer has {ours}; make it with the same Bins"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_last": None}  # a graph can neither be copied nor saved

    def extra_repr(self) -> str:
        return f"units={self.low.shape[0]}, bins={self.bins.count}, layout={self.bins.layout}, mode={self.mode}"


def _cut(bins: Bins) -> Tensor:
    """In float32: a model with a buffer of float64 could not be moved to a device that has none."""
    return torch.tensor([bins.inner, bins.temperature], dtype=torch.float32)
