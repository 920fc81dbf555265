"""All weights cast at once: the same numbers as autocast's, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from worlds import sensors

import shiftmend
from shiftmend.accelerate import precision as halves
from shiftmend.accelerate.precision import cast_at_once
from shiftmend.research.networks import build

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Plain layers, shared, tied and normed weights, a subclass, and a weight of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.scaled = Scaled(6, 6, 1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.words = nn.Embedding(5, 8)
        self.tied = nn.Linear(8, 5, bias=False)
        self.tied.weight = self.words.weight
        self.shared = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.shared.weight
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.scaled(functional.relu(self.norm(self.first(images))))
        vector = self.normed(maps.mean((2, 3)))
        result: Tensor = self.gain * self.again(self.shared(self.tied(vector + self.words.weight[0])))
        return result


class Scaled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        assert self.weight.dtype == torch.float32
        return functional.conv2d(input, self.weight / self.weight.norm(), self.bias)


def gradients(model: nn.Module, images: Tensor, *, ours: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    context = (
        cast_at_once(model, images.device, torch.bfloat16)
        if ours
        else torch.autocast(images.device.type, torch.bfloat16)
    )
    with context:
        out = model(images)
    out.float().square().sum().backward()
    return out.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("frozen", [(), ("first.weight", "again.bias"), ("everything",)])
def test_outputs_and_gradients_are_those_of_autocast(frozen: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, images = Mixed(), torch.randn(4, 3, 8, 8)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen and (frozen != ("everything",) or name == "gain"))
    expected, theirs = gradients(model, images, ours=False)
    got, own = gradients(model, images, ours=True)
    assert torch.equal(got, expected)
    assert got.dtype == expected.dtype
    for name, gradient in own.items():
        other = theirs[name]
        assert (gradient is None) == (other is None)
        if gradient is not None and other is not None:
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digit-cnn", "resnet18-cifar"])
def test_the_papers_networks(name: str) -> None:
    torch.manual_seed(0)
    side = 32 if "cifar" in name else 28
    model, images = build(name, classes=7).eval(), torch.randn(3, 3, side, side)
    expected, theirs = gradients(model, images, ours=False)
    got, own = gradients(model, images, ours=True)
    assert torch.equal(got, expected)
    for key, gradient in own.items():
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-6, atol=1e-7)


def test_weights_are_seen_as_they_are() -> None:
    model = Mixed()
    before = {name: id(weight) for name, weight in model.named_parameters()}
    with cast_at_once(model, CPU, torch.bfloat16):
        assert {name: id(weight) for name, weight in model.named_parameters()} == before
        assert all(weight.dtype == torch.float32 for weight in model.parameters())


def test_a_layer_without_gradient_gets_none() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with cast_at_once(model, CPU, torch.bfloat16):
        model[0](torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None


def test_a_model_without_such_layers_and_those_of_other_precisions_are_left_to_autocast() -> None:
    for model in (nn.BatchNorm1d(3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).double()):
        assert halves._cast_weights(model, torch.bfloat16) == {}


def test_what_a_step_changes_is_seen_by_the_next() -> None:
    model, inputs = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    for value in (1.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        with cast_at_once(model, CPU, torch.bfloat16):
            assert model(inputs).item() == 2 * value


@pytest.mark.slow
@pytest.mark.parametrize("way", ["adapt", "adapt in bfloat16", "stream"])
def test_weights_that_the_callers_autocast_would_keep_are_cast_anew(way: str) -> None:
    """It keeps what it has cast until its block ends: all steps would run with the weights of the first."""
    world = sensors()

    def weights() -> list[Tensor]:
        options: dict[str, Any] = {"learning_rate": 0.05}
        if way == "stream":
            online = shiftmend.stream(world.model, world.profile(), "fr", **options)
            seen = [online.step(batch) for batch in world.target.split(100)]
            return [*seen, *online.snapshot().state_dict().values()]
        half = way == "adapt in bfloat16"
        result = shiftmend.adapt(
            world.model, world.target, world.profile(), "fr", epochs=3, autocast=half, progress=False, **options
        )
        assert result.after is not None
        return [torch.tensor(result.after.divergence), *result.model.state_dict().values()]

    found = []
    for cache in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            found.append(weights())
            assert torch.is_autocast_cache_enabled() == cache
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_kernel_casts_all_weights_and_another_their_gradients() -> None:
    from torch.profiler import ProfilerActivity, profile

    model = build("digit-cnn", classes=47).cuda().to(memory_format=torch.channels_last)
    images = torch.randn(8, 3, 28, 28, device="cuda").contiguous(memory_format=torch.channels_last)
    kernels = {}
    for ours in (True, False, True, False):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            gradients(model, images, ours=ours)
            torch.cuda.synchronize()
        kernels[ours] = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())
    assert kernels[True] <= kernels[False] - 10


class Odd(nn.Module):
    """A network whose forward pass does something of its own with the weights of its last layer."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.norm(self.body(inputs))
        weight = self.head.weight
        match self.what:
            case "full precision":
                with torch.autocast(inputs.device.type, enabled=False):
                    return self.head(features.float())  # type: ignore[no-any-return]
            case "cosine":
                return functional.linear(features, functional.normalize(weight))
            case "clipped":
                with torch.no_grad():
                    weight.clamp_(-0.1, 0.1)
            case "clipped data":
                weight.data.clamp_(-0.1, 0.1)
            case "clipped in training" if self.training:
                with torch.no_grad():
                    weight.clamp_(-0.1, 0.1)
            case "product":
                return features @ weight.t() + features.sum(1, keepdim=True)
            case "copied":
                buffer = torch.zeros(3, 6)
                buffer[torch.arange(3)] = weight
                return functional.linear(features, buffer)
            case "by name":
                return functional.linear(input=features, weight=weight, bias=None)
        return self.head(features)  # type: ignore[no-any-return]


