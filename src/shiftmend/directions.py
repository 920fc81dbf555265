"""Random directions for slices, the same for a seed on every machine and for ever."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend.devices import in_parts


def random_directions(count: int, units: int, seed: int) -> Tensor:
    """`count` fixed random unit vectors `[count, units]`, the same on every machine and in every version.

    A profile stores only the seed, so the numbers must never change: they come from a splitmix64 counter and
    Box-Muller written out here rather than from a library's generator, whose stream may change. A few rows are
    made at a time, so that a file which asks for many costs little more memory than the result.
    """
    directions = torch.empty(count, units, dtype=torch.float32, device="cpu")
    done = 0
    for part in in_parts(directions):
        index = np.arange(done, done + part.numel(), dtype=np.uint64)
        radius, angle = _uniform(index, seed), _uniform(index + np.uint64(count * units), seed)
        normal = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
        vectors = torch.from_numpy(normal.reshape(part.shape))
        part.copy_(torch.nn.functional.normalize(vectors, dim=1))
        done += part.numel()
    return directions


def _uniform(index: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """The numbers at these places of the splitmix64 stream of a seed, above 0 and at most 1."""
    with np.errstate(over="ignore"):
        z = (index + np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
