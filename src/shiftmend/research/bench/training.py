"""Training of source models by a recipe.

All random numbers come from the seed: two trainings on one CPU end bitwise equal. On a GPU, some cuDNN kernels add in
no fixed order, and two trainings end with slightly different weights.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import safetensors.torch
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader

from shiftmend.accelerate.compile import capture_compiled
from shiftmend.accelerate.cuda_graphs import CapturedEpoch, Sums, capture_epoch
from shiftmend.accelerate.precision import cast_at_once, nothing_cached
from shiftmend.engine.checkpoint import check_place, load, restore_optimiser, save
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.inputs.feed import Preprocess
from shiftmend.inputs.images import PathLike, Split
from shiftmend.introspection.model_state import named_tensors, restore
from shiftmend.introspection.validate import check_model
from shiftmend.research.bench.recipes import AUGMENTATIONS, Recipe, build_untrained, learning_rate_at
from shiftmend.research.datasets.files import data_root
from shiftmend.research.datasets.streamed import ImageFiles
from shiftmend.utils.devices import preferred_memory_format, resolve_device, send, supports_async_copies
from shiftmend.utils.rng import DeviceGenerator

SECONDS_BETWEEN_CHECKPOINTS = 30.0
MAX_WORKERS = 8

logger = logging.getLogger(__name__)


@torch.inference_mode(False)
@torch.enable_grad()
@nothing_cached()
def train(
    recipe: Recipe,
    images: Split | ImageFiles,
    preprocess: Preprocess,
    *,
    seed: int,
    device: str | torch.device = "auto",
    tick: Callable[[], None] | None = None,
    workers: int | None = None,
    checkpoint: Path | None = None,
    root: PathLike | None = None,
    compile: bool = False,
) -> nn.Module:
    """Train a source model and return it in eval mode, on the CPU.

    The incomplete last batch of an epoch is left out.

    Args:
        recipe: The network and its training.
        images: A `Split`, which is kept on the device as 8-bit images and augmented and preprocessed there; or
            `ImageFiles`, which `workers` processes decode.
        preprocess: Function from a batch of images to inputs.
        seed: Seed of all random numbers.
        device: The device to train on.
        tick: Function that is called after every epoch.
        workers: Number of processes that decode files; by default one per core, at most 8.
        checkpoint: Path of a checkpoint, from which a killed training resumes.
        root: The data folder, for `recipe.pretrained`.
        compile: Whether to compile the steps that are captured on a GPU.
    """
    if images.labels is None:
        raise DataError(f"Expected a label for each image of {images.name} to train on, got none.")
    size = min(recipe.batch_size, len(images))
    if size < 2:
        raise DataError(f"Expected at least two images in {images.name} to train on, got {len(images)}.")
    place = resolve_device(device)
    model = build_untrained(recipe, seed)
    if recipe.pretrained is not None:
        load_pretrained(model, recipe.network, recipe.pretrained, root)
    # On a GPU, ResNets are faster with this layout, and small networks no slower.
    model = model.to(place, memory_format=preferred_memory_format(place))  # type: ignore[call-overload]
    learner, advance = _Learner(recipe, model, images, preprocess, place), tick or (lambda: None)
    run = recipe.digest({"seed": seed, "data": images.name, "number": len(images)})
    done = _resume(checkpoint, run, model, learner.optimiser) if checkpoint is not None else 0
    for _ in range(done):
        advance()
    written = time.monotonic()
    rng = DeviceGenerator(place)
    batches, captured = make_batches(images, size, place, rng.generator, workers), None
    if isinstance(images, Split):
        check_model(model, [preprocess(images.images[:2].to(place))], tapped=False)
    model.train()
    if isinstance(batches, ResidentBatches) and _can_be_captured(recipe, place):
        with rng.as_default():
            captured = learner.capture(batches, compile)
    with rng.as_default() if captured is None else nullcontext():
        for epoch in range(done, recipe.epochs):
            # Each epoch has its own seed, so a checkpoint between two epochs needs no RNG state.
            rng.seed(seed * 1_000_003 + epoch + 1)
            if captured is not None and isinstance(batches, ResidentBatches):
                learner.set_rate(epoch * captured.steps, captured.steps)
                total = captured.run(batches.order())[0]["loss"]
            else:
                total = learner.epoch(epoch, batches(), len(images) // size, rng.generator)
            if not _is_finite(total, model):
                raise ShiftmendError(
                    f"Training {recipe.network} on {images.name} with seed {seed} diverged in epoch {epoch + 1}: NaN "
                    f"or infinity. Lower the learning rate ({recipe.learning_rate:g})."
                )
            if checkpoint is not None and time.monotonic() - written >= SECONDS_BETWEEN_CHECKPOINTS:
                _save(checkpoint, run, epoch + 1, model, learner.optimiser)
                written = time.monotonic()
            advance()
    learner.optimiser.zero_grad(set_to_none=True)
    trained: nn.Module = model.eval().to("cpu", memory_format=torch.contiguous_format)
    return trained


class _Learner:
    """A network with its optimiser and its training step."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        images: Split | ImageFiles,
        preprocess: Preprocess,
        device: torch.device,
    ) -> None:
        assert images.labels is not None
        self.recipe, self.model, self.preprocess, self.device = recipe, model, preprocess, device
        self.name, self.highest_label = images.name, int(images.labels.max())
        self.augment = AUGMENTATIONS[recipe.augmentation]
        self.bf16 = recipe.autocast and device.type == "cuda"
        # A captured step reads its rate from memory.
        rate = torch.tensor(recipe.learning_rate, device=device) if device.type == "cuda" else recipe.learning_rate
        self.optimiser = SGD(
            model.parameters(),
            lr=rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
            fused=device.type == "cuda" or None,
        )

    def set_rate(self, step: int, steps_per_epoch: int) -> None:
        """Set the learning rate of a step, counted over all epochs."""
        group, value = self.optimiser.param_groups[0], learning_rate_at(self.recipe, step, steps_per_epoch)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value

    def epoch(self, number: int, batches: Iterable[tuple[Tensor, Tensor]], steps: int, generator: Generator) -> Tensor:
        """Train on one batch after the other and return the sum of their losses."""
        total = torch.zeros((), device=self.device)
        for step, (batch, labels) in enumerate(batches):
            self.set_rate(number * steps + step, steps)
            total += self.step(batch, labels, generator)
        return total

    def capture(self, batches: ResidentBatches, compile: bool) -> CapturedEpoch | None:
        """Capture the steps of an epoch, compiled first if `compile` asks for it and it works."""
        generator, model, optimiser = batches.generator, self.model, self.optimiser

        def step(index: Tensor) -> Sums:
            return {"loss": self.step(*batches.at(index), generator)}

        def capture(compiled: bool = False) -> CapturedEpoch | None:
            number, size = len(batches.images), batches.size
            return capture_epoch(step, model, optimiser, self.device, number, size, compiled=compiled)

        quick = capture_compiled(capture, model, optimiser, True, self.recipe.network) if compile else None
        return quick or capture()

    def step(self, batch: Tensor, labels: Tensor, generator: Generator) -> Tensor:
        ready = self.preprocess(self.augment(batch, generator))
        ready = ready.contiguous(memory_format=preferred_memory_format(ready.device)) if ready.ndim == 4 else ready
        with cast_at_once(self.model, self.device, torch.bfloat16) if self.bf16 else nullcontext():
            logits: Tensor = self.model(ready)
        logits = logits.float() if self.bf16 else logits
        # A GPU would report a label beyond the last output as an unreadable crash.
        if logits.shape[1] <= self.highest_label:
            raise DataError(
                f"Expected {self.recipe.network} to have {self.highest_label + 1} outputs or more for {self.name}, got "
                f"{logits.shape[1]}. Set `classes` among the options of the recipe."
            )
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        return loss.detach()


Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


