"""A benchmark small enough to train, profile and adapt in a second: three classes of 12 x 12 images, three shifts."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiftmend.inputs.images import Split, signed
from shiftmend.research.bench.benchmark import CLEAN, Benchmark, Cell, FewShot, Offline, Online, Setting, Source, Target
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.recipes import Recipe

OPTIONS = {"classes": 3, "width": 4, "image_size": 12}
RECIPE = Recipe(network="digit-cnn", options=OPTIONS, epochs=8, batch_size=32)
SHIFTS = ("dim", "inverse", "apart")
"""`apart` is the one whose images to adapt to are others than those that are scored."""


@functools.cache
def drawn(count: int, seed: int, name: str) -> Split:
    """A square a little brighter, in one of three places, on much noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    images = torch.randint(170, (count, 1, 12, 12), generator=generator)
    for place, (top, left) in enumerate(((1, 1), (1, 6), (6, 4))):
        images[labels == place, :, top : top + 5, left : left + 5] += 35
    return Split(images.to(torch.uint8), labels, name, ("a", "b", "c"))


def shifted(images: Tensor, shift: str) -> Tensor:
    return 255 - images if shift == "inverse" else images // 3 + 80


def load_source(source: str, root: Path | None) -> Source:
    home = drawn(256, 1, "home")
    return Source(home, home, drawn(100, 2, "away"))


def load_target(shift: str, root: Path | None) -> Target:
    away = drawn(100, 2, "away")
    if shift == CLEAN:
        return Target(away, away, away)
    seen = replace(away, images=shifted(away.images, shift), name=f"away, {shift}")
    if shift != "apart":
        return Target(seen, seen, away)
    other = drawn(130, 3, "elsewhere")
    return Target(replace(other, images=shifted(other.images, shift)), seen, away)


SETTINGS = {
    "source-only": Setting("source-only"),
    "adabn": Setting("adabn", {"passes": 2}),
    "tent": Setting("tent", {"epochs": 3, "learning_rate": 0.01}),
    "shot": Setting("shot", {"epochs": 2, "learning_rate": 0.1}, source="shot"),
    "fr": Setting("fr", {"epochs": 6, "learning_rate": 0.05}),
    "bufr": Setting("bufr", {"epochs_per_block": 2, "learning_rate": 0.3}),
    "target-supervised": Setting("target-supervised", {"epochs": 3, "learning_rate": 0.05}),
}
BENCHMARK = Benchmark(
    name="small",
    title="squares",
    shifts=SHIFTS,
    groups={"severe": ("inverse",)},
    sources={"plain": RECIPE, "shot": replace(RECIPE, label_smoothing=0.1, options=OPTIONS | {"weight_norm": True})},
    protocols={
        "offline": Offline(batch_size=32),
        "apart": Offline(batch_size=32, supervised_parts=None),
        "sparse": Offline(batch_size=32, score_every=4),
        "few-shot-5": FewShot(batch_size=15, per_class=5),
        "online": Online(batch_size=30),
    },
    settings={
        "offline": SETTINGS,
        "apart": SETTINGS,
        "sparse": SETTINGS,
        "few-shot-5": SETTINGS,
        "online": {
            "source-only": Setting("source-only"),
            "adabn": Setting("adabn"),
            "tent": Setting("tent", {"learning_rate": 0.05}),
            "fr": Setting("fr", {"learning_rate": 0.1}),
        },
    },
    load_source=load_source,
    load_target=load_target,
    origin=lambda shift, root: "own",
    preprocess=signed,
    seeds=(1, 2),
)


def cell(method: str, shift: str = "dim", protocol: str = "offline", seed: int = 1, **changes: Any) -> Cell:
    """A cell of the benchmark, or of one that differs in some fields."""
    benchmark = replace(BENCHMARK, **changes)
    (found,) = plan(benchmark, protocol, methods=[method], shifts=[shift], seeds=[seed])
    return found
