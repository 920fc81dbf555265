"""Where the channels of a convolution's weights lie in memory: innermost is faster, on a GPU and on a CPU.

Maps follow the layout of the weights they meet. Values stay what they are but for rounding, unless a model takes the
memory of its maps for granted, as `view` does; such a model is left as it was.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from shiftmend.introspection.modes import force_eager, preserve_modes
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.utils.devices import preferred_memory_format, sum_dtype

CLOSE = 0.01
"""Of the largest output: rounding of TF32 convolutions stays far below, misread memory does not."""


def channels_last(model: nn.Module, sample: Tensor, output: Entry = None) -> bool:
    """Lay out the weights of 2-D convolutions with the channels innermost; whether that was possible.

    A copy is tried first, in eval mode against the model as it is, and forward and backward with BatchNorm training.
    """
    if not _weights(model) or preferred_memory_format(sample.device) != torch.channels_last:
        return False
    try:
        trial = copy.deepcopy(model)
        _lay_out(trial)
        fits = _same_outputs(model, trial, sample, output)
        _step(trial, sample, output)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a model may say to maps it did not expect
        return False
    if fits:
        _lay_out(model)
    return fits


def as_in(model: nn.Module, like: nn.Module) -> None:
    """Give the weights of convolutions the layout that they have in another model of the same modules."""
    theirs = _weights(like)
    for name, weight in _weights(model).items():
        if name in theirs and weight.shape == theirs[name].shape and weight.stride() != theirs[name].stride():
            weight.data = torch.empty_like(theirs[name], device=weight.device, dtype=weight.dtype).copy_(weight.data)


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Of 2-D convolutions; weights that are computed from others have no memory of their own to lay out."""
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


def _same_outputs(model: nn.Module, trial: nn.Module, sample: Tensor, output: Entry) -> bool:
    results = []
    for one in (model, trial):
        with torch.no_grad(), preserve_modes(one), force_eager(one):
            one.eval()
            result = pick(one(sample.clone()), output, "the model")
            results.append(result.to(sum_dtype(result.device)))
    before, after = results
    return bool((before - after).abs().max() <= CLOSE * before.abs().max())


def _step(trial: nn.Module, sample: Tensor, output: Entry) -> None:
    """As in an adaptation: BatchNorm on the statistics of the batch, and a gradient for every weight."""
    trial.eval()
    for module in trial.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    for parameter in trial.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    with torch.inference_mode(False), torch.enable_grad(), force_eager(trial):
        result = pick(trial(sample.clone()), output, "the model")
        if result.requires_grad:
            result.float().sum().backward()
