"""A map of the inputs before a model, linear or along curves, that renames nothing in the model.

The linear map is `inputs * scale + offset`; a curve is piecewise linear, one per channel or column. The values are
buffers of the model itself, applied by a forward pre-hook. A child module would be run by `nn.Sequential` as one more
layer, and a wrapper would rename every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.introspection.feature_map import attach_stored_feature_maps

SCALE = "shiftmend_input_scale"
"""Name of the buffer with the scale of each input."""
OFFSET = "shiftmend_input_offset"
"""Name of the buffer with the offset of each input."""
KNOTS = "shiftmend_input_knots"
"""Name of the buffer with the knots of each curve."""
SHIFTS = "shiftmend_input_shifts"
"""Name of the buffer with the shifts that a curve adds at its knots."""
_HANDLE = "_shiftmend_input_handle"


def attach_input_map(model: nn.Module, scale: Tensor, offset: Tensor) -> None:
    """Make a model map its first input before anything else uses it; an earlier map is replaced.

    The map belongs to the model: it is part of the `state_dict`, of copies, of `torch.save` and of `torch.export`.

    Args:
        model: The model, which is changed in place.
        scale: Factor that broadcasts against the inputs, e.g. `[C, 1, 1]` for images `[N, C, H, W]`.
        offset: Offset, of the same shape.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> _ = nn.init.ones_(model[0].weight)
        >>> attach_input_map(model, torch.tensor([2.0, 1.0]), torch.tensor([0.0, 5.0]))
        >>> model(torch.tensor([[1.0, 1.0]])).item()
        8.0
    """
    _attach(model, {SCALE: scale, OFFSET: offset})


def attach_input_curve(model: nn.Module, knots: Tensor, shifts: Tensor) -> None:
    """Make a model map its first input along piecewise-linear curves, one per channel or column.

    At its knots, a curve adds the shifts. Outside of the outermost knots, it continues with its mean slope between
    them. An earlier map is replaced.

    Args:
        model: The model, which is changed in place.
        knots: Inputs `[D, K]` at which curves bend, ascending along each row. `D` is the size of axis 1 of the inputs,
            or 1 for one curve for all inputs.
        shifts: Shifts that are added at the knots, of the same shape.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False))
        >>> _ = nn.init.ones_(model[0].weight)
        >>> attach_input_curve(model, torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.0, 4.0, 2.0]]))
        >>> model(torch.tensor([[0.5], [1.0], [4.0]])).flatten().tolist()
        [2.5, 5.0, 8.0]
    """
    _attach(model, {KNOTS: knots, SHIFTS: shifts})


def _attach(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    detach_input_map(model)
    for name, values in buffers.items():
        model.register_buffer(name, values.detach().clone())
    # An unpickled model keeps the id of its hook. The handle, unpickled with it, reserves that id, so that no later
    # hook replaces the map.
    setattr(model, _HANDLE, model.register_forward_pre_hook(_map_first_input, with_kwargs=True))


def detach_input_map(model: nn.Module) -> None:
    """Remove the map of a model, if there is one."""
    if has_input_map(model):
        getattr(model, _HANDLE).remove()
        delattr(model, _HANDLE)
        for name in (SCALE, OFFSET, KNOTS, SHIFTS):
            if hasattr(model, name):
                delattr(model, name)


def has_input_map(model: nn.Module) -> bool:
    """Tell whether a model maps its inputs."""
    return hasattr(model, _HANDLE)


def set_input_map(model: nn.Module, scale: Tensor, offset: Tensor) -> None:
    """Overwrite scale and offset of a model's input map in place, so that captured CUDA graphs use the new values.

    Args:
        model: A model with a map `inputs * scale + offset`, attached by `attach_input_map`.
        scale: The new factor, with as many elements as the present factor.
        offset: The new offset, with as many elements as the present offset.
    """
    _write(model, {SCALE: scale, OFFSET: offset})


def set_input_curve(model: nn.Module, knots: Tensor, shifts: Tensor) -> None:
    """Overwrite the curves of a model in place, with the same shapes, so that captured graphs use the new values."""
    _write(model, {KNOTS: knots, SHIFTS: shifts})


def _write(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, values in buffers.items():
            own = model.get_buffer(name)
            # Values are converted before they are moved, because some devices have no float64.
            own.copy_(values.to(own.dtype).reshape(own.shape))


def apply_input_map(model: nn.Module, inputs: Tensor) -> Tensor | None:
    """Apply a model's map to inputs; return None if the model has no map."""
    return _apply(model, inputs) if has_input_map(model) else None


