"""The steps of a stage: one batch after the other as PyTorch runs them, or captured and replayed (`captures.py`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim

from shiftmend.captures import CapturedEpoch, Sums, captured_epoch
from shiftmend.dice import Dice, roll
from shiftmend.distributed import active, backward, together
from shiftmend.feeds import Feed
from shiftmend.joined_batch_norm import synchronised
from shiftmend.methods import Objective
from shiftmend.methods.contract import loss_of
from shiftmend.taps import Recorder, Tap, eager, tapped
from shiftmend.undoing import kept_in_place

logger = logging.getLogger(__name__)

Precision = Callable[[], AbstractContextManager[Any]]
_FEWER_KERNELS = "combo_kernels"
"""What the compiler calls it to make one of small kernels that do not wait for each other, such as casts of weights."""
_USUAL_NUMBERS = "fallback_random"
"""What it calls it to draw random numbers as torch does elsewhere."""


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
            together(),
            synchronised(self.model),
            torch.inference_mode(False),
            torch.set_grad_enabled(trains),
        ):
            if self._may_capture and self._captured is None and not active():
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


def captured_compiled(
    capture: Callable[[bool], CapturedEpoch | None], model: nn.Module, optimiser: optim.SGD, dropout: bool, what: str
) -> CapturedEpoch | None:
    """What `capture` makes while the model is compiled; None if that does not work, or does not train all of `what`.

    `capture` is told whether the model is compiled.
    """
    with compiled(model, dropout):
        quick = capture(True)
    left_out = _without_gradient(optimiser) if quick else set()
    # what no loss depends on gets no gradient in either
    if left_out and not (capture(False) and left_out == _without_gradient(optimiser)):
        logger.warning("compiled steps are not used: a parameter of %r gets no gradient in them", what)
        return None
    return quick


def _without_gradient(optimiser: optim.SGD) -> set[Tensor]:
    """What the last step should have trained, and has not: compiled code does so if torch mistook it."""
    wanted = (parameter for group in optimiser.param_groups for parameter in group["params"])
    return {parameter for parameter in wanted if parameter.grad is None}


@contextmanager
def compiled(model: nn.Module, dropout: bool = False) -> Iterator[None]:
    """Inside, calls of the model go through `torch.compile`, hooks included; afterwards nothing is left of it.

    With `dropout`, compiled code draws the random numbers that other code would draw, so that runs can be compared.
    """
    wanted = {_FEWER_KERNELS: True, _USUAL_NUMBERS: dropout}
    known = torch._inductor.list_options()
    options: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
    with eager(model), torch._dynamo.config.patch(_full_guards()):
        run = torch.compile(_call, dynamic=False, options=options)
        model._compiled_call_impl = functools.partial(run, model)
        try:
            yield
        finally:
            model._compiled_call_impl = None


def _full_guards() -> dict[str, Any]:
    """Settings with which compiled code is used again for another copy of the model, but not for other work.

    Torch would not look whether hooks are others. 2.11 also takes the parameters of a module that it has seen before
    for unchanged, and would train in each stage of BUFR what the first one has trained. Each set of trained layers is
    compiled by itself; after eight, torch would go on without.
    """
    wanted = {
        "skip_nnmodule_hook_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        "use_recursive_dict_tags_for_guards": False,
        "recompile_limit": 256,
    }
    return {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}


def _call(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """What `model(...)` does. `Module.compile` would leave a model of torch's own, such as `Sequential`, as it is."""
    return model._call_impl(*inputs, **options)
