"""The share of one `adapt` that is not training: what comes before the first step and after the last, and captures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import shiftmend
from shiftmend.accelerate import cuda_graphs
from shiftmend.adaptation import run as adapting
from shiftmend.engine.history import Epoch
from shiftmend.inputs.digits import enlarged_digits
from shiftmend.profiles.fingerprints import InputSummary
from shiftmend.research.networks import build
from speed.timing import Table, figure, wait

PARTS: Mapping[str, tuple[Any, str]] = {
    "reading the data": (adapting, "Feed"),
    "profile and weights": (adapting, "check_profile"),
    "copying the model": (adapting, "copy_model"),
    "tracing": (adapting, "trace"),
    "summary of the inputs": (InputSummary, "from_batches"),
    "memory format": (adapting, "channels_last"),
    "batch size": (adapting, "fit_batch_size"),
    "manifest and digests": (adapting, "_begin_manifest"),
    "verification before": (adapting, "_verify_before"),
    "finishing": (adapting, "_finish"),
}
"""Functions whose time is told apart; none of them calls another."""

LARGEST_SHARE = 0.2
"""What set-up may take of a run."""

EPOCHS_AT_HOME = 3
MAX_TRAINING_IMAGES = 6000


@dataclass(frozen=True)
class Task:
    """A network and the number of digits that it sees, at home as they are and at the site inverted."""

    name: str
    network: str
    classes: int
    shape: tuple[int, int, int]
    samples: int
    method: str = "bufr"
    options: Mapping[str, Any] = field(default_factory=dict)


def tasks(device: torch.device) -> list[Task]:
    """List what is measured: as large as EMNIST-DA on a GPU, with the defaults of `adapt`; less of both on a CPU."""
    if device.type == "cuda":
        return [Task("EMNIST-DA's size", "digit-cnn", 47, (3, 28, 28), 18_800)]
    return [Task("digits", "digit-cnn", 10, (3, 28, 28), 600, options={"epochs_per_block": 1})]


@dataclass(frozen=True)
class SetUp:
    """Seconds of one adaptation."""

    task: Task
    cold: bool
    """Whether this was the first adaptation of the process, in which libraries are loaded and kernels compiled."""
    before: float
    """Until the history has its first row."""
    captures: float
    """Capturing steps and passes after that."""
    after: float
    """From the last row of the history on: verification after, digests, the way back to an ordinary model."""
    total: float
    parts: dict[str, float]
    """Seconds of single functions, in a run of its own that waits for the device at each of them."""

    @property
    def set_up(self) -> float:
        return self.before + self.captures + self.after

    @property
    def share(self) -> float:
        return self.set_up / self.total

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"set_up": self.set_up, "share": self.share}


def measure(device: torch.device, repeats: int) -> Iterator[SetUp]:
    for task in tasks(device):
        yield from measure_task(task, device, repeats)


def measure_task(task: Task, device: torch.device, repeats: int) -> Iterator[SetUp]:
    """Give the first run of the process, and of the later ones that with the median of all seconds."""
    model, source, target = make(task, device)
    profile = shiftmend.profile(model, source, preprocess=scale, device=device, progress=False)
    yield run(task, model, target, profile, device, cold=True)
    found = [run(task, model, target, profile, device) for _ in range(repeats)]
    typical = sorted(found, key=lambda one: one.set_up)[len(found) // 2]
    yield SetUp(**{**vars(typical), "parts": parts_of(task, model, target, profile, device)})


def make(task: Task, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network that knows the digits, and their images at both devices, on the host as a user's arrays are."""
    torch.manual_seed(0)
    digits = enlarged_digits(task.shape[-1])
    images = digits.images.expand(-1, task.shape[0], -1, -1)
    rng = torch.Generator().manual_seed(0)

    def draw() -> tuple[Tensor, Tensor]:
        """Draw digits, moved by a pixel or two, with noise in which no two images are the same."""
        chosen = torch.randint(len(images), (task.samples,), generator=rng)
        moves = torch.randint(-2, 3, (2,), generator=rng).tolist()
        noise = torch.randint(0, 16, (task.samples, *task.shape), generator=rng, dtype=torch.uint8)
        return images[chosen].roll(moves, (2, 3)) // 2 + noise, digits.labels[chosen]

    (source, labels), (target, _) = draw(), draw()
    model = build(task.network, classes=task.classes).to(device).train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(EPOCHS_AT_HOME):
        for rows in torch.randperm(min(len(source), MAX_TRAINING_IMAGES)).split(256):
            optimiser.zero_grad()
            logits = model(scale(source[rows].to(device)))
            functional.cross_entropy(logits, labels[rows].to(device)).backward()
            optimiser.step()
    return model.eval(), source, 200 - target


