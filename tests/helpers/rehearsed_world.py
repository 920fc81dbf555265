"""Rehearsals small enough for tests: a table of class clusters that is rehearsed, and records with known truth."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal, RehearsedShift, round_signals
from shiftmend.verification.estimate import cross_fit

CANDIDATES = ("match-moments", "adabn")
"""Candidates without gradients: a rehearsal with them takes seconds."""


def _disturb(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Make a device of a function of inputs, of normal numbers and of numbers between 0 and 1."""

    def device(inputs: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return change(
            inputs, torch.randn(inputs.shape, generator=generator), torch.rand(inputs.shape, generator=generator)
        )

    return device


DEVICES: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": lambda inputs: inputs + 1.5,
    "gain": lambda inputs: inputs / 3,
    "drift": lambda inputs: inputs + torch.linspace(1, -2, inputs.shape[1]),
    "unit": lambda inputs: 10 * inputs - 5,
    "weights": lambda inputs: inputs * torch.linspace(0.3, 2, inputs.shape[1]),
    "baseline": lambda inputs: inputs + torch.linspace(-1, 1, inputs.shape[1]).square(),
    "lamp": lambda inputs: 0.6 * inputs - torch.linspace(0, 1, inputs.shape[1]),
    "noise/weak": _disturb(lambda inputs, normal, _: inputs + normal),
    "noise/strong": _disturb(lambda inputs, normal, _: inputs + 2.5 * normal),
    "dither": _disturb(lambda inputs, _, uniform: inputs + 5 * (uniform - 0.5)),
    "spikes": _disturb(lambda inputs, normal, uniform: inputs + 9 * normal * (uniform < 0.15)),
    "gaps": _disturb(lambda inputs, _, uniform: inputs * (uniform > 0.5)),
    "steps": lambda inputs: (inputs / 4).round() * 4,
    "mixed": lambda inputs: inputs + 0.7 * inputs.roll(1, 1),
}
"""Devices of thirteen families: half can be mended, and the others disturb alike, so each is foreseen from the rest."""

REHEARSAL: dict[str, Any] = {
    "battery": DEVICES,
    "candidates": CANDIDATES,
    "site_size": 500,
    "batch_size": 500,
    "progress": False,
}
"""Options of the rehearsal, at one size."""


@dataclass(frozen=True)
class Site:
    """Samples [N, 8] of four classes."""

    inputs: Tensor
    labels: Tensor

    def accuracy(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(self.inputs).argmax(1) == self.labels).double().mean())


def draw(samples: int, seed: int, shares: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)) -> Site:
    """Draw samples from four overlapping clusters, of which each class has its share."""
    centres = 1.1 * torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor(shares), samples, replacement=True, generator=generator)
    return Site(centres[labels] + torch.randn(samples, 8, generator=generator), labels)


def train(model: nn.Module, loss: Any, inputs: Tensor, labels: Tensor, steps: int = 80) -> nn.Module:
    """Train all weights of a small model by Adam; return it in eval mode."""
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(inputs), labels).backward()
        optimiser.step()
    return model.eval()


def make_net(outputs: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))


@functools.cache
def trained() -> tuple[nn.Module, Profile]:
    """A classifier of the clusters with its profile."""
    source = draw(1500, 1)
    model = train(make_net(), nn.functional.cross_entropy, source.inputs, source.labels)
    return model, shiftmend.profile(model, source.inputs, progress=False)


@functools.cache
def rehearsed() -> Profile:
    """The profile after a rehearsal of `DEVICES` by the candidates without gradients."""
    model, profile = trained()
    home = draw(500, 2)
    return shiftmend.rehearse(model, (home.inputs, home.labels), profile, **REHEARSAL)


def make_record(
    seed: int = 0,
    families: int = 12,
    per_family: int = 1,
    sizes: tuple[int, ...] = (1000,),
    candidates: tuple[str, ...] = (UNTOUCHED, "bufr"),
    signals: tuple[str, ...] = ("slices", "confidence", "skew"),
    noise: float = 0.02,
    cross_fitted: bool = True,
    **changes: Any,
) -> Rehearsal:
    """Make a record whose signals are noisy functions of a true accuracy, with an error of its own for each family.

    Families are exchangeable: any one of them could be the site. The first signal falls with the accuracy.
    """
    rng = np.random.default_rng(seed)
    shifts = tuple(
        RehearsedShift(f"shift {family}.{one}", f"family {family}", 0.5 + one / 10)
        for family in range(families)
        for one in range(per_family)
    )
    shape = (len(shifts), len(sizes), len(candidates))
    scores = np.repeat(rng.uniform(0.2, 0.95, (families, len(candidates))), per_family, 0)[:, None] * np.ones(shape)
    values = make_signals(scores, len(signals), noise, rng, per_family)
    facts: dict[str, Any] = {
        "task": "classes",
        "labelled": True,
        "samples": 1000,
        "sizes": sizes,
        "score": 0.95,
        "temperature": 1.5,
        "thresholds": (0.6, -0.8),
        "candidates": candidates,
        "methods": {name: {"name": name} for name in candidates},
        "signals": signals,
        "shifts": shifts,
        "scores": torch.from_numpy(scores).float(),
        "values": round_signals(torch.from_numpy(values)),
        "home_mean": torch.from_numpy(make_signals(np.full((len(sizes),), 0.95), len(signals), 0.0, rng)).float(),
        "home_deviation": torch.full((len(sizes), len(signals)), 0.01),
        "estimates": torch.full((*shape[:2], len(candidates) + 1), math.nan),
        "scales": torch.full((*shape[:2], len(candidates) + 1), math.nan),
        "chosen": torch.zeros(shape[:2]),
        "shares": torch.full((10,), 0.1),
        "confusion": torch.full((10, 10), 10.0),
    }
    record = Rehearsal(**facts | changes)
    return cross_fit(record) if cross_fitted else record


def make_signals(
    scores: np.ndarray[Any, Any], signals: int, noise: float, rng: np.random.Generator, per_family: int = 1
) -> np.ndarray[Any, Any]:
    """Return signals [..., G] that go with scores [...]; shifts of one family have the same error."""
    errors = rng.normal(0, noise, (max(1, len(scores) // per_family), *scores.shape[1:], signals))
    slopes = np.array([-0.3 if place == 0 else 0.5 + 0.1 * place for place in range(signals)])
    found: np.ndarray[Any, Any] = (scores[..., None] + np.repeat(errors, per_family, 0)) * slopes + 0.4
    return found
