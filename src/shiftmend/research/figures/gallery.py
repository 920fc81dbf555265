"""Every figure by name, drawn from the folder of a benchmark's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.research.bench.benchmark import CLEAN, Images, Result
from shiftmend.research.bench.plan import choose, settings_of, variants_of, with_another_source
from shiftmend.research.bench.resources import inputs_of, labelled
from shiftmend.research.bench.results import read
from shiftmend.research.bench.suite import find
from shiftmend.research.figures.scenes import Scene, after_each_block, stage
from shiftmend.utils.files import check_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 10
"""Images in a row of the contact sheet."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for; what is left open is up to the figure."""

    benchmark: str
    folder: Path
    protocol: str = "offline"
    methods: Sequence[str] | None = None
    shifts: Sequence[str] | None = None
    seed: int | None = None
    root: Path | None = None
    device: str = "auto"
    layer: str | None = None
    unit: int = 0

    def results(self) -> list[Result]:
        seeds = None if self.seed is None else [self.seed]
        found = read(self.benchmark, self.folder, self.protocol, methods=self.methods, seeds=seeds, root=self.root)
        self.check_shifts()
        return [*found.results, *(result for result in found.clean if result not in found.results)]

    def check_shifts(self) -> None:
        if self.shifts is not None:
            benchmark = find(self.benchmark)
            choose(self.shifts, (*benchmark.shifts, CLEAN), "shift", benchmark.name)

    def shift(self) -> str:
        """The one shift of a figure that shows one: the first that is named, or the benchmark's first."""
        return self.shifts[0] if self.shifts else find(self.benchmark).shifts[0]

    def rows(self, *usual: str) -> list[str]:
        """The methods asked for; else the usual ones of a figure, or where a benchmark has none of them its first."""
        benchmark = find(self.benchmark)
        known = settings_of(benchmark, self.protocol)
        if self.methods:
            choose(self.methods, known, "method", f"{benchmark.name}, {self.protocol}")
            return list(self.methods)
        first = [name for name, row in known.items() if row.method not in ("source-only", "target-supervised")]
        return [name for name in usual if name in known] or first[: len(usual)] or list(known)[:1]

    def scene(self, *usual: str) -> Scene:
        """With models adapted by the methods asked for or the usual ones of a figure, if it has any."""
        check_folder(self.folder)  # a source model may have to be trained
        return stage(
            self.benchmark,
            self.folder,
            self.shift(),
            self.rows(*usual) if usual else (),
            seed=self.seed,
            root=self.root,
            device=self.device,
            protocol=self.protocol,
        )


def _reliability(wanted: Wanted) -> Figure:
    from shiftmend.research.figures import reliability

    results = wanted.results()
    usual = ("source-only", "shot-im", "fr", "bufr")
    there = {result.cell.method for result in results}
    return reliability.draw(
        results, wanted.methods or [name for name in usual if name in there] or usual, wanted.shifts
    )


def _dots(wanted: Wanted) -> Figure:
    from shiftmend.research.figures import dots

    return dots.draw(wanted.results(), wanted.methods, wanted.shifts)


def _shots(wanted: Wanted) -> Figure:
    from shiftmend.research.figures import shots

    found = find(wanted.benchmark)
    if wanted.methods is not None:
        known = dict.fromkeys(name for settings in found.settings.values() for name in settings)
        choose(wanted.methods, known, "method", found.name)
    wanted.check_shifts()
    seeds = None if wanted.seed is None else [wanted.seed]
    results = [
        result
        for protocol in found.protocols
        for result in read(wanted.benchmark, wanted.folder, protocol, seeds=seeds, root=wanted.root).results
    ]
    return shots.draw(results, wanted.methods, wanted.shifts)


def _restoration(wanted: Wanted) -> Figure:
    from shiftmend.research.figures import restoration

    benchmark, protocol = find(wanted.benchmark), wanted.protocol
    others, variants = with_another_source(benchmark, protocol), variants_of(benchmark, protocol)
    return restoration.draw(wanted.results(), wanted.methods, wanted.shifts, exclude=others, variants=variants)


def _curves(wanted: Wanted) -> Figure:
    from shiftmend.research.bench.footnotes import source_remarks
    from shiftmend.research.figures import curves

    methods, shift = wanted.rows("bufr"), wanted.shift()
    results = [
        result
        for result in wanted.results()
        if result.cell.shift == shift and result.cell.method in methods and not result.failed
    ]
    if not results:
        raise DataError(f"there is no finished result of {', '.join(methods)} on {shift}; run the benchmark first")
    seeds = [result.cell.seed for result in results if result.history]
    if not seeds:
        raise DataError(
            f"no result of {', '.join(methods)} on {shift} has a history, which streams and compact exports lack; "
            "draw it where the benchmark was run"
        )
    seed = min(seeds)
    own = {result.cell.method: result.history for result in results if result.cell.seed == seed and result.history}
    notes = source_remarks(results)
    return curves.draw(own if len(own) > 1 else next(iter(own.values())), f"{shift}, seed {seed}", notes=notes)


