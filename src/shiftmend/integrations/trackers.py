"""Logging adaptations to experiment trackers: MLflow, TensorBoard, or anything with the methods of `Tracker`."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from shiftmend.adaptation.result import Adaptation
from shiftmend.errors import ShiftmendError
from shiftmend.utils.json import dumps

MAX_PARAM_LENGTH = 500
"""Largest number of characters of a parameter's text; some trackers refuse more."""


@runtime_checkable
class Tracker(Protocol):
    """Protocol of a tracker. Any object with these methods works; no base class is needed."""

    def log_params(self, params: Mapping[str, str]) -> None:
        """Log the settings of the whole run."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log finite numbers of one step."""

    def log_artifacts(self, folder: Path) -> None:
        """Store the files of a folder, which may be deleted afterwards."""


def log_adaptation(result: Adaptation, tracker: Tracker, *, artifacts: bool = True) -> None:
    """Log an adaptation: its manifest as parameters, its history and estimates as metrics, its files as artifacts.

    Each row of the history is a step: losses as `loss/NAME`, label-free signals as `signal/NAME`. Estimates are logged
    at the last step as `estimate/before` and `estimate/after`, with `_low` and `_high` for their intervals.

    Args:
        result: The result of `shiftmend.adapt`.
        tracker: The tracker to log to; see `Tracker`.
        artifacts: Whether to log what `result.save` writes: weights, history and manifest.

    Raises:
        ShiftmendError: If the tracker lacks a method.

    Example:
        >>> import torch, shiftmend
        >>> class Printer:
        ...     def log_params(self, params): print(params["method.name"])
        ...     def log_metrics(self, metrics, step): print(step, sorted(metrics)[0])
        ...     def log_artifacts(self, folder): print(sorted(path.name for path in folder.iterdir()))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).eval()
        >>> result = shiftmend.adapt(model, torch.randn(64, 4), method="adabn", passes=1)
        >>> log_adaptation(result, Printer())
        adabn
        0 seconds
        1 seconds
        ['history.json', 'manifest.json', 'model.safetensors']
    """
    if not isinstance(tracker, Tracker):
        raise ShiftmendError(
            f"Expected a tracker with log_params, log_metrics and log_artifacts, got {type(tracker).__name__}."
        )
    tracker.log_params(flatten(result.manifest))
    for row in result.history:
        metrics = {"seconds": row.seconds}
        metrics |= {f"loss/{name}": value for name, value in row.losses.items()}
        metrics |= {f"signal/{name}": value for name, value in row.signals.items()}
        _log_finite(tracker, metrics, row.epoch)
    last = result.history[-1].epoch if result.history else 0
    _log_finite(tracker, _list_estimates(result), last)
    if artifacts:
        with tempfile.TemporaryDirectory() as folder:
            result.save(folder)
            tracker.log_artifacts(Path(folder))


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested facts to text by dotted names; lists become JSON.

    Example:
        >>> flatten({"method": {"name": "bufr", "rates": [0.1, 0.2]}, "seed": 0})
        {'method.name': 'bufr', 'method.rates': '[0.1, 0.2]', 'seed': '0'}
    """
    found: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else dumps(value)
            found[f"{prefix}{name}"] = text[:MAX_PARAM_LENGTH]
    return found


def _list_estimates(result: Adaptation) -> dict[str, float]:
    if result.estimate is None:
        return {}
    found: dict[str, float] = {}
    for name, one in (("before", result.estimate.before), ("after", result.estimate.after)):
        values = {} if one is None else {"": one.value, "_low": one.low, "_high": one.high}
        found |= {f"estimate/{name}{end}": value for end, value in values.items() if value is not None}
    return found


def _log_finite(tracker: Tracker, metrics: Mapping[str, float], step: int) -> None:
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    if finite:
        tracker.log_metrics(finite, step)


class MLflowTracker:
    """Tracker that logs to an MLflow run. Requires the extra `mlflow`.

    Args:
        run_id: The run to log to. By default the active run, which is started if there is none.

    Example:
        >>> with mlflow.start_run():  # doctest: +SKIP
        ...     log_adaptation(result, MLflowTracker())
    """

    def __init__(self, run_id: str | None = None) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        if run_id is None:
            run_id = (mlflow.active_run() or mlflow.start_run()).info.run_id
        self.run_id = run_id

    def log_params(self, params: Mapping[str, str]) -> None:
        for name, value in params.items():
            self._client.log_param(self.run_id, name, value)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def log_artifacts(self, folder: Path) -> None:
        self._client.log_artifacts(self.run_id, str(folder))


class TensorBoardTracker:
    """A tracker that writes event files for TensorBoard; needs the extra `tensorboard`.

    TensorBoard stores no files, so artifacts are copied into the folder `artifacts` beside the events.

    Args:
        folder: Folder to write into.

    Example:
        >>> log_adaptation(result, TensorBoardTracker("runs/site-a"))  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = Path(folder)
        self._writer = SummaryWriter(str(folder))

    def log_params(self, params: Mapping[str, str]) -> None:
        rows = "\n".join(f"| {name} | {value} |" for name, value in params.items())
        self._writer.add_text("params", f"| parameter | value |\n|---|---|\n{rows}")
        self._writer.flush()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_artifacts(self, folder: Path) -> None:
        shutil.copytree(folder, self.folder / "artifacts", dirs_exist_ok=True)
