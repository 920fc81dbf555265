"""A step of adaptation beside that of a plain loop and beside supervised training."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.accelerate.precision import Precision, cast_at_once
from shiftmend.engine.method import Objective
from shiftmend.engine.step import Steps
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.research.networks import build
from shiftmend.stats import histograms
from shiftmend.stats.histograms import Bins, CountTracker, Histogram, RangeTracker
from speed.timing import Table, Timing, figure, forget_peak, matrix_throughput, mebibytes, timed


@dataclass(frozen=True)
class Workload:
    """A network of the paper on batches as the paper has them; on a CPU on smaller ones."""

    name: str
    network: str
    classes: int
    shape: tuple[int, int, int]
    batch: int
    samples: int


def workloads(device: torch.device) -> list[Workload]:
    if device.type == "cuda":
        return [
            Workload("the paper's CNN", "digit-cnn", 47, (3, 28, 28), 256, 18_800),
            Workload("ResNet-18, CIFAR", "resnet18-cifar", 10, (3, 32, 32), 200, 10_000),
        ]
    return [
        Workload("the paper's CNN", "digit-cnn", 47, (3, 28, 28), 256, 512),
        Workload("ResNet-18, CIFAR", "resnet18-cifar", 10, (3, 32, 32), 16, 16),
    ]


@dataclass(frozen=True)
class Scene:
    """A workload ready to run: model, random images and what its taps looked like at home."""

    work: Workload
    model: nn.Module
    feed: Feed
    labels: Tensor
    taps: dict[str, Tap]
    homes: dict[str, Histogram]

    @property
    def device(self) -> torch.device:
        return self.feed.device

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        return self.work.samples // self.work.batch


def scene(work: Workload, device: torch.device, layout: torch.memory_format = torch.channels_last) -> Scene:
    """Build a model and images in the memory format that `layout` names."""
    torch.manual_seed(0)
    model = build(work.network, classes=work.classes).to(device, memory_format=layout)  # type: ignore[call-overload]
    images = torch.randint(0, 256, (work.samples, *work.shape), dtype=torch.uint8, device=device)
    images = images.contiguous(memory_format=layout)
    feed = Feed(images, batch_size=work.batch, device=device, preprocess=_scaled)
    labels = torch.randint(0, work.classes, (work.samples,), device=device)
    taps = {name: Tap.parse(name, spec) for name, spec in model.shiftmend_taps.items()}
    homes = _homes(model, feed, taps)
    for module in model.modules():
        module.train(isinstance(module, _BatchNorm))
    return Scene(work, model, feed, labels, taps, homes)


def ours(stage: Scene) -> Objective:
    return lambda activations: {name: home.divergence(activations[name]) for name, home in stage.homes.items()}


def plain(stage: Scene) -> Objective:
    """Compute the softmax of the paper as directly as its formula reads."""

    def objective(activations: Any) -> dict[str, Tensor]:
        return {
            name: histograms.divergence(
                home.probabilities,
                histograms.soft_assignment((activations[name].float() - home.low) * home.scale, home.bins).mean(0),
            ).mean()
            for name, home in stage.homes.items()
        }

    return objective


def supervised(activations: Any) -> dict[str, Tensor]:
    return {"labels": functional.cross_entropy(activations["logits"].float(), activations["targets"])}


def time_step(
    stage: Scene,
    objective: Objective,
    targets: Tensor | None = None,
    *,
    autocast: bool,
    capture: bool = True,
    repeats: int,
) -> Timing:
    """Time whole epochs, divided by the number of their steps."""
    precision = under(stage, autocast, ours=capture)
    steps = Steps(stage.model, stage.feed, stage.taps, objective, sgd(stage), precision=precision, capture=capture)
    return epoch_time(steps, repeats, targets) / stage.steps


def epoch_time(steps: Steps, repeats: int, targets: Tensor | None = None) -> Timing:
    """Time an epoch after a first one, in which steps are captured."""
    return timed(lambda: steps.run(0, 1, targets=targets), steps.feed.device, repeats=repeats)


def sgd(stage: Scene) -> optim.SGD:
    return optim.SGD(stage.model.parameters(), lr=1e-4, momentum=0.9, fused=stage.device.type == "cuda")


def under(stage: Scene, autocast: bool, ours: bool = True) -> Precision:
    """Return the context of a forward pass: our bfloat16, autocast, or the type of the weights."""
    if not autocast:
        return nullcontext
    if ours:
        return functools.partial(cast_at_once, stage.model, stage.device, torch.bfloat16)
    return functools.partial(torch.autocast, stage.device.type, torch.bfloat16)


@dataclass(frozen=True)
class StepTimes:
    """The seconds a step of each loop on one workload, and what follows from them."""

    workload: Workload
    autocast: bool
    eager: Timing
    """A plain loop: softmax binning, one kernel launch after the other."""
    ours: Timing
    supervised: Timing
    """Cross-entropy with everything else as in ours: the floor."""
    flops: float
    """The operations of a step."""
    throughput: float
    """Operations a second of a large matrix product here, in the precision of the step."""
    peak_memory: int | None
    """Bytes on the GPU, weights and images included."""

    @property
    def ratio(self) -> float:
        return self.ours.median / self.supervised.median

    @property
    def speedup(self) -> float:
        return self.eager.median / self.ours.median

    @property
    def images(self) -> float:
        """A second."""
        return self.workload.batch / self.ours.median

    @property
    def share(self) -> float:
        """The share of the chip's throughput."""
        return self.flops / self.ours.median / self.throughput

    def facts(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("ratio", "speedup", "images", "share")}
        return asdict(self) | derived


