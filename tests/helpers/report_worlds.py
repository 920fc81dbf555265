"""One mended model for all tests of the report, made once, and a parser of pages."""

from __future__ import annotations

import functools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from worlds import World, sensors

import shiftmend
from shiftmend import report
from shiftmend.adaptation.result import Adaptation
from shiftmend.profiles.profile import Profile

VOID = {"meta", "img", "br", "input", "hr", "link", "source"}


@functools.cache
def mended(method: str = "bufr") -> tuple[World, Profile, Adaptation]:
    world = sensors()
    profile = world.profile()
    options = {"epochs_per_block": 4} if method == "bufr" else {}
    return world, profile, shiftmend.adapt(world.model, world.target, profile, method, progress=False, **options)


class Page(HTMLParser):
    """A parsed page: elements with their attributes, and text by section. Tags that do not nest are refused."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.headings: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self._section = ""
        self.feed(text)
        self.close()
        assert self._open == []

    @staticmethod
    def read(path: Path) -> Page:
        return Page(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute of <{tag}> is there twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs).get("id") or ""
            self.sections[self._section] = ""
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> ends nothing"
        assert self._open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            return
        # A browser shows line breaks and indentation of the source as one space, and none at all beside a block.
        data = re.sub(r"[ \t]*\n\s*", " ", re.sub(r"^[ \t]*\n\s*|[ \t]*\n\s*$", "", data))
        self.text += data
        if self._section:
            self.sections[self._section] += data
        if {"h1", "h2", "h3", "h4"} & set(self._open):
            level, before = self.headings[-1]
            self.headings[-1] = (level, before + data)


def assert_refused(expected: str, *arguments: object, **options: object) -> None:
    """Check that the report refuses these arguments in one sentence; None stands for what would fit."""
    world, profile, _ = mended()
    given = [world.model, world.target, profile]
    given[: len(arguments)] = [one if one is not None else two for one, two in zip(arguments, given, strict=False)]
    with pytest.raises(shiftmend.ShiftmendError, match=expected) as caught:
        report.gather(*given, *arguments[3:], **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
