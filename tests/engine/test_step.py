"""Captured steps give what eager ones give; what cannot be captured runs eagerly."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import an_epoch, sensors

import shiftmend
from shiftmend.accelerate import cuda_graphs as captures
from shiftmend.accelerate.compile import compiled
from shiftmend.accelerate.cuda_graphs import capture_call, capture_epoch
from shiftmend.engine.step import Steps
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.taps import Tap, attach_taps

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TAPS = {"logits": Tap("logits", "6")}


def squares(activations: Any) -> dict[str, Tensor]:
    return {"logits": activations["logits"].square().mean()}


def steps(device: str, capture: bool = True, momentum: float = 0.9) -> Steps:
    world = sensors()
    model = copy.deepcopy(world.model).to(device)
    model[1].train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    feed = Feed(world.target, batch_size=100, device=torch.device(device))
    return Steps(model, feed, TAPS, squares, optimiser, capture=capture)


def state(model: nn.Module) -> list[Tensor]:
    return [value.double().cpu() for value in model.state_dict().values()]


def close(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> bool:
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(state(one), state(other), strict=True)
    )


def test_an_epoch_is_one_step_a_batch_and_sums_up_the_loss() -> None:
    made = steps("cpu")
    sums, count = made.run(0, 1)
    assert count == 6
    assert not made.captured
    assert float(sums["logits"]) > 0
    by_hand = steps("cpu")
    model, optimiser, total = by_hand.model, by_hand.optimiser, 0.0
    assert optimiser is not None
    for batch in an_epoch(by_hand.feed, 0, 1):
        optimiser.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimiser.step()
        total += float(loss.detach())
    assert close(made.model, model, 1e-6)
    assert float(sums["logits"]) == pytest.approx(total, rel=1e-5)


def test_without_an_optimiser_batches_only_run_forward() -> None:
    made = steps("cpu")
    plain = Steps(made.model, made.feed, TAPS, None, None)
    before = [p.clone() for p in made.model.parameters()]
    tracked = int(made.model[1].num_batches_tracked)
    assert plain.run(0, 1) == ({}, 6)
    assert int(made.model[1].num_batches_tracked) == tracked + 6
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_captured_equals_eager_after_fifty_steps(momentum: float) -> None:
    eager, captured = steps("cuda", capture=False, momentum=momentum), steps("cuda", momentum=momentum)
    for number in range(1, 10):
        one, _ = eager.run(3, number)
        other, count = captured.run(3, number)
        assert float(one["logits"]) == pytest.approx(float(other["logits"]), rel=1e-3)
    assert count == 6
    assert captured.captured
    assert not eager.captured
    assert close(eager.model, captured.model, 1e-4)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("method", ["fr", "bufr", "shot", "tent", "bnm-im", "pl"])
def test_adapting_captured_equals_adapting_eagerly(method: str) -> None:
    world = sensors()
    profile = world.profile()
    epochs = {"epochs_per_block": 4} if method == "bufr" else {"epochs": 8}
    one, other = (
        shiftmend.adapt(
            world.model,
            world.target,
            profile,
            method,
            batch_size=100,
            learning_rate=0.01,
            device="cuda",
            capture=capture,
            progress=False,
            **epochs,
        )
        for capture in (True, False)
    )
    assert close(one.model, other.model, 1e-3)
    for row, again in zip(one.history, other.history, strict=True):
        assert row.losses == pytest.approx(again.losses, rel=1e-2, abs=1e-4)


@pytest.mark.gpu
@gpu
def test_a_resumed_run_keeps_its_momentum_through_the_capture(tmp_path: Path) -> None:
    world = sensors()
    options: dict[str, Any] = {"batch_size": 100, "learning_rate": 0.05, "device": "cuda", "progress": False}
    whole = shiftmend.adapt(world.model, world.target, world.profile(), "fr", epochs=6, **options)

    def stop(model: nn.Module, row: Any) -> None:
        if row.epoch == 4:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        shiftmend.adapt(
            world.model,
            world.target,
            world.profile(),
            "fr",
            epochs=6,
            checkpoint=tmp_path / "c",
            on_epoch=stop,
            **options,
        )
    resumed = shiftmend.adapt(
        world.model, world.target, world.profile(), "fr", epochs=6, checkpoint=tmp_path / "c", **options
    )
    assert close(whole.model, resumed.model, 1e-3)


class Waiting(nn.Module):
    """Its forward pass looks at a value, which no graph can hold."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x if float(x.mean()) > -1e9 else -x)
        return result


