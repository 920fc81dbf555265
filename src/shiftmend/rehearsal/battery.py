"""The battery: simulated devices at chosen strengths, from harmless to ruinous, for rehearsals at home.

>>> images = torch.rand(20, 1, 16, 16)
>>> devices = list_devices(images)
>>> plan = plan_battery(images, devices, lambda shifted: 1 - float((shifted - images).abs().mean()), size=3)
>>> [shift(images).shape == images.shape for shift in plan]
[True, True, True]
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.rehearsal import devices as simulated
from shiftmend.utils.checks import check_function
from shiftmend.utils.checks import kind as kind_of
from shiftmend.utils.devices import split_rows
from shiftmend.utils.tensor_tree import Inputs, TensorTree, list_leaves, unwrap_inputs, wrap_inputs

Kind = Literal["image", "signal", "table"]

LISTS: dict[str, tuple[simulated.Entry, ...]] = {
    "image": simulated.IMAGE_DEVICES,
    "signal": simulated.SIGNAL_DEVICES,
    "table": simulated.TABLE_DEVICES,
}

FIRST_STRENGTHS = (1.0, 0.5, 0.2)
MAX_SCORES_PER_DEVICE = 5
"""Largest number of scores per device in the search for strengths; a device that is used more often gets more."""

UNMENDABLE_SHARE = 1 / 6
SEVERE_SHARE = 1 / 3
"""Share of the battery that should do the most harm; half of it are devices that no method can correct."""


@dataclass(frozen=True)
class SimulatedDevice:
    """A simulated device, which changes all home inputs in the same way.

    Attributes:
        name: Plain name, shown in tables.
        family: Name of the family. Devices of one family have similar effects; cross-validation leaves out whole
            families.
        apply: Function of inputs, a strength in (0, 1] and a seed. Returns inputs of the same shape and dtype.
        mendable: False for devices that destroy information which the model needs. They show what failure looks like.
    """

    name: str
    family: str
    apply: Callable[[Any, float, int], Any]
    mendable: bool = True


@dataclass(frozen=True)
class PlannedShift:
    """A device at a strength: one shift of a battery."""

    device: SimulatedDevice
    strength: float

    @property
    def name(self) -> str:
        """The name of the device."""
        return self.device.name

    @property
    def family(self) -> str:
        """The family of the device."""
        return self.device.family

    def __call__(self, inputs: Inputs, seed: int = 0) -> Inputs:
        """Apply the device to inputs."""
        shifted: Inputs = self.device.apply(inputs, self.strength, seed)
        return shifted


@dataclass(frozen=True, eq=False)
class _Simulation:
    """A function of `rehearsal.devices` with the statistics of home. Unlike a closure, an instance can be pickled."""

    function: Callable[..., Tensor]
    home: simulated.ImageHome | simulated.SignalHome | simulated.TableHome
    shape: tuple[int, ...]
    """Shape of one sample as the function receives it."""

    def __call__(self, inputs: Tensor, strength: float, seed: int) -> Tensor:
        rng = torch.Generator(inputs.device).manual_seed(seed)
        return torch.cat([self._shift(part, strength, rng) for part in split_rows(inputs)])

    def _shift(self, inputs: Tensor, strength: float, rng: torch.Generator) -> Tensor:
        exact = inputs.to(torch.promote_types(inputs.dtype, torch.float32)).reshape(-1, *self.shape)
        origin, scale = self.home.origin.to(exact), self.home.scale.to(exact)
        values = (exact - origin) / simulated.without_zeros(scale)
        is_image = isinstance(self.home, simulated.ImageHome)
        if is_image:
            values.clamp_(0, 1)
        changed = self.function(values, strength, rng, self.home)
        if is_image:
            changed = changed.clamp(0, 1)
        # Only the difference is added, so values that a device leaves alone stay bitwise equal.
        shifted = (exact + (changed - values) * scale).reshape(inputs.shape)
        if not inputs.is_floating_point():
            limits = torch.iinfo(inputs.dtype)
            shifted = shifted.round().clamp(limits.min, limits.max)
        return shifted.to(inputs.dtype)


@dataclass(frozen=True, eq=False)
class _OwnFunction:
    """A user's function in the form of a device; strength and seed are ignored."""

    name: str
    function: Callable[[Any], Any]

    def __call__(self, inputs: Inputs, strength: float, seed: int) -> Inputs:
        # The clone protects the home data from functions that work in place.
        shifted = self.function(unwrap_inputs(inputs.clone()))
        if isinstance(shifted, Tensor | tuple | Mapping):
            wrapped = wrap_inputs(shifted)
            if _list_kinds(wrapped) == _list_kinds(inputs):
                return wrapped
        raise DataError(
            f"Expected {_describe(inputs)} from {self.name!r} of the battery, got {_describe(shifted)}. "
            "Try to keep shape and dtype of the inputs."
        )


