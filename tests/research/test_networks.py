"""The paper's networks against its sizes, torchvision's parameter table, and forward passes written out here."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiftmend.errors import DataError
from shiftmend.research.networks import MODELS, DigitCNN, ResNet, build, resnet18, resnet18_cifar, resnet50, resnet101


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_builds_every_known_model(name: str) -> None:
    with torch.device("meta"):
        model = build(name, classes=4)
        size = 28 if name == "digit-cnn" else 64
        assert model(torch.empty(2, 3, size, size)).shape == (2, 4)


def test_known_models() -> None:
    assert set(MODELS) == {"digit-cnn", "resnet18-cifar", "resnet18", "resnet50", "resnet101"}


def test_passes_options_on() -> None:
    model = build("digit-cnn", classes=3, channels=1, width=2, image_size=16)
    assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 3)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"digit-cnn.*resnet101.*'vgg'"):
        build("vgg")


def test_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"digit-cnn.*weight_norm.*'depth'"):
        build("digit-cnn", depth=3)


def test_missing_option_is_named() -> None:
    with pytest.raises(DataError, match=r"resnet101.*missing.*'classes'"):
        build("resnet101")


@pytest.mark.parametrize("value", [0, -3, 2.0, "10", True, None])
def test_option_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(DataError, match=r"classes.*resnet18.*whole number"):
        build("resnet18", classes=value)


def test_a_network_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(classes: int, slope: float = 0.1, **more: object) -> nn.Module:
        return nn.Sequential(nn.LeakyReLU(slope), nn.Linear(4, classes, **more))  # type: ignore[arg-type]

    monkeypatch.setitem(MODELS, "own", own)
    model = build("own", classes=3, slope=0.2, bias=False)
    assert model[0].negative_slope == 0.2  # type: ignore[index]
    assert model[1].bias is None  # type: ignore[index]
    with pytest.raises(DataError, match=r"classes.*own.*whole number"):
        build("own", classes=0.5)


def test_switches_are_true_or_false() -> None:
    plain, normed = (build("digit-cnn", width=2, weight_norm=value) for value in (False, True))
    assert "head.weight" in plain.state_dict()
    assert "head.parametrizations.weight.original0" in normed.state_dict()
    for value in (1, 0, "true", None):
        with pytest.raises(DataError, match=r"weight_norm.*true or false"):
            build("digit-cnn", weight_norm=value)


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


def torchvision_table(depths: tuple[int, ...], bottleneck: bool, classes: int, stem: int = 7) -> dict[str, tuple]:
    """Names and shapes of torchvision's state dict, from its naming rules and not from our modules."""
    table: dict[str, tuple] = {}

    def norm(name: str, channels: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            table[f"{name}.{part}"] = (channels,)
        table[f"{name}.num_batches_tracked"] = ()

    table["conv1.weight"] = (64, 3, stem, stem)
    norm("bn1", 64)
    entering = 64
    for stage, depth in enumerate(depths, start=1):
        width = 2 ** (5 + stage)
        leaving = 4 * width if bottleneck else width
        for index in range(depth):
            prefix = f"layer{stage}.{index}"
            if bottleneck:
                kernels = [(width, entering, 1, 1), (width, width, 3, 3), (leaving, width, 1, 1)]
            else:
                kernels = [(width, entering, 3, 3), (width, width, 3, 3)]
            for number, kernel in enumerate(kernels, start=1):
                table[f"{prefix}.conv{number}.weight"] = kernel
                norm(f"{prefix}.bn{number}", kernel[0])
            if index == 0 and (stage > 1 or bottleneck):
                table[f"{prefix}.downsample.0.weight"] = (leaving, entering, 1, 1)
                norm(f"{prefix}.downsample.1", leaving)
            entering = leaving
    table["fc.weight"] = (classes, entering)
    table["fc.bias"] = (classes,)
    return table


def reference_features(state: dict[str, Tensor], images: Tensor, depths: tuple[int, ...], cifar: bool) -> Tensor:
    """The forward pass in evaluation mode, from a state dict alone."""

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance, scale, shift = (
            state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, variance, scale, shift)

    x = F.conv2d(images, state["conv1.weight"], stride=1 if cifar else 2, padding=1 if cifar else 3)
    x = norm(x, "bn1").clamp(min=0)
    if not cifar:
        x = F.max_pool2d(x, 3, 2, 1)
    for stage, depth in enumerate(depths, start=1):
        for index in range(depth):
            prefix = f"layer{stage}.{index}"
            stride = 2 if stage > 1 and index == 0 else 1
            if f"{prefix}.conv3.weight" in state:
                y = norm(F.conv2d(x, state[f"{prefix}.conv1.weight"]), f"{prefix}.bn1").clamp(min=0)
                y = F.conv2d(y, state[f"{prefix}.conv2.weight"], stride=stride, padding=1)
                y = norm(y, f"{prefix}.bn2").clamp(min=0)
                y = norm(F.conv2d(y, state[f"{prefix}.conv3.weight"]), f"{prefix}.bn3")
            else:
                y = F.conv2d(x, state[f"{prefix}.conv1.weight"], stride=stride, padding=1)
                y = norm(y, f"{prefix}.bn1").clamp(min=0)
                y = norm(F.conv2d(y, state[f"{prefix}.conv2.weight"], padding=1), f"{prefix}.bn2")
            if f"{prefix}.downsample.0.weight" in state:
                x = norm(
                    F.conv2d(x, state[f"{prefix}.downsample.0.weight"], stride=stride),
                    f"{prefix}.downsample.1",
                )
            x = (x + y).clamp(min=0)
    return F.avg_pool2d(x, x.shape[-1]).flatten(1)


@pytest.mark.parametrize(
    ("factory", "depths", "bottleneck", "stem", "classes", "entries", "parameters"),
    [
        (resnet18, (2, 2, 2, 2), False, 7, 1000, 122, 11_689_512),
        (resnet50, (3, 4, 6, 3), True, 7, 1000, 320, 25_557_032),
        (resnet101, (3, 4, 23, 3), True, 7, 1000, 626, 44_549_160),
        (resnet18_cifar, (2, 2, 2, 2), False, 3, 10, 122, 11_173_962),
        (resnet18_cifar, (2, 2, 2, 2), False, 3, 100, 122, 11_220_132),
    ],
)
def test_state_dict_is_torchvisions(
    factory: Callable[[int], ResNet],
    depths: tuple[int, ...],
    bottleneck: bool,
    stem: int,
    classes: int,
    entries: int,
    parameters: int,
) -> None:
    with torch.device("meta"):
        model = factory(classes)
    table = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert table == torchvision_table(depths, bottleneck, classes, stem)
    assert len(table) == entries
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "depths", "cifar", "size"),
    [
        (resnet18_cifar, (2, 2, 2, 2), True, 32),
        (resnet18, (2, 2, 2, 2), False, 96),
        (resnet101, (3, 4, 23, 3), False, 64),
    ],
)
def test_forward_equals_the_written_out_network(
    factory: Callable[[int], ResNet], depths: tuple[int, ...], cifar: bool, size: int
) -> None:
    torch.manual_seed(0)
    model = factory(5).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.8, 1.5)
                module.weight.uniform_(0.3, 0.9)  # keeps 100 layers from growing
                module.bias.normal_(std=0.1)
        images = torch.randn(2, 3, size, size)
        features = reference_features(model.state_dict(), images, depths, cifar)
        seen: list[Tensor] = []
        model.fc.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        output = model(images)
        scale = features.abs().max().item()
        torch.testing.assert_close(seen[0], features, rtol=1e-4, atol=1e-5 * scale)
        torch.testing.assert_close(
            output, F.linear(features, model.fc.weight, model.fc.bias), rtol=1e-3, atol=1e-4 * scale
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "size", "units"),
    [(resnet18_cifar, 32, 512), (resnet18, 96, 512), (resnet18, 224, 512), (resnet101, 224, 2048)],
)
def test_taps_see_pooled_features_and_logits(factory: Callable[[int], ResNet], size: int, units: int) -> None:
    with torch.device("meta"):
        model = factory(12)
        images = torch.empty(2, 3, size, size)
    assert model.shiftmend_taps == {"features": "fc:input", "logits": "fc"}
    seen: dict[str, Tensor] = {}
    model.fc.register_forward_hook(lambda module, inputs, output: seen.update(features=inputs[0], logits=output))
    output = model(images)
    assert output.shape == (2, 12)
    assert seen["features"].shape == (2, units)
    assert seen["logits"] is output


