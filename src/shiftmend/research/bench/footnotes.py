"""The notes below a table: what a reader must know to judge it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from shiftmend.research.analysis.comparisons import Comparison, leads
from shiftmend.research.bench.benchmark import CLEAN, UNADAPTED, Benchmark, Result, Which, sees_labels
from shiftmend.research.bench.grids import METRICS, Beside, Grid
from shiftmend.research.bench.published import is_published
from shiftmend.research.bench.rendering import Column, Entry, format_number

ORIGINS = {
    "rebuilt": ("†", "rebuilt, with other textures than the published ones"),
    "regenerated": ("‡", "made again by the published recipe"),
    "own": ("§", "data of our own"),
}
"""Marks of data that are not the published files, with their meaning."""

ORACLE = "best is an oracle: the epoch with the highest accuracy, found with labels that a new site does not have"

SEVERITY = (
    "severe and mild are the shifts with the lowest and the highest accuracy after AdaBN: by the paper's results, and "
    "where ours say otherwise also by ours (here)"
)

QUOTED = (
    "* quoted by the paper from other work, and not run here: these methods need the source data while they adapt, "
    "which the others do without"
)

PARTIAL = "a fraction counts the cells that are there: no mean is taken before one seed has every shift"

NO_BEST = "none is marked as best where methods lack cells or have different seeds"

STREAM = (
    "the published ECE of a stream is the mean over its batches, which small batches bias upwards: no difference is "
    "taken, and what compares with it is ece_per_batch"
)

RATES = (
    "learning rates are those that the authors published; the paper says that they chose them on a validation set of "
    "the test domain, that is, with labels of the target (how exactly is not published)"
)


RATES_ONLINE = (
    "online, each method made one pass with each of several learning rates: last is the pass whose model the slices "
    "find closest to home at its end, best the most accurate one, found with labels, as the paper chose"
)


def origin_marks(grid: Grid, shifts: Sequence[str]) -> str:
    """Return the marks behind the name of a shift or of a group of shifts."""
    found = grid.origins(shifts)
    return "".join(mark for origin, (mark, _) in ORIGINS.items() if origin in found)


def about_origins(grid: Grid) -> list[str]:
    """Explain the marks."""
    found = grid.origins(grid.shifts)
    return [
        f"{mark} {meaning}: {'all shifts' if len(found[origin]) == len(grid.shifts) else ', '.join(found[origin])}"
        for origin, (mark, meaning) in ORIGINS.items()
        if origin in found
    ]


def about_data(grid: Grid) -> list[str]:
    """Describe how the images differ from the published ones, and which results must not be compared."""
    results = list(grid.cells.values())
    return [*source_remarks(results), *about_origins(grid), *about_mixtures(results), *about_outdated(results)]


def about_outdated(results: Iterable[Result]) -> list[str]:
    """List the rows that were obtained with an earlier definition of their method, and must be run again."""
    rows: dict[str, set[str]] = {}
    for result in results:
        if remark := result.manifest.get("outdated"):
            rows.setdefault(remark, set()).add(result.cell.method)
    return [f"{join_names(sorted(names), 4)}: {remark}" for remark, names in rows.items()]


def about_mixtures(results: Iterable[Result]) -> list[str]:
    """Warn about results that are compared although they come from different images or models.

    The code that reads or makes images may have changed between two runs, or files may differ between machines. A lost
    source model is trained again, and on a GPU never ends with exactly the same weights.
    """
    inputs: dict[tuple[str, int | None], set[str]] = {}
    models: dict[tuple[str, int], set[str]] = {}
    trained: dict[tuple[str, int], set[str]] = {}
    for result in results:
        cell, manifest = result.cell, result.manifest
        source, digest = manifest.get("source") or {}, (manifest.get("target") or {}).get("sha256")
        # A method that uses labels gets only a part of the images.
        if digest and not sees_labels(cell.method):
            # The seed draws the images of a few-shot protocol.
            drawn = (manifest.get("protocol") or {}).get("kind") == "few-shot"
            inputs.setdefault((cell.shift, cell.seed if drawn else None), set()).add(digest)
        if source.get("file"):
            models.setdefault((source["name"], cell.seed), set()).add(source["file"])
        if weights := manifest.get("source_weights"):
            trained.setdefault((source.get("name", ""), cell.seed), set()).add(weights)
    shifts = sorted({shift for (shift, _), digests in inputs.items() if len(digests) > 1})
    names = sorted({name for (name, _), files in models.items() if len(files) > 1})
    notes = [f"not every cell was run on the same images of {join_names(shifts, 4)}"] if shifts else []
    notes += [f"the source model {name} was not trained on the same images for every cell" for name in names]
    retrained = sorted(key for key, weights in trained.items() if len(weights) > 1)
    if again := [f"{name} of seed {seed}" for name, seed in retrained if name not in names]:
        notes.append(f"not every cell starts from the same training of the source model {join_names(again, 4)}")
    return [f"{note}; run the benchmark again in another folder" for note in notes]


def about_comparisons(compared: Sequence[Comparison], known: int, metric: str = "accuracy") -> list[str]:
    """Count the shifts on which each method is better, then give each remark once.

    `known` is the number of the benchmark's shifts.
    """
    *each, overall = compared
    first, second = leads(each, metric)
    done = sum(one.pairs > 0 for one in each)
    counts = f"{overall.first} is better on {first} of {done} shifts, {overall.second} on {second}"
    remarks: dict[str, list[str]] = {}
    for one in compared:
        if one.remark:
            remarks.setdefault(one.remark, []).append(one.over(known))
    return [
        *([counts] if done > 1 else []),
        *(f"{remark}: {join_names(shifts, 3)}" for remark, shifts in remarks.items()),
    ]


def source_remarks(results: Iterable[Result]) -> list[str]:
    """Describe how the source images differ from the published ones, according to the manifests."""
    sources = [result.manifest.get("source") or {} for result in results]
    return list(dict.fromkeys(str(source["remark"]) for source in sources if source.get("remark")))


def about_numbers(grid: Grid, ours: Sequence[tuple[str, str, Entry]], line: str | None = None) -> list[str]:
    """State the unit and the number of seeds of entries.

    Args:
        grid: The results.
        ours: Entries, each with its method and the name of the set of shifts that it is a mean over.
        line: Where `tables.count_seeds` counts seeds, a column or a row. None in a figure: the note counts them.
    """
    notes = [f"{grid.shown.title} in {grid.shown.unit}"] if grid.shown.unit else []
    shown = [(method, name, entry) for method, name, entry in ours if entry.value is not None]
    notes += [*_about_seeds(shown, line), *_about_unfinished(shown)]
    return [*notes, PARTIAL] if any(entry.text for _, _, entry in ours) else notes


def _about_seeds(shown: Sequence[tuple[str, str, Entry]], line: str | None) -> list[str]:
    by_method: dict[str, dict[str, tuple[int, ...]]] = {}
    for method, name, entry in shown:
        by_method.setdefault(method, {})[name] = entry.seeds
    different = {seeds for means in by_method.values() for seeds in means.values()}
    counts = {len(seeds) for seeds in different}
    if not different:
        return []
    if len(counts) == 1:
        [most] = counts
        note = f"mean ± standard deviation over {most} seeds" if most > 1 else "one seed, hence no standard deviation"
        if len(different) == 1:
            return [note]
        which = [
            f"{method} {', '.join(map(str, sorted({seed for seeds in means.values() for seed in seeds})))}"
            for method, means in by_method.items()
        ]
        return [f"{note}; not the same everywhere: {join_names(which, 4, '; ')}"]
    if counts_by_set := _count_by_set(by_method):
        return [f"mean ± standard deviation over {counts_by_set}"]
    if line is None:
        return [f"mean ± standard deviation over {max(counts)} seeds, but {_fewer(by_method, max(counts))}"]
    note = f"mean ± standard deviation over {min(counts)} to {max(counts)} seeds, see the {line} of seeds"
    return [
        "; ".join([note, *(["a single one has no deviation"] if min(counts) == 1 else []), *_exceptions(by_method)])
    ]


def _count_by_set(by_method: dict[str, dict[str, tuple[int, ...]]]) -> str:
    """Describe the number of seeds of each set of shifts; "" if it depends on the method, or is one for some set."""
    numbers: dict[str, set[int]] = {}
    for means in by_method.values():
        for name, seeds in means.items():
            numbers.setdefault(name, set()).add(len(seeds))
    if any(len(found) > 1 or 1 in found for found in numbers.values()):
        return ""
    names: dict[int, list[str]] = {}
    for name, [number] in numbers.items():
        names.setdefault(number, []).append(name)
    [usual, *others] = sorted(names, key=lambda number: -len(names[number]))
    return ", ".join([f"{usual} seeds", *(f"{number} for {join_names(names[number], 3)}" for number in others)])


def _fewer(by_method: dict[str, dict[str, tuple[int, ...]]], most: int) -> str:
    found = []
    for method, means in by_method.items():
        names = {name: len(seeds) for name, seeds in means.items() if len(seeds) < most}
        if names:
            fewest, others = min(names.values()), max(names.values())
            where = "" if len(names) == len(means) else f" ({join_names(names, 3)})"
            found.append(
                f"{fewest} for {method}{where}" if fewest == others else f"{fewest} to {others} for {method}{where}"
            )
    return join_names(found, 4)


def _exceptions(by_method: dict[str, dict[str, tuple[int, ...]]]) -> list[str]:
    """List the means of a method that are over another number of seeds than most of its means."""
    found = []
    for method, means in by_method.items():
        numbers = Counter(map(len, means.values()))
        [(usual, _)] = numbers.most_common(1)
        for number in sorted(set(numbers) - {usual}):
            names = [name for name, seeds in means.items() if len(seeds) == number]
            found.append(f"{method} has {number} for {join_names(names, 3)}")
    return [join_names(found, 4)] if found else []


def _about_unfinished(shown: Sequence[tuple[str, str, Entry]]) -> list[str]:
    by_method: dict[str, set[int]] = {}
    for method, _, entry in shown:
        if entry.unfinished:
            by_method.setdefault(method, set()).update(entry.unfinished)
    methods: dict[tuple[int, ...], list[str]] = {}
    for method, seeds in by_method.items():
        methods.setdefault(tuple(sorted(seeds)), []).append(method)
    which = [
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))} of {join_names(names, 4)}"
        for seeds, names in methods.items()
    ]
    return (
        [f"a mean is over the seeds that have all of its shifts; left out: {join_names(which, 4, '; ')}"]
        if which
        else []
    )


def about_rows(grid: Grid, shown: Sequence[str], ours: Sequence[tuple[str, str, Entry]]) -> list[str]:
    """List methods without a row, and say if a set of shifts has no best although there are rivals."""
    missing = [method for method in grid.methods if method not in shown]
    notes = [f"not run: {', '.join(missing)}"] if missing else []
    rivals: dict[str, list[Entry]] = {}
    for method, name, entry in ours:
        if entry.value is not None and math.isfinite(entry.value) and not sees_labels(method):
            rivals.setdefault(name, []).append(entry)
    undecided = any(len(entries) > 1 and not any(entry.best for entry in entries) for entries in rivals.values())
    return [*notes, NO_BEST] if undecided and grid.shown.better is not None else notes


def about_published(grid: Grid, found: bool) -> list[str]:
    """State whose figures are shown beside ours; `found` is True if the table has any."""
    if grid.beside is None:
        return []
    name = {"paper": "the paper", "re-run": "the authors' re-run of their released code"}[grid.beside]
    if not found:
        return [f"{name} has no figures for this table"]
    notes = [f"{grid.beside} is {name}"] if grid.beside == "re-run" else []
    return [*notes, STREAM if grid.unlike else f"difference is ours minus the {grid.beside}'s"]


def about_rates(grid: Grid) -> list[str]:
    """State whether target labels influenced the figures through the published learning rates."""
    results = list(grid.cells.values())
    searched = any("learning_rates_tried" in r.manifest and r.ece_per_batch is not None for r in results)
    given = any(result.manifest.get("learning_rate_chosen") == "given" for result in results)
    return [*([RATES] if given and is_published(grid.benchmark) else []), *([RATES_ONLINE] if searched else [])]


def about_clean(
    results: Sequence[Result], *, benchmark: Benchmark, metric: str, which: Which, beside: Sequence[Beside]
) -> list[str]:
    """Give the source model's score on clean images, beside the published one."""
    if METRICS[metric].of_the_run:
        return []
    options: dict[str, Any] = {"metric": metric, "which": which, "beside": beside}
    notes = [_about_clean_set(results, benchmark, name, **options) for name in benchmark.clean_sets]
    return [note for note in notes if note]


