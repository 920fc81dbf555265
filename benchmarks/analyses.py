"""Answer the paper's claims about where and how features are restored, from stored numbers alone.

    python benchmarks/analyses.py emnist-da --page docs/results/emnist-da-analyses.md --images docs/images/analyses

`benchmarks/paper_cells.py` measures the numbers and writes them to `results/BENCHMARK-analyses.json`. From that file
this script draws the figures of reliability and of training curves again, without a model or data, and writes the page.
Figures of images, activations and embeddings need the models; the page shows those that lie in the folder of images.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

from shiftmend.research.bench.benchmark import CLEAN, UNADAPTED, Cell, Result
from shiftmend.research.bench.footnotes import source_remarks
from shiftmend.research.bench.store import read_compact
from shiftmend.research.bench.suite import find
from shiftmend.research.figures.curves import draw_curves
from shiftmend.research.figures.results import draw_reliability
from shiftmend.research.figures.style import save
from shiftmend.utils.files import write_atomically

KEPT = Path(__file__).parents[1] / "results"

CAPTIONS = {
    "reliability": "Confidence and accuracy over all shifts. SHOT-IM is certain of everything it says.",
    "reliability-sky": "The same for sky, the severe shift of the paper.",
    "reliability-shot-noise": "The same for shot noise, the mild shift of the paper.",
    "curves": "Loss, verification slices and accuracy of `bufr` on the way.",
    "activations": "Activations of six features and six logits on stripe, before and after three methods.",
    "embedding": "t-SNE of the features of crystals: AdaBN, SHOT-IM, `bufr`.",
    "patches": "Image patches that excite units of the first layer most, on crystals.",
    "affected": "Divergence of every layer on crystals: before, after the first block, and after all.",
    "moved": "Distance that each block was moved on stripe, at one constant learning rate.",
}
"""What each figure shows."""

Numbers = dict[str, Any]


def draw_figures(numbers: Numbers, name: str, folder: Path, results: Sequence[Result]) -> list[str]:
    """Draw the figures whose numbers are stored, and return their titles."""
    drawn = []
    origins = {result.cell.shift: result.origin for result in results}
    for title, one in numbers["figures"].items():
        if one["figure"] == "reliability":
            cells = [
                Result(
                    Cell(name, "offline", row["method"], row["shift"], numbers["seed"], ""),
                    origins[row["shift"]],
                    manifest={"reliability": row["bins"]},
                )
                for row in one["numbers"]
            ]
            figure = draw_reliability(cells, one["methods"], one.get("shifts"))
        elif one["figure"] == "curves":
            lines = {key.split(", ")[1]: rows for key, rows in one["numbers"].items()}
            title_of = f"{one['methods'][0]} on {', '.join(lines)}, seed {numbers['seed']}"
            figure = draw_curves(lines, title_of, notes=source_remarks(results))
        else:
            continue
        save(figure, folder / f"{name}-{title}.png")
        drawn.append(title)
    return drawn


def tabulate_blocks(blocks: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table of accuracies after each block, with their means."""
    names = list(dict.fromkeys(block for row in blocks.values() for block in row))
    lines = ["| shift | " + " | ".join(block or "before" for block in names) + " |", "|---|" + "---|" * len(names)]
    for shift, row in blocks.items():
        lines.append(f"| {shift} | " + " | ".join(f"{100 * row[block]:.1f}" for block in names) + " |")
    means = [f"**{100 * mean(row[block] for row in blocks.values()):.1f}**" for block in names]
    return [*lines, "| **mean** | " + " | ".join(means) + " |"]


def answer_blocks(blocks: Mapping[str, Mapping[str, float]]) -> str:
    """Say whether two blocks suffice."""
    gains = [100 * (list(row.values())[-1] - list(row.values())[2]) for row in blocks.values()]
    worse = sum(gain < 0 for gain in gains)
    return (
        f"After the first two blocks the later ones change the mean accuracy by {mean(gains):+.1f} points (between "
        f"{min(gains):+.1f} and {max(gains):+.1f}; {worse} of {len(gains)} shifts lose). Scored every fifth epoch."
    )


