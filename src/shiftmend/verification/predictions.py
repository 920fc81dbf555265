"""Label-free indicators of accuracy: pure functions of logits `[N, classes]`.

All functions take logits that were divided by the temperature fitted at home. The references are Garg et al. 2022
(average thresholded confidence), Guillory et al. 2021 (difference of confidences), Lu et al. 2023 (confidence by
optimal transport) and Deng et al. 2023 (nuclear norm).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_TRANSPORTED_VALUES = 1 << 19
"""Largest number of probabilities in the optimal transport: about 11,000 samples of 47 classes."""

TRANSPORT_SOFTNESS = 0.02
"""Entropic regularisation of the optimal transport. Costs lie between 0 and 1."""

TRANSPORT_ROUNDS = 100
"""Iterations of the optimal transport. With 50, small cases were off by up to 0.1."""


def as_class_logits(outputs: Tensor) -> Tensor:
    """Return outputs as class logits, and give a binary classifier's one column a second class.

    Args:
        outputs: Outputs of a classifier, `[M, C]`. With C = 1, the column is the logit of class 1 against class 0.

    Returns:
        Logits `[M, classes]`: `outputs` itself if C is at least 2, else `[M, 2]`, where class 0 has the logit 0.

    Example:
        >>> as_class_logits(torch.tensor([[1.5], [-2.0]]))
        tensor([[ 0.0000,  1.5000],
                [ 0.0000, -2.0000]])
    """
    return torch.cat([torch.zeros_like(outputs), outputs], 1) if outputs.shape[1] == 1 else outputs


def confidence(logits: Tensor) -> Tensor:
    """Return the probability of the predicted class of each sample, `[N]`."""
    return logits.softmax(1).amax(1)


def negative_entropy(logits: Tensor) -> Tensor:
    """Return the negative entropy of each prediction in nats, `[N]`."""
    log_probabilities = logits.log_softmax(1)
    return (log_probabilities.exp() * log_probabilities.clamp_min(-100)).sum(1)


def find_threshold(values: Tensor, accuracy: float) -> float:
    """Return the threshold at which the share of values above it equals the accuracy.

    Args:
        values: Confidence or negative entropy of held-out home samples, `[N]`.
        accuracy: Accuracy on the same samples, from 0 to 1.

    Example:
        >>> find_threshold(torch.tensor([0.0, 0.25, 0.5, 1.0]), 0.5)
        0.375
    """
    ordered = values.double().sort().values
    below = round((1 - accuracy) * len(ordered))
    if below <= 0:
        return float(ordered[0])
    if below >= len(ordered):
        return float(ordered[-1])
    return float((ordered[below - 1] + ordered[below]) / 2)


def share_above(values: Tensor, threshold: float) -> float:
    """Return the share of values at or above a threshold, which estimates the accuracy."""
    return float((values.double() >= threshold).double().mean())


def nuclear_norm(logits: Tensor, shares: Tensor | None = None, home: Tensor | None = None) -> float:
    """Return the normalised nuclear norm of the probabilities, from 0 to 1: high if confident and diverse.

    Args:
        logits: Logits `[N, classes]`.
        shares: Class shares `[classes]` at the target. If given, the norm is rescaled to the class shares of home,
            because predictions of few classes have a low norm at any confidence.
        home: Class shares `[classes]` at home.

    Example:
        >>> one_class = torch.tensor([[30.0, 0.0]]).repeat(8, 1)
        >>> round(nuclear_norm(one_class), 3)
        0.707
        >>> round(nuclear_norm(one_class, torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])), 3)
        1.0
    """
    probabilities = logits.double().softmax(1)
    samples, classes = probabilities.shape
    squares = torch.linalg.eigvalsh(probabilities.T @ probabilities).clamp_min(0)
    norm = float(squares.sqrt().sum() / math.sqrt(samples * min(samples, classes)))
    if shares is None or home is None:
        return norm
    # Confident predictions of classes with shares w have a norm proportional to the sum of the square roots of w.
    return norm * float(home.double().sqrt().sum() / shares.double().sqrt().sum().clamp_min(1e-12))


def transported_confidence(logits: Tensor, shares: Tensor) -> float:
    """Return the mean probability of the assigned classes, if samples are assigned by the class shares of home.

    If predictions crowd into few classes, some samples are assigned to other classes with low probability. The
    assignment is soft (Sinkhorn). Samples beyond `MAX_TRANSPORTED_VALUES` are left out at even spacing.

    Args:
        logits: Logits `[N, classes]`.
        shares: Share of each class at home `[classes]`.

    Example:
        >>> certain = 20 * torch.eye(2).repeat(8, 1)
        >>> round(transported_confidence(certain, torch.tensor([0.5, 0.5])), 3)
        1.0
        >>> round(transported_confidence(certain[::2], torch.tensor([0.5, 0.5])), 3)
        0.5
    """
    step = max(1, -(-logits.numel() // MAX_TRANSPORTED_VALUES))
    probabilities = logits[::step].float().softmax(1)
    gains = probabilities / TRANSPORT_SOFTNESS
    wanted = shares.to(gains).clamp_min(1e-6)
    wanted = (wanted / wanted.sum()).log()
    prices = torch.zeros_like(wanted)
    size = math.log(len(gains))
    for _ in range(TRANSPORT_ROUNDS):
        rows = -torch.logsumexp(gains + prices, 1, keepdim=True) - size
        prices = wanted - torch.logsumexp(gains + rows, 0)
    plan = (gains + rows + prices).exp()
    return float((plan * probabilities).sum() / plan.sum())


def class_shares(answers: Tensor, classes: int) -> Tensor:
    """Return the share of each class among predictions `[N]`, as `[classes]`."""
    return torch.bincount(answers.flatten().cpu(), minlength=classes).double() / max(1, answers.numel())


def skew(shares: Tensor, home: Tensor, samples: float | None = None, home_samples: float | None = None) -> float:
    """Return the total variation between two sets of class shares, minus its expected sampling noise.

    Args:
        shares: Share of each class among the predictions, `[classes]`.
        home: The same at home.
        samples: Number of independent predictions behind `shares`; None if they are exact.
        home_samples: Number of independent predictions behind `home`.

    Returns:
        About 0 if the shares differ by sampling noise only, 1 if they have no class in common. Negative values mean
        that they differ by less than expected.

    Example:
        >>> skew(torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5]))
        0.25
        >>> round(skew(torch.tensor([0.6, 0.4]), torch.tensor([0.5, 0.5]), samples=10), 3)
        -0.026
    """
    apart = float((shares.cpu().double() - home.cpu().double()).abs().sum() / 2)
    return round(apart - skew_by_chance(home, samples, home_samples)[0], 9)


def skew_by_chance(home: Tensor, samples: float | None, home_samples: float | None = None) -> tuple[float, float]:
    """Return mean and standard deviation of the total variation between two samples with the same class shares.

    Args:
        home: Share of each class, `[classes]`.
        samples: Size of one sample; None if its shares are exact.
        home_samples: Size of the other sample.
    """
    sampled = sum(1 / number for number in (samples, home_samples) if number)
    variances = home.cpu().double() * (1 - home.cpu().double()) * sampled
    # The absolute value of a standard normal variable has mean sqrt(2 / pi) and variance 1 - 2 / pi.
    mean = float((variances * 2 / math.pi).sqrt().sum() / 2)
    return mean, float((variances * (1 - 2 / math.pi)).sum().sqrt() / 2)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature that minimises the negative log-likelihood of labelled logits.

    Args:
        logits: Logits `[N, classes]`.
        labels: Class numbers `[N]`.

    Returns:
        A temperature from 0.05 to 20.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
        >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])), 2)  # 4 / T = ln 3
        3.64
    """
    logits, labels = logits.double(), labels.to(logits.device).long()
    low, high = math.log(0.05), math.log(20.0)
    golden = (math.sqrt(5) - 1) / 2

    def loss(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        return float(torch.nn.functional.cross_entropy(scaled, labels))

    # The loss is convex in 1 / T, so it has a single minimum in log T as well.
    inner, outer = high - golden * (high - low), low + golden * (high - low)
    values = [loss(inner), loss(outer)]
    for _ in range(40):
        if values[0] < values[1]:
            high, outer = outer, inner
            inner = high - golden * (high - low)
            values = [loss(inner), values[0]]
        else:
            low, inner = inner, outer
            outer = low + golden * (high - low)
            values = [values[1], loss(outer)]
    return math.exp((low + high) / 2)
