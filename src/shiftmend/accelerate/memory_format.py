"""Channels-last memory format for convolutions, which is faster on a GPU and on a CPU.

Feature maps take the format of the weights. Values are equal up to rounding, unless a model relies on the memory layout
of its maps, as `view` does. Such a model is not converted.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.introspection.call import call_model
from shiftmend.introspection.modes import force_eager, preserve_modes
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.utils.devices import preferred_memory_format, sum_dtype
from shiftmend.utils.tensor_tree import Inputs

MAX_RELATIVE_DIFFERENCE = 0.01
"""Largest difference between both formats, relative to the largest output. Rounding by TF32 is far smaller."""


def channels_last(model: nn.Module, sample: Inputs, output: Entry = None, returned: Any = None) -> bool:
    """Convert the weights of 2-D convolutions to channels last, if the outputs of the model stay the same.

    A copy is tested first: in eval mode against the model, and in a training step.

    Args:
        model: The model to convert.
        sample: A batch of inputs on the device of the model.
        output: Entry of a tuple or dict that is the model's output.
        returned: Output of the model for this batch in eval mode, if known. Otherwise the model is run.

    Returns:
        Whether the weights were converted.
    """
    if not _weights(model) or preferred_memory_format(sample.device) != torch.channels_last:
        return False
    try:
        trial = copy.deepcopy(model)
        _lay_out(trial)
        expected = _run(model, sample, output) if returned is None else pick(returned, output, "the model")
        fits = _is_close(_run(trial, sample, output), expected)
        _step(trial, sample, output)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AssertionError):  # The model relies on the layout of its maps.
        return False
    if fits:
        _lay_out(model)
    return fits


def as_in(model: nn.Module, like: nn.Module) -> None:
    """Give the weights of convolutions the memory format that they have in another copy of the model."""
    theirs = _weights(like)
    for name, weight in _weights(model).items():
        if name in theirs and weight.shape == theirs[name].shape and weight.stride() != theirs[name].stride():
            weight.data = torch.empty_like(theirs[name], device=weight.device, dtype=weight.dtype).copy_(weight.data)


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of 2-D convolutions, except those computed from other parameters."""
    convolutions = nn.Conv2d | nn.ConvTranspose2d
    found = {
        name: module._parameters.get("weight")
        for name, module in model.named_modules()
        if isinstance(module, convolutions)
    }
    return {name: weight for name, weight in found.items() if weight is not None and weight.ndim == 4}


def _lay_out(model: nn.Module) -> None:
    for weight in _weights(model).values():
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def _run(model: nn.Module, sample: Inputs, output: Entry) -> Tensor:
    with torch.no_grad(), preserve_modes(model), force_eager(model):
        model.eval()
        return pick(call_model(model, sample.clone()), output, "the model")


def _is_close(found: Tensor, expected: Tensor) -> bool:
    wide = sum_dtype(expected.device)
    difference = found.to(wide) - expected.to(wide)
    return bool(difference.abs().max() <= MAX_RELATIVE_DIFFERENCE * expected.to(wide).abs().max())


def _step(trial: nn.Module, sample: Inputs, output: Entry) -> None:
    """Run a training step as in an adaptation: BatchNorm on batch statistics, and a gradient for every weight."""
    trial.eval()
    for module in trial.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    for parameter in trial.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    with torch.inference_mode(False), torch.enable_grad(), force_eager(trial):
        result = pick(call_model(trial, sample.clone()), output, "the model")
        if result.requires_grad:
            result.float().sum().backward()
