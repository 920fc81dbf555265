"""The five-layer network against the paper's sizes, its initialisation, and a forward pass in numpy."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from shiftmend.research.networks.digit_cnn import DigitCNN


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def convolve(images: np.ndarray, weight: np.ndarray, bias: np.ndarray, padding: int) -> np.ndarray:
    """Stride 2, written out from the definition."""
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], axis=(2, 3))[:, :, ::2, ::2]
    return np.einsum("ncyxij,ocij->noyx", windows, weight) + bias[:, None, None]


def normalise(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Batch normalisation in evaluation mode."""
    shape = (-1,) + (1,) * (x.ndim - 2)
    mean, variance, scale, shift = (
        weights[f"{name}.{part}"].reshape(shape) for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / np.sqrt(variance + 1e-5) * scale + shift


@pytest.mark.parametrize(("classes", "expected"), [(10, 1_195_658), (47, 1_200_431)])
def test_has_the_papers_number_of_parameters(classes: int, expected: int) -> None:
    with torch.device("meta"):
        assert parameter_count(DigitCNN(classes)) == expected


def test_width_scales_every_layer() -> None:
    model = DigitCNN(classes=5, channels=1, width=4)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["conv1.weight"] == (4, 1, 5, 5)
    assert shapes["conv2.weight"] == (8, 4, 3, 3)
    assert shapes["conv3.weight"] == (16, 8, 3, 3)
    assert shapes["linear.weight"] == (8, 16 * 5 * 5)
    assert shapes["head.weight"] == (5, 8)


@pytest.mark.parametrize("image_size", [1, 2, 7, 16, 27, 28, 32, 33, 64])
def test_fits_every_image_size(image_size: int) -> None:
    model = DigitCNN(classes=3, channels=1, width=2, image_size=image_size).eval()
    assert model(torch.zeros(2, 1, image_size, image_size)).shape == (2, 3)


def test_forward_equals_numpy() -> None:
    torch.manual_seed(0)
    model = DigitCNN(classes=7, width=4).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.normal_(module.bias)
    images = torch.randn(3, 3, 28, 28, dtype=torch.float64)

    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    x = images.numpy()
    for index in (1, 2, 3):
        x = convolve(x, weights[f"conv{index}.weight"], weights[f"conv{index}.bias"], padding=2)
        x = np.maximum(normalise(x, weights, f"bn{index}"), 0)
    features = x.reshape(len(x), -1) @ weights["linear.weight"].T + weights["linear.bias"]
    hidden = np.maximum(normalise(features, weights, "bn4"), 0)
    logits = hidden @ weights["head.weight"].T + weights["head.bias"]

    seen: dict[str, Tensor] = {}
    model.linear.register_forward_hook(lambda module, inputs, output: seen.update(features=output))
    with torch.no_grad():
        np.testing.assert_allclose(model(images).numpy(), logits, rtol=1e-9, atol=1e-9)
    # Also after the rest of the forward pass: nothing overwrote them in place.
    np.testing.assert_allclose(seen["features"].numpy(), features, rtol=1e-9, atol=1e-9)


def test_initialisation_is_the_reference_implementations() -> None:
    torch.manual_seed(0)
    model = DigitCNN()
    for layer in (model.conv1, model.conv2, model.conv3, model.linear, model.head):
        receptive = layer.weight[0, 0].numel()
        fans = (layer.weight.shape[0] + layer.weight.shape[1]) * receptive
        bound = math.sqrt(6 / fans)
        assert layer.weight.abs().max() <= bound
        assert layer.weight.abs().max() > 0.98 * bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.04)
        torch.testing.assert_close(
            layer.bias, torch.full_like(layer.bias, 0.0 if isinstance(layer, nn.Conv2d) else 0.01)
        )
    for norm in (model.bn1, model.bn2, model.bn3):
        assert 0 <= norm.weight.min() < 0.1
        assert 0.9 < norm.weight.max() <= 1
        assert norm.weight.mean().item() == pytest.approx(0.5, abs=0.12)
        assert not norm.bias.any()
    assert (model.bn4.weight == 1).all()
    assert not model.bn4.bias.any()
    assert all(norm.eps == 1e-5 and norm.momentum == 0.1 for norm in (model.bn1, model.bn4))


def test_same_seed_gives_the_same_network() -> None:
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(DigitCNN(width=4).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["conv1.weight"], states[2]["conv1.weight"])


