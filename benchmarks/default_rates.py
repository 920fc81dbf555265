"""Which learning rate should FR and BUFR take for a small network about which nothing is published?

    python benchmarks/default_rates.py [--networks "signal;volume"] [--auto-only] [--seed 1] [--out rates.json]

Several small networks are trained, on made-up data and on scikit-learn's digits, and mended after a change of gain and
offset (on the digits with noise): with everything left to `adapt`, which is the row "auto", and at several fixed rates
for a fixed number of epochs. For each: the divergence of the verification slices in the end, what chance alone would
give, and the accuracy. The summary at the end names the networks that auto leaves less accurate than they were, and
compares its mean accuracy with that of the best fixed rate. An hour on a CPU, some minutes with `--auto-only`.

`--temperature 0.01` gives every network the paper's bins, as in the tables of docs/methods.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.inputs.digits import load_digits

RATES = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
LENGTHS: dict[str, dict[str, Any]] = {"bufr": {"epochs_per_block": 20}, "fr": {"epochs": 60}}
SAMPLES, CLASSES, BATCH_SIZE = 1500, 3, 100


@dataclass(frozen=True)
class World:
    """A model, and where it came from and went to."""

    model: nn.Module
    source: Tensor
    target: Tensor
    labels: Tensor


class Recurrent(nn.Module):
    """Reads a series and judges by its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 16, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        states, _ = self.cell(series)
        return self.head(states[:, -1])  # type: ignore[no-any-return]


class Stages(nn.Module):
    """A stem, several stages of one kind without BatchNorm, the mean over places, a head: for 8 x 8 digits."""

    def __init__(self, stem: nn.Module, stages: list[nn.Module], width: int) -> None:
        super().__init__()
        self.stem, self.stages = stem, nn.ModuleList(stages)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, digits: Tensor) -> Tensor:
        values = self.stem(digits)
        for stage in self.stages:
            values = stage(values)
        return self.head(self.norm(values.mean(1)))  # type: ignore[no-any-return]


