"""Full Gaussian alignment: a loss against numpy, and a shift that marginals cannot see."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from worlds import World, sensors
from zoo import ZOO

import shiftmend
from shiftmend.engine.method import Network
from shiftmend.errors import AdaptationError
from shiftmend.methods.bnm import BNM
from shiftmend.methods.full_gauss import FullGauss
from shiftmend.profiles.profile import Profile
from shiftmend.stats.gaussians import FullGaussian

CPU = torch.device("cpu")


@functools.cache
def crosstalk(samples: int = 1000) -> World:
    """Four sensors that hear each other at the target, where mean and deviation of each were put right by hand."""
    torch.manual_seed(1)
    centres = 3.0 * torch.randn(4, 4)

    def draw() -> tuple[Tensor, Tensor]:
        labels = torch.arange(samples) % 4
        return centres[labels] + torch.randn(samples, 4), labels

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    source, labels = draw()
    optimiser = torch.optim.Adam(model[1].parameters(), 0.05)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(source), labels).backward()
        optimiser.step()
    clean, target_labels = draw()
    mixed = clean @ (0.5 * torch.eye(4) + 0.5 * torch.ones(4, 4))
    target = (mixed - mixed.mean(0)) / mixed.std(0) * source.std(0) + source.mean(0)
    return World(model.eval(), source, target, target_labels)


@functools.cache
def full_profile(which: str = "crosstalk") -> Profile:
    world = crosstalk() if which == "crosstalk" else sensors()
    return shiftmend.profile(world.model, world.source, gaussian="full", progress=False)


@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_the_loss_against_numpy(shrinkage: float) -> None:
    world, profile = crosstalk(), full_profile()
    with torch.no_grad():
        features = world.model[0](world.target)
        home = world.model[0](world.source).double().numpy()
    terms = FullGauss(shrinkage=shrinkage).objective(profile, CPU)({"features": features})
    v = features.double().numpy()
    keep = np.eye(4) + (1 - shrinkage) * (1 - np.eye(4))
    theirs, ours = np.cov(home.T) * keep, np.cov(v.T) * keep
    away = home.mean(0) - v.mean(0)
    expected = 0.5 * (
        np.trace(np.linalg.solve(theirs, ours))
        + away @ np.linalg.solve(theirs, away)
        - 4
        + np.linalg.slogdet(theirs)[1]
        - np.linalg.slogdet(ours)[1]
    )
    assert set(terms) == {"features"}
    assert float(terms["features"]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_it_undoes_a_mixing_that_marginals_cannot_see() -> None:
    world, profile = crosstalk(), full_profile()
    options = {"epochs": 40, "learning_rate": 0.02, "progress": False}
    blind = shiftmend.adapt(world.model, world.target, profile, "bnm", **options)
    result = shiftmend.adapt(world.model, world.target, profile, "full-gauss", **options)
    assert world.accuracy(world.model) < 0.85
    assert world.accuracy(blind.model) < 0.85
    assert world.accuracy(result.model) > 0.95
    assert blind.history[1].loss < 0.02  # its moments were right from the start
    assert result.history[-1].loss < result.history[1].loss / 10
    assert result.after.divergence < result.before.divergence / 10
    assert blind.after.divergence > 0.9 * blind.before.divergence


def test_bnm_reads_the_marginals_of_a_full_profile() -> None:
    world = crosstalk()
    marginal = shiftmend.profile(world.model, world.source, progress=False)
    with torch.no_grad():
        features = {"features": world.model[0](1.5 * world.target)}
    one, other = (BNM().objective(profile, CPU)(features)["features"] for profile in (marginal, full_profile()))
    assert float(one) == pytest.approx(float(other), rel=1e-5)


def test_it_trains_everything_below_the_features() -> None:
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.target, full_profile("sensors"), "full-gauss", epochs=1, learning_rate=1e-4, progress=False
    )
    moved = {
        name.split(".")[0]
        for (name, ours), theirs in zip(result.model.named_parameters(), world.model.parameters(), strict=True)
        if not torch.equal(ours, theirs)
    }
    assert moved == {"0", "1", "4"}


def test_constant_units_take_no_part() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).eval()
    with torch.no_grad():
        model[0].weight[2] = 0
    source = torch.randn(300, 3)
    profile = shiftmend.profile(model, source, gaussian="full", progress=False)
    assert profile.unusable["features"] == 1
    keep = torch.tensor([0, 1, 3, 4])
    features = torch.randn(50, 5)
    got = FullGauss(shrinkage=0.1).objective(profile, CPU)({"features": features})["features"]
    assert isinstance(profile.gaussian, FullGaussian)
    alone = profile.gaussian.of_units(keep).divergence(features[:, keep], 0.1)
    assert float(got) == pytest.approx(float(alone))
    assert math.isfinite(float(got))


@pytest.mark.slow
def test_fewer_samples_than_features() -> None:
    world, profile = sensors(), full_profile("sensors")
    with pytest.raises(AdaptationError, match="12 features, got 10"):
        shiftmend.adapt(world.model, world.target, profile, "full-gauss", epochs=1, batch_size=10, progress=False)
    with pytest.raises(AdaptationError, match="more than 12 samples"):
        shiftmend.adapt(world.model, world.target[:8], profile, "full-gauss", epochs=1, progress=False)
    result = shiftmend.adapt(
        world.model, world.target[:60], profile, "full-gauss", epochs=5, batch_size=10, shrinkage=0.5,
        learning_rate=1e-4, progress=False,
    )  # fmt: skip
    assert result.history[-1].loss < result.history[1].loss


@pytest.mark.slow
def test_a_source_of_fewer_samples_than_features() -> None:
    case = ZOO["paper-cnn"]
    model = case.model()
    profile = shiftmend.profile(model, case.inputs(12), gaussian="full", progress=False)
    with pytest.raises(AdaptationError, match=r"singular.*12 samples.*shrinkage"):
        shiftmend.adapt(model, case.inputs(), profile, "full-gauss", epochs=1, progress=False)
    result = shiftmend.adapt(
        model, case.inputs(), profile, "full-gauss", epochs=1, batch_size=8, shrinkage=0.3, progress=False
    )
    assert math.isfinite(result.history[1].loss)


def test_a_profile_without_covariance_is_one_sentence() -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match="gaussian='full'"):
        shiftmend.adapt(world.model, world.target, world.profile(), "full-gauss", progress=False)
    with pytest.raises(AdaptationError, match="Expected a profile"):
        shiftmend.adapt(world.model, world.target, None, "full-gauss", progress=False)


@pytest.mark.parametrize("shrinkage", [-0.1, 1.1, float("nan"), True, "0.1", None])
def test_impossible_shrinkages_are_one_sentence(shrinkage: object) -> None:
    with pytest.raises(AdaptationError, match=r"shrinkage.*between 0"):
        FullGauss(shrinkage=shrinkage)  # type: ignore[arg-type]


def test_its_published_rate() -> None:
    for name in ("paper-cnn", "tabular"):
        assert FullGauss().rate(Network(ZOO[name].model(), ())) == 1e-3
    assert FullGauss(shrinkage=0.2).hyperparameters() == {
        "epochs": 150, "learning_rate": None, "shrinkage": 0.2, "momentum": 0.9,
    }  # fmt: skip


@pytest.mark.slow
def test_it_needs_no_classes_and_learns_from_a_stream() -> None:
    case = ZOO["regressor"]
    model = case.model()
    profile = shiftmend.profile(model, case.inputs(200), gaussian="full", progress=False)
    result = shiftmend.adapt(
        model,
        case.inputs(200, seed=2) + 0.5,
        profile,
        "full-gauss",
        epochs=5,
        learning_rate=1e-5,
        progress=False,
    )
    assert result.history[-1].loss < result.history[1].loss
    world = crosstalk()
    online = shiftmend.stream(world.model, full_profile(), "full-gauss", learning_rate=0.02)
    losses = []
    for batch in world.target[torch.randperm(1000)].split(50):
        online.step(batch)
        losses.append(online.losses["features"])
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


@pytest.mark.slow
def test_it_runs_under_autocast() -> None:
    world, profile = crosstalk(), full_profile()
    options = {"epochs": 5, "learning_rate": 0.01, "progress": False}
    full = shiftmend.adapt(world.model, world.target, profile, "full-gauss", **options)
    half = shiftmend.adapt(world.model, world.target, profile, "full-gauss", autocast=True, **options)
    assert half.history[-1].loss == pytest.approx(full.history[-1].loss, rel=0.2)
