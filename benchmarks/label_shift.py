"""How much of what FR and BUFR miss between MNIST and USPS is due to other frequencies of the digits?

    python benchmarks/label_shift.py --folder bench --data-root DATA [--out rows.json] [--seeds 123] [--shifts ...]

Each method adapts as in `shiftmend bench run usps`, from the source models in that folder (trained if there are none),
three times: with the profile of all source images; with profiles of one digit each, mixed in the shares that the target
has (`Profile.mixture`, as if a site knew them); and with the profile of all, to as many target images of each digit as
there are of the rarest. A run that was cut off goes on from `--out`. Seconds a row on a GPU, a quarter of an hour and
more on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shiftmend
from shiftmend.inputs.images import Split
from shiftmend.research.bench.resources import Resources
from shiftmend.research.bench.suite.usps import BENCHMARK, SHIFTS
from shiftmend.utils.files import write_atomically

METHODS = ("fr", "bufr")
WAYS = ("as it is", "mixed profile", "balanced target")
KNOWN = ("shift", "method", "way", "seed")


def labels_of(split: Any) -> Tensor:
    assert isinstance(split, Split)
    assert split.labels is not None
    return split.labels


def balanced(labels: Tensor, seed: int) -> Tensor:
    """Draw the same number of images of each digit: as many as the rarest has."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    least = int(labels.bincount().min())
    return torch.cat([shuffled[labels[shuffled] == digit][:least] for digit in range(10)])


def mixed(resources: Resources, source: str, seed: int, shares: Tensor) -> shiftmend.Profile:
    """Compute the source's profile as if its digits had these shares."""
    model, _ = resources.model(source, seed)
    data = resources.source(source).profiled
    whole = resources.profile(source, seed, BENCHMARK.protocols["offline"].temperature)
    assert isinstance(data, Split)
    parts = [
        shiftmend.profile(
            model,
            data.images[labels_of(data) == digit],
            like=whole,
            preprocess=BENCHMARK.preprocess,
            batch_size=512,
            progress=False,
        )
        for digit in range(10)
    ]
    return shiftmend.Profile.mixture(parts, shares.tolist())


def measure(resources: Resources, shift: str, method: str, way: str, seed: int) -> dict[str, Any]:
    setting, protocol = BENCHMARK.settings["offline"][method], BENCHMARK.protocols["offline"]
    source, target = BENCHMARK.source_for(setting, shift), resources.target(shift)
    model, _ = resources.model(source, seed)
    assert isinstance(target.adapt, Split)
    labels, images = labels_of(target.adapt), target.adapt.images
    profile = resources.profile(source, seed, protocol.temperature)
    if way == "mixed profile":
        profile = mixed(resources, source, seed, labels.bincount(minlength=10))
    if way == "balanced target":
        images = images[balanced(labels, seed).to(images.device)]
    result = shiftmend.adapt(
        model,
        images,
        profile,
        method,
        batch_size=protocol.batch_size,
        seed=seed,
        preprocess=BENCHMARK.preprocess,
        device=resources.device,
        autocast=protocol.in_bfloat16(resources.device),
        progress=False,
        **setting.options,
    )
    scored = target.score
    assert isinstance(scored, Split)
    scores = shiftmend.evaluate(result.model, (scored.images, labels_of(scored)), preprocess=BENCHMARK.preprocess)
    assert isinstance(scores, shiftmend.Scores)
    assert result.after is not None
    return {
        "images": len(images),
        "accuracy": scores.accuracy,
        "ece": scores.ece,
        "slices": result.after.divergence,
        "verdict": result.after.verdict,
        "seconds": result.manifest["seconds"],
        "device": str(resources.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="source models and profiles lie here")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("label-shift.json"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[123])
    parser.add_argument("--shifts", nargs="*", default=list(SHIFTS), choices=SHIFTS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    resources = Resources(BENCHMARK, options.folder, options.data_root, options.device)
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {tuple(row[name] for name in KNOWN) for row in rows}
    for place in itertools.product(options.shifts, options.methods, WAYS, options.seeds):
        if place in done:
            continue
        row = dict(zip(KNOWN, place, strict=True)) | measure(resources, *place)
        rows.append(row)
        write_atomically(options.out, json.dumps(rows, indent=1).encode())
        print(
            f"{row['shift']:<14} {row['method']:<5} {row['way']:<16} seed {row['seed']}: accuracy "
            f"{100 * row['accuracy']:.1f} %, {row['verdict']} (slices {row['slices']:.4f}), {row['images']:,} images",
            flush=True,
        )


if __name__ == "__main__":
    main()
