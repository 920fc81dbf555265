"""How should FR and BUFR train where the target has a few hundred samples, or fewer?

    python benchmarks/small_targets.py [--sizes 50,100,300] [--instruments FOLDER] [--out small.json]

A small CNN on scikit-learn's digits and small networks on made-up data are mended with 50, 100 and 300 samples after a
change of gain and offset; the accuracy is that on all samples of the target. With `--instruments`, a folder that holds
`nir_tablets.npz`, a perceptron that reads the spectra of 300 tablets is mended for a second spectrometer with those of
355 others; the error is the RMSE of the assay in mg.

Each is mended by AdaBN, and by FR and BUFR in one full batch and in batches of 64: with the learning rate that is found
(`engine/rate_search.py`), with multiples of it, and with everything left to `adapt`. Some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import default_rates
import shiftmend
from shiftmend.adaptation.run import examine
from shiftmend.engine.method import plan_stages
from shiftmend.engine.rate_search import find_rate
from shiftmend.inputs.feed import Feed
from shiftmend.methods import method as make_method

NETWORKS = ("digits", "signal", "image, GroupNorm", "table")
TABLETS = "nir_tablets"
HOME_TABLETS, ASSAY = 300, 2
PARTS = (3.0, 1.0, 0.3)
"""Multiples of the rate that is found."""
SMALL_BATCH = 64


@dataclass(frozen=True)
class Case:
    """A model with its source, a small target, and a score of models on the target."""

    name: str
    model: nn.Module
    source: Tensor
    target: Tensor
    score: Callable[[nn.Module], float]
    higher_is_better: bool


def classification(name: str, seed: int, sizes: Iterable[int]) -> list[Case]:
    here = default_rates.world(name, seed)
    order = torch.randperm(len(here.target), generator=torch.Generator().manual_seed(seed))

    def score(model: nn.Module) -> float:
        return 100 * default_rates.accuracy(model, here)

    return [Case(f"{name}, {size}", here.model, here.source, here.target[order[:size]], score, True) for size in sizes]


def tablets(folder: Path, seed: int, widths: tuple[int, ...] = (64, 32)) -> Case:
    """Return a perceptron with BatchNorm that reads spectra; no tablet is both at home and away."""
    with np.load(folder / f"{TABLETS}.npz") as data:
        spectra, assay = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])[:, ASSAY]
        device, tablet = torch.from_numpy(data["device"]), torch.from_numpy(data["sample"].astype(np.int64))
    drawn = torch.randperm(int(tablet.max()) + 1, generator=torch.Generator().manual_seed(seed))
    at_home = torch.isin(tablet, drawn[:HOME_TABLETS])
    home, away = at_home & (device == 1), ~at_home & (device == 2)
    mean, spread = spectra[home].mean(0), spectra[home].std(0)
    spectra = (spectra - mean) / spread
    middle, unit = assay[home].mean(), assay[home].std()
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for units, out in zip((spectra.shape[1], *widths), widths, strict=False):
        layers += [nn.Linear(units, out), nn.BatchNorm1d(out), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
    inputs, wanted = spectra[home], ((assay[home] - middle) / unit)[:, None]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(60):
        for rows in torch.randperm(len(inputs)).split(50):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[rows]), wanted[rows]).backward()
            optimizer.step()

    def score(mended: nn.Module) -> float:
        with torch.no_grad():
            read = mended(spectra[away])[:, 0] * unit + middle
        return float((read - assay[away]).square().mean().sqrt())

    return Case(TABLETS, model.eval(), inputs, spectra[away], score, False)


def find(case: Case, profile: shiftmend.Profile, method: str, batch_size: int) -> float:
    """Return the learning rate that is found for these batches."""
    model, feed, chosen = copy.deepcopy(case.model), Feed(case.target, batch_size=batch_size), make_method(method)
    network, taps = examine(model, feed.first(2), profile, chosen, None, None)
    stage = plan_stages(chosen, network, profile)[0]
    return find_rate(model, feed, taps, chosen.objective(profile, feed.device), chosen, stage).rate  # type: ignore[arg-type]


def mend(case: Case, profile: shiftmend.Profile, method: str, **options: Any) -> dict[str, Any]:
    mended = shiftmend.adapt(case.model, case.target, profile, method, progress=False, **options)
    stages = mended.manifest["stages"]  # There are none where AdaBN finds no BatchNorm.
    kept = mended.kept.steps or 0
    return {
        "score": case.score(mended.model),
        "rate": stages[0]["learning_rate"] if stages else 0.0,
        "steps": mended.manifest["steps"],
        "kept": kept,
    }


def rows_of(case: Case, seed: int) -> list[dict[str, Any]]:
    """Mend in every way, print and return a row for each."""
    profile = shiftmend.profile(case.model, case.source, progress=False)
    found: list[dict[str, Any]] = [{"how": "untouched", "score": case.score(case.model)}]
    found.append({"how": "adabn"} | mend(case, profile, "adabn"))
    for method in ("fr", "bufr"):
        found.append({"how": f"{method}, all left to adapt"} | mend(case, profile, method))
        for size in sorted({min(SMALL_BATCH, len(case.target)), len(case.target)}):
            batch = "one full batch" if size == len(case.target) else f"batches of {size}"
            rate = find(case, profile, method, size)
            for part in PARTS:
                options = {"batch_size": size, "learning_rate": part * rate}
                how = f"{method}, {batch}, {part:g} times the rate"
                found.append({"how": how} | mend(case, profile, method, **options))
    print(f"{case.name}, seed {seed}, {len(case.target)} samples")
    for row in found:
        rate = row.get("rate")
        more = f"  rate {rate:.2g}, kept after {row['kept']} of {row['steps']} steps" if rate else ""
        print(f"  {row['how']:40} {row['score']:6.2f}{more}", flush=True)
    return [{"case": case.name, "seed": seed, "higher_is_better": case.higher_is_better} | row for row in found]


def summarise(rows: list[dict[str, Any]]) -> None:
    """Print, for each way, the mean gain over the untouched model and over AdaBN, and how often it lost to either."""
    baselines = {(row["case"], row["seed"], row["how"]): row["score"] for row in rows}
    for higher, unit in ((True, "points of accuracy"), (False, "mg of RMSE")):
        own = [row for row in rows if row["higher_is_better"] == higher]
        for how in dict.fromkeys(row["how"] for row in own):
            text = []
            for other in ("untouched", "adabn"):
                sign = 1 if higher else -1
                at = [row for row in own if row["how"] == how]
                gains = [sign * (row["score"] - baselines[row["case"], row["seed"], other]) for row in at]
                text.append(f"{statistics.fmean(gains):+6.2f} over {other} (worse in {sum(g < 0 for g in gains)})")
            print(f"{how:40} {', '.join(text)} of {len(at)}, {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=";".join(NETWORKS), help="with semicolons, of default_rates.py")
    parser.add_argument("--sizes", default="50,100,300", help="samples of the target")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--instruments", type=Path, help="folder of nir_tablets.npz")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # that features are not restored is what is measured here
    sizes = [*map(int, options.sizes.split(","))]
    rows: list[dict[str, Any]] = []
    for seed in map(int, options.seeds.split(",")):
        cases = [case for name in options.networks.split(";") if name for case in classification(name, seed, sizes)]
        if options.instruments is not None:
            cases.append(tablets(options.instruments, seed))
        for case in cases:
            rows += rows_of(case, seed)
            if options.out is not None:
                options.out.write_text(json.dumps(rows, indent=1) + "\n")
    summarise(rows)


if __name__ == "__main__":
    main()
