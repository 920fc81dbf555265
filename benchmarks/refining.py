"""What does refining a restored model gain: information maximisation, or self-training with anchors from home?

    python benchmarks/refining.py --device cpu
    python benchmarks/refining.py emnist-da --data-root DATA --models bench --seeds 123 --time-limit 500

Each shift of a benchmark is mended by BUFR. From that one state go, with several rates: `im`, the loss of SHOT-IM;
`im+fr`, the same beside the alignment loss; `anchored`, self-training with labels on which the head, the nearest class
mean of home and a second look at the input agree; `pulled`, features drawn to the class mean of home; and mixtures.
Class means, shares and the variance within classes are those of the model's own answers at home, without labels. For
each: accuracy, ECE as it is and with the temperature that makes the mean confidence equal to the accuracy, and the
label-free signals, by epoch. A run that was cut off goes on from `--out`.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench_models import Deadline, Given, RowFile, keep_targets, open_benchmark
from shiftmend.engine.history import Epoch
from shiftmend.engine.method import Activations, Method, Network, Objective, ReadActivations, Stage
from shiftmend.evaluation.classification import ClassificationMetrics
from shiftmend.inputs.feed import Feed
from shiftmend.methods.fr import FR
from shiftmend.methods.prediction import information_maximisation
from shiftmend.passes.evaluation_pass import Observation, run_pass, without_labels
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench.resources import inputs_of
from shiftmend.research.bench.suite import find
from shiftmend.utils.devices import resolve_device

KEY = ("benchmark", "shift", "seed", "variant", "rate")
RATES = {"cifar-10-c": (1e-4, 1e-3, 1e-2)}
RATES_OF_CNN = (1e-3, 1e-2, 1e-1)
"""Rates of refining: about a tenth to ten times of what was published for SHOT-IM on ResNets, a hundredth to once of
what was published for the CNN."""
EPOCHS = 10
SCORED = (0, 1, 3, 5, 10)
"""Epochs that are scored with labels; the signals are there for each."""
NOTHING = "nothing"
SMALLEST_VARIANCE = 1e-6

Row = dict[str, Any]


@dataclass(frozen=True)
class Anchors:
    """Class means `[classes, units]`, the variance within classes `[units]` and shares `[classes]` of the features.

    The class of a sample at home is what the model answers there, so that no labels are needed.
    """

    means: Tensor
    variance: Tensor
    shares: Tensor

    def to(self, device: torch.device) -> Anchors:
        return Anchors(self.means.to(device), self.variance.to(device), self.shares.to(device))

    def nearest(self, features: Tensor) -> Tensor:
        """Return the likeliest class of each sample, if features were Gaussian and independent within classes."""
        scaled, centres = features.float() / self.variance.sqrt(), self.means / self.variance.sqrt()
        return (-0.5 * torch.cdist(scaled, centres).square() + self.shares.clamp_min(1e-8).log()).argmax(1)

    def distance(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return the mean squared distance of each sample to its class mean, in variances within classes."""
        return ((features.float() - self.means[classes]).square() / self.variance).mean(1)


