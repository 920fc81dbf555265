"""Which layers a shift affects, unit by unit, and what is left of it after adapting (appendix J)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shiftmend.errors import DataError, ProfileError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.validate import unwrap
from shiftmend.profiles.profile import Profile
from shiftmend.research.figures import style
from shiftmend.research.figures.measuring import per_unit, running_order, shares
from shiftmend.utils.devices import resolve_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Order = Literal["first", "worst"]


TOP = 2.0
"""The end of the colour scale, the paper's: two distributions that hardly overlap."""


def divergences(
    model: nn.Module,
    target: Any,
    profile: Profile,
    layers: Sequence[str] | None = None,
    *,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
) -> dict[str, NDArray[np.float64]]:
    """PSI of each unit to the profile, by layer in running order; NaN where a unit was constant on the source."""
    plain = unwrap(model)
    profile.check_architecture(plain)
    names = tuple(layers) if layers is not None else tuple(profile.taps)
    tables = shares(plain, target, profile, names, batch_size=batch_size, preprocess=preprocess, device=device)
    place = resolve_device(device, plain)
    with on_device(plain, place):
        sample = Feed(target, device=place, preprocess=preprocess, what="target data").first(2)
        order = running_order(plain, sample, {name: profile.specs[name] for name in names})
    return {name: per_unit(profile, name, tables[name]).double().numpy() for name in order}


def chosen_units(before: NDArray[np.float64], count: int, order: Order) -> NDArray[np.intp]:
    """Which units of a layer are shown: the first that varied on the source, or those it hit hardest."""
    usable = np.flatnonzero(np.isfinite(before))
    if order == "worst":
        usable = usable[np.argsort(-before[usable], kind="stable")]
    return usable[:count]


def draw(
    model: nn.Module,
    target: Any,
    profile: Profile,
    adapted: Mapping[str, nn.Module],
    *,
    units: int = 10,
    order: Order = "first",
    layers: Sequence[str] | None = None,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
) -> Figure:
    """One panel before adapting and one for each adapted model, named as given; a strip of units a layer.

    Columns are the same units in all panels. With `order="worst"` they are chosen by their divergence before adapting,
    so some of what is left behind is smaller by chance alone; the mean at the right of a strip is that of all units of
    the layer. The profile needs taps on the layers: `shiftmend.profile(model, source, taps=layer_taps(model, sample))`
    with `layer_taps` of `shiftmend.research.figures.measuring`.
    """
    if order not in get_args(Order):
        raise DataError(f"unknown order of units {order!r}, expected 'first' or 'worst'")
    if units < 1:
        raise DataError(f"at least one unit of each layer must be shown, got {units}")
    if layers is None and set(profile.taps) == {"features", "logits"}:
        raise ProfileError(
            "the profile has taps at features and logits only; profile the source again with a tap on every layer, "
            "taps=layer_taps(model, sample)"
        )
    options: dict[str, Any] = {"batch_size": batch_size, "preprocess": preprocess, "device": device}
    states = {"before adapting": model, **adapted}
    measured = {title: divergences(one, target, profile, layers, **options) for title, one in states.items()}
    before = measured["before adapting"]
    shown = {layer: chosen_units(values, units, order) for layer, values in before.items()}
    return _heat(measured, shown, order)


def strips(values: Mapping[str, NDArray[np.float64]], shown: Mapping[str, NDArray[np.intp]]) -> NDArray[np.float64]:
    """Layers by units, as drawn; NaN where a layer has fewer units than the widest."""
    table = np.full((len(shown), max(len(units) for units in shown.values())), np.nan)
    for row, (layer, units) in enumerate(shown.items()):
        table[row, : len(units)] = values[layer][units]
    return table


def _heat(
    measured: Mapping[str, Mapping[str, NDArray[np.float64]]], shown: Mapping[str, NDArray[np.intp]], order: Order
) -> Figure:
    columns = max(len(units) for units in shown.values())
    figure, axes = style.canvas(
        1, len(measured), width=0.27 * columns + 1.1, height=0.32 * len(shown) + 1.1, sharey=True
    )
    image: Any = None
    for axis, (title, values) in zip(axes[0], measured.items(), strict=True):
        table = strips(values, shown)
        image = axis.imshow(table, cmap="YlGnBu", vmin=0, vmax=TOP, aspect="auto", interpolation="nearest")
        for row, layer in enumerate(shown):
            axis.text(columns - 0.3, row, f"{np.nanmean(values[layer]):.2f}", va="center", fontsize=8)
        axis.set_title("mean", fontsize=8, loc="right", color="0.35", x=1.0 + 1.1 / columns)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_yticks(range(len(shown)), list(shown), fontsize=8)
        axis.set_xticks([])
        axis.set_xlabel("units" if order == "first" else "units, worst before adapting first", fontsize=8)
        axis.grid(False)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
        for edge in np.arange(0.5, columns - 1):
            axis.axvline(edge, color="white", linewidth=1)
        for edge in np.arange(0.5, len(shown) - 1):
            axis.axhline(edge, color="white", linewidth=3)
    bar = figure.colorbar(image, ax=axes[0].tolist(), extend="max", extendfrac=0.04, aspect=25, pad=0.02)
    bar.set_label("divergence from the source (PSI)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure
