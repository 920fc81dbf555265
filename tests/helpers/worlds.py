"""A tiny measurement shift with a trained source model: sensors whose gains and offsets have changed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.inputs.feed import Feed
from shiftmend.profiles.profile import Profile

GAIN, OFFSET = torch.tensor([0.4, 2.0, 1.0, 1.5, 0.6, 1.0]), torch.tensor([3.0, -6.0, 9.0, 0.0, -4.0, 6.0])
"""What the sensors at the target do to the readings."""


@dataclass(frozen=True)
class World:
    model: nn.Module
    source: Tensor
    target: Tensor
    labels: Tensor

    def accuracy(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(self.target).argmax(1) == self.labels).float().mean())

    def profile(self, preset: str = "reference") -> Profile:
        return shiftmend.profile(self.model, self.source, preset=preset, progress=False)


@functools.cache
def sensors(norm: bool = True, samples: int = 600) -> World:
    """Three classes of six readings; at the target each sensor has another gain and offset."""
    torch.manual_seed(0)
    centres = 2.0 * torch.randn(3, 6)

    def draw() -> tuple[Tensor, Tensor]:
        labels = torch.arange(samples) % 3
        return centres[labels] + torch.randn(samples, 6), labels

    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 12), nn.ReLU()]
    model = nn.Sequential(
        *(layer for layer in layers if norm or not isinstance(layer, nn.BatchNorm1d)), nn.Linear(12, 3)
    )
    source, labels = draw()
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(source), labels).backward()
        optimiser.step()
    clean, target_labels = draw()
    return World(model.eval(), source, clean * GAIN + OFFSET, target_labels)


def an_epoch(feed: Feed, seed: int, number: int) -> Iterator[Tensor]:
    """The inputs of an epoch's batches."""
    return (inputs for inputs, _ in feed.epoch(seed, number))
