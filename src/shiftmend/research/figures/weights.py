"""A figure of weights: how far adapting moved each layer. FR moves all layers, BUFR mostly the first (appendix J)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shiftmend.errors import DataError
from shiftmend.introspection.blocks import split_blocks
from shiftmend.introspection.model_state import find_owners
from shiftmend.introspection.trace import trace
from shiftmend.introspection.validate import unwrap
from shiftmend.research.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Weights = nn.Module | Mapping[str, Tensor]
"""A model, or its state dict as `Adaptation.save` writes it."""

Groups = Mapping[str, Sequence[str]]
"""Names of layers, by the name of the group that they form."""


def draw_moved(
    model: nn.Module, adapted: Mapping[str, Weights], *, groups: Groups | None = None, notes: Sequence[str] = ()
) -> Figure:
    """Draw the mean distance by which units moved, one bar per method and group of layers.

    Distances depend on the learning rate and its schedule: compare methods that had the same, as the paper does.

    Args:
        model: the model before adapting.
        adapted: adapted models, or their state dicts, by method.
        groups: Groups of layers. `group_by_block` returns the blocks in running order. By default, every layer with a
            kernel is a group.
        notes: Notes below the figure, such as the learning rate.
    """
    if not adapted:
        raise DataError("Expected at least one adapted model, e.g. {'bufr': result.model}, got none.")
    chosen = group_by_layer(model) if groups is None else groups
    measured = {name: measure_distances(model, weights, chosen) for name, weights in adapted.items()}
    # Names that would not fit side by side are written one below the other.
    lying = len(chosen) > 8 or max(map(len, chosen)) * len(chosen) > 60
    if lying:
        figure, axes = style.make_canvas(width=5.0, height=0.13 * len(chosen) * (len(adapted) + 1) + 0.8)
    else:
        figure, axes = style.make_canvas(width=max(3.6, 0.32 * len(chosen) * (len(adapted) + 1) + 1.2), height=2.8)
    axis = axes[0, 0]
    ruler, names = (axis.xaxis, axis.yaxis) if lying else (axis.yaxis, axis.xaxis)
    width = 0.8 / len(measured)
    for index, (method, values) in enumerate(measured.items()):
        places = np.arange(len(chosen)) + (index - (len(measured) - 1) / 2) * width
        draw_bars = axis.barh if lying else axis.bar
        bars = draw_bars(places, list(values.values()), 0.92 * width, color=style.colour_of(method), label=method)
        axis.bar_label(bars, fmt="%.2g", fontsize=7, padding=1)
    if lying:
        axis.invert_yaxis()
    names.set_ticks(range(len(chosen)), list(chosen))
    names.set_tick_params(length=0)
    names.grid(False)
    names.set_label_text("layer", fontsize=9)
    ruler.set_label_text("mean distance moved by a unit", fontsize=9)
    axis.margins(**{"x" if lying else "y": 0.12})
    axis.legend(fontsize=8, frameon=False)
    if notes:
        style.add_footer(figure, notes)
    return figure


def group_by_layer(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return each layer with a weight matrix or kernel as a separate group, in the order of definition."""
    plain = unwrap(model)
    modules = dict(plain.named_modules())
    found: dict[str, tuple[str, ...]] = {name: (name,) for name in find_owners(plain) if _has_kernel(modules[name])}
    if not found:
        raise DataError("Expected a model with weight matrices, got no layer with one.")
    return found


def group_by_block(model: nn.Module, sample: Tensor) -> dict[str, tuple[str, ...]]:
    """Return the blocks that BUFR unfreezes, in running order, each with its layers that have a kernel."""
    plain = unwrap(model)
    modules = dict(plain.named_modules())
    groups = {}
    for block in split_blocks(plain, trace(plain, sample)):
        inside = tuple(name for name in block.modules if _has_kernel(modules[name]))
        # Only the kernel is measured, so a block "conv1 + bn1" is called conv1.
        groups[inside[0] if len(inside) == 1 else block.name] = inside or block.modules
    return groups


def measure_distances(source: nn.Module, adapted: Weights, groups: Groups | None = None) -> dict[str, float]:
    """Return the mean distance by which the units of each group of layers moved."""
    before = unwrap(source)
    after = _load_weights(before, adapted)
    chosen = group_by_layer(before) if groups is None else groups
    theirs, ours = dict(after.named_modules()), dict(before.named_modules())
    result = {}
    for title, names in chosen.items():
        missing = [name for name in names if name not in ours]
        if missing:
            raise DataError(f"Expected layers of the model in group {title!r}, got {missing[0]!r}.")
        distances = [measure_unit_distances(ours[name], theirs[name]) for name in names]
        result[title] = float(np.concatenate(distances).mean())
    return result


def measure_unit_distances(source: nn.Module, adapted: nn.Module) -> NDArray[np.float64]:
    """Return the Euclidean distance between the weights and bias of each output unit before and after."""
    squares: dict[int, Tensor] = {}
    after = _own_parameters(adapted)
    for name, value in _own_parameters(source).items():
        rows = _by_unit(source, name, value.detach().cpu().double() - after[name].detach().cpu().double())
        moved = rows.square().sum(1)
        squares[len(rows)] = squares.get(len(rows), torch.zeros_like(moved)) + moved
    return torch.cat(list(squares.values())).sqrt().numpy()


def _load_weights(source: nn.Module, adapted: Weights) -> nn.Module:
    """Return the adapted model, after checking that its tensors fit the source model."""
    state = unwrap(adapted).state_dict() if isinstance(adapted, nn.Module) else dict(adapted)
    for name, value in source.state_dict().items():
        if name not in state or (isinstance(value, Tensor) and state[name].shape != value.shape):
            what = "is missing" if name not in state else f"is {list(state[name].shape)}, not {list(value.shape)}"
            raise DataError(f"Expected an adapted version of the source model, got one whose {name!r} {what}.")
    if isinstance(adapted, nn.Module):
        return unwrap(adapted)
    filled = copy.deepcopy(source)
    filled.load_state_dict(state, strict=False)
    return filled


def _own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module itself; with a parametrisation (weight norm), the tensors that it makes."""
    lists = getattr(module, "parametrizations", None)
    made = list(lists) if isinstance(lists, nn.ModuleDict) else []
    return {name: getattr(module, name) for name in [*module._parameters, *made] if getattr(module, name) is not None}


def _has_kernel(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    own = [weight] if weight is not None else list(_own_parameters(module).values())
    return "Norm" not in type(module).__name__ and any(isinstance(each, Tensor) and each.ndim > 1 for each in own)


def _by_unit(module: nn.Module, name: str, value: Tensor) -> Tensor:
    """Reshape a parameter to `[output units, everything that enters a unit]`."""
    if value.ndim == 0:
        return value.reshape(1, 1)
    if name == "weight" and isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        # Stored as [input, output / groups, ...], with the groups one after the other along the input.
        grouped = value.reshape(module.groups, value.shape[0] // module.groups, value.shape[1], -1)
        return grouped.transpose(1, 2).reshape(module.out_channels, -1)
    return value.reshape(value.shape[0], -1)