def step_times(work: Workload, device: torch.device, repeats: int, throughput: float) -> StepTimes:
    """Time steps: in bfloat16 on a GPU, in full precision on a CPU, with channels last on both."""
    autocast = device.type == "cuda"
    stage = scene(work, device)
    eager = time_step(stage, plain(stage), autocast=autocast, capture=False, repeats=repeats)
    forget_peak(device)
    mine = time_step(stage, ours(stage), autocast=autocast, repeats=repeats)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    floor = time_step(stage, supervised, stage.labels, autocast=autocast, repeats=repeats)
    return StepTimes(work, autocast, eager, mine, floor, _flops(stage), throughput, peak)


def measure(device: torch.device, repeats: int) -> Iterator[StepTimes]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    throughput = matrix_throughput(device, dtype, repeats=repeats)
    for work in workloads(device):
        yield step_times(work, device, repeats, throughput)


def table(rows: Sequence[StepTimes]) -> Table:
    titles = ("milliseconds a step", "plain loop", "ours", "supervised", "ours / supervised", "plain / ours")
    lines, notes = [], []
    for row in rows:
        times = (row.eager.milliseconds, row.ours.milliseconds, row.supervised.milliseconds)
        lines.append(
            (f"{row.workload.name}, batch {row.workload.batch}", *times, f"{row.ratio:.3f}", f"{row.speedup:.2f}")
        )
        chip = f"{100 * row.share:.0f} % of the {figure(row.throughput / 1e12)} TFLOP/s of a matrix product"
        memory = f", {mebibytes(row.peak_memory)} MiB at most" if row.peak_memory is not None else ""
        notes.append(f"{row.workload.name}: {figure(row.images)} images a second, {chip}{memory}")
    kind = "bfloat16 autocast" if any(row.autocast for row in rows) else "float32"
    return Table(titles, lines, (*notes, f"{kind}, channels last"))


def _homes(model: nn.Module, feed: Feed, taps: dict[str, Tap]) -> dict[str, Histogram]:
    model.eval()
    with torch.no_grad(), attach_taps(model, taps) as recorder:
        model(feed.first(512))
        seen = recorder.read()
    homes = {}
    for name, values in seen.items():
        ranges = RangeTracker()
        ranges.update(values)
        counter = CountTracker(ranges.low, ranges.high, Bins())
        counter.update(values)
        homes[name] = counter.histogram().to(feed.device)
    return homes


def _flops(stage: Scene) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        stage.model(stage.feed.first(stage.work.batch)).float().sum().backward()
    return float(counter.get_total_flops())


def _scaled(images: Tensor) -> Tensor:
    return images.float().div_(127.5).sub_(1)
