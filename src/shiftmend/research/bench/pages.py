"""The page of a benchmark's results in Markdown: what was run, how, and the results.

A store or a compact file is enough to make it. `page` lists the sections; their functions follow in the same order.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from shiftmend.errors import DataError
from shiftmend.methods import METHODS
from shiftmend.methods.fr import Alignment
from shiftmend.profiles.rehearsal import name_candidate
from shiftmend.research.analysis import comparisons, correlations
from shiftmend.research.bench import footnotes, published, tables
from shiftmend.research.bench.benchmark import (
    AUTO,
    CLEAN,
    UNADAPTED,
    Benchmark,
    Cell,
    Result,
    is_clean,
    labelled_methods,
    sees_labels,
)
from shiftmend.research.bench.grids import METRICS, Grid
from shiftmend.research.bench.plan import variants_of, with_another_source
from shiftmend.research.bench.rendering import Column, Entry, Row, Table, escape_markdown, render
from shiftmend.research.bench.results import Reading, read
from shiftmend.research.bench.suite import find
from shiftmend.utils.checks import counted
from shiftmend.verification.verdict import Verdict, Verification

Block = str | Table

ONCE = (
    "`last` is the end of a run. Where there are published figures, those of the paper and of the authors' re-run of "
    "their code stand beside ours. A note stands under the first table that it belongs to, and is not said again. "
    "See [benchmarks](../benchmarks.md) for the methods, and for how to read a table."
)

CLASSES = (
    "Accuracy at the end of the run. The mean over classes counts each class alike, however many images it has; the "
    "literature gives this mean for VisDA-C."
)

EPOCHS = (
    "`selected` is the epoch that a new site would keep, chosen without labels. `best` looked at the labels of the "
    "epochs that were scored: those that the protocol names, the last and the selected one. It says what a better "
    "choice among them could have given, and the cost of selection is what lies between the two; an epoch that was not "
    "scored may have been better still."
)

ESTIMATES = (
    "One half of the clean test images rehearses at home. The other half is the site, adapted to with the library's "
    "own defaults. What a site is told without labels stands beside the truth; `auto` is what `adapt` chooses."
)

FEW = "Adapted to a few images of each class, scored on all of them; mean over all shifts."

ONLINE = "One pass over the images: each batch is predicted before it is learnt from."

VARIANTS = (
    "Each row differs from its method in one option; the difference is the variant less the method as it is. Variants "
    "with slices also align random projections of the features, which see how features go together. "
    "`shiftmend bench compare` compares two methods shift by shift."
)

RESTORATION = (
    "The restoration distance is how far the features of a shifted image are from those of its clean version. Do "
    "methods that restore features also stay calibrated?"
)

SIGNALS = (
    "Accuracy is not known at a new site. What is: the divergence of the verification slices and of the marginals from "
    "the profile, and the mean entropy and confidence of the predictions. Cells of one shift or seed are alike, so "
    "there are fewer independent ones than are counted here."
)

FOLDERS = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[/\\]+(?:[^\s/\\'\":;,()]+[/\\]+)+")
"""The folders of an absolute path, on any system."""

FAR_FROM_PUBLISHED = 0.1
"""Difference in accuracy above which a source model was trained on, or sees, other data. A fraction."""

FEWEST_CELLS = 10
"""Smallest number of cells of one kind for which shares are more than a hint."""


def page(
    benchmark: str, folder: str | os.PathLike[str], notes: str = "", root: str | os.PathLike[str] | None = None
) -> str:
    """Write the page of a benchmark.

    Args:
        benchmark: A name, or `file.py:NAME`.
        folder: The folder of a store, a store, or a compact file.
        notes: Your own Markdown, for what a program cannot know.
        root: The folder of the data sets, see `shiftmend.research.bench.results.read`. It need not exist.
    """
    chosen = find(benchmark)
    parts = {protocol: Part(protocol, read(benchmark, folder, protocol, root=root)) for protocol in chosen.protocols}
    run = {protocol: part for protocol, part in parts.items() if part.results}
    if not run:
        others = sum(part.reading.others for part in parts.values())
        found = f", but {others} of other settings, data or learning rates" if others else ""
        raise DataError(
            f"Expected results of {benchmark} as it is now in {os.fspath(folder)}, got none{found}. Run the benchmark "
            "first."
        )
    main = run.get("offline") or next(iter(run.values()))
    stories: list[tuple[str, list[Block]]] = [
        ("", [_headline(parts)]),
        ("Accuracy and calibration", [ONCE, *_clean(main), *averages(main)]),
        ("Notes", _fold("What to make of these figures", [notes.strip()] if notes.strip() else [])),
        ("Each shift", _fold("Accuracy on each shift", by_shift(main))),
        ("Each class", _introduce(CLASSES, by_class(main))),
        ("Which epoch: last, selected, best", _introduce(EPOCHS, choice_of_epoch(main))),
        ("Estimates beside the truth", _introduce(ESTIMATES, estimates(run))),
        ("Few images", _introduce(FEW, [*few_shot(parts), *few_verdicts(parts)])),
        ("Online", _introduce(ONLINE, _online(run))),
        ("Variants of a method", _introduce(VARIANTS, variants(main))),
        ("Restoration and calibration", _introduce(RESTORATION, restoration(main))),
        ("Signals that need no labels", _fold("Which signals go with accuracy", _introduce(SIGNALS, signals(main)))),
        ("Does the model without adaptation do as published?", sanity(main)),
        ("About the published figures", _published_notes(chosen.name)),
        (
            "How this page was made",
            _fold("Commands, machines, settings", [*_list_missing(parts), *_describe_making(benchmark, parts)]),
        ),
        ("Data", _fold("Hashes of the target images", _digests(main))),
    ]
    said: set[str] = set()
    lines = [f"# {escape_markdown(chosen.title)}", ""]
    for title, blocks in stories:
        if blocks:
            lines += [f"## {title}", ""] if title else []
            lines += [text for block in blocks for text in (_write(block, said), "")]
    return _unhead_folded("\n".join(lines).rstrip() + "\n")


def _unhead_folded(text: str) -> str:
    """Turn headings in folded parts into bold lines, because a heading would end the fold on the documentation site."""
    return re.sub(
        r"<details>.*?</details>",
        lambda part: re.sub(r"^#+ (.*)$", r"**\1**", part[0], flags=re.MULTILINE),
        text,
        flags=re.DOTALL,
    )


def _introduce(introduction: str, blocks: list[Block]) -> list[Block]:
    return [introduction, *blocks] if blocks else []


def _fold(summary: str, blocks: list[Block]) -> list[Block]:
    """Hide blocks behind a line to click on."""
    return [f"<details><summary>{summary}</summary>", *blocks, "</details>"] if blocks else []


def _write(block: Block, said: set[str]) -> str:
    """Write a table without the notes that are already on the page."""
    if isinstance(block, str):
        return block
    # An error may name a file, whose folder is private to the machine.
    new = tuple(FOLDERS.sub("", note) for note in block.notes if note not in said)
    marked = "" if block.marked in said else block.marked
    said.update((*block.notes, block.marked))
    return render(replace(block, notes=new, marked=marked), "markdown").rstrip("\n")


@dataclass(frozen=True)
class Part:
    """One protocol of a benchmark with its results so far."""

    protocol: str
    reading: Reading

    @property
    def benchmark(self) -> Benchmark:
        return self.reading.benchmark

    @property
    def results(self) -> list[Result]:
        """Results on shifts, without clean images."""
        return [result for result in self.reading.results if not is_clean(result.cell.shift)]

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
        """The results without labels, which can be compared with each other."""
        return [result for result in self.results if not sees_labels(result.cell.method)]

    def about(self, **more: Any) -> dict[str, Any]:
        """Return the arguments of a table of all methods, including those that were not run."""
        shared = {"benchmark": self.benchmark.name, "protocol": self.protocol}
        return shared | {"methods": self.reading.methods, "shifts": self.shifts} | more


# ---- the head of the page


def _headline(parts: Mapping[str, Part]) -> str:
    cells = sum(len(part.reading.cells) for part in parts.values())
    done = sum(not result.failed for part in parts.values() for result in part.reading.results)
    remarks = footnotes.source_remarks(result for part in parts.values() for result in part.reading.results)
    images = " ".join([*(f"**{escape_markdown(remark)}.**" for remark in remarks), _images(parts)])
    if done == cells:
        return f"{images} All {cells:,} cells (one method on one shift from one seed) are done."
    return (
        f"**Partial: {done:,} of {cells:,} cells (one method on one shift from one seed) are done.** {images} "
        "What is missing stands at [the end](#how-this-page-was-made)."
    )


def _images(parts: Mapping[str, Part]) -> str:
    """Describe in a sentence where the target images come from."""
    origins: dict[str, set[str]] = {}
    for part in parts.values():
        for result in part.results:
            origins.setdefault(result.origin, set()).add(result.cell.shift)
    order = next(iter(parts.values())).benchmark.shifts

    def listed(shifts: set[str]) -> str:
        return "all shifts" if shifts == set(order) else ", ".join(_code(shift) for shift in order if shift in shifts)

    meanings = {"published": "the published files"} | {
        origin: meaning for origin, (_, meaning) in footnotes.ORIGINS.items()
    }
    said = [f"{meanings[origin]} ({listed(shifts)})" for origin, shifts in sorted(origins.items())]
    return f"Target images: {'; '.join(said)}."


def _list_missing(parts: Mapping[str, Part]) -> list[Block]:
    """List the protocols that lack cells, and what has not been begun at all."""
    lines = []
    for protocol, part in parts.items():
        reading = part.reading
        missing = set(reading.cells) - {result.cell for result in reading.results if not result.failed}
        if not missing and not any("outdated" in result.manifest for result in reading.results):
            continue
        if not reading.results:
            lines.append(f"- {protocol}: everything ({counted(len(missing), 'cell')})")
            continue
        failed = sum(result.failed for result in reading.results)
        outdated = sum("outdated" in result.manifest for result in reading.results)
        facts = [
            _name_lacking("method", reading.methods, {result.cell.method for result in reading.results}),
            _name_lacking("shift", part.benchmark.shifts, set(part.shifts)),
            _name_lacking(
                "seed", sorted({cell.seed for cell in reading.cells}), {r.cell.seed for r in reading.results}
            ),
            f"{failed} failed" if failed else "",
            f"{outdated} more are to be run again" if outdated else "",
        ]
        detail = "; ".join(fact for fact in facts if fact)
        lines.append(
            f"- {protocol}: {len(missing):,} of {len(reading.cells):,} cells" + (f"; {detail}" if detail else "")
        )
    return ["What is missing:", "\n".join(lines)] if lines else []


def _name_lacking(what: str, known: Iterable[Any], there: set[Any]) -> str:
    names = [str(name) for name in known if name not in there]
    return f"nothing of the {what}{'s' if len(names) > 1 else ''} {', '.join(map(_code, names))}" if names else ""


def _describe_making(benchmark: str, parts: Mapping[str, Part]) -> list[Block]:
    """List commands, machines, and how the source models were trained."""
    # A user's own file may be named by its full path.
    called = shlex.quote(Path(benchmark).name if Path(benchmark).is_absolute() else benchmark)
    run = {protocol: part for protocol, part in parts.items() if part.results}
    name = next(iter(parts.values())).benchmark.name
    commands = [
        f"shiftmend bench run {called}" + ("" if p == "offline" else f" --protocol {shlex.quote(p)}") for p in run
    ]
    export, written = shlex.quote(f"results/{name}.json"), shlex.quote(f"docs/results/{name}.md")
    commands += [
        f"shiftmend bench export {called} --format compact --out {export}",
        f"shiftmend bench page {called} --folder {export} --out {written}",
    ]
    results = [result for part in run.values() for result in part.reading.results]
    lines = [f"- {line}" for line in (*_machines(results), *_sources(results), *map(_protocol, run.values()))]
    others = sum(part.reading.others for part in run.values())
    if others:
        lines.append(
            f"- {others} more results in the file are of other settings, data or learning rates, and not shown"
        )
    intro = (
        "These commands make it. They are no log: the runs may have been split by seeds, shifts or methods, and over "
        "several machines."
    )
    if any(result.origin == "rebuilt" for result in results):
        intro += (
            " Rebuilt shifts stand on pictures that the data root has to hold as well, or the package draws others: "
            "see [data](../data.md#make-a-shifted-set)."
        )
    return [intro, "```bash\n" + "\n".join(commands) + "\n```", "\n".join(lines)]


def _machines(results: Sequence[Result]) -> list[str]:
    names = {"device": "", "torch": "PyTorch ", "python": "Python ", "shiftmend": "shiftmend "}
    found = Counter(
        ", ".join(f"{words}{facts[key]}" for key, words in names.items() if key in facts)
        for result in results
        if (facts := result.manifest.get("environment"))
    )
    dates = sorted(result.finished[:10] for result in results if result.finished)
    hours = sum(result.seconds for result in results) / 3600
    lines = [f"{escape_markdown(text)}: {counted(count, 'cell')}" for text, count in found.most_common()]
    if dates:
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        shared = any(result.manifest.get("lanes", 1) > 1 for result in results)
        together = ", many of which ran side by side and so took longer," if shared else ""
        lines.append(f"finished {when}; the times of all cells{together} add up to {hours:.1f} hours")
    return lines


def _sources(results: Sequence[Result]) -> list[str]:
    """Describe how each source model was trained, without settings that are off or empty."""
    recipes: dict[str, str] = {}
    for result in results:
        source = result.manifest.get("source") or {}
        facts = source.get("recipe") or {}
        shown = [
            f"{key.replace('_', ' ')} {_value(value)}"
            for key, value in facts.items()
            if value not in (None, 0.0, False, {}, "none")
        ]
        if shown:
            recipes.setdefault(str(source.get("name")), ", ".join(shown))
    return [f"source model `{name}`: {escape_markdown(text)}" for name, text in sorted(recipes.items())]


def _protocol(part: Part) -> str:
    facts = part.benchmark.protocols[part.protocol].facts()
    shown = [
        f"{key.replace('_', ' ')} {_value(value)}"
        for key, value in facts.items()
        if key != "kind" and value is not None
    ]
    return f"protocol `{part.protocol}`: {escape_markdown(', '.join(shown))}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key.replace('_', ' ')} {_value(entry)}" for key, entry in value.items()) + ")"
    if isinstance(value, list | tuple):
        return " + ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _code(name: str) -> str:
    return f"`{name}`"


# ---- accuracy and calibration


def _clean(part: Part) -> list[Block]:
    """Give the source model's scores on clean images, beside the published ones."""
    asked: dict[str, Any] = {"benchmark": part.benchmark, "which": "last", "beside": ("paper", "re-run")}
    metrics = ("accuracy", "ece")
    said = [note for metric in metrics for note in footnotes.about_clean(part.reading.clean, metric=metric, **asked)]
    return ["\n".join(f"- {escape_markdown(note)}" for note in said)] if said else []


