"""Does verification tell a good adaptation from a bad one? Accuracy beside the verdict, over shifts and sample sizes.

    python benchmarks/verification.py --data-root DATA [--textures FOLDER] [--out rows.json] [--per-class 20 all]

Trains the paper's CNN on EMNIST (50 epochs), then adapts it by FR and BUFR to shifted test images: all of them, and few
per class. A run that was cut off goes on from `--out`. Made for a GPU; a CPU takes hours.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shiftmend
from shiftmend import shifts
from shiftmend.inputs.images import signed as preprocess
from shiftmend.research import datasets as data
from shiftmend.research.datasets.digits import emnist_edition
from shiftmend.research.networks import build
from shiftmend.utils.files import write_atomically

SHIFTS = ("bricks", "sky", "stripe", "inverse", "shot_noise", "crystals")
PER_CLASS = ("20", "50", "5", "all")
SOURCE_EPOCHS = 50
EVALUATION_BATCH = 4096


def train(images: Tensor, labels: Tensor) -> nn.Module:
    torch.manual_seed(123)
    model = build("digit-cnn", classes=47).to(images.device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, SOURCE_EPOCHS)
    model.train()
    for _ in range(SOURCE_EPOCHS):
        for index in torch.randperm(len(images), device=images.device).split(256)[:-1]:
            optimiser.zero_grad()
            functional.cross_entropy(model(preprocess(images[index])), labels[index]).backward()
            optimiser.step()
        schedule.step()
    return model.eval()


def measure(
    model: nn.Module, profile: shiftmend.Profile, images: Tensor, labels: Tensor, method: str, few: int | None
) -> dict[str, Any]:
    seen = images
    if few is not None:
        seen = images[data.few_shot(labels.cpu(), few, seed=1).to(images.device)]
    result = shiftmend.adapt(
        model, seen, profile, method, batch_size=256 if few is None else 235, preprocess=preprocess, seed=1
    )
    scores = shiftmend.evaluate(result.model, (images, labels), preprocess=preprocess, batch_size=EVALUATION_BATCH)
    everything = shiftmend.verify(result.model, images, profile, preprocess=preprocess, batch_size=EVALUATION_BATCH)
    assert result.after is not None
    assert isinstance(scores, shiftmend.Scores)
    return {
        "accuracy": scores.accuracy,
        "ece": scores.ece,
        "verdict": result.after.verdict,
        "excess": result.after.excess,
        "floor": result.after.floor,
        "excess_on_everything": everything.excess,
        "loss": result.history[-1].loss,
        "seconds": result.manifest["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--textures", type=Path)
    parser.add_argument("--out", type=Path, default=Path("verification.json"))
    parser.add_argument("--per-class", nargs="*", default=list(PER_CLASS), help="target images of each class, or all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further cell after this long")
    options = parser.parse_args()
    started = time.perf_counter()
    print(emnist_edition(options.data_root) or "EMNIST Balanced", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    home, away = data.emnist("train", options.data_root), data.emnist("test", options.data_root)
    assert home.labels is not None
    assert away.labels is not None
    labels = away.labels.to(device)
    model = train(home.images.to(device), home.labels.to(device))
    profile = shiftmend.profile(model, home.images.to(device), preprocess=preprocess, batch_size=EVALUATION_BATCH)
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(row["shift"], row["method"], row["per_class"]) for row in rows}
    for few in (None if text == "all" else int(text) for text in options.per_class):
        for shift in SHIFTS:
            images = shifts.apply(f"emnist-da/{shift}", away.images.to(device), textures=options.textures)
            for method in ("bufr", "fr"):
                if (shift, method, few) in done or time.perf_counter() - started > options.seconds:
                    continue
                row = {"shift": shift, "method": method, "per_class": few}
                row |= measure(model, profile, images, labels, method, few)
                rows.append(row)
                write_atomically(options.out, json.dumps(rows, indent=1).encode())
                print(
                    f"{shift:<12} {method:<5} {few or 'all':>4} a class: accuracy {100 * row['accuracy']:.1f} %, "
                    f"{row['verdict']} ({row['excess']:.4f} beyond chance)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
