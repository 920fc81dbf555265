"""How far off are the accuracies that a site is told without labels, and what does `auto` return?

    python benchmarks/estimates.py measure digits --out estimates
    python benchmarks/estimates.py measure emnist-da --data-root DATA --models bench --seeds 123 --out estimates
    python benchmarks/estimates.py judge --out estimates --page docs/results/estimates.md

`measure` splits the test images of a benchmark once, by seed and class. One half rehearses at home: temperature,
thresholds and maps come from it. The other half is the site: shifted, adapted to by every candidate, read without
labels, then scored. No image is in both. Every cell is stored with its signals and scores, so `judge` needs no GPU.

`judge` makes the estimates anew from the stored cells. For each test shift the maps are fitted without every rehearsal
of its family (`FAMILIES`); that is the headline. The whole battery stands beside it. Beside `auto` stand the untouched
model, `bufr` and the best candidate, which no site could know.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bench_models import Deadline, Given, RowFile, keep_targets, labels_of, open_benchmark
from shiftmend import shifts
from shiftmend.adaptation.auto import list_candidates, try_candidates
from shiftmend.adaptation.result import environment
from shiftmend.adaptation.run import Settings, prepare
from shiftmend.evaluation.classification import ClassificationMetrics
from shiftmend.methods import method as make_method
from shiftmend.profiles import fingerprints
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import UNTOUCHED
from shiftmend.rehearsal.rehearse import rehearse
from shiftmend.research.bench.benchmark import CLEAN
from shiftmend.research.networks import build
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.logs import hide_warnings
from shiftmend.verification.reading import as_class_logits

KEY = ("benchmark", "case", "seed")
TEMPERATURES = [round(float(value), 4) for value in np.geomspace(0.3, 6.0, 31)]
"""Temperatures at which calibration is stored."""
SPLIT_SEED = 0
SITES_OF_CLASSES = (0.1, 1.0, 10.0)
NEW_SHARE = 0.2
"""Share of samples of a class that the model does not know."""
HARM = ("new-class", "inverted", "swapped-channels")
"""Cases beside label shifts and few samples in which adapting may do harm."""

FAMILIES = {
    "levels": ("brightness", "contrast", "saturate", "fog", "low contrast", "brighter", "darker"),
    "blur": ("blur", "pixelate", "resolution", "focus"),
    "noise": ("noise", "spatter", "impulse", "speckle", "shot", "gaussian_noise"),
    "compression": ("jpeg", "compression"),
    "weather": ("snow", "frost"),
    "geometry": ("translat", "scale", "rotat", "shear", "elastic", "zigzag"),
    "background": (
        *("background", "bricks", "crystals", "grass", "oranges", "sky", "stripe", "mnist-m", "line"),
        *("gradient", "texture", "dotted", "canny"),
    ),
    "inversion": ("inver", "negative"),
    "defects": ("dead", "defect"),
    "colour": ("colour", "color", "channel", "swapped"),
}
"""Families of test shifts and of rehearsed devices, by parts of their names."""

Row = dict[str, Any]


def find_families(name: str) -> set[str]:
    """Return the families that a shift or a device belongs to, by its name."""
    return {family for family, parts in FAMILIES.items() if any(part in name.lower() for part in parts)}


# ---- measuring


@dataclass(frozen=True)
class Site:
    """Images and labels of one case at the site; `known` says which of them count in the score."""

    images: Tensor
    labels: Tensor
    known: Tensor | None = None


def split_halves(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Split samples into two halves, class by class, by a fixed seed."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    ranks = torch.empty_like(order)
    by_class = labels[order].argsort(stable=True)
    ranks[order[by_class]] = torch.arange(len(labels))
    home = ranks % 2 == 0
    return home.nonzero().flatten(), (~home).nonzero().flatten()


def list_cases(name: str, harm: bool) -> list[str]:
    cases = [CLEAN, *open_names(name)]
    if harm:
        cases += [f"labels/dirichlet-{alpha:g}" for alpha in SITES_OF_CLASSES]
        cases += ["labels/long-tail-10", "labels/two-classes", "labels/half-missing", "labels/one-missing"]
        cases += [f"few/20-{draw}" for draw in range(3)] + [*HARM]
    return cases


def open_names(name: str) -> list[str]:
    from shiftmend.research.bench.suite import find

    return [shift for shift in find(name).shifts if shift != "usps-to-mnist"]


def make_site(given: Given, case: str, places: Tensor, seed: int) -> Site:
    """Return the site's half of a case."""
    target = given.benchmark.load_target(CLEAN if _is_harm(case) else case, given.resources.root)
    images, labels = target.score.images, labels_of(target.score)
    if case == "mnist-to-usps":
        return Site(images, labels)
    images, labels = images[places], labels[places]
    rng = np.random.default_rng(seed)
    if case.startswith("labels/"):
        chosen = _draw_classes(case.removeprefix("labels/"), labels, rng)
        return Site(images[chosen], labels[chosen])
    if case == "new-class":
        # One sample in five becomes something that the model has never seen: two images laid over each other.
        known = torch.from_numpy(rng.random(len(labels)) > NEW_SHARE)
        both = torch.maximum(images, images[torch.from_numpy(rng.permutation(len(images)))].flip(-1))
        return Site(torch.where(known.view(-1, 1, 1, 1), images, both), labels, known)
    if case.startswith("few/"):
        chosen = torch.from_numpy(np.random.default_rng(int(case.rpartition("-")[2])).permutation(len(labels))[:20])
        return Site(images[chosen], labels[chosen])
    if case == "inverted":
        return Site(255 - images, labels)
    if case == "swapped-channels":
        return Site(images.flip(1) if images.shape[1] > 1 else shifts.apply("mnist-c/rotate", images), labels)
    return Site(images, labels)