def averages(part: Part, metrics: Sequence[str] = ("accuracy", "ece")) -> list[Block]:
    """Show means over all shifts beside the paper and the authors' re-run, then those over groups of shifts."""
    metrics = [*metrics, "mean_class_accuracy"] if part.benchmark.by_class else metrics
    if not part.whole:
        number = len(part.benchmark.shifts)
        return [f"No mean is taken before all {number} shifts have been run; see the figures of each shift below."]
    blocks: list[Block] = []
    for metric in metrics:
        asked = part.about(groups=part.reading.groups, metric=metric)
        paper, rerun = (tables.summary(part.results, **asked, beside=side) for side in ("paper", "re-run"))
        both = tables.put_beside(paper, rerun)
        everything, groups = _over(both, of_all=True), _over(both, of_all=False)
        blocks.append(tables.add_quoted(everything, Grid(results=[], **part.about(metric=metric))))
        # What a group of shifts says about calibration, it says about accuracy.
        if groups.columns and metric == "accuracy":
            ranked = (footnotes.SEVERITY,) if "severe" in part.benchmark.groups else ()
            blocks.append(replace(groups, title=f"{groups.title}, groups of shifts", notes=(*groups.notes, *ranked)))
    return blocks


def _over(table: Table, *, of_all: bool) -> Table:
    """Take the columns of all shifts, which come first, or those of the groups, without differences.

    What all columns have in common goes into the title.
    """
    first = next(column for column in table.columns if column.kind != "seeds")
    name = first.heading or first.title
    if not of_all:
        groups = tables.keep_columns(table, lambda column: (column.heading or column.title) != name)
        return tables.keep_columns(groups, lambda column: column.kind != "difference")
    chosen = tables.keep_columns(table, lambda column: (column.heading or column.title) == name)
    columns = tuple(
        replace(column, title=column.title if column.heading or column.kind == "seeds" else "ours", heading="")
        for column in chosen.columns
    )
    return replace(chosen, columns=columns, title=f"{table.title}, {name}")


