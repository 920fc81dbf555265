"""Where cells get what they need: source models, profiles and data, each made or read once and kept for a while."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shiftmend
from shiftmend.__about__ import __version__
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.errors import DataError, ProfileError
from shiftmend.inputs.feed import Preprocess
from shiftmend.inputs.images import PathLike, Split
from shiftmend.profiles import fingerprints
from shiftmend.profiles.collect import Gaussian
from shiftmend.profiles.presets import preset as find_preset
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench.benchmark import USUAL_PRESET, Benchmark, Images, Source, Target
from shiftmend.research.bench.recipes import Recipe, untrained
from shiftmend.research.bench.training import train
from shiftmend.research.datasets.streamed import ImageFiles
from shiftmend.stats.histograms import Bins
from shiftmend.utils.checks import kind
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import said_where, write_atomically
from shiftmend.utils.gpu_sharing import others_may_go

FORMAT = "shiftmend source model"


def obtain(
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
    """The source model of this recipe, seed and data, and its file under `home/sources`; trained if there is none yet.

    `device`, `tick`, `root` and `compile` are those of `train`. A training that was killed goes on at the next call. Of
    two processes that train the same model at once, both end up with the file of the one that finished first; the
    first to begin has the checkpoint.
    """
    digest = recipe.digest(identity(data, preprocess))
    probe = preprocess(data.images[:2]) if isinstance(data, Split) else None
    path = home / "sources" / f"{recipe.network}-{digest}-{seed}.safetensors"
    if not path.exists():
        checkpoint = path.with_suffix(".checkpoint")
        with checkpoints.lock(checkpoint) as alone:
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
            _write(path, model, facts | _answers(model, probe), seed)
        checkpoint.unlink(missing_ok=True)
    # Read back even when just written: whoever asks, now or later, gets the model that is on the disk.
    return _read(path, recipe, digest, seed, probe), path


def identity(data: Split | ImageFiles, preprocess: Preprocess) -> dict[str, Any]:
    """What tells these data, and the inputs they become, from others.

    Image files are known by name, number and labels alone: to read them all would take as long as an epoch.
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
    return facts | {"preprocess": _response(preprocess, shape)}


def _response(preprocess: Preprocess, shape: tuple[int, ...]) -> list[Any]:
    """What becomes of a black and of a white image: another normalisation or layout shows here, a new name does not."""
    black = torch.zeros(shape, dtype=torch.uint8)
    seen: Any = preprocess(torch.stack([black, black + 255]))
    if not isinstance(seen, Tensor) or seen.ndim < 2 or len(seen) != 2:
        given = list(seen.shape) if isinstance(seen, Tensor) else kind(seen)
        raise DataError(f"preprocess gave {given} for two images, expected a tensor of two inputs")
    levels = seen.double().reshape(*seen.shape[:2], -1).mean(2)
    return [list(seen.shape[1:]), str(seen.dtype), [[round(level, 4) for level in row] for row in levels.tolist()]]


def _write(path: Path, model: nn.Module, facts: dict[str, str], seed: int) -> None:
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


@torch.no_grad()
def _answers(model: nn.Module, probe: Tensor | None) -> dict[str, str]:
    """What the model makes of two images: the same weights in other code would give something else."""
    return {} if probe is None else {"answers": json.dumps(model.eval()(probe).flatten().tolist())}


def _alike(answers: str, others: str | None) -> bool:
    """But for what two machines round differently."""
    first, second = (torch.tensor(json.loads(text or "[]")) for text in (answers, others))
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-2, atol=1e-2, equal_nan=True)


