"""What one forward pass tells about a model: where its head and its taps are, and in which order its layers run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.errors import TapError
from shiftmend.introspection.model_state import trainable
from shiftmend.introspection.modes import eager, modes
from shiftmend.introspection.outputs import Entry, pick, tensors_in
from shiftmend.introspection.taps import Tap, module_of, tapped
from shiftmend.introspection.validate import check_takes
from shiftmend.utils.checks import brief


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
    beside: frozenset[str] = frozenset()
    """Parameters that play no part in the features though they may run before them: those of other heads."""
    uncalled: tuple[str, ...] = ()
    """Modules whose parameters the features depend on although nothing was called: where they run is not known."""


@dataclass
class _Events:
    started: list[str] = field(default_factory=list)
    written: list[tuple[str, Any]] = field(default_factory=list)
    features_at: int | None = None


def owners(model: nn.Module) -> list[str]:
    """Names of modules that hold parameters of their own (a parametrised layer counts, its helpers do not).

    A list of parameters never runs by itself, so the module that holds it counts as well.
    """
    lists = (nn.ParameterList, nn.ParameterDict)
    return [
        name
        for name, module in model.named_modules()
        if "parametrizations" not in name.split(".")
        and (
            module._parameters
            or torch.nn.utils.parametrize.is_parametrized(module)
            or any(isinstance(child, lists) for child in module.children())
        )
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
    if taps is not None and not isinstance(taps, Mapping):
        raise TapError(f"taps is {brief(taps)}, expected names with where to tap, e.g. taps={{'early': 'layer1'}}")
    if head is not None and not (isinstance(head, str) and head):
        raise TapError(f"head is {brief(head)}, expected the name of the module that classifies, e.g. head='fc'")
    given = {**_declared(model), **(taps or {})} if head is None else dict(taps or {})
    if head is not None:
        module_of(model, Tap("head", head))
    owning = owners(model)
    if not owning:
        raise TapError("the model has no parameters, so there is no head to tap and nothing to adapt")
    modules = dict(model.named_modules())
    scripted = [name for name in owning if isinstance(modules[name], torch.jit.ScriptModule)]
    if scripted:
        raise TapError(f"{scripted[0]!r} is scripted and cannot be tapped; put the module it was scripted from there")
    check_takes(model, sample, output)
    events, returned = _watch(model, sample, owning, None)
    if head is None:
        head = _find_head(events, returned, output, given)
    # a linear layer works on the last axis, also of tokens [N, T, C]
    written = [out for name, out in events.written if name == head]
    on_tokens = isinstance(module_of(model, Tap("head", head)), nn.Linear) and any(out.ndim > 2 for out in written)
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
    extractor = tuple(name for name in before if name not in inside_head)
    several = len(tensors_in(returned)) > 1  # a second head has an output of its own
    idle = [name for name in owning if not any(name == one or name.startswith(f"{one}.") or not one for one in order)]
    used, shown = _graphs(model, sample, resolved["features"]) if several or idle else (set(), set())
    beside = frozenset(name for name, parameter in model.named_parameters() if parameter in shown - used)
    uncalled = tuple(name for name in idle if any(parameter in used for parameter in modules[name].parameters()))
    return Trace(resolved, head, order, extractor, output, beside if several else frozenset(), uncalled)


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
            handle = module_of(model, features).register_forward_pre_hook(note_features)
            stack.callback(handle.remove)
        for name in owning:
            start = modules[name].register_forward_pre_hook(lambda m, a, name=name: events.started.append(name))
            write = modules[name].register_forward_hook(lambda m, a, out, name=name: events.written.append((name, out)))
            stack.callback(start.remove)
            stack.callback(write.remove)
        if features is not None and features.side == "output":
            handle = module_of(model, features).register_forward_hook(note_features)
            stack.callback(handle.remove)
        return events, model(sample)


def _graphs(model: nn.Module, sample: Tensor, features: Tap) -> tuple[set[Tensor], set[Tensor]]:
    """Parameters behind the features, and behind all that the model returns.

    Frozen layers count as others do, since what is trained is up to the method. What no graph shows (reentrant
    checkpoints) is not among them.
    """
    frozen = [parameter for parameter in model.parameters() if trainable(parameter) and not parameter.requires_grad]
    try:
        with torch.inference_mode(False), torch.enable_grad(), modes(model), ExitStack() as stack:
            for parameter in frozen:
                parameter.requires_grad_(True)
            recorder = stack.enter_context(tapped(model, {"features": features}))
            model.eval()
            returned = model(sample)
            return _behind(recorder.read()["features"]), _behind(returned)
    except RuntimeError:  # it runs, but not with gradients: weights made in inference mode
        return set(), set()
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _behind(value: Any) -> set[Tensor]:
    """Leaves of the graph behind the tensors in a value."""
    leaves: set[Tensor] = set()
    waiting = {tensor.grad_fn for tensor in tensors_in(value)}
    seen = {None, *waiting}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaves.add(leaf)
        found = {following for following, _ in node.next_functions} - seen
        waiting |= found
        seen |= found
    return leaves


def _find_head(events: _Events, returned: Any, output: Entry, given: Mapping[str, str | Tap]) -> str:
    if "logits" in given:
        tap = Tap.parse("logits", given["logits"])
        _refuse_other_head(events, returned, output, tap)
        return tap.module
    layers = _writers(events, pick(returned, output, "the model"))
    if layers:
        return layers[-1]
    last = next((name for name, _ in reversed(events.written) if name), None)
    if last is None:
        raise TapError("the model is one single layer: there is nothing below its head that could be restored")
    raise TapError(
        "no layer with parameters writes the model's output, so the head could not be found; name it, "
        f"e.g. head={last!r} (the last one that ran)"
    )


def _writers(events: _Events, result: Tensor) -> list[str]:
    """Layers with parameters that wrote a tensor, innermost: a container with tokens of its own writes it as well."""
    matching = [name for name, out in events.written if name and isinstance(out, Tensor) and _same(out, result)]
    return [name for name in matching if not any(other.startswith(f"{name}.") for other in matching)]


def _refuse_other_head(events: _Events, returned: Any, output: Entry, tap: Tap) -> None:
    """Refuse an `output` of one head where the tap, which decides what is aligned, is on another one."""
    if output is None or tap.side == "input":
        return
    writers = _writers(events, pick(returned, output, "the model"))
    if not writers or tap.module in writers:
        return
    if any(tap.module in _writers(events, entry) for entry in tensors_in(returned)):
        raise TapError(
            f"output={output!r} is not what the tap 'logits' sees: {tap.module!r} writes another entry of what the "
            f"model returns; name that one, or make the profile with output={output!r}"
        )


def _same(written: Tensor, result: Tensor) -> bool:
    """The output itself or a view of it: `x.squeeze(-1)` behind the head does not hide it."""
    if written is result:
        return True
    return written.numel() == result.numel() and (
        written.data_ptr() == result.data_ptr() or torch.equal(written.reshape(-1), result.reshape(-1))
    )
