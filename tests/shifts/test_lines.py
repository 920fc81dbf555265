"""The batched lines against loops written out from the definition of MNIST-C."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftmend.shifts import lines

SIDE = 28


def line_by_loop(column0: float, row0: float, column1: float, row1: float) -> np.ndarray:
    drawing = np.zeros((SIDE, SIDE))
    if column1 == column0:
        return drawing
    for column in range(SIDE):
        if not math.floor(column0) <= column < math.ceil(column1):
            continue
        level = row0 + (row1 - row0) / (column1 - column0) * (column - column0)
        for row in range(SIDE):
            distance = abs(row - level)
            if distance < 2.3:
                drawing[row, column] = max(0.0, 1 + math.log(1 - distance / 2.3))
    return drawing


def zigzag_by_loop(row0: int, row1: int) -> np.ndarray:
    theta = math.atan((row1 - row0) / 23)
    length = 23 / math.cos(theta)
    corners = [(0.0, 0.0)]
    for i in range(math.floor((length - 2) / 4) + 1):
        corners.append((4 * i + 2, 2 if i % 2 == 0 else -2))
    rest = length - 4 * math.floor(length / 4)
    if rest:
        corners.append((length, corners[-1][1] / (2 * rest)))
    turned = [
        (2 + x * math.cos(theta) - y * math.sin(theta), row0 + x * math.sin(theta) + y * math.cos(theta))
        for x, y in corners
    ]
    drawing = np.zeros((SIDE, SIDE))
    for (column_a, row_a), (column_b, row_b) in itertools.pairwise(turned):
        drawing = np.minimum(1, drawing + line_by_loop(column_a, row_a, column_b, row_b))
    return drawing


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


point = st.tuples(st.floats(-3, 30), st.floats(-3, 30))


@settings(max_examples=60, deadline=None)
@given(start=point, end=point)
def test_line_matches_loop(start, end):
    drawn = lines.line(doubles(*start)[None], doubles(*end)[None], SIDE, SIDE)[0].numpy()
    np.testing.assert_allclose(drawn, line_by_loop(*start, *end), atol=1e-9)


def test_line_to_the_left_or_straight_down_is_not_drawn():
    start = torch.tensor([[10.0, 5.0], [10.0, 5.0]], dtype=torch.float64)
    end = torch.tensor([[3.0, 9.0], [10.0, 20.0]], dtype=torch.float64)
    assert torch.count_nonzero(lines.line(start, end, SIDE, SIDE)) == 0


def test_level_line_has_the_profile_of_the_definition():
    drawn = lines.line(doubles(0, 10)[None], doubles(27, 10)[None], SIDE, SIDE)[0]
    assert drawn[10, 5] == 1
    assert drawn[11, 5] == pytest.approx(1 + math.log(1 - 1 / 2.3))
    assert drawn[12, 5] == pytest.approx(max(0, 1 + math.log(1 - 2 / 2.3)))
    assert torch.count_nonzero(drawn[:, 27]) == 0


@pytest.mark.parametrize(("row0", "row1"), [(0, 26), (26, 0), (13, 13), (5, 20)])
def test_dotted_line_gates_columns_in_pairs(row0, row1):
    drawn = lines.dotted(doubles(row0), doubles(row1), SIDE, SIDE)[0].numpy()
    expected = line_by_loop(0, row0, 27, row1)
    on = [column for column in range(SIDE) if (column // 2) % 2 == 1]
    assert on[:4] == [2, 3, 6, 7]
    for column in range(SIDE):
        if column not in on:
            expected[:, column] = 0
    np.testing.assert_allclose(drawn, expected, atol=1e-12)
    assert drawn[:, 26].max() > 0


def test_every_zigzag_matches_loop():
    cases = [(row0, row0 + rise) for row0 in (0, 11, 26) for rise in range(-5, 5)]
    starts, ends = (torch.tensor(rows, dtype=torch.float64) for rows in zip(*cases, strict=True))
    drawn = lines.zigzag(starts, ends, SIDE, SIDE).numpy()
    for index, (row0, row1) in enumerate(cases):
        np.testing.assert_allclose(drawn[index], zigzag_by_loop(row0, row1), atol=1e-9)


@pytest.mark.parametrize("width", [8, 16, 32, 40])
def test_zigzag_stays_between_its_columns(width):
    drawn = lines.zigzag(doubles(8), doubles(9), 20, width)[0]
    touched = drawn.amax(dim=0).nonzero().squeeze(1)
    assert touched.min() >= 1
    assert touched.max() <= width - 1
    assert drawn.max() <= 1


def test_whole_number_of_periods_ends_at_the_last_peak():
    # From column 2 to column 22, five periods: there is no rest to add a corner for.
    width = 25
    corners = lines.zigzag_vertices(doubles(10), doubles(10), width)[0]
    assert corners[-1].tolist() == corners[-2].tolist() == [2 + 18, 10 + 2]
