"""The first thing on the page: one sentence, one colour, and what to do next. It rests on the verification alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shiftmend.report.facts import Facts
from shiftmend.verification.verdict import Verification

Level = Literal["good", "unsure", "bad"]


@dataclass(frozen=True)
class Statement:
    level: Level
    headline: str
    sentence: str
    next_steps: tuple[str, ...]


def number(value: float) -> str:
    """A distance for people: two figures that count, and never a row of zeros."""
    if not math.isfinite(value):
        return "infinite"
    if value < 0.0005:
        return "0" if value == 0 else "below 0.0005"
    return f"{value:.2g}" if value < 0.01 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def percent(share: float, digits: int = 0) -> str:
    """A share with a sign that stays on its line."""
    return f"{100 * share:.{digits}f}\u00a0%" if math.isfinite(share) else "–"


def state(facts: Facts) -> Statement:
    """The verdict on the mended model, or without one on the target."""
    return _before_only(facts) if facts.after is None else _mended(facts, facts.after)


def _before_only(facts: Facts) -> Statement:
    found = facts.before
    away = f"The model’s features on these {found.samples:,} samples lie {number(found.divergence)} from home"
    chance = f"chance alone would give {number(found.floor)}"
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
            return Statement("unsure", "Undecided", f"{away}, and {chance}: too few samples to tell.", (_more(facts),))
        case "partly restored":
            headline = "Slightly shifted"
            sentence = f"{away}, where {chance}: {_alone(found) or 'a small shift, beyond chance.'}"
        case _:
            headline = "Shifted"
            others = "these are not the features that the model was trained on."
            sentence = f"{away}, where {chance}: {_alone(found) or others}"
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


def _mended(facts: Facts, after: Verification) -> Statement:
    before = facts.before
    assert facts.mending is not None
    method = f"mending by {facts.mending.method}"
    start = f"Before mending, the model’s features lay {number(before.divergence)} from home"
    chance = "chance may leave up to" if after.adapted else "chance alone would give"
    remains = f"{number(after.divergence)} remains, where {chance} {number(after.floor)}"
    if before.excess == 0:
        change = f"as near as chance allows, and after {method} they lie at {number(after.divergence)}"
    elif not math.isfinite(after.excess):
        change = f"and {method} left features that are no finite numbers"
    elif after.excess > before.excess:
        change = f"{method} made it worse, and they now lie at {number(after.divergence)}"
    elif not math.isfinite(before.excess):
        change = f"{method} made them finite again, and {remains}"
    else:
        part = 1 - after.excess / before.excess
        taken = "more than 99\u00a0%" if 0.995 <= part < 1 else percent(part)
        change = f"{method} took away {taken} of what chance does not explain, and {remains}"
    sentence = f"{start}; {change}."
    if but := _alone(after):
        sentence += f" {but[0].upper()}{but[1:]}"
    match after.verdict:
        case "restored":
            return Statement("good", "Restored", sentence, _trust(facts))
        case "undecided":
            return Statement("unsure", "Undecided", sentence, (_more(facts), *_trust(facts)))
        case "partly restored":
            return Statement("unsure", "Partly restored", sentence, (*_again(facts), *_trust(facts)))
        case _:
            return Statement(
                "bad",
                "Not restored",
                sentence,
                ("Do not rely on the mended model. The original is untouched.", *_again(facts)),
            )


def _alone(found: Verification) -> str:
    """What is to be said where mixtures of features are as at home and single ones are not; else nothing."""
    if not found.strayed:
        return ""
    assert found.marginals is not None
    return (
        "mixtures of features, which this distance compares, are as at home, but features and outputs one by one are "
        f"not ({number(found.marginals)})."
    )


def _more(facts: Facts) -> str:
    if facts.enough is None:
        return "The profile was made from too few samples to be sure: make it again, at home, with more of them."
    return f"Collect at least {facts.enough:,} samples at this site (here are {facts.samples:,}) and ask again."


def _again(facts: Facts) -> tuple[str, ...]:
    steps = [
        "Look at the sample inputs below: a wrong normalisation or channel order is to be put right, not adapted to.",
        "Ask whether the classes are as frequent here as at home. If not, features rightly differ, and mending may "
        "harm.",
    ]
    if facts.mending is not None and facts.mending.method != "bufr":
        steps.append("Try the method bufr, which restores the lowest layers first.")
    steps.append(
        "Try several learning rates and keep the best epoch: `shiftmend adapt --option learning_rate=0.001,0.01,0.1 "
        "--keep selected`; both are chosen without labels."
    )
    return tuple(steps)


def _trust(facts: Facts) -> tuple[str, ...]:
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
