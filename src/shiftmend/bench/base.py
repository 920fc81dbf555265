"""What a benchmark is: data, networks, source training, methods with their hyper-parameters, seeds and protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiftmend.bench.cells import Origin
from shiftmend.bench.protocols import Protocol
from shiftmend.bench.recipes import Recipe
from shiftmend.data.base import Split
from shiftmend.data.streamed import ImageFiles
from shiftmend.feeds import Preprocess

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
    """Of the profile, see `shiftmend.presets`; the temperature of its bins is the protocol's."""


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
