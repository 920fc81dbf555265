"""Does a threshold of a label-free signal that was found on one benchmark hold on another?

    python benchmarks/signals.py [results/emnist-da.json results/cifar-10-c.json ...]

From exports of finished cells (`shiftmend bench export --format compact`), in a second. An adaptation is good if its
accuracy lies at most 10 points below that of the same source model on clean images. For each benchmark: the threshold
that separates good from bad best there, and what the one found on all others does to it; and what the library's own
verdict says.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shiftmend.research.analysis.correlations import (
    HIGH_IS_GOOD,
    TOGETHER,
    area,
    best_pair,
    best_threshold,
    find_near_clean,
)
from shiftmend.research.bench.benchmark import CLEAN, Cell, Result
from shiftmend.research.bench.footnotes import source_remarks
from shiftmend.research.bench.pages import verification
from shiftmend.research.bench.store import load_results

DEFAULT = ("emnist-da", "cifar-10-c", "mnist-c", "mnist-m", "digits")
SIGNALS = ("slices", "marginals", "entropy", "confidence")
OWN_SOURCE = ("shot",)
"""Starts from a source model of its own, whose accuracy on clean images is another."""


@dataclass(frozen=True)
class Judged:
    """The cells of one benchmark that can be judged."""

    name: str
    good: list[bool]
    results: list[Result]

    def costs(self, signal: str) -> list[float]:
        sign = -1.0 if signal in HIGH_IS_GOOD else 1.0
        values = (result.signals[signal] for result in self.results)
        return [math.inf if math.isnan(value) else sign * value for value in values]


def judged(path: Path) -> Judged:
    results = [result for result in load_results(path) if result.cell.protocol == "offline" and not result.failed]
    clean = [result for result in results if result.cell.shift == CLEAN and result.cell.method == "source-only"]
    cells = [r for r in results if r.cell.shift != CLEAN and r.cell.method not in OWN_SOURCE]
    good: dict[Cell, bool] = find_near_clean(cells, clean)
    by_place = {_place(cell): kind for cell, kind in good.items()}
    kept = [r for r in cells if _place(r.cell) in by_place and set(SIGNALS) <= r.signals.keys()]
    return Judged(path.stem, [by_place[_place(result.cell)] for result in kept], kept)


def _place(cell: Cell) -> tuple[str, str, int]:
    return cell.method, cell.shift, cell.seed


def shares(accepted: Sequence[bool], good: Sequence[bool]) -> str:
    taken, kinds = np.asarray(accepted), np.asarray(good)
    bad_accepted, good_rejected = 100 * taken[~kinds].mean(), 100 * (~taken[kinds]).mean()
    return f"{bad_accepted:5.1f} % of the bad accepted, {good_rejected:5.1f} % of the good rejected"


def pooled(worlds: Sequence[Judged]) -> Judged:
    return Judged("the others", [g for w in worlds for g in w.good], [r for w in worlds for r in w.results])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(__file__).parent.parent / "results"
    parser.add_argument("files", nargs="*", type=Path, default=[home / f"{name}.json" for name in DEFAULT])
    worlds = [judged(path) for path in parser.parse_args().files]
    if len(worlds) < 2:
        parser.error("expected the exports of at least two benchmarks")
    for world in worlds:
        remarks = "".join(f"; {remark}" for remark in source_remarks(world.results))
        print(f"{world.name}: {sum(world.good)} good, {len(world.good) - sum(world.good)} bad{remarks}")
    for signal in SIGNALS:
        print(f"\n{signal}")
        sign = -1 if signal in HIGH_IS_GOOD else 1
        for world in worlds:
            costs, others = world.costs(signal), pooled([other for other in worlds if other is not world])
            own, balanced = best_threshold(costs, world.good)
            limit, _ = best_threshold(others.costs(signal), others.good)
            print(f"  {world.name:12s} best {sign * own:.4g} (balanced {100 * balanced:.0f} %), ", end="")
            print(f"AUC {area(costs, world.good):.2f}; from the others {sign * limit:.4g}: ", end="")
            print(shares([cost <= limit for cost in costs], world.good))
    print(f"\n{' and '.join(TOGETHER)}")
    for world in worlds:
        one, two = (world.costs(signal) for signal in TOGETHER)
        others = pooled([other for other in worlds if other is not world])
        first, second, balanced = best_pair(one, two, world.good)
        limits = best_pair(others.costs(TOGETHER[0]), others.costs(TOGETHER[1]), others.good)
        print(f"  {world.name:12s} best {first:.4g} and {second:.4g} (balanced {100 * balanced:.0f} %); ", end="")
        print(f"from the others {limits[0]:.4g} and {limits[1]:.4g}: ", end="")
        print(shares([a <= limits[0] and b <= limits[1] for a, b in zip(one, two, strict=True)], world.good))
    print("\nthe library's verdict: restored")
    for world in worlds:
        found = [verification(result) for result in world.results]
        accepted = [one is not None and one.verdict == "restored" for one in found]
        print(f"  {world.name:12s} {shares(accepted, world.good)}")


if __name__ == "__main__":
    main()
