"""What does choosing an epoch without labels cost or gain, for methods that restore features?

    python benchmarks/selection.py [results/emnist-da.json results/cifar-10-c.json ...]

From exports of finished cells (`shiftmend bench export --format compact`), in a second: the accuracy of the selected
epoch less that of the last, in points; mean over the offline cells, and in how many it is better and worse by more than
0.05. Below, the cells that lose most.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from shiftmend.research.bench.benchmark import CLEAN, Cell
from shiftmend.research.bench.store import load_results

DEFAULT = ("emnist-da", "cifar-10-c", "mnist-c", "mnist-m", "usps")
METHODS = ("bufr", "fr", "bufr-sliced", "fr-sliced")
NOTICEABLE = 0.05
"""Points."""


def gains(path: Path, method: str) -> dict[Cell, float]:
    """Compute, for each cell, how many points the selected epoch is better than the last."""
    return {
        result.cell: round(100 * (result.selected.accuracy - result.last.accuracy), 4)  # exactly 0.05 is not more
        for result in load_results(path)
        if result.selected is not None and result.last is not None
        if (result.cell.method, result.cell.protocol) == (method, "offline") and result.cell.shift != CLEAN
    }


def summary(found: dict[Cell, float]) -> str:
    if not found:
        return "not run"
    better = sum(gain > NOTICEABLE for gain in found.values())
    worse = sum(gain < -NOTICEABLE for gain in found.values())
    return f"{mean(found.values()):+.2f} ({better}, {worse} of {len(found)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(__file__).parent.parent / "results"
    parser.add_argument("files", nargs="*", type=Path, default=[home / f"{name}.json" for name in DEFAULT])
    every: dict[Cell, float] = {}
    print("| | " + " | ".join(METHODS) + " |\n|" + "---|" * (len(METHODS) + 1))
    for path in parser.parse_args().files:
        found = [gains(path, method) for method in METHODS]
        print(f"| {path.stem} | " + " | ".join(map(summary, found)) + " |")
        for one in found:
            every |= one
    print()
    for cell in sorted(every, key=every.__getitem__)[:5]:
        print(f"{every[cell]:+.1f}  {cell.benchmark}, {cell}")


if __name__ == "__main__":
    main()