@pytest.mark.parametrize("factory", [resnet18_cifar, resnet18, resnet101])
def test_blocks_hold_everything_but_the_head(factory: Callable[[int], ResNet]) -> None:
    with torch.device("meta"):
        model = factory(2)
    in_blocks = [name for block in model.shiftmend_blocks for name in block]
    assert len(model.shiftmend_blocks) == 5
    assert len(in_blocks) == len(set(in_blocks))
    assert {name for name, _ in model.named_children()} == set(in_blocks) | {"fc"}


def test_imagenet_layout_starts_he_normal() -> None:
    torch.manual_seed(0)
    model = resnet18(2)
    for name in ("conv1", "layer1.0.conv1", "layer2.0.conv1", "layer4.1.conv2", "layer3.0.downsample.0"):
        weight = model.get_submodule(name).weight
        fan_out = weight.shape[0] * weight[0, 0].numel()
        assert weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.03), name
        # A normal distribution has tails; a uniform one of this spread ends at 1.74.
        assert weight.abs().max() > 3 * weight.std(), name
    # No residual branch starts at 0.
    assert all((m.weight == 1).all() for m in model.modules() if isinstance(m, nn.BatchNorm2d))


def test_cifar_layout_starts_as_pytorch_does() -> None:
    torch.manual_seed(0)
    model = resnet18_cifar()
    for name in ("conv1", "layer1.0.conv1", "layer4.1.conv2"):
        weight = model.get_submodule(name).weight
        bound = (1 / (weight.shape[1] * 9)) ** 0.5  # Kaiming-uniform with slope sqrt(5)
        assert 0.98 * bound < weight.abs().max() <= bound, name
    assert model.conv1.stride == (1, 1)


@pytest.mark.slow
def test_gradients_reach_the_stem() -> None:
    torch.manual_seed(0)
    model = resnet18_cifar(3)
    F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.tensor([0, 1, 2, 0])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.conv1.weight.grad.any()
