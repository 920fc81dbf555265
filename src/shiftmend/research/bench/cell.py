"""One cell: adapt under a protocol, score, and write down everything that a table or a question may ask for later."""

from __future__ import annotations

import copy
import logging
import math
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.adaptation.result import Adaptation, environment
from shiftmend.engine.history import Choice, Epoch, choose
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.evaluation.classification import ClassificationMetrics, Scores
from shiftmend.evaluation.evaluate import Scorer
from shiftmend.evaluation.restoration import RestorationDistance
from shiftmend.inputs.feed import Feed
from shiftmend.inputs.images import Split
from shiftmend.introspection.model_state import put_back, tensors_of
from shiftmend.introspection.modes import modes
from shiftmend.introspection.taps import tapped
from shiftmend.methods import METHODS
from shiftmend.profiles import fingerprints
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench.benchmark import (
    Cell,
    FewShot,
    Images,
    Offline,
    Online,
    Outcome,
    Protocol,
    Result,
    Setting,
    Target,
)
from shiftmend.research.bench.plan import rates_for, settings_of
from shiftmend.research.bench.resources import Workshop, inputs_of, labelled
from shiftmend.research.datasets.partitions import few_shot, fractions
from shiftmend.verification import signals

UNUSED = 16 << 30
"""Bytes of a GPU's memory that a run may keep without using them; to give back each cell's at once would cost time."""


def give_back(device: torch.device) -> None:
    """Memory of a GPU that nothing uses any more, if that has become much.

    What a captured graph was given is not used for the next one: without this a long run ends up with the whole GPU,
    and other programs on it with nothing. No graph may be captured meanwhile.
    """
    if device.type == "cuda" and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > UNUSED:
        torch.cuda.empty_cache()


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # where that is not possible, the peak is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew


def peak(device: torch.device) -> int | None:
    """None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with suppress(ImportError):
        import resource  # no such thing on Windows

        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None


@contextmanager
def collected() -> Iterator[list[str]]:
    """The library's warnings, each kind once: kept with the result, for hundreds of cells would flood the screen.

    Of several threads each collects its own.
    """
    texts: list[str] = []
    kinds: set[str] = set()
    me = threading.get_ident()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == me and str(record.msg) not in kinds:
                kinds.add(str(record.msg))
                texts.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logger = logging.getLogger("shiftmend")
    with _COLLECTING:
        logger.addHandler(handler)
        try:
            yield texts
        finally:
            logger.removeHandler(handler)


class _Hushed:
    """The library says nothing to the outside while anybody is inside."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: tuple[int, bool, list[logging.Handler]] = (logging.NOTSET, True, [])

    def __enter__(self) -> None:
        logger = logging.getLogger("shiftmend")
        with self._lock:
            if self._inside == 0:
                self._before = logger.level, logger.propagate, logger.handlers
                logger.setLevel(logging.WARNING)
                logger.propagate, logger.handlers = False, []
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("shiftmend")
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                logger.setLevel(self._before[0])
                logger.propagate, logger.handlers = self._before[1:]


_COLLECTING = _Hushed()


SCORED_AT_ONCE = 2048


Tick = Callable[[int, int], None]
"""Called with the epochs (online: batches) done, and how many there will be; 0 if that is not known."""


@dataclass(frozen=True)
class Given:
    """What a cell starts from."""

    workshop: Workshop
    setting: Setting
    protocol: Protocol
    model: nn.Module
    profile: Profile
    target: Target
    seed: int

    def feed(self, images: Images, batch_size: int) -> Feed:
        return Feed(
            inputs_of(images),
            batch_size=batch_size,
            device=self.workshop.device,
            preprocess=self.workshop.benchmark.preprocess,
            what="target data",
        )


