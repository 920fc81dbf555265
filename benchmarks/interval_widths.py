"""Could intervals of estimates be narrower? Several ways to make them, judged on the stored cells of `estimates.py`.

    python benchmarks/interval_widths.py

For each test shift the maps are fitted without every rehearsal of its family, as in the headline of `estimates.py`.
*conformal* is what the library does: among a dozen families, the 90 % quantile of the errors is the largest of them.
*normal* takes the root mean square of the errors and the quantile of Student's t, as if errors were normal. *without
the worst* drops the family with the largest error, which contains the truth in about five cases of six. About two
minutes on one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

import estimates
from shiftmend.verification import estimate as library

EXPONENTS = {"up to 1.5": (0.0, 1.0, 1.5), "up to 3": (0.0, 1.0, 1.5, 2.0, 3.0)}
STUDENT = {8: 1.860, 9: 1.833, 10: 1.812, 11: 1.796, 12: 1.782, 13: 1.771}
"""Quantiles of Student's t for a two-sided interval of 90 %, by degrees of freedom."""

Remembered = dict[Any, Any]


def remember(function: Callable[[library.Cells], Any], kept: Remembered) -> Callable[[library.Cells], Any]:
    """Return a function of cells that computes each value once; all ways share the maps."""

    def call(cells: library.Cells) -> Any:
        key = cells.names, cells.families, cells.signals.tobytes(), cells.scores.tobytes(), cells.home
        if key not in kept:
            kept[key] = function(cells)
        return kept[key]

    return call


def make_fit(find_factor: Callable[[Sequence[float]], float]) -> Callable[..., library.Width | None]:
    """Return a function like `fit_width` with another factor, from the sorted worst errors of all families."""

    def fit_width(
        guesses: dict[int, Any], scores: Any, families: Sequence[str], least: float, unit: float
    ) -> library.Width | None:
        of_family = np.array(families)
        widths = []
        for count, (values, difficulties) in guesses.items():
            errors = np.abs(values - scores)
            known = np.isfinite(errors)
            groups = [known & (of_family == family) for family in dict.fromkeys(families)]
            groups = [group for group in groups if group.any()]
            if not groups:
                return None
            for exponent in library.EXPONENTS:
                ratios = errors / (least + unit * np.maximum(difficulties, 0.0) ** exponent)
                factor = find_factor(sorted(float(ratios[group].max()) for group in groups))
                claimed = len(groups) >= library.MIN_FAMILIES
                width = library.Width(count, factor, exponent, least, unit, is_claimed=claimed)
                widths.append((float(np.median([width(value) for value in difficulties[known]])), width))
        return min(widths, key=lambda one: one[0])[1]

    return fit_width


def take_normal(errors: Sequence[float]) -> float:
    number = len(errors)
    spread = math.sqrt(mean(error**2 for error in errors) * (1 + 1 / number))
    return STUDENT.get(number - 1, STUDENT[8]) * spread


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/estimates"), help="folder of the stored cells")
    options = parser.parse_args(arguments)
    runs = estimates.read_runs(options.out)
    library.Fitted.fit = staticmethod(remember(library.Fitted.fit, {}))  # type: ignore[method-assign]
    library._leave_families_out = remember(library._leave_families_out, {})
    ways = {
        "conformal": library.fit_width,
        "normal": make_fit(take_normal),
        "without the worst": make_fit(lambda errors: errors[-2] if len(errors) > 1 else errors[-1]),
    }
    print("| intervals | growth | benchmark | told | error | held | held, all | half-width |")
    print("|" + "---|" * 8)
    for way, fit_width in ways.items():
        for growth, exponents in EXPONENTS.items():
            library.fit_width, library.EXPONENTS = fit_width, exponents  # type: ignore[assignment]
            judged = [row | {"benchmark": run.benchmark} for run in runs for row in judge(run)]
            for name in dict.fromkeys(row["benchmark"] for row in judged):
                rows = [row for row in judged if row["benchmark"] == name]
                told = estimates.Summary.of([row for row in rows if row["after"]["told"]])
                print(
                    f"| {way} | {growth} | {name} | {told.cases} of {len(rows)} | {told.error:.2f} | "
                    f"{told.held:.0f} % | {estimates.Summary.of(rows).held:.0f} % | {told.half_width:.1f} |",
                    flush=True,
                )


def judge(run: estimates.Run) -> list[estimates.Row]:
    rows = [row for row in run.rows if estimates.is_benchmark_case(row)]
    judged = estimates.judge_run(estimates.Run(run.benchmark, run.seed, run.record, rows, run.manifests))
    return [row for row in judged if row["battery"] == "without family"]


if __name__ == "__main__":
    main()
