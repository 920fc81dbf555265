"""Put taps on any `nn.Module` and take them off again.

Taps are forward hooks: the model is never rebuilt, and no hook outlives its `with` block. What a module gives is
cloned at once, because a following in-place ReLU would overwrite it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shiftmend.errors import DataError, TapError
from shiftmend.histograms import as_samples

Entry = int | str | None


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

    @staticmethod
    def parse(name: str, spec: str | Tap) -> Tap:
        if isinstance(spec, Tap):
            return Tap(name, spec.module, spec.side, spec.channel_axis, spec.entry)
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


class Recorder:
    """Holds what the taps gave in the last forward pass, until it is read."""

    def __init__(self, taps: Mapping[str, Tap]) -> None:
        self._taps = taps
        self._seen: dict[str, list[Tensor]] = {name: [] for name in taps}

    def record(self, name: str, value: Any) -> None:
        tap = self._taps[name]
        tensor = pick(value, tap.entry, f"module {tap.module!r} of tap {name!r}")
        self._seen[name].append(tensor.clone())

    def read(self) -> dict[str, Tensor]:
        """Activations `[samples, units]` by tap; a tap that fired other than once is an error that names it."""
        seen = self._seen
        self._seen = {name: [] for name in self._taps}
        for name, values in seen.items():
            if len(values) != 1:
                count = "never ran" if not values else f"ran {len(values)} times"
                raise TapError(
                    f"tap {name!r} watches {str(self._taps[name])!r}, which {count} in one forward pass; "
                    "name a module that runs exactly once"
                )
        return {name: self._samples(self._taps[name], values[0]) for name, values in seen.items()}

    @staticmethod
    def _samples(tap: Tap, values: Tensor) -> Tensor:
        if values.ndim > 1 and not -values.ndim <= tap.channel_axis < values.ndim:
            raise TapError(f"tap {tap.name!r} counts units on axis {tap.channel_axis} of {list(values.shape)}")
        return as_samples(values, tap.channel_axis)


def unwrap(model: nn.Module) -> nn.Module:
    """The plain module inside `torch.compile` or data-parallel wrappers, which shares its parameters."""
    if not isinstance(model, nn.Module):
        raise TapError(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise TapError("a scripted model cannot be tapped; pass the module it was scripted from")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def pick(value: Any, entry: Entry, what: str) -> Tensor:
    """The one tensor in what a module returned; tuples and dicts need to be told which entry it is."""
    if entry is not None:
        try:
            value = value[entry]
        except (KeyError, IndexError, TypeError) as error:
            raise TapError(f"{what} returned {_describe(value)}, which has no entry {entry!r}") from error
    if not isinstance(value, Tensor):
        raise TapError(f"{what} returned {_describe(value)}; say which entry is meant, e.g. output=0")
    return value


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with entries {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} entries"
    return f"a {type(value).__name__}"


def _module(model: nn.Module, tap: Tap) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if tap.module not in modules:
        close = [name for name in modules if name and (tap.module in name or name in tap.module)][:4]
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise TapError(f"tap {tap.name!r} names module {tap.module!r}, which the model does not have{hint}")
    return modules[tap.module]


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


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
            module = _module(model, tap)
            if tap.side == "input":
                handle = module.register_forward_pre_hook(_input_hook(recorder, name), with_kwargs=True)
            else:
                handle = module.register_forward_hook(_output_hook(recorder, name))
            stack.callback(handle.remove)
        yield recorder


def _input_hook(recorder: Recorder, name: str) -> Callable[..., None]:
    return lambda module, args, kwargs: recorder.record(name, _first_tensor(args, kwargs))


def _output_hook(recorder: Recorder, name: str) -> Callable[..., None]:
    return lambda module, args, output: recorder.record(name, output)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Set compiled calls of `module.compile()` aside: compiled code would not see hooks that came later."""
    compiled = {module: module._compiled_call_impl for module in model.modules() if module._compiled_call_impl}
    inside = any(hasattr(module, "_orig_mod") for module in model.modules())
    try:
        for module in compiled:
            module._compiled_call_impl = None
        with torch.compiler.set_stance("force_eager") if inside else nullcontext():
            yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


