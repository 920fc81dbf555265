"""Batches that fit: the errors of a GPU without memory are raised here by the model itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from worlds import sensors

import shiftmend
from shiftmend.engine import batch_size
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine.batch_size import fit_batch_size
from shiftmend.engine.history import Epoch
from shiftmend.errors import AdaptationError
from shiftmend.inputs.feed import Feed


class Limited(nn.Module):
    """A layer that passes its inputs on, and has no memory for more than `most` samples with gradients."""

    most = 64

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inputs


@pytest.fixture(autouse=True)
def on_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "can_run_out", lambda device: True)


def limited_world() -> tuple[nn.Module, Tensor, shiftmend.Profile]:
    world = sensors()
    model = nn.Sequential(Limited(), *world.model).eval()
    return model, world.target, shiftmend.profile(model, world.source, progress=False)


def adapt(model: nn.Module, target: Any, profile: shiftmend.Profile, **options: Any) -> shiftmend.Adaptation:
    options = {"method": "fr", "epochs": 2, "learning_rate": 0.1, "progress": False} | options
    return shiftmend.adapt(model, target, profile, **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [*model.state_dict().values()]


@pytest.mark.parametrize(
    ("method", "length"), [("fr", "epochs"), ("bufr", "epochs_per_block"), ("shot", "epochs"), ("tent", "epochs")]
)
def test_batches_are_halved_until_a_step_fits(method: str, length: str, caplog: pytest.LogCaptureFixture) -> None:
    model, target, profile = limited_world()
    options: dict[str, Any] = {length: 1, "learning_rate": 0.1, "progress": False}
    result = shiftmend.adapt(model, target, profile, method, **options)
    same = shiftmend.adapt(model, target, profile, method, **options, batch_size=64)
    assert result.manifest["batch_size"] == 64
    assert result.manifest["batch_size_reduced_from"] == 256
    assert "batches of 64" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(weights(result.model), weights(same.model), strict=True))
    assert "batch_size_reduced_from" not in same.manifest


def test_a_batch_size_that_was_given_stays() -> None:
    model, target, profile = limited_world()
    with pytest.raises(torch.OutOfMemoryError):
        adapt(model, target, profile, batch_size=128)


def test_what_fits_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, target, profile = limited_world()
    monkeypatch.setattr(Limited, "most", 256)
    caplog.set_level(logging.WARNING, logger="shiftmend.engine.batch_size")
    tried = adapt(model, target, profile)
    monkeypatch.setattr(batch_size, "can_run_out", lambda device: False)
    untried = adapt(model, target, profile)
    assert not [record for record in caplog.records if record.name == "shiftmend.engine.batch_size"]
    assert tried.manifest["batch_size"] == untried.manifest["batch_size"] == 256
    assert all(torch.equal(a, b) for a, b in zip(weights(tried.model), weights(untried.model), strict=True))


def test_a_trial_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, target, profile = limited_world()
    seen: list[bool] = []
    original = batch_size._fits

    def watched(step: batch_size.Step, feed: Feed, size: int) -> bool:
        own = step.__closure__
        assert own is not None
        [network] = [cell.cell_contents for cell in own if isinstance(cell.cell_contents, nn.Module)]
        before = [*(value.clone() for value in weights(network)), torch.get_rng_state()]
        modes = [(module.training, module._forward_hooks) for module in network.modules()]
        flags = [parameter.requires_grad for parameter in network.parameters()]
        fits = original(step, feed, size)
        after = [*weights(network), torch.get_rng_state()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert modes == [(module.training, module._forward_hooks) for module in network.modules()]
        assert flags == [parameter.requires_grad for parameter in network.parameters()]
        assert all(parameter.grad is None for parameter in network.parameters())
        seen.append(fits)
        return fits

    monkeypatch.setattr(batch_size, "_fits", watched)
    adapt(model, target, profile, method="shot-im")
    assert seen == [False, False, True]


def test_too_little_memory_for_the_smallest_batch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, target, profile = limited_world()
    monkeypatch.setattr(Limited, "most", 1)
    with pytest.raises(AdaptationError, match="autocast"):
        adapt(model, target, profile)


def test_other_errors_are_not_taken_for_missing_memory() -> None:
    def broken(batch: Tensor) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        fit_batch_size(Feed(torch.randn(300, 4)), broken)


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


@pytest.mark.parametrize("resident", [True, False])
def test_feeds_are_resized_whether_they_stream_or_not(resident: bool) -> None:
    def step(batch: Tensor) -> None:
        if len(batch) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")

    feed = Feed(Rows(), resident=resident)
    assert fit_batch_size(feed, step) == 64
    assert feed.reduced_from == 256
    assert [len(batch) for batch, _ in feed.epoch(0, 1)] == [64] * 4 + ([] if resident else [44])
    assert [len(batch) for batch in feed.batches()] == [64] * 4 + [44]
    given = Feed(Rows(), resident=resident, batch_size=128)
    assert fit_batch_size(given, step) == 128


def test_a_resumed_run_keeps_its_size_whatever_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target, profile = limited_world()
    whole, file = adapt(model, target, profile), tmp_path / "run.safetensors"

    def stop(model: nn.Module, row: Epoch) -> None:
        if row.epoch == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        adapt(model, target, profile, checkpoint=file, on_epoch=stop)
    assert checkpoints.stored_batch_size(None, tmp_path / "none", file) == 64
    monkeypatch.setattr(Limited, "most", 256)
    resumed = adapt(model, target, profile, checkpoint=file)
    assert len(resumed.history) == 3
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed.model), weights(whole.model), strict=True))


class Greedy(nn.Module):
    """A layer that takes 32 MiB of the GPU for each sample, where gradients are computed."""

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            torch.empty(len(inputs), 8 << 20, device=inputs.device)
        return inputs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_runs_out_of_memory_gets_smaller_batches() -> None:
    world = sensors()
    model = nn.Sequential(Greedy(), *world.model).eval()
    profile = shiftmend.profile(model, world.source, progress=False)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(0)
    torch.cuda.set_per_process_memory_fraction(6 * 2**30 / total, 0)
    try:
        result = adapt(model, world.target, profile, device="cuda", capture=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert result.manifest["batch_size"] == 128
    assert result.manifest["batch_size_reduced_from"] == 256
    assert result.manifest["status"] == "finished"
