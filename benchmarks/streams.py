"""What do streams do whose classes come sorted, or are not those of home?

    python benchmarks/streams.py --page docs/results/streams.md

Two networks are trained on the digits that come with the package and rehearsed: the demo's, and one without
normalisation layers. Streams of the site's digits then come mixed, sorted by class, or from few classes alone, with the
device of home or another one. Each is learnt from with and without the guard that pauses learning. Measured is the
accuracy of the answers that were given, that of the snapshot on all digits of the site, and what the stream says of
itself without labels. About two minutes a seed on one core.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shiftmend
from bench_models import RowFile
from shiftmend import shifts
from shiftmend.adaptation.result import Estimates, environment
from shiftmend.demo import SOURCE_EPOCHS, preprocess, split_digits, train_source
from shiftmend.profiles.fingerprints import weights
from shiftmend.profiles.profile import Profile
from shiftmend.utils.files import write_atomically

KEY = ("network", "device", "order", "method", "guard", "seed")
DEVICES = {
    "home": None,
    "brightness": ("mnist-c/brightness", None),
    "stripe": ("emnist-da/stripe", None),
    "contrast": ("cifar-c/contrast", 5),
    "gain and offset": ("sensor/gain_offset", 5),
    "fog": ("mnist-c/fog", None),
    "oranges": ("emnist-da/oranges", None),
}
"""Shifts and severities of the devices by name. No rule was chosen on the last two."""
ORDERS = {
    "mixed": "all classes, mixed",
    "sorted": "sorted by class, each digit of the site once",
    "sorted, long": "sorted by class, 320 digits of each class, drawn with replacement",
    "two classes": "640 digits of two classes, mixed, drawn with replacement",
    "three classes": "640 digits of three classes, mixed, drawn with replacement",
    "Dirichlet 1": "640 digits in shares drawn from a Dirichlet distribution of 1, mixed",
}
METHODS: dict[tuple[str, str], dict[str, Any]] = {
    ("demo", "fr"): {"learning_rate": 0.01},
    ("demo", "adabn"): {},
    ("plain", "fr"): {},
}
"""Options of the methods by network and name."""
BATCH_SIZE = 32
LAST_SAMPLES = 16 * BATCH_SIZE
"""Samples of the window that a stream's estimate is about."""

Row = dict[str, Any]


