"""Figures of activations: distributions of single units, and the divergence of every layer (appendices I and J)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shiftmend.errors import DataError, ProfileError, TapError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.call import call_model
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.modes import force_eager, preserve_modes
from shiftmend.introspection.taps import Tap
from shiftmend.introspection.trace import trace
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.passes.evaluation_pass import Observation, run_pass, without_labels
from shiftmend.profiles.profile import Profile
from shiftmend.research.figures import style
from shiftmend.stats.histograms import Histogram
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.tensor_tree import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Order = Literal["first", "worst"]

MAX_SHOWN_DIVERGENCE = 2.0
"""End of the colour scale, as in the paper: two distributions that hardly overlap."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

_NORMALISATIONS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)


# ---- measuring


def measure_shares(
    model: nn.Module,
    data: Any,
    profile: Profile,
    taps: Iterable[str],
    *,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
) -> dict[str, Tensor]:
    """Measure the share of values in each bin of the profile, `[units, bins]` by tap."""
    plain = unwrap(model)
    names = tuple(taps)
    missing = [name for name in names if name not in profile.taps]
    if missing:
        known = ", ".join(map(repr, profile.taps))
        raise ProfileError(f"Expected one of the profile's taps {known}, got {missing[0]!r}.")
    profile.check_architecture(plain)
    place = resolve_device(device, plain)
    feed = Feed(data, batch_size=batch_size, device=place, preprocess=preprocess, what="target data")
    counters = {name: profile.taps[name].to(place).new_tracker() for name in names}

    def count(seen: Observation) -> None:
        for name, values in seen.activations.items():
            counters[name].update(values)

    with on_device(plain, place):
        check_model(plain, [feed.first(2)])
        specs = {name: profile.specs[name] for name in names}
        run_pass(plain, without_labels(feed.batches()), count, taps=specs)
    shares = {name: (counter.counts / counter.samples).float().cpu() for name, counter in counters.items()}
    for name, table in shares.items():
        if not bool(table[profile.taps[name].usable].isfinite().all()):
            raise DataError(f"Expected finite activations on the target data, got NaN at tap {name!r}.")
    return shares


def measure_divergences(
    model: nn.Module,
    target: Any,
    profile: Profile,
    layers: Sequence[str] | None = None,
    *,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
) -> dict[str, NDArray[np.float64]]:
    """Measure the PSI of each unit to the profile, by layer in running order; NaN where the source was constant."""
    plain = unwrap(model)
    profile.check_architecture(plain)
    names = tuple(layers) if layers is not None else tuple(profile.taps)
    tables = measure_shares(plain, target, profile, names, batch_size=batch_size, preprocess=preprocess, device=device)
    place = resolve_device(device, plain)
    with on_device(plain, place):
        sample = Feed(target, device=place, preprocess=preprocess, what="target data").first(2)
        order = running_order(plain, sample, {name: profile.specs[name] for name in names})
    return {name: divergence_per_unit(profile, name, tables[name]).double().numpy() for name in order}


def divergence_per_unit(profile: Profile, tap: str, shares: Tensor) -> Tensor:
    """Compute the PSI of each unit between the profile and the target; NaN where the source was constant."""
    home = profile.taps[tap]
    return torch.where(home.usable, home.divergence_per_unit(shares), torch.nan)


def layer_taps(
    model: nn.Module, sample: Tensor, *, head: str | None = None, normalised: bool = False
) -> dict[str, Tap]:
    """Make taps on every convolution and linear layer below the head, for `shiftmend.profile(..., taps=...)`.

    Layers that run more than once in a forward pass are left out, and so is the layer whose output is the features.

    Args:
        model: the model to tap.
        sample: a batch of inputs.
        head: Name of the last layer; found automatically if None.
        normalised: Whether to tap the normalisation after a layer, if there is one. Level and scale of the layer's own
            output are then undone and mean little. The paper taps the layer itself.
    """
    plain = unwrap(model)
    found = trace(plain, sample, head=head)
    modules = dict(plain.named_modules())
    events = _run_order(plain, sample, {name: (name, "output") for name in found.extractor})
    features = found.taps["features"]
    of_features = features.module if features.side == "output" else None
    taps = {}
    for name, behind in zip(found.extractor, (*found.extractor[1:], ""), strict=True):
        if name == of_features or not isinstance(modules[name], (nn.Linear, *_CONVOLUTIONS)):
            continue
        follows = normalised and behind and isinstance(modules[behind], _NORMALISATIONS)
        module = behind if follows else name
        if events.count(module) == 1:
            axis = -1 if isinstance(modules[module], nn.Linear) else 1
            taps[name] = Tap(name, module, channel_axis=axis)
    if not taps:
        raise TapError("Expected a convolution or linear layer below the features to tap, got none.")
    return taps


