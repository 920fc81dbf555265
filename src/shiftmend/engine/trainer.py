"""The training loop of an adaptation: stages, rounds, history, checkpoints and interruptions.

A round is one epoch of a fixed schedule, or a few dozen steps with `epochs="auto"` (`engine/schedule.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim

from shiftmend.accelerate.precision import Precision
from shiftmend.distributed.collectives import all_processes, all_true, check_same
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine.history import Choice, Epoch
from shiftmend.engine.method import Method, Network, Stage, check_objective
from shiftmend.engine.modes import enter_adapting_modes, hold_layer_options, is_finite, unfreeze
from shiftmend.engine.rate_search import find_rate
from shiftmend.engine.schedule import Rounds, has_reached_home, has_settled, has_worsened, plan_rounds
from shiftmend.engine.step import Steps
from shiftmend.errors import AdaptationError, DivergedError
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.model_state import restore, snapshot
from shiftmend.introspection.modes import preserve_modes
from shiftmend.introspection.taps import Tap
from shiftmend.passes.evaluation_pass import ActivationReader
from shiftmend.profiles.profile import Profile
from shiftmend.utils.checks import brief
from shiftmend.utils.processes import of_first_process, rank
from shiftmend.utils.progress import Bar, PassProgress
from shiftmend.verification.signals import SignalReader

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)

VERIFIED_PER_EPOCH = 4096
"""Number of target samples for the signals of each epoch, in the precision of the steps. Before and after adapting, all
samples are verified in full precision."""

Keep = Literal["last", "selected"]
OnEpoch = Callable[[nn.Module, Epoch], None]
"""Function that is called with the model in eval mode and its row of the history, before the first and after each
epoch. The model is the one being trained; its weights may be in channels-last format.