@pytest.mark.gpu
@gpu
def test_what_cannot_be_captured_runs_eagerly_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    model = Waiting(copy.deepcopy(world.model)).eval()
    profile = shiftmend.profile(model, world.source, progress=False)
    with caplog.at_level(logging.INFO, "shiftmend"):
        results = [
            shiftmend.adapt(
                model, world.target, profile, "bufr", epochs_per_block=2, learning_rate=0.05, device="cuda",
                capture=capture, progress=False,
            )
            for capture in (True, False)
        ]  # fmt: skip
    assert len(results[0].manifest["stages"]) > 1
    assert caplog.text.count("steps are not captured") == 1
    assert close(results[0].model, results[1].model, 1e-3)


class Centred(nn.Module):
    """Keeps a mean of its own, each time in a new tensor."""

    mean: Tensor

    def __init__(self, inner: nn.Module, units: int) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(units))

    def forward(self, x: Tensor) -> Tensor:
        if self.inner.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        result: Tensor = self.inner(x - self.mean)
        return result


def centred_world() -> tuple[nn.Sequential, Tensor]:
    """The model of a small world with such a layer, and the tensor that its mean lies in."""
    model = copy.deepcopy(sensors().model)
    assert isinstance(model, nn.Sequential)
    model[1] = Centred(model[1], 16)
    return model.eval(), model[1].mean


def test_a_buffer_that_is_replaced_in_each_step_stays_where_captured_passes_read_it() -> None:
    model, mean = centred_world()
    by_hand = copy.deepcopy(model)
    feed = Feed(sensors().target, batch_size=100)
    made = Steps(model, feed, TAPS, None, None)
    for one in (model, by_hand):
        one[1].train()
    made.run(0, 1)
    with torch.no_grad():
        for batch in an_epoch(feed, 0, 1):
            by_hand(batch)
    assert model[1].mean is mean
    assert float(mean.abs().max()) > 0.1
    assert close(model, by_hand, 1e-6)


@pytest.mark.gpu
@gpu
def test_a_model_that_replaces_a_buffer_is_captured_and_watched_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = centred_world()
    world, profile = sensors(), shiftmend.profile(model, sensors().source, progress=False)
    with caplog.at_level(logging.INFO, "shiftmend"):
        one, other = (
            shiftmend.adapt(
                model, world.target, profile, "fr", epochs=3, learning_rate=0.01, batch_size=100, device="cuda",
                capture=capture, progress=False,
            )
            for capture in (True, False)
        )  # fmt: skip
    assert "not captured" not in caplog.text
    assert close(one.model, other.model, 1e-3)
    for row, again in zip(one.history, other.history, strict=True):
        assert row.verification == pytest.approx(again.verification, rel=1e-2)


@pytest.mark.gpu
@gpu
def test_dropout_of_a_captured_run_follows_the_seed() -> None:
    world = sensors()

    def run(seed: int) -> nn.Module:
        return shiftmend.adapt(
            world.model, world.target, None, "target-supervised", labels=world.labels, epochs=3, learning_rate=0.05,
            batch_size=100, seed=seed, device="cuda", progress=False,
        ).model  # fmt: skip

    torch.manual_seed(1)
    first = run(0)
    torch.manual_seed(2)
    assert close(first, run(0), 1e-5)
    assert not close(first, run(1), 1e-3)