def running_order(model: nn.Module, sample: Inputs, taps: Mapping[str, Tap]) -> list[str]:
    """Return the names of the taps in the order in which a forward pass reaches them."""
    events = _run_order(unwrap(model), sample, {name: (tap.module, tap.side) for name, tap in taps.items()})
    return list(dict.fromkeys(events))


def _run_order(model: nn.Module, sample: Inputs, places: Mapping[str, tuple[str, str]]) -> list[str]:
    """Run the model once and list the places (module, side) in the order in which they are reached."""
    modules = dict(model.named_modules())
    events: list[str] = []
    with ExitStack() as stack:
        for context in (torch.no_grad(), preserve_modes(model), force_eager(model)):
            stack.enter_context(context)
        model.eval()
        for name, (module, side) in places.items():
            register = modules[module].register_forward_hook
            if side == "input":
                register = modules[module].register_forward_pre_hook
            stack.callback(register(lambda *_, name=name: events.append(name)).remove)
        call_model(model, sample)
    return events


# ---- distributions of single units


def draw_activations(
    model: nn.Module,
    target: Any,
    profile: Profile,
    adapted: nn.Module | Mapping[str, nn.Module] | None = None,
    *,
    taps: Sequence[str] = ("features", "logits"),
    units: int = 6,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
) -> Figure:
    """Draw the distributions of the first units of each tap, at home and on the target.

    There is a row for each tap, and with several adapted models for each tap and model.
    The number in each panel is the PSI. The outermost bins are open: all values beyond the source's range are in
    them, and they stand on grey ground.

    Args:
        model: The model before adapting.
        target: unlabelled inputs.
        profile: the profile of the source.
        adapted: The adapted model, or several by the name of their method.
        taps: the taps to draw.
        units: Number of units of each tap.
        batch_size: Number of samples per batch.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        device: Device to compute on.
    """
    models = adapted if isinstance(adapted, Mapping) else {} if adapted is None else {"": adapted}
    options: dict[str, Any] = {"batch_size": batch_size, "preprocess": preprocess, "device": device}
    before = measure_shares(model, target, profile, taps, **options)
    after = {name: measure_shares(each, target, profile, taps, **options) for name, each in models.items()}
    shown = {tap: first_units(profile.taps[tap], units) for tap in taps}
    columns = max(len(row) for row in shown.values())
    rows = [(name, tap) for name in (after or ("",)) for tap in taps]
    figure, axes = style.make_canvas(
        len(rows), columns, width=max(1.55, 4.2 / columns), height=1.55 + 0.6 / len(rows), sharey="row"
    )
    for row, (name, tap) in zip(axes, rows, strict=True):
        states = {"before": before[tap]} | ({"after": after[name][tap]} if name in after else {})
        _draw_units(row, profile, tap, shown[tap], states)
        row[0].set_ylabel(f"{f'{name}: ' if len(after) > 1 else ''}{tap}\nshare of samples", fontsize=8)
    figure.supxlabel(
        "activation (grey ground: outside the source's range)\nnumbers: divergence from the source (PSI)", fontsize=8
    )
    _add_state_legend(figure, {"before": _SHADES["before"]} | ({"after": _SHADES["after"]} if after else {}))
    return figure


_SHADES = {"before": style.TARGET, "after": style.ADAPTED}


def _draw_units(
    row: Sequence[Any], profile: Profile, tap: str, units: Sequence[int], states: Mapping[str, Tensor]
) -> None:
    """Draw one panel per unit of a tap: the share of each bin at the source, and in each state."""
    home = profile.taps[tap]
    divergences = {state: divergence_per_unit(profile, tap, shares) for state, shares in states.items()}
    for axis, unit in zip(row, units, strict=False):
        edges = bin_edges(home, unit)
        axis.stairs(home.probabilities[unit].numpy(), edges, fill=True, color=style.SOURCE, alpha=0.35)
        axis.stairs(home.probabilities[unit].numpy(), edges, color=style.SOURCE, linewidth=1.0)
        for line, (state, shares) in enumerate(states.items()):
            look = {"color": _SHADES[state], "linewidth": 1.5, "linestyle": "--" if state == "before" else "-"}
            axis.stairs(shares[unit].numpy(), edges, **look)
            written = f"{float(divergences[state][unit]):.2f}"
            corner: dict[str, Any] = {"transform": axis.transAxes, "ha": "right", "va": "top", "size": 8}
            axis.text(0.97, 0.97 - 0.13 * line, written, color=style.darken(_SHADES[state]), **corner)
        for outer in (edges[:2], edges[-2:]):
            axis.axvspan(*outer, color="0.93", zorder=0)
        axis.set_xlim(edges[0], edges[-1])
        axis.set_title(f"unit {unit}", fontsize=8, pad=3)
        axis.grid(False)
    for axis in row[len(units) :]:
        axis.set_visible(False)
    # The numbers need space above the curves.
    row[0].set_ylim(0, 1.3 * max(float(table[list(units)].max()) for table in (home.probabilities, *states.values())))


