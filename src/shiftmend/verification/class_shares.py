"""Class shares at a site, estimated without labels and with intervals.

There are two estimates. The *likelihood* estimate maximises the likelihood of the model's calibrated probabilities (EM;
Saerens et al. 2002, Alexandari et al. 2020). The *confusion* estimate finds the shares that explain the predictions at
the site by the confusion matrix of home (Lipton et al. 2018; here by maximum likelihood, so that no share is negative).
Both assume that the features within each class are distributed as at home. If the device changed, use the outputs of
the adapted model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shiftmend.profiles.rehearsal import Rehearsal
from shiftmend.verification.predictions import as_class_logits, class_shares

ROUNDS = 300
"""Largest number of EM iterations."""
SETTLED = 1e-6
"""Change of a share below which EM stops."""
DRAWS = 100
"""Number of bootstrap draws for an interval."""
DRAW_ROUNDS = 40
MAX_DRAWN = 4000
"""Largest number of samples in a bootstrap draw; intervals are scaled to the number of all samples."""
LEVEL = 0.9
WIDE = 0.15
"""Half-width of an interval above which a share counts as unknown."""
DISAGREEMENT = 0.1
"""Total variation between both estimates, beyond sampling noise, above which neither is trusted."""
SMALLEST_COUNT = 1e-3
"""Count that is added to each entry of the confusion matrix, since a mistake that home never showed is possible."""

Source = Literal["likelihood", "confusion"]


@dataclass(frozen=True)
class Shares:
    """Class shares at a site, with 90 % intervals.

    Attributes:
        values: Share of each class, adding up to 1.
        low: Lower end of each interval.
        high: Upper end of each interval.
        home: Share of each class at home.
        samples: Number of samples at the site.
        source: `"likelihood"` or `"confusion"`: the estimate that the values come from.
        reasons: Reasons why the shares are not reliable, one sentence each; empty if they are.

    Example:
        >>> from shiftmend import Shares
        >>> found = Shares((0.7, 0.3), (0.66, 0.26), (0.74, 0.34), (0.5, 0.5), 500, "likelihood")
        >>> round(found.distance, 3), found.reliable
        (0.2, True)
    """

    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    home: tuple[float, ...]
    samples: int
    source: Source
    reasons: tuple[str, ...] = ()

    @property
    def reliable(self) -> bool:
        """True if there is no reason to doubt the shares."""
        return not self.reasons

    @property
    def distance(self) -> float:
        """Total variation from the shares at home: the share of samples whose class would have to change."""
        return sum(abs(one - other) for one, other in zip(self.values, self.home, strict=True)) / 2

    def to_json(self) -> dict[str, Any]:
        """Return the shares as JSON for a manifest."""
        rounded = {name: [round(one, 5) for one in getattr(self, name)] for name in ("values", "low", "high", "home")}
        return rounded | {"samples": self.samples, "source": self.source, "reasons": list(self.reasons)}

    def __str__(self) -> str:
        lines = ["class   share   90 % interval   at home"]
        for number, (value, low, high, home) in enumerate(
            zip(self.values, self.low, self.high, self.home, strict=True)
        ):
            ends = f"{100 * low:.1f} to {100 * high:.1f}"
            lines.append(f"{number:>5}  {100 * value:>4.1f} %  {ends:>14}  {100 * home:>6.1f} %")
        lines += [f"does not hold: {reason}" for reason in self.reasons]
        return "\n".join(lines)


def maximise_likelihood(
    probabilities: Tensor,
    home: Tensor,
    start: Tensor | None = None,
    weights: Tensor | None = None,
    rounds: int = ROUNDS,
) -> Tensor:
    """Find the class shares that maximise the likelihood of calibrated probabilities, by EM.

    Args:
        probabilities: Probabilities `[N, classes]`, calibrated for the shares of home.
        home: Share of each class at home, `[classes]`.
        start: Initial shares, `[classes]` or `[draws, classes]`; those of home if None.
        weights: Weight of each sample `[draws, N]`, adding up to 1 in each draw; equal ones if None.
        rounds: Largest number of iterations.

    Returns:
        Shares `[classes]`, or `[draws, classes]` with weights.

    Example:
        >>> sure = torch.eye(2, dtype=torch.float64)[[0, 0, 0, 1]]
        >>> maximise_likelihood(sure, torch.tensor([0.5, 0.5], dtype=torch.float64))
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    ratios = probabilities.double() / home.double().clamp_min(1e-12)
    samples = len(ratios)
    each = torch.full((1, samples), 1 / samples, dtype=torch.float64, device=ratios.device)
    each = each if weights is None else weights.double()
    shares = (home if start is None else start).double().expand(len(each), -1)
    for _ in range(rounds):
        fit = (shares @ ratios.T).clamp_min(1e-300)
        updated = shares * ((each / fit) @ ratios)
        updated = updated / updated.sum(1, keepdim=True)
        settled = float((updated - shares).abs().max()) < SETTLED
        shares = updated
        if settled:
            break
    return shares if weights is not None else shares[0]


