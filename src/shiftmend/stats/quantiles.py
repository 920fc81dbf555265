"""Quantiles of the inputs of a model, per channel, per column, or of all values; see `moments.py`.

Each of `LEVELS` quantiles is the middle of an equal share of the values. So levels are (k + 1/2) / LEVELS, and a
profile does not reveal the lowest and highest values of the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shiftmend.distributed.collectives import all_gather, is_distributed
from shiftmend.errors import ProfileError
from shiftmend.stats.moments import as_units
from shiftmend.stats.statistics import Frame, read_whole_number, register
from shiftmend.utils.processes import rank

LEVELS = 33
"""Number of quantiles per channel or column."""

MAX_UNITS = 1024
"""Inputs with more channels or columns have no quantiles, so that a profile stays small (132 KiB at most)."""

KEPT_VALUES = 1 << 20
"""Number of values up to which quantiles are exact. Of more values, a random sample of this size is kept."""

MIN_KEPT_ROWS = 4096
"""Smallest number of values per unit that are kept, for any number of units."""


def quantile_levels() -> Tensor:
    """Return the levels `[LEVELS]` of the quantiles, between 0 and 1."""
    return (torch.arange(LEVELS, dtype=torch.float64, device="cpu") + 0.5) / LEVELS


def find_quantiles(values: Tensor) -> Tensor:
    """Compute the quantiles of each column, where value k of n sorted values is at level (k + 1/2) / n.

    Args:
        values: Values `[N, D]`, with at least one row.

    Returns:
        Quantiles `[D, LEVELS]`, ascending along each row; constant outside of the first and last value.

    Example:
        >>> values = torch.arange(66.0).view(66, 1)
        >>> find_quantiles(values)[0, :3]
        tensor([0.5000, 2.5000, 4.5000])
    """
    rows = values.sort(0).values
    places = (quantile_levels() * len(rows) - 0.5).clamp(0, len(rows) - 1)
    below = places.floor().long()
    share = (places - below).to(rows.dtype).to(rows.device).unsqueeze(1)
    low = rows[below.to(rows.device)]
    high = rows[(below + 1).clamp_max(len(rows) - 1).to(rows.device)]
    # Rounding must not make a quantile larger than the next.
    return torch.lerp(low, high, share).cummax(0).values.T


@register
@dataclass(frozen=True, eq=False)
class Quantiles:
    """Quantiles `[D, LEVELS]` of each channel or column of the inputs; `D` is 1 for inputs as a whole."""

    kind: ClassVar[str] = "quantiles"
    tensor_dims: ClassVar[Mapping[str, int]] = {"values": 2}
    values: Tensor
    samples: int

    def to(self, device: torch.device) -> Quantiles:
        """Return the same quantiles on a device."""
        return Quantiles(self.values.to(device), self.samples)

    @classmethod
    def mix(cls, parts: Sequence[Quantiles], times: Sequence[float]) -> Quantiles:
        """Combine quantiles of several sets of samples, weighting each sample of `parts[i]` by `times[i]`.

        Each part is represented by the middles of its equal shares, so the result is approximate.
        """
        first = parts[0].values
        for other in parts[1:]:
            if other.values.shape != first.shape:
                raise ProfileError(
                    f"Expected quantiles of as many channels or columns to merge, got {len(first)} and "
                    f"{len(other.values)}."
                )
        sizes = [number * part.samples for part, number in zip(parts, times, strict=True)]
        pooled, order = torch.cat([part.values.double() for part in parts], 1).sort(dim=1, stable=True)
        weights = torch.tensor(sizes, dtype=torch.float64, device=first.device) / (sum(sizes) * LEVELS)
        shares = weights.repeat_interleave(LEVELS)[order]
        places = shares.cumsum(1) - shares / 2
        levels = quantile_levels().to(first.device).expand(len(first), LEVELS).contiguous()
        above = torch.searchsorted(places, levels).clamp(1, pooled.shape[1] - 1)
        ends = [(places.gather(1, index), pooled.gather(1, index)) for index in (above - 1, above)]
        (low_place, low), (high_place, high) = ends
        share = ((levels - low_place) / (high_place - low_place)).clamp(0, 1)
        mixed = torch.lerp(low, high, share).cummax(1).values
        return cls(mixed.to(first.dtype), round(sum(sizes)))

    def divergence(self, values: Tensor) -> Tensor:
        """Compute the mean distance between the quantiles of values `[N, D]` and those of the source."""
        return (find_quantiles(values.to(self.values.dtype)) - self.values).abs().mean()

    def tensors(self) -> dict[str, Tensor]:
        """Return the quantiles."""
        return {"values": self.values}

    def facts(self) -> dict[str, Any]:
        """Return the number of samples."""
        return {"samples": self.samples}

    @classmethod
    def from_file(cls, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], frame: Frame) -> Quantiles:
        """Build the quantiles from the content of a file."""
        values = tensors["values"]
        if values.shape[1] != LEVELS or not 0 < len(values) <= MAX_UNITS:
            raise ProfileError(f"{name} are not {LEVELS} levels of 1 to {MAX_UNITS} units")
        return Quantiles(values, read_whole_number(facts["samples"], f"the number of samples of the {name}"))

    def problems(self) -> list[str]:
        """List the problems of the quantiles, one sentence each."""
        if not bool(torch.isfinite(self.values).all()):
            return ["a quantile is not finite"]
        return ["quantiles do not rise"] if bool((self.values.diff(dim=1) < 0).any()) else []


class QuantileTracker:
    """Tracker of the quantiles of inputs over batches.

    If there are more than `KEPT_VALUES` values, only those with the lowest random keys are kept: a random sample,
    whatever the sizes of the batches.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._rows: list[Tensor] | None = []
        """None as soon as batches do not fit together, are not real numbers, or have too many units."""
        self._keys: list[Tensor] = []
        self._kept = 0
        self._limit = 1.0
        """Rows with keys of at least this value are not kept."""
        self._finite: Tensor | None = None
        self._dice = torch.Generator().manual_seed(20220427 + rank())

    def update(self, inputs: Tensor) -> None:
        """Add a batch of inputs `[N, ...]`."""
        if self._rows is None:
            return
        values = as_units(inputs.detach())
        if values is None or values.shape[1] > MAX_UNITS or (self._rows and self._rows[0].shape[1] != values.shape[1]):
            self._rows = None
            return
        finite = torch.isfinite(values.float()).all()
        self._finite = finite if self._finite is None else self._finite & finite
        self.samples += len(values)
        keys = torch.rand(len(values), generator=self._dice, device="cpu")
        if self._limit < 1:
            places = (keys < self._limit).nonzero()[:, 0]
            values, keys = values[places.to(values.device)], keys[places]
        self._rows.append(values.float())
        self._keys.append(keys)
        self._kept += len(keys)
        if self._kept > 2 * self._most(values.shape[1]):
            self._thin()

    def _most(self, units: int) -> int:
        return max(MIN_KEPT_ROWS, KEPT_VALUES // units)

    def _thin(self) -> None:
        """Keep the rows with the lowest keys."""
        assert self._rows is not None
        rows, keys = torch.cat(self._rows), torch.cat(self._keys)
        most = self._most(rows.shape[1])
        if len(keys) > most:
            self._limit = float(keys.kthvalue(most + 1).values)
            places = (keys < self._limit).nonzero()[:, 0]
            rows, keys = rows[places.to(rows.device)], keys[places]
        self._rows, self._keys, self._kept = [rows], [keys], len(keys)

    def reduce_over_processes(self) -> QuantileTracker:
        """Return the tracker of the samples of all processes, which see inputs of the same kind."""
        if not is_distributed() or not self._rows or self._finite is None:
            return self
        self._thin()
        own, keys = self._rows[0], self._keys[0].to(self._rows[0].device)
        facts = all_gather(torch.tensor([len(keys), self.samples], device=own.device))
        limits = all_gather(torch.tensor(self._limit, dtype=torch.float32, device=own.device))
        padding = int(facts[:, 0].max()) - len(keys)
        every_row = all_gather(torch.cat([own, own.new_zeros(padding, own.shape[1])]))
        every_key = all_gather(torch.cat([keys, keys.new_ones(padding)]))
        counts = facts[:, 0].tolist()
        rows = torch.cat([part[:count] for part, count in zip(every_row, counts, strict=True)])
        joined = torch.cat([part[:count] for part, count in zip(every_key, counts, strict=True)])
        reduced = QuantileTracker()
        reduced.samples = int(facts[:, 1].sum())
        reduced._finite = all_gather(self._finite.to(torch.uint8)).all()
        # The process with the lowest limit sets the limit of all.
        chosen = joined < limits.min()
        reduced._rows, reduced._keys, reduced._kept = [rows[chosen]], [joined[chosen].cpu()], int(chosen.sum())
        return reduced

    def exact(self) -> Tensor | None:
        """Return the quantiles `[D, LEVELS]` on the device of the inputs; None if they are not finite."""
        if not self._rows or self._finite is None or not bool(self._finite):
            return None
        self._thin()
        found = find_quantiles(self._rows[0])
        return found if bool(torch.isfinite(found).all()) else None  # Very large values overflow here.

    def quantiles(self) -> Quantiles | None:
        """Return the quantiles as a profile stores them, on the CPU; None without values, or if some are not finite."""
        found = self.exact()
        return None if found is None else Quantiles(found.cpu().contiguous(), self.samples)
