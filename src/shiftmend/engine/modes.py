"""TODO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.accelerate.memory_format import as_in
from shiftmend.engine.method import Stage
from shiftmend.introspection.model_state import is_trainable, named_tensors
from shiftmend.introspection.modes import find_batch_norms
from shiftmend.utils.devices import device_of


def _trained(model: nn.Module, stages: Sequence[Stage]) -> set[int]:
    """Which parameters are going to change, by identity: a shared one may go by either name."""
    names = {name for stage in stages for name in stage.parameters}
    return {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in names}


def enter_adapting_modes(model: nn.Module, dropout: bool = False) -> None:
    """BatchNorm on the statistics of the batch, which it also tracks; everything else in eval mode, dropout off."""
    model.train(dropout)
    for module in model.modules():
        # a recurrent layer differentiates on CUDA in train mode only; its dropout is off for the run
        if isinstance(module, _BatchNorm | nn.RNNBase):
            module.train()


def fresh_optimiser(model: nn.Module, stage: Stage, momentum: float) -> optim.SGD | None:
    """An optimiser over what the stage trains (None if that is nothing); nothing else requires a gradient."""
    wanted = _trained(model, [stage])
    trained = []
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
        parameter.grad = None
        if id(parameter) in wanted:
            trained.append(parameter)
    if not trained:
        return None
    fused = all(parameter.is_cuda and parameter.is_floating_point() for parameter in trained)
    return optim.SGD(
        trained, lr=stage.learning_rate, momentum=momentum, weight_decay=stage.weight_decay, fused=fused or None
    )


def settle(model: nn.Module, like: nn.Module) -> nn.Module:
    """Make an adapted model an ordinary one again: in eval mode, with device, layout and gradient flags of `like`."""
    model.eval().to(device_of(like))
    as_in(model, like)
    for ours, theirs in zip(model.parameters(), like.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
        ours.grad = None
    return model


def still_finite(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Whether no weight or statistic has gone bad: a loss can stay finite over weights that are not.

    A buffer that held infinities before (a mask) may keep them.
    """
    own = named_tensors(model)
    wanted = (name for name, old in before.items() if is_trainable(old) and old.numel() and name in own)
    now = {name: own[name] for name in wanted if own[name].shape == before[name].shape}
    # the length of all, in a few kernels: NaN and infinity come through, and what only its square makes infinite is
    # looked at again; the largest magnitude, which needs no second look, takes a CPU many times as long
    real = [torch.view_as_real(value) if value.is_complex() else value for value in now.values()]
    if not now or bool(torch.isfinite(nn.utils.get_total_norm(real))):
        return True
    flags = [(torch.isfinite(value) | ~torch.isfinite(before[name])).all() for name, value in now.items()]
    return bool(torch.stack(flags).all())


@contextmanager
def steady(model: nn.Module, dropout: bool = False) -> Iterator[None]:
    """What has to hold for the length of a run, whatever the method, and is undone at its end.

    BatchNorm that averages over everything it has ever seen would hardly notice the target; it gets the usual
    momentum. Recurrent layers, which run in train mode, lose their dropout unless the method wants it.
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
