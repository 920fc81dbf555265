"""The loop itself: epochs, history, checkpoints, and what happens when it is cut short."""

from __future__ import annotations

import functools
import logging
import math
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim

from shiftmend.accelerate.bf16 import Precision, in_bfloat16
from shiftmend.adaptation.result import Adaptation
from shiftmend.distributed.collectives import all_processes, all_true, check_same
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine.history import Choice, Epoch
from shiftmend.engine.method import Method, Network, Stage, check_objective
from shiftmend.engine.modes import enter_adapting_modes, fresh_optimiser, steady, still_finite
from shiftmend.engine.settings import Settings
from shiftmend.engine.step import Steps
from shiftmend.errors import AdaptationError, DivergedError
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.model_state import put_back, tensors_of
from shiftmend.introspection.modes import modes
from shiftmend.introspection.taps import Tap
from shiftmend.passes.looks import Looker
from shiftmend.profiles import fingerprints
from shiftmend.profiles.profile import Profile
from shiftmend.utils.checks import brief, counted
from shiftmend.utils.processes import of_first_process, rank, world_size
from shiftmend.utils.progress import Bar, PassProgress, progress_bar
from shiftmend.verification.signals import Watch, observe
from shiftmend.verification.verdict import Verification

logger = logging.getLogger(__name__)


logger.addFilter(of_first_process)


VERIFIED_PER_EPOCH = 4096
"""Target samples behind the verification of each epoch, in the precision of the steps; before and after adapting it is
all of them, in full precision."""


