"""Descriptions of how far the features are from home, for the specialist. `answer.py` is about accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shiftmend.report.facts import Facts
from shiftmend.report.formatting import format_number, format_percent
from shiftmend.verification.verdict import Verification


@dataclass(frozen=True)
class Statement:
    """The verdict about the features in words: a headline and a sentence."""

    headline: str
    sentence: str


def state_verdict(facts: Facts) -> Statement:
    """Describe the verdict on the features of the mended model, or of the untouched one if nothing was mended."""
    made = _state_shift(facts) if facts.after is None else _state_mending(facts, facts.after)
    last = facts.before if facts.after is None else facts.after
    if last.verdict != "undecided":
        return made
    return Statement(made.headline, f"{made.sentence} {_ask_for_samples(facts)}")


def _state_shift(facts: Facts) -> Statement:
    found = facts.before
    away = f"The features on these {found.samples:,} samples lie {format_number(found.divergence)} from home"
    chance = f"chance alone would give {format_number(found.floor)}"
    if found.learnt is not None:
        headlines = {"restored": "As at home", "partly restored": "Slightly shifted"}
        sentence = f"{away}, where {chance}. {_explain_learnt(found)}"
        return Statement(headlines.get(found.verdict, "Shifted"), sentence)
    match found.verdict:
        case "restored":
            return Statement("As at home", f"{away}, where {chance}: no shift of the device can be seen.")
        case "undecided":
            return Statement("Undecided", f"{away}, and {chance}: too few samples to tell.")
        case "partly restored":
            words = _explain_straying(found) or "a small shift, beyond chance."
            return Statement("Slightly shifted", f"{away}, where {chance}: {words}")
        case _:
            words = _explain_straying(found) or "these are not the features that the model was trained on."
            return Statement("Shifted", f"{away}, where {chance}: {words}")


def _state_mending(facts: Facts, after: Verification) -> Statement:
    before = facts.before
    assert facts.mending is not None
    method = f"mending by {facts.mending.method}"
    start = f"Before mending, the features lay {format_number(before.divergence)} from home"
    chance = "chance may leave up to" if after.adapted else "chance alone would give"
    remains = f"{format_number(after.divergence)} remains, where {chance} {format_number(after.floor)}"
    if before.excess == 0:
        change = f"as near as chance allows; after {method} they lie at {format_number(after.divergence)}"
    elif not math.isfinite(after.excess):
        change = f"after {method}, some features are no finite numbers"
    elif after.excess > before.excess:
        change = f"{method} made it worse, and they now lie at {format_number(after.divergence)}"
    elif not math.isfinite(before.excess):
        change = f"{method} made them finite again, and {remains}"
    else:
        part = 1 - after.excess / before.excess
        taken = "more than 99\u00a0%" if 0.995 <= part < 1 else format_percent(part)
        change = f"{method} removed {taken} of what chance does not explain, and {remains}"
    sentence = f"{start}; {change}."
    if but := _explain_straying(after):
        sentence += f" {but[0].upper()}{but[1:]}"
    if after.learnt is not None:
        sentence += f" {_explain_learnt(after)}"
    return Statement(after.verdict.capitalize(), sentence)


def _explain_learnt(found: Verification) -> str:
    """Explain the limits that the rehearsal taught."""
    assert found.learnt is not None
    good, failed = (format_number(one) for one in (found.learnt.restored, found.learnt.failed))
    if found.verdict == "not restored":
        return f"In the rehearsal, models farther than {failed} from home were poor."
    if found.learnt.restored == 0:
        return "In the rehearsal, good and poor models were as far from home as this."
    if found.verdict == "restored":
        return f"In the rehearsal, models up to {good} from home were as good as at home, or nearly."
    return f"In the rehearsal, models up to {good} from home were good, and models beyond it good or poor."


def _explain_straying(found: Verification) -> str:
    """Explain that mixtures of features are as at home but single features are not; return "" otherwise."""
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
    need, have = facts.samples_needed, facts.samples
    return f"Collect at least {need:,} samples at this site (these are {have:,}) and try again."
