"""How long the shifts take on whole test sets, beside loops over single images.

    python benchmarks/shifts.py
    python benchmarks/shifts.py --device cuda --data-root DATA

Times all thirteen shifts of EMNIST-DA on 18,800 images of 28 x 28 and all nineteen corruptions of CIFAR-C on 10,000 of
32 x 32. `DATA` (or the environment variable SHIFTMEND_DATA) holds EMNIST and CIFAR-10; without it the images are
synthetic, which matters little to the times. The loops are numpy, one image at a time, the way the published sets were
made; they run on a few hundred images and are scaled up.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shiftmend.research.datasets.cifar import cifar10
from shiftmend.research.datasets.digits import emnist
from shiftmend.shifts import SHIFTS, apply

GLYPHS, PHOTOGRAPHS = 18_800, 10_000
LOOPED = 200
TARGET_SECONDS = 60


def synthetic(count: int, channels: int, side: int) -> Tensor:
    """Draw soft discs in random places: bright on black, with about as much ink as a letter."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.rand(2, count, 1, 1, generator=generator) * side / 2 + side / 4
    grid = torch.arange(float(side))
    distance = torch.hypot(grid[:, None] - centre[0], grid - centre[1])
    grey = (side / 5 - distance).clamp(0, 1).mul(255).to(torch.uint8)
    return grey[:, None].repeat(1, channels, 1, 1)


def images_to_shift(root: str | None) -> tuple[Tensor, Tensor, str]:
    if root is None:
        return synthetic(GLYPHS, 1, 28), synthetic(PHOTOGRAPHS, 3, 32), "synthetic images"
    return emnist("test", root).images, cifar10("test", root).images, "EMNIST and CIFAR-10 test images"


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Measure how long one call takes, including the work that it leaves running on the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def dotted_line_loop(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    start, end = random.integers(0, 27, 2)
    rows, columns = np.mgrid[:28, :28]
    distance = np.abs(rows - start - (end - start) / 27 * columns).clip(0, 2.3 - 1e-10)
    line = (1 + np.log(1 - distance / 2.3)).clip(0)
    line[:, 27] = 0
    for first in range(0, 28, 4):
        line[:, first : first + 2] = 0
    return (np.clip(image / 255 + line, 0, 1) * 255).astype(np.float32).astype(np.uint8)


def gaussian_blur_loop(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    kernel = np.exp(-(np.arange(-12, 13) ** 2) / 18)
    kernel /= kernel.sum()
    padded = np.pad(image / 255, ((12, 12), (0, 0)), mode="edge")
    columns = [np.convolve(column, kernel, mode="valid") for column in padded.T]
    return (np.clip(np.stack(columns, axis=1), 0, 1) * 255).astype(np.float32).astype(np.uint8)


def fog_loop(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    cloud = np.zeros((256, 256))
    step, amplitude = 256, 100.0
    while step >= 2:
        half = step // 2
        corners = cloud[::step, ::step]
        below, right = np.roll(corners, -1, 0), np.roll(corners, -1, 1)
        draw = amplitude * random.uniform(-amplitude, amplitude, (3, *corners.shape))
        centres = (corners + below + right + np.roll(below, -1, 1)) / 4 + draw[0]
        cloud[half::step, half::step] = centres
        cloud[::step, half::step] = (corners + right + centres + np.roll(centres, 1, 0)) / 4 + draw[1]
        cloud[half::step, ::step] = (corners + below + centres + np.roll(centres, 1, 1)) / 4 + draw[2]
        step, amplitude = half, amplitude / 1.4
    cloud -= cloud.min()
    unit, white = image / 255, image.max() / 255
    fogged = (unit + 3 * cloud[:28, :28] / cloud.max()) * white / (white + 3)
    return (np.clip(fogged, 0, 1) * 255).astype(np.float32).astype(np.uint8)


LOOPS = {
    "emnist-da/dotted_line": dotted_line_loop,
    "emnist-da/fog": fog_loop,
    "emnist-da/gaussian_blur": gaussian_blur_loop,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--data-root", default=os.environ.get("SHIFTMEND_DATA"), help="folder with EMNIST and CIFAR-10")
    parser.add_argument("--threads", type=int, default=None, help="threads torch may use on the CPU")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    glyphs, photographs, what = images_to_shift(options.data_root)
    threads = f"{torch.get_num_threads()} thread(s)" if device.type == "cpu" else torch.cuda.get_device_name(device)
    print(f"{what}, {device.type}, {threads}, torch {torch.__version__}")

    totals = {"emnist-da": 0.0, "cifar-c": 0.0}
    print(f"{'shift':<28}{'images':>8}{'seconds':>9}{'images/s':>10}{'loop, s':>9}{'faster':>8}")
    for name in SHIFTS:
        group = name.partition("/")[0]
        if group not in totals or name.endswith("/identity"):
            continue
        images = (glyphs if group == "emnist-da" else photographs).to(device)
        apply(name, images[:16])
        taken = seconds(lambda name=name, images=images: apply(name, images), device)
        totals[group] += taken
        row = f"{name:<28}{len(images):>8}{taken:>9.2f}{len(images) / taken:>10.0f}"
        if name in LOOPS:
            random = np.random.default_rng(0)
            start = time.perf_counter()
            for image in glyphs[:LOOPED, 0].numpy():
                LOOPS[name](image, random)
            looped = (time.perf_counter() - start) / LOOPED * len(images)
            row += f"{looped:>9.1f}{looped / taken:>8.1f}"
        print(row, flush=True)
    for group, total in totals.items():
        print(f"{group}: {total:.1f} s in all")
    if device.type == "cpu":
        verdict = "within" if totals["emnist-da"] <= TARGET_SECONDS else "over"
        print(f"EMNIST-DA is {verdict} the {TARGET_SECONDS} s that two cores should need at most")


if __name__ == "__main__":
    main()
