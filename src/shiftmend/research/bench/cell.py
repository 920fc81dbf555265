"""One cell: adapt under a protocol, score, and record everything that tables may need later."""

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
from shiftmend.evaluation.regression import RegressionScores
from shiftmend.evaluation.restoration import RestorationDistance
from shiftmend.inputs.feed import Feed
from shiftmend.inputs.images import Split
from shiftmend.introspection.model_state import restore, snapshot
from shiftmend.methods import METHODS
from shiftmend.passes.evaluation_pass import Observation, run_pass, without_labels
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
    Rehearsed,
    Result,
    Setting,
    Target,
)
from shiftmend.research.bench.plan import rates_for, settings_of
from shiftmend.research.bench.resources import Resources, inputs_of, labelled
from shiftmend.research.datasets.partitions import few_shot, fractions, halves
from shiftmend.verification import signals

SCORING_BATCH_SIZE = 2048

MAX_UNUSED_BYTES = 16 << 30
"""Largest unused GPU memory that a run may keep; releasing it after each cell would cost time."""

Tick = Callable[[int, int], None]
"""Function that is called with the number of finished epochs (online: batches), and their total; 0 if unknown."""


def run_cell(
    resources: Resources, cell: Cell, *, rates: Sequence[float] | None = None, tick: Tick | None = None
) -> Result:
    """Run a cell; an error becomes a failed result, so that the other cells continue."""
    started = time.perf_counter()
    manifest: dict[str, Any] = {"environment": environment(resources.device)}
    result = Result(cell, resources.benchmark.origin(cell.shift, resources.root), manifest=manifest)
    with collect_warnings() as warnings:
        try:
            given = _gather(resources, cell, manifest)
            # Shared resources do not count towards this cell's time and memory, even if it is the first to use them.
            started = time.perf_counter()
            reset_peak_memory(resources.device)
            tick = tick or (lambda done, total: None)
            candidates = rates_for(given.setting, rates)
            if isinstance(given.protocol, Online):
                result = _run_online(given, result, candidates, tick)
            elif isinstance(given.protocol, Rehearsed):
                result = _run_rehearsed(given, result, resources.source(given.source).test)
            else:
                result = _run_offline(given, result, candidates, tick)
        except Exception as error:
            # Hundreds of other cells are waiting, and a method may fail in any way, so the error is the result.
            text = " ".join(str(error).split()) or "no message"
            named = text if isinstance(error, ShiftmendError) else f"{type(error).__name__}: {text}"
            result = replace(result, error=named)
    if warnings:
        result.manifest["warnings"] = warnings
    return replace(
        result,
        seconds=round(time.perf_counter() - started, 3),
        peak_memory=measure_peak_memory(resources.device),
        finished=now_in_utc(),
    )