def bin_edges(home: Histogram, unit: int) -> NDArray[np.float64]:
    """Return the edges of a unit's bins; the two open bins are drawn as wide as the others."""
    low, high = float(home.low[unit]), float(home.high[unit])
    width = (high - low) / home.bins.inner
    return np.linspace(low - width, high + width, home.bins.total + 1)


def first_units(home: Histogram, count: int) -> list[int]:
    """Return the first units that varied on the source; constant ones have no distribution."""
    return [int(unit) for unit in home.usable.nonzero().flatten()[:count]]


def _add_state_legend(figure: Figure, shades: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=style.SOURCE, alpha=0.5, label="source")]
    for state, shade in shades.items():
        line: Any = "--" if state == "before" else "-"
        handles.append(Line2D([], [], color=shade, linestyle=line, label=f"target {state} adapting"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False)


# ---- divergence of every layer


def draw_affected(
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
    """Draw which units of which layers a shift affects, before adapting and with each adapted model.

    A strip is a layer, a column the same unit in all panels. The mean at the right of a strip is over all units of the
    layer. The profile needs taps on the layers: `shiftmend.profile(model, source, taps=layer_taps(model, sample))`.

    Args:
        model: The model before adapting.
        target: unlabelled inputs.
        profile: the profile of the source, with a tap on each layer.
        adapted: adapted models by the title of their panel.
        units: Number of units of each layer.
        order: "first" shows the first units, "worst" those with the largest divergence before adapting, some of which
            improve by chance alone.
        layers: the taps to draw, all by default.
        batch_size: Number of samples per batch.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        device: Device to compute on.
    """
    if order not in get_args(Order):
        raise DataError(f"Expected the order 'first' or 'worst', got {order!r}.")
    if layers is None and set(profile.taps) == {"features", "logits"}:
        raise ProfileError(
            "Expected a profile with taps on layers, got features and logits only. "
            "Try shiftmend.profile(..., taps=layer_taps(model, sample))."
        )
    options: dict[str, Any] = {"batch_size": batch_size, "preprocess": preprocess, "device": device}
    states = {"before adapting": model, **adapted}
    measured = {title: measure_divergences(each, target, profile, layers, **options) for title, each in states.items()}
    before = measured["before adapting"]
    shown = {layer: choose_units(values, units, order) for layer, values in before.items()}
    return _draw_strips(measured, shown, order)


def choose_units(before: NDArray[np.float64], count: int, order: Order) -> NDArray[np.intp]:
    """Choose the units of a layer to show: the first that varied on the source, or the worst."""
    usable = np.flatnonzero(np.isfinite(before))
    if order == "worst":
        usable = usable[np.argsort(-before[usable], kind="stable")]
    return usable[:count]


def make_strips(
    values: Mapping[str, NDArray[np.float64]], shown: Mapping[str, NDArray[np.intp]]
) -> NDArray[np.float64]:
    """Arrange divergences as `[layers, units]`, with NaN where a layer has fewer units than the widest."""
    table = np.full((len(shown), max(len(units) for units in shown.values())), np.nan)
    for row, (layer, units) in enumerate(shown.items()):
        table[row, : len(units)] = values[layer][units]
    return table


def _draw_strips(
    measured: Mapping[str, Mapping[str, NDArray[np.float64]]], shown: Mapping[str, NDArray[np.intp]], order: Order
) -> Figure:
    columns = max(len(units) for units in shown.values())
    figure, axes = style.make_canvas(
        1, len(measured), width=0.27 * columns + 1.1, height=0.32 * len(shown) + 1.1, sharey=True
    )
    image: Any = None
    for axis, (title, values) in zip(axes[0], measured.items(), strict=True):
        colours = {"cmap": "YlGnBu", "vmin": 0, "vmax": MAX_SHOWN_DIVERGENCE}
        image = axis.imshow(make_strips(values, shown), aspect="auto", interpolation="nearest", **colours)
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
