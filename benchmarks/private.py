"""What does privacy cost, and what does a profile without it give away?

    python benchmarks/private.py accuracy mnist --data-root DATA
    python benchmarks/private.py accuracy emnist-da --data-root DATA --models MODELS --device cuda
    python benchmarks/private.py accuracy cifar-10-c --data-root DATA --models MODELS --device cuda --draws 1
    python benchmarks/private.py membership --data-root DATA
    python benchmarks/private.py page --page docs/results/private.md

`accuracy` adapts by FR and BUFR with exact profiles and with private ones, to three shifts of a benchmark. `mnist` is a
small network for a CPU. Noise is drawn anew `--draws` times. A run that was cut off goes on.

`membership` attacks the stored numbers. The model is trained on other images. An attacker has the model, the profile,
an image, and images of the same population, and asks if the image was at home. Half of the images asked about were.
Extremes: a value beyond the stored range was not at home, and one that is equal to its end was. Counts, class counts:
how much more do the bins of an image hold than expected, in deviations? All: the sum of the three, standardised.
The threshold is chosen on half of the images, and the advantage (true less false positives) measured on the others.

A machine without OpenDP can use noise that OpenDP drew elsewhere: `noise --noise FILE` draws, `--noise FILE` uses it.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import shiftmend
from bench_models import Deadline, Given, RowFile, keep_targets, open_benchmark
from shiftmend import shifts
from shiftmend.adaptation.result import environment
from shiftmend.profiles import privacy
from shiftmend.profiles.fingerprints import weights
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench.resources import inputs_of
from shiftmend.research.datasets import digits
from shiftmend.stats.histograms import Bins
from shiftmend.utils.files import write_atomically

ACCURACY = ("benchmark", "shift", "method", "epsilon", "draw", "seed")
MEMBERSHIP = ("samples", "epsilon", "attack", "draw")
EPSILONS = (8.0, 2.0, 1.0, 0.5)
EXACT = 0.0
"""Epsilon of rows without privacy."""
DELTA = 1e-6
METHODS = ("bufr", "fr")
SHIFTS = {
    "mnist": ("stripe", "contrast", "impulse_noise"),
    "emnist-da": ("crystals", "fog", "stripe"),
    "cifar-10-c": ("contrast", "gaussian_noise", "fog"),
}
MNIST_SHIFTS: dict[str, tuple[str, int | None]] = {
    "stripe": ("emnist-da/stripe", None),
    "contrast": ("cifar-c/contrast", 5),
    "impulse_noise": ("cifar-c/impulse_noise", 5),
}
SITE_SAMPLES = 4000
NOISE_DRAWS = 1 << 20
NOISE_SCALE = 1 << 20

Row = dict[str, Any]


def build_network(classes: int = 10) -> nn.Sequential:
    """Build three convolutions and a hidden layer, all with BatchNorm, for images `[N, 1, 14, 14]`."""

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    hidden = nn.Sequential(nn.Flatten(), nn.Linear(48 * 16, 96), nn.BatchNorm1d(96), nn.ReLU())
    return nn.Sequential(block(1, 16, 2), block(16, 32, 2), block(32, 48, 1), hidden, nn.Linear(96, classes))


def preprocess(images: Tensor) -> Tensor:
    """Scale bytes to -1 to 1, and average 2 x 2 pixels."""
    return nn.functional.avg_pool2d(images.float() / 127.5 - 1, 2)


def train(images: Tensor, labels: Tensor, epochs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = build_network()
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(preprocess(images[rows])), labels[rows]).backward()
            optimiser.step()
    return model.eval()


# ---- noise that was drawn elsewhere


def draw_noise(path: Path) -> None:
    """Draw noise, and what each epsilon is worth, by OpenDP; keep both in a file."""
    noise, _ = privacy.add_noise(torch.zeros(NOISE_DRAWS, dtype=torch.int64), 1.0, float(NOISE_SCALE))
    rhos = [privacy.find_rho(epsilon, DELTA) for epsilon in EPSILONS]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(
            file, noise=noise.numpy().astype(np.int32), epsilons=np.array(EPSILONS), rhos=np.array(rhos)
        )


def use_noise(path: Path | None) -> AbstractContextManager[Any]:
    """Let profiles take their noise from a file, each time from a random place of it; None leaves it to OpenDP."""
    if path is None:
        return nullcontext()
    with np.load(path) as file:
        noise = torch.from_numpy(file["noise"]).double() / NOISE_SCALE
        worth = dict(zip(file["epsilons"].tolist(), file["rhos"].tolist(), strict=True))
    rng = np.random.default_rng()

    def add_noise(values: Tensor, sensitivity: float, scale: float) -> tuple[Tensor, float]:
        rolled = noise.roll(int(rng.integers(len(noise))))
        repeated = rolled.repeat(-(-len(values) // len(noise)))[: len(values)]
        return values + (repeated * scale).round().long(), sensitivity**2 / (2 * scale**2)

    return mock.patch.multiple(privacy, add_noise=add_noise, find_rho=lambda epsilon, delta: worth[epsilon])


# ---- accuracy


def make_profile(model: nn.Module, inputs: Any, epsilon: float, **options: Any) -> Profile:
    private = None if epsilon == EXACT else shiftmend.Privacy(epsilon=epsilon, delta=DELTA)
    return shiftmend.profile(model, inputs, private=private, progress=False, **options)


def measure_accuracy(options: argparse.Namespace, file: RowFile) -> None:
    deadline = Deadline(None if options.time_limit is None else 60 * options.time_limit)
    if options.world == "mnist":
        measure_mnist(options, file, deadline)
        return
    names = SHIFTS[options.world]
    if options.targets is not None:
        keep_targets(options.world, names, options.data_root, options.targets, options.workers)
    given = open_benchmark(
        options.world, options.models, options.data_root, options.device, targets=options.targets, may_train=True
    )
    if options.epochs is not None:
        given = _shorten(given, options.epochs)
    for seed in options.seeds or given.benchmark.seeds[:1]:
        model, manifest = given.model(seed), given.describe([seed])
        bins = Bins(8, temperature=given.protocol.temperature)
        source = inputs_of(given.resources.source("plain").profiled)
        profiles: dict[tuple[float, int], Profile] = {}
        for epsilon, draw in list_profiles(options):
            for shift in names:
                for method in options.methods:
                    key = (options.world, shift, method, epsilon, draw, seed)
                    if file.has(*key) or not deadline.allows():
                        continue
                    if (epsilon, draw) not in profiles:
                        profiles = {
                            (epsilon, draw): make_profile(
                                model,
                                source,
                                epsilon,
                                preprocess=given.benchmark.preprocess,
                                device=given.device,
                                bins=bins,
                            )
                        }
                    profile = profiles[epsilon, draw]
                    inputs, labels = given.target(shift)
                    result = given.adapt(model, inputs, profile, method, seed)
                    accuracy = given.score(result.model, inputs, labels).accuracy
                    add_accuracy(file, key, accuracy, profile, result, manifest)
                    deadline.done()


def _shorten(given: Given, epochs: int) -> Given:
    """Train source models for fewer epochs than published."""
    sources = {name: replace(recipe, epochs=epochs) for name, recipe in given.benchmark.sources.items()}
    given.resources.benchmark = replace(given.benchmark, sources=sources)
    return given


def list_profiles(options: argparse.Namespace) -> list[tuple[float, int]]:
    private = [(epsilon, draw) for draw in range(options.draws) for epsilon in EPSILONS]
    return [(EXACT, 0), *private]


def measure_mnist(options: argparse.Namespace, file: RowFile, deadline: Deadline) -> None:
    split, test = (digits.mnist(part, options.data_root) for part in ("train", "test"))
    assert split.labels is not None
    assert test.labels is not None
    labels = test.labels[:SITE_SAMPLES].long()
    for seed in options.seeds or [0]:
        model = train(split.images, split.labels.long(), options.epochs or 2, seed)
        manifest = {"benchmark": "mnist", "environment": describe_versions("cpu"), "weights_sha256": weights(model)}
        for epsilon, draw in list_profiles(options):
            profile = None
            for shift in SHIFTS["mnist"]:
                for method in options.methods:
                    key = ("mnist", shift, method, epsilon, draw, seed)
                    if file.has(*key) or not deadline.allows():
                        continue
                    if profile is None:
                        profile = make_profile(model, split.images, epsilon, preprocess=preprocess)
                    name, severity = MNIST_SHIFTS[shift]
                    images = shifts.apply(name, test.images[:SITE_SAMPLES], severity=severity, seed=seed)[:, :1]
                    result = shiftmend.adapt(
                        model,
                        images,
                        profile,
                        method,
                        preprocess=preprocess,
                        seed=seed,
                        calibrate=False,
                        progress=False,
                    )
                    scores = shiftmend.evaluate(result.model, (images, labels), preprocess=preprocess, progress=False)
                    assert isinstance(scores, shiftmend.Scores)
                    add_accuracy(file, key, scores.accuracy, profile, result, manifest)
                    deadline.done()


def describe_versions(device: str) -> Row:
    return {name: value for name, value in environment(torch.device(device)).items() if name != "platform"}


def add_accuracy(
    file: RowFile, key: tuple[Any, ...], accuracy: float, profile: Profile, result: shiftmend.Adaptation, manifest: Row
) -> None:
    promise = profile.privacy
    row = {
        "accuracy": round(accuracy, 5),
        "samples": profile.samples,
        "noise": None if promise is None else round(promise.noise, 2),
        "histograms": None if promise is None else promise.histograms,
        "verdict": None if result.after is None else result.after.verdict,
    }
    file.add(key, row, manifest)
    print(*key, row, flush=True)


# ---- membership


def measure_membership(options: argparse.Namespace, file: RowFile) -> None:
    """Attack profiles of samples that the model was not trained on."""
    deadline = Deadline(None if options.time_limit is None else 60 * options.time_limit)
    split = digits.mnist("train", options.data_root)
    assert split.labels is not None
    order = torch.randperm(len(split.images), generator=torch.Generator().manual_seed(0))
    images, labels = split.images[order], split.labels[order].long()
    model = train(images[:10_000], labels[:10_000], options.epochs or 2, 0)
    manifest = {"environment": describe_versions("cpu"), "weights_sha256": weights(model)}
    with torch.no_grad():
        features = torch.cat([model[:-1](preprocess(part)) for part in images.split(1000)])
        logits = model[-1](features)
    for samples in options.samples:
        for draw in range(options.draws):
            rng = np.random.default_rng([samples, draw])
            places = torch.from_numpy(10_000 + rng.permutation(50_000))
            home, others, reference = places[:samples], places[samples : 2 * samples], places[2 * samples :]
            for epsilon in (EXACT, *EPSILONS):
                if file.has(samples, epsilon, "all", draw) or not deadline.allows():
                    continue
                try:
                    profile = make_profile(model, images[home], epsilon, preprocess=preprocess)
                except shiftmend.ProfileError as error:
                    print(samples, epsilon, draw, error, flush=True)
                    continue
                asked = torch.cat([home, others])
                scores = attack(profile, (features[asked], logits[asked]), (features[reference], logits[reference]))
                for name, values in scores.items():
                    found = measure_advantage(values[: len(home)], values[len(home) :], rng)
                    file.add((samples, epsilon, name, draw), found, manifest)
                    print(samples, epsilon, name, draw, found, flush=True)
                deadline.done()


Taps = tuple[Tensor, Tensor]
"""Features and logits of some images."""


def attack(profile: Profile, asked: Taps, reference: Taps) -> dict[str, Tensor]:
    """Score images, the higher the more likely they were at home."""
    extremes, counts = torch.zeros(len(asked[0])), torch.zeros(len(asked[0]), dtype=torch.float64)
    for name, own, known in zip(("features", "logits"), asked, reference, strict=True):
        tap = profile.taps[name]
        # Batches of another size change the last digits.
        lowest, highest = (torch.isclose(own, end, rtol=1e-5, atol=1e-6) for end in (tap.low, tap.high))
        outside = ((own < tap.low) & ~lowest) | ((own > tap.high) & ~highest)
        extremes += (((lowest & (tap.low != 0)) | highest) & tap.usable).sum(1) - (outside & tap.usable).sum(1)
        expected = tap.count(known).double()
        # Homer's statistic: a bin that holds more than expected speaks for those that lie in it.
        weight = (tap.probabilities.double() - expected) / (expected * (1 - expected)).clamp_min(1e-4)
        for start in range(0, len(own), 1000):
            shares = torch.stack([tap.count(row.unsqueeze(0)).double() for row in own[start : start + 1000]])
            counts[start : start + 1000] += ((shares - expected) * weight).sum((1, 2))
    answers = profile.statistics["answers"].tensors()["shares"].double()
    expected_answers = reference[1].argmax(1).bincount(minlength=len(answers)).double() / len(reference[1])
    classes = ((answers - expected_answers) / expected_answers)[asked[1].argmax(1)]
    parts = {"extremes": extremes.double(), "counts": counts, "class counts": classes}
    together = torch.stack([(one - one.mean()) / one.std().clamp_min(1e-12) for one in parts.values()]).sum(0)
    return parts | {"all": together}


def measure_advantage(inside: Tensor, outside: Tensor, rng: np.random.Generator) -> Row:
    """Choose a threshold on one half of the images, and measure true less false positives on the other."""
    halves = [torch.from_numpy(rng.permutation(len(inside))).chunk(2) for _ in range(2)]
    known = inside[halves[0][0]], outside[halves[1][0]]
    thresholds = torch.unique(torch.cat(known))
    rates = [torch.searchsorted(one.sort().values, thresholds) / len(one) for one in known]
    best = thresholds[int((rates[1] - rates[0]).argmax())]
    true, false = ((one[half[1]] >= best).double().mean() for one, half in zip((inside, outside), halves, strict=True))
    joined = torch.cat([inside, outside])
    ranks = torch.searchsorted(joined.sort().values, joined).double()
    upper = torch.searchsorted(joined.sort().values, joined, right=True).double()
    middle = (ranks + upper)[: len(inside)].mean() / 2
    auc = (float(middle) - len(inside) / 2) / len(outside)
    certain = float((inside > outside.max()).double().mean())
    return {"advantage": round(float(true - false), 4), "auc": round(auc, 4), "certain": round(certain, 5)}


# ---- the page


def write_page(accuracy: RowFile, membership: RowFile) -> str:
    epsilons = (EXACT, *EPSILONS)
    head = " | ".join("none" if epsilon == EXACT else f"{epsilon:g}" for epsilon in epsilons)
    parts = [
        "# Private profiles",
        "Made by `python benchmarks/private.py page` from `results/private.json` and "
        "`results/private-membership.json`, and from nothing else. Epsilon is the budget of the whole profile, with a "
        f"delta of {DELTA:g}; one person is one sample. Noise is OpenDP's.",
        "## What privacy costs",
        "Accuracy in percent after adapting with no option but the method: means over draws of the noise, with their "
        "standard deviation where there are several. *Noise* is that of each count, in samples, at epsilon 1. A dash "
        "was not measured. On a GPU, noise came from a file that OpenDP had drawn.",
    ]
    parts += summarise_losses(accuracy.rows)
    for name in dict.fromkeys(row["benchmark"] for row in accuracy.rows):
        rows = [row for row in accuracy.rows if row["benchmark"] == name]
        manifest = accuracy.manifests[rows[0]["manifest"]]
        parts += [f"### {name}", describe_source(rows, manifest)]
        lines = [f"| shift | method | {head} |", "|" + "---|" * (2 + len(epsilons))]
        for shift, method in dict.fromkeys((row["shift"], row["method"]) for row in rows):
            own = [row for row in rows if (row["shift"], row["method"]) == (shift, method)]
            lines.append(f"| {shift} | `{method}` | {' | '.join(_cell(own, epsilon) for epsilon in epsilons)} |")
        parts.append("\n".join(lines))
    parts += [
        "## What a profile gives away",
        "Advantage of a membership attack over chance (true less false positives; 0 is chance, 1 is certainty), on "
        "samples of MNIST that the model was not trained on. *Certain* is the share of the samples at home that score "
        "above every other one. Differential privacy bounds the advantage by (e^epsilon - 1) / (e^epsilon + 1): "
        + ", ".join(f"{math.tanh(epsilon / 2):.2f} at {epsilon:g}" for epsilon in EPSILONS)
        + ". An attack that finds nothing does not prove that there is nothing to find.",
    ]
    for samples in sorted({row["samples"] for row in membership.rows}):
        rows = [row for row in membership.rows if row["samples"] == samples]
        lines = [f"| {samples:,} samples, attack by | {head} |", "|" + "---|" * (1 + len(epsilons))]
        for name in dict.fromkeys(row["attack"] for row in rows):
            own = [row for row in rows if row["attack"] == name]
            lines.append(f"| {name} | {' | '.join(_advantage(own, epsilon) for epsilon in epsilons)} |")
        exact = [row["certain"] for row in rows if row["attack"] == "extremes" and row["epsilon"] == EXACT]
        lines.append(f"\nCertain by extremes, without privacy: {100 * mean(exact):.1f} % of the samples at home.")
        parts.append("\n".join(lines))
    return "\n\n".join(part if part.startswith(("|", "#")) else fill(part, 120) for part in parts) + "\n"


def describe_source(rows: Sequence[Row], manifest: Row) -> str:
    machine = manifest["environment"]
    private = [row for row in rows if row["epsilon"] == 1.0]
    noise = f" Noise {private[0]['noise']:.0f} in each of {private[0]['histograms']} histograms." if private else ""
    epochs = f", source models of {manifest['source']['epochs']} epochs" if "source" in manifest else ""
    where = "CPU" if machine["device"] == "cpu" else machine["device"]
    remark = f" {manifest['source_remark']}." if manifest.get("source_remark") else ""
    return f"{where}, torch {machine['torch']}, {rows[0]['samples']:,} samples at home{epochs}.{noise}{remark}"


def summarise_losses(rows: Sequence[Row]) -> list[str]:
    """Return the mean loss at each epsilon, over shifts that were measured both ways."""
    exact = {(r["benchmark"], r["shift"], r["method"], r["seed"]): r["accuracy"] for r in rows if r["epsilon"] == EXACT}
    lines = ["| benchmark | method | " + " | ".join(f"{epsilon:g}" for epsilon in EPSILONS) + " |"]
    lines.append("|" + "---|" * (2 + len(EPSILONS)))
    for name, method in dict.fromkeys((row["benchmark"], row["method"]) for row in rows):
        cells = []
        for epsilon in EPSILONS:
            losses = [
                exact[name, row["shift"], method, row["seed"]] - row["accuracy"]
                for row in rows
                if (row["benchmark"], row["method"], row["epsilon"]) == (name, method, epsilon)
                and (name, row["shift"], method, row["seed"]) in exact
            ]
            worst = f" (worst {100 * max(losses):.2f}, {len(losses)} run{'s' * (len(losses) > 1)})" if losses else ""
            cells.append(f"{100 * mean(losses):.2f}{worst}" if losses else "–")
        lines.append(f"| {name} | `{method}` | {' | '.join(cells)} |")
    return [
        "Points lost against the exact profile, mean over shifts and draws (aim: at most 0.5 at epsilon 1):",
        "\n".join(lines),
    ]


def _cell(rows: Sequence[Row], epsilon: float) -> str:
    found = [100 * row["accuracy"] for row in rows if row["epsilon"] == epsilon]
    if not found:
        return "–"
    return f"{mean(found):.1f}" + (f" ± {stdev(found):.1f}" if len(found) > 1 else "")


def _advantage(rows: Sequence[Row], epsilon: float) -> str:
    found = [row["advantage"] for row in rows if row["epsilon"] == epsilon]
    return f"{mean(found):+.3f}" if found else "–"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("accuracy", "membership", "noise", "page"))
    parser.add_argument("world", nargs="?", choices=tuple(SHIFTS), default="mnist")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--models", type=Path, default=Path("bench"), help="folder with sources; missing ones are made")
    parser.add_argument("--targets", type=Path, help="folder that keeps shifted images")
    parser.add_argument("--epochs", type=int, help="train source models for so many epochs, instead of the published")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--samples", type=int, nargs="*", default=[1000, 10_000], help="profiles to attack")
    parser.add_argument("--seeds", type=int, nargs="*")
    parser.add_argument("--draws", type=int, default=3, help="profiles for each epsilon")
    parser.add_argument("--workers", type=int, help="processes that make shifted images")
    parser.add_argument("--time-limit", type=float, metavar="MINUTES", help="begin nothing that would last longer")
    parser.add_argument("--noise", type=Path, help="noise that OpenDP drew elsewhere")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/private.md"))
    options = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    accuracy = RowFile(options.out / "private.json", ACCURACY)
    membership = RowFile(options.out / "private-membership.json", MEMBERSHIP)
    if options.task == "noise":
        draw_noise(options.noise)
    elif options.task == "page":
        write_atomically(options.page, write_page(accuracy, membership).encode())
    else:
        with use_noise(options.noise):
            if options.task == "accuracy":
                measure_accuracy(options, accuracy)
            else:
                measure_membership(options, membership)


if __name__ == "__main__":
    main()
