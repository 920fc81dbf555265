"""Scoring models on labelled data: `evaluate` once, an `Evaluator` repeatedly.

Apart from supervised training, this is the only place that reads labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.accelerate.cuda_graphs import list_tensors
from shiftmend.errors import DataError
from shiftmend.evaluation.accumulators import describe
from shiftmend.evaluation.classification import ClassificationMetrics, Scores
from shiftmend.evaluation.regression import RegressionMetrics, RegressionScores, match_shapes
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import is_writable, on_device
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
    """Score a model in eval mode on labelled data. For repeated scoring, e.g. after each epoch, use an `Evaluator`.

    Whole-number labels mean classification (accuracy, calibration), fractional ones regression. The single output of a
    binary classifier is the logit of class 1. With logits `[N, classes, ...]` and labels `[N, ...]` each position is a
    sample, and IoU is scored as well.

    Args:
        model: A module, also a scripted, traced or exported one.
        data: Pairs of inputs and labels: a tuple of tensors, a `Dataset`, a `DataLoader`, ... Labels of a regression
            are `[N]`, or `[N, quantities, ...]`.
        batch_size: Number of samples per batch.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        output: Entry of a tuple or dict that is the model's output.
        device: Device to compute on.
        classes: Names of the classes, in the order of their numbers. A model with another number of classes is refused.
        ignore_label: Label of samples that no score counts, such as 255 for pixels without a class.
        progress: Whether to show a progress bar; None shows one on a terminal only.

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
    return Evaluator(
        data,
        batch_size=batch_size,
        preprocess=preprocess,
        output=output,
        device=device,
        classes=classes,
        ignore_label=ignore_label,
        progress=progress,
    )(model)


class Evaluator:
    """Labelled data on which models are scored repeatedly, e.g. in `on_epoch` of `adapt`.

    The data are read at the first call, and kept on the device if they fit. On CUDA, a model that is scored repeatedly
    runs as a CUDA graph from the second call on, if its samples are small. The graph uses the current weights and
    buffers; use `capture=False` for a model whose other attributes change between calls.

    Args:
        data: Pairs of inputs and labels, as for `evaluate`.
        batch_size: Number of samples per batch.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        output: Entry of a tuple or dict that is the model's output.
        device: Device to compute on; `"auto"` is the accelerator of the first model, else CUDA if available, else the
            CPU.
        classes: Names of the classes, in the order of their numbers. A model with another number of classes is refused.
        ignore_label: Label of samples that no score counts, such as 255 for pixels without a class.
        capture: Whether repeated passes may be captured as a CUDA graph.
        progress: Whether to show a progress bar; None shows one on a terminal only.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).eval()
        >>> target, labels = torch.randn(200, 4) + 1, torch.randint(2, (200,))
        >>> profile = shiftmend.profile(model, torch.randn(200, 4))
        >>> score, found = shiftmend.Evaluator((target, labels)), []
        >>> def look(model, row):
        ...     found.append(score(model).accuracy)
        >>> _ = shiftmend.adapt(model, target, profile, "fr", epochs=2, on_epoch=look)
        >>> len(found)
        3
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        preprocess: Preprocess | None = None,
        output: Entry = None,
        device: str | torch.device = "auto",
        classes: Sequence[str] | None = None,
        ignore_label: int | None = None,
        capture: bool = True,
        progress: Progress = None,
    ) -> None:
        self.data, self.batch_size, self.preprocess, self.device = data, batch_size, preprocess, device
        self.output, self.classes, self.ignore_label = output, classes, ignore_label
        self.capture, self.progress = capture, progress
        self._feed: Feed | None = None
        self._scorer: Scorer | None = None
        self._places: list[int] = []
        """Memory addresses of the model that was scored last."""
        self._calls = 0
        """Number of times that the model at these addresses was scored."""

    def __call__(self, model: nn.Module) -> Scores | RegressionScores:
        """Score a model in eval mode.

        Args:
            model: A module, including scripted, traced or exported ones. Its modes, buffers and device are restored.

        Returns:
            The scores, as fractions rather than percent.

        Raises:
            DataError: If labels are missing, out of range or do not fit the output.
        """
        model = unwrap(model, tapped=False)
        feed = self._open(model)
        with on_device(model, feed.device), progress_bar(self.progress, "evaluate", feed.known_samples) as bar:
            feed.on_batch = bar.advance
            places = _find_places(model)
            if self._scorer is None or places != self._places:
                self._scorer, self._places, self._calls = self._make_scorer(model, feed, capture=False), places, 0
            elif self._calls == 1 and self.capture:
                # Capturing a graph takes two more passes, so the first call runs eagerly.
                self._scorer = self._make_scorer(model, feed, capture=True)
            self._calls += 1
            return self._scorer()

    def _open(self, model: nn.Module) -> Feed:
        if self._feed is None:
            self._feed = Feed(
                self.data,
                batch_size=self.batch_size,
                device=resolve_device(self.device, model),
                preprocess=self.preprocess,
                what="data to evaluate on",
            )
        return self._feed

    def _make_scorer(self, model: nn.Module, feed: Feed, capture: bool) -> Scorer:
        return Scorer(model, feed, self.output, capture, self.classes, self.ignore_label)


def _find_places(model: nn.Module) -> list[int]:
    """Return the memory addresses of a model and its tensors, for which alone a captured graph is valid."""
    tensors = (*model.parameters(), *model.buffers(), *list_tensors(model))
    return [id(model), *(tensor.data_ptr() for tensor in tensors if is_writable(tensor))]


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
            result, labels = match_shapes(result, labels)
        self.metrics.update(result, labels)
        if self.classes is not None and isinstance(self.metrics, ClassificationMetrics):
            check_classes(self.classes, max(2, result.shape[1:2].numel()))

    def result(self) -> Metrics:
        assert self.metrics is not None  # A feed is never empty.
        return self.metrics


def metrics_for(
    labels: Tensor, *, device: torch.device | str | None = None, ignore_label: int | None = None
) -> Metrics:
    """Create empty metrics for labels of this dtype: regression for floating point, otherwise classification.

    Samples with the class `ignore_label` are not counted. Quantities have no such label.
    """
    if not labels.is_floating_point():
        return ClassificationMetrics(device=device, ignore_label=ignore_label)
    if ignore_label is not None:
        raise DataError(
            f"Expected class numbers beside ignore_label={brief(ignore_label)}, got labels {describe(labels)}. Try "
            "labels.long() for a classifier."
        )
    return RegressionMetrics(device)
