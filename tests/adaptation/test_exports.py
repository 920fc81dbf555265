"""Mended models out of Python: `torch.export`, ONNX, TorchScript, and BatchNorm folded into convolutions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

import shiftmend

METHODS = ["adabn", "bufr", "match-moments", "match-histogram", "neo", "coral"]
"""Methods that leave a plain model, one with mapped inputs, and one with mapped features."""

SAMPLES = torch.export.Dim("samples", min=2)


@functools.cache
def home() -> tuple[nn.Module, shiftmend.Profile, Tensor]:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    images = torch.rand(80, 1, 8, 8)
    return model, shiftmend.profile(model, images, gaussian="full", progress=False), images


@functools.cache
def mended(method: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a mended model, inputs of the new device, and what the model returns for them."""
    model, profile, images = home()
    target = images * 0.5 + 0.3
    options = {"epochs_per_block": 1} if method == "bufr" else {}
    result = shiftmend.adapt(model, target, profile, method=method, progress=False, **options)
    with torch.no_grad():
        outputs = result.model(target)
        assert not torch.allclose(outputs, model(target), atol=1e-3)
    return result.model, target, outputs


def trace(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    traced: Callable[[Tensor], Tensor] = torch.jit.trace(model, (inputs[:4],))
    return traced


def export(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.export.export(model, (inputs[:4],), dynamic_shapes=({0: SAMPLES},)).module()


def fold(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    # `fuse` looks at the layers inside of a model, and would lose a map of the inputs of the model itself.
    folded: nn.Module = fuse(nn.Sequential(model))
    convolutions = [module for module in folded.modules() if isinstance(module, nn.BatchNorm2d)]
    assert not convolutions
    return folded


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [trace, export, fold])
@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_equal_for_any_number_of_samples(
    method: str, way: Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]
) -> None:
    model, inputs, expected = mended(method)
    out = way(model, inputs)
    with torch.no_grad():
        assert torch.allclose(out(inputs), expected, atol=1e-5)
        assert torch.allclose(out(inputs[:5]), expected[:5], atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["adabn", "bufr"])
def test_plain_models_are_scripted_and_saved(method: str, tmp_path: Path) -> None:
    model, inputs, expected = mended(method)
    torch.jit.script(model).save(str(tmp_path / "mended.pt"))
    with torch.no_grad():
        assert torch.allclose(torch.jit.load(str(tmp_path / "mended.pt"))(inputs), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["bufr", "match-histogram"])
def test_onnx_runtime_gives_the_same(method: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, inputs, expected = mended(method)
    path = str(tmp_path / "mended.onnx")
    torch.onnx.export(model, (inputs[:4],), path, dynamo=True, dynamic_shapes=({0: SAMPLES},), verbose=False)
    session = runtime.InferenceSession(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    assert torch.allclose(torch.from_numpy(found), expected, atol=1e-4)
