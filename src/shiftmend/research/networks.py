"""The paper's networks, by the names that the command line and the benchmarks use.

shiftmend adapts any `nn.Module`. These networks are for the paper's experiments. The parameters of the residual
networks have torchvision's names, so weights published for torchvision's `resnet18`, `resnet50` and `resnet101` can be
loaded, without torchvision being installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from shiftmend.errors import DataError


class DigitCNN(nn.Module):
    """Three strided convolutions and two linear layers, initialised as in the reference implementation.

    `width` is the number of channels of the first convolution; all other widths follow from it, and 64 is the
    paper's. Inputs are `[N, channels, image_size, image_size]`, outputs are logits `[N, classes]`. `weight_norm` keeps
    direction and length of the rows of `head` apart, as SHOT does.

    >>> DigitCNN(classes=47)(torch.zeros(2, 3, 28, 28)).shape
    torch.Size([2, 47])
    """

    # A model may tell shiftmend by module names where its taps and its bottom-up blocks are; else shiftmend searches.
    # "linear" means the module's output, "linear:input" its input. The features are the raw output of `linear`, before
    # normalisation. `bn4` and `head` are in no block: they are the classifier, whose weights stay as trained.
    shiftmend_taps: ClassVar[Mapping[str, str]] = {"features": "linear", "logits": "head"}
    shiftmend_blocks: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("conv1", "bn1"),
        ("conv2", "bn2"),
        ("conv3", "bn3"),
        ("linear",),
    )
    # SHOT looks for clusters in the normalised features, before dropout and ReLU.
    shiftmend_embedding: ClassVar[str] = "bn4"
    # Learning rates published for this network, by method; other methods get a default.
    shiftmend_rates: ClassVar[Mapping[str, float]] = {
        "fr": 1.0,
        "bufr": 1.0,
        "pl": 0.01,
        "shot-im": 0.1,
        "bnm": 0.01,
        "bnm-im": 0.01,
        "shot": 0.1,
        "full-gauss": 0.001,
        "target-supervised": 0.1,
    }

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        width: int = 64,
        image_size: int = 28,
        weight_norm: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, kernel_size=5, stride=2, padding=2)
        self.bn1 = nn.BatchNorm2d(width)
        self.dropout1 = nn.Dropout2d(0.1)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=2)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.dropout2 = nn.Dropout2d(0.3)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, kernel_size=3, stride=2, padding=2)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.dropout3 = nn.Dropout2d(0.5)

        # Stride 2 halves a side, rounding up; conv2 and conv3 pad one pixel more than their kernels need.
        side = (image_size + 1) // 2
        side = (side + 1) // 2 + 1
        side = (side + 1) // 2 + 1
        self.linear = nn.Linear(4 * width * side * side, 2 * width)
        self.bn4 = nn.BatchNorm1d(2 * width)
        self.dropout4 = nn.Dropout(0.5)
        self.head = nn.Linear(2 * width, classes)
        if weight_norm:
            parametrizations.weight_norm(self.head)
        self.apply(_initialise_as_reference)

    def forward(self, images: Tensor) -> Tensor:
        # No ReLU works in place: a tap may hold on to the output of any layer.
        x = torch.relu(self.dropout1(self.bn1(self.conv1(images))))
        x = torch.relu(self.dropout2(self.bn2(self.conv2(x))))
        x = torch.relu(self.dropout3(self.bn3(self.conv3(x))))
        x = torch.relu(self.dropout4(self.bn4(self.linear(x.flatten(1)))))
        logits: Tensor = self.head(x)
        return logits


def _initialise_as_reference(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        # A weight made of direction and length keeps PyTorch's own initialisation, as in the reference.
        if not parametrize.is_parametrized(module, "weight"):
            nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.constant_(module.bias, 0.0 if isinstance(module, nn.Conv2d) else 0.01)
    elif isinstance(module, nn.BatchNorm2d):
        # The published learning rates were found with this unusual start. BatchNorm1d keeps its scale of 1.
        nn.init.uniform_(module.weight, 0.0, 1.0)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, global average pooling and one linear layer `fc`.

    `small_images` chooses the layout. The ImageNet layout shrinks images by 4 in its stem (7x7 convolution, then
    max-pooling) and starts from He-normal convolutions. The CIFAR layout has a 3x3 stem that keeps the size, and
    PyTorch's own initialisation.
    """

    # Read by shiftmend when it places taps and forms bottom-up blocks; see `DigitCNN` for the convention.
    shiftmend_taps: ClassVar[Mapping[str, str]] = {"features": "fc:input", "logits": "fc"}
    shiftmend_blocks: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("conv1", "bn1"),
        ("layer1",),
        ("layer2",),
        ("layer3",),
        ("layer4",),
    )

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        classes: int,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        self.small_images = small_images
        if small_images:
            self.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(block, depths[0], channels=64, width=64, stride=1)
        self.layer2 = _stage(block, depths[1], channels=64 * block.expansion, width=128, stride=2)
        self.layer3 = _stage(block, depths[2], channels=128 * block.expansion, width=256, stride=2)
        self.layer4 = _stage(block, depths[3], channels=256 * block.expansion, width=512, stride=2)
        self.fc = nn.Linear(512 * block.expansion, classes)
        if not small_images:
            self.apply(_initialise_as_imagenet)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(images)))
        if not self.small_images:
            x = nn.functional.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut around them."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = torch.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        return torch.relu(residual + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the 3x3 one carries the stride, as in torchvision."""

    expansion: ClassVar[int] = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(channels, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = torch.relu(self.bn1(self.conv1(x)))
        residual = torch.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        return torch.relu(residual + self.downsample(x))


def resnet18_cifar(classes: int = 10) -> ResNet:
    """Make a ResNet-18 for 32x32 images, as in the paper's CIFAR experiments."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, small_images=True)


def resnet18(classes: int) -> ResNet:
    """Make a ResNet-18 in the ImageNet layout, as in the paper's CAMELYON17 experiments."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50(classes: int) -> ResNet:
    """Make a ResNet-50 in the ImageNet layout, with which `benchmarks/speed` measures large networks."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


def resnet101(classes: int) -> ResNet:
    """Make a ResNet-101 in the ImageNet layout, as in the paper's VisDA-C experiments."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes)


def _stage(
    block: type[BasicBlock] | type[Bottleneck], depth: int, channels: int, width: int, stride: int
) -> nn.Sequential:
    """Chain `depth` blocks, of which the first changes resolution and number of channels."""
    first = block(channels, width, stride)
    others = (block(width * block.expansion, width, stride=1) for _ in range(depth - 1))
    return nn.Sequential(first, *others)


def _shortcut(channels: int, outputs: int, stride: int) -> nn.Sequential:
    """Make the identity (an empty Sequential) wherever shapes allow it, else a strided 1x1 projection."""
    if stride == 1 and channels == outputs:
        return nn.Sequential()
    return nn.Sequential(
        nn.Conv2d(channels, outputs, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
    )


def _initialise_as_imagenet(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


MODELS: dict[str, Callable[..., nn.Module]] = {
    "digit-cnn": DigitCNN,
    "resnet18-cifar": resnet18_cifar,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet101": resnet101,
}


def build(name: str, **options: Any) -> nn.Module:
    """Make a freshly initialised network.

    Your own network in `MODELS` may also have options whose defaults are floats or text.

    >>> build("digit-cnn", classes=47).head.out_features
    47
    """
    factory = MODELS.get(name)
    if factory is None:
        raise DataError(f"Expected the model to be one of {', '.join(MODELS)}, got {name!r}.")
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        accepted = ", ".join(signature.parameters)
        raise DataError(f"Expected options of {name} ({accepted}), got others: {error}.") from error
    for option, value in options.items():
        # Command lines and manifests also contain text, floats and booleans.
        default = signature.parameters[option].default if option in signature.parameters else None
        if default is None or isinstance(default, float | str):
            continue
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise DataError(f"Expected option {option} of {name} to be true or false, got {value!r}.")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"Expected option {option} of {name} to be a whole number above 0, got {value!r}.")
    return factory(**options)