@contextmanager
def modes(model: nn.Module) -> Iterator[None]:
    """Give every module its own train or eval mode back at the end of the block."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def check_takes(model: nn.Module, sample: Tensor) -> None:
    """Refuse inputs the model cannot take, before anything else is done with them."""
    with torch.no_grad(), modes(model), eager(model):
        model.eval()
        try:
            model(sample)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            kind = str(sample.dtype).removeprefix("torch.")
            raise DataError(
                f"the model does not take inputs of shape {list(sample.shape[1:])} and type {kind}: {first}"
            ) from error


@dataclass(frozen=True)
class Trace:
    """What one forward pass tells about a model."""

    taps: dict[str, Tap]
    head: str
    order: tuple[str, ...]
    """Modules that own parameters, in the order in which they first run."""
    extractor: tuple[str, ...]
    """Those of `order` that ran before the features were there: what restoring may train."""
    output: Entry = None


@dataclass
class _Events:
    started: list[str] = field(default_factory=list)
    written: list[tuple[str, Any]] = field(default_factory=list)
    features_at: int | None = None


def owners(model: nn.Module) -> list[str]:
    """Names of modules that hold parameters of their own (a parametrised layer counts, its helpers do not)."""
    return [
        name
        for name, module in model.named_modules()
        if "parametrizations" not in name.split(".")
        and (module._parameters or torch.nn.utils.parametrize.is_parametrized(module))
    ]


def trace(
    model: nn.Module,
    sample: Tensor,
    *,
    head: str | None = None,
    taps: Mapping[str, str | Tap] | None = None,
    output: Entry = None,
) -> Trace:
    """Run one batch in eval mode and find the taps `features` and `logits`, the head and the running order.

    A model may say where its taps are in an attribute `shiftmend_taps`; otherwise the head is the last module with
    parameters whose output is the model's output, `features` is what it reads and `logits` what it writes.
    """
    given = {**_declared(model), **(taps or {})} if head is None else dict(taps or {})
    if head is not None:
        _module(model, Tap("head", head))
    owning = owners(model)
    if not owning:
        raise TapError("the model has no parameters, so there is no head to tap and nothing to adapt")
    check_takes(model, sample)
    events, returned = _watch(model, sample, owning, None)
    if head is None:
        head = _find_head(events, returned, output, given)
    # a linear layer works on the last axis, also of tokens [N, T, C]
    written = [out for name, out in events.written if name == head]
    on_tokens = isinstance(_module(model, Tap("head", head)), nn.Linear) and any(out.ndim > 2 for out in written)
    axis = "@-1" if on_tokens else ""
    # the model's own taps before the user's further ones, features and logits first
    specs: dict[str, str | Tap] = {"features": f"{head}:input{axis}", "logits": f"{head}{axis}", **given}
    resolved = {name: Tap.parse(name, spec) for name, spec in specs.items()}
    events, _ = _watch(model, sample, owning, resolved["features"])
    with torch.no_grad(), modes(model), tapped(model, resolved) as recorder:
        model.eval()
        model(sample)
        recorder.read()
    order = tuple(dict.fromkeys(events.started))
    before = tuple(dict.fromkeys(events.started[: events.features_at]))
    inside_head = tuple(name for name in order if name == head or name.startswith(f"{head}."))
    return Trace(resolved, head, order, tuple(name for name in before if name not in inside_head), output)


def _declared(model: nn.Module) -> dict[str, str | Tap]:
    return dict(getattr(model, "shiftmend_taps", None) or {})


def _watch(model: nn.Module, sample: Tensor, owning: list[str], features: Tap | None) -> tuple[_Events, Any]:
    """One eval-mode forward pass with the start and the output of every module that owns parameters."""
    events = _Events()
    modules = dict(model.named_modules())

    def note_features(*_: Any) -> None:
        if events.features_at is None:
            events.features_at = len(events.started)

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(modes(model))
        stack.enter_context(eager(model))
        model.eval()
        if features is not None and features.side == "input":
            handle = _module(model, features).register_forward_pre_hook(note_features)
            stack.callback(handle.remove)
        for name in owning:
            start = modules[name].register_forward_pre_hook(lambda m, a, name=name: events.started.append(name))
            write = modules[name].register_forward_hook(lambda m, a, out, name=name: events.written.append((name, out)))
            stack.callback(start.remove)
            stack.callback(write.remove)
        if features is not None and features.side == "output":
            handle = _module(model, features).register_forward_hook(note_features)
            stack.callback(handle.remove)
        return events, model(sample)


def _find_head(events: _Events, returned: Any, output: Entry, given: Mapping[str, str | Tap]) -> str:
    if "logits" in given:
        return Tap.parse("logits", given["logits"]).module
    result = pick(returned, output, "the model")
    matching = [name for name, out in events.written if name and isinstance(out, Tensor) and _same(out, result)]
    # a container with parameters of its own (tokens) writes the same output as the layer inside it
    layers = [name for name in matching if not any(other.startswith(f"{name}.") for other in matching)]
    if layers:
        return layers[-1]
    last = next((name for name, _ in reversed(events.written) if name), None)
    if last is None:
        raise TapError("the model is one single layer: there is nothing below its head that could be restored")
    raise TapError(
        "no layer with parameters writes the model's output, so the head could not be found; name it, "
        f"e.g. head={last!r} (the last one that ran)"
    )


def _same(written: Tensor, result: Tensor) -> bool:
    """The output itself or a view of it: `x.squeeze(-1)` behind the head does not hide it."""
    if written is result:
        return True
    return written.numel() == result.numel() and (
        written.data_ptr() == result.data_ptr() or torch.equal(written.reshape(-1), result.reshape(-1))
    )
