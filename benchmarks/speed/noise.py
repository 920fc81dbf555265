"""A benchmark of random images, in which every cell is one BUFR adaptation of the paper's CNN.

Measured as `file.py:NAME`, as anybody's own benchmark is run.
"""

from __future__ import annotations

from shiftmend.inputs.images import signed
from shiftmend.research.bench.benchmark import Benchmark, Offline, Setting, Source, Target
from shiftmend.research.bench.recipes import Recipe
from speed.packing import CELLS, EPOCHS_PER_BLOCK, SAMPLES, SCORED_EVERY, random_images

CLASSES = 47


def benchmark(
    samples: int = SAMPLES,
    epochs_per_block: int = EPOCHS_PER_BLOCK,
    width: int = 64,
    batch: int = 256,
    learning_rate: float = 0.01,
) -> Benchmark:
    """Its cells differ in nothing but their names."""

    def load_source(source: str, root: object) -> Source:
        home = random_images(min(samples, 2048), CLASSES)
        return Source(home, home, home)

    def load_target(shift: str, root: object) -> Target:
        away = random_images(samples, CLASSES)
        return Target(away, away, away)

    setting = Setting("bufr", {"epochs_per_block": epochs_per_block, "learning_rate": learning_rate})
    return Benchmark(
        name="noise",
        title="random images",
        shifts=("none",),
        groups={},
        sources={
            "plain": Recipe(
                network="digit-cnn", options={"classes": CLASSES, "width": width}, epochs=1, batch_size=batch
            )
        },
        protocols={"offline": Offline(batch_size=batch, score_every=SCORED_EVERY, autocast=True)},
        settings={"offline": {f"cell-{number}": setting for number in range(CELLS)}},
        load_source=load_source,
        load_target=load_target,
        origin=lambda shift, root: "own",
        preprocess=signed,
        seeds=(1,),
    )


NOISE = benchmark()
