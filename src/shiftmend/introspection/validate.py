"""A model while it is adapted: which layers are in which mode, what is trained, copies of its state, and back again."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shiftmend.errors import AdaptationError, DataError, TapError
from shiftmend.introspection.model_state import trainable
from shiftmend.introspection.modes import eager, enter_eval, is_exported, modes
from shiftmend.introspection.outputs import Entry, pick, tensors_in
from shiftmend.utils.checks import kind
from shiftmend.utils.devices import device_of


def unwrap(model: nn.Module) -> nn.Module:
    """The plain module inside `torch.compile` or data-parallel wrappers, which shares its parameters."""
    given: Any = model
    if not isinstance(given, nn.Module):
        stored = isinstance(given, str | os.PathLike | Mapping)
        advice = "; build the network and load its weights into it first" if stored else ""
        raise TapError(f"the model is {kind(given)}, expected a torch.nn.Module{advice}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TapError("a scripted model cannot be tapped; pass the module it was scripted from")
    if is_exported(model):
        raise TapError("an exported model cannot be tapped; pass the module it was exported from")
    if any(is_lazy(parameter) or parameter.is_meta for parameter in model.parameters()):
        raise TapError(
            "the model's parameters hold no values yet (lazy layers, or the device 'meta'): run a batch through it if "
            "it is lazy, and load its weights first"
        )
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_takes(model: nn.Module, sample: Tensor, output: Entry = None) -> None:
    """Refuse inputs the model cannot take, and an entry it does not return, before anything else is done with them."""
    names = _Names()
    with torch.no_grad(), modes(model), eager(model):
        enter_eval(model)
        try:
            with names:
                returned = model(sample)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model asserts, looks up and indexes as it likes
            words = str(error).strip().splitlines()
            plain = words and isinstance(error, RuntimeError | TypeError | ValueError | IndexError)
            reason = words[0] if plain else " ".join([type(error).__name__, *words[:1]])
            dtype = str(sample.dtype).removeprefix("torch.")
            raise DataError(
                f"the model does not take inputs of shape {list(sample.shape[1:])} and type {dtype}: {reason}"
                f"{_advice(model, sample, reason, names.asked)}"
            ) from error
    if output is not None:
        pick(returned, output, "the model")


def _takes_one_tensor(model: nn.Module) -> bool:
    """Whether one argument is enough for its forward, as far as that can be told."""
    try:
        with suppress(ValueError):  # something without a signature
            inspect.signature(model.forward).bind(None)
    except TypeError:
        return False
    return True


class _Names(torch.overrides.TorchFunctionMode):
    """Notices a model that takes its tensor for a dict: what torch says of such an index depends on the word."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__ or not isinstance(args[1], str):
            return func(*args, **(kwargs or {}))
        self.asked = True
        with warnings.catch_warnings():  # before it refuses some words, torch warns of sequences as indices
            warnings.simplefilter("ignore")
            return func(*args)


def _advice(model: nn.Module, sample: Tensor, reason: str, for_a_dict: bool) -> str:
    """What to do about inputs of another type than the weights, too few of them, or without an axis of samples."""
    if not _takes_one_tensor(model) or for_a_dict:
        return "; expected a model that is called with one tensor: wrap it in a module that takes one and passes it on"
    if len(sample) == 1 and "more than 1 value per channel" in reason:
        return "; it normalises by the batch, so give it at least two samples at once"
    if sample.ndim == 1:
        return "; expected samples along the first axis: make one tensor of several, or inputs.unsqueeze(0) of one"
    weights = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if len(weights) != 1 or sample.dtype in weights:
        return ""
    (wanted,) = weights
    if sample.is_floating_point():
        return f"; convert them first, e.g. preprocess=lambda inputs: inputs.to({wanted})"
    try:  # whole numbers may be tokens, and the trouble another
        model(sample.to(wanted))
    except Exception:
        return ""
    scaled = " / 255" if sample.dtype == torch.uint8 else ""
    return f"; convert them as in training, e.g. preprocess=lambda inputs: inputs.to({wanted}){scaled}"


def check_takes_each(model: nn.Module, samples: Sequence[Tensor], output: Entry = None) -> None:
    """`check_takes` of samples that may differ in size, as those of batches do that are padded each by itself."""
    first, *others = samples
    check_takes(model, first, output)
    for other in others:
        try:
            check_takes(model, other)
        except DataError as error:
            raise DataError(f"the batches differ in size, and {error}; bring all samples to one size first") from error


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
        shared = {id(tensor) for tensor in _tensors(copied).values()}  # see `refuse_shared_tensors`
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


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def refuse_broken(model: nn.Module) -> None:
    """Refuse weights that make every loss NaN, for which the learning rate would be blamed later."""
    for name, parameter in model.named_parameters():
        if not trainable(parameter):
            continue
        value = parameter.detach()
        # a mask that is kept among the parameters may hold infinities
        bad = ~torch.isfinite(value) if parameter.requires_grad else torch.isnan(value)
        if bool(bad.any()):
            raise AdaptationError(
                f"the model's weights are NaN or infinite in {name!r} before anything is adapted; load those of a "
                "model that works"
            )