def by_shift(part: Part) -> list[Block]:
    """Show the accuracy on each shift, and say how to see more."""
    groups = part.benchmark.groups if part.whole else {}
    table = tables.per_shift(part.results, **part.about(groups=groups, metric="accuracy", beside=None))
    name = shlex.quote(part.benchmark.name)
    command = f"shiftmend bench table {name} --folder results/{name}.json --per-shift --metric ece --beside re-run"
    more = f"`{command}` shows other metrics, and published figures beside them."
    return [table if part.whole else tables.drop_means(table), more]


def estimates(run: Mapping[str, Part]) -> list[Block]:
    """Show what was told without labels beside the truth: one line a row of the table, then each shift for `auto`."""
    blocks: list[Block] = []
    for part in run.values():
        told = [result for result in part.results if result.last is not None and "estimate" in result.manifest]
        if not told:
            continue
        columns = tuple(Column(name) for name in ("accuracy", "estimated", "true where told", "error", "held, of 100"))
        columns = (*columns, Column("told", digits=0), Column("of", digits=0))
        rows = []
        for method in part.methods:
            own = [result for result in told if result.cell.method == method]
            rows += [Row(method, _summarise_estimates(own))] if own else []
        about = f"{part.benchmark.name}, {part.protocol}"
        seeds = counted(len({result.cell.seed for result in told}), "seed")
        notes = (
            f"percent, mean over {counted(len(part.shifts), 'shift')} and {seeds}; error is absolute",
            "held counts 90 % intervals with the truth inside",
        )
        blocks.append(Table(f"{about}: estimates beside the truth", "method", columns, tuple(rows), notes))
        rows = [
            Row(f"{result.cell.shift}, seed {result.cell.seed}", _show_estimate(result))
            for result in told
            if result.cell.method == AUTO
        ]
        if rows:
            columns = tuple(
                Column(name) for name in ("estimated", "low", "high", "true", "untouched, estimated", "took")
            )
            blocks.append(
                Table(f"{about}: what {AUTO} told of each shift", "shift", columns, tuple(rows), ("percent",))
            )
    return blocks


