"""The model during adaptation: layer modes, trained parameters, and restoring an ordinary model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.accelerate.memory_format import as_in
from shiftmend.engine.method import Stage
from shiftmend.introspection.model_state import is_trainable, named_tensors
from shiftmend.introspection.modes import find_batch_norms
from shiftmend.utils.devices import device_of


def _trained_ids(model: nn.Module, stages: Sequence[Stage]) -> set[int]:
    """Return the ids of the parameters that will change; a shared parameter has several names but one id."""
    names = {name for stage in stages for name in stage.parameters}
    return {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in names}


def enter_adapting_modes(model: nn.Module, dropout: bool = False) -> None:
    """Put BatchNorm into train mode and everything else into eval mode, or into train mode if `dropout`."""
    model.train(dropout)
    for module in model.modules():
        # On CUDA, a recurrent layer is differentiable in train mode only. `hold_layer_options` turns off its dropout.
        if isinstance(module, _BatchNorm | nn.RNNBase):
            module.train()


def unfreeze(model: nn.Module, stage: Stage) -> list[nn.Parameter]:
    """Set `requires_grad` for exactly the parameters of a stage, and return them."""
    wanted = _trained_ids(model, [stage])
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
        parameter.grad = None
    return [parameter for parameter in model.parameters() if id(parameter) in wanted]


def make_ordinary(model: nn.Module, like: nn.Module) -> nn.Module:
    """Put an adapted model into eval mode, with the device, memory format and `requires_grad` flags of `like`."""
    model.eval().to(device_of(like))
    as_in(model, like)
    for ours, theirs in zip(model.parameters(), like.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
        ours.grad = None
    return model


def is_finite(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Return whether all weights and buffers are finite; a loss can stay finite although weights are not.

    A buffer that held infinities before, such as a mask, may keep them.
    """
    own = named_tensors(model)
    wanted = (name for name, old in before.items() if is_trainable(old) and old.numel() and name in own)
    now = {name: own[name] for name in wanted if own[name].shape == before[name].shape}
    # The norm of all tensors takes a few kernels and propagates NaN and infinity. If only its square overflows, the
    # tensors are checked one by one. The largest magnitude would need no second check, but is much slower on a CPU.
    real = [torch.view_as_real(value) if value.is_complex() else value for value in now.values()]
    if not now or bool(torch.isfinite(nn.utils.get_total_norm(real))):
        return True
    flags = [(torch.isfinite(value) | ~torch.isfinite(before[name])).all() for name, value in now.items()]
    return bool(torch.stack(flags).all())


@contextmanager
def hold_layer_options(model: nn.Module, dropout: bool = False) -> Iterator[None]:
    """Set options of layers inside the block, and restore them afterwards.

    BatchNorm with a cumulative average (`momentum=None`) would hardly follow the target, and gets the usual momentum of
    0.1. Recurrent layers, which run in train mode, lose their dropout unless the method wants it.
    """
    averaging = [module for module in find_batch_norms(model) if module.momentum is None]
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase) and not dropout]
    recurrent = [(layer, layer.dropout) for layer in layers]
    try:
        for norm in averaging:
            norm.momentum = 0.1
        for layer, _ in recurrent:
            layer.dropout = 0.0
        yield
    finally:
        for norm in averaging:
            norm.momentum = None
        for layer, own in recurrent:
            layer.dropout = own
