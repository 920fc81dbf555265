"""The history of a run, and the label-free choice of the epoch to keep.

The optimised loss never judges. The criterion is the divergence of the verification slices, which no method minimises.
If several epochs are about as good by it, the one with the lowest entropy of predictions is kept, unless the method
minimises entropy itself. Stages that refine a restored model have a rule of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CLOSE = 0.15
"""With `epochs="auto"`, the latest epoch is kept whose slices exceed the lowest by at most this fraction. Such a
schedule stops before it does harm, so later epochs are better unless the slices say otherwise."""

TIE = 0.1
"""Slices that exceed the lowest by at most this fraction count as equally good."""

MAX_REFINED_RATIO = 2.0
"""Largest ratio of the slices after and before refining at which refining counts as harmless."""

_STORED_FIRST = ("epoch", "block", "learning_rate", "losses", "verification", "seconds", "steps")
_STORED_SIGNALS = ("marginals", "entropy", "confidence")
"""Signals that every stored row has; null if they could not be measured."""


@dataclass(frozen=True)
class Epoch:
    """One row of the history; row 0 is the untouched model.

    With `epochs="auto"`, a row is a round of steps (`engine/schedule.py`).

    Attributes:
        epoch: Number of the epoch or round.
        block: Name of the stage that the epoch belongs to.
        learning_rate: Learning rate of the stage.
        losses: Mean of each term of the loss over the epoch's batches, by tap.
        seconds: Duration of the epoch in seconds.
        steps: Number of training steps so far; None in files of earlier versions.
        signals: Label-free signals after the epoch, in eval mode, by name (see `verification/signals.py`).
    """

    epoch: int
    block: str
    learning_rate: float
    losses: dict[str, float]
    seconds: float
    signals: dict[str, float] = field(default_factory=dict)
    steps: int | None = None

    @property
    def loss(self) -> float | None:
        """Sum of the loss terms; None for a row without training."""
        return sum(self.losses.values()) if self.losses else None

    @property
    def verification(self) -> float | None:
        """Mean divergence of the verification slices, which no method minimises."""
        return self.signals.get("slices")

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON: a flat dict, with the slices under the name `verification`."""
        signals = {name: value for name, value in self.signals.items() if name != "slices"}
        return {
            "epoch": self.epoch,
            "block": self.block,
            "learning_rate": self.learning_rate,
            "losses": dict(self.losses),
            "verification": self.verification,
            "seconds": self.seconds,
            **({} if self.steps is None else {"steps": self.steps}),
            **{name: signals.pop(name, None) for name in _STORED_SIGNALS},
            **signals,
        }

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Epoch:
        """Read a row that `to_json` wrote.

        Raises:
            KeyError: If an entry is missing.
        """
        signals = {"slices": row["verification"]} | {k: v for k, v in row.items() if k not in _STORED_FIRST}
        known = {name: value for name, value in signals.items() if value is not None}
        first = row["epoch"], row["block"], row["learning_rate"], row["losses"], row["seconds"]
        return Epoch(*first, known, row.get("steps"))


def read_history(rows: Any) -> list[Epoch]:
    """Read the rows of a stored history, from the untouched model to the last epoch.

    Raises:
        ValueError: If something is missing, has another type, or is out of order.
    """
    needed = {"epoch", "block", "learning_rate", "losses", "verification", "seconds"}
    fits = isinstance(rows, list) and all(
        isinstance(row, dict)
        and needed <= set(row)
        and type(row["epoch"]) is int
        and isinstance(row["block"], str)
        and isinstance(row["losses"], dict)
        and all(_is_number(row[name]) or row[name] is None for name in set(row) - {"block", "losses"})
        and all(map(_is_number, (row["learning_rate"], row["seconds"], *row["losses"].values())))
        for row in rows
    )
    if not fits:
        raise ValueError("a row of the history is damaged")
    if [row["epoch"] for row in rows] != list(range(len(rows))):
        raise ValueError("the epochs of the history are not in order")
    steps = [row["steps"] for row in rows if row.get("steps") is not None]
    if steps != sorted(steps) or any(type(count) is not int or count < 0 for count in steps):
        raise ValueError("the steps of the history are not in order")
    return [Epoch.from_json(row) for row in rows]


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number of at most 64 bits, including infinity and NaN but not bool."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


class Choice:
    """A running choice among epochs: `consider` is called with each epoch and remembers the best.

    Only one state is stored, so a rejected epoch cannot be chosen later. The slices of the kept epoch never exceed the
    lowest by more than the fraction `TIE`, or `CLOSE`, however long the run is.

    A refining stage improves predictions at the cost of slightly worse slices. Its latest epoch is kept, unless the
    slices exceed `MAX_REFINED_RATIO` times those before refining.

    Args:
        entropy_may_decide: Whether the lower entropy decides between epochs with similar slices.
        latest: Whether the latest of several epochs with similar slices is kept, whatever its entropy.
        refining: Names of the refining stages.
    """

    def __init__(self, *, entropy_may_decide: bool, latest: bool = False, refining: Iterable[str] = ()) -> None:
        self.entropy_may_decide, self.latest, self.refining = entropy_may_decide, latest, frozenset(refining)
        self.kept: Epoch | None = None
        self._lowest = math.inf
        self._restored: float | None = None

    def consider(self, row: Epoch) -> bool:
        """Return whether this epoch becomes the one to keep. Without a profile, the latest epoch is always kept."""
        if row.block in self.refining:
            better = self._is_harmless(row)
        else:
            better = self._is_better(row)
            self._restored = None
            if row.verification is not None and row.verification < self._lowest:
                self._lowest = row.verification
        if better:
            self.kept = row
        return better

    def _is_harmless(self, row: Epoch) -> bool:
        """Return whether refining has left the slices about as good as before."""
        if self.kept is None or self.kept.verification is None:
            return True
        if self._restored is None:
            self._restored = self.kept.verification
        if row.verification is None or not math.isfinite(row.verification):
            return False
        return row.verification <= MAX_REFINED_RATIO * self._restored

    def _is_better(self, row: Epoch) -> bool:
        if self.kept is None or self.kept.verification is None:
            return True
        if row.verification is None or not math.isfinite(row.verification):
            return False
        if not math.isfinite(self.kept.verification):  # The epoch was kept only because there was no better one yet.
            return True
        if self.latest:
            return row.verification <= min(self._lowest, row.verification) * (1 + CLOSE)
        within = min(self._lowest, row.verification) * (1 + TIE)
        if row.verification > within:
            return False
        if self.kept.verification > within:
            return True
        own, other = self.kept.signals.get("entropy"), row.signals.get("entropy")
        if self.entropy_may_decide and own is not None and other is not None:
            return not math.isnan(other) if math.isnan(own) else other < own
        return row.verification < self.kept.verification


def choose(rows: Iterable[Epoch], *, entropy_may_decide: bool) -> int:
    """Return the index of the row to keep; rows are epochs of one run, or the kept epochs of several runs."""
    choice = Choice(entropy_may_decide=entropy_may_decide)
    kept = -1
    for position, row in enumerate(rows):
        if choice.consider(row):
            kept = position
    if kept < 0:
        raise ValueError("there is nothing to choose from")
    return kept