ODD = (
    "nothing", "full precision", "cosine", "clipped", "clipped in training", "product", "copied",
    "by name",
)  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_whatever_else_a_model_does_with_its_weights_is_as_with_autocast(what: str) -> None:
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model, sample = Odd(what).train(), torch.randn(8, 4)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        outputs = []
        for _ in range(3):
            with (
                cast_at_once(model, CPU, torch.bfloat16)
                if ours
                else torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
            ):
                out = model(sample)
            optimiser.zero_grad()
            out.float().square().sum().backward()
            optimiser.step()
            outputs.append(out.detach())
        results.append((outputs, model.state_dict()))
    (ours_out, ours_state), (their_out, their_state) = results
    assert all(torch.equal(one, other) for one, other in zip(ours_out, their_out, strict=True))
    assert all(torch.equal(value, their_state[name]) for name, value in ours_state.items())


def test_what_is_written_behind_the_back_of_autograd_is_not_lost() -> None:
    """Though the copy of this step does not know of it."""
    model = Odd("clipped data")
    with torch.no_grad():
        model.head.weight.fill_(3.0)
    with cast_at_once(model, CPU, torch.bfloat16):
        model(torch.randn(8, 4))
    assert float(model.head.weight.detach().abs().max()) < 0.11


def test_adapting_in_bfloat16_gives_what_autocast_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, inputs = Odd("full precision"), torch.randn(200, 4)
    profile = shiftmend.profile(model, inputs, progress=False)
    found = []
    for ours in (True, False):
        if not ours:
            monkeypatch.setattr(halves, "_cast_weights", lambda model, dtype: {})
        result = shiftmend.adapt(
            model, inputs * 1.5, profile, "fr", epochs=3, learning_rate=0.1, autocast=True, progress=False
        )
        found.append(result.model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])


def test_a_method_that_trains_nothing_asks_nothing_of_the_model() -> None:
    result = shiftmend.adapt(Odd("copied"), torch.randn(20, 4), method="source-only", autocast=True, progress=False)
    assert result.manifest["status"] == "finished"


@pytest.mark.slow
def test_a_compiled_model_is_left_to_the_compiler() -> None:
    torch.manual_seed(0)
    model, sample = Odd("nothing"), torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(sample)
    model.compile(backend="aot_eager")
    with cast_at_once(model, CPU, torch.bfloat16):
        torch.testing.assert_close(model(sample), expected)