class Run:
    """One adaptation, and what is seen of it on the way: some epochs' scores, and what a choice without labels keeps.

    The choice looks at all epochs, scored or not, as `adapt(keep="selected")` does.
    """

    adaptation: Adaptation

    def __init__(self, given: Given, scored: Images, options: dict[str, Any]) -> None:
        self.given, self.scored, self.options = given, scored, options
        self.choice = Choice(entropy_may_decide=not METHODS[given.setting.method].minimises_entropy)
        self.outcomes: dict[int, Outcome] = {}
        self.reliability: dict[int, list[dict[str, Any]]] = {}
        self._unscored: dict[str, Tensor] = {}
        self._scorer: Scorer | None = None

    def go(self, data: Images, tick: Tick) -> None:
        given = self.given
        # BUFR has so many epochs a block, and how many blocks there are is not known here
        epochs = int(self.options.get("epochs", self.options.get("passes", 0)))

        def look(model: nn.Module, row: Epoch) -> None:
            if row.epoch % given.protocol.score_every == 0:
                self._scorer = self._scorer or self._scorer_of(model, capture=True)
                self._score(self._scorer, row.epoch)
            if self.choice.consider(row):
                self._unscored = {} if row.epoch in self.outcomes else tensors_of(model)
            tick(row.epoch, epochs)

        self.adaptation = shiftmend.adapt(
            given.model,
            inputs_of(data),
            given.profile,
            given.setting.method,
            batch_size=given.protocol.batch_size,
            seed=given.seed,
            preprocess=given.workshop.benchmark.preprocess,
            device=given.workshop.device,
            autocast=given.protocol.in_bfloat16(given.workshop.device),
            compile=given.workshop.compile,
            on_epoch=look,
            progress=False,
            **self.options,
        )
        self._scorer = None  # with its graph, which knows the model only as it was while it was adapted
        if self.adaptation.interrupted or self.adaptation.after is None:  # Ctrl-C; the second while it was judged
            raise KeyboardInterrupt
        if self.adaptation.history[-1].epoch not in self.outcomes:
            self._score(self._scorer_of(self.adaptation.model), self.adaptation.history[-1].epoch)
        if self.kept.epoch not in self.outcomes:
            model = copy.deepcopy(self.adaptation.model)
            put_back(model, self._unscored)
            self._score(self._scorer_of(model), self.kept.epoch)
        self._unscored = {}

    def _scorer_of(self, model: nn.Module, capture: bool = False) -> Scorer:
        feed = Feed(
            labelled(self.scored),
            batch_size=SCORED_AT_ONCE,
            device=self.given.workshop.device,
            preprocess=self.given.workshop.benchmark.preprocess,
            what="data to evaluate on",
        )
        return Scorer(model, feed, capture=capture)

    def _score(self, scorer: Scorer, epoch: int) -> None:
        scores = scorer()
        assert isinstance(scores, Scores)
        self.outcomes[epoch] = outcome_of(epoch, scores)
        self.reliability[epoch] = reliability_of(scores)

    @property
    def kept(self) -> Epoch:
        """The epoch that is chosen without labels."""
        assert self.choice.kept is not None, "epoch 0 is a candidate already"
        return self.choice.kept

    @property
    def last(self) -> Outcome:
        return self.outcomes[self.adaptation.history[-1].epoch]

    @property
    def best(self) -> Outcome:
        """The highest accuracy of those scored, and of equals the first."""
        return max((self.outcomes[epoch] for epoch in sorted(self.outcomes)), key=lambda outcome: outcome.accuracy)

    def facts(self) -> dict[str, Any]:
        """What the choice between several runs saw, and where this one ended."""
        kept = self.kept
        judged = {"epoch": kept.epoch, "verification": kept.verification, "entropy": kept.signals.get("entropy")}
        return judged | {"last": asdict(self.last)}

    def history(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            row.to_json() | ({"accuracy": at.accuracy, "ece": at.ece} if (at := self.outcomes.get(row.epoch)) else {})
            for row in self.adaptation.history
        )


def outcome_of(epoch: int, scores: Scores) -> Outcome:
    return Outcome(epoch, scores.accuracy, scores.ece, scores.mce, scores.nll, scores.brier)


def reliability_of(scores: Scores) -> list[dict[str, Any]]:
    """The bins of a reliability diagram, for a manifest."""
    return [asdict(part) for part in scores.reliability]


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
        alignment_loss=seen.values.get("marginals"),
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
        alignment_loss=seen.values.get("marginals"),
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
    return dict(seen.values)


def _labels(images: Images) -> Tensor:
    if images.labels is None:
        raise DataError(f"{images.name} has no labels; expected one an image, which this protocol needs")
    return images.labels


def _digest(images: Images) -> str | None:
    """What identifies the images; files that are read again in every epoch have nothing of the kind."""
    return fingerprints.digest(images.images) if isinstance(images, Split) else None