def _summarise_estimates(results: Sequence[Result]) -> tuple[Entry, ...]:
    """Summarise estimates after adaptation by seven entries.

    The first is the mean true accuracy of all results. Then follow four means over the results with a valid estimate:
    estimate, true accuracy, absolute error, and share of intervals that contain the truth. The last two entries are the
    numbers of valid estimates and of all results.
    """
    pairs = [(result.manifest["estimate"]["after"], result.last.accuracy) for result in results if result.last]
    told = [(one, truth) for one, truth in pairs if one is not None and one["value"] is not None]
    ended = [(one, truth) for one, truth in told if one["low"] is not None]
    means = (
        _mean([truth for _, truth in pairs]),
        _mean([one["value"] for one, _ in told]),
        _mean([truth for _, truth in told]),
        _mean([abs(one["value"] - truth) for one, truth in told]),
        _mean([float(one["low"] <= truth <= one["high"]) for one, truth in ended]),
    )
    return (*map(_percent, means), Entry(len(told)), Entry(len(pairs)))


def _show_estimate(result: Result) -> tuple[Entry, ...]:
    assert result.last is not None
    before, after = (result.manifest["estimate"][name] or {} for name in ("before", "after"))
    ends = [_percent(after.get(name)) for name in ("value", "low", "high")]
    took = Entry(text=name_candidate(result.manifest["method"]["name"]))
    return (*ends, _percent(result.last.accuracy), _percent(before.get("value")), took)


