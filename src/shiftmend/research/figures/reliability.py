"""Reliability diagrams and confidence histograms, as in the paper's appendix H."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import CLEAN, Result
from shiftmend.research.figures import picking, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Bins:
    """Bins of confidence over several results: edges, images, and sums over these of confidence and of hits."""

    edges: NDArray[np.float64]
    counts: NDArray[np.float64]
    confidences: NDArray[np.float64]
    hits: NDArray[np.float64]

    @property
    def gaps(self) -> NDArray[np.float64]:
        """Mean confidence less accuracy of each bin; 0 where it is empty."""
        return (self.confidences - self.hits) / np.maximum(self.counts, 1)

    @property
    def ece(self) -> float:
        return float(np.abs(self.gaps) @ self.counts / self.counts.sum())

    @property
    def mce(self) -> float:
        return float(np.abs(self.gaps).max())


def draw(results: Sequence[Result], methods: Sequence[str], shifts: Sequence[str] | None = None) -> Figure:
    """One column a method, over all of the given shifts and all seeds together.

    Only shifts and seeds that all of the methods have are drawn, so that none is favoured by what it lacks. `clean`
    among the methods is the source model on clean images, whatever the shifts.
    """
    adapted = [method for method in methods if method != CLEAN]
    columns: dict[str, list[Result]] = {}
    notes: list[str] = []
    over = ""
    if adapted:
        grid = picking.pick([r for r in results if r.cell.shift != CLEAN], adapted, shifts)
        places = [_places(grid.cells, method) for method in grid.methods]
        shared = sorted(set.intersection(*places))
        if not shared:
            raise DataError(
                f"there is no shift and seed that all of {', '.join(grid.methods)} have done; choose fewer methods"
            )
        columns = {method: [grid.cells[method, *place] for place in shared] for method in grid.methods}
        there = [shift for shift in grid.shifts if any(shift == other for other, _ in shared)]
        named = ", ".join(map(style.words, there)) if len(there) <= 3 else f"{len(there)} shifts"
        over = f"{grid.benchmark} ({grid.protocol}), {named}"
        seeds = len({seed for _, seed in shared})
        notes.append(f"{picking.counted(len(there), 'shift')}, {picking.counted(seeds, 'seed')}")
        if len(shared) < len(set.union(*places)):
            notes[0] += (
                f": {picking.counted(len(shared), 'pair')} of shift and seed, those that all of these methods have done"
            )
        notes += picking.notes(grid, adapted, shifts)
    if CLEAN in methods:
        home = picking.pick(results, ["source-only"], [CLEAN])
        columns[CLEAN] = [result for result in home.cells.values() if not result.failed]
        over = over or f"{home.benchmark}, clean images"
        notes.append(f"{CLEAN} is the source model on clean images, {picking.counted(len(columns[CLEAN]), 'seed')}")
    if not columns:
        raise DataError("no method is named; expected at least one")
    order = [method for method in dict.fromkeys(methods) if method in columns]
    pooled = {method: pool(columns[method]) for method in order}
    if any(len(column) > 1 for column in columns.values()):
        notes.append(
            "ECE and MCE are those of the pooled bins, in which too much and too little confidence may cancel out"
        )
    return _figure(pooled, f"Confidence and accuracy: {over}", notes)


def pool(results: Sequence[Result]) -> Bins:
    """The bins of all results together, as if all their images had been scored at once."""
    without = [result for result in results if not result.manifest.get("reliability")]
    if without:
        raise DataError(
            f"{len(without)} of {len(results)} results have no reliability bins (the first is {without[0].cell}), "
            "which compact exports and older versions do not hold; name a seed or methods that were run here, or merge "
            "the store that they come from into a new folder"
        )
    tables = [result.manifest["reliability"] for result in results]
    edges = {(*(part["lower"] for part in table), table[-1]["upper"]) for table in tables}
    if len(edges) > 1:
        counts = sorted({len(edge) - 1 for edge in edges})
        raise DataError(f"the results have other bins than each other ({counts} bins), which cannot be pooled")
    rows = np.array([[_sums(part) for part in table] for table in tables]).sum(axis=0)
    if not rows[:, 0].any():
        raise DataError(f"the reliability bins of {results[0].cell} are all empty; run it again")
    return Bins(np.array(edges.pop()), *rows.T)


def _sums(part: dict[str, Any]) -> tuple[float, float, float]:
    count = part["count"]
    return (count, count * part["confidence"], count * part["accuracy"]) if count else (0, 0, 0)


def _places(cells: dict[tuple[str, str, int], Result], method: str) -> set[tuple[str, int]]:
    return {(shift, seed) for (of, shift, seed), result in cells.items() if of == method and not result.failed}


def _figure(pooled: dict[str, Bins], title: str, notes: Sequence[str]) -> Figure:
    ratios = {"height_ratios": (2.4, 1)}
    figure, axes = style.canvas(2, len(pooled), width=2.1, height=2.1, sharex=True, sharey="row", gridspec_kw=ratios)
    if len(pooled) == 1:
        figure.set_figwidth(3.9)  # or the title and the notes would have no room
    for (method, bins), (diagram, histogram) in zip(pooled.items(), axes.T, strict=True):
        diagram.set_title(method, fontsize=10, loc="left")
        _diagram(diagram, bins)
        _histogram(histogram, bins)
    axes[0, 0].set_ylabel("accuracy, %", fontsize=style.LABEL)
    axes[1, 0].set_ylabel("images, %", fontsize=style.LABEL)
    for axis in axes[1]:
        axis.set_xlabel("confidence, %", fontsize=style.LABEL)
    style.legend(figure, title, axes[0, 0].get_legend_handles_labels(), 3)
    style.footer(figure, notes)
    return figure


def _diagram(axis: Any, bins: Bins) -> None:
    filled = bins.counts > 0
    counts, left, width = bins.counts[filled], 100 * bins.edges[:-1][filled], 100 * np.diff(bins.edges)[filled]
    accuracy, confidence = 100 * bins.hits[filled] / counts, 100 * bins.confidences[filled] / counts
    axis.bar(
        left,
        accuracy,
        width,
        align="edge",
        color=style.ADAPTED,
        alpha=0.55,
        edgecolor="white",
        linewidth=0.6,
        label="accuracy",
    )
    axis.bar(
        left,
        np.abs(confidence - accuracy),
        width,
        np.minimum(accuracy, confidence),
        align="edge",
        facecolor="none",
        edgecolor=style.TARGET,
        hatch="////",
        linewidth=0.8,
        label="gap to the mean confidence",
    )
    axis.plot([0, 100], [0, 100], color="#222222", linewidth=0.8, linestyle="--", label="no gap")
    axis.set_xlim(0, 100)
    axis.set_ylim(0, 100)
    axis.text(
        0.05,
        0.95,
        f"ECE {100 * bins.ece:.1f} %\nMCE {100 * bins.mce:.1f} %",
        transform=axis.transAxes,
        va="top",
        fontsize=style.LABEL,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )


def _histogram(axis: Any, bins: Bins) -> None:
    total = bins.counts.sum()
    axis.bar(
        100 * bins.edges[:-1],
        100 * bins.counts / total,
        100 * np.diff(bins.edges),
        align="edge",
        color="#bbbbbb",
        edgecolor="white",
        linewidth=0.6,
    )
    means = ("accuracy", bins.hits, style.ADAPTED, "-"), ("confidence", bins.confidences, style.TARGET, "--")
    for (name, sums, shade, dashes), side in zip(means, ("left", "right"), strict=True):
        mean = 100 * sums.sum() / total
        axis.axvline(mean, color=shade, linewidth=1.4, linestyle=dashes)
        said = f"{name} {mean:.1f} %"
        axis.set_title(said, loc=side, fontsize=style.SMALL, color=style.ink(shade), pad=3)
    axis.set_ylim(0, 100)
