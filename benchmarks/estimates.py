"""How far off are the accuracies that a site is told without labels, and what does `auto` return?

    python benchmarks/estimates.py measure digits --out estimates
    python benchmarks/estimates.py measure emnist-da --data-root DATA --models bench --seeds 123 --out estimates
    python benchmarks/estimates.py judge --out results/estimates --page docs/results/estimates.md

`measure` splits the test images of a benchmark once, by seed and class. One half rehearses at home: temperature,
thresholds and maps come from it. The other half is the site: shifted, adapted to by every candidate, read without
labels, then scored. No image is in both. Every cell is stored with its signals and scores, so `judge` needs no GPU.

`judge` makes the estimates anew from the stored cells. For each test shift the maps are fitted without every rehearsal
of its family (`FAMILIES`); that is the headline. The whole battery stands beside it. Beside `auto` stand the untouched
model, `bufr` and the best candidate, which no site could know.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from textwrap import fill
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
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal
from shiftmend.rehearsal.rehearse import rehearse
from shiftmend.research.bench.benchmark import CLEAN
from shiftmend.research.networks import build
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import write_atomically
from shiftmend.utils.logs import hide_warnings
from shiftmend.verification.estimate import Estimate, Estimator, cross_fit
from shiftmend.verification.predictions import as_class_logits

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


# ---- judging


@dataclass(frozen=True)
class Run:
    """One source model: what it rehearsed, and the cases at its site."""

    benchmark: str
    seed: int
    record: Rehearsal
    rows: list[Row]
    manifests: dict[str, Any]


def read_runs(folder: Path) -> list[Run]:
    runs = []
    for path in sorted(folder.glob("*.profile")):
        record = Profile.load(path).rehearsal
        stored = path.with_suffix(".json")
        if record is None or not stored.exists():
            continue
        content = json.loads(stored.read_text())
        name, _, seed = path.stem.rpartition("-")
        runs.append(Run(name, int(seed), record, content["rows"], content["manifests"]))
    return runs


def leave_out(record: Rehearsal, families: set[str]) -> Rehearsal:
    """Return a rehearsal without every shift of some families."""
    keep = [not families & find_families(f"{one.name} {one.family}") for one in record.shifts]
    place = [index for index, kept in enumerate(keep) if kept]
    tables = {name: getattr(record, name)[place] for name in ("scores", "values", "estimates", "scales", "chosen")}
    return cross_fit(replace(record, shifts=tuple(record.shifts[index] for index in place), **tables))


def judge_case(estimator: Estimator, row: Row) -> Row:
    """Return what a site would have been told and given, from stored signals alone, and the truth."""
    cells, samples = row["cells"], row["samples"]
    alone = {name: value for name, value in cells[UNTOUCHED]["signals"].items() if not name.startswith("agreement")}
    signals = {name: cell["signals"] for name, cell in cells.items()}
    if estimator.is_at_home(alone, samples):
        chosen, before, kind = UNTOUCHED, estimator.estimate_at_home(samples), "as at home"
        after = before
    elif estimator.has_other_shares(alone, samples):
        chosen, kind = UNTOUCHED, "other class shares"
        before = after = estimator.estimate(UNTOUCHED, alone, samples, reasons=[kind])
    else:
        kind, chosen = "shifted", estimator.choose(signals, samples)
        before = estimator.estimate(UNTOUCHED, signals[UNTOUCHED], samples)
        after = estimator.estimate(chosen, signals[chosen], samples, chosen=True)
    truth = {name: cell["score"] for name, cell in cells.items()}
    return {
        "kind": kind,
        "chosen": chosen,
        "true_before": truth[UNTOUCHED],
        "true": truth[chosen],
        "best": max(truth.values()),
        "bufr": truth.get("bufr", math.nan),
        "before": describe_estimate(before),
        "after": describe_estimate(after),
        "ece": find_eces(cells[chosen]["calibration"], estimator.record.temperature, after.value, truth[chosen]),
    }


def describe_estimate(estimate: Estimate) -> Row:
    """Return an estimate with what was withheld, which no user is shown."""
    value, low, high = (estimate.value, estimate.low, estimate.high)
    if not estimate.reliable:
        value, low, high = estimate.withheld or (math.nan, math.nan, math.nan)
    return {"value": value, "low": low, "high": high, "told": estimate.reliable, "reasons": list(estimate.reasons)}


def find_eces(calibration: dict[str, list[float]], home: float, value: float | None, truth: float) -> dict[str, float]:
    """Return the ECE raw, with the temperature of home, by the estimate, and by the true accuracy."""
    logarithms, eces = np.log(TEMPERATURES), calibration["ece"]
    confidences = np.array(calibration["confidence"])

    def at(logarithm: float) -> float:
        return round(float(np.interp(logarithm, logarithms, eces)), 5)

    def by_confidence(wanted: float) -> float:
        # Confidence falls as the temperature rises.
        return at(float(np.interp(wanted, confidences[::-1], logarithms[::-1])))

    return {
        "raw": at(0.0),
        "home": at(math.log(home)),
        "estimate": at(math.log(home)) if value is None else by_confidence(value),
        "oracle": by_confidence(truth),
    }


def judge(options: argparse.Namespace) -> None:
    judged: list[Row] = []
    runs = read_runs(options.out)
    for run in runs:
        estimators: dict[frozenset[str], Estimator] = {}
        for row in run.rows:
            for battery in ("without family", "whole"):
                families = frozenset(find_families(row["case"]) if battery == "without family" else ())
                if families not in estimators:
                    estimators[families] = Estimator(leave_out(run.record, set(families)))
                found = judge_case(estimators[families], row)
                judged.append(
                    {
                        "benchmark": run.benchmark,
                        "seed": run.seed,
                        "case": row["case"],
                        "battery": battery,
                        "samples": row["samples"],
                        "left_out": len(run.record.shifts) - len(estimators[families].record.shifts),
                        **found,
                    }
                )
        print(f"{run.benchmark}, seed {run.seed}: {len(run.rows)} cases", flush=True)
    page = write_page(runs, judged)
    print(page)
    if options.page is not None:
        write_atomically(options.page, page.encode())


# ---- the page


def is_benchmark_case(row: Row) -> bool:
    return row["case"] != CLEAN and not _is_harm(row["case"])


TARGETS = {
    "emnist-da": (0.7, 2.0, 95, 0.2, 2.0),
    "cifar-10-c": (1.5, 4.0, 95, 0.3, 3.0),
    "digits": (math.nan, math.nan, math.nan, math.nan, math.nan),
}
"""Aims, in points: error, half-width, share that gets a number, distance from the best candidate, ECE."""


@dataclass(frozen=True)
class Summary:
    """Figures of several cases, in points."""

    cases: int
    told: int
    error: float
    error_of_all: float
    covered: float
    half_width: float
    far_off: int
    error_before: float
    told_before: int
    regret: float
    harm: float
    accuracy: dict[str, float]
    ece: dict[str, float]

    @staticmethod
    def of(rows: Sequence[Row]) -> Summary:
        told = [row for row in rows if row["after"]["told"]]
        before = [row for row in rows if row["before"]["told"]]
        known = [row for row in rows if math.isfinite(row["after"]["value"])]
        held = [row["after"]["low"] <= row["true"] <= row["after"]["high"] for row in told if _has_ends(row)]
        widths = [50 * (row["after"]["high"] - row["after"]["low"]) for row in told if _has_ends(row)]
        errors = [_error(row) for row in told]
        names = ("raw", "home", "estimate", "oracle")
        return Summary(
            len(rows),
            len(told),
            mean(errors) if errors else math.nan,
            mean(map(_error, known)) if known else math.nan,
            100 * mean(held) if held else math.nan,
            median(widths) if widths else math.nan,
            sum(error > 10 for error in errors),
            mean(100 * abs(row["before"]["value"] - row["true_before"]) for row in before) if before else math.nan,
            len(before),
            mean(100 * (row["best"] - row["true"]) for row in rows),
            max(100 * (row["true_before"] - row["true"]) for row in rows),
            {name: 100 * mean(row[name] for row in rows) for name in ("true_before", "bufr", "true", "best")},
            {name: 100 * mean(row["ece"][name] for row in rows) for name in names},
        )


def _has_ends(row: Row) -> bool:
    return row["after"]["low"] is not None


def _error(row: Row) -> float:
    return float(100 * abs(row["after"]["value"] - row["true"]))


PAGE = """# Estimates without labels

