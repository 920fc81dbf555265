"""Switch a model to eval mode and eager execution for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def find_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """List the BatchNorm layers of a model."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def is_exported(model: nn.Module) -> bool:
    """Tell whether a model comes from `torch.export`, which does not allow calls of `eval`."""
    return isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)


def enter_eval(model: nn.Module) -> None:
    """Switch to eval mode; an exported model stays in the mode that it was exported in."""
    if not is_exported(model):
        model.eval()


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore the train or eval mode of every module at the end of the block.

    A module that overrides `train` is switched back by calling it, because some merge their weights for inference.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            if module.training != training and type(module).train is not nn.Module.train:
                module.train(training)
        for module, training in before:
            module.training = training


@contextmanager
def force_eager(model: nn.Module) -> Iterator[None]:
    """Run a compiled model eagerly inside the block, because compiled code would not see hooks added later.

    Nested tensors are switched off as well. Without gradients, `nn.TransformerEncoder` uses them for padded sequences
    and writes zeros at padded positions; with gradients it writes other values there.
    """
    changed = [(module, "_compiled_call_impl") for module in model.modules() if module._compiled_call_impl]
    encoders = (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))
    changed += [(module, "use_nested_tensor") for module in encoders if hasattr(module, "use_nested_tensor")]
    before = [getattr(module, name) for module, name in changed]
    has_compiled_parts = any(hasattr(module, "_orig_mod") for module in model.modules())
    try:
        for module, name in changed:
            setattr(module, name, None)
        with torch.compiler.set_stance("force_eager") if has_compiled_parts else nullcontext():
            yield
    finally:
        for (module, name), value in zip(changed, before, strict=True):
            setattr(module, name, value)
