"""Run the next cells that are missing from the paper's tables, as many as fit into a time limit.

    python benchmarks/paper_cells.py --data-root DATA --models MODELS --store STORE --time-limit 25
    python benchmarks/paper_cells.py --models MODELS --store STORE --benchmark emnist-da --list

STORE is a folder for `shiftmend bench`: its results, which begin with the compact files in `results/`, are written
after each cell, and a script that is stopped goes on where it was. MODELS holds source models as
`sources/*.safetensors`; those that are missing are trained and put there. After each block of cells
`STORE/BENCHMARK.json` is the compact file to keep in `results/`.

Results of one seed have to come from one training of the source model, and a model that is trained again on a GPU is
another one. So a seed that has results is used only together with the very model that they came from, told by its
weights; without it the cells get the next seed, with those that they are compared with.

`--list` says what is missing and which seeds it would get, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from shiftmend.research.bench.benchmark import CLEAN, UNADAPTED, Benchmark, Cell, Result
from shiftmend.research.bench.plan import plan, settings_of
from shiftmend.research.bench.resources import identify_data
from shiftmend.research.bench.run import Report, run
from shiftmend.research.bench.store import STORE, Store, read_compact, to_compact
from shiftmend.research.bench.suite import find
from shiftmend.research.figures.activations import measure_divergences
from shiftmend.research.figures.gallery import Request, draw
from shiftmend.research.figures.style import save
from shiftmend.research.figures.weights import group_by_block, measure_distances
from shiftmend.utils.checks import counted
from shiftmend.utils.files import write_atomically

KEPT = Path(__file__).parents[1] / "results"

FURTHER_SEEDS = (678, 789, 890, 901, 1012)
"""Seeds beyond a benchmark's own, for cells whose models are lost."""

SECONDS_FOR_FIGURES = 120
"""Figures that adapt again are begun only if there is this much time for each."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Block:
    """Rows of one table that are wanted from a number of seeds, all of them from the same."""

    title: str
    benchmark: str
    methods: tuple[str, ...]
    protocol: str = "offline"
    seeds: int = 1
    whole: bool = False
    """Results need their history and reliability bins, which compact files leave out."""


BLOCKS = (
    Block("CIFAR-100-C: the methods that are missing", "cifar-100-c", ("pl", "shot-im", "tent")),
    Block("CIFAR-100-C: a second seed of FR and BUFR", "cifar-100-c", ("fr", "bufr"), seeds=2),
    Block("CIFAR-100-C: online", "cifar-100-c", ("source-only", "adabn", "shot-im", "tent", "fr"), "online"),
    Block("CIFAR-100-C: the loss ablation", "cifar-100-c", ("fr", "fr-features", "fr-one-sided")),
    Block("CIFAR-10-C: the bound with labels", "cifar-10-c", ("target-supervised",)),
    Block("EMNIST-DA: the loss to the letter", "emnist-da", ("fr", "bufr", "fr-paper", "bufr-paper")),
    Block("CIFAR-10-C: the one-sided loss again", "cifar-10-c", ("fr", "fr-one-sided")),
    Block(
        "EMNIST-DA: what the analyses need", "emnist-da", ("source-only", "adabn", "shot-im", "fr", "bufr"), whole=True
    ),
)


@dataclass(frozen=True)
class Place:
    """The folders and the device of a run."""

    store: Path
    models: Path
    root: Path | None
    device: str = "auto"
    compile: bool = False
    workers: int | None = None


# ---- seeds


def choose_seed(block: Block, results: Sequence[Result], place: Place) -> int | None:
    """Choose the seed that a block goes on with; None if enough seeds are done.

    Seeds of which cells are done come first. A seed is passed over if it is done, or if its results came from a model
    that is not at hand.
    """
    benchmark = find(block.benchmark)
    own = [result for result in results if result.cell.benchmark == benchmark.name and not result.failed]
    done = {seed for seed in _seeds_of(benchmark, own) if not list_missing(block, seed, own, place)}
    if len(done) >= block.seeds:
        return None
    usable = [
        seed for seed in _seeds_of(benchmark, own) if seed not in done and is_usable(benchmark, block, seed, own, place)
    ]
    return min(usable, key=lambda seed: len(list_missing(block, seed, own, place)), default=None)


def is_usable(benchmark: Benchmark, block: Block, seed: int, results: Sequence[Result], place: Place) -> bool:
    """Tell if cells may be run with this seed: what is there of it came from the models that are at hand."""
    for source in {benchmark.source_for(setting, benchmark.shifts[0]) for setting in _settings(block).values()}:
        there = [result for result in results if result.cell.seed == seed and _source(result) == source]
        if block.whole and any(not result.manifest.get("reliability") for result in there):
            return False
        weights = {result.manifest.get("source_weights") for result in there} - {None}
        if weights and weights != {read_weights(find_model(block.benchmark, source, seed, place))}:
            return False
    return True


def find_model(name: str, source: str, seed: int, place: Place) -> Path:
    """Name the file of a source model under STORE; it need not be there."""
    stem = f"{find(name).sources[source].network}-{_digest_source(name, source, place.root)}-{seed}"
    return place.store / "sources" / f"{stem}.safetensors"


@cache
def _digest_source(name: str, source: str, root: Path | None) -> str:
    """Hash the recipe and the data of a source model, as `get_source_model` does; data are read only once."""
    benchmark = find(name)
    data = benchmark.load_source(source, root).train
    return benchmark.sources[source].digest(identify_data(data, benchmark.preprocess))


def read_weights(path: Path) -> str | None:
    """Read the hash of a source model's weights; None if there is no such file."""
    if not path.is_file():
        return None
    with safetensors.safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("weights")


