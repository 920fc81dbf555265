"""Evaluate a model on labelled data: the one place, beside supervised training, where labels are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.accelerate.cuda_graphs import captured_call, worth_capturing
from shiftmend.errors import DataError
from shiftmend.evaluation.accumulators import describe
from shiftmend.evaluation.classification import ClassificationMetrics, Scores
from shiftmend.evaluation.regression import RegressionMetrics, RegressionScores, in_one_shape
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.modes import enter_eval, preserve_modes
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.utils.checks import brief, check_classes
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.progress import Progress, progress_bar

_Metrics = ClassificationMetrics | RegressionMetrics


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
    """Score a model in eval mode on every sample of (inputs, labels).

    Whole-number labels mean classification (accuracy, calibration), fractional ones regression, of one quantity `[N]`
    or of several `[N, quantities, ...]`. Of a classifier with a single output that is the logit of class 1. Of logits
    `[N, classes, ...]` with labels `[N, ...]`, each position is a sample, and IoU is scored as well. What has the label
    `ignore_label`, such as 255 for pixels without a class, counts in no score; any other label that is no class number
    is refused. With the names of the `classes` that labels number, a model of another number of classes is refused.
    What is deployed may be scored as well: a scripted or traced model, or the module of an exported one. `progress` is
    that of `adapt`.
    """
    model = unwrap(model, tapped=False)
    place = resolve_device(device, model)
    feed = Feed(data, batch_size=batch_size, device=place, preprocess=preprocess, what="data to evaluate on")
    with on_device(model, place), progress_bar(progress, "evaluate", feed.known_samples) as bar:
        feed.on_batch = bar.advance
        return Scorer(model, feed, output, classes=classes, ignore_label=ignore_label)()


class Scorer:
    """Scores one model on the same samples again and again; with `capture`, on CUDA, as a captured graph.

    Captured scoring follows weights that change in their place, as training changes them.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        output: Entry = None,
        capture: bool = False,
        classes: Sequence[str] | None = None,
        ignore_label: int | None = None,
    ) -> None:
        self.model, self.feed, self.output, self.classes = model, feed, output, classes
        self.ignore_label = ignore_label
        self._again: Callable[[], _Metrics] | None = None
        self._capture = capture and feed.inputs is not None and worth_capturing(feed.inputs)
        check_model(model, feed.examples(2), tapped=False)

    def __call__(self) -> Scores | RegressionScores:
        if self._capture:
            self._again = captured_call(self._pass, self.model, self.feed.device)
            self._capture = False
        return (self._again or self._pass)().compute()

    def _pass(self) -> _Metrics:
        metrics: _Metrics | None = None
        with preserve_modes(self.model), torch.no_grad():
            enter_eval(self.model)
            for inputs, labels in self.feed.labelled_batches():
                result = pick(self.model(inputs), self.output, "the model")
                if metrics is None:
                    metrics = metrics_for(labels, device=self.feed.device, ignore_label=self.ignore_label)
                if isinstance(metrics, RegressionMetrics):
                    result, labels = in_one_shape(result, labels)
                metrics.update(result, labels)
                if self.classes is not None and isinstance(metrics, ClassificationMetrics):
                    check_classes(len(self.classes), max(2, result.shape[1:2].numel()))
        assert metrics is not None  # a feed is never empty
        return metrics


def metrics_for(
    labels: Tensor, *, device: torch.device | str | None = None, ignore_label: int | None = None
) -> ClassificationMetrics | RegressionMetrics:
    """What scores predictions against labels of this kind: fractions are quantities, all else are classes."""
    if not labels.is_floating_point():
        return ClassificationMetrics(device=device, ignore_label=ignore_label)
    if ignore_label is not None:
        raise DataError(
            f"ignore_label={brief(ignore_label)} is for class numbers, and the labels are {describe(labels)}; those "
            "of a classifier are whole numbers, e.g. labels.long()"
        )
    return RegressionMetrics(device)