def tabulate_layers(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table of mean divergences, a row for each layer and a column for each state."""
    states = list(found)
    lines = ["| layer | " + " | ".join(states) + " |", "|---|" + "---|" * len(states)]
    for layer in found[states[0]]:
        lines.append(f"| {layer} | " + " | ".join(f"{found[state][layer]:.3f}" for state in states) + " |")
    return lines


def answer_layers(found: Mapping[str, Mapping[str, float]]) -> str:
    """Say how much of the divergence of later layers is gone after the first block alone."""
    before, first, *_, last = found.values()
    later = list(before)[1:]
    shares = [
        1 - sum(state[layer] for layer in later) / sum(before[layer] for layer in later) for state in (first, last)
    ]
    return (
        f"The first block alone removes {100 * shares[0]:.0f} % of the divergence of the layers behind it, all blocks "
        f"together {100 * shares[1]:.0f} %."
    )


def answer_moved(found: Mapping[str, Mapping[str, float]]) -> str:
    """Say which share of its way each method moved the first block."""
    parts = []
    for method, row in found.items():
        first, *_ = row.values()
        parts.append(f"`{method}` {100 * first / sum(row.values()):.0f} %")
    return f"Of the distance that all blocks move together, the first block moves: {', '.join(parts)}."


def tabulate_moved(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table of distances, a row for each block and a column for each method."""
    methods = list(found)
    lines = ["| block | " + " | ".join(f"`{method}`" for method in methods) + " |", "|---|" + "---|" * len(methods)]
    for block in found[methods[0]]:
        lines.append(f"| {block} | " + " | ".join(f"{found[method][block]:.4f}" for method in methods) + " |")
    return lines


def tabulate_calibration(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return accuracy, confidence and the share of answers above 90 % confidence, pooled over the shifts."""
    lines = ["| | accuracy | mean confidence | answers above 90 % confidence |", "|---|---|---|---|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        for clean in (True, False):
            bins = [
                one
                for row in rows
                if row["method"] == method and (row["shift"] == CLEAN) == clean
                for one in row["bins"]
                if one["count"]
            ]
            if not bins:
                continue
            total = sum(one["count"] for one in bins)
            right, sure = (sum(one["count"] * one[key] for one in bins) / total for key in ("accuracy", "confidence"))
            certain = sum(one["count"] for one in bins if one["lower"] >= 0.9) / total
            name = f"{method}, unshifted" if clean and method == UNADAPTED else method
            lines.append(f"| {name} | {100 * right:.1f} | {100 * sure:.1f} | {100 * certain:.0f} % |")
    return lines


def write_page(numbers: Numbers, name: str, images: Path, page: Path, remark: str) -> str:
    """Return the page: each claim with its answer, then the figures that are there."""
    figures = numbers["figures"]

    def show(title: str) -> list[str]:
        file = images / f"{name}-{title}.png"
        if not file.is_file():
            return []
        return [
            f"![{CAPTIONS[title]}]({Path(os.path.relpath(file, page.parent)).as_posix()})",
            "",
            f"*{CAPTIONS[title]}*",
            "",
        ]

    lines = [
        f"# {find(name).title}: analyses",
        "",
        fill(
            f"Made by `python benchmarks/analyses.py {name}` from `results/{name}-analyses.json`. One source model "
            f"(seed {numbers['seed']}), published schedules. {remark}.",
            120,
        ),
        "",
    ]
    if blocks := numbers.get("blocks"):
        lines += ["## Do two blocks suffice?", "", fill(answer_blocks(blocks), 120), "", *tabulate_blocks(blocks), ""]
        lines += show("curves")
    if found := figures.get("affected", {}).get("numbers"):
        lines += ["## Does the first layer restore the rest?", "", fill(answer_layers(found), 120), ""]
        lines += [*tabulate_layers(found), "", *show("affected"), *show("patches")]
    if found := figures.get("moved", {}).get("numbers"):
        lines += ["## Does BUFR move early layers, and FR all of them?", "", fill(answer_moved(found), 120), ""]
        lines += [*tabulate_moved(found), "", *show("moved")]
    if found := figures.get("reliability", {}).get("numbers"):
        lines += ["## Are answers as certain as they are right?", "", *tabulate_calibration(found), ""]
        for title in ("reliability", "reliability-sky", "reliability-shot-noise"):
            lines += show(title)
    features = [*show("activations"), *show("embedding")]
    if features:
        lines += ["## What happens to the features", "", *features]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", nargs="?", default="emnist-da")
    parser.add_argument("--results", type=Path, default=KEPT)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    given = parser.parse_args(arguments)
    name = find(given.benchmark).name
    numbers = json.loads((given.results / f"{name}-analyses.json").read_text())
    results = read_compact(given.results / f"{name}.json")
    given.images.mkdir(parents=True, exist_ok=True)
    draw_figures(numbers, name, given.images, results)
    remark = "; ".join(source_remarks(results))
    write_atomically(given.page, write_page(numbers, name, given.images, given.page, remark).encode())


if __name__ == "__main__":
    main()
