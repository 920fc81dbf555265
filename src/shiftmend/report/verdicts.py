"""Say what happened in one sentence and one colour, and what to do next. The verification alone decides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shiftmend.report.facts import Facts
from shiftmend.report.formatting import format_number, format_percent
from shiftmend.verification.verdict import Verification

Level = Literal["good", "unsure", "bad"]


@dataclass(frozen=True)
class Statement:
    """The verdict in words: a colour, a headline, a sentence, and advice."""

    level: Level
    headline: str
    sentence: str
    next_steps: tuple[str, ...]


def state_verdict(facts: Facts) -> Statement:
    """State the verdict on the mended model, or on the target where nothing was mended."""
    return _state_shift(facts) if facts.after is None else _state_mending(facts, facts.after)


def _state_shift(facts: Facts) -> Statement:
    found = facts.before
    away = f"The model’s features on these {found.samples:,} samples lie {format_number(found.divergence)} from home"
    chance = f"chance alone would give {format_number(found.floor)}"
    match found.verdict:
        case "restored":
            return Statement(
                "good",
                "As at home",
                f"{away}, where {chance}: no shift of the device can be seen.",
                (
                    "There is nothing to mend. Keep using the model as it is.",
                    "This says how features are distributed, not what they mean: a swapped or mirrored input can look "
                    "as at home. If predictions seem wrong, label a few dozen samples and score them.",
                ),
            )
        case "undecided":
            return Statement(
                "unsure", "Undecided", f"{away}, and {chance}: too few samples to tell.", (_ask_for_samples(facts),)
            )
        case "partly restored":
            headline = "Slightly shifted"
            sentence = f"{away}, where {chance}: {_explain_straying(found) or 'a small shift, beyond chance.'}"
        case _:
            headline = "Shifted"
            others = "these are not the features that the model was trained on."
            sentence = f"{away}, where {chance}: {_explain_straying(found) or others}"
    return Statement(
        "bad" if headline == "Shifted" else "unsure",
        headline,
        sentence,
        (
            "Do not rely on the model’s answers at this site until they have been checked.",
            "First rule out a simple cause: another normalisation, channel order, resolution or file format.",
            "If the device has changed, and the classes are about as frequent as at home, mend the model: run "
            "`shiftmend adapt` with the same model, data and profile, then make this report again with `--adapted`.",
            "If other people or objects are measured here than at home, do not adapt: the model may be right as it is.",
        ),
    )


def _state_mending(facts: Facts, after: Verification) -> Statement:
    before = facts.before
    assert facts.mending is not None
    method = f"mending by {facts.mending.method}"
    start = f"Before mending, the model’s features lay {format_number(before.divergence)} from home"
    chance = "chance may leave up to" if after.adapted else "chance alone would give"
    remains = f"{format_number(after.divergence)} remains, where {chance} {format_number(after.floor)}"
    if before.excess == 0:
        change = f"as near as chance allows, and after {method} they lie at {format_number(after.divergence)}"
    elif not math.isfinite(after.excess):
        change = f"and {method} left features that are no finite numbers"
    elif after.excess > before.excess:
        change = f"{method} made it worse, and they now lie at {format_number(after.divergence)}"
    elif not math.isfinite(before.excess):
        change = f"{method} made them finite again, and {remains}"
    else:
        part = 1 - after.excess / before.excess
        taken = "more than 99\u00a0%" if 0.995 <= part < 1 else format_percent(part)
        change = f"{method} took away {taken} of what chance does not explain, and {remains}"
    sentence = f"{start}; {change}."
    if but := _explain_straying(after):
        sentence += f" {but[0].upper()}{but[1:]}"
    match after.verdict:
        case "restored":
            return Statement("good", "Restored", sentence, _advise_checks(facts))
        case "undecided":
            return Statement("unsure", "Undecided", sentence, (_ask_for_samples(facts), *_advise_checks(facts)))
        case "partly restored":
            return Statement("unsure", "Partly restored", sentence, (*_advise_retry(facts), *_advise_checks(facts)))
        case _:
            return Statement(
                "bad",
                "Not restored",
                sentence,
                ("Do not rely on the mended model. The original is untouched.", *_advise_retry(facts)),
            )


def _explain_straying(found: Verification) -> str:
    """Explain that mixtures of features are as at home and single features are not; empty where that is not so."""
    if not found.strayed:
        return ""
    assert found.marginals is not None
    return (
        "mixtures of features, which this distance compares, are as at home, but features and outputs one by one are "
        f"not ({format_number(found.marginals)})."
    )


def _ask_for_samples(facts: Facts) -> str:
    if facts.samples_needed is None:
        return "The profile was made from too few samples to be sure: make it again, at home, with more of them."
    return f"Collect at least {facts.samples_needed:,} samples at this site (here are {facts.samples:,}) and ask again."


def _advise_retry(facts: Facts) -> tuple[str, ...]:
    steps = [
        "Look at the sample inputs below: a wrong normalisation or channel order is to be put right, not adapted to.",
        "Ask whether the classes are as frequent here as at home. If not, features rightly differ, and mending may "
        "harm.",
    ]
    if facts.mending is not None and not facts.mending.method_class.bottom_up:
        steps.append("Try the method bufr, which restores the lowest layers first.")
    steps.append(
        "Try several learning rates and keep the best epoch: `shiftmend adapt --option learning_rate=0.001,0.01,0.1 "
        "--keep selected`; both are chosen without labels."
    )
    return tuple(steps)


def _advise_checks(facts: Facts) -> tuple[str, ...]:
    steps = []
    if facts.after is not None and facts.after.adapted:
        steps.append(
            "Make this report again on samples that were held back: they tell more than the very sample that the model "
            "was adapted to, whose peculiarities it has fitted as well."
        )
    if facts.scores_after is None:
        steps.append(
            "Label a few dozen samples, keep them out of adapting, and score the mended model with them. Features that "
            "look as at home need not mean the same: no check without labels can see that."
        )
    steps.append("Compare what the model says before and after, below, with what you expect at this site.")
    return tuple(steps)