def _percent(value: float | None) -> Entry:
    return Entry(None if value is None else 100 * value)


def by_class(part: Part) -> list[Block]:
    """Make one table per shift: the accuracy of each class and the mean over classes, averaged over seeds."""
    blocks: list[Block] = []
    for shift in part.shifts:
        scored = [result for result in part.results if result.cell.shift == shift and result.class_accuracy]
        classes = list(dict.fromkeys(name for result in scored for name in result.class_accuracy))
        rows = []
        for method in part.methods:
            own = [result.class_accuracy for result in scored if result.cell.method == method]
            means = {name: _mean([each[name] for each in own if name in each]) for name in classes}
            known = [value for value in means.values() if value is not None]
            entries = [Entry(None if value is None else 100 * value) for value in (*means.values(), _mean(known))]
            rows += [Row(method, tuple(entries))] if own else []
        if rows:
            columns = tuple(Column(name) for name in (*classes, "mean"))
            title = f"{part.benchmark.name}, {part.protocol}: accuracy of each class on {shift}"
            note = f"accuracy in percent, mean over {counted(len({r.cell.seed for r in scored}), 'seed')} or fewer"
            blocks.append(Table(title, "method", columns, tuple(rows), (note,)))
    return blocks


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def choice_of_epoch(part: Part) -> list[Block]:
    """Show the accuracy of the last, the selected and the best epoch."""
    table = tables.selection(part.results, **part.about())
    if not part.whole:
        table = replace(table, title=f"{table.title.rpartition(', ')[0]}, mean over the shifts run so far")
    return [table]


# ---- few images, and online


def few_shot(parts: Mapping[str, Part]) -> list[Block]:
    """Show the accuracy with few images of each class, beside that with all images."""
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
    return [tables.keep_columns(tables.put_beside(paper, rerun), lambda column: column.kind != "difference")]


def few_verdicts(parts: Mapping[str, Part]) -> list[Block]:
    """Count the verdicts on methods that restore features from few samples, on the samples adapted to."""
    few = {protocol: part for protocol, part in parts.items() if protocol.startswith("few-shot-") and part.results}
    # No other protocol has clean images.
    clean = parts["offline"].reading.clean if "offline" in parts else []
    restoring_methods = [name for name, method in METHODS.items() if issubclass(method, Alignment)]
    there = {_method(result) for part in few.values() for result in part.unsupervised}
    restoring_methods = [name for name in restoring_methods if name in there]
    counts, left_out = [], 0
    for part in few.values():
        restoring = [result for result in _add_clean_source(part) if _method(result) in restoring_methods]
        left_out += sum(_method(result) in restoring_methods for result in part.unsupervised) - len(restoring)
        counts.append(_count_verdicts(restoring, correlations.find_near_clean(restoring, clean)))
    if not any(counts):
        return []
    names = [f"{protocol.removeprefix('few-shot-')} a class" for protocol in few]
    columns = tuple(Column(kind, name, digits=0) for name in names for kind in ("good", "bad"))
    first = next(iter(few.values()))
    title = (
        f"{first.benchmark.name}, few-shot: the library's own verdict on {' and '.join(restoring_methods)}, in cells"
    )
    return [Table(title, "verdict", columns, _rows(counts), (f"good: {_describe_near_clean(first, left_out)}",))]


def _online(run: Mapping[str, Part]) -> list[Block]:
    if "online" not in run:
        return []
    part, metrics = run["online"], ("accuracy", "ece_per_batch", "ece")
    return averages(part, metrics)


# ---- variants of a method


def variants(part: Part) -> list[Block]:
    """Compare a method with variants of its options, to show the effect of each option."""
    bases = variants_of(part.benchmark, part.protocol)
    found = {name: compared for name, base in bases.items() if (compared := _compare(part, name, base))}
    rows = [_variant(part, name, bases[name], compared) for name, compared in found.items()]
    if not rows:
        return []
    columns = (
        Column("against"),
        Column("seeds", digits=0),
        Column("accuracy", kind="difference"),
        Column("in the paper", kind="difference"),
        Column("p", digits=3),
        Column("verdict"),
        Column("shifts better / worse / undecided"),
    )
    note = (
        "accuracy is the difference in points, mean over shifts; two-sided paired t-test over seeds; with Holm's "
        "correction for the number of shifts where they are counted"
    )
    remarks = [f"{name}: {compared[-1].remark}" for name, compared in found.items() if compared[-1].remark]
    remarks += footnotes.about_outdated(part.results)
    if not part.whole:
        remarks.append(f"the mean is over {len(part.shifts)} of {len(part.benchmark.shifts)} shifts")
    title = f"{part.benchmark.name}, {part.protocol}: variants"
    return [Table(title, "variant", columns, tuple(rows), (note, *remarks))]


