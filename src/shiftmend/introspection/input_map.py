"""A map of each input in front of a model, `inputs * scale + offset`, that leaves all names in the model as they are.

Scale and offset are buffers of the model itself, applied by a hook before its `forward`. A child module would be run by
`nn.Sequential` as one more layer, and a wrapper would rename every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SCALE = "shiftmend_input_scale"
"""Name of the buffer with the factor of each input."""
OFFSET = "shiftmend_input_offset"
"""Name of the buffer with what is added to each input."""
_HANDLE = "_shiftmend_input_handle"


def attach_input_map(model: nn.Module, scale: Tensor, offset: Tensor) -> None:
    """Let a model map its first input before anything else sees the input; an earlier map is replaced.

    The map belongs to the model: it is part of the `state_dict`, of copies, of `torch.save` and of `torch.export`.

    Args:
        model: The model, which is changed in place.
        scale: Factor that broadcasts against the inputs, e.g. `[C, 1, 1]` for images `[N, C, H, W]`.
        offset: What is added, of the same shape.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> _ = nn.init.ones_(model[0].weight)
        >>> attach_input_map(model, torch.tensor([2.0, 1.0]), torch.tensor([0.0, 5.0]))
        >>> model(torch.tensor([[1.0, 1.0]])).item()
        8.0
    """
    detach_input_map(model)
    model.register_buffer(SCALE, scale.detach().clone())
    model.register_buffer(OFFSET, offset.detach().clone())
    # A model that was unpickled brings the number of its hook along. The handle, unpickled with it, sees to it that no
    # later hook gets the same number and takes the place of the map.
    setattr(model, _HANDLE, model.register_forward_pre_hook(_map_first_input, with_kwargs=True))


def detach_input_map(model: nn.Module) -> None:
    """Remove the map of a model, if there is one."""
    if has_input_map(model):
        getattr(model, _HANDLE).remove()
        for name in (_HANDLE, SCALE, OFFSET):
            delattr(model, name)


def has_input_map(model: nn.Module) -> bool:
    """Tell whether a model maps its inputs."""
    return hasattr(model, _HANDLE)


def set_input_map(model: nn.Module, scale: Tensor, offset: Tensor) -> None:
    """Write as many new values into the map of a model, in place, so that captured passes follow."""
    with torch.no_grad():
        for name, values in ((SCALE, scale), (OFFSET, offset)):
            own = model.get_buffer(name)
            own.copy_(values.view_as(own))


def load_adapted_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load weights as `Adaptation.save` writes them, together with the map of the inputs if there is one.

    Args:
        model: The model as it was before adapting, which is changed in place.
        state: Tensors by name, e.g. of `safetensors.torch.load_file("mended/model.safetensors")`.

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
    if SCALE in state and OFFSET in state:
        parameter = next(model.parameters(), state[SCALE])
        attach_input_map(model, state[SCALE].to(parameter.device), state[OFFSET].to(parameter.device))
    model.load_state_dict(state)


def _map_first_input(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Map the first input of a call; a function of the module, so that a model can be copied and pickled with it."""
    if args:
        return (_apply(model, args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, kwargs | {name: _apply(model, kwargs[name])}


def _apply(model: nn.Module, inputs: Tensor) -> Tensor:
    scale, offset = model.get_buffer(SCALE), model.get_buffer(OFFSET)
    # Inputs of 16 bits are mapped in the precision of the map, and keep their type.
    return (inputs * scale + offset).to(inputs.dtype)
