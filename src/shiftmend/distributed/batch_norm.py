"""BatchNorm over the batches of all processes; see `shiftmend.distributed.collectives`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shiftmend.distributed.collectives import all_sum, is_distributed, reduce_moments


@contextmanager
def synchronised(model: nn.Module) -> Iterator[None]:
    """Make BatchNorm in train mode use the statistics of all processes' batches inside the block.

    `nn.SyncBatchNorm` does the same on CUDA only, and would replace modules of the model. Here each layer keeps its own
    `forward`; only its call of `functional.batch_norm` is replaced.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)] if is_distributed() else []
    before = [(module, module.__dict__.get("forward")) for module in norms]
    try:
        for module, own in before:
            module.__dict__["forward"] = _synchronised_forward(module, own)
        yield
    finally:
        for module, own in before:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def _synchronised_forward(module: _BatchNorm, own: Callable[..., Any] | None) -> Callable[..., Any]:
    def forward(*inputs: Any, **named: Any) -> Any:
        with _ReplaceBatchNorm():
            if own is not None:
                return own(*inputs, **named)
            if isinstance(module, nn.SyncBatchNorm):
                # The layer's own forward would synchronise a second time, and does not support the CPU.
                return _BatchNorm.forward(module, *inputs, **named)
            return type(module).forward(module, *inputs, **named)

    return forward


class _ReplaceBatchNorm(TorchFunctionMode):
    """Torch function mode that replaces `functional.batch_norm` with `_batch_norm`, which synchronises processes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        chosen = _batch_norm if func is functional.batch_norm else func
        return chosen(*args, **(kwargs or {}))


def _batch_norm(
    values: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `functional.batch_norm` over the batches of all processes."""
    if not training:
        return functional.batch_norm(values, running_mean, running_var, weight, bias, training, momentum, eps)
    with torch.no_grad():
        # Half precision is too coarse for statistics, even under autocast.
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, _all_but_channels(values), correction=0)
        count = values.numel() // values.shape[1]
        samples, mean, squares = reduce_moments(count, mean, variance * count)
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((squares / (samples - 1)).to(running_var.dtype), momentum)
        inverse = (squares / samples + eps).rsqrt()
    result: Tensor = _Normalise.apply(values, weight, bias, mean.to(wide.dtype), inverse.to(wide.dtype), samples)
    return result


class _Normalise(torch.autograd.Function):
    """Autograd function of BatchNorm with statistics over all processes; it saves only its input for backward."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, n: Tensor
    ) -> Tensor:
        ctx.save_for_backward(values, weight, bias, mean, inverse, n)
        result = values.to(mean.dtype).sub(_per_channel(mean, values)).mul_(_per_channel(inverse, values))
        if weight is not None:
            result.mul_(_per_channel(weight, values))
        if bias is not None:
            result.add_(_per_channel(bias, values))
        return result.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, bias, mean, inverse, n = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        normal = values.to(mean.dtype).sub(_per_channel(mean, values)).mul_(_per_channel(inverse, values))
        axes = _all_but_channels(values)
        sums = torch.stack([gradient.sum(axes), (gradient * normal).sum(axes)])
        to_bias = sums[0].to(bias.dtype) if bias is not None else None
        to_weight = sums[1].to(weight.dtype) if weight is not None else None
        if not ctx.needs_input_grad[0]:
            return None, to_weight, to_bias, None, None, None
        # Each value affects the common mean and variance, and thus the results of all processes.
        through_mean, through_variance = all_sum(sums) / n
        scale = inverse if weight is None else inverse * weight
        to_values = gradient - normal.mul_(_per_channel(through_variance, values)) - _per_channel(through_mean, values)
        return to_values.mul_(_per_channel(scale, values)).to(values.dtype), to_weight, to_bias, None, None, None


def _all_but_channels(values: Tensor) -> list[int]:
    return [axis for axis in range(values.ndim) if axis != 1]


def _per_channel(statistic: Tensor, values: Tensor) -> Tensor:
    """Reshape a statistic `[C]` to broadcast over values `[N, C, ...]`."""
    return statistic.view(-1, *[1] * (values.ndim - 2))