def _variant(part: Part, name: str, base: str, compared: Sequence[comparisons.Comparison]) -> Row:
    *each, overall = compared
    verdicts = Counter(one.verdict for one in each)
    decided = [verdicts[f"{name} better"], verdicts[f"{base} better"]]
    there = [published.figure(part.benchmark.name, part.protocol, "accuracy", one, "all") for one in (name, base)]
    return Row(
        name,
        (
            Entry(text=base),
            Entry(overall.pairs),
            _points(overall),
            Entry() if there[0] is None or there[1] is None else Entry(100 * (there[0].mean - there[1].mean)),
            _chance(overall.p),
            Entry(text=overall.verdict),
            Entry(text=f"{decided[0]} / {decided[1]} / {sum(one.pairs > 0 for one in each) - sum(decided)}"),
        ),
    )


def _compare(part: Part, first: str, second: str) -> list[comparisons.Comparison]:
    """Compare shift by shift, and then over all shifts, where only seeds with every shift count."""
    own = [result for result in part.results if result.cell.method in (first, second) and not result.failed]
    if len({result.cell.method for result in own}) < 2:
        return []
    compared = comparisons.compare(own, first, second)
    places = Counter((result.cell.shift, result.cell.seed) for result in own)
    shifts = Counter(seed for (_, seed), methods in places.items() if methods == 2)
    lacking = sorted(seed for seed, count in shifts.items() if count < len(part.shifts))
    if not lacking:
        return compared
    whole = [result for result in own if result.cell.seed in set(shifts) - set(lacking)]
    if whole:
        overall = comparisons.compare(whole, first, second)[-1]
        remark = f"without seeds that lack shifts ({', '.join(map(str, lacking))})"
        overall = replace(overall, remark="; ".join(filter(None, (overall.remark, remark))))
    else:
        none = replace(compared[-1], pairs=0, difference=None, deviation=None, p=None, corrected=None, shifts=0)
        overall = replace(none, verdict="too few seeds", remark="no seed has every shift by both")
    return [*compared[:-1], overall]


def _points(one: comparisons.Comparison) -> Entry:
    scale = METRICS["accuracy"].scale
    return Entry(
        None if one.difference is None else scale * one.difference,
        None if one.deviation is None else scale * one.deviation,
    )


def _chance(p: float | None) -> Entry:
    """Show a p-value; very small ones are shown as less than the smallest printed value."""
    return Entry(p) if p is None or p >= 0.001 else Entry(text="< 0.001")


# ---- restoration and calibration


def restoration(part: Part) -> list[Block]:
    """Show restoration distance and ECE of each method, and their correlation, if clean images were measured."""
    if all(result.restoration_distance is None for result in part.unsupervised):
        return []
    others = with_another_source(part.benchmark, part.protocol)
    variants = variants_of(part.benchmark, part.protocol)
    found = correlations.restoration_and_calibration(part.unsupervised, exclude=others, variants=variants)
    if not found.means:
        return [f"Nothing can be said yet: {found.correlation.remark}."]
    name = part.benchmark.name
    theirs = {
        method: tuple(
            published.figure(name, part.protocol, metric, method, "all") for metric in ("restoration_distance", "ece")
        )
        for method in found.means
    }
    digits = 2 if max(distance for distance, _ in found.means.values()) >= 1 else 3
    columns = [Column("restoration distance", digits=digits), Column("ECE, percent")]
    known = {method: (distance.mean, ece.mean) for method, (distance, ece) in theirs.items() if distance and ece}
    if known:
        columns += [
            Column("distance in the paper", kind="published", digits=2),
            Column("ECE in the paper", kind="published"),
        ]
    rows = []
    for method, (distance, ece) in sorted(found.means.items(), key=lambda item: item[1]):
        entries = [Entry(distance), Entry(100 * ece)]
        if known:
            entries += (
                [Entry(known[method][0]), Entry(100 * known[method][1])] if method in known else [Entry(), Entry()]
            )
        rows.append(Row(method, tuple(entries)))
    said = f"Spearman's rank correlation of the two over methods: {_coefficient(found.correlation)}"
    if known:
        paper = correlations.correlate([d for d, _ in known.values()], [e for _, e in known.values()])
        said += f"; of the paper's figures for the same methods: {_coefficient(paper)}"
    left_out = [f"{method} (whose source model is another)" for method in part.methods if method in others]
    left_out += list(labelled_methods()) if len(part.unsupervised) < len(part.results) else []
    note = f"means over the {found.places} pairs of shift and seed that every method has done"
    note += f"; {' and '.join(left_out)} {'are' if len(left_out) > 1 else 'is'} left out" if left_out else ""
    note += f"; without {', '.join(found.without)}, for lack of common seeds" if found.without else ""
    note += "; the paper's are means over all shifts" if known else ""
    return [
        f"{said}.",
        Table(f"{name}, {part.protocol}: restoration and calibration", "method", tuple(columns), tuple(rows), (note,)),
    ]


