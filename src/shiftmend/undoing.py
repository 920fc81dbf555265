"""What a capture must not change for a model, or take away from under it.

A graph reads and writes the memory that was there when it was captured, whatever the model holds by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn, optim

from shiftmend.returned import tensors_in
from shiftmend.states import is_writable


def kept_in_place(model: nn.Module) -> Callable[[], None]:
    """What brings buffers back to where they lie now, with the values that they have by then.

    Some layers put a new tensor in the place of an old one in each step, of which a graph would not know.
    """
    places = [
        (module._buffers, name, tensor)
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and is_writable(tensor)
    ]

    def bring_back() -> None:
        moved = []
        for buffers, name, tensor in places:
            new = buffers.get(name)
            if new is not None and new is not tensor and (new.shape, new.dtype) == (tensor.shape, tensor.dtype):
                moved.append((buffers, name, tensor, new.detach().clone()))  # it may be another's old tensor
        for buffers, name, tensor, value in moved:
            buffers[name] = tensor.copy_(value)

    return bring_back


@contextmanager
def undone(model: nn.Module, optimiser: optim.SGD) -> Iterator[None]:
    """Afterwards weights, statistics and momentum are what they were, in the same memory.

    Momentum that had not begun is zero afterwards, from which the first step is the same. Steps that leave new tensors
    in the place of buffers are refused: captured, they would go on reading the old ones.
    """
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if is_writable(tensor)]
    before = [tensor.detach().clone() for tensor in tensors]
    momentum = {parameter: state["momentum_buffer"].clone() for parameter, state in optimiser.state.items()}
    finished = False
    try:
        yield
        _refuse_new(buffers)
        finished = True
    finally:
        for module, own in buffers:
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            if not finished:
                optimiser.state.clear()
            for parameter, kept in momentum.items():
                if finished:
                    optimiser.state[parameter]["momentum_buffer"].copy_(kept)
                else:
                    optimiser.state[parameter]["momentum_buffer"] = kept
            for parameter, state in optimiser.state.items():
                if parameter not in momentum:
                    state["momentum_buffer"].zero_()


def _refuse_new(buffers: list[tuple[nn.Module, dict[str, Tensor | None]]]) -> None:
    for module, own in buffers:
        for name, tensor in own.items():
            if module._buffers.get(name) is not tensor:
                raise RuntimeError(f"a step leaves a new tensor in the place of {name!r} of a {type(module).__name__}")


def held_by(model: nn.Module) -> list[Tensor]:
    """Every tensor that a model holds, for who keeps a graph of it, since the model may come to hold another.

    A mask or a table that it makes for the size of a batch is replaced when one of another size comes, and would be
    freed while a graph reads it.
    """
    return [tensor.detach() for module in model.modules() for tensor in tensors_in(vars(module))]


@contextmanager
def as_before_if_it_fails(model: nn.Module) -> Iterator[None]:
    """What a model comes to hold while a capture fails is taken away again: it was never computed."""
    owned = [attributes for module in model.modules() for attributes in (vars(module), module._buffers)]
    before = [dict(attributes) for attributes in owned]
    try:
        yield
    except BaseException:
        for attributes, values in zip(owned, before, strict=True):
            attributes.clear()
            attributes.update(values)
        raise