def list_missing(block: Block, seed: int, results: Sequence[Result], place: Place) -> list[Cell]:
    """List the cells of a block that one seed lacks."""
    benchmark = find(block.benchmark)
    cells = plan(benchmark, block.protocol, methods=block.methods, seeds=[seed], root=place.root)
    done = {
        result.cell
        for result in results
        if not result.failed and (not block.whole or result.manifest.get("reliability"))
    }
    return [cell for cell in cells if cell not in done]


def _seeds_of(benchmark: Benchmark, results: Sequence[Result]) -> list[int]:
    there = {result.cell.seed for result in results}
    return list(dict.fromkeys((*benchmark.seeds, *sorted(there), *FURTHER_SEEDS)))


def _settings(block: Block) -> dict[str, Any]:
    settings = settings_of(find(block.benchmark), block.protocol)
    return {name: settings[name] for name in block.methods}


def _source(result: Result) -> str:
    return str((result.manifest.get("source") or {}).get("name"))


# ---- running


def run_blocks(blocks: Sequence[Block], place: Place, minutes: float, say: Say, kept: Path = KEPT) -> list[str]:
    """Run blocks in order, as far as the time goes, and return the titles of those that are done.

    A block with cells that fail is left, and tried again by the next run of the script.
    """
    end = time.monotonic() + 60 * minutes
    take_over(blocks, place, kept)
    finished: list[str] = []
    for block in blocks:
        failed = False
        while not failed and (seed := choose_seed(block, read_store(place), place)) is not None:
            left = (end - time.monotonic()) / 60
            if left <= 0:
                return finished
            say(f"{block.title}: seed {seed}, {len(list_missing(block, seed, read_store(place), place))} cells missing")
            report = run_block(block, seed, place, left, say)
            export(block.benchmark, place)
            if report.left:
                return finished
            failed = bool(report.failed)
        if not failed:
            finished.append(block.title)
    return finished


def run_block(block: Block, seed: int, place: Place, minutes: float, say: Say) -> Report:
    """Run what a seed lacks, then the source model on clean images, and share the models."""
    options: dict[str, Any] = {"seeds": [seed], "root": place.root, "device": place.device, "compile": place.compile}
    options |= {"progress": False, "say": say, "minutes": minutes, "workers": place.workers}
    report = run(block.benchmark, place.store, protocol=block.protocol, methods=block.methods, **options)
    if not report.left and UNADAPTED in find(block.benchmark).settings.get("offline", {}):
        run(block.benchmark, place.store, methods=[UNADAPTED], shifts=[CLEAN], **options)
    share_models(place.store, place.models)
    return report


def share_models(source: Path, target: Path) -> None:
    """Copy the source models that are not there yet; none is ever replaced."""
    for file in sorted(source.glob("sources/*.safetensors")):
        copy = target / "sources" / file.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy.with_suffix(".partial"))
            copy.with_suffix(".partial").replace(copy)


