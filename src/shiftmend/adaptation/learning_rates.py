"""Several learning rates: one run with each, of which the verification slices choose."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shiftmend.adaptation.result import Adaptation
from shiftmend.adaptation.run import Settings
from shiftmend.engine.history import Choice
from shiftmend.errors import DivergedError
from shiftmend.utils.processes import of_first_process
from shiftmend.verification.verdict import Verification

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)


def with_rate(settings: Settings, rate: float) -> Settings:
    """Give the run with this learning rate its own checkpoint."""
    if settings.checkpoint is None:
        return settings
    return replace(settings, checkpoint=f"{os.fspath(settings.checkpoint)}.rate-{rate!r}")


def best_rate(
    rates: Sequence[float],
    attempt: Callable[[float, Settings, Verification | None], Adaptation],
    settings: Settings,
    *,
    entropy_may_decide: bool = True,
) -> Adaptation:
    """Run once for each learning rate and return the run whose kept epoch the verification slices prefer.

    The untouched model is the same for all of them: what the first run finds of it is given to the others.
    """
    chosen: Adaptation | None = None
    before: Verification | None = None
    choice: Choice | None = None
    tried: list[dict[str, Any]] = []
    stopped = False
    for rate in map(float, rates):
        try:
            result = attempt(rate, with_rate(settings, rate), before)
            before = result.before
        except DivergedError as error:
            before = error.adaptation.before
            tried.append({"learning_rate": rate, "failed": str(error)})
            last_error = error
            continue
        stopped = result.interrupted
        if not result.history:  # Interrupted before anything was seen of the model.
            chosen = chosen or result
            break
        kept = result.kept
        tried.append(
            {
                "learning_rate": rate,
                "epoch": kept.epoch,
                "verification": kept.verification,
                "entropy": kept.signals.get("entropy"),
            }
            | ({"interrupted": True} if stopped else {})
        )
        if choice is None:
            choice = Choice(entropy_may_decide=entropy_may_decide)
        if choice.consider(kept):
            chosen = result
        if stopped:
            break
    if chosen is None:
        raise last_error
    if stopped:
        chosen.manifest["status"] = "interrupted"
        if chosen is not result:
            logger.warning("keeping the result of learning rate %g", chosen.manifest["method"]["learning_rate"])
    chosen.manifest["learning_rate_chosen"] = "by the verification slices"
    chosen.manifest["learning_rates_tried"] = tried
    return chosen
