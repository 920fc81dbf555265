"""Attaching taps to any `nn.Module`, and removing them.

Taps are forward hooks: the model is never rebuilt, and no hook outlives its `with` block. Activations are cloned at
once, because an in-place ReLU that follows would overwrite them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from torch import Tensor, nn

from shiftmend.errors import TapError
from shiftmend.introspection.modes import force_eager
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.stats.histograms import as_samples
from shiftmend.utils.checks import brief, check_axis


@dataclass(frozen=True)
class Tap:
    """A named point in a model: the input or the output of one of its modules.

    `profile(..., taps=...)` takes taps as text too: `"layer1"`, `"layer1:input"` or `"layer1:output"`, followed by
    `@axis` where units do not lie on axis 1, such as `"encoder.3@-1"` for tokens `[N, T, C]`.

    Args:
        name: Name of the tap in the profile, e.g. `"features"`.
        module: Name of the module, as in `model.named_modules()`.
        side: Whether to record what the module reads (`"input"`) or what it returns (`"output"`).
        channel_axis: Axis of the units; all other axes count samples.
        entry: Index or key of the tensor to record, if the module returns a tuple or a dict.

    Raises:
        TapError: If an argument has the wrong type, or the axis is that of the samples.

    Example:
        >>> from shiftmend import Tap
        >>> tap = Tap("early", "layer1", "input", channel_axis=-1)
        >>> str(tap)
        'layer1:input@-1'
        >>> Tap.parse("early", "layer1:input@-1") == tap
        True
    """

    name: str
    module: str
    side: Literal["input", "output"] = "output"
    channel_axis: int = 1
    entry: Entry = None

    def __post_init__(self) -> None:
        if not isinstance(self.module, str):
            raise TapError(f"Expected tap {self.name!r} to name a module, e.g. 'layer1', got {brief(self.module)}.")
        if self.side not in ("input", "output"):
            raise TapError(f"Expected the side of tap {self.name!r} to be 'input' or 'output', got {brief(self.side)}.")
        check_axis(self.channel_axis, f"tap {self.name!r}")

    @staticmethod
    def parse(name: str, spec: str | Tap) -> Tap:
        """Make a tap from its text.

        Args:
            name: Name of the tap in the profile.
            spec: `module`, `module:input` or `module:output`, perhaps followed by `@axis`; or a tap to rename.

        Returns:
            The tap. Malformed text raises a `TapError`.
        """
        if isinstance(spec, Tap):
            return replace(spec, name=name)
        if not isinstance(spec, str):
            raise TapError(
                f"Expected tap {name!r} to be the name of a module, e.g. 'layer1', or a Tap, got {brief(spec)}."
            )
        rest, _, axis = spec.partition("@")
        module, _, side = rest.partition(":")
        if side not in ("", "input", "output") or (axis and not re.fullmatch("-?[0-9]+", axis)):
            raise TapError(
                f"Expected tap {name!r} to read 'module', 'module:input' or 'module:output', perhaps with '@axis' for "
                f"its units, got {spec!r}."
            )
        return Tap(name, module, "input" if side == "input" else "output", int(axis) if axis else 1)

    def __str__(self) -> str:
        axis = "" if self.channel_axis == 1 else f"@{self.channel_axis}"
        return f"{self.module}{':input' if self.side == 'input' else ''}{axis}"


class Recorder:
    """Store for the activations at taps during one forward pass; `attach_taps` creates it and fills it by hooks.

    `read` returns the activations and clears the store for the next forward pass.

    Args:
        taps: Taps to record, by name.
    """

    def __init__(self, taps: Mapping[str, Tap]) -> None:
        self._taps = taps
        self._seen: dict[str, list[Tensor]] = {name: [] for name in taps}

    def record(self, name: str, value: Any) -> None:
        """Add a copy of a value that the module of a tap received or returned.

        Calls for the same tap add up, so that `read` can refuse a module that ran more than once.

        Args:
            name: Name of the tap.
            value: Input or output of the module. The `entry` of the tap selects one tensor of a tuple or dict.

        Raises:
            TapError: If no tensor can be selected.
        """
        tap = self._taps[name]
        tensor = pick(value, tap.entry, f"module {tap.module!r} of tap {name!r}", "Tap(..., entry={!r})")
        self._seen[name].append(tensor.clone())

    def read(self) -> dict[str, Tensor]:
        """Return activations `[samples, units]` by tap, and clear them; each module must have run exactly once."""
        seen = self._seen
        self.forget()
        for name, values in seen.items():
            if len(values) != 1:
                count = "never ran" if not values else f"ran {len(values)} times"
                raise TapError(
                    f"Expected {str(self._taps[name])!r} of tap {name!r} to run once in a forward pass, but it "
                    f"{count}. Tap a module that runs exactly once."
                )
        return {name: _to_samples(self._taps[name], values[0]) for name, values in seen.items()}

    def forget(self) -> None:
        """Discard the recorded activations. Call this method after a backward pass.

        Activation checkpointing repeats the forward pass during the backward pass, and the recorder records the
        repetition too.
        """
        self._seen = {name: [] for name in self._taps}


def _to_samples(tap: Tap, values: Tensor) -> Tensor:
    """Reshape activations to `[samples, units]`."""
    if values.ndim == 0:
        raise TapError(
            f"Expected a row for each sample at tap {tap.name!r} ({str(tap)!r}), got a single number. Tap another "
            "module."
        )
    if values.is_complex():
        raise TapError(
            f"Expected real numbers at tap {tap.name!r} ({str(tap)!r}), got complex ones, which have no histogram. Tap "
            "another module."
        )
    if values.ndim > 1 and not -values.ndim < tap.channel_axis < values.ndim:
        raise TapError(
            f"Expected tap {tap.name!r} to have its units on an axis of {list(values.shape)}, got axis "
            f"{tap.channel_axis}. Try '{tap.module}@-1'."
        )
    return as_samples(values, tap.channel_axis)


def module_of(model: nn.Module, tap: Tap) -> nn.Module:
    """Return the module of a tap; the error for an unknown name suggests similar ones."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if tap.module not in modules:
        close = [name for name in modules if name.endswith(f".{tap.module}")] or get_close_matches(tap.module, modules)
        hint = f". Try {' or '.join(map(repr, close[:4]))}" if close else ""
        raise TapError(f"Expected tap {tap.name!r} to name a module of the model, got {tap.module!r}{hint}.")
    return modules[tap.module]


@contextmanager
def attach_taps(model: nn.Module, taps: Mapping[str, Tap], eager: bool = True) -> Iterator[Recorder]:
    """Record the activations at the taps inside the block; afterwards no hook is left on the model.

    Compiled parts of the model run eagerly, unless they were compiled with these taps attached (`eager=False`).
    """
    recorder = Recorder(taps)
    with ExitStack() as stack:
        if eager:
            stack.enter_context(force_eager(model))
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
