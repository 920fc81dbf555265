from __future__ import annotations

import copy
import json
import logging
import math
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from worlds import sensors
from zoo import SMALL, ZOO

import shiftmend
from shiftmend import report
from shiftmend.engine.history import Epoch
from shiftmend.errors import AdaptationError, DataError, DivergedError, ProfileError
from shiftmend.inputs.feed import Feed
from shiftmend.methods.fr import FR
from shiftmend.profiles.fingerprints import MAX_SUMMARISED_INPUTS
from shiftmend.research.datasets.partitions import few_shot
from shiftmend.verification.signals import SignalReader, Signals


def states_equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.slow
def test_mends_a_measurement_shift_and_leaves_the_callers_model_alone() -> None:
    world = sensors()
    before = {k: v.clone() for k, v in world.model.state_dict().items()}
    flags = [p.requires_grad for p in world.model.parameters()]
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "bufr", epochs_per_block=40, learning_rate=0.1, progress=False
    )
    assert world.accuracy(world.model) < 0.75
    assert world.accuracy(result.model) > 0.9
    assert all(torch.equal(v, before[k]) for k, v in world.model.state_dict().items())
    assert type(result.model) is type(world.model)
    assert not any(m.training for m in result.model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in result.model.modules())
    assert [p.requires_grad for p in result.model.parameters()] == flags
    assert all(p.grad is None for p in result.model.parameters())
    assert result.after.divergence < result.before.divergence / 5
    head = result.model[6]
    assert torch.equal(head.weight, world.model[6].weight)
    assert torch.equal(head.bias, world.model[6].bias)