def _read(path: Path, recipe: Recipe, digest: str, seed: int, probe: Tensor | None) -> nn.Module:
    model = untrained(recipe)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        model.load_state_dict(state)
        json.loads(metadata.get("answers", "[]"))
    except (safetensors.SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise _unfit(path, "it cannot be read") from error
    if (metadata.get("format"), metadata.get("digest"), metadata.get("seed")) != (FORMAT, digest, str(seed)):
        raise _unfit(path, "it was written for something else")
    if metadata.get("weights") != fingerprints.weights(model):
        raise _unfit(path, "its weights have changed")
    if "answers" in metadata and not _alike(metadata["answers"], _answers(model, probe).get("answers")):
        raise _unfit(path, "the code of its network has changed")
    return model.eval()


def _unfit(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is damaged or foreign ({reason}); expected the source model that its name promises: delete it to "
        "train again"
    )


T = TypeVar("T")


SOURCES_AT_ONCE = 2
"""Source models that stay in memory, each with a profile for every preset: methods take turns with SHOT, which has its
own, and rows of one preset with those of another."""


class Workshop:
    """One process's view of a benchmark. Models and profiles are files under `home`, found again by any process."""

    def __init__(
        self,
        benchmark: Benchmark,
        home: Path,
        root: Path | None,
        device: str | torch.device,
        data: Shelf | None = None,
        compile: bool = False,
    ) -> None:
        self.benchmark, self.home, self.root = benchmark, home, root
        self.device = resolve_device(device)
        self.compile = compile and self.device.type == "cuda"
        self._data = data or Shelf(1)
        settings = [setting for table in benchmark.settings.values() for setting in table.values()]
        presets = {setting.preset for setting in settings}
        self._models, self._profiles = Shelf(SOURCES_AT_ONCE), Shelf(SOURCES_AT_ONCE * max(1, len(presets)))
        full = any(setting.method == "full-gauss" for setting in settings)
        self._gaussian: Gaussian = "full" if full else "marginal"

    def source(self, name: str) -> Source:
        return self._data.keep("source", name, lambda: _loaded(self.benchmark.load_source, name, self.root, Source))

    def target(self, shift: str) -> Target:
        """The data of a shift; images in memory lie on the device, so that no epoch has to bring them there."""
        with others_may_go():  # reading files and making shifts again is work for the CPU alone
            load = self.benchmark.load_target
            loaded = self._data.keep("loaded", shift, lambda: _loaded(load, shift, self.root, Target))
        return self._data.keep("target", shift, lambda: self._on_device(loaded))

    def model(self, source: str, seed: int, tick: Callable[[], None] | None = None) -> tuple[nn.Module, Path]:
        """The source model of a recipe, trained if there is none yet, on the device."""

        def trained() -> tuple[nn.Module, Path]:
            model, path = obtain(
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

        return self._models.keep("model", (source, seed), trained)

    def profile(self, source: str, seed: int, temperature: float, preset: str = USUAL_PRESET) -> Profile:
        """The source model's profile, made if there is none yet."""
        key = (source, seed, temperature, preset)
        return self._profiles.keep("profile", key, lambda: self._profile(*key))

    def _profile(self, source: str, seed: int, temperature: float, preset: str) -> Profile:
        model, path = self.model(source, seed)
        data = self.source(source).profiled
        profiled = identity(data, self.benchmark.preprocess)
        form = self._gaussian if preset == USUAL_PRESET else f"{preset}-{self._gaussian}"
        name = f"{path.stem}-{temperature:g}-{form}-{checkpoints.identify(profiled)}.safetensors"
        file = self.home / "profiles" / name
        found = _usable(file, model)
        if found is not None:
            return found
        if isinstance(data, ImageFiles):
            data = in_memory(data, self._room())
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

    def _on_device(self, target: Target) -> Target:
        moved: dict[int, Images] = {}

        def move(images: Images | None) -> Images | None:
            if images is None:
                return None
            if id(images) not in moved:
                kept = in_memory(images, self._room()) if isinstance(images, ImageFiles) else images
                if isinstance(kept, Split):
                    kept = Split(kept.images.to(self.device), kept.labels, kept.name, kept.classes)
                moved[id(images)] = kept
            return moved[id(images)]

        adapt, score = move(target.adapt), move(target.score)
        assert adapt is not None and score is not None  # noqa: PT018
        return Target(adapt, score, move(target.clean))

    def _room(self) -> int:
        """Bytes of decoded images that may stay in memory."""
        if self.device.type == "cuda":
            return int(0.3 * torch.cuda.mem_get_info(self.device)[0])
        return 6 << 30


class Shelf:
    """The last few things of each kind stay on it; several threads may share one, and none makes a thing twice."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[str, dict[Hashable, Any]] = {}
        self._making: dict[tuple[str, Hashable], threading.Lock] = {}
        self._lock = threading.Lock()

    def keep(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            making = self._making.setdefault((what, key), threading.Lock())
        with making:
            with self._lock:
                kept = self._kept.setdefault(what, {})
                if key in kept:
                    kept[key] = kept.pop(key)  # the latest stands last
                    found: T = kept[key]
                    return found
                while len(kept) >= self.most:  # before the new one is made: there may not be room for both
                    del kept[next(iter(kept))]
            made = make()
            with self._lock:
                kept[key] = made
            return made


def _loaded(load: Callable[[str, Path | None], T], name: str, root: Path | None, form: type[T]) -> T:
    """What a benchmark's function gives, which may be anybody's own."""
    given: Any = load(name, root)
    if not isinstance(given, form):
        raise DataError(f"the benchmark gave {kind(given)} for {name!r}, expected a {form.__name__} of Splits")
    for field in fields(given):  # type: ignore[arg-type]
        images = getattr(given, field.name)
        if not isinstance(images, Split | ImageFiles) and not (images is None and field.name == "clean"):
            raise DataError(
                f"`{field.name}` of the {form.__name__} for {name!r} is {kind(images)}, expected a Split: "
                "Split(images, labels, name)"
            )
    return given


def _usable(file: Path, model: nn.Module) -> Profile | None:
    """The profile in the file, if it is one of this very model; a bad one is quickly made again.

    A source model that was lost and trained again on a GPU has slightly other weights under the same name.
    """
    if not file.exists():
        return None
    try:
        found = Profile.load(file)
    except ProfileError:
        return None
    return found if found.weights == fingerprints.weights(model) else None


def in_memory(images: ImageFiles, limit: int, workers: int | None = None) -> Images:
    """The files decoded once, if they are all of one size and fit; decoding them in every epoch takes far longer."""
    if images.size is None or images.transform is not None or len(images) * 3 * images.size[0] * images.size[1] > limit:
        return images
    count = min(8, os.cpu_count() or 1) if workers is None else workers
    decoded = torch.empty(len(images), 3, *images.size, dtype=torch.uint8)
    for batch, _, index in DataLoader(images, batch_size=256, num_workers=count if len(images) > 2000 else 0):
        decoded[index] = batch
    return Split(decoded, images.labels, images.name, images.classes)


def inputs_of(images: Images) -> Any:
    """What `profile`, `adapt` and `stream` take."""
    return images.images if isinstance(images, Split) else images


def labelled(images: Images) -> Any:
    """What `evaluate` takes."""
    return (images.images, images.labels) if isinstance(images, Split) else images
