"""Trace one forward pass of a model: where its head and its taps are, and in which order its layers run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.errors import TapError
from shiftmend.introspection.model_state import find_owners, is_trainable
from shiftmend.introspection.modes import force_eager, preserve_modes
from shiftmend.introspection.outputs import Entry, find_tensors, pick
from shiftmend.introspection.taps import Tap, attach_taps, module_of
from shiftmend.introspection.validate import check_model
from shiftmend.utils.checks import brief


@dataclass(frozen=True)
class Trace:
    """The facts about a model that one forward pass shows."""

    taps: dict[str, Tap]
    head: str
    order: tuple[str, ...]
    """Modules that own parameters, in the order in which they first run."""
    extractor: tuple[str, ...]
    """Modules of `order` that ran before the features were complete: what a method may train."""
    output: Entry = None
    beside: frozenset[str] = frozenset()
    """Parameters that play no part in the features though they may run before them: those of other heads."""
    uncalled: tuple[str, ...] = ()
    """Modules whose parameters the features depend on although the modules were not called: their place is unknown."""


@dataclass
class _Events:
    started: list[str] = field(default_factory=list)
    written: list[tuple[str, Any]] = field(default_factory=list)
    features_at: int | None = None


def trace(
    model: nn.Module,
    sample: Tensor,
    *,
    head: str | None = None,
    taps: Mapping[str, str | Tap] | None = None,
    output: Entry = None,
) -> Trace:
    """Run one batch in eval mode and find the taps `features` and `logits`, the head and the running order.

    A model may declare its taps in an attribute `shiftmend_taps`. Otherwise the head is the last module with
    parameters whose output is the model's output; `features` is what the head reads and `logits` what it returns.

    Args:
        model: any module.
        sample: a batch of inputs `[N, ...]`.
        head: name of the head, if it is known.
        taps: where to tap, by name, in addition to `features` and `logits` or in their place.
        output: which entry of what the model returns is its output.

    Raises:
        DataError: if the model does not take the sample.
        TapError: if there is no head, or a tap is wrong.
    """
    if taps is not None and not isinstance(taps, Mapping):
        raise TapError(f"taps is {brief(taps)}, expected names with where to tap, e.g. taps={{'early': 'layer1'}}")
    if head is not None and not (isinstance(head, str) and head):
        raise TapError(f"head is {brief(head)}, expected the name of the module that classifies, e.g. head='fc'")
    declared = dict(getattr(model, "shiftmend_taps", None) or {}) if head is None else {}
    given: dict[str, str | Tap] = {**declared, **(taps or {})}
    if head is not None:
        module_of(model, Tap("head", head))
    check_model(model, [sample], output=output, traced=True)
    owners = find_owners(model)
    events, returned = _record_events(model, sample, owners, None)
    if head is None:
        head = _find_head(events, returned, output, given)
    # A linear layer works on the last axis, also of tokens [N, T, C].
    written = [out for name, out in events.written if name == head]
    on_tokens = isinstance(module_of(model, Tap("head", head)), nn.Linear) and any(out.ndim > 2 for out in written)
    axis = "@-1" if on_tokens else ""
    # Features and logits come first, then the model's own taps, then those of the user.
    specs: dict[str, str | Tap] = {"features": f"{head}:input{axis}", "logits": f"{head}{axis}", **given}
    resolved = {name: Tap.parse(name, spec) for name, spec in specs.items()}
    events, _ = _record_events(model, sample, owners, resolved["features"])
    with torch.no_grad(), preserve_modes(model), attach_taps(model, resolved) as recorder:
        model.eval()
        model(sample)
        recorder.read()
    order = tuple(dict.fromkeys(events.started))
    before = tuple(dict.fromkeys(events.started[: events.features_at]))
    extractor = tuple(name for name in before if name != head and not name.startswith(f"{head}."))
    # A second head has an output of its own.
    several = len(find_tensors(returned)) > 1
    idle = [name for name in owners if not any(name == one or name.startswith(f"{one}.") or not one for one in order)]
    used, shown = _find_used_parameters(model, sample, resolved["features"]) if several or idle else (set(), set())
    beside = {name for name, parameter in model.named_parameters() if parameter in shown - used} if several else ()
    uncalled = [name for name in idle if any(p in used for p in model.get_submodule(name).parameters())]
    return Trace(resolved, head, order, extractor, output, frozenset(beside), tuple(uncalled))


def _record_events(model: nn.Module, sample: Tensor, owners: list[str], features: Tap | None) -> tuple[_Events, Any]:
    """Run the model in eval mode; record the start and the output of every module that owns parameters."""
    events = _Events()
    modules = dict(model.named_modules())

    def note_features(*_: Any) -> None:
        if events.features_at is None:
            events.features_at = len(events.started)

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(preserve_modes(model))
        stack.enter_context(force_eager(model))
        model.eval()
        if features is not None and features.side == "input":
            handle = module_of(model, features).register_forward_pre_hook(note_features)
            stack.callback(handle.remove)
        for name in owners:
            start = modules[name].register_forward_pre_hook(lambda m, a, name=name: events.started.append(name))
            write = modules[name].register_forward_hook(lambda m, a, out, name=name: events.written.append((name, out)))
            stack.callback(start.remove)
            stack.callback(write.remove)
        if features is not None and features.side == "output":
            handle = module_of(model, features).register_forward_hook(note_features)
            stack.callback(handle.remove)
        return events, model(sample)


def _find_used_parameters(model: nn.Module, sample: Tensor, features: Tap) -> tuple[set[Tensor], set[Tensor]]:
    """Find the parameters that the features depend on, and those that the returned tensors depend on.

    Frozen layers count as others do, since what is trained is up to the method. Parameters that no graph shows, as
    inside reentrant checkpoints, are left out.
    """
    frozen = [parameter for parameter in model.parameters() if is_trainable(parameter) and not parameter.requires_grad]
    try:
        with torch.inference_mode(False), torch.enable_grad(), preserve_modes(model), ExitStack() as stack:
            for parameter in frozen:
                parameter.requires_grad_(True)
            recorder = stack.enter_context(attach_taps(model, {"features": features}))
            model.eval()
            returned = model(sample)
            return _find_leaves(recorder.read()["features"]), _find_leaves(returned)
    except RuntimeError:
        # The model runs, but not with gradients: its weights were made in inference mode.
        return set(), set()
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _find_leaves(value: Any) -> set[Tensor]:
    """Find the leaves of the graph behind the tensors in a value."""
    leaves: set[Tensor] = set()
    waiting = {tensor.grad_fn for tensor in find_tensors(value)}
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
        _check_same_head(events, returned, output, tap)
        return tap.module
    layers = _find_writers(events, pick(returned, output, "the model"))
    if layers:
        return layers[-1]
    last = next((name for name, _ in reversed(events.written) if name), None)
    if last is None:
        raise TapError("the model is one single layer: there is nothing below its head that could be restored")
    raise TapError(
        "no layer with parameters writes the model's output, so the head could not be found; name it, "
        f"e.g. head={last!r} (the last one that ran)"
    )


def _find_writers(events: _Events, result: Tensor) -> list[str]:
    """List the innermost layers that returned a tensor: a container that owns tokens returns the same one."""
    matching = [name for name, out in events.written if name and isinstance(out, Tensor) and _is_same(out, result)]
    return [name for name in matching if not any(other.startswith(f"{name}.") for other in matching)]


def _check_same_head(events: _Events, returned: Any, output: Entry, tap: Tap) -> None:
    """Refuse an `output` of one head if the tap `logits`, which decides what is aligned, is on another head."""
    if output is None or tap.side == "input":
        return
    writers = _find_writers(events, pick(returned, output, "the model"))
    if not writers or tap.module in writers:
        return
    if any(tap.module in _find_writers(events, entry) for entry in find_tensors(returned)):
        raise TapError(
            f"output={output!r} is not what the tap 'logits' sees: {tap.module!r} writes another entry of what the "
            f"model returns; name that one, or make the profile with output={output!r}"
        )


def _is_same(written: Tensor, result: Tensor) -> bool:
    """Tell whether a tensor is the output or a view of it, as behind `x.squeeze(-1)`."""
    if written is result:
        return True
    return written.numel() == result.numel() and (
        written.data_ptr() == result.data_ptr() or torch.equal(written.reshape(-1), result.reshape(-1))
    )
