"""Every figure by name, drawn from the folder of a benchmark's run."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.adaptation.result import Adaptation
from shiftmend.engine.history import Epoch
from shiftmend.errors import DataError
from shiftmend.inputs.feed import Preprocess
from shiftmend.inputs.images import Split
from shiftmend.methods import METHODS
from shiftmend.methods.source_only import SourceOnly
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench.benchmark import CLEAN, UNADAPTED, Images, Offline, Result, Setting, Target
from shiftmend.research.bench.cell import divide_target, labels_of
from shiftmend.research.bench.footnotes import source_remarks
from shiftmend.research.bench.plan import choose, settings_of, variants_of, with_another_source
from shiftmend.research.bench.resources import Resources, first_inputs, inputs_of, labelled
from shiftmend.research.bench.results import read
from shiftmend.research.bench.suite import find
from shiftmend.research.figures.activations import draw_activations, draw_affected, layer_taps
from shiftmend.research.figures.curves import draw_curves
from shiftmend.research.figures.embedding import draw_embedding
from shiftmend.research.figures.images import draw_patches, draw_sheet
from shiftmend.research.figures.results import draw_dots, draw_reliability, draw_restoration, draw_shots
from shiftmend.research.figures.weights import draw_moved, group_by_block
from shiftmend.utils.checks import require
from shiftmend.utils.files import check_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHEET_COLUMNS = 10
"""Images in a row of the contact sheet."""


# ---- a cell run again


@dataclass
class Rerun:
    """A cell of a benchmark that is run again, for figures that need models, which a store does not contain.

    `target` is the protocol's division of the shift's images: under a few-shot protocol, a method adapts to few.
    """

    resources: Resources
    model: nn.Module
    profile: Profile
    source: Images
    target: Target
    shift: str
    seed: int
    protocol: str
    adapted: dict[str, Adaptation] = field(default_factory=dict)

    @property
    def preprocess(self) -> Preprocess:
        return self.resources.benchmark.preprocess

    @property
    def device(self) -> torch.device:
        return self.resources.device

    @property
    def adapted_to(self) -> Any:
        """Return the unlabelled inputs that methods adapt to."""
        return inputs_of(self.target.adapt)

    @property
    def models(self) -> dict[str, nn.Module]:
        """Return the adapted models by method."""
        return {name: result.model for name, result in self.adapted.items()}

    def adapt(self, method: str, profile: Profile | None = None, **changes: Any) -> Adaptation:
        """Adapt as in the benchmark, except for `changes` of the method's options."""
        benchmark = self.resources.benchmark
        setting, protocol = settings_of(benchmark, self.protocol)[method], benchmark.protocols[self.protocol]
        if setting.source != "plain":
            raise DataError(f"Expected methods with the same source model, got {method}, which has one of its own.")
        if setting.preset != (profile or self.profile).preset:
            if profile is not None:
                raise DataError(
                    f"Expected a row with the preset {profile.preset} for this figure, got {method} with "
                    f"{setting.preset}. Try a row without a preset."
                )
            home = benchmark.source_for(setting, self.shift)
            profile = self.resources.profile(home, self.seed, protocol.temperature, setting.preset)
        data, options = self.target.adapt, {**setting.options, **changes}
        if METHODS[setting.method].takes_labels:
            assert isinstance(protocol, Offline)
            data = divide_target(self.resources.target(self.shift), protocol, True, self.seed).adapt
            options["labels"] = labels_of(data)
        return shiftmend.adapt(
            self.model,
            inputs_of(data),
            profile or self.profile,
            setting.method,
            batch_size=protocol.batch_size,
            autocast=protocol.in_bfloat16(self.device),
            seed=self.seed,
            preprocess=self.preprocess,
            device=self.device,
            **options,
        )

    def adapt_at_one_rate(self, methods: Sequence[str]) -> dict[str, Adaptation]:
        """Adapt with each method at the same constant learning rate.

        The rate is the smallest that the benchmark sets for any of these methods. If the benchmark sets none, each
        method keeps its own. The rate does not decay from block to block. Methods without a learning rate adapt as
        usual.

        Args:
            methods: Rows of the benchmark, e.g. "fr" and "bufr".

        Returns:
            The adaptations by row.
        """
        settings = settings_of(self.resources.benchmark, self.protocol)
        known = {name: {field.name for field in fields(METHODS[settings[name].method])} for name in methods}
        rates = [rate for name in methods if (rate := settings[name].options.get("learning_rate")) is not None]
        constant = {"learning_rate": min(rates)} if rates else {}
        constant |= {"decay": 1.0}
        return {
            name: self.adapt(name, **{key: value for key, value in constant.items() if key in known[name]})
            for name in methods
        }

    def adapt_by_blocks(self, method: str, profile: Profile) -> dict[str, nn.Module]:
        """Adapt the source model bottom-up, and return its states after the first block and after all blocks.

        Args:
            method: Row of the benchmark, e.g. "bufr".
            profile: Profile to restore the features to.

        Returns:
            Models by label: "after" with the name of the first block, and "after all". If the method trains everything
            in a single stage, only "after adapting".
        """
        states: dict[str, nn.Module] = {}

        def keep(model: nn.Module, row: Epoch) -> None:
            if row.block:
                states[row.block] = copy.deepcopy(model)

        last = self.adapt(method, profile, on_epoch=keep).model
        first = next(iter(states))
        return {f"after {first}": states[first], "after all": last} if len(states) > 1 else {"after adapting": last}

    def profile_with(self, taps: Mapping[str, Any]) -> Profile:
        """Profile the source again, with further taps."""
        options: dict[str, Any] = {"preprocess": self.preprocess, "device": self.device, "progress": False}
        return shiftmend.profile(self.model, inputs_of(self.source), taps=taps, **options)

    def layer_taps(self) -> dict[str, Any]:
        return layer_taps(self.model, self.first_inputs(self.source))

    def first_inputs(self, images: Images) -> Tensor:
        """Return two inputs in the form that the model takes, on the device."""
        inputs: Tensor = self.preprocess(first_inputs(images, 2).to(self.device))
        return inputs


