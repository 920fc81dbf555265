"""`stream`: online adaptation. Each batch is predicted first, and then used for one update."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from shiftmend.accelerate.cuda_graphs import keep_buffers_in_place
from shiftmend.accelerate.precision import nothing_cached
from shiftmend.adaptation.result import Estimates, environment
from shiftmend.adaptation.run import check_profile, examine
from shiftmend.engine.method import Method, check_objective, compute_loss, describe_method, plan_stages
from shiftmend.engine.modes import (
    enter_adapting_modes,
    hold_layer_options,
    is_finite,
    make_ordinary,
    unfreeze,
)
from shiftmend.errors import AdaptationError, DataError, ShiftmendError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.inputs.sources import is_inputs_and_labels
from shiftmend.introspection.call import call_model
from shiftmend.introspection.input_map import has_input_map
from shiftmend.introspection.model_state import restore, snapshot
from shiftmend.introspection.modes import find_batch_norms
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.introspection.validate import check_model, copy_model, unwrap
from shiftmend.methods import METHODS
from shiftmend.methods import method as make_method
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import InputSummary
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import UNTOUCHED
from shiftmend.stats.histograms import CountTracker
from shiftmend.stats.moments import Moments
from shiftmend.stats.slices import Slices
from shiftmend.utils.checks import brief, check_function, counted, is_whole, kind
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.processes import world_size
from shiftmend.utils.tensor_tree import Inputs
from shiftmend.verification.class_watch import SUSPECT, ClassWatch, Doubt, Glimpse
from shiftmend.verification.estimate import OTHER_WEIGHTS, Estimate, Estimator
from shiftmend.verification.harm import (
    OTHER_SAMPLES,
    OTHER_SHARES,
    answers_other_classes,
    describe_harm,
    find_answers,
    find_harm,
    looks_like_selection,
)
from shiftmend.verification.matched_inputs import InputMatcher, keeps_classes
from shiftmend.verification.reading import Reading, agree, measure_outside, summarise
from shiftmend.verification.signals import VERIFIED, Tally, sample_positions
from shiftmend.verification.verdict import Verification, judge

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Second:
    """Logits `[M, units]` with matched inputs, the moments of the inputs, and whether matching keeps few classes."""

    logits: Tensor
    moments: Moments
    keeps_classes: bool


@dataclass(frozen=True)
class _Seen:
    """Logits `[M, units]` and histogram counts of one batch in the window, and a second opinion if there is one."""

    tally: Tally
    logits: Tensor
    inputs: int
    second: _Second | None = None

    @staticmethod
    def of(activations: Mapping[str, Tensor], inputs: int, home: Profile, second: _Second | None = None) -> _Seen:
        tally = Tally(home)
        tally.update(activations, inputs)
        return _Seen(tally, sample_positions(activations["logits"], inputs, 0).float(), inputs, second)

    @staticmethod
    def join(batches: Sequence[_Seen], home: Profile) -> Reading:
        """Compute the signals of several batches together."""
        tally = Tally(home)
        for batch in batches:
            tally.add(batch.tally)
        logits = torch.cat([batch.logits for batch in batches])
        # Signals need float64, which some accelerators lack.
        logits = logits if logits.device.type in ("cpu", "cuda") else logits.cpu()
        return summarise(tally, logits, home.rehearsal)


class Stream:
    """An online adapter, made by `shiftmend.stream`.

    `step(batch)` returns the model's output for the batch, and then updates the model once with the same batch. The
    output is computed before the update, with BatchNorm on the statistics of the batch, as in the paper's online
    experiments. The caller's model is not changed. `snapshot()` returns a plain copy of the adapted model at any time.
    A stream is thread-safe: concurrent steps run one after the other.

    Updates pause while the predicted classes of the latest batches differ strongly from those of home or of earlier
    batches, as in a stream that is sorted by class. During a pause, batches are predicted with the BatchNorm statistics
    that were learnt before. The first pause logs a warning. Behind another device, the untouched model is asked a
    second time, with inputs that are matched to home: only answers that stay the same speak of other classes. A warning
    is logged as well if answers fall into other classes and neither the device nor the classes are for sure the cause.

    Attributes:
        steps: Number of batches so far.
        losses: Terms of the loss in the last update, by name.
        paused: Number of batches without an update because of their classes.
        warnings: All warnings so far, each once.

    Example:
        >>> import torch, shiftmend
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).eval()
        >>> online = shiftmend.stream(model, method="adabn")
        >>> _ = online.step(torch.randn(16, 4))
        >>> online.steps
        1
    """

    def __init__(
        self,
        model: nn.Module,
        profile: Profile | None,
        method: Method,
        *,
        preprocess: Preprocess | None,
        output: Entry,
        device: torch.device,
        window: int,
        guard: bool,
    ) -> None:
        self.method, self.profile, self.preprocess, self.output = method, profile, preprocess, output
        self.device = device
        self._lock = threading.RLock()
        self.steps = 0
        self.losses: dict[str, float] = {}
        self.paused = 0
        self._has_learnt = False
        self.warnings: list[str] = []
        self._warned_of: set[str] = set()
        self._source = model
        self._model = copy_model(model).to(device)
        self._objective = method.objective(profile, device)
        self._optimiser: optim.Optimizer | None = None
        self._what = ""
        self._taps: dict[str, Tap] | None = None
        self._read_by_loss: tuple[str, ...] = ()
        """Taps that the loss reads; the others are used for verification only."""
        self._home = profile.to(device) if profile is not None else None
        self._judge: Slices | None = self._home.slices["verification"] if self._home is not None else None
        self._seen: deque[tuple[CountTracker, int]] = deque(maxlen=window)
        self._counted = 0
        self._watch: ClassWatch | None = None
        self._matcher: InputMatcher | None = None
        alone = world_size() == 1  # Each process has a stream of its own, so counts are not summed over processes.
        if profile is not None and guard and alone and method.adapts and _tells_classes(profile):
            self._watch = ClassWatch(profile, window)
            # A model that maps its inputs already was mended for its device.
            self._matcher = None if has_input_map(model) else InputMatcher(profile, window)
        rehearsed = profile is not None and profile.rehearsal is not None
        self._compares = alone and (self._watch is not None or rehearsed)
        self._untouched = copy_model(model).to(device).eval() if self._compares and method.adapts else None
        self._window: deque[tuple[_Seen, _Seen]] = deque(maxlen=window)
        self._estimator: Estimator | None = None

    def __repr__(self) -> str:
        with self._lock:
            steps, batches, judged = self.steps, len(self._seen), self.verification
        line = f"Stream adapted by {self.method.name}, {counted(steps, 'step')}"
        line += f", {self.paused} of them not learnt from" if self.paused else ""
        return line if judged is None else f"{line}\n  over the last {counted(batches, 'batch', 'batches')}: {judged}"

    @torch.inference_mode(False)
    @nothing_cached()
    def step(self, batch: Any) -> Tensor:
        """Predict a batch, then update the model with it.

        Args:
            batch: Inputs `[N, ...]`, or a tuple `(inputs, ...)`, of which only the inputs are used.

        Returns:
            The model's output for the batch, computed before the update.

        Raises:
            DataError: If the batch cannot be used. The model is unchanged in that case.
        """
        with self._lock:
            return self._step(batch)

    def _step(self, batch: Any) -> Tensor:
        inputs = self._inputs(batch)
        home = None if self.profile is None else self.profile.inputs
        if isinstance(inputs, Tensor) and isinstance(home, InputSummary) and home.has_shape(inputs.shape):
            raise DataError(
                f"Expected a batch, got {list(inputs.shape)}, the shape of one sample. Pass a batch of one: "
                "inputs.unsqueeze(0)."
            )
        if self._taps is None:
            self._prepare(inputs)
        untouched = self._look(inputs)
        doubt = self._find_doubt(untouched)
        adapts = self.method.adapts and self._are_enough(len(inputs)) and doubt is None
        if doubt is not None and doubt.learnt_from_few:
            self._start_anew()
        before = snapshot(self._model) if adapts else {}
        self._model.eval()
        if adapts:
            enter_adapting_modes(self._model)
        assert self._taps is not None
        trains = adapts and self._optimiser is not None
        good, moved = True, False
        losses: dict[str, float] = {}
        # A layer that replaces a buffer by a new tensor would keep the autograd graph of this step alive.
        bring_back = keep_buffers_in_place(self._model)
        try:
            with (
                hold_layer_options(self._model),
                attach_taps(self._model, self._taps) as recorder,
                torch.set_grad_enabled(trains),
            ):
                result = pick(call_model(self._model, inputs), self.output, "the model")
                activations = recorder.read()
                if trains:
                    losses = self._differentiate(activations)
            bring_back()
            if losses and self._optimiser is not None:
                moved = True
                self._optimiser.step()
            if adapts:
                good = bool(losses) == trains and is_finite(self._model, before)
            if self._judge is not None and good:
                self._count({name: activations[name].detach() for name in VERIFIED}, len(inputs), untouched)
        except BaseException as error:  # The forward pass has already updated BatchNorm, so its state is restored.
            bring_back()
            self._take_back(before, moved)
            if isinstance(error, Exception) and not isinstance(error, ShiftmendError):
                check_model(self._model, [inputs])  # Raises one clear sentence if the inputs are the cause.
            raise
        if not good:
            self._take_back(before, True)
            logger.warning("batch %d led to values that are not finite; it was not learnt from", self.steps + 1)
        self.losses = losses if good and losses else self.losses
        self._model.eval()
        self._has_learnt |= adapts and good
        self.steps += 1
        self._report(doubt)
        return result.detach()

    def _inputs(self, batch: Any) -> Inputs:
        """Validate the inputs of a batch and move them to the device, as `adapt` does."""
        if isinstance(batch, tuple | list) and batch:
            if isinstance(batch[0], tuple | list | Mapping) and not is_inputs_and_labels(batch):
                raise DataError(
                    f"Expected one batch, inputs or (inputs, ...), got {kind(batch)} that begins with "
                    f"{kind(batch[0])}. Pass several batches one after the other."
                )
            batch = (batch[0], None)
        if isinstance(batch, Dataset | DataLoader):
            raise DataError(f"Expected one batch, got {kind(batch)}. Call step for each of its batches.")
        feed = Feed(
            batch,
            batch_size=1 << 30,
            device=self.device,
            preprocess=self.preprocess,
            limit=1 << 62,  # Querying the free memory would take as long as a small step.
            columns=() if self.profile is None else self.profile.inputs.columns,
            what="batch",
        )
        return next(feed.batches())

    def _prepare(self, inputs: Inputs) -> None:
        """Find taps and trained parameters by running the first batch."""
        # A copy of the inputs, since the model may work in place.
        check_model(self._model, [inputs[:2].clone()], output=self.output, original=self._source)
        if self.profile is not None:
            self.profile.check_taps(self._model, inputs[:2].clone())
        network, taps = examine(self._model, inputs[:2].clone(), self.profile, self.method, None, self.output)
        stages = plan_stages(self.method, network, self.profile)
        if len(stages) > 1:
            raise AdaptationError(
                f"Expected a method of one stage for a stream, got {self.method.name} with {len(stages)}. Use "
                "shiftmend.adapt, or a single stage."
            )
        check_objective(self._objective, self.method, stages)
        if stages:
            trained = unfreeze(self._model, stages[0])
            self._optimiser = self.method.make_optimiser(trained, stages[0]) if trained else None
            self._what = stages[0].name
        self._read_by_loss = tuple(taps)
        if self.profile is not None:
            taps = {**{name: self.profile.specs[name] for name in VERIFIED}, **taps}
        self._taps = taps

    def _look(self, inputs: Inputs) -> _Seen | None:
        """Run the untouched model on the batch. Its predictions tell the classes and are the basis of estimates."""
        if self._untouched is None or self._home is None:
            return None
        taps = {name: self._home.specs[name] for name in VERIFIED}
        try:
            with torch.no_grad(), attach_taps(self._untouched, taps) as recorder:
                # A copy of the inputs, since the model may work in place.
                call_model(self._untouched, inputs.clone())
                seen, second = recorder.read(), None
                moments = None if self._matcher is None else self._matcher.read(inputs)
                if self._matcher is not None and isinstance(inputs, Tensor) and moments is not None:
                    call_model(self._untouched, self._matcher.match(inputs, moments))
                    logits = sample_positions(recorder.read()["logits"], len(inputs), 0).float()
                    second = _Second(logits, moments, keeps_classes(inputs))
                return _Seen.of(seen, len(inputs), self._home, second)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, ShiftmendError):
                check_model(self._untouched, [inputs])  # Raises one clear sentence if the inputs are the cause.
            raise

    def _are_enough(self, samples: int) -> bool:
        """Return whether a batch has enough samples for an update; warn if it has not."""
        smallest = max(2 if find_batch_norms(self._model) else 1, self.method.smallest_batch(self.profile))
        if samples >= smallest:
            return True
        few = "a single sample has no distribution" if samples < 2 else f"{samples} samples are too few"
        logger.warning("%s to learn from: predicted with what was learnt so far", few)
        return False

    def _find_doubt(self, untouched: _Seen | None) -> Doubt | None:
        """Return the reason why a batch should not be used for an update; None if it should."""
        if self._watch is None or untouched is None:
            return None
        return self._watch.judge(_glimpse(untouched))

    def _start_anew(self) -> None:
        """Reset the model and the optimiser to their initial state."""
        if self._has_learnt and self._untouched is not None:
            self._take_back(snapshot(self._untouched), True)
            self._has_learnt = False
            self._warn("forgot", "what was learnt so far came from few classes and was taken back")

    def _report(self, doubt: Doubt | None) -> None:
        """Count a batch without an update, and warn once for each kind of doubt, or of a suspect stream."""
        if doubt is not None:
            self.paused += 1
            self._warn(
                doubt.reason,
                f"batch {self.steps}: {doubt.reason}; such batches are predicted with what was learnt so far, and not "
                "learnt from unless guard=False",
            )
        elif self._watch is not None and not self.paused and self._watch.is_suspect:
            self._warn(SUSPECT, f"batch {self.steps}: {SUSPECT}; compare with the model as it came")

    def _warn(self, kind_of_warning: str, sentence: str) -> None:
        """Log and store a warning, once for each kind."""
        if kind_of_warning not in self._warned_of:
            self._warned_of.add(kind_of_warning)
            self.warnings.append(sentence)
            logger.warning("%s", sentence)

    def _differentiate(self, activations: dict[str, Tensor]) -> dict[str, float]:
        """Compute gradients, unless the loss is not finite; return the terms of the loss."""
        assert self._objective is not None
        assert self._optimiser is not None
        seen = {name: activations[name] for name in self._read_by_loss}
        terms, total = compute_loss(self._objective, seen, self._what)
        if not bool(torch.isfinite(total)):
            return {}
        losses = {name: float(term.detach()) for name, term in terms.items()}
        self._optimiser.zero_grad(set_to_none=True)
        total.backward()
        return losses

    def _take_back(self, before: dict[str, Tensor], momentum: bool) -> None:
        """Restore the model, and drop optimiser state that the failed step may have written."""
        restore(self._model, before)
        self._model.eval()
        if momentum and self._optimiser is not None:
            self._optimiser.state.clear()

    def _count(self, activations: Mapping[str, Tensor], inputs: int, untouched: _Seen | None) -> None:
        """Add a batch to the window: the outputs that were returned, and those of the untouched model."""
        assert self._judge is not None
        assert self._home is not None
        if not self._compares:
            # Only slices are counted, because histograms of all features would slow a stream down.
            features = activations["features"]
            counter = self._judge.histogram.new_tracker()
            rows = sample_positions(features, inputs, self._counted)
            for part in self._judge.projector.project_in_parts(rows):
                counter.update(part, len(features) / len(rows))
        else:
            own = _Seen.of(activations, inputs, self._home)
            counter = own.tally.slices
            self._window.append((own if untouched is None else untouched, own))
            if self._watch is not None and untouched is not None:
                self._watch.add(_glimpse(untouched))
                if self._matcher is not None and untouched.second is not None:
                    self._matcher.add(untouched.second.moments)
        self._seen.append((counter, inputs))
        self._counted += inputs

    @property
    def verification(self) -> Verification | None:
        """Verdict, without labels, on the outputs of the last `window` batches; None without a profile or a batch.

        Only slices (histograms of random projections of the features) decide.
        """
        with self._lock:
            seen = list(self._seen)
        if self._judge is None or self.profile is None or not seen:
            return None
        home = self._judge.histogram
        every = home.new_tracker()
        every.counts = torch.stack([counter.counts for counter, _ in seen]).sum(0)
        every.samples = sum(counter.samples for counter, _ in seen)
        return judge(float(every.divergence(home)), None, sum(inputs for _, inputs in seen), self.profile)

    def _read_window(self) -> tuple[Reading, Reading] | None:
        """Read the last `window` batches: what the untouched model predicts for them, and what the stream returned.

        The model changes from batch to batch, so the second reading is not that of the present model.

        Returns:
            Both readings, over fewer batches at the start of a stream. None without a profile or a batch, and for
            streams that do not keep outputs to compare.
        """
        with self._lock:
            window = list(self._window)
        if not window or self._home is None:
            return None
        before, after = ([both[place] for both in window] for place in (0, 1))
        return _Seen.join(before, self._home), _Seen.join(after, self._home)

    @property
    def estimate(self) -> Estimates | None:
        """Estimated scores over the last batches, of the untouched model and of the returned predictions.

        None without a rehearsal or a batch. Rehearsals do not cover online adaptation, so the score of the returned
        predictions is bounded indirectly: it differs from the untouched model's by at most the share of samples on
        which both models disagree.
        """
        record = None if self.profile is None else self.profile.rehearsal
        readings = self._read_window()
        if record is None or readings is None:
            return None
        if self._estimator is None:
            self._estimator = Estimator(record)
        before = self._estimate_untouched(self._estimator, readings[0])
        if not self.method.adapts:
            return Estimates(before, before)
        agreement = agree(*readings) if record.task == "classes" else None
        return Estimates(before, before.bound(agreement, f"{self.method.name} on a stream was not rehearsed"))

    def _estimate_untouched(self, estimator: Estimator, reading: Reading) -> Estimate:
        assert self.profile is not None
        reasons = [] if self._is_of_home else [OTHER_WEIGHTS]
        if not reasons and estimator.is_at_home(reading.signals, reading.samples):
            return estimator.estimate_at_home(reading.samples)
        if answers_other_classes(reading, self.profile):
            reasons.append(OTHER_SHARES)
        if looks_like_selection(reading, estimator.record):
            reasons.append(OTHER_SAMPLES)
        return estimator.estimate(UNTOUCHED, reading.signals, reading.samples, reasons=reasons)

    @property
    def harm(self) -> list[str]:
        """Warnings, from the last batches, that adapting may have lowered the score; empty if there are none."""
        readings = self._read_window()
        if readings is None or self.profile is None or not self._has_learnt:
            return []
        return find_harm(self.profile, (readings[0].verification, readings[1].verification), readings)

    @property
    def manifest(self) -> dict[str, Any]:
        """The protocol so far: method, steps, pauses, warnings, and verification and estimate of the last batches."""
        with self._lock:
            judged, estimate = self.verification, self.estimate
            return {
                "method": {**describe_method(self.method), "name": self._name},
                "steps": self.steps,
                "paused": self.paused,
                "guard": self._watch is not None,
                "warnings": list(self.warnings),
                "verification": None if judged is None else judged.to_json(),
                "estimate": None if estimate is None else estimate.to_json(),
                "source_weights": fingerprints.weights(self._source),
                "environment": environment(self.device),
            }

    @property
    def _name(self) -> str:
        """Method name under which `verify` looks up an estimate's map. No map fits after the first update."""
        return f"{self.method.name} on a stream" if self._has_learnt or not self._is_of_home else UNTOUCHED

    @property
    def _is_of_home(self) -> bool:
        """True if the given model has the weights that the profile was made with."""
        return self.profile is None or fingerprints.weights(self._source) == self.profile.weights

    @torch.inference_mode(False)
    def snapshot(self) -> nn.Module:
        """Return a copy of the current model, in eval mode and on the device of the caller's model.

        Its attribute `shiftmend_adaptation` holds the manifest. A warning is logged if the last batches show signs of
        harm.
        """
        with self._lock:
            if harm := self.harm:
                self._warn("harm", describe_harm(harm))
            copied = make_ordinary(copy_model(self._model), self._source)
            marked = {"method": self._name, "temperature": 1.0, "manifest": self.manifest}
            copied.shiftmend_adaptation = marked  # type: ignore[assignment]
            return copied


