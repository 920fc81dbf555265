"""VisDA-C: from rendered objects to photographs, 12 classes. No measurement shift: the paper shows where FR ends.

There is no released code for it. What the paper does not say is chosen here: images are scaled to 224 x 224 and cropped
and flipped a little while training, a tenth of the source is held out, adaptation has 15 epochs in all (BUFR three a
block), SHOT's source model has label smoothing but an ordinary head, and its pseudo-labels the weight of the original.
Pretrained weights are expected under the data root as `weights/resnet101-imagenet.safetensors`, with torchvision's
names.
"""

from __future__ import annotations

from shiftmend.inputs.images import standardised
from shiftmend.research.bench.benchmark import CLEAN, Benchmark, Offline, Origin, Root, Setting, Source, Target
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.datasets.partitions import balanced, fractions
from shiftmend.research.datasets.streamed import VISDA_PER_CLASS, ImageFiles, visda_c

SHIFTS = ("photographs", "photographs without label shift", "photographs without pretraining")

VARIANTS = {"photographs without label shift": "balanced", "photographs without pretraining": "scratch"}
"""The other source model that a shift needs."""

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


def _recipe(smoothing: float = 0.0, pretrained: str | None = WEIGHTS) -> Recipe:
    return Recipe(
        network="resnet101",
        options={"classes": 12},
        epochs=15,
        learning_rate=1e-3,
        batch_size=64,
        augmentation="crop-flip",
        schedule="inverse",
        label_smoothing=smoothing,
        pretrained=pretrained,
    )


def load_source(source: str, root: Root) -> Source:
    whole = visda_c("train", root, size=SIZE)
    named = zip(fractions(len(whole), PARTS), ("source part", "held out"), strict=True)
    parts = [whole.take(part, f"{whole.name}, {name}") for part, name in named]
    # Balanced once they are apart: what is repeated must not be on both sides.
    if source.endswith("balanced"):
        parts = [_even(part, round(share * VISDA_PER_CLASS["train"])) for part, share in zip(parts, PARTS, strict=True)]
    train, test = parts
    return Source(train, train, test)


def _even(part: ImageFiles, per_class: int) -> ImageFiles:
    return part.take(balanced(part.labels, per_class), f"{part.name}, {per_class} a class")


def load_target(shift: str, root: Root) -> Target:
    if shift == CLEAN:
        test = load_source("plain", root).test
        return Target(test, test, test)
    even = VISDA_PER_CLASS["validation"] if shift.endswith("without label shift") else None
    photographs = visda_c("validation", root, per_class=even, size=SIZE)
    return Target(photographs, photographs)


def source_for(setting: Setting, shift: str) -> str:
    return f"{setting.source}-{VARIANTS[shift]}" if shift in VARIANTS else setting.source


def origin(shift: str, root: Root) -> Origin:
    return "published"


BENCHMARK = Benchmark(
    name="visda-c",
    title="VisDA-C: rendered objects to photographs, 12 classes",
    shifts=SHIFTS,
    groups={},
    sources={
        "plain": _recipe(),
        "plain-balanced": _recipe(),
        "plain-scratch": _recipe(pretrained=None),
        "shot": _recipe(0.1),
        "shot-balanced": _recipe(0.1),
        "shot-scratch": _recipe(0.1, None),
    },
    protocols={"offline": Offline(batch_size=64, score_every=5)},
    settings={"offline": SETTINGS},
    load_source=load_source,
    load_target=load_target,
    source_for=source_for,
    origin=origin,
    preprocess=standardised((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
)