def now_in_utc() -> str:
    """Return the current time in UTC, e.g. 2022-04-25T09:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class CellInputs:
    """The setting, the source model, the profile and the data that a cell starts from."""

    resources: Resources
    setting: Setting
    protocol: Protocol
    model: nn.Module
    profile: Profile
    target: Target
    seed: int
    source: str

    def feed(self, images: Images, batch_size: int) -> Feed:
        return Feed(
            inputs_of(images),
            batch_size=batch_size,
            device=self.resources.device,
            preprocess=self.resources.benchmark.preprocess,
            what="target data",
        )


def _gather(resources: Resources, cell: Cell, manifest: dict[str, Any]) -> CellInputs:
    """Get model, profile and data; facts are added to the manifest at once, for cells that fail later."""
    benchmark = resources.benchmark
    setting, protocol = settings_of(benchmark, cell.protocol)[cell.method], benchmark.protocols[cell.protocol]
    source, remark = benchmark.source_for(setting, cell.shift), benchmark.source_remark(resources.root)
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
        "origin": benchmark.origin(cell.shift, resources.root),
    }
    model, file = resources.model(source, cell.seed)
    manifest["source"]["file"] = file.name
    if isinstance(protocol, Rehearsed):
        profile = resources.rehearsed(source, cell.seed, protocol, setting.preset)
    else:
        profile = resources.profile(source, cell.seed, protocol.temperature, setting.preset)
    target = resources.target(cell.shift)
    manifest["data"] = {"adapted_to": target.adapt.name, "scored_on": target.score.name}
    return CellInputs(resources, setting, protocol, model, profile, target, cell.seed, source)


def _run_offline(given: CellInputs, result: Result, rates: Sequence[float], tick: Tick) -> Result:
    protocol = given.protocol
    assert isinstance(protocol, Offline)
    takes_labels = METHODS[given.setting.method].takes_labels
    target = divide_target(given.target, protocol, takes_labels, given.seed)
    options = dict(given.setting.options) | ({"labels": labels_of(target.adapt)} if takes_labels else {})
    runs: list[ScoredAdaptation] = []
    tried: list[dict[str, Any]] = []
    for number, rate in enumerate(rates or (None,)):
        run = ScoredAdaptation(given, target.score, options if rate is None else options | {"learning_rate": rate})
        try:
            run.adapt(target.adapt, _count_on(tick, number, len(rates) or 1))
        except ShiftmendError as error:
            if rate is None:
                raise
            tried.append({"learning_rate": rate, "failed": str(error)})
        else:
            runs.append(run)
            tried.append({"learning_rate": rate, **run.facts()})
    if not runs:
        raise DataError(
            f"Expected a result with one of the learning rates {list(rates)}, got none. The last failed: "
            f"{tried[-1]['failed']}"
        )
    kept = runs[choose([run.kept for run in runs], entropy_may_decide=runs[0].choice.entropy_may_decide)]
    best_run = max(runs, key=lambda run: run.best.accuracy)
    adapted = kept.adaptation.model
    seen = signals.observe(adapted, given.feed(target.adapt, protocol.batch_size), given.profile)
    manifest = result.manifest | kept.adaptation.manifest | {"reliability": kept.reliability[kept.last.epoch]}
    if given.resources.benchmark.by_class:
        manifest["class_accuracy"] = _score_classes(given, adapted, target.score)
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
        signals=dict(seen.values),
        restoration_distance=_measure_restoration(given, adapted, target),
        alignment_loss=seen.get("marginals"),
        epochs=kept.last.epoch,
        history=kept.history(),
        manifest=manifest,
    )


def _run_rehearsed(given: CellInputs, result: Result, test: Images) -> Result:
    """Adapt to images that were not rehearsed with, by `shiftmend.adapt`, and score the adapted model on these images.

    The images are the half of the target whose clean versions the rehearsal did not see. A target of its own, of
    another length than `test`, is used as a whole. Options come from the protocol and the method; the others are the
    defaults.

    Args:
        given: What the cell starts from.
        result: The result to fill in.
        test: Clean test images of the source, one half of which was rehearsed with.

    Returns:
        A filled-in copy of `result`. Its last, best and selected outcome are all that of the returned model.

    Raises:
        KeyboardInterrupt: If the user interrupted the adaptation.
    """
    resources, protocol = given.resources, given.protocol
    target = take_site(given.target, test)
    adaptation = shiftmend.adapt(
        given.model,
        inputs_of(target.adapt),
        given.profile,
        given.setting.method,
        batch_size=protocol.batch_size,
        seed=given.seed,
        preprocess=resources.benchmark.preprocess,
        device=resources.device,
        autocast=protocol.in_bfloat16(resources.device),
        progress=False,
        **given.setting.options,
    )
    if adaptation.interrupted:
        raise KeyboardInterrupt
    scores = shiftmend.evaluate(
        adaptation.model,
        labelled(target.score),
        batch_size=SCORING_BATCH_SIZE,
        preprocess=resources.benchmark.preprocess,
        device=resources.device,
        progress=False,
    )
    assert isinstance(scores, Scores)
    outcome = to_outcome(adaptation.kept.epoch, scores)
    seen = signals.observe(adaptation.model, given.feed(target.adapt, protocol.batch_size), given.profile)
    return replace(
        result,
        last=outcome,
        best=outcome,
        selected=outcome,
        signals=dict(seen.values),
        restoration_distance=_measure_restoration(given, adaptation.model, target),
        alignment_loss=seen.get("marginals"),
        epochs=adaptation.history[-1].epoch,
        history=tuple(row.to_json() for row in adaptation.history),
        manifest=result.manifest | adaptation.manifest | {"reliability": list_reliability(scores)},
    )


def take_site(target: Target, test: Images) -> Target:
    """Take the images of a target whose clean versions were not rehearsed with, to adapt to and to score.

    A set of its own, of another length than the clean test images, is taken as a whole.
    """
    score, clean = target.score, target.clean
    if clean is None and len(score) != len(test):
        return Target(score, score)
    if clean is None or not torch.equal(labels_of(clean).cpu(), labels_of(test).cpu()):
        raise DataError(f"Expected {score.name} in the order of {test.name}, or images are on both sides. Sort both.")
    site = halves(labels_of(clean))[1]
    seen = score.take(site)
    return Target(seen, seen, clean.take(site))


def divide_target(target: Target, protocol: Offline, takes_labels: bool, seed: int) -> Target:
    """Select the target images to adapt to and the images to score on, as the protocol prescribes.

    A method that uses target labels is trained on the first of the random `supervised_parts`, and scored on the last.
    Under `FewShot`, `per_class` images of each class are adapted to. Otherwise the target stays as it is.

    Args:
        target: All images of a shift.
        protocol: The protocol of the benchmark.
        takes_labels: Whether the method uses target labels.
        seed: Seed of the random selection.

    Returns:
        The target with the selected images.

    Raises:
        DataError: If labelled images would be trained and scored on, because `supervised_parts` is None for one set.
            Also if `supervised_parts` is given for a target of two sets.
    """
    adapt, score, clean = target.adapt, target.score, target.clean
    if takes_labels and (adapt is score) != (protocol.supervised_parts is not None):
        raise DataError(
            "Expected supervised_parts only where one set is both adapted to and scored on. Otherwise labels of the "
            "training data are scored."
        )
    if takes_labels and protocol.supervised_parts is not None:
        first, *_, last = fractions(len(adapt), protocol.supervised_parts, seed)
        adapt, score, clean = adapt.take(first), score.take(last), None if clean is None else clean.take(last)
    if isinstance(protocol, FewShot):
        adapt = adapt.take(few_shot(labels_of(adapt), protocol.per_class, seed))
    return Target(adapt, score, clean)


def _count_on(tick: Tick, number: int, runs: int) -> Tick:
    """Count the epochs of several runs as one long run."""
    return lambda done, total: tick(number * total + done, runs * total)


class ScoredAdaptation:
    """One adaptation with the scores of some of its epochs, and the epoch that is selected without labels.

    The selection considers all epochs, scored or not, as `adapt(keep="selected")` does.
    """

    adaptation: Adaptation

    def __init__(self, given: CellInputs, scored: Images, options: dict[str, Any]) -> None:
        self.given, self.scored, self.options = given, scored, options
        kind = METHODS[given.setting.method]
        self.choice = Choice(entropy_may_decide=not kind.minimises_entropy, refining=kind.refining)
        self.outcomes: dict[int, Outcome] = {}
        self.reliability: dict[int, list[dict[str, Any]]] = {}
        self._unscored: dict[str, Tensor] = {}

    def adapt(self, data: Images, tick: Tick) -> None:
        given = self.given
        # The number of blocks of BUFR, and so of its epochs, is unknown here.
        epochs = int(self.options.get("epochs", self.options.get("passes", 0)))
        evaluate = shiftmend.Evaluator(
            labelled(self.scored),
            batch_size=SCORING_BATCH_SIZE,
            preprocess=given.resources.benchmark.preprocess,
            device=given.resources.device,
            progress=False,
        )

        def look(model: nn.Module, row: Epoch) -> None:
            if row.epoch % given.protocol.score_every == 0:
                self._note(row.epoch, evaluate(model))
            if self.choice.consider(row):
                self._unscored = {} if row.epoch in self.outcomes else snapshot(model)
            tick(row.epoch, epochs)

        self.adaptation = shiftmend.adapt(
            given.model,
            inputs_of(data),
            given.profile,
            given.setting.method,
            batch_size=given.protocol.batch_size,
            seed=given.seed,
            preprocess=given.resources.benchmark.preprocess,
            device=given.resources.device,
            autocast=given.protocol.in_bfloat16(given.resources.device),
            compile=given.resources.compile,
            on_epoch=look,
            progress=False,
            **self.options,
        )
        if self.adaptation.interrupted or self.adaptation.after is None:
            # Ctrl-C was pressed; a second one during the verification leaves no `after`.
            raise KeyboardInterrupt
        if self.adaptation.history[-1].epoch not in self.outcomes:
            self._note(self.adaptation.history[-1].epoch, evaluate(self.adaptation.model))
        if self.kept.epoch not in self.outcomes:
            model = copy.deepcopy(self.adaptation.model)
            restore(model, self._unscored)
            self._note(self.kept.epoch, evaluate(model))
        self._unscored = {}

    def _note(self, epoch: int, scores: Scores | RegressionScores) -> None:
        assert isinstance(scores, Scores)
        self.outcomes[epoch] = to_outcome(epoch, scores)
        self.reliability[epoch] = list_reliability(scores)

    @property
    def kept(self) -> Epoch:
        """The epoch that is selected without labels."""
        assert self.choice.kept is not None, "epoch 0 is a candidate already"
        return self.choice.kept

    @property
    def last(self) -> Outcome:
        return self.outcomes[self.adaptation.history[-1].epoch]

    @property
    def best(self) -> Outcome:
        """Scores of the first epoch with the highest accuracy."""
        return max((self.outcomes[epoch] for epoch in sorted(self.outcomes)), key=lambda outcome: outcome.accuracy)

    def facts(self) -> dict[str, Any]:
        """List the facts for a choice among several runs, and the end of this run."""
        judged = {
            "epoch": self.kept.epoch,
            "verification": self.kept.verification,
            "entropy": self.kept.signals.get("entropy"),
        }
        return judged | {"last": asdict(self.last)}

    def history(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            row.to_json() | ({"accuracy": at.accuracy, "ece": at.ece} if (at := self.outcomes.get(row.epoch)) else {})
            for row in self.adaptation.history
        )


def to_outcome(epoch: int, scores: Scores) -> Outcome:
    """Return the scores after an epoch in the form that a result stores."""
    return Outcome(epoch, scores.accuracy, scores.ece, scores.mce, scores.nll, scores.brier)


def list_reliability(scores: Scores) -> list[dict[str, Any]]:
    """List the bins of a reliability diagram, for a manifest."""
    return [asdict(part) for part in scores.reliability]


def _run_online(given: CellInputs, result: Result, rates: Sequence[float], tick: Tick) -> Result:
    """Run one pass for each learning rate. There are no epochs to choose from.

    Among several rates, `last` and `selected` belong to the rate whose final model is closest to home by its slices.
    `best` belongs to the rate with the highest accuracy, as in the paper, which needs labels.
    """
    if not rates:
        return _run_stream(given, result, {}, tick)
    runs: list[Result] = []
    tried: list[dict[str, Any]] = []
    for number, rate in enumerate(rates):
        try:
            run = _run_stream(given, result, {"learning_rate": rate}, _count_on(tick, number, len(rates)))
        except ShiftmendError as error:
            tried.append({"learning_rate": rate, "failed": str(error)})
        else:
            assert run.last is not None
            runs.append(run)
            tried.append({"learning_rate": rate, "last": asdict(run.last), "verification": run.signals["slices"]})
    if not runs:
        raise DataError(
            f"Expected a result with one of the learning rates {list(rates)}, got none. The last failed: "
            f"{tried[-1]['failed']}"
        )
    kept = min(runs, key=lambda run: _order_slices(run.signals["slices"]))
    best = max(runs, key=lambda run: run.last.accuracy if run.last is not None else 0.0)
    facts = {
        "learning_rate_chosen": "by the verification slices",
        "learning_rates_tried": tried,
        "learning_rate_of_best": best.manifest["method"]["learning_rate"],
    }
    return replace(kept, best=best.last, manifest=kept.manifest | facts)


def _order_slices(value: float) -> float:
    """Return a sort key that puts a diverged model last."""
    return value if math.isfinite(value) else math.inf


def _run_stream(given: CellInputs, result: Result, changes: dict[str, float], tick: Tick) -> Result:
    """Adapt on a stream in one pass, with some options of the method replaced by `changes`.

    A stream has no epochs, so the scores `last`, `best` and `selected` of the result are equal.

    Scores are of the predictions made during the pass. Signals and distances are of the final model.
    """
    resources, protocol, target = given.resources, given.protocol, given.target
    stream = shiftmend.stream(
        given.model,
        given.profile,
        given.setting.method,
        preprocess=resources.benchmark.preprocess,
        device=resources.device,
        guard=False,  # The paper's protocol updates on every batch.
        **{**given.setting.options, **changes},
    )
    whole = ClassificationMetrics(device=resources.device)
    errors_of_batches: list[float] = []
    feed = Feed(labelled(target.score), batch_size=protocol.batch_size, device=resources.device, what="target data")
    steps = math.ceil(len(target.score) / protocol.batch_size)
    for inputs, labels in feed.labelled_batches():
        logits = stream.step(inputs)
        whole.update(logits, labels)
        part = ClassificationMetrics(device=resources.device)
        part.update(logits, labels)
        errors_of_batches.append(part.compute().ece)
        tick(stream.steps, steps)
    scores = whole.compute()
    outcome = to_outcome(1, scores)
    adapted = stream.snapshot()
    seen = signals.observe(adapted, given.feed(target.score, protocol.batch_size), given.profile)
    manifest = result.manifest | {
        "method": {"name": stream.method.name, **stream.method.hyperparameters()},
        "seed": given.seed,
        "steps": stream.steps,
        "reliability": list_reliability(scores),
        "target": {"samples": len(target.score), "sha256": _digest(target.score)},
    }
    return replace(
        result,
        last=outcome,
        best=outcome,
        selected=outcome,
        signals=dict(seen.values),
        restoration_distance=_measure_restoration(given, adapted, target),
        alignment_loss=seen.get("marginals"),
        ece_per_batch=sum(errors_of_batches) / len(errors_of_batches),
        epochs=1,
        manifest=manifest,
    )


def _score_classes(given: CellInputs, model: nn.Module, images: Images) -> dict[str, float]:
    """Compute the accuracy of each class that occurs, by the class's name."""
    feed = Feed(
        labelled(images),
        batch_size=given.protocol.batch_size,
        device=given.resources.device,
        preprocess=given.resources.benchmark.preprocess,
        what="target data",
    )
    counted: dict[int, tuple[int, int]] = {}

    def update(seen: Observation) -> None:
        assert seen.labels is not None
        hits = seen.activations["logits"].argmax(1) == seen.labels
        for label in seen.labels.unique().tolist():
            own = hits[seen.labels == label]
            right, number = counted.get(label, (0, 0))
            counted[label] = right + int(own.sum()), number + len(own)

    run_pass(model, feed.labelled_batches(), update, taps={"logits": given.profile.specs["logits"]})
    names = images.classes or tuple(str(label) for label in range(max(counted) + 1))
    return {names[label]: counted[label][0] / counted[label][1] for label in sorted(counted)}


