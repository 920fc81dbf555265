"""Forward passes in reduced precision, with all weights cast at once.

Autocast casts each weight by its own kernel, and each gradient back by another: a fifth of all kernels in a step of a
small network. `cast_at_once` casts the weights of all convolutions and linear layers by one kernel, and their gradients
by another. On an H200, steps of the paper's CNN are 12 % faster than with plain autocast, and 7 % with eight runs at
once (docs/speed.md), which justifies the extra code.

Wherever autocast would have cast one of these weights, the copy is used. Everything else that reads or writes a weight
meets the weight itself. Numbers are those of autocast. Gradients of a layer that is used several times are added in the
reduced type, as with autocast's own cache of weights.
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

Precision = Callable[[], AbstractContextManager[Any]]
"""Function that makes the context manager of a forward pass: `nullcontext`, or a partial call of `cast_at_once`."""

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
"""Functions whose second and third argument autocast casts."""


@contextmanager
def cast_at_once(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Run a model in reduced precision inside the block; gradients of its weights have the weights' precision.

    Args:
        model: The model that runs inside the block.
        device: Device of the model.
        dtype: `torch.bfloat16` or `torch.float16`.
    """
    # Autocast's cache of weights is off, because a captured step could not refresh it.
    with torch.autocast(device.type, dtype, cache_enabled=False):
        if any(module._compiled_call_impl is not None for module in model.modules()):
            yield  # The compiler fuses the casts by itself, and does not support a TorchFunctionMode.
        else:
            with _UseCopies(_cast_weights(model, dtype), device.type, dtype):
                yield


@contextmanager
def nothing_cached() -> Iterator[None]:
    """Turn autocast's cache of weights off inside the block.

    If the caller has enabled autocast, the cache keeps the first cast of a weight until the caller's block ends, and
    the network would run with outdated weights.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _UseCopies(TorchFunctionMode):
    """A mode in which linear and convolution functions get copies of weights and biases that are cast already.

    The parameter itself is used where autocast is off or casts to another type, and if it has changed since it was
    copied.

    Args:
        copies: For each parameter, its copy in `dtype`, and its version (`_version`) when it was copied.
        device_type: Type of the device whose autocast setting counts.
        dtype: Type of the copies.
    """

    def __init__(self, copies: Mapping[Tensor, tuple[Tensor, int]], device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.copies, self.device_type, self.dtype = copies, device_type, dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func in _CALLS and self._autocasts():
            args = (*args[:1], *map(self._copy_of, args[1:3]), *args[3:])
            named = {name: self._copy_of(value) for name, value in named.items()}
        return func(*args, **named)

    def _autocasts(self) -> bool:
        """Return whether autocast is on, since a model may turn it off for some layers."""
        kind = self.device_type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.dtype

    def _copy_of(self, value: Any) -> Any:
        copy, version = self.copies.get(value, (value, 0)) if isinstance(value, nn.Parameter) else (value, 0)
        return copy if copy is value or value._version == version else value  # Written to since it was copied.


def _cast_weights(model: nn.Module, dtype: torch.dtype) -> dict[Tensor, tuple[Tensor, int]]:
    """Return a cast copy of each weight that autocast would cast, with the version of the weight at that time."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | _ConvNd)]
    found = [layer._parameters.get(name) for layer in layers for name in ("weight", "bias")]
    weights = list(dict.fromkeys(weight for weight in found if weight is not None and weight.dtype == torch.float32))
    trained = [weight for weight in weights if weight.requires_grad]
    frozen = [weight for weight in weights if not weight.requires_grad]
    copies = [*(_Cast.apply(dtype, *trained) if trained else ()), *_cast(frozen, dtype)]
    own = [*trained, *frozen]
    return {weight: (copy, weight._version) for weight, copy in zip(own, copies, strict=True)}


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        there = iter(_cast([gradient for gradient in gradients if gradient is not None], torch.float32))
        return (None, *(None if gradient is None else next(there) for gradient in gradients))


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    result = [torch.empty_like(tensor, dtype=dtype, requires_grad=False) for tensor in tensors]
    if result:
        torch._foreach_copy_(result, [tensor.detach() for tensor in tensors])
    return result
