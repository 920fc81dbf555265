from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from drawn import assert_nothing_is_cut
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from PIL import Image

from shiftmend.errors import DataError, ShiftmendError
from shiftmend.methods import METHODS
from shiftmend.research.bench.benchmark import AUTO
from shiftmend.research.bench.suite import BENCHMARKS, find
from shiftmend.research.figures import style

# What is left of linear RGB without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str | tuple[float, float, float]) -> np.ndarray:
    values = np.array(to_rgb(colour))
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Convert linear RGB to CIELAB, in which distances are about as large as they look."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ rgb.clip(0, 1) / to_xyz.sum(axis=1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


VARIANTS = {"bufr-sliced": "bufr", "fr-sliced": "fr", "fr-features": "fr", "fr-one-sided": "fr"}
VARIANTS |= {"bufr-paper": "bufr", "fr-paper": "fr"}


def test_every_method_has_a_colour_and_a_marker_of_its_own() -> None:
    assert set(style.METHODS) == {*METHODS, *VARIANTS, AUTO}
    assert len({style.colour_of(method) for method in style.METHODS}) == len(style.METHODS)
    assert len({style.marker_of(method) for method in style.METHODS}) == len(style.METHODS)


def test_every_variant_of_a_method_in_the_suite_is_known() -> None:
    rows = {
        name for benchmark in map(find, BENCHMARKS) for settings in benchmark.settings.values() for name in settings
    }
    assert {name for name in rows - METHODS.keys() if name.startswith(("fr-", "bufr-"))} == set(VARIANTS)
    assert rows <= set(style.METHODS)


@pytest.mark.parametrize(("variant", "method"), VARIANTS.items())
def test_a_variant_has_a_shade_of_its_method(variant: str, method: str) -> None:
    def hue(name: str) -> float:
        _, a, b = lab(linear(style.colour_of(name)))
        return np.degrees(np.arctan2(b, a))

    assert abs((hue(variant) - hue(method) + 180) % 360 - 180) < 25
    assert style.point_style(variant, 4)["color"] == style.colour_of(variant)


@pytest.mark.parametrize("eye", EYES)
def test_colours_that_meet_can_be_told_apart_by_every_eye(eye: str) -> None:
    seen = {method: lab(np.array(EYES[eye]) @ linear(style.colour_of(method))) for method in style.METHODS}
    distances = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in itertools.combinations(seen, 2)}
    nearest = min(distances, key=distances.__getitem__)
    assert distances[nearest] > 12, f"{nearest} are {distances[nearest]:.1f} apart"
    main = [pair for pair in distances if set(pair) <= {"bufr", "fr", "adabn", "shot-im", "source-only"}]
    assert min(distances[pair] for pair in main) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fr-without-a-look", "x", ""])
def test_an_unknown_method_looks_the_same_in_every_process(name: str) -> None:
    code = "from shiftmend.research.figures import style; "
    code += f"print(style.colour_of({name!r}), style.marker_of({name!r}), sep='|')"
    other = (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        .stdout.strip()
        .split("|")
    )
    assert other == [style.colour_of(name), str(style.marker_of(name))]
    assert style.colour_of(name) in style.COLOURS


@pytest.mark.parametrize("colour", [*style.COLOURS, "#ffffff", "#ffff00"])
def test_letters_have_enough_contrast_and_keep_their_hue(colour: str) -> None:
    dark = linear(style.darken(colour))
    assert 1.05 / (dark @ [0.2126, 0.7152, 0.0722] + 0.05) >= 4.5
    before, after = np.array(to_rgb(colour)), np.array(style.darken(colour))
    np.testing.assert_allclose(after * before.max(), before * after.max(), atol=1e-9)


@pytest.mark.slow
def test_importing_the_figures_imports_no_package_of_the_extra() -> None:
    names = "activations, curves, embedding, gallery, images, results, style, weights"
    code = f"import sys; from shiftmend.research.figures import {names}; "
    code += "print({'matplotlib', 'sklearn'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"


def test_without_the_extra_one_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ShiftmendError, match="research"):
        style.make_canvas()


def test_a_canvas_touches_nothing_global() -> None:
    import matplotlib.pyplot

    matplotlib.pyplot.get_backend()  # asking is what decides it, and may not be taken for a change
    before = matplotlib.rcParams.copy()
    figure, axes = style.make_canvas(2, 3, width=2, height=1)
    assert axes.shape == (2, 3)
    np.testing.assert_allclose(figure.get_size_inches(), (6, 2))
    assert matplotlib.pyplot.get_fignums() == []
    assert matplotlib.rcParams == before


@given(
    st.lists(st.floats(-1, 2), min_size=1, max_size=12).map(sorted),
    st.floats(0, 0.3),
)
def test_spread_values_keep_their_order_their_gap_and_the_bounds(values: list[float], gap: float) -> None:
    placed = np.array(style.spread_out(values, gap, 0, 1))
    possible = min(gap, 1 / max(1, len(values) - 1))
    assert (np.diff(placed) >= possible - 1e-9).all()
    assert placed.min() >= -1e-9
    assert placed.max() <= 1 + 1e-9


@pytest.mark.slow
@given(st.lists(st.floats(0.2, 0.8), min_size=2, max_size=6).map(sorted), st.floats(0.01, 0.03))
def test_no_other_arrangement_is_nearer(values: list[float], gap: float) -> None:
    from scipy.optimize import minimize

    placed = np.array(style.spread_out(values, gap, 0, 1))
    apart = {"type": "ineq", "fun": lambda x: np.diff(x) - gap}
    best = minimize(lambda x: ((x - values) ** 2).sum(), placed, constraints=apart, method="SLSQP")
    assert ((placed - values) ** 2).sum() <= best.fun + 1e-6


