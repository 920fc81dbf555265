"""A forward pass in bfloat16, with all weights cast at once.

Autocast casts each weight by a kernel of its own, and each gradient back by another: for a small network a fifth of all
kernels in a step. Here one kernel casts all weights of plain convolutions and linear layers, and one their gradients;
the numbers are the same. Everything else is left to autocast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CAST = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
"""Layers of which autocast would cast weight and bias. Subclasses may do something else with them first."""
_Place = tuple[nn.Module, str]


@contextmanager
def in_bfloat16(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the model runs in bfloat16; gradients of its weights come in their own precision."""
    # without autocast's cache of weights, which a captured step could not refresh
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False), _halved(model):
        yield


@contextmanager
def _halved(model: nn.Module) -> Iterator[None]:
    places = _places(model)
    trained = [weight for weight in places if weight.requires_grad]
    frozen = [weight for weight in places if not weight.requires_grad]
    halves = dict(zip(trained, _Halved.apply(*trained) if trained else (), strict=True))
    halves.update(zip(frozen, _cast(frozen, torch.bfloat16), strict=True))
    try:
        for weight, half in halves.items():
            for module, name in places[weight]:
                module._parameters[name] = half
        yield
    finally:
        for weight in halves:
            for module, name in places[weight]:
                module._parameters[name] = weight


def _places(model: nn.Module) -> dict[nn.Parameter, list[_Place]]:
    """The weights to cast, each with every place where it stands: one that stands elsewhere, too, is left alone."""
    found: dict[nn.Parameter, list[_Place]] = {}
    elsewhere: set[nn.Parameter] = set()
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if type(module) in _CAST and name in ("weight", "bias") and weight.dtype == torch.float32:
                found.setdefault(weight, []).append((module, name))
            else:
                elsewhere.add(weight)
    return {weight: places for weight, places in found.items() if weight not in elsewhere}


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(weights, torch.bfloat16))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        there = iter(_cast([gradient for gradient in gradients if gradient is not None], torch.float32))
        return tuple(None if gradient is None else next(there) for gradient in gradients)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    result = [torch.empty_like(tensor, dtype=dtype, requires_grad=False) for tensor in tensors]
    if result:
        torch._foreach_copy_(result, [tensor.detach() for tensor in tensors])
    return result
