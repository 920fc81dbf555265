"""A model while it is adapted: which layers are in which mode, what is trained, copies of its state, and back again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shiftmend.devices import device_of
from shiftmend.errors import AdaptationError
from shiftmend.layouts import as_in
from shiftmend.methods import Stage
from shiftmend.returned import tensors_in
from shiftmend.states import held
from shiftmend.tracing import trainable


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model, which may still hold tensors of its last training step.

    Such a tensor (a weight computed by `weight_norm`, features that the model remembers) hangs on a graph, from which
    torch refuses to copy it; the copy gets its values alone.
    """
    held: dict[int, Any] = {}
    for tensor in (tensor for module in model.modules() for tensor in tensors_in(vars(module))):
        if tensor.grad_fn is not None:
            held[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(model, held)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model may hold: locks, open files, generators
        raise AdaptationError(
            f"the model cannot be copied ({error}), and the caller's own is never changed; remove from it what "
            "copy.deepcopy does not take"
        ) from error


_KIND = {Tensor.size, Tensor.dim, Tensor.numel, *(getattr(Tensor, name).__get__ for name in ("dtype", "shape", "ndim"))}
_PLACE = {getattr(Tensor, name).__get__ for name in ("device", "is_cuda")}
"""Questions about a tensor, not about its values, to which a copy has the same answer, if it is in the same place."""


class LeftAlone(TorchFunctionMode):
    """Inside, a copy of a model is refused as soon as it reckons with weights of the model itself.

    A function cannot be copied: a lambda or a hook that refers to `self` goes on referring to the caller's model.
    """

    def __init__(self, model: nn.Module, copied: nn.Module) -> None:
        super().__init__()
        shared = {id(tensor) for tensor in _tensors(copied).values()}  # see `refuse_shared`
        self.names = {id(tensor): name for name, tensor in _tensors(model).items() if id(tensor) not in shared}
        self.harmless = _KIND | _PLACE if device_of(model) == device_of(copied) else _KIND
        self.touched: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self.names and func not in self.harmless:
                self.touched = self.names[id(tensor)]
                raise RuntimeError(self.touched)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.touched is not None:
            raise AdaptationError(
                f"a copy of the model still runs with {self.touched!r} of the caller's own, which is never changed: a "
                "function that the model holds, such as a lambda or a hook, refers to it; make that a method, or a "
                "module"
            )


def refuse_shared(model: nn.Module, copied: nn.Module, stages: Sequence[Stage]) -> None:
    """Refuse a copy that shares with the model itself, as one's own `__deepcopy__` may, what is going to change."""
    changed = {id(tensor) for norm in batch_norms(copied) for tensor in norm.buffers()} if stages else set()
    changed |= _trained(copied, stages)
    for name, tensor in _tensors(model).items():
        if id(tensor) in changed:
            raise AdaptationError(
                f"a copy of the model shares {name!r} with the caller's own, which is never changed; copy it in "
                "__deepcopy__, or use a method that leaves it alone"
            )


def _trained(model: nn.Module, stages: Sequence[Stage]) -> set[int]:
    """Which parameters are going to change, by identity: a shared one may go by either name."""
    names = {name for stage in stages for name in stage.parameters}
    return {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in names}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


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
    own = held(model)
    wanted = (name for name, old in before.items() if trainable(old) and old.numel() and name in own)
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
