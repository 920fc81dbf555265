"""Adapting with channels innermost changes nothing but the time it takes, whatever the model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shiftmend
from shiftmend.accelerate import memory_format as layouts
from shiftmend.accelerate.memory_format import as_in, channels_last
from shiftmend.adaptation import run as engine
from shiftmend.errors import DivergedError
from shiftmend.utils.devices import preferred_memory_format

INNERMOST = (27, 1, 9, 3)  # strides of a weight [8, 3, 3, 3] with its channels innermost


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 8 * 8, 4)

    def maps(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.maps(x).flatten(1))


class Viewing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        return self.head(maps.view(len(maps), -1))


class Asserting(Plain):
    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        assert maps.is_contiguous()
        return self.head(maps.flatten(1))


class Striding(Plain):
    """Reads memory directly: nothing is raised, something else is computed."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        size = maps[0].numel()
        return self.head(maps.as_strided((len(maps), size), (size, 1)))


class Ghost(nn.BatchNorm2d):
    """Normalises halves of a batch, by a view, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        samples, channels, height, width = x.shape
        halves = x.view(samples // 2, 2 * channels, height, width)
        buffers = self.running_mean.repeat(2), self.running_var.repeat(2), self.weight.repeat(2), self.bias.repeat(2)
        return functional.batch_norm(halves, *buffers, True, 0.1, self.eps).view_as(x)


class Ghostly(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = Ghost(8)


class Lazy(Plain):
    """A buffer that is there from the first call on."""

    grid: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        if self.grid is None:
            self.grid = torch.ones(maps.shape[-2:])
        return self.head((maps * self.grid).flatten(1))


class Volume(Plain):
    """A tensor of five axes, which has no channels-last layout of four."""

    def __init__(self) -> None:
        super().__init__()
        self.conv3 = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv3(self.maps(x).unsqueeze(1)).flatten(1))


class Mask(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class SharedBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.rand(1, 8, 8, 8)
        self.first, self.second = Mask(mask), Mask(mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.maps(x))).flatten(1))


class Expanded(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 8, 1, 1).expand(1, 8, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.maps(x) * self.mask).flatten(1))


class Parametrised(Plain):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.conv1)
        nn.utils.parametrizations.orthogonal(self.conv2)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
        self.conv3.weight = self.conv2.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv3(self.maps(x))).flatten(1))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().eval()


def images() -> Tensor:
    return torch.rand(32, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def adapted(model: nn.Module, **options: Any) -> shiftmend.Adaptation:
    profile = shiftmend.profile(copy.deepcopy(model), images(), progress=False)
    options = {"epochs_per_block": 1, "learning_rate": 1e-4} | options
    return shiftmend.adapt(model, 0.7 * images() + 0.1, profile, "bufr", batch_size=16, progress=False, **options)


TAKEN = (Plain, Lazy, Volume, SharedBuffer, Expanded, Tied)
LEFT = (Viewing, Asserting, Striding, Ghostly)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TAKEN, *LEFT, Parametrised])
def test_the_result_does_not_depend_on_the_layout(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(kind)
    fast = adapted(model)
    monkeypatch.setattr(engine, "channels_last", lambda *_: False)
    plain = adapted(model)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(fast.model.state_dict()[name], value, rtol=1e-6, atol=1e-8)
    assert len(fast.history) == len(plain.history) > 1
    for one, other in zip(fast.history[1:], plain.history[1:], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TAKEN)
def test_convolutions_are_adapted_channels_last_and_come_back_as_they_were(kind: type[nn.Module]) -> None:
    model, strides = made(kind), set()
    result = adapted(model, on_epoch=lambda one, row: strides.add(one.conv1.weight.stride()))
    assert strides == {INNERMOST}
    for one in (model, result.model):
        assert all(parameter.is_contiguous() for parameter in one.parameters())
        assert one.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", LEFT)
def test_models_that_rely_on_memory_are_left_alone(kind: type[nn.Module]) -> None:
    model = made(kind)
    assert not channels_last(model, images()[:2])
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_trying_leaves_no_trace() -> None:
    model = made(Plain)
    before = copy.deepcopy(model.state_dict())
    assert channels_last(model, images()[:2])
    assert model.conv1.weight.stride() == INNERMOST
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    as_in(model, made(Plain))
    assert model.conv1.weight.is_contiguous()
    assert torch.equal(model.conv1.weight, before["conv1.weight"])


def test_tied_weights_stay_tied() -> None:
    result = adapted(made(Tied))
    assert result.model.conv3.weight is result.model.conv2.weight


def test_a_diverged_run_keeps_its_error_and_its_state() -> None:
    with pytest.raises(DivergedError) as caught:
        adapted(made(Lazy), learning_rate=1e300, epochs_per_block=3)
    assert caught.value.adaptation.model is not None


def test_weights_stay_as_they_are_where_gradients_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preferred_memory_format(torch.device("mps")) == torch.contiguous_format
    monkeypatch.setattr(layouts, "preferred_memory_format", lambda device: torch.contiguous_format)
    model = Plain()
    assert not channels_last(model, torch.randn(2, 3, 8, 8))
    assert model.conv1.weight.is_contiguous()


def test_there_is_nothing_to_lay_out_without_convolutions() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert not channels_last(model, torch.rand(2, 4))
    assert not channels_last(made(Parametrised), images()[:2])


def test_compiling_without_a_gpu_says_that_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        adapted(made(Plain), device="cpu", compile=True)
    assert "compile has no effect: only captured steps are compiled" in caplog.text


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]


@pytest.mark.parametrize("device", PLACES)
def test_where_nothing_is_trained_nothing_is_compiled(device: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = shiftmend.adapt(made(Plain), images(), method="adabn", device=device, compile=True, progress=False)
    assert "compile" not in result.manifest
    assert "compile" not in caplog.text
