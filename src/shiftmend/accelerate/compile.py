"""TODO."""

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
"""What the compiler calls it to make one of small kernels that do not wait for each other, such as casts of weights."""


_USUAL_NUMBERS = "fallback_random"
"""What it calls it to draw random numbers as torch does elsewhere."""


def captured_compiled(
    capture: Callable[[bool], CapturedEpoch | None], model: nn.Module, optimiser: optim.SGD, dropout: bool, what: str
) -> CapturedEpoch | None:
    """What `capture` makes while the model is compiled; None if that does not work, or does not train all of `what`.

    `capture` is told whether the model is compiled.
    """
    with compiled(model, dropout):
        quick = capture(True)
    left_out = _without_gradient(optimiser) if quick else set()
    # what no loss depends on gets no gradient in either
    if left_out and not (capture(False) and left_out == _without_gradient(optimiser)):
        logger.warning("compiled steps are not used: a parameter of %r gets no gradient in them", what)
        return None
    return quick


def _without_gradient(optimiser: optim.SGD) -> set[Tensor]:
    """What the last step should have trained, and has not: compiled code does so if torch mistook it."""
    wanted = (parameter for group in optimiser.param_groups for parameter in group["params"])
    return {parameter for parameter in wanted if parameter.grad is None}


@contextmanager
def compiled(model: nn.Module, dropout: bool = False) -> Iterator[None]:
    """Inside, calls of the model go through `torch.compile`, hooks included; afterwards nothing is left of it.

    With `dropout`, compiled code draws the random numbers that other code would draw, so that runs can be compared.
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
    """Settings with which compiled code is used again for another copy of the model, but not for other work.

    Torch would not look whether hooks are others. 2.11 also takes the parameters of a module that it has seen before
    for unchanged, and would train in each stage of BUFR what the first one has trained. Each set of trained layers is
    compiled by itself; after eight, torch would go on without.
    """
    wanted = {
        "skip_nnmodule_hook_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        "use_recursive_dict_tags_for_guards": False,
        "recompile_limit": 256,
    }
    return {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}


def _call(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """What `model(...)` does. `Module.compile` would leave a model of torch's own, such as `Sequential`, as it is."""
    return model._call_impl(*inputs, **options)
