"""One cell: adapt under a protocol, score, and write down everything that a table or a question may ask for later."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

import shiftmend
from shiftmend import fingerprints, signals
from shiftmend.adaptations import environment
from shiftmend.bench.base import Images, Target
from shiftmend.bench.cells import Cell, Result
from shiftmend.bench.memory import forget_peak, peak
from shiftmend.bench.planning import rates_for, settings_of
from shiftmend.bench.protocols import FewShot, Offline, Online
from shiftmend.bench.runs import Given, Run, Tick, outcome_of, reliability_of
from shiftmend.bench.warnings import collected
from shiftmend.bench.workshop import Workshop, labelled
from shiftmend.data.base import Split
from shiftmend.data.partitions import few_shot, fractions
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.feeds import Feed
from shiftmend.metrics import ClassificationMetrics, RestorationDistance
from shiftmend.selection import choose
from shiftmend.taps import modes, tapped


def run_cell(
    workshop: Workshop, cell: Cell, *, rates: Sequence[float] | None = None, tick: Tick | None = None
) -> Result:
    """Run a cell; what goes wrong in it becomes a failed result, and the rest can go on."""
    started = time.perf_counter()
    manifest: dict[str, Any] = {"environment": environment(workshop.device)}
    result = Result(cell, workshop.benchmark.origin(cell.shift, workshop.root), manifest=manifest)
    with collected() as warnings:
        try:
            given = _gather(workshop, cell, manifest)
            # what many cells share is no part of this one's time and memory, whoever happens to be the first
            started = time.perf_counter()
            forget_peak(workshop.device)
            tick = tick or (lambda done, total: None)
            candidates = rates_for(given.setting, given.protocol, rates)
            if isinstance(given.protocol, Online):
                result = _online(given, result, tick)
            else:
                result = _offline(given, result, candidates, tick)
        except Exception as error:  # a failed cell is recorded with its error
            text = " ".join(str(error).split()) or "no message"
            named = text if isinstance(error, ShiftmendError) else f"{type(error).__name__}: {text}"
            result = replace(result, error=named)
    if warnings:
        result.manifest["warnings"] = warnings
    return replace(
        result,
        seconds=round(time.perf_counter() - started, 3),
        peak_memory=peak(workshop.device),
        finished=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _gather(workshop: Workshop, cell: Cell, manifest: dict[str, Any]) -> Given:
    """Model, profile and data; what is known goes into the manifest at once, for cells that fail further on."""
    benchmark = workshop.benchmark
    setting, protocol = settings_of(benchmark, cell.protocol)[cell.method], benchmark.protocols[cell.protocol]
    source, remark = benchmark.source_for(setting, cell.shift), benchmark.source_remark(workshop.root)
    manifest |= {
        "benchmark": benchmark.name,
        "cell": asdict(cell),
        "method": {"name": setting.method, **setting.options},
        "preset": setting.preset,
        "protocol": protocol.facts(),
        "source": {
            "name": source,
            "recipe": benchmark.sources[source].facts(),
            **({"remark": remark} if remark else {}),
        },
        "origin": benchmark.origin(cell.shift, workshop.root),
    }
    model, file = workshop.model(source, cell.seed)
    manifest["source"]["file"] = file.name
    profile = workshop.profile(source, cell.seed, protocol.temperature, setting.preset)
    target = workshop.target(cell.shift)
    manifest["data"] = {"adapted_to": target.adapt.name, "scored_on": target.score.name}
    return Given(workshop, setting, protocol, model, profile, target, cell.seed)


def _offline(given: Given, result: Result, rates: Sequence[float], tick: Tick) -> Result:
    protocol = given.protocol
    assert isinstance(protocol, Offline)
    supervised = given.setting.method == "target-supervised"
    target = _portions(given.target, protocol, supervised, given.seed)
    options = dict(given.setting.options) | ({"labels": _labels(target.adapt)} if supervised else {})
    runs: list[Run] = []
    tried: list[dict[str, Any]] = []
    for number, rate in enumerate(rates or (None,)):
        run = Run(given, target.score, options if rate is None else options | {"learning_rate": rate})
        try:
            run.go(target.adapt, _from(tick, number, len(rates) or 1))
        except ShiftmendError as error:
            if rate is None:
                raise
            tried.append({"learning_rate": rate, "failed": str(error)})
        else:
            runs.append(run)
            tried.append({"learning_rate": rate, **run.facts()})
    if not runs:
        raise DataError(f"none of the learning rates {list(rates)} led to a result; the last: {tried[-1]['failed']}")
    kept = runs[choose([run.kept for run in runs], entropy_may_decide=runs[0].choice.entropy_may_decide)]
    best_run = max(runs, key=lambda run: run.best.accuracy)
    adapted = kept.adaptation.model
    seen = signals.observe(adapted, given.feed(target.adapt, protocol.batch_size), given.profile)
    manifest = result.manifest | kept.adaptation.manifest | {"reliability": kept.reliability[kept.last.epoch]}
    if rates:
        manifest |= {
            "learning_rate_chosen": "by the verification slices",
            "learning_rates_tried": tried,
            "learning_rate_of_best": best_run.options["learning_rate"],
        }
    return replace(
        result,
        last=kept.last,
        best=best_run.best,
        selected=kept.outcomes[kept.kept.epoch],
        signals=_signals(seen),
        restoration_distance=_restoration(given, adapted, target),
        alignment_loss=seen.marginals,
        epochs=kept.last.epoch,
        history=kept.history(),
        manifest=manifest,
    )


def _portions(target: Target, protocol: Offline, supervised: bool, seed: int) -> Target:
    """What of the target is adapted to and what is scored on, under this protocol."""
    adapt, score, clean = target.adapt, target.score, target.clean
    if supervised and (adapt is score) != (protocol.supervised_parts is not None):
        raise DataError(
            "target-supervised would be scored on what it was trained with: expected supervised_parts to divide a set "
            "that is both adapted to and scored on, and None where these are two sets"
        )
    if supervised and protocol.supervised_parts is not None:
        first, *_, last = fractions(len(adapt), protocol.supervised_parts, seed)
        adapt, score, clean = adapt.take(first), score.take(last), None if clean is None else clean.take(last)
    if isinstance(protocol, FewShot):
        adapt = adapt.take(few_shot(_labels(adapt), protocol.per_class, seed))
    return Target(adapt, score, clean)


def _from(tick: Tick, number: int, runs: int) -> Tick:
    """Counts the epochs of one run after the other as one long run; how long all are is known if one is."""
    return lambda done, total: tick(number * total + done, runs * total)


def _online(given: Given, result: Result, tick: Tick) -> Result:
    """One pass. There is no epoch to choose from: last, best and selected are the same.

    Scores are those of the predictions on the way; signals and distances those of the model at the end, in eval mode.
    """
    workshop, protocol, target = given.workshop, given.protocol, given.target
    stream = shiftmend.stream(
        given.model,
        given.profile,
        given.setting.method,
        preprocess=workshop.benchmark.preprocess,
        device=workshop.device,
        **dict(given.setting.options),
    )
    whole = ClassificationMetrics(device=workshop.device)
    parts: list[float] = []
    feed = Feed(labelled(target.score), batch_size=protocol.batch_size, device=workshop.device, what="target data")
    steps = math.ceil(len(target.score) / protocol.batch_size)
    for inputs, labels in feed.labelled():
        logits = stream.step(inputs)
        whole.update(logits, labels)
        part = ClassificationMetrics(device=workshop.device)
        part.update(logits, labels)
        parts.append(part.compute().ece)
        tick(stream.steps, steps)
    scores = whole.compute()
    outcome = outcome_of(1, scores)
    adapted = stream.snapshot()
    seen = signals.observe(adapted, given.feed(target.score, protocol.batch_size), given.profile)
    manifest = result.manifest | {
        "method": {"name": stream.method.name, **stream.method.hyperparameters()},
        "seed": given.seed,
        "steps": stream.steps,
        "reliability": reliability_of(scores),
        "target": {"samples": len(target.score), "sha256": _digest(target.score)},
    }
    return replace(
        result,
        last=outcome,
        best=outcome,
        selected=outcome,
        signals=_signals(seen),
        restoration_distance=_restoration(given, adapted, target),
        alignment_loss=seen.marginals,
        ece_per_batch=sum(parts) / len(parts),
        epochs=1,
        manifest=manifest,
    )


def _restoration(given: Given, adapted: nn.Module, target: Target) -> float | None:
    """The paper's D for one shift: None where there is no clean version of the images that are scored."""
    clean, seen, source = target.clean, target.score, given.model
    if clean is None:
        return None
    if len(clean) != len(seen) or not torch.equal(_labels(clean).cpu(), _labels(seen).cpu()):
        raise DataError(
            f"{clean.name} is no clean version of {seen.name}: expected the same images, one by one, but number or "
            "labels differ; complete the files of both"
        )
    distance = RestorationDistance(device=given.workshop.device)
    taps = {"features": given.profile.specs["features"]}
    pairs = zip(*(given.feed(images, 1024).batches() for images in (clean, seen)), strict=True)
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
        raise DataError(f"{images.name} has no labels; expected one an image, which this protocol needs")
    return images.labels


def _digest(images: Images) -> str | None:
    """What identifies the images; files that are read again in every epoch have nothing of the kind."""
    return fingerprints.digest(images.images) if isinstance(images, Split) else None
