"""Put taps on any `nn.Module` and take them off again.

Taps are forward hooks: the model is never rebuilt, and no hook outlives its `with` block. What a module gives is
cloned at once, because a following in-place ReLU would overwrite it.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shiftmend.checks import brief, is_whole, kind
from shiftmend.errors import DataError, TapError
from shiftmend.histograms import as_samples
from shiftmend.returned import Entry as Entry
from shiftmend.returned import pick as pick


@dataclass(frozen=True)
class Tap:
    """A point in a model: what a named module reads or writes, and which axis of it counts units.

    As text, `module`, `module:input` or `module:output`, with `@axis` behind it where the units are not on axis 1:
    `"encoder.3@-1"` for tokens `[N, T, C]`. `entry` picks from a module that returns a tuple or a dict.
    """

    name: str
    module: str
    side: Literal["input", "output"] = "output"
    channel_axis: int = 1
    entry: Entry = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TapError(f"the name of a tap is {brief(self.name)}, expected text, e.g. 'early'")
        if not isinstance(self.module, str):
            raise TapError(f"tap {self.name!r} is {brief(self.module)}, expected the name of a module, e.g. 'layer1'")
        if self.side not in ("input", "output"):
            raise TapError(f"tap {self.name!r} has the side {brief(self.side)}, expected 'input' or 'output'")
        check_axis(self.channel_axis, f"tap {self.name!r}")

    @staticmethod
    def parse(name: str, spec: str | Tap) -> Tap:
        if isinstance(spec, Tap):
            return Tap(name, spec.module, spec.side, spec.channel_axis, spec.entry)
        if not isinstance(spec, str):
            raise TapError(f"tap {name!r} is {brief(spec)}, expected the name of a module, e.g. 'layer1', or a Tap")
        rest, _, axis = spec.partition("@")
        module, _, side = rest.partition(":")
        if side not in ("", "input", "output") or (axis and not re.fullmatch("-?[0-9]+", axis)):
            raise TapError(
                f"tap {name!r} is given as {spec!r}, expected 'module', 'module:input' or 'module:output', "
                "with '@axis' behind it where units are not on axis 1"
            )
        return Tap(name, module, "input" if side == "input" else "output", int(axis) if axis else 1)

    def __str__(self) -> str:
        axis = "" if self.channel_axis == 1 else f"@{self.channel_axis}"
        return f"{self.module}{':input' if self.side == 'input' else ''}{axis}"


def check_axis(axis: Any, what: str) -> None:
    """Refuse what cannot be the axis of the units; a sample `[C, H, W]` has them on axis 1 of its batch."""
    if not is_whole(axis):
        raise TapError(f"{what} counts units on axis {brief(axis)}, expected a whole number: 1, or -1 for the last")
    if axis == 0:
        raise TapError(f"{what} counts units on axis 0, which is that of the samples; expected 1, or -1 for the last")


class Recorder:
    """Holds what the taps gave in the last forward pass, until it is read."""

    def __init__(self, taps: Mapping[str, Tap]) -> None:
        self._taps = taps
        self._seen: dict[str, list[Tensor]] = {name: [] for name in taps}

    def record(self, name: str, value: Any) -> None:
        tap = self._taps[name]
        tensor = pick(value, tap.entry, f"module {tap.module!r} of tap {name!r}", "Tap(..., entry={!r})")
        self._seen[name].append(tensor.clone())

    def read(self) -> dict[str, Tensor]:
        """Activations `[samples, units]` by tap; a tap that fired other than once is an error that names it."""
        seen = self._seen
        self.forget()
        for name, values in seen.items():
            if len(values) != 1:
                count = "never ran" if not values else f"ran {len(values)} times"
                raise TapError(
                    f"tap {name!r} watches {str(self._taps[name])!r}, which {count} in one forward pass; "
                    "name a module that runs exactly once"
                )
        return {name: self._samples(self._taps[name], values[0]) for name, values in seen.items()}

    def forget(self) -> None:
        """Begin anew: a checkpointed part of a model runs again, with its taps, in the backward pass."""
        self._seen = {name: [] for name in self._taps}

    @staticmethod
    def _samples(tap: Tap, values: Tensor) -> Tensor:
        if values.ndim == 0:
            raise TapError(f"tap {tap.name!r} watches {str(tap)!r}, which gives a single number for all samples")
        if values.is_complex():
            raise TapError(
                f"tap {tap.name!r} watches {str(tap)!r}, which gives complex numbers, and those have no histogram; "
                "name a module whose numbers are real"
            )
        if values.ndim > 1 and not -values.ndim < tap.channel_axis < values.ndim:
            raise TapError(f"tap {tap.name!r} counts units on axis {tap.channel_axis} of {list(values.shape)}")
        return as_samples(values, tap.channel_axis)


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


def is_exported(model: nn.Module) -> bool:
    """Whether it comes from `torch.export`, which forbids to call `eval`."""
    return isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)


def module_of(model: nn.Module, tap: Tap) -> nn.Module:
    """The module that a tap names."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if tap.module not in modules:
        close = [name for name in modules if name.endswith(f".{tap.module}")] or get_close_matches(tap.module, modules)
        hint = f"; did you mean {' or '.join(map(repr, close[:4]))}?" if close else ""
        raise TapError(f"tap {tap.name!r} names module {tap.module!r}, which the model does not have{hint}")
    return modules[tap.module]


@contextmanager
def tapped(model: nn.Module, taps: Mapping[str, Tap], set_aside: bool = True) -> Iterator[Recorder]:
    """Watch the taps inside the block; afterwards nothing is left on the model.

    Compiled calls that the model brings along are set aside, unless it is known that they were made for these taps.
    """
    recorder = Recorder(taps)
    with ExitStack() as stack:
        if set_aside:
            stack.enter_context(eager(model))
        for name, tap in taps.items():
            module = module_of(model, tap)
            if tap.side == "input":
                handle = module.register_forward_pre_hook(
                    lambda m, args, kwargs, name=name: recorder.record(
                        name, next(iter((*args, *kwargs.values())), None)
                    ),
                    with_kwargs=True,
                )
            else:
                handle = module.register_forward_hook(lambda m, args, out, name=name: recorder.record(name, out))
            stack.callback(handle.remove)
        yield recorder


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
