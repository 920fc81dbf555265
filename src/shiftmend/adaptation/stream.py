"""`stream`: the same methods on a stream of batches. Each batch is predicted, then learnt from."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from shiftmend.accelerate.cuda_graphs import keep_buffers_in_place
from shiftmend.accelerate.precision import nothing_cached
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
from shiftmend.introspection.model_state import restore, snapshot
from shiftmend.introspection.modes import find_batch_norms
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.introspection.validate import check_model, copy_model, unwrap
from shiftmend.methods import METHODS
from shiftmend.methods import method as make_method
from shiftmend.profiles.profile import Profile
from shiftmend.stats.histograms import CountTracker
from shiftmend.stats.slices import Slices
from shiftmend.utils.checks import brief, check_function, counted, is_whole, kind
from shiftmend.utils.devices import resolve_device
from shiftmend.verification.signals import sample_positions
from shiftmend.verification.verdict import Verification, judge

logger = logging.getLogger(__name__)


class Stream:
    """An online adapter, made by `shiftmend.stream`.

    `step(batch)` returns the model's output for the batch and then updates the model with the batch, once. The output
    is computed before the update, with BatchNorm on the statistics of the batch, as in the paper's online experiments.
    The caller's model is not touched; `snapshot()` returns a plain copy of the adapted one at any time. Threads may
    share a stream and wait for one another.

    Attributes:
        steps: Batches so far.
        losses: Terms of the loss in the last update.

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
    ) -> None:
        self.method, self.profile, self.preprocess, self.output = method, profile, preprocess, output
        self.device = device
        self._lock = threading.RLock()
        self.steps = 0
        self.losses: dict[str, float] = {}
        self._source = model
        self._model = copy_model(model).to(device)
        self._objective = method.objective(profile, device)
        self._optimiser: optim.Optimizer | None = None
        self._what = ""
        self._taps: dict[str, Tap] | None = None
        self._judge: Slices | None = profile.slices["verification"].to(device) if profile is not None else None
        self._seen: deque[tuple[CountTracker, int]] = deque(maxlen=window)
        self._counted = 0

    def __repr__(self) -> str:
        with self._lock:
            steps, batches, judged = self.steps, len(self._seen), self.verification
        line = f"Stream adapted by {self.method.name}, {counted(steps, 'step')}"
        return line if judged is None else f"{line}\n  over the last {counted(batches, 'batch', 'batches')}: {judged}"

    @torch.inference_mode(False)
    @nothing_cached()
    def step(self, batch: Any) -> Tensor:
        """Predict a batch, then learn from it.

        Args:
            batch: Inputs, or (inputs, anything).

        Returns:
            The model's output, from before the update.

        Raises:
            DataError: If the batch cannot be used. Nothing is changed then.
        """
        with self._lock:
            return self._step(batch)

    def _step(self, batch: Any) -> Tensor:
        inputs = self._inputs(batch)
        if self.profile is not None and self.profile.inputs.has_shape(inputs.shape):
            raise DataError(
                f"the batch has the shape {list(inputs.shape)} of a single sample; give a batch of one: "
                "inputs.unsqueeze(0)"
            )
        if self._taps is None:
            self._prepare(inputs)
        smallest = max(2 if find_batch_norms(self._model) else 1, self.method.smallest_batch(self.profile))
        learns = self.method.adapts
        adapts = learns and len(inputs) >= smallest
        if learns and not adapts:
            few = "a single sample has no distribution" if len(inputs) < 2 else f"{len(inputs)} samples are too few"
            logger.warning("%s to learn from: predicted with what was learnt so far", few)
        before = snapshot(self._model) if adapts else {}
        self._model.eval()
        if adapts:
            enter_adapting_modes(self._model)
        assert self._taps is not None
        trains = adapts and self._optimiser is not None
        good, moved = True, False
        losses: dict[str, float] = {}
        # A new tensor that a layer puts in the place of a buffer would hang on the graph of this step.
        bring_back = keep_buffers_in_place(self._model)
        try:
            with (
                hold_layer_options(self._model),
                attach_taps(self._model, self._taps) as recorder,
                torch.set_grad_enabled(trains),
            ):
                result = pick(self._model(inputs), self.output, "the model")
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
                self._count(activations["features"].detach(), len(inputs))
        except BaseException as error:  # By now BatchNorm has moved, whoever refused the batch.
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
        self.steps += 1
        return result.detach()

    def _inputs(self, batch: Any) -> Tensor:
        """Return the inputs of a batch, checked and moved to the device as data for `adapt` is."""
        if isinstance(batch, tuple | list) and batch:
            if isinstance(batch[0], tuple | list | Mapping):
                raise DataError(
                    f"step takes one batch, got {kind(batch)} that begins with {kind(batch[0])}; expected inputs, or "
                    "(inputs, anything): give several batches one after the other"
                )
            batch = batch[0]
        if isinstance(batch, Dataset | DataLoader):
            raise DataError(f"step takes one batch, got {kind(batch)}; go through it, e.g. for batch in loader")
        feed = Feed(
            batch,
            batch_size=1 << 30,
            device=self.device,
            preprocess=self.preprocess,
            limit=1 << 62,  # Asking how much memory is free would take as long as a small step.
            what="batch",
        )
        return next(feed.batches())

    def _prepare(self, inputs: Tensor) -> None:
        """Find taps and trained parameters with the first batch."""
        # A copy of the inputs, since the model may work in place.
        check_model(self._model, [inputs[:2].clone()], output=self.output, original=self._source)
        if self.profile is not None:
            self.profile.check_taps(self._model, inputs[:2].clone())
        network, taps = examine(self._model, inputs[:2].clone(), self.profile, self.method, None, self.output)
        stages = plan_stages(self.method, network, self.profile)
        if len(stages) > 1:
            raise AdaptationError(
                f"{self.method.name} has {len(stages)} stages, and a stream never comes to the second; use "
                "shiftmend.adapt, or give it a single stage"
            )
        check_objective(self._objective, self.method, stages)
        if stages:
            trained = unfreeze(self._model, stages[0])
            self._optimiser = self.method.make_optimiser(trained, stages[0]) if trained else None
            self._what = stages[0].name
        if self.profile is not None:
            taps = {"features": self.profile.specs["features"], **taps}
        self._taps = taps

    def _differentiate(self, activations: dict[str, Tensor]) -> dict[str, float]:
        """Compute gradients and return the terms of the loss; do neither if the loss is not finite."""
        assert self._objective is not None
        assert self._optimiser is not None
        terms, total = compute_loss(self._objective, activations, self._what)
        if not bool(torch.isfinite(total)):
            return {}
        losses = {name: float(term.detach()) for name, term in terms.items()}
        self._optimiser.zero_grad(set_to_none=True)
        total.backward()
        return losses

    def _take_back(self, before: dict[str, Tensor], momentum: bool) -> None:
        """Restore the model, and forget optimiser state that may come from the step that went wrong."""
        restore(self._model, before)
        self._model.eval()
        if momentum and self._optimiser is not None:
            self._optimiser.state.clear()

    def _count(self, features: Tensor, inputs: int) -> None:
        assert self._judge is not None
        home = self._judge.histogram
        counter = home.new_tracker()
        rows = sample_positions(features, inputs, self._counted)
        for part in self._judge.projector.project_in_parts(rows):
            counter.update(part, len(features) / len(rows))
        self._seen.append((counter, inputs))
        self._counted += inputs

    @property
    def verification(self) -> Verification | None:
        """Label-free verdict over the last batches, as they were predicted; None without a profile or a batch.

        The verdict rests on the slices alone, since counting every feature of every batch would slow a stream down.
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

    @torch.inference_mode(False)
    def snapshot(self) -> nn.Module:
        """Return a plain copy of the model as it is now, in eval mode and on the device of the caller's model."""
        with self._lock:
            return make_ordinary(copy_model(self._model), self._source)


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
    **options: Any,
) -> Stream:
    """Make an online adapter for a stream of batches.

    Args:
        model: Any `nn.Module` that is called with one tensor. It is not touched.
        profile: The source's profile, or the name of its file. A softer temperature learns quicker on a stream (the
            paper uses 0.05: `profile(..., bins=Bins(temperature=0.05))`).
        method: Name, class or instance of a method that can learn from a stream.
        preprocess: Called with each batch on the device, before the model.
        output: Entry of a tuple or dict that is the model's output.
        device: Where to compute.
        window: Batches behind `Stream.verification`.
        **options: Hyper-parameters of the method. Learning rates for one pass differ from those for many.

    Returns:
        A `Stream`, whose `step` predicts a batch and learns from it.

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
        raise AdaptationError(f"{chosen.name} needs the whole of the data, which a stream never is; use one of {able}")
    for name in ("epochs", "passes"):
        if name in options:
            raise AdaptationError(f"{name} has no effect on a stream, each batch of which is seen once; leave it out")
    if not is_whole(window) or window < 1:
        raise DataError(f"the window must be a whole number of batches, at least 1, got {brief(window)}")
    check_function(preprocess, "preprocess", "inputs")
    model = unwrap(model, trained=True)
    profile = check_profile(profile, model, chosen)
    place = resolve_device(device, model)
    return Stream(model, profile, chosen, preprocess=preprocess, output=output, device=place, window=int(window))
