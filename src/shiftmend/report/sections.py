"""The first sections of the page, each from facts to HTML: verdict, sample inputs, how mending went."""

from __future__ import annotations

from itertools import pairwise

from shiftmend.evaluation.classification import Scores
from shiftmend.evaluation.regression import RegressionScores
from shiftmend.report import charts, pictures
from shiftmend.report.facts import Facts
from shiftmend.report.markup import Markup, Part, element, figure
from shiftmend.report.verdicts import number, percent, state
from shiftmend.utils.checks import counted

SIGNS = {"good": "✓", "unsure": "?", "bad": "✕"}


def opening(facts: Facts) -> Markup:
    shape = " × ".join(facts.shape) or "single numbers"
    what = "before and after mending" if facts.after is not None else "as it came"
    return element(
        "header",
        element("h1", facts.title),
        element("p", f"{counted(facts.samples, 'input')} ({shape}), seen by the model {what}"),
    )


def verdict(facts: Facts) -> Markup:
    said = state(facts)
    sign = element("span", SIGNS[said.level], class_="sign", aria_hidden="true")
    cautions = element(
        "div",
        element("strong", "Before you believe anything below"),
        element("ul", *(element("li", caution) for caution in facts.cautions)),
        class_="caution",
        role="note",
    )
    return element(
        "section",
        element("div", element("h2", sign, said.headline), element("p", said.sentence), class_=f"verdict {said.level}"),
        cautions if facts.cautions else None,
        element(
            "div",
            element(
                "div",
                element("h3", "How far from home"),
                charts.gauge(facts.before, facts.after),
                element(
                    "p",
                    f"The judge is {facts.slices} random mixtures of the features (the numbers that the model’s "
                    "last layer reads), whose distribution at home was stored and which mending never adjusts. "
                    + "Single features have no say but a veto, since mending may adjust them. "
                    + "The line is logarithmic: left is home.",
                    class_="note",
                ),
            ),
            element("div", element("h3", "What to do next"), element("ol", *(_step(step) for step in said.next_steps))),
            class_="first",
        ),
        element("dl", *(_tile(*tile) for tile in _tiles(facts)), class_="tiles"),
        id="verdict",
    )


def _step(text: str) -> Markup:
    """Text with commands between backquotes."""
    parts = text.split("`")
    return element("li", *(element("code", part) if place % 2 else part for place, part in enumerate(parts)))


def _tile(name: str, value: str) -> Markup:
    return element("div", element("dt", name), element("dd", value), class_="tile")


def _tiles(facts: Facts) -> list[tuple[str, str]]:
    def both(before: str, after: str | None) -> str:
        return before if after is None else f"{before} → {after}"

    after = facts.after
    tiles = [("distance from home", both(number(facts.before.divergence), number(after.divergence) if after else None))]
    tap = facts.taps[0]
    clear = None if tap.clear_after is None else str(tap.clear_after)
    tiles.append((f"clearly shifted features, of {tap.units:,}", both(str(tap.clear_before), clear)))
    made = facts.predictions
    if made is not None:
        sure = None if made.after is None else percent(made.after.confidence)
        if made.changed is not None:
            tiles.append(("predictions that changed", percent(made.changed / made.total)))
        tiles.append(("mean confidence", both(percent(made.before.confidence), sure)))
    if isinstance(facts.scores_before, Scores):
        right = percent(facts.scores_after.accuracy, 1) if isinstance(facts.scores_after, Scores) else None
        tiles.append(("accuracy, by labels", both(percent(facts.scores_before.accuracy, 1), right)))
    elif facts.scores_before is not None:
        later = facts.scores_after
        off = f"{later.mean_absolute_error:.3g}" if isinstance(later, RegressionScores) else None
        tiles.append(("mean absolute error", both(f"{facts.scores_before.mean_absolute_error:.3g}", off)))
    return tiles


def inputs(facts: Facts) -> Markup:
    if not facts.inputs:
        return element(
            "section",
            element("h2", "Sample inputs"),
            element("p", "No inputs are shown: this report was made without, or they are too large to show."),
            id="inputs",
        )
    remark = pictures.remark(facts)
    read = " Below each: what the model took it for, and how sure it was." if facts.inputs[0].before is not None else ""
    whole = facts.inputs[-1].number == facts.samples - 1
    return element(
        "section",
        element("h2", "Sample inputs"),
        element("div", pictures.gallery(facts)),
        element(
            "p",
            f"{len(facts.inputs)} of {facts.samples:,} inputs, {'from all over the data' if whole else 'the first'}. "
            "What to look for: do they look as they should at this site: right way up, right colours, nothing cut off?"
            f"{read} {remark}",
            class_="note",
        ),
        element(
            "p",
            "These inputs are part of this file: pass it on only to those who may see them. "
            "A report without them is made with --samples 0.",
            class_="note",
        ),
        id="inputs",
    )


def training(facts: Facts) -> Part:
    mending = facts.mending
    if mending is None or len(mending.history) < 2:
        return None
    rows = mending.history
    starts = [
        (before.epoch, row.block) for before, row in pairwise(rows) if row.block != before.block and before.epoch > 0
    ]
    slices = [(float(row.epoch), row.verification) for row in rows if row.verification is not None]
    losses = [(float(row.epoch), row.loss) for row in rows if row.loss is not None]
    figures = []
    if slices:
        chart = charts.course(
            [charts.Line("after", slices)], starts, mending.kept, mending.floor_per_epoch, "Distance from home by epoch"
        )
        text = (
            "What to look for: a curve that falls and stays low. If it rises while the other falls, the features were "
            "scrambled instead of restored. The ring is the epoch that was kept."
        )
        figures.append(figure(chart, "Distance from home, which judges. ", text))
    if losses:
        chart = charts.course([charts.Line("plain", losses)], starts, -1, None, "Loss by epoch")
        text = (
            "What to look for: that it settles. A low value alone proves nothing: it is what mending was told to lower."
        )
        figures.append(figure(chart, "Loss, which was minimised. ", text))
    if not figures:
        return None
    released = ""
    if starts:
        names = ", ".join(dict.fromkeys([rows[1].block, *(name for _, name in starts)]))
        released = (
            " Dashed uprights mark where a further part of the network was released for training, from the input "
            f"upwards: {names}."
        )
    return element(
        "section",
        element("h2", "How mending went"),
        element(
            "p",
            f"The method {mending.method} ran {counted(rows[-1].epoch, 'epoch')} over the data (an epoch is one run "
            f"through it).{released}",
        ),
        element("div", *figures, class_="charts pair"),
        id="training",
    )
