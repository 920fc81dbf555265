"""Several learning rates, and the one to go on with, chosen without labels."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shiftmend.adaptations import Adaptation
from shiftmend.distributed import of_first_process
from shiftmend.errors import AdaptationError
from shiftmend.loop import DivergedError
from shiftmend.methods.base import check_positive
from shiftmend.selection import Choice
from shiftmend.settings import Settings
from shiftmend.verification import Verification

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)


def check_rates(rates: Sequence[float]) -> None:
    if not rates:
        raise AdaptationError("the list of learning rates is empty; name at least one, or leave it out")
    for rate in rates:
        check_positive(rate, "every learning rate")


def with_rate(settings: Settings, rate: float) -> Settings:
    """Those of the run with this learning rate: it has a checkpoint of its own."""
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
    """One run for each learning rate; the one whose kept epoch the verification slices prefer is the result.

    The model as it came is the same for all of them: what the first finds of it is given to the others.
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
        if not result.history:  # interrupted before anything was seen of it
            chosen = chosen or result
            break
        kept = result.kept
        tried.append(
            {"learning_rate": rate, "epoch": kept.epoch, "verification": kept.verification, "entropy": kept.entropy}
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
            logger.warning("kept is what an earlier learning rate gave, %g", chosen.manifest["method"]["learning_rate"])
    chosen.manifest["learning_rate_chosen"] = "by the verification slices"
    chosen.manifest["learning_rates_tried"] = tried
    return chosen
