from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import sensors

import shiftmend
from shiftmend.adaptation.result import Adaptation, Estimates
from shiftmend.errors import ShiftmendError
from shiftmend.integrations.trackers import MAX_PARAM_LENGTH, MLflowTracker, TensorBoardTracker, log_adaptation
from shiftmend.verification.estimate import Estimate


class Notes:
    """A tracker that remembers everything."""

    def __init__(self) -> None:
        self.params: dict[str, str] = {}
        self.metrics: dict[tuple[str, int], float] = {}
        self.files: dict[str, bytes] = {}

    def log_params(self, params: Mapping[str, str]) -> None:
        self.params |= params

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics |= {(name, step): value for name, value in metrics.items()}

    def log_artifacts(self, folder: Path) -> None:
        self.files |= {path.name: path.read_bytes() for path in folder.iterdir()}


@functools.cache
def adapted() -> Adaptation:
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), method="bufr", epochs_per_block=1, progress=False
    )
    result.estimate = Estimates(Estimate(None, None, None, "accuracy"), Estimate(0.8, 0.7, 0.9, "accuracy"))
    return result


def test_everything_of_an_adaptation_is_logged() -> None:
    notes, result = Notes(), adapted()
    log_adaptation(result, notes)
    assert notes.params["method.name"] == "bufr"
    assert notes.params["seed"] == "0"
    assert max(map(len, notes.params.values())) <= MAX_PARAM_LENGTH
    for row in result.history:
        assert notes.metrics["signal/slices", row.epoch] == row.verification
    last = result.history[-1].epoch
    assert notes.metrics["loss/features", last] == result.history[-1].losses["features"]
    found = {name: value for (name, _), value in notes.metrics.items() if name.startswith("estimate")}
    assert found == {"estimate/after": 0.8, "estimate/after_low": 0.7, "estimate/after_high": 0.9}
    assert json.loads(notes.files["manifest.json"])["adapted_weights"] == result.manifest["adapted_weights"]
    assert "model.safetensors" in notes.files


def test_files_can_be_left_out_and_other_objects_are_refused() -> None:
    notes = Notes()
    log_adaptation(adapted(), notes, artifacts=False)
    assert not notes.files
    wrong: Any = object()
    with pytest.raises(ShiftmendError, match="log_metrics"):
        log_adaptation(adapted(), wrong)


@pytest.mark.slow
def test_mlflow_keeps_parameters_metrics_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        log_adaptation(adapted(), MLflowTracker())
    stored = mlflow.MlflowClient().get_run(run.info.run_id)
    assert stored.data.params["method.name"] == "bufr"
    assert stored.data.metrics["estimate/after"] == 0.8
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "signal/slices")
    assert [point.step for point in history] == [row.epoch for row in adapted().history]
    names = {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert {"manifest.json", "model.safetensors"} <= names


@pytest.mark.slow
def test_tensorboard_shows_every_epoch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_adaptation(adapted(), TensorBoardTracker(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = events.Scalars("signal/slices")
    assert [point.step for point in points] == [row.epoch for row in adapted().history]
    assert torch.allclose(
        torch.tensor([point.value for point in points]),
        torch.tensor([row.verification for row in adapted().history]),
    )
    assert (tmp_path / "artifacts/model.safetensors").exists()
