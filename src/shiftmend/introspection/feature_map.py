"""A linear map of the features of a model, `features @ matrix + offset`, that renames nothing in the model.

Matrix and offset are buffers of the module that reads or writes the features, applied by a hook of that module. Taps
see the mapped features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shiftmend.errors import TapError
from shiftmend.introspection.call import call_model
from shiftmend.introspection.modes import preserve_modes
from shiftmend.introspection.outputs import find_tensors
from shiftmend.introspection.taps import Tap, module_of
from shiftmend.utils.tensor_tree import Inputs

Side = Literal["input", "output"]

_OFFSETS: dict[Side, str] = {"input": "shiftmend_read_offset", "output": "shiftmend_written_offset"}
_MATRICES: dict[Side, str] = {"input": "shiftmend_read_matrix", "output": "shiftmend_written_matrix"}
_HANDLES: dict[Side, str] = {"input": "_shiftmend_read_handle", "output": "_shiftmend_written_handle"}


def attach_feature_map(module: nn.Module, side: Side, offset: Tensor, matrix: Tensor | None = None) -> None:
    """Make a module map the features that it reads or writes; an earlier map is replaced.

    The map belongs to the module: it is part of the `state_dict`, of copies, of `torch.save` and of `torch.export`.

    Args:
        module: The module, which is changed in place.
        side: The features to map: those that the module reads (`"input"`) or returns (`"output"`).
        offset: Offset `[D]` if the D units are on the last axis, `[D, 1, 1]` for maps `[N, D, H, W]`.
        matrix: Matrix `[D, D]` that multiplies the features from the right; None for the offset only.

    Example:
        >>> head = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.ones_(head.weight)
        >>> attach_feature_map(head, "input", torch.tensor([0.0, 5.0]), torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> head(torch.tensor([[1.0, 1.0]])).item()
        8.0
    """
    detach_feature_map(module, side)
    module.register_buffer(_OFFSETS[side], offset.detach().clone())
    if matrix is not None:
        module.register_buffer(_MATRICES[side], matrix.detach().clone())
    if side == "input":
        handle = module.register_forward_pre_hook(_map_read, with_kwargs=True)
    else:
        handle = module.register_forward_hook(_map_written)
    setattr(module, _HANDLES[side], handle)  # After unpickling, the handle keeps other hooks from taking the same id.


def detach_feature_map(module: nn.Module, side: Side) -> None:
    """Remove the map of a module on one side, if there is one."""
    if hasattr(module, _HANDLES[side]):
        getattr(module, _HANDLES[side]).remove()
        for name in (_HANDLES[side], _OFFSETS[side], _MATRICES[side]):
            if hasattr(module, name):
                delattr(module, name)


def set_feature_map(module: nn.Module, side: Side, offset: Tensor, matrix: Tensor | None = None) -> None:
    """Write new values into the map of a module in place, so that captured graphs use them."""
    with torch.no_grad():
        own = module.get_buffer(_OFFSETS[side])
        own.copy_(offset.reshape(own.shape))
        if matrix is not None:
            module.get_buffer(_MATRICES[side]).copy_(matrix)


def attach_stored_feature_maps(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Attach the feature maps that a `state_dict` contains, and remove all others."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for side in _OFFSETS:
            detach_feature_map(module, side)
            offset, matrix = (state.get(f"{prefix}{names[side]}") for names in (_OFFSETS, _MATRICES))
            if offset is not None:
                place = next(model.parameters(), offset).device
                attach_feature_map(module, side, offset.to(place), None if matrix is None else matrix.to(place))


def find_features(model: nn.Module, sample: Inputs, tap: Tap) -> Tensor:
    """Return the features of a batch at the module of a tap, in eval mode and without an earlier map.

    Raises:
        TapError: If the features are not a floating-point tensor, or are inside a tuple or dict.
    """
    module = module_of(model, tap)
    detach_feature_map(module, tap.side)
    seen: list[Any] = []

    def see_read(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(next(iter((*args, *kwargs.values())), None))

    if tap.side == "input":
        handle = module.register_forward_pre_hook(see_read, with_kwargs=True)
    else:
        handle = module.register_forward_hook(lambda _, args, returned: seen.append(returned))
    try:
        with torch.no_grad(), preserve_modes(model):
            model.eval()
            call_model(model, sample)
    finally:
        handle.remove()
    if len(seen) != 1 or not isinstance(seen[0], Tensor) or not seen[0].is_floating_point() or seen[0].ndim < 2:
        raise TapError(
            f"Expected one floating-point tensor of features at {str(tap)!r}, got {len(find_tensors(seen))} tensors. "
            "Tap another layer in shiftmend.profile."
        )
    return seen[0]


def offset_shape(features: Tensor, channel_axis: int) -> tuple[int, ...]:
    """Return the shape of one number per unit that broadcasts against the features.

    Example:
        >>> offset_shape(torch.zeros(2, 3, 8, 8), 1), offset_shape(torch.zeros(2, 7, 5), -1)
        ((3, 1, 1), (5,))
    """
    axis = channel_axis % features.ndim
    return (features.shape[axis],) + (1,) * (features.ndim - axis - 1)


def _map_read(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if args:
        return (_apply(module, "input", args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, kwargs | {name: _apply(module, "input", kwargs[name])}


def _map_written(module: nn.Module, args: Any, returned: Any) -> Any:
    return _apply(module, "output", returned)


def _apply(module: nn.Module, side: Side, features: Tensor) -> Tensor:
    offset = module.get_buffer(_OFFSETS[side])
    mapped = features
    if _MATRICES[side] in module._buffers:
        matrix = module.get_buffer(_MATRICES[side])
        wide = features.to(torch.promote_types(features.dtype, matrix.dtype))
        mapped = (wide.movedim(-offset.ndim, -1) @ matrix).movedim(-1, -offset.ndim)
    return (mapped + offset).to(features.dtype)
