"""Recipes: all that decides how a source model is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from shiftmend import checkpoints
from shiftmend.bench.augmentations import AUGMENTATIONS
from shiftmend.checks import is_whole
from shiftmend.errors import DataError
from shiftmend.models import MODELS, build

SCHEDULES = ("cosine", "inverse")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a source model is trained: momentum SGD on cross-entropy, and the weights after the last epoch."""

    network: str
    """A name that `shiftmend.models.build` knows."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of the network, such as `classes`."""
    epochs: int
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 256
    label_smoothing: float = 0.0
    augmentation: str = "none"
    """A name in `AUGMENTATIONS`."""
    schedule: str = "cosine"
    """See `rate`."""
    pretrained: str | None = None
    """A safetensors file, in the data folder if its path is relative, with weights for everything but the head. It is
    known by its name alone: other weights need another name."""
    nesterov: bool = False
    autocast: bool = False
    """Train in bfloat16 where there is a GPU; the weights and the loss stay in full precision."""

    def __post_init__(self) -> None:
        # one form for what is equal: 1 and 1.0 must not give two digests
        object.__setattr__(self, "options", dict(self.options))
        for name in ("learning_rate", "momentum", "weight_decay", "label_smoothing"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("nesterov", "autocast"):
            object.__setattr__(self, name, bool(getattr(self, name)))
        for name, holds, expected in (
            ("network", self.network in MODELS, f"one of {', '.join(MODELS)}"),
            ("epochs", is_whole(self.epochs) and self.epochs >= 1, "a whole number of at least 1"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "above 0"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"),
            ("batch_size", is_whole(self.batch_size) and self.batch_size >= 2, "at least 2, for BatchNorm"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and below 1"),
            ("augmentation", self.augmentation in AUGMENTATIONS, f"one of {', '.join(AUGMENTATIONS)}"),
            ("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            ("nesterov", not self.nesterov or self.momentum > 0, "False without momentum"),
        ):
            if not holds:
                raise DataError(f"{name} of a recipe must be {expected}, got {getattr(self, name)!r}")

    def facts(self) -> dict[str, Any]:
        """All fields, ready for JSON; `autocast` goes without saying where it is off, as in protocols."""
        return {name: value for name, value in asdict(self).items() if name != "autocast" or value}

    def digest(self, extra: Mapping[str, Any] | None = None) -> str:
        """16 hexadecimal digits that change with every field and with whatever else decides the result."""
        return checkpoints.identify({"recipe": self.facts(), "extra": dict(extra or {})})


def rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, counted from 0 over all epochs.

    `cosine` changes it after each epoch and would reach 0 after the last; `inverse` is SHOT's
    `(1 + 10 progress)^-0.75`, changed after each step.
    """
    if recipe.schedule == "cosine":
        return recipe.learning_rate * (1 + math.cos(math.pi * (step // steps_per_epoch) / recipe.epochs)) / 2
    return float(recipe.learning_rate * (1 + 10 * step / (recipe.epochs * steps_per_epoch)) ** -0.75)


def untrained(recipe: Recipe, seed: int = 0) -> nn.Module:
    """The recipe's network, freshly initialised on the CPU; the global generators stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build(recipe.network, **recipe.options)
