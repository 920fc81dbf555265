"""What a reader has to know about a table before believing it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shiftmend.bench.base import CLEAN
from shiftmend.bench.cells import Result, Which
from shiftmend.bench.grids import METRICS, Beside, Entry, Grid

ORIGINS = {
    "rebuilt": ("†", "rebuilt, with other textures than the published ones"),
    "regenerated": ("‡", "made again by the published recipe"),
    "own": ("§", "data of our own"),
}
"""The mark of data that are not the published files, and what it means."""

ORACLE = "best is an oracle: the epoch with the highest accuracy, found with labels that a new site does not have"
PARTIAL = "a fraction counts the cells that are there: no mean is taken before one seed has every shift"
STREAM = (
    "the published ECE of a stream is the mean over its batches, which small batches bias upwards: no difference is "
    "taken, and what compares with it is ece_per_batch"
)
RATES = (
    "learning rates are those that the authors published; the paper says that they chose them on a validation set of "
    "the test domain, that is, with labels of the target (how exactly is not published)"
)


def origin_marks(grid: Grid, shifts: Sequence[str]) -> str:
    """To set behind the name of a shift or of a group of them."""
    found = grid.origins(shifts)
    return "".join(mark for origin, (mark, _) in ORIGINS.items() if origin in found)


def about_origins(grid: Grid) -> list[str]:
    found = grid.origins(grid.shifts)
    return [
        f"{mark} {meaning}: {'all shifts' if len(found[origin]) == len(grid.shifts) else ', '.join(found[origin])}"
        for origin, (mark, meaning) in ORIGINS.items()
        if origin in found
    ]


def about_numbers(grid: Grid, ours: Sequence[tuple[str, str, Entry]]) -> list[str]:
    """Unit and seeds of entries, each with its method and the name of what it is a mean over."""
    notes = [f"{grid.shown.title} in {grid.shown.unit}"] if grid.shown.unit else []
    shown = [(method, name, entry.seeds) for method, name, entry in ours if entry.value is not None]
    if shown:
        most = max(seeds for _, _, seeds in shown)
        fewer: dict[tuple[str, int], list[str]] = {}
        for method, name, seeds in shown:
            if seeds < most:
                fewer.setdefault((method, seeds), []).append(name)
        note = f"mean ± standard deviation over {most} seeds" if most > 1 else "one seed, hence no standard deviation"
        parts = [f"{seeds} for {method} ({_listed(names, 3)})" for (method, seeds), names in fewer.items()]
        notes.append(f"{note}, but {_listed(parts, 4)}" if parts else note)
    return [*notes, PARTIAL] if any(entry.text for _, _, entry in ours) else notes


def about_published(grid: Grid, found: bool) -> list[str]:
    """`found` is whether the table has any published figure."""
    if grid.beside is None:
        return []
    name = {"paper": "the paper", "re-run": "the authors' re-run of their released code"}[grid.beside]
    if not found:
        return [f"{name} has no figures for this table"]
    notes = [f"{grid.beside} is {name}"] if grid.beside == "re-run" else []
    return [*notes, STREAM if grid.unlike else f"difference is ours minus the {grid.beside}'s"]


def about_rates(grid: Grid) -> list[str]:
    """Whether labels of the target had a part in the figures after all, by way of the published learning rates."""
    from shiftmend.bench.published import known

    given = any(result.manifest.get("learning_rate_chosen") == "given" for result in grid.cells.values())
    return [RATES] if given and known(grid.benchmark) else []


def about_clean(
    results: Sequence[Result], *, benchmark: str, metric: str, which: Which, beside: Beside | None
) -> list[str]:
    """How the source model does at home, from its results on clean images, beside what is published of it."""
    if METRICS[metric].of_the_run:
        return []
    grid = Grid(
        results=results,
        benchmark=benchmark,
        protocol="offline",
        methods=["source-only"],
        shifts=[CLEAN],
        metric=metric,
        which=which,
        beside=beside,
    )
    ours, there, _ = grid.comparisons({CLEAN: (CLEAN,)})["source-only", CLEAN]
    if ours.value is None:
        return []
    said = "" if there.value is None else f", in the {beside} {_number(there, grid.shown.digits)}"
    return [f"{grid.shown.title} of the source model on clean images: {_number(ours, grid.shown.digits)}{said}"]


def _number(entry: Entry, digits: int) -> str:
    deviation = "" if entry.deviation is None else f" ± {entry.deviation:.{digits}f}"
    return f"{entry.value:.{digits}f}{deviation}"


def about_failures(grid: Grid) -> list[str]:
    failed = [result for result in grid.cells.values() if result.failed]
    if not failed:
        return []
    first = min(failed, key=lambda result: (result.finished, result.cell))
    lines = [line.strip() for line in (first.error or "").splitlines() if line.strip()] or ["no message"]
    error = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    which = "" if len(failed) == 1 else ", the first of them"
    return [f"{len(failed)} of {len(grid.cells)} cells failed{which}: {first.cell}: {error}"]


def _listed(names: Iterable[str], most: int) -> str:
    names = list(names)
    rest = len(names) - most
    return ", ".join(names) if rest <= 0 else f"{', '.join(names[:most])} and {rest} more"
