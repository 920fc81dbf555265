"""A small benchmark that needs no files: scikit-learn's digits, every method, three shifts, minutes on a CPU.

It shows that everything works, and how methods fail; it is too small to say which is best. Rates and epochs were chosen
to be quick, not by looking at target labels of another seed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from shiftmend import shifts
from shiftmend.inputs.digits import enlarged_digits
from shiftmend.inputs.images import Split, signed
from shiftmend.research.bench.benchmark import (
    CLEAN,
    REHEARSED_ROWS,
    Benchmark,
    FewShot,
    Offline,
    Online,
    Origin,
    Rehearsed,
    Setting,
    Source,
    Target,
)
from shiftmend.research.bench.recipes import Recipe

SHIFTS = {"brightness": "mnist-c/brightness", "stripe": "emnist-da/stripe", "oranges": "emnist-da/oranges"}

SOURCE = 900
"""Digits to train on; the other 897 are seen by the new device."""

_OFFLINE = {
    "source-only": Setting("source-only"),
    "adabn": Setting("adabn"),
    "pl": Setting("pl", {"epochs": 12, "learning_rate": 0.01}),
    "shot-im": Setting("shot-im", {"epochs": 12, "learning_rate": 0.1}),
    "shot": Setting("shot", {"epochs": 12, "learning_rate": 0.1}, source="shot"),
    "tent": Setting("tent", {"epochs": 12, "learning_rate": 0.01}),
    "bnm": Setting("bnm", {"epochs": 12, "learning_rate": 0.01}),
    "bnm-im": Setting("bnm-im", {"epochs": 12, "learning_rate": 0.01}),
    "full-gauss": Setting("full-gauss", {"epochs": 12, "learning_rate": 0.001}),
    "fr": Setting("fr", {"epochs": 16, "learning_rate": 0.3}),
    "bufr": Setting("bufr", {"epochs_per_block": 4, "learning_rate": 0.3}),
    "target-supervised": Setting("target-supervised", {"epochs": 12, "learning_rate": 0.1}),
}

_ONLINE = {
    "adabn": Setting("adabn"),
    "shot-im": Setting("shot-im", {"learning_rate": 0.01}),
    "tent": Setting("tent", {"learning_rate": 0.01}),
    "fr": Setting("fr", {"learning_rate": 0.1}),
}


@cache
def _parts() -> tuple[Split, Split]:
    everything = enlarged_digits()
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))
    return everything.take(order[:SOURCE], "digits-source"), everything.take(order[SOURCE:], "digits-target")


def _source(source: str, root: Path | None) -> Source:
    home, away = _parts()
    return Source(home, home, away)


def _target(shift: str, root: Path | None) -> Target:
    _, away = _parts()
    if shift == CLEAN:
        return Target(away, away, away)
    images = shifts.apply(SHIFTS[shift], away.images, seed=0)
    seen = Split(images, away.labels, f"digits-{shift}", away.classes)
    return Target(seen, seen, away)


def _origin(shift: str, root: Path | None) -> Origin:
    return "own"


BENCHMARK = Benchmark(
    name="digits",
    title="scikit-learn's digits",
    shifts=tuple(SHIFTS),
    groups={},
    sources={
        "plain": Recipe(network="digit-cnn", options={"classes": 10, "width": 8}, epochs=40, batch_size=64),
        "shot": Recipe(
            network="digit-cnn",
            options={"classes": 10, "width": 8, "weight_norm": True},
            epochs=40,
            batch_size=64,
            label_smoothing=0.1,
        ),
    },
    protocols={
        "offline": Offline(batch_size=128),
        "online": Online(batch_size=100),
        "few-shot-20": FewShot(batch_size=100, per_class=20),
        "rehearsed": Rehearsed(batch_size=128),
    },
    settings={
        "offline": _OFFLINE,
        "online": _ONLINE,
        "few-shot-20": {name: _OFFLINE[name] for name in ("adabn", "bnm", "full-gauss", "shot-im", "fr", "bufr")},
        "rehearsed": REHEARSED_ROWS,
    },
    load_source=_source,
    load_target=_target,
    origin=_origin,
    preprocess=signed,
    seeds=(123, 234),
    small=True,
    cells_per_gpu=8,
)
