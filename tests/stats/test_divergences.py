from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shiftmend.errors import ShiftmendError
from shiftmend.stats import divergences
from shiftmend.stats.divergences import EPSILON, divergence, sampling_floor
from shiftmend.stats.histograms import Bins, soft_histogram


def reference_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    def one(x: np.ndarray, y: np.ndarray) -> float:
        return sum(a * (math.log(a + 1e-8) - math.log(b + 1e-8)) for a, b in zip(x, y, strict=True))

    return np.array([one(x, y) for x, y in zip(p, q, strict=True)])


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(6, 10, generator=generator, dtype=torch.float64) ** 4
    q = torch.rand(6, 10, generator=generator, dtype=torch.float64) ** 4
    p[0, :4] = 0  # empty bins
    q[1, 5:] = 0
    return p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)


@given(st.integers(0, 50))
def test_divergences_against_numpy(seed: int) -> None:
    p, q = tables(seed)
    forward, backward = reference_kl(p.numpy(), q.numpy()), reference_kl(q.numpy(), p.numpy())
    expected = {
        "kl-source-target": forward / math.log(10),
        "kl-target-source": backward / math.log(10),
        "symmetric-kl": (forward + backward) / 2,
        "psi": (forward + backward) / math.log(10),
    }
    for kind, value in expected.items():
        np.testing.assert_allclose(divergence(p, q, kind).numpy(), value, rtol=1e-10, atol=1e-12)  # type: ignore[arg-type]
    assert bool((divergence(p, q) >= 0).all())
    assert float(divergence(p, p).abs().max()) == 0
    assert EPSILON == 1e-8


def test_divergence_gradcheck() -> None:
    p, q = tables(3)
    q = (q + 0.01).requires_grad_()
    for kind in ("psi", "symmetric-kl", "kl-source-target", "kl-target-source"):
        assert torch.autograd.gradcheck(lambda t, kind=kind: divergence(p, t, kind), (q,))


def test_the_reference_loss_is_the_papers_times_a_constant() -> None:
    p, q = tables(1)
    torch.testing.assert_close(divergence(p, q, "psi"), divergence(p, q, "symmetric-kl") * (2 / math.log(10)))


@pytest.mark.parametrize("bins", [4, 10, 34])
def test_one_sided_divergences_are_the_terms_of_psi(bins: int) -> None:
    """The reference divides every entropy by ln B: cross-entropy less entropy, both to the base B."""
    generator = torch.Generator().manual_seed(bins)
    p, q = (torch.rand(5, bins, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2))

    def to_base_b(values: np.ndarray) -> np.ndarray:
        return np.log(values + 1e-8) / np.log(bins)

    source, target = p.numpy(), q.numpy()
    forward = -(source * to_base_b(target)).sum(1) + (source * to_base_b(source)).sum(1)
    backward = -(target * to_base_b(source)).sum(1) + (target * to_base_b(target)).sum(1)
    np.testing.assert_allclose(divergence(p, q, "kl-source-target").numpy(), forward, rtol=1e-9)
    np.testing.assert_allclose(divergence(p, q, "kl-target-source").numpy(), backward, rtol=1e-9)
    np.testing.assert_allclose(divergence(p, q, "psi").numpy(), forward + backward, rtol=1e-9)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ShiftmendError, match="divergence"):
        divergence(torch.ones(1, 3), torch.ones(1, 3), "hellinger")  # type: ignore[arg-type]
    with pytest.raises(ShiftmendError, match="shape"):
        divergence(torch.ones(1, 3), torch.ones(1, 4))


def test_the_sampling_floor_is_what_chance_gives() -> None:
    """Samples of one distribution, many times: the mean divergence is the floor, within its stated roughness."""
    generator = torch.Generator().manual_seed(0)
    home, away = (torch.rand(400, 600, generator=generator) for _ in range(2))
    low, high = torch.zeros(600), torch.ones(600)
    # uniform values leave the outer bins nearly empty: eight bins take part
    measured = float(
        divergence(soft_histogram(home, low, high, Bins()), soft_histogram(away, low, high, Bins())).mean()
    )
    floor = sampling_floor(Bins(), 400, 400)
    assert 0.5 * floor < measured < 1.1 * floor
    assert sampling_floor(Bins(6, "paper"), 400, 1000) == pytest.approx(5 * (1 / 400 + 1 / 1000) / math.log(6))


@pytest.mark.parametrize("bins", [3, 10, 66])
@pytest.mark.parametrize("kind", divergences.DIVERGENCES)
def test_kl_weights_agree_with_the_function(kind: str, bins: int) -> None:
    generator = torch.Generator().manual_seed(bins)
    p, q = (torch.rand(5, bins, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2))
    entry = divergences.DIVERGENCES[kind]
    assert entry.kl_weights is not None
    forward, backward = entry.kl_weights(bins)
    expected = forward * divergences.kl(p, q) + backward * divergences.kl(q, p)
    torch.testing.assert_close(entry.function(p, q), expected)
