"""What does `auto` do where nobody has rehearsed?

    python benchmarks/unrehearsed.py --page docs/results/unrehearsed.md

The demo's network is trained on the digits that come with the package and profiled, and nothing more. It then meets
sites of the same device with other classes or few samples, which it should leave alone; sites behind another device,
which it should mend; and both together, which nobody can tell apart for sure. Each candidate is run by its name as
well, to see what could have been won and lost. `LESS_CERTAIN_BY_SKEW` in `verification/harm.py` was chosen on these
sites. Takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shiftmend
from bench_models import RowFile
from shiftmend import shifts
from shiftmend.adaptation.auto import CANDIDATES
from shiftmend.adaptation.result import environment
from shiftmend.demo import SOURCE_EPOCHS, preprocess, split_digits, train_source
from shiftmend.profiles.fingerprints import weights
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import UNTOUCHED, name_candidate
from shiftmend.utils.files import write_atomically

KEY = ("kind", "site", "seed")
HOME = ("clean", "two classes", "one class", "nine in ten of two classes", "Dirichlet 1", "Dirichlet 0.1",
        "long tail 10:1", "20 samples")  # fmt: skip
"""Sites of the same device."""
DEVICES = {
    "brightness": ("mnist-c/brightness", None),
    "stripe": ("emnist-da/stripe", None),
    "oranges": ("emnist-da/oranges", None),
    "contrast": ("cifar-c/contrast", 5),
    "gain and offset": ("sensor/gain_offset", 5),
    "blur": ("cifar-c/gaussian_blur", 5),
}
"""Shifts and severities of the other devices by name."""
KINDS = {
    "same device": "The same device",
    "other device": "Another device",
    "both": "Another device, and classes in shares drawn from a Dirichlet distribution of 1",
}

Row = dict[str, Any]


def draw_site(case: str, labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Draw places of samples whose classes have other shares, without replacement."""
    order, weights_ = rng.permutation(10), np.ones(10)
    if case == "20 samples":
        return torch.from_numpy(rng.permutation(len(labels))[:20])
    if case in ("one class", "two classes"):
        weights_[order[1 if case == "one class" else 2 :]] = 0
    elif case.startswith("nine in ten"):
        weights_[:] = 0.1 / 8
        weights_[order[:2]] = 0.45
    elif case.startswith("Dirichlet"):
        weights_ = rng.dirichlet(np.full(10, float(case.split()[-1])))
    elif case.startswith("long tail"):
        weights_[order] = np.geomspace(1, 0.1, 10)
    shares = weights_ / weights_.sum()
    counts = np.bincount(labels.numpy(), minlength=10)
    # As many as the frequent classes allow.
    size = min(count / share for count, share in zip(counts, shares, strict=True) if share > 0.1 / 10 + 1e-9)
    members = [rng.permutation(np.flatnonzero(labels.numpy() == digit)) for digit in range(10)]
    return torch.from_numpy(np.concatenate([own[: round(shares[k] * size)] for k, own in enumerate(members)]))


def measure(model: nn.Module, profile: Profile, images: Tensor, labels: Tensor, seed: int) -> Row:
    """Let `auto` choose, and run each candidate by its name."""

    def adapt(method: str) -> shiftmend.Adaptation:
        return shiftmend.adapt(model, images, profile, method, preprocess=preprocess, seed=seed, progress=False)

    def score(scored: nn.Module) -> float:
        scores = shiftmend.evaluate(scored, (images, labels), preprocess=preprocess, progress=False)
        assert isinstance(scores, shiftmend.Scores)
        return round(scores.accuracy, 4)

    result = adapt("auto")
    signals = result.candidates[0].signals
    return {
        "samples": len(images),
        "before": score(model),
        "after": score(result.model),
        "chosen": result.manifest["method"]["name"],
        "reason": result.reason,
        "tried": len(result.candidates),
        "confidence": round(signals["confidence"], 4),
        "outside": round(signals["outside"], 4),
        "candidates": {name: score(adapt(name).model) for name in CANDIDATES if name != UNTOUCHED},
    }