def take_over(blocks: Sequence[Block], place: Place, kept: Path) -> None:
    """Take the models and the results of the repository into the store, so that nothing is done twice."""
    place.store.mkdir(parents=True, exist_ok=True)
    # A script that was stopped may have left a model in the store alone.
    share_models(place.store, place.models)
    share_models(place.models, place.store)
    with Store(place.store / STORE) as store:
        for name in dict.fromkeys(block.benchmark for block in blocks):
            file = kept / f"{find(name).name}.json"
            if file.is_file():
                store.merge(read_compact(file))


def read_store(place: Place) -> list[Result]:
    with Store(place.store / STORE, read_only=True) as store:
        return store.results()


def export(name: str, place: Place) -> None:
    """Write the compact file of a benchmark, to be kept in `results/`."""
    benchmark = find(name).name
    results = [result for result in read_store(place) if result.cell.benchmark == benchmark]
    write_atomically(place.store / f"{benchmark}.json", to_compact(results).encode())


def list_blocks(blocks: Sequence[Block], place: Place, kept: Path = KEPT) -> Iterator[str]:
    """Say of each block what is missing; nothing is run."""
    take_over(blocks, place, kept)
    results = read_store(place)
    for block in blocks:
        seed = choose_seed(block, results, place)
        if seed is None:
            yield f"{block.title}: done"
            continue
        missing = list_missing(block, seed, results, place)
        sources = {find(block.benchmark).source_for(setting, missing[0].shift) for setting in _settings(block).values()}
        files = [find_model(block.benchmark, source, seed, place) for source in sorted(sources)]
        training = sum(not file.is_file() for file in files)
        models = f", {counted(training, 'source model')} to train" if training else ""
        rows = ", ".join(dict.fromkeys(cell.method for cell in missing))
        yield f"{block.title}: {len(missing)} cells ({rows}), seed {seed}{models}"


# ---- analyses


SEVERAL = ("stripe", "sky", "fog", "shot_noise")
"""Shifts of the training curves."""

FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "reliability": ("reliability", {"methods": ["clean", "source-only", "shot-im", "fr", "bufr"]}),
    "reliability-sky": ("reliability", {"methods": ["source-only", "shot-im", "fr", "bufr"], "shifts": ["sky"]}),
    "reliability-shot-noise": (
        "reliability",
        {"methods": ["source-only", "shot-im", "fr", "bufr"], "shifts": ["shot_noise"]},
    ),
    "curves": ("curves", {"methods": ["bufr"], "shifts": list(SEVERAL)}),
    "activations": ("activations", {"methods": ["adabn", "shot-im", "bufr"], "shifts": ["stripe"]}),
    "embedding": ("embedding", {"methods": ["adabn", "shot-im", "bufr"], "shifts": ["crystals"]}),
    "patches": ("patches", {"methods": ["bufr"], "shifts": ["crystals"]}),
    "affected": ("affected", {"methods": ["bufr"], "shifts": ["crystals"]}),
    "moved": ("moved", {"methods": ["fr", "bufr"], "shifts": ["stripe"]}),
}
"""The paper's figures: the name of the file, the figure, and what it shows."""


def find_analysed_seed(block: Block, place: Place) -> int | None:
    """Find a seed of which the block is done, with histories and reliability bins."""
    results = read_store(place)
    seeds = sorted({result.cell.seed for result in results if result.cell.benchmark == find(block.benchmark).name})
    return next((seed for seed in seeds if not list_missing(block, seed, results, place)), None)


