"""The stored results of a benchmark: those of its current settings, and the number of others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path

from shiftmend.methods.adabn import AdaBN
from shiftmend.research.bench.benchmark import UNADAPTED, Benchmark, Cell, Origin, Result, Root, is_clean
from shiftmend.research.bench.plan import OUTDATED_KL, plan
from shiftmend.research.bench.store import load_results
from shiftmend.research.bench.suite import find

_BY_CELL = attrgetter(*(f"cell.{field.name}" for field in fields(Cell)))
"""Order of cells, as tuples: comparing a hundred thousand cells themselves takes a second."""


@dataclass(frozen=True)
class Reading:
    """The results of one benchmark under one protocol."""

    benchmark: Benchmark
    cells: list[Cell]
    """Cells of the benchmark's or the requested seeds; cells of other seeds only if they have been run."""
    results: list[Result]
    """Results of these cells, including failed ones."""
    clean: list[Result]
    """Results of the source model on clean images, for comparison with every protocol."""
    others: int
    """Number of results of the same benchmark and protocol with other settings, data or learning rates."""

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(cell.method for cell in self.cells))

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The benchmark's groups of shifts, and the severest and mildest shift here where these are not the paper's.

        The paper calls the shift severe that has the lowest accuracy after AdaBN, and that with the highest mild.
        """
        groups = dict(self.benchmark.groups)
        found: dict[str, list[float]] = {}
        for result in self.results:
            if result.cell.method == AdaBN.name and result.last is not None and not is_clean(result.cell.shift):
                found.setdefault(result.cell.shift, []).append(result.last.accuracy)
        if len(found) == len(self.benchmark.shifts):
            ranked = sorted(found, key=lambda shift: sum(found[shift]) / len(found[shift]))
            for name, shift in (("severe", ranked[0]), ("mild", ranked[-1])):
                if groups.get(name, (shift,)) != (shift,):
                    groups[f"{name} here"] = (shift,)
        return groups


def read(
    benchmark: str,
    folder: str | os.PathLike[str],
    protocol: str = "offline",
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    root: str | os.PathLike[str] | None = None,
    brief: bool = False,
) -> Reading:
    """Read the results in `folder/results.sqlite`, or in a compact file of `bench export --format compact`.

    The data sets are not needed. Results on published images of a shift take precedence. Otherwise the results count
    that a run on this machine would continue.

    Args:
        benchmark: A name, or `file.py:NAME`.
        folder: The folder of a store, a store, or a compact file.
        protocol: Protocol of the results, "offline" or "online".
        methods: Only these methods; by default all of the benchmark.
        seeds: Only these seeds; by default those of the benchmark and all others in the store.
        rates: Learning rates, if they differ from the benchmark's.
        root: Folder of the data sets, as for `shiftmend.research.bench.run.run`.
        brief: Whether to read only which cells are done or failed; see `Store.brief_results`.

    Returns:
        The results that belong to the benchmark as it is defined now, and how many others there are.
    """
    chosen, place = find(benchmark), None if root is None else Path(root)
    everything = load_results(folder, chosen.name, brief=brief)
    there = [result for result in everything if result.cell.protocol == protocol]
    found = _with_stored_origins(chosen, everything)

    def planned(former: bool = False) -> list[Cell]:
        return plan(found, protocol, methods=methods, seeds=seeds, rates=rates, root=place, former=former)

    own, former = planned(), planned(True)
    numbers = {cell.seed for cell in own}
    extra = {result.cell.seed for result in there} - numbers if seeds is None else set()
    # Recipes do not depend on seeds. To plan the cells of all other seeds would take longer than to read them.
    before = {(now.method, now.shift): (old.recipe, now.recipe) for old, now in zip(former, own, strict=True)}
    counted = numbers | extra
    results = _take_current([result for result in there if result.cell.seed in counted], before)
    cells = own + [result.cell for result in results if result.cell.seed in extra]
    candidates = [
        result
        for result in there
        if (methods is None or result.cell.method in methods) and (seeds is None or result.cell.seed in seeds)
    ]
    clean = _find_clean(found, everything, {cell.seed for cell in cells}, place)
    return Reading(chosen, cells, results, clean, len(candidates) - len(results))


def _take_current(results: Sequence[Result], recipes: Mapping[tuple[str, str], tuple[str, str]]) -> list[Result]:
    """Take the result of each cell under its present recipe, else under its former one with a remark.

    Args:
        results: Results of any cells.
        recipes: Former and present recipe by method and shift; most are equal.
    """
    current: dict[Cell, Result] = {}
    outdated = []
    for result in results:
        cell = result.cell
        former, present = recipes.get((cell.method, cell.shift), ("", ""))
        if cell.recipe == present:
            current[cell] = result
        elif cell.recipe == former and not result.failed:
            outdated.append(replace(result, cell=replace(cell, recipe=present)))
    for result in outdated:
        if result.cell not in current or current[result.cell].failed:
            current[result.cell] = replace(result, manifest=result.manifest | {"outdated": OUTDATED_KL})
    return sorted(current.values(), key=_BY_CELL)


def _find_clean(benchmark: Benchmark, results: Sequence[Result], seeds: set[int], root: Root) -> list[Result]:
    if UNADAPTED not in benchmark.settings.get("offline", {}):
        return []
    shifts, numbers = benchmark.clean_sets, sorted(seeds)
    cells = set(plan(benchmark, "offline", methods=[UNADAPTED], shifts=shifts, seeds=numbers, root=root))
    return [result for result in results if result.cell in cells]


def _with_stored_origins(benchmark: Benchmark, results: Sequence[Result]) -> Benchmark:
    """Take the origin of the data, which is part of a cell's recipe, from the results; see `read`.

    Failed results count only for shifts without a finished one, so that a local failure does not hide a result.
    """
    done = {result.cell.shift for result in results if not result.failed}
    found: dict[str, list[Origin]] = {}
    for result in sorted(results, key=lambda result: result.finished):
        if not result.failed or result.cell.shift not in done:
            found.setdefault(result.cell.shift, []).append(result.origin)

    def origin(shift: str, root: Root) -> Origin:
        here, there = benchmark.origin(shift, root), found.get(shift)
        return here if there is None or here in there else there[-1]

    return replace(benchmark, origin=origin)
