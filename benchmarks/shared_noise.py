"""Is a score flattered if the images to adapt to and the images to score carry the same random draws?

    python benchmarks/shared_noise.py --data-root DATA [--shifts mnist-c/fog,mnist-c/shot_noise,mnist-m]

MNIST-C and MNIST-M are made again with one seed for their training and test images, in portions of 2,000, so that the
first images of either portion have the same noise, or stand on the same patches. Here a small network, trained for four
epochs on 12,000 digits of MNIST, is adapted by FR to their shifted version, and scored on shifted test images: with the
seed of the images that it was adapted to, and with three others. Some minutes on a CPU, in full precision.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import shiftmend
from shiftmend import shifts
from shiftmend.inputs.images import Split, signed
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.bench.training import train
from shiftmend.research.datasets import mnist

SHIFTS = "mnist-c/fog,mnist-c/impulse_noise,mnist-c/shot_noise,mnist-c/spatter,mnist-m"
IMAGES = 12_000
SEED, OTHERS = 2022, (1, 2, 3)
RECIPE = Recipe(network="digit-cnn", options={"classes": 10, "width": 8}, epochs=4)


def measure(shift: str, root: Path, epochs: int, rate: float) -> dict[str, float | str | list[float]]:
    """Return the accuracy in percent with the seed of the images that were adapted to, and with other seeds."""
    train_set, test = mnist("train", root), mnist("test", root)
    home = Split(train_set.images[:IMAGES], train_set.labels[:IMAGES], "mnist, first", train_set.classes)  # type: ignore[index]
    pictures = root / "BSDS500" / "images" / "train" if shift == "mnist-m" else None
    model = train(RECIPE, home, signed, seed=0, device="cpu")
    shared = {"preprocess": signed, "device": "cpu", "progress": False}
    profile = shiftmend.profile(model, home.images, **shared)
    away = shifts.apply(shift, home.images, seed=SEED, textures=pictures)
    options = {"epochs": epochs, "learning_rate": rate, "batch_size": 256, "seed": 0}
    adapted = shiftmend.adapt(model, away, profile, "fr", **options, **shared).model

    def score(seed: int) -> float:
        images = shifts.apply(shift, test.images, seed=seed, textures=pictures)
        return round(100 * shiftmend.evaluate(adapted, (images, test.labels), **shared).accuracy, 2)

    return {"shift": shift, "same draw": score(SEED), "other draws": [score(seed) for seed in OTHERS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--shifts", default=SHIFTS)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.1)
    arguments = parser.parse_args()
    for shift in arguments.shifts.split(","):
        print(json.dumps(measure(shift, arguments.data_root, arguments.epochs, arguments.rate)), flush=True)


if __name__ == "__main__":
    main()
