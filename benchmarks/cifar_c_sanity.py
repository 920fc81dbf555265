"""Compare the regenerated CIFAR-C corruptions with the published generator, and time them.

For every corruption and severity this prints the mean absolute change, in grey levels, over the first 1,000
CIFAR-10 test images, beside what the published generator gave on the same images:

    python benchmarks/cifar_c_sanity.py --data-root DATA
    python benchmarks/cifar_c_sanity.py --data-root DATA --time

`DATA` holds `cifar-10-batches-bin/test_batch.bin` and, for frost, the photographs in `textures/frost`; with
other frost pictures the rows of frost mean nothing. The exit status is 1 if a cell is off.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiftmend.shifts import textures
from shiftmend.shifts.base import Shift
from shiftmend.shifts.cifar_c import SHIFTS

IMAGES_COMPARED = 1000
CHUNK = 2000
RECORD = 1 + 3 * 32 * 32

# Mean absolute change at severities 1 to 5. Motion blur and snow: with an ImageMagick that rounds, as it did
# when the official files were made.
EXPECTED = {
    "gaussian_noise": (8.00, 11.90, 15.76, 17.66, 19.50),
    "shot_noise": (5.93, 8.33, 13.05, 15.01, 18.25),
    "impulse_noise": (1.28, 2.56, 3.82, 6.37, 8.94),
    "speckle_noise": (5.68, 9.34, 11.15, 14.70, 18.14),
    "gaussian_blur": (1.33, 4.90, 6.27, 7.43, 9.45),
    "glass_blur": (11.15, 11.28, 11.06, 18.11, 17.38),
    "defocus_blur": (1.38, 3.31, 5.00, 6.51, 9.28),
    "motion_blur": (6.96, 10.32, 13.07, 12.97, 15.15),
    "zoom_blur": (8.75, 10.30, 12.30, 14.36, 16.33),
    "fog": (10.84, 21.64, 27.57, 32.36, 39.21),
    "frost": (30.36, 44.66, 50.29, 44.83, 43.74),
    "snow": (10.77, 23.76, 25.36, 37.20, 51.40),
    "spatter": (1.01, 2.74, 6.76, 3.14, 5.17),
    "contrast": (10.68, 21.35, 25.62, 29.89, 36.30),
    "brightness": (10.03, 20.30, 30.10, 39.35, 55.87),
    "saturate": (11.53, 14.89, 8.04, 20.30, 29.53),
    "jpeg_compression": (5.32, 6.59, 7.02, 7.48, 8.09),
    "pixelate": (1.78, 3.40, 4.13, 6.22, 8.63),
    "elastic_transform": (21.99, 19.95, 17.91, 16.36, 13.62),
}
# How far another seed may be from these figures. The frost photographs differ a lot in brightness.
TOLERANCE_OF_ALL_OTHERS = 0.05
TOLERANCES = {
    **dict.fromkeys(("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur"), 0.1),
    **dict.fromkeys(("fog", "elastic_transform", "motion_blur", "snow"), 0.5),
    "spatter": 0.2,
    "frost": 2.5,
}


def read_test_images(root: Path) -> Tensor:
    """Read the 10,000 test images, uint8 `[N, 3, 32, 32]`."""
    path = root / "cifar-10-batches-bin" / "test_batch.bin"
    if not path.is_file():
        sys.exit(f"there is no {path}: unpack the binary version of CIFAR-10 under the data root")
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, RECORD)
    return torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy())


def extra_arguments(shift: Shift, root: Path) -> dict[str, Any]:
    if shift.texture is None:
        return {}
    folder = root / "textures"
    if not folder.is_dir():
        print(f"no {folder}: {shift.name} uses stand-ins, its figures cannot agree", file=sys.stderr)
    return {"textures": textures.load(shift.texture, folder if folder.is_dir() else None)}


def run(shift: Shift, severity: int, images: Tensor, seed: int, extra: dict[str, Any]) -> Tensor:
    generator = torch.Generator(images.device).manual_seed(seed)
    parameters = shift.parameters(severity)
    return torch.cat([shift.function(part, generator=generator, **parameters, **extra) for part in images.split(CHUNK)])


def compare(images: Tensor, root: Path, seed: int) -> int:
    """Print one line per corruption and severity; return how many cells are off."""
    print(f"{'corruption':<20}severity measured expected tolerance  verdict")
    off = 0
    for shift in SHIFTS.values():
        name = shift.name.removeprefix("cifar-c/")
        extra = extra_arguments(shift, root)
        tolerance = TOLERANCES.get(name, TOLERANCE_OF_ALL_OTHERS)
        for severity, expected in enumerate(EXPECTED[name], start=1):
            shifted = run(shift, severity, images, seed, extra)
            measured = (shifted.float() - images.float()).abs().mean().item()
            # The expected figures are rounded to two decimals.
            agrees = abs(measured - expected) <= tolerance + 0.005
            off += not agrees
            print(
                f"{name:<20}{severity:>8}{measured:>9.2f}{expected:>9.2f}{tolerance:>10.2f}"
                f"  {'ok' if agrees else 'OFF'}",
                flush=True,
            )
    print(f"{off} of {5 * len(SHIFTS)} cells off")
    return off


def measure_speed(images: Tensor, root: Path, seed: int) -> None:
    """Print the seconds each corruption takes at severity 5, and wall and processor time of its slowest severity.

    On a busy machine the processor time with one thread says more than the wall clock.
    """
    wait: Callable[[], None] = torch.cuda.synchronize if images.is_cuda else lambda: None
    print(f"{len(images)} images in chunks of {CHUNK}, {torch.get_num_threads()} threads, {images.device}")
    print(f"{'corruption':<20}severity 5  slowest  slowest, processor")
    for shift in SHIFTS.values():
        extra = extra_arguments(shift, root)
        seconds: list[float] = []
        processor: list[float] = []
        for severity in range(1, 6):
            wait()
            start, processor_start = time.perf_counter(), time.process_time()
            run(shift, severity, images, seed, extra)
            wait()
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - processor_start)
        name = shift.name.removeprefix("cifar-c/")
        print(f"{name:<20}{seconds[-1]:>10.2f}{max(seconds):>9.2f}{max(processor):>20.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("SHIFTMEND_DATA"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time", action="store_true", help="time all 10,000 images instead of comparing")
    parser.add_argument("--threads", type=int, help="processor threads to use")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.data_root is None:
        parser.error("name the data root with --data-root or in SHIFTMEND_DATA")
    root = Path(arguments.data_root)
    images = read_test_images(root).to(arguments.device)
    if arguments.time:
        measure_speed(images, root, arguments.seed)
    elif compare(images[:IMAGES_COMPARED], root, arguments.seed):
        sys.exit(1)


if __name__ == "__main__":
    main()