def test_agrees_with_the_algorithm_written_out() -> None:
    """Two epochs of FR by hand: softmax binning in float64 formulas, plain momentum, BatchNorm on batch statistics."""
    world = sensors()
    profile = world.profile()
    rate, size = 0.05, 200
    result = shiftmend.adapt(
        world.model, world.target, profile, "fr", epochs=2, learning_rate=rate, batch_size=size, seed=7, progress=False
    )

    import copy

    model = copy.deepcopy(world.model).eval()
    model[1].train()
    trained = [p for i in (0, 1, 4) for p in model[i].parameters()]
    velocity = [torch.zeros_like(p) for p in trained]
    cuts = torch.arange(9) / 8
    offsets = torch.cat([torch.zeros(1), -cuts.cumsum(0)])
    for epoch in (1, 2):
        order = torch.randperm(600, generator=torch.Generator().manual_seed(7 * 1_000_003 + epoch))
        for start in (0, 200, 400):
            features = model[:6](world.target[order[start : start + size]])
            loss = torch.zeros(())
            for name, values in (("features", features), ("logits", model[6](features))):
                home = profile.taps[name]
                keep = home.high - home.low > 1e-4 * torch.maximum(home.low.abs(), home.high.abs())
                x = ((values - home.low) / (home.high - home.low))[:, keep]
                mass = torch.softmax((x[..., None] * torch.arange(1, 11) + offsets) / 0.01, -1)
                q = mass.mean(0)
                p = (home.counts / home.samples)[keep]
                both = (p * ((p + 1e-8) / (q + 1e-8)).log()).sum(1) + (q * ((q + 1e-8) / (p + 1e-8)).log()).sum(1)
                loss = loss + both.mean() / math.log(10)
            gradients = torch.autograd.grad(loss, trained)
            with torch.no_grad():
                for p_, v, g in zip(trained, velocity, gradients, strict=True):
                    v.mul_(0.9).add_(g)
                    p_.sub_(rate * v)
    for ours, theirs in zip(result.model.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_kind_of_model_can_be_adapted(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    profile = shiftmend.profile(model, case.inputs(128), output=case.output, progress=False)
    target = case.inputs(128, seed=2) * 1.5 + 0.5
    result = shiftmend.adapt(
        model, target, profile, "fr", output=case.output, epochs=15, learning_rate=1e-3, batch_size=128, progress=False
    )
    assert result.after.divergence < result.before.divergence
    assert not states_equal(result.model, model)


@pytest.mark.slow
def test_resnet18_goes_through_its_five_blocks() -> None:
    case = ZOO["resnet18"]
    model = shiftmend.adapt(case.model(), case.inputs(32), method="adabn", progress=False).model  # settles BatchNorm
    profile = shiftmend.profile(model, case.inputs(32), progress=False)
    result = shiftmend.adapt(
        model, case.inputs(8, seed=2) * 1.5, profile, "bufr", epochs_per_block=1, batch_size=8, progress=False
    )
    assert [row.block for row in result.history[1:]] == ["conv1 + bn1", "layer1", "layer2", "layer3", "layer4"]
    assert not torch.equal(result.model.conv1.weight, model.conv1.weight)
    assert torch.equal(result.model.fc.weight, model.fc.weight)


@pytest.mark.slow
def test_same_seed_same_result_other_seed_other_result() -> None:
    world = sensors()
    profile = world.profile()
    runs = [
        shiftmend.adapt(
            world.model, world.target, profile, "fr", epochs=3, seed=s, learning_rate=0.1, progress=False
        ).model
        for s in (1, 1, 2)
    ]
    assert states_equal(runs[0], runs[1])
    assert not states_equal(runs[0], runs[2])


@pytest.mark.slow
def test_labels_never_reach_a_method() -> None:
    world = sensors()
    profile = world.profile()
    options = {"method": "fr", "epochs": 2, "learning_rate": 0.1, "progress": False}
    plain = shiftmend.adapt(world.model, world.target, profile, **options)
    paired = shiftmend.adapt(world.model, TensorDataset(world.target, world.labels), profile, **options)
    loader = DataLoader(TensorDataset(world.target, world.labels, world.labels), batch_size=256)
    loaded = shiftmend.adapt(world.model, loader, profile, **options)
    assert states_equal(plain.model, paired.model)
    assert states_equal(plain.model, loaded.model)


@pytest.mark.slow
def test_streamed_data_is_reproducible_and_leaves_the_global_generator_alone() -> None:
    world = sensors()
    loader = DataLoader(TensorDataset(world.target), batch_size=100, shuffle=True)
    before = torch.random.get_rng_state()
    runs = [
        shiftmend.adapt(
            world.model, loader, world.profile(), "fr", epochs=2, learning_rate=0.1, resident=False, progress=False
        ).model
        for _ in range(2)
    ]
    assert states_equal(*runs)
    assert torch.equal(torch.random.get_rng_state(), before)


class Probe(nn.Module):
    """Remembers in which mode it ran while gradients were on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[bool] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen.add(self.training)
        return x


def test_batch_norm_trains_everywhere_and_nothing_else_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.9),
        Probe(),
        nn.Linear(8, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 2),
    )
    inputs = torch.randn(200, 4)
    model(inputs)
    profile = shiftmend.profile(model, inputs)
    model[3].seen.clear()
    result = shiftmend.adapt(
        model, inputs + 1, profile, "bufr", epochs_per_block=1, learning_rate=1e-12, batch_size=100, progress=False
    )
    assert result.model[3].seen == {False}
    assert not torch.equal(result.model[5].running_mean, model[5].running_mean)  # also where nothing was unfrozen yet
    expected = (model[0](inputs + 1)).detach()  # the weights hardly move, so the statistics must go there
    moved = (result.model[1].running_mean - expected.mean(0)).abs() < (model[1].running_mean - expected.mean(0)).abs()
    assert bool(moved.all())


@pytest.mark.slow
def test_bottom_up_schedule() -> None:
    case = ZOO["paper-cnn"]
    model = case.model()
    profile = shiftmend.profile(model, case.inputs(128))
    result = shiftmend.adapt(
        model, case.inputs(64) * 2, profile, "bufr", epochs_per_block=2, batch_size=32, progress=False
    )
    rows = result.history
    assert [row.epoch for row in rows] == list(range(9))
    assert [row.block for row in rows[1:]] == [
        n for n in ("conv1 + bn1", "conv2 + bn2", "conv3 + bn3", "linear") for _ in (0, 1)
    ]
    np.testing.assert_allclose([row.learning_rate for row in rows[1::2]], [1, 1 / 1.5, 1 / 1.5**2, 1 / 1.5**3])
    assert set(rows[1].losses) == {"features", "logits"}
    assert all(row.verification is not None and row.seconds > 0 for row in rows[1:])
    assert torch.equal(result.model.bn4.weight, model.bn4.weight)  # behind the features: part of the fixed classifier
    assert not torch.equal(result.model.linear.weight, model.linear.weight)


@pytest.mark.slow
def test_the_first_stage_trains_the_first_block_alone() -> None:
    case = ZOO["paper-cnn"]
    model = case.model()
    profile = shiftmend.profile(model, case.inputs(128))
    result = shiftmend.adapt(
        model,
        case.inputs(64) * 2,
        profile,
        "bufr",
        blocks=[["conv1", "bn1"]],
        epochs_per_block=1,
        batch_size=32,
        progress=False,
    )
    changed = {
        n
        for (n, a), b in zip(result.model.named_parameters(), model.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert changed == {"conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"}


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "batch"), [(257, 256), (40, 256), (65, 64), (2, 256)])
def test_small_last_batches_and_small_targets(samples: int, batch: int) -> None:
    world = sensors()
    result = shiftmend.adapt(
        world.model,
        world.target[:samples],
        world.profile(),
        "fr",
        epochs=2,
        batch_size=batch,
        learning_rate=0.01,
        progress=False,
    )
    assert all(math.isfinite(row.loss) for row in result.history[1:])
    assert result.manifest["batch_size"] == min(samples, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "expected"), [((30, 30, 8), 30), ((30, 8, 30), None), ((8, 30), None), ((40,), 40), ((30, 30), 30)]
)
@pytest.mark.parametrize("listed", [True, False])
def test_the_manifest_has_the_size_that_streamed_batches_had(
    cut: tuple[int, ...], expected: int | None, listed: bool
) -> None:
    world = sensors()
    target = world.target[: sum(cut)]
    rows = [part.tolist() for part in torch.arange(len(target)).split(list(cut))]
    data = list(target.split(list(cut))) if listed else DataLoader(TensorDataset(target), batch_sampler=rows)
    result = shiftmend.adapt(world.model, data, world.profile(), "adabn", resident=False, progress=False)
    assert result.manifest["batch_size"] == expected
    kept = shiftmend.adapt(world.model, data, world.profile(), "adabn", progress=False)
    assert kept.manifest["batch_size"] == len(target)


@pytest.mark.slow
def test_the_manifest_has_the_batch_size_of_a_loader_too_long_to_be_read_beforehand() -> None:
    world = sensors()
    loader = DataLoader(
        TensorDataset(world.target.repeat(1 + MAX_SUMMARISED_INPUTS // len(world.target), 1)), batch_size=100
    )
    result = shiftmend.adapt(world.model, loader, world.profile(), "adabn", resident=False, progress=False)
    assert result.manifest["batch_size"] == 100


@pytest.mark.slow
def test_one_sample() -> None:
    with_norm, without = sensors(), sensors(norm=False)
    with pytest.raises(AdaptationError, match="one target sample"):
        shiftmend.adapt(with_norm.model, with_norm.target[:1], with_norm.profile(), "fr")
    for method in ("fr", "bufr", "bnm", "bnm-im", "shot-im"):
        with pytest.raises(AdaptationError, match=f"{method}, got one target"):
            shiftmend.adapt(without.model, without.target[:1], without.profile(), method)
        with pytest.raises(AdaptationError, match="batch size of one"):
            shiftmend.adapt(without.model, without.target[:9], without.profile(), method, batch_size=1)
    shiftmend.adapt(without.model, without.target[:1], method="pl", epochs=1, progress=False)


def test_one_image_is_enough_where_each_of_its_positions_is_a_sample() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()  # as in segmentation
    profile = shiftmend.profile(model, torch.randn(8, 3, 12, 12), progress=False)
    target = torch.randn(3, 3, 12, 12)
    result = shiftmend.adapt(model, target, profile, "fr", epochs=1, batch_size=1, learning_rate=1e-3, progress=False)
    assert math.isfinite(result.history[-1].loss)
    online = shiftmend.stream(model, profile, learning_rate=1e-3)
    online.step(target[:1])
    assert set(online.losses) == {"features", "logits"}


def test_one_image_is_too_few_where_slices_of_pooled_features_are_aligned_as_well() -> None:
    torch.manual_seed(0)
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), *pooled).eval()
    for preset, enough in (("reference", True), ("sliced", False)):
        profile = shiftmend.profile(model, torch.randn(8, 3, 9, 9), preset=preset, taps={"maps": "0"}, progress=False)
        assert FR(align="maps").smallest_batch(profile) == (1 if enough else 2)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state() -> None:
    world = sensors(norm=False)
    with pytest.raises(DivergedError, match="Lower the learning rate") as caught:
        shiftmend.adapt(world.model, world.target, world.profile(), "fr", epochs=9, learning_rate=1e38, progress=False)
    kept = caught.value.adaptation
    assert kept.manifest["status"] == "diverged"
    assert all(bool(torch.isfinite(v).all()) for v in kept.model.state_dict().values())
    assert kept.manifest["epochs"] < 9


@dataclass(frozen=True, kw_only=True)
class InterruptedFR(FR):
    """FR whose user presses Ctrl-C after some batches."""

    after: int

    def objective(self, profile, device):  # type: ignore[no-untyped-def]
        losses, calls = super().objective(profile, device), []

        def counted(activations):  # type: ignore[no-untyped-def]
            calls.append(1)
            if len(calls) > self.after:
                raise KeyboardInterrupt
            return losses(activations)

        return counted


def test_an_interrupt_returns_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    profile = world.profile()

    result = shiftmend.adapt(
        world.model,
        world.target,
        profile,
        InterruptedFR(after=5, epochs=50, learning_rate=0.1),
        batch_size=300,
        progress=False,
    )
    assert result.interrupted
    assert len(result.history) == 3
    assert "interrupted after 2 epochs" in caplog.text
    assert not any(m._forward_hooks for m in result.model.modules())


def test_warns_when_it_does_not_help(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    with caplog.at_level(logging.WARNING):
        shiftmend.adapt(world.model, world.source, world.profile(), "fr", epochs=1, learning_rate=20.0, progress=False)
    assert "verification got worse" in caplog.text


@pytest.mark.slow
def test_what_is_restored_has_not_got_worse(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors(samples=3000)
    result = shiftmend.adapt(world.model, world.source, world.profile(), "fr", epochs=1, learning_rate=0.045)
    assert result.before is not None
    assert result.after is not None
    assert result.after.excess > result.before.excess
    assert (result.before.verdict, result.after.verdict) == ("restored", "restored")
    assert "got worse" not in caplog.text


@pytest.mark.slow
def test_warns_of_the_run_that_was_chosen_alone(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    rates = [0.01, 20.0]
    with caplog.at_level(logging.WARNING):
        result = shiftmend.adapt(
            world.model, world.target, world.profile(), "fr", epochs=2, learning_rate=rates, progress=False
        )
    said = [record.getMessage() for record in caplog.records if "slices" in record.getMessage()]
    assert result.manifest["method"]["learning_rate"] == 0.01
    assert said == [f"verification after adapting: {result.after}"]
    caplog.clear()
    shiftmend.adapt(world.model, world.target, world.profile(), "source-only", progress=False)
    assert "after adapting" not in caplog.text  # nothing was tried


def test_epochs_are_looked_at_in_the_precision_of_the_steps_and_judged_in_full() -> None:
    world = sensors()

    def confidence(model: nn.Module, half: bool) -> float:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            return float(model(world.target).float().softmax(1).amax(1).mean())

    seen = []

    def look(model: nn.Module, row: Epoch) -> None:
        seen.append((row.signals["confidence"], confidence(model, half=True), confidence(model, half=False)))

    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "fr", epochs=2, autocast=True, on_epoch=look, progress=False
    )
    for given, half, full in seen:
        assert given == pytest.approx(half, abs=1e-6)
        assert given != pytest.approx(full, abs=1e-6)
    assert result.after is not None
    assert result.after.divergence == shiftmend.verify(result.model, world.target, world.profile()).divergence
    assert result.after.divergence != pytest.approx(result.history[-1].verification, rel=1e-6)


@pytest.mark.slow
def test_autocast_stays_close_to_full_precision() -> None:
    world = sensors()
    options = {"method": "fr", "epochs": 3, "learning_rate": 0.05, "progress": False}
    full = shiftmend.adapt(world.model, world.target, world.profile(), **options)
    half = shiftmend.adapt(world.model, world.target, world.profile(), autocast=True, **options)
    assert half.manifest["autocast"]
    assert half.history[-1].loss == pytest.approx(full.history[-1].loss, rel=0.25)
    assert all(p.dtype == torch.float32 for p in half.model.parameters())


@pytest.mark.slow
def test_compile_says_that_it_leaves_a_model_with_compiled_parts_alone(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    model = copy.deepcopy(world.model)
    model[0] = torch.compile(model[0], backend="eager")
    profile = shiftmend.profile(model, world.source, progress=False)
    result = shiftmend.adapt(
        model, world.target, profile, "fr", epochs=1, learning_rate=[0.1, 0.05], compile=True, progress=False
    )
    assert caplog.text.count("compile has no effect: a part of the model is compiled by itself") == 1
    assert "compile" not in result.manifest


@pytest.mark.slow
def test_compiled_models_come_back_plain() -> None:
    world = sensors()
    compiled = torch.compile(world.model, backend="eager")
    compiled(world.target[:4])
    profile = shiftmend.profile(compiled, world.source, progress=False)
    result = shiftmend.adapt(compiled, world.target, profile, "fr", epochs=1, learning_rate=0.1, progress=False)
    assert type(result.model) is nn.Sequential


def test_preprocess_is_applied_on_the_way() -> None:
    world = sensors()
    plain = shiftmend.adapt(world.model, world.target, world.profile(), "adabn", progress=False)
    shifted = shiftmend.adapt(
        world.model, world.target + 5, world.profile(), "adabn", preprocess=lambda x: x - 5, progress=False
    )
    torch.testing.assert_close(plain.model[1].running_mean, shifted.model[1].running_mean, atol=1e-5, rtol=1e-5)


def test_the_manifest_says_how_and_can_be_saved(tmp_path) -> None:  # type: ignore[no-untyped-def]
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "bufr", epochs_per_block=1, learning_rate=0.1, progress=False
    )
    result.save(tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["method"]["name"] == "bufr"
    assert manifest["learning_rate_chosen"] == "given"
    assert manifest["status"] == "finished"
    assert manifest["target"]["samples"] == 600
    assert manifest["verification"]["after"]["verdict"] == result.after.verdict
    assert len(json.loads((tmp_path / "out/history.json").read_text())) == 3
    from safetensors.torch import load_file

    state = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(value, result.model.state_dict()[name]) for name, value in state.items())
    assert "Adaptation by bufr, 2 epochs, finished" in repr(result)


def test_bad_input_is_one_sentence() -> None:
    world = sensors()
    profile = world.profile()
    with pytest.raises(AdaptationError, match=r"source-only.*'magic'"):
        shiftmend.adapt(world.model, world.target, profile, "magic")
    with pytest.raises(AdaptationError, match="got 'epoch'"):
        shiftmend.adapt(world.model, world.target, profile, "fr", epoch=3)
    with pytest.raises(AdaptationError, match="Expected a profile"):
        shiftmend.adapt(world.model, world.target)
    with pytest.raises(DataError, match="empty"):
        shiftmend.adapt(world.model, world.target[:0], profile)
    with pytest.raises(DataError, match="NaN"):
        shiftmend.adapt(world.model, world.target * torch.nan, profile)
    with pytest.raises(DataError, match="generator"):
        shiftmend.adapt(world.model, (x for x in world.target), profile)
    with pytest.raises(shiftmend.ShiftmendError, match=r"device.*'tpu9'"):
        shiftmend.adapt(world.model, world.target, profile, device="tpu9")
    with pytest.raises(shiftmend.ProfileError, match="cannot be read"):
        shiftmend.adapt(world.model, world.target, "nowhere.safetensors")
    with pytest.raises(AdaptationError, match="tap 'middle'"):
        shiftmend.adapt(world.model, world.target, profile, "fr", align=("middle",))
    for wrong in ({"learning_rate": -1}, {"epochs": 0}, {"align": ()}):
        with pytest.raises(AdaptationError):
            shiftmend.adapt(world.model, world.target, profile, "fr", **wrong)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
def test_an_epoch_on_a_gpu_never_waits_for_the_host() -> None:
    world = sensors()
    ran: list[int] = []

    class Strict(FR):
        def objective(self, profile, device):  # type: ignore[no-untyped-def]
            losses = super().objective(profile, device)

            def watched(activations):  # type: ignore[no-untyped-def]
                ran.append(1)
                torch.cuda.set_sync_debug_mode("error")  # from the first batch of the epoch on
                return losses(activations)

            return watched

    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            shiftmend.adapt(
                world.model,
                world.target,
                world.profile(),
                Strict(epochs=1, learning_rate=0.1),
                batch_size=100,
                device="cuda",
                capture=False,
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(ran) == 6  # the first wait is the one reading of the losses, when all batches have run


@pytest.mark.gpu
@gpu
def test_recurrent_networks_adapt_on_a_gpu() -> None:
    model = Recurrent().eval()
    inputs = torch.randn(64, 7, 5)
    profile = shiftmend.profile(model, inputs, device="cuda")
    result = shiftmend.adapt(
        model, inputs + 1, profile, "fr", epochs=2, learning_rate=1e-3, device="cuda", progress=False
    )
    assert result.model.lstm.dropout == 0.3
    assert next(result.model.parameters()).device.type == "cpu"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_recurrent_networks_adapt_without_their_dropout() -> None:
    torch.manual_seed(0)
    model = Recurrent().eval()
    inputs = torch.randn(64, 7, 5)
    profile = shiftmend.profile(model, inputs)
    runs = [
        shiftmend.adapt(model, inputs + 1, profile, "fr", epochs=2, learning_rate=1e-3, progress=False).model
        for _ in range(2)
    ]
    assert states_equal(*runs)
    assert runs[0].lstm.dropout == 0.3


def test_buffers_that_are_infinite_from_the_start_do_no_harm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), shiftmend.StatsLayer(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    inputs = torch.randn(100, 6)
    profile = shiftmend.profile(model, inputs)
    result = shiftmend.adapt(model, inputs + 1, profile, "fr", epochs=1, learning_rate=1e-3, progress=False)
    assert result.manifest["status"] == "finished"


@pytest.mark.slow
def test_batch_norm_that_averages_over_its_whole_life_still_adapts() -> None:
    import copy

    world = sensors()
    model = copy.deepcopy(world.model)
    model[1].momentum = None
    model[1].num_batches_tracked.fill_(100_000)
    profile = shiftmend.profile(model, world.source)
    result = shiftmend.adapt(model, world.target, profile, "fr", epochs=40, learning_rate=0.1, progress=False)
    assert world.accuracy(result.model) > 0.95
    assert result.model[1].momentum is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupts_while_verifying_lose_nothing(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = sensors()
    original, calls = SignalReader._measure, []

    def interrupted(reader: SignalReader) -> Signals:
        calls.append(1)
        # The first look serves the verification before and row 0, two more follow the epochs.
        if len(calls) == (1 if when == "before" else 4):
            raise KeyboardInterrupt
        return original(reader)

    profile = world.profile()
    monkeypatch.setattr(SignalReader, "_measure", interrupted)
    result = shiftmend.adapt(world.model, world.target, profile, "fr", epochs=2, learning_rate=0.1, progress=False)
    if when == "before":
        assert result.interrupted
        assert states_equal(result.model, world.model)
    else:
        assert result.manifest["status"] == "finished"
        assert result.after is None
        assert len(result.history) == 3


@pytest.mark.parametrize(("autocast", "passes"), [(False, 1), (True, 2)])
def test_the_verification_before_is_row_0_where_both_see_the_same(
    autocast: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, original, calls = sensors(), SignalReader._measure, []

    def counted(reader: SignalReader) -> Signals:
        calls.append(1)
        return original(reader)

    def stop(model: nn.Module, row: Epoch) -> None:
        raise KeyboardInterrupt

    profile = world.profile()
    whole = shiftmend.verify(world.model, world.target, profile, progress=False)
    monkeypatch.setattr(SignalReader, "_measure", counted)
    result = shiftmend.adapt(
        world.model, world.target, profile, "fr", epochs=1, autocast=autocast, on_epoch=stop, progress=False
    )
    assert len(calls) == passes
    assert result.before is not None
    assert result.before.divergence == pytest.approx(whole.divergence)
    assert (result.history[0].verification == result.before.divergence) == (not autocast)


def test_a_resumed_run_looks_at_its_own_epochs(tmp_path: Path) -> None:
    world = sensors()
    options: dict[str, Any] = {"epochs": 3, "learning_rate": 0.1, "progress": False}
    whole = shiftmend.adapt(world.model, world.target, world.profile(), "fr", **options)

    def stop(model: nn.Module, row: Epoch) -> None:
        if row.epoch == 2:
            raise RuntimeError("killed")

    file = tmp_path / "run.safetensors"
    with pytest.raises(RuntimeError, match="killed"):
        shiftmend.adapt(world.model, world.target, world.profile(), "fr", **options, checkpoint=file, on_epoch=stop)
    resumed = shiftmend.adapt(world.model, world.target, world.profile(), "fr", **options, checkpoint=file)
    assert [row.signals for row in resumed.history] == [row.signals for row in whole.history]
    assert resumed.before == whole.before


@pytest.mark.parametrize("method", ["fr", "adabn"])
def test_the_model_runs_once_before_its_first_pass(method: str) -> None:
    """Inputs are refused, random numbers noticed, and taps and blocks found in one forward pass of two samples."""
    world = sensors()
    calls: list[int] = []
    profile = world.profile()
    # A copy: other tests share the model.
    model = copy.deepcopy(world.model)
    model.register_forward_pre_hook(_Counter(calls))
    options = {"epochs": 1} if method == "fr" else {}
    shiftmend.adapt(model, world.target, profile, method, progress=False, **options)
    assert calls[:2] == [2, min(256, len(world.target))]


class _Counter:
    """Writes down the sizes of the batches that a model sees; a copy of the model writes to the same list."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self.calls.append(len(inputs[0]))

    def __deepcopy__(self, memo: Any) -> _Counter:
        return self


@pytest.mark.slow
def test_an_interrupt_returns_the_last_whole_epoch_not_half_of_one() -> None:
    world = sensors()
    profile = world.profile()

    options = {"batch_size": 150, "seed": 3, "progress": False}
    stopped = shiftmend.adapt(
        world.model, world.target, profile, InterruptedFR(after=9, epochs=9, learning_rate=0.1), **options
    )
    whole = shiftmend.adapt(world.model, world.target, profile, FR(epochs=2, learning_rate=0.1), **options)
    assert len(stopped.history) == 3
    assert states_equal(stopped.model, whole.model)
    early = shiftmend.adapt(
        world.model, world.target, profile, InterruptedFR(after=3, epochs=9, learning_rate=1e38), **options
    )
    assert all(bool(torch.isfinite(v).all()) for v in early.model.state_dict().values())


def test_batches_of_one_are_refused_where_batch_norm_cannot_take_them() -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match="batch size of one"):
        shiftmend.adapt(world.model, DataLoader(TensorDataset(world.target[:50])), world.profile(), "fr", epochs=1)
    shiftmend.adapt(
        world.model,
        [world.target[:2], world.target[2:3]],
        world.profile(),
        "fr",
        epochs=1,
        resident=False,
        progress=False,
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    shiftmend.profile(model, world.source[:257], batch_size=256)


def test_a_model_that_cuts_the_gradient_off_is_named() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                hidden = self.encoder(x)
            return self.head(hidden)

    world, model = sensors(), Cut()
    with pytest.raises(AdaptationError, match="with a gradient"):
        shiftmend.adapt(model, world.target, shiftmend.profile(model, world.source), "bufr", progress=False)


class Odd(nn.Module):
    """Parameters of whole numbers and of 8 bits, extra state, and a weight on the graph of the last training step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.utils.weight_norm(nn.Linear(6, 8))
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x).relu())

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_odd_models_are_adapted_all_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    world, model = sensors(), Odd()
    model(world.source[:4]).sum().backward()
    profile = shiftmend.profile(model, world.source)
    result = shiftmend.adapt(
        model, world.target, profile, "fr", epochs=1, learning_rate=1e-3, checkpoint=tmp_path / "c", progress=False
    )
    assert torch.equal(result.model.table, model.table)
    assert torch.equal(result.model.scale.float(), model.scale.float())


def test_an_output_named_when_profiling_need_not_be_named_again() -> None:
    case = ZOO["tuple"]
    model = case.model()
    profile = shiftmend.profile(model, case.inputs(), output=1)
    shiftmend.adapt(model, case.inputs(seed=2), profile, "fr", epochs=1, learning_rate=1e-3, progress=False)


def test_wrong_types_are_one_sentence() -> None:
    world = sensors()
    profile = world.profile()
    with pytest.raises(shiftmend.ShiftmendError, match=r"Expected .* torch\.nn\.Module"):
        shiftmend.profile(lambda x: x, world.source)  # type: ignore[arg-type]
    with pytest.raises(shiftmend.ShiftmendError, match="scripted"):
        shiftmend.profile(torch.jit.script(nn.Linear(2, 2)), world.source)
    with pytest.raises(ProfileError, match=r"profile.*got a dict"):
        shiftmend.adapt(world.model, world.target, {})  # type: ignore[arg-type]
    with pytest.raises(AdaptationError, match="seed"):
        shiftmend.adapt(world.model, world.target, profile, seed=None)  # type: ignore[arg-type]
    for wrong in (
        {"epochs": True},
        {"learning_rate": True},
        {"slice_weight": -1},
        {"slice_weight": math.nan},
        {"divergence": "x"},
    ):
        with pytest.raises(AdaptationError):
            shiftmend.adapt(world.model, world.target, profile, "fr", **wrong)
    assert FR(align="features").align == ("features",)


@pytest.mark.slow
def test_a_sorted_dataset_is_shuffled_also_when_it_streams(caplog: pytest.LogCaptureFixture) -> None:
    class Sorted(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            world = sensors()
            self.inputs = world.target[world.labels.argsort()]

        def __len__(self) -> int:
            return len(self.inputs)

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.inputs[index]

    world = sensors()
    options = {"method": "fr", "epochs": 20, "learning_rate": 0.1, "progress": False}
    streamed = shiftmend.adapt(world.model, Sorted(), world.profile(), batch_size=100, resident=False, **options)
    assert world.accuracy(streamed.model) > 0.95
    assert "fixed order" not in caplog.text
    loader = DataLoader(Sorted(), batch_size=100)
    shiftmend.adapt(world.model, loader, world.profile(), resident=False, **(options | {"epochs": 1}))
    assert "fixed order" in caplog.text
    assert not Feed(loader).never_shuffles  # what lies in memory is shuffled there


@pytest.mark.slow
def test_a_loader_with_its_own_generator_is_reproducible_and_left_as_it_was() -> None:
    world = sensors()
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    loader = DataLoader(TensorDataset(world.target), batch_size=100, shuffle=True, generator=generator)
    for resident in (True, False):
        runs = [
            shiftmend.adapt(
                world.model,
                loader,
                world.profile(),
                "fr",
                epochs=2,
                learning_rate=0.1,
                resident=resident,
                progress=False,
            ).model
            for _ in range(2)
        ]
        assert states_equal(*runs)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"checkpoint": 3}, "checkpoint, got 3"),
        ({"checkpoint": ""}, "checkpoint, got ''"),
        ({"on_epoch": "print"}, "on_epoch.*got 'print'"),
        ({"preprocess": [1]}, r"preprocess.*got \[1\]"),
        ({"autocast": "no"}, r"autocast.*got 'no'"),
        ({"resident": None}, r"resident.*got None"),
        ({"capture": torch.zeros(2)}, r"capture.*Tensor"),
        ({"compile": 1}, r"compile.*got 1"),
        ({"keep": ["last"]}, r"keep.*\['last'\]"),
        ({"blocks": 3}, "blocks.*got 3"),
        ({"output": "logits"}, "under 'logits'"),
        ({"align": 3}, r"name taps.*3"),
        ({"align": ("features", 1)}, "align to name taps"),
        ({"divergence": ["psi"]}, r"divergence.*\['psi'\]"),
        ({"method": ["fr"]}, r"method.*\['fr'\]"),
        ({"method": nn.ReLU}, "class ReLU"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_before_anything_is_done(
    wrong: dict[str, object],
    sentence: str,
    tmp_path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    world = sensors()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(shiftmend.ShiftmendError, match=sentence):
        shiftmend.adapt(world.model, world.target, world.profile(), **{"method": "fr", **wrong})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_flags_of_numpy_fit_into_a_manifest(tmp_path) -> None:  # type: ignore[no-untyped-def]
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "fr", epochs=1, autocast=np.False_, progress=False
    )
    result.save(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["autocast"] is False


def test_numbers_of_numpy_fit_into_a_manifest(tmp_path) -> None:  # type: ignore[no-untyped-def]
    world = sensors()
    made = FR(learning_rate=np.float32(0.125), epochs=np.int64(1))  # type: ignore[arg-type]
    result = shiftmend.adapt(world.model, world.target, world.profile(), made, progress=False)
    result.save(tmp_path)
    (stage,) = json.loads((tmp_path / "manifest.json").read_text())["stages"]
    assert (stage["learning_rate"], stage["epochs"]) == (0.125, 1)


def test_a_model_that_is_broken_already_is_not_blamed_on_the_learning_rate() -> None:
    world = sensors()
    broken = copy.deepcopy(world.model)
    with torch.no_grad():
        broken[4].weight[0, 0] = math.nan
    for call in (
        lambda: shiftmend.adapt(broken, world.target, method="tent"),
        lambda: shiftmend.stream(broken, world.profile()),
    ):
        with pytest.raises(AdaptationError, match=r"'4\.weight' before"):
            call()


class Masked(nn.Module):
    """One of the features is masked out, by a parameter that was not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.mask = nn.Parameter(torch.tensor([0.0] * 5 + [-math.inf]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.softmax(self.below(x) + self.mask, 1))


def test_a_mask_of_infinities_is_not_broken() -> None:
    torch.manual_seed(0)
    model, inputs = Masked(), torch.randn(64, 4)
    profile = shiftmend.profile(model, inputs, progress=False)
    result = shiftmend.adapt(model, inputs + 1, profile, "fr", epochs=2, progress=False)
    assert result.manifest["status"] == "finished"
    assert result.model.mask[-1] == -math.inf
    with torch.no_grad():
        model.mask[0] = math.nan
    with pytest.raises(AdaptationError, match="infinity in 'mask'"):
        shiftmend.adapt(model, inputs, profile, "fr", epochs=2, progress=False)


def test_rates_may_come_as_an_array() -> None:
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "fr", epochs=1, learning_rate=np.logspace(-3, -2, 2), progress=False
    )
    assert [row["learning_rate"] for row in result.manifest["learning_rates_tried"]] == pytest.approx([1e-3, 1e-2])


@pytest.mark.parametrize("wrong", [None, 3, ""])
def test_an_adaptation_is_saved_in_a_folder_with_a_name(wrong: object) -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, method="source-only", progress=False)
    with pytest.raises(shiftmend.ShiftmendError, match=r"Expected a name.*folder"):
        result.save(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("files", [0, 1, 2])
def test_a_disk_that_is_full_after_some_files_leaves_an_earlier_result_whole(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, room = sensors(), iter(range(files))
    shiftmend.adapt(world.model, world.target, method="source-only", progress=False).save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = shiftmend.adapt(world.model, world.target, method="adabn", progress=False)

    def full(*_: object) -> None:
        if next(room, None) is None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(AdaptationError, match="No space left"):
        result.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    world = sensors()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model.lock = threading.Lock()  # type: ignore[assignment]
    for attempt in (
        lambda: shiftmend.adapt(model, world.target, method="source-only", progress=False),
        lambda: shiftmend.stream(model, method="source-only"),
    ):
        with pytest.raises(AdaptationError, match=r"deepcopy.*_thread\.lock"):
            attempt()


class Bound(nn.Module):
    """A function that it holds refers to itself, and so does that of a copy: to the model that was copied."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Linear(8, 3)
        self.below = lambda x: self.body(x).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.below(x))


def test_a_copy_that_runs_layers_of_the_callers_model_is_refused() -> None:
    world, model = sensors(), Bound()
    for attempt in (
        lambda: shiftmend.adapt(model, world.target, method="adabn", progress=False),
        lambda: shiftmend.stream(model, method="adabn").step(world.target),
    ):
        with pytest.raises(AdaptationError, match=r"'body' of the original"):
            attempt()
    assert model.body[1].num_batches_tracked == 0
    model(world.target)  # which goes on working
    assert model.body[1].num_batches_tracked == 1


def test_a_copy_may_ask_for_the_type_of_the_callers_weights() -> None:
    world = sensors()
    model = copy.deepcopy(world.model)
    first = model[0].weight
    model.register_forward_pre_hook(
        lambda _, given: (given[0].to(first.device, first.dtype).reshape(-1, first.shape[1])[:, : first.size(1)],)
    )
    assert shiftmend.adapt(model, world.target, method="tent", epochs=1, device="cpu", progress=False).history
    assert shiftmend.stream(model, method="tent", device="cpu").step(world.target).shape[1] == 3


class Sparing(nn.Module):
    """Does not copy its frozen part."""

    def __init__(self, frozen: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.frozen, self.model = frozen.requires_grad_(False), model

    def __deepcopy__(self, memo: dict[int, object]) -> Sparing:
        return Sparing(self.frozen, copy.deepcopy(self.model, memo))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self.frozen(x))


@pytest.mark.parametrize(("frozen", "method"), [(nn.Linear(6, 6), "fr"), (nn.BatchNorm1d(6), "adabn")])
def test_a_copy_that_shares_what_would_change_is_refused(frozen: nn.Module, method: str) -> None:
    world = sensors()
    model = Sparing(frozen, world.model)
    before = copy.deepcopy(model.state_dict())
    profile = shiftmend.profile(model, world.source, device="cpu", progress=False)
    for attempt in (
        lambda: shiftmend.adapt(model, world.target, profile, method, device="cpu", progress=False),
        lambda: shiftmend.stream(model, profile, method, device="cpu").step(world.target),
    ):
        with pytest.raises(AdaptationError, match=r"'frozen\.\w+'.*original"):
            attempt()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Watched(nn.Module):
    """Keeps a mean of its own in each pass, as one does who wants with a gradient, got none there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        return self.model(x)


def test_buffers_that_are_made_in_inference_mode_are_put_back() -> None:
    world = sensors()
    model = Watched(world.model)
    adaptation = shiftmend.adapt(
        model, world.target, method="adabn", passes=2, keep="selected", device="cpu", progress=False
    )
    assert adaptation.model.seen.any()
    assert not model.seen.any()


def test_no_memory_for_a_copy_is_not_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("copy.deepcopy", full)
    with pytest.raises(torch.OutOfMemoryError):
        shiftmend.stream(sensors().model, method="source-only")


class Checkpointed(nn.Module):
    """Its last layers, head included, run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.checkpoints = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return checkpoint(self.rest, hidden, use_reentrant=False) if self.checkpoints else self.rest(hidden)

    def rest(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(hidden).relu())


@pytest.mark.slow
def test_checkpointed_layers_are_tapped_once_though_they_run_twice() -> None:
    world = sensors()
    torch.manual_seed(0)
    model = Checkpointed()
    profile = shiftmend.profile(model, world.source)
    results = []
    for model.checkpoints in (True, False):
        result = shiftmend.adapt(model, world.target, profile, "fr", epochs=2, batch_size=100, progress=False)
        results.append(result.model.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_weights_that_share_a_part_of_their_memory_are_saved(tmp_path) -> None:  # type: ignore[no-untyped-def]
    world = sensors()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    memory = torch.arange(10.0)
    model.register_buffer("left", memory[:6])
    model.register_buffer("right", memory[4:])
    shiftmend.adapt(model, world.target, method="source-only", progress=False).save(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert stored["left"].tolist() == [0, 1, 2, 3, 4, 5]
    assert stored["right"].tolist() == [4, 5, 6, 7, 8, 9]


def test_a_model_made_in_inference_mode_is_adapted() -> None:
    world = sensors()
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    profile = shiftmend.profile(model, world.source)
    result = shiftmend.adapt(model, world.target, profile, "fr", epochs=1, progress=False)
    assert not torch.equal(result.model[0].weight, model[0].weight)


@pytest.mark.slow
def test_the_default_device_of_torch_changes_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    world = sensors()

    def mended() -> nn.Module:
        made = shiftmend.profile(world.model, world.source.numpy(), gaussian="full", device="cpu")
        made.merge(made).save(tmp_path / "p")
        options = {"epochs_per_block": 1, "batch_size": 50, "device": "cpu", "progress": False}
        result = shiftmend.adapt(world.model, world.target, tmp_path / "p", "bufr", **options)
        found = report.gather(world.model, (world.target, world.labels), made, result, device="cpu")
        assert found.taps[0].worst[0].before.spread > 0
        assert len(few_shot(world.labels, 2)) == 2 * len(world.labels.unique())
        return result.model

    expected = mended()
    torch.set_default_device("meta")  # as good as a GPU: nothing that is made there can be used here
    try:
        found = mended()
    finally:
        torch.set_default_device(None)
    assert states_equal(found, expected)


@pytest.mark.slow
def test_where_there_is_nothing_to_mend_that_is_said_before_anything_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, said = sensors(), list[list[str]]()
    source = world.source.repeat(4, 1)  # of fewer it would be undecided
    profile = shiftmend.profile(world.model, source)
    for target in (source, world.target):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "shiftmend"):
            shiftmend.adapt(
                world.model, target, profile, "fr", epochs=1, on_epoch=lambda _, row: said.append([*caplog.messages])
            )
    home, away = said[1], said[3]  # after the first epoch of each
    assert [one for one in home if re.match(r"the features are restored .* before adapting: training may", one)]
    assert not [one for one in away if "before adapting: training" in one]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [False, True])
def test_sequences_that_are_padded_by_batches(tokens: bool, tmp_path: Path) -> None:
    """As the collate_fn of a `DataLoader` does; every position counts, however many there are."""
    torch.manual_seed(0)
    parts = [nn.Conv1d(2, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU()]
    parts += [nn.Conv1d(8, 3, 1)] if tokens else [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3)]
    net = nn.Sequential(*parts).eval()
    home = [torch.randn(size, 2, length) for size, length in ((30, 9), (30, 17), (13, 11))]
    loader = DataLoader([2 * batch + 1 for batch in home], batch_size=None, shuffle=True)
    made = shiftmend.profile(net, DataLoader(home, batch_size=None), progress=False)
    assert made.taps["features"].samples == (30 * 9 + 30 * 17 + 13 * 11 if tokens else 73)
    made.save(tmp_path / "profile")
    result = shiftmend.adapt(net, loader, tmp_path / "profile", "fr", epochs=5, progress=False)
    assert result.before is not None
    assert result.after is not None
    assert result.after.divergence < result.before.divergence
    assert shiftmend.verify(result.model, loader, made, progress=False).divergence == pytest.approx(
        result.after.divergence, abs=1e-5
    )
    labelled = [(batch, torch.zeros(len(batch), *[batch.shape[2]] * tokens).long()) for batch in home]
    scores = shiftmend.evaluate(net, DataLoader(labelled, batch_size=None), progress=False)
    assert scores.samples == made.taps["features"].samples
    with pytest.raises(AdaptationError, match="fits into memory"):
        shiftmend.adapt(net, loader, made, "shot", progress=False)


def test_a_model_that_takes_one_size_only_says_so_of_batches_that_differ() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    sizes = [torch.randn(8, 2, 4), torch.randn(9, 2, 6)]
    for call in (shiftmend.profile, lambda model, data: shiftmend.adapt(model, data, None, "pl")):
        with pytest.raises(DataError, match=r"batches.*\[2, 6\]"):
            call(net, sizes)
