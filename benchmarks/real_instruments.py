"""What does `auto` do between real instruments, and how far off is what it tells?

    python benchmarks/real_instruments.py --data-root DATA --page docs/results/real-instruments.md

Nothing is simulated here but the rehearsal. `twin-gas`: five equally built boards of eight gas sensors, four gases; a
small network is trained on one board and meets each of the others. `phone-watch`: windows of accelerometer and
gyroscope, five activities; a small network is trained on the phone or the watch of some people, rehearses with others,
and meets the other device, and its own one, on people it has never seen. Nothing was tuned on these data but the limit
of `MAX_OUTSIDE` in `verification/estimate.py`, which the gas boards have shown to be needed. Takes about ten minutes on
one core.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import shiftmend
from bench_models import RowFile
from shiftmend.adaptation.result import environment
from shiftmend.profiles.rehearsal import name_candidate
from shiftmend.utils.files import write_atomically

KEY = ("data", "home", "site", "seed")
BOARDS = ("B1", "B2", "B3", "B4", "B5")
MIN_HELD_OUT = 100
"""Samples that a board must have left to rehearse with: the boards of 80 samples are sites only."""
GAS_TRAINED = 0.375
"""Share of a board's samples that the network is trained on and profiled with; the rest rehearse."""
PEOPLE_TRAINED, PEOPLE_AT_HOME = 14, 4
"""People whose windows train the network, and rehearse; the others are at the site."""

Row = dict[str, Any]


def train(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, batch_size: int, rate: float) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=1e-3)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(inputs)).split(batch_size):
            if len(index) > 3:
                optimiser.zero_grad()
                functional.cross_entropy(model(inputs[index]), labels[index]).backward()
                optimiser.step()
    return model.eval()


def prepare_model(
    model: nn.Module, trained: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], seed: int, **options: Any
) -> shiftmend.Profile:
    """Train, profile and rehearse; return the rehearsed profile."""
    train(model, *trained, **options)
    profile = shiftmend.profile(model, trained[0], progress=False)
    return shiftmend.rehearse(model, held_out, profile, seed=seed, progress=False)


def measure(model: nn.Module, profile: shiftmend.Profile, inputs: Tensor, labels: Tensor, seed: int) -> Row:
    """Mend for a site, and set what was told beside the truth."""
    result = shiftmend.adapt(model, inputs, profile, seed=seed, progress=False)
    estimate = result.estimate
    assert estimate is not None
    assert estimate.before is not None
    assert estimate.after is not None
    scores = [shiftmend.evaluate(one, (inputs, labels), progress=False) for one in (model, result.model)]
    accuracies = [one.accuracy for one in scores if isinstance(one, shiftmend.Scores)]
    record = profile.rehearsal
    assert record is not None
    return {
        "samples": len(inputs),
        "home_accuracy": round(record.score, 4),
        "true_before": round(accuracies[0], 4),
        "true_after": round(accuracies[1], 4),
        "chosen": result.manifest["method"]["name"],
        "reason": result.reason,
        "before": estimate.before.to_json(),
        "after": estimate.after.to_json(),
        "outside": round(result.candidates[0].signals.get("outside", float("nan")), 4),
    }


def run_gas(root: Path, seeds: Sequence[int], file: RowFile) -> None:
    data = np.load(root / "instruments" / "twin_gas.npz")
    inputs, labels, boards = torch.tensor(data["x"]), torch.tensor(data["y"]).long(), data["board"]
    for seed, home in itertools.product(seeds, BOARDS):
        sites = [site for site in BOARDS if site != home and not file.has("twin-gas", home, site, seed)]
        if not sites:
            continue
        torch.manual_seed(seed)
        own = torch.from_numpy(np.flatnonzero(boards == home))
        own = own[torch.randperm(len(own))]
        first = round(GAS_TRAINED * len(own))
        if len(own) - first < MIN_HELD_OUT:
            continue
        trained, held_out = own[:first], own[first:]
        mean_, deviation = inputs[trained].mean(0), inputs[trained].std(0) + 1e-6
        scaled = (inputs - mean_) / deviation
        model = nn.Sequential(
            nn.Linear(80, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)
        )
        profile = prepare_model(
            model,
            (scaled[trained], labels[trained]),
            (scaled[held_out], labels[held_out]),
            seed,
            epochs=60,
            batch_size=16,
            rate=1e-2,
        )
        for site in sites:
            there = torch.from_numpy(np.flatnonzero(boards == site))
            file.add(
                ("twin-gas", home, site, seed), measure(model, profile, scaled[there], labels[there], seed), _facts()
            )
            print(describe(file.rows[-1]), flush=True)


