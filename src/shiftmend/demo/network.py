"""The model of the demo: the paper's network for digits with an eighth of its channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn


class DigitReader(nn.Module):
    """Three strided convolutions and two linear layers, from `[N, 3, 28, 28]` in [-1, 1] to logits `[N, 10]`.

    `shiftmend_taps` names the tapped modules, and `shiftmend_blocks` the order of bottom-up training. Both are
    optional: shiftmend finds taps and blocks of a model without them.
    """

    shiftmend_taps: ClassVar[Mapping[str, str]] = {"features": "linear", "logits": "head"}
    shiftmend_blocks: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("conv1", "bn1"),
        ("conv2", "bn2"),
        ("conv3", "bn3"),
        ("linear",),
    )

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, kernel_size=5, stride=2, padding=2)
        self.bn1 = nn.BatchNorm2d(8)
        self.dropout1 = nn.Dropout2d(0.1)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=2)
        self.bn2 = nn.BatchNorm2d(16)
        self.dropout2 = nn.Dropout2d(0.3)
        self.conv3 = nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=2)
        self.bn3 = nn.BatchNorm2d(32)
        self.dropout3 = nn.Dropout2d(0.5)
        self.linear = nn.Linear(32 * 5 * 5, 16)
        self.bn4 = nn.BatchNorm1d(16)
        self.dropout4 = nn.Dropout(0.5)
        self.head = nn.Linear(16, 10)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.dropout1(self.bn1(self.conv1(images))))
        x = torch.relu(self.dropout2(self.bn2(self.conv2(x))))
        x = torch.relu(self.dropout3(self.bn3(self.conv3(x))))
        x = torch.relu(self.dropout4(self.bn4(self.linear(x.flatten(1)))))
        logits: Tensor = self.head(x)
        return logits


def _initialise(module: nn.Module) -> None:
    """Initialise the weights as the paper's reference implementation does."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.xavier_uniform_(module.weight)
        assert module.bias is not None
        nn.init.constant_(module.bias, 0.0 if isinstance(module, nn.Conv2d) else 0.01)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.0, 1.0)
