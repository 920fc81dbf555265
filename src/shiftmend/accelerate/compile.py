"""Compilation of captured steps by `torch.compile`, for any model and every set of trained layers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from shiftmend.accelerate.cuda_graphs import CapturedEpoch
from shiftmend.introspection.modes import force_eager

logger = logging.getLogger(__name__)

_FEWER_KERNELS = "combo_kernels"
"""Inductor option that fuses small independent kernels, such as casts of weights."""


_USUAL_NUMBERS = "fallback_random"
"""Inductor option that draws random numbers as eager code does."""


def capture_compiled(
    capture: Callable[[bool], CapturedEpoch | None],
    model: nn.Module,
    optimiser: optim.Optimizer,
    dropout: bool,
    what: str,
) -> CapturedEpoch | None:
    """Capture steps while the model is compiled.

    Args:
        capture: Function that captures a step; its argument says whether the model is compiled.
        model: The model to compile.
        optimiser: Optimiser of the trained parameters.
        dropout: Whether dropout is on.
        what: Name of the stage, for the log.

    Returns:
        The captured epoch, or None if compiling fails or a trained parameter gets no gradient in compiled steps.
    """
    with compiled(model, dropout):
        quick = capture(True)
    left_out = _without_gradient(optimiser) if quick else set()
    # A parameter that no loss depends on has no gradient in either case.
    if left_out and not (capture(False) and left_out == _without_gradient(optimiser)):
        logger.warning("compiled steps are not used: a parameter of %r gets no gradient in them", what)
        return None
    return quick


def _without_gradient(optimiser: optim.Optimizer) -> set[Tensor]:
    """Return the trained parameters without a gradient after a step, a sign of wrongly reused code."""
    wanted = (parameter for group in optimiser.param_groups for parameter in group["params"])
    return {parameter for parameter in wanted if parameter.grad is None}


@contextmanager
def compiled(model: nn.Module, dropout: bool = False) -> Iterator[None]:
    """Route calls of the model through `torch.compile`, including hooks, inside the block.

    With `dropout`, compiled code draws the same random numbers as eager code, so that runs can be compared.
    """
    wanted = {_FEWER_KERNELS: True, _USUAL_NUMBERS: dropout}
    known = torch._inductor.list_options()
    options: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
    with force_eager(model), torch._dynamo.config.patch(_full_guards()):
        run = torch.compile(_call, dynamic=False, options=options)
        model._compiled_call_impl = functools.partial(run, model)
        try:
            yield
        finally:
            model._compiled_call_impl = None


def _full_guards() -> dict[str, Any]:
    """Return settings with which compiled code is reused for another copy of the model, but for nothing else.

    By default, torch does not check whether hooks have changed. Torch 2.11 also assumes that the parameters of a known
    module never change, so every stage of BUFR would train the parameters of the first. Each set of trained layers is
    compiled separately; by default, torch stops compiling after eight of them.
    """
    wanted = {
        "skip_nnmodule_hook_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        "use_recursive_dict_tags_for_guards": False,
        "recompile_limit": 256,
    }
    return {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}


def _call(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Call a model. `Module.compile` would not compile torch's own modules, such as `Sequential`."""
    return model._call_impl(*inputs, **options)