def _tells_classes(profile: Profile) -> bool:
    """Return whether the profile says that the model is a classifier."""
    if profile.rehearsal is not None:
        return profile.rehearsal.task == "classes"
    return find_answers(profile) is not None


def _glimpse(untouched: _Seen) -> Glimpse:
    outside, second = measure_outside(untouched.tally), untouched.second
    if second is None:
        return Glimpse.of(untouched.logits, outside, untouched.inputs)
    return Glimpse.of(untouched.logits, outside, untouched.inputs, second.logits, second.keeps_classes)


@torch.inference_mode(False)
def stream(
    model: nn.Module,
    profile: Profile | str | os.PathLike[str] | None = None,
    method: str | Method | type[Method] = "fr",
    *,
    preprocess: Preprocess | None = None,
    output: Entry = None,
    device: str | torch.device = "auto",
    window: int = 16,
    guard: bool = True,
    **options: Any,
) -> Stream:
    """Make an online adapter for a stream of batches.

    Args:
        model: Any `nn.Module`. It is not changed.
        profile: The source's profile, or the path of its file. Softer bins learn faster on a stream; the paper uses
            `profile(..., bins=Bins(temperature=0.05))`.
        method: Name, class or instance of a method that supports streams.
        preprocess: Function that is applied to each batch of inputs on the device, before the model.
        output: Entry of a tuple or dict that is the model's output.
        device: Device to compute on.
        window: Number of latest batches that `Stream.verification` and `Stream.estimate` use.
        guard: Whether updates pause if predicted classes differ strongly from those of home or of earlier batches. This
            costs two forward passes of the untouched model per batch, and needs the profile of a classifier.
        **options: Hyper-parameters of the method. The best learning rate for a stream differs from that for many
            epochs.

    Returns:
        A `Stream`, whose `step` predicts a batch and then updates the model with it.

    Raises:
        ShiftmendError: If the model, the profile or an option cannot be used.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> profile = shiftmend.profile(model, torch.randn(200, 4))
        >>> online = shiftmend.stream(model, profile, learning_rate=0.01)
        >>> online.step(torch.randn(32, 4) + 1).shape
        torch.Size([32, 2])
    """
    chosen = make_method(method, **options)
    describe_method(chosen)
    if not chosen.online or chosen.by_sample:
        able = ", ".join(name for name, kind in METHODS.items() if kind.online)
        raise AdaptationError(
            f"Expected a method that works on a stream, got {chosen.name}, which needs all data. Use one of {able}."
        )
    for name in ("epochs", "passes"):
        if name in options:
            raise AdaptationError(f"Expected no {name} for a stream, which sees each batch once. Leave it out.")
    if not is_whole(window) or window < 1:
        raise DataError(f"Expected window to be a whole number of batches, at least 1, got {brief(window)}.")
    if not isinstance(guard, bool):
        raise DataError(f"Expected guard to be True or False, got {brief(guard)}.")
    check_function(preprocess, "preprocess", "inputs")
    model = unwrap(model, trained=True)
    profile = check_profile(profile, model, chosen)
    place = resolve_device(device, model)
    return Stream(
        model,
        profile,
        chosen,
        preprocess=preprocess,
        output=output,
        device=place,
        window=int(window),
        guard=guard,
    )