class AnchorTracker:
    """Accumulator of anchors over batches, in double precision on the CPU."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def update(self, seen: Observation) -> None:
        features, logits = seen.activations["features"].double(), seen.activations["logits"]
        members = functional.one_hot(logits.argmax(1), logits.shape[1]).double()
        new = [members.sum(0), members.T @ features, members.T @ features.square()]
        self._sums = [old + part for old, part in zip(self._sums, new, strict=True)] if self._sums else new

    def result(self) -> Anchors:
        counts, sums, squares = self._sums
        means = sums / counts.clamp_min(1)[:, None]
        within = (squares - counts[:, None] * means.square()).sum(0) / counts.sum()
        variance = within.clamp_min(SMALLEST_VARIANCE * within.max())
        return Anchors(means.float(), variance.float(), (counts / counts.sum()).float())


def find_anchors(given: Given, seed: int, profile: Profile) -> Anchors:
    """Return the anchors of a source model, from the images that its profile was made of."""
    images = given.resources.source("plain").profiled
    feed = Feed(inputs_of(images), batch_size=1024, device=given.device, preprocess=given.benchmark.preprocess)
    taps = {name: profile.specs[name] for name in ("features", "logits")}
    tracker = AnchorTracker()
    run_pass(given.model(seed), without_labels(feed.batches()), tracker.update, taps=taps)
    return tracker.result()


@dataclass(frozen=True, kw_only=True)
class Refinement(Method):
    """A sum of losses on all blocks. Weights of 0 leave a loss out.

    Attributes:
        im: Weight of information maximisation.
        align: Weight of the alignment loss of FR.
        cross_entropy: Weight of the cross-entropy to anchored labels.
        pull: Weight of the distance to the class mean of home.
        confidence: Probability that a label must have.
    """

    name: ClassVar[str] = "refinement"
    needs_profile: ClassVar[bool] = True
    minimises_entropy: ClassVar[bool] = True
    learning_rate: float
    epochs: int = EPOCHS
    im: float = 0.0
    align: float = 0.0

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        return ("features", "logits")

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("all blocks", self.epochs, self.learning_rate, network.below_features)]

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        aligned = FR().objective(profile, device) if self.align else None

        def losses(activations: Activations) -> dict[str, Tensor]:
            terms: dict[str, Tensor] = {}
            if self.im:
                terms["im"] = self.im * information_maximisation(activations["logits"])
            if aligned is not None:
                terms |= {name: self.align * term for name, term in aligned(activations).items()}
            return terms

        return losses


@dataclass(frozen=True, kw_only=True)
class Anchored(Refinement):
    """Refinement with labels that are found anew before each epoch.

    A label is what the head says in eval mode. It counts if it is certain enough, if the nearest class mean of home is
    of the same class, and if a second look agrees, with the statistics of the batch and the weights of the step.
    """

    name: ClassVar[str] = "anchored"
    online: ClassVar[bool] = False
    by_sample: ClassVar[bool] = True
    cross_entropy: float = 0.0
    pull: float = 0.0
    confidence: float = 0.9
    anchors: Anchors = field(repr=False, compare=False)

    def hyperparameters(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "anchors"}

    def targets(self, network: Network, read: ReadActivations) -> Tensor:
        seen = read({name: network.taps[name] for name in ("features", "logits")})
        certainty, labels = torch.softmax(seen["logits"].float(), 1).max(1)
        agreed = self.anchors.to(labels.device).nearest(seen["features"]) == labels
        return torch.where(agreed & (certainty >= self.confidence), labels, -1)

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        others, anchors = super().objective(profile, device), self.anchors.to(device)

        def losses(activations: Activations) -> dict[str, Tensor]:
            logits, labels = activations["logits"].float(), activations["targets"]
            counted = (logits.argmax(1) == labels).float()
            number, labels = counted.sum().clamp_min(1), labels.clamp_min(0)
            terms = others(activations)
            if self.cross_entropy:
                each = functional.cross_entropy(logits, labels, reduction="none")
                terms["anchored"] = self.cross_entropy * (counted * each).sum() / number
            if self.pull:
                far = anchors.distance(activations["features"], labels)
                terms["pulled"] = self.pull * (counted * far).sum() / number
            return terms

        return losses


VARIANTS: dict[str, dict[str, Any]] = {
    "im": {"im": 1.0},
    "im+fr": {"im": 1.0, "align": 1.0},
    "anchored": {"cross_entropy": 1.0},
    "anchored, agreement alone": {"cross_entropy": 1.0, "confidence": 0.0},
    "pulled": {"pull": 0.1},
    "im+anchored": {"im": 1.0, "cross_entropy": 0.3},
    "im+pulled": {"im": 1.0, "pull": 0.1},
}
USUAL = ("im", "im+fr", "anchored", "anchored, agreement alone", "im+anchored")


def make_method(variant: str, rate: float, anchors: Anchors) -> Method:
    options = VARIANTS[variant]
    if options.keys() & {"cross_entropy", "pull"}:
        return Anchored(learning_rate=rate, anchors=anchors, **options)
    return Refinement(learning_rate=rate, **options)


# ---- measuring


@torch.no_grad()
def score(given: Given, model: nn.Module, feed: Feed) -> Row:
    """Return accuracy and calibration, as they are and with the temperature that fits the mean confidence."""
    seen: list[tuple[Tensor, Tensor]] = []
    run_pass(model, feed.labelled_batches(), lambda batch: seen.append((_logits(batch), _labels(batch))))
    logits, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
    plain = _metrics(logits, labels)
    temperature = fit_temperature(logits, plain.accuracy)
    return {
        "accuracy": round(plain.accuracy, 6),
        "ece": round(plain.ece, 6),
        "ece_tempered": round(_metrics(logits / temperature, labels).ece, 6),
        "temperature": round(temperature, 4),
    }


def _logits(batch: Observation) -> Tensor:
    assert isinstance(batch.output, Tensor)
    return batch.output.float()


def _labels(batch: Observation) -> Tensor:
    assert batch.labels is not None
    return batch.labels


def _metrics(logits: Tensor, labels: Tensor) -> Any:
    metrics = ClassificationMetrics(device=logits.device)
    metrics.update(logits, labels)
    return metrics.compute()


def fit_temperature(logits: Tensor, accuracy: float) -> float:
    """Return the temperature at which the mean confidence equals the accuracy, by bisection."""
    low, high = math.log(0.02), math.log(50.0)
    for _ in range(30):
        middle = (low + high) / 2
        confidence = float(torch.softmax(logits / math.exp(middle), 1).amax(1).mean())
        low, high = (middle, high) if confidence > accuracy else (low, middle)
    return math.exp((low + high) / 2)


def refine(
    given: Given, mended: nn.Module, inputs: Tensor, labels: Tensor, profile: Profile, method: Method, seed: int
) -> Row:
    """Refine a mended model, and score some of its epochs."""
    feed = _feed(given, inputs, labels)
    epochs: list[Row] = []

    def look(model: nn.Module, row: Epoch) -> None:
        scores = score(given, model, feed) if row.epoch in SCORED else {}
        epochs.append({"epoch": row.epoch, "loss": row.loss} | _rounded(row.signals) | scores)

    started = time.perf_counter()
    given.adapt(mended, inputs, profile, method, seed, on_epoch=look, keep="last")
    return {"epochs": epochs, "seconds": round(time.perf_counter() - started, 3)}


def _feed(given: Given, inputs: Tensor, labels: Tensor) -> Feed:
    return Feed((inputs, labels), batch_size=2048, device=given.device, preprocess=given.benchmark.preprocess)


def _rounded(signals: dict[str, float]) -> Row:
    return {name: float(f"{value:.6g}") for name, value in signals.items()}


@dataclass(frozen=True)
class Wishes:
    """What is to be run."""

    shifts: tuple[str, ...]
    seeds: tuple[int, ...]
    variants: tuple[str, ...]
    rates: tuple[float, ...]
    restoring: dict[str, Any]

    def settings(self) -> list[tuple[str, float]]:
        """List variants and rates: information maximisation at each rate first."""
        return [(variant, rate) for variant in self.variants for rate in self.rates]


def measure_all(given: Given, wishes: Wishes, file: RowFile, deadline: Deadline) -> None:
    """Refine from what BUFR gives for each shift and seed, where the file has no row yet."""
    manifest = given.describe(wishes.seeds) | {"restoring": {"method": "bufr", **wishes.restoring}}
    name = given.benchmark.name
    for seed in wishes.seeds:
        profile, anchors = given.profile(seed), None
        for shift in wishes.shifts:
            todo = [each for each in wishes.settings() if not file.has(name, shift, seed, *each)]
            if not todo or not deadline.allows():
                continue
            anchors = anchors or find_anchors(given, seed, profile)
            inputs, labels = (part.to(given.device) for part in given.target(shift))
            restored = given.adapt(given.model(seed), inputs, profile, "bufr", seed, **wishes.restoring)
            deadline.done()
            if not file.has(name, shift, seed, NOTHING, 0.0):
                at = (
                    {"epoch": 0}
                    | _rounded(restored.kept.signals)
                    | score(given, restored.model, _feed(given, inputs, labels))
                )
                values = {"epochs": [at], "seconds": restored.manifest["seconds"]}
                print(describe_row(file.add((name, shift, seed, NOTHING, 0.0), values, manifest)), flush=True)
            for variant, rate in todo:
                if not deadline.allows():
                    break
                method = make_method(variant, rate, anchors)
                values = refine(given, restored.model, inputs, labels, profile, method, seed)
                deadline.done()
                print(describe_row(file.add((name, shift, seed, variant, rate), values, manifest)), flush=True)
    if deadline.skipped:
        print("the time is up; the rest is left for another run", flush=True)


def describe_row(row: Row) -> str:
    scored = [at for at in row["epochs"] if "accuracy" in at]
    course = ", ".join(f"{100 * at['accuracy']:.2f}" for at in scored)
    first, last = row["epochs"][0], row["epochs"][-1]
    text = f"{row['benchmark']} {row['shift']}, seed {row['seed']}: {row['variant']}"
    text += f" at {row['rate']:g}" if row["variant"] != NOTHING else ""
    text += f": {course} %, ECE {100 * last['ece']:.1f} ({100 * last['ece_tempered']:.1f} tempered)"
    return text + f", slices {first['slices']:.4f} to {last['slices']:.4f}, {row['seconds']:.1f} s"


# ---- tables


@dataclass(frozen=True)
class Gain:
    """The gain of a variant after some epochs, over the shifts and seeds that it was run on."""

    runs: int
    points: float
    error: float | None
    """Standard error of the gain over shifts and seeds; None for a single run."""
    better: int
    worst: float
    ece: float
    ece_tempered: float
    slices_ratio: float
    largest_ratio: float


def find_gains(rows: Sequence[Row], benchmark: str) -> dict[tuple[str, float, int], Gain]:
    """Return gains by variant, rate and epoch."""
    own = [row for row in rows if row["benchmark"] == benchmark and row["variant"] != NOTHING]
    found = {}
    for variant, rate in dict.fromkeys((row["variant"], row["rate"]) for row in own):
        some = [row["epochs"] for row in own if (row["variant"], row["rate"]) == (variant, rate)]
        for epoch in SCORED[1:]:
            pairs = [(epochs[0], epochs[epoch]) for epochs in some if len(epochs) > epoch]
            if not pairs:
                continue
            points = [100 * (after["accuracy"] - before["accuracy"]) for before, after in pairs]
            ratios = [after["slices"] / before["slices"] for before, after in pairs]
            found[variant, rate, epoch] = Gain(
                len(pairs),
                mean(points),
                stdev(points) / math.sqrt(len(points)) if len(points) > 1 else None,
                sum(gain > 0 for gain in points),
                min(points),
                100 * mean(after["ece"] for _, after in pairs),
                100 * mean(after["ece_tempered"] for _, after in pairs),
                mean(ratios),
                max(ratios),
            )
    return found


def tabulate(rows: Sequence[Row], benchmark: str) -> str:
    """Return a table of the gains in points, one line for each variant, rate and number of epochs."""
    titles = ("variant", "rate", "epochs", "gain", "better", "worst", "ECE", "tempered", "slices, times", "most")
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    start = [row["epochs"][0] for row in rows if row["benchmark"] == benchmark and row["variant"] == NOTHING]
    if start:
        figures = [f"{100 * mean(at[name] for at in start):.2f}" for name in ("accuracy", "ece", "ece_tempered")]
        lines.append(f"| restored | – | – | {figures[0]} % | – | – | {figures[1]} | {figures[2]} | 1 | – |")
    for (variant, rate, epoch), gain in find_gains(rows, benchmark).items():
        error = "" if gain.error is None else f" ± {gain.error:.2f}"
        lines.append(
            f"| {variant} | {rate:g} | {epoch} | {gain.points:+.2f}{error} | {gain.better} of {gain.runs} "
            f"| {gain.worst:+.2f} | {gain.ece:.2f} | {gain.ece_tempered:.2f} | {gain.slices_ratio:.2f} "
            f"| {gain.largest_ratio:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", nargs="?", default="digits", help="digits, emnist-da, cifar-10-c, ...")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--models", type=Path, default=Path("bench"), help="folder with sources and profiles")
    parser.add_argument("--train", action="store_true", help="train source models that are missing")
    parser.add_argument("--targets", type=Path, help="folder that keeps shifted images")
    parser.add_argument("--shifts", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="*")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(USUAL))
    parser.add_argument("--rates", type=float, nargs="*")
    parser.add_argument("--epochs-per-block", type=int, help="of BUFR; by default it ends by itself")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin nothing that would last longer")
    parser.add_argument("--out", type=Path, default=Path("refining.json"))
    options = parser.parse_args(arguments)
    deadline, file = Deadline(options.time_limit), RowFile(options.out, KEY)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    benchmark = find(options.benchmark)
    shifts = tuple(options.shifts or benchmark.shifts)
    if options.targets is not None:
        keep_targets(options.benchmark, shifts, options.data_root, options.targets)
    given = open_benchmark(
        options.benchmark,
        options.models,
        options.data_root,
        str(resolve_device(options.device)),
        targets=options.targets,
        may_train=options.train or options.benchmark == "digits",
    )
    restoring = {} if options.epochs_per_block is None else {"epochs_per_block": options.epochs_per_block}
    rates = tuple(options.rates or RATES.get(options.benchmark, RATES_OF_CNN))
    seeds = tuple(options.seeds or benchmark.seeds[:1])
    measure_all(given, Wishes(shifts, seeds, tuple(options.variants), rates, restoring), file, deadline)
    for name in dict.fromkeys(row["benchmark"] for row in file.rows):
        print(f"\n{name}\n{tabulate(file.rows, name)}")


if __name__ == "__main__":
    main()
