"""The resources that cells share: source models, profiles and data, each made or read once and cached."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shiftmend
from shiftmend.__about__ import __version__
from shiftmend.engine.checkpoint import identify, lock
from shiftmend.errors import DataError, ProfileError
from shiftmend.inputs.feed import Preprocess
from shiftmend.inputs.images import PathLike, Split
from shiftmend.methods import METHODS
from shiftmend.profiles import fingerprints
from shiftmend.profiles.collect import Gaussian
from shiftmend.profiles.presets import preset as find_preset
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench.benchmark import AUTO, USUAL_PRESET, Benchmark, Images, Rehearsed, Source, Target
from shiftmend.research.bench.recipes import Recipe, build_untrained
from shiftmend.research.bench.training import MAX_WORKERS, train
from shiftmend.research.datasets.partitions import halves
from shiftmend.research.datasets.streamed import ImageFiles
from shiftmend.stats.histograms import Bins
from shiftmend.utils.checks import kind
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import said_where, write_atomically
from shiftmend.utils.gpu_sharing import release_gpu

FORMAT = "shiftmend source model"

SOURCES_IN_MEMORY = 2
"""Number of source models that stay in memory, each with a profile for every preset: rows alternate with SHOT, which
has its own source model, and with rows of other presets."""

MAX_DECODED_BYTES = 6 << 30
"""Largest size of decoded images that stay in memory on a machine without a GPU."""

T = TypeVar("T")


class Resources:
    """A process's view of a benchmark. Models and profiles are files under `home`, shared by all processes."""

    def __init__(
        self,
        benchmark: Benchmark,
        home: Path,
        root: Path | None,
        device: str | torch.device,
        data: Cache | None = None,
        compile: bool = False,
    ) -> None:
        self.benchmark, self.home, self.root = benchmark, home, root
        self.device = resolve_device(device)
        self.compile = compile and self.device.type == "cuda"
        self._data = data or Cache(1)
        settings = [setting for table in benchmark.settings.values() for setting in table.values()]
        presets = {setting.preset for setting in settings}
        self._models, self._profiles = Cache(SOURCES_IN_MEMORY), Cache(SOURCES_IN_MEMORY * max(1, len(presets)))
        full = any(setting.method != AUTO and METHODS[setting.method].needs_covariance for setting in settings)
        self._gaussian: Gaussian = "full" if full else "marginal"

    def source(self, name: str) -> Source:
        """Load the data of a source model."""
        load = self.benchmark.load_source
        return self._data.get("source", name, lambda: _load(load, name, self.root, Source))

    def target(self, shift: str) -> Target:
        """Load the data of a shift. Images in memory are kept on the device."""
        load = self.benchmark.load_target
        # Reading files and regenerating shifts run on the CPU.
        with release_gpu():
            loaded = self._data.get("loaded", shift, lambda: _load(load, shift, self.root, Target))
        return self._data.get("target", shift, lambda: self._move_to_device(loaded))

    def model(self, source: str, seed: int, tick: Callable[[], None] | None = None) -> tuple[nn.Module, Path]:
        """Load a source model, or train and save it if there is no file of it yet.

        Args:
            source: Name of a source model of the benchmark.
            seed: Seed of the training.
            tick: Function that is called after every epoch of a training.

        Returns:
            The model on the device, and the path of its file.
        """

        def make() -> tuple[nn.Module, Path]:
            model, path = get_source_model(
                self.home,
                self.benchmark.sources[source],
                seed,
                self.source(source).train,
                self.benchmark.preprocess,
                device=self.device,
                tick=tick,
                root=self.root,
                compile=self.compile,
            )
            return model.to(self.device), path

        return self._models.get("model", (source, seed), make)

    def profile(self, source: str, seed: int, temperature: float, preset: str = USUAL_PRESET) -> Profile:
        """Load the profile of a source model, or compute and save it if there is no file of it yet."""
        key = (source, seed, temperature, preset)
        return self._profiles.get("profile", key, lambda: self._make_profile(*key))

    def _make_profile(self, source: str, seed: int, temperature: float, preset: str) -> Profile:
        model, path = self.model(source, seed)
        data = self.source(source).profiled
        profiled = identify_data(data, self.benchmark.preprocess)
        form = self._gaussian if preset == USUAL_PRESET else f"{preset}-{self._gaussian}"
        file = self.home / "profiles" / f"{path.stem}-{temperature:g}-{form}-{identify(profiled)}.safetensors"
        found = _read_profile(file, model)
        if found is not None:
            return found
        if isinstance(data, ImageFiles):
            data = decode(data, self._max_decoded_bytes())
        bins = find_preset(preset).bins
        made = shiftmend.profile(
            model,
            inputs_of(data),
            preset=preset,
            bins=Bins(bins.count, bins.layout, temperature),
            gaussian=self._gaussian,
            preprocess=self.benchmark.preprocess,
            batch_size=512,
            device=self.device,
            progress=False,
        )
        made.save(file)
        return made

    def rehearsed(self, source: str, seed: int, protocol: Rehearsed, preset: str = USUAL_PRESET) -> Profile:
        """Load the rehearsed profile of a source model, or rehearse and save it if there is no file of it yet."""
        key = (source, seed, protocol, preset)
        return self._profiles.get("rehearsed", key, lambda: self._rehearse(*key))

    def _rehearse(self, source: str, seed: int, protocol: Rehearsed, preset: str) -> Profile:
        profile = self.profile(source, seed, protocol.temperature, preset)
        model, path = self.model(source, seed)
        test = self.source(source).test
        if not isinstance(test, Split) or test.labels is None:
            raise DataError(f"Expected labelled images in memory to rehearse with, got {test.name}.")
        facts: dict[str, Any] = {
            "data": identify_data(test, self.benchmark.preprocess),
            "weights": profile.weights,
            "preset": preset,
        }
        facts |= {"protocol": protocol.facts(), "bfloat16": protocol.in_bfloat16(self.device)}
        file = self.home / "profiles" / f"{path.stem}-rehearsed-{identify(facts)}.safetensors"
        found = _read_profile(file, model)
        if found is not None and found.rehearsal is not None:
            return found
        home, _ = halves(test.labels)
        checkpoint = file.with_suffix(".json")
        with lock(checkpoint) as alone:
            made = shiftmend.rehearse(
                model,
                (test.images[home], test.labels[home]),
                profile,
                candidates=protocol.candidates,
                shifts=protocol.simulated_shifts,
                batch_size=protocol.batch_size,
                preprocess=self.benchmark.preprocess,
                device=self.device,
                autocast=protocol.in_bfloat16(self.device),
                seed=seed,
                checkpoint=checkpoint if alone else None,
                progress=False,
            )
        made.save(file)
        checkpoint.unlink(missing_ok=True)
        return made

    def _move_to_device(self, target: Target) -> Target:
        moved: dict[int, Images] = {}

        def move(images: Images) -> Images:
            if id(images) not in moved:
                kept = decode(images, self._max_decoded_bytes()) if isinstance(images, ImageFiles) else images
                if isinstance(kept, Split):
                    kept = Split(kept.images.to(self.device), kept.labels, kept.name, kept.classes)
                moved[id(images)] = kept
            return moved[id(images)]

        clean = None if target.clean is None else move(target.clean)
        return Target(move(target.adapt), move(target.score), clean)

    def _max_decoded_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(0.3 * torch.cuda.mem_get_info(self.device)[0])
        return MAX_DECODED_BYTES


