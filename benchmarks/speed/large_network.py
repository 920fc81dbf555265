"""A large network on large images: a ResNet-50 at 224 pixels, our step beside the supervised one, and batches that fit.

PYTHONPATH=src python benchmarks/speed/large_network.py [--device cuda] [--images 10000] [--pixels 224] [--batch 256]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# As a script, this folder is on the path, and the one above is needed.
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, optim

import shiftmend
from shiftmend.errors import AdaptationError
from shiftmend.research.networks import build
from shiftmend.utils.devices import resolve_device
from speed.compilation import WatchedSteps
from speed.steps import Scene, Workload, epoch_time, ours, scene, supervised, under
from speed.timing import Table, Timing, figure, forget_peak, mebibytes, wait

MEMORY_LIMITS_GIB = (None, 24, 12)
"""Memory that `adapt` is given to find a batch size in; None is all of it."""

TRAINED: dict[str, Callable[[str], bool]] = {
    "all blocks": lambda name: not name.startswith("fc."),
    "first block": lambda name: name.startswith(("conv1.", "bn1.")),
    "supervised": lambda name: True,
}
"""What is trained: by `fr` and in the last stage of `bufr`; in its first stage; and by cross-entropy, the floor."""


def workload(device: torch.device) -> Workload:
    if device.type == "cuda":
        return Workload("ResNet-50", "resnet50", 1000, (3, 224, 224), 256, 10_000)
    return Workload("ResNet-50", "resnet50", 10, (3, 64, 64), 4, 8)


@dataclass(frozen=True)
class LargeStep:
    """Seconds a step, captured on CUDA."""

    workload: Workload
    trained: str
    precision: str
    compiled: bool
    time: Timing | None
    """None if the step did not fit into memory, or could not be compiled."""
    peak_memory: int | None
    """Bytes of tensors at most, weights and images included; None where nobody counts them."""
    floor: float | None = None
    """Seconds of the supervised step in the same precision, compiled or not."""

    @property
    def images(self) -> float | None:
        """Images a second."""
        return None if self.time is None else self.workload.batch / self.time.median

    @property
    def ratio(self) -> float | None:
        return None if self.time is None or self.floor is None else self.time.median / self.floor

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"images": self.images, "ratio": self.ratio}


@dataclass(frozen=True)
class FittedBatch:
    """What `adapt` made of a limit on memory, without being told a batch size."""

    workload: Workload
    limit: int | None
    """GiB."""
    batch_size: int | None
    """None if nothing fitted."""
    seconds: float
    """One epoch, capturing included."""
    peak_memory: int

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def measure(device: torch.device, repeats: int) -> Iterator[LargeStep | FittedBatch]:
    yield from measure_workload(workload(device), device, repeats)


def measure_workload(
    work: Workload, device: torch.device, repeats: int, compiled: bool = True
) -> Iterator[LargeStep | FittedBatch]:
    """Give the steps in both precisions, then compiled in bfloat16, then the batches that fit."""
    # An epoch is long enough to need few repeats.
    repeats = min(repeats, 2)
    on_gpu = device.type == "cuda"
    kinds = [(kind, False) for kind in ("bfloat16", "float32")] + [("bfloat16", True)] * (on_gpu and compiled)
    stage = scene(work, device)
    for kind, compiles in kinds:
        floor = step_time(stage, "supervised", kind, compiles, repeats)
        yield floor
        known = None if floor.time is None else floor.time.median
        for trained in ("all blocks", "first block"):
            yield replace(step_time(stage, trained, kind, compiles, repeats), floor=known)
    del stage
    if on_gpu:
        for limit in MEMORY_LIMITS_GIB:
            yield fitted_batch(work, device, limit)


def step_time(stage: Scene, trained: str, precision: str, compiled: bool, repeats: int) -> LargeStep:
    """Time one kind of step; everything that it has allocated is freed afterwards."""
    device, chosen = stage.device, TRAINED[trained]
    gc.collect()
    _release(device)
    forget_peak(device)
    for name, parameter in stage.model.named_parameters():
        parameter.requires_grad_(chosen(name))
        parameter.grad = None
    mine = [parameter for parameter in stage.model.parameters() if parameter.requires_grad]
    optimiser = optim.SGD(mine, lr=1e-4, momentum=0.9, fused=device.type == "cuda")
    steps = WatchedSteps(
        stage.model,
        stage.feed,
        stage.taps,
        supervised if trained == "supervised" else ours(stage),
        optimiser,
        precision=under(stage, autocast=precision == "bfloat16"),
        compile=compiled,
    )
    targets = stage.labels if trained == "supervised" else None
    try:
        found: Timing | None = epoch_time(steps, repeats, targets) / stage.steps
    except torch.OutOfMemoryError:
        found = None
    if compiled and not steps.compiled:
        found = None
    return LargeStep(stage.work, trained, precision, compiled, found, _peak(device))


def fitted_batch(work: Workload, device: torch.device, limit: int | None) -> FittedBatch:
    """Run `adapt` for one epoch under a limit on memory."""
    torch.manual_seed(0)
    model = build(work.network, classes=work.classes).to(device).eval()
    images = torch.randint(0, 256, (work.samples, *work.shape), dtype=torch.uint8, device=device)
    profile = shiftmend.profile(
        model, images[: min(512, len(images))], preprocess=_scale, batch_size=32, progress=False
    )
    with _limited(device, limit):
        forget_peak(device)
        started, size = time.perf_counter(), None
        try:
            # Small steps: random weights and random pixels are to stay finite.
            result = shiftmend.adapt(
                model, images, profile, "fr", epochs=1, learning_rate=1e-6, preprocess=_scale, autocast=True,
                device=device, progress=False,
            )  # fmt: skip
            size = int(result.manifest["batch_size"])
        except (AdaptationError, torch.OutOfMemoryError):
            pass
        wait(device)
        return FittedBatch(work, limit, size, time.perf_counter() - started, _peak(device) or 0)


@contextmanager
def _limited(device: torch.device, limit: int | None) -> Iterator[None]:
    """Let torch have no more memory than so many GiB inside the block."""
    gc.collect()
    _release(device)
    if limit is None:
        yield
        return
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _scale(images: Tensor) -> Tensor:
    return images.float() / 255


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def table(rows: Sequence[LargeStep | FittedBatch]) -> Table:
    titles = ("milliseconds a step", "trained", "time", "images a second", "to supervised", "MiB at most")
    lines, notes = [], []
    for row in rows:
        if isinstance(row, FittedBatch):
            limit = "all memory" if row.limit is None else f"{row.limit} GiB"
            chosen = "no batch fits" if row.batch_size is None else f"adapt chose batches of {row.batch_size}"
            length = f"{figure(row.seconds)} s for one epoch of {row.workload.samples:,} images, set-up included"
            notes.append(f"{limit}: {chosen}; {length}; {mebibytes(row.peak_memory)} MiB at most")
            continue
        pixels = f"{row.workload.shape[1]} pixels, batch {row.workload.batch}"
        kind = f"{row.workload.name}, {pixels}, {row.precision}{', compiled' if row.compiled else ''}"
        failed = "failed" if row.time is None else row.time.milliseconds
        images = "" if row.images is None else figure(row.images)
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        memory = "" if row.peak_memory is None else mebibytes(row.peak_memory)
        lines.append((kind, row.trained, failed, images, ratio, memory))
    notes.append("all blocks: fr, and the last stage of bufr; first block: its first stage; channels last")
    return Table(titles, lines, tuple(notes))


def main() -> None:
    from speed.timing import show

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--images", type=int, help="random images; 10,000 on a GPU")
    parser.add_argument("--pixels", type=int, help="side of an image; 224 on a GPU")
    parser.add_argument("--batch", type=int, help="images in a batch; 256 on a GPU")
    parser.add_argument("--repeats", type=int, default=2, help="epochs measured of each, at most 2")
    parser.add_argument("--no-compile", action="store_true", help="leave out compiled steps, which take a minute each")
    given = parser.parse_args()
    device = resolve_device(given.device)
    work = workload(device)
    side = given.pixels or work.shape[1]
    work = replace(work, shape=(3, side, side), samples=given.images or work.samples, batch=given.batch or work.batch)
    show(table([*measure_workload(work, device, given.repeats, compiled=not given.no_compile)]))


if __name__ == "__main__":
    main()
