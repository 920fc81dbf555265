"""Numbers and text for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftmend.report.formatting import format_number


@pytest.mark.slow
@given(st.floats(0, 1e6, allow_nan=False) | st.just(0.0))
def test_numbers_for_people_are_near_the_truth(value: float) -> None:
    text = format_number(value)
    assert (text == "0") == (value == 0)
    if text == "below 0.0005":
        assert 0 < value < 0.0005
    else:
        assert float(text) == pytest.approx(value, rel=0.06)
