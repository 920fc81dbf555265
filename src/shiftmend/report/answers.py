"""The sections on what the model answers: its predictions and, where labels exist, how good they are."""

from __future__ import annotations

from shiftmend.evaluation.classification import Scores
from shiftmend.evaluation.regression import RegressionScores
from shiftmend.report import charts
from shiftmend.report.distances import legend
from shiftmend.report.facts import Facts, Guesses
from shiftmend.report.markup import Markup, Part, element, figure
from shiftmend.report.verdicts import percent
from shiftmend.utils.checks import counted

MOST_BARS = 20


def predictions(facts: Facts) -> Markup:
    made = facts.predictions
    if made is None:
        return element(
            "section",
            element("h2", "What the model says now"),
            element(
                "p", "The model gives no scores of classes; how its output moved is shown at the tap “logits” above."
            ),
            id="predictions",
        )
    parts: list[Part] = [element("h2", "What the model says now")]
    sure = f"Its mean confidence (the probability it gives to its own answer) is {percent(made.before.confidence, 1)}"
    if made.after is not None and made.changed is not None:
        parts.append(
            element(
                "p",
                f"{made.changed:,} of {made.total:,} predictions ({percent(made.changed / made.total, 1)}) changed by "
                f"mending. {sure} before and {percent(made.after.confidence, 1)} after. A confident model can be "
                "wrong: confidence is no proof.",
            )
        )
    else:
        parts.append(element("p", f"{sure}. A confident model can be wrong: confidence is no proof."))
    parts.append(legend(made.after is not None, home=False))
    text = "What to look for: a change of shape. A model at a loss has many predictions of low confidence."
    chart = charts.confidences(made.before.histogram, None if made.after is None else made.after.histogram)
    moves = [
        element("li", f"“{facts.classes[one]}” became “{facts.classes[other]}”: {count:,}")
        for one, other, count in made.moves
    ]
    beside = element(
        "div",
        figure(chart, "Confidence. ", text),
        element("h3", "Most frequent changes") if moves else None,
        element("ul", *moves) if moves else None,
    )
    parts.append(element("div", _balance(facts, made.before, made.after), beside, class_="first"))
    return element("section", *parts, id="predictions")


def _balance(facts: Facts, before: Guesses, after: Guesses | None) -> Markup:
    order = range(len(before.counts))
    left_out = len(before.counts) - MOST_BARS
    if left_out > 0:
        last = after or before
        order_ = sorted(order, key=lambda k: (-max(before.counts[k], last.counts[k]), k))[:MOST_BARS]
        chosen = sorted(order_)
    else:
        chosen = list(order)
    total = max(1, sum(before.counts))
    most = max(max(before.counts), max(after.counts) if after else 0) or 1
    rows = []
    for k in chosen:
        bars = [_bar("before", before.counts[k], total, most)]
        bars += [_bar("after", after.counts[k], total, most)] if after is not None else []
        rows.append(
            element(
                "tr",
                element("td", facts.classes[k], class_="name"),
                element("td", element("div", *bars, class_="bars")),
            )
        )
    rest = f" The {left_out:,} rarest classes are not shown." if left_out > 0 else ""
    return element(
        "figure",
        element(
            "div",
            element(
                "table",
                element("thead", element("tr", element("th", "class"), element("th", "share of predictions"))),
                element("tbody", *rows),
            ),
            class_="scroll",
            tabindex="0",
            role="region",
            aria_label="Share of predictions by class",
        ),
        element(
            "figcaption",
            element("strong", "Classes. "),
            "What to look for: a mixture that you would expect at this site. A class that swallows others, or "
            f"vanishes, is a warning. The mixture at home is not in the profile.{rest}",
        ),
    )


def _bar(kind: str, count: int, total: int, most: int) -> Markup:
    return element(
        "div",
        element("i", style=f"--share:{count / most:.4f}"),
        element("span", percent(count / total, 1)),
        class_=f"bar {kind} layer-{kind}",
        title=f"{kind}: {count:,}",
    )


def scores(facts: Facts) -> Part:
    """Only where labels exist."""
    before, after = facts.scores_before, facts.scores_after
    if before is None:
        return None
    used = facts.mending is not None and facts.mending.used_labels
    columns = [_figures(found) for found in (before, after) if found is not None]
    head = ["", "before", "after"] if after is not None else ["", "here"]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    table = element(
        "table",
        element("thead", element("tr", *(element("th", text) for text in head))),
        element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows)),
    )
    chart: Part = None
    if isinstance(before, Scores):
        chart = figure(
            charts.reliability(before.reliability, after.reliability if isinstance(after, Scores) else None),
            "Honesty of the confidence. ",
            "What to look for: points on the dotted diagonal. Below it the model is surer than it should be.",
        )
    said = (
        "These labels, or others, were used for training: this is an upper bound and not a test."
        if used
        else "The labels were used for these scores alone, never for adapting."
    )
    return element(
        "section",
        element("h2", "Scores by labels"),
        element("p", f"{counted(facts.samples, 'input')} came with labels. {said}"),
        element(
            "div",
            element("div", table, class_="scroll", tabindex="0", role="region", aria_label="Scores"),
            chart,
            class_="first",
        ),
        id="scores",
    )


def _figures(found: Scores | RegressionScores) -> dict[str, str]:
    """What a reader is told of scores: in words what is measured, and the figure."""
    if isinstance(found, Scores):
        areas = {} if found.mean_iou is None else {"mean IoU: how far true and predicted areas meet": found.mean_iou}
        return {
            "accuracy: right answers": percent(found.accuracy, 1),
            "calibration error: how far stated confidence is from accuracy, on average": percent(found.ece, 1),
            "the same at its worst": percent(found.mce, 1),
            **{name: percent(value, 1) for name, value in areas.items()},
        }
    several = f", of {len(found.quantities)} quantities" if found.quantities else ""
    explained = {} if found.r2 is None else {f"R²: 1 is perfect, 0 no better than the mean{several}": f"{found.r2:.3f}"}
    return {
        f"mean absolute error{several}": f"{found.mean_absolute_error:.4g}",
        f"root mean square error{several}": f"{found.root_mean_square_error:.4g}",
        **explained,
    }
