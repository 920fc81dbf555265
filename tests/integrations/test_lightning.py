from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shiftmend
from shiftmend.integrations.lightning import profile_at_end


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", [None, "net"])
def test_the_trained_model_is_profiled_when_training_ends(tmp_path: Path, module: str | None) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.net(inputs)

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=16)
    keep = profile_at_end(tmp_path / "model.profile", module=module)
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=1,
        callbacks=[keep],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, loader)
    profile = shiftmend.Profile.load(tmp_path / "model.profile")
    assert profile.samples == 64
    trained = (model if module is None else model.net).eval()
    profile.check_architecture(trained)
    expected = shiftmend.profile(trained, inputs, progress=False)
    assert profile.weights == expected.weights
    assert torch.allclose(profile.mean, expected.mean, atol=1e-5)
