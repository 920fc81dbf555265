"""Division of data for the benchmarks, by indices that depend only on a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.utils.checks import counted

MNIST_VALIDATION = 6_000
MNIST_SEED = 12345


def held_out(count: int, validation: int = MNIST_VALIDATION, seed: int = MNIST_SEED) -> tuple[Tensor, Tensor]:
    """Draw training and validation indices; the defaults divide MNIST's 60,000 into 54,000 and 6,000.

    Every shifted version of MNIST keeps MNIST's order, so the same call selects the same digits in each version.
    """
    if not 0 < validation < count:
        raise DataError(f"Expected to hold out between 1 and {count - 1} of {count} samples, got {validation}.")
    order = torch.randperm(count, generator=_generator(seed), device="cpu")
    return order[validation:].sort().values, order[:validation].sort().values


def emnist_source(labels: Tensor, train: int = 2_000, validation: int = 400) -> tuple[Tensor, Tensor | None]:
    """Take the first `train` and the last `validation` samples of each class, in file order; None if too few are left.

    EMNIST Balanced has 2,400 samples a class: 2,000 to train the source model and 400 to validate it.
    """
    groups = _by_class(labels)
    smallest = min(groups, key=len)
    if len(smallest) < train:
        raise DataError(
            f"Expected at least {train} samples in every class, got {counted(len(smallest), 'sample')} of class "
            f"{int(labels[smallest[0]])}."
        )
    first = torch.cat([group[:train] for group in groups]).sort().values
    if validation < 1 or len(smallest) < train + validation:
        return first, None
    return first, torch.cat([group[-validation:] for group in groups]).sort().values


def fractions(count: int, parts: Sequence[float] = (0.8, 0.1, 0.1), seed: int = 0) -> tuple[Tensor, ...]:
    """Draw random disjoint parts that cover all samples; the last part takes the rest left by rounding."""
    if min(parts, default=0.0) <= 0 or abs(sum(parts) - 1) > 1e-9:
        raise DataError(f"Expected positive fractions that add up to 1, got {list(parts)}.")
    sizes = [int(count * part + 1e-9) for part in parts[:-1]]
    sizes.append(count - sum(sizes))
    if min(sizes) < 1:
        raise DataError(
            f"Expected enough samples for parts of {list(parts)}, got {count}, of which one part would be empty. Use "
            "fewer parts."
        )
    order = torch.randperm(count, generator=_generator(seed), device="cpu")
    return tuple(part.sort().values for part in torch.split(order, sizes))


def halves(labels: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw two disjoint halves that cover all samples, class by class."""
    order = torch.randperm(len(labels), generator=_generator(seed), device="cpu")
    ranks = torch.empty_like(order)
    ranks[order[labels.cpu()[order].argsort(stable=True)]] = torch.arange(len(labels))
    first = ranks % 2 == 0
    return first.nonzero().flatten(), (~first).nonzero().flatten()


def few_shot(labels: Tensor, per_class: int, seed: int = 0) -> Tensor:
    """Draw `per_class` samples of each class without replacement."""
    if per_class < 1:
        raise DataError(f"Expected at least one sample per class, got {per_class}.")
    generator = _generator(seed)
    chosen = []
    for group in _by_class(labels):
        if len(group) < per_class:
            raise DataError(
                f"Expected at least {per_class} samples in every class, got {counted(len(group), 'sample')} of class "
                f"{int(labels[group[0]])}. Ask for less."
            )
        chosen.append(group[torch.randperm(len(group), generator=generator, device="cpu")[:per_class]])
    return torch.cat(chosen).sort().values


def balanced(labels: Tensor, per_class: int, seed: int = 0) -> Tensor:
    """Draw exactly `per_class` indices of each class, by leaving samples out or repeating them.

    Within a class, the numbers of times that two samples are drawn differ by at most one.

    Returns:
        Indices into `labels`, int64 and ascending.
    """
    if per_class < 1:
        raise DataError(f"Expected at least one sample per class, got {per_class}.")
    generator = _generator(seed)
    chosen = []
    for group in _by_class(labels):
        repeats, rest = divmod(per_class, len(group))
        drawn = group[torch.randperm(len(group), generator=generator, device="cpu")[:rest]]
        chosen.append(torch.cat([group.repeat(repeats), drawn]))
    return torch.cat(chosen).sort().values


def _by_class(labels: Tensor) -> list[Tensor]:
    """Return the indices of each class that occurs, in their original order."""
    if labels.ndim != 1 or len(labels) == 0:
        raise DataError(f"Expected a vector of at least one label, got {list(labels.shape)}.")
    if int(labels.min()) < 0:
        raise DataError(
            f"Expected class numbers from 0, got a label {int(labels.min())}. Leave out samples without a class."
        )
    order = torch.argsort(labels, stable=True)
    return list(torch.split(order, torch.unique(labels, return_counts=True)[1].tolist()))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