def _is_harm(case: str) -> bool:
    return case.startswith(("labels/", "few/")) or case in HARM


def _draw_classes(case: str, labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Draw samples with other class shares, without replacement."""
    classes = int(labels.max()) + 1
    order = rng.permutation(classes)
    weights = np.ones(classes)
    if case.startswith("dirichlet-"):
        weights = rng.dirichlet(np.full(classes, float(case.rpartition("-")[2])))
    elif case == "long-tail-10":
        weights[order] = np.geomspace(1, 0.1, classes)
    elif case == "two-classes":
        weights[:] = 0.1 / (classes - 2)
        weights[order[:2]] = 0.45
    elif case == "half-missing":
        weights[order[: classes // 2]] = 0
    elif case == "one-missing":
        weights[order[0]] = 0
    counts = np.bincount(labels.numpy(), minlength=classes)
    # As many samples as the rarest wanted class allows, but no fewer than a tenth of all.
    shares = weights / weights.sum()
    size = max(len(labels) // 10, int(min(counts[k] / shares[k] for k in range(classes) if shares[k] > 0)))
    chosen = []
    for k in range(classes):
        members = np.flatnonzero(labels.numpy() == k)
        chosen.append(rng.permutation(members)[: round(shares[k] * size)])
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


def measure(options: argparse.Namespace) -> None:
    deadline = Deadline(options.time_limit)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    device = resolve_device(options.device)
    cases = list(options.cases or list_cases(options.benchmark, options.harm))
    if options.targets is not None and not options.rehearse_only:
        keep_targets(
            options.benchmark, [case for case in cases if not _is_harm(case)], options.data_root, options.targets
        )
    given = open_benchmark(
        options.benchmark,
        options.models if options.weights is None else Path("bench"),
        options.data_root,
        str(device),
        targets=options.targets,
        may_train=options.train or options.benchmark == "digits",
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds or given.benchmark.seeds[:1]:
        source = _open_files(options, given) if options.weights is not None else given
        _measure_seed(options, source, seed, cases, deadline)


@dataclass(frozen=True)
class FromFiles(Given):
    """A benchmark whose source model and profile are named files, so that no training data is needed."""

    weights: Path = Path()
    home_profile: Path = Path()

    def model(self, seed: int) -> nn.Module:
        recipe = self.benchmark.sources["plain"]
        model = build(recipe.network, **recipe.options)
        # Weights may be stored in half precision, to travel; the SHA-256 of a row is that of these weights.
        state = {
            name: value.float() if value.is_floating_point() else value
            for name, value in load_file(self.weights).items()
        }
        model.load_state_dict(state)
        return model.to(self.device).eval()

    def profile(self, seed: int) -> Profile:
        return replace(Profile.load(self.home_profile), weights=fingerprints.weights(self.model(seed)))

    def describe(self, seeds: Sequence[int]) -> dict[str, Any]:
        facts = {name: value for name, value in environment(self.device).items() if name != "platform"}
        return {
            "benchmark": self.benchmark.name,
            "environment": facts,
            "protocol": self.protocol.facts(),
            "bfloat16": self.protocol.in_bfloat16(self.device),
            "source": self.benchmark.sources["plain"].facts(),
            "source_models": {
                str(seed): {"file": self.weights.name, "weights_sha256": fingerprints.weights(self.model(seed))}
                for seed in seeds
            },
        }


def _open_files(options: argparse.Namespace, given: Given) -> FromFiles:
    return FromFiles(given.resources, False, options.weights, options.profile)


def _settings(given: Given, seed: int) -> dict[str, Any]:
    return {
        "batch_size": given.protocol.batch_size,
        "preprocess": given.benchmark.preprocess,
        "device": given.device,
        "autocast": given.protocol.in_bfloat16(given.device),
        "seed": seed,
    }


def _measure_seed(
    options: argparse.Namespace, given: Given, seed: int, cases: Sequence[str], deadline: Deadline
) -> None:
    name = options.benchmark
    file = RowFile(options.out / f"{name}-{seed}.json", KEY)
    clean = given.benchmark.load_target(CLEAN, given.resources.root).score
    home, site = split_halves(labels_of(clean))
    model, path = given.model(seed), options.out / f"{name}-{seed}.profile"
    settings = _settings(given, seed)
    if not path.exists():
        started = time.perf_counter()
        rehearsed = rehearse(
            model,
            (clean.images[home], labels_of(clean)[home]),
            given.profile(seed),
            candidates=options.candidates,
            site_size=options.site_size,
            checkpoint=options.out / f"{name}-{seed}.rehearsal.json",
            progress=False,
            **settings,
        )
        rehearsed.save(path)
        print(f"{name}, seed {seed}: rehearsed in {time.perf_counter() - started:.0f} s", flush=True)
    if options.rehearse_only:
        return
    profile = Profile.load(path)
    manifest = given.describe([seed]) | {"home_samples": len(home), "site_samples": len(site)}
    for case in cases:
        if file.has(name, case, seed) or not deadline.allows():
            continue
        values = _measure_case(given, make_site(given, case, site, seed), profile, seed, settings)
        deadline.done()
        row = file.add((name, case, seed), values, manifest)
        told = {one: f"{100 * cell['score']:.1f}" for one, cell in row["cells"].items()}
        print(f"{name} {case}, seed {seed}: {told}, {row['seconds']:.1f} s", flush=True)


def _measure_case(given: Given, site: Site, profile: Profile, seed: int, settings: dict[str, Any]) -> Row:
    """Adapt by every candidate to a site; store signals and scores."""
    record = profile.rehearsal
    assert record is not None
    started = time.perf_counter()
    known = Settings(
        **settings, blocks=None, output=None, resident=True, capture=True, compile=False, keep=None, on_epoch=None,
        checkpoint=None, progress=False,
    )  # fmt: skip
    with hide_warnings():
        task = prepare(given.model(seed), site.images, profile, make_method(UNTOUCHED), known)
        trials = try_candidates(task, known, list_candidates(None, profile))
    cells = {}
    for trial in trials:
        if trial.adaptation is None or trial.reading is None:
            continue
        logits, labels = as_class_logits(trial.reading.outputs), site.labels
        if site.known is not None:
            logits, labels = logits[site.known.to(logits.device)], labels[site.known]
        scores = _score(logits, labels)
        cells[trial.name] = {
            "score": scores["accuracy"],
            "signals": trial.signals,
            "calibration": _watch_calibration(logits, labels),
            "seconds": round(trial.seconds, 3),
            "slices": [float(f"{row.verification or math.nan:.3g}") for row in trial.adaptation.history],
            "blocks": [row.block for row in trial.adaptation.history],
            "kept": trial.adaptation.kept.epoch,
        }
    return {"samples": len(site.images), "cells": cells, "seconds": round(time.perf_counter() - started, 2)}


def _score(logits: Tensor, labels: Tensor) -> dict[str, float]:
    metrics = ClassificationMetrics(device=logits.device)
    metrics.update(logits, labels)
    found = metrics.compute()
    return {name: float(getattr(found, name)) for name in ("accuracy", "ece", "nll", "brier")}


def _watch_calibration(logits: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Return mean confidence, ECE, NLL and Brier score at each of `TEMPERATURES`."""
    found: dict[str, list[float]] = {name: [] for name in ("confidence", "ece", "nll", "brier")}
    for temperature in TEMPERATURES:
        scaled = logits.double() / temperature
        scores = _score(scaled, labels)
        found["confidence"].append(round(float(scaled.softmax(1).amax(1).mean()), 5))
        for name in ("ece", "nll", "brier"):
            found[name].append(round(scores[name], 5))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("measure", help="rehearse, then adapt to every case; store signals and scores")
    first.add_argument("benchmark")
    first.add_argument("--device", default="auto")
    first.add_argument("--data-root", type=Path)
    first.add_argument("--models", type=Path, default=Path("bench"), help="folder with sources and profiles")
    first.add_argument("--weights", type=Path, help="the source model, instead of --models; needs --profile")
    first.add_argument("--profile", type=Path, help="the profile of --weights")
    first.add_argument("--train", action="store_true", help="train source models that are missing")
    first.add_argument("--targets", type=Path, help="folder that keeps shifted images")
    first.add_argument("--seeds", type=int, nargs="*")
    first.add_argument("--cases", nargs="*")
    first.add_argument("--candidates", nargs="*")
    first.add_argument("--harm", action="store_true", help="also label shifts, few samples, inverted images")
    first.add_argument("--site-size", type=int, help="rehearse at this size alone")
    first.add_argument("--rehearse-only", action="store_true", help="leave the cases for another run")
    first.add_argument("--time-limit", type=float, metavar="SECONDS")
    first.add_argument("--out", type=Path, default=Path("estimates"))
    options = parser.parse_args(arguments)
    measure(options)


if __name__ == "__main__":
    main()
