"""The results of one benchmark as a grid of methods, shifts and seeds, with the means that a table shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import Result, Which, sees_labels
from shiftmend.research.bench.published import Figure, figure
from shiftmend.research.bench.rendering import Entry

Beside = Literal["paper", "re-run"]
"""Source of the published figures: the paper, or its authors' re-run of their code."""

Comparison = tuple[Entry, Entry, Entry]
"""Ours, the published figure, and the difference."""


@dataclass(frozen=True)
class Metric:
    """Display settings of a quantity in tables.

    Attributes:
        title: Name of the quantity.
        unit: Unit of the shown values; empty if there is none.
        scale: Factor from stored to shown values.
        digits: Digits after the decimal point.
        better: Which values tables mark as best; None marks none. Some methods optimise the alignment loss, and the
            method that does nothing needs the least time and memory.
        of_the_run: Whether the quantity is known only for the whole run or its end, not for the best or the selected
            epoch.
    """

    title: str
    unit: str = ""
    scale: float = 1.0
    digits: int = 1
    better: Literal["highest", "lowest"] | None = "lowest"
    of_the_run: bool = False


METRICS = {
    "accuracy": Metric("accuracy", "percent", 100, better="highest"),
    "mean_class_accuracy": Metric("accuracy, mean over classes", "percent", 100, better="highest", of_the_run=True),
    "ece": Metric("ECE", "percent", 100),
    "ece_per_batch": Metric("ECE, mean over batches", "percent", 100, of_the_run=True),
    "mce": Metric("MCE", "percent", 100),
    "brier": Metric("Brier score", "percent", 100),
    "nll": Metric("negative log-likelihood", digits=2),
    "restoration_distance": Metric("restoration distance", digits=2, of_the_run=True),
    "alignment_loss": Metric("alignment loss", digits=4, better=None, of_the_run=True),
    "seconds": Metric("time", "seconds", better=None, of_the_run=True),
    "peak_memory": Metric("peak memory", "MiB", 2**-20, digits=0, better=None, of_the_run=True),
}


