"""MNIST-M: digits blended with patches of photographs; everything else as in MNIST-C.

Where the published archive is not at hand, the digits are blended anew: with the photographs of BSDS500 if they are
under the data root, as for the archive, else with stand-ins. The set unpacked into folders of images is sorted by
digit: then the 54,000 to adapt to are not those of the source, and there is no clean version to compare with.
"""

from __future__ import annotations

from pathlib import Path

from shiftmend.inputs.images import Split, signed
from shiftmend.research.bench.benchmark import (
    CLEAN,
    REHEARSED_ROWS,
    Benchmark,
    Origin,
    Rehearsed,
    Root,
    Setting,
    Target,
)
from shiftmend.research.bench.suite.mnist_c import OFFLINE, SETTINGS, SOURCES, load_source, source_part
from shiftmend.research.bench.suite.shifted_data import exists, find_textures, make_again
from shiftmend.research.datasets.digits import mnist, mnist_m
from shiftmend.research.datasets.made_sets import PHOTOGRAPHS, find_origin
from shiftmend.shifts.textures import photograph_files

SHIFT = "mnist-m"

ARCHIVES = ("keras_mnistm.pkl.gz", "keras_mnistm.pkl")

FOLDER = "test"


def load_target(shift: str, root: Root) -> Target:
    """Load MNIST-M: the published images if they are there, otherwise made here."""
    clean = mnist("test", root)
    if shift == CLEAN:
        return Target(clean, clean, clean)
    if _published(root):
        seen = source_part(mnist_m("train", root))
        return Target(seen, load_scored(shift, root), clean if _in_order(root) else None)
    seen = make_again(SHIFT, source_part(mnist("train", root)), pictures=_photographs(root))
    return Target(seen, load_scored(shift, root), clean)


def load_scored(shift: str, root: Root) -> Split:
    """Load the images that methods are scored on, and these alone."""
    if shift == CLEAN:
        return mnist("test", root)
    if _published(root):
        return mnist_m("test", root)
    return make_again(SHIFT, mnist("test", root), pictures=_photographs(root))


def origin(shift: str, root: Root) -> Origin:
    """Tell where the images of a shift come from."""
    if shift == CLEAN:
        return "published"
    if _published(root):
        return find_origin(root, "mnist-m", "archive") or "published"
    folder = _photographs(root)
    there = 0 if folder is None else len(photograph_files(folder))
    return "regenerated" if there == PHOTOGRAPHS else "rebuilt"


def _published(root: Root) -> bool:
    return _in_order(root) or exists(root, "MNISTM", FOLDER)


def _in_order(root: Root) -> bool:
    return any(exists(root, "MNISTM", file) for file in ARCHIVES)


def _photographs(root: Root) -> Path | None:
    return find_textures(root, "BSDS500", "images", "train")


BENCHMARK = Benchmark(
    name="mnist-m",
    title="MNIST-M: digits on photographs",
    shifts=(SHIFT,),
    groups={},
    sources=SOURCES,
    protocols={"offline": OFFLINE, "rehearsed": Rehearsed(autocast=True)},
    settings={
        "offline": SETTINGS
        | {"shot": Setting("shot", {"epochs": 30, "learning_rate": 0.1, "weight": 0.1}, source="shot")},
        "rehearsed": REHEARSED_ROWS,
    },
    load_source=load_source,
    load_target=load_target,
    origin=origin,
    preprocess=signed,
    cells_per_gpu=8,
)
