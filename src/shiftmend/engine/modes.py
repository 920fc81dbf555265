"""The model while it is adapted: layer modes, trained parameters, and the way back to an ordinary model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.accelerate.memory_format import as_in
from shiftmend.engine.method import Stage
from shiftmend.errors import AdaptationError
from shiftmend.introspection.model_state import held, trainable
from shiftmend.introspection.modes import batch_norms
from shiftmend.utils.devices import device_of


def refuse_shared_tensors(model: nn.Module, copied: nn.Module, stages: Sequence[Stage]) -> None:
    """Raise if a copy shares a tensor that will change with the caller's model, as a custom `__deepcopy__` may."""
    changed = {id(tensor) for norm in batch_norms(copied) for tensor in norm.buffers()} if stages else set()
    changed |= _trained_ids(copied, stages)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) in changed:
            raise AdaptationError(
                f"a copy of the model shares {name!r} with the caller's own, which is never changed; copy it in "
                "__deepcopy__, or use a method that leaves it alone"
            )


def _trained_ids(model: nn.Module, stages: Sequence[Stage]) -> set[int]:
    """Return the parameters that will change, by identity, since a shared parameter has several names."""
    names = {name for stage in stages for name in stage.parameters}
    return {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in names}


def enter_adapting_modes(model: nn.Module, dropout: bool = False) -> None:
    """Let BatchNorm use and track batch statistics; put everything else into eval mode, or train mode for dropout."""
    model.train(dropout)
    for module in model.modules():
        # A recurrent layer is differentiable on CUDA in train mode only. `hold_layer_options` switches its dropout off.
        if isinstance(module, _BatchNorm | nn.RNNBase):
            module.train()


def unfreeze(model: nn.Module, stage: Stage) -> list[nn.Parameter]:
    """Let exactly the parameters of a stage require gradients, and return them."""
    wanted = _trained_ids(model, [stage])
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
        parameter.grad = None
    return [parameter for parameter in model.parameters() if id(parameter) in wanted]


def make_ordinary(model: nn.Module, like: nn.Module) -> nn.Module:
    """Put an adapted model into eval mode, with the device, memory format and gradient flags of `like`."""
    model.eval().to(device_of(like))
    as_in(model, like)
    for ours, theirs in zip(model.parameters(), like.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
        ours.grad = None
    return model


def is_finite(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Return whether all weights and statistics are still finite: a loss can stay finite over weights that are not.

    A buffer that held infinities before, such as a mask, may keep them.
    """
    own = held(model)
    wanted = (name for name, old in before.items() if trainable(old) and old.numel() and name in own)
    now = {name: own[name] for name in wanted if own[name].shape == before[name].shape}
    # The norm of all tensors takes a few kernels and passes NaN and infinity on. Where only its square overflows, the
    # tensors are looked at one by one. The largest magnitude would need no second look, but takes a CPU much longer.
    real = [torch.view_as_real(value) if value.is_complex() else value for value in now.values()]
    if not now or bool(torch.isfinite(nn.utils.get_total_norm(real))):
        return True
    flags = [(torch.isfinite(value) | ~torch.isfinite(before[name])).all() for name, value in now.items()]
    return bool(torch.stack(flags).all())


@contextmanager
def hold_layer_options(model: nn.Module, dropout: bool = False) -> Iterator[None]:
    """Set options of layers for the length of a run, and restore them afterwards.

    BatchNorm that averages over everything it has ever seen (`momentum=None`) would hardly notice the target and gets
    the usual momentum of 0.1. Recurrent layers, which run in train mode, lose their dropout unless the method wants it.
    """
    averaging = [module for module in batch_norms(model) if module.momentum is None]
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