class Published(Protocol):
    """A source of published numbers; `shift` may be a summary such as `all` or `severe`."""

    def __call__(
        self, benchmark: str, protocol: str, metric: str, method: str, shift: str, source: Beside
    ) -> Figure | None: ...


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The results of a table, and the quantity that it shows; other results are ignored."""

    results: Sequence[Result]
    benchmark: str
    protocol: str
    methods: Sequence[str]
    shifts: Sequence[str]
    metric: str = "accuracy"
    which: Which = "last"
    beside: Beside | None = None
    published: Published = figure
    cells: dict[tuple[str, str, int], Result] = field(init=False, default_factory=dict)
    """Results by method, shift and seed."""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise DataError(f"Expected the metric to be one of {', '.join(METRICS)}, got {self.metric!r}.")
        if self.which not in ("last", "best", "selected"):
            raise DataError(f"Expected the epoch to be last, best or selected, got {self.which!r}.")
        if self.shown.of_the_run and self.which != "last":
            raise DataError(
                f"Expected which='last' for {self.metric}, which other epochs do not have, got {self.which}."
            )
        for result in self.results:
            cell = result.cell
            if (cell.benchmark, cell.protocol) != (self.benchmark, self.protocol):
                continue
            if cell.method not in self.methods or cell.shift not in self.shifts:
                continue
            key = (cell.method, cell.shift, cell.seed)
            if key in self.cells:
                raise DataError(
                    f"Expected one result of {cell}, got two. Pass those of one recipe, and each of them once."
                )
            self.cells[key] = result

    @property
    def shown(self) -> Metric:
        return METRICS[self.metric]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({seed for _, _, seed in self.cells}))

    @property
    def unlike(self) -> bool:
        """True if ours is the ECE of a whole stream, which is not comparable with the published mean over batches."""
        return self.metric == "ece" and any(result.ece_per_batch is not None for result in self.cells.values())

    @property
    def run(self) -> list[str]:
        """The methods with at least one result, even a failed one."""
        there = {method for method, _, _ in self.cells}
        return [method for method in self.methods if method in there]

    def sets(self, groups: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
        """List all shifts, then each group of them."""
        return {"all": tuple(self.shifts)} | {name: tuple(members) for name, members in (groups or {}).items()}

    def mean(self, method: str, shifts: Sequence[str], read: Callable[[Result], float | None] | None = None) -> Entry:
        """Average a method over shifts, and then over complete seeds: those with a result on every shift.

        Args:
            method: Row of the table.
            shifts: Shifts to average over.
            read: Function that reads the number from a result; by default the metric of the grid.

        Returns:
            Mean and standard deviation over the complete seeds. Without a complete seed, the text "3/12": 3 of 12 cells
            have a number. The entry is empty if no cell has a number and none failed.
        """
        read = read or self._read
        runs = [[self.cells.get((method, shift, seed)) for shift in shifts] for seed in self.seeds]
        values = [[None if result is None or result.failed else read(result) for result in run] for run in runs]
        complete = {
            seed: [value for value in found if value is not None]
            for seed, found in zip(self.seeds, values, strict=True)
            if None not in found
        }
        if complete:
            # A diverged run has infinities, which a table shows as they are.
            with np.errstate(invalid="ignore"):
                means = self.shown.scale * np.asarray([*complete.values()], dtype=np.float64).mean(axis=1)
                mean = float(means.mean())
                deviation = float(means.std(ddof=1)) if len(means) > 1 and np.isfinite(mean) else None
            begun = (seed for seed, run in zip(self.seeds, runs, strict=True) if any(run) and seed not in complete)
            return Entry(mean, deviation, seeds=tuple(complete), unfinished=tuple(begun))
        known = sum(value is not None for seed in values for value in seed)
        failed = any(result is not None and result.failed for run in runs for result in run)
        return Entry(text=f"{known}/{len(shifts) * len(self.seeds)}" if known or failed else "")

    def comparisons(self, sets: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], Comparison]:
        """Compare every method on every set of shifts with the published figure, and mark the best of each set."""
        compared: dict[tuple[str, str], Comparison] = {}
        for name, members in sets.items():
            compared |= {(method, name): self._compare(method, name, members) for method in self.methods}
            for method in self.best({method: compared[method, name][0] for method in self.methods}):
                ours, there, difference = compared[method, name]
                compared[method, name] = (replace(ours, best=True), there, difference)
        return compared

    def best(self, entries: Mapping[str, Entry]) -> list[str]:
        """List the best methods, to the digits shown.

        There is none if a competitor has no mean, or one over other seeds; a method that was not run does not compete.
        """
        rivals = {method: entries[method] for method in self.run if not sees_labels(method)}
        seeds = {entry.seeds for entry in rivals.values()}
        if self.shown.better is None or len(rivals) < 2 or len(seeds) > 1 or not all(seeds):
            return []
        values = {
            method: round(entry.value, self.shown.digits)
            for method, entry in rivals.items()
            if entry.value is not None and np.isfinite(entry.value)
        }
        best = (max if self.shown.better == "highest" else min)(values.values(), default=None)
        return [method for method, value in values.items() if value == best]

    def origins(self, shifts: Sequence[str]) -> dict[str, list[str]]:
        """List the shifts of each origin of data that occurs."""
        found: dict[str, set[str]] = {}
        for (_, shift, _), result in self.cells.items():
            found.setdefault(result.origin, set()).add(shift)
        by_origin = {origin: [shift for shift in shifts if shift in there] for origin, there in sorted(found.items())}
        return {origin: members for origin, members in by_origin.items() if members}

    def _compare(self, method: str, name: str, members: Sequence[str]) -> Comparison:
        ours = self.mean(method, members)
        found = self._find_published(method, name)
        if found is None and len(members) == 1:
            found = self._find_published(method, members[0])
        if found is None:
            return ours, Entry(), Entry()
        scale = self.shown.scale
        there = Entry(scale * found.mean, None if found.deviation is None else scale * found.deviation)
        return ours, there, Entry(None if ours.value is None else ours.value - scale * found.mean)

    def _read(self, result: Result) -> float | None:
        outcome = result if self.shown.of_the_run else getattr(result, self.which)
        return None if outcome is None else getattr(outcome, self.metric)

    def _find_published(self, method: str, shift: str) -> Figure | None:
        if self.beside is None:
            return None
        # What is published as the ECE of a stream is the mean over its batches, and what is published of VisDA-C is an
        # accuracy that the paper calls average, over images or over classes.
        metric = {"ece_per_batch": "ece", "mean_class_accuracy": "accuracy"}.get(self.metric, self.metric)
        return self.published(self.benchmark, self.protocol, metric, method, shift, source=self.beside)
