"""What does `auto` do between real instruments, and how far off is what it tells?

    python benchmarks/real_instruments.py --data-root DATA --page docs/results/real-instruments.md

Nothing is simulated here but the rehearsal. `twin-gas`: five equally built boards of eight gas sensors, four gases; a
small network is trained on one board and meets each of the others. `phone-watch`: windows of accelerometer and
gyroscope, five activities; a small network is trained on the phone or the watch of some people, rehearses with others,
and meets the other device, and its own one, on people it has never seen. Nothing was tuned on these data but the limit
of `MAX_OUTSIDE` in `verification/estimate.py`, which the gas boards have shown to be needed. Takes about ten minutes on
one core.

    python benchmarks/real_instruments.py --data-root DATA --single --page docs/results/real-instruments.md

measures single methods that train nothing by gradients, one column each, without a rehearsal: between the gas boards,
and in `tablets`, pharmaceutical tablets before two near-infrared spectrometers. A small network that tells the assay is
trained on the spectra of some tablets and meets those of others from the other device.
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
TABLETS_AT_HOME, TABLETS_TRAINED = 300, 200
"""Tablets of home, and those of them that the network is trained on; the others are at the site."""
SINGLE = ("source-only", "match-mean", "match-moments", "match-histogram", "neo", "coral", "adabn")
"""Methods that are measured by themselves."""

Row = dict[str, Any]


def train(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, batch_size: int, rate: float) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=1e-3)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(inputs)).split(batch_size):
            if len(index) > 3:
                optimiser.zero_grad()
                loss = functional.mse_loss if labels.is_floating_point() else functional.cross_entropy
                loss(model(inputs[index]), labels[index]).backward()
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


def split_board(boards: Any, home: str) -> tuple[Tensor, Tensor] | None:
    """Draw the samples of a board that train and those that rehearse; None if too few would be left to rehearse."""
    own = torch.from_numpy(np.flatnonzero(boards == home))
    own = own[torch.randperm(len(own))]
    first = round(GAS_TRAINED * len(own))
    return None if len(own) - first < MIN_HELD_OUT else (own[:first], own[first:])


def make_gas_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(80, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)
    )


GAS_TRAINING = {"epochs": 60, "batch_size": 16, "rate": 1e-2}


def run_gas(root: Path, seeds: Sequence[int], file: RowFile, single: bool = False) -> None:
    data = np.load(root / "instruments" / "twin_gas.npz")
    inputs, labels, boards = torch.tensor(data["x"]), torch.tensor(data["y"]).long(), data["board"]
    for seed, home in itertools.product(seeds, BOARDS):
        sites = [site for site in BOARDS if site != home and not file.has("twin-gas", home, site, seed)]
        if not sites:
            continue
        torch.manual_seed(seed)
        parts = split_board(boards, home)
        if parts is None:
            continue
        trained, held_out = parts
        mean_, deviation = inputs[trained].mean(0), inputs[trained].std(0) + 1e-6
        scaled = (inputs - mean_) / deviation
        model = make_gas_model()
        if single:
            train(model, scaled[trained], labels[trained], **GAS_TRAINING)
            profile = shiftmend.profile(model, scaled[trained], gaussian="full", progress=False)
        else:
            given = [(scaled[part], labels[part]) for part in parts]
            profile = prepare_model(model, given[0], given[1], seed, **GAS_TRAINING)
        for site in sites:
            there = torch.from_numpy(np.flatnonzero(boards == site))
            if single:
                found = measure_single(model, profile, scaled[there], labels[there], seed)
                at_home = shiftmend.evaluate(model, (scaled[held_out], labels[held_out]), progress=False)
                found["at_home"] = round(_score(at_home), 4)
            else:
                found = measure(model, profile, scaled[there], labels[there], seed)
            file.add(("twin-gas", home, site, seed), found, _facts())
            print((describe_single if single else describe)(file.rows[-1]), flush=True)


def run_tablets(root: Path, seeds: Sequence[int], file: RowFile) -> None:
    """Measure single methods on spectra; scores are the root mean squared error of the assay, in its own unit."""
    data = np.load(root / "instruments" / "nir_tablets.npz")
    spectra, assay = torch.tensor(data["x"]), torch.tensor(data["y"][:, 2:])
    tablets = np.unique(data["sample"])
    for seed, (home, site) in itertools.product(seeds, ((1, 2), (2, 1))):
        if file.has("tablets", str(home), str(site), seed):
            continue
        torch.manual_seed(seed)
        order = np.random.default_rng(seed).permutation(tablets)
        groups = np.split(order, [TABLETS_TRAINED, TABLETS_AT_HOME])
        places = [(home, groups[0]), (home, groups[1]), (site, groups[2])]
        trained, held_out, there = (
            torch.from_numpy(np.flatnonzero((data["device"] == device) & np.isin(data["sample"], group)))
            for device, group in places
        )
        scaled = (spectra - spectra[trained].mean(0)) / spectra[trained].std(0)
        centre, deviation = assay[trained].mean(), assay[trained].std()
        answers = (assay - centre) / deviation
        model = nn.Sequential(
            nn.Linear(650, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)
        )
        train(model, scaled[trained], answers[trained], epochs=100, batch_size=16, rate=3e-3)
        profile = shiftmend.profile(model, scaled[trained], gaussian="full", progress=False)
        found = measure_single(model, profile, scaled[there], answers[there], seed)
        found["at_home"] = _score(shiftmend.evaluate(model, (scaled[held_out], answers[held_out]), progress=False))
        found = {name: round(value * float(deviation), 3) for name, value in found.items()}
        file.add(("tablets", str(home), str(site), seed), found | {"samples": len(there)}, _facts())
        print(describe_single(file.rows[-1]), flush=True)


def measure_single(
    model: nn.Module, profile: shiftmend.Profile, inputs: Tensor, labels: Tensor, seed: int
) -> dict[str, float]:
    """Mend by each method alone, and score the outcome with labels."""
    found = {}
    for name in SINGLE:
        result = shiftmend.adapt(model, inputs, profile, name, seed=seed, progress=False)
        found[name] = round(_score(shiftmend.evaluate(result.model, (inputs, labels), progress=False)), 4)
    return found


def _score(scores: Any) -> float:
    """Return the accuracy, or the root mean squared error of a quantity."""
    return scores.accuracy if isinstance(scores, shiftmend.Scores) else scores.root_mean_square_error


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


def describe_single(row: Row) -> str:
    scores = ", ".join(f"{name} {_show(row['data'], row[name])}" for name in ("at_home", *SINGLE))
    return f"{row['data']} {row['home']} to {row['site']}, seed {row['seed']}: {scores}"


def _show(data: str, score: float) -> str:
    return f"{score:.2f}" if data == "tablets" else _percent(score)


def list_single(rows: Sequence[Row]) -> list[str]:
    """Write the table of single methods: means and standard errors over directions and seeds."""
    if not rows:
        return []
    lines = [
        "## Single methods",
        "",
        "Made with `--single`: methods by themselves, without a rehearsal, at the same homes and sites. Accuracy in",
        "percent between gas boards, root mean squared error of the assay between spectrometers; means over directions",
        "and seeds. *Better* counts the cells where a method beats the untouched model.",
        "",
        "| data | cells | at home | " + " | ".join(name_candidate(name) for name in SINGLE) + " |",
        "|" + "---|" * (3 + len(SINGLE)),
    ]
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == data]
        means = {name: mean(row[name] for row in own) for name in ("at_home", *SINGLE)}
        lower = data == "tablets"
        better = {
            name: sum((row[name] < row[SINGLE[0]]) == lower and row[name] != row[SINGLE[0]] for row in own)
            for name in SINGLE[1:]
        }
        shown = [_show(data, means[name]) for name in ("at_home", *SINGLE)]
        lines.append(f"| {data} | {len(own)} | " + " | ".join(shown) + " |")
        counts = " | ".join(str(number) for number in better.values())
        lines.append(f"| {data}, better | {len(own)} | – | – | {counts} |")
    return [*lines, ""]


def write_page(rows: Sequence[Row], single: Sequence[Row] = ()) -> str:
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
    return "\n".join([*lines, *list_single(single)])


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
    parser.add_argument("--only", choices=("twin-gas", "phone-watch", "tablets"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results/real-instruments.json"))
    parser.add_argument("--single", action="store_true", help="measure single methods instead of auto")
    parser.add_argument("--single-out", type=Path, default=Path("results/real-instruments-single.json"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    file, single = RowFile(options.out, KEY), RowFile(options.single_out, KEY)
    if options.only in (None, "twin-gas"):
        run_gas(options.data_root, options.seeds, single if options.single else file, options.single)
    if options.single and options.only in (None, "tablets"):
        run_tablets(options.data_root, options.seeds, single)
    if not options.single and options.only in (None, "phone-watch"):
        run_motion(options.data_root, options.seeds[:1], file)
    if options.page is not None:
        write_atomically(options.page, write_page(file.rows, single.rows).encode())


if __name__ == "__main__":
    main()
