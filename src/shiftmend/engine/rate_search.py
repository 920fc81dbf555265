"""Search for a learning rate: a few steps with each of several rates, from the same state and on the same batches.

A network without a published learning rate gets its rate from the data. Every candidate rate starts from the untouched
model and takes the same few steps. All see the same batches, so their losses can be compared batch by batch with those
of the untouched model, and the noise of the batches cancels.

The lowest loss does not decide. Large steps reach a low loss by scrambling the features while the accuracy falls
(`benchmarks/default_rates.py`). The search takes the smallest rate that reaches most of the best gain, among the rates
that change the weights little. If none of them gains noticeably in so few steps, it takes the largest rate whose gain
is still proportional to the rate; larger rates overshoot. If even the smallest rate gains nothing, BatchNorm has
already corrected the model, and a small rate is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.accelerate.cuda_graphs import keep_buffers_in_place
from shiftmend.accelerate.precision import Precision
from shiftmend.distributed.batch_norm import synchronised
from shiftmend.distributed.collectives import all_gather, all_processes
from shiftmend.engine.method import Method, Objective, Stage
from shiftmend.engine.modes import enter_adapting_modes, hold_layer_options, unfreeze
from shiftmend.engine.step import Steps
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.model_state import restore, snapshot
from shiftmend.introspection.modes import find_batch_norms, preserve_modes
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.utils.rng import DeviceGenerator, preserve_rng, reseed
from shiftmend.utils.tensor_tree import Inputs

FACTORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Candidate rates, as multiples of the default rate."""
STEPS = 12
"""Number of training steps with each candidate."""
JUDGED_STEPS = 6
"""Number of last steps whose losses judge a candidate; momentum builds up in the steps before."""
ENOUGH = 0.7
"""Fraction of the best gain that a smaller rate must reach to be preferred."""
MAX_CHANGE = 0.1
"""Largest change of the trained weights over all steps, relative to their norm, at which a rate may be chosen."""
NOTICEABLE = 0.05
"""Relative decrease of the loss that the best candidate must reach for the candidates to decide."""
IN_PROPORTION = 0.6
"""Fraction of the gain expected by proportion from the smallest rate that a larger rate must reach if no gain is
noticeable."""
FORGIVEN_CHANGE = 0.15
"""Largest change of the weights in that case for models with BatchNorm, which undoes a change of scale."""
CAREFUL = 0.1
"""Multiple of the default rate that is used if the smallest rate gains nothing."""
ONE_BATCH = 0.3
"""Factor to the rate if all data form one batch and BatchNorm has done most of the correction. The loss on a batch that
is used in every step also falls at rates that overfit it (`benchmarks/small_targets.py`)."""
MAX_HELD_BYTES = 1 << 28
"""Largest size of the batches kept for all candidates. If they do not fit, fewer are used repeatedly."""


