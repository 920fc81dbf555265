"""The training step: forward, loss, backward, update. Steps run eagerly, or captured as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn, optim

from shiftmend.accelerate.compile import capture_compiled
from shiftmend.accelerate.cuda_graphs import CapturedEpoch, Sums, capture_epoch, keep_buffers_in_place
from shiftmend.accelerate.precision import Precision
from shiftmend.distributed.batch_norm import synchronised
from shiftmend.distributed.collectives import all_processes, backward, is_distributed
from shiftmend.engine.method import Objective, compute_loss
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.call import call_model
from shiftmend.introspection.taps import Recorder, Tap, attach_taps
from shiftmend.passes.evaluation_pass import say_in_batch
from shiftmend.utils.rng import DeviceGenerator, reseed
from shiftmend.utils.tensor_tree import Inputs


class Steps:
    """All steps of one stage. Without an optimiser, batches only run forward, to update BatchNorm.

    Args:
        model: The model to train.
        feed: The target data.
        taps: Taps whose activations the objective reads.
        objective: The loss; None if nothing is trained.
        optimiser: Optimiser of the trained parameters; None if nothing is trained.
        precision: A context manager for the forward pass.
        dropout: Whether dropout is on.
        capture: Whether steps may be captured as a CUDA graph.
        compile: Whether captured steps are compiled first.
        stage: Name of the stage, for messages.
        each: Number of steps per call of `run`; None for a whole epoch.
        warm_up: Number of steps in which the gradient is scaled up to its full size.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        taps: Mapping[str, Tap],
        objective: Objective | None,
        optimiser: optim.Optimizer | None,
        *,
        precision: Precision = nullcontext,
        dropout: bool = False,
        capture: bool = True,
        compile: bool = False,
        stage: str = "",
        each: int | None = None,
        warm_up: int = 0,
    ) -> None:
        self.model, self.feed, self.taps = model, feed, taps
        self.objective, self.optimiser, self.compile = objective, optimiser, compile
        self.precision, self.stage, self.each, self.warm_up = precision, stage, each, warm_up
        # Number of finished steps of the stage, on the device, where a captured step can increment it.
        self._done = torch.zeros((), device=feed.device) if warm_up else None
        self._generator = DeviceGenerator(feed.device) if dropout else None
        self._captured: CapturedEpoch | None = None
        self._targets: Tensor | None = None
        self._tried = False
        self._may_capture = capture and self._can_be_captured()

    @property
    def captured(self) -> bool:
        return self._captured is not None

    @property
    def refused(self) -> bool:
        """True if capturing was tried and failed; it would fail again with other trained layers."""
        return self._tried and self._captured is None

    @property
    def _trains(self) -> bool:
        return self.objective is not None and self.optimiser is not None

    def _can_be_captured(self) -> bool:
        return self._trains and self.feed.inputs is not None and self.feed.inputs.is_cuda

    def run(self, seed: int, number: int, done: int = 0, targets: Tensor | None = None) -> tuple[Sums, int]:
        """Run one epoch, or `each` steps.

        Args:
            seed: Seed of the run.
            number: Number of the epoch or round; together with the seed, it determines the order of the batches.
            done: Number of finished steps of this stage.
            targets: One entry per sample, for methods with `by_sample`.

        Returns:
            The sums of the loss terms over the steps, and the number of steps.
        """
        with (
            all_processes(),
            synchronised(self.model),
            torch.inference_mode(False),
            torch.set_grad_enabled(self._trains),
        ):
            if self._may_capture and self._captured is None and not is_distributed():
                with self._own_dropout():
                    self._try_to_capture(targets)
            if self._done is not None:
                self._done.fill_(done)
            if self._captured is None:
                with self._own_dropout():
                    self._seed(seed, number)
                    return self._run_eagerly(seed, number, targets)
            self._seed(seed, number)
            if self._targets is not None and targets is not None:
                self._targets.copy_(targets)
            return self._captured.run(self.feed.epoch_order(seed, number, self.each))

    def _own_dropout(self) -> AbstractContextManager[None]:
        return nullcontext() if self._generator is None else self._generator.as_default()

    def _seed(self, seed: int, number: int) -> None:
        """Seed the random numbers of dropout and model from the seed of the run and the number of the epoch."""
        own = seed * 1_000_003 + number
        reseed(own)
        if self._generator is not None:
            self._generator.seed(own)

    def _run_eagerly(self, seed: int, number: int, targets: Tensor | None) -> tuple[Sums, int]:
        sums: Sums = {}
        steps = 0
        bring_back = keep_buffers_in_place(self.model)
        with attach_taps(self.model, self.taps) as recorder:
            for batch, index in self.feed.epoch(seed, number, self.each):
                own = targets[index] if targets is not None and index is not None else None
                with say_in_batch(steps, batch):
                    terms = self.step(recorder, batch, own)
                for name, term in terms.items():
                    sums[name] = sums[name] + term if name in sums else term
                bring_back()
                steps += 1
        return sums, steps

    def step(self, recorder: Recorder, batch: Inputs, targets: Tensor | None) -> Sums:
        """Run forward, loss, backward and update on one batch; return the terms of the loss."""
        with self.precision():
            call_model(self.model, batch)
        activations = recorder.read()
        if self.optimiser is None or self.objective is None:
            return {}
        if targets is not None:
            activations["targets"] = targets
        terms, total = compute_loss(self.objective, activations, self.stage)
        if self._done is not None:
            total = total * ((self._done + 1) / self.warm_up).clamp(max=1)
            self._done += 1
        self.optimiser.zero_grad(set_to_none=True)
        backward(total, self.model.parameters())
        recorder.forget()
        self.optimiser.step()
        return {name: term.detach() for name, term in terms.items()}

    def _try_to_capture(self, targets: Tensor | None) -> None:
        assert self.optimiser is not None
        self._tried = True
        self._targets = None if targets is None else targets.clone()
        if self.compile:
            draws = self._generator is not None
            self._captured = capture_compiled(self._capture, self.model, self.optimiser, draws, self.stage)
            self.compile = self._captured is not None
        self._captured = self._captured or self._capture()
        self._may_capture = self._captured is not None

    def _capture(self, compiled: bool = False) -> CapturedEpoch | None:
        inputs, optimiser, feed = self.feed.inputs, self.optimiser, self.feed
        assert inputs is not None
        assert optimiser is not None
        bring_back = keep_buffers_in_place(self.model)
        with attach_taps(self.model, self.taps, eager=not compiled) as recorder:

            def step(index: Tensor) -> Sums:
                own = None if self._targets is None else self._targets.index_select(0, index)
                terms = self.step(recorder, feed.prepare(inputs.index_select(0, index)), own)
                bring_back()
                return terms

            size = min(feed.batch_size, len(inputs))
            sizes = len(inputs), size
            return capture_epoch(step, self.model, optimiser, inputs.device, *sizes, steps=self.each, compiled=compiled)
