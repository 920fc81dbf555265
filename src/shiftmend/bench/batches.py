"""The batches that a source model is trained on, from images that lie on the device or from files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from shiftmend.data.base import Split
from shiftmend.data.streamed import ImageFiles
from shiftmend.devices import in_background, sent

MOST_WORKERS = 8

Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


def batches_of(
    images: Split | ImageFiles, size: int, device: torch.device, generator: Generator, workers: int | None
) -> Batches:
    """What gives the full batches of an epoch, in a new random order each time it is called."""
    if isinstance(images, ImageFiles):
        files = images
        processes = min(MOST_WORKERS, os.cpu_count() or 1) if workers is None else workers

        def streamed() -> Iterator[tuple[Tensor, Tensor]]:
            # The workers, too, are seeded from it, and are new in every epoch: old ones would go on with old states.
            seed = torch.randint(1 << 62, (), generator=generator, device=generator.device)
            order = Generator().manual_seed(int(seed))
            loader = DataLoader(
                files,
                size,
                shuffle=True,
                drop_last=True,
                generator=order,
                num_workers=processes,
                pin_memory=in_background(device),
            )
            for batch, labels, _ in loader:
                yield sent(batch, device), sent(labels, device)

        return streamed
    return ResidentBatches(images, size, device, generator)


class ResidentBatches:
    """Batches of images that lie on the device."""

    def __init__(self, images: Split, size: int, device: torch.device, generator: Generator) -> None:
        assert images.labels is not None
        self.images, self.labels = images.images.to(device), images.labels.to(device)
        self.size, self.device, self.generator = size, device, generator

    def order(self) -> Tensor:
        """A new random order of all samples."""
        return torch.randperm(len(self.images), generator=self.generator, device=self.generator.device).to(self.device)

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.order()
        for index in order[: len(order) // self.size * self.size].split(self.size):
            yield self.at(index)
