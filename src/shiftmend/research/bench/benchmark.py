"""What a benchmark is: data, networks, source training, methods with their hyper-parameters, seeds and protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from shiftmend.errors import DataError
from shiftmend.inputs.feed import Preprocess
from shiftmend.inputs.images import Split
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.datasets.streamed import ImageFiles


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What all protocols say: the batch, and the temperature of the profile's bins."""

    kind: ClassVar[str]
    batch_size: int = 256
    temperature: float = 0.01
    score_every: int = 1
    """Epochs between two looks at the labels; the first, the last and the selected state are always scored."""
    autocast: bool = False
    """Adapt offline in bfloat16 on a GPU, with the looks after each epoch; scores, the signals of a cell and profiles
    are taken in full precision."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "score_every", "temperature", "per_class"):
            value = getattr(self, name, 1)
            if not value > 0 or (name != "temperature" and not isinstance(value, int)):
                raise DataError(f"{name} of a protocol must be a positive number, whole if it counts, got {value!r}")

    def in_bfloat16(self, device: torch.device) -> bool:
        """Whether to adapt so there: a CPU gains nothing by it."""
        return self.autocast and device.type == "cuda"

    def facts(self) -> dict[str, Any]:
        """What decides a result; a switch that is off is left out, as if there were none."""
        return {"kind": self.kind} | {name: value for name, value in asdict(self).items() if value is not False}


@dataclass(frozen=True, kw_only=True)
class Offline(Protocol):
    """Many passes over the target data; scored afterwards, in most benchmarks on that same data.

    The supervised method is trained on the first of three random parts and scored on the last; `supervised_parts=None`
    is for benchmarks that score on other data than they adapt to.
    """

    kind: ClassVar[str] = "offline"
    supervised_parts: tuple[float, ...] | None = (0.8, 0.1, 0.1)


@dataclass(frozen=True, kw_only=True)
class FewShot(Offline):
    """As offline, but from `per_class` target images of each class; scored on everything."""

    kind: ClassVar[str] = "few-shot"
    per_class: int


@dataclass(frozen=True, kw_only=True)
class Online(Protocol):
    """One pass in the order of the files; every batch is predicted before it is learnt from.

    The calibration error is taken over the whole stream; the mean over batches, which small batches bias upwards,
    stands beside it because the reference implementation reports it.
    """

    kind: ClassVar[str] = "online"
    batch_size: int = 200
    temperature: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.autocast:
            raise DataError("online protocols know no autocast: predictions are made while adapting; leave it out")


Which = Literal["last", "best", "selected"]


Origin = Literal["published", "rebuilt", "regenerated", "own"]
"""Where the target images are from: the published files; made again with other textures than the published ones; made
again by the published recipe; a set of our own."""


SIGNALS = ("slices", "marginals", "entropy", "confidence")
"""What can be measured without labels: divergence of the verification slices, divergence of features and logits one by
one, mean entropy of the predictions, mean confidence."""


@dataclass(frozen=True, order=True)
class Cell:
    """One number of a table: a method on a shift from one seed, under one protocol.

    `recipe` is a hash of everything else that decides the result (source training, options of the method, protocol,
    origin of the data), so that a changed benchmark never passes off an old result as its own.
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
    """What is known of a finished cell; a failed one has an error and no outcomes.

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
    """Bytes: of the GPU where one was used, else of the process."""
    history: tuple[dict[str, Any], ...] = ()
    """One entry an epoch: loss terms, signals, accuracy and ECE."""
    manifest: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    finished: str = ""
    """When, in UTC, as in 2022-04-25T09:00:00Z."""

    @property
    def failed(self) -> bool:
        return self.error is not None


SEEDS = (123, 234, 345, 456, 567)
"""Those of the reference implementation, and very likely of the paper."""


CLEAN = "clean"
"""The shift that is none: unseen source images, on which the source model is scored."""


USUAL_PRESET = "reference"
"""Of a row that names none. It goes without saying in the names of files and in recipes, which are older than presets
other than this one."""


Images = Split | ImageFiles
"""In memory, or decoded from files when asked for."""


Root = Path | None
"""The folder of the data sets, or None for the one in the environment."""


@dataclass(frozen=True)
class Source:
    """What the source model is trained on, what it is profiled with, and clean images that it has not seen."""

    train: Images
    profiled: Images
    test: Images


@dataclass(frozen=True)
class Target:
    """A shift's data: to adapt to, to score on, and if there is one the clean version of the latter in its order."""

    adapt: Images
    score: Images
    clean: Images | None = None


@dataclass(frozen=True)
class Setting:
    """A row of a benchmark's table: a method, its options, and which source model and which profile it starts from."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = "plain"
    preset: str = USUAL_PRESET
    """Of the profile, see `shiftmend.profiles.presets`; the temperature of its bins is the protocol's."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `sources` are recipes by name: `plain`, and for SHOT its own."""

    name: str
    title: str
    shifts: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    """Summaries of the table beside the mean over all shifts, e.g. `severe`."""
    sources: Mapping[str, Recipe]
    protocols: Mapping[str, Protocol]
    settings: Mapping[str, Mapping[str, Setting]]
    """By protocol, then by the name in the table: a method's own name, or that of a variant."""
    load_source: Callable[[str, Root], Source]
    """The data of a recipe, by its name."""
    load_target: Callable[[str, Root], Target]
    origin: Callable[[str, Root], Origin]
    """Where the images of a shift come from; quick, without reading them."""
    preprocess: Preprocess
    source_remark: Callable[[Root], str] = lambda root: ""
    """What is unlike the published source images, for everything that shows a figure; quick, and empty if nothing."""
    source_for: Callable[[Setting, str], str] = lambda setting, shift: setting.source
    """The recipe that a setting starts from; for benchmarks where that depends on the shift."""
    seeds: tuple[int, ...] = SEEDS
    small: bool = False
    """So small a network that one thread is faster than several, and one process a core fits into memory."""
    lanes: int = 1
    """Cells that run side by side on one GPU, for networks that leave most of it idle."""
