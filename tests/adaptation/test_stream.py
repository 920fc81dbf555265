from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from rehearsed_world import draw, rehearsed, trained
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import World, sensors
from zoo import SMALL, ZOO

import shiftmend
from shiftmend.errors import AdaptationError, DataError, ProfileError, TapError
from shiftmend.verification.class_watch import ClassWatch


def state(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def test_predicts_before_it_adapts_with_the_statistics_of_the_batch() -> None:
    world = sensors()
    online = shiftmend.stream(world.model, world.profile(), learning_rate=0.05)
    first = online.step(world.target[:100])
    reference = copy.deepcopy(world.model).eval()
    reference[1].train()  # BatchNorm on the batch, dropout off, source weights
    with torch.no_grad():
        torch.testing.assert_close(first, reference(world.target[:100]))
    assert not first.requires_grad
    assert online.steps == 1
    assert set(online.losses) == {"features", "logits"}


def test_one_pass_over_a_stream_mends_the_model() -> None:
    world = sensors()
    before = state(world.model)
    online = shiftmend.stream(world.model, world.profile(), learning_rate=0.02, window=2)
    right = 0
    for inputs, labels in zip(world.target.split(50), world.labels.split(50), strict=True):
        right += int((online.step(inputs).argmax(1) == labels).sum())
    assert right / 600 > 0.9 > world.accuracy(world.model)
    assert all(torch.equal(a, b) for a, b in zip(before, state(world.model), strict=True))
    mended = online.snapshot()
    assert not any(module.training or module._forward_hooks for module in mended.modules())
    assert world.accuracy(mended) > world.accuracy(world.model) + 0.1  # running statistics need more than 12 batches
    assert online.verification is not None
    assert online.verification.samples == 100


def test_a_snapshot_has_the_gradient_flags_of_the_model_it_came_from(tmp_path) -> None:  # type: ignore[no-untyped-def]
    world = sensors()
    world.profile().save(tmp_path / "p")
    online = shiftmend.stream(world.model, tmp_path / "p", "tent")
    online.step(world.target[:50])
    for parameter in online.snapshot().parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        assert parameter.grad is None


def test_one_step_equals_one_step_of_the_engine() -> None:
    world = sensors()
    profile = world.profile()
    whole = shiftmend.adapt(
        world.model, world.target, profile, "fr", epochs=1, learning_rate=0.1, batch_size=600, progress=False
    )
    online = shiftmend.stream(world.model, profile, "fr", learning_rate=0.1)
    online.step(world.target)
    for ours, theirs in zip(state(online.snapshot()), state(whole.model), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_steps_have_a_common_momentum() -> None:
    world = sensors()
    profile = world.profile()
    batches = world.target.split(200)
    reference = copy.deepcopy(world.model).eval()
    reference[1].train()
    optimiser = torch.optim.SGD(reference[:6].parameters(), lr=0.05, momentum=0.9)
    online = shiftmend.stream(world.model, profile, "fr", learning_rate=0.05)
    for batch in batches:
        online.step(batch)
        features = reference[:6](batch)
        seen = {"features": features, "logits": reference[6](features)}
        loss = sum(profile.taps[name].divergence(values) for name, values in seen.items())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for ours, theirs in zip(state(online.snapshot()), state(reference), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 2])
def test_a_model_in_training_mode_is_not_predicted_with_in_that_mode(window: int) -> None:
    world = sensors()
    profile = world.profile()
    online = shiftmend.stream(copy.deepcopy(world.model).train(), profile, "source-only", window=window)
    seen: list[torch.Tensor] = []
    for batch in world.target[:170].split(60):
        with torch.no_grad():
            torch.testing.assert_close(online.step(batch), world.model(batch))
        seen.append(batch)
        last = torch.cat(seen[-window:])
        judged, expected = online.verification, shiftmend.verify(world.model, last, profile)
        assert judged is not None
        assert judged.samples == len(last)
        assert (judged.divergence, judged.floor) == pytest.approx((expected.divergence, expected.floor), rel=1e-5)


def test_two_samples_are_learnt_from_and_one_where_nothing_needs_more() -> None:
    for world, name, samples in ((sensors(), "fr", 2), (sensors(norm=False), "pl", 1)):
        online = shiftmend.stream(world.model, world.profile(), name, learning_rate=0.05)
        online.step(world.source[:samples] / 10)  # nothing that the model is certain of
        assert not torch.equal(online.snapshot()[0].weight, world.model[0].weight)


@pytest.mark.parametrize("name", ["source-only", "adabn", "pl", "shot-im", "tent", "bnm", "bnm-im"])
def test_other_methods(name: str) -> None:
    world = sensors()
    online = shiftmend.stream(world.model, world.profile(), name)
    for batch in world.target.split(200):
        assert online.step(batch).shape == (200, 3)
    moved = not torch.equal(online.snapshot()[1].running_mean, world.model[1].running_mean)
    assert moved == (name != "source-only")


def test_batch_norm_that_averages_over_its_whole_life_still_learns() -> None:
    world = sensors()
    model = copy.deepcopy(world.model)
    model[1].momentum = None
    online = shiftmend.stream(model, method="adabn")
    online.step(world.target[:100])
    learnt = online.snapshot()[1]
    with torch.no_grad():
        seen = model[0](world.target[:100]).mean(0)
    torch.testing.assert_close(learnt.running_mean, 0.9 * model[1].running_mean + 0.1 * seen)
    assert learnt.momentum is None


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_kind_of_model(name: str) -> None:
    case = ZOO[name]
    profile = shiftmend.profile(case.model(), case.inputs(), output=case.output)
    online = shiftmend.stream(case.model(), profile, learning_rate=1e-3, output=case.output)
    result = online.step(case.inputs(32, seed=4))
    assert result.shape[0] == 32


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "name"), [(True, "fr"), (False, "shot-im")])  # statistics or the loss alone
def test_a_batch_that_is_not_finite_changes_nothing(norm: bool, name: str, caplog: pytest.LogCaptureFixture) -> None:
    world, huge = sensors(norm), 1e38 * torch.randn(10, 6).clamp(-3, 3)
    online = shiftmend.stream(world.model, world.profile(), name, learning_rate=0.05)
    online.step(world.target[:100])
    before = state(online.snapshot())
    with pytest.raises(DataError, match="NaN"):
        online.step(torch.full((10, 6), torch.nan))
    assert all(torch.equal(a, b) for a, b in zip(before, state(online.snapshot()), strict=True))
    judged, losses = online.verification, online.losses
    online.step(huge)
    assert "batch 2 led to values that are not finite; it was not learnt from" in caplog.text
    assert (online.verification, online.losses) == (judged, losses)
    online.step(world.target[100:200])
    assert all(bool(torch.isfinite(value).all()) for value in state(online.snapshot()))
    online = shiftmend.stream(world.model, world.profile(), name, learning_rate=0.05)
    online.step(world.target[:100])
    online.step(huge)
    assert all(torch.equal(a, b) for a, b in zip(before, state(online.snapshot()), strict=True))