def run_motion(root: Path, seeds: Sequence[int], file: RowFile) -> None:
    data = np.load(root / "instruments" / "har_phone_watch.npz")
    inputs, labels = torch.tensor(data["x"].astype(np.float32)), torch.tensor(data["y"]).long()
    people = sorted(set(data["subject"]))
    for seed, home in itertools.product(seeds, ("sp", "sw")):
        sites = [site for site in ("sp", "sw") if not file.has("phone-watch", home, site, seed)]
        if not sites:
            continue
        torch.manual_seed(seed)
        order = np.random.default_rng(seed).permutation(people)
        groups = np.split(order, [PEOPLE_TRAINED, PEOPLE_TRAINED + PEOPLE_AT_HOME])
        trained, held_out = (_find(data, home, group) for group in groups[:2])
        centre, deviation = (getattr(inputs[trained], name)((0, 2), keepdim=True) for name in ("mean", "std"))
        scaled = (inputs - centre) / deviation
        model = nn.Sequential(
            *(nn.Conv1d(6, 16, 5, 2, 2), nn.BatchNorm1d(16), nn.ReLU()),
            *(nn.Conv1d(16, 32, 5, 2, 2), nn.BatchNorm1d(32), nn.ReLU()),
            *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5)),
        )
        profile = prepare_model(
            model,
            (scaled[trained], labels[trained]),
            (scaled[held_out], labels[held_out]),
            seed,
            epochs=8,
            batch_size=64,
            rate=3e-3,
        )
        for site in sites:
            there = _find(data, site, groups[2])
            found = measure(model, profile, scaled[there], labels[there], seed)
            file.add(("phone-watch", home, site, seed), found, _facts())
            print(describe(file.rows[-1]), flush=True)


def _find(data: Any, device: str, people: Sequence[str]) -> Tensor:
    return torch.from_numpy(np.flatnonzero((data["device"] == device) & np.isin(data["subject"], people)))


def _facts() -> Row:
    versions = environment(torch.device("cpu"))
    return {"environment": {name: value for name, value in versions.items() if name != "platform"}}


def describe(row: Row) -> str:
    return (
        f"{row['data']} {row['home']} to {row['site']}, seed {row['seed']}: {_percent(row['true_before'])} to "
        f"{_percent(row['true_after'])} by {name_candidate(row['chosen'])}; told {_tell(row['before'])}, then "
        f"{_tell(row['after'])}"
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _tell(estimate: Row) -> str:
    if not estimate["reliable"]:
        return "–"
    ends = "" if estimate["low"] is None else f" ({_percent(estimate['low'])} to {_percent(estimate['high'])})"
    return _percent(estimate["value"]) + ends


def write_page(rows: Sequence[Row]) -> str:
    lines = [
        "# Real instruments",
        "",
        "Made by `python benchmarks/real_instruments.py --page` from `results/real-instruments.json` and from nothing",
        "else. Nothing is simulated here but the rehearsal. Accuracy in percent; a dash where nobody was told a",
        "number. Small networks and few samples: a rehearsal of a gas board has 100.",
        "",
        "*Measured before candidates with intervals too wide to be told had to gain more (`GAIN_IN_WIDE_WIDTHS`).*",
        "",
    ]
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == data]
        lines += [f"## {data}", "", *_summarise(own), ""]
        lines += [
            "| home to site | seed | before, told | true | after, told | true | what was done |",
            "|" + "---|" * 7,
        ]
        lines += [
            f"| {row['home']} to {row['site']} | {row['seed']} | {_tell(row['before'])} | "
            f"{_percent(row['true_before'])} | {_tell(row['after'])} | {_percent(row['true_after'])} | "
            f"{name_candidate(row['chosen'])} |"
            for row in own
        ]
        lines.append("")
    return "\n".join(lines)


def _summarise(rows: Sequence[Row]) -> Iterator[str]:
    told = [row for row in rows if row["after"]["reliable"]]
    errors = [100 * abs(row["after"]["value"] - row["true_after"]) for row in told]
    held = sum(
        row["after"]["low"] is not None and row["after"]["low"] <= row["true_after"] <= row["after"]["high"]
        for row in told
    )
    harm = max(100 * (row["true_before"] - row["true_after"]) for row in rows)
    yield (
        f"Untouched {_percent(mean(row['true_before'] for row in rows))}, after `auto` "
        f"{_percent(mean(row['true_after'] for row in rows))}; largest loss {max(0.0, harm):.1f} points."
    )
    if told:
        yield (
            f"Told a number: {len(told)} of {len(rows)}; mean error {mean(errors):.1f} points, largest "
            f"{max(errors):.1f}; {held} intervals hold the truth."
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--only", choices=("twin-gas", "phone-watch"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results/real-instruments.json"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    file = RowFile(options.out, KEY)
    if options.only != "phone-watch":
        run_gas(options.data_root, options.seeds, file)
    if options.only != "twin-gas":
        run_motion(options.data_root, options.seeds[:1], file)
    if options.page is not None:
        write_atomically(options.page, write_page(file.rows).encode())


if __name__ == "__main__":
    main()
