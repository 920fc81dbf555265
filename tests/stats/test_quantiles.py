from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftmend.errors import ProfileError
from shiftmend.stats import quantiles
from shiftmend.stats.quantiles import LEVELS, MAX_UNITS, Quantiles, QuantileTracker, find_quantiles, quantile_levels

GRID = (np.arange(33) + 0.5) / 33


def collect(*batches: torch.Tensor) -> Quantiles | None:
    tracker = QuantileTracker()
    for batch in batches:
        tracker.update(batch)
    return tracker.quantiles()


@pytest.mark.parametrize(
    ("shape", "units"), [((50, 4), 4), ((7, 3, 6, 5), 3), ((9, 2, 11), 2), ((6, 40, 3), 1), ((1, 5), 5), ((2, 5), 5)]
)
def test_quantiles_are_those_of_numpy(shape: tuple[int, ...], units: int) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3 + 10
    found = collect(*inputs.split(2))
    assert found is not None
    rows = inputs.double().numpy()
    rows = rows.reshape(-1, 1) if units == 1 else np.moveaxis(rows, 1, -1).reshape(-1, units)
    assert found.samples == len(rows)
    expected = np.quantile(rows, GRID, axis=0, method="hazen").T
    np.testing.assert_allclose(found.values, expected, rtol=1e-5)
    np.testing.assert_allclose(quantile_levels(), GRID)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), times=st.integers(1, 4))
def test_parts_mix_to_nearly_the_quantiles_of_all(seed: int, times: int) -> None:
    dice = np.random.default_rng(seed)
    one, other = dice.normal(0, 1, (400, 2)), dice.normal(1, 2, (900, 2))
    parts = [collect(torch.tensor(values).float()) for values in (one, other)]
    mixed = Quantiles.mix(parts, [1, times])  # type: ignore[arg-type]
    every = np.concatenate([one] + [other] * times)
    expected = np.quantile(every, GRID, axis=0, method="hazen").T
    # Outermost quantiles lie in the tails, of which a part tells only the middle of its last share.
    np.testing.assert_allclose(mixed.values[:, 2:-2], expected[:, 2:-2], atol=0.15)
    assert mixed.samples == len(every)
    assert not mixed.problems()


def test_equal_parts_mix_to_themselves_and_others_are_refused() -> None:
    part = collect(torch.randn(100, 3))
    assert part is not None
    torch.testing.assert_close(Quantiles.mix([part, part], [1, 3]).values, part.values)
    torch.testing.assert_close(Quantiles.mix([part], [2]).values, part.values)
    with pytest.raises(ProfileError, match="to merge"):
        Quantiles.mix([part, Quantiles(torch.zeros(2, LEVELS), 5)], [1, 1])


def test_many_values_are_sampled_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantiles, "KEPT_VALUES", 4000)
    monkeypatch.setattr(quantiles, "MIN_KEPT_ROWS", 10)
    values = torch.rand(60_000, 2, generator=torch.Generator().manual_seed(0)).sort(0).values
    found = collect(*values.split(700))
    assert found is not None
    assert found.samples == 60_000
    np.testing.assert_allclose(found.values, np.tile(GRID, (2, 1)), atol=0.06)
    again = collect(*values.split(1100))
    assert again is not None
    torch.testing.assert_close(again.values, found.values, rtol=0, atol=0.06)


def test_batches_of_many_sizes_and_types_fit_together() -> None:
    found = collect(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.ones(2, 3, 4, 6))
    assert found is not None
    assert found.values.shape == (3, LEVELS)
    assert found.values[:, 0].tolist() == [0, 0, 0]
    assert found.values[:, -1].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "batches",
    [
        [torch.zeros(4, 3), torch.zeros(4, 5)],
        [torch.zeros(4, 3, dtype=torch.complex64)],
        [torch.zeros(4, 3, dtype=torch.bool)],
        [torch.full((4, 3), torch.nan)],
        [torch.zeros(4, 3), torch.full((4, 3), torch.inf)],
        [torch.zeros(4, MAX_UNITS + 1)],
        [torch.zeros(4)],
        [],
    ],
)
def test_some_inputs_have_no_quantiles(batches: list[torch.Tensor]) -> None:
    assert collect(*batches) is None


def test_divergence_is_the_distance_of_quantiles_and_has_a_gradient() -> None:
    values = torch.randn(200, 3, requires_grad=True)
    home = Quantiles(find_quantiles(values.detach()), 200)
    assert home.divergence(values).item() == 0
    shifted = home.divergence(values + 2)
    assert shifted.item() == pytest.approx(2, rel=1e-5)
    shifted.backward()
    assert values.grad is not None
    assert values.grad.sum() > 0


def test_quantiles_of_a_forged_file_are_refused() -> None:
    for shape in ((3, LEVELS - 1), (0, LEVELS), (MAX_UNITS + 1, LEVELS)):
        with pytest.raises(ProfileError, match="levels"):
            Quantiles.from_file("inputs.quantiles", {"samples": 5}, {"values": torch.zeros(shape)}, None)  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match="whole number"):
        Quantiles.from_file("inputs.quantiles", {"samples": True}, {"values": torch.zeros(3, LEVELS)}, None)  # type: ignore[arg-type]
    falling = torch.arange(LEVELS).flip(0).float().view(1, LEVELS)
    assert "rise" in Quantiles(falling, 5).problems()[0]
    assert "finite" in Quantiles(falling * torch.nan, 5).problems()[0]
