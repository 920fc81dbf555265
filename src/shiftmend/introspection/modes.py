"""TODO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def is_exported(model: nn.Module) -> bool:
    """Whether it comes from `torch.export`, which forbids to call `eval`."""
    return isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Set compiled calls of `module.compile()` aside: compiled code would not see hooks that came later.

    And nested tensors: `nn.TransformerEncoder` makes them of padded sequences where it needs no gradient, and zeros of
    the padded positions, which have other values with one.
    """
    aside = [(module, "_compiled_call_impl") for module in model.modules() if module._compiled_call_impl]
    encoders = (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))
    aside += [(module, "use_nested_tensor") for module in encoders if hasattr(module, "use_nested_tensor")]
    before = [getattr(module, name) for module, name in aside]
    inside = any(hasattr(module, "_orig_mod") for module in model.modules())
    try:
        for module, name in aside:
            setattr(module, name, None)
        with torch.compiler.set_stance("force_eager") if inside else nullcontext():
            yield
    finally:
        for (module, name), value in zip(aside, before, strict=True):
            setattr(module, name, value)


@contextmanager
def modes(model: nn.Module) -> Iterator[None]:
    """Give every module its own train or eval mode back at the end of the block.

    A module that does more than that in its `train`, such as merging weights for inference, is asked to undo it.
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


def enter_eval(model: nn.Module) -> None:
    """Eval mode; an exported model stays in the one that it was exported in."""
    if not is_exported(model):
        model.eval()


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
