"""Two transparent problems: one that aligning features solves, and one that it cannot (appendix C).

They are for the documentation and for tests. Data and training depend only on `seed`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shiftmend.errors import DataError


@dataclass(frozen=True, eq=False)
class Toy:
    """A model trained at the source, with data of source and target. Labels of the target are for scoring only."""

    model: nn.Module
    source_inputs: Tensor
    source_labels: Tensor
    target_inputs: Tensor
    target_labels: Tensor


def offset_toy(
    offset: float = 2.0, *, positives: float = 0.5, samples: int = 2000, normalised: bool = False, seed: int = 0
) -> Toy:
    """Make X = U[L - 0.5, L + 0.5] + E with L in {-1, 1}: aligning works, because the shift leaves the classes apart.

    E is 0 at the source and `offset` at the target; at 2 the target's negatives lie exactly where the source had its
    positives, and everything is taken for positive. The extractor is one affine map, all that is needed to undo an
    offset, with BatchNorm behind it if `normalised`. `positives` is the share of L = 1 at the target: anything but
    one half, the source's, is label shift, which aligning is not made for.
    """
    _check_samples(samples)
    if not 0 < positives < 1:
        raise DataError(f"Expected the share of positives to lie between 0 and 1, got {positives!r}.")
    generator = torch.Generator().manual_seed(seed)

    def draw(share: float, shift: float) -> tuple[Tensor, Tensor]:
        labels = (torch.rand(samples, generator=generator) < share).long()
        noise = torch.rand(samples, 1, generator=generator) - 0.5
        return 2.0 * labels[:, None] - 1 + noise + shift, labels

    source, target = draw(0.5, 0.0), draw(positives, offset)
    affine = _linear(1, 1, generator)
    # The features start as X itself, so that positive stays on the right.
    nn.init.ones_(affine.weight)
    nn.init.zeros_(affine.bias)
    extractor = nn.Sequential(affine, nn.BatchNorm1d(1)) if normalised else nn.Sequential(affine)
    return Toy(_train(extractor, _linear(1, 2, generator), *source), *source, *target)


def rotation_toy(degrees: float = 90.0, *, samples: int = 2000, seed: int = 0) -> Toy:
    """Make X from L, a standard Gaussian in the plane, turned by E; Y is the sign of L's first component.

    A rotated standard Gaussian is the same distribution: inputs, and so the features of any network and all their
    projections, are distributed in the same way for any E. Only labels could reveal the shift.
    """
    _check_samples(samples)
    generator = torch.Generator().manual_seed(seed)

    def draw(angle: float) -> tuple[Tensor, Tensor]:
        latent = torch.randn(samples, 2, generator=generator)
        turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        return latent @ turn, (latent[:, 0] > 0).long()

    source, target = draw(0.0), draw(math.radians(degrees))
    extractor = nn.Sequential(_linear(2, 8, generator), nn.Tanh())
    return Toy(_train(extractor, _linear(8, 2, generator), *source), *source, *target)


def _check_samples(samples: int) -> None:
    if samples < 2:
        raise DataError(f"Expected at least 2 samples at either site, got {samples!r}.")


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Initialise a layer from the toy's own generator, without using the global one."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
    return layer


def _train(extractor: nn.Module, head: nn.Module, inputs: Tensor, labels: Tensor, steps: int = 150) -> nn.Module:
    model = nn.Sequential(OrderedDict(extractor=extractor, head=head))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
    return model.eval()