def make_batches(
    images: Split | ImageFiles, size: int, device: torch.device, generator: Generator, workers: int | None
) -> Batches:
    """Make a function that returns the full batches of an epoch, in a new random order at each call."""
    if isinstance(images, Split):
        return ResidentBatches(images, size, device, generator)
    processes = min(MAX_WORKERS, os.cpu_count() or 1) if workers is None else workers

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        # The workers, too, are seeded from `order`, and are new in every epoch: old ones would go on with old states.
        seed = torch.randint(1 << 62, (), generator=generator, device=generator.device)
        order = Generator().manual_seed(int(seed))
        loader = DataLoader(
            images,
            size,
            shuffle=True,
            drop_last=True,
            generator=order,
            num_workers=processes,
            pin_memory=supports_async_copies(device),
        )
        for batch, labels, _ in loader:
            yield send(batch, device), send(labels, device)

    return stream


class ResidentBatches:
    """Batches of images that lie on the device."""

    def __init__(self, images: Split, size: int, device: torch.device, generator: Generator) -> None:
        assert images.labels is not None
        self.images, self.labels = images.images.to(device), images.labels.to(device)
        self.size, self.device, self.generator = size, device, generator

    def order(self) -> Tensor:
        """Draw a random order of all samples."""
        return torch.randperm(len(self.images), generator=self.generator, device=self.generator.device).to(self.device)

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.order()
        for index in order[: len(order) // self.size * self.size].split(self.size):
            yield self.at(index)


def load_pretrained(model: nn.Module, network: str, file: str, root: PathLike | None) -> None:
    """Load everything except the head from a safetensors file, which must be complete.

    Args:
        model: The network to load into.
        network: The network's name, for messages.
        file: The file; a relative path starts in the data folder.
        root: The data folder.
    """
    named = Path(file).expanduser()
    path = named if named.is_absolute() else data_root(root) / named
    if not path.is_file():
        raise DataError(
            f"Expected the weights that {network} starts from, got {path}, which is missing. Put a safetensors file "
            "there, or use pretrained=None."
        )
    try:
        found = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(
            f"Expected a safetensors file, got {path}, which cannot be read ({error}). Replace it."
        ) from error
    taps: Mapping[str, str] = model.shiftmend_taps  # type: ignore[assignment]
    head = taps["logits"].partition(":")[0]
    wanted = {
        name: value
        for name, value in model.state_dict().items()
        # Old files lack the number of batches, and nothing here reads it.
        if not name.startswith(f"{head}.") and not name.endswith("num_batches_tracked")
    }
    for name, value in wanted.items():
        if name not in found or found[name].shape != value.shape:
            other = list(found[name].shape) if name in found else "nothing"
            raise DataError(
                f"Expected {name} of shape {list(value.shape)} in {path}, as {network} has it, got {other}. Get "
                "weights of this very network."
            )
    model.load_state_dict({name: found[name] for name in wanted}, strict=False)


def _can_be_captured(recipe: Recipe, device: torch.device) -> bool:
    """Tell whether a step can be a CUDA graph, which cannot change its rate in each step as `inverse` does."""
    return device.type == "cuda" and recipe.schedule == "cosine"


def _is_finite(total: Tensor, model: nn.Module) -> bool:
    """Check the sum of the losses, and the weights, which the last step may have changed."""
    weights = [value for value in model.state_dict().values() if value.is_floating_point()]
    return bool(torch.stack([value.isfinite().all() for value in (total, *weights)]).all())


def _resume(path: Path, run: str, model: nn.Module, optimiser: SGD) -> int:
    """Restore the state in the checkpoint, if there is one, and return the number of finished epochs."""
    check_place(path)
    kept = load(path, run)
    if kept is None:
        return 0
    saved, own = ({name: value.shape for name, value in state.items()} for state in (kept.model, named_tensors(model)))
    if saved != own:
        raise ShiftmendError(
            f"Expected a checkpoint of this network, got {path}, which has other layers. Delete it to start over."
        )
    restore(model, kept.model)
    restore_optimiser(optimiser, model, kept.optimiser)
    logger.info("resuming from %s after epoch %d", path, kept.epoch)
    return kept.epoch


def _save(path: Path, run: str, epoch: int, model: nn.Module, optimiser: SGD) -> None:
    try:
        save(path, run, 0, epoch, [], model, optimiser)
    except OSError as error:
        # A full disk must not end the training.
        logger.warning("the checkpoint %s could not be written (%s); training continues", path, error.strerror)