def scale(images: Tensor) -> Tensor:
    return images.float() / 255


def run(
    task: Task, model: nn.Module, target: Tensor, profile: shiftmend.Profile, device: torch.device, cold: bool = False
) -> SetUp:
    rows: list[float] = []
    captured = 0.0
    original = cuda_graphs._try_to_capture

    def look(model: nn.Module, row: Epoch) -> None:
        rows.append(time.perf_counter())

    def timed_capture(*arguments: Any) -> Any:
        nonlocal captured
        started = time.perf_counter()
        try:
            return original(*arguments)
        finally:
            # Captures before the first row are in `before`.
            captured += time.perf_counter() - started if rows else 0.0

    wait(device)
    started = time.perf_counter()
    with mock.patch.object(cuda_graphs, "_try_to_capture", timed_capture):
        _adapt(task, model, target, profile, device, look)
    wait(device)
    ended = time.perf_counter()
    return SetUp(task, cold, rows[0] - started, captured, ended - rows[-1], ended - started, {})


def parts_of(
    task: Task, model: nn.Module, target: Tensor, profile: shiftmend.Profile, device: torch.device
) -> dict[str, float]:
    found = dict.fromkeys(PARTS, 0.0)
    with ExitStack() as stack:
        for name, (owner, function) in PARTS.items():
            stack.enter_context(_timed(owner, function, device, name, found))
        _adapt(task, model, target, profile, device, None)
    return found


@contextmanager
def _timed(owner: Any, function: str, device: torch.device, name: str, found: dict[str, float]) -> Iterator[None]:
    original = getattr(owner, function)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        wait(device)
        started = time.perf_counter()
        try:
            return original(*arguments, **options)
        finally:
            wait(device)
            found[name] += time.perf_counter() - started

    with mock.patch.object(owner, function, staticmethod(wrapped) if isinstance(owner, type) else wrapped):
        yield


def _adapt(
    task: Task,
    model: nn.Module,
    target: Tensor,
    profile: shiftmend.Profile,
    device: torch.device,
    look: Callable[[nn.Module, Epoch], None] | None,
) -> None:
    shiftmend.adapt(
        model,
        target,
        profile,
        task.method,
        preprocess=scale,
        device=device,
        autocast=device.type == "cuda",
        on_epoch=look,
        progress=False,
        **task.options,
    )


def table(rows: Sequence[SetUp]) -> Table:
    titles = ("seconds of one adapt", "in all", "before row 0", "captures", "after the last row", "share of set-up")
    lines, notes = [], []
    for row in rows:
        name = f"{row.task.name}, {row.task.method}, {'first of the process' if row.cold else 'warm'}"
        times = (row.total, row.before, row.captures, row.after)
        lines.append((name, *(figure(value) for value in times), f"{100 * row.share:.0f} %"))
        if row.parts:
            told = ", ".join(f"{part} {figure(1e3 * value)}" for part, value in row.parts.items())
            notes.append(f"{row.task.name}, milliseconds of the parts, each waited for: {told}")
        if not row.cold:
            verdict = "met" if row.share <= LARGEST_SHARE else "missed"
            notes.append(f"{row.task.name}: set-up at most {100 * LARGEST_SHARE:.0f} % of a run: {verdict}")
    return Table(titles, lines, tuple(notes))
