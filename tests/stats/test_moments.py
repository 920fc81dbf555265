from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftmend.errors import ProfileError
from shiftmend.stats.moments import MAX_COLUMNS, Moments, MomentTracker, unit_shape


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 3, 8, 8), (3, 1, 1)),
        ((5, 2, 30), (2, 1)),
        ((5, 17, 30), (1,)),
        ((5, 40), (40,)),
        ((5, MAX_COLUMNS + 1), (1,)),
        ((5, 2, 3, 4, 4), (2, 1, 1, 1)),
    ],
)
def test_moments_are_those_of_numpy(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    inputs = torch.randn(shape) * 3 + 100
    assert unit_shape(inputs) == expected
    tracker = MomentTracker()
    for part in inputs.split(2):
        tracker.update(part)
    found = tracker.moments()
    assert found is not None
    rows = inputs.double().numpy()
    rows = rows.reshape(-1, 1) if expected == (1,) else np.moveaxis(rows, 1, -1).reshape(-1, expected[0])
    assert found.samples == len(rows)
    np.testing.assert_allclose(found.mean, rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.variance, rows.var(0, ddof=1), rtol=1e-5)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), share=st.floats(0.1, 5))
def test_parts_mix_exactly(seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(size, 4, generator=generator) * size + 50 for size in (30, 70))
    parts = []
    for values in (one, other):
        tracker = MomentTracker()
        tracker.update(values)
        parts.append(tracker.moments())
    mixed = Moments.mix(parts, [1, share])  # type: ignore[arg-type]
    weights = np.repeat([1, share], [30, 70])
    rows = torch.cat([one, other]).double().numpy()
    mean = np.average(rows, axis=0, weights=weights)
    np.testing.assert_allclose(mixed.mean, mean, rtol=1e-5)
    squares = np.average((rows - mean) ** 2, axis=0, weights=weights)
    np.testing.assert_allclose(mixed.variance, squares, rtol=0.05)


def test_a_constant_column_has_no_variance_at_all() -> None:
    tracker = MomentTracker()
    for _ in range(3):
        tracker.update(torch.tensor([[0.1, 1.0], [0.1, 2.0], [0.1, 3.0]]))
    found = tracker.moments()
    assert found is not None
    assert found.variance[0] == 0
    assert found.variance[1] > 0


@pytest.mark.parametrize(
    "batches",
    [
        [torch.zeros(4, 3), torch.zeros(4, 5)],
        [torch.zeros(4, 3, dtype=torch.complex64)],
        [torch.zeros(4, 3, dtype=torch.bool)],
        [torch.full((4, 3), torch.inf)],
        [torch.zeros(4)],
        [],
    ],
)
def test_some_inputs_have_no_moments(batches: list[torch.Tensor]) -> None:
    tracker = MomentTracker()
    for batch in batches:
        tracker.update(batch)
    assert tracker.moments() is None


def test_images_of_several_sizes_have_moments() -> None:
    tracker = MomentTracker()
    tracker.update(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    tracker.update(torch.ones(2, 3, 4, 6))
    found = tracker.moments()
    assert found is not None
    assert found.mean.tolist() == pytest.approx([48 / 176] * 3)


def test_moments_of_a_forged_file_are_refused() -> None:
    good = {"mean": torch.zeros(3), "variance": torch.ones(3)}
    for bad in ({"mean": torch.zeros(2)}, {"mean": torch.zeros(0), "variance": torch.zeros(0)}):
        with pytest.raises(ProfileError, match="same units"):
            Moments.from_file("inputs", {"samples": 5}, good | bad, None)  # type: ignore[arg-type]
    assert Moments(good["mean"], -good["variance"], 5).problems()
