"""What a report says, as plain data: nothing here computes or draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.adaptations import Epoch
from shiftmend.scores import RegressionScores, Scores
from shiftmend.verification import Verification


@dataclass(frozen=True)
class Seen:
    """How the values of one unit were distributed on the target, with one of the two models."""

    divergence: float
    outside: float
    """Share of its values below the lowest or above the highest one at home."""
    moved: float
    """Difference of its mean to that at home, in parts of the range at home, as far as bins can tell."""
    spread: float
    """Its standard deviation over that at home, as far as bins can tell."""
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Unit:
    number: int
    low: float
    high: float
    home: tuple[float, ...]
    before: Seen
    after: Seen | None


@dataclass(frozen=True)
class TapShift:
    """One tap: every unit's divergence, and the worst of them in full (worst before, and worst after)."""

    name: str
    where: str
    constant: int
    floor: float
    before: tuple[float, ...]
    after: tuple[float, ...] | None
    clear_before: int
    """Units as far from home as would make a verdict "not restored"."""
    clear_after: int | None
    worst: tuple[Unit, ...]

    @property
    def units(self) -> int:
        """Those that varied at home; the constant ones are in no divergence."""
        return len(self.before)

    @property
    def mean_before(self) -> float:
        return sum(self.before) / max(1, len(self.before))

    @property
    def mean_after(self) -> float | None:
        return None if self.after is None else sum(self.after) / max(1, len(self.after))


@dataclass(frozen=True)
class Guesses:
    """The class predictions of one model."""

    counts: tuple[int, ...]
    confidence: float
    histogram: tuple[int, ...]
    """Predictions by confidence, in ten equal steps from 0 to 1."""


@dataclass(frozen=True)
class Predictions:
    total: int
    before: Guesses
    after: Guesses | None
    changed: int | None
    moves: tuple[tuple[int, int, int], ...]
    """The most frequent changes: class before, class after, how many."""


@dataclass(frozen=True)
class Sample:
    """One input as it came, and what it was taken for; the class and its probability."""

    number: int
    values: NDArray[np.generic]
    before: tuple[int, float] | None
    after: tuple[int, float] | None
    label: int | None = None


@dataclass(frozen=True)
class Home:
    """What the profile says about the source."""

    samples: int
    taps: dict[str, tuple[str, int, int]]
    """Place in the model, units, and how many of them were constant."""
    bins: str
    moments: str
    slices: dict[str, int]
    inputs: str
    preset: str
    library: str
    weights: str
    size: int


@dataclass(frozen=True)
class Mending:
    """What was run: the manifest, the history, and where the result lies."""

    manifest: dict[str, Any]
    history: tuple[Epoch, ...]
    file: str | None
    same_data: bool | None
    """Whether the target of this report is the sample that was adapted to; None where that is unknown."""
    floor_per_epoch: float

    @property
    def method(self) -> str:
        return str(self.manifest["method"]["name"])

    @property
    def used_labels(self) -> bool:
        return self.method == "target-supervised"

    @property
    def kept(self) -> int:
        """The epoch that the mended model is from."""
        if self.manifest["kept"] == "selected":
            return int(self.manifest["selected_epoch"])
        return self.history[-1].epoch if self.history else 0


@dataclass(frozen=True)
class Facts:
    """Everything on the page; the same facts give the same page, byte for byte."""

    title: str
    samples: int
    shape: tuple[str, ...]
    before: Verification
    after: Verification | None
    slices: int
    enough: int | None
    """Target samples with which no verdict is undecided; None where the source had too few for that."""
    cautions: tuple[str, ...]
    inputs: tuple[Sample, ...]
    taps: tuple[TapShift, ...]
    predictions: Predictions | None
    classes: tuple[str, ...]
    scores_before: Scores | RegressionScores | None
    scores_after: Scores | RegressionScores | None
    home: Home
    mending: Mending | None
    original: str | None
