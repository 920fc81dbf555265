"""The demo: real handwritten digits, rehearsed at home, then read through four other devices, in about a minute.

The network is a narrower version of the paper's. The digits ship with the package, so nothing is downloaded. The
figures show what happens on this small problem, not how good the methods are elsewhere.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shiftmend
from shiftmend import shifts
from shiftmend.adaptation.result import Adaptation, describe_choice
from shiftmend.demo.network import DigitReader
from shiftmend.demo.picture import Strip, draw
from shiftmend.evaluation.classification import Scores
from shiftmend.inputs.digits import enlarged_digits
from shiftmend.inputs.images import Split
from shiftmend.inputs.images import signed as preprocess
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import UNTOUCHED, name_candidate
from shiftmend.report.answer import explain_reason, write_estimate
from shiftmend.utils.checks import check_seed
from shiftmend.utils.files import check_folder
from shiftmend.utils.logs import hide_warnings
from shiftmend.utils.progress import progress_bar
from shiftmend.verification.estimate import Estimate

PARTS = {"source": 7, "home": 5, "site": 6}
"""Parts of the digits: for training and profiling, for the rehearsal at home, and for the site."""

SOURCE_EPOCHS = 40
CANDIDATES = ("match-moments", "adabn", "bufr")
"""Candidates of the rehearsal and of every site, in addition to the untouched model."""
UNTRAINED = ("match-moments", "adabn")
"""Candidates that set statistics and train no weights."""
SHIFTS = 12
"""Number of simulated devices in the rehearsal."""
WORKERS = 2
"""Number of worker processes of the rehearsal."""
SHOWN_DIGITS = 12
"""Number of digits in the picture."""


@dataclass(frozen=True)
class Lesson:
    """A device, with an explanation of its effect on the digits."""

    shift: str
    title: str
    text: str
    severity: int | None = None


LESSONS = (
    Lesson("emnist-da/fog", "foggy", "a fog lies over every digit"),
    Lesson("sensor/gain_offset", "offset", "black is brighter and white is darker", 5),
    Lesson("emnist-da/identity", "as at home", "the same device as at home"),
    Lesson("mnist-c/translate", "moved", "every digit is off its place"),
)

EXPLANATION = """\
   A rehearsal sends held-out home digits through simulated devices and mends the model for each of them.
   At home there are labels, so it learns which label-free signs go with which accuracy.
   What it learns is stored in the profile, and no digit is.
   A site reads the same signs, without labels: the estimate is the accuracy that they went with at home.
   Nine of ten intervals should contain the truth, if the site is like what was rehearsed; else there is no number."""


@dataclass(frozen=True)
class Row:
    """One device: the chosen candidate, and its estimated and true accuracy.

    Attributes:
        device: Title of the lesson.
        chosen: Candidate that was kept; `untouched` if the model was not changed.
        reason: Reason for the choice.
        candidates: All candidates that were tried.
        estimated_before: Estimate for the untouched model.
        estimated_after: Estimate of the returned model.
        true_before: Accuracy from the labels, which a site does not have.
        true_after: Accuracy of the returned model from the labels.
        seconds: Duration of the adaptation in seconds.
    """

    device: str
    chosen: str
    reason: str
    candidates: tuple[str, ...]
    estimated_before: Estimate
    estimated_after: Estimate
    true_before: float
    true_after: float
    seconds: float

    @property
    def left_alone(self) -> bool:
        """True if the model was returned untouched."""
        return self.chosen == name_candidate(UNTOUCHED)

    def to_json(self) -> dict[str, Any]:
        """Return the row for `--json`."""
        estimates = {name: getattr(self, name).to_json() for name in ("estimated_before", "estimated_after")}
        return asdict(self) | estimates


@dataclass(frozen=True)
class Report:
    """The figures of the whole demo, and the folder of its files."""

    home_accuracy: float
    rows: tuple[Row, ...]
    rehearsal_seconds: float
    seconds: float
    folder: str

    def to_json(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        return asdict(self) | {"rows": [row.to_json() for row in self.rows]}


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
    """Run the demo, and write a profile, an adapted model, an HTML report and a picture into `folder`.

    Args:
        folder: Folder to write to, created if it does not exist.
        seed: Seed of the data, the network and the adaptation.
        say: Function that prints its argument, a string or a `rich.table.Table`; by default nothing is printed.
    """
    check_folder(folder)
    check_seed(seed)
    threads = torch.get_num_threads()
    # For operations this small, a second thread costs more than it gains.
    torch.set_num_threads(1)
    try:
        return _run(folder, seed, say)
    finally:
        torch.set_num_threads(threads)


def _run(folder: Path, seed: int, say: Callable[..., None] | None) -> Report:
    started = time.perf_counter()
    talk = say if say is not None else _ignore
    bars = None if say else False
    source, home, site = split_digits(seed)
    assert source.labels is not None
    assert site.labels is not None

    talk(f"1. At home: train a digit reader on {len(source)} handwritten digits, and profile it.")
    with progress_bar(bars, "training", SOURCE_EPOCHS) as bar:
        model = train_source(source.images, source.labels, seed, bar.advance)
    profile = shiftmend.profile(model, source.images, preprocess=preprocess, progress=False)

    talk(f"2. At home: rehearse with {len(home)} other digits.")
    talk(EXPLANATION)
    begun = time.perf_counter()
    profile = _rehearse(model, home, profile, seed, bars)
    rehearsing = time.perf_counter() - begun
    assert profile.rehearsal is not None
    path = folder / "digits.profile.safetensors"
    profile.save(path)
    talk(f"   At home it reads {100 * profile.rehearsal.score:.1f} %. Stored: {path}, {path.stat().st_size:,} bytes.")

    talk(f"3. At the site: {len(LESSONS)} devices record {len(site)} digits that nobody has seen. No labels.")
    rows: list[Row] = []
    strips: list[Strip] = []
    with progress_bar(bars, "adapting", len(LESSONS)) as bar, hide_warnings():
        for lesson in LESSONS:
            bar.advance(0, lesson.title)
            images = shifts.apply(lesson.shift, site.images, severity=lesson.severity, seed=seed)
            begun = time.perf_counter()
            result = shiftmend.adapt(model, images, profile, preprocess=preprocess, seed=seed, progress=False)
            row = _make_row(lesson, model, result, images, site.labels, time.perf_counter() - begun)
            rows.append(row)
            strips.append(_make_strip(row, model, result, images))
            if lesson is LESSONS[0]:
                result.save(folder / "mended")
                _write_page(lesson, model, images, profile, folder)
            bar.advance(1)
    draw(strips, site.labels[:SHOWN_DIGITS], folder / "digits.png")
    seconds = round(time.perf_counter() - started, 1)
    report = Report(profile.rehearsal.score, tuple(rows), round(rehearsing, 1), seconds, str(folder))
    if say is not None:
        _print_report(report, say)
    return report


def split_digits(seed: int) -> tuple[Split, Split, Split]:
    """Split the digits into a part to train on, a part to rehearse with at home, and a part for the site.

    All parts have the same share of each class, because a new device does not change what is recorded.
    """
    everything = enlarged_digits()
    assert everything.labels is not None
    rng = torch.Generator().manual_seed(seed)
    mixed = torch.randperm(len(everything), generator=rng)
    by_class = mixed[everything.labels[mixed].argsort(stable=True)]
    place = torch.arange(len(everything)) % sum(PARTS.values())
    parts, first = [], 0
    for name, share in PARTS.items():
        own = by_class[(place >= first) & (place < first + share)]
        parts.append(everything.take(own[torch.randperm(len(own), generator=rng)], name))
        first += share
    source, home, site = parts
    return source, home, site


def _rehearse(model: nn.Module, home: Split, profile: Profile, seed: int, bars: bool | None) -> Profile:
    with _start_workers() as workers:
        return shiftmend.rehearse(
            model,
            (home.images, home.labels),
            profile,
            candidates=CANDIDATES,
            shifts=SHIFTS,
            quick=True,
            preprocess=preprocess,
            seed=seed,
            executor=workers,
            progress=bars,
        )


@contextmanager
def _start_workers() -> Iterator[Executor | None]:
    """Start the worker processes of the rehearsal, with one thread each. Ctrl-C drops waiting shifts."""
    if WORKERS == 1:
        yield None
        return
    # PyTorch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(WORKERS, context, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _make_row(
    lesson: Lesson, model: nn.Module, result: Adaptation, images: Tensor, labels: Tensor, seconds: float
) -> Row:
    estimates = result.estimate
    assert estimates is not None
    assert estimates.before is not None
    assert estimates.after is not None
    return Row(
        lesson.title,
        name_candidate(result.manifest["method"]["name"]),
        result.reason,
        tuple(name_candidate(one.name) for one in result.candidates),
        estimates.before,
        estimates.after,
        _score(model, images, labels),
        _score(result.model, images, labels),
        round(seconds, 2),
    )


def _make_strip(row: Row, model: nn.Module, result: Adaptation, images: Tensor) -> Strip:
    shown = images[:SHOWN_DIGITS]
    lines: dict[str, Tensor] = {}
    for words, which, estimate, truth in _list_models(row, model, result.model):
        # The font of the picture lacks the space that keeps a number and its unit on one line.
        told = write_estimate(estimate, interval=False).replace("unknown", "?").replace("\u00a0", " ")
        with torch.no_grad():
            lines[f"{words}: estimated {told}, true {100 * truth:.0f} %"] = which(preprocess(shown)).argmax(1)
    return Strip(row.device, shown, lines)


def _list_models(row: Row, before: nn.Module, after: nn.Module) -> list[tuple[str, nn.Module, Estimate, float]]:
    if row.left_alone:
        return [("left alone", after, row.estimated_after, row.true_after)]
    return [
        ("as it came", before, row.estimated_before, row.true_before),
        (f"by {row.chosen}", after, row.estimated_after, row.true_after),
    ]


def _write_page(lesson: Lesson, model: nn.Module, images: Tensor, profile: Profile, folder: Path) -> None:
    """Write the page that a site would get from the saved adaptation, without labels."""
    from shiftmend import report

    title = f"The demo’s digit reader behind another device: {lesson.text}"
    facts = report.gather(model, images, profile, folder / "mended", preprocess=preprocess, title=title)
    report.write(facts, folder / "report.html")


def _score(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    scores = shiftmend.evaluate(model, (images, labels), preprocess=preprocess, progress=False)
    assert isinstance(scores, Scores)
    return scores.accuracy


def _ignore(*_: Any) -> None:
    pass


def _print_report(report: Report, say: Callable[..., None]) -> None:
    from rich.table import Table

    table = Table("device", "model", "accuracy, estimated without labels", "true accuracy", box=None, pad_edge=False)
    table.columns[3].justify = "right"
    for row in report.rows:
        if row.left_alone:
            table.add_row(row.device, "left alone", _write(row.estimated_after), f"{100 * row.true_after:.1f} %")
        else:
            table.add_row(row.device, "as it came", _write(row.estimated_before), f"{100 * row.true_before:.1f} %")
            mended = f"mended by {row.chosen}"
            table.add_row("", mended, _write(row.estimated_after), f"{100 * row.true_after:.1f} %")
        table.add_row()
    say("")
    say(table)
    say("What you see (a site has no labels, and so no last column):")
    for lesson, row in zip(LESSONS, report.rows, strict=True):
        say(f"  {lesson.title}: {lesson.text}. {' '.join(describe(row))}")
    say("These devices are simulated, as the rehearsed ones are. A real device may be like none of them.")
    say("")
    say(f"Written to {report.folder}/: the profile, the model for the first device (mended/), the picture digits.png.")
    say(f"Open {report.folder}/report.html in a browser: the page that the first site gets.")
    say(f"{report.seconds:.0f} seconds in all, {report.rehearsal_seconds:.0f} of them for the rehearsal.")


def _write(estimate: Estimate) -> str:
    if estimate.is_range:
        return str(estimate).removeprefix(f"{estimate.metric} ").partition(":")[0]
    return "unknown" if estimate.value is None else str(estimate).removeprefix(f"{estimate.metric} about ")


def describe(row: Row) -> list[str]:
    """Describe the outcome for one device in sentences."""
    if not row.left_alone:
        choice = describe_choice(row.chosen, row.candidates)
        said = [f"{choice[0].upper()}{choice[1:]}: {row.reason}."]
        said += ["Nothing had to be trained."] if row.chosen in UNTRAINED else []
    elif len(row.candidates) == 1:
        said = [f"The untouched model came back, to the last bit: {row.reason}."]
    else:
        tried = ", ".join(row.candidates[1:])
        said = [f"{tried} were tried and the untouched model came back: {row.reason}."]
    told = {"": (row.estimated_after, row.true_after)}
    if not row.left_alone:
        told = {"as it came ": (row.estimated_before, row.true_before), "after mending ": told[""]}
    for when, (estimate, truth) in told.items():
        if reasons := dict.fromkeys(explain_reason(reason) for reason in estimate.reasons):
            known = "not known exactly" if estimate.is_range else "unknown"
            said.append(f"The accuracy {when}is {known}: {'; '.join(reasons)}.")
        if _misses(estimate, truth):
            said.append(f"The interval {when}misses the truth.")
    if not row.estimated_after.reliable:
        said.append("Before you rely on it, label fifty samples.")
    return said


def _misses(estimate: Estimate, truth: float) -> bool:
    """Return whether there is an interval that does not contain the truth."""
    low, high = estimate.low, estimate.high
    return low is not None and high is not None and not low <= truth <= high
