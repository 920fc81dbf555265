"""One cell: adapt under a protocol, score, and write down everything that a table or a question may ask for later."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shiftmend
from shiftmend import signals
from shiftmend.adaptations import Adaptation, Epoch, environment
from shiftmend.bench.base import Images, Setting, Target
from shiftmend.bench.cells import Cell, Outcome, Result
from shiftmend.bench.planning import rates_for, settings_of
from shiftmend.bench.protocols import FewShot, Offline, Online
from shiftmend.bench.workshop import Workshop, inputs_of, labelled
from shiftmend.data.partitions import few_shot, fractions
from shiftmend.errors import DataError
from shiftmend.feeds import Feed
from shiftmend.loop import DivergedError
from shiftmend.methods import METHODS
from shiftmend.metrics import ClassificationMetrics, RestorationDistance, Scores
from shiftmend.profiles import Profile
from shiftmend.selection import choose
from shiftmend.taps import modes, tapped

Tick = Callable[[int, int], None]
"""Called with the epochs done and the epochs there will be."""


def run_cell(
    workshop: Workshop, cell: Cell, *, rates: Sequence[float] | None = None, tick: Tick | None = None
) -> Result:
    """Run a cell; what goes wrong in it becomes a failed result, and the rest can go on."""
    started = time.perf_counter()
    origin = workshop.benchmark.origin(cell.shift, workshop.root)
    _forget_peak(workshop.device)
    try:
        with _quiet():
            result = _run(workshop, cell, rates, tick or (lambda done, total: None))
    except Exception as error:  # a failed cell is recorded with its error
        text = " ".join(str(error).split()) or type(error).__name__
        named = text if isinstance(error, shiftmend.ShiftmendError) else f"{type(error).__name__}: {text}"
        result = Result(cell, origin, error=named, manifest={"environment": environment(workshop.device)})
    return replace(
        result,
        seconds=round(time.perf_counter() - started, 3),
        peak_memory=_peak(workshop.device),
        finished=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """A result says whether features were restored; hundreds of warnings would only say it again."""
    logger = logging.getLogger("shiftmend")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _run(workshop: Workshop, cell: Cell, rates: Sequence[float] | None, tick: Tick) -> Result:
    benchmark = workshop.benchmark
    setting = settings_of(benchmark, cell.protocol)[cell.method]
    protocol = benchmark.protocols[cell.protocol]
    source = benchmark.source_for(setting, cell.shift)
    model, file = workshop.model(source, cell.seed)
    profile = workshop.profile(source, cell.seed, protocol.temperature)
    target = workshop.target(cell.shift)
    facts = {
        "benchmark": benchmark.name,
        "cell": asdict(cell),
        "protocol": protocol.facts(),
        "source": {"recipe": benchmark.sources[source].facts(), "file": file.name},
        "data": {"adapted_to": target.adapt.name, "scored_on": target.score.name},
        "origin": benchmark.origin(cell.shift, workshop.root),
    }
    result = Result(cell, benchmark.origin(cell.shift, workshop.root), manifest=facts)
    if isinstance(protocol, Online):
        return _online(workshop, setting, protocol, model, profile, target, result, tick)
    assert isinstance(protocol, Offline)
    return _offline(workshop, setting, protocol, model, profile, target, result, rates_for(setting, rates), tick)


def _offline(
    workshop: Workshop,
    setting: Setting,
    protocol: Offline,
    model: nn.Module,
    profile: Profile,
    target: Target,
    result: Result,
    rates: Sequence[float],
    tick: Tick,
) -> Result:
    options = dict(setting.options)
    data, scored, clean = target.adapt, target.score, target.clean
    if isinstance(protocol, FewShot):
        data = data.take(few_shot(_labels(data), protocol.per_class, result.cell.seed))
    if setting.method == "target-supervised":
        if protocol.supervised_parts is not None:
            parts = fractions(len(data), protocol.supervised_parts, result.cell.seed)
            data, scored = data.take(parts[0]), scored.take(parts[-1])
            clean = None if clean is None else clean.take(parts[-1])
        options["labels"] = _labels(data)
    epochs = _epochs(options)
    runs: list[_Run] = []
    for given in [options | {"learning_rate": rate} for rate in rates] or [options]:
        run = _Run(workshop, protocol, scored, epochs, tick)
        try:
            run.adaptation = shiftmend.adapt(
                model,
                inputs_of(data),
                profile,
                setting.method,
                batch_size=protocol.batch_size,
                seed=result.cell.seed,
                preprocess=workshop.benchmark.preprocess,
                device=workshop.device,
                on_epoch=run.look,
                progress=False,
                **given,
            )
        except DivergedError as error:
            if not rates:
                raise
            diverged = {"learning_rate": given["learning_rate"], "error": str(error)}
            result.manifest.setdefault("diverged", []).append(diverged)
            continue
        if run.adaptation.interrupted:
            raise KeyboardInterrupt
        runs.append(run)
    if not runs:
        raise DataError(f"every one of the learning rates {list(rates)} diverged")
    free = not METHODS[setting.method].minimises_entropy
    keepers = [run.rows[choose(run.rows, entropy_may_decide=free)] for run in runs]
    kept = runs[choose(keepers, entropy_may_decide=free)]
    row = keepers[runs.index(kept)]
    adaptation = kept.adaptation
    assert adaptation is not None
    seen = signals.observe(adaptation.model, _feed(workshop, data, protocol.batch_size), profile)
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    manifest = adaptation.manifest | result.manifest
    if rates:
        manifest["learning_rates_tried"] = [
            {"learning_rate": run.adaptation.manifest["method"]["learning_rate"], "last": asdict(run.outcomes[-1])}
            for run in runs
            if run.adaptation is not None
        ]
        manifest["learning_rate_chosen"] = "by the verification slices"
    return replace(
        result,
        last=kept.outcomes[-1],
        best=max(outcomes, key=lambda outcome: outcome.accuracy),
        selected=next(outcome for outcome in kept.outcomes if outcome.epoch == row.epoch),
        signals=_signals(seen),
        restoration_distance=_restoration(workshop, model, adaptation.model, profile, clean, scored),
        alignment_loss=seen.marginals,
        epochs=adaptation.history[-1].epoch,
        history=kept.history(),
        manifest=manifest,
    )


class _Run:
    """What is seen of one run on the way: its rows, and the scores of those that are scored."""

    def __init__(self, workshop: Workshop, protocol: Offline, scored: Images, epochs: int, tick: Tick) -> None:
        self.workshop, self.protocol, self.scored, self.epochs = workshop, protocol, scored, epochs
        self.tick = tick
        self.rows: list[Epoch] = []
        self.outcomes: list[Outcome] = []
        self.adaptation: Adaptation | None = None

    def look(self, model: nn.Module, row: Epoch) -> None:
        if row.epoch % self.protocol.score_every == 0 or row.epoch == self.epochs:
            scores = shiftmend.evaluate(
                model,
                labelled(self.scored),
                preprocess=self.workshop.benchmark.preprocess,
                device=self.workshop.device,
                batch_size=1024,
            )
            assert isinstance(scores, Scores)
            self.rows.append(row)
            self.outcomes.append(_outcome(row.epoch, scores))
        self.tick(row.epoch, max(self.epochs, row.epoch))

    def history(self) -> tuple[dict[str, Any], ...]:
        scores = {outcome.epoch: outcome for outcome in self.outcomes}
        assert self.adaptation is not None
        return tuple(
            asdict(row) | ({"accuracy": at.accuracy, "ece": at.ece} if (at := scores.get(row.epoch)) else {})
            for row in self.adaptation.history
        )


def _online(
    workshop: Workshop,
    setting: Setting,
    protocol: Online,
    model: nn.Module,
    profile: Profile,
    target: Target,
    result: Result,
    tick: Tick,
) -> Result:
    """One pass. There is no epoch to choose from: last, best and selected are the same."""
    stream = shiftmend.stream(
        model,
        profile,
        setting.method,
        preprocess=workshop.benchmark.preprocess,
        device=workshop.device,
        **dict(setting.options),
    )
    whole = ClassificationMetrics(device=workshop.device)
    parts: list[float] = []
    feed = Feed(labelled(target.score), batch_size=protocol.batch_size, device=workshop.device, what="target data")
    steps = max(1, len(target.score) // protocol.batch_size)
    for number, (inputs, labels) in enumerate(feed.labelled()):
        logits = stream.step(inputs)
        whole.update(logits, labels)
        part = ClassificationMetrics(device=workshop.device)
        part.update(logits, labels)
        parts.append(part.compute().ece)
        tick(number + 1, steps)
    outcome = _outcome(1, whole.compute())
    adapted = stream.snapshot()
    seen = signals.observe(adapted, _feed(workshop, target.score, protocol.batch_size), profile)
    manifest = {
        "method": {"name": stream.method.name, **stream.method.hyperparameters()},
        "seed": result.cell.seed,
        "steps": stream.steps,
        "environment": environment(workshop.device),
    }
    return replace(
        result,
        last=outcome,
        best=outcome,
        selected=outcome,
        signals=_signals(seen),
        restoration_distance=_restoration(workshop, model, adapted, profile, target.clean, target.score),
        alignment_loss=seen.marginals,
        ece_per_batch=sum(parts) / len(parts),
        epochs=1,
        manifest=manifest | result.manifest,
    )


def _restoration(
    workshop: Workshop, source: nn.Module, adapted: nn.Module, profile: Profile, clean: Images | None, seen: Images
) -> float | None:
    """The paper's D for one shift: None where there is no clean version of the images."""
    if clean is None or len(clean) != len(seen):
        return None
    distance = RestorationDistance(device=workshop.device)
    taps = {"features": profile.specs["features"]}
    pairs = zip(*(_feed(workshop, images, 1024).batches() for images in (clean, seen)), strict=True)
    with (
        torch.no_grad(),
        modes(source),
        modes(adapted),
        tapped(source, taps) as at_home,
        tapped(adapted, taps) as away,
    ):
        source.eval()
        adapted.eval()
        for before, after in pairs:
            source(before)
            adapted(after)
            distance.update(at_home.read()["features"], away.read()["features"])
    return distance.compute()


def _feed(workshop: Workshop, images: Images, batch_size: int) -> Feed:
    return Feed(
        inputs_of(images),
        batch_size=batch_size,
        device=workshop.device,
        preprocess=workshop.benchmark.preprocess,
        what="target data",
    )


def _outcome(epoch: int, scores: Scores) -> Outcome:
    return Outcome(epoch, scores.accuracy, scores.ece, scores.mce, scores.nll, scores.brier)


def _signals(seen: signals.Signals) -> dict[str, float]:
    slices = None if seen.verification is None else seen.verification.divergence
    values = {
        "slices": slices,
        "marginals": seen.marginals,
        "entropy": seen.entropy,
        "confidence": seen.confidence,
    }
    return {name: value for name, value in values.items() if value is not None}


def _labels(images: Images) -> Tensor:
    if images.labels is None:
        raise DataError(f"{images.name} has no labels, which this protocol needs to draw its samples")
    return images.labels


def _epochs(options: dict[str, Any]) -> int:
    """As many as the display will say; BUFR does not say how many blocks there are before it has begun."""
    return int(options.get("epochs", 0))


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # where that is not possible, the peak is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