def invert_confusion(answers: Tensor, confusion: Tensor, start: Tensor | None = None, rounds: int = ROUNDS) -> Tensor:
    """Find the class shares that best explain the predictions at the site, given the confusion matrix of home.

    Args:
        answers: Share of each class among the predictions at the site, `[classes]`.
        confusion: Confusion matrix at home: counts by true class (rows) and predicted class (columns).
        start: Initial shares; uniform if None.
        rounds: Largest number of EM iterations.

    Example:
        >>> confusion = torch.tensor([[90.0, 10.0], [20.0, 80.0]])
        >>> invert_confusion(torch.tensor([0.69, 0.31]), confusion).round(decimals=2)
        tensor([0.7000, 0.3000], dtype=torch.float64)
    """
    rates = confusion.double() + SMALLEST_COUNT
    rates = rates / rates.sum(1, keepdim=True)
    return maximise_likelihood(
        rates.T,
        torch.ones(len(rates)),
        torch.full((len(rates),), 1 / len(rates)),
        answers.double().unsqueeze(0),
        rounds,
    )[0]


def fit_shares(logits: Tensor, record: Rehearsal) -> Tensor:
    """Return the class shares `[classes]` that fit logits `[N, classes]` best, in float64 on the CPU."""
    if not record.labelled:
        return invert_confusion(class_shares(logits.argmax(1), logits.shape[1]), record.confusion)
    probabilities = (logits.double() / record.temperature).softmax(1).cpu()
    return maximise_likelihood(probabilities, record.label_shares)


def expect_answers(shares: Tensor, record: Rehearsal) -> Tensor:
    """Return the expected share of each class among the predictions, `[classes]`, for given true class shares."""
    rates = record.confusion.double()
    rates = rates / rates.sum(1, keepdim=True).clamp_min(1)
    expected = shares.double() @ rates
    return expected / expected.sum().clamp_min(1e-12)


def expect_accuracy(shares: Tensor, record: Rehearsal) -> float:
    """Return the accuracy of the untouched model on the device of home, for given class shares."""
    counts = record.confusion.double().sum(1)
    recalls = torch.where(counts > 0, record.confusion.double().diagonal() / counts.clamp_min(1), record.score)
    return float((shares.double() * recalls).sum())


def estimate_shares(outputs: Tensor, record: Rehearsal, seed: int = 0, lost: float | None = 0.0) -> Shares:
    """Estimate class shares with intervals from the outputs of a model.

    Args:
        outputs: Logits `[N, classes]`, or `[N, 1]` for a binary classifier.
        record: The rehearsal in the profile.
        seed: Seed of the bootstrap draws.
        lost: Accuracy that the model has lost since home; None if unknown. Mistakes that home did not have may move any
            share by as much, so intervals grow by it.
    """
    logits = as_class_logits(outputs).cpu()
    home, samples = record.label_shares, len(logits)
    values = fit_shares(logits, record)
    # Without labels nothing is calibrated, so the shares of the predictions themselves are used.
    source: Source = "likelihood" if record.labelled else "confusion"
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(samples, generator=rng)[:MAX_DRAWN]
    draws = torch.randint(len(rows), (DRAWS, len(rows)), generator=rng)
    weights = torch.zeros(DRAWS, len(rows), dtype=torch.float64)
    weights.scatter_add_(1, draws, torch.full(draws.shape, 1 / len(rows), dtype=torch.float64))
    if source == "likelihood":
        probabilities = (logits[rows].double() / record.temperature).softmax(1)
        start = 0.9 * values + 0.1 / len(values)
        drawn = maximise_likelihood(probabilities, home, start, weights, DRAW_ROUNDS)
    else:
        answers = torch.nn.functional.one_hot(logits[rows].argmax(1), len(home)).double()
        drawn = weights @ answers
    # Home is a sample as well, so its probabilities and its confusion matrix have sampling noise.
    deviation = drawn.std(0) * (len(rows) / samples) ** 0.5 * (1 + samples / record.samples) ** 0.5
    deviation = deviation * record.answer_design_effect**0.5
    # A class without predictions among n samples may still have a share of ln(10) / n.
    half = (1.6449 * deviation).clamp_min(math.log(10) * record.answer_design_effect / samples)
    half = half + max(0.0, lost or 0.0)
    other = invert_confusion(class_shares(logits.argmax(1), len(home)), record.confusion)
    reasons = _find_reasons(values, half, other, deviation, samples)
    if lost is None:
        reasons = (*reasons, "the accuracy of the adapted model is unknown")
    return Shares(
        tuple(values.tolist()),
        tuple((values - half).clamp(0, 1).tolist()),
        tuple((values + half).clamp(0, 1).tolist()),
        tuple(home.tolist()),
        samples,
        source,
        reasons,
    )


def _find_reasons(values: Tensor, half: Tensor, other: Tensor, deviation: Tensor, samples: int) -> tuple[str, ...]:
    reasons = []
    if float(half.max()) > WIDE:
        worst = int(half.argmax())
        reasons.append(
            f"the share of class {worst} is unclear: there are too few samples ({samples}), or it is taken for others"
        )
    apart = float((values - other).abs().sum() / 2) - float(deviation.sum() / 2)
    if apart > DISAGREEMENT:
        reasons.append(
            f"probabilities and answers imply different class shares ({100 * apart:.0f} % apart), as with a new device"
        )
    return tuple(reasons)
