"""Tracing one forward pass of a model: find its head and taps, and the order in which layers run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shiftmend.errors import TapError
from shiftmend.introspection.call import call_model
from shiftmend.introspection.model_state import find_owners, is_trainable
from shiftmend.introspection.modes import preserve_modes
from shiftmend.introspection.outputs import Entry, find_tensors, pick
from shiftmend.introspection.taps import Recorder, Tap, attach_taps, module_of
from shiftmend.introspection.validate import check_model, run_checked
from shiftmend.utils.checks import brief
from shiftmend.utils.tensor_tree import Inputs


@dataclass(frozen=True)
class Trace:
    """Facts about a model from one forward pass."""

    taps: dict[str, Tap]
    head: str
    order: tuple[str, ...]
    """Modules that own parameters, in the order in which they first run."""
    extractor: tuple[str, ...]
    """Modules of `order` that ran before the features were complete, which a method may train."""
    output: Entry = None
    beside: frozenset[str] = frozenset()
    """Parameters that do not affect the features although they may run earlier: those of other heads."""
    uncalled: tuple[str, ...] = ()
    """Modules that were not called although the features depend on their parameters; their position is unknown."""
    units: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Number of units at each tap."""
    returned: Any = field(default=None, repr=False, compare=False)
    """The model's output for the batch."""


@dataclass(frozen=True)
class _Call:
    """One call of a module, with the number of owners of parameters that had started at its begin and end."""

    module: str
    read: Any
    began_at: int
    returned: Any
    ended_at: int


class _Events:
    """The calls of all modules in one forward pass, from which taps are found once the head is known."""

    def __init__(self) -> None:
        self.started: list[str] = []
        """Owners of parameters, in the order in which they started."""
        self.written: list[tuple[str, Any]] = []
        """Outputs of the owners of parameters, in the order in which they ended."""
        self.calls: list[_Call] = []
        """Calls of any module, in the order in which they ended."""

    def features_at(self, features: Tap) -> int | None:
        """Count the owners that had started when the features were first complete; None if they never were."""
        calls = [call for call in self.calls if call.module == features.module]
        return min((call.began_at if features.side == "input" else call.ended_at for call in calls), default=None)

    def check_taps(self, taps: Mapping[str, Tap]) -> dict[str, int]:
        """Raise unless each tap gives one tensor of real numbers per forward pass; return the units at each tap."""
        recorder = Recorder(taps)
        for name, tap in taps.items():
            for call in self.calls:
                if call.module == tap.module:
                    recorder.record(name, call.read if tap.side == "input" else call.returned)
        return {name: values.shape[1] for name, values in recorder.read().items()}


def trace(
    model: nn.Module,
    sample: Inputs,
    *,
    head: str | None = None,
    taps: Mapping[str, str | Tap] | None = None,
    output: Entry = None,
    original: nn.Module | None = None,
) -> Trace:
    """Run one batch in eval mode and find the taps `features` and `logits`, the head and the running order.

    The model runs once. It runs once more, with gradients, if it has several outputs or modules that were not called.

    A model may declare its taps in an attribute `shiftmend_taps`. Otherwise the head is the last module with
    parameters whose output is the model's output, or was resized into it, as segmentation networks do; `features` is
    what the head reads and `logits` what it returns. `taps` add to these two, or replace them. `original` is the model
    that `model` was copied from; an error is raised if the copy calls it.
    """
    if taps is not None and not isinstance(taps, Mapping):
        raise TapError(
            f"Expected taps to be a dict of names and modules, e.g. {{'early': 'layer1'}}, got {brief(taps)}."
        )
    if head is not None and not (isinstance(head, str) and head):
        raise TapError(f"Expected head to name the module that classifies, e.g. 'fc', got {brief(head)}.")
    declared = dict(getattr(model, "shiftmend_taps", None) or {}) if head is None else {}
    given: dict[str, str | Tap] = {**declared, **(taps or {})}
    if head is not None:
        module_of(model, Tap("head", head))
    check_model(model, traced=True)
    owners = find_owners(model)
    resolved = {name: Tap.parse(name, spec) for name, spec in given.items()}
    tapped = {tap.module for tap in resolved.values()}
    with _record_events(model, owners, tapped) as events:
        returned = run_checked(model, sample, output=output, original=original)
    if head is None:
        head = _find_head(events, returned, output, given)
    # A linear layer works on the last axis, also for tokens [N, T, C].
    written = [out for name, out in events.written if name == head]
    on_tokens = isinstance(module_of(model, Tap("head", head)), nn.Linear) and any(out.ndim > 2 for out in written)
    axis = "@-1" if on_tokens else ""
    # The order is: features and logits, the model's own taps, the user's taps.
    specs: dict[str, str | Tap] = {"features": f"{head}:input{axis}", "logits": f"{head}{axis}", **given}
    resolved = {name: Tap.parse(name, spec) for name, spec in specs.items()}
    for tap in resolved.values():
        module_of(model, tap)
    units = events.check_taps(resolved)
    order = tuple(dict.fromkeys(events.started))
    before = tuple(dict.fromkeys(events.started[: events.features_at(resolved["features"])]))
    extractor = tuple(name for name in before if name != head and not name.startswith(f"{head}."))
    # Another head has an output of its own.
    several = len(find_tensors(returned)) > 1
    idle = [name for name in owners if not any(name == one or name.startswith(f"{one}.") or not one for one in order)]
    used, shown = _find_used_parameters(model, sample, resolved["features"]) if several or idle else (set(), set())
    beside = {name for name, parameter in model.named_parameters() if parameter in shown - used} if several else ()
    uncalled = [name for name in idle if any(p in used for p in model.get_submodule(name).parameters())]
    return Trace(resolved, head, order, extractor, output, frozenset(beside), tuple(uncalled), units, returned)


