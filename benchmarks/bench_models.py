"""What scripts here share that start from a benchmark's source models: models, targets, and a file of rows."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.adaptation.result import environment
from shiftmend.engine.checkpoint import identify
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.profiles import fingerprints
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench.benchmark import (
    CLEAN,
    UNADAPTED,
    Benchmark,
    Images,
    Protocol,
    Root,
    Setting,
    Target,
)
from shiftmend.research.bench.resources import Cache, Resources, identify_data
from shiftmend.research.bench.suite import find
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import write_atomically

TARGETS_IN_MEMORY = 2


@dataclass(frozen=True)
class Given:
    """A benchmark with its source models, profiles and targets on a device."""

    resources: Resources
    may_train: bool
    rehearsed: Path | None = None

    @property
    def benchmark(self) -> Benchmark:
        return self.resources.benchmark

    @property
    def device(self) -> torch.device:
        return self.resources.device

    @property
    def source(self) -> str:
        """Name of the recipe of the plain source model; that of MNIST where each direction has its own."""
        return self.benchmark.source_for(Setting(UNADAPTED), CLEAN)

    @property
    def protocol(self) -> Protocol:
        return self.benchmark.protocols["offline"]

    def model(self, seed: int) -> nn.Module:
        """Return the plain source model of a seed; train it only if that is allowed."""
        path = self._find_model(seed)
        if not self.may_train and not path.exists():
            raise SystemExit(f"Expected the source model {path}, found none. Try --train, or name another --models.")
        return self.resources.model(self.source, seed)[0]

    def profile(self, seed: int) -> Profile:
        self.model(seed)
        return self.resources.profile(self.source, seed, self.protocol.temperature)

    def rehearsed_profile(self, seed: int) -> Profile:
        """Return the profile that was rehearsed for the source model of a seed, or the plain one if none is named."""
        if self.rehearsed is None:
            return self.profile(seed)
        profile = Profile.load(self.rehearsed / f"{self.benchmark.name}-{seed}.profile")
        if profile.weights != fingerprints.weights(self.model(seed)):
            raise SystemExit(f"Expected a profile of the model of seed {seed}, got one of another. Rehearse again.")
        return profile

    def target(self, shift: str) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of a shift, as they come from memory, on the host."""
        given = self.benchmark.load_target(shift, self.resources.root).adapt
        return _split(given).images, labels_of(given)

    def adapt(
        self,
        model: nn.Module,
        inputs: Tensor,
        profile: Profile,
        method: Any,
        seed: int,
        on_epoch: Any = None,
        **options: Any,
    ) -> shiftmend.Adaptation:
        """Adapt under the protocol of the benchmark, whatever the length."""
        return shiftmend.adapt(
            model,
            inputs,
            profile,
            method,
            batch_size=self.protocol.batch_size,
            seed=seed,
            preprocess=self.benchmark.preprocess,
            device=self.device,
            autocast=self.protocol.in_bfloat16(self.device),
            on_epoch=on_epoch,
            progress=False,
            **options,
        )

    def score(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> shiftmend.Scores:
        scores = shiftmend.evaluate(
            model, (inputs, labels), preprocess=self.benchmark.preprocess, device=self.device, batch_size=2048
        )
        assert isinstance(scores, shiftmend.Scores)
        return scores

    def describe(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Return what all rows of a run have in common, for its manifest."""
        versions = {name: value for name, value in environment(self.device).items() if name != "platform"}
        return {
            "benchmark": self.benchmark.name,
            "environment": versions | {"threads": torch.get_num_threads()},
            "protocol": self.protocol.facts(),
            "bfloat16": self.protocol.in_bfloat16(self.device),
            "source": self.benchmark.sources[self.source].facts(),
            "source_remark": self.benchmark.source_remark(self.resources.root),
            "rehearsed": self.rehearsed is not None,
            "source_models": {
                str(seed): {
                    "file": self._find_model(seed).name,
                    "weights_sha256": fingerprints.weights(self.model(seed)),
                }
                for seed in seeds
            },
        }

    def _find_model(self, seed: int) -> Path:
        data, recipe = self.resources.source(self.source).train, self.benchmark.sources[self.source]
        digest = recipe.digest(identify_data(data, self.benchmark.preprocess))
        return self.resources.home / "sources" / f"{recipe.network}-{digest}-{seed}.safetensors"


def open_benchmark(
    name: str,
    models: Path,
    root: Path | None,
    device: str,
    *,
    targets: Path | None = None,
    may_train: bool = False,
    rehearsed: Path | None = None,
    source_epochs: int | None = None,
) -> Given:
    """Open a benchmark whose source models and profiles lie in a folder, as `shiftmend bench run` leaves them.

    Args:
        name: Name of the benchmark.
        models: Folder with `sources` and `profiles`; a folder of such folders may be named, too.
        root: Folder of the data sets.
        device: Where to compute.
        targets: Folder that keeps shifted images, so that no later run makes them again.
        may_train: Whether source models that are missing are trained.
        rehearsed: Folder with rehearsed profiles.
        source_epochs: Epochs of that training, instead of those of the recipe. Such a model is another source model.
    """
    benchmark = find(name)
    if source_epochs is not None:
        shorter = {key: replace(recipe, epochs=source_epochs) for key, recipe in benchmark.sources.items()}
        benchmark = replace(benchmark, sources=shorter)
    places = (models / name / "bench", models / name, models / "bench")
    home = next((place for place in places if (place / "sources").is_dir()), models)
    kept = Cache(TARGETS_IN_MEMORY)
    load = benchmark.load_target

    def load_target(shift: str, given_root: Root) -> Target:
        if targets is None:
            return kept.get("target", shift, lambda: load(shift, given_root))
        return kept.get("target", shift, lambda: _read_target(name, shift, given_root, targets))

    opened = replace(benchmark, load_target=load_target)
    return Given(Resources(opened, home, root, resolve_device(device), data=Cache(4)), may_train, rehearsed)


def keep_targets(name: str, shifts: Sequence[str], root: Path | None, folder: Path, workers: int | None = None) -> None:
    """Make the shifted images of a benchmark at once, one process a shift, and keep them in a folder."""
    missing = [shift for shift in shifts if not _place_of(name, shift, root, folder).exists()]
    if missing:
        count = min(len(missing), workers or os.cpu_count() or 1)
        with ProcessPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for future in [pool.submit(_make_target, name, shift, root, folder) for shift in missing]:
                future.result()


def _make_target(name: str, shift: str, root: Path | None, folder: Path) -> None:
    target = find(name).load_target(shift, root)
    seen = _split(target.adapt)
    if target.score is not target.adapt:
        raise DataError(f"Expected {name} to score on what it adapts to, got other images for {shift}.")
    tensors = {"images": seen.images.contiguous(), "labels": labels_of(seen).contiguous()}
    facts = {"name": seen.name, "classes": json.dumps(list(seen.classes))}
    write_atomically(_place_of(name, shift, root, folder), safetensors.torch.save(tensors, facts))


def _read_target(name: str, shift: str, root: Root, folder: Path) -> Target:
    place = _place_of(name, shift, root, folder)
    if not place.exists():
        _make_target(name, shift, root, folder)
    with safetensors.safe_open(place, framework="pt") as file:
        facts = file.metadata()
        images, labels = file.get_tensor("images"), file.get_tensor("labels")
    seen = Split(images, labels, facts["name"], tuple(json.loads(facts["classes"])))
    return Target(seen, seen)


def _place_of(name: str, shift: str, root: Root, folder: Path) -> Path:
    return folder / f"{name}-{shift}-{find(name).origin(shift, root)}.safetensors"


def _split(images: Images) -> Split:
    if not isinstance(images, Split):
        raise DataError(f"Expected images in memory, got files: {images.name}.")
    return images


def labels_of(images: Images) -> Tensor:
    if images.labels is None:
        raise DataError(f"Expected a label for each image of {images.name}, got none.")
    return images.labels


@dataclass
class RowFile:
    """A JSON file of rows and of the manifests that they were measured under, written after each row.

    Attributes:
        path: The file; None keeps the rows in memory.
        key: Fields by which a row is known. A row that is there is not measured again.
        rows: Rows so far, those of earlier runs included.
        manifests: Manifests by their hash, which a row has as `manifest`.
    """

    path: Path | None
    key: tuple[str, ...]
    rows: list[dict[str, Any]] = field(default_factory=list)
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            content = json.loads(self.path.read_text())
            self.rows, self.manifests = content["rows"], content["manifests"]

    def has(self, *key: Any) -> bool:
        return self.find(*key) is not None

    def find(self, *key: Any) -> dict[str, Any] | None:
        """Return the row with this key, in the order of `self.key`; None if there is none."""
        return next((row for row in self.rows if tuple(row[name] for name in self.key) == key), None)

    def add(self, key: tuple[Any, ...], values: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
        """Add a row and write the file."""
        name = identify(manifest)
        self.manifests[name] = manifest
        row = dict(zip(self.key, key, strict=True)) | values | {"manifest": name}
        self.rows.append(row)
        if self.path is not None:
            lines = ",\n  ".join(json.dumps(each) for each in self.rows)
            known = json.dumps(self.manifests, indent=1)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, f'{{"manifests": {known},\n "rows": [\n  {lines}\n ]}}\n'.encode())
        return row


class Deadline:
    """The end of a time limit. A task begins only if one as long as the longest so far would still fit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, None if seconds is None else clock() + seconds
        self._begun = clock()
        self.longest = 0.0
        self.skipped = 0

    def allows(self) -> bool:
        """Return whether the next task may begin; call `done` when it has ended."""
        self.begin()
        fits = self._end is None or self._begun + self.longest <= self._end
        self.skipped += not fits
        return fits

    def begin(self) -> None:
        """Measure the length of the present task from now on."""
        self._begun = self._clock()

    def done(self) -> None:
        self.longest = max(self.longest, self._clock() - self._begun)


class TimeUp(Exception):
    """The time limit was over before a job could begin."""


class Workers(Executor):
    """Processes that share the device. None begins a job after the time limit.

    Jobs travel by value: tensors in shared memory would need more of it than a container has.
    """

    def __init__(self, count: int, minutes: float | None) -> None:
        self.end = math.inf if minutes is None else time.time() + 60 * minutes
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin_worker)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        return self._pool.submit(_call, pickle.dumps((function, arguments, options)), self.end)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def _begin_worker() -> None:
    torch.set_num_threads(1)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)


def _call(job: bytes, end: float) -> Any:
    if time.time() > end:
        raise TimeUp
    function, arguments, options = pickle.loads(job)
    return function(*arguments, **options)