def _coefficient(correlation: correlations.Correlation) -> str:
    if correlation.value is None:
        return f"none ({correlation.remark})"
    return f"{correlation.value:+.2f} ({correlation.points} methods)"


# ---- signals that need no labels


def signals(part: Part) -> list[Block]:
    """Return tables of how label-free signals correlate with accuracy, and how well they tell good cells from bad.

    A cell is one method on one shift from one seed. Methods that use target labels are left out. A cell is good if its
    accuracy is close to the source model's on clean images. In a second table, a cell is good if its accuracy exceeds
    that of source-only.

    Args:
        part: A protocol of a benchmark, with its results.

    Returns:
        Tables and sentences for the page.
    """
    found = correlations.signals_and_accuracy(part.unsupervised)
    rows = [
        Row(
            name,
            (Entry(value.within_shifts), Entry(value.shifts), Entry(value.overall.value), Entry(value.overall.points)),
        )
        for name, value in found.items()
    ]
    columns = (
        Column("within shifts", digits=2, kind="difference"),
        Column("shifts", digits=0),
        Column("over all cells", digits=2, kind="difference"),
        Column("cells", digits=0),
    )
    note = (
        "Spearman's rank correlation with accuracy (last), over all methods but target-supervised; within shifts is "
        "the mean of each shift's"
    )
    remarks = [f"{name}: {value.overall.remark}" for name, value in found.items() if value.overall.remark]
    title = f"{part.benchmark.name}, {part.protocol}: signals and accuracy"
    blocks: list[Block] = [Table(title, "signal", columns, tuple(rows), (note, *remarks))]
    at_home = _add_clean_source(part)
    near = correlations.find_near_clean(at_home, part.reading.clean)
    meaning = _describe_near_clean(part, len(part.unsupervised) - len(at_home))
    blocks += _judges(part, at_home, near, "near clean", meaning)
    better = correlations.find_helped(part.unsupervised)
    blocks += _judges(
        part, part.unsupervised, better, "has helped", "more accurate than source-only on the same shift and seed"
    )
    return blocks + _verdicts(part, near, meaning)


def _describe_near_clean(part: Part, left_out: int) -> str:
    """Define a good cell, and count the cells that cannot be judged."""
    meaning = (
        f"accuracy at most {100 * correlations.MARGIN:g} points below that of {footnotes.clean_source(part.benchmark)}"
    )
    others = f" (left out: {left_out} cells that start from another model)" if left_out else ""
    return f"{meaning} on clean images{others}"


def _add_clean_source(part: Part) -> list[Result]:
    """Keep results of the model whose accuracy on clean images is known; some shifts and methods have another model."""
    nothing_done = part.benchmark.settings.get("offline", {}).get(UNADAPTED)
    if nothing_done is None:
        return []
    settings, source = part.benchmark.settings[part.protocol], part.benchmark.source_for
    clean = source(nothing_done, CLEAN)
    return [result for result in part.unsupervised if source(settings[result.cell.method], result.cell.shift) == clean]


def _judges(part: Part, results: Sequence[Result], good: Mapping[Cell, bool], name: str, meaning: str) -> list[Block]:
    """Show how well each signal tells good cells from bad ones."""
    found = correlations.judges(results, good)
    counts = Counter(good.values())
    if not (counts[True] and counts[False]):
        said = f"{counts[True]} cells are good and {counts[False]} bad"
        return [f"Good meaning *{meaning}*: {said}, which leaves nothing to tell apart."]
    columns = (
        Column("AUC", digits=2),
        Column("accept if"),
        Column("balanced accuracy"),
        Column("balanced accuracy", "held-out shifts"),
        Column("bad ones accepted", "held-out shifts"),
        Column("good ones rejected", "held-out shifts"),
    )
    rows = tuple(Row(name, _list_judge(value)) for name, value in found.items())
    notes = (
        f"good: {meaning}; cells that are: {counts[True]}, that are not: {counts[False]}",
        "AUC: how often a good cell has the better signal than a bad one; 0.5 is chance, below it the signal misleads",
        "the threshold was found with labels on these cells; held-out: found on all other shifts each time; percent",
        *(
            [f"cells of the rarer kind: {rare}; read with care"]
            if (rare := min(counts.values())) < FEWEST_CELLS
            else []
        ),
    )
    return [
        Table(
            f"{part.benchmark.name}, {part.protocol}: good ({name}) or bad, told by signals",
            "signal",
            columns,
            rows,
            notes,
        )
    ]


def _list_judge(judge: correlations.Judge) -> tuple[Entry, ...]:
    held = judge.held_out
    if judge.threshold is None or judge.balanced is None:
        return (Entry(),) * 6
    sign = "≥" if judge.signal in correlations.HIGH_IS_GOOD else "≤"
    accept = f"{sign} {judge.threshold:.3g}"
    if judge.second is not None:
        accept = f"{judge.signal} {accept} and {judge.second[0]} ≤ {judge.second[1]:.3g}"
    return (
        Entry(judge.area),
        Entry(text="never" if math.isnan(judge.threshold) else accept),
        Entry(100 * judge.balanced),
        *(
            (Entry(),) * 3
            if held is None
            else map(Entry, (100 * held.balanced, 100 * held.bad_accepted, 100 * held.good_rejected))
        ),
    )