def test_the_momentum_of_a_step_that_was_taken_back_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    world = sensors()
    profile = world.profile()
    online, fresh = (shiftmend.stream(world.model, profile, learning_rate=0.05) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr("shiftmend.adaptation.stream.is_finite", lambda model, before: False)
        online.step(world.target[:100])
    for each in (online, fresh):
        each.step(world.target[100:200])
    assert all(torch.equal(a, b) for a, b in zip(state(online.snapshot()), state(fresh.snapshot()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    ["torch.optim.SGD.step", "shiftmend.adaptation.stream.is_finite", "shiftmend.adaptation.stream.Stream._count"],
)
def test_a_step_that_is_interrupted_at_whatever_point_changes_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sensors()
    online, calls = shiftmend.stream(world.model, world.profile(), learning_rate=0.05), list[int]()
    online.step(world.target[:100])
    before, judged, losses = state(online.snapshot()), online.verification, online.losses
    whole, forward = torch.optim.SGD.step, type(world.model).forward

    def interrupted(*arguments: object) -> None:
        if isinstance(arguments[0], torch.optim.SGD):
            whole(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return forward(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(where, interrupted)
        patched.setattr(type(world.model), "forward", counted)
        with pytest.raises(KeyboardInterrupt):
            online.step(world.target[100:200])
    assert len(calls) == 3  # by both models and on matched inputs, and nobody waits for a second look at the inputs
    assert all(torch.equal(a, b) for a, b in zip(before, state(online.snapshot()), strict=True))
    assert (online.steps, online.verification, online.losses) == (1, judged, losses)
    fresh = shiftmend.stream(online.snapshot(), world.profile(), learning_rate=0.05)
    for each in (online, fresh):  # momentum is forgotten
        each.step(world.target[200:300])
    assert all(torch.equal(a, b) for a, b in zip(state(online.snapshot()), state(fresh.snapshot()), strict=True))


@pytest.mark.parametrize("name", ["fr", "pl"])  # a single one would be enough for pl, but not for BatchNorm
def test_a_single_sample_is_predicted_and_not_learnt_from(name: str, caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    online = shiftmend.stream(world.model, world.profile(), name)
    result = online.step(world.target[:1])
    torch.testing.assert_close(result, world.model(world.target[:1]).detach())
    assert "single sample" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(state(online.snapshot()), state(world.model), strict=True))


def test_nonsense_is_one_sentence() -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match=r"bufr.*Use one of (?!.*bufr)"):
        shiftmend.stream(world.model, world.profile(), "bufr").step(world.target[:50])
    with pytest.raises(AdaptationError, match="Expected a profile"):
        shiftmend.stream(world.model)
    with pytest.raises(DataError, match="window"):
        shiftmend.stream(world.model, world.profile(), window=0)
    for empty in (world.target[:0], []):
        with pytest.raises(DataError, match=r"in the batch.*empty"):
            shiftmend.stream(world.model, world.profile()).step(empty)
    with pytest.raises(ProfileError, match="other layers"):
        shiftmend.stream(ZOO["signal"].model(), world.profile())
    assert shiftmend.stream(world.model, method="adabn").verification is None


def test_a_batch_that_the_method_refuses_changes_nothing() -> None:
    world = sensors()
    profile = shiftmend.profile(world.model, world.source, gaussian="full", progress=False)
    online = shiftmend.stream(world.model, profile, "full-gauss", learning_rate=0.001)
    online.step(world.target[:50])
    before = state(online.snapshot())
    with pytest.raises(AdaptationError, match="more than"):
        online.step(world.target[:5])
    assert all(torch.equal(a, b) for a, b in zip(state(online.snapshot()), before, strict=True))


def test_a_batch_that_the_model_cannot_take_changes_nothing() -> None:
    """BatchNorm in front of what fails has seen it by then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    profile = shiftmend.profile(model, torch.randn(200, 1, 8, 8), progress=False)
    online = shiftmend.stream(model, profile, "fr", learning_rate=0.01)
    online.step(torch.randn(50, 1, 8, 8))
    before = state(online.snapshot())
    for bad in (torch.randn(50, 1, 9, 9), torch.randn(50, 1, 8, 8).double()):
        with pytest.raises(DataError, match="got shape"):
            online.step(bad)
        assert all(torch.equal(a, b) for a, b in zip(state(online.snapshot()), before, strict=True))
    online.step(torch.randn(50, 1, 8, 8))


def test_a_batch_may_be_what_a_loader_gives() -> None:
    """Inputs and labels come as a list; labels of the inputs' shape must not be learnt from either."""
    world = sensors()
    profile = world.profile()
    outputs = []
    for batch in (world.target[:50], [world.target[:50], world.labels[:50]], [world.target[:50], world.source[:50]]):
        online = shiftmend.stream(world.model, profile, learning_rate=0.02)
        outputs.append(online.step(batch))
        assert online.verification is not None
        assert online.verification.samples == 50
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_a_single_sample_has_no_histogram_also_without_batch_norm(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors(norm=False)
    profile = shiftmend.profile(world.model, world.source, gaussian="full", progress=False)
    for method in ("fr", "bnm", "shot-im", "full-gauss"):
        caplog.clear()
        online = shiftmend.stream(world.model, profile, method)
        result = online.step(world.target[:1])
        torch.testing.assert_close(result, world.model(world.target[:1]).detach())
        assert "single sample has no distribution" in caplog.text
        assert all(torch.equal(a, b) for a, b in zip(state(online.snapshot()), state(world.model), strict=True))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"window": "16"}, r"window.*got '16'"),
        ({"preprocess": 3}, "preprocess.*got 3"),
        ({"profile": 3}, "profile.*got an int"),
        ({"method": []}, "Expected the method"),
        ({"align": "middle"}, r"'middle'.*features, logits"),
        ({"device": []}, r"device.*is available"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_step(wrong: dict[str, object], sentence: str) -> None:
    world = sensors()
    with pytest.raises(shiftmend.ShiftmendError, match=sentence):
        shiftmend.stream(**{"model": world.model, "profile": world.profile(), **wrong})  # type: ignore[arg-type]


def test_wrong_steps_are_one_sentence_and_the_stream_goes_on() -> None:
    world = sensors()
    online = shiftmend.stream(world.model, world.profile(), window=np.int64(4))  # type: ignore[arg-type]
    data = TensorDataset(world.target)
    for wrong in (DataLoader(data), data):
        with pytest.raises(DataError, match=r"one batch.*its batches"):
            online.step(wrong)
    part = world.target[:50]
    for several in ([(part, world.labels[:50])] * 2, [{"inputs": part}] * 2):
        with pytest.raises(DataError, match=r"one batch.*begins.*(tuple|dict)"):
            online.step(several)
    with pytest.raises(DataError, match="that the model takes"):
        online.step(((part, part), world.labels[:50]))
    with pytest.raises(TapError, match="under 'logits'"):
        shiftmend.stream(world.model, world.profile(), output="logits").step(world.target[:50])
    online.step(world.target[:50])
    with pytest.raises(DataError, match=r"\[6\].*one sample"):
        online.step(world.target[0])
    assert online.steps == 1


class Remembers(nn.Module):
    """Keeps what it computed, with the graph behind it, alone and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.detached = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.encoder(x).relu()
        self.all_hidden = [self.hidden, {"first": self.hidden * 2}]
        return self.head(self.hidden.detach() if self.detached else self.hidden)


def test_a_model_that_remembers_its_last_step_can_be_copied_at_any_time() -> None:
    world, model = sensors(), Remembers()
    profile = shiftmend.profile(model, world.source)
    model(world.source[:4]).sum().backward()
    online = shiftmend.stream(model, profile, learning_rate=0.01)
    online.step(world.target[:50])
    mended = online.snapshot()
    assert not mended.hidden.requires_grad
    assert model.hidden.grad_fn is not None
    first = mended.encoder.weight.clone()
    online.step(world.target[50:100])
    assert torch.equal(mended.encoder.weight, first)
    assert not torch.equal(online.snapshot().encoder.weight, first)


class Centring(nn.Module):
    """Puts a new tensor, with a graph behind it, in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.below(x)
        self.mean = 0.9 * self.mean + 0.1 * features.mean(0)
        result: torch.Tensor = self.head(torch.relu(features - self.mean))
        return result


def test_a_buffer_that_each_step_replaces_does_not_keep_its_graph() -> None:
    torch.manual_seed(0)
    model, inputs = Centring(), torch.randn(100, 6)
    online = shiftmend.stream(model, shiftmend.profile(model, inputs, progress=False), "fr")
    weights = [model.below.weight]
    for _ in range(3):
        online.step(2 * inputs)
        weights.append(online.snapshot().below.weight)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(weights))


def test_a_model_that_cuts_the_gradient_off_is_named() -> None:
    world, model = sensors(), Remembers()
    model.detached = True
    profile = shiftmend.profile(model, world.source)
    online = shiftmend.stream(model, profile, "fr", align=("logits",))
    with pytest.raises(AdaptationError, match=r"'all blocks'.*gradient"):
        online.step(world.target[:50])


def test_a_server_may_stream_in_inference_mode() -> None:
    world = sensors()
    profile = world.profile()
    plain = shiftmend.stream(world.model, profile, learning_rate=0.02)
    with torch.inference_mode():
        online = shiftmend.stream(world.model, profile, learning_rate=0.02)
        for batch in world.target.split(100):
            served = online.step(batch.clone())  # an inference tensor, as a server's own preprocessing makes them
        mended = online.snapshot()
    for batch in world.target.split(100):
        expected = plain.step(batch)
    assert torch.equal(served, expected)
    assert online.steps == 6
    mended(world.target[:10]).sum().backward()  # weights are ordinary ones, which may be trained further


@pytest.mark.slow
def test_threads_that_share_a_stream_wait_for_one_another() -> None:
    world = sensors()
    online = shiftmend.stream(world.model, world.profile(), learning_rate=0.001)

    def serve(size: int) -> int:
        answers = online.step(world.target[:size])
        assert online.verification is not None
        online.snapshot()
        return len(answers)

    sizes = list(range(2, 82))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(serve, sizes)) == sizes
    assert online.steps == 80


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.add_(1))


@pytest.mark.parametrize("name", ["adabn", "tent"])
def test_a_first_batch_is_predicted_as_it_came_also_by_a_model_that_works_in_place(name: str) -> None:
    world = sensors()
    first = shiftmend.stream(InPlace(world.model), method=name).step(world.target[:50])
    assert torch.equal(first, shiftmend.stream(world.model, method=name).step(world.target[:50] + 1))


def test_infinities_that_preprocess_makes_are_left_to_the_model() -> None:
    world = sensors()
    model = nn.Sequential(nn.Hardtanh(-3, 3), *world.model)
    online = shiftmend.stream(model, method="tent", preprocess=lambda x: x.clamp_min(0).log())
    finite = world.target[:50].clamp_min(0).log().clamp_min(-3)
    assert torch.equal(online.step(world.target[:50]), shiftmend.stream(model, method="tent").step(finite))
    assert online.losses


def test_a_stream_says_what_it_is_and_how_its_last_batches_were() -> None:
    world = sensors()
    online = shiftmend.stream(world.model, world.profile(), learning_rate=0.02, window=2)
    assert repr(online) == "Stream adapted by fr, 0 steps"
    for said in ("1 step\n  over the last 1 batch", "2 steps\n  over the last 2 batches"):
        online.step(world.target[:50])
        assert repr(online) == f"Stream adapted by fr, {said}: {online.verification}"
    online.step(world.target[:50])
    assert repr(online).startswith("Stream adapted by fr, 3 steps\n  over the last 2 batches: ")


@pytest.mark.parametrize(("name", "option"), [("fr", "epochs"), ("adabn", "passes")])
def test_options_without_effect_on_a_stream_are_refused(name: str, option: str) -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match=f"{option}.*stream.*Leave"):
        shiftmend.stream(world.model, world.profile(), name, **{option: 3})


