"""Do methods that restore the source's features also stay calibrated? (the paper's section 5.5)"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from shiftmend.errors import DataError
from shiftmend.research.analysis.correlations import restoration_and_calibration
from shiftmend.research.bench.benchmark import Result, Which, sees_labels
from shiftmend.research.figures import picking, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(
    results: Sequence[Result],
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    *,
    which: Which = "last",
    exclude: Collection[str] = ("shot",),
    variants: Collection[str] = (),
) -> Figure:
    """One point a method, and Spearman's coefficient over them in the title.

    Means are over the shifts and seeds that all methods have. `exclude` is for methods with a source model of their
    own, whose features are others to begin with: by default SHOT. It is drawn if it is named among the methods, and so
    is one that saw labels, which is left out otherwise. `variants` of methods are left out where they have no shift and
    seed in common with the rest, unless they are named.
    """
    grid = picking.pick(results, methods, shifts, which=which)
    labelled = [method for method in grid.methods if sees_labels(method)]
    left_out = {method for method in (*exclude, *labelled) if methods is None or method not in methods}
    dispensable = [method for method in variants if methods is None or method not in methods]
    found = restoration_and_calibration(grid.cells.values(), which, left_out, dispensable)
    points = {method: point for method, point in found.means.items() if all(map(math.isfinite, point))}
    if not points:
        raise DataError(
            f"{found.correlation.remark or 'no restoration distance is finite'}; "
            "choose fewer methods, or a benchmark that has the clean version of its images"
        )
    figure, axes = style.canvas(1, 1, width=4.6, height=3.2)
    axis = axes[0, 0]
    for method, (distance, ece) in points.items():
        axis.plot([distance], [100 * ece], **style.points(method, 7))
    axis.margins(0.15)
    axis.set_xlim(left=max(0, axis.get_xlim()[0]))
    axis.set_ylim(bottom=max(0, axis.get_ylim()[0]))
    axis.set_xlabel("restoration distance (mean absolute difference of features)", fontsize=style.LABEL)
    axis.set_ylabel("expected calibration error, %", fontsize=style.LABEL)
    value = found.correlation.value
    said = (
        f"no rank correlation: {found.correlation.remark}"
        if value is None
        else f"Spearman's rank correlation {value:.2f}"
    )
    style.title(figure, f"{grid.benchmark} ({grid.protocol}), {picking.MOMENTS[which]}: {said}")
    seeds = len({seed for _, _, seed in grid.cells})
    size = f"{picking.counted(len(grid.shifts), 'shift')}, {picking.counted(seeds, 'seed')}"
    pairs = picking.counted(found.places, "pair")
    notes = [f"means over {pairs} of shift and seed, those that all of these methods have done, of {size}"]
    own = [method for method in grid.methods if method in left_out and method not in labelled]
    taught = [method for method in labelled if method in left_out]
    unknown = [method for method in grid.methods if method not in (*points, *left_out, *found.without)]
    notes += [f"not drawn, with a source model of its own: {', '.join(own)}"] if own else []
    notes += [f"not drawn, trained with labels: {', '.join(taught)}"] if taught else []
    notes += [f"not drawn, for lack of common seeds: {', '.join(found.without)}"] if found.without else []
    notes += [f"not drawn, without a finite restoration distance: {', '.join(unknown)}"] if unknown else []
    style.footer(figure, [*notes, *picking.notes(grid, methods, shifts)])
    named = [(method, distance, 100 * ece, style.colour(method)) for method, (distance, ece) in points.items()]
    style.label_points(axis, named)
    return figure
