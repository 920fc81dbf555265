"""What it costs if data does not fit on the GPU: an epoch over images in the host's memory, and one over resident ones.

    python benchmarks/prefetch.py [--samples 4000] [--repeats 7]

Images of 3 x 224 x 224 as bytes in batches of 200, each followed by a training step of a ResNet-18, in three ways:
resident on the GPU; prefetched through pinned memory (`shiftmend/prefetch.py`); and copied by the thread that computes,
from pageable memory, when a batch is needed. The ways take turns, so that a GPU that changes its clock does so for all.
Before anything is timed, all ways must have given the same batches in every bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shiftmend.inputs.feed import Feed
from shiftmend.research.networks import resnet18

BATCH, SIDE, CLASSES = 200, 224, 10


def scaled(images: Tensor) -> Tensor:
    return images.float().div_(255)


def pageable(images: Tensor, feed: Feed) -> Callable[[int], Iterator[Tensor]]:
    """Yield the same batches by plain indexing and plain copies."""

    def epoch(number: int) -> Iterator[Tensor]:
        for index in feed.epoch_order(0, number).split(BATCH):
            if len(index) == BATCH:
                yield scaled(images[index].to(feed.device, non_blocking=True))

    return epoch


def seconds(batches: Iterator[Tensor], model: nn.Module, optimiser: torch.optim.Optimizer) -> float:
    """Measure how long an epoch of training steps takes, up to the end of the last."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in batches:
        optimiser.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        optimiser.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def spread(values: list[float], unit: str = "") -> str:
    return f"{statistics.median(values):.3f}{unit} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000, help="images in an epoch")
    parser.add_argument("--repeats", type=int, default=7, help="epochs that are timed in each way")
    options = parser.parse_args()
    if options.samples < BATCH or options.repeats < 1:
        parser.error(f"at least {BATCH} samples and one repeat are needed")
    if not torch.cuda.is_available():
        print("this measures copies to a GPU, and needs a CUDA device: none was found here")
        return
    device = torch.device("cuda")
    images = torch.randint(0, 256, (options.samples, 3, SIDE, SIDE), dtype=torch.uint8)
    settings = {"batch_size": BATCH, "device": device, "preprocess": scaled}
    resident, prefetched = Feed(images, **settings), Feed(images, **settings, resident=False)
    if resident.inputs is None or not resident.inputs.is_cuda:
        parser.error("so many images do not fit on this GPU, and there would be nothing to compare with; take fewer")
    ways: dict[str, Callable[[int], Iterator[Tensor]]] = {
        "resident": lambda number: resident.epoch(0, number),
        "prefetched": lambda number: prefetched.epoch(0, number),
        "pageable": pageable(images, prefetched),
    }
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} thread(s): "
        f"{options.samples // BATCH} batches of {BATCH} x 3 x {SIDE} x {SIDE} bytes, a step of ResNet-18 on each"
    )
    for trio in zip(*(epoch(0) for epoch in ways.values()), strict=True):
        if not all(torch.equal(trio[0], other) for other in trio[1:]):
            raise SystemExit("the ways differ in their batches, and what they cost cannot be compared")
    model = resnet18(CLASSES).to(device).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.repeats + 1):
        for name, epoch in ways.items():
            taken = seconds(epoch(number), model, optimiser)
            if number > 0:  # the first allocates and chooses algorithms
                times[name].append(taken)
    seen = options.samples // BATCH * BATCH
    for name, taken_each in times.items():
        print(f"{name:<12}{spread(taken_each, ' s')} an epoch, {seen / statistics.median(taken_each):.0f} images/s")
    for name in ("prefetched", "pageable"):
        ratios = [one / other for one, other in zip(times[name], times["resident"], strict=True)]
        print(f"{name} / resident: {spread(ratios)}")
    ratios = [one / other for one, other in zip(times["pageable"], times["prefetched"], strict=True)]
    print(f"pageable / prefetched: {spread(ratios)}")


if __name__ == "__main__":
    main()