class Patches(nn.Module):
    """Tokens of 2 x 2 pixels with a learnt place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut, self.place = nn.Conv2d(1, width, 2, 2), nn.Parameter(0.02 * torch.randn(16, width))

    def forward(self, digits: Tensor) -> Tensor:
        return self.cut(digits).flatten(2).mT + self.place  # type: ignore[no-any-return]


class Places(nn.Module):
    """Channels last, as tokens, for what normalises over channels."""

    def forward(self, values: Tensor) -> Tensor:
        return values.flatten(2).mT


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: Tensor) -> Tensor:
        return values + self.inner(values)  # type: ignore[no-any-return]


def transformer() -> nn.Module:
    def stage() -> nn.Module:
        return nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)

    return Stages(Patches(32), [stage() for _ in range(3)], 32)


def group_normalised() -> nn.Module:
    def half(units: int, out: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(units, out, 3, padding=1), nn.GroupNorm(4, out)

    def stage() -> nn.Module:
        return Residual(nn.Sequential(*half(32, 32), nn.ReLU(), *half(32, 32), nn.ReLU()))

    last = nn.Sequential(stage(), Places())
    return Stages(nn.Sequential(*half(1, 32), nn.ReLU()), [stage(), stage(), last], 32)


def mixer() -> nn.Module:
    """Build a depthwise convolution and a perceptron for each place, as in ConvNeXt."""

    def stage() -> nn.Module:
        spread = nn.Conv2d(32, 32, 5, padding=2, groups=32)
        return Residual(
            nn.Sequential(spread, nn.GroupNorm(1, 32), nn.Conv2d(32, 128, 1), nn.GELU(), nn.Conv2d(128, 32, 1))
        )

    return Stages(nn.Conv2d(1, 32, 2, 2), [stage(), stage(), nn.Sequential(stage(), Places())], 32)


STAGED: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "residual, GroupNorm": group_normalised,
    "ConvNeXt": mixer,
}


def images(norm: Callable[[int], nn.Module]) -> nn.Module:
    body = (nn.Conv2d(3, 8, 3, 2), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), norm(8), nn.ReLU())
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def signal() -> nn.Module:
    first = (nn.Conv1d(2, 8, 5, 2), nn.BatchNorm1d(8), nn.ReLU())
    second = (nn.Conv1d(8, 8, 5, 2), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def volume() -> nn.Module:
    first = (nn.Conv3d(1, 4, 3, 2), nn.BatchNorm3d(4), nn.ReLU())
    second = (nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6), nn.ReLU())
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, CLASSES))


def table() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


MADE_UP: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "signal": (signal, (2, 64)),
    "volume": (volume, (1, 8, 8, 8)),
    "image": (lambda: images(nn.BatchNorm2d), (3, 16, 16)),
    "image, GroupNorm": (lambda: images(lambda units: nn.GroupNorm(2, units)), (3, 16, 16)),
    "table": (table, (20,)),
    "series": (Recurrent, (10, 4)),
}
SHIFTED_MORE = {
    "signal, GroupNorm, large": ("signal, GroupNorm", "large"),
    "signal, no norm, small": ("signal, no norm", "small"),
    "signal, no norm, large": ("signal, no norm", "large"),
    "table, large": ("table", "large"),
}
"""Networks and shifts of `temperatures.py`."""
NETWORKS = (*MADE_UP, "digits", *STAGED, *SHIFTED_MORE)
AUTO = "auto"


def world(name: str, seed: int) -> World:
    if name in SHIFTED_MORE:
        import temperatures  # Not at the top: it imports this module.

        there: World = temperatures.world(*SHIFTED_MORE[name], seed)
        return there
    torch.manual_seed(seed)
    if name == "digits":
        return digits(small_cnn())
    if name in STAGED:
        return digits(STAGED[name](), epochs=60)
    make, shape = MADE_UP[name]
    labels = torch.arange(2 * SAMPLES) % CLASSES
    signs = torch.randn(CLASSES, *shape)  # what tells the classes apart, in noise
    samples = signs[labels] * 0.5 + torch.randn(2 * SAMPLES, *shape)
    model = trained(make(), samples[:SAMPLES], labels[:SAMPLES])
    return World(model, samples[:SAMPLES], 0.8 * samples[SAMPLES:] + 0.4, labels[SAMPLES:])


def small_cnn() -> nn.Module:
    first = (nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    second = (nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


def digits(network: nn.Module, epochs: int = 20) -> World:
    pictures, labels = load_digits()
    model = trained(network, pictures[:900], labels[:900], epochs)
    away = 0.3 + 0.4 * pictures[900:]
    return World(model, pictures[:900], away + 0.05 * torch.randn(away.shape), labels[900:])


def trained(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int = 20) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, here: World) -> float:
    scores = shiftmend.evaluate(model, (here.target, here.labels))
    assert isinstance(scores, shiftmend.Scores)
    return scores.accuracy


def mend(here: World, profile: shiftmend.Profile, method: str, rate: float | str) -> dict[str, Any]:
    """Adapt at a rate, or with everything left to `adapt`, and return a row."""
    options = {} if rate == AUTO else {"learning_rate": rate, **LENGTHS[method]}
    started = time.perf_counter()
    try:
        mended = shiftmend.adapt(
            here.model, here.target, profile, method, batch_size=BATCH_SIZE, progress=False, **options
        )
    except shiftmend.DivergedError as error:
        mended = error.adaptation
    seconds = time.perf_counter() - started
    assert mended.after is not None
    return {
        "method": method,
        "rate": rate,
        "rate of the first stage": mended.manifest["stages"][0]["learning_rate"],
        "steps": mended.manifest["steps"],
        "seconds": round(seconds, 1),
        "verdict": mended.after.verdict,
        "slices": mended.after.divergence,
        "floor": mended.after.floor,
        "accuracy": accuracy(mended.model, here),
    }


def summarise(rows: list[dict[str, Any]]) -> None:
    """Print, for each method, which networks auto harmed, and its mean accuracy beside those of the fixed rates."""
    for method in LENGTHS:
        own = [row for row in rows if row["method"] == method]
        auto = {row["network"]: row for row in own if row["rate"] == AUTO}
        if not auto:
            continue
        harmed = [name for name, row in auto.items() if row["accuracy"] < row["accuracy before"]]
        print(f"{method}: less accurate than before with auto: {', '.join(harmed) or 'none'} of {len(auto)}")
        print(f"  auto   mean accuracy {_mean(auto.values()):.2f} %, before {_mean(auto.values(), ' before'):.2f} %")
        means = {}
        for rate in sorted({row["rate"] for row in own if row["rate"] != AUTO}):
            at = {row["network"]: row for row in own if row["rate"] == rate}
            if at.keys() == auto.keys():
                means[rate] = _mean(at.values())
                worse = sum(row["accuracy"] < row["accuracy before"] for row in at.values())
                print(f"  {rate:<5g}  mean accuracy {means[rate]:.2f} %, less accurate than before: {worse}")
        if means:
            best = max(means, key=lambda rate: means[rate])
            print(f"  auto less the best fixed rate, {best:g}: {_mean(auto.values()) - means[best]:+.2f} points")


def _mean(rows: Iterable[dict[str, Any]], which: str = "") -> float:
    return 100 * statistics.fmean(row[f"accuracy{which}"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=";".join(NETWORKS), help="with semicolons")
    parser.add_argument("--auto-only", action="store_true", help="no fixed rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, help="of the soft bins; the profile's default otherwise")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # that features are not restored is what is measured here
    rows: list[dict[str, Any]] = []
    for name in options.networks.split(";"):
        here = world(name, options.seed)
        bins = None if options.temperature is None else shiftmend.Bins(temperature=options.temperature)
        profile = shiftmend.profile(here.model, here.source, bins=bins, progress=False)
        before, right = shiftmend.verify(here.model, here.target, profile), accuracy(here.model, here)
        print(f"{name}: {before}, accuracy {100 * right:.1f} %", flush=True)
        for method in LENGTHS:
            for rate in (AUTO, *(() if options.auto_only else RATES)):
                row = {"network": name, "seed": options.seed, "accuracy before": right}
                row |= mend(here, profile, method, rate)
                rows.append(row)
                shown = f"{row['rate of the first stage']:.2g}"
                print(
                    f"  {method:4} {AUTO if rate == AUTO else '':4} {shown:7} accuracy {100 * row['accuracy']:5.1f} %, "
                    f"{row['verdict']} ({row['slices']:.4f}), {row['steps']} steps, {row['seconds']} s",
                    flush=True,
                )
                if options.out is not None:
                    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    summarise(rows)


if __name__ == "__main__":
    main()
