"""The page in a real browser: quiet, alone, and its few buttons do what they say."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browsers import CHROMIUM, Browser, browser
from report_worlds import mended

from shiftmend import report

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")]

VISIBLE = "Array.from(document.querySelectorAll('#drawn-0 [data-row]')).filter(e => e.offsetParent !== null)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page with texts that would run if they became markup, and with a class name wider than a phone."""
    world, profile, result = mended()
    classes = ["<img src=x onerror=alert(1)>", "<script>console.log('ran')</script>", "long" * 60]
    found = report.gather(world.model, world.target, profile, result, labels=world.labels, classes=classes)
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.write(replace(found, cautions=("A caution <b>with</b> markup.",)), path)
    return path


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False), (320, True)])
def test_it_is_quiet_alone_and_fits(shown: Browser, page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    shown.open(page, width, dark=dark)
    assert shown.complaints() == []
    assert shown.requests() == []
    assert shown.ask("document.documentElement.scrollWidth") <= width
    png = shown.screenshot(tmp_path / "shot.png")
    assert struct.unpack(">I", png[16:20])[0] == width
    assert len(png) > 20_000
    background = shown.ask("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_wide_tables_scroll_inside(shown: Browser, page: Path) -> None:
    shown.open(page, 320)
    shown.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    wider = "Array.from(document.querySelectorAll('.scroll')).filter(e => e.scrollWidth > e.clientWidth).length"
    assert shown.ask(wider) > 0
    assert shown.ask("document.documentElement.scrollWidth") <= 320


OPEN = "document.getElementById('specialist').open = true"


def test_buttons_sort(shown: Browser, page: Path) -> None:
    shown.open(page, 1200)
    assert not shown.ask("document.getElementById('features').checkVisibility()"), "it is for the specialist"
    shown.ask(OPEN)
    assert shown.ask("document.getElementById('features').checkVisibility()")
    for key in ("after", "gain", "before"):
        shown.ask(f"document.querySelector('[data-group=drawn-0][data-sort={key}]').click()")
        values = shown.ask(f"{VISIBLE}.map(e => Number(e.dataset.{key}))")
        every = shown.ask(
            f"Array.from(document.querySelectorAll('#drawn-0 [data-row]')).map(e => Number(e.dataset.{key}))"
        )
        assert values == sorted(every, reverse=True)[:6]
        pressed = "Array.from(document.querySelectorAll('[data-group=drawn-0][aria-pressed=true]'))"
        assert shown.ask(f"{pressed}.map(e => e.dataset.sort)") == [key]
    assert shown.complaints() == []


def test_boxes_hide_and_show(shown: Browser, page: Path) -> None:
    shown.open(page, 1200)
    look = "getComputedStyle(document.querySelector('.outline.layer-{}')).visibility"
    box = "document.querySelector('[data-toggle=before]')"
    assert shown.ask(f"{box}.offsetParent !== null")
    shown.ask(f"{box}.click()")
    assert shown.ask(look.format("before")) == "hidden"
    assert shown.ask(look.format("after")) == "visible"
    assert shown.ask("Array.from(document.querySelectorAll('[data-toggle=before]')).some(b => b.checked)") is False
    shown.ask(f"{box}.click()")
    assert shown.ask(look.format("before")) == "visible"


def test_it_reads_without_scripts(shown: Browser, page: Path) -> None:
    shown.open(page, 1200, scripts=False)
    root = shown.call("DOM.getDocument")["root"]["nodeId"]
    for selector, laid_out in (
        (".verdict", True),
        ("#specialist > summary", True),
        ("#drawn-0 figure", True),
        ("button", False),
        ("[data-toggle]", False),
    ):
        node = shown.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        assert node
        drawn = True
        try:
            shown.call("DOM.getBoxModel", nodeId=node)
        except AssertionError:  # the browser has no box for what is hidden
            drawn = False
        assert drawn is laid_out, selector
    shown.call("Emulation.setScriptExecutionDisabled", value=False)


def test_text_meets_its_contrast(shown: Browser, page: Path) -> None:
    """Check a contrast of 4.5 to 1 between text and background, in light and dark."""
    pairs = [("--ink", "--paper"), ("--quiet", "--paper"), ("--quiet", "--card"), ("--before", "--paper")]
    pairs += [("--after", "--paper"), ("--good", "--good-back"), ("--unsure", "--unsure-back"), ("--bad", "--bad-back")]
    for dark in (False, True):
        shown.open(page, 1200, dark=dark)
        for front, back in pairs:
            colours = [
                shown.ask(f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()")
                for name in (front, back)
            ]
            assert contrast(*colours) >= 4.5, (front, back, dark)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