def _list_kinds(inputs: Inputs) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return sorted((name, tuple(leaf.shape), leaf.dtype) for name, leaf in list_leaves(inputs))


def list_devices(inputs: Inputs, kind: Kind | None = None) -> list[SimulatedDevice]:
    """List the simulated devices for a kind of input, scaled to the range of the home inputs.

    Args:
        inputs: Home inputs: images `[N, C, H, W]` (integers, or floating point in any normalisation), signals
            `[N, C, L]` or tables `[N, D]` (floating point).
        kind: Kind of the inputs; by default inferred from their shape. If given, the channel axis may be missing, e.g.
            for signals `[N, L]`.

    Returns:
        The devices, with the most important families first.

    Raises:
        DataError: If the inputs are neither images, signals nor tables.

    >>> sorted({device.family for device in list_devices(torch.rand(8, 5))})[:4]
    ['baseline', 'cross-talk', 'defects', 'gain']
    """
    if isinstance(inputs, TensorTree):
        raise DataError(
            f"Expected inputs of one tensor, got {', '.join(inputs.names)}. Try battery= with functions of your own."
        )
    found, shape = _recognise(inputs, kind)
    values = inputs.reshape(-1, *shape)
    measures: dict[str, Callable[[Tensor], Any]] = {
        "image": simulated.ImageHome.measure,
        "signal": simulated.SignalHome.measure,
        "table": simulated.TableHome.measure,
    }
    home = measures[found](values)
    return [
        SimulatedDevice(entry.name, entry.family, _Simulation(entry.function, home, shape), entry.mendable)
        for entry in LISTS[found]
        if shape[0] >= entry.least
    ]


def _recognise(inputs: Tensor, kind: Kind | None) -> tuple[Kind, tuple[int, ...]]:
    """Return the kind of the inputs and the full shape of a sample, including a missing channel axis."""
    by_rank: dict[int, Kind] = {4: "image", 3: "signal", 2: "table"}
    found = kind or by_rank.get(inputs.ndim)
    is_number = inputs.is_floating_point() or (
        found == "image" and not inputs.is_complex() and inputs.dtype != torch.bool
    )
    axes = {"image": 3, "signal": 2, "table": 1}.get(found or "", 0)
    sample = tuple(inputs.shape[1:])
    if found == "table":
        sample = (math.prod(sample),)
    elif sample and len(sample) == axes - 1:
        sample = (1, *sample)
    if found is None or not is_number or len(sample) != axes or inputs.numel() == 0:
        raise DataError(
            f"Expected images, signals or tables, [N, C, H, W], [N, C, L] or [N, D], got {_describe(inputs)}. "
            "Try battery=[...] of your own functions."
        )
    return found, sample


def _describe(inputs: Any) -> str:
    if isinstance(inputs, TensorTree):
        return ", ".join(f"{name} {_describe(leaf)}" for name, leaf in inputs.named_leaves)
    if not isinstance(inputs, Tensor):
        return kind_of(inputs)
    return f"{str(inputs.dtype).removeprefix('torch.')} {list(inputs.shape)}"