def _verdicts(part: Part, good: Mapping[Cell, bool], meaning: str) -> list[Block]:
    """Count the verdicts of the library, whose thresholds are the same for all benchmarks."""
    counts = _count_verdicts(part.unsupervised, good)
    if not counts:
        return []
    columns = (Column("good", digits=0), Column("bad", digits=0))
    title = f"{part.benchmark.name}, {part.protocol}: the library's own verdict, in cells"
    return [Table(title, "verdict", columns, _rows([counts]), (f"good: {meaning}",))]


def verification(result: Result) -> Verification | None:
    """Rebuild the verification of a result, so that the current rules of the library decide its verdict.

    The verdict that was stored when the cell was run is ignored.

    Args:
        result: A result of the benchmark.

    Returns:
        The verification; None if the result stores no divergence of the slices or no floor.
    """
    after, slices = result.manifest.get("verification", {}).get("after", {}), result.signals.get("slices")
    if slices is None or "floor" not in after:
        return None
    adapted = after.get("adapted", _method(result) != UNADAPTED)
    source, marginals = after.get("source_samples"), result.signals.get("marginals")
    return Verification(slices, after["floor"], after["samples"], source, adapted, marginals, after.get("units"))


def _method(result: Result) -> str | None:
    """Return the method of a cell, whatever the name of its row."""
    name: str | None = result.manifest.get("method", {}).get("name")
    return name


def _count_verdicts(results: Sequence[Result], good: Mapping[Cell, bool]) -> dict[str, Counter[bool]]:
    counts: dict[str, Counter[bool]] = {}
    for cell, result in comparisons.index_by_place(results).items():
        judged = verification(result)
        if judged is not None and cell in good:
            counts.setdefault(judged.verdict, Counter())[good[cell]] += 1
    return counts


def _rows(counts: Sequence[Mapping[str, Counter[bool]]]) -> tuple[Row, ...]:
    nothing = Counter[bool]()
    return tuple(
        Row(name, tuple(Entry(count.get(name, nothing)[kind]) for count in counts for kind in (True, False)))
        for name in get_args(Verdict)
        if any(name in count for count in counts)
    )


# ---- comparison with what is published, and data


def sanity(part: Part) -> list[Block]:
    """Show shifts on which the unadapted model differs from the published one, because data or model differ."""
    method = UNADAPTED
    for side, name in (("re-run", "the authors' re-run"), ("paper", "the paper")):
        if method not in part.methods:
            break
        asked = part.about(methods=[method], beside=side)
        grid = Grid(results=part.results, **asked)
        compared = grid.comparisons({shift: (shift,) for shift in part.shifts})
        known = {shift: entries for (_, shift), entries in compared.items() if entries[2].value is not None}
        if not known:
            continue
        far = [shift for shift, (_, _, gap) in known.items() if abs(gap.value or 0.0) > 100 * FAR_FROM_PUBLISHED]
        near = f"{len(known) - len(far)} of {len(known)} shifts"
        said = f"Source-only accuracy lies within {100 * FAR_FROM_PUBLISHED:g} points of {name} on {near}."
        if not far:
            return [said]
        titles = (Column("ours"), Column(side, kind="published"), Column("difference", kind="difference"))
        rows = tuple(Row(shift + footnotes.origin_marks(grid, [shift]), known[shift]) for shift in far)
        title = f"{part.benchmark.name}, {part.protocol}: shifts where source-only is far from {name}"
        return [said, Table(title, "shift", titles, rows, tuple(footnotes.about_data(grid)))]
    return []


def _published_notes(benchmark: str) -> list[Block]:
    notes = published.notes(benchmark)
    return ["\n".join(f"- {escape_markdown(note)}" for note in notes)] if notes else []


def _digests(part: Part) -> list[Block]:
    """List hashes of the target images as the model receives them; equal hashes mean equal data."""
    found: dict[str, dict[tuple[int, str], None]] = {}
    for result in part.reading.results:
        target = result.manifest.get("target") or {}
        if "sha256" in target and not sees_labels(result.cell.method):
            found.setdefault(result.cell.shift, {})[target.get("samples", 0), target["sha256"]] = None
    if not found:
        return []
    lines = ["| shift | images | SHA-256 of the inputs, first 16 digits |", "| :-- | --: | :-- |"]
    for shift in (*part.benchmark.shifts, *part.benchmark.clean_sets):
        for samples, digest in found.get(shift, {}):
            lines.append(f"| {escape_markdown(shift)} | {samples:,} | `{digest[:16]}` |")
    mixed = footnotes.about_mixtures(part.reading.results)
    return ["\n".join(lines), *(f"**{escape_markdown(note[0].upper() + note[1:])}.**" for note in mixed)]
