"""The demo: real handwritten digits, four changes of the measuring device, four methods, about a minute on a CPU.

The network is the paper's, narrower. The digits ship with the package, so nothing is downloaded. The figures say what
happens on this small problem, not how good the methods are elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shiftmend
from shiftmend import shifts
from shiftmend.adaptation.result import Adaptation
from shiftmend.demo.network import DigitReader
from shiftmend.demo.picture import draw
from shiftmend.evaluation.classification import Scores
from shiftmend.inputs.digits import enlarged_digits
from shiftmend.inputs.images import Split
from shiftmend.inputs.images import signed as preprocess
from shiftmend.profiles.profile import Profile
from shiftmend.utils.checks import check_seed
from shiftmend.utils.files import check_folder
from shiftmend.utils.progress import progress_bar

SOURCE_DIGITS = 900
"""Digits the model is trained on and profiled with; the other 897 are seen by the new device."""

SOURCE_EPOCHS = 40
BATCH_SIZE = 128
SHOWN_DIGITS = 12
"""Digits in the picture."""


@dataclass(frozen=True)
class Lesson:
    """A shift, and what its rows of the table teach."""

    shift: str
    title: str
    text: str


LESSONS = (
    Lesson("mnist-c/brightness", "brighter", "AdaBN mends most of it: only the level of the signal has changed."),
    Lesson("emnist-da/stripe", "stripes", "No change of level undoes this; restoring the features does."),
    Lesson("emnist-da/oranges", "oranges", "Harder: colour and texture that the model has never seen."),
    Lesson(
        "emnist-da/inverse", "inverted", "Too hard for so few digits: features come closer, and mean something else."
    ),
)

METHODS: dict[str, dict[str, Any]] = {
    "source-only": {},
    "adabn": {},
    "fr": {"epochs": 28, "learning_rate": 0.3},
    "bufr": {"epochs_per_block": 7, "learning_rate": 0.3},
}


@dataclass(frozen=True)
class Row:
    """One method on one device: a line of the table."""

    shift: str
    method: str
    accuracy: float
    ece: float
    divergence: float
    verdict: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """The figures of the whole demo, and the folder of its files."""

    clean_accuracy: float
    rows: tuple[Row, ...]
    seconds: float
    folder: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def train_source(images: Tensor, labels: Tensor, seed: int, tick: Callable[[], None]) -> nn.Module:
    """Train the source model by momentum SGD with a cosine schedule, as in the paper; `tick` is called every epoch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitReader().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, SOURCE_EPOCHS)
        model.train()
        for _ in range(SOURCE_EPOCHS):
            for index in torch.randperm(len(images)).split(64):
                optimiser.zero_grad()
                functional.cross_entropy(model(preprocess(images[index])), labels[index]).backward()
                optimiser.step()
            schedule.step()
            tick()
    trained: nn.Module = model.eval()
    return trained


def run(folder: Path, seed: int = 0, say: Callable[..., None] | None = None) -> Report:
    """Run the demo; write the profile, an adapted model, a report on the adaptation and a picture into `folder`.

    `say` is called with each line of text or table to print.
    """
    check_folder(folder)
    check_seed(seed)
    threads = torch.get_num_threads()
    # On operations this small a second thread costs more than it gives.
    torch.set_num_threads(1)
    try:
        return _run(folder, seed, say)
    finally:
        torch.set_num_threads(threads)


