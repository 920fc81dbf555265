"""What a position of a feature map sees of an image, found out by running the model on one batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.errors import TapError
from shiftmend.introspection.modes import force_eager, preserve_modes
from shiftmend.introspection.validate import unwrap


@dataclass(frozen=True)
class Field:
    """What a position `[row, column]` of a feature map sees of the image: pairs are of height and width.

    The window begins at `start + step * position`, which may lie outside the image, in the padding.
    """

    size: tuple[int, int]
    step: tuple[int, int]
    start: tuple[int, int]
    positions: tuple[int, int]


def first_convolution(model: nn.Module, sample: Tensor) -> str:
    """The name of the 2-D convolution that runs first."""
    for name, module, _, _ in _events(unwrap(model), sample):
        if isinstance(module, nn.Conv2d):
            return name
    raise TapError("no 2-D convolution runs in the model, so there are no filters whose patches could be shown")


def receptive_field(model: nn.Module, layer: str, sample: Tensor) -> Field:
    """What each position of a convolution's output sees, from the layers that run before it.

    They must form a chain of convolutions, pooling and layers that keep the shape. A shortcut that keeps the shape, as
    in a plain residual block, does no harm: it sees less than what it goes around.
    """
    plain = unwrap(model)
    modules = dict(plain.named_modules())
    if not isinstance(modules.get(layer), nn.Conv2d):
        known = [name for name, module in modules.items() if isinstance(module, nn.Conv2d)]
        hint = f"; its 2-D convolutions are {', '.join(map(repr, known[:6]))}" if known else ", which has none"
        raise TapError(f"{layer!r} is no 2-D convolution of the model{hint}")
    size, step, start = [1, 1], [1, 1], [0, 0]
    before = sample.shape
    for name, module, read, written in _events(plain, sample):
        window = _window(module)
        if read != before or (window is None and written != read):
            raise TapError(
                f"what {layer!r} sees of an image cannot be told: {name!r} below it breaks the plain chain of "
                "convolutions and pooling; choose an earlier layer"
            )
        before = written
        if window is not None:
            for axis, (kernel, stride, padding, dilation) in enumerate(window):
                start[axis] -= padding * step[axis]
                size[axis] += dilation * (kernel - 1) * step[axis]
                step[axis] *= stride
        if name == layer:
            return Field(_pair(size), _pair(step), _pair(start), _pair(list(written[-2:])))
    raise TapError(f"the convolution {layer!r} does not run in a forward pass of the model")


def _events(model: nn.Module, sample: Tensor) -> list[tuple[str, nn.Module, torch.Size, torch.Size]]:
    """The innermost modules in the order in which they run, with the shapes of what they read and wrote."""
    events: list[tuple[str, nn.Module, torch.Size, torch.Size]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            shapes = [part.shape if isinstance(part, Tensor) else torch.Size() for part in (*args[:1], output)]
            events.append((name, module, shapes[0], shapes[-1]))

        return hook

    with ExitStack() as stack:
        for context in (torch.no_grad(), preserve_modes(model), force_eager(model)):
            stack.enter_context(context)
        model.eval()
        for name, module in model.named_modules():
            inside = [child for child, _ in module.named_children() if child != "parametrizations"]
            if not inside and "parametrizations" not in name.split("."):
                stack.callback(module.register_forward_hook(note(name)).remove)
        model(sample)
    return events


def _window(module: nn.Module) -> list[tuple[int, int, int, int]] | None:
    """Kernel, stride, padding in front and dilation, of height and width; None for what has no window."""
    if isinstance(module, nn.Conv2d):
        before = module._reversed_padding_repeated_twice  # also of padding="same"; the last axis comes first
        paddings = (int(before[2]), int(before[0]))
        return list(zip(module.kernel_size, module.stride, paddings, module.dilation, strict=True))
    if isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
        kernel, padding = _both(module.kernel_size), _both(module.padding)
        stride = _both(module.stride)
        dilation = _both(module.dilation) if isinstance(module, nn.MaxPool2d) else (1, 1)
        return list(zip(kernel, stride, padding, dilation, strict=True))
    return None


def _both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _pair(values: list[int]) -> tuple[int, int]:
    return values[0], values[1]
