"""Temperature scaling: find the temperature for a given mean confidence, and fold it into the head of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from shiftmend.engine.method import check_positive
from shiftmend.introspection.call import call_model
from shiftmend.introspection.model_state import is_trainable, is_writable
from shiftmend.introspection.modes import enter_eval, force_eager, preserve_modes
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.taps import Tap, module_of
from shiftmend.utils.devices import device_of, sum_dtype
from shiftmend.utils.rng import preserve_rng
from shiftmend.utils.tensor_tree import Inputs

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.05, 50.0
"""Bounds of the search for a temperature."""

_HALVINGS = 60
"""Steps of the bisection; the interval of log T, about 7 wide, shrinks to the precision of float64."""


def find_temperature(logits: Tensor, mean_confidence: float) -> float:
    """Find the temperature T at which the mean of `max softmax(logits / T)` equals a given confidence.

    Args:
        logits: Class logits `[N, K]`, or `[N, K, ...]` with one prediction per position. `[N]` and `[N, 1]` are binary
            logits of the positive class.
        mean_confidence: The wanted mean confidence; clipped to the possible range, 1 / K to 1.

    Returns:
        A temperature from 0.05 to 50, or one of these bounds if no temperature between them gives that confidence.

    Example:
        >>> logits = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) * 4
        >>> temperature = find_temperature(logits, 0.7)
        >>> round(float((logits / temperature).softmax(1).amax(1).mean()), 4)
        0.7
    """
    binary = logits.ndim == 1 or logits.shape[1] == 1
    # Differences to the largest logit, which belongs to the predicted class.
    gaps = logits.detach().to(sum_dtype(logits.device))
    gaps = torch.stack([gaps.abs(), torch.zeros_like(gaps)], 1) if binary else gaps
    gaps = gaps - gaps.amax(1, keepdim=True)
    wanted = min(1.0, max(1 / gaps.shape[1], float(mean_confidence)))
    low, high = math.log(LOWEST_TEMPERATURE), math.log(HIGHEST_TEMPERATURE)

    def is_too_confident(log_temperature: float) -> bool:
        return float((1 / (gaps / math.exp(log_temperature)).exp().sum(1)).mean()) > wanted

    # Confidence falls with temperature, so the bounds are checked first.
    if is_too_confident(high):
        return HIGHEST_TEMPERATURE
    if not is_too_confident(low):
        return LOWEST_TEMPERATURE
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_confident(middle) else (low, middle)
    return math.exp((low + high) / 2)


def fold_temperature(
    model: nn.Module,
    head: Tap | str,
    temperature: float,
    sample: Inputs | None = None,
    output: Entry = None,
) -> str | None:
    """Divide a model's logits by a temperature, by dividing weight and bias of its head in place.

    Predictions do not change, and no module is added to the model. The model is left unchanged if this would not divide
    its logits: if the head has parameters other than weight and bias, shares or computes them, or if further layers
    follow the head.

    Args:
        model: The model, changed in place.
        head: The tap `logits` (`profile.specs["logits"]`), or the name of the module that returns the logits.
        temperature: A positive number.
        sample: A small batch of inputs `[N, ...]`. The model runs on this batch in eval mode before and after, to check
            that its output was divided.
        output: Entry of a tuple or dict that is the model's output.

    Returns:
        None if the temperature was folded in, otherwise the reason why it was not.

    Raises:
        AdaptationError: If the temperature is not a positive number.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> inputs = torch.randn(2, 4)
        >>> before = model(inputs)
        >>> fold_temperature(model, "2", 2.0, inputs)
        >>> torch.allclose(model(inputs), before / 2)
        True
    """
    check_positive(temperature, "the temperature")
    tap = Tap.parse("logits", head)
    reason = _find_obstacle(model, tap)
    if reason is not None:
        return reason
    module = module_of(model, tap)
    kept = {name: parameter.detach().clone() for name, parameter in module.named_parameters(recurse=False)}
    before = None if sample is None else _run(model, sample, output)
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.div_(temperature)
    if sample is None or before is None or _is_divided(_run(model, sample, output), before, temperature):
        return None
    with torch.no_grad():
        for name, value in kept.items():
            module.get_parameter(name).copy_(value)
    return f"what the model returns is not linear in the weights of {tap.module!r}: something is computed behind them"


def _find_obstacle(model: nn.Module, tap: Tap) -> str | None:
    """Return the reason why a temperature cannot be folded into weight and bias of a head; None if none is found.

    The check covers the parameters of the head and other uses of their memory. The model is not run, so layers behind
    the head remain undetected.
    """
    if tap.side == "input":
        return f"the logits are what {tap.module!r} reads, not what it returns"
    module = module_of(model, tap)
    own = dict(module.named_parameters(recurse=False))
    if is_parametrized(module) or any(name.startswith("weight_") for name in own):
        return f"the weight of {tap.module!r} is computed from other parameters"
    if "weight" not in own or not set(own) <= {"weight", "bias"} or any(True for _ in module.children()):
        return f"{tap.module!r} ({type(module).__name__}) has other parameters than a weight and a bias"
    if not all(is_trainable(parameter) and is_writable(parameter.detach()) for parameter in own.values()):
        return f"the weights of {tap.module!r} are of a type that cannot be divided in place"
    memory = {parameter.untyped_storage().data_ptr() for parameter in own.values()}
    names = {f"{tap.module}.{name}" if tap.module else name for name in own}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, other in every:
        strided = other.layout == torch.strided
        if strided and name not in names and other.numel() and other.untyped_storage().data_ptr() in memory:
            return f"the weights of {tap.module!r} are shared with {name!r}"
    return None


def _run(model: nn.Module, sample: Inputs, output: Entry) -> Tensor:
    """Run a model in eval mode with a fixed random seed."""
    place = device_of(model)
    with torch.no_grad(), preserve_modes(model), force_eager(model), preserve_rng(place):
        torch.manual_seed(0)
        enter_eval(model)
        return pick(call_model(model, sample.to(place)), output, "the model").detach().clone()


def _is_divided(after: Tensor, before: Tensor, temperature: float) -> bool:
    """Tell whether `after` equals `before` divided by the temperature, up to rounding."""
    if not after.is_floating_point():
        return False
    wide = sum_dtype(after.device)
    error = (after.to(wide) * temperature - before.to(wide)).abs().max()
    # Tolerance for rounded weights and sums; a weight in 16 bits has two to three digits.
    tolerance = max(1e-4, 8 * torch.finfo(after.dtype).eps)
    return bool(error <= tolerance * before.to(wide).abs().max())
