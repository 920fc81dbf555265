"""Evaluate a model on labelled data: the one place, beside supervised training, where labels are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shiftmend.devices import placed, resolve_device
from shiftmend.errors import DataError
from shiftmend.feeds import Feed, Preprocess
from shiftmend.metrics import ClassificationMetrics, RegressionMetrics, RegressionScores, Scores
from shiftmend.taps import Entry, check_takes, modes, pick, unwrap


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    output: Entry = None,
    device: str | torch.device = "auto",
) -> Scores | RegressionScores:
    """Score a model in eval mode on every sample of (inputs, labels).

    Whole-number labels mean classification (accuracy, calibration), fractional ones regression.
    """
    model = unwrap(model)
    place = resolve_device(device, model)
    feed = Feed(data, batch_size=batch_size, device=place, preprocess=preprocess, what="data to evaluate on")
    metrics: ClassificationMetrics | RegressionMetrics | None = None
    with placed(model, place), modes(model), torch.no_grad():
        model.eval()
        check_takes(model, feed.first(2))
        for inputs, labels in feed.labelled():
            result = pick(model(inputs), output, "the model")
            if metrics is None:
                regression = labels.is_floating_point()
                metrics = RegressionMetrics(device=place) if regression else ClassificationMetrics(device=place)
            if isinstance(metrics, RegressionMetrics):
                result = result.reshape(labels.shape) if result.numel() == labels.numel() else result
            metrics.update(result, labels)
    if metrics is None:
        raise DataError("the data to evaluate on is empty: expected at least one sample with its label")
    return metrics.compute()