def _measure_restoration(given: CellInputs, adapted: nn.Module, target: Target) -> float | None:
    """Compute the paper's restoration distance D for one shift; None without a clean version of the scored images."""
    clean, seen, source = target.clean, target.score, given.model
    if clean is None:
        return None
    if len(clean) != len(seen) or not torch.equal(labels_of(clean).cpu(), labels_of(seen).cpu()):
        raise DataError(
            f"Expected {clean.name} to be the clean version of {seen.name}, image by image, got another number or "
            "other labels. Complete the files of both."
        )
    distance = RestorationDistance(device=given.resources.device)
    taps = {"features": given.profile.specs["features"]}
    at_home: list[Tensor] = []
    run_pass(
        source,
        without_labels(given.feed(clean, 1024).batches()),
        lambda batch: at_home.append(batch.activations["features"]),
        taps=taps,
    )
    homes = iter(at_home)
    run_pass(
        adapted,
        without_labels(given.feed(seen, 1024).batches()),
        lambda batch: distance.update(next(homes), batch.activations["features"]),
        taps=taps,
    )
    return distance.compute()


def labels_of(images: Images) -> Tensor:
    """Return the labels of images.

    Raises:
        DataError: If the images have no labels.
    """
    if images.labels is None:
        raise DataError(f"Expected a label for each image of {images.name}, which this protocol needs, got none.")
    return images.labels


def _digest(images: Images) -> str | None:
    """Hash images in memory; None for files, which are read again in every epoch."""
    return fingerprints.digest(images.images) if isinstance(images, Split) else None


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the library's warnings of this thread, each kind once, instead of showing them.

    They are stored with the result, because those of hundreds of cells would flood the screen.
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
    with _SILENCE:
        logger.addHandler(handler)
        try:
            yield texts
        finally:
            logger.removeHandler(handler)


class _Silence:
    """Context that suppresses the library's log while any thread is inside."""

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


_SILENCE = _Silence()


def release_unused_memory(device: torch.device) -> None:
    """Release unused GPU memory, if there is much of it.

    The memory of one CUDA graph is not reused for the next: a long run would end up with the whole GPU, and leave
    nothing to other programs. No graph may be captured meanwhile.
    """
    if device.type != "cuda":
        return
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > MAX_UNUSED_BYTES:
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    """Reset the measurement of peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # On Linux, this resets the high-water mark. Elsewhere the peak is that of the whole process.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def measure_peak_memory(device: torch.device) -> int | None:
    """Return the peak memory since the last reset, in bytes; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Windows has no such module.
    with suppress(ImportError):
        import resource

        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None
