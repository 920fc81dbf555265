"""How single units were distributed at home, and are on the target before and after adapting (appendix I)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shiftmend.errors import DataError
from shiftmend.inputs.feed import Preprocess
from shiftmend.profiles.profile import Profile
from shiftmend.research.figures import style
from shiftmend.research.figures.measuring import per_unit, shares
from shiftmend.stats.histograms import Histogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def edges(home: Histogram, unit: int) -> NDArray[np.float64]:
    """Where the bins of a unit begin and end; the two open ones are drawn as wide as the others."""
    low, high = float(home.low[unit]), float(home.high[unit])
    width = (high - low) / home.bins.inner
    return np.linspace(low - width, high + width, home.bins.total + 1)


def first_units(home: Histogram, count: int) -> list[int]:
    """The first units that varied on the source; the others have no distribution to show."""
    return [int(unit) for unit in home.usable.nonzero().flatten()[:count]]


def draw(
    model: nn.Module,
    target: Any,
    profile: Profile,
    adapted: nn.Module | None = None,
    *,
    taps: Sequence[str] = ("features", "logits"),
    units: int = 6,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
) -> Figure:
    """The first units of each tap, a row a tap: the profile's histogram, and `target` in the same bins.

    `model` gives the target before adapting, `adapted` after it. The divergence written into each panel is PSI. The
    outermost bins are open: what lies beyond the source's range is all in them, and they stand on grey ground.
    """
    if units < 1 or not taps:
        raise DataError(f"there must be at least one unit and one tap to draw, got {units} units of {len(taps)} taps")
    states = {"before": (model, style.TARGET)} | ({} if adapted is None else {"after": (adapted, style.ADAPTED)})
    options: dict[str, Any] = {"batch_size": batch_size, "preprocess": preprocess, "device": device}
    measured = {state: shares(one, target, profile, taps, **options) for state, (one, _) in states.items()}
    shown = {tap: first_units(profile.taps[tap], units) for tap in taps}
    columns = max(len(row) for row in shown.values())
    figure, axes = style.canvas(
        len(taps), columns, width=max(1.55, 4.2 / columns), height=1.55 + 0.6 / len(taps), sharey="row"
    )
    for row, tap in zip(axes, taps, strict=True):
        home = profile.taps[tap]
        divergences = {state: per_unit(profile, tap, tables[tap]) for state, tables in measured.items()}
        for axis, unit in zip(row, shown[tap], strict=False):
            cuts = edges(home, unit)
            axis.stairs(home.probabilities[unit].numpy(), cuts, fill=True, color=style.SOURCE, alpha=0.35)
            axis.stairs(home.probabilities[unit].numpy(), cuts, color=style.SOURCE, linewidth=1.0)
            for line, (state, (_, ink)) in enumerate(states.items()):
                axis.stairs(
                    measured[state][tap][unit].numpy(),
                    cuts,
                    color=ink,
                    linewidth=1.5,
                    linestyle="--" if state == "before" else "-",
                )
                written = f"{float(divergences[state][unit]):.2f}"
                corner: dict[str, Any] = {"transform": axis.transAxes, "ha": "right", "va": "top", "size": 8}
                axis.text(0.97, 0.97 - 0.13 * line, written, color=style.ink(ink), **corner)
            for outer in (cuts[:2], cuts[-2:]):
                axis.axvspan(*outer, color="0.93", zorder=0)
            axis.set_xlim(cuts[0], cuts[-1])
            axis.set_title(f"unit {unit}", fontsize=8, pad=3)
            axis.grid(False)
        for axis in row[len(shown[tap]) :]:
            axis.set_visible(False)
        row[0].set_ylabel(f"{tap}\nshare of samples", fontsize=8)
        drawn = [home.probabilities, *(tables[tap] for tables in measured.values())]
        top = max(float(table[shown[tap]].max()) for table in drawn)
        row[0].set_ylim(0, 1.3 * top)  # room for the figures above the curves
    figure.supxlabel(
        "activation (grey ground: outside the source's range)\nnumbers: divergence from the source (PSI)", fontsize=8
    )
    _legend(figure, states)
    return figure


def _legend(figure: Figure, states: dict[str, tuple[nn.Module, str]]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=style.SOURCE, alpha=0.5, label="source")]
    for state, (_, ink) in states.items():
        line: Any = "--" if state == "before" else "-"
        handles.append(Line2D([], [], color=ink, linestyle=line, label=f"target {state} adapting"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
