from __future__ import annotations

import copy
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from worlds import World, sensors

import shiftmend
from shiftmend.errors import AdaptationError
from shiftmend.introspection.input_map import load_adapted_state
from shiftmend.methods import CORAL
from shiftmend.profiles.profile import Profile

METHODS = ("neo", "coral")


def full_profile(world: World) -> Profile:
    return shiftmend.profile(world.model, world.source, gaussian="full", progress=False)


def features_of(model: nn.Module, inputs: Tensor) -> np.ndarray:
    """What the head of a model works on: behind the map, which is a hook of the head that runs first."""
    seen: list[Tensor] = []
    handle = model[-1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore[index, operator]
    with torch.no_grad():
        model(inputs)
    handle.remove()
    return seen[0].double().numpy()


def power(matrix: np.ndarray, exponent: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return vectors @ np.diag(values**exponent) @ vectors.T


def reference(home: np.ndarray, away: np.ndarray, shrinkage: float | None) -> np.ndarray:
    """Features whitened and coloured by numpy."""
    units, samples = home.shape[1], len(away)
    share = units / (units + samples - 1) if shrinkage is None else shrinkage
    source = np.cov(home.T)
    target = np.cov(away.T) if samples > 1 else np.zeros_like(source)
    target = (1 - share) * target + share * source
    ridge = 1e-6 * np.trace(source) / units * np.eye(units)
    return (away - away.mean(0)) @ power(target + ridge, -0.5) @ power(source + ridge, 0.5) + home.mean(0)


def test_neo_moves_the_centroid_home() -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, world.profile(), "neo", progress=False)
    home, away = (features_of(world.model, inputs) for inputs in (world.source, world.target))
    expected = away - away.mean(0) + home.mean(0)
    np.testing.assert_allclose(features_of(result.model, world.target), expected, rtol=1e-4, atol=1e-4)
    assert world.accuracy(result.model) > world.accuracy(world.model) + 0.1
    assert [row.block for row in result.history] == ["", "features"]
    assert result.history[1].signals["slices"] < result.history[0].signals["slices"], "taps see what the head reads"
    for name, tensor in world.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], tensor), "weights and BatchNorm stay as they were"


@pytest.mark.parametrize(("samples", "shrinkage"), [(600, None), (600, 0.3), (20, None), (5, None)])
def test_coral_is_that_of_numpy(samples: int, shrinkage: float | None) -> None:
    world = sensors(norm=False)
    target = world.target[:samples]
    result = shiftmend.adapt(world.model, target, full_profile(world), CORAL(shrinkage=shrinkage), progress=False)
    home, away = (features_of(world.model, inputs) for inputs in (world.source, target))
    found = features_of(result.model, target)
    np.testing.assert_allclose(found, reference(home, away, shrinkage), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(found.mean(0), home.mean(0), rtol=1e-3, atol=1e-3)


def test_coral_without_shrinkage_brings_the_covariance_home() -> None:
    world = sensors(norm=False)
    result = shiftmend.adapt(world.model, world.source * 1.5, full_profile(world), CORAL(shrinkage=0), progress=False)
    found, home = features_of(result.model, world.source * 1.5), features_of(world.model, world.source)
    np.testing.assert_allclose(np.cov(found.T), np.cov(home.T), atol=2e-3 * np.cov(home.T).max())


def test_one_sample_is_only_shifted() -> None:
    world = sensors(norm=False)
    profile = full_profile(world)
    moved = [shiftmend.adapt(world.model, world.target[:1], profile, name, progress=False).model for name in METHODS]
    one, other = (features_of(model, world.target) for model in moved)
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_units_that_are_silent_stay_finite() -> None:
    world = sensors(norm=False)
    model = copy.deepcopy(world.model)
    layer = model[-3]  # type: ignore[index]
    with torch.no_grad():
        layer.weight[0], layer.bias[0] = 0.0, -1.0
    profile = shiftmend.profile(model, world.source, gaussian="full", progress=False)
    result = shiftmend.adapt(model, world.target, profile, "coral", progress=False)
    found = features_of(result.model, world.target)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:, 0], 0, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_maps_are_saved_copied_and_replaced(method: str, tmp_path: Path) -> None:
    world = sensors()
    profile = full_profile(world)
    result = shiftmend.adapt(world.model, world.target, profile, method, progress=False)
    result.save(tmp_path)
    fresh = copy.deepcopy(world.model)
    load_adapted_state(fresh, load_file(tmp_path / "model.safetensors"))
    file = io.BytesIO()
    torch.save(result.model, file)
    file.seek(0)
    with torch.no_grad():
        expected = result.model(world.target)
        assert torch.equal(fresh(world.target), expected)
        assert torch.equal(copy.deepcopy(fresh)(world.target), expected)
        assert torch.equal(torch.load(file, weights_only=False)(world.target), expected)
        exported = torch.export.export(result.model, (world.target,)).module()
        torch.testing.assert_close(exported(world.target), expected)
    again = shiftmend.adapt(result.model, world.target, profile, method, progress=False)
    with torch.no_grad():
        torch.testing.assert_close(again.model(world.target), expected)
    load_adapted_state(fresh, world.model.state_dict())
    assert fresh.state_dict().keys() == world.model.state_dict().keys(), "weights without a map take the map away"


def test_features_that_are_maps_are_mapped_by_channel() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).eval()
    source = torch.randn(50, 2, 5, 5)
    profile = shiftmend.profile(model, source, gaussian="full", progress=False)
    for method in METHODS:
        result = shiftmend.adapt(model, source * 0.5 + 0.3, profile, method, progress=False)
        found, home = features_of(result.model, source * 0.5 + 0.3), features_of(model, source)
        np.testing.assert_allclose(found.mean((0, 2, 3)), home.mean((0, 2, 3)), atol=1e-4)


def test_what_cannot_be_mapped_is_refused() -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match="gaussian='full'"):
        shiftmend.adapt(world.model, world.target, world.profile(), "coral", progress=False)
    with pytest.raises(AdaptationError, match="Expected a profile"):
        shiftmend.adapt(world.model, world.target, None, "neo", progress=False)
    with pytest.raises(AdaptationError, match="shrinkage"):
        CORAL(shrinkage=1.5)
