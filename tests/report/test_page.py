"""The parsed page: its sections, its numbers, and that no text can become markup."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup
from PIL import Image
from report_worlds import Page, mended
from torch import nn

import shiftmend
from shiftmend import report
from shiftmend.adaptation.result import Adaptation
from shiftmend.engine.history import Epoch
from shiftmend.introspection.taps import Tap
from shiftmend.report import charts
from shiftmend.report.facts import Unit
from shiftmend.report.formatting import format_number
from shiftmend.report.page import environment, render
from shiftmend.report.sections import SECTIONS, SPECIALIST
from shiftmend.verification.verdict import Verification

HOSTILE = "</script><script>alert(1)</script><img src=//x.test/p onerror='alert(2)'>\"&amp;\u202e\x00"
ORDER = ["answer", "scores", "inputs", "predictions", "undo", "features", "shift", "training", "stored", "run"]


@pytest.fixture(scope="module")
def found() -> report.Facts:
    world, profile, result = mended()
    return report.gather(world.model, world.target, profile, result, labels=world.labels, original="home.safetensors")


@pytest.fixture(scope="module")
def page(found: report.Facts) -> Page:
    return Page(render(found))


def test_sections_are_there_in_order(page: Page, found: report.Facts) -> None:
    assert list(page.sections) == ORDER
    levels = [int(level[1]) for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert all(text.strip() for _, text in page.headings)
    bare = replace(found, after=None, scores_before=None, scores_after=None, mending=None)
    assert "training" not in Page(render(bare)).sections


def test_every_section_has_a_template_and_every_template_a_section() -> None:
    templates = {name.removesuffix(".html.j2") for name in environment().list_templates(extensions=["j2"])}
    names = [section.__name__ for section in (*SECTIONS, *SPECIALIST)]
    assert templates - {"page", "macros"} == set(names) == {*ORDER, "changed", "tried", "rehearsed"}


def test_without_an_adaptation_there_is_no_word_of_what_mending_did() -> None:
    world, profile, _ = mended()
    page = Page(render(report.gather(world.model, world.target, profile)))
    assert list(page.sections) == [part for part in ORDER if part not in ("scores", "training")]
    assert ("h2", "Features: shifted") in page.headings
    assert "nothing to undo" in page.sections["undo"]
    assert "tapunitsmean distance hereclearly shiftedfeatures12" in page.sections["shift"]
    assert "as it came." in page.text
    assert "mending" not in page.sections["predictions"] + page.sections["shift"]
    scored = Page(render(report.gather(world.model, world.target, profile, labels=world.labels)))
    assert (
        f"hereaccuracy: right answers{100 * world.accuracy(world.model):.1f}\u00a0%calib" in scored.sections["scores"]
    )


def test_numbers_are_those_computed_elsewhere(page: Page) -> None:
    world, profile, result = mended()
    verdict = page.sections["features"]
    for model in (world.model, result.model):
        assert format_number(shiftmend.verify(model, world.target, profile).divergence) in verdict
    accuracies = [100 * world.accuracy(model) for model in (world.model, result.model)]
    answer = f"Accuracy {accuracies[0]:.1f}\u00a0% before, {accuracies[1]:.1f}\u00a0% after, by the labels."
    assert page.headings[1][1].startswith(answer)
    with torch.no_grad():
        before, after = world.model(world.target), result.model(world.target)
    changed = int((before.argmax(1) != after.argmax(1)).sum())
    assert f"{changed} of 600 predictions ({100 * changed / 600:.1f}\u00a0%)" in page.sections["predictions"]
    for logits in (before, after):
        assert f"{100 * float(logits.softmax(1).amax(1).mean()):.1f}\u00a0%" in page.sections["predictions"]
        for share in np.bincount(logits.argmax(1), minlength=3) / 6:
            assert f"{share:.1f}\u00a0%" in page.sections["predictions"]
    assert "never for adapting" in page.sections["scores"]
    for fact in ("600", "12 units", "128 for verification", profile.weights, f"{len(profile.to_bytes()):,} bytes"):
        assert fact in page.sections["stored"]
    assert "home.safetensors" in page.sections["undo"]
    for block in {row.block for row in result.history[1:]}:
        assert block in page.sections["training"]


def test_before_and_after_stand_under_their_own_heads(page: Page, found: report.Facts) -> None:
    assert found.predictions is not None
    assert found.predictions.after is not None
    assert found.after is not None
    shift, verdict, said = page.sections["shift"], page.sections["features"], page.sections["predictions"]
    assert "tapunitsmean distance beforeafterclearly shifted beforeafter" in shift
    for tap in found.taps:
        assert tap.mean_after is not None
        assert tap.mean_before == pytest.approx(np.mean(tap.before))
        assert tap.mean_after == pytest.approx(np.mean(tap.after or ()))
        means = f"{format_number(tap.mean_before)}{format_number(tap.mean_after)}"
        assert f"{tap.name}{tap.units}{means}{tap.clear_before}{tap.clear_after}" in shift
        unit = tap.worst[0]
        assert unit.after is not None
        distances = [format_number(seen.divergence) for seen in (unit.before, unit.after)]
        assert f"Unit {unit.number}. Distance {distances[0]} before, {distances[1]} after. Before: values are " in shift
        outside = "".join(f"{100 * seen.outside:.1f}\u00a0%" for seen in (unit.before, unit.after))
        moved = "".join(f"{100 * seen.moved:+.0f}\u00a0% of range" for seen in (unit.before, unit.after))
        assert f"{unit.number}{distances[0]}{distances[1]}{outside}{moved}" in shift
    assert f"distance of about {format_number(found.taps[0].floor)}." in shift
    ends = [format_number(one.divergence) for one in (found.before, found.after)]
    assert f"distance from home{ends[0]} → {ends[1]}" in verdict
    assert f", of 12{found.taps[0].clear_before} → {found.taps[0].clear_after}" in verdict
    made = found.predictions
    assert made.after is not None
    assert f"answers that changed{100 * (made.changed or 0) / 600:.0f}\u00a0%" in page.sections["answer"]
    sure = [f"{100 * one.confidence:.1f}\u00a0%" for one in (made.before, made.after)]
    assert f"is {sure[0]} before and {sure[1]} after" in said
    titles = [attributes.get("title") for _, attributes in page.elements if "bar " in (attributes.get("class") or "")]
    pairs = zip(made.before.counts, made.after.counts, strict=True)
    assert titles == [text for a, b in pairs for text in (f"before: {a}", f"after: {b}")]
    one, other, count = made.moves[0]
    assert f"Most frequent changes“{one}” became “{other}”: {count}" in said
    assert "here, before mendinghere, after mending" in said
    assert "at home (source)" not in said
    labels = [attributes.get("aria-label") for tag, attributes in page.elements if tag == "svg"]
    assert f"Distance from home: before {ends[0]}, after {ends[1]}" in labels
    assert any(sample.before != sample.after and sample.label for sample in found.inputs)
    for sample in found.inputs:
        assert sample.before is not None
        assert sample.after is not None
        told = [f"{guess} ({100 * p:.0f}\u00a0%)" for guess, p in (sample.before, sample.after)]
        values = "".join(f"{value:.3g}" for value in sample.values.tolist())
        assert f"{sample.number}{values}before {told[0]}after {told[1]}label {sample.label}" in page.sections["inputs"]


def test_scores_stand_beside_their_names_and_say_what_labels_were_used_for(page: Page, found: report.Facts) -> None:
    before, after = found.scores_before, found.scores_after
    assert isinstance(before, shiftmend.Scores)
    assert isinstance(after, shiftmend.Scores)
    assert "The labels were used for these scores alone" in page.sections["scores"]
    for name, one, two in (
        ("beforeafteraccuracy: right answers", before.accuracy, after.accuracy),
        ("between confidence and accuracy", before.ece, after.ece),
        ("largest such gap", before.mce, after.mce),
    ):
        assert f"{name}{100 * one:.1f}\u00a0%{100 * two:.1f}\u00a0%" in page.sections["scores"]
    for kind, scores in (("before", before), ("after", after)):
        drawn = sum(a.get("class") == f"dot {kind} layer-{kind}" for _, a in page.elements)
        assert drawn == sum(one.accuracy is not None for one in scores.reliability)
    assert str(charts.draw_reliability(before.reliability, after.reliability)) in render(found)
    assert found.mending is not None
    manifest = found.mending.manifest | {"method": {"name": "target-supervised"}}
    trained = Page(render(replace(found, mending=replace(found.mending, manifest=manifest)))).sections["scores"]
    assert "too good to be a test" in trained
    assert "never for adapting" not in trained
    numbers = shiftmend.RegressionScores(600, mean_absolute_error=0.25, root_mean_square_error=0.5, r2=None)
    regression = Page(render(replace(found, scores_before=numbers, scores_after=None))).sections["scores"]
    assert "heremean absolute error0.25root mean square error0.5" in regression


def test_of_many_classes_the_most_frequent_are_shown(found: report.Facts) -> None:
    made = found.predictions
    assert made is not None
    before = tuple(range(25))  # of these the first five are the rarest, and with what became of them the middle ones
    after = tuple(100 if k < 5 else 0 for k in range(25))
    names = tuple(f"kind {k}" for k in range(25))
    for last, shown in ((None, range(5, 25)), (after, [*range(5), *range(10, 25)])):
        guesses = [None if counts is None else replace(made.before, counts=counts) for counts in (before, last)]
        assert guesses[0] is not None
        changed = replace(made, before=guesses[0], after=guesses[1], changed=None if last is None else 7, moves=())
        page = Page(render(replace(found, predictions=changed, classes=names, inputs=())))
        said = page.sections["predictions"]
        assert [k for k in range(25) if f"kind {k}{100 * k / 300:.1f}\u00a0%" in said] == list(shown)
        assert "The 5 rarest classes are not shown." in said
        assert "Most frequent changes" not in said
        bars = [float((a["style"] or "").removeprefix("--share:")) for tag, a in page.elements if "style" in a]
        assert max(bars) == 1.0


@pytest.mark.parametrize(
    ("moved", "spread", "outside", "words"),
    [
        (0.2, 1.0, 0.0, "values are higher."),
        (-0.2, 1.5, 0.25, "values are lower and spread wider, 25\u00a0% beyond the range at home."),
        (0.0, 0.5, 0.0, "values are bunched together."),
        (0.04, 1.1, 0.005, "mean and spread are as at home, the shape is not."),
    ],
)
def test_words_say_which_way_a_unit_went(
    found: report.Facts, moved: float, spread: float, outside: float, words: str
) -> None:
    tap = found.taps[0]
    seen = replace(tap.worst[0].before, moved=moved, spread=spread, outside=outside)
    only = replace(tap, worst=(replace(tap.worst[0], before=seen),), constant=4)
    shift = Page(render(replace(found, taps=(only,)))).sections["shift"]
    assert f"Before: {words}" in shift
    assert "12 units are compared. 4 more never varied at home" in shift


def test_the_protocol_says_what_was_judged_and_kept(page: Page, found: report.Facts) -> None:
    assert found.mending is not None
    assert "judged onthe same inputs that were adapted to" in page.sections["run"]
    last = found.mending.history[-1].epoch
    ring = [float(a["cx"] or "nan") for _, a in page.elements if a.get("class") == "kept"]
    assert ring == [charts.WIDTH - charts.RIGHT], "of the last epoch, at the end of the line"
    assert "the mean over 128 slices" in page.sections["features"]
    assert str(found.mending.manifest["environment"]["platform"]) not in page.sections["run"].split("The whole")[0]
    assert f"keptepoch {last}, the last one" in page.sections["run"]
    assert f"ran {last} epochs" in page.sections["training"]
    changes = {"kept": "selected", "selected_epoch": 2, "status": "interrupted", "target": {"samples": 1234}}
    changes |= {"learning_rate_chosen": "from several", "seed": 77}
    other = replace(found.mending, manifest=found.mending.manifest | changes, same_data=False)
    shown = Page(render(replace(found, mending=other, cautions=("Mind the gap.",))))
    for words in (
        *("keptepoch 2, chosen without labels", "endedinterrupted", "adapted to1,234 inputs"),
        *("learning rate chosenfrom several", "seed77"),
        "judged onother inputs than those that were adapted to",
    ):
        assert words in shown.sections["run"]
    assert "Mind the gap." in shown.sections["answer"]
    assert "before and after mending" in page.text
    home = found.home
    tap = {"features": ("6", 12, 5)}
    stored = Page(render(replace(found, home=replace(home, taps=tap)))).sections["stored"]
    assert "12 units at 6, 5 of them constant" in stored
    assert "6, float32, values from -6.08 to 6" in stored
    assert "presetreference" in stored
    assert "mean and variance," in stored


def test_nothing_is_loaded_from_anywhere(found: report.Facts) -> None:
    text = render(found)
    for tag, attributes in Page(text).elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "a")
        for name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href"):
            assert (attributes.get(name) or "data:").startswith("data:")
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|eval\(", text)
    policy = next(a["content"] for t, a in Page(text).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_pictures_and_charts_can_be_read_out(page: Page) -> None:
    for tag, attributes in page.elements:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
        if tag == "img":
            assert attributes["alt"]
    figures = sum(tag == "figure" for tag, _ in page.elements)
    assert figures == sum(tag == "figcaption" for tag, _ in page.elements) > 10
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_without_scripts_only_controls_are_hidden(page: Page) -> None:
    hidden = [(tag, attributes) for tag, attributes in page.elements if "hidden" in attributes]
    for tag, attributes in hidden:
        assert "data-controls" in attributes or (tag in ("figure", "tr") and "data-row" in attributes)
    shown = [a for tag, a in page.elements if tag == "figure" and "data-row" in a and "hidden" not in a]
    values = [float(a["data-before"] or "nan") for a in shown[:6]]
    assert values == sorted(values, reverse=True)


def test_units_are_sorted_by_their_own_numbers_and_what_is_not_finite_is_worst(found: report.Facts) -> None:
    tap = found.taps[0]
    nothing = [replace(unit, after=unit.after and replace(unit.after, divergence=float("nan"))) for unit in tap.worst]
    for worst in (tap.worst, nothing):
        page = Page(render(replace(found, taps=(replace(tap, worst=tuple(worst)),))))
        rows = {a["data-row"]: a for tag, a in page.elements if tag == "tr" and "data-row" in a}
        assert len(rows) == len(tap.worst)
        for unit in worst:
            assert unit.after is not None
            row, gain = rows[str(unit.number)], unit.before.divergence - unit.after.divergence
            keys = [float(row[f"data-{name}"] or "nan") for name in ("before", "after", "gain", "outside")]
            ends = [1e308, -1e308] if worst is nothing else [unit.after.divergence, gain]
            assert keys == pytest.approx([unit.before.divergence, *ends, unit.after.outside], rel=1e-4)
    page = Page(render(replace(found, taps=(tap,))))
    ways: list[Callable[[Unit], float]] = [
        lambda unit: unit.before.divergence,
        lambda unit: unit.after.divergence if unit.after else 0,
        lambda unit: unit.before.divergence - (unit.after.divergence if unit.after else 0),
    ]
    drawn = {a["data-row"] for tag, a in page.elements if tag == "figure" and "data-row" in a}
    assert drawn == {str(unit.number) for way in ways for unit in sorted(tap.worst, key=way)[-6:]}
    pressed = [a["data-sort"] for tag, a in page.elements if tag == "button" and a["aria-pressed"] == "true"]
    assert pressed == ["before", "before"]


def test_the_same_facts_give_the_same_bytes(found: report.Facts, tmp_path: Path) -> None:
    world, profile, result = mended()
    again = report.gather(world.model, world.target, profile, result, labels=world.labels, original="home.safetensors")
    report.write(found, tmp_path / "one.html")
    report.write(again, tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


class Hostile(nn.Module):
    """A network whose layer carries a name that would end a script."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.add_module("<b>head</b>", nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._modules["<b>head</b>"](self.body(inputs))  # type: ignore[misc]
        return result


