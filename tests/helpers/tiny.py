"""A benchmark of seconds for the tests of the runner, which can be told to go wrong.

Files in the data root say what is to happen (they reach workers anywhere, which variables of the environment do not):
`break-SHIFT` makes every cell of a shift fail, `kill-SHIFT` kills the process that first loads it, `stuck-SHIFT` holds
up everyone who does, `source` in the place of a shift does so with source data, and `slow` makes every batch take a
while. Whoever loads something leaves a file named after it and its process in the folder `seen`.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.inputs.images import Split, signed
from shiftmend.research.bench.benchmark import CLEAN, Benchmark, Offline, Online, Origin, Setting, Source, Target
from shiftmend.research.bench.recipes import Recipe

SHIFTS = ("dark", "noisy")
SEEDS = (1, 2)
METHODS = ("source-only", "adabn", "fr", "shot", "doomed")
CLASSES = ("left", "right", "top")
CELLS = len(SEEDS) * (len(SHIFTS) * len(METHODS) + 1)
"""With the source model on clean images."""
DOOMED = len(SEEDS) * len(SHIFTS)

_slow = 0.0


def _images(count: int, seed: int, name: str) -> Split:
    """Grey pictures of which one half is bright; the class says which."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(CLASSES)
    images = torch.randint(0, 120, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        half = (slice(None), slice(None), slice(0, 4)), (slice(None), slice(None), slice(4, 8)), (slice(None), slice(4))
        image[half[label]] += 100
    return Split(images, labels, name, CLASSES)


def _note(what: str, root: Path | None) -> None:
    """Leave a trace, and do as the data root says."""
    global _slow
    if root is None:
        return
    (root / "seen").mkdir(exist_ok=True)
    (root / "seen" / f"{what}-{os.getpid()}").touch()
    _slow = 0.01 if (root / "slow").exists() else 0.0
    if (root / f"stuck-{what}").exists():
        time.sleep(60)
    if (root / f"break-{what}").exists():
        raise DataError(f"{what} is broken on purpose; remove the file")
    try:
        (root / f"kill-{what}").unlink()  # of several that find it, one dies
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _source(source: str, root: Path | None) -> Source:
    _note("source", root)
    home = _images(48, 0, "tiny-source")
    return Source(home, home, _images(36, 1, "tiny-clean"))


def _target(shift: str, root: Path | None) -> Target:
    _note(shift, root)
    clean = _images(36, 1, "tiny-clean")
    if shift == CLEAN:
        return Target(clean, clean, clean)
    noise = torch.randint(0, 35, clean.images.shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    seen = replace(clean, images=clean.images // 4 if shift == "dark" else clean.images + noise, name=f"tiny-{shift}")
    return Target(seen, seen, clean)


def _origin(shift: str, root: Path | None) -> Origin:
    return "own"


def _preprocess(images: Tensor) -> Tensor:
    time.sleep(_slow)
    return signed(images)


_SMALL = {"classes": len(CLASSES), "width": 2, "image_size": 8}
TINY = Benchmark(
    name="tiny",
    title="pictures of bright halves",
    shifts=SHIFTS,
    groups={},
    sources={
        "plain": Recipe(network="digit-cnn", options=_SMALL, epochs=10, batch_size=16),
        "shot": Recipe(network="digit-cnn", options=_SMALL | {"weight_norm": True}, epochs=10, batch_size=16),
    },
    protocols={"offline": Offline(batch_size=12), "online": Online(batch_size=12)},
    settings={
        "offline": {
            "source-only": Setting("source-only"),
            "adabn": Setting("adabn"),
            "fr": Setting("fr", {"epochs": 4, "learning_rate": 0.1}),
            "shot": Setting("shot", {"epochs": 2, "learning_rate": 0.01}, source="shot"),
            "doomed": Setting("fr", {"epochs": 2, "learning_rate": 1e30}),
        },
        "online": {"adabn": Setting("adabn"), "fr": Setting("fr", {"learning_rate": 0.1})},
    },
    load_source=_source,
    load_target=_target,
    origin=_origin,
    preprocess=_preprocess,
    seeds=SEEDS,
    small=True,
)
_OTHER = {**TINY.settings["offline"], "fr": Setting("fr", {"epochs": 4, "learning_rate": 0.2})}
OTHER_RATE = replace(TINY, settings={**TINY.settings, "offline": _OTHER})
"""`TINY` with another setting of FR."""
_GENTLY = {
    "adabn": Setting("adabn"),
    "fr": Setting("fr", {"epochs": 4, "learning_rate": 1e-3}),
    "target-supervised": Setting("target-supervised", {"epochs": 4, "learning_rate": 1e-2}),
}
GENTLE = replace(TINY, settings={**TINY.settings, "offline": _GENTLY})
"""Rates at which rounding is not magnified: at that of `TINY` another order of additions gives another model."""
