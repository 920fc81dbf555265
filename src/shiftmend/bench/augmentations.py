"""Random rotations, crops and flips of whole batches, as the paper's source models were trained with.

Images are uint8 or float `[N, C, H, W]`, on any device. Every image gets its own draw from the generator given and from
nothing else; a generator on the device of the images spares a copy to it. What comes from outside an image is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from shiftmend.devices import sent

Augmentation = Callable[[Tensor, Generator], Tensor]


def rotate(images: Tensor, degrees: float, generator: Generator) -> Tensor:
    """Turn each image about its centre, counter-clockwise by a uniform angle of at most `degrees` either way.

    Every pixel becomes the one that lay nearest to where it came from: torchvision's default.
    """
    height, width = images.shape[-2:]
    angles = (2 * _uniform(images, generator) - 1) * math.radians(degrees)
    cosine, sine = angles.cos().view(-1, 1, 1), angles.sin().view(-1, 1, 1)
    # pixel centres, measured from the centre of the image; the vertical axis points down
    down = torch.arange(height, device=images.device).view(-1, 1) + 0.5 - height / 2
    right = torch.arange(width, device=images.device) + 0.5 - width / 2
    rows = (sine * right + cosine * down + height / 2).floor().long()
    columns = (cosine * right - sine * down + width / 2).floor().long()
    return _fetch(images, rows, columns)


def crop(images: Tensor, padding: int, generator: Generator) -> Tensor:
    """Surround each image by `padding` zeros on every side and cut its own size out again, anywhere."""
    height, width = images.shape[-2:]
    top, left = (
        (_uniform(images, generator) * (2 * padding + 1)).long().clamp_(max=2 * padding).view(-1, 1, 1) - padding
        for _ in range(2)
    )
    rows = top + torch.arange(height, device=images.device).view(-1, 1)
    columns = left + torch.arange(width, device=images.device)
    return _fetch(images, rows, columns)


def flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirror half of the images, left to right."""
    mirrored = _uniform(images, generator) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)


def _uniform(images: Tensor, generator: Generator) -> Tensor:
    """A number in [0, 1) for each image."""
    draws = torch.rand(len(images), generator=generator, device=generator.device)
    return sent(draws, images.device)


def _fetch(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels at `rows` and `columns`, integers that broadcast to `[N, H, W]`; 0 for places outside."""
    height, width = images.shape[-2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    index = places.flatten(1).unsqueeze(1).expand(-1, images.shape[1], -1)
    fetched = images.flatten(2).gather(2, index).view_as(images)
    return fetched.masked_fill_(~inside.unsqueeze(1), 0)


def _crop_and_flip(images: Tensor, generator: Generator) -> Tensor:
    return flip(crop(images, 4, generator), generator)


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": lambda images, generator: images,
    "rotate-10": lambda images, generator: rotate(images, 10, generator),
    "crop-flip": _crop_and_flip,
    "crop-flip-rotate-15": lambda images, generator: rotate(_crop_and_flip(images, generator), 15, generator),
}
"""By the name in a recipe: MNIST's is `rotate-10`, CIFAR-10's `crop-flip`, CIFAR-100's `crop-flip-rotate-15`."""
