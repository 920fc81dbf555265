"""Call a model with its inputs: one tensor, or several by name or in order."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shiftmend.utils.tensor_tree import Inputs


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """Call a model with a batch.

    A dict is passed as keyword arguments, and a tuple as positional arguments. If `forward` does not accept them in
    this way but takes one argument, it gets the dict or tuple itself.

    Example:
        >>> import torch
        >>> from shiftmend.utils.tensor_tree import TensorTree
        >>> call_model(nn.Bilinear(2, 3, 4), TensorTree((torch.ones(5, 2), torch.ones(5, 3)))).shape
        torch.Size([5, 4])
    """
    if isinstance(inputs, Tensor):
        return model(inputs)
    value = inputs.value
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        kwargs = value
    else:
        args = value
    if not accepts(model, *args, **kwargs) and accepts(model, value):
        args, kwargs = (value,), {}
    return model(*args, **kwargs)


def accepts(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Tell whether the signature of `forward` accepts these arguments."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        # Some functions have no signature.
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
