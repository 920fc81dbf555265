"""Validation of models: the one place that refuses them.

`validate` lists what prevents a model from being used, like the validator of Opacus. `check_model` raises the first
problem, `unwrap` also removes wrappers, and `copy_model` makes the copy that is adapted.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shiftmend.errors import AdaptationError, DataError, ShiftmendError, TapError
from shiftmend.introspection.call import accepts, call_model
from shiftmend.introspection.model_state import find_owners, is_trainable
from shiftmend.introspection.modes import enter_eval, find_batch_norms, force_eager, is_exported, preserve_modes
from shiftmend.introspection.outputs import Entry, find_tensors, pick
from shiftmend.utils.checks import kind
from shiftmend.utils.tensor_tree import Inputs, TensorTree, describe_samples

_FORWARD_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""Exceptions that models raise for unsuitable inputs."""

_PLAIN_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)
"""Exceptions whose text is clear without their type."""


@dataclass(frozen=True)
class Problem:
    """A reason why a model cannot be used: a sentence that says what was expected and what to do."""

    message: str
    error: type[ShiftmendError]
    """The class that `check_model` raises."""
    cause: BaseException | None = None
    """The exception that the model raised."""


def validate(
    model: Any,
    samples: Sequence[Inputs] = (),
    *,
    output: Entry = None,
    tapped: bool = True,
    traced: bool = False,
    trained: bool = False,
    original: nn.Module | None = None,
) -> list[Problem]:
    """List what prevents a model from being used; the list is empty for a valid model.

    Args:
        model: The object that a caller passed as the model.
        samples: Batches of inputs `[N, ...]` on the model's device. The model runs on each of them in eval mode.
        output: Entry of a tuple or dict that is the model's output; not checked if None.
        tapped: Whether hooks are attached to some modules, which scripted and exported models do not allow.
        traced: Whether hooks are attached to every module with parameters, to find the last layer.
        trained: Whether the model will be adapted, so that its weights must be finite.
        original: The model that `model` is a copy of. A copy that calls the original in its forward pass is refused.

    Returns:
        One entry for each problem. The model runs only if there is no other problem.
    """
    if not isinstance(model, nn.Module):
        stored = isinstance(model, str | os.PathLike | Mapping)
        advice = ". Build the network and load its weights into it first" if stored else ""
        return [Problem(f"Expected the model to be a torch.nn.Module, got {kind(model)}{advice}.", TapError)]
    problems = [*_check_hooks(model, traced)] if tapped else []
    if any(is_lazy(parameter) or parameter.is_meta for parameter in model.parameters()):
        message = (
            "Expected parameters with values, got lazy layers or the device 'meta'. Load the weights first, after a "
            "batch through lazy layers."
        )
        problems.append(Problem(message, TapError))
    elif trained:
        problems += _check_weights(model)
    return problems or [*_check_forward(model, samples, output, original)]


def check_model(model: nn.Module, samples: Sequence[Inputs] = (), **options: Any) -> None:
    """Raise the first problem that `validate` finds, with the same arguments."""
    for problem in validate(model, samples, **options):
        raise problem.error(problem.message) from problem.cause


def run_checked(model: nn.Module, sample: Inputs, *, output: Entry = None, original: nn.Module | None = None) -> Any:
    """Run a model on a batch, raise the first problem that `validate` finds, and return the model's output."""
    returned = _try_forward(model, sample, original)
    for problem in [returned] if isinstance(returned, Problem) else _check_entry(returned, output):
        raise problem.error(problem.message) from problem.cause
    return returned