def rerun(
    benchmark: str,
    folder: Path,
    shift: str,
    methods: Sequence[str] = (),
    *,
    seed: int | None = None,
    root: Path | None = None,
    device: str = "auto",
    protocol: str = "offline",
) -> Rerun:
    """Load the source model and its profile from the folder of a run, or make them, and adapt with each method."""
    found = find(benchmark)
    (name,) = choose([shift], found.shifts, "shift", found.name)
    settings = settings_of(found, protocol)
    wanted = choose(list(methods), settings, "method", f"{found.name}, {protocol}") if methods else []
    number = found.seeds[0] if seed is None else seed
    divided = found.protocols[protocol]
    if not isinstance(divided, Offline):
        raise DataError(f"Expected an offline or few-shot protocol for a figure that adapts again, got {protocol}.")
    resources = Resources(found, folder, root, device)
    home = found.source_for(Setting(SourceOnly.name), name)
    model, _ = resources.model(home, number)
    profile = resources.profile(home, number, found.protocols[protocol].temperature)
    source = resources.source(home).profiled
    target = divide_target(resources.target(name), divided, False, number)
    cell = Rerun(resources, model, profile, source, target, name, number, protocol)
    cell.adapted = {method: cell.adapt(method) for method in wanted}
    return cell


# ---- what is asked for


@dataclass(frozen=True)
class Request:
    """The run, methods, shifts and seed to draw; the figure chooses what is not given."""

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

    @property
    def seeds(self) -> list[int] | None:
        return None if self.seed is None else [self.seed]

    def results(self) -> list[Result]:
        """Read the results, those on clean images included; `clean` as a method is the unadapted model on these."""
        methods = None if self.methods is None else [name for name in self.methods if name != CLEAN] or [UNADAPTED]
        found = read(self.benchmark, self.folder, self.protocol, methods=methods, seeds=self.seeds, root=self.root)
        self.check_shifts()
        return [*found.results, *(result for result in found.clean if result not in found.results)]

    def check_shifts(self) -> None:
        if self.shifts is not None:
            benchmark = find(self.benchmark)
            choose(self.shifts, (*benchmark.shifts, *benchmark.clean_sets), "shift", benchmark.name)

    def chosen_shifts(self) -> list[str]:
        """Return the requested shifts in the benchmark's order, else its first."""
        benchmark = find(self.benchmark)
        return choose(self.shifts, benchmark.shifts, "shift", benchmark.name) if self.shifts else [self.first_shift()]

    def first_shift(self) -> str:
        """Return the shift to draw in a figure of a single shift: the first requested, or the benchmark's first."""
        return self.shifts[0] if self.shifts else find(self.benchmark).shifts[0]

    def rows(self, *usual: str) -> list[str]:
        """Return the requested methods, else the usual ones of a figure, else the first ones of the benchmark."""
        benchmark = find(self.benchmark)
        known = settings_of(benchmark, self.protocol)
        if self.methods:
            choose(self.methods, known, "method", f"{benchmark.name}, {self.protocol}")
            return list(self.methods)
        kinds = {name: METHODS[row.method] for name, row in known.items()}
        first = [name for name, kind in kinds.items() if kind.adapts and not kind.takes_labels]
        return [name for name in usual if name in known] or first[: len(usual)] or list(known)[:1]

    def rerun(self, *usual: str) -> Rerun:
        """Run a cell again with the requested methods, or with the usual ones of a figure."""
        # A source model may have to be trained, and is stored then.
        check_folder(self.folder)
        methods = self.rows(*usual) if usual else ()
        options: dict[str, Any] = {"seed": self.seed, "root": self.root}
        options |= {"device": self.device, "protocol": self.protocol}
        return rerun(self.benchmark, self.folder, self.first_shift(), methods, **options)


