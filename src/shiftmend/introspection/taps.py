"""Put taps on any `nn.Module` and take them off again.

Taps are forward hooks: the model is never rebuilt, and no hook outlives its `with` block. What a module gives is
cloned at once, because a following in-place ReLU would overwrite it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from torch import Tensor, nn

from shiftmend.errors import TapError
from shiftmend.introspection.modes import eager
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.stats.histograms import as_samples
from shiftmend.utils.checks import brief, check_axis


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
