"""Do named methods say so when they do harm?

    python benchmarks/harm.py

The network and the sites of `unrehearsed.py`, adapted to by methods that were named. A run that loses more than two
points of accuracy did harm. Counted is how many such runs log signs of harm, and how many of the others do. About ten
minutes on one core; the same command goes on where another ended.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shiftmend
from bench_models import RowFile, TimeUp, Workers
from shiftmend import shifts
from shiftmend.adaptation.result import environment
from shiftmend.demo import SOURCE_EPOCHS, preprocess, split_digits, train_source
from shiftmend.profiles.fingerprints import weights
from shiftmend.profiles.profile import Profile
from unrehearsed import DEVICES, HOME, draw_site

KEY = ("kind", "site", "method", "seed")
METHODS = ("adabn", "fr", "bufr")
HARMFUL_POINTS = 2.0
SITES = [("same device", site) for site in HOME]
SITES += [(kind, device) for kind in ("other device", "both") for device in DEVICES]


def run(seeds: Sequence[int], file: RowFile, workers: Workers) -> None:
    for seed in seeds:
        source, _, site = split_digits(seed)
        assert source.labels is not None
        assert site.labels is not None
        model = train_source(source.images, source.labels, seed, lambda: None)
        profile = shiftmend.profile(model, source.images, preprocess=preprocess, progress=False)
        versions = {name: value for name, value in environment(torch.device("cpu")).items() if name != "platform"}
        manifest = {"environment": versions, "epochs": SOURCE_EPOCHS, "seed": seed, "weights_sha256": weights(model)}
        jobs = {}
        for number, (kind, name) in enumerate(SITES):
            case = {"same device": name, "other device": "clean", "both": "Dirichlet 1"}[kind]
            places = draw_site(case, site.labels, np.random.default_rng([seed, number]))
            images, labels = site.images[places], site.labels[places]
            if kind != "same device":
                shift, severity = DEVICES[name]
                images = shifts.apply(shift, images, severity=severity, seed=seed)
            for method in METHODS:
                if not file.has(kind, name, method, seed):
                    job = workers.submit(measure, model, profile, images, labels, method, seed)
                    jobs[job] = (kind, name, method, seed)
        for job in as_completed(jobs):
            try:
                row = file.add(jobs[job], job.result(), manifest)
            except TimeUp:
                continue
            print({key: value for key, value in row.items() if key != "manifest"}, flush=True)


def measure(
    model: nn.Module, profile: Profile, images: Tensor, labels: Tensor, method: str, seed: int
) -> dict[str, Any]:
    """Adapt to a site; return accuracy before and after, and the signs of harm."""

    def score(scored: nn.Module) -> float:
        found = shiftmend.evaluate(scored, (images, labels), preprocess=preprocess, progress=False)
        assert isinstance(found, shiftmend.Scores)
        return round(found.accuracy, 4)

    result = shiftmend.adapt(model, images, profile, method, preprocess=preprocess, seed=seed, progress=False)
    return {"before": score(model), "after": score(result.model), "harm": list(result.harm)}


def summarise(file: RowFile) -> str:
    harmful = [row for row in file.rows if 100 * (row["before"] - row["after"]) > HARMFUL_POINTS]
    others = [row for row in file.rows if row not in harmful]
    said, alarms = ([row for row in rows if row["harm"]] for rows in (harmful, others))
    return f"{len(said)} of {len(harmful)} harmful runs say so, and {len(alarms)} of {len(others)} others"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--time-limit", type=float, metavar="MINUTES", help="no run begins later")
    parser.add_argument("--out", type=Path, default=Path("results/harm.json"))
    options = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    file = RowFile(options.out, KEY)
    with Workers(options.workers, options.time_limit) as workers:
        run(options.seeds, file, workers)
    print(summarise(file))


if __name__ == "__main__":
    main()
