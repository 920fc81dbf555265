"""How fast adaptation is here: ratios between things measured in one run, warm, with their spread."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend import histograms
from shiftmend.feeds import Feed
from shiftmend.histograms import Bins
from shiftmend.methods import Objective
from shiftmend.models import build
from shiftmend.statistics import CountTracker, Histogram, RangeTracker
from shiftmend.steps import Precision, Steps
from shiftmend.taps import Tap, tapped

Run = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of several measurements, the shortest and the longest."""

    median: float
    low: float
    high: float

    @property
    def milliseconds(self) -> str:
        return f"{1e3 * self.median:.4g} ({1e3 * self.low:.4g} to {1e3 * self.high:.4g})"


@dataclass(frozen=True)
class Workload:
    """A network of the paper on batches as the paper has them."""

    name: str
    network: str
    classes: int
    shape: tuple[int, int, int]
    batch: int
    samples: int
    autocast: bool


def workloads(device: torch.device) -> list[Workload]:
    """The two of the paper; on a CPU with less data, in full precision."""
    gpu = device.type == "cuda"
    return [
        Workload("the paper's CNN", "digit-cnn", 47, (3, 28, 28), 256, 18_800 if gpu else 1024, gpu),
        Workload(
            "ResNet-18, CIFAR", "resnet18-cifar", 10, (3, 32, 32), 200 if gpu else 50, 10_000 if gpu else 200, gpu
        ),
    ]


def timed(run: Run, device: torch.device, *, repeats: int = 7, inner: int = 1) -> Timing:
    """Warm, then `repeats` measurements of `inner` runs each."""
    run()
    _wait(device)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(inner):
            run()
        _wait(device)
        seconds.append((time.perf_counter() - started) / inner)
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class StepTimes:
    """Of one workload: seconds a step of each loop, and what follows from them."""

    workload: Workload
    eager: Timing
    """A plain loop: softmax binning, one kernel launch after the other."""
    ours: Timing
    supervised: Timing
    """Cross-entropy with everything else as in ours: the floor."""
    flops: float
    """Of a step."""
    peak_memory: int

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


def step_times(work: Workload, device: torch.device, repeats: int = 5) -> StepTimes:
    """Time whole epochs of the three loops over random images."""
    torch.manual_seed(0)
    model = build(work.network, classes=work.classes).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randint(0, 256, (work.samples, *work.shape), dtype=torch.uint8)
    feed = Feed(
        images.contiguous(memory_format=torch.channels_last), batch_size=work.batch, device=device, preprocess=_scaled
    )
    labels = torch.randint(0, work.classes, (work.samples,), device=device)
    taps = {name: Tap.parse(name, spec) for name, spec in model.shiftmend_taps.items()}
    homes = _homes(model, feed, taps)
    for module in model.modules():
        module.train(isinstance(module, _BatchNorm))

    def plain(activations: Any) -> dict[str, Tensor]:
        return {
            name: histograms.divergence(
                home.probabilities,
                histograms.soft_histogram(activations[name], home.low, home.high, home.bins, form="exact"),
            ).mean()
            for name, home in homes.items()
        }

    def aligned(activations: Any) -> dict[str, Tensor]:
        return {name: home.divergence(activations[name]) for name, home in homes.items()}

    def supervised(activations: Any) -> dict[str, Tensor]:
        return {"labels": functional.cross_entropy(activations["logits"].float(), activations["targets"])}

    precision: Precision = nullcontext
    if work.autocast:
        precision = functools.partial(torch.autocast, device.type, torch.bfloat16, cache_enabled=False)

    def loop(objective: Objective, targets: Tensor | None, capture: bool) -> Timing:
        optimiser = optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=device.type == "cuda")
        steps = Steps(model, feed, taps, objective, optimiser, precision=precision, capture=capture)
        whole = timed(lambda: steps.epoch(0, 1, targets), device, repeats=repeats)
        number = work.samples // work.batch
        return Timing(whole.median / number, whole.low / number, whole.high / number)

    eager = loop(plain, None, capture=False)
    _forget(device)
    ours = loop(aligned, None, capture=True)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    floor = loop(supervised, labels, capture=True)
    return StepTimes(work, eager, ours, floor, _flops(model, feed, work), peak)


def matrix_throughput(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Operations a second of one large matrix product: what the chip really gives."""
    size = size if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timed(lambda: one @ other, device, inner=5).median


@dataclass(frozen=True)
class HistogramTimes:
    """Soft binning alone, forward: the softmax of the paper against ours."""

    samples: int
    units: int
    naive: Timing
    ours: Timing
    read: Timing
    """One pass over the input: a sum."""
    naive_memory: int
    memory: int
    error: float
    """Largest, of a bin probability, against float64."""


def histogram_times(samples: int, units: int, device: torch.device, bins: Bins | None = None) -> HistogramTimes:
    bins = bins or Bins()
    generator = torch.Generator(device).manual_seed(0)
    values = torch.rand(samples, units, device=device, generator=generator) * 1.2 - 0.1
    low, high = torch.zeros(units, device=device), torch.ones(units, device=device)
    inner = 20 if device.type == "cuda" else 1

    def naive() -> Tensor:
        return histograms.soft_assignment(values, bins).sum(0) / samples

    scale = histograms.scales(low, high)

    def ours() -> Tensor:
        return histograms.soft_histogram(values, low, high, bins, scale=scale)

    part = values[:4096].double()
    exact = histograms.soft_assignment(part, bins).mean(0)
    mine = histograms.soft_histogram(values[:4096], low, high, bins)
    return HistogramTimes(
        samples,
        units,
        timed(naive, device, inner=inner),
        timed(ours, device, inner=inner),
        timed(lambda: values.sum(0), device, inner=inner),
        _memory(naive, device),
        _memory(ours, device),
        float((mine - exact).abs().max()),
    )


def growth(device: torch.device) -> list[tuple[str, int, Timing]]:
    """Forward and backward of the divergence as samples, units and bins double: time should at most double too."""
    rows = []
    small = device.type != "cuda"
    base = (2048, 64) if small else (16_384, 256)
    for what in ("samples", "units", "bins"):
        for factor in (1, 2, 4, 8):
            samples, units = base
            bins = Bins()
            if what == "samples":
                samples *= factor
            elif what == "units":
                units *= factor
            else:
                bins = Bins(8 * factor)
            rows.append((what, factor, timed(_divergence(samples, units, bins, device), device, inner=3)))
    return rows


def _divergence(samples: int, units: int, bins: Bins, device: torch.device) -> Run:
    values = torch.rand(samples, units, device=device, requires_grad=True)
    ranges = torch.zeros(units, device=device), torch.ones(units, device=device)
    counter = CountTracker(*ranges, bins)
    counter.update(torch.rand(1000, units, device=device))
    home = counter.histogram().to(device)

    def run() -> None:
        values.grad = None
        home.divergence(values).backward()

    return run


def _homes(model: nn.Module, feed: Feed, taps: dict[str, Tap]) -> dict[str, Histogram]:
    model.eval()
    with torch.no_grad(), tapped(model, taps) as recorder:
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


def _flops(model: nn.Module, feed: Feed, work: Workload) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(feed.first(work.batch)).float().sum().backward()
    return float(counter.get_total_flops())


def _memory(run: Run, device: torch.device) -> int:
    """Bytes that a run needs beyond what was there before; on a CPU it is not measured."""
    if device.type != "cuda":
        return 0
    _forget(device)
    before = torch.cuda.memory_allocated(device)
    run()
    _wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def _scaled(images: Tensor) -> Tensor:
    return images.float().div_(127.5).sub_(1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