Made by `python benchmarks/estimates.py judge --page docs/results/estimates.md` from the stored cells in
`results/estimates` and from nothing else.

Half of the test images rehearse at home, the other half is the site; no image is in both. The site is adapted to by
every candidate and read without labels. For the headline, maps are fitted without every rehearsed shift of the family
of the test shift. *Told* are the targets that get a number; the others are told that nobody can know, and why. All
figures are percentage points unless they are counts. EMNIST is rebuilt, with stand-ins for the textures of five
backgrounds; CIFAR-10-C is regenerated.

**These cells were looked at while the estimator was built**: how many maps it takes the median of, how intervals may
grow, and from which gain on a candidate is preferred were chosen among a few values by what they gave here. Figures on
models and devices that nobody has looked at may be worse.

## The benchmarks

{benchmarks}

*Error* is the mean absolute error of the estimate after `auto`. *As if told* is that of all targets, withheld estimates
included. *Held* is the share of 90 % intervals that hold the truth. *Below best* is how far the returned model is below
the best candidate, which no site could know. *Far off* counts estimates that were told and are off by more than 10
points.

## Calibration

ECE of the returned model (10 bins): as it is, with the temperature found at home, with the temperature that makes the
mean confidence equal to the estimate (that of home where no estimate holds), and with the one that makes it equal to
the true accuracy. Temperatures are interpolated on a grid of 31.