def load_adapted_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load weights that `Adaptation.save` wrote, including maps of inputs and features.

    Args:
        model: The model before adapting, which is changed in place.
        state: Tensors by name, e.g. from `safetensors.torch.load_file("mended/model.safetensors")`.

    Raises:
        RuntimeError: If names or shapes do not fit, as `load_state_dict` does.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> state = model.state_dict() | {SCALE: torch.full((2,), 0.5), OFFSET: torch.zeros(2)}
        >>> load_adapted_state(model, state)
        >>> model.shiftmend_input_scale
        tensor([0.5000, 0.5000])
    """
    detach_input_map(model)
    for names in ((SCALE, OFFSET), (KNOTS, SHIFTS)):
        if all(name in state for name in names):
            place = next(model.parameters(), state[names[0]]).device
            _attach(model, {name: state[name].to(place) for name in names})
    attach_stored_feature_maps(model, state)
    model.load_state_dict(state)


def _map_first_input(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Map the first input of a call. A module-level function, so that the model can be copied and pickled."""
    if args:
        return (_apply(model, args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, kwargs | {name: _apply(model, kwargs[name])}


def _apply(model: nn.Module, inputs: Tensor) -> Tensor:
    if KNOTS in model._buffers:
        return _follow_curves(inputs, model.get_buffer(KNOTS), model.get_buffer(SHIFTS)).to(inputs.dtype)
    scale, offset = model.get_buffer(SCALE), model.get_buffer(OFFSET)
    # 16-bit inputs are mapped in the precision of the map, and converted back.
    return (inputs * scale + offset).to(inputs.dtype)


def _follow_curves(inputs: Tensor, knots: Tensor, shifts: Tensor) -> Tensor:
    """Add to each input the interpolated shift at its position, in the precision of the knots."""
    by_unit = len(knots) > 1
    values = (inputs.movedim(1, 0) if by_unit else inputs).to(torch.promote_types(inputs.dtype, knots.dtype))
    rows = values.reshape(len(knots), -1)
    # Inputs equal to several knots are placed after the last of them, so neighbouring knots are never equal.
    found = rows.detach().to(knots.dtype).contiguous()
    if torch.compiler.is_exporting():
        # ONNX has no searchsorted; counting gives the same result.
        above = (found.unsqueeze(-1) >= knots.unsqueeze(1)).sum(-1)
    else:
        above = torch.searchsorted(knots, found, right=True)
    inside = (above > 0) & (above < knots.shape[1])
    low, high = (above - 1).clamp_min(0), above.clamp_max(knots.shape[1] - 1)
    first, last = torch.zeros_like(low), torch.full_like(low, knots.shape[1] - 1)
    # Beyond the outermost knots the slope is that from the first knot to the last.
    left, right = torch.where(inside, low, first), torch.where(inside, high, last)
    width = knots.gather(1, right) - knots.gather(1, left)
    rise = shifts.gather(1, right) - shifts.gather(1, left)
    slope_share = (rows - knots.gather(1, low)) / torch.where(width > 0, width, 1)
    mapped = rows + shifts.gather(1, low) + slope_share * torch.where(width > 0, rise, 0)
    mapped = mapped.reshape(values.shape)
    return mapped.movedim(0, 1) if by_unit else mapped
