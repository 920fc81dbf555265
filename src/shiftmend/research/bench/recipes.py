"""Recipes: everything that determines how a source model is trained, and the augmentations that they name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from shiftmend.engine.checkpoint import identify
from shiftmend.errors import DataError
from shiftmend.research.networks import MODELS, build
from shiftmend.utils.devices import send

SCHEDULES = ("cosine", "inverse")

Augmentation = Callable[[Tensor, Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings for training a source model by momentum SGD on cross-entropy; the weights of the last epoch are used."""

    network: str
    """A name that `shiftmend.research.networks.build` knows."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of the network, such as `classes`."""
    epochs: int
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 256
    label_smoothing: float = 0.0
    augmentation: str = "none"
    """A name in `AUGMENTATIONS`."""
    schedule: str = "cosine"
    """See `learning_rate_at`."""
    pretrained: str | None = None
    """A safetensors file, in the data folder if its path is relative, with weights for everything but the head. Only
    its name enters the recipe: other weights need another name."""
    nesterov: bool = False
    autocast: bool = False
    """Whether to train in bfloat16 on a GPU. The weights and the loss stay in full precision."""

    def __post_init__(self) -> None:
        # 1 and 1.0 are equal, and must give the same digest.
        object.__setattr__(self, "options", dict(self.options))
        for name in ("learning_rate", "momentum", "weight_decay", "label_smoothing"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name, known in (("network", MODELS), ("augmentation", AUGMENTATIONS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise DataError(
                    f"Expected the {name} of a recipe to be one of {', '.join(known)}, got {getattr(self, name)!r}."
                )

    def facts(self) -> dict[str, Any]:
        """List all fields for JSON. `autocast` is omitted if off, because digests are older than this option."""
        return {name: value for name, value in asdict(self).items() if name != "autocast" or value}

    def digest(self, extra: Mapping[str, Any] | None = None) -> str:
        """Compute 16 hexadecimal digits that change with every field and with the `extra` facts."""
        return identify({"recipe": self.facts(), "extra": dict(extra or {})})


def learning_rate_at(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Compute the learning rate of a training step from the recipe's schedule.

    Let p be the share of training that is done, from 0 to below 1. Schedule `"cosine"` returns `learning_rate * (1 +
    cos(pi p)) / 2`, with p counted in whole epochs. Schedule `"inverse"` returns `learning_rate * (1 + 10 p)^-0.75`,
    with p counted in steps, as SHOT does.

    Args:
        recipe: Recipe with `schedule`, `learning_rate` and `epochs`.
        step: Number of the step, counted from 0 over all epochs.
        steps_per_epoch: Number of steps in an epoch.
    """
    if recipe.schedule == "cosine":
        return recipe.learning_rate * (1 + math.cos(math.pi * (step // steps_per_epoch) / recipe.epochs)) / 2
    return float(recipe.learning_rate * (1 + 10 * step / (recipe.epochs * steps_per_epoch)) ** -0.75)


def build_untrained(recipe: Recipe, seed: int = 0) -> nn.Module:
    """Build the recipe's network on the CPU, without changing the global random number generators."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build(recipe.network, **recipe.options)


def rotate(images: Tensor, degrees: float, generator: Generator) -> Tensor:
    """Rotate each image about its centre, by a uniform angle of at most `degrees` in either direction.

    Every pixel becomes the pixel that lay nearest to where it came from: torchvision's default.
    """
    height, width = images.shape[-2:]
    angles = (2 * _draw_uniform(images, generator) - 1) * math.radians(degrees)
    cosine, sine = angles.cos().view(-1, 1, 1), angles.sin().view(-1, 1, 1)
    # Pixel centres are measured from the centre of the image; the vertical axis points down.
    down = torch.arange(height, device=images.device).view(-1, 1) + 0.5 - height / 2
    right = torch.arange(width, device=images.device) + 0.5 - width / 2
    rows = (sine * right + cosine * down + height / 2).floor().long()
    columns = (cosine * right - sine * down + width / 2).floor().long()
    return _gather_pixels(images, rows, columns)


def crop(images: Tensor, padding: int, generator: Generator) -> Tensor:
    """Pad each image by `padding` zeros on every side and crop it at a random position to its own size."""
    height, width = images.shape[-2:]
    top, left = (
        (_draw_uniform(images, generator) * (2 * padding + 1)).long().clamp_(max=2 * padding).view(-1, 1, 1) - padding
        for _ in range(2)
    )
    rows = top + torch.arange(height, device=images.device).view(-1, 1)
    columns = left + torch.arange(width, device=images.device)
    return _gather_pixels(images, rows, columns)


def flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirror half of the images, left to right."""
    mirrored = _draw_uniform(images, generator) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)


def _crop_and_flip(images: Tensor, generator: Generator) -> Tensor:
    return flip(crop(images, 4, generator), generator)


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": lambda images, generator: images,
    "rotate-10": lambda images, generator: rotate(images, 10, generator),
    "crop-flip": _crop_and_flip,
    "crop-flip-rotate-15": lambda images, generator: rotate(_crop_and_flip(images, generator), 15, generator),
}
"""Augmentations by their names in a recipe: MNIST's is `rotate-10`, CIFAR-10's `crop-flip`, CIFAR-100's
`crop-flip-rotate-15`."""


def _draw_uniform(images: Tensor, generator: Generator) -> Tensor:
    """Draw a number in [0, 1) for each image."""
    draws = torch.rand(len(images), generator=generator, device=generator.device)
    return send(draws, images.device)


def _gather_pixels(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Take the pixels at `rows` and `columns`, integers that broadcast to `[N, H, W]`; 0 for places outside."""
    height, width = images.shape[-2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    index = places.flatten(1).unsqueeze(1).expand(-1, images.shape[1], -1)
    fetched = images.flatten(2).gather(2, index).view_as(images)
    return fetched.masked_fill_(~inside.unsqueeze(1), 0)