def unwrap(model: nn.Module, **options: Any) -> nn.Module:
    """Validate a model, and return the module inside `torch.compile` or data-parallel wrappers; see `validate`."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        model = inner
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
    check_model(model, **options)
    return model


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model, so that the caller's model is never changed.

    A model may still refer to tensors of its last training step, such as a weight computed by `weight_norm` or cached
    features. Torch refuses to copy tensors with an autograd graph, so the copy gets their values only.
    """
    values: dict[int, Any] = {}
    for tensor in (tensor for module in model.modules() for tensor in find_tensors(vars(module))):
        if tensor.grad_fn is not None:
            values[id(tensor)] = tensor.detach().clone()
    try:
        copied = copy.deepcopy(model, values)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError, TypeError, ValueError, copy.Error, pickle.PicklingError) as error:
        raise AdaptationError(
            "Expected a model that copy.deepcopy can copy, since the original is never changed, got an error: "
            f"{error}. Remove what cannot be copied."
        ) from error
    own = {id(tensor) for tensor in (*copied.parameters(), *copied.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) in own:
            raise AdaptationError(
                f"Expected a copy of the model with tensors of its own, got {name!r} shared with the original. Copy it "
                "in __deepcopy__."
            )
    return copied


def _check_hooks(model: nn.Module, traced: bool) -> Iterator[Problem]:
    if isinstance(model, torch.jit.ScriptModule):
        yield Problem(
            "Expected an ordinary module, since a scripted one cannot be tapped. Pass the module it was scripted from.",
            TapError,
        )
    elif is_exported(model):
        yield Problem(
            "Expected an ordinary module, since an exported one cannot be tapped. Pass the module it was exported "
            "from.",
            TapError,
        )
    elif traced:
        owners = find_owners(model)
        if not owners:
            yield Problem(
                "Expected a model with parameters, got one without, in which nothing can be tapped or adapted.",
                TapError,
            )
        for name in owners:
            if isinstance(model.get_submodule(name), torch.jit.ScriptModule):
                message = f"Expected ordinary modules, got {name!r}, which is scripted. Put its original there."
                yield Problem(message, TapError)


def _check_weights(model: nn.Module) -> Iterator[Problem]:
    """Find weights that would make every loss NaN, which would otherwise look like a bad learning rate."""
    for name, parameter in model.named_parameters():
        if not is_trainable(parameter):
            continue
        value = parameter.detach()
        # A mask among the parameters may contain infinities.
        bad = ~torch.isfinite(value) if parameter.requires_grad else torch.isnan(value)
        if bool(bad.any()):
            message = (
                f"Expected finite weights, got NaN or infinity in {name!r} before anything is adapted. Load those of a "
                "model that works."
            )
            yield Problem(message, AdaptationError)


def _check_forward(
    model: nn.Module, samples: Sequence[Inputs], output: Entry, original: nn.Module | None
) -> Iterator[Problem]:
    """Run the model on each batch; batches may differ in size if each is padded separately."""
    for number, sample in enumerate(samples):
        returned = _try_forward(model, sample, original)
        if isinstance(returned, Problem):
            if number > 0 and returned.error is DataError:
                message = f"Expected batches of one size. {returned.message} Bring all samples to one size first."
                returned = replace(returned, message=message)
            yield returned
            return
        if number == 0:
            yield from _check_entry(returned, output)


def _try_forward(model: nn.Module, sample: Inputs, original: nn.Module | None) -> Any:
    """Run the model in eval mode without gradients; return its output, or the problem."""
    try:
        with torch.no_grad(), preserve_modes(model), force_eager(model), _watch_original(original, model):
            enter_eval(model)
            return call_model(model, sample)
    except torch.OutOfMemoryError:
        raise
    except _OriginalCalled as error:
        return Problem(str(error), AdaptationError)
    except _FORWARD_ERRORS as error:
        return Problem(_explain(model, sample, error), DataError, error)


def _check_entry(returned: Any, output: Entry) -> Iterator[Problem]:
    if output is None:
        return
    try:
        pick(returned, output, "the model")
    except TapError as error:
        yield Problem(str(error), TapError)


class _OriginalCalled(Exception):
    """Raised when a copy calls a module of the original model."""


@contextmanager
def _watch_original(original: nn.Module | None, copied: nn.Module) -> Iterator[None]:
    """Raise as soon as a module of the original is called.

    Functions cannot be copied: a lambda or hook that refers to `self` still refers to the caller's model.
    """
    shared, thread = {id(module) for module in copied.modules()}, threading.get_ident()
    with ExitStack() as stack:
        for name, module in original.named_modules() if original is not None else ():
            if id(module) in shared or isinstance(module, torch.jit.ScriptModule):
                continue

            def stop(module: nn.Module, inputs: Any, name: str = name) -> None:
                # Another thread may still predict with the caller's model.
                if threading.get_ident() != thread:
                    return
                raise _OriginalCalled(
                    "Expected the copied model to run by itself, but a lambda or hook calls "
                    f"{name or type(module).__name__!r} of the original. Use a method or module."
                )

            stack.callback(module.register_forward_pre_hook(stop).remove)
        yield


def _explain(model: nn.Module, sample: Inputs, error: Exception) -> str:
    """Explain in one sentence why a model does not accept some inputs, with advice."""
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines and isinstance(error, _PLAIN_ERRORS) else " ".join([type(error).__name__, *lines[:1]])
    advice = _advise(model, sample)
    return f"Expected inputs that the model takes, got {describe_samples(sample)}: {reason.rstrip('.')}.{advice}"


def _advise(model: nn.Module, sample: Inputs) -> str:
    """Suggest a remedy for inputs of another dtype or number of channels, too few samples, or no batch axis."""
    if isinstance(sample, TensorTree):
        return _advise_several(model, sample)
    if not accepts(model, None):
        return " The model takes several inputs: pass a dict by name, or ((a, b), labels) in order."
    if len(sample) == 1 and any(norm.running_mean is None for norm in find_batch_norms(model)):
        return " The model normalises by the batch: pass at least two samples at once."
    if sample.ndim == 1:
        return " Samples lie along the first axis: stack several, or pass inputs.unsqueeze(0)."
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is not None and sample.ndim == 4 and (first.in_channels, sample.shape[1]) == (1, 3):
        return " Pass grey images (`--channels 1` on the command line)."
    weights = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if len(weights) != 1 or sample.dtype in weights:
        return ""
    (wanted,) = weights
    if sample.is_floating_point():
        return f" Convert them first, e.g. preprocess=lambda inputs: inputs.to({wanted})."
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules()):
        # The inputs are tokens, so their dtype is not the problem.
        return ""
    scale = " / 255" if sample.dtype == torch.uint8 else ""
    return f" Convert them as in training, e.g. preprocess=lambda inputs: inputs.to({wanted}){scale}."


def _advise_several(model: nn.Module, sample: TensorTree) -> str:
    """Suggest which entries to leave out of inputs that are passed by name."""
    if not isinstance(sample.value, Mapping) or accepts(model, **sample.value):
        return ""
    with suppress(ValueError):
        taken = inspect.signature(model.forward).parameters
        unknown = [name for name in sample.value if name not in taken]
        if unknown:
            return f" Leave out {', '.join(map(repr, unknown))}, which its forward does not take."
    return ""
