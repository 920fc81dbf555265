"""VisDA-C with a small network on a few small images, and such images in the official layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from data_layouts import rng, write_png

from shiftmend.research.bench.benchmark import Setting
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.bench.suite.visda_c import make_benchmark
from shiftmend.research.datasets.streamed import VISDA_CLASSES
from shiftmend.research.networks import build

SMALL_VISDA_FILE = Path(__file__)

WEIGHTS = "weights/digit-cnn-imagenet.safetensors"

_NETWORK = {"width": 4, "image_size": 16}

COUNTS = {"train": [8] * 12, "validation": [2 + label % 3 for label in range(12)]}

SMALL = make_benchmark(
    Recipe(
        network="digit-cnn",
        options={"classes": 12, **_NETWORK},
        epochs=1,
        batch_size=24,
        schedule="inverse",
        pretrained=WEIGHTS,
    ),
    {
        "source-only": Setting("source-only"),
        "adabn": Setting("adabn", {"passes": 1}),
        "shot": Setting("shot", {"epochs": 1, "learning_rate": 1e-4, "weight": 0.3}, source="shot"),
        "fr": Setting("fr", {"epochs": 1, "learning_rate": 1e-4}),
        "bufr": Setting("bufr", {"epochs_per_block": 1, "learning_rate": 1e-4, "decay": 5.0}),
    },
    size=(16, 16),
    per_class={"train": 10, "validation": 3},
    batch_size=12,
)


def lay_out(root: Path) -> None:
    """Write images of any size, their lists, and weights of a network with another head."""
    generator = rng(5)
    for split, counts in COUNTS.items():
        lines = []
        for label, (name, count) in enumerate(zip(VISDA_CLASSES, counts, strict=True)):
            for number in range(count):
                height, width = generator.integers(20, 40, 2)
                pixels = generator.integers(0, 100, (height, width, 3)) + 12 * label
                write_png(root / "VisDA-C" / split / name / f"{number}.png", pixels.astype(np.uint8))
                lines.append(f"{name}/{number}.png {label}")
        (root / "VisDA-C" / split / "image_list.txt").write_text("\n".join(lines) + "\n")
    torch.manual_seed(0)
    (root / "weights").mkdir()
    safetensors.torch.save_file(build("digit-cnn", classes=1000, **_NETWORK).state_dict(), root / WEIGHTS)
