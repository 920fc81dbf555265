"""MNIST-C: digits under 15 corruptions.

Unlike elsewhere, adaptation and scoring use different images, as in the reference implementation: the shifted versions
of the 54,000 source images, and of the 10,000 test images.
"""

from __future__ import annotations

from shiftmend.inputs.images import Split, signed
from shiftmend.research.bench.benchmark import (
    CLEAN,
    REHEARSED_ROWS,
    Benchmark,
    Offline,
    Origin,
    Rehearsed,
    Root,
    Setting,
    Source,
    Target,
)
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.bench.suite.shifted_data import exists, make_again, origin_of
from shiftmend.research.datasets.digits import MNIST_CORRUPTIONS, mnist, mnist_c
from shiftmend.research.datasets.partitions import held_out

SETTINGS = {
    "source-only": Setting("source-only"),
    "adabn": Setting("adabn", {"passes": 2}),
    "pl": Setting("pl", {"epochs": 150, "learning_rate": 0.01}),
    "shot-im": Setting("shot-im", {"epochs": 150, "learning_rate": 0.1}),
    "shot": Setting("shot", {"epochs": 30, "learning_rate": 0.01, "weight": 0.1}, source="shot"),
    "fr": Setting("fr", {"epochs": 150, "learning_rate": 0.1}),
    "bufr": Setting("bufr", {"epochs_per_block": 30, "learning_rate": 1.0, "decay": 1.5}),
    "fr-sliced": Setting("fr", {"epochs": 150, "learning_rate": 0.1}, preset="sliced"),
    "bufr-sliced": Setting("bufr", {"epochs_per_block": 30, "learning_rate": 1.0, "decay": 1.5}, preset="sliced"),
    "target-supervised": Setting("target-supervised", {"epochs": 150, "learning_rate": 0.1}),
}

_NETWORK = {"classes": 10}

SOURCES = {
    "plain": Recipe(network="digit-cnn", options=_NETWORK, epochs=150, augmentation="rotate-10"),
    "shot": Recipe(
        network="digit-cnn",
        options=_NETWORK | {"weight_norm": True},
        epochs=150,
        augmentation="rotate-10",
        label_smoothing=0.1,
    ),
}

OFFLINE = Offline(supervised_parts=None, score_every=5, autocast=True)


def load_source(source: str, root: Root) -> Source:
    """Load MNIST: the part that the source model is trained on, and the test set."""
    train = source_part(mnist("train", root))
    return Source(train, train, mnist("test", root))


def source_part(train: Split) -> Split:
    """Take the 54,000 images that the source model is trained on, of MNIST or of a shifted version of it."""
    return train.take(held_out(len(train))[0], f"{train.name}, source part")


def load_target(shift: str, root: Root) -> Target:
    """Load the images of a shift: published ones if they are there, otherwise made here."""
    clean = mnist("test", root)
    if shift == CLEAN:
        return Target(clean, clean, clean)
    if _published(shift, root):
        adapt = source_part(mnist_c(shift, "train", root))
    else:
        adapt = make_again(f"mnist-c/{shift}", source_part(mnist("train", root)))
    return Target(adapt, load_scored(shift, root), clean)


def load_scored(shift: str, root: Root) -> Split:
    """Load the images of a shift that methods are scored on, and these alone."""
    if shift == CLEAN:
        return mnist("test", root)
    if _published(shift, root):
        return mnist_c(shift, "test", root)
    return make_again(f"mnist-c/{shift}", mnist("test", root))


def origin(shift: str, root: Root) -> Origin:
    """Tell where the images of a shift come from."""
    if shift == CLEAN:
        return "published"
    return origin_of(f"mnist-c/{shift}", _published(shift, root), root, ("mnist-c", f"{shift}/test"))


def _published(shift: str, root: Root) -> bool:
    return exists(root, "mnist_c", shift, "test_images.npy")


BENCHMARK = Benchmark(
    name="mnist-c",
    title="MNIST-C: digits, 15 corruptions",
    shifts=MNIST_CORRUPTIONS,
    groups={"without translate": tuple(shift for shift in MNIST_CORRUPTIONS if shift != "translate")},
    sources=SOURCES,
    protocols={"offline": OFFLINE, "rehearsed": Rehearsed(autocast=True)},
    settings={"offline": SETTINGS, "rehearsed": REHEARSED_ROWS},
    load_source=load_source,
    load_target=load_target,
    origin=origin,
    preprocess=signed,
    cells_per_gpu=8,
)