# ---- figures


def draw(name: str, request: Request) -> Figure:
    """Draw a figure by its name, one of `FIGURES`."""
    if name not in FIGURES:
        raise DataError(f"Expected one of {', '.join(FIGURES)}, got the unknown figure {name!r}.")
    if request.folder.is_file() and name not in (*FROM_EXPORTS, "sheet"):
        raise DataError(
            f"Expected the folder of a run for {name}, got the file {request.folder}. An export is enough for "
            f"{', '.join(FROM_EXPORTS)}."
        )
    # The question comes before adapting, which may take minutes.
    require("matplotlib", "research")
    return FIGURES[name][0](request)


def _sheet(request: Request) -> Figure:
    found = find(request.benchmark)
    names = list(found.shifts)
    if request.shifts is not None:
        names = choose(request.shifts, found.shifts, "shift", found.name)
    targets = {name: found.load_target(name, request.root) for name in names}
    first = next(iter(targets.values()))
    rows = {"clean": _pick_images(first.clean)} if first.clean is not None else {}
    return draw_sheet(rows | {name: _pick_images(target.score) for name, target in targets.items()}, found.title)


def _pick_images(images: Images) -> Tensor:
    """Pick a few images that are far apart, since data sets are often sorted by class."""
    places = torch.linspace(0, len(images) - 1, SHEET_COLUMNS).long()
    if isinstance(images, Split):
        return images.images[places]
    return torch.stack([images[int(place)][0] for place in places])


def _reliability(request: Request) -> Figure:
    results = request.results()
    usual = ("source-only", "shot-im", "fr", "bufr")
    there = {result.cell.method for result in results}
    methods = request.methods or [name for name in usual if name in there] or usual
    return draw_reliability(results, methods, request.shifts)


def _dots(request: Request) -> Figure:
    return draw_dots(request.results(), request.methods, request.shifts)


def _shots(request: Request) -> Figure:
    found = find(request.benchmark)
    if request.methods is not None:
        known = dict.fromkeys(name for settings in found.settings.values() for name in settings)
        choose(request.methods, known, "method", found.name)
    request.check_shifts()
    results = [
        result
        for protocol in found.protocols
        for result in read(request.benchmark, request.folder, protocol, seeds=request.seeds, root=request.root).results
    ]
    return draw_shots(results, request.methods, request.shifts)


def _restoration(request: Request) -> Figure:
    benchmark, protocol = find(request.benchmark), request.protocol
    others, variants = with_another_source(benchmark, protocol), variants_of(benchmark, protocol)
    return draw_restoration(request.results(), request.methods, request.shifts, exclude=others, variants=variants)


def _curves(request: Request) -> Figure:
    methods, shifts = request.rows("bufr"), request.chosen_shifts()
    named, where = ", ".join(methods), ", ".join(shifts)
    results = [
        result
        for result in request.results()
        if result.cell.shift in shifts and result.cell.method in methods and not result.failed
    ]
    if not results:
        raise DataError(f"Expected results of {named} on {where}, got no finished result. Try shiftmend bench run.")
    histories = {
        (result.cell.seed, result.cell.method, result.cell.shift): result.history
        for result in results
        if result.history
    }
    if not histories:
        raise DataError(
            f"Expected a result of {named} on {where} with a history, got none. Streams and compact "
            "exports have no history. Try the folder of the run."
        )
    lines = Counter(seed for seed, _, _ in sorted(histories))
    # Among seeds with equally many lines, the first is taken.
    [(seed, _)] = lines.most_common(1)
    own = {
        _name_line(method, shift, methods, shifts): histories[seed, method, shift]
        for shift in shifts
        for method in methods
        if (seed, method, shift) in histories
    }
    history = own if len(own) > 1 else next(iter(own.values()))
    notes = source_remarks(results)
    if len(own) < len(methods) * len(shifts):
        notes.append(f"{len(own)} of {len(methods) * len(shifts)} lines: seed {seed} has no other histories")
    what = f"{named} on {where}" if len(methods) == 1 and len(shifts) > 1 else where
    return draw_curves(history, f"{what}, seed {seed}", notes=notes)


def _name_line(method: str, shift: str, methods: Sequence[str], shifts: Sequence[str]) -> str:
    """Name a line by what distinguishes it from the others."""
    if len(shifts) == 1:
        return method
    return shift if len(methods) == 1 else f"{method}, {shift}"


def _activations(request: Request) -> Figure:
    cell = request.rerun("bufr")
    options: dict[str, Any] = {"preprocess": cell.preprocess, "device": cell.device}
    return draw_activations(cell.model, cell.adapted_to, cell.profile, cell.models, **options)


def _embedding(request: Request) -> Figure:
    cell = request.rerun("shot-im", "fr", "bufr")
    names = cell.target.score.classes if isinstance(cell.target.score, Split) else None
    return draw_embedding(
        cell.model,
        cell.models,
        labelled(cell.source),
        labelled(cell.target.score),
        cell.profile,
        class_names=names or None,
        preprocess=cell.preprocess,
        device=cell.device,
    )


def _patches(request: Request) -> Figure:
    """Draw patches with a model that was adapted by aligning the layer itself, as in the paper."""
    cell = request.rerun()
    layer = request.layer or next(iter(cell.layer_taps()))
    adapted = cell.adapt(request.rows("bufr")[0], cell.profile_with({"early": layer}), align=("early",)).model
    return draw_patches(
        cell.model,
        inputs_of(cell.source),
        cell.adapted_to,
        adapted,
        layer=layer,
        number=request.unit,
        preprocess=cell.preprocess,
        device=cell.device,
    )


def _affected(request: Request) -> Figure:
    cell = request.rerun()
    profile = cell.profile_with(cell.layer_taps())
    adapted = cell.adapt_by_blocks(request.rows("bufr")[0], profile)
    options: dict[str, Any] = {"preprocess": cell.preprocess, "device": cell.device}
    return draw_affected(cell.model, cell.adapted_to, profile, adapted, **options)


def _moved(request: Request) -> Figure:
    """Draw distances at one constant learning rate, as in the paper, because they depend on the rate."""
    methods = request.rows("fr", "bufr")
    cell = request.rerun()
    adapted = cell.adapt_at_one_rate(methods)
    rates = {stage["learning_rate"] for result in adapted.values() for stage in result.manifest["stages"]}
    groups = group_by_block(cell.model, cell.first_inputs(cell.target.adapt))
    note = f"{cell.shift}; constant learning rate {', '.join(f'{rate:g}' for rate in sorted(rates))}"
    return draw_moved(
        cell.model,
        {name: result.model for name, result in adapted.items()},
        groups=groups,
        notes=[note] if rates else [],
    )


FIGURES: Mapping[str, tuple[Callable[[Request], Figure], str]] = {
    "sheet": (_sheet, "the same images under every shift"),
    "reliability": (_reliability, "confidence against accuracy, with histograms of confidence"),
    "dots": (_dots, "accuracy and calibration error, shift by shift and method by method"),
    "shots": (_shots, "accuracy against the number of examples of each class"),
    "restoration": (_restoration, "restoration distance against calibration error"),
    "curves": (
        _curves,
        "loss, verification and accuracy over epochs, for methods or shifts, with the moments of unfreezing",
    ),
    "activations": (_activations, "distributions of the first features and logits before and after; adapts again"),
    "embedding": (_embedding, "t-SNE of the features of a few classes, source and target; adapts again"),
    "patches": (_patches, "what a filter responds to most, and how its response is distributed; adapts again"),
    "affected": (_affected, "which units of which layers a shift hits; adapts again"),
    "moved": (_moved, "how far the weights of each block were moved at one constant rate; adapts again"),
}
"""Name, function and description of each figure. Figures that look into models adapt again."""

FROM_EXPORTS = ("dots", "shots", "restoration")
"""Figures for which a compact export suffices, since it has no histories and no reliability bins."""