def from_functions(
    functions: Sequence[Callable[[Any], Any] | tuple[str, Callable[[Any], Any]]] | Mapping[str, Callable[[Any], Any]],
) -> list[PlannedShift]:
    """Make a battery of functions that turn inputs into inputs of the same shape and dtype.

    Args:
        functions: Functions, pairs of a name and a function, or a dict of functions by name. Functions named
            "family/name" form a family; every other function is a family of its own.

    Returns:
        One shift per function, in the given order.

    Raises:
        DataError: If there is no function, or if two have the same name.

    >>> [(shift.family, shift.name) for shift in from_functions({"lamp/dim": lambda x: x / 2, "flip": torch.neg})]
    [('lamp', 'dim'), ('flip', 'flip')]
    """
    pairs = list(functions.items()) if isinstance(functions, Mapping) else list(functions)
    plan = []
    for number, given in enumerate(pairs, start=1):
        label, function = given if isinstance(given, tuple) else (_name(given, number), given)
        check_function(function, f"function {number} of the battery", "inputs")
        family, _, name = label.rpartition("/")
        device = SimulatedDevice(name, family or name, _OwnFunction(name, function))
        plan.append(PlannedShift(device, 1.0))
    names = {(shift.family, shift.name) for shift in plan}
    if not plan or len(names) < len(plan):
        raise DataError(
            f"Expected functions of different names for the battery, got {len(plan)} with {len(names)} names. "
            'Try {"name": function, ...}.'
        )
    return plan


def _name(function: Any, number: int) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return f"function {number}" if name == "<lambda>" else str(name)


def plan_battery(
    inputs: Tensor,
    devices: Sequence[SimulatedDevice],
    score: Callable[[Tensor], float],
    *,
    size: int = 12,
    seed: int = 0,
    ruined: float | None = None,
) -> list[PlannedShift]:
    """Choose devices and strengths so that the scores of the untouched model spread evenly from unharmed to useless.

    Every family is used once before any is used again. About a sixth of the battery are devices that no method can
    correct. These, and as many others, get the strengths that do the most harm. A device without any effect is kept at
    strength 1.

    Args:
        inputs: Home inputs to try strengths on; about 1,000 samples are enough.
        devices: Devices to choose from, with the most important families first.
        score: Function that scores the untouched model on shifted inputs; higher is better. Called once with the inputs
            themselves, and up to five times per device.
        size: The number of shifts in the battery.
        seed: Seed of the devices, and of the choice which of them do how much harm.
        ruined: Score of a useless model, e.g. of guessing; lower scores count as equal to it. By default the lowest
            score found.

    Returns:
        The battery, in the order of `devices`. `shift(inputs, seed)` with the same seed gives the inputs that were
        scored.

    Raises:
        DataError: If there is no device to choose from, or the size is below one.
    """
    if not devices or size < 1:
        raise DataError(f"Expected devices and a size from 1, got {len(devices)} and {size}. Try list_devices(inputs).")
    clean = score(inputs)

    def harm(device: SimulatedDevice, strength: float) -> float:
        """Return how far the score falls below that on unshifted inputs; NaN counts as the largest harm."""
        found = score(device.apply(inputs, strength, seed))
        most = math.inf if ruined is None else clean - ruined
        return min(clean - found, most) if math.isfinite(found) else most

    known = {index: {1.0: harm(device, 1.0)} for index, device in enumerate(devices) if not device.mendable}
    uses = _choose(devices, size, [index for index in known if known[index][1.0] >= _half_of_greatest(known)])
    for index in set(uses):
        for strength in FIRST_STRENGTHS[1:] if index in known else FIRST_STRENGTHS:
            known.setdefault(index, {})[strength] = harm(devices[index], strength)
    reach = {index: max(filter(math.isfinite, known[index].values()), default=0.0) for index in uses}
    ruin = max(reach.values())
    aims = _spread(uses, reach, [devices[index].mendable for index in uses], ruin, seed)
    plan = []
    for index in sorted(set(uses)):
        wanted = [aim for use, aim in zip(uses, aims, strict=True) if use == index]
        _refine(known[index], wanted, ruin / (4 * size), functools.partial(harm, devices[index]))
        plan += [PlannedShift(devices[index], strength) for strength in _pick(known[index], wanted)]
    return plan