def run(seeds: Sequence[int], file: RowFile) -> None:
    sites = [("same device", site) for site in HOME]
    sites += [(kind, device) for kind in ("other device", "both") for device in DEVICES]
    for seed in seeds:
        if all(file.has(kind, site, seed) for kind, site in sites):
            continue
        source, _, site = split_digits(seed)
        assert source.labels is not None
        assert site.labels is not None
        model = train_source(source.images, source.labels, seed, lambda: None)
        profile = shiftmend.profile(model, source.images, preprocess=preprocess, progress=False)
        versions = {name: value for name, value in environment(torch.device("cpu")).items() if name != "platform"}
        manifest = {"environment": versions, "epochs": SOURCE_EPOCHS, "seed": seed, "weights_sha256": weights(model)}
        for number, (kind, name) in enumerate(sites):
            if file.has(kind, name, seed):
                continue
            case = {"same device": name, "other device": "clean", "both": "Dirichlet 1"}[kind]
            places = draw_site(case, site.labels, np.random.default_rng([seed, number]))
            images = site.images[places]
            if kind != "same device":
                shift, severity = DEVICES[name]
                images = shifts.apply(shift, images, severity=severity, seed=seed)
            row = file.add((kind, name, seed), measure(model, profile, images, site.labels[places], seed), manifest)
            print(describe(row), flush=True)


def describe(row: Row) -> str:
    return (
        f"{row['kind']}, {row['site']}, seed {row['seed']}: {_percent(row['before'])} to {_percent(row['after'])} by "
        f"{name_candidate(row['chosen'])} ({row['reason']}); best {_find_best(row)}"
    )


def _find_best(row: Row) -> str:
    scores = {UNTOUCHED: row["before"]} | row["candidates"]
    name = max(scores, key=lambda one: scores[one])
    return f"{_percent(scores[name])} ({name_candidate(name)})"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def write_page(rows: Sequence[Row]) -> str:
    lines = [
        "# Without a rehearsal",
        "",
        "Made by `python benchmarks/unrehearsed.py --page` from `results/unrehearsed.json` and from nothing else.",
        "The demo’s network on digits, profiled and not rehearsed; `adapt` without options. Accuracy in percent.",
        "*Best* and *worst* are by the labels, of all candidates and the untouched model. A small network and few",
        "samples: the table shows what the rules do, not how good methods are. `LESS_CERTAIN_BY_SKEW`, which lets few",
        "hard classes be less certain, was chosen on these sites.",
        "",
        "*All sites but those of two classes and of one class were measured before `LESS_CERTAIN_BY_SKEW` was there.",
        "By their confidence and skew, it changes nothing for them.*",
        "",
    ]
    for kind, title in KINDS.items():
        own = [row for row in rows if row["kind"] == kind]
        if not own:
            continue
        gains = [100 * (row["after"] - row["before"]) for row in own]
        lines += [
            f"## {title}",
            "",
            f"Mean gain {sum(gains) / len(gains):.1f} points, largest loss {max(0.0, -min(gains)):.1f}; left alone "
            f"{sum(row['chosen'] == UNTOUCHED for row in own)} of {len(own)}.",
            "",
            "| site | seed | samples | before | after | chosen | best | worst |",
            "|" + "---|" * 8,
        ]
        lines += [
            f"| {row['site']} | {row['seed']} | {row['samples']} | {_percent(row['before'])} | "
            f"{_percent(row['after'])} | {name_candidate(row['chosen'])} | {_find_best(row)} | "
            f"{_percent(min(row['before'], *row['candidates'].values()))} |"
            for row in own
        ]
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--out", type=Path, default=Path("results/unrehearsed.json"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    file = RowFile(options.out, KEY)
    run(options.seeds, file)
    if options.page is not None:
        write_atomically(options.page, write_page(file.rows).encode())


if __name__ == "__main__":
    main()