def _activations(wanted: Wanted) -> Figure:
    from shiftmend.research.figures import activations

    scene = wanted.scene("bufr")
    return activations.draw(
        scene.model,
        inputs_of(scene.target.adapt),
        scene.profile,
        next(iter(scene.models().values())),
        preprocess=scene.preprocess,
        device=scene.device,
    )


def _embedding(wanted: Wanted) -> Figure:
    from shiftmend.research.figures import embedding

    scene = wanted.scene("shot-im", "fr", "bufr")
    names = scene.target.score.classes if isinstance(scene.target.score, Split) else None
    return embedding.draw(
        scene.model,
        scene.models(),
        labelled(scene.source),
        labelled(scene.target.score),
        scene.profile,
        class_names=names or None,
        preprocess=scene.preprocess,
        device=scene.device,
    )


def _patches(wanted: Wanted) -> Figure:
    """The layer's own distribution is aligned for this one, as in the paper."""
    import shiftmend
    from shiftmend.research.figures import patches
    from shiftmend.research.figures.measuring import layer_taps

    scene = wanted.scene()
    layer = wanted.layer or next(iter(layer_taps(scene.model, scene.preprocess(inputs_of(scene.source)[:2]))))
    profile = shiftmend.profile(
        scene.model,
        inputs_of(scene.source),
        taps={"early": layer},
        preprocess=scene.preprocess,
        device=scene.device,
        progress=False,
    )
    adapted = scene.adapt(wanted.rows("bufr")[0], profile, align=("early",)).model
    return patches.draw(
        scene.model,
        inputs_of(scene.source),
        inputs_of(scene.target.adapt),
        adapted,
        layer=layer,
        number=wanted.unit,
        preprocess=scene.preprocess,
        device=scene.device,
    )


def _affected(wanted: Wanted) -> Figure:
    import shiftmend
    from shiftmend.research.figures import affected
    from shiftmend.research.figures.measuring import layer_taps

    scene = wanted.scene()
    profile = shiftmend.profile(
        scene.model,
        inputs_of(scene.source),
        taps=layer_taps(scene.model, scene.preprocess(inputs_of(scene.source)[:2])),
        preprocess=scene.preprocess,
        device=scene.device,
        progress=False,
    )
    return affected.draw(
        scene.model,
        inputs_of(scene.target.adapt),
        profile,
        after_each_block(scene, wanted.rows("bufr")[0], profile),
        preprocess=scene.preprocess,
        device=scene.device,
    )


def _moved(wanted: Wanted) -> Figure:
    from shiftmend.research.figures import moved

    scene = wanted.scene("fr", "bufr")
    sample = scene.preprocess(inputs_of(scene.target.adapt)[:2].to(scene.device))
    return moved.draw(scene.model, scene.models(), groups=moved.bottom_up(scene.model, sample))


def _sheet(wanted: Wanted) -> Figure:
    from shiftmend.research.figures import sheet

    found = find(wanted.benchmark)
    names = list(found.shifts) if wanted.shifts is None else choose(wanted.shifts, found.shifts, "shift", found.name)
    targets = {name: found.load_target(name, wanted.root) for name in names}
    first = next(iter(targets.values()))
    rows = {"clean": _some(first.clean)} if first.clean is not None else {}
    return sheet.draw(rows | {name: _some(target.score) for name, target in targets.items()}, found.title)


def _some(images: Images) -> Tensor:
    """A few images, far apart, since sets are often sorted by class."""
    places = torch.linspace(0, len(images) - 1, SHOWN).long()
    if isinstance(images, Split):
        return images.images[places]
    return torch.stack([images[int(place)][0] for place in places])


FIGURES: Mapping[str, tuple[Callable[[Wanted], Figure], str]] = {
    "sheet": (_sheet, "the same images under every shift"),
    "reliability": (_reliability, "confidence against accuracy, with histograms of confidence"),
    "dots": (_dots, "accuracy and calibration error, shift by shift and method by method"),
    "shots": (_shots, "accuracy against the number of examples of each class"),
    "restoration": (_restoration, "restoration distance against calibration error"),
    "curves": (_curves, "loss, verification and accuracy over epochs, with the moments of unfreezing"),
    "activations": (_activations, "distributions of the first features and logits before and after; adapts again"),
    "embedding": (_embedding, "t-SNE of the features of a few classes, source and target; adapts again"),
    "patches": (_patches, "what a filter responds to most, and how its response is distributed; adapts again"),
    "affected": (_affected, "which units of which layers a shift hits; adapts again"),
    "moved": (_moved, "how far the weights of each block were moved; adapts again"),
}
"""Name, function, and what it shows. Those that look into models adapt again: a store holds no models."""


OF_RESULTS = ("dots", "shots", "restoration")
"""Figures that a compact export is enough for; it has no histories and no reliability bins."""


def draw(name: str, wanted: Wanted) -> Figure:
    """A figure by its name."""
    if name not in FIGURES:
        raise DataError(f"unknown figure {name!r}, expected one of {', '.join(FIGURES)}")
    if wanted.folder.is_file() and name not in (*OF_RESULTS, "sheet"):
        raise DataError(
            f"{wanted.folder} is a file: an export is enough for {', '.join(OF_RESULTS)}, but {name} needs the folder "
            "of the run; name that"
        )
    return FIGURES[name][0](wanted)