def _about_clean_set(
    results: Sequence[Result], benchmark: Benchmark, clean: str, *, metric: str, which: Which, beside: Sequence[Beside]
) -> str:
    said = ""
    for side in beside or (None,):
        grid = Grid(
            results=results,
            benchmark=benchmark.name,
            protocol="offline",
            methods=[UNADAPTED],
            shifts=[clean],
            metric=metric,
            which=which,
            beside=side,
        )
        ours, there, _ = grid.comparisons({clean: (clean,)})[UNADAPTED, clean]
        if ours.value is None:
            return ""
        column = Column("", digits=grid.shown.digits)
        if not said:
            said = (
                f"{grid.shown.title} of {clean_source(benchmark, clean)} on clean images: {format_number(ours, column)}"
            )
            said += f" ({'one seed' if len(ours.seeds) == 1 else f'{len(ours.seeds)} seeds'})"
        said += "" if there.value is None else f", in the {side} {format_number(there, column)}"
    return said


def clean_source(benchmark: Benchmark, clean: str = CLEAN) -> str:
    """Name the model that is scored on clean images, with its shifts if other shifts have another source model."""
    setting = benchmark.settings.get("offline", {}).get(UNADAPTED)
    if setting is None:
        return "the source model"
    name = benchmark.source_for(setting, clean)
    own = [shift for shift in benchmark.shifts if benchmark.source_for(setting, shift) == name]
    return "the source model" if len(own) == len(benchmark.shifts) else f"the source model {name} (of {', '.join(own)})"


def about_failures(grid: Grid) -> list[str]:
    """Count the failed cells, and quote the first of them."""
    failed = [result for result in grid.cells.values() if result.failed]
    if not failed:
        return []
    first = min(failed, key=lambda result: (result.finished, result.cell))
    lines = [line.strip() for line in (first.error or "").splitlines() if line.strip()] or ["no message"]
    error = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    which = "" if len(failed) == 1 else ", the first of them"
    return [f"{len(failed)} of {len(grid.cells)} cells failed{which}: {first.cell}: {error}"]


def join_names(names: Iterable[str], most: int, between: str = ", ") -> str:
    """Join the first names with commas, and count the others."""
    names = list(names)
    rest = len(names) - most
    return between.join(names) if rest <= 0 else f"{between.join(names[:most])} and {rest} more"