The model is the one at work: weights of its convolutions may lie in memory with the channels innermost.
"""


class Trainer:
    """The training loop of one run: stages, epochs and steps, as a method plans them.

    Args:
        network: The model, with its blocks, taps and head.
        feed: The target data.
        profile: The source's profile, on the device of the feed.
        method: The method.
        stages: Its stages.
        taps: Taps whose activations its objective reads.
        signals: Reader of the label-free signals, used after each epoch.
        run: Identity of the run; a checkpoint of another run is refused.
        seed: Seed of the order of the batches and of all other random numbers.
        keep: Whether the state of the selected epoch is kept in addition to the last one.
        on_epoch: Function that is called before the first and after each epoch.
        checkpoint: File to save the state to after each epoch.
        precision: A context manager for forward passes of training steps.
        capture: Whether steps may be captured as CUDA graphs.
        compile: Whether captured steps are compiled.
    """

    def __init__(
        self,
        network: Network,
        feed: Feed,
        profile: Profile | None,
        method: Method,
        stages: list[Stage],
        taps: dict[str, Tap],
        signals: SignalReader,
        *,
        run: str,
        seed: int,
        keep: Keep,
        on_epoch: OnEpoch | None,
        checkpoint: Path | None,
        precision: Precision,
        capture: bool,
        compile: bool,
    ) -> None:
        self.network, self.model, self.feed, self.profile = network, network.model, feed, profile
        self.method, self.stages, self.taps, self.signals = method, stages, taps, signals
        self.run, self.seed, self.keep, self.on_epoch, self.path = run, seed, keep, on_epoch, checkpoint
        self.precision, self.capture, self.compile = precision, capture, compile
        self.read_activations = ActivationReader(self.model, feed, precision, capture)
        self.home: dict[str, float] = {}
        """Divergences of held-out home data by name; empty without a rehearsal."""
        if profile is not None and profile.rehearsal is not None and any(stage.settles for stage in stages):
            seen = min(feed.known_samples or VERIFIED_PER_EPOCH, VERIFIED_PER_EPOCH)
            self.home = {name: profile.rehearsal.home_level(name, seen) for name in ("slices", "marginals")}
        self.bar = Bar()
        self.history: list[Epoch] = []
        self.choice = Choice(
            entropy_may_decide=not method.minimises_entropy,
            latest=any(stage.settles for stage in stages),
            refining=method.refining,
        )
        self.good: dict[str, Tensor] = {}
        """State after the last complete epoch."""
        self.selected: dict[str, Tensor] = {}
        """State of the selected epoch, if it should be kept."""
        self.search: dict[str, Any] | None = None
        """The search for the learning rate in the form of the manifest, if there was one."""
        self._resumed: checkpoints.Checkpoint | None = None
        if method.reads_inputs:
            method.begin(self.model, feed.first(2), profile)
        if self.path is not None:
            checkpoints.check_place(self.path)
            checkpoints.check_model(self.model)

    @property
    def epochs(self) -> int:
        """Number of complete epochs or rounds."""
        return self.history[-1].epoch if self.history else 0

    @contextmanager
    def hold_checkpoint(self) -> Iterator[None]:
        """Lock the checkpoint, if there is one, for the duration of the run."""
        mine = checkpoints.lock(self.path) if self.path is not None and rank() == 0 else nullcontext(True)
        with mine as alone:
            with all_processes():
                alone = all_true(alone, self.feed.device)
            if not alone:
                raise AdaptationError(
                    f"Expected a checkpoint of its own, got {self.path}, which another run uses. Let that run finish, "
                    "or name another file."
                )
            yield

    def load_checkpoint(self) -> None:
        """Load the history of an earlier process; the model gets its state when training begins."""
        self.good = snapshot(self.model)
        self._resumed = checkpoints.load(self.path, self.run) if self.path is not None else None
        position = (self._resumed.stage, self._resumed.epoch) if self._resumed is not None else None
        check_same(str(position), "checkpoint", self.feed.device)
        if self._resumed is not None:
            self.history, self.good = self._resumed.history, self._resumed.model
            self.selected = self._resumed.selected
            for row in self.history:
                self.choice.consider(row)

    def fit(self) -> None:
        """Run all stages, from the beginning or from the checkpoint.

        Raises:
            DivergedError: If the loss or a weight is no longer finite. The model is restored to the last complete
                epoch.
        """
        if self._resumed is None:
            self._add_row(0, "", 0.0, {}, time.perf_counter())
        with hold_layer_options(self.model, self.method.dropout), self.method.prepared(self.model):
            if type(self.method).prepared is not Method.prepared:
                self.signals.forget()
            if self._resumed is not None:
                assert self.path is not None
                checkpoints.check_fits(self._resumed, self.path, self.model, [stage.name for stage in self.stages])
                restore(self.model, self._resumed.model)
                logger.info("resuming from %s after epoch %d", self.path, self.epochs)
            self.bar.advance(self.epochs)
            first = self._resumed.stage if self._resumed is not None else 0
            over = False
            for index in range(first, len(self.stages)):
                self._search_rate(index)
                stage = self.stages[index]
                refines = stage.name in self.method.refining
                if over and not refines:
                    continue
                objective = self.method.objective_of(stage, self.profile, self.feed.device)
                check_objective(objective, self.method, [stage])
                if refines and self.selected and not (self._resumed is not None and index == self._resumed.stage):
                    restore(self.model, self.selected)
                rounds = plan_rounds(stage, self.feed.steps_per_epoch)
                trained = unfreeze(self.model, stage)
                optimiser = self.method.make_optimiser(trained, stage) if trained else None
                done = 0
                if self._resumed is not None and index == self._resumed.stage:
                    done = self._resumed.epoch
                    if optimiser is not None:
                        checkpoints.restore_optimiser(optimiser, self.model, self._resumed.optimiser)
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
                    stage=stage.name,
                    each=rounds.steps,
                    warm_up=0 if any(earlier.parameters for earlier in self.stages[:index]) else rounds.warm_up,
                )
                while not self._is_over(stage, rounds, done):
                    self._run_round(stage, steps, done)
                    done += 1
                    # Steps that could not be captured in one stage cannot be captured in later ones either.
                    self.capture, self.compile = self.capture and not steps.refused, steps.compile
                    self._save(index, done, optimiser)
                    self.bar.advance(1, f"{stage.name}  {_note(self.history[-1])}")
                self.bar.advance(rounds.at_most - done)
                if stage.settles and self._has_worsened(done):
                    logger.info("the slices got worse; restoring ends in stage %s", stage.name)
                    over = True
                elif stage.settles and self._has_reached_home():
                    logger.info("features are as close to the profile as home's; restoring ends in %s", stage.name)
                    over = True

    def _search_rate(self, index: int) -> None:
        """Find the learning rate before the first stage that searches; a resumed run takes what was found."""
        if not self.stages[index].searches or self.search is not None:
            return
        first = next(stage for stage in self.stages if stage.searches)
        objective = self.method.objective_of(first, self.profile, self.feed.device)
        check_objective(objective, self.method, [first])
        assert objective is not None
        self.search = self._resumed.search if self._resumed is not None else None
        if self.search is None:
            self.show_pass("search for the learning rate")
            found = find_rate(
                self.model,
                self.feed,
                self.taps,
                objective,
                self.method,
                first,
                precision=self.precision,
                seed=self.seed,
            )
            logger.info("learning rate %g: %s", found.rate, found.reason)
            self.search = found.to_json()
        factor = self.search["rate"] / first.learning_rate
        self.stages = [
            replace(stage, learning_rate=stage.learning_rate * factor) if stage.searches else stage
            for stage in self.stages
        ]

    def _is_over(self, stage: Stage, rounds: Rounds, done: int) -> bool:
        """Return whether a stage ends after so many rounds, judged by the history alone, as a resumed run needs it."""
        if stage.name in self.method.refining and done > 0 and self.choice.kept is not self.history[-1]:
            return True
        if done >= rounds.at_most or not stage.settles:
            return done >= rounds.at_most
        terms = self.history[-1].losses.keys()
        losses = [row.loss for row in self.history if row.loss is not None and row.losses.keys() == terms]
        return has_settled(losses, done) or self._has_worsened(done) or self._has_reached_home()

    def _has_reached_home(self) -> bool:
        return self.epochs > 0 and has_reached_home(self.history[-1].signals, self.home)

    def _has_worsened(self, done: int) -> bool:
        return has_worsened([row.verification for row in self.history if row.verification is not None], done)

    def restore(self) -> None:
        """Restore the model to the last complete epoch."""
        restore(self.model, self.good)

    def show_pass(self, what: str, limit: int | None = None) -> None:
        """Show the next pass over the data, which may take long, on the progress bar."""
        known = self.feed.known_samples
        self.feed.on_batch = PassProgress(
            self.bar, what, known if known is None or limit is None else min(known, limit)
        )

    def _run_round(self, stage: Stage, steps: Steps, done: int) -> None:
        number = self.epochs + 1
        started = time.perf_counter()
        self.show_pass(f"targets of epoch {number}")
        targets = self._make_targets() if self.method.by_sample else None
        self.show_pass(f"{stage.name}  {_note(self.history[-1])}")
        enter_adapting_modes(self.model, self.method.dropout)
        before = self.history[-1].steps or 0
        began = self.history[-1 - done].steps or 0  # Steps when the stage began.
        if self.method.reads_inputs and not stage.parameters:
            sums, batches = self._read_inputs()
        else:
            sums, batches = steps.run(self.seed, number, before - began, targets)
        self.model.eval()
        means = (torch.stack([*sums.values()]).cpu().double() / batches).tolist() if sums else []
        losses: dict[str, float] = dict(zip(sums, means, strict=True))
        finite_losses = all(map(math.isfinite, losses.values()))
        if not finite_losses or not is_finite(self.model, self.good):
            self.restore()
            rate, advice = f", learning rate {stage.learning_rate:g}", "Lower the learning rate"
            if not stage.parameters:  # Nothing is trained, so the inputs are too large.
                rate, advice = "", "Check the inputs and preprocess"
            if not math.isfinite(self.history[0].verification or 0.0):
                advice = "Check the inputs and preprocess: the features were so before anything was adapted"
            raise DivergedError(
                f"{'Weights' if finite_losses else 'The loss'} of {self.method.name} became NaN or infinite in epoch "
                f"{number} ({stage.name}{rate}). {advice}. The error's `adaptation` holds the last good epoch."
            )
        self._add_row(number, stage.name, stage.learning_rate, losses, started, before + batches)

    def _read_inputs(self) -> tuple[dict[str, Tensor], int]:
        """Let the method adapt to the inputs without training; return no losses and no steps."""
        with all_processes(), torch.no_grad():
            self.method.adapt_to_inputs(self.model, self.feed.batches(), self.profile)
        return {}, 0

    def _add_row(
        self, number: int, stage: str, rate: float, losses: dict[str, float], started: float, steps: int = 0
    ) -> None:
        """Measure the signals of the current model, add a row to the history, and choose the epoch to keep."""
        self.show_pass(f"verification of epoch {number}", VERIFIED_PER_EPOCH)
        signals = self.signals().values
        seconds = round(time.perf_counter() - started, 4) if number else 0.0
        row = Epoch(number, stage, rate, losses, seconds, signals, steps)
        # One statement, because Ctrl-C may arrive between any two. Until there is a copy, the state is the model's own.
        self.history, self.good = [*self.history, row], {}
        self.good = snapshot(self.model)  # The earlier copy, which may be gigabytes, is freed first.
        if self.choice.consider(row) and self.keep == "selected":
            self.selected = self.good
        if self.on_epoch is not None:
            with preserve_modes(self.model):
                self.model.eval()
                self.on_epoch(self.model, row)

    def _save(self, stage: int, epoch: int, optimiser: optim.Optimizer | None) -> None:
        if self.path is None or rank() > 0:
            return
        state = self.history, self.model, optimiser, self.selected, self.feed.fits, self.feed.batch_size, self.search
        try:
            checkpoints.save(self.path, self.run, stage, epoch, *state)
        except OSError as error:  # A full disk must not end the run.
            logger.warning("the checkpoint %s could not be written (%s); training continues", self.path, error.strerror)

    def _make_targets(self) -> Tensor:
        """Compute the method's targets, one per sample, in the order of the feed."""
        targets: Any = self.method.targets(self.network, self.read_activations)
        if not isinstance(targets, Tensor):
            raise AdaptationError(f"Expected targets() of {self.method.name} to return a tensor, got {brief(targets)}.")
        assert self.feed.inputs is not None, "adapt refuses streamed data for such a method"
        more = len(targets) > self.feed.samples
        if len(targets) != self.feed.samples:
            several = more and not self.method.takes_labels
            raise AdaptationError(
                f"Expected one label a sample for {self.method.name}, got {len(targets)} for {self.feed.samples}."
                + (" The model has several predictions a sample." if several else "")
            )
        return targets.to(self.feed.device)


def _note(row: Epoch) -> str:
    parts = {"loss": row.loss, "slices": row.verification}
    return "  ".join(f"{name} {value:.4f}" for name, value in parts.items() if value is not None)
