"""Source models: the training that follows a recipe.

Everything random comes from the seed: two trainings on one CPU end with the same bits. On a GPU some of cuDNN's kernels
add in no fixed order, and two trainings end with slightly different weights.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader

from shiftmend.accelerate.compile import capture_compiled
from shiftmend.accelerate.cuda_graphs import CapturedEpoch, Sums, capture_epoch
from shiftmend.accelerate.precision import cast_at_once, nothing_cached
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.inputs.feed import Preprocess
from shiftmend.inputs.images import PathLike, Split
from shiftmend.introspection.model_state import held, put_back
from shiftmend.introspection.validate import check_takes
from shiftmend.research.bench.recipes import AUGMENTATIONS, Recipe, rate, untrained
from shiftmend.research.datasets.base import data_root
from shiftmend.research.datasets.streamed import ImageFiles
from shiftmend.utils.checks import kind
from shiftmend.utils.devices import in_background, layout_on, resolve_device, sent
from shiftmend.utils.rng import Dice


def load_pretrained(model: nn.Module, network: str, file: str, root: PathLike | None) -> None:
    """Take everything but the head from a file, which has to have all of it.

    `network` is the model's name, for messages. A relative path starts in the data folder, which `root` may name.
    """
    named = Path(file).expanduser()
    path = named if named.is_absolute() else data_root(root) / named
    if not path.is_file():
        raise DataError(
            f"{path} is missing: expected the weights that {network} starts from, as a safetensors file; put it "
            "there by hand, or train from scratch with pretrained=None"
        )
    try:
        found = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path} is no readable safetensors file ({error}); replace it") from error
    taps: Mapping[str, str] = model.shiftmend_taps  # type: ignore[assignment]
    head = taps["logits"].partition(":")[0]
    wanted = {
        name: value
        for name, value in model.state_dict().items()
        # how many batches there were is absent from old files, and nothing here reads it
        if not name.startswith(f"{head}.") and not name.endswith("num_batches_tracked")
    }
    for name, value in wanted.items():
        if name not in found or found[name].shape != value.shape:
            other = list(found[name].shape) if name in found else "nothing"
            raise DataError(
                f"{path} does not fit {network}: expected {name} of shape {list(value.shape)}, found {other}; "
                "get weights of this very network"
            )
    model.load_state_dict({name: found[name] for name in wanted}, strict=False)


MOST_WORKERS = 8


Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


def batches_of(
    images: Split | ImageFiles, size: int, device: torch.device, generator: Generator, workers: int | None
) -> Batches:
    """What gives the full batches of an epoch, in a new random order each time it is called."""
    if isinstance(images, ImageFiles):
        files = images
        processes = min(MOST_WORKERS, os.cpu_count() or 1) if workers is None else workers

        def streamed() -> Iterator[tuple[Tensor, Tensor]]:
            # The workers, too, are seeded from it, and are new in every epoch: old ones would go on with old states.
            seed = torch.randint(1 << 62, (), generator=generator, device=generator.device)
            order = Generator().manual_seed(int(seed))
            loader = DataLoader(
                files,
                size,
                shuffle=True,
                drop_last=True,
                generator=order,
                num_workers=processes,
                pin_memory=in_background(device),
            )
            for batch, labels, _ in loader:
                yield sent(batch, device), sent(labels, device)

        return streamed
    return ResidentBatches(images, size, device, generator)


class ResidentBatches:
    """Batches of images that lie on the device."""

    def __init__(self, images: Split, size: int, device: torch.device, generator: Generator) -> None:
        assert images.labels is not None
        self.images, self.labels = images.images.to(device), images.labels.to(device)
        self.size, self.device, self.generator = size, device, generator

    def order(self) -> Tensor:
        """A new random order of all samples."""
        return torch.randperm(len(self.images), generator=self.generator, device=self.generator.device).to(self.device)

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.order()
        for index in order[: len(order) // self.size * self.size].split(self.size):
            yield self.at(index)


logger = logging.getLogger(__name__)


SECONDS_BETWEEN_CHECKPOINTS = 30.0


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
    """Train a source model; it comes back in eval mode, on the CPU.

    A `Split` lies on the device as it is, 8-bit, and batches are cut, augmented and given to `preprocess` there. Of
    `ImageFiles` the images are decoded by `workers` processes. What is left over after the last full batch of an epoch
    is left out. `tick` is called after every epoch. With `checkpoint`, a training that was killed goes on from that
    file, to the same end. `root` is the data folder, for `recipe.pretrained`. `compile` has steps that are captured on
    a GPU compiled first.
    """
    if images.labels is None:
        raise DataError(f"{images.name} has no labels; expected one an image, to train a source model with")
    size = min(recipe.batch_size, len(images))
    if size < 2:
        raise DataError(f"{images.name} has a single image; expected at least two, and better thousands, to train with")
    place = resolve_device(device)
    model = untrained(recipe, seed)
    if recipe.pretrained is not None:
        load_pretrained(model, recipe.network, recipe.pretrained, root)
    # on a GPU, ResNets are faster so, and small networks no slower
    model = model.to(place, memory_format=layout_on(place))  # type: ignore[call-overload]
    taught, advance = _Taught(recipe, model, images, preprocess, place), tick or (lambda: None)
    run = recipe.digest({"seed": seed, "data": images.name, "number": len(images)})
    done = _resume(checkpoint, run, model, taught.optimiser) if checkpoint is not None else 0
    for _ in range(done):
        advance()
    written = time.monotonic()
    dice = Dice(place)
    batches, captured = batches_of(images, size, place, dice.generator, workers), None
    if isinstance(images, Split):
        check_takes(model, preprocess(images.images[:2].to(place)))
    model.train()
    if isinstance(batches, ResidentBatches) and _can_be_captured(recipe, place):
        with dice.for_dropout():
            captured = taught.captured(batches, compile)
    with dice.for_dropout() if captured is None else nullcontext():
        for epoch in range(done, recipe.epochs):
            # anew for every epoch, so that a checkpoint between two needs no generator's state
            dice.seed(seed * 1_000_003 + epoch + 1)
            if captured is not None and isinstance(batches, ResidentBatches):
                taught.set_rate(epoch * captured.steps, captured.steps)
                total = captured.run(batches.order())[0]["loss"]
            else:
                total = taught.epoch(epoch, batches(), len(images) // size, dice.generator)
            if not _finite(total, model):
                raise ShiftmendError(
                    f"training {recipe.network} on {images.name} with seed {seed} diverged in epoch {epoch + 1}: the "
                    f"loss or the weights became NaN or infinite; lower the learning rate ({recipe.learning_rate:g})"
                )
            if checkpoint is not None and time.monotonic() - written >= SECONDS_BETWEEN_CHECKPOINTS:
                _save(checkpoint, run, epoch + 1, model, taught.optimiser)
                written = time.monotonic()
            advance()
    taught.optimiser.zero_grad(set_to_none=True)
    trained: nn.Module = model.eval().to("cpu", memory_format=torch.contiguous_format)
    return trained


class _Taught:
    """A network, and how it learns from a batch."""

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
        self.name, self.highest = images.name, int(images.labels.max())
        self.augment = AUGMENTATIONS[recipe.augmentation]
        self.half = recipe.autocast and device.type == "cuda"
        # a captured step reads its rate from memory
        speed = torch.tensor(recipe.learning_rate, device=device) if device.type == "cuda" else recipe.learning_rate
        self.optimiser = SGD(
            model.parameters(),
            lr=speed,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
            fused=device.type == "cuda" or None,
        )

    def set_rate(self, step: int, steps_per_epoch: int) -> None:
        """That of a step, counted over all epochs."""
        group, value = self.optimiser.param_groups[0], rate(self.recipe, step, steps_per_epoch)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value

    def epoch(self, number: int, batches: Iterable[tuple[Tensor, Tensor]], steps: int, generator: Generator) -> Tensor:
        """Learn from one batch after the other; the sum of their losses."""
        total = torch.zeros((), device=self.device)
        for step, (batch, labels) in enumerate(batches):
            self.set_rate(number * steps + step, steps)
            total += self.step(batch, labels, generator)
        return total

    def captured(self, batches: ResidentBatches, compile: bool) -> CapturedEpoch | None:
        """An epoch whose steps are captured, and compiled before if that is asked for and works."""
        at, generator, model, optimiser = batches.at, batches.generator, self.model, self.optimiser

        def once(index: Tensor) -> Sums:
            return {"loss": self.step(*at(index), generator)}

        def capture(compiled: bool = False) -> CapturedEpoch | None:
            number, size = len(batches.images), batches.size
            return capture_epoch(once, model, optimiser, self.device, number, size, compiled=compiled)

        quick = capture_compiled(capture, model, optimiser, True, self.recipe.network) if compile else None
        return quick or capture()

    def step(self, batch: Tensor, labels: Tensor, generator: Generator) -> Tensor:
        ready = self.preprocess(self.augment(batch, generator))
        ready = ready.contiguous(memory_format=layout_on(ready.device)) if ready.ndim == 4 else ready
        with cast_at_once(self.model, self.device, torch.bfloat16) if self.half else nullcontext():
            logits: Any = self.model(ready)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            given = list(logits.shape) if isinstance(logits, Tensor) else kind(logits)
            raise DataError(f"{self.recipe.network} gave {given}, expected logits of shape [images, classes]")
        logits = logits.float() if self.half else logits
        if logits.shape[1] <= self.highest:  # which a GPU would report as an unreadable crash
            raise DataError(
                f"{self.name} has labels up to {self.highest}, but {self.recipe.network} has {logits.shape[1]} "
                "outputs; set `classes` among the options of the recipe"
            )
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        return loss.detach()


def _can_be_captured(recipe: Recipe, device: torch.device) -> bool:
    """A graph cannot change its rate from step to step, as the other schedule does."""
    return device.type == "cuda" and recipe.schedule == "cosine"


def _finite(total: Tensor, model: nn.Module) -> bool:
    """Whether the losses were numbers, and the weights still are, which the loss of the last step cannot tell."""
    weights = [value for value in model.state_dict().values() if value.is_floating_point()]
    return bool(torch.stack([value.isfinite().all() for value in (total, *weights)]).all())


def _resume(path: Path, run: str, model: nn.Module, optimiser: SGD) -> int:
    """Go back to the state in the checkpoint, if there is one; the number of epochs that are done."""
    checkpoints.check_place(path)
    kept = checkpoints.load(path, run)
    if kept is None:
        return 0
    saved, own = ({name: value.shape for name, value in state.items()} for state in (kept.model, held(model)))
    if saved != own:
        raise ShiftmendError(
            f"checkpoint {path} is of a network with other layers; delete it to start over, or name another file"
        )
    put_back(model, kept.model)
    checkpoints.restore_optimiser(optimiser, model, kept.optimiser)
    logger.info("going on from %s after epoch %d", path, kept.epoch)
    return kept.epoch


def _save(path: Path, run: str, epoch: int, model: nn.Module, optimiser: SGD) -> None:
    try:
        checkpoints.save(path, run, 0, epoch, [], model, optimiser)
    except OSError as error:  # a full disk is no reason to lose the training
        logger.warning("the checkpoint %s could not be written (%s); going on without", path, error.strerror)
