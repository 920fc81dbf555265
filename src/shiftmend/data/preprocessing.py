"""From stored 8-bit images to what the paper's networks take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def signed(images: Tensor) -> Tensor:
    """8-bit images, grey or in colour, to three channels in [-1, 1]: the digits and characters."""
    scaled = images.float().div_(127.5).sub_(1)
    return scaled.expand(-1, 3, -1, -1) if images.shape[1] == 1 else scaled


def standardised(mean: Sequence[float], deviation: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """8-bit images in colour, scaled to [0, 1], less a mean and divided by a deviation for each channel."""

    def preprocess(images: Tensor) -> Tensor:
        scaled = images.float().div_(255)
        return scaled.sub_(per_channel(tuple(mean), scaled)).div_(per_channel(tuple(deviation), scaled))

    return preprocess


def per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Numbers of channels as a tensor `[1, channels, 1, 1]` beside `like`, made once and kept.

    To bring numbers to a GPU for every batch would wait for it each time, and could not be captured as a graph.
    """
    return _kept(values, like.dtype, like.device)


@functools.cache
def _kept(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept for callers of any kind
        return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)
