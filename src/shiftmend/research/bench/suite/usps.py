"""USPS: digits from envelopes and those of MNIST, each way. A real shift between two sets, nothing is made.

Adaptation uses the target's training split and scoring its test split. USPS is 16 x 16 and is enlarged to MNIST's
28 x 28, by bilinear interpolation. Nothing else is done to bring the two closer: MNIST's digits have a black margin of
some four pixels, those of USPS fill the image, and this is a part of the shift. So is that USPS has twice as many zeros
as eights, which MNIST has not. There are no pairs of images: no restoration distance is known.

No settings are published for this pair. Those here are MNIST-C's, as are the source models of MNIST; for BNM, BNM-IM
and the full Gaussian EMNIST-DA's, and for TENT CIFAR-10-C's, for want of nearer ones. But the full Gaussian diverges at
EMNIST-DA's rate, and so has a tenth of it: ten classes leave the features less room than 47, the largest variance among
them is 13,000 and more times the smallest instead of 1,800, and the loss is as much steeper.

Each shift has a source model of its own, but a benchmark has one clean set: `clean` is MNIST's model on MNIST's test
split.
"""

from __future__ import annotations

from torch.nn import functional

from shiftmend.inputs.images import Split, signed
from shiftmend.research.bench.benchmark import CLEAN, SEEDS, Benchmark, Origin, Root, Setting, Source, Target
from shiftmend.research.bench.suite import cifar_c, emnist_da, mnist_c
from shiftmend.research.datasets.digits import mnist, usps

SHIFTS = ("mnist-to-usps", "usps-to-mnist")

SIDE = 28

SETTINGS = {
    **{name: mnist_c.SETTINGS[name] for name in ("source-only", "adabn", "pl", "shot-im", "shot")},
    "tent": cifar_c.OFFLINE["tent"],
    **{name: emnist_da.SETTINGS[name] for name in ("bnm", "bnm-im")},
    "full-gauss": Setting("full-gauss", {"epochs": 150, "learning_rate": 1e-4}),
    **{name: mnist_c.SETTINGS[name] for name in ("fr", "bufr", "fr-sliced", "bufr-sliced", "target-supervised")},
}


def load_source(source: str, root: Root) -> Source:
    """Load the set that a source model is trained on, MNIST or USPS."""
    if source.endswith("-mnist"):
        return mnist_c.load_source(source, root)
    train = enlarge(usps("train", root))
    return Source(train, train, enlarge(usps("test", root)))


def load_target(shift: str, root: Root) -> Target:
    """Load the other of the two sets, at the size of MNIST."""
    if shift == CLEAN:
        test = mnist("test", root)
        return Target(test, test, test)
    _, away = shift.split("-to-")
    if away == "mnist":
        return Target(mnist("train", root), mnist("test", root))
    return Target(enlarge(usps("train", root)), enlarge(usps("test", root)))


def enlarge(split: Split) -> Split:
    """Enlarge images to the size of MNIST's.

    Many new pixels lie halfway between two grey levels. They are rounded to some decimals first, so that every machine
    gets the same images and the same hash.
    """
    large = functional.interpolate(split.images.double(), size=SIDE, mode="bilinear")
    images = large.round(decimals=6).round().to(split.images.dtype)
    return Split(images, split.labels, f"{split.name}, {SIDE} x {SIDE}", split.classes)


def source_for(setting: Setting, shift: str) -> str:
    """Name the source model of a direction, e.g. "mnist-to-usps"."""
    home = "mnist" if shift == CLEAN else shift.split("-to-")[0]
    return f"{setting.source}-{home}"


def origin(shift: str, root: Root) -> Origin:
    """Tell where images come from: both sets are the published ones."""
    return "published"


BENCHMARK = Benchmark(
    name="usps",
    title="USPS: digits from envelopes and MNIST, each way",
    shifts=SHIFTS,
    seeds=SEEDS[:3],
    groups={},
    sources={f"{name}-{home}": recipe for home in ("mnist", "usps") for name, recipe in mnist_c.SOURCES.items()},
    protocols={"offline": mnist_c.OFFLINE},
    settings={"offline": SETTINGS},
    load_source=load_source,
    load_target=load_target,
    source_for=source_for,
    origin=origin,
    preprocess=signed,
    cells_per_gpu=8,
)
