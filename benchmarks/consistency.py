"""Does it help estimates to know how many answers survive a small change of the input?

    python benchmarks/consistency.py digits 0
    python benchmarks/consistency.py mnist 0 --data-root DATA

The signal *consistency* is the share of answers that stay the same when an image moves by one pixel, right or down. It
is read beside the signals of the library while a small network is rehearsed. Printed is the mean absolute error of the
estimates, each made without the family of its shift, with the signal and without, in points: of each candidate, and of
what `auto` would take. About ten minutes on one core.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import label_shift
import shiftmend
from shiftmend import demo
from shiftmend.adaptation import auto
from shiftmend.inputs.feed import Feed
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import Rehearsal, name_candidate
from shiftmend.rehearsal import rehearse
from shiftmend.research.datasets import digits
from shiftmend.verification import reading
from shiftmend.verification.estimate import cross_fit

CANDIDATES = ("match-moments", "adabn", "fr")
SIGNAL = "consistency"
MNIST_SOURCE, MNIST_HOME = 10_000, 2000


@torch.no_grad()
def measure_consistency(model: nn.Module, feed: Feed) -> float:
    """Return the share of answers that survive a move by one pixel, to the right or down."""
    same, number = 0, 0
    model.eval()
    for images in feed.batches(feed.inference_batch_size):
        assert isinstance(images, Tensor)
        answers = model(images).argmax(1)
        for move in ((0, 1), (1, 0)):
            same += int((model(images.roll(move, (2, 3))).argmax(1) == answers).sum())
            number += len(images)
    return same / number


def add_signal() -> None:
    """Let every reading have the signal."""
    original = reading.read

    def read(model: nn.Module, feed: Feed, *given: Any, **options: Any) -> reading.Reading:
        found = original(model, feed, *given, **options)
        found.signals[SIGNAL] = measure_consistency(model, feed)
        return found

    reading.READ_SIGNALS[SIGNAL] = "share of answers that survive a move by one pixel"
    for module in (rehearse, auto):
        module.read = read  # type: ignore[attr-defined]


def rehearse_digits(seed: int) -> Profile:
    source, home, site = demo.split_digits(seed)
    assert source.labels is not None
    assert home.labels is not None
    assert site.labels is not None
    model = demo.train_source(source.images, source.labels, seed, lambda: None)
    profile = shiftmend.profile(model, source.images, preprocess=demo.preprocess, progress=False)
    both = torch.cat([home.images, site.images]), torch.cat([home.labels, site.labels])
    return shiftmend.rehearse(
        model, both, profile, candidates=CANDIDATES, preprocess=demo.preprocess, seed=seed, progress=False
    )


def rehearse_mnist(seed: int, root: Path | None) -> Profile:
    split = digits.mnist("train", root)
    assert split.labels is not None
    order = torch.randperm(len(split.labels), generator=torch.Generator().manual_seed(seed))
    images, labels = split.images[order], split.labels[order].long()
    torch.manual_seed(seed)
    model = label_shift.Network(10)
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(4):
        for rows in torch.randperm(MNIST_SOURCE).split(128):
            optimiser.zero_grad()
            logits = model(label_shift.shrink(images[rows]))
            nn.functional.cross_entropy(logits, labels[rows]).backward()
            optimiser.step()
    model.eval()
    profile = shiftmend.profile(model, images[:MNIST_SOURCE], preprocess=label_shift.shrink, progress=False)
    held_out = slice(MNIST_SOURCE, MNIST_SOURCE + MNIST_HOME)
    home = images[held_out], labels[held_out]
    return shiftmend.rehearse(
        model, home, profile, candidates=CANDIDATES, preprocess=label_shift.shrink, seed=seed, progress=False
    )


def describe(record: Rehearsal) -> str:
    errors = (100 * (record.estimates[..., :-1] - record.scores).abs()).nanmean((0, 1)).tolist()
    told = [f"{name_candidate(name)} {error:.2f}" for name, error in zip(record.candidates, errors, strict=True)]
    return ", ".join([*told, f"auto {100 * record.mean_error:.2f}"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=("digits", "mnist"))
    parser.add_argument("seed", type=int)
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    add_signal()
    found = rehearse_digits(options.seed) if options.world == "digits" else None
    record = (found or rehearse_mnist(options.seed, options.data_root)).rehearsal
    assert record is not None
    values = record.values.clone()
    values[..., record.signals.index(SIGNAL)] = math.nan
    print(f"{options.world}, seed {options.seed}, with {SIGNAL}: {describe(record)}")
    print(f"{options.world}, seed {options.seed}, without: {describe(cross_fit(replace(record, values=values)))}")


if __name__ == "__main__":
    main()
