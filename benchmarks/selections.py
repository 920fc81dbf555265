"""Does `auto` tell a selection of home's samples from another device, where a model predicts a quantity?

    python benchmarks/selections.py --data-root DATA --page docs/results/selections.md
    python benchmarks/selections.py --worlds table spectra --seeds 0

Three made worlds and the assay of real tablets (two spectrometers). A small network is trained at home and rehearsed
with maps of the inputs and AdaBN. Sites are selections of new samples with the device of home, simulated devices with
samples as at home, and both. `auto` should leave selections alone and mend devices. Rows that are in the file of
results are not measured again. A world takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import shiftmend
from bench_models import RowFile
from shiftmend.adaptation.result import environment
from shiftmend.profiles.fingerprints import weights
from shiftmend.utils.files import write_atomically
from shiftmend.verification.harm import OTHER_SAMPLES

KEY = ("world", "seed", "site")
CANDIDATES = ("match-mean", "match-moments", "adabn")
TRAINED, HELD_OUT, SITE = 700, 500, 400
HARMED, MENDED = 1.05, 0.95
"""Ratio of the errors after and before from which on a site counts as harmed, and up to which as mended."""
KINDS = ("as at home", "selection", "device", "both")

Floats = NDArray[np.float64]
Row = dict[str, Any]


def make_table(rng: np.random.Generator, samples: int) -> tuple[Floats, Floats]:
    """Draw ten columns, of which three are products of others, and a quantity that depends on six of them."""
    inputs = rng.normal(size=(samples, 7))
    inputs = np.column_stack([inputs, inputs[:, 0] * inputs[:, 1], inputs[:, 2] ** 2, inputs[:, 3] * inputs[:, 4]])
    truth = inputs[:, 0] + 0.7 * inputs[:, 2] - 0.5 * inputs[:, 5] + 0.5 * np.sin(2 * inputs[:, 3]) + 0.4 * inputs[:, 7]
    return inputs + 0.1 * rng.normal(size=inputs.shape), truth + 0.2 * rng.normal(size=samples)


def make_skewed(rng: np.random.Generator, samples: int) -> tuple[Floats, Floats]:
    """Draw columns with long tails, as incomes or concentrations have, and a capped quantity."""
    base = rng.lognormal(0, 0.5, size=(samples, 6))
    inputs = np.column_stack([base, base[:, 0] * base[:, 1], base[:, 2] / base[:, 3]])
    truth = np.minimum(base[:, 0] + 0.5 * base[:, 2] / base[:, 3] + 0.3 * rng.normal(size=samples), 3.5)
    return inputs, truth


def make_spectra(rng: np.random.Generator, samples: int) -> tuple[Floats, Floats]:
    """Draw spectra of mixtures of four substances with scatter and a baseline; the quantity is one concentration."""
    shapes = np.random.default_rng(7)
    place = np.linspace(0, 1, 60)
    pure = [
        sum(a * np.exp(-(((place - c) / s) ** 2)) for a, c, s in shapes.uniform([0.3, 0, 0.03], [1, 1, 0.15], (3, 3)))
        for _ in range(4)
    ]
    shares = rng.dirichlet(np.full(4, 1.5), samples)
    spectra = shares @ np.array(pure) * rng.lognormal(0, 0.05, (samples, 1)) + 0.03 * rng.normal(size=(samples, 1))
    return spectra + 0.005 * rng.normal(size=spectra.shape), shares[:, 0]


MADE: Mapping[str, Callable[[np.random.Generator, int], tuple[Floats, Floats]]] = {
    "table": make_table,
    "skewed table": make_skewed,
    "spectra": make_spectra,
}
TABLETS = "tablets"


def list_devices(rng: np.random.Generator, columns: int) -> dict[str, Callable[[Floats], Floats]]:
    """Return devices for standardised columns."""
    gains, offsets = np.exp(0.4 * rng.normal(size=columns)), 0.7 * rng.normal(size=columns)
    return {
        "gain and offset": lambda inputs: inputs * gains + offsets,
        "common gain": lambda inputs: 1.5 * inputs,
        "common offset": lambda inputs: inputs + 0.8,
        "low gain": lambda inputs: 0.5 * inputs,
        "saturation": lambda inputs: np.clip(inputs, -0.7, 0.7),
        "drift": lambda inputs: inputs + np.linspace(0, 1, len(inputs))[:, None] * np.sign(offsets),
    }


def list_selections(inputs: Floats, truth: Floats) -> dict[str, NDArray[np.intp]]:
    """Return the places of selected samples."""
    first = np.linalg.svd(inputs - inputs.mean(0), full_matrices=False)[0][:, 0]
    keys = {
        "high values": truth,
        "low values": -truth,
        "values around the mean": -np.abs(truth - truth.mean()),
        "low in one column": -inputs[:, 0],
        "far on the first component": first,
    }
    return {name: np.argsort(-key)[:SITE] for name, key in keys.items()}


def open_world(name: str, seed: int, root: Path) -> tuple[nn.Module, Any, Iterator[tuple[str, str, Tensor, Tensor]]]:
    """Train and rehearse at home; return the model, the profile, and sites as kind, name, inputs and answers."""
    rng = np.random.default_rng([seed, 11])
    others: Floats | None = None
    if name == TABLETS:
        data = np.load(root / "instruments" / "nir_tablets.npz")
        # Both instruments have measured the same tablets, in the same order.
        own, theirs = (data["x"][data["device"] == device][:, 20:600:4].astype(float) for device in (1, 2))
        truth, order = data["y"][data["device"] == 1][:, 2].astype(float), rng.permutation(len(own))
        inputs, others, truth = own[order], theirs[order], truth[order]
        counts = (220, 180)
    else:
        inputs, truth = MADE[name](rng, 6000)
        counts = (TRAINED, HELD_OUT)
    center, unit = inputs[: counts[0]].mean(0), inputs[: counts[0]].std(0) + 1e-9
    inputs = (inputs - center) / unit
    truth = (truth - truth[: counts[0]].mean()) / truth[: counts[0]].std()
    tensors = torch.tensor(inputs, dtype=torch.float32), torch.tensor(truth, dtype=torch.float32).unsqueeze(1)
    (train, answers), (held_out, known) = (
        [one[rows] for one in tensors] for rows in (slice(counts[0]), slice(counts[0], sum(counts)))
    )
    model = fit(train, answers, seed)
    profile = shiftmend.profile(model, train, progress=False)
    profile = shiftmend.rehearse(model, (held_out, known), profile, candidates=CANDIDATES, progress=False)
    rest, values = inputs[sum(counts) :], truth[sum(counts) :]

    def sites() -> Iterator[tuple[str, str, Tensor, Tensor]]:
        def pack(kind: str, site: str, some: Floats, rows: Any) -> tuple[str, str, Tensor, Tensor]:
            wanted = torch.tensor(values[rows], dtype=torch.float32).unsqueeze(1)
            return kind, site, torch.tensor(some, dtype=torch.float32), wanted

        plain = np.arange(min(SITE, len(rest)))
        devices = list_devices(rng, rest.shape[1])
        yield pack("as at home", "as at home", rest[plain], plain)
        chosen = {key: rows[: len(rest) // 3] for key, rows in list_selections(rest, values).items()}
        for site, rows in chosen.items():
            yield pack("selection", site, rest[rows], rows)
        if others is not None:
            there = ((others - center) / unit)[sum(counts) :]
            yield pack("device", "the other spectrometer", there[plain], plain)
            for site, rows in chosen.items():
                yield pack("both", f"{site}, the other spectrometer", there[rows], rows)
        for site, device in devices.items():
            yield pack("device", site, device(rest[plain]), plain)
        for site in ("high values", "far on the first component"):
            rows = chosen[site]
            yield pack("both", f"{site}, gain and offset", devices["gain and offset"](rest[rows]), rows)

    return model, profile, sites()


def fit(inputs: Tensor, answers: Tensor, seed: int) -> nn.Module:
    """Train a small perceptron; every second seed has BatchNorm."""
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(32)] if seed % 2 else []
    layers = [nn.Linear(inputs.shape[1], 32), *norm, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)]
    model = nn.Sequential(*layers)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.02)
    for _ in range(60):
        for rows in torch.randperm(len(inputs)).split(64):
            if len(rows) > 1:
                optimiser.zero_grad()
                nn.functional.mse_loss(model(inputs[rows]), answers[rows]).backward()
                optimiser.step()
    return model.eval()


def measure(world: str, seed: int, root: Path, file: RowFile) -> None:
    """Measure all sites of a world that are not in the file."""
    model, profile, sites = open_world(world, seed, root)

    def score(one: nn.Module, inputs: Tensor, answers: Tensor) -> float:
        with torch.no_grad():
            return float((one(inputs) - answers).square().mean().sqrt())

    versions = {name: value for name, value in environment(torch.device("cpu")).items() if name != "platform"}
    manifest = {"environment": versions, "weights_sha256": weights(model), "candidates": list(CANDIDATES)}
    for kind, site, inputs, answers in sites:
        result = shiftmend.adapt(model, inputs, profile, progress=False)
        assert result.estimate is not None
        told = result.estimate.after
        row: Row = {"kind": kind, "samples": len(inputs)}
        errors = (score(one, inputs, answers) for one in (model, result.model))
        row |= dict(zip(("before", "after"), (round(error, 4) for error in errors), strict=True))
        row |= {"took": result.manifest["method"]["name"], "as selection": OTHER_SAMPLES in result.reason}
        row["told"] = None if told is None or told.low is None else [told.value, told.low, told.high]
        file.add((world, seed, site), row, manifest)
        print(f"{world:13} {seed} {site:42} {row['before']:7.3f} {row['after']:7.3f}  {row['took']}", flush=True)


def write_page(rows: Sequence[Row]) -> str:
    """Write the page: what `auto` did by kind of site, and each site."""
    lines = [
        "# Selections",
        "",
        "Made by `python benchmarks/selections.py --page` from `results/selections.json` and from nothing else. Small",
        "networks predict a quantity at home. Sites are selections of new samples with the device of home, simulated",
        "devices (and the real other spectrometer) with samples as at home, and both. Errors are root mean squares, in",
        "deviations of the quantity at home. A site counts as harmed if the error grew by more than 5 %, and as mended",
        "if it fell by more. *Told* counts numbers and ranges after adapting. The limits of the rule were chosen on",
        "other worlds.",
        "",
        "| kind of site | sites | taken for a selection | mended | harmed | worst ratio | told | contain the truth |",
        "|" + "---|" * 8,
    ]
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        if not own:
            continue
        ratios = [row["after"] / row["before"] for row in own]
        told = [row for row in own if row["told"] is not None]
        held = sum(row["told"][1] <= row["after"] <= row["told"][2] for row in told)
        counts = (sum(row["as selection"] for row in own), sum(one < MENDED for one in ratios))
        lines.append(
            f"| {kind} | {len(own)} | {counts[0]} | {counts[1]} | {sum(one > HARMED for one in ratios)} | "
            f"{max(ratios):.2f} | {len(told)} | {held} |"
        )
    head = "| world | site | kind | before | after | taken for a selection |"
    lines += ["", "Means over seeds:", "", head, "|" + "---|" * 6]
    for world, site in dict.fromkeys((row["world"], row["site"]) for row in rows):
        own = [row for row in rows if (row["world"], row["site"]) == (world, site)]
        both = [fmean(row[name] for row in own) for name in ("before", "after")]
        count = f"{sum(row['as selection'] for row in own)} of {len(own)}"
        lines.append(f"| {world} | {site} | {own[0]['kind']} | {both[0]:.2f} | {both[1]:.2f} | {count} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--worlds", nargs="*", choices=[*MADE, TABLETS], default=[*MADE, TABLETS])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("results/selections.json"))
    parser.add_argument("--page", type=Path, help="write the page from what was measured, and measure nothing")
    options = parser.parse_args(arguments)
    file = RowFile(options.out, KEY)
    if options.page is not None:
        write_atomically(options.page, write_page(file.rows).encode())
        return
    torch.set_num_threads(1)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    for seed in options.seeds:
        for world in options.worlds:
            if not any((row["world"], row["seed"]) == (world, seed) for row in file.rows):
                measure(world, seed, options.data_root, file)


if __name__ == "__main__":
    main()
