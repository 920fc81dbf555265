"""Captured runs give what eager ones give, on graphs that need no GPU (`graphs.py`) and on real ones."""

from __future__ import annotations

import copy
import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from graphs import FreedError, captured_without_a_gpu, recorded
from torch import Tensor, nn
from worlds import World, sensors

import shiftmend
from shiftmend.accelerate import cuda_graphs as captures
from shiftmend.adaptation.result import Adaptation
from shiftmend.engine.history import Epoch
from shiftmend.engine.method import Method
from shiftmend.evaluation.evaluate import Scorer
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.taps import Tap
from shiftmend.methods.fr import FR
from shiftmend.passes.evaluation_pass import ActivationReader
from shiftmend.verification.signals import SignalReader, observe

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DRAWS = captures._host_rng_states
PLACES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]


def test_a_graph_without_a_gpu_goes_by_the_memory_alone() -> None:
    factor, outside, inside = 2.0, torch.ones(2), torch.zeros(2)
    graph, result = recorded(lambda: inside.add_(outside * factor) + 1, torch.device("cpu"), 0)
    factor = 5.0
    outside.fill_(3.0)
    inside.zero_()
    for expected in (7.0, 13.0):
        graph.replay()
        assert result.tolist() == [expected, expected]
    outside = torch.ones(2)
    with pytest.raises(FreedError):
        graph.replay()


def overwrite_what_was_freed() -> None:
    """Memory is given out again on the stream that it was freed on."""
    for _ in range(32):
        with torch.cuda.stream(torch.cuda.Stream()):
            junk = [torch.full((size,), torch.nan, device="cuda") for size in (384, 600, 3600) for _ in range(40)]
            del junk
    torch.cuda.synchronize()


def adapted(
    world: World, method: str | type[Method], device: str = "cpu", **options: Any
) -> tuple[Adaptation, list[float]]:
    """The result, and scores after every epoch."""
    scorers: dict[nn.Module, Scorer] = {}
    scores = []

    def score(model: nn.Module, row: Epoch) -> None:
        if model not in scorers:
            feed = Feed((world.target, world.labels), batch_size=64, device=torch.device(device))
            scorers[model] = Scorer(model, feed, capture=options["capture"])
        scores.append(scorers[model]().nll)
        if device == "cuda":
            overwrite_what_was_freed()

    epochs = {"epochs_per_block": 3} if method == "bufr" else {"epochs": 5}
    usual = {"learning_rate": 0.01, "batch_size": 100, "on_epoch": score, "progress": False, "device": device}
    given = usual | epochs | options
    return shiftmend.adapt(world.model, world.target, world.profile(), method, **given), scores


