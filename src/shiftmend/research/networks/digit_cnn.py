"""The paper's five-layer network for digits and characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


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
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        # No ReLU works in place: a tap may hold on to the output of any layer.
        x = torch.relu(self.dropout1(self.bn1(self.conv1(images))))
        x = torch.relu(self.dropout2(self.bn2(self.conv2(x))))
        x = torch.relu(self.dropout3(self.bn3(self.conv3(x))))
        x = torch.relu(self.dropout4(self.bn4(self.linear(x.flatten(1)))))
        logits: Tensor = self.head(x)
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        # A weight made of direction and length keeps PyTorch's own initialisation, as in the reference.
        if not parametrize.is_parametrized(module, "weight"):
            nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.constant_(module.bias, 0.0 if isinstance(module, nn.Conv2d) else 0.01)
    elif isinstance(module, nn.BatchNorm2d):
        # The published learning rates were found with this unusual start. BatchNorm1d keeps its scale of 1.
        nn.init.uniform_(module.weight, 0.0, 1.0)
