"""Small models of every kind that shiftmend must work on, with their expected traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shiftmend.research.networks import build


class InPlace(nn.Module):
    """A network whose in-place ReLUs overwrite what the layers before them wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, 2),
            nn.ReLU(inplace=True),
        )
        self.squeeze = nn.Linear(8, 6)
        self.act = nn.ReLU(inplace=True)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).mean((2, 3))
        return self.fc(self.act(self.squeeze(x)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class SmallViT(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(Attention(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Regressor(nn.Module):
    """A regressor whose one output is squeezed behind the head."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x)).squeeze(-1)


class Wrapped(nn.Module):
    """A network that returns its logits in a tuple or a dict."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU())
        self.classifier = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        hidden = self.encoder(x)
        logits = self.classifier(hidden)
        return (hidden, logits) if self.kind is tuple else {"hidden": hidden, "logits": logits}


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 12, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(20), nn.ReLU(),
        nn.Linear(20, 3),
    )  # fmt: skip


def signal() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 8, 5, 2), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 5, 2), nn.BatchNorm1d(16), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def tabular() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)
    )


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    head: str
    features: int
    outputs: int
    blocks: int
    output: int | str | None = None

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = self.make()
        with torch.no_grad():
            for _ in range(1 if self.features > 100 else 40):  # lazy layers take shape, BatchNorm settles
                model(torch.randn(32, *self.shape))
        return model.eval()

    def inputs(self, count: int = 64, seed: int = 1) -> Tensor:
        return torch.randn(count, *self.shape, generator=torch.Generator().manual_seed(seed))


ZOO: dict[str, Case] = {
    "paper-cnn": Case(lambda: build("digit-cnn", classes=10, width=8), (3, 28, 28), "head", 16, 10, 4),
    "resnet18": Case(lambda: build("resnet18-cifar", classes=10), (3, 32, 32), "fc", 512, 10, 5),
    "in-place": Case(InPlace, (3, 16, 16), "fc", 6, 4, 3),
    "group-norm": Case(group_norm, (3, 16, 16), "8", 16, 4, 2),
    "no-norm": Case(plain, (1, 16, 16), "7", 20, 3, 3),
    "vit": Case(SmallViT, (3, 16, 16), "head", 16, 5, 4),
    "signal": Case(signal, (2, 64), "8", 16, 4, 2),
    "tabular": Case(tabular, (7,), "5", 16, 3, 2),
    "regressor": Case(Regressor, (5,), "out", 8, 1, 2),
    "tuple": Case(lambda: Wrapped(tuple), (6,), "classifier", 10, 3, 2, output=1),
    "dict": Case(lambda: Wrapped(dict), (6,), "classifier", 10, 3, 2, output="logits"),
}
SMALL = [name for name in ZOO if name != "resnet18"]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