def same(one: Adaptation, other: Adaptation, tolerance: float) -> None:
    weights = other.model.state_dict()
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=tolerance, atol=tolerance)
    for row, again in zip(one.history, other.history, strict=True):
        assert row.losses == pytest.approx(again.losses, rel=10 * tolerance, abs=tolerance)
        assert row.signals == pytest.approx(again.signals, rel=10 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fr", {"learning_rate": [0.02, 0.005, 0.01]}),
        ("bufr", {"keep": "selected"}),
        ("shot", {"autocast": True}),
        ("target-supervised", {"labels": sensors().labels, "weight_decay": 0.1}),
    ],
)
def test_a_captured_run_is_an_eager_one(
    method: str,
    options: dict[str, Any],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Learning rates one after the other, stages, labels made anew in each epoch, dropout; looks and scores as well."""
    if device == "cpu":
        captured_without_a_gpu(monkeypatch)
    with caplog.at_level(logging.INFO, "shiftmend"):
        (one, scores), (other, expected) = (
            adapted(sensors(), method, device, capture=capture, **options) for capture in (True, False)
        )
    assert "not captured" not in caplog.text
    tolerance = 1e-6 if device == "cpu" else 1e-2 if "autocast" in options else 1e-3
    same(one, other, tolerance)
    assert scores == pytest.approx(expected, rel=10 * tolerance)
    assert one.selected == other.selected


@pytest.mark.slow
def test_a_captured_run_that_is_resumed_within_a_stage_ends_as_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured_without_a_gpu(monkeypatch)

    def stop(model: nn.Module, row: Epoch) -> None:
        if row.epoch == 5:
            raise RuntimeError("stop")

    options = {"capture": True, "checkpoint": tmp_path / "checkpoint"}
    with pytest.raises(RuntimeError, match="stop"):
        adapted(sensors(), "bufr", on_epoch=stop, **options)
    resumed, _ = adapted(sensors(), "bufr", **options)
    whole, _ = adapted(sensors(), "bufr", capture=False)
    same(resumed, whole, 1e-6)


@dataclass(frozen=True, kw_only=True)
class Blunted(FR):
    """FR on a model whose BatchNorm is another for the length of the run."""

    name: ClassVar[str] = "blunted"

    @contextmanager
    def prepared(self, model: nn.Module) -> Iterator[None]:
        assert isinstance(model, nn.Sequential)
        usual, model[1].eps = model[1].eps, 1.0
        yield
        model[1].eps = usual


@pytest.mark.slow
def test_a_captured_look_sees_a_model_that_its_method_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    captured_without_a_gpu(monkeypatch)
    one, other = (adapted(sensors(), Blunted, capture=capture)[0] for capture in (True, False))
    same(one, other, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
def test_a_captured_look_at_maps_counts_the_positions_that_an_eager_one_counts(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        captured_without_a_gpu(monkeypatch)
    monkeypatch.setattr(Feed, "inference_batch_size", 16)  # with a last batch that is smaller
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1)).to(device)
    images = torch.rand(50, 1, 18, 18)
    profile, feed = shiftmend.profile(model, images, progress=False), Feed(images, device=torch.device(device))
    watch = SignalReader(model, feed, profile, capture=True)
    for factor in (1.0, 0.9):
        with torch.no_grad():
            model[0].weight.mul_(factor)
        seen, expected = watch().verification, observe(model, feed, profile).verification
        assert watch._pass._replay is not None
        assert seen is not None
        assert expected is not None
        assert (seen.divergence, seen.marginals) == pytest.approx((expected.divergence, expected.marginals), rel=1e-4)


class Tabled(nn.Module):
    """Adds a table that it makes for the size of a batch and keeps for the next one, if that is as large."""

    def __init__(self, inner: nn.Module, waits: bool = False) -> None:
        super().__init__()
        self.inner, self.waits = inner, waits
        self.table = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) != len(x):
            self.table = torch.linspace(0, 1, x.numel(), device=x.device).view_as(x)
        if self.waits and float(x.detach().mean()) < -1e9:
            return -x
        result: Tensor = self.inner(x + self.table)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
def test_what_a_model_keeps_for_a_size_of_batches_is_there_as_long_as_a_graph_reads_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, looks and scores have batches of different sizes."""
    if device == "cpu":
        captured_without_a_gpu(monkeypatch)
        monkeypatch.setattr(Feed, "inference_batch_size", 300)
    plain = sensors()
    world = World(Tabled(plain.model).eval(), plain.source, plain.target, plain.labels)
    (one, scores), (other, expected) = (adapted(world, "fr", device, capture=capture) for capture in (True, False))
    tolerance = 1e-6 if device == "cpu" else 1e-3
    same(one, other, tolerance)
    assert scores == pytest.approx(expected, rel=10 * tolerance)


@pytest.mark.parametrize("device", PLACES)
def test_what_a_model_makes_while_a_capture_fails_is_not_used(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        captured_without_a_gpu(monkeypatch)
    monkeypatch.setattr(Feed, "inference_batch_size", 450)
    world, place = sensors(), torch.device(device)
    model = Tabled(copy.deepcopy(world.model), waits=True).to(place).eval()
    feed = Feed(world.target, batch_size=450, device=place)
    look, taps = ActivationReader(model, feed, capture=True), {"logits": Tap.parse("logits", "inner.6")}
    seen = look(taps)["logits"]
    assert look._pass is not None
    assert look._pass._replay is None
    torch.testing.assert_close(seen, ActivationReader(copy.deepcopy(model), feed)(taps)["logits"])
    assert bool(seen.isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("drawn", ["random", "numpy", "torch"])
def test_augmentation_with_random_numbers_of_the_host_draws_anew_for_every_batch(
    drawn: str, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draw = {
        "random": random.random,
        "numpy": np.random.random,
        "torch": lambda: int(torch.randint(1 << 30, (1,))) / (1 << 30),
    }[drawn]
    if device == "cpu":
        captured_without_a_gpu(monkeypatch)
        monkeypatch.setattr(captures, "_host_rng_states", DRAWS)
    factors: list[float] = []

    def scaled(inputs: Tensor) -> Tensor:
        factors.append(draw())
        return inputs * (1 + 0.01 * factors[-1])

    adapted(sensors(), "fr", device, preprocess=scaled, capture=True, on_epoch=lambda model, row: None)
    assert "steps are not captured as a CUDA graph (RuntimeError: random numbers are drawn on the host" in caplog.text
    assert len(set(factors)) > 5 * 6


@pytest.mark.parametrize("enabled", [False, True])
def test_garbage_is_not_collected_meanwhile_and_as_before_afterwards(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with captures.pause_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