# ---- classes that are not those of home


def in_order(world: World, labels: Tensor, order: str) -> list[Tensor]:
    """Batches of fifty home samples, mixed, sorted by class, or of one class."""
    if order == "mixed":
        return list(world.source.split(50))
    places = labels.argsort(stable=True)
    return list(world.source[places if order == "sorted" else places[:200]].split(50))


@pytest.mark.parametrize("order", ["sorted", "one class"])
def test_a_stream_with_other_classes_than_home_is_not_learnt_from(order: str, caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    online, careless = (shiftmend.stream(world.model, world.profile(), "adabn", guard=guard) for guard in (True, False))
    batches = in_order(world, world.labels, order)
    with torch.no_grad():
        expected = [world.model(batch) for batch in batches]
    for batch, untouched in zip(batches, expected, strict=True):
        torch.testing.assert_close(online.step(batch), untouched)
        careless.step(batch)
    assert online.paused == online.steps == len(batches)
    assert careless.paused == 0
    assert len(online.warnings) == 1
    assert caplog.text.count("other classes") == 1
    assert f"{len(batches)} of them not learnt from" in repr(online)
    snapshot = online.snapshot()
    assert all(torch.equal(a, b) for a, b in zip(state(snapshot), state(world.model), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(state(careless.snapshot()), state(world.model), strict=True))
    manifest = snapshot.shiftmend_adaptation["manifest"]  # type: ignore[index, union-attr]
    assert manifest["warnings"] == online.warnings
    assert (manifest["paused"], manifest["steps"]) == (len(batches), len(batches))
    assert online.harm == []


@pytest.mark.parametrize("name", ["fr", "adabn"])
def test_a_mixed_stream_is_learnt_from_as_without_the_guard(name: str) -> None:
    world = sensors()
    options = {"learning_rate": 0.02} if name == "fr" else {}
    streams = [shiftmend.stream(world.model, world.profile(), name, guard=guard, **options) for guard in (True, False)]
    for batch in world.target.split(50):
        one, other = (online.step(batch) for online in streams)
        assert torch.equal(one, other)
    assert streams[0].paused == 0
    assert streams[0].warnings == []
    models = [online.snapshot() for online in streams]
    assert all(torch.equal(a, b) for a, b in zip(*map(state, models), strict=True))


def test_what_was_learnt_from_one_class_behind_another_device_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    """The untouched model is uncertain there, so that only a change of classes can tell."""
    world = sensors()
    device = world.source / 8
    online = shiftmend.stream(world.model, world.profile(), "adabn")
    places = world.labels.argsort(stable=True)
    for batch in device[places[:200]].split(50):
        online.step(batch)
    assert online.paused == 0
    assert not torch.equal(online.snapshot()[1].running_mean, world.model[1].running_mean)
    online.step(device[places[200:250]])
    assert online.paused == 1
    assert "sorted by class" in caplog.text
    assert "taken back" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(state(online.snapshot()), state(world.model), strict=True))


def bumps() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that finds one of six bumps in a noisy signal [N, 1, 48], with a sample of home and its labels."""
    generator = torch.Generator().manual_seed(2)
    centres = torch.linspace(4, 44, 6).view(6, 1)
    shapes = (-0.5 * ((torch.arange(48) - centres) / 2).square()).exp()
    labels = torch.randint(6, (1200,), generator=generator)
    signals = shapes[labels] + 0.1 * torch.randn(1200, 48, generator=generator)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6))
    with torch.no_grad():
        model[1].weight.copy_(shapes)
        model[1].bias.zero_()
        model[2].momentum = None
        model(signals.unsqueeze(1))  # BatchNorm learns the statistics of home
        model[2].momentum = 0.1
        model[4].weight.copy_(4 * torch.eye(6))
        model[4].bias.zero_()
    return model.eval(), signals.unsqueeze(1), labels


def dim(signals: Tensor) -> Tensor:
    """A device of little contrast, behind which the untouched model is uncertain and mostly right."""
    return 0.35 * signals + 0.02


def answer(online: shiftmend.Stream, site: Tensor, labels: Tensor) -> float:
    right = [
        online.step(batch).argmax(1) == truth for batch, truth in zip(site.split(50), labels.split(50), strict=True)
    ]
    return float(torch.cat(right).double().mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fr", "adabn"])
def test_few_classes_behind_another_device_are_not_learnt_from(name: str) -> None:
    model, signals, labels = bumps()
    profile = shiftmend.profile(model, signals, progress=False)
    few = labels < 2
    site, truth = dim(signals[few]), labels[few]
    with torch.no_grad():
        untouched = float((model(site).argmax(1) == truth).double().mean())
    options = {"learning_rate": 0.01} if name == "fr" else {}
    careless = shiftmend.stream(model, profile, name, guard=False, **options)
    assert answer(careless, site, truth) < untouched - 0.2
    online = shiftmend.stream(model, profile, name, **options)
    assert answer(online, site, truth) > untouched - 0.05
    assert online.paused >= online.steps - 1
    assert len(online.warnings) == 1
    assert "behind another device" in online.warnings[0]


@pytest.mark.slow
def test_all_classes_behind_another_device_are_learnt_from() -> None:
    model, signals, _ = bumps()
    profile = shiftmend.profile(model, signals, progress=False)
    online, careless = (shiftmend.stream(model, profile, "adabn", guard=guard) for guard in (True, False))
    for batch in dim(signals).split(50):
        assert torch.equal(online.step(batch), careless.step(batch))
    assert online.paused == 0
    assert online.warnings == []


def test_a_stream_warns_once_where_the_device_or_other_classes_may_be_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, signals, _ = bumps()
    online = shiftmend.stream(model, shiftmend.profile(model, signals, progress=False), "adabn")
    monkeypatch.setattr(ClassWatch, "is_suspect", True)
    for batch in dim(signals)[:200].split(50):
        online.step(batch)
    assert online.paused == 0
    assert len(online.warnings) == 1
    assert "nobody can tell" in online.warnings[0]


def test_a_model_that_maps_its_inputs_is_asked_once() -> None:
    """Its inputs were matched when it was mended; to match them again would undo the first map."""
    model, signals, _ = bumps()
    profile = shiftmend.profile(model, signals, progress=False)
    mended = shiftmend.adapt(model, dim(signals), profile, "match-moments", progress=False).model
    online = shiftmend.stream(mended, profile, "adabn")
    online.step(dim(signals)[:50])
    assert online._matcher is None
    assert online.paused == 0


def test_a_stream_says_that_it_did_harm(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    online = shiftmend.stream(world.model, world.profile(), "fr", learning_rate=20.0)
    for batch in world.source.split(50):
        online.step(batch)
    assert "harm" not in caplog.text
    for _ in range(2):
        online.snapshot()
    assert caplog.text.count("may have done harm") == 1
    assert online.harm
    assert "may have done harm" in online.warnings[-1]


def test_a_guard_is_true_or_false() -> None:
    with pytest.raises(DataError, match="guard"):
        shiftmend.stream(sensors().model, method="adabn", guard="no")  # type: ignore[arg-type]


# ---- estimates


def go_through(site: Tensor, method: str, **options: object) -> shiftmend.Stream:
    online = shiftmend.stream(trained()[0], rehearsed(), method, **options)  # type: ignore[arg-type]
    for batch in site.split(50):
        online.step(batch)
    return online


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_a_stream_that_changes_nothing_tells_what_verify_tells_of_its_window(shift: float) -> None:
    model, _ = trained()
    site = draw(900, 41).inputs + shift
    online = go_through(site, "source-only", window=10)
    expected = shiftmend.verify(model, site[-500:], rehearsed(), progress=False).estimate
    assert online.estimate is not None
    assert expected is not None
    assert online.estimate.before == online.estimate.after
    told = online.estimate.after
    assert told is not None
    assert told.reliable == expected.reliable == (shift == 0)
    ends = (one.withheld or (one.value, one.low, one.high) for one in (told, expected))
    assert next(ends) == pytest.approx(next(ends), rel=1e-4)
    assert online.manifest["estimate"]["after"]["reliable"] == told.reliable


@pytest.mark.slow
def test_a_method_on_a_stream_has_no_map_and_is_bounded_by_the_answers_it_changed() -> None:
    """adabn was rehearsed, but over whole targets."""
    model, _ = trained()
    site = draw(500, 42)
    online = go_through(site.inputs, "adabn")
    assert online.estimate is not None
    before, after = online.estimate.before, online.estimate.after
    assert before is not None
    assert after is not None
    assert before.low is not None
    assert after.reliable
    assert after.low is not None
    assert after.high is not None
    assert after.low < before.low
    assert after.low <= site.accuracy(model) <= after.high
    shifted = go_through(site.inputs + torch.linspace(1, -2, 8), "adabn").estimate
    assert shifted is not None
    assert shifted.after is not None
    assert not shifted.after.reliable
    assert any("adabn on a stream was not rehearsed" in reason for reason in shifted.after.reasons)


@pytest.mark.slow
def test_an_estimate_does_not_hold_for_few_samples_other_classes_or_other_weights() -> None:
    few = go_through(draw(60, 43).inputs + 1.5, "source-only").estimate
    skewed = go_through(draw(500, 43, (1.0, 0.0, 0.0, 0.0)).inputs, "adabn").estimate
    online = go_through(draw(500, 43).inputs, "adabn")
    snapshot = online.snapshot()
    again = shiftmend.stream(snapshot, rehearsed(), "source-only")
    for batch in draw(500, 44).inputs.split(50):
        again.step(batch)
    for found, words in ((few, "too few"), (skewed, "other classes"), (again.estimate, "weights")):
        assert found is not None
        assert found.before is not None
        assert found.before.value is None
        assert any(words in reason for reason in found.before.reasons)
    for model in (snapshot, again.snapshot()):
        told = shiftmend.verify(model, draw(500, 45).inputs, rehearsed(), progress=False).estimate
        assert told is not None
        assert not told.reliable
        assert "on a stream was not rehearsed" in str(told)


def test_without_a_rehearsal_there_is_no_estimate() -> None:
    world = sensors()
    online = shiftmend.stream(world.model, world.profile(), "source-only")
    online.step(world.target[:50])
    assert online.estimate is None
    assert online.manifest["estimate"] is None
