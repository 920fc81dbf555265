"""The methods that look at predictions or moments: losses against numpy in float64, effects on a small problem."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from worlds import sensors
from zoo import ZOO

import shiftmend
from shiftmend.engine.method import Network
from shiftmend.errors import AdaptationError
from shiftmend.methods import METHODS
from shiftmend.methods.bnm import BNM, BNMIM
from shiftmend.methods.pl import PL
from shiftmend.methods.shot_im import SHOTIM
from shiftmend.methods.tent import TENT
from shiftmend.stats.gaussians import MarginalGaussian

CPU = torch.device("cpu")


def probabilities(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def reference_entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p + 1e-5)).sum(-1)


def drawn(seed: int, classes: int = 4) -> torch.Tensor:
    return 3 * torch.randn(50, classes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@given(st.integers(0, 100), st.integers(2, 12))
def test_losses_on_predictions_against_numpy(seed: int, classes: int) -> None:
    logits = drawn(seed, classes)
    p = probabilities(logits.double().numpy())
    expected = {
        TENT(): reference_entropy(p).mean(),
        SHOTIM(): reference_entropy(p).mean() - reference_entropy(p.mean(0)),
        PL(): -np.log(p.max(1)).mean(),
    }
    for made, value in expected.items():
        terms = made.objective(None, CPU)({"logits": logits})
        assert float(terms["logits"]) == pytest.approx(value, abs=2e-5)


@given(st.integers(0, 100))
def test_the_moments_loss_against_numpy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(40, 6, generator=generator) * 2 + 1
    mean, variance = torch.randn(6, generator=generator), torch.rand(6, generator=generator) + 0.2
    v, m, s = values.double().numpy(), mean.double().numpy(), variance.double().numpy()
    batch_mean, batch_variance = v.mean(0), v.var(0, ddof=1)
    each = 0.5 * (np.log(batch_variance / s) + (s + (m - batch_mean) ** 2) / batch_variance - 1)
    usable = torch.tensor([0, 1, 2, 4, 5])
    got = MarginalGaussian(mean, variance, 1000).of_units(usable).divergence(values[:, usable])
    assert float(got) == pytest.approx(each[[0, 1, 2, 4, 5]].mean(), rel=1e-4)
    assert each.min() >= 0


def test_the_moments_loss_is_zero_at_home_and_finite_for_dead_units() -> None:
    values = torch.randn(1000, 3)
    home = MarginalGaussian(values.mean(0), values.var(0), 1000).divergence(values)
    assert abs(float(home)) < 1e-6
    dead = torch.zeros(10, 3, requires_grad=True)
    loss = MarginalGaussian(torch.ones(3), torch.ones(3), 1000).divergence(dead)
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(dead.grad).all())


@pytest.mark.parametrize("name", ["bnm", "full-gauss"])
def test_units_that_hardly_varied_at_home_are_in_no_moment(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
        model[0].bias.copy_(torch.tensor([0.0, 1e4, 0.0]))
    inputs = torch.randn(200, 3) * torch.tensor([1.0, 0.05, 1.0])
    profile = shiftmend.profile(model, inputs, gaussian="full", progress=False)
    assert profile.taps["features"].usable.tolist() == [True, False, True]
    assert float(profile.gaussian.variance[1]) > 0
    features = model[0](inputs).detach()
    losses = METHODS[name]().objective(profile, CPU)
    assert losses is not None
    home, constant_moved, other_moved = (
        float(losses({"features": features + torch.tensor(step)})["features"])
        for step in ([0.0, 0.0, 0.0], [0.0, 500.0, 0.0], [0.0, 0.0, 1.0])
    )
    assert constant_moved == home < other_moved


def test_the_moments_need_two_samples_unless_features_are_maps() -> None:
    assert BNM().smallest_batch(sensors().profile()) == 2
    maps = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    assert BNM().smallest_batch(shiftmend.profile(maps, torch.randn(8, 1, 6, 6), progress=False)) == 1


def test_bnm_im_is_the_sum_of_its_parts() -> None:
    world = sensors()
    profile = world.profile()
    with torch.no_grad():
        features = world.model[:6](world.target)
        activations = {"features": features, "logits": world.model[6](features)}
    both = BNMIM(weight=3.0).objective(profile, CPU)(activations)
    assert float(both["features"]) == pytest.approx(3 * float(BNM().objective(profile, CPU)(activations)["features"]))
    assert float(both["logits"]) == pytest.approx(float(SHOTIM().objective(None, CPU)(activations)["logits"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "changed"),
    [
        (PL(epochs=1), {"0", "1", "4", "6"}),
        (SHOTIM(epochs=1), {"0", "1", "4"}),
        (TENT(epochs=1), {"1"}),
        (BNM(epochs=1), {"0", "1", "4"}),
        (BNMIM(epochs=1), {"0", "1", "4"}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_trains_what_it_says(made: shiftmend.methods.Method, changed: set[str]) -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, world.profile(), made, progress=False)
    moved = {
        name.split(".")[0]
        for (name, ours), theirs in zip(result.model.named_parameters(), world.model.parameters(), strict=True)
        if not torch.equal(ours, theirs)
    }
    assert moved == changed
    assert result.manifest["method"]["name"] == made.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shot-im", "bnm", "bnm-im"])
def test_they_mend_a_simple_shift(name: str) -> None:
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), name, epochs=30, learning_rate=0.01, progress=False
    )
    assert world.accuracy(world.model) < 0.75
    assert world.accuracy(result.model) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("made", [PL, TENT])
def test_they_make_predictions_certain(made: type) -> None:
    world = sensors()

    def mean_entropy(model: nn.Module) -> float:
        with torch.no_grad():
            return float(reference_entropy(torch.softmax(model(world.target), 1).double().numpy()).mean())

    start = shiftmend.adapt(world.model, world.target, method="adabn", progress=False).model
    result = shiftmend.adapt(world.model, world.target, method=made(epochs=20, learning_rate=0.01), progress=False)
    assert mean_entropy(result.model) < 0.8 * mean_entropy(start)


def test_they_need_no_profile_but_judge_with_one() -> None:
    world = sensors()
    without = shiftmend.adapt(world.model, world.target, method="shot-im", epochs=1, progress=False)
    beside = shiftmend.adapt(world.model, world.target, world.profile(), "shot-im", epochs=1, progress=False)
    assert without.after is None
    assert beside.after is not None
    assert torch.equal(without.model[0].weight, beside.model[0].weight)
    with pytest.raises(AdaptationError, match="Expected a profile"):
        shiftmend.adapt(world.model, world.target, method="bnm")


def test_what_they_cannot_do_is_one_sentence() -> None:
    regressor = ZOO["regressor"]
    with pytest.raises(AdaptationError, match="Expected a classifier"):
        shiftmend.adapt(regressor.model(), regressor.inputs(), method="shot-im", epochs=1, progress=False)
    plain = sensors(norm=False)
    with pytest.raises(AdaptationError, match="got one without"):
        shiftmend.adapt(plain.model, plain.target, method="tent")
    with pytest.raises(AdaptationError):
        BNMIM(weight=-1)


@pytest.mark.slow
def test_published_rates() -> None:
    cnn, other = Network(ZOO["paper-cnn"].model(), ()), Network(sensors().model, ())
    published = {PL: 0.01, SHOTIM: 0.1, TENT: 1e-3, BNM: 0.01, BNMIM: 0.01}
    assert {made: made().rate(cnn) for made in published} == published
    assert {made().rate(other) for made in published} == {1e-3}
    assert PL(learning_rate=0.5).rate(cnn) == 0.5