class Cache:
    """A cache of the last few values of each kind. Threads may share it, and no value is made twice."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: dict[str, dict[Hashable, Any]] = {}
        self._making: dict[tuple[str, Hashable], threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached value of a key, or call `make` and cache its result.

        A full cache first drops the least recently used values of this kind.
        """
        with self._lock:
            making = self._making.setdefault((kind, key), threading.Lock())
        with making:
            with self._lock:
                kept = self._kept.setdefault(kind, {})
                if key in kept:
                    # The latest value is last.
                    kept[key] = kept.pop(key)
                    found: T = kept[key]
                    return found
                # Old values are dropped before the new one is made, because there may not be room for both.
                while len(kept) >= self.size:
                    del kept[next(iter(kept))]
            made = make()
            with self._lock:
                kept[key] = made
            return made


def get_source_model(
    home: Path,
    recipe: Recipe,
    seed: int,
    data: Split | ImageFiles,
    preprocess: Preprocess,
    *,
    device: str | torch.device = "auto",
    tick: Callable[[], None] | None = None,
    root: PathLike | None = None,
    compile: bool = False,
) -> tuple[nn.Module, Path]:
    """Load a source model from its file in `home/sources`, or train and save it if there is no such file.

    `device`, `tick`, `root` and `compile` are the arguments of `train`. A killed training resumes at the next call. If
    two processes train the same model at once, both use the file of the one that finishes first; the first to start
    owns the checkpoint.
    """
    digest = recipe.digest(identify_data(data, preprocess))
    probe = preprocess(data.images[:2]) if isinstance(data, Split) else None
    path = home / "sources" / f"{recipe.network}-{digest}-{seed}.safetensors"
    if not path.exists():
        checkpoint = path.with_suffix(".checkpoint")
        with lock(checkpoint) as alone:
            model = train(
                recipe,
                data,
                preprocess,
                seed=seed,
                device=device,
                tick=tick,
                checkpoint=checkpoint if alone else None,
                root=root,
                compile=compile,
            )
        if not path.exists():
            facts = {"digest": digest, "recipe": json.dumps(recipe.facts()), "data": data.name}
            _write_model(path, model, facts | _answer_probe(model, probe), seed)
        checkpoint.unlink(missing_ok=True)
    # The file is read back even if just written, so that every caller gets the stored model.
    return _read_model(path, recipe, digest, seed, probe), path


