"""How often do intervals contain the truth where samples come in groups, with `groups=` and without?

    python benchmarks/groups.py [--seeds 0 1 2 3] [--out results/groups.json]

Frames of one patient resemble each other. Here, a made-up table of eight columns and four classes has patients with an
offset and a noise of their own, and one class that is frequent with each. Forty patients train a small network, twelve
others rehearse, and every site has twelve further ones, with 50 samples each: ten sites at the device of home and ten
behind a gain and an offset. Each network is rehearsed with `groups=` and without. A site takes a second or two on a
CPU, a rehearsal ten.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

import shiftmend
from bench_models import RowFile
from shiftmend.adaptation.result import environment

TRAINED, AT_HOME, EACH, SITES = 40, 12, 50, 20
KEY = ("seed", "site", "grouped")
CLASSES, COLUMNS = 4, 8


def draw(patients: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw samples of patients: inputs [N, 8], classes [N], and the patient of each [N]."""
    rng = torch.Generator().manual_seed(seed)
    centres = 1.3 * torch.randn(CLASSES, COLUMNS, generator=torch.Generator().manual_seed(5))
    offset = 0.4 * torch.randn(patients, COLUMNS, generator=rng)
    noise = 0.6 + 0.9 * torch.rand(patients, generator=rng)
    own = torch.randint(CLASSES, (patients,), generator=rng)
    who = torch.arange(patients).repeat_interleave(EACH)
    labels = torch.randint(CLASSES, (len(who),), generator=rng)
    labels = torch.where(torch.rand(len(who), generator=rng) < 0.3, own[who], labels)
    spread = noise[who].unsqueeze(1) * torch.randn(len(who), COLUMNS, generator=rng)
    return centres[labels] + offset[who] + spread, labels, who


def train(seed: int) -> tuple[nn.Module, Tensor]:
    inputs, labels, _ = draw(TRAINED, 1000 * seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(COLUMNS, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(10):
        for rows in torch.randperm(len(inputs)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval(), inputs


def measure(model: nn.Module, profile: shiftmend.Profile, seed: int, site: int) -> dict[str, Any]:
    """Adapt to a site and compare what is told with the truth."""
    inputs, labels, _ = draw(AT_HOME, 1000 * seed + 10 + site)
    if site % 2:
        inputs = 1.4 * inputs + torch.linspace(-1.5, 1.5, COLUMNS)

    def score(which: nn.Module) -> float:
        with torch.no_grad():
            return float((which(inputs).argmax(1) == labels).double().mean())

    result = shiftmend.adapt(model, inputs, profile, progress=False)
    assert result.estimate is not None
    found: dict[str, Any] = {"chosen": result.manifest["method"]["name"], "changed": result.changed}
    for when, which in (("before", model), ("after", result.model)):
        told = getattr(result.estimate, when)
        found |= {f"true_{when}": score(which), when: [told.value, told.low, told.high]}
    return found


def summarise(rows: Sequence[dict[str, Any]]) -> None:
    """Print how often something was told, how wide intervals are, and how often they contain the truth."""
    print("                            told   half-width   error   contain truth   changed something   largest loss")
    for grouped in (False, True):
        for where, odd in (("same device", 0), ("other device", 1)):
            own = [row for row in rows if row["grouped"] == grouped and row["site"] % 2 == odd]
            told = [row for row in own if None not in row["after"][:2]]
            held = [row["after"][1] <= row["true_after"] <= row["after"][2] for row in told]
            halves = [50 * (row["after"][2] - row["after"][1]) for row in told]
            errors = [100 * abs(row["after"][0] - row["true_after"]) for row in told]
            loss = max(100 * (row["true_before"] - row["true_after"]) for row in own)
            changed = sum(row["chosen"] != "source-only" for row in own)
            name = f"{'groups' if grouped else 'no groups'}, {where}"
            figures = f"{median(halves):10.1f}   {fmean(errors):5.1f}   {sum(held):7} of {len(held):3}" if told else ""
            print(f"{name:24} {len(told):3} of {len(own):3} {figures}   {changed:13} of {len(own)}   {loss:10.1f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("results/groups.json"))
    options = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    file = RowFile(options.out, KEY)
    versions = {name: value for name, value in environment(torch.device("cpu")).items() if name != "platform"}
    manifest = {"script": "benchmarks/groups.py", "environment": versions}
    for seed in options.seeds:
        if all(file.has(seed, site, grouped) for site in range(SITES) for grouped in (False, True)):
            continue
        model, inputs = train(seed)
        plain = shiftmend.profile(model, inputs, progress=False)
        home, labels, who = draw(AT_HOME, 1000 * seed + 1)
        for grouped in (False, True):
            groups = who if grouped else None
            profile = shiftmend.rehearse(model, (home, labels), plain, groups=groups, seed=seed, progress=False)
            for site in range(SITES):
                if not file.has(seed, site, grouped):
                    found = measure(model, profile, seed, site)
                    file.add((seed, site, grouped), found, manifest)
    summarise(file.rows)


if __name__ == "__main__":
    main()
