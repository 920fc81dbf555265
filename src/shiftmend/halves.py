"""A forward pass in bfloat16, with all weights cast at once.

Autocast casts each weight by a kernel of its own, and each gradient back by another: for a small network a fifth of all
kernels in a step. Here one kernel casts all weights of plain convolutions and linear layers, and one their gradients.
The numbers are the same; gradients of a layer that is used several times are added in bfloat16, as with autocast's
cache of weights. Everything else is left to autocast, and so is a model that does more with its weights than to call
the layers they belong to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shiftmend.taps import eager, modes

_CAST = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
"""Layers of which autocast would cast weight and bias. Subclasses may do something else with them first."""
_Place = tuple[nn.Module, str]


def bfloat16(model: nn.Module, sample: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """What opens a block in which this model runs in bfloat16; its inputs are like `sample`.

    Both ways are tried on the sample, and the faster one is taken only if nothing differs.
    """
    plain = functools.partial(_autocast, sample.device)
    return functools.partial(in_bfloat16, model, sample.device) if _same(model, sample) else plain


@contextmanager
def in_bfloat16(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the model runs in bfloat16, its weights cast at once; their gradients come in their own precision."""
    with _autocast(device), _halved(model):
        yield


def _autocast(device: torch.device) -> torch.autocast:
    # without its cache of weights, which a captured step could not refresh
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def _same(model: nn.Module, sample: Tensor) -> bool:
    """Whether the model gives the same bits either way, and leaves the copies of its weights alone."""
    with modes(model), eager(model), torch.inference_mode(False), torch.enable_grad():
        model.eval()
        with _autocast(sample.device):
            expected = model(sample.clone())  # what goes wrong here would go wrong in any case
        try:
            with _autocast(sample.device), _halved(model) as halves:
                before = [half._version for half, _ in halves]
                got = model(sample.clone())
                untouched = before == [half._version for half, places in halves if _stands(half, places)]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a layer that is kept out of autocast finds weights of another type than its input
            return False
    one, other = (_pytree.tree_leaves(result) for result in (expected, got))
    tensors = [pair for pair in zip(one, other, strict=False) if isinstance(pair[0], Tensor)]
    return untouched and len(one) == len(other) and all(torch.equal(*pair) for pair in tensors)


def _stands(half: Tensor, places: list[_Place]) -> bool:
    return all(module._parameters[name] is half for module, name in places)


@contextmanager
def _halved(model: nn.Module) -> Iterator[list[tuple[Tensor, list[_Place]]]]:
    """Inside, copies of the weights stand in their places."""
    places = _places(model)
    trained = [weight for weight in places if weight.requires_grad]
    frozen = [weight for weight in places if not weight.requires_grad]
    halves: list[Tensor] = [*(_Halved.apply(*trained) if trained else ()), *_cast(frozen, torch.bfloat16)]
    by_weight = dict(zip([*trained, *frozen], halves, strict=True))
    try:
        for weight, half in by_weight.items():
            for module, name in places[weight]:
                module._parameters[name] = half  # type: ignore[assignment]
        yield [(half, places[weight]) for weight, half in by_weight.items()]
    finally:
        for weight in by_weight:
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