def identify_data(data: Split | ImageFiles, preprocess: Preprocess) -> dict[str, Any]:
    """List the facts that identify these data and the inputs made from them.

    Image files are identified by name, number and labels only, because reading them all would take as long as an epoch.
    """
    facts = {
        "data": data.name,
        "number": len(data),
        "labels": None if data.labels is None else fingerprints.digest(data.labels),
    }
    if isinstance(data, Split):
        facts["images"] = fingerprints.digest(data.images)
        shape = tuple(data.images.shape[1:])
    else:
        shape = (3, *(data.size or (8, 8)))
    return facts | {"preprocess": probe_preprocess(preprocess, shape)}


def probe_preprocess(preprocess: Preprocess, shape: tuple[int, ...]) -> list[Any]:
    """Preprocess a black and a white image; the result changes with the normalisation or layout."""
    black = torch.zeros(shape, dtype=torch.uint8)
    seen: Any = preprocess(torch.stack([black, black + 255]))
    if not isinstance(seen, Tensor) or seen.ndim < 2 or len(seen) != 2:
        given = list(seen.shape) if isinstance(seen, Tensor) else kind(seen)
        raise DataError(f"Expected preprocess to turn two images into a tensor of two inputs, got {given}.")
    levels = seen.double().reshape(*seen.shape[:2], -1).mean(2)
    return [list(seen.shape[1:]), str(seen.dtype), [[round(level, 4) for level in row] for row in levels.tolist()]]


def decode(images: ImageFiles, max_bytes: int, workers: int | None = None) -> Images:
    """Decode image files into memory once, instead of in every epoch, if all have one size and fit into `max_bytes`."""
    if (
        images.size is None
        or images.transform is not None
        or len(images) * 3 * images.size[0] * images.size[1] > max_bytes
    ):
        return images
    count = min(MAX_WORKERS, os.cpu_count() or 1) if workers is None else workers
    decoded = torch.empty(len(images), 3, *images.size, dtype=torch.uint8)
    for batch, _, index in DataLoader(images, batch_size=256, num_workers=count if len(images) > 2000 else 0):
        decoded[index] = batch
    return Split(decoded, images.labels, images.name, images.classes)


def inputs_of(images: Images) -> Any:
    """Return images in the form that `profile`, `adapt` and `stream` take."""
    return images.images if isinstance(images, Split) else images


def first_inputs(images: Images, count: int) -> Tensor:
    """Return the first images as one tensor `[count, C, H, W]`; only these files are decoded."""
    if isinstance(images, Split):
        return images.images[:count]
    return torch.stack([images[index][0] for index in range(min(count, len(images)))])


def labelled(images: Images) -> Any:
    """Return images and labels in the form that `evaluate` takes."""
    return (images.images, images.labels) if isinstance(images, Split) else images


def _load(load: Callable[[str, Path | None], T], name: str, root: Path | None, form: type[T]) -> T:
    given: Any = load(name, root)
    if not isinstance(given, form):
        raise DataError(f"Expected the benchmark to load {name!r} as a {form.__name__}, got {kind(given)}.")
    return given


def _read_profile(file: Path, model: nn.Module) -> Profile | None:
    """Read the profile in the file if it belongs to this model; a bad file is made again.

    A lost source model that was trained again on a GPU has slightly different weights under the same name.
    """
    if not file.exists():
        return None
    try:
        found = Profile.load(file)
    except ProfileError:
        return None
    return found if found.weights == fingerprints.weights(model) else None


def _write_model(path: Path, model: nn.Module, facts: dict[str, str], seed: int) -> None:
    metadata = facts | {
        "format": FORMAT,
        "seed": str(seed),
        "weights": fingerprints.weights(model),
        "shiftmend": __version__,
        "torch": str(torch.__version__),
    }
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    with said_where(path):
        write_atomically(path, safetensors.torch.save(tensors, metadata))


def _read_model(path: Path, recipe: Recipe, digest: str, seed: int, probe: Tensor | None) -> nn.Module:
    model = build_untrained(recipe)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        model.load_state_dict(state)
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise _refuse_model(path, "it cannot be read") from error
    if (metadata.get("format"), metadata.get("digest"), metadata.get("seed")) != (FORMAT, digest, str(seed)):
        raise _refuse_model(path, "it was written for something else")
    if metadata.get("weights") != fingerprints.weights(model):
        raise _refuse_model(path, "its weights have changed")
    if "answers" in metadata and not _agree(metadata["answers"], _answer_probe(model, probe).get("answers")):
        raise _refuse_model(path, "the code of its network has changed")
    return model.eval()


@torch.no_grad()
def _answer_probe(model: nn.Module, probe: Tensor | None) -> dict[str, str]:
    """Return the model's logits for two images, which reveal a change of its code."""
    return {} if probe is None else {"answers": json.dumps(model.eval()(probe).flatten().tolist())}


def _agree(answers: str, others: str | None) -> bool:
    """Compare logits up to rounding differences between machines."""
    first, second = (torch.tensor(json.loads(text or "[]")) for text in (answers, others))
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-2, atol=1e-2, equal_nan=True)


def _refuse_model(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged or foreign ({reason}). Delete it to train the source model again.")
