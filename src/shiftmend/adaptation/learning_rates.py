"""Choice of a learning rate: one run with each, compared without labels by the verification slices."""

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
    """Return the settings with a separate checkpoint file for this learning rate."""
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
    """Run once with each learning rate; return the run whose kept epoch is the best `Choice` without labels.

    All runs start from the same model, so the verification of the untouched model is computed by the first run only.
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
        if not result.history:  # The run was interrupted before the untouched model was verified.
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
