"""A cell of a benchmark's grid, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Which = Literal["last", "best", "selected"]
Origin = Literal["published", "rebuilt", "regenerated", "own"]
"""Where the target images are from: the published files; made again with other textures than the published ones; made
again by the published recipe; a set of our own."""

SIGNALS = ("slices", "marginals", "entropy", "confidence")
"""What can be measured without labels: divergence of the verification slices, divergence of features and logits one by
one, mean entropy of the predictions, mean confidence."""


@dataclass(frozen=True, order=True)
class Cell:
    """One number of a table: a method on a shift from one seed, under one protocol.

    `recipe` is a hash of everything else that decides the result (source training, options of the method, protocol,
    origin of the data), so that a changed benchmark never passes off an old result as its own.
    """

    benchmark: str
    protocol: str
    method: str
    shift: str
    seed: int
    recipe: str

    def __str__(self) -> str:
        return f"{self.method} on {self.shift}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """The scores after some epoch, as fractions."""

    epoch: int
    accuracy: float
    ece: float
    mce: float
    nll: float
    brier: float


@dataclass(frozen=True)
class Result:
    """What is known of a finished cell; a failed one has an error and no outcomes.

    `last` is the end of the run, `best` the epoch with the highest accuracy (an oracle: it looked at labels),
    `selected` the epoch that is kept without labels. `signals`, `restoration_distance` and `alignment_loss` belong to
    `last`.
    """

    cell: Cell
    origin: Origin
    last: Outcome | None = None
    best: Outcome | None = None
    selected: Outcome | None = None
    signals: dict[str, float] = field(default_factory=dict)
    restoration_distance: float | None = None
    alignment_loss: float | None = None
    ece_per_batch: float | None = None
    """Mean of the ECE of single batches, as the reference implementation reports it online."""
    epochs: int = 0
    seconds: float = 0.0
    peak_memory: int | None = None
    """Bytes: of the GPU where one was used, else of the process."""
    history: tuple[dict[str, Any], ...] = ()
    """One entry an epoch: loss terms, signals, accuracy and ECE."""
    manifest: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    finished: str = ""
    """When, in UTC, as in 2022-04-25T09:00:00Z."""

    @property
    def failed(self) -> bool:
        return self.error is not None