def _choose(devices: Sequence[SimulatedDevice], size: int, ruinous: Sequence[int]) -> list[int]:
    """Return indices of devices; each time, take the least-used family and its least-used device.

    A part of the battery is reserved for `ruinous` devices, which no method can correct.
    """
    families, chosen = Counter[str](), Counter[int]()
    uses: list[int] = []
    quota = min(round(UNMENDABLE_SHARE * size), len({devices[index].family for index in ruinous}))
    for place in range(size):
        among = ruinous if place < quota else range(len(devices))
        index = min(among, key=lambda index: (families[devices[index].family], chosen[index], index))
        families[devices[index].family] += 1
        chosen[index] += 1
        uses.append(index)
    return uses


def _spread(
    uses: Sequence[int], reach: Mapping[int, float], mendable: Sequence[bool], ruin: float, seed: int
) -> list[float]:
    """Assign to each use of a device the harm that it should do, evenly spaced from none to `ruin`.

    The largest harm goes to devices that cannot be corrected and to randomly drawn others, if they can do that much.
    """
    rng = random.Random(seed)
    waiting = list(range(len(uses)))
    rng.shuffle(waiting)
    waiting.sort(key=lambda use: mendable[use])
    severe = max(1, math.ceil(SEVERE_SHARE * len(uses)))
    first = waiting[:severe]
    rng.shuffle(first)
    waiting[:severe] = first
    aims = [0.0] * len(uses)
    for step in reversed(range(len(uses))):
        aim = ruin * (step + 0.5) / len(uses)
        able = [use for use in waiting if reach[uses[use]] >= aim]
        use = able[0] if able else max(waiting, key=lambda use: reach[uses[use]])
        aims[use] = aim
        waiting.remove(use)
    return aims


def _refine(known: dict[float, float], aims: Sequence[float], tolerance: float, harm: Callable[[float], float]) -> None:
    """Try more strengths of a device while its harm is far from a wanted value."""
    while len(known) < max(MAX_SCORES_PER_DEVICE, len(aims)):
        distance = {aim: min(abs(found - aim) for found in known.values()) for aim in aims}
        aim = max(distance, key=lambda aim: distance[aim])
        if distance[aim] <= tolerance and len(known) >= len(aims):
            return
        strength = _between(known, aim)
        known[strength] = harm(strength)


def _between(known: Mapping[float, float], aim: float) -> float:
    """Interpolate the smallest strength that may do a given harm; else return the middle of the widest untried gap."""
    points = [(0.0, 0.0), *sorted(known.items())]
    for (weaker, less), (stronger, more) in itertools.pairwise(points):
        if less < aim <= more:
            share = (aim - less) / (more - less) if math.isfinite(more) else 0.5
            return weaker + (stronger - weaker) * min(0.8, max(0.2, share))
    strengths = [strength for strength, _ in points]
    gaps = [(after - before, before) for before, after in itertools.pairwise(strengths)]
    width, start = max(gaps)
    return start + width / 2


def _pick(known: Mapping[float, float], aims: Sequence[float]) -> list[float]:
    """Pick for each wanted harm the closest strength; use no strength twice, and avoid strengths without effect."""
    left = dict(sorted(known.items(), reverse=True))
    picked = []
    for aim in sorted(aims, reverse=True):
        effective = [strength for strength, found in left.items() if found != 0]
        strength = min(effective or left, key=lambda strength: abs(left[strength] - aim))
        picked.append(strength)
        del left[strength]
    return sorted(picked)


def _half_of_greatest(known: Mapping[int, Mapping[float, float]]) -> float:
    """Return half of the largest harm at full strength; devices below that do not show what failure looks like."""
    return max((found[1.0] for found in known.values()), default=0.0) / 2
