"""`evaluate`: score a model on labelled data. Beside supervised training, the one place where labels are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.errors import DataError
from shiftmend.evaluation.accumulators import describe
from shiftmend.evaluation.classification import ClassificationMetrics, Scores
from shiftmend.evaluation.regression import RegressionMetrics, RegressionScores, in_one_shape
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.passes.evaluation_pass import Observation, RepeatedPass
from shiftmend.utils.checks import brief, check_classes
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.progress import Progress, progress_bar

Metrics = ClassificationMetrics | RegressionMetrics


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    output: Entry = None,
    device: str | torch.device = "auto",
    classes: Sequence[str] | None = None,
    ignore_label: int | None = None,
    progress: Progress = None,
) -> Scores | RegressionScores:
    """Score a model in eval mode on labelled data.

    Whole-number labels mean classification (accuracy, calibration), fractional ones regression. The single output of a
    binary classifier is the logit of class 1. With logits `[N, classes, ...]` and labels `[N, ...]` each position is a
    sample, and IoU is scored as well.

    Args:
        model: A module, also a scripted, traced or exported one.
        data: Pairs of inputs and labels: a tuple of tensors, a `Dataset`, a `DataLoader`, ... Labels of a regression
            are `[N]`, or `[N, quantities, ...]`.
        batch_size: Samples in a batch.
        preprocess: Called with each batch on the device, before the model.
        output: Entry of a tuple or dict that is the model's output.
        device: Where to compute.
        classes: Names of the classes that labels number. A model with another number of classes is refused.
        ignore_label: A label that counts in no score, such as 255 for pixels without a class.
        progress: True shows a progress bar, False does not, None does so on a terminal.

    Returns:
        The scores, as fractions rather than percent.

    Raises:
        DataError: If labels are missing, out of range or do not fit the output.

    Example:
        >>> import torch, shiftmend
        >>> model = torch.nn.Linear(2, 2)
        >>> _ = model.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
        >>> inputs, labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 1, 1])
        >>> round(shiftmend.evaluate(model, (inputs, labels)).accuracy, 3)
        0.667
    """
    model = unwrap(model, tapped=False)
    place = resolve_device(device, model)
    feed = Feed(data, batch_size=batch_size, device=place, preprocess=preprocess, what="data to evaluate on")
    with on_device(model, place), progress_bar(progress, "evaluate", feed.known_samples) as bar:
        feed.on_batch = bar.advance
        return Scorer(model, feed, output, classes=classes, ignore_label=ignore_label)()


class Scorer:
    """A repeated evaluation of one model on the same samples; see `RepeatedPass` for `capture`."""

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        output: Entry = None,
        capture: bool = False,
        classes: Sequence[str] | None = None,
        ignore_label: int | None = None,
    ) -> None:
        self.feed = feed
        check_model(model, feed.examples(2), tapped=False)
        number = None if classes is None else len(classes)
        self._pass = RepeatedPass(
            model,
            feed,
            lambda: _Scores(feed.device, output, number, ignore_label),
            labelled=True,
            capture=capture,
        )

    def __call__(self) -> Scores | RegressionScores:
        return self._pass().compute()


class _Scores:
    """An observer that adds each batch to the metrics of its kind of labels."""

    def __init__(self, device: torch.device, output: Entry, classes: int | None, ignore_label: int | None) -> None:
        self.device, self.output, self.classes, self.ignore_label = device, output, classes, ignore_label
        self.metrics: Metrics | None = None

    def update(self, seen: Observation) -> None:
        result, labels = pick(seen.output, self.output, "the model"), seen.labels
        assert labels is not None
        if self.metrics is None:
            self.metrics = metrics_for(labels, device=self.device, ignore_label=self.ignore_label)
        if isinstance(self.metrics, RegressionMetrics):
            result, labels = in_one_shape(result, labels)
        self.metrics.update(result, labels)
        if self.classes is not None and isinstance(self.metrics, ClassificationMetrics):
            check_classes(self.classes, max(2, result.shape[1:2].numel()))

    def result(self) -> Metrics:
        assert self.metrics is not None  # A feed is never empty.
        return self.metrics


def metrics_for(
    labels: Tensor, *, device: torch.device | str | None = None, ignore_label: int | None = None
) -> Metrics:
    """Return the metrics for labels of this kind: fractions are quantities, all others are classes."""
    if not labels.is_floating_point():
        return ClassificationMetrics(device=device, ignore_label=ignore_label)
    if ignore_label is not None:
        raise DataError(
            f"ignore_label={brief(ignore_label)} is for class numbers, and the labels are {describe(labels)}; those "
            "of a classifier are whole numbers, e.g. labels.long()"
        )
    return RegressionMetrics(device)
