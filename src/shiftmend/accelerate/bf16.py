"""A forward pass in bfloat16, with all weights cast at once.

Autocast casts each weight by a kernel of its own, and each gradient back by another: for a small network a fifth of all
kernels in a step. Here one kernel casts the weights of all convolutions and linear layers, and one their gradients.
Wherever autocast would have cast one of these weights, the copy is used; whoever else looks at a weight, or writes to
it, finds the weight itself. Numbers are those of autocast. Gradients of a layer that is used several times are added in
bfloat16, as with autocast's own cache of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

_CALLS = frozenset(
    {
        functional.linear,
        functional.conv1d,
        functional.conv2d,
        functional.conv3d,
        functional.conv_transpose1d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
    }
)
"""What autocast casts weights for, here: second argument and third."""


@contextmanager
def in_bfloat16(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the model runs in bfloat16; gradients of its weights come in their own precision."""
    # without autocast's cache of weights, which a captured step could not refresh
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        if any(module._compiled_call_impl is not None for module in model.modules()):
            yield  # a compiler fuses the casts by itself, and must not meet a mode
        else:
            with _Halved(_halves(model), device.type):
                yield


@contextmanager
def nothing_cached() -> Iterator[None]:
    """Inside, autocast that the caller has switched on casts a weight whenever it is used.

    It would keep what it once cast until the caller's block ends, and the network would run with weights of before.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Halved(TorchFunctionMode):
    """Calls that autocast would cast a weight for get the copy that there is of it."""

    def __init__(self, halves: Mapping[Tensor, tuple[Tensor, int]], device_type: str) -> None:
        super().__init__()
        self.halves, self.device_type = halves, device_type

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func in _CALLS and self._casts():
            args = (*args[:1], *map(self._half, args[1:3]), *args[3:])
            named = {name: self._half(value) for name, value in named.items()}
        return func(*args, **named)

    def _casts(self) -> bool:
        """A model may have switched autocast off for some of its layers."""
        kind = self.device_type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16

    def _half(self, value: Any) -> Any:
        half, version = self.halves.get(value, (value, 0)) if isinstance(value, nn.Parameter) else (value, 0)
        return half if half is value or value._version == version else value  # written to since it was copied


def _halves(model: nn.Module) -> dict[Tensor, tuple[Tensor, int]]:
    """A copy of each weight that autocast would cast, and the version of the weight that it is a copy of."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | _ConvNd)]
    found = [layer._parameters.get(name) for layer in layers for name in ("weight", "bias")]
    weights = list(dict.fromkeys(weight for weight in found if weight is not None and weight.dtype == torch.float32))
    trained = [weight for weight in weights if weight.requires_grad]
    frozen = [weight for weight in weights if not weight.requires_grad]
    copies = [*(_Cast.apply(*trained) if trained else ()), *_cast(frozen, torch.bfloat16)]
    own = [*trained, *frozen]
    return {weight: (half, weight._version) for weight, half in zip(own, copies, strict=True)}


class _Cast(torch.autograd.Function):
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


Precision = Callable[[], AbstractContextManager[Any]]
