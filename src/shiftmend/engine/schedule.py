"""The length of a stage: a fixed number of epochs, or rounds of steps until the loss stops falling.

With `epochs="auto"`, a stage consists of rounds of a few dozen steps, whatever the size of the data. After each round,
three questions are answered from the history alone, so that a resumed run answers them in the same way:

- Does the loss still fall? If not, the stage is over, and the next block is unfrozen.
- Have the verification slices got worse? Then the run is over, because further alignment would harm the features.
- Are the features as close to the profile as held-out home data are? Then the run is over, because the remaining loss
  is the gap between training data and new data. Only a rehearsed profile knows this level.

No question uses labels or an estimate of the accuracy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shiftmend.engine.method import Stage

ROUND_STEPS = 32
"""Number of steps in a round."""

ROUNDS_PER_STAGE = 8
"""Smallest number of rounds that a stage may last; with few samples, rounds are shorter."""

WARM_UP_STEPS = 32
"""Number of steps in which the learning rate of the first stage is ramped up; at most a quarter of the stage."""

SMALL_TARGET = 500
"""Samples below which all of them are one batch, unless a batch size is given (`benchmarks/small_targets.py`)."""

ONE_BATCH_STEPS = 64
"""Largest number of steps of a stage if all data form one batch. More would overfit the samples."""

WINDOW = 8
"""Number of rounds over which the loss is examined: their second half is compared with the first."""

STILL_FALLING = 0.03
"""Relative decrease of the loss between the halves of the window that a stage needs to continue."""

PATIENCE = 3
"""Number of consecutive rounds with worse slices that end a run."""

MUCH_WORSE = 0.5
"""Fraction by which the slices must exceed their lowest value to count as worse."""

MUCH_LOST = 0.1
"""Fraction of the improvement of the slices that must be lost again to count as worse."""

GRACE = WINDOW
"""Rounds of a stage in which worse slices do not end the run, because newly unfrozen weights first move the features
away."""


@dataclass(frozen=True)
class Rounds:
    """The rounds of a stage.

    Attributes:
        steps: Number of steps in a round; None for a whole epoch.
        at_most: Largest number of rounds of the stage.
        warm_up: Number of steps in which the learning rate is ramped up, if the stage is the first.
    """

    steps: int | None
    at_most: int
    warm_up: int = 0


def plan_rounds(stage: Stage, steps_per_epoch: int | None) -> Rounds:
    """Plan the rounds of a stage.

    Args:
        stage: The stage. Unless it settles, a round is an epoch.
        steps_per_epoch: Number of steps in an epoch; None if an epoch cannot be divided, so that a round is an epoch.

    Example:
        >>> from shiftmend.engine.method import Stage
        >>> plan_rounds(Stage("all blocks", 150, settles=True), steps_per_epoch=73)
        Rounds(steps=32, at_most=342, warm_up=32)
        >>> plan_rounds(Stage("all blocks", 150), steps_per_epoch=73)
        Rounds(steps=None, at_most=150, warm_up=0)
    """
    if not stage.settles:
        return Rounds(None, stage.epochs)
    if steps_per_epoch is None:
        return Rounds(None, stage.epochs, WARM_UP_STEPS)
    total = stage.epochs * steps_per_epoch
    if steps_per_epoch == 1:
        total = min(total, ONE_BATCH_STEPS)
    steps = max(1, min(ROUND_STEPS, total // ROUNDS_PER_STAGE))
    return Rounds(steps, total // steps, min(WARM_UP_STEPS, total // 4))


def has_settled(losses: Sequence[float], done: int) -> bool:
    """Return whether the loss of a stage has stopped falling.

    Rounds of earlier stages with the same loss count as well: a block whose unfreezing changes nothing costs only half
    a window. If unfreezing raised the loss, only the stage's own rounds count. A ResNet-18 on blurred CIFAR-10 lost 14
    points when such a rise ended its second block.

    Args:
        losses: Mean loss of each round of the run so far.
        done: Number of rounds of this stage among them.
    """
    if len(losses) < WINDOW or done < WINDOW // 2:
        return False
    recent = losses[-WINDOW:]
    earlier, later = (statistics.fmean(half) for half in (recent[: WINDOW // 2], recent[WINDOW // 2 :]))
    if done < WINDOW and later > earlier * (1 + STILL_FALLING):
        return False
    return later > earlier * (1 - STILL_FALLING)


def has_worsened(slices: Sequence[float], done: int) -> bool:
    """Return whether the verification slices have been much worse than their lowest value for several rounds.

    They must exceed the lowest value by half of it, and by a tenth of the run's total improvement. Slices that fell
    from 0.6 to 0.02 may rise to 0.04 for a while, as on blurred CIFAR-10, where stopping cost four points.

    Args:
        slices: Divergence of the slices before the run and after each round.
        done: Number of rounds of the current stage.
    """
    if len(slices) <= PATIENCE or done < GRACE:
        return False
    lowest = min(slices)
    limit = lowest + max(MUCH_WORSE * lowest, MUCH_LOST * (slices[0] - lowest))
    return all(not value <= limit for value in slices[-PATIENCE:])


def has_reached_home(signals: Mapping[str, float], home: Mapping[str, float]) -> bool:
    """Return whether every signal is at most what held-out home data have.

    A profile is computed from training data, which a model fits better than new data from the same device. Aligning
    beyond the level of new data fits that gap. Without this rule, three runs on CIFAR-10-C lost 0.4 to 0.7 points
    between their best round and the one that was kept (`results/time-to-mend-curves.json`).

    Args:
        signals: Divergences from the profile after a round, by name.
        home: Divergences of unshifted home data that the model was not trained on; empty if they are not known.
    """
    return bool(home) and all(signals.get(name, math.inf) <= level for name, level in home.items())