@contextmanager
def _record_events(model: nn.Module, owners: list[str], tapped: set[str]) -> Iterator[_Events]:
    """Record the calls of all modules inside the block.

    Scripted modules and wrappers of `torch.compile` get hooks only if they own parameters or a tap.
    """
    events, of_owners = _Events(), set(owners)
    begun: dict[str, list[tuple[Any, int]]] = {}

    def begin(name: str, args: Any, kwargs: Any) -> None:
        first = next(iter((*args, *kwargs.values())), None)
        begun.setdefault(name, []).append((first, len(events.started)))
        if name in of_owners:
            events.started.append(name)

    def end(name: str, returned: Any) -> None:
        read, began_at = begun[name].pop()
        events.calls.append(_Call(name, read, began_at, returned, len(events.started)))
        if name in of_owners:
            events.written.append((name, returned))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            reluctant = isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")
            if reluctant and name not in of_owners | tapped:
                continue
            start = module.register_forward_pre_hook(
                lambda m, args, kwargs, name=name: begin(name, args, kwargs), with_kwargs=True
            )
            write = module.register_forward_hook(lambda m, args, out, name=name: end(name, out))
            stack.callback(start.remove)
            stack.callback(write.remove)
        yield events


def _find_used_parameters(model: nn.Module, sample: Inputs, features: Tap) -> tuple[set[Tensor], set[Tensor]]:
    """Find the parameters that the features depend on, and those that the returned tensors depend on.

    Frozen layers count as well, because the method decides what is trained. Parameters that no autograd graph shows,
    such as those inside reentrant checkpoints, are left out.
    """
    frozen = [parameter for parameter in model.parameters() if is_trainable(parameter) and not parameter.requires_grad]
    try:
        with torch.inference_mode(False), torch.enable_grad(), preserve_modes(model), ExitStack() as stack:
            for parameter in frozen:
                parameter.requires_grad_(True)
            recorder = stack.enter_context(attach_taps(model, {"features": features}))
            model.eval()
            returned = call_model(model, sample)
            return _find_leaves(recorder.read()["features"]), _find_leaves(returned)
    except RuntimeError:
        # The model cannot run with gradients, because its weights were made in inference mode.
        return set(), set()
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _find_leaves(value: Any) -> set[Tensor]:
    """Find the leaves of the autograd graph of the tensors in a value."""
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
        raise TapError(
            "Expected a model with layers below its head, got a single layer, in which nothing can be restored."
        )
    raise TapError(
        f"Expected a layer that returns the model's output as the head, got none. Name the head, e.g. head={last!r}, "
        "the layer that ran last."
    )


def _find_writers(events: _Events, result: Tensor) -> list[str]:
    """List the innermost layers that returned a given tensor, or one that was resized into it.

    A container may return the same tensor.
    """
    written = [(name, out) for name, out in events.written if name and isinstance(out, Tensor)]
    matching = [name for name, out in written if _is_same(out, result)]
    matching = matching or [name for name, out in written if _is_resized(out, result)]
    return [name for name in matching if not any(other.startswith(f"{name}.") for other in matching)]


def _check_same_head(events: _Events, returned: Any, output: Entry, tap: Tap) -> None:
    """Refuse an `output` of one head if the tap `logits`, which is aligned, belongs to another head."""
    if output is None or tap.side == "input":
        return
    writers = _find_writers(events, pick(returned, output, "the model"))
    if not writers or tap.module in writers:
        return
    if any(tap.module in _find_writers(events, entry) for entry in find_tensors(returned)):
        raise TapError(
            f"Expected output= to be an entry that {tap.module!r} (tap 'logits') writes, got {output!r}. Name that "
            f"entry, or profile with output={output!r}."
        )


def _is_same(written: Tensor, result: Tensor) -> bool:
    """Tell whether a tensor is the model's output, or the output is a view of it, e.g. after `x.squeeze(-1)`."""
    if written is result:
        return True
    return written.numel() == result.numel() and (
        written.data_ptr() == result.data_ptr() or torch.equal(written.reshape(-1), result.reshape(-1))
    )


def _is_resized(written: Tensor, result: Tensor) -> bool:
    """Tell whether the model's output is a map `[N, C, ...]` that was interpolated to another size."""
    size = result.shape[2:]
    if (written.shape[:2], written.ndim, written.dtype) != (result.shape[:2], result.ndim, result.dtype):
        return False
    if written.shape[2:] == size or not result.is_floating_point():
        return False
    smooth = {3: ("linear",), 4: ("bilinear", "bicubic"), 5: ("trilinear",)}.get(result.ndim, ())
    ways: list[dict[str, Any]] = [{"mode": mode, "align_corners": align} for mode in smooth for align in (False, True)]
    ways += [{"mode": mode} for mode in ("nearest", "nearest-exact") if smooth]
    return any(torch.allclose(functional.interpolate(written, size, **way), result, 1e-4, 1e-6) for way in ways)