def test_text_from_models_and_files_stays_text() -> None:
    torch.manual_seed(0)
    model, data = Hostile().eval(), torch.randn(300, 6)
    profile = shiftmend.profile(model, data, taps={HOSTILE: Tap(HOSTILE, "body")}, progress=False)
    result = shiftmend.adapt(model, data + 1, profile, "fr", epochs=1, progress=False)
    manifest = result.manifest | {"status": HOSTILE, "environment": {HOSTILE: HOSTILE}}
    history = [result.history[0], replace(result.history[1], block=HOSTILE), replace(result.history[1], epoch=2)]
    poisoned = Adaptation(result.model, history, manifest, result.before, result.after)
    found = report.gather(
        model, data + 1, profile, poisoned, classes=[HOSTILE, "b", "c"], title=HOSTILE, original=HOSTILE
    )
    text = render(found)
    page = Page(text)
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    assert sum(tag == "b" for tag, _ in page.elements) == 0
    assert not [1 for _, attributes in page.elements if "onerror" in attributes]
    assert "//x.test" not in "".join(str(attributes.get("src")) for _, attributes in page.elements)
    assert "\x00" not in text
    assert "\u202e" not in text
    for part in ("shift", "predictions", "run", "undo", "training", "answer"):
        assert "<script>alert(1)</script>" in page.sections[part], part  # as text, for people to see


