"""What a store knows of a benchmark: the results that belong to its settings as they are now, and the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shiftmend.research.bench import store as compact
from shiftmend.research.bench.benchmark import CLEAN, Benchmark, Cell, Origin, Result, Root
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.run import STORE
from shiftmend.research.bench.store import Store, is_database
from shiftmend.research.bench.suite import find


@dataclass(frozen=True)
class Reading:
    """One benchmark under one protocol, as far as it has been run."""

    benchmark: Benchmark
    cells: list[Cell]
    """Of the benchmark's seeds, or of those asked for; other seeds only as far as they have been run."""
    results: list[Result]
    """Of these cells, failed ones too."""
    clean: list[Result]
    """The source model on clean images, which every protocol may be compared with."""
    others: int
    """Results of the same benchmark and protocol that do not count: of other settings, data or learning rates."""

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(cell.method for cell in self.cells))


def read(
    benchmark: str,
    folder: str | os.PathLike[str],
    protocol: str = "offline",
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    root: str | os.PathLike[str] | None = None,
) -> Reading:
    """The results in `folder/results.sqlite`, or in a file that `bench export --format compact` wrote.

    The other arguments mean what they mean to `runner.run`.

    They can be read where the data sets are not: if a store has results on published images of a shift, those count,
    whatever a run here would have to make do with. Where it has several, those that a run here would go on with.
    """
    chosen, place = find(benchmark), None if root is None else Path(root)
    everything = stored(folder, chosen.name)
    there = [result for result in everything if result.cell.protocol == protocol]
    found = _with_stored_origins(chosen, everything)
    own = plan(found, protocol, methods=methods, seeds=seeds, rates=rates, root=place)
    extra = sorted({result.cell.seed for result in there} - set(chosen.seeds)) if seeds is None else []
    wanted = {*own, *(plan(found, protocol, methods=methods, seeds=extra, rates=rates, root=place) if extra else ())}
    results = [result for result in there if result.cell in wanted]
    cells = own + [result.cell for result in results if result.cell.seed in extra]
    # whose cell could count if its method is asked for
    named = [result for result in there if methods is None or result.cell.method in methods]
    counted = [result for result in named if seeds is None or result.cell.seed in seeds]
    clean = _clean(found, everything, {cell.seed for cell in cells}, place)
    return Reading(chosen, cells, results, clean, len(counted) - len(results))


def stored(folder: str | os.PathLike[str], benchmark: str | None = None) -> list[Result]:
    """Everything in the store of a folder, which may be named itself, or in a compact export of one."""
    place = Path(folder)
    if place.is_file() and not is_database(place):
        return [result for result in compact.read_file(place) if benchmark in (None, result.cell.benchmark)]
    with Store(place if place.is_file() else place / STORE, read_only=True) as store:
        return store.results(benchmark=benchmark)


def _clean(benchmark: Benchmark, results: Sequence[Result], seeds: set[int], root: Root) -> list[Result]:
    if "source-only" not in benchmark.settings.get("offline", {}):
        return []
    cells = set(plan(benchmark, "offline", methods=["source-only"], shifts=[CLEAN], seeds=sorted(seeds), root=root))
    return [result for result in results if result.cell in cells]


def _with_stored_origins(benchmark: Benchmark, results: Sequence[Result]) -> Benchmark:
    """The origin of data is part of a cell's recipe; see `read` for which one it is taken to be.

    Failures count only for shifts on which nothing is done: one that failed here must not hide what was done elsewhere.
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
