"""Residual networks against torchvision's parameter table and a forward pass written with plain functions."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiftmend.research.networks.resnets import ResNet, resnet18, resnet18_cifar, resnet101


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