def analyse(
    block: Block,
    place: Place,
    minutes: float,
    say: Say,
    figures: dict[str, tuple[str, dict[str, Any]]] | None = None,
    seconds_each: float = SECONDS_FOR_FIGURES,
) -> list[str]:
    """Draw the figures that are missing under STORE/figures, and write their numbers beside the results.

    The numbers, `STORE/BENCHMARK-analyses.json`, need no models: reliability bins, curves, how far each block moved at
    one rate, and the divergence of every layer before, after the first block, and after all.
    """
    seed = find_analysed_seed(block, place)
    if seed is None:
        return []
    end = time.monotonic() + 60 * minutes
    name = find(block.benchmark).name
    file = place.store / f"{name}-analyses.json"
    numbers: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"seed": seed, "figures": {}}
    numbers["blocks"] = measure_blocks([r for r in read_store(place) if r.cell.seed == numbers["seed"]], name)
    done: list[str] = []
    for title, (figure, choice) in (FIGURES if figures is None else figures).items():
        if title not in numbers["figures"]:
            if time.monotonic() + seconds_each > end:
                return done
            say(f"figure {title}")
            request = Request(
                block.benchmark, place.store, seed=numbers["seed"], root=place.root, device=place.device, **choice
            )
            save(draw(figure, request), place.store / "figures" / f"{name}-{title}.png")
            numbers["figures"][title] = {"figure": figure, **choice, "numbers": measure(figure, request)}
            write_atomically(file, (json.dumps(numbers, indent=1) + "\n").encode())
        done.append(title)
    return done


def measure_blocks(results: Sequence[Result], name: str) -> dict[str, dict[str, float]]:
    """Return the accuracy of `bufr` at the end of each block, by shift; before adapting stands under an empty name."""
    found: dict[str, dict[str, float]] = {}
    for result in results:
        if (result.cell.benchmark, result.cell.protocol, result.cell.method) == (name, "offline", "bufr"):
            scored = [row for row in result.history if row.get("accuracy") is not None]
            found[result.cell.shift] = {row["block"]: row["accuracy"] for row in scored}
    return found


def measure(figure: str, request: Request) -> Any:
    """Give the numbers of a figure in plain values; None for figures of pictures and points."""
    if figure == "reliability":
        methods, shifts = request.methods or [], request.shifts
        return [
            {"method": r.cell.method, "shift": r.cell.shift, "bins": r.manifest["reliability"]}
            for r in request.results()
            if r.cell.shift == CLEAN or (r.cell.method in methods and (shifts is None or r.cell.shift in shifts))
        ]
    if figure == "curves":
        return {
            f"{r.cell.method}, {r.cell.shift}": list(r.history)
            for r in request.results()
            if r.cell.shift in request.chosen_shifts() and r.cell.method in (request.methods or [])
        }
    if figure == "moved":
        cell = request.rerun()
        groups = group_by_block(cell.model, cell.first_inputs(cell.target.adapt))
        results = cell.adapt_at_one_rate(request.rows("fr", "bufr"))
        return {name: measure_distances(cell.model, each.model, groups) for name, each in results.items()}
    if figure == "affected":
        cell = request.rerun()
        profile = cell.profile_with(cell.layer_taps())
        states = {"before": cell.model, **cell.adapt_by_blocks(request.rows("bufr")[0], profile)}
        options: dict[str, Any] = {"preprocess": cell.preprocess, "device": cell.device}
        found = {name: measure_divergences(each, cell.adapted_to, profile, **options) for name, each in states.items()}
        return {
            name: {layer: float(np.nanmean(values)) for layer, values in each.items()} for name, each in found.items()
        }
    return None


def main(blocks: Sequence[Block] = BLOCKS, arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="default: SHIFTMEND_DATA")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=KEPT, help="compact files to begin with")
    parser.add_argument("--benchmark", help="run the cells of this benchmark alone")
    parser.add_argument("--time-limit", type=float, default=25.0, help="minutes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true", help="compile the steps of adapt")
    parser.add_argument("--list", action="store_true", help="say what is missing, and run nothing")
    given = parser.parse_args(arguments)
    place = Place(given.store, given.models, given.data_root, given.device, given.compile)
    blocks = [block for block in blocks if given.benchmark in (None, block.benchmark)]
    if not blocks:
        raise SystemExit(f"Expected a benchmark with missing cells, got {given.benchmark}. Try --list.")
    if given.list:
        for line in list_blocks(blocks, place, given.results):
            print(line)
        return
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"{(time.monotonic() - begun) / 60:5.1f} min  {line}", flush=True)

    finished = run_blocks(blocks, place, given.time_limit, say, given.results)
    say(f"{len(finished)} of {len(blocks)} blocks are done")
    if len(finished) == len(blocks) and blocks[-1].whole:
        drawn = analyse(blocks[-1], place, given.time_limit - (time.monotonic() - begun) / 60, say)
        say(f"{len(drawn)} of {len(FIGURES)} figures are drawn")


if __name__ == "__main__":
    main()
