"""VisDA-C: from rendered objects to photographs, 12 classes. No measurement shift: the paper shows where FR ends.

There is no released code for it. What the paper does not say is chosen here: images are scaled to 224 x 224 and cropped
and flipped a little while training, a tenth of the source is held out, adaptation has 15 epochs in all (BUFR three a
block), SHOT's source model has label smoothing but an ordinary head, and its pseudo-labels the weight of the original.
Pretrained weights are expected under the data root as `weights/resnet101-imagenet.safetensors`, with torchvision's
names; docs/data.md shows how to make the file. Photographs without pretraining need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shiftmend.inputs.images import standardised
from shiftmend.research.bench.benchmark import (
    CLEAN,
    UNADAPTED,
    Benchmark,
    Offline,
    Origin,
    Root,
    Setting,
    Source,
    Target,
    is_clean,
)
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.datasets.partitions import balanced, fractions
from shiftmend.research.datasets.streamed import VISDA_PER_CLASS, ImageFiles, visda_c

SHIFTS = ("photographs", "photographs without label shift", "photographs without pretraining")

CLEAN_SETS = (CLEAN, "clean without label shift", "clean without pretraining")
"""The paper's three rows called no corruption: each source model on the part of its own source that was held out."""

VARIANTS = {"without label shift": "balanced", "without pretraining": "scratch"}
"""The other source model that a shift, or clean images, whose name ends like this needs."""

SIZE = (224, 224)

PARTS = (0.9, 0.1)
"""The parts of the source: to train with, and held out."""

WEIGHTS = "weights/resnet101-imagenet.safetensors"

SETTINGS = {
    "source-only": Setting("source-only"),
    "adabn": Setting("adabn", {"passes": 2}),
    "shot": Setting("shot", {"epochs": 15, "learning_rate": 1e-4, "weight": 0.3}, source="shot"),
    "fr": Setting("fr", {"epochs": 15, "learning_rate": 1e-4}),
    "bufr": Setting("bufr", {"epochs_per_block": 3, "learning_rate": 1e-4, "decay": 5.0}),
}


def source_for(setting: Setting, shift: str) -> str:
    """Name the source model of a variant of the shift."""
    variant = next((f"-{name}" for words, name in VARIANTS.items() if shift.endswith(words)), "")
    return f"{setting.source}{variant}"


def _balance(part: ImageFiles, per_class: int) -> ImageFiles:
    return part.take(balanced(part.labels, per_class), f"{part.name}, {per_class} a class")


def origin(shift: str, root: Root) -> Origin:
    """Return the origin of the images, which are always the published ones."""
    return "published"


def make_benchmark(
    recipe: Recipe,
    settings: Mapping[str, Setting] = SETTINGS,
    *,
    size: tuple[int, int] = SIZE,
    per_class: Mapping[str, int] = VISDA_PER_CLASS,
    batch_size: int = 64,
) -> Benchmark:
    """Make the benchmark for a network and its training.

    Args:
        recipe: The plain source model; `pretrained` names the weights that it starts from.
        settings: The rows of the table.
        size: Height and width that all images are scaled to.
        per_class: Images of each class without label shift, by split.
        batch_size: Samples in a batch of adaptation.
    """

    def load_source(source: str, root: Root) -> Source:
        whole = visda_c("train", root, size=size)
        named = zip(fractions(len(whole), PARTS), ("source part", "held out"), strict=True)
        parts = [whole.take(part, f"{whole.name}, {name}") for part, name in named]
        # Balanced once they are apart: what is repeated must not be on both sides.
        if source.endswith("balanced"):
            parts = [
                _balance(part, round(share * per_class["train"])) for part, share in zip(parts, PARTS, strict=True)
            ]
        train, test = parts
        return Source(train, train, test)

    def load_target(shift: str, root: Root) -> Target:
        if is_clean(shift):
            test = load_source(source_for(Setting(UNADAPTED), shift), root).test
            return Target(test, test, test)
        even = per_class["validation"] if shift.endswith("without label shift") else None
        photographs = visda_c("validation", root, per_class=even, size=size)
        return Target(photographs, photographs)

    smooth = replace(recipe, label_smoothing=0.1)
    return Benchmark(
        name="visda-c",
        title="VisDA-C: rendered objects to photographs, 12 classes",
        shifts=SHIFTS,
        groups={},
        sources={
            "plain": recipe,
            "plain-balanced": recipe,
            "plain-scratch": replace(recipe, pretrained=None),
            "shot": smooth,
            "shot-balanced": smooth,
            "shot-scratch": replace(smooth, pretrained=None),
        },
        protocols={"offline": Offline(batch_size=batch_size, score_every=5)},
        settings={"offline": settings},
        load_source=load_source,
        load_target=load_target,
        source_for=source_for,
        origin=origin,
        preprocess=standardised((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        clean_sets=CLEAN_SETS,
        by_class=True,
    )


BENCHMARK = make_benchmark(
    Recipe(
        network="resnet101",
        options={"classes": 12},
        epochs=15,
        learning_rate=1e-3,
        batch_size=64,
        augmentation="crop-flip",
        schedule="inverse",
        pretrained=WEIGHTS,
    )
)
