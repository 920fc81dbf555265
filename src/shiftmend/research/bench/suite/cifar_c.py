"""CIFAR-10-C and CIFAR-100-C: 19 corruptions at severity 5, offline and online, and the ablations.

Adaptation and scoring use the same 10,000 images. As in the reference implementation the profile is made from augmented
training images; here both of its passes see the same augmentation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shiftmend.inputs.images import Split, standardised
from shiftmend.research.bench.benchmark import (
    CLEAN,
    REHEARSED_ROWS,
    Benchmark,
    Offline,
    Online,
    Origin,
    Rehearsed,
    Root,
    Setting,
    Source,
    Target,
)
from shiftmend.research.bench.recipes import AUGMENTATIONS, Recipe
from shiftmend.research.bench.suite.shifted_data import SEED, exists, find_textures, make_again, origin_of
from shiftmend.research.datasets.cifar import CIFAR_CORRUPTIONS, cifar10, cifar10_c, cifar100, cifar100_c

SEVERITY = 5

Reader = Callable[[str, Root], Split]
ShiftedReader = Callable[[str, int, Root], Split]

OFFLINE = {
    "source-only": Setting("source-only"),
    "adabn": Setting("adabn", {"passes": 2}),
    "pl": Setting("pl", {"epochs": 150, "learning_rate": 1e-3}),
    "shot-im": Setting("shot-im", {"epochs": 150, "learning_rate": 1e-3}),
    "tent": Setting("tent", {"epochs": 150, "learning_rate": 1e-3}),
    "fr": Setting("fr", {"epochs": 150, "learning_rate": 1e-3}),
    "bufr": Setting("bufr", {"epochs_per_block": 30, "learning_rate": 0.1, "decay": 5.0}),
    "fr-sliced": Setting("fr", {"epochs": 150, "learning_rate": 1e-3}, preset="sliced"),
    "bufr-sliced": Setting("bufr", {"epochs_per_block": 30, "learning_rate": 0.1, "decay": 5.0}, preset="sliced"),
    "fr-features": Setting("fr", {"epochs": 150, "learning_rate": 1e-3, "align": ("features",)}),
    "fr-one-sided": Setting("fr", {"epochs": 150, "learning_rate": 1e-3, "divergence": "kl-target-source"}),
    "target-supervised": Setting("target-supervised", {"epochs": 150, "learning_rate": 1e-3, "weight_decay": 5e-4}),
}


def _make_benchmark(
    name: str,
    classes: int,
    augmentation: str,
    mean: tuple[float, float, float],
    deviation: tuple[float, float, float],
    online: dict[str, Setting],
    clean: Reader,
    shifted: ShiftedReader,
) -> Benchmark:
    """Make one of the two benchmarks from their differences."""
    folder = name.upper()

    def published(shift: str, root: Root) -> bool:
        return exists(root, folder, f"{shift}.npy")

    def load_source(source: str, root: Root) -> Source:
        train = clean("train", root)
        generator = torch.Generator().manual_seed(SEED)
        seen = torch.cat([AUGMENTATIONS[augmentation](part, generator) for part in train.images.split(1000)])
        profiled = Split(seen, train.labels, f"{train.name}, augmented", train.classes)
        return Source(train, profiled, clean("test", root))

    def load_target(shift: str, root: Root) -> Target:
        test = clean("test", root)
        if shift == CLEAN:
            return Target(test, test, test)
        if published(shift, root):
            seen = shifted(shift, SEVERITY, root)
        else:
            seen = make_again(f"cifar-c/{shift}", test, pictures=find_textures(root, "textures"), severity=SEVERITY)
        return Target(seen, seen, test)

    def origin(shift: str, root: Root) -> Origin:
        if shift == CLEAN:
            return "published"
        return origin_of(f"cifar-c/{shift}", published(shift, root), root, (name, shift))

    return Benchmark(
        name=name,
        title=f"{folder}: photographs of {classes} classes, 19 corruptions at severity 5",
        shifts=CIFAR_CORRUPTIONS,
        groups={},
        sources={
            "plain": Recipe(
                network="resnet18-cifar",
                options={"classes": classes},
                epochs=200,
                batch_size=128,
                weight_decay=5e-4,
                augmentation=augmentation,
                autocast=True,
            )
        },
        protocols={
            "offline": Offline(batch_size=200, score_every=10, autocast=True),
            "online": Online(batch_size=200),
            "rehearsed": Rehearsed(batch_size=200, autocast=True),
        },
        settings={
            "offline": OFFLINE,
            "online": {"source-only": Setting("source-only"), "adabn": Setting("adabn"), **online},
            "rehearsed": REHEARSED_ROWS,
        },
        load_source=load_source,
        load_target=load_target,
        origin=origin,
        preprocess=standardised(mean, deviation),
        cells_per_gpu=3,
    )


CIFAR_10_C = _make_benchmark(
    "cifar-10-c",
    classes=10,
    augmentation="crop-flip",
    mean=(0.4914, 0.4822, 0.4465),
    deviation=(0.2023, 0.1994, 0.2010),
    online={
        "shot-im": Setting("shot-im", {"learning_rate": 1e-3}),
        "tent": Setting("tent", {"learning_rate": 1e-3}),
        "fr": Setting("fr", {"learning_rate": 1e-2}),
    },
    clean=cifar10,
    shifted=cifar10_c,
)

CIFAR_100_C = _make_benchmark(
    "cifar-100-c",
    classes=100,
    augmentation="crop-flip-rotate-15",
    mean=(0.50708, 0.48655, 0.44092),
    deviation=(0.26733, 0.25644, 0.27615),
    online={
        "shot-im": Setting("shot-im", {"learning_rate": 1e-3}),
        "tent": Setting("tent", {"learning_rate": 1e-2}),
        "fr": Setting("fr", {"learning_rate": 1e-1}),
    },
    clean=cifar100,
    shifted=cifar100_c,
)
