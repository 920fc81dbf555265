"""The steps of a stage: one batch after the other as PyTorch runs them, or captured and replayed (`captures.py`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn, optim

from shiftmend.accelerate.bf16 import Precision
from shiftmend.accelerate.compile import captured_compiled
from shiftmend.accelerate.cuda_graphs import CapturedEpoch, Sums, captured_epoch, kept_in_place
from shiftmend.distributed.batch_norm import synchronised
from shiftmend.distributed.collectives import all_processes, backward, is_distributed
from shiftmend.engine.method import Objective, loss_of
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.taps import Recorder, Tap, tapped
from shiftmend.utils.rng import Dice, roll

logger = logging.getLogger(__name__)


class Steps:
    """All steps of one stage. Without an optimiser, batches only run forward, for BatchNorm to see them."""

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        taps: Mapping[str, Tap],
        objective: Objective | None,
        optimiser: optim.SGD | None,
        *,
        precision: Precision = nullcontext,
        dropout: bool = False,
        capture: bool = True,
        compile: bool = False,
        what: str = "",
    ) -> None:
        self.model, self.feed, self.taps = model, feed, taps
        self.objective, self.optimiser, self.compile = objective, optimiser, compile
        self.precision, self.what = precision, what
        self._dice = Dice(feed.device) if dropout else None
        self._captured: CapturedEpoch | None = None
        self._targets: Tensor | None = None
        self._tried = False
        self._may_capture = capture and self._can_be_captured()

    @property
    def captured(self) -> bool:
        return self._captured is not None

    @property
    def refused(self) -> bool:
        """Whether capturing was tried and did not work; with other trained layers it would not either."""
        return self._tried and self._captured is None

    def _can_be_captured(self) -> bool:
        inputs = self.feed.inputs
        trains = self.objective is not None and self.optimiser is not None
        return trains and inputs is not None and inputs.is_cuda

    def epoch(self, seed: int, number: int, targets: Tensor | None = None) -> tuple[Sums, int]:
        """Run an epoch; returns the sums of the loss's terms over its steps, and how many steps there were."""
        trains = self.objective is not None and self.optimiser is not None
        with (
            all_processes(),
            synchronised(self.model),
            torch.inference_mode(False),
            torch.set_grad_enabled(trains),
        ):
            if self._may_capture and self._captured is None and not is_distributed():
                with self._for_dropout():
                    self._try_to_capture(targets)
            if self._captured is None:
                with self._for_dropout():
                    self._seed_dice(seed, number)
                    return self._eagerly(seed, number, targets)
            self._seed_dice(seed, number)
            if self._targets is not None and targets is not None:
                self._targets.copy_(targets)
            return self._captured.run(self.feed.order(seed, number))

    def _for_dropout(self) -> AbstractContextManager[None]:
        return nullcontext() if self._dice is None else self._dice.for_dropout()

    def _seed_dice(self, seed: int, number: int) -> None:
        """Dropout and model draw from the seed of the run and the number of the epoch, and from nothing else."""
        own = seed * 1_000_003 + number
        roll(own)
        if self._dice is not None:
            self._dice.seed(own)

    def _eagerly(self, seed: int, number: int, targets: Tensor | None) -> tuple[Sums, int]:
        sums: Sums = {}
        steps = 0
        bring_back = kept_in_place(self.model)
        with tapped(self.model, self.taps) as recorder:
            for batch, index in self.feed.epoch(seed, number):
                own = targets[index] if targets is not None and index is not None else None
                for name, term in self.step(recorder, batch, own).items():
                    sums[name] = sums[name] + term if name in sums else term
                bring_back()
                steps += 1
        return sums, steps

    def step(self, recorder: Recorder, batch: Tensor, targets: Tensor | None) -> Sums:
        """Forward, loss, backward and update on one batch; returns the terms of the loss."""
        with self.precision():
            self.model(batch)
        activations = recorder.read()
        if self.optimiser is None or self.objective is None:
            return {}
        if targets is not None:
            activations["targets"] = targets
        terms, total = loss_of(self.objective, activations, self.what)
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
            drops = self._dice is not None
            self._captured = captured_compiled(self._capture, self.model, self.optimiser, drops, self.what)
            self.compile = self._captured is not None
        self._captured = self._captured or self._capture()
        self._may_capture = self._captured is not None

    def _capture(self, compiled: bool = False) -> CapturedEpoch | None:
        inputs, optimiser, feed = self.feed.inputs, self.optimiser, self.feed
        assert inputs is not None
        assert optimiser is not None
        bring_back = kept_in_place(self.model)
        with tapped(self.model, self.taps, set_aside=not compiled) as recorder:

            def once(index: Tensor) -> Sums:
                own = None if self._targets is None else self._targets.index_select(0, index)
                terms = self.step(recorder, feed.ready(inputs.index_select(0, index)), own)
                bring_back()
                return terms

            size = min(feed.batch_size, len(inputs))
            return captured_epoch(once, self.model, optimiser, inputs.device, len(inputs), size, compiled=compiled)