{calibration}

## No harm

Cases in which adapting can only do harm, or nearly so: unshifted data, other class shares, few samples, a class that
the model does not know, inverted images. *Worst* is the largest loss of what `auto` returns against the untouched
model.

{harm}

## Families

Intervals that hold the truth, by family of the test shift, all benchmarks together, with the standard error of a share.

{families}
"""


def write_page(runs: Sequence[Run], judged: Sequence[Row]) -> str:
    """Return the page in Markdown."""
    names = list(dict.fromkeys(row["benchmark"] for row in judged))
    calibration = ["| benchmark | raw | home | by the estimate | by the truth |", "|" + "---|" * 5]
    for name in names:
        eces = Summary.of(_of(judged, name)).ece.values()
        calibration.append(f"| {name} | " + " | ".join(f"{value:.1f}" for value in eces) + " |")
    parts = {
        "benchmarks": _tabulate_benchmarks(judged, names),
        "calibration": calibration,
        "harm": _tabulate_harm(judged, names),
        "families": _tabulate_families(judged),
    }
    lines = [PAGE.format(**{name: "\n".join(part) for name, part in parts.items()})]
    for run in runs:
        lines += [f"## {run.benchmark}, seed {run.seed}", "", *_describe_run(run), "", *_tabulate_run(run, judged), ""]
    return "\n".join(lines)


def _of(judged: Sequence[Row], name: str, battery: str = "without family") -> list[Row]:
    return [row for row in judged if row["benchmark"] == name and row["battery"] == battery and is_benchmark_case(row)]


def _tabulate_benchmarks(judged: Sequence[Row], names: Sequence[str]) -> list[str]:
    lines = [
        "| benchmark | maps | targets | told | error | as if told | held | half-width | far off | error before | "
        "untouched | always bufr | auto | best | below best |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        for battery in ("without family", "whole"):
            found = Summary.of(_of(judged, name, battery))
            accuracy = found.accuracy
            before = f"{found.error_before:.1f} ({found.told_before} told)" if found.told_before else "–"
            lines.append(
                f"| {name} | {battery} | {found.cases} | {found.told} | {found.error:.1f} | {found.error_of_all:.1f} | "
                f"{found.covered:.0f} % | {found.half_width:.1f} | {found.far_off} | {before} | "
                f"{accuracy['true_before']:.1f} | {accuracy['bufr']:.1f} | "
                f"{accuracy['true']:.1f} | {accuracy['best']:.1f} | {found.regret:.2f} |"
            )
        error, width, told, regret, _ = TARGETS.get(name, (math.nan,) * 5)
        if math.isfinite(error):
            lines.append(
                f"| {name} | *aim* | | {told:.0f} % | {error} | | 85 % | {width:.0f} | 0 | | | | | | {regret} |"
            )
    return lines


def _tabulate_harm(judged: Sequence[Row], names: Sequence[str]) -> list[str]:
    lines = ["| case | seeds | untouched | always bufr | auto | worst | told | largest error told |", "|" + "---|" * 8]
    for name in names:
        own = [row for row in judged if row["benchmark"] == name and row["battery"] == "whole"]
        own = [row for row in own if not is_benchmark_case(row)]
        for case in dict.fromkeys(row["case"] for row in own):
            rows = [row for row in own if row["case"] == case]
            told = [_error(row) for row in rows if row["after"]["told"]]
            worst = max(100 * (row["true_before"] - row["true"]) for row in rows)
            values = (100 * mean(row[key] for row in rows) for key in ("true_before", "bufr", "true"))
            lines.append(
                f"| {name}, {case} | {len(rows)} | "
                + " | ".join(f"{value:.1f}" for value in values)
                + f" | {worst:.1f} | {len(told)} | {f'{max(told):.1f}' if told else '–'} |"
            )
    return lines


def _tabulate_families(judged: Sequence[Row]) -> list[str]:
    lines = ["| family | told | held |", "|---|---|---|"]
    for family in FAMILIES:
        rows = [
            row
            for row in judged
            if row["battery"] == "without family" and is_benchmark_case(row) and family in find_families(row["case"])
        ]
        told = [row for row in rows if row["after"]["told"] and _has_ends(row)]
        if not told:
            continue
        share = mean(row["after"]["low"] <= row["true"] <= row["after"]["high"] for row in told)
        error = math.sqrt(max(share * (1 - share), 0.25 / len(told)) / len(told))
        lines.append(f"| {family} | {len(told)} of {len(rows)} | {100 * share:.0f} ± {100 * error:.0f} % |")
    return lines


def _describe_run(run: Run) -> list[str]:
    manifest = next(iter(run.manifests.values()))
    model = manifest["source_models"][str(run.seed)]
    remark = f" {manifest['remark']}" if "remark" in manifest else ""
    text = (
        f"{run.record.samples:,} images rehearse, {manifest['site_samples']:,} are the site. Source model "
        f"`{model['file']}`, SHA-256 of its weights `{model['weights_sha256'][:12]}`; "
        f"{manifest['environment']['device']}, torch {manifest['environment']['torch']}.{remark}"
    )
    return [fill(text, 118), "", "```", str(cross_fit(run.record)), "```"]


def _tabulate_run(run: Run, judged: Sequence[Row]) -> list[str]:
    lines = ["| case | before, told | true | after, told | true | best | what was done |", "|" + "---|" * 7]
    for row in judged:
        if (row["benchmark"], row["seed"]) != (run.benchmark, run.seed):
            continue
        if row["battery"] != ("without family" if is_benchmark_case(row) else "whole"):
            continue
        done = f"{row['chosen']}" if row["kind"] == "shifted" else f"left alone: {row['kind']}"
        done = done.replace(UNTOUCHED, "left alone")
        lines.append(
            f"| {row['case']} | {_write(row['before'])} | {100 * row['true_before']:.1f} | {_write(row['after'])} | "
            f"{100 * row['true']:.1f} | {100 * row['best']:.1f} | {done} |"
        )
    return lines


def _write(estimate: Row) -> str:
    if not estimate["told"]:
        return "–"
    ends = "" if estimate["low"] is None else f" ({100 * estimate['low']:.1f} to {100 * estimate['high']:.1f})"
    return f"{100 * estimate['value']:.1f}{ends}"


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
    second = verbs.add_parser("judge", help="make the estimates from stored cells, and the page")
    second.add_argument("--out", type=Path, default=Path("results/estimates"), help="folder of the stored cells")
    second.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    (measure if options.verb == "measure" else judge)(options)


if __name__ == "__main__":
    main()
