"""Statistics that a profile stores: their interface, and the registry of their kinds.

A statistic describes the activations of the source at one tap: a histogram of each unit (`histograms.py`), slices of
all units together (`slices.py`), a Gaussian (`gaussians.py`).

To add one, write a module with a class that follows `Statistic`, decorated by `register`, and a tracker that collects
it over batches. Then feed the tracker in `profiles/collect.py`. Files, merging and moving to a device need no change.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from shiftmend.errors import ProfileError

if TYPE_CHECKING:
    from shiftmend.stats.histograms import Bins

LIKE_HINT = "Collect the others with like= the first, or all of them with like= one profile"
"""Advice if statistics of several profiles do not fit together."""


MAX_SAMPLES = (1 << 53) - 1
"""The largest integer that every JSON reader represents exactly."""


@dataclass(frozen=True)
class Frame:
    """Settings that all statistics of a profile share, and that its file holds once.

    `mean` and `deviation` `[D]` standardise the features before they are sliced; `usable` `[D]` marks the features that
    varied on the source.
    """

    bins: Bins
    mean: Tensor
    deviation: Tensor
    usable: Tensor


class Statistic(Protocol):
    """Interface of everything that a profile can store about a tap.

    `kind` names the class in a file. `tensor_dims` names the float32 tensors in the file of a statistic, with their
    numbers of dimensions. `samples` is the number of values per unit that were counted.
    """

    kind: ClassVar[str]
    tensor_dims: ClassVar[Mapping[str, int]]

    @property
    def samples(self) -> int: ...

    def to(self, device: torch.device) -> Self:
        """Return the same statistic on a device."""
        ...

    @classmethod
    def mix(cls, parts: Sequence[Self], times: Sequence[float]) -> Self:
        """Combine statistics of several sets of samples into the statistic of all samples together.

        Args:
            parts: One statistic per set, all with the same bins, directions or units.
            times: How often each sample of a set counts: one number above 0 per set, not necessarily an integer.

        Returns:
            The combined statistic. Its `samples` is the weighted number of samples, rounded.

        Raises:
            ProfileError: If the statistics do not fit together.
        """
        ...

    def divergence(self, values: Tensor) -> Tensor:
        """Compute how far a batch of values `[N, D]` is from the source, as a differentiable scalar tensor."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by the names in `tensor_dims`."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return everything else to store, as JSON."""
        ...

    @classmethod
    def from_file(cls, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], frame: Frame) -> Self:
        """Build the statistic `name` of a profile from the results of `facts` and `tensors`.

        The file may be forged: names, dtypes and numbers of dimensions of the tensors have been checked, but not the
        facts.
        """
        ...

    def problems(self) -> list[str]:
        """List the problems of the numbers, one sentence each."""
        ...


KINDS: dict[str, type[Statistic]] = {}
"""Every class of statistics by its kind, filled in by `register`."""


S = TypeVar("S", bound=Statistic)


def register(statistic: type[S]) -> type[S]:
    """Register a class of statistics, so that profiles can store it; used as a decorator."""
    KINDS[statistic.kind] = statistic
    return statistic


def read_whole_number(value: Any, what: str, least: int = 1, most: int = MAX_SAMPLES) -> int:
    """Check that a value read from a file is an integer in a range, and return it.

    Args:
        value: The parsed value. Neither `True` nor 3.0 is an integer.
        what: Name of the value in the error message.
        least: Smallest allowed integer.
        most: Largest allowed integer.

    Returns:
        The same value.

    Raises:
        ProfileError: If the value is no integer, or out of range.

    Example:
        >>> read_whole_number(3, "the number of samples")
        3
    """
    if type(value) is not int or not least <= value <= most:
        raise ProfileError(f"Expected {what} to be a whole number from {least} to {most}, got {reprlib.repr(value)}.")
    return value