@pytest.mark.slow
@given(st.text(), st.text())
def test_text_in_templates_arrives_escaped(text: str, other: str) -> None:
    template = environment().from_string('<p title="{{ other }}">{{ text }}</p>')
    page = Page(template.render(text=text, other=other))
    ((tag, attributes),) = page.elements
    assert (tag, set(attributes)) == ("p", {"title"})
    if other.isprintable():
        assert attributes["title"] == other


def test_only_markup_is_markup_and_misspelt_names_raise() -> None:
    template = environment().from_string("<p>{{ text }}{{ chart }}</p>")
    assert template.render(text="<i>", chart=Markup("<br>")) == "<p>&lt;i&gt;<br></p>"
    assert template.render(text="a\n\tb\u00a0c\x00\u202e", chart="") == "<p>a\n\tb\u00a0c\ufffd\ufffd</p>"
    with pytest.raises(UndefinedError, match="chart"):
        template.render(text="")


def test_text_in_charts_arrives_escaped() -> None:
    chart = charts.draw_ranks([0.1, 0.2], None, 0.01, HOSTILE)
    page = Page(chart)
    assert {tag for tag, _ in page.elements} <= {"svg", "line", "text", "polyline"}
    assert page.elements[0][1]["aria-label"] == HOSTILE.replace("\u202e", "\ufffd").replace("\x00", "\ufffd")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "kind"),
    [((1, 20, 30), "images"), ((3, 400, 300), "images"), ((5, 9, 9), "images"), ((2, 500), "signals"), ((6,), "table")],
)
def test_inputs_are_shown_in_the_way_that_suits_them(shape: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    size = int(np.prod(shape))
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    data = torch.randn(20, *shape)
    profile = shiftmend.profile(model, data, progress=False)
    found = report.gather(model, data, profile)
    text = render(found)
    page = Page(text)
    pictures = [attributes["src"] for tag, attributes in page.elements if tag == "img"]
    assert len(pictures) == (12 if kind == "images" else 0)
    every = np.stack([sample.values for sample in found.inputs])
    for source, values in zip(pictures, every, strict=False):
        assert source is not None
        image = Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,"))))
        assert max(image.size) <= 192
        assert image.size[0] / image.size[1] == pytest.approx(shape[2] / shape[1], rel=0.02)
        assert image.mode == ("RGB" if shape[0] == 3 else "L")
        if image.mode == "L":
            expected = 255 * (values[0] - every.min()) / (every.max() - every.min())
            assert np.allclose(np.asarray(image), expected, atol=0.51)
    labels = [attributes.get("aria-label") or "" for tag, attributes in page.elements if tag == "svg"]
    assert sum(label.startswith("Input ") for label in labels) == (12 if kind == "signals" else 0)
    assert ("value 5" in page.sections["inputs"]) == (kind == "table")
    assert len(text) < 3_000_000


class Parts(nn.Module):
    """A layer that puts real and imaginary parts side by side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x).flatten(1)


@pytest.mark.parametrize(("shape", "shown"), [((2, 4, 5), "<img"), ((2, 40), "Input 0"), ((3,), "value 2")])
def test_complex_inputs_are_shown_too(shape: tuple[int, ...], shown: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Parts(), nn.Linear(2 * int(np.prod(shape)), 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    data = torch.randn(20, *shape, dtype=torch.complex64)
    page = render(report.gather(model, data, shiftmend.profile(model, data, progress=False)))
    assert shown in page
    assert ("magnitude of complex numbers" in page) == (len(shape) > 1)


def test_eight_bit_images_are_shown_as_they_are() -> None:
    images = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.ReLU(), nn.Linear(4, 2)).eval()

    def preprocess(batch: torch.Tensor) -> torch.Tensor:
        return batch.float() / 255

    profile = shiftmend.profile(model, images, preprocess=preprocess, progress=False)
    page = Page(render(report.gather(model, images, profile, preprocess=preprocess, samples=1)))
    (source,) = [attributes["src"] for tag, attributes in page.elements if tag == "img"]
    assert source is not None
    image = Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,"))))
    assert np.array_equal(np.asarray(image), images[0].permute(1, 2, 0).numpy())


def test_no_inputs_where_none_may_leave(found: report.Facts) -> None:
    world, profile, result = mended()
    page = Page(render(report.gather(world.model, world.target, profile, result, samples=0)))
    assert "No inputs are shown" in page.sections["inputs"]
    assert "value 0" not in page.sections["inputs"]


def test_shown_inputs_are_said_to_be_in_the_file() -> None:
    world, profile, _ = mended()
    whole = Page(render(report.gather(world.model, world.target, profile, samples=5))).sections["inputs"]
    assert "5 of 600 inputs, evenly spaced." in whole
    assert "Pass it on only to people who may see them" in whole


@pytest.mark.slow
def test_large_models_give_small_pages() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 1000)).eval()
    data = torch.randn(300, 16)
    profile = shiftmend.profile(model, data, progress=False)
    adapted = shiftmend.adapt(model, data + 0.5, profile, "fr", epochs=1, progress=False)
    rows = [Epoch(n, "block", 0.1, {"features": 1 / (n + 1)}, 0.1, {"slices": 1 / (n + 1)}) for n in range(3000)]
    found = report.gather(model, data + 0.5, profile, replace(adapted, history=rows))
    text = render(found)
    assert len(text.encode()) < 1_000_000
    assert "rarest classes are not shown" in Page(text).sections["predictions"]


@pytest.mark.slow
def test_many_taps_and_noisy_pictures_stay_small() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(3 * 96 * 96, 64)]
    for _ in range(20):
        layers += [nn.Linear(64, 64), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(64, 3)).eval()
    images = torch.rand(100, 3, 96, 96)
    profile = shiftmend.profile(model, images, taps={f"tap {n}": str(n) for n in range(2, 42)}, progress=False)
    result = shiftmend.adapt(model, images + 0.1, profile, "source-only", progress=False)
    text = render(report.gather(model, images + 0.1, profile, result, samples=100))
    page = Page(text)
    assert len(text.encode()) < 3_000_000
    assert "30 more taps" in page.sections["shift"]
    assert sum(heading.startswith("Tap “") for _, heading in page.headings) == 12
    assert sum(tag == "img" for tag, _ in page.elements) == 100


@pytest.mark.slow
def test_of_many_taps_those_far_from_home_are_shown(found: report.Facts) -> None:
    own, tap = found.taps[:2], found.taps[0]
    many = [replace(tap, name=f"tap {n}", before=(float(n),), after=(float(-n),)) for n in range(20)]
    for after, shown in ((found.after, range(10)), (None, range(10, 20))):
        taps = [one if after is not None else replace(one, after=None, clear_after=None) for one in many]
        mending = found.mending if after is not None else None
        page = Page(render(replace(found, after=after, mending=mending, taps=(*own, *taps))))
        names = [text.removeprefix("Tap ").strip("“”") for _, text in page.headings if text.startswith("Tap ")]
        assert names == ["features", "logits", *(f"tap {n}" for n in shown)]
        assert "10 more taps, nearer to home" in page.sections["shift"]


def test_features_that_are_not_finite_are_called_so() -> None:
    world, profile, result = mended()
    broken = replace(result, model=_broken(result.model))
    found = report.gather(world.model, world.target, profile, broken)
    page = Page(render(found))
    assert ("h2", "Features: not restored") in page.headings
    assert "no finite numbers" in page.sections["features"]
    assert [tap.clear_after for tap in found.taps] == [tap.units for tap in found.taps]
    assert "infinite after. Before: " in page.sections["shift"]
    assert found.predictions is not None
    assert found.predictions.after is not None
    assert found.predictions.after.histogram == (600, *[0] * 9), "sure of nothing"


def _broken(model: nn.Module) -> nn.Module:
    import copy

    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).fill_(float("nan"))
    return other


def test_the_documentation_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs/report.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    world, profile, result = mended()
    exec(code, {"model": world.model, "target": world.target, "profile": profile, "adaptation": result})
    assert list(Page.read(tmp_path / "report.html").sections) == [part for part in ORDER if part != "scores"]


def test_the_line_is_not_green_where_the_verdict_is_not() -> None:
    near = Verification(0.002, 0.001, 600, marginals=0.0345)
    before = Verification(0.8, 0.001, 600)
    drawn, green = (charts.draw_gauge(before, replace(near, marginals=value)) for value in (0.0345, 0.0))
    assert "zone-good" not in drawn
    assert ">partly as at home<" in drawn
    assert "zone-good" in green
    assert ">as at home<" in green


@pytest.mark.parametrize(
    ("divergence", "floor", "words"),
    [
        (0.3, 0.04, {"too few samples to tell", "not as at home"}),  # so few are never called as at home
        (0.02, 0.04, {"too few samples to tell", "not as at home"}),
        (0.025, 0.0087, {"as at home", "between", "not as at home"}),
    ],
)
def test_the_line_has_no_zone_that_so_few_samples_cannot_reach(
    divergence: float, floor: float, words: set[str]
) -> None:
    drawn = str(charts.draw_gauge(Verification(0.8, floor, 100), Verification(divergence, floor, 100, adapted=True)))
    assert {
        word for word in ("as at home", "between", "not as at home", "too few samples to tell") if f">{word}<" in drawn
    } == words


@pytest.mark.parametrize("path", [None, 3, ""])
def test_a_page_is_written_of_facts_into_a_file(path: object, tmp_path: Path) -> None:
    world, profile, _ = mended()
    with pytest.raises(shiftmend.ShiftmendError, match="Expected a name"):
        report.write(report.gather(world.model, world.target, profile), path)  # type: ignore[arg-type]
    with pytest.raises(shiftmend.ShiftmendError, match="Profile"):
        report.write(profile, tmp_path / "report.html")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_page_can_be_written_is_named(tmp_path: Path) -> None:
    world, profile, _ = mended()
    found = report.gather(world.model, world.target, profile)
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "report.html"):
        with pytest.raises(shiftmend.DataError, match="cannot be written"):
            report.write(found, place)
