"""That speed is measured, not how fast it is: timings are no tests."""

from __future__ import annotations

import torch

from shiftmend.bench import speed

CPU = torch.device("cpu")


def test_a_timing_is_a_median_with_its_spread() -> None:
    calls: list[int] = []
    timing = speed.timed(lambda: calls.append(1), CPU, repeats=5, inner=3)
    assert len(calls) == 1 + 5 * 3  # warm first
    assert 0 <= timing.low <= timing.median <= timing.high
    assert timing.milliseconds == f"{1e3 * timing.median:.4g} ({1e3 * timing.low:.4g} to {1e3 * timing.high:.4g})"


def test_a_step_is_set_beside_a_plain_loop_and_beside_its_floor() -> None:
    work = speed.Workload("tiny", "digit-cnn", 4, (3, 28, 28), 8, 16, False)
    found = speed.step_times(work, CPU, repeats=1)
    assert found.ratio == found.ours.median / found.supervised.median
    assert found.speedup == found.eager.median / found.ours.median
    assert found.images == 8 / found.ours.median
    # forward: 2 operations a multiplication; backward: about twice that
    assert 2.5 < found.flops / (2 * 8 * _multiplications()) < 3.1


def _multiplications() -> int:
    """Of the paper's CNN on one 28 x 28 image, by hand."""
    first, second, third = 14 * 14 * 64 * 3 * 25, 8 * 8 * 128 * 64 * 9, 5 * 5 * 256 * 128 * 9
    return first + second + third + 6400 * 128 + 128 * 4


def test_the_soft_histogram_is_as_exact_as_it_is_said_to_be() -> None:
    found = speed.histogram_times(3000, 7, CPU)
    assert found.error < 1e-6
    assert (found.samples, found.units) == (3000, 7)


def test_growth_covers_samples_units_and_bins() -> None:
    rows = speed.growth(CPU)
    assert [row[:2] for row in rows] == [(what, f) for what in ("samples", "units", "bins") for f in (1, 2, 4, 8)]