def _run(folder: Path, seed: int, say: Callable[..., None] | None) -> Report:
    started = time.perf_counter()
    talk = say if say is not None else _ignore
    source, target = _split_digits(seed)
    assert source.labels is not None
    assert target.labels is not None

    talk(f"1. At home: train a digit reader on {SOURCE_DIGITS} handwritten digits.")
    with progress_bar(None if say else False, "training", SOURCE_EPOCHS) as bar:
        model = train_source(source.images, source.labels, seed, bar.advance)
    clean = _score(model, target.images, target.labels)
    talk(f"   It reads {100 * clean.accuracy:.1f} % of {len(target.images)} digits it has not seen.")

    profile = shiftmend.profile(model, source.images, preprocess=preprocess, progress=False)
    path = folder / "digits.profile.safetensors"
    profile.save(path)
    talk(f"2. Store how its features are distributed: {path}, {path.stat().st_size:,} bytes. No digit leaves home.")

    talk("3. At the new site: four other devices record those digits; no labels, no source data.")
    rows: list[Row] = []
    pictures: list[tuple[str, Tensor, dict[str, Tensor]]] = []
    kept: tuple[Adaptation, Tensor] | None = None
    with progress_bar(None if say else False, "adapting", len(LESSONS) * len(METHODS)) as bar, _hide_warnings():
        for lesson in LESSONS:
            talk(f"   {lesson.title} ...")
            images = shifts.apply(lesson.shift, target.images, seed=seed)
            guesses: dict[str, Tensor] = {}
            for method in METHODS:
                bar.advance(0, f"{lesson.title}: {method}")
                begun = time.perf_counter()
                result = _adapt(model, images, profile, method, seed)
                taken = time.perf_counter() - begun
                scores = _score(result.model, images, target.labels)
                rows.append(_row(lesson, method, scores, result, taken))
                with torch.no_grad():
                    guesses[method] = result.model(preprocess(images[:SHOWN_DIGITS])).argmax(1)
                if lesson.title == "oranges":
                    # The last method's result is the one that is saved.
                    kept = result, images
                bar.advance(1)
            pictures.append((lesson.title, images[:SHOWN_DIGITS], guesses))
    assert kept is not None
    mended, seen = kept
    mended.save(folder / "oranges-bufr")
    _write_report(model, seen, target.labels, profile, mended, folder / "oranges-bufr.html")
    accuracies = {(row.shift, row.method): row.accuracy for row in rows}
    draw(pictures, target.labels[:SHOWN_DIGITS], accuracies, folder / "digits.png")
    report = Report(clean.accuracy, tuple(rows), round(time.perf_counter() - started, 1), str(folder))
    if say is not None:
        _print_report(report, say)
    return report


def _split_digits(seed: int) -> tuple[Split, Split]:
    """Split the digits into those of the source and those that the target records with another device."""
    everything = enlarged_digits()
    order = torch.randperm(len(everything.images), generator=torch.Generator().manual_seed(seed))
    return everything.take(order[:SOURCE_DIGITS]), everything.take(order[SOURCE_DIGITS:])


def _adapt(model: nn.Module, images: Tensor, profile: Profile, method: str, seed: int) -> Adaptation:
    return shiftmend.adapt(
        model,
        images,
        profile,
        method,
        batch_size=BATCH_SIZE,
        seed=seed,
        preprocess=preprocess,
        progress=False,
        **METHODS[method],
    )


def _row(lesson: Lesson, method: str, scores: Scores, result: Adaptation, seconds: float) -> Row:
    judged = result.after
    assert judged is not None
    return Row(lesson.title, method, scores.accuracy, scores.ece, judged.divergence, judged.verdict, round(seconds, 2))


def _write_report(
    model: nn.Module, images: Tensor, labels: Tensor, profile: Profile, mended: Adaptation, path: Path
) -> None:
    from shiftmend import report

    title = "The demo’s digit reader, behind a device that sees oranges everywhere"
    found = report.gather(model, images, profile, mended, labels=labels, preprocess=preprocess, title=title)
    report.write(found, path)


def _score(model: nn.Module, images: Tensor, labels: Tensor) -> Scores:
    scores = shiftmend.evaluate(model, (images, labels), preprocess=preprocess, progress=False)
    assert isinstance(scores, Scores)
    return scores


def _ignore(*_: Any) -> None:
    pass


@contextmanager
def _hide_warnings() -> Iterator[None]:
    """Hide the warnings about adaptations that failed: the table says so."""
    logger = logging.getLogger("shiftmend")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _print_report(report: Report, say: Callable[..., None]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("device", "method", "accuracy", "ECE", "verification, without labels", box=None, pad_edge=False)
    for column in (2, 3):
        table.columns[column].justify = "right"
    colours = {"restored": "green", "partly restored": "yellow", "not restored": "red", "undecided": "yellow"}
    previous = None
    for row in report.rows:
        if previous not in (None, row.shift):
            table.add_row()
        table.add_row(
            row.shift if row.shift != previous else "",
            row.method,
            f"{100 * row.accuracy:.1f} %",
            f"{100 * row.ece:.1f}",
            Text.assemble((row.verdict, colours[row.verdict]), f" ({row.divergence:.3f})"),
        )
        previous = row.shift
    say("")
    say(table)
    say("")
    say("What you see:")
    for lesson in LESSONS:
        say(f"  {lesson.title:<9} {lesson.text}")
    say(
        "Accuracy needs labels, which a new site does not have. The last column does not: it compares\n"
        "features with home in directions that no method has aligned, and is what to trust at the new\n"
        "site. It is strict: predictions can survive features that are not quite restored, as with stripes."
    )
    say(f"Written to {report.folder}/: the profile, the mended model (oranges-bufr/), the picture digits.png.")
    say(
        f"Open {report.folder}/oranges-bufr.html in a browser: what the oranges did to the model, and what mending did."
    )
    say(f"{report.seconds:.0f} seconds in all.")
