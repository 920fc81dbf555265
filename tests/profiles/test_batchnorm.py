from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shiftmend
from shiftmend.errors import ProfileError
from shiftmend.inputs.feed import Feed
from shiftmend.profiles.batchnorm import measure_staleness


def make_model(settled: Tensor | None = None) -> nn.Sequential:
    """A network whose running statistics are those of batches `settled`, or as they were at first."""
    layers = (nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    if settled is not None:
        for _ in range(8):
            for batch in settled[torch.randperm(len(settled))].split(64):
                model(batch)
    return model.eval()


@pytest.fixture
def source() -> Tensor:
    return 3 * torch.randn(640, 5) + 4


def test_a_refreshed_copy_has_the_statistics_of_the_data(source: Tensor) -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    model[0].train()
    refreshed = shiftmend.refresh_batchnorm(model, source, batch_size=640, progress=False)
    with torch.no_grad():
        read = model[0](source).double().numpy()
    np.testing.assert_allclose(refreshed[1].running_mean, read.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(refreshed[1].running_var, read.var(0, ddof=1), rtol=1e-4)
    assert refreshed[1].momentum == 0.1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in refreshed.modules()] == [module.training for module in model.modules()]


def test_batches_count_the_same_and_sorted_data_is_shuffled(source: Tensor) -> None:
    model = make_model()
    whole = shiftmend.refresh_batchnorm(model, source, batch_size=640, progress=False)
    ordered = source[source[:, 0].argsort()]
    parts = shiftmend.refresh_batchnorm(
        model, DataLoader(TensorDataset(ordered), batch_size=64), preprocess=lambda x: x.float(), progress=False
    )
    torch.testing.assert_close(parts[1].running_mean, whole[1].running_mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts[1].running_var, whole[1].running_var, rtol=0.1, atol=0.0)
    assert int(parts[1].num_batches_tracked) == 10


def test_what_cannot_be_refreshed_is_refused(source: Tensor) -> None:
    with pytest.raises(ProfileError, match="without"):
        shiftmend.refresh_batchnorm(nn.Sequential(nn.Linear(5, 3)), source)
    with pytest.raises(ProfileError, match="at least 2"):
        shiftmend.refresh_batchnorm(make_model(), source, batch_size=1)


def test_stale_statistics_are_warned_of(source: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    shiftmend.profile(model, source, progress=False)
    assert "refresh_batchnorm" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[1].momentum == 0.1
    caplog.clear()
    shiftmend.profile(shiftmend.refresh_batchnorm(model, source, progress=False), source, progress=False)
    assert "refresh_batchnorm" not in caplog.text


@pytest.mark.parametrize("samples", [32, 50, 100, 300, 640])
@pytest.mark.parametrize("seed", range(3))
def test_usual_statistics_are_not_warned_of(
    samples: int, seed: int, source: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(seed)
    model = make_model(source)
    shiftmend.profile(model, (3 * torch.randn(samples, 5) + 4), progress=False)
    assert "stale" not in caplog.text


def test_order_small_batches_and_one_class_raise_no_alarm(source: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(source)
    ordered = source[source[:, 0].argsort()]
    whole = shiftmend.profile(model, ordered, progress=False)
    shiftmend.profile(model, ordered[:200], like=whole, progress=False)
    assert "stale" not in caplog.text
    stale = make_model()
    shiftmend.profile(stale, source, batch_size=8, progress=False)
    assert measure_staleness(nn.Sequential(nn.Linear(5, 2)), Feed(source), whole) is None
    assert "stale" not in caplog.text


def test_a_model_that_runs_in_eval_mode_alone_is_profiled(source: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    class Deployed(nn.BatchNorm1d):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                raise ValueError("not for training")
            return super().forward(inputs)

    model = make_model()
    model[1] = Deployed(12).eval()
    shiftmend.profile(model, source, progress=False)
    assert "stale" not in caplog.text
