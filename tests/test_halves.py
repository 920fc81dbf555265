"""All weights cast at once: the same numbers as autocast's, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shiftmend import halves
from shiftmend.halves import bfloat16, in_bfloat16
from shiftmend.models import build

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
    context = in_bfloat16(model, images.device) if ours else torch.autocast(images.device.type, torch.bfloat16)
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


def test_weights_are_where_they_were_also_after_an_error() -> None:
    model = Mixed()
    before = {name: id(weight) for name, weight in model.named_parameters()}
    names = list(model.state_dict())
    with in_bfloat16(model, CPU):
        assert model.first.weight.dtype == torch.bfloat16
        assert model.again.weight is model.shared.weight
        assert model.tied.weight.dtype == torch.float32  # an embedding reads it, too
    with pytest.raises(RuntimeError), in_bfloat16(model, CPU):
        model(torch.zeros(1, 1, 1, 1))
    assert {name: id(weight) for name, weight in model.named_parameters()} == before
    assert all(isinstance(weight, nn.Parameter) for weight in model.parameters())
    assert list(model.state_dict()) == names


def test_a_layer_without_gradient_gets_none() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with in_bfloat16(model, CPU):
        model[0](torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None


def test_a_model_without_such_layers_and_one_in_half_precision_are_left_to_autocast() -> None:
    for model in (nn.BatchNorm1d(3), nn.Linear(3, 3).bfloat16()):
        before = list(model.parameters())
        with in_bfloat16(model, CPU):
            assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert halves._places(nn.Linear(3, 3).double()) == {}


def test_what_a_step_changes_is_seen_by_the_next() -> None:
    model, inputs = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    for value in (1.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        with in_bfloat16(model, CPU):
            assert model(inputs).item() == 2 * value


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
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.body(inputs)
        match self.what:
            case "nothing":
                return self.head(features)  # type: ignore[no-any-return]
            case "full precision":
                with torch.autocast(inputs.device.type, enabled=False):
                    return self.head(features.float())  # type: ignore[no-any-return]
            case "cosine":
                return functional.linear(features, functional.normalize(self.head.weight))
            case "written":
                with torch.no_grad():
                    self.head.weight.clamp_(-1e3, 1e3)
                return self.head(features)  # type: ignore[no-any-return]
            case "replaced":
                self.head.weight = nn.Parameter(self.head.weight.detach().clone())
                return self.head(features)  # type: ignore[no-any-return]
        buffer = torch.zeros(3, 6)
        buffer[torch.arange(3)] = self.head.weight
        return functional.linear(features, buffer)


@pytest.mark.parametrize(
    ("what", "ours"),
    [
        ("nothing", True),
        ("full precision", False),
        ("cosine", False),
        ("written", False),
        ("replaced", False),
        ("copied", False),
    ],
)
def test_models_that_do_more_with_their_weights_are_left_to_autocast(what: str, ours: bool) -> None:
    torch.manual_seed(0)
    model, sample = Odd(what).train(), torch.randn(8, 4)
    precision = bfloat16(model, sample)
    assert model.training
    with precision():
        assert (model.body.weight.dtype == torch.bfloat16) == ours
        out = model(sample)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(out, model(sample))


def test_a_model_that_does_not_run_in_bfloat16_at_all_says_why() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        bfloat16(nn.Linear(3, 3), torch.zeros(2, 5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "side"), [("digit-cnn", 28), ("resnet18-cifar", 32)])
def test_on_a_gpu_the_papers_networks_have_their_weights_cast_at_once(name: str, side: int) -> None:
    model = build(name, classes=7).cuda().to(memory_format=torch.channels_last)
    with bfloat16(model, torch.randn(2, 3, side, side, device="cuda"))():
        assert model.conv1.weight.dtype == torch.bfloat16
