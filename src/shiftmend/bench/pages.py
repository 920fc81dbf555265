"""A page of results in Markdown, from a store or a compact export alone: what was run, how, and what came of it."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shiftmend.bench import footnotes, label_free, published, questions, sections
from shiftmend.bench.base import CLEAN
from shiftmend.bench.cells import Result
from shiftmend.bench.grids import SUPERVISED
from shiftmend.bench.reading import read
from shiftmend.bench.rendering import for_markdown, render
from shiftmend.bench.sections import Block, Part
from shiftmend.bench.suite import find
from shiftmend.checks import counted
from shiftmend.errors import DataError

ONCE = (
    "`last` is the end of a run. Where there are published figures, those of the paper and of the authors' re-run of "
    "their code stand beside ours. A note stands under the first table that it belongs to, and is not said again. "
    "See [benchmarks](../benchmarks.md) for the methods, and for how to read a table."
)
EPOCHS = (
    "`selected` is the epoch that a new site would keep, chosen without labels. `best` looked at the labels of the "
    "epochs that were scored: those that the protocol names, the last and the selected one. It says what a better "
    "choice among them could have given, and the cost of selection is what lies between the two; an epoch that was not "
    "scored may have been better still."
)
FEW = "Adapted to a few images of each class, scored on all of them; mean over all shifts."
ONLINE = "One pass over the images: each batch is predicted before it is learnt from."
VARIANTS = "Each row differs from its method in one option; the difference is the variant less the method as it is."
SLICES = "Marginals can be matched by scrambling features; slices see how features go together."
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
"""Of an absolute path, on any system, what stands before the name of the file."""


def page(
    benchmark: str, folder: str | os.PathLike[str], notes: str = "", root: str | os.PathLike[str] | None = None
) -> str:
    """The page of a benchmark; `notes` are Markdown of a person's own, for what a program cannot know.

    `root` is the folder of the data sets, see `shiftmend.bench.reading.read`; they need not be there.
    """
    chosen = find(benchmark)
    parts = {protocol: Part(protocol, read(benchmark, folder, protocol, root=root)) for protocol in chosen.protocols}
    run = {protocol: part for protocol, part in parts.items() if part.results}
    if not run:
        others = sum(part.reading.others for part in parts.values())
        found = f", but {others} of other settings, data or learning rates" if others else ""
        raise DataError(
            f"{os.fspath(folder)} has no results of {benchmark} as it is now{found}; run the benchmark first"
        )
    main = run.get("offline") or next(iter(run.values()))
    stories: list[tuple[str, list[Block]]] = [
        ("", [_headline(parts), *_missing(parts), *_made_by(benchmark, parts)]),
        ("Notes", [notes.strip()] if notes.strip() else []),  # first, since tables are long: what to make of them
        ("Accuracy and calibration", [ONCE, *_clean(main), *sections.averages(main)]),
        ("Each shift", sections.by_shift(main)),
        ("Which epoch: last, selected, best", _with(EPOCHS, sections.choice_of_epoch(main))),
        ("Few images", _with(FEW, [*sections.few_shot(parts), *label_free.few_verdicts(parts)])),
        ("Online", _with(ONLINE, _online(run))),
        ("Variants of a method", _with(VARIANTS, questions.variants(main))),
        ("Does it help to align slices too?", _with(SLICES, questions.slices(main))),
        ("Restoration and calibration", _with(RESTORATION, questions.restoration(main))),
        ("Signals that need no labels", _with(SIGNALS, label_free.signals(main))),
        ("Does the model without adaptation do as published?", questions.sanity(main)),
        ("About the published figures", _published_notes(chosen.name)),
        ("Data", _digests(main)),
    ]
    said: set[str] = set()
    lines = [f"# {for_markdown(chosen.title)}", ""]
    for title, blocks in stories:
        if blocks:
            lines += [f"## {title}", ""] if title else []
            lines += [text for block in blocks for text in (_text(block, said), "")]
    return "\n".join(lines).rstrip() + "\n"


def _with(introduction: str, blocks: list[Block]) -> list[Block]:
    return [introduction, *blocks] if blocks else []


def _text(block: Block, said: set[str]) -> str:
    """A table without the notes that the page has already."""
    if isinstance(block, str):
        return block
    new = tuple(_without_folders(note) for note in block.notes if note not in said)
    marked = "" if block.marked in said else block.marked
    said.update((*block.notes, block.marked))
    return render(replace(block, notes=new, marked=marked), "markdown").rstrip("\n")


def _without_folders(note: str) -> str:
    """What an error says of a file without where it lies, which is nobody's business but the machine's."""
    return FOLDERS.sub("", note)


def _headline(parts: Mapping[str, Part]) -> str:
    cells = sum(len(part.reading.cells) for part in parts.values())
    done = sum(not result.failed for part in parts.values() for result in part.reading.results)
    remarks = footnotes.source_remarks(result for part in parts.values() for result in part.reading.results)
    images = " ".join([*(f"**{for_markdown(remark)}.**" for remark in remarks), _images(parts)])
    if done == cells:
        return f"{images} All {cells:,} cells (one method on one shift from one seed) are done."
    return (
        f"**Partial: {done:,} of {cells:,} cells (one method on one shift from one seed) are done.** {images} "
        "What is missing:"
    )


def _images(parts: Mapping[str, Part]) -> str:
    """Where the target images are from, in a sentence; the published files only where all of them are."""
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


def _missing(parts: Mapping[str, Part]) -> list[Block]:
    """A line for each protocol that lacks cells, and what has not been begun at all."""
    lines = []
    for protocol, part in parts.items():
        reading = part.reading
        missing = set(reading.cells) - {result.cell for result in reading.results if not result.failed}
        if not missing:
            continue
        if not reading.results:
            lines.append(f"- {protocol}: everything ({counted(len(missing), 'cell')})")
            continue
        failed = sum(result.failed for result in reading.results)
        facts = [
            _lacking("method", reading.methods, {result.cell.method for result in reading.results}),
            _lacking("shift", part.benchmark.shifts, set(part.shifts)),
            _lacking("seed", sorted({cell.seed for cell in reading.cells}), {r.cell.seed for r in reading.results}),
            f"{failed} failed" if failed else "",
        ]
        detail = "; ".join(fact for fact in facts if fact)
        lines.append(
            f"- {protocol}: {len(missing):,} of {len(reading.cells):,} cells" + (f"; {detail}" if detail else "")
        )
    return ["\n".join(lines)] if lines else []


def _lacking(what: str, known: Iterable[Any], there: set[Any]) -> str:
    names = [str(name) for name in known if name not in there]
    return f"nothing of the {what}{'s' if len(names) > 1 else ''} {', '.join(map(_code, names))}" if names else ""


def _made_by(benchmark: str, parts: Mapping[str, Part]) -> list[Block]:
    """Commands, machines, and how the source models were trained."""
    called = shlex.quote(Path(benchmark).name if Path(benchmark).is_absolute() else benchmark)  # a file of your own
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
    lines = [f"{for_markdown(text)}: {counted(count, 'cell')}" for text, count in found.most_common()]
    if dates:
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        shared = any(result.manifest.get("lanes", 1) > 1 for result in results)
        together = ", many of which ran side by side and so took longer," if shared else ""
        lines.append(f"finished {when}; the times of all cells{together} add up to {hours:.1f} hours")
    return lines


def _sources(results: Sequence[Result]) -> list[str]:
    """How source models were trained, by name, without what is off or empty."""
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
    return [f"source model `{name}`: {for_markdown(text)}" for name, text in sorted(recipes.items())]


def _protocol(part: Part) -> str:
    facts = part.benchmark.protocols[part.protocol].facts()
    shown = [
        f"{key.replace('_', ' ')} {_value(value)}"
        for key, value in facts.items()
        if key != "kind" and value is not None
    ]
    return f"protocol `{part.protocol}`: {for_markdown(', '.join(shown))}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key.replace('_', ' ')} {_value(entry)}" for key, entry in value.items()) + ")"
    if isinstance(value, list | tuple):
        return " + ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _clean(part: Part) -> list[Block]:
    """The source model at home, beside what is published of it."""
    asked: dict[str, Any] = {"benchmark": part.benchmark, "which": "last", "beside": ("paper", "re-run")}
    metrics = ("accuracy", "ece")
    said = [note for metric in metrics for note in footnotes.about_clean(part.reading.clean, metric=metric, **asked)]
    return ["\n".join(f"- {for_markdown(note)}" for note in said)] if said else []


def _online(run: Mapping[str, Part]) -> list[Block]:
    if "online" not in run:
        return []
    part, metrics = run["online"], ("accuracy", "ece_per_batch", "ece")
    return [*sections.averages(part, metrics), *sections.by_shift(part, metrics[:2])]


def _published_notes(benchmark: str) -> list[Block]:
    notes = published.notes(benchmark)
    return ["\n".join(f"- {for_markdown(note)}" for note in notes)] if notes else []


def _digests(part: Part) -> list[Block]:
    """Fingerprints of the target images as the model is given them: who has the same has the same data."""
    found: dict[str, dict[tuple[int, str], None]] = {}
    for result in part.reading.results:
        target = result.manifest.get("target") or {}
        if "sha256" in target and not result.cell.method.startswith(SUPERVISED):
            found.setdefault(result.cell.shift, {})[target.get("samples", 0), target["sha256"]] = None
    if not found:
        return []
    lines = ["| shift | images | SHA-256 of the inputs, first 16 digits |", "| :-- | --: | :-- |"]
    for shift in (*part.benchmark.shifts, CLEAN):
        for samples, digest in found.get(shift, {}):
            lines.append(f"| {for_markdown(shift)} | {samples:,} | `{digest[:16]}` |")
    mixed = footnotes.about_mixtures(part.reading.results)
    return ["\n".join(lines), *(f"**{for_markdown(note[0].upper() + note[1:])}.**" for note in mixed)]


def _code(name: str) -> str:
    return f"`{name}`"