@pytest.mark.slow
def test_names_beside_points_cover_neither_each_other_nor_a_point() -> None:
    figure, axes = style.make_canvas(width=4, height=3)
    points = [("fr", 1.0, 1.0, "#d55e00"), ("bufr", 1.02, 1.01, "#0072b2"), ("adabn", 1.0, 1.05, "#009e73")]
    points += [("shot-im", 2.0, 2.0, "#cc79a7"), ("target-supervised", 1.05, 1.0, "#000000")]
    axes[0, 0].plot([x for _, x, _, _ in points], [y for _, _, y, _ in points], "o")
    axes[0, 0].margins(0.2)
    style.label_points(axes[0, 0], points)
    figure.draw_without_rendering()
    boxes = {text.get_text(): text.get_window_extent() for text in axes[0, 0].texts}
    assert set(boxes) == {name for name, *_ in points}
    for (name, x, y, _), other in itertools.product(points, boxes):
        assert not boxes[other].contains(*axes[0, 0].transData.transform((x, y))), f"{other} covers {name}"
    for one, other in itertools.combinations(boxes.values(), 2):
        assert not one.shrunk(0.95, 0.9).overlaps(other.shrunk(0.95, 0.9))
    assert_nothing_is_cut(figure)


@pytest.mark.slow
def test_names_of_lines_that_end_together_stand_apart_in_the_order_of_the_lines() -> None:
    figure, axes = style.make_canvas(width=4, height=2)
    ends = [("low", 1.0, 0.50, "#0072b2"), ("high", 1.0, 0.52, "#d55e00"), ("middle", 1.0, 0.51, "#009e73")]
    for name, x, y, colour in ends:
        axes[0, 0].plot([0, x], [0, y], color=colour, label=name)
    style.label_ends(axes[0, 0], ends)
    figure.draw_without_rendering()
    boxes = {text.get_text(): text.get_window_extent() for text in axes[0, 0].texts}
    assert boxes["low"].y0 < boxes["middle"].y0 < boxes["high"].y0
    centres = [(boxes[name].y0 + boxes[name].y1) / 2 for name in ("low", "middle", "high")]
    np.testing.assert_allclose(np.diff(centres), 1.2 * style.LABEL * figure.dpi / 72, rtol=0.35)
    assert_nothing_is_cut(figure)


@pytest.mark.slow
def test_long_titles_and_notes_are_wrapped_and_the_axes_keep_their_size() -> None:
    plain, axes = style.make_canvas(width=3, height=2.5)
    wordy, others = style.make_canvas(width=3, height=2.5)
    for figure, times in ((plain, 1), (wordy, 12)):
        style.add_title(figure, "what is shown")
        style.add_footer(figure, ["what a reader has to know " * times])
        assert_nothing_is_cut(figure)
    assert str(wordy.get_supxlabel()).count("\n") > 3
    assert str(wordy.get_supxlabel()).split() == ("what a reader has to know " * 12).split()
    heights = [axis[0, 0].bbox.height / axis[0, 0].figure.dpi for axis in (axes, others)]
    assert heights[1] == pytest.approx(heights[0], rel=0.06)


def test_a_title_and_its_legend_do_not_cover_each_other() -> None:
    figure, axes = style.make_canvas(width=3, height=2)
    (drawn,) = axes[0, 0].plot([0, 1], [0, 1])
    style.add_legend(figure, "a title that is so long that it has to be wrapped at least once", ([drawn], ["entry"]), 3)
    assert_nothing_is_cut(figure)
    (found,) = figure.legends
    title, entry = found.get_title().get_window_extent(), found.get_texts()[0].get_window_extent()
    assert title.y0 >= entry.y1
    assert entry.y0 >= axes[0, 0].bbox.y1


@pytest.mark.slow
@pytest.mark.parametrize("kind", style.FORMATS)
def test_a_saved_figure_is_valid_and_the_same_twice(kind: str, tmp_path: Path) -> None:
    def drawn(name: str) -> Path:
        figure, axes = style.make_canvas(width=3, height=2)
        axes[0, 0].plot([1, 2], [3, 4], **style.point_style("bufr", 5))
        axes[0, 0].bar([1], [2], hatch="//")
        style.add_title(figure, "title")
        style.add_footer(figure, ["a note"])
        path = tmp_path / f"{name}.{kind}"
        style.save(figure, path)
        first = path.read_bytes()
        style.save(figure, path)
        assert path.read_bytes() == first, "another picture when saved again"
        return path

    one, other = drawn("one"), drawn("other")
    assert one.read_bytes() == other.read_bytes()
    if kind == "png":
        with Image.open(one) as image:
            image.load()
            assert abs(image.width - 450) <= 1
    else:
        root = ElementTree.fromstring(one.read_bytes())
        assert root.tag.endswith("svg")
        written = {element.text for element in root.iter() if element.tag.endswith("text")}
        assert {"title", "a note"} <= written, "letters should stay letters"


def test_other_formats_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    figure, _ = style.make_canvas()
    with pytest.raises(DataError, match="pdf"):
        style.save(figure, tmp_path / "figure.pdf")
    assert list(tmp_path.iterdir()) == []
