"""Residual networks of the paper: ResNet-18 for CIFAR, ResNet-18 and ResNet-101 in the ImageNet layout.

Parameters carry torchvision's names, so weights published for torchvision's `resnet18` and `resnet101`
load as they are, without torchvision being installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn


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
    """Two 3x3 convolutions beside a shortcut."""

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
