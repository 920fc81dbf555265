"""How soft should the bins of a network without BatchNorm be?

    python benchmarks/temperatures.py [--networks "signal, GroupNorm;series"] [--seeds 0,1] [--out temperatures.json]

Small networks are trained, on made-up data and on scikit-learn's digits, and mended by FR and BUFR at their default
rates after a small and a large change of gain and offset, with profiles of several temperatures. Whatever the profile
that a network was mended with, one with the paper's temperature judges it: the divergence of its verification slices,
and the accuracy. About half an hour on a CPU for each seed.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shiftmend
from default_rates import LENGTHS, MADE_UP, STAGED, World, accuracy, trained
from shiftmend.inputs.digits import load_digits

TEMPERATURES = (0.01, 0.05, 0.1)
SAMPLES, FREQUENCIES = 1500, (2.0, 4.0, 6.0, 9.0)
SHIFTS = {"small": (0.8, 0.4), "large": (0.3, 2.0)}
SHIFTS_OF_DIGITS = {"small": (0.4, 0.3), "large": (0.15, 0.8)}
"""Gain and offset."""


def signal(norm: Callable[[int], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for units, out in ((2, 16), (16, 16), (16, 32)):
        layers += [nn.Conv1d(units, out, 5, padding=2), norm(out), nn.ReLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, len(FREQUENCIES)))


SIGNALS: dict[str, Callable[[int], nn.Module]] = {
    "signal, GroupNorm": lambda units: nn.GroupNorm(4, units),
    "signal, one group": lambda units: nn.GroupNorm(1, units),
    "signal, no norm": lambda units: nn.Identity(),
}
OTHERS = ("image, GroupNorm", "table", "series")
NETWORKS = (*SIGNALS, *OTHERS, *STAGED)


def waves(count: int) -> tuple[Tensor, Tensor]:
    """Simulate two sensors of one vibration, whose frequency tells the class."""
    labels = torch.randint(len(FREQUENCIES), (count,))
    frequencies = torch.tensor(FREQUENCIES)[labels][:, None] * (1 + 0.05 * torch.randn(count, 1))
    turns = frequencies * torch.linspace(0, 1, 64) + torch.rand(count, 1)
    wave = torch.sin(2 * torch.pi * turns) * (1 + 0.2 * torch.randn(count, 1)) + 0.3 * torch.randn(count, 64)
    return torch.stack([wave, 0.5 * wave], 1), labels


def world(name: str, size: str, seed: int) -> World:
    torch.manual_seed(seed)
    if name in STAGED:
        inputs, labels = load_digits()
        model, home, (gain, offset) = STAGED[name](), 900, SHIFTS_OF_DIGITS[size]
        model = trained(model, inputs[:home], labels[:home], 60)
    elif name in SIGNALS:
        (inputs, labels), home, (gain, offset) = waves(2 * SAMPLES), SAMPLES, SHIFTS[size]
        model = trained(signal(SIGNALS[name]), inputs[:home], labels[:home], 8)
    else:
        (make, shape), home, (gain, offset) = MADE_UP[name], SAMPLES, SHIFTS[size]
        labels = torch.arange(2 * SAMPLES) % 3
        inputs = torch.randn(3, *shape)[labels] * 0.5 + torch.randn(2 * SAMPLES, *shape)
        model = trained(make(), inputs[:home], labels[:home])
    return World(model, inputs[:home], gain * inputs[home:] + offset, labels[home:])


def rows_of(name: str, size: str, seed: int) -> list[dict[str, Any]]:
    here = world(name, size, seed)
    judge = shiftmend.profile(here.model, here.source, bins=shiftmend.Bins(), progress=False)
    before = shiftmend.verify(here.model, here.target, judge)
    print(f"{name}, {size}, seed {seed}: {before}, accuracy {100 * accuracy(here.model, here):.1f} %", flush=True)
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        bins = shiftmend.Bins(temperature=temperature)
        profile = shiftmend.profile(here.model, here.source, bins=bins, progress=False)
        for method, length in LENGTHS.items():
            mended = shiftmend.adapt(here.model, here.target, profile, method, batch_size=100, progress=False, **length)
            after, right = shiftmend.verify(mended.model, here.target, judge), accuracy(mended.model, here)
            rows.append(
                {"network": name, "shift": size, "seed": seed, "temperature": temperature, "method": method}
                | {"before": before.divergence, "slices": after.divergence, "floor": after.floor, "accuracy": right}
                | {"accuracy before": accuracy(here.model, here), "own verdict": str(mended.after)}
            )
            print(f"  {method:4} {temperature:<4g}  {after}, accuracy {100 * right:.1f} %", flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> None:
    """Summarise by method, shift and temperature: mean accuracy, lowest accuracy, median divergence of the slices."""
    for method in LENGTHS:
        for size in SHIFTS:
            for temperature in TEMPERATURES:
                wanted = (method, size, temperature)
                own = [row for row in rows if (row["method"], row["shift"], row["temperature"]) == wanted]
                if own:
                    right = torch.tensor([100 * row["accuracy"] for row in own])
                    slices = torch.tensor([row["slices"] for row in own]).median()
                    print(
                        f"{method:4} {size:5} {temperature:<4g}  accuracy {right.mean():.1f} %, lowest "
                        f"{right.min():.1f}, median of the slices {slices:.4f}, of {len(own)}"
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=";".join(NETWORKS), help="with semicolons")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # that features are not restored is what is measured here
    rows: list[dict[str, Any]] = []
    for seed in map(int, options.seeds.split(",")):
        for name in options.networks.split(";"):
            for size in SHIFTS:
                rows += rows_of(name, size, seed)
                if options.out is not None:
                    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    summary(rows)


if __name__ == "__main__":
    main()