class Slow(torch.autograd.Function):
    """Passes values on; its backward keeps the device busy for a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        torch.cuda._sleep(100_000_000)
        return gradients[0]


@pytest.mark.gpu
@gpu
def test_a_failed_capture_leaves_the_weights_as_they_were_also_if_a_warm_up_is_under_way() -> None:
    made = steps("cuda")

    def failing(activations: Any) -> dict[str, Tensor]:
        loss = Slow.apply(activations["logits"]).square().mean()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not like this")
        return {"logits": loss}

    made.objective = failing
    before = state(made.model)
    made._try_to_capture(None)
    torch.cuda.synchronize()
    assert not made.captured
    assert all(torch.equal(one, other) for one, other in zip(before, state(made.model), strict=True))


@pytest.mark.gpu
@gpu
def test_a_thread_with_a_stream_of_its_own_captures_on_it() -> None:
    """torch has 32 streams: a capture on any other one could meet that of another lane."""
    device = torch.device("cuda", 0)
    used: list[torch.cuda.Stream] = []

    def run() -> Tensor:
        used.append(torch.cuda.current_stream())
        return torch.ones(3, device=device).sum()

    own = torch.cuda.Stream()
    for _ in range(40):
        torch.cuda.Stream()
    with torch.cuda.stream(own):
        call = capture_call(run, nn.Identity(), device)
        assert call is not None
        assert call().item() == 3
    assert set(used) == {own}
    used.clear()
    assert capture_call(run, nn.Identity(), device) is not None
    assert torch.cuda.default_stream() not in used


def graphs() -> int:
    """How many pieces of models torch has compiled so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Wrapped(nn.Module):
    """A model of one's own around the same layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["of torch's layers alone", "of its own class"])
def test_a_model_is_compiled_with_its_hooks_and_drops_what_it_would_drop(kind: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    model = layers if kind == "of torch's layers alone" else Wrapped(layers)
    inputs = torch.linspace(-1, 1, 60).view(20, 3)
    seen: list[Tensor] = []
    layers[3].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    torch.manual_seed(1)
    plain = model(inputs)
    before = graphs()
    with compiled(model, dropout=True):
        torch.manual_seed(1)
        other = model(inputs)
    assert graphs() > before
    assert model._compiled_call_impl is None
    torch.testing.assert_close(other, plain)
    torch.testing.assert_close(seen[1], seen[0])
    assert (seen[0] == 0).any()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_copy_with_other_taps_is_compiled_anew_and_one_with_the_same_is_not() -> None:
    original = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs, found = torch.linspace(-1, 1, 60).view(20, 3), []
    for names in ({"logits": "2"}, {"features": "1", "logits": "2"}, {"logits": "2"}):
        model, before = copy.deepcopy(original), graphs()
        with torch.no_grad():
            model[0].weight.mul_(1 + len(found))  # code that is used again must read the weights of the copy
        taps = {name: Tap.parse(name, module) for name, module in names.items()}
        with attach_taps(model, taps) as recorder:
            model(inputs)
            expected = recorder.read()
        with compiled(model), attach_taps(model, taps, eager=False) as recorder:
            model(inputs)
            for name, values in recorder.read().items():
                torch.testing.assert_close(values, expected[name])
        found.append(graphs() - before)
    assert found == [1, 1, 0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_is_trained_from_now_on_gets_gradients_from_compiled_code_as_well() -> None:
    """As BUFR goes on from stage to stage. Torch 2.11 has to be told to look at the parameters again."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)), nn.ReLU(), nn.Linear(8, 2))
    inputs, taps = torch.linspace(-1, 1, 60).view(20, 3), {"logits": Tap("logits", "2")}
    for trained in ("0.0", "0", ""):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
            parameter.grad = None
        with compiled(model), attach_taps(model, taps, eager=False) as recorder:
            for _ in range(3):
                model(inputs)
                recorder.read()["logits"].square().mean().backward()
        with_gradient = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert with_gradient == [name for name, _ in model.named_parameters() if name.startswith(trained)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("refused", ["compiled steps are not captured as a CUDA graph (RuntimeError: no compiler)"]),
        ("one left out", ["compiled steps are not used: a parameter of 'all layers' gets no gradient in them"]),
        ("one of no use", []),
        ("none", []),
    ],
)
def test_what_cannot_be_compiled_is_captured_as_it_is_and_said_once(
    trouble: str, said: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Captures that need no device."""

    class Epoch:
        def __init__(self, once: Any, model: nn.Module, *_: Any) -> None:
            self.compiled = model._compiled_call_impl is not None
            if self.compiled and trouble == "refused":
                raise RuntimeError("no compiler\nof any kind")
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            if trouble == "one of no use" or (self.compiled and trouble == "one left out"):
                next(model.parameters()).grad = None

        def run(self, order: Tensor) -> tuple[dict[str, Tensor], int]:
            return {}, 6

    monkeypatch.setattr(captures, "CapturedEpoch", Epoch)
    monkeypatch.setattr(captures, "_end_capture", lambda device: None)
    monkeypatch.setattr(Steps, "_can_be_captured", lambda self: True)
    made = steps("cpu")
    made.compile, made.stage = True, "all layers"
    with caplog.at_level(logging.WARNING, "shiftmend"):
        made.run(0, 1)
    assert isinstance(made._captured, Epoch)
    assert made._captured.compiled == made.compile == (not said)
    assert caplog.messages == said


@pytest.mark.gpu
@gpu
def test_a_run_whose_steps_cannot_be_compiled_says_so_once_and_in_its_manifest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **options: refuse)
    world = sensors()
    options: dict[str, Any] = {"epochs_per_block": 2, "learning_rate": 0.01, "batch_size": 100, "device": "cuda"}
    with caplog.at_level(logging.WARNING, "shiftmend"):
        result = shiftmend.adapt(
            world.model, world.target, world.profile(), "bufr", compile=True, progress=False, **options
        )
    assert result.manifest["compile"] is False
    assert sum("compiled steps are not captured" in message for message in caplog.messages) == 1


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fr", {"epochs": 6}),
        ("fr", {"epochs": 4, "learning_rate": [0.02, 0.005]}),
        ("fr", {"epochs": 4, "autocast": True}),
        ("bufr", {"epochs_per_block": 3}),
        ("shot", {"epochs": 4}),
        ("target-supervised", {"epochs": 4, "labels": sensors().labels}),
    ],
)
def test_compiled_steps_give_what_others_give_and_leave_nothing_behind(method: str, own: dict[str, Any]) -> None:
    world = sensors()
    options: dict[str, Any] = {"batch_size": 100, "learning_rate": 0.01, "device": "cuda", **own}
    torch._dynamo.reset()  # what was compiled for others is not counted again
    before = graphs()
    plain, other = (
        shiftmend.adapt(world.model, world.target, world.profile(), method, compile=on, progress=False, **options)
        for on in (False, True)
    )
    assert graphs() > before
    assert other.manifest["compile"]
    assert close(plain.model, other.model, 1e-2 if "autocast" in own else 1e-3)
    assert other.model._compiled_call_impl is None


@pytest.mark.gpu
@gpu
def test_every_replay_draws_other_dropout_and_the_same_seed_the_same() -> None:
    device, steps_ = torch.device("cuda", 0), 12
    model = nn.Linear(4, 2).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    masks = torch.zeros(steps_, 256, device=device)
    at = torch.zeros(1, dtype=torch.int64, device=device)

    def once(index: Tensor) -> dict[str, Tensor]:
        kept = nn.functional.dropout(torch.ones(1, 256, device=device), 0.5, training=True)
        masks.index_copy_(0, at, kept)
        at.add_(1).remainder_(steps_)
        loss = model(index.float().view(-1, 1).expand(-1, 4)).square().mean() * kept.mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        return {"loss": loss.detach()}

    captured = capture_epoch(once, model, optimiser, device, 2 * steps_, 2)
    assert captured is not None
    runs = []
    for seed in (5, 5, 6):
        at.zero_()
        torch.cuda.default_generators[0].manual_seed(seed)
        captured.run(torch.arange(2 * steps_, device=device))
        runs.append(masks.clone())
    assert len(torch.unique(runs[0], dim=0)) == steps_, "dropout drew the same in several steps"
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
