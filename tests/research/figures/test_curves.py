from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import assert_nothing_is_cut, assert_same_bytes, footer, line

from shiftmend.engine.history import Epoch
from shiftmend.errors import DataError
from shiftmend.research.figures import curves, style

BLOCKS = ("conv1 + bn1", "conv2 + bn2", "linear")


def history(each: int = 4, blocks: tuple[str, ...] = BLOCKS) -> list[Epoch]:
    rows = [Epoch(0, "", 0.0, {}, 0.0, {"slices": 1.0})]
    for number in range(1, each * len(blocks) + 1):
        losses = {"features": 1 / number, "logits": 0.5 / number}
        rows.append(Epoch(number, blocks[(number - 1) // each], 0.1, losses, 0.1, {"slices": 1 / (1 + number) ** 2}))
    return rows


def scored(rows: list[Epoch], every: int = 1) -> list[dict[str, Any]]:
    """Return a history as benchmarks store it, where some epochs have an accuracy."""
    return [row.to_json() | ({"accuracy": 0.05 * row.epoch} if row.epoch % every == 0 else {}) for row in rows]


@pytest.mark.slow
def test_the_lines_are_the_histories() -> None:
    figure = curves.draw_curves(scored(history(), every=3), "BUFR")
    loss, slices, accuracy = figure.axes
    np.testing.assert_allclose(line(loss, "adaptation"), [(n, 1.5 / n) for n in range(1, 13)])
    np.testing.assert_allclose(line(slices, "adaptation"), [(n, 1 / (1 + n) ** 2) for n in range(13)])
    np.testing.assert_allclose(line(accuracy, "adaptation"), [(n, 5 * n) for n in (0, 3, 6, 9, 12)])
    assert (loss.get_yscale(), slices.get_yscale(), accuracy.get_yscale()) == ("log", "log", "linear")
    assert [axis.get_xlabel() for axis in figure.axes] == ["", "", "epoch"]
    assert "%" in accuracy.get_ylabel()
    assert accuracy.get_ylim() == (0, 100)
    assert_nothing_is_cut(figure)


def test_epochs_of_an_adaptation_draw_the_same_without_accuracy() -> None:
    from_rows, from_dicts = curves.draw_curves(history()), curves.draw_curves(scored(history()))
    assert (len(from_rows.axes), len(from_dicts.axes)) == (2, 3)
    for one, other in zip(from_rows.axes, from_dicts.axes, strict=False):
        np.testing.assert_array_equal(line(one, "adaptation"), line(other, "adaptation"))


def test_blocks_are_marked_where_they_join_in() -> None:
    assert curves.unfreezing_moments(history()) == [(0, BLOCKS[0]), (4, BLOCKS[1]), (8, BLOCKS[2])]
    figure = curves.draw_curves(history())
    for axis in figure.axes:
        dashed = [one.get_xdata()[0] for one in axis.get_lines() if one.get_linestyle() == "--"]
        assert dashed == [0, 4, 8]
    names = [(text.get_text(), text.xy[0]) for text in figure.axes[0].texts]
    assert names == [(BLOCKS[0], 0), (BLOCKS[1], 4), (BLOCKS[2], 8)]
    assert "unfrozen" in footer(figure)
    assert_nothing_is_cut(figure)


@pytest.mark.slow
def test_names_of_many_blocks_stand_upright_and_do_not_touch() -> None:
    figure = curves.draw_curves(history(2, tuple(f"layer{n}.conv + layer{n}.bn" for n in range(14))))
    assert_nothing_is_cut(figure)
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 14
    assert all(not left.overlaps(right) for left, right in itertools.pairwise(boxes))
    heights = [axis.bbox.height / figure.dpi for axis in figure.axes]
    assert min(heights) > 0.8, "the names should not take the room of the curves"


def test_a_method_that_trains_everything_at_once_has_no_marks() -> None:
    rows = history(6, ("all",))
    assert curves.unfreezing_moments(rows) == []
    figure = curves.draw_curves(rows)
    assert all(one.get_linestyle() != "--" for axis in figure.axes for one in axis.get_lines())
    assert footer(figure) == ""


@pytest.mark.slow
def test_several_histories_are_named_where_they_end() -> None:
    shorter = [row | {"accuracy": 0.3} for row in scored(history(3))]
    figure = curves.draw_curves({"shot_noise": scored(history()), "sky": shorter, "bufr": scored(history(2))})
    last = figure.axes[-1]
    assert [text.get_text() for text in last.texts] == ["shot noise", "sky", "bufr"]
    assert last.texts[1].xy == (9, 30)
    (bufr,) = [one for one in last.get_lines() if one.get_label() == "bufr"]
    assert bufr.get_color() == style.colour_of("bufr")
    assert last.get_xlim() == (0, 12)
    assert_nothing_is_cut(figure)


def test_the_kept_epoch_has_a_ring_in_every_panel() -> None:
    figure = curves.draw_curves(scored(history()), selected=7, notes=["seed 3"])
    for axis, value in zip(figure.axes, (1.5 / 7, 1 / 64, 35), strict=True):
        (ring,) = [one for one in axis.get_lines() if one.get_markerfacecolor() == "none"]
        np.testing.assert_allclose(ring.get_xydata(), [(7, value)])
    assert "kept by a choice without labels" in footer(figure)
    assert footer(figure).endswith("seed 3")


def test_negative_losses_and_those_that_are_not_finite() -> None:
    rows = [row.to_json() for row in history()]
    for number, row in enumerate(rows[1:]):
        row["losses"] = {"entropy": math.nan if number == 3 else -1.0 - number}
    (loss, _) = curves.draw_curves(rows).axes
    assert loss.get_yscale() == "linear"
    np.testing.assert_allclose(line(loss, "adaptation"), [(n, -float(n)) for n in range(1, 13) if n != 4])


def test_a_history_without_slices_draws_what_there_is() -> None:
    rows = [row.to_json() | {"verification": None} for row in history()]
    figure = curves.draw_curves(rows)
    assert [axis.get_ylabel().split("\n")[0] for axis in figure.axes] == ["loss"]
    assert_nothing_is_cut(figure)


@pytest.mark.slow
def test_the_same_results_give_the_same_picture(tmp_path: Path) -> None:
    assert_same_bytes(
        lambda: curves.draw_curves({"sky": scored(history()), "fog": scored(history(3))}, "BUFR"), tmp_path
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "history"),
        (history()[:1], "history"),
        ({}, "history"),
        ({"bufr": history(), "source-only": history()[:1]}, "source-only"),
        ([row.to_json() | {"losses": {}, "verification": None} for row in history()], "finite"),
    ],
)
def test_what_cannot_be_drawn_is_said(rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        curves.draw_curves(rows)
