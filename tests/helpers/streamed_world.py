"""A benchmark of a few small image files, which are decoded when they are asked for, as those of CAMELYON17."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from data_layouts import write_png
from tiny import CLASSES, TINY, _images

from shiftmend.research.bench.benchmark import CLEAN, FewShot, Offline, Setting, Source, Target
from shiftmend.research.datasets.streamed import ImageFiles

STREAMED_FILE = Path(__file__)

_PARTS = {"home": (48, 0), "away": (36, 1)}


def lay_out(root: Path) -> None:
    """Write the images of both sites as PNG files."""
    for part, (count, seed) in _PARTS.items():
        for number, image in enumerate(_images(count, seed, part).images):
            pixels = image if part == "home" else image // 4
            write_png(root / part / f"{number:03d}.png", pixels.permute(1, 2, 0).numpy())


def _files(root: Path | None, part: str) -> ImageFiles:
    assert root is not None
    files = sorted(file.name for file in (root / part).glob("*.png"))
    labels = torch.arange(len(files)) % len(CLASSES)
    return ImageFiles(root / part, files, labels, f"streamed-{part}", CLASSES, size=(8, 8))


def _source(source: str, root: Path | None) -> Source:
    home = _files(root, "home")
    return Source(home, home, home)


def _target(shift: str, root: Path | None) -> Target:
    seen = _files(root, "home" if shift == CLEAN else "away")
    return Target(seen, seen)


_SETTINGS = {
    "source-only": Setting("source-only"),
    "adabn": Setting("adabn"),
    "fr": Setting("fr", {"epochs": 2, "learning_rate": 0.02}),
    "bufr": Setting("bufr", {"epochs_per_block": 1, "learning_rate": 0.1, "decay": 1.5}),
    "target-supervised": Setting("target-supervised", {"epochs": 1, "learning_rate": 0.01}),
}

STREAMED = replace(
    TINY,
    name="streamed",
    title="files of bright halves",
    shifts=("dark",),
    protocols={"offline": Offline(batch_size=12), "few-shot-4": FewShot(batch_size=12, per_class=4)},
    settings={"offline": _SETTINGS, "few-shot-4": {name: _SETTINGS[name] for name in ("adabn", "fr", "bufr")}},
    load_source=_source,
    load_target=_target,
    seeds=(1,),
)
