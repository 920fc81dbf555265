"""How long does mending take when the schedule ends by itself, and what does that cost in accuracy?

    python benchmarks/time_to_mend.py --device cpu
    python benchmarks/time_to_mend.py emnist-da --data-root DATA --models bench --store results/emnist-da.json
    python benchmarks/time_to_mend.py cifar-10-c --data-root DATA --models bench --seeds 123 --published

Each shift of a benchmark is mended from each seed by `adapt` with a method and no other option (`auto`: the length ends
by itself), without scores on the way, from arrays on the host; the first run of all is repeated, so that loading of
libraries does not count. A second such run is scored after each round, to find the best state (`oracle`). Beside it
stand the untouched model, AdaBN and the published schedule: run here with `--published`, or taken from a store or from
a file in `results/`, if the source model there had the same weights. With `--rehearsed FOLDER` auto runs get the
rehearsed profile that `benchmarks/estimates.py` left there, as a site would have it. A run that was cut off goes on
from `--out`. A row with `beside_others` was timed beside other processes: its accuracy counts, its seconds do not.
Digits take a few minutes on a CPU; the others are for a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import Any

from torch import Tensor, nn

import shiftmend
from bench_models import Deadline, Given, RowFile, keep_targets, open_benchmark
from shiftmend.engine.history import Epoch
from shiftmend.evaluation.classification import Scores
from shiftmend.evaluation.evaluate import Scorer
from shiftmend.inputs.feed import Feed
from shiftmend.profiles import fingerprints
from shiftmend.research.analysis.comparisons import Comparison, compare
from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.bench.cell import run_cell
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.results import read
from shiftmend.research.bench.suite import find
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import write_atomically

METHODS = ("bufr", "fr")
BASELINES = ("source-only", "adabn")
WAYS = ("auto", "oracle", "published")
"""What is measured of a method. Baselines have one way, which is called as they are."""
MEASURED = (*BASELINES, "auto", "oracle")
"""What is measured in any case; the published schedule takes longer, and is asked for."""
KEY = ("benchmark", "shift", "seed", "method", "way")
SEEDS = {"emnist-da": 3, "cifar-10-c": 1, "cifar-100-c": 1}
"""Seeds that are run by default, where not all are."""
CIFAR = {"cifar-10-c": "CIFAR-10-C", "cifar-100-c": "CIFAR-100-C"}
"""Benchmarks with the targets of CIFAR-10-C. CIFAR-100-C is the same network on harder images."""
SCORING_BATCH = 2048

Row = dict[str, Any]


# ---- measuring


def measure_baseline(given: Given, method: str, shift: str, seed: int) -> Row:
    inputs, labels = given.target(shift)
    model, profile = given.model(seed), given.profile(seed)
    setting = given.benchmark.settings["offline"][method]
    started = time.perf_counter()
    result = given.adapt(model, inputs, profile, method, seed, **setting.options)
    seconds = time.perf_counter() - started
    return {"seconds": round(seconds, 4)} | describe_scores(given.score(result.model, inputs, labels))


def measure_auto(given: Given, method: str, shift: str, seed: int) -> Row:
    """Time `adapt` with nothing but a method, and score what it returns."""
    inputs, labels = given.target(shift)
    model, profile = given.model(seed), given.rehearsed_profile(seed)
    started = time.perf_counter()
    result = given.adapt(model, inputs, profile, method, seed)
    seconds = time.perf_counter() - started
    batches = steps_per_epoch(given, inputs)
    in_rounds = sum(row.seconds for row in result.history)
    kept, last = result.kept, result.history[-1]
    return {
        "seconds": round(seconds, 4),
        "seconds_outside_rounds": round(seconds - in_rounds, 4),
        "seconds_until_kept": round(sum(row.seconds for row in result.history if row.epoch <= kept.epoch), 4),
        "steps": count_steps(last, batches),
        "steps_until_kept": count_steps(kept, batches),
        "rounds": last.epoch,
        "kept_round": kept.epoch,
        "stages": describe_stages(result.history, batches),
        "slices_before": None if result.before is None else result.before.divergence,
        "slices": None if result.after is None else result.after.divergence,
        "schedule": result.manifest["method"],
        "origin": given.benchmark.origin(shift, given.resources.root),
    } | describe_scores(given.score(result.model, inputs, labels))


def measure_oracle(given: Given, method: str, shift: str, seed: int) -> Row:
    """Score each round of a run like that of `measure_auto`; return the best, which no site could know."""
    inputs, labels = given.target(shift)
    found: list[tuple[Epoch, Scores]] = []
    scorer: list[Scorer] = []

    def look(model: nn.Module, row: Epoch) -> None:
        if not scorer:
            scorer.append(Scorer(model, _feed(given, inputs, labels), capture=True))
        scores = scorer[0]()
        assert isinstance(scores, Scores)
        found.append((row, scores))

    result = given.adapt(given.model(seed), inputs, given.rehearsed_profile(seed), method, seed, on_epoch=look)
    scorer.clear()
    best, scores = max(found, key=lambda pair: pair[1].accuracy)
    batches = steps_per_epoch(given, inputs)
    curve = [
        {"steps": count_steps(row, batches), "block": row.block, "accuracy": round(at.accuracy, 6)}
        | {name: round(value, 6) for name, value in row.signals.items()}
        for row, at in found
    ]
    kept = {"kept_accuracy": next(at.accuracy for row, at in found if row.epoch == result.kept.epoch)}
    return {"steps": count_steps(best, batches), "curve": curve} | kept | describe_scores(scores)


def _feed(given: Given, inputs: Tensor, labels: Tensor) -> Feed:
    return Feed((inputs, labels), batch_size=SCORING_BATCH, device=given.device, preprocess=given.benchmark.preprocess)


def measure_published(given: Given, method: str, shift: str, seed: int) -> Row:
    """Run the cell of the benchmark: the published schedule, scored on the way."""
    (cell,) = plan(
        given.benchmark, "offline", methods=[method], shifts=[shift], seeds=[seed], root=given.resources.root
    )
    result = run_cell(given.resources, cell)
    if result.failed:
        raise SystemExit(f"{cell} failed: {result.error}")
    return describe_cell(given, result) | {"from": "this run"}


def describe_cell(given: Given, result: Result) -> Row:
    """Return the row of a finished cell."""
    assert result.last is not None
    assert result.best is not None
    assert result.selected is not None
    samples = result.manifest["target"]["samples"]
    steps = samples // result.manifest["batch_size"]
    return {
        "accuracy": result.last.accuracy,
        "ece": result.last.ece,
        "accuracy_selected": result.selected.accuracy,
        "accuracy_best": result.best.accuracy,
        "steps": steps * result.epochs,
        "steps_until_best": steps * result.best.epoch,
        "seconds": result.seconds,
        "schedule": result.manifest["method"],
    }


def find_stored(given: Given, store: Path, methods: Sequence[str], seeds: Sequence[int]) -> dict[tuple[Any, ...], Row]:
    """Return rows of the published schedule from a store or a compact file, where source models have equal weights."""
    found: dict[tuple[Any, ...], Row] = {}
    reading = read(given.benchmark.name, store, methods=list(methods), seeds=list(seeds), root=given.resources.root)
    weights = {seed: fingerprints.weights(given.model(seed)) for seed in seeds}
    others = 0
    for result in reading.results:
        cell = result.cell
        if result.failed or cell.shift not in given.benchmark.shifts:
            continue
        if result.manifest.get("source_weights") == weights.get(cell.seed):
            key = cell.benchmark, cell.shift, cell.seed, cell.method, "published"
            found[key] = describe_cell(given, result) | {"from": store.name}
        else:
            others += 1
    if others:
        print(f"{others} cells of {store} started from other source models and are not used", flush=True)
    return found


def describe_scores(scores: shiftmend.Scores) -> Row:
    return {"accuracy": round(scores.accuracy, 6), "ece": round(scores.ece, 6)}


def describe_stages(history: Sequence[Epoch], batches: int) -> list[Row]:
    """Return steps and seconds of each stage, in order."""
    stages: list[Row] = []
    before = 0
    for name, rows in itertools.groupby(history[1:], key=lambda row: row.block):
        own = list(rows)
        until = count_steps(own[-1], batches)
        seconds = round(sum(row.seconds for row in own), 4)
        stages.append(
            {"stage": name, "steps": until - before, "seconds": seconds, "learning_rate": own[-1].learning_rate}
        )
        before = until
    return stages


def count_steps(row: Epoch, batches: int) -> int:
    """Return the training steps until this row; histories of before steps were counted have whole epochs."""
    steps = getattr(row, "steps", None)
    return row.epoch * batches if steps is None else int(steps)


def steps_per_epoch(given: Given, inputs: Tensor) -> int:
    return max(1, len(inputs) // min(given.protocol.batch_size, len(inputs)))


MEASURES: dict[str, Callable[[Given, str, str, int], Row]] = {
    **dict.fromkeys(BASELINES, measure_baseline),
    "auto": measure_auto,
    "oracle": measure_oracle,
    "published": measure_published,
}


@dataclass(frozen=True)
class Wishes:
    """What is to be run."""

    methods: tuple[str, ...]
    shifts: tuple[str, ...]
    seeds: tuple[int, ...]
    ways: tuple[str, ...]

    def tasks(self) -> Iterator[tuple[str, int, str, str]]:
        """Yield shift, seed, method and way: what was timed comes first, what needs longest last."""
        pairs = [(name, name) for name in BASELINES if name in self.ways]
        rounds = [[*pairs, *((method, "auto") for method in self.methods if "auto" in self.ways)]]
        rounds += [[(method, way) for method in self.methods] for way in WAYS[1:] if way in self.ways]
        for some in rounds:
            for seed, shift in itertools.product(self.seeds, self.shifts):
                for method, way in some:
                    yield shift, seed, method, way


def measure_all(given: Given, wishes: Wishes, file: RowFile, deadline: Deadline) -> None:
    """Measure what the file does not hold yet, until the deadline."""
    manifest = given.describe(wishes.seeds)
    warm: set[str] = set()
    for shift, seed, method, way in wishes.tasks():
        key = given.benchmark.name, shift, seed, method, way
        if file.has(*key) or not deadline.allows():
            continue
        if way == "auto" and method not in warm:
            measure_auto(given, method, shift, seed)
            warm.add(method)
            deadline.begin()
        values = MEASURES[way](given, method, shift, seed)
        deadline.done()
        print(describe_row(file.add(key, values, manifest)), flush=True)
    if deadline.skipped:
        print(f"{deadline.skipped} rows are left for another run", flush=True)


def describe_row(row: Row) -> str:
    text = f"{row['benchmark']} {row['shift']}, seed {row['seed']}: {row['method']}"
    text += f" {row['way']}" if row["way"] != row["method"] else ""
    text += f" {100 * row['accuracy']:.1f} %"
    if row["way"] == "auto":
        text += (
            f", {row['seconds']:.2f} s ({row['seconds_outside_rounds']:.2f} outside rounds), {row['steps']} steps, "
            f"kept after {row['steps_until_kept']} and {row['seconds_until_kept']:.2f} s"
        )
    elif "steps" in row:
        text += f", {row['steps']} steps"
    return text


# ---- tables


@dataclass(frozen=True)
class Finding:
    """A figure beside its target. `met` is None where the figure was not measured."""

    what: str
    target: str
    measured: str
    met: bool | None


class Table:
    """The rows of one benchmark, paired by shift and seed."""

    def __init__(self, benchmark: str, rows: Sequence[Row]) -> None:
        self.benchmark, self.all_rows = benchmark, rows
        self.rows = {
            (row["shift"], row["seed"], row["method"], row["way"]): row for row in rows if row["benchmark"] == benchmark
        }
        self.shifts = [shift for shift in find(benchmark).shifts if any(key[0] == shift for key in self.rows)]

    def pairs(self, method: str, *ways: tuple[str, str]) -> list[tuple[Row, ...]]:
        """Return the row of an auto run beside others of the same shift and seed, where all are there."""
        found = []
        for (shift, seed, name, way), row in self.rows.items():
            if (name, way) == (method, "auto"):
                others = [self.rows.get((shift, seed, *other)) for other in ways]
                if all(other is not None for other in others):
                    found.append((row, *(other for other in others if other is not None)))
        return found

    def values(self, shift: str | None, method: str, way: str, field: str) -> list[float]:
        """Return one field of all rows of a shift, or of all shifts; no seconds that were measured beside others."""
        return [
            float(row[field])
            for (where, _, name, how), row in self.rows.items()
            if (name, how) == (method, way) and shift in (None, where) and row.get(field) is not None
            if not (field.startswith("seconds") and row.get("beside_others"))
        ]

    def group_seeds(self, method: str) -> list[list[int]]:
        """Return seeds whose auto runs have the same shifts, so that means over them compare."""
        shifts: dict[int, set[str]] = {}
        for shift, seed, name, way in self.rows:
            if (name, way) == (method, "auto"):
                shifts.setdefault(seed, set()).add(shift)
        groups: dict[frozenset[str], list[int]] = {}
        for seed in sorted(shifts):
            groups.setdefault(frozenset(shifts[seed]), []).append(seed)
        return list(groups.values())

    def keep(self, seeds: Sequence[int]) -> Table:
        """Return the table of some seeds."""
        return Table(self.benchmark, [row for row in self.all_rows if row["seed"] in seeds])

    def methods(self) -> list[str]:
        return [method for method in METHODS if any(key[2:] == (method, "auto") for key in self.rows)]

    def compare(self, method: str) -> Comparison | None:
        """Compare auto with the published schedule, over the shifts and seeds that both have."""
        pairs = self.pairs(method, (method, "published"))
        if not pairs:
            return None
        results = [
            Result(
                Cell(self.benchmark, "offline", way, row["shift"], row["seed"], ""),
                "own",
                last=Outcome(0, row["accuracy"], row["ece"], math.nan, math.nan, math.nan),
            )
            for pair in pairs
            for way, row in zip(("auto", "published"), pair, strict=True)
        ]
        return compare(results, "auto", "published")[-1]


COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("untouched", "source-only", "source-only", "accuracy"),
    ("AdaBN", "adabn", "adabn", "accuracy"),
    ("auto", "", "auto", "accuracy"),
    ("best round", "", "oracle", "accuracy"),
    ("published", "", "published", "accuracy"),
    ("its best epoch", "", "published", "accuracy_best"),
)
COSTS: tuple[tuple[str, str, str, str], ...] = (
    ("steps", "auto", "steps", ",.0f"),
    ("until kept", "auto", "steps_until_kept", ",.0f"),
    ("published steps", "published", "steps", ",.0f"),
    ("seconds", "auto", "seconds", ".2f"),
    ("until kept, seconds", "auto", "seconds_until_kept", ".2f"),
)


def tabulate(table: Table, method: str, *, each_shift: bool = True) -> str:
    """Return the table of a method: accuracy in percent, steps and seconds, means over seeds.

    Columns without any figure are left out.
    """
    columns = [(title, fixed or method, way, field, ".1f", 100) for title, fixed, way, field in COLUMNS]
    columns += [(title, method, way, field, form, 1) for title, way, field, form in COSTS]
    columns = [column for column in columns if table.values(None, *column[1:4])]
    lines = [_line(["shift", *(title for title, *_ in columns)]), "|" + "---|" * (len(columns) + 1)]
    for shift in [*(table.shifts if each_shift else ()), None]:
        cells = [
            _cell(table.values(shift, name, way, field), form, factor) for _, name, way, field, form, factor in columns
        ]
        lines.append(_line([shift or "**mean**", *cells]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(values: Sequence[float], form: str, factor: float = 1) -> str:
    return format(factor * mean(values), form) if values else "–"


def find_targets(tables: dict[str, Table]) -> list[Finding]:
    """Set the measured figures beside the targets. What was not measured says so."""
    emnist = tables.get("emnist-da")
    return [
        _accuracy_kept("EMNIST-DA", emnist, 0.0),
        _share_of_steps("EMNIST-DA", emnist, 1 / 4),
        _at_least_79(emnist),
        _above_adabn(emnist),
        _seconds("one shift of EMNIST-DA by auto `bufr`, from arrays", emnist, 2.5),
        _outside_rounds(emnist),
        *(
            finding
            for name, title in CIFAR.items()
            for cifar in [tables.get(name)]
            if cifar or name == "cifar-10-c"
            for finding in (
                _accuracy_kept(title, cifar, 0.2),
                _share_of_steps(title, cifar, 1 / 5),
                _seconds(f"one corruption of {title} by auto `bufr`", cifar, 8.0),
            )
        ),
    ]


def _count(pairs: Sequence[Any]) -> str:
    return f"{len(pairs)} run{'s' if len(pairs) != 1 else ''}"


def _accuracy_kept(name: str, table: Table | None, loss: float) -> Finding:
    what = f"auto `bufr`, {name}: accuracy less that of the published schedule, points"
    aim = "at least 0" if loss == 0 else f"at least -{loss:g}"
    pairs = table.pairs("bufr", ("bufr", "published")) if table else []
    if table and pairs:
        compared = table.compare("bufr")
        assert compared is not None
        tested = compared.verdict if compared.p is None else f"{compared.verdict}, p = {compared.p:.3f}"
        means = [mean(pair[i]["accuracy"] for pair in pairs) for i in (0, 1)]
        remark = f"{_count(pairs)}; {tested}"
    else:
        return Finding(what, aim, "not measured", None)
    difference = round(100 * (means[0] - means[1]), 6)
    shown = f"{difference:+.2f} ({100 * means[0]:.2f} against {100 * means[1]:.2f}; {remark})"
    return Finding(what, aim, shown, difference >= -loss)


def _share_of_steps(name: str, table: Table | None, share: float) -> Finding:
    what, aim = f"auto `bufr`, {name}: steps as a share of the published", f"at most {share:.2f}"
    auto = table.values(None, "bufr", "auto", "steps") if table else []
    kept = table.values(None, "bufr", "auto", "steps_until_kept") if table else []
    published = table.values(None, "bufr", "published", "steps") if table else []
    if not auto or not published:
        return Finding(what, aim, "not measured", None)
    found, until_kept = mean(auto) / mean(published), mean(kept) / mean(published)
    return Finding(what, aim, f"{found:.2f} (until the kept state {until_kept:.2f}; {_count(auto)})", found <= share)


def _at_least_79(table: Table | None) -> Finding:
    what, aim = "auto `fr`, EMNIST-DA: mean accuracy", "at least 79 %"
    found = table.values(None, "fr", "auto", "accuracy") if table else []
    if not found:
        return Finding(what, aim, "not measured", None)
    return Finding(what, aim, f"{100 * mean(found):.1f} % ({_count(found)})", 100 * mean(found) >= 79)


def _above_adabn(table: Table | None) -> Finding:
    what, aim = "auto `fr`, EMNIST-DA: shifts below AdaBN", "0"
    below, shifts, worst = [], 0, ""
    for shift in table.shifts if table else []:
        assert table is not None
        own, other = (table.values(shift, *way, "accuracy") for way in (("fr", "auto"), ("adabn", "adabn")))
        if own and other:
            shifts += 1
            if mean(own) < mean(other):
                below.append((mean(own) - mean(other), shift))
    if not shifts:
        return Finding(what, aim, "not measured", None)
    if below:
        lead, name = min(below)
        worst = f", worst {name} {100 * lead:+.1f} points"
    return Finding(what, aim, f"{len(below)} of {shifts}{worst}", not below)


def _seconds(what: str, table: Table | None, most: float) -> Finding:
    what, aim = f"{what}: seconds, set-up included", f"at most {most:g}"
    found = table.values(None, "bufr", "auto", "seconds") if table else []
    if not found:
        return Finding(what, aim, "not measured", None)
    shown = f"median {median(found):.2f}, longest {max(found):.2f} ({_count(found)}"
    late = sum(one > most for one in found)
    shown += f", {late} longer)" if late else ")"
    return Finding(what, aim, shown, max(found) <= most)


def _outside_rounds(table: Table | None) -> Finding:
    what, aim = "auto `bufr`, EMNIST-DA: share of the time outside rounds of training", "at most 0.20"
    rows = [row for (*_, way), row in table.rows.items() if way == "auto" and row["method"] == "bufr"] if table else []
    if not rows:
        return Finding(what, aim, "not measured", None)
    share = sum(row["seconds_outside_rounds"] for row in rows) / sum(row["seconds"] for row in rows)
    return Finding(what, aim, f"{share:.2f} ({_count(rows)})", share <= 0.2)


def tabulate_targets(findings: Sequence[Finding]) -> str:
    words = {True: "yes", False: "**no**", None: "–"}
    lines = [_line(("figure", "target", "measured", "met")), "|---|---|---|---|"]
    return "\n".join([*lines, *(_line((one.what, one.target, one.measured, words[one.met])) for one in findings)])


def write_page(file: RowFile) -> str:
    """Return the page of all rows in the file."""
    names = list(dict.fromkeys(row["benchmark"] for row in file.rows))
    tables = {name: Table(name, file.rows) for name in names}
    parts = [
        "# Time to mend",
        "Made by `python benchmarks/time_to_mend.py --page` from `results/time-to-mend.json` and from nothing else.",
        "CIFAR-10-C was run with a rehearsed profile, as a site has it: such a run ends when features are as close to "
        "the profile as new samples from home are. EMNIST-DA was run without one, which makes no difference there: "
        "none of its rehearsed runs came that close. On CIFAR-10-C the rest of the loss is what the model knows of its "
        "training images: without the rule three corruptions took 2,624 to 2,688 steps and lost 0.4 to 0.7 points "
        "from their best round to the kept one (`results/time-to-mend-curves.json`). Seconds of digits were measured "
        "beside other processes and are upper bounds; those of seed 789 of CIFAR-10-C were, too, and are left out.",
        "What is missed. `fr` does not mend bricks from these source models (8.8 %, as AdaBN), and neither does the "
        "published schedule (4.0 %); the mean of the other twelve shifts is 79.1 %. `bufr` on EMNIST-DA ends blocks "
        "while the loss still falls slowly, which costs a tenth of a point at a sixth of the steps. Three corruptions "
        "of CIFAR-10-C take longer than 8 s, as their blocks go on falling: each step takes 4.5 ms, and all else 1 s.",
        "`adapt` with a method and no other option trains until the loss no longer falls, and keeps a state without "
        "looking at labels. "
        "*Auto* is the state that it returns. *Best round* is the best state on the way of another such run, *its best "
        "epoch* that of the published schedule; to find either takes labels. Steps and seconds are those of the whole "
        "run, and *until kept* those up to the returned state. Seconds are those of one call of `adapt` from arrays on "
        "the host, in a process that has run once before, checks and verification included. Accuracy in percent; all "
        "figures are means over shifts and seeds. `--only-page` without `--page` prints each shift.",
    ]
    if {"emnist-da", *CIFAR} & set(names):
        parts += ["## Targets", tabulate_targets(find_targets(tables))]
    for name, table in tables.items():
        parts.append(f"## {find(name).title}")
        if name == "digits":
            parts.append("Nothing is published for digits: *published* is the quick schedule of this benchmark.")
        used = {row["manifest"] for row in file.rows if row["benchmark"] == name}
        parts += describe_manifests([file.manifests[known] for known in file.manifests if known in used])
        for method, seeds in ((one, seeds) for one in table.methods() for seeds in table.group_seeds(one)):
            some = table.keep(seeds)
            parts.append(f"### `{method}`, {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}")
            parts.append(tabulate(some, method, each_shift=False))
            parts += describe_remarks(some, method)
            runs, published = (some.values(None, method, way, "accuracy") for way in ("auto", "published"))
            if 0 < len(published) < len(runs):
                parts.append(f"*Published* was run for {len(published)} of the {len(runs)}.")
            compared = some.compare(method)
            if compared is not None and compared.difference is not None:
                tested = compared.verdict if compared.p is None else f"{compared.verdict} (p = {compared.p:.3f})"
                parts.append(
                    f"Auto less published, where both were run: {100 * compared.difference:+.2f} points, "
                    f"{tested}, over {compared.pairs} seed{'s' if compared.pairs != 1 else ''} and {compared.shifts} "
                    f"shift{'s' if compared.shifts != 1 else ''}."
                )
    return "\n\n".join(part if part.startswith(("|", "#")) else fill(part, 120) for part in parts) + "\n"


def describe_remarks(table: Table, method: str) -> list[str]:
    """Return what was written by hand into rows of a method, as `remark`."""
    return [
        f"{shift}, seed {seed}: {row['remark']}"
        for (shift, seed, name, _), row in table.rows.items()
        if name == method and "remark" in row
    ]


def describe_manifests(manifests: Sequence[dict[str, Any]]) -> list[str]:
    """Return one paragraph for each machine and set of versions."""
    lines = []
    for manifest in manifests:
        machine = manifest["environment"]
        models = ", ".join(f"{seed}: `{one['weights_sha256'][:12]}`" for seed, one in manifest["source_models"].items())
        where = machine["device"] if machine["device"] != "cpu" else f"CPU, threads: {machine['threads']}"
        precision = "bfloat16" if manifest["bfloat16"] else "float32"
        remark = f" {manifest['source_remark']}." if manifest["source_remark"] else ""
        lines.append(
            f"{where}, torch {machine['torch']}, shiftmend {machine['shiftmend']}, {precision}, batches of "
            f"{manifest['protocol']['batch_size']}; SHA-256 of the source models' weights {models}.{remark}"
        )
    return list(dict.fromkeys(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", nargs="?", help="digits, emnist-da, cifar-10-c or cifar-100-c; digits on a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--models", type=Path, default=Path("bench"), help="folder with sources and profiles")
    parser.add_argument("--train", action="store_true", help="train source models that are missing")
    parser.add_argument("--targets", type=Path, help="folder that keeps shifted images")
    parser.add_argument("--rehearsed", type=Path, help="folder with rehearsed profiles, BENCHMARK-SEED.profile")
    parser.add_argument("--methods", nargs="*", choices=METHODS)
    parser.add_argument("--shifts", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="*")
    parser.add_argument(
        "--ways", nargs="*", choices=(*BASELINES, "auto", "oracle"), default=[*BASELINES, "auto", "oracle"]
    )
    parser.add_argument("--published", action="store_true", help="run the published schedules here")
    parser.add_argument("--store", type=Path, help="take the published schedules from results.sqlite or a compact file")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin nothing that would last longer")
    parser.add_argument("--out", type=Path, default=Path("time-to-mend.json"))
    parser.add_argument("--page", type=Path, help="write the page of all rows in --out")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    file = RowFile(options.out, KEY)
    if not options.only_page:
        run(options, file)
    for name in dict.fromkeys(row["benchmark"] for row in file.rows):
        table = Table(name, file.rows)
        for method in table.methods():
            print(f"\n{name}, {method}\n{tabulate(table, method)}")
    tables = {name: Table(name, file.rows) for name in dict.fromkeys(row["benchmark"] for row in file.rows)}
    if {"emnist-da", *CIFAR} & tables.keys():
        print(f"\n{tabulate_targets(find_targets(tables))}")
    if options.page is not None:
        write_atomically(options.page, write_page(file).encode())


def run(options: argparse.Namespace, file: RowFile) -> None:
    """Measure what is asked for and not in the file yet."""
    deadline = Deadline(options.time_limit)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    # Steps that are not captured take three times as long: that must not go unnoticed.
    logging.getLogger("shiftmend.accelerate").setLevel(logging.WARNING)
    device = resolve_device(options.device)
    name = options.benchmark or ("digits" if device.type == "cpu" else "emnist-da")
    benchmark = find(name)
    shifts = tuple(options.shifts or benchmark.shifts)
    if options.targets is not None:
        keep_targets(name, shifts, options.data_root, options.targets)
    given = open_benchmark(
        name,
        options.models,
        options.data_root,
        str(device),
        targets=options.targets,
        may_train=options.train or name == "digits",
        rehearsed=options.rehearsed,
    )
    wishes = Wishes(
        tuple(options.methods or (METHODS[:1] if name in CIFAR else METHODS)),
        shifts,
        tuple(options.seeds or benchmark.seeds[: SEEDS.get(name, len(benchmark.seeds))]),
        (*options.ways, *(("published",) if options.published or (name == "digits" and not options.store) else ())),
    )
    if options.store is not None:
        manifest = given.describe(wishes.seeds)
        stored = find_stored(given, options.store, wishes.methods, wishes.seeds)
        for key, values in stored.items():
            if not file.has(*key) and key[1] in shifts:
                file.add(key, values, manifest)
    measure_all(given, wishes, file, deadline)


if __name__ == "__main__":
    main()