def draw_order(order: str, labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Return places of the site's digits in the order of a stream."""
    members = [np.flatnonzero(labels.numpy() == digit) for digit in range(10)]
    if order == "mixed":
        places = rng.permutation(len(labels))
    elif order == "sorted":
        places = np.concatenate([members[digit] for digit in rng.permutation(10)])
    elif order == "sorted, long":
        places = np.concatenate([rng.choice(members[digit], 320) for digit in rng.permutation(10)])
    else:
        few = {"two classes": 2, "three classes": 3}.get(order, 0)
        shares = rng.permutation([1 / few] * few + [0.0] * (10 - few)) if few else rng.dirichlet(np.ones(10))
        places = np.array([rng.choice(members[digit]) for digit in rng.choice(10, 640, p=shares)])
    return torch.from_numpy(places)


def train_plain(images: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """Train a network of the demo's size without normalisation layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            *(nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 2), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, 2, 2), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(32 * 5 * 5, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)),
        )
        optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, SOURCE_EPOCHS)
        for _ in range(SOURCE_EPOCHS):
            for index in torch.randperm(len(images)).split(64):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(preprocess(images[index])), labels[index]).backward()
                optimiser.step()
            schedule.step()
    return model.eval()


def measure(
    model: nn.Module,
    profile: Profile,
    images: Tensor,
    labels: Tensor,
    places: Tensor,
    method: tuple[str, str],
    guard: bool,
) -> Row:
    """Send a stream through an adapter; score what it answered and what it has become."""

    def score(scored: nn.Module, rows: Tensor) -> float:
        found = shiftmend.evaluate(scored, (images[rows], labels[rows]), preprocess=preprocess, progress=False)
        assert isinstance(found, shiftmend.Scores)
        return round(found.accuracy, 4)

    online = shiftmend.stream(model, profile, method[1], preprocess=preprocess, guard=guard, **METHODS[method])
    hits = []
    for rows in places.split(BATCH_SIZE):
        hits.append(online.step(images[rows]).argmax(1) == labels[rows])
    every, last = torch.arange(len(labels)), places[-LAST_SAMPLES:]
    right = torch.cat(hits).double()
    estimate = online.estimate
    assert estimate is not None
    return {
        "samples": len(places),
        "untouched": score(model, places),
        "running": round(float(right.mean()), 4),
        "untouched on all": score(model, every),
        "snapshot on all": score(online.snapshot(), every),
        "steps": online.steps,
        "paused": online.paused,
        "warnings": online.warnings,
        "harm": online.harm,
        "window": {
            "estimate": _list_values(estimate),
            "untouched": score(model, last),
            "running": round(float(right[-LAST_SAMPLES:].mean()), 4),
        },
    }


def _list_values(estimates: Estimates) -> dict[str, Any]:
    return {
        name: {"value": one.value, "low": one.low, "high": one.high, "reasons": list(one.reasons)}
        for name, one in (("before", estimates.before), ("after", estimates.after))
        if one is not None
    }


def list_cases() -> list[tuple[str, str, str, str, bool]]:
    """Return network, device, order, method and guard of all streams. Sorted ones are shown on a part of them."""
    return [
        (network, device, order, method, guard)
        for network, method in METHODS
        for number, device in enumerate(DEVICES)
        for order in ORDERS
        if not order.startswith("sorted") or (network == "demo" and number < 4)
        for guard in (False, True)
    ]


def run(seeds: Sequence[int], file: RowFile) -> None:
    for seed in seeds:
        for network in ("demo", "plain"):
            cases = [case for case in list_cases() if case[0] == network and not file.has(*case, seed)]
            if cases:
                run_network(network, cases, seed, file)


def run_network(network: str, cases: Sequence[tuple[str, str, str, str, bool]], seed: int, file: RowFile) -> None:
    """Train, profile and rehearse a network, and send it the streams."""
    source, held_out, site = split_digits(seed)
    assert source.labels is not None
    assert held_out.labels is not None
    assert site.labels is not None
    if network == "demo":
        model = train_source(source.images, source.labels, seed, lambda: None)
    else:
        model = train_plain(source.images, source.labels, seed)
    profile = shiftmend.profile(model, source.images, preprocess=preprocess, progress=False)
    profile = shiftmend.rehearse(
        model,
        (held_out.images, held_out.labels),
        profile,
        candidates=["match-moments", *(["adabn"] if network == "demo" else [])],
        preprocess=preprocess,
        progress=False,
    )
    versions = {name: value for name, value in environment(torch.device("cpu")).items() if name != "platform"}
    manifest = {"environment": versions, "epochs": SOURCE_EPOCHS, "seed": seed, "weights_sha256": weights(model)}
    for _, device, order, method, guard in cases:
        shift, images = DEVICES[device], site.images
        if shift is not None:
            images = shifts.apply(shift[0], images, severity=shift[1], seed=seed)
        places = draw_order(order, site.labels, np.random.default_rng([seed, *order.encode()]))
        found = measure(model, profile, images, site.labels, places, (network, method), guard)
        row = file.add((network, device, order, method, guard, seed), found, manifest)
        print(describe(row), flush=True)


def describe(row: Row) -> str:
    told = row["window"]["estimate"]["after"]["value"]
    scores = {name: _percent(row[name]) for name in ("untouched", "running", "untouched on all", "snapshot on all")}
    return (
        f"{', '.join(row[name] for name in KEY[:4])}, guard {row['guard']}, seed {row['seed']}: "
        f"{', '.join(f'{name} {score}' for name, score in scores.items())}; paused {row['paused']} of {row['steps']}, "
        f"signs of harm {len(row['harm'])}, told {'-' if told is None else _percent(told)}"
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def write_page(rows: Sequence[Row]) -> str:
    lines = [
        "# Streams whose classes are not those of home",
        "",
        "Made by `python benchmarks/streams.py --page` from `results/streams.json` and from nothing else. Digits, in",
        f"batches of {BATCH_SIZE}; accuracy in percent, means over the seeds. *Running* is the accuracy of the answers",
        "that a stream gave, *snapshot* that of its last model on all digits of the site. *Paused* counts batches that",
        "were not learnt from. The networks are small: the tables show what the guard does, not how good methods are.",
        "The rules of `verification/class_watch.py` were chosen on seeds 0 to 3, without the last two devices; here",
        f"are seeds {', '.join(str(seed) for seed in sorted({row['seed'] for row in rows}))}.",
        "",
        "| order | meaning |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in ORDERS.items()),
        "",
    ]
    titles = {"demo": "the demo’s network", "plain": "a network without normalisation"}
    for network, method in METHODS:
        options = ", ".join(f"{name} {value:g}" for name, value in METHODS[network, method].items())
        lines += [
            f"## `{method}`" + (f", {options}" if options else "") + f", {titles[network]}",
            "",
            "| device | order | untouched | running, no guard | running, guard | paused | untouched on all | "
            "snapshot, no guard | snapshot, guard |",
            "|" + "---|" * 9,
        ]
        cases = dict.fromkeys(case[1:3] for case in list_cases() if (case[0], case[3]) == (network, method))
        lines += [_describe_pair(rows, (network, method), device, order) for device, order in cases]
        lines.append("")
    return "\n".join([*lines, *_describe_sums(rows), *_describe_estimates(rows)])


def _describe_sums(rows: Sequence[Row]) -> list[str]:
    """Say how much of the harm the guard prevents, and how much of the gain."""
    lines = [
        "## What the guard keeps off and what it costs",
        "",
        "Differences of the running accuracy to the untouched model, in points, means over the streams of an order:",
        "harm where learning without the guard lowers the accuracy, gain where it raises it.",
        "",
        "| network | order | harm, no guard | harm, guard | gain, no guard | gain, guard |",
        "|---|---|---|---|---|---|",
    ]
    for network, order in dict.fromkeys((row["network"], row["order"]) for row in rows):
        cells = []
        for sign in (-1, 1):
            for guard in (False, True):
                own = [row for row in rows if (row["network"], row["order"], row["guard"]) == (network, order, guard)]
                sums = [max(0.0, sign * (row["running"] - row["untouched"])) for row in own]
                cells.append(_percent(sum(sums) / len(sums)))
        lines.append(f"| {network} | {order} | {' | '.join(cells)} |")
    return [*lines, "", *_describe_warnings(rows), ""]


def _describe_warnings(rows: Sequence[Row]) -> list[str]:
    """Say how many of the streams with the guard were paused or warned of."""
    lines = [
        "With the guard, by what learning without it does (harm and gain are more than 5 points):",
        "",
        "| learning does | streams | paused in part | learnt from throughout, with a warning | without |",
        "|---|---|---|---|---|",
    ]
    free = {tuple(row[name] for name in KEY if name != "guard"): row for row in rows if not row["guard"]}
    counts = {name: [0, 0, 0] for name in ("harm", "little", "gain")}
    for row in rows:
        if row["guard"]:
            other = free[tuple(row[name] for name in KEY if name != "guard")]
            change = other["running"] - other["untouched"]
            own = counts["harm" if change < -0.05 else "gain" if change > 0.05 else "little"]
            own[0 if row["paused"] else 1 if row["warnings"] else 2] += 1
    return [
        *lines,
        *(f"| {name} | {sum(own)} | {' | '.join(str(one) for one in own)} |" for name, own in counts.items()),
    ]


def _describe_pair(rows: Sequence[Row], method: tuple[str, str], device: str, order: str) -> str:
    key = (*method, device, order)
    own = [row for row in rows if (row["network"], row["method"], row["device"], row["order"]) == key]
    free, guarded = ([row for row in own if row["guard"] == guard] for guard in (False, True))

    def mean(chosen: Sequence[Row], name: str) -> str:
        return _percent(sum(row[name] for row in chosen) / len(chosen))

    paused, steps = (sum(row[name] for row in guarded) for name in ("paused", "steps"))
    cells = [device, order, mean(guarded, "untouched"), mean(free, "running"), mean(guarded, "running")]
    cells += [f"{paused} of {steps}", mean(guarded, "untouched on all")]
    cells += [mean(free, "snapshot on all"), mean(guarded, "snapshot on all")]
    return f"| {' | '.join(cells)} |"


def _describe_estimates(rows: Sequence[Row]) -> list[str]:
    """Say how many windows got a number, and how far the numbers were off."""
    lines = [
        "## The estimate of the last window",
        "",
        "With the guard, over all networks, devices, orders, methods and seeds.",
        "",
        "| estimate of | windows | told | in the interval | largest error, points |",
        "|---|---|---|---|---|",
    ]
    for name, truth, title in (("before", "untouched", "the untouched model"), ("after", "running", "the answers")):
        windows = [row["window"] for row in rows if row["guard"]]
        told = [(window["estimate"][name], window[truth]) for window in windows]
        told = [(one, true) for one, true in told if one["value"] is not None]
        inside = sum(one["low"] is not None and one["low"] <= true <= one["high"] for one, true in told)
        worst = max((abs(one["value"] - true) for one, true in told), default=0.0)
        lines.append(f"| {title} | {len(windows)} | {len(told)} | {inside} | {_percent(worst)} |")
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[6, 7])
    parser.add_argument("--out", type=Path, default=Path("results/streams.json"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    file = RowFile(options.out, KEY)
    run(options.seeds, file)
    if options.page is not None:
        write_atomically(options.page, write_page(file.rows).encode())


if __name__ == "__main__":
    main()
