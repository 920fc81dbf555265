"""The answer of a report: how accurate the model is here, in one line, and what to do.

Labels decide if there are enough of them. Otherwise, the estimates decide. If no estimate is valid, the answer says so
and has no number. The verdict on features (`verdicts.py`) does not influence the answer, unless nothing was rehearsed
and nothing was mended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shiftmend.evaluation.classification import Scores
from shiftmend.evaluation.regression import RegressionScores
from shiftmend.profiles.rehearsal import Task
from shiftmend.report.facts import Facts
from shiftmend.report.formatting import format_percent
from shiftmend.verification.estimate import Estimate
from shiftmend.verification.harm import OTHER_SHARES
from shiftmend.verification.reading import READ_SIGNALS

Level = Literal["good", "unsure", "bad"]
Choice = Literal["mended", "untouched", "mend", "neither"]

NOT_REHEARSED = "the profile was not rehearsed"
REHEARSE = "shiftmend rehearse MODEL --data held-out/ --profile home.profile --out rehearsed.profile"

MIN_LABELS = 20
"""Smallest number of labelled samples at which the labels decide."""
MIN_GAIN = 0.005
"""The smallest gain in accuracy that counts."""
MIN_RELATIVE_GAIN = 0.02
"""The smallest relative decrease of an error that counts."""

MAX_SILENT_WIDTH = 0.2
"""Largest width of the interval before mending that the headline leaves out."""

METRICS = {
    "accuracy": "Accuracy",
    "agreement": "Agreement with the model’s own answers to undisturbed inputs",
    "rmse": "Root mean square error",
    "deviation": "Deviation from the model’s own answers to undisturbed inputs",
}
"""Display names of the scores."""

ADVICE: dict[Choice, str] = {
    "mended": "Use the mended model.",
    "untouched": "Keep the model as it was.",
    "mend": "Mend the model.",
    "neither": "Trust neither model: label about fifty samples.",
}

SPACE = "\u00a0"
"""Keeps a number and its unit on one line."""
PLAIN_REASONS = {
    "outside of what was rehearsed": "no device that was simulated at home gave such data",
    "other classes than": "some classes are far more or far less frequent among the answers than ever at home",
    "leave too much open": "without labels, a better and a worse model would look alike here",
    "contradict each other": "the label-free signs contradict each other more than they ever did at home",
}
"""Plain wording for reasons that name signals, by a part of the reason."""


@dataclass(frozen=True)
class Answer:
    """The answer of a report in words.

    Attributes:
        level: Level of the answer, which determines its colour.
        headline: Estimated scores before and after, or that they are unknown, and why.
        truth: Score from labels; empty if there are none, or if the headline contains it.
        choice: The recommendation as one word.
        advice: The recommendation as a sentence.
        remarks: Sentences that explain the recommendation.
        next_steps: Further advice. Commands stand between backquotes.
    """

    level: Level
    headline: str
    truth: str
    choice: Choice
    advice: str
    remarks: tuple[str, ...]
    next_steps: tuple[str, ...]


@dataclass(frozen=True)
class _Known:
    """Scores before and after from labels or estimates, if known, and the ends of their intervals.

    Of a range, only the ends are known.
    """

    before: float | None
    after: float | None
    higher_is_better: bool
    worst_before: float | None = None
    worst_after: float | None = None
    best_before: float | None = None

    def is_better(self) -> bool:
        """Return whether the mended model is clearly better; an unknown score is never better.

        Of a range, the end counts that speaks against the mended model.
        """
        after = self.worst_after if self.after is None else self.after
        before = self.best_before if self.before is None or self.after is None else self.before
        if after is None:
            return False
        if before is None:
            return self.after is not None
        gain = after - before if self.higher_is_better else before - after
        return gain > (MIN_GAIN if self.higher_is_better else MIN_RELATIVE_GAIN * abs(before))


def give_answer(facts: Facts) -> Answer:
    """Write the answer: how accurate the model is at the site, and what to do.

    Args:
        facts: The facts of the report.
    """
    known = _find_known(facts)
    choice = _choose(facts, known)
    value, worst = (known.after, known.worst_after) if choice == "mended" else (known.before, known.worst_before)
    poor = value is not None and _is_poor(facts, value)
    doubtful = not poor and worst is not None and _is_poor(facts, worst) and not _was_at_home(facts)
    if (poor or doubtful) and choice != "mend":
        choice = "neither"
    levels: dict[Choice, Level] = {"mended": "good", "untouched": "good", "mend": "bad", "neither": "unsure"}
    level: Level = "bad" if poor else levels[choice]
    if choice == "untouched" and known.before is None:
        level = "unsure"
    advice = ADVICE[choice]
    if choice == "neither" and has_one_model(facts):
        advice = "Do not trust the model here: label about fifty samples."
    return Answer(
        level,
        *_write_headline(facts),
        choice,
        advice,
        tuple(_list_remarks(facts, known, choice, "poor" if poor else "doubtful" if doubtful else "")),
        tuple(_list_next_steps(facts, choice)),
    )


def has_one_model(facts: Facts) -> bool:
    """Return whether there is only one model, because nothing was mended or the model was left untouched."""
    return facts.mending is None or facts.mending.left_alone


def _find_known(facts: Facts) -> _Known:
    estimates, truths = facts.estimates, find_truths(facts)
    if truths is not None:
        return _Known(*truths, isinstance(facts.scores_before, Scores), *truths, truths[0])
    if estimates is None:
        return _Known(None, None, higher_is_better=True)
    before, after = (None if each is None else each.value for each in (estimates.before, estimates.after))
    told = estimates.before or estimates.after
    better = told is None or told.task == "classes"
    worst_before, worst_after = (_find_end(each, "worse") for each in (estimates.before, estimates.after))
    return _Known(before, after, better, worst_before, worst_after, _find_end(estimates.before, "better"))


def _find_end(estimate: Estimate | None, which: Literal["better", "worse"]) -> float | None:
    """Return an end of the interval, or the value if there is no interval."""
    if estimate is None:
        return None
    end = estimate.low if (estimate.task == "classes") == (which == "worse") else estimate.high
    return estimate.value if end is None else end


def is_told(estimate: Estimate | None) -> bool:
    """Return whether a value or a range is told."""
    return estimate is not None and (estimate.reliable or estimate.is_range)


def find_truths(facts: Facts) -> tuple[float, float | None] | None:
    """Return the scores from labels before and after; None if labels cannot decide."""
    before, after = facts.scores_before, facts.scores_after
    trained_on = facts.mending is not None and facts.mending.method_class.takes_labels
    if before is None or before.samples < MIN_LABELS or trained_on:
        return None
    return get_score(before), None if after is None else get_score(after)


def get_score(scores: Scores | RegressionScores) -> float:
    """Return the accuracy, or the root mean square error."""
    return scores.accuracy if isinstance(scores, Scores) else scores.root_mean_square_error


def _choose(facts: Facts, known: _Known) -> Choice:
    if facts.mending is None:
        return _choose_before_mending(facts, known)
    if facts.mending.left_alone:
        ends = (known.worst_before, known.worst_after)
        return "untouched" if any(end is not None for end in ends) or _looks_like_home(facts) else "neither"
    if known.is_better():
        return "mended"
    return "neither" if known.before is None else "untouched"


def _choose_before_mending(facts: Facts, known: _Known) -> Choice:
    estimate = None if facts.estimates is None else facts.estimates.before
    if known.before is None and (estimate is None or not estimate.is_range):
        undecided = facts.before.verdict == "undecided" or facts.rehearsal is not None
        return "untouched" if _looks_like_home(facts) else "neither" if undecided else "mend"
    home = None if facts.rehearsal is None else facts.rehearsal.score
    if home is None or estimate is None:
        return "untouched" if facts.before.verdict == "restored" else "mend"
    if known.before is not None and (find_truths(facts) is not None or estimate.low is None or estimate.high is None):
        lost = home - known.before if known.higher_is_better else known.before - home
        return "mend" if lost > (0.02 if known.higher_is_better else 0.1 * home) else "untouched"
    better = _find_end(estimate, "better")
    assert better is not None
    if better < home if known.higher_is_better else better > home:
        return "mend"
    return "neither" if estimate.is_range else "untouched"


def _looks_like_home(facts: Facts) -> bool:
    """Return whether nothing was rehearsed and no shift is visible."""
    return facts.rehearsal is None and facts.before.verdict == "restored"


def _was_at_home(facts: Facts) -> bool:
    """Return whether the model was left untouched because the data look like home data."""
    mending = facts.mending
    if mending is None or not mending.left_alone:
        return False
    # Without a rehearsal, and in results of older versions, only the reason is known.
    told = mending.changed is None and OTHER_SHARES not in mending.reason
    return mending.changed == "neither" or (told and "as at home" in mending.reason)


def _is_poor(facts: Facts, value: float) -> bool:
    """Return whether the model has lost more than half of its skill at home."""
    home = facts.rehearsal
    if home is None:
        return False
    if home.higher_is_better:
        return value < (home.score + 1 / max(2, len(home.shares))) / 2
    return value > 2 * home.score


# ---- the headline


def _write_headline(facts: Facts) -> tuple[str, str]:
    """Write the headline, and the sentence about labels below it."""
    estimates = facts.estimates
    told = [] if estimates is None else [each for each in (estimates.before, estimates.after) if each is not None]
    truths = _write_truths(facts)
    metric = "Accuracy" if isinstance(facts.scores_before, Scores) else "Root mean square error"
    if held := _list_held(facts):
        name = METRICS.get(held[0].metric, held[0].metric)
        headline = f"{name} {_write_values(facts, told)}, estimated without labels.{_write_untold(facts)}"
        return headline, f"{metric} by the labels: {truths}." if truths else ""
    why = join_reasons(facts)
    if truths:
        return f"{metric} {truths}, by the labels. Without labels it would be unknown: {why}.", ""
    return f"It is unknown how accurate the model is here: {why}.", ""


def _list_held(facts: Facts) -> list[Estimate]:
    """Return the estimates of which a value or a range is told, before first."""
    estimates = facts.estimates
    both = () if estimates is None else (estimates.before, estimates.after)
    return [each for each in both if each is not None and is_told(each)]


def _write_values(facts: Facts, told: list[Estimate]) -> str:
    """Write what is told; of two values, only the last one has its interval."""
    if has_one_model(facts):
        return _write_words(told[-1] if is_told(told[-1]) else told[0])
    before, after = told[0], told[-1]
    numbers = [each for each in (before.value, after.value) if each is not None]
    digits = 1 if numbers and max(numbers) > 0.99 else 0
    digits = 1 if len(numbers) == 2 and abs(numbers[0] - numbers[1]) < 0.02 else digits
    parts = []
    if is_told(before):
        wide = before.low is not None and before.high is not None and before.high - before.low > MAX_SILENT_WIDTH
        parts.append(f"{_write_words(before, digits, interval=wide or after.value is None)} before")
    if is_told(after):
        text = write_estimate(after, digits) if before.reliable and after.reliable else _write_words(after, digits)
        parts.append(f"{text} after")
    return ", ".join(parts)


def _write_words(estimate: Estimate, digits: int | None = None, *, interval: bool = True) -> str:
    """Write an estimate with the word that leads to it: `about 85 % (82 to 87)` or `between 55 and 85 %`."""
    if not estimate.is_range:
        return f"about {write_estimate(estimate, digits, interval=interval)}"
    return "between " + write_estimate(estimate, digits).replace(f"{SPACE}to{SPACE}", f"{SPACE}and{SPACE}")


def _write_untold(facts: Facts) -> str:
    """Say which of the two models has no estimate; return "" if both have one."""
    estimates = facts.estimates
    if has_one_model(facts) or estimates is None or estimates.before is None or estimates.after is None:
        return ""
    if not is_told(estimates.after):
        return " The accuracy of the mended model is unknown without labels."
    return "" if is_told(estimates.before) else " The accuracy before is unknown without labels."


def write_estimate(estimate: Estimate, digits: int | None = None, *, interval: bool = True) -> str:
    """Format an estimate with its interval, e.g. `85 % (82 to 87)`, or a range, e.g. `55 to 85 %`; else "unknown".

    Args:
        estimate: The estimate.
        digits: Decimal places of percentages; by default 0, and 1 above 99 %.
        interval: Whether to add the interval.
    """
    if digits is None:
        digits = 1 if estimate.value is not None and estimate.value > 0.99 else 0
    ends = []
    if estimate.low is not None and estimate.high is not None:
        ends = [write_score(end, estimate.task, digits) for end in (estimate.low, estimate.high)]
    if estimate.value is None:
        return f"{ends[0].split(SPACE)[0]}{SPACE}to{SPACE}{ends[1]}" if ends else "unknown"
    text = write_score(estimate.value, estimate.task, digits)
    if interval and ends:
        low, high = (end.split(SPACE)[0] for end in ends)
        text += f" ({low}{SPACE}to{SPACE}{high})"
    return text


def write_score(value: float, task: Task, digits: int = 1) -> str:
    """Format a score: shares in percent, errors in their own unit."""
    return format_percent(value, digits) if task == "classes" else f"{value:.3g}"


def _write_truths(facts: Facts) -> str:
    before, after = facts.scores_before, facts.scores_after
    if before is None:
        return ""
    task: Task = "classes" if isinstance(before, Scores) else "quantities"
    first = write_score(get_score(before), task)
    if after is None or has_one_model(facts):
        return first
    return f"{first} before, {write_score(get_score(after), task)} after"


def join_reasons(facts: Facts) -> str:
    """Join the reasons why no estimate is valid, in plain words."""
    estimates = facts.estimates
    if estimates is None:
        return NOT_REHEARSED
    both = [each.reasons for each in (estimates.after, estimates.before) if each is not None]
    plain = dict.fromkeys(explain_reason(reason) for reasons in both for reason in reasons)
    return "; ".join(plain) or NOT_REHEARSED


def explain_reason(reason: str) -> str:
    """Translate the reason of an invalid estimate into plain words, for readers who do not know the signals.

    Example:
        >>> explain_reason("slices 0.31 lies outside of what was rehearsed (0.01 to 0.2)")
        'no device that was simulated at home gave such data'
    """
    for part, plain in PLAIN_REASONS.items():
        if part in reason:
            return plain
    named = any(name in reason.split() for name in READ_SIGNALS)
    return PLAIN_REASONS["outside of what was rehearsed"] if named else reason


# ---- what explains it, and what to do


def _list_remarks(facts: Facts, known: _Known, choice: Choice, doubt: Literal["", "poor", "doubtful"]) -> list[str]:
    remarks = []
    home = facts.rehearsal
    if home is not None and (known.before is not None or known.after is not None):
        name = home.metric if home.metric == "accuracy" else "same score"
        remarks.append(f"At home the {name} is {write_score(home.score, home.task)}.")
    if doubt == "poor":
        helped = "Mending helped, but " if known.is_better() and not has_one_model(facts) else ""
        words = f"{helped}the model has lost more than half of its skill at home."
        remarks.append(words[0].upper() + words[1:])
    elif doubt == "doubtful" and choice == "neither":
        remarks.append("The estimate is uncertain: the model may be of little use here.")
    elif _was_at_home(facts):
        remarks.append("The data look as at home.")
    elif facts.mending is not None and facts.mending.changed == "patients":
        remarks.append("The device did not change, but the classes are not as frequent here as at home.")
    elif choice == "untouched" and facts.mending is not None and not facts.mending.left_alone:
        remarks.append(
            "The mended model is not known to be better." if known.after is None else "Mending did not help."
        )
    elif choice == "neither" and known.worst_after is not None and not has_one_model(facts):
        remarks.append("The mended model may be better, but the estimate is too wide to be sure.")
    elif choice == "untouched" and known.before is None:
        remarks.append("Inside the model, the data look as at home.")
    elif choice == "mend":
        remarks.append("The device has shifted: the data differ from those that the model was trained on.")
    if choice == "mended" and facts.mending is not None and facts.mending.same_data is False:
        remarks.append("The estimate is for the inputs of this report. The model was mended with other inputs.")
    if any(each.low is None for each in _list_held(facts)):
        remarks.append("Too few devices were simulated at home to say how far the estimate may be off.")
    if missed := _describe_miss(facts):
        remarks.append(missed)
    return remarks


def _describe_miss(facts: Facts) -> str:
    """Say that labels contradict the estimate; return "" if they do not."""
    truths, estimates = find_truths(facts), facts.estimates
    if truths is None or estimates is None:
        return ""
    wrong = []
    for words, truth, estimate in (("before", truths[0], estimates.before), ("after", truths[1], estimates.after)):
        if truth is None or estimate is None or estimate.metric not in ("accuracy", "rmse"):
            continue
        if estimate.low is not None and estimate.high is not None and not estimate.low <= truth <= estimate.high:
            wrong.append(words)
    if not wrong:
        return ""
    which = "The estimate" if has_one_model(facts) else f"The estimate {' and the one '.join(wrong)}"
    return f"{which} was wrong, as the labels show. The recommendation follows the labels."


def _list_next_steps(facts: Facts, choice: Choice) -> list[str]:
    steps = []
    mending = facts.mending
    if choice == "mended" and mending is not None:
        place = f"It is in `{mending.file}`." if mending.file else "Save it with `adaptation.save(folder)`."
        steps.append(f"Run the mended model from now on. {place}")
    if choice == "mend":
        steps.append(
            "First rule out a simple cause: another normalisation, channel order, resolution or file format. Correct "
            "such a cause instead of adapting to it."
        )
        steps.append(
            "Then run `shiftmend adapt` with the same model, data and profile, and make this report again with "
            "`--adapted`. Do so only if the classes are about as frequent here as at home."
        )
    if choice == "neither" and facts.inputs:
        steps.append(
            "Look at the sample inputs below. Correct a wrong normalisation or channel order instead of adapting to it."
        )
    if facts.scores_before is None or choice == "neither":
        steps.append(_advise_labels(facts, choice))
    if choice == "neither" and mending is None and facts.rehearsal is not None:
        steps.append("Or run `shiftmend adapt`: perhaps the accuracy of a mended model can be estimated.")
    if facts.rehearsal is None and not _list_held(facts):
        steps.append(
            "At home, rehearse once: simulate other devices, and store in the profile how the model copes with them. "
            f"Every site can then estimate its accuracy without labels: `{REHEARSE}`."
        )
    return steps


def _advise_labels(facts: Facts, choice: Choice) -> str:
    file = None if facts.mending is None or has_one_model(facts) else facts.mending.file
    weights = file or (facts.original if has_one_model(facts) else "mended/model.safetensors") or "model.safetensors"
    why = "To be surer, label" if choice != "neither" else "Label"
    table = len(facts.shape) == 1
    form = "in a column of their table" if table else "one folder per class"
    what = f"{why} about fifty samples of this site, {form}, and do not adapt to them."
    few = "fifty.csv --label COLUMN" if table else "fifty/"
    by_class = facts.rehearsal is not None and facts.rehearsal.metric == "accuracy"
    if by_class:
        site = "site.csv" if table else "site/"
        return (
            f"{what} Then run `shiftmend verify MODEL --weights {weights} --data {site} --profile rehearsed.profile "
            f"--labelled {few}`, with the options of `adapt`, such as --mean and --std."
        )
    return f"{what} Then run `shiftmend evaluate MODEL --weights {weights} --data {few}`."