@dataclass(frozen=True)
class RateSearch:
    """The result of a search for a learning rate.

    Attributes:
        rate: The learning rate to train with.
        rates: Candidate rates, in ascending order.
        losses: Mean loss over the judged steps with each rate; infinite if it was not finite.
        changes: Change of the trained weights with each rate, relative to their norm.
        start: Mean loss of the untouched model on the batches of the judged steps.
        steps: Number of training steps with each rate.
        reason: One sentence on why the rate was chosen.
    """

    rate: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    changes: tuple[float, ...]
    start: float
    steps: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the search as JSON for a manifest; infinity becomes null."""
        return {
            "rate": self.rate,
            "rates": list(self.rates),
            "losses": [*map(_finite, self.losses)],
            "changes": [*map(_finite, self.changes)],
            "start": _finite(self.start),
            "steps": self.steps,
            "reason": self.reason,
        }


def find_rate(
    model: nn.Module,
    feed: Feed,
    taps: Mapping[str, Tap],
    objective: Objective,
    method: Method,
    stage: Stage,
    *,
    precision: Precision = nullcontext,
    seed: int = 0,
    factors: Sequence[float] = FACTORS,
) -> RateSearch:
    """Find a learning rate for a stage, and leave the model unchanged.

    Weights, buffers, modes, gradients and random number generators are bitwise the same afterwards. The search
    synchronises with the device once, at its end. In a process group, every process must call this function, and all
    get the same result.

    Args:
        model: The model. It is trained in place, and then restored.
        feed: The target data.
        taps: Taps whose activations the objective reads.
        objective: The loss.
        method: The method, which makes the optimisers.
        stage: The stage to train. Its learning rate is the default, of which candidates are multiples.
        precision: A context manager for the forward pass.
        seed: Seed of the choice of batches and of all other random numbers.
        factors: Candidate rates as multiples of the default rate, in ascending order.

    Returns:
        The learning rate, with the losses on which the choice is based.
    """
    rates = [stage.learning_rate * factor for factor in factors]
    with (
        all_processes(),
        synchronised(model),
        torch.inference_mode(False),
        preserve_rng(feed.device),
        _undo_training(model),
        hold_layer_options(model, method.dropout),
    ):
        batches = _hold_batches(feed, seed)
        generator = DeviceGenerator(feed.device) if method.dropout else None
        start = snapshot(model)
        bring_back = keep_buffers_in_place(model)
        losses: list[Tensor] = []
        changes: list[Tensor] = []
        # A rate of zero leaves the model unchanged, so its losses are those of the untouched model.
        for rate in (0.0, *rates):
            restore(model, start)
            enter_adapting_modes(model, method.dropout)
            with generator.as_default() if generator is not None else nullcontext():
                # All candidates draw the same random numbers, but not those of the first epoch.
                reseed(_own_seed(seed))
                if generator is not None:
                    generator.seed(_own_seed(seed))
                own = replace(stage, learning_rate=rate)
                trained = unfreeze(model, own)
                before = [parameter.detach().clone() for parameter in trained]
                optimiser = method.make_optimiser(trained, own)
                steps = Steps(
                    model, feed, taps, objective, optimiser, precision=precision, capture=False, stage=stage.name
                )
                losses.append(_train(steps, batches, bring_back))
                changes.append(_relative_change(trained, before))
        # The numbers of the first process decide, so that processes cannot disagree by rounding.
        rows = torch.cat([torch.stack(losses).flatten(), torch.stack(changes[1:])])
        found = all_gather(rows)[0].cpu().double()
    of_losses = found[: -len(rates)].view(-1, STEPS)
    result = choose_rate(
        stage.learning_rate,
        rates,
        of_losses[1:].tolist(),
        found[-len(rates) :].tolist(),
        of_losses[0].tolist(),
        normalised=bool(find_batch_norms(model)),
    )
    if feed.steps_per_epoch == 1 and find_batch_norms(model):
        reason = f"{result.reason}; {ONE_BATCH:g} of it, since all data is one batch"
        result = replace(result, rate=ONE_BATCH * result.rate, reason=reason)
    return result


def choose_rate(
    default: float,
    rates: Sequence[float],
    losses: Sequence[Sequence[float]],
    changes: Sequence[float],
    untouched: Sequence[float],
    *,
    normalised: bool = False,
) -> RateSearch:
    """Choose among rates by the losses of their steps.

    Args:
        default: The default rate.
        rates: Candidate rates, in ascending order.
        losses: The loss of every step, for each rate.
        changes: Change of the trained weights over all steps, relative to their norm, for each rate.
        untouched: The loss of the untouched model on the batch of every step.
        normalised: Whether the model has BatchNorm.

    Returns:
        The search with the smallest rate that reaches `ENOUGH` of the best gain, among those that change the weights by
        at most `MAX_CHANGE`. If the best gain is not `NOTICEABLE`: the largest rate whose gain is `IN_PROPORTION`, or
        `CAREFUL` times the default if there is none.
    """
    start = _mean(untouched[-JUDGED_STEPS:])
    means = [_mean(row[-JUDGED_STEPS:]) for row in losses]
    tried = [(rate, mean) for rate, mean, change in zip(rates, means, changes, strict=True) if change <= MAX_CHANGE]
    best, lowest = min(tried, key=lambda pair: pair[1], default=(0.0, math.inf))
    if not math.isfinite(start) or not lowest < start * (1 - NOTICEABLE):
        limit = FORGIVEN_CHANGE if normalised else MAX_CHANGE
        gains = [start - mean if change <= limit else -math.inf for mean, change in zip(means, changes, strict=True)]
        rate = _find_proportional(rates, gains)
        reason = f"no rate lowered the loss of {start:.4g} by {NOTICEABLE:.0%}, so "
        if rate is None:
            rate = CAREFUL * default
            reason += f"{CAREFUL:g} of the default was taken"
        else:
            reason += "the largest rate was taken whose gain is in proportion to it"
    else:
        enough = start - ENOUGH * (start - lowest)
        rate, mean = next((rate, mean) for rate, mean in tried if mean <= enough)
        reason = (
            f"the smallest rate with {ENOUGH:.0%} of the best gain: the loss went from {start:.4g} to {mean:.4g}, and "
            f"to {lowest:.4g} at {best:.4g}"
        )
    return RateSearch(rate, tuple(rates), tuple(means), tuple(changes), start, len(untouched), reason)


def _find_proportional(rates: Sequence[float], gains: Sequence[float]) -> float | None:
    """Return the largest rate up to which gains are proportional; None if the smallest rate gains nothing."""
    slope = gains[0] / rates[0]
    if not 0 < slope < math.inf:
        return None
    rising = itertools.takewhile(
        lambda pair: pair[1] >= IN_PROPORTION * slope * pair[0], zip(rates, gains, strict=True)
    )
    return max(rate for rate, _ in rising)


def _mean(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _relative_change(trained: list[nn.Parameter], before: list[Tensor]) -> Tensor:
    """Return the change of weights relative to their norm, on the device; a norm of zero counts as one."""
    moved = [parameter.detach() - value for parameter, value in zip(trained, before, strict=True)]
    size = _norm(before)
    return _norm(moved) / torch.where(size > 0, size, 1.0)


def _norm(tensors: list[Tensor]) -> Tensor:
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return nn.utils.get_total_norm(real).float()


def _own_seed(seed: int) -> int:
    return seed * 1_000_003


def _hold_batches(feed: Feed, seed: int) -> list[Inputs]:
    """Return the batches that every candidate rate trains on, at most `STEPS` of them."""
    held: list[Inputs] = []
    size, show, feed.on_batch = 0, feed.on_batch, lambda samples: None
    try:
        # Training numbers its epochs from 1, so 0 gives other batches.
        for batch, _ in itertools.islice(feed.epoch(seed, 0), STEPS):
            size += batch.nbytes
            if held and size > MAX_HELD_BYTES:
                break
            held.append(batch)
    finally:
        feed.on_batch = show
    return held


def _train(steps: Steps, batches: list[Inputs], bring_back: Callable[[], None]) -> Tensor:
    """Train a candidate rate for `STEPS` steps, and return the loss before each step `[STEPS]`, on the device."""
    totals = []
    with attach_taps(steps.model, steps.taps) as recorder, torch.enable_grad():
        for batch in itertools.islice(itertools.cycle(batches), STEPS):
            totals.append(_total(steps.step(recorder, batch, None)))
            bring_back()
    return torch.stack(totals)


def _total(terms: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([term.detach().float() for term in terms.values()]).sum()


@contextmanager
def _undo_training(model: nn.Module) -> Iterator[None]:
    """Restore weights, buffers, modes, gradients and flags at the end of the block, in the same memory."""
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    before = snapshot(model)
    with preserve_modes(model):
        try:
            yield
        finally:
            for current, own in buffers:
                current.update(own)
            restore(model, before)
            for parameter, required, gradient in flags:
                parameter.requires_grad_(required)
                parameter.grad = gradient
