"""The size of a profile compared with the model and the data, measured from files (the paper's appendix A).

Sizes of models and profiles do not depend on their values, except for a few bytes in the header of the file, where
numbers are written as text. So an untrained network on random images is used if there is no source model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import shiftmend
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench.benchmark import CLEAN, UNADAPTED, Benchmark, Root, Setting
from shiftmend.research.bench.cell import collect_warnings
from shiftmend.research.bench.recipes import Recipe, build_untrained
from shiftmend.research.bench.rendering import Column, Entry, Row, Table, escape_markdown, render
from shiftmend.research.bench.suite import find
from shiftmend.research.datasets.files import data_root

MEASURED = ("mnist-c", "emnist-da", "cifar-10-c", "cifar-100-c", "camelyon17", "visda-c", "imagenet")
"""Benchmarks with networks of their own (MNIST-M and USPS have MNIST's), and what else the paper's table has."""

QUOTED_NETWORKS = {"imagenet": Recipe(network="resnet101", options={"classes": 1000}, epochs=1)}
"""Networks of the paper's table without a benchmark; their profile and model are measured all the same."""

IMAGES = 8

SIDE = {"digit-cnn": 28}

USUAL_SIDE = 32
"""Image size for networks that average over positions, whose profile does not depend on it."""

FILES = {
    "mnist-c": ("MNIST/raw/train-*.gz", "MNIST/raw/train-*-ubyte"),
    "emnist-da": ("EMNIST/raw/emnist-balanced-train-*.gz", "EMNIST/raw/emnist-balanced-train-*-ubyte"),
    "cifar-10-c": ("cifar-10-batches-bin/data_batch_*", "cifar-10-batches-py/data_batch_*"),
    "cifar-100-c": ("cifar-100-binary/train.bin", "cifar-100-python/train"),
}
"""Files of the source's training split under the data root; the first layout that exists is used."""


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes; None if the data set, or a copy of it in memory, is not available."""

    benchmark: str
    counts: int
    """The bin counts of features and logits alone."""
    profile: int
    full: int
    """The profile with the covariance of the features, which some methods need."""
    model: int
    files: int | None
    """The files of the source's training split, as they are distributed."""
    pixels: int | None
    """The images of that split that the model was trained on, a byte for each value."""
    trained: bool
    """True if the model is the file of a trained one."""
    remark: str = ""
    """The difference between the source images and the published ones."""


def measure(benchmark: str, folder: str | os.PathLike[str] | None = None, root: Root = None) -> Sizes:
    """Measure sizes for a benchmark; the model's file is taken from `folder/sources` if it is there.

    Of a name in `QUOTED_NETWORKS`, there are no data and no trained model.
    """
    if benchmark in QUOTED_NETWORKS:
        return _measure_network(benchmark, QUOTED_NETWORKS[benchmark])
    chosen = find(benchmark)
    name = chosen.source_for(Setting(UNADAPTED), CLEAN)
    recipe = chosen.sources[name]
    file = None if folder is None else _find_trained(Path(folder), recipe.facts())
    return replace(
        _measure_network(chosen.name, recipe, file),
        files=_measure_files(chosen.name, root),
        pixels=_measure_pixels(chosen, name, root),
        remark=chosen.source_remark(root),
    )


def _measure_network(name: str, recipe: Recipe, file: Path | None = None) -> Sizes:
    model = build_untrained(recipe).eval()
    side = recipe.options.get("image_size", SIDE.get(recipe.network, USUAL_SIDE))
    images = torch.rand(IMAGES, 3, side, side, generator=torch.Generator().manual_seed(0))
    # The warning that a profile of so few images reveals them does not matter for random images.
    with collect_warnings():
        plain, full = (shiftmend.profile(model, images, gaussian=kind, device="cpu") for kind in ("marginal", "full"))
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    return Sizes(
        name,
        counts=_measure_counts(plain),
        profile=len(plain.to_bytes()),
        full=len(full.to_bytes()),
        model=len(safetensors.torch.save(state)) if file is None else file.stat().st_size,
        files=None,
        pixels=None,
        trained=file is not None,
    )


def make_table(sizes: Sequence[Sizes]) -> Table:
    """Make a row for each benchmark, beside the paper's figures where it has some."""
    titles = ("profile", "with covariance", "bin counts alone", "model", "data, files", "data, pixels")
    columns = [Column(title, digits=3) for title in titles]
    columns += [Column(title, "paper", "published", 3) for title in ("bin counts", "model", "data")]
    rows = []
    for one in sizes:
        there = _read_paper().get(one.benchmark, {})
        ours = (one.profile, one.full, one.counts, one.model, one.files, one.pixels)
        entries = [Entry(None if size is None else size / 1e6) for size in ours]
        entries += [Entry(text=f"{there[key]:g}") if key in there else Entry() for key in ("counts", "model", "data")]
        rows.append(Row(one.benchmark, tuple(entries)))
    trained = [one.benchmark for one in sizes if one.trained]
    models = f"of trained models for {', '.join(trained)}, else of untrained ones" if trained else "of untrained models"
    notes = (
        "in MB, a million bytes; files are the source's training split as distributed (images and labels, compressed "
        "where the distribution is), pixels the part the model is trained on at a byte for each value",
        f"profiles of random images, files {models}: but for some bytes of the header sizes do not depend on values",
        "a profile also holds the ranges, 128 slices and mean and variance of each feature",
        *(f"{one.benchmark}: {one.remark}" for one in sizes if one.remark),
        *_read_paper()["notes"],
    )
    return Table("profile, model and data in MB", "benchmark", tuple(columns), tuple(rows), notes)


def write_page(sizes: Sequence[Sizes]) -> str:
    """Write the table of sizes as a Markdown page."""
    largest = max((one for one in sizes if one.benchmark not in QUOTED_NETWORKS), key=lambda one: one.profile)
    said = (
        "What has to be kept of the source data to adapt without them, beside the data and the model (the paper's "
        f"appendix A). The largest profile of a benchmark, that of {escape_markdown(largest.benchmark)}, has "
        f"{largest.profile / 1e3:,.0f} kB, {100 * largest.profile / largest.model:.2g} % of its model."
    )
    command = "shiftmend bench storage --data-root DATA --out docs/results/storage.md"
    table = render(make_table(sizes), "markdown").rstrip()
    return f"# What a profile costs\n\n{said}\n\n```bash\n{command}\n```\n\n{table}\n"


def _measure_counts(profile: Profile) -> int:
    return sum(tap.counts.nelement() * tap.counts.element_size() for tap in profile.taps.values())


def _find_trained(folder: Path, recipe: dict[str, Any]) -> Path | None:
    """Find the first source model of this recipe in a folder of results."""
    for file in sorted(folder.glob("sources/*.safetensors")):
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                metadata = opened.metadata() or {}
        except (safetensors.SafetensorError, OSError):
            continue
        if metadata.get("recipe") == json.dumps(recipe):
            return file
    return None


def _measure_files(benchmark: str, root: Root) -> int | None:
    try:
        place = data_root(root)
    except DataError:
        return None
    for pattern in FILES.get(benchmark, ()):
        found = [file for file in place.glob(pattern) if file.is_file()]
        if found:
            return sum(file.stat().st_size for file in found)
    return None


def _measure_pixels(benchmark: Benchmark, source: str, root: Root) -> int | None:
    try:
        train = benchmark.load_source(source, root).train
    except DataError:
        return None
    return train.images.nelement() if isinstance(train, Split) else None


@cache
def _read_paper() -> dict[str, Any]:
    text = (resources.files("shiftmend.research.bench") / "paper" / "storage.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures
