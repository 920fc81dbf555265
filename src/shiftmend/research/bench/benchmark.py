"""The definition of a benchmark (data, networks, methods, protocols) and of one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from shiftmend.errors import DataError
from shiftmend.inputs.feed import Preprocess
from shiftmend.inputs.images import Split
from shiftmend.methods import METHODS
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.datasets.streamed import ImageFiles
from shiftmend.verification.signals import SIGNALS as LABEL_FREE

SEEDS = (123, 234, 345, 456, 567)
"""The seeds of the reference implementation, and very likely of the paper."""

CLEAN = "clean"
"""The name for unshifted images: unseen images of the source, on which the source model is scored."""

UNADAPTED = next(name for name, method in METHODS.items() if not method.adapts)
"""The row of the model that is left as it is."""

USUAL_PRESET = "reference"
"""The preset of a row that names none. File names and recipes leave it out: they are older than other presets."""

SIGNALS = tuple(LABEL_FREE)
"""Names of the signals that need no labels, as `verification/signals.py` lists them."""

Which = Literal["last", "best", "selected"]

Origin = Literal["published", "rebuilt", "regenerated", "own"]
"""The origin of the target images: the published files; made again with other textures than the published ones; made
again by the published recipe; a set of our own."""

Images = Split | ImageFiles
"""Images in memory, or files that are decoded on demand."""

Root = Path | None
"""The folder of the data sets, or None for the folder in the environment."""


def is_clean(shift: str) -> bool:
    """Tell if the name stands for unshifted images."""
    return shift.partition(" ")[0] == CLEAN


def sees_labels(row: str) -> bool:
    """Tell by its name if a row belongs to a method that is given the target's labels, and so is no rival of others.

    Such a row is called like its method, or begins with the method's name.
    """
    return row.startswith(labelled_methods())


def labelled_methods() -> tuple[str, ...]:
    """List the methods that are given the target's labels."""
    return tuple(name for name, method in METHODS.items() if method.takes_labels)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that all protocols share."""

    kind: ClassVar[str]
    batch_size: int = 256
    temperature: float = 0.01
    """The temperature of the profile's bins."""
    score_every: int = 1
    """Epochs between two scores. The first, the last and the selected epoch are always scored."""
    autocast: bool = False
    """Adapt in bfloat16 on a GPU. Scores, signals and profiles stay in full precision."""

    def in_bfloat16(self, device: torch.device) -> bool:
        """Tell if adaptation on this device runs in bfloat16; a CPU gains nothing by it."""
        return self.autocast and device.type == "cuda"

    def facts(self) -> dict[str, Any]:
        """List what decides a result. A switch that is off is left out: recipes are older than the switch."""
        return {"kind": self.kind} | {name: value for name, value in asdict(self).items() if value is not False}


@dataclass(frozen=True, kw_only=True)
class Offline(Protocol):
    """Many passes over the target data, scored afterwards: in most benchmarks on the same data.

    A method that is given labels is trained on the first of three random parts and scored on the last. Benchmarks that
    score on other data than they adapt to set `supervised_parts=None`.
    """

    kind: ClassVar[str] = "offline"
    supervised_parts: tuple[float, ...] | None = (0.8, 0.1, 0.1)


@dataclass(frozen=True, kw_only=True)
class FewShot(Offline):
    """Offline adaptation to `per_class` target images of each class, scored on everything."""

    kind: ClassVar[str] = "few-shot"
    per_class: int


@dataclass(frozen=True, kw_only=True)
class Online(Protocol):
    """One pass in the order of the files; every batch is predicted before it is learnt from.

    The calibration error is taken over the whole stream. The mean over batches, which small batches bias upwards,
    stands beside it because the reference implementation reports it.
    """

    kind: ClassVar[str] = "online"
    batch_size: int = 200
    temperature: float = 0.05

    def __post_init__(self) -> None:
        if self.autocast:
            raise DataError(
                "Expected an online protocol without autocast, since it predicts while it adapts. Leave autocast out."
            )


@dataclass(frozen=True)
class Setting:
    """A row of a benchmark's table: a method, its options, its source model and its profile."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = "plain"
    preset: str = USUAL_PRESET
    """The profile's preset, see `shiftmend.profiles.presets`. The protocol sets the temperature of its bins."""


@dataclass(frozen=True)
class Source:
    """Images to train the source model on, images to profile it with, and clean images that it has not seen."""

    train: Images
    profiled: Images
    test: Images


@dataclass(frozen=True)
class Target:
    """Images of a shift to adapt to and to score on; `clean` is the clean version of `score`, in the same order."""

    adapt: Images
    score: Images
    clean: Images | None = None


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `sources` are recipes by name: `plain`, and for SHOT its own."""

    name: str
    title: str
    shifts: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    """Groups of shifts that a table also averages over, e.g. `severe`."""
    sources: Mapping[str, Recipe]
    protocols: Mapping[str, Protocol]
    settings: Mapping[str, Mapping[str, Setting]]
    """Settings by protocol, then by row of the table: a method's own name, or the name of a variant."""
    load_source: Callable[[str, Root], Source]
    """Load the data of a recipe, by the recipe's name."""
    load_target: Callable[[str, Root], Target]
    origin: Callable[[str, Root], Origin]
    """Say where the images of a shift come from; quickly, without reading them."""
    preprocess: Preprocess
    source_remark: Callable[[Root], str] = lambda root: ""
    """Say how the source images differ from the published ones; quickly, and empty if they do not."""
    source_for: Callable[[Setting, str], str] = lambda setting, shift: setting.source
    """Name the recipe that a setting starts from, for benchmarks where it depends on the shift."""
    seeds: tuple[int, ...] = SEEDS
    small: bool = False
    """The network is so small that one thread beats several, and one process a core fits into memory."""
    clean_sets: tuple[str, ...] = (CLEAN,)
    """Names of clean images, `clean` first. Others begin with `clean `, and belong to source models of some shifts."""
    by_class: bool = False
    """Also score each class: where classes differ in size, their mean is another figure than the accuracy."""
    cells_per_gpu: int = 1
    """Cells to run side by side on one GPU, for networks that leave most of it idle."""


@dataclass(frozen=True, order=True)
class Cell:
    """One number of a table: a method on a shift from one seed, under one protocol.

    `recipe` is a hash of everything else that decides the result: source training, options of the method, protocol, and
    origin of the data. A result of earlier settings is therefore never taken for one of a changed benchmark.
    """

    benchmark: str
    protocol: str
    method: str
    shift: str
    seed: int
    recipe: str

    def __str__(self) -> str:
        return f"{self.method} on {self.shift}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """The scores after some epoch, as fractions."""

    epoch: int
    accuracy: float
    ece: float
    mce: float
    nll: float
    brier: float


@dataclass(frozen=True)
class Result:
    """A finished cell; a failed one has an error and no outcomes.

    `last` is the end of the run, `best` the epoch with the highest accuracy (an oracle: it looked at labels),
    `selected` the epoch that is kept without labels. `signals`, `restoration_distance` and `alignment_loss` belong to
    `last`.
    """

    cell: Cell
    origin: Origin
    last: Outcome | None = None
    best: Outcome | None = None
    selected: Outcome | None = None
    signals: dict[str, float] = field(default_factory=dict)
    restoration_distance: float | None = None
    alignment_loss: float | None = None
    ece_per_batch: float | None = None
    """Mean of the ECE of single batches, as the reference implementation reports it online."""
    epochs: int = 0
    seconds: float = 0.0
    peak_memory: int | None = None
    """Bytes of the GPU where one was used, else of the process."""
    history: tuple[dict[str, Any], ...] = ()
    """One entry an epoch: loss terms, signals, accuracy and ECE."""
    manifest: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    finished: str = ""
    """The end of the run in UTC, as in 2022-04-25T09:00:00Z."""

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def class_accuracy(self) -> dict[str, float]:
        """The accuracy of each class at the end of the run, without classes that do not occur; empty if not scored."""
        found: dict[str, float] = self.manifest.get("class_accuracy", {})
        return found

    @property
    def mean_class_accuracy(self) -> float | None:
        """The mean of the accuracies of the classes, each of which counts as much as any other."""
        return sum(self.class_accuracy.values()) / len(self.class_accuracy) if self.class_accuracy else None