def test_dropout_rates_and_kinds() -> None:
    model = DigitCNN(width=2)
    assert [type(getattr(model, f"dropout{i}")) for i in (1, 2, 3, 4)] == [nn.Dropout2d] * 3 + [nn.Dropout]
    assert [getattr(model, f"dropout{i}").p for i in (1, 2, 3, 4)] == [0.1, 0.3, 0.5, 0.5]


def test_taps_and_blocks_name_existing_modules() -> None:
    model = DigitCNN(classes=47)
    seen: dict[str, Tensor] = {}
    for tap, name in model.shiftmend_taps.items():
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, tap=tap: seen.update({tap: output})
        )
    output = model.eval()(torch.zeros(2, 3, 28, 28))
    assert seen["features"].shape == (2, 128)
    assert seen["logits"] is output
    in_blocks = [name for block in model.shiftmend_blocks for name in block]
    outside = {name.split(".")[0] for name, _ in model.named_parameters()} - set(in_blocks)
    assert len(in_blocks) == len(set(in_blocks)) == 7
    assert outside == {"bn4", "head"}


def test_every_parameter_learns() -> None:
    torch.manual_seed(0)
    model = DigitCNN(width=4)
    loss = nn.functional.cross_entropy(model(torch.randn(32, 3, 28, 28)), torch.arange(32) % 10)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert model.conv1.weight.grad.any()


def weight_normed(seed: int = 0, **options: int) -> DigitCNN:
    torch.manual_seed(seed)
    return DigitCNN(classes=5, width=4, weight_norm=True, **options)


def test_weight_norm_keeps_pytorchs_initialisation_of_the_head() -> None:
    torch.manual_seed(3)
    model = DigitCNN(classes=200, weight_norm=True)
    weight = model.head.weight
    # nn.Linear draws from +-1/sqrt(inputs); Xavier's bound is sqrt(6 / (inputs + outputs)), here larger
    bound = 1 / math.sqrt(128)
    assert 0.99 * bound < weight.abs().max() <= bound * (1 + 1e-5) < 0.9 * math.sqrt(6 / 328)
    assert (model.head.bias == 0.01).all()
    parts = model.head.parametrizations.weight
    magnitude, rows = parts.original0, parts.original1
    torch.testing.assert_close(magnitude.flatten(), rows.norm(dim=1))
    assert magnitude.shape == (200, 1)
    assert model.linear.weight.abs().max() > 1.5 / math.sqrt(6400)  # everything else is as without


def test_weight_norm_computes_length_times_direction() -> None:
    model = weight_normed().double().eval()
    parts = model.head.parametrizations.weight
    with torch.no_grad():
        parts.original0.copy_(torch.arange(1.0, 6.0).view(5, 1))
        parts.original1.normal_()
    hidden = torch.randn(3, 8, dtype=torch.float64)
    rows = parts.original1.detach().numpy()
    weight = np.arange(1.0, 6.0)[:, None] * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    expected = hidden.numpy() @ weight.T + model.head.bias.detach().numpy()
    with torch.no_grad():
        np.testing.assert_allclose(model.head(hidden).numpy(), expected, rtol=1e-12)


def test_weight_norm_survives_copying_saving_and_training(tmp_path: Path) -> None:
    model = weight_normed()
    images = torch.randn(16, 3, 28, 28)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nn.functional.cross_entropy(model(images), torch.arange(16) % 5).backward()
    optimiser.step()
    parts = ("head.parametrizations.weight.original0", "head.parametrizations.weight.original1")
    assert all(not torch.equal(model.state_dict()[name], before[name]) for name in parts)

    model.eval()
    copied = copy.deepcopy(model)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    loaded = weight_normed(seed=1).eval()
    loaded.load_state_dict(safetensors.torch.load_file(path))
    with torch.no_grad():
        expected = model(images)
        assert torch.equal(copied(images), expected)
        assert torch.equal(loaded(images), expected)
        nn.init.zeros_(copied.head.bias)
        assert torch.equal(model(images), expected)


def test_embedding_is_the_normalised_features() -> None:
    model = weight_normed().eval()
    seen: dict[str, Tensor] = {}
    model.get_submodule(model.shiftmend_embedding).register_forward_hook(
        lambda module, inputs, output: seen.update(inputs=inputs[0], output=output)
    )
    model.linear.register_forward_hook(lambda module, inputs, output: seen.update(features=output))
    model(torch.randn(4, 3, 28, 28))
    assert seen["inputs"] is seen["features"]
    assert seen["output"].shape == (4, 8)
