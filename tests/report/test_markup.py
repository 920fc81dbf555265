"""Pieces of a page, one by one."""

from __future__ import annotations

from shiftmend.report.markup import Markup, element, escaped, figure


def test_attributes_that_are_none_or_false_are_left_out() -> None:
    assert element("p", title=None, hidden=False, id="", data_row=0) == '<p id="" data-row="0"></p>'


def test_lines_stay_and_what_no_page_may_hold_can_be_seen() -> None:
    assert escaped("a\n\tb\u00a0c\x00\u202e") == "a\n\tb\u00a0c\ufffd\ufffd"


def test_a_caption_has_its_name_and_its_text_as_text_below_the_chart() -> None:
    caption = "<figcaption><strong>&lt;b&gt;</strong>&#x27;1 &lt; 2&#x27;</figcaption>"
    assert figure(Markup("<svg></svg>"), "<b>", "'1 < 2'") == f"<figure><svg></svg>{caption}</figure>"
