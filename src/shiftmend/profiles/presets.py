"""The three presets: bins, divergence, reduction over units, and what is aligned beside the taps.

`reference`, the default, follows the public implementation of the paper, which the published learning rates belong to.
`paper` follows the paper's text. `sliced` is our own. The first two differ, and neither is "correct":

| | reference | paper | sliced |
|---|---|---|---|
| bins | 8 inner + 2 outer | 8, outer ones included | as reference |
| divergence of a unit | (KL + KL) / ln B | (KL + KL) / 2 | as reference |
| over the units of a tap | mean | sum | mean |
| taps aligned | features + logits | features + logits | and 512 slices of the features |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shiftmend.stats.histograms import Bins
from shiftmend.utils.checks import check_known

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Preset:
    """A named set of bins, divergence and reduction."""

    name: str
    bins: Bins
    divergence: str
    reduction: Reduction
    aligned_slices: int = 0


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("reference", Bins(8, "reference"), "psi", "mean"),
        Preset("paper", Bins(8, "paper"), "symmetric-kl", "sum"),
        Preset("sliced", Bins(8, "reference"), "psi", "mean", aligned_slices=512),
    )
}


def preset(name: str) -> Preset:
    """Return a preset by name."""
    check_known(name, PRESETS, "preset")
    return PRESETS[name]
