"""The parts of a page of results: tables with a few words before them, each for what has been run and no further."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shiftmend.bench import tables, tabular
from shiftmend.bench.base import CLEAN, Benchmark
from shiftmend.bench.cells import Result
from shiftmend.bench.grids import SUPERVISED, Beside
from shiftmend.bench.reading import Reading
from shiftmend.bench.tabular import Table

Block = str | Table


@dataclass(frozen=True)
class Part:
    """One protocol of a benchmark, as far as it has been run."""

    protocol: str
    reading: Reading

    @property
    def benchmark(self) -> Benchmark:
        return self.reading.benchmark

    @property
    def results(self) -> list[Result]:
        """Of shifts; clean images are none."""
        return [result for result in self.reading.results if result.cell.shift != CLEAN]

    @property
    def methods(self) -> list[str]:
        there = {result.cell.method for result in self.results}
        return [method for method in self.reading.methods if method in there]

    @property
    def shifts(self) -> list[str]:
        there = {result.cell.shift for result in self.results}
        return [shift for shift in self.benchmark.shifts if shift in there]

    @property
    def whole(self) -> bool:
        return len(self.shifts) == len(self.benchmark.shifts)

    @property
    def unsupervised(self) -> list[Result]:
        """Those that saw no labels and can be compared with each other."""
        return [result for result in self.results if not result.cell.method.startswith(SUPERVISED)]

    def asked(self, **more: Any) -> dict[str, Any]:
        """For a table: of all methods, as it says which of them were not run."""
        shared = {"benchmark": self.benchmark.name, "protocol": self.protocol}
        return shared | {"methods": self.reading.methods, "shifts": self.shifts} | more


def averages(part: Part, metrics: Sequence[str] = ("accuracy", "ece")) -> list[Block]:
    """Means over all shifts beside the paper and the authors' re-run, then those over groups of shifts."""
    if not part.whole:
        number = len(part.benchmark.shifts)
        return [f"No mean is taken before all {number} shifts have been run; see the figures of each shift below."]
    blocks: list[Block] = []
    for metric in metrics:
        asked = part.asked(groups=part.benchmark.groups, metric=metric)
        paper, rerun = (tables.summary(part.results, **asked, beside=side) for side in ("paper", "re-run"))
        both = tabular.beside_both(paper, rerun)
        everything, groups = _over(both, of_all=True), _over(both, of_all=False)
        blocks.append(everything)
        if groups.columns:
            blocks.append(replace(groups, title=f"{groups.title}, groups of shifts"))
    return blocks


def _over(table: Table, *, of_all: bool) -> Table:
    """The columns of all shifts, which come first, or those of the groups; the latter without differences, as narrower.

    What all columns have in common goes into the title.
    """
    first = next(column for column in table.columns if column.kind != "seeds")
    name = first.heading or first.title
    if not of_all:
        groups = tabular.only(table, lambda column: (column.heading or column.title) != name)
        return tabular.only(groups, lambda column: column.kind != "difference")
    chosen = tabular.only(table, lambda column: (column.heading or column.title) == name)
    columns = tuple(
        replace(column, title=column.title if column.heading or column.kind == "seeds" else "ours", heading="")
        for column in chosen.columns
    )
    return replace(chosen, columns=columns, title=f"{table.title}, {name}")


def by_shift(part: Part, metrics: Sequence[str] = ("accuracy", "ece")) -> list[Block]:
    blocks: list[Block] = []
    folded: list[Block] = []
    for metric in metrics:
        blocks.append(_per_shift(part, metric, None))
        for side in ("paper", "re-run"):
            table = _per_shift(part, metric, side)
            compared = tabular.only(table, lambda column: column.kind == "difference")
            if compared.columns:
                columns = tuple(replace(column, title=column.heading, heading="") for column in compared.columns)
                folded.append(
                    replace(compared, columns=columns, title=f"{table.title}, ours minus the {side}'s", marked="")
                )
    if folded:
        blocks += ["<details><summary>Each shift: ours minus the published figure</summary>", *folded, "</details>"]
    return blocks


def _per_shift(part: Part, metric: str, beside: Beside | None) -> Table:
    groups = part.benchmark.groups if part.whole else {}
    table = tables.per_shift(part.results, **part.asked(groups=groups, metric=metric, beside=beside))
    return table if part.whole else tabular.without_means(table)


def choice_of_epoch(part: Part) -> list[Block]:
    table = tables.selection(part.results, **part.asked())
    if not part.whole:
        table = replace(table, title=f"{table.title.rpartition(', ')[0]}, mean over the shifts run so far")
    return [table]


def few_shot(parts: Mapping[str, Part]) -> list[Block]:
    """Accuracy from few images of each class, beside that from all of them."""
    run = {protocol: part for protocol, part in parts.items() if part.results}
    few = {f"{name.removeprefix('few-shot-')} a class": name for name in run if name.startswith("few-shot-")}
    if not few:
        return []
    first = run[next(iter(few.values()))]
    methods = list(dict.fromkeys(method for name in few.values() for method in run[name].reading.methods))
    asked: dict[str, Any] = {
        "benchmark": first.benchmark.name,
        "protocols": few | ({"all images": "offline"} if "offline" in run else {}),
        "methods": methods,
        "shifts": first.benchmark.shifts,
    }
    results = [result for part in run.values() for result in part.results]
    paper, rerun = (tables.across(results, **asked, beside=side) for side in ("paper", "re-run"))
    return [tabular.only(tabular.beside_both(paper, rerun), lambda column: column.kind != "difference")]