class Run:
    """One adaptation under way."""

    def __init__(
        self,
        network: Network,
        feed: Feed,
        profile: Profile | None,
        method: Method,
        stages: list[Stage],
        taps: dict[str, Tap],
        settings: Settings,
        manifest: dict[str, Any],
        before: Verification | None = None,
    ) -> None:
        """`before`: what another run has found, and said, of the same model as it came, on the same data."""
        self.network, self.feed, self.method, self.stages = network, feed, method, stages
        self.profile = profile.to(feed.device) if profile is not None else None
        self.model, self.taps, self.settings, self.manifest = network.model, taps, settings, manifest
        half = functools.partial(in_bfloat16, self.model, feed.device)
        self.precision: Precision = half if settings.autocast else nullcontext
        self.capture, self.compile = settings.capture, settings.compile
        self.path = Path(settings.checkpoint) if settings.checkpoint is not None else None
        if self.path is not None:
            checkpoints.check_place(self.path)
            checkpoints.check_model(self.model)
        self.name = checkpoints.identify(
            {key: value for key, value in manifest.items() if key != "environment"}
            | {"trained": [stage.parameters for stage in stages], "seen": fingerprints.digest(feed.first(64))}
        )
        self.bar = Bar()
        self.before = before
        self.history: list[Epoch] = []
        self.good: dict[str, Tensor] = {}
        self.choice = Choice(entropy_may_decide=not method.minimises_entropy)
        self.selected: dict[str, Tensor] = {}
        self.watch = Watch(
            self.model,
            feed,
            self.profile,
            settings.output,
            most=VERIFIED_PER_EPOCH,
            capture=settings.capture,
            precision=self.precision,
            logits=taps.get("logits"),
        )
        self.look = Looker(self.model, feed, self.precision, settings.capture)

    def go(self) -> Adaptation:
        """Run to the end, or as far as it gets."""
        total = sum(stage.epochs for stage in self.stages)
        own = checkpoints.alone_at(self.path) if self.path is not None and rank() == 0 else nullcontext(True)
        with own as alone, progress_bar(self.settings.progress, self.method.name, total) as self.bar:
            with all_processes():
                alone = all_true(alone, self.feed.device)
            if not alone:
                raise AdaptationError(f"another run uses checkpoint {self.path}; let it finish, or name another file")
            return self._go()

    def _show(self, what: str, most: int | None = None) -> None:
        """Of the pass over the data that comes next, or so many of them, show how far it is: it may take hours."""
        known = self.feed.known
        self.feed.heard = PassProgress(self.bar, what, known if known is None or most is None else min(known, most))

    def _go(self) -> Adaptation:
        started = time.perf_counter()
        resumed = checkpoints.load(self.path, self.name) if self.path is not None else None
        position = (resumed.stage, resumed.epoch) if resumed is not None else None
        check_same(str(position), "checkpoint", self.feed.device)
        status = "finished"
        self.good = tensors_of(self.model)
        if resumed is not None:
            self._take_up(resumed)
        try:
            first = self.before is None
            if first:
                self._show("verification before")
                self.before = observe(self.model, self.feed, self.profile, self.settings.output).verification
            if resumed is None:
                self._row(0, "", 0.0, {}, started)
                if first and self.stages and self.before is not None and self.before.verdict == "restored":
                    logger.warning("the features are %s before anything is done: training may do harm", self.before)
            with steady(self.model, self.method.dropout), self.method.prepared(self.model):
                if type(self.method).prepared is not Method.prepared:
                    self.watch.forget()
                self._all_stages(resumed)
        except KeyboardInterrupt:
            if world_size() > 1:  # the others may be elsewhere: nothing can be asked of them any more
                raise
            put_back(self.model, self.good)
            status = "interrupted"
            logger.warning("interrupted after %s; this is the state reached then", counted(self._epochs(), "epoch"))
        except DivergedError as error:
            error.adaptation = self._result("diverged", started)
            raise
        return self._result(status, started)

    def _take_up(self, resumed: checkpoints.Checkpoint) -> None:
        """What an earlier process had reached; the model gets it when it has been looked at as it came."""
        self.history, self.good, self.selected = resumed.history, resumed.state, resumed.selected
        for row in self.history:
            self.choice.consider(row)

    def _epochs(self) -> int:
        return self.history[-1].epoch if self.history else 0

    def _row(self, number: int, stage: str, rate: float, losses: dict[str, float], started: float) -> None:
        """Look at the model as it is now, write that down, and see whether it is the one to keep."""
        self._show(f"verification of epoch {number}", VERIFIED_PER_EPOCH)
        seen = self.watch()
        divergence = seen.verification.divergence if seen.verification else None
        seconds = round(time.perf_counter() - started, 4) if number else 0.0
        row = Epoch(number, stage, rate, losses, divergence, seconds, seen.marginals, seen.entropy, seen.confidence)
        # in one step, since Ctrl-C may come at any other; until there is a copy, the state is the model's own
        self.history, self.good = [*self.history, row], {}
        self.good = tensors_of(self.model)  # the copy before is gone by now: it may be gigabytes
        if self.choice.consider(row) and self.settings.keep == "selected":
            self.selected = self.good
        if self.settings.on_epoch is not None:
            with modes(self.model):
                self.model.eval()
                self.settings.on_epoch(self.model, row)

    def _result(self, status: str, started: float) -> Adaptation:
        self.model.eval()
        if self.selected:
            put_back(self.model, self.selected)
        selected = self.choice.kept.epoch if self.choice.kept is not None else 0
        kept = selected if self.selected else self._epochs()
        self._show("verification after")
        try:
            after = self.before
            if self.profile is not None and (kept > 0 or after is None):
                found = observe(self.model, self.feed, self.profile, self.settings.output).verification
                after = None if found is None else replace(found, adapted=kept > 0)
        except KeyboardInterrupt:  # the work is done: what is missing is the judgement
            if world_size() > 1:
                raise
            after = None
            logger.warning("the last verification was interrupted; ask shiftmend.verify for it")
        adapted = fingerprints.weights(self.model)
        check_same(adapted, "adapted model", self.feed.device)
        self.manifest |= {
            "status": status,
            "selected_epoch": selected,
            "epochs": self._epochs(),
            "seconds": round(time.perf_counter() - started, 3),
            "seconds_in_epochs": round(sum(row.seconds for row in self.history), 3),
            "verified_per_epoch": min(VERIFIED_PER_EPOCH, self.feed.samples),
            "verification": {
                name: asdict(value) | {"verdict": value.verdict}
                for name, value in (("before", self.before), ("after", after))
                if value is not None
            },
            "adapted_weights": adapted,
            **({"compile": self.compile} if self.settings.compile else {}),  # asked for, and it may not have worked
        }
        return Adaptation(self.model, self.history, self.manifest, self.before, after, selected)

    def _all_stages(self, resumed: checkpoints.Checkpoint | None) -> None:
        if resumed is not None:
            put_back(self.model, resumed.state)
            logger.info("going on from %s after epoch %d", self.path, self._epochs())
        objective = self.method.objective(self.profile, self.feed.device)
        check_objective(objective, self.method, self.stages)
        self.bar.advance(self._epochs())
        for index, stage in enumerate(self.stages):
            if resumed is not None and index < resumed.stage:
                continue
            optimiser = fresh_optimiser(self.model, stage, self.method.momentum)
            done = 0
            if resumed is not None and index == resumed.stage:
                done = resumed.epoch
                if optimiser is not None:
                    checkpoints.restore_momentum(optimiser, self.model, resumed.momentum)
            steps = Steps(
                self.model,
                self.feed,
                self.taps,
                objective,
                optimiser,
                precision=self.precision,
                dropout=self.method.dropout,
                capture=self.capture,
                compile=self.compile,
                what=stage.name,
            )
            for epoch in range(done, stage.epochs):
                self._epoch(stage, steps)
                # what was refused once would be again, and why has been said
                self.capture, self.compile = self.capture and not steps.refused, steps.compile
                self._checkpoint(index, epoch + 1, optimiser)
                self.bar.advance(1, f"{stage.name}  {_note(self.history[-1])}")

    def _checkpoint(self, stage: int, epoch: int, optimiser: optim.SGD | None) -> None:
        if self.path is None or rank() > 0:
            return
        state = self.history, self.model, optimiser, self.selected, self.feed.fits
        try:
            checkpoints.save(self.path, self.name, stage, epoch, *state)
        except OSError as error:  # a full disk is no reason to lose the run
            logger.warning("the checkpoint %s could not be written (%s); going on without", self.path, error.strerror)

    def _epoch(self, stage: Stage, steps: Steps) -> None:
        number = self._epochs() + 1
        started = time.perf_counter()
        self._show(f"targets of epoch {number}")
        targets = self._targets() if self.method.by_sample else None
        self._show(f"{stage.name}  {_note(self.history[-1])}")
        enter_adapting_modes(self.model, self.method.dropout)
        sums, batches = steps.epoch(self.settings.seed, number, targets)
        self.model.eval()
        means = (torch.stack([*sums.values()]).cpu().double() / batches).tolist() if sums else []
        losses: dict[str, float] = dict(zip(sums, means, strict=True))
        finite_losses = all(map(math.isfinite, losses.values()))
        if not finite_losses or not still_finite(self.model, self.good):
            put_back(self.model, self.good)
            rate, advice = f", learning rate {stage.learning_rate:g}", "lower the learning rate"
            if not stage.parameters:  # nothing is trained: it is the inputs that are too large
                rate, advice = "", "look at the inputs and at preprocess"
            if self.before is not None and not math.isfinite(self.before.divergence):
                advice = "the features were so before anything was adapted: look at the inputs and at preprocess"
            raise DivergedError(
                f"{'weights' if finite_losses else 'the loss'} of {self.method.name} became NaN or infinite in epoch "
                f"{number} ({stage.name}{rate}); {advice}. The error's "
                "`adaptation` is what had been reached"
            )
        self._row(number, stage.name, stage.learning_rate, losses, started)

    def _targets(self) -> Tensor:
        """What the method knows of each sample, in the order of the feed and where its indices lie."""
        targets: Any = self.method.targets(self.network, self.look)
        if not isinstance(targets, Tensor):
            raise AdaptationError(f"`targets` of {self.method.name} gave {brief(targets)}, expected a tensor")
        assert self.feed.inputs is not None, "adapt refuses streamed data for such a method"
        more = len(targets) > self.feed.samples
        if len(targets) != self.feed.samples:
            raise AdaptationError(
                f"{self.method.name} needs one label a sample: there are {len(targets)} for {self.feed.samples} samples"
                + (", from a model with several answers a sample" if more and not self.method.takes_labels else "")
            )
        return targets.to(self.feed.device)


def _note(row: Epoch) -> str:
    parts = {"loss": row.loss, "slices": row.verification}
    return "  ".join(f"{name} {value:.4f}" for name, value in parts.items() if value is not None)
